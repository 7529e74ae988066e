"""Refusals of what a module cannot compute, each with the value, the limit and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

    Mask = Bool[Tensor, "batch length"] | Integer[Tensor, " batch"]

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_heads(width: int, heads: int) -> int:
    """Return the head size. Raises ValueError for heads that do not divide the width."""
    check_size("width", width)
    check_size("heads", heads)
    if width % heads:
        divisors = [n for n in range(1, width + 1) if not width % n]
        nearest = min(divisors, key=lambda n: abs(n - heads))
        raise ValueError(
            f"width {width} is not a multiple of heads {heads}: each head takes an equal share; "
            f"use heads {nearest}"
        )
    return width // heads


def check_size(name: str, value: int) -> None:
    """Raises TypeError for a value that is no whole number, ValueError for one below 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: pass a whole number")
    if value < 1:
        raise ValueError(f"{name} {value} is less than 1: use 1 or more")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: pass {' or '.join(map(repr, choices))}")


def check_dropout(dropout: float) -> None:
    """Raises ValueError for a probability below 0, or of 1 and more."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout} is not from 0 up to, but without, 1: use 0 for none")


def check_tokens(
    name: str,
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, "out width"],
    *,
    may_be_empty: bool = False,
) -> None:
    """Check the tokens that a linear layer with this weight reads.

    Raises TypeError for another dtype than the weight's, outside of autocast; ValueError for
    another number of dimensions, another width, and, unless they may be empty, no tokens.
    """
    width = weight.shape[1]
    if x.ndim != 3:
        raise ValueError(
            f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: pass (batch, tokens, {width})"
        )
    if x.shape[2] != width:
        raise ValueError(
            f"{name} has width {x.shape[2]} and the module was made for {width}: project {name} to "
            f"{width}, or make the module for {x.shape[2]}"
        )
    if not may_be_empty and x.shape[1] == 0:
        raise ValueError(f"{name} has 0 tokens, shape {tuple(x.shape)}: pass at least 1")
    check_dtype(name, x, weight)


def check_condition(
    condition: Float[Tensor, "batch width"],
    x: Float[Tensor, "batch length other"],
    weight: Float[Tensor, "out width"],
) -> None:
    """Check the condition of an adaptive norm, one row per sample of x. Raises as `check_tokens`
    does."""
    wanted = (x.shape[0], weight.shape[1])
    if condition.ndim != 2 or tuple(condition.shape) != wanted:
        raise ValueError(
            f"condition has shape {tuple(condition.shape)}: pass (batch, condition width), {wanted}"
        )
    check_dtype("condition", condition, weight)


def check_dtype(name: str, x: Tensor, weight: Tensor) -> None:
    """Raises TypeError for another dtype than the weight's, outside of autocast."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} is {x.dtype} and the weights are {weight.dtype}: convert one of them with "
            f".to(), or call under torch.autocast({x.device.type!r})"
        )


def check_batch(x: Tensor, context: Tensor) -> None:
    """Raises ValueError for a context of another batch, TypeError for one of another dtype."""
    if x.shape[0] != context.shape[0]:
        raise ValueError(
            f"context has batch {context.shape[0]} and x {x.shape[0]}: pass one context per "
            f"sequence, such as context.expand({x.shape[0]}, -1, -1) of one for all"
        )
    if x.dtype != context.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"context is {context.dtype} and x is {x.dtype}: convert one of them with .to()"
        )


def check_rotary(rotary: Float[Tensor, "positions pairs 2"], length: int, d_head: int) -> None:
    """Raises ValueError for a table with fewer positions than the sequence has tokens, and for one
    of another head size."""
    if d_head % 2:
        raise ValueError(
            f"the head size is {d_head} and rotary embedding turns pairs of elements: use an even "
            "head size, or pass rotary=None"
        )
    if rotary.ndim != 3 or tuple(rotary.shape[1:]) != (d_head // 2, 2):
        raise ValueError(
            f"rotary has shape {tuple(rotary.shape)} and heads of {d_head} need (positions, "
            f"{d_head // 2}, 2): pass rotary_table({length}, {d_head})"
        )
    if rotary.shape[0] < length:
        raise ValueError(
            f"rotary has {rotary.shape[0]} positions and the sequence {length} tokens: pass "
            f"rotary_table({length}, {d_head}), or make the model with length={length}"
        )


def checked_mask(name: str, mask: Mask | None, of: Tensor) -> Bool[Tensor, "batch length"] | None:
    """Return which tokens count, from a mask or from lengths; None if all do.

    of: the tokens, (batch, length, width). Raises TypeError for another dtype, ValueError for
    another shape.
    """
    if mask is None:
        return None
    batch, length = of.shape[:2]
    if mask.dtype == torch.bool:
        if tuple(mask.shape) != (batch, length):
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}: pass (batch, tokens), {(batch, length)}, "
                "true for tokens that count"
            )
        return mask
    if mask.dtype not in INTEGERS:
        raise TypeError(
            f"{name} is {mask.dtype}: pass bools of shape {(batch, length)}, true for tokens that "
            f"count, or whole numbers of shape {(batch,)}, the tokens of each sample"
        )
    if tuple(mask.shape) != (batch,):
        raise ValueError(
            f"{name} is {mask.dtype}, the tokens of each sample, and has shape "
            f"{tuple(mask.shape)}: pass (batch,), {(batch,)}; a mask must be of dtype bool"
        )
    return torch.arange(length, device=mask.device) < mask[:, None]
