"""Cycles of an mma.sync: what Nsight Compute counted, and the tool that asks it."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_backend import ROOT, fake_backend

from flash_helpers.kernel_configs import Element
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.runtime import mma_loop
from flash_helpers.sass.read.opcodes import cost

sys.path.insert(0, str(ROOT / "benchmarks"))

import mma_cycles as tool

OPCODES = {"fp16": "HMMA.16816.F32", "bf16": "HMMA.16816.F32.BF16"}


def test_the_cost_of_an_mma_is_what_was_counted_on_an_h100() -> None:
    counted = json.loads((ROOT / tool.RESULTS).read_text())
    assert counted["provenance"]["compute_capability"] == "9.0"
    launches = counted["launches"]
    assert [x["dtype"] for x in launches] == [
        d.short for d in tool.MMA_TYPES for _ in range(tool.LAUNCHES)
    ]
    for x in launches:
        expected = cost(OPCODES[x["dtype"]], 90)
        assert x["cycles"] / x["instructions"] == pytest.approx(expected, abs=0.01)


class FakeNcu:
    """Counts two launches a dtype; cells are its instructions and cycles, by dtype and launch."""

    def __init__(self) -> None:
        self.cells = {
            "fp16": [("1,000", "1,500"), ("1,000", "1,501")],
            "bf16": [("2,000", "3,000"), ("2,000", "3,002")],
        }
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "NVIDIA\nVersion 2025.3\n", "")
        if "--query-metrics" not in command:
            self.commands.append(command)
            rows = [
                f'"{n}","loop","{instructions}","{cycles}"'
                for n, (instructions, cycles) in enumerate(self.cells[command[-1]])
            ]
            header = f'"ID","Kernel Name","{tool.INSTRUCTIONS}","{tool.CYCLES}"'
            log = Path(dict(itertools.pairwise(command))["--log-file"])
            log.write_text("\n".join((header, '"","","inst","cycle"', *rows)))
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def ncu(monkeypatch) -> FakeNcu:
    """The tool has a GPU and this ncu."""
    fake = FakeNcu()
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(NsightCompute, "find", classmethod(lambda cls: cls("ncu", None, fake)))
    return fake


def test_the_tool_prints_the_table_and_writes_the_file(ncu, tmp_path, capsys) -> None:
    path = tmp_path / "mma.json"
    assert tool.main(["--commit", "68cfc22", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["provenance"]["commit"] == "68cfc22"
    assert written["provenance"]["command"].startswith("mma_cycles.py --commit 68cfc22")
    assert written["profiler"] == "Nsight Compute Version 2025.3"
    assert written["launches"] == [
        {"dtype": "fp16", "instructions": 1000, "cycles": 1500},
        {"dtype": "fp16", "instructions": 1000, "cycles": 1501},
        {"dtype": "bf16", "instructions": 2000, "cycles": 3000},
        {"dtype": "bf16", "instructions": 2000, "cycles": 3002},
    ]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    each = [row[3] for row in rows if row and row[0] in OPCODES]
    assert each == ["1.5000", "1.5010", "1.5000", "1.5010"]
    # what ncu is to look at is this tool's own loop, once a dtype
    assert [list(c[-4:]) for c in ncu.commands] == [
        [sys.executable, tool.__file__, "--launch", dtype] for dtype in OPCODES
    ]


@pytest.mark.parametrize(
    ("bf16", "said"),
    [
        ([("n/a", "3,000")], f"this GPU does not count {tool.INSTRUCTIONS} or {tool.CYCLES}"),
        ([("2,000", "n/a")], f"this GPU does not count {tool.INSTRUCTIONS} or {tool.CYCLES}"),
        ([("2,000", "3,000"), ("0", "0")], "this GPU does not count"),
        ([], "ncu counted nothing"),
    ],
)
def test_what_cannot_be_counted_is_one_line_and_nothing_is_written(
    ncu, tmp_path, capsys, bf16, said
) -> None:
    ncu.cells["bf16"] = bf16
    path = tmp_path / "mma.json"
    assert tool.main(["--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(said) and captured.err.count("\n") == 1
    assert captured.out == ""
    assert not path.exists()


def test_without_ncu_that_is_said_in_a_line(ncu, monkeypatch, tmp_path, capsys) -> None:
    def absent(cls):
        raise ProfilerError("ncu (Nsight Compute) was found neither in PATH nor beside CUDA")

    monkeypatch.setattr(NsightCompute, "find", classmethod(absent))
    assert tool.main(["--json", str(tmp_path / "mma.json")]) == 2
    assert capsys.readouterr().err.startswith("ncu (Nsight Compute) was found neither")
    assert not (tmp_path / "mma.json").exists()


def test_the_loop_is_launched_in_the_dtype_that_was_asked_for(ncu, monkeypatch) -> None:
    launched = []

    class FakeLoop:
        def __init__(self, dtype: Element, device: torch.device) -> None:
            self.dtype = dtype

        def launch(self) -> None:
            launched.append(self.dtype)

    monkeypatch.setattr(mma_loop, "MmaLoop", FakeLoop)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert tool.main(["--launch", "bf16"]) == 0
    assert launched == [Element.BF16] * tool.LAUNCHES
    assert ncu.commands == []
