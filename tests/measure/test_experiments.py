"""The experiments on step o5, the log of those before, and the tool that measures them.

Their kernels run in the simulator wherever a compiler can make PTX of them; none is committed, it
would be megabytes. That the committed facts of their machine code were read from these sources is
checked everywhere.
"""

import functools
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_tensors import attention_tensors
from benchmark_results import FakeSensor, FakeTimer
from fake_backend import ROOT, fake_backend, float32_kernel, load_tool
from fake_toolchain import FakeCompiler

from flash_helpers import ptx
from flash_helpers.check.errors import measure_error
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.compilers import Compiler, find_compiler
from flash_helpers.compile.cubins import Cubin, read_cubin
from flash_helpers.compile.jit import Jit
from flash_helpers.compile.ptxas import PtxasReport
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.measure import command_line, timing
from flash_helpers.measure.benchmark import Contender, InputSet
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import (
    BURST,
    FLASH,
    MMA_SYNC,
    SUSTAINED,
    BenchmarkResults,
    Measurement,
    Protocol,
    RateRecord,
    ResourceRecord,
    load_results,
)
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS, default_shape
from flash_helpers.operations.attention_forward.reference import attention_reference
from flash_helpers.runtime.backend import Execute
from flash_helpers.runtime.simulator import run_kernel
from flash_helpers.sass.read.records import Block, Kernel, Loop, Operation

sys.path.insert(0, str(ROOT / "benchmarks/experiments"))

import experiments
from experiment_tables import loop_table, speed_table
from experiments import CONFIG, EXPERIMENTS, Experiment, source_digest
from machine_code import LoopFacts, MachineCode, always_executed, facts_of_body

pytestmark = pytest.mark.slow

