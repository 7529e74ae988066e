"""The state of a batch of blocks, and the binding of operands to it.

Every register is an array over the lanes of all warps of the batch. An instruction is turned once
into two Python callables: one that runs it on all lanes, with the arrays already chosen, and one
that runs it on a selection of lanes. A slice of lanes that runs the same code again and again, as
the warps of a role do, gets a callable of its own, with its parts of the arrays already chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TextIO

import numpy as np

from flash_helpers.gpu import RESERVED_SMEM_BYTES, WARP
from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.flow import Program
from flash_helpers.ptx.read.module import (
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from flash_helpers.ptx.read.registers import Unset
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, ScalarType, size_of
from flash_helpers.ptx.run.asynchronous.cluster_barrier import ClusterBarrier
from flash_helpers.ptx.run.asynchronous.pending import AsyncCopies
from flash_helpers.ptx.run.asynchronous.phases import Phases
from flash_helpers.ptx.run.asynchronous.register_pool import RegisterPool
from flash_helpers.ptx.run.asynchronous.transfers import Transfers
from flash_helpers.ptx.run.asynchronous.warpgroups import Warpgroups
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.regions import (
    ALL,
    ARENA_BASE,
    DeviceMemory,
    LocalMemory,
    Region,
    Selection,
)
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.watch.changed_maps import ChangedMaps
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.launch_before import LaunchBefore
from flash_helpers.ptx.run.watch.lints import Lints
from flash_helpers.ptx.run.watch.poison import Memory, Poison
from flash_helpers.ptx.run.watch.shared import WatchedMemory
from flash_helpers.ptx.run.watch.written import GlobalWrites
from flash_helpers.ptx.tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_MAGIC

RunSome = Callable[[Selection], None]
Compute = Callable[..., "np.ndarray"]
Computes = Callable[..., "np.ndarray | tuple[np.ndarray, ...]"]


@dataclass(frozen=True)
class Action:
    """An instruction bound to a machine. `all`, `some`: run it on all lanes, or on selected ones.
    `bind`: returns what runs it on a slice of lanes, with the arrays already chosen; None where
    nothing can be chosen before."""

    all: Callable[[], None]
    some: RunSome
    bind: Callable[[slice], Callable[[], None]] | None = None

    def on(self, lanes: slice) -> Callable[[], None]:
        """Return a callable that runs it on a slice of lanes, any number of times."""
        return partial(self.some, lanes) if self.bind is None else self.bind(lanes)


@dataclass(frozen=True)
class Wait:
    """An instruction at which lanes sleep until something has happened.

    `is_ready`: returns for each of some lanes whether it may execute the instruction now. `reason`:
    returns what waiting lanes of one block wait for, in words. `story`: returns what has happened
    there, in words, for a message with room. `give_up`: lets lanes execute it
    with its timeout result; None for an instruction that waits forever. `is_patient`: it gives up
    only if no thread can go on otherwise.
    """

    is_ready: Callable[[np.ndarray], np.ndarray]
    reason: Callable[[np.ndarray], str]
    story: Callable[[np.ndarray], str] | None = None
    give_up: Callable[[np.ndarray], None] | None = None
    is_patient: bool = True


@dataclass(frozen=True)
class Alu:
    """An instruction that computes registers from registers.

    `results`, `sources`: operands, each with its PTX type. `compute`: takes one array per source
    and returns one array per result, elementwise over the lanes.
    """

    results: tuple[tuple[Operand, str], ...]
    sources: tuple[tuple[Operand, str], ...]
    compute: Computes

    @classmethod
    def of(cls, instruction: Instruction, compute: Computes, *types: str) -> Alu:
        """An instruction whose operands are one result and its sources. `types`: type of each
        operand; the last type also serves for the remaining operands."""
        rest = itertools.repeat(types[-1])
        typed = zip(instruction.operands, itertools.chain(types, rest), strict=False)
        result, *sources = typed
        return cls((result,), tuple(sources), compute)


@dataclass(frozen=True)
class Launch:
    """The data that all blocks of a launch share.

    `target`: the target whose limits it keeps. `written_for`: the target of the text. `cluster`:
    blocks per cluster in x, y and z; None for a launch without clusters. `shared_bytes`: shared
    memory per block, static and dynamic. `parameters`: their bytes, uint8. `symbols`: addresses of
    variables, each in its own state space, and of functions, which can only be stored.
    `local_bytes`: local memory per thread. `granule`: bytes of the narrowest shared access.
    `has_flags`: whether strong accesses to shared memory may order other accesses. `windows`: for
    each variable, the generic address of the first byte of its state space, if that is not 0.

    `scratch`: offset of the part of shared memory that the system reserves, behind all variables;
    None if the kernel does not ask for it. `workspace`: address of the memory through which a grid
    synchronises; 0 if it does not. `seed`: seed of the order in which asynchronous work is done;
    None does it as late as possible. `strict_wgmma`: each warp retires the products of `wgmma`
    alone. `programmatic`: the launch before may still run. `registers`: registers per thread when
    the kernel begins; None if not known. `lints`:
    whether suspicious operations are collected. `output`: stream of printf; None for standard
    output. `unset`: registers that the kernel may read before it writes them.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_bytes: int
    parameters: np.ndarray
    symbols: Mapping[str, int]
    local_bytes: int
    granule: int
    has_flags: bool
    target: str
    written_for: str
    cluster: tuple[int, int, int] | None = None
    windows: Mapping[str, int] = field(default_factory=dict)
    output: TextIO | None = None
    programmatic: bool = False
    scratch: int | None = None
    workspace: int = 0
    seed: int | None = None
    strict_wgmma: bool = False
    registers: int | None = None
    lints: bool = False
    unset: Unset = field(default_factory=Unset)


