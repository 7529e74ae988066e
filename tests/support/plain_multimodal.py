"""The modules of flash_attention.multimodal once more, written another way: in float64, from the
weights of a state_dict by name, a sample, a head and a query at a time, with complex numbers."""

import cmath
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def inner(state: State, name: str) -> dict[str, Tensor]:
    """The weights of a module within a module."""
    return {n.removeprefix(f"{name}."): x for n, x in state.items() if n.startswith(f"{name}.")}


def linear(state: State, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, state[f"{name}.weight"].double())
    return y + state[f"{name}.bias"].double() if f"{name}.bias" in state else y


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight.double()


def layer_norm(x: Tensor, eps: float) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    return off / ((off**2).mean(-1, keepdim=True) + eps) ** 0.5


def turned(x: Tensor, position: int, base: float) -> Tensor:
    """A token's head with element 2i and 2i + 1 as a complex number, times exp(i angle)."""
    found = x.clone()
    for i in range(0, len(x), 2):
        angle = position * base ** (-i / len(x))
        number = torch.complex(x[i], x[i + 1]) * cmath.exp(1j * angle)
        found[i], found[i + 1] = number.real, number.imag
    return found


def split(x: Tensor, heads: int, base: float | None = None) -> Tensor:
    """(tokens, width) as (heads, tokens, d_head), turned if there is a base."""
    d_head = x.shape[-1] // heads
    parts = [x[:, h * d_head : (h + 1) * d_head] for h in range(heads)]
    if base is not None:
        parts = [torch.stack([turned(row, i, base) for i, row in enumerate(x)]) for x in parts]
    return torch.stack(parts)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Sequence[bool]) -> Tensor:
    """Attention of one sample, (heads, tokens, d_head), as (tokens, width)."""
    rows = []
    for i in range(q.shape[1]):
        heads = []
        for h in range(q.shape[0]):
            o = torch.zeros_like(v[h, 0]) if v.shape[1] else torch.zeros_like(q[h, i])
            weights = [
                math.exp(float(q[h, i] @ k[h, j]) / q.shape[2] ** 0.5) if seen[j] else 0.0
                for j in range(k.shape[1])
            ]
            for j, weight in enumerate(weights):
                o = o + (v[h, j] * (weight / sum(weights)) if weight else 0.0)
            heads.append(o)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def of_stream(
    state: State, x: Tensor, heads: int, eps: float, base: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of one sample of a sequence or a context."""
    width = state["k_norm.weight"].shape[0]
    rows = linear(state, "qkv", x)
    *queries, k, v = (rows[:, n : n + width] for n in range(0, rows.shape[1], width))
    k = split(rms(k, state["k_norm.weight"], eps), heads, base)
    q = k[:, :0]
    if queries:
        q = split(rms(queries[0], state["q_norm.weight"], eps), heads, base)
    return q, k, split(v, heads)


def output(state: State, o: Tensor, eps: float) -> Tensor:
    return rms(linear(state, "out", o), state["out_norm.weight"], eps)


def all_true(of: Tensor) -> list[list[bool]]:
    return [[True] * of.shape[1] for _ in of]


def joint_attention(
    state: State,
    x: Tensor,
    context: Tensor | None,
    heads: int,
    *,
    eps: float = 1e-6,
    base: float | None = None,
    mask: Sequence[Sequence[bool]] | None = None,
    context_mask: Sequence[Sequence[bool]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """JointAttention, and SelfAttention where the context is None."""
    own, found, of_context = inner(state, "sequence"), [], []
    other = inner(state, "context")
    for n, sample in enumerate(x.double()):
        q, k, v = of_stream(own, sample, heads, eps, base)
        seen = [*(mask or all_true(x))[n]]
        if context is not None:
            others = of_stream(other, context[n].double(), heads, eps, None)
            q, k, v = (torch.cat(pair, 1) for pair in zip((q, k, v), others, strict=True))
            seen += (context_mask or all_true(context))[n]
        o = attention(q, k, v, seen)
        found.append(output(own, o[: len(sample)], eps))
        if "out.weight" in other and context is not None:
            of_context.append(output(other, o[len(sample) :], eps))
    return torch.stack(found), torch.stack(of_context) if of_context else None


def cross_attention(
    state: State,
    x: Tensor,
    context: Tensor,
    heads: int,
    *,
    eps: float = 1e-6,
    base: float | None = None,
    context_mask: Sequence[Sequence[bool]] | None = None,
) -> Tensor:
    """CrossAttention."""
    found = []
    for n, sample in enumerate(x.double()):
        q = split(rms(linear(state, "q", sample), state["q_norm.weight"], eps), heads, base)
        _, k, v = of_stream(inner(state, "context"), context[n].double(), heads, eps, None)
        seen = (context_mask or all_true(context))[n]
        found.append(output(state, attention(q, k, v, seen), eps))
    return torch.stack(found)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def feed_forward(state: State, x: Tensor) -> Tensor:
    """FeedForward; with twice as many outputs as the second layer reads it is SwiGLU."""
    hidden, width = linear(state, "hidden_in", x), state["hidden_out.weight"].shape[1]
    if hidden.shape[-1] == 2 * width:
        hidden = silu(hidden[..., :width]) * hidden[..., width:]
    else:
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    return linear(state, "hidden_out", hidden)


def block(
    state: State,
    x: Tensor,
    condition: Tensor,
    context: Tensor | None,
    heads: int,
    *,
    eps: float = 1e-6,
    base: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """TransformerBlock, of the kind that its weights tell."""

    def modulation(name: str, width: int) -> list[Tensor]:
        rows = linear(state, f"{name}.modulation.linear", silu(condition.double()))
        return [rows[:, None, n : n + width] for n in range(0, rows.shape[1], width)]

    x = x.double()
    shift, scale, gate, *fed = modulation("sequence", x.shape[2])
    read = layer_norm(x, eps) * (1 + scale) + shift
    of_context, own = [], inner(state, "attention")
    is_cross = "cross_attention.q.weight" in state
    read_context = None
    if context is not None and not is_cross:
        context = context.double()
        s, t, *of_context = modulation("context", context.shape[2])
        read_context = layer_norm(context, eps) * (1 + t) + s
    found, change = joint_attention(own, read, read_context, heads, eps=eps, base=base)
    x = x + gate * found
    if is_cross:
        cross = inner(state, "cross_attention")
        x = x + cross_attention(cross, layer_norm(x, eps), context, heads, eps=eps)
    if change is not None:
        g, s, t, h = of_context
        context = context + g * change
        own = inner(state, "context.feed_forward")
        context = context + h * feed_forward(own, layer_norm(context, eps) * (1 + t) + s)
    shift, scale, gate = fed
    own = inner(state, "sequence.feed_forward")
    return x + gate * feed_forward(own, layer_norm(x, eps) * (1 + scale) + shift), context
