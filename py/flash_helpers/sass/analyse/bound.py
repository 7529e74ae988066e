"""What the text of a kernel says about its speed: lower bounds for a loop and for a launch.

Units. A pipe's cost is in cycles of an SM for one warp instruction (see `opcodes`). Added up over a
loop's body it is what one iteration of one warp takes from the pipe, and no arrangement of warps
makes it less: an SM that runs `w` warps needs `w` times that for an iteration of all of them. The
same holds for issuing, 0.25 cycles an instruction. Latency is different: it is what one warp needs
for an iteration when nobody is in its way, and warps wait side by side. So an iteration of all
resident warps takes at least

    max(w * cycles of the busiest pipe, w * cycles of issuing, latency of a warp)

Predicated instructions are counted as if their guard were true. Filler is issued, as the counters
of an H100 show (tools/analysis/check_executed_counts.py), but is taken to occupy no pipe.

Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flash_helpers.gpu import SM_COUNTS
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.results import BenchmarkResults, Measurement
from flash_helpers.sass.analyse.counts import WORK, Bucket, buckets
from flash_helpers.sass.analyse.occupancy import config_occupancy
from flash_helpers.sass.analyse.phases import block_executions, trip_counts
from flash_helpers.sass.analyse.stalls import stall_cycles
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.records import Instruction, Kernel, Loop, SassError

ISSUE = "issue"
LATENCY = "latency"

_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class CostRow:
    """The instructions of one class that have one cost. cycles: for each, None if not known.

    source: of the number, "" if it is not known. certain: False where the source is a guess.
    """

    name: str
    pipe: str
    number: int
    cycles: float | None
    source: str
    certain: bool


@dataclass(frozen=True)
class Bound:
    """What one warp asks for in one pass through a loop's body, or through a whole kernel.

    rows: by class and cost, the most cycles first, unknown costs last. issued: instructions, filler
    included. pipes: cycles of the SM by pipe, of the instructions whose cost is known. issue:
    cycles of the SM. stall: cycles that the control words alone make the warp take. tensor_chain:
    most tensor instructions of which each adds to the result of the one before it. straight: every
    block counted is executed each time; otherwise these are no bounds, but the cost of the text.
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
    def chain_cycles(self) -> tuple[int, int]:
        """What the chain of tensor instructions takes, with the lowest and highest latency that is
        told of one."""
        low, high = opcodes.HMMA_LATENCY
        return self.tensor_chain * low, self.tensor_chain * high

    @property
    def latency(self) -> int:
        """Cycles that a warp needs at least, alone: its stalls, or the chain at lowest latency."""
        return max(self.stall, self.chain_cycles[0])

    def cycles(self, warps: int) -> dict[str, float]:
        """Lower bounds for a pass of so many warps of an SM, in cycles: by pipe, "issue" and
        "latency", the highest first."""
        found = {name: warps * cycles for name, cycles in self.pipes.items()}
        found[ISSUE] = warps * self.issue
        found[LATENCY] = float(self.latency)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def binding(self, warps: int) -> tuple[str, float]:
        """Name and cycles of the highest lower bound."""
        return next(iter(self.cycles(warps).items()))


@dataclass(frozen=True)
class Launch:
    """A problem, and the GPU that it runs on. sms: multiprocessors. mhz: their clock."""

    batch: int
    n_heads: int
    seq_len: int
    sms: int
    mhz: float


@dataclass(frozen=True)
class Prediction:
    """The least that a launch can take, by what limits it. The true time is longer.

    milliseconds: by pipe, "issue" and "latency", the highest first. resident: warps of an SM.
    """

    config: Config
    launch: Launch
    resident: int
    milliseconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        """What takes longest."""
        return next(iter(self.milliseconds))

    @property
    def least_ms(self) -> float:
        """Milliseconds that the launch takes at least."""
        return next(iter(self.milliseconds.values()))

    @property
    def most_tflops(self) -> float:
        """10^12 floating-point operations a second at most."""
        problem = AttentionForward(
            self.launch.batch, self.launch.n_heads, self.launch.seq_len, self.config.d_head
        )
        return problem.operations / (self.least_ms * 1e-3) / 1e12


def loop_bound(kernel: Kernel, loop: Loop) -> Bound:
    """One pass through a loop's body, each block once."""
    times = [int(block.index in loop.blocks) for block in kernel.blocks]
    inside = (set(kernel.blocks[n].successors) & loop.blocks - {loop.header} for n in loop.blocks)
    return _bound(kernel, times, straight=all(len(found) <= 1 for found in inside))


def kernel_bound(kernel: Kernel, trips: Mapping[int, int]) -> Bound:
    """All that one warp executes. trips: as `phases.block_executions` takes them, and it raises as
    that does."""
    return _bound(kernel, block_executions(kernel, trips), straight=True)


