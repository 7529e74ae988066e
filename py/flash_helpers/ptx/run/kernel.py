"""Loading a module and launching its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flash_helpers.ptx.errors import LaunchError, SimulatorError
from flash_helpers.ptx.read.calls import without_calls
from flash_helpers.ptx.read.flow import Program, build_program
from flash_helpers.ptx.read.module import Function, Immediate, Module, Symbol, Variable
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.ptx.run.access import access_size, space_of
from flash_helpers.ptx.run.counters import Counters, LineCounts, Tally
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.machine import Launch, Machine
from flash_helpers.ptx.run.memory import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.observe import Observer
from flash_helpers.ptx.run.scheduler import Scheduler

Argument = int | float | bool | np.generic | bytes
Progress = Callable[[int, int], None]

_BATCH_LANES = 2048
"""Lanes run together: enough to hide the cost of a NumPy call, few enough to stay in cache."""

_GRID_X, _GRID_YZ = 2**31 - 1, 65535

DEFAULT_MAX_INSTRUCTIONS = 20_000_000


@dataclass(frozen=True)
class Target:
    """Limits of a compute capability (CUDA Programming Guide, "Technical Specifications")."""

    name: str
    shared_bytes: int
    """Largest shared memory of a block."""
    threads: int = 1024


TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target("sm_80", 163 * 1024),
        Target("sm_86", 99 * 1024),
        Target("sm_87", 163 * 1024),
        Target("sm_89", 99 * 1024),
        Target("sm_90", 227 * 1024),
    )
}


@dataclass(frozen=True)
class Run:
    """A finished launch."""

    kernel: str
    counters: Counters
    faults: tuple[SimulatorError, ...]
    """Faults collected by ``keep_going``, one for each instruction and kind."""

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
        return self.function.name

    @cached_property
    def program(self) -> Program:
        return build_program(self.function)

    @cached_property
    def static_shared_bytes(self) -> int:
        """Shared memory that the kernel declares with a size."""
        return self._shared_layout[1]

    @cached_property
    def _symbols_used(self) -> set[str]:
        return {
            o.name if isinstance(o, Symbol) else o.base.name
            for i in self.function.instructions
            for o in i.operands
            if isinstance(o, Symbol) or isinstance(getattr(o, "base", None), Symbol)
        }

    def _variables(self) -> Iterator[Variable]:
        used = self._symbols_used
        for variable in self.module.variables.values():
            if variable.space != "shared" or variable.name in used:
                yield variable
        yield from self.function.variables

    @cached_property
    def _shared_layout(self) -> tuple[dict[str, int], int]:
        """Offsets of shared variables, and the size of those whose size is known."""
        offsets, end = {}, 0
        dynamic = []
        for variable in self._variables():
            if variable.space == "shared":
                if variable.external and variable.size == 0:
                    dynamic.append(variable)
                    continue
                end = -(-end // variable.alignment) * variable.alignment
                offsets[variable.name] = end
                end += variable.size
        static = end
        alignment = max((v.alignment for v in dynamic), default=1)
        start = -(-end // alignment) * alignment
        offsets.update((v.name, start) for v in dynamic)
        return offsets, start if dynamic else static

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
    ) -> Run:
        """Runs the kernel.

        Args:
            grid: blocks in x, y and z.
            block: threads of a block in x, y and z.
            shared_bytes: dynamic shared memory of a block.
            args: one value for each parameter: an int or a NumPy scalar, or bytes for a structure
                passed by value.
            memory: the global memory that pointers in ``args`` refer to.
            keep_going: collect faults in ``Run.faults`` rather than raise the first one.
            max_instructions: a warp that runs more raises ``InstructionLimitError``.
            progress: called with the number of blocks done and the number of blocks.
            observer: is shown registers and shared memory while the kernel runs.
            target: compute capability whose limits the launch must keep.
            before: a run of this kernel whose counts and faults this one goes on with.

        Returns:
            What was counted, and the faults if they were collected.

        Raises:
            LaunchError: the launch cannot exist; nothing has run.
            UnsupportedInstruction: the kernel holds an instruction that is not known.
            SimulatorError: a fault of the kernel, unless ``keep_going``.
        """
        grid3, block3 = _three(grid, "grid"), _three(block, "block")
        threads = math.prod(block3)
        memory = DeviceMemory() if memory is None else memory
        if max(grid3[1:]) > _GRID_YZ or grid3[0] > _GRID_X:
            raise LaunchError(
                f"a grid of {grid3}: the limits are {_GRID_X}, {_GRID_YZ}, {_GRID_YZ}"
            )
        self._check_launch(block3, threads, shared_bytes, target)
        parameters, offsets = self._pack(args)
        launch = self._launch(grid3, block3, shared_bytes, parameters, offsets, memory)
        log = FaultLog(self.program, keep_going)
        tally = before.counters.tally if before else Tally(self.program)
        lanes_per_block = -(-threads // 32) * 32
        per_batch = max(1, _BATCH_LANES // lanes_per_block)
        blocks = [
            (x, y, z) for z in range(grid3[2]) for y in range(grid3[1]) for x in range(grid3[0])
        ]
        for start in range(0, len(blocks), per_batch):
            geometry = Geometry(tuple(blocks[start : start + per_batch]), threads)
            machine = Machine(self.program, launch, geometry, memory, log, tally)
            Scheduler(machine, max_instructions, observer).run()
            if progress is not None:
                progress(min(start + per_batch, len(blocks)), len(blocks))
        earlier = before.faults if before else ()
        return Run(self.name, Counters(tally), (*earlier, *log.faults.values()))

    def _check_launch(
        self, block: tuple[int, int, int], threads: int, shared_bytes: int, target: str
    ) -> None:
        limits = TARGETS.get(target)
        if limits is None:
            raise LaunchError(f"unknown target {target}: choose from {', '.join(TARGETS)}")
        if threads > limits.threads or block[2] > 64:
            raise LaunchError(
                f"a block of {block} has {threads} threads; {target} allows {limits.threads} "
                "and 64 in z: use a smaller block"
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
        if total > limits.shared_bytes:
            raise LaunchError(
                f"{total} bytes of shared memory a block ({self.static_shared_bytes} static, "
                f"{shared_bytes} dynamic), but {target} has {limits.shared_bytes}: use smaller "
                "tiles or another target"
            )

    def _pack(self, args: Sequence[Argument]) -> tuple[np.ndarray, dict[str, int]]:
        """Arguments laid out as the kernel reads them."""
        parameters = self.function.parameters
        if len(args) != len(parameters):
            raise LaunchError(f"{self.name} takes {len(parameters)} arguments, got {len(args)}")
        offsets: dict[str, int] = {}
        data = bytearray()
        for i, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
            alignment = max(parameter.alignment, 1)
            data.extend(bytes(-len(data) % alignment))
            offsets[parameter.name] = len(data)
            data.extend(_argument_bytes(i, parameter, value))
        data.extend(bytes(-len(data) % 16))
        return np.frombuffer(bytes(data), np.uint8), offsets

    def _launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: np.ndarray,
        parameter_offsets: dict[str, int],
        memory: DeviceMemory,
    ) -> Launch:
        symbols, spaces = dict(parameter_offsets), dict.fromkeys(parameter_offsets, "param")
        shared_offsets, static = self._shared_layout
        symbols.update(shared_offsets)
        spaces.update(dict.fromkeys(shared_offsets, "shared"))
        local = 0
        for variable in self._variables():
            spaces[variable.name] = variable.space
            if variable.space == "local":
                local = -(-local // variable.alignment) * variable.alignment
                symbols[variable.name] = local
                local += variable.size
            elif variable.space in ("global", "const"):
                symbols[variable.name] = memory.allocate(max(variable.size, 1))
        for variable in self._variables():
            if variable.space in ("global", "const") and variable.initial is not None:
                _initialise(variable, symbols, memory)
        shared_accesses, atomics = self._shared_accesses
        return Launch(
            grid=grid,
            block=block,
            shared_bytes=static + shared_bytes,
            dynamic_bytes=shared_bytes,
            parameters=parameters,
            symbols=symbols,
            spaces=spaces,
            local_bytes=-(-local // 16) * 16,
            granule=shared_accesses,
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
                strong = any(
                    instruction.has(m) for m in ("volatile", "relaxed", "acquire", "release")
                )
                atomics = atomics or strong or name in ("atom", "red")
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
        """The entry of this name, or the only one whose name contains it.

        Raises:
            LaunchError: no entry fits, or several do.
        """
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
    """Reads PTX, given as text or as the path of a file.

    Raises:
        PtxSyntaxError: it is not a whole PTX module.
        FileNotFoundError: the path does not exist.
    """
    if isinstance(source, Path) or "\n" not in source:
        source = Path(source).read_text()
    return PtxModule(read_ptx(source))


def _three(value: Sequence[int] | int, name: str) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise LaunchError(f"{name} is {value}: give one to three positive numbers")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _argument_bytes(index: int, parameter: Variable, value: Argument) -> bytes:
    what = f"argument {index}"
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if len(data) != parameter.size:
            raise LaunchError(f"{what} has {len(data)} bytes, its parameter {parameter.size}")
        return data
    if isinstance(value, np.generic):
        data = value.tobytes()
        if len(data) != parameter.size:
            raise LaunchError(
                f"{what} is a {value.dtype} of {len(data)} bytes, its parameter has "
                f"{parameter.size} (.{parameter.type})"
            )
        return data
    is_float = parameter.type in ("f32", "f64")
    if isinstance(value, float):
        if not is_float:
            raise LaunchError(f"{what} is a float, its parameter is .{parameter.type}")
        return (
            np.dtype(parameter.type.replace("f32", "f4").replace("f64", "f8")).type(value).tobytes()
        )
    if not isinstance(value, int):
        raise LaunchError(
            f"{what} is a {type(value).__name__}: give an int, a NumPy scalar or bytes"
        )
    if is_float:
        return _argument_bytes(index, parameter, float(value))
    if parameter.type == "b8" and parameter.size > 8:
        raise LaunchError(f"{what} is passed by value in {parameter.size} bytes: give bytes")
    bits = 8 * parameter.size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(f"{what} is {value}, which does not fit {bits} bits")
    return (value & ((1 << bits) - 1)).to_bytes(parameter.size, "little")


def _initialise(variable: Variable, symbols: Mapping[str, int], memory: DeviceMemory) -> None:
    data = variable.initial
    if isinstance(data, tuple):
        addresses = [symbols[v.name] + v.offset if isinstance(v, Symbol) else v for v in data]
        data = np.array(addresses, np.uint64).tobytes()
    offset = symbols[variable.name] - ARENA_BASE
    memory.view(1)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
