"""The gradients of a linear layer, summed by row, by PyTorch, as products and by algebra; and
copies of as many bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward

PACKAGES: Mapping[str, Any] = MappingProxyType({})
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    of_x: bool = True,
    of_weight: bool = True,
    of_bias: bool = True,
) -> Gradients:
    """Return dx, dweight and dbias, those that are asked for, by algebra in fp32, each rounded
    once. dweight and dbias are expanded tensors. They can be differentiated.

    dy: (rows,). x: (rows, in_features). weight: (out_features, in_features).
    """
    dx = dweight = dbias = None
    if of_x:
        dx = (dy.float()[:, None] * weight.sum(0, dtype=torch.float32)).to(x.dtype)
    if of_weight:
        dweight = (dy.float() @ x.float()).to(weight.dtype).expand(weight.shape)
    if of_bias:
        dbias = dy.sum(dtype=torch.float32).to(dy.dtype).expand(weight.shape[0])
    return dx, dweight, dbias


def _in_memory(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> Gradients:
    """Return `gradients` with memory of their own, as the kernels and autograd give them."""
    dx, *expanded = gradients(dy, x, weight, of_x=of_x, of_weight=of_weight, of_bias=of_bias)
    dweight, dbias = (None if each is None else each.contiguous() for each in expanded)
    return dx, dweight, dbias


def _products(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> Gradients:
    """Return what autograd computes from the gradient of the layer's outputs, which is dy in each
    column."""
    outputs = dy[:, None].expand(-1, len(weight))
    return (
        outputs @ weight if of_x else None,
        outputs.T @ x if of_weight else None,
        outputs.sum(0) if of_bias else None,
    )


_compiled = functools.cache(lambda: compiled(_in_memory))


def run(
    library: str, problem: LinearRowsumBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the problem's gradients by one of the operation's libraries. For "copy" dx is a copy
    of x and dweight one of weight: they read and write as many bytes."""
    dy, x, weight = (tensors[name] for name in ("dy", "x", "weight"))
    if library == "copy":
        return {"dx": copied(x), "dweight": copied(weight)}
    function = _products if library == "pytorch" else _in_memory
    function = _compiled() if library == "compiled_gradients" else function
    asked = {"of_x": problem.dx, "of_weight": problem.dweight, "of_bias": problem.dbias}
    found = function(dy, x, weight, **asked)
    named = zip(("dx", "dweight", "dbias"), found, strict=True)
    return {name: value for name, value in named if value is not None}
