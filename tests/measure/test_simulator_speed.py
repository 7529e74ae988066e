"""The benchmark of the simulator on kernels built like those of libraries."""

import json
from dataclasses import replace
from typing import Any

import hopper_cases as hopper
import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.ptx import DeviceMemory, RepeatedWorkLint, Run, TensorMap, load_ptx
from flash_helpers.ptx.run.watch.agents import AgentWatch

pytestmark = pytest.mark.usefixtures("frozen")

TILES = 3


def epilogue(lanes: str, **options: Any) -> Run:
    """A run of one block, whose output is right."""
    case, memory = hopper.epilogue(lanes, 1, TILES), DeviceMemory()
    module = load_ptx(ROOT / f"tests/ptx/kernels/{case.module}.ptx")
    addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
    run = module.kernel(case.kernel).launch(
        *(case.grid, case.block, case.shared_bytes, case.bind(addresses, TensorMap.encode)),
        memory,
        **options,
    )
    output = case.buffers["C"]
    assert case.error(memory.download(addresses["C"], output.shape, output.dtype)) == 0
    return run


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_an_epilogue_of_32_lanes_counts_32_copies(seed) -> None:
    one, each = (epilogue(lanes, seed=seed).counters.total for lanes in ("one_lane", "all_lanes"))
    assert (one.tma_requests, one.tma_boxes) == (TILES, TILES)
    assert (each.tma_requests, each.tma_boxes) == (TILES, 32 * TILES)
    assert each.tma_bytes == 32 * one.tma_bytes and each.tma_sectors == 32 * one.tma_sectors


def test_copies_of_32_lanes_are_watched_as_one(monkeypatch) -> None:
    begun: list[int] = []
    begin = AgentWatch.begin_read

    def counted(self: AgentWatch, *arguments: Any) -> Any:
        begun.append(len(arguments[1]))
        return begin(self, *arguments)

    monkeypatch.setattr(AgentWatch, "begin_read", counted)
    (lint,) = epilogue("all_lanes", lints=True).lints
    assert type(lint) is RepeatedWorkLint and lint.count == TILES
    assert begun == TILES * [1]
    assert not epilogue("one_lane", lints=True).lints


def test_the_file_has_each_shape() -> None:
    tool = load_tool("benchmarks/simulator_speed.py")
    records = json.loads((ROOT / tool.RESULTS).read_text())["kernels"]
    assert [record["shape"] for record in records] == list(tool.cases())
    for record in records:
        rate = 1e6 * record["cpu_seconds"] / record["warp_instructions"]
        assert record["seconds_per_million"] == pytest.approx(rate, abs=0.02)


def test_it_measures_and_writes(monkeypatch, tmp_path) -> None:
    tool, path = load_tool("benchmarks/simulator_speed.py"), tmp_path / "speed.json"
    monkeypatch.setattr(tool, "cases", lambda: {"small": hopper.epilogue("one_lane", 1, 1)})
    assert tool.main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    (record,) = document["kernels"]
    assert (record["kernel"], record["blocks"]) == ("epilogue_one_lane", 1)
    assert record["cpu_seconds"] >= 0 and record["warp_instructions"] > 0
    machine = document["provenance"]
    assert machine["command"] == "benchmarks/simulator_speed.py --json speed.json"
    assert machine["cpu"] and machine["cores"] and machine["numpy"]


def test_a_wrong_output_is_no_measurement() -> None:
    case = hopper.epilogue("one_lane", 1, 1)
    with pytest.raises(RuntimeError, match="epilogue_one_lane: the output is not right"):
        load_tool("benchmarks/simulator_speed.py").measure(
            replace(case, expected=1 + case.expected)
        )
