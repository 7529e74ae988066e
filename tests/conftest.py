"""Fixtures that several files share, and the reason why GPU tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flash_attention._checks
from flash_attention import _library

ROOT = Path(__file__).resolve().parents[1]


def why_no_gpu() -> str | None:
    """The reason why kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        flash_attention._checks.check_device(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def package() -> Path:
    """The folder that the installed package lies in, with the library, PTX and logs."""
    return _library.LIBRARY_PATH.parent
