"""Small kernels written as text, and the kernels of the library, for the tests of the analysis."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from tiers import is_of_first_tier, matrix_mark, usual_dtype

from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import (
    Config,
    Element,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_helpers.measure.machine_code import ARCHITECTURE, own_kernels
from flash_helpers.operations.attention_forward import OPERATION as ATTENTION
from flash_helpers.runtime import library
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import control_flow
from flash_helpers.sass.read.reader import find_kernels
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    Compiler,
    Control,
    Instruction,
    Kernel,
    LiveRegisters,
    Operation,
    Resources,
    SourceLine,
)

# What the installed library holds machine code of every portable family for, and one of these.
ARCHITECTURES = tuple(name for name in library.architectures() if re.fullmatch(r"sm_\d+", name))
DEFAULT = ARCHITECTURE
PROGRESSION = [config for config in get_kernel_progression_configs() if config.family.is_portable]
WITH_TENSOR = [config for config in PROGRESSION if config.family.operation is ATTENTION]
WITHOUT_TENSOR = [config for config in PROGRESSION if config.loop_unit is None]

_LINE = re.compile(
    r"(?:(?P<label>\w+):)?\s*(?P<guard>@!?\w+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*)"
    r"(?:;(?P<notes>.*))?"
)
_JUMPS = ("BRA", "JMP", "CALL", "BSSY")


def needs(*architectures: str) -> pytest.MarkDecorator:
    """Skips a test where the library is not built for all of these."""
    missing = ", ".join(name for name in architectures if name not in ARCHITECTURES)
    return pytest.mark.skipif(bool(missing), reason=f"the library is not built for {missing}")


def list_kernels(path: Path, architecture: str | None = None) -> list[tuple[str, str]]:
    """Architecture and symbol of the kernels in a file."""
    return [kernel.found for kernel in find_kernels(path, architecture)]


def _parse(text: str) -> tuple[list[Operation], list[dict[str, str]]]:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    found = []
    labels: dict[str, int] = {}
    for n, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        assert match, line
        found.append(match)
        if match["label"]:
            labels[match["label"]] = n * INSTRUCTION_BYTES
    operations, notes = [], []
    for n, match in enumerate(found):
        operands = [part.strip() for part in match["operands"].split(",") if part.strip()]
        target = None
        if match["opcode"].partition(".")[0] in _JUMPS and operands:
            target = labels.get(operands[-1])
            operands[-1] = operands[-1] if target is None else hex(target)
        operations.append(
            Operation(
                n * INSTRUCTION_BYTES,
                0,
                match["guard"] or "",
                match["opcode"],
                ", ".join(operands),
                target,
            )
        )
        notes.append(dict(re.findall(r"(\w+)=(\S+)", match["notes"] or "")))
    return operations, notes


def operations(text: str) -> list[Operation]:
    """One instruction a line: `label: @!P0 BRA P1, other`. A label as last operand of a jump (and
    of BSSY, where it is none) becomes the target."""
    return _parse(text)[0]


def kernel(text: str, architecture: str = "sm_90", registers: int = 32) -> Kernel:
    """A kernel of such lines. After a semicolon: stall=, write= and read= scoreboards, wait= for
    scoreboards (as digits), live= registers, ptx= and source= lines, spill= anything."""
    listed, notes = _parse(text)
    blocks, loops = control_flow(listed)
    block_of = [b.index for b in blocks for _ in range(b.start, b.end, INSTRUCTION_BYTES)]
    loop_of: dict[int, int] = {}
    for loop in sorted(loops, key=lambda loop: loop.depth):
        loop_of.update(dict.fromkeys(loop.blocks, loop.index))
    capability = int(architecture.removeprefix("sm_"))
    return Kernel(
        symbol="planted",
        architecture=architecture,
        origin="text",
        compiler=Compiler("ptxas", (13, 0, 88), ""),
        resources=Resources(registers, 0, 0, 0, 0, 1, None),
        instructions=tuple(
            Instruction(
                o.address,
                o.encoding,
                o.predicate,
                o.opcode,
                o.operands,
                o.target,
                _control(note),
                LiveRegisters(int(note["live"]), 0, 0, 0) if "live" in note else None,
                (SourceLine("planted.cu", int(note["source"])),) if "source" in note else (),
                int(note["ptx"]) if "ptx" in note else None,
                block,
                loop_of.get(block),
                opcodes.pipe(o.opcode, capability),
                opcodes.cost(o.opcode, capability),
                "spill" in note,
            )
            for o, note, block in zip(listed, notes, block_of, strict=True)
        ),
        blocks=blocks,
        loops=loops,
        ptx=None,
    )


def _control(note: dict[str, str]) -> Control:
    def number(name: str) -> int | None:
        return int(note[name]) if name in note else None

    waits = sum(1 << int(digit) for digit in note.get("wait", ""))
    return Control(int(note.get("stall", 1)), False, number("write"), number("read"), waits, 0)


def guard_text(encoding: int, uniform: bool = False) -> str:
    """The guard of an instruction word as a disassembler prints it: "" where it always executes.

    uniform: instructions of the uniform datapath are guarded by UP0 to UP6.
    """
    number, negated = encoding >> 12 & 7, encoding >> 15 & 1
    if number == 7 and not negated:
        return ""
    return f"@{'!' * negated}{'U' * uniform}P{'T' if number == 7 else number}"


def _is_read_first(config: Config) -> bool:
    """Whether the first tier reads it: the fixed config in the usual dtype, of a step that leads or
    whose family's machine code is in the library."""
    family = config.family
    is_fixed = config == family.fixed_config(config.step, usual_dtype(family))
    return is_fixed and (family.in_library or is_of_first_tier(config))


