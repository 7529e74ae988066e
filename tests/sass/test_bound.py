"""Lower bounds from costs, and where a warp waits."""

import math
from dataclasses import replace

import pytest
from sass_text import (
    ARCHITECTURES,
    DEFAULT,
    PROGRESSION,
    WITH_TENSOR,
    in_tiers,
    kernel,
    kernel_of,
    kernels_of,
    needs,
    of_version,
)

from flash_helpers.gpu import SM_COUNTS
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.measure.machine_code import (
    config_facts,
    launch_of,
    predict_config,
    timed_launch,
    trips,
)
from flash_helpers.registry.mma_sync import LAZY_RESCALE
from flash_helpers.sass.analyse.bound import Chip, Launch, kernel_bound, loop_bound, predict
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.phases import main_loop
from flash_helpers.sass.analyse.report import report_on, verdicts
from flash_helpers.sass.analyse.stalls import body_of, group_stalls, group_waits, scoreboard_waits
from flash_helpers.sass.read.records import SassError

pytestmark = pytest.mark.slow

HMMA_CYCLES = {"sm_80": 2, "sm_86": 8, "sm_89": 8, "sm_90": 1.5}
LOOP = """
    loop: LDSM.16.M88.4 R8, [R1] ; stall=2 write=0
    HMMA.16816.F32 R4, R8, R12, R4 ; stall=4 wait=0
    HMMA.16816.F32 R4, R8, R14, R4 ; stall=7
    FFMA R20, R4, R5, R6 ; stall=1
    FFMA R21, R4, R5, R6 ; stall=1
    IMAD.MOV.U32 R22, RZ, RZ, R20 ; stall=1
    F2FP.BF16.F32.PACK_AB R23, R20, R21 ; stall=0
    @P1 FMUL R24, R20, R21 ; stall=1
    @!PT LDS RZ, [RZ] ; stall=1
    @P0 BRA loop ; stall=5
    EXIT
    self: BRA self
    NOP
"""


def test_cycles_add_up_by_pipe():
    found = loop_bound(kernel(LOOP), kernel(LOOP).loops[0])
    # FFMA and FMUL at 128 a clock, IMAD at 64 on the heavy half, which is half of both halves
    assert dict(found.pipes) == {
        "lsu": 4.0,
        "tensor": 2 * 1.5,
        "fma": 3 * 0.25 + 0.5 / 2,
        "fmaheavy": 0.5,
    }
    on_8_0 = loop_bound(kernel(LOOP, "sm_80"), kernel(LOOP).loops[0])
    assert dict(on_8_0.pipes) == {"lsu": 4.0, "tensor": 4.0, "fma": 3 * 0.5 + 0.5}


def test_filler_is_issued_but_occupies_no_pipe_and_a_warp_issues_once_a_cycle():
    found = loop_bound(kernel(LOOP), kernel(LOOP).loops[0])
    assert found.issued == 10
    assert found.issue == 10 / 4
    # a stall count of 0 is a cycle too
    assert found.stall == 2 + 4 + 7 + 1 + 1 + 1 + 1 + 1 + 1 + 5


def test_what_is_not_known_is_counted_and_shown_last():
    found = loop_bound(kernel(LOOP), kernel(LOOP).loops[0])
    assert found.unknown == 2
    known = [row for row in found.rows if row.cycles is not None]
    unknown = [row for row in found.rows if row.cycles is None]
    assert found.rows == (*known, *unknown)
    assert {row.name for row in unknown} == {"conversion (F2FP)", "control flow"}
    assert all(row.source for row in known)
    assert {row.name for row in known if not row.certain} == {"ldmatrix", "imad as move"}


