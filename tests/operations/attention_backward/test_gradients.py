"""The reference of the backward pass is the derivative of attention, and its bounds tell right
gradients from wrong ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_helpers.check.errors import measure_error
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_backward.reference import gradients_float64, reference
from flash_helpers.operations.attention_forward.reference import (
    attention_of,
    hidden_keys,
    sequences_of,
)
from flash_helpers.registry.problem import Element

SMALL = AttentionBackward(2, 4, 40, 32)
PROBLEMS = {
    "plain": SMALL,
    "causal": dataclasses.replace(SMALL, causal=True),
    "some queries see no key": dataclasses.replace(SMALL, causal=True, len_k=13),
    "grouped heads": dataclasses.replace(SMALL, kv_heads=2, len_k=50, softmax_scale=0.3),
    "window": dataclasses.replace(SMALL, window_left=7, window_right=2),
    "softcap": dataclasses.replace(SMALL, softcap=1.5, causal=True),
    "sequences": AttentionBackward(1, 2, 60, 32, len_k=50, sequences=5, causal=True),
}


def logits(problem: AttentionBackward, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, len_q, len_k), -inf where a query does not see a key."""
    S = torch.einsum("bqhd,bkhd->bhqk", q, k) * problem.softmax_scale
    if problem.softcap:
        S = problem.softcap * torch.tanh(S / problem.softcap)
    rows, keys = S.shape[-2:]
    behind = 0 if problem.causal else problem.window_right
    hidden = hidden_keys(torch.arange(rows), rows, keys, behind, problem.window_left)
    return S if hidden is None else S.masked_fill(hidden, -math.inf)


