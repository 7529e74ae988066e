"""Barriers of some warps of a block: which warps complete them, and with what counts."""

import pytest
from ptx_snippets import run_body

from flash_helpers.ptx import BarrierOperandError, MixedArrivalsError

DECLARATIONS = ".reg .b32 %r<8>; .reg .pred %p<8>; .shared .b32 word;"
# Warp 0 goes on, the others branch to their labels.
START = """
mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [word], 0; bar.sync 0;
shr.u32 %r1, %r0, 5; mov.u32 %r2, 0;
setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r1, 2; setp.eq.u32 %p3, %r1, 3;
@%p1 bra ONE; @%p2 bra TWO; @%p3 bra THREE;
"""


def run(*warps: str, threads: int = 0) -> None:
    """Runs a block. `warps`: the code of each warp."""
    labels = ("", "ONE:", "TWO:", "THREE:")
    bodies = [*warps, *[""] * (4 - len(warps))]
    code = " bra END;\n".join(label + body for label, body in zip(labels, bodies, strict=True))
    text = f"{START}{code}\nEND:"
    run_body(text, DECLARATIONS, threads or 32 * len(warps))


def repeated(times: int, body: str, name: str) -> str:
    return f"{name}: {body} add.u32 %r2, %r2, 1; setp.lt.u32 %p4, %r2, {times}; @%p4 bra {name};"


SYNC, ARRIVE, ALL = "bar.sync 1, 64;", "bar.arrive 1, 64;", "bar.sync 0;"
LEGAL = {
    "two warps that meet at different places": (SYNC + ARRIVE, SYNC + SYNC),
    "a pair after another, with a barrier of all between": (
        SYNC + ALL, SYNC + ALL, ALL + SYNC, ALL + SYNC,
    ),
    "another count after a barrier of all": (
        SYNC + ALL + "bar.sync 1, 96;", SYNC + ALL + "bar.sync 1, 96;", ALL + "bar.sync 1, 96;",
    ),
    "a barrier of all in every branch": (ALL + ALL, ALL + ALL, ALL + ALL, ALL + ALL),
    "a barrier of each warp alone": ("bar.sync 1, 32;" * 2, "bar.sync 1, 32;", "bar.sync 1, 32;"),
    "turns, the first of which its warp gives itself": (
        "bar.arrive 1, 64;" + repeated(3, "bar.sync 1, 64; bar.arrive 2, 64;", "L0"),
        repeated(3, "bar.sync 2, 64; bar.arrive 1, 64;", "L1"),
    ),
    "the same in a block of these warps and a third": (
        "bar.arrive 1, 64;" + repeated(3, "bar.sync 1, 64; bar.arrive 2, 64;", "L0"),
        repeated(3, "bar.sync 2, 64; bar.arrive 1, 64;", "L1"),
        "",
    ),
    "turns of three": tuple(
        ("bar.arrive 1, 64;" if w == 0 else "")
        + repeated(2, f"bar.sync {w + 1}, 64; bar.arrive {(w + 1) % 3 + 1}, 64;", f"L{w}")
        for w in range(3)
    ),
    "a producer that waits until its buffer is empty": (
        repeated(3, "bar.sync 2, 64; bar.arrive 1, 64;", "L0"),
        "bar.arrive 2, 64;" + repeated(3, "bar.sync 1, 64; bar.arrive 2, 64;", "L1"),
    ),
    "two groups that a flag orders": (
        SYNC + "st.release.cta.shared.u32 [word], 1;",
        SYNC,
        "SPIN: ld.acquire.cta.shared.u32 %r3, [word]; setp.eq.u32 %p4, %r3, 0; @%p4 bra SPIN;"
        + SYNC,
        "SPIN3: ld.acquire.cta.shared.u32 %r3, [word]; setp.eq.u32 %p4, %r3, 0; @%p4 bra SPIN3;"
        + SYNC,
    ),
}  # fmt: skip


@pytest.mark.parametrize("warps", LEGAL.values(), ids=LEGAL)
def test_nothing_is_said_of(warps: tuple[str, ...]) -> None:
    run(*warps)


COUNTS = {
    "of a wait and an arrival": ("bar.sync 1, 96;", "bar.sync 1, 96;", "bar.arrive 1, 128;", ""),
    "of two waits": ("bar.sync 1, 64;", "bar.sync 1, 96;", "bar.sync 1, 96;"),
    "of the whole block and some warps": ("bar.sync 1;", "bar.sync 1, 64;", "bar.sync 1;"),
    "in registers of one warp": (
        "setp.lt.u32 %p4, %r0, 16; selp.u32 %r3, 64, 96, %p4; barrier.sync 1, %r3;", "", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("warps", COUNTS.values(), ids=COUNTS)
def test_counts_that_differ(warps: tuple[str, ...]) -> None:
    words = r"barrier 1 waits for \d+ threads here, and for \d+ where\n +warp.* arrived at"
    with pytest.raises(BarrierOperandError, match=words):
        run(*warps)


MIXED = {
    "two pairs at one time": (SYNC, SYNC, SYNC, SYNC),
    "two pairs, one after a barrier with the first alone": (
        SYNC + "bar.arrive 2, 64;", SYNC, "bar.sync 2, 64;" + SYNC, SYNC,
    ),
    "two consumers of one producer": (ARRIVE + ARRIVE.replace("1", "2", 1), SYNC, SYNC, ARRIVE),
    "an arrival for the next turn that nothing holds back": (
        SYNC + SYNC, ARRIVE + ARRIVE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("warps", MIXED.values(), ids=MIXED)
def test_arrivals_that_may_mix(warps: tuple[str, ...]) -> None:
    words = r"may arrive at barrier 1 before warps? .*\n +since nothing orders the two: the 64"
    with pytest.raises(MixedArrivalsError, match=words):
        run(*warps)


@pytest.mark.parametrize("threads", [64, 96])
def test_a_warp_that_arrives_twice_before_the_other_has_come(threads: int) -> None:
    """The other waits at barrier 4 first, so that it would wait at barrier 2 for ever."""
    arrives = "bar.arrive 2, 64; bar.arrive 2, 64; bar.arrive 4, 64;"
    with pytest.raises(BarrierOperandError, match="a second arrival at barrier 2, where warp 0"):
        run(arrives, "bar.sync 4, 64; bar.sync 2, 64; bar.sync 2, 64;", threads=threads)
