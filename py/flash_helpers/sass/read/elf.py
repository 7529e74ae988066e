"""A cubin as an ELF file: its kernels, their code, and the facts about them in its headers.

The layout is that of the System V ABI, "Object Files". The section .nv.info describes the contents
of NVIDIA's sections, which were checked against `ptxas -v` and `cuobjdump -res-usage`; attributes
are numbered as in nvdisasm's output (EIATTR_...).

The tables of sections and symbols are read by this module, not by pyelftools. pyelftools takes 1.6
s for the tables of the library's 420 cubins, and a copy of each file; all of list_kernels takes 0.2
s here.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flash_helpers.console.file_kinds import ELF_HEADER_BYTES, ELF_MAGIC, EM_CUDA, elf_machine
from flash_helpers.gpu import RESERVED_SMEM_BYTES
from flash_helpers.sass.read.disassembler import parse_version
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Compiler, Resources, SassError
from flash_helpers.sass.read.symbols import with_demangled_symbols

Content = bytes | memoryview

FIRST_ARCHITECTURE = 70  # the first whose instructions are 16 bytes

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_64_BIT_LITTLE_ENDIAN = bytes([2, 1])  # e_ident[EI_CLASS], e_ident[EI_DATA]
_ET_REL = 1
_SHT_SYMTAB = 2
_WITHOUT_BYTES = (0, 8, 0x7000000A)  # SHT_NULL, SHT_NOBITS, and NVIDIA's own of CUDA 12.0 and 12.1
_NAMES_ELSEWHERE = 0xFFFF
_FIRST_SPECIAL_SECTION = 0xFF00
_STT_FUNC = 2

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
EIATTR_ANNOTATIONS = 0x55
_RELOCATIONS = (".rel", ".rela")
_EVERY_CUBIN_HAS = (".shstrtab", ".strtab", ".symtab")
_PARAMETERS = ".nv.constant0."
_SPILL_REFILL = 1  # of the kinds of annotations
_MARKS_SPILLS = (13,)  # ptxas of CUDA 12.6 to 12.9 does too, but does not leave its version
_FORMAT_SIZED = 4  # the others hold their value in place of the size


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


_NOTHING = Section(0, "", kind=0, flags=0, link=0, info=0, size=0, content=b"")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol. `section`: index of the section that it points into, 0 if there is none."""

    index: int
    name: str
    section: int
    value: int
    size: int
    is_function: bool
    is_kernel: bool


@dataclass(frozen=True)
class CubinKernel:
    """One kernel, or a device function that has a section of its own, as the headers describe it.

    `is_function`: whether it is a device function, not a kernel. `symbol_index`: index in the
    symbol table. `attributes`: its section .nv.info, without references to the cubin's symbols.
    `functions`: the functions in its section, by address from the section's start.
    `self_contained`: whether the code can be understood without other sections: it has no
    relocations, no jump tables, and calls no other function. `spills`: addresses of the
    instructions that spill a register or bring it back; None where the compiler did not mark them.
    Spill bytes in `resources` are 0: only the code tells them. `jump_tables`: the targets of each
    computed jump by its address, from the start of the section.
    """

    symbol: str
    is_function: bool
    symbol_index: int
    section: Section
    resources: Resources
    attributes: bytes
    functions: Mapping[str, int]
    self_contained: bool
    spills: frozenset[int] | None
    jump_tables: Mapping[int, tuple[int, ...]]

    @property
    def code(self) -> bytes:
        """The instruction words."""
        return self.section.data


