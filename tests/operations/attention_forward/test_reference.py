"""Attention in float64, and the bounds that decide whether a kernel's output and LSE are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_backend import float32_kernel

from flash_helpers.check.errors import OutputError, measure_error, relative_bound
from flash_helpers.kernel_configs import AttentionForward, Element, get_kernel_progression_configs
from flash_helpers.operations.attention_forward.inputs import draw as draw_problem
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_forward.reference import (
    _attention,
    attention_float64,
    attention_reference,
    attention_same_dtype,
    lse_bound,
    reference,
)

CONFIG = get_kernel_progression_configs()[0]
DTYPES = (torch.float16, torch.bfloat16)
SHAPE = AttentionForward(batch=2, heads=3, len_q=128)


def element_of_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: tuple[int, int, int, int]
) -> float:
    """One element of the output by the formula, in Python's own floats."""
    b, row, h, column = place
    query = q[b, row, h].tolist()
    keys = k[b, :, h].tolist()
    values = v[b, :, h, column].tolist()
    logits = [math.fsum(map(float.__mul__, query, key)) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return math.fsum(map(float.__mul__, weights, values)) / math.fsum(weights)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_float64_attention_is_the_formula(distribution: str) -> None:
    q, k, v = make_inputs(distribution, SHAPE, torch.float16)
    result = attention_float64(q, k, v)
    assert result.dtype == torch.float64
    assert result.shape == SHAPE.shape
    for place in ((0, 0, 0, 0), (1, 127, 2, 127), (1, 17, 0, 93)):
        assert result[place].item() == pytest.approx(element_of_attention(q, k, v, place), rel=1e-9)


@pytest.mark.parametrize("max_scores", [1, 128, 1000, 128 * 128, 3 * 128 * 128 + 5])
def test_float64_attention_does_not_depend_on_the_chunk_size(max_scores: int) -> None:
    q, k, v = make_inputs("normal", SHAPE, torch.float16)
    torch.testing.assert_close(
        attention_float64(q, k, v, max_scores), attention_float64(q, k, v), rtol=1e-12, atol=1e-14
    )


def test_float64_attention_takes_strided_views() -> None:
    packed = torch.randn(2, 64, 3, 3, 128, dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    torch.testing.assert_close(
        attention_float64(q, k, v),
        attention_float64(q.contiguous(), k.contiguous(), v.contiguous()),
        rtol=1e-12,
        atol=1e-14,
    )


def draw(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype=torch.float64) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator).add_(0.5).to(dtype)
        for shape in (q_shape, kv_shape, kv_shape)
    )


def attention_by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    left: float = math.inf,
    right: float = math.inf,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE, one query and one key at a time."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    batch, len_q, heads, _ = q.shape
    _, len_k, kv_heads, d_v = v.shape
    output, lse = np.zeros((*q.shape[:3], d_v)), np.full((batch, heads, len_q), -np.inf)
    for b, h, i in np.ndindex(batch, heads, len_q):
        shared = h // (heads // kv_heads)
        total = 0.0 if sinks is None else math.exp(sinks[h])
        for j in range(len_k):
            if not -left <= j - (i + len_k - len_q) <= right:
                continue
            logit = scale * np.dot(q[b, i, h], k[b, j, shared])
            weight = np.exp(softcap * np.tanh(logit / softcap) if softcap else logit)
            total += weight
            output[b, i, h] += weight * v[b, j, shared]
        if total:
            output[b, i, h] /= total
            lse[b, h, i] = np.log(total)
    return output, lse


