"""The command lines on a real GPU, from option to exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
from gpu_problems import CONFIGS

from flash_helpers.kernel_configs import Config, get_kernel_progression_configs
from flash_helpers.measure.compilers import CompilerComparison
from flash_helpers.measure.first_call import EMPTY, FILLED, LIBRARY, FirstCalls
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.results import BURST, CONTROL, FLASH, SUSTAINED, load_results
from flash_helpers.operations.attention_forward import OPERATION

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PROGRESSION = get_kernel_progression_configs()


def is_causal(config: Config) -> bool:
    return bool(config.supports.options.get("causal"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("options", [["--small"], []], ids=["small", "full"])
def test_the_sanity_check_passes(options: list[str]) -> None:
    result = run("tools/debug/sanity_check.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    checked = {*PROGRESSION, *(v for c in PROGRESSION for v in c.variants() if is_causal(v))}
    assert result.stdout.splitlines()[-1] == f"{len(checked)} passed, 0 failed"


def test_the_sanity_check_of_every_kernel_gives_json() -> None:
    result = run("tools/debug/sanity_check.py", "--small", "--kernel", "all", "--json", "--diff")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["failed"] == 0
    taken = {c.short_form() for c in CONFIGS if not c.refusal(OPERATION.small.in_dtype(c.dtype))}
    assert {check["config"] for check in report["checks"]} >= taken
    assert {c.step for c in CONFIGS} == {c.step for c in CONFIGS if c.short_form() in taken}


def test_the_sanity_check_compares_the_lse_too() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("family hopper: compute capability 9.0")
    options = ["--small", "--kernel", "h20..h30", "--lse", "--json"]
    result = run("tools/debug/sanity_check.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = json.loads(result.stdout)["checks"]
    assert {tuple(x["name"] for x in check["outputs"]) for check in checks} == {("o", "lse")}


def test_the_benchmark_times_a_kernel_beside_flash(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    kernel = next(c for c in PROGRESSION if c.dtype.short == "bf16").short_form()
    options = ["--kernel", kernel, "--seq", "512", "--rounds", "3", "--json", str(path)]
    result = run("tools/benchmark/pt_bench.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    results = load_results(path)
    assert results.provenance.driver
    assert results.provenance.compute_capability
    for load in (BURST, SUSTAINED):
        for name in (kernel, FLASH, CONTROL):
            found = results.find(name, "bf16", 512, load)
            assert found is not None, (name, load)
            assert len(found.samples_ms) == len(found.first_ms) == len(found.sm_mhz) == 3
        assert results.noise("bf16", load=load) < 0.1
    # what is never let off draws more than what rests for two thirds of the time
    burst, sustained = (results.find(kernel, "bf16", 512, load) for load in (BURST, SUSTAINED))
    assert median(sustained.power_w) > median(burst.power_w)


def test_a_kernel_of_two_compilers_is_right_and_timed(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    path = tmp_path / "compilers.json"
    options = ["--kernel", "s1", "--size", "1024", "--load", "burst", "--rounds", "2"]
    result = run("benchmarks/compilers.py", *options, "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    found = CompilerComparison.load(path)
    assert {pair.first.name.split("_")[0] for pair in found.pairs} == {"s1"}
    assert any(pair.is_control for pair in found.pairs)
    for pair in found.pairs:
        assert len(pair.ratios) == len(pair.first.sm_mhz) == 2


def test_a_process_compiles_a_kernel_at_its_first_call_and_the_next_one_finds_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "calls.json"
    options = ["--device", "cuda", "--repetitions", "1", "--json", str(path)]
    result = run("benchmarks/first_call.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    found = [(r.kernel.split("_")[0], r.state) for r in FirstCalls.load(path).records]
    assert found[:3] == [("v16", LIBRARY), ("o5", EMPTY), ("o5", FILLED)]
    if torch.cuda.get_device_capability() == (9, 0):
        assert found[3:] == [("h30", EMPTY), ("h30", FILLED)]


def test_the_driver_tells_clock_power_and_temperature(cuda_device: torch.device) -> None:
    reading = GpuSensor(cuda_device).read()
    assert reading is not None
    assert 100 < reading.sm_mhz < 5000 and 5 < reading.power_w < 2000
    assert 10 < reading.temperature_c < 110