def test_the_chain_of_tensor_instructions_goes_through_the_accumulator():
    def chain(text: str) -> int:
        planted = kernel(f"loop: {text}\n@P0 BRA loop\nEXIT")
        return loop_bound(planted, planted.loops[0]).tensor_chain

    step = "HMMA.16816.F32 R4, R8.reuse, R12, R4"
    assert chain(f"{step}\n{step}\n{step}") == 3
    assert chain(f"{step}\nHMMA.16816.F32 R16, R8, R12, R16\n{step}") == 2
    # RZ begins a chain, a result written in place does not end one, a new value does
    assert chain(f"{step}\nHMMA.16816.F32 R4, R8, R12, RZ\n{step}") == 2
    assert chain(f"{step}\nFMUL R4, R4, R9\n{step}") == 2
    assert chain(f"{step}\nCS2R R4, SRZ\n{step}") == 1
    assert chain("FADD R1, R1, R1") == 0


def test_the_longest_of_pipe_issue_and_latency_binds():
    planted = kernel(LOOP)
    found = loop_bound(planted, planted.loops[0])
    # 2 in a chain, 17 to 27 cycles each, beside 24 cycles of stalls
    assert found.chain_cycles == (34, 54)
    assert next(iter(found.cycles(1).items())) == ("latency", 34.0)
    assert found.cycles(1)["lsu"] == 4.0
    assert next(iter(found.cycles(100).items())) == ("lsu", 400.0)


def test_a_loop_that_branches_is_told_apart():
    text = "loop: @P1 BRA other\nFADD R1, R1, R1\nother: FADD R1, R1, R1\n@P0 BRA loop\nEXIT"
    branching, straight = kernel(text), kernel(LOOP)
    assert not loop_bound(branching, branching.loops[0]).straight
    assert loop_bound(straight, straight.loops[0]).straight


# Ways of an iteration: the first costs less on the xu pipe, the second on the fma pipe.
TWO_WAYS = """
    loop: FADD R1, R1, R1 ; stall=2
    @P1 BRA second ; stall=1
    MUFU.EX2 R2, R2 ; stall=8
    FADD R1, R1, R1 ; stall=4
    FADD R1, R1, R1 ; stall=4
    FADD R1, R1, R1 ; stall=4
    HMMA.16816.F32 R4, R8, R12, R4 ; stall=1
    BRA end ; stall=1
    second: MUFU.EX2 R2, R2 ; stall=8
    MUFU.EX2 R2, R2 ; stall=8
    FADD R1, R1, R1 ; stall=9
    end: HMMA.16816.F32 R4, R8, R12, R4 ; stall=1
    @P0 BRA loop ; stall=1
    EXIT
"""


def test_a_bound_of_a_loop_is_that_of_the_cheapest_way_on_each_pipe():
    planted = kernel(TWO_WAYS)
    found = loop_bound(planted, planted.loops[0])
    assert dict(found.pipes) == {"xu": 2.0, "fma": 2 * 0.25, "tensor": 1.5}
    assert (found.issued, found.issue, found.straight) == (7, 7 / 4, False)
    assert found.stall == 2 + 1 + 8 + 4 + 4 + 4 + 1 + 1 + 1 + 1
    # an HMMA that each way passes, and one that a way goes round
    assert found.tensor_chain == 1
    # the rows are the text
    assert {row.name: row.number for row in found.rows}["special function"] == 3


def test_a_pipe_that_a_way_does_without_bounds_nothing():
    planted = kernel("loop: @P1 BRA end\nMUFU.EX2 R2, R2\nend: FADD R1, R1, R1\n@P0 BRA loop\nEXIT")
    assert dict(loop_bound(planted, planted.loops[0]).pipes) == {"fma": 0.25}


