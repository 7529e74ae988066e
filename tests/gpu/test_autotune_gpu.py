"""The sweep, the chip's rates and the profiler on a real GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

import flash_attention
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.kernel_configs import (
    STEPS,
    AttentionForward,
    Element,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_helpers.measure.benchmark import make_input_sets
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.rates import default_rate_works, measure_rates
from flash_helpers.measure.results import LOADS, RATE_NAMES, Protocol, load_results
from flash_helpers.measure.timing import CudaTimer, make_timer
from flash_helpers.runtime.backend import find_backend
from flash_helpers.runtime.mma_loop import MmaLoop
from flash_helpers.tune.best import best_config
from flash_helpers.tune.process import CompiledConfig, KernelFile
from flash_helpers.tune.sweep import DROPPED, FAILED, TIMED, SweepRow, load_sweep
from flash_helpers.tune.winners import BestConfigs, best_file, load_best, sweep_file
from flash_helpers.tune.worker import cubin_contender

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
V7 = next(
    c for c in get_kernel_progression_configs() if (c.step.id, c.dtype) == ("v7", Element.BF16)
)
V16 = next(
    c for c in get_kernel_progression_configs() if (c.step.id, c.dtype) == ("v16", Element.BF16)
)
KERNEL_BEGINS = "    constexpr FlashForwardKernelConfig cfg = Config::value;\n"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def architecture(cuda_device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(cuda_device)
    return 10 * major + minor


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The kernels, where they may be changed and where files may be written."""
    root = tmp_path / "repository"
    for folder in ("src", "previous_kernels"):
        shutil.copytree(ROOT / folder, root / folder)
    return root


