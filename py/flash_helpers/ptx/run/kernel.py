"""Launching the kernels of a module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TextIO

import numpy as np

from flash_helpers import gpu
from flash_helpers.ptx.errors import Lint, PtxSyntaxError, SimulatorError, UnsupportedInstruction
from flash_helpers.ptx.read.flow import Program, build_program
from flash_helpers.ptx.read.module import (
    Function,
    Immediate,
    Module,
    Special,
    Symbol,
    Variable,
    named_by,
)
from flash_helpers.ptx.read.registers import Unset, unset_registers
from flash_helpers.ptx.read.types import TYPE_NAMES, size_of
from flash_helpers.ptx.run.asynchronous.mbarriers import MBARRIER_BYTES
from flash_helpers.ptx.run.asynchronous.register_pool import entry_registers
from flash_helpers.ptx.run.batches import most_resident, run_batches
from flash_helpers.ptx.run.count.counters import Counters, LineCounts
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.execute.bound import BoundProgram
from flash_helpers.ptx.run.execute.observe import Observer
from flash_helpers.ptx.run.execute.scheduler import Scheduler
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.instructions.access import STRONG, access_size, space_of
from flash_helpers.ptx.run.layout import WORD, Argument, aligned, pack, placed
from flash_helpers.ptx.run.limits import Three, check_block, check_memory, cluster_of, count, three
from flash_helpers.ptx.run.machine import Launch, Machine
from flash_helpers.ptx.run.memory.regions import WINDOWS, DeviceMemory
from flash_helpers.ptx.run.variables import place_variables, reachable
from flash_helpers.ptx.run.watch.faults import FaultLog

Progress = Callable[[int, int], None]

_BATCH_LANES = 2048
"""Approximate number of lanes that run together: enough to hide the cost of a NumPy call, few
enough to stay in cache."""

_WORKSPACE_BYTES = 256

MOST_OF_KIND = 10
"""Faults of one kind that `Run.report` prints."""

DEFAULT_MAX_INSTRUCTIONS = 20_000_000


@dataclass(frozen=True)
class Run:
    """A finished launch. `n_blocks`: number of blocks that have run. `faults`: faults that
    `keep_going` collected. `lints`: suspicious operations, if they were asked for. There is one
    fault or lint per instruction and kind."""

    kernel: str
    n_blocks: int
    counters: Counters
    faults: tuple[SimulatorError, ...]
    lints: tuple[Lint, ...] = ()

    def __repr__(self) -> str:
        total = self.counters.total
        counts = {
            "blocks": self.n_blocks,
            "warp instructions": total.instructions,
            "mma": total.mma,
            "bank conflicts": total.bank_conflicts,
            "faults": len(self.faults),
        }
        told = ", ".join(f"{name} {n:,}" for name, n in counts.items())
        return f"<Run of {self.kernel}: {told}>"

    @cached_property
    def by_line(self) -> list[LineCounts]:
        """Counts by line of CUDA source (innermost line of inlined code)."""
        return self.counters.by_line()

    def report(self) -> str:
        """The collected faults and lints as text; of each kind, those after the first MOST_OF_KIND
        are only counted."""
        by_kind: dict[str, list[SimulatorError]] = {}
        for found in (*self.faults, *self.lints):
            by_kind.setdefault(found.title, []).append(found)
        told: list[str] = []
        for title, some in by_kind.items():
            told += map(str, some[:MOST_OF_KIND])
            if left := some[MOST_OF_KIND:]:
                n = sum(len(found.ptx_lines) for found in left)
                told.append(f"{title}: … {len(left)} more, on {n} lines of PTX")
        return "\n".join(told)


@dataclass(frozen=True)
class Kernel:
    """One entry of a module. `function`: its function, with all calls replaced.

    Raises PtxSyntaxError if a variable that it names cannot be read.
    """

    module: Module
    function: Function

    def __post_init__(self) -> None:
        _ = self.variables  # said now rather than when it is launched

    @property
    def name(self) -> str:
        """The entry's name, as mangled."""
        return self.function.name

    @cached_property
    def program(self) -> Program:
        """Its instructions in the order in which the simulator runs them."""
        return build_program(self.function)

    @cached_property
    def _unset(self) -> Unset:
        """Registers that it may read before it has written them."""
        return unset_registers(self.program)

    @cached_property
    def _named(self) -> tuple[set[str], set[str]]:
        """Symbols and special registers that the instructions name."""
        named = named_by(self.function.instructions)
        symbols = {o.name for o in named if isinstance(o, Symbol)}
        return symbols, {o.name for o in named if isinstance(o, Special)}

    @cached_property
    def variables(self) -> list[Variable]:
        """The function's own variables, and those of the module that it names or whose address is
        in an initial value of one of these."""
        functions, own = self.module.functions, self.function.variables
        local = {v.name for v in own}
        initial = (a.symbol.name for v in own for a in v.addresses)
        found = reachable(self.module, (*self._named[0], *initial))
        for variable in (*found.values(), *own):
            for name in (a.symbol.name for a in variable.addresses):
                if name not in found and name not in functions and name not in local:
                    raise PtxSyntaxError(
                        f"the initial value of {variable.name} names {name}, which is not defined",
                        variable.line,
                    )
        return [*found.values(), *own]

    @property
    def static_shared_bytes(self) -> int:
        """Bytes of shared memory per block, without dynamic ones."""
        return self._shared_layout[1]

    @property
    def synchronises_grid(self) -> bool:
        """Whether it reads %envreg1 or 2, as cooperative groups do to synchronise a grid."""
        return not self._named[1].isdisjoint(("%envreg1", "%envreg2"))

    @cached_property
    def _shared_layout(self) -> tuple[dict[str, int], int]:
        """Offsets of shared variables, and the size of those whose size is known."""
        shared = [v for v in self.variables if v.space == "shared"]
        dynamic = [v for v in shared if v.external and v.size == 0]
        offsets, end = placed([v for v in shared if v not in dynamic])
        if dynamic:
            end = aligned(end, max(v.alignment for v in dynamic))
            offsets.update((v.name, end) for v in dynamic)
        return offsets, end

    def launch(
        self,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        shared_bytes: int = 0,
        args: Sequence[Argument] = (),
        memory: DeviceMemory | None = None,
        *,
        variables: dict[str, int] | None = None,
        cluster: Sequence[int] | int | None = None,
        programmatic: bool = False,
        keep_going: bool = False,
        strict_barriers: bool = False,
        strict_wgmma: bool = False,
        lints: bool = False,
        registers: int | None = None,
        max_instructions: int = DEFAULT_MAX_INSTRUCTIONS,
        progress: Progress | None = None,
        observer: Observer | None = None,
        target: str | None = None,
        before: Run | None = None,
        output: TextIO | None = None,
        seed: int | None = None,
    ) -> Run:
        """Runs the kernel; returns the counts, and the faults if they were collected.

        `grid`: blocks in x, y and z. `block`: threads per block in x, y and z. `shared_bytes`:
        dynamic shared memory per block. `args`: one value per parameter: a number of Python or
        NumPy, a TensorMap, or bytes for another structure passed by value. `memory`: the global
        memory to which pointers among them refer. `variables`: addresses in it of the module's
        variables of global and constant memory, which keep their values from launch to launch; the
        launch adds those that it lacks. None gives the launch variables of its own. `cluster`:
        blocks per cluster in x, y and z, which divide those of the grid. None takes the clusters
        that the kernel is compiled for (`__cluster_dims__`), if any. Clusters of more than 8 blocks
        are run too, though a GPU needs cudaFuncAttributeNonPortableClusterSizeAllowed for them.
        `programmatic`: the launch has cudaLaunchAttributeProgrammaticStreamSerialization, so global
        memory must not be touched before griddepcontrol.wait.
        `registers`: registers per thread when the kernel begins, as ptxas reports them, for
        setmaxnreg; None takes the number from its directives (`register_pool.entry_registers`).
        `target`: compute capability whose limits the launch must keep, such as sm_90a; None takes
        the module's own.

        `keep_going`: collect faults in `Run.faults` instead of raising the first one. `lints`:
        collect legal but suspicious operations in `Run.lints` (`errors.Lint`). `strict_barriers`: a
        barrier for the whole block is a fault if a thread has ended before it; without it such a
        barrier waits for the other threads only, as from compute capability 7.0 on. `strict_wgmma`:
        a wgmma.wait_group waits for its own warp's part of the products alone, not for that of the
        warpgroup. `seed`: makes bulk copies and products of wgmma complete at random times, and
        mbarrier.try_wait give up at random; without it they complete as late as possible.
        `max_instructions`: a warp that runs more raises InstructionLimitError.

        `progress`: called with the number of blocks done and the number of blocks. `observer`: sees
        registers and shared memory while the kernel runs. `before`: a run of this kernel whose
        counts and faults this run continues; it cannot be used again. `output`: stream of the
        kernel's printf, by default standard output.

        A kernel that synchronises its grid (it reads %envreg1 and 2, as cooperative groups do) is
        launched cooperatively: all of its blocks are resident together.

        Raises LaunchError for an impossible launch, before anything has run. Raises
        UnsupportedInstruction as soon as a thread reaches an unknown instruction; earlier writes
        stay in memory. Raises SimulatorError for a fault of the kernel, unless keep_going.
        """
        memory = DeviceMemory() if memory is None else memory
        launch = self._launch(
            three(grid, "grid"),
            three(block, "block"),
            count(shared_bytes, "shared_bytes"),
            cluster,
            args,
            memory,
            {} if variables is None else variables,
            self.module.target if target is None else target,
        )
        launch = replace(
            launch,
            output=output,
            programmatic=programmatic,
            seed=seed,
            strict_wgmma=strict_wgmma,
            lints=lints,
            registers=entry_registers(self.function) if registers is None else registers,
        )
        log, tally = FaultLog(self.program, keep_going), Tally(self.program)
        if before is not None:
            tally = before.counters.tally
            log.go_on_with(before.faults, before.lints)
        threads = math.prod(launch.block)
        cluster_size = math.prod(launch.cluster or ())

        def begin(some: Sequence[Three]) -> Scheduler:
            geometry = Geometry(tuple(some), threads, cluster_size)
            machine = Machine(self.program, launch, geometry, memory, log, tally)
            return Scheduler(machine, max_instructions, observer, strict_barriers=strict_barriers)

        n_blocks = _run_blocks(launch, memory, begin, progress) + (before.n_blocks if before else 0)
        found = (tuple(log.faults.values()), tuple(log.lints.values()))
        return Run(self.name, n_blocks, Counters(tally), *found)

    def refusals(self) -> tuple[UnsupportedInstruction, ...]:
        """Instructions that the simulator does not know, in the order of the text: a launch is
        refused when a thread reaches one. Nothing runs.

        Raises LaunchError for a kernel that no GPU of its target takes.
        """
        directives = self.function.directives
        cluster = three(directives.get("reqnctapercluster", (1,)), "reqnctapercluster")
        given = cluster if "explicitcluster" in directives else None
        bound = directives.get("maxntid") or directives.get("reqntid") or (gpu.WARP,)
        args = [bytes(parameter.size) for parameter in self.function.parameters]
        memory, block = DeviceMemory(), three(bound, "block")
        try:
            program = self.program
        except UnsupportedInstruction as refusal:
            return (refusal,)
        launch = self._launch(cluster, block, 0, given, args, memory, {}, self.module.target)
        blocks = tuple(_by_cluster(cluster, cluster))
        geometry = Geometry(blocks, math.prod(block), math.prod(launch.cluster or ()))
        log, tally = FaultLog(program, keep_going=True), Tally(program)
        machine = Machine(program, launch, geometry, memory, log, tally)
        BoundProgram(machine, observer=None).enter_all()
        return tuple(machine.refused[position] for position in sorted(machine.refused))

    def _launch(
        self,
        grid: Three,
        block: Three,
        shared_bytes: int,
        cluster: Sequence[int] | int | None,
        args: Sequence[Argument],
        memory: DeviceMemory,
        placed_before: dict[str, int],
        target: str,
    ) -> Launch:
        """A launch that a GPU would take, with its arguments and variables in memory."""
        shared, static = self._shared_layout
        check_block(self.function, grid, block, target)
        check_memory(self.variables, static, shared_bytes, target)
        cluster3 = cluster_of(self.function, cluster, grid, target)
        parameters, offsets = pack(self.function, args)
        local, local_bytes = placed([v for v in self.variables if v.space == "local"])
        symbols = {**offsets, **shared, **local}
        symbols |= place_variables(self.module, self.variables, memory, placed_before, symbols)
        granule, has_flags = self._shared_accesses
        specials = self._named[1]
        asks_scratch = any(name.startswith("%reserved_smem") for name in specials)
        return Launch(
            grid=grid,
            block=block,
            cluster=cluster3,
            shared_bytes=static + shared_bytes,
            dynamic_bytes=shared_bytes,
            parameters=parameters,
            symbols=symbols,
            windows={
                **dict.fromkeys(offsets, WINDOWS["param"]),
                **dict.fromkeys(shared, WINDOWS["shared"]),
                **dict.fromkeys(local, WINDOWS["local"]),
            },
            local_bytes=aligned(local_bytes, WORD),
            granule=granule,
            has_flags=has_flags,
            target=target,
            written_for=self.module.target,
            scratch=aligned(static + shared_bytes, 128) if asks_scratch else None,
            unset=self._unset,
            workspace=memory.allocate(_WORKSPACE_BYTES) if self.synchronises_grid else 0,
        )

    @cached_property
    def _shared_accesses(self) -> tuple[int, bool]:
        """Bytes of the narrowest access that may be to shared memory, and whether any such access
        is strong."""
        narrowest, strong = 16, False
        for instruction in self.function.instructions:
            name = instruction.name
            if name in ("ld", "st", "atom", "red") and space_of(instruction) in (
                "shared",
                "generic",
            ):
                with suppress(UnsupportedInstruction):  # refused if it is reached
                    narrowest = min(narrowest, access_size(instruction))
                strong |= bool(instruction.first(STRONG)) or name in ("atom", "red")
            elif name == "barrier":
                # Fences before it order.
                strong |= instruction.has("cluster") and instruction.has("relaxed")
            elif name == "mbarrier":
                narrowest = min(narrowest, MBARRIER_BYTES)
            elif name == "wmma":
                # Elements of less than a byte move four bytes at a time.
                sizes = [size_of(t) for t in instruction.types if t in TYPE_NAMES]
                narrowest = min(narrowest, 4, *sizes)
            elif name == "cp" and len(instruction.operands) > 2:
                size = instruction.operands[2]
                if isinstance(size, Immediate) and size.integer in (4, 8):
                    narrowest = min(narrowest, size.integer)
        return narrowest, strong


