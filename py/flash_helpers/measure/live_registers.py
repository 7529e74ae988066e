"""Numbers of live registers, as `flash_helpers.sass` finds them, beside those of nvdisasm."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flash_helpers.console.tables import Table
from flash_helpers.measure.results import RecordFile
from flash_helpers.sass.read.containers import Member
from flash_helpers.sass.read.disassembler import find_disassemblers, run_program, version_text
from flash_helpers.sass.read.reader import Chosen, load_kernels
from flash_helpers.sass.read.records import Kernel, LiveRegisters

RESULTS = Path("benchmarks/results/live_registers.json")

Cubins = Sequence[tuple[Member, str]]  # with their architectures
Watched = Callable[[Cubins], Iterable[tuple[Member, str]]]

_COLUMNS = ("GPR", "PRED", "UGPR", "UPRED")  # as the fields of LiveRegisters


def listed(text: str) -> Iterator[tuple[str, int, LiveRegisters]]:
    """Kernel, address and counts of each instruction in a listing of `nvdisasm -plr`, which leaves
    out columns without any."""
    symbol, columns = "", []
    for line in text.split("\n"):
        if section := re.search(r"\.section\s+\.text\.([^\s,]+)", line):
            symbol = section[1]
        if "GPR" in line:
            columns = [cell.strip() for cell in line.partition("// |")[2].split("|")]
        if row := re.match(r"\s*/\*([0-9a-f]{4,})\*/.*// \|(.*)", line):
            counts = dict(zip(columns, row[2].split("|"), strict=False))
            numbers = (int(counts.get(column, "").strip() or 0) for column in _COLUMNS)
            yield symbol, int(row[1], 16), LiveRegisters(*numbers)


def compared(path: Path, nvdisasm: Path) -> list[tuple[Kernel, int, LiveRegisters | None, bool]]:
    """Each instruction of a cubin of which nvdisasm counts the live registers: its kernel, its
    address, the number here, and whether both are equal. Raises SassError."""
    kernels = {kernel.symbol: kernel for kernel in load_kernels(path)}
    text = run_program(nvdisasm, "-c", "-plr", "-lrm", "count", path)
    found = []
    for symbol, address, told in listed(text):
        live = kernels[symbol].instructions[address // 16].live
        found.append((kernels[symbol], address, live, live == told))
    return found


@dataclass(frozen=True)
class LiveRecord:
    """The kernels of one architecture: their number, the number of their instructions, and of those
    whose live registers are equal, of all four kinds."""

    architecture: str
    kernels: int
    instructions: int
    equal: int


@dataclass(frozen=True)
class LiveComparison(RecordFile):
    """The comparison for all listed kernels, by the versions of both programs."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "numbers of equal live registers"

    commit: str
    ptxas: str
    nvdisasm: str
    architectures: tuple[LiveRecord, ...]

    def table(self) -> Table:
        """One row per architecture."""
        rows = [
            [
                record.architecture,
                f"{record.kernels:,}",
                f"{record.instructions:,}",
                f"{record.equal:,}",
                f"{100 * record.equal / record.instructions:.3f}%",
            ]
            for record in self.architectures
        ]
        return Table(("architecture", "kernels", "instructions", "equal", "share"), rows)

    def markdown(self) -> str:
        """The table, and its provenance."""
        return (
            f"{self.table().markdown()}\n\nptxas {self.ptxas}; nvdisasm {self.nvdisasm}; "
            f"commit {self.commit[:7]}."
        )


def compare_kernels(
    chosen: Mapping[str, Chosen], commit: str, watched: Watched = lambda cubins: cubins
) -> LiveComparison:
    """Compare kernels for some architectures. `chosen`: kernels by architecture, of which those for
    another one are left out. `watched`: passes the cubins on, and shows how far it is.

    Raises SassError.
    """
    nvdisasm = find_disassemblers("nvdisasm")[0]
    cubins: dict[str, tuple[Member, str]] = {}
    for architecture, kernels in chosen.items():
        for member, found in kernels:
            if found.architecture == architecture:
                cubins[member.origin] = member, architecture
    symbols: dict[str, set[str]] = {name: set() for name in chosen}
    counted, equal = Counter[str](), Counter[str]()
    compilers = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.cubin"
        for member, architecture in watched([*cubins.values()]):
            path.write_bytes(member.read())
            for kernel, _, _, is_equal in compared(path, nvdisasm.path):
                symbols[architecture].add(kernel.symbol)
                compilers.add(version_text(kernel.compiler.version))
                counted[architecture] += 1
                equal[architecture] += is_equal
    return LiveComparison(
        commit=commit,
        ptxas=", ".join(sorted(compilers)),
        nvdisasm=version_text(nvdisasm.version),
        architectures=tuple(
            LiveRecord(name, len(symbols[name]), counted[name], equal[name]) for name in chosen
        ),
    )
