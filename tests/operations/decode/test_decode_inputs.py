"""The inputs of decode: lengths, and caches in which a kernel that reads too much shows."""

from __future__ import annotations

import re

import pytest
import torch

from flash_helpers.operations.decode.inputs import draw, draw_lengths
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import caches_of

ROOM = 24


def caches(batch: int, **options: int | None) -> Decode:
    return Decode(batch, 2, d_head=8, **{"len_k": ROOM, **options})


@pytest.mark.parametrize("total", [0, 1, ROOM - 1, ROOM, ROOM + 1, -1, -2, -ROOM, None])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 37])
def test_lengths_have_their_sum_and_their_room(batch: int, total: int | None) -> None:
    most = batch * ROOM
    asked = total if total is None else min(total, most) if total >= 0 else most + total
    for seed in range(20):
        lengths = draw_lengths(caches(batch, total_k=asked), seed)
        assert len(lengths) == batch and all(0 <= n <= ROOM for n in lengths)
        assert sum(lengths) == (most if asked is None else asked)


def test_of_three_sequences_one_has_no_key_and_one_all_that_it_may_have() -> None:
    for total, first_two in ((40, [0, ROOM]), (5, [0, 5]), (3 * ROOM - 1, [ROOM - 1, ROOM])):
        assert draw_lengths(caches(3, total_k=total))[:2] == first_two


def test_lengths_differ_as_those_of_texts_do() -> None:
    lengths = sorted(draw_lengths(Decode(400, 2, len_k=100_000, total_k=1_000_000))[2:])
    mean, median = sum(lengths) / 398, lengths[199]
    assert 1.2 < mean / median < 1.6  # e^(0.8^2 / 2) of a lognormal distribution is 1.38
    assert lengths[-1] > 5 * mean


CACHES = [
    caches(4, total_k=50),
    caches(4, total_k=50, page_size=1, pages=70),
    caches(4, total_k=50, page_size=8, pages=15),
    caches(2, page_size=ROOM),
    caches(3, total_k=0, page_size=8),
    caches(3, total_k=50, caches=7),
    caches(5, total_k=70, caches=2),
    caches(2, total_k=9),
]


@pytest.mark.parametrize("problem", CACHES, ids=str)
def test_a_cache_has_values_where_a_sequence_has_keys_and_nan_elsewhere(problem: Decode) -> None:
    given = draw("normal", problem, seed=3)
    shapes = {x.name: x.shape for x in problem.inputs}
    assert {name: tuple(x.shape) for name, x in given.items()} == shapes
    places = [x for name, x in given.items() if name not in "qkv"]
    assert all(x.dtype is torch.int32 and x.is_contiguous() for x in places)
    lengths = draw_lengths(problem, seed=3)
    if problem.total_k is not None:
        assert given["cache_seqlens"].tolist() == lengths
    visible = dict.fromkeys("kv", 0)
    for length, (k, v) in zip(lengths, caches_of(problem, given), strict=True):
        assert k.shape == v.shape == (1, length, 1, 8)
        assert not k.isnan().any() and not v.isnan().any()
    numbers = problem.caches and given["cache_batch_idx"].tolist()
    if problem.caches:  # sequences that share a row have their keys in one place
        assert all(0 <= n < problem.caches for n in numbers)
        lengths = [
            max((own for n, own in zip(numbers, lengths, strict=True) if n == row), default=0)
            for row in range(problem.caches)
        ]
    for name in visible:
        found = given[name].isfinite().flatten(2).all(-1)
        assert found.sum() == sum(lengths)
        assert given[name].isnan().flatten(2).all(-1).sum() == found.numel() - sum(lengths)


@pytest.mark.parametrize("problem", [p for p in CACHES if p.page_size], ids=str)
def test_a_table_has_each_page_once_and_nothing_where_no_key_needs_one(problem: Decode) -> None:
    table = draw("normal", problem)["block_table"]
    needed = [-(-n // problem.page_size) for n in draw_lengths(problem)]
    for row, pages in zip(table.tolist(), needed, strict=True):
        assert all(0 <= n < problem.pages for n in row[:pages])
        assert row[pages:] == [-1] * (problem.blocks - pages)
    used = [n for n in table.flatten().tolist() if n >= 0]
    assert len({*used}) == len(used)
    assert used != sorted(used) or len(used) < 3


def test_pages_hold_what_the_same_sequences_have_without_pages() -> None:
    plain, paged = caches(4, total_k=50), caches(4, total_k=50, page_size=4)
    for whole, gathered in zip(
        caches_of(plain, draw("normal", plain)),
        caches_of(paged, draw("normal", paged)),
        strict=True,
    ):
        assert all(a.equal(b) for a, b in zip(whole, gathered, strict=True))


def test_too_few_pages_are_refused() -> None:
    text = "pages 6: the sequences have 7 of 8 keys: pass pages=7 or more"
    with pytest.raises(ValueError, match=re.escape(text)):
        draw("normal", caches(4, total_k=50, page_size=8, pages=6))


@pytest.mark.parametrize("problem", CACHES, ids=str)
def test_a_seed_is_one_draw(problem: Decode) -> None:
    once, again, other = (draw("normal", problem, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(x.nan_to_num(), again[name].nan_to_num()) for name, x in once.items())
    assert not other["q"].equal(once["q"])
