"""The forward of a whole model, exported as a bundle, runs in a program that has the CUDA driver
alone."""

from __future__ import annotations

import copy
import re
import subprocess

import pytest
import torch
from bundles import bytes_of, compiled_program
from torch import Tensor, nn

import flash_attention
from flash_attention.multimodal import MultimodalTransformer

pytestmark = pytest.mark.gpu

LENGTH, TOKENS, WIDTH = 186, 64, 128


def model() -> MultimodalTransformer:
    """Twelve layers, with random modulation, which begins as 0."""
    torch.manual_seed(0)
    found = MultimodalTransformer()
    for name, weights in found.named_parameters():
        if "modulation" in name:
            nn.init.normal_(weights, std=0.05)
    return found.eval()


@pytest.mark.parametrize("batch", [1, 64])
def test_twelve_layers_are_as_right_as_with_pytorch(tmp_path, batch) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16; replays of a CUDA graph
    have the same bits."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "x": (batch, LENGTH, WIDTH),
        "condition": (batch, WIDTH),
        "context": (batch, TOKENS, WIDTH),
    }
    inputs = {
        name: (torch.randn(shape, generator=generator) + 0.2).to("cuda", torch.bfloat16)
        for name, shape in shapes.items()
    }
    module = model().to("cuda", torch.bfloat16)
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    flash_attention.export_bundle(module, inputs, tmp_path, arch=arch)
    for name, x in inputs.items():
        (tmp_path / f"{name}.in").write_bytes(bytes_of(x))
    with torch.no_grad():
        (tmp_path / "output.ref").write_bytes(bytes_of(module(**inputs)))
        program = compiled_program(tmp_path)
        result = subprocess.run(
            [program, tmp_path, tmp_path, "200"], capture_output=True, text=True, check=False
        )
        print(result.stdout)
        assert result.returncode == 0, result.stderr + result.stdout
        assert re.search(r"[0-9.]+ us for a replay of the CUDA graph", result.stdout)
        content = bytearray((tmp_path / "output.out").read_bytes())
        found = torch.frombuffer(content, dtype=torch.bfloat16).view(shapes["x"]).cuda()
        exact = model().double().cuda()(**{name: x.double() for name, x in inputs.items()})
        usual = by_pytorch(module)(**inputs)

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    print(f"batch {batch}: error {error(found):.5f}, of PyTorch {error(usual):.5f}")
    assert error(found) < 2 * error(usual)


def by_pytorch(module: nn.Module) -> nn.Module:
    """A copy that PyTorch computes."""
    found = copy.deepcopy(module)
    for part in found.modules():
        if isinstance(getattr(part, "backend", None), str):
            part.backend = "torch"
    return found