@dataclass(frozen=True)
class Cubin:
    """The content of an ELF file for one architecture.

    `origin`: its name, for messages and records. `header`: header of the file. `relocatable`:
    whether it has not been linked yet. `ptx`: the PTX that it was compiled from, which -lineinfo
    puts into it; None without it.
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
        """Layout and architecture, which are equal in cubins whose kernels can be merged."""
        return self.header[:20] + self.header[48:52]  # up to e_machine; e_flags


def cubin_capability(data: Content) -> int:
    """Compute capability of a cubin, such as 90, from its first bytes."""
    return _flags(data) >> (8 if _abi(data) >= _ABI_OF_CUDA_13 else 0) & 0xFF


def _abi(data: Content) -> int:
    return data[8]  # e_ident[EI_ABIVERSION]


def _flags(data: Content) -> int:
    return int.from_bytes(data[48:52], "little")  # e_flags of a 64-bit file


class _DamagedError(SassError):
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
    except _DamagedError as error:
        raise SassError(f"{origin} is truncated or damaged: {error.readable}") from None


def _sections(file: memoryview) -> list[Section]:
    *_, segments, headers, _, _, entry, count, header_bytes, number, names = _HEADER.unpack_from(
        file
    )
    if (end := segments + count * entry) > len(file):
        raise _DamagedError(f"its segments end at byte {end} of {len(file)}")
    if not headers:
        return []
    if header_bytes != _SECTION_HEADER.size:
        raise _DamagedError(f"its section headers take {header_bytes} bytes each")
    if headers + header_bytes > len(file):
        raise _DamagedError(f"its section headers begin at byte {headers} of {len(file)}")
    # what does not fit into the file's header stands in the first section's
    *_, many, many_names, _, _, _ = _SECTION_HEADER.unpack_from(file, headers)
    number, names = number or many, many_names if names == _NAMES_ELSEWHERE else names
    if (end := headers + number * header_bytes) > len(file):
        raise _DamagedError(f"its section headers end at byte {end} of {len(file)}")
    table = [*_SECTION_HEADER.iter_unpack(file[headers:end])]
    if names >= number:
        raise _DamagedError(f"the names of its {number} sections are said to be in section {names}")
    texts = bytes(file[table[names][4] : table[names][4] + table[names][5]])
    found = []
    for index, (name, kind, flags, _, start, size, link, info, _, _) in enumerate(table):
        held = 0 if kind in _WITHOUT_BYTES else size
        text = _text(texts, name)
        if start + held > len(file) and held:
            raise _DamagedError(f"its section {text!r} ends at byte {start + size} of {len(file)}")
        content = file[start : start + held]
        found.append(Section(index, text, kind, flags, link, info, size, content))
    return found


def _text(texts: bytes, start: int) -> str:
    """The text that begins at a byte of a string table."""
    end = texts.find(b"\0", start)
    if not 0 <= start <= end:
        raise _DamagedError(f"it names byte {start} of {len(texts)} of its names")
    return texts[start:end].decode(errors="replace")


def _symbols(sections: Sequence[Section]) -> Iterator[Symbol]:
    for table in sections:
        if table.kind != _SHT_SYMTAB:
            continue
        if table.size % _SYMBOL.size or table.link >= len(sections):
            raise _DamagedError(f"its symbols take {table.size} bytes, {_SYMBOL.size} each")
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
            )


def read_cubin(data: Content, origin: str, architecture: str | None = None) -> Cubin:
    """The kernels and device functions of a cubin, in their order in the symbol table.

    `architecture`: the architecture by the file that held the cubin, such as "sm_90a". It counts if
    the cubin itself does not tell one, and has the same number.

    Raises SassError if the file is no cubin, is damaged, or is for an architecture before sm_70.
    """
    machine = elf_machine(bytes(data[:ELF_HEADER_BYTES]))
    if machine != EM_CUDA:
        found = "no machine at all" if machine is None else f"machine {machine}, not {EM_CUDA}"
        raise SassError(f"{origin} is not a cubin (an ELF file for {found})")
    try:
        return _cubin(data, origin, architecture)
    except _DamagedError as error:
        raise SassError(f"{origin} is damaged: {error.readable}") from None


def _cubin(data: Content, origin: str, architecture: str | None) -> Cubin:
    sections = read_sections(data, origin)
    symbols = tuple(_symbols(sections))
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
    compiler = _compiler(by_name)
    relocatable = int.from_bytes(data[16:18], "little") == _ET_REL
    reserved = RESERVED_SMEM_BYTES if capability >= 90 and not relocatable else 0
    functions_of: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for symbol in symbols:
        if symbol.is_function:
            functions_of[symbol.section][symbol.name] = symbol.value
    kernels = []
    for symbol in symbols:
        if not (symbol.is_kernel or _is_own_section(sections, symbol)):
            continue
        section = _code_section(sections, symbol)
        records = list(_records(by_name.get(f".nv.info.{symbol.name}", _NOTHING)))
        own = {attribute: payload for attribute, payload, _ in records}
        barriers = int.from_bytes(own.get(EIATTR_NUM_BARRIERS, b"")[:1], "little")
        threads = own.get(EIATTR_REQNTID) or own.get(EIATTR_MAX_THREADS, b"")
        functions = functions_of[symbol.section]
        tied = any(by_name.get(f"{p}{section.name}", _NOTHING).size for p in _RELOCATIONS)
        tied = tied or relocatable or EIATTR_INDIRECT_BRANCH_TARGETS in own or len(functions) > 1
        kernels.append(
            CubinKernel(
                symbol=symbol.name,
                is_function=not symbol.is_kernel,
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
                spills=_spills(own, compiler),
                jump_tables=_jump_tables(own.get(EIATTR_INDIRECT_BRANCH_TARGETS, b"")),
            )
        )
    known = {kernel.symbol for kernel in kernels if not kernel.is_function}
    for name in by_name:
        owner = name.removeprefix(_PARAMETERS)
        if owner != name and f".text.{owner}" in by_name and owner not in known:
            raise _DamagedError(f"{owner} has parameters, but is no kernel")
    ptx = by_name.get(".nv_debug_ptx_txt", _NOTHING).data.decode(errors="replace")
    return Cubin(
        origin=origin,
        header=bytes(data[:ELF_HEADER_BYTES]),
        relocatable=relocatable,
        architecture=_architecture(data, compiler, architecture),
        compiler=compiler,
        kernels=tuple(kernels),
        ptx=ptx.replace("\0", "\n") or None,
        sections=by_name,
        symbols=symbols,
    )


def _architecture(data: Content, compiler: Compiler, told: str | None) -> str:
    plain = f"sm_{cubin_capability(data)}"
    named = re.search(r"-arch[ =](sm_\w+)", compiler.options)
    for name in (named[1] if named else None, told):
        if name is not None and re.fullmatch(rf"{plain}[a-z]", name):
            return name
    specific = _abi(data) < _ABI_OF_CUDA_13 and _flags(data) & _SPECIFIC_BEFORE_CUDA_13
    return plain + ("a" if specific else "")


def _is_own_section(sections: Sequence[Section], symbol: Symbol) -> bool:
    """Whether a section is named after a function."""
    where = symbol.section
    named = 0 < where < len(sections) and sections[where].name == f".text.{symbol.name}"
    return symbol.is_function and named


def _code_section(sections: Sequence[Section], symbol: Symbol) -> Section:
    """The section that holds a kernel's code, and nothing before it."""
    where = symbol.section
    section = sections[where] if 0 < where < len(sections) else _NOTHING
    if section.name != f".text.{symbol.name}" or symbol.value:
        raise _DamagedError(
            f"the kernel {symbol.name} is said to lie at byte {symbol.value} of {section.name!r}"
        )
    size = len(section.content)
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
    """The attributes of .nv.info that hold one value for one function, by attribute number and
    symbol."""
    found = {}
    for attribute, payload, _ in _records(sections.get(".nv.info", _NOTHING)):
        if len(payload) == 8:
            symbol, value = _words(payload)
            found[attribute, symbol] = value
    return found