def by_autograd(problem: AttentionBackward, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return dq, dk and dv of attention written out in float64, by PyTorch's autograd."""
    q, k, v = (inputs[name].double().requires_grad_() for name in "qkv")
    group = problem.heads // problem.kv_heads
    total = torch.zeros((), dtype=torch.float64)
    for rows, keys in sequences_of(problem, inputs):
        K, V = (x[:, keys].repeat_interleave(group, dim=2) for x in (k, v))
        P = torch.softmax(logits(problem, q[:, rows], K), dim=-1).nan_to_num(0.0)
        o = torch.einsum("bhqk,bkhd->bqhd", P, V)
        total = total + (o * inputs["do"][:, rows].double()).sum()
    return list(torch.autograd.grad(total, (q, k, v)))


def as_a_kernel(
    problem: AttentionBackward, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients by the formulas of `AttentionBackward`, from the O and the LSE given,
    with P and dS rounded to the dtype. Without sequences."""
    do, q, k, v, o = (inputs[name].double() for name in ("do", "q", "k", "v", "o"))
    dtype, group = inputs["q"].dtype, problem.heads // problem.kv_heads

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double()

    K, V = (x.repeat_interleave(group, dim=2) for x in (k, v))
    S = logits(problem, q, K)
    P = rounded(torch.exp(S - inputs["lse"].double()[..., None]).nan_to_num(0.0))
    delta = (do * o).sum(-1).transpose(1, 2)[..., None]
    dS = P * (torch.einsum("bqhd,bkhd->bhqk", do, V) - delta)
    if problem.softcap:
        dS = dS * (1 - (S.nan_to_num(neginf=0.0) / problem.softcap).square())
    dS = rounded(dS) * problem.softmax_scale
    found = {
        "dq": torch.einsum("bhqk,bkhd->bqhd", dS, K),
        "dk": torch.einsum("bhqk,bqhd->bkhd", dS, q).unflatten(2, (-1, group)).sum(3),
        "dv": torch.einsum("bhqk,bqhd->bkhd", P, do).unflatten(2, (-1, group)).sum(3),
    }
    return {name: x.to(dtype) for name, x in found.items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_is_the_derivative_of_attention(name):
    problem = PROBLEMS[name]
    inputs = draw("normal", problem)
    expected = reference(problem, inputs).expected
    for found, right in zip(expected.values(), by_autograd(problem, inputs), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", [name for name, p in PROBLEMS.items() if not p.sequences])
@pytest.mark.parametrize("dtype", [Element.BF16, Element.FP16])
def test_a_kernels_roundings_stay_within_the_bounds(name, distribution, dtype):
    problem = PROBLEMS[name].in_dtype(dtype)
    inputs = draw(distribution, problem)
    right = reference(problem, inputs)
    for gradient, found in as_a_kernel(problem, inputs).items():
        error = measure_error(found, right.expected[gradient])
        assert error.within(right.bounds[gradient]), error.excess(right.bounds[gradient])


def test_the_error_of_a_delta_adds_up_over_keys_that_are_alike():
    """dP - delta sums up to 0, and the error of delta does not: dQ has it times the mean of K."""
    problem = AttentionBackward(1, 4, 256, 64)
    inputs = draw("normal", problem)
    inputs["k"] += 8.0
    o, lse = attention_of(problem, inputs)
    inputs |= {"o": o.to(inputs["q"].dtype), "lse": lse.float()}
    right = reference(problem, inputs)
    error = measure_error(as_a_kernel(problem, inputs)["dq"], right.expected["dq"])
    assert error.within(right.bounds["dq"]), error.excess(right.bounds["dq"])


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Return float64 values cut off behind the 24 bits of float32."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**24).trunc(), exponent - 24)


@pytest.mark.parametrize("dtype", [Element.BF16, Element.FP16])
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_sums_that_tensor_cores_cut_off_stay_within_the_bounds(d_head, dtype):
    """With a single key dP - delta is 0, and what is left is the error of their sums."""
    differ = False
    for heads, seed in ((1, 0), (1, 1), (4, 2), (64, 3)):
        problem = AttentionBackward(1, heads, 1, d_head, kv_heads=heads).in_dtype(dtype)
        inputs = draw("normal", problem, seed=seed)
        do, v = inputs["do"].double(), inputs["v"].double()
        dP = torch.zeros(do.shape[:-1], dtype=torch.float64)
        for step in (do * v).split(16, dim=-1):
            dP = truncated(dP + step.sum(-1))
        delta = (do * inputs["o"].double()).sum(-1).float().double()
        dS = (dP - delta).to(inputs["q"].dtype).double()[..., None] * problem.softmax_scale
        right = reference(problem, inputs)
        differ |= bool(dS.any())
        for name, other in (("dq", "k"), ("dk", "q")):
            found = (dS * inputs[other].double()).to(inputs["q"].dtype)
            error = measure_error(found, right.expected[name])
            assert error.within(right.bounds[name]), error.excess(right.bounds[name])
    assert differ


@pytest.mark.parametrize("size", [2.0**-8, 2.0**-14, 2.0**-18])
def test_roundings_of_subnormal_numbers_stay_within_the_bounds_and_wrong_ones_do_not(size):
    """With a dO this small, P (dP - delta) and the gradients are subnormal in fp16."""
    problem = SMALL.in_dtype(Element.FP16)
    inputs = draw("normal", problem)
    inputs["do"] *= size
    right = reference(problem, inputs)
    for gradient, found in as_a_kernel(problem, inputs).items():
        bound = right.bounds[gradient]
        error = measure_error(found, right.expected[gradient])
        assert error.within(bound), f"{gradient}: {error.excess(bound)}"
        assert not measure_error(2 * found, right.expected[gradient]).within(bound)


MISTAKES = {
    "delta is left out": lambda x: {**x, "o": torch.zeros_like(x["o"])},
    "the LSE is that of another row": lambda x: {**x, "lse": x["lse"].roll(1, dims=2)},
    "the LSE is in base 2": lambda x: {**x, "lse": x["lse"] / math.log(2)},
    "O is that of another head": lambda x: {**x, "o": x["o"].roll(1, dims=2)},
    "dO is that of the row before": lambda x: {**x, "do": x["do"].roll(1, dims=1)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_gradients_are_over_the_bounds(mistake):
    inputs = draw("normal", SMALL)
    right = reference(SMALL, inputs)
    found = as_a_kernel(SMALL, MISTAKES[mistake](inputs))
    errors = {name: measure_error(found[name], right.expected[name]) for name in ("dq", "dk")}
    assert not any(error.within(right.bounds[name]) for name, error in errors.items())


def test_pieces_of_the_scores_give_the_same():
    inputs = draw("normal", PROBLEMS["grouped heads"])
    given = [inputs[name] for name in ("do", "q", "k", "v")]
    for whole, pieces in zip(
        gradients_float64(*given), gradients_float64(*given, max_scores=120), strict=True
    ):
        torch.testing.assert_close(whole, pieces)


def test_keys_that_no_query_sees_have_gradients_of_0():
    problem = AttentionBackward(1, 1, 8, 32, len_k=40, window_left=2, causal=True)
    expected = reference(problem, draw("normal", problem)).expected
    assert not expected["dk"][:, :30].any()
    assert not expected["dv"][:, :30].any()
    assert expected["dk"][:, 30:].abs().amin(-1).all()


def test_a_bound_without_a_number_is_refused():
    inputs = draw("normal", SMALL.in_dtype(Element.FP16))
    inputs["do"] = inputs["do"] * 3e4
    with pytest.raises(ValueError, match=r"non-finite d[qkv] on these inputs"):
        reference(SMALL.in_dtype(Element.FP16), inputs)


def test_inputs_have_the_names_and_shapes_of_the_problem():
    problem = PROBLEMS["sequences"]
    inputs = draw("countable", problem)
    assert [*inputs] == [x.name for x in problem.inputs]
    assert all(tuple(inputs[x.name].shape) == x.shape for x in problem.inputs)
    assert {*GRADIENTS} == {x.name for x in problem.outputs}
