"""Where the elements of a wgmma operand lie: every place is computed here from the canonical
layouts as the PTX ISA 9.0 writes them ("Canonical Layouts"), coordinate by coordinate."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flash_helpers.ptx.run.memory.descriptors import Descriptor, MatrixOperand

T = 8
"""Elements of 16 bits in 128 bits."""
MODES = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Mode:
    """A coordinate of a CuTe layout: shape and strides, the first factor varies fastest."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self, index: int) -> int:
        at = 0
        for size, stride in zip(self.shape[:-1], self.strides, strict=False):
            index, rest = divmod(index, size)
            at += rest * stride
        return at + index * self.strides[-1]


def swizzled(address: int, bits: int) -> int:
    """Swizzle<bits, 4, 3> of a byte address."""
    return address ^ (address >> 3 & ((1 << bits) - 1) << 4)


def canonical(
    k_major: bool, width: int, leading: int, stride: int, rows: int
) -> tuple[Mode, Mode, int]:
    """The layout of the ISA's table, in elements: modes of M or N and of K, swizzle bits."""
    n = width // 16
    if k_major:
        across = Mode((8, rows // 8), ((n or 1) * T, stride // 2))
        along = Mode((T, 2), (1, T if width else leading // 2))
    elif width:
        across = Mode((T, n, max(rows // (n * T), 1)), (1, T, leading // 2))
        along = Mode((8, 2), (n * T, stride // 2))
    else:
        across = Mode((T, 1, rows // T), (1, T, stride // 2))
        along = Mode((8, 2), (T, leading // 2))
    return across, along, {0: 0, 32: 1, 64: 2, 128: 3}[width]


def encode(start: int, leading: int, stride: int, base_offset: int = 0, swizzle: int = 0) -> int:
    fields = ((start >> 4, 0), (leading >> 4, 16), (stride >> 4, 32), (base_offset, 49))
    return sum(value << at for value, at in fields) | MODES[swizzle] << 62


def elements(operand: MatrixOperand, descriptor: int) -> np.ndarray:
    """The byte address of every element, (rows, 16)."""
    memory = np.arange(1 << 16, dtype=np.uint16)  # of 128 KiB
    chunks = memory.reshape(-1, 8)[operand.addresses(descriptor) // 16]
    return operand.matrix(chunks).astype(np.int64) * 2


@pytest.mark.parametrize("width", MODES)
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("rows", [8, 64, 80, 136, 256])
@pytest.mark.parametrize("start", [0, 32, 1024, 5120 + 64])
def test_elements_lie_where_the_canonical_layouts_say(k_major, width, rows, start):
    atom = 8 * (width or 16)
    for leading, stride in ((atom, 2 * atom), (32 * atom, atom), (16 * atom + 16, 1040)):
        if max(leading, stride) * max(rows // 8, 2) > 1 << 16:
            continue
        across, along, bits = canonical(k_major, width, leading, stride, rows)
        found = elements(
            MatrixOperand(rows, k_major), encode(start, leading, stride, swizzle=width)
        )
        expected = [
            [swizzled(start + 2 * (across(row) + along(k)), bits) for k in range(16)]
            for row in range(rows)
        ]
        assert found.tolist() == expected


class TestBaseOffset:
    """PTX ISA 9.0, "Matrix Descriptor Format": base offset = (pattern start >> 7) & 7."""

    @pytest.mark.parametrize("width", [32, 64, 128])
    @pytest.mark.parametrize("k_major", [True, False])
    @pytest.mark.parametrize("offset", range(8))
    def test_a_pattern_that_starts_elsewhere_is_the_same_pattern(self, width, k_major, offset):
        operand, strides = MatrixOperand(64, k_major), (8192, 8 * width)
        plain = elements(operand, encode(1024, *strides, swizzle=width))
        moved = elements(operand, encode(1024 + 128 * offset, *strides, offset, width))
        assert (moved - plain == 128 * offset).all()


class TestAgainstTheChip:
    """All swizzles, both majors, A and B: base offsets, starts that are not where a pattern begins,
    and rows that one crosses. Recorded by kernels/wgmma_layouts.cu."""

    def test_every_element_comes_from_where_an_h200_read_it(self):
        recorded = np.load(Path(__file__).parent / "kernels/wgmma_layouts.npz")
        assert len(recorded["cases"]) == 376
        for case, steps in zip(recorded["cases"].tolist(), recorded["steps"], strict=True):
            _, is_transposed, start, leading, stride, base, mode = case
            bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | mode << 62
            found = elements(MatrixOperand(64, not is_transposed), bits)
            recorded_at = 2 * np.cumsum(steps, dtype=np.int64).reshape(64, 16)
            assert (found == recorded_at).all(), case


class TestMalformed:
    @pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 48, 52, 61])
    def test_a_reserved_bit_is_refused(self, bit):
        with pytest.raises(ValueError, match="none of its fields"):
            MatrixOperand(64, True).addresses(encode(0, 16, 1024, swizzle=128) | 1 << bit)

    def test_a_base_offset_needs_a_swizzle(self):
        with pytest.raises(ValueError, match="base offset 3 and no swizzle"):
            MatrixOperand(64, True).addresses(encode(0, 16, 1024, base_offset=3))

    def test_fields_in_bytes(self):
        assert Descriptor.decode(encode(0x3FFF0, 48, 1040, 5, 64)) == Descriptor(
            0x3FFF0, 48, 1040, 5, 64
        )
