"""Warp roles: which warps run what, with how many registers, and what bounds them."""

import json
from pathlib import Path

import pytest
from fake_backend import load_tool
from sass_text import kernel

from flash_helpers.sass.analyse.bound import Launch, loop_bound
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.phases import cold_blocks, is_replay, is_wait, main_loop
from flash_helpers.sass.analyse.report import report_on, verdicts
from flash_helpers.sass.analyse.roles import Role, roles
from flash_helpers.sass.analyse.warp_values import ways_of_warps
from flash_helpers.sass.read.reader import load_kernel
from flash_helpers.sass.read.records import Kernel
from flash_helpers.sass.show.report_text import report_json, report_text

PLANTED = Path(__file__).parent / "kernels/roles.sm_90a.cubin"
DISPATCH = [PLANTED.with_name(f"dispatch.sm_{number}.cubin") for number in ("90a", "100a")]
HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24"
# one warp group copies, the others multiply; each waits for the other
SPECIALISED = f"""
    S2R R2, SR_TID.X
    SHF.R.U32.HI R3, RZ, 0x7, R2
    ISETP.NE.AND P0, PT, R3, RZ, PT
    @P0 BRA multiply
    USETMAXREG.DEALLOC.CTAPOOL 0x18
    LOP3.LUT P1, RZ, R2, 0x60, RZ, 0xc0, !PT
    @P1 EXIT
    copy: SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4+0x10], R4
    @!P2 BRA slot
    filled: UTMALDG.2D [UR8], [UR6]
    @P3 BRA copy
    EXIT
    multiply: USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
    PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
    @!P0 BRA multiply
    tile: SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R4
    @!P2 BRA data
    there: {HGMMA}
    {HGMMA}
    FADD R5, R5, R5
    @P3 BRA tile
    EXIT
    slot: SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4+0x10], R4
    @!P2 BRA slot
    BRA filled
    data: SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R4
    @!P2 BRA data
    BRA there
"""


def facts_of(found: Kernel, threads: int = 384) -> KernelFacts:
    return KernelFacts(kernel=found, name="planted", launch=Launch(threads))


def warps_at(text: str, warps: int = 8) -> list[int]:
    """The warps that may execute the FADD of a kernel."""
    found = kernel(text)
    (block,) = {i.block for i in found.instructions if i.base == "FADD"}
    return [
        warp
        for warp, own in enumerate(ways_of_warps(found, 32 * warps, warps))
        if block in own.blocks
    ]


def named(found: Kernel, threads: int) -> dict[str, Role]:
    return {role.name: role for role in roles(found, threads)}


def test_producer_and_consumers_have_their_warps_registers_and_loops():
    found = named(kernel(SPECIALISED), 384)
    assert list(found) == ["producer", "idle", "consumer"]
    producer, idle, consumer = found.values()
    assert (producer.warps, producer.registers, producer.waits) == ((0,), 0x18, 1)
    assert (idle.warps, idle.registers, idle.working_loop) == ((1, 2, 3), 0x18, None)
    assert (consumer.warps, consumer.registers) == (tuple(range(4, 12)), 0xF0)
    assert consumer.waits == 2  # for registers, and for a tile
    assert producer.loops == (producer.working_loop,) != consumer.loops


def test_a_bound_counts_the_warps_that_run_the_loop():
    facts = facts_of(kernel(SPECIALISED, registers=128))
    loop = main_loop(facts.kernel)
    assert loop is not None and facts.resident_warps == 12
    assert facts.loop_warps(loop) == 8
    # two HGMMA of 64x128x16, 64 cycles each, of two warp groups
    assert facts.bound_cycles is not None
    assert next(iter(facts.bound_cycles.items())) == ("tensor", 2 * 2 * 64)
    text = report_text(report_on(facts))
    assert "Bound by the tensor pipe: 8 warps that run the loop take 256 cycles" in text
    assert "Lower bounds of an iteration, 8 warps that run the loop" in text
    # two blocks an SM run it twice
    assert facts_of(kernel(SPECIALISED, registers=64)).loop_warps(loop) == 16