@pytest.mark.parametrize(
    ("text", "issued"),
    (
        # a loop inside is passed once at least, or not at all, a turn may end early
        ("loop: FADD R1, R1, R1\ninner: FADD R1, R1, R1\n@P1 BRA inner\n@P0 BRA loop\nEXIT", 4),
        ("loop: @P2 BRA end\ninner: FADD R1, R1, R1\n@P1 BRA inner\nend: @P0 BRA loop\nEXIT", 2),
        ("loop: FADD R1, R1, R1\n@P1 BRA loop\nFADD R1, R1, R1\n@P0 BRA loop\nEXIT", 2),
        # a routine of which the caller comes back
        ("loop: CALL.REL.NOINC own\n@P0 BRA loop\nEXIT\n"
         "own: FADD R1, R1, R1\nRET.REL.NODEC R2, x", 2),
        # waits of which each turn passes one
        ("loop: @P2 BRA other\none: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4\n@!P1 BRA one\n"
         "BRA end\nother: SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4\n@!P1 BRA other\n"
         "end: FADD R1, R1, R1\n@P0 BRA loop\nEXIT", 5),
    ),
)  # fmt: skip
def test_an_iteration_issues_what_its_shortest_way_does(text, issued):
    planted = kernel(text)
    loop = next(loop for loop in planted.loops if loop.depth == 1)
    assert loop_bound(planted, loop).issued == issued


def test_the_report_tells_which_way_the_bounds_are_of():
    report = report_on(KernelFacts(kernel=kernel(TWO_WAYS), name="planted"))
    assert verdicts(report)[-1] == (
        "The loop branches: each bound is that of the way through it that takes least, and the "
        "costs are those of its whole text, 13 instructions."
    )


@in_tiers(WITH_TENSOR)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tensor_pipe_is_asked_for_what_the_tile_takes(architecture, configs):
    cycles = HMMA_CYCLES[architecture]
    for config, found in kernels_of(configs, architecture).items():
        loop = main_loop(found)
        assert loop is not None
        bound = loop_bound(found, loop)
        is_lazy = LAZY_RESCALE in config.step.traits
        assert bound.straight == (not is_lazy)
        assert bound.pipes["tensor"] == pytest.approx(config.mma_per_key_block * cycles)
        # S takes d_head / 16 steps into one accumulator
        assert bound.tensor_chain >= config.d_head // 16
        if is_lazy:
            continue  # the data decide what a launch executes
        whole = kernel_bound(found, trips(found, config, 4 * config.B_c))
        assert whole.pipes["tensor"] == pytest.approx(4 * config.mma_per_key_block * cycles)


# -- a launch --------------------------------------------------------------------------------------


