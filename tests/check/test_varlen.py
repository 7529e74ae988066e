"""Kernels for sequences of various lengths, in the simulator: begins that do not fit, and what is
beside a sequence."""

from __future__ import annotations

import pytest
import torch
from attention_tensors import FEW_SMS

from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.attention_forward.inputs import draw
from flash_helpers.registry.family import Family
from flash_helpers.registry.general import GENERAL
from flash_helpers.registry.overlap import OVERLAP
from flash_helpers.runtime.simulator import run_shipped

pytestmark = pytest.mark.slow
MOST = 2**31 - 1


def config_of(family: Family, **changes: object) -> Config:
    last = family.fixed_config([*family.steps.values()][-1], Element.BF16)
    return last.of_size(64).replace(varlen=True, **changes)


CONFIGS = [config_of(OVERLAP), config_of(GENERAL, causal=True)]
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.step.id)


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
    problem = config.supports.problem(len(begins) - 1, 1, 130, 100)
    tensors = tensors_for(config, problem, draw("normal", problem))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensors[name].copy_(torch.tensor(begins))

    run = run_shipped(config, tensors, device=FEW_SMS)

    assert run.faults == ()
    is_written = ~tensors["o"].isnan().flatten(2).all(-1)[0]
    assert not is_written[: written.start].any() and not is_written[written.stop :].any()
    assert not tensors["o"][0, is_written].isnan().any()


@each
def test_a_sequence_does_not_see_those_beside_it(config):
    problem = config.supports.problem(3, 1, 130, 200)
    inputs = draw("normal", problem)
    for name, begins in (("cu_seqlens_q", [0, 50, 60, 130]), ("cu_seqlens_k", [0, 70, 90, 200])):
        inputs[name] = torch.tensor(begins, dtype=torch.int32)
    alone = tensors_for(config, problem, inputs)
    run_shipped(config, alone, device=FEW_SMS)
    inputs["q"][:, 50:60] = inputs["k"][:, 70:90] = inputs["v"][:, 70:90] = torch.nan
    beside = tensors_for(config, problem, inputs)
    run_shipped(config, beside, device=FEW_SMS)

    is_nan = beside["o"].isnan().flatten(2).any(-1)[0]
    assert is_nan.nonzero().flatten().tolist() == [*range(50, 60)]
    assert torch.equal(beside["o"][:, ~is_nan], alone["o"][:, ~is_nan])
