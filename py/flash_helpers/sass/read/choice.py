"""Which kernels of a file are meant by a name. Standard library only."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from flash_helpers.sass.read.records import SassError, SassWarning

_SHOWN = 16  # names in an error
# Itanium C++ ABI, "Mangling": literals and substitutions, whose digits are no length; the length of
# a name, which may be the type of a literal.
_MANGLED = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|(?P<literal>L)?(?P<length>\d+)")

Found = tuple[str, str]  # architecture such as "sm_90", and symbol; "" where a listing tells none


@functools.cache
def identifiers(symbol: str) -> tuple[str, ...]:
    """The names in a symbol, demangled or as object files have it: of namespaces, of the function,
    of types and of its template's arguments."""
    if not symbol.startswith("_Z"):
        return tuple(re.findall(r"[\w$]+", symbol))
    found, at = [], 2
    while part := _MANGLED.search(symbol, at):
        at = part.end()
        if part["length"]:
            found.append(symbol[at : at + int(part["length"])])
            at += len(found[-1])
        if part["literal"]:
            at = max(at, symbol.find("E", at))
    return tuple(found)


def matching(symbols: Sequence[str], name: str) -> list[str]:
    """The symbols that a name means: those that a pattern with * or ? matches; otherwise itself, or
    else those of which it is an identifier, or else those of which it is a part that cuts no number
    in two: v1 is no part of v11."""
    if "*" in name or "?" in name:
        return [symbol for symbol in symbols if fnmatchcase(symbol, name)]
    before = r"(?<!\d)" if name[:1].isdigit() else ""
    after = r"(?!\d)" if name[-1:].isdigit() else ""
    part = re.compile(before + re.escape(name) + after)
    for is_meant in (
        lambda symbol: name == symbol,
        lambda symbol: name in identifiers(symbol),
        lambda symbol: any(map(part.search, (*identifiers(symbol), symbol))),
    ):
        if found := [symbol for symbol in symbols if is_meant(symbol)]:
            return found
    return []


def choose(
    file: str,
    there: Sequence[Found],
    architecture: str | None = None,
    names: Iterable[str] = (),
) -> list[Found]:
    """The kernels of a file that are asked for, in its order.

    there: all of them. architecture: None takes any; sm_120 takes kernels for its variants sm_120a
    and sm_120f, too, that there are none of for sm_120, which a `SassWarning` tells. names: as for
    `matching`; without any, all.

    Raises SassError, saying what there is, for an architecture or a name that is not there.
    """
    own = {symbol for found, symbol in there if found == architecture}
    here = [
        (found, symbol)
        for found, symbol in there
        if architecture in (None, found)
        or (found.rstrip("af") == architecture and symbol not in own)  # sm_90a, sm_120f
    ]
    if not here:
        known = sorted({found or "an architecture it does not name" for found, _ in there})
        raise SassError(f"{file} holds no kernel for {architecture}, only for {', '.join(known)}")
    symbols = sorted({symbol for _, symbol in here})
    wanted: set[str] = set()
    for name in names:
        found = matching(symbols, name)
        if not found:
            raise SassError(f"{file} holds no kernel {name!r}, only {_listed(symbols)}")
        wanted.update(found)
    chosen = [found for found in here if found[1] in wanted] if wanted else here
    variants = sorted({found for found, _ in chosen} - {architecture})
    if architecture is not None and variants:
        told = f"{file}: {architecture} includes what there is for {', '.join(variants)} alone"
        warnings.warn(told, SassWarning, stacklevel=1)
    return chosen


def require_one_architecture(file: str, chosen: Iterable[Found]) -> str:
    """The architecture of chosen kernels. Raises SassError for several."""
    architectures = sorted({architecture for architecture, _ in chosen})
    if len(architectures) > 1:
        raise SassError(f"{file} holds code for {', '.join(architectures)}: choose one with --arch")
    return architectures[0]


def require_one(file: str, chosen: Sequence[Found]) -> None:
    """Raise SassError, saying what they can be told apart by, if several kernels are chosen."""
    require_one_architecture(file, chosen)
    if len(chosen) > 1:
        listed = _listed([symbol for _, symbol in chosen])
        raise SassError(f"{file} holds {len(chosen)} such kernels: name one of {listed}")


def _listed(symbols: Sequence[str]) -> str:
    """The symbols, each by the longest identifier that it alone has, if there is one."""
    names = [
        max(
            (name for name in identifiers(symbol) if matching(symbols, name) == [symbol]),
            key=len,
            default=symbol,
        )
        for symbol in symbols[:_SHOWN]
    ]
    more = f" and {len(symbols) - _SHOWN} more" if len(symbols) > _SHOWN else ""
    return ", ".join(names) + more