NAMES = [experiment.name for experiment in EXPERIMENTS]
PARENT, IMMEDIATE, OPTIMISTIC = EXPERIMENTS
HEADER = (ROOT / OPTIMISTIC.header).read_text()
CLOSED, OPEN = (ROOT / "docs/tuning.md").read_text().split("\n## Not beaten yet\n")
ENTRY = re.compile(r"^### `(\w+)`(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


@pytest.fixture
def tool() -> ModuleType:
    return load_tool("benchmarks/experiments/run_experiments.py")


def name_of(experiment: Experiment) -> str:
    return experiment.name


# The list and the log


def closed_table() -> dict[str, list[str]]:
    """The cells of the first table that has experiments, by name."""
    table = CLOSED.split("| experiment |")[1]
    return {
        row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \|" + r"([^|]*)\|" * 5, table, re.M)
    }


def test_the_log_has_an_entry_for_each_line_of_its_table() -> None:
    assert [name for name, _ in ENTRY.findall(CLOSED)] == list(closed_table())


def test_each_verdict_of_the_log_is_that_of_its_table() -> None:
    shares = {name: row[-1].strip() for name, row in closed_table().items()}
    assert shares.pop("one_stage") == "-"
    percent = {name: float(share) - 100 for name, share in shares.items()}
    noise = abs(percent["ring_again"])  # what the same loop differs by from itself
    for name, text in ENTRY.findall(CLOSED)[1:]:
        found = percent[name]
        verdict = "Gain" if found > noise else "Loss" if -found > noise else "Neither"
        assert text.strip().endswith(f"**{verdict}.**"), name


def test_each_experiment_has_an_entry_with_what_was_expected() -> None:
    entries = ENTRY.findall(OPEN)
    assert [name for name, _ in entries] == NAMES[1:]
    assert all("*Expected:*" in text and "*Came out:*" in text for _, text in entries)


# The kernels


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Callable[[Experiment, Element], ptx.Kernel]:
    """Compiles an experiment."""
    try:
        found = find_compiler()
    except BuildError as error:
        pytest.skip(f"the experiments were not run: {error}")
    jit = Jit(ROOT, Cache(tmp_path_factory.mktemp("kernels")), lambda: found, jobs=1)

    @functools.cache
    def compiled(experiment: Experiment, dtype: Element) -> ptx.Kernel:
        (made,) = jit.get([experiment.unit(dtype)], "compute_80")
        return ptx.load_ptx(made.ptx_path.read_text()).kernel(made.symbol)

    return compiled


def run_right(config: Config, kernel: ptx.Kernel, q, k, v) -> ptx.Counts:
    """Runs the kernel, watched for races and copies that were not waited for; counts its work."""
    tensors = attention_tensors(config, q, k, v)
    run = run_kernel(config, kernel, tensors)
    reference = attention_reference(q, k, v)
    error = measure_error(tensors["o"], reference.expected["o"])
    assert error.within(reference.bounds["o"]), f"{error} is over {reference.bounds['o']}"
    return run.counters.total


@pytest.mark.parametrize("dtype", (Element.FP16, Element.BF16))
@pytest.mark.parametrize("experiment", (IMMEDIATE, OPTIMISTIC), ids=name_of)
def test_each_is_right_in_the_simulator_and_has_no_bank_conflicts(
    kernel, experiment, dtype
) -> None:
    config = CONFIG.replace(dtype=dtype)
    for seq_len, distribution in [(256, "outliers"), *((128, name) for name in DISTRIBUTIONS)]:
        problem = AttentionForward(1, 1, seq_len)
        inputs = make_inputs(distribution, problem, getattr(torch, dtype.torch_name))
        assert run_right(config, kernel(experiment, dtype), *inputs).bank_conflicts == 0


@pytest.mark.parametrize(
    ("dtype", "row", "growth", "times"),
    [
        (Element.BF16, 0, -70, 1),
        (Element.BF16, 0, 50, 1),
        (Element.BF16, 16, 70, 2),
        (Element.BF16, 8, 200, 2),
        (Element.FP16, 0, 12, 1),
        (Element.FP16, 127, 17, 2),
    ],
)
def test_a_tile_is_computed_again_only_if_p_was_too_large(
    kernel, dtype, row, growth, times
) -> None:
    """growth: powers of two between the logits of two blocks of keys, in one row."""
    config = CONFIG.replace(dtype=dtype)
    problem = AttentionForward(1, 1, 2 * config.B_c)
    _, second = config.key_blocks(problem.len_q)
    q, k = torch.zeros(2, *problem.shape)
    q[:, row, :, 0] = 2**6
    k[:, second * config.B_c :][:, : config.B_c, :, 0] = (
        growth * math.log(2) * math.sqrt(problem.d_head) / 2**6
    )
    v = torch.randn(problem.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    inputs = (x.to(getattr(torch, dtype.torch_name)) for x in (q, k, v))
    counts = run_right(config, kernel(OPTIMISTIC, dtype), *inputs)
    assert counts.mma == times * config.n_warps * 2 * config.mma_per_key_block


def test_an_experiment_is_compiled_again_when_its_kernel_changes(tmp_path) -> None:
    root = copy_sources(tmp_path)
    jit = Jit(root, Cache(tmp_path / "cubins"), FakeCompiler, jobs=1)

    def compile_it() -> Cubin:
        (compiled,) = jit.get([OPTIMISTIC.unit()], "sm_90")
        return read_cubin(compiled, CONFIG)

    first = compile_it()
    assert compile_it() == first
    (root / OPTIMISTIC.header).write_text(HEADER.replace("0x1p64f", "0x1p63f"))
    assert compile_it().path != first.path


def report_of(registers: int, stack_bytes: int) -> PtxasReport:
    return PtxasReport("_Zk", "sm_90", registers, stack_bytes, 12, 8, 1, 0, {})


def test_what_an_experiment_takes_is_what_ptxas_says_and_its_config() -> None:
    report = report_of(registers=255, stack_bytes=16)
    cubin = Cubin(OPTIMISTIC.name, CONFIG, Path("k.cubin"), "_Zk", "", report)
    # 96 KiB of K and V beside 32 of Q; 255 registers a thread leave room for two blocks of 128
    expected = ResourceRecord("optimistic_maximum", 255, 16, (128 + 4 * 64) * 256, 2)
    assert experiments.resources(cubin) == expected


def copy_sources(folder: Path) -> Path:
    root = folder / "root"
    for name in ("src", "kernels", "benchmarks/experiments"):
        shutil.copytree(ROOT / name, root / name)
    return root


# The machine code


def test_the_facts_of_the_machine_code_are_of_these_sources_and_complete(tool) -> None:
    code = MachineCode.load(ROOT / tool.MACHINE_CODE)
    assert code.sources == source_digest(ROOT), "run run_experiments.py --sass, then --write-docs"
    assert [loop.name for loop in code.loops] == NAMES
    for loop in code.loops:
        assert loop.hmma == CONFIG.mma_per_key_block
        assert (loop.fmnmx, loop.shfl) == (0, 0) or loop.name != OPTIMISTIC.name
        assert loop.mufu >= CONFIG.B_c  # a row tile's exponentials are B_c / 2 a lane


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("0x1p64f", "0x1p63f", False),
        ("// What changed", "// That which changed", True),
    ],
)
def test_the_digest_is_of_the_code_and_not_of_comments(tmp_path, old, new, same) -> None:
    root = copy_sources(tmp_path)
    before = source_digest(root)
    assert old in HEADER
    (root / OPTIMISTIC.header).write_text(HEADER.replace(old, new))
    assert (source_digest(root) == before) is same


