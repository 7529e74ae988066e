"""Predicted counts beside a GPU's: predictions, counting, verdicts, files, pages and the tool."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fake_backend import ROOT, fake_backend, load_tool
from fake_ncu import FakeNcu
from sass_text import DEFAULT, PROGRESSION, kernel, kernel_of, of_version

from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.measure.counts import (
    ALL_INSTRUCTIONS,
    METRICS,
    OPCODE_METRIC,
    QUANTITIES,
    SASS,
    SIMULATOR,
    CountCheck,
    CountedKernel,
    with_counters,
)
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.machine_code import own_kernels
from flash_helpers.measure.predictions import (
    compare_outputs,
    predict_launch,
    simulate_launch,
)
from flash_helpers.registry.hopper import HOPPER

pytestmark = pytest.mark.slow

TOOL = "tools/analysis/check_counts.py"
EXECUTED = "smsp__inst_executed.sum"
MMA = "smsp__inst_executed_pipe_tensor_op_hmma.sum"
GMMA = "sm__inst_executed_pipe_tensor_op_gmma.sum"
LDSM_CONFLICTS = "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"
V1, V2 = of_version(1), of_version(2)
HMMA = "HMMA.16816.F32 R4, R8, R12, R4"


def hopper(step: int) -> Config:
    return next(c for c in HOPPER.progression() if (c.hopper, c.dtype) == (step, Element.BF16))


@functools.cache
def from_sass(step: int, family: str = "v") -> CountedKernel:
    if family == "h":
        config = hopper(step)
        (machine_code,) = own_kernels("sm_90a", [config]).values()
    else:
        config = of_version(step)
        machine_code = kernel_of(config, "sm_90")
    return predict_launch(machine_code, config, config.counted_on(128))


@functools.cache
def from_simulator(step: int, family: str = "v") -> CountedKernel:
    """Beside a float32 kernel in the GPU's place."""
    config = hopper(step) if family == "h" else of_version(step)
    return simulate_launch(config, config.counted_on(128), fake_backend())


# -- predictions -----------------------------------------------------------------------------------


