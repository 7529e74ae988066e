"""Files that hold cubins: a cubin, a fatbin, an object file, a library, a program, an archive.

The fatbins in them are walked here, since cuobjdump extracts all members, writes members of one
name over each other and gives up at unknown ones. NVIDIA does not describe their layout: it was
read from files that nvcc 13.0 made for each kind, architecture and compression. A program may hold
fatbins as data of its own, too, outside of the sections that nvcc makes. Nothing is copied or
unpacked until it is asked for. A part that cannot be read causes a `SassWarning`, and the rest
of the file is read.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

import lz4.block

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from flash_helpers.console.file_kinds import (
    ARCHIVE_MAGIC,
    ELF_HEADER_BYTES,
    ELF_MAGIC,
    EM_CUDA,
    FATBIN_MAGIC,
    LINK_LTO_IR,
    FileKind,
    elf_machine,
    mistaken,
)
from flash_helpers.sass.read.cubin import (
    FIRST_ARCHITECTURE,
    Cubin,
    cubin_capability,
    read_cubin,
)
from flash_helpers.sass.read.elf import Content, read_sections
from flash_helpers.sass.read.records import SassError, SassWarning

MAX_MEMBER_BYTES = (1 << 31) - 1  # unpacked

_FORGET_EVERY = 64  # members

_FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the rest
# kind, size of this header, size of what follows it, packed size, architecture, place and size of
# the name, flags, unpacked size
_MEMBER = struct.Struct("<H2xIQI8xIIIQ8xQ")
_LINKED, _UNLINKED = ".nv_fatbin", "__nv_relfatbin"  # sections
_SHT_PROGBITS, _SHF_EXECINSTR = 1, 4
_FIND_FATBIN = re.compile(re.escape(FATBIN_MAGIC))
# of the flags
_PACKED_BY = {0x2000: "LZ4", 0x8000: "zstd"}
_UNKNOWN = "unknown"
_VARIANTS, _VARIANT_BITS = {0x100000: "a", 0x200000: "f"}, 0x300000  # as in sm_90a, sm_120f

_ENTRY = struct.Struct("<16s32x10s2s")  # name; date, owner, group, mode; size; end mark
_ENTRY_END = b"`\n"
_GNU_LONG_NAMES, _BSD_LONG_NAME = b"//", b"#1/"


class MemberKind(Enum):
    """The kind of a member of a fatbin. The values: the number in its header, the suffix of its
    name, its description, and the step that makes machine code of it."""

    PTX = (1, "ptx", "PTX", "compile it for an architecture")
    CUBIN = (2, "cubin", "machine code", "")
    LTO_IR = (8, "ltoir", "LTO IR", f"no machine code: {LINK_LTO_IR}")


_KINDS = {kind.value[0]: kind for kind in MemberKind}


@dataclass(frozen=True, eq=False)
class Member:
    """A cubin, a PTX module or LTO IR in a file.

    `path`: path of the file. `name`: differs from the name of every other member of the file; "" if
    the member is the file. `architecture`: from its header, such as "sm_90a"; None without one.
    `stored`: its content as it lies in the file. `packed_by`: "LZ4", "zstd" or "unknown"; "" if it
    is not compressed. `size`: bytes of the unpacked content. `is_linked`: False for code
    that is to be linked on the device.
    """

    path: Path
    name: str
    kind: MemberKind
    architecture: str | None
    stored: Content = field(repr=False)
    packed_by: str = ""
    size: int = 0
    is_linked: bool = True

    @property
    def origin(self) -> str:
        """The file, and the member's name in it."""
        return f"{self.path}:{self.name}" if self.name else str(self.path)

    @property
    def capability(self) -> int:
        """Compute capability, such as 90 for sm_90a."""
        if self.architecture is None:
            return cubin_capability(self.stored)
        return int(re.sub(r"\D", "", self.architecture))

    def read(self) -> Content:
        """The content. Raises SassError if it cannot be unpacked."""
        if not self.packed_by:
            return self.stored
        if self.packed_by == _UNKNOWN:
            raise SassError(f"{self.origin} is compressed in a way that is not known here")
        try:
            if self.size > MAX_MEMBER_BYTES:
                raise ValueError(f"{self.size} bytes are more than {MAX_MEMBER_BYTES}")
            if self.packed_by == "LZ4":
                content = lz4.block.decompress(self.stored, uncompressed_size=self.size)
            else:
                # one more, to tell a frame that goes on
                content = zstd.ZstdDecompressor().decompress(self.stored, self.size + 1)
            if len(content) != self.size:
                raise ValueError(f"{len(content)} bytes instead of {self.size}")
        except (ValueError, lz4.block.LZ4BlockError, zstd.ZstdError, MemoryError) as error:
            raise SassError(f"{self.origin} is damaged: its {self.packed_by}: {error}") from error
        return content

    def cubin(self) -> Cubin:
        """The cubin as its headers describe it. Raises SassError if the member is no cubin, or
        damaged."""
        cubin = read_cubin(self.read(), self.origin, self.architecture)
        if cubin.capability != self.capability:
            raise SassError(
                f"{self.origin} is damaged: it is for sm_{cubin.capability}, and its fatbin says "
                f"{self.architecture}"
            )
        return cubin


