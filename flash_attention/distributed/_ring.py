"""Attention on a sequence that several ranks share: keys and values travel around a ring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from flash_attention._backward import NO_LSE, NO_SECOND
from flash_attention._forward import _ALL_KEYS, _NO_OPTIONS, _check_flag, _options, _scale
from flash_attention._operators import _NoBackward, refuse_tangents
from flash_attention._states import combined
from flash_attention.distributed._group import (
    Group,
    Ranks,
    Ring,
    Transfer,
    TransferTimes,
    transfers_to_time,
)
from flash_attention.distributed._peers import Place
from flash_attention.distributed._pieces import Bound, pieces_of
from flash_attention.distributed._placement import Placement, check_placement, shard_length
from flash_attention.distributed._sequences import (
    Call,
    Options,
    Rows,
    calls_of_batch,
    calls_of_sequences,
)
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.runtime.tensors import check_types, element_of, posed_problem

_AXES = ("batch", "shard", "heads", "d_head")
_PAIRS = 3  # of tensors that receive keys and values
_PAIRS_OF_SUMS = 2  # of tensors that receive sums, while others are sent
MOST_PARTS = 8  # of o, which are merged at once


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    placement: Placement = "zigzag",
    causal: bool = False,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    check_shards: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` on a sequence of which each rank of a group holds a shard.

    Keys and values travel from rank to rank. In each of as many steps as there are ranks, a rank
    computes its queries on the keys that it holds, while the next ones arrive. The results are
    merged by the LSE, in fp32. Each rank merges in an order of its own that never changes, so that
    repeated calls give the same bits. On CUDA the transfers have a stream of their own. Between
    GPUs of one host copy engines make them, through PyTorch's symmetric memory: as many bytes as
    places for keys and sums take, which are kept for later calls of the group.

    q: (batch, shard, heads, d_head), fp16 or bf16; the shard that `shard` cuts.
    k, v: (batch, shard, kv_heads, d_head), likewise.
    group: a process group, a DeviceMesh of one dimension, or None for all processes.
    placement: which positions a rank holds. With a causal mask "zigzag" and "striped" give all
        ranks the same work; "contiguous" does not.
    causal, window_size, softcap, softmax_scale, deterministic: as for `attention`. The mask is that
        of the whole sequence. `deterministic` is for the gradient of q.
    cu_seqlens: with sequences of various lengths, where each begins in the whole, and then the
        total: (sequences + 1,), whole numbers or a tensor on the CPU, because the host cuts each
        sequence. Tensors are then (shard, heads, d_head), and the shard is cut with the same
        cu_seqlens. A window needs placement "striped".
    return_lse: also return the LSE, (batch, heads, shard), or (heads, shard) with cu_seqlens; fp32.
    check_shards: ranks first tell each other sizes and options, and all refuse what differs.
        Without a backend for CPU tensors, such as "cpu:gloo,cuda:nccl" has, the host waits for the
        GPU there. With False, ranks that differ have undefined results, or wait for the timeout.

    Returns o, with the shape and dtype of q; with return_lse (o, lse). Autograd has the gradients
    of q, k and v; those of k and v travel with their keys, and where more than two parts are added,
    in fp32. The LSE has none. Sinks are not
    taken: without gradients, multiply o by torch.sigmoid(lse - sinks). Under torch.compile the call
    breaks the graph.

    PyTorch's own context_parallel takes other attention by private tables alone (PyTorch 2.13,
    torch.distributed.tensor.experimental), so that this function is not registered there.

    Raises TypeError and ValueError for arguments, as `attention` does, and for shards and options
    that are not equal on all ranks. Raises RuntimeError without an initialised group, while a CUDA
    graph is captured, and where an exchange fails: with gloo at the group's timeout, or when
    another rank has left; NCCL's watchdog then ends the process, and copies through symmetric
    memory end with a CUDA error.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_types(tensors)
    refuse_tangents((q, k, v))
    ranks = Ranks.of(group, "ring_attention")
    ranks.check_device(tensors)
    plan: _Plan | None = None

    def check() -> Mapping[str, Any]:
        nonlocal plan
        plan = _planned(
            ranks,
            tensors,
            placement=placement,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            softmax_scale=softmax_scale,
            cu_seqlens=cu_seqlens,
            flags={"return_lse": return_lse, "deterministic": deterministic},
        )
        return plan.common

    _check_flag("check_shards", check_shards)
    ranks.agree(check, is_asked=check_shards)
    assert plan is not None
    o, lse = _Ring.apply(q, k, v, plan)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class _Plan:
    """The calls of kernels that a rank makes for a call of a ring.

    calls: in each step, on the keys that have arrived then. has_many_parts: whether a row of
    queries or keys may have more than two calls, on any rank. common: what all ranks share. timed:
    the list of `timed_transfers`, which the backward pass adds to as well.
    """

    ranks: Ranks
    calls: Sequence[Sequence[Call]]
    options: Options
    dim: int
    has_many_parts: bool
    common: Mapping[str, Any]
    timed: list[TransferTimes] | None


def _planned(
    ranks: Ranks,
    tensors: Mapping[str, torch.Tensor],
    *,
    placement: str,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    softmax_scale: float | None,
    cu_seqlens: Sequence[int] | torch.Tensor | None,
    flags: Mapping[str, bool],
) -> _Plan:
    """Return the plan. Raises TypeError and ValueError for arguments."""
    check_placement(placement)
    for name, value in {"causal": causal, **flags}.items():
        _check_flag(name, value)
    left, right, cap = _options(window_size, softcap, None) or _NO_OPTIONS
    scale = _scale(softmax_scale)
    window = (left, 0) if causal else (left, right)
    begins = None if cu_seqlens is None else begins_of(cu_seqlens)
    check_shapes(tensors, is_packed=begins is not None)
    q, k, v = tensors.values()
    dim = 1 if begins is None else 0
    dense = {name: x if dim else x[None] for name, x in tensors.items()}
    element = element_of("q", q, AttentionForward.elements)
    posed_problem(AttentionForward, element, dense, causal=causal, softmax_scale=scale, softcap=cap)
    len_q, len_k = q.shape[dim], k.shape[dim]
    if len_q != len_k and (begins is not None or window != (None, None)):
        raise ValueError(
            f"a shard has {len_q} queries and {len_k} keys: a mask and cu_seqlens need as many of "
            "both; pad the shorter, or leave out causal and window_size"
        )
    size, rank = ranks.size, ranks.rank
    sources = [(rank - step) % size for step in range(size)]  # of the keys of each step
    if begins is None:
        if placement == "zigzag" and window != (None, None) and len_q % 2:
            raise ValueError(
                f"a shard has length {len_q}, and placement 'zigzag' has two halves in each: pad "
                f"the sequence to a multiple of {2 * size}, or choose placement 'striped'"
            )
        lengths = len_q, len_k
        pieces = [pieces_of(placement, size, rank, s, lengths, window) for s in sources]
        calls = [calls_of_batch(each, len_q, len_k) for each in pieces]
    else:
        calls = _calls_of_sequences(ranks, placement, begins, window, len_q, sources, q.device)
    common = {
        "batch": q.shape[0] if dim else 1,
        "shard length": len_q,
        "keys of a shard": len_k,
        "heads": q.shape[-2],
        "heads of K and V": k.shape[-2],
        "d_head": q.shape[-1],
        "d_v": v.shape[-1],
        "dtype": str(q.dtype),
        "causal": causal,
        "window_size": window,
        "placement": placement,
        "softcap": cap,
        "softmax_scale": scale,
        "cu_seqlens": begins,
        "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }
    options = Options(cap, scale, flags["deterministic"])
    many = size > 2 or window not in ((None, None), (None, 0))
    return _Plan(ranks, calls, options, dim, many, common, transfers_to_time())


def begins_of(cu_seqlens: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    """Return where sequences begin, and the total. Raises TypeError and ValueError for what is no
    such list, or lies on a device."""
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens is on {cu_seqlens.device}, and the host cuts the sequences: pass it "
                "on the CPU, where the lengths are known before"
            )
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
            raise TypeError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}: pass int32 "
                "of shape (sequences + 1,)"
            )
        cu_seqlens = cu_seqlens.tolist()
    begins = tuple(cu_seqlens)
    if not begins or any(type(begin) is not int for begin in begins):
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}: pass whole numbers, 0 first")
    if begins[0] != 0:
        raise ValueError(f"cu_seqlens begins with {begins[0]}: pass 0 first")
    for n, (begin, end) in enumerate(pairwise(begins)):
        if end < begin:
            raise ValueError(
                f"cu_seqlens falls from {begin} to {end} at sequence {n}: pass cumulative lengths"
            )
    return begins


def check_shapes(tensors: Mapping[str, torch.Tensor], *, is_packed: bool) -> None:
    """Raises ValueError for another number of dimensions than that of (batch, shard, heads,
    d_head), or of (shard, heads, d_head) where sequences are packed."""
    axes = _AXES[1:] if is_packed else _AXES
    for name, x in tensors.items():
        if x.ndim != len(axes):
            raise ValueError(
                f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: pass "
                f"({', '.join(axes)}){' with cu_seqlens' if is_packed else ''}"
            )


def _calls_of_sequences(
    ranks: Ranks,
    placement: str,
    begins: tuple[int, ...],
    window: tuple[Bound, Bound],
    rows: int,
    sources: Sequence[int],
    device: torch.device,
) -> list[list[Call]]:
    """Return the calls of each step for sequences of various lengths."""
    if placement != "striped" and window not in ((None, None), (None, 0)):
        raise ValueError(
            f"window_size with cu_seqlens in placement {placement!r}: the mask between two shards "
            "depends on the length of each sequence there: choose placement 'striped'"
        )
    size, rank = ranks.size, ranks.rank
    lengths = [
        shard_length(end - begin, size, placement, f"sequence {n}")
        for n, (begin, end) in enumerate(pairwise(begins))
    ]
    if sum(lengths) != rows:
        raise ValueError(
            f"cu_seqlens ends with {begins[-1]}, which is {sum(lengths)} rows for each of {size} "
            f"ranks, and q has {rows}: pass the shard of these sequences"
        )
    found = []
    for source in sources:
        pieces = [pieces_of(placement, size, rank, source, (n, n), window) for n in lengths]
        found.append(calls_of_sequences(pieces, lengths, device))
    return found


class _Ring(torch.autograd.Function):
    """A node of the autograd graph for the whole ring."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = _forward(q, k, v, plan)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dlse is not None:
            raise RuntimeError(NO_LSE)
        if do is None:
            return None, None, None, None
        plan = ctx.plan
        found = _NoBackward.apply(
            NO_SECOND, lambda *given: _backward(given, plan), do, *ctx.saved_tensors
        )
        return (*found, None)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and LSE of this rank's queries on all keys."""
    size = plan.ranks.size
    ring = Ring(plan.ranks, _Keys.likes(k, v, size), q.device, plan.timed)
    parts = _Parts(q, v, plan.dim, sum(map(len, plan.calls)))
    keys = _Keys(ring, k, v, size)
    for step, calls in enumerate(plan.calls):
        keys.start(step)
        for call in calls:
            call.forward(q, keys.held, plan.options, *parts.next())
        keys.finish()
    ring.end()
    return parts.merged()


