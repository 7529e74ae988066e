"""Backends run tensors of their own device."""

from types import SimpleNamespace

import pytest
import torch

from flash_helpers.kernel_configs import config_from_short_form
from flash_helpers.runtime.backend import find_backend

CONFIG = config_from_short_form("o5_bf16_d128_Br128_Bc64_w4")


def test_that_of_a_gpu_does_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tensors = [torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16) for _ in "qkvo"]
    with pytest.raises(ValueError, match=r"on cpu and the kernels run on cuda:0: move them"):
        find_backend("cuda").execute(CONFIG, tensors, {})