def test_a_launch_takes_as_long_as_its_busiest_multiprocessor():
    config = of_version(16)
    found = kernel_of(config, DEFAULT)
    problem = AttentionForward(batch=1, heads=33, len_q=4096, dtype=config.dtype)
    chip = Chip(sms=132, mhz=1000.0)
    prediction = predict_config(found, config, problem, chip)
    per_head = problem.len_q // config.B_r
    blocks = math.ceil(33 * per_head / 132)
    tensor = config.mma_per_key_block * (problem.len_q // config.B_c) * HMMA_CYCLES[DEFAULT]
    assert prediction.milliseconds["tensor"] == pytest.approx(
        blocks * config.n_warps * tensor / (1000.0 * 1e3)
    )
    assert prediction.launch == launch_of(config, problem)
    assert prediction.launch.blocks == 33 * per_head
    assert prediction.resident == config_facts(config, found, None).occupancy.warps
    assert prediction.least_ms == max(prediction.milliseconds.values())
    flops = 4 * 33 * problem.len_q**2 * config.d_head
    assert prediction.most_tflops == pytest.approx(flops / prediction.least_ms / 1e9)
    # one more block is one more for one of them
    more = predict_config(found, config, replace(problem, heads=34, kv_heads=34), chip)
    assert more.least_ms > prediction.least_ms
    # twice the clock, half the time
    faster = predict_config(found, config, problem, replace(chip, mhz=2000.0))
    assert faster.least_ms == pytest.approx(prediction.least_ms / 2)


def test_anybodys_launch_is_predicted_from_trips_and_geometry():
    planted = kernel(LOOP)
    chip = Chip(sms=2, mhz=1.0)
    found = predict(planted, {0: 10}, Launch(threads=256, blocks=5), chip)
    # three blocks of eight warps each on the busier SM, an LDSM of 4 cycles each time round
    assert found.milliseconds["lsu"] == pytest.approx(3 * 8 * 10 * 4 / 1e3)
    assert found.most_tflops is None
    assert (found.resident, found.binding) == (24, "lsu")
    with pytest.raises(
        SassError,
        match=r"planted does not fit .* 1,048,576 bytes of shared memory per block, limit",
    ):
        predict(planted, {0: 10}, Launch(threads=256, dynamic_smem_bytes=1 << 20), chip)


@needs("sm_90")
@in_tiers(PROGRESSION)
def test_no_kernel_was_measured_faster_than_its_bound(results, configs):
    checked = 0
    for config in configs:
        timed = timed_launch(results, config, 4096)
        if timed is None or LAZY_RESCALE in config.step.traits:  # the data decide what it executes
            continue
        problem, chip = timed
        assert chip.sms == SM_COUNTS[results.provenance.gpu]
        measurement = results.find(config.short_form(), config.dtype.short, 4096)
        assert problem == measurement.asked
        found = kernel_of(config, "sm_90")
        assert predict_config(found, config, problem, chip).least_ms < measurement.median_ms
        checked += 1
    if of_version(1) in configs:  # the part that leads
        assert checked >= 16


def test_what_was_not_measured_has_no_launch(results):
    config = of_version(16)
    assert timed_launch(results, config, 4097) is None
    unread = tuple(replace(m, sm_mhz=()) for m in results.measurements)
    assert timed_launch(replace(results, measurements=unread), config, 4096) is None
    unknown = replace(results, provenance=replace(results.provenance, gpu="GPU of tomorrow"))
    assert timed_launch(unknown, config, 4096) is None


# -- stalls and scoreboards ------------------------------------------------------------------------


def test_an_instruction_waits_for_the_last_that_raised_the_scoreboard():
    planted = kernel("""
        loop: LDSM.16.M88.4 R8, [R1] ; stall=2 write=0
        LDSM.16.M88.4 R12, [R1] ; stall=3 write=0
        MUFU.EX2 R3, R2 ; stall=4 write=1 read=2
        HMMA.16816.F32 R4, R8, R12, R4 ; stall=1 wait=0
        FADD R2, R2, R2 ; stall=1 wait=2
        HMMA.16816.F32 R4, R8, R12, R4 ; stall=1 wait=0
        @P0 BRA loop ; stall=5
        EXIT
    """)
    waits = scoreboard_waits(planted, planted.loops[0])
    found = [
        (w.producer.address // 16, w.consumer.address // 16, w.for_result, w.instructions, w.cycles)
        for w in waits
    ]
    # the second wait for scoreboard 0 has nothing to wait for
    assert found == [(1, 3, True, 2, 7), (2, 4, False, 2, 5)]


def test_a_wait_reaches_around_the_loop():
    planted = kernel("""
        loop: HMMA.16816.F32 R4, R8, R12, R4 ; stall=4 wait=3
        LDSM.16.M88.4 R8, [R1] ; stall=2 write=3
        @P0 BRA loop ; stall=5
        EXIT
    """)
    (wait,) = scoreboard_waits(planted, planted.loops[0])
    assert (wait.instructions, wait.cycles) == (2, 7)
    (group,) = group_waits([wait])
    assert (group.producer, group.consumer, group.cycles) == ("ldmatrix", "tensor", (7,))


def test_what_was_raised_before_the_loop_is_left_out():
    planted = kernel("""
        LDG.E R2, [R4] ; write=0
        loop: FADD R1, R1, R2 ; wait=0
        @P0 BRA loop
        EXIT
    """)
    assert scoreboard_waits(planted, planted.loops[0]) == []


def test_stalls_are_added_up_by_class_and_filler_apart():
    planted = kernel(LOOP)
    body = body_of(planted, planted.loops[0])
    groups = {group.name: (group.instructions, group.cycles) for group in group_stalls(body)}
    assert groups["tensor"] == (2, 11)
    assert groups["filler"] == (1, 1)
    assert "shared load" not in groups
    found = loop_bound(planted, planted.loops[0])
    assert sum(cycles for _, cycles in groups.values()) == found.stall
