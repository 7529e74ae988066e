"""Ways of one warp of a thread block through a kernel, from branches on the warp's number.

A kernel with warp roles branches on its threads' number. For one warp, the registers computed from
this number alone are known (`lane_values`), and such a branch is decided. Where a branch depends on
anything else, the warp may take each way, so that a warp is only excluded from blocks that it
cannot reach; `divergence` tells whether warps may differ there. A block is assumed to have one
dimension, unless the kernel asks for the others: then no number of a warp tells its threads.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flash_helpers.sass.analyse.divergence import Origin, jump_origins
from flash_helpers.sass.analyse.lane_values import (
    Lanes,
    WarpState,
    each_lane,
    is_followed,
    written_values,
)
from flash_helpers.sass.analyse.slices import (
    DECIDED,
    LIMIT,
    Slices,
    last_of,
    words_of,
    written_by_routine,
)
from flash_helpers.sass.read.flow import ALWAYS, BRANCHES, CALLS, COMPUTED_JUMPS
from flash_helpers.sass.read.records import Block, Instruction, Kernel

# Where constant bank 0 holds blockDim.x, as the code that ptxas 13.0 makes of it shows.
_THREADS, _THREADS_FROM_100 = 0x0, 0x360
_BY_LANES = (".ANY", ".DIV", ".CONV")  # branches on what the lanes of a warp have in common


@dataclass(frozen=True)
class Decision:
    """The ways that a warp takes at the end of a block. `ways`: the blocks that come next. `known`:
    whether the condition is. `origin`: of the condition. `may_end`:
    whether the warp may end there."""

    ways: tuple[int, ...]
    known: bool
    origin: Origin
    may_end: bool = False


@dataclass(frozen=True)
class WarpWays:
    """The blocks that a warp may execute. `decisions`: by the block that a jump ends. `limits`:
    registers per thread by USETMAXREG where a block begins; 0 where it was not executed before,
    None where it is not known. `at_exit`: the same numbers where the warp may end."""

    decisions: Mapping[int, Decision]
    limits: Mapping[int, int | None]
    at_exit: frozenset[int | None]

    @property
    def blocks(self) -> frozenset[int]:
        """Indices of the blocks."""
        return frozenset(self.limits)


def _is_one_dimensional(kernel: Kernel) -> bool:
    """Whether the kernel asks for no other coordinate of a thread than the first."""
    return not any(
        "SR_TID.Y" in i.operands or "SR_TID.Z" in i.operands for i in kernel.instructions
    )


def ways_of_warps(kernel: Kernel, threads: int, warps: int) -> list[WarpWays]:
    """The ways of the first `warps` warps of a thread block of a number of threads."""
    slices = Slices.of(kernel, is_followed)
    origins = jump_origins(kernel)
    constants = {
        bank: dict(zip(range(0, len(data), 4), memoryview(data).cast("I"), strict=True))
        for bank, data in kernel.constants.items()
    }
    if not _is_one_dimensional(kernel):
        return [_ways_of_warp(kernel, slices, origins, WarpState(None, constants))] * warps
    constants[0] = {_THREADS if kernel.capability < 100 else _THREADS_FROM_100: threads}
    return [
        _ways_of_warp(kernel, slices, origins, WarpState(warp, constants)) for warp in range(warps)
    ]


def _guard(instruction: Instruction) -> str:
    return instruction.predicate.removeprefix("@")


def _runs(instruction: Instruction, state: WarpState) -> Lanes | None:
    """The value of an instruction's guard."""
    return 1 if instruction.predicate in ALWAYS else state.value(_guard(instruction))


