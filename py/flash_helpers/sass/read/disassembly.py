"""Disassembly of kernels by nvdisasm, with their line tables.

nvdisasm runs twice on each file: as JSON for what the instructions are, and as text for the live
registers, which JSON does not have, and which take most of the time. Control words come from the
code's bytes. Where JSON fails, such as for relocatable code with calls, on which nvdisasm 13.5
crashes, a listing tells the instructions; where that fails too, such as for sm_70, which 13.5
refuses, an older nvdisasm.

Live registers are not told of the NOPs that fill a section, which nvdisasm leaves out of the text,
and not of calls: there it counts what any function of the file might need, 172 between two
instructions of 115 in a kernel that does not even call anything, since ptxas for sm_80 to sm_89
leaves some loops with a CALL.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_helpers.sass.read.choice import Found
from flash_helpers.sass.read.containers import Member
from flash_helpers.sass.read.disassembler import Disassembler, run_program
from flash_helpers.sass.read.elf import Content, Cubin, CubinKernel
from flash_helpers.sass.read.flow import BRANCHES, CALLS
from flash_helpers.sass.read.lines import CUDA_LINES, PTX_LINES, LineTable, read_line_tables
from flash_helpers.sass.read.listing import Kind, parse_listing, scan
from flash_helpers.sass.read.merge import merged_cubin, merged_name
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    LiveRegisters,
    Operation,
    SassError,
    SourceLine,
)
from flash_helpers.sass.read.symbols import plain_name, with_demangled_symbols

LARGEST_BATCH = 48  # kernels: some seconds of work, of which the start is half a second
_SMALLEST_BATCH = 4  # kernels, if there are as many: another start takes longer than they do

_NO_LIVE_REGISTERS = "Cannot print life ranges"  # such as for cubins of CUDA 12
_LIVE_TABLE = "// |"
_LIVE_COLUMNS = ("GPR", "PRED", "UGPR", "UPRED")  # as the fields of LiveRegisters
_JOINED = re.compile(r"((?:^|,)\[[^\[\]]*\])(?=\[)")  # LDGSTS [R1][R2.64] is [R1], [R2.64]
_LABEL = re.compile(r"`\((\.L_\w+)\)|(?<= )(\.L_\w+)@srel")
_OFFSET = re.compile(r"^(U?R\w+) (?=[-`])")  # BRX R2 -0xa0 is R2, -0xa0
_TARGET = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Disassembly:
    """The output of nvdisasm and the line tables for one kernel, an item of each per instruction.
    live: all None where it was not asked for."""

    operations: tuple[Operation, ...]
    live: tuple[LiveRegisters | None, ...]
    sources: tuple[tuple[SourceLine, ...], ...]
    ptx_lines: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """A kernel to disassemble: the file that holds its cubin, the cubin, the kernel. Each is
    itself alone, so that it can be a key."""

    member: Member
    cubin: Cubin
    kernel: CubinKernel

    @property
    def found(self) -> Found:
        """Architecture and symbol, by which kernels are chosen."""
        return self.cubin.architecture, self.kernel.symbol


@dataclass(frozen=True)
class Batch:
    """Kernels that one run of nvdisasm takes: of one cubin, or self-contained ones of several that
    can be merged."""

    requests: tuple[Request, ...]
    merged: bool


def batches(requests: Sequence[Request], workers: int) -> list[Batch]:
    """The requests in batches, of about one size for each worker, unless there are too few."""
    planned: list[Batch] = []
    mergeable: dict[bytes, list[Request]] = {}
    of_cubin: dict[Member, list[Request]] = {}
    for request in requests:
        if request.kernel.self_contained:
            mergeable.setdefault(request.cubin.kind, []).append(request)
        else:
            of_cubin.setdefault(request.member, []).append(request)
    for together in mergeable.values():
        size = min(LARGEST_BATCH, max(_SMALLEST_BATCH, -(-len(together) // workers)))
        for start in range(0, len(together), size):
            planned.append(Batch(tuple(together[start : start + size]), merged=True))
    planned += [Batch(tuple(together), merged=False) for together in of_cubin.values()]
    return planned


def disassemble(
    tools: Sequence[Disassembler], batch: Batch, folder: Path, live: bool = True
) -> list[Disassembly]:
    """The disassembly of each request.

    tools: nvdisasm in all of its versions, the one to begin with first. folder: where cubins are
    written for it. live: with live registers. Raises SassError if none can read one.
    """
    if not batch.merged:
        return _disassemble(tools, batch.requests, folder, live)
    names = [merged_name(index) for index in range(len(batch.requests))]
    header = batch.requests[0].cubin.header
    try:
        with _written(merged_cubin(header, [r.kernel for r in batch.requests]), folder) as path:
            return _read(_JSON, tools[0], path, [], batch.requests, names, live)
    except SassError:
        # one damaged kernel must not spoil the others, and the error must name its own cubin
        return [
            d for request in batch.requests for d in _disassemble(tools, [request], folder, live)
        ]


def _disassemble(
    tools: Sequence[Disassembler], requests: Sequence[Request], folder: Path, live: bool
) -> list[Disassembly]:
    """The disassembly of kernels of one cubin."""
    cubin = requests[0].cubin
    only: list[str] = []
    if len(requests) < len(cubin.kernels):
        only = ["-fun", ",".join(str(request.kernel.symbol_index) for request in requests)]
    names = [request.kernel.symbol for request in requests]
    problems = []
    with _written(requests[0].member.read(), folder) as path:
        for tool in tools:
            for form in (_JSON, _LISTING) if tool.is_new_enough(cubin.compiler.version) else ():
                try:
                    return _read(form, tool, path, only, requests, names, live)
                except SassError as error:
                    problems.append(str(error).replace(str(path), cubin.origin))
    reason = with_demangled_symbols(problems[0])
    if cubin.relocatable:
        reason += " (it was compiled with -rdc=true: link it first, nvcc -dlink -cubin)"
    tried = ", ".join(map(str, tools))
    raise SassError(f"{reason} (tried {tried}: for another, name its toolkit in CUDA_HOME)")


@contextmanager
def _written(cubin: Content, folder: Path) -> Iterator[Path]:
    """A cubin as a file of its own."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        yield Path(file.name)


