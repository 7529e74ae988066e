"""Linear layers of a module's sequence and context as one operation: when it is taken, and that it
computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_attention.multimodal import (
    CrossAttention,
    JointAttention,
    SelfAttention,
    _attention,
    _linear,
    _places,
    _streams,
    rotary_table,
)
from flash_attention.multimodal._linear import Stream, linear_streams
from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.joint_linear.grid import GROUPS
from flash_helpers.registry.joint_linear import JOINT_LINEAR
from flash_helpers.tune import best
from flash_helpers.tune.choices import MeasuredProblem, load_choices

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
WIDTH, HEADS, LENGTH, TOKENS = 32, 2, 7, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(BF16)


X, CONTEXT = drawn(2, LENGTH, WIDTH, seed=1), drawn(2, TOKENS, WIDTH, seed=2)
WIDE = drawn(2, TOKENS, 48, seed=3)
TABLE = rotary_table(LENGTH, WIDTH // HEADS)


def made(kind: type[Any], **options: Any) -> Any:
    """A module with weights of norms that are not 1."""
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, **{"backend": "kernels", **options})
    for name, weights in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(weights, mean=1.0, std=0.2)
    return module.to(BF16)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What computes linear layers from here on; PyTorch computes attention."""
    found: list[str] = []
    operator, computed, attend = _linear._joint_linear, Stream.computed, _attention.attend

    def joint_linear(*args: Any) -> Any:
        found.append("one operation" if args[4] is not None else "one stream")
        return operator(*args)

    def by_pytorch(stream: Stream) -> Tensor:
        found.append("PyTorch")
        return computed(stream)

    def attended(*args: Any, backend: str, **options: Any) -> Tensor:
        return attend(*args, backend="torch", **options)

    monkeypatch.setattr(_linear, "_joint_linear", joint_linear)
    monkeypatch.setattr(Stream, "computed", by_pytorch)
    monkeypatch.setattr(_attention, "attend", attended)
    monkeypatch.setattr(_attention, "takes", lambda *_, **__: False)  # of joint attention
    _linear._is_taken.cache_clear()
    yield found
    _linear._is_taken.cache_clear()


def outputs(module: Any, *given: Tensor, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, **options)
    return [y for y in found if y is not None] if isinstance(found, tuple) else [found]


BOTH, ALONE = ["one operation"] * 2, ["one stream"] * 2


