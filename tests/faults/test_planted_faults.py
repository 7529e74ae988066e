"""Mistakes in the kernels are caught: by the watcher, at the line, or by the check of the output.

And `debug.py` finds where a wrong output begins to be wrong.
"""

from __future__ import annotations

import functools

import pytest
from planting import (
    FAULTS,
    built_from_these_sources,
    inputs_of,
    kernel_of,
    plant,
    source_lines,
)

from flash_helpers.check.blockwise import blockwise_forward, finish
from flash_helpers.check.debugging import first_disagreement
from flash_helpers.check.reference import attention_reference, measure_error
from flash_helpers.check.trace import trace_forward
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.ptx import Kernel, SimulatorError
from flash_helpers.runtime.simulator import run_forward

WATCHED = [name for name, fault in FAULTS.items() if fault.error is not None]
WRONG = [name for name, fault in FAULTS.items() if fault.error is None]


def passes_the_check(config: FlashForwardKernelConfig, kernel: Kernel) -> bool:
    q, k, v = inputs_of(config)
    reference = attention_reference(q, k, v)
    output, _ = run_forward(config, kernel, q, k, v)
    return measure_error(output, reference.expected).within(reference.bound)


@functools.cache
def caught(name: str) -> SimulatorError:
    fault = FAULTS[name]
    with pytest.raises(SimulatorError) as error:
        run_forward(fault.config, plant(fault), *inputs_of(fault.config))
    return error.value


@pytest.mark.parametrize(
    "config", sorted({fault.config for fault in FAULTS.values()}), ids=lambda c: c.short_form()
)
def test_the_kernel_without_the_fault_is_right(config):
    assert passes_the_check(config, kernel_of(config))


@pytest.mark.parametrize("name", WATCHED)
def test_the_watcher_catches(name):
    assert type(caught(name)) is FAULTS[name].error


@pytest.mark.parametrize("name", WATCHED)
def test_the_message_leads_to_the_line(name):
    fault = FAULTS[name]
    assert built_from_these_sources(fault.config), "the kernels changed: build the library again"
    message = str(caught(name))
    assert any(fault.source in line for line in source_lines(message)), message


@pytest.mark.parametrize("name", WRONG)
def test_the_check_catches(name):
    assert not passes_the_check(FAULTS[name].config, plant(FAULTS[name]))


@pytest.mark.parametrize("name", WRONG)
def test_debugging_finds_the_first_wrong_quantity_and_block(name):
    fault = FAULTS[name]
    q, k, v = inputs_of(fault.config)
    trace = trace_forward(fault.config, plant(fault), q, k, v)
    steps = list(blockwise_forward(fault.config, q, k, v))
    right = finish(steps[-1], q.dtype)
    found = first_disagreement(fault.config, trace.steps, trace.output, steps, right)
    assert found is not None
    assert found.quantity == fault.quantity
    if fault.quantity != "output":
        assert found.key_block == steps[fault.step].key_block


def test_there_are_enough_faults():
    assert len(FAULTS) >= 15
    assert {fault.version for fault in FAULTS.values()} == set(range(1, 17))
