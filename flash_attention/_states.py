"""Attention on parts of the keys, combined into attention on all of them.

CUDA tensors are merged by a kernel of operation merge, all others by PyTorch's operators with the
same formula: so are gradients, which the kernels do not compute. The sums of a ring stay with
PyTorch (`distributed._ring`): a step of it adds a part of 16 bits to sums of fp32, in place, which
takes fewer bytes than copying both into one tensor for a kernel that reads parts of one dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attention._operators import compile_while_tracing, define
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.merge.baselines import merged
from flash_helpers.operations.merge.problem import NATURAL, Merge
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import Laid, element_of, posed_problem
from flash_helpers.tune.best import choose_config

_NAMES = ("o_parts", "lse_parts", "o", "lse")
_CHUNK_BYTES = 16  # of the fastest kernel's loads


def _choose(o_parts: Laid, lse_parts: Laid, log2_base: float) -> Config:
    element = element_of("o_parts", o_parts, Merge.elements)
    tensors = {"o_parts": o_parts, "lse_parts": lse_parts}
    return choose_config(
        posed_problem(Merge, element, tensors, log2_base=log2_base), o_parts.device
    )


def _in_chunks(o_parts: torch.Tensor) -> torch.Tensor:
    """Return the parts with stride 1 along d_head. Where d_head is whole chunks of 16 bytes, all
    rows begin at multiples of them. It is the tensor itself or a copy."""
    chunk = _CHUNK_BYTES // o_parts.element_size()
    strides = [step for size, step in zip(o_parts.shape, o_parts.stride(), strict=True) if size > 1]
    is_laid = o_parts.shape[-1] == 1 or o_parts.stride(-1) == 1
    if o_parts.shape[-1] % chunk == 0:
        is_laid &= not any(step % chunk for step in strides[:-1])
        is_laid &= o_parts.data_ptr() % _CHUNK_BYTES == 0
    return o_parts if is_laid else o_parts.clone(memory_format=torch.contiguous_format)


def _computed(
    o_parts: torch.Tensor, lse_parts: torch.Tensor, log2_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    def choose(asked: Any, tensors: Any) -> Config:
        return _choose(tensors["o_parts"], tensors["lse_parts"], log2_base)

    given = (_in_chunks(o_parts), lse_parts, None, None)
    _, _, o, lse = compute(Merge, (None, (("log2_base", log2_base),)), _NAMES, given, choose)
    return o, lse


def _fake(
    o_parts: torch.Tensor, lse_parts: torch.Tensor, log2_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    compile_while_tracing(_choose(o_parts, lse_parts, log2_base), o_parts.device)
    return o_parts.new_empty(o_parts.shape[1:]), lse_parts.new_empty(lse_parts.shape[1:])


merge_states = define(
    "merge_states(Tensor o_parts, Tensor lse_parts, float log2_base) -> (Tensor, Tensor)",
    _computed,
    _fake,
)
"""Merge o_parts, (parts, rows, heads, d_head), fp16, bf16 or fp32, by lse_parts, (parts, rows,
heads), fp32: logarithms whose base is 2^(1 / log2_base). Return o, (rows, heads, d_head), in the
dtype of o_parts, and lse, (rows, heads)."""


def combined(
    o: torch.Tensor,
    lse: torch.Tensor,
    parts: int,
    names: tuple[str, str],
    *,
    base_2: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o, in this dtype, and lse, fp32, of attention on all keys.

    o: attention on parts of the keys, with these along dimension `parts`, and of at least 4
    dimensions. lse: (..., parts, ...), the shape of o without its last dimension: logarithms of the
    sums of exponentials, in base 2 or natural. names: of both, for messages.

    o = Σ exp(lse_i - lse) o_i, in fp32. A part without keys has an lse of -inf and whatever in o; a
    row whose parts are all so has 0 and -inf.

    Raises ValueError for shapes and devices that do not fit together.
    """
    if tuple(lse.shape) != tuple(o.shape[:-1]):
        raise ValueError(
            f"{names[1]} has shape {tuple(lse.shape)} and {names[0]} {tuple(o.shape)}: pass "
            f"{tuple(o.shape[:-1])}"
        )
    if lse.device != o.device:
        raise ValueError(
            f"{names[1]} is on {lse.device} and {names[0]} on {o.device}: move them to one device"
        )
    if o.shape[parts] == 0:
        raise ValueError(f"{names[0]} has no parts, shape {tuple(o.shape)}: pass 1 or more")
    log2_base = 1.0 if base_2 else NATURAL
    o, lse = o.movedim(parts, 0), lse.movedim(parts, 0).float()
    has_gradient = torch.is_grad_enabled() and (o.requires_grad or lse.requires_grad)
    if not o.is_cuda or o.numel() == 0 or has_gradient:
        found, of_all = merged(o, lse, log2_base)
        return found.to(dtype), of_all
    return merged_by_kernel(o, lse, log2_base, dtype)


def merged_by_kernel(
    o: torch.Tensor, lse: torch.Tensor, log2_base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `merged` does, with o in this dtype. Where that is another than o's, or none that
    a kernel takes, the kernel computes in fp32. o: (parts, …, heads, d_head). lse: fp32."""
    is_taken = o.dtype == dtype and dtype in (torch.float16, torch.bfloat16)
    element = dtype if is_taken else torch.float32
    found, of_all = merge_states(o.to(element).flatten(1, -3), lse.flatten(1, -2), log2_base)
    return found.to(dtype).view(o.shape[1:]), of_all.view(lse.shape[1:])
