"""Line tables of a cubin: the CUDA line and the PTX line from which each instruction came.

.debug_line is a DWARF 2 line program (DWARF Debugging Information Format 2.0.0, section 6.2) with
an extended opcode of NVIDIA's, 0x90: the rows that follow were inlined, at the location of the row
whose number in the sequence, counted from 1, is its first operand; 0 ends that. Its second operand
is the callee's name in .debug_str. .nv_debug_line_sass is the same without files: its lines are
those of .nv_debug_ptx_txt. Both readings are checked against `nvdisasm -gi` and `-gp` in the tests.
pyelftools reads headers; it would skip NVIDIA's opcode, so that the program runs here.
"""

from __future__ import annotations

import io
import os
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elftools.common.exceptions import ELFParseError
from elftools.common.utils import struct_parse
from elftools.dwarf.structs import DWARFStructs

from flash_helpers.sass.read.cubin import Cubin
from flash_helpers.sass.read.elf import relocations
from flash_helpers.sass.read.records import SassError, SourceLine

CUDA_LINES = ".debug_line"
PTX_LINES = ".nv_debug_line_sass"

_FORMAT = DWARFStructs(little_endian=True, dwarf_format=32, address_size=8)
_VERSIONS = (2, 3, 4)
_LONGEST_NUMBER = 70  # bits, in bytes of 7
_DEEPEST = 200  # calls inlined in each other

_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE = 1, 2, 3, 4
_CONST_ADD_PC, _FIXED_ADVANCE_PC = 8, 9
_END_SEQUENCE, _SET_ADDRESS, _INLINED_CALL = 0x01, 0x02, 0x90


Chain = tuple[SourceLine, ...]  # a line, then the lines it was inlined at, outermost last


@dataclass(frozen=True)
class LineTable:
    """Locations in the code of one kernel: chains[i] holds from addresses[i] on, until the next."""

    addresses: Sequence[int] = ()
    chains: Sequence[Chain] = ()

    def at(self, address: int) -> Chain:
        """The location of an instruction; empty where the table has none."""
        index = bisect_right(self.addresses, address)
        return self.chains[index - 1] if index else ()


def read_line_tables(cubin: Cubin, name: str) -> dict[int, LineTable]:
    """The tables of the section `name` of a cubin, by the index of their code section.

    Empty without that section. Raises SassError for a damaged one.
    """
    section = cubin.sections.get(name)
    if section is None:
        return {}
    code_sections = {
        offset: cubin.symbols[symbol].section
        for offset, symbol in relocations(cubin.sections, name)
        if symbol < len(cubin.symbols)
    }
    found: defaultdict[int, dict[int, Chain]] = defaultdict(dict)
    try:
        at = 0
        while at < len(section.data):
            unit = _Unit(section.data, at, code_sections)
            unit.run(found)
            at = unit.end
    except (ELFParseError, IndexError, struct.error, ValueError) as error:
        raise SassError(
            f"{cubin.origin} is damaged: its section {name} cannot be read ({error})"
        ) from error
    ordered = {index: dict(sorted(chains.items())) for index, chains in found.items()}
    return {index: LineTable([*of], [*of.values()]) for index, of in ordered.items()}


def relative_to_repository(chains: Iterable[Chain], source: str) -> list[Chain]:
    """The chains with paths relative to the folder that `source`, a path in it, was compiled in.

    Files outside of that folder, and all files if none is `source`, keep their paths.
    """
    chains = list(chains)
    distinct = set(chains)
    files = {line.file for chain in distinct for line in chain}
    root = next((file.removesuffix(source) for file in files if file.endswith(f"/{source}")), None)
    if root is None:
        return chains
    short = {
        chain: tuple(SourceLine(line.file.removeprefix(root), line.line) for line in chain)
        for chain in distinct
    }
    return [short[chain] for chain in chains]


def _byte(stream: io.BytesIO) -> int:
    return stream.read(1)[0]


def _number(stream: io.BytesIO) -> tuple[int, int]:
    """A LEB128 number, unsigned, and its bits."""
    value = bits = 0
    while bits < _LONGEST_NUMBER:
        byte = _byte(stream)
        value |= (byte & 0x7F) << bits
        bits += 7
        if byte < 0x80:
            return value, bits
    raise ValueError(f"a number of more than {_LONGEST_NUMBER} bits")


