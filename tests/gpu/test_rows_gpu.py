"""Softmax along rows on a GPU: right at every width, in rows of any stride, and in a graph."""

from __future__ import annotations

import math
import random

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.rows import OPERATION
from flash_helpers.operations.rows.baselines import run
from flash_helpers.operations.rows.inputs import draw
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import DISTRIBUTIONS
from flash_helpers.operations.rows.reference import softmax_reference
from flash_helpers.registry.row_threads import MAX_WIDTH
from flash_helpers.registry.rows import SoftmaxKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
WIDTHS = (1, 2, 7, 8, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 2047, 2049)
LONG = (4096, 4099, 8192, 8193, 16385, 32773, 65536, MAX_WIDTH - 1, MAX_WIDTH)
ELEMENTS = 2**20  # of x at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 3000

each_config = each(CONFIGS)


def spread(x: torch.Tensor, gap: int, first: int) -> torch.Tensor:
    """Memory full of NaN, and in it a view of x's shape: rows that are `gap` elements apart, from
    an element `first` on."""
    rows, width = x.shape
    memory = torch.full((first + rows * (width + gap),), math.nan, dtype=x.dtype, device=x.device)
    return memory[first:].as_strided((rows, width), (width + gap, 1))


def check(x: torch.Tensor, y: torch.Tensor) -> None:
    wanted = softmax_reference(x)
    error = measure_error(y, wanted.expected["y"])
    assert error.within(wanted.bounds["y"]), error.excess(wanted.bounds["y"])


@each_config
@pytest.mark.parametrize("width", (*WIDTHS, *LONG))
def test_every_width_is_right_in_rows_of_random_strides(
    config: SoftmaxKernelConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = Rows(min(MOST_ROWS, ELEMENTS // width + 1), width, config.dtype)
    values = draw("normal", problem, cuda_device, seed=width)["x"]
    x, y = (spread(values, choose.randrange(20), choose.randrange(9)) for _ in range(2))
    x.copy_(values)
    flash_attention.run(config, x, y)
    check(x, y)
    assert flash_attention.run(config, x)["y"].equal(y)  # whatever the strides of y are


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("width", (1000, 4096, 70001))
def test_all_inputs_are_right(
    config: SoftmaxKernelConfig, width: int, distribution: str, cuda_device: torch.device
) -> None:
    x = draw(distribution, Rows(37, width, config.dtype), cuda_device)["x"]
    check(x, flash_attention.run(config, x)["y"])


@each_config
def test_nothing_is_written_between_rows(
    config: SoftmaxKernelConfig, cuda_device: torch.device
) -> None:
    x = draw("normal", Rows(100, 1001, config.dtype), cuda_device)["x"]
    y = spread(x, gap=5, first=3)
    flash_attention.run(config, x, y)
    memory = y.as_strided((100 * 1006 + 3,), (1,), 0)
    assert memory.isnan().sum() == 100 * 5 + 3


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: SoftmaxKernelConfig, cuda_device: torch.device
) -> None:
    problem = Rows(64, 3001, config.dtype)
    first, second = (draw(name, problem, cuda_device)["x"] for name in ("normal", "outliers"))
    x, given = first.clone(), torch.full_like(first, math.nan)
    flash_attention.run(config, x, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attention.run(config, x, given)
        made = flash_attention.run(config, x)["y"]
    for values in (first, second):
        x.copy_(values)
        given.fill_(math.nan)
        made.fill_(math.nan)
        graph.replay()
        check(values, given)
        check(values, made)


@each(CONFIGS, once=True)
def test_a_grid_has_more_rows_than_other_dimensions_could(
    config: SoftmaxKernelConfig, cuda_device: torch.device
) -> None:
    x = draw("normal", Rows(100_000, 3, config.dtype), cuda_device)["x"]
    check(x, flash_attention.run(config, x)["y"])


@pytest.mark.parametrize("library", ["compiled_softmax", "triton_softmax", "liger_softmax"])
def test_libraries_compute_the_problem(library: str, cuda_device: torch.device) -> None:
    if library == "liger_softmax":
        pytest.importorskip("liger_kernel")
    problem = Rows(64, 1000)
    inputs = draw("normal", problem, cuda_device)
    check(inputs["x"], run(library, problem, inputs)["y"])
