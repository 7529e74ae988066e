"""Kernels side by side: resources, executed instructions and attainable speed of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flash_helpers.gpu import LIMITS
from flash_helpers.sass.analyse.bound import Bound, Launch, Measured, Prediction, loop_bound
from flash_helpers.sass.analyse.counts import count_all, count_changes
from flash_helpers.sass.analyse.occupancy import (
    Occupancy,
    kernel_occupancy,
    misfit,
    require_threads,
)
from flash_helpers.sass.analyse.phases import PhaseCounts, Unit, count_phases, main_loop
from flash_helpers.sass.analyse.roles import Role, roles
from flash_helpers.sass.analyse.shared_pipes import together
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.choice import KernelPath
from flash_helpers.sass.read.records import Kernel, Loop

# The classes of opcodes, in the groups that a table or a picture has room for.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "tensor": (opcodes.TENSOR,),
    "ldmatrix": (opcodes.LDMATRIX,),
    "memory": (
        opcodes.ASYNC_COPY, opcodes.BULK_COPY, opcodes.SHARED_LOAD, opcodes.SHARED_STORE,
        opcodes.GLOBAL_LOAD, opcodes.GLOBAL_STORE, opcodes.LOCAL_LOAD, opcodes.LOCAL_STORE,
        opcodes.ATOMIC, opcodes.TEXTURE,
    ),
    "fp32": (opcodes.FP32, opcodes.FP32_MINMAX, opcodes.FP16, opcodes.FP64),
    "special": (opcodes.MUFU, opcodes.CONVERSION),
    "integer": (
        opcodes.INTEGER_ADD, opcodes.INTEGER_OTHER, opcodes.IMAD, opcodes.IMAD_WIDE,
        opcodes.IMAD_SHIFT, opcodes.IMAD_ADD, opcodes.LOGIC, opcodes.SHIFT, opcodes.LEA,
    ),
    "move": (opcodes.MOVE, opcodes.IMAD_MOVE, opcodes.PERMUTE),
    "uniform": (opcodes.UNIFORM,),
}  # fmt: skip
OTHER = "other"
GROUP_NAMES = (*GROUPS, OTHER)
MEANING = (
    "memory: copies, shared, global and local accesses; fp32: minima too; special: MUFU and "
    "conversions; integer: IMAD too; move: IMAD as move and selects too; other: shuffles, "
    "predicates, barriers, branches, constants"
)

_MOST_CHANGES = 6


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """The facts of one kernel, beside others or alone.

    `name`: the full name. `is_usual`: whether a short name says the same. `identity`: other names
    of the kernel, by column of a table for machines. `note`: its distinctive feature, in one line.
    `where`: the file and the name by which it was asked for; None for a kernel of the installed
    library. `launch`: with None the most threads that it was compiled for, if it was for any.
    `unit`: the unit of work of its loops. `timed`: the timed launch in words. `prediction`,
    `measurement`: prediction and time of that launch; None if none was timed on this architecture,
    or if the text does not tell which instructions are executed.
    """

    kernel: Kernel
    name: str
    is_usual: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    where: KernelPath | None = None
    launch: Launch | None = None
    unit: Unit | None = None
    prediction: Prediction | None = None
    measurement: Measured | None = None
    timed: str = ""

    @cached_property
    def phases(self) -> PhaseCounts:
        """The text of the kernel, counted."""
        return count_phases(self.kernel)

    @cached_property
    def occupancy(self) -> Occupancy | None:
        """Blocks and warps that an SM holds; None if it is not known how the kernel is launched, or
        what an SM of its architecture holds.

        Raises SassError for an impossible launch.
        """
        launch, most = self.launch, self.kernel.resources.max_threads
        if launch is None and most is not None:
            launch = Launch(most)
        if launch is None:
            return None
        require_threads(self.kernel, launch.threads)
        if self.kernel.capability not in LIMITS:
            return None
        return kernel_occupancy(self.kernel, launch.threads, launch.dynamic_smem_bytes)

    @property
    def misfit(self) -> str:
        """The reason for which no SM has room for a block; "" if one has, or if it is unknown."""
        return misfit(self.kernel, self.launch.dynamic_smem_bytes) if self.launch else ""

    @property
    def resident_warps(self) -> int:
        """Warps per SM for which bounds are told; 1 if the occupancy is not known."""
        return self.occupancy.warps if self.occupancy and self.occupancy.warps else 1

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the warps of a block; empty if all run the same loops, or if the launch is
        unknown."""
        most = self.kernel.resources.max_threads
        threads = self.launch.threads if self.launch else most
        return () if threads is None else roles(self.kernel, threads)

    @cached_property
    def together(self) -> Mapping[str, float] | None:
        """Least cycles of an SM for one iteration of each role, as `shared_pipes.together` tells
        them."""
        return together(self.kernel, self.roles, self.resident_blocks)

    @property
    def resident_blocks(self) -> int:
        """Resident blocks per SM for which bounds are told; 1 if they are not known."""
        return max(self.occupancy.blocks, 1) if self.occupancy else 1

    def loop_warps(self, loop: Loop) -> int | None:
        """Warps per SM that run a loop: the warps of its roles in all resident blocks; None if it
        is not known which warps do."""
        running = [role for role in self.roles if loop.index in role.loops]
        if not running:
            return self.resident_warps
        if any(loop.index in role.unsure for role in running):
            return None
        return self.resident_blocks * sum(len(role.warps) for role in running)

    @property
    def smem_bytes(self) -> int:
        """Shared memory per block, static and dynamic."""
        dynamic = self.launch.dynamic_smem_bytes if self.launch else 0
        return self.kernel.resources.static_smem_bytes + dynamic

    @cached_property
    def loop(self) -> Bound | None:
        """The bound of the main loop; None in a kernel without loops."""
        loop = main_loop(self.kernel)
        return loop_bound(self.kernel, loop) if loop else None

    @cached_property
    def bound_cycles(self) -> Mapping[str, float] | None:
        """Lower bounds of an iteration of the main loop by all warps of an SM that run it, as
        `Bound.cycles` gives them; None, too, where the cost of a tensor instruction or the number
        of the warps is not known."""
        main, bound = main_loop(self.kernel), self.loop
        warps = None if main is None else self.loop_warps(main)
        if warps is None or bound is None or not bound.tells_tensor:
            return None
        return bound.cycles(warps)

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
        """A number of the main loop by `Counts.per_tensor`."""
        counts = self.phases.main_loop
        return counts.per_tensor(number) if counts else None

    @property
    def of_bound(self) -> float | None:
        """The least time that the launch could take over the time that it took."""
        if self.prediction is None or self.measurement is None:
            return None
        return self.prediction.least_ms / self.measurement.median_ms


