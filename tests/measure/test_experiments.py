"""The experiments on version 16's loop, their log, and the tool that measures them.

Their kernels run in the simulator wherever an nvcc can make PTX of them; none is committed, it
would be megabytes. That the committed facts of their machine code were read from these sources is
checked everywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_results import FakeMonitor, FakeTimer
from fake_backend import ROOT, fake_backend, float32_kernel, load_tool
from fake_toolchain import fake_toolchain

from flash_helpers.check.inputs import make_inputs, tensors_for
from flash_helpers.check.reference import attention_reference, measure_error
from flash_helpers.compile.build import COMPILE_FLAGS
from flash_helpers.compile.cubins import Cubin, CubinCompiler
from flash_helpers.compile.ptxas import PtxasReport
from flash_helpers.compile.toolchain import BuildError, Toolchain, find_toolchain
from flash_helpers.kernel_configs import AttentionForward, get_kernels_to_build
from flash_helpers.measure.benchmark import Contender, InputSet, default_shape
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import (
    FLASH,
    MMA_SYNC,
    BenchmarkResults,
    Measurement,
    Protocol,
    RateRecord,
    ResourceRecord,
    load_results,
)
from flash_helpers.ptx import load_ptx
from flash_helpers.runtime.simulator import run_kernel
from flash_helpers.sass.read.records import Block, Kernel, Loop, Operation

sys.path.insert(0, str(ROOT / "benchmarks/experiments"))

import overlap
from experiment_tables import loop_table, speed_table
from machine_code import LoopFacts, MachineCode, always_executed, facts_of_body
from overlap import EXPERIMENTS, Experiment, source_digest

pytestmark = pytest.mark.slow

NAMES = [experiment.name for experiment in EXPERIMENTS]
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
HEADER = (ROOT / overlap.HEADER).read_text()
LOG = (ROOT / "docs/tuning.md").read_text()
ENTRY = re.compile(r"^### `(\w+)`(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
VERDICTS = ("Gain", "Loss", "Neither")


@pytest.fixture
def tool() -> ModuleType:
    return load_tool("benchmarks/experiments/run_experiments.py")


def name_of(experiment: Experiment) -> str:
    return experiment.name


# The list and the log


def test_the_log_has_an_entry_for_each_experiment_in_their_order() -> None:
    assert [name for name, _ in ENTRY.findall(LOG)] == NAMES


def test_the_log_names_no_experiment_that_is_not_there() -> None:
    options = {"kv_stages", "lazy_rescale", "mma_row_sum"}
    words = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", LOG))
    assert words - options <= set(NAMES)


def test_each_experiment_has_a_parent_before_it() -> None:
    for n, experiment in enumerate(EXPERIMENTS):
        assert (experiment.parent in NAMES[:n]) == (n > 0), experiment.name


def test_no_two_experiments_are_the_same_kernel() -> None:
    assert len({e.unit().replace(e.name, "NAME") for e in EXPERIMENTS}) == len(NAMES)


def test_each_loop_in_the_header_is_in_an_experiment_and_each_experiment_has_one() -> None:
    in_header = set(re.findall(r"^struct (\w+) \{\n(?:(?!^\};).)*? run\(Out", HEADER, re.M | re.S))
    assert in_header == {e.loop.partition("<")[0] for e in EXPERIMENTS if e.loop}


def test_the_two_that_are_version_16_itself_are_built() -> None:
    built = get_kernels_to_build()
    for name in ("one_stage", "two_stages"):
        assert not BY_NAME[name].loop
        assert BY_NAME[name].config in built


def verdict_of(share: float, noise: float) -> str:
    """noise: what the same loop differs by from itself."""
    return "Gain" if share - 1 > noise else "Loss" if 1 - share > noise else "Neither"


def test_each_entry_but_the_first_ends_in_a_verdict_and_the_data_agrees(tool) -> None:
    said = {}
    for name, text in ENTRY.findall(LOG)[1:]:
        found = re.search(r"\*\*(\w+)\.\*\*$", text.strip())
        assert found and found[1] in VERDICTS, name
        said[name] = found[1]
    if (ROOT / tool.RESULTS).exists():
        results = load_results(ROOT / tool.RESULTS)

        def share(name: str) -> float:
            own, parent = (results.mean_tflops(n, "bf16") for n in (name, BY_NAME[name].parent))
            assert own is not None and parent is not None, name
            return own / parent

        noise = abs(share("ring_again") - 1)
        assert said == {name: verdict_of(share(name), noise) for name in said}


# The kernels


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return find_toolchain((80,))
    except BuildError as error:
        pytest.skip(f"the experiments were not run: {error}")


def compile_ptx(experiment: Experiment, toolchain: Toolchain, folder: Path) -> str:
    unit, output = folder / "unit.cu", folder / "unit.ptx"
    unit.write_text(experiment.unit())
    flags = (*COMPILE_FLAGS, "-arch=compute_80", "-ptx", "-o", output)
    command = [str(word) for word in (toolchain.nvcc, *flags, unit)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return output.read_text()


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name_of)
def test_each_is_right_in_the_simulator_and_has_no_bank_conflicts(
    toolchain, tmp_path, experiment
) -> None:
    text = compile_ptx(experiment, toolchain, tmp_path)
    (symbol,) = re.findall(r"\.entry (\w+)", text)
    kernel = load_ptx(text).kernel(symbol)
    # the watcher raises for a race or a copy that was not waited for
    for seq_len, distribution in ((128, "normal"), (256, "outliers")):
        shape = AttentionForward(1, 1, seq_len)
        tensors = tensors_for(experiment.config, *make_inputs(distribution, shape, torch.bfloat16))
        run = run_kernel(experiment.config, kernel, tensors)
        q, k, v, result = tensors.values()
        reference = attention_reference(q, k, v)
        error = measure_error(result, reference.expected)
        assert error.within(reference.bound), f"{error} is over {reference.bound}"
        assert run.counters.total.bank_conflicts == 0


def test_an_experiment_is_compiled_again_when_its_loop_changes(tmp_path) -> None:
    root = copy_sources(tmp_path)
    nvcc = fake_toolchain(tmp_path / "bin")
    ring = next(source for source in overlap.sources() if source.name == "ring")

    def compile_it() -> Cubin:
        compiler = CubinCompiler(root, tmp_path / "cubins", nvcc, 90, jobs=1, timeout_s=60)
        (compiled,) = compiler.compile_all([ring])
        assert compiled.cubin is not None, compiled.failure
        return compiled.cubin

    first = compile_it()
    assert compile_it() == first
    (root / overlap.HEADER).write_text(HEADER.replace("kResident = 0", "kResident = 1"))
    assert compile_it().path != first.path


def report_of(registers: int, stack_bytes: int) -> PtxasReport:
    return PtxasReport("_Zk", "sm_90", registers, stack_bytes, 12, 8, 1, 0, {})


def test_what_an_experiment_takes_is_what_ptxas_says_and_its_config() -> None:
    ring = next(source for source in overlap.sources() if source.name == "ring")
    cubin = Cubin(ring, Path("k.cubin"), "_Zk", "", report_of(registers=255, stack_bytes=16))
    # 96 KiB of K and V beside 32 of Q; 255 registers a thread leave room for two blocks of 128
    expected = ResourceRecord("ring", 255, 16, (128 + 4 * 64) * 256, 2)
    assert overlap.resources(cubin) == expected


def copy_sources(folder: Path) -> Path:
    root = folder / "root"
    shutil.copytree(ROOT / "src", root / "src")
    (root / overlap.HEADER).parent.mkdir(parents=True)
    shutil.copy(ROOT / overlap.HEADER, root / overlap.HEADER)
    return root


# The machine code


def test_the_facts_of_the_machine_code_are_of_these_sources_and_complete(tool) -> None:
    code = MachineCode.load(ROOT / tool.MACHINE_CODE)
    assert code.sources == source_digest(ROOT), "run run_experiments.py --sass, then --write-docs"
    assert [loop.name for loop in code.loops] == NAMES
    for loop in code.loops:
        config = BY_NAME[loop.name].config
        # 32 rows a warp: two row tiles for each mma of 8 keys and 16 of d_head, and the other way
        products = 2 * 2 * (config.B_c // 8) * (config.d_head // 16)
        assert loop.hmma == products + (2 * config.B_c // 16 if config.mma_row_sum else 0)
        assert loop.mufu >= config.B_c  # a row tile's exponentials are B_c / 2 a lane


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("kResident = 0", "kResident = 1", False),
        ("// What version 16 gives", "// That which version 16 gives", True),
    ],
)
def test_the_digest_is_of_the_code_and_not_of_comments(tmp_path, old, new, same) -> None:
    root = copy_sources(tmp_path)
    before = source_digest(root)
    assert old in HEADER
    (root / overlap.HEADER).write_text(HEADER.replace(old, new))
    assert (source_digest(root) == before) is same


def operations(text: str) -> list[Operation]:
    return [Operation(16 * n, 0, "", opcode, "", None) for n, opcode in enumerate(text.split())]


def test_the_facts_of_a_loop() -> None:
    facts = facts_of_body(
        "made_up",
        operations(
            "LDSM.16.M88.4 MUFU.EX2 HMMA.16816.F32 FADD FADD MUFU.EX2 IMAD.MOV.U32 HMMA.16816.F32 "
            "MUFU.EX2 HMMA.16816.F32 FMUL MOV STL.64 LDL FFMA"
        ),
    )
    assert facts == LoopFacts(
        name="made_up",
        instructions=15,
        hmma=3,
        ldmatrix=1,
        mufu=3,
        ffma=1,
        fmul=1,
        fadd=2,
        moves=2,
        local=2,
        gap=7,  # the five behind the last, and the two before the first
        hmma_behind=2,  # behind the second of three
    )


def test_a_loop_without_mma_has_no_facts() -> None:
    with pytest.raises(ValueError, match="made_up: the main loop has no HMMA"):
        facts_of_body("made_up", operations("MUFU.EX2 FADD"))


def test_a_block_that_a_branch_may_skip_is_not_always_executed() -> None:
    # 0 → 1 → (2 →) 3 → 1 or 4: the loop is 1, 2, 3
    successors = [(1,), (2, 3), (3,), (1, 4), ()]
    blocks = tuple(Block(n, n, n, found, ()) for n, found in enumerate(successors))
    loop = Loop(0, 1, frozenset({1, 2, 3}), None, 1)
    kernel = Kernel("k", "sm_90", "", None, None, (), blocks, (loop,), None)  # type: ignore[arg-type]
    assert always_executed(kernel, loop) == {1, 3}


# The tables


def made_up_results(speeds: dict[str, dict[int, float]]) -> BenchmarkResults:
    """Of the given TFLOP/s, by name and length."""

    def of(name: str, seq_len: int, tflops: float) -> Measurement:
        shape = default_shape(seq_len)
        ms = shape.operations / tflops / 1e9
        size = (shape.batch, shape.heads, seq_len, shape.d_head)
        return Measurement(name, "", "bf16", *size, 1, 1, (ms,), 0.0, 0.0, 1.0, 1.0, "")

    return BenchmarkResults(
        provenance=provenance(fake_backend(), "a command", "68cfc22"),
        protocol=Protocol(),
        clocks=(),
        resources=(ResourceRecord("one_stage", 254, 40, 65536, 2),),
        measurements=tuple(
            of(name, seq_len, tflops)
            for name, by_length in speeds.items()
            for seq_len, tflops in by_length.items()
        ),
        rates=(RateRecord(MMA_SYNC, "bf16", 10**12, (2.0,), ""),),  # 500 TFLOP/s
    )


def test_the_table_of_speeds() -> None:
    results = made_up_results(
        {
            FLASH: {1024: 200.0, 4096: 200.0},
            "one_stage": {1024: 220.0, 4096: 220.0},
            "whole_tiles": {1024: 200.0, 4096: 300.0},
        }
    )
    table = speed_table(results)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert list(rows) == [*(f"`{name}`" for name in NAMES), ""]
    assert rows["`one_stage`"][1:] == ["110.0", "110.0", "110.0", "-", "44.0", "254", "40"]
    # the harmonic mean of 200 and 300 is 240
    assert rows["`whole_tiles`"] == [
        f"{BY_NAME['whole_tiles'].title} (`one_stage`)",
        *("100.0", "150.0", "120.0", "109.1", "48.0", "-", "-"),
    ]
    assert rows["`ring`"][1:6] == ["-"] * 5  # not measured
    assert all(len(row) == len(table.header) for row in table.rows)
    lines = table.markdown().splitlines()
    assert lines[1].startswith("| :-- | :-- | --: |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_of_loops() -> None:
    loop = LoopFacts("ring", 871, 256, 80, 68, 69, 132, 64, 28, 2, 212, 96)
    table = loop_table(MachineCode("ptxas 13.0.88", "sm_90", "", (loop,)))
    cells = ["871", "256", "80", "68", "69", "132", "64", "28", "2", "212", "96"]
    assert list(table.rows[0]) == ["`ring`", *cells]
    assert len(table.header) == len(table.rows[0])


# The tool


def run(tool: ModuleType, *options: str) -> int:
    return tool.main(list(options))


@pytest.fixture
def repository(tool, tmp_path, monkeypatch) -> Path:
    """A copy with the sources, the log and the machine code, but no measurements."""
    root = copy_sources(tmp_path)
    for name in (tool.DOCS, tool.MACHINE_CODE):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    monkeypatch.setattr(tool, "ROOT", root)
    return root


def test_the_log_shows_what_the_data_says(tool, capsys) -> None:
    assert run(tool, "--write-docs", "--check") == 0, capsys.readouterr().out


def test_not_measured_yet_is_right_only_until_there_is_data(tool, repository, capsys) -> None:
    assert run(tool, "--write-docs") == 0
    assert tool.NOT_MEASURED in (repository / tool.DOCS).read_text()
    assert run(tool, "--write-docs", "--check") == 0
    results = made_up_results({FLASH: {1024: 200.0}, "one_stage": {1024: 250.0}})
    results.save(repository / tool.RESULTS)
    capsys.readouterr()
    assert run(tool, "--write-docs", "--check") == 1
    assert f"-{tool.NOT_MEASURED}" in capsys.readouterr().out
    assert run(tool, "--write-docs") == 0
    assert "| 125.0 |" in (repository / tool.DOCS).read_text()
    assert run(tool, "--write-docs", "--check") == 0
    (repository / tool.RESULTS).unlink()
    assert run(tool, "--write-docs", "--check") == 1


def test_check_finds_machine_code_of_other_sources(tool, repository, capsys) -> None:
    assert run(tool, "--write-docs") == 0
    (repository / overlap.HEADER).write_text(HEADER.replace("kResident = 0", "kResident = 1"))
    assert run(tool, "--write-docs", "--check") == 1
    assert "was made from other sources" in capsys.readouterr().out


def test_a_log_without_markers_is_a_usage_error(tool, repository, capsys) -> None:
    (repository / tool.DOCS).write_text("# no markers\n")
    assert run(tool, "--write-docs") == 2
    assert tool.SPEED_MARKERS[0] in capsys.readouterr().err


def test_check_alone_is_a_usage_error(tool, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(tool, "--check")
    assert stopped.value.code == 2
    assert "--write-docs" in capsys.readouterr().err


@pytest.fixture
def gpu(tool, monkeypatch) -> ModuleType:
    """The tool on a made-up GPU, on which `ring_ahead_3` is wrong."""

    def contender(cubin: Cubin) -> Contender:
        def run(inputs: InputSet) -> torch.Tensor:
            float32_kernel(cubin.config, *inputs.inputs, inputs.output)
            if cubin.source.name == broken[0]:
                inputs.output.add_(1)
            return inputs.output

        return Contender(cubin.source.name, None, run)

    def compiled(architecture: int) -> list[Cubin]:
        assert architecture == 90
        report = report_of(registers=255, stack_bytes=8)
        return [Cubin(source, Path("k.cubin"), "_Zk", "", report) for source in overlap.sources()]

    broken = [""]
    tool.broken = broken
    h100 = replace(provenance(fake_backend(), "", ""), gpu="an H100", compute_capability="9.0")
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(
        tool,
        "provenance",
        lambda backend, command, commit: replace(h100, command=command, commit=commit),
    )
    monkeypatch.setattr(tool, "compile_experiments", compiled)
    monkeypatch.setattr(tool, "contender", contender)
    monkeypatch.setattr(tool, "make_timer", lambda device, protocol: FakeTimer((50.0, 50.0)))
    monkeypatch.setattr(tool, "GpuMonitor", FakeMonitor)
    monkeypatch.setattr(tool, "default_shape", lambda seq_len: AttentionForward(1, 1, seq_len))
    return tool


def test_a_run_measures_every_experiment_beside_flash(gpu, tmp_path, capsys) -> None:
    path = tmp_path / "experiments.json"
    options = ("--seq", "256", "128", "--rounds", "2", "--commit", "68cfc22", "--json", str(path))
    assert run(gpu, *options) == 0
    results = load_results(path)
    assert results.provenance.commit == "68cfc22"
    assert results.seq_lens == [128, 256]
    assert results.names("bf16") == [FLASH, *NAMES]
    assert [record.name for record in results.resources] == NAMES
    assert {len(m.samples_ms) for m in results.measurements if m.name != FLASH} == {2}
    assert [record.name for record in results.rates] == [MMA_SYNC]
    assert len(results.clocks) == 2
    assert "`ring_again`" in capsys.readouterr().out


def test_an_experiment_that_is_wrong_fails_the_run(gpu, tmp_path, capsys) -> None:
    gpu.broken[0] = "ring_ahead_3"
    path = tmp_path / "experiments.json"
    assert run(gpu, "--seq", "128", "--rounds", "1", "--json", str(path)) == 1
    assert "ring_ahead_3 at 128: wrong output" in capsys.readouterr().out
    assert [m.name for m in load_results(path).failures] == ["ring_ahead_3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seq", "1000"), "seq_len 1000 is not a multiple of B_r 128"),
        (("--json", "another.json"), "results of two GPUs are never mixed"),
    ],
)
def test_bad_input_is_one_line_and_2(gpu, tmp_path, monkeypatch, capsys, options, said) -> None:
    monkeypatch.chdir(tmp_path)
    made_up_results({FLASH: {1024: 200.0}}).save(Path("another.json"))
    before = Path("another.json").read_text()
    assert run(gpu, *(("--json", "new.json") if "--json" not in options else ()), *options) == 2
    said_all = capsys.readouterr().err
    assert said in said_all
    assert len(said_all.strip().splitlines()) == 1
    assert Path("another.json").read_text() == before
    assert not Path("new.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tool, capsys) -> None:
    assert run(tool) == 2
    assert capsys.readouterr().err == ("the kernels were not run: no CUDA device was found\n")


def test_no_compiler_is_a_usage_error(tool, monkeypatch, capsys) -> None:
    def none(architectures: tuple[int, ...]) -> Toolchain:
        raise BuildError("no nvcc")

    monkeypatch.setattr(tool, "find_toolchain", none)
    assert run(tool, "--sass") == 2
    assert capsys.readouterr().err == "no nvcc\n"
