"""Gradients of attention by autograd, of CPU tensors: those of the float64 formula."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_attention
from flash_attention import _backward, flash_attn_3
from flash_attention.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.reference import gradients_reference
from flash_helpers.ptx import Kernel, Run
from flash_helpers.runtime import call
from flash_helpers.tune.best import choose_config

D_HEAD = 64
Q, K = (1, 21, 4, D_HEAD), (1, 30, 2, D_HEAD)
EQUAL = (1, 18, 2, D_HEAD)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Return leaves of these shapes."""
    generator = torch.Generator().manual_seed(0)
    every = (torch.randn(shape, generator=generator).add_(0.5) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in every]


def expected(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> Reference:
    return gradients_reference(*(x.detach() for x in (do, q, k, v)), **options)


def assert_right(found: Mapping[str, torch.Tensor | None], right: Reference) -> None:
    for name, x in found.items():
        assert x is not None
        error = measure_error(x, right.expected[name])
        assert error.within(right.bounds[name]), f"{name}: {error.excess(right.bounds[name])}"


def check(function: Callable[..., torch.Tensor], *leaves: torch.Tensor, **options: Any) -> None:
    """Compare the gradients of a function of q, k and v, for a random dO."""
    o = function(*leaves)
    (do,) = drawn(tuple(o.shape), dtype=o.dtype)
    o.backward(do.detach())
    found = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    assert_right(found, expected(do, *leaves, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_attention_with_grouped_heads_and_two_lengths(dtype):
    check(flash_attention.attention, *drawn(Q, K, K, dtype=dtype))


def test_of_every_option_at_once():
    check(
        lambda q, k, v: flash_attention.attention(
            q, k, v, window_size=(9, 2), softcap=3.0, softmax_scale=0.2
        ),
        *drawn(Q, K, K),
        window_left=9,
        window_right=2,
        softcap=3.0,
        softmax_scale=0.2,
    )


def test_of_queries_that_see_no_key():
    check(
        lambda q, k, v: flash_attention.attention(q, k, v, causal=True, return_lse=True)[0],
        *drawn((1, 40, 1, D_HEAD), *2 * [(1, 25, 1, D_HEAD)]),
        causal=True,
    )


def test_of_packed_tensors():
    (qkv,) = drawn((1, 18, 3, 2, D_HEAD))
    (kv,) = drawn((1, 18, 2, 2, D_HEAD))
    (do,) = drawn(EQUAL)
    flash_attn_qkvpacked_func(qkv, causal=True).backward(do.detach())
    right = expected(do, *qkv.unbind(2), causal=True)
    assert qkv.grad is not None
    assert_right(dict(zip(right.expected, qkv.grad.unbind(2), strict=True)), right)
    flash_attn_kvpacked_func(qkv[:, :, 0].detach(), kv).backward(do.detach())
    right = expected(do, qkv[:, :, 0], *kv.unbind(2))
    assert kv.grad is not None
    assert_right(dict(zip(("dk", "dv"), kv.grad.unbind(2), strict=True)), right)


def test_of_sequences_of_various_lengths():
    """One has no queries and another no keys: their other rows have gradients of 0."""
    begins_q, begins_k = [0, 0, 9, 20, 26], [0, 7, 20, 20, 31]
    q, k, v = drawn((26, 2, D_HEAD), *2 * [(31, 2, D_HEAD)])
    lengths = [torch.tensor(begins, dtype=torch.int32) for begins in (begins_q, begins_k)]
    o = flash_attn_varlen_func(q, k, v, *lengths, 26, 31, causal=True)
    (do,) = drawn(tuple(o.shape))
    o.backward(do.detach())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    for rows, keys in ((slice(0, 9), slice(7, 20)), (slice(20, 26), slice(20, 31))):
        right = expected(do[None, rows], q[None, rows], k[None, keys], v[None, keys], causal=True)
        found = {"dq": q.grad[None, rows], "dk": k.grad[None, keys], "dv": v.grad[None, keys]}
        assert_right(found, right)
    assert not k.grad[:7].any() and not v.grad[:7].any() and not q.grad[9:20].any()


ONE_KERNEL = ("delta_kernel", "gradients_kernel", "convert_kernel")
TWO_KERNELS = ("delta_kernel", "dq_kernel", "dkdv_kernel")
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda do: do[:, :1, :1, :1].expand(do.shape),
    "transposed": lambda do: do.transpose(1, 3).contiguous().transpose(1, 3),
    "every other row": lambda do: do.repeat_interleave(2, dim=1)[:, ::2],
    "a row of odd length": lambda do: torch.nn.functional.pad(do, (0, 1))[..., :-1],
    "at an odd address": lambda do: torch.nn.functional.pad(do.flatten(), (1, 0))[1:].view(
        do.shape
    ),
}


@pytest.mark.parametrize("layout", GRADIENTS)
def test_of_a_gradient_of_any_layout(layout):
    leaves = drawn(EQUAL, EQUAL, EQUAL)
    do = GRADIENTS[layout](drawn(EQUAL)[0].detach())
    flash_attention.attention(*leaves).backward(do)
    found = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    assert_right(found, expected(do, *leaves))


def test_of_one_tensor_that_is_q_k_and_v():
    (x,) = drawn(EQUAL)
    (do,) = drawn(EQUAL)
    flash_attention.attention(x, x, x).backward(do.detach())
    right = expected(do, x, x, x)
    total = sum(right.expected.values())
    assert x.grad is not None
    assert (x.grad - total).abs().max() <= sum(bound.max_abs for bound in right.bounds.values())


@pytest.mark.parametrize("name", "qkv")
def test_of_one_input_alone(name):
    leaves = dict(zip("qkv", drawn(EQUAL, EQUAL, EQUAL), strict=True))
    given = {n: x if n == name else x.detach() for n, x in leaves.items()}
    (do,) = drawn(EQUAL)
    flash_attn_func(*given.values()).backward(do.detach())
    assert_right({f"d{name}": leaves[name].grad}, expected(do, *leaves.values()))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("asked", ["q", "k", "kv", "qv"])
def test_launches_of_what_nobody_asks_for_are_left_out(asked, deterministic, monkeypatch):
    launched = []
    launch = Kernel.launch

    def noted(kernel: Kernel, **options: Any) -> Run:
        launched.append(kernel.name)
        return launch(kernel, **options)

    leaves = dict(zip("qkv", drawn(EQUAL, EQUAL, EQUAL), strict=True))
    given = {n: x if n in asked else x.detach() for n, x in leaves.items()}
    o = flash_attention.attention(*given.values(), deterministic=deterministic)
    monkeypatch.setattr(Kernel, "launch", noted)
    o.sum().backward()
    known = TWO_KERNELS if deterministic else ONE_KERNEL
    every = {*ONE_KERNEL, *TWO_KERNELS}
    functions = {function for name in launched for function in every if function in name}
    left_out = {"dq_kernel", "convert_kernel"} if "q" not in asked else set()
    if not {*"kv"} & {*asked}:
        left_out.add("dkdv_kernel")
    assert functions == {*known} - left_out
    assert all((x.grad is not None) == (n in asked) for n, x in leaves.items())


def test_of_sinks():
    q, k, v = drawn(Q, K, K, dtype=torch.bfloat16)
    sinks = torch.tensor([0.5, 2.0, -1.0, -torch.inf], dtype=torch.bfloat16).requires_grad_()
    o = flash_attention.attention(q, k, v, causal=True, sinks=sinks)
    (do,) = drawn(Q, dtype=torch.bfloat16)
    o.backward(do.detach())
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    gradients = torch.autograd.grad(_with_sinks(*inputs), inputs, do.double())
    for x, right in zip((q, k, v, sinks), gradients, strict=True):
        assert x.grad is not None
        assert (x.grad - right).norm() <= 0.02 * right.norm()


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return causal attention with one more logit per head, written out."""
    K, V = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    S = torch.einsum("bqhd,bkhd->bhqk", q, K) / D_HEAD**0.5
    rows, keys = S.shape[-2:]
    S = S.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1).bool(), -torch.inf)
    more = sinks[None, :, None, None].expand(*S.shape[:3], 1)
    P = torch.softmax(torch.cat((S, more), dim=-1), dim=-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", P, V)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_is_the_same_under_checkpointing(use_reentrant):
    plain, saved = drawn(EQUAL, EQUAL, EQUAL), drawn(EQUAL, EQUAL, EQUAL)
    flash_attention.attention(*plain).sum().backward()
    with torch.autograd.set_multithreading_enabled(False):
        checkpoint(flash_attention.attention, *saved, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, saved, strict=True))


@pytest.mark.slow
def test_is_the_same_when_compiled():
    torch._dynamo.reset()
    plain, traced = drawn(EQUAL, EQUAL, EQUAL), drawn(EQUAL, EQUAL, EQUAL)
    flash_attention.attention(*plain, causal=True).sum().backward()
    compiled = torch.compile(
        lambda q, k, v: flash_attention.attention(q, k, v, causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(*traced).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, traced, strict=True))


def test_of_no_keys_is_0():
    q, k = drawn(EQUAL, (1, 0, 2, D_HEAD))
    flash_attention.attention(q, k, k).sum().backward()
    assert q.grad is not None and not q.grad.any()
    assert k.grad is not None and k.grad.shape == k.shape


def test_nan_in_a_gradient_stays_in_its_row_and_column():
    q, k, v = drawn(EQUAL, EQUAL, EQUAL)
    do = torch.ones(EQUAL, dtype=q.dtype)
    do[0, 3, 0, 5] = torch.nan
    flash_attention.attention(q, k, v).backward(do)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert {tuple(x) for x in q.grad.isnan().any(-1).nonzero().tolist()} == {(0, 3, 0)}
    assert not k.grad[:, :, 1].isnan().any()
    assert {tuple(x) for x in v.grad.isnan().any(1).nonzero().tolist()} == {(0, 0, 5)}


Attend: TypeAlias = "Callable[..., torch.Tensor]"


def varlen(x: torch.Tensor, **options: bool) -> torch.Tensor:
    lengths = torch.tensor([0, 7, 18], dtype=torch.int32)
    return flash_attn_varlen_func(x[0], x[0], x[0], lengths, lengths, 11, 11, **options)


ATTENDING: dict[str, Attend] = {
    "attention": lambda x, **options: flash_attention.attention(x, x, x, **options),
    "with an LSE": lambda x, **options: flash_attention.attention(
        x, x, x, return_lse=True, **options
    )[0],
    "with a window": lambda x, **options: flash_attention.attention(
        x, x, x, window_size=(5, 3), **options
    ),
    "flash_attn_func": lambda x, **options: flash_attn_func(x, x, x, **options),
    "flash_attn_3": lambda x, **options: flash_attn_3.flash_attn_func(x, x, x, **options),
    "flash_attn_varlen_func": varlen,
}


@contextmanager
def switched_on(**options: bool) -> Iterator[None]:
    """PyTorch's switch for deterministic algorithms is on."""
    torch.use_deterministic_algorithms(True, **options)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TestDeterminism:
    """Whether gradients must be the same bits in every call, and when that is asked for."""

    @pytest.fixture
    def asked(self, monkeypatch) -> list[bool]:
        """What it is for each choice of a kernel, which computes nothing. A call whose kernel was
        chosen before chooses none."""
        found: list[bool] = []

        def noted(problem: AttentionBackward, device: torch.device) -> Config:
            found.append(problem.deterministic)
            return choose_config(problem, device)

        def compute_nothing(self: call.ReadyCall) -> None:
            for x in self.outputs.values():
                x.zero_()

        monkeypatch.setattr(_backward, "choose_config", noted)
        monkeypatch.setattr(call, "_plans", {})
        monkeypatch.setattr(call.ReadyCall, "simulate", compute_nothing)
        return found

    @pytest.mark.parametrize("attend", ATTENDING.values(), ids=ATTENDING)
    def test_is_an_argument_and_calls_with_and_without_are_kept_apart(self, asked, attend):
        (x,) = drawn(EQUAL)
        for options in ({}, {"deterministic": True}, {"deterministic": False}, {}):
            attend(x, **options).sum().backward()
        assert asked == [False, True]
        attend(x, deterministic=True).sum().backward()
        assert asked == [False, True]

    @pytest.mark.parametrize("options", [{}, {"warn_only": True}], ids=str)
    def test_is_a_switch_of_pytorch_which_is_read_when_gradients_are_computed(self, asked, options):
        (x,) = drawn(EQUAL)
        attend = ATTENDING["attention"]
        o = attend(x)
        with switched_on(**options):
            o.sum().backward()
            before = attend(x)
        assert asked == [True]
        before.sum().backward()
        assert asked == [True, False]

    @pytest.mark.slow
    def test_is_the_switch_as_it_was_when_compiled_code_was_traced(self, asked):
        torch._dynamo.reset()
        compiled = torch.compile(
            ATTENDING["attention"], fullgraph=True, backend="aot_eager", dynamic=False
        )
        (x,) = drawn(EQUAL)
        compiled(x).sum().backward()
        assert {*asked} == {False}
        asked.clear()
        with switched_on():  # which traces anew
            o = compiled(x)
        o.sum().backward()
        assert {*asked} == {True}
        asked.clear()
        compiled(x).sum().backward()
        assert asked == []
        compiled(x, deterministic=True).sum().backward()
        assert True in asked and False not in asked

    @pytest.mark.slow
    def test_is_an_argument_of_an_operator_as_torch_expects_one(self, asked):
        given = [x.detach() for x in drawn(*5 * [EQUAL])]
        lse = torch.zeros(1, EQUAL[2], EQUAL[1])
        operator = torch.ops.flash_attention.attention_backward.default
        for deterministic in (False, True):
            options = None, None, True, 3, None, 1.5, None, deterministic, True, False, True
            torch.library.opcheck(operator, (*given, lse, *options))
        assert {*asked} == {False, True}

    @pytest.mark.parametrize("attend", ATTENDING.values(), ids=ATTENDING)
    def test_that_is_no_bool_is_refused(self, asked, attend):
        (x,) = drawn(EQUAL)
        for value in (1, None, "no"):
            with pytest.raises(TypeError, match=f"deterministic is {value!r}: pass True or False"):
                attend(x, deterministic=value)


class TestRefused:
    def test_is_a_second_derivative(self):
        q, k, v = drawn(EQUAL, EQUAL, EQUAL)
        (dq,) = torch.autograd.grad(flash_attention.attention(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dq.sum().backward()

    def test_is_the_gradient_of_an_lse(self):
        o, lse = flash_attention.attention(*drawn(EQUAL, EQUAL, EQUAL), return_lse=True)
        with pytest.raises(RuntimeError, match=r"no gradient of the LSE.*lse\.detach\(\)"):
            (o.sum() + lse.sum()).backward()
