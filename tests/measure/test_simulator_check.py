"""The proof against hardware: reading ncu's tables, comparing, and writing the page."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_backend import fake_backend, load_tool

from flash_helpers.kernel_configs import AttentionForward, get_kernel_progression_configs
from flash_helpers.measure.counter_check import shape_for, with_counters, with_hardware
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.nsight import (
    NsightCompute,
    ProfiledLaunch,
    ProfilerError,
    find_launch,
    parse_csv,
    parse_metric_names,
)
from flash_helpers.measure.simulator_check import (
    METRICS,
    QUANTITIES,
    KernelRecord,
    SimulatorCheck,
    compare_kernel,
    compare_outputs,
)
from flash_helpers.registry.hopper import HOPPER

V1, V2 = (c for c in get_kernel_progression_configs() if c.step.id in ("v1", "v2") and c.dtype == 0)
BEGIN, END = SimulatorCheck.MARKERS
MMA = "sm__inst_executed_pipe_tensor_op_hmma.sum"
LDSM_CONFLICTS = "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"


def symbol_of(name: str) -> str:
    return f"void {name.partition('_')[0]}::forward_kernel<{name}>(ForwardKernelArgs)"


def symbol(config) -> str:
    return symbol_of(config.short_form())


RAW = f"""\
==PROF== Connected to process 17 (/usr/bin/python3)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 7 passes
"ID","Process ID","Kernel Name","Block Size","{MMA}","{LDSM_CONFLICTS}"
"","","","","inst",""
"0","17","{symbol(V1)}","(128, 1, 1)","65,536","1048576"
"1","17","{symbol(V2)}","(128, 1, 1)","65536","n/a"
==PROF== Disconnected from process 17
"""
DETAILS = f"""\
==PROF== Connected to process 17
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","{symbol(V1)}","Command line profiler metrics","{MMA}","inst","65,536"
"0","{symbol(V1)}","Command line profiler metrics","{LDSM_CONFLICTS}","","1,048,576"
"1","{symbol(V2)}","Command line profiler metrics","{MMA}","inst","65,536"
"1","{symbol(V2)}","Command line profiler metrics","{LDSM_CONFLICTS}","","(!) n/a"
"""


# -- Nsight Compute --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (RAW, DETAILS))
def test_both_forms_of_the_table_are_read(text):
    assert parse_csv(text) == [
        ProfiledLaunch(symbol(V1), {MMA: 65536.0, LDSM_CONFLICTS: 1048576.0}),
        ProfiledLaunch(symbol(V2), {MMA: 65536.0, LDSM_CONFLICTS: None}),
    ]


@pytest.mark.parametrize("text", ("", "==ERROR== ERR_NVGPUCTRPERM: no permission", "a,b\n1,2\n"))
def test_text_without_a_table_is_an_error_that_shows_it(text):
    with pytest.raises(ProfilerError, match="no table of launches") as error:
        parse_csv(text)
    assert text.strip() in str(error.value)


def test_metric_names_are_read_from_the_list():
    text = "Device NVIDIA H100 (GH100)\n-----\nMetric Name   Type\n-----\n"
    text += "smsp__inst_executed   Counter  # of warp instructions\n  dram__bytes  Counter  bytes\n"
    assert parse_metric_names(text) == {"smsp__inst_executed", "dram__bytes"}


class FakeNcu:
    """Counts what it has; refuses a command that names a metric that it lacks, as ncu does."""

    def __init__(self, lacks: Sequence[str] = (), says: str = "==ERROR== Failed to find metric {}"):
        self.lacks, self.says = lacks, says
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "--query-metrics" in command:
            names = {m.partition(".")[0] for m in METRICS if m not in self.lacks}
            return subprocess.CompletedProcess(command, 0, "\n".join(sorted(names)), "")
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "NVIDIA Nsight\nVersion 2025.3\n", "")
        options = dict(itertools.pairwise(command))
        metrics = options["--metrics"].split(",")
        log = Path(options["--log-file"])
        missing = [metric for metric in metrics if metric in self.lacks]
        if missing:
            log.write_text(f"==PROF== hello\n{self.says.format(missing[0])}\n")
            return subprocess.CompletedProcess(command, 1, "", f"ran with --metrics {metrics}")
        kernels = command[command.index("--kernel") + 1 :]
        header = ["ID", "Kernel Name", *metrics]
        rows = [[str(n), symbol_of(name), *["7"] * len(metrics)] for n, name in enumerate(kernels)]
        lines = [",".join(f'"{cell}"' for cell in row) for row in (header, *rows)]
        log.write_text("==PROF== hello\n" + "\n".join(lines) + "\n")
        return subprocess.CompletedProcess(command, 0, "", "")


def profiler(run: Callable, raw: Path | None = None) -> NsightCompute:
    return NsightCompute("ncu", raw, run)


def test_the_clocks_are_left_alone_and_everything_is_kept(tmp_path):
    ncu = FakeNcu()
    launches = profiler(ncu, tmp_path / "raw").profile(
        ["python", "run.py", "--kernel", V1.short_form()], "forward_kernel", METRICS, "p"
    )
    assert len(launches) == 1
    assert dict(launches[0].values) == dict.fromkeys(METRICS, 7.0)
    (command,) = ncu.commands
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--kernel-name") + 1] == "regex:forward_kernel"
    assert V1.short_form() in (tmp_path / "raw" / "p_0.csv").read_text()


@pytest.mark.parametrize("says", ("==ERROR== Failed to find metric {}", "==ERROR== no luck"))
def test_a_metric_that_the_gpu_lacks_is_left_out(says, tmp_path):
    ncu = FakeNcu(lacks=METRICS[2:3], says=says)
    (launch,) = profiler(ncu).profile(["run", "--kernel", "k"], "forward_kernel", METRICS)
    assert set(launch.values) == set(METRICS) - {METRICS[2]}


def test_a_profiler_without_permission_is_told_in_its_own_words():
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "==ERROR== ERR_NVGPUCTRPERM")

    with pytest.raises(ProfilerError, match="ERR_NVGPUCTRPERM"):
        profiler(run).profile(["run"], "forward_kernel", METRICS)


@pytest.mark.skipif(shutil.which("ncu") is not None, reason="ncu is installed")
def test_without_nsight_compute_there_is_an_error(monkeypatch):
    monkeypatch.setattr("flash_helpers.measure.nsight._PLACES", ())
    with pytest.raises(ProfilerError, match="was found neither"):
        NsightCompute.find()


# -- comparing -------------------------------------------------------------------------------------


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
    static = next(c for c in get_kernel_progression_configs() if c.static_row_stride)
    shape = shape_for(static, 512)
    assert (shape.row_stride, shape.len_q) == (static.static_row_stride, 128)
    assert shape_for(V1, 512) == AttentionForward(1, 1, 512, dtype=V1.dtype)


@pytest.fixture(scope="module")
def records() -> list[KernelRecord]:
    """Steps 1 and 2, simulated beside a float32 kernel in the GPU's place."""
    return [compare_kernel(config, shape_for(config, 128), fake_backend()) for config in (V1, V2)]


