"""Reading PTX files, and finding their kernels by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.console.file_kinds import FileKind, kind_of, mistaken
from flash_helpers.console.symbols import demangled, names_of, short_name
from flash_helpers.ptx.errors import LaunchError, NotPtxError, PtxSyntaxError
from flash_helpers.ptx.read.calls import without_calls
from flash_helpers.ptx.read.module import Function, Module, Symbol
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.ptx.run.kernel import Kernel


@dataclass(frozen=True)
class PtxModule:
    """A loaded PTX file. `file`: its path, for messages."""

    module: Module
    file: str = "PTX"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of all entries, as mangled."""
        return tuple(f.name for f in self.module.entries)

    def kernel(self, name: str) -> Kernel:
        """The entry of this name, mangled or as in C++ (white space does not matter), with its
        namespaces and parameters or without ("scale<float>"); otherwise the only entry whose name
        contains it.

        Raises LaunchError if no entry or several entries match; PtxSyntaxError if the kernel, a
        function that it calls, or a variable that it names cannot be read.
        """
        function = self._entry(name)
        try:
            for called in _called(self.module, function):
                if called.problem is not None:
                    raise called.problem
            return Kernel(self.module, without_calls(self.module, function))
        except PtxSyntaxError as error:
            raise PtxSyntaxError(error.message, error.line, self.file) from None

    def _entry(self, name: str) -> Function:
        function, entries = self.module.functions.get(name), self.module.entries
        if function is not None and function.is_entry:
            return function
        wanted = "".join(name.strip().removeprefix("void ").split())
        names = {f.name: _names(f.name) for f in entries}
        found = [f for f in entries if wanted in names[f.name]]
        if not found:
            found = [f for f in entries if any(wanted in n for n in (f.name, *names[f.name]))]
        if len(found) != 1:
            problem = "no kernel is named" if not found else "several kernels are named"
            raise LaunchError(f"{problem} {name!r}; the file holds\n  {_listed(found or entries)}")
        return found[0]


_LISTED, _LONGEST_NAME = 10, 110
"""Kernels that a message lists, and the characters of each."""


def _listed(entries: Sequence[Function]) -> str:
    """Names of kernels in C++, one a line."""
    if not entries:
        return "(none)"
    names = [demangled(f.name) for f in entries[:_LISTED]]
    lines = [n if len(n) <= _LONGEST_NAME else short_name(n, _LONGEST_NAME) for n in names]
    if len(entries) > _LISTED:
        lines.append(f"… {len(entries) - _LISTED} more")
    return "\n  ".join(lines)


def _names(symbol: str) -> tuple[str, ...]:
    """As `names_of`, without white space."""
    return tuple("".join(name.split()) for name in names_of(symbol))


def _called(module: Module, function: Function) -> Iterator[Function]:
    """The function, and all functions that it may call, directly or not."""
    found, todo = {function.name}, [function]
    while todo:
        function = todo.pop()
        yield function
        calls = (i for i in function.instructions if i.name == "call")
        for name in {o.name for call in calls for o in call.operands if isinstance(o, Symbol)}:
            if name in module.functions and name not in found:
                found.add(name)
                todo.append(module.functions[name])


def _is_text(source: str) -> bool:
    """Whether a string is PTX rather than a path."""
    without_comments = re.sub(r"/\*.*?(?:\*/|$)", "", source)
    return "\n" in source or "\0" in source or without_comments.lstrip().startswith(".version")


def load_ptx(source: str | bytes | Path) -> PtxModule:
    """Reads PTX, given as text, as bytes (which may end with NUL), or as the path of a file. A
    string of one line is text if it begins with `.version`, comments aside, else a path.

    A function or variable with unknown syntax is an error only for kernels that use it, when they
    are asked for (`PtxModule.kernel`).

    Raises PtxSyntaxError for a text that is no complete PTX module, NotPtxError for content of
    another kind, OSError for a file that cannot be read.
    """
    if isinstance(source, str) and _is_text(source):
        source = source.encode(errors="replace")
    if isinstance(source, bytes):
        data, file = source, "PTX"
        kind = kind_of(data)
        if kind not in (None, FileKind.PTX):
            raise NotPtxError(f"the text is {kind.value}, not PTX")
    else:
        data, file = Path(source).read_bytes(), str(source)
        if error := mistaken(source, data, FileKind.PTX):
            raise NotPtxError(error)
    if b"\0" in data.rstrip(b"\0"):
        raise NotPtxError(f"{file} is not PTX: it holds bytes that no text does")
    try:
        return PtxModule(read_ptx(data.decode(errors="replace").rstrip("\0")), file)
    except PtxSyntaxError as error:
        raise PtxSyntaxError(error.message, error.line, file) from None
