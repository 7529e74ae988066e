"""C++ names of symbols in object files."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1 << 14)  # a library may have 100,000 symbols of a kilobyte each
def demangled(symbol: str) -> str:
    """The C++ name of a symbol, with the types of its arguments; for any other text the text.

    cxxfilt asks the C++ runtime, which PyTorch brings or needs.
    """
    import cxxfilt

    try:
        return cxxfilt.demangle(symbol)
    except cxxfilt.InvalidName:
        return symbol