@dataclass(frozen=True)
class Matrix:
    """Kernels to compare, each with the one before it.

    `short_names`: short names of the kernels, without their architectures. `timed`: the launch
    whose time is told, in words. `measured_on`: the GPU, clock and date of the measurements; empty
    without any.
    """

    rows: Sequence[KernelFacts]
    short_names: Sequence[str]
    timed: str = ""
    measured_on: str = ""

    @cached_property
    def names(self) -> list[str]:
        """A short name for each kernel, with its architecture where there are several."""
        architectures = [facts.kernel.architecture for facts in self.rows]
        if len(set(architectures)) == 1:
            return list(self.short_names)
        return [f"{n} {there}" for n, there in zip(self.short_names, architectures, strict=True)]

    @property
    def named(self) -> list[tuple[str, KernelFacts]]:
        """Each kernel with its name."""
        return list(zip(self.names, self.rows, strict=True))

    @property
    def changes(self) -> list[list[tuple[str, float]]]:
        """`opcode_changes` of each kernel but the first, against the one before it."""
        return [opcode_changes(*pair) for pair in itertools.pairwise(self.rows)]


def opcode_changes(before: KernelFacts, after: KernelFacts) -> list[tuple[str, float]]:
    """Opcodes of the main loop whose number changed, the largest change first; of the whole text if
    one of the two has no loop.

    The changes are differences of numbers. Where both kernels take tensor operations, but not
    equally many, they are differences of numbers by `Counts.per_tensor`.
    """
    old, new = before.phases.main_loop, after.phases.main_loop
    if old is None or new is None:
        old, new = (count_all(facts.kernel.instructions) for facts in (before, after))
    per_tensor = old.tensor_operations and new.tensor_operations
    if per_tensor and (old.tensor_operations, old.tensor) != (new.tensor_operations, new.tensor):
        found = count_changes(
            *({o: c.per_tensor(n) or 0 for o, n in c.by_opcode.items()} for c in (old, new))
        )
    else:
        found = count_changes(old.by_opcode, new.by_opcode)
    return [(opcode, number_after - number) for opcode, number, number_after in found]


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
