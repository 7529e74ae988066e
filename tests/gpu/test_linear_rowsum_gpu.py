"""A linear layer, summed by row, on a GPU: right at sizes of any kind, the same bits in every call,
and in a graph."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_attention import ops
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import get_listed_configs
from flash_helpers.operations.linear_rowsum.inputs import draw
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.problems import DISTRIBUTIONS
from flash_helpers.operations.linear_rowsum.reference import linear_rowsum_reference
from flash_helpers.registry.linear_rowsum import LINEAR_ROWSUM, LinearRowsumKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is LINEAR_ROWSUM]
SIZES = (
    *((1, 1, 1), (3, 5, 2), (65, 17, 129), (100, 257, 33), (4, 4099, 1000), (1000, 64, 4097)),
    *((777, 2048, 1023), (2048, 1024, 2048)),
)
REPEATS = 200

each_config = each(CONFIGS)


def check(inputs: dict[str, torch.Tensor], y: torch.Tensor) -> None:
    wanted = linear_rowsum_reference(inputs)
    error = measure_error(y, wanted.expected["y"])
    assert error.within(wanted.bounds["y"]), error.excess(wanted.bounds["y"])


def run(config: LinearRowsumKernelConfig, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return flash_attention.run(config, inputs["x"], inputs["weight"], inputs.get("bias"))["y"]


@each_config
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_of_any_kind_are_right_in_rows_at_any_element(
    config: LinearRowsumKernelConfig, sizes: tuple[int, int, int], cuda_device: torch.device
) -> None:
    problem = LinearRowsum(*sizes, config.dtype, bias=sum(sizes) % 2 == 0)
    inputs = draw("normal", problem, cuda_device)
    check(inputs, first := run(config, inputs))
    moved = {n: _moved(x) if n in ("x", "weight") else x for n, x in inputs.items()}
    assert run(config, moved).equal(first)  # wherever rows begin


def _moved(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are 3 elements apart, from the second element on."""
    wide = torch.full((len(x), x.shape[1] + 3), math.nan, dtype=x.dtype, device=x.device)
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: LinearRowsumKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    inputs = draw(distribution, LinearRowsum(200, 1000, 777, config.dtype, bias=True), cuda_device)
    check(inputs, run(config, inputs))


@each(CONFIGS, once=True)
def test_every_call_gives_the_same_bits(
    config: LinearRowsumKernelConfig, cuda_device: torch.device
) -> None:
    inputs = draw("normal", LinearRowsum(512, 1024, 2048, config.dtype, bias=True), cuda_device)
    first = run(config, inputs)
    assert all(run(config, inputs).equal(first) for _ in range(REPEATS))


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: LinearRowsumKernelConfig, cuda_device: torch.device
) -> None:
    problem = LinearRowsum(64, 1000, 300, config.dtype, bias=True)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "far_mean"))
    inputs = {name: x.clone() for name, x in first.items()}
    run(config, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(config, inputs)
    for values in (first, second):
        for name, x in inputs.items():
            x.copy_(values[name])
        y.fill_(math.nan)
        graph.replay()
        check(values, y)


def test_the_function_and_its_gradients_are_those_of_the_definition(
    cuda_device: torch.device,
) -> None:
    inputs = draw("normal", LinearRowsum(200, 300, 100, bias=True), cuda_device)
    leaves = [x.requires_grad_() for x in inputs.values()]
    y = ops.linear_rowsum(*leaves)
    check({name: x.detach() for name, x in inputs.items()}, y.detach())
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = torch.autograd.grad(torch.nn.functional.linear(*exact).sum(), exact)
    for own, expected in zip(found, right, strict=True):
        torch.testing.assert_close(own, expected.to(own.dtype))
