"""PyTorch's two ways to scale rows, and a copy: what kernels of diagonal are measured beside."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import copied
from flash_helpers.operations.diagonal.problem import Diagonal

PACKAGES: Mapping[str, Any] = MappingProxyType({})
MOST_DIAG_ROWS = 65536  # 8 GiB of diag(a) in 16 bits


def run(
    library: str, problem: Diagonal, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return c, (rows, width), by one of the operation's libraries; for "copy" it is b.

    Raises ValueError for "diag" where diag(a) has more than MOST_DIAG_ROWS rows.
    """
    a, b = tensors["a"], tensors["b"]
    if library == "copy":
        return {"c": copied(b)}
    if library == "pytorch":
        return {"c": a[:, None] * b}
    if problem.rows > MOST_DIAG_ROWS:
        raise ValueError(
            f"rows {problem.rows}: torch.diag(a) has as many rows and columns, and {library} is "
            f"measured up to {MOST_DIAG_ROWS}: leave out the library"
        )
    return {"c": torch.diag(a) @ b}
