"""The benchmark of the simulator, with a clock of its own."""

from __future__ import annotations

import json

import pytest
from fake_backend import load_tool

from flash_helpers.check.problems import SMALL_SHAPE
from flash_helpers.kernel_configs import STEPS


@pytest.fixture
def tool(monkeypatch):
    """The tool, for which every run takes a second."""
    module = load_tool("benchmarks/simulator.py")

    def measure(config, shape):
        sizes = {"batch": shape.batch, "n_heads": shape.heads, "seq_len": shape.seq_len}
        return {"config": config.short_form(), **sizes, "blocks": 1, "seconds": 1.0, "peak_mib": 1}

    monkeypatch.setattr(module, "measure", measure)
    return module


def test_every_step_is_measured_in_every_dtype(tool, tmp_path):
    path = tmp_path / "simulator.json"
    assert tool.main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["small"]) == document["seconds_for_all"] == 2 * len(STEPS)
    assert {record["seq_len"] for record in document["small"]} == {SMALL_SHAPE.seq_len}
    assert len(document["scaling"]) == len(tool.SCALING_SHAPES)