def test_every_warp_of_the_launch_is_counted():
    each = V1.mma_per_key_block
    planted = kernel(
        "MOV R1, R2\nloop: "
        + f"{HMMA}\n" * each
        + "@!PT LDS RZ, [RZ]\n@P1 FADD R1, R1, R1\n@P0 BRA loop\nEXIT\nself: BRA self"
    )
    record = predict_launch(planted, V1, AttentionForward(batch=2, heads=3, len_q=128))
    warps, trips = 2 * 3 * (128 // 64) * 4, 128 // 64
    assert record.predicted["tensor"] == warps * trips * each
    assert record.predicted["filler"] == warps * trips
    assert record.predicted["work"] == warps * (2 + trips * (each + 2))
    # filler is issued under its opcode, but is no load
    assert record.predicted_opcodes["LDS"] == warps * trips
    assert record.predicted["shared load"] == record.predicted["lsu pipe"] == 0
    assert record.predicted["fma pipe"] == warps * trips
    assert sum(record.predicted_opcodes.values()) == (
        record.predicted["work"] + record.predicted["filler"]
    )


def test_an_h100_executed_just_the_work_and_the_filler():
    """The counters that were recorded for the simulator. A kernel that has changed since executes
    another number; most have not."""
    recorded = CountCheck.load(ROOT / "benchmarks/results/simulator_h100.json")
    by_name = {config.short_form(): config for config in PROGRESSION}
    equal = 0
    for measured in recorded.kernels:
        config = by_name[measured.name]
        record = predict_launch(kernel_of(config, "sm_90"), config, measured.asked)
        equal += record.counted(ALL_INSTRUCTIONS)[0] == measured.hardware[EXECUTED]
        assert record.predicted["tensor"] == measured.hardware[MMA]
    if kernel_of(V1, "sm_90").compiler.version[:2] == (13, 0):
        assert equal >= 0.75 * len(recorded.kernels)


def test_of_warps_with_roles_opcodes_are_predicted_that_ptxas_makes_one_for_one():
    record, (warps, steps, products) = from_sass(12, "h"), (8, 1, 16)
    assert record.predicted["wgmma"] == warps * steps * products
    opcodes = record.predicted_opcodes
    assert opcodes["HGMMA"] == record.predicted["wgmma"]
    assert opcodes["UTMALDG"] == 1 + 2 * steps
    assert opcodes["UTMASTG"] == warps * 2
    assert not {"SYNCS", "USETMAXREG", "BRA"} & set(opcodes)
    # of its six broadcasts ptxas joins some
    assert "SHFL" not in opcodes
    # h15 passes its turn on under a predicate where the PTX has a branch: an H200 counted more
    # barriers than warps pass
    assert "BAR" in opcodes and "BAR" not in from_sass(15, "h").predicted_opcodes


def test_a_kernel_is_compared_and_counted_in_the_simulator():
    first, second = from_simulator(1), from_simulator(2)
    assert first.outputs.bit_equal > 0.9
    assert first.outputs.max_row_ulps <= 1
    blocks, warps, steps = 2, 4, 2
    ldmatrix = blocks * warps * (8 + steps * (8 * 4 + 4 * 8))
    tile_chunks = 64 * 128 * 2 // 16
    tile_sectors = tile_chunks // 2
    expected = {
        "mma instructions": blocks * warps * steps * (8 * 8 + 4 * 16),
        "ldmatrix instructions": ldmatrix,
        # eight rows of a matrix in one bank: 7 conflicts each, four matrices
        "ldmatrix conflicts": 28 * ldmatrix,
        "cp.async instructions": blocks * (1 + 2 * steps) * tile_chunks // 32,
        "cp.async sectors": blocks * (1 + 2 * steps) * tile_sectors,
        "global store sectors": blocks * tile_sectors,
    }
    assert {name: first.predicted[name] for name in expected} == expected
    assert second.predicted["ldmatrix conflicts"] == 0


def test_a_kernel_on_wgmma_is_counted_by_its_own_units():
    record, (tiles, steps, warps) = from_simulator(2, "h"), (2, 1, 4)
    counted = {q.name: record.counted(q)[0] for q in QUANTITIES if record.has(q)}
    rows = tiles * (64 + steps * 2 * 128)
    assert counted["wgmma instructions"] == tiles * steps * warps * 16
    assert counted["TMA load instructions"] == tiles * (1 + 2 * steps)
    assert counted["sectors of TMA loads"] == rows * 128 * 2 // 32
    assert counted["sectors of TMA stores"] == tiles * 64 * 128 * 2 // 32
    assert not {"mma instructions", "ldmatrix wavefronts"} & set(counted)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_ulps_are_counted_in_representable_values(dtype):
    one = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=dtype)
    other = one.clone()
    other[1] = torch.nextafter(torch.tensor(-2.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))
    found = compare_outputs(one, other)
    # below 2 the numbers lie twice as close
    assert (found.bit_equal, found.max_ulps, found.max_row_ulps) == (0.75, 1, 0.5)
    smallest = torch.tensor([1], dtype=torch.int16).view(dtype)
    assert compare_outputs(smallest, -smallest).max_ulps == 2
    assert compare_outputs(one, one).max_ulps == 0


def test_outputs_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="16-bit"):
        compare_outputs(torch.zeros(2), torch.zeros(2))


def test_a_static_row_stride_gets_its_heads_at_the_same_cost():
    static = next(c for c in PROGRESSION if c.static_row_stride)
    shape = static.counted_on(512)
    assert (shape.row_stride, shape.len_q) == (static.static_row_stride, 128)
    assert V1.counted_on(512) == AttentionForward(1, 1, 512, dtype=V1.dtype)


# -- counting --------------------------------------------------------------------------------------


