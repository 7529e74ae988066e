"""A toolchain whose compiler is fake_nvcc.py, and the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flash_helpers.compile.toolchain import BuildError, Toolchain, find_toolchain

SUPPORT = Path(__file__).parent


def fake_toolchain(folder: Path) -> Toolchain:
    """Its nvcc is in `folder`, made if it is not there."""
    nvcc = folder / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    # -S: it starts in half the time
    nvcc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{SUPPORT}/fake_nvcc.py" "$@"\n')
    nvcc.chmod(0o755)
    return Toolchain(nvcc, (13, 0), "nvcc 13.0")


def real_toolchain(*architectures: int) -> Toolchain:
    """The one of this machine; without it the test is skipped."""
    try:
        return find_toolchain(architectures)
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
