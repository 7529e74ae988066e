"""A cubin as an ELF file: its kernels, their code, and what its headers say of them.

pyelftools reads the sections and symbols. What NVIDIA put into them is described in the section
.nv.info and was checked against `ptxas -v` and `cuobjdump -res-usage`; attributes are numbered as
in nvdisasm's output (EIATTR_...).
"""

from __future__ import annotations

import functools
import io
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from flash_helpers.console.file_kinds import ELF_HEADER_BYTES, ELF_MAGIC, EM_CUDA, elf_machine
from flash_helpers.gpu import RESERVED_SMEM_BYTES
from flash_helpers.sass.read.disassembler import parse_version
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Compiler, Resources, SassError

FIRST_ARCHITECTURE = 70  # the first whose instructions are 16 bytes

_ABI_OF_CUDA_13 = 8
_SPECIFIC_BEFORE_CUDA_13 = 0x800  # in e_flags: sm_90a rather than sm_90
_BARRIERS_BEFORE_CUDA_13 = 20  # the first of seven bits in sh_flags of the code
_STO_CUDA_ENTRY = 0x10

_UNKNOWN_STACK = 0xFFFFFFFF  # of recursion

EIATTR_MAX_THREADS = 0x05
EIATTR_PARAM_CBANK = 0x0A
EIATTR_REQNTID = 0x10
EIATTR_FRAME_SIZE = 0x11
EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_INDIRECT_BRANCH_TARGETS = 0x34
EIATTR_REGCOUNT = 0x2F
EIATTR_NUM_BARRIERS = 0x4C
_RELOCATIONS = (".rel", ".rela")
_EVERY_CUBIN_HAS = (".shstrtab", ".strtab", ".symtab")
_PARAMETERS = ".nv.constant0."
_FORMAT_SIZED = 4  # the others hold their value in place of the size


@dataclass(frozen=True)
class Section:
    """A section of an ELF file; data is empty where the file holds none of it."""

    index: int
    name: str
    flags: int
    info: int
    size: int
    data: bytes


_NOTHING = Section(index=0, name="", flags=0, info=0, size=0, data=b"")


@dataclass(frozen=True)
class Symbol:
    """A symbol. section: index of the section that it points into, 0 if there is none."""

    index: int
    name: str
    section: int
    value: int
    size: int
    is_function: bool
    is_kernel: bool


@dataclass(frozen=True)
class CubinKernel:
    """One kernel as the headers describe it.

    symbol_index: in the symbol table. attributes: its section .nv.info, without what refers to the
    cubin's symbols. functions: what its section holds, by address from its start.
    self_contained: the code needs nothing outside of its section to be understood: it has no
    relocations, no jump tables, and calls no other function. Spill bytes in `resources` are 0: only
    the code tells them.
    """

    symbol: str
    symbol_index: int
    section: Section
    resources: Resources
    attributes: bytes
    functions: Mapping[str, int]
    self_contained: bool

    @property
    def code(self) -> bytes:
        """The instruction words."""
        return self.section.data


@dataclass(frozen=True)
class Cubin:
    """What an ELF file for one architecture holds.

    origin: its name, for messages and records. header: of the file. relocatable: it has not been
    linked yet. ptx: what it was compiled from, which -lineinfo puts into it; None without.
    """

    origin: str
    header: bytes
    relocatable: bool
    architecture: str
    compiler: Compiler
    kernels: tuple[CubinKernel, ...]
    ptx: str | None
    sections: Mapping[str, Section] = field(repr=False)
    symbols: tuple[Symbol, ...] = field(repr=False)

    @property
    def capability(self) -> int:
        """Compute capability as a number: 90 for sm_90 and for sm_90a."""
        return cubin_capability(self.header)

    @property
    def kind(self) -> bytes:
        """What cubins have in common whose kernels can stand in one: layout and architecture."""
        return self.header[:20] + self.header[48:52]  # up to e_machine; e_flags


def cubin_capability(data: bytes) -> int:
    """Compute capability of a cubin, such as 90, from its first bytes."""
    return _flags(data) >> (8 if _abi(data) >= _ABI_OF_CUDA_13 else 0) & 0xFF


def _abi(data: bytes) -> int:
    return data[8]  # e_ident[EI_ABIVERSION]


def _flags(data: bytes) -> int:
    return int.from_bytes(data[48:52], "little")  # e_flags of a 64-bit file


