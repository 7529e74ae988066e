"""NVIDIA's disassemblers: their paths, their versions, and calls of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.sass.read.records import SassError

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
TIMEOUT_SECONDS = 120.0  # a kernel of ten thousand instructions takes a few

_SHOWN_LINES = 3  # of what a program complains of
_PREFIX = re.compile(r"^\w+ (?:fatal|error|info|warning)\s*: ", re.MULTILINE)


@dataclass(frozen=True)
class Disassembler:
    """A program of the toolkit, "nvdisasm" or "cuobjdump", and its version, e.g. (13, 5, 37)."""

    name: str
    path: Path
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {version_text(self.version)}"

    def is_new_enough(self, version: Sequence[int]) -> bool:
        """Whether it reads the output of a compiler of that version; () is an unknown version."""
        return tuple(version[:2]) <= self.version[:2]


def version_text(version: Sequence[int]) -> str:
    """A version as NVIDIA prints it, such as 13.5.37."""
    return ".".join(map(str, version))


def parse_version(text: str) -> tuple[int, ...]:
    """The version in a banner or a note such as "release 13.0, V13.0.88"; empty without one."""
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def candidates(name: str) -> list[Path]:
    """The programs of that name, each once, in this order: CUDA_HOME, CUDA_PATH, the installed
    packages nvidia-cuda-... of PyPI, PATH, DEFAULT_CUDA_HOME."""
    homes = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    folders = [Path(home) / "bin" for home in homes if home]
    for entry in sys.path:
        folders += sorted(Path(entry or ".").glob("nvidia/*/bin"))
    if on_path := shutil.which(name):
        folders.append(Path(on_path).parent)
    folders.append(DEFAULT_CUDA_HOME / "bin")
    found: dict[Path, Path] = {}
    for folder in folders:
        program = folder / name
        if program.is_file() and os.access(program, os.X_OK):
            found.setdefault(program.resolve(), program.absolute())
    return list(found.values())


def find_disassemblers(name: str) -> list[Disassembler]:
    """The `candidates`, one of each version, the newest first.

    The newest comes first because each version reads the files of its own release and of older
    ones, except for dropped architectures. Raises SassError without any; the message says what to
    install.
    """
    found: dict[tuple[int, ...], Disassembler] = {}
    for program in candidates(name):
        try:
            version = parse_version(run_program(program, "--version"))
        except SassError:
            continue
        if version:
            found.setdefault(version, Disassembler(name, program, version))
    if not found:
        raise SassError(
            f"{name} is missing (looked in CUDA_HOME, among the installed packages, on PATH and in "
            f"{DEFAULT_CUDA_HOME}): pip install nvidia-cuda-{name}"
        )
    return [found[version] for version in sorted(found, reverse=True)]


def find_disassembler(name: str) -> Disassembler:
    """The newest of `find_disassemblers`, with the same errors."""
    return find_disassemblers(name)[0]


def run_program(program: Path, *arguments: str | Path) -> str:
    """The output of the program.

    Raises SassError if it cannot be run, fails, or takes longer than TIMEOUT_SECONDS.
    """
    try:
        result = subprocess.run(
            [program, *arguments],
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise SassError(
            f"{program.name} {arguments[-1]} was stopped after {TIMEOUT_SECONDS:g} seconds: the "
            "file may be damaged"
        ) from None
    except OSError as error:
        raise SassError(
            f"{program} cannot be run ({error}): pip install nvidia-cuda-{program.name}"
        ) from error
    if result.returncode:
        raise SassError(f"{program.name} {arguments[-1]}: {_reason(result)}")
    return result.stdout.decode(errors="replace")


def _reason(result: subprocess.CompletedProcess[bytes]) -> str:
    """The reason why a program failed, on one line: the last line of its output, after any
    warnings."""
    said = _PREFIX.sub("", result.stderr.decode(errors="replace")).split("\n")
    lines = list(dict.fromkeys(line.strip() for line in said if line.strip()))
    if lines:
        return "; ".join(lines[-_SHOWN_LINES:])
    if result.returncode < 0:
        return f"stopped by signal {-result.returncode}"
    return f"exit status {result.returncode}"


def require_new_enough(tool: Disassembler, writer: str, version: Sequence[int], file: str) -> None:
    """Raise SassError if the program that wrote `file` is of a newer release than the disassembler.

    `writer`, `version`: such as "ptxas" and (13, 0, 88); an unknown version is accepted.
    """
    if not tool.is_new_enough(version):
        raise SassError(
            f"{tool} is older than {writer} {version_text(version)} that wrote {file}: "
            f"pip install --upgrade nvidia-cuda-{tool.name}"
        )
