"""Kernels of three designs that copy by TMA, and what is found of mistakes planted in them."""

import re

import numpy as np
import pytest
from tma_snippets import (
    ARRIVE,
    BARRIER_INITS,
    EXPECT,
    INIT,
    LOAD,
    LOAD_BYTES,
    run,
    wait,
    with_fault,
)

from flash_helpers.ptx import (
    DeadlockError,
    MbarrierError,
    Observer,
    OutlivedError,
    PendingCopyError,
    ProxyError,
    RaceError,
)
from flash_helpers.ptx.run.execute.sleepers import Sleepers
from flash_helpers.ptx.run.watch.agents import AgentWatch

TILES = 6

PRODUCER_WAIT, CONSUMER_WAIT = wait("%r4+16", "%r5"), wait("%r4", "%r2")
READ = "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r3];\n"
RELEASE = f"bar.warp.sync -1;\nsetp.eq.u32 %p2, %lane, 0;\n@%p2 {ARRIVE} [%r4+16];"
# A producer warp, of which one thread loads boxes of 4 rows into two slots, and a consumer warp
# that reads them and stores them elsewhere. bar: full of each slot, then empty.
RING = f"""
@!%p0 bra MADE;
{INIT} [bar], 1;
{INIT} [bar+8], 1;
{INIT} [bar+16], 1;
{INIT} [bar+24], 1;
{BARRIER_INITS}
MADE:
bar.sync 0;
mov.u32 %r0, 0; // tile
mov.u32 %r10, smem;
mov.u32 %r11, bar;
setp.ne.u32 %p1, %warp, 0;
@%p1 bra CONSUMER;
@!%p0 bra END;
PRODUCER:
and.b32 %r1, %r0, 1; // slot
shr.u32 %r2, %r0, 1;
and.b32 %r2, %r2, 1; // lap
mad.lo.u32 %r3, %r1, 512, %r10;
mad.lo.u32 %r4, %r1, 8, %r11;
xor.b32 %r5, %r2, 1;
{PRODUCER_WAIT}
{EXPECT} [%r4], 512;
shl.b32 %r6, %r0, 2;
{LOAD} [%r3], [%rd2, {{0, %r6}}], [%r4];
add.u32 %r0, %r0, 1;
setp.lt.u32 %p1, %r0, {TILES};
@%p1 bra PRODUCER;
bra END;
CONSUMER:
and.b32 %r1, %r0, 1;
shr.u32 %r2, %r0, 1;
and.b32 %r2, %r2, 1;
mad.lo.u32 %r3, %r1, 512, %r10;
mad.lo.u32 %r4, %r1, 8, %r11;
shl.b32 %r6, %lane, 4;
add.u32 %r3, %r3, %r6;
{CONSUMER_WAIT}
{READ}{RELEASE}
shl.b32 %r7, %r0, 9;
add.u32 %r7, %r7, %r6;
cvt.u64.u32 %rd3, %r7;
add.u64 %rd3, %rd3, %rd1;
st.global.v4.u32 [%rd3], {{%r20, %r21, %r22, %r23}};
add.u32 %r0, %r0, 1;
setp.lt.u32 %p1, %r0, {TILES}; // of the consumer
@%p1 bra CONSUMER;
END:
"""

CHUNKS = 4

IN_PLACE_WAIT = wait("bar", "%r3")
# One warp that does all: a bulk copy of 512 bytes into shared memory, each thread changes its
# part in place, and a bulk copy takes it to global memory.
IN_PLACE = f"""
@%p0 {INIT} [bar], 1;
bar.sync 0;
mov.u32 %r0, 0; // chunk
shl.b32 %r1, %tid, 4;
mov.u32 %r2, smem;
add.u32 %r1, %r1, %r2;
NEXT:
@!%p0 bra LOADED;
{EXPECT} [bar], 512;
{LOAD_BYTES} [smem], [%rd0], 512, [bar];
LOADED:
and.b32 %r3, %r0, 1;
{IN_PLACE_WAIT}
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r1];
xor.b32 %r20, %r20, -1;
st.shared.v4.u32 [%r1], {{%r20, %r21, %r22, %r23}};
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p0 bra STORED;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
STORED:
bar.sync 0;
add.u64 %rd0, %rd0, 512;
add.u64 %rd1, %rd1, 512;
add.u32 %r0, %r0, 1;
setp.lt.u32 %p1, %r0, {CHUNKS};
@%p1 bra NEXT;
"""

