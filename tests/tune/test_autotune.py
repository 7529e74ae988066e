"""The sweep, from a candidate's source to the winner that the package picks. No test needs a GPU:
the compiler and the process that measures are stand-ins, the rest is the real thing."""

import ctypes
import hashlib
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_results import FakeSensor, FakeTimer
from fake_backend import fake_backend, load_tool
from fake_cubin import cubin
from fake_sources import write_sources
from fake_toolchain import SUPPORT, FakeCompiler, fake_toolchain
from family_headers import copy_family_headers

from flash_helpers.compile.build import LibraryBuild
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.codegen import library_configs
from flash_helpers.compile.cubins import Cubin, read_code, read_cubin
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.compile.toolchain import Toolchain
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import (
    STEPS,
    AttentionForward,
    Element,
    FlashForwardKernelConfig,
    config_from_short_form,
    get_autotuning_kernel_configs,
    get_kernel_progression_configs,
    read_configs,
)
from flash_helpers.measure.benchmark import InputSet, kernel_contender
from flash_helpers.measure.machine_code import code_digest
from flash_helpers.measure.results import FLASH
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.config import Config
from flash_helpers.registry.hopper import HOPPER, LONG_TILE
from flash_helpers.registry.rows import SOFTMAX
from flash_helpers.runtime import driver as cuda_driver
from flash_helpers.runtime import library, tensors
from flash_helpers.tune import best
from flash_helpers.tune import worker as sweep_worker
from flash_helpers.tune.best import best_config
from flash_helpers.tune.measurer import Journal, JournalEntry, Measurer
from flash_helpers.tune.process import (
    Answer,
    CompiledConfig,
    KernelFile,
    Request,
    WorkerInfo,
    WorkerProcess,
)
from flash_helpers.tune.sweep import (
    DROPPED,
    FAILED,
    NOT_RUN,
    SCREEN_PROTOCOL,
    TIMED,
    SweepRow,
    in_search_order,
    kernel_of,
    load_sweep,
    mean_speed,
    outcomes_text,
)
from flash_helpers.tune.winners import (
    BestConfigs,
    best_file,
    gpu_slug,
    load_best,
    sweep_file,
)
from flash_helpers.tune.worker import serve

