"""The text that printf makes of a format and its arguments (C11, 7.21.6.1 "The fprintf function").

Of that, what device code has: CUDA C++ Programming Guide, "Formatted Output".
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

_SPECIFICATION = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?"
    rb"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXeEfFgGaAcsp%])"
)
_BYTES = {b"hh": 1, b"h": 2, b"": 4}  # of an integer that is printed; all others have 8


def c_format(
    text: bytes, argument: Callable[[int], bytes], string: Callable[[int], bytes]
) -> bytes:
    """The text with every conversion replaced. argument: the next argument, of so many bytes, to
    which it is aligned. string: what stands at an address, up to the zero.

    A conversion that C does not know is left as it is.
    """

    def integer(size: int, *, signed: bool) -> int:
        data = argument(max(size, 4))[:size]
        return int.from_bytes(data, "little", signed=signed)

    def count(digits: bytes | None) -> int | None:
        if digits is None:
            return None
        return integer(4, signed=True) if digits == b"*" else int(digits or b"0")

    def converted(match: re.Match[bytes]) -> bytes:
        kind, flags = match["kind"].decode(), match["flags"].decode()
        if kind == "%":
            return b"%"
        width = count(match["width"])
        if width < 0:
            flags, width = flags + "-", -width
        precision = count(match["precision"])
        precision = None if precision is not None and precision < 0 else precision
        size = _BYTES.get(match["length"] or b"", 8)
        zeros = "0" in flags
        if kind == "c":
            sign, body, zeros = "", chr(integer(4, signed=False) & 0xFF), False
        elif kind == "s":
            found = string(integer(8, signed=False)) or b""
            sign, body, zeros = "", found[:precision].decode("latin-1"), False
        elif kind == "p":
            address = integer(8, signed=False)
            sign, body, zeros = "", f"{address:#x}" if address else "(nil)", False
        elif kind in "diouxX":
            value = integer(size, signed=kind in "di")
            sign, body = _integer(value, kind, flags, precision)
            zeros = zeros and precision is None
        else:
            (value,) = struct.unpack("<d", argument(8))
            sign, body = _float(value, kind, flags, precision)
            zeros = zeros and math.isfinite(value)
        missing = max(width - len(sign) - len(body), 0)
        if "-" in flags:
            whole = sign + body + " " * missing
        else:
            whole = sign + "0" * missing + body if zeros else " " * missing + sign + body
        return whole.encode("latin-1")

    return _SPECIFICATION.sub(converted, text)


def _sign(is_negative: bool, flags: str) -> str:
    return "-" if is_negative else "+" if "+" in flags else " " if " " in flags else ""


def _integer(value: int, kind: str, flags: str, precision: int | None) -> tuple[str, str]:
    """Sign or prefix, and digits."""
    digits = format(abs(value), {"x": "x", "X": "X", "o": "o"}.get(kind, "d"))
    digits = "" if precision == 0 and value == 0 else digits.rjust(precision or 1, "0")
    if kind in "di":
        return _sign(value < 0, flags), digits
    if "#" in flags and kind == "o" and not digits.startswith("0"):
        digits = f"0{digits}"
    return f"0{kind}" if "#" in flags and kind in "xX" and value else "", digits


def _float(value: float, kind: str, flags: str, precision: int | None) -> tuple[str, str]:
    """Sign and prefix, and digits."""
    sign, x = _sign(math.copysign(1, value) < 0, flags), abs(value)
    if not math.isfinite(x):
        body = "nan" if math.isnan(x) else "inf"
    elif kind in "aA":
        sign, body = f"{sign}0x", _hexadecimal(x, flags, precision)
    else:
        places = 6 if precision is None else precision
        body = f"%{'#' if '#' in flags else ''}.{places}{kind}" % x
    return (sign.upper(), body.upper()) if kind.isupper() else (sign, body)


def _hexadecimal(x: float, flags: str, precision: int | None) -> str:
    head, fraction, exponent = re.fullmatch(r"0x(\d)\.?([0-9a-f]*)p(.*)", x.hex()).groups()
    if precision is None:
        fraction = fraction.rstrip("0")
    else:
        bits, cut = int(head + fraction.ljust(13, "0"), 16), 4 * (13 - precision)
        if cut > 0:
            # To the nearest, or the even one of two.
            bits = (bits + (1 << (cut - 1)) - 1 + (bits >> cut & 1)) >> cut
        digits = f"{bits:x}".rjust(min(precision, 13) + 1, "0")
        head, fraction = digits[0], digits[1:].ljust(precision, "0")
    point = "." if fraction or "#" in flags else ""
    return f"{head}{point}{fraction}p{exponent}"
