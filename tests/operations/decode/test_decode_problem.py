"""The problem of decode: its tensors, what shapes pose it, what is refused, and what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from flash_helpers.operations.decode.problem import Decode
from flash_helpers.registry.problem import Element, Role

OF_Q, OF_K = (3, 2, 6, 64), (3, 40, 2, 64)
SHAPES = {"q": OF_Q, "k": OF_K, "v": OF_K}
OPTIONAL = {
    "o": OF_Q,
    "lse": (3, 6, 2),
    "sinks": (6,),
    "cache_seqlens": (3,),
    "block_table": (3, 5),
    "cache_batch_idx": (3,),
}
OPTIONS = {"causal": True, "window_left": 7, "softcap": 2.0, "softmax_scale": 0.5}
OPTIONS |= {"keys_per_piece": 64}


def combinations() -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of every combination of tensors that a call may pass."""
    for given in product((False, True), repeat=len(OPTIONAL)):
        chosen = {
            name: OPTIONAL[name] for name, is_given in zip(OPTIONAL, given, strict=True) if is_given
        }
        if not {"block_table", "cache_batch_idx"} <= chosen.keys():
            yield SHAPES | chosen


def test_every_combination_of_tensors_poses_a_problem_that_has_these_tensors() -> None:
    found = [*combinations()]
    assert len(found) == 2**6 - 2**4
    for shapes in found:
        problem = Decode.posed(shapes, Element.FP16, **OPTIONS)
        own = {x.name: x.shape for x in problem.tensors if x.role is not Role.OPTIONAL}
        assert own == {"o": OF_Q, **shapes}
        assert [x.name for x in problem.tensors] == [*Decode.axes]
        assert all(len(x.shape) == len(x.axes) for x in problem.tensors)
        assert problem.call_options() == {**OPTIONS, "window_right": None, "pieces": 0}
        assert Decode.from_record(problem.record()) == problem


def test_fields_that_are_not_given_follow_from_the_others() -> None:
    paged = Decode(3, 6, len_k=200, page_size=40)
    assert (paged.pages, paged.blocks, paged.kv_heads, paged.len_q) == (15, 5, 1, 1)
    assert paged.kv_shape == paged.v_shape == (15, 40, 1, 128)
    assert Decode(3, 6, len_k=200, page_size=40, pages=7).kv_shape[0] == 7
    assert Decode(3, 6, len_k=200, caches=2).kv_shape == (2, 200, 1, 128)
    posed = Decode.posed(SHAPES | {"cache_seqlens": (3,)}, Element.BF16)
    assert (posed.total_k, posed.softmax_scale) == (120, 1 / 8)
    record = paged.record()
    del record["caches"], record["total_k"]  # as those of a program without them
    assert Decode.from_record(record) == paged


