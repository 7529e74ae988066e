"""Tensor maps that a kernel makes of zeros, beside the hardware's: the box that a copy brings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensor_map_cases import CASES, THREADS, MapCase

from flash_helpers.runtime.driver import LoadedKernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def hopper(cuda_device: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda_device) != (9, 0):
        pytest.skip("the text is for sm_90a")


def on_gpu(case: MapCase) -> np.ndarray:
    tensor = torch.from_numpy(case.tensor).cuda()
    out = torch.zeros(case.expected.size, dtype=torch.uint8, device="cuda")
    copy = torch.zeros(128, dtype=torch.uint8, device="cuda")
    arguments = case.arguments(tensor.data_ptr(), out.data_ptr(), copy.data_ptr())
    LoadedKernel(case.text().encode(), "k", 0).start((1, 1, 1), THREADS, [arguments])
    return out.cpu().numpy()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_box_copied_with_a_map_made_of_zeros(case: MapCase) -> None:
    found, expected = (x.view(np.uint32) for x in (on_gpu(case), case.expected))
    assert (case.simulated() == case.expected).all()
    wrong = np.flatnonzero(found != expected)
    shown = [f"word {i} is {found[i]:#x}, not {expected[i]:#x}" for i in wrong[:8]]
    assert not wrong.size, f"{wrong.size} of {found.size}: {'; '.join(shown)}"
