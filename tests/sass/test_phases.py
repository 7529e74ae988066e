"""Prologue, main loop and epilogue; trip counts; what a warp executes; unrolling."""

from pathlib import Path

import pytest
from sass_text import ARCHITECTURES, DEFAULT, WITH_TENSOR, kernel, kernel_of, of_version
from tiers import each

from flash_helpers.measure.machine_code import trips, unit_of
from flash_helpers.registry.mma_sync import MMA_ROW_SUM
from flash_helpers.sass.analyse.counts import Bucket, count_executed, count_loop
from flash_helpers.sass.analyse.phases import (
    NotDeterminedError,
    Unit,
    block_executions,
    count_phases,
    main_loop,
    phases,
    trip_counts,
    unrolling,
)
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Kernel

HMMA = "HMMA.16816.F32 R4, R8, R12, R4"
PEELED = {*(f"v{number}" for number in range(10, 17)), "o1"}
PLANTED = Path(__file__).parent / "kernels"


def lines(planted: Kernel, blocks) -> list[int]:
    return [planted.blocks[n].start // INSTRUCTION_BYTES for n in sorted(blocks)]


# -- the main loop ---------------------------------------------------------------------------------


def test_the_main_loop_is_the_innermost_with_over_a_fifth_of_the_tensor_instructions():
    peeled = "\n".join([HMMA] * 9)

    def header(inner: str) -> list[int]:
        planted = kernel(f"""
            outer: {peeled}
            long: FADD R1, R1, R1
            FADD R1, R1, R1
            FADD R1, R1, R1
            FADD R1, R1, R1
            @P0 BRA long
            inner: {inner}
            @P0 BRA inner
            @P1 BRA outer
            EXIT
        """)
        main = main_loop(planted)
        assert main is not None
        return lines(planted, [main.header])

    # the loop around has nine of its own, peeled copies; what is inside is run more often
    assert header(f"{HMMA}\n{HMMA}") == [14]
    # but one is little beside nine
    assert header(HMMA) == [0]
    assert main_loop(kernel("MOV R1, R2\nEXIT")) is None


def test_without_tensor_instructions_the_longest_loop_is_the_main_loop():
    planted = kernel("""
        short: FADD R1, R1, R1
        @P0 BRA short
        long: FADD R1, R1, R1
        FADD R1, R1, R1
        @P0 BRA long
        EXIT
    """)
    main = main_loop(planted)
    assert main is not None
    assert lines(planted, [main.header]) == [2]


def test_filler_makes_no_main_loop():
    planted = kernel(f"""
        dead: @!PT {HMMA}
        @!PT {HMMA}
        @P0 BRA dead
        live: {HMMA}
        @P0 BRA live
        EXIT
    """)
    main = main_loop(planted)
    assert main is not None
    assert lines(planted, [main.header]) == [3]


def test_the_phases_are_what_leads_to_the_loop_the_loop_and_the_rest():
    planted = kernel(f"""
        MOV R1, R2
        @P0 BRA skip
        MOV R3, R4
        loop: {HMMA}
        @P0 BRA loop
        skip: STG.E [R2], R1
        EXIT
        self: BRA self
        NOP
    """)
    parts = phases(planted)
    assert lines(planted, parts.prologue) == [0, 2]
    assert parts.main_loop is not None
    assert lines(planted, parts.main_loop.blocks) == [3]
    # padding is in no phase
    assert lines(planted, parts.epilogue) == [5]
    counts = count_phases(planted)
    assert counts.main_loop is not None
    assert (counts.prologue.work, counts.main_loop.work, counts.epilogue.work) == (3, 2, 2)


def test_a_loop_around_the_main_loop_is_split_at_its_header():
    planted = kernel(f"""
        outer: MOV R1, R2
        loop: {HMMA}
        @P0 BRA loop
        STG.E [R2], R1
        @P1 BRA outer
        EXIT
    """)
    parts = phases(planted)
    assert lines(planted, parts.prologue) == [0]
    assert lines(planted, parts.epilogue) == [3, 5]


# -- trip counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@each(WITH_TENSOR, once=True)
def test_the_loop_of_a_kernel_handles_one_block_of_k_and_v(config, architecture):
    found = kernel_of(config, architecture)
    counts = count_phases(found)
    assert counts.main_loop is not None
    rows = config.B_r // config.n_warps
    # 16x8x16 products: S = Q @ K^T is rows x B_c, deep d_head; O += P @ V rows x d_head, deep B_c
    scores = (rows // 16) * (config.B_c // 8) * (config.d_head // 16)
    output = (rows // 16) * (config.d_head // 8) * (config.B_c // 16)
    # from v10 on the first block is peeled off, until o2 rescales lazily
    peeled = scores + output if config.step.id in PEELED else 0
    if MMA_ROW_SUM in config.step.traits:
        output += (rows // 16) * (config.B_c // 16)  # P @ 1, rows x 8
    assert config.mma_per_key_block == scores + output
    assert counts.main_loop.tensor == scores + output
    assert counts.prologue.tensor + counts.epilogue.tensor == peeled
    (loop,) = found.loops
    for blocks in (2, 3, 8):
        expected = {loop.index: blocks - bool(peeled)}
        assert trip_counts(found, unit_of(config), blocks) == expected
        assert trips(found, config, blocks * config.B_c) == expected


def flash_text(prologue: int, *loops: int) -> str:
    """A kernel with so many tensor instructions in front of and in each of its loops."""
    listed = [HMMA] * prologue
    for n, number in enumerate(loops):
        listed += [f"after{n}: MOV R1, R2" if n else "MOV R1, R2", f"@P0 BRA after{n + 1}"]
        listed += [f"loop{n}: MOV R1, R2", *[HMMA] * number, f"@P0 BRA loop{n}"]
    return "\n".join([*listed, f"after{len(loops)}: EXIT"])


UNIT = Unit("block", 128)
EACH = UNIT.tensor


def test_an_unrolled_loop_with_a_remainder_is_told_from_its_tensor_instructions():
    planted = kernel(flash_text(EACH, 4 * EACH, EACH))
    found = trip_counts(planted, UNIT, 8)
    # one block is peeled off, four are one trip of the first loop, three are left
    assert found == {0: 1, 1: 3}
    assert count_executed(planted, block_executions(planted, found)).tensor == 8 * EACH
    one = block_executions(planted, trip_counts(planted, UNIT, 1))
    assert count_executed(planted, one).tensor == EACH


def test_a_part_of_a_block_is_counted_as_a_whole_one():
    config = of_version(1)
    planted = kernel(flash_text(0, config.mma_per_key_block))
    assert trips(planted, config, config.B_c + 1) == {0: 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    (
        (flash_text(0, EACH + 1), "129 tensor instructions in loop 0, but a block takes 128"),
        (flash_text(7, EACH), "7 tensor instructions outside loops"),
        (flash_text(0, EACH, 0), "loop 1 .* has no tensor instruction"),
        (flash_text(0, 3 * EACH), "do not add up to 8 times a block"),
    ),
)
def test_trips_that_cannot_be_told_are_an_error(text, reason):
    with pytest.raises(NotDeterminedError, match=reason):
        trip_counts(kernel(text), UNIT, 8)


def test_trips_of_a_config_that_cannot_be_told_name_it():
    config = of_version(1)
    with pytest.raises(NotDeterminedError, match=f"^{config.short_form()} has 7 .* K and V takes"):
        trips(kernel(flash_text(7, 1)), config, config.B_c)


# -- what is executed ------------------------------------------------------------------------------


def test_a_warp_goes_round_a_loop_as_often_as_told():
    planted = kernel(f"""
        @P0 BRA skip
        MOV R3, R4
        loop: {HMMA}
        @!PT LDS RZ, [RZ]
        @P0 CALL.REL.NOINC skip
        BRA loop
        skip: EXIT
        self: BRA self
    """)
    # the jump back is executed once less than the loop
    assert block_executions(planted, {0: 5}) == [1, 1, 5, 4, 1, 0]
    assert block_executions(planted, {0: 0}) == [1, 0, 0, 0, 1, 0]
    counts = count_executed(planted, block_executions(planted, {0: 5}))
    assert (counts.tensor, counts.by_bucket[Bucket.FILLER]) == (5, 5)
    assert counts.work == 1 + 1 + 5 * 2 + 4 + 1
    assert counts.by_bucket[Bucket.PADDING] == 0


def test_an_inner_loop_is_entered_anew_in_each_iteration():
    planted = kernel(f"""
        outer: MOV R1, R2
        inner: {HMMA}
        @P0 BRA inner
        @P1 BRA outer
        EXIT
    """)
    assert block_executions(planted, {0: 3, 1: 4}) == [3, 12, 3, 1]
    assert count_executed(planted, block_executions(planted, {0: 3, 1: 4})).tensor == 12


def test_a_branch_on_data_is_an_error_that_names_it():
    planted = kernel("@P0 BRA other\nMOV R1, R2\nother: EXIT")
    with pytest.raises(NotDeterminedError, match=r"0x0000 of planted \(@P0 BRA 0x20\)"):
        block_executions(planted, {})


def test_an_endless_loop_is_an_error():
    with pytest.raises(NotDeterminedError, match="more than"):
        block_executions(kernel("MOV R1, R2\nself: BRA self\nNOP"), {0: 1})


# -- unrolling -------------------------------------------------------------------------------------


def test_copies_of_one_ptx_line_show_what_ptxas_unrolled():
    """As with a loop of one mma, which ptxas 13.0 unrolls by four and gives a remainder."""
    planted = kernel(f"""
        four: {HMMA} ; ptx=40
        LDSM.16.M88.4 R8, [R1] ; ptx=39
        {HMMA} ; ptx=40
        LDSM.16.M88.4 R8, [R1] ; ptx=39
        {HMMA} ; ptx=40
        LDSM.16.M88.4 R8, [R1] ; ptx=39
        {HMMA} ; ptx=40
        LDSM.16.M88.4 R8, [R1] ; ptx=39
        FMUL R1, R1, R1 ; ptx=41
        @P0 BRA four
        one: {HMMA} ; ptx=40
        LDSM.16.M88.4 R8, [R1] ; ptx=39
        @P0 BRA one
        EXIT
    """)
    four, one = planted.loops
    assert unrolling(planted, four).by_ptxas == 4
    assert unrolling(planted, one).by_ptxas == 1


@pytest.mark.parametrize("architecture", ("sm_80", "sm_90"))
def test_a_planted_loop_of_one_mma_is_unrolled_by_four_with_a_remainder(architecture):
    (planted,) = load_kernels(PLANTED / f"unrolled.{architecture}.cubin")
    main = main_loop(planted)
    assert main is not None
    assert count_loop(planted, main).tensor == 4
    assert unrolling(planted, main).by_source == 4
    (other,) = (loop for loop in planted.loops if loop != main)
    assert count_loop(planted, other).tensor == 1
    assert unrolling(planted, other).by_source == 1


def test_ptx_lines_of_one_source_line_show_what_a_pragma_unrolled():
    planted = kernel(f"""
        loop: {HMMA} ; ptx=40 source=7
        {HMMA} ; ptx=41 source=7
        {HMMA} ; ptx=42 source=7
        @P0 BRA loop
        EXIT
    """)
    found = unrolling(planted, planted.loops[0])
    assert (found.by_ptxas, found.by_source) == (1, 3)


def test_without_lines_nothing_is_claimed():
    planted = kernel(f"loop: {HMMA}\n@P0 BRA loop\nEXIT")
    found = unrolling(planted, planted.loops[0])
    assert (found.by_ptxas, found.by_source) == (None, None)


def test_the_loops_of_the_library_are_unrolled_by_pragmas_alone():
    config = of_version(16)
    found = kernel_of(config, DEFAULT)
    signs = unrolling(found, found.loops[0])
    assert signs.by_ptxas == 1
    # one line holds mma; it is inlined into the two products of half the tensor instructions each
    assert signs.by_source == config.mma_per_key_block // 2
