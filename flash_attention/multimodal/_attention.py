"""Self, cross and joint attention, with norms of Q and K over the whole width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from flash_attention.multimodal._attend import BACKENDS, Backend, attend
from flash_attention.multimodal._checks import (
    check_batch,
    check_choice,
    check_dropout,
    check_heads,
    check_rotary,
    check_size,
    check_tokens,
    checked_mask,
)
from flash_attention.multimodal._joint import joint_attention, takes
from flash_attention.multimodal._linear import Stream, linear_streams
from flash_attention.multimodal._qk_norm_rope import qk_norm_rope
from flash_attention.multimodal._qk_norm_rope import takes as takes_qk_norm_rope
from flash_attention.multimodal._rotary import rotate
from flash_attention.multimodal._streams import wants_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

    Mask = Bool[Tensor, "batch length"] | Integer[Tensor, " batch"]

EPS = 1e-6


class _Norm(nn.RMSNorm):
    """RMSNorm in the dtype of x, also where weights are in another, as under autocast."""

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Return x over the root mean square of its last dimension, times the weight."""
        assert self.weight is not None
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Projections(nn.Module):
    """The layers of one sequence: Q, K and V by one linear layer, the norms of Q and K, and the
    output's linear layer with the norm behind it.

    tokens: width of the tokens, which is also that of the output. width: of all heads together.
    has_queries: whether the sequence has queries and an output, beside keys and values.
    """

    def __init__(
        self, tokens: int, width: int, heads: int, eps: float, bias: bool, has_queries: bool = True
    ) -> None:
        super().__init__()
        self.d_head = check_heads(width, heads)
        check_size("context_width", tokens)
        self.width, self.has_queries = width, has_queries
        self.qkv = nn.Linear(tokens, (3 if has_queries else 2) * width, bias=bias)
        self.k_norm = _Norm(width, eps=eps)
        if has_queries:
            self.q_norm = _Norm(width, eps=eps)
            self.out = nn.Linear(width, tokens, bias=bias)
            self.out_norm = _Norm(tokens, eps=eps)

    def keys_and_values(
        self, projected: Float[Tensor, "batch seq parts"]
    ) -> tuple[Float[Tensor, "batch seq heads d_head"], Float[Tensor, "batch seq heads d_head"]]:
        """Return K, behind its norm, and V."""
        k, v = projected.split(self.width, -1)[-2:]
        return self.heads(self.k_norm(k)), self.heads(v)

    def queries(
        self, projected: Float[Tensor, "batch seq parts"]
    ) -> Float[Tensor, "batch seq heads d_head"]:
        """Return Q, behind its norm."""
        q = projected.split(self.width, -1)[0]
        return self.heads(self.q_norm(q))

    def heads(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq heads d_head"]:
        """Split into heads."""
        return x.unflatten(-1, (-1, self.d_head))

    def outgoing(self, o: Float[Tensor, "batch seq width"]) -> Stream:
        """Return the output of attention with the layers to the width of the tokens."""
        return Stream(o, self.out, self.out_norm)

    def incoming(self, x: Float[Tensor, "batch seq tokens"]) -> Stream:
        """Return tokens with the layer of Q, K and V."""
        return Stream(x, self.qkv)

    def parts(self, projected: Float[Tensor, "batch seq parts"]) -> dict[str, Tensor]:
        """Return what the norms read, by the names of operation joint_attention: q, k and v, of all
        heads together, and the norms' weights in their dtype."""
        names = ("q", "k", "v") if self.has_queries else ("k", "v")
        found = dict(zip(names, projected.split(self.width, -1), strict=True))
        norms = {"k": self.k_norm} | ({"q": self.q_norm} if self.has_queries else {})
        for name, norm in norms.items():
            assert norm.weight is not None
            found[f"{name}_weight"] = norm.weight.to(projected.dtype)
        return found


class _Attention(nn.Module):
    """The base of the three modules: dropout and the backend."""

    def __init__(self, dropout: float, backend: Backend) -> None:
        super().__init__()
        check_dropout(dropout)
        check_choice("backend", backend, BACKENDS)
        self.dropout, self.backend = dropout, backend

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "batch seq heads d_head"]:
        """Compute attention by the module's backend."""
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, mask, dropout=dropout, backend=self.backend)

    def may_take_kernels(self, x: Tensor) -> bool:
        """Whether the backend lets a kernel compute what follows on x."""
        return self.backend == "kernels" or (self.backend == "auto" and x.is_cuda)

    def linear(self, own: Stream, other: Stream | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the linear layers of a sequence and of its context by the module's backend."""
        return linear_streams(own, other, kernels=self.may_take_kernels(own.x))

    @staticmethod
    def gathered(
        own: _Projections,
        projected: Tensor,
        rotary: Tensor | None,
        other: _Projections | None = None,
        of_context: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors of operation joint_attention, by name, without those left out."""
        tensors = own.parts(projected)
        if rotary is not None:
            tensors["rotary"] = rotary[: projected.shape[1]]
        if other is not None and of_context is not None and of_context.shape[1]:
            tensors |= {f"context_{name}": x for name, x in other.parts(of_context).items()}
        return tensors

    def fused(
        self,
        own: _Projections,
        projected: Tensor,
        rotary: Tensor | None,
        seen: Tensor | None,
        other: _Projections | None = None,
        of_context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the outputs of attention of a sequence and its context, (batch, tokens, width),
        with norms and rotary embedding by one operation, or by one before attention; None where no
        kernel computes either, and where the backend asks for none."""
        if rotary is not None:
            check_rotary(rotary, projected.shape[1], own.d_head)
        if not self.may_take_kernels(projected):
            return None
        tensors = self.gathered(own, projected, rotary, other, of_context)
        heads, dropout = own.width // own.d_head, self.dropout if self.training else 0.0
        eps = own.k_norm.eps
        assert eps is not None
        if (
            self.backend == "auto"
            and torch.compiler.is_compiling()
            and wants_gradients(tensors.values())
        ):
            return None  # PyTorch's compiler fuses what a recomputation would compute twice
        if takes(tensors, heads, masked=seen is not None, dropout=dropout):
            return joint_attention(tensors, heads, eps)
        if seen is not None or dropout > 0 or not takes_qk_norm_rope(tensors, heads):
            return None
        o = self.attend(*qk_norm_rope(tensors, heads, eps), None).flatten(-2)
        length = projected.shape[1]
        return o[:, :length], o[:, length:]

    def extra_repr(self) -> str:
        """Return the options in the text of a model."""
        return f"dropout={self.dropout}, backend={self.backend!r}"


def _turned(
    rotary: Float[Tensor, "positions pairs 2"] | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return Q or K with rotary embedding, if there is any."""
    if rotary is None:
        return tensors
    check_rotary(rotary, tensors[0].shape[1], tensors[0].shape[3])
    return tuple(rotate(x, rotary) for x in tensors)


class SelfAttention(_Attention):
    """Attention of a sequence to itself.

    Q, K and V are one linear layer of x. Q and K are normalised over the whole width, all heads
    together (RMSNorm with a weight), split into heads and turned by rotary embedding. A linear
    layer and an RMSNorm follow on attention. dropout is that of the softmax's elements.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 8,
        *,
        eps: float = EPS,
        bias: bool = False,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dropout, backend)
        check_heads(width, heads)
        self.sequence = _Projections(width, width, heads, eps, bias)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        *,
        rotary: Float[Tensor, "positions pairs 2"] | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return the output for each token.

        rotary: `rotary_table` of as many positions as x has tokens, or more; None turns nothing.
        mask: tokens that are seen: bools, or the number of tokens of each sample, of which those
            behind are padding. A number above the length stands for the length.

        Raises ValueError and TypeError for tensors that do not fit the module or each other.
        """
        check_tokens("x", x, self.sequence.qkv.weight)
        seen = checked_mask("mask", mask, x)
        projected, _ = self.linear(self.sequence.incoming(x))
        o = self._attended(projected, rotary, seen)
        return self.linear(self.sequence.outgoing(o))[0]

    def _attended(
        self,
        projected: Float[Tensor, "batch length parts"],
        rotary: Float[Tensor, "positions pairs 2"] | None,
        seen: Bool[Tensor, "batch keys"] | None,
    ) -> Float[Tensor, "batch length width"]:
        """Return attention of the projections."""
        if (outputs := self.fused(self.sequence, projected, rotary, seen)) is not None:
            return outputs[0]
        q, (k, v) = self.sequence.queries(projected), self.sequence.keys_and_values(projected)
        q, k = _turned(rotary, q, k)
        return self.attend(q, k, v, seen).flatten(-2)


class CrossAttention(_Attention):
    """Attention of a sequence to a context, which may have another width.

    Q is a linear layer of x, K and V are one of the context. Norms and output are those of
    `SelfAttention`. Rotary embedding turns Q alone: a context has no positions.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 8,
        *,
        context_width: int | None = None,
        eps: float = EPS,
        bias: bool = False,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dropout, backend)
        check_heads(width, heads)
        self.q = nn.Linear(width, width, bias=bias)
        self.q_norm = _Norm(width, eps=eps)
        tokens = width if context_width is None else context_width
        self.context = _Projections(tokens, width, heads, eps, bias, has_queries=False)
        self.out = nn.Linear(width, width, bias=bias)
        self.out_norm = _Norm(width, eps=eps)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        context: Float[Tensor, "batch tokens context_width"],
        *,
        rotary: Float[Tensor, "positions pairs 2"] | None = None,
        context_mask: Mask | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return the output for each token of x. A sample whose context is all padding has the
        output of attention 0. rotary, context_mask and errors: as for `SelfAttention`."""
        check_tokens("x", x, self.q.weight)
        check_tokens("context", context, self.context.qkv.weight)
        check_batch(x, context)
        seen = checked_mask("context_mask", context_mask, context)
        projected, of_context = self.linear(Stream(x, self.q), self.context.incoming(context))
        assert of_context is not None
        (q,) = _turned(rotary, self.context.heads(self.q_norm(projected)))
        k, v = self.context.keys_and_values(of_context)
        o = self.attend(q, k, v, seen).flatten(-2)
        return self.linear(Stream(o, self.out, self.out_norm))[0]


class JointAttention(_Attention):
    """Attention of a sequence and its context to both of them, as one sequence of tokens.

    Each of the two has linear layers and norms of its own, as `SelfAttention` has them. Rotary
    embedding turns Q and K of the sequence alone. returns_context: whether the context has queries
    and an output; in the last layer of a model nobody reads it.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 8,
        *,
        context_width: int | None = None,
        returns_context: bool = True,
        eps: float = EPS,
        bias: bool = False,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dropout, backend)
        check_heads(width, heads)
        self.sequence = _Projections(width, width, heads, eps, bias)
        tokens = width if context_width is None else context_width
        self.context = _Projections(tokens, width, heads, eps, bias, returns_context)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        context: Float[Tensor, "batch tokens context_width"] | None = None,
        *,
        rotary: Float[Tensor, "positions pairs 2"] | None = None,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
    ) -> tuple[
        Float[Tensor, "batch length width"], Float[Tensor, "batch tokens context_width"] | None
    ]:
        """Return the outputs for each token of x and of the context; None for a context that is
        None or not returned.

        A context of no tokens, or None, leaves attention of x to itself. rotary, mask,
        context_mask and errors: as for `SelfAttention`.
        """
        own, other = self.sequence, self.context
        check_tokens("x", x, own.qkv.weight)
        seen = checked_mask("mask", mask, x)
        if context is None:
            if context_mask is not None:
                raise ValueError("context_mask is given without a context: pass both or neither")
        else:
            check_tokens("context", context, other.qkv.weight, may_be_empty=True)
            check_batch(x, context)
            seen = _joined_masks(
                (seen, x), (checked_mask("context_mask", context_mask, context), context)
            )
        of_x, of_context = self.linear(
            own.incoming(x), None if context is None else other.incoming(context)
        )
        o, context_o = self._attended(of_x, of_context, rotary, seen)
        return self.linear(
            own.outgoing(o), None if context_o is None else other.outgoing(context_o)
        )

    def _attended(
        self,
        of_x: Float[Tensor, "batch length parts"],
        of_context: Float[Tensor, "batch tokens other_parts"] | None,
        rotary: Float[Tensor, "positions pairs 2"] | None,
        seen: Bool[Tensor, "batch keys"] | None,
    ) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch tokens width"] | None]:
        """Return attention of both projections; None for a context that is None or has no
        queries."""
        own, other = self.sequence, self.context
        has_output = of_context is not None and other.has_queries
        fused = self.fused(own, of_x, rotary, seen, other, of_context)
        if fused is not None:
            return fused[0], fused[1] if has_output else None
        q, (k, v) = own.queries(of_x), own.keys_and_values(of_x)
        q, k = _turned(rotary, q, k)
        if of_context is not None:
            pairs = zip((k, v), other.keys_and_values(of_context), strict=True)
            k, v = (torch.cat(pair, 1) for pair in pairs)
            if has_output:
                q = torch.cat((q, other.queries(of_context)), 1)
        o = self.attend(q, k, v, seen).flatten(-2)
        length = of_x.shape[1]
        return o[:, :length], o[:, length:] if has_output else None


def _joined_masks(
    *masks: tuple[Tensor | None, Tensor],
) -> Bool[Tensor, "batch keys"] | None:
    """Return masks of tokens as one of all tokens; None if all are seen. masks: each beside the
    tokens that it is of."""
    if all(mask is None for mask, _ in masks):
        return None
    found = (
        torch.ones(of.shape[:2], dtype=torch.bool, device=of.device) if mask is None else mask
        for mask, of in masks
    )
    return torch.cat([*found], 1)
