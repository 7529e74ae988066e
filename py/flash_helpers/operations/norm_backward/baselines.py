"""PyTorch's gradients of norms, and copies: the libraries that the kernels are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from flash_helpers.measure.libraries import LIGER, Package, compiled, copied
from flash_helpers.operations.norm_backward.formulas import gradients
from flash_helpers.operations.norm_backward.problem import NormBackward

PACKAGES: Mapping[str, Package] = MappingProxyType({"liger_norm": LIGER})


_LIGER_FP32 = 1  # its casting mode "gemma": the kernels compute in fp32, too


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


def _by_liger(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, dweight and dbias. The bias that layer norm asks for is not read."""
    from liger_kernel.ops.layer_norm import layer_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    if mean is None:
        settings = calculate_settings(x.shape[-1])
        options = 0.0, _LIGER_FP32, *settings, False, None, of_weight
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, *options)
        return dx, dweight, None
    if weight is None:
        raise ValueError("Liger's layer norm has a weight: pass one, or leave out the library")
    found: tuple[torch.Tensor | None, ...] = layer_norm_backward(
        dy, x, weight, weight, mean, rstd, of_weight, of_bias
    )
    return found


_compiled = functools.cache(lambda: compiled(gradients))


def run(
    library: str, problem: NormBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the problem's outputs by one of the operation's libraries.

    For "copy" dx is a copy of dy, after one of half of the rows of x: reading and writing half of x
    moves as many bytes as reading it. Raises ValueError without the weight that Liger needs,
    RuntimeError for rows that are too long for it.
    """
    dy, x = tensors["dy"], tensors["x"]
    if library == "copy":
        copied(x[: problem.rows // 2])
        return {"dx": copied(dy)}
    function = _by_liger if library == "liger_norm" else _eager
    if library == "compiled_norm":
        function = _compiled()
    found = function(
        *(dy, x, tensors["rstd"], tensors.get("mean"), tensors.get("weight")),
        of_weight=problem.dweight,
        of_bias=problem.dbias,
    )
    named = zip(("dx", "dweight", "dbias"), found, strict=True)
    wanted = {tensor.name for tensor in problem.outputs}
    return {name: value for name, value in named if name in wanted and value is not None}
