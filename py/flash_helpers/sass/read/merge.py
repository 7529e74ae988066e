"""Kernels of several cubins in one, so that nvdisasm, which takes a third of a second to start but
milliseconds for a kernel, starts once for all of them.

Only kernels whose code stands for itself can be moved like this: `CubinKernel.self_contained`. Of
their attributes, COOP_GROUP_INSTR_OFFSETS (0x28) tells nvdisasm where registers are live in all
lanes, so they move along. That nvdisasm says the same of kernels there as in their own cubins is
checked in the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from flash_helpers.sass.read.elf import ELF_HEADER_BYTES, CubinKernel

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_STRTAB = 1, 2, 3
_SHT_CUDA_INFO = 0x70000000
_SHF_ALLOC_EXECINSTR, _SHF_INFO_LINK = 0x6, 0x40
_STT_FUNC_GLOBAL, _STO_CUDA_ENTRY = 0x12, 0x10
_SHSTRTAB, _STRTAB, _SYMTAB, _FIRST_CODE = 1, 2, 3, 4  # indices of sections
_CODE_ALIGNMENT = 128
_OWN_INFO = 0x00FFFFFF  # bits of sh_info that are the symbol's index


def merged_name(index: int) -> str:
    """What the kernel of that index is called in the merged cubin."""
    return f"k{index}"


def merged_cubin(header: bytes, kernels: Sequence[CubinKernel]) -> bytes:
    """A cubin with the code and attributes of `kernels`, called by `merged_name`. header: of one of
    their own cubins."""
    names, section_names, symbols = _Names(), _Names(), bytearray(_SYMBOL.size)
    code_sections, attribute_sections = [], []
    for index, kernel in enumerate(kernels):
        name = merged_name(index)
        symbols += _SYMBOL.pack(
            names.add(name),
            _STT_FUNC_GLOBAL,
            _STO_CUDA_ENTRY,
            _FIRST_CODE + index,
            0,
            len(kernel.code),
        )
        info = kernel.section.info & ~_OWN_INFO | index + 1
        code_sections.append((section_names.add(f".text.{name}"), info, kernel.code))
        attribute_sections.append(
            (section_names.add(f".nv.info.{name}"), _FIRST_CODE + index, kernel.attributes)
        )
    own = [section_names.add(name) for name in (".shstrtab", ".strtab", ".symtab")]
    file = bytearray(ELF_HEADER_BYTES)
    headers = [bytes(_SECTION_HEADER.size)]

    def add(
        name: int, kind: int, flags: int, link: int, info: int, align: int, data: bytes
    ) -> None:
        file.extend(bytes(-len(file) % align))
        entry = _SYMBOL.size if kind == _SHT_SYMTAB else 0
        headers.append(
            _SECTION_HEADER.pack(
                name, kind, flags, 0, len(file), len(data), link, info, align, entry
            )
        )
        file.extend(data)

    add(own[0], _SHT_STRTAB, 0, 0, 0, 1, bytes(section_names.data))
    add(own[1], _SHT_STRTAB, 0, 0, 0, 1, bytes(names.data))
    add(own[2], _SHT_SYMTAB, 0, _STRTAB, 1, 8, bytes(symbols))
    for name, info, code in code_sections:
        add(name, _SHT_PROGBITS, _SHF_ALLOC_EXECINSTR, _SYMTAB, info, _CODE_ALIGNMENT, code)
    for name, info, attributes in attribute_sections:
        add(name, _SHT_CUDA_INFO, _SHF_INFO_LINK, _SYMTAB, info, 4, attributes)
    file.extend(bytes(-len(file) % 8))
    file[:ELF_HEADER_BYTES] = header
    struct.pack_into("<QQ", file, 32, 0, len(file))  # e_phoff, e_shoff
    # e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx
    struct.pack_into(
        "<6H", file, 52, ELF_HEADER_BYTES, 0, 0, _SECTION_HEADER.size, len(headers), _SHSTRTAB
    )
    return bytes(file) + b"".join(headers)


class _Names:
    """A string table."""

    def __init__(self) -> None:
        self.data = bytearray(1)

    def add(self, name: str) -> int:
        offset = len(self.data)
        self.data += name.encode() + b"\0"
        return offset
