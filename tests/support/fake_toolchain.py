"""A toolchain whose compiler is fake_nvcc.py."""

from __future__ import annotations

import sys
from pathlib import Path

from flash_helpers.compile.toolchain import Toolchain

SUPPORT = Path(__file__).parent


def fake_toolchain(folder: Path) -> Toolchain:
    """Its nvcc is in `folder`, made if it is not there."""
    nvcc = folder / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    # -S: it starts in half the time
    nvcc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{SUPPORT}/fake_nvcc.py" "$@"\n')
    nvcc.chmod(0o755)
    return Toolchain(nvcc, (13, 0), "nvcc 13.0")