def agreeing(records: Sequence[CountedKernel], off: int = 0, **options) -> FakeNcu:
    """Counts as the records predict, with `off` more instructions executed."""
    by_name = {record.name: record for record in records}

    def cell(name: str, metric: str) -> str:
        record = by_name[name]
        if metric == OPCODE_METRIC:
            counts = "; ".join(f"{k}: {v:,}" for k, v in record.predicted_opcodes.items())
            return f"{sum(record.predicted_opcodes.values())} ({counts})"
        found = [q for q in QUANTITIES if metric in q.metrics and record.has(q)]
        ours = record.counted(found[0])[0] if found else 12345
        return str(ours + off * (metric == EXECUTED))

    return FakeNcu((*METRICS, OPCODE_METRIC), cell, **options)


def counted(
    records: Sequence[CountedKernel], ncu: FakeNcu
) -> tuple[list[CountedKernel], list[str]]:
    profiler = ncu.profiler()
    return with_counters(records, profiler, ["python", "run.py"], profiler.available(METRICS))


def check_of(kernels: Sequence[CountedKernel], source: str = SASS, **more) -> CountCheck:
    return CountCheck(
        source=source,
        provenance=provenance(fake_backend(), "check_counts.py", "abc"),
        profiler="Nsight Compute 2025.3",
        profiler_failure=more.pop("failure", ""),
        kernels=tuple(kernels),
        **more,
    )


def checked(*records: CountedKernel, source: str = SASS, off: int = 0) -> CountCheck:
    return check_of(counted(records, agreeing(records, off))[0], source)


def test_launches_of_one_shape_are_counted_in_one_run_and_once_more_by_opcode():
    records = [from_sass(1), from_sass(10), from_simulator(2)]
    ncu = agreeing(records)
    found, failures = counted(records, ncu)
    assert not failures
    first, second = ncu.commands
    assert list(first[-3:]) == [record.name for record in records]
    assert "--print-metric-instances" in second and "--print-metric-instances" not in first
    assert list(second[-3:]) == ["--kernel", *(record.name for record in records[:2])]
    for record in found[:2]:
        assert record.hardware_opcodes == record.predicted_opcodes
        assert record.counted(ALL_INSTRUCTIONS)[0] == record.hardware[EXECUTED]
    assert found[2].hardware_opcodes == {}
    assert check_of(found[:2]).disagreements() == []
    counted([*records, replace(records[2], problem=AttentionForward(1, 16, 128).record())], ncu)
    assert len(ncu.commands) == 2 + 3


def test_metrics_that_the_gpu_lacks_are_told_and_others_taken():
    records = [from_sass(1), from_sass(10)]
    lacks = [EXECUTED, OPCODE_METRIC, "smsp__inst_executed_pipe_uniform.sum"]
    ncu = agreeing(records, lacks=lacks)
    assert {*METRICS} - {*ncu.profiler().available(METRICS)} == {lacks[0], lacks[2]}
    found, (failure,) = counted(records, ncu)
    assert failure.startswith("by opcode: ")
    assert found[0].metric(ALL_INSTRUCTIONS) == "sm__inst_executed.sum"
    assert found[0].hardware_opcodes == {}
    assert check_of(found).disagreements() == []


def test_without_counters_the_outputs_still_count():
    record = from_simulator(1)
    found, (failure,) = counted([record], FakeNcu([], lacks=METRICS))
    assert found == [record]
    assert "counted nothing" in failure


# -- verdicts and tables ---------------------------------------------------------------------------


def with_count(check: CountCheck, metric: str, factor: float) -> CountCheck:
    """The check, with a counter of its first kernel so many times as large."""
    first, *others = check.kernels
    value = (first.hardware[metric] or 0) * factor
    changed = replace(first, hardware={**first.hardware, metric: value})
    return replace(check, kernels=(changed, *others))


@pytest.mark.parametrize(
    ("record", "metric", "factor", "wrong"),
    [
        (from_simulator, LDSM_CONFLICTS, 1.04, []),
        (from_simulator, LDSM_CONFLICTS, 1.06, ["ldmatrix bank conflicts"]),
        (from_simulator, MMA, 1.001, ["mma instructions"]),  # instructions have to be exact
        (from_simulator, EXECUTED, 3, []),  # SASS is not PTX
        (from_sass, EXECUTED, 1.0001, ["all instructions"]),
        (from_sass, "smsp__inst_executed_pipe_alu.sum", 0.1, []),
    ],
)
def test_counts_that_should_agree_and_do_not_are_found(record, metric, factor, wrong):
    check = with_count(checked(record(1)), metric, factor)
    assert [line.split(": ")[1] for line in check.disagreements()] == wrong
    assert all(line.startswith(V1.short_form()) for line in check.disagreements())


