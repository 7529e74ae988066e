"""Tools that need a GPU, without one."""

import importlib
from pathlib import Path

import pytest
import torch
from fake_backend import ROOT, load_tool


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("benchmarks/autograd.py", ["--json"]),
        ("benchmarks/call_overhead.py", ["--json"]),
        ("benchmarks/compilers.py", ["--json"]),
        ("benchmarks/experiments/run_experiments.py", ["--json"]),
        ("benchmarks/first_call.py", ["--device", "cuda", "--json"]),
        ("benchmarks/long_sequences.py", ["--json"]),
        ("benchmarks/mma_cycles.py", ["--json"]),
        ("benchmarks/multimodal.py", ["--json"]),
        ("benchmarks/training.py", ["--json"]),
        ("tools/analysis/check_counts.py", ["--source", "sass", "--json"]),
        ("tools/analysis/check_counts.py", ["--source", "simulator", "--json"]),
        ("tools/benchmark/ncu_bench.py", ["--json"]),
        ("tools/benchmark/pt_bench.py", ["--json"]),
        ("tools/benchmark/run_kernels.py", []),
    ],
)
def test_nothing_is_run_or_written_and_one_line_says_why(
    tool: str, options: list[str], tmp_path: Path, capsys, monkeypatch
) -> None:
    path = ROOT / tool
    monkeypatch.syspath_prepend(str(path.parent))  # benchmarks import their neighbours
    is_benchmark = tool.startswith("benchmarks")
    module = importlib.import_module(path.stem) if is_benchmark else load_tool(tool)
    file = [str(tmp_path / "x.json")] if options else []
    assert module.main([*options, *file]) == 2
    assert capsys.readouterr().err == "the kernels were not run: no CUDA device was found\n"
    assert not list(tmp_path.iterdir())