def operations(text: str) -> list[Operation]:
    return [Operation(16 * n, 0, "", opcode, "", None) for n, opcode in enumerate(text.split())]


def test_the_facts_of_a_loop() -> None:
    facts = facts_of_body(
        "made_up",
        operations(
            "LDSM.16.M88.4 MUFU.EX2 HMMA.16816.F32 FMNMX FMNMX MUFU.EX2 IMAD.MOV.U32 "
            "HMMA.16816.F32 MUFU.EX2 HMMA.16816.F32 SHFL.BFLY MOV STL.64 LDL FFMA"
        ),
    )
    assert facts == LoopFacts(
        name="made_up",
        instructions=15,
        hmma=3,
        ldmatrix=1,
        mufu=3,
        ffma=1,
        fmnmx=2,
        shfl=1,
        moves=2,
        local=2,
        gap=7,  # the five behind the last, and the two before the first
        hmma_behind=2,  # behind the second of three
    )


def test_a_loop_without_mma_has_no_facts() -> None:
    with pytest.raises(ValueError, match="made_up: the main loop has no HMMA"):
        facts_of_body("made_up", operations("MUFU.EX2 FMUL"))


def test_a_block_that_a_branch_may_skip_is_not_always_executed() -> None:
    # 0 → 1 → (2 →) 3 → 1 or 4: the loop is 1, 2, 3
    successors = [(1,), (2, 3), (3,), (1, 4), ()]
    blocks = tuple(Block(n, n, n, found, ()) for n, found in enumerate(successors))
    loop = Loop(0, 1, frozenset({1, 2, 3}), None, 1)
    kernel = Kernel("k", "sm_90", "", None, None, (), blocks, (loop,), None)  # type: ignore[arg-type]
    assert always_executed(kernel, loop) == {1, 3}


# The tables


