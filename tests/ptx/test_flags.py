"""Release and acquire through a flag in shared memory order what threads do (PTX ISA 9.0, "Release
and Acquire Patterns"); without the one or the other it is a race."""

import pytest
from ptx_snippets import run_body

from flash_helpers.ptx import RaceError

DECLARATIONS = """
.reg .pred %p, %q, %first;
.reg .b32 %r<20>;
.reg .b64 %rd<4>;
.shared .align 16 .b8 data[512];
.shared .align 4 .u32 flag;
"""
# The warps after the first one wait for the flag, and read what the first one wrote.
KERNEL = """
mov.u32 %r0, %tid.x;
and.b32 %r1, %r0, 31;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, data;
add.u32 %r4, %r3, %r2;
mov.u32 %r5, flag;
cvta.shared.u64 %rd0, data;
add.u64 %rd1, %rd0, 512;
setp.eq.u32 %first, %r0, 0;
setp.lt.u32 %p, %r0, 32;
@%first st.shared.u32 [flag], 0;
bar.sync 0;
@!%p bra WAIT;
st.shared.u32 [%r4], %r0;
{release}
bra.uni DONE;
WAIT:
{acquire}
ld.shared.u32 %r7, [%r4];
setp.ne.u32 %q, %r7, %r1;
@%q trap;
{after}
DONE:
"""
SYNC = "bar.warp.sync -1;\n"
SPIN = "{load}\nsetp.ne.u32 %q, %r6, {value};\n@%q bra WAIT;\n"


def run(release, acquire, after="", threads=96):
    body = KERNEL.format(release=release, acquire=acquire, after=after)
    return run_body(body, DECLARATIONS, threads)


def spin(load, value=1):
    return SPIN.format(load=load, value=value)


# As nvcc writes them: cuda::atomic_ref, __threadfence_block with a volatile flag, atomics.
RELEASES = {
    "st.release": SYNC + "@%first st.release.cta.shared.u32 [flag], 1;",
    "generic st.release": SYNC + "@%first st.release.gpu.b32 [%rd1], 1;",
    "red.release": SYNC + "@%first red.release.cta.shared.add.u32 [flag], 1;",
    "atom.exch.release": SYNC + "@%first atom.release.cta.shared.exch.b32 %r8, [flag], 1;",
    "atom.acq_rel": SYNC + "@%first atom.acq_rel.sys.shared.add.u32 %r8, [flag], 1;",
    "fence, st.relaxed": SYNC + "fence.acq_rel.cta;\n@%first st.relaxed.cta.shared.u32 [flag], 1;",
    "fence.release": SYNC + "fence.release.cta;\n@%first st.relaxed.cta.shared.u32 [flag], 1;",
    "membar, st.volatile": SYNC + "membar.cta;\n@%first st.volatile.shared.u32 [flag], 1;",
    "membar, red": SYNC + "membar.gl;\n@%first red.shared.add.u32 [flag], 1;",
    # Every lane fences what it wrote itself.
    "membar of each, st.volatile": f"membar.cta;\n{SYNC}@%first st.volatile.shared.u32 [flag], 1;",
}
ACQUIRES = {
    "ld.acquire": spin("ld.acquire.cta.shared.u32 %r6, [flag];"),
    "generic ld.acquire": spin("ld.acquire.gpu.b32 %r6, [%rd1];"),
    "atom.acquire": spin("atom.acquire.cta.shared.or.b32 %r6, [flag], 0;"),
    "ld.relaxed, fence": spin("ld.relaxed.cta.shared.u32 %r6, [flag];") + "fence.acq_rel.cta;",
    "ld.relaxed, fence.acquire": spin("ld.relaxed.cta.shared.u32 %r6, [flag];")
    + "fence.acquire.cta;",
    "ld.volatile, membar": spin("ld.volatile.shared.u32 %r6, [flag];") + "membar.cta;",
    "atom, membar": spin("atom.shared.add.u32 %r6, [flag], 0;") + "membar.cta;",
}
NO_RELEASES = {
    "st.relaxed": SYNC + "@%first st.relaxed.cta.shared.u32 [flag], 1;",
    "st.volatile": SYNC + "@%first st.volatile.shared.u32 [flag], 1;",
    "red": SYNC + "@%first red.shared.add.u32 [flag], 1;",
    "fence behind": SYNC + "@%first st.relaxed.cta.shared.u32 [flag], 1;\nfence.acq_rel.cta;",
    "fence that only acquires": SYNC
    + "fence.acquire.cta;\n@%first st.relaxed.cta.shared.u32 [flag], 1;",
    "fence between proxies": SYNC
    + "fence.proxy.async;\n@%first st.relaxed.cta.shared.u32 [flag], 1;",
    "st.release without the other lanes": "@%first st.release.cta.shared.u32 [flag], 1;",
}
NO_ACQUIRES = {
    "ld.relaxed": spin("ld.relaxed.cta.shared.u32 %r6, [flag];"),
    "ld.volatile": spin("ld.volatile.shared.u32 %r6, [flag];"),
    "atom.release": spin("atom.release.cta.shared.add.u32 %r6, [flag], 0;"),
    "fence before": "membar.cta;\n" + spin("ld.relaxed.cta.shared.u32 %r6, [flag];"),
    "fence that only releases": spin("ld.relaxed.cta.shared.u32 %r6, [flag];")
    + "fence.release.cta;",
}


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("release", RELEASES)
def test_a_flag_orders(release, acquire):
    run(RELEASES[release], ACQUIRES[acquire])


