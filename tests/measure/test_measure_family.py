"""benchmarks/measure_family.py: every command that it runs is one that pt_bench.py takes."""

import shlex
import sys
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.compile.codegen import listed_configs
from flash_helpers.kernel_configs import FAMILIES, Element
from flash_helpers.operations.decode import OPERATION as DECODE
from flash_helpers.operations.decode.problem import Decode
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
    fixed = {
        c.short_form()
        for c in FAMILIES[family].progression()
        if c.dtype == Element.BF16 and not getattr(c.supports, "fp8_cache", False)
    }
    assert fixed <= {*asked.kernel}  # the last file has all steps


def test_caches_are_measured_by_steps_that_take_them(tmp_path, capsys) -> None:
    """Of a family of decode: the problems of each file, and the steps measured on them."""
    tool = load_tool("tools/benchmark/pt_bench.py")
    assert measure_family.main(["decode_sync", str(tmp_path), "h200", "--list"]) == 0
    problems, steps = {}, {}
    for line in capsys.readouterr().out.splitlines():
        asked = tool.parse_arguments(shlex.split(line)[2:])
        name = Path(asked.json).name.removeprefix("decode_sync_").removesuffix("h200.json")
        sizes = tool.asked_sizes(asked, DECODE)
        problems[name.strip("_")] = [tool.measured_problem(asked, DECODE, n) for n in sizes]
        steps[name.strip("_")] = {kernel.partition("_")[0] for kernel in asked.kernel}
    usual = {"heads": 32, "kv_heads": 8}
    assert {Decode(16, len_k=8192, **usual), Decode(64, len_k=2048, **usual)} <= {*problems[""]}
    assert [(p.batch, p.len_k) for p in problems["alone"]] == [(1, 1024), (1, 8192), (1, 131072)]
    groups = {f"group_{n}": n for n in (1, 8, 16)}
    assert {k: p.heads // p.kv_heads for k in groups for p in problems[k]} == groups
    pages = {f"pages_{n}": n for n in (1, 16, 64, 256)}
    assert {k: p.page_size for k in pages for p in problems[k]} == pages
    assert "c1" in steps[""] and not any({"c1", "c2"} & steps[k] for k in pages)
    of_fp8 = {name: {p.fp8_cache for p in own} for name, own in problems.items()}
    assert [name for name, kinds in of_fp8.items() if kinds == {True}] == ["fp8", "fp8_alone"]
    assert [name for name in steps if "c6" in steps[name]] == ["fp8", "fp8_alone"]
    assert steps["fp8"] == {"c6"} and {"keys_per_piece_1024", "dtypes"} <= steps.keys()
    (uniform,), (lognormal,) = problems["uniform"], problems["lognormal"]
    assert uniform.keys_read == lognormal.keys_read == 64 * 2000
    assert (uniform.total_k, lognormal.total_k) == (None, 128000)


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
