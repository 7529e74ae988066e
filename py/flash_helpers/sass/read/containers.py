"""Files that hold cubins: a cubin itself, a fatbin, an object file, a library, a program.

cuobjdump takes them apart, since members may be compressed.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.console.file_kinds import (
    ARCHIVE_MAGIC,
    ELF_MAGIC,
    EM_CUDA,
    FATBIN_MAGIC,
    FileKind,
    elf_machine,
    mistaken,
)
from flash_helpers.sass.read.disassembler import Disassembler, find_disassembler, run_program
from flash_helpers.sass.read.elf import read_elf
from flash_helpers.sass.read.records import SassError

_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the rest
_FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_MEMBER = re.compile(r"^Extracting (?:ELF|PTX) file.*?\s\d+: (\S+)", re.MULTILINE)

_NO_DEVICE_CODE = "does not contain device code"


@dataclass(frozen=True)
class Member:
    """A cubin or a PTX module of a file.

    path: where it lies now. origin: the file, and the member's name in it. architecture: as its
    name tells, such as "sm_90a"; None if it does not.
    """

    path: Path
    origin: str
    architecture: str | None


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises SassError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SassError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def cubins_of(path: Path, required: bool = True) -> Iterator[list[Member]]:
    """The cubins in a file; those that had to be extracted vanish afterwards.

    required: whether a file that holds only PTX will not do. Raises SassError for such a file, for
    one of another kind, one without device code, and one that is damaged.
    """
    if elf_machine(_content(path)) == EM_CUDA:
        yield [Member(path.absolute(), str(path), None)]
        return
    with tempfile.TemporaryDirectory(prefix="cubins-") as folder:
        members = _extract(path, "elf", Path(folder))
        if required and not members:
            raise SassError(f"{path} holds no cubin, only PTX: compile it for an architecture")
        yield members


def ptx_of(path: Path) -> dict[str, str]:
    """The PTX modules that a file carries for later compilation, by the member's name.

    Empty for a cubin, which has none. Raises SassError as `cubins_of` does.
    """
    if elf_machine(_content(path)) == EM_CUDA:
        return {}
    with tempfile.TemporaryDirectory(prefix="ptx-") as folder:
        return {
            member.path.name: read_bytes(member.path).decode(errors="replace").rstrip("\0")
            for member in _extract(path, "ptx", Path(folder))
        }


def _content(path: Path) -> bytes:
    data = read_bytes(path)
    if not data.startswith((ELF_MAGIC, FATBIN_MAGIC, ARCHIVE_MAGIC)):
        raise SassError(
            mistaken(path, data, FileKind.CUBIN)
            or f"{path} is not an ELF file (cubin, object file, library, program), a fatbin or an "
            "archive"
        )
    return data


def _extract(path: Path, kind: str, folder: Path) -> list[Member]:
    """Everything of one kind, "elf" or "ptx", in a file."""
    cuobjdump = find_disassembler("cuobjdump")
    names = _extract_into(cuobjdump, path.absolute(), kind, folder)
    # A linked library may hold members of one name, of which cuobjdump leaves only the last
    if max(Counter(names).values(), default=0) == 1:
        return _members(path, folder, names)
    members = []
    for index, fatbin in enumerate(_fatbins(path)):
        own_folder = folder / str(index)
        own_folder.mkdir()
        piece = own_folder / "piece.fatbin"
        piece.write_bytes(fatbin)
        own_names = _extract_into(cuobjdump, piece, kind, own_folder)
        if len(set(own_names)) < len(own_names):
            raise SassError(f"{path} holds several members of one name in one fatbin: {own_names}")
        members += _members(path, own_folder, own_names)
    if sorted(member.path.name for member in members) != sorted(names):
        raise SassError(f"{path} is damaged: its fatbins do not hold what cuobjdump lists")
    return members


def _extract_into(cuobjdump: Disassembler, path: Path, kind: str, folder: Path) -> list[str]:
    try:
        said = run_program(cuobjdump.path, f"-x{kind}", "all", path, folder=folder)
    except SassError as error:
        if _NO_DEVICE_CODE in str(error):
            data = path.read_bytes()
            if data.startswith(ELF_MAGIC):
                read_elf(data, str(path))  # cuobjdump says the same of a file that is cut off
            raise SassError(f"{path} holds no device code") from error
        raise
    return _MEMBER.findall(said)


def _members(path: Path, folder: Path, names: Sequence[str]) -> list[Member]:
    members = []
    for name in names:
        architecture = re.search(r"\.(sm_\w+)\.\w+$", name)
        members.append(
            Member(folder / name, f"{path}:{name}", architecture[1] if architecture else None)
        )
    return members


def _fatbins(path: Path) -> list[bytes]:
    """The fatbins in a file's fatbin sections, or the file itself."""
    data = read_bytes(path)
    if data.startswith(FATBIN_MAGIC):
        parts = [data]
    elif data.startswith(ELF_MAGIC):
        _, sections, _ = read_elf(data, str(path))
        parts = [section.data for section in sections if section.name in _FATBIN_SECTIONS]
    else:
        raise SassError(
            f"{path} holds several members of one name: unpack it (ar x) and name an object file"
        )
    fatbins = []
    for part in parts:
        at = part.find(FATBIN_MAGIC)
        while at >= 0 and at + _FATBIN_HEADER.size <= len(part):
            _, _, header_bytes, rest_bytes = _FATBIN_HEADER.unpack_from(part, at)
            end = at + header_bytes + rest_bytes
            fatbins.append(part[at:end])
            at = part.find(FATBIN_MAGIC, end)
    return fatbins
