"""Timed works, without the device that times them."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from flash_helpers.measure.timing import CudaTimer


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(fails, monkeypatch):
    # the collector destroyed an older graph there: "operation failed due to a previous error"
    replayed = []
    graph = SimpleNamespace(replay=lambda: replayed.append(gc.isenabled()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    captured = []

    def work() -> None:
        captured.append(gc.isenabled())
        if fails:
            raise RuntimeError("does not launch")

    expected = pytest.raises(RuntimeError) if fails else contextlib.nullcontext()
    with expected:
        CudaTimer(torch.device("cuda"), "graph").record(work)()
    assert captured == [False]
    assert replayed == ([] if fails else [True])
    assert gc.isenabled()
