"""The simulator finds what is wrong with a kernel, and says where."""

import numpy as np
import pytest
from ptx_snippets import entry

from flash_helpers.ptx import (
    BarrierError,
    BarrierOperandError,
    DeviceMemory,
    InstructionLimitError,
    LaunchError,
    MisalignedError,
    MissingLanesError,
    OutOfBoundsError,
    PendingCopyError,
    RaceError,
    TrapError,
    UninitialisedReadError,
    UnsupportedInstruction,
    load_ptx,
)

DECLARATIONS = """
.reg .pred %p, %q;
.reg .b16 %h<4>;
.reg .b32 %r<20>;
.reg .f32 %f<8>;
.reg .b64 %rd<8>;
.shared .align 16 .b8 tile[1024];
"""
START = """
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, tile;
add.u32 %r3, %r2, %r1;
and.b32 %r4, %r0, 31;
shr.u32 %r5, %r0, 5;
setp.eq.u32 %p, %r5, 0;
"""


def run(body, grid=1, threads=64, **options):
    """Runs the body after START; %rd1 points to 256 bytes."""
    memory = DeviceMemory()
    address = memory.upload(np.arange(256, dtype=np.uint8))
    memory.upload(np.zeros(64))
    pointer = "ld.param.u64 %rd0, [p];\ncvta.to.global.u64 %rd1, %rd0;"
    text = entry(pointer + START + body, ".param .u64 p", DECLARATIONS, '.file 1 "kernel.cu"\n')
    return (
        load_ptx(text).kernel("k").launch(grid, threads, args=[address], memory=memory, **options)
    )


COPY = "cp.async.ca.shared.global [%r3], [%rd1], 4;\n"
COMMIT = "cp.async.commit_group;\n"
READ = "ld.shared.u32 %r6, [%r3];\n"
WRITE = "st.shared.u32 [%r3], 0;\nbar.sync 0;\n"
SHUFFLE = "shfl.sync.bfly.b32 %r6, %r0, 1, 31, -1;"
WORD_OF_LANE = "shl.b32 %r6, %r4, 2;\nadd.u32 %r7, %r2, %r6;\n"
# The reader stands before the writer in the program, so it always runs first here.
READER_FIRST = """
setp.eq.u32 %q, %r4, 0;
st.shared.u32 [%r3], 0;
@!%p bra WRITE;
bar.sync 0;
ld.shared.u32 %r6, [tile];
bra.uni DONE;
WRITE:
bar.sync 0;
@%q st.shared.u32 [tile], 2;
DONE:
"""
WEAK_READ_RACES = "write of shared address 0 and read by warp 1"

