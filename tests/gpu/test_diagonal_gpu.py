"""A diagonal matrix times a matrix on a GPU: the bits of PyTorch at every width, in rows of any
stride, and in a graph."""

from __future__ import annotations

import math
import random

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_attention import ops
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.diagonal.inputs import draw
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.problems import DISTRIBUTIONS
from flash_helpers.registry.diagonal import DIAGONAL, DiagonalKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is DIAGONAL]
WIDTHS = (1, 2, 7, 8, 31, 33, 64, 127, 129, 255, 257, 1000, 1023, 1025, 2049, 4099, 70001)
ELEMENTS = 2**20  # of b at least, in as many rows as that takes, up to MOST_ROWS
MOST_ROWS = 3000

each_config = each(CONFIGS)


def spread(x: torch.Tensor, gap: int, first: int) -> torch.Tensor:
    """Memory full of NaN, and in it a view of x's shape: rows that are `gap` elements apart, from
    an element `first` on."""
    rows, width = x.shape
    memory = torch.full((first + rows * (width + gap),), math.nan, dtype=x.dtype, device=x.device)
    return memory[first:].as_strided((rows, width), (width + gap, 1))


def check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """A product of two numbers is rounded once, by PyTorch and by the kernels."""
    expected = a[:, None] * b
    assert c.isnan().equal(expected.isnan())
    assert c.nan_to_num(7.0).equal(expected.nan_to_num(7.0))


@each_config
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_right_in_rows_of_random_strides(
    config: DiagonalKernelConfig, width: int, cuda_device: torch.device
) -> None:
    choose = random.Random(width)
    problem = Diagonal(min(MOST_ROWS, ELEMENTS // width + 1), width, config.dtype)
    a, values = draw("normal", problem, cuda_device, seed=width).values()
    b, c = (spread(values, choose.randrange(20), choose.randrange(9)) for _ in range(2))
    b.copy_(values)
    flash_attention.run(config, a, b, c)
    check(a, b, c)
    between = c.as_strided((c.stride(0) * len(c),), (1,), c.storage_offset())
    assert between.isnan().sum() == (c.stride(0) - width) * len(c)  # nothing is written there


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: DiagonalKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    a, b = draw(distribution, Diagonal(37, 4099, config.dtype), cuda_device).values()
    check(a, b, flash_attention.run(config, a, b)["c"])


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: DiagonalKernelConfig, cuda_device: torch.device
) -> None:
    problem = Diagonal(64, 3001, config.dtype)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "far_mean"))
    a, b = (x.clone() for x in first.values())
    flash_attention.run(config, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = flash_attention.run(config, a, b)["c"]
    for values in (first, second):
        a.copy_(values["a"])
        b.copy_(values["b"])
        c.fill_(math.nan)
        graph.replay()
        check(a, b, c)


@each(CONFIGS, once=True)
def test_a_grid_has_more_rows_than_other_dimensions_could(
    config: DiagonalKernelConfig, cuda_device: torch.device
) -> None:
    a, b = draw("normal", Diagonal(100_000, 3, config.dtype), cuda_device).values()
    check(a, b, flash_attention.run(config, a, b)["c"])


def test_the_function_and_its_gradients_are_those_of_the_definition(
    cuda_device: torch.device,
) -> None:
    a, b = (x.requires_grad_() for x in draw("normal", Diagonal(300, 1001), cuda_device).values())
    c = ops.diagonal_matmul(a, b)
    upstream = torch.randn_like(c)
    of_a, of_b = torch.autograd.grad(c, (a, b), upstream)
    check(a, b, c)
    check(a, upstream, of_b)
    torch.testing.assert_close(of_a, (upstream.double() * b.double()).sum(-1).to(a.dtype))
