"""Joint attention by PyTorch's operators: what its kernels are measured beside, and the norm and
the rotary embedding of the references."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from flash_helpers.measure.libraries import TRITON, Package, compiled
from flash_helpers.operations.joint_attention.problem import JointAttention

PACKAGES: Mapping[str, Package] = MappingProxyType({"triton_joint": TRITON})


def turned(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return x, (batch, length, heads, d_head), with each pair of elements turned, in the dtype of
    x; computed in the table's precision at least."""
    cos, sin = rotary[:, None].unbind(-1)  # (length, 1, pairs)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)


def queries_keys_values(
    problem: JointAttention, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q, K and V of attention, (batch, tokens, heads, d_head), each operator's result
    rounded to the dtype of the tensors."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (problem.heads, problem.d_head))

    def normed(name: str) -> torch.Tensor:
        weight = tensors[f"{name}_weight"]
        return heads(rms_norm(tensors[name], weight.shape, weight, problem.eps))

    def joined(name: str, own: torch.Tensor, of_context: torch.Tensor | None) -> torch.Tensor:
        if name != "v" and problem.rotary:
            own = turned(own, tensors["rotary"])
        return own if of_context is None else torch.cat((own, of_context), 1)

    def both(name: str) -> torch.Tensor:
        context, value = f"context_{name}", heads if name == "v" else None
        own = value(tensors[name]) if value else normed(name)
        if context not in tensors:
            return joined(name, own, None)
        return joined(name, own, value(tensors[context]) if value else normed(context))

    return both("q"), both("k"), both("v")


def outputs(problem: JointAttention, o: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return o and context_o, if the problem has it, from attention, (batch, n_queries, heads,
    d_head)."""
    own, of_context = o.flatten(2).split(
        [problem.length, problem.n_queries - problem.length], dim=1
    )
    return {"o": own} if not problem.has("context_o") else {"o": own, "context_o": of_context}


def attended(
    problem: JointAttention, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, and context_o if the problem has it, by PyTorch's operators."""
    q, k, v = (x.transpose(1, 2) for x in queries_keys_values(problem, tensors))
    o = scaled_dot_product_attention(q, k, v, scale=problem.softmax_scale)
    return outputs(problem, o.transpose(1, 2))


_compiled = functools.cache(lambda: compiled(attended))


def run(
    library: str, problem: JointAttention, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, and context_o if the problem has it, by one of the operation's libraries."""
    given = {tensor.name: tensors[tensor.name] for tensor in problem.inputs}
    if library == "triton_joint":
        from flash_helpers.measure.triton_joint import attended as in_triton

        o, context_o = in_triton(given, problem.heads, problem.eps, problem.softmax_scale)
        return {"o": o, "context_o": context_o} if problem.has("context_o") else {"o": o}
    found: dict[str, torch.Tensor] = (_compiled() if library == "compiled_joint" else attended)(
        problem, given
    )
    return found
