"""Norms along rows on a GPU: right at every width, in rows of any stride, and in a graph."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.norm import OPERATION
from flash_helpers.operations.norm.baselines import run
from flash_helpers.operations.norm.inputs import draw
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.operations.norm.reference import reference
from flash_helpers.registry.norm import NormConfig
from flash_helpers.registry.row_threads import MAX_WIDTH

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
WIDTHS = (1, 2, 7, 8, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 2047, 2049)
LONG = (4096, 4099, 8192, 8193, 16385, 32773, 65536, MAX_WIDTH - 1, MAX_WIDTH)
ELEMENTS = 2**20  # of x at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 3000

each_config = each(CONFIGS)


def full(config: NormConfig, rows: int, width: int) -> Norm:
    """The problem with all tensors."""
    given = {"weight": True, "bias": True, "mean": not config.rms, "rstd": True}
    return Norm(rows, width, config.dtype, rms=config.rms, **given)


def spread(x: torch.Tensor, gap: int, first: int) -> torch.Tensor:
    """Memory full of NaN, and in it a view of x's shape: rows that are `gap` elements apart, from
    an element `first` on."""
    *rows, width = x.shape
    size = first + math.prod(rows) * (width + gap)
    memory = torch.full((size,), math.nan, dtype=x.dtype, device=x.device)
    return memory[first:].as_strided(x.shape, (width + gap, 1)[-x.ndim :])


def outputs_of(problem: Norm, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        x.name: torch.full(
            x.shape, math.nan, dtype=getattr(torch, x.element.torch_name), device=device
        )
        for x in problem.outputs
    }


def launch(config: NormConfig, problem: Norm, tensors: Mapping[str, torch.Tensor]) -> None:
    flash_attention.run(config, *problem.arranged(tensors), **problem.call_options())


def check(problem: Norm, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = reference(problem, tensors)
    for name, bound in wanted.bounds.items():
        error = measure_error(tensors[name], wanted.expected[name])
        assert error.within(bound), f"{name}: {error.excess(bound)}"


@each_config
@pytest.mark.parametrize("width", (*WIDTHS, *LONG))
def test_every_width_is_right_in_rows_of_random_strides(
    config: NormConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = full(config, min(MOST_ROWS, ELEMENTS // width + 1), width)
    tensors = outputs_of(problem, cuda_device)
    drawn = draw("normal", problem, cuda_device, seed=width)
    for name, values in drawn.items():
        gap = choose.randrange(20) if name == "x" else 0
        tensors[name] = spread(values, gap, choose.randrange(9)).copy_(values)
    tensors["y"] = spread(drawn["x"], choose.randrange(20), choose.randrange(9))
    launch(config, problem, tensors)
    check(problem, tensors)
    contiguous = outputs_of(problem, cuda_device)
    launch(config, problem, {**drawn, **contiguous})
    # the order of a sum depends on where a row begins, so that last bits differ
    check(problem, {**drawn, **contiguous})


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("width", (64, 1000, 4096, 70001))
def test_all_inputs_are_right(
    config: NormConfig, width: int, distribution: str, cuda_device: torch.device
) -> None:
    problem = full(config, 37, width)
    tensors = draw(distribution, problem, cuda_device) | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    check(problem, tensors)


@each_config
def test_nothing_is_written_between_rows(config: NormConfig, cuda_device: torch.device) -> None:
    problem = full(config, 101, 1001)
    tensors = draw("normal", problem, cuda_device) | outputs_of(problem, cuda_device)
    tensors["y"] = spread(tensors["x"], gap=5, first=3)
    launch(config, problem, tensors)
    memory = tensors["y"].as_strided((101 * 1006 + 3,), (1,), 0)
    assert memory.isnan().sum() == 101 * 5 + 3


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: NormConfig, cuda_device: torch.device
) -> None:
    problem = full(config, 64, 3001)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "outliers"))
    tensors = {name: x.clone() for name, x in first.items()} | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(config, problem, tensors)
    for values in (first, second):
        for name, x in values.items():
            tensors[name].copy_(x)
        tensors["y"].fill_(math.nan)
        graph.replay()
        check(problem, tensors)


@each(CONFIGS, once=True)
def test_a_grid_has_more_rows_than_other_dimensions_could(
    config: NormConfig, cuda_device: torch.device
) -> None:
    problem = full(config, 300_001, 3)
    tensors = draw("normal", problem, cuda_device) | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    check(problem, tensors)


@pytest.mark.parametrize("library", ["compiled_norm", "triton_norm", "liger_norm"])
@pytest.mark.parametrize("rms", [False, True])
def test_libraries_compute_the_problem(rms: bool, library: str, cuda_device: torch.device) -> None:
    if library == "liger_norm":
        pytest.importorskip("liger_kernel")
    problem = replace(OPERATION.measured(1000, rms=rms), rows=64)
    inputs = draw("normal", problem, cuda_device)
    check(problem, {**inputs, **run(library, problem, inputs)})
