"""Softmax by PyTorch, and a copy: the libraries that kernels of rows are measured beside."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import copied
from flash_helpers.operations.rows.problem import Rows

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def run(
    library: str, problem: Rows, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, (rows, width), by one of the operation's libraries; for "copy" it is x."""
    x = tensors["x"]
    return {"y": copied(x) if library == "copy" else torch.softmax(x, dim=-1)}
