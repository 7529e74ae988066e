"""Host time of first calls: which processes are measured, and how they are written and shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_backend import fake_backend, load_tool

from flash_helpers.measure.first_call import (
    EMPTY,
    FILLED,
    LIBRARY,
    FirstCallRecord,
    FirstCalls,
    ProcessTimes,
)
from flash_helpers.measure.machine import provenance


def times(first_us: float) -> ProcessTimes:
    return ProcessTimes(300.0, (first_us, 40.0, 30.0, 20.0), "NVRTC 13.0")


@pytest.fixture
def tool():
    return load_tool("benchmarks/first_call.py")


def test_calls_are_timed_one_by_one() -> None:
    child = load_tool("benchmarks/first_call_process.py")
    now = [0]

    def call() -> None:
        now[0] += 10_000 if now[0] == 0 else 3_000

    assert child.times_us(call, 3, clock=lambda: now[0]) == [10.0, 3.0, 3.0]


class TestProcesses:
    def test_a_second_one_finds_what_the_first_has_compiled(self, tool) -> None:
        folders: list[Path] = []

        def measure(kernel: str, folder: Path) -> ProcessTimes:
            entry = folder / "h30-sm_90a-0123456789abcdef"
            is_filled = entry.exists()
            entry.mkdir(exist_ok=True)
            folders.append(folder)
            return times(100.0 if is_filled else 2000.0)

        advanced: list[None] = []
        found, compiler = tool.measure_kernel("h30", measure, 2, lambda: advanced.append(None))
        states = [(record.state, record.first_us) for record in found]
        assert states == [(EMPTY, (2000.0,) * 2), (FILLED, (100.0,) * 2)]
        assert folders[0] == folders[1] != folders[2] == folders[3]
        assert compiler == "NVRTC 13.0" and len(advanced) == 2

    def test_one_that_compiles_nothing_has_no_second(self, tool) -> None:
        def measure(kernel: str, folder: Path) -> ProcessTimes:
            (folder / "compilers.json").touch()  # it asked for the compiler's name
            return times(90.0)

        found, _ = tool.measure_kernel("v16", measure, 3, lambda: None)
        assert [(record.state, record.first_us) for record in found] == [(LIBRARY, (90.0,) * 3)]

    def test_have_no_setting_of_the_user(self, tool, monkeypatch, tmp_path) -> None:
        program = tmp_path / "child.py"
        program.write_text(
            "import json, os, sys\n"
            "own = [k for k in os.environ if k.startswith('FLASH_ATTENTION_')]\n"
            "said = ' '.join([*own, os.environ['FLASH_ATTENTION_CACHE_DIR'], *sys.argv[1:]])\n"
            "print(json.dumps({'import_ms': 1.0, 'calls_us': [1.0], 'compiler': said}))\n"
        )
        monkeypatch.setattr(tool, "PROGRAM", program)
        monkeypatch.setenv("FLASH_ATTENTION_LOGLEVEL", "5")
        found = tool.run_process("cpu")("h30", tmp_path)
        assert found.compiler == (f"FLASH_ATTENTION_CACHE_DIR {tmp_path} h30 cpu 100 1 128 16 128")

    def test_tell_why_they_failed(self, tool, monkeypatch, tmp_path, capsys) -> None:
        program = tmp_path / "child.py"
        program.write_text("raise ValueError('no such kernel')\n")
        monkeypatch.setattr(tool, "PROGRAM", program)
        simulator = replace(fake_backend(), is_simulator=True)
        monkeypatch.setattr(tool, "find_backend", lambda device: simulator)
        path = tmp_path / "calls.json"
        assert tool.main(["--device", "cpu", "--json", str(path)]) == 1
        assert "ValueError: no such kernel" in capsys.readouterr().err
        assert not path.exists()


def test_the_table_has_medians_over_processes() -> None:
    processes = [times(first) for first in (1_000_000.0, 2_500_000.0, 9_000_000.0)]
    record = FirstCallRecord.of("h30", EMPTY, processes)
    assert (record.second_us, record.last_us) == ((40.0,) * 3, (20.0,) * 3)
    found = provenance(fake_backend(), "first_call.py", "68cfc22")
    measured = FirstCalls(found, "NVRTC 13.0", True, (1, 128, 16, 128), "bf16", (record,))
    assert measured.table().rows == [["h30", EMPTY, "300.0", "2,500.0", "40.0", "20.0"]]
    assert measured.table().header[3] == "first PTX, ms"


def test_the_tool_prints_the_table_and_writes_the_file(tool, monkeypatch, tmp_path, capsys) -> None:
    found = provenance(fake_backend(), "first_call.py", "68cfc22")
    gpu = replace(found, gpu="NVIDIA A100", compute_capability="8.0")
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(tool, "provenance_here", lambda *_: gpu)
    monkeypatch.setattr(tool, "run_process", lambda device: lambda kernel, folder: times(50.0))
    path = tmp_path / "calls.json"
    assert tool.main(["--repetitions", "2", "--json", str(path)]) == 0
    written = FirstCalls.load(path)
    assert [record.kernel.split("_")[0] for record in written.records] == ["v16", "o5"]
    assert json.loads(path.read_text())["compiler"] == "NVRTC 13.0"
    assert "first call, ms" in capsys.readouterr().out
