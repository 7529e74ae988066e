"""The transformer block with adaptive layer norms and feed-forward, and a model of such blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.functional import silu

from flash_attention.multimodal._adaptive import Adapted, adapted_streams
from flash_attention.multimodal._attend import BACKENDS, Backend
from flash_attention.multimodal._attention import (
    EPS,
    CrossAttention,
    JointAttention,
    SelfAttention,
)
from flash_attention.multimodal._checks import (
    check_choice,
    check_condition,
    check_dropout,
    check_heads,
    check_size,
    check_tokens,
)
from flash_attention.multimodal._linear import Stream, linear_streams
from flash_attention.multimodal._rotary import BASE, RotaryTable

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

    Mask = Bool[Tensor, "batch length"] | Integer[Tensor, " batch"]

Activation = Literal["gelu", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "swiglu")
Context = Literal["joint", "cross", "none"]
CONTEXTS: tuple[Context, ...] = ("joint", "cross", "none")


def _may_take_kernels(backend: Backend, x: Tensor) -> bool:
    """Whether a backend lets a kernel compute what follows on x."""
    return backend == "kernels" or (backend == "auto" and x.is_cuda)


def _is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is one of ours without hooks, so that its layers tell all that it does."""
    return type(module) is kind and not (module._forward_hooks or module._forward_pre_hooks)


def _linear(streams: Sequence[Stream], *, kernels: bool) -> list[Tensor]:
    """Return the outputs of the layers of a sequence, and of its context if it has one."""
    found = linear_streams(streams[0], streams[1] if len(streams) > 1 else None, kernels=kernels)
    return [y for y in found if y is not None]


class FeedForward(nn.Module):
    """Two linear layers per token. Between them stands GELU (the exact one), or with "swiglu" the
    SiLU of one half of `hidden_in`'s outputs times the other half.

    backend: as for `SelfAttention`, for the linear layers with GELU.
    """

    def __init__(
        self,
        width: int = 128,
        hidden: int = 512,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_choice("backend", backend, BACKENDS)
        check_size("width", width)
        check_size("feed_forward", hidden)
        check_choice("activation", activation, ACTIVATIONS)
        check_dropout(dropout)
        self.activation, self.backend = activation, backend
        self.hidden_in = nn.Linear(width, hidden * (2 if activation == "swiglu" else 1))
        self.hidden_out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        """Return the output for each token. Raises as `SelfAttention` does."""
        return _fed_forward([self], [x], kernels=_may_take_kernels(self.backend, x))[0]

    def incoming(self, x: Float[Tensor, "batch length width"]) -> Stream:
        """Return tokens with the first layer."""
        check_tokens("x", x, self.hidden_in.weight, may_be_empty=True)
        return Stream(x, self.hidden_in, gelu=self.activation == "gelu")

    def outgoing(self, hidden: Float[Tensor, "batch length hidden"]) -> Stream:
        """Return outputs of the first layer with the second one."""
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, -1)
            hidden = silu(gate) * value
        return Stream(self.dropout(hidden), self.hidden_out)


def _fed_forward(
    layers: Sequence[FeedForward], tokens: Sequence[Tensor], *, kernels: bool
) -> list[Tensor]:
    """Return the feed-forward of a sequence, and of its context if it has one."""
    pairs = zip(layers, tokens, strict=True)
    hidden = _linear([own.incoming(x) for own, x in pairs], kernels=kernels)
    pairs = zip(layers, hidden, strict=True)
    return _linear([own.outgoing(x) for own, x in pairs], kernels=kernels)


class Modulation(nn.Module):
    """Shift, scale and gate of an adaptive layer norm, for attention and for the feed-forward, from
    a condition: SiLU, then a linear layer to 6 · width. With parts=2 shift and scale alone.

    The linear layer begins as 0, so that a block begins as the identity.
    """

    def __init__(self, condition_width: int, width: int, parts: int = 6) -> None:
        super().__init__()
        check_size("condition_width", condition_width)
        self.parts = parts
        self.linear = nn.Linear(condition_width, parts * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self, condition: Float[Tensor, "batch condition_width"]
    ) -> tuple[Float[Tensor, "batch 1 width"], ...]:
        """Return shift, scale and gate of attention, then those of the feed-forward."""
        return self.linear(silu(condition))[:, None].chunk(self.parts, -1)


