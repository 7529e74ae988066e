"""examples/multimodal_training.py: the loss falls, and with kernels as with PyTorch."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
import torch
from fake_backend import ROOT

from flash_attention.multimodal import _joint

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        return importlib.import_module("multimodal_training")


def test_the_loss_falls(example, capsys) -> None:
    assert example.main(["--steps", "100"]) == 0
    assert "100 steps in" in capsys.readouterr().out


def test_a_training_too_short_to_learn_is_told(example, capsys) -> None:
    assert example.main(["--steps", "2", "--batch", "1"]) == 1
    assert "not learnt" in capsys.readouterr().out


def test_with_kernels_the_curve_is_that_of_pytorch_within_noise(example, monkeypatch) -> None:
    """A few steps in the simulator, beside PyTorch in bf16 and in float32. A curve without the
    gradients of attention is far off."""
    task = example.Task(width=64, heads=1, layers=1, steps=4, batch=2, learning_rate=2e-2)
    right = torch.tensor(example.losses(task))

    def off(backend: str) -> float:
        return float((torch.tensor(example.losses(task, backend, dtype=BF16)) - right).norm())

    noise = off("torch")
    assert off("kernels") < 2 * noise
    attend = _joint.attend
    monkeypatch.setattr(_joint, "attend", lambda *qkv: attend(*(x.detach() for x in qkv)))
    assert off("kernels") > 4 * noise


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps 0 is less than 1: pass 1 or more"),
        (["--heads", "3"], "width 32 is not a multiple of heads 3: .*use heads"),
        (
            ["--backend", "kernels", "--dtype", "bfloat16", "--heads", "4"],
            "d_head 8 is not supported by",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(example, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as exit_:
        example.main(arguments)
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)
