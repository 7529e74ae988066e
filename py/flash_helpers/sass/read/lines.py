"""Line tables of a cubin: which CUDA line, and which PTX line, an instruction came from.

.debug_line is a DWARF 2 line program (DWARF Debugging Information Format 2.0.0, section 6.2) with
an extended opcode of NVIDIA's, 0x90: the rows that follow were inlined, at the location of the row
whose number in the sequence, counted from 1, is its first operand; 0 ends that. Its second operand
is the callee's name in .debug_str. .nv_debug_line_sass is the same without files: its lines are
those of .nv_debug_ptx_txt. Both readings are checked against `nvdisasm -gi` and `-gp` in the tests.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flash_helpers.sass.read.elf import Cubin
from flash_helpers.sass.read.records import SassError, SourceLine

CUDA_LINES = ".debug_line"
PTX_LINES = ".nv_debug_line_sass"

_VERSIONS = (2, 3, 4)
_DEEPEST = 200  # calls inlined in each other

_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE = 1, 2, 3, 4
_CONST_ADD_PC, _FIXED_ADVANCE_PC = 8, 9
_END_SEQUENCE, _SET_ADDRESS, _INLINED_CALL = 0x01, 0x02, 0x90


@dataclass
class LineTable:
    """Locations in the code of one kernel. chains[i] holds from addresses[i] on, until the next:
    the line, then the lines it was inlined at, outermost last."""

    addresses: list[int] = field(default_factory=list)
    chains: list[tuple[SourceLine, ...]] = field(default_factory=list)

    def at(self, address: int) -> tuple[SourceLine, ...]:
        """The location of an instruction; empty where the table tells none."""
        index = bisect_right(self.addresses, address)
        return self.chains[index - 1] if index else ()


@dataclass(frozen=True)
class _Row:
    address: int
    file: int
    line: int
    inlined_at: int  # number of an earlier row of the program, from 1; 0 for none


def read_line_tables(cubin: Cubin, name: str) -> dict[int, LineTable]:
    """The tables of the section `name` of a cubin, by the index of the code section they are of.

    Empty without that section. Raises SassError for a damaged one.
    """
    section = cubin.sections.get(name)
    if section is None or not section.data:
        return {}
    code_sections = _relocations(cubin, name)
    tables: dict[int, LineTable] = {}
    try:
        at = 0
        while at < len(section.data):
            unit = _Unit(section.data, at, code_sections)
            unit.run(tables)
            at = unit.end
    except (IndexError, struct.error, ValueError) as error:
        raise SassError(
            f"{cubin.origin} is damaged: its section {name} cannot be read ({error})"
        ) from error
    return tables


def relative_to_repository(
    chains: Iterable[tuple[SourceLine, ...]], source: str
) -> list[tuple[SourceLine, ...]]:
    """The chains with paths relative to the folder that `source`, a path in it, was compiled in.

    Files outside of that folder, and all files if none is `source`, keep their paths.
    """
    chains = list(chains)
    files = {line.file for chain in chains for line in chain}
    root = next((file.removesuffix(source) for file in files if file.endswith(f"/{source}")), None)
    if root is None:
        return chains
    short = {
        line: SourceLine(line.file.removeprefix(root), line.line)
        for chain in chains
        for line in chain
    }
    return [tuple(short[line] for line in chain) for chain in chains]


def _relocations(cubin: Cubin, name: str) -> dict[int, int]:
    """Index of the section that the address at an offset of section `name` points into."""
    found: dict[int, int] = {}
    for prefix, entry in ((".rela", "<QII8x"), (".rel", "<QII")):
        section = cubin.sections.get(prefix + name)
        if section is None or len(section.data) % struct.calcsize(entry):
            continue
        for offset, _, symbol in struct.iter_unpack(entry, section.data):
            if symbol < len(cubin.symbols):
                found[offset] = cubin.symbols[symbol].section
    return found


class _Unit:
    """One line program and the state of its reader."""

    def __init__(self, data: bytes, start: int, code_sections: Mapping[int, int]) -> None:
        self.data = data
        self.code_sections = code_sections
        length, version, header_length = struct.unpack_from("<IHI", data, start)
        self.end = start + 4 + length
        if self.end > len(data):
            raise ValueError(f"a program ends at byte {self.end} of {len(data)}")
        if version not in _VERSIONS:
            raise ValueError(f"it is of DWARF version {version}, and 2 to 4 are understood")
        self.at = start + 10
        self.program = self.at + header_length
        self.min_length = self._byte()
        if version >= 4:
            self._byte()  # operations an instruction, 1 except for VLIW machines
        self._byte()  # whether rows begin a statement
        self.line_base = struct.unpack_from("<b", data, self.at)[0]
        self.at += 1
        self.line_range = self._byte()
        self.opcode_base = self._byte()
        if not self.line_range or not self.opcode_base:
            raise ValueError("its header has a line range or an opcode base of 0")
        self.operand_counts = [self._byte() for _ in range(self.opcode_base - 1)]
        folders = [""]
        while folder := self._text():
            folders.append(folder)
        self.files = [""]
        while name := self._text():
            folder = folders[self._uleb()]
            self._uleb(), self._uleb()  # time and size
            self.files.append(os.path.normpath(os.path.join(folder, name)))  # noqa: PTH118
        self.at = self.program

    def _byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def _text(self) -> str:
        end = self.data.index(0, self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text

    def _uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def _sleb(self) -> int:
        start = self.at
        value = self._uleb()
        negative = self.data[self.at - 1] & 0x40
        return value - (1 << 7 * (self.at - start)) if negative else value

    def run(self, tables: dict[int, LineTable]) -> None:
        """Execute the program and add what it says to `tables`."""
        rows: list[_Row] = []
        sequences: list[tuple[int, int, int]] = []  # section, first row, end of rows
        address, file, line, inlined_at, section, first = 0, 1, 1, 0, 0, 0
        while self.at < self.end:
            opcode = self._byte()
            if opcode >= self.opcode_base:
                advance, step = divmod(opcode - self.opcode_base, self.line_range)
                address += advance * self.min_length
                line += self.line_base + step
                rows.append(_Row(address, file, line, inlined_at))
            elif opcode == 0:
                size = self._uleb()
                after = self.at + size
                extended = self._byte()
                if extended == _END_SEQUENCE:
                    sequences.append((section, first, len(rows)))
                    address, file, line, inlined_at, section = 0, 1, 1, 0, 0
                    first = len(rows)
                elif extended == _SET_ADDRESS:
                    section = self.code_sections.get(self.at, 0)
                    address = int.from_bytes(self.data[self.at : after], "little")
                elif extended == _INLINED_CALL:
                    number = self._uleb()
                    inlined_at = first + number if number else 0
                self.at = after
            elif opcode == _COPY:
                rows.append(_Row(address, file, line, inlined_at))
            elif opcode == _ADVANCE_PC:
                address += self._uleb() * self.min_length
            elif opcode == _ADVANCE_LINE:
                line += self._sleb()
            elif opcode == _SET_FILE:
                file = self._uleb()
            elif opcode == _CONST_ADD_PC:
                address += (255 - self.opcode_base) // self.line_range * self.min_length
            elif opcode == _FIXED_ADVANCE_PC:
                address += int.from_bytes(self.data[self.at : self.at + 2], "little")
                self.at += 2
            else:
                for _ in range(self.operand_counts[opcode - 1]):
                    self._uleb()
        if self.at != self.end:
            raise ValueError("its program does not end where its header says")
        chains = self._chains(rows)
        for section, first, end in sequences:
            _add(tables.setdefault(section, LineTable()), rows[first:end], chains[first:end])

    def _chains(self, rows: list[_Row]) -> list[tuple[SourceLine, ...]]:
        chains: list[tuple[SourceLine, ...]] = []
        for number, row in enumerate(rows, 1):
            if row.inlined_at >= number:  # also what keeps chains finite
                raise ValueError(f"row {number} is inlined at row {row.inlined_at}")
            if row.file >= len(self.files) and row.file:
                raise ValueError(f"row {number} is of file {row.file} of {len(self.files) - 1}")
            if row.line < 0:
                raise ValueError(f"row {number} is of line {row.line}")
            caller = chains[row.inlined_at - 1] if row.inlined_at else ()
            if len(caller) >= _DEEPEST:
                raise ValueError(f"row {number} is inlined more than {_DEEPEST} calls deep")
            chains.append((SourceLine(self.files[row.file], row.line), *caller))
        return chains


def _add(table: LineTable, rows: Iterable[_Row], chains: Iterable[tuple[SourceLine, ...]]) -> None:
    """Of the rows at one address the last one counts: those before it are call sites."""
    last = dict(zip(table.addresses, table.chains, strict=True))
    last.update(zip((row.address for row in rows), chains, strict=True))
    table.addresses = sorted(last)
    table.chains = [last[address] for address in table.addresses]
