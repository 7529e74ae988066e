"""The kernels of decode, simulated, beside float64."""

from __future__ import annotations

import pytest
import torch
from tiers import committed, each
from zeroed_buffers import ZeroedBuffers

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import reference
from flash_helpers.registry.decode import ONE_LAUNCH
from flash_helpers.runtime.simulator import run_shipped

CONFIGS = committed(OPERATION)


def outputs(
    config: Config, problem: Decode, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs that the watched kernels write everywhere."""
    tensors = tensors_for(config, problem, inputs)
    run = run_shipped(config, tensors, **problem.call_options())
    assert config.short_form() in run.kernel and run.faults == ()
    return {tensor.name: tensors[tensor.name] for tensor in problem.outputs}


def assert_right_on(config: Config, problem: Decode, distribution: str = "normal") -> None:
    inputs = draw(distribution, problem)
    right = reference(problem, inputs)
    for name, found in outputs(config, problem, inputs).items():
        error = measure_error(found, right.expected[name])
        assert error.within(right.bounds[name]), f"{name} of {problem}, {distribution}: {error}"


@each(CONFIGS, once=True)
def test_every_kernel_is_right_for_one_key(config) -> None:
    assert_right_on(config, next(config.supports.corners()))


@each(CONFIGS, at_corners=True)
def test_every_kernel_is_right_at_the_corners_that_it_declares(config) -> None:
    _, *corners = config.supports.corners()  # the first is one key: see above
    for corner in corners:
        assert_right_on(config, corner)


@each(CONFIGS)
def test_every_kernel_is_right_on_keys_of_all_distributions(config) -> None:
    for distribution in OPERATION.distributions:
        problem = Decode(2, 4, d_head=config.d_head, len_k=100, kv_heads=2, dtype=config.dtype)
        assert_right_on(config, config.supports.adapted(problem), distribution)


@each([config for config in CONFIGS if ONE_LAUNCH in config.step.traits], once=True)
@pytest.mark.parametrize("sequences", [1, 3])
def test_counters_of_parts_are_zeros_again_after_a_call(config, sequences, monkeypatch) -> None:
    buffers = ZeroedBuffers(monkeypatch)
    keys = {"keys_per_piece": 2 * config.B_c} if config.supports.keys_per_piece else {}
    sizes = {"d_head": config.d_head, "dtype": config.dtype}
    assert_right_on(config, Decode(sequences, 2, kv_heads=1, len_k=7 * config.B_c, **sizes, **keys))
    assert len(buffers) == 1 and buffers.are_zeros()
