"""The smallest ELF file that a reader of cubins takes for one with a kernel. No dependencies."""

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PROGBITS, _STRTAB = 1, 3


def cubin(symbol: str, code: bytes, registers: int = 128, constants: bytes = b"") -> bytes:
    """Machine code of one kernel; `constants` are those that it holds in bank 2."""
    sections = [
        ("", 0, b"", 0),
        (f".text.{symbol}", _PROGBITS, code, registers << 24),
        (f".nv.constant2.{symbol}", _PROGBITS, constants, 0),
    ]
    names, offsets = b"", []
    for name, *_ in [*sections, (".shstrtab", _STRTAB, b"", 0)]:
        offsets.append(len(names))
        names += name.encode() + b"\0"
    sections.append((".shstrtab", _STRTAB, names, 0))
    body, table = b"", b""
    for (_, kind, data, info), offset in zip(sections, offsets, strict=True):
        place = _HEADER.size + len(body)
        table += _SECTION.pack(offset, kind, 0, 0, place, len(data), 0, info, 1, 0)
        body += data
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    count = len(sections)
    header = _HEADER.pack(
        identity, 2, 190, 1, 0, 0, _HEADER.size + len(body), 0, 64, 0, 0, 64, count, count - 1
    )
    return header + body + table
