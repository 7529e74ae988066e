"""nvcc as a child process that leaves what the child of NVRTC leaves: PTX and machine code whose
sources are named relative to the root. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")([^"\n]*)"', re.MULTILINE)
_HERE = re.compile(r"^\./", re.MULTILINE)  # of -I., before a file's name in a message


def relative_sources(ptx: str, root: Path) -> str:
    """PTX with the files of the root named relative to it, as its line tables name them."""

    def relative(file: re.Match[str]) -> str:
        name = file[2].removeprefix(f"{root}/").removeprefix("./")
        return f'{file[1]}{name}"'

    return _FILE.sub(relative, ptx)


def _run(command: Sequence[str | Path], folder: Path, unit: Path) -> int:
    """Run a command in a folder, print its messages, and return its exit status."""
    result = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    text = (result.stdout + result.stderr).decode(errors="replace").replace(str(unit), unit.name)
    sys.stdout.buffer.write(_HERE.sub("", text).encode())
    return result.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile one unit as the command line says; print the log, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="flash_helpers.compile.nvcc",
        description="Compile a unit with the working directory as the root of its sources.",
    )
    parser.add_argument("nvcc", type=Path)
    parser.add_argument("unit", type=Path)
    parser.add_argument("scratch", type=Path, help="folder for kernel.ptx and kernel.cubin")
    parser.add_argument("target", help="such as sm_90a, or compute_90a for PTX alone")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of nvcc")
    asked = parser.parse_args(arguments)
    root, scratch = Path.cwd(), asked.scratch.resolve()
    virtual = asked.target.replace("sm_", "compute_")
    ptx = scratch / "kernel.ptx"
    command = [asked.nvcc, *asked.flags, f"-arch={virtual}", "-ptx", asked.unit, "-o", ptx]
    if status := _run(command, root, asked.unit):
        return status
    ptx.write_text(relative_sources(ptx.read_text(), root))
    if asked.target == virtual:
        return 0
    # machine code from this very PTX, and without the scratch folder's name in it
    command = [asked.nvcc, *asked.flags, f"-arch={asked.target}", "-cubin", ptx.name]
    return _run([*command, "-o", "kernel.cubin"], scratch, asked.unit)
