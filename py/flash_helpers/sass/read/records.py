"""Records of a kernel's machine code: one per instruction, and those of the whole kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flash_helpers.gpu import capability_of
from flash_helpers.sass.read.symbols import plain_name

INSTRUCTION_BYTES = 16  # sm_70 and later


class SassError(ValueError):
    """A file, an architecture, a kernel or a disassembler that cannot be used: the reason, and a
    way out. Tools print it and exit with 2."""


class SassWarning(UserWarning):
    """A part of a file that cannot be read, or more than was asked for: tools print it on a line of
    stderr and go on."""


@dataclass(frozen=True, slots=True)
class Control:
    """The scheduling fields of an instruction word, bits 105 to 124.

    `stall`: cycles before the warp may issue its next instruction. `yields`: the scheduler may turn
    to another warp. `write_scoreboard`, `read_scoreboard`: the barrier (0 to 5) that is raised
    until the result is written, or the operands are read; None without one. `wait_mask`: bit i set
    means wait for barrier i. `reuse`: bit 0, 1, 2 set means operand a, b, c stays in the operand
    cache. On some opcodes these bits mean other things, and the operands' text is authoritative.
    """

    stall: int
    yields: bool
    write_scoreboard: int | None
    read_scoreboard: int | None
    wait_mask: int
    reuse: int


@dataclass(frozen=True, slots=True)
class LiveRegisters:
    """Numbers of registers that an instruction reads, writes, or leaves with a value needed later.

    `general`: R0 to R254. `predicate`: P0 to P6. `uniform`: UR0 to UR62. `uniform_predicate`: UP0
    to UP6.
    """

    general: int
    predicate: int
    uniform: int
    uniform_predicate: int


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a source file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Operation:
    """The meaning of an instruction word.

    `address`: bytes from the start of the kernel. `encoding`: its 16 bytes, little endian, as a
    number. `predicate`: the guard as printed, such as "@!P0"; "" without one. `opcode`: with its
    modifiers, such as "HMMA.16816.F32.BF16". `operands`: the operands as printed, without the final
    semicolon. `target`: address to which a branch or call may jump; None without one, or if it is
    computed.
    """

    address: int
    encoding: int
    predicate: str
    opcode: str
    operands: str
    target: int | None

    @property
    def base(self) -> str:
        """The opcode without its modifiers, such as "HMMA"."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        """The instruction on one line."""
        return " ".join(part for part in (self.predicate, self.opcode, self.operands) if part)


@dataclass(frozen=True, slots=True)
class Instruction(Operation):
    """An operation, with the facts about it from the cubin.

    `live`: None where `Kernel.why_not_live` has the reason. `source`: the CUDA line, then the lines
    it was inlined at, outermost last; empty without line information. `ptx_line`: line of the
    kernel's embedded PTX, counted from 1. `block`: index into `Kernel.blocks`. `loop`: index into
    `Kernel.loops` of the innermost loop around it. `pipe`: the pipe that executes it, "unknown"
    where no source tells. `cost`: cycles of an SM per warp instruction (see `opcodes`); None where
    unknown. `is_spill`: whether the cubin marks it as spilling a register, or as bringing one back.
    """

    control: Control
    live: LiveRegisters | None
    source: tuple[SourceLine, ...]
    ptx_line: int | None
    block: int
    loop: int | None
    pipe: str
    cost: float | None
    is_spill: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: the instructions from address `start` up to, not including, `end`.

    `successors`, `predecessors`: indices of blocks. A computed jump has those that the cubin tells.
    """

    index: int
    start: int
    end: int
    successors: tuple[int, ...]
    predecessors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop. Loops are ordered by the address of their header.

    `header`: the block that every iteration begins with. `blocks`: indices, the header's too.
    `parent`: index of the loop around it. `depth`: 1 for an outermost loop.
    """

    index: int
    header: int
    blocks: frozenset[int]
    parent: int | None
    depth: int


@dataclass(frozen=True, slots=True)
class Compiler:
    """The writer of the cubin: "ptxas", version, such as (13, 0, 88), and options; as noted in the
    cubin. Cubins of old compilers tell nothing: then the name is "" and the version empty."""

    name: str
    version: tuple[int, ...]
    options: str = ""

    def __str__(self) -> str:
        if not self.name:
            return "an unknown compiler"
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a kernel, from the cubin's headers and from the widths of its spills.

    `registers`: registers per thread. `static_smem_bytes`: bytes per block, without the driver's
    reserved bytes. `stack_bytes`: local memory per thread; None with recursion, which has no limit.
    `spill_store_bytes`, `spill_load_bytes`: bytes per thread of the local stores and loads that the
    cubin marks as spills, as ptxas counts them; None where the code accesses local memory and the
    compiler, of CUDA 12.5 or older, does not mark spills. `barriers`: named barriers per block.
    `max_threads`: most threads per block, if there is a limit.
    """

    registers: int
    static_smem_bytes: int
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    barriers: int
    max_threads: int | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or a device function that has code of its own, compiled for one architecture.

    `symbol`: the symbol as the object file has it. `architecture`: such as "sm_90". `origin`: the
    file from which it was read, and the member of it. `ptx`: the text that `Instruction.ptx_line`
    counts in; None if the cubin does not hold it. `is_function`: kernels call it; it is not
    launched. `constants`: the constant banks that the compiler filled for it, by number, as far as
    the cubin is linked: its jump tables are there. `why_not_live`: the reason why its live
    registers are not known; "" if they are.
    """

    symbol: str
    architecture: str
    origin: str
    compiler: Compiler
    resources: Resources
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    loops: tuple[Loop, ...]
    ptx: str | None
    is_function: bool = False
    constants: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    why_not_live: str = ""

    def __hash__(self) -> int:
        # of all instructions it would take longer than what caches save
        return hash((self.symbol, self.architecture, self.origin))

    @property
    def name(self) -> str:
        """The symbol as its author wrote it, for a person."""
        return plain_name(self.symbol)

    @property
    def capability(self) -> int:
        """Compute capability as a number: 90 for sm_90 and for sm_90a."""
        return capability_of(self.architecture)
