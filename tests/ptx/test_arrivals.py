"""The instructions on mbarrier objects: what they return, whom they order, what is undefined."""

import numpy as np
import pytest
from tma_snippets import ARRIVE, EXPECT, INIT, LOAD_BYTES, run, wait

from flash_helpers.ptx import (
    DeadlockError,
    MbarrierError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    RaceError,
)


def made(count: int) -> str:
    """An object that thread 0 initialises."""
    return f"@%p0 {INIT} [bar], {count};\nbar.sync 0;\n"


STORE = """
shl.b32 %r30, %tid, 2;
cvt.u64.u32 %rd10, %r30;
add.u64 %rd10, %rd10, %rd1;
st.global.u32 [%rd10], %r0;
"""
"""%r0 of each thread to the output."""


def values(body: str, threads: int = 32, **options) -> list[int]:
    return run("mov.u32 %r0, 0;\n" + body + STORE, results=threads, block=threads, **options)[
        1
    ].tolist()


COUNT_PENDING = """
mbarrier.arrive.shared::cta.b64 %rd3, [bar];
mbarrier.pending_count.b64 %r0, %rd3;
"""
# What each thread has in %r0 in the end.
RETURNED = {
    "the pending count of each arrival": (made(32) + COUNT_PENDING, list(range(32, 0, -1))),
    "no wait by test_wait": (f"""
        {made(33)}
        {ARRIVE} [bar];
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0;
        selp.u32 %r0, 1, 2, %p1;
    """, [2] * 32),
    # a look at whether something is ready, before the thread arrives itself
    "nothing by a try_wait where nobody can go on otherwise": (f"""
        {made(32)}
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0, 1000;
        selp.u32 %r0, 1, 2, %p1;
        {ARRIVE} [bar];
        {wait("bar", 0)}
    """, [2] * 32),
    "a smaller count after arrive_drop": (f"""
        {made(32)}
        setp.lt.u32 %p1, %tid, 8;
        @%p1 mbarrier.arrive_drop.shared::cta.b64 _, [bar];
        @!%p1 {ARRIVE} [bar];
        {wait("bar", 0)}
        bar.warp.sync -1;
        @%p1 bra END;
        {COUNT_PENDING}
        {wait("bar", 1)}
        END:
    """, [0] * 8 + list(range(24, 0, -1))),
    "an end of the wait for bytes by hand": (f"""
        {made(1)}
        @!%p0 bra WAIT;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 48;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 32;
        {EXPECT} [bar], 16;
        WAIT: {wait("bar", 0)}
    """, [0] * 32),
    "the same by generic addresses": ("""
        mov.u64 %rd4, bar;
        cvta.shared.u64 %rd4, %rd4;
        @%p0 mbarrier.init.b64 [%rd4], 32;
        bar.sync 0;
        mbarrier.arrive.b64 %rd3, [%rd4];
        mbarrier.test_wait.b64 %p1, [%rd4], %rd3;
        selp.u32 %r0, 1, 2, %p1;
    """, [1] * 32),
    "the count of a new object after inval": (f"""
        {made(32)}
        {ARRIVE} [bar];
        bar.sync 0;
        @%p0 mbarrier.inval.shared::cta.b64 [bar];
        @%p0 st.shared.u64 [bar], 7;
        @%p0 {INIT} [bar], 64;
        bar.sync 0;
        {COUNT_PENDING}
    """, list(range(64, 32, -1))),
}  # fmt: skip


class TestWhatTheyReturn:
    @pytest.mark.parametrize(("body", "returned"), RETURNED.values(), ids=RETURNED)
    def test_it_is(self, body, returned):
        assert values(body) == returned

    def test_a_count_of_arrivals(self):
        body = f"""
        {made(40)}
        @!%p0 bra WAIT;
        mbarrier.arrive.noComplete.shared::cta.b64 %rd3, [bar], 30;
        mbarrier.pending_count.b64 %r1, %rd3;
        mbarrier.arrive.shared::cta.b64 %rd3, [bar], 10;
        mbarrier.pending_count.b64 %r0, %rd3;
        add.u32 %r0, %r0, %r1;
        WAIT: {wait("bar", 0)}
        """
        assert values(body)[0] == 50

    @pytest.mark.parametrize("how", ["test_wait", "try_wait"])
    def test_waits_by_state_and_by_parity(self, how):
        body = f"""
        {made(32)}
        mbarrier.{how}.parity.shared::cta.b64 %p1, [bar], 1; // the phase before the first
        mbarrier.arrive.shared::cta.b64 %rd3, [bar];
        mbarrier.{how}.shared::cta.b64 %p2, [bar], %rd3;
        mbarrier.{how}.parity.shared::cta.b64 %p3, [bar], 0;
        selp.u32 %r0, 1, 0, %p1;
        selp.u32 %r1, 2, 0, %p2;
        selp.u32 %r2, 4, 0, %p3;
        add.u32 %r0, %r0, %r1;
        add.u32 %r0, %r0, %r2;
        """
        assert values(body) == [7] * 32


