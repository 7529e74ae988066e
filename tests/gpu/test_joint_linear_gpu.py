"""Linear layers of a sequence and its context on a GPU: all sizes of the target, every tile that
competes, bits that repeat, graphs, and modules that take them, compiled as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_problems import each
from torch import Tensor

import flash_attention
from flash_attention.multimodal import (
    CrossAttention,
    JointAttention,
    SelfAttention,
    _linear,
    _streams,
    rotary_table,
)
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Config, Element, Problem, get_listed_configs
from flash_helpers.operations.joint_linear import OPERATION, baselines
from flash_helpers.operations.joint_linear.grid import GROUPS, competing
from flash_helpers.operations.joint_linear.inputs import draw
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.joint_linear.problems import DISTRIBUTIONS
from flash_helpers.operations.joint_linear.reference import reference
from flash_helpers.registry.choice import first_that_takes
from flash_helpers.registry.joint_linear import JOINT_LINEAR
from flash_helpers.tune.best import choose_config

pytestmark = pytest.mark.gpu

CONFIGS = [config for config in get_listed_configs() if config.family.operation is OPERATION]
BF16 = [JOINT_LINEAR.fixed_config(step, Element.BF16) for step in JOINT_LINEAR.steps.values()]
TILES = sorted(
    {
        JOINT_LINEAR.fixed_config(JOINT_LINEAR.steps[step], Element.BF16).replace(**fields)
        for group in GROUPS.values()
        for problem in group
        for step, fields in competing(problem)
    }
)
WIDTH = 128

each_config = each(CONFIGS)
each_tile = pytest.mark.parametrize("config", TILES, ids=lambda config: config.short_form())


def run(config: Config, problem: JointLinear, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs; that of the context begins as NaN."""
    given = dict(inputs)
    if problem.context:
        given["context_y"] = inputs["x"].new_full(problem.tensor("context_y").shape, math.nan)
    found = flash_attention.run(config, *problem.arranged(given), **problem.call_options())
    return {tensor.name: found[tensor.name] for tensor in problem.outputs}


def check(problem: JointLinear, inputs: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    wanted = reference(problem, inputs)
    for name, bound in wanted.bounds.items():
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))


