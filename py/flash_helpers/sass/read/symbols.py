"""Symbols as their authors wrote them."""

from __future__ import annotations

import re

from flash_helpers.console.symbols import demangled

_MANGLED = re.compile(r"\b_Z\w+")


def plain_name(symbol: str) -> str:
    """The C++ name of a symbol for a reader, without characters that a terminal would not print."""
    return "".join(c if c.isprintable() else "?" for c in demangled(symbol))


def with_demangled_symbols(text: str) -> str:
    """A text with the names in C++ of the symbols in it."""
    return _MANGLED.sub(lambda match: demangled(match[0]), text) if "_Z" in text else text
