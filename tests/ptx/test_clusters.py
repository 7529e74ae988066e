"""Clusters: blocks that see each other's shared memory, and wait for each other."""

import re

import numpy as np
import pytest
from ptx_snippets import entry, launch_on

from flash_helpers.gpu import WARP
from flash_helpers.ptx import (
    AbsentBlockError,
    ClusterBarrierError,
    DeadlockError,
    LaunchError,
    MisalignedError,
    MissingLanesError,
    NotResidentError,
    OutOfBoundsError,
    RaceError,
    load_ptx,
)
from flash_helpers.ptx.run import batches
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.regions import RANK_SHIFT
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.shared import WatchedMemory

DECLARATIONS = """
.shared .align 16 .b32 word[64];
.reg .pred %p, %q;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
"""
# %r0: thread, %r1: rank, %r2: the next block's rank, %r3: the block, %r4: result, stored by END.
START = """
ld.param.u64 %rd0, [out];
mov.u32 %r4, 0;
mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
mov.u32 %r5, %cluster_nctarank;
add.u32 %r2, %r1, 1;
rem.u32 %r2, %r2, %r5;
mov.u32 %r3, %ctaid.x;
mov.u32 %r5, %ntid.x;
mad.lo.u32 %r5, %r3, %r5, %r0;
mad.wide.u32 %rd0, %r5, 4, %rd0;
"""
END = "\nst.global.u32 [%rd0], %r4;"


def module(body, directives=""):
    text = entry(body, ".param .u64 out", DECLARATIONS).replace("sm_80", "sm_90")
    return text.replace(".param .u64 out)", f".param .u64 out)\n{directives}")


def launch(body, grid=4, block=32, cluster=4, directives="", **options):
    """The run, and what every thread had in %r4: (blocks, threads)."""
    zeros = [np.zeros((int(np.prod(grid)), block), np.uint32)]
    text = module(START + body + END, directives)
    run, (out,) = launch_on(text, zeros, grid, block, cluster=cluster, **options)
    return run, out


class TestLaunch:
    REQUIRED = ".explicitcluster\n.reqnctapercluster 2, 1, 1"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"grid": 6}, r"grid of \(6, 1, 1\) is no multiple .* \(4, 1, 1\).* to \(8, 1, 1\)"),
            ({"grid": 32, "cluster": 32}, "has 32 blocks: the limit is 8, or 16 with cudaFunc"),
            ({"target": "sm_80"}, "sm_80 has none, sm_90 is the first"),
            ({"directives": REQUIRED}, r"\(4, 1, 1\), but k is compiled for \(2, 1, 1\)"),
            (
                {"cluster": None, "directives": ".explicitcluster"},
                "must be launched with clusters: give cluster",
            ),
            ({"directives": ".maxclusterrank 2"}, "has 4 blocks, but k is compiled for at most 2"),
            (
                {"directives": ".reqnctapercluster 2\n.blocksareclusters"},
                "counts its grid in clusters",
            ),
        ],
    )
    def test_that_cannot_be(self, options, words):
        with pytest.raises(LaunchError, match=words):
            launch("", **options)

    def test_as_large_as_it_may_be_or_as_the_kernel_is_compiled_for(self):
        assert launch("", grid=16, cluster=(16, 1))[0].n_blocks == 16
        for cluster in (None, (2, 1, 1)):
            body = "mov.u32 %r4, %cluster_nctarank;"
            assert (launch(body, cluster=cluster, directives=self.REQUIRED)[1] == 2).all()


