"""wgmma of every type beside the hardware's: sums of small integers, which are exact.

No claim is made about rounded sums: the hardware keeps fewer bits of them, fewest of 8-bit floats.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from wgmma_cases import CASES, WARPGROUP, WgmmaCase

from flash_helpers.runtime.driver import LoadedKernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def hopper(cuda_device: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda_device) != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")


def on_gpu(case: WgmmaCase) -> np.ndarray:
    data = torch.from_numpy(case.data).cuda()
    out = torch.zeros(case.out_bytes, dtype=torch.uint8, device="cuda")
    kernel = LoadedKernel(case.text().encode(), "k", 0)
    kernel.start((1, 1, 1), WARPGROUP, [struct.pack("<2Q", data.data_ptr(), out.data_ptr())])
    return case.matrix(out.cpu().numpy())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_d_gets_a_times_b_and_what_it_was(case: WgmmaCase) -> None:
    assert not case.differences(case.simulated())
    assert not case.differences(on_gpu(case))
