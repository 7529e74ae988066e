"""What a module refuses: with the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.multimodal import (
    CrossAttention,
    FeedForward,
    JointAttention,
    MultimodalTransformer,
    SelfAttention,
    TransformerBlock,
    rotary_table,
)

WIDTH, HEADS = 12, 2


def tokens(length: int = 5, width: int = WIDTH, batch: int = 2) -> Tensor:
    return torch.ones(batch, length, width)


CONDITION = torch.ones(2, WIDTH)
TRUE = torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfAttention(12, 5), "width 12 is not a multiple of heads 5: .*use heads 4"),
        (lambda: SelfAttention(12, 0), "heads 0 is less than 1: use 1 or more"),
        (lambda: SelfAttention(12, dropout=1.0, heads=2), "dropout 1.0 is not from 0 up to"),
        (lambda: SelfAttention(12, 2, backend="gpu"), "backend is 'gpu': pass 'auto' or 'torch'"),
        (lambda: JointAttention(12, 2, context_width=0), "context_width 0 is less than 1"),
        (lambda: FeedForward(12, 0), "feed_forward 0 is less than 1"),
        (lambda: FeedForward(12, activation="relu"), "activation is 'relu': pass 'gelu' or"),
        (lambda: TransformerBlock(12, 2, context="text"), "context is 'text': pass 'joint' or"),
        (lambda: TransformerBlock(12, 2, condition_width=0), "condition_width 0 is less than 1"),
        (lambda: MultimodalTransformer(12, 2, layers=0), "layers 0 is less than 1"),
        (lambda: MultimodalTransformer(12, 2, length=0), "length 0 is less than 1"),
        (lambda: MultimodalTransformer(12, 4), "d_head 3 is odd and rotary embedding turns pairs"),
        (lambda: rotary_table(5, 7), "d_head 7 is odd .*: use an even head size"),
    ],
)
def test_sizes_and_options(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_size_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match=r"heads is 2.0: pass a whole number"):
        SelfAttention(12, 2.0)


def own(**options: Any) -> Any:
    return SelfAttention(WIDTH, HEADS)(options.pop("x", tokens()), **options)


def joint(**options: Any) -> Any:
    module = JointAttention(WIDTH, HEADS, context_width=7)
    return module(tokens(), options.pop("context", tokens(3, 7)), **options)


def cross(**options: Any) -> Any:
    module = CrossAttention(WIDTH, HEADS, context_width=7)
    return module(tokens(), options.pop("context", tokens(3, 7)), **options)


def block(kind: str = "joint", **options: Any) -> Any:
    module = TransformerBlock(WIDTH, HEADS, 8, context=kind, context_width=7)
    given = {"x": tokens(), "condition": CONDITION, **options}
    return module(given.pop("x"), given.pop("condition"), given.pop("context", None), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own(x=tokens(width=8)), "x has width 8 and the module was made for 12: project x"),
        (lambda: own(x=tokens()[0]), r"x has 2 dimensions, shape \(5, 12\): pass \(batch, tokens"),
        (lambda: own(x=tokens(0)), r"x has 0 tokens, shape \(2, 0, 12\): pass at least 1"),
        (lambda: joint(context=tokens(3, 8)), "context has width 8 and the module was made for 7"),
        (lambda: joint(context=tokens(3, 7, 1)), r"context has batch 1 and x 2: .*expand\(2, -1"),
        (lambda: joint(context=None, context_mask=TRUE), "context_mask is given without a context"),
        (lambda: cross(context=tokens(0, 7)), "context has 0 tokens"),
        (lambda: cross(context=tokens(3, 8)), "context has width 8 and the module was made for 7"),
        (
            lambda: own(rotary=rotary_table(4, 6)),
            r"rotary has 4 positions and the sequence 5 tokens: pass rotary_table\(5, 6\)",
        ),
        (
            lambda: own(rotary=rotary_table(5, 8)),
            r"rotary has shape \(5, 4, 2\) and heads of 6 need \(positions, 3, 2\)",
        ),
        (
            lambda: SelfAttention(12, 4)(tokens(), rotary=rotary_table(5, 4)),
            "the head size is 3 and rotary embedding turns pairs of elements: use an even",
        ),
        (lambda: own(mask=TRUE[:, :4]), r"mask has shape \(2, 4\): pass \(batch, tokens\), \(2, 5"),
        (lambda: joint(context_mask=TRUE), r"context_mask has shape \(2, 5\): pass .*\(2, 3\)"),
        (
            lambda: own(mask=TRUE.long()),
            r"mask is torch.int64, the tokens of each sample, and has shape \(2, 5\): .*dtype bool",
        ),
        (lambda: block(condition=torch.ones(2, 9)), r"condition has shape \(2, 9\): .*\(2, 12\)"),
        (lambda: block(condition=torch.ones(3, 12)), r"condition has shape \(3, 12\): .*\(2, 12\)"),
        (lambda: block("cross"), "context is None and the block was made with context='cross'"),
        (lambda: block("none", context=tokens(3, 7)), "a context or its mask is given and the"),
        (lambda: block(context=tokens(3, 8)), "context has width 8 and the module was made for 7"),
        (
            lambda: MultimodalTransformer(WIDTH, HEADS, length=4)(tokens(), CONDITION),
            "rotary has 4 positions and the sequence 5 tokens: .*make the model with length=5",
        ),
    ],
)
def test_tensors_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own(x=tokens().half()), "x is torch.float16 and the weights are torch.float32"),
        (lambda: joint(context=tokens(3, 7).double()), "context is torch.float64 and the weights"),
        (lambda: block(condition=CONDITION.half()), "condition is torch.float16 and the weights"),
        (lambda: own(mask=torch.ones(2, 5)), "mask is torch.float32: pass bools of shape"),
    ],
)
def test_dtypes_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