class TestSpecialRegisters:
    GRID, CLUSTER = (4, 6, 2), (2, 3, 1)

    def values(self, register, grid=GRID, cluster=CLUSTER):
        """By z, y and x of the block."""
        body = f"""
        mov.u32 %r6, %ctaid.y;
        mov.u32 %r7, %ctaid.z;
        mad.lo.u32 %r6, %r7, {grid[1]}, %r6;
        mad.lo.u32 %r6, %r6, {grid[0]}, %r3;
        ld.param.u64 %rd0, [out];
        mad.lo.u32 %r6, %r6, 32, %r0;
        mad.wide.u32 %rd0, %r6, 4, %rd0;
        mov.u32 %r4, {register};
        """
        return launch(body, grid, cluster=cluster)[1][:, 0].reshape(grid[::-1])

    def test_of_blocks_in_a_cluster(self):
        z, y, x = np.indices(self.GRID[::-1])
        assert (self.values("%cluster_ctaid.x") == x % 2).all()
        assert (self.values("%cluster_ctaid.y") == y % 3).all()
        assert (self.values("%cluster_ctarank") == y % 3 * 2 + x % 2).all()
        assert (self.values("%clusterid.x") == x // 2).all()
        assert (self.values("%clusterid.y") == y // 3).all()
        assert (self.values("%clusterid.z") == z).all()

    def test_of_the_cluster(self):
        found = {
            name: np.unique(self.values(name)).tolist()
            for name in ("%cluster_nctaid.y", "%cluster_nctarank", "%nclusterid.x", "%nclusterid.y")
        }
        assert list(found.values()) == [[3], [6], [2], [2]]

    def test_without_clusters_a_block_is_its_own(self):
        ids = self.values("%clusterid.y", cluster=None)
        assert (ids == np.arange(6)[None, :, None]).all()
        assert (self.values("%cluster_nctarank", cluster=None) == 1).all()

    def test_whether_there_are_any(self):
        body = "mov.pred %p, %is_explicit_cluster;\nselp.u32 %r4, 1, 0, %p;"
        assert launch(body)[1].all() and launch(body, cluster=1)[1].all()
        assert not launch(body, cluster=None)[1].any()


class TestAddresses:
    """A shared::cluster address holds the rank of its block."""

    @pytest.fixture
    def shared(self):
        geometry = Geometry(tuple((x, 0, 0) for x in range(6)), 2 * WARP, cluster=3)
        program = load_ptx(entry("")).kernel("k").program
        return WatchedMemory(geometry, 512, 4, FaultLog(program, keep_going=False))

    def test_are_of_blocks_of_the_cluster(self, shared):
        lanes = shared.geometry.lane_of(np.array([0, 1, 5, 4, 4]), np.array([0, 1, 2, 40, 63]))
        ranks = np.array([0, 2, 0, 1, 9])
        blocks, at = shared.resolve((ranks + 1 << RANK_SHIFT) + 8 * ranks, lanes)
        assert blocks.tolist() == [0, 2, 3, 4, -1]
        assert (at == 8 * ranks).all()

    def test_without_a_rank_are_of_the_own_block(self, shared):
        lanes = shared.geometry.lane_of(np.arange(6), np.arange(6))
        blocks, at = shared.resolve(np.array([-4, 0, 16, 508, 512, 600]), lanes)
        assert blocks.tolist() == list(range(6))
        assert at.tolist() == [-4, 0, 16, 508, 512, 600]

    def test_are_inside_if_the_block_is_there_and_has_them(self, shared):
        tag = 1 << RANK_SHIFT
        addresses = np.array([0, -4, 508, 512, tag, 3 * tag + 508, 3 * tag + 512, 4 * tag])
        inside = shared.inside(addresses, 4)
        assert inside.tolist() == [True, False, True, False, True, True, False, False]

    @pytest.mark.parametrize("width", ["u32", "u64"])
    def test_of_mapa_and_getctarank(self, width):
        register = {"u32": "%r8", "u64": "%rd1"}[width]
        body = f"""
        mapa.shared::cluster.{width} {register}, word + 4, %r2;
        getctarank.shared::cluster.{width} %r4, {register};
        """
        assert (launch(body)[1].T == [1, 2, 3, 0]).all()
        own = f"mov.{width} {register}, word;\ngetctarank.shared::cluster.{width} %r4, {register};"
        assert (launch(own)[1].T == [0, 1, 2, 3]).all()

    def test_of_mapa_are_mapped_on(self):
        body = """
        mapa.shared::cluster.u32 %r8, word, %r2;
        mapa.shared::cluster.u32 %r9, %r8, 3;
        getctarank.shared::cluster.u32 %r4, %r9;
        """
        assert (launch(body)[1] == 3).all()

    GENERIC = """
    mov.u64 %rd1, word;
    cvta.shared.u64 %rd1, %rd1;
    mapa.u64 %rd2, %rd1, %r2;
    """

    def test_in_the_generic_window(self):
        body = """
        getctarank.u64 %r4, %rd2;
        getctarank.u64 %r5, %rd1;
        mad.lo.u32 %r4, %r4, 10, %r5;
        """
        assert (launch(self.GENERIC + body)[1].T == [10, 21, 32, 3]).all()

    def test_between_generic_and_shared(self):
        body = """
        cvta.to.shared::cluster.u64 %rd3, %rd2;
        mapa.shared::cluster.u64 %rd4, word, %r2;
        sub.u64 %rd3, %rd3, %rd4;
        cvta.shared::cluster.u64 %rd4, %rd4;
        sub.u64 %rd4, %rd4, %rd2;
        or.b64 %rd4, %rd4, %rd3;
        cvt.u32.u64 %r4, %rd4;
        """
        assert not launch(self.GENERIC + body)[1].any()

    @pytest.mark.parametrize(
        ("space", "found"), [("shared::cluster", 0b1111), ("shared", 0b0111), ("global", 0b0000)]
    )
    def test_isspacep(self, space, found):
        """Addresses of the own block by three names, and of the next one."""
        body = """
        mapa.u64 %rd3, %rd1, %r1;
        add.u64 %rd4, %rd1, 128;
        mov.u32 %r4, 0;
        """
        for bit, register in enumerate(("%rd1", "%rd3", "%rd4", "%rd2")):
            body += f"isspacep.{space} %p, {register};\n@%p or.b32 %r4, %r4, {1 << bit};\n"
        assert (launch(self.GENERIC + body)[1] == found).all()

    def test_of_a_rank_that_no_block_has_may_not_be_used(self):
        body = "mapa.shared::cluster.u32 %r8, word, {};\n"
        assert launch(body.format(9))[0].n_blocks == 4
        for rank in (4, 300, -1):
            with pytest.raises(OutOfBoundsError, match="another block, but the cluster has 4"):
                launch(body.format(rank) + "ld.shared::cluster.u32 %r4, [%r8];")

    def test_past_the_end_of_another_block(self):
        body = "mapa.shared::cluster.u32 %r8, word, %r2;\nst.shared::cluster.u32 [%r8+{}], 1;"
        with pytest.raises(OutOfBoundsError, match="4 bytes at shared address 256 of the block of"):
            launch(body.format(256))
        with pytest.raises(MisalignedError, match="4 bytes at shared address 6, which"):
            launch(body.format(6))

    @pytest.mark.parametrize(
        "access",
        [
            "ld.shared.u32 %r10, [%r8];",
            "st.shared::cta.u32 [%r8], 1;",
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r8];",
            "ld.param.u64 %rd1, [out];\n"
            "cp.async.ca.shared.global [%r8], [%rd1], 4;\ncp.async.wait_all;",
        ],
    )
    def test_of_other_blocks_are_not_for_every_access(self, access):
        launch(f"mapa.shared::cluster.u32 %r8, word, %r1;\n{access}")
        with pytest.raises(OutOfBoundsError, match="shared address 0 of the block of rank 1, and"):
            launch(f"mapa.shared::cluster.u32 %r8, word, %r2;\n{access}")


# Each thread hands 100 * rank + thread to the thread of the same number in the next block.
SEND = """
mad.lo.u32 %r6, %r1, 100, %r0;
shl.b32 %r7, %r0, 2;
mov.u32 %r8, word;
add.u32 %r7, %r7, %r8;
mapa.shared::cluster.u32 %r8, %r7, %r2;
{arrive}
{wait}
st.shared::cluster.u32 [%r8], %r6;
{arrive}
{wait}
ld.shared.u32 %r4, [%r7];
"""
ARRIVE, WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
SENT = (100 * np.array([[3], [0], [1], [2]]) + np.arange(64)).astype(np.uint32)


class TestTheBarrier:
    @pytest.mark.parametrize("arrive", ["arrive", "arrive.release", "arrive.release.aligned"])
    @pytest.mark.parametrize("wait", ["wait", "wait.acquire", "wait.acquire.aligned"])
    def test_orders_what_was_before_the_arrivals(self, arrive, wait):
        body = SEND.format(arrive=f"barrier.cluster.{arrive};", wait=f"barrier.cluster.{wait};")
        run, out = launch(body, block=64, grid=8)
        assert (out.reshape(2, 4, 64) == SENT).all()
        assert run.counters.total.barriers == 2 * 2 * 8

    @pytest.mark.parametrize("missing", ["wait", "arrive and wait"])
    def test_that_is_missing(self, missing):
        body = SEND.format(arrive=ARRIVE, wait=WAIT)
        before, first, between, last, after = re.split(f"({ARRIVE}.{WAIT})", body, flags=re.DOTALL)
        last = {"wait": ARRIVE, "arrive and wait": ""}[missing]
        with pytest.raises(RaceError, match=r"read of shared address 0 and write by warp 0 of the"):
            launch(before + first + between + last + after, block=64)

    def test_does_not_order_what_stands_between_arrival_and_wait(self):
        body = SEND.format(arrive="", wait="").replace("st.", f"{ARRIVE}\n{WAIT}\n{ARRIVE}\nst.")
        with pytest.raises(RaceError):
            launch(body.replace("ld.", f"{WAIT}\nld."), block=64)

    def test_relaxed_orders_nothing(self):
        relaxed = ARRIVE.replace("arrive", "arrive.relaxed")
        with pytest.raises(RaceError):
            launch(SEND.format(arrive=relaxed, wait=WAIT), block=64)

    def test_relaxed_after_a_fence_orders_what_was_before_the_fence(self):
        fenced = "fence.acq_rel.cluster;\n" + ARRIVE.replace("arrive", "arrive.relaxed")
        assert (launch(SEND.format(arrive=fenced, wait=WAIT), block=64)[1] == SENT).all()

    @pytest.mark.parametrize("grid", [4, 12])
    def test_orders_threads_that_come_apart(self, grid):
        """Warps arrive in different places, half of a warp after the other."""
        arrive, wait = ARRIVE.replace(".aligned", ""), WAIT.replace(".aligned", "")
        apart = """
        setp.ge.u32 %p, %r0, {limit};
        @%p bra OTHERS{n};
        {arrive}
        {wait}
        bra MET{n};
        OTHERS{n}:
        {arrive}
        {wait}
        MET{n}:
        """
        body, once = SEND.format(arrive="", wait="MEET"), "MEET"
        for n, limit in enumerate((32, 48)):
            text = apart.format(n=n, limit=limit, arrive=arrive, wait=wait)
            body = body.replace(once, text, 1)
        _, out = launch(body, grid=grid, block=64)
        assert (out.reshape(-1, 4, 64) == SENT).all()

    def test_is_of_the_cluster_alone(self):
        """Blocks of the first cluster do not come."""
        body = f"setp.lt.u32 %p, %r3, 4;\n@%p bra DONE;\n{ARRIVE}\n{WAIT}\nDONE:"
        assert launch(body + "\nmov.u32 %r4, 1;", grid=8)[1].all()

    def test_does_not_wait_for_threads_that_have_ended(self):
        """Nor does what they did before need more than that the others have waited."""
        body = """
        mapa.shared::cluster.u32 %r8, word, 0;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        setp.ne.u32 %p, %r1, 1;
        @!%p st.shared::cluster.u32 [%r8], 7;
        @!%p ret;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mov.u32 %r4, 0;
        setp.ne.u32 %q, %r1, 0;
        @!%q ld.shared.u32 %r4, [word];
        """
        assert launch(body)[1][:, 0].tolist() == [7, 0, 0, 0]

    def test_of_a_block_that_is_alone(self):
        body = SEND.replace("[%r7]", "[%r8]").format(arrive=ARRIVE, wait=WAIT)
        assert (launch(body, cluster=None)[1] == 0 + np.arange(32)).all()

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (f"{ARRIVE}\n{ARRIVE}\n{WAIT}", "arrives twice without a barrier.cluster.wait"),
            (f"{ARRIVE}\n{WAIT}\n{ARRIVE}\nbar.sync 0;\n{ARRIVE}", "arrives twice"),
            (WAIT, "waits without having arrived"),
            (f"{ARRIVE}\n{WAIT}\nbar.sync 0;\n{WAIT}", "waits without having arrived"),
        ],
    )
    def test_misused(self, body, text):
        with pytest.raises(ClusterBarrierError, match=text):
            launch(body + "\nmov.u32 %r4, 1;", block=64)
        assert launch(body + "\nmov.u32 %r4, 1;", block=64, keep_going=True)[1].all()

    def test_that_nobody_completes(self):
        """In the block of rank 2, the warps wait for each other at different barriers."""
        body = f"""
        setp.eq.u32 %p, %r1, 2;
        @%p bra OTHERS;
        {ARRIVE}
        {WAIT}
        OTHERS:
        setp.lt.u32 %p, %r0, 32;
        @%p bar.sync 1;
        bar.sync 2;
        """
        with pytest.raises(DeadlockError) as caught:
            launch(body, block=96)
        assert (
            "for 96 threads of the cluster to arrive: those of warp 0 of the block of rank 2 and "
            "2 more" in str(caught.value)
        )

    def test_aligned_in_divergent_code(self):
        body = f"setp.ge.u32 %p, %r0, 16;\n@%p bra LATE;\n{ARRIVE}\n{WAIT}\nLATE:\n"
        with pytest.raises(MissingLanesError, match="0xffff0000 do not come"):
            launch(body + "bar.warp.sync 0xffffffff;")


