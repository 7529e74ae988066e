"""Gated sums and adaptive layer norms of a sequence and its context, by one operation of the
kernels where the registry has a kernel for the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_attention.multimodal._streams import (
    MOST_KEPT,
    StreamsOperator,
    has_kernel,
    sizes_asked,
    wants_gradients,
)
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.adaptive_norm.problem import CONTEXT
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm as Problem
from flash_helpers.tune.best import is_ahead

if TYPE_CHECKING:
    from jaxtyping import Float

_ALIGNMENT = 16  # bytes
_OF_STREAM = ("x", "change", "gate", "scale", "shift")
_VECTORS = _OF_STREAM[2:]  # of each sample
_INPUTS = (*_OF_STREAM, *(CONTEXT + name for name in _OF_STREAM))


class Adapted(NamedTuple):
    """Tokens, what is added to them, and the norm that follows.

    change, gate: none for tokens that stay. norm, scale, shift: none for tokens that no norm
    follows on.
    """

    x: Float[Tensor, "batch length width"]
    change: Float[Tensor, "batch length width"] | None = None
    gate: Float[Tensor, "batch 1 width"] | None = None
    norm: nn.Module | None = None
    scale: Float[Tensor, "batch 1 width"] | None = None
    shift: Float[Tensor, "batch 1 width"] | None = None

    def is_plain(self) -> bool:
        """Whether the norm is PyTorch's own, without weights and hooks, so that eps tells all that
        it does."""
        norm = self.norm
        if norm is None:
            return True
        if type(norm) is not nn.LayerNorm or norm._forward_hooks or norm._forward_pre_hooks:
            return False
        is_last = tuple(norm.normalized_shape) == (self.x.shape[-1],)
        return is_last and norm.weight is None and norm.bias is None

    def tensors(self, prefix: str) -> dict[str, Tensor] | None:
        """Return the tensors by the names of the operation's problem; None for a vector that is not
        one of each sample."""
        batch, _, width = self.x.shape
        found = {prefix + "x": self.x}
        if self.change is not None:
            found[prefix + "change"] = self.change
        for name in _VECTORS:
            vector = getattr(self, name)
            if vector is None:
                continue
            if tuple(vector.shape) != (batch, 1, width):
                return None
            found[prefix + name] = vector[:, 0]
        return found


def _new(tensors: Mapping[str, Tensor], stream: str) -> Tensor | None:
    x = tensors.get(f"{stream}x")
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def _none(y: Tensor) -> Tensor:
    return y.new_empty(y.shape[0], 0, y.shape[2])


def _sum(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a sum beside the norm of it; None where y is the sum, or x is."""
    stream = name.removesuffix("sum")
    if f"{stream}change" not in tensors or f"{stream}scale" not in tensors:
        return None
    return _new(tensors, stream)


def _given(x: Tensor) -> Tensor:
    """Return x, or a copy of one whose rows do not begin at multiples of 16 bytes."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    chunk = _ALIGNMENT // x.element_size()
    is_apart = all(size == 1 or stride % chunk == 0 for size, stride in sizes)
    if is_apart and (x.shape[-1] == 1 or x.stride(-1) == 1) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


_adaptive_norm = StreamsOperator(
    *(Problem, _INPUTS, ("eps",), ("y", f"{CONTEXT}y"), _new, _none, _given),
    others=("sum", f"{CONTEXT}sum"),
    other=_sum,
).define()


@functools.lru_cache(MOST_KEPT)
def _is_taken(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    widths: tuple[int, int],
    change: bool,
    norm: bool,
) -> bool:
    batch, length, context = sizes

    def posed(element: Element) -> Problem:
        return Problem(
            *(batch, length, widths[0], element),
            change=change,
            norm=norm,
            sum=change and norm,
            context=context,
            context_width=widths[1],
        )

    return has_kernel(device, dtype, posed) and is_ahead(posed(Problem.elements[0]), device)


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(*facts: Any) -> bool:
    return _is_taken(*facts)


def _takes(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a kernel computes the sums and norms of these tensors."""
    x = tensors["x"]
    if wants_gradients(tensors.values()) or not all(x.shape):
        return False
    if any(y.dtype != x.dtype or type(y) not in (Tensor, nn.Parameter) for y in tensors.values()):
        return False
    of_context = tensors.get(f"{CONTEXT}x")
    if of_context is not None and of_context.shape[0] != x.shape[0]:
        return False
    for stream in ("", CONTEXT):
        change = tensors.get(f"{stream}change")
        if change is not None and change.shape != tensors[f"{stream}x"].shape:
            return False
    sizes = sizes_asked(x.shape[0], x.shape[1], 0 if of_context is None else of_context.shape[1])
    widths = (x.shape[2], x.shape[2] if of_context is None else of_context.shape[2])
    return _decided(x.device, x.dtype, sizes, widths, "change" in tensors, "scale" in tensors)


def _by_kernel(streams: Sequence[Adapted]) -> list[tuple[Tensor, Tensor]] | None:
    """Return sum and norm of each stream by one kernel; None where there is none. A context has
    tokens."""
    own = streams[0]
    if not all(stream.is_plain() for stream in streams):
        return None
    tensors: dict[str, Tensor] = {}
    for stream, prefix in zip(streams, ("", CONTEXT), strict=False):
        found = stream.tensors(prefix)
        if found is None:
            return None
        tensors |= found
    both = {getattr(stream.norm, "eps", None) for stream in streams}
    if len(both) > 1 or not _takes(tensors):
        return None
    y, context_y, total, context_total = _adaptive_norm(
        *map(tensors.get, _INPUTS), getattr(own.norm, "eps", 0.0)
    )
    pairs = zip(streams, ((total, y), (context_total, context_y)), strict=False)
    return [_pair(stream, *found) for stream, found in pairs]


def _pair(stream: Adapted, total: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if stream.norm is None:
        return y, y
    return (stream.x if stream.change is None else total), y


def adapted_streams(
    streams: Sequence[Adapted], *, kernels: bool
) -> list[tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch length width"]] | None]:
    """Return the sum and the adaptive norm of a sequence, and of its context if it has one, by one
    kernel; None for what no kernel computes. Without a norm both are the sum.

    kernels: whether the backend lets a kernel compute them.
    """
    # A context without tokens has no part in a kernel
    with_tokens = [stream for stream in streams if stream.x.shape[1]]
    found = _by_kernel(with_tokens) if kernels and streams[0].x.shape[1] else None
    found = found or []
    return [*found, *[None] * (len(streams) - len(found))]
