"""PyTorch's two ways to sum the outputs of a linear layer, and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import copied
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def run(
    library: str, problem: LinearRowsum, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, (rows,), by one of the operation's libraries.

    For "copy" it is a copy of half of the rows of x, after one of half of the rows of W: reading
    and writing half of both moves as many bytes as reading them.
    """
    x, weight, bias = tensors["x"], tensors["weight"], tensors.get("bias")
    if library == "copy":
        halves = [copied(whole[: -(-len(whole) // 2)]) for whole in (weight, x)]
        return {"y": halves[-1]}
    if library == "pytorch":
        return {"y": torch.nn.functional.linear(x, weight, bias).sum(-1)}
    y = x @ weight.sum(0)
    return {"y": y if bias is None else y + bias.sum()}
