"""Functions on matrices that are bound by memory, with gradients: norms and softmax along rows, and
what PyTorch computes with a matrix product that is not needed.

    from flash_attention import ops
    y = ops.layer_norm(x, (width,), weight, bias)    # F.layer_norm
    y = ops.rms_norm(x, (width,), weight)            # F.rms_norm
    y, s = ops.rms_norm(x, (width,), weight, residual=r)  # s = x + r, F.rms_norm(s, ...)
    y = ops.softmax(x, dim=-1)                       # torch.softmax
    C = ops.diagonal_matmul(a, B)                    # torch.diag(a) @ B
    y = ops.linear_rowsum(x, weight, bias)           # F.linear(x, weight, bias).sum(-1)

`LayerNorm` and `RMSNorm` are torch.nn's modules with these functions.

They are custom operators: they run under torch.compile and in CUDA graphs, on CUDA tensors from
compute capability 8.0 on, and on CPU tensors in the simulator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from flash_attention._operators import below_autograd, compile_while_tracing, define
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal_backward.baselines import gradient_of_a
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum_backward.baselines import (
    gradients as rowsum_gradients,
)
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm_backward.formulas import gradients
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows_backward.baselines import gradient as softmax_gradient
from flash_helpers.operations.rows_backward.problem import RowsBackward
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

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "diagonal_matmul",
    "layer_norm",
    "linear_rowsum",
    "rms_norm",
    "softmax",
]

_ELEMENTS = (Element.FP16, Element.BF16, Element.FP32)
_ASKED = (None, ())  # no config and no options


def _choose(kind: type[Problem], asked: object, tensors: Mapping[str, Laid]) -> Config:
    """Return the config for the problem that tensors pose."""
    first = next(iter(kind.axes))
    problem = posed_problem(kind, element_of(first, tensors[first], _ELEMENTS), tensors)
    return choose_config(problem, tensors[first].device)


def _define(
    schema: str,
    kind: type[Problem],
    result: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    **autograd: Any,
) -> Callable[..., torch.Tensor]:
    """Define the operator of an operation with one output, the last of its tensors.

    `result`: makes an empty output for the tensors of a call, by name. `autograd`: gradient or
    refusal, as for `define`.
    """
    *_, output = kind.axes

    def given(args: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        inputs = (name for name in kind.axes if name != output)
        return named(zip(inputs, args, strict=True))

    choose = functools.partial(_choose, kind)

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

    return define(schema, function, fake, **autograd)


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
        if of_a and not torch.is_grad_enabled():
            da, dB = _diagonal_backward(a.contiguous(), B, _rows(dC), of_B)
            return None, da, dB if of_B else None
        # these are to be differentiated, too, or dB is the only one
        da = gradient_of_a(B, dC) if of_a else None
        return None, da, diagonal_matmul(a, dC) if of_B else None


def _diagonal_gradients(
    a: torch.Tensor, B: torch.Tensor, dC: torch.Tensor, of_B: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (a, B, dC, None, *((dC.new_empty(dC.shape),) if of_B else ()))
    names = ("a", "b", "dc", "da", "db")[: len(given)]
    choose = functools.partial(_choose, DiagonalBackward)
    _, _, _, da, *dB = compute(DiagonalBackward, _ASKED, names, given, choose)
    return da, dB[0] if of_B else dC.new_empty(0)


def _fake_diagonal_gradients(
    a: torch.Tensor, B: torch.Tensor, dC: torch.Tensor, of_B: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = {"a": a, "b": B, "dc": dC}
    if constant_call(DiagonalBackward, None, tensors) is None:
        compile_while_tracing(_choose(DiagonalBackward, _ASKED, tensors), a.device)
    return a.new_empty(a.shape), dC.new_empty(dC.shape if of_B else 0)


_diagonal_backward = define(
    "diagonal_backward(Tensor a, Tensor B, Tensor dC, bool of_B) -> (Tensor, Tensor)",
    _diagonal_gradients,
    _fake_diagonal_gradients,
    refusal="diagonal_backward is no function to differentiate: call ops.diagonal_matmul, and its "
    "backward pass with create_graph=True",
)


def _diagonal_gradient(keys: torch._C.DispatchKeySet, *args: torch.Tensor) -> torch.Tensor:
    return _DiagonalMatmul.apply(below_autograd("diagonal_matmul", keys, args), *args)


_diagonal_matmul = _define(
    "diagonal_matmul(Tensor a, Tensor B) -> Tensor",
    Diagonal,
    lambda tensors: tensors["b"].new_empty(tensors["b"].shape),
    gradient=_diagonal_gradient,
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

    Gradients: that of a is the sum of dC · B along each row, in fp32 and rounded once, and that of
    B diag(a) dC. A kernel computes both in one read of B and dC. Both can be differentiated again:
    PyTorch's operators then compute that of a.

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
        _, *asked = ctx.needs_input_grad
        if torch.is_grad_enabled():  # these are to be differentiated, too
            of_x, of_weight, of_bias = asked
            given = {"of_x": of_x, "of_weight": of_weight, "of_bias": of_bias}
            return None, *rowsum_gradients(dy, x, weight, **given)
        found = zip(_linear_rowsum_backward(dy, x, weight, *asked), asked, strict=True)
        return None, *(gradient if is_asked else None for gradient, is_asked in found)


def _rowsum_tensors(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *asked: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors of the call, with new ones for the gradients that are asked for."""
    shapes = {"dx": x.shape, "dweight": weight.shape, "dbias": weight.shape[:1]}
    wanted = (item for item, is_asked in zip(shapes.items(), asked, strict=True) if is_asked)
    outputs = {name: x.new_empty(shape) for name, shape in wanted}
    return {"dy": dy, "x": x, "weight": weight, **outputs}


