"""Gradients of a diagonal matrix times a matrix on a GPU: right at every width, in rows of any
stride, and the same bits in 10,000 calls."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_problems import each
from matrices import spread

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.diagonal_backward.inputs import draw
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.diagonal_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.diagonal_backward.reference import reference
from flash_helpers.registry.diagonal_backward import (
    DIAGONAL_BACKWARD,
    DiagonalBackwardKernelConfig,
)

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is DIAGONAL_BACKWARD]
WIDTHS = (1, 2, 7, 8, 31, 33, 64, 127, 129, 1000, 1024, 2049, 4099, 70001)
ELEMENTS = 2**20  # of b at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 3000
CALLS = 10_000

each_config = each(CONFIGS)


def check(
    config: DiagonalBackwardKernelConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    dc: torch.Tensor,
    db: torch.Tensor,
) -> None:
    found = flash_attention.run(config, a, b, dc, None, db)
    problem = DiagonalBackward(*b.shape, config.dtype, db=True)
    wanted = reference(problem, {"a": a, "b": b, "dc": dc})
    for name, expected in wanted.expected.items():
        error = measure_error(found[name], expected)
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))


@each_config
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_right_in_rows_of_random_strides(
    config: DiagonalBackwardKernelConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = DiagonalBackward(min(MOST_ROWS, ELEMENTS // width + 1), width, config.dtype)
    a, b, dc = draw("normal", problem, cuda_device, seed=width).values()
    check(config, a, b, dc, torch.empty_like(b))
    laid = [spread(b, choose.randrange(20), choose.randrange(9)) for _ in range(3)]
    for matrix, values in zip(laid, (b, dc), strict=False):
        matrix.copy_(values)
    check(config, a, *laid)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: DiagonalBackwardKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    problem = DiagonalBackward(37, 1001, config.dtype)
    a, b, dc = draw(distribution, problem, cuda_device).values()
    check(config, a, b, dc, torch.empty_like(b))


@each_config
def test_every_call_gives_the_same_bits(
    config: DiagonalBackwardKernelConfig, cuda_device: torch.device
) -> None:
    problem = DiagonalBackward(64, 3001, config.dtype)
    inputs = draw("normal", problem, cuda_device).values()
    first = flash_attention.run(config, *inputs)["da"]
    differing = torch.zeros((), dtype=torch.int64, device=cuda_device)
    for _ in range(CALLS):
        differing += (flash_attention.run(config, *inputs)["da"] != first).sum()
    assert not differing.item()
