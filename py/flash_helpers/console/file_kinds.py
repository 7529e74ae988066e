"""Kind of a user's file, for the error message when a tool wants another kind. Standard library
only.

The kind follows from the content, not from the file's name.
"""

from __future__ import annotations

import re
import shlex
from enum import Enum
from pathlib import Path

ELF_MAGIC = b"\x7fELF"
FATBIN_MAGIC = (0xBA55ED50).to_bytes(4, "little")
ARCHIVE_MAGIC = b"!<arch>\n"
LTO_IR_MAGIC = b"\xedCN\x7f"
ELF_HEADER_BYTES = 64
EM_CUDA = 190
_TAR_AT = slice(257, 262)
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class FileKind(Enum):
    """Kinds of files that tools read or may be given by mistake. The value is the kind in words."""

    CUBIN = "a cubin"
    ELF = "an object file, library or program"
    FATBIN = "a fatbin"
    ARCHIVE = "an archive of object files"
    SASS = "a listing of SASS"
    PTX = "PTX"
    LOG = "what ptxas -v says"
    CUDA = "CUDA C++"
    LTO_IR = "LTO IR"
    PACKED = "packed"

    @property
    def has_machine_code(self) -> bool:
        """Whether it may hold machine code."""
        return self in _MACHINE_CODE


_MACHINE_CODE = (FileKind.CUBIN, FileKind.ELF, FileKind.FATBIN, FileKind.ARCHIVE)

# Marks of text files; the first that occurs tells the kind.
_TEXTS = {
    FileKind.SASS: re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s", re.MULTILINE),
    FileKind.PTX: re.compile(r"^\s*\.version\s+\d+\.\d+", re.MULTILINE),
    FileKind.LOG: re.compile(r"^ptxas (info|warning)\s*:", re.MULTILINE),
    FileKind.CUDA: re.compile(r"^\s*#\s*include\b|\b__(global|device)__\b", re.MULTILINE),
}


def elf_machine(data: bytes) -> int | None:
    """The field e_machine in an ELF file's first bytes; None for other files."""
    if len(data) < ELF_HEADER_BYTES or not data.startswith(ELF_MAGIC):
        return None
    return int.from_bytes(data[18:20], "little")


def kind_of(data: bytes) -> FileKind | None:
    """Return the kind of a file with this content; None for any other."""
    if data.startswith(ELF_MAGIC):
        return FileKind.CUBIN if elf_machine(data) == EM_CUDA else FileKind.ELF
    if data.startswith(FATBIN_MAGIC):
        return FileKind.FATBIN
    if data.startswith(ARCHIVE_MAGIC):
        return FileKind.ARCHIVE
    if data.startswith(LTO_IR_MAGIC):
        return FileKind.LTO_IR
    if data.startswith(tuple(_PACKED)) or data[_TAR_AT] == b"ustar":
        return FileKind.PACKED
    if b"\0" in data.rstrip(b"\0"):  # PTX may end with one
        return None
    text = data.decode(errors="replace")
    return next((kind for kind, mark in _TEXTS.items() if mark.search(text)), None)


LINK_LTO_IR = "link it with nvcc -dlink -dlto -cubin, or compile it for code=sm_90"
# The way out, by the kind that is wanted and the kind of the file.
_COMPILE_PTX = "compile it with ptxas -arch=sm_90 {file} -o out.cubin"
_REPORT = dict.fromkeys(_MACHINE_CODE, "use python tools/analysis/sass_report.py {file}")
_WAYS_OUT = {
    FileKind.PTX: {
        # These kinds may hold PTX for later compilation.
        **dict.fromkeys(
            _MACHINE_CODE, "use python tools/build/get_embedded_ptx_from_cubin.py {file}"
        ),
        FileKind.CUBIN: _REPORT[FileKind.CUBIN],
        FileKind.CUDA: "compile it with nvcc -ptx -lineinfo {file}",
    },
    FileKind.CUBIN: {
        FileKind.PTX: f"use python tools/debug/debug.py --ptx {{file}}, or {_COMPILE_PTX}",
        FileKind.CUDA: "compile it with nvcc -cubin -lineinfo -arch=sm_90 {file}",
    },
    FileKind.SASS: {
        **dict.fromkeys(_MACHINE_CODE, "use python tools/build/extract_sass.py {file}"),
        FileKind.PTX: _COMPILE_PTX,
        FileKind.CUDA: "compile it with nvcc -cubin -lineinfo -arch=sm_90 {file}",
    },
    FileKind.LOG: {
        **_REPORT,
        FileKind.PTX: "compile it with ptxas -v -arch=sm_90 {file}",
        FileKind.CUDA: "compile it with nvcc -Xptxas -v -arch=sm_90 -c {file}",
    },
}
_USUAL_WAYS_OUT = {
    FileKind.SASS: "use tools/analysis/count_sass_instructions.sh {file}",
    FileKind.LOG: "use python tools/build/parse_ptx_build.py {file}",
    FileKind.PACKED: "unpack it",
    FileKind.LTO_IR: LINK_LTO_IR,
}


def mistaken(file: Path | str, data: bytes, wanted: FileKind) -> str | None:
    """Message that a file is of another kind, with the way out: "k.ptx is a cubin, not PTX: use …".

    file: as it was typed. wanted: PTX, SASS, LOG, or CUBIN for all kinds that may hold machine
    code. data: the file's content.

    Returns None for a file of the wanted kind, or of an unknown kind.
    """
    kind = kind_of(data)
    if kind in (None, wanted) or (wanted is FileKind.CUBIN and kind.has_machine_code):
        return None
    found = next((name for magic, name in _PACKED.items() if data.startswith(magic)), "tar")
    told = f"{kind.value} ({found})" if kind is FileKind.PACKED else kind.value
    way_out = {**_USUAL_WAYS_OUT, **_WAYS_OUT[wanted]}[kind]
    return f"{file} is {told}, not {wanted.value}: {way_out.format(file=shlex.quote(str(file)))}"
