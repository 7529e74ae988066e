"""Gaps between the tensor instructions of one product of a warpgroup. Standard library only.

A warpgroup issues `wgmma` for the same accumulators one after the other, and the tensor cores go on
without a break if no instruction comes between. HGMMA reads its descriptor from uniform registers,
so ptxas puts the instructions for the next descriptor there. They are a few UIADD3 and UMOV where
ptxas knows that all lanes have the same descriptor. Otherwise they are R2UR for both of its words,
per HGMMA.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.records import Instruction, Kernel, Loop

_ENDS_GROUP = "gsb"  # the operand of the last instruction of a wgmma.commit_group


@dataclass(frozen=True)
class Gaps:
    """Instructions between the tensor instructions of each product in the text of a loop, summed
    over all products.

    `instructions`: number of executed or predicated instructions. `moves`: the R2UR among them,
    from a register of a lane to a uniform one.
    """

    instructions: int = 0
    moves: int = 0


def product_gaps(kernel: Kernel, loop: Loop) -> Gaps:
    """The gaps of a loop's products; none of a kernel without tensor instructions of warpgroups.

    A product is a run of tensor instructions, in the order of addresses, with the same accumulators
    and in one group.
    """
    instructions = moves = 0
    since: list[Instruction] = []
    product: str | None = None  # accumulators of the product that continues
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
