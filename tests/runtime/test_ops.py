"""Functions on rows and matrices: what they and their gradients compute, what torch.compile sees,
what they refuse."""

import math

import pytest
import torch

from flash_attention import ops
from flash_helpers.check.errors import measure_error
from flash_helpers.operations.add_norm.inputs import draw as draw_add_norm
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.add_norm.reference import reference as add_norm_reference
from flash_helpers.operations.diagonal.inputs import draw as draw_diagonal
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.reference import diagonal_reference
from flash_helpers.operations.linear_rowsum.inputs import draw as draw_linear
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.reference import linear_rowsum_reference
from flash_helpers.operations.linear_rowsum_backward.inputs import draw as draw_linear_backward
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.reference import (
    reference as linear_backward_reference,
)
from flash_helpers.operations.norm.inputs import draw as draw_norm
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.reference import reference as norm_reference
from flash_helpers.operations.norm_backward.inputs import draw as draw_norm_backward
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.reference import reference as norm_backward_reference
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.reference import reference as rows_reference
from flash_helpers.operations.rows_backward.inputs import draw as draw_softmax
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.registry.problem import Element

ELEMENTS = (Element.FP16, Element.BF16, Element.FP32)
each_element = pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.short)


def drawn_diagonal(element: Element = Element.BF16) -> tuple[torch.Tensor, ...]:
    return tuple(draw_diagonal("normal", Diagonal(5, 37, element)).values())


def drawn_linear(element: Element = Element.BF16) -> tuple[torch.Tensor, ...]:
    return tuple(draw_linear("normal", LinearRowsum(6, 37, 20, element, bias=True)).values())


def linear_rowsum_by_pytorch(x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias).sum(-1)


def drawn_norm(element: Element = Element.BF16) -> tuple[torch.Tensor, ...]:
    return tuple(
        draw_norm("normal", Norm(6, 37, element, weight=True, bias=True))[name]
        for name in ("x", "weight", "bias")
    )


F = torch.nn.functional
CASES = {
    "diagonal_matmul": (ops.diagonal_matmul, lambda a, B: torch.diag(a) @ B, drawn_diagonal),
    "linear_rowsum": (ops.linear_rowsum, linear_rowsum_by_pytorch, drawn_linear),
    "layer_norm": (
        lambda x, weight, bias: ops.layer_norm(x, (37,), weight, bias),
        lambda x, weight, bias: F.layer_norm(x, (37,), weight, bias),
        drawn_norm,
    ),
    "rms_norm": (
        lambda x, weight: ops.rms_norm(x, (37,), weight, 1e-5),
        lambda x, weight: F.rms_norm(x, (37,), weight, 1e-5),
        lambda element: drawn_norm(element)[:2],
    ),
    "softmax": (ops.softmax, lambda x: torch.softmax(x, -1), lambda e: (drawn_norm(e)[0][:2],)),
}
# what their operators take behind the tensors
BEHIND = {"layer_norm": (1e-5,), "rms_norm": (None, 1e-5)}
each_case = pytest.mark.parametrize("name", CASES)


