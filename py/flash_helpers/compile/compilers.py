"""Compilers of kernels at first use: NVRTC, which comes with PyTorch, and nvcc.

Both are child processes that run in the root of the sources, read one unit, and leave the same
files. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flash_helpers.compile import nvrtc
from flash_helpers.compile.driver_version import driver_cuda, newer_than_driver
from flash_helpers.compile.nvrtc_facts import nvrtc_facts
from flash_helpers.compile.toolchain import (
    DEFAULT_CUDA_HOME,
    LOWEST_CUDA,
    BuildError,
    find_nvcc,
    find_toolchain,
)

_NEWEST_MAJOR = 13  # of CUDA, for which packages exist
_STANDARD = "-std=c++20"
_LINES = "-lineinfo"
_DEBUG = "-G"
NVCC_FLAGS = (
    *(_STANDARD, "-O3", _LINES),
    *(f"-I{folder}" for folder in nvrtc.SOURCE_FOLDERS),
    "--expt-relaxed-constexpr",
    *("-Xptxas", "-v"),
)
NVRTC_FLAGS = (
    *(_STANDARD, _LINES),
    "-default-device",  # host code is an error
    "--pre-include=cmath",  # INFINITY and NAN
    "--ptxas-options=-v",
)

_PACKAGES_ROOT = Path(__file__).resolve().parents[2]
_NVRTC_NAME = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so(?:\.(\d+))?[.\d]*")
_TORCH_CUDA = re.compile(r"^cuda\b.*=\s*'(\d+)\.", re.MULTILINE)  # of torch/version.py
_TARGET = re.compile(r"(?:sm|compute)_(\d+)([af]?)")
_FIRST_OF_LETTER = {"a": (12, 0), "f": (12, 9)}
"""The release that brought the targets of one architecture, and those of one family of them."""


class Compiler(Protocol):
    """A compiler of kernels.

    `name`: for messages, such as "NVRTC 13.0.88". `version`: CUDA release. `identity`: text that
    differs between any two compilers. `architectures`: compute capabilities times ten.

    A target is "sm_90a" for machine code and its PTX, or "compute_90a" for PTX alone.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> tuple[int, int]: ...
    @property
    def identity(self) -> str: ...
    @property
    def architectures(self) -> frozenset[int]: ...

    def flags(self, target: str, debug: bool) -> list[str]:
        """All flags that decide what comes out."""
        ...

    def command(self, unit: Path, target: str, scratch: Path, debug: bool) -> list[str]:
        """The command that compiles the file `unit` with the working directory as the root of the
        sources, and leaves kernel.ptx and, for machine code, kernel.cubin in `scratch`. Its output
        is the log: messages of the compiler, and of `ptxas -v`.
        """
        ...

    def supports(self, target: str) -> bool:
        """Whether it compiles for `target`."""
        ...


@dataclass(frozen=True)
class _Described:
    """Facts of a compiler, and what follows from them."""

    name: str
    version: tuple[int, int]
    identity: str = field(repr=False)
    architectures: frozenset[int] = field(repr=False)

    def supports(self, target: str) -> bool:
        """Whether it compiles for `target`."""
        match = _TARGET.fullmatch(target)
        if match is None or int(match[1]) not in self.architectures:
            return False
        return self.version >= _FIRST_OF_LETTER.get(match[2], (0, 0))


@dataclass(frozen=True)
class NvrtcCompiler(_Described):
    """An NVRTC library, loaded by a child process."""

    library: Path

    def flags(self, target: str, debug: bool) -> list[str]:
        """All flags that decide what comes out."""
        flags = [_DEBUG if debug and flag == _LINES else flag for flag in NVRTC_FLAGS]
        return [*flags, f"--gpu-architecture={target}"]

    def command(self, unit: Path, target: str, scratch: Path, debug: bool) -> list[str]:
        """See `Compiler`."""
        files = [str(path.resolve()) for path in (self.library, unit, scratch)]
        return [*_child("nvrtc"), *files, *self.flags(target, debug)]