def test_a_kernel_is_compared_and_counted(records):
    first, second = records
    assert first.bit_equal > 0.9
    assert first.max_row_ulps <= 1
    blocks, warps, steps = 2, 4, 2
    mma = blocks * warps * steps * (8 * 8 + 4 * 16)
    ldmatrix = blocks * warps * (8 + steps * (8 * 4 + 4 * 8))
    assert first.predicted["mma instructions"] == mma
    assert first.predicted["ldmatrix instructions"] == ldmatrix
    # eight rows of a matrix in one bank: 7 conflicts each, four matrices
    assert first.predicted["ldmatrix conflicts"] == 28 * ldmatrix
    assert second.predicted["ldmatrix conflicts"] == 0
    tile_chunks = 64 * 128 * 2 // 16
    copies = blocks * (1 + 2 * steps) * tile_chunks // 32
    assert first.predicted["cp.async instructions"] == copies
    tile_sectors = tile_chunks // 2
    assert first.predicted["cp.async sectors"] == blocks * (1 + 2 * steps) * tile_sectors
    assert first.predicted["global store sectors"] == blocks * tile_sectors


def test_every_quantity_can_be_counted(records):
    for quantity in filter(records[0].has, QUANTITIES):
        assert records[0].counted(quantity)[1] is None
    assert all(quantity.metrics for quantity in QUANTITIES)
    assert {q.name for q in QUANTITIES if q.tolerance == 0} >= {"mma instructions"}


def test_a_launch_is_found_although_ncu_left_out_the_namespace(records):
    symbol = f"void forward_kernel<{records[0].name}>(ForwardKernelArgs)"
    launch = ProfiledLaunch(symbol, {METRICS[0]: 7.0})
    assert find_launch(records[0].name, [launch]) is launch
    assert with_hardware(records[0], launch, METRICS).hardware[METRICS[0]] == 7.0