MEET = f"{ARRIVE}\n{WAIT}\n"
# Thread 0 of each block takes the address of `word` in the next one: %r8, and %rd2 generic.
NEXT = """
mov.u32 %r4, 0;
mapa.shared::cluster.u32 %r8, word, %r2;
cvt.u64.u32 %rd2, %r8;
cvta.shared::cluster.u64 %rd2, %rd2;
setp.eq.u32 %p, %r0, 0;
"""


# The block of rank 0 writes 7 to the next one, then sets its flag, for which that one waits.
FLAGGED = f"""{NEXT}
st.relaxed.cluster.shared.u32 [word+4], 0;
{MEET}
setp.eq.u32 %q, %r1, 0;
@%q st.shared::cluster.u32 [%r8], 7;
@%q st.{{}}.cluster.shared::cluster.u32 [%r8+4], 1;
setp.eq.u32 %q, %r1, 1;
@!%q bra DONE;
SPIN:
ld.{{}}.cluster.shared.u32 %r5, [word+4];
setp.eq.u32 %p, %r5, 0;
@%p bra SPIN;
READ
DONE:
"""


class TestRaces:
    """Between blocks of a cluster, on what lies in one of them."""

    def test_of_writes_to_a_third_block(self):
        body = NEXT + MEET + "mapa.shared::cluster.u32 %r8, word, 2;\n"
        store = "@%p st.shared::cluster.u32 [%r8], %r1;\n"
        with pytest.raises(
            RaceError, match="address 0 of the block of rank 2 and write of another"
        ):
            launch(body + store + MEET)
        one_after_the_other = "".join(
            f"setp.eq.u32 %q, %r1, {rank};\nand.pred %q, %p, %q;\n@%q{store[3:]}{MEET}"
            for rank in range(4)
        )
        launch(body + one_after_the_other)

    def test_of_a_read_by_another_block_and_the_next_write(self):
        body = NEXT + "@%p st.shared.u32 [word], %r1;\n" + MEET + "@%p ld.u32 %r4, [%rd2];\n"
        rewrite = "@%p st.shared.u32 [word], 9;\n" + MEET
        with pytest.raises(
            RaceError, match="write of shared address 0 and read by warp 0 of the block of rank 0"
        ) as caught:
            launch(body + "bar.sync 0;\n" + rewrite)
        assert caught.value.thread.block == (1, 0, 0)
        assert launch(body + MEET + rewrite)[1][:, 0].tolist() == [1, 2, 3, 0]

    def test_of_an_atomic_and_a_read(self):
        """In the block of rank 0."""
        body = NEXT + "@%p st.shared.u32 [word], 0;\nmapa.shared::cluster.u32 %r8, word, 0;\n"
        body += MEET + "@%p {}.shared::cluster.add.u32 {}[%r8], 5;\n{}"
        body += "@%p ld.shared.u32 %r4, [word];\n" + MEET
        with pytest.raises(RaceError, match="read of shared address 0 and write by warp 0 of the"):
            launch(body.format("red.relaxed.cluster", "", ""))
        assert launch(body.format("red", "", MEET))[1][0, 0] == 20
        assert launch(body.format("atom", "%r9, ", MEET))[1][0, 0] == 20

    def test_by_a_flag_without_release(self):
        body = FLAGGED.replace("READ", "ld.shared.u32 %r4, [word];")
        found = launch(body.format("release", "acquire"), block=1)[1]
        assert found[:, 0].tolist() == [0, 7, 0, 0]
        for orders in (("relaxed", "acquire"), ("release", "relaxed")):
            with pytest.raises(RaceError, match="write by warp 0 of the block of rank 0"):
                launch(body.format(*orders), block=1)


