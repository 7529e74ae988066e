"""Kernels that take more than whole blocks are right for all that they declare, LSE included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from gpu_problems import CONFIGS, Problem, each, torch_dtype

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_forward.supports import asked_for

pytestmark = pytest.mark.gpu

GENERAL = [c for c in CONFIGS if c.supports.abilities or c.supports.causal]
each_general_config = each(GENERAL)
# whose tiles come from a counter: which block computes which is another matter in each call
each_that_counts = each([c for c in GENERAL if c.supports.causal and c.step == GENERAL[-1].step])

ProblemMaker = Callable[[str, AttentionForward, torch.dtype], Problem]


# Batch, heads, those of K and V, queries, keys.
SIZES = (
    *((1, 5, 5, 63, 63), (1, 7, 7, 65, 65), (1, 32, 8, 65, 65), (1, 32, 1, 63, 63)),
    *((1, 2, 2, 4000, 4000), (1, 2, 1, 8191, 8191)),
    *(
        (3, 8, kv_heads, *lengths)
        for lengths in ((1000, 1000), (2047, 1025), (1, 4097), (777, 3333), (4096, 4096))
        for kv_heads in (1, 4, 8)
    ),
)


def shapes_for(config: Config) -> Iterator[AttentionForward]:
    """The corners of what the config declares, then other sizes and larger ones, of those that it
    takes."""
    yield from config.supports.corners()
    for batch, heads, kv_heads, len_q, len_k in SIZES:
        shape = AttentionForward(
            batch,
            heads,
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
    """Faults of the results; empty if they are right."""
    if text := case.fault(o):
        return text
    if lse is None:
        return ""
    error = measure_error(lse, case.reference.expected["lse"])
    bound = case.reference.bounds["lse"]
    return "" if error.within(bound) else f"LSE: {error} is over {bound}"


def faults_of(
    config: Config, distribution: str, shapes: Iterable[AttentionForward], problem: ProblemMaker
) -> list[str]:
    """The shapes at which the results are wrong, with their faults."""
    faults = []
    for shape in shapes:
        case = problem(distribution, shape, torch_dtype(config))
        if text := fault(shape, case, *run(config, shape, case)):
            faults.append(f"{shape}: {text}")
    return faults


@each(CONFIGS)
def test_output_and_lse_are_right_at_the_corners(config: Config, problem: ProblemMaker) -> None:
    assert faults_of(config, "normal", config.supports.corners(), problem) == []


@each(GENERAL, all_in_matrix=True)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_output_and_lse_are_right_for_every_shape(
    config: Config, distribution: str, problem: ProblemMaker
) -> None:
    assert faults_of(config, distribution, shapes_for(config), problem) == []


@each_general_config
def test_the_same_inputs_give_the_same_bits(config: Config, problem: ProblemMaker) -> None:
    *_, shape = shapes_for(config)
    case = problem("normal", shape, torch_dtype(config))
    first = run(config, shape, case)
    for _ in range(5):
        for again, once in zip(run(config, shape, case), first, strict=True):
            assert again is once is None or torch.equal(again, once)


def more_tiles_than_blocks(config: Config) -> AttentionForward:
    """320 tiles of 192 rows, 448 of 128, of unequal work."""
    return AttentionForward(4, 16, 777, dtype=config.dtype, causal=True)


@pytest.mark.slow
@each_that_counts
def test_ten_thousand_calls_give_the_same_bits(config: Config, problem: ProblemMaker) -> None:
    case = problem("normal", more_tiles_than_blocks(config), torch_dtype(config))
    output = case.poisoned_output()
    first = flash_attention.forward(config, *case.inputs)
    case.check(first)
    differs = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(10_000):
        output.fill_(torch.nan)
        differs += (flash_attention.forward(config, *case.inputs, output) != first).any()
    assert differs.item() == 0


@each_that_counts
def test_two_streams_may_run_it_at_once(config: Config, problem: ProblemMaker) -> None:
    cases = [
        problem(distribution, more_tiles_than_blocks(config), torch_dtype(config))
        for distribution in ("normal", "outliers")
    ]
    streams = [torch.cuda.Stream() for _ in cases]
    outputs: list[tuple[Problem, torch.Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(25):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append((case, flash_attention.forward(config, *case.inputs)))
    torch.cuda.synchronize()
    assert [case.fault(output) for case, output in outputs] == [""] * len(outputs)


@each_that_counts
def test_the_counter_begins_anew_at_each_replay_of_a_graph(
    config: Config, problem: ProblemMaker
) -> None:
    case = problem("normal", more_tiles_than_blocks(config), torch_dtype(config))
    output = case.poisoned_output()
    flash_attention.forward(config, *case.inputs)  # whatever has to be loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attention.forward(config, *case.inputs, output)
    for _ in range(3):
        output.fill_(torch.nan)
        graph.replay()
        case.check(output)


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