def with_gradients(function, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The result and the gradients of all inputs, for an upstream gradient that is not uniform."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    found = function(*leaves)
    upstream = torch.linspace(0.5, 2.0, found.numel()).reshape(found.shape).to(found.dtype)
    return [found, *torch.autograd.grad(found, leaves, upstream)]


# -- results and gradients -------------------------------------------------------------------------


@each_element
def test_results_are_within_the_bounds_of_their_operations(element: Element) -> None:
    a, B = drawn_diagonal(element)
    wanted = diagonal_reference(a, B)
    assert measure_error(ops.diagonal_matmul(a, B), wanted.expected["c"]).within(wanted.bounds["c"])
    x, weight, bias = drawn_norm(element)
    for found, given in (
        (ops.layer_norm(x, (37,), weight, bias), Norm(6, 37, element, weight=True, bias=True)),
        (ops.layer_norm(x, (37,)), Norm(6, 37, element)),
        (ops.rms_norm(x, (37,), weight, 0.1), Norm(6, 37, element, rms=True, weight=True, eps=0.1)),
        (ops.softmax(x), Rows(6, 37, element)),
    ):
        reference = norm_reference if isinstance(given, Norm) else rows_reference
        wanted = reference(given, {"x": x, "weight": weight, "bias": bias})
        assert measure_error(found, wanted.expected["y"]).within(wanted.bounds["y"])
    for inputs in (drawn_linear(element), drawn_linear(element)[:2]):
        wanted = linear_rowsum_reference(dict(zip(("x", "weight", "bias"), inputs, strict=False)))
        error = measure_error(ops.linear_rowsum(*inputs), wanted.expected["y"])
        assert error.within(wanted.bounds["y"])


@each_element
@each_case
def test_gradients_are_as_near_to_float64_as_those_of_pytorch(name: str, element: Element) -> None:
    function, by_pytorch, draw = CASES[name]
    given = draw(element)
    right = with_gradients(by_pytorch, tuple(x.double() for x in given))
    plain = with_gradients(by_pytorch, given)
    eps = torch.finfo(given[0].dtype).eps
    for own, other, exact in zip(with_gradients(function, given), plain, right, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        allowed = 2 * (other.double() - exact).abs().max() + eps * exact.abs().max()
        assert (own.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@each_element
def test_gradients_of_norms_are_within_the_bounds_of_the_backward_pass(
    element: Element, rms: bool
) -> None:
    problem = NormBackward(5, 40, element, rms=rms, weight=True, dweight=True, dbias=not rms)
    inputs = draw_norm_backward("outliers", problem)
    dy, x, weight = (inputs[name] for name in ("dy", "x", "weight"))
    wanted = norm_backward_reference(problem, inputs)
    leaves = [each.clone().requires_grad_() for each in (x, weight, torch.zeros_like(weight))]
    if rms:
        y = ops.rms_norm(leaves[0], (40,), leaves[1], problem.forward.eps)
        leaves.pop()
    else:
        y = ops.layer_norm(leaves[0], (40,), *leaves[1:], problem.forward.eps)
    found = torch.autograd.grad(y, leaves, dy)
    for name, own in zip(wanted.expected, found, strict=True):
        error = measure_error(own, wanted.expected[name])
        assert error.within(wanted.bounds[name]), name


@each_element
def test_gradients_of_linear_rowsum_are_within_the_bounds_of_the_backward_pass(
    element: Element,
) -> None:
    asked = {"dx": True, "dweight": True, "dbias": True}
    problem = LinearRowsumBackward(9, 40, 35, element, **asked)
    inputs = draw_linear_backward("cancelling", problem)
    wanted = linear_backward_reference(problem, inputs)
    x, weight = (inputs[name].clone().requires_grad_() for name in ("x", "weight"))
    bias = torch.zeros_like(weight[:, 0]).detach().requires_grad_()
    y = ops.linear_rowsum(x, weight, bias)
    found = torch.autograd.grad(y, (x, weight, bias), inputs["dy"])
    for name, own in zip(wanted.expected, found, strict=True):
        error = measure_error(own, wanted.expected[name])
        assert error.within(wanted.bounds[name]), name


def test_gradients_of_linear_rowsum_take_an_upstream_gradient_of_any_stride() -> None:
    given = drawn_linear(Element.FP32)
    dy = torch.randn(6, 3)
    found = []
    for laid in (dy[:, 1], dy[:, 1].contiguous()):
        leaves = [each.clone().requires_grad_() for each in given]
        found.append(torch.autograd.grad(ops.linear_rowsum(*leaves), leaves, laid))
    assert all(own.equal(other) for own, other in zip(*found, strict=True))
    leaves = [each.clone().requires_grad_() for each in given]
    ops.linear_rowsum(*leaves).sum().backward()  # dy is one element
    assert leaves[2].grad.equal(torch.full((20,), 6.0))
    assert leaves[0].grad.equal(leaves[0].grad[:1].expand(6, -1))


def test_gradients_of_norms_take_an_upstream_gradient_of_any_strides() -> None:
    x, weight, bias = drawn_norm(Element.FP32)
    dy = torch.randn(37, 6).T
    found = []
    for laid in (dy, dy.contiguous(), dy.repeat(1, 2)[:, :37]):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        found.append(
            torch.autograd.grad(ops.layer_norm(leaves[0], (37,), *leaves[1:]), leaves, laid)
        )
    for each in found[1:]:
        assert all(own.equal(first) for own, first in zip(each, found[0], strict=True))
    leaf = x.clone().requires_grad_()
    (of_sum,) = torch.autograd.grad(ops.layer_norm(leaf, (37,)).sum(), leaf)  # dy is one element
    assert of_sum.abs().max() < 1e-5


@each_case
def test_only_gradients_that_are_asked_for_are_computed(name: str) -> None:
    function, _, draw = CASES[name]
    for number, x in enumerate(given := draw(Element.FP32)):
        alone = [y.requires_grad_() if y is x else y.detach() for y in given]
        function(*alone).sum().backward()
        assert [y.grad is not None for y in alone] == [n == number for n in range(len(given))]


@each_case
def test_gradients_can_be_differentiated_again(name: str) -> None:
    function, by_pytorch, draw = CASES[name]

    def second(function) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in draw(Element.FP32)]
        first = torch.autograd.grad(function(*leaves).pow(2).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves)

    for own, other in zip(second(function), second(by_pytorch), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-3 * other.abs().max().item())


# -- shapes and layouts ----------------------------------------------------------------------------


def test_x_may_have_any_number_of_dimensions() -> None:
    x, weight, bias = drawn_linear(Element.FP32)
    y = ops.linear_rowsum(x, weight, bias)
    assert ops.linear_rowsum(x.reshape(2, 3, 37), weight, bias).equal(y.reshape(2, 3))
    assert ops.linear_rowsum(x[4], weight, bias).shape == ()
    torch.testing.assert_close(ops.linear_rowsum(x[4], weight, bias), y[4])


def test_norms_and_softmax_are_over_the_dimensions_that_are_asked_for() -> None:
    x, weight, bias = drawn_norm(Element.FP32)
    y = ops.layer_norm(x, (37,), weight, bias)
    assert ops.layer_norm(x.reshape(2, 3, 37), [37], weight, bias).equal(y.reshape(2, 3, 37))
    over_two = x.reshape(2, 3, 37), weight.expand(3, 37)
    torch.testing.assert_close(
        ops.rms_norm(over_two[0], (3, 37), over_two[1]),
        F.rms_norm(over_two[0], (3, 37), over_two[1]),
    )
    for dim in (0, 1, -2):
        few = x.reshape(2, 3, 37)[..., :2]
        torch.testing.assert_close(ops.softmax(few, dim), torch.softmax(few, dim))
    assert ops.softmax(x, -1, torch.float16).dtype == torch.float16


def test_without_an_eps_rms_norm_has_that_of_the_dtype() -> None:
    x = 1e-3 * drawn_norm()[0]
    assert ops.rms_norm(x, (37,)).equal(ops.rms_norm(x, (37,), None, 2.0**-7))
    assert not ops.rms_norm(x, (37,)).equal(ops.rms_norm(x, (37,), None, 1e-6))


def test_modules_have_the_weights_of_pytorchs_and_compute_the_same() -> None:
    x = drawn_norm(Element.FP32)[0]
    for own, other in ((ops.LayerNorm, torch.nn.LayerNorm), (ops.RMSNorm, torch.nn.RMSNorm)):
        module, by_pytorch = own(37), other(37)
        by_pytorch.load_state_dict({k: v + 0.5 for k, v in module.state_dict().items()})
        module.load_state_dict(by_pytorch.state_dict())
        for each in (module, by_pytorch):
            each(x).pow(3).sum().backward()
        torch.testing.assert_close(module(x), by_pytorch(x))
        torch.testing.assert_close(module.weight.grad, by_pytorch.weight.grad)


def test_matrices_of_any_strides_are_taken() -> None:
    a, B = drawn_diagonal()
    expected = a[:, None] * B
    for laid in (B.T.contiguous().T, B.repeat_interleave(2, 1)[:, ::2], B.repeat(1, 2)[:, :37]):
        assert ops.diagonal_matmul(a, laid).equal(expected)
    x, weight, bias = drawn_linear()
    y = ops.linear_rowsum(x, weight, bias)
    assert ops.linear_rowsum(x.T.contiguous().T, weight.T.contiguous().T, bias).equal(y)


def test_empty_tensors_give_what_pytorch_gives() -> None:
    for rows, width in ((0, 3), (3, 0)):
        a, B = torch.ones(rows), torch.ones(rows, width)
        assert ops.diagonal_matmul(a, B).equal(torch.diag(a) @ B)
    for shape in ((0, 3), (2, 0, 3)):
        x, weight = torch.ones(shape), torch.ones(3)
        assert ops.layer_norm(x, (3,), weight).equal(F.layer_norm(x, (3,), weight))
        assert ops.rms_norm(x, (3,), weight).shape == shape
        leaf = weight.clone().requires_grad_()
        ops.layer_norm(x.requires_grad_(), (3,), leaf).sum().backward()
        assert not leaf.grad.any() and x.grad.shape == shape
        x = x.detach()
        assert ops.softmax(x, 1).shape == shape
    for leading, features, outs in (((0,), 3, 2), ((2, 0), 3, 2), ((2,), 0, 3), ((2,), 3, 0)):
        given = torch.ones(*leading, features), torch.ones(outs, features), torch.ones(outs)
        assert ops.linear_rowsum(*given).equal(linear_rowsum_by_pytorch(*given))
        own, plain = (
            with_gradients(function, given)
            for function in (ops.linear_rowsum, linear_rowsum_by_pytorch)
        )
        assert all(each.equal(other) for each, other in zip(own, plain, strict=True))


# -- operators -------------------------------------------------------------------------------------


@each_case
def test_it_is_an_operator_as_pytorch_wants_it(name: str) -> None:
    given = tuple(x.requires_grad_() for x in CASES[name][2](Element.FP32))
    operator = getattr(torch.ops.flash_attention, name).default
    torch.library.opcheck(operator, (*given, *BEHIND.get(name, ())))
    if name == "linear_rowsum":
        torch.library.opcheck(operator, (*given[:2], None))


def test_gradients_are_operators_whose_own_gradients_are_refused() -> None:
    a, B = drawn_diagonal(Element.FP32)
    operator = torch.ops.flash_attention.diagonal_backward.default
    for of_B in (False, True):
        torch.library.opcheck(operator, (a, B, B.clone(), of_B))
    with pytest.raises(RuntimeError, match=r"call ops\.diagonal_matmul"):
        operator(a.requires_grad_(), B, B.clone(), True)[0].sum().backward()
    x, weight, _ = drawn_linear(Element.FP32)
    operator = torch.ops.flash_attention.linear_rowsum_backward.default
    for asked in ((True, False, False), (False, True, True), (True, True, True)):
        torch.library.opcheck(operator, (x[:, 0].clone(), x, weight, *asked))
    found = operator(x[:, 0].clone(), x, weight, False, True, False)
    assert [each.shape for each in found] == [(0,), (20, 37), (0,)]
    with pytest.raises(RuntimeError, match=r"call ops\.linear_rowsum"):
        operator(x[:, 0], x.requires_grad_(), weight, True, False, False)[0].sum().backward()
    y, dy = (x.requires_grad_() for x in draw_softmax("normal", RowsBackward(3, 37)).values())
    operator = torch.ops.flash_attention.softmax_backward.default
    torch.library.opcheck(operator, (y.detach(), dy.detach()))
    with pytest.raises(RuntimeError, match=r"call ops\.softmax"):
        operator(y, dy).sum().backward()


def drawn_add_norm(element: Element) -> tuple[torch.Tensor, ...]:
    return tuple(draw_add_norm("normal", AddNorm(6, 37, element, weight=True)).values())


@each_element
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_a_residual_is_added_before_the_norm(element: Element, rms: bool) -> None:
    problem = AddNorm(6, 37, element, rms=rms, weight=True, bias=not rms)
    inputs = draw_add_norm("normal", problem)
    x, residual, *vectors = inputs.values()
    norm = ops.rms_norm if rms else ops.layer_norm
    y, total = norm(x, (37,), *vectors, eps=problem.eps, residual=residual)
    wanted = add_norm_reference(problem, inputs)
    for name, found in (("y", y), ("sum", total)):
        assert measure_error(found, wanted.expected[name]).within(wanted.bounds[name]), name
    over_two = (matrix.reshape(2, 3, 37) for matrix in (x, residual))
    y_of_two, total_of_two = norm(
        next(over_two), (37,), *vectors, eps=problem.eps, residual=next(over_two)
    )
    assert y_of_two.equal(y.reshape(2, 3, 37)) and total_of_two.equal(total.reshape(2, 3, 37))


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("used", ["both", "y", "sum"])
def test_gradients_of_a_norm_with_a_residual_are_those_of_pytorch(used: str, rms: bool) -> None:
    x, residual, weight = drawn_add_norm(Element.FP32)
    upstream = torch.linspace(0.5, 2.0, 2 * x.numel()).reshape(2, *x.shape)
    norm, by_pytorch = (ops.rms_norm, F.rms_norm) if rms else (ops.layer_norm, F.layer_norm)

    def gradients(of: str) -> tuple[torch.Tensor | None, ...]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, residual, weight)]
        if of == "ours":
            y, total = norm(leaves[0], (37,), leaves[2], eps=1e-5, residual=leaves[1])
        else:
            total = leaves[0] + leaves[1]
            y = by_pytorch(total, (37,), leaves[2], eps=1e-5)
        parts = {"y": (y * upstream[0]).sum(), "sum": (total * upstream[1]).sum()}
        loss = parts["y"] + parts["sum"] if used == "both" else parts[used]
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        if used == "sum":
            return first
        penalty = first[0].square().sum()
        return *first, *torch.autograd.grad(penalty, leaves)

    for own, other in zip(gradients("ours"), gradients("pytorch"), strict=True):
        if other is None:
            assert own is None
        else:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_a_norm_with_a_residual_is_one_operator(rms: bool) -> None:
    x, residual, weight = (leaf.requires_grad_() for leaf in drawn_add_norm(Element.FP32))
    name = "add_rms_norm" if rms else "add_layer_norm"
    operator = getattr(torch.ops.flash_attention, name).default
    torch.library.opcheck(operator, (x, residual, weight, None, 1e-5))


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_the_backward_pass_of_norms_is_an_operator_that_has_no_gradient(rms: bool) -> None:
    problem = NormBackward(3, 20, Element.FP32, rms=rms, weight=True)
    inputs = draw_norm_backward("normal", problem)
    given = [inputs.get(name) for name in ("dy", "x", "rstd", "mean", "weight")]
    operator = torch.ops.flash_attention.norm_backward.default
    for asked in ((True, False), (False, not rms)):
        torch.library.opcheck(operator, (*given, *asked))
    dx, dweight, dbias = operator(*given, True, False)
    assert (dx.shape, dweight.shape, dbias.shape) == ((3, 20), (20,), (0,))
    dx, *_ = operator(given[0].requires_grad_(), *given[1:], False, False)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        dx.sum().backward()