pytestmark = pytest.mark.slow

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
V7, V8 = (
    c
    for c in get_kernel_progression_configs()
    if c.step.id in ("v7", "v8") and c.dtype == Element.BF16
)
H7 = next(
    c for c in get_autotuning_kernel_configs() if c.step.id == "h7" and c.dtype == Element.BF16
)
LAST, LAST_CAUSAL = HOPPER.fixed_config([*HOPPER.steps.values()][-1], Element.BF16).variants()
LONG = LAST.replace(**LONG_TILE)
P1 = [c for c in get_autotuning_kernel_configs() if c.step.id == "p1" and c.dtype == Element.BF16]
LARGE = V7.replace(B_r=128)
WIDE = V7.replace(B_c=128)
OTHER_LOADS = V7.replace(K_mma_load_K_tiles=2, Q_mma_load_K_tiles=0)
WORKER = [sys.executable, str(SUPPORT / "fake_sweep_worker.py")]


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return fake_toolchain(tmp_path / "bin")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Kernel files that say nothing, and the generator."""
    kernels = {
        step.source: f'#include "flash_attention.cuh"\n// {step.namespace}\n'
        for step in STEPS.values()
    }
    texts = {
        **kernels,
        "src/include/flash_attention.cuh": "// the config\n",
        "src/flash_attention.cu": '#include "flash_kernels.cuh"\n',
    }
    return write_sources(tmp_path / "repository", texts)


# Machine code


def test_a_compiled_kernel_is_read_with_what_ptxas_said(repository, tmp_path: Path) -> None:
    jit = Jit(repository, Cache(tmp_path / "cubins"), FakeCompiler, jobs=1)
    (compiled,) = jit.get(units_of(V7), "sm_90")
    found = read_cubin(compiled, V7)
    assert (found.name, found.config) == (V7.short_form(), V7)
    assert found.symbol.startswith("_ZN2v714forward_kernelI")
    assert (found.report.registers, found.report.architecture) == (168, 90)
    assert found.path.is_file()


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"symbol": "_Zother"}, True),
        ({"code": b"other"}, False),
        ({"registers": 130}, False),
        ({"constants": b"\x01"}, False),
        ({"config": V7.replace(Q_mma_load_K_tiles=0)}, True),
        ({"config": LARGE}, False),  # another grid, another size of shared memory
    ],
)
def test_code_is_what_a_launch_executes(tmp_path: Path, change: dict, is_same: bool) -> None:
    def code(config=V7, symbol="_Zkernel", registers=128, **parts) -> str:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin(symbol, **{"code": b"code", **parts}))
        found, digest = read_code(path, config, registers)
        assert found == symbol
        return digest

    assert (code(**change) == code()) is is_same


def test_a_file_that_is_no_cubin_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_text("no ELF file")
    with pytest.raises(ValueError, match="is not a cubin"):
        read_code(path, V7, 128)


# The process that measures


def request(config: FlashForwardKernelConfig = V7) -> Request:
    return Request((compiled(config, "a.cubin"),), (512, 1024), SCREEN_PROTOCOL)


def compiled(config: Config, cubin: str, symbol: str = "_Zkernel") -> CompiledConfig:
    """A config of one kernel."""
    name = config.short_form()
    return CompiledConfig(name, (KernelFile(name, cubin, symbol),))


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("FAKE_GPU", H100)
    with WorkerProcess(WORKER) as process:
        yield process


def test_a_worker_says_what_it_runs_on_and_answers(worker) -> None:
    info = worker.start()
    assert (info.gpu, info.architecture) == (H100, 90)
    answer = worker.ask(request(), timeout_s=60)
    assert {(m.name, m.size) for m in answer.measurements} == {
        (name, seq_len) for name in (FLASH, V7.short_form()) for seq_len in (512, 1024)
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_worker_says_that_there_is_no_gpu(capsys) -> None:
    import io

    answers = io.StringIO()
    assert serve(io.StringIO(), answers) == 1
    assert json.loads(answers.getvalue()) == {"error": "no CUDA device was found"}


@pytest.fixture
def measuring(monkeypatch):
    """The real worker on the CPU, with stand-ins for what needs a GPU."""
    backend = fake_backend()
    monkeypatch.setattr(
        sweep_worker,
        "cubin_contender",
        lambda kernel, execute: kernel_contender(
            config_from_short_form(kernel.config), backend.execute
        ),
    )
    monkeypatch.setattr(sweep_worker, "make_timer", lambda device, protocol: FakeTimer())
    monkeypatch.setattr(sweep_worker, "GpuSensor", FakeSensor)
    monkeypatch.setattr(
        Config,
        "measured",
        lambda config, n: AttentionForward(
            1, 2, n, dtype=config.dtype, causal=config.supports.causal
        ),
    )
    monkeypatch.setattr(sweep_worker, "find_backend", lambda device: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return sweep_worker.Worker(torch.device("cpu"))


def test_the_worker_verifies_and_times_beside_the_flash_backend(measuring) -> None:
    answer = measuring.answer(replace(request(), sizes=(64, 128)))
    found = answer.measurements
    assert [(m.name, m.size) for m in found] == [
        (name, seq_len) for seq_len in (64, 128) for name in (FLASH, V7.short_form())
    ]
    assert all(m.valid and m.max_abs_error for m in found)
    assert answer.skipped == ()


def test_the_worker_times_causal_kernels_on_causal_problems(measuring) -> None:
    answer = measuring.answer(replace(request(LAST_CAUSAL), sizes=(64,)))
    flash, own = answer.measurements
    assert flash.valid and own.valid and own.name == LAST_CAUSAL.short_form()
    assert flash.asked.causal and own.asked.causal
    # those of the same length and without a mask are not taken for them
    answer = measuring.answer(replace(request(LAST), sizes=(64,)))
    assert not any(m.asked.causal or m.failure for m in answer.measurements)


def test_the_worker_times_kernels_of_another_operation_beside_its_own_library(
    measuring, monkeypatch
) -> None:
    config = SOFTMAX.fixed_config([*SOFTMAX.steps.values()][-1], Element.FP32)
    monkeypatch.setattr(Config, "measured", lambda config, width: Rows(3, width, config.dtype))
    answer = measuring.answer(replace(request(config), sizes=(64, 40)))
    assert [(m.name, m.asked) for m in answer.measurements] == [
        (name, Rows(3, width, Element.FP32))
        for width in (64, 40)
        for name in ("pytorch", config.short_form())
    ]
    assert all(m.valid and m.first_ms for m in answer.measurements)
    assert mean_speed(answer.measurements, config.short_form()) == pytest.approx(
        statistics.harmonic_mean([m.speed for m in answer.measurements[1::2]])
    )
    assert kernel_of(config) == (config.step.id, Element.FP32, ())


def test_one_key_of_the_journal_is_of_one_problem(monkeypatch, tmp_path: Path) -> None:
    """Else a sweep would take what was measured on other problems of the same size."""
    asked = []

    class Process:
        def ask(self, request: Request, timeout_s: float) -> Answer:
            asked.append(request)
            return Answer((), ())

    info = WorkerInfo(H100, "9.0", 227 * 1024, "580.1", "2.13.0")
    measurer = Measurer(Process(), info, Journal(tmp_path / "journal"), 1.0)
    made = Cubin(V7.short_form(), V7, tmp_path / "k.cubin", "_Zk", "digest", None)
    problems = {}
    for batch in (1, 1, 2):
        monkeypatch.setattr(
            Config, "measured", lambda config, n, batch=batch: AttentionForward(batch, 16, n)
        )
        entry = measurer.measure([[made]], (512,), SCREEN_PROTOCOL)
        problems.setdefault(entry.key, batch)
    assert sorted(problems.values()) == [1, 2] and len(asked) == 2


def test_the_worker_makes_room_and_skips_what_still_does_not_fit(measuring, monkeypatch) -> None:
    make, fails = sweep_worker.make_input_sets, {128: 1, 256: 2}

    def make_or_fail(shape: AttentionForward, *arguments):
        if fails.get(shape.len_q, 0):
            fails[shape.len_q] -= 1
            raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB\nand more")
        return make(shape, *arguments)

    monkeypatch.setattr(sweep_worker, "make_input_sets", make_or_fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    answer = measuring.answer(replace(request(), sizes=(64, 128, 256)))
    assert {m.size for m in answer.measurements} == {64, 128}
    (skipped,) = answer.skipped
    assert skipped.size == 256
    assert "Tried to allocate 9 GiB" in skipped.reason


class FakeDriver:
    """Notes each call; what it would write to is left alone."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"invalid argument"
            if name == "cuLaunchKernelEx":  # the memory is the caller's, until it returns
                arguments = (
                    arguments[0]._obj,
                    ctypes.string_at(arguments[2][0], AMPERE.kernels["forward_kernel"].size),
                )
            self.calls.append((name, *arguments))
            return 1 if name == self.refuses else 0

        return call


