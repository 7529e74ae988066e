"""The float types of PTX as NumPy floats, and rounding between them, bit-exact.

Intermediate results that do not fit a double are rounded to odd (Boldo and Melquiond 2008), so that
the final rounding is the only one that counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flash_helpers.ptx.run.numbers.dtypes import dtype_of

Function = Callable[..., np.ndarray]

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")


def _fp8_values(exponent_bits: int) -> np.ndarray:
    """float32 values of the codes 0 to 127 of an 8-bit float, including the highest exponent."""
    codes, bits = np.arange(128), 7 - exponent_bits
    exponent, fraction = codes >> bits, codes & (1 << bits) - 1
    significand = np.where(exponent > 0, fraction + (1 << bits), fraction)
    bias = (1 << exponent_bits - 1) - 1
    return np.ldexp(significand.astype(F32), np.maximum(exponent, 1) - bias - bits)


# PTX ISA 9.0, "Alternate Floating-Point Data Formats": e4m3 has no infinities, and one NaN, which
# is the canonical one of both.
_FP8_NAN = 0x7F
_FP8 = {"e4m3": _fp8_values(4), "e5m2": _fp8_values(5)}
_FP8["e4m3"][_FP8_NAN] = np.nan
_FP8["e5m2"][0x7C], _FP8["e5m2"][0x7D:] = np.inf, np.nan


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers become zeros of the same sign (`.ftz`)."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def clamp_to_one(x: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 (`.sat`); a NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def not_negative(x: np.ndarray) -> np.ndarray:
    """Negative values become 0, and -0 becomes +0, as on an H200 (`.relu`)."""
    return np.where(x <= 0, x.dtype.type(0), x)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_fp8(x: np.ndarray, type_name: str) -> np.ndarray:
    """float32 to the codes (uint8) of e4m3 or e5m2: rounded to nearest, ties to even, values that
    are too large to the largest number."""
    values = _FP8[type_name]
    numbers = values[np.isfinite(values)].astype(F64)
    between = (numbers[:-1] + numbers[1:]) / 2
    magnitude = np.abs(x).astype(F64)
    code = np.searchsorted(between, magnitude)
    # Halfway between two numbers it is the lower one here, which may be odd.
    is_tie = np.searchsorted(between, magnitude, side="right") > code
    code += is_tie & (code & 1 == 1)
    code += np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), _FP8_NAN, code).astype(np.uint8)


def to_floats(registers: np.ndarray, type_name: str) -> np.ndarray:
    """Values of a float type of PTX as NumPy floats: float32 of bf16, tf32, e4m3 and e5m2 (whose
    codes are uint8); both halves of a packed type, the lower one first, (values, 2)."""
    if type_name in _FP8:
        magnitude = _FP8[type_name][registers & 0x7F]
        return np.where(registers & 0x80, -magnitude, magnitude)
    if type_name.endswith("x2"):
        type_name = type_name.removesuffix("x2")
        registers = np.ascontiguousarray(registers).view(dtype_of(type_name)).reshape(-1, 2)
    if type_name == "bf16":
        return bf16_to_f32(registers)
    return registers.view(F32) if type_name == "tf32" else registers


def to_registers(x: np.ndarray, type_name: str, mode: str = "rn") -> np.ndarray:
    """NumPy floats, as `to_floats` gives them, rounded once to a float type of PTX."""
    scalar = type_name.removesuffix("x2")
    if scalar == "bf16":
        x = odd_f32(x) if x.dtype == F64 else x.astype(F32, copy=False)
        cut = (_before_cut(x, 16, mode) >> np.uint32(16)).astype(np.uint16)
        # The canonical NaN.
        x = np.where(np.isnan(x), np.uint16(0x7FFF), cut)
    elif scalar == "tf32":
        x = x.astype(F32)
        cut = _before_cut(x, 13, mode) & np.uint32(0xFFFF_E000)
        x = np.where(np.isfinite(x), cut, x.view(np.uint32))
    else:
        x = rounded(x, dtype_of(scalar), mode)
    return (
        x if scalar == type_name else np.ascontiguousarray(x).view(dtype_of(type_name)).reshape(-1)
    )


def on_registers(type_name: str, function: Function) -> Function:
    """A function of registers of a float type, made from a function of NumPy floats."""
    if type_name in ("f16", "f32", "f64"):
        return function

    def compute(*registers: np.ndarray) -> np.ndarray:
        return to_registers(function(*[to_floats(r, type_name) for r in registers]), type_name)

    return compute


def _before_cut(x: np.ndarray, n: int, mode: str) -> np.ndarray:
    """The bits of float32 values; without the lowest n they are the rounded value."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    lowest, half = np.uint32((1 << n) - 1), np.uint32(1 << (n - 1))
    if mode == "rz":
        return bits
    if mode == "rna":
        return bits + half
    if mode == "rn":
        return bits + (half - np.uint32(1)) + ((bits >> np.uint32(n)) & np.uint32(1))
    grows = (bits >> np.uint32(31)) == np.uint32(mode == "rm")
    return np.where(grows, bits + lowest, bits)


def odd_f32(x: np.ndarray) -> np.ndarray:
    """float64 to float32, rounded to odd: a later rounding to fewer bits is then correct."""
    near = x.astype(np.float32)
    inexact = (near.astype(np.float64) != x) & np.isfinite(x)
    if not inexact.any():
        return near
    down = rounded(x, F32, "rz")
    odd = (down.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(inexact, odd, near)


def rounded(x: np.ndarray, dtype: np.dtype, mode: str = "rn") -> np.ndarray:
    """Floats to a NumPy float type, in one of the modes of PTX; float64 is always rounded to
    nearest."""
    if mode == "rn" or dtype == F64:
        # From float64 to float16 NumPy may round twice.
        return (odd_f32(x) if (x.dtype, dtype) == (F64, F16) else x).astype(dtype)
    x = x.astype(F64)
    near = x.astype(dtype)
    back = near.astype(F64)
    if mode == "rz":
        wrong, limit = np.abs(back) > np.abs(x), 0.0
    elif mode == "rm":
        wrong, limit = back > x, -np.inf
    else:
        assert mode == "rp", mode
        wrong, limit = back < x, np.inf
    return np.where(wrong, np.nextafter(near, dtype.type(limit)), near)


def round_to_integer(x: np.ndarray, mode: str) -> np.ndarray:
    """A float array rounded to integral values (`rni` to even)."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b in float64, and what the rounded sum lost (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def add_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, rounded to odd."""
    total, lost = _two_sum(a, b)
    inexact = (lost != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # An even inexact sum moves one step towards the true value, which makes it odd.
    away = (lost > 0) == (total > 0)
    step = np.where(away, 1, -1)
    return np.where(inexact & even, bits + step, bits).view(np.float64)


def _split(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64 with one rounding (except near overflow and underflow)."""
    product = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total, lost = _two_sum(product, c)
    exact = total + add_odd(lost, error)
    # A product that overflows is still finite beside an infinite c.
    is_c = np.isinf(c) & np.isfinite(a) & np.isfinite(b)
    return np.where(np.isfinite(exact), exact, np.where(is_c, c, product + c))
