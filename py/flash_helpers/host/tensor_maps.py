"""cuTensorMapEncodeTiled: tensor maps of a host program."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.host.errors import INVALID_VALUE, CudaError
from flash_helpers.ptx.tensor_map import TensorMap

# As cuda.h numbers them: CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle,
# CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
_CHOICES = {
    "dtype": (
        *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"),
        *("f32_ftz", "tf32", "tf32_ftz", "u4_align8", "u4_align16", "u6_align16"),
    ),
    "interleave": ("none", "16B", "32B"),
    "swizzle": (
        *("none", "32B", "64B", "128B"),
        *("128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B"),
    ),
    "l2_promotion": ("none", "64B", "128B", "256B"),
    "fill": ("zeros", "nan"),
}


def encoded(*numbers: int) -> bytes:
    """The 128 bytes of a map. Numbers: one for each of `_CHOICES`, the address, the rank; then
    dimensions, strides, box and element strides, as the function takes them."""
    count = len(_CHOICES)
    chosen: dict = {}
    for (name, choices), number in zip(_CHOICES.items(), numbers, strict=False):
        if number >= len(choices):
            raise CudaError(INVALID_VALUE, f"{number} is no {name} of a tensor map")
        chosen[name] = choices[number]
    address, rank, *sizes = numbers[count:]
    if not sizes:  # the program sends none of so many
        raise CudaError(INVALID_VALUE, f"{rank} dimensions: a tensor map has 1 to 5")
    dims, strides, box, element_strides = (
        tuple(sizes[at : at + n])
        for at, n in ((0, rank), (rank, rank - 1), (2 * rank - 1, rank), (3 * rank - 1, rank))
    )
    try:
        return TensorMap(
            address=address,
            dims=dims,
            strides=strides,
            box=box,
            element_strides=element_strides,
            **chosen,
        ).encode()
    except ValueError as error:
        raise CudaError(INVALID_VALUE, str(error)) from None


def moved(address: int, content: bytes) -> bytes:
    """cuTensorMapReplaceAddress: the same map of another tensor."""
    try:
        return replace(TensorMap.decode(content), address=address).encode()
    except ValueError as error:
        raise CudaError(INVALID_VALUE, str(error)) from None
