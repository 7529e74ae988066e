"""Merging attention on parts of the keys on a GPU: every head size and number of parts, bits that
repeat, graphs, and the functions that take these kernels."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_attention.flash_attn_3 import flash_attn_combine
from flash_attention.flashinfer import merge_state, merge_states
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element, get_listed_configs
from flash_helpers.operations.merge.baselines import merged
from flash_helpers.operations.merge.inputs import draw
from flash_helpers.operations.merge.problem import NATURAL, Merge
from flash_helpers.operations.merge.problems import DISTRIBUTIONS
from flash_helpers.operations.merge.reference import reference
from flash_helpers.registry.merge_states import MERGE_STATES, MergeKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is MERGE_STATES]
D_HEADS = (64, 96, 128, 192, 256, 8, 40)
PARTS = (1, 2, 3, 4, 5, 17, 64, 1024)
ELEMENTS = 2**20  # of the parts at least
OUTPUTS = ("o", "lse")

each_config = each(CONFIGS)


def check(problem: Merge, inputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    wanted = reference(problem, inputs)
    for name in OUTPUTS:
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))


@each_config
@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("parts", PARTS)
def test_every_head_size_is_right_with_any_number_of_parts(
    config: MergeKernelConfig, d_head: int, parts: int, cuda_device: torch.device
) -> None:
    rows = ELEMENTS // (parts * 6 * d_head) + 1
    problem = Merge(parts, rows, 6, d_head, config.dtype)
    inputs = draw("normal", problem, cuda_device, seed=parts)
    check(problem, inputs, flash_attention.run(config, *inputs.values()))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_and_bits_repeat(
    config: MergeKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    problem = Merge(7, 333, 5, 128, config.dtype)
    inputs = draw(distribution, problem, cuda_device)
    first = flash_attention.run(config, *inputs.values())
    check(problem, inputs, first)
    for _ in range(100):
        again = flash_attention.run(config, *inputs.values())
        assert all(torch.equal(first[x].nan_to_num(7.0), again[x].nan_to_num(7.0)) for x in OUTPUTS)


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: MergeKernelConfig, cuda_device: torch.device
) -> None:
    problem = Merge(4, 65, 8, 128, config.dtype)
    first, second = (draw(name, problem, cuda_device) for name in ("normal", "masked"))
    given = {name: x.clone() for name, x in first.items()}
    flash_attention.run(config, *given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attention.run(config, *given.values())
    for values in (first, second):
        for name, x in values.items():
            given[name].copy_(x)
        found["o"].fill_(math.nan)
        graph.replay()
        check(problem, values, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d_head", [128, 13])
def test_the_functions_merge_as_pytorch_does(
    dtype: torch.dtype, d_head: int, cuda_device: torch.device
) -> None:
    problem = Merge(4, 30, 3, d_head, Element.FP32)
    o, lse = draw("masked", problem, cuda_device).values()
    o = o.to(dtype)
    tolerance = max(1e-5, torch.finfo(dtype).eps)

    def compare(found: tuple[torch.Tensor, ...], log2_base: float, parts: int = 4) -> None:
        expected = merged(o[:parts], lse[:parts], log2_base)
        assert found[0].dtype == dtype
        for got, wanted in zip(found, expected, strict=True):
            wanted = wanted.view(got.shape).to(got.dtype)
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)

    compare(flash_attn_combine(o, lse), NATURAL)
    batched = o.view(4, 5, 6, 3, d_head), lse.view(4, 5, 6, 3)
    compare(flash_attn_combine(*batched), NATURAL)
    compare(merge_states(o.transpose(0, 1), lse.transpose(0, 1)), 1.0)
    compare(merge_state(o[0], lse[0], o[1], lse[1]), 1.0, parts=2)
    half, none = flash_attn_combine(o, lse, out_dtype=torch.float16, return_lse=False)
    assert none is None
    wanted = merged(o, lse, NATURAL)[0].half()
    torch.testing.assert_close(half, wanted, rtol=tolerance, atol=2e-3)
    o.nan_to_num_(0.0).requires_grad_()
    (gradient,) = torch.autograd.grad(flash_attn_combine(o[:, :-1], lse[:, :-1])[0].sum(), o)
    assert gradient.isfinite().all()
