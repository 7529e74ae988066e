"""Kernels of the installed library, and small edits of their machine code to plant differences."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from sass_text import DEFAULT, of_version

from flash_helpers.kernel_configs import Element
from flash_helpers.measure.machine_code import own_kernels
from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.diff import block_phases
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel

OPERAND_BIT = 1 << 20  # in the field of the first register
STALL_BIT = 1 << 105


@cache
def library_kernel(
    version: int, dtype: Element = Element.BF16, architecture: str = DEFAULT
) -> Kernel:
    """The kernel of a version at the config of the progression."""
    config = of_version(version, dtype)
    return own_kernels(architecture, [config])[config]


def block_of_phase(kernel: Kernel, phase: Phase) -> Block:
    """The longest block of a phase."""
    phases = block_phases(kernel)
    return max(
        (block for block in kernel.blocks if phases[block.index] is phase),
        key=lambda block: block.end - block.start,
    )


def instructions_of(kernel: Kernel, block: Block) -> list[Instruction]:
    """The instructions of a block."""
    return [i for i in kernel.instructions if block.start <= i.address < block.end]


def edit(
    kernel: Kernel, block: Block, change: Callable[[list[Instruction]], Sequence[Instruction]]
) -> Kernel:
    """The kernel with other instructions in one block; what follows moves along."""
    inside = list(change(instructions_of(kernel, block)))
    delta = len(inside) * INSTRUCTION_BYTES - (block.end - block.start)

    def shifted(address: int) -> int:
        return address + delta if address >= block.end else address

    placed = [
        *(i for i in kernel.instructions if i.address < block.start),
        *inside,
        *(i for i in kernel.instructions if i.address >= block.end),
    ]
    return replace(
        kernel,
        instructions=tuple(
            replace(
                instruction,
                address=n * INSTRUCTION_BYTES,
                target=None if instruction.target is None else shifted(instruction.target),
                block=block.index if instruction in inside else instruction.block,
            )
            for n, instruction in enumerate(placed)
        ),
        blocks=tuple(
            replace(other, start=shifted(other.start), end=shifted(other.end))
            for other in kernel.blocks
        ),
    )


def edit_all(kernel: Kernel, change: Callable[[Instruction], Instruction]) -> Kernel:
    """The kernel with each instruction changed."""
    return replace(kernel, instructions=tuple(change(i) for i in kernel.instructions))


def rename_registers(instruction: Instruction) -> Instruction:
    """The instruction with other registers: numbers n become n ^ 4, so that the two or four of one
    operand stay side by side."""

    def renamed(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) ^ 4}"

    operands = re.sub(r"\b(UR|R)(\d+)\b", renamed, instruction.operands)
    if operands == instruction.operands:
        return instruction
    return replace(instruction, operands=operands, encoding=instruction.encoding ^ OPERAND_BIT)
