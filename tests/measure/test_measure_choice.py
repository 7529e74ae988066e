"""Measuring the choice of kernels: what a run that was interrupted leaves to the next one."""

from __future__ import annotations

from fake_backend import fake_backend, load_tool, run_tool

import flash_attention
from flash_helpers.kernel_configs import OPERATIONS
from flash_helpers.measure import benchmark, machine, timing
from flash_helpers.operations.rows.grid import GROUPS
from flash_helpers.tune.choices import Choices

GROUP = "softmax_bf16"


def test_a_resumed_run_measures_what_the_file_lacks(monkeypatch, tmp_path, capsys) -> None:
    tool = load_tool("benchmarks/measure_choice.py")
    asked = []
    monkeypatch.setattr(tool, "find_backend", lambda kind: fake_backend())
    monkeypatch.setattr(tool, "competitors", lambda problem: [])
    monkeypatch.setattr(flash_attention, "prepare", lambda *configs: [])
    monkeypatch.setattr(timing, "make_timer", lambda *_: None)
    monkeypatch.setattr(machine, "GpuSensor", lambda _: None)
    monkeypatch.setattr(benchmark, "make_input_sets", lambda *_: [])
    monkeypatch.setattr(
        benchmark, "measure_problem", lambda c, sets, problem, *_: asked.append(problem) or []
    )
    path = tmp_path / "choice.json"
    arguments = ["--operation", "rows", "--group", GROUP, "--json", path, "--commit", "68cfc22"]
    budget = ["--time-budget", 1e-9]  # over before the first problem
    assert run_tool(capsys, tool, *arguments, *budget)[0] == 0 and not asked
    monkeypatch.setitem(GROUPS, GROUP, GROUPS[GROUP][:2])
    assert run_tool(capsys, tool, *arguments)[0] == 0 and len(asked) == 2
    whole = (*GROUPS[GROUP], *(p for p in GROUPS["softmax_fp32"][:1]))
    monkeypatch.setitem(GROUPS, GROUP, whole)
    assert run_tool(capsys, tool, *arguments, "--resume")[0] == 0
    assert asked == [*whole]
    assert {row.asked for row in Choices.load(path).problems} == {*whole}
    assert run_tool(capsys, tool, *arguments)[0] == 0 and len(asked) == 6
    one, other, *_ = whole
    assert run_tool(capsys, tool, *arguments, "--width", one.width, 3)[0] == 0
    assert asked[6:] == [problem for problem in whole if problem.width == one.width] != [other]


def test_libraries_are_all_or_those_that_are_named(monkeypatch, tmp_path, capsys) -> None:
    tool = load_tool("benchmarks/measure_choice.py")
    named = []
    monkeypatch.setattr(tool, "find_backend", lambda kind: fake_backend())
    monkeypatch.setattr(tool, "competitors", lambda problem: [])
    monkeypatch.setattr(flash_attention, "prepare", lambda *configs: [])
    monkeypatch.setattr(timing, "make_timer", lambda *_: None)
    monkeypatch.setattr(machine, "GpuSensor", lambda _: None)
    monkeypatch.setattr(benchmark, "make_input_sets", lambda *_: [])
    monkeypatch.setattr(
        benchmark, "measure_problem", lambda c, *_: named.append([own.name for own in c]) or []
    )
    monkeypatch.setattr(benchmark.Contender, "refusal", lambda self, problem: "")
    monkeypatch.setitem(GROUPS, GROUP, GROUPS[GROUP][:1])
    path = tmp_path / "choice.json"
    arguments = ["--operation", "rows", "--group", GROUP, "--json", path, "--commit", "68cfc22"]
    assert run_tool(capsys, tool, *arguments)[0] == 0
    assert run_tool(capsys, tool, *arguments, "--library", "copy")[0] == 0
    assert named == [[*OPERATIONS["rows"].libraries], ["copy"]]
    status, _, errors = run_tool(capsys, tool, *arguments, "--library", "copies")
    assert status == 2 and "--library copies: rows is measured beside " in errors
