"""Adaptive layer norms of gated sums on a GPU: sizes of the target, every shape that competes, bits
that repeat, graphs, and blocks that take them, compiled as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_problems import each
from torch import Tensor, nn

import flash_attention
from flash_attention.multimodal import TransformerBlock, _adaptive, _linear, _streams, rotary_table
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Config, Element, Problem, get_listed_configs
from flash_helpers.operations.adaptive_norm import OPERATION, baselines
from flash_helpers.operations.adaptive_norm.grid import GROUPS, competing
from flash_helpers.operations.adaptive_norm.inputs import draw
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.adaptive_norm.reference import reference
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.registry.adaptive_norm import ADAPTIVE_NORM
from flash_helpers.registry.choice import first_that_takes
from flash_helpers.registry.joint_linear import JOINT_LINEAR
from flash_helpers.tune.best import choose_config

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
(FIXED,) = (ADAPTIVE_NORM.fixed_config(step, Element.BF16) for step in ADAPTIVE_NORM.steps.values())
SHAPES = sorted(
    {
        FIXED.replace(**fields)
        for group in GROUPS.values()
        for problem in group
        for _, fields in competing(problem)
    }
)
KINDS: list[dict[str, Any]] = [
    {},
    {"change": True, "sum": True},
    {"change": True, "norm": False},
    {"change": True, "norm": False, "sum": True},
]
WIDTH, HEADS, HIDDEN = 128, 8, 512

each_config = each(CONFIGS)
each_shape = pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.short_form())


def run(config: Config, problem: AdaptiveNorm, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, which begin as NaN."""
    given = dict(inputs)
    for tensor in problem.outputs:
        given[tensor.name] = inputs["x"].new_full(tensor.shape, math.nan)
    found = flash_attention.run(config, *problem.arranged(given), **problem.call_options())
    return {tensor.name: found[tensor.name] for tensor in problem.outputs}


def check(problem: AdaptiveNorm, inputs: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    wanted = reference(problem, inputs)
    for name, bound in wanted.bounds.items():
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))


@each_shape
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "_".join(kind) or "plain")
def test_the_sizes_of_the_target_are_right(
    config: Config, kind: dict[str, Any], cuda_device: torch.device
) -> None:
    width = config.supports.max_width
    for batch, length, context in ((1, 1, 1), (1, 186, 64), (64, 186, 64), (3, 186, 0)):
        for own, other in ((width, 8), (width - 8, width)):
            problem = AdaptiveNorm(batch, length, own, context=context, context_width=other, **kind)
            inputs = draw("normal", problem, cuda_device, seed=length)
            check(problem, inputs, run(config, problem, inputs))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_and_bits_repeat(
    config: Config, distribution: str, cuda_device: torch.device
) -> None:
    problem = AdaptiveNorm(64, 186, WIDTH, config.dtype, context=64, change=True, sum=True)
    inputs = draw(distribution, problem, cuda_device)
    first = run(config, problem, inputs)
    check(problem, inputs, first)
    for _ in range(100):
        again = run(config, problem, inputs)
        assert all(torch.equal(first[x].nan_to_num(), again[x].nan_to_num()) for x in first)


@each_config
def test_views_of_a_modulation_are_taken(config: Config, cuda_device: torch.device) -> None:
    problem = AdaptiveNorm(5, 33, WIDTH, config.dtype, change=True, sum=True, context=9)
    inputs = draw("normal", problem, cuda_device)
    right = run(config, problem, inputs)
    for stream in ("", "context_"):
        names = [f"{stream}{name}" for name in ("gate", "scale", "shift")]
        made = torch.cat([inputs[name] for name in names], -1)
        inputs |= dict(zip(names, made.chunk(3, -1), strict=True))
    found = run(config, problem, inputs)
    assert all(torch.equal(found[name], right[name]) for name in right)


