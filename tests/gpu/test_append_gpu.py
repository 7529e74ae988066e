"""Append to a cache with rotary embedding on a GPU: PyTorch's bits on random problems, with both
caches in one tensor, in graphs, and by the function that takes the kernel."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_attention import _append, _kvcache
from flash_attention.flash_attn_3 import flash_attn_with_kvcache
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element, get_listed_configs
from flash_helpers.operations.append import OPERATION
from flash_helpers.operations.append.baselines import run, write
from flash_helpers.operations.append.inputs import draw
from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.problems import DISTRIBUTIONS, measured
from flash_helpers.operations.append.reference import reference
from flash_helpers.registry.append import APPEND, AppendKernelConfig

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family is APPEND]
CACHES = ("k_cache", "v_cache")
PROBLEMS = 100
Tensors = dict[str, torch.Tensor]

each_config = each(CONFIGS)


def filled(problem: Append, device: torch.device, kind: str = "normal", seed: int = 0) -> Tensors:
    """The inputs, caches that hold something, and an output for q."""
    found = draw(kind, problem, device, seed)
    if problem.heads:
        found["q_rotated"] = torch.full_like(found["q"], torch.nan)
    shape = problem.tensor("k_cache").shape
    return found | {name: torch.randn(shape, device=device).to(found["k"].dtype) for name in CACHES}


def check(config: AppendKernelConfig, problem: Append, tensors: Tensors) -> None:
    """Compare with float64 and, bit by bit, with PyTorch."""
    wanted = reference(problem, tensors)
    plain = write(problem, tensors, *(tensors[name].clone() for name in CACHES))
    found = flash_attention.run(config, *problem.arranged(tensors), **problem.call_options())
    for name, expected in wanted.expected.items():
        error = measure_error(found[name], expected)
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))
        got, right = (x.contiguous().view(torch.int16) for x in (found[name], plain[name]))
        assert ((got == right) | (found[name].isnan() & plain[name].isnan())).all(), name


def random_problem(choose: random.Random, dtype: Element) -> Append:
    d_head, page_size = 8 * choose.randint(1, 32), choose.choice((0, 1, 3, 16, 64))
    rotary_dim = choose.choice((0, *range(16, d_head + 1, 16)))
    batch, blocks = choose.randint(1, 40), choose.randint(1, 5)
    room = blocks * (page_size or choose.randint(1, 200))
    has_q = rotary_dim > 0 and choose.random() < 0.7
    return Append(
        *(batch, choose.randint(1, 9), choose.randint(1, min(room, 20)), room, d_head, dtype),
        page_size=page_size,
        pages=batch * blocks + choose.randint(0, 9) if page_size else 0,
        caches=0 if page_size else choose.choice((0, batch, batch + 3)),
        rotary_dim=rotary_dim,
        interleaved=choose.random() < 0.5,
        fp32_tables=choose.random() < 0.5,
        rotary_seqlens=rotary_dim > 0 and choose.random() < 0.5,
        heads=choose.randint(1, 40) if has_q else 0,
        len_q=choose.randint(1, 20) if has_q else 0,
        in_order=choose.random() < 0.5,
    )


@each_config
def test_random_problems_are_right(config: AppendKernelConfig, cuda_device: torch.device) -> None:
    choose = random.Random(config.short_form())
    for number in range(PROBLEMS):
        problem = random_problem(choose, config.dtype)
        check(config, problem, filled(problem, cuda_device, seed=number))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: AppendKernelConfig, distribution: str, cuda_device: torch.device
) -> None:
    problem = replace(measured(1, 16), dtype=config.dtype)
    check(config, problem, filled(problem, cuda_device, distribution))


@each_config
def test_both_caches_may_lie_in_one_tensor(
    config: AppendKernelConfig, cuda_device: torch.device
) -> None:
    problem = replace(measured(1, 33), dtype=config.dtype)
    tensors = filled(problem, cuda_device)
    both = torch.stack([tensors[name].transpose(1, 2) for name in CACHES], 1)
    tensors |= {name: both[:, n].transpose(1, 2) for n, name in enumerate(CACHES)}
    check(config, problem, tensors)


@each_config
def test_a_cache_of_more_than_2_to_the_31_elements(
    config: AppendKernelConfig, cuda_device: torch.device
) -> None:
    problem = Append(2, 1, 1, 2**24 + 8, 128, config.dtype, rotary_dim=16, positions=4)
    tensors = draw("normal", problem, cuda_device)
    shape = problem.tensor("k_cache").shape
    caches = [torch.zeros(shape, dtype=tensors["k"].dtype, device=cuda_device) for _ in CACHES]
    tensors |= dict(zip(CACHES, caches, strict=True))
    flash_attention.run(config, *problem.arranged(tensors), **problem.call_options())
    assert torch.equal(caches[1][1, -1], tensors["v"][1, 0])
    assert torch.equal(caches[1][0, 0], tensors["v"][0, 0])
    assert int(caches[1].count_nonzero()) == int(tensors["v"].count_nonzero())


@each_config
def test_a_graph_finds_the_lengths_that_are_there_when_it_runs(
    config: AppendKernelConfig, cuda_device: torch.device
) -> None:
    problem = replace(measured(1, 16), dtype=config.dtype)
    tensors = filled(problem, cuda_device)
    tensors["cache_seqlens"].zero_()
    given = problem.arranged(tensors)
    before = {name: tensors[name].clone() for name in CACHES}
    flash_attention.run(config, *given, **problem.call_options())  # compiled before the capture
    for name in CACHES:
        tensors[name].copy_(before[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attention.run(config, *given, **problem.call_options())
    for _ in range(5):
        write(problem, tensors, *before.values())
        graph.replay()
        tensors["cache_seqlens"] += 1
    for name in CACHES:
        assert torch.equal(tensors[name], before[name])


def test_libraries_leave_what_the_reference_has(cuda_device: torch.device) -> None:
    problem = measured(1, 16)
    inputs = draw("normal", problem, cuda_device)
    wanted = reference(problem, inputs)
    for library in OPERATION.libraries:
        found = run(library, problem, inputs)
        if library == OPERATION.ceiling:
            continue
        for name, bound in wanted.bounds.items():
            assert measure_error(found[name], wanted.expected[name]).within(bound), library


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("in_one", [False, True])
def test_the_function_gives_the_same_with_the_kernel(
    interleaved: bool, causal: bool, in_one: bool, cuda_device: torch.device, monkeypatch
) -> None:
    problem = replace(measured(2, 16), interleaved=interleaved)
    tensors = filled(problem, cuda_device)
    if in_one:
        both = torch.stack([tensors[name] for name in CACHES], 1)
        tensors |= dict(zip(CACHES, both.unbind(1), strict=True))

    def call(caches: list[torch.Tensor]) -> torch.Tensor:
        return flash_attn_with_kvcache(
            *(tensors["q"], *caches, tensors["k"], tensors["v"]),
            rotary_cos=tensors["cos"],
            rotary_sin=tensors["sin"],
            rotary_interleaved=interleaved,
            cache_seqlens=tensors["cache_seqlens"],
            page_table=tensors["block_table"],
            causal=causal,
        )

    copies = [tensors[name].clone() for name in CACHES]
    with monkeypatch.context() as patch:
        patch.setattr(_append, "is_taken", lambda *_: False)
        expected = call(copies)
    monkeypatch.setattr(_kvcache, "_append", None)  # that of PyTorch
    caches = [tensors[name] for name in CACHES]
    assert torch.equal(call(caches), expected)
    for cache, copy in zip(caches, copies, strict=True):
        assert torch.equal(cache, copy)
