"""An exported kernel runs in a program that has the CUDA driver alone."""

from __future__ import annotations

import subprocess

import pytest
import torch
from driver_example import compiled_example

from flash_attention.__main__ import main

pytestmark = pytest.mark.gpu

PORTABLE = "o5_bf16_d128_Br128_Bc64_w4"
HOPPER = "h30_bf16_d128_Br128_Bc128_K3_V2_pp"


@pytest.mark.parametrize(
    ("name", "image"), [(PORTABLE, "cubin"), (HOPPER, "cubin"), (PORTABLE, "ptx")]
)
def test_the_example_launches_an_exported_kernel(tmp_path, name, image) -> None:
    major, minor = torch.cuda.get_device_capability()
    if name == HOPPER and (major, minor) != (9, 0):
        pytest.skip("not a Hopper GPU")
    arch = f"{major}{minor}a" if name == HOPPER else f"{major}{minor}"
    assert main(["export", name, "--arch", arch, "--out", str(tmp_path)]) == 0
    program = compiled_example(tmp_path, name)
    command = [program, tmp_path / f"{name}.{image}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("right: the largest error is 0.00")
