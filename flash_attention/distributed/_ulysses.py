"""Attention on a sequence that several ranks share: each computes some heads on all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flash_attention._forward import _ALL_KEYS, _check_flag, _options, _scale, attention
from flash_attention._operators import refuse_tangents
from flash_attention._varlen import varlen_attention
from flash_attention.distributed._group import Group, Ranks
from flash_attention.distributed._ring import check_shapes
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.runtime.tensors import check_types, element_of, posed_problem


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = False,
    check_shards: bool = True,
) -> torch.Tensor:
    """Compute `attention` on a sequence of which each rank of a group holds adjacent positions.

    An all-to-all exchange gives each rank all positions of some heads, on which `attention` runs as
    in one process; another one brings the results back. So the kernels, and their bits, are those
    of one process, and nothing is merged. The exchanges are not hidden under kernels.

    q: (batch, shard, heads, d_head), fp16 or bf16; the shard that `shard` cuts with placement
        "contiguous", which balances a causal mask here too.
    k, v: (batch, shard, kv_heads, d_head), likewise.
    group: as for `ring_attention`. Its size divides heads and kv_heads.
    causal, window_size, softcap, softmax_scale, deterministic: as for `attention`.
    cu_seqlens, max_seqlen: with sequences of various lengths, those of the whole, as
        `varlen_attention` takes them: (sequences + 1,), int32, on the device of q, and the longest
        length, which is that of the whole if it is left out. Tensors are then (shard, heads,
        d_head). Sequences may begin and end within shards.
    check_shards: as for `ring_attention`.

    Returns o, with the shape of q and the d_head of v. Autograd has the gradients of q, k and v.

    Raises ValueError for heads that the group's size does not divide, and the errors of `attention`
    and of `ring_attention`.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_types(tensors)
    refuse_tangents((q, k, v))
    for name, value in {"deterministic": deterministic, "check_shards": check_shards}.items():
        _check_flag(name, value)
    ranks = Ranks.of(group, "ulysses_attention")
    ranks.check_device(tensors)
    is_packed = cu_seqlens is not None

    def check() -> Mapping[str, Any]:
        return _checked(
            ranks,
            tensors,
            is_packed=is_packed,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            softmax_scale=softmax_scale,
        )

    ranks.agree(check, is_asked=check_shards)
    dense = [x[None] if is_packed else x for x in tensors.values()]
    whole = [_Exchange.apply(x, ranks, True) for x in dense]
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "softmax_scale": softmax_scale,
        "deterministic": deterministic,
    }
    if cu_seqlens is not None:
        q, k, v = (x[0] for x in whole)
        longest = len(q) if max_seqlen is None else max_seqlen
        o = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
        assert isinstance(o, torch.Tensor)
        return _Exchange.apply(o[None], ranks, False)[0]
    return _Exchange.apply(attention(*whole, **options), ranks, False)


def _checked(
    ranks: Ranks,
    tensors: Mapping[str, torch.Tensor],
    *,
    is_packed: bool,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    softmax_scale: float | None,
) -> Mapping[str, Any]:
    """Return what all ranks must have in common. Raises TypeError and ValueError for arguments."""
    _check_flag("causal", causal)
    window = _options(window_size, softcap, None)
    scale = _scale(softmax_scale)
    check_shapes(tensors, is_packed=is_packed)
    q, k, v = tensors.values()
    dense = {name: x[None] if is_packed else x for name, x in tensors.items()}
    element = element_of("q", q, AttentionForward.elements)
    posed_problem(AttentionForward, element, dense, causal=causal, softmax_scale=scale)
    for name, x in {"q": q, "k and v": k}.items():
        heads = x.shape[-2]
        if heads % ranks.size:
            raise ValueError(
                f"{name}: {heads} heads, which a group of {ranks.size} ranks does not divide: call "
                "ring_attention(), which takes any number, or make a group of fewer ranks"
            )
    return {
        "batch": dense["q"].shape[0],
        "shard length": dense["q"].shape[1],
        "keys of a shard": dense["k"].shape[1],
        "heads": q.shape[-2],
        "heads of K and V": k.shape[-2],
        "d_head": q.shape[-1],
        "d_v": v.shape[-1],
        "dtype": str(q.dtype),
        "causal": causal,
        "window_size": window,
        "softmax_scale": scale,
        "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }


class _Exchange(torch.autograd.Function):
    """A node of the autograd graph for an exchange, whose gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, to_heads: bool) -> torch.Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return (_to_heads if to_heads else _to_shards)(x, ranks)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (_to_shards if ctx.to_heads else _to_heads)(dx, ctx.ranks), None, None


def _to_heads(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return all positions of this rank's heads: (batch, size · shard, heads / size, d) of
    (batch, shard, heads, d)."""
    batch, shard, heads, d = x.shape
    size = ranks.size
    by_rank = x.view(batch, shard, size, heads // size, d) if size > 1 else x[:, :, None]
    found = _all_to_all(by_rank.permute(2, 0, 1, 3, 4), ranks)  # (source, batch, shard, …)
    return found.transpose(0, 1).reshape(batch, size * shard, heads // size, d)


def _to_shards(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return this rank's positions of all heads: the way back of `_to_heads`."""
    batch, seq, heads, d = x.shape
    size = ranks.size
    by_rank = x.reshape(batch, size, seq // size, heads, d).transpose(0, 1)
    found = _all_to_all(by_rank, ranks)  # (source, batch, shard, heads, d)
    return found.permute(1, 2, 0, 3, 4).reshape(batch, seq // size, size * heads, d)


def _all_to_all(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return what each rank sent to this one, along the first dimension."""
    if ranks.size == 1 or not x.numel():
        return x
    sent = x.contiguous()
    received = torch.empty_like(sent)
    with ranks.failures("exchange heads"):
        dist.all_to_all_single(received, sent, group=ranks.group)
    return received
