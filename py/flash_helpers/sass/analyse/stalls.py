"""Waits of a warp in a loop, as far as the control words show them. Standard library only."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flash_helpers.sass.analyse.counts import Bucket
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.records import Instruction, Kernel, Loop

_SCOREBOARDS = 6


@dataclass(frozen=True)
class Wait:
    """An instruction that waits for a scoreboard, and the last one before it that raised it.

    `for_result`: it waits for the producer's result; otherwise until the producer's operands have
    been read. `instructions`, `cycles`: distance from the producer to the wait, around the loop if
    need be. The cycles are those of the control words alone, the least latency that the loop hides.
    """

    producer: Instruction
    consumer: Instruction
    for_result: bool
    instructions: int
    cycles: int


@dataclass(frozen=True)
class WaitGroup:
    """The waits of one class of instructions for another. `cycles`: cycles of each wait,
    ascending."""

    producer: str
    consumer: str
    for_result: bool
    cycles: tuple[int, ...]

    @property
    def median(self) -> float:
        """Cycles from producer to wait."""
        return statistics.median(self.cycles)


@dataclass(frozen=True)
class StallGroup:
    """The instructions of one class. `cycles`: cycles that their control words make the warp
    wait."""

    name: str
    instructions: int
    cycles: int


def body_of(kernel: Kernel, loop: Loop) -> tuple[Instruction, ...]:
    """The instructions of a loop in the order of the text, the loops inside it included."""
    return tuple(i for i in kernel.instructions if i.block in loop.blocks)


def stall_cycles(instruction: Instruction) -> int:
    """Cycles before the warp's next instruction; at least one, since a warp issues one instruction
    per cycle."""
    return max(instruction.control.stall, 1)


def scoreboard_waits(kernel: Kernel, loop: Loop) -> list[Wait]:
    """The waits of one iteration, in the order of the text.

    An instruction waits once for all instructions that raised the scoreboard. Scoreboards raised
    before the loop are left out, and so is a wait for a scoreboard that no instruction raised since
    the last wait.
    """
    body = body_of(kernel, loop)
    raised: dict[int, tuple[Instruction, bool, int, int]] = {}
    waits: list[Wait] = []
    now = 0
    for n, instruction in enumerate((*body, *body)):
        control = instruction.control
        for number in range(_SCOREBOARDS):
            if not control.wait_mask >> number & 1 or number not in raised:
                continue
            producer, for_result, at, since = raised.pop(number)
            if n >= len(body):
                waits.append(Wait(producer, instruction, for_result, n - at, now - since))
        for scoreboard, for_result in (
            (control.write_scoreboard, True),
            (control.read_scoreboard, False),
        ):
            if scoreboard is not None:
                raised[scoreboard] = (instruction, for_result, n, now)
        now += stall_cycles(instruction)
    return waits


def group_waits(waits: Iterable[Wait]) -> list[WaitGroup]:
    """The waits by the classes of both instructions, most first."""
    cycles: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for wait in waits:
        key = (_class_of(wait.producer), _class_of(wait.consumer), wait.for_result)
        cycles[key].append(wait.cycles)
    groups = [WaitGroup(*key, tuple(sorted(found))) for key, found in cycles.items()]
    return sorted(groups, key=lambda g: (-len(g.cycles), g.producer, g.consumer, g.for_result))


def group_stalls(body: Sequence[Instruction]) -> list[StallGroup]:
    """The stall counts by class, most cycles first."""
    cycles: dict[str, list[int]] = defaultdict(list)
    for instruction in body:
        cycles[_class_of(instruction)].append(stall_cycles(instruction))
    groups = [StallGroup(name, len(found), sum(found)) for name, found in cycles.items()]
    return sorted(groups, key=lambda group: (-group.cycles, group.name))


def _class_of(instruction: Instruction) -> str:
    if not may_execute(instruction):
        return Bucket.FILLER.value
    return opcodes.classify(instruction.opcode, instruction.operands)
