"""The benchmark of the simulator, with a clock of its own."""

import json
from types import SimpleNamespace

import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.kernel_configs import OPERATIONS, get_kernel_progression_configs

pytestmark = pytest.mark.usefixtures("frozen")


@pytest.fixture
def tool(monkeypatch):
    """The tool, for which every run of a step takes a second."""
    module = load_tool("benchmarks/simulator.py")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as that of a script

    def measure(config, problem):
        named = {"config": config.short_form(), "problem": problem.record()}
        return {**named, "blocks": 1, "seconds": 1.0, "peak_mib": 1}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "HOPPER_ROWS", 128)
    return module


def test_every_step_is_measured_in_every_dtype(tool, tmp_path):
    path = tmp_path / "simulator.json"
    assert tool.main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    configs = get_kernel_progression_configs()
    assert len(document["small"]) == document["seconds_for_all"] == len(configs)
    assert [record["problem"] for record in document["small"]] == [
        config.family.operation.small.record() for config in configs
    ]
    assert len(document["scaling"]) == len(tool.SCALING_SHAPES)
    assert document["seconds_are"] == "the least of 3 runs"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_kernel_of_each_operation_is_timed(operation):
    config = next(c for c in get_kernel_progression_configs() if c.family.operation is operation)
    measured = load_tool("benchmarks/simulator.py").measure(config, operation.small)
    assert measured["problem"] == operation.small.in_dtype(config.dtype).record()
    assert measured["warp_instructions"] > 0 and measured["seconds"] > 0


def test_the_kernel_of_hopper_is_run(tool):
    record = tool.measure_hopper()
    # of each of the 8 warps of consumers: 8 of 16 columns of d_head, 8 of 16 keys
    assert record["wgmma"] == 8 * (8 + 8)
    assert (record["problem"]["len_q"], record["blocks"]) == (128, 1)
    assert record["seconds"] > 0
    assert 0 < record["peak_mib"] <= tool.peak_mib() + 1


def test_a_time_is_the_least_of_three(tool, monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 24.0])  # 5, 2 and 4 seconds
    monkeypatch.setattr(tool.time, "perf_counter", lambda: next(clock))
    total = SimpleNamespace(instructions=7, mma=1, wgmma=0)
    counted = SimpleNamespace(counters=SimpleNamespace(total=total))
    record = tool.timed(lambda: counted)
    assert (record["seconds"], record["warp_instructions"], record["mma"]) == (2.0, 7, 1)
    assert list(clock) == []
