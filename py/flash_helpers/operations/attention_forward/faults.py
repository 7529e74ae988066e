"""Mistakes that the steps of attention invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.check.faults import Fault, drop, leave, nth, of_warp, other_chunk, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.operations.attention_forward.configs import AttentionConfig
from flash_helpers.ptx import (
    AbsentBlockError,
    BarrierError,
    DeadlockError,
    LaunchOrderError,
    MbarrierError,
    MisalignedError,
    MissingLanesError,
    OutlivedError,
    OutOfBoundsError,
    PendingCopyError,
    Phase,
    ProxyError,
    RaceError,
    UninitialisedReadError,
    WgmmaRegisterError,
)
from flash_helpers.registry.mma_sync import LAZY_RESCALE, MmaSyncConfig
from flash_helpers.registry.tile_order import COUNTED_FROM
from flash_helpers.registry.wgmma import WGMMA_M

PROLOGUE, MAIN_LOOP, EPILOGUE = Phase.PROLOGUE, Phase.MAIN_LOOP, Phase.EPILOGUE
CAUSAL = {"causal": True}
FP16, BF16 = Element.FP16, Element.BF16
WARP_BARRIER = r"bar\.warp\.sync"
BARRIER, WAIT, COMMIT = r"bar\.sync", r"cp\.async\.wait_group", r"cp\.async\.commit_group"
COPY, LOAD, LOAD_V = r"cp\.async\.cg", r"ldmatrix\S*x4\.shared", r"ldmatrix\S*trans"
SHUFFLE, MMA = r"shfl\.sync", r"mma\.sync"
PROXY_FENCE, WGMMA_WAIT = r"fence\.proxy\.async", r"wgmma\.wait_group"
TRY_WAIT, ARRIVE = r"mbarrier\.try_wait", r"mbarrier\.arrive\.shared"
ROW_BYTES = 256
"""Bytes of a row in shared memory before v15, and in global memory with one head before v16."""
PIECE_ROW_BYTES = 128
"""Bytes of a row in shared memory from v15 on."""
STAGE_BYTES = 2 * 64 * 256
"""Bytes of one buffer each of K and V."""
RESCALE = r"mul\.f32\s+(%f\d+), %f\d+, \1;"
N_RESCALED = 1 + 2 * 16
"""l, and O in 16 column tiles, of a row."""
ONES = "1065369472"
"""Two of 1.0 in bf16."""
LOG2_E, SCALED_LOG2_E = "0f3FB8AA3B", "0f3E0293EE"
"""log2(e), and the same divided by sqrt(d_head)."""
N_SCORE_WGMMAS = 8
N_PASSED_OVER = 7
"""Copies of the code that passes over a slot of V, in a loop unrolled by four."""
N_SCORE_MMAS = 64
"""Instructions of Q @ K^T in one block of keys: `wgmma` and `mma`."""

FAULTS = {
    "v1: copies of the next V begin before all have read the last": Fault(
        "v1", FP16, MAIN_LOOP, BARRIER, drop, nth(0), RaceError,
        "copy_tile_async<B_c, kThreads>(V_smem",
    ),
    "v1: K is read without a barrier after the wait": Fault(
        "v1", BF16, MAIN_LOOP, BARRIER, drop, nth(1), RaceError, "load_fragments(K_rmem"
    ),
    "v1: two warps write the same row of O": Fault(
        "v1", FP16, EPILOGUE, r"st\.shared", swap(r"\[(%r\d+)\]", rf"[\1+{24 * ROW_BYTES}]"),
        nth(0), RaceError, "store_smem_4(",
    ),
    "v1: O and l of half the rows are not rescaled": Fault(
        "v1", BF16, MAIN_LOOP, r"ex2\.", swap(r"ex2\S+\s+(%f\d+), .*", r"mov.f32 \1, 0f3F800000;"),
        nth(0), quantity="l", turn=1,
    ),
    "v2: the wait for Q is missing": Fault(
        "v2", BF16, PROLOGUE, WAIT, drop, nth(0), PendingCopyError, "load_fragments(Q_rmem"
    ),
    "v2: O is read from shared memory before the lanes that write it have met": Fault(
        "v2", BF16, EPILOGUE, WARP_BARRIER, drop, nth(-1), RaceError, "load_smem_16(O_smem",
    ),
    "v2: copies and loads of K disagree about the swizzle": Fault(
        "v2", FP16, MAIN_LOOP, LOAD, other_chunk, quantity="K"
    ),
    "v3: the wait for K is off by one": Fault(
        "v3", FP16, MAIN_LOOP, WAIT, swap("1;", "2;"), nth(0), PendingCopyError,
        "load_fragments(K_rmem",
    ),
    "v3: the last rows of Q are not copied": Fault(
        "v3", BF16, PROLOGUE, COPY, drop, nth(7), UninitialisedReadError, "load_fragments(Q_rmem"
    ),
    "v3: l is not rescaled": Fault(
        "v3", FP16, MAIN_LOOP, r"fma\.rn\.f32",
        swap(r"fma\S+\s+(%f\d+), %f\d+, (%f\d+), (%f\d+);", r"add.f32 \1, \2, \3;"),
        quantity="l", turn=1,
    ),
    "v4: the next K is copied over the one that is read": Fault(
        "v4", FP16, MAIN_LOOP, BARRIER, drop, nth(1), RaceError,
        "copy_tile_async<B_c, kThreads>(K_smem",
    ),
    "v5: the copies of K are not committed": Fault(
        "v5", BF16, MAIN_LOOP, COMMIT, drop, nth(0), PendingCopyError, "ldmatrix_x4_trans("
    ),
    "v6: a maximum goes to the wrong lane": Fault(
        "v6", BF16, MAIN_LOOP, SHUFFLE, swap(r"(shfl\S+\s+\S+ \S+) \S+,", r"\1 1,"), nth(1),
        quantity="m",
    ),
    "v6: the scale is missing in the exponent": Fault(
        "v6", FP16, MAIN_LOOP, ".*" + SCALED_LOG2_E, swap(SCALED_LOG2_E, LOG2_E), quantity="l"
    ),
    "v7: a shuffle names too few lanes": Fault(
        "v7", FP16, MAIN_LOOP, SHUFFLE, swap(r"[^ ]+;", "268435455;"), nth(0), MissingLanesError,
        "__shfl_xor_sync(0xffffffff, x, 1)",
    ),
    "v8: the loads of V do not transpose": Fault(
        "v8", FP16, MAIN_LOOP, LOAD_V, swap(r"\.trans", ""), quantity="V"
    ),
    "v8: neighbours in P are exchanged": Fault(
        "v8", BF16, MAIN_LOOP, r"cvt\.rn\.bf16x2", swap(r"(%f\d+), (%f\d+);", r"\2, \1;"),
        quantity="P",
    ),
    "v9: the two registers of K are exchanged": Fault(
        "v9", BF16, MAIN_LOOP, MMA, swap(r"\{(%r\d+), (%r\d+)\}", r"{\2, \1}"), slice(N_SCORE_MMAS),
        quantity="K",
    ),
    "v10: the next V is copied over the one that is read, in the peeled block": Fault(
        "v10", BF16, PROLOGUE, BARRIER, drop, nth(-1), RaceError,
        "copy_tile_async<B_c, kThreads>(V_smem",
    ),
    "v11: the swizzle of O is encoded wrongly": Fault(
        "v11", BF16, EPILOGUE, r"xor\.b32\s.*, 16;", swap(", 16;", ", 32;"), quantity="output"
    ),
    "v12: the rows of O are stored one too low": Fault(
        "v12", BF16, EPILOGUE, r"st\.global", swap(r"\[(%rd\d+)\]", rf"[\1+{ROW_BYTES}]"), None,
        OutOfBoundsError, "store_gmem_16(",
    ),
    "v12: a fragment begins between two chunks": Fault(
        "v12", FP16, PROLOGUE, LOAD, swap(r"\[(%r\d+)\]", r"[\1+8]"), nth(0), MisalignedError,
        "load_fragments(",
    ),
    "v13: the wait for V is off by one": Fault(
        "v13", BF16, MAIN_LOOP, WAIT, swap("1;", "2;"), nth(1), PendingCopyError,
        "ldmatrix_x4_trans(",
    ),
    "v13: one warp leaves before the barrier": Fault(
        "v13", FP16, PROLOGUE, r"mov\.u32\s+%r\d+, %tid\.x", leave, nth(0), BarrierError,
        "__syncthreads()",
    ),
    "v14: V is copied from one row past the end": Fault(
        "v14", FP16, PROLOGUE, COPY, swap(r"\[(%rd\d+)\]", rf"[\1+{ROW_BYTES}]"), slice(16, 24),
        OutOfBoundsError, "copy_tile_async<B_c, kThreads>(V_smem",
    ),
    "v15: the loop ends one block early": Fault(
        "v15", BF16, MAIN_LOOP, r"setp\.gt\.s32", swap(", 63;", ", 127;"), nth(-1), quantity="Q",
        turn=2,
    ),
    "v16: the lanes of a row do not add up all of l": Fault(
        "v16", FP16, EPILOGUE, SHUFFLE, swap(r"(shfl\S+\s+\S+ \S+) \S+,", r"\1 1,"), nth(1),
        quantity="output",
    ),
    "o1: Q's lower rows are those of the rows above": Fault(
        "o1", BF16, MAIN_LOOP, LOAD,
        of_warp(2, swap(r"\[(%r\d+)\]", rf"[\1+-{16 * PIECE_ROW_BYTES}]")), nth(1),
        quantity="Q", turn=1, warp=2, rows=range(80, 96),
    ),
    "o2: l of the last rows is not rescaled": Fault(
        "o2", BF16, MAIN_LOOP, RESCALE, of_warp(1, swap(r"mul\.f32.*", "mov.f32 %f0, %f0;")),
        nth(3 * N_RESCALED), quantity="l", turn=1, warp=1, rows=range(56, 64),
    ),
    "o2: the maximum may lag behind by 2^64, over what fp16 can hold": Fault(
        "o2", FP16, MAIN_LOOP, r"setp\.gtu\.f32", swap("0f41000000", "0f42800000"), nth(2),
        quantity="m", turn=1, warp=0, rows=range(16, 24),
    ),
    "o3: there is no barrier left": Fault(
        "o3", BF16, MAIN_LOOP, BARRIER, drop, None, RaceError, "copy(K_smem + stage",
    ),
    "o3: the wait for K is off by one": Fault(
        "o3", BF16, MAIN_LOOP, WAIT, swap("0;", "1;"), None, PendingCopyError,
        "load_fragments<B_c>(K_rmem",
    ),
    "o4: the next block's fragments come from this block's buffer": Fault(
        "o4", BF16, MAIN_LOOP, LOAD, swap(r"\[(%r\d+)\]", rf"[\1+-{STAGE_BYTES}]"), nth(-1),
        PendingCopyError, "load_K(stage ^ kStage",
    ),
    "o4: one load too few ahead": Fault(
        "o4", BF16, MAIN_LOOP, LOAD, drop, nth(-1), quantity="K", turn=1, warp=0,
        rows=range(16, 32),
    ),
    "o5: O is written over rows of Q that other lanes still load": Fault(
        "o5", BF16, EPILOGUE, WARP_BARRIER, drop, nth(0), RaceError, "store_smem_4((O_lane_smem",
    ),
    "o5: half of the ones are zeros": Fault(
        "o5", BF16, MAIN_LOOP, r"mov.*" + ONES, swap(ONES, "16256"), quantity="l", turn=0, warp=0,
        rows=range(32),
    ),
    "o5: the row sums are not rescaled": Fault(
        "o5", FP16, MAIN_LOOP, RESCALE, drop, slice(2), quantity="l", turn=1, warp=0, rows=range(8),
    ),
    "o6: rows of Q past the end are read": Fault(
        "o6", BF16, PROLOGUE, r"selp\.b32.*16, 0,", swap("16, 0,", "16, 16,"), nth(4),
        OutOfBoundsError, "cp_async_16_L2_128B(",
    ),
    "o6: keys past the end count": Fault(
        "o6", BF16, MAIN_LOOP, r"setp\.le\.s32", swap("le", "ge"), nth(0), quantity="l",
    ),
    "o7: the scale is not the call's": Fault(
        "o7", BF16, PROLOGUE, r"ld\.param\.f32",
        swap(r"ld\.param(\.f32\s+%f\d+), .*;", r"mov\1, 0f3F800000;"), quantity="m",
    ),
    "o8: a visible key is hidden": Fault(
        "o8", BF16, MAIN_LOOP, r"selp\.f32.*0fFF800000, ", swap(
            r"(selp\.f32\s+%f\d+), %f\d+, 0fFF800000,", r"\1, 0fFF800000, 0fFF800000,"), nth(0),
        quantity="m", options=CAUSAL,
    ),
    "o9: rows have a sink that no call brought": Fault(
        "o9", BF16, EPILOGUE, r"ex2\.approx",
        swap(r"ex2\S+\s+(%f\d+), .*", r"mov.f32 \1, 0f40000000;"), slice(1, None, 2),
        quantity="output",
    ),
    "o10: limited logits lose their sign": Fault(
        "o10", BF16, MAIN_LOOP, r"tanh", swap(r"tanh\.approx", "abs"), quantity="m",
        options={"softcap": True},
    ),
    "o11: the walk ends before the window does": Fault(
        "o11", BF16, MAIN_LOOP, r"max\.s32",
        swap(r"max\.s32\s+(%r\d+), .*;", r"mov.u32 \1, 4096;"), nth(0), quantity="Q", turn=1,
        options={"window": True},
    ),
    "o12: columns of Q behind those of whole pieces of 64 are not copied": Fault(
        "o12", BF16, PROLOGUE, COPY, drop, nth(2), UninitialisedReadError,
        "ldmatrix_x4(Q_rmem[k % 2][i]", options={"d_head": 96},
    ),
    "o13: the loop takes the lengths of queries and of keys for each other": Fault(
        "o13", BF16, PROLOGUE, r"st\.shared\.v4",
        swap(r"\{(%r\d+), (%r\d+), (%r\d+),", r"{\1, \3, \2,"), quantity="l",
        options={"varlen": True},
    ),
    "h1: P is not handed over to the asynchronous proxy": Fault(
        "h1", BF16, MAIN_LOOP, PROXY_FENCE, drop, nth(0), ProxyError,
        "store_fragment<B_r>(P_smem",
    ),
    "h2: S is read while it is multiplied": Fault(
        "h2", BF16, MAIN_LOOP, WGMMA_WAIT, drop, nth(0), WgmmaRegisterError,
        "wgmma<cfg.dtype>(S_rmem",
    ),
    "h2: a product takes Q for K": Fault(
        "h2", BF16, MAIN_LOOP, r"wgmma\.mma_async", swap(r"A, B,", "A, A,"), nth(1),
        quantity="K", turn=0,
    ),
    "h3: the next K comes before both warpgroups have read the last": Fault(
        "h3", BF16, MAIN_LOOP, BARRIER, drop, nth(-1), RaceError, "tma_load_tile(K_smem",
    ),
    "h4: the second lap of K is waited for as the first": Fault(
        "h4", BF16, MAIN_LOOP, TRY_WAIT, swap(r", %r\d+;", ", 0;"), nth(0), PendingCopyError,
        "wgmma<cfg.dtype>(S_rmem",
    ),
    "h5: a slot of K is not given back": Fault(
        "h5", BF16, MAIN_LOOP, ARRIVE, drop, nth(0), DeadlockError,
        "barrier_wait(K_ring.barrier(K_full)",
    ),
    "h6: the turn is not passed on": Fault(
        "h6", BF16, MAIN_LOOP, r"barrier\.arrive", drop, nth(0), DeadlockError, "take_turn()",
    ),
    "h7: the wait for S is off by one": Fault(
        "h7", BF16, MAIN_LOOP, WGMMA_WAIT, swap("1;", "2;"), nth(0), WgmmaRegisterError,
        "issue_S();",
    ),
    "h8: a column of O is not rescaled": Fault(
        "h8", BF16, MAIN_LOOP, RESCALE, drop, nth(20), quantity="O", turn=1, warp=0,
        rows=range(8, 16),
    ),
    "h8: the maximum may lag behind by 2^64, over what fp16 can hold": Fault(
        "h8", FP16, MAIN_LOOP, r"setp\.\w+\.f32.*0f41000000", swap("0f41000000", "0f42800000"),
        quantity="m", turn=1,
    ),
    "h8: neighbours in P are exchanged": Fault(
        "h8", BF16, MAIN_LOOP, r"cvt\.rn\.bf16x2", swap(r"(%f\d+), (%f\d+);", r"\2, \1;"), nth(0),
        quantity="P", turn=1,
    ),
    "h9: the shuffle of a descriptor names too few lanes": Fault(
        "h9", BF16, MAIN_LOOP, r"shfl\.sync\.idx", swap(r"[^ ]+;", "65535;"), nth(0),
        MissingLanesError, "__shfl_sync(0xffffffff, value, 0)",
    ),
    "h10: O's place is given up before TMA has read it": Fault(
        "h10", BF16, MAIN_LOOP, r"cp\.async\.bulk\.wait_group\.read", drop, None, OutlivedError,
        "tma_store_piece(args.O",
    ),
    "h11: every block of keys begins O anew, not only the first of a tile": Fault(
        "h11", BF16, MAIN_LOOP, r"setp\.ne\.b32\s+accumulates", swap(r"%r\d+, 0;", "0, 0;"),
        nth(N_SCORE_WGMMAS), quantity="O", turn=1,
    ),
    "h12: l is not rescaled where m is raised": Fault(
        "h12", FP16, MAIN_LOOP, r"selp\.f32.*0f7FC00000",
        swap(r"(selp\S+\s+%f\d+), %f\d+", r"\1, 0f3F800000"), quantity="l", turn=1,
    ),
    "h13: the turn is not passed on": Fault(
        "h13", BF16, MAIN_LOOP, r"barrier\.arrive", drop, nth(0), DeadlockError, "take_turn();",
    ),
    "h14: S is read while it is multiplied": Fault(
        "h14", BF16, MAIN_LOOP, WGMMA_WAIT, swap("1;", "2;"), nth(0), WgmmaRegisterError,
        "issue_S();",
    ),
    "h15: O is not handed over to the asynchronous proxy": Fault(
        "h15", BF16, MAIN_LOOP, PROXY_FENCE, drop, None, ProxyError, "tma_store_piece(args.O",
    ),
    "h16: the wait for S is off by one": Fault(
        "h16", BF16, MAIN_LOOP, WGMMA_WAIT, swap("1;", "2;"), nth(0), WgmmaRegisterError,
        "issue_S();",
    ),
    "h17: O's place is given up before TMA has read it": Fault(
        "h17", BF16, MAIN_LOOP, r"cp\.async\.bulk\.wait_group\.read", drop, None, OutlivedError,
        "tma_store_piece(args.O",
    ),
    "h18: the barrier behind the exponentials names too few lanes": Fault(
        "h18", BF16, MAIN_LOOP, r"bar\.warp\.sync\s+%r", swap(r"%r\d+", "65535"), nth(0),
        MissingLanesError, "__syncwarp(__ballot_sync",
    ),
    "h19: O is rescaled while it is added to": Fault(
        "h19", FP16, MAIN_LOOP, WGMMA_WAIT, swap("0;", "1;"), nth(1), WgmmaRegisterError,
        "scale_rows(O_rmem, rescale);",
    ),
    "h20: the scale is not the call's": Fault(
        "h20", BF16, MAIN_LOOP, r"ld\.param\.f32", swap(r"ld\.param(\.f32\s+%f\d+), .*;",
        r"mov\1, 0f3F800000;"), quantity="l", turn=1,
    ),
    "h21: half of the rows see a key too many": Fault(
        "h21", BF16, PROLOGUE, r"add\.s32.*, 9;", swap(", 9;", ", 10;"), nth(0), quantity="m",
        warp=3, rows=range(575, 576), options=CAUSAL,
    ),
    "h22: the number of a tile is not handed over": Fault(
        "h22", BF16, MAIN_LOOP, r"st\.shared\.b32", drop, None, UninitialisedReadError,
        "load_smem_4(tiles_smem",
    ),
    "h22: who took a tile is written down one place too far": Fault(
        "h22", BF16, MAIN_LOOP, r"st\.global\.u32", swap(r"\[(%rd\d+)\]", r"[\1+4]"), nth(-1),
        OutOfBoundsError, "take_tile<cfg.causal>(tile, args)", options=CAUSAL,
    ),
    "h23: the last place is not announced": Fault(
        "h23", BF16, EPILOGUE, ARRIVE, drop, nth(-1), DeadlockError,
        "barrier_wait(Q_ring.barrier(Q_full)",
    ),
    "h24: slots of V that are passed over are not given back": Fault(
        "h24", BF16, MAIN_LOOP, ARRIVE, drop, slice(N_PASSED_OVER), DeadlockError,
        "tma_load_slot<kKVBytes>(V_ring", options=CAUSAL,
    ),
    "h25: what the other block reads is not waited for": Fault(
        "h25", BF16, PROLOGUE, r"mbarrier\.init", swap(r"%r\d+;", "8;"), slice(1, None, 2),
        MbarrierError, "cluster_barrier_arrive(in_block(empty, 0))",
    ),
    "h25: K and V go into the first block alone": Fault(
        "h25", BF16, MAIN_LOOP, r"cp\.async\.bulk\.tensor.*multicast", swap(r"%rs\d+;", "1;"),
        slice(2, None), DeadlockError, "barrier_wait(K_ring.barrier(K_full)",
    ),
    "h26: the second block takes another head although K and V are not shared": Fault(
        "h26", BF16, PROLOGUE, r"and\.b32.*, 1;", swap("1;", "0;"), nth(0), quantity="Q",
    ),
    "h27: half a block although more is seen": Fault(
        "h27", BF16, PROLOGUE, r"setp\.lt\.s32.*, 65;", swap("65;", "129;"), nth(0), quantity="K",
        turn=1, options=CAUSAL,
    ),
    "h28: O's place is given up before TMA has read it": Fault(
        "h28", BF16, MAIN_LOOP, r"cp\.async\.bulk\.wait_group\.read", drop, None, OutlivedError,
        "tma_store_piece(args.O",
    ),
    "h29: nothing tells the other block that its barriers are there": Fault(
        "h29", BF16, PROLOGUE, r"fence\.mbarrier_init", drop, None, RaceError,
        "barrier_wait(ring.barrier(empty)",
    ),
    "h30: a tile is taken at the beginning too, and nobody has it": Fault(
        "h30", BF16, MAIN_LOOP, r"atom\.global\.add", swap(r", 1;", ", 2;"), None, quantity="Q",
        turn=2, options=CAUSAL,
    ),
    "g1: what is announced behind the last tile looks like a tile": Fault(
        "g1", BF16, EPILOGUE, r"mov\.u32.*, -1;", swap("-1;", "0;"), nth(0), DeadlockError,
        "wait_for_turn<T::cfg.ping_pong>(warpgroup)",
    ),
    "g2: what the other block of the cluster reads is not waited for": Fault(
        "g2", BF16, PROLOGUE, r"mbarrier\.init", swap(r"%r\d+;", "8;"), slice(1, None, 2),
        MbarrierError, "cluster_barrier_arrive(in_block(ring.barrier(empty), 0))",
    ),
    "g3: a tile is waited for as if it had half of the columns": Fault(
        "g3", BF16, EPILOGUE, r"mov\.u32.*, 32768;", swap("32768", "16384"), nth(0), DeadlockError,
        "wait_for_turn<T::cfg.ping_pong>(warpgroup)",
    ),
    "g4: where keys are hidden the bounds of the window are exchanged": Fault(
        "g4", BF16, MAIN_LOOP, r"ld\.param\.v2\.u32",
        swap(r"\{(%r\d+), (%r\d+)\}", r"{\2, \1}"), quantity="l", turn=1,
        options={"window": True},
    ),
    "g5: logits are limited before they are scaled": Fault(
        # The scale is a float of the arguments too, four bytes behind where they are read from.
        "g5", BF16, MAIN_LOOP, r"ld\.param\.f32.*\+\d\d+\]",
        swap(r"ld\.param(\.f32\s+%f\d+), .*;", r"mov\1, 0f3F800000;"), quantity="l", turn=1,
        options={"softcap": True},
    ),
    "g6: rows have a sink that no call brought": Fault(
        "g6", BF16, MAIN_LOOP, r"mov\.f32.*0fFF800000", swap("0fFF800000", "0f461C4000"), None,
        quantity="output",
    ),
    "g7: the end of a sequence's keys is read where they begin": Fault(
        "g7", BF16, MAIN_LOOP, r"ld\.global.*\+4\]", swap(r"\+4\]", "]"), nth(-1), quantity="K",
        options={"varlen": True},
    ),
    "g8: what the launch before writes is not waited for": Fault(
        "g8", BF16, PROLOGUE, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "copy(tensor, place",
    ),
    "g9: a slot of Q is empty when half of the warps have stored O": Fault(
        "g9", BF16, PROLOGUE, r"mbarrier\.init", swap(r"%r\d+;", "8;"), nth(1), AbsentBlockError,
        "cluster_barrier_arrive(in_block(stored_empty, 0))",
    ),
    "g10: the one slot of Q is empty when half of the warps have read it": Fault(
        "g10", BF16, PROLOGUE, r"mbarrier\.init", swap(r"%r\d+;", "4;"), nth(1), MbarrierError,
        "cluster_barrier_arrive", options={"d_head": 256},
    ),
}  # fmt: skip


def problem_of(config: AttentionConfig) -> AttentionForward:
    """Return the problem on which faults of a config show: the shortest with three blocks of keys.

    For a causal kernel it is the smallest problem for which tiles are counted on `device_of`. The
    diagonal of the fixed tiles then ends between two warpgroups and within a block of keys, the
    last of three; the first queries see no key. On `mma.sync` neither queries nor keys are whole
    blocks where a kernel takes any length.
    """
    if config.supports.causal:
        len_q, len_k = COUNTED_FROM * config.B_r, 2 * config.B_c + WGMMA_M
    elif _hides_keys(config):
        len_q, len_k = config.B_r + config.B_c, 2 * config.B_c + 3
    else:
        whole = config.supports.whole
        len_q = len_k = -(-3 * config.B_c // whole) * whole
    return config.supports.problem(1, 1, len_q, len_k)


def device_of(config: AttentionConfig) -> Device:
    """Return the GPU that launches are made for. A causal kernel gets one with two SMs, on which
    tiles of `problem_of` are left for a counter when each block has two."""
    largest = largest_device(config.family.capabilities[0])
    return replace(largest, sms=2) if config.supports.causal else largest


def distribution_of(config: AttentionConfig) -> str:
    """Return the kind of inputs in which the maximum of most rows changes from block to block, by
    enough for a lazy step. A kernel that hides keys gets inputs in which every key counts, so that
    a wrong mask shows."""
    is_lazy = LAZY_RESCALE in config.step.traits
    return "large_logits" if is_lazy and not _hides_keys(config) else "normal"


def _hides_keys(config: AttentionConfig) -> bool:
    """Return whether the problem of a config has keys that not every query sees."""
    ragged = isinstance(config, MmaSyncConfig) and not config.supports.blocks
    return ragged or config.supports.causal
