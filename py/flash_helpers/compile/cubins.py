"""Kernels compiled beside other work: machine code of one architecture each, compiled in parallel
and kept under a hash of its sources. Nothing is installed. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.build import COMPILE_FLAGS
from flash_helpers.compile.codegen import kernel_unit
from flash_helpers.compile.compiler import Finished, run_compilers
from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log, performance_losses
from flash_helpers.compile.toolchain import Toolchain
from flash_helpers.console.file_kinds import EM_CUDA, elf_machine
from flash_helpers.console.files import write_if_different
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Config
from flash_helpers.sass.read.elf import read_sections

_INCLUDE = re.compile(r'^\s*#include "(.*)"', re.MULTILINE)
_TEXT = ".text."


@dataclass(frozen=True)
class Source:
    """A kernel to compile. `unit`: its translation unit. `config`: the config that it is launched
    as."""

    name: str
    config: Config
    unit: str

    @classmethod
    def of(cls, config: Config) -> Source:
        """The kernel that the library has of a config."""
        return cls(config.short_form(), config, kernel_unit(config))


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    `code`: digest of what a launch executes: the machine code, the registers and constants that
    come with it, and the launch's geometry. Kernels with the same code take the same time.
    """

    source: Source
    path: Path
    symbol: str
    code: str
    report: PtxasReport

    @property
    def config(self) -> Config:
        """The config that it is launched as."""
        return self.source.config


@dataclass(frozen=True)
class Compiled:
    """Result of one source: a cubin, or the reason why there is none."""

    source: Source
    cubin: Cubin | None
    failure: str = ""


def included_files(root: Path, unit: str) -> list[Path]:
    """The files of the repository that a unit includes, directly or not; sorted."""
    found: set[Path] = set()

    def follow(text: str, folder: Path) -> None:
        for name in _INCLUDE.findall(text):
            places = (folder / name, root / "src/include" / name, root / name)
            path = next((place.resolve() for place in places if place.is_file()), None)
            if path is not None and path not in found:
                found.add(path)
                follow(path.read_text(), path.parent)

    follow(unit, root)
    return sorted(found)


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


class CubinCompiler:
    """Compiles kernels of the repository at `root` for one architecture (90 for sm_90).

    `folder`: keeps the cubins and the messages of ptxas. `timeout_s`: most seconds per kernel.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        toolchain: Toolchain,
        architecture: int,
        jobs: int,
        timeout_s: float,
    ) -> None:
        self.root = root.resolve()
        self.folder = folder.resolve()
        self.toolchain = toolchain
        self.architecture = architecture
        self.jobs = jobs
        self.timeout_s = timeout_s
        # The sources of a step are the same for all of its configs.
        self._source_digests: dict[tuple[str, ...], str] = {}

    def compile_all(self, sources: Sequence[Source]) -> Generator[Compiled, None, None]:
        """Yield the result of each source as it becomes known; cubins that exist already come
        first.

        Compilers run on between two results. They are ended if the iterator is closed.
        """
        targets = {source: self._target(source) for source in sources}
        for source, target in targets.items():
            if target.is_file():
                yield self._compiled(source, target)
        missing = [source for source, target in targets.items() if not target.is_file()]
        with contextlib.closing(
            run_compilers(missing, self._command, self.root, self.folder, self.jobs, self.timeout_s)
        ) as running:
            for finished in running:
                yield self._keep(finished, targets[finished.item])

    def _flags(self, source: Source) -> list[str]:
        (target,) = source.config.family.targets_for([self.architecture])
        return [*COMPILE_FLAGS, "-gencode", f"arch=compute_{target},code=sm_{target}", "-cubin"]

    def _target(self, source: Source) -> Path:
        included = tuple(_INCLUDE.findall(source.unit))
        if included not in self._source_digests:
            digest = hashlib.sha256()
            for path in included_files(self.root, source.unit):
                data = path.read_bytes()
                name = path.relative_to(self.root).as_posix()
                digest.update(f"\n{name} {len(data)}\n".encode() + data)
            self._source_digests[included] = digest.hexdigest()
        inputs = [self.toolchain.identity, *self._flags(source), source.unit]
        inputs.append(self._source_digests[included])
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        return self.folder / f"{source.name}-{key[:16]}.cubin"

    def _command(self, source: Source, scratch: Path) -> list[str]:
        unit = scratch / f"{source.name}.cu"
        write_if_different(unit, source.unit)
        output = ("-o", str(scratch / "cubin"))
        return [str(self.toolchain.nvcc), *self._flags(source), *output, str(unit)]

    def _keep(self, finished: Finished[Source], target: Path) -> Compiled:
        if finished.status is None:
            return Compiled(finished.item, None, f"nvcc took over {self.timeout_s:g} s")
        if finished.status:
            lines = finished.log.splitlines()
            errors = [line for line in lines if "error" in line]
            said = (errors or lines or ["it said nothing"])[0]
            return Compiled(finished.item, None, f"nvcc failed: {said}")
        if losses := performance_losses(finished.log):
            return Compiled(finished.item, None, losses[0])
        # The log first: where there is a cubin there is its log.
        write_if_different(target.with_suffix(".log"), finished.log)
        (finished.scratch / "cubin").replace(target)
        return self._compiled(finished.item, target)

    def _compiled(self, source: Source, path: Path) -> Compiled:
        try:
            (report,) = parse_ptxas_log(path.with_suffix(".log").read_text())
            symbol, code = read_code(path, source.config, report.registers)
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)  # so that the next run compiles it again
            return Compiled(source, None, f"what nvcc wrote cannot be read: {error}")
        return Compiled(source, Cubin(source, path, symbol, code, report))
