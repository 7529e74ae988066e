"""Registers that instructions read and write: nvdisasm's table of live ranges is the witness."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flash_helpers.sass.read.disassembler import find_disassembler, run_program
from flash_helpers.sass.read.flow import CALLS
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.registers import accesses, operation_accesses, unprinted_reads

pytestmark = pytest.mark.slow

FILES = [
    *(f"registers.sm_{architecture}" for architecture in (75, 80, 90, 120)),
    *(f"{name}.sm_{a}" for name in ("several", "spills", "predicates") for a in (80, 90)),
    "ends.sm_90",
    "roles.sm_90a",
]
KINDS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}


class Marked(NamedTuple):
    """The registers that an instruction is told to write and to read."""

    written: set[str]
    read: set[str]


def live_ranges(path: Path) -> Iterator[tuple[str, int, Marked]]:
    """Kernel, address and registers of each instruction, of the table's columns."""
    program = find_disassembler("nvdisasm").path
    kernel, kinds, columns = "", [], []
    for line in run_program(program, "-c", "-plr", "-lrm", "wide", path).split("\n"):
        if section := re.search(r"\.section\s+\.text\.([^\s,]+)", line):
            kernel = section[1]
        at = line.find("// |")
        table = line[at:]
        if at < 0:
            continue
        if "GPR" in table:
            kinds = re.findall(r"\w+", table)
        elif table.startswith("// |  #") or table.startswith("// | #"):
            bars = [n for n, c in enumerate(table) if c == "|"]
            columns = [
                (f"{KINDS[kind]}{match[0]}", bars[n] + match.start(), bars[n] + match.end())
                for n, kind in enumerate(kinds)
                for match in re.finditer(r"\d+", table[bars[n] : bars[n + 1]])
            ]
        elif address := re.match(r"\s*/\*([0-9a-f]+)\*/", line):
            cells = {name: table[start:end].strip() for name, start, end in columns}
            yield (
                kernel,
                int(address[1], 16),
                Marked(
                    {name for name, mark in cells.items() if mark and mark in "^x"},
                    {name for name, mark in cells.items() if mark and mark in "vx"},
                ),
            )


@pytest.mark.parametrize("name", FILES)
def test_are_those_that_nvdisasm_marks(name: str, planted: Path) -> None:
    path = planted / f"{name}.cubin"
    kernels = {kernel.symbol: kernel for kernel in load_kernels(path)}
    seen = set()
    for symbol, address, marked in live_ranges(path):
        operation = kernels[symbol].instructions[address // 16]
        if operation.base in CALLS:  # it tells what the routine changes
            continue
        seen.add(operation.base)
        found = [a for a in operation_accesses(operation) if a.name[0] != "B"]
        written = {a.name for a in found if a.is_written}
        read = {a.name for a in found if not a.is_written} | {*unprinted_reads(operation)}
        if "PR" in operation.operands:  # nobody reads the others
            assert marked.read <= read
            read = marked.read
        assert (written, read) == (marked.written, marked.read), operation.text
    assert len(seen) > (50 if name.startswith("registers") else 5)


class TestAccesses:
    @pytest.mark.parametrize(
        ("text", "written", "read"),
        [
            ("FFMA R9, R0, R5, R6", "R9", "R0 R5 R6"),
            ("@!P0 FADD R1, -|R2|, 1", "R1", "P0 R2"),
            ("STG.E.64 desc[UR4][R2.64+0x8], R6", "", "UR4 UR5 R2 R3 R6 R7"),
            ("LDG.E.SYS R0, [R2]", "R0", "R2 R3"),  # of sm_75
            ("BREAK P0, B1", "B1", "P0"),
            ("BSSY B0, 0x40", "B0", ""),
            ("VOTE.ANY R0, PT, P1", "R0", "P1"),
            ("HMMA.16816.F16 R8, R16, R6, R8", "R8 R9", "R16 R17 R18 R19 R6 R7 R8 R9"),
            ("HGMMA.64x8x16.F32 R24, R4, gdesc[UR4], R24, gsb0",
             "R24 R25 R26 R27", "R4 R5 R6 R7 UR4 UR5 UR6 UR7 R24 R25 R26 R27"),
            ("IMAD.WIDE.U32 R2, P0, R4, R5, R2", "R2 R3 P0", "R4 R5 R2 R3"),
            ("MOV R4, 32@lo(table)", "R4", ""),
            ("UTMALDG.2D [UR8], [UR6]", "", "UR8 UR9 UR10 UR11 UR6 UR7"),
            ("R2P PR, R8.B1, 0x18", "P3 P4", "R8"),
            ("P2R R29, PR, RZ, 0x3", "R29", "P0 P1"),
            ("NOP", "", ""),
        ],
    )  # fmt: skip
    def test_of(self, text: str, written: str, read: str) -> None:
        guard, _, rest = text.partition(" ") if text[0] == "@" else ("", "", text)
        opcode, _, operands = rest.partition(" ")
        found = accesses(guard, opcode, operands)
        assert [a.name for a in found if a.is_written] == written.split()
        assert [a.name for a in found if not a.is_written] == read.split()
