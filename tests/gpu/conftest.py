"""Every test in this folder needs a GPU; they share their inputs and references."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_problems import Problem, make_problem

from flash_helpers.kernel_configs import AttentionForward

LOWEST_CAPABILITY = (8, 0)


@pytest.fixture(autouse=True, scope="session")
def cuda_device() -> torch.device:
    """The current CUDA device; without a fit one every test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < LOWEST_CAPABILITY:
        pytest.skip(f"compute capability {capability} is below {LOWEST_CAPABILITY}")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def alone_on_the_device(
    cuda_device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The workers of pytest-xdist take turns: tests time kernels, wait for a hang, and fill the
    memory."""
    with (tmp_path_factory.getbasetemp().parent / "gpu.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def problem(
    cuda_device: torch.device,
) -> Callable[[str, AttentionForward, torch.dtype], Problem]:
    """(distribution, shape, dtype) to inputs with their float64 result, computed once each."""

    @functools.cache
    def cached(distribution: str, shape: AttentionForward, dtype: torch.dtype) -> Problem:
        return make_problem(distribution, shape, dtype, cuda_device)

    return cached
