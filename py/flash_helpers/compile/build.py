"""Builds the kernel library: one fatbin a kernel, in parallel, and only what has changed.

Everything between is kept below the root of the repository: in `build/maps` each family's map, in
`build/kernels` `<kernel>.cu`, `.fatbin`, `.ptx`, `.log` (what ptxas -v said) and `.json` (what the
fatbin was made from), the host's object, and what embeds the fatbins. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.codegen import (
    BEST_PATTERN,
    CONFIG_FOLDER,
    REGISTRATION_HEADERS,
    BuiltKernel,
    configs_to_build,
    kernel_map_header,
    kernel_unit,
    registration_unit,
)
from flash_helpers.compile.compiler import Finished, run_compilers
from flash_helpers.compile.ptxas import performance_losses
from flash_helpers.compile.toolchain import (
    BuildError,
    Toolchain,
    find_toolchain,
    requested_architectures,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.registry.selection import UsageError, parse_steps

LIBRARY = "libflash_attention.so"
PTX_FOLDER = "ptx"
LOG_FOLDER = "ptxas"
MAP_FOLDER = "build/maps"
STEPS_VARIABLE = "FLASH_ATTENTION_STEPS"

_LIBRARY_SOURCE = "src/flash_attention.cu"
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-lineinfo",
    f"-I{MAP_FOLDER}",
    "-Isrc/include",
    "-I.",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "--expt-relaxed-constexpr",
    "-Xptxas",
    "-v",
)
_LINK_FLAGS = (
    *("-shared", "--cudart", "static"),
    *("-std=c++20", "-Isrc/include", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")  # of PTX
# Hidden visibility alone lets through what the C++ library's headers mark as default.
_EXPORTS = "{ global: flash_*; local: *; };\n"


@dataclass(frozen=True)
class Unit:
    """One translation unit: its name, its source relative to the root, what it is compiled for
    (such as "80" or "90a"), and extra flags."""

    name: str
    source: str
    targets: tuple[str, ...]
    flags: tuple[str, ...] = ()
    is_kernel: bool = True

    @property
    def suffix(self) -> str:
        """Of what it becomes: of a kernel only the device code is compiled."""
        return "fatbin" if self.is_kernel else "o"


def architecture_names(targets: Sequence[str]) -> str:
    """What the library is built for, e.g. "sm_80 sm_90 compute_80": it carries the PTX of the first
    for GPUs that it holds no machine code for."""
    return " ".join([*(f"sm_{target}" for target in targets), f"compute_{targets[0]}"])


def gencode_flags(targets: Sequence[str]) -> list[str]:
    """nvcc's flags for machine code for each target, and PTX for the first.

    To make PTX is most of the work. Targets share that of the first of them where theirs would
    differ in the name of the target only: all up to 90, and later those of one major version.
    """

    def generation(target: str) -> str:
        if not target.isdecimal():
            return target
        return "up to 90" if int(target) <= 90 else target[:-1]

    sharing: dict[str, list[str]] = {}
    for target in targets:
        sharing.setdefault(generation(target), []).append(target)
    flags = []
    for own in sharing.values():
        code = [f"sm_{target}" for target in own]
        if own[0] == targets[0]:
            code.append(f"compute_{own[0]}")
        flags += ["-gencode", f"arch=compute_{own[0]},code=[{','.join(code)}]"]
    return flags


def requested_jobs(environ: Mapping[str, str]) -> int:
    """How many compilers to run at once: MAX_JOBS, or the number of cores. Raises BuildError."""
    text = environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text!r} is not a positive number of compilers to run at once")
    return int(text)


def preprocessed_files(preprocessed: str) -> set[str]:
    """The files that a preprocessor has put together, by its line markers
    (https://gcc.gnu.org/onlinedocs/cpp/Preprocessor-Output.html)."""
    return set(re.findall(r'^# \d+ "([^<"][^"]*)"', preprocessed, re.MULTILINE))


class LibraryBuild:
    """One build of the library in the repository at `root`.

    configs: the kernels that it holds. report: receives progress, a line at a time.
    """

    def __init__(
        self,
        root: Path,
        toolchain: Toolchain,
        architectures: Sequence[int],
        jobs: int,
        report: Callable[[str], None],
        configs: Iterable[Config],
    ) -> None:
        self.root = root.resolve()
        self.toolchain = toolchain
        self.architectures = tuple(architectures)
        self.jobs = jobs
        self.report = report
        self.configs = tuple(configs)
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
        with contextlib.closing(
            run_compilers(stale, self._compile_command, self.root, self.folder, self.jobs)
        ) as finished:
            for done, compiled in enumerate(finished, start=1):
                self._keep(compiled)
                self._report_unit(compiled, f"[{done:{len(str(len(stale)))}}/{len(stale)}]")
        self._link(units, package)
        kernels = [unit.name for unit in units if unit.is_kernel]
        self._publish(kernels, "ptx", package / PTX_FOLDER)
        self._publish(kernels, "log", package / LOG_FOLDER)
        self._publish_best_configs(package / CONFIG_FOLDER)

    def _units(self) -> list[Unit]:
        """Write what the generator makes of the configs, and list what there is to compile."""
        kernels: list[Unit] = []
        for family in FAMILIES.values():
            targets = family.targets_for(self.architectures)
            own = [config for config in self.configs if config.family is family and targets]
            if not targets:
                self.report(f"family {family.name} needs sm_{' or sm_'.join(family.targets)}")
            maps = self.root / MAP_FOLDER / family.map_header.name
            write_if_different(maps, kernel_map_header(family, own))
            for config in own:
                name = config.short_form()
                source = self._file(name, "cu")
                write_if_different(source, kernel_unit(config))
                kernels.append(Unit(name, self._in_repository(source), targets))
        targets = tuple(dict.fromkeys(target for unit in kernels for target in unit.targets))
        if not targets:
            raise BuildError("a library needs at least one kernel: no config was given")
        flags = (f'-DFLASH_ATTENTION_ARCHS="{architecture_names(targets)}"',)
        host = Unit("flash_attention", _LIBRARY_SOURCE, targets, flags, is_kernel=False)
        return [host, *kernels]

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _output(self, unit: Unit) -> Path:
        return self._file(unit.name, unit.suffix)

    def _in_repository(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _flags(self, unit: Unit) -> list[str]:
        return [*COMPILE_FLAGS, *gencode_flags(unit.targets), *unit.flags]

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
        return (unit.suffix, "log", *(("ptx",) if unit.is_kernel else ()))

    def _is_fresh(self, unit: Unit) -> bool:
        outputs = [self._file(unit.name, suffix) for suffix in self._suffixes(unit)]
        return self._stamp_matches(unit.name, self._flags(unit), outputs)

    def _compile_command(self, unit: Unit, scratch: Path) -> list[str]:
        # Paths are relative to the root, where nvcc runs: they end up in the line tables.
        keep = self._in_repository(scratch)
        return [
            str(self.toolchain.nvcc),
            *self._flags(unit),
            *("--keep", "--keep-dir", keep),
            *("-fatbin" if unit.is_kernel else "-c", unit.source, "-o", f"{keep}/output"),
        ]

    def _keep(self, compiled: Finished[Unit]) -> None:
        unit, scratch = compiled.item, compiled.scratch
        if compiled.status:
            raise BuildError(
                f"{unit.name}: nvcc failed with exit status {compiled.status}\n"
                f"{shlex.join(compiled.command)}\n{compiled.log}"
            )
        if losses := performance_losses(compiled.log):
            raise BuildError(
                f"{unit.name}: ptxas did not compile it as it is written; find out what it needs "
                "(registers, a wgmma.fence, constant indices of accumulators), or choose a smaller "
                f"tile\n{shlex.join(compiled.command)}\n" + "\n".join(losses)
            )
        inputs = self._inputs_in_repository(unit, scratch)
        # Without its stamp a unit is stale: never is there an old stamp beside a new output.
        self._file(unit.name, "json").unlink(missing_ok=True)
        (scratch / "output").replace(self._output(unit))
        write_if_different(self._file(unit.name, "log"), compiled.log)
        if unit.is_kernel:
            write_if_different(self._file(unit.name, "ptx"), self._ptx(unit, scratch))
        self._write_stamp(unit.name, self._flags(unit), inputs)

    def _inputs_in_repository(self, unit: Unit, scratch: Path) -> list[str]:
        # -MD would have a kernel's unit preprocessed for the host, too.
        texts = (path.read_text(errors="replace") for path in scratch.glob("*.ii"))
        names = set().union(*map(preprocessed_files, texts))
        if unit.source not in names:
            raise BuildError(
                f"{unit.name}: {self.toolchain.nvcc} --keep left nothing preprocessed in {scratch}"
            )
        paths = {(self.root / name).resolve() for name in names}
        return sorted(self._in_repository(path) for path in paths if path.is_relative_to(self.root))

    def _ptx(self, unit: Unit, scratch: Path) -> str:
        # nvcc puts the architecture in the name only if there are several
        for name in (f"{unit.name}.compute_{unit.targets[0]}.ptx", f"{unit.name}.ptx"):
            if (scratch / name).is_file():
                # The sources in it are named as seen from the root, wherever that was.
                return (
                    (scratch / name).read_text().replace(f'"{self.root}/', '"').replace('"./', '"')
                )
        raise BuildError(f"{unit.name}: {self.toolchain.nvcc} --keep left no PTX in {scratch}")

    def _report_unit(self, compiled: Finished[Unit], place: str) -> None:
        self.report(f"{place} {compiled.item.name} {compiled.seconds:.1f} s")
        for line in compiled.log.splitlines():
            if "warning" in line.lower():
                self.report(line)

    def _kernel(self, unit: Unit) -> BuiltKernel:
        (symbol,) = _ENTRY.findall(self._file(unit.name, "ptx").read_text())
        return BuiltKernel(unit.name, self._in_repository(self._output(unit)), symbol)

    def _link(self, units: Sequence[Unit], package: Path) -> None:
        exports = self._file("library", "exports")
        write_if_different(exports, _EXPORTS)
        host, *kernel_units = units
        kernels = [self._kernel(unit) for unit in kernel_units]
        registration = self._file("registration", "cpp")
        write_if_different(registration, registration_unit(kernels))
        given = [self._in_repository(path) for path in (self._output(host), registration)]
        inputs = [self._in_repository(exports), *given, *REGISTRATION_HEADERS]
        inputs += (kernel.fatbin for kernel in kernels)
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
                *given,
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


def requested_configs(root: Path, environ: Mapping[str, str]) -> list[Config]:
    """The configs to build: all, or those of the steps that the environment names.

    Raises OSError, ValueError, and BuildError for a name that is no step's.
    """
    configs = configs_to_build(root)
    names = environ.get(STEPS_VARIABLE, "").split()
    try:
        steps = parse_steps(names)
    except UsageError as error:
        raise BuildError(f"{STEPS_VARIABLE}: {error}") from error
    return [config for config in configs if config.step in steps] if names else configs


def build_package(
    root: Path,
    package: Path,
    report: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Build what the environment asks for into `package`.

    Raises BuildError, OSError and ValueError.
    """
    architectures = requested_architectures(environ)
    LibraryBuild(
        root=root,
        toolchain=find_toolchain(architectures, environ),
        architectures=architectures,
        jobs=requested_jobs(environ),
        report=report,
        configs=requested_configs(root, environ),
    ).run(package)


def copy_built_files(package: Path, destination: Path) -> None:
    """Copy what `LibraryBuild.run` put into `package` to `destination`, and nothing else."""
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copy2(package / LIBRARY, destination / LIBRARY)
    for name in (PTX_FOLDER, LOG_FOLDER):
        shutil.rmtree(destination / name, ignore_errors=True)
        shutil.copytree(package / name, destination / name)
    _mirror(sorted((package / CONFIG_FOLDER).glob(BEST_PATTERN)), destination / CONFIG_FOLDER)
