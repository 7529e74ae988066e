"""Modules of flash_attention.multimodal beside a plain formulation in float64, and what follows
from their definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import plain_multimodal as plain
import pytest
import torch
from torch import Tensor, nn

from flash_attention import multimodal
from flash_attention.multimodal import (
    CrossAttention,
    FeedForward,
    JointAttention,
    MultimodalTransformer,
    RotaryTable,
    SelfAttention,
    TransformerBlock,
    rotary_table,
)

F64 = torch.float64
WIDTH, HEADS, SEQ, TOKENS, OTHER = 12, 2, 5, 3, 7  # OTHER: width of the context
BATCH = 2
MASK = torch.tensor([[True, False, True, True, False], [True] * 5])
CONTEXT_MASK = torch.tensor([[False, True, True], [False, False, False]])
BASE = 10.0  # of rotary embedding: angles that differ much at toy lengths
EPS = 1e-2  # so large that a wrong place of it shows


def drawn(module: nn.Module, seed: int = 0) -> Any:
    """The module in float64 with weights that are neither 0 nor 1."""
    torch.manual_seed(seed)
    for weights in module.parameters():
        nn.init.normal_(weights, mean=0.2, std=0.5)
    return module.double()


def tokens(length: int = SEQ, width: int = WIDTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, width, generator=generator, dtype=F64) + 0.3


def rotary(length: int = SEQ, d_head: int = WIDTH // HEADS) -> Tensor:
    return rotary_table(length, d_head, base=BASE, dtype=F64)


def close(found: Tensor | None, right: Tensor | None) -> bool:
    assert found is not None and right is not None
    assert found.shape == right.shape
    return torch.allclose(found, right, rtol=1e-9, atol=1e-9)


def joint(**options: Any) -> JointAttention:
    return drawn(JointAttention(WIDTH, HEADS, context_width=OTHER, eps=EPS, **options))


def test_self_attention_is_the_plain_one() -> None:
    module = drawn(SelfAttention(WIDTH, HEADS, eps=EPS, bias=True))
    x = tokens()
    for table, mask in itertools.product((None, rotary()), (None, MASK)):
        right, _ = plain.joint_attention(
            *(module.state_dict(), x, None, HEADS),
            eps=EPS,
            base=None if table is None else BASE,
            mask=None if mask is None else mask.tolist(),
        )
        assert close(module(x, rotary=table, mask=mask), right)


@pytest.mark.parametrize("length", [0, TOKENS])
@pytest.mark.parametrize("returns_context", [True, False])
def test_joint_attention_is_the_plain_one(length, returns_context) -> None:
    module = joint(returns_context=returns_context)
    x, context = tokens(), tokens(length, OTHER, seed=2)
    of_context = CONTEXT_MASK[:, :length]
    for table, mask in itertools.product((None, rotary()), (False, True)):
        masks = {"mask": MASK, "context_mask": of_context} if mask else {}
        found, changed = module(x, context, rotary=table, **masks)
        right, right_context = plain.joint_attention(
            *(module.state_dict(), x, context, HEADS),
            eps=EPS,
            base=None if table is None else BASE,
            **{name: own.tolist() for name, own in masks.items()},
        )
        assert close(found, right)
        assert close(changed, right_context) if returns_context else changed is None


@pytest.mark.parametrize("table", [None, rotary()], ids=["no_rotary", "rotary"])
@pytest.mark.parametrize("mask", [None, CONTEXT_MASK], ids=["no_mask", "mask"])
def test_cross_attention_is_the_plain_one(table, mask) -> None:
    module = drawn(CrossAttention(WIDTH, HEADS, context_width=OTHER, eps=EPS))
    x, context = tokens(), tokens(TOKENS, OTHER, seed=2)
    right = plain.cross_attention(
        *(module.state_dict(), x, context, HEADS),
        eps=EPS,
        base=None if table is None else BASE,
        context_mask=None if mask is None else mask.tolist(),
    )
    assert close(module(x, context, rotary=table, context_mask=mask), right)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward_is_the_plain_one(activation) -> None:
    module = drawn(FeedForward(WIDTH, 10, activation=activation))
    assert close(module(tokens()), plain.feed_forward(module.state_dict(), tokens()))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("joint", {}),
        ("joint", {"returns_context": False}),
        ("joint", {"activation": "swiglu"}),
        ("cross", {}),
        ("none", {}),
    ],
)
def test_a_block_is_the_plain_one(kind, options) -> None:
    module = TransformerBlock(
        *(WIDTH, HEADS, 10),
        context=kind,
        context_width=OTHER,
        condition_width=4,
        eps=EPS,
        **options,
    )
    drawn(module)
    x, condition = tokens(), tokens(4, 1, seed=3)[..., 0]
    context = None if kind == "none" else tokens(TOKENS, OTHER, seed=2)
    found, changed = module(x, condition, context, rotary=rotary())
    right, right_context = plain.block(
        *(module.state_dict(), x, condition, context, HEADS), eps=EPS, base=BASE
    )
    assert close(found, right)
    assert changed is right_context is None if context is None else close(changed, right_context)
    if kind == "joint":
        found, changed = module(x, condition, rotary=rotary())
        alone = plain.block(module.state_dict(), x, condition, None, HEADS, eps=EPS, base=BASE)
        assert close(found, alone[0]) and changed is None


def model(**options: Any) -> MultimodalTransformer:
    sizes = {"width": WIDTH, "heads": HEADS, "feed_forward": 10, "layers": 2, "length": SEQ}
    return MultimodalTransformer(**{**sizes, "eps": EPS, "base": BASE, **options})


def test_a_model_is_its_blocks_one_behind_the_other() -> None:
    module = drawn(model(context_width=OTHER))
    x, context = tokens(), tokens(TOKENS, OTHER, seed=2)
    condition = tokens(WIDTH, 1, seed=3)[..., 0]
    right, changed = x, context
    for layer in range(2):
        own = plain.inner(module.state_dict(), f"blocks.{layer}")
        right, changed = plain.block(own, right, condition, changed, HEADS, eps=EPS, base=BASE)
    assert close(module(x, condition, context), right)


# -- gradients -------------------------------------------------------------------------------------


def gradients_of(module: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> bool:
    """gradcheck of a call for its inputs and all weights of the module."""
    weights = [*module.parameters()]
    given = [x.requires_grad_() for x in inputs]
    return torch.autograd.gradcheck(lambda *_: call(*given), (*given, *weights), fast_mode=True)


def test_gradients_are_those_of_finite_differences() -> None:
    module = drawn(
        TransformerBlock(4, 2, 3, context_width=3, condition_width=2, activation="swiglu")
    )
    x, context = tokens(3, 4), tokens(2, 3, seed=2)
    condition = tokens(2, 1, seed=3)[..., 0].contiguous()
    masks = {"mask": torch.tensor([3, 1]), "context_mask": torch.tensor([0, 2])}
    table = rotary(3, 2)
    assert gradients_of(
        module,
        lambda x, condition, context: module(x, condition, context, rotary=table, **masks),
        *(x, condition, context),
    )
    cross = drawn(CrossAttention(4, 2, context_width=3))
    assert gradients_of(
        cross,
        lambda x, context: cross(x, context, rotary=table, context_mask=masks["context_mask"]),
        *(tokens(3, 4), tokens(2, 3, seed=2)),
    )


# -- what follows from the definition --------------------------------------------------------------


def test_the_order_of_the_context_changes_nothing_but_the_order_of_its_outputs() -> None:
    module, order = joint(), torch.tensor([2, 0, 1])
    x, context = tokens(), tokens(TOKENS, OTHER, seed=2)
    found, changed = module(x, context, rotary=rotary())
    again, permuted = module(x, context[:, order], rotary=rotary())
    assert close(again, found) and close(permuted, changed[:, order])
    assert not torch.allclose(permuted, changed)


def test_the_order_of_the_sequence_counts_with_rotary_embedding_alone() -> None:
    module, order = joint(), torch.tensor([4, 0, 3, 1, 2])
    x, context = tokens(), tokens(TOKENS, OTHER, seed=2)
    for table in (None, rotary()):
        found, changed = module(x, context, rotary=table)
        again, same = module(x[:, order], context, rotary=table)
        assert torch.allclose(again, found[:, order]) is (table is None)
        assert torch.allclose(same, changed) is (table is None)


def test_attention_depends_on_distances_and_not_on_positions() -> None:
    module, x = drawn(SelfAttention(WIDTH, HEADS)), tokens()
    later = rotary(SEQ + 3)[3:]
    assert close(module(x, rotary=later), module(x, rotary=rotary()))
    assert not torch.allclose(module(x, rotary=later), module(x))


def test_padding_is_not_seen_and_lengths_are_a_mask() -> None:
    module = joint()
    x, context = tokens(), tokens(TOKENS, OTHER, seed=2)
    lengths, of_context = torch.tensor([3, 5]), torch.tensor([0, 2], dtype=torch.int32)
    found, _ = module(x, context, mask=lengths, context_mask=of_context)
    x[0, 3:], context[0], context[1, 2:] = 99.0, -99.0, 99.0
    again, _ = module(x, context, mask=lengths, context_mask=of_context)
    assert close(again[0, :3], found[0, :3]) and close(again[1], found[1])
    alone, _ = module(x[:1, :3], context[:1, :0])
    assert close(alone, found[:1, :3])
    bools = torch.arange(SEQ) < lengths[:, None], torch.arange(TOKENS) < of_context[:, None]
    assert close(module(x, context, mask=bools[0], context_mask=bools[1])[0], again)


def test_no_context_and_an_empty_one_are_the_same() -> None:
    module, x = joint(), tokens()
    found, changed = module(x, tokens(0, OTHER), rotary=rotary())
    alone, none = module(x, rotary=rotary())
    assert torch.equal(found, alone) and none is None and changed.shape == (BATCH, 0, OTHER)


def test_a_block_begins_as_the_identity() -> None:
    module = TransformerBlock(WIDTH, HEADS, 10, context_width=OTHER).double()
    x, context, condition = tokens(), tokens(TOKENS, OTHER), tokens(WIDTH, 1)[..., 0]
    found, changed = module(x, condition, context)
    assert torch.equal(found, x) and torch.equal(changed, context)


def test_norms_of_q_and_k_are_over_the_whole_width_and_not_over_a_head() -> None:
    module = drawn(SelfAttention(WIDTH, HEADS))
    assert module.sequence.q_norm.weight.shape == (WIDTH,)
    x = tokens()
    found = module(x)
    with torch.no_grad():  # of one head ten times as much: only a norm over all heads tells
        module.sequence.qkv.weight[: WIDTH // HEADS] *= 10
    assert not torch.allclose(module(x), found)


def test_dropout_is_for_training_alone() -> None:
    module = drawn(TransformerBlock(WIDTH, HEADS, 10, dropout=0.5))
    given = tokens(), tokens(WIDTH, 1)[..., 0], tokens(TOKENS, WIDTH)
    torch.manual_seed(0)
    one, two = module(*given)[0], module(*given)[0]
    assert not torch.allclose(one, two)
    module.eval()
    assert torch.equal(module(*given)[0], module(*given)[0])
    assert close(module(*given)[0], plain.block(module.state_dict(), *given, HEADS)[0])


# -- dtypes, names, compilers ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_those_of_rounding(dtype) -> None:
    module = model(context_width=OTHER)
    torch.manual_seed(0)
    for weights in module.parameters():
        nn.init.normal_(weights, mean=0.05, std=0.2)
    module.to(dtype)
    given = tokens(), tokens(WIDTH, 1, seed=3)[..., 0], tokens(TOKENS, OTHER, seed=2)
    given = tuple(x.to(dtype) for x in given)
    found = module(*given)
    right = module.double()(*(x.double() for x in given))
    assert found.dtype == dtype
    error = (found.double() - right).norm() / right.norm()
    assert 0 < error < 8 * torch.finfo(dtype).eps


def test_autocast_computes_in_16_bits_with_weights_in_32() -> None:
    module = drawn(model(context_width=OTHER)).float()
    given = tokens(), tokens(WIDTH, 1, seed=3)[..., 0], tokens(TOKENS, OTHER, seed=2)
    given = tuple(x.float() for x in given)
    right = module(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(*given)
    assert 0 < (found - right).norm() / right.norm() < 0.1


def test_a_model_in_16_bits_keeps_its_angles() -> None:
    right = rotary_table(9, 4)
    for convert in (
        lambda table: table.bfloat16(),
        lambda table: table.half().to("cpu"),
        lambda table: table.to("meta").to_empty(device="cpu"),
    ):
        assert torch.equal(convert(RotaryTable(9, 4))(), right)
    exact = RotaryTable(9, 4).double()()
    assert exact.dtype == F64 and not torch.equal(exact, right.double())


def test_names_of_weights_are_those_that_files_have() -> None:
    stream = ["k_norm", "out", "out_norm", "q_norm", "qkv"]
    own = ["feed_forward.hidden_in", "feed_forward.hidden_out", "modulation.linear"]
    joint_names = {f"attention.{a}.{b}" for a in ("sequence", "context") for b in stream}
    fed_names = {f"{a}.{b}" for a in ("sequence", "context") for b in own}
    cross = {f"cross_attention.{name}" for name in ("q", "q_norm", "out", "out_norm")}
    cross |= {"cross_attention.context.qkv", "cross_attention.context.k_norm"}
    of_sequence = {f"attention.sequence.{b}" for b in stream} | {f"sequence.{b}" for b in own}

    def names(module: nn.Module) -> set[str]:
        return {name.rpartition(".")[0] for name in module.state_dict()}

    assert names(TransformerBlock(WIDTH, HEADS)) == joint_names | fed_names
    assert names(TransformerBlock(WIDTH, HEADS, context="cross")) == of_sequence | cross
    assert names(TransformerBlock(WIDTH, HEADS, context="none")) == of_sequence
    last = TransformerBlock(WIDTH, HEADS, returns_context=False)
    assert "attention.context.out.weight" not in last.state_dict()
    assert {name.split(".")[0] for name in model().state_dict()} == {"blocks"}, "no rotary table"


def test_the_defaults_are_the_target() -> None:
    module = multimodal.MultimodalTransformer()
    assert len(module.blocks) == 12 and module.rotary().shape == (186, 8, 2)
    block = module.blocks[0]
    assert block.sequence.feed_forward.hidden_in.weight.shape == (512, 128)
    assert block.attention.sequence.d_head == 16


def test_annotations_are_true(monkeypatch) -> None:
    """jaxtyping holds the shapes of a call's arguments and results against the annotations."""
    import jaxtyping

    checked = []
    kinds = [SelfAttention, JointAttention, CrossAttention, FeedForward, TransformerBlock]

    def holds(kind: type[nn.Module]) -> Callable[..., Any]:
        forward = kind.forward
        names = {**vars(jaxtyping), "Tensor": Tensor}
        names["Mask"] = jaxtyping.Bool[Tensor, "batch length"] | jaxtyping.Integer[Tensor, " batch"]
        hints = {name: eval(text, names) for name, text in forward.__annotations__.items()}

        def call(self: nn.Module, *args: Any, **options: Any) -> Any:
            found = forward(self, *args, **options)
            given = dict(zip([*hints], args, strict=False)) | options
            returned = found if isinstance(found, tuple) else (found,)
            wanted = getattr(hints["return"], "__args__", None) or (hints["return"],)
            with jaxtyping.jaxtyped("context"):
                for name, x in given.items():
                    if x is not None and not name.endswith("mask"):
                        kind_of_x = getattr(hints[name], "__args__", (hints[name],))[0]
                        assert isinstance(x, kind_of_x), (kind, name)
                for x, hint in zip(returned, wanted, strict=True):
                    if x is not None:
                        assert isinstance(x, getattr(hint, "__args__", (hint,))[0]), kind
                        checked.append(kind)
            return found

        return call

    for kind in kinds:
        monkeypatch.setattr(kind, "forward", holds(kind))
    condition = tokens(WIDTH, 1, seed=3)[..., 0]
    for context in ("joint", "cross"):
        drawn(model(context=context, context_width=OTHER))(
            tokens(), condition, tokens(TOKENS, OTHER)
        )
    assert {*checked} == {*kinds}


