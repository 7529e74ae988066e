"""The check against a GPU's counters: predictions, reading ncu, comparing, and the page."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_backend import fake_backend, load_tool
from sass_text import DEFAULT, PROGRESSION, kernel, of_version, progression_kernels

from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.measure.counter_check import shape_for
from flash_helpers.measure.execution_check import (
    METRICS,
    OPCODE_METRIC,
    QUANTITIES,
    ExecutionCheck,
    ExecutionRecord,
    predict_launch,
    predict_roles,
    profile_launches,
)
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.machine_code import library_kernels
from flash_helpers.measure.nsight import NsightCompute, parse_csv
from flash_helpers.measure.simulator_check import SimulatorCheck
from flash_helpers.registry.hopper import HOPPER

pytestmark = pytest.mark.slow

BEGIN, END = ExecutionCheck.MARKERS
EXECUTED = "smsp__inst_executed.sum"
CONFIG = of_version(1)
SHAPE = AttentionForward(batch=1, heads=1, len_q=128)
HMMA = "HMMA.16816.F32 R4, R8, R12, R4"


# -- predicting ------------------------------------------------------------------------------------


def test_every_warp_of_the_launch_is_counted():
    each = CONFIG.mma_per_key_block
    planted = kernel(
        "MOV R1, R2\nloop: "
        + f"{HMMA}\n" * each
        + "@!PT LDS RZ, [RZ]\n@P1 FADD R1, R1, R1\n@P0 BRA loop\nEXIT\nself: BRA self"
    )
    shape = AttentionForward(batch=2, heads=3, len_q=128)
    record = predict_launch(planted, CONFIG, shape)
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


def test_an_h100_executed_just_the_work_and_the_filler(root: Path):
    """The counters that were recorded for the check of the simulator. A kernel that has changed
    since executes another number; most have not."""
    recorded = SimulatorCheck.load(root / "benchmarks/results/simulator_h100.json")
    kernels = progression_kernels("sm_90")
    by_name = {config.short_form(): config for config in PROGRESSION}
    equal = 0
    for measured in recorded.kernels:
        config = by_name[measured.name]
        shape = AttentionForward(measured.batch, measured.n_heads, measured.seq_len)
        record = predict_launch(kernels[config], config, shape)
        predicted = record.predicted["work"] + record.predicted["filler"]
        equal += predicted == measured.hardware[EXECUTED]
        assert (
            record.predicted["tensor"]
            == measured.hardware["smsp__inst_executed_pipe_tensor_op_hmma.sum"]
        )
    if kernels[CONFIG].compiler.version[:2] == (13, 0):
        assert equal >= 0.75 * len(recorded.kernels)


# -- Nsight Compute --------------------------------------------------------------------------------


def symbol_of(name: str) -> str:
    return f"void {name.partition('_')[0]}::forward_kernel<{name}>(ForwardKernelArgs)"


def test_counts_by_opcode_are_read_from_the_cell():
    text = (
        f'"ID","Kernel Name","{OPCODE_METRIC}","{EXECUTED}"\n'
        f'"0","{symbol_of("v1_x")}","1,696 (HMMA: 1,024; LDSM: 512; F2FP: 160)","1696"\n'
    )
    (launch,) = parse_csv(text)
    assert launch.values == {OPCODE_METRIC: 1696.0, EXECUTED: 1696.0}
    assert launch.instances == {OPCODE_METRIC: {"HMMA": 1024.0, "LDSM": 512.0, "F2FP": 160.0}}


def test_a_cell_holds_the_instances_of_the_longest_kernel():
    instances = {f"at_{n}": float(n) for n in range(20_000)}  # of each instruction
    cell = "; ".join(f"{name}: {count:.0f}" for name, count in instances.items())
    (launch,) = parse_csv(f'"ID","Kernel Name","inst__executed"\n"0","k","1 ({cell})"\n')
    assert launch.instances == {"inst__executed": instances}


class FakeNcu:
    """Counts what the text predicts, plus `off`, and lacks some metrics."""

    def __init__(
        self, records: Sequence[ExecutionRecord], lacks: Sequence[str] = (), off: int = 0
    ) -> None:
        self.records = {record.name: record for record in records}
        self.lacks, self.off = lacks, off
        self.commands: list[Sequence[str]] = []

    def _cell(self, record: ExecutionRecord, metric: str) -> str:
        if metric == OPCODE_METRIC:
            counts = "; ".join(f"{k}: {v:,}" for k, v in record.predicted_opcodes.items())
            return f"{sum(record.predicted_opcodes.values())} ({counts})"
        quantity = next(q for q in QUANTITIES if metric in q.metrics)
        if not record.has(quantity):
            return "12345"
        return str(record.counted(quantity)[0] + self.off * (metric == EXECUTED))

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "--query-metrics" in command:
            names = {m.partition(".")[0] for m in METRICS if m not in self.lacks}
            return subprocess.CompletedProcess(command, 0, "\n".join(sorted(names)), "")
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "Version 2025.3\n", "")
        options = dict(itertools.pairwise(command))
        metrics = options["--metrics"].split(",")
        log = Path(options["--log-file"])
        missing = [metric for metric in metrics if metric in self.lacks]
        if missing:
            return subprocess.CompletedProcess(
                command, 1, "", f"Failed to find metric {missing[0]}"
            )
        names = command[command.index("--kernel") + 1 :]
        rows = [["ID", "Kernel Name", *metrics]]
        for n, name in enumerate(names):
            cells = [self._cell(self.records[name], metric) for metric in metrics]
            rows.append([str(n), symbol_of(name), *cells])
        log.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in rows) + "\n")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture(scope="module")
def records() -> list[ExecutionRecord]:
    return [
        predict_launch(progression_kernels("sm_90")[config], config, SHAPE)
        for config in (of_version(1), of_version(10))
    ]


def measured(
    records: Sequence[ExecutionRecord], fake: FakeNcu
) -> tuple[list[ExecutionRecord], str]:
    ncu = NsightCompute("ncu", None, fake)
    return profile_launches(records, ncu, ["python", "run.py"], ncu.available(METRICS))


def check_of(
    found: Sequence[ExecutionRecord], failure: str = "", unavailable: tuple[str, ...] = ()
) -> ExecutionCheck:
    where = provenance(fake_backend(), "check_executed_counts.py", "abc")
    return ExecutionCheck(
        provenance=where,
        profiler="Nsight Compute 2025.3",
        profiler_failure=failure,
        unavailable=unavailable,
        kernels=tuple(found),
    )


def test_launches_of_one_shape_are_counted_in_two_runs(records):
    fake = FakeNcu(records)
    found, failure = measured(records, fake)
    assert not failure
    runs = [command for command in fake.commands if "--metrics" in command]
    assert len(runs) == 2
    assert "--print-metric-instances" in runs[1] and "--print-metric-instances" not in runs[0]
    assert check_of(found).disagreements() == []
    for record in found:
        assert record.hardware_opcodes == record.predicted_opcodes
        assert record.counted(QUANTITIES[0])[0] == record.hardware[EXECUTED]


def test_metrics_that_the_gpu_lacks_are_told_and_others_taken(records):
    lacks = [EXECUTED, OPCODE_METRIC, "smsp__inst_executed_pipe_uniform.sum"]
    fake = FakeNcu(records, lacks)
    available = NsightCompute("ncu", None, fake).available(METRICS)
    assert set(METRICS) - set(available) == {EXECUTED, "smsp__inst_executed_pipe_uniform.sum"}
    found, failure = measured(records, fake)
    assert failure.startswith("by opcode: ")
    assert found[0].metric(QUANTITIES[0]) == "sm__inst_executed.sum"
    assert found[0].hardware_opcodes == {}
    assert check_of(found).disagreements() == []


def test_one_instruction_too_many_is_found(records):
    found, _ = measured(records, FakeNcu(records, off=1))
    lines = check_of(found).disagreements()
    assert len(lines) == len(records)
    assert lines[0].startswith(f"{CONFIG.short_form()}: all instructions: ")
    text = check_of(found).tables()
    assert "| all instructions | 0 of 2 |" in text and "**no**" in text


def test_an_opcode_that_differs_is_named(records):
    found, _ = measured(records, FakeNcu(records))
    first = replace(
        found[0], hardware_opcodes={**found[0].hardware_opcodes, "HMMA": 1.0, "WARPGROUP": 2.0}
    )
    assert set(first.differing_opcodes) == {"HMMA", "WARPGROUP"}
    assert len(check_of([first]).disagreements()) == 2
    assert "differ: HMMA, WARPGROUP" in check_of([first]).tables()


def test_what_is_not_claimed_is_no_disagreement(records):
    found, _ = measured(records, FakeNcu(records))
    metric = "smsp__inst_executed_pipe_alu.sum"
    first = replace(found[0], hardware={**found[0].hardware, metric: 1.0})
    assert check_of([first]).disagreements() == []
    assert "not claimed" in check_of([first]).tables()


def test_what_was_not_measured_is_said(records):
    text = check_of(records, "no permission").tables()
    assert "| all instructions | not measured |" in text
    assert "Without some counters: no permission" in text
    with pytest.raises(ValueError, match="holds no kernel"):
        check_of([]).tables()


# -- family hopper ---------------------------------------------------------------------------------


def predicted(step: int) -> ExecutionRecord:
    config = next(c for c in HOPPER.progression() if c.hopper == step)
    (machine_code,) = library_kernels("sm_90a", [config]).values()
    return predict_roles(machine_code, config, shape_for(config, 128))


@pytest.fixture(scope="module")
def record() -> ExecutionRecord:
    """Of h12."""
    return predicted(12)


class TestRoles:
    """Warps that take different ways, and spin."""

    def test_what_ptxas_makes_one_for_one_is_predicted(self, record):
        warps, steps, products = 8, 1, 16
        assert record.predicted["wgmma"] == warps * steps * products
        opcodes = record.predicted_opcodes
        assert opcodes["HGMMA"] == record.predicted["wgmma"]
        assert opcodes["UTMALDG"] == 1 + 2 * steps
        assert opcodes["UTMASTG"] == warps * 2
        assert not {"SYNCS", "USETMAXREG", "BRA"} & set(opcodes)
        # of its six broadcasts ptxas joins some
        assert "SHFL" not in opcodes

    def test_what_is_under_a_predicate_is_not_predicted(self, record):
        """h15 passes its turn on under one where the PTX has a branch: an H200 counted more
        barriers than warps pass."""
        assert "BAR" in record.predicted_opcodes
        assert "BAR" not in predicted(15).predicted_opcodes

    def test_what_a_gpu_counts_besides_is_no_disagreement(self, record):
        (found,), failure = measured([record], FakeNcu([record]))
        assert not failure
        spun = replace(found, hardware_opcodes={**found.hardware_opcodes, "SYNCS": 12345.0})
        assert check_of([spun]).disagreements() == []
        wrong = replace(found, hardware_opcodes={**found.hardware_opcodes, "HGMMA": 1.0})
        (line,) = check_of([wrong]).disagreements()
        assert line.startswith(f"{record.name}: HGMMA: 128 predicted, 1 counted")

    def test_the_table_says_what_is_left_out(self, record, records):
        (found,), _ = measured([record], FakeNcu([record]))
        check = check_of([found])
        text = check.tables()
        assert f"| `{record.name}` | of {len(record.predicted_opcodes)}: all equal |" in text
        assert "| wgmma | 1 of 1 |" in text and "| all instructions |" not in text
        assert "Not compared: SYNCS, USETMAXREG" in text
        assert check.markers != check_of(records).markers == (BEGIN, END)


# -- the file, the page and the tool ---------------------------------------------------------------


def test_the_file_holds_everything(records, tmp_path):
    found, _ = measured(records, FakeNcu(records))
    check = check_of(found, "none", ("a__b.sum",))
    check.save(tmp_path / "check.json")
    assert ExecutionCheck.load(tmp_path / "check.json") == check
    (tmp_path / "other.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="holds no check of executed counts"):
        ExecutionCheck.load(tmp_path / "other.json")


def tool():
    return load_tool("tools/analysis/check_executed_counts.py")


def test_one_command_writes_the_page_and_another_checks_it(records, tmp_path, capsys):
    data, page = tmp_path / "check.json", tmp_path / "sass.md"
    check_of(measured(records, FakeNcu(records))[0]).save(data)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    where = ["--json", str(data), "--docs", str(page)]
    assert tool().main(["--check", *where]) == 1
    assert "-old" in capsys.readouterr().out
    assert tool().main(["--write-docs", *where]) == 0
    assert ExecutionCheck.load(data).tables() in page.read_text()
    assert tool().main(["--check", *where]) == 0


def test_one_command_measures_and_saves(tmp_path, capsys, monkeypatch):
    module = tool()
    config = of_version(16)
    shape = shape_for(config, 128)
    ran = config.runs_as(shape.strides())
    record = predict_launch(progression_kernels("sm_90")[ran], ran, shape)
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    data = tmp_path / "check.json"
    arguments = ["--kernel", config.short_form(), "--seq", "128", "--json", str(data)]
    for off, status in ((0, 0), (1, 1)):
        ncu = NsightCompute("ncu", None, FakeNcu([record], off=off))
        monkeypatch.setattr(module.NsightCompute, "find", lambda raw, ncu=ncu: ncu)
        assert module.main(arguments) == status
    assert "all counts agree" in capsys.readouterr().out
    (found,) = ExecutionCheck.load(data).kernels
    assert found.name == ran.short_form()
    assert found.hardware[EXECUTED] == 1 + found.predicted["work"] + found.predicted["filler"]


def test_predictions_are_printed_without_a_gpu(capsys):
    assert tool().main(["--predict", "--kernel", "1", "--dtype", "bf16", "--arch", DEFAULT]) == 0
    printed = capsys.readouterr().out
    assert CONFIG.short_form() in printed and "ldmatrix" in printed
    assert tool().main(["--predict", "--arch", "sm_70"]) == 2
    assert "no kernel for sm_70" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_or_written(tmp_path, capsys):
    assert tool().main(["--json", str(tmp_path / "x.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_page_shows_what_the_data_says(root: Path):
    page, data = root / "docs/sass.md", root / "benchmarks/results/sass_h100.json"
    if page.is_file() and data.is_file():
        assert ExecutionCheck.load(data).tables() in page.read_text()
    else:
        assert not data.is_file(), f"{data} is on no page"