# Two warps with a slot each. A lane of each warp loads for the other, which waits by the state that
# its arrival has returned; what the slot held before was written by ordinary stores.
EXCHANGE = f"""
setp.eq.u32 %p1, %lane, 0;
shl.b32 %r0, %warp, 9;
mov.u32 %r1, smem;
add.u32 %r1, %r1, %r0; // own slot
xor.b32 %r2, %r1, 512; // the other's
shl.b32 %r3, %warp, 3;
mov.u32 %r4, bar;
add.u32 %r4, %r4, %r3; // own barrier
xor.b32 %r5, %r4, 8;
@%p1 {INIT} [%r4], 33; // one warp, and who loads
shl.b32 %r6, %lane, 4;
add.u32 %r6, %r6, %r1;
st.shared.v4.u32 [%r6], {{%tid, %tid, %tid, %tid}};
fence.proxy.async;
bar.sync 0;
@!%p1 bra ARRIVE;
{EXPECT} [%r5], 512;
shl.b32 %r7, %warp, 2;
{LOAD} [%r2], [%rd2, {{0, %r7}}], [%r5];
ARRIVE:
mbarrier.arrive.shared::cta.b64 %rd3, [%r4];
AGAIN:
mbarrier.try_wait.shared::cta.b64 %p2, [%r4], %rd3;
@!%p2 bra AGAIN;
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r6];
shl.b32 %r8, %tid, 4;
cvt.u64.u32 %rd4, %r8;
add.u64 %rd4, %rd4, %rd1;
st.global.v4.u32 [%rd4], {{%r20, %r21, %r22, %r23}};
"""

DATA = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
WORDS = DATA.view(np.uint32).reshape(-1)
BLOCKS = {RING: 64, IN_PLACE: 32, EXCHANGE: 64}


def expected(kernel) -> np.ndarray:
    if kernel is RING:
        return WORDS[: TILES * 128]
    if kernel is IN_PLACE:
        words = WORDS[: CHUNKS * 128].reshape(-1, 4).copy()
        words[:, 0] ^= 0xFFFF_FFFF
        return words.reshape(-1)
    return WORDS[:256].reshape(2, 128)[::-1].reshape(-1)


@pytest.mark.parametrize("kernel", BLOCKS, ids=["ring", "in place", "exchange"])
@pytest.mark.parametrize("seed", [None, *range(8)])
def test_they_work_whenever_copies_complete(kernel, seed):
    wanted = expected(kernel)
    _, found = run(kernel, block=BLOCKS[kernel], results=wanted.size, seed=seed)
    assert np.array_equal(found, wanted)


def test_several_blocks_side_by_side_read_each_tile_together():
    readers = []
    observer = Observer(
        lambda instruction: instruction.opcode == "ld.shared.v4.u32",
        lambda seen: readers.append(len(np.unique(seen.blocks, axis=0))),
    )
    _, found = run(RING, grid=3, results=TILES * 128, observer=observer)
    assert np.array_equal(found, expected(RING))
    assert readers == [3] * TILES