def test_a_kernel_is_loaded_and_launched_with_its_shared_memory(monkeypatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
    shape = AttentionForward(2, 16, 256)
    (found,) = V7.call(shape, shape.strides(), largest_device(90)).launches
    arguments = found.bind(dict.fromkeys("qkvo", 4096))
    cuda_driver.LoadedKernel(b"ELF", "_Zkernel", 65536).launch(found, arguments, 7)
    load, get, attribute, launch = driver.calls
    assert (load[0], load[2]) == ("cuModuleLoadData", b"ELF")
    assert (get[0], get[3]) == ("cuModuleGetFunction", b"_Zkernel")
    assert (attribute[0], *attribute[2:]) == ("cuFuncSetAttribute", 8, 65536)
    name, config, passed = launch
    assert name == "cuLaunchKernelEx"
    assert (*config.sizes, config.shared_bytes, config.stream) == (
        *(4, 16, 2, 128, 1, 1),
        *(V7.smem_bytes, 7),
    )
    assert config.n_attributes == 0  # a grid without clusters
    assert passed == arguments


def test_a_cubin_is_registered_and_runs_like_any_kernel(monkeypatch, tmp_path) -> None:
    registered, ran = [], []
    monkeypatch.setattr(sweep_worker, "register", lambda *kernel: registered.append(kernel))
    path = tmp_path / "cubin"
    image = cubin("_Zkernel", b"code")
    path.write_bytes(image)
    contender = sweep_worker.cubin_contender(
        compiled(V7, str(path)), lambda *call: ran.append(call)
    )
    q, o = torch.zeros(2, 1, 128, 1, 128, dtype=torch.bfloat16)
    problem = AttentionForward(1, 1, 128)
    inputs = InputSet(problem, dict.fromkeys("qkv", q), {"o": o}, None)
    assert contender.run(inputs)["o"] is o
    assert registered == [(V7.short_form(), "_Zkernel", image)]
    ((config, tensors, options),) = ran
    assert config == V7 and tensors[-1] is o and options == problem.call_options()
    assert contender.code(V7) == hashlib.sha256(b"code").hexdigest()[:16]


def test_all_kernels_of_a_config_are_registered(monkeypatch, tmp_path) -> None:
    registered: list[str] = []
    monkeypatch.setattr(sweep_worker, "register", lambda name, *_: registered.append(name))
    config = P1[0]
    kernels = []
    for name in config.kernels.values():
        path = tmp_path / name
        path.write_bytes(cubin(f"_Z{name}", name.encode()))
        kernels.append(KernelFile(name, str(path), f"_Z{name}"))
    file = CompiledConfig(config.short_form(), tuple(kernels))
    contender = sweep_worker.cubin_contender(file, lambda *call: None)
    problem = config.measured(512)
    tensors = {t.name: torch.zeros(t.shape) for t in problem.tensors if not t.is_output}
    contender.run(InputSet(problem, tensors, {"dq": torch.zeros(1)}, None))
    assert registered == [*config.kernels.values()]
    assert contender.code(config) == code_digest((n, n.encode()) for n in registered)


def test_kernels_of_one_config_are_registered_before_each_runs(monkeypatch, tmp_path) -> None:
    """As the experiments are, which differ from their parent in what they are compiled from."""
    registered: list[str] = []
    monkeypatch.setattr(sweep_worker, "_registered", {})
    monkeypatch.setattr(sweep_worker, "register", lambda name, symbol, _: registered.append(symbol))
    contenders, ran = {}, []
    for symbol in ("_Zone", "_Zother"):
        path = tmp_path / f"{symbol}.cubin"
        path.write_bytes(cubin(symbol, symbol.encode()))
        file = compiled(V7, str(path), symbol)
        execute = lambda *call: ran.append(registered[-1])  # noqa: E731
        contenders[symbol] = sweep_worker.cubin_contender(file, execute)
    q, o = torch.zeros(2, 1, 128, 1, 128, dtype=torch.bfloat16)
    inputs = InputSet(AttentionForward(1, 1, 128), dict.fromkeys("qkv", q), {"o": o}, None)
    order = ["_Zone", "_Zone", "_Zother", "_Zone"]
    for symbol in order:
        contenders[symbol].run(inputs)
    assert ran == order
    assert registered == ["_Zone", "_Zother", "_Zone"]  # not before each run of the same
    assert len({c.code(V7) for c in contenders.values()}) == 2


def test_what_the_driver_refuses_is_told_in_its_own_words(monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "driver", lambda: FakeDriver("cuFuncSetAttribute"))
    with pytest.raises(cuda_driver.DriverError, match=r"cuFuncSetAttribute: invalid argument \("):
        cuda_driver.LoadedKernel(b"ELF", "_Zkernel", 2**30)


def test_without_a_driver_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda_that_is_not_there.so")
    cuda_driver.driver.cache_clear()
    with pytest.raises(cuda_driver.DriverError, match="no CUDA driver: libcuda_that_is_not_there"):
        cuda_driver.LoadedKernel(b"ELF", "_Zkernel", 0)


def test_a_kernel_is_not_run_on_rows_that_it_was_not_compiled_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sweep_worker, "register", lambda *kernel: None)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin("_Z", b"code"))
    static = max(c for c in get_kernel_progression_configs() if getattr(c, "static_row_stride", 0))
    file = compiled(static, str(path), "_Z")
    contender = sweep_worker.cubin_contender(file, lambda *call: None)
    q, o = torch.zeros(2, 1, 64, 2, 128, dtype=torch.bfloat16)
    inputs = InputSet(AttentionForward(1, 2, 64), dict.fromkeys("qkv", q), {"o": o}, None)
    with pytest.raises(ValueError, match="is not for batch 1, heads 2, seq 64"):
        contender.run(inputs)


