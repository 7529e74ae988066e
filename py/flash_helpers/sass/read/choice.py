"""Choice of kernels of a file by name. Standard library only, but for names in C++."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flash_helpers.sass.read.records import SassError, SassWarning
from flash_helpers.sass.read.symbols import demangled, plain_name

# Help of the tools for their argument: a file and a kernel of it.
NAMED_SO = (
    "FILE#NAME is a kernel of a file, FILE@MEMBER#NAME that of one cubin in it; NAME: its symbol, "
    "its name in C++, or a part of either"
)

_SHOWN = 16  # names in an error
# Itanium C++ ABI, "Mangling": literals and substitutions, whose digits are no length; the length of
# a name, which may be the type of a literal.
_MANGLED = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|(?P<literal>L)?(?P<length>\d+)")
_OF_ANY_SYMBOL = re.compile(r"[\w$.]*")

Found = tuple[str, str]  # architecture such as "sm_90", and symbol; "" where a listing tells none


@dataclass(frozen=True)
class KernelPath:
    """A file and the choice of its kernels. `member`: (a part of) the name of a cubin in the file.
    `name`: name of the kernel, as in `matching`. Each is "" for any."""

    path: Path
    member: str = ""
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> KernelPath:
        """The path in FILE, FILE#NAME or FILE@MEMBER#NAME. If a text can be read in several ways,
        the reading whose file exists is taken, since names of files, as names in C++, may hold a #
        and an @."""
        ways = [cls(Path(text)), *_ways(text)]
        # Path.is_file raises OSError for a name that is too long, as those in C++ may be
        there = (way for way in ways if os.path.isfile(way.path))  # noqa: PTH113
        return next(there, ways["#" in text])

    @property
    def names(self) -> list[str]:
        """The kernel's name as a tuple, empty without one."""
        return [self.name] if self.name else []

    def __str__(self) -> str:
        return (
            f"{self.path}{'@' * bool(self.member)}{self.member}{'#' * bool(self.name)}{self.name}"
        )


def _ways(text: str) -> Iterator[KernelPath]:
    """The ways in which a text with a # or an @ can be read."""
    for number in re.finditer("#", text):
        before, name = text[: number.start()], text[number.end() :]
        yield KernelPath(Path(before), "", name)
        for at in re.finditer("@", before):
            yield KernelPath(Path(before[: at.start()]), before[at.end() :], name)
    for at in re.finditer("@", text):
        yield KernelPath(Path(text[: at.start()]), text[at.end() :])


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
    """The symbols that a name means, by the first rule that finds any. The rules are: the symbol
    itself, mangled or in C++; a pattern with * or ?; an identifier of the symbol; a part of the
    symbol or of its name in C++. A part cuts no number in two: v1 is no part of v11. Blanks in C++
    do not matter."""
    if name in symbols:
        return [symbol for symbol in symbols if symbol == name]
    if _OF_ANY_SYMBOL.fullmatch(name.replace("*", "").replace("?", "")):
        shown, wanted = _as_it_is, name
    else:
        shown, wanted = _in_cpp, _without_blanks(name)
    if found := [symbol for symbol in symbols if wanted == shown(symbol)]:
        return found
    before = r"(?<!\d)" if wanted[:1].isdigit() else ""
    after = r"(?!\d)" if wanted[-1:].isdigit() else ""
    part = re.compile(before + re.escape(wanted) + after)
    tests: list[Callable[[str], bool]] = [
        lambda symbol: wanted in identifiers(symbol),
        lambda symbol: any(map(part.search, (*identifiers(symbol), shown(symbol)))),
    ]
    if "*" in name or "?" in name:
        # in C++ an asterisk may be one
        tests = [*tests[: 2 * (shown is _in_cpp)], lambda s: fnmatchcase(shown(s), wanted)]
    for is_meant in tests:
        if found := [symbol for symbol in symbols if is_meant(symbol)]:
            return found
    return []


def _as_it_is(symbol: str) -> str:
    return symbol


def _without_blanks(text: str) -> str:
    return "".join(text.split())


@functools.lru_cache(maxsize=1 << 14)
def _in_cpp(symbol: str) -> str:
    return _without_blanks(demangled(symbol))


def choose(
    file: str, there: Sequence[Found], architecture: str | None = None, names: Iterable[str] = ()
) -> list[Found]:
    """The kernels of a file that are asked for, in its order.

    `there`: all kernels of the file. `architecture`: None takes any. sm_120 also takes kernels that
    exist only for its variants sm_120a and sm_120f, with a `SassWarning`. `names`: names as in
    `matching`; without names, all.

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
            raise SassError(f"{file} holds no kernel {name!r}, only {listed(symbols)}")
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
    """Raise SassError if several kernels are chosen, of one symbol or of several. The message says
    how to tell them apart."""
    symbols = list(dict.fromkeys(symbol for _, symbol in chosen))
    if len(symbols) > 1:
        raise SassError(f"{file} holds {len(symbols)} such kernels: name one of {listed(symbols)}")
    require_one_architecture(file, chosen)


def require_one_member(file: str, symbol: str, members: Sequence[str]) -> None:
    """Raise SassError if a kernel is in several members of a file."""
    if len(members) > 1:
        shown = ", ".join(members[:_SHOWN]) + _and_more(members)
        raise SassError(
            f"{file} holds {len(members)} kernels {plain_name(symbol)}, in {shown}: name one of "
            f"these, such as {file}@{members[0]}#{symbol}"
        )


def members_named(file: str, there: Sequence[str], name: str) -> set[str]:
    """The members of a file that a name means: the member of that name, or else all members that
    contain it. Raises SassError if there is none."""
    found = {member for member in there if member == name}
    found = found or {member for member in there if name in member}
    if not found:
        known = ", ".join(there[:_SHOWN]) + _and_more(there)
        raise SassError(f"{file} has no member {name!r}, only {known or 'itself'}")
    return found


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""


def listed(symbols: Sequence[str]) -> str:
    """The first of some symbols. Each is given by its longest identifier that no other symbol has,
    or else by its name in C++."""
    count = Counter(name for symbol in symbols for name in set(identifiers(symbol)))
    names = [
        max(
            (name for name in identifiers(symbol) if count[name] == 1),
            key=len,
            default=plain_name(symbol),
        )
        for symbol in symbols[:_SHOWN]
    ]
    return ", ".join(names) + _and_more(symbols)
