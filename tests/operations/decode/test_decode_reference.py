"""The reference of decode beside PyTorch's own attention, and bounds that tell right from wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flash_helpers.check.errors import measure_error
from flash_helpers.operations.decode.inputs import draw, draw_lengths
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import reference


def keys_of(problem: Decode, given: dict[str, torch.Tensor], sequence: int) -> list[torch.Tensor]:
    """The rows of K and V of a sequence, found one key at a time."""
    found = []
    for name in "kv":
        rows = []
        for key in range(draw_lengths(problem)[sequence]):
            if problem.page_size:
                page = given["block_table"][sequence, key // problem.page_size]
                rows.append(given[name][page, key % problem.page_size])
            else:
                row = given["cache_batch_idx"][sequence] if problem.caches else sequence
                rows.append(given[name][row, key])
        found.append(torch.stack(rows).double().transpose(0, 1))
    return found


def by_pytorch(
    problem: Decode, given: dict[str, torch.Tensor], sequence: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, (len_q, heads, d_head), and the LSE, (heads, len_q), of a sequence that has keys."""
    group = problem.heads // problem.kv_heads
    k, v = (x.repeat_interleave(group, 0) for x in keys_of(problem, given, sequence))
    q = given["q"][sequence].double().transpose(0, 1)
    length = k.shape[1]
    logits = q @ k.mT * problem.softmax_scale
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    left = math.inf if problem.window_left is None else problem.window_left
    right = math.inf if problem.window_right is None else problem.window_right
    right = 0 if problem.causal else right
    hidden = torch.tensor(
        [
            [not -left <= key - (query + length - problem.len_q) <= right for key in range(length)]
            for query in range(problem.len_q)
        ]
    )
    mask = torch.zeros(problem.heads, *hidden.shape, dtype=torch.float64)
    mask.masked_fill_(hidden, -math.inf)
    if problem.softcap:  # all of a logit is in the mask, since PyTorch limits none
        mask, q = mask + logits, torch.zeros_like(q)
    every = logits.masked_fill(hidden, -math.inf)
    if problem.sinks:  # a key of zeros, whose value is 0
        sinks = given["sinks"].double()[:, None, None].expand(-1, problem.len_q, 1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask, every = (torch.cat((x, sinks), -1) for x in (mask, every))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=problem.softmax_scale
    )
    unseen = every.isneginf().all(-1, keepdim=True)
    return o.masked_fill(unseen, 0.0).transpose(0, 1), torch.logsumexp(every, -1)


CASES = [
    {},
    {"len_q": 4},
    {"len_q": 4, "causal": True},
    {"len_q": 4, "window_left": 3},
    {"len_q": 4, "window_left": 2, "window_right": 1},
    {"softcap": 1.5, "softmax_scale": 0.7},
    {"sinks": True},
    {"len_q": 7, "causal": True, "total_k": 25, "sinks": True},
    {"len_q": 7, "causal": True, "total_k": 25},
    {"total_k": 0},
    {"page_size": 1, "total_k": 25},
    {"page_size": 5, "pages": 11, "total_k": 40, "len_q": 2, "causal": True},
    {"caches": 2, "total_k": 45},
    {"caches": 6},
    {
        **{"len_q": 3, "causal": True, "window_left": 6, "softcap": 2.0, "sinks": True},
        **{"softmax_scale": 0.3, "page_size": 5, "total_k": 33},
    },
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_output_and_lse_are_those_of_pytorch_with_an_explicit_mask(options) -> None:
    problem = Decode(4, 6, d_head=16, len_k=20, kv_heads=2, return_lse=True, **options)
    given = draw("normal", problem)
    right = reference(problem, given)
    o, lse = right.expected["o"], right.expected["lse"]
    assert (o.shape, lse.shape) == ((4, problem.len_q, 6, 16), (4, 6, problem.len_q))
    assert o.dtype == lse.dtype == torch.float64
    for sequence, length in enumerate(draw_lengths(problem)):
        own_o, own_lse = torch.zeros_like(o[sequence]), torch.full_like(lse[sequence], -math.inf)
        if length:
            own_o, own_lse = by_pytorch(problem, given, sequence)
        elif problem.sinks:
            own_lse = given["sinks"].double()[:, None].expand_as(own_lse)
        torch.testing.assert_close(o[sequence], own_o, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse[sequence], own_lse, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("page", [2**31 - 1, -1, 0])
def test_pages_that_a_window_hides_change_nothing(page) -> None:
    options = {"total_k": 16, "page_size": 5, "window_left": 0, "return_lse": True}
    problem = Decode(1, 2, d_head=16, len_k=20, **options)
    given = draw("normal", problem)
    k, v = (given[name][given["block_table"][0, 3:4].long()][:, :1] for name in "kv")
    right = reference(Decode(1, 2, d_head=16, return_lse=True), {**given, "k": k, "v": v})
    given["block_table"][0, :3] = page
    for name, found in reference(problem, given).expected.items():
        torch.testing.assert_close(found, right.expected[name], rtol=1e-12, atol=1e-12)


# the first sequence has no key, the second all, the third one at least
UNEQUAL = Decode(3, 4, d_head=64, len_k=1000, kv_heads=2, total_k=1001, return_lse=True)


def test_a_block_that_is_missing_from_a_long_sequence_shows_beside_a_short_one() -> None:
    given = draw("normal", UNEQUAL)
    assert given["cache_seqlens"].tolist() == [0, 1000, 1]
    shorter = {**given, "cache_seqlens": torch.tensor([0, 984, 1], dtype=torch.int32)}
    wrong = reference(replace(UNEQUAL, total_k=985), shorter).expected
    right = reference(UNEQUAL, given)
    for name, bound in right.bounds.items():
        assert not measure_error(wrong[name], right.expected[name]).within(bound)


def test_rounding_is_within_the_bounds_and_nan_is_not() -> None:
    given = draw("normal", UNEQUAL)
    right = reference(UNEQUAL, given)
    rounded = {"o": right.expected["o"].bfloat16(), "lse": right.expected["lse"].float()}
    for name, bound in right.bounds.items():
        assert measure_error(rounded[name], right.expected[name]).within(bound)
        rounded[name][0] = torch.nan  # of the sequence without keys
        assert not measure_error(rounded[name], right.expected[name]).within(bound)


def test_sinks_alone_may_be_rounded_to_float32() -> None:
    problem = Decode(2, 3, d_head=64, len_k=5, total_k=0, sinks=True, return_lse=True)
    given = {**draw("normal", problem), "sinks": torch.tensor([7.3, -0.7, 90.0]).bfloat16()}
    right = reference(problem, given)
    natural = torch.tensor(math.log(2), dtype=torch.float32)
    lse = given["sinks"].float() * (1 / natural) * natural
    found = lse[:, None].expand(2, 3, 1)
    assert not found.double().equal(right.expected["lse"])
    error = measure_error(found, right.expected["lse"])
    assert error.within(right.bounds["lse"])
    assert not measure_error(found + 1e-3, right.expected["lse"]).within(right.bounds["lse"])