@pytest.mark.parametrize(
    ("kind", "options", "given", "computed"),
    [
        (SelfAttention, {}, (X,), ALONE),
        (SelfAttention, {"bias": True}, (X,), ALONE),
        (CrossAttention, {}, (X, CONTEXT), ["one operation", "one stream"]),
        (CrossAttention, {"context_width": 48}, (X, WIDE), ["one operation", "one stream"]),
        (JointAttention, {}, (X,), ALONE),
        (JointAttention, {}, (X, CONTEXT), BOTH),
        (JointAttention, {"bias": True}, (X, CONTEXT), BOTH),
        (JointAttention, {"context_width": 48}, (X, WIDE), BOTH),
        (
            JointAttention,
            {"returns_context": False},
            (X, CONTEXT),
            ["one operation", "one stream"],
        ),
        (JointAttention, {}, (X, CONTEXT[:, :0]), ["one stream", "PyTorch"] * 2),
    ],
)
def test_modules_compute_what_pytorch_does(taken, kind, options, given, computed) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16."""
    module = made(kind, **options)
    ours = outputs(module, *given, rotary=TABLE)
    assert taken == computed
    module.backend = "torch"
    usual = outputs(module, *given, rotary=TABLE)
    right = outputs(module.double(), *(x.double() for x in given), rotary=TABLE)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert mine.shape == exact.shape and mine.dtype == BF16
        if exact.numel():
            assert 0 < (mine - exact).norm() <= 2 * (theirs - exact).norm()


def test_masks_change_nothing_for_linear_layers(taken) -> None:
    module = made(JointAttention)
    outputs(module, X, CONTEXT, mask=torch.tensor([3, 7]), context_mask=torch.tensor([1, 2]))
    assert taken == BOTH


def test_gradients_other_dtypes_and_other_backends_are_pytorchs(taken) -> None:
    module = made(SelfAttention)
    module(X).sum().backward()
    assert module.sequence.qkv.weight.grad.any()
    for backend in ("torch", "auto"):  # on a CPU
        module.backend = backend
        outputs(module, X)
    module.backend = "kernels"
    outputs(module.float(), X.float())
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        module(X.float())
    assert taken == ["PyTorch"] * 10


def test_frozen_weights_are_taken_while_gradients_are_on(taken) -> None:
    made(SelfAttention).requires_grad_(False)(X)
    assert taken == ALONE


def test_widths_that_no_kernel_takes_are_pytorchs(taken) -> None:
    own = nn.Linear(12, 8).to(BF16).requires_grad_(False)
    wide = nn.Linear(520, 8).to(BF16).requires_grad_(False)
    many = nn.Linear(264, 136).to(BF16).requires_grad_(False)
    for layer in (own, wide, many):
        x = drawn(1, 2, layer.in_features)
        y, _ = linear_streams(Stream(x, layer), None, kernels=True)
        assert torch.equal(y, layer(x))
    assert taken == ["PyTorch"] * 3


def test_many_features_of_few_outputs_are_taken(taken) -> None:
    """As the second layer of a feed-forward has them."""
    layer = nn.Linear(512, 128).to(BF16).requires_grad_(False)
    x = drawn(1, 2, 512)
    y, _ = linear_streams(Stream(x, layer), None, kernels=True)
    torch.testing.assert_close(y, layer(x), rtol=0.01, atol=0.01)
    assert taken == ["one stream"]


class Scaled(nn.Linear):
    """A layer whose weights do not tell all that it does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the output."""
        return 2 * super().forward(x)


def test_layers_that_are_more_than_their_weights_are_called(taken) -> None:
    layer = Scaled(16, 8).to(BF16).requires_grad_(False)
    x = drawn(1, 2, 16)
    y, _ = linear_streams(Stream(x, layer), None, kernels=True)
    assert torch.equal(y, layer(x))
    hooked = nn.Linear(16, 8).to(BF16).requires_grad_(False)
    hooked.register_forward_hook(lambda module, given, y: y + 1)
    y, _ = linear_streams(Stream(x, hooked), None, kernels=True)
    assert torch.equal(y, hooked(x))
    plain = nn.Linear(16, 8).to(BF16).requires_grad_(False)
    for norm in (nn.RMSNorm(8, elementwise_affine=False), nn.LayerNorm(8).to(BF16)):
        norm.requires_grad_(False)
        y, _ = linear_streams(Stream(x, plain, norm), None, kernels=True)
        assert torch.equal(y, norm(plain(x)))
    assert taken == ["PyTorch"] * 4


class Doubled(Tensor):
    """A weight that stands for twice its elements, as quantised ones stand for others."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Compute on the doubled elements."""
        plain = [x.as_subclass(Tensor) * 2 if isinstance(x, Doubled) else x for x in args]
        return func(*plain, **(kwargs or {}))


def test_weights_of_another_class_compute_in_their_own_way(taken) -> None:
    layer = nn.Linear(16, 8, bias=False).to(BF16).requires_grad_(False)
    x, usual = drawn(1, 2, 16), layer.weight
    right = nn.functional.linear(x, 2 * usual)
    del layer.weight
    layer.weight = usual.data.as_subclass(Doubled)
    y, _ = linear_streams(Stream(x, layer), None, kernels=True)
    assert torch.equal(y, right)
    assert taken == ["PyTorch"]


def test_tokens_that_are_not_contiguous_are_copied(taken) -> None:
    layer = nn.Linear(16, 8).to(BF16).requires_grad_(False)
    memory = drawn(2, 5, 18)
    for x in (memory[..., 1:17], memory[:, :3, :16], memory.mT.contiguous().mT[..., :16]):
        y, _ = linear_streams(Stream(x, layer), None, kernels=True)
        torch.testing.assert_close(y, layer(x), rtol=0.01, atol=0.01)
    assert taken == ["one stream"] * 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("context", [None, 8, 16])  # its outputs
