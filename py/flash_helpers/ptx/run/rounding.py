"""Rounding between floating-point formats, bit-exact.

bf16 values are held as uint16. Intermediate results that do not fit a double are rounded to odd
(Boldo and Melquiond 2008), so that the final rounding is the only one that counts.
"""

from __future__ import annotations

import numpy as np

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
_TINY32 = np.float32(np.finfo(np.float32).tiny)
_TINY16 = np.float16(np.finfo(np.float16).tiny)

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers become zeros of the same sign (`.ftz`)."""
    tiny = _TINY16 if x.dtype == F16 else _TINY32
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


def clamp_to_one(x: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 (`.sat`); a NaN becomes +0."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))


def not_negative(x: np.ndarray) -> np.ndarray:
    """Negative values become 0 (`.relu`)."""
    return np.where(x < 0, x.dtype.type(0), x)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float32 to bf16 bits (uint16); a NaN becomes the canonical 0x7fff."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "rn":
        rounded = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
    elif mode == "rz":
        rounded = bits >> np.uint32(16)
    else:
        up = (bits >> np.uint32(31)) == np.uint32(mode == "rm")
        rounded = np.where(up, bits + np.uint32(0xFFFF), bits) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f64_to_bf16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float64 to bf16 bits, rounded once."""
    return f32_to_bf16(odd_f32(x), mode)


def odd_f32(x: np.ndarray) -> np.ndarray:
    """float64 to float32, rounded to odd: a later rounding to fewer bits is then correct."""
    near = x.astype(np.float32)
    inexact = (near.astype(np.float64) != x) & np.isfinite(x)
    if not inexact.any():
        return near
    down = round_f64(x, F32, "rz")
    odd = (down.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(inexact, odd, near)


def round_f64(x: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """float64 to a NumPy float type in one of the modes of PTX."""
    near = x.astype(dtype)
    if mode == "rn" or dtype == F64:
        return near
    back = near.astype(np.float64)
    limit = dtype.type(np.inf)
    zero = dtype.type(0)
    if mode == "rz":
        over = np.abs(back) > np.abs(x)
        return np.where(over, np.nextafter(near, zero), near)
    if mode == "rm":
        return np.where(back > x, np.nextafter(near, -limit), near)
    assert mode == "rp", mode
    return np.where(back < x, np.nextafter(near, limit), near)


def round_to_integer(x: np.ndarray, mode: str) -> np.ndarray:
    """A float array rounded to integral values (`rni` to even)."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def add_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, rounded to odd."""
    total = a + b
    # Knuth's two-sum: what the rounded sum lost.
    shadow = total - a
    lost = (a - (total - shadow)) + (b - shadow)
    inexact = (lost != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # An even inexact sum moves one step towards the true value, which makes it odd.
    away = (lost > 0) == (total > 0)
    step = np.where(away, 1, -1)
    return np.where(inexact & even, bits + step, bits).view(np.float64)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c in float32 with one rounding."""
    product = np.multiply(a, b, dtype=np.float64)
    return round_f64(add_odd(product, c.astype(np.float64)), F32, mode)


def _split(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64 with one rounding (away from overflow and underflow)."""
    product = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total = product + c
    shadow = total - product
    lost = (product - (total - shadow)) + (c - shadow)
    exact = total + add_odd(lost, error)
    return np.where(np.isfinite(exact), exact, product + c)