@pytest.mark.parametrize("options", [{"causal": True}, {"window_right": 0}, {"window_right": 5}])
def test_one_query_sees_all_keys_up_to_the_last(options) -> None:
    assert Decode(2, 4, len_k=30, **options) == Decode(2, 4, len_k=30)
    assert Decode(2, 4, len_q=7, len_k=30, **options) != Decode(2, 4, len_q=7, len_k=30)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"len_k": 0}, "len_k 0 is not positive: use 1 or more"),
        ({"kv_heads": 4}, "heads 6 is not a multiple of kv_heads 4"),
        ({"d_v": 64}, "d_v 64 is not d_head 128: pad the smaller one"),
        ({"total_k": 121}, "total_k 121 is not from 0 to 120, all keys of 3 sequences"),
        ({"total_k": -1}, "total_k -1 is not from 0 to 120"),
        ({"page_size": -16}, "page_size -16 is negative: use 0 for none"),
        ({"caches": -1}, "caches -1 is negative: use 0 for none"),
        ({"pages": 5}, "pages 5 without page_size: pass both"),
        ({"page_size": 16}, "len_k 40 is not a multiple of page_size 16: use 48"),
        ({"page_size": 8, "caches": 2}, "caches 2 with page_size 8: block_table says which"),
        ({"batch": 1, "sequences": 2}, "sequences 2: a cache has a row for each sequence: use tot"),
        ({"window_left": -2}, "window_left -2 is negative: use 0 or more, or None"),
        ({"pieces": -2}, "pieces -2 is negative: use 0 for the kernel's choice"),
        ({"keys_per_piece": -2}, "keys_per_piece -2 is negative: use 0 for the kernel's choice"),
        ({"pieces": 2, "keys_per_piece": 64}, "pieces 2 with keys_per_piece 64: pass one of them"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_refused(fields, text) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Decode(**{"batch": 3, "heads": 6, "len_k": 40, **fields})


PAGED = {"block_table": (3, 5)}


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"k": (2, 40, 2, 64), "v": (2, 40, 2, 64)}, "k has shape (2, 40, 2, 64) and q (3, 2, 6"),
        ({"v": (3, 41, 2, 64)}, "v has shape (3, 41, 2, 64) and k (3, 40, 2, 64): all sizes"),
        ({"v": (3, 40, 2, 32)}, "v has shape (3, 40, 2, 32) and k (3, 40, 2, 64): all sizes"),
        ({"k": (3, 40, 2, 32), **PAGED}, "k has shape (3, 40, 2, 32) and q (3, 2, 6, 64): d_head"),
        ({"k": (3, 40, 4, 64), "v": (3, 40, 4, 64)}, "k has heads 4, shape (3, 40, 4, 64), and q"),
        ({"lse": (3, 2, 6)}, "lse has shape (3, 2, 6) and q (3, 2, 6, 64)"),
        ({"sinks": (2,)}, "sinks has shape (2,) and q (3, 2, 6, 64): heads must be equal"),
        ({"cache_seqlens": (2,)}, "cache_seqlens has shape (2,) and q (3, 2, 6, 64): batch"),
        ({"block_table": (2, 5)}, "block_table has shape (2, 5) and q (3, 2, 6, 64): batch"),
        ({"cache_batch_idx": (4,)}, "cache_batch_idx has shape (4,) and q (3, 2, 6, 64): batch"),
        ({"cache_batch_idx": (3,), **PAGED}, "block_table and cache_batch_idx are both given: pas"),
        ({"k": (3, 0, 2, 64), "v": (3, 0, 2, 64), **PAGED}, "k has page_size 0, shape (3, 0, 2, "),
        ({"k": (0, 4, 2, 64), "v": (0, 4, 2, 64), **PAGED}, "k has pages 0, shape (0, 4, 2, 64)"),
        ({"block_table": (3, 0)}, "block_table has blocks 0, shape (3, 0), and a kernel needs at"),
        ({"q": (3, 0, 6, 64)}, "q has seq 0, shape (3, 0, 6, 64), and a kernel needs at least 1"),
        ({"q": (3, 2, 6, 0), "k": (3, 4, 2, 0), "v": (3, 4, 2, 0)}, "q has d_head 0, shape (3, 2"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(shapes, text) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Decode.posed({**SHAPES, **shapes}, Element.BF16)


EMPTY_K = dict.fromkeys("kv", (3, 0, 2, 64))
ALL_PLACES = {"cache_seqlens": (3,), "block_table": (3, 0)}


@pytest.mark.parametrize("lse", [{}, {"lse": (3, 6, 2)}], ids=["", "lse"])
@pytest.mark.parametrize(
    ("shapes", "unseen"),
    [
        (EMPTY_K, -math.inf),
        ({**EMPTY_K, "sinks": (6,)}, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (ALL_PLACES, -math.inf),
        ({"k": (0, 40, 2, 64), "v": (0, 40, 2, 64), "block_table": (3, 5)}, -math.inf),
        ({"k": (0, 40, 2, 64), "v": (0, 40, 2, 64), "cache_batch_idx": (3,)}, -math.inf),
    ],
    ids=str,
)
def test_a_cache_without_room_has_outputs_without_a_kernel(shapes, unseen, lse) -> None:
    found = Decode.constant({**SHAPES, **shapes, **lse}, Element.BF16, **OPTIONS)
    assert found is not None and found.values["o"] == 0.0
    of_lse = found.values["lse"]
    if callable(of_lse):
        of_lse = of_lse({"sinks": torch.arange(6.0)})
    assert torch.as_tensor(of_lse).expand(3, 6, 2)[1, :, 1].tolist() == (
        unseen if isinstance(unseen, list) else [unseen] * 6
    )
    own = {x.name: x.shape for x in found.tensors}
    assert {name: own[name] for name in ("o", "lse")} == {"o": OF_Q, "lse": (3, 6, 2)}
    asked = {x.name for x in found.tensors if x.role is not Role.OPTIONAL}
    assert asked == {"o", *SHAPES, *shapes, *lse}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_no_batch_query_or_head_gives_empty_outputs(axis) -> None:
    q, k = [*OF_Q], [*OF_K]
    q[axis] = 0
    if axis != 1:
        k[axis] = 0
    found = Decode.constant({"q": tuple(q), "k": tuple(k), "v": tuple(k)}, Element.BF16)
    assert found is not None
    (o,) = (x for x in found.tensors if x.is_output)
    assert o.shape == tuple(q) and 0 in o.shape


def test_an_empty_call_is_held_to_the_rules_of_others() -> None:
    assert Decode.constant(SHAPES, Element.BF16) is None
    for shapes, options, text in (
        (EMPTY_K, {"window_left": -2}, "window_left -2 is negative"),
        ({**EMPTY_K, "sinks": (2,)}, {}, "sinks has shape (2,)"),
        ({**EMPTY_K, **PAGED}, {}, "k has page_size 0, shape (3, 0, 2, 64), with a block_table"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            Decode.constant({**SHAPES, **shapes}, Element.BF16, **options)


# keys read in all rows of the cache, and those that a query of a sequence sees
COSTS = [
    ({}, 300, 100),
    ({"total_k": 100}, 100, 34),
    ({"total_k": 0}, 0, 0),
    ({"window_left": 9}, 30, 10),
    ({"window_left": 9, "total_k": 20}, 20, 7),
    ({"window_right": 0}, 300, 100),
    ({"caches": 2}, 200, 100),
    ({"caches": 2, "total_k": 150}, 150, 50),
    ({"page_size": 10, "pages": 99, "total_k": 100}, 100, 34),
]


@pytest.mark.parametrize(("options", "read", "seen"), COSTS, ids=str)
def test_bytes_and_operations_are_those_of_the_keys_that_are_seen(options, read, seen) -> None:
    problem = Decode(3, 4, len_k=100, kv_heads=2, **options)
    small = sum(x.bytes for x in (*problem.inputs, *problem.outputs) if x.name not in ("k", "v"))
    assert problem.bytes == 2 * read * 2 * 128 * 2 + small
    assert problem.operations == 4 * 3 * 4 * seen * 128


def test_blocks_of_a_table_are_needed_where_a_query_sees_one_of_their_keys() -> None:
    problem = Decode(2, 1, len_q=3, len_k=40, page_size=4, window_left=5, causal=True, pages=9)
    for length in range(-1, 43):
        keys = min(max(length, 0), 40)
        stand = [key for key in range(keys - 3, keys) if key >= 0]
        seen = {key for own in stand for key in range(max(own - 5, 0), own + 1)}
        assert {*problem.needed_blocks(length)} == {key // 4 for key in seen}
    table = [[-1] * 10, [9] * 8 + [0, 9]]
    assert problem.wrong_values({"cache_seqlens": [0, 36], "block_table": table}) == [
        "block_table 9 of sequence 1, block 7, names no page: pass one from 0 to 8"
    ]


def test_several_queries_see_their_windows_together() -> None:
    problem = Decode(1, 1, len_q=4, len_k=100, window_left=9, causal=True)
    assert problem.keys_read == 13  # 10 of the first query, one more for each of the others
    assert problem.operations == 4 * 4 * 10 * 128


def test_says_what_it_is() -> None:
    problem = Decode(3, 4, len_q=2, len_k=48, total_k=90, page_size=16, pages=20, return_lse=True)
    assert str(problem) == (
        "batch 3, heads 4 on 1, seq 2 on 48, d_head 128, 90 keys together, 20 pages of 16, lse"
    )
    assert str(Decode(3, 4, len_k=48, caches=2)).endswith(", 2 rows of cache")
    assert str(Decode(3, 4, len_k=48, pieces=2)).endswith(", 2 pieces")
    assert str(Decode(3, 4, len_k=48, keys_per_piece=64)).endswith(", pieces of 64 keys")
    found = Decode.together([Decode(2, 4, len_k=n, page_size=16) for n in (16, 32)], "len_k")
    assert found == "2 pages of 16, 4 pages of 16, 4 heads on 1, batch 2 at 16, 2 at 32"
