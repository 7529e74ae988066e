"""benchmarks/measure_hopper.sh: every command that it runs is one that pt_bench.py takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.compile.codegen import configs_to_build
from flash_helpers.registry.selection import parse_dtypes, select_kernels

SCRIPT = ROOT / "benchmarks/measure_hopper.sh"


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """Arguments of pt_bench.py in each, by a python3 that notes them."""
    noted, folder = tmp_path / "noted", tmp_path / "bin"
    folder.mkdir()
    python = folder / "python3"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "if sys.argv[1] == '-c': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        f"with open({str(noted)!r}, 'a') as file: print(json.dumps(sys.argv[1:]), file=file)\n"
    )
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    arguments = [tmp_path / "results", "h200", "--commit", "abc"]
    subprocess.run([SCRIPT, *arguments], check=True, env=environment)
    tools, options = zip(*((c[0], c[1:]) for c in map(json.loads, noted.open())), strict=True)
    assert {*tools} == {"tools/benchmark/pt_bench.py"}
    return list(options)


def test_each_measures_kernels_that_are_built_at_lengths_that_they_take(commands) -> None:
    tool = load_tool("tools/benchmark/pt_bench.py")
    built = configs_to_build(ROOT)
    for command in commands:
        asked = tool.parse_arguments(command)
        assert (asked.commit, asked.resume) == ("abc", True)
        dtypes = parse_dtypes(asked.dtype)
        shapes = [
            tool.default_shape(n, heads=asked.heads, kv_heads=asked.kv_heads, causal=asked.causal)
            for n in asked.seq
        ]
        configs = select_kernels(built, asked.kernel, dtypes, problem=shapes[0])
        assert len(configs) == len(asked.kernel)
        tool.require_taken(configs, *shapes)


def test_each_writes_a_file_of_its_own(commands) -> None:
    files = [Path(command[command.index("--json") + 1]).name for command in commands]
    assert len({*files}) == len(files)
    assert all(name.startswith("hopper") and name.endswith("_h200.json") for name in files)