def _ways_of_warp(
    kernel: Kernel, slices: Slices, origins: Mapping[int, Origin], start: WarpState
) -> WarpWays:
    """The ways from a state at the entry. `origins`: of the conditions of jumps, by block."""
    start.set(LIMIT, 0)
    before = {0: start}
    decisions: dict[int, Decision] = {}
    at_exit: dict[int, int | None] = {}
    pending = {0}
    while pending:
        block = kernel.blocks[min(pending)]  # mostly after the blocks that lead to it
        pending.remove(block.index)
        state = before[block.index].only(slices.needed[block.index])
        for instruction in slices.deciding[block.index]:
            _execute(instruction, state)
        last = last_of(kernel, block)
        decision = _decision(kernel, block, state, origins.get(block.index, Origin.TOLD))
        if last.base in DECIDED:
            decisions[block.index] = decision
        if decision.may_end:
            at_exit[block.index] = _limit(state)
        for n in decision.ways:
            passed = state.only(slices.needed[n])
            if last.base in CALLS and n == block.index + 1:
                _forget_written(kernel, last, passed, slices.needed[n])
            if n not in before:
                before[n] = passed
                pending.add(n)
            elif before[n].meet(passed):
                pending.add(n)
    limits = {n: _limit(state) for n, state in before.items()}
    return WarpWays(decisions, limits, frozenset(at_exit.values()))


def _limit(state: WarpState) -> int | None:
    lanes = state.values.get(LIMIT)
    return lanes if isinstance(lanes, int) else None


def _forget_written(kernel: Kernel, call: Instruction, state: WarpState, needed: set[str]) -> None:
    """Forget the values of registers that a called routine may write."""
    changed = written_by_routine(kernel, call.target)
    for name in needed if changed is None else needed & changed:
        state.set(name, None)


def _decision(kernel: Kernel, block: Block, state: WarpState, origin: Origin) -> Decision:
    """The blocks that may come next."""
    last = last_of(kernel, block)
    if last.base not in DECIDED:
        return Decision(block.successors, True, origin)
    conditions = [_runs(last, state)]
    if last.base in BRANCHES and "," in last.operands:
        conditions.append(state.value(last.operands.partition(",")[0].strip()))
    if any(kind in last.opcode for kind in _BY_LANES):
        conditions.append(None)
    behind = tuple(n for n in block.successors if n == block.index + 1)
    ahead = tuple(n for n in block.successors if n != block.index + 1)
    if 0 in conditions:
        return Decision(behind, True, origin)
    known = None not in conditions
    if last.target == block.end:
        ahead = behind
    elif last.base in CALLS:
        ahead = block.successors  # and comes back
    elif last.base in COMPUTED_JUMPS:
        targets = _targets(kernel, block, last, state)
        ahead, known = (block.successors, False) if targets is None else (targets, known)
    if any(condition != 1 for condition in conditions):
        ahead = tuple(dict.fromkeys((*ahead, *behind)))
    return Decision(ahead, known, origin, last.base == "EXIT" and not (known and ahead))


def _targets(
    kernel: Kernel, block: Block, jump: Instruction, state: WarpState
) -> tuple[int, ...] | None:
    """The blocks that a computed jump goes to; None if they are not known.

    `BRX R4, -0x20` goes to the sum of R4, the number, and the address of the next instruction.
    """
    parts = [part.strip() for part in jump.operands.split(",")]
    given, offset = state.value(parts[0]), state.value(parts[-1])
    starts = {kernel.blocks[n].start: n for n in block.successors}
    if not jump.base.startswith("BRX") or len(parts) != 2 or given is None or offset is None:
        return None
    told = each_lane(lambda base, number: base + number + block.end, given, offset)
    addresses = {told} if isinstance(told, int) else {*told}
    return tuple(sorted(map(starts.__getitem__, addresses))) if addresses <= {*starts} else None


def _execute(instruction: Instruction, state: WarpState) -> None:
    """Update the known values with the results of an instruction."""
    runs = _runs(instruction, state)
    if runs == 0:
        return
    words = words_of(instruction.opcode, instruction.operands)
    if words.base == "USETMAXREG":
        found = {LIMIT: state.value(words.operands[-1])}
    else:
        found = written_values(words, state)
    for name, new in found.items():
        state.set(name, _guarded(new, state.values.get(name), runs))


def _guarded(new: Lanes | None, old: Lanes | None, runs: Lanes | None) -> Lanes | None:
    """The value of a register behind a write under a guard."""
    if runs == 1 or new == old:
        return new
    if new is None or old is None or runs is None:
        return None
    return each_lane(lambda a, b, p: a if p else b, new, old, runs)
