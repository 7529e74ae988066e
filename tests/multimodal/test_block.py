"""A block's modulation, adaptive norms, gates and feed-forward by kernels: when they are taken, and
that the block computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_attention.multimodal import (
    FeedForward,
    MultimodalTransformer,
    TransformerBlock,
    _adaptive,
    _attention,
    _block,
    _linear,
    _places,
    _streams,
    rotary_table,
)
from flash_attention.multimodal._adaptive import Adapted, adapted_streams
from flash_attention.multimodal._linear import Stream
from flash_helpers.kernel_configs import Problem
from flash_helpers.operations.adaptive_norm.grid import GROUPS
from flash_helpers.registry.adaptive_norm import ADAPTIVE_NORM

BF16 = torch.bfloat16
WIDTH, HEADS, HIDDEN, LENGTH, TOKENS = 32, 2, 64, 7, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(BF16)


X, CONTEXT, CONDITION = drawn(2, LENGTH, WIDTH, seed=1), drawn(2, TOKENS, WIDTH), drawn(2, WIDTH)
WIDE = drawn(2, TOKENS, 48, seed=3)
TABLE = rotary_table(LENGTH, WIDTH // HEADS)


def with_weights(module: nn.Module) -> Any:
    """The module in bf16 with weights that are neither 0 nor 1."""
    torch.manual_seed(0)
    for weights in module.parameters():
        nn.init.normal_(weights, mean=0.05, std=0.2)
    return module.to(BF16)


def made(**options: Any) -> Any:
    return with_weights(TransformerBlock(WIDTH, HEADS, HIDDEN, **{"backend": "kernels", **options}))


def by_pytorch(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if hasattr(part, "backend"):
            part.backend = "torch"
    return module


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operations, or PyTorch, that compute the parts of a block from here on."""
    found: list[str] = []
    norm, linear = _adaptive._adaptive_norm, _linear._joint_linear
    computed, by_layer = _block._Stream.computed, Stream.computed

    def adaptive_norm(*args: Any) -> Any:
        kind = "sum" if args[1] is not None else "norm"
        found.append(kind if args[3] is None or kind == "norm" else "sum and norm")
        return norm(*args)

    def joint_linear(*args: Any) -> Any:
        found.append("GELU" if args[-2] else "SiLU" if args[-1] else "linear")
        return linear(*args)

    def adapted(stream: Any, asked: Adapted) -> Any:
        found.append("PyTorch's norm")
        return computed(stream, asked)

    def layer(stream: Stream) -> Tensor:
        found.append("PyTorch's linear")
        return by_layer(stream)

    monkeypatch.setattr(_adaptive, "_adaptive_norm", adaptive_norm)
    monkeypatch.setattr(_linear, "_joint_linear", joint_linear)
    monkeypatch.setattr(_block._Stream, "computed", adapted)
    monkeypatch.setattr(Stream, "computed", layer)
    for module in (_adaptive, _linear):
        module._is_taken.cache_clear()
    yield found
    for module in (_adaptive, _linear):
        module._is_taken.cache_clear()


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes attention, which has no kernel for small heads without a context."""
    attend = _attention.attend

    def call(*args: Any, backend: str, **options: Any) -> Tensor:
        return attend(*args, backend="torch", **options)

    monkeypatch.setattr(_attention, "attend", call)
    monkeypatch.setattr(_attention, "takes", lambda *_, **__: False)  # of joint attention


def outputs(module: Any, *given: Tensor | None, rotary: Tensor | None = TABLE) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, rotary=rotary)
    return [y for y in found if y is not None]


def check(module: Any, *given: Tensor | None) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16."""
    ours = outputs(module, *given)
    usual = outputs(by_pytorch(module), *given)
    exact = [x if x is None else x.double() for x in given]
    right = outputs(module.double(), *exact)
    for mine, theirs, wanted in zip(ours, usual, right, strict=True):
        assert mine.shape == wanted.shape and mine.dtype == BF16
        assert (mine - wanted).norm() <= 2 * (theirs - wanted).norm()


WHOLE = [
    *("SiLU", "norm", "linear", "linear", "sum and norm", "GELU", "linear", "sum"),
]


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({}, CONTEXT),
        ({"bias": True}, CONTEXT),
        ({"context_width": 48}, WIDE),
        ({"returns_context": False}, CONTEXT),
        ({}, None),
    ],
)
def test_no_operator_of_pytorch_computes_in_a_block_with_gelu(taken, options, context) -> None:
    """Attention, too, is a kernel's."""
    check(made(**options), X, CONDITION, context)
    assert taken[: len(WHOLE)] == WHOLE
    assert {*taken[len(WHOLE) :]} == {"PyTorch's norm", "PyTorch's linear"}


@pytest.mark.parametrize(
    ("options", "context", "computed"),
    [
        ({"activation": "swiglu"}, CONTEXT, [x.replace("GELU", "linear") for x in WHOLE]),
        ({"context": "none"}, None, WHOLE),
        (
            {"context": "cross"},
            CONTEXT,
            [*WHOLE[:4], "sum", "linear", "linear", "norm", *WHOLE[5:]],
        ),
    ],
)
def test_other_blocks_take_what_fits(taken, attended, options, context, computed) -> None:
    check(made(**options), X, CONDITION, context)
    assert taken[: len(computed)] == computed


def test_a_context_without_tokens_is_left_out(taken) -> None:
    module = made()
    x, context = outputs(module, X, CONDITION, CONTEXT[:, :0])
    assert context.shape == (2, 0, WIDTH)
    assert torch.equal(x, outputs(module, X, CONDITION, None)[0])