def _rowsum_results(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    names = ("dx", "dweight", "dbias")
    return tuple(tensors[name] if name in tensors else tensors["x"].new_empty(0) for name in names)


def _rowsum_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    tensors = _rowsum_tensors(*given)
    choose = functools.partial(_choose, LinearRowsumBackward)
    compute(LinearRowsumBackward, _ASKED, (*tensors,), (*tensors.values(),), choose)
    return _rowsum_results(tensors)


def _fake_rowsum_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    tensors = _rowsum_tensors(*given)
    if constant_call(LinearRowsumBackward, None, tensors) is None:
        config = _choose(LinearRowsumBackward, _ASKED, tensors)
        compile_while_tracing(config, tensors["x"].device)
    return _rowsum_results(tensors)


# A tensor without elements stands for a gradient that is not asked for.
_linear_rowsum_backward = define(
    "linear_rowsum_backward(Tensor dy, Tensor x, Tensor weight, bool of_x, bool of_weight, "
    "bool of_bias) -> (Tensor, Tensor, Tensor)",
    _rowsum_gradients,
    _fake_rowsum_gradients,
    refusal="linear_rowsum_backward is no function to differentiate: call ops.linear_rowsum, and "
    "its backward pass with create_graph=True",
)


def _rowsum_gradient(keys: torch._C.DispatchKeySet, *args: torch.Tensor | None) -> torch.Tensor:
    return _LinearRowsum.apply(below_autograd("linear_rowsum", keys, args), *args)


_linear_rowsum = _define(
    "linear_rowsum(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    LinearRowsum,
    lambda tensors: tensors["x"].new_empty(tensors["x"].shape[:1]),
    gradient=_rowsum_gradient,
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

    Gradients are computed by kernels in fp32, and rounded once: dx_ik = dy_i Σ_o W_ok; each row of
    dW is Σ_i dy_i x_i, and each element of dbias Σ_i dy_i. Sums have an order that is the same in
    each call on one kind of GPU. Gradients can be differentiated again. PyTorch's operators then
    compute them, and dW and dbias are expanded tensors.

    Raises TypeError for another dtype, or two; ValueError for shapes that do not fit together and
    tensors on two devices; RuntimeError for a device that runs no kernel.
    """
    check_types(named((("x", x), ("weight", weight), ("bias", bias))))
    if x.ndim == 0:
        raise ValueError("x has no dimensions and needs in_features: pass (..., in_features)")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _linear_rowsum(_rows(rows), _rows(weight), bias).reshape(x.shape[:-1])


# -- softmax ---------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    """A node of the autograd graph that computes y, and keeps it for the gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = function()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # this is to be differentiated, too
            return None, softmax_gradient(y, dy)
        return None, _softmax_backward(y, _rows(dy))


_softmax_backward = _define(
    "softmax_backward(Tensor y, Tensor dy) -> Tensor",
    RowsBackward,
    lambda tensors: tensors["y"].new_empty(tensors["y"].shape),
    refusal="softmax_backward is no function to differentiate: call ops.softmax, and its backward "
    "pass with create_graph=True",
)
_softmax = _define(
    "softmax(Tensor x) -> Tensor",
    Rows,
    lambda tensors: tensors["x"].new_empty(tensors["x"].shape),
    gradient=lambda keys, x: _Softmax.apply(below_autograd("softmax", keys, (x,)), x),
)


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute torch.softmax(input, dim, dtype).

    input: of any shape, fp16, bf16 or fp32, with up to 131072 elements along `dim`. Where these are
        not next to each other, or the others have no common stride, it is copied.
    dtype: the input is converted to it first.

    Returns y with the shape of input. Elements along `dim` with a NaN or +inf among them, or -inf
    only, give NaN throughout, as in PyTorch.

    The gradient is computed by a kernel in fp32 from y and that of y, and rounded once. It can be
    differentiated again: PyTorch's operators then compute it.

    Raises TypeError for another dtype; ValueError for more elements; IndexError for a `dim` that
    input does not have; RuntimeError for a device that runs no kernel.
    """
    check_types({"input": input})
    x = input if dtype is None else input.to(dtype)
    if x.numel() == 0 or x.ndim == 0:
        return torch.softmax(x, dim)
    moved = x.movedim(dim, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    return _softmax(_rows(rows)).reshape(moved.shape).movedim(-1, dim)


# -- layer norm and RMS norm -----------------------------------------------------------------------


def _norm_gradients(
    ctx: Any, dy: torch.Tensor, *asked: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, weight and bias that are asked for, each from that of y and from
    what the node of a norm has saved: x, weight, the mean of layer norm, rstd."""
    x, weight, *statistics = ctx.saved_tensors
    of_x, of_weight, of_bias = asked
    mean, rstd = (None, *statistics)[-2:]
    if torch.is_grad_enabled():  # these are to be differentiated, too
        mean = None if ctx.is_rms else x.float().mean(-1)
        centred = x.float() if mean is None else x.float() - mean[:, None]
        rstd = (centred.square().mean(-1) + ctx.eps).rsqrt()
        names = ("of_x", "of_weight", "of_bias")
        return gradients(dy, x, rstd, mean, weight, **dict(zip(names, asked, strict=True)))
    dx, dweight, dbias = _norm_backward(_rows(dy), x, rstd, mean, weight, of_weight, of_bias)
    return dx if of_x else None, dweight if of_weight else None, dbias if of_bias else None


class _Norm(torch.autograd.Function):
    """A node of the autograd graph that computes y, and keeps what the gradients need: x, weight,
    and the mean, which RMS norm does not have, and the reciprocal deviation of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[], tuple[torch.Tensor, ...]],
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        is_rms: bool,
    ) -> tuple[torch.Tensor, ...]:
        y, *statistics = function()
        ctx.save_for_backward(x, weight, *statistics)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.is_rms = eps, is_rms
        return y, *statistics

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        return None, *_norm_gradients(ctx, dy, *ctx.needs_input_grad[1:4]), None, None


class _AddNorm(torch.autograd.Function):
    """The same for a norm of x + residual, which keeps the sum instead of x."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[], tuple[torch.Tensor, ...]],
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        is_rms: bool,
    ) -> tuple[torch.Tensor, ...]:
        y, total, *statistics = function()
        ctx.save_for_backward(total, weight, *statistics)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.is_rms = eps, is_rms
        return y, total, *statistics

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        _, of_x, of_residual, of_weight, of_bias, *_ = ctx.needs_input_grad
        dweight = dbias = None
        if dy is not None:
            asked = of_x or of_residual, of_weight, of_bias
            of_norm, dweight, dbias = _norm_gradients(ctx, dy, *asked)
            dtotal = of_norm if of_norm is None or dtotal is None else of_norm + dtotal
        dx, dresidual = dtotal if of_x else None, dtotal if of_residual else None
        return None, dx, dresidual, dweight, dbias, None, None


def _define_norm_backward() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Define the operator of the gradients of norms, of RMS norm if there is no mean. It returns
    dx, dweight and dbias; a tensor without elements stands for one that is not asked for."""

    def tensors_of(*given: Any) -> dict[str, torch.Tensor]:
        *inputs, of_weight, of_bias = given
        found = named(zip(("dy", "x", "rstd", "mean", "weight"), inputs, strict=True))
        x = found["x"]
        found["dx"] = x.new_empty(x.shape)
        for name, is_asked in (("dweight", of_weight), ("dbias", of_bias)):
            found |= {name: x.new_empty(x.shape[-1:])} if is_asked else {}
        return found

    def results(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        names = ("dx", "dweight", "dbias")
        return tuple(
            tensors[name] if name in tensors else tensors["x"].new_empty(0) for name in names
        )

    def choose(asked: Any, tensors: Mapping[str, Laid]) -> Config:
        element = element_of("dy", tensors["dy"], _ELEMENTS)
        problem = posed_problem(NormBackward, element, tensors, **dict(asked[1]))
        return choose_config(problem, tensors["dy"].device)

    def asked(tensors: Mapping[str, torch.Tensor]) -> tuple[None, tuple[tuple[str, Any], ...]]:
        return None, (("rms", "mean" not in tensors),)

    def function(*given: Any) -> tuple[torch.Tensor, ...]:
        tensors = tensors_of(*given)
        compute(NormBackward, asked(tensors), (*tensors,), (*tensors.values(),), choose)
        return results(tensors)

    def fake(*given: Any) -> tuple[torch.Tensor, ...]:
        tensors = tensors_of(*given)
        options = dict(asked(tensors)[1])
        if constant_call(NormBackward, None, tensors, **options) is None:
            compile_while_tracing(choose(asked(tensors), tensors), tensors["x"].device)
        return results(tensors)

    return define(
        "norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? mean, Tensor? weight, "
        "bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)",
        function,
        fake,
        refusal="the gradients of a norm are differentiated as those of layer_norm or rms_norm: "
        "call these, with create_graph=True",
    )


_norm_backward = _define_norm_backward()


def _define_norm(
    schema: str,
    *,
    is_rms: bool,
    kind: type[Norm] = Norm,
    node: type[torch.autograd.Function] = _Norm,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Define the operator of a norm, which returns y, of a norm of a sum also the sum, and the
    statistics of the rows."""
    name = schema.partition("(")[0]
    inputs = [name for name in kind.axes if name not in kind.outputs_named]
    written = [name for name in kind.axes if name in kind.outputs_named]
    if is_rms:
        written.remove("mean")

    def given(tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        return named(zip(inputs, tensors, strict=True))

    def outputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_per_row = (kind.axes[name] == ("row",) for name in written)
        return tuple(
            x.new_empty(x.shape[:1], dtype=torch.float32) if per_row else x.new_empty(x.shape)
            for per_row in is_per_row
        )

    def asked(eps: float) -> tuple[None, tuple[tuple[str, Any], ...]]:
        return None, (("rms", is_rms), ("eps", eps))

    def choose(asked: Any, tensors: Mapping[str, Laid]) -> Config:
        element = element_of("x", tensors["x"], _ELEMENTS)
        return choose_config(
            posed_problem(kind, element, tensors, **dict(asked[1])), tensors["x"].device
        )

    def function(*args: Any) -> tuple[torch.Tensor, ...]:
        tensors = given(args[:-1])
        tensors |= dict(zip(written, outputs(args[0]), strict=True))
        found = compute(kind, asked(args[-1]), (*tensors,), (*tensors.values(),), choose)
        return (*found[-len(written) :],)

    def fake(*args: Any) -> tuple[torch.Tensor, ...]:
        tensors, eps = given(args[:-1]), args[-1]
        if constant_call(kind, None, tensors, rms=is_rms, eps=eps) is None:
            compile_while_tracing(choose(asked(eps), tensors), tensors["x"].device)
        return outputs(tensors["x"])

    def gradient(keys: torch._C.DispatchKeySet, *args: Any) -> tuple[torch.Tensor, ...]:
        return node.apply(below_autograd(name, keys, args), *args, is_rms)

    return define(schema, function, fake, gradient)


_layer_norm = _define_norm(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    is_rms=False,
)
_rms_norm = _define_norm(
    "rms_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)", is_rms=True
)
_add_layer_norm = _define_norm(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    is_rms=False,
    kind=AddNorm,
    node=_AddNorm,
)
_add_rms_norm = _define_norm(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    is_rms=True,
    kind=AddNorm,
    node=_AddNorm,
)


def _normed(
    operator: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Return the norm of the input over its last dimensions, which have this shape; of two inputs
    that of their sum, and the sum."""
    matrices = dict(zip(("input", "residual"), inputs, strict=False))
    check_types(matrices | named((("weight", weight), ("bias", bias))))
    x, *others = inputs
    for other in others:
        if other.shape != x.shape:
            raise ValueError(
                f"residual has shape {tuple(other.shape)} and input has shape {tuple(x.shape)}: "
                "both must be equal"
            )
    shape = tuple(shape)
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != shape or len(shape) > x.ndim:
        raise ValueError(
            f"normalized_shape is {shape} and input has shape {tuple(x.shape)}: pass the sizes of "
            "the last dimensions of input, one or more"
        )
    for name, vector in named((("weight", weight), ("bias", bias))).items():
        if tuple(vector.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)} and normalized_shape is {shape}: both "
                "must be equal"
            )
    width = math.prod(shape)
    n_rows = math.prod(x.shape[: x.ndim - len(shape)])
    rows = (_rows(matrix.reshape(n_rows, width)) for matrix in inputs)
    vectors = (None if vector is None else vector.reshape(width) for vector in (weight, bias))
    found = operator(*rows, *vectors, eps)
    return tuple(output.reshape(x.shape) for output in found[: len(inputs)])


def _of_one_or_two(
    operators: tuple[Callable[..., tuple[torch.Tensor, ...]], ...],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *given: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x by the first operator; with a residual that of the sum, and the sum, by
    the second."""
    alone, of_sum = operators
    if residual is None:
        (y,) = _normed(alone, (x,), *given)
        return y
    y, total = _normed(of_sum, (x, residual), *given)
    return y, total


@overload
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = None,
) -> torch.Tensor: ...


@overload
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps), or that
    of input + residual.

    input: of any shape that ends in normalized_shape, fp16, bf16 or fp32. Rows may be any distance
        apart, and begin at any element; where they have another stride than 1 along them, input is
        copied.
    normalized_shape: sizes of the last dimensions, 1 to 131072 elements together.
    weight, bias: of normalized_shape, with the dtype and device of input.
    residual: of the shape, dtype and device of input, laid out as any input. One kernel adds it and
        takes the norm of the rounded sum.

    Returns y with the shape of input; with a residual y and the sum. Mean and variance are fp32,
    and the variance is the mean of the squared differences from the mean. y is rounded once.

    Gradients are computed by a kernel in fp32, from x and the stored mean and deviation of each
    row, and rounded once. Those of weight and bias are sums over all rows, in an order that is the
    same in each call on one kind of GPU. They can be differentiated again: PyTorch's operators then
    compute them.

    Raises TypeError for another dtype, or two; ValueError for shapes that do not fit together, too
    many elements and tensors on two devices; RuntimeError for a device that runs no kernel.
    """
    operators = _layer_norm, _add_layer_norm
    return _of_one_or_two(operators, input, residual, normalized_shape, weight, bias, eps)


@overload
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute torch.nn.functional.rms_norm(input, normalized_shape, weight, eps), or that of
    input + residual.

    eps: None is the machine epsilon of input's dtype, as in PyTorch. All else is as for
    `layer_norm`; there is no mean and no bias.
    """
    if eps is None:
        check_types({"input": input})
        eps = torch.finfo(input.dtype).eps
    operators = _rms_norm, _add_rms_norm
    return _of_one_or_two(operators, input, residual, normalized_shape, weight, None, eps)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by `layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer norm of input."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by `rms_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of input."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)
