"""printf's conversions, against those of the C library."""

import ctypes
import random
import struct

import pytest

from flash_helpers.ptx.run.instructions.c_format import c_format

LIBC = ctypes.CDLL(None)
INTEGERS = [0, 1, -1, 255, -128, 32768, 2**31 - 1, -(2**31), 123456789, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, 1.5, -2.75, 1e-7, 123456789.125, 1e22, float("inf"), float("-inf"),
          float("nan"), 0.1, 9.9999, 5e-324, -1.7e308]  # fmt: skip


def by_c(form: bytes, *arguments: object) -> bytes:
    buffer = ctypes.create_string_buffer(1000)
    LIBC.snprintf(buffer, 1000, form, *arguments)
    return buffer.value


def ours(form: bytes, data: bytes) -> bytes:
    end = 0

    def argument(size: int) -> bytes:
        nonlocal end
        start = -(-end // size) * size
        end = start + size
        return data[start:end]

    return c_format(form, argument, lambda address: b"text")


def forms(kinds: str, rng: random.Random) -> bytes:
    flags = "".join(rng.sample("-+ #0", rng.randrange(4)))
    width, precision = rng.choice(["", "3", "25"]), rng.choice(["", ".", ".0", ".3", ".15"])
    return f"<%{flags}{width}{precision}{rng.choice(kinds)}>".encode()


@pytest.mark.parametrize(
    ("length", "size"), [("", 4), ("h", 4), ("hh", 4), ("l", 8), ("ll", 8), ("z", 8)]
)
def test_integers(length, size):
    rng = random.Random(size)
    for _ in range(500):
        form, value = forms("diouxX", rng), rng.choice(INTEGERS)
        form = form[:-2] + length.encode() + form[-2:]
        argument = {4: ctypes.c_int32, 8: ctypes.c_int64}[size](value)
        assert ours(form, bytes(argument)) == by_c(form, argument), (form, value)


def test_floats():
    rng = random.Random(1)
    for _ in range(2000):
        form, value = forms("eEfFgGaA", rng), rng.choice(FLOATS)
        expected = by_c(form, ctypes.c_double(value))
        assert ours(form, struct.pack("<d", value)) == expected, (form, value)


def test_widths_that_are_arguments():
    data = struct.pack("<3i4xd", -8, 2, 0, 3.14159)
    assert ours(b"<%*.*f>", struct.pack("<iid", -8, 2, 3.14159)) == b"<3.14    >"
    assert ours(b"<%*d%d>", data) == b"<2       0>"
    assert ours(b"<%.*s>", struct.pack("<i4xq", 2, 1)) == b"<te>"


def test_what_is_no_conversion_stays():
    assert ours(b"100%% of %y", b"") == b"100% of %y"