@each_tile
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("context", [0, 1, 64])
def test_the_sizes_of_the_target_are_right(
    config: Config, context: int, norm: bool, cuda_device: torch.device
) -> None:
    most = config.supports.B_c
    for batch, length in ((1, 1), (1, 186), (64, 186), (300, 186)):
        for features in ((WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (72, 40), (512, 64)):
            if features[0] > config.supports.most_in:
                continue
            problem = JointLinear(
                *(batch, length, features[0], min(features[1], most) if norm else features[1]),
                context=context,
                bias=features[0] != WIDTH,
                norm=norm,
            )
            inputs = draw("normal", problem, cuda_device, seed=length)
            check(problem, inputs, run(config, problem, inputs))


@each_config
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_and_bits_repeat(
    config: Config, distribution: str, norm: bool, cuda_device: torch.device
) -> None:
    problem = JointLinear(*(64, 186, WIDTH, WIDTH, config.dtype), context=64, bias=True, norm=norm)
    inputs = draw(distribution, problem, cuda_device)
    first = run(config, problem, inputs)
    check(problem, inputs, first)
    for _ in range(100):
        again = run(config, problem, inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@each_config
def test_contexts_of_other_widths_are_right(config: Config, cuda_device: torch.device) -> None:
    for norm in (False, True):
        problem = JointLinear(
            *(5, 100, 96, 128, config.dtype),
            context=33,
            context_in=120,
            context_out=88,
            norm=norm,
            eps=1e-3,
        )
        inputs = draw("normal", problem, cuda_device)
        check(problem, inputs, run(config, problem, inputs))


@each_config
def test_norms_of_rows_of_up_to_256_are_right(config: Config, cuda_device: torch.device) -> None:
    for width in (136, 256):
        problem = JointLinear(3, 50, width, width, config.dtype, context=9, norm=True)
        inputs = draw("normal", problem, cuda_device)
        variants = [*config.variants(), *BF16[0].replace(dtype=config.dtype).variants()]
        taking = first_that_takes(problem, variants)
        check(problem, inputs, run(taking, problem, inputs))


ACTIVATED = [config for config in CONFIGS if config.supports.activations]
ACTIVATED_TILES = [config for config in TILES if config.supports.activations]


@pytest.mark.parametrize("config", ACTIVATED_TILES, ids=lambda config: config.short_form())
def test_layers_of_a_block_with_activations_are_right(
    config: Config, cuda_device: torch.device
) -> None:
    for batch, length in ((1, 1), (1, 186), (64, 186)):
        for out, kind in ((4 * WIDTH, {"gelu": True}), (6 * WIDTH, {"silu": True})):
            problem = JointLinear(batch, length, WIDTH, out, context=64, bias=True, **kind)
            inputs = draw("normal", problem, cuda_device, seed=length)
            check(problem, inputs, run(config, problem, inputs))


@each(ACTIVATED)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_activations_are_right_and_bits_repeat(
    config: Config, distribution: str, cuda_device: torch.device
) -> None:
    problem = JointLinear(
        *(16, 186, WIDTH, WIDTH, config.dtype), context=64, bias=True, norm=True, gelu=True
    )
    inputs = draw(distribution, problem, cuda_device)
    first = run(config, problem, inputs)
    check(problem, inputs, first)
    for _ in range(100):
        again = run(config, problem, inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@each_config
def test_a_cuda_graph_replays_with_new_inputs(config: Config, cuda_device: torch.device) -> None:
    problem = JointLinear(2, 65, WIDTH, WIDTH, config.dtype, context=7, norm=True)
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


@pytest.mark.parametrize("norm", [False, True])
def test_torch_compile_computes_the_problem(norm: bool, cuda_device: torch.device) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    problem = JointLinear(2, 65, WIDTH, WIDTH, context=30, norm=norm)
    inputs = draw("normal", problem, cuda_device)
    found = baselines.run("compiled_linear", problem, inputs)
    wanted = reference(problem, inputs)
    for name, bound in wanted.bounds.items():
        errors = (found[name].double() - wanted.expected[name]).abs()
        assert (errors <= bound.of_elements).all()


# -- modules ---------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch):
    """The calls of the operator, which takes the newest kernel, whatever was measured."""
    found: list[str] = []
    operator = _linear._joint_linear

    def choose(problem: Problem, device: torch.device) -> Config:
        if isinstance(problem, JointLinear):
            return first_that_takes(problem, [c for own in BF16[::-1] for c in own.variants()])
        return choose_config(problem, device)

    def joint_linear(*args: Any) -> Any:
        found.append("one operation")
        return operator(*args)

    monkeypatch.setattr(_streams, "choose_config", choose)
    monkeypatch.setattr(_linear, "is_ahead", lambda *_: True)
    monkeypatch.setattr(_linear, "_joint_linear", joint_linear)
    _linear._is_taken.cache_clear()
    torch.compiler.reset()
    yield found
    _linear._is_taken.cache_clear()
    torch.compiler.reset()


def made(kind: type[Any], **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A module and what it reads."""
    torch.manual_seed(0)
    module = kind(WIDTH, 8, **options).to("cuda", torch.bfloat16)
    given = torch.randn(4, 186, WIDTH), torch.randn(4, 64, WIDTH)
    tensors = tuple((x + 0.2).to("cuda", torch.bfloat16) for x in given)
    return module, tensors[:1] if kind is SelfAttention else tensors


def outputs(module: Any, *given: Tensor, table: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, rotary=table)
    return [y for y in found if y is not None] if isinstance(found, tuple) else [found]


@pytest.mark.filterwarnings("ignore:PyTorch computes attention")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SelfAttention, {}),
        (CrossAttention, {}),
        (JointAttention, {}),
        (JointAttention, {"returns_context": False}),
    ],
)
def test_modules_are_as_right_as_with_pytorch(taken, kind, options, bias, is_compiled) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16; compiled as one graph."""
    module, given = made(kind, bias=bias, **options)
    table = rotary_table(186, WIDTH // 8, device="cuda")
    called = torch.compile(module, fullgraph=True) if is_compiled else module
    if is_compiled:
        pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    ours = outputs(called, *given, table=table)
    assert is_compiled or len(taken) == 2
    module.backend = "torch"
    usual = outputs(module, *given, table=table)
    right = outputs(module.double(), *(x.double() for x in given), table=table)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert 0 < (mine - exact).norm() <= 2 * (theirs - exact).norm()


def test_a_compiled_module_has_both_operators_in_its_graph(taken) -> None:
    module, given = made(JointAttention)
    table = rotary_table(186, WIDTH // 8, device="cuda")
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    found = outputs(torch.compile(module, fullgraph=True, backend=backend), *given, table=table)
    right = outputs(module, *given, table=table)
    assert all(map(torch.equal, found, right))
    assert sum("joint_linear" in name for name in names) == 2
    assert sum("joint_attention" in name for name in names) == 1


def test_a_module_is_captured_in_a_graph(taken) -> None:
    module, given = made(JointAttention)
    table = rotary_table(186, WIDTH // 8, device="cuda")
    right = outputs(module, *given, table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(module, *given, table=table)
    graph.replay()
    assert all(map(torch.equal, found, right))
