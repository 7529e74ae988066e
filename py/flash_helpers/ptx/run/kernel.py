"""Loading a module and launching its kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TextIO

import numpy as np

from flash_helpers import gpu
from flash_helpers.console.file_kinds import FileKind, mistaken
from flash_helpers.ptx.errors import LaunchError, NotPtxError, PtxSyntaxError, SimulatorError
from flash_helpers.ptx.read.calls import without_calls
from flash_helpers.ptx.read.flow import Program, build_program
from flash_helpers.ptx.read.module import Function, Immediate, Module, Symbol, Variable
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.ptx.read.types import TYPE_NAMES, size_of
from flash_helpers.ptx.run.access import STRONG, access_size, space_of
from flash_helpers.ptx.run.counters import Counters, LineCounts
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.machine import Launch, Machine
from flash_helpers.ptx.run.memory import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.observe import Observer
from flash_helpers.ptx.run.scheduler import Scheduler
from flash_helpers.ptx.run.tally import Tally

Argument = int | float | bool | np.generic | bytes
Progress = Callable[[int, int], None]

_BATCH_LANES = 2048
"""Lanes run together, about: enough to hide the cost of a NumPy call, few enough to stay in
cache."""

_WORD = 32  # bytes: the widest access

DEFAULT_MAX_INSTRUCTIONS = 20_000_000


@dataclass(frozen=True)
class Run:
    """A finished launch. n_blocks: that have run. faults: those that `keep_going` collected, one
    for each instruction and kind."""

    kernel: str
    n_blocks: int
    counters: Counters
    faults: tuple[SimulatorError, ...]

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
        """The collected faults as text."""
        return "\n".join(str(fault) for fault in self.faults)


@dataclass(frozen=True)
class Kernel:
    """One entry of a module."""

    module: Module
    function: Function

    @property
    def name(self) -> str:
        """The entry's name, as mangled."""
        return self.function.name

    @cached_property
    def program(self) -> Program:
        """Its instructions in the order in which the simulator runs them."""
        return build_program(self.function)

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory that the kernel declares with a size."""
        return self._shared_layout[1]

    @cached_property
    def _variables(self) -> list[Variable]:
        """The function's own, and the module's; of those in shared memory, the ones it names."""
        named = (o for i in self.function.instructions for o in i.named())
        used = {operand.name for operand in named if isinstance(operand, Symbol)}
        module = self.module.variables.values()
        named = [v for v in module if v.space != "shared" or v.name in used]
        return [*named, *self.function.variables]

    @cached_property
    def _shared_layout(self) -> tuple[dict[str, int], int]:
        """Offsets of shared variables, and the size of those whose size is known."""
        shared = [v for v in self._variables if v.space == "shared"]
        dynamic = [v for v in shared if v.external and v.size == 0]
        offsets, end = _placed([v for v in shared if v not in dynamic])
        if dynamic:
            end = _aligned(end, max(v.alignment for v in dynamic))
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
        keep_going: bool = False,
        max_instructions: int = DEFAULT_MAX_INSTRUCTIONS,
        progress: Progress | None = None,
        observer: Observer | None = None,
        target: str = "sm_80",
        before: Run | None = None,
        output: TextIO | None = None,
    ) -> Run:
        """Runs the kernel; returns what was counted, and the faults if they were collected.

        grid: blocks in x, y and z. block: threads of a block in x, y and z. shared_bytes: dynamic
        shared memory of a block. args: one value for each parameter: an int or a NumPy scalar, or
        bytes for a structure passed by value. memory: the global memory that pointers among them
        refer to. keep_going: collect faults in `Run.faults` rather than raise the first one.
        max_instructions: a warp that runs more raises InstructionLimitError. progress: called with
        the number of blocks done and the number of blocks. observer: is shown registers and shared
        memory while the kernel runs. target: compute capability whose limits the launch must keep.
        before: a run of this kernel whose counts and faults this one goes on with; it is used up.
        output: what the kernel's printf writes to, in place of standard output.

        Raises LaunchError for a launch that cannot exist, of which nothing has run;
        UnsupportedInstruction for an instruction that is not known; SimulatorError for a fault of
        the kernel, unless keep_going.
        """
        grid3, block3 = _three(grid, "grid"), _three(block, "block")
        threads = math.prod(block3)
        memory = DeviceMemory() if memory is None else memory
        self._check_launch(grid3, block3, shared_bytes, target)
        launch = replace(self._launch(grid3, block3, shared_bytes, args, memory), output=output)
        log = FaultLog(self.program, keep_going)
        tally, n_blocks = Tally(self.program), math.prod(grid3)
        if before is not None:
            tally, n_blocks = before.counters.tally, n_blocks + before.n_blocks
            log.go_on_with(before.faults)
        x, y, z = map(range, grid3)
        blocks = [(i, j, k) for k, j, i in itertools.product(z, y, x)]
        n_batches = max(1, round(len(blocks) * _aligned(threads, gpu.WARP) / _BATCH_LANES))
        per_batch = -(-len(blocks) // n_batches)
        for start in range(0, len(blocks), per_batch):
            geometry = Geometry(tuple(blocks[start : start + per_batch]), threads)
            machine = Machine(self.program, launch, geometry, memory, log, tally)
            with np.errstate(all="ignore"):
                Scheduler(machine, max_instructions, observer).run()
            if progress is not None:
                progress(min(start + per_batch, len(blocks)), len(blocks))
        return Run(self.name, n_blocks, Counters(tally), tuple(log.faults.values()))

    def _check_launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        target: str,
    ) -> None:
        if any(n > most for n, most in zip(grid, gpu.MAX_GRID, strict=True)):
            raise LaunchError(
                f"a grid of {grid}: the limits are {', '.join(map(str, gpu.MAX_GRID))}"
            )
        try:
            limits = gpu.LIMITS[gpu.capability_of(target)]
        except (ValueError, KeyError):
            known = ", ".join(f"sm_{capability}" for capability in gpu.LIMITS)
            raise LaunchError(f"unknown target {target}: choose from {known}") from None
        threads = math.prod(block)
        if threads > gpu.MAX_THREADS or block[2] > gpu.MAX_BLOCK_Z:
            raise LaunchError(
                f"a block of {block} has {threads} threads; {target} allows {gpu.MAX_THREADS} "
                f"and {gpu.MAX_BLOCK_Z} in z: use a smaller block"
            )
        bound = self.function.directives.get("maxntid") or self.function.directives.get("reqntid")
        if bound and threads > math.prod(bound):
            raise LaunchError(
                f"a block of {threads} threads, but {self.name} is compiled for at most "
                f"{math.prod(bound)}: launch fewer or change __launch_bounds__"
            )
        if shared_bytes < 0:
            raise LaunchError(f"shared_bytes is {shared_bytes}: give 0 or more")
        total = self.static_shared_bytes + shared_bytes
        if total > limits.smem_bytes:
            raise LaunchError(
                f"{total} bytes of shared memory a block ({self.static_shared_bytes} static, "
                f"{shared_bytes} dynamic), but {target} has {limits.smem_bytes}: use smaller "
                "tiles or another target"
            )

    def _pack(self, args: Sequence[Argument]) -> tuple[np.ndarray, dict[str, int]]:
        """Arguments laid out as the kernel reads them, and the parameters' offsets."""
        parameters = self.function.parameters
        if len(args) != len(parameters):
            raise LaunchError(f"{self.name} takes {len(parameters)} arguments, got {len(args)}")
        offsets, end = _placed(parameters)
        data = np.zeros(_aligned(end, _WORD), np.uint8)
        for i, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
            found = _argument_bytes(i, parameter, value)
            data[offsets[parameter.name] :][: len(found)] = np.frombuffer(found, np.uint8)
        return data, offsets

    def _launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        memory: DeviceMemory,
    ) -> Launch:
        parameters, offsets = self._pack(args)
        shared, static = self._shared_layout
        local, local_bytes = _placed([v for v in self._variables if v.space == "local"])
        in_memory = [v for v in self._variables if v.space in ("global", "const")]
        addresses = {v.name: memory.allocate(max(v.size, 1)) for v in in_memory}
        symbols = {**offsets, **shared, **local, **addresses}
        for variable in in_memory:
            if variable.initial is not None:
                _initialise(variable, symbols, memory)
        granule, atomics = self._shared_accesses
        return Launch(
            grid=grid,
            block=block,
            shared_bytes=static + shared_bytes,
            dynamic_bytes=shared_bytes,
            parameters=parameters,
            symbols=symbols,
            local_bytes=_aligned(local_bytes, _WORD),
            granule=granule,
            shared_atomics=atomics,
        )

    @cached_property
    def _shared_accesses(self) -> tuple[int, bool]:
        """Bytes of the narrowest access that may be to shared memory; whether one is atomic."""
        narrowest, atomics = 16, False
        for instruction in self.function.instructions:
            name = instruction.name
            if name in ("ld", "st", "atom", "red") and space_of(instruction) in (
                "shared",
                "generic",
            ):
                narrowest = min(narrowest, access_size(instruction))
                atomics |= bool(instruction.first(STRONG)) or name in ("atom", "red")
            elif name == "wmma":
                # Elements of less than a byte move four bytes at a time.
                sizes = [size_of(t) for t in instruction.types if t in TYPE_NAMES]
                narrowest = min(narrowest, 4, *sizes)
            elif name == "cp" and len(instruction.operands) > 2:
                size = instruction.operands[2]
                if isinstance(size, Immediate):
                    narrowest = min(narrowest, max(int(size.value), 1))
        return narrowest, atomics


