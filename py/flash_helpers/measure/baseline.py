"""Resources of each kernel, kept in a file, so that a change for the worse is noticed."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from flash_helpers.console.files import write_if_different
from flash_helpers.console.progress import Progress
from flash_helpers.console.tables import Table
from flash_helpers.gpu import LIMITS
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.machine_code import all_kernels, code_digest
from flash_helpers.measure.origins import origins
from flash_helpers.sass.analyse.occupancy import kernel_occupancy
from flash_helpers.sass.analyse.phases import count_phases, main_loop
from flash_helpers.sass.analyse.products import Gaps, product_gaps
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Compiler, Kernel, SassError

FORMAT = 2
BASELINE = "benchmarks/resources.json"  # of this repository


@dataclass(frozen=True)
class KernelFigures:
    """One kernel compiled for one architecture.

    kernel: its name, the short form of its config. architecture: such as "sm_90".
    registers, stack_bytes and the spilled bytes: per thread; None as in `Resources`.
    smem_bytes: static and dynamic, per thread block. blocks_per_sm: thread blocks resident at a
    time; None for an architecture whose limits are not known.
    loop_instructions: instructions in the text of the main loop that are executed or predicated.
    loop_hmma: the tensor instructions among them. Both are 0 in a kernel without a loop.
    between_hgmma, moves_between_hgmma: as in `product_gaps`, for the main loop; 0 without HGMMA.
    code: digest of the machine code. made_from: digest of all that the figures follow from
    (`measure.origins`).
    """

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    smem_bytes: int
    blocks_per_sm: int | None
    loop_instructions: int
    loop_hmma: int
    between_hgmma: int
    moves_between_hgmma: int
    code: str
    made_from: str

    @property
    def instructions_per_hmma(self) -> Fraction | None:
        """Instructions of the main loop per tensor instruction; exact."""
        return Fraction(self.loop_instructions, self.loop_hmma) if self.loop_hmma else None


@dataclass(frozen=True)
class Quantity:
    """A compared number. is_worse: whether a change from the first value to the second is for the
    worse; called only with values that differ and are not None."""

    label: str
    value: Callable[[KernelFigures], Any]
    is_worse: Callable[[Any, Any], bool]


def _always(before: Any, after: Any) -> bool:
    return True


QUANTITIES = (
    Quantity("registers", lambda f: f.registers, operator.lt),
    Quantity("spill stores, bytes", lambda f: f.spill_store_bytes, operator.lt),
    Quantity("spill loads, bytes", lambda f: f.spill_load_bytes, operator.lt),
    Quantity("stack, bytes", lambda f: f.stack_bytes, operator.lt),
    Quantity("shared memory, bytes", lambda f: f.smem_bytes, operator.lt),
    Quantity("blocks per SM", lambda f: f.blocks_per_sm, operator.gt),
    # The tile shape gives their number. With another number the compiler unrolled or cut the loop.
    Quantity("HMMA in the loop", lambda f: f.loop_hmma, _always),
    Quantity("instructions per HMMA", lambda f: f.instructions_per_hmma, operator.lt),
    Quantity("instructions between HGMMA", lambda f: f.between_hgmma, operator.lt),
    Quantity("R2UR between HGMMA", lambda f: f.moves_between_hgmma, operator.lt),
)


@dataclass(frozen=True)
class Baseline:
    """Figures of the kernels, by compiler and by (kernel, architecture)."""

    figures: dict[Compiler, dict[tuple[str, str], KernelFigures]] = field(default_factory=dict)

    def of(self, compiler: Compiler) -> dict[tuple[str, str], KernelFigures]:
        """Figures of one compiler's kernels; empty if the compiler is not known or the baseline
        lacks it."""
        return self.figures.get(compiler, {}) if compiler.name else {}

    @cached_property
    def by_origin(self) -> dict[str, list[tuple[Compiler, KernelFigures]]]:
        """The compiler and figures of each config's kernels, by what they follow from."""
        found: dict[str, list[tuple[Compiler, KernelFigures]]] = {}
        for compiler, own in self.figures.items():
            for figures in own.values():
                found.setdefault(figures.made_from, []).append((compiler, figures))
        return found

    def nearest(self, compiler: Compiler) -> Compiler:
        """The baseline's latest compiler before this one, or else the first after it.

        Raises SassError if the baseline is empty.
        """
        if not self.figures:
            raise SassError("the baseline is empty: --update fills it")
        known = sorted(self.figures, key=lambda other: other.version)
        before = [other for other in known if other.version <= compiler.version]
        return before[-1] if before else known[0]

    def updated(self, compiler: Compiler, found: Sequence[KernelFigures]) -> Baseline:
        """A baseline in which `found` replaces the figures of one compiler for the architectures
        and steps in `found`.

        Raises SassError for an unknown compiler, since two unknown compilers may differ.
        """
        if not compiler.name:
            raise SassError(
                "the library does not name its compiler, as libraries built with CUDA 12.4 do "
                "not: build it with CUDA 13 or later"
            )
        read = _Read.of(found)
        kept = {key: figures for key, figures in self.of(compiler).items() if not read.covers(key)}
        return Baseline({**self.figures, compiler: {**kept, **by_kernel(found)}})

    def to_json(self) -> str:
        """Text for a file, in a fixed order; one line per kernel, so that a diff is readable."""
        compilers = []
        for compiler in sorted(self.figures, key=lambda other: (other.name, other.version)):
            head = json.dumps({"name": compiler.name, "version": compiler.version})
            ordered = sorted(
                self.figures[compiler].values(), key=lambda f: (natural(f.kernel), f.architecture)
            )
            rows = ",\n".join(f"      {json.dumps(asdict(figures))}" for figures in ordered)
            compilers.append(f'    {{"compiler": {head}, "kernels": [\n{rows}\n    ]}}')
        body = ",\n".join(compilers)
        return f'{{\n  "format": {FORMAT},\n  "compilers": [\n{body}\n  ]\n}}\n'

    def save(self, path: Path) -> None:
        """Write the file whole or not at all. Raises OSError."""
        write_if_different(path, self.to_json())


