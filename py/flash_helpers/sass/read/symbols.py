"""Symbols as their authors wrote them."""

from __future__ import annotations

import functools
import re

_MANGLED = re.compile(r"\b_Z\w+")


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


def plain_name(symbol: str) -> str:
    """The name in C++ of a symbol, for a person: without what a terminal would not print."""
    return "".join(c if c.isprintable() else "?" for c in demangled(symbol))


def with_demangled_symbols(text: str) -> str:
    """A text with the names in C++ of the symbols in it."""
    return _MANGLED.sub(lambda match: demangled(match[0]), text) if "_Z" in text else text