Functions = dict[str, dict[str, Any]]
LiveTables = dict[str, dict[int, LiveRegisters]]


def _read(
    form: tuple[Sequence[str], Callable[[str], Functions]],
    tool: Disassembler,
    path: Path,
    only: Sequence[str],
    requests: Sequence[Request],
    names: Sequence[str],
    live: bool,
) -> list[Disassembly]:
    """The disassembly of each request, which has that name in the cubin at `path`. form: how
    nvdisasm is asked for the functions, and what reads its answer."""
    options, read = form
    functions = read(run_program(tool.path, *options, *only, path))
    table = ""
    if live:
        try:
            table = run_program(tool.path, "-c", "-plr", "-lrm", "count", *only, path)
        except SassError as error:
            if _NO_LIVE_REGISTERS not in str(error):
                raise
    return _disassemblies(requests, names, functions, _live_registers(table))


def _from_json(text: str) -> Functions:
    """By name."""
    try:
        _, functions = json.loads(text)
        return {function["function-name"]: function for function in functions}
    except (ValueError, TypeError, KeyError) as error:
        raise SassError(f"nvdisasm's JSON cannot be read: {error!r}") from error


def _from_listing(text: str) -> Functions:
    """As in JSON, but for symbols in operands."""
    found = {}
    for function in parse_listing(text, "nvdisasm's listing"):
        items = []
        for o in function.operations:
            operands = _OFFSET.sub(r"\1,", o.operands).replace(", ", ",")
            for label in _LABEL.finditer(operands):
                name = label[1] or label[2]
                if name in function.labels:
                    operands = operands.replace(label[0], f"{function.labels[name]:#x}")
            items.append({"predicate": o.predicate, "opcode": o.opcode, "operands": operands})
        found[function.name] = {"start": 0, "sass-instructions": items}
    return found


_JSON = (("-json",), _from_json)
_LISTING = (("-c",), _from_listing)


def _live_registers(text: str) -> LiveTables:
    """The table that nvdisasm appends to each line."""
    found: LiveTables = {}
    rows: dict[int, LiveRegisters] = {}
    columns: list[str] = []
    distinct: dict[str, LiveRegisters] = {}
    for line in scan(text, "nvdisasm's listing"):
        table = line.remark.removeprefix(_LIVE_TABLE)
        if line.kind is Kind.FUNCTION:
            rows = found.setdefault(line.name, {})
        elif "GPR" in table:
            columns = [cell.strip() for cell in table.split("|")[:-1]]
        elif line.address is not None and table != line.remark:
            if table not in distinct:
                distinct[table] = _live_row(table, columns)
            rows[line.address] = distinct[table]
    return found