# kernel, right lines, wrong lines, error, words of its message
FAULTS = {
    # -- bytes that have not come
    "consumer waits for the other parity": (
        RING, CONSUMER_WAIT, wait("%r4", 1), PendingCopyError,
        "will write: no thread.*phase 0 .*512 expected.*was for parity 1, which holds before",
    ),
    "consumer does not wait": (
        RING, CONSUMER_WAIT, "", PendingCopyError, "this thread has not waited for it",
    ),
    "parity is not flipped": (
        IN_PLACE, "and.b32 %r3, %r0, 1;", "mov.u32 %r3, 0;", PendingCopyError,
        "phase 1 .*512 expected.*its last wait, at .*, was for phase 0 .parity 0",
    ),
    "one thread of the warp waits": (
        IN_PLACE, IN_PLACE_WAIT, f"@!%p0 bra PASSED;\n{IN_PLACE_WAIT}PASSED:\n", PendingCopyError,
        "read of shared address 16, which TMA for mbarrier at shared address",
    ),
    # -- bytes that have come, of which the reader does not know
    "relaxed wait": (
        EXCHANGE, "try_wait.shared::cta", "try_wait.relaxed.cta.shared::cta", RaceError,
        "read of .* and write by TMA for mbarrier .*with no wait for it between them",
    ),
    # -- slots that are still read
    "producer does not wait": (
        RING, PRODUCER_WAIT, "", MbarrierError,
        r"1 arrival where the current phase waits for 0 of 1: .*\(1024 expected, 0 came\)",
    ),
    "slot released before it is read": (
        RING, READ + RELEASE, RELEASE + READ, RaceError, "write by TMA .* and read by warp 1",
    ),
    "slot released by a thread that does not know of the others": (
        RING, "bar.warp.sync -1;", "", RaceError, "write by TMA .* and read by warp 1",
    ),
    "store's reads not waited for": (
        IN_PLACE, "cp.async.bulk.wait_group.read 0;", "", RaceError,
        "write by TMA .* and read by bulk stores of warp 0 lane 0 .*may still be going on",
    ),
    "group not committed": (
        IN_PLACE, "cp.async.bulk.commit_group;", "", RaceError, "and read by bulk stores of warp 0",
    ),
    "a group too many allowed": (
        IN_PLACE, "wait_group.read 0", "wait_group.read 1", RaceError, "and read by bulk stores",
    ),
    # -- proxies
    "store without a proxy fence": (
        IN_PLACE, "fence.proxy.async.shared::cta;", "", ProxyError,
        "read by bulk stores of warp 0 lane 0 of .* write by warp 0 .*no fence.proxy.async",
    ),
    "fence of one thread only": (
        IN_PLACE, "fence.proxy.async.shared::cta;", "@%p0 fence.proxy.async;", ProxyError,
        "no fence.proxy.async",
    ),
    "load over what was written, without a proxy fence": (
        EXCHANGE, "fence.proxy.async;", "", ProxyError, "write by TMA .* and write by warp 1",
    ),
    # -- waits without an end
    "fewer bytes expected than come": (
        RING, f"{EXPECT} [%r4], 512;", f"{EXPECT} [%r4], 256;", DeadlockError,
        r"1 thread \(warp 0.*waits\n.*parity 0 of the mbarrier at .*\(256 expected, 512 came\)",
    ),
    "more bytes expected than come": (
        IN_PLACE, f"{EXPECT} [bar], 512;", f"{EXPECT} [bar], 528;", DeadlockError,
        r"32 threads \(warp 0 .*waits for 0 of 1 arrival and 16 bytes \(528 expected, 512 came\)",
    ),
    "more arrivals expected than come": (
        RING, f"{INIT} [bar+16], 1;", f"{INIT} [bar+16], 2;", DeadlockError,
        r"waits for 1 of 2 arrivals.*last arrival is that of block .* warp 1 lane 0 at PTX line",
    ),
    "the producer waits for the first lap": (
        RING, PRODUCER_WAIT, wait("%r4+16", "%r2"), DeadlockError, "no thread has arrived",
    ),
    "an arrival that nobody makes": (
        EXCHANGE, f"{INIT} [%r4], 33;", f"{INIT} [%r4], 34;", DeadlockError,
        "for phase 0 of the mbarrier .*waits for 1 of 34 arrivals and 0 bytes",
    ),
    # -- the objects
    "objects made after the barrier": (
        RING, "MADE:\nbar.sync 0;", "MADE:", RaceError,
        "use of the mbarrier object .* its making by warp 0 at .*init.*with no barrier",
    ),
    "an object of a warp that did not wait for its making": (
        EXCHANGE, "fence.proxy.async;\nbar.sync 0;", "fence.proxy.async;", RaceError,
        "use of the mbarrier object|there is no mbarrier object",
    ),
    "no object": (
        IN_PLACE, f"@%p0 {INIT} [bar], 1;", "", MbarrierError, "there is no mbarrier object",
    ),
    "all threads arrive": (
        RING, f"@%p2 {ARRIVE} [%r4+16];", f"{ARRIVE} [%r4+16];", MbarrierError,
        "32 arrivals where the current phase waits for 1 of 1",
    ),
    "the state of another object": (
        EXCHANGE, "try_wait.shared::cta.b64 %p2, [%r4]", "try_wait.shared::cta.b64 %p2, [%r5]",
        MbarrierError, "is not one that an arrival here returned",
    ),
    # -- at the end
    "a tile too many loaded": (
        RING, f"setp.lt.u32 %p1, %r0, {TILES}; // of the consumer",
        f"setp.lt.u32 %p1, %r0, {TILES - 1};", OutlivedError,
        "write by TMA for mbarrier .* of shared address 512, whose block has ended",
    ),
    "stores not waited for before the end": (
        IN_PLACE, "cp.async.bulk.wait_group.read 0;",
        f"setp.lt.u32 %p2, %r0, {CHUNKS - 1};\n@%p2 cp.async.bulk.wait_group.read 0;",
        OutlivedError, "read by bulk stores of warp 0 lane 0 of shared address 0, whose block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    kernel, right, wrong, error, words = FAULTS[fault]
    with pytest.raises(error) as caught:
        run(with_fault(kernel, right, wrong), block=BLOCKS[kernel])
    assert re.search(words, str(caught.value), re.S), str(caught.value)


def test_lanes_are_asked_again_once_a_phase_is_complete(monkeypatch):
    """Not after each of the copies that it waits for, which cannot wake them."""
    asked, wake = [], Sleepers.wake
    monkeypatch.setattr(Sleepers, "wake", lambda self: asked.append(1) or wake(self))
    copies = "".join(f"@%p0 {LOAD_BYTES} [smem+{16 * i}], [%rd0], 16, [bar];\n" for i in range(8))
    run(f"""
    @%p0 {INIT} [bar], 1;
    {BARRIER_INITS}
    bar.sync 0;
    @%p0 {EXPECT} [bar], 128;
    {copies}
    {wait("bar", 0)}
    """)
    assert len(asked) == 2


class TestCopiesOfOneInstruction:
    """They begin together, whichever lanes and blocks issue them."""

    def body(self, apart: int) -> str:
        """Eight lanes copy 64 bytes each to places that are so many bytes apart."""
        return f"""
        @%p0 {INIT} [bar], 1;
        {BARRIER_INITS}
        bar.sync 0;
        @%p0 {EXPECT} [bar], 512;
        mov.u32 %r0, smem;
        mad.lo.u32 %r0, %tid, {apart}, %r0;
        mul.wide.u32 %rd3, %tid, 64;
        add.u64 %rd3, %rd3, %rd0;
        setp.lt.u32 %p1, %tid, 8;
        @%p1 {LOAD_BYTES} [%r0], [%rd3], 64, [bar];
        {wait("bar", 0)}
        mad.wide.u32 %rd4, %tid, 4, %rd1;
        mad.lo.u32 %r0, %tid, 4, smem;
        ld.shared.u32 %r1, [%r0];
        st.global.u32 [%rd4], %r1;
        """

    def test_are_checked_at_once(self, monkeypatch):
        counts, begin_write = [], AgentWatch.begin_write

        def count(self, position, agents, *rest):
            counts.append(agents.size)
            return begin_write(self, position, agents, *rest)

        monkeypatch.setattr(AgentWatch, "begin_write", count)
        _, out = run(self.body(64), grid=3)
        assert counts == [24]
        assert np.array_equal(out[:64].view(np.float32), np.arange(64))

    def test_may_not_write_the_same_bytes(self):
        with pytest.raises(RaceError, match=r"twice\n.*in the same instruction"):
            run(self.body(48))
