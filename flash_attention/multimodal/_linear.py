"""Linear layers of a sequence and its context, with the norms of their outputs and activations, by
one operation of the kernels, where the registry has a kernel for the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from flash_attention.multimodal._streams import (
    MOST_KEPT,
    StreamsOperator,
    has_kernel,
    sizes_asked,
    wants_gradients,
)
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.joint_linear.problem import CONTEXT
from flash_helpers.operations.joint_linear.problem import JointLinear as Problem
from flash_helpers.tune.best import is_ahead

if TYPE_CHECKING:
    from jaxtyping import Float

# Features of the widest tokens: beyond them tensor cores bound the layers, where cuBLAS is ahead.
_MOST_IN = 256
# The same of layers with few outputs, such as the second one of a feed-forward.
_FEW_OUT, _MOST_IN_OF_FEW = 128, 512
_ALIGNMENT = 16  # bytes
_OF_STREAM = ("x", "weight", "bias", "norm_weight")
_INPUTS = (*_OF_STREAM, *(CONTEXT + name for name in _OF_STREAM))


class Stream(NamedTuple):
    """Tokens, the linear layer that reads them, and the norm of its output, if it has one.

    gelu: GELU follows on the layer, before a norm. silu: the layer reads SiLU of x.
    """

    x: Float[Tensor, "batch length features"]
    layer: nn.Module
    norm: nn.RMSNorm | None = None
    gelu: bool = False
    silu: bool = False

    def computed(self) -> Float[Tensor, "batch length outputs"]:
        """Return the output by PyTorch."""
        y = self.layer(silu(self.x) if self.silu else self.x)
        y = gelu(y) if self.gelu else y
        return y if self.norm is None else self.norm(y)

    def is_plain(self) -> bool:
        """Whether layer and norm are PyTorch's own, without hooks, so that their weights tell all
        that they do."""
        parts = [self.layer] if self.norm is None else [self.layer, self.norm]
        hooks = (x for part in parts for x in (part._forward_hooks, part._forward_pre_hooks))
        if type(self.layer) is not nn.Linear or any(hooks):
            return False
        return self.norm is None or (
            isinstance(self.norm, nn.RMSNorm) and self.norm.weight is not None
        )

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return tokens and weights by the names of the operation's problem."""
        weights = {"weight": self.layer.weight, "bias": self.layer.bias}
        if self.norm is not None:
            weights["norm_weight"] = self.norm.weight
        found = {"x": self.x, **weights}
        return {prefix + name: x for name, x in found.items() if isinstance(x, Tensor)}


def _new(tensors: Mapping[str, Tensor], stream: str) -> Tensor | None:
    x = tensors.get(f"{stream}x")
    if x is None:
        return None
    return x.new_empty(x.shape[0], x.shape[1], tensors[f"{stream}weight"].shape[0])


def _none(y: Tensor) -> Tensor:
    return y.new_empty(y.shape[0], 0, y.shape[2])


def _given(x: Tensor) -> Tensor:
    """Return x, or a copy of one that is no contiguous tensor at a multiple of 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


_joint_linear = StreamsOperator(
    Problem, _INPUTS, ("eps", "gelu", "silu"), ("y", "context_y"), _new, _none, _given
).define()


@functools.lru_cache(MOST_KEPT)
def _is_taken(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    features: tuple[int, int, int, int],
    **options: Any,
) -> bool:
    batch, length, context = sizes
    in_features, out_features, context_in, context_out = features

    def posed(element: Element) -> Problem:
        return Problem(
            *(batch, length, in_features, out_features, element),
            context=context,
            context_in=context_in,
            context_out=context_out,
            **options,
        )

    few = max(out_features, context_out) <= _FEW_OUT
    most = _MOST_IN_OF_FEW if few else _MOST_IN
    if max(in_features, context_in) > most or not has_kernel(device, dtype, posed):
        return False
    # without a norm and with many tokens the libraries' matrix product is the faster one
    return is_ahead(posed(Problem.elements[0]), device)


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(*facts: Any, **options: bool) -> bool:
    return _is_taken(*facts, **options)


def _takes(tensors: Mapping[str, Tensor], *, gelu: bool, silu: bool) -> bool:
    """Whether a kernel computes the layers of these tensors, with activations or without."""
    x, weight = tensors["x"], tensors["weight"]
    if wants_gradients(tensors.values()) or not all(x.shape):
        return False
    if any(y.dtype != x.dtype for y in tensors.values()):
        return False
    # Tensors of other classes, such as quantised or sharded weights, compute in their own way
    if any(type(y) not in (Tensor, nn.Parameter) for y in tensors.values()):
        return False
    of_context, context_weight = tensors.get(f"{CONTEXT}x"), tensors.get(f"{CONTEXT}weight", weight)
    sizes = sizes_asked(x.shape[0], x.shape[1], 0 if of_context is None else of_context.shape[1])
    features = (*weight.shape[::-1], *context_weight.shape[::-1])
    return _decided(
        *(x.device, x.dtype, sizes, features),
        bias="bias" in tensors,
        norm="norm_weight" in tensors,
        gelu=gelu,
        silu=silu,
    )


def linear_streams(
    own: Stream, other: Stream | None, *, kernels: bool
) -> tuple[Float[Tensor, "batch length outputs"], Float[Tensor, "batch tokens outputs"] | None]:
    """Return the outputs of the layers of a sequence and of its context, by one kernel where there
    is one, else by PyTorch; None for a context that is None. Both have the same activations.

    kernels: whether the backend lets a kernel compute them.
    """
    # A context without tokens has an output of none, and no part in a kernel
    both = other if other is not None and other.x.shape[1] else None
    streams = [own] if both is None else [own, both]
    if kernels and all(stream.is_plain() for stream in streams):
        tensors = own.tensors("") | ({} if both is None else both.tensors(CONTEXT))
        if _takes(tensors, gelu=own.gelu, silu=own.silu):
            eps = 0.0 if own.norm is None or own.norm.eps is None else own.norm.eps
            y, context_y = _joint_linear(*map(tensors.get, _INPUTS), eps, own.gelu, own.silu)
            if both is None and other is not None:
                context_y = other.computed()
            return y, None if other is None else context_y
    return own.computed(), None if other is None else other.computed()
