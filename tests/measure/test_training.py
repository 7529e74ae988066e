"""A tiny GPT, trained with attention() in the simulator."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_backend import fake_backend, load_tool

import flash_attention
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.training import (
    FLOAT32,
    LAB,
    PYTORCH,
    SIGNS,
    Attention,
    Training,
    TrainingRecord,
    TrainingRuns,
    losses,
    sums,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# Two steps that are long enough to tell right gradients from none.
TOY = Training(128, steps=2, batch=1, seq=48, width=128, learning_rate=1e-2)


def lab(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attention.attention(q, k, v, causal=True)


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2).bfloat16()


def without_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return in_float32(q, k, v).detach()


@pytest.mark.parametrize("d_head", [64, 128])
def test_a_step_with_the_kernels_gradients_leads_where_it_should(d_head) -> None:
    def after_a_step(attention: Attention) -> float:
        return losses(replace(TOY, d_head=d_head), attention, CPU, torch.bfloat16)[1]

    right = after_a_step(in_float32)
    off = abs(after_a_step(without_gradient) - right)
    assert abs(after_a_step(lab) - right) < off / 10


def test_the_text_is_sums_that_are_right_and_the_same_for_a_seed() -> None:
    text = next(sums(TOY))
    assert text.equal(next(sums(TOY))) and not text.equal(next(sums(replace(TOY, seed=1))))
    assert text.shape == (1, TOY.seq + 1)
    first, *_ = "".join(SIGNS[i] for i in text[0]).splitlines()
    left, _, right = first.partition("=")
    a, _, b = left.partition("+")
    assert int(a) + int(b) == int(right)


def test_a_file_and_its_table(tmp_path) -> None:
    found = {LAB: (2.5, 2.2504), PYTORCH: (2.5, 2.25), FLOAT32: (2.5, 2.25)}
    runs = TrainingRuns(
        provenance(fake_backend(), "training.py", "68cfc22"),
        "bf16",
        tuple(TrainingRecord(TOY, name, own) for name, own in found.items()),
    )
    runs.save(tmp_path / "training.json")
    assert TrainingRuns.load(tmp_path / "training.json") == runs
    row, *_ = runs.table().rows
    assert row == ["128", LAB, "2.500", "2.250", "0.0004"]


def test_the_tool_trains_in_the_simulator(tmp_path) -> None:
    file = tmp_path / "training.json"
    sizes = ["--steps", "1", "--batch", "1", "--seq", "32"]
    tool = load_tool("benchmarks/training.py")
    assert tool.main(["--device", "cpu", *sizes, "--json", str(file)]) == 0
    records = json.loads(file.read_text())["records"]
    assert [(r["training"]["d_head"], r["attention"]) for r in records] == [
        (d_head, name) for d_head in (64, 128) for name in (LAB, PYTORCH, FLOAT32)
    ]
