"""Kernels that take more than whole blocks are right for all that they declare, LSE included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_problems import CONFIGS, Problem, each, torch_dtype

import flash_attention
from flash_helpers.check.problems import DISTRIBUTIONS
from flash_helpers.check.reference import measure_lse_error
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.registry.supports import asked_for

pytestmark = pytest.mark.gpu

each_general_config = each([c for c in CONFIGS if c.supports.abilities or c.supports.causal])

ProblemMaker = Callable[[str, AttentionForward, torch.dtype], Problem]


def shapes_for(config: Config) -> Iterator[AttentionForward]:
    """The corners of what the config declares, then larger ones, of those that it takes."""
    yield from config.supports.corners()
    for len_q, len_k in ((1000, 1000), (2047, 1025), (1, 4097), (777, 3333), (4096, 4096)):
        for kv_heads in (1, 4, 8):
            shape = AttentionForward(
                3,
                8,
                len_q,
                dtype=config.dtype,
                len_k=len_k,
                kv_heads=kv_heads,
                causal=config.supports.causal,
                return_lse="return_lse" in config.supports.abilities,
            )
            if not config.refusal(shape):
                yield shape


def run(
    config: Config, shape: AttentionForward, case: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and, if it is asked for, lse, of memory full of NaN."""
    o, lse = case.poisoned_output(), None
    if shape.return_lse:
        lse = torch.full((shape.batch, shape.heads, shape.len_q), torch.nan, device=o.device)
    scale = None if shape.has_usual_scale else shape.softmax_scale
    flash_attention.forward(config, *case.inputs, o, softmax_scale=scale, lse=lse)
    return o, lse


def fault(shape: AttentionForward, case: Problem, o: torch.Tensor, lse: torch.Tensor | None) -> str:
    """What is wrong with the results; empty if they are right."""
    if text := case.fault(o):
        return text
    if lse is None:
        return ""
    error = measure_lse_error(lse, case.reference.lse)
    within = error <= case.reference.lse_bound
    return "" if within else f"LSE error {error} is over {case.reference.lse_bound}"


@each_general_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_output_and_lse_are_right_for_every_shape(
    config: Config, distribution: str, problem: ProblemMaker
) -> None:
    faults = []
    for shape in shapes_for(config):
        case = problem(distribution, shape, torch_dtype(config))
        if text := fault(shape, case, *run(config, shape, case)):
            faults.append(f"{shape}: {text}")
    assert faults == []


@each_general_config
def test_the_same_inputs_give_the_same_bits(config: Config, problem: ProblemMaker) -> None:
    *_, shape = shapes_for(config)
    case = problem("normal", shape, torch_dtype(config))
    first = run(config, shape, case)
    for _ in range(5):
        for again, once in zip(run(config, shape, case), first, strict=True):
            assert again is once is None or torch.equal(again, once)


@each_general_config
def test_what_lies_around_the_tensors_is_neither_read_nor_written(
    config: Config, problem: ProblemMaker
) -> None:
    margin = 256  # rows, more than a tile has
    for shape in shapes_for(config):
        case = problem("normal", shape, torch_dtype(config))
        frames = []
        for x in (*case.inputs, case.poisoned_output()):
            batch, length, heads, d_head = x.shape
            frames.append(x.new_full((batch, length + 2 * margin, heads, d_head), torch.nan))
            frames[-1][:, margin : margin + length] = x
        q, k, v, o = (frame[:, margin:-margin] for frame in frames)
        scale = None if shape.has_usual_scale else shape.softmax_scale
        flash_attention.forward(config, q, k, v, o, softmax_scale=scale)
        assert case.fault(o) == "", shape
        assert frames[3][:, :margin].isnan().all() and frames[3][:, -margin:].isnan().all()


@each_general_config
def test_attention_takes_what_the_config_takes(config: Config, problem: ProblemMaker) -> None:
    for shape in config.supports.corners():
        case = problem("normal", shape, torch_dtype(config))
        results = flash_attention.attention(
            *case.inputs,
            causal=shape.causal,
            softmax_scale=None if shape.has_usual_scale else shape.softmax_scale,
            return_lse=shape.return_lse,
        )
        o, lse = results if shape.return_lse else (results, None)
        assert fault(shape, case, o, lse) == "", (shape, asked_for(shape))


@each_general_config
def test_calls_with_the_same_queries_and_other_keys_do_not_mix(
    config: Config, problem: ProblemMaker
) -> None:
    """A call that is repeated from C is found by its q alone."""
    for len_k in 3 * (200, 333, 64):
        shape = AttentionForward(
            2, 4, 200, dtype=config.dtype, len_k=len_k, causal=config.supports.causal
        )
        case = problem("normal", shape, torch_dtype(config))
        assert fault(shape, case, *run(config, shape, case)) == "", shape
