"""Digests of machine code, which tell whether the sources still make the code that was measured."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable
from pathlib import Path

from flash_helpers.compile.jit import default_jit
from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import Config, config_from_short_form, find_config
from flash_helpers.measure.baseline import BASELINE, load_baseline
from flash_helpers.measure.compilers import equal_codes
from flash_helpers.measure.machine_code import code_digest
from flash_helpers.measure.origins import origins
from flash_helpers.measure.results import BenchmarkResults
from flash_helpers.runtime import library
from flash_helpers.sass.read.containers import cubins_of, read_cubins
from flash_helpers.sass.read.elf import read_sections
from flash_helpers.sass.read.records import SassWarning

DAGGER = "†"


def cubin_code(*paths: Path) -> str:
    """Return the digest of the one config that cubins were compiled for. Raises OSError, and
    SassError for a file of another kind."""
    sections = [s for path in paths for s in read_sections(path.read_bytes(), str(path))]
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


def codes_today(configs: Iterable[Config], compute_capability: str) -> dict[Config, str]:
    """Return what `codes_of` does. A config of one kernel that is made from the same as the
    recorded one (BASELINE) has the recorded digest and is not compiled.

    Raises BuildError if a kernel does not compile, and SassError if the record cannot be read.
    """
    path = default_jit().root / BASELINE
    recorded = load_baseline(path).by_origin if path.is_file() else {}
    architecture = f"sm_{compute_capability.replace('.', '')}"
    wanted = [*configs]
    found = {}
    for config in wanted:
        with contextlib.suppress(ValueError):  # not made for it
            made_from = origins([config], architecture)[config]
            if len(own := recorded.get(made_from, [])) == 1:
                found[config] = own[0][1].code
    return found | codes_of((c for c in wanted if c not in found), compute_capability)


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
    with_code = [measurement for measurement in results.measurements if measurement.code]
    listed = set(library.kernels()) if with_code else set()
    known = []
    for measurement in with_code:
        with contextlib.suppress(ValueError):  # a step that no longer exists
            if (config := config_from_short_form(measurement.ran)) in listed:
                known.append((measurement, config))
    if not known:
        return frozenset()
    today = codes_today({config for _, config in known}, results.provenance.compute_capability)
    equal = equal_codes(default_jit().root)
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