_ADDRESS = (1 << 64) - 1


def pick(array: np.ndarray, selection: Selection) -> np.ndarray:
    """The selected lanes of a source, which may be one value for all lanes."""
    return array if array.shape[0] == 1 else array[selection]


def _has_agents(program: Program) -> bool:
    """Whether the kernel has instructions of TMA or wgmma."""
    marks = {"wgmma": "sync", "cp": "bulk", "st": "async"}
    return any(i.name in marks and i.has(marks[i.name]) for i in program.instructions)


def _narrowest_write(program: Program) -> int:
    """Bytes of the narrowest write of threads to global memory, in a kernel with bulk copies; 0 if
    there is none."""
    if not any(i.name == "cp" and i.has("bulk") for i in program.instructions):
        return 0
    spaces = {"shared", "shared::cluster", "local", "param"}
    sizes = [
        size_of(i.types[-1])
        for i in program.instructions
        if i.name in ("st", "atom", "red") and i.types and not i.first(spaces)
    ]
    return min(sizes, default=0)


def _tensor_maps(data: np.ndarray) -> np.ndarray:
    """Positions of tensor maps in bytes."""
    words = data[: data.size // 8 * 8].view(np.uint64)[:: TENSOR_MAP_ALIGNMENT // 8]
    magic = np.frombuffer(TENSOR_MAP_MAGIC, np.uint64)
    return np.flatnonzero(words == magic) * TENSOR_MAP_ALIGNMENT


def warp_masks(lanes: np.ndarray) -> np.ndarray:
    """For each lane a 32-bit mask of its warp's lanes, from a boolean array over lanes."""
    return np.packbits(lanes, bitorder="little").view(np.uint32).repeat(WARP)


@dataclass(eq=False, repr=False)
class Machine:
    """Registers and memories of a batch of blocks."""

    program: Program
    launch: Launch
    geometry: Geometry
    memory: DeviceMemory
    log: FaultLog
    tally: Tally

    def __post_init__(self) -> None:
        program, launch, geometry = self.program, self.launch, self.geometry
        memory, log = self.memory, self.log
        self.lanes = geometry.lanes
        self.lane_ids = np.arange(self.lanes)
        size = launch.shared_bytes
        if launch.scratch is not None:
            size = launch.scratch + RESERVED_SMEM_BYTES
        self.shared = WatchedMemory(geometry, size, launch.granule, log)
        if launch.scratch is not None:
            self.shared.marks.initialise(launch.scratch, RESERVED_SMEM_BYTES)
        self.cluster_barrier = ClusterBarrier(
            geometry, self.shared.order, self.shared.presence, log
        )
        self.launch_before = None
        if launch.programmatic:
            self.launch_before = LaunchBefore(geometry, self.shared.order, log)
        self.copies = AsyncCopies(self.shared)
        self.local = LocalMemory(self.lanes, launch.local_bytes)
        parameters = launch.parameters
        self.regions: dict[str, Region | DeviceMemory] = {
            "shared": self.shared,
            "global": memory,
            "const": memory,
            "param": Region(parameters, parameters.size, 0 * self.lane_ids, "parameters"),
            "local": self.local,
        }
        spaces = {
            "shared": Memory(self.shared.data.size, launch.granule, self.shared.marks.is_written),
            "local": Memory(self.local.data.size, 1, self.local.is_written),
        }
        maps = {"param": _tensor_maps(parameters)}
        if any(i.has("tensor") for i in program.instructions):
            maps["global"] = maps["const"] = ARENA_BASE + _tensor_maps(memory.words(1))
        self.tensor_maps = {space: found for space, found in maps.items() if found.size}
        """By state space, the addresses of tensor maps there, which no lane may load; kernels that
        make maps of their own begin with copies, and other kernels than those that copy tensors may
        move maps in global memory."""
        self.changed_maps = ChangedMaps(self.tensor_maps.get("global", ()))
        if any("tensormap" in i.opcode for i in program.instructions):
            self.tensor_maps.clear()
        self.poison = Poison(geometry, log, program.registers, spaces)
        random = None
        if launch.seed is not None:
            random = np.random.default_rng((launch.seed, *geometry.blocks[0]))
        self.phases = Phases(self.shared, log, random)
        lints = None
        if launch.lints and _has_agents(program):
            order, granule, stride = self.shared.order, self.shared.granule, self.shared.stride
            lints = Lints(geometry, order, self.phases.passed, log, granule, stride)
            self.shared.lanes.touched = lints.touch
        self.lints = lints
        writes, narrowest = None, _narrowest_write(program)
        if narrowest:
            writes = GlobalWrites(geometry, self.shared.order, memory, narrowest)
        self.transfers = Transfers(
            self.shared, memory, self.phases, self.poison, self.copies, log, random, lints, writes
        )
        self.warpgroups = Warpgroups(
            geometry,
            program,
            self.shared,
            self.poison,
            log,
            strict=launch.strict_wgmma,
            random=random,
            lints=lints,
        )
        self.register_pool = RegisterPool(geometry, self.shared.order, log, launch.registers)
        self.gone = self.thread_ids >= geometry.threads
        """Lanes whose threads have ended, or that a block's short last warp lacks."""
        self.position = 0
        """Index of the instruction that is currently being bound."""
        self.refused: dict[int, UnsupportedInstruction] = {}
        """Indices of instructions that cannot be run."""
        self.waits: dict[int, Wait] = {}
        """Waits by the index of the instruction, set while it is bound."""
        self._registers = self._allocate_registers()
        self._specials: dict[str, np.ndarray] = {}
        self._views: dict[tuple[str, str], np.ndarray] = {}
        self.carry = np.zeros(self.lanes, np.uint32)
        self.issue_clock = 0

    def _allocate_registers(self) -> dict[str, np.ndarray]:
        by_dtype: dict[np.dtype, list[str]] = {}
        registers: dict[str, np.ndarray] = {}
        self.register_files: list[np.ndarray] = []
        """The arrays that all registers are views of, with the lanes last, and some padding."""
        for name, type_name in self.program.registers.items():
            if type_name == B128:
                registers[name] = np.zeros((self.lanes, 2), np.uint64)
                self.register_files.append(registers[name].T)
                continue
            scalar = SCALAR_TYPES[type_name]
            # Registers hold bits: the type of each instruction chooses the view.
            dtype = dtype_of(scalar.name) if scalar.kind == "p" else np.dtype(f"u{scalar.size}")
            by_dtype.setdefault(dtype, []).append(name)
        for dtype, names in by_dtype.items():
            # Register files are separated by a cache line: rows a power of two apart would all
            # compete for the same lines of the host's cache.
            pad = 64 // dtype.itemsize
            file = np.zeros((len(names), self.lanes + pad), dtype)
            self.register_files.append(file)
            registers.update(zip(names, file[:, : self.lanes], strict=True))
        return registers

    def end(self, selection: Selection) -> None:
        """The threads of selected lanes end."""
        lanes = self.lanes_of(selection)
        ended_blocks = self.shared.presence.end(lanes)
        self.cluster_barrier.end(lanes)
        self.gone[lanes] = True
        self.poison.end(lanes)
        warps = np.unique(lanes // WARP)
        ended = warps[self.gone.reshape(-1, WARP)[warps].all(axis=1)]
        self.warpgroups.end(ended)
        self.register_pool.end(ended)
        self.shared.agents.end_blocks(ended_blocks)

    # -- operands ----------------------------------------------------------------------------------

    def instruction(self) -> Instruction:
        """The instruction that is being bound."""
        return self.program.instructions[self.position]

    def unsupported(self, reason: str = "") -> UnsupportedInstruction:
        """The error that refuses the current instruction."""
        instruction = self.instruction()
        return UnsupportedInstruction(instruction.opcode, instruction.line, reason)

    def one_of(self, names: Collection[str]) -> str:
        """The modifier that is in `names`; refuses an instruction without any."""
        found = self.instruction().first(names)
        if found is None:
            raise self.unsupported(f"one of {', '.join(names)} is due")
        return found

    def elements(self, operand: Operand, count: int) -> tuple[Operand, ...]:
        """The registers of a vector, or the only register."""
        found = operand.elements if isinstance(operand, Vector) else (operand,)
        if len(found) != count:
            raise self.unsupported(f"{len(found)} registers where {count} are due")
        return found

    def register(self, operand: Operand) -> np.ndarray:
        """The bits of a register, one element per lane."""
        return self._registers[self._register(operand).name]

    def _register(self, operand: Operand) -> Register:
        if not isinstance(operand, Register):
            raise self.unsupported("a register is expected")
        return operand

    def width(self, operand: Operand) -> int:
        """Bits of a register; 0 of any other operand."""
        return 8 * self.register(operand).itemsize if isinstance(operand, Register) else 0

    def source(self, operand: Operand, type_name: str) -> np.ndarray:
        """A source as an array of the type: one element per lane, or one for all lanes.

        For a predicate with `!` it is the register itself: the caller takes the complement.
        """
        if isinstance(operand, Register):
            if operand.negated and type_name != "pred":
                raise self.unsupported("only a predicate has a complement")
            return self._view(operand, type_name)
        if isinstance(operand, Special):
            return self._typed(self.special(operand.name), type_name)
        if type_name == B128 or not isinstance(operand, Immediate | Symbol):
            kind = type(operand).__name__.lower()
            raise self.unsupported(f"an operand of kind {kind} where a value is due")
        if isinstance(operand, Immediate):
            return self.immediate(operand, SCALAR_TYPES[type_name])
        return np.array([self.symbol(operand) & _ADDRESS], np.uint64).astype(dtype_of(type_name))

    def _view(self, register: Register, type_name: str) -> np.ndarray:
        """A register as an array of a type."""
        key = register.name, type_name
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._typed(self._registers[register.name], type_name)
        return found

    def _typed(self, array: np.ndarray, type_name: str) -> np.ndarray:
        if type_name == B128 or array.ndim == 2:
            if type_name == B128 and array.ndim == 2:
                return array
            raise self.unsupported("128-bit registers can only be moved")
        dtype = dtype_of(type_name)
        if bool in (dtype, array.dtype):
            if dtype == array.dtype:
                return array
            raise self.unsupported("a predicate where a value is due, or the reverse")
        if array.dtype.itemsize < dtype.itemsize:
            raise self.unsupported(f"a {8 * array.dtype.itemsize}-bit register read as {type_name}")
        # Of a wider register the low part, as a live view (little endian).
        return array.view(dtype)[:: array.dtype.itemsize // dtype.itemsize]

    def immediate(self, operand: Immediate, scalar: ScalarType) -> np.ndarray:
        """A literal as one value of the type."""
        if scalar.kind == "p":
            return np.array([bool(operand.value)])
        if operand.integer is None and scalar.kind != "f" and operand.float_bits != scalar.bits:
            raise self.unsupported(f"a literal of floating point where a .{scalar.name} is due")
        if operand.float_bits:
            bits = np.array([operand.value], f"u{operand.float_bits // 8}")
            value = bits.view(f"f{operand.float_bits // 8}")
            return (value if scalar.kind == "f" else bits).astype(dtype_of(scalar.name))
        if scalar.kind == "f":
            return np.array([operand.value], dtype_of(scalar.name))
        mask = (1 << scalar.bits) - 1
        return np.array([int(operand.value) & mask], f"u{scalar.size}").view(dtype_of(scalar.name))

    def predicate(self, operand: Operand) -> Callable[[Selection], np.ndarray]:
        """A predicate of the selected lanes, or its complement where the operand has `!`; one value
        if all lanes have the same."""
        array = self.source(operand, "pred")
        if isinstance(operand, Register) and operand.negated:
            return lambda selection: ~pick(array, selection)
        return lambda selection: pick(array, selection)

    def symbol(self, operand: Symbol) -> int:
        """The address of a variable in its state space."""
        if operand.name not in self.launch.symbols:
            raise self.unsupported(f"unknown symbol {operand.name}")
        return self.launch.symbols[operand.name] + operand.offset

    def destination(self, operand: Operand, type_name: str) -> np.ndarray:
        """The array for a result of the type: a view of the register as that type, or as the wider
        type that the result is extended to. A sink has an array of its own, which is never read."""
        if isinstance(operand, Sink):
            shape = (self.lanes, 2) if type_name == B128 else self.lanes
            return np.empty(shape, dtype_of(type_name))
        register = self._register(operand)
        array = self._registers[register.name]
        dtype = dtype_of(type_name)
        if bool in (array.dtype, dtype) or array.dtype.itemsize <= dtype.itemsize:
            return self._view(register, type_name)
        if dtype.kind == "f":
            raise self.unsupported(
                f"a register of {8 * array.dtype.itemsize} bits for a result of {type_name}"
            )
        # By its sign, if it has one.
        return array.view(f"{'i' if dtype.kind == 'i' else 'u'}{array.dtype.itemsize}")

    def destinations(self, operand: Operand, *types: str) -> list[np.ndarray]:
        """Destinations of the two results of `a|b`; for a single operand, the second goes
        nowhere."""
        pair = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())
        return [self.destination(o, t) for o, t in zip(pair, types, strict=True)]

    def special(self, name: str) -> np.ndarray:
        """A special register, one element per lane."""
        if name not in self._specials:
            self._specials[name] = self._special(name)
        return self._specials[name]

    @cached_property
    def thread_ids(self) -> np.ndarray:
        """Linear thread index in the block, of each lane (padding lanes beyond the block too)."""
        return self.geometry.thread_of(self.lane_ids)

    @cached_property
    def lane_bits(self) -> np.ndarray:
        """Each lane's bit in the masks of its warp."""
        return np.uint32(1) << (self.lane_ids % WARP).astype(np.uint32)

    def _special(self, name: str) -> np.ndarray:
        base, _, axis = name.lstrip("%").partition(".")
        n = "xyzw".find(axis) if axis else 0
        lane = self.lane_ids % WARP
        x, y, _ = self.launch.block
        ids = np.array(self.geometry.blocks, np.uint32)[self.geometry.block_of(self.lane_ids)]
        threads = (self.thread_ids % x, self.thread_ids // x % y, self.thread_ids // (x * y))
        block, grid = (*self.launch.block, 1)[n], (*self.launch.grid, 1)[n]
        thread, block_id = (*threads, 0 * lane)[n], 0 * lane if n == 3 else ids[:, n]
        # Without clusters a block is its own.
        cluster = (*(self.launch.cluster or (1, 1, 1)), 1)[n]
        bit = self.lane_bits
        values = {
            "tid": thread,
            "ntid": block,
            "ctaid": block_id,
            "nctaid": grid,
            "clusterid": block_id // cluster,
            "nclusterid": grid // cluster,
            "cluster_ctaid": block_id % cluster,
            "cluster_nctaid": cluster,
            "cluster_ctarank": self.geometry.rank_of(self.lane_ids),
            "cluster_nctarank": self.geometry.cluster,
            "is_explicit_cluster": self.launch.cluster is not None,
            "laneid": lane,
            "warpid": self.thread_ids // WARP,
            "nwarpid": self.geometry.warps_per_block,
            "smid": 0,
            "nsmid": 1,
            "gridid": 0,
            "dynamic_smem_size": self.launch.dynamic_bytes,
            "total_smem_size": self.launch.shared_bytes,
            "lanemask_eq": bit,
            "lanemask_lt": bit - np.uint32(1),
            "lanemask_le": bit | (bit - np.uint32(1)),
            "lanemask_gt": ~(bit | (bit - np.uint32(1))),
            "lanemask_ge": ~(bit - np.uint32(1)),
            # Time is not simulated; it only has to pass. `tick` advances these arrays.
            **dict.fromkeys(_CLOCKS, 0),
        }
        if self.launch.scratch is not None:
            # PTX does not say where. Cooperative groups keep their scratch from offset 1 on.
            begin, end = self.launch.scratch, self.launch.scratch + RESERVED_SMEM_BYTES
            values |= {
                "reserved_smem_offset_begin": begin,
                "reserved_smem_offset_end": end,
                "reserved_smem_offset_cap": RESERVED_SMEM_BYTES,
                "reserved_smem_offset_1": begin,
            }
        if self.launch.workspace:
            # As details/driver_abi.h of cooperative groups reads it: high and low half.
            values |= {
                "envreg1": self.launch.workspace >> 32,
                "envreg2": self.launch.workspace & 0xFFFF_FFFF,
            }
        if base not in values:
            raise self.unsupported(f"the special register {name} is not simulated")
        wide = {"gridid": np.uint64, "clock64": np.uint64, "globaltimer": np.uint64}
        dtype = bool if base == "is_explicit_cluster" else wide.get(base, np.uint32)
        return np.broadcast_to(values[base], self.lanes).astype(dtype)

    def tick(self, instructions: int) -> None:
        """Lets the clocks that the kernel reads pass."""
        self.issue_clock += instructions
        for name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            if name in self._specials:
                self._specials[name][...] = self.issue_clock & 0xFFFF_FFFF

    # -- binding -----------------------------------------------------------------------------------

    def bind_alu(self, alu: Alu) -> Action:
        """The action that runs an `Alu`."""
        sources = [self.source(operand, type_name) for operand, type_name in alu.sources]
        negated = [
            i
            for i, (operand, _) in enumerate(alu.sources)
            if isinstance(operand, Register) and operand.negated
        ]
        compute = _with_complements(alu.compute, negated) if negated else alu.compute
        targets = [self.destination(operand, type_name) for operand, type_name in alu.results]
        if len(targets) > 1:

            def run_each(selection: Selection) -> None:
                values = compute(*[pick(s, selection) for s in sources])
                for target, value in zip(targets, values, strict=True):
                    target[selection] = value

            return self.from_some(run_each)
        (target,) = targets

        def run() -> None:
            target[...] = compute(*sources)

        def run_some(selection: Selection) -> None:
            target[selection] = compute(*[pick(s, selection) for s in sources])

        is_direct = target.dtype == dtype_of(alu.results[0][1])
        ufunc = compute if isinstance(compute, np.ufunc) and is_direct else None

        def bind(lanes: slice) -> Callable[[], None]:
            own, chosen = target[lanes], [pick(s, lanes) for s in sources]
            if ufunc is not None:
                return partial(ufunc, *chosen, out=own)

            def run_slice() -> None:
                own[...] = compute(*chosen)

            return run_slice

        if ufunc is not None:
            return Action(partial(ufunc, *sources, out=target), run_some, bind)
        return Action(run, run_some, bind)

    def from_some(self, run_some: RunSome) -> Action:
        """An action whose general form serves all lanes too."""
        return Action(partial(run_some, ALL), run_some)

    def fellows(self, selection: Selection, members: np.ndarray) -> np.ndarray:
        """For each lane, a mask of the selected lanes of its warp that name the same members.

        `members`: the members that each lane names, or one mask for all. The lanes of an
        instruction with `.sync` wait for those that execute it with the same membermask (PTX ISA
        9.0, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "bar.warp.sync").
        """
        selected = np.zeros(self.lanes, bool)
        selected[selection] = True
        rows = np.broadcast_to(members, (self.lanes,)).reshape(-1, WARP)
        if (rows == rows[:, :1]).all():
            return warp_masks(selected)
        same = (rows[:, :, None] == rows[:, None, :]) & selected.reshape(-1, 1, WARP)
        return np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)

    def lanes_of(self, selection: Selection) -> np.ndarray:
        """Numbers of the selected lanes."""
        return self.lane_ids[selection]

    def counted(self, selection: Selection) -> np.ndarray | None:
        """The selected lanes in the form that counting takes: None for all lanes of whole warps."""
        if isinstance(selection, slice):
            first, end, _ = selection.indices(self.lanes)
            if first % WARP == 0 and end % WARP == 0:
                return None
        return self.lane_ids[selection]

    def guarded(self, action: Action, guard: Register) -> Action:
        """The action for the lanes whose predicate holds."""
        holds = self.predicate(guard)

        def run() -> None:
            chosen = holds(ALL)
            count = np.count_nonzero(chosen)
            if count == chosen.size:
                action.all()
            elif count:
                action.some(np.flatnonzero(chosen))

        def run_some(selection: Selection) -> None:
            chosen = holds(selection)
            if chosen.any():
                action.some(self.lane_ids[selection][chosen])

        return Action(run, run_some)


_CLOCKS = ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi")


def _with_complements(compute: Computes, indices: Sequence[int]) -> Computes:
    def complemented(*arrays: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        return compute(*[~a if i in indices else a for i, a in enumerate(arrays)])

    return complemented
