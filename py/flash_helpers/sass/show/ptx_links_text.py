"""PTX instructions and the SASS that each became, for a reader."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.console.tables import Table
from flash_helpers.sass.analyse.ptx_links import KernelPtx, depends_on, fan_out, sass_by_ptx_line
from flash_helpers.sass.read.records import Instruction, Kernel
from flash_helpers.sass.read.symbols import with_demangled_symbols

_MOST_MADE = 4  # SASS opcodes in a row of the fan-out


@dataclass(frozen=True)
class LinkFormat:
    """Parts of links to print: PTX, SASS, and the numbers of lines and addresses."""

    ptx: bool
    sass: bool
    numbers: bool


def _ptx_text(ptx: KernelPtx, line: int, shape: LinkFormat) -> str:
    return f"{line:5}  {ptx.text(line)}" if shape.numbers else ptx.text(line)


def _sass_text(instruction: Instruction, shape: LinkFormat) -> str:
    text = with_demangled_symbols(instruction.text)
    return f"{instruction.address:#06x}  {text}" if shape.numbers else text


def slice_text(kernel: Kernel, ptx: KernelPtx, line: int, depth: int, shape: LinkFormat) -> str:
    """An instruction of the PTX, what it depends on, and the SASS that each became.

    Each step back is indented, and names the registers that it hands on. Raises SassError if the
    line holds no instruction.
    """
    made = sass_by_ptx_line(kernel)
    lines = []
    for dependence in depends_on(ptx, line, depth):
        indent = "  " * dependence.depth
        sass = made.get(dependence.line, ())
        if shape.ptx:
            given = ", ".join(dependence.registers)
            note = f"   // {given}" if given else ""
            lines.append(f"{indent}{_ptx_text(ptx, dependence.line, shape)}{note}")
        if shape.sass:
            prefix = f"{indent}    -> " if shape.ptx else ""
            lines += [prefix + _sass_text(instruction, shape) for instruction in sass]
            if shape.ptx and not sass:
                lines.append(f"{prefix}nothing of its own")
    return "\n".join(lines) + "\n"


def fan_out_text(kernel: Kernel, ptx: KernelPtx, shape: LinkFormat) -> str:
    """Table of the SASS made of the PTX, by opcode; the instructions that became several; and those
    that vanished."""
    found = fan_out(kernel, ptx)
    total = sum(found.counts.values())
    rows = [
        [
            row.opcode,
            str(row.instructions),
            str(row.sass),
            str(row.several or ""),
            str(row.vanished or ""),
            ", ".join(f"{number} {opcode}" for opcode, number in row.made[:_MOST_MADE])
            + (", ..." if len(row.made) > _MOST_MADE else ""),
        ]
        for row in found.opcodes
    ]
    header = ["PTX", "number", "SASS", "several", "vanished", "became"]
    table = Table(header, rows, "lrrrrl").text(maxcolwidths=[50, None, None, None, None, 44])
    made = sass_by_ptx_line(kernel)
    parts = [
        f"{len(found.counts)} PTX instructions became {total} SASS instructions; "
        f"{found.without_ptx} more name no PTX instruction",
        table,
    ]
    for title, wanted in (
        ("became several", lambda number: number > 1),
        ("vanished, or was merged into another", lambda number: number == 0),
    ):
        lines = []
        for line in sorted(line for line, number in found.counts.items() if wanted(number)):
            if shape.ptx:
                lines.append(_ptx_text(ptx, line, shape))
            if shape.sass:
                prefix = "    -> " if shape.ptx else ""
                lines += [prefix + _sass_text(i, shape) for i in made.get(line, ())]
        if lines:
            parts.append("\n".join([f"[{title}]", *lines]))
    return "\n\n".join(parts) + "\n"
