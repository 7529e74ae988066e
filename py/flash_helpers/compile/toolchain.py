"""Compilers of the kernels: nvcc and its host compiler, their paths and their abilities.

Standard library only: the build backend imports this before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.console.errors import UserError

ARCHITECTURES_VARIABLE = "FLASH_ATTENTION_CUDA_ARCHS"
DEFAULT_ARCHITECTURES = (80, 86, 89, 90)
LIBRARY_ARCHITECTURES = (80, 90)  # for others its kernels are compiled at first use
LOWEST_ARCHITECTURE = 80  # mma.sync m16n8k16, ldmatrix and cp.async

LOWEST_CUDA = (12, 4)
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
PYPI_TOOLCHAIN = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)
_PYPI_FOLDER = "cu13"  # below site-packages/nvidia, where the 13.x packages land

_HOW_TO_GET_NVCC = (
    f"install a CUDA toolkit, {LOWEST_CUDA[0]}.{LOWEST_CUDA[1]} or later, and set CUDA_HOME to its "
    f"folder, or: python -m pip install setuptools ninja {' '.join(map(repr, PYPI_TOOLCHAIN))} and "
    "give --no-build-isolation to the pip that builds this package"
)


class BuildError(UserError):
    """The kernels cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Toolchain:
    """An nvcc that can compile the kernels.

    `version`: CUDA release, e.g. (13, 0). `identity`: text that differs between any two toolchains.
    `library_folders`: where the linker finds the CUDA runtime, if nvcc does not know by itself.
    `architectures`: compute capabilities times ten that it compiles for.
    """

    nvcc: Path
    version: tuple[int, int]
    identity: str
    library_folders: tuple[Path, ...] = ()
    architectures: frozenset[int] = frozenset()

    @property
    def release(self) -> str:
        """The version with its number of maintenance, e.g. "13.0.88", where nvcc tells it."""
        number = re.search(r"\bV(\d[\d.]+)", self.identity)
        return number[1] if number else f"{self.version[0]}.{self.version[1]}"


def parse_architectures(text: str) -> tuple[int, ...]:
    """Compute capabilities times ten, ascending, from e.g. "80;90", "sm_80, sm_90" or "8.0 9.0".

    Raises BuildError for anything else, for none, and for one below 8.0.
    """
    architectures = set()
    for item in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)", item)
        if match is None:
            raise BuildError(
                f"{ARCHITECTURES_VARIABLE}={text!r}: {item!r} is not an architecture; write them "
                f'as in "{_joined(DEFAULT_ARCHITECTURES)}" or "sm_80 sm_90"'
            )
        architecture = int(match[1] + match[2])
        if architecture < LOWEST_ARCHITECTURE:
            raise BuildError(
                f"{ARCHITECTURES_VARIABLE}={text!r}: the kernels need compute capability 8.0 "
                f"(cp.async, ldmatrix, mma.m16n8k16) and sm_{architecture} is older: "
                f"use {LOWEST_ARCHITECTURE} or higher"
            )
        architectures.add(architecture)
    return tuple(sorted(architectures))


def requested_architectures(
    environ: Mapping[str, str], default: tuple[int, ...] = DEFAULT_ARCHITECTURES
) -> tuple[int, ...]:
    """The architectures asked for in the environment, or the default ones. Raises BuildError."""
    text = environ.get(ARCHITECTURES_VARIABLE, "")
    return parse_architectures(text) if text.strip() else default


def _joined(architectures: tuple[int, ...]) -> str:
    return ";".join(map(str, architectures))


def _pypi_folder() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / _PYPI_FOLDER
        if (folder / "bin" / "nvcc").is_file():
            return folder
    return None


def find_nvcc(
    environ: Mapping[str, str], default_home: Path = DEFAULT_CUDA_HOME
) -> tuple[Path, tuple[Path, ...]] | None:
    """nvcc and the library folders that its linker needs to be told, or None.

    The search goes through CUDA_HOME, CUDA_PATH, PATH, `default_home`, then the installed PyPI
    packages. Raises BuildError when CUDA_HOME or CUDA_PATH names a folder without nvcc.
    """
    nvcc = _first_nvcc(environ, default_home)
    if nvcc is None:
        return None
    home = nvcc.resolve().parents[1]
    return nvcc, ((home / "lib",) if home.name == _PYPI_FOLDER else ())


def _first_nvcc(environ: Mapping[str, str], default_home: Path) -> Path | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environ.get(variable):
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable}={home} has no bin/nvcc: set it to a CUDA toolkit's folder, or "
                    "unset it to use nvcc from PATH or from PyPI"
                )
            return nvcc
    if on_path := shutil.which("nvcc", path=environ.get("PATH", "")):
        return Path(on_path)
    for folder in (default_home, _pypi_folder()):
        if folder is not None and (folder / "bin" / "nvcc").is_file():
            return folder / "bin" / "nvcc"
    return None


