"""FlashAttention-2 block by block, in the order and with the roundings of the kernels.

A kernel rounds where this module does. S and O are fp32 and grow by one mma (16 products of fp32
accuracy) at a time. P is rounded to the inputs' dtype before P @ V. l sums P before that rounding,
or after it where mma takes the sum. O is divided by l and rounded at the end. All values that a
kernel holds in between are visible, one block of keys after the other.

The m of a lazy step follows a maximum that has grown by more than MAX_GROWTH. Where a step keeps
the maximum of the first block, m is raised if a lane's sum is over MAX_SUM. A growth that equals
the limit within the rounding of S may be followed here and not by the kernel.

Keys that a row does not see, in causal attention, outside of a window and behind the end of the
keys, do not count in m, l and P; S has its value before they are hidden. With a softcap the score
that is masked and exponentiated is tanh(S · scale / softcap), and softcap takes the place of the
scale in the exponent. The sink of a head is added to l after the last block.

The rows of a tile begin with the same block of keys, in which some rows may see no key yet: their m
is then found again in their second block. In a step whose warpgroups leave out blocks that only
others see, this holds for the rows of a warpgroup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.operations.attention_forward.configs import AttentionConfig
from flash_helpers.registry.mma_sync import (
    LAZY_RESCALE,
    MAX_GROWTH,
    MMA_K,
    MMA_ROW_SUM,
    MmaSyncConfig,
)
from flash_helpers.registry.wgmma import (
    MAX_L,
    MAX_RAISE,
    MAX_SUM,
    NO_MAXIMUM,
    REPLAYS,
    UNCHECKED,
    WARP_ROWS,
    WGMMA_M,
    WgmmaConfig,
)
from flash_helpers.runtime.tensors import check_problem

QUANTITIES = ("Q", "K", "S", "m", "l", "P", "V", "O")
"""Quantities of a step, in the order in which a kernel comes by it."""
OF_KEYS = ("K", "V")
"""Quantities of which each warp has a copy."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class BlockStep:
    """State of a kernel after one block of keys, fp32, for all thread blocks at once.

    The leading dimensions are (batch, heads, blocks of rows). A value that all lanes or warps share
    has one entry for each lane or warp that holds a copy, or a dimension of 1 to be broadcast.
    Entries are NaN for warps that leave the block of keys out, and for keys of the block that they
    do not multiply with.

    `Q`: (..., B_r, d_head). `K`, `V`: (..., warps, B_c, d_head).
    `S`: (..., B_r, B_c), the scores Q @ K^T before any scaling.
    `m`: (..., B_r, lanes), the maximum of each row so far. It is the maximum of the scaled scores
        if the kernel scales first, of S itself if it folds the scale into the exponent
        (`folds_scale`), and of S · scale · log2(e) in a lazy step and on `wgmma`. The m of a
        lazy step may lag behind the maximum. Where m is that of the first block, the exponents of
        this block use it: P, l and O are relative to it, or to the value to which it is raised
        afterwards.
    `l`: (..., B_r, copies), the sum of each row of P so far, relative to m.
    `P`: (..., B_r, B_c), rounded to the inputs' dtype.
    `O`: (..., B_r, d_v), the sum of P @ V so far, relative to m and not yet divided by l. `base`:
        the exponent of 2 that l and O are relative to, in the reference alone.
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
    base: torch.Tensor | None = None


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


def _is_exponent(config: Config) -> bool:
    """Whether m is a maximum of S · scale · log2(e)."""
    return LAZY_RESCALE in config.step.traits or isinstance(config, WgmmaConfig)


def _in_any_row(config: Config, is_so: torch.Tensor) -> torch.Tensor:
    """Rows of warps in which a condition holds for any row, for kernels whose warps decide for all
    of their rows. `is_so`: (..., B_r, 1)."""
    if not isinstance(config, WgmmaConfig):
        return is_so
    of_warps = is_so.unflatten(-2, (-1, WARP_ROWS))
    return of_warps.any(-2, keepdim=True).expand_as(of_warps).flatten(-3, -2)


def _new_maximum(config: Config, m: torch.Tensor, block_m: torch.Tensor) -> torch.Tensor:
    """m with the maximum of one more block, both (..., B_r, 1)."""
    new_m = torch.maximum(m, block_m)
    if LAZY_RESCALE not in config.step.traits:
        return new_m
    return new_m.where(_in_any_row(config, ~(block_m - m <= MAX_GROWTH)), m)


def _sum_by_lanes(
    config: Config,
    l: torch.Tensor,  # noqa: E741
    P: torch.Tensor,
    *,
    begins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """l with the sums of one more block, P, and by how much m is raised before either is used.

    `l`: (..., B_r, lanes), with the four lanes that share a row. `P`: (..., B_r, B_c), not rounded,
    relative to the m before. `begins`: (..., B_r, 1), rows whose m is that of the block, which are
    not checked. A row that has left the range of fp32 has an l of NaN.
    """
    sums = P.unflatten(-1, (-1, 4, 2)).sum((-3, -1))
    l = l + sums  # noqa: E741
    raised = torch.zeros_like(l[..., :1])
    if UNCHECKED in config.step.traits and config.dtype is Element.BF16:
        return l, P, raised
    grows = _in_any_row(config, ~(sums <= MAX_SUM).all(-1, keepdim=True)) & ~begins
    # fmax: an l that is NaN asks for nothing
    growth = torch.fmax(torch.log2(l), torch.zeros_like(l)).amax(-1, keepdim=True)
    raised = growth.where(grows, raised)
    l = (l * _exp2(-raised)).where(raised < MAX_RAISE, torch.nan)  # noqa: E741
    return l, P * _exp2(-raised), raised


def _in_tiles(x: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """(batch, heads, blocks, rows, d_head), fp32, of (batch, seq, any heads, d_head); zeros behind
    the end of the sequence, as TMA has them."""
    x = x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2).float()
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % rows)).unflatten(2, (-1, rows))


def blockwise_forward(
    config: AttentionConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> Iterator[BlockStep]:
    """The steps of the config's kernel, one for each block of keys, in its order.

    `q`: (batch, len_q, heads, d_head). `k`, `v`: (batch, len_k, kv_heads, d_head), or d_v in v.
    `sinks`: (heads,). All have the config's dtype and are on the CPU. `options`: those of a call,
    such as softmax_scale, and its other tensors.

    Raises ValueError for a problem that the kernel does not take, and for several sequences of
    various lengths.
    """
    given = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    given |= {name: options.pop(name) for name in [*options] if name in AttentionForward.axes}
    problem = check_problem(config, given, **options)
    assert isinstance(problem, AttentionForward)
    if problem.sequences > 1:
        raise ValueError(f"{problem.sequences} sequences are not traced at once: use batch 1")
    Q = _in_tiles(q, config.B_r, problem.heads)
    keys, values = (_in_tiles(x, config.B_c, problem.heads) for x in (k, v))
    traits = config.step.traits
    folded, optimistic = config.folds_scale, REPLAYS in traits
    scale = torch.tensor(problem.softmax_scale).item()
    softcap = problem.softcap
    exponent_scale = torch.tensor((softcap or scale) * _LOG2_E).item() if folded else _LOG2_E
    # what makes m an exponent of 2
    m_scale = 1.0 if _is_exponent(config) else exponent_scale

    blocks = config.key_blocks(problem.len_k)
    rows = Q.shape[:-1]
    begin, end, first_block, n_blocks, first_keys = (  # of each row, (blocks of rows, B_r, 1)
        torch.tensor([of_row(i) for i in range(rows[2] * rows[3])]).view(*rows[2:], 1)
        for of_row in (
            lambda query: problem.visible_keys(query).start,
            lambda query: _visible_end(config, problem, query),
            lambda query: config.own_key_blocks(problem, query)[0],
            lambda query: len(config.own_key_blocks(problem, query)),
            lambda query: config.first_keys(problem, query),
        )
    )
    # m where no key was seen: the kernels on mma.sync begin with it
    lowest = torch.finfo(torch.float32).min
    if not isinstance(config, MmaSyncConfig):
        lowest = NO_MAXIMUM * (exponent_scale / m_scale)
    sees_late = _first_of_warpgroup(end) <= first_block * config.B_c
    m = torch.full((*rows, 1), -torch.inf)
    l = torch.zeros(*rows, 1)  # noqa: E741
    O = torch.zeros(*rows, problem.d_v)  # noqa: E741
    for turn, j in enumerate(blocks):
        # For each row. Rows that leave the block out begin anew with a block in which they see no
        # key.
        own_turn = turn - (first_block - blocks[0]).abs()
        begins = (own_turn <= 0) | ((own_turn == 1) & sees_late)
        taken = (own_turn >= 0) & (own_turn < n_blocks)
        key = j * config.B_c + torch.arange(config.B_c)
        hidden = (key < begin) | (key >= end) | ~taken
        K, V = keys[:, :, j, None], values[:, :, j, None]
        S = _add_product(torch.zeros(*rows, config.B_c), Q, K.mT)
        scores = S if folded else S * scale
        if softcap:
            scores = torch.tanh(scores * ((scale if folded else 1.0) / softcap))
            scores = scores if folded else scores * softcap
        scores = scores.masked_fill(hidden, -torch.inf)
        block_m = scores.amax(-1, keepdim=True) * (exponent_scale / m_scale)
        block_m = block_m.clamp(lowest)
        new_m = _new_maximum(config, m, block_m)
        if optimistic:
            new_m = torch.where(own_turn <= 0, block_m, torch.maximum(m, block_m))
            new_m = new_m.where(begins, m)
        rescale = _exp2((m - new_m) * m_scale)
        m = used_m = new_m
        if folded:  # one fused multiply-add, rounded once
            exponent = (scores.double() * exponent_scale - (m * m_scale).double()).float()
        else:
            exponent = (scores - m) * exponent_scale
        P = _exp2(exponent)
        if optimistic:
            l, P, raised = _sum_by_lanes(config, l * rescale, P, begins=begins)  # noqa: E741
            m, rescale = m + raised, rescale * _exp2(-raised)
        rounded_P = P.to(q.dtype).float()
        if MMA_ROW_SUM in traits:
            l = _add_product(l * rescale, rounded_P, torch.ones(config.B_c, 1))  # noqa: E741
        elif not optimistic:
            l = l * rescale + P.sum(-1, keepdim=True)  # noqa: E741
        P = rounded_P
        O = _add_product(O * rescale, P, V)  # noqa: E741
        row_l = l.sum(-1, keepdim=True)
        base = m * m_scale
        step = BlockStep(j, Q, K[:, :, :, None], S, used_m, row_l, P, V[:, :, :, None], O, base)
        multiplied = taken & ((torch.arange(config.B_c) < first_keys) | (own_turn > 0))
        # a tile ends with all keys of P @ V, since one copy of that code serves any tile
        ends = taken & (own_turn == n_blocks - 1)
        yield _taken_by(config, step, taken, multiplied, multiplied | ends)


def _visible_end(config: AttentionConfig, problem: AttentionForward, query: int) -> int:
    """The end of the keys that a row counts. On mma.sync a causal row hides keys by its number
    alone: past len_q, where it is not stored, it counts zeros behind the end of the keys."""
    past = max(query + 1 - problem.len_q, 0) if isinstance(config, MmaSyncConfig) else 0
    return problem.visible_keys(query).stop + (past if config.supports.causal else 0)


def _first_of_warpgroup(of_rows: torch.Tensor) -> torch.Tensor:
    """For each row, the value of the first of its 64 rows; (..., B_r, 1)."""
    every = of_rows.split(WGMMA_M, dim=-2)
    return torch.cat([some[..., :1, :].expand_as(some) for some in every], dim=-2)


def _taken_by(
    config: AttentionConfig,
    step: BlockStep,
    rows: torch.Tensor,
    keys_of_S: torch.Tensor,
    keys_of_P: torch.Tensor,
) -> BlockStep:
    """The step with NaN everywhere except for some rows (whole warps) and some keys of Q @ K^T and
    of P @ V. `rows`: (blocks of rows, B_r, 1). `keys_of_S`, `keys_of_P`: (blocks of rows, B_r, 1 or
    B_c).
    """
    if keys_of_S.all() and keys_of_P.all():
        return step
    known = dict.fromkeys(QUANTITIES, rows)
    for of_rows, of_keys, keys in (("S", "K", keys_of_S), ("P", "V", keys_of_P)):
        known[of_rows] = keys
        known[of_keys] = keys.unflatten(-2, (config.n_warps, -1))[..., 0, :, None]
    quantities = {name: getattr(step, name).where(known[name], torch.nan) for name in QUANTITIES}
    return BlockStep(step.key_block, **quantities, base=step.base)


def finish(
    steps: Sequence[BlockStep], q: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The output (batch, len_q, heads, d_v) after all steps, in q's dtype: O / l, rounded, 0 where
    no key is seen."""
    O, l = _at_the_end(steps, "O"), _at_the_end(steps, "l")  # noqa: E741
    if sinks is not None:
        base = steps[-1].base
        assert base is not None  # of the reference
        sink = sinks.float()[:, None, None, None] * _LOG2_E
        largest = torch.maximum(base, sink)
        O = O * _exp2(base - largest)  # noqa: E741
        l = l * _exp2(base - largest) + _exp2(sink - largest)  # noqa: E741
    return _in_sequence((O / l).where(l != 0, 0).to(q.dtype), q.shape[1])


def rows_that_fit(steps: Sequence[BlockStep], len_q: int) -> torch.Tensor:
    """The rows after all steps that have not left the range of fp32; (batch, len_q, heads, 1).
    Where m is that of the first block a kernel computes the other rows again, exactly."""
    O, l = _at_the_end(steps, "O"), _at_the_end(steps, "l")  # noqa: E741
    return _in_sequence((l < MAX_L) & O.isfinite().all(-1, keepdim=True), len_q)


def _at_the_end(steps: Sequence[BlockStep], name: str) -> torch.Tensor:
    """The value of a quantity after each row's last block; a row may leave out the last steps."""
    first, *others = steps
    found = getattr(first, name)
    for step in others:
        value = getattr(step, name)
        found = torch.where(_is_left_out(step), found, value)
    return found


def _is_left_out(step: BlockStep) -> torch.Tensor:
    """Rows that leave a block out; (..., B_r, 1). Their Q is not there either."""
    return step.Q.isnan().all(-1, keepdim=True)


def _in_sequence(rows: torch.Tensor, length: int) -> torch.Tensor:
    return rows.flatten(2, 3)[:, :, :length].transpose(1, 2).contiguous()
