"""Archives to read, as ar(1) writes them, and object files of the host."""

import struct


def archive(*members: tuple[bytes, bytes]) -> bytes:
    """By the field of their name, the members of an archive."""
    return b"!<arch>\n" + b"".join(
        b"%-16s%-12d%-6d%-6d%-8d%-10d`\n" % (name, 0, 0, 0, 644, len(data))
        + data
        + b"\n" * (len(data) % 2)
        for name, data in members
    )


def host_object(section: str, content: bytes) -> bytes:
    """An object file for x86-64 with one section of data."""
    names = b"\0.shstrtab\0" + section.encode() + b"\0"
    header, table = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
    at_names = header.size + len(content)
    headers = at_names + len(names)
    rows = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (1, 3, 0, 0, at_names, len(names), 0, 0, 1, 0),
        (11, 1, 3, 0, header.size, len(content), 0, 0, 1, 0),
    ]
    magic = b"\x7fELF\x02\x01\x01"
    start = header.pack(magic, 1, 62, 1, 0, 0, headers, 0, header.size, 0, 0, table.size, 3, 1)
    return start + content + names + b"".join(table.pack(*row) for row in rows)
