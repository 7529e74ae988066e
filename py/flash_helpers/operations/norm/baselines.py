"""The norms of PyTorch, and a copy: the libraries that kernels of norms are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from flash_helpers.measure.libraries import LIGER, TRITON, Package, compiled, copied
from flash_helpers.operations.norm.problem import Norm

PACKAGES: Mapping[str, Package] = MappingProxyType({"triton_norm": TRITON, "liger_norm": LIGER})


def plain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    eps: float,
) -> torch.Tensor:
    """Return y, (rows, width), by PyTorch's own function. rms_norm takes no bias: with one, it is
    added to the result in fp32."""
    shape = x.shape[-1:]
    if not rms:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    y = torch.nn.functional.rms_norm(x, shape, weight, eps)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def _by_liger(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    eps: float,
) -> torch.Tensor:
    """Return y, (rows, width). RMS norm has no bias, layer norm has all vectors."""
    from liger_kernel.ops.layer_norm import layer_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    if rms != (bias is None) or (weight is None and not rms):
        raise ValueError(
            "Liger's RMS norm takes no bias, and its layer norm a weight and a bias: pass these, "
            "or leave out the library"
        )
    if rms:  # in fp32, as the kernels are
        return rms_norm_forward(x, weight, eps, 0.0, "gemma", None)[0]
    return layer_norm_forward(x, weight, bias, eps)[0]


_compiled = functools.cache(lambda: compiled(plain))


def run(
    library: str, problem: Norm, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, (rows, width), by one of the operation's libraries; for "copy" it is x. Raises
    ValueError for vectors that Liger does not take, RuntimeError for rows that are too long."""
    x = tensors["x"]
    if library == "copy":
        return {"y": copied(x)}
    given = x, tensors.get("weight"), tensors.get("bias"), problem.rms, problem.eps
    if library == "triton_norm":
        from flash_helpers.measure.triton_rows import norm

        return {"y": norm(*given)}
    if library == "liger_norm":
        return {"y": _by_liger(*given)}
    return {"y": (_compiled() if library == "compiled_norm" else plain)(*given)}
