"""Kernels compiled on the side: machine code of one architecture each, in parallel, kept by what it
was made from. Nothing is installed. Standard library and pyelftools only.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.build import COMPILE_FLAGS, kill_group, start_compiler
from flash_helpers.compile.codegen import kernel_unit
from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log
from flash_helpers.compile.toolchain import Toolchain
from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.sass.read.elf import EM_CUDA, elf_machine, read_elf

_POLL_SECONDS = 0.02
_INCLUDE = re.compile(r'^\s*#include "(.*)"', re.MULTILINE)
_TEXT = ".text."


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    code: digest of what a launch executes: the machine code, the registers and constants that come
    with it, and the launch's geometry. Kernels with the same code take the same time.
    """

    config: FlashForwardKernelConfig
    path: Path
    symbol: str
    code: str
    report: PtxasReport


@dataclass(frozen=True)
class Compiled:
    """What became of one config: a cubin, or the reason why there is none."""

    config: FlashForwardKernelConfig
    cubin: Cubin | None
    failure: str = ""


@dataclass(frozen=True)
class _Job:
    config: FlashForwardKernelConfig
    target: Path
    process: subprocess.Popen[bytes]
    scratch: Path
    started: float


def sources(root: Path, unit: str) -> list[Path]:
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


def read_code(path: Path, config: FlashForwardKernelConfig, registers: int) -> tuple[str, str]:
    """The kernel's symbol in a cubin, and its code (see `Cubin`).

    registers: a thread, which not every cubin has in its section headers.

    Raises ValueError unless the file is a cubin of one kernel.
    """
    launch = f"{config.B_r} {config.n_threads} {config.smem_bytes} {registers}"
    digest = hashlib.sha256(launch.encode())
    symbols = []
    data = path.read_bytes()
    if elf_machine(data) != EM_CUDA:
        raise ValueError(f"{path} is not a cubin")
    _, sections, _ = read_elf(data, str(path))
    for section in sections:
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

    folder: keeps the cubins, and what ptxas said of them. timeout_s: seconds that one may take.
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
        # The text of a version's sources is the same for all of its configs.
        self._source_digests: dict[int, str] = {}

    def compile_all(self, configs: Sequence[FlashForwardKernelConfig]) -> Iterator[Compiled]:
        """What becomes of each config, as it becomes known; those that are there already first.

        Compilers run on between two results. They are ended if the iterator is closed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting: list[tuple[FlashForwardKernelConfig, Path]] = []
        for config in configs:
            target = self._target(config)
            if target.is_file():
                yield self._compiled(config, target)
            else:
                waiting.append((config, target))
        waiting.reverse()
        running: list[_Job] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(self._start(*waiting.pop()))
                job = next((job for job in running if self._has_ended(job)), None)
                if job is None:
                    time.sleep(_POLL_SECONDS)
                    continue
                running.remove(job)
                yield self._finish(job)
        finally:
            for job in running:
                kill_group(job.process)
                shutil.rmtree(job.scratch, ignore_errors=True)

    def _flags(self) -> list[str]:
        architecture = self.architecture
        code = f"arch=compute_{architecture},code=sm_{architecture}"
        return [*COMPILE_FLAGS, "-gencode", code, "-cubin"]

    def _target(self, config: FlashForwardKernelConfig) -> Path:
        unit = kernel_unit(config)
        if config.version not in self._source_digests:
            digest = hashlib.sha256()
            for path in sources(self.root, unit):
                data = path.read_bytes()
                name = path.relative_to(self.root).as_posix()
                digest.update(f"\n{name} {len(data)}\n".encode() + data)
            self._source_digests[config.version] = digest.hexdigest()
        inputs = [self.toolchain.identity, *self._flags(), unit]
        inputs.append(self._source_digests[config.version])
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        return self.folder / f"{config.short_form()}-{key[:16]}.cubin"

    def _start(self, config: FlashForwardKernelConfig, target: Path) -> _Job:
        scratch = Path(tempfile.mkdtemp(dir=self.folder, prefix=".compiling-"))
        try:
            unit = scratch / f"{config.short_form()}.cu"
            write_if_different(unit, kernel_unit(config))
            output = ("-o", str(scratch / "cubin"))
            command = [str(self.toolchain.nvcc), *self._flags(), *output, str(unit)]
            process = start_compiler(command, self.root, scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return _Job(config, target, process, scratch, time.monotonic())

    def _has_ended(self, job: _Job) -> bool:
        return job.process.poll() is not None or self._is_late(job)

    def _is_late(self, job: _Job) -> bool:
        return time.monotonic() - job.started > self.timeout_s

    def _finish(self, job: _Job) -> Compiled:
        try:
            if job.process.poll() is None:
                kill_group(job.process)
                return Compiled(job.config, None, f"nvcc took over {self.timeout_s:g} s")
            log = (job.scratch / "log").read_text(errors="replace")
            if job.process.returncode:
                errors = [line for line in log.splitlines() if "error" in line]
                said = (errors or log.splitlines() or ["it said nothing"])[0]
                return Compiled(job.config, None, f"nvcc failed: {said}")
            # The log first: where there is a cubin there is its log.
            write_if_different(job.target.with_suffix(".log"), log)
            (job.scratch / "cubin").replace(job.target)
        finally:
            shutil.rmtree(job.scratch, ignore_errors=True)
        return self._compiled(job.config, job.target)

    def _compiled(self, config: FlashForwardKernelConfig, path: Path) -> Compiled:
        try:
            (report,) = parse_ptxas_log(path.with_suffix(".log").read_text())
            symbol, code = read_code(path, config, report.registers)
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)  # so that the next run compiles it again
            return Compiled(config, None, f"what nvcc wrote cannot be read: {error}")
        return Compiled(config, Cubin(config, path, symbol, code, report))
