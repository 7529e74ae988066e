"""Text listings of SASS: what nvdisasm, cuobjdump and this repository's tools print.

Read from text, a listing tells less than the cubin it was made from; `reader` reads that. Three
things to know of the formats (nvdisasm and cuobjdump 13):

- without `-c`, nvdisasm also prints the data sections, in lines that begin with an address too;
- with `-plr` it leaves out the NOPs that fill a section;
- `cuobjdump -sass` prints jump targets as addresses, nvdisasm as labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Operation, SassError

READABLE = (
    "readable are the listings of nvdisasm, cuobjdump -sass and tools/build/extract_sass.py, and "
    'lines of "COUNT OPCODE", as sort | uniq -c prints them'
)
ELF_MAGIC = b"\x7fELF"

# the columns of a table of counts before the opcode: see `counts_in_text`
COUNT_COLUMNS = ("count", "executed", "predicated", "filler", "padding")
_HEADERS = ([*COUNT_COLUMNS, "opcode"], [COUNT_COLUMNS[0], "opcode"])

_ADDRESS = re.compile(r"/\*([0-9a-f]+)\*/")
_INSTRUCTION = re.compile(
    r"(?:(?P<predicate>@!?U?P[0-9T])\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)(?P<operands>(?:\s[^;]*)?);"
)
_AFTER = re.compile(r"\s*(?:/\*.*|//.*)?")  # an encoding, live registers, lines
_HINT = re.compile(r" ?\(\*\"[^\"]*\"\*\)")  # (*"SpillRefill"*), (*"BRANCH_TARGETS .L_x_1"*)
_SECTION = re.compile(r"\.section\s+(\.text)?\.?([^\s,]*)")
_FUNCTION = re.compile(r"Function : (\S+)")
_ARCHITECTURE = re.compile(r"(?:\.target\s+|code for )(sm_\d+[a-z]?)")
_LABEL = re.compile(r"([.$\w]+):")
_JUMP = re.compile(r"(?:.*,\s*)?(?:0x([0-9a-f]+)|`\(([^)]+)\))")
_JUMPS = ("BRA", "JMP", "CALL", "JCAL")
_COUNT = re.compile(r"(\d+)\s+([A-Z][A-Za-z0-9_.]*);?")
_SHOWN = 60  # characters of a line that an error quotes


@dataclass(frozen=True, slots=True)
class ListedFunction:
    """The instructions of one function, in order.

    name: its symbol. architecture: such as "sm_90". Each "" where the listing does not tell.
    operations: addresses are counted from 0 where there are none; encodings are 0, as listings need
    not have them.
    """

    name: str
    architecture: str
    operations: tuple[Operation, ...]


@dataclass(slots=True)
class _Line:
    """An instruction as it stands in a listing."""

    address: int
    predicate: str
    opcode: str
    operands: str


@dataclass(slots=True)
class _Function:
    name: str
    architecture: str
    lines: list[_Line] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    next_address: int = 0

    def finished(self) -> ListedFunction:
        operations = (
            Operation(x.address, 0, x.predicate, x.opcode, x.operands, self._target(x))
            for x in self.lines
        )
        return ListedFunction(self.name, self.architecture, tuple(operations))

    def _target(self, line: _Line) -> int | None:
        if line.opcode.partition(".")[0] not in _JUMPS:
            return None
        match = _JUMP.fullmatch(line.operands)
        if match is None:
            return None
        return int(match[1], 16) if match[1] else self.labels.get(match[2])


class _Reader:
    """Reads a listing line by line; `name` stands for the file in errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.architecture = ""
        self.in_data = False
        self.functions: list[_Function] = []
        self.labels: list[str] = []  # of the next instruction

    def read(self, text: str) -> list[ListedFunction]:
        for number, line in enumerate(text.split("\n"), start=1):
            self._read_line(number, line.strip())
        return [function.finished() for function in self.functions if function.lines]

    def _read_line(self, number: int, line: str) -> None:
        if not line or line.startswith("//"):
            return
        if found := _SECTION.match(line):
            self.in_data = found[1] is None
            if not self.in_data:
                self._begin(found[2])
        elif found := _FUNCTION.match(line):
            self.in_data = False
            self._begin(found[1])
        elif found := _ARCHITECTURE.match(line):
            self.architecture = found[1]
        elif not self.in_data and not line.startswith("."):
            self._read_code(number, line)
        elif not self.in_data and (found := _LABEL.match(line)):
            self.labels.append(found[1])

    def _begin(self, name: str) -> None:
        self.functions.append(_Function(name, self.architecture))
        self.labels.clear()

    def _read_code(self, number: int, line: str) -> None:
        address = _ADDRESS.match(line)
        rest = line[address.end() :].lstrip() if address else line
        # asked first, as a long line without it would be searched for it again and again
        found = _INSTRUCTION.match(rest) if ";" in rest else None
        # prose may look like an instruction, but not behind an address or in a function
        in_code = address is not None or bool(self.functions)
        if found and in_code and _AFTER.fullmatch(rest, found.end()):
            self._add(number, int(address[1], 16) if address else None, found)
        elif (found and in_code) or (address and not rest.startswith(".")) or line.endswith(";"):
            raise self._refusal(number, line)
        elif not address and (label := _LABEL.match(line)):
            self.labels.append(label[1])

    def _add(self, number: int, address: int | None, found: re.Match[str]) -> None:
        if not self.functions:
            self.functions.append(_Function("", self.architecture))
        function = self.functions[-1]
        if address is None:
            address = function.next_address
        elif address % INSTRUCTION_BYTES:
            raise SassError(
                f"{self.name} line {number}: address {address:#x} is not a multiple of "
                f"{INSTRUCTION_BYTES}: only code for sm_70 and later can be read"
            )
        elif function.lines and address < function.next_address:
            raise SassError(
                f"{self.name} line {number}: address {address:#x} comes again in "
                f"{function.name or 'the listing'}: give each function the line that names it"
            )
        operands = _HINT.sub("", found["operands"] or "").strip()
        function.lines.append(_Line(address, found["predicate"] or "", found["opcode"], operands))
        function.labels.update(dict.fromkeys(self.labels, address))
        self.labels.clear()
        function.next_address = address + INSTRUCTION_BYTES

    def _refusal(self, number: int, line: str) -> SassError:
        return SassError(
            f"{self.name} line {number} is no instruction of a listing, or is cut off: "
            f"{line[:_SHOWN]!r}; {READABLE}"
        )