def test_a_launch_is_found_by_the_kernel_in_its_symbol(records):
    launches = [ProfiledLaunch("void at::fill()", {}), *parse_csv(RAW)]
    first, second = (
        with_hardware(record, find_launch(record.name, launches), METRICS) for record in records
    )
    assert first.hardware[LDSM_CONFLICTS] == 1048576.0
    assert second.hardware[LDSM_CONFLICTS] is None
    assert second.hardware[MMA] == 65536.0


def test_each_shape_is_profiled_in_one_process(records):
    ncu = FakeNcu()
    found, failures = with_counters(records, profiler(ncu), ["python", "run.py"], METRICS)
    assert not failures
    assert all(record.hardware[MMA] == 7 for record in found)
    (command,) = ncu.commands
    assert command[-2:] == [V1.short_form(), V2.short_form()]
    other = replace(records[0], n_heads=16)
    with_counters([*records, other], profiler(ncu), ["python", "run.py"], METRICS)
    assert len(ncu.commands) == 3


def test_without_counters_the_outputs_still_count(records):
    ncu = FakeNcu(lacks=METRICS)
    found, (failure,) = with_counters(records, profiler(ncu), ["python", "run.py"], METRICS)
    assert found == records
    assert "counted nothing" in failure


# -- the file and the page -------------------------------------------------------------------------


def agreeing(record: KernelRecord) -> KernelRecord:
    """The record with hardware counters that are the simulator's own."""
    hardware: dict[str, float | None] = dict.fromkeys(METRICS)
    for quantity in filter(record.has, QUANTITIES):
        simulated, _ = record.counted(quantity)
        hardware[quantity.metrics[0]] = float(simulated)
    return replace(record, hardware=hardware)


@pytest.fixture
def check(records) -> SimulatorCheck:
    return SimulatorCheck(
        provenance=provenance(fake_backend(), "check_simulator.py", "abc"),
        profiler="Nsight Compute 2025.3",
        profiler_failure="",
        kernels=tuple(agreeing(record) for record in records),
    )


def with_count(check: SimulatorCheck, metric: str, factor: float) -> SimulatorCheck:
    first, *others = check.kernels
    value = (first.hardware[metric] or 0) * factor
    changed = replace(first, hardware={**first.hardware, metric: value})
    return replace(check, kernels=(changed, *others))


def test_the_file_holds_everything(check, tmp_path):
    path = tmp_path / "check.json"
    check.save(path)
    assert SimulatorCheck.load(path) == check


@pytest.mark.parametrize("text", ("", "[]", '{"format": 0}', '{"format": 2, "provenance": {}}'))
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "check.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no check of the simulator"):
        SimulatorCheck.load(path)


def test_counts_that_agree_are_told_apart_from_those_that_do_not(check):
    assert check.disagreements() == []
    assert with_count(check, LDSM_CONFLICTS, 1.04).disagreements() == []
    (line,) = with_count(check, LDSM_CONFLICTS, 1.06).disagreements()
    assert line.startswith(f"{V1.short_form()}: ldmatrix bank conflicts: ")
    # instructions have to be exact
    assert len(with_count(check, MMA, 1.001).disagreements()) == 1
    # SASS is not PTX
    assert with_count(check, "smsp__inst_executed.sum", 3).disagreements() == []


def test_the_table_shows_each_quantity_and_each_kernel(check):
    text = with_count(with_count(check, MMA, 2), "smsp__inst_executed.sum", 3).tables()
    summary = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| 1 of 2 | 50% | **no** |" in summary["mma instructions"]
    assert "| 2 of 2 | 0% | within 5% |" in summary["ldmatrix bank conflicts"]
    assert "not expected to agree" in summary["all instructions (PTX and SASS)"]
    assert "**2,048 / 4,096**" in summary[f"`{V1.short_form()}`"]
    assert "Nsight Compute 2025.3" in text


def test_what_was_not_measured_is_said(check, records):
    text = replace(check, kernels=tuple(records), profiler_failure="no permission").tables()
    assert "| mma instructions | not measured |" in text
    assert "2,048 / not measured" in text
    assert "Without some counters: no permission" in text


def tool(*arguments: str) -> int:
    return load_tool("tools/analysis/check_simulator.py").main(list(arguments))


def test_one_command_measures_and_saves(tmp_path, capsys, monkeypatch):
    module = load_tool("tools/analysis/check_simulator.py")
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(module.NsightCompute, "find", lambda raw: profiler(FakeNcu(), raw))
    data = tmp_path / "check.json"
    arguments = ["--kernel", V2.short_form(), "--seq", "128", "--json", str(data)]
    # every counter of the fake profiler is 7
    assert module.main([*arguments, "--raw", str(tmp_path / "raw")]) == 1
    assert "mma instructions: 2,048 in the simulator, 7 on the GPU" in capsys.readouterr().out
    (record,) = SimulatorCheck.load(data).kernels
    assert record.name == V2.short_form()
    assert (tmp_path / "raw").is_dir()
    assert module.main([*arguments, "--no-profiler"]) == 0
    assert SimulatorCheck.load(data).kernels[0].hardware == {}