class _Stream(nn.Module):
    """The layers of the sequence, or of the context, in a block besides attention: modulation,
    norms without weights, and feed-forward. feed_forward: None for a context that nothing reads
    behind the block."""

    def __init__(
        self, width: int, condition_width: int, eps: float, feed_forward: FeedForward | None
    ) -> None:
        super().__init__()
        self.modulation = Modulation(condition_width, width, parts=6 if feed_forward else 2)
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        if feed_forward:
            self.feed_forward = feed_forward

    def modulated(
        self,
        x: Float[Tensor, "batch length width"],
        shift: Float[Tensor, "batch 1 width"],
        scale: Float[Tensor, "batch 1 width"],
    ) -> Float[Tensor, "batch length width"]:
        """Return the adaptive layer norm of x, in the dtype of x, by PyTorch."""
        return (self.norm(x) * (1 + scale) + shift).to(x.dtype)

    @staticmethod
    def gated(
        x: Float[Tensor, "batch length width"],
        gate: Float[Tensor, "batch 1 width"],
        change: Float[Tensor, "batch length width"],
    ) -> Float[Tensor, "batch length width"]:
        """Return x plus the gated change, by PyTorch."""
        return x + gate * change

    def computed(self, asked: Adapted) -> tuple[Tensor, Tensor]:
        """Return sum and adaptive norm by PyTorch; without a norm both are the sum."""
        total = asked.x
        if asked.change is not None and asked.gate is not None:
            total = self.gated(total, asked.gate, asked.change)
        if asked.shift is None or asked.scale is None:
            return total, total
        return total, self.modulated(total, asked.shift, asked.scale)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind an adaptive layer norm and before a gate, each added
    to what it reads. A condition, such as the embedding of a time step, gives shift, scale and
    gate.

    context:
        "joint": `JointAttention`. The context has modulation and feed-forward of its own, and is
            another behind the block; with returns_context=False it stays as it is, and gives keys
            and values alone.
        "cross": `SelfAttention`; then `CrossAttention`, of a layer norm of x, is added without a
            gate. The context stays as it is.
        "none": `SelfAttention` alone.
    context_width, condition_width: width by default.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 8,
        feed_forward: int = 512,
        *,
        context: Context = "joint",
        context_width: int | None = None,
        condition_width: int | None = None,
        returns_context: bool = True,
        activation: Activation = "gelu",
        eps: float = EPS,
        bias: bool = False,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_choice("context", context, CONTEXTS)
        check_heads(width, heads)
        of_condition = width if condition_width is None else condition_width
        tokens = width if context_width is None else context_width

        def feed(width: int) -> FeedForward:
            return FeedForward(
                width, feed_forward, activation=activation, dropout=dropout, backend=backend
            )

        options: dict[str, Any] = {"eps": eps, "bias": bias, "dropout": dropout, "backend": backend}
        self.kind, self.backend = context, backend
        self.sequence = _Stream(width, of_condition, eps, feed(width))
        if context == "joint":
            options |= {"context_width": tokens, "returns_context": returns_context}
            self.attention: nn.Module = JointAttention(width, heads, **options)
            own = feed(tokens) if returns_context else None
            self.context = _Stream(tokens, of_condition, eps, own)
        else:
            self.attention = SelfAttention(width, heads, **options)
        if context == "cross":
            self.cross_norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
            self.cross_attention = CrossAttention(width, heads, context_width=tokens, **options)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        condition: Float[Tensor, "batch condition_width"],
        context: Float[Tensor, "batch tokens context_width"] | None = None,
        *,
        rotary: Float[Tensor, "positions pairs 2"] | None = None,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
    ) -> tuple[
        Float[Tensor, "batch length width"], Float[Tensor, "batch tokens context_width"] | None
    ]:
        """Return x and the context behind the block.

        context: None or no tokens leave a "joint" block with x alone. A "cross" block needs some,
            and a "none" block takes None. rotary, mask, context_mask: as for `SelfAttention`.

        Raises ValueError and TypeError for tensors that do not fit the block or each other.
        """
        own = self.sequence
        check_tokens("x", x, own.feed_forward.hidden_in.weight)
        check_condition(condition, x, own.modulation.linear.weight)
        self._check_context(context, context_mask)
        streams, tokens = [own], [x]
        if isinstance(self.attention, JointAttention) and context is not None:
            check_tokens("context", context, self.attention.context.qkv.weight, may_be_empty=True)
            streams, tokens = [own, self.context], [x, context]
        modulations = self._modulations(streams, condition)
        read = self._adapted(streams, tokens, modulations)
        found = self._attended([y for _, y in read], {"rotary": rotary, "mask": mask}, context_mask)
        # The context has no part in what follows where attention returns none of it
        streams, modulations = streams[: len(found)], modulations[: len(found)]
        gates, of_feed_forward = [m[2] for m in modulations], [m[3:] for m in modulations]
        if self.kind == "cross":
            x = self._gated(streams, tokens, found, gates)[0]
            read_by_cross = self.cross_norm(x).to(x.dtype)
            x = x + self.cross_attention(read_by_cross, context, context_mask=context_mask)
            read = self._adapted(streams, [x], of_feed_forward)
        else:
            read = self._adapted(streams, tokens, of_feed_forward, found, gates)
        tokens = [total for total, _ in read]
        changes = self._fed_forward(streams, [y for _, y in read])
        tokens = self._gated(streams, tokens, changes, [m[2] for m in of_feed_forward])
        return tokens[0], tokens[1] if len(tokens) > 1 else context

    def _modulations(
        self, streams: Sequence[_Stream], condition: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """Return shift, scale and gate of each stream, twice, or shift and scale alone."""
        layers = [stream.modulation for stream in streams]
        kernels = _may_take_kernels(self.backend, condition)
        if not kernels or not all(_is_own(layer, Modulation) for layer in layers):
            return [layer(condition) for layer in layers]
        read = [Stream(condition[None], layer.linear, silu=True) for layer in layers]
        found = _linear(read, kernels=True)
        pairs = zip(layers, found, strict=True)
        return [y[0][:, None].chunk(layer.parts, -1) for layer, y in pairs]

    def _adapted(
        self,
        streams: Sequence[_Stream],
        tokens: Sequence[Tensor],
        modulations: Sequence[Sequence[Tensor]],
        changes: Sequence[Tensor | None] = (None, None),
        gates: Sequence[Tensor | None] = (None, None),
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens of each stream, plus the gated changes if there are any, and their
        adaptive layer norms."""
        asked = [
            Adapted(x, change, None if change is None else gate, stream.norm, scale, shift)
            for stream, x, change, gate, (shift, scale, *_) in zip(
                streams, tokens, changes, gates, modulations, strict=False
            )
        ]
        return self._summed(streams, asked)

    def _gated(
        self,
        streams: Sequence[_Stream],
        tokens: Sequence[Tensor],
        changes: Sequence[Tensor],
        gates: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the tokens of each stream plus the gated changes."""
        given = zip(tokens[: len(streams)], changes, gates, strict=True)
        asked = [Adapted(x, change, gate) for x, change, gate in given]
        return [total for total, _ in self._summed(streams, asked)]

    def _summed(
        self, streams: Sequence[_Stream], asked: Sequence[Adapted]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return sum and adaptive norm of each stream: by a kernel, or by PyTorch."""
        found = adapted_streams(asked, kernels=_may_take_kernels(self.backend, asked[0].x))
        each = zip(streams, asked, found, strict=True)
        return [stream.computed(own) if pair is None else pair for stream, own, pair in each]

    def _attended(
        self, read: Sequence[Tensor], masks: dict[str, Any], context_mask: Mask | None
    ) -> list[Tensor]:
        """Return the output of attention for the sequence, and for the context if it has one."""
        if self.kind != "joint":
            return [self.attention(read[0], **masks)]
        of_context = read[1] if len(read) > 1 else None
        found = self.attention(read[0], of_context, **masks, context_mask=context_mask)
        return [y for y in found if y is not None]

    def _fed_forward(self, streams: Sequence[_Stream], read: Sequence[Tensor]) -> list[Tensor]:
        """Return the feed-forward of each stream."""
        layers = [stream.feed_forward for stream in streams]
        kernels = _may_take_kernels(self.backend, read[0])
        if kernels and all(_is_own(layer, FeedForward) for layer in layers):
            return _fed_forward(layers, read, kernels=True)
        return [layer(x) for layer, x in zip(layers, read, strict=True)]

    def _check_context(self, context: Tensor | None, mask: Tensor | None) -> None:
        """Raises ValueError for a context that the block does not take, and for none where it needs
        one."""
        if self.kind == "cross" and context is None:
            raise ValueError(
                "context is None and the block was made with context='cross': pass one, or make "
                "the block with context='none'"
            )
        if self.kind == "none" and (context is not None or mask is not None):
            raise ValueError(
                "a context or its mask is given and the block was made with context='none': leave "
                "them out, or make the block with context='joint' or 'cross'"
            )


class MultimodalTransformer(nn.Module):
    """Layers of `TransformerBlock`, with a rotary table for sequences of up to `length` tokens.

    The defaults are those of a small model of signals with a text beside them: 12 layers of width
    128 with 8 heads of 16 and feed-forward 512, for 186 tokens. base: of the rotary table. The
    other arguments are those of `TransformerBlock`. The last layer of a "joint" model computes no
    context.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 8,
        feed_forward: int = 512,
        layers: int = 12,
        length: int = 186,
        *,
        context: Context = "joint",
        context_width: int | None = None,
        condition_width: int | None = None,
        activation: Activation = "gelu",
        eps: float = EPS,
        bias: bool = False,
        dropout: float = 0.0,
        backend: Backend = "auto",
        base: float = BASE,
    ) -> None:
        super().__init__()
        check_size("layers", layers)
        self.rotary = RotaryTable(length, check_heads(width, heads), base=base)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                *(width, heads, feed_forward),
                context=context,
                context_width=context_width,
                condition_width=condition_width,
                returns_context=layer < layers - 1,
                activation=activation,
                eps=eps,
                bias=bias,
                dropout=dropout,
                backend=backend,
            )
            for layer in range(layers)
        )

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        condition: Float[Tensor, "batch condition_width"],
        context: Float[Tensor, "batch tokens context_width"] | None = None,
        *,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return x behind the last layer. Arguments and errors are those of `TransformerBlock`."""
        rotary = self.rotary()
        for block in self.blocks:
            x, context = block(
                *(x, condition, context), rotary=rotary, mask=mask, context_mask=context_mask
            )
        return x
