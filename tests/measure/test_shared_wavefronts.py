"""Wavefronts of shared memory: the simulator's count beside Nsight Compute's, and the tool that
asks it."""

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_backend import ROOT, fake_backend

from flash_helpers.measure.nsight import NsightCompute
from flash_helpers.ptx import DeviceMemory, PtxModule, load_ptx

sys.path.insert(0, str(ROOT / "benchmarks"))

import shared_wavefronts as tool

COUNTED = tool.SharedWavefronts.load(ROOT / tool.RESULTS)
# ptxas makes it a loop, the turns of which depend on the values too: an estimate.
LOOPS = {"red_max_u64"}


@pytest.fixture(scope="module")
def kernels() -> PtxModule:
    return load_ptx(tool.module())


def simulated(kernels: PtxModule, launch: tool.CountedPattern) -> int:
    """Wavefronts of the access in the simulator, which runs the same PTX."""
    access, memory = tool.ACCESSES[launch.access], DeviceMemory()
    words = np.array(tool.addresses(access, list(launch.words)), np.uint32)
    args = [struct.pack("<2Q", memory.upload(words), memory.allocate(64 * 32))]
    # Lanes that write one word race, which is not the question here.
    run = kernels.kernel(launch.access).launch(
        1, 32, args=args, memory=memory, keep_going=True, target="sm_90"
    )
    return run.counters.by_opcode()[access.instruction.split()[0]].shared_wavefronts


def test_every_access_was_counted_on_an_h200() -> None:
    assert COUNTED.provenance.gpu == "NVIDIA H200"
    assert {launch.access for launch in COUNTED.patterns} == set(tool.ACCESSES)


@pytest.mark.parametrize("access", tool.ACCESSES)
def test_the_simulator_counts_what_nsight_compute_counts(kernels, access) -> None:
    launches = [launch for launch in COUNTED.patterns if launch.access == access]
    ours = {launch.pattern: simulated(kernels, launch) for launch in launches}
    theirs = {launch.pattern: launch.wavefronts for launch in launches}
    if access in LOOPS:
        assert all(
            theirs[pattern] / 2 <= ours[pattern] <= 2 * theirs[pattern] for pattern in theirs
        )
        assert ours["linear"] == theirs["linear"] == 4
    else:
        assert ours == theirs


class FakeNcu:
    """Counts one wavefront more each launch, of all that an access has or of some."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.left_out = 0

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "NVIDIA\nVersion 2025.3\n", "")
        if "--query-metrics" not in command:
            self.commands.append(command)
            access = tool.ACCESSES[command[-1]]
            launches = range(len(access.patterns) - self.left_out)
            header = f'"ID","Kernel Name","{tool.METRIC.format(access.counted)}"'
            rows = [f'"{n}","{command[-1]}","{n + 1}"' for n in launches]
            log = Path(dict(itertools.pairwise(command))["--log-file"])
            log.write_text("\n".join((header, '"","",""', *rows)))
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def ncu(monkeypatch) -> FakeNcu:
    """The tool has a GPU and this ncu."""
    fake = FakeNcu()
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(NsightCompute, "find", classmethod(lambda cls: cls("ncu", None, fake)))
    return fake


def test_the_tool_prints_a_table_and_writes_the_file(ncu, tmp_path, capsys) -> None:
    path = tmp_path / "wavefronts.json"
    assert tool.main(["--commit", "68cfc22", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["provenance"]["commit"] == "68cfc22"
    first = written["patterns"][1]
    assert first == {"access": "ld_b32", "pattern": "same", "words": [0] * 32, "wavefronts": 2}
    assert len(written["patterns"]) == sum(len(a.patterns) for a in tool.ACCESSES.values())
    shown = capsys.readouterr().out
    assert all(name in shown for name in tool.ACCESSES)
    # What ncu is to look at is this tool's own kernel, once an access.
    assert [list(c[-4:]) for c in ncu.commands] == [
        [sys.executable, tool.__file__, "--launch", name] for name in tool.ACCESSES
    ]


def test_launches_that_were_not_counted_are_said_in_a_line(ncu, tmp_path, capsys) -> None:
    ncu.left_out = 1
    path = tmp_path / "wavefronts.json"
    assert tool.main(["--json", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("this GPU does not count l1tex__")
    assert not path.exists()
