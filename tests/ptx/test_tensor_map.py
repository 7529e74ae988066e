"""Tensor maps keep the rules of cuTensorMapEncodeTiled, and their record comes back."""

import pytest

from flash_helpers.ptx import TensorMap
from flash_helpers.ptx.tensor_map import ELEMENT_BYTES, TENSOR_MAP_BYTES

BASE = 0x7F00_0000_1000


def tensor_map(**changes) -> TensorMap:
    fields = {"dtype": "bf16", "address": BASE, "dims": (128, 64, 4), "box": (64, 32, 1)}
    return TensorMap(**fields | changes)


class TestRules:
    """Each rule of the driver: what breaks it, and what just keeps it."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"address": BASE + 8}, "0x7f0000001008, which is not a multiple of 16"),
            ({"dims": (), "box": ()}, "0 dimensions: a tensor map has 1 to 5"),
            ({"dims": (8,) * 6, "box": (8,) * 6}, "6 dimensions"),
            ({"dims": (128, 0, 4)}, r"dims\[1\] is 0: give 1 to 4294967296"),
            ({"dims": (128, 2**32 + 1, 4)}, r"dims\[1\] is 4294967297"),
            ({"dims": (12, 64, 4), "box": (8, 1, 1)}, r"strides\[0\] is 24 bytes: .* multiple of"),
            ({"strides": (256, 2**40)}, r"strides\[1\] is 1099511627776 bytes: .* below 2\^40"),
            ({"strides": (256, -16)}, r"strides\[1\] is -16"),
            ({"box": (64, 0, 1)}, r"box\[1\] is 0: give 1 to 256"),
            ({"box": (64, 257, 1)}, r"box\[1\] is 257: give 1 to 256"),
            ({"box": (4, 32, 1)}, "a row of the box is 4 x 2 = 8 bytes: .* multiple of 16"),
            ({"box": (256, 229, 2)}, "234496 bytes in a box: give at most 233472"),
            ({"element_strides": (1, 0, 1)}, r"element_strides\[1\] is 0: give 1 to 8"),
            ({"element_strides": (1, 9, 1)}, r"element_strides\[1\] is 9: give 1 to 8"),
            ({"swizzle": "32B", "box": (32, 8, 1)}, "32 x 2 = 64 bytes, but swizzle 32B allows 32"),
            ({"swizzle": "64B"}, "64 x 2 = 128 bytes, but swizzle 64B allows 64"),
            ({"swizzle": "128B", "box": (72, 8, 1)}, "144 bytes, but swizzle 128B allows 128"),
            ({"dtype": "u16", "fill": "nan"}, "fill 'nan' of u16: only a tensor of f16"),
            ({"dtype": "f8"}, "dtype is 'f8': give one of u8"),
            ({"swizzle": "16B"}, "swizzle is '16B': give one of none, 32B"),
            ({"fill": "ones"}, "fill is 'ones'"),
            ({"l2_promotion": "32B"}, "l2_promotion is '32B'"),
            ({"box": (64, 32)}, "2 numbers in box: 3 are due for 3 dimensions"),
            ({"strides": (256,)}, "1 numbers in strides: 2 are due"),
            ({"element_strides": (1, 1)}, "2 numbers in element_strides: 3 are due"),
        ],
    )
    def test_what_the_driver_refuses(self, changes, message):
        with pytest.raises(ValueError, match=message):
            tensor_map(**changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"address": BASE + 16},
            {"dims": (8,) * 5, "box": (8,) * 5},
            {"dims": (2**32, 64), "box": (64, 32)},
            {"strides": (256, 2**40 - 16)},
            {"strides": (0, 0)},
            {"box": (256, 228, 2)},
            {"box": (256, 256, 3), "element_strides": (1, 2, 1)},
            {"box": (8, 1, 1)},
            {"element_strides": (1, 8, 1)},
            {"swizzle": "32B", "box": (16, 8, 1)},
            {"swizzle": "64B", "box": (32, 8, 1)},
            {"swizzle": "128B"},
            {"fill": "nan"},
        ],
    )
    def test_what_it_just_allows(self, changes):
        assert TensorMap.decode(tensor_map(**changes).encode()) == tensor_map(**changes)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("dtype", "tf32"),
            ("dtype", "u4_align16"),
            ("interleave", "16B"),
            ("interleave", "32B"),
            ("swizzle", "128B_atom_32B"),
            ("swizzle", "128B_atom_64B"),
        ],
    )
    def test_what_is_not_simulated_is_refused_by_name(self, name, value):
        with pytest.raises(ValueError, match=f"{name} '{value}' .* is not simulated: use one of"):
            tensor_map(**{name: value})


class TestWhatFollows:
    def test_strides_of_a_tensor_without_gaps(self):
        assert tensor_map().strides == (256, 256 * 64)
        assert tensor_map(dtype="f64").strides == (1024, 1024 * 64)

    def test_the_driver_ignores_the_step_along_dimension_0(self):
        strided = tensor_map(element_strides=(2, 3, 1))
        assert strided.element_strides == (1, 3, 1)

    def test_a_box_with_steps_moves_fewer_elements(self):
        strided = tensor_map(box=(64, 32, 4), element_strides=(1, 3, 2))
        assert strided.moved == (64, 11, 2)
        assert strided.box_bytes == 2 * 64 * 11 * 2

    @pytest.mark.parametrize("dtype", ELEMENT_BYTES)
    def test_bytes_of_a_box(self, dtype):
        box = TensorMap(dtype, BASE, (64, 8), (16, 4))
        assert box.box_bytes == 16 * 4 * ELEMENT_BYTES[dtype]

    def test_a_map_says_what_it_is(self):
        assert str(tensor_map(swizzle="128B")) == (
            "tensor map of 128 x 64 x 4 bf16 at 0x7f0000001000, box 64 x 32 x 1, swizzle 128B"
        )


class TestRecord:
    @pytest.mark.parametrize("rank", range(1, 6))
    def test_it_comes_back(self, rank):
        dims, box = (64, 48, 40, 5, 3)[:rank], (32, 7, 6, 2, 3)[:rank]
        written = TensorMap(
            "f16", BASE, dims, box, element_strides=(1, 2, 3, 1, 8)[:rank],
            swizzle="64B", l2_promotion="256B", fill="nan",
        )  # fmt: skip
        record = written.encode()
        assert len(record) == TENSOR_MAP_BYTES
        assert TensorMap.decode(record) == written

    @pytest.mark.parametrize("record", [b"", bytes(128), tensor_map().encode()[:64]])
    def test_other_bytes_are_no_map(self, record):
        with pytest.raises(ValueError, match=f"{len(record)} bytes that TensorMap.encode has not"):
            TensorMap.decode(record)

    @pytest.mark.parametrize(("offset", "message"), [(8, "77 dimensions"), (11, "swizzle 77")])
    def test_an_overwritten_record_is_seen(self, offset, message):
        record = bytearray(tensor_map().encode())
        record[offset] = 77
        with pytest.raises(ValueError, match=message):
            TensorMap.decode(bytes(record))
