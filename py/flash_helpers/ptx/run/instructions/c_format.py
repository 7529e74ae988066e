"""The text that printf makes of a format and its arguments: each conversion as the C library prints
it.

CUDA C++ Programming Guide, "Formatted Output", lists the conversions of device code.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

_SPECIFICATION = re.compile(
    rb"%(?P<how>[-+ #0]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?)"
    rb"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXeEfFgGaAcsp%])"
)
_OF_INT = (None, b"h", b"hh")  # lengths of integers of at most 4 bytes; all others have 8

_Value = ctypes.c_int | ctypes.c_longlong | ctypes.c_double | ctypes.c_void_p | ctypes.c_char_p


def c_format(
    text: bytes, argument: Callable[[int], bytes], string: Callable[[int], bytes]
) -> bytes:
    """The text with every conversion replaced. `argument`: returns the next argument, given its
    bytes, to which it is aligned. `string`: returns the bytes at an address, up to the zero.

    A conversion that C does not know is left as it is.
    """

    def next_int() -> ctypes.c_int:
        return ctypes.c_int.from_buffer_copy(argument(4))

    def converted(match: re.Match[bytes]) -> bytes:
        kind, length = match["kind"], b""
        if kind == b"%":
            return b"%"
        sizes = [next_int() for size in (match["width"], match["precision"]) if size == b"*"]
        value: _Value
        if kind in b"diouxX" and match["length"] in _OF_INT:
            value, length = next_int(), match["length"] or b""
        elif kind in b"diouxX":
            value, length = ctypes.c_longlong.from_buffer_copy(argument(8)), b"ll"
        elif kind == b"c":
            value = next_int()
        elif kind == b"s":
            value = ctypes.c_char_p(string(int.from_bytes(argument(8), "little")))
        elif kind == b"p":
            value = ctypes.c_void_p.from_buffer_copy(argument(8))
        else:
            value = ctypes.c_double.from_buffer_copy(argument(8))
        return _printed(b"%" + match["how"] + length + kind, *sizes, value)

    return _SPECIFICATION.sub(converted, text)


def _printed(form: bytes, *values: _Value) -> bytes:
    """The text of one conversion; None where it would be longer than the C library prints."""
    snprintf = ctypes.CDLL(None).snprintf
    size = max(snprintf(None, 0, form, *values), 0)
    buffer = ctypes.create_string_buffer(size + 1)
    snprintf(buffer, size + 1, form, *values)
    return buffer.raw[:size]
