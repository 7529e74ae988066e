"""Norm and rotary embedding of Q and K on a GPU: heads of every size that attention takes, every
shape that competes, bits that repeat, graphs, and modules that take them, compiled as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_problems import each
from torch import Tensor

import flash_attention
from flash_attention.multimodal import JointAttention, SelfAttention, _attention, rotary_table
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Config, Element, get_listed_configs
from flash_helpers.operations.qk_norm_rope import OPERATION, baselines
from flash_helpers.operations.qk_norm_rope.grid import GROUPS, competing
from flash_helpers.operations.qk_norm_rope.inputs import draw
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.operations.qk_norm_rope.problems import DISTRIBUTIONS
from flash_helpers.operations.qk_norm_rope.reference import reference
from flash_helpers.registry.qk_norm_rope import QK_NORM_ROPE

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
SHAPES = [
    (problem, QK_NORM_ROPE.fixed_config(QK_NORM_ROPE.steps[step], Element.BF16).replace(**fields))
    for group in GROUPS.values()
    for problem in group
    for step, fields in competing(problem)
]

each_config = each(CONFIGS)


def run(config: Config, problem: QkNormRope, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs; that of V begins as NaN."""
    given = dict(inputs)
    if problem.context:
        given["joint_v"] = inputs["q"].new_full(problem.tensor("joint_v").shape, math.nan)
    found = flash_attention.run(config, *problem.arranged(given), **problem.call_options())
    return {tensor.name: found[tensor.name] for tensor in problem.outputs}


def check(problem: QkNormRope, inputs: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    wanted = reference(problem, inputs)
    for name, bound in wanted.bounds.items():
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))
    if problem.context:
        assert torch.equal(found["joint_v"], torch.cat((inputs["v"], inputs["context_v"]), 1))


@pytest.mark.parametrize(
    ("problem", "config"), SHAPES, ids=[f"{p} {c.short_form()}" for p, c in SHAPES]
)
def test_the_shapes_that_compete_are_right(
    problem: QkNormRope, config: Config, cuda_device: torch.device
) -> None:
    inputs = draw("normal", problem, cuda_device)
    check(problem, inputs, run(config, problem, inputs))


@each_config
@pytest.mark.parametrize("d_head", [8, 40, 64, 96, 128, 192, 256])
def test_heads_of_every_size_are_right(
    config: Config, d_head: int, cuda_device: torch.device
) -> None:
    for heads in (1, 3, 4096 // d_head, 16384 // d_head):
        for context, has_queries, rotary in ((0, True, True), (33, True, True), (7, False, False)):
            problem = QkNormRope(
                *(3, heads, 101, d_head, config.dtype),
                context=context,
                context_queries=has_queries,
                rotary=rotary,
            )
            inputs = draw("normal", problem, cuda_device, seed=heads)
            taking = next(c for c in config.variants() if not c.refusal(problem))
            check(problem, inputs, run(taking, problem, inputs))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_and_bits_repeat(
    config: Config, distribution: str, cuda_device: torch.device
) -> None:
    problem = QkNormRope(4, 24, 186, 128, config.dtype, context=64, rotary=True)
    inputs = draw(distribution, problem, cuda_device)
    taking = next(c for c in config.variants() if not c.refusal(problem))
    first = run(taking, problem, inputs)
    check(problem, inputs, first)
    for _ in range(100):
        again = run(taking, problem, inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@each_config
def test_parts_of_projections_are_taken_as_they_are(
    config: Config, cuda_device: torch.device
) -> None:
    problem = QkNormRope(2, 3, 50, 128, config.dtype, context=9, rotary=True)
    inputs = draw("normal", problem, cuda_device)
    right = run(config, problem, inputs)
    for stream in ("", "context_"):
        names = [f"{stream}{name}" for name in "qkv"]
        projected = torch.cat([inputs[name] for name in names], -1)
        inputs |= dict(zip(names, projected.split(problem.width, -1), strict=True))
    found = run(config, problem, inputs)
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("library", ["pytorch_qk_norm_rope", "compiled_qk_norm_rope"])
def test_libraries_compute_the_problem(library: str, cuda_device: torch.device) -> None:
    if library.startswith("compiled"):
        pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    problem = QkNormRope(2, 3, 50, 128, context=9, rotary=True)
    inputs = draw("normal", problem, cuda_device)
    found = baselines.run(library, problem, inputs)
    wanted = reference(problem, inputs)
    for name, expected in wanted.expected.items():
        assert measure_error(found[name], expected).relative < 0.01


# -- modules ---------------------------------------------------------------------------------------

HEADS, D_HEAD = 3, 128


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch):
    """The calls of the operation."""
    found: list[str] = []
    before = _attention.qk_norm_rope

    def qk_norm_rope(*args: Any) -> Any:
        found.append("qk_norm_rope")
        return before(*args)

    monkeypatch.setattr(_attention, "qk_norm_rope", qk_norm_rope)
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def made(kind: type[Any], **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A module with heads of 128 and weights of norms that are not 1, and what it reads."""
    torch.manual_seed(0)
    width = HEADS * D_HEAD
    module = kind(width, HEADS, **options)
    for name, weights in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weights, mean=1.0, std=0.2)
    module.to("cuda", torch.bfloat16)
    given = torch.randn(4, 186, width), torch.randn(4, 64, width)
    tensors = tuple((x + 0.2).to("cuda", torch.bfloat16) for x in given)
    return module, tensors[:1] if kind is SelfAttention else tensors


def outputs(module: Any, *given: Tensor, table: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, rotary=table)
    return [y for y in found if y is not None] if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SelfAttention, {}),
        (JointAttention, {}),
        (JointAttention, {"returns_context": False}),
    ],
)
def test_modules_are_as_right_as_with_pytorch(taken, kind, options, is_compiled) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16; compiled as one graph."""
    module, given = made(kind, **options)
    table = rotary_table(186, D_HEAD, device="cuda")
    if is_compiled:
        pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    called = torch.compile(module, fullgraph=True) if is_compiled else module
    ours = outputs(called, *given, table=table)
    assert is_compiled or taken == ["qk_norm_rope"]
    module.backend = "torch"
    usual = outputs(module, *given, table=table)
    right = outputs(module.double(), *(x.double() for x in given), table=table)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert 0 < (mine - exact).norm() <= 2 * (theirs - exact).norm()


def test_a_module_is_captured_in_a_graph(taken) -> None:
    module, given = made(JointAttention)
    table = rotary_table(186, D_HEAD, device="cuda")
    right = outputs(module, *given, table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(module, *given, table=table)
    for y in found:
        y.fill_(math.nan)
    graph.replay()
    assert all(map(torch.equal, found, right))
