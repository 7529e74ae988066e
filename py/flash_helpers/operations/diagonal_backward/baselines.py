"""The gradients of diag(a) B by PyTorch, and a copy: what kernels of diagonal_backward are measured
beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def gradient_of_a(b: torch.Tensor, dc: torch.Tensor) -> torch.Tensor:
    """Return da, (rows,), computed in fp32 and rounded once. It can be differentiated."""
    return (dc.float() * b.float()).sum(-1).to(dc.dtype)


def _both(a: torch.Tensor, b: torch.Tensor, dc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient_of_a(b, dc), a[:, None] * dc


_compiled = functools.cache(lambda: compiled(_both))


def run(
    library: str, problem: DiagonalBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return da, (rows,), and db, (rows, width), by one of the operation's libraries. "copy" moves
    as many bytes as b, dc and db have: it returns a copy of dc, and copies half of b's rows."""
    a, b, dc = (tensors[name] for name in ("a", "b", "dc"))
    if library == "copy":
        copied(b[: problem.rows // 2])
        return {"da": a, "db": copied(dc)}
    found = (_compiled() if library == "compiled_gradients" else _both)(a, b, dc)
    return dict(zip(("da", "db"), found, strict=True))
