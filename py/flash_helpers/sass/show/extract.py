"""Listings, control-flow graphs and PTX of kernels, for reading and for other programs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.console.files import write_if_different
from flash_helpers.console.tables import known
from flash_helpers.sass.read.choice import choose, members_named
from flash_helpers.sass.read.containers import Member, members_of, ptx_of, read_cubins
from flash_helpers.sass.read.control import control_text
from flash_helpers.sass.read.reader import FoundKernel
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel, SassError

_TEXT_COLUMN = 66  # where what follows an instruction begins
_LONGEST_NAME = 150  # of a file; file systems allow 255 bytes with all suffixes
_SHOWN_LINES = 16  # of a block in a graph
_CONVERGENCE = ("BSSY",)  # name an address, too, where diverged lanes meet
_TARGET = re.compile(r"^\.target\s+(sm_\w+)", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_ADDRESS_AT_END = re.compile(r"0x([0-9a-f]+)$")


def listing_text(kernel: Kernel, offsets: bool = True) -> str:
    """A kernel as text, one instruction per line.

    The code is written as nvdisasm writes it, so that programs which read its listings read this
    one::

        // kernel NAME                                                       comments
        // origin, compiler, resources: "name value" joined by ", "
                .target sm_90
                .section        .text.SYMBOL,"ax",@progbits
        // block 3, loop 0, depth 1
        .L_2:
        /*0120*/  @!P0 BRA `(.L_5) ;  // 0xENCODING | CONTROL | live 8 0 17 1 | ptx 40 | a.cu:7

    - Comment lines begin with //. A label line is .L_N: before the instruction that it names;
      labels are counted in the order of their addresses, and jumps name them as `(.L_N).
    - An instruction line is its address in hexadecimal; guard, opcode, operands, semicolon; then,
      behind //, columns that " | " separates.
    - 0xENCODING: its 16 bytes, little endian, as one number of 32 hexadecimal digits.
    - CONTROL is described at `control.control_text`.
    - spill: the cubin marks the instruction as spilling a register, or as bringing one back.
    - live: registers, predicates, uniform registers and uniform predicates in use. Left out where
      the disassembler does not tell.
    - ptx: the line of the embedded PTX. Left out where unknown.
    - The CUDA line as FILE:LINE, then " < " and each line it was inlined at. Left out without line
      information.

    `offsets`: False leaves out addresses, encodings, live registers and line numbers, all of which
    shift with every inserted instruction, so that `diff` shows what changed.
    """
    labels = _labels(kernel)
    lines = _header(kernel)
    for block in kernel.blocks:
        loop = _loop_of(kernel, block)
        place = "" if loop is None else f", loop {loop}, depth {kernel.loops[loop].depth}"
        lines.append(f"// block {block.index}{place}")
        for instruction in _instructions(kernel, block):
            if instruction.address in labels:
                lines.append(f"{labels[instruction.address]}:")
            lines.append(_instruction_line(instruction, labels, offsets))
    return "\n".join(lines) + "\n"


def _header(kernel: Kernel) -> list[str]:
    resources = kernel.resources
    threads = "any" if resources.max_threads is None else str(resources.max_threads)
    return [
        f"// {'device function' if kernel.is_function else 'kernel'} {kernel.name}",
        f"// origin {kernel.origin}",
        f"// compiler {kernel.compiler} {kernel.compiler.options}".rstrip(),
        f"// registers {resources.registers}, static shared memory {resources.static_smem_bytes}, "
        f"stack {known(resources.stack_bytes)}, "
        f"spill stores {known(resources.spill_store_bytes)}, "
        f"spill loads {known(resources.spill_load_bytes)}, barriers {resources.barriers}, "
        f"threads {threads}",
        f"// instructions {len(kernel.instructions)}, blocks {len(kernel.blocks)}, "
        f"loops {len(kernel.loops)}",
        f"\t.target\t{kernel.architecture}",
        f'\t.section\t.text.{kernel.symbol},"ax",@progbits',
    ]


def _loop_of(kernel: Kernel, block: Block) -> int | None:
    return kernel.instructions[block.start // INSTRUCTION_BYTES].loop


def _instructions(kernel: Kernel, block: Block) -> Sequence[Instruction]:
    return kernel.instructions[block.start // INSTRUCTION_BYTES : block.end // INSTRUCTION_BYTES]


def _named_address(instruction: Instruction) -> int | None:
    """The address at the end of the operands of a jump or of BSSY, within the kernel."""
    if instruction.target is not None:
        return instruction.target
    if instruction.base in _CONVERGENCE and (match := _ADDRESS_AT_END.search(instruction.operands)):
        return int(match[1], 16)
    return None


def _labels(kernel: Kernel) -> dict[int, str]:
    named = {_named_address(instruction) for instruction in kernel.instructions}
    there = (i.address for i in kernel.instructions if i.address in named)
    return {address: f".L_{number}" for number, address in enumerate(there)}


def _text(instruction: Instruction, labels: Mapping[int, str]) -> str:
    """The instruction as nvdisasm prints it: guards in a column, labels for addresses."""
    operands = instruction.operands
    address = _named_address(instruction)
    if address is not None and address in labels:
        *others, _ = operands.split(", ")
        operands = ", ".join([*others, f"`({labels[address]})"])
    words = f"{instruction.opcode} {operands}".rstrip()
    return f"{instruction.predicate:>6} {words} ;"


def _instruction_line(instruction: Instruction, labels: Mapping[int, str], offsets: bool) -> str:
    text = _text(instruction, labels)
    notes = [control_text(instruction.control), *["spill"] * instruction.is_spill]
    if not offsets:
        return f"{text:<{_TEXT_COLUMN}} // {' | '.join(notes)}"
    notes.insert(0, f"0x{instruction.encoding:032x}")
    if live := instruction.live:
        registers = f"{live.general:3} {live.predicate} {live.uniform:2} {live.uniform_predicate}"
        notes.append(f"live {registers}")
    if instruction.ptx_line is not None:
        notes.append(f"ptx {instruction.ptx_line}")
    if instruction.source:
        notes.append(" < ".join(map(str, instruction.source)))
    return f"/*{instruction.address:04x}*/ {text:<{_TEXT_COLUMN}} // {' | '.join(notes)}"


def graph_text(kernel: Kernel, offsets: bool = True) -> str:
    """The basic blocks as a graph in the language of Graphviz, each loop in a frame.

    Of long blocks the first and last instructions are shown. `offsets`: False leaves out addresses.
    """
    labels = _labels(kernel)
    lines = [
        f"digraph {_quoted(kernel.symbol)} {{",
        f"    label={_quoted(f'{kernel.name} {kernel.architecture}')};",
        '    node [shape=box, fontname="monospace", fontsize=10];',
    ]
    lines += _loop_frames(kernel, labels, offsets, None, "    ")
    for block in kernel.blocks:
        lines += [f"    b{block.index} -> b{successor};" for successor in block.successors]
    return "\n".join([*lines, "}"]) + "\n"


def _loop_frames(
    kernel: Kernel, labels: Mapping[int, str], offsets: bool, loop: int | None, indent: str
) -> list[str]:
    """The blocks of a loop, or of no loop, and the loops directly inside it."""
    lines = [
        f"{indent}b{block.index} [label={_node_label(kernel, block, labels, offsets)}];"
        for block in kernel.blocks
        if _loop_of(kernel, block) == loop
    ]
    for inner in kernel.loops:
        if inner.parent == loop:
            lines.append(f"{indent}subgraph cluster_{inner.index} {{")
            lines.append(f'{indent}    label="loop {inner.index}";')
            lines += _loop_frames(kernel, labels, offsets, inner.index, indent + "    ")
            lines.append(f"{indent}}}")
    return lines


def _node_label(kernel: Kernel, block: Block, labels: Mapping[int, str], offsets: bool) -> str:
    instructions = _instructions(kernel, block)
    shown = [
        f"{f'{i.address:04x}' if offsets else ''} {_text(i, labels)}".strip() for i in instructions
    ]
    if len(shown) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        shown[half:-half] = [f"... {len(shown) - 2 * half} more"]
    name = f" {labels[block.start]}" if block.start in labels else ""
    count = len(instructions)
    head = f"block {block.index}{name}: {count} instruction{'s' if count != 1 else ''}"
    return _quoted(head, *shown, end="\\l")  # ends a line and puts it to the left


def _quoted(*lines: str, end: str = "") -> str:
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "".join(line + end for line in escaped) + '"'


ReadableName = Callable[[str], str]  # of a symbol


def kernel_list_text(kernels: Sequence[FoundKernel], name: ReadableName = str) -> str:
    """One line per kernel: architecture, symbol, another name if it has one, whether it is a device
    function, and the member if the file holds it several times."""
    times = Counter(kernel.found for kernel in kernels)
    rows = []
    for kernel in kernels:
        row = [f"{kernel.architecture:<7}", kernel.symbol]
        if (other := name(kernel.symbol)) != kernel.symbol:
            row.append(other)
        if kernel.is_function:
            row.append("(device function)")
        if times[kernel.found] > 1:
            row.append(f"@{kernel.member}")
        rows.append(" ".join(row))
    return "\n".join(rows) + "\n"


class FileNames:
    """Names of files, all different, for kernels or modules. `suffix`: suffix of all names. `name`:
    returns the name for a symbol."""

    def __init__(self, suffix: str, name: ReadableName = str) -> None:
        self._suffix = suffix
        self._name = name
        self._given: set[str] = set()

    def of(self, architecture: str, symbol: str) -> str:
        """The file name for one more symbol."""
        stem = re.sub(r"[^\w.$-]", "_", self._name(symbol))
        if len(stem) > _LONGEST_NAME:
            stem = f"{stem[:_LONGEST_NAME]}_{hashlib.sha256(symbol.encode()).hexdigest()[:8]}"
        copies = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
        names = (f"{stem}.{architecture}{copy}{self._suffix}" for copy in copies)
        found = next(name for name in names if name not in self._given)
        self._given.add(found)
        return found


def write_files(folder: Path, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Write each text into the file of its name, and return the files' paths, one per line.

    Raises OSError.
    """
    for name, text in texts:
        write_if_different(folder / name, text)
        yield f"{folder / name}\n"