# The journal


def test_a_journal_is_read_back_and_a_line_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    hung = JournalEntry("a", "hangs", ())
    Journal(path).note(hung)
    with path.open("a") as file:
        file.write('{"key": "b", "fail')
    journal = Journal(path)
    assert journal.find("a") == hung
    assert journal.find("b") is None
    right = JournalEntry("c", "", ())
    journal.note(right)
    assert Journal(path).find("c") == right
    assert Journal(path).find("a") == hung


# The sweep, through its command line


class Sweeper:
    """Runs the tool in the repository with stand-ins for compiler and worker."""

    def __init__(self, root: Path, tool, folder: Path) -> None:
        self.root, self.tool, self.folder = root, tool, folder

    def __call__(self, configs: list[FlashForwardKernelConfig], *options: str) -> int:
        file = self.folder / "configs.json"
        file.write_text(json.dumps([config.short_form() for config in configs]))
        fixed = ["--configs", str(file), "--root", str(self.root), "--commit", "abc", "--jobs", "2"]
        return self.tool.main([*fixed, *options])

    def rows(self, gpu: str = H100) -> dict[FlashForwardKernelConfig, SweepRow]:
        table = load_sweep(sweep_file(self.root / "configs", gpu), gpu, "9.0")
        return {config_from_short_form(row.name): row for row in table.rows}

    def best(self, gpu: str = H100) -> BestConfigs:
        return load_best(best_file(self.root / "configs", gpu))


@pytest.fixture
def sweep(repository: Path, monkeypatch, tmp_path: Path) -> Sweeper:
    tool = load_tool("tools/benchmark/autotune.py")
    monkeypatch.setattr(tool, "find_compiler", FakeCompiler)
    monkeypatch.setattr(tool, "WORKER_COMMAND", WORKER)
    monkeypatch.setenv("FAKE_GPU", H100)
    return Sweeper(repository, tool, tmp_path)


def speeds(monkeypatch, *pairs: tuple[str, float]) -> None:
    monkeypatch.setenv("FAKE_SPEEDS", json.dumps(pairs))


def requests_in(lines: list[str]) -> list[str]:
    """Requests to the worker."""
    return [line for line in lines if " " in line]


