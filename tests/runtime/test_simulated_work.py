"""A family's share of the tests' time is a budget of simulated instructions."""

import subprocess
import sys
from pathlib import Path

from flash_helpers.kernel_configs import FAMILIES, FlashForwardKernelConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = FlashForwardKernelConfig.from_short_form(FlashForwardKernelConfig.example)
FAMILY = CONFIG.family.name

CONFTEST = """
from dataclasses import replace

from simulated_work import SimulatedWork

from flash_helpers.kernel_configs import FAMILIES


def pytest_configure(config):
    families = {name: replace(f, simulated_budget=BUDGET) for name, f in FAMILIES.items()}
    config.pluginmanager.register(SimulatedWork(families))
"""

# Two tests of two kernels: the first is launched twice, each time in three blocks of two warps that
# execute one instruction; the second is nobody's.
TESTS = """
import pytest
from ptx_snippets import entry

from flash_helpers.ptx import load_ptx


@pytest.mark.parametrize("n", range(2))
def test_simulates(n):
    for name in ("SYMBOL", "k"):
        kernel = load_ptx(entry("").replace(" k(", f" {name}(")).kernel(name)
        first = kernel.launch(grid=3, block=64)
        kernel.launch(grid=3, block=64, before=first)
"""
DONE = 2 * 2 * 3 * 2


def run_tests(folder: Path, budget: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    step, name = CONFIG.step.namespace, CONFIG.short_form()
    (kernel,) = CONFIG.family.kernels
    symbol = f"_ZN{len(step)}{step}{len(kernel)}{kernel}I{len(name)}{name}EEvv"
    (folder / "conftest.py").write_text(CONFTEST.replace("BUDGET", str(budget)))
    (folder / "test_it.py").write_text(TESTS.replace("SYMBOL", symbol))
    paths = [ROOT / "tests/support", ROOT / "tests/ptx"]
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {' '.join(map(str, paths))}\n")
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_what_is_within_the_budget_passes_and_is_told(tmp_path) -> None:
    result = run_tests(tmp_path, DONE, "-n", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"simulated: {FAMILY} {DONE} of {DONE} warp instructions" in result.stdout
    assert "over" not in result.stdout


def test_what_workers_simulate_is_added_up_and_over_the_budget_fails(tmp_path) -> None:
    result = run_tests(tmp_path, DONE - 1, "-n", "2")
    assert result.returncode == 1, result.stdout + result.stderr
    assert (
        f"{FAMILY}: {DONE} warp instructions simulated, over the family's budget of {DONE - 1}: "
        "test smaller shapes, or raise the family's simulated_budget" in result.stdout
    )
    assert "2 passed" in result.stdout


def test_every_family_has_a_budget() -> None:
    families = FAMILIES.values()
    assert all(family.simulated_budget > 0 and family.matrix_budget > 0 for family in families)
