"""Archives to read, as ar(1) writes them."""

from __future__ import annotations


def archive(*members: tuple[bytes, bytes]) -> bytes:
    """By the field of their name, the members of an archive."""
    return b"!<arch>\n" + b"".join(
        b"%-16s%-12d%-6d%-6d%-8d%-10d`\n" % (name, 0, 0, 0, 644, len(data))
        + data
        + b"\n" * (len(data) % 2)
        for name, data in members
    )