@dataclass(frozen=True)
class NvccCompiler(_Described):
    """An nvcc with its host compiler."""

    nvcc: Path

    def flags(self, target: str, debug: bool) -> list[str]:
        """All flags that decide what comes out."""
        for_debug = {_LINES: _DEBUG, "-O3": "-O0"} if debug else {}
        return [target, *(for_debug.get(flag, flag) for flag in NVCC_FLAGS)]

    def command(self, unit: Path, target: str, scratch: Path, debug: bool) -> list[str]:
        """See `Compiler`."""
        files = [str(path.resolve()) for path in (self.nvcc, unit, scratch)]
        return [*_child("nvcc"), *files, *self.flags(target, debug)]


def _child(module: str) -> list[str]:
    """Python that runs a module of this room without site-packages, whose start takes longer."""
    code = (
        f"import sys; sys.path.insert(0, {str(_PACKAGES_ROOT)!r}); "
        f"from flash_helpers.compile.{module} import main; sys.exit(main())"
    )
    return [sys.executable, "-I", "-S", "-c", code]


def how_to_get_nvrtc(cuda: int) -> str:
    """The line of pip that brings or renews the NVRTC of a major version of CUDA."""
    package = "nvidia-cuda-nvrtc" if cuda >= 13 else f"nvidia-cuda-nvrtc-cu{cuda}"
    return f"python -m pip install --upgrade '{package}<{cuda + 1}'"


def how_to_suit_driver(driver: tuple[int, int]) -> str:
    """Ways to a compiler that is not newer than the driver."""
    return (
        f"an older compiler ({how_to_get_nvrtc(driver[0])}), or set CUDA_HOME to a toolkit of CUDA "
        f"{driver[0]}"
    )


def check_target(compiler: Compiler, target: str) -> None:
    """Raises BuildError unless `compiler` compiles for `target`."""
    if not compiler.supports(target):
        known = ", ".join(f"sm_{number}" for number in sorted(compiler.architectures))
        raise BuildError(
            f"{compiler.name} cannot compile for {target}: it knows {known}. Install a newer one "
            f"({how_to_get_nvrtc(compiler.version[0])}), or a PyTorch for a newer CUDA"
        )


@dataclass(frozen=True)
class Places:
    """Where compilers are looked for.

    `maps`: lists the files that this process has mapped. `packages`: folders of installed packages.
    `toolkit`: the folder of a CUDA toolkit that nothing else names. `driver`: the newest CUDA
    release that the driver knows; None without one. `memory`: file that keeps facts of libraries
    between processes, which saves loading them.
    """

    maps: Path = Path("/proc/self/maps")
    packages: tuple[Path, ...] = field(
        default_factory=lambda: tuple(Path(p) for p in sys.path if p)
    )
    toolkit: Path = DEFAULT_CUDA_HOME
    driver: tuple[int, int] | None = field(default_factory=driver_cuda)
    memory: Path | None = None


def find_compiler(
    environ: Mapping[str, str] = os.environ, places: Places | None = None
) -> Compiler:
    """The first of these that is there and new enough: the NVRTC that PyTorch has loaded; that of
    PyTorch's CUDA among installed packages; PyTorch's own; that of any package, the newest first;
    that of a CUDA toolkit; nvcc. An NVRTC whose major version the driver does not know comes after
    the others, and a compiler that is so new is taken with a warning.

    Raises BuildError when there is none, with what was found and how to get one.
    """
    places = places or Places()
    compiler = _find_compiler(environ, places)
    if places.driver and compiler.version[0] > places.driver[0]:
        instead = how_to_suit_driver(places.driver)
        warnings.warn(
            newer_than_driver(compiler.name, places.driver, instead), RuntimeWarning, stacklevel=2
        )
    return compiler


def _find_compiler(environ: Mapping[str, str], places: Places) -> Compiler:
    newest = places.driver[0] if places.driver else _NEWEST_MAJOR
    refused: dict[Path, str] = {}
    libraries = dict.fromkeys(_libraries(environ, places))
    for library in sorted(libraries, key=lambda library: _major(library) > newest):
        try:
            return describe_nvrtc(library, places.memory)
        except BuildError as error:
            refused[library] = str(error)
    if find_nvcc(environ, places.toolkit) is not None:
        return find_nvcc_compiler(environ, places.toolkit)
    reasons = "".join(f"\n{reason}" for reason in refused.values())
    raise BuildError(
        "there is no NVRTC among the installed packages and no CUDA toolkit, one of which compiles "
        f"kernels: {how_to_get_nvrtc(_torch_cuda(places) or _NEWEST_MAJOR)}{reasons}"
    )