class TestSleeping:
    WAITING = f"""
    {made(1)}
    mov.u32 %r0, 0;
    setp.lt.u32 %p1, %tid, 32;
    @%p1 bra WORK;
    {wait("bar", 0)}
    bra END;
    WORK:
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p2, %r0, 500;
    @%p2 bra WORK;
    @%p0 {ARRIVE} [bar];
    END:
    """

    def counts(self, **options):
        by_opcode = run(self.WAITING, block=96, **options)[0].counters.by_opcode()
        return by_opcode["mbarrier.try_wait.parity.shared::cta.b64"].instructions

    def test_who_waits_does_not_spin(self):
        assert self.counts() == 2

    def test_but_may_give_up_at_random(self):
        assert len({self.counts(seed=seed) for seed in range(20)}) > 1

    def test_who_polls_gets_his_bytes(self):
        body = f"""
        {made(1)}
        @%p0 {EXPECT} [bar], 128;
        @%p0 {LOAD_BYTES} [smem], [%rd0], 128, [bar];
        {wait("bar", 0, "test_wait")}
        shl.b32 %r1, %tid, 2;
        mov.u32 %r2, smem;
        add.u32 %r1, %r1, %r2;
        ld.shared.u32 %r0, [%r1];
        """
        assert values(body, data=np.arange(32, dtype=np.float32)[None]) == (
            np.arange(32, dtype=np.float32).view(np.uint32).tolist()
        )


def handed_over(arrive: str = ARRIVE, how: str = "try_wait", waits: str = "") -> str:
    """Warp 0 writes, warp 1 reads; between the two stands an object."""
    return f"""
    {made(32)}
    shl.b32 %r1, %lane, 2;
    mov.u32 %r2, smem;
    add.u32 %r1, %r1, %r2;
    setp.eq.u32 %p1, %warp, 1;
    @%p1 bra READ;
    st.shared.u32 [%r1], %tid;
    {arrive} [bar];
    bra END;
    READ:
    {waits}
    {wait("bar", 0, how)}
    PASSED:
    ld.shared.u32 %r0, [%r1];
    END:
    """


class TestOrder:
    ONE_WAITS = "setp.ne.u32 %p2, %lane, 5;\n@%p2 bra PASSED;"
    ACQUIRES = handed_over().replace("parity.shared", "parity.acquire.cta.shared")
    RELAXED = handed_over().replace("parity.shared", "parity.relaxed.cta.shared")
    TELLS = handed_over(waits=ONE_WAITS).replace("PASSED:", "PASSED: bar.warp.sync -1;")

    @pytest.mark.parametrize(
        "body",
        [handed_over(how="test_wait"), handed_over(), ACQUIRES, TELLS],
        ids=["test_wait", "try_wait", "try_wait.acquire", "one who waits and tells the others"],
    )
    def test_arrivals_release_and_waits_acquire(self, body):
        assert values(body, threads=64)[32:] == list(range(32))

    @pytest.mark.parametrize(
        "body",
        [
            handed_over(ARRIVE.replace("arrive", "arrive.relaxed.cta")),
            RELAXED,
            handed_over(waits=ONE_WAITS),
        ],
        ids=["a relaxed arrival", "a relaxed wait", "one who waits and tells nobody"],
    )
    def test_is_missing_with(self, body):
        with pytest.raises(RaceError, match=r"read of shared address .* and write by warp 0"):
            values(body, threads=64)


class TestCopiesByThreads:
    """cp.async.mbarrier.arrive"""

    def body(self, arrive="cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];", count=32):
        return f"""
        {made(count)}
        shl.b32 %r1, %lane, 4;
        cvt.u64.u32 %rd4, %r1;
        add.u64 %rd4, %rd4, %rd0;
        mov.u32 %r2, smem;
        add.u32 %r1, %r1, %r2;
        setp.eq.u32 %p1, %warp, 1;
        @%p1 bra READ;
        cp.async.cg.shared.global [%r1], [%rd4], 16;
        {arrive}
        bra END;
        READ: {wait("bar", 0)}
        ld.shared.u32 %r0, [%r1];
        END: cp.async.wait_all;
        """

    DATA = np.arange(128, dtype=np.uint32).view(np.float32)[None]
    WANTED = tuple(range(0, 128, 4))

    @pytest.mark.parametrize("seed", [None, 1, 2, 3])
    def test_arrive_when_they_are_complete(self, seed):
        assert values(self.body(), 64, data=self.DATA, seed=seed)[32:] == [*self.WANTED]

    def test_without_noinc_they_are_waited_for_besides(self):
        """Each thread adds the arrival that its copy then makes."""
        arrive = f"cp.async.mbarrier.arrive.shared::cta.b64 [bar];\n{ARRIVE} [bar];"
        assert values(self.body(arrive), 64, data=self.DATA)[32:] == [*self.WANTED]

    def test_an_ordinary_arrival_does_not_wait_for_them(self):
        with pytest.raises(PendingCopyError, match=r"cp.async at .*\n.*will write"):
            values(self.body(f"{ARRIVE} [bar];"), 64, data=self.DATA)

    def test_a_copy_after_the_arrival(self):
        late = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];\n"
        late += "cp.async.cg.shared.global [%r1+512], [%rd4], 16;"
        body = self.body(late).replace("ld.shared.u32 %r0, [%r1];", "ld.shared.u32 %r0, [%r1+512];")
        with pytest.raises(RaceError, match=r"512 and write by warp 0 at .*cp\.async"):
            values(body, 64, data=self.DATA)


