"""Joint attention with its norms and rotary embedding by one operation of the kernels, where the
registry has a kernel for the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attention._operators import compile_while_tracing, define
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.joint_attention.problem import JointAttention as Problem
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import Laid, element_of, posed_problem
from flash_helpers.tune.best import choose_config

if TYPE_CHECKING:
    from jaxtyping import Float

# Batch, length and context that stand for all others while torch.compile traces a call.
_TRACED = (1, 256, 64)
_MOST_KEPT = 1024  # answers for different sizes
_CONTEXT = ("context_q", "context_k", "context_v", "context_q_weight", "context_k_weight")
_INPUTS = ("q", "k", "v", "q_weight", "k_weight", "rotary", *_CONTEXT)
Options = tuple[tuple[str, Any], ...]


def _options(heads: int, eps: float) -> Options:
    return (("heads", heads), ("eps", eps))


def _choose(asked: tuple[Any, Options], tensors: Mapping[str, Laid]) -> Config:
    """Return the config for the problem that tensors pose."""
    element = element_of("q", tensors["q"], Problem.elements)
    problem = posed_problem(Problem, element, tensors, **dict(asked[1]))
    return choose_config(problem, tensors["q"].device)


def _given(*inputs: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a call, which are given in the order of `_INPUTS`, with an empty output
    of a context that has queries."""
    found = {name: x for name, x in zip(_INPUTS, inputs, strict=True) if x is not None}
    if "context_q" in found:
        found["context_o"] = torch.empty_like(
            found["context_q"], memory_format=torch.contiguous_format
        )
    return found


def _outputs(found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both outputs; that of a context without queries has no elements."""
    o = found["o"]
    return o, found.get("context_o", o.new_empty(o.shape[0], 0, o.shape[2]))


def _computed(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, heads, eps = args
    tensors = _given(*inputs)
    names = tuple(name for name in Problem.axes if name in tensors or name == "o")
    given = tuple(tensors.get(name) for name in names)
    found = compute(Problem, (None, _options(heads, eps)), names, given, _choose)
    return _outputs(dict(zip(names, found, strict=True)))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, heads, eps = args
    tensors = _given(*inputs)
    compile_while_tracing(_choose((None, _options(heads, eps)), tensors), tensors["q"].device)
    o = torch.empty_like(tensors["q"], memory_format=torch.contiguous_format)
    return _outputs({**tensors, "o": o})


_joint_attention = define(
    "joint_attention(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, "
    "Tensor? rotary, Tensor? context_q, Tensor? context_k, Tensor? context_v, "
    "Tensor? context_q_weight, Tensor? context_k_weight, int heads, float eps) -> (Tensor, Tensor)",
    _computed,
    _fake,
)


@functools.lru_cache(_MOST_KEPT)
def _is_taken(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    heads: int,
    d_head: int,
    has_queries: bool,
    rotary: bool,
) -> bool:
    batch, length, context = sizes
    try:
        element = Element.from_name(str(dtype).removeprefix("torch."))
        problem = Problem(
            *(batch, heads, length, d_head, element),
            context=context,
            context_queries=has_queries,
            rotary=rotary,
        )
        choose_config(problem, device)
    except (RuntimeError, ValueError):
        return False
    return True


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(*facts: Any) -> bool:
    return _is_taken(*facts)


def takes(tensors: Mapping[str, Tensor], heads: int, *, masked: bool, dropout: float) -> bool:
    """Whether a kernel computes a call by `joint_attention`; `attend` decides of all others.

    tensors: those of the call by name, without those left out. A mask, dropout and gradients have
    no kernel.
    """
    q = tensors["q"]
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    if masked or dropout > 0 or wants_gradients or not all(q.shape):
        return False
    if any(x.dtype != q.dtype for name, x in tensors.items() if name != "rotary"):
        return False
    if "rotary" in tensors and tensors["rotary"].dtype != torch.float32:
        return False
    context = tensors["context_k"].shape[1] if "context_k" in tensors else 0
    sizes = (q.shape[0], q.shape[1], context)
    if torch.compiler.is_compiling():
        sizes = (_TRACED[0], _TRACED[1], _TRACED[2] if context else 0)
    has_queries = "context_q" in tensors
    return _decided(
        *(q.device, q.dtype, sizes, heads, q.shape[2] // heads, has_queries, "rotary" in tensors)
    )


def joint_attention(
    tensors: Mapping[str, Tensor], heads: int, eps: float
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch tokens width"]]:
    """Compute attention of a sequence and its context from their projections: norms, rotary
    embedding and attention. Return the outputs of both, of which the second has no tokens for a
    context without queries.

    tensors: by the names of the operation's problem (`Problem.axes`), without those left out.
    """
    found: tuple[Tensor, Tensor] = _joint_attention(*map(tensors.get, _INPUTS), heads, eps)
    return found
