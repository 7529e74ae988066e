"""The report of a kernel, and the tool that prints it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_backend import load_tool
from sass_text import (
    ARCHITECTURES,
    DEFAULT,
    PROGRESSION,
    in_tiers,
    kernel,
    kernel_of,
    kernels_of,
    list_kernels,
    needs,
    of_version,
)

from flash_helpers.gpu import LIMITS
from flash_helpers.kernel_configs import AttentionForward, Config, config_from_short_form
from flash_helpers.measure.machine_code import (
    config_facts,
    own_kernels,
    predict_config,
)
from flash_helpers.measure.results import load_results
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.analyse.bound import Chip, Launch, predict
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.phases import NotDeterminedError
from flash_helpers.sass.analyse.report import KernelReport, report_on, verdicts
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import Kernel, SassError, SourceLine
from flash_helpers.sass.show.report_text import (
    SourceText,
    report_json,
    report_markdown,
    report_text,
)

pytestmark = pytest.mark.slow

HMMA = "HMMA.16816.F32 R4, R8, R12, R4"
SPILLS_IN_LOOP = f"""
    STL.64 [R1], R2 ; spill=1
    loop: {HMMA} ; live=20 stall=9
    LDL R5, [R1] ; live=24 spill=1
    @!PT LDL RZ, [RZ]
    @P0 BRA loop ; live=18
    LDL.128 R8, [R1] ; live=7 spill=1
    EXIT
"""
SPILLS_OUTSIDE = f"""
    STL [R1], R2 ; spill=1
    loop: {HMMA}
    @P0 BRA loop
    LDL R2, [R1] ; spill=1
    EXIT
