"""The fields of an instruction word that no disassembler prints.

The bit positions are those of Triton's tools/disasm.py and CuAssembler's CuControlCode.py; they are
the same from sm_70 to sm_90.
"""

from __future__ import annotations

import functools

from flash_helpers.sass.read.records import Control

CONTROL_BIT = 105  # the scheduling fields begin here
NO_SCOREBOARD = 7


def decode_control(encoding: int) -> Control:
    """The scheduling fields of an instruction word."""
    return _decode(encoding >> CONTROL_BIT)


@functools.cache
def _decode(bits: int) -> Control:
    write, read = bits >> 5 & 7, bits >> 8 & 7
    return Control(
        stall=bits & 15,
        yields=not bits >> 4 & 1,
        write_scoreboard=None if write == NO_SCOREBOARD else write,
        read_scoreboard=None if read == NO_SCOREBOARD else read,
        wait_mask=bits >> 11 & 63,
        reuse=bits >> 17 & 7,
    )


def control_text(control: Control) -> str:
    """The fields in columns of fixed width, such as "s02 y w0 r- b:01---- u:a--".

    The columns are: stall cycles; y where the scheduler may turn to another warp; the scoreboards
    that the write and the reads raise; the scoreboards waited for; the operands kept in the cache.
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