@dataclass(frozen=True)
class _Section:
    compiler: Compiler
    kernels: tuple[KernelFigures, ...]


@dataclass(frozen=True)
class _Document:
    format: int
    compilers: tuple[_Section, ...]


def load_baseline(path: Path) -> Baseline:
    """Read what `Baseline.save` wrote.

    Raises SassError if the file is absent, cannot be read, or holds something else.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
        if document.format != FORMAT:
            raise ValueError(f"format {document.format} is not {FORMAT}")
        return Baseline({s.compiler: by_kernel(s.kernels) for s in document.compilers})
    except FileNotFoundError as error:
        raise SassError(f"{path} is not there: --update makes a baseline") from error
    except (OSError, ValueError) as error:
        raise SassError(
            f"{path} holds no baseline ({type(error).__name__}: {error}): restore it, or remove it "
            "and make it anew with --update"
        ) from error


def by_kernel(found: Iterable[KernelFigures]) -> dict[tuple[str, str], KernelFigures]:
    """Records by kernel and architecture."""
    return {(figures.kernel, figures.architecture): figures for figures in found}


def natural(name: str) -> list[str | int]:
    """Sort key that puts v2 before v10."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]


def figures_of(kernel: Kernel, config: Config, function: str, made_from: str) -> KernelFigures:
    """Figures of a kernel, launched as its config says. function: its C++ function. made_from: as
    in `KernelFigures`."""
    loop, main = count_phases(kernel).main_loop, main_loop(kernel)
    gaps = product_gaps(kernel, main) if main else Gaps()
    resources = kernel.resources
    held = None
    n_threads, smem_bytes = config.block(function)
    if kernel.capability in LIMITS:
        held = kernel_occupancy(kernel, n_threads, smem_bytes)
    words = (i.encoding.to_bytes(INSTRUCTION_BYTES, "little") for i in kernel.instructions)
    return KernelFigures(
        kernel=config.kernels[function],
        architecture=kernel.architecture,
        registers=resources.registers,
        stack_bytes=resources.stack_bytes,
        spill_store_bytes=resources.spill_store_bytes,
        spill_load_bytes=resources.spill_load_bytes,
        smem_bytes=resources.static_smem_bytes + smem_bytes,
        blocks_per_sm=held.blocks if held else None,
        loop_instructions=loop.work if loop else 0,
        loop_hmma=loop.tensor if loop else 0,
        between_hgmma=gaps.instructions,
        moves_between_hgmma=gaps.moves,
        code=code_digest([(kernel.symbol, b"".join(words))]),
        made_from=made_from,
    )


