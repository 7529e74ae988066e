"""Lanes of one warp that touch the same shared memory need a barrier of the warp between them."""

import numpy as np
import pytest
from ptx_snippets import entry, run_body

from flash_helpers.ptx import DeviceMemory, MissingLanesError, PendingCopyError, RaceError, load_ptx

DECLARATIONS = """
.reg .pred %p, %q;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
.shared .align 16 .b8 tile[2048];
"""
# %r0 thread, %r2 tile, %r3 the thread's word, %r4 lane, %r6 the neighbour's word, %p even lanes.
START = """
mov.u32 %r0, %tid.x;
mov.u32 %r2, tile;
shl.b32 %r1, %r0, 2;
add.u32 %r3, %r2, %r1;
and.b32 %r4, %r0, 31;
xor.b32 %r5, %r1, 4;
add.u32 %r6, %r2, %r5;
and.b32 %r7, %r0, 1;
setp.eq.u32 %p, %r7, 0;
"""
BEFORE = '.file 1 "kernel.cu"\n'
WARP_BARRIER = "bar.warp.sync -1;"


def run(body, threads=64, **options):
    return run_body(START + body, DECLARATIONS, threads, before=BEFORE, **options)


ROW = "and.b32 %r9, %r4, 7;\nmad.lo.u32 %r9, %r9, 16, %r2;\n"
PAIRS = {
    "read after write": ("st.shared.u32 [%r3], %r0;", "ld.shared.u32 %r8, [%r6];"),
    "write after read": ("ld.shared.u32 %r8, [%r6];", "st.shared.u32 [%r3], %r0;"),
    "write after write": ("st.shared.u32 [%r3], %r0;", "st.shared.u32 [%r6], %r0;"),
    "read after atomic": ("red.shared.add.u32 [%r3], 1;", "ld.shared.u32 %r8, [%r6];"),
    "atomic after write": ("st.shared.u32 [%r3], 1;", "red.shared.add.u32 [%r6], 1;"),
    "atomic after read": ("ld.shared.u32 %r8, [%r3];", "red.shared.add.u32 [%r6], 1;"),
    "wider read after write": (
        "st.shared.u32 [%r3], 1;",
        "and.b32 %r9, %r3, -8;\nld.shared.v2.u32 {%r8, %r10}, [%r9];",
    ),
    "matrix read after write": (
        "st.shared.u32 [%r3], 1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r2];",
    ),
    "write after matrix read": (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r2];",
        "setp.lt.u32 %q, %r0, 32;\n@%q st.shared.u32 [%r3], 1;",
    ),
    "read after matrix write": (
        f"{ROW}stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {{%r0}};",
        "ld.shared.u32 %r8, [%r3];",
    ),
    "matrix write after read": (
        "ld.shared.u32 %r8, [%r3];",
        f"{ROW}stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {{%r0}};",
    ),
}
FILL = "st.shared.u32 [%r3], 0;\nst.shared.u32 [%r3+1024], 0;\nbar.sync 0;\n"


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.parametrize("barrier", ["bar.warp.sync -1;", "bar.sync 0;", "barrier.sync 1;"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_race_is_found_and_a_barrier_cures_it(name, barrier, threads):
    first, second = PAIRS[name]
    if "matrix" in name and threads > 32:
        first = f"setp.lt.u32 %q, %r0, 32;\n@!%q bra DONE;\n{first}"
        second, barrier = f"{second}\nDONE:", WARP_BARRIER
    run(f"{FILL}{first}\n{barrier}\n{second}", threads)
    with pytest.raises(RaceError) as caught:
        run(f"{FILL}.loc 1 5 1\n{first}\n.loc 1 6 1\n{second}", threads)
    assert "of the same warp at kernel.cu:5" in caught.value.detail
    assert "no __syncwarp between them" in caught.value.detail
    assert caught.value.site.source == "kernel.cu:6"


MATRIX = "{}matrix.sync.aligned.m8n8.x4.shared.b16 {};\n"
MATRICES = {
    "ld": MATRIX.format("ld", "{%r8, %r9, %r10, %r11}, [%r12]"),
    "st": MATRIX.format("st", "[%r12], {%r8, %r9, %r10, %r11}"),
}
NEXT_ROW = "add.u32 %r12, %r4, 9;\nand.b32 %r12, %r12, 31;\nmad.lo.u32 %r12, %r12, 16, %r2;\n"


@pytest.mark.parametrize(("first", "second"), [("ld", "st"), ("st", "ld"), ("st", "st")])
def test_matrix_accesses_by_one_warp_are_in_its_order(first, second):
    """Each lane gives the address of another lane's row at the second of two."""
    start = "mov.b32 %r8, 0;mov.b32 %r9, 0;mov.b32 %r10, 0;mov.b32 %r11, 0;\n"
    start += "mad.lo.u32 %r12, %r4, 16, %r2;\n"
    both = f"{start}{MATRICES[first]}{NEXT_ROW}{MATRICES[second]}"
    run(FILL + both, threads=32)
    with pytest.raises(RaceError, match=r"by warp [01] at"):
        run(FILL + both, threads=64)


def test_both_lanes_are_named():
    first, second = PAIRS["read after write"]
    with pytest.raises(RaceError, match=r"write by lane 1 of the same warp") as caught:
        run(f"{FILL}{first}\n{second}")
    assert (caught.value.thread.warp, caught.value.thread.lane) == (0, 0)


def test_of_races_between_warps_and_within_one_the_former_are_told():
    """A lane's word is read by its neighbour and by a lane of the other warp, then written."""
    read = "xor.b32 %r9, %r5, 128;\nadd.u32 %r9, %r2, %r9;\nld.shared.u32 %r8, [%r9];"
    with pytest.raises(RaceError, match="read by warp 0 at") as caught:
        run(f"{FILL}ld.shared.u32 %r8, [%r6];\n{read}\nst.shared.u32 [%r3], %r0;")
    assert caught.value.thread.warp == 1


@pytest.mark.parametrize("action", ["ld.shared.u32 %r8, [%r3];", "st.shared.u32 [%r3], 2;"])
def test_what_a_lane_does_to_its_own_words_is_no_race(action):
    run(f"st.shared.u32 [%r3], 1;\nld.shared.u32 %r9, [%r3];\n{action}")


@pytest.mark.parametrize(
    "meeting",
    [
        "shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1;",
        "vote.sync.ballot.b32 %r9, %p, -1;",
        "match.any.sync.b32 %r9, %r0, -1;",
        "redux.sync.add.u32 %r9, %r0, -1;",
        "membar.cta;",
        "fence.acq_rel.cta;",
    ],
)
def test_what_lets_lanes_meet_does_not_order_memory(meeting):
    first, second = PAIRS["read after write"]
    with pytest.raises(RaceError):
        run(f"{FILL}{first}\n{meeting}\n{second}")


# -- barriers of some lanes --------------------------------------------------------------------

# A body, what makes it right, what makes it a race, and the lane that is told.
DECIDES = {
    # each of the lanes 0 to 7 writes the row whose address it gives
    "a barrier before a matrix is read": ("""
        shl.b32 %r8, %r4, 4;
        add.u32 %r9, %r2, %r8;
        st.shared.v4.u32 [%r9], {%r0, %r0, %r0, %r0};
        ?
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r9];
    """, WARP_BARRIER, "", "same warp"),
    # tiles of 8 lanes, as cooperative groups have them
    "which lanes a barrier's mask names": ("""
        st.shared.u32 [%r3], 1;
        and.b32 %r9, %r4, 24;
        shl.b32 %r10, 255, %r9;
        bar.warp.sync %r10;
        xor.b32 %r9, %r1, ?;
        add.u32 %r10, %r2, %r9;
        ld.shared.u32 %r8, [%r10];
    """, "20", "32", "lane 8 of the same warp"),
    # lane 0 meets lane 1, which then meets lane 2
    "a chain of barriers of two masks": ("""
        setp.eq.u32 %q, %r4, 0;
        @%q st.shared.u32 [%r2], 1;
        setp.gt.u32 %q, %r4, 1;
        @%q bra SECOND;
        bar.warp.sync 3;
        SECOND:
        setp.eq.u32 %q, %r4, 0;
        @%q bra DONE;
        setp.gt.u32 %q, %r4, 2;
        @%q bra DONE;
        ?
        setp.eq.u32 %q, %r4, 2;
        @%q ld.shared.u32 %r8, [%r2];
        DONE:
    """, "bar.warp.sync 6;", "", "write by lane 0 of the same warp"),
    # lanes 0 and 1 read one word at different times
    "whether all who have read it meet the writer": ("""
        st.shared.u32 [%r3], 0;
        bar.warp.sync -1;
        setp.eq.u32 %q, %r4, 0;
        @%q ld.shared.u32 %r8, [%r2];
        setp.eq.u32 %q, %r4, 1;
        @%q ld.shared.u32 %r8, [%r2];
        setp.gt.u32 %q, %r4, 2;
        @%q bra DONE;
        ?
        setp.eq.u32 %q, %r4, 2;
        @%q st.shared.u32 [%r2], 1;
        DONE:
    """, "bar.warp.sync 7;", "setp.eq.u32 %q, %r4, 0;\n@%q bra DONE;\nbar.warp.sync 6;",
        "read by lane 0 of the same warp"),
    "the value that all write in one instruction": (
        "st.shared.u32 [%r2], ?;", "7", "%r0",
        r"another value by lane 31 of the same warp\n.* undefined",
    ),
    # even lanes in the first turn of a loop, odd ones in the second
    "the value that they write at different times": ("""
        mov.u32 %r9, 0;
        LOOP:
        setp.ne.u32 %q, %r7, %r9;
        @%q bra NEXT;
        st.shared.u32 [%r2], ?;
        NEXT:
        add.u32 %r9, %r9, 1;
        setp.lt.u32 %q, %r9, 2;
        @%q bra LOOP;
    """, "7", "%r7", "no __syncwarp"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "right", "wrong", "words"), DECIDES.values(), ids=DECIDES)
def test_it_decides(body, right, wrong, words):
    run(body.replace("?", right), 32)
    with pytest.raises(RaceError, match=words):
        run(body.replace("?", wrong), 32)


def test_lanes_may_meet_at_different_barriers_of_one_mask():
    body = """
    st.shared.u32 [%r3], 1;
    @%p bra EVEN;
    bar.warp.sync {odd};
    ld.shared.u32 %r8, [%r6];
    bra.uni DONE;
    EVEN:
    bar.warp.sync -1;
    ld.shared.u32 %r8, [%r6];
    DONE:
    """
    run(body.format(odd=-1))
    with pytest.raises(MissingLanesError, match="0x55555554 do not come"):
        run(body.format(odd=-2))


def test_lanes_that_have_ended_have_arrived():
    run(
        """
        setp.gt.u32 %q, %r4, 15;
        st.shared.u32 [%r3], 1;
        @%q ret;
        bar.warp.sync -1;
        ld.shared.u32 %r8, [%r3+64];
        """
    )


# -- copies ------------------------------------------------------------------------------------


def run_copies(body, **options):
    memory = DeviceMemory()
    address = memory.upload(np.arange(256, dtype=np.uint32))
    source = """
    ld.param.u64 %rd0, [p];
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd1, %rd0, %rd2;
    """
    text = entry(START + source + body, ".param .u64 p", DECLARATIONS, BEFORE)
    kernel = load_ptx(text).kernel("k")
    return kernel.launch(grid=1, block=64, args=[address], memory=memory, **options)


COPY = "cp.async.ca.shared.global [%r3], [%rd1], 4;\n"
READ = "ld.shared.u32 %r8, [%r6];\n"


def test_a_copy_is_seen_by_other_lanes_after_the_wait_and_a_barrier():
    run_copies(f"{COPY}cp.async.wait_all;\n{WARP_BARRIER}\n{READ}")
    with pytest.raises(RaceError, match="write by lane 1 of the same warp"):
        run_copies(f"{COPY}cp.async.wait_all;\n{READ}")


def test_a_copy_that_only_another_lane_waited_for():
    wait = "@%p bra NEXT;\ncp.async.wait_all;\nNEXT:\n"
    with pytest.raises(PendingCopyError, match=r"cp\.async\.ca\.shared\.global") as caught:
        run_copies(f"{COPY}{wait}{WARP_BARRIER}\n@!%p {READ}")
    assert caught.value.thread.lane == 1
    run_copies(f"{COPY}{wait}{WARP_BARRIER}\n@%p {READ}")


def test_a_copy_that_is_waited_for_behind_the_barrier():
    with pytest.raises(RaceError, match="same warp"):
        run_copies(f"{COPY}{WARP_BARRIER}\ncp.async.wait_all;\n{READ}")


def test_lanes_may_copy_the_same_bytes_to_the_same_place():
    run_copies("cp.async.ca.shared.global [%r2], [%rd0], 4;")
    with pytest.raises(RaceError, match="another value"):
        run_copies("cp.async.ca.shared.global [%r2], [%rd1], 4;")


@pytest.mark.parametrize(
    "write", ["st.global.u32 [%rd1+{}], 1;", "red.global.add.u32 [%rd1+{}], 1;"]
)
def test_what_a_copy_reads_must_stay_until_it_has_been_waited_for(write):
    run_copies(f"{COPY}cp.async.wait_all;\n{write.format(0)}")
    run_copies(f"{COPY}{write.format(256)}")
    with pytest.raises(PendingCopyError, match=r"4 bytes of global memory, which the cp\.async at"):
        run_copies(COPY + write.format(0))
    with pytest.raises(PendingCopyError, match=r"reads: its thread has not waited for it"):
        run_copies(f"{COPY}bar.sync 0;\n{write.format(4)}")


def test_what_a_copy_does_not_read_may_be_written():
    run_copies("cp.async.ca.shared.global [%r3], [%rd1], 4, 0;\nst.global.u32 [%rd1], 1;")


def test_a_warp_released_from_one_barrier_waits_at_the_next() -> None:
    """Warp 1 meets warp 0 at the second instruction, which warp 0 then has still to execute."""
    body = "setp.ge.u32 %q, %r0, 32;\n@%q bra SECOND;\nbar.sync 0;\nSECOND:\nbar.sync 0;"
    assert run(body).counters.total.barriers == 3
