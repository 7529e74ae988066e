"""Attention of a sequence that processes share, beside the float64 formula of the whole, through
gloo and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import ring_cases
import torch
from ranks import Ranks

import flash_attention
from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.operations.attention_backward import reference as backward
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward import reference as forward

pytestmark = pytest.mark.slow
SEQ, D_HEAD = 48, 64  # 48: a multiple of twice each number of ranks
BEGINS = (0, 24, 24, 72, 96)
WINDOW = (9, 3)


def references(given: ring_cases.Arrays, options: dict[str, Any]) -> list[Reference]:
    """Results of the whole sequence in float64, and their bounds."""
    begins: Sequence[int] | None = options.get("cu_seqlens")
    left, right = options.get("window_size", (None, None))
    asked = {
        "causal": options.get("causal", False),
        "window_left": left,
        "window_right": right,
        "softcap": options.get("softcap", 0.0),
        "softmax_scale": options.get("softmax_scale"),
    }
    inputs = {name: x if begins is None else x[None] for name, x in given.items()}
    shapes = {name: tuple(x.shape) for name, x in inputs.items() if name != "do"}
    if begins is not None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            inputs[name] = torch.tensor(list(begins), dtype=torch.int32)
            shapes[name] = (len(begins),)
    element = Element.from_name(str(given["q"].dtype).removeprefix("torch."))
    problem = AttentionForward.posed(shapes, element, **asked)
    return [
        forward.reference(problem, inputs),
        backward.reference(AttentionBackward.of(problem), inputs),
    ]


def check(
    ranks: Ranks,
    function: str,
    size: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = torch.bfloat16,
    gradients: bool = True,
    times: int = 1,
    **options: Any,
) -> list[ring_cases.Arrays]:
    """Compare each rank's whole outputs with float64; return those of rank 0."""
    begins = options.get("cu_seqlens")
    seq = SEQ if begins is None else int(begins[-1])
    given = ring_cases.inputs(seq, *heads, D_HEAD, dtype, packed=begins is not None)
    asked = {"given": given, "gradients": gradients, "times": times}
    found = ranks.run(ring_cases.attend, size, function=function, **asked, **options)
    right = references(given, options)
    for calls in found:
        assert isinstance(calls, list), calls
        for outputs in calls:
            for name, x in outputs.items():
                own = right[name.startswith("d")]
                expected = own.expected[name]
                whole = x if begins is None else x[None]
                error = measure_error(whole, expected)
                assert error.within(own.bounds[name]), f"{name}: {error.excess(own.bounds[name])}"
    assert found[0][0].keys() >= {"o", *(("dq", "dk", "dv") if gradients else ())}
    return found[0]


def test_a_group_of_one_gives_the_bits_of_attention(ranks) -> None:
    (found,) = check(ranks, "ring", 1, causal=True)
    given = ring_cases.inputs(SEQ, 2, 1, D_HEAD, torch.bfloat16)
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    o, lse = flash_attention.attention(q, k, v, causal=True, return_lse=True)
    o.backward(given["do"])
    expected = {"o": o, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_causal_zigzag_is_right_and_repeats_its_bits(ranks, size) -> None:
    first, *others = check(ranks, "ring", size, causal=True, times=2 if size < 4 else 1)
    for other, name in product(others, first):
        assert torch.equal(first[name], other[name]), name


RINGS = {
    "striped": (3, {"placement": "striped", "causal": True}),
    "contiguous": (2, {"placement": "contiguous", "causal": True}),
    "all keys, fp16, scale and softcap": (
        2,
        {"dtype": torch.float16, "softmax_scale": 0.2, "softcap": 3.0},
    ),
    "a window in zigzag": (2, {"window_size": WINDOW}),
    "a window in stripes": (3, {"placement": "striped", "window_size": WINDOW}),
    "sequences in contiguous shards": (
        2,
        {"placement": "contiguous", "causal": True, "cu_seqlens": BEGINS},
    ),
    "sequences in zigzag": (2, {"causal": True, "cu_seqlens": BEGINS}),
    "sequences in stripes with a window": (
        3,
        {"placement": "striped", "cu_seqlens": BEGINS, "window_size": WINDOW},
    ),
}


@pytest.mark.parametrize(("size", "options"), RINGS.values(), ids=RINGS)
def test_a_ring_is_right(ranks, size, options) -> None:
    check(ranks, "ring", size, **options)


@pytest.mark.matrix("overlap")  # attention() takes it on the CPU
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"window_size": WINDOW},
        {"window_size": (30, 0)},
        {"causal": True, "cu_seqlens": BEGINS},
        {"cu_seqlens": BEGINS},
    ],
    ids=str,
)
def test_every_ring_is_right(ranks, size, placement, mask) -> None:
    dtype = torch.float16 if size == 3 else torch.bfloat16
    heads = (4, 2) if size == 2 else (2, 2)
    check(ranks, "ring", size, placement=placement, dtype=dtype, heads=heads, **mask)


ULYSSES = {
    "causal": (2, {"causal": True, "heads": (4, 2)}),
    "a window, forward alone": (4, {"window_size": WINDOW, "heads": (4, 4), "gradients": False}),
    "sequences that begin within shards": (
        2,
        {
            "causal": True,
            "heads": (2, 2),
            "gradients": False,
            "cu_seqlens": torch.tensor([0, 5, 48], dtype=torch.int32),
        },
    ),
}


@pytest.mark.parametrize(("size", "options"), ULYSSES.values(), ids=ULYSSES)
def test_exchanged_heads_are_right(ranks, size, options) -> None:
    check(ranks, "ulysses", size, **options)


@pytest.mark.matrix("overlap")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
def test_all_exchanged_heads_are_right(ranks, size, options) -> None:
    check(ranks, "ulysses", size, heads=(2 * size, size), dtype=torch.float16, **options)
