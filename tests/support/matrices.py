"""Matrices whose rows lie apart in memory, for tests of kernels that take rows at any element."""

import math

import pytest
import torch

from flash_helpers.kernel_configs import Element

DTYPES = {Element.FP16: torch.float16, Element.BF16: torch.bfloat16, Element.FP32: torch.float32}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.short)


def spread(x: torch.Tensor, gap: int, first: int) -> torch.Tensor:
    """A view of x's shape in memory full of NaN: rows that are `gap` elements apart, from an
    element `first` on."""
    *rows, width = x.shape
    size = first + math.prod(rows) * (width + gap)
    memory = torch.full((size,), math.nan, dtype=x.dtype, device=x.device)
    return memory[first:].as_strided(x.shape, (width + gap, 1)[-x.ndim :])


def padded(x: torch.Tensor, gap: int, first: int) -> torch.Tensor:
    """The same values, spread."""
    return spread(x, gap, first).copy_(x)