def read_elf(data: bytes, origin: str) -> tuple[ELFFile, list[Section], list[Symbol]]:
    """The header, the sections and the symbols of a 64-bit ELF file.

    Raises SassError if it is none, is cut off or is damaged.
    """
    if not data.startswith(ELF_MAGIC):
        raise SassError(f"{origin} is not an ELF file")
    try:
        file = ELFFile(io.BytesIO(data))
        segments_end = file["e_phoff"] + file["e_phnum"] * file["e_phentsize"]
        if segments_end > len(data):
            raise SassError(f"truncated: its segments end at byte {segments_end} of {len(data)}")
        sections = [_section(file, index, data) for index in range(file.num_sections())]
        symbols = [
            symbol
            for section in file.iter_sections()
            if isinstance(section, SymbolTableSection)
            for symbol in _symbols(section)
        ]
    except SassError as error:
        raise SassError(f"{origin} is {error}") from None
    except Exception as error:  # pyelftools raises whatever it trips over in a damaged file
        raise SassError(
            f"{origin} is truncated or damaged: its ELF headers cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error
    return file, sections, symbols


def _section(file: ELFFile, index: int, data: bytes) -> Section:
    section = file.get_section(index)
    start, size = section["sh_offset"], section["sh_size"]
    content = b""
    if section["sh_type"] not in ("SHT_NOBITS", "SHT_NULL"):
        content = data[start : start + size]
        if start + size > len(data):
            raise SassError(
                f"truncated: its section {section.name!r} ends at byte {start + size} of "
                f"{len(data)}"
            )
    return Section(index, section.name, section["sh_flags"], section["sh_info"], size, content)


def _symbols(section: SymbolTableSection) -> Iterator[Symbol]:
    data, entry_bytes = section.data(), section["sh_entsize"]
    for index, symbol in enumerate(section.iter_symbols()):
        where = symbol["st_shndx"]
        is_function = symbol["st_info"]["type"] == "STT_FUNC"
        other = data[index * entry_bytes + 5]  # st_other, of which pyelftools shows a part
        yield Symbol(
            index=index,
            name=symbol.name,
            section=where if isinstance(where, int) else 0,
            value=symbol["st_value"],
            size=symbol["st_size"],
            is_function=is_function,
            is_kernel=is_function and bool(other & _STO_CUDA_ENTRY),
        )


class _DamagedError(SassError):
    """What is wrong with a cubin, whose name the message still lacks."""


@functools.cache  # a library is read once to see what it holds, and again for what is wanted
def read_cubin(data: bytes, origin: str, architecture: str | None = None) -> Cubin:
    """The kernels of a cubin, by their order in the symbol table.

    architecture: what the file that held the cubin calls it, such as "sm_90a". It is believed where
    the cubin itself does not tell, and has the same number.

    Raises SassError if the file is none, is damaged, or is for an architecture before sm_70.
    """
    machine = elf_machine(data)
    if machine != EM_CUDA:
        found = "no machine at all" if machine is None else f"machine {machine}, not {EM_CUDA}"
        raise SassError(f"{origin} is not a cubin (an ELF file for {found})")
    try:
        return _cubin(data, origin, architecture)
    except _DamagedError as error:
        raise SassError(f"{origin} is damaged: {error}") from None


def _cubin(data: bytes, origin: str, architecture: str | None) -> Cubin:
    file, sections, symbols = read_elf(data, origin)
    by_name = {section.name: section for section in sections}
    if missing := [name for name in _EVERY_CUBIN_HAS if name not in by_name]:
        raise _DamagedError(f"it has no section {', '.join(missing)}")
    capability = cubin_capability(data)
    if capability < FIRST_ARCHITECTURE:
        raise SassError(
            f"{origin} is for sm_{capability}: only code for sm_{FIRST_ARCHITECTURE} and later "
            "can be read"
        )
    common = _common_attributes(by_name)
    relocatable = file.header["e_type"] == "ET_REL"
    reserved = RESERVED_SMEM_BYTES if capability >= 90 and not relocatable else 0
    kernels = []
    for symbol in symbols:
        if not symbol.is_kernel:
            continue
        section = _code_section(sections, symbol)
        records = list(_records(by_name.get(f".nv.info.{symbol.name}", _NOTHING)))
        own = {attribute: payload for attribute, payload, _ in records}
        barriers = int.from_bytes(own.get(EIATTR_NUM_BARRIERS, b"")[:1], "little")
        threads = own.get(EIATTR_REQNTID) or own.get(EIATTR_MAX_THREADS, b"")
        functions = {
            other.name: other.value
            for other in symbols
            if other.is_function and other.section == symbol.section
        }
        tied = any(by_name.get(f"{p}{section.name}", _NOTHING).size for p in _RELOCATIONS)
        tied = tied or relocatable or EIATTR_INDIRECT_BRANCH_TARGETS in own or len(functions) > 1
        kernels.append(
            CubinKernel(
                symbol=symbol.name,
                symbol_index=symbol.index,
                section=section,
                resources=Resources(
                    registers=_registers(common, symbol, section),
                    static_smem_bytes=_static_smem(by_name, symbol.name, reserved),
                    stack_bytes=_stack(common, symbol),
                    spill_store_bytes=0,
                    spill_load_bytes=0,
                    barriers=max(barriers, section.flags >> _BARRIERS_BEFORE_CUDA_13 & 0x7F),
                    max_threads=math.prod(_words(threads)) if len(threads) == 12 else None,
                ),
                attributes=b"".join(r for number, _, r in records if number != EIATTR_PARAM_CBANK),
                functions=functions,
                self_contained=not tied,
            )
        )
    known = {kernel.symbol for kernel in kernels}
    for name in by_name:
        owner = name.removeprefix(_PARAMETERS)
        if owner != name and f".text.{owner}" in by_name and owner not in known:
            raise _DamagedError(f"{owner} has parameters, but is no kernel")
    compiler = _compiler(by_name)
    ptx = by_name.get(".nv_debug_ptx_txt", _NOTHING).data.decode(errors="replace")
    return Cubin(
        origin=origin,
        header=data[:ELF_HEADER_BYTES],
        relocatable=relocatable,
        architecture=_architecture(data, compiler, architecture),
        compiler=compiler,
        kernels=tuple(kernels),
        ptx=ptx.replace("\0", "\n") or None,
        sections=by_name,
        symbols=tuple(symbols),
    )


def _architecture(data: bytes, compiler: Compiler, told: str | None) -> str:
    plain = f"sm_{cubin_capability(data)}"
    named = re.search(r"-arch[ =](sm_\w+)", compiler.options)
    for name in (named[1] if named else None, told):
        if name is not None and re.fullmatch(rf"{plain}[a-z]?", name):
            return name
    specific = _abi(data) < _ABI_OF_CUDA_13 and _flags(data) & _SPECIFIC_BEFORE_CUDA_13
    return plain + ("a" if specific else "")


def _code_section(sections: Sequence[Section], symbol: Symbol) -> Section:
    """The section that holds a kernel's code, and nothing before it."""
    where = symbol.section
    section = sections[where] if 0 < where < len(sections) else _NOTHING
    if section.name != f".text.{symbol.name}" or symbol.value:
        raise _DamagedError(
            f"the kernel {symbol.name} is said to lie at byte {symbol.value} of {section.name!r}"
        )
    size = len(section.data)
    if not size or size % INSTRUCTION_BYTES or size != symbol.size:
        raise _DamagedError(
            f"the code of {symbol.name} is {size} bytes by its section and {symbol.size} by its "
            f"symbol, in instructions of {INSTRUCTION_BYTES}"
        )
    return section


def _compiler(sections: Mapping[str, Section]) -> Compiler:
    texts = sections.get(".note.nv.tkinfo", _NOTHING).data.decode(errors="replace").split("\0")
    for index, text in enumerate(texts):
        if version := parse_version(text):
            options = texts[index + 2].strip() if index + 2 < len(texts) else ""
            return Compiler(texts[index - 1], version, options)
    return Compiler("", (), "")


def _records(section: Section) -> Iterator[tuple[int, bytes, bytes]]:
    """The attributes of a section .nv.info, unknown ones too: number, payload, whole record."""
    data, at = section.data, 0
    while at + 4 <= len(data):
        layout, attribute, size = struct.unpack_from("<BBH", data, at)
        payload, end = (at + 4, at + 4 + size) if layout == _FORMAT_SIZED else (at + 2, at + 4)
        if end > len(data):
            raise _DamagedError(
                f"attribute 0x{attribute:02x} of {section.name} ends behind its section"
            )
        yield attribute, data[payload:end], data[at:end]
        at = end


def _words(payload: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(payload) // 4}I", payload)


def _common_attributes(sections: Mapping[str, Section]) -> dict[tuple[int, int], int]:
    """The attributes of .nv.info that hold one number for one function, by number and symbol."""
    found = {}
    for attribute, payload, _ in _records(sections.get(".nv.info", _NOTHING)):
        if len(payload) == 8:
            symbol, value = _words(payload)
            found[attribute, symbol] = value
    return found


def _registers(attributes: Mapping[tuple[int, int], int], symbol: Symbol, section: Section) -> int:
    """EIATTR_REGCOUNT, and the section header's top byte, which sm_90 leaves empty."""
    in_header = section.info >> 24
    told = attributes.get((EIATTR_REGCOUNT, symbol.index), in_header)
    if in_header not in (0, told) or not 0 < told <= 256:
        raise _DamagedError(
            f"{symbol.name} takes {told} registers by its attributes and {in_header} by its "
            "section header"
        )
    return told


def _stack(attributes: Mapping[tuple[int, int], int], symbol: Symbol) -> int:
    """The kernel's own frame, or with those of what it calls, where the compiler could tell."""
    frame = attributes.get((EIATTR_FRAME_SIZE, symbol.index), 0)
    with_calls = attributes.get((EIATTR_MIN_STACK_SIZE, symbol.index), 0)
    return frame if with_calls == _UNKNOWN_STACK else max(frame, with_calls)


def _static_smem(sections: Mapping[str, Section], kernel: str, reserved: int) -> int:
    """Bytes of .nv.shared.<kernel>, which the linker starts with what is reserved on sm_90."""
    section = sections.get(f".nv.shared.{kernel}")
    if section is not None and section.size < reserved:
        raise _DamagedError(
            f"{section.size} bytes of shared memory for {kernel} are less than the {reserved} "
            "that the driver reserves"
        )
    return section.size - reserved if section else 0
