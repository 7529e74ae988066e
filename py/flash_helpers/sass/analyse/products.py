"""Gaps between the tensor instructions of one product of a warpgroup. Standard library only.

A warpgroup issues `wgmma` for the same accumulators one after the other, and the tensor cores go on
without a break if nothing comes between. ptxas puts there what the next descriptor takes, which
HGMMA reads from uniform registers: a few UIADD3 and UMOV where it knows that all lanes have the
same one, else R2UR for both of its words, for each HGMMA.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.records import Instruction, Kernel, Loop

_ENDS_GROUP = "gsb"  # the operand of the last instruction of a wgmma.commit_group


@dataclass(frozen=True)
class Gaps:
    """Between the tensor instructions of each product in the text of a loop, all products together.

    instructions: that are executed or predicated. moves: the R2UR among them, from a register of a
    lane to a uniform one.
    """

    instructions: int = 0
    moves: int = 0


def product_gaps(kernel: Kernel, loop: Loop) -> Gaps:
    """The gaps of a loop's products; none of a kernel without tensor instructions of warpgroups.

    A product is a run of them, in the order of addresses, with the same accumulators and of one
    group.
    """
    instructions = moves = 0
    since: list[Instruction] = []
    product: str | None = None  # the accumulators of the one that goes on
    for instruction in kernel.instructions:
        if instruction.block not in loop.blocks or not may_execute(instruction):
            continue
        if instruction.base not in opcodes.GROUP_TENSOR:
            since.append(instruction)
            continue
        accumulators = instruction.operands.partition(",")[0]
        if accumulators == product:
            instructions += len(since)
            moves += sum(i.base == "R2UR" for i in since)
        since = []
        product = None if _ENDS_GROUP in instruction.operands else accumulators
    return Gaps(instructions, moves)