def test_the_fastest_config_wins_and_the_whole_table_is_kept(
    sweep, monkeypatch, terminal, capsys
) -> None:
    speeds(monkeypatch, ("Br128", 1.25), ("Bc128", 0.75))
    assert sweep([V7, LARGE, WIDE]) == 0
    (winner,) = sweep.best().best
    assert (winner.step, winner.dtype) == ("v7", "bf16")
    assert winner.config == LARGE.short_form()
    assert (winner.of_first, winner.mean_speed) == (1.25, 375.0)  # the flash backend's is 300
    assert (winner.sizes, winner.load) == ((512, 1024, 2048, 4096, 8192, 16384), "sustained")
    assert (winner.commit, winner.driver, winner.compiler) == ("abc", "580.1", "13.0")
    rows = sweep.rows()
    assert {config: row.of_first for config, row in rows.items()} == {
        V7: 1.0,
        LARGE: 1.25,
        WIDE: 0.75,
    }
    assert all(row.final_of_first == row.of_first for row in rows.values())
    captured = capsys.readouterr()
    assert f"v7 bf16: {LARGE.short_form()}, 375 TFLOP/s, 1.250 of" in captured.out
    assert "best 1.250 of flash" in captured.err


def test_a_candidate_that_does_not_fit_is_dropped_before_it_is_compiled(
    sweep, monkeypatch, log
) -> None:
    info = WorkerInfo(H100, "9.0", smem_bytes=LARGE.smem_bytes - 1, driver="", torch="")
    monkeypatch.setattr(WorkerProcess, "start", lambda self: info)
    sweep([LARGE])
    assert sweep.rows()[LARGE].outcome == DROPPED
    assert f"needs {LARGE.smem_bytes} bytes of shared memory" in sweep.rows()[LARGE].reason
    assert log() == []


def test_a_family_of_one_architecture_is_tuned_there(sweep, monkeypatch) -> None:
    speeds(monkeypatch, ("_pp$", 1.25))
    assert sweep([H7, H7.replace(ping_pong=True)]) == 0
    (winner,) = sweep.best().best
    assert winner.at_size() == [H7.replace(ping_pong=True)]
    assert {row.outcome for row in sweep.rows().values()} == {TIMED}


def test_a_config_of_several_kernels_is_compiled_and_timed_whole(sweep, monkeypatch, log) -> None:
    first, *others = P1
    speeds(monkeypatch, (others[0].short_form(), 1.25))
    assert sweep([first, others[0]]) == 0
    (winner,) = sweep.best().best
    assert winner.config == others[0].short_form()
    assert {row.outcome for row in sweep.rows().values()} == {TIMED}
    compiled = [line for line in log() if "__" in line]
    assert sorted(compiled) == sorted([*first.kernels.values(), *others[0].kernels.values()])


@pytest.mark.parametrize(
    ("variable", "said"),
    [("FAKE_SPILLS", "spills: 24 bytes stored and 32 loaded"), ("FAKE_FAILS", "exit status 1")],
)
@pytest.mark.parametrize("function", ["delta_kernel", "dkdv_kernel"])
def test_a_config_one_of_whose_kernels_is_not_right_is_dropped(
    sweep, monkeypatch, function, variable, said
) -> None:
    first, other = P1[:2]
    monkeypatch.setenv(variable, first.kernels[function])
    assert sweep([first, other]) == 0
    rows = sweep.rows()
    assert (rows[first].outcome, rows[other].outcome) == (DROPPED, TIMED)
    assert said in rows[first].reason


def test_of_a_config_that_is_the_fastest_at_one_length_all_speeds_are_noted(
    sweep, monkeypatch, capsys
) -> None:
    long, own = LONG.short_form(), LAST.short_form()
    speeds(
        monkeypatch,
        *((f"{long} at {n}", speed) for n, speed in ((8192, 1.1), (16384, 1.009))),
        *((long, 0.9), (own, 1.0), ("_K2_", 0.8)),
    )
    assert sweep([LAST, LONG, LAST.replace(K_slots=2)]) == 0
    (winner,) = sweep.best().best
    assert winner.config == own and winner.of_first == 1
    assert {at.config for at in winner.at_sizes} == {long}
    of_mean = {at.size: at.of_mean for at in winner.at_sizes}
    assert of_mean == {512: 0.9, 1024: 0.9, 2048: 0.9, 4096: 0.9, 8192: 1.1, 16384: 1.009}
    told = capsys.readouterr().out
    assert f"  at 8192: {long}, 1.100 of the winner's speed\n" in told and "at 4096" not in told
    assert winner.at_size(512) == [LAST, LONG]
    assert winner.at_size(7000) == winner.at_size(10**6) == [LONG, LAST]
    assert winner.at_size() == [LAST]
    text = best_file(sweep.root / "configs", H100).read_text()
    assert read_configs(json.loads(text)) == [LAST, LONG]


def test_steps_that_are_tuned_together_have_one_winner(sweep, monkeypatch) -> None:
    speeds(monkeypatch, (f"^{LAST.step.id}_", 1.0), ("_", 1.5))
    earlier = replace(LAST, hopper=LAST.hopper - 1)
    assert sweep([LAST, earlier], "--together") == 0
    (winner,) = sweep.best().best
    assert (winner.step, winner.config) == (LAST.step.id, earlier.short_form())
    assert winner.n_candidates == 2


