"""Gradients of sequences of various lengths, in the simulator: lengths around those of blocks,
begins that do not fit, and what is beside a sequence."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from attention_tensors import FEW_SMS

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.reference import reference
from flash_helpers.operations.attention_forward.reference import attention_of
from flash_helpers.registry.backward import BACKWARD
from flash_helpers.registry.backward_sync import BACKWARD_SYNC
from flash_helpers.registry.family import Family
from flash_helpers.runtime.simulator import run_shipped

pytestmark = pytest.mark.slow
MOST = 2**31 - 1
ROWS = {"dq": "cu_seqlens_q", "dk": "cu_seqlens_k", "dv": "cu_seqlens_k"}


def config_of(family: Family, **changes: object) -> Config:
    last = family.fixed_config([*family.steps.values()][-1], Element.BF16)
    return last.replace(varlen=True, **changes)


CONFIGS = [config_of(BACKWARD_SYNC), config_of(BACKWARD, causal=True)]
IN_TURN = config_of(BACKWARD, causal=True, in_turn=True)
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.short_form())


def inputs_of(
    problem: AttentionBackward, begins_q: list[int], begins_k: list[int]
) -> dict[str, torch.Tensor]:
    """Inputs of sequences that begin there."""
    inputs = draw("normal", problem)
    inputs["cu_seqlens_q"] = torch.tensor(begins_q, dtype=torch.int32)
    inputs["cu_seqlens_k"] = torch.tensor(begins_k, dtype=torch.int32)
    o, lse = attention_of(problem, inputs)
    return inputs | {"o": o.to(inputs["q"].dtype), "lse": lse.float()}


def gradients(config: Config, problem: AttentionBackward, inputs: dict[str, torch.Tensor]):
    tensors = tensors_for(config, problem, inputs)
    run = run_shipped(config, tensors, device=FEW_SMS, **problem.call_options())
    assert run.faults == ()
    return {name: tensors[name] for name in GRADIENTS}


@pytest.mark.parametrize(
    "config",
    [config_of(BACKWARD_SYNC), config_of(BACKWARD), IN_TURN],
    ids=lambda config: config.short_form(),
)
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([0, 1, 63, 0, 64, 65, 200], [5, 0, 128, 127, 1, 200, 129]), ([0, 0], [0, 0])],
)
def test_gradients_are_right_and_rows_of_no_sequence_are_not_written(config, lengths_q, lengths_k):
    begins_q, begins_k = ([*accumulate(each, initial=0)] for each in (lengths_q, lengths_k))
    behind = 70  # rows of no sequence, all of them NaN
    totals = (begins_q[-1] + behind, begins_k[-1] + behind)
    problem = config.supports.problem(1, 1, *totals, sequences=len(lengths_q))
    inputs = inputs_of(problem, begins_q, begins_k)
    right = reference(problem, inputs)
    for name in ("q", "o", "do", "k", "v"):
        inputs[name][:, (begins_k if name in "kv" else begins_q)[-1] :] = torch.nan
    inputs["lse"][..., begins_q[-1] :] = torch.nan

    for name, found in gradients(config, problem, inputs).items():
        end = int(inputs[ROWS[name]][-1])
        assert found[:, end:].isnan().all()
        if end > 0:
            error = measure_error(found[:, :end], right.expected[name][:, :end])
            assert error.within(right.bounds[name]), f"{name}: {error}"


@each
@pytest.mark.parametrize(
    ("begins", "written"),
    [
        ([0, 60, 30, 90, 140], range(140)),  # falls, and ends behind the keys
        ([-5, 10, MOST, -MOST, 4], range(130)),
        ([20, 30, 30, 60, 90], range(20, 90)),
        ([MOST] * 5, range(0)),
    ],
)
def test_nothing_outside_of_the_tensors_is_touched(config, begins, written):
    problem = config.supports.problem(1, 1, 130, 100, sequences=len(begins) - 1)
    inputs = draw("normal", problem)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        inputs[name] = torch.tensor(begins, dtype=torch.int32)

    for found in gradients(config, problem, inputs).values():
        is_written = ~found.isnan().flatten(2).all(-1)[0]
        assert not is_written[: written.start].any() and not is_written[written.stop :].any()


@each
def test_a_sequence_does_not_see_those_beside_it(config):
    problem = config.supports.problem(1, 1, 130, 200, sequences=3)
    inputs = inputs_of(problem, [0, 50, 60, 130], [0, 70, 90, 200])
    alone = gradients(config, problem, inputs)
    for name in ("q", "o", "do", "k", "v"):
        inputs[name][:, slice(70, 90) if name in "kv" else slice(50, 60)] = torch.nan
    inputs["lse"][..., 50:60] = torch.nan
    beside = gradients(config, problem, inputs)

    for name, nans in (("dq", range(50, 60)), ("dk", range(70, 90)), ("dv", range(70, 90))):
        is_nan = beside[name].isnan().flatten(2).any(-1)[0]
        assert is_nan.nonzero().flatten().tolist() == [*nans]
        assert torch.equal(beside[name][:, ~is_nan], alone[name][:, ~is_nan])


def test_no_tile_waits_for_the_turn_of_one_that_falling_begins_leave_out():
    """The third tile of the first sequence is taken for one of the second."""
    problem = IN_TURN.supports.problem(1, 1, 64, 640, sequences=4)
    inputs = draw("normal", problem)
    inputs["cu_seqlens_q"] = torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32)
    inputs["cu_seqlens_k"] = torch.tensor([51, 425, 0, 133, 411], dtype=torch.int32)
    found = gradients(IN_TURN, problem, inputs)
    assert found["dq"].eq(0).all()
    assert found["dk"].isnan().all() and found["dv"].isnan().all()


def test_sequences_whose_tiles_cannot_be_numbered_are_refused():
    most = 2**31 // IN_TURN.B_c
    problem = IN_TURN.supports.problem(1, 1, 64, 640, sequences=most)
    assert "tiles of 128 keys, whose rows are over the limit" in IN_TURN.supports.refusal(
        problem, "b16"
    )
