"""Lower bounds from the text of a kernel, for a loop and for a launch.

Units. A pipe's cost is in cycles of an SM for one warp instruction (see `opcodes`). The sum over a
loop's body is the cost of one iteration of one warp on the pipe, and no arrangement of warps makes
it less: an SM that runs `w` warps needs `w` times that for an iteration of all of them. The same
holds for issuing, at 0.25 cycles per instruction. Latency is different: it is the time of one
iteration of a warp that runs alone, and warps wait side by side. So an iteration of all resident
warps takes at least

    max(w * cycles of the busiest pipe, w * cycles of issuing, latency of a warp)

Predicated instructions are counted as if their guard were true. Filler is issued, as the counters
of an H100 show (tools/analysis/check_counts.py), but is taken to occupy no pipe.

Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from flash_helpers.gpu import WARP
from flash_helpers.sass.analyse.counts import WORK, Bucket, with_buckets
from flash_helpers.sass.analyse.occupancy import kernel_occupancy, misfit, require_threads
from flash_helpers.sass.analyse.phases import (
    NotDeterminedError,
    block_executions,
    can_turn_without,
    cold_blocks,
)
from flash_helpers.sass.analyse.stalls import stall_cycles
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.records import Instruction, Kernel, Loop, SassError

ISSUE = "issue"
LATENCY = "latency"

_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class CostRow:
    """The instructions of one class that have one cost. `cycles`: cycles per instruction, None if
    not known.

    `source`: the source of the cost, "" if it is not known. `certain`: False where the source is a
    guess.
    """

    name: str
    pipe: str
    number: int
    cycles: float | None
    source: str
    certain: bool


@dataclass(frozen=True)
class Bound:
    """The demand of one warp in one pass through a loop's body, or through a whole kernel.

    `rows`: rows by class and cost, the most cycles first, unknown costs last. `issued`:
    instructions, filler included. `pipes`: cycles of the SM by pipe, of the instructions whose cost
    is known. `issue`: cycles of the SM. `stall`: cycles that the control words alone make the warp
    take. `tensor_chain`: length of the longest chain of HMMA in which each adds to the result of
    the one before it. `straight`: every block of the rows is executed each time; otherwise each
    other number is that of the way through the loop that makes it least.
    """

    rows: tuple[CostRow, ...]
    issued: int
    pipes: Mapping[str, float]
    issue: float
    stall: int
    tensor_chain: int
    straight: bool

    @property
    def unknown(self) -> int:
        """Instructions whose cost is not known."""
        return sum(row.number for row in self.rows if row.cycles is None)

    @property
    def tells_tensor(self) -> bool:
        """Whether the costs of all tensor instructions are known. Without them the numbers are no
        bounds: the costliest instructions would be left out."""
        return all(row.cycles is not None for row in self.rows if row.name == opcodes.TENSOR)

    @property
    def chain_cycles(self) -> tuple[int, int]:
        """Cycles of the chain of tensor instructions, with the lowest and the highest latency that
        sources give for one."""
        low, high = opcodes.HMMA_LATENCY
        return self.tensor_chain * low, self.tensor_chain * high

    @property
    def latency(self) -> int:
        """Least cycles that a warp needs alone: its stalls, or the chain at lowest latency."""
        return max(self.stall, self.chain_cycles[0])

    def cycles(self, warps: int) -> dict[str, float]:
        """Lower bounds, in cycles, for a pass of a number of warps on one SM: by pipe, "issue" and
        "latency", the highest first."""
        found = {name: warps * cycles for name, cycles in self.pipes.items()}
        found[ISSUE] = warps * self.issue
        found[LATENCY] = float(self.latency)
        return _highest_first(found)


@dataclass(frozen=True)
class Chip:
    """The GPU that a launch runs on. `sms`: multiprocessors. `mhz`: their clock."""

    sms: int
    mhz: float


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    `threads`, `dynamic_smem_bytes`: threads and dynamic shared memory per block. `blocks`: blocks
    of the grid. `operations`: floating-point operations that it takes; None if not known.
    `problem`: its sizes and options by name. `words`: the problem in words.
    """

    threads: int
    dynamic_smem_bytes: int = 0
    blocks: int = 1
    operations: int | None = None
    problem: Mapping[str, object] = field(default_factory=dict)
    words: str = ""