class _Keys:
    """The keys and values of a rank, and those on their way.

    The keys of step t + 1 arrive in one of three pairs of tensors, of which the kernels of step
    t - 2 were the last to read. So a transfer is ready before the kernels of step t - 1 end, and
    need not win a race against those of step t: NCCL's kernels take SMs, as barriers around copies
    do, and a kernel of attention that begins first takes all.
    """

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor, size: int) -> None:
        self.held: tuple[torch.Tensor, ...] = (k.contiguous(), v.contiguous())
        self._ring, self._size = ring, size
        self._arriving: tuple[Transfer, Place] | None = None
        self._marks = [ring.mark()]  # before step 0, and behind the kernels of each step

    @staticmethod
    def likes(k: torch.Tensor, v: torch.Tensor, size: int) -> list[Sequence[torch.Tensor]]:
        """Return pairs of the shapes and dtypes that a ring of so many ranks needs places for: its
        first ones."""
        return [(k, v)] * min(_PAIRS, size - 1)

    def start(self, step: int) -> None:
        """Start to send the keys of a step, and to receive those of the next one, if there is
        one."""
        if step + 1 < self._size:
            place, mark = self._ring.places[step % _PAIRS], self._marks[max(0, step - 1)]
            transfer = self._ring.pass_on(self.held, place, mark, "keys and values", step)
            self._arriving = transfer, place

    def finish(self) -> None:
        """Hold the keys of the next step, when the kernels of this one have been launched."""
        self._marks.append(self._ring.mark())
        if self._arriving is not None:
            transfer, place = self._arriving
            transfer.wait()
            self.held = place.own
            self._arriving = None