class TestBlocksThatAreNotThere:
    def test_before_they_have_begun(self):
        with pytest.raises(
            AbsentBlockError,
            match="write of shared address 0 of the block of rank 1, which may not have begun",
        ) as caught:
            launch(NEXT + "@%p st.shared::cluster.u32 [%r8], 1;\n" + MEET)
        assert caught.value.thread.block == (0, 0, 0)
        assert caught.value.count == 4

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (
                f"@%p st.shared.u32 [word], 3;\nbar.sync 0;\n@%p ld.u32 %r4, [%rd2];\n{MEET}",
                r"read of shared address 0 of the .* rank 1",
            ),
            (
                f"{ARRIVE}\n@%p atom.shared::cluster.exch.b32 %r4, [%r8], 2;\n{WAIT}\n{MEET}",
                "may not have begun",
            ),
        ],
        ids=["a barrier of the block", "an arrival without a wait"],
    )
    def test_says_nothing_of_others(self, body, words):
        with pytest.raises(AbsentBlockError, match=words):
            launch(NEXT + body)

    def test_relaxed_arrivals_say_that_they_have_begun(self):
        relaxed = MEET.replace("arrive", "arrive.relaxed")
        launch(NEXT + relaxed + "@%p st.shared::cluster.u32 [%r8], 1;\n" + MEET)

    ENDS = "which may have ended:\n    no barrier.cluster between this and its end"

    @pytest.mark.parametrize("last", ["", "bar.sync 0;", ARRIVE, "relaxed"])
    def test_after_they_have_ended(self, last):
        """The last barrier is missing, of the block, has no wait, or orders nothing."""
        last = MEET.replace("arrive", "arrive.relaxed") if last == "relaxed" else last
        body = f"{NEXT}{MEET}@%p st.shared::cluster.u32 [%r8+4], 1;\n"
        with pytest.raises(AbsentBlockError, match=self.ENDS) as caught:
            launch(body + last)
        assert caught.value.address == 4 and caught.value.thread.lane == 0
        assert "shared address 4 of the block of rank 0" in str(caught.value)
        launch(body + MEET)

    def test_while_others_still_read_from_them(self):
        """The last arrival stands before the read."""
        body = (
            f"{NEXT}@%p st.shared.u32 [word], %r1;\n{MEET}{{}}@%p ld.u32 %r4, [%rd2];\n{{}}{WAIT}"
        )
        assert launch(body.format("", ARRIVE))[1][:, 0].tolist() == [1, 2, 3, 0]
        with pytest.raises(AbsentBlockError, match=rf"read of shared .* rank 0, {self.ENDS}"):
            launch(body.format(ARRIVE, ""))

    def test_when_they_have_ended_early(self):
        """The block of rank 1 ends at once; that of rank 0 writes to it after many steps."""
        body = f"""{NEXT}{MEET}
        setp.eq.u32 %q, %r1, 1;
        @%q ret;
        mov.u32 %r5, 0;
        LOOP:
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %q, %r5, 1000;
        @%q bra LOOP;
        setp.eq.u32 %q, %r1, 0;
        @%q st.shared::cluster.u32 [%r8], 1;
        """
        with pytest.raises(AbsentBlockError, match="of the block of rank 1, which has ended"):
            launch(body, block=1)

    def test_a_flag_makes_them_stay(self):
        """The block of rank 1 waits until that of rank 0 has told that it has written."""
        body = FLAGGED.replace("READ", "")
        launch(body.format("release", "acquire"), block=1)
        with pytest.raises(AbsentBlockError, match=self.ENDS):
            launch(body.format("relaxed", "acquire"), block=1)

    ARRIVE_THERE = f"""{NEXT}
    .shared .align 8 .b64 bar;
    @%p mbarrier.init.shared.b64 [bar], 1;
    @%p fence.mbarrier_init.release.cluster;
    {{}}
    mapa.shared::cluster.u32 %r8, bar, %r2;
    @%p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
    {{}}
    """
    WAIT_HERE = "AGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared.b64 %q, [bar], 0;\n"
    WAIT_HERE += "@!%q bra AGAIN;\n"

    def test_before_their_mbarriers_are_made(self):
        with pytest.raises(AbsentBlockError, match=r"mbarrier\.arrive of .* rank 1, which may not"):
            launch(self.ARRIVE_THERE.format("bar.sync 0;", MEET))

    def test_while_others_arrive_at_their_mbarriers(self):
        launch(self.ARRIVE_THERE.format(MEET, MEET))
        launch(self.ARRIVE_THERE.format(MEET, self.WAIT_HERE))
        with pytest.raises(AbsentBlockError, match=rf"mbarrier\.arrive of .* rank 0, {self.ENDS}"):
            launch(self.ARRIVE_THERE.format(MEET, ""))
        # The blocks of the other ranks wait.
        wait = f"setp.eq.u32 %q, %r1, 2;\n@%q bra DONE;\n{self.WAIT_HERE}DONE:\n"
        with pytest.raises(AbsentBlockError, match=rf"mbarrier\.arrive of .* rank 2, {self.ENDS}"):
            launch(self.ARRIVE_THERE.format(MEET, wait))

    def test_are_all_told(self):
        body = f"{NEXT}{MEET}@%p st.shared::cluster.u32 [%r8], 1;\n@%p ld.u32 %r4, [%rd2+4];\n"
        run, _ = launch(body.replace("ld.u32 %r4", "ld.u32 %r9"), grid=8, keep_going=True)
        (fault,) = run.faults
        assert fault.site.opcode == "ld.u32" and fault.count == 8


class TestResidence:
    def test_blocks_of_a_cluster_begin_together(self, monkeypatch):
        """Each block waits for the next one. A GPU that holds 16 has room for three clusters."""
        monkeypatch.setitem(batches.gpu.__dict__, "MOST_SMS", {90: 2})
        body = """
        mov.u32 %r4, 1;
        mov.u32 %r6, %nctaid.x;
        sub.u32 %r6, %r6, 1;
        setp.eq.u32 %p, %r3, %r6;
        setp.ne.or.u32 %p, %r0, 0, %p;
        @%p bra DONE;
        SPIN:
        ld.acquire.gpu.global.u32 %r5, [%rd0+1024];
        setp.eq.u32 %q, %r5, 0;
        @%q bra SPIN;
        DONE:
        """
        assert launch(body, grid=15, block=256, cluster=5)[1].all()
        with pytest.raises(NotResidentError, match="15 blocks are resident and all wait"):
            launch(body, grid=20, block=256, cluster=5)
