"""A sequence that two GPUs share, through NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_backend import ROOT

from flash_helpers.measure.ring_speeds import RING, RingSpeeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_two_gpus_give_the_results_of_one_and_repeat_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    asked = ("--tokens", "2048", "16384", "--rounds", "1", "--sample-ms", "20")
    run("benchmarks/long_sequences.py", *asked, "--json", str(path))
    rings = [each for each in RingSpeeds.load(path).speeds if each.name == RING]
    assert len(rings) == 8
    for each in rings:
        assert each.repeats and each.relative_error is not None and each.relative_error < 2**-7
        assert each.tflops and each.hidden is not None and each.memory_bytes


def test_two_gpus_take_the_training_step_of_one() -> None:
    out = run("examples/long_sequence.py", "--device", "cuda", "--seq", "4096")
    assert "gradients are close" in out
