"""Libraries that kernels are measured beside: the options that reach them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.baselines import run
from flash_helpers.operations.attention_forward.inputs import draw
from flash_helpers.operations.attention_forward.reference import attention_float64


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, {"causal": False}),
        ({"causal": True, "softmax_scale": 0.5}, {"causal": True, "softmax_scale": 0.5}),
        ({"window_left": 1}, {"causal": False, "window_size": (1, -1)}),
        ({"window_left": 1, "window_right": 0}, {"causal": True, "window_size": (1, -1)}),
        ({"softcap": 2.0}, {"causal": False, "softcap": 2.0}),
    ],
    ids=str,
)
def test_a_package_gets_the_options_that_are_not_the_usual_ones(monkeypatch, options, passed):
    calls = []
    package = SimpleNamespace(flash_attn_func=lambda *_, **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    problem = AttentionForward(1, 2, 4, **options)
    run("flash_attn", problem, draw("normal", problem))
    assert calls == [passed]


@pytest.mark.parametrize(
    ("library", "options", "message"),
    [
        ("flash_attn", {"sinks": True}, "sinks: flash_attn does not take it"),
        ("pytorch_flash", {"softcap": 2.0}, "softcap 2: pytorch_flash does not take it"),
        ("pytorch_cudnn", {"window_left": 1}, r"window_size \(1, -1\): pytorch_cudnn does not"),
        ("pytorch_flash", {"causal": True, "len_k": 5}, "causal with len_q 4 and len_k 5: PyTorc"),
    ],
)
def test_an_option_that_a_library_lacks_is_refused(library, options, message):
    problem = AttentionForward(1, 2, 4, **options)
    with pytest.raises(ValueError, match=message):
        run(library, problem, draw("normal", problem))


def test_the_flash_backend_computes_the_problem():
    problem = AttentionForward(1, 2, 4, causal=True, softmax_scale=0.5)
    given = draw("normal", problem)
    found = run("pytorch_flash", problem, given)["o"]
    wanted = attention_float64(*given.values(), causal=True, softmax_scale=0.5)
    torch.testing.assert_close(found.double(), wanted, atol=0.05, rtol=0.05)