def _unsigned(stream: io.BytesIO) -> int:
    return _number(stream)[0]


def _signed(stream: io.BytesIO) -> int:
    value, bits = _number(stream)
    return value - (1 << bits) if value >> (bits - 1) else value


class _Unit:
    """One line program and the state of its reader."""

    def __init__(self, data: bytes, start: int, code_sections: Mapping[int, int]) -> None:
        self.code_sections = code_sections
        length, version, header_length = struct.unpack_from("<IHI", data, start)
        self.end = start + 4 + length
        if self.end > len(data):
            raise ValueError(f"a program ends at byte {self.end} of {len(data)}")
        if version not in _VERSIONS:
            raise ValueError(f"it is of DWARF version {version}, and 2 to 4 are understood")
        self.stream = io.BytesIO(data)
        self.header = struct_parse(_FORMAT.Dwarf_lineprog_header, self.stream, start)
        if not self.header.line_range:
            raise ValueError("its header has a line range of 0")
        folders = [b"", *self.header.include_directory]
        self.files = [""]
        for entry in self.header.file_entry:
            path = os.path.join(folders[entry.dir_index], entry.name)  # noqa: PTH118
            self.files.append(os.path.normpath(path.decode(errors="replace")))
        self.stream.seek(start + 10 + header_length)

    def run(self, found: defaultdict[int, dict[int, Chain]]) -> None:
        """Execute the program; its rows are added by section and address."""
        chains: list[Chain] = []  # of each row
        sequence: dict[int, Chain] = {}  # of rows at one address the last one counts
        address, file, line, inlined_at, section, first = 0, 1, 1, 0, 0, 0

        def add_row() -> None:
            chains.append(self._chain(chains, file, line, inlined_at))
            sequence[address] = chains[-1]

        header, stream = self.header, self.stream
        while stream.tell() < self.end:
            opcode = _byte(stream)
            if opcode >= header.opcode_base:
                advance, step = divmod(opcode - header.opcode_base, header.line_range)
                address += advance * header.minimum_instruction_length
                line += header.line_base + step
                add_row()
            elif opcode == 0:
                size = _unsigned(stream)
                after = stream.tell() + size
                extended = _byte(stream)
                if extended == _END_SEQUENCE:
                    found[section].update(sequence)
                    sequence.clear()
                    address, file, line, inlined_at, section, first = 0, 1, 1, 0, 0, len(chains)
                elif extended == _SET_ADDRESS:
                    section = self.code_sections.get(stream.tell(), 0)
                    address = int.from_bytes(stream.read(max(size - 1, 0)), "little")
                elif extended == _INLINED_CALL:
                    number = _unsigned(stream)
                    inlined_at = first + number if number else 0
                stream.seek(after)
            elif opcode == _COPY:
                add_row()
            elif opcode == _ADVANCE_PC:
                address += _unsigned(stream) * header.minimum_instruction_length
            elif opcode == _ADVANCE_LINE:
                line += _signed(stream)
            elif opcode == _SET_FILE:
                file = _unsigned(stream)
            elif opcode == _CONST_ADD_PC:
                advance = (255 - header.opcode_base) // header.line_range
                address += advance * header.minimum_instruction_length
            elif opcode == _FIXED_ADVANCE_PC:
                address += int.from_bytes(stream.read(2), "little")
            else:
                for _ in range(header.standard_opcode_lengths[opcode - 1]):
                    _unsigned(stream)
        if stream.tell() != self.end:
            raise ValueError("its program does not end where its header says")

    def _chain(self, chains: Sequence[Chain], file: int, line: int, inlined_at: int) -> Chain:
        """The chain of the next row, inlined at the row with a number that counts from 1; 0 is no
        row."""
        number = len(chains) + 1
        if inlined_at >= number:  # also what keeps chains finite
            raise ValueError(f"row {number} is inlined at row {inlined_at}")
        if file >= len(self.files):
            raise ValueError(f"row {number} is of file {file} of {len(self.files) - 1}")
        if line < 0:
            raise ValueError(f"row {number} is of line {line}")
        caller = chains[inlined_at - 1] if inlined_at else ()
        if len(caller) >= _DEEPEST:
            raise ValueError(f"row {number} is inlined more than {_DEEPEST} calls deep")
        return (SourceLine(self.files[file], line), *caller)