def test_opcodes_that_differ_are_named():
    (found,) = checked(from_sass(1)).kernels
    more = {**found.hardware_opcodes, "HMMA": 1.0, "WARPGROUP": 2.0}
    check = check_of([replace(found, hardware_opcodes=more)])
    assert set(check.kernels[0].differing_opcodes) == {"HMMA", "WARPGROUP"}
    assert len(check.disagreements()) == 2
    assert "differ: HMMA, WARPGROUP" in check.tables()


def test_of_warps_with_roles_what_a_gpu_counts_besides_is_no_disagreement():
    (found,) = checked(from_sass(12, "h")).kernels
    spun = replace(found, hardware_opcodes={**found.hardware_opcodes, "SYNCS": 12345.0})
    assert check_of([spun]).disagreements() == []
    wrong = replace(found, hardware_opcodes={**found.hardware_opcodes, "HGMMA": 1.0})
    (line,) = check_of([wrong]).disagreements()
    assert line.startswith(f"{found.name}: HGMMA: 128 predicted, 1 counted")


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of all tables by the first one."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_tables_show_each_quantity_and_each_kernel():
    check = checked(from_simulator(1), from_simulator(2), source=SIMULATOR)
    text = with_count(with_count(check, MMA, 2), EXECUTED, 3).tables()
    rows = rows_of(text)
    assert rows["mma instructions"] == ["1 of 2", "50%", "**no**", f"`{MMA}`"]
    assert rows["ldmatrix bank conflicts"][:3] == ["2 of 2", "0%", "within 5%"]
    assert rows["all instructions (PTX and SASS)"][2] == "not claimed"
    assert "**2,048 / 4,096**" in rows[f"`{V1.short_form()}`"]
    assert "Nsight Compute 2025.3" in text
    sass = rows_of(checked(from_sass(1), off=1).tables())
    assert sass["all instructions"][2] == "**no**"
    assert sass["kernel"] == [
        *("all instructions", "mma instructions", "filler", "work per mma", "opcodes")
    ]
    assert sass[f"`{V1.short_form()}`"][-1] == "all equal"


def test_counts_that_were_not_measured_are_named():
    check = check_of([from_simulator(1)], SIMULATOR, failure="no permission\nand more")
    rows = rows_of(check.tables())
    assert rows["mma instructions"][0] == "not measured"
    assert "2,048 / not measured" in rows[f"`{V1.short_form()}`"]
    assert "Without some counters: no permission\n" in check.tables()
    with pytest.raises(ValueError, match="holds no kernel"):
        check_of([]).tables()


@pytest.mark.parametrize(
    ("record", "shown", "said"),
    [
        (from_sass, ["128", "of 10: all equal"], "SYNCS, USETMAXREG, NANOSLEEP"),
        (from_simulator, ["128"], "Two counts are not compared in family hopper"),
    ],
)
def test_kernels_on_wgmma_have_a_table_of_their_own(record, shown, said):
    source = SASS if record is from_sass else SIMULATOR
    check, both = checked(record(12, "h"), source=source), checked(record(1), source=source)
    text = check.tables()
    rows = rows_of(text)
    assert {*shown} <= {*rows[f"`{check.kernels[0].name}`"]}
    assert rows["wgmma instructions"][0] == "1 of 1"
    assert not {"all instructions", "mma instructions"} & {*rows}
    assert said in text and said not in both.tables()
    begin, end = check.markers
    assert begin.endswith("-hopper:begin -->") and end.endswith("-hopper:end -->")
    mixed = replace(both, kernels=(*both.kernels, *check.kernels))
    assert mixed.markers == both.markers != check.markers