@dataclass
class Reading:
    """Figures of kernels as they are now. A kernel that is made from the same as in the baseline
    has its figures from there; the others are compiled and read.

    figures: of all kernels, with their compilers. n_read: number of those that were read.
    """

    baseline: Baseline
    figures: list[tuple[Compiler, KernelFigures]] = field(default_factory=list)
    n_read: int = 0

    def add(
        self, architecture: str, configs: Iterable[Config], progress: Progress | None = None
    ) -> None:
        """Read kernels for an architecture. Raises SassError as `own_kernels` does."""
        try:
            made_from = origins(configs, architecture)
        except (RuntimeError, ValueError) as error:
            raise SassError(str(error)) from error
        known = self.baseline.by_origin
        self.figures += [f for digest in made_from.values() for f in known.get(digest, [])]
        others = [config for config, digest in made_from.items() if digest not in known]
        if others:
            kernels = all_kernels(architecture, others, progress=progress)
            found = [
                (replace(kernel.compiler, options=""), figures_of(kernel, c, name, made_from[c]))
                for c, own in kernels.items()
                for name, kernel in own.items()
            ]
            self.figures += found
            self.n_read += len(found)

    @property
    def compiler(self) -> Compiler:
        """The compiler of the kernels. Raises SassError if several made them."""
        compilers = {compiler for compiler, _ in self.figures}
        if len(compilers) != 1:
            names = ", ".join(sorted(map(str, compilers)))
            raise SassError(
                f"several compilers made the kernels ({names}): name those of one by --kernel, or "
                "build the library with the compiler's release that `python -m flash_attention` "
                "names"
            )
        return compilers.pop()


