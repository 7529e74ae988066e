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


def names_of(symbol: str) -> tuple[str, str, str]:
    """Names of a symbol in C++: the whole name; without result and parameters; without namespaces
    too."""
    whole = demangled(symbol).removeprefix("void ")
    start, end, depth = 0, len(whole), 0
    for i, character in enumerate(whole):
        if depth == 0 and whole.startswith("::", i):
            start, end = i + 2, len(whole)
        elif depth == 0 and character == "(":
            end = i
        depth += (character in "<(") - (character in ">)")
    return whole, whole[:end], whole[start:end]


def short_name(symbol: str, most: int = 100) -> str:
    """The C++ name of a symbol for a message, of at most `most` characters: without result and
    parameters, and with as many levels of its template arguments as there is room for."""
    name = names_of(symbol)[1]
    for levels in (4, 3, 2, 1, 0):
        if len(name) > most:
            name = _without_arguments(name, levels)
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _without_arguments(name: str, levels: int) -> str:
    """A name with "…" for template arguments inside more than so many others."""
    kept, depth = [], 0
    for character in name:
        depth -= character == ">"
        if depth <= levels:
            kept.append(character)
        if character == "<":
            if depth == levels:
                kept.append("…")
            depth += 1
    return "".join(kept)
