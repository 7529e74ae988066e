"""Waits for an mbarrier that are tried again, and those that are not."""

import numpy as np
import pytest
from ptx_snippets import entry
from tma_snippets import BARRIER_INITS, EXPECT, INIT, LOAD_BYTES, run, wait

from flash_helpers.ptx import PendingCopyError, load_ptx

TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;"
MAIN = "MAIN: {} add.u32 %r0, %r0, 1; setp.lt.u32 %p2, %r0, 3; @%p2 bra MAIN;"
LOOPED = {
    "while it is false": f"L: {TRY} @!%p1 bra L;",
    "until it is true": f"L: {TRY} @%p1 bra DONE; bra L; DONE:",
    "by a number": f"L: {TRY} selp.u32 %r1, 1, 0, %p1; setp.eq.u32 %p3, %r1, 0; @%p3 bra L;",
    "by the vote of a warp": f"L: {TRY} vote.sync.all.pred %p3, %p1, -1; @!%p3 bra L;",
    "with a trap after many times": (
        f"L: {TRY} @%p1 bra DONE; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 99; @%p3 bra L; trap;"
        "DONE:"
    ),
    "where another loop begins": f"MAIN: {TRY} @!%p1 bra MAIN; add.u32 %r0, %r0, 1; bra MAIN;",
    "in a loop": MAIN.format(f"mov.u32 %r2, 0; L: {TRY} @!%p1 bra L;"),
}
ONCE = {
    "whose answer is not used": TRY,
    "whose answer is stored": f"{TRY} selp.u32 %r1, 1, 0, %p1; st.global.u32 [%rd1], %r1;",
    "in a loop over other things": MAIN.format(TRY),
    "before the loop that waits": f"{TRY} @%p1 bra DONE; {wait('bar', 0)} DONE:",
    "the same in a loop": MAIN.format(f"{TRY} @%p1 bra DONE; {wait('bar', 0)} DONE:"),
}


def retried(body: str) -> list[bool]:
    """For each wait of a body, whether a loop tries it again."""
    declarations = ".reg .pred %p<8>; .reg .b32 %r<4>; .reg .b64 %rd<2>; .shared .b64 bar;"
    program = load_ptx(entry(body, "", declarations)).kernel("k").program
    waits = [p for p, i in enumerate(program.instructions) if i.has("try_wait")]
    return [position in program.retried for position in waits]


@pytest.mark.parametrize("body", LOOPED.values(), ids=LOOPED)
def test_a_loop_tries_again(body: str) -> None:
    assert retried(body) == [True]


@pytest.mark.parametrize("body", ONCE.values(), ids=ONCE)
def test_a_wait_that_stands_alone(body: str) -> None:
    assert not retried(body)[0]
    assert all(retried(body)[1:])


def loaded(waits: str, **options: object) -> list[float]:
    """What all threads read of a copy after a wait."""
    body = f"""
    @%p0 {INIT} [bar], 1;
    @%p0 {BARRIER_INITS}
    @%p0 {EXPECT} [bar], 256;
    @%p0 {LOAD_BYTES} [smem], [%rd0], 256, [bar];
    bar.sync 0;
    {waits}
    shl.b32 %r1, %tid, 2;
    mov.u32 %r2, smem;
    add.u32 %r2, %r1, %r2;
    ld.shared.u32 %r3, [%r2];
    cvt.u64.u32 %rd4, %r1;
    add.u64 %rd4, %rd4, %rd1;
    st.global.u32 [%rd4], %r3;
    """
    return run(body, results=64, **options)[1].view(np.float32).tolist()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("how", ["try_wait", "test_wait"])
def test_one_that_is_not_tried_again_is_over_too_early(how: str, seed: int | None) -> None:
    words = r"this thread has asked at .*_wait.*\n +where the answer may be no at any time"
    with pytest.raises(PendingCopyError, match=words):
        loaded(TRY.replace("try_wait", how), seed=seed)


SPINS = f"SPIN: {TRY} selp.u32 %r4, 1, 0, %p1; st.shared.u32 [smem+4096], %r4; {{}} bra SPIN; OUT:"


@pytest.mark.parametrize(
    ("waits", "block"),
    [
        (ONCE["before the loop that waits"], 64),
        # By memory, which is not followed.
        (SPINS.format("ld.shared.u32 %r5, [smem+4096]; setp.eq.u32 %p3, %r5, 1; @%p3 bra OUT;"), 1),
    ],
    ids=["one that looks before a loop waits", "a loop that looks like none"],
)
def test_is_right(waits: str, block: int) -> None:
    assert loaded(waits, block=block)[:block] == [*range(block)]
