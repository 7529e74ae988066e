"""Norms of a sum on a GPU: right at every width, in rows of any stride, in a graph, and with the
same bits in each call."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
import torch
from gpu_problems import each
from matrices import spread

import flash_attention
from flash_attention import ops
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element, get_listed_configs
from flash_helpers.operations.add_norm import OPERATION
from flash_helpers.operations.add_norm.baselines import run
from flash_helpers.operations.add_norm.inputs import draw
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.add_norm.reference import reference
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.registry.add_norm import AddNormKernelConfig
from flash_helpers.registry.row_threads import MAX_WIDTH

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
WIDTHS = (1, 7, 8, 31, 33, 64, 129, 256, 1000, 1024, 2047, 4096, 8192, 16385, 65536, MAX_WIDTH)
ELEMENTS = 2**21  # of x at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 6000

each_config = each(CONFIGS)


def full(config: AddNormKernelConfig, rows: int, width: int) -> AddNorm:
    """The problem with all tensors."""
    given = {"weight": True, "bias": True, "mean": not config.rms, "rstd": True}
    return AddNorm(rows, width, config.dtype, rms=config.rms, **given)


def outputs_of(problem: AddNorm, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        x.name: torch.full(
            x.shape, math.nan, dtype=getattr(torch, x.element.torch_name), device=device
        )
        for x in problem.outputs
    }


def launch(
    config: AddNormKernelConfig, problem: AddNorm, tensors: Mapping[str, torch.Tensor]
) -> None:
    flash_attention.run(config, *problem.arranged(tensors), **problem.call_options())


def check(problem: AddNorm, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = reference(problem, tensors)
    for name, bound in wanted.bounds.items():
        error = measure_error(tensors[name], wanted.expected[name])
        assert error.within(bound), f"{name}: {error.excess(bound)}"


@each_config
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_right_in_rows_of_random_strides(
    config: AddNormKernelConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = full(config, min(MOST_ROWS, ELEMENTS // width + 1), width)
    drawn = draw("normal", problem, cuda_device, seed=width)
    contiguous = drawn | outputs_of(problem, cuda_device)
    launch(config, problem, contiguous)
    check(problem, contiguous)
    tensors = drawn | outputs_of(problem, cuda_device)
    for name, values in drawn.items():
        gap = choose.randrange(20) if values.ndim > 1 else 0
        tensors[name] = spread(values, gap, choose.randrange(9)).copy_(values)
    for name in ("y", "sum"):
        tensors[name] = spread(drawn["x"], choose.randrange(20), choose.randrange(9))
    launch(config, problem, tensors)
    for tensor in problem.outputs:  # a thread has the same columns wherever a row begins
        assert tensors[tensor.name].equal(contiguous[tensor.name]), tensor.name


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("width", (64, 1000, 4096, 70001))
def test_all_inputs_are_right(
    config: AddNormKernelConfig, width: int, distribution: str, cuda_device: torch.device
) -> None:
    problem = full(config, 37, width)
    tensors = draw(distribution, problem, cuda_device) | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    check(problem, tensors)


@each_config
@pytest.mark.parametrize("name", ["y", "sum"])
def test_nothing_is_written_between_rows(
    config: AddNormKernelConfig, name: str, cuda_device: torch.device
) -> None:
    problem = full(config, 101, 1001)
    tensors = draw("normal", problem, cuda_device) | outputs_of(problem, cuda_device)
    tensors[name] = spread(tensors["x"], gap=5, first=3)
    launch(config, problem, tensors)
    memory = tensors[name].as_strided((101 * 1006 + 3,), (1,), 0)
    assert memory.isnan().sum() == 101 * 5 + 3


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: AddNormKernelConfig, cuda_device: torch.device
) -> None:
    problem = full(config, 640, 3000)
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


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("library", ["pytorch_add_norm", "compiled_add_norm"])
def test_libraries_compute_the_problem(library: str, rms: bool, cuda_device: torch.device) -> None:
    problem = AddNorm(64, 1024, Element.FP32, rms=rms, weight=True, bias=not rms)
    inputs = draw("normal", problem, cuda_device)
    check(problem, {**inputs, **run(library, problem, inputs)})


@pytest.mark.parametrize("element", (Element.BF16, Element.FP32), ids=lambda x: x.short)
def test_ops_add_a_residual(element: Element, cuda_device: torch.device) -> None:
    problem = AddNorm(777, 1024, element, weight=True, bias=True)
    inputs = draw("normal", problem, cuda_device)
    x, residual, weight, bias = inputs.values()
    y, total = ops.layer_norm(x, (1024,), weight, bias, problem.eps, residual=residual)
    check(problem, {**inputs, "y": y, "sum": total})