@dataclass(frozen=True)
class Measured:
    """A launch that was timed: its median time, and its speed in a unit such as TFLOP/s."""

    median_ms: float
    speed: float
    unit: str

    def speed_text(self) -> str:
        """The speed with its unit."""
        return f"{self.speed:.0f} {self.unit}"


@dataclass(frozen=True)
class Prediction:
    """The least time of a launch by each limit. The true time is longer.

    `milliseconds`: least time by pipe, "issue" and "latency", the highest first. `resident`:
    resident warps per SM.
    """

    launch: Launch
    chip: Chip
    resident: int
    milliseconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The limit that takes longest."""
        return next(iter(self.milliseconds))

    @property
    def least_ms(self) -> float:
        """Least time of the launch in milliseconds."""
        return next(iter(self.milliseconds.values()))

    @property
    def most_tflops(self) -> float | None:
        """Most 10^12 floating-point operations per second."""
        operations = self.launch.operations
        return None if operations is None else operations / (self.least_ms * 1e-3) / 1e12


def loop_bound(kernel: Kernel, loop: Loop) -> Bound:
    """The bound of one turn of a loop, from its header back to it, without blocks that only wait.

    Where the loop branches, each number is that of the way that makes it least, so that no turn
    takes less, whichever way it goes. The rows are those of the whole text.
    """
    cold = cold_blocks(kernel, loop)
    body = sorted(loop.blocks - cold if can_turn_without(kernel, loop, cold) else loop.blocks)
    of_block: dict[int, list[_Executed]] = {n: [] for n in body}
    for instruction, kind in with_buckets(kernel):
        if instruction.block in of_block and kind is not Bucket.PADDING:
            of_block[instruction.block].append((instruction, kind, 1))
    text = _bound([one for n in body for one in of_block[n]], kernel.capability)
    issued = _least(kernel, loop, {n: len(of_block[n]) for n in body})
    if issued == text.issued:
        return text
    each = {n: _bound(of_block[n], kernel.capability) for n in body}
    pipes = {
        name: _least(kernel, loop, {n: each[n].pipes.get(name, 0.0) for n in body})
        for name in text.pipes
    }
    passed = {n for n in body if not can_turn_without(kernel, loop, {n})}
    return replace(
        text,
        issued=int(issued),
        pipes=_highest_first({name: cycles for name, cycles in pipes.items() if cycles}),
        issue=issued * opcodes.ISSUE_CYCLES,
        stall=int(_least(kernel, loop, {n: each[n].stall for n in body})),
        tensor_chain=_tensor_chain(
            [(i, int(n in passed)) for n in body for i, _, _ in of_block[n]]
        ),
        straight=False,
    )


def _least(kernel: Kernel, loop: Loop, costs: Mapping[int, float]) -> float:
    """The least sum of the costs of the blocks on a way around a loop. `costs`: those of the blocks
    that may be passed."""
    least = {}
    pending = [(costs[loop.header], loop.header)]
    while pending:
        cost, n = heappop(pending)
        if n in least:
            continue
        least[n] = cost
        for m in kernel.blocks[n].successors:
            if m == loop.header:
                return cost
            if m in costs:
                heappush(pending, (cost + costs[m], m))
    raise AssertionError(f"no way leads around loop {loop.index} of {kernel.symbol}")


def kernel_bound(kernel: Kernel, trips: Mapping[int, int]) -> Bound:
    """The bound of all instructions that one warp executes. `trips`: trips of the loops, as in
    `phases.block_executions`, whose errors it raises."""
    times = block_executions(kernel, trips)
    return _bound(
        [
            (instruction, kind, times[instruction.block])
            for instruction, kind in with_buckets(kernel)
            if times[instruction.block] and kind is not Bucket.PADDING
        ],
        kernel.capability,
    )


def predict(kernel: Kernel, trips: Mapping[int, int], launch: Launch, chip: Chip) -> Prediction:
    """The least time of a launch: the time of the SM with the most blocks.

    `trips`: trips of the loops, as in `phases.block_executions`.

    Raises NotDeterminedError where the text does not tell what is executed, or a tensor instruction
    has no known cost, and SassError for a kernel that does not fit on an SM.
    """
    found = kernel_bound(kernel, trips)
    if not found.tells_tensor:
        raise NotDeterminedError(
            f"{kernel.name} has tensor instructions whose cost is not known for "
            f"{kernel.architecture}: the least time of a launch cannot be told"
        )
    require_threads(kernel, launch.threads)
    held = kernel_occupancy(kernel, launch.threads, launch.dynamic_smem_bytes)
    if not held.blocks:
        reason = misfit(kernel, launch.dynamic_smem_bytes)
        raise SassError(f"{kernel.name} does not fit on an SM of {kernel.architecture}: {reason}")
    warps = -(-launch.threads // WARP)
    each = -(-launch.blocks // chip.sms)
    cycles = found.cycles(each * warps)
    cycles[LATENCY] = found.latency * -(-each // held.blocks)
    per_ms = chip.mhz * 1e3
    return Prediction(
        launch,
        chip,
        min(held.blocks, each) * warps,
        {name: value / per_ms for name, value in _highest_first(cycles).items()},
    )


_Executed = tuple[Instruction, Bucket, int]  # the number of times that it is executed, too


def _bound(executed: Sequence[_Executed], capability: int) -> Bound:
    issued = sum(number for _, _, number in executed)
    rows = _rows([(i, number) for i, kind, number in executed if kind in WORK], capability)
    return Bound(
        rows=rows,
        issued=issued,
        pipes=_pipes(rows),
        issue=issued * opcodes.ISSUE_CYCLES,
        stall=sum(stall_cycles(i) * number for i, _, number in executed),
        tensor_chain=_tensor_chain([(i, number) for i, _, number in executed]),
        straight=True,
    )


def _rows(work: Sequence[tuple[Instruction, int]], capability: int) -> tuple[CostRow, ...]:
    numbers: Counter[tuple[str, str, tuple[float | None, str, bool]]] = Counter()
    for instruction, number in work:
        name = opcodes.classify(instruction.opcode, instruction.operands)
        if name == opcodes.CONVERSION:
            # of this class some are known and some are not
            name = f"{name} ({instruction.base})"
        found = opcodes.throughput(instruction.opcode, capability)
        cost = (found.cycles, found.source, found.certain) if found else (None, "", False)
        numbers[name, instruction.pipe, cost] += number
    rows = [CostRow(name, pipe, n, *cost) for (name, pipe, cost), n in numbers.items()]
    rows.sort(key=lambda row: (row.cycles is None, -row.number * (row.cycles or 1), row.name))
    return tuple(rows)


def _pipes(rows: Sequence[CostRow]) -> Mapping[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.cycles is not None:
            found[row.pipe] += row.number * row.cycles
    # what only one half of the FMA pipe can do takes half as long from both
    if "fmaheavy" in found:
        found["fma"] += found["fmaheavy"] / 2
    return _highest_first(found)


def _highest_first(numbers: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def _tensor_chain(executed: Sequence[tuple[Instruction, int]]) -> int:
    """Longest chain through the accumulators, in the order of the text.

    A chain goes on through an instruction that changes the register in place, and ends at an
    instruction that writes the register without reading it.
    """
    length: dict[str, int] = {}
    longest = 0
    for instruction, number in executed:
        operands = [operand.strip() for operand in instruction.operands.split(",")]
        registers = _REGISTER.findall(instruction.operands)
        if instruction.base == "HMMA" and len(operands) > 3:
            before = _REGISTER.findall(operands[3])
            length[registers[0]] = number + (length.get(before[0], 0) if before else 0)
            longest = max(longest, length[registers[0]])
        elif registers and _REGISTER.match(operands[0]) and registers[0] not in registers[1:]:
            length.pop(registers[0], None)
    return longest