def _output_of(*command: str | Path) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error}): {_HOW_TO_GET_NVCC}") from error
    if result.returncode:
        raise BuildError(
            f"{' '.join(map(str, command))} failed with exit status {result.returncode}:\n"
            f"{result.stdout}{result.stderr}"
        )
    return result.stdout


def _host_compiler(environ: Mapping[str, str]) -> str:
    """Identity of the C++ compiler that nvcc will call. Raises BuildError without one."""
    flags = [environ.get(f"NVCC_{place}_FLAGS", "") for place in ("PREPEND", "APPEND")]
    chosen = environ.get("NVCC_CCBIN")
    if chosen is None and any("ccbin" in flag or "compiler-bindir" in flag for flag in flags):
        return " ".join(flags)
    compiler = shutil.which(chosen or "g++", path=environ.get("PATH", ""))
    if compiler is None:
        raise BuildError(
            f"no C++ compiler: {chosen or 'g++'} is not on PATH. Install one (Debian and Ubuntu: "
            "apt-get install g++; Fedora: dnf install gcc-c++) or name one in NVCC_CCBIN"
        )
    return " ".join([*flags, _output_of(compiler, "--version").splitlines()[0]])


def check_platform(platform: str = sys.platform) -> None:
    """Raises BuildError where the kernels cannot be built."""
    if not platform.startswith("linux"):
        raise BuildError(
            f"the kernel library builds on Linux and this is {platform}: use Linux, or WSL 2 on "
            "Windows"
        )


def find_toolchain(
    architectures: tuple[int, ...],
    environ: Mapping[str, str] = os.environ,
    default_home: Path = DEFAULT_CUDA_HOME,
) -> Toolchain:
    """A toolchain that compiles for `architectures`.

    Raises BuildError when there is none, naming what is missing and how to get it.
    """
    check_platform()
    found = find_nvcc(environ, default_home)
    if found is None:
        raise BuildError(f"no nvcc in CUDA_HOME, on PATH or from PyPI: {_HOW_TO_GET_NVCC}")
    nvcc, library_folders = found
    host_compiler = _host_compiler(environ)
    banner = _output_of(nvcc, "--version")
    match = re.search(r"release (\d+)\.(\d+)", banner)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release:\n{banner}{_HOW_TO_GET_NVCC}")
    version = (int(match[1]), int(match[2]))
    if version < LOWEST_CUDA:
        raise BuildError(
            f"{nvcc} is CUDA {version[0]}.{version[1]} and the kernels need "
            f"{LOWEST_CUDA[0]}.{LOWEST_CUDA[1]} or later: {_HOW_TO_GET_NVCC}"
        )
    supported = frozenset(
        int(number)
        for number in re.findall(r"compute_(\d+)\b", _output_of(nvcc, "--list-gpu-arch"))
    )
    if unsupported := sorted(set(architectures) - supported):
        accepted = tuple(a for a in sorted(supported) if a >= LOWEST_ARCHITECTURE)
        raise BuildError(
            f"{nvcc} (CUDA {version[0]}.{version[1]}) cannot compile for "
            f"{', '.join(f'sm_{a}' for a in unsupported)}: set {ARCHITECTURES_VARIABLE} to some of "
            f'"{_joined(accepted)}", or use another CUDA toolkit through CUDA_HOME'
        )
    identity = f"{banner}\n{host_compiler}"
    return Toolchain(nvcc, version, identity, library_folders, supported)


def find_ninja() -> str:
    """The ninja of this Python's environment, or the one on PATH. Raises BuildError without one."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    if found := shutil.which("ninja", path=places):
        return found
    raise BuildError("there is no ninja, which runs the compilers: python -m pip install ninja")


def toolchain_requirements(
    environ: Mapping[str, str] = os.environ, default_home: Path = DEFAULT_CUDA_HOME
) -> list[str]:
    """Packages that pip has to install before the kernels can be built: none where there is an
    nvcc.

    Raises BuildError when pip could not install it either.
    """
    check_platform()
    _host_compiler(environ)
    if find_nvcc(environ, default_home) is not None:
        return []
    _check_installable(PYPI_TOOLCHAIN)
    return list(PYPI_TOOLCHAIN)


def _check_installable(requirements: tuple[str, ...]) -> None:
    # -I: in an isolated build, pip itself is only visible outside of the isolation
    pip = (sys.executable, "-I", "-m", "pip")
    if subprocess.run((*pip, "--version"), capture_output=True, check=False).returncode:
        return  # another installer, which will say for itself what it cannot find
    command = (*pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "-q", *requirements)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(
            "no nvcc in CUDA_HOME or on PATH, and pip cannot get NVIDIA's compiler packages:\n"
            f"{result.stderr.strip()}\n"
            f"{_HOW_TO_GET_NVCC[0].upper()}{_HOW_TO_GET_NVCC[1:]}\n"
            "(an index given to pip on its command line has to be given as PIP_INDEX_URL too)"
        )
