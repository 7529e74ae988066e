"""Requests of a host program, and their answers (`stub/wire.h`)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_REQUEST = struct.Struct("=4Q")
"""Bytes of the request's name, bytes of the caller's name, count of numbers, count of bytes."""
_ANSWER = struct.Struct("=3Q")
"""Error, count of numbers, count of bytes."""


@dataclass(frozen=True)
class Request:
    """A call of the program. `caller`: the function of CUDA that it has called."""

    name: str
    caller: str
    numbers: tuple[int, ...]
    content: bytes


class Connection:
    """The socket that a program has the other end of."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def receive(self) -> Request | None:
        """The next request; None once the program has ended."""
        head = self._read(_REQUEST.size)
        if head is None:
            return None
        name, caller, count, size = _REQUEST.unpack(head)
        parts = [self._read(n) for n in (name, caller, 8 * count, size)]
        if None in parts:
            return None
        first, second, numbers, content = (part or b"" for part in parts)
        return Request(
            first.decode(), second.decode(), struct.unpack(f"={count}Q", numbers), content
        )

    def answer(self, error: int, numbers: Sequence[int] = (), content: bytes = b"") -> None:
        """Answers the request. A program that has ended meanwhile is no error."""
        head = _ANSWER.pack(error, len(numbers), len(content))
        try:
            self._end.sendall(head + struct.pack(f"={len(numbers)}Q", *numbers) + content)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _read(self, size: int) -> bytes | None:
        """So many bytes; None if there is an end before."""
        data = bytearray()
        while len(data) < size:
            try:
                part = self._end.recv(min(size - len(data), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            data += part
        return bytes(data)