def test_waits_are_no_loops_and_cost_nothing():
    found = kernel(SPECIALISED)
    waits = [loop for loop in found.loops if is_wait(found, loop)]
    assert len(found.loops) == 5 and len(waits) == 3
    loop = main_loop(found)
    assert loop is not None and loop not in waits
    bound = loop_bound(found, loop)
    # the way through the loop without waiting: six instructions, none of them twice
    assert (bound.issued, bound.straight) == (6, True)
    assert cold_blocks(found, loop) == {i.block for i in found.instructions if i.address >= 25 * 16}


def test_a_wait_that_every_iteration_passes_is_counted_once():
    found = kernel(f"""
        tile: FADD R1, R1, R1
        wait: SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R4
        @!P2 BRA wait
        {HGMMA}
        @P0 BRA tile
        EXIT
    """)
    loop = main_loop(found)
    assert loop is not None and loop.depth == 1
    bound = loop_bound(found, loop)
    assert (bound.issued, bound.straight) == (5, True)


@pytest.mark.parametrize(
    ("body", "waits"),
    (
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4", True),
        ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0\nPLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", True),
        ("LDG.E.STRONG.GPU R4, [R2.64]\nISETP.NE.AND P0, PT, R4, RZ, PT", True),
        ("FADD R1, R1, R1", False),
        ("NOP", False),
        (f"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4\n{HGMMA}", False),
        ("LDG.E.STRONG.GPU R4, [R2.64]\nSTG.E [R6.64], R4", False),
    ),
)
def test_a_wait_asks_and_does_no_work(body, waits):
    found = kernel(f"loop: YIELD\n{body}\n@!P0 BRA loop\nEXIT")
    (loop,) = found.loops
    assert is_wait(found, loop) == waits
    assert (main_loop(found) is None) == waits


