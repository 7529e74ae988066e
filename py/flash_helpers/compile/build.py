"""Build of the kernel library by ninja: a fatbin per kernel, in parallel, if it has changed.

Intermediate files are kept below the root of the repository: the map of each family in
`build/maps`; in `build/kernels` `<kernel>.cu`, `.fatbin`, `.ptx` and `.log` (output of ptxas -v),
the host's object, the unit that embeds the fatbins, and build.ninja. Standard library only, and the
program ninja.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile import sources
from flash_helpers.compile.codegen import (
    ALL_MAPS,
    BEST_PATTERN,
    CHOICE_PATTERN,
    CONFIG_FOLDER,
    KERNEL_HEADER,
    BuiltKernel,
    all_maps_header,
    families_in_library,
    kernel_map_header,
    kernel_unit,
    library_configs,
    registration_unit,
)
from flash_helpers.compile.compilers import NVCC_FLAGS
from flash_helpers.compile.package import COMPARED_COMPILERS
from flash_helpers.compile.ptxas import (
    HOW_TO_AVOID_LOSSES,
    entry_symbols,
    performance_losses,
)
from flash_helpers.compile.toolchain import (
    LIBRARY_ARCHITECTURES,
    BuildError,
    Toolchain,
    find_ninja,
    find_toolchain,
    requested_architectures,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.selection import UsageError, parse_steps

LIBRARY = "libflash_attention.so"
PTX_FOLDER = "ptx"
LOG_FOLDER = "ptxas"
BUILT_FROM = "built_from.json"  # digest of the sources of each kernel, by name
SOURCES = (
    *(f"{folder}/**/*.cuh" for folder in ("src/include", "previous_kernels", "kernels")),
    *(f"{CONFIG_FOLDER}/{pattern}" for pattern in (BEST_PATTERN, CHOICE_PATTERN)),
    COMPARED_COMPILERS,
)
MAP_FOLDER = "build/maps"
STEPS_VARIABLE = "FLASH_ATTENTION_STEPS"

_LIBRARY_SOURCE = "src/flash_attention.cu"
COMPILE_FLAGS = (f"-I{MAP_FOLDER}", *NVCC_FLAGS, "-Xcompiler", "-fPIC,-fvisibility=hidden")
_LINK_FLAGS = (
    *("-shared", "--cudart", "static"),
    *("-std=c++20", "-Isrc/include", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
)
# Hidden visibility alone lets through what the C++ library's headers mark as default.
_EXPORTS = "{ global: flash_*; local: *; };\n"
_SCRATCH = "build/kernels/.compiling"
# A command's output is moved to its place when it is whole. Paths are relative to the root, where
# nvcc runs: they end up in the line tables.
_RULES = f"""\
builddir = build/kernels
mode = -c
rule compile
  command = rm -rf $scratch && mkdir -p $scratch && $
    $nvcc $flags -MD -MF $scratch/d -MT $out --keep --keep-dir $scratch $mode $in $
    -o $scratch/output >$scratch/log 2>&1 || {{ cat $scratch/log; exit 1; }}; $
    grep -i warning $scratch/log; $
    if [ -n "$ptx" ]; then mv $scratch/$ptx build/kernels/$name.ptx || exit 1; fi; $
    mv $scratch/log build/kernels/$name.log && mv $scratch/d $out.d && $
    mv $scratch/output $out && rm -rf $scratch
  depfile = $out.d
  description = $name
rule link
  command = mkdir -p {_SCRATCH} && $nvcc $flags $in -o {_SCRATCH}/library && $
    mv {_SCRATCH}/library $out
  description = {LIBRARY}
"""


@dataclass(frozen=True)
class Unit:
    """One translation unit: its name, its source relative to the root, the architectures that it is
    compiled for (such as "80" or "90a"), and extra flags."""

    name: str
    source: str
    targets: tuple[str, ...]
    flags: tuple[str, ...] = ()
    is_kernel: bool = True

    @property
    def suffix(self) -> str:
        """Suffix of the output's name: only the device code of a kernel is compiled."""
        return "fatbin" if self.is_kernel else "o"


def architecture_names(targets: Sequence[str]) -> str:
    """Targets of the library, e.g. "sm_80 sm_90 compute_80": it carries the PTX of the first target
    for GPUs without machine code of their own in it."""
    return " ".join([*(f"sm_{target}" for target in targets), f"compute_{targets[0]}"])