def describe_nvrtc(library: Path, memory: Path | None = None) -> NvrtcCompiler:
    """The compiler of a library of NVRTC, which is loaded if `memory` does not know it.

    Raises BuildError if it cannot be used, or is too old.
    """
    try:
        found = nvrtc_facts(library, memory)
    except nvrtc.NvrtcError as error:
        raise BuildError(str(error)) from error
    version = found.version
    if version < LOWEST_CUDA:
        raise BuildError(
            f"{library} is NVRTC {version[0]}.{version[1]} and the kernels need "
            f"{LOWEST_CUDA[0]}.{LOWEST_CUDA[1]} or later: {how_to_get_nvrtc(version[0])}"
        )
    number, _, _ = found.build.partition(" ")
    identity = f"NVRTC {found.build} {_way_of_compiling()}"
    return NvrtcCompiler(f"NVRTC {number}", version, identity, found.architectures, library)


def _way_of_compiling() -> str:
    """Digest of what this package gives to NVRTC besides flags and sources."""
    digest = hashlib.sha256(Path(nvrtc.__file__).read_bytes())
    for name, text in nvrtc.standard_headers().items():
        digest.update(f"\n{name} {len(text)}\n{text}".encode())
    return digest.hexdigest()[:16]


def find_nvcc_compiler(
    environ: Mapping[str, str] = os.environ, toolkit: Path = DEFAULT_CUDA_HOME
) -> NvccCompiler:
    """The nvcc of this machine. Raises BuildError if it cannot be used, or there is none."""
    toolchain = find_toolchain((), environ, toolkit)
    return NvccCompiler(
        name=f"nvcc {toolchain.release}",
        version=toolchain.version,
        identity=toolchain.identity,
        architectures=toolchain.architectures,
        nvcc=toolchain.nvcc,
    )


def _libraries(environ: Mapping[str, str], places: Places) -> Iterator[Path]:
    """Libraries of NVRTC, the best first; some more than once."""
    with contextlib.suppress(OSError):  # a system without /proc
        for line in places.maps.read_text().splitlines():
            _, root, path = line.partition("/")
            yield from _nvrtc_at(Path(root + path))
    wheels = [
        library
        for packages in places.packages
        for library in _nvrtc_in(packages.glob("nvidia/*/lib"))
    ]
    wheels.sort(key=_major, reverse=True)
    cuda = _torch_cuda(places)
    yield from (library for library in wheels if _major(library) == cuda)
    yield from _nvrtc_in(packages / "torch" / "lib" for packages in places.packages)
    yield from wheels
    homes = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    if on_path := shutil.which("nvcc", path=environ.get("PATH", "")):
        homes.append(Path(on_path).resolve().parents[1])
    for home in (*homes, places.toolkit):
        yield from _nvrtc_in([home / "lib64", home / "lib", *home.glob("targets/*/lib")])


def _nvrtc_in(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc*"), reverse=True):
            yield from _nvrtc_at(path)


def _nvrtc_at(path: Path) -> Iterator[Path]:
    if _NVRTC_NAME.fullmatch(path.name) and path.is_file():
        yield path


def _major(library: Path) -> int:
    """Major version of CUDA in a library's name; 0 without one."""
    match = _NVRTC_NAME.fullmatch(library.name)
    return int((match and match[1]) or 0)


def _torch_cuda(places: Places) -> int | None:
    """Major version of the CUDA that PyTorch is built for; None without PyTorch, or for its build
    without CUDA."""
    for packages in places.packages:
        with contextlib.suppress(OSError):
            text = (packages / "torch" / "version.py").read_text()
            match = _TORCH_CUDA.search(text)
            return int(match[1]) if match else None
    return None