def decode(data: bytes, name: str) -> str:
    """The text of a listing or of a file of counts, with line ends of "\\n".

    name: of the file, for errors. Raises SassError for what is empty or no text.
    """
    if not data.strip():
        raise SassError(f"{name} is empty; {READABLE}")
    if is_binary(data):
        raise SassError(f"{name} is no text; {READABLE}")
    return data.decode(errors="replace").replace("\r\n", "\n")


def is_binary(data: bytes) -> bool:
    """Whether a file is no text: an object file, or anything else with zero bytes."""
    return data.startswith(ELF_MAGIC) or b"\0" in data


def parse_listing(text: str, name: str) -> list[ListedFunction]:
    """The functions of a listing that have instructions, in its order.

    name: of the file, for errors. Raises SassError, naming the line, for what is no listing.
    """
    functions = _Reader(name).read(text)
    if not functions:
        first = next((line.strip() for line in text.split("\n") if line.strip()), "")
        raise SassError(f"{name} has no instruction ({first[:_SHOWN]!r} ...); {READABLE}")
    return functions


def _count_rows(text: str) -> Iterator[list[str]]:
    for line in text.split("\n"):
        fields = line.split()
        if fields and not fields[0].startswith("#"):
            yield fields


def is_counts(text: str) -> bool:
    """Whether a text is lines of "COUNT OPCODE", or the table of count_sass_instructions.sh."""
    first = next(_count_rows(text), [])
    return first in _HEADERS or bool(_COUNT.fullmatch(" ".join(first)))


def counts_in_text(text: str, name: str) -> dict[str, Counter[str]]:
    """Instructions by bucket and opcode, of a text that `is_counts`.

    The keys are those of COUNT_COLUMNS; lines of "COUNT OPCODE" only tell "count". name: of the
    file, for errors. Raises SassError for a line that is something else.
    """
    columns: tuple[str, ...] = COUNT_COLUMNS[:1]
    found: dict[str, Counter[str]] = {}
    for fields in _count_rows(text):
        if fields in _HEADERS:
            columns = tuple(fields[:-1])
            continue
        if fields[-1] == "total" or set("".join(fields)) == {"-"}:
            continue
        *numbers, opcode = fields
        if len(numbers) != len(columns) or not _COUNT.fullmatch(f"{numbers[0]} {opcode}"):
            raise SassError(f"{name}: {' '.join(fields)[:_SHOWN]!r} is no count of an opcode")
        for column, number in zip(columns, numbers, strict=True):
            if not number.isdecimal():
                raise SassError(f"{name}: {number!r} is no count of {opcode}")
            found.setdefault(column, Counter())[opcode.rstrip(";")] += int(number)
    return found
