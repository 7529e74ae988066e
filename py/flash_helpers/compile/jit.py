"""Kernels compiled when they are first needed, in parallel, by child processes, through the cache.

Standard library only, apart from the progress line: the build of a wheel fills a cache, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flash_helpers.compile.build import requested_jobs
from flash_helpers.compile.cache import (
    COMPILERS,
    CUBIN,
    FOLDER_VARIABLE,
    LOG,
    PTX,
    Cache,
    Compiled,
    Recipe,
    cache_folder,
    machine_target,
    require_room,
)
from flash_helpers.compile.codegen import kernel_unit
from flash_helpers.compile.compilers import Compiler, Places, check_target, find_compiler
from flash_helpers.compile.package import COMPILED_FOLDER, package_folder, sources_root
from flash_helpers.compile.processes import Programs
from flash_helpers.compile.ptxas import (
    HOW_TO_AVOID_LOSSES,
    entry_symbols,
    performance_losses,
)
from flash_helpers.compile.sources import Sources, Unit
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.kernel_configs import Config

VERBOSE_VARIABLE = "FLASH_ATTENTION_JIT_VERBOSE"
DEBUG_VARIABLE = "FLASH_ATTENTION_JIT_DEBUG"
FOREVER = float("inf")

_ERROR_LINE = re.compile(r"^.*(?:\berror\b|\bfatal\b|Performance Loss).*$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one unit: a compiled kernel, or a failure. `log`: all that the compiler wrote."""

    unit: Unit
    target: str
    compiled: Compiled | None
    failure: str = ""
    log: str = ""

    @property
    def reason(self) -> str:
        """The failure and the compiler's first error, in one line."""
        return ": ".join([self.failure, *_ERROR_LINE.findall(self.log)[:1]])


