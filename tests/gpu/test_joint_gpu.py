"""Joint attention of a sequence and its context on a GPU: all sizes of the target, slices of packed
projections, bits that repeat, and graphs."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_problems import each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import FAMILIES, Config, Element, get_listed_configs
from flash_helpers.operations.joint_attention import OPERATION, baselines
from flash_helpers.operations.joint_attention.grid import competing
from flash_helpers.operations.joint_attention.inputs import draw
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.problems import DISTRIBUTIONS, measured
from flash_helpers.operations.joint_attention.reference import reference
from flash_helpers.registry.joint import ALL_KEYS, D_HEADS, JOINT
from flash_helpers.registry.joint_cluster import JOINT_CLUSTER

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
STEPS = {**JOINT.steps, **JOINT_CLUSTER.steps}
HEADS = 8
TILES = [
    JOINT.fixed_config(JOINT.steps[step], Element.BF16).replace(**fields)
    for step, fields in competing(measured(186))
    if "columns" in fields
]

TWO_KERNELS = [
    JOINT.fixed_config(JOINT.steps[step], Element.BF16).replace(**fields)
    for step, fields in competing(measured(186))
    if step in JOINT.steps and "columns" not in fields
]
CLUSTERS = [
    JOINT_CLUSTER.fixed_config(JOINT_CLUSTER.steps[step], Element.BF16).replace(**fields)
    for length in (64, 186, 450, 512)
    for step, fields in competing(measured(length))
    if step in JOINT_CLUSTER.steps
]

# steps that keep m, the maximum of a row's first keys, while P does not overflow
FIRST_MAXIMUM = [
    step
    for step in STEPS
    if ALL_KEYS in STEPS[step].traits or STEPS[step].family == JOINT_CLUSTER.name
]

each_config = each(CONFIGS)


def taking(config: Config, problem: JointAttention) -> Config:
    """The config, or one of its variants, which has more keys, that takes the problem."""
    return next(variant for variant in config.variants() if not variant.refusal(problem))


def run(
    config: Config, problem: JointAttention, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs; that of the context begins as NaN."""
    given = dict(inputs)
    if problem.has("context_o"):
        shape = problem.tensor("context_o").shape
        given["context_o"] = inputs["q"].new_full(shape, math.nan)
    found = flash_attention.run(config, *problem.arranged(given), **problem.call_options())
    return {tensor.name: found[tensor.name] for tensor in problem.outputs}


def check(
    problem: JointAttention, inputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    wanted = reference(problem, inputs)
    for name, bound in wanted.bounds.items():
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))


