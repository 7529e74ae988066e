"""Kernels of several cubins merged into one, so that nvdisasm starts once for all of them: a start
takes a third of a second, a kernel milliseconds.

Only kernels whose code stands for itself can be moved like this: `CubinKernel.self_contained`.
Their attributes move along, since nvdisasm puts labels where these name instructions. The tests
check that nvdisasm prints the same for merged kernels as for their own cubins.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from flash_helpers.console.file_kinds import ELF_HEADER_BYTES
from flash_helpers.sass.read.cubin import CubinKernel

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
    """The name of the kernel of that index in the merged cubin."""
    return f"k{index}"


def merged_cubin(header: bytes, kernels: Sequence[CubinKernel]) -> bytes:
    """A cubin with the code and attributes of `kernels`, called by `merged_name`. `header`: header
    of one of their own cubins."""
    named = [(n, merged_name(n), kernel) for n, kernel in enumerate(kernels)]
    names, name_at = _string_table([name for _, name, _ in named])
    symbols = bytes(_SYMBOL.size) + b"".join(
        _SYMBOL.pack(at, _STT_FUNC_GLOBAL, _STO_CUDA_ENTRY, _FIRST_CODE + n, 0, len(kernel.code))
        for at, (n, _, kernel) in zip(name_at, named, strict=True)
    )
    # name, kind, flags, link, info, alignment, data
    sections = [
        (".strtab", _SHT_STRTAB, 0, 0, 0, 1, names),
        (".symtab", _SHT_SYMTAB, 0, _STRTAB, 1, 8, symbols),
    ]
    for n, name, kernel in named:
        info = kernel.section.info & ~_OWN_INFO | n + 1
        how = (_SHT_PROGBITS, _SHF_ALLOC_EXECINSTR, _SYMTAB, info, _CODE_ALIGNMENT)
        sections.append((f".text.{name}", *how, kernel.code))
    for n, name, kernel in named:
        how = (_SHT_CUDA_INFO, _SHF_INFO_LINK, _SYMTAB, _FIRST_CODE + n, 4)
        sections.append((f".nv.info.{name}", *how, kernel.attributes))
    names, name_at = _string_table([".shstrtab", *(section[0] for section in sections)])
    sections.insert(0, (".shstrtab", _SHT_STRTAB, 0, 0, 0, 1, names))
    file = bytearray(ELF_HEADER_BYTES)
    headers = [bytes(_SECTION_HEADER.size)]
    for at, (_, kind, flags, link, info, align, data) in zip(name_at, sections, strict=True):
        file.extend(bytes(-len(file) % align))
        entry = _SYMBOL.size if kind == _SHT_SYMTAB else 0
        headers.append(
            _SECTION_HEADER.pack(at, kind, flags, 0, len(file), len(data), link, info, align, entry)
        )
        file.extend(data)
    file.extend(bytes(-len(file) % 8))
    file[:ELF_HEADER_BYTES] = header
    struct.pack_into("<QQ", file, 32, 0, len(file))  # e_phoff, e_shoff
    # e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx
    struct.pack_into(
        "<6H", file, 52, ELF_HEADER_BYTES, 0, 0, _SECTION_HEADER.size, len(headers), _SHSTRTAB
    )
    return bytes(file) + b"".join(headers)


def _string_table(names: Sequence[str]) -> tuple[bytes, list[int]]:
    """The names behind a zero byte, each ended by one, and where each begins."""
    texts = [b"\0", *(name.encode() + b"\0" for name in names)]
    ends = list(itertools.accumulate(map(len, texts)))
    return b"".join(texts), ends[:-1]
