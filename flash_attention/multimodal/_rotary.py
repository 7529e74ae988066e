"""Rotary embedding by complex pairs: neighbouring elements are a complex number, which is turned by
an angle that grows with the position of its token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flash_attention.multimodal._checks import check_size

if TYPE_CHECKING:
    from jaxtyping import Float

BASE = 10000.0


def rotary_table(
    length: int,
    d_head: int,
    *,
    base: float = BASE,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "length pairs 2"]:
    """Return cosine and sine of the angle of each position and pair: position · base^(-2i/d_head)
    of pair i (Su et al., RoFormer, section 3.2.2). Angles are computed in float64.

    Raises ValueError for an odd head size.
    """
    check_size("length", length)
    check_size("d_head", d_head)
    if d_head % 2:
        raise ValueError(
            f"d_head {d_head} is odd and rotary embedding turns pairs of elements: use an even "
            "head size"
        )
    powers = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
    angles = torch.outer(torch.arange(length, dtype=torch.float64), base**-powers)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(dtype).to(device)


def rotate(
    x: Float[Tensor, "batch seq heads d_head"], rotary: Float[Tensor, "positions pairs 2"]
) -> Float[Tensor, "batch seq heads d_head"]:
    """Return x with each pair of elements turned, in the dtype of x. Token i takes row i of the
    table, in the table's precision at least."""
    cos, sin = rotary[: x.shape[1], None].unbind(-1)  # (seq, 1, pairs)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


class RotaryTable(nn.Module):
    """The table of a model, on its device. It is no part of the state_dict. It stays in float32
    where a model is converted to 16 bits, which hold no angle, and follows it to float64."""

    table: Tensor

    def __init__(self, length: int, d_head: int, *, base: float = BASE) -> None:
        super().__init__()
        self.sizes, self.base = (length, d_head), base
        self.register_buffer("table", rotary_table(*self.sizes, base=base), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert or move, as `Module.to` and its like ask, and make the table again: conversion
        rounds it, and `to_empty` does not fill it."""
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.table.dtype, torch.float32)
        self.table = rotary_table(
            *self.sizes, base=self.base, device=self.table.device, dtype=dtype
        )
        return self

    def forward(self) -> Float[Tensor, "length pairs 2"]:
        """Return the table."""
        return self.table