def gencode_flags(targets: Sequence[str]) -> list[str]:
    """nvcc's flags for machine code for each target, and PTX for the first.

    Making PTX is most of the work. Targets share the PTX of the first of them where only the
    target's name would differ: all targets up to 90 share one, and later targets share one per
    major version.
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
    """Number of compilers that run at once: MAX_JOBS, or the number of cores. Raises BuildError."""
    text = environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text!r} is not a positive number of compilers to run at once")
    return int(text)


class LibraryBuild:
    """One build of the library in the repository at `root`.

    `configs`: the kernels that it holds. `report`: receives progress, one line per call.
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
        """Build the library, and the PTX and the ptxas log of each kernel, into `package`.

        Raises BuildError, with the compiler's output, when a unit does not compile.
        """
        host, *kernels = self._units()
        write_if_different(self._file("library", "exports"), _EXPORTS)
        write_if_different(self._file("toolchain", "txt"), self.toolchain.identity)
        library = package.resolve() / LIBRARY
        write_if_different(self._file("build", "ninja"), self._rules(host, kernels, library))
        try:
            self._ninja([self._output(unit) for unit in (host, *kernels)])
            for unit in kernels:
                self._refuse_losses(unit)
            registered = [self._kernel(unit) for unit in kernels]
            write_if_different(self._file("registration", "cpp"), registration_unit(registered))
            self._ninja([str(library)])
        finally:
            shutil.rmtree(self.root / _SCRATCH, ignore_errors=True)
        names = [unit.name for unit in kernels]
        _mirror({f"{name}.ptx": self._ptx(name) for name in names}, package / PTX_FOLDER)
        logs = {f"{name}.log": self._file(name, "log").read_text() for name in names}
        _mirror(logs, package / LOG_FOLDER)
        texts = {name: self._file(name, "cu").read_text() for name in names}
        own = sources.Sources(self.root)
        digests = {name: own.digest(sources.Unit(name, text)) for name, text in texts.items()}
        write_if_different(package / BUILT_FROM, json.dumps(digests, indent=1) + "\n")

    def _units(self) -> list[Unit]:
        """Write the sources generated from the configs, and list the units to compile."""
        kernels: list[Unit] = []
        for family in families_in_library():
            targets = family.targets_for(self.architectures)
            own = [config for config in self.configs if config.family is family]
            maps = self.root / MAP_FOLDER / family.map_header.name
            write_if_different(maps, kernel_map_header(family, own))
            for config in own:
                for function, name in config.kernels.items():
                    source = self._file(name, "cu")
                    write_if_different(source, kernel_unit(config, function))
                    kernels.append(Unit(name, self._in_repository(source), targets))
        maps = self.root / MAP_FOLDER / ALL_MAPS.name
        write_if_different(maps, all_maps_header(families_in_library()))
        targets = tuple(dict.fromkeys(target for unit in kernels for target in unit.targets))
        if not targets:
            raise BuildError("a library needs at least one kernel: no config was given")
        flags = (f'-DFLASH_ATTENTION_ARCHS="{architecture_names(targets)}"',)
        host = Unit("flash_attention", _LIBRARY_SOURCE, targets, flags, is_kernel=False)
        return [host, *kernels]

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _in_repository(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _output(self, unit: Unit) -> str:
        return self._in_repository(self._file(unit.name, unit.suffix))

    def _rules(self, host: Unit, kernels: Sequence[Unit], library: Path) -> str:
        """The text of build.ninja: a compilation for each unit, and one link."""
        fatbins = [self._output(unit) for unit in kernels]
        toolchain, exports, registration = (
            self._in_repository(self._file(*name))
            for name in (("toolchain", "txt"), ("library", "exports"), ("registration", "cpp"))
        )
        folders = [f"-L{folder}" for folder in self.toolchain.library_folders]
        version_script = ["-Xlinker", f"--version-script={exports}"]
        texts = [_RULES, f"nvcc = {_words([self.toolchain.nvcc])}"]
        for unit in (host, *kernels):
            flags = [*COMPILE_FLAGS, *gencode_flags(unit.targets), *unit.flags]
            also = [
                self._file(unit.name, suffix) for suffix in ("log", "ptx")[: 1 + unit.is_kernel]
            ]
            outputs = [self._output(unit), "|", *map(self._in_repository, also)]
            texts += [
                f"build {' '.join(outputs)}: compile {unit.source} | {toolchain}",
                f"  name = {unit.name}",
                f"  scratch = {_SCRATCH}/{unit.name}",
                f"  flags = {_words(flags)}",
            ]
            if unit.is_kernel:
                texts += ["  mode = -fatbin", f"  ptx = {_kept_ptx(unit)}"]
        needs = " ".join([exports, toolchain, KERNEL_HEADER, *fatbins])
        texts += [
            f"build {_path(library)}: link {self._output(host)} {registration} | {needs}",
            f"  flags = {_words([*_LINK_FLAGS, *version_script, *folders])}",
        ]
        return "\n".join(texts) + "\n"

    def _ninja(self, targets: Sequence[str]) -> None:
        """Make the targets that are stale, and report each. Raises BuildError if one fails."""
        file = self._in_repository(self._file("build", "ninja"))
        process = subprocess.Popen(
            [find_ninja(), "-f", file, "-j", str(self.jobs), *targets],
            cwd=self.root,
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        failure: list[str] = []
        try:
            for line in process.stdout:
                if failure or line.startswith(("FAILED: ", "ninja: error: ")):
                    failure.append(line)
                else:
                    self.report(line.rstrip())
        except BaseException:
            process.terminate()  # ninja ends its compilers
            raise
        finally:
            status = process.wait()
        if status:
            raise BuildError("".join(failure) or f"ninja ended with status {status}")

    def _refuse_losses(self, unit: Unit) -> None:
        if losses := performance_losses(self._file(unit.name, "log").read_text()):
            raise BuildError("\n".join([f"{unit.name}: {HOW_TO_AVOID_LOSSES}", *losses]))

    def _ptx(self, name: str) -> str:
        """The PTX of a kernel, with the paths of its sources relative to the root."""
        text = self._file(name, "ptx").read_text()
        return text.replace(f'"{self.root}/', '"').replace('"./', '"')

    def _kernel(self, unit: Unit) -> BuiltKernel:
        (symbol,) = entry_symbols(self._file(unit.name, "ptx").read_text())
        return BuiltKernel(unit.name, self._output(unit), symbol)


def _path(path: Path) -> str:
    """A path as build.ninja writes it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def _words(words: Iterable[object]) -> str:
    """Words of a command line as build.ninja writes them."""
    return shlex.join(map(str, words)).replace("$", "$$")


def _kept_ptx(unit: Unit) -> str:
    """File that `nvcc --keep` leaves: its name has the architecture only if there are several."""
    is_alone = gencode_flags(unit.targets).count("-gencode") == 1
    return f"{unit.name}.ptx" if is_alone else f"{unit.name}.compute_{unit.targets[0]}.ptx"


def _mirror(texts: Mapping[str, str], folder: Path) -> None:
    """Make `folder` hold these files, by name, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_if_different(folder / name, text)
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()


def requested_configs(root: Path, environ: Mapping[str, str]) -> list[Config]:
    """The configs to build: all, or those of the steps that the environment names.

    Raises OSError, ValueError, and BuildError for a name that is no step's.
    """
    configs = library_configs(root)
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
    architectures = requested_architectures(environ, LIBRARY_ARCHITECTURES)
    LibraryBuild(
        root=root,
        toolchain=find_toolchain(architectures, environ),
        architectures=architectures,
        jobs=requested_jobs(environ),
        report=report,
        configs=requested_configs(root, environ),
    ).run(package)


def copy_sources(root: Path, destination: Path) -> None:
    """Copy what kernels are compiled from at first use to `destination`, with what is known of the
    machine code, and nothing else."""
    shutil.rmtree(destination, ignore_errors=True)
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            copy = destination / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def copy_built_files(package: Path, destination: Path) -> None:
    """Copy what `LibraryBuild.run` put into `package` to `destination`, and nothing else."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in (LIBRARY, BUILT_FROM):
        shutil.copy2(package / name, destination / name)
    for name in (PTX_FOLDER, LOG_FOLDER):
        shutil.rmtree(destination / name, ignore_errors=True)
        shutil.copytree(package / name, destination / name)
