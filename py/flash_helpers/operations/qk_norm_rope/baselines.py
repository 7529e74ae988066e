"""Norm and rotary embedding of Q and K by PyTorch's operators, and a copy: what kernels are
measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import rms_norm
from torch.utils.weak import WeakTensorKeyDictionary

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.joint_attention.baselines import turned
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def joined(problem: QkNormRope, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a problem, each operator's result rounded to the dtype of the
    tensors."""

    def normed(name: str) -> torch.Tensor:
        x, weight = tensors[name], tensors.get(f"{name}_weight")
        return x if weight is None else rms_norm(x, weight.shape, weight, problem.eps)

    found = {}
    for name in "qkv" if problem.context else "qk":
        x = normed(name)
        if name != "v" and problem.rotary:
            x = turned(x.unflatten(-1, (-1, problem.d_head)), tensors["rotary"]).flatten(-2)
        if f"context_{name}" in tensors:
            x = torch.cat((x, normed(f"context_{name}")), 1)
        found[f"joint_{name}"] = x
    return found


_compiled = functools.cache(lambda: compiled(joined))

# What is copied for a problem's q.
_KEPT: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def run(
    library: str, problem: QkNormRope, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs by one of the operation's libraries. "copy" moves as many bytes as the
    problem, and returns nothing of it."""
    if library == "copy":
        q = tensors["q"]
        if q not in _KEPT:
            _KEPT[q] = q.new_zeros(problem.bytes // (2 * q.element_size()))
        return {"joint_q": copied(_KEPT[q])}
    given = {tensor.name: tensors[tensor.name] for tensor in problem.inputs}
    found: dict[str, torch.Tensor] = (
        _compiled() if library == "compiled_qk_norm_rope" else joined
    )(problem, given)
    return found