@pytest.fixture
def sweep(repository: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the tool on some configs at short lengths."""

    def tune(
        configs: Sequence[FlashForwardKernelConfig], *options: str
    ) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "configs.json"
        file.write_text(json.dumps([config.short_form() for config in configs]))
        return run(
            "tools/benchmark/autotune.py",
            *("--configs", file, "--root", repository, "--commit", "test"),
            *("--screen-seq", "512", "--seq", "512", "1024"),
            *options,
        )

    return tune


def found(repository: Path) -> tuple[BestConfigs, dict[str, SweepRow]]:
    gpu = torch.cuda.get_device_name()
    best = load_best(best_file(repository / "configs", gpu))
    table = load_sweep(sweep_file(repository / "configs", gpu), gpu, "")
    return best, {row.name: row for row in table.rows}


def test_a_kernel_compiled_on_the_side_is_right(
    cuda_device: torch.device, architecture: int, tmp_path: Path
) -> None:
    timer = CudaTimer(cuda_device)
    shape = AttentionForward(2, 16, 512)  # the rows of v16's static stride
    (inputs, *_) = make_input_sets(shape, Element.BF16, cuda_device, timer, Protocol())
    jit = Jit(ROOT, Cache(tmp_path / "cubins"), find_compiler, jobs=2)
    for compiled in jit.get([*units_of(V7), *units_of(V16)], f"sm_{architecture}"):
        name = compiled.name
        file = KernelFile(name, str(compiled.cubin_path), compiled.symbol)
        wanted = flash_attention.forward(name, *inputs.inputs.values())  # the library's own
        inputs.outputs["o"].fill_(torch.nan)
        cubin_contender(CompiledConfig(name, (file,)), find_backend("cuda").execute).run(inputs)
        assert torch.equal(inputs.outputs["o"], wanted)


def test_a_sweep_finds_a_winner_and_is_not_run_twice(sweep, repository: Path) -> None:
    configs = [V7, V7.replace(B_c=32), V16]
    first = sweep(configs, "--allow-spills", "4096")
    assert first.returncode == 0, first.stdout + first.stderr
    best, rows = found(repository)
    assert [entry.step for entry in best.best] == ["v7", "v16"]
    assert all(entry.of_first > 0 and entry.driver for entry in best.best)
    assert {row.name: row.reason for row in rows.values() if row.outcome != TIMED} == {}
    journal = next((repository / "build/autotune").glob("*/journal.jsonl")).read_text()
    assert sweep(configs, "--allow-spills", "4096").returncode == 0
    assert next((repository / "build/autotune").glob("*/journal.jsonl")).read_text() == journal


def test_a_sweep_survives_kernels_that_hang_crash_or_are_wrong(sweep, repository: Path) -> None:
    kernel = repository / STEPS["v7"].source
    text = kernel.read_text()
    assert text.count(KERNEL_BEGINS) == 1
    faults = (
        "    if constexpr (cfg.B_r == 128) { for (;;) { __nanosleep(1000); } }\n"
        "    if constexpr (cfg.B_c == 128) {\n"
        "        *reinterpret_cast<volatile int *>(size_t{16} * threadIdx.x + 16) = 0;\n"
        "    }\n"
        "    if constexpr (cfg.B_c == 32) { return; }\n"
    )
    kernel.write_text(text.replace(KERNEL_BEGINS, KERNEL_BEGINS + faults))
    hangs, crashes, wrong = V7.replace(B_r=128), V7.replace(B_c=128), V7.replace(B_c=32)
    result = sweep([hangs, crashes, wrong, V7], "--timeout", "10", "--allow-spills", "4096")
    assert result.returncode == 0, result.stdout + result.stderr
    best, rows = found(repository)
    assert [entry.config for entry in best.best] == [V7.short_form()]
    reasons = {config: rows[config.short_form()].reason for config in (hangs, crashes, wrong)}
    assert "no answer within" in reasons[hangs]
    assert "illegal memory access" in reasons[crashes]
    assert "wrong output" in reasons[wrong]
    assert {rows[c.short_form()].outcome for c in (hangs, crashes, wrong)} == {FAILED}


def test_what_spills_is_dropped(sweep, repository: Path) -> None:
    kernel = repository / STEPS["v7"].source
    text = kernel.read_text()
    # eight blocks an SM leave a thread 64 registers
    kernel.write_text(text.replace("min_blocks(Config::value)", "8", 1))
    result = sweep([V7])
    assert result.returncode == 1, result.stdout + result.stderr
    row = load_sweep(
        sweep_file(repository / "configs", torch.cuda.get_device_name()),
        torch.cuda.get_device_name(),
        "",
    ).rows[0]
    assert row.outcome == DROPPED
    assert row.reason.startswith("spills:")


def test_best_config_gives_a_kernel_that_runs(cuda_device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a winner that was not built
        for step in STEPS:
            config = best_config(step, torch.bfloat16, cuda_device)
            assert config in flash_attention.kernels()
            operation = config.family.operation
            problem = operation.small.in_dtype(config.dtype)
            values = operation.part("inputs").draw("normal", problem, cuda_device)
            outputs = flash_attention.run(config, *values.values())
            assert all(output.isfinite().all() for output in outputs.values())


@pytest.mark.parametrize("dtype", (Element.FP16, Element.BF16), ids=lambda dtype: dtype.short)
def test_the_loop_of_mma_sync_does_every_iteration(cuda_device, dtype: Element) -> None:
    """Its accumulators grow in proportion to the iterations, so that none was optimised away."""
    once, many = MmaLoop(dtype, cuda_device, 8), MmaLoop(dtype, cuda_device, 8 * 64)
    assert many.operations == 64 * once.operations
    for loop in (once, many):
        loop.sums.fill_(torch.nan)
        loop.launch()
    torch.cuda.synchronize()
    assert once.sums.isfinite().all() and once.sums.abs().max() > 1
    torch.testing.assert_close(many.sums, 64 * once.sums, rtol=1e-3, atol=64)


def test_an_mma_loop_of_no_iterations_is_refused(cuda_device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="iterations 0 must be at least 1"):
        MmaLoop(Element.BF16, cuda_device, 0)


@pytest.mark.parametrize("timing", ["graph", "events"])
@pytest.mark.parametrize("cache", ["rotate", "flush"])
def test_the_chips_rates_are_measured(cuda_device, timing: str, cache: str) -> None:
    protocol = Protocol(rounds=3, timing=timing, cache=cache)
    works, timer = default_rate_works(cuda_device), make_timer(cuda_device, protocol)
    rates = measure_rates(works, Element.BF16, timer, protocol, GpuSensor(cuda_device))
    assert [(rate.load, rate.name) for rate in rates] == list(product(LOADS, RATE_NAMES))
    assert all(rate.tflops and not rate.failure for rate in rates), rates


@pytest.mark.parametrize("timing", ["graph", "events"])
@pytest.mark.parametrize("cache", ["rotate", "flush"])
def test_the_benchmark_times_in_every_way(tmp_path: Path, timing: str, cache: str) -> None:
    path = tmp_path / "results.json"
    result = run(
        "tools/benchmark/pt_bench.py",
        *("--kernel", V16.short_form(), "--seq", "512", "--rounds", "3"),
        *("--timing", timing, "--cache", cache, "--json", path),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "% of mma.sync" in result.stdout
    results = load_results(path)
    assert results.find(V16.short_form(), "bf16", 512) is not None
    assert (results.protocol.timing, results.protocol.cache) == (timing, cache)


def test_a_length_that_does_not_fit_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    # each of Q, K, V and O has 2^25 rows of 4 KiB: 512 GiB together
    result = run(
        "tools/benchmark/pt_bench.py",
        *("--kernel", V16.short_form(), "--rounds", "1"),
        *("--seq", "512", str(2**25), "--json", path),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # a library that is not installed is left out too, by name
    (skipped,) = (record for record in load_results(path).skipped if not record.name)
    assert skipped.size == 2**25
    assert f"bf16 at {2**25} skipped: does not fit" in result.stdout


def test_nsight_compute_counts_a_kernel_and_the_flash_backend(tmp_path: Path) -> None:
    path = tmp_path / "ncu.json"
    result = run(
        "tools/benchmark/ncu_bench.py",
        *("--kernel", V7.short_form(), "--library", "flash", "--seq", "512", "--runs", "2"),
        *("--json", path),
    )
    if result.returncode == 2 and "ncu" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.returncode == 0, result.stdout + result.stderr
    flash, own = json.loads(path.read_text())["kernels"]
    assert "flash" in flash["kernel"]
    assert own["kernel"] == V7.short_form()
    assert own["runs"] == 2
    for name in ("duration_us", "cycles", "registers_per_thread", "l2_hit_percent"):
        assert own["values"][name] is not None, name
    assert own["values"]["tensor_pipe_percent"] > 0
    assert own["stalls"]
