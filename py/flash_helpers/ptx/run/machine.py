"""The state of a batch of blocks, and how operands are bound to it.

Every register is an array over the lanes of all warps of the batch. An instruction is turned once
into two Python callables: one that runs it on all lanes, with the arrays already chosen, and one
that runs it on a selection of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.flow import Program
from flash_helpers.ptx.read.module import (
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, ScalarType
from flash_helpers.ptx.run.counters import Tally
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.memory import DeviceMemory
from flash_helpers.ptx.run.pending import AsyncCopies
from flash_helpers.ptx.run.shared import ALL, Selection, SharedMemory

WARP = 32

Run = Callable[[], None]
RunSome = Callable[[Selection], None]
Compute = Callable[..., "np.ndarray | tuple[np.ndarray, ...]"]


@dataclass(frozen=True)
class Action:
    """An instruction bound to a machine."""

    all: Run
    some: RunSome


@dataclass(frozen=True)
class Alu:
    """An instruction that computes registers from registers.

    ``compute`` takes one array for each source and returns one for each result, elementwise over
    the lanes. ``ufunc`` says that it is a NumPy function with an ``out`` argument.
    """

    results: tuple[tuple[Operand, str], ...]
    sources: tuple[tuple[Operand, str], ...]
    compute: Compute
    ufunc: bool = False


@dataclass(frozen=True)
class Launch:
    """What all blocks of a launch share."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """All of a block's shared memory, static and dynamic."""
    dynamic_bytes: int
    parameters: np.ndarray
    """The parameters' bytes, uint8."""
    symbols: Mapping[str, int]
    """Addresses of variables, each in its own state space."""
    spaces: Mapping[str, str]
    """State spaces of variables."""
    local_bytes: int
    """Local memory of one thread."""
    granule: int
    """Bytes of the narrowest shared access."""
    shared_atomics: bool


@dataclass
class Destination:
    """A register array seen as the type of a result, or as the wider type it is extended to."""

    array: np.ndarray

    def put(self, value: np.ndarray) -> None:
        self.array[...] = value

    def put_some(self, selection: Selection, value: np.ndarray) -> None:
        self.array[selection] = value


def pick(array: np.ndarray, selection: Selection) -> np.ndarray:
    """The selected lanes of a source, which may be one value for all lanes."""
    return array if array.shape[0] == 1 else array[selection]


def warp_masks(lanes: np.ndarray) -> np.ndarray:
    """One 32-bit mask for each warp of a boolean array over lanes."""
    packed = np.packbits(lanes.reshape(-1, 32), axis=1, bitorder="little")
    return packed.view(np.uint32).reshape(-1)


