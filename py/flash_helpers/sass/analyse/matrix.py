"""The progression in its machine code: which kernels to compare, and what each takes, executes and
could reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from flash_helpers.kernel_configs import Config, find_config
from flash_helpers.measure.results import BenchmarkResults, Measurement
from flash_helpers.registry.selection import names_of
from flash_helpers.sass.analyse.bound import (
    Bound,
    Prediction,
    loop_bound,
    measured_launch,
    predict,
)
from flash_helpers.sass.analyse.counts import Counts
from flash_helpers.sass.analyse.occupancy import Occupancy, config_occupancy
from flash_helpers.sass.analyse.phases import NotDeterminedError, PhaseCounts, count_phases, phases
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.reader import installed_library, list_kernels
from flash_helpers.sass.read.records import Kernel, SassError

# The classes of opcodes, in the groups that a table or a picture has room for.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tensor": (opcodes.TENSOR,),
        "ldmatrix": (opcodes.LDMATRIX,),
        "memory": (
            opcodes.ASYNC_COPY,
            opcodes.BULK_COPY,
            opcodes.SHARED_LOAD,
            opcodes.SHARED_STORE,
            opcodes.GLOBAL_LOAD,
            opcodes.GLOBAL_STORE,
            opcodes.LOCAL_LOAD,
            opcodes.LOCAL_STORE,
            opcodes.ATOMIC,
            opcodes.TEXTURE,
        ),
        "fp32": (opcodes.FP32, opcodes.FP32_MINMAX, opcodes.FP16, opcodes.FP64),
        "special": (opcodes.MUFU, opcodes.CONVERSION),
        "integer": (
            opcodes.INTEGER_ADD,
            opcodes.INTEGER_OTHER,
            opcodes.IMAD,
            opcodes.IMAD_WIDE,
            opcodes.IMAD_SHIFT,
            opcodes.IMAD_ADD,
            opcodes.LOGIC,
            opcodes.SHIFT,
            opcodes.LEA,
        ),
        "move": (opcodes.MOVE, opcodes.IMAD_MOVE, opcodes.PERMUTE),
        "uniform": (opcodes.UNIFORM,),
    }
)
OTHER = "other"
GROUP_NAMES = (*GROUPS, OTHER)
MEANING = (
    "memory: copies, shared, global and local accesses; fp32: minima too; special: MUFU and "
    "conversions; integer: IMAD too; move: IMAD as move and selects too; other: shuffles, "
    "predicates, barriers, branches, constants"
)

_MOST_CHANGES = 6


@dataclass(frozen=True)
class KernelFacts:
    """What the matrix tells of one kernel.

    phases: its text counted. loop: the bound of the main loop; None in a kernel without loops.
    prediction, measurement: of the launch that was timed; None where none was, on this
        architecture, or where the text does not tell what is executed.
    """

    config: Config
    kernel: Kernel
    phases: PhaseCounts
    occupancy: Occupancy
    loop: Bound | None
    prediction: Prediction | None
    measurement: Measurement | None

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.kernel.resources.static_smem_bytes + self.config.smem_bytes

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Instructions of the main loop by the names of GROUPS, and OTHER; filler left out."""
        counts = self.phases.main_loop
        if counts is None:
            return dict.fromkeys(GROUP_NAMES, 0)
        found = {
            name: sum(counts.by_class.get(c, 0) for c in classes)
            for name, classes in GROUPS.items()
        }
        return {**found, OTHER: counts.work - sum(found.values())}

    def per_hmma(self, number: float) -> float | None:
        """A number of the main loop for each of its tensor-core instructions; None without any."""
        counts = self.phases.main_loop
        return counts.per_tensor(number) if counts else None

    @property
    def bound_cycles(self) -> Mapping[str, float] | None:
        """Lower bounds of an iteration of all resident warps, as `Bound.cycles` gives them."""
        return self.loop.cycles(self.occupancy.warps) if self.loop else None

    @property
    def of_bound(self) -> float | None:
        """The least time that the launch could take over the time that it took."""
        if self.prediction is None or self.measurement is None:
            return None
        return self.prediction.least_ms / self.measurement.median_ms


