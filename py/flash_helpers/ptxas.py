"""What ptxas said about a kernel: the log that ships beside its PTX. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPILING = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_PROPERTIES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class PtxasReport:
    """One kernel compiled for one architecture.

    registers: per thread. stack_bytes, spill_store_bytes and spill_load_bytes: per thread, too.
    """

    symbol: str
    architecture: int
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def parse_ptxas_log(text: str) -> list[PtxasReport]:
    """The reports in the output of `ptxas -v`, in its order.

    Raises ValueError for a kernel whose registers or spills are not told.
    """
    starts = list(_COMPILING.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    reports = []
    for start, end in zip(starts, ends, strict=True):
        about = text[start.end() : end]
        properties, registers = _PROPERTIES.search(about), _REGISTERS.search(about)
        if properties is None or registers is None:
            raise ValueError(
                f"ptxas -v tells no registers or spills of {start[1]} for sm_{start[2]}"
            )
        stack, stores, loads = map(int, properties.groups())
        reports.append(
            PtxasReport(start[1], int(start[2]), int(registers[1]), stack, stores, loads)
        )
    return reports