class TestMisuse:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (f"{ARRIVE} [bar];", "there is no mbarrier object"),
            (f"{made(32)}mbarrier.inval.shared::cta.b64 [bar];", "32 lanes .* end the same object"),
            (
                f"{made(33)}{ARRIVE} [bar];\nsetp.eq.u32 %p1, %tid, 31;\n@%p1 bra LATE;\n"
                f"{wait('bar', 0)}bra END;\nLATE: mbarrier.inval.shared::cta.b64 [bar];\nEND:",
                r"no mbarrier object: mbarrier.inval has ended it at .*mbarrier\.inval",
            ),
            (f"{made(1)}@%p0 {INIT} [bar], 1;", "lives since .*end it by mbarrier.inval"),
            (f"{INIT} [bar], 1;", "32 lanes .* make the same object"),
            (f"@%p0 {INIT} [bar], 0;", "a count of 0 arrivals: give 1 to 1048575"),
            (f"{made(31)}{ARRIVE} [bar];", "32 arrivals where the current phase waits for 31"),
            (
                f"{made(1)}@%p0 {ARRIVE} [bar];\n@%p0 {ARRIVE} [bar];",
                "an arrival in phase 1 before any thread has seen phase 0 complete",
            ),
            (
                f"{made(1)}@%p0 mbarrier.arrive.noComplete.shared::cta.b64 _, [bar], 1;",
                ".noComplete completes the phase",
            ),
            (
                f"{made(1)}mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 2;",
                "a phase parity of 2: give 0 or 1",
            ),
            (
                f"{made(1)}@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048576;",
                "1048576 bytes expected besides 0: a tx-count is at most",
            ),
            (f"{made(1)}ld.shared.u64 %rd3, [bar];", "read of .*, where the mbarrier object lives"),
            (f"{made(1)}st.shared.u32 [bar+4], 1;", "write of .*, where the mbarrier object lives"),
            (
                f"{made(1)}@%p0 {EXPECT} [bar], 16;\n@%p0 {LOAD_BYTES} [bar], [%rd0], 16, [bar];",
                "write by TMA .*, where the mbarrier object lives",
            ),
        ],
    )
    def test_is_an_error(self, body, words):
        with pytest.raises(MbarrierError, match=words):
            run(body, block=32)

    def test_its_message_tells_how_the_object_stands(self):
        with pytest.raises(MbarrierError) as error:
            run(f"{made(31)}{ARRIVE} [bar];", block=32)
        text = str(error.value)
        assert "mbarrier at 0x2000: phase 0 (parity 0) waits for 31 of 31 arrivals\n" in text
        assert "PTX line" in text and "by block (0, 0, 0) warp 0 lane 0" in text

    @pytest.mark.parametrize(
        ("address", "error"), [("bar+4", MisalignedError), ("smem+1048576", OutOfBoundsError)]
    )
    def test_places_that_cannot_be(self, address, error):
        with pytest.raises(error):
            run(f"@%p0 {INIT} [{address}], 1;", block=32)

    def test_an_address_of_global_memory(self):
        with pytest.raises(OutOfBoundsError, match="not one of shared memory"):
            run("mbarrier.arrive.b64 _, [%rd0];", block=32)


class TestDeadlock:
    def test_every_thread_that_waits_is_told_of(self):
        body = f"""
        {made(2)}
        @%p0 {ARRIVE} [bar];
        setp.eq.u32 %p1, %warp, 1;
        @%p1 bar.sync 1, 64;
        {wait("bar", 0)}
        """
        with pytest.raises(DeadlockError) as error:
            run(body, block=64)
        text = str(error.value)
        assert "32 threads (warp 0 of block (0, 0, 0)) wait" in text
        assert "for parity 0 of the mbarrier at 0x2000: phase 0 (parity 0) waits for 1 of 2" in text
        assert "the last arrival is that of block (0, 0, 0) warp 0 lane 0 at" in text
        assert "32 of 64 threads wait, 0 have ended" in text
