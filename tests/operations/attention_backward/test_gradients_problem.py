"""The problem of the backward pass: its tensors, what shapes pose it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.registry.problem import Element

OF_Q, OF_K = (2, 70, 6, 64), (2, 50, 3, 64)
SHAPES = {"do": OF_Q, "q": OF_Q, "k": OF_K, "v": OF_K, "o": OF_Q, "lse": (2, 6, 70)}


def test_is_posed_by_the_shapes_of_its_tensors():
    problem = AttentionBackward.posed(SHAPES, Element.FP16, causal=True, softcap=5.0)
    assert problem == AttentionBackward(
        2, 6, 70, 64, Element.FP16, len_k=50, kv_heads=3, causal=True, softcap=5.0
    )
    assert {x.name: x.shape for x in problem.inputs} == SHAPES
    assert {x.name: x.shape for x in problem.outputs} == {"dq": OF_Q, "dk": OF_K, "dv": OF_K}
    assert [*problem.axes][:9] == [x.name for x in problem.tensors][:9]


def test_has_five_products_where_the_forward_pass_has_two():
    forward = AttentionForward(2, 6, 70, 64, len_k=50, causal=True)
    assert AttentionBackward.of(forward).operations * 2 == forward.operations * 5


def test_comes_back_from_its_record():
    problem = AttentionBackward(1, 2, 40, 64, window_left=3, kv_heads=1, deterministic=True)
    record = problem.record()
    assert AttentionBackward.from_record(record) == problem
    del record["deterministic"]  # as those of before have none
    assert AttentionBackward.from_record(record) == replace(problem, deterministic=False)


def test_says_whether_every_call_must_give_the_same_bits():
    problem = AttentionBackward.posed(SHAPES, Element.FP16, deterministic=True)
    assert problem.deterministic and str(problem).endswith(", deterministic")
    assert problem != AttentionBackward.posed(SHAPES, Element.FP16)


def test_empty_tensors_have_gradients_of_0_without_a_kernel():
    shapes = {**SHAPES, "k": (2, 0, 3, 64), "v": (2, 0, 3, 64)}
    found = AttentionBackward.constant(shapes, Element.BF16, deterministic=True)
    assert found is not None
    assert found.values == {"dq": 0.0, "dk": 0.0, "dv": 0.0}
    assert {x.name: x.shape for x in found.tensors if x.is_output} == {
        "dq": OF_Q,
        "dk": (2, 0, 3, 64),
        "dv": (2, 0, 3, 64),
    }
    assert AttentionBackward.constant(SHAPES, Element.BF16) is None


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("do", (2, 70, 6, 32), "do has shape (2, 70, 6, 32) and o (2, 70, 6, 64)"),
        ("dk", (2, 50, 6, 64), "dk has shape (2, 50, 6, 64) and k (2, 50, 3, 64)"),
        ("lse", (2, 70, 6), "lse has shape (2, 70, 6) and q (2, 70, 6, 64)"),
        ("o", (2, 50, 6, 64), "o has shape (2, 50, 6, 64)"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(name, shape, text):
    shapes = {**SHAPES, **({"do": shape} if name == "o" else {}), name: shape}
    with pytest.raises(ValueError, match=re.escape(text)):
        AttentionBackward.posed(shapes, Element.BF16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sinks": True}, "computes no gradient of them"),
        ({"d_v": 128}, "d_v 128 with d_head 64"),
        ({"return_lse": True}, "the LSE is an input"),
    ],
)
def test_an_option_of_the_forward_pass_without_gradients_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        AttentionBackward(1, 1, 8, 64, **options)