def _by_cluster(grid: Three, cluster: Three) -> list[Three]:
    """`ctaid` of all blocks, those of a cluster in a row; x runs fastest, as in `%ctarank`."""
    counts = [n // c for n, c in zip(grid, cluster, strict=True)]
    firsts, inner = (itertools.product(*map(range, reversed(n))) for n in (counts, cluster))
    ranks = list(inner)
    x, y, z = cluster
    return [(i * x + di, j * y + dj, k * z + dk) for k, j, i in firsts for dk, dj, di in ranks]


def _run_blocks(
    launch: Launch,
    memory: DeviceMemory,
    begin: Callable[[Sequence[Three]], Scheduler],
    progress: Progress | None,
) -> int:
    """Runs all blocks of a launch; returns their number. `begin`: makes the runner of some
    blocks."""
    blocks = _by_cluster(launch.grid, launch.cluster or (1, 1, 1))
    threads, done = math.prod(launch.block), 0
    n_batches = max(1, round(len(blocks) * aligned(threads, gpu.WARP) / _BATCH_LANES))
    if launch.workspace:  # a grid that synchronises
        n_batches = 1

    def ended(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(blocks))

    with np.errstate(all="ignore"):
        run_batches(
            blocks,
            -(-len(blocks) // n_batches),
            most_resident(launch.target, threads, launch.shared_bytes),
            begin,
            memory,
            ended,
            math.prod(launch.cluster or ()),
        )
    return len(blocks)
