"""Digests of machine code, which tell whether the library still holds the code that was
measured."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from flash_helpers.kernel_configs import Config, config_from_short_form, find_config
from flash_helpers.measure.results import BenchmarkResults, Measurement
from flash_helpers.runtime import library
from flash_helpers.sass.read.containers import cubins_of, read_cubins
from flash_helpers.sass.read.elf import read_sections
from flash_helpers.sass.read.records import SassError, SassWarning

DIGITS = 16
DAGGER = "†"
_NONE: Mapping[Config, str] = MappingProxyType({})


def code_digest(kernels: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of a config's machine code. kernels: symbols and their .text sections."""
    digest = hashlib.sha256()
    for _, code in sorted(kernels):
        digest.update(code)
    return digest.hexdigest()[:DIGITS]


def cubin_code(path: Path) -> str:
    """Return the digest of the one config that a cubin was compiled for. Raises OSError, and
    SassError for a file of another kind."""
    sections = read_sections(path.read_bytes(), str(path))
    return code_digest((s.name, s.data) for s in sections if s.name.startswith(".text."))


def file_codes(path: Path, capability: int) -> dict[Config, str]:
    """Return the digest of each config of this repository in a library or cubin.

    capability: of the GPU, such as 90. The result is empty for a file without machine code for that
    GPU, since the code that a driver compiles from PTX is not known. Raises SassError as
    `containers.cubins_of` does.
    """
    found: dict[Config, list[tuple[str, bytes]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SassWarning)
        for member, cubin in read_cubins(cubins_of(path, capability)):
            for kernel in cubin.kernels if member.capability == capability else ():
                if not kernel.is_function and (config := find_config(kernel.symbol)) is not None:
                    found.setdefault(config, []).append((kernel.symbol, kernel.code))
    return {config: code_digest(kernels) for config, kernels in found.items()}


def library_codes(compute_capability: str) -> Mapping[Config, str]:
    """Return the digests of the installed library's configs for a compute capability, such as
    "9.0"; none if the library is not installed or holds no machine code for it."""
    digits = compute_capability.replace(".", "")
    try:
        path = library.library_path()
    except RuntimeError:
        return _NONE
    return _codes(path, path.stat().st_mtime_ns, int(digits)) if digits.isdecimal() else _NONE


@functools.lru_cache(maxsize=8)
def _codes(path: Path, _written_ns: int, capability: int) -> Mapping[Config, str]:
    try:
        return MappingProxyType(file_codes(path, capability))
    except SassError:
        return _NONE


def has_changed(measurement: Measurement, today: Mapping[Config, str]) -> bool:
    """Whether a measurement's code is known and differs from the code in the library today. A
    config that the library does not hold is not compared."""
    if not measurement.code:
        return False
    try:
        config = config_from_short_form(measurement.ran)
    except ValueError:  # the step no longer exists
        return False
    return today.get(config, measurement.code) != measurement.code


def changed_names(results: BenchmarkResults) -> frozenset[str]:
    """Return the names of the contenders whose code has changed since they were measured.

    The library is read only if a result has a digest.
    """
    known = [m for m in results.measurements if m.code]
    if not known:
        return frozenset()
    today = library_codes(results.provenance.compute_capability)
    return frozenset(m.name for m in known if has_changed(m, today))


def changed_line(results: BenchmarkResults) -> str:
    """Return a line that names the kernels to measure again; "" if no code has changed."""
    names = ", ".join(sorted(changed_names(results)))
    if not names:
        return ""
    return (
        f"the machine code has changed since {results.provenance.command!r} measured it on "
        f"{results.provenance.gpu}: measure {names} again"
    )