@dataclass(frozen=True)
class _Read:
    """Architectures and steps of kernels, according to their figures."""

    architectures: frozenset[str]
    steps: frozenset[str]

    @classmethod
    def of(cls, found: Sequence[KernelFigures]) -> _Read:
        return cls(
            frozenset(figures.architecture for figures in found),
            frozenset(_step(figures.kernel) for figures in found),
        )

    def covers(self, key: tuple[str, str]) -> bool:
        return key[1] in self.architectures and _step(key[0]) in self.steps

    def lacks(self, keys: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Architectures and steps in the keys that no kernel of the library has."""
        wanted = {architecture for _, architecture in keys} | {_step(kernel) for kernel, _ in keys}
        return tuple(sorted(wanted - self.architectures - self.steps, key=natural))


def _step(kernel: str) -> str:
    """Id of a kernel's step, the beginning of the kernel's short form."""
    return kernel.partition("_")[0]


@dataclass(frozen=True)
class Difference:
    """A quantity of one kernel that changed."""

    kernel: str
    architecture: str
    quantity: str
    before: Any
    after: Any
    is_worse: bool


@dataclass(frozen=True)
class Comparison:
    """A library beside a baseline.

    compared: number of kernels on both sides, counted for each architecture.
    differences: changes for the worse first.
    missing: kernels and architectures of the baseline that the library lacks, although it holds the
    architecture and other kernels of the step.
    new: kernels and architectures that the baseline lacks.
    left_out: architectures and steps of the baseline that were not read.
    """

    compared: int
    differences: tuple[Difference, ...]
    missing: tuple[tuple[str, str], ...]
    new: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    @property
    def worse(self) -> list[Difference]:
        """Differences for the worse."""
        return [difference for difference in self.differences if difference.is_worse]

    @property
    def better(self) -> list[Difference]:
        """Differences for the better."""
        return [difference for difference in self.differences if not difference.is_worse]

    @property
    def is_same(self) -> bool:
        """Whether both sides have the same kernels and figures."""
        return not (self.differences or self.missing or self.new)

    @property
    def passes(self) -> bool:
        """True if something was compared, nothing got worse and no kernel is missing."""
        return self.compared > 0 and not self.worse and not self.missing


def compare(
    before: Mapping[tuple[str, str], KernelFigures], after: Sequence[KernelFigures]
) -> Comparison:
    """Compare the figures for the architectures and steps of `after`."""
    found, read = by_kernel(after), _Read.of(after)
    differences = []
    for key in found.keys() & before.keys():
        for quantity in QUANTITIES:
            old, new = quantity.value(before[key]), quantity.value(found[key])
            if old != new and None not in (old, new):
                differences.append(
                    Difference(*key, quantity.label, old, new, quantity.is_worse(old, new))
                )
    return Comparison(
        compared=len(found.keys() & before.keys()),
        differences=tuple(sorted(differences, key=lambda d: (not d.is_worse, natural(d.kernel)))),
        missing=tuple(key for key in before if read.covers(key) and key not in found),
        new=tuple(key for key in found if key not in before),
        left_out=read.lacks(before),
    )


def comparison_text(comparison: Comparison) -> str:
    """Tables of changes for the worse and for the better, kernels that cannot be compared, and a
    summary."""
    parts = [
        f"{title}:\n{_table(differences)}"
        for title, differences in (("worse", comparison.worse), ("better", comparison.better))
        if differences
    ]
    parts += [
        f"{title}:\n{_list(keys)}"
        for title, keys in (
            ("missing from the library", comparison.missing),
            ("not in the baseline", comparison.new),
        )
        if keys
    ]
    changed = {(d.kernel, d.architecture) for d in comparison.differences}
    worse = {(d.kernel, d.architecture) for d in comparison.worse}
    n_same = comparison.compared - len(changed)
    parts.append(
        f"{comparison.compared} kernels compared: {len(worse)} worse, {len(changed - worse)} "
        f"better, {n_same} the same; {len(comparison.missing)} missing, {len(comparison.new)} new"
    )
    if comparison.left_out:
        parts[-1] += f"; of the baseline, {', '.join(comparison.left_out)} was not compared"
    return "\n\n".join(parts)


def _list(keys: Iterable[tuple[str, str]]) -> str:
    """A line for each kernel, with its architectures."""
    architectures: dict[str, list[str]] = {}
    for kernel, architecture in keys:
        architectures.setdefault(kernel, []).append(architecture)
    return "\n".join(
        f"  {kernel} {' '.join(sorted(architectures[kernel]))}"
        for kernel in sorted(architectures, key=natural)
    )


def _table(differences: Iterable[Difference]) -> str:
    rows = [
        [d.kernel, d.architecture, d.quantity, _shown(d.before), _shown(d.after), _delta(d)]
        for d in differences
    ]
    header = ["kernel", "arch", "quantity", "baseline", "now", "change"]
    return Table(header, rows, "lll").text()


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{float(value):.3f}" if isinstance(value, Fraction) else f"{value:,}"


def _delta(difference: Difference) -> str:
    before, after = difference.before, difference.after
    if before is None or after is None:
        return ""
    change = after - before
    return f"{float(change):+.3f}" if isinstance(change, Fraction) else f"{change:+,}"
