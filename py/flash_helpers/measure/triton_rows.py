"""Softmax and norms in Triton, a program per row: what a page of Python gives, beside the kernels.

Imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_COLUMNS = 65536
_ELEMENTS_PER_WARP = 512  # of a row, up to _MOST_WARPS
_MOST_WARPS = 16


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, x_stride, y_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * y_stride + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    y_stride,
    width,
    eps,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=inside).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=inside).to(tl.float32)
    tl.store(y_ptr + row * y_stride + column, y, mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return softmax along the rows of x, (rows, width). Raises ValueError for rows over
    MOST_COLUMNS."""
    y, options = torch.empty_like(x), _options(x)
    _softmax_kernel[(len(x),)](x, y, x.stride(0), y.stride(0), x.shape[1], **options)
    return y


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    eps: float,
) -> torch.Tensor:
    """Return layer norm, or RMS norm, along the rows of x, (rows, width). Raises ValueError for
    rows over MOST_COLUMNS."""
    y, options = torch.empty_like(x), _options(x)
    strides = x.stride(0), y.stride(0)
    _norm_kernel[(len(x),)](x, weight, bias, y, *strides, x.shape[1], eps, rms, **options)
    return y


def _options(x: torch.Tensor) -> dict[str, int]:
    width = x.shape[1]
    if width > MOST_COLUMNS:
        raise ValueError(
            f"width {width}: a program of Triton holds a row of up to {MOST_COLUMNS} elements: "
            "leave out the library"
        )
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS)}