@each_config
@pytest.mark.parametrize("length", [1, 64, 186, 512])
@pytest.mark.parametrize("context", [0, 1, 64, 256])
def test_the_sizes_of_the_target_are_right(
    config: Config, length: int, context: int, cuda_device: torch.device
) -> None:
    for has_queries in (True, False) if context else (True,):
        problem = JointAttention(
            *(3, HEADS, length, 16, config.dtype),
            context=context,
            context_queries=has_queries,
            rotary=True,
        )
        inputs = draw("normal", problem, cuda_device, seed=length)
        check(problem, inputs, run(taking(config, problem), problem, inputs))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_and_bits_repeat(
    config: Config, distribution: str, cuda_device: torch.device
) -> None:
    problem = JointAttention(64, HEADS, 186, 16, config.dtype, context=64, rotary=True)
    inputs = draw(distribution, problem, cuda_device)
    first = run(config, problem, inputs)
    check(problem, inputs, first)
    for _ in range(100):
        again = run(config, problem, inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("step", STEPS)
def test_other_head_sizes_without_rotary_embedding_are_right(
    step: str, d_head: int, cuda_device: torch.device
) -> None:
    family = FAMILIES[STEPS[step].family]
    config = family.fixed_config(STEPS[step], Element.BF16).of_size(d_head)
    problem = JointAttention(2, 5, 100, d_head, context=30, eps=1e-3, softmax_scale=0.2)
    inputs = draw("normal", problem, cuda_device)
    check(problem, inputs, run(config, problem, inputs))


@pytest.mark.parametrize("context", [0, 64])
@pytest.mark.parametrize("config", TILES, ids=lambda config: config.short_form())
def test_the_tiles_with_several_heads_that_compete_are_right(
    config: Config, context: int, cuda_device: torch.device
) -> None:
    for heads in (HEADS, 3):
        problem = JointAttention(3, heads, 186, 16, context=context, rotary=True)
        inputs = draw("normal", problem, cuda_device)
        check(problem, inputs, run(config, problem, inputs))


@pytest.mark.parametrize("context", [0, 64, 256])
@pytest.mark.parametrize("config", TWO_KERNELS, ids=lambda config: config.short_form())
def test_the_tiles_of_two_kernels_that_compete_are_right(
    config: Config, context: int, cuda_device: torch.device
) -> None:
    for heads in (HEADS, 3):
        problem = JointAttention(3, heads, 186, 16, context=context, rotary=True)
        inputs = draw("normal", problem, cuda_device)
        check(problem, inputs, run(config, problem, inputs))


@pytest.mark.parametrize("context", [0, 64])
@pytest.mark.parametrize("config", dict.fromkeys(CLUSTERS), ids=lambda c: c.short_form())
def test_the_clusters_that_compete_are_right(
    config: Config, context: int, cuda_device: torch.device
) -> None:
    """With as many keys as a thread block has, and on all SMs at once."""
    for batch, heads in ((200, HEADS), (3, 5)):
        problem = JointAttention(
            batch, heads, config.supports.B_c - context, 16, context=context, rotary=True
        )
        inputs = draw("normal", problem, cuda_device)
        check(problem, inputs, run(config, problem, inputs))


@pytest.mark.parametrize("scale", [0.25, 0.5, 8.0])  # 12, 23, 369 octaves
@pytest.mark.parametrize("dtype", JOINT.dtypes)
@pytest.mark.parametrize("step", FIRST_MAXIMUM)
def test_scores_that_grow_by_more_than_P_holds_are_right(
    step: str, dtype: Element, scale: float, cuda_device: torch.device
) -> None:
    """Some samples' first keys point away from their queries, all others towards them."""
    config = FAMILIES[STEPS[step].family].fixed_config(STEPS[step], dtype)
    problem = JointAttention(64, HEADS, 300, 16, dtype, softmax_scale=scale)
    inputs = draw("normal", problem, cuda_device)
    noise = torch.Generator(cuda_device).manual_seed(1)
    for name in ("q", "k"):
        drift = torch.randn(inputs[name].shape, generator=noise, device=cuda_device) / 16
        inputs[name] = (1 + drift).to(inputs[name].dtype)
    inputs["k"][::3, :32].neg_()
    inputs["k"][1::3, :270].neg_()
    check(problem, inputs, run(taking(config, problem), problem, inputs))


@each_config
def test_slices_of_packed_projections_are_taken_as_they_are(
    config: Config, cuda_device: torch.device
) -> None:
    problem = JointAttention(1024, HEADS, 186, 16, config.dtype, context=20, rotary=True)
    inputs = draw("normal", problem, cuda_device)
    whole = run(config, problem, inputs)
    for stream in ("", "context_"):
        names = [f"{stream}{name}" for name in "qkv"]
        packed = torch.cat([inputs[name] for name in names], -1)
        inputs |= zip(names, packed.split(problem.width, -1), strict=True)
    found = run(config, problem, inputs)
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    few = {n: x[:4] if x.ndim == 3 and n != "rotary" else x for n, x in inputs.items()}
    check(
        JointAttention(4, HEADS, 186, 16, config.dtype, context=20, rotary=True),
        few,
        {name: x[:4] for name, x in found.items()},
    )


@each_config
def test_a_cuda_graph_replays_with_new_inputs(config: Config, cuda_device: torch.device) -> None:
    problem = JointAttention(2, HEADS, 65, 16, config.dtype, context=7, rotary=True)
    draws = [draw("normal", problem, cuda_device, seed=seed) for seed in range(2)]
    given = {name: x.clone() for name, x in draws[0].items()}
    run(config, problem, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(config, problem, given)
    for values in draws:
        for name, x in values.items():
            given[name].copy_(x)
        for x in found.values():
            x.fill_(math.nan)
        graph.replay()
        check(problem, values, found)


@pytest.mark.parametrize("library", ["compiled_joint", "triton_joint"])
@pytest.mark.parametrize("context", [0, 30])
def test_libraries_compute_the_problem(
    context: int, library: str, cuda_device: torch.device
) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    problem = JointAttention(2, HEADS, 65, 16, context=context, rotary=True)
    inputs = draw("normal", problem, cuda_device)
    check(problem, inputs, baselines.run(library, problem, inputs))