def members_of(path: Path) -> list[Member]:
    """All members of a file, in its order.

    Raises SassError for a file of another kind, for a file without device code, and for a file of
    which nothing can be read.
    """
    file = _mapped(path)
    head = bytes(file[:ELF_HEADER_BYTES])
    if elf_machine(head) == EM_CUDA:
        return [Member(path, "", MemberKind.CUBIN, None, file)]
    if not head.startswith((ELF_MAGIC, FATBIN_MAGIC, ARCHIVE_MAGIC)):
        raise SassError(
            mistaken(path, bytes(file), FileKind.CUBIN)
            or f"{path} is not an ELF file (cubin, object file, library, program), a fatbin or an "
            "archive"
        )
    walk = _Walk(path)
    if head.startswith(ARCHIVE_MAGIC):
        walk.archive(file)
    else:
        walk.file(file, path.name)
    if not walk.members:
        raise SassError((*walk.problems, f"{path} holds no device code")[0])
    warn(walk.problems)
    return walk.members


def cubins_of(path: Path, capability: int | None = None) -> list[Member]:
    """The cubins in a file: those for a compute capability, if there are any, or else all.

    Raises SassError as `members_of` does, and for a file that holds nothing but PTX and LTO IR, or
    nothing else for that capability.
    """
    members = members_of(path)
    own = [member for member in members if capability in (None, member.capability)] or members
    cubins = [member for member in own if member.kind is MemberKind.CUBIN]
    if not cubins:
        wanted = "" if capability is None else f" for sm_{capability}"
        others = {f"{m.kind.value[2]} for {m.architecture} ({m.kind.value[3]})": None for m in own}
        raise SassError(f"{path} holds no cubin{wanted}, only {' and '.join(others)}")
    known = [member for member in cubins if member.capability >= FIRST_ARCHITECTURE]
    if len(known) < len(cubins):
        old = sorted({f"sm_{m.capability}" for m in cubins if m not in known})
        told = f"only code for sm_{FIRST_ARCHITECTURE} and later can be read"
        if not known:
            raise SassError(f"{path} is for {', '.join(old)}: {told}")
        warn(
            [f"{path}: {len(cubins) - len(known)} cubins for {', '.join(old)} are left out: {told}"]
        )
    return known


def read_cubins(members: Iterable[Member]) -> Iterator[tuple[Member, Cubin]]:
    """The cubins among members, with their headers. Raises SassError if there are cubins, but none
    can be read."""
    problems = []
    any_can = False
    for number, member in enumerate(members):
        if member.kind is not MemberKind.CUBIN:
            continue
        try:
            cubin = member.cubin()
        except SassError as error:
            problems.append(str(error))
        else:
            any_can = True
            yield member, cubin
        _forget(number, member.stored)
    if problems and not any_can:
        raise SassError(problems[0])
    warn(problems)


def ptx_of(members: Iterable[Member]) -> dict[str, str]:
    """The PTX modules among members, which are for later compilation, by the member's name."""
    found = {}
    for member in members:
        if member.kind is MemberKind.PTX:
            try:
                found[member.name] = bytes(member.read()).decode(errors="replace").rstrip("\0")
            except SassError as error:
                warn([str(error)])
    return found


def warn(problems: Iterable[str]) -> None:
    """Warn of a part that could not be read, once per process."""
    for problem in problems:
        warnings.warn(problem, SassWarning, stacklevel=1)