class Machine:
    """Registers and memories of a batch of blocks."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        geometry: Geometry,
        memory: DeviceMemory,
        log: FaultLog,
        tally: Tally,
    ) -> None:
        self.program = program
        self.launch = launch
        self.geometry = geometry
        self.memory = memory
        self.log = log
        self.tally = tally
        self.lanes = geometry.lanes
        self.lane_ids = np.arange(self.lanes)
        self.shared = SharedMemory(
            geometry, launch.shared_bytes, launch.granule, log, launch.shared_atomics
        )
        self.copies = AsyncCopies(self.shared)
        self.local = np.zeros(self.lanes * launch.local_bytes, np.uint8)
        self.position = 0
        """Index of the instruction that is being bound."""
        self._registers = self._allocate_registers()
        self._specials: dict[str, np.ndarray] = {}
        self.carry = np.zeros(self.lanes, np.uint32)
        self.issue_clock = 0

    def _allocate_registers(self) -> dict[str, np.ndarray]:
        by_dtype: dict[np.dtype, list[str]] = {}
        registers: dict[str, np.ndarray] = {}
        for name, type_name in self.program.function.registers.items():
            if type_name == B128:
                registers[name] = np.zeros((self.lanes, 2), np.uint64)
                continue
            scalar = SCALAR_TYPES[type_name]
            # Registers hold bits: the type of each instruction chooses the view.
            dtype = scalar.dtype if scalar.kind == "p" else np.dtype(f"u{scalar.size}")
            by_dtype.setdefault(dtype, []).append(name)
        for dtype, names in by_dtype.items():
            # Register files are separated by a cache line: rows a power of two apart would all
            # compete for the same lines of the host's cache.
            pad = 64 // dtype.itemsize
            file = np.zeros((len(names), self.lanes + pad), dtype)
            registers.update(zip(names, file[:, : self.lanes], strict=True))
        return registers

    # -- operands --------------------------------------------------------------------------

    def instruction(self) -> Instruction:
        return self.program.instructions[self.position]

    def unsupported(self, reason: str = "") -> UnsupportedInstruction:
        instruction = self.instruction()
        return UnsupportedInstruction(instruction.opcode, instruction.line, reason)

    def register(self, operand: Operand) -> np.ndarray:
        """The bits of a register, one element a lane."""
        if not isinstance(operand, Register):
            raise self.unsupported("a register is expected")
        return self._registers[operand.name]

    def source(self, operand: Operand, type_name: str) -> np.ndarray:
        """A source as an array of the type: one element a lane, or one for all lanes."""
        if isinstance(operand, Register):
            return self._typed(self._registers[operand.name], type_name)
        scalar = SCALAR_TYPES[type_name]
        if isinstance(operand, Immediate):
            return self.immediate(operand, scalar)
        if isinstance(operand, Special):
            return self._typed(self.special(operand.name), type_name)
        if isinstance(operand, Symbol):
            return np.array([self.symbol(operand)], np.uint64).astype(scalar.dtype)
        raise self.unsupported(f"an operand of kind {type(operand).__name__} where a value is due")

    def _typed(self, array: np.ndarray, type_name: str) -> np.ndarray:
        if type_name == B128 or array.ndim == 2:
            if type_name == B128 and array.ndim == 2:
                return array
            raise self.unsupported("128-bit registers can only be moved")
        scalar = SCALAR_TYPES[type_name]
        if scalar.kind == "p" or array.dtype == bool:
            if scalar.kind == "p" and array.dtype == bool:
                return array
            raise self.unsupported("a predicate where a value is due, or the reverse")
        if array.dtype.itemsize == scalar.size:
            return array.view(scalar.dtype)
        if array.dtype.itemsize > scalar.size:
            # The low part of a wider register, as a live view (little endian).
            return array.view(scalar.dtype)[:: array.dtype.itemsize // scalar.size]
        raise self.unsupported(f"a {8 * array.dtype.itemsize}-bit register read as {type_name}")

    def immediate(self, operand: Immediate, scalar: ScalarType) -> np.ndarray:
        """A literal as one value of the type."""
        if scalar.kind == "p":
            return np.array([bool(operand.value)])
        if operand.float_bits:
            bits = np.array([operand.value], f"u{operand.float_bits // 8}")
            value = bits.view(f"f{operand.float_bits // 8}")
            if scalar.kind == "f":
                return value.astype(scalar.dtype)
            return bits.astype(scalar.dtype)
        if scalar.kind == "f":
            return np.array([operand.value], scalar.dtype)
        mask = (1 << scalar.bits) - 1
        return np.array([int(operand.value) & mask], f"u{scalar.size}").view(scalar.dtype)

    def symbol(self, operand: Symbol) -> int:
        """The address of a variable in its state space."""
        try:
            return self.launch.symbols[operand.name] + operand.offset
        except KeyError:
            raise self.unsupported(f"unknown symbol {operand.name}") from None

    def destination(self, operand: Operand, type_name: str) -> Destination | None:
        """Where a result of the type goes; None for a sink."""
        if isinstance(operand, Sink):
            return None
        array = self.register(operand)
        if type_name == B128 or array.ndim == 2:
            return Destination(self._typed(array, type_name))
        scalar = SCALAR_TYPES[type_name]
        if array.dtype == bool or scalar.kind == "p" or array.dtype.itemsize <= scalar.size:
            return Destination(self._typed(array, type_name))
        # A narrower result is extended to the register, by its sign if it has one.
        kind = "i" if scalar.kind == "s" else "u"
        return Destination(array.view(f"{kind}{array.dtype.itemsize}"))

    def special(self, name: str) -> np.ndarray:
        """A special register, one element a lane."""
        if name not in self._specials:
            self._specials[name] = self._special(name)
        return self._specials[name]

    @cached_property
    def thread_ids(self) -> np.ndarray:
        """Linear thread index in the block, of each lane (padding lanes beyond the block too)."""
        return self.lane_ids % self.geometry.lanes_per_block

    @cached_property
    def absent_lanes(self) -> np.ndarray:
        """For each warp, a mask of the lanes that a short last warp of a block lacks."""
        return warp_masks(self.thread_ids >= self.geometry.threads)

    def _special(self, name: str) -> np.ndarray:
        base, _, axis = name.lstrip("%").partition(".")
        n = "xyz".find(axis) if axis else 0
        lane = self.lane_ids % 32
        constant: dict[str, int] = {
            "ntid": self.launch.block[n] if 0 <= n < 3 else 1,
            "nctaid": self.launch.grid[n] if 0 <= n < 3 else 1,
            "nwarpid": self.geometry.warps_per_block,
            "smid": 0,
            "nsmid": 1,
            "gridid": 0,
            "dynamic_smem_size": self.launch.dynamic_bytes,
            "total_smem_size": self.launch.shared_bytes,
            "nclusterid": self.launch.grid[n] if 0 <= n < 3 else 1,
            "cluster_ctaid": 0,
            "cluster_nctaid": 1,
            "cluster_ctarank": 0,
            "cluster_nctarank": 1,
        }
        if base in constant:
            dtype = np.uint64 if base == "gridid" else np.uint32
            return np.full(self.lanes, constant[base], dtype)
        if base == "is_explicit_cluster":
            return np.zeros(self.lanes, bool)
        if base == "tid":
            x, y, _ = self.launch.block
            parts = (self.thread_ids % x, self.thread_ids // x % y, self.thread_ids // (x * y))
            return (parts[n] if 0 <= n < 3 else 0 * lane).astype(np.uint32)
        if base in ("ctaid", "clusterid"):
            if not 0 <= n < 3:
                return np.zeros(self.lanes, np.uint32)
            ids = np.array(self.geometry.blocks, np.uint32)[:, n]
            return np.repeat(ids, self.geometry.lanes_per_block)
        if base == "laneid":
            return lane.astype(np.uint32)
        if base == "warpid":
            return (self.thread_ids // 32).astype(np.uint32)
        if base.startswith("lanemask_"):
            bit = np.uint64(1) << lane.astype(np.uint64)
            ones = np.uint64(0xFFFF_FFFF)
            one = np.uint64(1)
            masks = {
                "eq": bit,
                "lt": bit - one,
                "le": (bit << one) - one,
                "gt": ones ^ ((bit << one) - one),
                "ge": ones ^ (bit - one),
            }
            return masks[base[-2:]].astype(np.uint32)
        if base in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo",
                    "globaltimer_hi"):  # fmt: skip
            # Time is not simulated; it only has to pass. The scheduler advances these arrays.
            wide = base in ("clock64", "globaltimer")
            return np.zeros(self.lanes, np.uint64 if wide else np.uint32)
        raise self.unsupported(f"special register {name}")

    def tick(self, instructions: int) -> None:
        """Lets the clocks that the kernel reads pass."""
        self.issue_clock += instructions
        for name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            if name in self._specials:
                self._specials[name][...] = self.issue_clock & 0xFFFF_FFFF

    # -- binding ---------------------------------------------------------------------------

    def bind_alu(self, alu: Alu) -> Action:
        sources = [self.source(operand, type_name) for operand, type_name in alu.sources]
        negated = [
            i
            for i, (operand, _) in enumerate(alu.sources)
            if isinstance(operand, Register) and operand.negated
        ]
        compute = alu.compute
        _try(compute, sources)
        if negated:
            compute = _with_complements(compute, negated)
        targets = [self.destination(operand, type_name) for operand, type_name in alu.results]
        if targets == [None]:
            return Action(_nothing, _nothing)
        if len(targets) == 1:
            array = targets[0].array
            dtype = _result_dtype(alu.results[0][1])
            if alu.ufunc and not negated and array.dtype == dtype:
                return Action(
                    partial(alu.compute, *sources, out=array), _some(compute, sources, targets[0])
                )
            return Action(_every(compute, sources, targets[0]), _some(compute, sources, targets[0]))

        def run() -> None:
            for target, value in zip(targets, compute(*sources), strict=True):
                if target is not None:
                    target.put(value)

        def run_some(selection: Selection) -> None:
            values = compute(*[pick(s, selection) for s in sources])
            for target, value in zip(targets, values, strict=True):
                if target is not None:
                    target.put_some(selection, value)

        return Action(run, run_some)

    def from_some(self, run_some: RunSome) -> Action:
        """An action whose general form serves all lanes too."""
        return Action(partial(run_some, ALL), run_some)

    def lanes_of(self, selection: Selection) -> np.ndarray:
        return self.lane_ids[selection]

    def guarded(self, action: Action, guard: Register) -> Action:
        """The action for the lanes whose predicate holds."""
        predicate = self._registers[guard.name]
        negated = guard.negated
        lane_ids = self.lane_ids

        def run() -> None:
            chosen = ~predicate if negated else predicate
            count = np.count_nonzero(chosen)
            if count == chosen.size:
                action.all()
            elif count:
                action.some(np.flatnonzero(chosen))

        def run_some(selection: Selection) -> None:
            chosen = predicate[selection]
            if negated:
                chosen = ~chosen
            if chosen.any():
                action.some(lane_ids[selection][chosen])

        return Action(run, run_some)


def _nothing(selection: Selection | None = None) -> None:
    """A result that goes to a sink is not computed."""


def _try(compute: Compute, sources: Sequence[np.ndarray]) -> None:
    """Raises what ``compute`` raises for sources that do not suit it, before anything has run."""
    with np.errstate(all="ignore"):
        compute(*[source[:WARP] for source in sources])


def _result_dtype(type_name: str) -> np.dtype:
    return np.dtype(np.uint64) if type_name == B128 else SCALAR_TYPES[type_name].dtype


def _with_complements(compute: Compute, indices: Sequence[int]) -> Compute:
    def complemented(*arrays: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        changed = list(arrays)
        for i in indices:
            changed[i] = ~changed[i]
        return compute(*changed)

    return complemented


def _every(compute: Compute, sources: Sequence[np.ndarray], target: Destination) -> Run:
    array = target.array

    def run() -> None:
        array[...] = compute(*sources)

    return run


def _some(compute: Compute, sources: Sequence[np.ndarray], target: Destination) -> RunSome:
    array = target.array

    def run_some(selection: Selection) -> None:
        array[selection] = compute(*[pick(s, selection) for s in sources])

    return run_some
