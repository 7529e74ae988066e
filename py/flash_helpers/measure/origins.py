"""Digests of all that a kernel's recorded figures follow from: as long as its digest is the
recorded one, the kernel need not be compiled and read again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from flash_helpers.compile.sources import digest
from flash_helpers.kernel_configs import Config
from flash_helpers.runtime import library
from flash_helpers.sass.read.disassembler import find_disassembler

PACKAGE = Path(__file__).resolve().parents[1]
READERS = ("sass/read", "sass/analyse", "measure/baseline.py", "gpu.py")


def origins(configs: Iterable[Config], architecture: str) -> dict[Config, str]:
    """Return, for each config, a digest of all that the figures of its kernels for an architecture
    follow from: sources, compiler and flags; its launch; nvdisasm, and the modules that read its
    output. Nothing is compiled.

    Raises ValueError for a config that is not made for the architecture, SassError without
    nvdisasm, BuildError without a compiler, RuntimeError if the package is not installed.
    """
    found = {}
    for config in configs:
        code = sorted(library.code_origins([config], architecture).items())
        launch = [config.block(function) for function in config.kernels]
        found[config] = digest(code, launch, _reader(PACKAGE))[:16]
    return found


@functools.cache
def _reader(package: Path) -> str:
    return digest(str(find_disassembler("nvdisasm")), readers_digest(package))


def readers_digest(package: Path) -> str:
    """Return a digest of the modules that read machine code. package: its folder."""
    found = hashlib.sha256()
    for path in _modules(package):
        text = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(text)}\n".encode() + text)
    return found.hexdigest()


def _modules(package: Path) -> Iterator[Path]:
    for name in READERS:
        place = package / name
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]
