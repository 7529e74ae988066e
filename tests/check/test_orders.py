"""Kernels on Hopper's own units are right in whatever order their asynchronous work completes."""

from __future__ import annotations

import pytest
from tiers import leading_configs

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import FAMILIES, Config, Element
from flash_helpers.runtime.simulator import load_kernels, run_kernel

ASYNCHRONOUS = ("hopper", "general", "backward")
LEADING = [
    config
    for name in ASYNCHRONOUS
    for config in sorted(leading_configs(name))
    if config.dtype == Element.BF16 and config.step is [*FAMILIES[name].steps.values()][-1]
]


def check(config: Config, seed: int) -> None:
    operation = config.family.operation
    problem = config.supports.adapted(operation.counted.in_dtype(config.dtype))
    inputs = operation.part("inputs").draw("normal", problem)
    right = operation.part("reference").reference(problem, inputs)
    tensors = tensors_for(config, problem, inputs)
    run = run_kernel(config, load_kernels(config), tensors, seed=seed, **problem.call_options())
    assert run.faults == ()
    for output in problem.outputs:
        error = measure_error(tensors[output.name], right.expected[output.name])
        assert error.within(right.bounds[output.name]), f"{output.name}, seed {seed}: {error}"


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_last_step_of_a_family_is_right_in_an_order_at_random(name) -> None:
    family = FAMILIES[name]
    check(family.fixed_config([*family.steps.values()][-1], Element.BF16), seed=1)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(2, 102))
@pytest.mark.parametrize("config", LEADING, ids=Config.short_form)
def test_a_leading_kernel_is_right_in_any_order(config, seed) -> None:
    check(config, seed)