class _Walk:
    """The members of a file, found on the way through it. `problems`: parts that are unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members: list[Member] = []
        self.problems: list[str] = []
        self.names: dict[str, int] = {}  # how many there are of each
        self.is_linked = True  # what is added

    def file(self, data: memoryview, name: str) -> None:
        """Add the members of a file, or of a member of an archive; content of unknown kind has
        none.

        `name`: name of members that have no name of their own.
        """
        head = bytes(data[:ELF_HEADER_BYTES])
        if head.startswith(FATBIN_MAGIC):
            self._fatbins(data, name)
        elif elf_machine(head) == EM_CUDA:
            self._add(MemberKind.CUBIN, f"sm_{cubin_capability(head)}", name, data, "", len(data))
        elif head.startswith(ELF_MAGIC):
            try:
                sections = read_sections(data, self._within(name))
            except SassError as error:
                self.problems.append(str(error))
                return
            for section in sections:
                if section.name in (_LINKED, _UNLINKED):
                    self.is_linked = section.name == _LINKED
                    self._fatbins(memoryview(section.content), name)
                    self.is_linked = True
                elif section.kind == _SHT_PROGBITS and not section.flags & _SHF_EXECINSTR:
                    self._fatbins(memoryview(section.content), name, among_data=True)

    def _within(self, name: str) -> str:
        return str(self.path) if name == self.path.name else f"{self.path}:{name}"

    def archive(self, data: memoryview) -> None:
        """All members of an archive."""
        try:
            for name, content in _archive_members(data):
                self.file(content, name)
        except SassError as error:
            self.problems.append(f"{self.path} {error}")

    def _fatbins(self, data: memoryview, name: str, among_data: bool = False) -> None:
        """All fatbins that begin in a section; there may be padding between them. `among_data`:
        there may be anything between them, so that a number that is no whole fatbin's beginning is
        no damage."""
        at = 0
        while found := _FIND_FATBIN.search(data, at):
            start, at = found.span()
            if among_data and not _is_whole_fatbin(data[start:]):
                continue
            at = start + _FATBIN.size
            try:
                _, _, header, size = _FATBIN.unpack_from(data, start)
                end, at = start + header + size, max(at, start + header)
                while at < min(end, len(data)):
                    at = self._member(data, at, end, name)
                if end > len(data):
                    raise SassError(f"it ends at byte {end} of {len(data)}")
            except (struct.error, SassError) as error:
                why = error if isinstance(error, SassError) else "a header is cut off"
                where = self._within(name)
                problem = f"is truncated or damaged: of its fatbin at byte {start}, {why}"
                self.problems.append(f"{where} {problem}")

    def _member(self, data: memoryview, at: int, end: int, name: str) -> int:
        """Add the member at a byte; returns the beginning of the next. Raises SassError,
        struct.error."""
        kind, header, padded, packed, architecture, name_at, name_bytes, flags, size = (
            _MEMBER.unpack_from(data, at)
        )
        stop = at + header + padded
        if header < _MEMBER.size or stop > min(end, len(data)) or packed > padded:
            raise SassError(f"the member at byte {at} ends at byte {stop} of {len(data)}")
        own_name = data[at + name_at : at + min(name_at + name_bytes, header)]
        variant = _VARIANTS.get(flags & _VARIANT_BITS, "")
        called = _printable(bytes(own_name).rstrip(b"\0")) or name
        packed_by = next(
            (by for bit, by in _PACKED_BY.items() if flags & bit), _UNKNOWN if packed else ""
        )
        stored = data[at + header : at + header + (packed or padded)]
        target = f"sm_{architecture}{variant}"
        if kind not in _KINDS:
            self.problems.append(
                f"{self.path}: {called} for {target} is of the unknown kind {kind}: left out"
            )
        else:
            self._add(
                _KINDS[kind], target, called, stored, packed_by, size if packed_by else padded
            )
        return stop

    def _add(
        self,
        kind: MemberKind,
        architecture: str,
        name: str,
        stored: memoryview,
        packed_by: str,
        size: int,
    ) -> None:
        stem, suffix = PurePosixPath(name).stem, f"{architecture}.{kind.value[1]}"
        plain = unique = f"{stem}.{suffix}"
        while unique in self.names:
            self.names[plain] += 1
            unique = f"{stem}.{self.names[plain]}.{suffix}"
        self.names[unique] = 1
        _forget(len(self.members), stored)
        self.members.append(
            Member(self.path, unique, kind, architecture, stored, packed_by, size, self.is_linked)
        )


def _is_whole_fatbin(data: memoryview) -> bool:
    if len(data) < _FATBIN.size:
        return False
    _, version, header, size = _FATBIN.unpack_from(data)
    return version == 1 and header == _FATBIN.size and 0 < size <= len(data) - header


def _archive_members(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Name and content of each member. The layout is that of ar(5); long names are stored as those
    of GNU's or of BSD's ar. Raises SassError where the archive is cut off or damaged."""
    at, long_names = len(ARCHIVE_MAGIC), b""
    while at < len(data):
        start = at + _ENTRY.size
        try:
            field, digits, end_mark = _ENTRY.unpack_from(data, at)
            size = int(digits)
            if end_mark != _ENTRY_END or not 0 <= size <= len(data) - start:
                raise ValueError
        except (struct.error, ValueError):
            raise SassError(f"is truncated or damaged from byte {at} on") from None
        content, name = data[start : start + size], field.rstrip()
        at = start + size + size % 2
        if name == _GNU_LONG_NAMES:
            long_names = bytes(content)
            continue
        if name.startswith(_BSD_LONG_NAME) and name[3:].isdigit():
            length = int(name[3:])
            name, content = bytes(content[:length]).rstrip(b"\0"), content[length:]
        elif name[:1] == b"/" and name[1:].isdigit():
            name = long_names[int(name[1:]) :].partition(b"\n")[0]
        yield _printable(name.rstrip(b"/")), content


def _printable(name: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in name.decode(errors="replace"))


def _forget(number: int, content: Content) -> None:
    """From time to time, drop the visited pages of a file from this process's memory, which would
    otherwise grow to the file's size; they are read again when they are visited."""
    file = memoryview(content).obj
    if number % _FORGET_EVERY == 0 and isinstance(file, mmap.mmap):
        file.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> memoryview:
    """The file's content, which is read when it is accessed. Raises SassError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            return memoryview(file.read())
    except OSError as error:
        raise SassError(f"{path} cannot be read: {error.strerror or error}") from error
