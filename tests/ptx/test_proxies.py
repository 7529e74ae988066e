"""Memory that threads and bulk copies share: the fences that the async proxy needs, and the block
of an mbarrier."""

import numpy as np
import pytest
from tma_snippets import BARRIER_INITS, EXPECT, INIT, LOAD, LOAD_BYTES, run, wait

from flash_helpers.ptx import BulkCopyError, ProxyError

FENCE = "fence.proxy.async.shared::cta;\n"
STORE_BYTES = "cp.async.bulk.global.shared::cta.bulk_group"
STORED = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
WORDS = np.arange(128, dtype=np.float32)[None]


class TestBytesOfCpAsync:
    """Each thread copies 16 bytes by cp.async; then thread 0 stores all of them by a bulk copy."""

    PUBLISHED = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];\n{before}" + wait("bar", 0)
    WAITED = "cp.async.wait_all;\n{before}bar.sync 0;\n"
    WAITED_BEFORE = (
        WAITED + "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];\n" + wait("bar", 0)
    )

    def stored(self, how: str, before: str = "", after: str = "") -> np.ndarray:
        body = f"""
        @%p0 {INIT} [bar], 32;
        bar.sync 0;
        shl.b32 %r1, %tid, 4;
        cvt.u64.u32 %rd4, %r1;
        add.u64 %rd4, %rd4, %rd0;
        mov.u32 %r2, smem;
        add.u32 %r1, %r1, %r2;
        cp.async.cg.shared.global [%r1], [%rd4], 16;
        {how.format(before=before)}
        {after}
        @%p0 {STORE_BYTES} [%rd1], [smem], 512;
        {STORED}
        """
        return run(body, WORDS, results=128, block=32)[1]

    @pytest.mark.parametrize("how", [PUBLISHED, WAITED, WAITED_BEFORE])
    def test_a_fence_after_the_wait(self, how: str) -> None:
        assert (self.stored(how, after=FENCE) == WORDS.view(np.uint32)).all()

    @pytest.mark.parametrize("how", [WAITED, WAITED_BEFORE])
    def test_a_fence_of_the_threads_that_have_waited_for_their_copies(self, how: str) -> None:
        assert (self.stored(how, before=FENCE) == WORDS.view(np.uint32)).all()

    @pytest.mark.parametrize("before", ["", FENCE], ids=["no fence", "one before the wait"])
    def test_published_by_an_mbarrier_without_it(self, before: str) -> None:
        words = r"read by bulk stores .* and write by cp\.async for mbarrier .*\n +with no fence"
        with pytest.raises(ProxyError, match=words):
            self.stored(self.PUBLISHED, before=before)

    @pytest.mark.parametrize("how", [WAITED, WAITED_BEFORE])
    def test_published_by_a_barrier_without_it(self, how: str) -> None:
        with pytest.raises(ProxyError, match="with no fence"):
            self.stored(how)


class TestStoresToOtherBlocks:
    """st.async to the next block of a cluster."""

    def exchange(self, barrier: str) -> None:
        body = f"""
        @%p0 {INIT} [bar], 1;
        @%p0 {BARRIER_INITS}
        @%p0 {EXPECT} [bar], 4;
        barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r0, %cluster_ctarank;
        xor.b32 %r1, %r0, 1;
        mov.u32 %r2, smem;
        mapa.shared::cluster.u32 %r3, %r2, %r1;
        mov.u32 %r2, bar;
        mapa.shared::cluster.u32 %r4, %r2, {barrier};
        @%p0 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r3], 7, [%r4];
        {wait("bar", 0)}
        barrier.cluster.arrive; barrier.cluster.wait;
        """
        run(body, grid=2, cluster=2, block=32, target="sm_90")

    def test_count_at_an_mbarrier_there(self) -> None:
        self.exchange("%r1")

    def test_do_not_count_at_one_of_the_sender(self) -> None:
        words = r"object is in block \(0, 0, 0\), the destination in block \(1, 0, 0\)"
        with pytest.raises(BulkCopyError, match=words):
            self.exchange("%r0")


class TestGlobalMemory:
    """Thread `writer` writes the first words of the input, which a bulk copy of thread 0 reads."""

    LOAD_BYTES = f"@%p0 {LOAD_BYTES} [smem], [%rd0], 512, [bar];"
    LOAD_BOX = f"@%p0 {LOAD} [smem], [%rd2, {{0, 0}}], [bar];"
    WRITES = ("st.global.u32", "st.u32", "st.global.u16", "red.global.add.u32")

    def run(
        self,
        after: str = "",
        before: str = "",
        write: str = WRITES[0],
        writer: int = 0,
        *,
        copy: str = LOAD_BYTES,
    ) -> float:
        body = f"""
        @%p0 {INIT} [bar], 1;
        @%p0 {BARRIER_INITS}
        setp.eq.u32 %p1, %tid, {writer};
        mov.u32 %r4, 7;
        mov.u16 %h0, 7;
        @%p1 {write} [%rd0], {"%h0" if "u16" in write else "%r4"};
        {after}
        bar.sync 0;
        {before}
        @%p0 {EXPECT} [bar], 512;
        {copy}
        {wait("bar", 0)}
        ld.shared.u32 %r3, [smem];
        @%p0 st.global.u32 [%rd1], %r3;
        """  # fmt: skip
        return run(body)[1][0]

    @pytest.mark.parametrize("copy", [LOAD_BYTES, LOAD_BOX])
    @pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.global;"])
    @pytest.mark.parametrize("writer", [0, 33])
    def test_fenced(self, fence: str, copy: str, writer: int) -> None:
        assert self.run(fence, writer=writer, copy=copy) == 7
        assert self.run(before=f"@%p0 {fence}", writer=writer, copy=copy) == 7

    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("copy", [LOAD_BYTES, LOAD_BOX])
    def test_not_fenced(self, write: str, copy: str) -> None:
        words = rf"read of global memory by a bulk copy, and write by its thread at .*{write}"
        with pytest.raises(ProxyError, match=words):
            self.run(write=write, copy=copy)

    @pytest.mark.parametrize("fence", [FENCE, "@!%p0 fence.proxy.async;"])
    def test_fenced_for_other_memory_or_by_threads_that_do_not_know_of_it(self, fence: str) -> None:
        with pytest.raises(ProxyError, match=r"no fence.proxy.async between them that covers"):
            self.run(fence)

    def test_written_by_another_thread_before_a_barrier(self) -> None:
        with pytest.raises(ProxyError, match=r"and write by .* warp 1 lane 1 at"):
            self.run(writer=33)

    FILLED = "@%p0 st.shared.v4.u32 [smem], {%tid, %tid, %tid, %tid};\n"

    def test_that_a_reduction_adds_to(self) -> None:
        """Zeros of its thread."""
        reduction = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
        zeros = f"{self.FILLED}@%p0 st.global.u32 [%rd1+8], %tid;\n"
        adds = f"@%p0 {reduction} [%rd1], [smem], 16;\n{STORED}"
        run(zeros + "fence.proxy.async;\n" + adds)
        with pytest.raises(ProxyError, match="write of global memory by a bulk copy, and write by"):
            run(zeros + FENCE + adds)

    def test_of_other_bytes(self) -> None:
        write, copy = (
            "@%p0 st.global.u32 [%rd1+16], %tid;",
            f"@%p0 {STORE_BYTES} [%rd1], [smem], 16;",
        )
        run(f"{self.FILLED}{FENCE}{write}\n{copy}\n{STORED}")