@pytest.mark.parametrize("release", NO_RELEASES)
def test_without_a_release_it_is_a_race(release):
    with pytest.raises(RaceError, match=r"read of shared address .* and write by warp 0"):
        run(NO_RELEASES[release], ACQUIRES["ld.acquire"])


@pytest.mark.parametrize("acquire", NO_ACQUIRES)
def test_without_an_acquire_it_is_a_race(acquire):
    with pytest.raises(RaceError, match=r"read of shared address .* and write by warp 0"):
        run(RELEASES["st.release"], NO_ACQUIRES[acquire])


def test_what_is_written_behind_the_release_is_not_ordered():
    with pytest.raises(RaceError, match="and write by warp 0"):
        run(RELEASES["st.release"] + "\nst.shared.u32 [%r4], %r0;", ACQUIRES["ld.acquire"])


def test_only_the_thread_that_acquires_is_ordered():
    """Lane 0 of a warp waits for all: they need a barrier of the warp."""
    one = "setp.eq.u32 %q, %r1, 0;\n@!%q bra MEET;\nSPIN:\n" + spin(
        "ld.acquire.cta.shared.u32 %r6, [flag];"
    ).replace("WAIT", "SPIN")
    run(RELEASES["st.release"], f"{one}MEET:\n{SYNC}", threads=64)
    with pytest.raises(RaceError):
        run(RELEASES["st.release"], f"{one}MEET:", threads=64)


def test_a_barrier_passes_on_what_one_thread_has_acquired():
    one = "setp.eq.u32 %q, %r0, 32;\n@!%q bra MEET;\nSPIN:\n" + spin(
        "ld.acquire.cta.shared.u32 %r6, [flag];"
    ).replace("WAIT", "SPIN")
    run(RELEASES["st.release"], f"{one}MEET:\nbar.sync 1, 64;")


def test_every_lane_counts_itself():
    count = "red.release.cta.shared.add.u32 [flag], 1;"
    run(count, spin("ld.acquire.cta.shared.u32 %r6, [flag];", 32))
    with pytest.raises(RaceError):
        run(count.replace("release", "relaxed"), spin("ld.acquire.cta.shared.u32 %r6, [flag];", 32))


def test_updates_by_others_keep_what_was_released():
    """Warp 1 counts on without ordering anything; warp 2 waits for both."""
    body = """
    setp.lt.u32 %q, %r0, 64;
    @!%q bra LAST;
    ONE:
    ld.relaxed.cta.shared.u32 %r6, [flag];
    setp.ne.u32 %q, %r6, 1;
    @%q bra ONE;
    setp.eq.u32 %q, %r1, 0;
    {count}
    bra.uni DONE;
    LAST:
    ld.acquire.cta.shared.u32 %r6, [flag];
    setp.ne.u32 %q, %r6, 2;
    @%q bra LAST;
    """
    count = "{}bar.warp.sync -1;\n@%q {} [flag], {};"
    update = count.format("", "red.relaxed.cta.shared.add.u32", 1)
    run(RELEASES["st.release"], body.format(count=update))
    for write in ("st.relaxed.cta.shared.u32", "st.shared.u32"):
        with pytest.raises(RaceError):
            run(RELEASES["st.release"], body.format(count=count.format("", write, 2)))


def test_data_may_be_written_again_when_the_reader_has_released_it():
    release = RELEASES["st.release"] + "\nBACK:\n" + spin(
        "ld.acquire.cta.shared.u32 %r6, [flag];", 2
    ).replace("WAIT", "BACK") + "st.shared.u32 [%r4], 5;"  # fmt: skip
    back = "setp.eq.u32 %q, %r0, 32;\n@%q st.release.cta.shared.u32 [flag], 2;"
    run(release, ACQUIRES["ld.acquire"], SYNC + back, threads=64)
    with pytest.raises(RaceError, match=r"write of shared address .* and read by warp 1"):
        run(release, ACQUIRES["ld.acquire"], back, threads=64)
    with pytest.raises(RaceError, match=r"write of shared address .* and read by warp 1"):
        run(release, ACQUIRES["ld.acquire"], SYNC + back.replace("release", "relaxed"), threads=64)


def test_a_lock():
    """Each warp adds to a sum in its turn."""
    lock = """
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 31;
    setp.ne.u32 %q, %r0, 0;
    @%q bra READY;
    st.shared.u32 [flag], 0;
    st.shared.u32 [data], 0;
    READY:
    bar.sync 0;
    setp.ne.u32 %q, %r1, 0;
    @%q bra DONE;
    LOCK:
    atom.shared.cas.b32 %r6, [flag], 0, 1;
    setp.ne.u32 %q, %r6, 0;
    @%q bra LOCK;
    {acquire}
    ld.shared.u32 %r7, [data];
    add.u32 %r7, %r7, 1;
    st.shared.u32 [data], %r7;
    {release}
    atom.shared.exch.b32 %r8, [flag], 0;
    DONE:
    bar.sync 0;
    ld.shared.u32 %r7, [data];
    setp.ne.u32 %q, %r7, 3;
    @%q trap;
    """
    run_body(lock.format(acquire="membar.cta;", release="membar.cta;"), DECLARATIONS, 96)
    for missing in ("acquire", "release"):
        parts = {"acquire": "membar.cta;", "release": "membar.cta;", missing: ""}
        with pytest.raises(RaceError):
            run_body(lock.format(**parts), DECLARATIONS, 96)
