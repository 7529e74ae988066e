"""Every way to ask for a derivative that no kernel computes is refused in words: none gives None or
0. The gradients that are computed are those of `test_autograd`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

import flash_attention
from flash_attention import _forward
from flash_attention.flash_attn import flash_attn_varlen_func
from flash_helpers.kernel_configs import config_from_short_form
from flash_helpers.runtime import call

# It takes every option; that attention() never takes it for CPU tensors is changed below.
CONFIG = config_from_short_form("h30_bf16_d128_Br128_Bc128_K3_V2_pp")
SHAPE = (1, 128, 1, 128)

Function = Callable[[torch.Tensor], torch.Tensor]


def ones() -> torch.Tensor:
    return torch.ones(SHAPE, dtype=torch.bfloat16)


def leaf() -> torch.Tensor:
    return ones().requires_grad_()


@pytest.fixture(autouse=True)
def ran(monkeypatch) -> list[None]:
    """The kernels that ran; they compute zeros."""
    found: list[None] = []

    def run(self: call.ReadyCall, *_: object) -> None:
        found.append(None)
        for x in self.outputs.values():
            x.zero_()

    monkeypatch.setattr(call.ReadyCall, "run", run)
    monkeypatch.setattr(call.ReadyCall, "simulate", run)
    monkeypatch.setattr(_forward, "_choose", lambda *_: CONFIG)
    monkeypatch.setattr(call, "_plans", {})  # other tests do not find plans of this choice
    return found


def written_lse(q: torch.Tensor) -> torch.Tensor:
    lse = torch.zeros(1, 1, 128)
    flash_attention.forward(CONFIG, q, q, q, lse=lse)
    return lse


def varlen(q: torch.Tensor) -> torch.Tensor:
    begins = torch.tensor([0, 128], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], q[0], q[0], begins, begins, 128, 128)


# Functions of one input, of which only it is differentiable.
OPERATORS: dict[str, Function] = {
    "attention of q": lambda q: flash_attention.attention(q, ones(), ones()),
    "attention of k": lambda k: flash_attention.attention(ones(), k, ones()),
    "attention of v": lambda v: flash_attention.attention(ones(), ones(), v),
    "o beside lse": lambda q: flash_attention.attention(q, q, q, return_lse=True)[0],
    "lse": lambda q: flash_attention.attention(q, q, q, return_lse=True)[1],
    "forward": lambda q: flash_attention.forward(CONFIG, q, q, q),
    "forward into o": lambda v: flash_attention.forward(CONFIG, ones(), ones(), v, ones()),
    "forward into lse": written_lse,
    "varlen": varlen,
    "no keys": lambda q: flash_attention.attention(q, q[:, :0], q[:, :0]),
    "no keys in a window": lambda q: flash_attention.attention(
        *(q, q[:, :0], q[:, :0]), window_size=(1, 1), softcap=2.0
    ),
    "sinks of no keys": lambda q: flash_attention.attention(
        *(ones(), ones()[:, :0], ones()[:, :0]), sinks=q[0, 0, 0, :1], return_lse=True
    )[1],
    "forward with sinks": lambda q: flash_attention.forward(
        *(CONFIG, ones(), ones()[:, :0], ones()[:, :0]), sinks=q[0, 0, 0, :1]
    ),
    "forward with sinks into o": lambda q: flash_attention.forward(
        *(CONFIG, ones(), ones()[:, :0], ones()[:, :0], ones()), sinks=q[0, 0, 0, :1]
    ),
}
OTHERS: dict[str, Function] = {
    "run": lambda q: flash_attention.run(CONFIG, q, q, q)["o"],
    "run into o": lambda q: flash_attention.run(CONFIG, q, q, q, ones())["o"],
    "simulate": lambda q: flash_attention.simulate(CONFIG, q, q, q)[0],
    "simulate with sinks": lambda q: flash_attention.simulate(
        *(CONFIG, ones(), ones()[:, :0], ones()[:, :0]), sinks=q[0, 0, 0, :1]
    )[0],
}


def of_scalar(function: Function) -> Function:
    """The sum of a function of w · 1, so that few derivatives are computed."""
    return lambda w: function((ones() * w).bfloat16()).sum()


def backward(function: Function, change: Function = lambda q: q) -> None:
    function(change(leaf())).sum().backward()


def gradient(function: Function, **options: Any) -> Any:
    q = leaf()
    return torch.autograd.grad((function(q) * 0 + q).sum(), q, **options)


def batched_gradient(function: Function) -> Any:
    o = function(q := leaf())
    return torch.autograd.grad(o, q, torch.ones(2, *o.shape).to(o.dtype), is_grads_batched=True)


def tangent(function: Function) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(ones(), ones()))).tangent


def checkpointed(function: Function, use_reentrant: bool) -> None:
    q = leaf()
    (checkpoint(function, q, use_reentrant=use_reentrant) * 0 + q).sum().backward()


ONE = torch.ones(())
WAYS: dict[str, Callable[[Function], Any]] = {
    "backward": backward,
    "backward of a view": lambda f: backward(f, lambda q: q.view(128, 128).view(SHAPE)),
    "backward of a parameter": lambda f: backward(f, lambda q: torch.nn.Parameter(q.detach())),
    "backward of a product": lambda f: backward(f, lambda q: q * 2),
    "autograd.grad": gradient,
    "autograd.grad, unused allowed": lambda f: gradient(f, allow_unused=True),
    "autograd.grad of a graph": lambda f: gradient(f, create_graph=True),
    "autograd.grad, batched": batched_gradient,
    "checkpoint": lambda f: checkpointed(f, False),
    "checkpoint, reentrant": lambda f: checkpointed(f, True),
    "gradcheck": lambda f: torch.autograd.gradcheck(
        lambda w: of_scalar(f)(w).double(), torch.ones((), dtype=torch.double, requires_grad=True)
    ),
    "functional.jacobian": lambda f: functional.jacobian(of_scalar(f), ONE),
    "functional.hessian": lambda f: functional.hessian(of_scalar(f), ONE),
    "functional.vjp": lambda f: functional.vjp(of_scalar(f), ONE),
    "functional.jvp": lambda f: functional.jvp(of_scalar(f), ONE, ONE),
    "functional.hvp": lambda f: functional.hvp(of_scalar(f), ONE, ONE),
    "functional.jacobian, forward": lambda f: functional.jacobian(
        of_scalar(f), ONE, strategy="forward-mode", vectorize=True
    ),
    "func.grad": lambda f: torch.func.grad(lambda q: f(q).sum())(ones()),
    "func.grad of a leaf": lambda f: torch.func.grad(lambda q: f(q).sum())(leaf()),
    "func.grad under no_grad": torch.no_grad()(
        lambda f: torch.func.grad(lambda q: f(q).sum())(ones())
    ),
    "func.grad under inference_mode": torch.inference_mode()(
        lambda f: torch.func.grad(lambda q: f(q).sum())(ones())
    ),
    "func.vjp": lambda f: torch.func.vjp(f, ones()),
    "func.jacrev": lambda f: torch.func.jacrev(of_scalar(f))(ONE),
    "func.jvp": lambda f: torch.func.jvp(f, (ones(),), (ones(),)),
    "func.jvp under no_grad": torch.no_grad()(lambda f: torch.func.jvp(f, (ones(),), (ones(),))),
    "func.jacfwd": lambda f: torch.func.jacfwd(of_scalar(f))(ONE),
    "func.hessian": lambda f: torch.func.hessian(of_scalar(f))(ONE),
    "func.linearize": lambda f: torch.func.linearize(f, ones()),
    "func.grad of func.grad": lambda f: torch.func.grad(torch.func.grad(of_scalar(f)))(ONE),
    "func.grad of func.jvp": lambda f: torch.func.grad(
        lambda w: torch.func.jvp(of_scalar(f), (w,), (ONE,))[1]
    )(ONE),
    "func.jvp of func.grad": lambda f: torch.func.jvp(
        torch.func.grad(of_scalar(f)), (ONE,), (ONE,)
    ),
    "vmap of func.grad": lambda f: torch.vmap(torch.func.grad(of_scalar(f)))(ONE[None]),
    "vmap of func.jvp": lambda f: torch.vmap(
        lambda w: torch.func.jvp(of_scalar(f), (w,), (ONE,))[1]
    )(ONE[None]),
    "forward_ad": tangent,
    "forward_ad under no_grad": torch.no_grad()(tangent),
}

# Functions that have a gradient by autograd, and the ways that ask for it alone.
DIFFERENTIABLE = (
    *("attention of q", "attention of k", "attention of v", "o beside lse", "varlen"),
    *("no keys", "no keys in a window"),
)
GRADIENTS = (
    *("backward", "backward of a view", "backward of a parameter", "backward of a product"),
    *("autograd.grad", "autograd.grad, unused allowed", "autograd.grad of a graph"),
    *("autograd.grad, batched", "checkpoint", "checkpoint, reentrant", "gradcheck"),
    *("functional.jacobian", "functional.vjp"),
)
COMPUTED = {(function, way) for function in DIFFERENTIABLE for way in GRADIENTS}

IN_WORDS = (
    "flash_attention has no (backward pass|forward-mode derivative|second derivative|"
    "gradient of the LSE).*"
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", OPERATORS | OTHERS)
def test_a_derivative_without_a_kernel_is_refused(function, way):
    if (function, way) in COMPUTED:
        WAYS[way](OPERATORS[function])
        return
    with pytest.raises(RuntimeError, match=IN_WORDS + r"\.detach\(\)|primals alone|create_graph"):
        WAYS[way]((OPERATORS | OTHERS)[function])


@pytest.mark.parametrize("way", ["backward", "forward_ad", "func.grad"])
def test_a_derivative_of_forward_timed_is_refused_before_it_asks_for_a_gpu(way):
    with pytest.raises(RuntimeError, match=IN_WORDS):
        WAYS[way](lambda q: flash_attention.forward_timed(CONFIG, q, q, q)[0])


class Module(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.function(q)


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager")


TRACED: dict[str, Callable[[Function], Any]] = {
    "compiled": lambda f: backward(compiled(f)),
    "compiled, func.grad within": lambda f: compiled(torch.func.grad(lambda q: f(q).sum()))(ones()),
    "compiled, func.grad around": lambda f: torch.func.grad(lambda q: compiled(f)(q).sum())(ones()),
    "compiled, func.jvp within": lambda f: compiled(lambda q: torch.func.jvp(f, (q,), (q,))[1])(
        ones()
    ),
    "compiled, forward_ad around": lambda f: tangent(compiled(f)),
    "exported": lambda f: backward(torch.export.export(Module(f), (ones(),)).module()),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", TRACED)
@pytest.mark.parametrize("function", ["lse", "forward", "forward into o"])
def test_a_derivative_of_traced_code_is_refused(function, way):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=IN_WORDS):
        TRACED[way](OPERATORS[function])


class TestNoDerivative:
    """Calls that ask for none are computed, though their inputs could have one."""

    @pytest.mark.parametrize("function", OPERATORS | OTHERS)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_is_asked_for_outside_of_grad_mode(self, ran, function, mode):
        with mode():
            assert not (OPERATORS | OTHERS)[function](leaf()).requires_grad
        assert len(ran) == 1

    @pytest.mark.parametrize("function", [name for name in OPERATORS if "into" not in name])
    def test_is_asked_for_before_the_backward_pass(self, ran, function):
        assert OPERATORS[function](leaf()).requires_grad and len(ran) == 1

    @pytest.mark.parametrize("function", OPERATORS)
    def test_of_a_primal_is_asked_for_beside_dual_tensors(self, ran, function):
        with forward_ad.dual_level():
            forward_ad.make_dual(ones(), ones())
            OPERATORS[function](ones())
        assert len(ran) == 1

    @pytest.mark.parametrize("function", OPERATORS)
    def test_of_detached_tensors_is_asked_for_under_a_transform(self, ran, function):
        own = OPERATORS[function]
        found = torch.func.grad(lambda q: (own(q.detach()).detach().sum() * 0 + q).sum())(ones())
        assert torch.equal(found, ones()) and len(ran) == 1


@pytest.mark.parametrize("name", ["o", "lse"])
def test_an_output_that_requires_grad_is_refused(ran, name):
    output = {"o": leaf(), "lse": torch.zeros(1, 1, 128, requires_grad=True)}[name]
    with pytest.raises(ValueError, match=f"{name} requires grad and is overwritten: pass {name}.d"):
        flash_attention.forward(CONFIG, ones(), ones(), ones(), **{name: output})
    assert ran == []


class TestVmap:
    @pytest.mark.parametrize("function", [name for name in OPERATORS if "into" not in name])
    def test_runs_the_kernel_once_for_each(self, ran, function):
        expected = OPERATORS[function](ones()).shape
        assert torch.vmap(OPERATORS[function])(ones().expand(2, *SHAPE)).shape == (2, *expected)
        assert len(ran) == 1 + 2

    def test_of_an_output_that_has_no_batch_is_refused_by_torch(self, ran):
        with pytest.raises(RuntimeError, match="Batching rule not implemented for flash_at"):
            torch.vmap(OPERATORS["forward into o"])(ones()[None])
        assert ran == []

    @pytest.mark.parametrize("function", OTHERS)
    def test_of_what_is_no_operator_is_refused(self, ran, function):
        name = function.partition(" ")[0]
        with pytest.raises(RuntimeError, match=rf"{name}\(\) is no operator and .*call attention"):
            torch.vmap(OTHERS[function])(ones()[None])
        assert ran == []
