"""Facts of the experiments' main loops, read from the machine code."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from experiments import EXPERIMENTS, source_digest

from flash_helpers.compile.cubins import Cubin
from flash_helpers.measure.results import RecordFile
from flash_helpers.sass.analyse.counts import WORK, buckets
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import Kernel, Loop, Operation, SassError

ARCHITECTURE = 90

_MOVE = re.compile(r"MOV\b|IMAD\.MOV")  # from register to register


def column(title: str) -> Any:
    """Field whose number the table shows under this title."""
    return field(metadata={"title": title})


@dataclass(frozen=True)
class LoopFacts:
    """One pass of a warp through the steady loop's machine code, when no maximum has grown. Code
    that a branch may skip is left out.

    moves: MOV and IMAD.MOV. local: loads and stores of spilled registers. gap: most instructions
    between two HMMA, also from one pass into the next. hmma_behind: HMMA after the first half of
    the MUFU. Nearly all MUFU are exponentials, so these HMMA can still hide half of the softmax.
    """

    name: str
    instructions: int = column("instructions")
    hmma: int = column("HMMA")
    ldmatrix: int = column("LDSM")
    mufu: int = column("MUFU")
    ffma: int = column("FFMA")
    fmnmx: int = column("FMNMX")
    shfl: int = column("SHFL")
    moves: int = column("moves")
    local: int = column("local memory")
    gap: int = column("most between two HMMA")
    hmma_behind: int = column("HMMA behind half of MUFU")


@dataclass(frozen=True)
class MachineCode(RecordFile):
    """The loops that one compiler made. sources: see `source_digest`."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "machine code of the experiments"

    compiler: str
    architecture: str
    sources: str
    loops: tuple[LoopFacts, ...]


def always_executed(kernel: Kernel, loop: Loop) -> frozenset[int]:
    """Blocks of a loop, by index, that every pass goes through."""

    def ends_without(left_out: int) -> bool:
        """Whether a pass can return to the loop's header around this block."""
        reached, waiting = {loop.header}, [loop.header]
        while waiting:
            for block in kernel.blocks[waiting.pop()].successors:
                if block == loop.header:
                    return True
                if block in loop.blocks and block != left_out and block not in reached:
                    reached.add(block)
                    waiting.append(block)
        return False

    return frozenset(b for b in loop.blocks if b == loop.header or not ends_without(b))


def steady_loop(kernel: Kernel) -> Loop:
    """The first of the loops with the most HMMA. A second one, which computes again, may follow.

    Raises SassError for a kernel without a loop.
    """
    if not kernel.loops:
        raise SassError(f"{kernel.origin}: {kernel.symbol} has no loop")
    hmma = Counter(i.loop for i in kernel.instructions if i.base == "HMMA")
    return max(kernel.loops, key=lambda loop: (hmma[loop.index], -kernel.blocks[loop.header].start))


def loop_facts(name: str, kernel: Kernel) -> LoopFacts:
    """Facts of a kernel's steady loop. Raises SassError for a kernel without a loop."""
    loop = steady_loop(kernel)
    always = always_executed(kernel, loop)
    body = [
        instruction
        for instruction, kind in zip(kernel.instructions, buckets(kernel.instructions), strict=True)
        if instruction.block in always and kind in WORK
    ]
    return facts_of_body(name, body)


def facts_of_body(name: str, body: Sequence[Operation]) -> LoopFacts:
    """Facts of instructions in the order of their execution."""
    bases = Counter(instruction.base for instruction in body)
    is_hmma = [instruction.base == "HMMA" for instruction in body]
    mufu = [n for n, instruction in enumerate(body) if instruction.base == "MUFU"]
    if not any(is_hmma) or not mufu:
        raise SassError(f"{name}: the main loop has no HMMA or no MUFU")
    runs = (len(list(run)) for found, run in itertools.groupby(is_hmma * 2) if not found)
    return LoopFacts(
        name=name,
        instructions=len(body),
        hmma=bases["HMMA"],
        ldmatrix=bases["LDSM"],
        mufu=bases["MUFU"],
        ffma=bases["FFMA"],
        fmnmx=bases["FMNMX"],
        shfl=bases["SHFL"],
        moves=sum(bool(_MOVE.match(instruction.opcode)) for instruction in body),
        local=bases["LDL"] + bases["STL"],
        gap=max(runs, default=0),
        hmma_behind=sum(is_hmma[mufu[len(mufu) // 2] :]),
    )


def read_machine_code(compiled: Iterable[Cubin], root: Path) -> MachineCode:
    """Read the loops of all experiments, in the log's order. Raises SassError."""
    kernels = {c.name: load_kernels(c.path)[0] for c in compiled}
    first = kernels[EXPERIMENTS[0].name]
    return MachineCode(
        compiler=str(first.compiler),
        architecture=first.architecture,
        sources=source_digest(root),
        loops=tuple(loop_facts(e.name, kernels[e.name]) for e in EXPERIMENTS),
    )