def toy_call() -> tuple[Tensor, ...]:
    return tokens(), tokens(WIDTH, 1, seed=3)[..., 0], tokens(TOKENS, OTHER, seed=2)


@pytest.mark.slow
def test_a_model_compiles_to_one_graph_for_all_lengths() -> None:
    module = drawn(model(layers=1, context_width=OTHER)).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        x, condition, context = toy_call()
        assert close(compiled(x, condition, context), module(x, condition, context))
        with torch.compiler.set_stance("fail_on_recompile"):
            x, context = tokens(4), tokens(2, OTHER, seed=2)
            assert close(compiled(x, condition, context), module(x, condition, context))


@pytest.mark.slow
def test_a_model_is_exported_for_any_batch_and_lengths() -> None:
    module = drawn(model(context_width=OTHER)).eval()
    dynamic = torch.export.Dim.DYNAMIC
    sizes = {
        "x": {0: dynamic, 1: dynamic},
        "condition": {0: dynamic},
        "context": {0: dynamic, 1: dynamic},
        "mask": {0: dynamic},
    }
    x, condition, context = toy_call()
    lengths = torch.tensor([3, 5])
    exported = torch.export.export(
        module, (x, condition, context), {"mask": lengths}, dynamic_shapes=sizes
    )
    x, condition, context, lengths = x[:, :4], condition, tokens(2, OTHER), torch.tensor([4, 1])
    again = (torch.cat([y, y]) for y in (x, condition, context, lengths))
    x, condition, context, lengths = again
    found = exported.module()(x, condition, context, mask=lengths)
    assert close(found, module(x, condition, context, mask=lengths))
