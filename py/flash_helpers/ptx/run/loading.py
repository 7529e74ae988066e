"""Reading PTX files, and finding their kernels by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.console.file_kinds import FileKind, kind_of, mistaken
from flash_helpers.console.symbols import demangled
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
            there = "\n  ".join(demangled(f.name) for f in found or entries) or "(none)"
            raise LaunchError(f"{problem} {name!r}; the file holds\n  {there}")
        return found[0]


def _names(symbol: str) -> tuple[str, ...]:
    """Names of a symbol in C++, without white space: the whole name; without result and parameters;
    without namespaces."""
    whole = demangled(symbol).removeprefix("void ")
    start, end, depth = 0, len(whole), 0
    for i, character in enumerate(whole):
        if depth == 0 and whole.startswith("::", i):
            start, end = i + 2, len(whole)
        elif depth == 0 and character == "(":
            end = i
        depth += (character in "<(") - (character in ">)")
    return tuple("".join(n.split()) for n in (whole, whole[:end], whole[start:end]))


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
