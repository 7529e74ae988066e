"""NVRTC and nvcc as a test finds them, and a unit compiled by one of them."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from flash_helpers.compile.compilers import (
    Compiler,
    NvrtcCompiler,
    find_compiler,
    find_nvcc_compiler,
)
from flash_helpers.compile.toolchain import BuildError


def nvrtc_compiler() -> NvrtcCompiler:
    """The NVRTC of this environment; its tests need one."""
    compiler = find_compiler()
    assert isinstance(compiler, NvrtcCompiler), "tests need NVRTC: pip install nvidia-cuda-nvrtc"
    return compiler


def compiler_called(name: str) -> Compiler:
    """ "NVRTC" or "nvcc"; without an nvcc its tests are skipped."""
    if name == "NVRTC":
        return nvrtc_compiler()
    try:
        return find_nvcc_compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Result:
    """What the child process left. `files`: contents by name."""

    status: int
    log: str
    files: dict[str, bytes]

    @property
    def ptx(self) -> str:
        return self.files["kernel.ptx"].decode()

    @property
    def cubin(self) -> bytes:
        return self.files["kernel.cubin"]


def compile_unit(
    compiler: Compiler, root: Path, unit: Path, target: str, scratch: Path, debug: bool = False
) -> Result:
    scratch.mkdir(parents=True)
    command = compiler.command(unit, target, scratch, debug)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert not done.stderr
    return Result(done.returncode, done.stdout, {p.name: p.read_bytes() for p in scratch.iterdir()})
