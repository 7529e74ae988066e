"""NVRTC, the compiler that PyTorch brings, as a child process: one unit to PTX and machine code.

NVRTC is a library. It has no standard library of C++, so the headers in `headers` stand in, and no
host code: `-default-device` makes device code of functions without a qualifier. It puts the working
directory in front of every relative file name in PTX, line tables and messages. So the sources are
handed over as texts whose `#line` gives their names relative to the root, and the compiler runs in
a folder that is gone, of which it knows no name.

Standard library only: the process starts in a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADERS = Path(__file__).with_name("headers")
SOURCE_FOLDERS = ("src/include", ".")
"""Folders below the root in which the sources look for a header, after their own."""

_COMPILATION_FAILED = 6  # NVRTC, "nvrtcResult": NVRTC_ERROR_COMPILATION
_INCLUDE = re.compile(
    r'((?:^[ \t]*#[ \t]*include|__has_include[ \t]*\()[ \t]*)(["<])([^">\n]+)[">]', re.MULTILINE
)


class NvrtcError(Exception):
    """The library cannot be used; the message says why."""


@dataclass(frozen=True)
class Output:
    """Output of one compilation. `log`: messages of NVRTC and ptxas. `cubin`: empty for a virtual
    target. PTX and cubin are empty if the unit is wrong."""

    log: str
    ptx: str
    cubin: bytes


class Nvrtc:
    """A loaded NVRTC library.

    Raises NvrtcError if it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            # NVRTC asks for this library by name, and looks in no folder of its own.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins*.so*")):
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(str(path))
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NvrtcError(f"{path} is not a library of NVRTC: {error}") from error

    def version(self) -> tuple[int, int]:
        """CUDA release, e.g. (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def build(self) -> str:
        """Version and number of the build, e.g. "13.0.88 CL-36424714", which only PTX tells."""
        architecture = max(self.architectures())
        ptx = self.compile("", "empty", [f"--gpu-architecture=compute_{architecture}"], {}).ptx
        found = [re.search(pattern, ptx) for pattern in (r"\bV([\d.]+)", r"Build ID: (\S+)")]
        return " ".join(match[1] for match in found if match)

    def architectures(self) -> frozenset[int]:
        """Compute capabilities times ten that it compiles for, e.g. 90 for sm_90 and sm_90a."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return frozenset(numbers)

    def compile(
        self, text: str, name: str, flags: Sequence[str], headers: Mapping[str, str]
    ) -> Output:
        """Compile `text`, which messages call `name`.

        `headers`: their texts by the names that `#include` has for them.

        Raises NvrtcError for a flag that NVRTC does not know, and for a fault of its own.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(flags), _strings(flags))
            log = self._text(program, "ProgramLog")
            if status == _COMPILATION_FAILED:
                return Output(log, "", b"")
            if status:
                raise NvrtcError(f"{self._reason(status)}\n{log}".strip())
            return Output(log, self._text(program, "PTX"), self._bytes(program, "CUBIN"))
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if size.value:
            self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise NvrtcError(f"{function}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def standard_headers() -> dict[str, str]:
    """The headers that stand in for those of the standard library and the driver, by name."""
    return {path.name: path.read_text() for path in sorted(HEADERS.iterdir())}


def gather_sources(root: Path, text: str) -> tuple[str, dict[str, str]]:
    """A unit's text and those of the headers that it includes, directly or not, by name: relative
    to the root, which must be resolved. Their `#include` lines have these names, too."""
    headers: dict[str, str] = {}
    folders = [root / folder for folder in SOURCE_FOLDERS]

    def follow(text: str, own: Sequence[Path] = ()) -> str:
        def renamed(include: re.Match[str]) -> str:
            places = [*own, *folders] if include[2] == '"' else folders
            found = (file for place in places if (file := place / include[3]).is_file())
            if (path := next(found, None)) is None:
                return include[0]  # of the standard library, left out by a condition, or an error
            name = os.path.relpath(path.resolve(), root)
            if name not in headers:
                headers[name] = ""  # so that a circle of headers ends
                headers[name] = f'#line 1 "{name}"\n{follow(path.read_text(), [path.parent])}'
            return f'{include[1]}"{name}"'

        return _INCLUDE.sub(renamed, text)

    return follow(text), headers


@contextlib.contextmanager
def _no_working_folder() -> Iterator[None]:
    """Run the body in a folder that is gone."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def compile_unit(library: Path, unit: Path, root: Path, flags: Sequence[str]) -> Output:
    """Compile a file by the NVRTC at `library`, with the sources at `root`.

    Raises NvrtcError, and OSError for a file that cannot be read.
    """
    text, headers = gather_sources(root.resolve(), unit.read_text())
    nvrtc = Nvrtc(library.resolve())
    with _no_working_folder():
        return nvrtc.compile(text, unit.name, flags, {**standard_headers(), **headers})


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile one unit as the command line says; print the log, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="flash_helpers.compile.nvrtc",
        description="Compile a unit with the working directory as the root of its sources.",
    )
    parser.add_argument("library", type=Path, help="libnvrtc.so")
    parser.add_argument("unit", type=Path)
    parser.add_argument("scratch", type=Path, help="folder for kernel.ptx and kernel.cubin")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="options of NVRTC")
    asked = parser.parse_args(arguments)
    # What NVRTC takes from a cache of its own comes without the messages of ptxas
    # (github.com/NVIDIA/cuda-python/issues/1124), in which losses show; and it is cached by us.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        output = compile_unit(asked.library, asked.unit, Path.cwd(), asked.flags)
        if output.ptx:
            (asked.scratch / "kernel.ptx").write_text(output.ptx)
        if output.cubin:
            (asked.scratch / "kernel.cubin").write_bytes(output.cubin)
    except (NvrtcError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.buffer.write(f"{output.log.rstrip()}\n".encode())
    return 0 if output.ptx else 1
