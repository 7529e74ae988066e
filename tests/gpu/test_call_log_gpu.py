"""The log of calls on a GPU: quick launches, graphs, compiled code, a crash, and a call that runs
again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attention
from flash_helpers.check import replay
from flash_helpers.runtime.call import calls_logged
from flash_helpers.runtime.call_log import (
    DESTINATION_VARIABLE,
    LEVEL_VARIABLE,
    CallLog,
    Destination,
)

pytestmark = pytest.mark.gpu

ROWS = "s1_bf16_w8"

CRASH = f"""\
import torch, flash_attention
from flash_helpers.runtime.call import register
register("{ROWS}", "crash", b'''
.version 7.0
.target sm_80
.address_size 64
.visible .entry crash(.param .align 8 .b8 arguments[40])
{{
    trap;
}}
''')
x = torch.linspace(-1, 1, 2000, device="cuda").bfloat16().view(4, 500)
flash_attention.run("{ROWS}", x)
torch.cuda.synchronize()
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "calls.log"


@pytest.fixture
def qkv(cuda_device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 256, 2, 128, device=cuda_device).bfloat16() for _ in range(3)]


def log(level: int, path: Path) -> CallLog:
    return CallLog(level, Destination(str(path)))


def test_each_call_is_in_it_however_it_is_launched(path, qkv) -> None:
    expected = flash_attention.attention(*qkv)
    flash_attention.attention(*qkv)  # a quick launch
    with calls_logged(log(1, path)):
        for _ in range(3):
            assert torch.equal(flash_attention.attention(*qkv), expected)
    flash_attention.attention(*qkv)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert all("attention() at " in line and line.endswith("on cuda:0") for line in lines)


def test_statistics_are_those_of_the_result(path, qkv) -> None:
    with calls_logged(log(5, path)):
        o = flash_attention.attention(*qkv)
    text = path.read_text()
    assert f"q: min {qkv[0].min().item():.6g}, max {qkv[0].max().item():.6g}, mean " in text
    assert f"o: min {o.min().item():.6g}, max {o.max().item():.6g}, mean " in text
    assert "threads per block" in text


def test_a_graph_is_captured_without_statistics_and_replayed_without_lines(path, qkv) -> None:
    expected = flash_attention.attention(*qkv)
    graph = torch.cuda.CUDAGraph()
    with calls_logged(log(10, path)):
        with torch.cuda.graph(graph):
            o = flash_attention.attention(*qkv)
        o.zero_()
        graph.replay()
    assert torch.equal(o, expected)
    text = path.read_text()
    assert text.count("captured into a CUDA graph") == text.count("attention_forward by") == 1
    assert "min " not in text
    assert [*path.parent.iterdir()] == [path]


def test_compiled_code_is_in_it(path, qkv) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: flash_attention.attention(*x) + 0, fullgraph=True)
    with calls_logged(log(5, path)):
        compiled(*qkv)
    assert path.read_text().count("attention_forward by") == 1
    assert "o: min " in path.read_text()


def test_a_saved_call_runs_again_here_and_in_the_simulator(path, qkv, capsys) -> None:
    packed = torch.stack(qkv, 2)
    with calls_logged(log(10, path)):
        flash_attention.attention(*packed.unbind(2))
    (saved,) = path.parent.glob("call_*[0-9].pt")
    assert replay.main([str(saved)]) == 0
    assert "o: the same values as in the saved output\n" in capsys.readouterr().out
    assert replay.main([str(saved), "--simulate"]) == 0
    assert "on the simulator\n" in capsys.readouterr().out


def test_a_kernel_that_crashes_leaves_its_inputs(path, root, capsys) -> None:
    environ = {**os.environ, LEVEL_VARIABLE: "10", DESTINATION_VARIABLE: str(path)}
    command = [sys.executable, "-c", CRASH]
    ended = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
    assert ended.returncode != 0
    text = path.read_text()
    assert f"rows by {ROWS} on cuda:0\n" in text
    assert "x: min -1, max 1, mean " in text
    assert "y cannot be read: " in text
    (saved,) = path.parent.glob("call_*")
    assert replay.main([str(saved), "--simulate"]) == 0
    assert "no outputs were saved" in capsys.readouterr().out