@dataclass(frozen=True)
class PtxModule:
    """A loaded PTX file."""

    module: Module

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of all entries, as mangled."""
        return tuple(f.name for f in self.module.entries)

    def kernel(self, name: str) -> Kernel:
        """The entry of this name, or the only one whose name contains it. Raises LaunchError if no
        entry fits, or several do."""
        function = self.module.functions.get(name)
        if function is None or not function.is_entry:
            found = [f for f in self.module.entries if name in f.name]
            if len(found) != 1:
                names = "\n  ".join(self.kernels) or "(none)"
                problem = "no kernel is named" if not found else "several kernels are named"
                raise LaunchError(f"{problem} {name!r}; the file holds\n  {names}")
            function = found[0]
        return Kernel(self.module, without_calls(self.module, function))


def load_ptx(source: str | Path) -> PtxModule:
    """Reads PTX, given as text or as the path of a file. Raises PtxSyntaxError for what is no whole
    PTX module, NotPtxError for a file of another kind, OSError for one that cannot be read."""
    if isinstance(source, str) and "\n" in source:
        return PtxModule(read_ptx(source))
    data = Path(source).read_bytes()
    if error := mistaken(source, data, FileKind.PTX):
        raise NotPtxError(error)
    if b"\0" in data.rstrip(b"\0"):
        raise NotPtxError(f"{source} is not PTX: it holds bytes that no text does")
    try:
        return PtxModule(read_ptx(data.decode(errors="replace").rstrip("\0")))
    except PtxSyntaxError as error:
        raise PtxSyntaxError(error.message, error.line, str(source)) from None


def _three(value: Sequence[int] | int, name: str) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise LaunchError(f"{name} is {value}: give one to three positive numbers")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _placed(variables: Sequence[Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables one after the other, and where the last one ends."""
    offsets, end = {}, 0
    for variable in variables:
        offsets[variable.name] = _aligned(end, max(variable.alignment, 1))
        end = offsets[variable.name] + variable.size
    return offsets, end


