"""Gradients of a linear layer, summed by row, on a GPU: right at sizes of any kind, in rows at any
element, the same bits in 10,000 calls, and in a graph."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_problems import each
from matrices import padded

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.linear_rowsum_backward.inputs import draw
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.linear_rowsum_backward.reference import reference
from flash_helpers.registry.linear_rowsum_backward import (
    LINEAR_ROWSUM_BACKWARD,
    LinearRowsumBackwardKernelConfig,
)

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is LINEAR_ROWSUM_BACKWARD]
GRADIENTS = ("dx", "dweight", "dbias")
ALL = dict.fromkeys(GRADIENTS, True)
SIZES = (
    *((1, 1, 1), (3, 5, 2), (65, 17, 129), (100, 257, 33), (4, 4099, 1000), (1000, 64, 4097)),
    *((777, 2048, 1023), (2048, 1024, 2048), (100_000, 64, 100), (100, 70_001, 300)),
)
CALLS = 10_000

each_config = each(CONFIGS)


def drawn(
    problem: LinearRowsumBackward, device: torch.device, distribution: str = "normal"
) -> dict[str, torch.Tensor]:
    """The inputs, and memory full of NaN for the gradients that the problem asks for."""
    found = draw(distribution, problem, device)
    for tensor in problem.outputs:
        found[tensor.name] = found["x"].new_full(tensor.shape, math.nan)
    return found


def run(
    config: LinearRowsumBackwardKernelConfig, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return flash_attention.run(config, *LinearRowsumBackward.arranged(tensors))


def check(problem: LinearRowsumBackward, tensors: dict[str, torch.Tensor]) -> None:
    wanted = reference(problem, tensors)
    for name, expected in wanted.expected.items():
        error = measure_error(tensors[name], expected)
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))


@each_config
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_of_any_kind_are_right_in_rows_at_any_element(
    config: LinearRowsumBackwardKernelConfig,
    sizes: tuple[int, int, int],
    cuda_device: torch.device,
) -> None:
    problem = LinearRowsumBackward(*sizes, config.dtype, **ALL)
    plain = drawn(problem, cuda_device)
    run(config, plain)
    check(problem, plain)
    moved = {
        name: padded(x, 3, n) if x.ndim == 2 else x.clone()
        for n, (name, x) in enumerate(drawn(problem, cuda_device).items())
    }
    run(config, moved)
    assert all(moved[name].equal(plain[name]) for name in GRADIENTS)  # wherever rows begin


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: LinearRowsumBackwardKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    problem = LinearRowsumBackward(200, 1000, 777, config.dtype, **ALL)
    tensors = drawn(problem, cuda_device, distribution)
    run(config, tensors)
    check(problem, tensors)


@each_config
@pytest.mark.parametrize("alone", GRADIENTS)
def test_a_gradient_alone_has_the_bits_that_it_has_beside_others(
    config: LinearRowsumBackwardKernelConfig, alone: str, cuda_device: torch.device
) -> None:
    sizes = (300, 520, 210)
    every = drawn(LinearRowsumBackward(*sizes, config.dtype, **ALL), cuda_device)
    single = drawn(LinearRowsumBackward(*sizes, config.dtype, **{alone: True}), cuda_device)
    assert run(config, single)[alone].equal(run(config, every)[alone])


@each_config
def test_every_call_gives_the_same_bits(
    config: LinearRowsumBackwardKernelConfig, cuda_device: torch.device
) -> None:
    tensors = drawn(LinearRowsumBackward(500, 136, 300, config.dtype, **ALL), cuda_device)
    first = {name: x.clone() for name, x in run(config, tensors).items()}
    differing = torch.zeros((), dtype=torch.int64, device=cuda_device)
    for _ in range(CALLS):
        found = run(config, tensors)
        for name in GRADIENTS:
            differing += (found[name] != first[name]).sum()
    assert not differing.item()


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: LinearRowsumBackwardKernelConfig, cuda_device: torch.device
) -> None:
    problem = LinearRowsumBackward(64, 1000, 300, config.dtype, **ALL)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "far_mean"))
    tensors = drawn(problem, cuda_device)
    run(config, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(config, tensors)
    for values in (first, second):
        for name, x in tensors.items():
            x.copy_(values[name]) if name in values else x.fill_(math.nan)
        graph.replay()
        check(problem, tensors)
