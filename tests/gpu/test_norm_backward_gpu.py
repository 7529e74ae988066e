"""The backward pass of norms on a GPU: right at every width, in rows of any stride, in a graph, and
with the same bits in each call."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from gpu_problems import all_runs_agree, each
from matrices import spread

import flash_attention
from flash_attention import ops
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element, get_listed_configs
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.operations.norm_backward import OPERATION
from flash_helpers.operations.norm_backward.baselines import run
from flash_helpers.operations.norm_backward.inputs import draw
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.reference import reference
from flash_helpers.registry.norm_backward import NormBackwardKernels
from flash_helpers.registry.norm_backward_cluster import NORM_BACKWARD_CLUSTER
from flash_helpers.registry.row_threads import MAX_WIDTH

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
WIDTHS = (1, 7, 8, 31, 33, 64, 127, 129, 256, 257, 1000, 1024, 2047, 2048, 3001, 4096)
LONG = (4099, 8192, 16384, 16385, 32776, 65536, MAX_WIDTH - 1, MAX_WIDTH)
ELEMENTS = 2**21  # of x at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 6000

each_config = each(CONFIGS)
repeated = pytest.mark.parametrize(
    "times", [20, pytest.param(10_000, marks=pytest.mark.matrix("layer_norm_backward"))]
)


def full(config: NormBackwardKernels, rows: int, width: int) -> NormBackward:
    """The problem with all tensors."""
    given = {"weight": True, "dweight": True, "dbias": not config.is_rms}
    return NormBackward(rows, width, config.dtype, rms=config.is_rms, **given)


def outputs_of(problem: NormBackward, device: torch.device) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, problem.dtype.torch_name)
    return {
        x.name: torch.full(x.shape, math.nan, dtype=dtype, device=device) for x in problem.outputs
    }


def launch(
    config: NormBackwardKernels, problem: NormBackward, tensors: Mapping[str, torch.Tensor]
) -> None:
    flash_attention.run(config, *problem.arranged(tensors))


def check(problem: NormBackward, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = reference(problem, tensors)
    for name, bound in wanted.bounds.items():
        error = measure_error(tensors[name], wanted.expected[name])
        assert error.within(bound), f"{name}: {error.excess(bound)}"


@each_config
@pytest.mark.parametrize("width", (*WIDTHS, *LONG))
def test_every_width_is_right_in_rows_of_random_strides(
    config: NormBackwardKernels, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = full(config, min(MOST_ROWS, ELEMENTS // width + 1), width)
    drawn = draw("normal", problem, cuda_device, seed=width)
    contiguous = drawn | outputs_of(problem, cuda_device)
    launch(config, problem, contiguous)
    check(problem, contiguous)
    tensors = drawn | outputs_of(problem, cuda_device)
    for name in ("dy", "x", "weight"):
        gap = choose.randrange(20) if name != "weight" else 0
        tensors[name] = spread(drawn[name], gap, choose.randrange(9)).copy_(drawn[name])
    tensors["dx"] = spread(drawn["x"], choose.randrange(20), choose.randrange(9))
    launch(config, problem, tensors)
    check(problem, tensors)
    if config.family is NORM_BACKWARD_CLUSTER:
        return  # a cluster, or a block of it, has a row: that depends on where rows begin
    for tensor in problem.outputs:  # a thread has the same columns wherever a row begins
        assert tensors[tensor.name].equal(contiguous[tensor.name]), tensor.name


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("width", (64, 1000, 4096, 70001))
def test_all_inputs_are_right(
    config: NormBackwardKernels, width: int, distribution: str, cuda_device: torch.device
) -> None:
    problem = full(config, 37, width)
    tensors = draw(distribution, problem, cuda_device) | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    check(problem, tensors)


@each_config
@repeated
@pytest.mark.parametrize(
    ("rows", "width"), [(5000, 64), (1500, 1000), (301, 4096), (1001, 16384), (20, 40000)]
)
def test_each_call_gives_the_same_bits(
    config: NormBackwardKernels, rows: int, width: int, times: int, cuda_device: torch.device
) -> None:
    problem = full(config, rows, width)
    tensors = draw("outliers", problem, cuda_device) | outputs_of(problem, cuda_device)
    outputs = {tensor.name: tensors[tensor.name] for tensor in problem.outputs}
    assert all_runs_agree(lambda: launch(config, problem, tensors), outputs, times)
    check(problem, tensors)


@each_config
def test_nothing_is_written_between_rows(
    config: NormBackwardKernels, cuda_device: torch.device
) -> None:
    problem = full(config, 101, 1001)
    tensors = draw("normal", problem, cuda_device) | outputs_of(problem, cuda_device)
    tensors["dx"] = spread(tensors["x"], gap=5, first=3)
    launch(config, problem, tensors)
    memory = tensors["dx"].as_strided((101 * 1006 + 3,), (1,), 0)
    assert memory.isnan().sum() == 101 * 5 + 3


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: NormBackwardKernels, cuda_device: torch.device
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
        tensors["dx"].fill_(math.nan)
        graph.replay()
        check(problem, tensors)


@each(CONFIGS, once=True)
def test_many_short_rows_are_right(config: NormBackwardKernels, cuda_device: torch.device) -> None:
    problem = full(config, 300_001, 3)
    tensors = draw("normal", problem, cuda_device) | outputs_of(problem, cuda_device)
    launch(config, problem, tensors)
    check(problem, tensors)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("library", ["pytorch_norm", "compiled_norm", "liger_norm"])
def test_libraries_compute_the_problem(library: str, rms: bool, cuda_device: torch.device) -> None:
    if library == "liger_norm":
        pytest.importorskip("liger_kernel")
    problem = replace(OPERATION.measured(1024, rms=rms), rows=64, dtype=Element.FP32)
    inputs = draw("normal", problem, cuda_device)
    check(problem, {**inputs, **run(library, problem, inputs)})


@pytest.mark.parametrize("element", (Element.BF16, Element.FP32), ids=lambda x: x.short)
def test_gradients_of_ops_are_those_of_the_kernels(
    element: Element, cuda_device: torch.device
) -> None:
    problem = NormBackward(777, 1024, element, weight=True, dweight=True, dbias=True)
    inputs = draw("normal", problem, cuda_device)
    dy, x, weight = (inputs[name] for name in ("dy", "x", "weight"))
    leaves = [leaf.requires_grad_() for leaf in (x.clone(), weight.clone(), weight * 0)]
    y = ops.layer_norm(leaves[0], (1024,), *leaves[1:])
    found = torch.autograd.grad(y, leaves, dy)
    check(problem, {**inputs, **dict(zip(("dx", "dweight", "dbias"), found, strict=True))})
