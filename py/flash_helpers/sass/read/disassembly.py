"""Disassembly of kernels by nvdisasm, with their line tables.

nvdisasm runs once on each file, for a listing of the instructions. Control words come from the
code's bytes, live registers from `liveness`. A file that the newest nvdisasm refuses (13.5 refuses
sm_70) is read by an older one.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.sass.read.choice import Found
from flash_helpers.sass.read.containers import Member
from flash_helpers.sass.read.cubin import Cubin, CubinKernel
from flash_helpers.sass.read.disassembler import Disassembler, run_program
from flash_helpers.sass.read.elf import Content
from flash_helpers.sass.read.flow import CALLS, JUMPS, control_flow
from flash_helpers.sass.read.lines import CUDA_LINES, PTX_LINES, LineTable, read_line_tables
from flash_helpers.sass.read.listing import ListedFunction, parse_listing
from flash_helpers.sass.read.liveness import live_registers, why_unknown
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

_JOINED = re.compile(r"((?:^|, )\[[^\[\]]*\])(?=\[)")  # LDGSTS [R1][R2.64] is [R1], [R2.64]
_LABEL = re.compile(r"`\((\.L_\w+)\)|(?<= )(\.L_\w+)@srel")
_FUNCTION = re.compile(r"`\(([^()]+)\)$")  # that a CALL names, or the one that a RET leaves
_OFFSET = re.compile(r"^(U?R\w+) (?=-?0x|`|[.$\w]+$)")  # BRX R2 -0xa0 is R2, -0xa0


@dataclass(frozen=True)
class Disassembly:
    """The output of nvdisasm and the line tables for one kernel, with one item of each per
    instruction. `live`: all None where `liveness.why_unknown` has a reason."""

    operations: tuple[Operation, ...]
    live: tuple[LiveRegisters | None, ...]
    sources: tuple[tuple[SourceLine, ...], ...]
    ptx_lines: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """A kernel to disassemble: the file that holds its cubin, the cubin, the kernel. Requests
    compare by identity, so that they can be keys."""

    member: Member
    cubin: Cubin
    kernel: CubinKernel

    @property
    def found(self) -> Found:
        """Architecture and symbol, by which kernels are chosen."""
        return self.cubin.architecture, self.kernel.symbol


@dataclass(frozen=True)
class Batch:
    """Kernels for one run of nvdisasm: the kernels of one cubin, or self-contained kernels of
    several cubins that can be merged."""

    requests: tuple[Request, ...]
    merged: bool


def batches(requests: Sequence[Request], workers: int) -> list[Batch]:
    """The requests in batches of about equal size, one per worker, unless there are too few
    requests."""
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


def disassemble(tools: Sequence[Disassembler], batch: Batch, folder: Path) -> list[Disassembly]:
    """The disassembly of each request.

    `tools`: nvdisasm in all of its versions, in the order of use. `folder`: folder for the cubins
    that it reads. Raises SassError for a kernel that no version can read.
    """
    if not batch.merged:
        return _disassemble(tools, batch.requests, folder)
    names = [merged_name(index) for index in range(len(batch.requests))]
    header = batch.requests[0].cubin.header
    try:
        with _written(merged_cubin(header, [r.kernel for r in batch.requests]), folder) as path:
            return _read(tools[0], path, [], batch.requests, names)
    except SassError:
        # one damaged kernel must not spoil the others, and the error must name its own cubin
        return [d for request in batch.requests for d in _disassemble(tools, [request], folder)]


def _disassemble(
    tools: Sequence[Disassembler], requests: Sequence[Request], folder: Path
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
            if tool.is_new_enough(cubin.compiler.version):
                try:
                    return _read(tool, path, only, requests, names)
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


def _read(
    tool: Disassembler,
    path: Path,
    only: Sequence[str],
    requests: Sequence[Request],
    names: Sequence[str],
) -> list[Disassembly]:
    """The disassembly of each request, which has that name in the cubin at `path`."""
    text = run_program(tool.path, "-c", *only, path)
    listed = {function.name: function for function in parse_listing(text, "nvdisasm's listing")}
    tables: dict[Member, tuple[dict[int, LineTable], dict[int, LineTable]]] = {}
    found = []
    for request, name in zip(requests, names, strict=True):
        cubin, section = request.cubin, request.kernel.section.index
        if request.member not in tables:
            tables[request.member] = (
                read_line_tables(cubin, CUDA_LINES),
                read_line_tables(cubin, PTX_LINES),
            )
        cuda_lines, ptx_lines = (t.get(section, LineTable()) for t in tables[request.member])
        function = listed.get(name, ListedFunction(name, cubin.architecture))
        operations = _operations(request, function)
        of_ptx = [ptx_lines.at(operation.address) for operation in operations]
        found.append(
            Disassembly(
                operations=operations,
                live=_live(request.kernel, operations),
                sources=tuple(cuda_lines.at(operation.address) for operation in operations),
                ptx_lines=tuple(chain[0].line if chain else None for chain in of_ptx),
            )
        )
    return found


def _operations(request: Request, function: ListedFunction) -> tuple[Operation, ...]:
    """The instructions of a listed function, with their encodings."""
    kernel, code = request.kernel, request.kernel.code
    addresses = range(0, len(code), INSTRUCTION_BYTES)
    words = [int.from_bytes(code[at : at + INSTRUCTION_BYTES], "little") for at in addresses]
    listed = function.operations
    if [operation.address for operation in listed] != [*addresses]:
        raise SassError(
            f"nvdisasm lists {len(listed)} instructions of {plain_name(kernel.symbol)} in "
            f"{request.cubin.origin}, whose {len(code)} bytes are {len(words)}"
        )
    return tuple(
        _operation(operation, word, function, kernel)
        for operation, word in zip(listed, words, strict=True)
    )


def _live(kernel: CubinKernel, operations: Sequence[Operation]) -> tuple[LiveRegisters | None, ...]:
    if why_unknown(operations, kernel.jump_tables, kernel.is_function):
        return (None,) * len(operations)
    blocks, _ = control_flow(operations, kernel.jump_tables)
    return tuple(live_registers(operations, blocks, kernel.block_starts))


def _operation(
    listed: Operation, encoding: int, function: ListedFunction, kernel: CubinKernel
) -> Operation:
    """A listed instruction with labels as addresses, and with the name of a called function."""

    def address(match: re.Match[str]) -> str:
        target = function.labels.get(match[1] or match[2])
        return match[0] if target is None else f"{target:#x}"

    operands = _LABEL.sub(address, _JOINED.sub(r"\1, ", listed.operands))
    if listed.base in JUMPS:
        operands = _OFFSET.sub(r"\1, ", _FUNCTION.sub(r"\1", operands))
    target = listed.target
    if target is None and listed.base in CALLS:
        target = kernel.functions.get(operands.rpartition(", ")[2])
    return replace(listed, encoding=encoding, operands=operands, target=target)