class _Parts:
    """o and LSE on parts of the keys, into which kernels write, and which are merged in the end.

    A part of which a call writes some rows has an LSE of -inf in the others. Of more than
    MOST_PARTS, each group is merged into sums of fp32, so that a ring of any size needs memory for
    one group.
    """

    def __init__(self, q: torch.Tensor, v: torch.Tensor, dim: int, count: int) -> None:
        *rows, heads, _ = q.shape
        held = max(1, min(count, MOST_PARTS))
        self._o = q.new_empty((held, *rows, heads, v.shape[-1]))
        size = (held, *rows[:dim], heads, rows[dim])
        self._lse = q.new_full(size, -math.inf, dtype=torch.float32)
        self._used = 0
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o and LSE of another part, to be written."""
        if self._used == len(self._o):
            self._merge()
        self._used += 1
        return self._o[self._used - 1], self._lse[self._used - 1]

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o, in the dtype of the parts, and LSE on all keys, contiguous."""
        self._merge()
        assert self._sums is not None
        o, lse = self._sums
        return o.to(self._o.dtype), lse.contiguous()

    def _merge(self) -> None:
        """Merge the parts of this group, and with those before it."""
        used = max(1, self._used)
        given = self._o[:used], self._lse[:used].transpose(-1, -2)
        o, lse = combined(*given, 0, ("o", "lse"), base_2=False, dtype=self._o.dtype)
        found = o, lse.transpose(-1, -2)
        if self._sums is None:
            self._sums = found
        else:
            self._sums = _merged_two(self._sums, found)
        self._lse.fill_(-math.inf)
        self._used = 0