def test_a_model_takes_kernels_in_all_layers(taken) -> None:
    model = MultimodalTransformer(WIDTH, HEADS, HIDDEN, 2, LENGTH, backend="kernels")
    with torch.no_grad():
        with_weights(model)(X, CONDITION, CONTEXT)
    assert taken == WHOLE * 2


def test_gradients_other_dtypes_and_other_backends_are_pytorchs(taken, attended) -> None:
    kernels = {"SiLU", "norm", "linear", "sum and norm", "GELU", "sum"}
    module = made(context="none")
    module(X, CONDITION)[0].sum().backward()
    assert module.sequence.modulation.linear.weight.grad.any()
    outputs(made(context="none", backend="auto"), X, CONDITION)  # on a CPU
    outputs(made(context="none").float(), X.float(), CONDITION.float())
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        made(context="none").float()(X.float(), CONDITION.float())
    assert not kernels & {*taken}


def test_a_hook_or_another_module_in_place_of_a_part_is_called(taken, attended) -> None:
    calls: list[str] = []
    module = made(context="none").requires_grad_(False)
    stream = module.sequence
    parts = {"modulation": stream.modulation, "norm": stream.norm, "feed": stream.feed_forward}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    outputs(module, X, CONDITION)
    assert calls == ["modulation", "norm", "norm", "feed"]
    module = made(context="none").requires_grad_(False)
    module.sequence.feed_forward = with_weights(FeedForwardOfOthers(WIDTH, HIDDEN))
    outputs(module, X, CONDITION)
    assert module.sequence.feed_forward.calls == 1


class FeedForwardOfOthers(FeedForward):
    """A feed-forward that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward."""
        self.calls += 1
        return super().forward(x)


def test_dropout_of_a_training_is_between_the_layers(taken) -> None:
    layers = with_weights(FeedForward(WIDTH, HIDDEN, dropout=0.5, backend="kernels"))
    with torch.no_grad():
        assert not torch.equal(layers(X), layers(X))
        layers.eval()
        assert torch.equal(layers(X), layers(X))
    assert taken == ["GELU", "linear"] * 4


def test_vectors_of_each_token_are_pytorchs() -> None:
    """As another modulation may have them."""
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    (found,) = adapted_streams([Adapted(X, None, None, norm, X, X)], kernels=True)
    assert found is None


def test_tensors_that_begin_between_chunks_are_copied() -> None:
    memory = drawn(2, LENGTH, WIDTH + 2)
    x = memory[..., 1:-1]
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=0.1)
    scale, shift = memory[:, :1, :-2], memory[:, 1:2, 2:]
    (found,) = adapted_streams([Adapted(x, x, scale, norm, scale, shift)], kernels=True)
    assert found is not None
    total = x + scale * x
    torch.testing.assert_close(found[0], total, rtol=0.01, atol=0.01)
    right = norm(total) * (1 + scale) + shift
    torch.testing.assert_close(found[1], right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize(("change", "norm"), [(False, True), (True, True), (True, False)])
def test_the_operator_is_one_that_pytorch_can_trace(change, norm, context) -> None:
    def stream(tokens: int) -> list[Tensor | None]:
        vectors = [drawn(2, 16) for _ in range(3)]
        of_sum = [drawn(2, tokens, 16), vectors[0]] if change else [None, None]
        return [drawn(2, tokens, 16), *of_sum, *(vectors[1:] if norm else [None, None])]

    given = (*stream(3), *(stream(2) if context else [None] * 5), 1e-6)
    torch.library.opcheck(torch.ops.flash_attention.adaptive_norm.default, given)


def test_a_block_compiles_to_one_graph_with_the_operators() -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    module = made()
    right = outputs(module, X, CONDITION, CONTEXT)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    found = outputs(compiled, X, CONDITION, CONTEXT)
    assert all(map(torch.equal, found, right))
    assert sum("adaptive_norm" in name for name in names) == 3
    assert sum("joint_linear" in name for name in names) == 5
    assert not any(part in name for name in names for part in ("gelu", "silu", "layer_norm"))


def test_a_block_compiles_to_one_graph_for_all_lengths() -> None:
    module = made().requires_grad_(False)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (LENGTH, LENGTH - 2):
        x = X[:, :length].contiguous()
        right = outputs(module, x, CONDITION, CONTEXT)
        assert all(map(torch.equal, outputs(compiled, x, CONDITION, CONTEXT), right))


def test_names_of_weights_are_unchanged() -> None:
    names = {name for name in TransformerBlock().state_dict() if "attention" not in name}
    parts = ("modulation.linear", "feed_forward.hidden_in", "feed_forward.hidden_out")
    assert names == {
        f"{stream}.{part}.{kind}"
        for stream in ("sequence", "context")
        for part in parts
        for kind in ("weight", "bias")
    }


def test_on_a_cpu_the_newest_step_is_simulated() -> None:
    for group in GROUPS.values():
        small: Problem = group[0]
        found = _streams.chosen(small, torch.device("cpu"))
        assert found.family is ADAPTIVE_NORM


def test_the_table_of_places_has_the_parts_of_a_block() -> None:
    found = {place.part for place in _places.places()}
    assert {"adaptive layer norms", "gated sums", "modulation"} <= found
    assert {"feed-forward, first layer and GELU", "feed-forward, second layer"} <= found
