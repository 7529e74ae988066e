"""FlashAttention-2 block by block, in the order and with the roundings of the kernels.

A kernel rounds where this module does: S and O are fp32 and grow by one mma (16 products of fp32
accuracy) at a time, P is rounded to the inputs' dtype before P @ V, l sums P before that rounding,
or after it where mma takes the sum, and O is divided by l and rounded at the end. Everything that
a kernel holds in between can be looked at, one block of keys after the other.

A lazy step's m follows a maximum that has grown by more than MAX_GROWTH. One that has grown by just
as much, within the rounding of S, may be followed here and not by the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.registry.mma_sync import (
    LAZY_RESCALE,
    MAX_GROWTH,
    MMA_K,
    MMA_ROW_SUM,
)

QUANTITIES = ("Q", "K", "S", "m", "l", "P", "V", "O")
"""What a step holds, in the order in which a kernel comes by it."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class BlockStep:
    """What a kernel holds after one block of keys, fp32, for all thread blocks at once.

    The leading dimensions are (batch, heads, blocks of rows). What all lanes or warps must agree
    on has one entry for each that holds a copy, or a 1 to be broadcast.

    Q: (..., B_r, d_head). K, V: (..., warps, B_c, d_head).
    S: (..., B_r, B_c), the scores Q @ K^T before any scaling.
    m: (..., B_r, lanes), the maximum of each row so far; of the scaled scores if the kernel scales
        first, of S itself if it folds the scale into the exponent (`folds_scale`). A lazy step's is
        that of S · scale · log2(e), unless it has not grown enough since.
    l: (..., B_r, copies), the sum of each row of P so far, relative to m.
    P: (..., B_r, B_c), rounded to the inputs' dtype.
    O: (..., B_r, d_head), the sum of P @ V so far, relative to m and not yet divided by l.
    """

    key_block: int
    Q: torch.Tensor
    K: torch.Tensor
    S: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 (the paper's name)
    P: torch.Tensor
    V: torch.Tensor
    O: torch.Tensor  # noqa: E741


def _add_product(C: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """C (..., m, n) + A (..., m, k) @ B (..., k, n), rounded to fp32 after every 16 products."""
    for k in range(0, A.shape[-1], MMA_K):
        product = A[..., k : k + MMA_K].double() @ B[..., k : k + MMA_K, :].double()
        C = (C.double() + product).float()
    return C


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x as ex2.approx.ftz has it: 0 instead of a subnormal number."""
    power = torch.exp2(x)
    return power.where(power >= torch.finfo(x.dtype).tiny, 0.0)


def blockwise_forward(
    config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[BlockStep]:
    """The steps of the config's kernel, one for each block of keys, in its order.

    q, k, v: (batch, seq_len, heads, d_head), of the config's dtype, on the CPU.

    Raises ValueError for a problem that the kernel does not take, and for one that is not whole
    tiles.
    """
    batch, seq_len, heads, d_head = q.shape
    problem = AttentionForward(batch, heads, seq_len, d_head, config.dtype)
    if reason := config.refusal(problem):
        raise ValueError(reason)
    whole = config.supports.whole
    if seq_len % whole:
        raise ValueError(
            f"seq_len {seq_len} is not whole tiles of {config.short_form()}, step by step: use "
            f"{-(-seq_len // whole) * whole}"
        )
    # (batch, heads, blocks, rows, d_head)
    Q = q.transpose(1, 2).reshape(batch, heads, -1, config.B_r, d_head).float()
    keys = k.transpose(1, 2).reshape(batch, heads, -1, config.B_c, d_head).float()
    values = v.transpose(1, 2).reshape(batch, heads, -1, config.B_c, d_head).float()
    folded, lazy = config.folds_scale, LAZY_RESCALE in config.step.traits
    scale = torch.tensor(1 / math.sqrt(d_head)).item()
    exponent_scale = torch.tensor(scale * _LOG2_E).item() if folded else _LOG2_E
    m_scale = 1.0 if lazy else exponent_scale  # what makes m an exponent of 2

    rows = Q.shape[:-1]
    m = torch.full((*rows, 1), -torch.inf)
    l = torch.zeros(*rows, 1)  # noqa: E741
    O = torch.zeros(*rows, d_head)  # noqa: E741
    for j in config.key_blocks(seq_len):
        K, V = keys[:, :, j, None], values[:, :, j, None]
        S = _add_product(torch.zeros(*rows, config.B_c), Q, K.mT)
        scores = S if folded else S * scale
        new_m = scores.amax(-1, keepdim=True)
        if lazy:
            new_m = new_m * exponent_scale
            new_m = torch.where(new_m - m <= MAX_GROWTH, m, new_m)
        new_m = torch.maximum(m, new_m)
        rescale = _exp2((m - new_m) * m_scale)
        m = new_m
        if folded:  # one fused multiply-add, rounded once
            exponent = (S.double() * exponent_scale - (m * m_scale).double()).float()
        else:
            exponent = (scores - m) * exponent_scale
        P = _exp2(exponent)
        rounded_P = P.to(q.dtype).float()
        if MMA_ROW_SUM in config.step.traits:
            l = _add_product(l * rescale, rounded_P, torch.ones(config.B_c, 1))  # noqa: E741
        else:
            l = l * rescale + P.sum(-1, keepdim=True)  # noqa: E741
        P = rounded_P
        O = _add_product(O * rescale, P, V)  # noqa: E741
        yield BlockStep(j, Q, K[:, :, :, None], S, m, l, P, V[:, :, :, None], O)


def finish(step: BlockStep, dtype: torch.dtype) -> torch.Tensor:
    """The output after the last step: O / l, rounded; (batch, seq_len, heads, d_head)."""
    O = (step.O / step.l).to(dtype)  # noqa: E741
    batch, heads, _, _, d_head = O.shape
    return O.reshape(batch, heads, -1, d_head).transpose(1, 2).contiguous()