def test_causal_configs_have_a_winner_of_their_own(sweep, monkeypatch, log) -> None:
    speeds(monkeypatch, ("_causal$", 2.0), ("K2", 1.5))
    other = LAST.replace(K_slots=2)
    assert sweep([LAST, other, LAST_CAUSAL]) == 0
    best = sweep.best()
    assert {entry.asked.causal: entry.config for entry in best.best} == {
        False: other.short_form(),
        True: LAST_CAUSAL.short_form(),
    }
    for causal in (False, True):
        assert best.find(LAST.step.id, "bf16", causal=causal) in best.best
    assert best.find(LAST.step.id, "fp16") is None
    # no request has both
    assert not any("_causal" in line and other.short_form() in line for line in requests_in(log()))


def test_the_configs_to_try_are_those_with_a_mask_too() -> None:
    tool = load_tool("tools/benchmark/autotune.py")
    found = tool.candidates(tool.parse_arguments(["--steps", LAST.step.id]))
    assert {LAST, LONG, LAST_CAUSAL} <= {*found}
    assert len(found) == len({*found})


def test_a_family_of_another_architecture_is_passed_over_with_the_reason(
    sweep, monkeypatch, log
) -> None:
    monkeypatch.setenv("FAKE_GPU", A100)
    monkeypatch.setenv("FAKE_CAPABILITY", "8.0")
    assert sweep([V7, H7]) == 0
    table = load_sweep(sweep_file(sweep.root / "configs", A100), A100, "8.0")
    reasons = {row.step: row.reason for row in table.rows}
    assert reasons["v7"] == ""
    assert "compute capability 8.0 and the kernels of family hopper need 9.0" in reasons["h7"]
    assert not any(H7.short_form() in line for line in log())


SERIALIZED = "Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(
    ("step", "source", "configs", "options", "reason"),
    [
        ("v7", None, [V7, LARGE], ["--seq", "192", "--screen-seq", "192"], "multiple of B_r 128"),
        ("v8", "FAIL\n", [V7, V8], [], "FAIL is not C++"),
        ("h7", f"// PTXAS (C7510) {SERIALIZED}\n", [V7, H7], [], SERIALIZED),
    ],
)  # fmt: skip
def test_a_candidate_that_cannot_be_run_is_dropped_with_the_reason(
    sweep, step, source, configs, options, reason
) -> None:
    if source:
        (sweep.root / STEPS[step].source).write_text(source)
    assert sweep(configs, *options) == int(step != "v7")  # v8 and h7 have no winner
    rows = sweep.rows()
    assert (rows[V7].outcome, rows[configs[1]].outcome) == (TIMED, DROPPED)
    assert reason in rows[configs[1]].reason
    assert [entry.step for entry in sweep.best().best] == ["v7"]


def test_candidates_of_the_same_code_share_a_measurement(sweep, monkeypatch, log) -> None:
    assert sweep([V7, OTHER_LOADS, LARGE]) == 0
    rows = sweep.rows()
    assert rows[V7].code == rows[OTHER_LOADS].code != rows[LARGE].code
    assert {rows[V7].same_as, rows[OTHER_LOADS].same_as} in (
        {"", V7.short_form()},
        {"", OTHER_LOADS.short_form()},
    )
    assert rows[V7].of_first == rows[OTHER_LOADS].of_first
    # two candidates in the first round, and two codes in the last
    assert [len(line.split()) for line in requests_in(log())] == [1 + 2, 1 + 2, 2 + 6]
    assert sweep.best().best[0].n_candidates == 2


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("FAKE_HANGS", "no answer within"),
        ("FAKE_CRASHES", "the process died (SIGKILL): a stray pointer"),
        ("FAKE_FAULTS", "an illegal memory access"),
        ("FAKE_WRONG", "wrong output"),
        ("FAKE_SPOILS", "PyTorch's flash backend beside it failed: wrong output"),
    ],
)
def test_a_candidate_that_hangs_crashes_or_is_wrong_is_survived(
    sweep, monkeypatch, variable: str, reason: str
) -> None:
    monkeypatch.setenv(variable, "Br128")
    speeds(monkeypatch, ("Br128", 1.25), ("Bc128", 1.1))
    assert sweep([LARGE, V7, WIDE], "--timeout", "0.3") == 0
    rows = sweep.rows()
    assert rows[LARGE].outcome == FAILED
    assert reason in rows[LARGE].reason
    assert rows[LARGE].of_first is None
    assert rows[V7].outcome == rows[WIDE].outcome == TIMED
    assert sweep.best().best[0].config == WIDE.short_form()


def test_what_spoils_memory_costs_the_next_candidate_nothing(sweep, monkeypatch, log) -> None:
    monkeypatch.setenv("FAKE_SPOILS", "Br128")
    assert sweep([LARGE, V7]) == 0
    lines = log()
    # the worker is replaced after it, and it is tried once more itself
    assert lines.count("start") == 3
    assert sum(LARGE.short_form() in line for line in requests_in(lines)) == 2


