"""Exported kernels run in a program that has the CUDA driver alone, exported modules in PyTorch."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from driver_example import compiled_example

import flash_attention
from flash_attention.__main__ import main

pytestmark = pytest.mark.gpu

PORTABLE = "o5_bf16_d128_Br128_Bc64_w4"
HOPPER = "h30_bf16_d128_Br128_Bc128_K3_V2_pp"
COUNTING = f"{HOPPER}_causal"  # counts its tiles in a buffer, where there are more than blocks


@pytest.mark.parametrize(
    ("name", "image", "problem"),
    [
        (PORTABLE, "cubin", ()),
        (HOPPER, "cubin", ()),
        (COUNTING, "cubin", ("640", "40")),
        (PORTABLE, "ptx", ()),
    ],
)
def test_the_example_launches_an_exported_kernel(tmp_path, name, image, problem) -> None:
    major, minor = torch.cuda.get_device_capability()
    if name != PORTABLE and (major, minor) != (9, 0):
        pytest.skip("not a Hopper GPU")
    arch = f"{major}{minor}a" if name != PORTABLE else f"{major}{minor}"
    assert main(["export", name, "--arch", arch, "--out", str(tmp_path)]) == 0
    program = compiled_example(tmp_path, name)
    command = [program, tmp_path / f"{name}.{image}", *problem]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("right: the largest error is 0.00")


class Block(torch.nn.Module):
    """attention() and forward()."""

    def __init__(self, config: str) -> None:
        super().__init__()
        self.config = config

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once = flash_attention.attention(q, k, v)
        return flash_attention.forward(self.config, q, k, once + v)


def test_a_compiled_package_runs_on_the_gpu(tmp_path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    hopper = torch.cuda.get_device_capability() == (9, 0)
    block = Block(HOPPER if hopper else PORTABLE)
    batch = {0: torch.export.Dim("batch", max=8)}

    def tensors(batch: int) -> tuple[torch.Tensor, ...]:
        shape = (batch, 256, 4, 128)
        return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    exported = torch.export.export(block, tensors(2), dynamic_shapes=dict.fromkeys("qkv", batch))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "block.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for given in (tensors(2), tensors(5)):
        found = package(*given)
        assert torch.equal(found, block(*given))
        q, k, v = (x.transpose(1, 2).float() for x in given)
        once = F.scaled_dot_product_attention(q, k, v).bfloat16().float()
        wanted = F.scaled_dot_product_attention(q, k, (once + v).bfloat16().float())
        assert torch.allclose(found.transpose(1, 2).float(), wanted, atol=0.03)
