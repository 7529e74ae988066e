"""Links of each PTX instruction: the SASS made of it, and the PTX that it depends on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flash_helpers.ptx.errors import PtxError
from flash_helpers.ptx.read.flow import Phase, Program, build_program
from flash_helpers.ptx.read.module import Address, Operand, Register, parts
from flash_helpers.ptx.read.module import Instruction as PtxInstruction
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.sass.analyse.counts import WORK, with_buckets
from flash_helpers.sass.read.records import Instruction, Kernel, SassError, SourceLine

# Their first operand is read, not written (PTX ISA 9.0, "Instruction Set").
_READS_FIRST_OPERAND = frozenset({"bar", "barrier", "brx", "nanosleep", "bra"})
_REDUCTION = "red"  # bar.red and barrier.red do write a result


def _registers(operand: Operand) -> list[str]:
    return [part.name for part in parts(operand) if isinstance(part, Register)]


def _writes_first(instruction: PtxInstruction) -> bool:
    if not instruction.operands or isinstance(instruction.operands[0], Address):
        return False
    return instruction.name not in _READS_FIRST_OPERAND or instruction.has(_REDUCTION)


def written_registers(instruction: PtxInstruction) -> tuple[str, ...]:
    """The registers that an instruction writes."""
    return tuple(_registers(instruction.operands[0])) if _writes_first(instruction) else ()


def read_registers(instruction: PtxInstruction) -> tuple[str, ...]:
    """The registers that an instruction reads, its guard's too, each once."""
    sources = instruction.operands[1:] if _writes_first(instruction) else instruction.operands
    names = [name for operand in sources for name in _registers(operand)]
    if instruction.guard is not None:
        names.append(instruction.guard.name)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class KernelPtx:
    """The PTX of one kernel. `lines`: the embedded text, line 1 first; `program`: its
    instructions."""

    lines: tuple[str, ...]
    program: Program

    @cached_property
    def at_line(self) -> Mapping[int, tuple[int, ...]]:
        """The indices of the instructions that begin on each line that has some."""
        found: dict[int, tuple[int, ...]] = {}
        for index, instruction in enumerate(self.program.instructions):
            found[instruction.line] = (*found.get(instruction.line, ()), index)
        return found

    @cached_property
    def _predecessors(self) -> Mapping[int, list[int]]:
        """The blocks before each block, and before -1, the end."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, block in enumerate(self.program.blocks):
            for successor in {*block.targets, block.next}:
                found[successor].append(number)
        return found

    def text(self, line: int) -> str:
        """A line of the PTX, without the white space around it."""
        return " ".join(self.lines[line - 1].split())

    def phase(self, index: int) -> Phase:
        """The phase of an instruction."""
        return self.program.blocks[self.program.block_of[index]].phase

    def definitions(self, index: int, register: str) -> tuple[int, ...]:
        """The instructions whose value of a register may reach an instruction, in program order."""
        program = self.program
        found = set()
        to_search = [(program.block_of[index], index)]
        seen: set[int] = set()
        while to_search:
            block, end = to_search.pop()
            for i in range(end - 1, program.blocks[block].start - 1, -1):
                instruction = program.instructions[i]
                if register in written_registers(instruction):
                    found.add(i)
                    # A guarded write may leave the value that was there before.
                    if instruction.guard is None:
                        break
            else:
                unseen = set(self._predecessors[block]) - seen
                seen |= unseen
                to_search += [(before, program.blocks[before].end) for before in unseen]
        return tuple(sorted(found))


def read_kernel_ptx(kernel: Kernel) -> KernelPtx:
    """The PTX that the cubin holds of a kernel.

    Raises SassError if it holds none, or holds PTX that cannot be read.
    """
    if not kernel.ptx:
        raise SassError(f"{kernel.origin} holds no PTX of {kernel.name}: compile it with -lineinfo")
    try:
        return _kernel_ptx(kernel.ptx, kernel.symbol)
    except KeyError:
        raise SassError(f"the PTX in {kernel.origin} has no kernel {kernel.name}") from None
    except PtxError as error:
        raise SassError(f"the PTX in {kernel.origin} cannot be read: {error}") from error


@lru_cache(maxsize=8)  # a page asks for the PTX of a kernel and its parent again and again
def _kernel_ptx(text: str, symbol: str) -> KernelPtx:
    function = read_ptx(text).functions[symbol]
    return KernelPtx(tuple(text.split("\n")), build_program(function))


def sass_by_ptx_line(kernel: Kernel) -> dict[int, tuple[Instruction, ...]]:
    """The SASS instructions that came from each PTX line, by address. Filler and padding, which the
    line table assigns to a line too, are left out."""
    found: dict[int, tuple[Instruction, ...]] = {}
    for instruction, kind in with_buckets(kernel):
        line = instruction.ptx_line
        if line is not None and kind in WORK:
            found[line] = (*found.get(line, ()), instruction)
    return found


@dataclass(frozen=True)
class Dependence:
    """An instruction of a backward slice.

    `line`: line of the PTX. `depth`: 0 for the instruction that was asked for, 1 for its inputs,
    ... `registers`: registers whose value it hands on to an instruction one step nearer.
    """

    line: int
    depth: int
    registers: tuple[str, ...]


def depends_on(ptx: KernelPtx, line: int, depth: int) -> list[Dependence]:
    """The inputs of the instruction on a PTX line: the slice back through registers.

    It goes around loops, but not through memory. `depth`: most steps back. The nearest come first,
    then by line.

    Raises SassError, naming the nearest line with an instruction, if that line holds none.
    """
    if line not in ptx.at_line:
        nearest = min(ptx.at_line, key=lambda other: (abs(other - line), other))
        raise SassError(
            f"line {line} of the PTX (1 to {len(ptx.lines)}) holds no instruction of the kernel: "
            f"the nearest that does is line {nearest}, {ptx.text(nearest)!r}"
        )
    reached: dict[int, int] = dict.fromkeys(ptx.at_line[line], 0)
    handed_on: dict[int, dict[str, None]] = {index: {} for index in reached}
    frontier = list(reached)
    for step in range(1, depth + 1):
        following = []
        for index in frontier:
            for register in read_registers(ptx.program.instructions[index]):
                for definition in ptx.definitions(index, register):
                    if definition not in reached:
                        reached[definition] = step
                        handed_on[definition] = {}
                        following.append(definition)
                    if reached[definition] == step:
                        handed_on[definition][register] = None
        frontier = following
    found = [
        Dependence(ptx.program.instructions[index].line, step, tuple(handed_on[index]))
        for index, step in reached.items()
    ]
    return sorted(found, key=lambda dependence: (dependence.depth, dependence.line))


@dataclass(frozen=True)
class OpcodeFanOut:
    """The SASS made of all PTX instructions of one opcode.

    `sass`: number of SASS instructions made of them. `vanished`: number of PTX instructions that
    became none. `several`: number that became more than one. `made`: the SASS opcodes with their
    numbers, most frequent first.
    """

    opcode: str
    instructions: int
    sass: int
    vanished: int
    several: int
    made: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class FanOut:
    """The SASS made of the PTX instructions of a kernel.

    `counts`: SASS instructions of each line that holds a PTX instruction. `opcodes`: most SASS
    first. `without_ptx`: SASS instructions that name no line with an instruction. Filler and
    padding are left out.
    """

    counts: Mapping[int, int]
    opcodes: tuple[OpcodeFanOut, ...]
    without_ptx: int


def fan_out(kernel: Kernel, ptx: KernelPtx) -> FanOut:
    """Number of SASS instructions that each PTX instruction became, in total and by opcode.

    The line table names one PTX line for each SASS instruction. So an instruction that ptxas merged
    from several PTX instructions counts for one of them, and the others count as vanished.
    """
    made = sass_by_ptx_line(kernel)
    counts = {line: len(made.get(line, ())) for line in ptx.at_line}
    by_opcode: dict[str, list[int]] = defaultdict(list)
    for line, indices in ptx.at_line.items():
        by_opcode[ptx.program.instructions[indices[0]].opcode].append(line)
    opcodes = []
    for opcode, lines in by_opcode.items():
        sass = Counter(i.opcode for line in lines for i in made.get(line, ()))
        opcodes.append(
            OpcodeFanOut(
                opcode=opcode,
                instructions=len(lines),
                sass=sass.total(),
                vanished=sum(not counts[line] for line in lines),
                several=sum(counts[line] > 1 for line in lines),
                made=tuple(sorted(sass.items(), key=lambda item: (-item[1], item[0]))),
            )
        )
    opcodes.sort(key=lambda found: (-found.sass, -found.instructions, found.opcode))
    work = sum(kind in WORK for _, kind in with_buckets(kernel))
    return FanOut(counts, tuple(opcodes), work - sum(counts.values()))


def ptx_sources(kernel: Kernel, text: str) -> dict[int, tuple[SourceLine, ...]]:
    """The CUDA lines of each line of the embedded PTX that holds an instruction, innermost first.

    `text`: the PTX as nvcc wrote it, with the .loc directives that the cubin leaves out. Empty if
    it is not the text that the cubin was compiled from: then its instructions stand on other lines.
    """
    try:
        function = read_ptx(text).functions[kernel.symbol]
        embedded = read_kernel_ptx(kernel).program.function
    except (KeyError, PtxError, SassError):
        return {}
    if [(i.line, i.opcode) for i in function.instructions] != [
        (i.line, i.opcode) for i in embedded.instructions
    ]:
        return {}
    return {
        i.line: tuple(SourceLine(frame.file, frame.line) for frame in i.location.frames())
        for i in function.instructions
        if i.location is not None
    }
