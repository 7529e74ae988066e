"""Attention for modules: by a kernel where the registry has one for the problem, else by PyTorch,
and never silently so on a GPU."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attention._forward import attention
from flash_attention.multimodal._checks import check_choice
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.runtime.tensors import Layout, element_of, posed_problem
from flash_helpers.tune.best import choose_config

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Backend = Literal["auto", "torch", "kernels"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "kernels")
# Batch and length that stand for all others while torch.compile or torch.export traces a call.
_TRACED = (1, 256)
_MOST_KEPT = 1024  # answers for different sizes

_NO_MASK = (
    "mask: no kernel reads a mask of padding; leave out the padding, or call "
    "flash_attn_varlen_func on sequences without it"
)
_NO_DROPOUT = "dropout: no kernel has it; use dropout 0, or call model.eval()"


@dataclass(frozen=True)
class Refusal:
    """Why no kernel computes a call, with the way out. Two that differ in their texts alone, which
    tell the sizes of the call, are equal: one warning stands for all lengths.

    kind: the option that no kernel has, or the operation that has no kernel for the problem.
    """

    device: torch.device
    dtype: torch.dtype
    d_head: int
    kind: str
    text: str = field(compare=False)


@dataclass(frozen=True)
class Call:
    """The facts of a call that decide who computes it.

    gradients: whether autograd will ask for them. deterministic: whether they must have the same
    bits in every call.
    """

    device: torch.device
    dtype: torch.dtype
    d_head: int
    masked: bool
    dropout: bool
    gradients: bool
    deterministic: bool
    batch: int
    heads: int
    len_q: int
    len_k: int

    def refusal(self) -> Refusal | None:
        """Return why no kernel computes the call; None if one does."""
        if self.masked:
            return self._refused("mask", _NO_MASK)
        if self.dropout:
            return self._refused("dropout", _NO_DROPOUT)
        operation = AttentionForward.operation
        try:
            problem = self._problem()
            choose_config(problem, self.device)
            if self.gradients:
                operation = AttentionBackward.operation
                backward = AttentionBackward.of(problem, deterministic=self.deterministic)
                choose_config(backward, self.device)
        except (RuntimeError, TypeError, ValueError) as error:
            return self._refused(operation, str(error))
        return None

    def _refused(self, kind: str, text: str) -> Refusal:
        return Refusal(self.device, self.dtype, self.d_head, kind, text)

    def _problem(self) -> AttentionForward:
        """Return the problem of attention(). Raises its errors."""
        lengths = {"q": self.len_q, "k": self.len_k, "v": self.len_k}
        shapes = {n: (self.batch, x, self.heads, self.d_head) for n, x in lengths.items()}
        if not all(map(all, shapes.values())):  # attention() computes it without a kernel
            shapes = dict.fromkeys(shapes, (1, 1, 1, self.d_head))
        given = {
            name: Layout(torch.Size(shape), (0,) * 4, self.dtype, self.device)
            for name, shape in shapes.items()
        }
        element = element_of("q", given["q"], AttentionForward.elements)
        return posed_problem(AttentionForward, element, given)


@functools.lru_cache(_MOST_KEPT)
def _refusal(*facts: Any) -> Refusal | None:
    return Call(*facts).refusal()


@functools.cache
def _warn_once(refusal: Refusal) -> None:
    warnings.warn(
        f"PyTorch computes attention on {refusal.device}: {refusal.text}. Pass backend='torch' to "
        "ask for that, or backend='kernels' for an error in its place",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _refused(backend: str, *facts: Any) -> str:
    """Return the text of a call's refusal, "" without one, and warn of it if no backend was asked
    for."""
    refusal = _refusal(*facts)
    if refusal is None:
        return ""
    if backend == "auto":
        _warn_once(refusal)
    return refusal.text


def attend(
    q: Float[Tensor, "batch len_q heads d_head"],
    k: Float[Tensor, "batch len_k heads d_head"],
    v: Float[Tensor, "batch len_k heads d_head"],
    mask: Bool[Tensor, "batch len_k"] | None = None,
    *,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Float[Tensor, "batch len_q heads d_head"]:
    """Compute softmax(q kᵀ / sqrt(d_head)) v for each batch and head.

    mask: true for keys that are seen; all are by default. A query that sees no key has 0.
    dropout: probability with which an element of the softmax is dropped.
    backend:
        "torch": PyTorch's scaled_dot_product_attention.
        "kernels": `attention` of this package; on CPU tensors the simulator runs its kernel.
        "auto": on CUDA tensors `attention` if the registry has a kernel for the problem, and for
            the gradients if they will be asked for. Otherwise PyTorch, with a warning that has the
            registry's refusal, once per device, dtype, head size and kind of refusal. On other
            tensors PyTorch, without a warning.

    While torch.compile or torch.export traces a call, the choice is made for all batches and
    lengths, and is part of what is traced.

    Raises ValueError with the refusal if backend="kernels" and no kernel computes the call, and the
    errors of `attention`.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "torch" or (backend == "auto" and q.device.type != "cuda"):
        return _by_pytorch(q, k, v, mask, dropout)
    sizes = (q.shape[0], q.shape[1], k.shape[1])
    # the second where a gradient is traced, which PyTorch 2.11 does not call compiling
    if torch.compiler.is_compiling() or any(isinstance(n, torch.SymInt) for n in sizes):
        sizes = (_TRACED[0], _TRACED[1], _TRACED[1])
    batch, len_q, len_k = sizes
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    reason = _refused(
        *(backend, q.device, q.dtype, q.shape[3], mask is not None, dropout > 0, gradients),
        *(torch.are_deterministic_algorithms_enabled(), batch, q.shape[2], len_q, len_k),
    )
    if not reason:
        o = attention(q, k, v)
        assert isinstance(o, Tensor), "the LSE was not asked for"
        return o
    if backend == "kernels":
        raise ValueError(f"backend 'kernels': {reason}; or pass backend='torch'")
    return _by_pytorch(q, k, v, mask, dropout)


def _by_pytorch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Float[Tensor, "batch len_q heads d_head"]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)
    # A softmax over no key is NaN in some of PyTorch's kernels: such a sample sees all keys, and
    # its output is then 0.
    sees_any = mask.any(1)[:, None, None, None]
    seen = mask[:, None, None] | ~sees_any
    o = scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
    return torch.where(sees_any, o, 0.0).transpose(1, 2)
