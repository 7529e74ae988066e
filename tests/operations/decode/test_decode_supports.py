"""What kernels of decode say they take: corners that they do take, and refusals with a way out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.supports import DecodeSupports
from flash_helpers.registry.decode import DECODE_FAMILY
from flash_helpers.registry.problem import Element

DECODING = [family for family in FAMILIES.values() if family.operation is OPERATION]
CONFIGS = [
    variant
    for family in DECODING
    for fixed in family.progression()
    for variant in fixed.variants()
    if variant.dtype is Element.BF16
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.short_form())
GRID = 65535
OF_128 = DecodeSupports(
    dtype=Element.BF16,
    d_heads=(128,),
    blocks={},
    alignment=16,
    max_row_stride=2**40,
    max_length=2**29,
    B_r=16,
    B_c=64,
    abilities=FAMILIES["decode_sync"].progression()[0].supports.abilities,
)


@each_config
def test_every_corner_is_taken_and_another_problem_than_the_others(config: Config) -> None:
    corners = [*config.supports.corners()]
    assert {config.refusal(corner) for corner in corners} == {""}
    assert len({*corners}) == len(corners)
    assert {(c.dtype, c.d_head) for c in corners} == {(config.dtype, config.d_head)}


def test_corners_have_every_option_alone_and_all_together() -> None:
    corners = [*replace(OF_128, pages=True).corners()]

    def any_has(**values: object) -> bool:
        return any(all(getattr(c, k) == v for k, v in values.items()) for c in corners)

    assert any_has(len_k=1) and any_has(softcap=0.0, sinks=True) and any_has(sinks=False, softcap=1)
    assert any(c.causal and c.window_left and c.softcap and c.sinks and c.total_k for c in corners)
    assert {1, 3, 16, 64} <= {c.page_size for c in corners}
    assert any(c.caches < c.batch for c in corners if c.caches)
    groups = [c.len_q * c.heads // c.kv_heads for c in corners]  # rows of one head of K
    assert min(groups) == 1 and any(n > 16 for n in groups) and any(n % 16 for n in groups)
    assert {c.page_size for c in OF_128.corners()} == {0}


USUAL = Decode(2, 4, len_k=100, kv_heads=2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"d_head": 80},
            "d_head 80 is not supported by K: pad the last dimension with zeros to 128",
        ),
        ({"d_head": 512}, "d_head 512 is not supported by K: use 128 at most"),
        ({"dtype": Element.FP16}, "dtype fp16: K takes bf16"),
        ({"len_k": 2**29 + 1}, f"len_k {2**29 + 1} is over the limit {2**29}: split the problem"),
        ({"batch": 2**31}, f"batch {2**31} is over the limit {2**31 - 1} of a CUDA grid: split"),
        ({"heads": 65536, "kv_heads": 65536}, "heads 65536 is over the limit 65535 of a CUDA grid"),
        (
            {"heads": 16, "kv_heads": 1, "len_q": GRID + 1},
            "len_q 65536 with heads 16 on 1 has 65536 tiles of queries, over the limit 65535",
        ),
        (
            {"heads": 34, "kv_heads": 2, "len_q": GRID // 2},
            f"len_q 32767 with heads 34 on 2 has {2 * -(-17 * 32767 // 16)} tiles of queries",
        ),
        ({"len_k": 96, "page_size": 16}, "page_size 16 is not supported by K: choose a step that"),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_take_is_refused_with_a_way_out(changes, text) -> None:
    values = {**vars(USUAL), **changes, "d_v": None, "softmax_scale": None}
    problem = Decode(**{name: value for name, value in values.items() if name != "sequences"})
    assert OF_128.refusal(USUAL, "K") == ""
    assert re.match(re.escape(text), OF_128.refusal(problem, "K"))


@pytest.mark.parametrize(
    "taken",
    [
        {"heads": GRID, "kv_heads": GRID},
        {"heads": 16, "kv_heads": 1, "len_q": GRID},
        {"batch": 2**31 - 1},
        {"len_k": 2**29},
    ],
    ids=str,
)
def test_what_is_at_a_limit_is_taken(taken) -> None:
    assert OF_128.refusal(Decode(**{"batch": 1, "heads": 1, "len_k": 1, **taken}), "K") == ""


def test_pages_are_taken_by_the_steps_that_say_so() -> None:
    paged = Decode(2, 4, len_k=96, kv_heads=2, page_size=16)
    assert replace(OF_128, pages=True).refusal(paged, "K") == ""
    assert replace(OF_128, pages=True).described()["options"].endswith(", pages")
    assert "pages" not in OF_128.described()["options"]


SHAPED = Decode(2, 4, len_k=100, kv_heads=2, total_k=90, caches=3, return_lse=True)


@pytest.mark.parametrize(
    ("name", "strides", "text"),
    [
        ("k", (25608, 256, 128, 1), ""),
        ("k", (0, 512, 128, 1), ""),  # one row for all sequences
        ("k", (25600, 256, 128, 2), "k has stride 2 in its last dimension and must have 1: call"),
        ("k", (25600, 260, 128, 1), "k has seq stride 260, not a multiple of 8 elements (16 bytes"),
        ("v", (25601, 256, 128, 1), "v has batch stride 25601, not a multiple of 8 elements"),
        (
            "v",
            (25600, 2**40 + 8, 128, 1),
            f"v has seq stride {2**40 + 8}, over the limit of {2**40}",
        ),
        ("cache_seqlens", (2,), "cache_seqlens has strides (2,) for shape (2,) and must be contig"),
        ("cache_batch_idx", (0,), "cache_batch_idx has strides (0,) for shape (2,) and must be"),
        ("lse", (8, 1, 4), "lse has strides (8, 1, 4) for shape (2, 4, 1) and must be contiguous"),
    ],
)
def test_strides_that_a_kernel_does_not_take_are_refused(name, strides, text) -> None:
    found = OF_128.layout_refusal(SHAPED.tensor(name), strides)
    assert found.startswith(text) and bool(found) == bool(text)


def test_equal_shares_are_counted_with_an_int() -> None:
    """8 heads of K, and pages that sequences share."""
    most = Decode(2**14, 32, len_k=2**19, kv_heads=8, page_size=64, pages=1, dtype=Element.FP16)
    more = replace(most, batch=2**14 + 1)
    d5, d6 = (
        DECODE_FAMILY.fixed_config(DECODE_FAMILY.steps[n], Element.FP16) for n in ("d5", "d6")
    )
    assert not d6.refusal(most) and not d5.refusal(more)
    assert d6.refusal(more).startswith(
        f"batch {2**14 + 1} with len_k {2**19} and heads 32 on 8 has {2**30 + 2**16} blocks of 64 "
        f"keys, over the limit {2**30} of an int: split the call by sequences"
    )