@pytest.mark.parametrize("scale", [None, 0.7, -0.2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("len_q", "len_k"), [(7, 7), (5, 9), (9, 5), (1, 6)])
def test_output_and_lse_are_those_of_a_plain_loop(
    len_q: int, len_k: int, kv_heads: int, causal: bool, scale: float | None
) -> None:
    q, k, v = draw((2, len_q, 6, 16), (2, len_k, kv_heads, 16))
    found = attention_reference(q, k, v, causal=causal, softmax_scale=scale)
    output, lse = attention_by_loops(
        q, k, v, right=0 if causal else math.inf, scale=0.25 if scale is None else scale
    )
    np.testing.assert_allclose(found.expected["o"], output, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.expected["lse"], lse, rtol=1e-12, atol=1e-14)
    assert found.expected["lse"].dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 2},
        {"window_right": 1},
        {"window_left": 0, "window_right": 3},
        {"window_left": 1, "window_right": 0},
        {"softcap": 0.5},
        {"sinks": True},
        {"window_left": 2, "window_right": 1, "softcap": 1.5, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("len_q", "len_k"), [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("max_scores", [13, 2**20])
def test_options_are_those_of_a_plain_loop(max_scores, len_q, len_k, options) -> None:
    problem = AttentionForward(
        2, 4, len_q, 16, Element.FP16, len_k=len_k, kv_heads=2, d_v=8, **options
    )
    inputs = draw_problem("normal", problem)
    assert tuple(inputs) == ("q", "k", "v", *(["sinks"] if problem.sinks else []))
    found = reference(problem, inputs)
    q, k, v = (inputs[name] for name in "qkv")
    bounds = {"left": problem.window_left, "right": 0 if problem.causal else problem.window_right}
    output, lse = attention_by_loops(
        *(q, k, v),
        scale=0.25,
        softcap=problem.softcap,
        sinks=inputs.get("sinks"),
        **{name: math.inf if bound is None else bound for name, bound in bounds.items()},
    )
    np.testing.assert_allclose(found.expected["o"], output, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.expected["lse"], lse, rtol=1e-12, atol=1e-14)
    chunks = attention_float64(
        q,
        k,
        v,
        max_scores,
        causal=problem.causal,
        sinks=inputs.get("sinks"),
        **problem.call_options(),
    )
    np.testing.assert_allclose(chunks, output, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [Element.FP16, Element.BF16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_right_kernel_with_options_is_within_its_bounds_and_a_wrong_one_is_not(
    distribution: str, dtype: Element
) -> None:
    options = {"window_left": 20, "window_right": 9, "softcap": 30.0, "sinks": True}
    problem = AttentionForward(1, 2, 64, 32, dtype, **options)
    inputs = draw_problem(distribution, problem)
    right = reference(problem, inputs)

    def error(**changes) -> tuple[bool, bool]:
        """Whether the output and the LSE in float32 are within the bounds; changes: of options."""
        q, k, v = (inputs[name].float() for name in "qkv")
        asked = {**problem.call_options(), "sinks": inputs["sinks"], **changes}
        o, lse = _attention(q, k, v, torch.float32, 2**20, **asked)
        found = {"o": o.to(inputs["q"].dtype), "lse": lse}
        return tuple(
            measure_error(x, right.expected[name]).within(right.bounds[name])
            for name, x in found.items()
        )

    assert error() == (True, True)
    if distribution != "constant_rows":  # where hidden keys are like the others
        assert error(window_left=21) != (True, True)
        assert error(window_right=8) != (True, True)
    assert error(sinks=inputs["sinks"] * 2) != (True, True)
    assert error(sinks=None) != (True, True)


@pytest.mark.parametrize("function", [attention_float64, attention_same_dtype])
def test_the_last_query_sees_all_keys_and_one_that_sees_none_gives_zero(function) -> None:
    v = torch.tensor([1.0, 4.0, 1.0]).view(1, 3, 1, 1)
    q = torch.zeros(1, 2, 1, 1)  # every key that is seen has the same weight
    assert function(q, v, v, causal=True).flatten().tolist() == pytest.approx([2.5, 2.0])
    q, v = torch.zeros(1, 4, 1, 1), v[:, :2]
    assert function(q, v, v, causal=True).flatten().tolist() == pytest.approx([0.0, 0.0, 1.0, 2.5])


@pytest.mark.parametrize("max_scores", [1, 20, 3 * 5 * 6, 2**10])
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 9), (9, 5)])
def test_no_result_depends_on_the_chunk_size(len_q: int, len_k: int, max_scores: int) -> None:
    q, k, v = draw((2, len_q, 6, 16), (2, len_k, 2, 16))
    found = attention_reference(q, k, v, max_scores, causal=True)
    whole = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(found.expected["o"], whole.expected["o"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.expected["lse"], whole.expected["lse"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 3, 8), (2, 4, 3, 8), (2, 5, 3, 8)),
        ((2, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)),
        ((2, 4, 3, 8), (2, 4, 3, 4), (2, 4, 3, 4)),
        ((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)),
        ((2, 4, 2, 8), (2, 4, 4, 8), (2, 4, 4, 8)),
        ((2, 4, 3, 8), (2, 0, 3, 8), (2, 0, 3, 8)),
        ((4, 3, 8), (4, 3, 8), (4, 3, 8)),
    ],
    ids=["v", "batch", "d_head", "heads", "kv_heads over heads", "no key", "three dimensions"],
)
def test_shapes_that_do_not_fit_together_are_refused(q, k, v) -> None:
    with pytest.raises(ValueError, match="a multiple of kv_heads"):
        attention_float64(*map(torch.zeros, (q, k, v)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_attention_rounds_to_its_dtype_and_float64_does_not(dtype: torch.dtype) -> None:
    q, k, v = make_inputs("normal", SHAPE, dtype)
    plain = attention_same_dtype(q, k, v)
    assert plain.dtype == dtype
    error = measure_error(plain, attention_float64(q, k, v))
    assert relative_bound(dtype) / 8 < error.relative < 8 * relative_bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [0.0, 17.0, 20.0])
def test_one_rounding_is_within_the_bound_even_of_subnormal_results_and_a_wrong_weight_is_not(
    sink: float, dtype: torch.dtype
) -> None:
    q, k, v = make_inputs("normal", SHAPE, dtype)
    reference = attention_reference(q, k, v, sinks=torch.full((SHAPE.heads,), sink))
    right, bound = reference.expected["o"], reference.bounds["o"]
    assert measure_error(right.to(dtype), right).within(bound)
    assert not measure_error((1.05 * right).to(dtype), right).within(bound)


def test_results_too_small_for_the_dtype_may_be_zeros() -> None:
    q, k, v = make_inputs("normal", SHAPE, torch.float16)
    reference = attention_reference(q, k, v, sinks=torch.full((SHAPE.heads,), 40.0))
    right = reference.expected["o"]
    assert measure_error(right.half(), right).relative == 1
    assert measure_error(right.half(), right).within(reference.bounds["o"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes(value: float) -> None:
    q, k, v = make_inputs("normal", SHAPE, torch.float16)
    reference = attention_reference(q, k, v)
    output = reference.expected["o"].half()
    assert measure_error(output, reference.expected["o"]).within(reference.bounds["o"])
    output[1, 5, 2, 7] = value
    error = measure_error(output, reference.expected["o"])
    assert not error.within(reference.bounds["o"])
    assert not error.within(OutputError(math.inf, math.inf))


def test_inputs_that_overflow_plain_pytorch_set_no_bound() -> None:
    q = torch.full((1, 64, 1, 128), 100.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="non-finite"):
        attention_reference(q, q, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seq_len", [64, 512])
def test_a_right_kernel_passes_with_room_to_spare(
    distribution: str, dtype: torch.dtype, seq_len: int
) -> None:
    shape = AttentionForward(1, 2, seq_len)
    q, k, v = make_inputs(distribution, shape, dtype)
    reference = attention_reference(q, k, v)
    error = measure_error(
        float32_kernel(CONFIG, q, k, v, torch.empty_like(q)), reference.expected["o"]
    )
    assert error.max_abs < 0.7 * reference.bounds["o"].max_abs
    assert error.relative < 0.7 * reference.bounds["o"].relative


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_leave_a_finite_bound(dtype: torch.dtype) -> None:
    q, k, v = draw((1, 96, 4, 64), (1, 64, 2, 64), dtype)
    reference = attention_reference(q, k, v, causal=True)
    output = reference.expected["o"].to(dtype)
    assert measure_error(output, reference.expected["o"]).within(reference.bounds["o"])
    output[0, 0, 0, 0] = math.nan  # what a softmax of nothing gives
    assert not measure_error(output, reference.expected["o"]).within(reference.bounds["o"])


def _truncated(x: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """x cut to a multiple of the last of 24 bits of `largest`."""
    last = np.ldexp(1.0, np.frexp(largest)[1] - 24)
    return np.trunc(x / last) * last


def pessimistic_lse(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The LSE of one head by a float32 kernel that errs in one direction wherever it may.

    Sums of products are cut as the narrowest tensor cores cut them, four products at a time; m is
    updated after every block of eight keys, whose probabilities are added one by one; ex2 and lg2
    are as far below the right result as the PTX ISA allows.
    """
    f32 = np.float32
    Q, K = q[0, :, 0].double().numpy(), k[0, :, 0].double().numpy()
    S = np.zeros((len(Q), len(K)))
    for d in range(0, Q.shape[1], 4):
        terms = np.concatenate([S[..., None], Q[:, None, d : d + 4] * K[:, d : d + 4]], -1)
        S = _truncated(terms, np.abs(terms).max(-1, keepdims=True)).sum(-1)
        S = _truncated(S, S).astype(f32).astype(np.float64)
    S = S.astype(f32)
    factor = f32(f32(scale) * f32(math.log2(math.e)))
    m, l = np.full(len(Q), -np.inf, f32), np.zeros(len(Q), f32)  # noqa: E741

    def exp2(x: np.ndarray) -> np.ndarray:
        return np.where(x == 0, 1, np.exp2(x) * (1 - 2.5 * 2.0**-23)).astype(f32)

    for block in np.split(S, S.shape[1] // 8, axis=1):
        new_m = np.maximum(m, block.max(1))
        l = l * exp2(m * factor - new_m * factor)  # noqa: E741
        m = new_m
        for column in block.T:
            l = l + exp2(column * factor - m * factor)  # noqa: E741
    log2 = np.log2(l.astype(np.float64))
    log2 = (log2 - 2.0**-22 * np.maximum(np.abs(log2), 1)).astype(f32)
    return torch.from_numpy(m * f32(scale) + log2 * f32(math.log(2)))[None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seq_len", [64, 256])
def test_the_lse_of_a_right_kernel_is_within_its_bound(
    distribution: str, dtype: torch.dtype, seq_len: int
) -> None:
    q, k, v = make_inputs(distribution, AttentionForward(1, 1, seq_len), dtype)
    reference = attention_reference(q, k, v)
    lse = pessimistic_lse(q, k, 1 / math.sqrt(128))
    assert measure_error(lse, reference.expected["lse"]).within(reference.bounds["lse"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_lse_is_out_of_bounds(dtype: torch.dtype) -> None:
    q, k, v = make_inputs("normal", AttentionForward(1, 1, 512), dtype)
    right = attention_reference(q, k, v)
    right_lse = right.expected["lse"]
    largest = right_lse == right_lse.max()
    wrong = {
        "base 2": right_lse / math.log(2),
        "no scale": attention_reference(q, k, v, softmax_scale=1.0).expected["lse"],
        "one key of 512 left out": attention_reference(q, k[:, 1:], v[:, 1:]).expected["lse"],
        "neighbouring rows": right_lse.roll(1, dims=-1),
        "not a number": right_lse.masked_fill(largest, math.nan),
        "a row that sees no key": right_lse.masked_fill(largest, -math.inf),
    }
    for name, lse in wrong.items():
        assert not measure_error(lse, right_lse).within(right.bounds["lse"]), name


def test_the_lse_bound_grows_with_the_scores_and_the_keys() -> None:
    q, k, _ = make_inputs("normal", SHAPE, torch.float16)
    bound = lse_bound(q, k)
    assert lse_bound(q, k, -1 / math.sqrt(128)) == bound
    assert 1.9 * bound < lse_bound(2 * q, k) < 2 * bound
    assert bound < lse_bound(q, k.repeat(1, 2, 1, 1)) < 2 * bound


def _skip_last_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])
    P = torch.softmax(scores[..., :-1], -1)
    return (P @ v.double()[:, :-1].transpose(1, 2)).transpose(1, 2).to(q.dtype)


def _forget_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention_float64(q * 2, k, v).to(q.dtype)


def _swap_two_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o = attention_float64(q, k, v).to(q.dtype)
    o[:, [3, 4]] = o[:, [4, 3]]
    return o


def _swap_two_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    swapped = v.clone()
    swapped[:, [0, 1]] = v[:, [1, 0]]
    return attention_float64(q, k, swapped).to(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrong_kernel", [_skip_last_key, _forget_scale, _swap_two_rows, _swap_two_values]
)
def test_a_wrong_kernel_fails(wrong_kernel, dtype: torch.dtype) -> None:
    q, k, v = make_inputs("normal", AttentionForward(1, 1, 256), dtype)
    reference = attention_reference(q, k, v)
    assert not measure_error(wrong_kernel(q, k, v), reference.expected["o"]).within(
        reference.bounds["o"]
    )


def test_a_window_is_the_mask_of_pytorch() -> None:
    problem = AttentionForward(1, 2, 6, len_k=9, window_left=3, window_right=2)
    q, k, v = (draw_problem("normal", problem)[name].double() for name in "qkv")
    seen = torch.zeros(6, 9, dtype=torch.bool)
    for query in range(6):
        seen[query, [*problem.visible_keys(query)]] = True
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen)
    found = attention_reference(q, k, v, **problem.call_options()).expected["o"]
    torch.testing.assert_close(found, o.transpose(1, 2))
