"""Mistakes that the steps of the backward pass invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.check.faults import Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward.supports import VARLEN
from flash_helpers.ptx import (
    DeadlockError,
    InstructionLimitError,
    LaunchOrderError,
    OutOfBoundsError,
    PendingCopyError,
    Phase,
    ProxyError,
    RaceError,
    UninitialisedReadError,
    WgmmaRegisterError,
)
from flash_helpers.registry.wgmma import PERSISTENT

PROLOGUE, MAIN_LOOP, EPILOGUE = Phase.PROLOGUE, Phase.MAIN_LOOP, Phase.EPILOGUE
BF16 = Element.BF16
BARRIER = r"bar\.sync"
CAUSAL = {"causal": True}
PROXY_FENCE = r"fence\.proxy\.async"

FAULTS = {
    "p1: queries are read without a barrier after the wait": Fault(
        "p1", BF16, MAIN_LOOP, BARRIER, drop, nth(1), RaceError, "ldmatrix_x4(",
        kernel="dkdv_kernel",
    ),
    "p1: dK lacks the scale, which S has": Fault(
        "p1", BF16, EPILOGUE, r"mul\.f32", swap(r"mul\.f32\s+(%f\d+), (%f\d+), .*;",
        r"mov.f32 \1, \2;"), quantity="dk", kernel="dkdv_kernel",
    ),
    "p2: a warp reads its rows before the other warps have copied them": Fault(
        "p2", BF16, PROLOGUE, BARRIER, drop, nth(0), RaceError, "ldmatrix_x4(",
        kernel="dkdv_kernel",
    ),
    "p3: the block that is multiplied may still be in flight": Fault(
        "p3", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("0;", "1;"), None, PendingCopyError,
        "ldmatrix_x4(", kernel="dkdv_kernel",
    ),
    "p4: dS of the last block is read before the other warps have stored it": Fault(
        "p4", BF16, MAIN_LOOP, BARRIER, drop, nth(1), RaceError, "ldmatrix_x4_trans(dS_rmem",
        kernel="gradients_kernel",
    ),
    "p5: P is read before the warp with the same keys has stored it": Fault(
        "p5", BF16, MAIN_LOOP, r"bar\.sync .*, 64;", drop, None, RaceError, "load_smem_16(",
        kernel="gradients_kernel",
    ),
    "p6: dS is not cleared before the first block": Fault(
        "p6", BF16, PROLOGUE, r"st\.shared\.v4", drop, None, UninitialisedReadError,
        "ldmatrix_x4_trans(dS_rmem", kernel="gradients_kernel",
    ),
    "b1: P^T and dS^T are not handed over to the asynchronous proxy": Fault(
        "b1", BF16, MAIN_LOOP, PROXY_FENCE, drop, None, ProxyError,
        "store_transposed", kernel="dkdv_kernel",
    ),
    "b2: a query has the LSE of the query before it": Fault(
        "b2", BF16, MAIN_LOOP, r"ld\.global\.f32.*\+4\]", swap(r"\+4\]", "]"), nth(0),
        quantity="LSE", kernel="dkdv_kernel",
    ),
    "b3: a slot is not given back": Fault(
        "b3", BF16, MAIN_LOOP, r"mbarrier\.arrive\.shared", drop, None, DeadlockError,
        "barrier_wait(ring.barrier(full)", kernel="dkdv_kernel",
    ),
    "b4: both warpgroups multiply the queries of the first": Fault(
        "b4", BF16, PROLOGUE, r"shfl\.sync\.idx",
        swap(r"shfl\S+\s+(%r\d+)\|%p\d+, .*;", r"mov.b32 \1, 0;"), nth(0), RaceError,
        "store_rows<cfg.dtype, B_r>(args.dQ", kernel="dq_kernel",
    ),
    "b5: dK goes through rows of K that the other warpgroup still multiplies": Fault(
        "b5", BF16, EPILOGUE, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), None, RaceError,
        "store_rows<cfg.dtype, B_c>(args.dK", kernel="gradients_kernel",
    ),
    "b6: dS goes into a slot that the third warpgroup still multiplies": Fault(
        "b6", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(1), RaceError, "store_transposed<B_r>(dS_own_smem",
        kernel="gradients_kernel",
    ),
    "b7: the first product replaces what dP begins with": Fault(
        "b7", BF16, MAIN_LOOP, r"setp\.ne\.b32 accumulates", swap(r"accumulates, \S+ 0;",
        "accumulates, 0, 0;"), nth(8), quantity="delta", kernel="gradients_kernel",
    ),
    "b8: the exponentials of S do not wait for it": Fault(
        "b8", BF16, MAIN_LOOP, r"wgmma\.wait_group\S* 1;", swap(r" 1;", " 2;"), nth(0),
        WgmmaRegisterError, "exp2_approx", kernel="gradients_kernel",
    ),
    "b9: V of a tile is not waited for": Fault(
        "b9", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(0), PendingCopyError, "wgmma<cfg.dtype>(dP_rmem, V",
        kernel="gradients_kernel",
    ),
    "b10: a block that a warpgroup does not see has the dS of an earlier one": Fault(
        "b10", BF16, MAIN_LOOP, r"stmatrix.*\{(%r\d+), \1, \1, \1\}", drop,
        quantity="dS of dQ", turn=0, options=CAUSAL, kernel="gradients_kernel",
    ),
    "b11: the rows of dO and O behind the end are read": Fault(
        "b11", BF16, MAIN_LOOP, r"selp\.b64", swap(r"selp\.b64\s+(%rd\d+), (%rd\d+), .*;",
        r"mov.b64 \1, \2;"), nth(0), OutOfBoundsError, "row_delta<",
        kernel="delta_kernel",
    ),
    "b12: a tile does not end its turn": Fault(
        "b12", BF16, MAIN_LOOP, r"st\.release\.gpu", drop, None, InstructionLimitError,
        "load_acquire", options={"in_turn": True}, kernel="gradients_kernel",
    ),
    "b13: sums are read while delta_kernel clears them": Fault(
        "b13", BF16, MAIN_LOOP, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "load", kernel="convert_kernel",
    ),
    "b14: a key is seen by all queries behind it": Fault(
        "b14", BF16, MAIN_LOOP, r"setp\.lt\.u32\s+%p\d+, %r\d+, %r\d+;",
        swap(r"setp\.lt\.u32\s+(%p\d+), (%r\d+), .*;", r"setp.ge.s32 \1, \2, 0;"),
        quantity="P of dV", turn=3, options={"window": True}, kernel="gradients_kernel",
    ),
    "b15: P lacks the LSE, which S began with before": Fault(
        "b15", BF16, MAIN_LOOP, r"add\.f32", swap(r"add\.f32\s+(%f\d+), %f\d+, ", r"mov.f32 \1, "),
        quantity="LSE", options={"softcap": True}, kernel="gradients_kernel",
    ),
    "b15: where a key is hidden, the derivative of tanh is -infinity": Fault(
        "b15", BF16, MAIN_LOOP, r"cvt\.sat\.f32", swap(r"cvt\.sat\.f32\.f32", "mov.f32"),
        quantity="dK", options={"causal": True, "softcap": True}, kernel="gradients_kernel",
    ),
    "b16: the end of a sequence's keys is read where they begin": Fault(
        "b16", BF16, MAIN_LOOP, r"ld\.global.*\+4\]", swap(r"\+4\]", "]"), nth(0),
        quantity="Q", options={"varlen": True}, kernel="gradients_kernel",
    ),
    "b17: a slot of Q and dO waits for the bytes of d_head 128": Fault(
        "b17", BF16, MAIN_LOOP, r"mov\.u32.* 16896;", swap("16896", "33280"), None,
        DeadlockError, "barrier_wait(next.barrier(full)", options={"d_head": 64},
        kernel="gradients_kernel",
    ),
    "b18: a thread clears a part of the sums less": Fault(
        "b18", BF16, MAIN_LOOP, r"st\.global\.v4", drop, nth(0), quantity="dq",
        kernel="delta_kernel",
    ),
    "b19: a tile ends its last turn alone": Fault(
        "b19", BF16, MAIN_LOOP, r"st\.release\.gpu", drop, nth(0), InstructionLimitError,
        "load_acquire", options={"in_turn": True}, kernel="gradients_kernel",
    ),
    "m1: P is read before the warpgroup of dV has stored it": Fault(
        "m1", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(1), UninitialisedReadError, "load_smem_16(P_own_smem",
        kernel="gradients_kernel",
    ),
}  # fmt: skip


def problem_of(config: Any) -> AttentionBackward:
    """Return the problem on which faults of a config show: three blocks of queries and of keys, and
    where the kernel takes any length, a few more. Not so of sequences, which end with a block: the
    trace has cells from their first row on."""
    supports = config.supports
    whole = 3 * max(supports.B_r, supports.B_c)
    has_more = not supports.blocks and VARLEN not in supports.abilities
    length = whole + 3 if has_more else -(-whole // supports.whole) * supports.whole
    return supports.problem(1, 1, length, length)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for, with one SM where a thread block takes several
    tiles."""
    largest = largest_device(config.family.capabilities[0])
    return replace(largest, sms=1) if PERSISTENT in config.step.traits else largest


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