def parts_of(configs: Iterable[Config]) -> list[ParameterSet]:
    """Return the parts in which tests look at many configs: those of the first tier, and, in the
    matrix, the others of each family."""
    leading, others = [], defaultdict(list)
    for config in configs:
        first = _is_read_first(config)
        (leading if first else others[config.family.name]).append(config)
    return [
        pytest.param((*leading,), id="leading"),
        *(
            pytest.param((*some,), marks=matrix_mark(some[0]), id=f"others of {name}")
            for name, some in others.items()
        ),
    ]


def in_tiers(configs: Iterable[Config]) -> pytest.MarkDecorator:
    """Return the marker of a test that looks at many configs, in argument `configs`."""
    return pytest.mark.parametrize("configs", parts_of(configs))


@functools.lru_cache
def kernels_of(configs: tuple[Config, ...], architecture: str) -> dict[Config, Kernel]:
    """The kernels of configs, which are read together; of those that the architecture runs."""
    number = capability_of(architecture)
    own = tuple(config for config in configs if config.family.targets_for([number]))
    return own_kernels(architecture, own) if own else {}


def kernel_of(config: Config, architecture: str) -> Kernel:
    """The kernel of a config of PROGRESSION, read with all others that the first tier reads if it
    is one of them."""
    together = filter(_is_read_first, PROGRESSION) if _is_read_first(config) else [config]
    return kernels_of((*together,), architecture)[config]


def of_version(number: int, dtype: Element = Element.BF16) -> FlashForwardKernelConfig:
    """A config of the progression."""
    return next(c for c in PROGRESSION if (c.version, c.dtype) == (number, dtype))


def loops_as_addresses(found: Sequence[Operation]) -> list[tuple[int, set[int], int]]:
    """Each loop of a kernel: line of its header, lines of its blocks' beginnings, depth."""
    blocks, loops = control_flow(found)
    return [
        (
            blocks[loop.header].start // INSTRUCTION_BYTES,
            {blocks[n].start // INSTRUCTION_BYTES for n in loop.blocks},
            loop.depth,
        )
        for loop in loops
    ]