def test_one_command_writes_the_page_and_another_checks_it(check, tmp_path, capsys):
    data, page = tmp_path / "check.json", tmp_path / "simulator.md"
    check.save(data)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    where = ("--json", str(data), "--docs", str(page))
    assert tool("--check", *where) == 1
    assert "-old" in capsys.readouterr().out
    assert tool("--write-docs", *where) == 0
    assert check.tables() in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert tool("--check", *where) == 0


def test_the_page_shows_what_the_data_says(root):
    page = (root / "docs/simulator.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    data = root / "benchmarks/results/simulator_h100.json"
    if data.exists():
        assert SimulatorCheck.load(data).tables() in page
    else:
        assert "Not measured yet." in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("path", ("analysis/check_simulator.py", "benchmark/run_kernels.py"))
def test_without_a_gpu_nothing_is_run_or_written(path, tmp_path, capsys):
    arguments = ["--json", str(tmp_path / "x.json")] if "check" in path else []
    assert load_tool(f"tools/{path}").main(arguments) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_launcher_launches_each_kernel_as_often_as_asked(monkeypatch):
    launched = []
    backend = fake_backend(lambda config, o: launched.append((config, tuple(o.shape))))
    module = load_tool("tools/benchmark/run_kernels.py")
    monkeypatch.setattr(module, "find_backend", lambda device: backend)
    assert module.main(["--kernel", V1.short_form(), "--repeat", "3", "--seq", "64"]) == 0
    assert launched == 3 * [(V1, (1, 64, 1, 128))]


# -- family hopper ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record() -> KernelRecord:
    """Of h2."""
    (config,) = (c for c in HOPPER.progression() if (c.hopper, c.dtype) == (2, V1.dtype))
    return compare_kernel(config, shape_for(config, 256), fake_backend())


class TestHopper:
    """A kernel on wgmma: other counters, and a table of its own."""

    def test_its_own_units_are_counted_and_those_of_others_are_not(self, record):
        tiles, steps, warps = 4, 2, 4
        counted = {q.name: record.counted(q)[0] for q in QUANTITIES if record.has(q)}
        assert counted["wgmma instructions"] == tiles * steps * warps * 16
        assert counted["TMA load instructions"] == tiles * (1 + 2 * steps)
        rows = tiles * (64 + steps * 2 * 128)
        assert counted["sectors of TMA loads"] == rows * 128 * 2 // 32
        assert counted["sectors of TMA stores"] == tiles * 64 * 128 * 2 // 32
        assert not {"mma instructions", "ldmatrix wavefronts"} & set(counted)

    def test_it_is_counted_beside_others(self, records, record):
        found, failures = with_counters(
            [*records, record], profiler(FakeNcu()), ["python", "run.py"], METRICS
        )
        assert not failures
        assert found[-1].hardware["sm__inst_executed_pipe_tensor_op_gmma.sum"] == 7
        lines = SimulatorCheck(
            provenance=provenance(fake_backend(), "check_simulator.py", "abc"),
            profiler="Nsight Compute 2025.3",
            profiler_failure="",
            kernels=tuple(found),
        ).disagreements()
        of_hopper = [line for line in lines if line.startswith("h2_")]
        assert any(": wgmma instructions: " in line for line in of_hopper)
        assert not any(": mma instructions: " in line for line in of_hopper)

    def test_its_table_has_markers_of_its_own(self, record, check, tmp_path):
        data, page = tmp_path / "check.json", tmp_path / "simulator.md"
        alone = replace(check, kernels=(agreeing(record),))
        begin, end = alone.markers
        assert check.markers == (BEGIN, END) != (begin, end)
        alone.save(data)
        page.write_text(f"{BEGIN}\nof others\n{END}\n{begin}\nold\n{end}\n")
        assert tool("--write-docs", "--json", str(data), "--docs", str(page)) == 0
        text = page.read_text()
        assert f"{BEGIN}\nof others\n{END}" in text and "\nold\n" not in text
        assert "| wgmma instructions | 1 of 1 |" in text and "| mma instructions |" not in text
        assert "Not compared of family hopper" in text
        assert "Not compared" not in check.tables()
