"""CUDA release of the installed driver, beside that of a compiler. Standard library only."""

from __future__ import annotations

import ctypes
import functools

DRIVER = "libcuda.so.1"


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA release that the driver knows, e.g. (12, 8); None without a driver."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def newer_than_driver(what: str, driver: tuple[int, int], instead: str) -> str:
    """The sentence about something that is newer than the driver. `instead`: the other way out."""
    major, minor = driver
    return (
        f"{what} is newer than the driver, which knows CUDA up to {major}.{minor}: install a newer "
        f"driver, or {instead}"
    )
