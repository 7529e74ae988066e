"""Which keys a rank's queries see in another rank's shard, by the pieces of the mask and by the
positions that the ranks hold; and the sums of what is computed on them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch

from flash_attention.distributed import _ring
from flash_attention.distributed._pieces import Piece, band, pieces_of
from flash_attention.distributed._placement import (
    PLACEMENTS,
    held_by,
    order_of,
    parts_of,
    rows_held,
    shard_length,
)
from flash_attention.distributed._sequences import Rows

WINDOWS = [*product((None, 0, 1, 3, 7, 40), (None, 0, 1, 2, 5, 40))]


def seen(piece: Piece) -> Counter[tuple[int, int]]:
    """Queries and keys of a piece, as the mask of a kernel, aligned to the bottom right, has
    them."""
    (a, b), (c, d) = piece.rows, piece.keys
    found: Counter[tuple[int, int]] = Counter()
    for row, key in product(range(b - a), range(d - c)):
        ahead = key - (row + (d - c) - (b - a))
        if (piece.left is None or -piece.left <= ahead) and (
            piece.right is None or ahead <= piece.right
        ):
            found[a + row, c + key] += 1
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_pieces_of_all_shards_are_the_mask_of_the_whole_sequence(placement, size) -> None:
    length = 3 * parts_of(placement, size)
    held = [held_by(rank, size, length, placement).tolist() for rank in range(size)]
    own = len(held[0])
    for (left, right), rank, source in product(WINDOWS, range(size), range(size)):
        pieces = pieces_of(placement, size, rank, source, (own, own), (left, right))
        for piece in pieces:
            assert piece.is_empty or min(piece.left or 0, piece.right or 0) >= 0
        expected = {
            (i, j): 1
            for (i, query), (j, key) in product(enumerate(held[rank]), enumerate(held[source]))
            if (left is None or query - left <= key) and (right is None or key <= query + right)
        }
        found = sum((seen(piece) for piece in pieces if not piece.is_empty), Counter())
        assert found == expected, (left, right, rank, source)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_causal_zigzag_has_one_call_a_step_of_equal_work(size) -> None:
    work = set()
    for rank in range(size):
        for step in range(1, size):
            (piece,) = pieces_of("zigzag", size, rank, (rank - step) % size, (8, 8), (None, 0))
            assert (piece.left, piece.right) == (None, None)  # all or nothing: no mask
            work.add(sum(seen(piece).values()))
    assert work == {32}


def test_a_later_stripe_is_causal_without_the_first_row_and_the_last_key() -> None:
    pieces = pieces_of("striped", 4, 1, 2, (5, 5), (None, 0))
    assert pieces == [Piece((1, 5), (0, 4), None, 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sequences_of_all_lengths_have_one_mask(size) -> None:
    causal = [(placement, (None, 0)) for placement in PLACEMENTS]
    for placement, window in [*causal, *(("striped", window) for window in WINDOWS)]:
        for rank, source in product(range(size), range(size)):
            of_lengths = [
                pieces_of(placement, size, rank, source, (length, length), window)
                for length in (0, 2, 4, 10, 200)
            ]
            for pieces in zip(*of_lengths, strict=True):
                masks = {(p.left, p.right) for p in pieces if not p.is_empty}
                assert len(masks) <= 1, (placement, window, rank, source)


def test_shards_behind_the_mask_are_empty() -> None:
    (piece,) = pieces_of("contiguous", 3, 0, 2, (4, 4), (None, 0))
    assert piece.is_empty
    assert band(4, 4, 2, 1).is_empty  # no key is at least 2 ahead and at most 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shards_hold_each_row_once(placement) -> None:
    begins = (0, 12, 12, 36)
    held = torch.cat([rows_held(rank, 3, begins, placement) for rank in range(3)])
    assert held.sort().values.tolist() == [*range(36)]
    places = order_of(3, begins, placement)
    assert held[places].tolist() == [*range(36)]


def test_positions_of_each_placement() -> None:
    assert held_by(1, 2, 8, "contiguous").tolist() == [4, 5, 6, 7]
    assert held_by(1, 2, 8, "striped").tolist() == [1, 3, 5, 7]
    assert held_by(1, 2, 8, "zigzag").tolist() == [2, 3, 4, 5]
    assert held_by(0, 2, 8, "zigzag").tolist() == [0, 1, 6, 7]


def test_a_length_that_does_not_divide_says_how_much_to_pad() -> None:
    with pytest.raises(ValueError, match=r"has length 10, .* of 4: pad it with 2 more, to 12"):
        shard_length(10, 2, "zigzag")
    with pytest.raises(ValueError, match=r"sequence 1 has length 3, .* multiple of 2"):
        rows_held(0, 2, (0, 4, 7), "striped")


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_parts_are_merged_in_groups_as_all_at_once(held: int, count: int, monkeypatch) -> None:
    monkeypatch.setattr(_ring, "MOST_PARTS", held)
    generator = torch.Generator().manual_seed(count)
    q = torch.empty(2, 6, 3, 8, dtype=torch.bfloat16)
    parts = _ring._Parts(q, q, 1, count)
    o = torch.randn(count, 2, 6, 3, 8, generator=generator).bfloat16()
    lse = 3 * torch.randn(count, 2, 3, 6, generator=generator)
    lse[0, :, :, :2] = lse[:, :, :, -1] = -math.inf  # rows of one part, and of none
    for n in range(count):
        for into, values in zip(parts.next(), (o[n], lse[n]), strict=True):
            into.copy_(values)
    found, of_all = parts.merged()
    wanted = lse.double().logsumexp(0)
    weights = (lse.double() - wanted).exp().nan_to_num(0.0)
    expected = (weights.transpose(-1, -2)[..., None] * o.double()).sum(0)
    torch.testing.assert_close(of_all.double(), wanted, rtol=1e-6, atol=1e-6)
    # each element is rounded by its group, and in the end
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=2.0**-9)
    assert found.dtype == q.dtype and found.is_contiguous() and of_all.is_contiguous()


def test_two_parts_in_16_bits_have_the_sum_of_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 64, 2, 8, generator=generator).bfloat16() for _ in range(2))
    rows, half = Rows(64, 0, 64), Rows(64, 0, 32)
    wanted = one.float()
    wanted[:, :32] += other[:, :32].float()
    for dtype in (None, torch.float32):
        found = _ring._Sum(one, 1, dtype)
        found.add(rows, one.clone())
        found.add(half, other[:, :32])
        assert found.value.dtype == (dtype or torch.bfloat16) == found.like.dtype
        assert torch.equal(found.rounded(), wanted.bfloat16())