def predict(kernel: Kernel, config: Config, launch: Launch) -> Prediction:
    """The least time of a launch: that of an SM that gets as many blocks as the busiest one does.

    Raises NotDeterminedError where the text does not tell what is executed, and SassError for a
    kernel that does not fit on an SM.
    """
    found = kernel_bound(kernel, trip_counts(kernel, config, launch.seq_len))
    held = config_occupancy(kernel, config)
    if not held.blocks:
        raise SassError(
            f"{config.short_form()} does not fit on an SM of {kernel.architecture}: its "
            f"{' and '.join(held.limiters)} leave room for no block"
        )
    blocks = launch.batch * launch.n_heads * -(-launch.seq_len // config.B_r)
    each = -(-blocks // launch.sms)
    cycles = found.cycles(each * config.n_warps)
    cycles[LATENCY] = found.latency * -(-each // held.blocks)
    per_ms = launch.mhz * 1e3
    ordered = sorted(cycles.items(), key=lambda item: -item[1])
    return Prediction(
        config=config,
        launch=launch,
        resident=min(held.blocks, each) * config.n_warps,
        milliseconds=MappingProxyType({name: value / per_ms for name, value in ordered}),
    )


def measured_launch(
    results: BenchmarkResults, config: Config, seq_len: int
) -> tuple[Launch, Measurement] | None:
    """The launch that was timed and its time, at the median clock while it was; None if there is no
    such measurement, no clock was read, or the GPU's number of SMs is not known."""
    found = results.find(config.short_form(), config.dtype.short, seq_len)
    sms = SM_COUNTS.get(results.provenance.gpu)
    mhz = next(
        (
            c.sm_mhz[1]
            for c in results.clocks
            if (c.dtype, c.seq_len) == (config.dtype.short, seq_len)
        ),
        None,
    )
    if found is None or sms is None or mhz is None:
        return None
    return Launch(found.batch, found.n_heads, found.seq_len, sms, mhz), found


def _bound(kernel: Kernel, times: Sequence[int], straight: bool) -> Bound:
    kinds = buckets(kernel.instructions)
    executed = [
        (instruction, kind, times[instruction.block])
        for instruction, kind in zip(kernel.instructions, kinds, strict=True)
        if times[instruction.block] and kind is not Bucket.PADDING
    ]
    issued = sum(number for _, _, number in executed)
    rows = _rows([(i, number) for i, kind, number in executed if kind in WORK], kernel.capability)
    return Bound(
        rows=rows,
        issued=issued,
        pipes=_pipes(rows),
        issue=issued * opcodes.ISSUE_CYCLES,
        stall=sum(stall_cycles(i) * number for i, _, number in executed),
        tensor_chain=_tensor_chain([(i, number) for i, _, number in executed]),
        straight=straight,
    )


def _rows(work: Sequence[tuple[Instruction, int]], capability: int) -> tuple[CostRow, ...]:
    numbers: Counter[tuple[str, str, opcodes.Throughput | None]] = Counter()
    for instruction, number in work:
        name = opcodes.classify(instruction.opcode, instruction.operands)
        if name == opcodes.CONVERSION:
            # of this class some are known and some are not
            name = f"{name} ({instruction.base})"
        cost = opcodes.throughput(instruction.opcode, instruction.operands, capability)
        numbers[name, instruction.pipe, cost] += number
    rows = (
        CostRow(
            name,
            pipe,
            number,
            cost.cycles if cost else None,
            cost.source if cost else "",
            cost.certain if cost else False,
        )
        for (name, pipe, cost), number in numbers.items()
    )
    return tuple(
        sorted(
            rows, key=lambda row: (row.cycles is None, -row.number * (row.cycles or 1), row.name)
        )
    )


def _pipes(rows: Sequence[CostRow]) -> Mapping[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.cycles is not None:
            found[row.pipe] += row.number * row.cycles
    # what only one half of the FMA pipe can do takes half as long from both
    if "fmaheavy" in found:
        found["fma"] += found["fmaheavy"] / 2
    return MappingProxyType(dict(sorted(found.items(), key=lambda item: -item[1])))


def _tensor_chain(executed: Sequence[tuple[Instruction, int]]) -> int:
    """Longest chain through the accumulators, in the order of the text.

    A chain goes on through an instruction that changes the register in place, and ends where one
    writes it without reading it.
    """
    length: dict[str, int] = {}
    longest = 0
    for instruction, number in executed:
        operands = [operand.strip() for operand in instruction.operands.split(",")]
        registers = _REGISTER.findall(instruction.operands)
        if opcodes.classify(instruction.opcode) == opcodes.TENSOR and len(operands) > 3:
            before = _REGISTER.findall(operands[3])
            length[registers[0]] = number + (length.get(before[0], 0) if before else 0)
            longest = max(longest, length[registers[0]])
        elif registers and _REGISTER.match(operands[0]) and registers[0] not in registers[1:]:
            length.pop(registers[0], None)
    return longest
