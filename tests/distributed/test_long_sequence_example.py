"""examples/long_sequence.py: two processes take the step that one takes, and its check can fail."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch.distributed as dist
from fake_backend import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        return importlib.import_module("long_sequence")


@pytest.mark.matrix("overlap")  # three processes import PyTorch
def test_two_processes_take_the_step_of_one() -> None:
    command = [sys.executable, "examples/long_sequence.py", "--seq", "16"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = r"16 tokens in 2 processes: loss \d.*; gradients are close"
    assert re.search(expected, result.stdout), result.stdout


def test_a_ring_without_its_mask_is_told(example, monkeypatch, tmp_path) -> None:
    def unmasked(q, k, v, causal):
        return example.attention(q, k, v)

    monkeypatch.setattr(example, "ring_attention", unmasked)
    with pytest.raises(ArithmeticError, match="results are off by"):
        example.step(0, 1, 16, "cpu", f"file://{tmp_path}/store")
    dist.destroy_process_group()
