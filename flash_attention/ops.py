"""Functions on matrices that are bound by memory, with gradients: what PyTorch computes in several
passes or with a matrix product that is not needed.

    from flash_attention import ops
    C = ops.diagonal_matmul(a, B)             # torch.diag(a) @ B
    y = ops.linear_rowsum(x, weight, bias)    # F.linear(x, weight, bias).sum(-1)

They are custom operators: they run under torch.compile and in CUDA graphs, on CUDA tensors from
compute capability 8.0 on, and on CPU tensors in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flash_attention._operators import below_autograd, compile_while_tracing, define
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.registry.problem import Problem
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import (
    Laid,
    check_types,
    constant_call,
    element_of,
    named,
    posed_problem,
)
from flash_helpers.tune.best import choose_config

__all__ = ["diagonal_matmul", "linear_rowsum"]

_ELEMENTS = (Element.FP16, Element.BF16, Element.FP32)
_ASKED = (None, ())  # no config and no options


def _define(
    schema: str,
    kind: type[Problem],
    result: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    gradient: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Define the operator of an operation with one output, the last but for optional inputs.

    `result`: makes an empty output for the tensors of a call, by name. `gradient`: as for
    `define`.
    """
    output = next(name for name in kind.axes if name in ("c", "y"))

    def given(args: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        inputs = (name for name in kind.axes if name != output)
        return named(zip(inputs, args, strict=True))

    def choose(asked: object, tensors: Mapping[str, Laid]) -> Config:
        first = next(iter(kind.axes))
        problem = posed_problem(kind, element_of(first, tensors[first], _ELEMENTS), tensors)
        return choose_config(problem, tensors[first].device)

    def function(*args: torch.Tensor | None) -> torch.Tensor:
        tensors = given(args)
        names = tuple(name for name in kind.axes if name in tensors or name == output)
        found = compute(kind, _ASKED, names, tuple(map(tensors.get, names)), choose)
        return found[names.index(output)]

    def fake(*args: torch.Tensor | None) -> torch.Tensor:
        tensors = given(args)
        if constant_call(kind, None, tensors) is None:
            config = choose(_ASKED, tensors)
            compile_while_tracing(config, next(iter(tensors.values())).device)
        return result(tensors)

    return define(schema, function, fake, gradient)


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows have stride 1, itself or a copy."""
    is_laid = matrix.ndim != 2 or matrix.stride(-1) == 1 or matrix.shape[-1] == 1
    return matrix if is_laid else matrix.contiguous()


# -- diag(a) @ B -----------------------------------------------------------------------------------


class _DiagonalMatmul(torch.autograd.Function):
    """A node of the autograd graph that computes C, and keeps a and B for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[], torch.Tensor], a: torch.Tensor, B: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(a, B)
        return function()

    @staticmethod
    def backward(ctx: Any, dC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, B = ctx.saved_tensors
        _, of_a, of_B = ctx.needs_input_grad
        da = (dC.float() * B.float()).sum(-1).to(a.dtype) if of_a else None
        return None, da, diagonal_matmul(a, dC) if of_B else None


def _diagonal_gradient(keys: torch._C.DispatchKeySet, *args: torch.Tensor) -> torch.Tensor:
    return _DiagonalMatmul.apply(below_autograd("diagonal_matmul", keys, args), *args)


_diagonal_matmul = _define(
    "diagonal_matmul(Tensor a, Tensor B) -> Tensor",
    Diagonal,
    lambda tensors: tensors["b"].new_empty(tensors["b"].shape),
    _diagonal_gradient,
)


def diagonal_matmul(a: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Compute torch.diag(a) @ B as a scaling of the rows of B.

    a: (rows,), fp16, bf16 or fp32, with any stride.
    B: (rows, width), with the dtype and device of a. Rows may be any distance apart, and begin at
        any element. A matrix with another stride along its rows, such as a transposed one, is
        copied.

    Returns C, (rows, width), contiguous: each element is a product, rounded once, as in
    a[:, None] * B. NaN and infinities of B stay in their rows; torch.diag(a) @ B also multiplies
    them by zeros, which gives NaN in other rows. A B without elements gives an empty C.

    Gradients: that of B is diag(a) dC, by the same kernel. That of a, the sum of dC · B along each
    row, is computed by PyTorch in fp32. Both can be differentiated again.

    Raises TypeError for another dtype, or two; ValueError for shapes that do not fit together and
    tensors on two devices; RuntimeError for a device that runs no kernel.
    """
    check_types({"a": a, "B": B})
    return _diagonal_matmul(a, _rows(B))


# -- F.linear(x, weight, bias).sum(-1) -------------------------------------------------------------


class _LinearRowsum(torch.autograd.Function):
    """A node of the autograd graph that computes y, and keeps x and weight for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[], torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return function()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        if of_x:
            column_sums = weight.sum(0, dtype=torch.float32)
            dx = (dy.float()[:, None] * column_sums).to(x.dtype)
        if of_weight:
            row = (dy.float() @ x.float()).to(weight.dtype)
            dweight = row.expand(weight.shape)
        if of_bias:
            dbias = dy.sum(dtype=torch.float32).to(dy.dtype).expand(weight.shape[0])
        return None, dx, dweight, dbias


def _rowsum_gradient(keys: torch._C.DispatchKeySet, *args: torch.Tensor | None) -> torch.Tensor:
    return _LinearRowsum.apply(below_autograd("linear_rowsum", keys, args), *args)


_linear_rowsum = _define(
    "linear_rowsum(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    LinearRowsum,
    lambda tensors: tensors["x"].new_empty(tensors["x"].shape[:1]),
    _rowsum_gradient,
)


def linear_rowsum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute F.linear(x, weight, bias).sum(-1) as x · Σ weight + Σ bias, without the product.

    x: (..., in_features), fp16, bf16 or fp32. Rows may be any distance apart, and begin at any
        element; where they have another stride than 1 along them, x is copied.
    weight: (out_features, in_features), bias: (out_features,), with the dtype and device of x, laid
        out likewise.

    Returns y, of the sizes of x without the last. All sums are fp32, in an order that is the same
    in each call on one kind of GPU, and y is rounded once. F.linear rounds each output before the
    sum. An output that overflows gives an infinity there, and infinities of x may give NaN, where
    this sum can be finite or infinite. Without input features y is Σ bias, without outputs it is 0.

    Gradients are computed by PyTorch's operators in fp32, and rounded once: dx_ik = dy_i Σ_o W_ok;
    each row of dW is Σ_i dy_i x_i, and each element of dbias Σ_i dy_i. So dW and dbias are expanded
    tensors. They can be differentiated again.

    Raises TypeError for another dtype, or two; ValueError for shapes that do not fit together and
    tensors on two devices; RuntimeError for a device that runs no kernel.
    """
    check_types(named((("x", x), ("weight", weight), ("bias", bias))))
    if x.ndim == 0:
        raise ValueError("x has no dimensions and needs in_features: pass (..., in_features)")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _linear_rowsum(_rows(rows), _rows(weight), bias).reshape(x.shape[:-1])
