"""A host program that can run on the stub: compiled from CUDA C++, or given."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from flash_helpers.compile.toolchain import Toolchain
from flash_helpers.console.file_kinds import FileKind, kind_of
from flash_helpers.console.progress import task
from flash_helpers.host.errors import HostError

_RUNTIME = re.compile(r"libcudart\.so\.(\d+)")
_OF_LINKED_CODE = "__cudaRegisterLinkedBinary"
_FUNCTION = re.compile(r"(__cuda|cuda|cu)[A-Z]\w*")
_RELINK = "link it with nvcc -cudart shared"


def compiled(
    source: Path,
    target: str,
    options: Sequence[str],
    toolchain: Toolchain,
    stub: Path,
    folder: Path,
) -> Path:
    """The program of a .cu file, linked with the stub. `target`: of its PTX, such as sm_90a.
    `options`: further ones of nvcc. `folder`: where the program is put.

    Raises HostError with the compiler's errors.
    """
    virtual = target.replace("sm_", "compute_")
    program = folder / source.stem
    command = [
        *(str(toolchain.nvcc), "-lineinfo", "-gencode", f"arch={virtual},code={virtual}"),
        *("-cudart", "none", "-o", str(program), str(source), f"-L{stub}"),
        *(f"-L{library}" for library in toolchain.library_folders),
        *(*options, "-lcudart", "-lcuda"),
    ]
    with task(f"compiling {source.name}"):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if _OF_LINKED_CODE in result.stderr:
        raise HostError(
            f"{source} is compiled with -rdc=true, which makes machine code of its kernels: the "
            "simulator runs PTX, leave -rdc=true out"
        )
    if result.returncode:
        raise HostError(f"{source} does not compile:\n{(result.stderr or result.stdout).strip()}")
    return program


def check_program(path: Path, toolchain: Toolchain) -> None:
    """Refuses files that are no program of the CUDA runtime, or that cannot run on the stub. Raises
    HostError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None
    if (kind := kind_of(data)) is not FileKind.ELF:
        found = kind.value if kind else "no program"
        raise HostError(f"{path} is {found}: give a .cu file with a main, or a program")
    needed, sections = _linked(path)
    majors = [int(match[1]) for name in needed if (match := _RUNTIME.fullmatch(name))]
    if majors and majors[0] != toolchain.version[0]:
        raise HostError(
            f"{path} is linked with libcudart.so.{majors[0]}, and the stub is made for CUDA "
            f"{toolchain.version[0]}, whose nvcc is {toolchain.nvcc}: compile the program with it, "
            f"or set CUDA_HOME to a toolkit of CUDA {majors[0]}"
        )
    # a program may open the driver itself
    if not majors and "libcuda.so.1" not in needed and b"libcuda.so" not in data:
        static = "has the CUDA runtime inside" if ".nv_fatbin" in sections else "does not use CUDA"
        raise HostError(f"{path} {static}: {_RELINK}")
    if not os.access(path, os.X_OK):
        raise HostError(f"{path} cannot be executed: chmod +x it, or give a program")


def check_functions(path: Path, stub: Path) -> None:
    """Refuses a program that names functions of CUDA which no header declares, and the stub lacks.
    Raises HostError."""
    needed, there = (_symbols(file) for file in (path, stub / "libcudart.so"))
    lacking = sorted(n for n in needed - there if _FUNCTION.fullmatch(n))
    if lacking:
        raise HostError(f"{path} uses {', '.join(lacking)}, which the stub lacks: do without")


def _symbols(path: Path) -> set[str]:
    """Names of the symbols for the dynamic linker."""
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        symbols = table.iter_symbols() if isinstance(table, SymbolTableSection) else ()
        return {symbol.name for symbol in symbols}


def _linked(path: Path) -> tuple[list[str], set[str]]:
    """Libraries that a program names, and names of its sections."""
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            sections = {section.name: section for section in elf.iter_sections()}
            dynamic = sections.get(".dynamic")
            tags = dynamic.iter_tags("DT_NEEDED") if isinstance(dynamic, DynamicSection) else ()
            return [vars(tag)["needed"] for tag in tags], set(sections)
    except (ELFError, OSError, ValueError, AssertionError) as error:
        raise HostError(f"{path} cannot be read as a program: {error}") from None