def _argument_bytes(index: int, parameter: Variable, value: Argument) -> bytes:
    what, size = f"argument {index}", parameter.size
    if isinstance(value, bytes | bytearray | memoryview):
        if len(bytes(value)) != size:
            raise LaunchError(f"{what} has {len(bytes(value))} bytes, its parameter {size}")
        return bytes(value)
    if isinstance(value, np.generic):
        if value.nbytes != size:
            raise LaunchError(
                f"{what} is a {value.dtype} of {value.nbytes} bytes, its parameter has "
                f"{size} (.{parameter.type})"
            )
        return value.tobytes()
    if not isinstance(value, int | float):
        raise LaunchError(
            f"{what} is a {type(value).__name__}: give an int, a NumPy scalar or bytes"
        )
    if parameter.type in ("f32", "f64"):
        return np.array(value, f"f{size}").tobytes()
    if isinstance(value, float):
        raise LaunchError(f"{what} is a float, its parameter is .{parameter.type}")
    if parameter.type == "b8" and size > 8:
        raise LaunchError(f"{what} is passed by value in {size} bytes: give bytes")
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(f"{what} is {value}, which does not fit {bits} bits")
    return (value & ((1 << bits) - 1)).to_bytes(size, "little")


def _initialise(variable: Variable, symbols: Mapping[str, int], memory: DeviceMemory) -> None:
    data = variable.initial
    if isinstance(data, tuple):
        addresses = [symbols[v.name] + v.offset if isinstance(v, Symbol) else v for v in data]
        data = np.array(addresses, np.uint64).tobytes()
    offset = symbols[variable.name] - ARENA_BASE
    memory.words(1)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
