"""PyTorch's gradients of norms, and copies: the libraries that the kernels are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.norm_backward.formulas import gradients
from flash_helpers.operations.norm_backward.problem import NormBackward

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def _eager(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, dweight and dbias by the operators that autograd calls. They need a weight for its
    gradient, and a bias for that of the bias: the same tensor will do, since none reads it."""
    shape = x.shape[-1:]
    if mean is None:
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            dy, x, shape, rstd[:, None], weight, (True, of_weight and weight is not None)
        )
        return dx, dweight, None
    given = weight if weight is not None or not (of_weight or of_bias) else torch.ones_like(x[0])
    found: tuple[torch.Tensor | None, ...] = torch.ops.aten.native_layer_norm_backward(
        *(dy, x, shape, mean[:, None], rstd[:, None], given, given, (True, of_weight, of_bias))
    )
    return found


_compiled = functools.cache(lambda: compiled(gradients))


def run(
    library: str, problem: NormBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the problem's outputs by one of the operation's libraries.

    For "copy" dx is a copy of dy, after one of half of the rows of x: reading and writing half of x
    moves as many bytes as reading it.
    """
    dy, x = tensors["dy"], tensors["x"]
    if library == "copy":
        copied(x[: problem.rows // 2])
        return {"dx": copied(dy)}
    function = _compiled() if library == "compiled_norm" else _eager
    found = function(
        *(dy, x, tensors["rstd"], tensors.get("mean"), tensors.get("weight")),
        of_weight=problem.dweight,
        of_bias=problem.dbias,
    )
    named = zip(("dx", "dweight", "dbias"), found, strict=True)
    wanted = {tensor.name for tensor in problem.outputs}
    return {name: value for name, value in named if name in wanted and value is not None}
