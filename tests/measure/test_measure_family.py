"""benchmarks/measure_family.py: every command that it runs is one that pt_bench.py takes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.compile.codegen import listed_configs
from flash_helpers.kernel_configs import FAMILIES, Element
from flash_helpers.registry.selection import parse_dtypes, select_kernels

sys.path.insert(0, str(ROOT / "benchmarks"))

import measure_family


@pytest.mark.parametrize("family", FAMILIES)
def test_each_command_measures_built_kernels_at_lengths_that_they_take(
    family, tmp_path, capsys
) -> None:
    options = [family, str(tmp_path), "h200", "--list", "--commit", "abc"]
    assert measure_family.main(options) == 0
    assert not list(tmp_path.iterdir())
    tool, built, files = load_tool("tools/benchmark/pt_bench.py"), listed_configs(ROOT), []
    for line in capsys.readouterr().out.splitlines():
        asked = tool.parse_arguments(shlex.split(line)[2:])
        assert (asked.commit, asked.resume) == ("abc", True)
        files.append(Path(asked.json).name)
        operation = FAMILIES[family].operation
        sizes = tool.asked_sizes(asked, operation)
        shapes = [tool.measured_problem(asked, operation, size) for size in sizes]
        problems = {shapes[0].operation: shapes[0]}
        dtypes = parse_dtypes(asked.dtype)
        configs = select_kernels(built, asked.kernel, dtypes, problems=problems)
        assert len(configs) == len(asked.kernel)
        assert all(measure_family.is_causal(config) == bool(asked.causal) for config in configs)
        for shape in shapes:
            tool.require_taken(configs, shape)
    assert len({*files}) == len(files)
    assert f"{family}_h200.json" == files[-1]
    assert all(name.startswith(family) and name.endswith("_h200.json") for name in files)
    fixed = {c.short_form() for c in FAMILIES[family].progression() if c.dtype == Element.BF16}
    assert fixed <= {*asked.kernel}  # the last file has all steps


def test_a_run_that_fails_ends_the_others(monkeypatch, tmp_path) -> None:
    ran = []

    def run(command: list[str], **options: object) -> type:
        ran.append(command)
        return type("Ended", (), {"returncode": 2})

    monkeypatch.setattr(measure_family.subprocess, "run", run)
    assert measure_family.main(["hopper", str(tmp_path), "h200"]) == 2
    assert len(ran) == 1


def test_kinds_are_chosen_by_name(tmp_path, capsys) -> None:
    options = ["hopper", str(tmp_path), "h200", "--list", "--kind"]
    assert measure_family.main([*options, "best_causal", "main"]) == 0
    first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert "--causal" in first and str(tmp_path / "hopper_best_causal_h200.json") in first
    assert str(tmp_path / "hopper_h200.json") in second
    assert measure_family.main([*options, "odder"]) == 2
    assert "hopper has no kind odder: choose alone_causal, " in capsys.readouterr().err