class Jit:
    """Compiles units of the sources at `root`.

    `find`: finds the compiler, when one is needed. `jobs`: compilers that run at once. `debug`:
    without optimisation, for a debugger. `verbose`: tells each command, its time and its messages
    on stderr.
    """

    def __init__(
        self,
        root: Path,
        cache: Cache,
        find: Callable[[], Compiler],
        jobs: int,
        *,
        debug: bool = False,
        verbose: bool = False,
    ) -> None:
        self.root = root.resolve()
        self.cache = cache
        self.jobs = jobs
        self.debug = debug
        self.verbose = verbose
        self._find = find
        self.sources = Sources(root)
        self._known: dict[str, Compiled] = {}  # by digest of the recipe

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler. Raises BuildError if there is none."""
        return self._find()

    def get(self, units: Sequence[Unit], target: str | Sequence[str]) -> list[Compiled]:
        """Return the compiled kernel of each unit. Those that the cache lacks are compiled, in
        parallel, with a line of progress if stderr is a terminal.

        `target`: such as "sm_90a", or "compute_90a" for PTX alone; one for all or one for each.

        Raises BuildError, with the compiler's text, for the first unit that does not compile.
        """
        wanted = _pairs(units, target)
        found, missing = self._look_up(wanted)
        with (
            self._progress(missing) as advance,
            contextlib.closing(self._compile(missing, FOREVER)) as outcomes,
        ):
            for outcome in outcomes:
                if outcome.compiled is None:
                    raise BuildError(
                        f"{outcome.unit.name} for {outcome.target}: "
                        f"{outcome.failure}\n{outcome.log}"
                    )
                found[outcome.unit, outcome.target] = outcome.compiled
                advance()
        return [found[pair] for pair in wanted]

    def each(
        self, units: Sequence[Unit], target: str | Sequence[str], timeout_s: float
    ) -> Generator[Outcome, None, None]:
        """Yield the outcome of each unit as it becomes known, failures too. Kernels that the cache
        has come first.

        `timeout_s`: most seconds for one unit.

        Compilers run on between two outcomes. They are ended if the iterator is closed. Raises
        BuildError if no kernel of a target can be compiled at all.
        """
        found, missing = self._look_up(_pairs(units, target))
        for (unit, own_target), compiled in found.items():
            yield Outcome(unit, own_target, compiled)
        yield from self._compile(missing, timeout_s)

    def has(self, units: Sequence[Unit], target: str) -> bool:
        """Whether the cache has all units' kernels. Raises BuildError without a compiler."""
        return not self._look_up(_pairs(units, target))[1]

    def recipe(self, unit: Unit, target: str, debug: bool | None = None) -> Recipe:
        """Return everything that a unit's kernel is made from. Raises BuildError.

        PTX alone is always optimised: it is for the simulator, in which no debugger runs. Without
        optimisation the registers of a `wgmma` move between two of them with no fence, for which
        ptxas makes up, and the simulator reports a fault.
        """
        debug = (self.debug if debug is None else debug) and machine_target(target)
        text = hashlib.sha256(unit.text.encode()).hexdigest()
        return Recipe(unit.name, target, debug, text, self.sources.included(unit.text))

    def key(self, recipe: Recipe) -> str:
        """Return the key of a recipe's kernel in the cache. Raises BuildError."""
        return recipe.key(self._described_compiler(recipe))

    def _described_compiler(self, recipe: Recipe) -> dict[str, Any]:
        return {
            "name": self.compiler.name,
            "identity": self.compiler.identity,
            "flags": self.compiler.flags(recipe.target, recipe.debug),
        }

    def _look_up(
        self, wanted: Iterable[tuple[Unit, str]]
    ) -> tuple[dict[tuple[Unit, str], Compiled], dict[tuple[Unit, str], Recipe]]:
        """Return the kernels that are there, and the recipes of the others."""
        found, missing = {}, {}
        for unit, target in wanted:
            recipe = self.recipe(unit, target)
            compiled = self._known.get(recipe.digest)
            if compiled is None or not compiled.ptx_path.exists():
                compiled = self.cache.find_prebuilt(recipe)
                compiled = compiled or self.cache.find(recipe, self.key(recipe))
            if compiled is None:
                missing[unit, target] = recipe
            else:
                found[unit, target] = self._known[recipe.digest] = compiled
        return found, missing

    def _compile(
        self, missing: Mapping[tuple[Unit, str], Recipe], timeout_s: float
    ) -> Generator[Outcome, None, None]:
        if not missing:
            return
        for target in dict.fromkeys(target for _, target in missing):
            check_target(self.compiler, target)
        self.cache.sweep()
        programs = Programs()
        pool = ThreadPoolExecutor(max_workers=min(self.jobs, len(missing)))
        try:
            futures = [
                pool.submit(self._make, programs, unit, recipe, timeout_s)
                for (unit, _), recipe in missing.items()
            ]
            for future in as_completed(futures):
                yield future.result()
        finally:
            programs.is_stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            programs.stop()
            pool.shutdown()

    def _make(self, programs: Programs, unit: Unit, recipe: Recipe, timeout_s: float) -> Outcome:
        """Compile one unit, unless another thread or process has done so meanwhile."""
        compiled: Compiled | None
        while True:
            key, folder = self.key(recipe), self.cache.writable
            try:
                with self.cache.claim(recipe, key, programs.is_stopped) as scratch:
                    if compiled := self.cache.find(recipe, key):
                        break
                    made = self._run(programs, unit, recipe, scratch, timeout_s)
                    if (now := self.recipe(unit, recipe.target)) != recipe:
                        recipe = now  # a file was changed while the compiler was reading
                        continue
                    if isinstance(made, Outcome):
                        return made
                    compiler = self._described_compiler(recipe)
                    compiled = self.cache.keep(scratch, recipe, key, compiler, made)
                    break
            except OSError as error:
                self.cache.fall_back(folder, error)
        self._known[recipe.digest] = compiled
        return Outcome(unit, recipe.target, compiled)

    def _run(
        self, programs: Programs, unit: Unit, recipe: Recipe, scratch: Path, timeout_s: float
    ) -> Outcome | str:
        """Compile a unit in a folder of the cache. Return the kernel's symbol, or the failure.

        Raises OSError if the folder cannot be written.
        """
        name, target = self.compiler.name, recipe.target
        source, log_file = scratch / f"{unit.name}.cu", scratch / LOG
        source.write_text(unit.text)
        command = self.compiler.command(source, target, scratch, recipe.debug)
        begin = time.monotonic()
        status = programs.run(command, self.root, log_file, timeout_s)
        log = log_file.read_text(errors="replace")
        if self.verbose:
            said = f"{unit.name} for {target}: {time.monotonic() - begin:.1f} s"
            print(f"{self._told(unit, recipe)}\n{said}\n{log.rstrip()}", file=sys.stderr)

        def failed(failure: str) -> Outcome:
            return Outcome(unit, target, None, failure, log)

        if status is None:
            return failed(f"{name} took over {timeout_s:g} s")
        if status:
            require_room(scratch)
            return failed(f"{name} failed with exit status {status}")
        if performance_losses(log) and not recipe.debug:
            return failed(HOW_TO_AVOID_LOSSES)
        wanted = (PTX, CUBIN) if machine_target(target) else (PTX,)
        if lacking := [file for file in wanted if not (scratch / file).is_file()]:
            return failed(f"{name} reported no error and wrote no {lacking[0]}")
        symbols = entry_symbols((scratch / PTX).read_text())
        if len(symbols) != 1:
            return failed(f"the unit has {len(symbols)} kernels and should have one")
        return symbols[0]

    def _told(self, unit: Unit, recipe: Recipe) -> str:
        """The command that compiles a unit, for a shell. Its files go to the temporary folder.

        Raises OSError if the cache's folder cannot be written.
        """
        kept, folder = self.cache.keep_unit(unit), Path(tempfile.gettempdir())
        command = self.compiler.command(kept, recipe.target, folder, recipe.debug)
        return f"cd {shlex.quote(str(self.root))} && {shlex.join(command)}"

    @contextlib.contextmanager
    def _progress(
        self, missing: Iterable[tuple[Unit, str]]
    ) -> Generator[Callable[[], object], None, None]:
        """Show a line of progress, and yield a function that advances it by a kernel."""
        wanted = list(missing)
        if not wanted or self.verbose or not sys.stderr.isatty():
            yield lambda: None
            return
        from flash_helpers.console.progress import bar

        n = len(wanted)
        kernels = wanted[0][0].name if n == 1 else f"{n} kernels"
        targets = dict.fromkeys(target for _, target in wanted)
        description = f"compiling {kernels} for {', '.join(targets)}"
        form = "{desc}: {n_fmt} of {total_fmt}"
        with bar(total=n, desc=description, bar_format=form, leave=False) as shown:
            yield shown.update