def _merged_two(
    sums: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o, in fp32, and LSE on the keys of both: with w the share of the other's keys in the
    sum of exponentials,

        w = exp(lse') / (exp(lse) + exp(lse'))      o + w (o' - o)
    """
    (o, lse), (of_other, lse_of_other) = sums, other
    share = torch.sigmoid(lse_of_other - lse)
    share.masked_fill_(lse_of_other == -math.inf, 0.0)  # -inf less -inf is no number
    of_both = o.float().lerp_(of_other.float(), share.transpose(-1, -2)[..., None])
    return of_both, torch.logaddexp(lse, lse_of_other)


def _backward(
    tensors: Sequence[torch.Tensor], plan: _Plan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's q, k and v. tensors: do, q, k, v, o and lse.

    In step t the keys of rank r - t are here, and the sums of their gradients arrive from the rank
    that had them in step t - 1. A last hop brings the sums to the rank of their keys, rounded as
    that rank would round them.
    """
    do, q, k, v, o, lse = tensors
    size = plan.ranks.size
    options = plan.options
    if torch.are_deterministic_algorithms_enabled():
        options = replace(options, deterministic=True)
    dtype = torch.float32 if plan.has_many_parts else None
    sums = tuple(_Sum(x, plan.dim, dtype) for x in (k, v))
    likes = _Keys.likes(k, v, size)
    first = len(likes)  # of the places of sums
    if size > 1:
        likes += [[sum_.like for sum_ in sums]] * _PAIRS_OF_SUMS + [(k, v)]
    ring = Ring(plan.ranks, likes, q.device, plan.timed)
    given = do, q, o, lse
    keys = _Keys(ring, k, v, size)
    dq = _Sum(q, plan.dim, dtype)
    name = "gradients of keys and values"
    for step, calls in enumerate(plan.calls):
        keys.start(step)
        arriving = None
        if step > 0:
            place = ring.places[first + step % _PAIRS_OF_SUMS]
            sent = [sum_.value for sum_ in sums]
            arriving = ring.pass_on(sent, place, ring.mark(), name, step)
        found = [(call, call.backward(given, keys.held, options)) for call in calls]
        if arriving is not None:
            arriving.wait()
            for sum_, x in zip(sums, place.own, strict=True):
                sum_.value = x
        for call, (of_q, *of_keys) in found:
            dq.add(call.rows, of_q)
            for sum_, part in zip(sums, of_keys, strict=True):
                sum_.add(call.keys, part)
        keys.finish()
    dk, dv = (sum_.rounded() for sum_ in sums)
    if size > 1:
        place = ring.places[-1]
        ring.pass_on((dk, dv), place, ring.mark(), name, size).wait()
        dk, dv = (x.clone() if place.theirs else x for x in place.own)
    ring.end()
    return dq.rounded(), dk, dv


class _Sum:
    """A sum of gradients of some rows of a tensor.

    dtype: of the sum, by default that of its parts. Where a row has two of these at most, one
    addition rounds as fp32 and a conversion in the end would.
    """

    def __init__(self, of: torch.Tensor, dim: int, dtype: torch.dtype | None) -> None:
        self._of, self._dim, self._dtype = of, dim, dtype or of.dtype
        self._value: torch.Tensor | None = None

    @property
    def like(self) -> torch.Tensor:
        """A tensor without memory that is as the sum."""
        return torch.empty(self._of.shape, dtype=self._dtype, device="meta")

    @property
    def value(self) -> torch.Tensor:
        """The sum, contiguous; 0 where there is no part."""
        if self._value is None:
            self._value = self._of.new_zeros(self._of.shape, dtype=self._dtype)
        return self._value

    @value.setter
    def value(self, found: torch.Tensor) -> None:
        self._value = found

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        """Add a part of some rows, which is not needed behind the call."""
        if self._value is None and rows.is_all:
            self._value = part.to(self._dtype).contiguous()
        else:
            rows.add(self.value, self._dim, part)

    def rounded(self) -> torch.Tensor:
        """Return the sum in the dtype of its tensor."""
        return self.value.to(self._of.dtype)
