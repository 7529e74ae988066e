"""Mistakes in the kernels are caught: by the watcher, at the line, or by the check of the output.

And `debug.py` finds where a wrong output begins to be wrong.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tiers import each, each_name

from flash_helpers.check.difference import WrongElement
from flash_helpers.check.errors import measure_error
from flash_helpers.check.faults import all_faults
from flash_helpers.check.planting import (
    inputs_of,
    is_built_from,
    plant,
    problem_of,
    reference_of,
    run_planted,
    source_lines,
)
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import STEPS, Config
from flash_helpers.ptx import Kernel
from flash_helpers.runtime.simulator import load_kernels, run_kernel

pytestmark = pytest.mark.slow

FAULTS = all_faults()
WATCHED = [name for name, fault in FAULTS.items() if fault.error is not None]
WRONG = [name for name, fault in FAULTS.items() if fault.error is None]
each_fault = functools.partial(each_name, config_of=lambda name: FAULTS[name].config)


def run(config: Config, kernels: dict[str, Kernel]) -> dict[str, torch.Tensor]:
    """Return the outputs of a config's kernels; a fault is raised."""
    problem = problem_of(config)
    tensors = tensors_for(config, problem, inputs_of(config))
    device = config.family.operation.part("faults").device_of(config)
    run_kernel(config, kernels, tensors, device=device, **problem.call_options())
    return {tensor.name: tensors[tensor.name] for tensor in problem.outputs}


def passes_the_check(config: Config, outputs: dict[str, torch.Tensor]) -> bool:
    reference = reference_of(config)
    return all(
        measure_error(output, reference.expected[name]).within(reference.bounds[name])
        for name, output in outputs.items()
    )


@each(sorted({FAULTS[name].config for name in WRONG}))
def test_the_check_passes_the_kernel_without_the_fault(config):
    assert passes_the_check(config, run(config, load_kernels(config)))


@each_fault(WATCHED)
def test_the_watcher_catches_the_fault_at_its_line(name, root):
    fault = FAULTS[name]
    assert is_built_from(root, fault.config), "the kernels changed: build the library again"
    with pytest.raises(fault.error) as error:
        run(fault.config, plant(fault).kernels)
    assert error.type is fault.error
    message = str(error.value)
    assert any(fault.source in line for _, line in source_lines(message, root)), message


@each_fault(WRONG)
def test_the_check_catches_the_fault_and_debugging_finds_where_it_begins(name):
    fault = FAULTS[name]
    config = fault.config

    outcome = run_planted(plant(fault))

    assert outcome.found.faults == ()
    assert outcome.is_caught
    found = outcome.found.disagreement
    assert found is not None
    if not config.family.operation.has_trace:
        return
    if isinstance(found, WrongElement):
        assert found.output == fault.quantity
        return
    assert found.quantity == fault.quantity
    assert found.kernel == fault.kernel
    if fault.quantity != "output":
        assert found.turn == fault.turn
    if fault.rows is not None:
        first = found.block * config.B_c if fault.quantity == "K" else 0
        assert found.warp == fault.warp
        assert found.row - first in fault.rows


def test_every_step_has_a_fault():
    assert {fault.step for fault in FAULTS.values()} == set(STEPS)
    assert WATCHED and WRONG