def test_a_finalist_that_crashes_at_a_later_length_leaves_the_others(
    sweep, monkeypatch, tmp_path
) -> None:
    script = (SUPPORT / "fake_sweep_worker.py").read_text()
    only_in_the_last_round = 'if len(request.sizes) > 2 and matches("FAKE_CRASHES", name):'
    assert 'if matches("FAKE_CRASHES", name):' in script
    worker = tmp_path / "worker.py"
    worker.write_text(script.replace('if matches("FAKE_CRASHES", name):', only_in_the_last_round))
    monkeypatch.setattr(sweep.tool, "WORKER_COMMAND", [sys.executable, str(worker)])
    monkeypatch.setenv("FAKE_CRASHES", "Br128")
    speeds(monkeypatch, ("Br128", 1.25), ("Bc128", 1.1))
    assert sweep([LARGE, V7, WIDE]) == 0
    assert sweep.best().best[0].config == WIDE.short_form()
    row = sweep.rows()[LARGE]
    assert row.outcome == FAILED
    assert row.reason.startswith("final round: the process died (SIGKILL)")


def test_a_sweep_that_is_interrupted_goes_on_where_it_was(sweep, monkeypatch, log, capsys) -> None:
    bar = sweep.tool.Bar

    class Interrupting(bar):
        def __call__(self, row: SweepRow) -> None:
            super().__call__(row)
            if row.outcome == TIMED:
                raise KeyboardInterrupt

    monkeypatch.setattr(sweep.tool, "Bar", Interrupting)
    assert sweep([V7, LARGE, WIDE]) == 130
    assert "the same command continues there" in capsys.readouterr().err
    assert not (sweep.root / "configs").exists()
    assert len(requests_in(log())) == 1
    monkeypatch.setattr(sweep.tool, "Bar", bar)
    assert sweep([V7, LARGE, WIDE]) == 0
    assert len(requests_in(log())) == 2 + 1  # those that were left, and the last round
    before = {path: path.read_text() for path in (sweep.root / "configs").iterdir()}
    assert sweep([V7, LARGE, WIDE]) == 0
    assert log() == ["start"]  # nothing was compiled or measured again
    assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize(
    ("variable", "value"),
    [("", ""), ("FAKE_DRIVER", "590.1"), ("FAKE_GPU", "NVIDIA H200")],
    ids=["kernel", "driver", "GPU"],
)
def test_with_another_kernel_driver_or_gpu_all_is_measured_again(
    sweep, monkeypatch, log, variable, value
) -> None:
    assert sweep([V7]) == 0
    log()
    if variable:
        monkeypatch.setenv(variable, value)
    else:
        (sweep.root / STEPS["v7"].source).write_text("// faster\n")
    assert sweep([V7]) == 0
    assert len(requests_in(log())) == 2
    gpus = [H100, value] if variable == "FAKE_GPU" else [H100]
    assert {*(sweep.root / "configs").iterdir()} == {
        file(sweep.root / "configs", gpu) for gpu in gpus for file in (best_file, sweep_file)
    }
    assert sweep.best(gpus[-1]).best[0].driver == (value if "DRIVER" in variable else "580.1")


def test_files_of_another_gpu_are_refused(sweep, capsys) -> None:
    assert sweep([V7]) == 0
    for file in (best_file, sweep_file):
        path = file(sweep.root / "configs", H100)
        text = path.read_text()
        path.write_text(text.replace(H100, "NVIDIA H100 PCIe"))
        assert sweep([V7]) == 2
        assert (
            "holds results of NVIDIA H100 PCIe and this is NVIDIA H100 80GB"
            in capsys.readouterr().err
        )
        path.write_text(text)


def test_a_spent_budget_leaves_the_rest_for_the_next_run(sweep) -> None:
    assert sweep([V7, LARGE, WIDE], "--budget", "1e-6") == 0
    outcomes = sorted(row.outcome for row in sweep.rows().values())
    assert outcomes == [NOT_RUN, NOT_RUN, TIMED]
    assert sweep([V7, LARGE, WIDE]) == 0
    assert {row.outcome for row in sweep.rows().values()} == {TIMED}


def test_a_smaller_sweep_keeps_the_winners_of_the_others_and_challenges_its_own(
    sweep, monkeypatch
) -> None:
    speeds(monkeypatch, ("Br128", 1.25))
    assert sweep([V7, LARGE, V8]) == 0
    assert sweep([V7]) == 0
    assert {entry.step: entry.config for entry in sweep.best().best} == {
        "v7": LARGE.short_form(),
        "v8": V8.short_form(),
    }
    assert set(sweep.rows()) == {V7, LARGE, V8}


def test_a_winner_that_spills_is_not_lost_to_a_sweep_that_allows_no_spills(
    sweep, monkeypatch, log
) -> None:
    monkeypatch.setenv("FAKE_SPILLS", "Br128")
    speeds(monkeypatch, ("Br128", 1.25))
    assert sweep([V7, LARGE]) == 0
    row = sweep.rows()[LARGE]
    assert (row.outcome, row.spill_bytes, row.registers) == (DROPPED, 56, 168)
    assert "spills: 24 bytes stored and 32 loaded" in row.reason
    assert not any(LARGE.short_form() in line for line in requests_in(log()))
    for options in (["--allow-spills", "56"], []):
        assert sweep([V7, LARGE], *options) == 0
        assert sweep.rows()[LARGE].outcome == TIMED
        assert sweep.best().best[0].config == LARGE.short_form()


