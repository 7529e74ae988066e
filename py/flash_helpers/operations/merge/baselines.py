"""Merging by PyTorch's operators, and a copy: what kernels of merge are measured beside."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.merge.problem import Merge

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def merged(
    o: torch.Tensor, lse: torch.Tensor, log2_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of all parts, in the dtype of lse. o: (parts, …, d_head). lse: (parts, …).

    The terms of parts with an lse of -inf are left out, and without any other part the row has 0
    and -inf.
    """
    largest = lse.amax(0)
    largest = torch.where(largest == -math.inf, 0.0, largest)  # -inf less -inf is no number
    weights = torch.exp2((lse - largest) * log2_base)
    total = weights.sum(0)
    shares = (weights / torch.where(total == 0, 1.0, total))[..., None]
    seen = torch.where(shares == 0, 0.0, o.to(lse.dtype))  # 0 · NaN is NaN
    return (shares * seen).sum(0), largest + torch.log2(total) / log2_base


def plain(
    o: torch.Tensor, lse: torch.Tensor, log2_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `merged` with o in its own dtype."""
    found, of_all = merged(o, lse, log2_base)
    return found.to(o.dtype), of_all


_compiled = functools.cache(lambda: compiled(plain))


def run(
    library: str, problem: Merge, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, (rows, heads, d_head), and lse, (rows, heads), by one of the operation's libraries.

    "copy" moves as many bytes of o_parts as the problem moves of o_parts and o: it copies
    (parts + 1) / 2 of its parts, from the first on.
    """
    o, lse = tensors["o_parts"], tensors["lse_parts"]
    if library == "copy":
        elements = o[0].numel() * (problem.parts + 1) // 2
        return {"o": copied(o.view(-1)[:elements]), "lse": lse}
    function = _compiled() if library == "compiled_merge" else plain
    return dict(zip(("o", "lse"), function(o, lse, problem.log2_base), strict=True))
