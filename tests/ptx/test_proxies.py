"""Memory that threads and bulk copies share: the fences that the async proxy needs, and the block
of an mbarrier."""

from __future__ import annotations

import numpy as np
import pytest
from tma_snippets import BARRIER_INITS, EXPECT, INIT, run, wait

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
