"""Compilers that are fake_nvcc.py, and the real toolchain."""

import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FakeCompiler:
    """Compiles kernels at first use, except for the target `unknown`. `writes`: the files that it
    does not forget to write."""

    identity: str = "fake compiler 13.0"
    options: tuple[str, ...] = ()
    unknown: str = ""
    writes: tuple[str, ...] = ("kernel.ptx", "kernel.cubin")
    program: str = sys.executable
    name: str = "fakecc 13.0"
    version: tuple[int, int] = (13, 0)
    architectures: frozenset[int] = frozenset({80, 86, 89, 90})

    def flags(self, target: str, debug: bool) -> list[str]:
        return [target, *self.options, *(["-G"] if debug else [])]

    def command(self, unit: Path, target: str, scratch: Path, debug: bool) -> list[str]:
        program = [self.program, "-S", str(SUPPORT / "fake_nvcc.py"), "--first-use"]
        files = [str(unit), target, str(scratch), ",".join(self.writes)]
        return [*program, *files, "-Isrc/include", "-I."]

    def supports(self, target: str) -> bool:
        return target != self.unknown


def real_toolchain(*architectures: int) -> Toolchain:
    """The one of this machine; without it the test is skipped."""
    try:
        return find_toolchain(architectures)
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