def _live_row(table: str, columns: Sequence[str]) -> LiveRegisters:
    counts = dict(zip(columns, table.split("|"), strict=False))
    try:
        return LiveRegisters(*(int(counts.get(c, "").strip() or 0) for c in _LIVE_COLUMNS))
    except ValueError as error:
        raise SassError(f"nvdisasm's live registers {table!r} cannot be read") from error


def _disassemblies(
    requests: Sequence[Request], names: Sequence[str], functions: Functions, live: LiveTables
) -> list[Disassembly]:
    tables: dict[Member, tuple[dict[int, LineTable], dict[int, LineTable]]] = {}
    found = []
    for request, name in zip(requests, names, strict=True):
        kernel, cubin = request.kernel, request.cubin
        if request.member not in tables:
            tables[request.member] = (
                read_line_tables(cubin, CUDA_LINES),
                read_line_tables(cubin, PTX_LINES),
            )
        cuda_lines, ptx_lines = (
            table.get(kernel.section.index, LineTable()) for table in tables[request.member]
        )
        operations = _operations(kernel, functions.get(name), cubin.origin)
        rows = live.get(name, {})
        of_ptx = [ptx_lines.at(operation.address) for operation in operations]
        found.append(
            Disassembly(
                operations=operations,
                live=tuple(None if o.base in CALLS else rows.get(o.address) for o in operations),
                sources=tuple(cuda_lines.at(operation.address) for operation in operations),
                ptx_lines=tuple(chain[0].line if chain else None for chain in of_ptx),
            )
        )
    return found


def _operations(
    kernel: CubinKernel, function: Mapping[str, Any] | None, origin: str
) -> tuple[Operation, ...]:
    """The instructions of one function in nvdisasm's JSON."""
    try:
        listed = function["sass-instructions"] if function else []
        if len(listed) * INSTRUCTION_BYTES != len(kernel.code) or function["start"]:
            raise SassError(
                f"nvdisasm lists {len(listed)} instructions of {plain_name(kernel.symbol)} in "
                f"{origin}, whose "
                f"{len(kernel.code)} bytes are {len(kernel.code) // INSTRUCTION_BYTES}"
            )
        return tuple(
            _operation(index * INSTRUCTION_BYTES, item, kernel) for index, item in enumerate(listed)
        )
    except (TypeError, KeyError) as error:
        raise SassError(
            f"nvdisasm's JSON of {plain_name(kernel.symbol)} in {origin} cannot be read: {error!r}"
        ) from error


def _operation(address: int, item: Mapping[str, Any], kernel: CubinKernel) -> Operation:
    encoding = int.from_bytes(kernel.code[address : address + INSTRUCTION_BYTES], "little")
    opcode = item["opcode"]
    listed = _JOINED.sub(r"\1,", item.get("operands", ""))
    predicate, operands = _guard_and_operands(item.get("predicate", ""), listed.split(","))
    target = None
    if opcode.startswith("BREAK"):
        operands.sort(key=_is_barrier)
    if opcode.partition(".")[0] in BRANCHES | CALLS:
        last = operands[-1]
        name = last.removeprefix("`(").removesuffix(")")  # as a listing has it
        target = int(last, 16) if _TARGET.fullmatch(last) else kernel.functions.get(name)
    return Operation(address, encoding, predicate, opcode, ", ".join(operands), target)


def _is_barrier(operand: str) -> bool:
    """Whether it is the register that BREAK takes lanes out of: the last operand as text, but the
    first in the JSON of nvdisasm 13.5."""
    return operand.startswith("B")


def _guard_and_operands(predicate: str, operands: list[str]) -> tuple[str, list[str]]:
    """Guard and operands at their places. For `@P1 P2R R5, PR, R6, 0x7f` the JSON of nvdisasm 13.5
    has the predicate PR and the operands R5, @P1, R6, 0x7f; without a guard R5, R6, 0x7f."""
    if not predicate or predicate.startswith("@"):
        return predicate, operands
    guards = [operand for operand in operands if operand.startswith("@")]
    if not guards:
        return "", [*operands[:1], predicate, *operands[1:]]
    return guards[0], [predicate if operand == guards[0] else operand for operand in operands]