@pytest.mark.parametrize(
    ("decision", "warps"),
    (
        # warp, warp group, half of the block
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nISETP.EQ.AND P0, PT, R3, 0x2, PT", [2]),
        ("SHF.R.U32.HI R3, RZ, 0x7, R2\nISETP.EQ.AND P0, PT, R3, 0x1, PT", [4, 5, 6, 7]),
        ("ISETP.GE.U32.AND P0, PT, R2, 0x80, PT", [4, 5, 6, 7]),
        ("ISETP.GT.U32.AND P0, PT, R2, 0x7f, PT", [4, 5, 6, 7]),
        ("LOP3.LUT P0, RZ, R2, 0xffffff80, RZ, 0xc0, !PT", [4, 5, 6, 7]),
        ("LOP3.LUT R3, R2, 0x7f, RZ, 0xc0, !PT\nISETP.LT.AND P0, PT, R3, 0x20, PT", [0, 4]),
        # a lane among others may
        ("ISETP.EQ.AND P0, PT, R2, RZ, PT", [0]),
        ("ISETP.EQ.AND P0, PT, R2, 0x21, PT", [1]),
        # the same number in every lane, and in a uniform register
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nSHFL.IDX PT, R4, R3, RZ, 0x1f\nR2UR UR5, R4\n"
         "UISETP.NE.AND UP0, UPT, UR5, 0x1, UPT\nPLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
         [0, 2, 3, 4, 5, 6, 7]),
        # a signed number is divided by 128 so
        ("SHF.R.S32.HI R4, RZ, 0x1f, R2\nLEA.HI R4, R4, R2, RZ, 0x7\n"
         "SHF.R.S32.HI R4, RZ, 0x7, R4\nISETP.NE.AND P0, PT, R4, RZ, PT", [4, 5, 6, 7]),
        ("IADD3 R3, R2, -0x40, RZ\nISETP.LT.AND P0, PT, R3, RZ, PT", [0, 1]),
        # constants of two halves, selected, packed in a register and read again
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nHFMA2.MMA R5, -RZ, RZ, 0, 1.78813934326171875e-07\n"
         "ISETP.EQ.AND P0, PT, R3, R5, PT", [3]),
        ("ISETP.GE.AND P1, PT, R2, 0x80, PT\nSEL R3, RZ, 0x2, !P1\n"
         "ISETP.EQ.AND P0, PT, R3, 0x2, PT", [4, 5, 6, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nVIMNMX.U32 R3, R3, 0x5, PT\n"
         "ISETP.EQ.AND P0, PT, R3, 0x5, PT", [5, 6, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nVIMNMX.U32 R3, PT, PT, R3, 0x5, PT\n"
         "ISETP.EQ.AND P0, PT, R3, 0x5, PT", [5, 6, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nIMAD.MOV.U32 R4, RZ, RZ, -0x3\n"
         "VIADDMNMX.U32 R3, R3, R4, 0x2, PT\nISETP.EQ.AND P0, PT, R3, 0x2, PT", [0, 1, 2, 5, 6, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nR2P PR, R3, 0x7\nPLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0",
         [6, 7]),
        ("ISETP.GE.AND P1, PT, R2, 0x80, PT\nP2R R3, PR, RZ, 0x2\n"
         "ISETP.NE.AND P1, PT, R9, RZ, PT\nLOP3.LUT P0, RZ, R3, 0x2, RZ, 0xc0, !PT", [4, 5, 6, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nPRMT R3, R3, 0x7604, RZ\n"
         "ISETP.EQ.AND P0, PT, R3, 0x300, PT", [3]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nLOP3.LUT R3, R3, 0x3, RZ, 0x3c, !PT\n"
         "ISETP.EQ.AND P0, PT, R3, RZ, PT", [3]),
        # the remainder of a division by three
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nIMAD.HI R4, R3, 0x55555556, RZ\n"
         "IMAD R3, R4, -0x3, R3\nISETP.EQ.AND P0, PT, R3, 0x1, PT", [1, 4, 7]),
        ("SHF.R.U32.HI R3, RZ, 0x5, R2\nIMAD.WIDE.U32 R4, R3, 0xaaaaaaab, RZ\n"
         "SHF.R.U32.HI R5, RZ, 0x1, R5\nIMAD R3, R5, -0x3, R3\nISETP.EQ.AND P0, PT, R3, 0x2, PT",
         [2, 5]),
        ("S2R R3, SR_LANEID\nIMAD R3, R3, -0x1, R2\nISETP.EQ.AND P0, PT, R3, 0x60, PT", [3]),
        # a copy under a guard
        ("ISETP.GE.AND P1, PT, R2, 0x80, PT\nMOV R3, RZ\n@P1 MOV R3, 0x1\n"
         "ISETP.EQ.AND P0, PT, R3, 0x1, PT", [4, 5, 6, 7]),
        ("ISETP.EQ.AND P1, PT, R2, 0x80, PT\nMOV R3, RZ\n@P1 MOV R3, 0x1\n"
         "ISETP.EQ.AND P0, PT, R3, 0x1, PT", [4]),
        # with what nobody knows
        ("ISETP.NE.AND P1, PT, R9, RZ, PT\nISETP.LT.AND P0, PT, R2, 0x40, P1", [0, 1]),
        ("ISETP.NE.AND P1, PT, R9, RZ, PT\nISETP.GE.OR P0, PT, R2, 0x40, P1", list(range(8))),
        ("ISETP.NE.AND P0, PT, R9, RZ, PT", list(range(8))),
        ("LDG.E R2, [R4.64]\nISETP.LT.AND P0, PT, R2, 0x40, PT", list(range(8))),
        ("LDG.E.128 R0, [R4.64]\nISETP.LT.AND P0, PT, R2, 0x40, PT", list(range(8))),
        (f"{HGMMA.replace('R24', 'R0')}\nISETP.LT.AND P0, PT, R2, 0x40, PT", list(range(8))),
        ("@P5 IADD3 R2, R2, 0x40, RZ\nISETP.LT.AND P0, PT, R2, 0x40, PT", list(range(8))),
        ("CALL.ABS.NOINC R20\nISETP.LT.AND P0, PT, R2, 0x40, PT", list(range(8))),
        ("ISETP.LT.AND P0, PT, R2, 0x40, PT\nR2P PR, R9, 0x7f", list(range(8))),
    ),
)  # fmt: skip
def test_a_branch_on_the_threads_number_decides_for_a_warp(decision, warps):
    text = f"S2R R2, SR_TID.X\n{decision}\n@!P0 BRA end\nFADD R1, R1, R1\nend: EXIT"
    assert warps_at(text) == warps


@pytest.mark.parametrize(("architecture", "place"), (("sm_90", "0x0"), ("sm_100", "0x360")))
def test_the_size_of_the_block_is_known(architecture, place):
    text = f"""
        S2R R2, SR_TID.X
        LDC R3, c[0x0][{place}]
        IADD3 R3, R3, -0x20, RZ
        ISETP.GE.AND P0, PT, R2, R3, PT
        @!P0 BRA end
        FADD R1, R1, R1
        end: EXIT
    """
    found = kernel(text, architecture)
    (block,) = {i.block for i in found.instructions if i.base == "FADD"}
    ways = ways_of_warps(found, threads=192, warps=6)
    assert [warp for warp, own in enumerate(ways) if block in own.blocks] == [5]


def test_what_a_loop_changes_is_not_known_behind_it():
    text = """
        S2R R2, SR_TID.X
        loop: IADD3 R2, R2, -0x20, RZ
        @P1 BRA loop
        ISETP.EQ.AND P0, PT, R2, 0x41, PT
        @!P0 BRA end
        FADD R1, R1, R1
        end: EXIT
    """
    assert warps_at(text) == list(range(8))


def test_a_guarded_exit_ends_the_way_of_the_warps_that_it_holds_for():
    text = "S2R R2, SR_TID.X\nISETP.GE.AND P0, PT, R2, 0x40, PT\n@P0 EXIT\nFADD R1, R1, R1\nEXIT"
    assert warps_at(text) == [0, 1]


def test_warps_that_run_the_same_loops_have_no_roles():
    same = "S2R R2, SR_TID.X\nISETP.LT.AND P0, PT, R2, 0x40, PT\n@P0 BRA loop\nNOP\n"
    same += "loop: FADD R1, R1, R1\n@P1 BRA loop\nEXIT"
    assert roles(kernel(same), 256) == ()
    assert roles(kernel("EXIT"), 256) == ()
    assert roles(kernel(SPECIALISED), 32) == ()  # one warp


def test_one_coordinate_does_not_tell_the_roles_of_a_block_of_several_dimensions():
    (role,) = roles(kernel(f"S2R R9, SR_TID.Y\n{SPECIALISED}"), 384)
    assert (role.name, role.warps, role.working_loop) == ("not known", tuple(range(12)), None)
    assert "'@P0 BRA 0xd0' at 0x0040 leads to loops 0 or 2" in role.reason


def test_roles_of_one_kind_are_numbered():
    text = f"""
        S2R R2, SR_TID.X
        ISETP.LT.AND P0, PT, R2, 0x80, PT
        @P0 BRA second
        first: {HGMMA}
        @P1 BRA first
        EXIT
        second: {HGMMA}
        @P1 BRA second
        EXIT
    """
    found = named(kernel(text), 256)
    assert list(found) == ["consumer 1", "consumer 2"]
    assert found["consumer 1"].warps == (0, 1, 2, 3)


# Two loops of which a warp runs one, by P0.
EITHER = f"""
    S2R R2, SR_TID.X
    SHF.R.U32.HI R3, RZ, 0x5, R2
    CONDITION
    @P0 BRA second
    first: {HGMMA}
    @P1 BRA first
    EXIT
    second: FADD R1, R1, R1
    @P1 BRA second
    EXIT
"""


@pytest.mark.parametrize(
    ("condition", "is_known"),
    (
        ("ISETP.LT.AND P0, PT, R3, 0x2, PT", True),
        # the same for all warps, whatever it is
        ("LDC R5, c[0x0][0x210]\nISETP.NE.AND P0, PT, R5, RZ, PT", True),
        ("S2R R5, SR_CTAID.X\nISETP.NE.AND P0, PT, R5, RZ, PT", True),
        ("LDS R5, [RZ]\nFSETP.GT.AND P0, PT, R5, RZ, PT", True),
        # not the same
        ("LDS R5, [R2]\nISETP.NE.AND P0, PT, R5, RZ, PT", False),
        ("LDL R5, [R1]\nISETP.NE.AND P0, PT, R5, RZ, PT", False),
        ("ATOMS.ADD R5, [RZ], R4\nISETP.NE.AND P0, PT, R5, RZ, PT", False),
        ("POPC R5, R3\nISETP.NE.AND P0, PT, R5, RZ, PT", False),
        ("LDC R5, c[0x3][R3]\nISETP.NE.AND P0, PT, R5, RZ, PT", False),
        ("CALL.ABS.NOINC R20", False),
        # known on one way, or for some warps only
        ("ISETP.NE.AND P0, PT, R9, RZ, PT\n@P0 BRA more\nISETP.LT.AND P0, PT, R3, 0x2, PT\n"
         "more: NOP", False),
        ("MOV R5, RZ\nISETP.EQ.AND P2, PT, R3, 0x2, PT\n@P2 LDG.E R5, [R6.64]\n"
         "ISETP.NE.AND P0, PT, R5, RZ, PT", False),
    ),
)  # fmt: skip
def test_a_role_is_not_known_where_warps_may_differ_in_what_is_not_known(condition, is_known):
    found = roles(kernel(EITHER.replace("CONDITION", condition)), 256)
    assert all(role.is_known and not role.unsure for role in found) == is_known
    if not is_known:
        unknown = next(role for role in found if not role.is_known)
        assert unknown.name == "not known" and unknown.working_loop is None
        assert unknown.unsure == unknown.loops == (0, 1)
        assert "leads to loops 0 or 1, by a value that is not known" in unknown.reason


# A loop that a warp runs, or passes by, by P0.
SKIPPED = f"""
    S2R R2, SR_TID.X
    SHF.R.U32.HI R3, RZ, 0x5, R2
    LDC.64 R8, c[0x0][0x210]
    CONDITION
    @P0 BRA behind
    loop: {HGMMA}
    @P1 BRA loop
    behind: FADD R1, R1, R1
    EXIT
"""
TESTED = "ISETP.NE.AND P0, PT, R5, RZ, PT"


@pytest.mark.parametrize(
    "condition",
    (
        # from an address of the warp's own, or of its lanes
        f"LDG.E R5, [R2.64]\n{TESTED}",
        f"IADD3 R4, R8, R3, RZ\nLDG.E.CONSTANT R5, [R4.64]\n{TESTED}",
        f"LDS R5, [R2]\n{TESTED}",
        f"LDS R4, [R3]\nLDS R5, [R4]\n{TESTED}",
        f"LDC R5, c[0x3][R3]\n{TESTED}",
        f"R2UR UR4, R3\nLDS R5, [UR4]\n{TESTED}",
        f"LDL R5, [R1]\n{TESTED}",
        f"LDS R4, [R2]\nSHFL.IDX PT, R5, R4, RZ, 0x1f\n{TESTED}",
        "LDS R4, [R2]\nISETP.NE.AND P2, PT, R4, RZ, PT\nVOTE.ANY P0, P2",
        # compared with a size of the launch, too
        "LDS R5, [R2]\nISETP.LT.AND P0, PT, R5, c[0x0][0x218], PT",
        # of an atomic, a clock, a poll, a strong load
        f"ATOMG.E.ADD.STRONG.GPU PT, R5, [R8.64], R7\n{TESTED}",
        f"ATOMS.ADD R5, [RZ], R7\n{TESTED}",
        f"CS2R R4, SR_CLOCKLO\n{TESTED}",
        f"S2R R5, SR_VIRTUALSMID\n{TESTED}",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4",
        f"LDG.E.STRONG.GPU R5, [R8.64]\n{TESTED}",
        # of rows that each warp has of its own
        f"{HGMMA}\nFSETP.GT.AND P0, PT, R24, RZ, PT",
        # of the thread's number alone, in a way that is not followed
        f"POPC R5, R3\n{TESTED}",
        # written on ways that warps take by such a value, or as often as they turn
        f"LDS R4, [R2]\nISETP.NE.AND P2, PT, R4, RZ, PT\nMOV R5, RZ\n@P2 BRA more\nMOV R5, 0x1\n"
        f"more: {TESTED}",
        "MOV R5, RZ\nturn: IADD3 R5, R5, 0x1, RZ\nLDS R4, [R2]\nISETP.NE.AND P2, PT, R4, RZ, PT\n"
        "@P2 BRA turn\nISETP.LT.AND P0, PT, R5, 0x3, PT",
    ),
)
def test_which_warps_run_a_loop_is_not_known_where_they_may_differ(condition):
    facts = facts_of(kernel(SKIPPED.replace("CONDITION", condition)))
    (role,) = facts.roles
    loop = main_loop(facts.kernel)
    assert loop is not None
    assert (role.name, role.working_loop) == ("not known", None) and loop.index in role.unsure
    assert f"may skip loop {loop.index}, by a value in which warps may differ" in role.reason
    assert facts.loop_warps(loop) is None and facts.bound_cycles is None


@pytest.mark.parametrize(
    "condition",
    (
        # an argument, the number of the block, and what memory holds there
        "ISETP.NE.AND P0, PT, RZ, c[0x0][0x218], PT",
        f"LDG.E R5, [R8.64]\n{TESTED}",
        f"S2R R4, SR_CTAID.X\nIADD3 R8, R8, R4, RZ\nLDG.E R5, [R8.64]\n{TESTED}",
        f"S2UR UR4, SR_CgaCtaId\nULEA UR4, UR4, UR5, 0x18\nLDS R5, [UR4+0x10]\n{TESTED}",
        f"LDS R4, [RZ]\nLDS R5, [R4]\n{TESTED}",
        # what the lanes of each warp have
        f"S2R R4, SR_LANEID\nLDS R5, [R4]\n{TESTED}",
        "LDS R4, [RZ]\nVOTE.ANY P0, P2",
        "BAR.RED.OR.DEFER_BLOCKING 0x0, P3\nB2R.RESULT RZ, P0",
        # a size of the launch
        "ISETP.GE.AND P0, PT, R2, c[0x0][0x218], PT",
        "LDG.E R5, [R8.64]\nISETP.GE.AND P0, PT, R2, R5, PT",
        # written on ways that all take alike, or not on the ways
        f"LDS R4, [RZ]\nISETP.NE.AND P2, PT, R4, RZ, PT\nMOV R5, RZ\n@P2 BRA more\nMOV R5, 0x1\n"
        f"more: {TESTED}",
        f"LDS R4, [R2]\nISETP.NE.AND P2, PT, R4, RZ, PT\nMOV R5, R8\n@P2 BRA more\nMOV R6, 0x1\n"
        f"more: {TESTED}",
    ),
)
def test_warps_that_go_the_same_way_are_counted_as_running_the_loop(condition):
    facts = facts_of(kernel(SKIPPED.replace("CONDITION", condition), registers=128))
    loop = main_loop(facts.kernel)
    assert facts.roles == () and loop is not None and facts.loop_warps(loop) == 12
    assert facts.bound_cycles is not None


def test_warps_may_end_before_a_loop_or_turn_it_as_often_as_memory_tells():
    text = f"""
        S2R R2, SR_TID.X
        LDG.E R5, [R2.64]
        ISETP.NE.AND P0, PT, R5, RZ, PT
        @P0 EXIT
        first: {HGMMA}
        inner: FADD R1, R1, R1
        @P0 BRA inner
        @P0 BRA first
        EXIT
    """
    (role,) = roles(kernel(text), 256)
    assert role.reason.startswith("'@P0 EXIT' at 0x0030 may skip loops 0 to 1, by")
    assert roles(kernel(text.replace("@P0 EXIT", "NOP")), 256) == ()


def test_a_loop_in_doubt_leaves_the_role_and_its_main_loop_known():
    text = SPECIALISED.replace(
        "@P3 BRA tile\n",
        "@P3 BRA tile\nFSETP.GT.AND P0, PT, R24, RZ, PT\n@!P0 EXIT\n"
        "again: FADD R6, R6, R6\n@P3 BRA again\n",
    )
    facts = facts_of(kernel(text, registers=128))
    producer, idle, consumer = facts.roles
    assert not (producer.unsure or idle.unsure)
    (again,) = consumer.unsure
    assert consumer.working_loop is not None and consumer.working_loop < again
    assert facts.bound_cycles is not None
    assert facts.loop_warps(facts.kernel.loops[again]) is None
    told = report_text(report_on(facts))
    assert "The warps of a block have 3 roles" in told
    assert f"Which of warps 4 to 11 run loop {again} is not known: '@!P0 EXIT' at" in told
    assert f"{consumer.working_loop}, {again}?" in told
    assert "No bound" in report_text(report_on(facts, again))


def test_a_warp_alone_does_not_differ_from_others():
    text = SPECIALISED.replace(
        "copy:", "ATOMG.E.ADD.STRONG.GPU PT, R5, [R8.64], R7\n" + TESTED + "\n@P0 EXIT\ncopy:"
    )
    producer, *_ = roles(kernel(text), 384)
    assert (producer.name, producer.warps, producer.unsure) == ("producer", (0,), ())


def test_one_coordinate_of_several_does_not_tell_who_skips_a_loop():
    text = SKIPPED.replace("CONDITION", f"S2R R5, SR_TID.Y\n{TESTED}")
    (role,) = roles(kernel(text), 256)
    assert not role.is_known


def test_a_jump_without_a_table_leaves_roles_unknown():
    text = "S2R R2, SR_TID.X\nloop: FADD R1, R1, R1\n@P0 BRA loop\nBRX R4, -0x30\nEXIT"
    (role,) = roles(kernel(text), 256)
    assert role.reason == "the targets of 'BRX R4, -0x30' at 0x0030 are not told"
    # though no way leads to the loop that is told
    (role,) = roles(kernel("BRX R4, -0x30\nloop: FADD R1, R1, R1\n@P0 BRA loop\nEXIT"), 256)
    assert (role.name, role.loops, role.registers) == ("not known", (0,), None)


def test_without_roles_there_is_no_bound():
    facts = facts_of(
        kernel(EITHER.replace("CONDITION", "LDS R5, [R2]\nISETP.NE.AND P0, PT, R5, RZ, PT"))
    )
    report = report_on(facts)
    assert report.loop is not None and facts.loop_warps(report.loop) is None
    assert facts.bound_cycles is None
    text = report_text(report)
    assert "The role of warps 0 to 11 is not known: '@P0 BRA 0x80' at 0x0040 leads to loops" in text
    assert "No bound: how many warps run the loop is not known." in text
    assert "Bound by" not in text and "Lower bounds" not in text
    assert report_json(report)["bound"]["cycles"] is None


# Warp 0 copies, warps 4 to 7 multiply, warps 8 to 11 multiply half as much in a loop of their own.
THREE = f"""
    S2R R2, SR_TID.X
    SHF.R.U32.HI R3, RZ, 0x7, R2
    ISETP.EQ.AND P0, PT, R3, 0x1, PT
    @P0 BRA first
    ISETP.EQ.AND P0, PT, R3, 0x2, PT
    @P0 BRA second
    ISETP.GE.AND P0, PT, R2, 0x20, PT
    @P0 EXIT
    copy: UTMALDG.2D [UR8], [UR6]
    MUFU.EX2 R4, R4
    @P1 BRA copy
    EXIT
    first: {HGMMA}
    {HGMMA}
    MUFU.EX2 R4, R4
    @P1 BRA first
    EXIT
    second: {HGMMA}
    @P1 BRA second
    EXIT
"""


def test_roles_share_the_pipes_of_an_sm():
    facts = facts_of(kernel(THREE, registers=128))
    assert [role.name for role in facts.roles] == ["producer", "idle", "consumer 1", "consumer 2"]
    found = facts.together
    assert found is not None and facts.resident_blocks == 1
    # 64 cycles of the SM each, which all four sub-partitions share
    assert found["tensor"] == (2 + 1) * 64
    # warps 0 and 4 are of one sub-partition: 8 cycles of its quarter of the pipe each
    assert found["xu"] == 2 * 8
    # that issues 3 + 4 + 2 instructions, one a cycle
    assert found["issue"] == 3 + 4 + 2
    report = report_on(facts)
    row = next(line for line in report_text(report).splitlines() if line.startswith("together"))
    assert row.endswith("an iteration of each  tensor, 192 cycles")
    assert report_json(report)["together"] == dict(found)


def test_several_blocks_are_taken_to_be_spread_over_the_sub_partitions():
    facts = facts_of(kernel(THREE, registers=64))
    assert facts.resident_blocks == 2 and facts.together is not None
    assert facts.together["xu"] == 2 * (1 + 4) * 2.0


def test_without_all_roles_there_is_no_sum_of_them():
    condition = "LDS R5, [R2]\nISETP.NE.AND P0, PT, R5, RZ, PT"
    assert facts_of(kernel(EITHER.replace("CONDITION", condition))).together is None
    assert facts_of(kernel(SPECIALISED.replace("HGMMA.64x128x16", "HGMMA.SP"))).together is None
    # one role with a loop shares with none
    assert facts_of(kernel("EXIT")).together is None


# -- of a compiled kernel --------------------------------------------------------------------------


def test_a_compiled_kernel_is_shown_by_its_roles():
    found = load_kernel(PLANTED, names=["roles"])
    report = report_on(KernelFacts(kernel=found, name=found.symbol))
    producer, idle, consumer = report.facts.roles
    # as roles.cu has it: setmaxnreg 40 and 232, one thread that copies, two warp groups
    assert (producer.name, producer.warps, producer.registers) == ("producer", (0,), 40)
    assert (idle.name, idle.warps) == ("idle", (1, 2, 3))
    assert (consumer.name, consumer.warps) == ("consumer", tuple(range(4, 12)))
    assert consumer.registers == 232
    assert report.loop is not None and consumer.working_loop == report.loop.index
    text = report_text(report)
    assert (
        "The warps of a block have 3 roles: producer (warp 0, 40 registers, loop 2), idle (warps "
        "1 to 3, 40 registers, no loop), consumer (warps 4 to 11, 232 registers, loop 1)."
    ) in text
    # four HGMMA of 64x64x16 an iteration, 32 cycles each, of two warp groups
    assert "Bound by the tensor pipe: 8 warps that run the loop take 256 cycles" in text
    row = next(line for line in text.splitlines() if line.startswith("consumer"))
    assert "tensor, 256 cycles" in row
    assert "3 of the loops only wait" in text
    assert report_json(report)["roles"][0]["name"] == "producer"


WORK = {
    "multiply": {"HMMA"},
    "load": {"LDGSTS"},
    "softmax": {"MUFU"},
    "correct": {"FFMA"},
    "greatest": {"FMNMX"},
}


@pytest.mark.parametrize("file", DISPATCH, ids=lambda file: file.suffixes[0])
@pytest.mark.parametrize(
    ("name", "threads", "expected"),
    (
        ("by_enum", 384,
         {"softmax": range(4), "correct": range(4, 8), "multiply": [8], "load": [9], "": [10, 11]}),
        ("by_switch", 256,
         {"load": [0], "correct": [1], "softmax": [2], "multiply": [3], "greatest": [4],
          "": [5, 6, 7]}),
        ("behind_call", 256, {"load": range(4), "multiply": range(4, 8)}),
        ("by_size", 256, {"multiply": range(7), "load": [7]}),
        ("by_size", 96, {"multiply": range(2), "load": [2]}),
    ),
)  # fmt: skip
def test_roles_follow_values_from_where_they_are_set_to_where_they_are_tested(
    file, name, threads, expected
):
    found = load_kernel(file, names=[name])
    told = {}
    for role in roles(found, threads):
        inside = {i.base for i in found.instructions if i.loop == role.working_loop}
        work = [name for name, own in WORK.items() if own <= inside] if role.loops else [""]
        told[",".join(work)] = role.warps
        assert not role.reason
    assert told == {work: tuple(warps) for work, warps in expected.items()}


@pytest.mark.parametrize("file", DISPATCH, ids=lambda file: file.suffixes[0])
def test_roles_that_memory_tells_are_not_known(file):
    found = load_kernel(file, names=["by_memory"])
    (role,) = roles(found, 384)
    assert (role.name, len(role.loops), role.working_loop) == ("not known", 4, None)


@pytest.mark.parametrize("file", DISPATCH, ids=lambda file: file.suffixes[0])
def test_registers_of_a_role_are_those_of_its_loop(file):
    found = load_kernel(file, names=["limits"])
    assert {role.warps: role.registers for role in roles(found, 256)} == {
        (0, 1, 2, 3): 40,
        (4, 5, 6, 7): 232,
    }


def test_a_loop_over_the_values_of_a_uniform_operand_is_a_replay():
    found = load_kernel(PLANTED, names=["roles"])
    (replay,) = [loop for loop in found.loops if is_replay(found, loop)]
    inside = {i.base for i in found.instructions if i.block in replay.blocks}
    assert {"UTMALDG", "ELECT"} <= inside
    assert all(replay.index not in role.loops for role in roles(found, 384))


def test_polling_a_word_is_a_wait_before_the_loop():
    found = load_kernel(PLANTED, names=["polls"])
    (wait,) = [loop for loop in found.loops if is_wait(found, loop)]
    main = main_loop(found)
    assert main is not None and main != wait
    assert roles(found, 128) == ()


def test_the_tool_names_producer_and_consumers(capsys):
    tool = load_tool("tools/analysis/sass_report.py")
    assert tool.main([str(PLANTED), "--kernel", "roles", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [role["name"] for role in told["roles"]] == ["producer", "idle", "consumer"]
    assert told["bound"]["warps"] == 8
    assert verdicts(report_on(facts_of(load_kernel(PLANTED, names=["roles"]))))[0].startswith(
        "The warps of a block have 3 roles"
    )
