"""Builds the kernel library: one object a kernel, in parallel, and only what has changed.

Everything between is kept in `build/kernels` below the root of the repository:
`<unit>.cu`, `.o`, `.ptx`, `.log` (what ptxas -v said) and `.json` (what the object was made from).
Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.codegen import MAP_HEADER, configs_in_header, kernel_unit
from flash_helpers.compile.toolchain import BuildError, Toolchain
from flash_helpers.files import write_if_different

LIBRARY = "libflash_attention.so"
PTX_FOLDER = "ptx"
LOG_FOLDER = "ptxas"
CONFIG_FOLDER = "configs"  # below the root and in the package: the fastest configs of each GPU
BEST_PATTERN = "best_*.json"

_LIBRARY_SOURCE = "src/flash_attention.cu"
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-lineinfo",
    "-Isrc/include",
    "-I.",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "--expt-relaxed-constexpr",
    "-Xptxas",
    "-v",
)
_LINK_FLAGS = ("-shared", "--cudart", "static")
# Hidden visibility alone lets through what the C++ library's headers mark as default.
_EXPORTS = "{ global: flash_*; local: *; };\n"
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Unit:
    """One translation unit: its name, its source relative to the root, and extra flags."""

    name: str
    source: str
    flags: tuple[str, ...] = ()
    is_kernel: bool = True


@dataclass(frozen=True)
class _Job:
    unit: Unit
    process: subprocess.Popen[bytes]
    scratch: Path
    started: float


def virtual_architecture(architectures: Sequence[int]) -> int:
    """The architecture whose PTX the library carries for GPUs that it holds no machine code for."""
    return min(architectures)


def architecture_names(architectures: Sequence[int]) -> str:
    """What the library is built for, e.g. "sm_80 sm_90 compute_80"."""
    names = [f"sm_{architecture}" for architecture in architectures]
    return " ".join([*names, f"compute_{virtual_architecture(architectures)}"])


def gencode_flags(architectures: Sequence[int]) -> list[str]:
    """nvcc's flags for machine code for each architecture, and PTX for the lowest."""
    flags = []
    for architecture in architectures:
        code = f"sm_{architecture}"
        if architecture == virtual_architecture(architectures):
            code = f"[{code},compute_{architecture}]"
        flags += ["-gencode", f"arch=compute_{architecture},code={code}"]
    return flags


def requested_jobs(environ: Mapping[str, str]) -> int:
    """How many compilers to run at once: MAX_JOBS, or the number of cores. Raises BuildError."""
    text = environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text!r} is not a positive number of compilers to run at once")
    return int(text)


def dependencies(makefile: str) -> list[str]:
    """The prerequisites of the one rule in a dependency file that a compiler wrote."""
    _, _, prerequisites = makefile.replace("\\\n", " ").partition(" : ")
    return [path.replace("\\ ", " ") for path in re.split(r"(?<!\\)\s+", prerequisites) if path]