@pytest.mark.slow
@each_case
def test_torch_compile_sees_one_operator_with_its_gradients(name: str) -> None:
    function, _, draw = CASES[name]
    given = draw(Element.FP32)
    compiled = torch.compile(lambda *x: function(*x) * 2, fullgraph=True, backend="aot_eager")
    eager = with_gradients(lambda *x: function(*x) * 2, given)
    for own, other in zip(with_gradients(compiled, given), eager, strict=True):
        assert own.equal(other)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "given", "error", "text"),
    [
        (ops.diagonal_matmul, (torch.ones(2), [[1.0]]), TypeError, "B is a list"),
        (ops.diagonal_matmul, (torch.ones(2), torch.ones(3, 2)), ValueError, "one element for"),
        (ops.diagonal_matmul, (torch.ones(2), torch.ones(2, 2).half()), TypeError, "float16"),
        (ops.diagonal_matmul, (torch.ones(2).double(), torch.ones(2, 2)), TypeError, "float64"),
        (ops.diagonal_matmul, (torch.ones(2), torch.ones(2)), ValueError, "dimensions"),
        (ops.linear_rowsum, (torch.ones(2, 3), torch.ones(2, 4)), ValueError, "in_features must"),
        (ops.linear_rowsum, (torch.tensor(1.0), torch.ones(2, 4)), ValueError, "no dimensions"),
        (ops.layer_norm, (torch.ones(2, 3), (2,)), ValueError, "sizes of the last dimensions"),
        (ops.layer_norm, (torch.ones(2, 3), ()), ValueError, "one or more"),
        (ops.layer_norm, (torch.ones(3), (2, 3)), ValueError, "sizes of the last dimensions"),
        (ops.layer_norm, (torch.ones(2, 3), (3,), torch.ones(2)), ValueError, "weight has shape"),
        (ops.layer_norm, (torch.ones(2, 3), (3,), None, torch.ones(3).half()), TypeError, "bias"),
        (ops.rms_norm, (torch.ones(2, 3).double(), (3,)), TypeError, "float64"),
        (ops.rms_norm, ([1.0], (1,)), TypeError, "input is a list"),
        (ops.rms_norm, (torch.ones(1).expand(131073), (131073,)), ValueError, "over the limit"),
        (ops.softmax, (torch.ones(2, 3), 2), IndexError, "out of range"),
        (ops.softmax, (torch.ones(2, 3).double(),), TypeError, "float64"),
        (ops.softmax, (torch.ones(1, 1).expand(1, 131073),), ValueError, "over the limit"),
        (ops.linear_rowsum, (torch.ones(2, 3).int(), torch.ones(2, 3).int()), TypeError, "int32"),
        (
            ops.linear_rowsum,
            (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)),
            ValueError,
            "one element for each row of weight",
        ),
    ],
)
def test_what_they_do_not_take_is_refused(function, given, error, text: str) -> None:
    with pytest.raises(error, match=text):
        function(*given)


def test_forward_mode_derivatives_are_refused() -> None:
    a, B = drawn_diagonal(Element.FP32)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(ops.diagonal_matmul, (a, B), (torch.ones_like(a), torch.ones_like(B)))


def test_a_nan_of_b_stays_in_its_row() -> None:
    a, B = drawn_diagonal(Element.FP32)
    B[2, 3] = math.nan
    assert ops.diagonal_matmul(a, B).isnan().sum() == 1
