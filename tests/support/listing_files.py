"""Input of the tests of the text tools: listings made by NVIDIA's programs, and what is known of
the machine code by other ways."""

import functools
import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from flash_helpers.sass.read.disassembler import find_disassembler
from flash_helpers.sass.read.listing import parse_listing

FILES = Path(__file__).resolve().parents[1] / "sass/listings"
SEVERAL = FILES / "several.fatbin"  # four kernels for sm_80 and sm_90
V1 = "v1_bf16_d128_Br64_Bc64_w4_async_Q0_K0_V0"
INSTRUCTION_BYTES = 16

# how nvdisasm and cuobjdump are asked for a listing
NVDISASM_FORMATS = {
    "plain": (),
    "code": ("-c",),
    "encodings": ("-c", "-hex"),
    "source lines": ("-c", "-g"),
    "inlined lines": ("-c", "-gi"),
    "ptx lines": ("-c", "-gp"),
    "raw": ("-c", "-raw"),
    "separate": ("-c", "-sf"),
}
# these leave out the NOPs at the end of a section
LIVE_FORMATS = {
    "live": ("-c", "-plr"),
    "live, narrow": ("-c", "-plr", "-lrm", "narrow"),
    "live, counted": ("-c", "-hex", "-plr", "-lrm", "count"),
}

Row = tuple[str, str, str, str]  # function, guard, opcode, operands


def run_nvidia(name: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """Output of nvdisasm or cuobjdump."""
    program = find_disassembler(name).path
    result = subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return result.stdout


@functools.cache
def listing(cubin: Path, *options: str) -> str:
    """Output of nvdisasm for a cubin."""
    return run_nvidia("nvdisasm", *options, cubin)


def extract(library: Path, name: str, folder: Path) -> list[Path]:
    """The cubins of a library that have `name` in their names, by cuobjdump, sorted."""
    folder.mkdir(exist_ok=True)
    run_nvidia("cuobjdump", "-xelf", name, library, folder=folder)
    return sorted(folder.glob("*.cubin"))


def code_sizes(cubin: Path) -> dict[str, int]:
    """Instructions by function, from the sizes of the sections."""
    elf = ELFFile(io.BytesIO(cubin.read_bytes()))
    return {
        section.name.removeprefix(".text."): section["sh_size"] // INSTRUCTION_BYTES
        for section in elf.iter_sections()
        if section.name.startswith(".text.")
    }


@dataclass(frozen=True)
class Disassembled:
    """An instruction as nvdisasm's JSON has it."""

    function: str
    predicate: str
    opcode: str
    operands: str


def from_json(cubin: Path) -> list[Disassembled]:
    """The instructions of a cubin by nvdisasm -json: another way than its text."""
    _, functions = json.loads(run_nvidia("nvdisasm", "-json", cubin))

    def one(function: dict[str, Any], item: dict[str, Any]) -> Disassembled:
        return Disassembled(
            function["function-name"],
            item.get("predicate", ""),
            item["opcode"],
            item.get("operands", ""),
        )

    return [one(function, item) for function in functions for item in function["sass-instructions"]]


def rows_of(text: str) -> list[Row]:
    """The rows of a listing."""
    return [
        (function.name, operation.predicate, operation.opcode, operation.operands)
        for function in parse_listing(text, "listing")
        for operation in function.operations
    ]


def in_order(rows: list[Row]) -> list[Row]:
    """Rows by function: programs list the functions in different orders."""
    return sorted(rows, key=lambda row: row[0])
