"""The machine code of compiled kernels, as sweeps tell it apart. Standard library only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.cache import Compiled
from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log
from flash_helpers.console.file_kinds import EM_CUDA, elf_machine
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Config
from flash_helpers.sass.read.elf import read_sections

_TEXT = ".text."


@dataclass(frozen=True)
class Cubin:
    """One kernel compiled for one architecture. `config`: the config that it is launched as.

    `code`: digest of what its launch executes: the machine code, the registers and constants that
    come with it, and the launch's geometry. Kernels with the same code take the same time.
    """

    name: str
    config: Config
    path: Path
    symbol: str
    code: str
    report: PtxasReport


def read_cubin(compiled: Compiled, config: Config) -> Cubin:
    """Return a compiled kernel's machine code, with the messages of ptxas.

    `config`: the config that it is launched as. Raises OSError, and ValueError for files of another
    kind.
    """
    (report,) = parse_ptxas_log(compiled.log_path.read_text())
    symbol, code = read_code(compiled.cubin_path, config, report.registers)
    return Cubin(compiled.name, config, compiled.cubin_path, symbol, code, report)


def code_of(kernels: Sequence[Cubin]) -> str:
    """Return the digest of what a call of a config executes, of its kernels in their order."""
    if len(kernels) == 1:
        return kernels[0].code
    return hashlib.sha256("".join(kernel.code for kernel in kernels).encode()).hexdigest()


def read_code(path: Path, config: Config, registers: int) -> tuple[str, str]:
    """The kernel's symbol in a cubin, and its code (see `Cubin`).

    `registers`: registers per thread, which not every cubin has in its section headers.

    Raises ValueError unless the file is a cubin of one kernel.
    """
    # kernels of the same code are launched alike if they have the same tiles
    problem = config.family.operation.usual.in_dtype(config.dtype)
    device = largest_device(config.family.capabilities[-1])
    call = config.call(problem, problem.strides(), device)
    geometry = [(found.grid, found.block, found.shared_bytes) for found in call.launches]
    digest = hashlib.sha256(f"{geometry} {registers}".encode())
    symbols = []
    data = path.read_bytes()
    if elf_machine(data) != EM_CUDA:
        raise ValueError(f"{path} is not a cubin")
    for section in read_sections(data, str(path)):
        # the parameters' bank, which is zeros, and what nothing executes are left out
        if section.name.startswith(_TEXT):
            symbols.append(section.name.removeprefix(_TEXT))
            digest.update(section.data)
        elif re.match(r"\.nv\.constant[1-9]", section.name):
            digest.update(section.data)
    if len(symbols) != 1:
        raise ValueError(f"{path} holds {len(symbols)} kernels and should hold one")
    return symbols[0], digest.hexdigest()
