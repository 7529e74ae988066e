"""Text listings of SASS, as nvdisasm, cuobjdump and this repository's tools print them.

A listing tells less than the cubin that it was made from; `reader` reads cubins. Three things to
know of the formats (nvdisasm and cuobjdump 13):

- without `-c`, nvdisasm also prints the data sections, in lines that begin with an address too;
- with `-plr` it leaves out the NOPs that fill a section;
- `cuobjdump -sass` prints jump targets as addresses, nvdisasm as labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from flash_helpers.console.file_kinds import ELF_MAGIC, FileKind, mistaken
from flash_helpers.sass.read.choice import Found
from flash_helpers.sass.read.flow import BRANCHES, CALLS
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Operation, SassError

READABLE = (
    "readable are the listings of nvdisasm, cuobjdump -sass and tools/build/extract_sass.py, and "
    'lines of "COUNT OPCODE", as sort | uniq -c prints them'
)

# the columns of a table of counts before the opcode: see `counts_in_text`
COUNT_COLUMNS = ("count", "executed", "predicated", "filler", "padding")
_HEADERS = ([*COUNT_COLUMNS, "opcode"], [COUNT_COLUMNS[0], "opcode"])

_START = re.compile(r"\s*/\*(?:([0-9a-f]+)\*/| 0x)")  # an address, or a second half of an encoding
_REMARK = re.compile(r"//|/\* 0x")  # encodings, live registers, lines
_HINT = re.compile(r" ?\(\*\"[^\"]*\"\*\)")  # (*"SpillRefill"*), (*"BRANCH_TARGETS .L_x_1"*)
_INSTRUCTION = re.compile(r"(?:(@!?U?P[0-9T]) )?([A-Z][A-Za-z0-9_.]*)((?: [^;]*)?);")
_SECTION = re.compile(r"\.section (\.text)?\.?([^\s,]*)")
_FUNCTION = re.compile(r"Function : (\S+)")
_ARCHITECTURE = re.compile(r"(?:\.target |code for )(sm_\d+[a-z]?)")
_LABEL = re.compile(r"([.$\w]+):")
_JUMP = re.compile(r"(?:.*, ?)?(?:0x([0-9a-f]+)|`\(([^)]+)\))")
_COUNT = re.compile(r"(\d+)\s+([A-Z][A-Za-z0-9_.]*);?")
_SHOWN = 60  # characters of a line that an error quotes


class Kind(Enum):
    """The kind of a line of a listing."""

    FUNCTION = "function"
    ARCHITECTURE = "architecture"
    LABEL = "label"
    INSTRUCTION = "instruction"
    OTHER = "other"


class Line(NamedTuple):
    """A line of a listing.

    `text`: without address, remark and hints, one space between words. `remark`: the comment behind
    the `text`: encodings, live registers, source lines. `name`: name of the function, the
    architecture or the label. `address`: None for a line without one. `instruction`: predicate,
    opcode and operands.
    """

    kind: Kind
    number: int
    text: str
    remark: str
    name: str
    address: int | None
    instruction: tuple[str, str, str]


def scan(text: str, name: str) -> Iterator[Line]:
    """The lines of a listing, except those with the second half of an encoding.

    `name`: name of the file, for errors. Raises SassError for a line of code that is no
    instruction.
    """
    in_data = False
    for number, line in enumerate(text.split("\n"), start=1):
        start = _START.match(line)
        if start and not start[1]:
            continue
        code, remark = line[start.end() :] if start else line, ""
        if found := _REMARK.search(code):
            code, remark = code[: found.start()], code[found.start() :]
        code = " ".join((_HINT.sub("", code) if '(*"' in code else code).split())
        code = f"{code[:-2]};" if code.endswith(" ;") else code
        kind, called, instruction = Kind.OTHER, "", ("", "", "")
        # asked for ";", as a long line without it would be searched again and again
        if not in_data and ";" in code:
            found = _INSTRUCTION.match(code)
            if found and found.end() == len(code):
                kind, instruction = Kind.INSTRUCTION, (found[1] or "", found[2], found[3].strip())
            elif found or (start and code[0] != ".") or code[-1] == ";":
                raise _no_instruction(name, number, line)
        elif found := _SECTION.match(code):
            in_data = found[1] is None
            kind, called = (Kind.OTHER, "") if in_data else (Kind.FUNCTION, found[2])
        elif found := _FUNCTION.match(code):
            in_data = False
            kind, called = Kind.FUNCTION, found[1]
        elif found := _ARCHITECTURE.match(code):
            kind, called = Kind.ARCHITECTURE, found[1]
        elif code and not in_data:
            if start and code[0] != ".":
                raise _no_instruction(name, number, line)
            if found := _LABEL.fullmatch(code):
                kind, called = Kind.LABEL, found[1]
        address = int(start[1], 16) if start else None
        yield Line(kind, number, code, remark, called, address, instruction)


def _no_instruction(name: str, number: int, line: str) -> SassError:
    """The error of a line that stands among code."""
    return SassError(
        f"{name} line {number}: not an instruction, or one that is cut off: "
        f"{line.strip()[:_SHOWN]!r}; {READABLE}"
    )


@dataclass
class ListedFunction:
    """One function of a listing.

    `name`: its symbol. `architecture`: such as "sm_90". Each is "" where the listing does not tell.
    `lines`: lines with instructions, by address, which counts from 0 in a listing without
    addresses. `labels`: the addresses of labels.
    """

    name: str
    architecture: str
    lines: dict[int, Line] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    _end: int = 0

    @property
    def found(self) -> Found:
        """Architecture and symbol, by which functions are chosen."""
        return self.architecture, self.name

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The instructions in order; encodings are 0, as listings need not have them."""
        return tuple(
            Operation(address, 0, *line.instruction, self._target(*line.instruction[1:]))
            for address, line in self.lines.items()
        )

    def add(self, line: Line, labels: Iterable[str], file: str) -> None:
        """Add an instruction and the labels before it. Raises SassError, naming the file."""
        address = self._end if line.address is None else line.address
        if address % INSTRUCTION_BYTES:
            raise SassError(
                f"{file} line {line.number}: address {address:#x} is not a multiple of "
                f"{INSTRUCTION_BYTES}: only code for sm_70 and later can be read"
            )
        if address < self._end:
            raise SassError(
                f"{file} line {line.number}: address {address:#x} comes again in "
                f"{self.name or 'the listing'}: give each function the line that names it"
            )
        self.lines[address] = line
        self.labels.update(dict.fromkeys(labels, address))
        self._end = address + INSTRUCTION_BYTES

    def _target(self, opcode: str, operands: str) -> int | None:
        match = _JUMP.fullmatch(operands) if opcode.partition(".")[0] in BRANCHES | CALLS else None
        if match is None:
            return None
        return int(match[1], 16) if match[1] else self.labels.get(match[2])


