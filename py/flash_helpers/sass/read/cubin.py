"""A cubin: its kernels, their code, and the facts about them in its headers.

The section .nv.info describes the contents of NVIDIA's sections, which were checked against
`ptxas -v` and `cuobjdump -res-usage`; attributes are numbered as in nvdisasm's output (EIATTR_...).
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flash_helpers.console.file_kinds import ELF_HEADER_BYTES, EM_CUDA, elf_machine
from flash_helpers.gpu import RESERVED_SMEM_BYTES
from flash_helpers.sass.read.disassembler import parse_version
from flash_helpers.sass.read.elf import (
    NOTHING,
    Content,
    DamagedError,
    Section,
    Symbol,
    read_sections,
    read_symbols,
)
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Compiler, Resources, SassError
from flash_helpers.sass.read.shared_memory import static_smem

FIRST_ARCHITECTURE = 70  # the first whose instructions are 16 bytes

_ET_REL = 1
_ABI_OF_CUDA_13 = 8
_SPECIFIC_BEFORE_CUDA_13 = 0x800  # in e_flags: sm_90a rather than sm_90
_BARRIERS_BEFORE_CUDA_13 = 20  # the first of seven bits in sh_flags of the code

_UNKNOWN_STACK = 0xFFFFFFFF  # of recursion

EIATTR_MAX_THREADS = 0x05
EIATTR_PARAM_CBANK = 0x0A
EIATTR_REQNTID = 0x10
EIATTR_FRAME_SIZE = 0x11
EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_INDIRECT_BRANCH_TARGETS = 0x34
EIATTR_COOP_GROUP_INSTR_OFFSETS = 0x28
EIATTR_REGCOUNT = 0x2F
EIATTR_INT_WARP_WIDE_INSTR_OFFSETS = 0x31
EIATTR_CUDA_API_VERSION = 0x37
EIATTR_MBARRIER_INSTR_OFFSETS = 0x39
EIATTR_NUM_BARRIERS = 0x4C
EIATTR_ANNOTATIONS = 0x55
_RELOCATIONS = (".rel", ".rela")
_EVERY_CUBIN_HAS = (".shstrtab", ".strtab", ".symtab")
_PARAMETERS = ".nv.constant0."
# A section with the PTX; in code that is or was relocatable, a number follows its name.
_PTX = ".nv_debug_ptx_txt"
_DEFINED = re.compile(
    r"^(?!\s*\.extern)[^\n;{}/]*\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$]+)", re.MULTILINE
)
_SPILL_REFILL = 1  # of the kinds of annotations
_MARKS_SPILLS = (12, 6)  # the first ptxas that does, of 12.4, 12.5, 12.6, 12.9 and 13.0
_WORDS_OF_MBARRIER = 4  # of an instruction on an mbarrier; the first is its address
_FORMAT_SIZED = 4  # the others hold their value in place of the size


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
    computed jump by its address, from the start of the section. `block_starts`: addresses of the
    instructions that the attributes name as those of lanes together or of an mbarrier; the compiler
    begins a basic block at each.
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
    block_starts: tuple[int, ...] = ()

    @property
    def code(self) -> bytes:
        """The instruction words."""
        return self.section.data


@dataclass(frozen=True)
class Cubin:
    """The content of an ELF file for one architecture.

    `origin`: its name, for messages and records. `header`: header of the file. `relocatable`:
    whether it has not been linked yet. `ptx`: the PTX texts that it was compiled from, which
    -lineinfo puts into it: one of each source file.
    """

    origin: str
    header: bytes
    relocatable: bool
    architecture: str
    compiler: Compiler
    kernels: tuple[CubinKernel, ...]
    ptx: tuple[str, ...]
    sections: Mapping[str, Section] = field(repr=False)
    symbols: tuple[Symbol, ...] = field(repr=False)

    @property
    def capability(self) -> int:
        """Compute capability as a number: 90 for sm_90 and for sm_90a."""
        return cubin_capability(self.header)

    def ptx_of(self, symbol: str) -> str | None:
        """The PTX text that a kernel or a device function was compiled from; None if unknown."""
        if len(self.ptx) == 1:
            return self.ptx[0]
        return next((text for text in self.ptx if symbol in _defined_in(text)), None)

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
    except DamagedError as error:
        raise SassError(f"{origin} is damaged: {error.readable}") from None


def _cubin(data: Content, origin: str, architecture: str | None) -> Cubin:
    sections = read_sections(data, origin)
    symbols = tuple(read_symbols(sections))
    by_name = {section.name: section for section in sections}
    if missing := [name for name in _EVERY_CUBIN_HAS if name not in by_name]:
        raise DamagedError(f"it has no section {', '.join(missing)}")
    capability = cubin_capability(data)
    if capability < FIRST_ARCHITECTURE:
        raise SassError(
            f"{origin} is for sm_{capability}: only code for sm_{FIRST_ARCHITECTURE} and later "
            "can be read"
        )
    common = _common_attributes(by_name)
    compiler = _compiler(by_name, symbols)
    relocatable = int.from_bytes(data[16:18], "little") == _ET_REL
    reserved = None if relocatable else RESERVED_SMEM_BYTES * (capability >= 90)
    functions_of: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for symbol in symbols:
        if symbol.is_function:
            functions_of[symbol.section][symbol.name] = symbol.value
    kernels = []
    for symbol in symbols:
        if not (symbol.is_kernel or _is_own_section(sections, symbol)):
            continue
        section = _code_section(sections, symbol)
        records = list(_records(by_name.get(f".nv.info.{symbol.name}", NOTHING)))
        own = {attribute: payload for attribute, payload, _ in records}
        barriers = int.from_bytes(own.get(EIATTR_NUM_BARRIERS, b"")[:1], "little")
        threads = _words(own, EIATTR_REQNTID) or _words(own, EIATTR_MAX_THREADS)
        functions = functions_of[symbol.section]
        tied = any(by_name.get(f"{p}{section.name}", NOTHING).size for p in _RELOCATIONS)
        tied = tied or relocatable or EIATTR_INDIRECT_BRANCH_TARGETS in own or len(functions) > 1
        kernels.append(
            CubinKernel(
                symbol=symbol.name,
                is_function=not symbol.is_kernel,
                symbol_index=symbol.index,
                section=section,
                resources=Resources(
                    registers=_registers(common, symbol, section),
                    static_smem_bytes=static_smem(by_name, symbols, symbol, reserved),
                    stack_bytes=_stack(common, symbol),
                    spill_store_bytes=0,
                    spill_load_bytes=0,
                    barriers=max(barriers, section.flags >> _BARRIERS_BEFORE_CUDA_13 & 0x7F),
                    max_threads=math.prod(threads) if len(threads) == 3 else None,
                ),
                attributes=b"".join(r for number, _, r in records if number != EIATTR_PARAM_CBANK),
                functions=functions,
                self_contained=not tied,
                spills=_spills(own, compiler),
                jump_tables=_jump_tables(own),
                block_starts=(
                    *_words(own, EIATTR_COOP_GROUP_INSTR_OFFSETS),
                    *_words(own, EIATTR_INT_WARP_WIDE_INSTR_OFFSETS),
                    *_words(own, EIATTR_MBARRIER_INSTR_OFFSETS)[::_WORDS_OF_MBARRIER],
                ),
            )
        )
    known = {kernel.symbol for kernel in kernels if not kernel.is_function}
    for name in by_name:
        owner = name.removeprefix(_PARAMETERS)
        if owner != name and f".text.{owner}" in by_name and owner not in known:
            raise DamagedError(f"{owner} has parameters, but is no kernel")
    ptx = [
        section.data.decode(errors="replace").replace("\0", "\n")
        for name, section in by_name.items()
        if name == _PTX or name.startswith(f"{_PTX}.")
    ]
    return Cubin(
        origin=origin,
        header=bytes(data[:ELF_HEADER_BYTES]),
        relocatable=relocatable,
        architecture=_architecture(data, compiler, architecture),
        compiler=compiler,
        kernels=tuple(kernels),
        ptx=tuple(filter(None, ptx)),
        sections=by_name,
        symbols=symbols,
    )


@functools.lru_cache(maxsize=64)
def _defined_in(ptx: str) -> frozenset[str]:
    """The kernels and functions that a PTX text defines."""
    return frozenset(_DEFINED.findall(ptx))


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
    section = sections[where] if 0 < where < len(sections) else NOTHING
    if section.name != f".text.{symbol.name}" or symbol.value:
        raise DamagedError(
            f"the kernel {symbol.name} is said to lie at byte {symbol.value} of {section.name!r}"
        )
    size = len(section.content)
    if not size or size % INSTRUCTION_BYTES or size != symbol.size:
        raise DamagedError(
            f"the code of {symbol.name} is {size} bytes by its section and {symbol.size} by its "
            f"symbol, in instructions of {INSTRUCTION_BYTES}"
        )
    return section


def _compiler(sections: Mapping[str, Section], symbols: Sequence[Symbol]) -> Compiler:
    """The program that the note names. Cubins before CUDA 13 have no note, but each kernel has the
    CUDA version of its ptxas."""
    texts = sections.get(".note.nv.tkinfo", NOTHING).data.decode(errors="replace").split("\0")
    for index, text in enumerate(texts):
        if version := parse_version(text):
            options = texts[index + 2].strip() if index + 2 < len(texts) else ""
            return Compiler(texts[index - 1], version, options)
    versions = (_cuda_version(_own_attributes(sections, s)) for s in symbols if s.is_function)
    newest = max(versions, default=())
    return Compiler("ptxas", newest) if newest else Compiler("", ())


def _records(section: Section) -> Iterator[tuple[int, bytes, bytes]]:
    """The attributes of a section .nv.info, unknown ones too: number, payload, whole record."""
    data, at = section.data, 0
    while at + 4 <= len(data):
        layout, attribute, size = struct.unpack_from("<BBH", data, at)
        payload, end = (at + 4, at + 4 + size) if layout == _FORMAT_SIZED else (at + 2, at + 4)
        if end > len(data):
            raise DamagedError(
                f"attribute 0x{attribute:02x} of {section.name} ends behind its section"
            )
        yield attribute, data[payload:end], data[at:end]
        at = end


def _own_attributes(sections: Mapping[str, Section], symbol: Symbol) -> dict[int, bytes]:
    """The attributes of a function, by their number."""
    records = _records(sections.get(f".nv.info.{symbol.name}", NOTHING))
    return {attribute: payload for attribute, payload, _ in records}


def _words(attributes: Mapping[int, bytes], number: int) -> tuple[int, ...]:
    """The words of an attribute; empty without the attribute."""
    payload = attributes.get(number, b"")
    if len(payload) % 4:
        raise DamagedError(f"its attribute 0x{number:02x} is {len(payload)} bytes, in words of 4")
    return struct.unpack(f"<{len(payload) // 4}I", payload)


def _cuda_version(own: Mapping[int, bytes]) -> tuple[int, ...]:
    """The CUDA version of the ptxas that compiled a function, such as (12, 9); empty if unknown.
    The linker leaves it as it is."""
    return next((divmod(word, 10) for word in _words(own, EIATTR_CUDA_API_VERSION)), ())


def _common_attributes(sections: Mapping[str, Section]) -> dict[tuple[int, int], int]:
    """The attributes of .nv.info that hold one value for one function, by attribute number and
    symbol."""
    found = {}
    for attribute, payload, _ in _records(sections.get(".nv.info", NOTHING)):
        if len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            found[attribute, symbol] = value
    return found


def _registers(attributes: Mapping[tuple[int, int], int], symbol: Symbol, section: Section) -> int:
    """Registers per thread: EIATTR_REGCOUNT, and the section header's top byte, which sm_90 leaves
    empty."""
    in_header = section.info >> 24
    told = attributes.get((EIATTR_REGCOUNT, symbol.index), in_header)
    if in_header not in (0, told) or not 0 < told <= 256:
        raise DamagedError(
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
    """Addresses in EIATTR_ANNOTATIONS, which holds pairs of a kind and an address. Without that
    attribute, nothing spills; but older compilers never write it."""
    if EIATTR_ANNOTATIONS not in own:
        marks_spills = (_cuda_version(own) or compiler.version) >= _MARKS_SPILLS
        return frozenset() if marks_spills else None
    words = _words(own, EIATTR_ANNOTATIONS)
    pairs = zip(words[::2], words[1::2], strict=False)
    return frozenset(address for kind, address in pairs if kind == _SPILL_REFILL)


def _jump_tables(own: Mapping[int, bytes]) -> dict[int, tuple[int, ...]]:
    """The targets of each jump in EIATTR_INDIRECT_BRANCH_TARGETS, which has the address of each
    jump, a word of flags, the number of targets, and the targets."""
    words, found = _words(own, EIATTR_INDIRECT_BRANCH_TARGETS), {}
    at = 0
    while at + 3 <= len(words):
        end = at + 3 + words[at + 2]
        if end > len(words):
            raise DamagedError(f"the jump table of {words[at]:#06x} ends behind its attribute")
        found[words[at]] = words[at + 3 : end]
        at = end
    return found
