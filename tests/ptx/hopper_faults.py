"""Mistakes that kernels of Hopper's units invite, as edits of the PTX in tests/ptx/kernels.

Each is named after what goes wrong, and says how the simulator is to tell it.
"""

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


def as_it_is(case: Case) -> Case:
    """The launch of the case itself."""
    return case


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
    launch: Callable[[Case], Case] = as_it_is


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
BARRIER, INIT = r"barrier\.sync|bar", r"mbarrier\.init"
TILE = "tile_bf16_n64_k_k 128B 128B 2"
OVERLAP = "attention_bf16_ping_pong_overlap"
GEMM_STEP, A_STEP = "wgmma<T>(acc, a + advance", "wgmma<T, 1>(acc, a + 4 * step"
QK_STEP, PV_STEP = "wgmma<T>(S, Q + advance", "wgmma<T, 1>(O, P + 4 * step"
TILE_STEP = "wgmma<T, A_transposed, B_transposed>(acc"
ASM_COPY = '"r"(in_block(barrier, next))'  # the end of the asm statement
GEMM_LOAD, EXPECT_GEMM = "load_2d(A_smem + ring.slot", "arrive_expecting(barrier, A_bytes + B_byt"
RING_WAIT, RING_EMPTY = "wait(full + 8 * ring.slot, ring.lap)", "wait(empty + 8 * ring.slot"

# C3.1: shared memory is read before the phase of its mbarrier was seen to be complete.
EARLY_READS = {
    name: fault(case, source, TRY_WAIT, no_wait, error, at)
    for name, case, source, error, at in (
        # of a phase whose predecessor the producer never saw
        ("consumers of a ring do not wait",
         "gemm_bf16", RING_WAIT, "MbarrierError", "arrive(last)"),
        ("consumers of a ring do not wait for its only stage",
         "gemm_f16", RING_WAIT, "UninitialisedReadError", GEMM_STEP),
        # before the copy is issued
        ("threads that change a tile do not wait",
         "scale_tiles", RING_WAIT, "UninitialisedReadError", "four.x *= factor"),
        ("ldmatrix does not wait", "gemm_a_registers",
         "wait(full + i % 2 * 8, i / 2 % 2)", "PendingCopyError", "load_fragment(a, 4 * step"),
        ("V is not waited for",
         "attention_bf16", "wait(shared.V_full", "PendingCopyError", PV_STEP),
        ("what another block sends is not waited for", "cluster_shift",
         "wait_cluster(barrier, 0)", "PendingCopyError", "out[thread] = received[thread]"),
    )
}  # fmt: skip

# C3.2: bytes are written that wgmma or a bulk store still reads.
EARLY_WRITES = {
    name: fault(case, source, opcode, change, "RaceError", at, which)
    for name, case, source, opcode, change, at, which in (
        ("a stage is released while wgmma reads it",
         "gemm_bf16", "wgmma_wait<1>()", WGMMA_WAIT, swap("1;", "7;"), GEMM_LOAD, None),
        ("a slot is loaded while its store reads it", "copy_bytes",
         "wait_stores_read<slots - ahead - 1>()", STORES_READ, drop,
         "load_bytes(ring + slot * chunk_bytes", None),
        ("a tile is released while its store reads it", "scale_tiles",
         "wait_stores_read<1>()", STORES_READ, drop, "load_2d(tiles_smem + ring.slot", None),
        ("O is staged while the last store reads it", "attention_bf16",
         "wait_stores_read<0>()", STORES_READ, drop, "store_fragment<T>(shared.O", nth(0)),
        ("C is staged while the last store reads it", "gemm_cluster_bf16",
         "wait_stores_read<0>(); // of the tile before", STORES_READ, drop,
         "store_fragment<T>(C_rows", None),
        ("a stage is loaded while slower warps read it", "gemm_a_registers",
         "__syncthreads(); // all have read", r"bar", drop, "load_2d(", None),
    )
}  # fmt: skip

