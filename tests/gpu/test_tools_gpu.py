"""The command lines on a real GPU, from option to exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_problems import CONFIGS

from flash_helpers.kernel_configs import get_kernel_progression_configs
from flash_helpers.measure.results import FLASH, load_results

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PROGRESSION = get_kernel_progression_configs()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("options", [["--small"], []], ids=["small", "full"])
def test_the_sanity_check_passes(options: list[str]) -> None:
    result = run("tools/debug/sanity_check.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == f"{len(PROGRESSION)} passed, 0 failed"


def test_the_sanity_check_of_every_kernel_gives_json() -> None:
    result = run("tools/debug/sanity_check.py", "--small", "--kernel", "all", "--json", "--diff")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["failed"] == 0
    assert {check["config"] for check in report["checks"]} >= {c.short_form() for c in CONFIGS}


def test_the_benchmark_times_a_kernel_beside_flash(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    kernel = next(c for c in PROGRESSION if c.dtype.short == "bf16").short_form()
    options = ["--kernel", kernel, "--seq", "512", "--rounds", "3", "--json", str(path)]
    result = run("tools/benchmark/pt_bench.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    results = load_results(path)
    assert results.find(kernel, "bf16", 512) is not None
    assert results.find(FLASH, "bf16", 512) is not None
    assert results.provenance.driver
    assert results.provenance.compute_capability
    assert results.clocks
