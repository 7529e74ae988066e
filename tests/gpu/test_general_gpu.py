"""Kernels that take more than whole blocks are right for all that they declare, LSE included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from gpu_problems import CONFIGS, Problem, each, torch_dtype

import flash_attention
from flash_attention._varlen import varlen_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_forward.supports import asked_for
from flash_helpers.runtime.call import prepare

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
        lse = "return_lse" in config.supports.abilities
        shape = config.supports.problem(
            batch, heads, len_q, len_k, kv_heads=kv_heads, return_lse=lse
        )
        if not config.refusal(shape):
            yield shape


def run(
    config: Config,
    shape: AttentionForward,
    case: Problem,
    qkvo: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and, if it is asked for, lse, of memory full of NaN. qkvo: in place of the case's own."""
    found = dict(zip("qkvo", qkvo or (*case.inputs, case.poisoned_output()), strict=True))
    if shape.return_lse:
        rows = (shape.batch, shape.heads, shape.len_q)
        found["lse"] = torch.full(rows, torch.nan, device=found["o"].device)
    prepare(config, *shape.arranged({**found, **case.others}), **shape.call_options()).run()
    return found["o"], found.get("lse")


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
    return config.supports.problem(4, 16, 777, 777)


@pytest.mark.slow
@each_that_counts
def test_ten_thousand_calls_give_the_same_bits(config: Config, problem: ProblemMaker) -> None:
    shape = more_tiles_than_blocks(config)
    case = problem("normal", shape, torch_dtype(config))
    output = case.poisoned_output()
    first, _ = run(config, shape, case)
    case.check(first)
    differs = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(10_000):
        output.fill_(torch.nan)
        differs += (run(config, shape, case, (*case.inputs, output))[0] != first).any()
    assert differs.item() == 0


@each_that_counts
def test_two_streams_may_run_it_at_once(config: Config, problem: ProblemMaker) -> None:
    shape = more_tiles_than_blocks(config)
    cases = [problem(name, shape, torch_dtype(config)) for name in ("normal", "outliers")]
    streams = [torch.cuda.Stream() for _ in cases]
    outputs: list[tuple[Problem, torch.Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(25):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append((case, run(config, shape, case)[0]))
    torch.cuda.synchronize()
    assert [case.fault(output) for case, output in outputs] == [""] * len(outputs)


@each_that_counts
def test_the_counter_begins_anew_at_each_replay_of_a_graph(
    config: Config, problem: ProblemMaker
) -> None:
    shape = more_tiles_than_blocks(config)
    case = problem("normal", shape, torch_dtype(config))
    output = case.poisoned_output()
    run(config, shape, case)  # whatever has to be loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(config, shape, case, (*case.inputs, output))
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
        o, _ = run(config, shape, case, [frame[:, margin:-margin] for frame in frames])
        assert case.fault(o) == "", shape
        assert frames[3][:, :margin].isnan().all() and frames[3][:, -margin:].isnan().all()


@each_general_config
def test_attention_takes_what_the_config_takes(config: Config, problem: ProblemMaker) -> None:
    for shape in config.supports.corners():
        case = problem("normal", shape, torch_dtype(config))
        bounds = (shape.window_left, shape.window_right)
        options = {
            "causal": shape.causal,
            "window_size": tuple(-1 if bound is None else bound for bound in bounds),
            "softcap": shape.softcap,
            "sinks": case.others.get("sinks"),
            "softmax_scale": None if shape.has_usual_scale else shape.softmax_scale,
            "return_lse": shape.return_lse,
        }
        if shape.sequences:
            begins = (case.others["cu_seqlens_q"], case.others["cu_seqlens_k"])
            tokens = [x[0] for x in case.inputs]
            longest = (shape.len_q, shape.len_k)
            found = varlen_attention(*tokens, *begins, *longest, **options)
            results = [x[None] for x in found] if shape.return_lse else found[None]
        else:
            results = flash_attention.attention(*case.inputs, **options)
        o, lse = results if shape.return_lse else (results, None)
        assert fault(shape, case, o, lse) == "", (shape, asked_for(shape))


@each_general_config
def test_calls_with_the_same_queries_and_other_keys_do_not_mix(
    config: Config, problem: ProblemMaker
) -> None:
    """A call that is repeated from C is found by its q alone."""
    for len_k in 3 * (200, 333, 64):
        shape = config.supports.problem(2, 4, 200, len_k)
        case = problem("normal", shape, torch_dtype(config))
        assert fault(shape, case, *run(config, shape, case)) == "", shape
