"""Symbols of object files as their authors wrote them."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1 << 14)  # a library may have a hundred thousand, each a kilobyte
def demangled(symbol: str) -> str:
    """The name in C++ of a symbol, with its arguments; of anything else, the symbol.

    cxxfilt asks the C++ runtime, which PyTorch brings or needs, for its own reading of a name.
    """
    import cxxfilt

    try:
        return cxxfilt.demangle(symbol)
    except cxxfilt.InvalidName:
        return symbol
