"""The transformer block with adaptive layer norms and feed-forward, and a model of such blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from flash_attention.multimodal._attend import Backend
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
from flash_attention.multimodal._rotary import BASE, RotaryTable

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

    Mask = Bool[Tensor, "batch length"] | Integer[Tensor, " batch"]

Activation = Literal["gelu", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "swiglu")
Context = Literal["joint", "cross", "none"]
CONTEXTS: tuple[Context, ...] = ("joint", "cross", "none")


class FeedForward(nn.Module):
    """Two linear layers per token. Between them stands GELU (the exact one), or with "swiglu" the
    SiLU of one half of `hidden_in`'s outputs times the other half."""

    def __init__(
        self,
        width: int = 128,
        hidden: int = 512,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_size("width", width)
        check_size("feed_forward", hidden)
        check_choice("activation", activation, ACTIVATIONS)
        check_dropout(dropout)
        self.activation = activation
        self.hidden_in = nn.Linear(width, hidden * (2 if activation == "swiglu" else 1))
        self.hidden_out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        """Return the output for each token. Raises as `SelfAttention` does."""
        check_tokens("x", x, self.hidden_in.weight, may_be_empty=True)
        hidden = self.hidden_in(x)
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, -1)
            hidden = silu(gate) * value
        else:
            hidden = gelu(hidden)
        return self.hidden_out(self.dropout(hidden))


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
        """Return the adaptive layer norm of x, in the dtype of x."""
        return (self.norm(x) * (1 + scale) + shift).to(x.dtype)

    def fed_forward(
        self, x: Float[Tensor, "batch length width"], *modulation: Float[Tensor, "batch 1 width"]
    ) -> Float[Tensor, "batch length width"]:
        """Return x plus its feed-forward. modulation: shift, scale and gate."""
        shift, scale, gate = modulation
        return self.gated(x, gate, self.feed_forward(self.modulated(x, shift, scale)))

    @staticmethod
    def gated(
        x: Float[Tensor, "batch length width"],
        gate: Float[Tensor, "batch 1 width"],
        change: Float[Tensor, "batch length width"],
    ) -> Float[Tensor, "batch length width"]:
        """Return x plus the gated change."""
        return x + gate * change


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
            return FeedForward(width, feed_forward, activation=activation, dropout=dropout)

        options: dict[str, Any] = {"eps": eps, "bias": bias, "dropout": dropout, "backend": backend}
        self.kind = context
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
        shift, scale, gate, *of_feed_forward = own.modulation(condition)
        read = own.modulated(x, shift, scale)
        masks = {"rotary": rotary, "mask": mask}
        if self.kind == "joint":
            masks["context_mask"] = context_mask
            found, context = self._joint(read, condition, context, masks)
        else:
            found = self.attention(read, **masks)
        x = own.gated(x, gate, found)
        if self.kind == "cross":
            read = self.cross_norm(x).to(x.dtype)
            x = x + self.cross_attention(read, context, context_mask=context_mask)
        return own.fed_forward(x, *of_feed_forward), context

    def _joint(
        self, read: Tensor, condition: Tensor, context: Tensor | None, masks: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention for the sequence, and the context behind the block."""
        if context is None:
            return self.attention(read, None, **masks)
        attention, own = self.attention, self.context
        assert isinstance(attention, JointAttention)
        check_tokens("context", context, attention.context.qkv.weight, may_be_empty=True)
        shift, scale, *others = own.modulation(condition)
        found, change = attention(read, own.modulated(context, shift, scale), **masks)
        if change is None:
            return found, context
        gate, *of_feed_forward = others
        return found, own.fed_forward(own.gated(context, gate, change), *of_feed_forward)

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
