"""Gradients of softmax on a GPU: right at every width, in rows of any stride, the same bits in
10,000 calls, and in a graph."""

from __future__ import annotations

import math
import random

import pytest
import torch
from gpu_problems import each
from matrices import spread

import flash_attention
from flash_attention import ops
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.rows_backward import OPERATION
from flash_helpers.operations.rows_backward.baselines import run
from flash_helpers.operations.rows_backward.inputs import draw
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.rows_backward.reference import reference
from flash_helpers.registry.row_threads import MAX_WIDTH
from flash_helpers.registry.rows_backward import SoftmaxBackwardKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
WIDTHS = (1, 2, 7, 8, 31, 33, 64, 127, 129, 1000, 1024, 2049, 4099, 65536, MAX_WIDTH)
ELEMENTS = 2**20  # of y at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 3000
CALLS = 10_000

each_config = each(CONFIGS)


def check(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, dtype) -> None:
    wanted = reference(RowsBackward(*y.shape, dtype), {"y": y, "dy": dy})
    error = measure_error(dx, wanted.expected["dx"])
    assert error.within(wanted.bounds["dx"]), error.excess(wanted.bounds["dx"])


@each_config
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_right_in_rows_of_random_strides(
    config: SoftmaxBackwardKernelConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = RowsBackward(min(MOST_ROWS, ELEMENTS // width + 1), width, config.dtype)
    y, dy = draw("normal", problem, cuda_device, seed=width).values()
    check(y, dy, flash_attention.run(config, y, dy)["dx"], config.dtype)
    laid = [spread(y, choose.randrange(20), choose.randrange(9)) for _ in range(3)]
    for matrix, values in zip(laid, (y, dy), strict=False):
        matrix.copy_(values)
    flash_attention.run(config, *laid)
    check(*laid, config.dtype)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: SoftmaxBackwardKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    y, dy = draw(distribution, RowsBackward(37, 4099, config.dtype), cuda_device).values()
    check(y, dy, flash_attention.run(config, y, dy)["dx"], config.dtype)


@each_config
def test_every_call_gives_the_same_bits(
    config: SoftmaxBackwardKernelConfig, cuda_device: torch.device
) -> None:
    y, dy = draw("far_mean", RowsBackward(64, 3001, config.dtype), cuda_device).values()
    first = flash_attention.run(config, y, dy)["dx"]
    differing = torch.zeros((), dtype=torch.int64, device=cuda_device)
    for _ in range(CALLS):
        differing += (flash_attention.run(config, y, dy)["dx"] != first).sum()
    assert not differing.item()


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: SoftmaxBackwardKernelConfig, cuda_device: torch.device
) -> None:
    problem = RowsBackward(64, 3001, config.dtype)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "outliers"))
    y, dy = (x.clone() for x in first.values())
    flash_attention.run(config, y, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = flash_attention.run(config, y, dy)["dx"]
    for values in (first, second):
        y.copy_(values["y"])
        dy.copy_(values["dy"])
        dx.fill_(math.nan)
        graph.replay()
        check(y, dy, dx, config.dtype)


def test_the_gradient_of_the_function_is_that_of_the_definition(cuda_device: torch.device) -> None:
    x = torch.randn(300, 1001, device=cuda_device, requires_grad=True)
    y = ops.softmax(x)
    upstream = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, upstream)
    exact = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(torch.softmax(exact, -1), exact, upstream.double())
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("library", ["pytorch", "compiled_gradient", "liger_softmax"])
def test_libraries_compute_the_problem(library: str, cuda_device: torch.device) -> None:
    if library == "liger_softmax":
        pytest.importorskip("liger_kernel")
    problem = RowsBackward(64, 1000)
    y, dy = draw("normal", problem, cuda_device).values()
    check(y, dy, run(library, problem, {"y": y, "dy": dy})["dx"], problem.dtype)