def test_a_winner_that_the_registry_has_no_more_is_left_out(sweep) -> None:
    assert sweep([V7]) == 0
    path = best_file(sweep.root / "configs", H100)
    path.write_text(path.read_text().replace("_Br64_", "_Br63_"))
    assert sweep([V7]) == 0
    assert sweep.best().best[0].config == V7.short_form()


def test_the_search_sees_every_corner_early_and_each_config_once() -> None:
    configs = [c for c in get_autotuning_kernel_configs() if c.step.id == "v7"]
    order = in_search_order(configs, first=[configs[5]])
    assert order[0] == configs[5]
    assert sorted(order) == configs
    assert order == in_search_order(reversed(configs), first=[configs[5]])
    assert len({(c.B_r, c.B_c, c.n_warps) for c in order[:60]}) > 6


def test_a_mean_needs_every_length(sweep, worker) -> None:
    worker.start()
    found = worker.ask(request(), timeout_s=60).measurements
    assert mean_speed(found, V7.short_form()) == pytest.approx(300)
    wrong = [replace(m, failure="wrong") if m.size == 512 else m for m in found]
    assert mean_speed(wrong, V7.short_form()) is None
    assert mean_speed(found, "nobody") is None


def test_outcomes_are_counted(sweep, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_SPILLS", "Br128")
    assert sweep([V7, OTHER_LOADS, LARGE]) == 0
    text = outcomes_text(list(sweep.rows().values()))
    assert text == "2 timed, 1 of them by the same code as another; 1 dropped"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "99"], "the steps are v1 to v"),
        (["--steps", "seven"], "is not a step"),
        (["--steps", "16"], "no config to try for --steps 16"),
        (["--seq", "100"], "seq_len 100 is not a multiple of B_r 64"),
    ],
)
def test_wrong_usage_exits_with_2(sweep, capsys, options: list[str], message: str) -> None:
    assert sweep([V7], *options) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_something_else_is_wrong_usage(sweep, tmp_path, capsys) -> None:
    file = tmp_path / "nonsense.json"
    file.write_text("{}")
    assert sweep.tool.main(["--configs", str(file)]) == 2
    assert f"{file}: expected a list of configs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FAKE_GPU", None, "the sweep cannot be run: no CUDA device was found"),
        ("FAKE_CAPABILITY", "10.0", "runs none of the chosen steps: choose others with --steps"),
    ],
)
def test_without_a_gpu_that_runs_a_step_nothing_is_run(
    sweep, monkeypatch, capsys, variable, value, said
) -> None:
    if value:
        monkeypatch.setenv(variable, value)
    else:
        monkeypatch.delenv(variable)
    assert sweep([H7]) == 2
    assert said in capsys.readouterr().err


# Files


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        (H100, "h100_80gb_hbm3"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm4_40gb"),
        ("NVIDIA GeForce RTX 3090", "geforce_rtx_3090"),
        ("Tesla V100", "tesla_v100"),
    ],
)
def test_files_are_named_by_the_gpu(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


# From the sweep to the config that the package picks


def test_the_winner_is_built_and_picked(
    sweep, root, toolchain, monkeypatch, tmp_path: Path
) -> None:
    # a config that the registry does not build by itself
    winner = V7.replace(B_r=128, B_c=32)
    speeds(monkeypatch, ("Br128_Bc32", 1.25))
    # sweep
    assert sweep([V7, winner]) == 0
    # regenerate
    copy_family_headers(root, sweep.root)
    generator = root / "tools/build/generate_kernel_instantiations.py"
    subprocess.run(
        [sys.executable, generator, "--root", sweep.root], check=True, capture_output=True
    )
    assert winner.short_form() in (sweep.root / AMPERE.map_header).read_text()
    built = library_configs(sweep.root)
    assert winner in built
    # rebuild; the other kernels would take the compiler's time and show nothing
    package = tmp_path / "package"
    LibraryBuild(sweep.root, toolchain, (90,), 2, lambda line: None, [V7, winner]).run(package)
    assert (package / "ptx" / f"{winner.short_form()}.ptx").is_file()
    # pick
    monkeypatch.setattr(library, "kernels", lambda: built)
    monkeypatch.setattr(best, "sources_root", lambda package: sweep.root)
    properties = SimpleNamespace(name=H100, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(tensors, "_counted_clusters", lambda index, capability: ())
    monkeypatch.setattr(tensors, "gpu_device", tensors.gpu_device.__wrapped__)  # keeps no fake
    assert best_config("v7", torch.bfloat16) == best_config(7, "bf16") == winner