# -- the file, the pages and the tool --------------------------------------------------------------


def test_the_file_holds_everything(tmp_path):
    kernels = [*checked(from_sass(1)).kernels, *checked(from_simulator(1)).kernels]
    check = check_of(kernels, failure="none", unavailable=("a__b.sum",))
    check.save(tmp_path / "check.json")
    assert CountCheck.load(tmp_path / "check.json") == check


@pytest.mark.parametrize("text", ("", "[]", '{"format": 0}', '{"format": 3, "provenance": {}}'))
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "check.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no comparison of counts"):
        CountCheck.load(path)


def tool(*arguments: str) -> int:
    return load_tool(TOOL).main(list(arguments))


@pytest.mark.parametrize("family", ["v", "h"])
def test_one_command_writes_the_page_and_another_checks_it(family, tmp_path, capsys):
    data, page = tmp_path / "check.json", tmp_path / "page.md"
    check = checked(from_simulator(2, family), source=SIMULATOR)
    check.save(data)
    begin, end = check.markers
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    where = ("--json", str(data), "--docs", str(page))
    assert tool("--check", *where) == 1
    assert "-old" in capsys.readouterr().out
    assert tool("--write-docs", *where) == 0
    assert page.read_text() == f"before\n{begin}\n{check.tables()}\n{end}\nafter\n"
    assert tool("--check", *where) == 0


def test_the_pages_show_what_the_data_says():
    assert tool("--check") == 0


@pytest.fixture
def with_gpu(monkeypatch):
    """Makes the tool, with a GPU and an ncu that are faked."""
    module = load_tool(TOOL)
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def make(ncu: FakeNcu):
        monkeypatch.setattr(module.NsightCompute, "find", ncu.profiler)
        return module

    return make


def test_one_command_predicts_counts_and_saves(tmp_path, capsys, with_gpu):
    config = of_version(16)
    shape = config.counted_on(128)
    ran = config.runs_as(shape.strides())
    record = predict_launch(kernel_of(ran, "sm_90"), ran, shape)
    data = tmp_path / "check.json"
    arguments = ["--source", SASS, "--kernel", config.short_form(), "--seq", "128"]
    for off, status in ((0, 0), (1, 1)):
        module = with_gpu(agreeing([record], off))
        assert module.main([*arguments, "--json", str(data)]) == status
    assert "all counts agree" in capsys.readouterr().out
    (found,) = CountCheck.load(data).kernels
    assert found.name == ran.short_form()
    assert found.hardware[EXECUTED] == 1 + found.predicted["work"] + found.predicted["filler"]


def test_one_command_simulates_counts_and_saves(tmp_path, capsys, with_gpu):
    module = with_gpu(FakeNcu(METRICS))
    data, raw = tmp_path / "check.json", tmp_path / "raw"
    arguments = ["--source", SIMULATOR, "--kernel", V2.short_form(), "--seq", "128"]
    arguments += ["--json", str(data)]
    assert module.main([*arguments, "--raw", str(raw)]) == 1  # every counter is 7
    assert "mma instructions: 2,048 predicted, 7 counted" in capsys.readouterr().out
    assert CountCheck.load(data).kernels[0].name == V2.short_form() and raw.is_dir()
    assert module.main([*arguments, "--no-profiler"]) == 0
    (found,) = CountCheck.load(data).kernels
    assert found.hardware == {} and found.outputs is not None


@pytest.mark.parametrize(("source", "said"), [(SASS, "async copy"), (SIMULATOR, "cp.async")])
def test_predictions_are_printed_without_a_gpu(capsys, source, said):
    options = ["--source", source, "--arch", DEFAULT, "--seq", "64"]
    assert tool("--predict", *options, "--kernel", "1", "--dtype", "bf16") == 0
    printed = capsys.readouterr().out
    assert V1.short_form() in printed and said in printed


@pytest.mark.parametrize("options", [[], ["--source", SASS, "--no-profiler"]])
def test_wrong_usage_exits_with_2(options):
    with pytest.raises(SystemExit) as stopped:
        tool(*options)
    assert stopped.value.code == 2