def _pairs(units: Sequence[Unit], target: str | Sequence[str]) -> list[tuple[Unit, str]]:
    targets = [target] * len(units) if isinstance(target, str) else target
    return list(zip(units, targets, strict=True))


# -- the process's own -----------------------------------------------------------------------------


def default_jit(environ: Mapping[str, str] = os.environ) -> Jit:
    """Return the Jit of this process, as the environment sets it: FLASH_ATTENTION_CACHE_DIR,
    FLASH_ATTENTION_JIT_VERBOSE, FLASH_ATTENTION_JIT_DEBUG and MAX_JOBS.

    Raises BuildError for a wrong value, and RuntimeError if the package or its sources are missing.
    """
    return _default_jit(
        package_folder(),
        environ.get(FOLDER_VARIABLE, ""),
        requested_jobs(environ),
        _is_on(environ, DEBUG_VARIABLE),
        _is_on(environ, VERBOSE_VARIABLE),
    )


@functools.lru_cache(maxsize=8)
def _default_jit(package: Path, folder: str, jobs: int, debug: bool, verbose: bool) -> Jit:
    cache = Cache(Path(folder).absolute() if folder else cache_folder(), package / COMPILED_FOLDER)

    def find() -> Compiler:
        return find_compiler(places=Places(memory=cache.folder / COMPILERS))

    return Jit(sources_root(package), cache, find, jobs, debug=debug, verbose=verbose)


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise BuildError(f"{variable}={value!r} is neither 0 nor 1: set it to 1, or unset it")
    return value == "1"


@functools.lru_cache(maxsize=1024)
def units_of(config: Config) -> tuple[Unit, ...]:
    """Return the translation unit of each of a config's kernels, in the order of
    `config.kernels`."""
    return tuple(Unit(name, kernel_unit(config, f)) for f, name in config.kernels.items())