def made_up_results(speeds: dict[str, dict[int, float]]) -> BenchmarkResults:
    """Results of the given TFLOP/s, by name and length."""

    def of(name: str, seq_len: int, tflops: float) -> Measurement:
        shape = default_shape(seq_len)
        ms = shape.operations / tflops / 1e9
        return Measurement(name, "", shape.record(), 1, 1, (ms,), 0.0, 0.0, 1.0, 1.0, "")

    return BenchmarkResults(
        provenance=provenance(fake_backend(), "a command", "68cfc22"),
        protocol=Protocol(),
        resources=(ResourceRecord("parent", 254, 40, 65536, 2),),
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
            "parent": {1024: 220.0, 4096: 220.0},
            "immediate_distances": {1024: 200.0, 4096: 300.0},
        }
    )
    table = speed_table(results)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert list(rows) == [*(f"`{name}`" for name in NAMES), ""]
    assert rows["`parent`"][1:] == ["110.0", "110.0", "110.0", "100.0", "44.0", "254", "40"]
    # the harmonic mean of 200 and 300 is 240
    assert rows["`immediate_distances`"] == [
        IMMEDIATE.title,
        *("100.0", "150.0", "120.0", "109.1", "48.0", "-", "-"),
    ]
    assert rows["`optimistic_maximum`"][1:6] == ["-"] * 5  # not measured
    assert all(len(row) == len(table.header) for row in table.rows)
    lines = table.markdown().splitlines()
    assert lines[1].startswith("| :-- | :-- | --: |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_of_loops() -> None:
    loop = LoopFacts("parent", 871, 256, 80, 68, 69, 132, 64, 28, 2, 212, 96)
    table = loop_table(MachineCode("ptxas 13.0.88", "sm_90", "", (loop,)))
    cells = ["871", "256", "80", "68", "69", "132", "64", "28", "2", "212", "96"]
    assert list(table.rows[0]) == ["`parent`", *cells]
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
    results = made_up_results({FLASH: {1024: 200.0}, "parent": {1024: 250.0}})
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
    (repository / OPTIMISTIC.header).write_text(HEADER.replace("0x1p64f", "0x1p63f"))
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
    """The tool on a made-up GPU, on which an experiment is wrong."""

    def contender(cubin: Cubin, execute: Execute) -> Contender:
        def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
            float32_kernel(cubin.config, *inputs.inputs.values(), inputs.outputs["o"])
            if cubin.name == broken[0]:
                inputs.outputs["o"].add_(1)
            return inputs.outputs

        return Contender(cubin.name, None, run)

    def compiled(architecture: int) -> list[Cubin]:
        assert architecture == 90
        report = report_of(registers=255, stack_bytes=8)
        return [Cubin(name, CONFIG, Path("k.cubin"), "_Zk", "", report) for name in NAMES]

    broken = [""]
    tool.broken = broken
    h100 = replace(provenance(fake_backend(), "", ""), gpu="an H100", compute_capability="9.0")
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(
        command_line,
        "provenance",
        lambda backend, command, commit: replace(h100, command=command, commit=commit),
    )
    monkeypatch.setattr(tool, "compile_experiments", compiled)
    monkeypatch.setattr(tool, "contender", contender)
    monkeypatch.setattr(timing, "make_timer", lambda device, protocol: FakeTimer((50.0, 50.0)))
    monkeypatch.setattr(tool, "GpuSensor", FakeSensor)
    monkeypatch.setattr(tool, "default_shape", lambda seq_len: AttentionForward(1, 1, seq_len))
    return tool


def test_a_run_measures_every_experiment_beside_flash(gpu, tmp_path, capsys) -> None:
    path = tmp_path / "experiments.json"
    options = ("--seq", "256", "128", "--rounds", "2", "--commit", "68cfc22", "--json", str(path))
    assert run(gpu, *options) == 0
    results = load_results(path)
    assert results.provenance.commit == "68cfc22"
    assert results.sizes == [128, 256]
    assert results.names("bf16") == [FLASH, *NAMES]
    assert [record.name for record in results.resources] == NAMES
    assert {len(m.samples_ms) for m in results.measurements if m.name != FLASH} == {2}
    assert results.loads == [BURST, SUSTAINED]
    assert [(rate.name, rate.load) for rate in results.rates] == [
        (MMA_SYNC, load) for load in results.loads
    ]
    assert "`optimistic_maximum`" in capsys.readouterr().out


def test_an_experiment_that_is_wrong_fails_the_run(gpu, tmp_path, capsys) -> None:
    gpu.broken[0] = "optimistic_maximum"
    path = tmp_path / "experiments.json"
    assert run(gpu, "--seq", "128", "--rounds", "1", "--json", str(path)) == 1
    assert "optimistic_maximum at 128: wrong output" in capsys.readouterr().out
    assert {m.name for m in load_results(path).failures} == {"optimistic_maximum"}


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


def test_no_compiler_is_a_usage_error(tool, monkeypatch, capsys) -> None:
    def none() -> Compiler:
        raise BuildError("no compiler")

    monkeypatch.setattr(tool, "find_compiler", none)
    assert run(tool, "--sass") == 2
    assert capsys.readouterr().err == "no compiler\n"