# C3.3: registers of a wgmma are touched before it is waited for.
REGISTERS_IN_FLIGHT = {
    name: Fault(case, (Edit(source, WGMMA_WAIT, change, which),), "WgmmaRegisterError", at, launch)
    for name, case, source, change, at, which, launch in (
        ("accumulators are stored before the wait", "gemm_bf16",
         "wgmma_wait<0>()", drop, "store_fragment<T>(panel", None, as_it_is),
        ("fragments of A are loaded while they are read", "gemm_a_registers",
         "wgmma_wait<0>()", drop, "load_fragment(a, 4 * step", None, two_stages),
        ("scores are read before the wait", OVERLAP,
         "wgmma_wait<overlap ? 1 : 0>()", drop, "softmax(S, m, l, rescale", None, as_it_is),
        ("O is rescaled before the wait", OVERLAP,
         "wgmma_wait<0>();", swap("0;", "1;"), "O[i] *= rescale", nth(1), as_it_is),
    )
}  # fmt: skip

# C3.4: registers are written, and no wgmma.fence follows before the wgmma that uses them.
MISSING_WGMMA_FENCES = {
    name: fault(case, "wgmma_fence()", WGMMA_FENCE, drop, "WgmmaFenceError", at, which)
    for name, case, at, which in (
        ("after ldmatrix", "gemm_a_registers", A_STEP, None),
        ("after O was rescaled", "attention_bf16", PV_STEP, nth(3)),
        ("after S was read and written", "attention_bf16", QK_STEP, nth(1)),
        ("after accumulators were set", TILE, TILE_STEP, None),
    )
}

# C3.5: the asynchronous proxy meets what a thread wrote, without fence.proxy.async between.
MISSING_PROXY_FENCES = {
    name: fault(case, "fence_proxy()", PROXY, drop, "ProxyError", at)
    for name, case, at in (
        ("between stmatrix and a store", "gemm_bf16", "store_2d(C, C_smem"),
        ("between stmatrix and a store of the warp", "attention_bf16", "store_4d(p.O"),
        ("between a change in place and a store", "scale_tiles", "store_2d(&out"),
        ("between stores and wgmma", TILE, TILE_STEP),
        ("between stores and a load over them", "load_box 1", "load<rank>("),
        ("between stores and a copy to another block", "cluster_shift", ASM_COPY),
    )
}

# C3.6: a wait for the wrong parity.
WRONG_PARITIES = {
    name: fault(case, source, TRY_WAIT, change, error, at or source)
    for name, case, source, change, error, at in (
        ("the producer waits for a slot that nobody used yet", "gemm_bf16",
         "wait(empty + 8 * ring.slot, ring.lap ^ 1)", other_parity, "DeadlockError", ""),
        ("consumers take the lap before",
         "gemm_bf16", RING_WAIT, other_parity, "DeadlockError", ""),
        ("a ring whose parity never changes", "copy_bytes", "wait(full + 8 * slot, j / slots % 2)",
         swap(r"%r\d+;", "0;"), "PendingCopyError", "store_bytes(out + j * chunk_bytes"),
        ("the second tile takes the first one's Q", "attention_bf16",
         "wait(shared.Q_full, at.lap)", swap(r"%r\d+;", "0;"), "PendingCopyError", QK_STEP),
        ("two blocks that both wait", "gemm_cluster_bf16",
         "wait_cluster(shared.empty", other_parity, "DeadlockError", ""),
        ("a writer that waits for the next round", "hand_over",
         "wait(empty, (i - 1) % 2)", other_parity, "DeadlockError", ""),
    )
}  # fmt: skip

