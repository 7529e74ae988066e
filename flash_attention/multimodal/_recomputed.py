"""Gradients by recomputation: the graph keeps the inputs of an operator and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Recomputed(torch.autograd.Function):
    """A node of the autograd graph that computes an operator's outputs, and their gradients from a
    formula that computes the same outputs by differentiable operators.

    function: returns the outputs. formula: returns them from the operator's inputs, of which some
    are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[], tuple[Tensor, ...]],
        formula: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.formula = formula
        ctx.set_materialize_grads(False)
        return function()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[2:]
        inputs = [
            None if x is None else x.detach().requires_grad_(is_asked)
            for x, is_asked in zip(ctx.saved_tensors, asked, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.formula(*inputs)
        pairs = [
            (y, dy)
            for y, dy in zip(outputs, given, strict=True)
            if dy is not None and y.requires_grad
        ]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        if not pairs or not wanted:
            return (None,) * (2 + len(inputs))
        ys, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, dys, allow_unused=True))
        return None, None, *(next(found) if is_asked else None for is_asked in asked)