def decode(data: bytes, name: str) -> str:
    """The text of a listing or of a file of counts, with line ends of "\\n".

    `name`: name of the file, for errors. Raises SassError for content that is no text.
    """
    if error := mistaken(name, data, FileKind.SASS):
        raise SassError(error)
    if is_binary(data):
        raise SassError(f"{name} holds bytes that no listing does; {READABLE}")
    return data.decode(errors="replace").replace("\r\n", "\n")


def is_binary(data: bytes) -> bool:
    """Whether a file is no text: an object file, or anything else with zero bytes."""
    return data.startswith(ELF_MAGIC) or b"\0" in data


def parse_listing(text: str, name: str) -> list[ListedFunction]:
    """The functions of a listing that have instructions, in its order.

    `name`: name of the file, for errors. Raises SassError, naming the line, for a text that is no
    listing.
    """
    architecture = ""
    functions: list[ListedFunction] = []
    labels: list[str] = []  # of the next instruction
    for line in scan(text, name):
        if line.kind is Kind.ARCHITECTURE:
            architecture = line.name
        elif line.kind is Kind.LABEL:
            labels.append(line.name)
        elif line.kind is Kind.FUNCTION:
            functions.append(ListedFunction(line.name, architecture))
            labels.clear()
        elif line.kind is Kind.INSTRUCTION:
            if not functions:
                # prose may look like an instruction, but not behind an address
                if line.address is None:
                    raise _no_instruction(name, line.number, line.text)
                functions.append(ListedFunction("", architecture))
            functions[-1].add(line, labels, name)
            labels.clear()
    found = [function for function in functions if function.lines]
    if not found:
        raise _holds_nothing(name, text)
    return found


def _holds_nothing(name: str, text: str) -> SassError:
    """The error of a text without an instruction."""
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    found = f"{first[:_SHOWN]!r} ..." if first else "it is empty"
    return SassError(f"{name} holds no SASS ({found}); {READABLE}")


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

    The keys are those of COUNT_COLUMNS; lines of "COUNT OPCODE" only tell "count". `name`: name of
    the file, for errors. Raises SassError for any other line.
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
