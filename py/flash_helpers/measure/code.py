"""Digests of machine code, which tell whether the sources still make the code that was measured."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Iterable
from pathlib import Path

from flash_helpers.compile.jit import default_jit
from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import Config, config_from_short_form, find_config
from flash_helpers.measure.compilers import equal_codes
from flash_helpers.measure.results import BenchmarkResults
from flash_helpers.runtime import library
from flash_helpers.sass.read.containers import cubins_of, read_cubins
from flash_helpers.sass.read.elf import read_sections
from flash_helpers.sass.read.records import SassWarning

DIGITS = 16
DAGGER = "†"


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


def codes_of(configs: Iterable[Config], compute_capability: str) -> dict[Config, str]:
    """Return the digest of each config's machine code for a compute capability, such as "9.0", as
    the sources are now. Configs that are not made for it are left out.

    Raises BuildError if a kernel does not compile.
    """
    architecture = f"sm_{compute_capability.replace('.', '')}"
    own = []
    for config in configs:
        with contextlib.suppress(ValueError):
            config.family.target_on(architecture)
            own.append(config)
    paths = library.code_paths(own, architecture) if own else {}
    found = {}
    for config in own:
        capability = capability_of(config.family.target_on(architecture))
        files = {paths[name] for name in config.kernels.values()}
        sections = [s for file in files for s in _sections(file, capability)[config]]
        found[config] = code_digest(sections)
    return found


@functools.cache
def _sections(path: Path, capability: int) -> dict[Config, list[tuple[str, bytes]]]:
    """Symbols and .text sections of each config of this repository in a file for a GPU.

    Raises SassError as `containers.cubins_of` does.
    """
    found: dict[Config, list[tuple[str, bytes]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SassWarning)
        for member, cubin in read_cubins(cubins_of(path, capability)):
            for kernel in cubin.kernels if member.capability == capability else ():
                if not kernel.is_function and (config := find_config(kernel.symbol)) is not None:
                    found.setdefault(config, []).append((kernel.symbol, kernel.code))
    return found


def changed_names(results: BenchmarkResults) -> frozenset[str]:
    """Return the names of the contenders whose code has changed since they were measured: those
    with a digest in the results whose listed config has another one now.

    Two compilers' codes of one kernel do not count as a change if they were measured to be equally
    fast (`compilers.equal_codes`).

    Nothing is compiled or read if no result has a digest.
    """
    listed = set(library.kernels())
    known = []
    for measurement in results.measurements:
        with contextlib.suppress(ValueError):  # a step that no longer exists
            if measurement.code and (config := config_from_short_form(measurement.ran)) in listed:
                known.append((measurement, config))
    today = codes_of({config for _, config in known}, results.provenance.compute_capability)
    equal = equal_codes(default_jit().root) if known else frozenset()
    codes = ((m, frozenset((m.code, today.get(config, m.code)))) for m, config in known)
    return frozenset(m.name for m, both in codes if len(both) > 1 and both not in equal)


def changed_line(results: BenchmarkResults) -> str:
    """Return a line that names the kernels to measure again; "" if no code has changed."""
    names = ", ".join(sorted(changed_names(results)))
    if not names:
        return ""
    return (
        f"the machine code has changed since {results.provenance.command!r} measured it on "
        f"{results.provenance.gpu}: measure {names} again"
    )
