"""The fields of an instruction word that no disassembler prints.

Bit positions: Triton's tools/disasm.py and CuAssembler's CuControlCode.py; they are the same from
sm_70 to sm_90.
"""

from __future__ import annotations

from flash_helpers.sass.read.records import Control

CONTROL_BIT = 105  # the scheduling fields begin here
NO_SCOREBOARD = 7
TRUE_PREDICATE = 7  # PT, or UPT


def guard(encoding: int) -> tuple[int, bool]:
    """The guard predicate of an instruction word: its number, 7 for PT, and whether it is
    negated."""
    return encoding >> 12 & 7, bool(encoding >> 15 & 1)


def guard_text(encoding: int, uniform: bool = False) -> str:
    """The guard as a disassembler prints it: "" for an instruction that always executes.

    uniform: instructions of the uniform datapath are guarded by UP0 to UP6.
    """
    number, negated = guard(encoding)
    if number == TRUE_PREDICATE and not negated:
        return ""
    name = ("U" if uniform else "") + ("PT" if number == TRUE_PREDICATE else f"P{number}")
    return f"@{'!' if negated else ''}{name}"


def decode_control(encoding: int) -> Control:
    """The scheduling fields of an instruction word."""
    write, read = encoding >> 110 & 7, encoding >> 113 & 7
    return Control(
        stall=encoding >> 105 & 15,
        yields=not encoding >> 109 & 1,
        write_scoreboard=None if write == NO_SCOREBOARD else write,
        read_scoreboard=None if read == NO_SCOREBOARD else read,
        wait_mask=encoding >> 116 & 63,
        reuse=encoding >> 122 & 7,
    )


def control_text(control: Control) -> str:
    """The fields in columns of fixed width, such as "s02 y w0 r- b:01---- r:a--".

    Stall cycles; y where the scheduler may turn to another warp; the scoreboards that the write and
    the reads raise; those waited for; the operands kept in the cache.
    """

    def scoreboard(number: int | None) -> str:
        return "-" if number is None else str(number)

    waits = "".join(str(bit) if control.wait_mask >> bit & 1 else "-" for bit in range(6))
    reuse = "".join(name if control.reuse >> bit & 1 else "-" for bit, name in enumerate("abc"))
    return (
        f"s{control.stall:02} {'y' if control.yields else '-'} "
        f"w{scoreboard(control.write_scoreboard)} r{scoreboard(control.read_scoreboard)} "
        f"b:{waits} u:{reuse}"
    )