def library_configs(architecture: str) -> list[Config]:
    """The configs that the installed library holds for an architecture such as "sm_90", sorted.

    Raises SassError as `reader.list_kernels` does, and if there are none.
    """
    path = installed_library()
    symbols = [symbol for _, symbol in list_kernels(path, architecture)]
    # it may hold kernels of another kind, too
    found = [config for config in map(find_config, symbols) if config is not None]
    if not found:
        raise SassError(f"{path} holds no forward kernel for {architecture}: build it again")
    return sorted(found)


def kernel_facts(
    config: Config,
    kernel: Kernel,
    results: BenchmarkResults | None,
    seq_len: int,
) -> KernelFacts:
    """Everything that the matrix tells of a kernel.

    results: of a benchmark; those of another architecture than the kernel's are left aside.
    seq_len: of the launch whose time is told.

    Raises SassError for an architecture whose limits are not known.
    """
    loop = phases(kernel).main_loop
    prediction = measurement = None
    if results is not None and _measured_on(results) == kernel.capability:
        measurement = results.find(config.short_form(), config.dtype.short, seq_len)
        timed = measured_launch(results, config, seq_len)
        if timed is not None:
            try:
                prediction = predict(kernel, config, timed[0])
            except NotDeterminedError:
                prediction = None
    return KernelFacts(
        config=config,
        kernel=kernel,
        phases=count_phases(kernel),
        occupancy=config_occupancy(kernel, config),
        loop=loop_bound(kernel, loop) if loop else None,
        prediction=prediction,
        measurement=measurement,
    )


def _measured_on(results: BenchmarkResults) -> int | None:
    digits = results.provenance.compute_capability.replace(".", "")
    return int(digits) if digits.isdigit() else None


@dataclass(frozen=True)
class Matrix:
    """Kernels to compare, each with the one before it. seq_len: of the measured launches.

    measured_on: the GPU, clock and date of the measurements; empty without any.
    """

    rows: tuple[KernelFacts, ...]
    seq_len: int
    measured_on: str

    @cached_property
    def names(self) -> list[str]:
        """A short name for each kernel."""
        names = names_of([facts.config for facts in self.rows])
        architectures = [facts.kernel.architecture for facts in self.rows]
        if len(set(architectures)) == 1:
            return names
        return [f"{name} {there}" for name, there in zip(names, architectures, strict=True)]


def build_matrix(
    kernels: Iterable[tuple[Config, Kernel]],
    results: BenchmarkResults | None,
    seq_len: int,
) -> Matrix:
    """The matrix of some kernels, in their order. Raises as `kernel_facts` does."""
    rows = tuple(kernel_facts(config, kernel, results, seq_len) for config, kernel in kernels)
    measured_on = ""
    if results is not None and any(facts.measurement for facts in rows):
        found = results.provenance
        measured_on = f"{found.gpu}, {found.date}, CUDA {found.cuda}, commit {found.commit}"
    return Matrix(rows, seq_len, measured_on)


def opcode_changes(before: KernelFacts, after: KernelFacts) -> list[tuple[str, float]]:
    """Opcodes of the main loop whose number changed, the largest change first.

    Differences of numbers where both loops have as many tensor instructions; else of numbers per
    tensor instruction.
    """
    counts = [facts.phases.main_loop for facts in (before, after)]
    if counts[0] is None or counts[1] is None:
        return []
    scales = (
        (1, 1) if counts[0].tensor == counts[1].tensor else (counts[0].tensor, counts[1].tensor)
    )
    if 0 in scales:
        return []
    found = {
        opcode: _scaled(counts[1], opcode, scales[1]) - _scaled(counts[0], opcode, scales[0])
        for opcode in {*counts[0].by_opcode, *counts[1].by_opcode}
    }
    return sorted(
        ((opcode, change) for opcode, change in found.items() if change),
        key=lambda item: (-abs(item[1]), item[0]),
    )


def _scaled(counts: Counts, opcode: str, scale: int) -> float:
    number = counts.by_opcode.get(opcode, 0)
    return number if scale == 1 else number / scale


def changes_text(changes: Sequence[tuple[str, float]], most: int = _MOST_CHANGES) -> str:
    """The largest changes in one line."""
    if not changes:
        return "none"
    parts = [
        f"{opcode} {change:+d}" if isinstance(change, int) else f"{opcode} {change:+.2f}/HMMA"
        for opcode, change in changes[:most]
    ]
    more = f", {len(changes) - most} more" if len(changes) > most else ""
    return ", ".join(parts) + more