@each_config
def test_a_cuda_graph_replays_with_new_inputs(config: Config, cuda_device: torch.device) -> None:
    problem = AdaptiveNorm(2, 65, WIDTH, config.dtype, context=7, change=True, sum=True)
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


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: "_".join(kind) or "plain")
def test_torch_compile_computes_the_problem(kind, cuda_device: torch.device) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    problem = AdaptiveNorm(2, 65, WIDTH, context=30, **kind)
    inputs = draw("normal", problem, cuda_device)
    found = baselines.run("compiled_adaptive", problem, inputs)
    for name, expected in reference(problem, inputs).expected.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=0.03, atol=0.03)


# -- blocks ----------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch):
    """The calls of both operators, which take the newest kernels, whatever was measured."""
    found: list[str] = []
    norm, linear = _adaptive._adaptive_norm, _linear._joint_linear
    steps = [*JOINT_LINEAR.steps.values()]
    newest = [JOINT_LINEAR.fixed_config(step, Element.BF16) for step in steps[::-1]]

    def choose(problem: Problem, device: torch.device) -> Config:
        if isinstance(problem, JointLinear):
            return first_that_takes(problem, [c for own in newest for c in own.variants()])
        if isinstance(problem, AdaptiveNorm):
            return first_that_takes(problem, FIXED.variants())
        return choose_config(problem, device)

    def adaptive_norm(*args: Any) -> Any:
        found.append("adaptive_norm")
        return norm(*args)

    def joint_linear(*args: Any) -> Any:
        found.append("joint_linear")
        return linear(*args)

    monkeypatch.setattr(_streams, "choose_config", choose)
    for module in (_adaptive, _linear):
        monkeypatch.setattr(module, "is_ahead", lambda *_: True)
        module._is_taken.cache_clear()
    monkeypatch.setattr(_adaptive, "_adaptive_norm", adaptive_norm)
    monkeypatch.setattr(_linear, "_joint_linear", joint_linear)
    torch.compiler.reset()
    yield found
    for module in (_adaptive, _linear):
        module._is_taken.cache_clear()
    torch.compiler.reset()


def made(**options: Any) -> tuple[TransformerBlock, tuple[Tensor, ...]]:
    """A block with weights that are neither 0 nor 1, and what it reads."""
    torch.manual_seed(0)
    block = TransformerBlock(WIDTH, HEADS, HIDDEN, **options)
    for weights in block.parameters():
        nn.init.normal_(weights, mean=0.01, std=0.1)
    given = torch.randn(4, 186, WIDTH), torch.randn(4, WIDTH), torch.randn(4, 64, WIDTH)
    return block.to("cuda", torch.bfloat16), tuple(
        (x + 0.2).to("cuda", torch.bfloat16) for x in given
    )


def outputs(block: Any, given: tuple[Tensor, ...], table: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [y for y in block(*given, rotary=table) if y is not None]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"returns_context": False}], ids=["both", "last"])
def test_blocks_are_as_right_as_with_pytorch(taken, options, is_compiled) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16; compiled as one graph."""
    block, given = made(**options)
    table = rotary_table(186, WIDTH // HEADS, device="cuda")
    if is_compiled:
        pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    called = torch.compile(block, fullgraph=True) if is_compiled else block
    ours = outputs(called, given, table)
    assert is_compiled or sorted(taken) == ["adaptive_norm"] * 3 + ["joint_linear"] * 5
    for part in block.modules():
        if hasattr(part, "backend"):
            part.backend = "torch"
    usual = outputs(block, given, table)
    right = outputs(block.double(), tuple(x.double() for x in given), table)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert (mine - exact).norm() <= 2 * (theirs - exact).norm()


def test_a_block_is_captured_in_a_graph(taken) -> None:
    block, given = made()
    table = rotary_table(186, WIDTH // HEADS, device="cuda")
    right = outputs(block, given, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(block, given, table)
    graph.replay()
    assert all(map(torch.equal, found, right))