class LibraryBuild:
    """One build of the library in the repository at `root`.

    report: receives progress, a line at a time.
    """

    def __init__(
        self,
        root: Path,
        toolchain: Toolchain,
        architectures: Sequence[int],
        jobs: int,
        report: Callable[[str], None],
    ) -> None:
        self.root = root.resolve()
        self.toolchain = toolchain
        self.architectures = tuple(architectures)
        self.jobs = jobs
        self.report = report
        self.folder = self.root / "build" / "kernels"

    def run(self, package: Path) -> None:
        """Build the library, and the PTX and the ptxas log of each kernel, into `package`, and put
        the files of the fastest configs beside them.

        Raises BuildError, with the compiler's output, when a unit does not compile.
        """
        units = self._units()
        self.folder.mkdir(parents=True, exist_ok=True)
        stale = [unit for unit in units if not self._is_fresh(unit)]
        if len(stale) < len(units):
            self.report(f"{len(units) - len(stale)} of {len(units)} units are up to date")
        self._compile(stale)
        self._link(units, package)
        kernels = [unit.name for unit in units if unit.is_kernel]
        self._publish(kernels, "ptx", package / PTX_FOLDER)
        self._publish(kernels, "log", package / LOG_FOLDER)
        self._publish_best_configs(package / CONFIG_FOLDER)

    def _units(self) -> list[Unit]:
        names = architecture_names(self.architectures)
        flags = (f'-DFLASH_ATTENTION_ARCHS="{names}"',)
        units = [Unit("flash_attention", _LIBRARY_SOURCE, flags, is_kernel=False)]
        for config in configs_in_header((self.root / MAP_HEADER).read_text()):
            name = config.short_form()
            source = self._file(name, "cu")
            write_if_different(source, kernel_unit(config))
            units.append(Unit(name, self._in_repository(source)))
        return units

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _in_repository(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _flags(self, unit: Unit) -> list[str]:
        return [*COMPILE_FLAGS, *gencode_flags(self.architectures), *unit.flags]

    def _key(self, flags: Sequence[str], inputs: Iterable[str]) -> str | None:
        """Digest of all that an output depends on; None if an input is gone."""
        digest = hashlib.sha256(json.dumps([self.toolchain.identity, *flags]).encode())
        for name in inputs:
            path = self.root / name
            if not path.is_file():
                return None
            data = path.read_bytes()
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()

    def _stamp_matches(self, name: str, flags: Sequence[str], outputs: Iterable[Path]) -> bool:
        if not all(path.is_file() for path in outputs):
            return False
        try:
            stamp = json.loads(self._file(name, "json").read_text())
            return stamp["key"] == self._key(flags, stamp["inputs"])
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no stamp, or not one of ours: build again

    def _write_stamp(self, name: str, flags: Sequence[str], inputs: Sequence[str]) -> None:
        stamp = {"inputs": list(inputs), "key": self._key(flags, inputs)}
        write_if_different(self._file(name, "json"), json.dumps(stamp, indent=1))

    def _suffixes(self, unit: Unit) -> tuple[str, ...]:
        return ("o", "log", "ptx") if unit.is_kernel else ("o", "log")

    def _is_fresh(self, unit: Unit) -> bool:
        outputs = [self._file(unit.name, suffix) for suffix in self._suffixes(unit)]
        return self._stamp_matches(unit.name, self._flags(unit), outputs)

    def _compile(self, units: Sequence[Unit]) -> None:
        waiting = list(reversed(units))
        running: list[_Job] = []
        done = 0
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(self._start(waiting.pop()))
                finished = [job for job in running if job.process.poll() is not None]
                if not finished:
                    time.sleep(_POLL_SECONDS)
                for job in finished:
                    self._finish(job)
                    running.remove(job)
                    done += 1
                    self._report_unit(job, done, len(units))
        finally:
            for job in running:
                kill_group(job.process)
                shutil.rmtree(job.scratch, ignore_errors=True)

    def _start(self, unit: Unit) -> _Job:
        scratch = Path(tempfile.mkdtemp(dir=self.folder, prefix=".compiling-"))
        try:
            process = start_compiler(self._compile_command(unit, scratch), self.root, scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return _Job(unit, process, scratch, time.monotonic())

    def _compile_command(self, unit: Unit, scratch: Path) -> list[str]:
        # Paths are relative to the root, where nvcc runs: they end up in the line tables.
        keep = self._in_repository(scratch)
        return [
            str(self.toolchain.nvcc),
            *self._flags(unit),
            *("--keep", "--keep-dir", keep),
            *("-MD", "-MF", f"{keep}/dependencies"),
            *("-c", unit.source, "-o", f"{keep}/object"),
        ]

    def _finish(self, job: _Job) -> None:
        unit, scratch = job.unit, job.scratch
        log = (scratch / "log").read_text(errors="replace")
        if job.process.returncode:
            command = shlex.join(self._compile_command(unit, scratch))
            raise BuildError(
                f"{unit.name}: nvcc failed with exit status {job.process.returncode}\n"
                f"{command}\n{log}"
            )
        inputs = self._inputs_in_repository((scratch / "dependencies").read_text())
        # Without its stamp a unit is stale: never is there an old stamp beside a new object.
        self._file(unit.name, "json").unlink(missing_ok=True)
        (scratch / "object").replace(self._file(unit.name, "o"))
        write_if_different(self._file(unit.name, "log"), log)
        if unit.is_kernel:
            write_if_different(self._file(unit.name, "ptx"), self._ptx(unit, scratch))
        self._write_stamp(unit.name, self._flags(unit), inputs)
        shutil.rmtree(scratch)

    def _inputs_in_repository(self, makefile: str) -> list[str]:
        paths = {(self.root / path).resolve() for path in dependencies(makefile)}
        return sorted(self._in_repository(path) for path in paths if path.is_relative_to(self.root))

    def _ptx(self, unit: Unit, scratch: Path) -> str:
        architecture = virtual_architecture(self.architectures)
        # nvcc puts the architecture in the name only if there are several
        for name in (f"{unit.name}.compute_{architecture}.ptx", f"{unit.name}.ptx"):
            if (scratch / name).is_file():
                # The sources in it are named as seen from the root, wherever that was.
                return (
                    (scratch / name).read_text().replace(f'"{self.root}/', '"').replace('"./', '"')
                )
        raise BuildError(f"{unit.name}: {self.toolchain.nvcc} --keep left no PTX in {scratch}")

    def _report_unit(self, job: _Job, done: int, total: int) -> None:
        seconds = time.monotonic() - job.started
        self.report(f"[{done:{len(str(total))}}/{total}] {job.unit.name} {seconds:.1f} s")
        for line in self._file(job.unit.name, "log").read_text().splitlines():
            if "warning" in line.lower():
                self.report(line)

    def _link(self, units: Sequence[Unit], package: Path) -> None:
        exports = self._file("library", "exports")
        write_if_different(exports, _EXPORTS)
        objects = [self._in_repository(self._file(unit.name, "o")) for unit in units]
        inputs = [self._in_repository(exports), *objects]
        library = package / LIBRARY
        if self._stamp_matches("library", _LINK_FLAGS, [library]) and self._linked() == inputs:
            return
        package.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=package, prefix=".linking-") as scratch:
            linked = Path(scratch) / LIBRARY
            command = [
                str(self.toolchain.nvcc),
                *_LINK_FLAGS,
                *("-Xlinker", f"--version-script={self._in_repository(exports)}"),
                *(f"-L{folder}" for folder in self.toolchain.library_folders),
                *objects,
                *("-o", str(linked)),
            ]
            result = subprocess.run(
                command, cwd=self.root, capture_output=True, text=True, check=False
            )
            if result.returncode:
                raise BuildError(
                    f"{LIBRARY}: linking failed with exit status {result.returncode}\n"
                    f"{shlex.join(command)}\n{result.stdout}{result.stderr}"
                )
            linked.replace(library)
        self._write_stamp("library", _LINK_FLAGS, inputs)
        self.report(f"{LIBRARY} {time.monotonic() - started:.1f} s")

    def _linked(self) -> list[str]:
        return json.loads(self._file("library", "json").read_text())["inputs"]

    def _publish(self, kernels: Sequence[str], suffix: str, folder: Path) -> None:
        _mirror([self._file(name, suffix) for name in kernels], folder)

    def _publish_best_configs(self, folder: Path) -> None:
        _mirror(sorted((self.root / CONFIG_FOLDER).glob(BEST_PATTERN)), folder)


def _mirror(files: Sequence[Path], folder: Path) -> None:
    """Make `folder` hold these text files and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(files):
        write_if_different(folder / file.name, file.read_text())
    names = {file.name for file in files}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def start_compiler(command: Sequence[str], root: Path, scratch: Path) -> subprocess.Popen[bytes]:
    """Start nvcc in `root`, with what it says in the file `log` of `scratch`; see `kill_group`."""
    with (scratch / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that nvcc's own children can be ended with it
        )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and its children."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_built_files(package: Path, destination: Path) -> None:
    """Copy what `LibraryBuild.run` put into `package` to `destination`, and nothing else."""
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copy2(package / LIBRARY, destination / LIBRARY)
    for name in (PTX_FOLDER, LOG_FOLDER):
        shutil.rmtree(destination / name, ignore_errors=True)
        shutil.copytree(package / name, destination / name)
    _mirror(sorted((package / CONFIG_FOLDER).glob(BEST_PATTERN)), destination / CONFIG_FOLDER)
