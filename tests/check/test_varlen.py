"""Kernels for sequences of various lengths, in the simulator, on begins that do not fit."""

from __future__ import annotations

import pytest
import torch
from attention_tensors import FEW_SMS

from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.attention_forward.inputs import draw
from flash_helpers.registry.overlap import OVERLAP
from flash_helpers.runtime.simulator import run_shipped

CONFIG = OVERLAP.fixed_config([*OVERLAP.steps.values()][-1], Element.BF16)
CONFIG = CONFIG.of_size(64).replace(varlen=True)
MOST = 2**31 - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "written"),
    [
        ([0, 60, 30, 90, 140], range(140)),  # falls, and ends behind the keys
        ([-5, 10, MOST, -MOST, 4], range(130)),
        ([20, 30, 30, 60, 90], range(20, 90)),
        ([MOST] * 5, range(0)),
    ],
)
def test_nothing_outside_of_the_tensors_is_touched(begins, written):
    problem = CONFIG.supports.problem(len(begins) - 1, 1, 130, 100)
    tensors = tensors_for(CONFIG, problem, draw("normal", problem))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensors[name].copy_(torch.tensor(begins))

    run = run_shipped(CONFIG, tensors, device=FEW_SMS)

    assert run.faults == ()
    is_written = ~tensors["o"].isnan().flatten(2).all(-1)[0]
    assert not is_written[: written.start].any() and not is_written[written.stop :].any()
    assert not tensors["o"][0, is_written].isnan().any()