WRONG = {
    # -- addresses
    "a global access that is misaligned": (
        "ld.global.v2.u32 {%r6, %r7}, [%rd1+4];", MisalignedError, "multiple of 8",
    ),
    "a shared access that is misaligned": (
        "st.shared.u32 [%r3+2], 0;", MisalignedError, "multiple of 4",
    ),
    "a shared access past the end": (
        "st.shared.u32 [%r3+1000], 0;", OutOfBoundsError, "1024 bytes of shared memory",
    ),
    # -- copies
    "a read of a copy that was not waited for": (
        COPY + COMMIT + READ, PendingCopyError, r"cp\.async\.ca\.shared\.global",
    ),
    "a write over a copy on its way": (COPY + WRITE, PendingCopyError, "write of shared address"),
    # -- races
    "a race whose reader always runs first": (READER_FIRST, RaceError, None),
    "two warps that write one word in the same instruction": (
        WORD_OF_LANE + "st.shared.u32 [%r7], %r0;", RaceError, None,
    ),
    "a strong write and a weak read": (
        WRITE + "@!%p ld.shared.u32 %r6, [tile];\n@%p st.volatile.shared.u32 [tile], 1;",
        RaceError, WEAK_READ_RACES,
    ),
    "a weak write and a strong read": (
        WRITE + "@!%p ld.volatile.shared.u32 %r6, [tile];\n@%p st.shared.u32 [tile], 1;",
        RaceError, WEAK_READ_RACES,
    ),
    # -- barriers and lanes
    "an arrival without a number of threads": (
        "bar.arrive 1;", UnsupportedInstruction, "a number of threads is due",
    ),
    "a barrier that lanes of one warp reach apart": (
        "setp.lt.u32 %q, %r4, 7;\n@%q bra A;\nbar.sync 0;\nbra.uni B;\nA: bar.sync 0;\nB:",
        BarrierError, "different barrier instructions",
    ),
    "a shuffle whose lanes never come": (
        "setp.gt.u32 %q, %r4, 3;\n@%q bra B;\n" + SHUFFLE + "\nB: bar.sync 0;",
        MissingLanesError, "0xfffffff0 do not come",
    ),
    "a shuffle executed by a lane outside its mask": (
        SHUFFLE.replace("-1", "0xffff"), MissingLanesError, "not among them",
    ),
    "a trap": ("@%p trap;", TrapError, None),
    "an endless loop": (
        "LOOP:\nadd.u32 %r6, %r6, 1;\nbra.uni LOOP;",
        InstructionLimitError, "more than 5000 instructions",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(body, error, words):
    with pytest.raises(error, match=words):
        run(body, max_instructions=5000)


RIGHT = {
    "a copy reads zeros beyond its source size": """
        cp.async.ca.shared.global [%r3], [%rd1+1], 4, 0;
        cp.async.wait_all;
        ld.shared.u32 %r6, [%r3];
        setp.ne.u32 %q, %r6, 0;
        @%q trap;
    """,
    "warps write one value in the same instruction": WORD_OF_LANE + "st.shared.u32 [%r7], %r4;",
    "reads are strong and weak":
        WRITE + "ld.volatile.shared.u32 %r6, [tile];\nld.shared.u32 %r6, [tile];",
    "threads touch neighbouring bytes":
        "add.u32 %r7, %r2, %r0;\nst.shared.u8 [%r7], %r0;\nld.shared.u8 %h0, [%r7];",
    "atomics meet at one word": WRITE + "red.shared.add.u32 [tile], 1;",
    "a barrier orders what threads did that have ended":
        "@%p st.shared.u32 [%r3], 1;\n@%p ret;\nbar.sync 0;\nld.shared.u32 %r6, [%r3+-128];",
    "a shuffle waits for lanes that come another way":
        "setp.gt.u32 %q, %r4, 3;\n@%q bra A;\nadd.u32 %r0, %r0, 1;\nA: " + SHUFFLE,
}  # fmt: skip


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_nothing_is_told_if(body):
    run(body)


# -- addresses ---------------------------------------------------------------------------------


def test_global_access_past_the_end():
    body = """
    .loc 1 42 7
    mul.wide.u32 %rd2, %r0, 8;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r6, [%rd3+4];
    """
    with pytest.raises(OutOfBoundsError) as caught:
        run(body, grid=2)

    error = caught.value
    # Thread 31 reads the last word of the 256 bytes, thread 32 lies beyond them.
    assert (error.thread.block, error.thread.warp, error.thread.lane) == ((0, 0, 0), 1, 0)
    assert error.site.source == "kernel.cu:42"
    assert "4 bytes past the end of the 256-byte allocation" in str(error)
    assert "ld.global.u32" in str(error) and "kernel k" not in str(error)
    assert error.address == 0x7F00_0000_1000 + 260
    # Both blocks, each with one warp out of bounds.
    assert error.count == 64


@pytest.mark.parametrize(("address", "words"), [(0, "null pointer"), (0x1234567, "not an address")])
def test_null_and_foreign_pointers(address, words):
    text = entry("ld.param.u64 %rd0, [p];\nst.global.u32 [%rd0], 1;", ".param .u64 p", DECLARATIONS)
    with pytest.raises(OutOfBoundsError, match=words):
        load_ptx(text).kernel("k").launch(grid=1, block=32, args=[address])


# -- shared memory -----------------------------------------------------------------------------


def test_reading_what_nobody_wrote():
    body = "@%p st.shared.u32 [%r3], 0;\n bar.sync 0;\n" + READ
    run(body)
    with pytest.raises(UninitialisedReadError) as caught:
        run(body + "setp.ne.u32 %q, %r6, 0;\n @%q trap;")
    assert (caught.value.thread.warp, caught.value.site.opcode) == (1, "trap")


SECOND_COPY = COPY.replace("[%r3]", "[%r3+512]")
GROUPS = COPY + COMMIT + SECOND_COPY + COMMIT + "cp.async.wait_group 1;\n"
WAITED = COPY + "cp.async.wait_all;\n"
OF_OTHER_WARP = "xor.b32 %r6, %r3, 128;\nld.shared.u32 %r7, [%r6];"
WAITS = {
    "a copy that was not committed":
        (WAITED + READ, COPY + "cp.async.wait_group 0;\n" + READ, PendingCopyError),
    "too few groups":
        (GROUPS + READ, GROUPS + "ld.shared.u32 %r7, [%r3+512];", PendingCopyError),
    "a copy, which other warps see only after a barrier":
        (WAITED + "bar.sync 0;\n" + OF_OTHER_WARP, WAITED + OF_OTHER_WARP, RaceError),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "error"), WAITS.values(), ids=WAITS)
def test_waiting_for(right, wrong, error):
    run(right)
    with pytest.raises(error):
        run(wrong)


RACES = {
    "read after write": ("@%p st.shared.u32 [%r3], 1;", "@!%p ld.shared.u32 %r6, [%r3+-128];"),
    "write after read": ("@%p ld.shared.u32 %r6, [%r3];", "@!%p st.shared.u32 [%r3+-128], 1;"),
    "write after write": ("@%p st.shared.u32 [%r3], 1;", "@!%p st.shared.u32 [%r3+-128], 1;"),
    "read after atomic": (
        "@%p red.shared.add.u32 [%r3], 1;",
        "@!%p ld.shared.u32 %r6, [%r3+-128];",
    ),
    "atomic after write": ("@%p st.shared.u32 [%r3], 1;", "@!%p red.shared.add.u32 [%r3+-128], 1;"),
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_and_a_barrier_cures_it(name):
    first, second = RACES[name]
    start = "@%p st.shared.u32 [%r3], 0;\n bar.sync 0;\n"
    run(f"{start}{first}\n bar.sync 0;\n{second}")
    with pytest.raises(RaceError) as caught:
        run(f"{start}.loc 1 5 1\n{first}\n.loc 1 6 1\n{second}")
    assert "kernel.cu:5" in caught.value.detail and caught.value.site.source == "kernel.cu:6"


STRONG_WRITES = [
    "st.volatile.shared.u32 [%r3], 1;",
    "st.relaxed.cta.shared.u32 [%r3], 1;",
    "st.release.cta.shared.u32 [%r3], 1;",
    "atom.shared.exch.b32 %r6, [%r3], 1;",
    "atom.release.cta.shared.exch.b32 %r6, [%r3], 1;",
]


@pytest.mark.parametrize("write", STRONG_WRITES)
def test_a_first_write_may_be_strong(write):
    run(f"{write}\n ld.shared.u32 %r7, [%r3];")
    add = "red.shared.add.u32 [%r3], 1;\n ld.volatile.shared.u32 %r7, [%r3];"
    run(f"{write}\n bar.sync 0;\n {add}")
    other = "xor.b32 %r8, %r3, 128;\n ld.shared.u32 %r7, [%r8];"
    run(f"{write}\n bar.sync 0;\n {other}")
    with pytest.raises(RaceError, match="and write by warp 0"):
        run(f"{write}\n {other}")


@pytest.mark.parametrize(
    "first",
    [
        "red.shared.add.u32 [%r3], 1;",
        "atom.shared.add.u32 %r6, [%r3], 1;",
        "atom.shared.cas.b32 %r6, [%r3], 0, 1;",
        "ld.volatile.shared.u32 %r6, [%r3];",
    ],
)
def test_an_update_of_what_nobody_wrote(first):
    use = "ld.shared.u32 %r6, [%r3];\n" if first.startswith("red") else ""
    run(first)
    with pytest.raises(UninitialisedReadError):
        run(f"{first}\n{use}setp.ne.u32 %q, %r6, 0;\n@%q trap;")


def test_a_barrier_of_some_warps_orders_only_these():
    body = """
    setp.lt.u32 %q, %r0, 64;
    @%p st.shared.u32 [%r3], 1;
    @!%q bra OTHERS;
    bar.sync 1, 64;
    OTHERS:
    {reader}
    """
    second = "setp.eq.u32 %q, %r5, 1;\n @%q ld.shared.u32 %r6, [%r3+-128];"
    third = "setp.eq.u32 %q, %r5, 2;\n @%q ld.shared.u32 %r6, [%r3+-256];"
    run(body.format(reader=second), threads=96)
    with pytest.raises(RaceError):
        run(body.format(reader=third), threads=96)


# -- barriers and lanes ------------------------------------------------------------------------


ENDED = {
    "a warp": "@%p ret;\n bar.sync 0;",
    "lanes": "setp.gt.u32 %q, %r4, 7;\n @%q ret;\n bar.sync 0;",
    "threads after the others have come": "@%p bra LAST;\n bar.sync 0;\n ret;\nLAST:\n ret;",
    "lanes, a number of threads": "setp.gt.u32 %q, %r4, 7;\n @%q ret;\n bar.sync 1, 64;",
    "lanes, a reduction": """
        setp.gt.u32 %q, %r4, 7;
        @%q ret;
        bar.red.popc.u32 %r6, 0, %p;
        setp.ne.u32 %q, %r6, 8;
        @%q trap;
    """,
}


@pytest.mark.parametrize("name", ENDED)
def test_a_barrier_waits_for_threads_that_have_not_ended(name):
    run(ENDED[name])
    with pytest.raises(BarrierError, match=r"of 64 threads wait, \d+ have ended"):
        run(ENDED[name], strict_barriers=True)


def test_a_barrier_that_some_threads_never_reach():
    with pytest.raises(BarrierError, match="barrier 0: 32 of 64 threads wait, 0 have") as caught:
        run("@%p bra A;\n bar.sync 0;\n ret;\nA:\n bar.sync 1;")
    assert "barrier 1: 32 of 64 threads wait, 0 have ended\n" in str(caught.value)
    assert "others wait at" in str(caught.value)
    with pytest.raises(BarrierError) as caught:
        run("add.u32 %r6, %r5, 1;\n bar.sync %r6, 64;")
    for name in (1, 2):
        assert f"barrier {name}: 32 of 64 threads wait, 0 have ended\n" in str(caught.value)
    # The one of a number of threads does not count warps that have ended.
    with pytest.raises(BarrierError, match="32 of 64 threads wait, 64 have ended"):
        run("setp.lt.u32 %q, %r5, 2;\n @%q ret;\n bar.sync 1, 64;", threads=96)


def test_the_last_warp_counts_as_a_whole_at_a_barrier_of_a_number_of_threads():
    run("bar.sync 1, 64;", threads=50)


@pytest.mark.parametrize(
    ("barrier", "words"),
    [
        ("bar.sync 16;", "barrier 16: a block has 16 of them, numbered from 0 to 15"),
        ("barrier.sync %r6;", "barrier 21: a block"),
        ("bar.arrive 17, 64;", "barrier 17: a block"),
        ("bar.sync 1, 48;", "barrier of 48 threads: .* a multiple of 32, from 32 to 64,"),
        ("bar.sync 1, 0;", "barrier of 0 threads"),
        ("bar.sync 1, 96;", "barrier of 96 threads"),
        ("bar.sync 1, %r6;", "barrier of 21 threads"),
        ("bar.red.and.pred %q, 16, %p;", "barrier 16"),
    ],
)
def test_a_barrier_that_no_block_has(barrier, words):
    with pytest.raises(BarrierOperandError, match=words) as caught:
        run(f"mov.u32 %r6, 21;\n.loc 1 8 1\n{barrier}")
    assert caught.value.site.source == "kernel.cu:8"
    found = run(f"mov.u32 %r6, 21;\n{barrier}\nbar.sync 0;", keep_going=True)
    assert [type(fault) for fault in found.faults] == [BarrierOperandError]
    # What is not reached is not asked for.
    run(f"mov.u32 %r6, 21;\nbra DONE;\n{barrier}\nDONE:")


def test_a_number_of_threads_is_told_of_the_block_that_has_no_whole_warps():
    with pytest.raises(BarrierOperandError, match=r"50 threads: .* multiple of 32, from 32 to 64"):
        run("bar.sync 1, 50;", threads=50)


@pytest.mark.parametrize(
    "instruction",
    ["mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1}, {%r2}, "
     "{%f0,%f1,%f2,%f3};",
     "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r2];"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["setp.eq.u32 %q, %r4, 5;\n @%q ret;\n",
                                 "setp.ne.u32 %q, %r4, 5;\n @%q "])  # fmt: skip
def test_a_matrix_instruction_without_a_lane(instruction, how):
    with pytest.raises(MissingLanesError):
        run(f"st.shared.u32 [%r3], 0;\n bar.sync 0;\n{how}{instruction}")


# -- collected faults --------------------------------------------------------------------------


def test_faults_are_collected_once_for_each_instruction():
    body = """
    ld.shared.u32 %r6, [%r3];
    red.shared.add.u32 [%r6+2], 0;
    @%p ret;
    bar.sync 0;
    """
    found = run(body, keep_going=True, strict_barriers=True)
    kinds = [type(f) for f in found.faults]
    assert kinds == [UninitialisedReadError, MisalignedError, BarrierError]
    assert found.faults[0].count == 64 and "64 times" in found.report()
    assert found.counters.total.instructions > 0


def test_a_run_is_shown_as_a_summary():
    run_of = load_ptx(entry(START + "bar.sync 0;", declarations=DECLARATIONS)).kernel("k").launch
    alone = run_of(grid=(2, 3), block=64)
    n = alone.counters.total.instructions
    assert repr(alone) == (
        f"<Run of k: blocks 6, warp instructions {n}, mma 0, bank conflicts 0, faults 0>"
    )
    assert "blocks 1,006, " in repr(run_of(grid=1000, block=64, before=alone))


def test_a_launch_goes_on_with_the_counts_and_faults_of_the_one_before():
    body = """
    mov.u32 %r6, %ctaid.x;
    ld.shared.u32 %r7, [%r3];
    red.shared.add.u32 [%r7+2], 0;
    bar.sync 0;
    """
    kernel = load_ptx(entry(START + body, declarations=DECLARATIONS)).kernel("k")

    def launch(blocks, before=None):
        return kernel.launch(grid=blocks, block=64, keep_going=True, before=before)

    alone = launch(5)
    together = launch(2, launch(1, launch(2)))
    assert together.counters.by_opcode() == alone.counters.by_opcode()
    assert together.counters.total == alone.counters.total
    assert together.report() == alone.report()
    assert [fault.count for fault in together.faults] == [5 * 64, 5 * 64]


def test_a_launch_keeps_the_faults_that_only_the_one_before_had():
    body = """
    ld.param.u32 %r6, [bad];
    mov.u32 %r7, %r2;
    setp.ne.u32 %q, %r6, 0;
    @%q ld.shared.u32 %r7, [%r3];
    ld.shared.u32 %r8, [%r7];
    """
    text = entry(START + body, ".param .u32 bad", DECLARATIONS)
    kernel = load_ptx(text).kernel("k")
    run = None
    for bad in (0, 1, 0):
        run = kernel.launch(grid=1, block=32, args=[bad], keep_going=True, before=run)
    (fault,) = run.faults
    assert (type(fault), fault.count) == (UninitialisedReadError, 32)


# -- launches and text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 1025}, "1025 threads"),
        ({"block": (1, 1, 65)}, "64 in z"),
        ({"grid": (1, 70000)}, "limits are"),
        ({"grid": (1, 0)}, "positive"),
        ({"args": []}, "takes 1 arguments, got 0"),
        ({"args": [b"abc"]}, "3 bytes, its parameter 4"),
        *(
            ({"target": name}, f"limits of {name} are not known")
            for name in ("sm_10", "H100", "sm_")
        ),
    ],
)
def test_a_launch_that_cannot_exist(options, words):
    """Its grid, block, arguments or target; test_loading.py has numbers and limits of memory."""
    kernel = load_ptx(entry("", ".param .u32 n")).kernel("k")
    with pytest.raises(LaunchError, match=words):
        kernel.launch(**{"grid": 1, "block": 32, "args": [1], **options})


def test_a_missing_kernel_is_answered_with_those_there_are():
    with pytest.raises(LaunchError, match="no kernel is named 'missing'") as caught:
        load_ptx(entry("")).kernel("missing")
    assert "\n  k" in str(caught.value)