"""
PLANTED = Path(__file__).parent / "kernels/spills.sm_90.cubin"
BIG_TILE = "v7_bf16_d128_Br128_Bc64_w4_async_eager_swizzled_Q1_K1_V1_db_ffma"


def report_of(found: Kernel, loop: int | None = None, launch: Launch | None = None) -> KernelReport:
    """The report of a kernel that no config is known of."""
    return report_on(KernelFacts(kernel=found, name=found.symbol, launch=launch), loop)


def config_report(config: Config, found: Kernel) -> KernelReport:
    """The report of a kernel of the library, without measurements."""
    return report_on(config_facts(config, found, None))


def verdict(text: str) -> str:
    return verdicts(report_of(kernel(text)))[0]


def test_spills_outside_loops_are_harmless():
    assert verdict(f"loop: {HMMA}\n@P0 BRA loop\nEXIT").startswith("No spills")
    found = verdict(SPILLS_OUTSIDE)
    assert found.startswith(
        "Harmless spills: 4 bytes of local stores and 4 of local loads per thread"
    )


def test_spills_in_the_main_loop_are_told_by_iteration():
    found = verdict(SPILLS_IN_LOOP)
    assert "the main loop: 0 bytes stored and 4 loaded in each iteration" in found
    assert "(8 bytes of local stores and 20 of local loads per thread in all)" in found


def test_an_array_in_local_memory_is_no_spill():
    text = f"loop: {HMMA}\nSTL [R5], R2\n@P0 BRA loop\nLDL.64 R2, [R5]\nEXIT"
    assert verdict(text).startswith("No spills: local memory holds arrays")
    assert "4 bytes of local stores and 8 of local loads per thread" in verdict(text)
    report = report_of(kernel(text))
    assert report.spills == ()
    assert "In loop 0: 1 local loads and stores, no spills, 4 bytes stored" in report_text(report)


def test_what_an_older_compiler_spilled_is_not_known():
    unmarked = kernel("STL [R5], R2\nEXIT")
    unmarked = replace(
        unmarked,
        resources=replace(unmarked.resources, spill_store_bytes=None, spill_load_bytes=None),
    )
    assert "which of it spills registers is not known" in verdicts(report_of(unmarked))[0]


def test_spills_into_shared_memory_are_told():
    text = "STS [R5], R2 ; spill=1\nSTS [R6], R3\nLDS R2, [R5] ; spill=1\nEXIT"
    assert "2 loads and stores of shared memory spill" in report_text(report_of(kernel(text)))


def test_a_stub_that_only_traps_is_called_so():
    text = "LDC R1, c[0x0][0x28]\nBPT.TRAP 0x1\nself: BRA self\nNOP"
    assert verdict(text).startswith("The kernel is a stub, which only traps (BPT.TRAP)")
    assert "for sm_90" in verdict(text)
    for working in ("@P0 BPT.TRAP 0x1\nEXIT", "EXIT", "BPT.TRAP 0x1\nEXIT", "self: BRA self"):
        assert "stub" not in verdict(working)


@pytest.mark.parametrize("capability", (75, 100, 103, 110, 120, 121))
def test_an_architecture_that_is_not_measured_is_reported_all_the_same(capability):
    planted = kernel("loop: FADD R1, R1, R1\n@P0 BRA loop\nEXIT", f"sm_{capability}")
    text = report_text(report_of(planted, launch=Launch(256)))
    assert f"of {LIMITS[capability].warps} warps" in text
    unknown = f"costs of instructions: unknown for sm_{capability}"
    assert (unknown in text) == (capability > 90)
    assert ("Bound by" in text) == (capability == 75)
    assert ("No bound: what instructions cost on" in text) == (capability > 90)


def test_without_limits_a_line_says_so_above_the_report():
    planted = kernel("FADD R1, R1, R1\nEXIT", "sm_70")
    text = report_text(report_of(planted, launch=Launch(256)))
    assert "occupancy: unknown, since the limits of sm_70 are not known" in text
    assert "Instructions" in text


@pytest.mark.parametrize("opcode", ("UTCHMMA", "HMMA.SP.16832.F32", "BMMA.168256.AND.POPC"))
def test_an_unknown_cost_on_the_tensor_pipe_leaves_no_bound(opcode):
    planted = kernel(f"loop: {opcode} R4, R8, R12, R4\nFADD R1, R1, R1\n@P0 BRA loop\nEXIT")
    report = report_of(planted)
    text = report_text(report)
    assert "No bound: what 1 of the tensor instructions take is not known for sm_90" in text
    assert "Bound by" not in text and "Lower bounds" not in text
    assert report_json(report)["bound"]["cycles"] is None
    assert report.facts.bound_cycles is None
    with pytest.raises(NotDeterminedError, match="the least time of a launch cannot be told"):
        predict(planted, {0: 3}, Launch(32), Chip(1, 1000.0))


def test_figures_of_other_shapes_are_per_4096_operations():
    wide = kernel("loop: HGMMA.64x128x16.F32.BF16 R4, R8, gdesc[UR4]\n@P0 BRA loop\nEXIT")
    loop = report_of(wide).facts.phases.main_loop
    # 64 x 128 x 16 multiplications and additions, of which each of four warps issues a quarter
    assert loop.tensor_operations == 2 * 64 * 128 * 16 // 4 == 16 * 4096
    assert loop.per_tensor(loop.work) == 2 / 16
    assert "work per 4096 tensor operations" in report_text(report_of(wide))
    usual = report_of(kernel(f"loop: {HMMA}\n@P0 BRA loop\nEXIT"))
    assert usual.facts.phases.main_loop.per_tensor(2) == 2
    assert "work per tensor instruction" in report_text(usual)


def test_the_planted_kernel_spills_in_its_loop():
    (planted,) = load_kernels(PLANTED)
    report = report_of(planted)
    assert "Spills in loops: the main loop" in verdicts(report)[0]
    assert {site.loop for site in report.spills} == {None, 0}


def test_the_spills_of_the_big_tile_are_found_where_its_registers_run_out():
    config = config_from_short_form(BIG_TILE)
    found = own_kernels(DEFAULT, [config])[config]
    report = config_report(config, found)
    by_place = {site.loop: site for site in report.spills}
    assert report.loop is not None
    assert by_place[report.loop.index].load_bytes > 0
    stored = sum(site.store_bytes for site in report.spills)
    assert stored == found.resources.spill_store_bytes > 0
    assert "Spills in loops: the main loop" in verdicts(report)[0]


def test_the_peak_of_live_registers_is_found():
    report = report_of(kernel(SPILLS_IN_LOOP, registers=32))
    assert report.peak is not None and report.peak.live is not None
    assert (report.peak.live.general, report.peak.address) == (24, 0x20)
    assert "At most 24 of 32 registers are live, first at 0x0020, in loop 0" in report_text(report)


def test_registers_that_a_kernel_takes_on_the_way_are_told_apart(planted: Path):
    """Of 168 registers per thread at its start no 195 can be live."""
    (found,) = load_kernels(planted / "roles.sm_90a.cubin", names=["roles"])
    text = report_text(report_on(KernelFacts(kernel=found, name="roles", identity={})))
    start = found.resources.registers
    assert f"starts with {start} registers, and USETMAXREG changes that" in text
    assert f" of {start} registers" not in text


@in_tiers(PROGRESSION)
def test_no_more_registers_are_live_than_the_kernel_has(configs):
    for config, found in kernels_of(configs, DEFAULT).items():
        peak = config_report(config, found).peak
        assert peak is not None and peak.live is not None
        assert 0 < peak.live.general <= found.resources.registers


def test_what_binds_depends_on_the_warps():
    text = f"loop: {HMMA} ; stall=15\n" + "FADD R1, R1, R1\n" * 20 + "@P0 BRA loop\nEXIT"
    planted = kernel(text)
    alone = report_of(planted)
    assert "Bound by latency" in verdicts(alone)[1] and "one warp" in verdicts(alone)[1]
    crowded = report_of(planted, launch=Launch(1024))
    assert crowded.facts.resident_warps == 64
    assert "Bound by issue: 64 resident warps take" in verdicts(crowded)[1]


def test_a_bound_on_a_cost_that_is_not_certain_says_so():
    text = "loop: " + "LDSM.16.M88.4 R8, [R1]\n" * 8 + "@P0 BRA loop\nEXIT"
    report = report_of(kernel(text), launch=Launch(1024))
    assert "Bound by the lsu pipe" in verdicts(report)[1]
    assert "its costs are not certain" in verdicts(report)[1]


@needs("sm_90")
def test_the_bound_stands_beside_the_measurement(root: Path):
    config = of_version(16)
    results = load_results(root / "benchmarks/results/h100.json")
    report = report_on(config_facts(config, kernel_of(config, "sm_90"), results))
    measured = results.find(config.short_form(), "bf16", 4096)
    told = report.facts.measurement
    assert measured is not None and told is not None
    assert (told.median_ms, told.speed, told.unit) == (
        measured.median_ms,
        measured.speed,
        "TFLOP/s",
    )
    text = report_text(report)
    assert f"Measured: {measured.median_ms:.3f} ms" in text
    assert "Lower bounds of a launch" in text
    without = report_text(config_report(config, kernel_of(config, "sm_90")))
    assert "Lower bounds of a launch" not in without


def test_another_launch_can_be_predicted():
    config = of_version(16)
    found = kernel_of(config, DEFAULT)
    problem = AttentionForward(batch=1, heads=16, len_q=8192, dtype=config.dtype)
    prediction = predict_config(found, config, problem, Chip(sms=108, mhz=1410.0))
    facts = replace(config_facts(config, found, None), prediction=prediction)
    text = report_text(report_on(facts))
    limit = f"the {prediction.binding} pipe allows no less than {prediction.least_ms:.3f} ms"
    assert f"Batch 1, heads 16, seq 8192, d_head 128: {limit}" in text
    assert "with 108 SMs at 1410 MHz" in text
    assert "of the measured time" not in text


def test_the_predicted_problem_is_the_measured_one_with_the_options_asked_for(capsys):
    chip = ("16", "--arch", DEFAULT, "--sms", "108", "--mhz", "1410")
    for options, problem in (
        ((), "Batch 16, heads 16, seq 4096, d_head 128"),
        (
            ("--seq", "8192", "--batch", "1", "--heads", "3"),
            "Batch 1, heads 3, seq 8192, d_head 128",
        ),
    ):
        assert tool(*chip, *options) == 0
        assert f"{problem}: the " in capsys.readouterr().out


def test_a_kernel_without_loops_is_reported():
    text = report_text(report_of(kernel("MOV R1, R2\nEXIT")))
    assert "The kernel has no loop." in text


def test_a_loop_that_is_not_there_is_an_error():
    with pytest.raises(SassError, match="loop 7 is not in planted: they are 0 to 0"):
        report_of(kernel(SPILLS_IN_LOOP), loop=7)
    with pytest.raises(SassError, match="it has no loop"):
        report_of(kernel("EXIT"), loop=0)


def test_the_listing_shows_every_instruction_of_the_loop_decoded():
    planted = kernel(
        f"MOV R1, R2\nloop: {HMMA} ; stall=9 write=2 wait=03 live=7\n@P0 BRA loop\nEXIT"
    )
    text = report_text(report_of(planted))
    listing = text.partition("\nMain loop\n")[2]
    (line,) = [line for line in listing.splitlines() if line.startswith("0x0010")]
    assert line.split()[1:9] == ["7", "s09", "-", "w2", "r-", "b:0--3--", "u:---", "tensor"]
    assert line.endswith(f"1.5  {HMMA}")
    assert "0x0000" not in listing


def test_the_listing_marks_spills(planted: Path):
    (spilling,) = load_kernels(planted / "ends.sm_90.cubin", names=["spills_beside_array"])
    report = report_on(KernelFacts(kernel=spilling, name="k", identity={}))
    spills = [i for i in report.body if i.is_spill]
    assert spills
    lines = [line for line in report_text(report).splitlines() if line.endswith("  // spill")]
    assert len(lines) == len(spills)


def test_source_lines_are_printed_once_above_what_they_became(tmp_path):
    (tmp_path / "planted.cu").write_text("first\n    second;\n")
    planted = kernel(f"loop: {HMMA} ; source=2\n{HMMA} ; source=2\n@P0 BRA loop ; source=9\nEXIT")
    text = report_text(report_of(planted), SourceText(tmp_path))
    assert text.count("// planted.cu:2  second;") == 1
    # a line that is not there is named all the same
    assert "// planted.cu:9\n" in text
    assert SourceText(tmp_path).line(SourceLine("nowhere.cu", 1)) == ""


def test_markdown_and_json_hold_the_same():
    config = of_version(1)
    found = kernel_of(config, DEFAULT)
    report = config_report(config, found)
    data = json.loads(json.dumps(report_json(report)))
    assert data["name"] == config.short_form()
    assert data["resources"]["registers"] == found.resources.registers
    assert len(data["loop"]["instructions"]) == len(report.body)
    assert data["phases"]["main loop"]["classes"]["tensor"] == 128
    assert data["verdicts"] == verdicts(report)
    text = report_markdown(report)
    assert text.startswith(f"# `{config.short_form()}`\n")
    assert text.count("```") == 2
    assert all(f"- {sentence}" in text for sentence in data["verdicts"])


# -- the tool --------------------------------------------------------------------------------------


def tool(*arguments: str) -> int:
    return load_tool("tools/analysis/sass_report.py").main(list(arguments))


def test_one_command_reports_a_version(capsys):
    for architecture in ARCHITECTURES:
        assert tool("16", "--arch", architecture, "--dtype", "bf16") == 0
        text = capsys.readouterr().out
        assert text.startswith(of_version(16).short_form())
        assert f"{architecture}, ptxas" in text
        # what an H100 measured says nothing about others
        assert ("Measured" in text) == (architecture == "sm_90")


def test_a_file_is_reported_like_a_version(capsys):
    library = str(library_path())
    _, symbol = next(k for k in list_kernels(library_path()) if "v3_bf16" in k[1])
    assert tool(library, "--kernel", "v3_bf16", "--arch", DEFAULT, "--json") == 0
    of_file = json.loads(capsys.readouterr().out)
    assert of_file["symbol"] == symbol
    assert tool("3", "--json") == 0
    assert json.loads(capsys.readouterr().out) == of_file
    assert tool("3", "--markdown") == 0
    assert capsys.readouterr().out.startswith(f"# `{of_version(3).short_form()}`")
