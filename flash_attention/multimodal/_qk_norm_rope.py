"""Q, K and V of attention from projections of a sequence and its context, with norms and rotary
embedding, by one operation of the kernels: for heads of which no kernel has all of joint
attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attention._operators import compile_while_tracing, define
from flash_attention.multimodal._streams import (
    MOST_KEPT,
    chosen,
    has_kernel,
    sizes_asked,
    wants_gradients,
)
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.qk_norm_rope.problem import OUTPUTS
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope as Problem
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import Laid, element_of, posed_problem

if TYPE_CHECKING:
    from jaxtyping import Float

    InHeads = Float[Tensor, "batch seq heads d_head"]

_INPUTS = tuple(name for name in Problem.axes if name not in OUTPUTS)
_OPTIONS = ("heads", "eps")
_CHUNK, _ALIGNMENT = 8, 16  # elements and bytes that a thread loads at once


def _given(x: Tensor) -> Tensor:
    """Return x, or a copy of one that a kernel cannot load in chunks."""
    *rows, columns = x.stride()
    in_chunks = columns == 1 and x.dtype != torch.float32 and all(n % _CHUNK == 0 for n in rows)
    if (in_chunks or x.is_contiguous()) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _asked(args: tuple[Any, ...]) -> tuple[dict[str, Tensor], tuple[None, Any]]:
    """Return the tensors of a call by name, with joint_v where V is copied, and what is asked of
    `compute`."""
    *inputs, heads, eps = args
    found = {name: x for name, x in zip(_INPUTS, inputs, strict=True) if x is not None}
    if "context_k" in found:
        found["joint_v"] = _new(found, "v")
    return found, (None, tuple(zip(_OPTIONS, (heads, eps), strict=True)))


def _new(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return memory for joint_q, joint_k or joint_v."""
    q, of_context = tensors["q"], tensors.get(f"context_{name}")
    tokens = q.shape[1] + (0 if of_context is None else of_context.shape[1])
    return q.new_empty(q.shape[0], tokens, q.shape[2])


def _choose(asked: tuple[Any, Any], tensors: Mapping[str, Laid]) -> Config:
    q = tensors["q"]
    element = element_of("q", q, Problem.elements)
    return chosen(posed_problem(Problem, element, tensors, **dict(asked[1])), q.device)


def _results(found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs; in place of joint_v nothing, where V is not copied."""
    q, k = found["joint_q"], found["joint_k"]
    v = found.get("joint_v")
    return q, k, k.new_empty(0) if v is None else v


def _computed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors, asked = _asked(args)
    made = dict.fromkeys(OUTPUTS[:2])
    names = tuple(name for name in Problem.axes if name in tensors or name in made)
    given = [None if name in made else _given(tensors[name]) for name in names]
    found = compute(Problem, asked, names, given, _choose)
    return _results(dict(zip(names, found, strict=True)))


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors, asked = _asked(args)
    compile_while_tracing(_choose(asked, tensors), tensors["q"].device)
    return _results(tensors | {f"joint_{name}": _new(tensors, name) for name in "qk"})


def _schema() -> str:
    given = (f"Tensor{'?' if name in Problem.optional else ''} {name}" for name in _INPUTS)
    return (
        f"{Problem.operation}({', '.join(given)}, int heads, float eps) -> (Tensor, Tensor, Tensor)"
    )


_qk_norm_rope = define(_schema(), _computed, _fake)


@functools.lru_cache(MOST_KEPT)
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
    return has_kernel(
        device,
        dtype,
        lambda element: Problem(
            *(batch, heads, length, d_head, element),
            context=context,
            context_queries=has_queries,
            rotary=rotary,
        ),
    )


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(*facts: Any) -> bool:
    return _is_taken(*facts)


def takes(tensors: Mapping[str, Tensor], heads: int) -> bool:
    """Whether a kernel computes a call by `qk_norm_rope`; one with gradients is PyTorch's.

    tensors: those of the call by name, without those left out.
    """
    q = tensors["q"]
    if wants_gradients(tensors.values()) or not all(q.shape):
        return False
    if any(x.dtype != q.dtype for name, x in tensors.items() if name != "rotary"):
        return False
    if "rotary" in tensors and tensors["rotary"].dtype != torch.float32:
        return False
    context = tensors["context_k"].shape[1] if "context_k" in tensors else 0
    sizes = sizes_asked(q.shape[0], q.shape[1], context)
    has_queries = "context_q" in tensors or not context
    return _decided(
        *(q.device, q.dtype, sizes, heads, q.shape[2] // heads, has_queries, "rotary" in tensors)
    )


def qk_norm_rope(
    tensors: Mapping[str, Tensor], heads: int, eps: float
) -> tuple[InHeads, InHeads, InHeads]:
    """Compute Q, K and V of attention of a sequence and its context from their projections: norms,
    rotary embedding, and both streams as one. Without a context V is a view of its projection.

    tensors: by the names of operation joint_attention's problem, without those left out.
    """
    given = dict(tensors)
    own_v = None if "context_k" in given else given.pop("v")
    q, k, v = _qk_norm_rope(*map(given.get, _INPUTS), heads, eps)
    v = v if own_v is None else own_v
    return q.unflatten(-1, (heads, -1)), k.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))