@dataclass(frozen=True)
class PtxText:
    """The PTX of one module. `name`: without suffix. `architecture`: the architecture that it was
    compiled to, or for. `symbols`: symbols of its kernels. `is_linked`: False for code that
    is to be linked on the device.

    Line N of `text` is line N of the line table of a cubin that it is embedded in.
    """

    name: str
    architecture: str
    text: str
    symbols: Sequence[str]
    is_linked: bool = True


def ptx_texts(
    path: Path, architecture: str | None, names: Iterable[str], member: str = ""
) -> list[PtxText]:
    """The PTX in a file: the text that -lineinfo put into its cubins, or else its PTX members.

    Code that is to be linked is left out where its kernels are linked, too, unless `member` names
    it. `architecture`, `names`, `member`: as in `reader.iter_kernels`. Raises SassError if there is
    none.
    """
    there = members_of(path)
    if member:
        named = members_named(str(path), [m.name for m in there], member)
        there = [m for m in there if m.name in named]
    modules = _embedded(there)
    if not modules or architecture not in (None, *(module.architecture for module in modules)):
        modules = _members(there) or modules
    if not modules:
        raise SassError(
            f"{path} holds no PTX: compile with -lineinfo, which embeds it in the cubin, or for a "
            "virtual architecture, code=compute_90"
        )
    if not member:
        modules = _without_copies(modules)
    found = [(module.architecture, symbol) for module in modules for symbol in module.symbols]
    wanted = set(choose(str(path), found, architecture, names))
    return [m for m in modules if any((m.architecture, symbol) in wanted for symbol in m.symbols)]


