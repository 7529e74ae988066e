"""A problem: what follows from its sizes and options, and what is none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from two_kernels import SquaresBackwards

from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.registry.families import problem_from_record

GENERAL = AttentionForward(
    2, 6, 5, 64, Element.FP16, len_k=3, kv_heads=2, causal=True, softmax_scale=0.5, return_lse=True
)


def visible_by_hand(len_q: int, len_k: int, left: int | None, right: int | None) -> list[list[int]]:
    """The keys that each query sees."""
    return [
        [
            key
            for key in range(len_k)
            if (left is None or key >= query + len_k - len_q - left)
            and (right is None or key <= query + len_k - len_q + right)
        ]
        for query in range(len_q)
    ]


class TestSizes:
    def test_of_keys_and_their_heads_are_those_of_queries_unless_given(self):
        problem = AttentionForward(2, 3, 64)
        assert (problem.len_k, problem.kv_heads, problem.kv_shape) == (64, 3, problem.shape)
        assert problem.softmax_scale == 1 / math.sqrt(128)
        assert problem == AttentionForward(2, 3, 64, len_k=64, kv_heads=3)
        assert problem.lengths == {"seq_len": 64}
        assert str(problem) == "batch 2, heads 3, seq 64, d_head 128"

    def test_of_each_tensor_are_its_own(self):
        assert (GENERAL.shape, GENERAL.kv_shape) == ((2, 5, 6, 64), (2, 3, 2, 64))
        shapes = {tensor.name: tensor.shape for tensor in GENERAL.tensors}
        assert shapes["o"] == shapes["q"] == GENERAL.shape
        assert shapes["k"] == shapes["v"] == GENERAL.kv_shape
        assert shapes["lse"] == (2, 6, 5)
        assert GENERAL.bytes == 2 * (2 * 2 * 5 * 6 * 64 + 2 * 2 * 3 * 2 * 64) + 4 * 2 * 6 * 5
        assert GENERAL.lengths == {"len_q": 5, "len_k": 3}
        assert str(GENERAL) == (
            "batch 2, heads 6 on 2, seq 5 on 3, d_head 64, causal, softmax_scale 0.5, lse"
        )

    def test_give_strides_to_each_tensor(self):
        strides = GENERAL.strides()
        assert strides["q"] == strides["o"] == (5 * 6 * 64, 6 * 64, 64, 1)
        assert strides["k"] == strides["v"] == (3 * 2 * 64, 2 * 64, 64, 1)
        one_key = AttentionForward(1, 2, 5, 64, len_k=1, kv_heads=1)
        assert one_key.strides()["k"] == (0, 0, 0, 1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"len_k": 0}, "len_k 0 is not positive"),
            ({"kv_heads": 0}, "kv_heads 0 is not positive"),
            ({"kv_heads": 4}, "heads 6 is not a multiple of kv_heads 4: .*: use 2 of these"),
            ({"kv_heads": 12}, "heads 6 is not a multiple of kv_heads 12: .*: use 6 of these"),
            ({"softmax_scale": -0.5}, "softmax_scale -0.5 is negative: pass 0.5, and -q"),
            ({"softmax_scale": 0.0}, "softmax_scale 0 is not from 2\\^-126 to 2\\^126"),
            ({"softmax_scale": math.inf}, "softmax_scale inf is not from"),
            ({"softmax_scale": -math.inf}, "softmax_scale -inf is negative"),
            ({"softmax_scale": math.nan}, "softmax_scale nan is not from"),
            ({"softmax_scale": 1e38}, "so that float32 holds it: scale q"),
            ({"window_left": -1}, "window_left -1 is negative: use 0 or more, or None for no li"),
            ({"window_right": -7, "causal": True}, "window_right -7 is negative"),
            ({"softcap": -1.0}, "softcap -1: softcap must be from 2\\^-126 .*: 0 switches soft"),
            ({"softcap": math.nan}, "softcap nan: softcap must be from"),
            ({"softcap": math.inf}, "softcap inf: softcap must be from"),
            ({"softcap": 1e37, "softmax_scale": 1e-30}, "softmax_scale / softcap must be from"),
            ({"d_v": 0}, "d_v 0 is not positive"),
        ],
    )
    def test_that_pose_no_problem_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            AttentionForward(1, 6, 64, **options)


@pytest.mark.parametrize("right", [None, 0, 1, 4])
@pytest.mark.parametrize("left", [None, 0, 1, 4])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (7, 7), (7, 3), (3, 7), (1, 9), (9, 1)])
def test_operations_are_those_of_the_pairs_that_are_seen(len_q, len_k, left, right):
    problem = AttentionForward(
        *(2, 3, len_q, 64), len_k=len_k, window_left=left, window_right=right, d_v=16
    )
    seen = visible_by_hand(len_q, len_k, left, right)
    assert [[*problem.visible_keys(query)] for query in range(len_q)] == seen
    assert problem.visible == sum(map(len, seen))
    assert problem.operations == 2 * 2 * 3 * problem.visible * (64 + 16)


def test_no_keys_leave_the_sinks_as_lse():
    shapes = {"q": (2, 3, 4, 8), "k": (2, 0, 2, 8), "v": (2, 0, 2, 8)}
    asked = {**shapes, "lse": (2, 4, 3), "sinks": (4,)}
    found = AttentionForward.constant(asked, Element.BF16, window_left=3, softcap=2.0)
    assert found.values["lse"]({"sinks": np.arange(4)}).shape == (4, 1)
    assert AttentionForward.constant(shapes, Element.BF16).values["lse"] == -math.inf


class TestWindow:
    @pytest.mark.parametrize(
        ("given", "found"),
        [
            ({"window_right": 0}, {"causal": True}),
            ({"window_left": 2, "window_right": 0}, {"causal": True, "window_left": 2}),
            ({"causal": True, "window_right": 1}, {"causal": True}),
            (
                {"causal": True, "window_left": 3, "window_right": 1},
                {"window_left": 3, "causal": 1},
            ),
            ({"window_left": 4}, {}),
            ({"window_left": 3}, {"window_left": 3}),
            ({"window_right": 2}, {}),
            ({"window_right": 1}, {"window_right": 1}),
            ({"window_left": 2**40, "window_right": 2**40}, {}),
        ],
    )
    def test_has_one_form(self, given, found):
        sizes = (1, 2, 3)
        assert AttentionForward(*sizes, len_k=5, **given) == AttentionForward(
            *sizes, len_k=5, **found
        )
        shapes = {"q": (1, 3, 2, 128), "k": (1, 5, 2, 128), "v": (1, 5, 2, 128)}
        posed = AttentionForward.posed(shapes, Element.BF16, **given)
        assert posed == AttentionForward(*sizes, len_k=5, **found)

    def test_is_told_with_other_options(self):
        problem = AttentionForward(
            *(1, 2, 8), causal=True, window_left=3, softcap=50.0, sinks=True, d_v=64
        )
        assert str(problem).endswith("d_head 128, causal, window_left 3, softcap 50, sinks, d_v 64")
        texts = AttentionForward.together([problem, AttentionForward(1, 2, 16)], "len_q")
        assert "window_left 3, softcap 50, sinks, d_v 64, 2 heads, batch 1 at 8, 1 at 16" in texts


def test_sinks_and_another_head_size_of_v_have_shapes_of_their_own():
    problem = AttentionForward(2, 6, 5, 64, len_k=3, kv_heads=2, sinks=True, d_v=16)
    shapes = {tensor.name: tensor.shape for tensor in (*problem.inputs, *problem.outputs)}
    assert shapes == {
        "q": (2, 5, 6, 64),
        "k": (2, 3, 2, 64),
        "v": (2, 3, 2, 16),
        "sinks": (6,),
        "o": (2, 5, 6, 16),
    }
    assert AttentionForward.posed(shapes, problem.dtype) == problem
    assert problem.tensor("sinks").element is problem.dtype
    for name, shape, message in (
        ("sinks", (5,), r"sinks has shape \(5,\) .*: heads must be equal, sinks \(6,\)"),
        ("v", (2, 4, 2, 16), "batch, seq and heads must be equal"),
        ("o", problem.shape, r"batch and d_head must be equal, o \(2, 5, 6, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionForward.posed(shapes | {name: shape}, problem.dtype)
    without = {name: shape for name, shape in shapes.items() if name != "o"}
    with pytest.raises(ValueError, match="v has d_head 0"):
        AttentionForward.posed(without | {"v": (2, 3, 2, 0)}, problem.dtype)


def test_tensors_of_a_call_are_named_by_their_order_and_those_left_out():
    names = AttentionForward.names
    assert names(()) == names((1, 2, 3, None, None)) == ("q", "k", "v", "o")
    assert names((1, 2, 3, 4, None, 6)) == ("q", "k", "v", "o", "sinks")
    assert names(range(1, 9)) == tuple(AttentionForward.axes)
    for tensors in ({"k": 2, "q": 1, "v": 3}, {"q": 1, "sinks": 6}, {}):
        arranged = AttentionForward.arranged(tensors)
        assert {n: x for n, x in zip(AttentionForward.axes, arranged) if x is not None} == tensors  # noqa: B905
        assert not arranged or arranged[-1] is not None


@pytest.mark.parametrize(
    ("scale", "usual"), [(128**-0.5, True), (128**-0.5 * (1 + 1e-9), True), (0.0884, False)]
)
def test_a_scale_that_float32_cannot_tell_from_the_usual_one_is_it(scale, usual):
    assert AttentionForward(1, 1, 1, softmax_scale=scale).has_usual_scale is usual


class TestRecord:
    def test_of_a_problem_is_read_back(self):
        window = AttentionForward(2, 3, 64, window_left=3, softcap=2.0, sinks=True, d_v=64)
        for problem in (GENERAL, window, AttentionForward(2, 3, 64), SquaresBackwards(3, 0.5)):
            record = json.loads(json.dumps(problem.record()))
            assert record["operation"] == problem.operation
            assert type(problem).from_record(record) == problem

    def test_takes_defaults_for_what_it_lacks(self):
        record = {"operation": "attention_forward", "batch": 2, "heads": 3, "len_q": 64}
        assert AttentionForward.from_record(record) == AttentionForward(2, 3, 64)

    def test_takes_a_whole_number_for_a_float(self):
        record = GENERAL.record() | {"softmax_scale": 2}
        assert AttentionForward.from_record(record).softmax_scale == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"operation": "sorting"}, "a record of operation 'sorting' is none of attention_for"),
            ({"operation": None}, "a record of operation None is none of attention_forward"),
            ({"rows": 1}, r"attention_forward has no fields \['rows'\]: it has \['batch', "),
            ({"batch": "2"}, "batch '2' is no int"),
            ({"batch": True}, "batch True is no int"),
            ({"batch": 2.0}, "batch 2.0 is no int"),
            ({"causal": 1}, "causal 1 is no bool"),
            ({"softmax_scale": "1"}, "softmax_scale '1' is no float"),
            ({"dtype": 1}, "dtype 1 is no Element"),
            ({"window_left": True}, "window_left True is no int"),
            ({"dtype": "fp17"}, "dtype 'fp17' is not one of fp16"),
            ({"heads": 0}, "heads 0 is not positive"),
        ],
    )
    def test_of_another_kind_is_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            AttentionForward.from_record(GENERAL.record() | changes)

    def test_without_a_size_is_refused(self):
        record = GENERAL.record()
        del record["len_q"]
        with pytest.raises(ValueError, match=r"of attention_forward lacks the fields \['len_q'\]"):
            AttentionForward.from_record(record)

    def test_of_any_operation_is_found_by_its_name(self):
        assert problem_from_record(GENERAL.record()) == GENERAL
        with pytest.raises(ValueError, match="operation 'sorting' is not one of attention_forward"):
            problem_from_record({"operation": "sorting"})
