"""examples/driver_launch, compiled for an exported kernel."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from flash_helpers.compile.toolchain import find_nvcc

FOLDER = Path(__file__).resolve().parents[2] / "examples/driver_launch"
PACKAGED = ("nvidia/cu13/include", "nvidia/cuda_runtime/include", "triton/backends/nvidia/include")


def compiled_example(exported: Path, kernel: str) -> Path:
    """The program for a kernel whose files are in a folder. Skips the test without g++ or
    cuda.h."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    program = exported / f"launch_{kernel}"
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-DKERNEL={kernel}"]
    command += ["-include", str(exported / f"{kernel}.h"), "-isystem", str(cuda_headers())]
    subprocess.run([*command, str(FOLDER / "launch.cpp"), "-o", str(program)], check=True)
    return program


def cuda_headers() -> Path:
    """The folder of cuda.h. Skips the test without one."""
    found = find_nvcc(os.environ)
    packages = Path(sysconfig.get_path("platlib"))
    folders = [found[0].resolve().parents[1] / "include"] if found else []
    folders += [packages / name for name in PACKAGED]
    for folder in folders:
        if (folder / "cuda.h").is_file():
            return folder
    pytest.skip("no cuda.h")