def _registers(attributes: Mapping[tuple[int, int], int], symbol: Symbol, section: Section) -> int:
    """Registers per thread: EIATTR_REGCOUNT, and the section header's top byte, which sm_90 leaves
    empty."""
    in_header = section.info >> 24
    told = attributes.get((EIATTR_REGCOUNT, symbol.index), in_header)
    if in_header not in (0, told) or not 0 < told <= 256:
        raise _DamagedError(
            f"{symbol.name} takes {told} registers by its attributes and {in_header} by its "
            "section header"
        )
    return told


def _stack(attributes: Mapping[tuple[int, int], int], symbol: Symbol) -> int | None:
    """Bytes of the stack: the kernel's own frame with the frames of the functions that it calls;
    None where the compiler could not tell, as with recursion."""
    frame = attributes.get((EIATTR_FRAME_SIZE, symbol.index), 0)
    with_calls = attributes.get((EIATTR_MIN_STACK_SIZE, symbol.index), 0)
    return None if with_calls == _UNKNOWN_STACK else max(frame, with_calls)


def _spills(own: Mapping[int, bytes], compiler: Compiler) -> frozenset[int] | None:
    """Addresses in EIATTR_ANNOTATIONS, which holds pairs of a kind and an address."""
    if EIATTR_ANNOTATIONS not in own:
        return frozenset() if compiler.version >= _MARKS_SPILLS else None
    words = _words(own[EIATTR_ANNOTATIONS])
    pairs = zip(words[::2], words[1::2], strict=False)
    return frozenset(address for kind, address in pairs if kind == _SPILL_REFILL)


def _jump_tables(payload: bytes) -> dict[int, tuple[int, ...]]:
    """The targets of each jump in EIATTR_INDIRECT_BRANCH_TARGETS, which has the address of each
    jump, a word of flags, the number of targets, and the targets."""
    words, found = _words(payload), {}
    at = 0
    while at + 3 <= len(words):
        end = at + 3 + words[at + 2]
        if end > len(words):
            raise _DamagedError(f"the jump table of {words[at]:#06x} ends behind its attribute")
        found[words[at]] = words[at + 3 : end]
        at = end
    return found


def _static_smem(sections: Mapping[str, Section], kernel: str, reserved: int) -> int:
    """Bytes of .nv.shared.<kernel>, less the reserved bytes with which the linker starts it on
    sm_90."""
    section = sections.get(f".nv.shared.{kernel}")
    if section is not None and section.size < reserved:
        raise _DamagedError(
            f"{section.size} bytes of shared memory for {kernel} are less than the {reserved} "
            "that the driver reserves"
        )
    return section.size - reserved if section else 0
