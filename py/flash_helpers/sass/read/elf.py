"""An ELF file: its sections, its symbols, and what is relocated.

The layout is that of the System V ABI, "Object Files".

The tables of sections and symbols are read by this module, not by pyelftools. pyelftools takes 1.6
s for the tables of the library's 420 cubins, and a copy of each file; all of find_kernels takes 0.2
s here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flash_helpers.console.file_kinds import ELF_HEADER_BYTES, ELF_MAGIC
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.read.symbols import with_demangled_symbols

Content = bytes | memoryview

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATIONS = {".rela": struct.Struct("<QII8x"), ".rel": struct.Struct("<QII")}
_64_BIT_LITTLE_ENDIAN = bytes([2, 1])  # e_ident[EI_CLASS], e_ident[EI_DATA]
_SHT_SYMTAB = 2
_WITHOUT_BYTES = (0, 8, 0x7000000A)  # SHT_NULL, SHT_NOBITS, and NVIDIA's own of CUDA 12.0 and 12.1
_NAMES_ELSEWHERE = 0xFFFF
_FIRST_SPECIAL_SECTION = 0xFF00
_STT_FUNC = 2
_STT_SHARED = 13  # NVIDIA's own
_STO_CUDA_ENTRY = 0x10


@dataclass(frozen=True)
class Section:
    """A section of an ELF file. `kind`: sh_type. `content`: its bytes as they lie in the file;
    empty where the file holds none."""

    index: int
    name: str
    kind: int
    flags: int
    link: int
    info: int
    size: int
    content: Content = field(repr=False)

    @functools.cached_property
    def data(self) -> bytes:
        """A copy of the content."""
        return bytes(self.content)


NOTHING = Section(0, "", kind=0, flags=0, link=0, info=0, size=0, content=b"")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol. `section`: index of the section that it points into, 0 if there is none. `value`:
    the alignment of a variable that is not linked yet. `is_shared`: whether it is a variable in
    shared memory, of code that is not linked yet."""

    index: int
    name: str
    section: int
    value: int
    size: int
    is_function: bool
    is_kernel: bool
    is_shared: bool


class DamagedError(SassError):
    """An error of a file, whose name the message still lacks."""

    @property
    def readable(self) -> str:
        """The message with the C++ names of symbols."""
        return with_demangled_symbols(str(self))


def read_sections(data: Content, origin: str) -> list[Section]:
    """The sections of a 64-bit ELF file, by their index; nothing is copied but their names.

    Raises SassError if it is none, is cut off or is damaged.
    """
    file = memoryview(data)
    if not bytes(file[:4]) == ELF_MAGIC:
        raise SassError(f"{origin} is not an ELF file")
    if len(file) < ELF_HEADER_BYTES:
        raise SassError(f"{origin} is truncated: its header ends at byte {len(file)}")
    if bytes(file[4:6]) != _64_BIT_LITTLE_ENDIAN:
        raise SassError(f"{origin} is not a 64-bit little-endian ELF file")
    try:
        return _sections(file)
    except DamagedError as error:
        raise SassError(f"{origin} is truncated or damaged: {error.readable}") from None


def _sections(file: memoryview) -> list[Section]:
    *_, segments, headers, _, _, entry, count, header_bytes, number, names = _HEADER.unpack_from(
        file
    )
    if (end := segments + count * entry) > len(file):
        raise DamagedError(f"its segments end at byte {end} of {len(file)}")
    if not headers:
        return []
    if header_bytes != _SECTION_HEADER.size:
        raise DamagedError(f"its section headers take {header_bytes} bytes each")
    if headers + header_bytes > len(file):
        raise DamagedError(f"its section headers begin at byte {headers} of {len(file)}")
    # what does not fit into the file's header stands in the first section's
    *_, many, many_names, _, _, _ = _SECTION_HEADER.unpack_from(file, headers)
    number, names = number or many, many_names if names == _NAMES_ELSEWHERE else names
    if (end := headers + number * header_bytes) > len(file):
        raise DamagedError(f"its section headers end at byte {end} of {len(file)}")
    table = [*_SECTION_HEADER.iter_unpack(file[headers:end])]
    if names >= number:
        raise DamagedError(f"the names of its {number} sections are said to be in section {names}")
    texts = bytes(file[table[names][4] : table[names][4] + table[names][5]])
    found = []
    for index, (name, kind, flags, _, start, size, link, info, _, _) in enumerate(table):
        held = 0 if kind in _WITHOUT_BYTES else size
        text = _text(texts, name)
        if start + held > len(file) and held:
            raise DamagedError(f"its section {text!r} ends at byte {start + size} of {len(file)}")
        content = file[start : start + held]
        found.append(Section(index, text, kind, flags, link, info, size, content))
    return found


def _text(texts: bytes, start: int) -> str:
    """The text that begins at a byte of a string table."""
    end = texts.find(b"\0", start)
    if not 0 <= start <= end:
        raise DamagedError(f"it names byte {start} of {len(texts)} of its names")
    return texts[start:end].decode(errors="replace")


def read_symbols(sections: Sequence[Section]) -> Iterator[Symbol]:
    """The symbols of a file, by their index. Raises DamagedError."""
    for table in sections:
        if table.kind != _SHT_SYMTAB:
            continue
        if table.size % _SYMBOL.size or table.link >= len(sections):
            raise DamagedError(f"its symbols take {table.size} bytes, {_SYMBOL.size} each")
        texts = sections[table.link].data
        for index, entry in enumerate(_SYMBOL.iter_unpack(table.content)):
            name, info, other, section, value, size = entry
            is_function = info & 0xF == _STT_FUNC
            yield Symbol(
                index=index,
                name=_text(texts, name),
                section=section if section < _FIRST_SPECIAL_SECTION else 0,
                value=value,
                size=size,
                is_function=is_function,
                is_kernel=is_function and bool(other & _STO_CUDA_ENTRY),
                is_shared=info & 0xF == _STT_SHARED,
            )


def relocations(sections: Mapping[str, Section], name: str) -> Iterator[tuple[int, int]]:
    """The relocations of the section `name`: an offset in it, and the index of the symbol whose
    address belongs there. A table of another entry size is left out."""
    for prefix, entry in _RELOCATIONS.items():
        table = sections.get(prefix + name, NOTHING).data
        if len(table) % entry.size == 0:
            for offset, _, symbol in entry.iter_unpack(table):
                yield offset, symbol