def _without_copies(modules: Sequence[PtxText]) -> list[PtxText]:
    """The modules but those to be linked whose kernels are in linked ones."""

    def kernels(module: PtxText) -> set[tuple[str, str]]:
        symbols = _ENTRY.findall(module.text) or module.symbols
        return {(module.architecture, symbol) for symbol in symbols}

    linked = {kernel for module in modules if module.is_linked for kernel in kernels(module)}
    return [module for module in modules if module.is_linked or not kernels(module) <= linked]


def _embedded(members: Iterable[Member]) -> list[PtxText]:
    found = []
    for _, cubin in read_cubins(members):
        for text in cubin.ptx:
            symbols = [k.symbol for k in cubin.kernels if cubin.ptx_of(k.symbol) is text]
            if symbols:
                linked = not cubin.relocatable
                found.append(PtxText(symbols[0], cubin.architecture, text, symbols, linked))
    return found


def _members(members: Sequence[Member]) -> list[PtxText]:
    found = []
    linked = {member.name: member.is_linked for member in members}
    for name, text in ptx_of(members).items():
        match = _TARGET.search(text)
        target = match[1] if match else ""
        stem = name.removesuffix(f".{target}.ptx")
        found.append(PtxText(stem, target, text, _ENTRY.findall(text) or [stem], linked[name]))
    return found
