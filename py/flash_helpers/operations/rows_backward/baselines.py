"""The gradient of softmax by PyTorch, and a copy: what kernels of rows_backward are measured
beside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.measure.libraries import LIGER, Package, compiled, copied
from flash_helpers.operations.rows_backward.problem import RowsBackward

PACKAGES: Mapping[str, Package] = MappingProxyType({"liger_softmax": LIGER})


def plain(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return dx, (rows, width), by PyTorch's own operator."""
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def gradient(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return dx by the formula in fp32, or float64, rounded once. It can be differentiated."""
    computed = torch.promote_types(y.dtype, torch.float32)
    products = y.to(computed) * dy.to(computed)
    return (products - y.to(computed) * products.sum(-1, keepdim=True)).to(y.dtype)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return compiled(gradient)


def run(
    library: str, problem: RowsBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return dx, (rows, width), by one of the operation's libraries. "copy" moves as many bytes: it
    returns a copy of y, and copies half of the rows of dy. Raises RuntimeError for rows that are
    too long for Liger."""
    y, dy = tensors["y"], tensors["dy"]
    if library == "copy":
        copied(dy[: problem.rows // 2])
        return {"dx": copied(y)}
    if library == "liger_softmax":
        from liger_kernel.ops.softmax import _softmax_backward
        from liger_kernel.ops.utils import calculate_settings

        return {"dx": _softmax_backward(dy, y, *calculate_settings(y.shape[-1]), False)}
    return {"dx": (_compiled() if library == "compiled_gradient" else plain)(y, dy)}