def test_the_operator_is_one_that_pytorch_can_trace(bias, context) -> None:
    def stream(outputs: int | None) -> list[Tensor | None]:
        if outputs is None:
            return [None] * 4
        norm = drawn(outputs) if context != 16 else None
        return [drawn(2, 3, 16), drawn(outputs, 16), drawn(outputs) if bias else None, norm]

    given = (*stream(8), *stream(context), 1e-6, bias, not bias)
    torch.library.opcheck(torch.ops.flash_attention.joint_linear.default, given)


def test_a_module_compiles_to_one_graph_for_all_lengths(taken) -> None:
    module = made(JointAttention).requires_grad_(False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (LENGTH, LENGTH - 2):
        x = X[:, :length].contiguous()
        right = outputs(module, x, CONTEXT, rotary=TABLE)
        found = outputs(compiled, x, CONTEXT, rotary=TABLE)
        assert all(map(torch.equal, found, right))
    assert taken.count("one operation") >= 4


def test_the_graph_of_a_compiled_module_has_the_operator(taken) -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    module = made(JointAttention, bias=True)  # weights that gradients may be asked of
    right = outputs(module, X, CONTEXT, rotary=TABLE)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    assert all(map(torch.equal, outputs(compiled, X, CONTEXT, rotary=TABLE), right))
    assert sum("joint_linear" in name for name in names) == 2
    assert not any("built-in function linear" in name for name in names)


def test_names_of_weights_are_unchanged() -> None:
    stream = {"qkv.weight", "q_norm.weight", "k_norm.weight", "out.weight", "out_norm.weight"}
    names = {f"{own}.{name}" for own in ("sequence", "context") for name in stream}
    assert {*JointAttention().state_dict()} == names


# -- the choice ------------------------------------------------------------------------------------


def hopper() -> Device:
    return largest_device(90)


def test_without_a_measured_choice_a_gpu_takes_no_kernel(monkeypatch) -> None:
    """As the operator asks for a GPU: every step waits for a measurement."""
    monkeypatch.setattr(best, "load_choices", lambda folder: ())
    problem = GROUPS["joint_linear_bf16"][0]
    with pytest.raises(RuntimeError, match="there is no kernel for"):
        best.config_for(problem, hopper())


def test_with_a_measured_choice_a_gpu_takes_its_fastest(monkeypatch) -> None:
    problem = replace(GROUPS["joint_linear_norm_bf16"][0], norm=True)
    fixed = JOINT_LINEAR.fixed_config(JOINT_LINEAR.steps["jl1"], Element.BF16)
    times = {fixed.short_form(): 0.005, fixed.replace(B_r=16, warp_rows=16).short_form(): 0.004}
    record = MeasuredProblem("joint_linear_norm_bf16", problem.record(), times, {}, 0.0, {})
    (file,) = (
        replace(file, problems=(record,))
        for file in load_choices(ROOT / CONFIG_FOLDER)
        if file.problems[0].asked.operation == "joint_attention"
    )
    monkeypatch.setattr(best, "load_choices", lambda folder: (file,))
    assert best.config_for(problem, hopper()) == fixed.replace(B_r=16, warp_rows=16)
    half = replace(problem, dtype=Element.FP16)
    assert best.config_for(half, hopper()).dtype is Element.FP16
    wide = best.config_for(replace(problem, out_features=256), hopper())
    assert wide.B_c == 256  # a variant of the tile that was measured


def test_on_a_cpu_the_newest_step_is_simulated() -> None:
    for group in GROUPS.values():
        found = _streams.chosen(group[0], torch.device("cpu"))
        assert found.family is JOINT_LINEAR and found.dtype is Element.BF16


def test_the_table_of_places_has_both_projections() -> None:
    found = {place.part for place in _places.places()}
    assert {"projections to Q, K and V", "projections of outputs, RMSNorm"} <= found