# C3.7: other bytes are announced than delivered.
WRONG_BYTES = {
    name: fault(case, source, opcode, change, error, at)
    for name, case, source, opcode, change, error, at in (
        ("too many",
         "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "24592"), "DeadlockError", RING_WAIT),
        ("too few for both boxes",
         "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "24560"), "DeadlockError", RING_WAIT),
        ("as many as the first box has",
         "gemm_bf16", EXPECT_GEMM, EXPECT, swap("24576", "8192"), "PendingCopyError", GEMM_STEP),
        ("half of V", "attention_bf16", "load_tile<B_c>(shared.V + block",
         r"mbarrier\.arrive\.expect", swap(r"%r\d+;", "16384;"), "PendingCopyError", PV_STEP),
        ("without the other block's half", "gemm_cluster_bf16",
         "arrive_expecting(full, A_bytes + B_bytes)", EXPECT, swap("32768", "24576"),
         "PendingCopyError", GEMM_STEP),
        ("without what comes by st.async", "cluster_shift",
         "arrive_expecting(barrier, sizeof received)", EXPECT, swap("2064", "2048"),
         "PendingCopyError", "out[threads] = received[threads]"),
    )
}  # fmt: skip

# C3.8: arrivals and initialisation.
WRONG_ARRIVALS = {
    name: fault(case, source, opcode, change, error, at, which)
    for name, case, source, opcode, change, error, at, which in (
        ("one arrival is missing for ever", "gemm_bf16", "init(empty + 8 * s, 128)", INIT,
         swap(r"%r\d+;", "129;"), "DeadlockError", RING_EMPTY, None),
        ("a warpgroup too many is expected", "attention_bf16", "shared.init_barriers()", INIT,
         swap(r"%r\d+;", "3;"), "DeadlockError", "wait(shared.Q_empty", nth(1)),
        ("more arrive than are expected", "hand_over",
         "mbarrier.arrive.shared.b64 _, [%0], 32;", r"mbarrier\.arrive", swap("32;", "33;"),
         "MbarrierError", "mbarrier.arrive.shared.b64 _, [%0], 32;", None),
        ("a barrier is not initialised", "hand_over", "init(full, 32)", INIT, drop,
         "MbarrierError", ': "r"(full), "r"(i % 2)', None),
        ("the other block's barriers are used before they are made", "gemm_cluster_bf16",
         "cluster_sync(); // nothing may reach", CLUSTER, only_block,
         "AbsentBlockError", "load_2d_multicast(shared.B", None),
        ("the other block's barrier, likewise", "cluster_shift", "cluster_sync();", CLUSTER,
         only_block, "AbsentBlockError", ASM_COPY, slice(0, 2)),
    )
}  # fmt: skip

# C3.9: setmaxnreg.
WRONG_REGISTERS = {
    name: fault(case, source, "setmaxnreg", change, error, at or source)
    for name, case, source, change, error, at in (
        ("more than the block has", "attention_bf16",
         "take_registers<240>()", swap("240", "256"), "DeadlockError", ""),
        ("more than the producer left", "gemm_cluster_bf16",
         "give_registers<40>()", drop, "DeadlockError", "take_registers<232>()"),
        ("a warp that does not give", "attention_bf16",
         "give_registers<24>()", only("%tid.x", "lt 352"), "WarpgroupError", ""),
        ("a warp that does not take", "gemm_cluster_bf16",
         "take_registers<232>()", only("%tid.x", "ge 32"), "WarpgroupError", ""),
    )
}  # fmt: skip

# C3.10: an .aligned instruction that not all lanes of a warp execute.
DIVERGENCE = {
    opcode: fault(case, source, re.escape(opcode), HALF_WARP, "MissingLanesError", source, which)
    for opcode, case, source, which in (
        ("wgmma.commit_group", "gemm_bf16", "wgmma_commit()", None),
        ("wgmma.fence", "gemm_a_registers", "wgmma_fence()", None),
        ("barrier.cluster.arrive", "cluster_shift", "cluster_sync();", nth(0)),
        ("stmatrix", "attention_bf16", "store_fragment<T>(shared.O", nth(0)),
        ("setmaxnreg", "gemm_cluster_bf16", "take_registers<232>()", None),
    )
}

# C3.11: named barriers.
WRONG_BARRIERS = {
    name: fault(case, source, opcode, swap(*operands), error, at or source)
    for name, case, source, opcode, operands, error, at in (
        ("more threads than there are", "gemm_bf16",
         "barrier_sync(1, 128)", BARRIER, (r"%r\d+;", "192;"), "BarrierOperandError", ""),
        ("fewer threads than come", "scale_tiles",
         "barrier_sync(1, consumers)", BARRIER, (r"%r\d+;", "96;"), "BarrierOperandError", ""),
        ("other threads arrive than are waited for", OVERLAP, "pass_turn();",
         r"barrier\.arrive", (r"%r\d+;", "128;"), "MixedArrivalsError", ""),
        ("arrivals at another barrier", "cluster_softmax", "top = over_block(",
         r"barrier\.arrive", (r"%r\d+,", "3,"), "BarrierError", ""),
    )
}  # fmt: skip

# C3.11, too: arrivals that are left over at the end. No rule of the PTX ISA is broken, and the
# barriers of a block end with it.
LEFT_TURNS = {
    case: fault(
        case, "take_turn(); // that consumer 1", BARRIER, drop,
        "left arrivals lint", "exponentials();",
    )
    for case in ("attention_f16_ping_pong", OVERLAP)
}  # fmt: skip

# C3.12: a block ends too early.
EARLY_EXITS = {
    "before its sum is read": Fault(
        "cluster_softmax",
        (
            Edit("cluster_arrive(); // none may leave", CLUSTER, drop),
            Edit("    cluster_wait();", CLUSTER, drop, nth(-1)),
        ),
        "AbsentBlockError", "all += load_remote",
    ),
} | {
    name: fault(case, source, opcode, drop, error, at, which)
    for name, case, source, opcode, error, at, which in (
        ("before the other block's last arrivals", "gemm_cluster_bf16",
         "cluster_sync(); // the other block", CLUSTER, "AbsentBlockError", "arrive_remote(last)",
         None),
        ("before what it sends is received", "cluster_shift",
         "cluster_sync(); // none may leave", CLUSTER, "OutlivedError", ASM_COPY, None),
        ("before its store has read", "gemm_bf16",
         "wait_stores_read<0>()", STORES_READ, "OutlivedError", "store_2d(C, C_smem", None),
        ("before the last tile's store has read", "attention_bf16",
         "wait_stores_read<0>()", STORES_READ, "OutlivedError", "store_4d(p.O", nth(-1)),
    )
}  # fmt: skip

# C3.13: addresses and coordinates that the units do not take.
MISALIGNED = {
    name: fault(case, source, opcode, change, error, source)
    for name, case, source, opcode, change, error in (
        ("a box to 64 bytes past a line", "gemm_bf16",
         GEMM_LOAD, COPY, swap(r"bytes \[(%r\d+)\]", r"bytes [\1+64]"), "MisalignedError"),
        ("a box from 16 bytes past a line", "attention_bf16",
         "store_4d(p.O", COPY, swap(r"\[(%r\d+)\];", r"[\1+16];"), "MisalignedError"),
        ("a copy of 2040 bytes", "copy_bytes", "store_bytes(out + j * chunk_bytes",
         r"cp\.async\.bulk\.global", odd_size, "BulkCopyError"),
        ("a first column that is no multiple of 16 bytes", "scale_tiles",
         "load_2d(tiles_smem + ring.slot", COPY, swap(r"\{%r\d+,", "{1,"), "BulkCopyError"),
        ("a store to a row before the first", "gemm_bf16",
         "store_2d(C, C_smem, col0", COPY, swap(r", %r\d+\}", ", -8}"), "BulkCopyError"),
    )
} | {
    name: Fault(case, (), "OutOfBoundsError", at, launch)
    for name, case, at, launch in (
        ("a box to beyond shared memory", "gemm_a_registers", "load_2d(panel", less_shared_memory),
        ("fragments to beyond shared memory", "gemm_cluster_bf16",
         "store_fragment<T>(C_rows", less_shared_memory),
        ("an operand from beyond shared memory", TILE, TILE_STEP, wider_stride),
    )
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
    name: fault(case, source, WGMMA, drop, "never read lint", at, which)
    for name, case, source, at, which in (
        ("the last 16 of k", "gemm_bf16", GEMM_STEP, GEMM_LOAD, nth(3)),
        ("the last 16 of k, from registers", "gemm_a_registers", A_STEP, "load_2d(panel", nth(3)),
        ("the last 16 keys", "attention_bf16", PV_STEP, "load_tile<B_c>(shared.V",
         slice(7, None, 8)),
    )
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
