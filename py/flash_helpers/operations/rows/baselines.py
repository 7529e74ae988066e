"""Softmax by PyTorch and by Triton, and a copy: the libraries that kernels of rows are measured
beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from flash_helpers.measure.libraries import LIGER, TRITON, Package, compiled, copied
from flash_helpers.operations.rows.problem import Rows

PACKAGES: Mapping[str, Package] = MappingProxyType(
    {"triton_softmax": TRITON, "liger_softmax": LIGER}
)


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return y, (rows, width), by PyTorch's own function."""
    return torch.softmax(x, dim=-1)


_compiled = functools.cache(lambda: compiled(plain))


def run(
    library: str, problem: Rows, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, (rows, width), by one of the operation's libraries; for "copy" it is x. Raises
    RuntimeError for rows that are too long for Liger."""
    x = tensors["x"]
    if library == "copy":
        return {"y": copied(x)}
    if library == "triton_softmax":
        from flash_helpers.measure.triton_rows import softmax

        return {"y": softmax(x)}
    if library == "liger_softmax":
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return {"y": LigerSoftmaxFunction.apply(x)}
    return {"y": (_compiled() if library == "compiled_softmax" else plain)(x)}
