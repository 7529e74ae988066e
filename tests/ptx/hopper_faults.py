"""Mistakes that kernels of Hopper's units invite, as edits of the PTX in tests/ptx/kernels.

Each is named after what goes wrong, and says how the simulator is to tell it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fake_backend import ROOT
from hopper_cases import CASES, Case, Map, i32

from flash_helpers.ptx import PtxModule, load_ptx

KERNELS = ROOT / "tests" / "ptx" / "kernels"

Change = Callable[[str], str]
"""From a line of PTX to what stands there instead."""


# -- changes ---------------------------------------------------------------------------------------


def drop(line: str) -> str:
    """Without it."""
    return ""


def swap(pattern: str, replacement: str) -> Change:
    """With another operand."""

    def change(line: str) -> str:
        changed = re.sub(pattern, replacement, line)
        assert changed != line, f"{pattern} does not occur in {line}"
        return changed

    return change


def no_wait(line: str) -> str:
    """A try_wait that always says that the phase is complete."""
    return swap(r"mbarrier\.\S+ (\w+), .*;", r"setp.eq.u32 \1, 0, 0;")(line)


def other_parity(line: str) -> str:
    """A try_wait for the other parity."""
    changed = swap(r", (%r\d+);", ", %fault;")(line)
    parity = re.findall(r"%r\d+", line)[-1]
    return f"{{ .reg .b32 %fault; xor.b32 %fault, {parity}, 1;\n{changed}\n}}"


def only_block(line: str) -> str:
    """A barrier of the block in place of one of the cluster."""
    return "bar.sync 0;"


def odd_size(line: str) -> str:
    """A copy of a size that is no multiple of 16 bytes."""
    changed = swap(r"%r\d+;", "%fault;")(line)
    return f"{{ .reg .b32 %fault; mov.u32 %fault, 2040;\n{changed}\n}}"


def only(register: str, condition: str) -> Change:
    """For some threads only, such as those with "%laneid" "lt" 16."""
    comparison, number = condition.split()

    def change(line: str) -> str:
        return f"""{{ .reg .b32 %which; .reg .pred %fault;
mov.u32 %which, {register};
setp.{comparison}.u32 %fault, %which, {number};
@%fault {line.strip()}
}}"""

    return change


HALF_WARP = only("%laneid", "lt 16")


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """A change of some instructions: those from a line of the .cu file that holds `source`, whose
    opcode matches the regular expression. which: a slice of them; None for all."""

    source: str
    opcode: str
    change: Change
    which: slice | None = None


@dataclass(frozen=True)
class Fault:
    """A mistake.

    case: a key of `CASES`, the launch. edits: of its PTX. error: name of the simulator's error, or
    of the lint if it ends in "lint". at: part of the line of the .cu file that the message names.
    launch: what else of the launch differs.
    """

    case: str
    edits: tuple[Edit, ...]
    error: str
    at: str
    launch: Callable[[Case], Case] = lambda case: case


def nth(n: int) -> slice:
    """One match; negative numbers count from the end."""
    return slice(n, n + 1 or None)


def fault(
    case: str,
    source: str,
    opcode: str,
    change: Change,
    error: str,
    at: str,
    which: slice | None = None,
) -> Fault:
    """A fault made by one edit."""
    return Fault(case, (Edit(source, opcode, change, which),), error, at)


def less_shared_memory(case: Case) -> Case:
    """Too little of it."""
    return replace(case, shared_bytes=case.shared_bytes - 2048)


def two_stages(case: Case) -> Case:
    """Only the first 128 of k, so that no stage is loaded again."""
    return replace(case, arguments=(*case.arguments[:-1], i32(128)))


def wider_stride(case: Case) -> Case:
    """The stride of A from 8 rows to the next: 16 KiB more."""
    image, out, A, *others = case.arguments
    wider = int.from_bytes(A, "little") + (16384 >> 4 << 32)
    return replace(case, arguments=(image, out, wider.to_bytes(8, "little"), *others))


def fewer_keys(case: Case) -> Case:
    """Keys and values end 64 rows before seq_len."""

    def shorter(argument: str | Map | bytes) -> str | Map | bytes:
        if not isinstance(argument, Map) or argument.buffer not in "KV":
            return argument
        d, heads, seq_len, batches = argument.fields["dims"]
        return Map(argument.buffer, {**argument.fields, "dims": (d, heads, seq_len - 64, batches)})

    return replace(case, arguments=tuple(map(shorter, case.arguments)))


TRY_WAIT, EXPECT, COPY = r"mbarrier\.try_wait", r"mov\.u32|mov\.b32", r"cp\.async\.bulk\.tensor"
WGMMA, WGMMA_WAIT, WGMMA_FENCE = r"wgmma\.mma", r"wgmma\.wait_group", r"wgmma\.fence"
PROXY, STORES_READ, CLUSTER = r"fence\.proxy", r"cp\.async\.bulk\.wait_group", r"barrier\.cluster"
TILE = "tile_bf16_n64_k_k 128B 128B 2"
OVERLAP = "attention_bf16_ping_pong_overlap"
GEMM_STEP, A_STEP = "wgmma<T>(acc, a + advance", "wgmma<T, 1>(acc, a + 4 * step"
QK_STEP, PV_STEP = "wgmma<T>(S, Q + advance", "wgmma<T, 1>(O, P + 4 * step"
ASM_COPY = '"r"(in_block(barrier, next))'  # the end of the asm statement
GEMM_LOAD, EXPECT_GEMM = "load_2d(A_smem + ring.slot", "arrive_expecting(barrier, A_bytes + B_byt"

# C3.1: shared memory is read before the phase of its mbarrier was seen to be complete.
EARLY_READS = {
    "consumers of a ring do not wait": fault(
        "gemm_bf16", "wait(full + 8 * ring.slot, ring.lap)", TRY_WAIT, no_wait,
        "MbarrierError", "arrive(last)",  # of a phase whose predecessor the producer never saw
    ),
    "consumers of a ring do not wait for its only stage": fault(
        "gemm_f16", "wait(full + 8 * ring.slot, ring.lap)", TRY_WAIT, no_wait,
        "UninitialisedReadError", GEMM_STEP,
    ),
    "threads that change a tile do not wait": fault(
        "scale_tiles", "wait(full + 8 * ring.slot, ring.lap)", TRY_WAIT, no_wait,
        "UninitialisedReadError", "four.x *= factor",  # before the copy is issued
    ),
    "ldmatrix does not wait": fault(
        "gemm_a_registers", "wait(full + i % 2 * 8, i / 2 % 2)", TRY_WAIT, no_wait,
        "PendingCopyError", "load_fragment(a, 4 * step",
    ),
    "V is not waited for": fault(
        "attention_bf16", "wait(shared.V_full", TRY_WAIT, no_wait, "PendingCopyError", PV_STEP,
    ),
    "what another block sends is not waited for": fault(
        "cluster_shift", "wait_cluster(barrier, 0)", TRY_WAIT, no_wait,
        "PendingCopyError", "out[thread] = received[thread]",
    ),
}  # fmt: skip

# C3.2: bytes are written that wgmma or a bulk store still reads.
EARLY_WRITES = {
    "a stage is released while wgmma reads it": fault(
        "gemm_bf16", "wgmma_wait<1>()", WGMMA_WAIT, swap("1;", "7;"), "RaceError", GEMM_LOAD
    ),
    "a slot is loaded while its store reads it": fault(
        "copy_bytes", "wait_stores_read<slots - ahead - 1>()", STORES_READ, drop,
        "RaceError", "load_bytes(ring + slot * chunk_bytes",
    ),
    "a tile is released while its store reads it": fault(
        "scale_tiles", "wait_stores_read<1>()", STORES_READ, drop,
        "RaceError", "load_2d(tiles_smem + ring.slot",
    ),
    "O is staged while the last store reads it": fault(
        "attention_bf16", "wait_stores_read<0>()", STORES_READ, drop,
        "RaceError", "store_fragment<T>(shared.O", nth(0),
    ),
    "C is staged while the last store reads it": fault(
        "gemm_cluster_bf16", "wait_stores_read<0>(); // of the tile before", STORES_READ, drop,
        "RaceError", "store_fragment<T>(C_rows",
    ),
    "a stage is loaded while slower warps read it": fault(
        "gemm_a_registers", "__syncthreads(); // all have read", r"bar", drop,
        "RaceError", "load_2d(",
    ),
}  # fmt: skip

# C3.3: registers of a wgmma are touched before it is waited for.
REGISTERS_IN_FLIGHT = {
    "accumulators are stored before the wait": fault(
        "gemm_bf16", "wgmma_wait<0>()", WGMMA_WAIT, drop,
        "WgmmaRegisterError", "store_fragment<T>(panel",
    ),
    "fragments of A are loaded while they are read": Fault(
        "gemm_a_registers", (Edit("wgmma_wait<0>()", WGMMA_WAIT, drop),),
        "WgmmaRegisterError", "load_fragment(a, 4 * step", two_stages,
    ),
    "scores are read before the wait": fault(
        OVERLAP, "wgmma_wait<overlap ? 1 : 0>()", WGMMA_WAIT, drop,
        "WgmmaRegisterError", "softmax(S, m, l, rescale",
    ),
    "O is rescaled before the wait": fault(
        OVERLAP, "wgmma_wait<0>();", WGMMA_WAIT, swap("0;", "1;"),
        "WgmmaRegisterError", "O[i] *= rescale", nth(1),
    ),
}  # fmt: skip

# C3.4: registers are written, and no wgmma.fence follows before the wgmma that uses them.
MISSING_WGMMA_FENCES = {
    "after ldmatrix": fault(
        "gemm_a_registers", "wgmma_fence()", WGMMA_FENCE, drop, "WgmmaFenceError", A_STEP
    ),
    "after O was rescaled": fault(
        "attention_bf16", "wgmma_fence()", WGMMA_FENCE, drop, "WgmmaFenceError", PV_STEP, nth(3)
    ),
    "after S was read and written": fault(
        "attention_bf16", "wgmma_fence()", WGMMA_FENCE, drop, "WgmmaFenceError", QK_STEP, nth(1)
    ),
    "after accumulators were set": fault(
        TILE, "wgmma_fence()", WGMMA_FENCE, drop,
        "WgmmaFenceError", "wgmma<T, A_transposed, B_transposed>(acc",
    ),
}  # fmt: skip

# C3.5: the asynchronous proxy meets what a thread wrote, without fence.proxy.async between.
MISSING_PROXY_FENCES = {
    "between stmatrix and a store": fault(
        "gemm_bf16", "fence_proxy()", PROXY, drop, "ProxyError", "store_2d(C, C_smem"
    ),
    "between stmatrix and a store of the warp": fault(
        "attention_bf16", "fence_proxy()", PROXY, drop, "ProxyError", "store_4d(p.O"
    ),
    "between a change in place and a store": fault(
        "scale_tiles", "fence_proxy()", PROXY, drop, "ProxyError", "store_2d(&out"
    ),
    "between stores and wgmma": fault(
        TILE, "fence_proxy()", PROXY, drop,
        "ProxyError", "wgmma<T, A_transposed, B_transposed>(acc",
    ),
    "between stores and a load over them": fault(
        "load_box 1", "fence_proxy()", PROXY, drop, "ProxyError", "load<rank>("
    ),
    "between stores and a copy to another block": fault(
        "cluster_shift", "fence_proxy()", PROXY, drop,
        "ProxyError", ASM_COPY,
    ),
}  # fmt: skip

# C3.6: a wait for the wrong parity.
WRONG_PARITIES = {
    "the producer waits for a slot that nobody used yet": fault(
        "gemm_bf16", "wait(empty + 8 * ring.slot, ring.lap ^ 1)", TRY_WAIT, other_parity,
        "DeadlockError", "wait(empty + 8 * ring.slot",
    ),
    "consumers take the lap before": fault(
        "gemm_bf16", "wait(full + 8 * ring.slot, ring.lap)", TRY_WAIT, other_parity,
        "DeadlockError", "wait(full + 8 * ring.slot, ring.lap)",
    ),
    "a ring whose parity never changes": fault(
        "copy_bytes", "wait(full + 8 * slot, j / slots % 2)", TRY_WAIT, swap(r"%r\d+;", "0;"),
        "PendingCopyError", "store_bytes(out + j * chunk_bytes",
    ),
    "the second tile takes the first one's Q": fault(
        "attention_bf16", "wait(shared.Q_full, at.lap)", TRY_WAIT, swap(r"%r\d+;", "0;"),
        "PendingCopyError", QK_STEP,
    ),
    "two blocks that both wait": fault(
        "gemm_cluster_bf16", "wait_cluster(shared.empty", TRY_WAIT, other_parity,
        "DeadlockError", "wait_cluster(shared.empty",
    ),
    "a writer that waits for the next round": fault(
        "hand_over", "wait(empty, (i - 1) % 2)", TRY_WAIT, other_parity,
        "DeadlockError", "wait(empty, (i - 1) % 2)",
    ),
}  # fmt: skip

# C3.7: other bytes are announced than delivered.
WRONG_BYTES = {
    "too many": fault(
        "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "24592"), "DeadlockError",
        "wait(full + 8 * ring.slot, ring.lap)",
    ),
    "too few for both boxes": fault(
        "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "24560"), "DeadlockError",
        "wait(full + 8 * ring.slot, ring.lap)",
    ),
    "as many as the first box has": fault(
        "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "8192"), "PendingCopyError", GEMM_STEP
    ),
    "half of V": fault(
        "attention_bf16", "load_tile<B_c>(shared.V + block", r"mbarrier\.arrive\.expect",
        swap(r"%r\d+;", "16384;"), "PendingCopyError", PV_STEP,
    ),
    "without the other block's half": fault(
        "gemm_cluster_bf16", "arrive_expecting(full, A_bytes + B_bytes)", EXPECT,
        swap("32768", "24576"), "PendingCopyError", "wgmma<T>(acc, a + advance",
    ),
    "without what comes by st.async": fault(
        "cluster_shift", "arrive_expecting(barrier, sizeof received)", EXPECT,
        swap("2064", "2048"), "PendingCopyError", "out[threads] = received[threads]",
    ),
}  # fmt: skip

# C3.8: arrivals and initialisation.
WRONG_ARRIVALS = {
    "one arrival is missing for ever": fault(
        "gemm_bf16", "init(empty + 8 * s, 128)", r"mbarrier\.init", swap(r"%r\d+;", "129;"),
        "DeadlockError", "wait(empty + 8 * ring.slot",
    ),
    "a warpgroup too many is expected": fault(
        "attention_bf16", "shared.init_barriers()", r"mbarrier\.init", swap(r"%r\d+;", "3;"),
        "DeadlockError", "wait(shared.Q_empty", nth(1),
    ),
    "more arrive than are expected": fault(
        "hand_over", "mbarrier.arrive.shared.b64 _, [%0], 32;", r"mbarrier\.arrive",
        swap("32;", "33;"), "MbarrierError", "mbarrier.arrive.shared.b64 _, [%0], 32;",
    ),
    "a barrier is not initialised": fault(
        "hand_over", "init(full, 32)", r"mbarrier\.init", drop,
        "MbarrierError", ': "r"(full), "r"(i % 2)',
    ),
    "the other block's barriers are used before they are made": fault(
        "gemm_cluster_bf16", "cluster_sync(); // nothing may reach", CLUSTER, only_block,
        "AbsentBlockError", "load_2d_multicast(shared.B",
    ),
    "the other block's barrier, likewise": fault(
        "cluster_shift", "cluster_sync();", CLUSTER, only_block,
        "AbsentBlockError", ASM_COPY, slice(0, 2),
    ),
}  # fmt: skip

# C3.9: setmaxnreg.
WRONG_REGISTERS = {
    "more than the block has": fault(
        "attention_bf16", "take_registers<240>()", "setmaxnreg", swap("240", "256"),
        "DeadlockError", "take_registers<240>()",
    ),
    "more than the producer left": fault(
        "gemm_cluster_bf16", "give_registers<40>()", "setmaxnreg", drop,
        "DeadlockError", "take_registers<232>()",
    ),
    "a warp that does not give": fault(
        "attention_bf16", "give_registers<24>()", "setmaxnreg", only("%tid.x", "lt 352"),
        "WarpgroupError", "give_registers<24>()",
    ),
    "a warp that does not take": fault(
        "gemm_cluster_bf16", "take_registers<232>()", "setmaxnreg", only("%tid.x", "ge 32"),
        "WarpgroupError", "take_registers<232>()",
    ),
}  # fmt: skip

# C3.10: an .aligned instruction that not all lanes of a warp execute.
DIVERGENCE = {
    "wgmma.commit_group": fault(
        "gemm_bf16", "wgmma_commit()", r"wgmma\.commit", HALF_WARP,
        "MissingLanesError", "wgmma_commit()",
    ),
    "wgmma.fence": fault(
        "gemm_a_registers", "wgmma_fence()", WGMMA_FENCE, HALF_WARP,
        "MissingLanesError", "wgmma_fence()",
    ),
    "barrier.cluster.arrive": fault(
        "cluster_shift", "cluster_sync();", r"barrier\.cluster\.arrive", HALF_WARP,
        "MissingLanesError", "cluster_sync();", nth(0),
    ),
    "stmatrix": fault(
        "attention_bf16", "store_fragment<T>(shared.O", "stmatrix", HALF_WARP,
        "MissingLanesError", "store_fragment<T>(shared.O", nth(0),
    ),
    "setmaxnreg": fault(
        "gemm_cluster_bf16", "take_registers<232>()", "setmaxnreg", HALF_WARP,
        "MissingLanesError", "take_registers<232>()",
    ),
}  # fmt: skip

# C3.11: named barriers.
WRONG_BARRIERS = {
    "more threads than there are": fault(
        "gemm_bf16", "barrier_sync(1, 128)", r"barrier\.sync|bar", swap(r"%r\d+;", "192;"),
        "BarrierOperandError", "barrier_sync(1, 128)",
    ),
    "fewer threads than come": fault(
        "scale_tiles", "barrier_sync(1, consumers)", r"barrier\.sync|bar", swap(r"%r\d+;", "96;"),
        "BarrierOperandError", "barrier_sync(1, consumers)",
    ),
    "other threads arrive than are waited for": fault(
        OVERLAP, "pass_turn();", r"barrier\.arrive", swap(r"%r\d+;", "128;"),
        "DeadlockError", "take_turn();",
    ),
    "arrivals at another barrier": fault(
        "cluster_softmax", "top = over_block(", r"barrier\.arrive", swap(r"%r\d+,", "3,"),
        "BarrierError", "top = over_block(",
    ),
}  # fmt: skip

# C3.11, too: arrivals that are left over at the end. No rule of the PTX ISA is broken, and the
# barriers of a block end with it.
LEFT_TURNS = {
    name: fault(
        name, "take_turn(); // that consumer 1", r"barrier\.sync|bar", drop,
        "left arrivals lint", "exponentials();",
    )
    for name in ("attention_f16_ping_pong", OVERLAP)
}  # fmt: skip

# C3.12: a block ends too early.
EARLY_EXITS = {
    "before the other block's last arrivals": fault(
        "gemm_cluster_bf16", "cluster_sync(); // the other block", CLUSTER, drop,
        "AbsentBlockError", "arrive_remote(last)",
    ),
    "before its sum is read": Fault(
        "cluster_softmax",
        (
            Edit("cluster_arrive(); // none may leave", CLUSTER, drop),
            Edit("    cluster_wait();", CLUSTER, drop, nth(-1)),
        ),
        "AbsentBlockError", "all += load_remote",
    ),
    "before what it sends is received": fault(
        "cluster_shift", "cluster_sync(); // none may leave", CLUSTER, drop,
        "OutlivedError", ASM_COPY,
    ),
    "before its store has read": fault(
        "gemm_bf16", "wait_stores_read<0>()", STORES_READ, drop,
        "OutlivedError", "store_2d(C, C_smem",
    ),
    "before the last tile's store has read": fault(
        "attention_bf16", "wait_stores_read<0>()", STORES_READ, drop,
        "OutlivedError", "store_4d(p.O", nth(-1),
    ),
}  # fmt: skip

# C3.13: addresses and coordinates that the units do not take.
MISALIGNED = {
    "a box to 64 bytes past a line": fault(
        "gemm_bf16", GEMM_LOAD, COPY, swap(r"bytes \[(%r\d+)\]", r"bytes [\1+64]"),
        "MisalignedError", GEMM_LOAD,
    ),
    "a box from 16 bytes past a line": fault(
        "attention_bf16", "store_4d(p.O", COPY, swap(r"\[(%r\d+)\];", r"[\1+16];"),
        "MisalignedError", "store_4d(p.O",
    ),
    "a copy of 2040 bytes": fault(
        "copy_bytes", "store_bytes(out + j * chunk_bytes", r"cp\.async\.bulk\.global",
        odd_size, "BulkCopyError", "store_bytes(out + j * chunk_bytes",
    ),
    "a first column that is no multiple of 16 bytes": fault(
        "scale_tiles", "load_2d(tiles_smem + ring.slot", COPY, swap(r"\{%r\d+,", "{1,"),
        "BulkCopyError", "load_2d(tiles_smem + ring.slot",
    ),
    "a store to a row before the first": fault(
        "gemm_bf16", "store_2d(C, C_smem, col0", COPY, swap(r", %r\d+\}", ", -8}"),
        "BulkCopyError", "store_2d(C, C_smem, col0",
    ),
    "a box to beyond shared memory": Fault(
        "gemm_a_registers", (), "OutOfBoundsError", "load_2d(panel", less_shared_memory
    ),
    "fragments to beyond shared memory": Fault(
        "gemm_cluster_bf16", (), "OutOfBoundsError", "store_fragment<T>(C_rows",
        less_shared_memory,
    ),
    "an operand from beyond shared memory": Fault(
        TILE, (), "OutOfBoundsError", "wgmma<T, A_transposed, B_transposed>(acc", wider_stride
    ),
}  # fmt: skip

# C3.14: shared memory that nobody wrote, or that holds nothing but what fills the outside.
UNWRITTEN = {
    "B is not loaded": Fault(
        "gemm_bf16",
        (
            Edit("load_2d(B_smem + ring.slot", COPY, drop),
            Edit(EXPECT_GEMM, EXPECT, swap("24576", "8192")),
        ),
        "UninitialisedReadError", "store_2d(C, C_smem",
    ),
    "half of K is not loaded": Fault(
        "attention_bf16",
        (
            Edit("load_tile<B_c>(shared.K + block", COPY, drop, nth(1)),
            Edit("load_tile<B_c>(shared.K + block", r"mbarrier\.arrive\.expect",
                 swap(r"%r\d+;", "16384;")),
        ),
        "UninitialisedReadError", "store_4d(p.O",
    ),
    "half of a chunk is not loaded": Fault(
        "copy_bytes",
        (
            Edit("load_bytes(ring + slot", r"cp\.async\.bulk", swap(r", %r\d+, \[", ", 1024, [")),
            Edit("arrive_expecting(full", r"mbarrier", swap(r"%r\d+;", "1024;")),
        ),
        "UninitialisedReadError", "store_bytes(out",
    ),
    "keys past the end count": Fault(
        "attention_bf16", (), "zero fill lint", QK_STEP, fewer_keys
    ),
}  # fmt: skip

# C3.15: what is delivered is never read.
UNREAD = {
    "the last 16 of k": fault(
        "gemm_bf16", GEMM_STEP, WGMMA, drop, "never read lint", GEMM_LOAD, nth(3)
    ),
    "the last 16 of k, from registers": fault(
        "gemm_a_registers", A_STEP, WGMMA, drop, "never read lint", "load_2d(panel", nth(3)
    ),
    "the last 16 keys": fault(
        "attention_bf16", PV_STEP, WGMMA, drop,
        "never read lint", "load_tile<B_c>(shared.V", slice(7, None, 8),
    ),
}  # fmt: skip

HAZARDS: Mapping[str, Mapping[str, Fault]] = {
    "read before the phase": EARLY_READS,
    "written while read": EARLY_WRITES,
    "registers in flight": REGISTERS_IN_FLIGHT,
    "no wgmma.fence": MISSING_WGMMA_FENCES,
    "no proxy fence": MISSING_PROXY_FENCES,
    "wrong parity": WRONG_PARITIES,
    "wrong bytes": WRONG_BYTES,
    "wrong arrivals": WRONG_ARRIVALS,
    "wrong setmaxnreg": WRONG_REGISTERS,
    "not all lanes": DIVERGENCE,
    "wrong barrier": WRONG_BARRIERS,
    "turn left over": LEFT_TURNS,
    "ends too early": EARLY_EXITS,
    "misaligned": MISALIGNED,
    "unwritten": UNWRITTEN,
    "unread": UNREAD,
}
"""By kind."""


LINTS = frozenset({"zero fill lint", "never read lint", "left arrivals lint"})
"""Cases that are no errors: tests/ptx/test_lints.py runs these."""


@functools.cache
def module_of(name: str) -> PtxModule:
    """That of a file in KERNELS."""
    return load_ptx((KERNELS / f"{name}.ptx").read_text())


def source_of(case: Case) -> list[str]:
    """The lines of the .cu file."""
    return (KERNELS / f"{case.module}.cu").read_text().splitlines()


def plant(planted: Fault) -> str:
    """The PTX of the case's module with the fault in it."""
    case = CASES[planted.case]
    source = source_of(case)
    lines = (KERNELS / f"{case.module}.ptx").read_text().split("\n")
    for edit in planted.edits:
        found = []
        for instruction in module_of(case.module).kernel(case.kernel).function.instructions:
            frames = instruction.location.frames() if instruction.location else ()
            here = [source[f.line - 1] for f in frames if f.file == f"{case.module}.cu"]
            matches = re.match(edit.opcode, instruction.opcode)
            if matches and any(edit.source in line for line in here):
                found.append(instruction.line - 1)
        chosen = sorted(found)[edit.which or slice(None)]
        assert chosen, f"the fault has nowhere to go: {edit.source}, {edit.opcode}"
        for index in chosen:
            lines[index] = edit.change(lines[index])
    return "\n".join(lines)
