"""Facts of machine code, found by `sass/`: of this library's kernels by config, beside their
measurements, and of kernels from any file."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.console.progress import Progress
from flash_helpers.gpu import SM_COUNTS, largest_device
from flash_helpers.kernel_configs import (
    Config,
    Problem,
    find_config,
    get_kernel_progression_configs,
)
from flash_helpers.measure.results import BenchmarkResults, size_of
from flash_helpers.registry.families import names_in_symbol
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError, find_steps, names_of
from flash_helpers.runtime import library
from flash_helpers.sass.analyse.bound import Chip, Launch, Measured, Prediction, predict
from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.analyse.phases import NotDeterminedError, Unit, trip_counts
from flash_helpers.sass.read.choice import KernelPath
from flash_helpers.sass.read.lines import Chain, relative_to_repository
from flash_helpers.sass.read.reader import (
    Chosen,
    chosen_kernels,
    load_kernel,
    read_chosen,
)
from flash_helpers.sass.read.records import Kernel, SassError, SourceLine
from flash_helpers.sass.read.symbols import plain_name
from flash_helpers.sass.show.comparison_page import comparison_page
from flash_helpers.sass.show.page import read_sources

ARCHITECTURE = "sm_90"  # of the committed measurements, and the default
DIGITS = 16  # of a digest
SIZE = 4096  # of the problem whose measurement a bound is compared with

_FOLDED = "vN"


# -- the library's kernels -------------------------------------------------------------------------


def listed_configs(architecture: str) -> list[Config]:
    """Listed configs with kernels for an architecture such as "sm_90", sorted.

    Raises SassError if there is none, or the package is not installed.
    """
    found = []
    try:
        for config in library.kernels():
            with contextlib.suppress(ValueError):
                config.family.target_on(architecture)
                found.append(config)
    except RuntimeError as error:
        raise SassError(str(error)) from error
    if not found:
        raise SassError(f"no kernel is made for {architecture}")
    return found


def own_kernels(
    architecture: str,
    configs: Iterable[Config],
    *,
    progress: Progress | None = None,
) -> dict[Config, Kernel]:
    """Main kernels of configs for an architecture, by config, sorted: those of the library, and
    others compiled now if the cache does not have them.

    Raises SassError as `reader.load_kernels` does, if a kernel does not compile, and for configs
    that are not made for the architecture.
    """
    found = all_kernels(architecture, configs, progress=progress)
    return {config: kernels[config.main_kernel] for config, kernels in found.items()}


def all_kernels(
    architecture: str,
    configs: Iterable[Config],
    *,
    progress: Progress | None = None,
) -> dict[Config, dict[str, Kernel]]:
    """Kernels of configs for an architecture, by config and C++ function, sorted by config.

    They come from where those of `own_kernels` do, and so do the errors.
    """
    wanted = sorted({*configs})
    kernels = read_chosen(own_chosen(architecture, wanted), sources=own_paths, progress=progress)
    found = {names_in_symbol(kernel.symbol): kernel for kernel in kernels}
    return {
        config: {f: found[config.step.namespace, f, config.short_form()] for f in config.kernels}
        for config in wanted
    }


def code_digest(kernels: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of a config's machine code. kernels: symbols and their .text sections."""
    digest = hashlib.sha256()
    for _, code in sorted(kernels):
        digest.update(code)
    return digest.hexdigest()[:DIGITS]


def own_chosen(architecture: str, configs: Iterable[Config]) -> Chosen:
    """Kernels of configs for an architecture, each with the cubin that holds it, without
    disassembling. The errors are those of `own_kernels`."""
    own = [*configs]
    try:
        paths = library.code_paths(own, architecture)
    except (RuntimeError, ValueError) as error:
        raise SassError(str(error)) from error
    names: dict[Path, list[str]] = {}
    for config in own:
        for function, name in config.kernels.items():
            in_cpp = f"{config.step.namespace}::{function}<{config.short_form()}>"
            names.setdefault(paths[name], []).append(in_cpp)
    return [
        kernel
        for path, own in names.items()
        for kernel in chosen_kernels(path, architecture, own, member="")
    ]


def own_paths(symbol: str, sources: Sequence[Chain]) -> Sequence[Chain]:
    """Source lines of a kernel. For a kernel of this library, their paths are relative to the
    repository."""
    config = find_config(symbol)
    return sources if config is None else relative_to_repository(sources, str(config.step.source))


def readable_name(symbol: str) -> str:
    """Short form of a kernel of this library; for other kernels the name in C++."""
    config = find_config(symbol)
    return config.short_form() if config else plain_name(symbol)


def kernel_names(selectors: Iterable[str]) -> list[str]:
    """Names of kernels in a file, as `sass.read.choice` takes them. Steps, given as ids, numbers or
    ranges, become their namespaces."""
    names = []
    for selector in selectors:
        try:
            steps = find_steps(selector) if selector[-1:].isdigit() else None
        except UsageError:  # not a step, so the name of a kernel
            steps = None
        names += [selector] if steps is None else [step.namespace for step in steps]
    return names


# -- kernels of any file ---------------------------------------------------------------------------


def file_in(text: str) -> KernelPath | None:
    """The file, and perhaps the kernel, that FILE or FILE#NAME names; None for a text that cannot
    name a file, such as a step. Raises UsageError for an absent file."""
    where = KernelPath.parse(text)
    if where.path.is_file():
        return where
    if str(where) != where.path.name or where.path.suffix[1:].isalpha():
        raise UsageError(f"{where.path} is not a file that is there")
    return None


def file_facts(
    where: KernelPath,
    architecture: str | None,
    results: BenchmarkResults | None,
    *,
    names: Iterable[str] = (),
    progress: Progress | None = None,
) -> KernelFacts:
    """Facts of a kernel in a file; for a kernel of this library, facts of its config.

    architecture, names: as for `reader.load_kernel`, added to the name in `where`.
    results: as for `config_facts`.

    Raises as `reader.load_kernel` does.
    """
    names = kernel_names([*where.names, *names])
    kernel = load_kernel(
        where.path, architecture, names, where.member, sources=own_paths, progress=progress
    )
    config = find_config(kernel.symbol)
    if config is not None:
        facts: KernelFacts = config_facts(config, kernel, results)
    else:
        named = {"kernel": kernel.name, "file": kernel.origin}
        facts = KernelFacts(kernel=kernel, name=kernel.name, identity=named)
    return replace(facts, where=where)


def with_sources(kernel: Kernel, folder: Path) -> tuple[Kernel, dict[str, str]]:
    """The kernel, and the texts by path of the sources that lie beside its file, or where its line
    table says. Relative paths in both get `folder` in front, so that files of one name in several
    folders are told apart."""
    found = read_sources([kernel], folder, elsewhere=True)
    texts = {str(folder / name): text for name, text in found.items()}

    def moved(line: SourceLine) -> SourceLine:
        path = str(folder / line.file)
        return replace(line, file=path) if path in texts else line

    instructions = (
        replace(i, source=tuple(map(moved, i.source))) if i.source else i
        for i in kernel.instructions
    )
    return replace(kernel, instructions=tuple(instructions)), texts


# -- launches --------------------------------------------------------------------------------------


def launch_of(config: Config, problem: Problem | None = None) -> Launch:
    """Launch of a kernel for a problem; without a problem, a single thread block."""
    if problem is None:
        return Launch(config.n_threads, config.smem_bytes)
    device = largest_device(config.family.capabilities[-1])
    return Launch(
        config.n_threads,
        config.smem_bytes,
        blocks=config.call(problem, problem.strides(), device).n_blocks,
        operations=problem.operations,
        problem=problem.record(),
        words=str(problem),
    )


def unit_of(config: Config) -> Unit | None:
    """Unit of work of a kernel's loops; None without tensor instructions, which tell it."""
    return Unit(*config.loop_unit) if config.loop_unit else None


def trips(kernel: Kernel, config: Config, size: int) -> dict[int, int]:
    """Trip count of each loop of a kernel, by the loop's index, for a problem of a size.

    Raises NotDeterminedError as `phases.trip_counts` does.
    """
    unit = unit_of(config)
    if unit is None:
        raise NotDeterminedError(
            f"{config.short_form()} has no tensor instructions: the trip counts of its loops "
            "are not known"
        )
    try:
        return trip_counts(kernel, unit, config.loop_runs(size))
    except NotDeterminedError as error:
        text = str(error).replace(kernel.name, config.short_form())
        raise NotDeterminedError(f"{text} ({_size_text(config, size)})") from error


def _size_text(config: Config, size: int) -> str:
    return f"{config.family.operation.size_word} {size}"


def predict_config(kernel: Kernel, config: Config, problem: Problem, chip: Chip) -> Prediction:
    """Least time of a launch for a problem. Raises as `trips` and `bound.predict` do."""
    found = trips(kernel, config, size_of(problem))
    return predict(kernel, found, launch_of(config, problem), chip)


# -- beside measurements ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigFacts(KernelFacts):
    """Facts of a kernel of this library."""

    config: Config


def measured_on(results: BenchmarkResults | None, kernel: Kernel) -> BenchmarkResults | None:
    """The results if their GPU has the kernel's architecture, else None."""
    if results is None:
        return None
    digits = results.provenance.compute_capability.replace(".", "")
    return results if digits == str(kernel.capability) else None


def timed_launch(
    results: BenchmarkResults, config: Config, size: int
) -> tuple[Problem, Chip] | None:
    """The timed problem, and the GPU at its median clock during the measurement. None without such
    a measurement, without a clock, or if the GPU's number of SMs is not known."""
    dtype = config.dtype.short
    found = results.find(config.short_form(), dtype, size)
    sms = SM_COUNTS.get(results.provenance.gpu)
    if found is None or sms is None or not found.sm_mhz:
        return None
    return found.asked, Chip(sms, statistics.median(found.sm_mhz))


def config_facts(
    config: Config, kernel: Kernel, results: BenchmarkResults | None, size: int = SIZE
) -> ConfigFacts:
    """Facts of a kernel, beside the time of its launch for a problem of a size.

    results: of a benchmark; results of another architecture than the kernel's are ignored.
    """
    results = measured_on(results, kernel)
    found = results.find(config.short_form(), config.dtype.short, size) if results else None
    timed = timed_launch(results, config, size) if results else None
    try:
        prediction = predict_config(kernel, config, *timed) if timed else None
    except NotDeterminedError:
        prediction = None
    return ConfigFacts(
        config=config,
        kernel=kernel,
        name=config.short_form(),
        is_usual=config in get_kernel_progression_configs(),
        identity={
            "config": config.short_form(),
            "step": config.step.id,
            "dtype": config.dtype.short,
        },
        note=config.step.idea,
        launch=launch_of(config),
        unit=unit_of(config),
        prediction=prediction,
        measurement=Measured(found.median_ms, found.speed, found.unit) if found else None,
        timed=_size_text(config, size),
    )


def facts_matrix(rows: Sequence[KernelFacts], results: BenchmarkResults | None) -> Matrix:
    """The matrix of kernels, which are configs or kernels of files. results: as for
    `config_facts`."""
    where = ""
    if results is not None and any(facts.measurement for facts in rows):
        found = results.provenance
        where = f"{found.gpu}, {found.date}, CUDA {found.cuda}, commit {found.commit}"
    timed = next((facts.timed for facts in rows if isinstance(facts, ConfigFacts)), "")
    return Matrix(tuple(rows), _short_names(rows), timed, where)


def _short_names(rows: Sequence[KernelFacts]) -> list[str]:
    """Titles of the kernels. A config of the installed library has its step. A kernel of a file has
    its own name, the file's or both: the first of these that tells all kernels apart."""
    own = [f for f in rows if isinstance(f, ConfigFacts) and f.where is None]
    steps = dict(zip(map(id, own), names_of([f.config for f in own]), strict=True))
    files = [(f.where, f.kernel.symbol) for f in rows if f.where is not None]
    ways: list[list[str]] = [
        [_function_name(symbol) for _, symbol in files],
        [where.path.stem for where, _ in files],
        [where.path.name for where, _ in files],
        [str(where) for where, _ in files],
    ]
    apart = (
        way
        for way in ways
        if len({*way}) == len({where for where, _ in files}) and not {*way} & {*steps.values()}
    )
    named = iter(next(apart, ways[-1]))
    return [steps[id(facts)] if facts.where is None else next(named) for facts in rows]


def _function_name(symbol: str) -> str:
    """Short form of a config; else the function's own name, without namespaces, arguments and
    template arguments."""
    config = find_config(symbol)
    if config is not None:
        return config.short_form()
    name = plain_name(symbol).replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].rpartition(" ")[2].rpartition("::")[2] or symbol


# -- sources ---------------------------------------------------------------------------------------


def own_ptx(config: Config) -> str:
    """PTX of a kernel; "" if it cannot be read."""
    try:
        return library.ptx_path(config).read_text(encoding="utf-8")
    except (OSError, RuntimeError):
        return ""


def matrix_page(matrix: Matrix, root: Path) -> str:
    """HTML page of a matrix. root: of the repository. The page shows the repository's sources, and
    sources of other kernels beside their files or where their line tables say."""
    rows, ptx, sources = [], [], {}
    for facts in matrix.rows:
        if facts.where is not None and not isinstance(facts, ConfigFacts):
            kernel, texts = with_sources(facts.kernel, facts.where.path.parent)
            facts = replace(facts, kernel=kernel)
            sources.update(texts)
        rows.append(facts)
        ptx.append(
            own_ptx(facts.config) if isinstance(facts, ConfigFacts) and facts.where is None else ""
        )
    sources.update(read_sources([f.kernel for f in rows if isinstance(f, ConfigFacts)], root))
    only_own = all(isinstance(facts, ConfigFacts) for facts in rows)
    title = "FlashAttention-2 kernels" if only_own else "Kernels"
    return comparison_page(replace(matrix, rows=tuple(rows)), ptx, sources, title)


def source_diff(before: Step, after: Step, root: Path, fold_namespace: bool = False) -> str:
    """Unified diff of two steps' own files.

    root: of the repository. The sources are not part of the installed package; if they are missing
    the text says so. fold_namespace: write both steps' namespaces as one name, so that they do not
    differ.
    """
    texts = []
    for step in (before, after):
        path = root / step.source
        if not path.is_file():
            return (
                f"{step.source} is missing: the sources are not part of the installed package, "
                "so run the tool from a checkout of the repository\n"
            )
        text = path.read_text(encoding="utf-8")
        if fold_namespace:
            name = step.namespace
            text = re.sub(rf"\b{name}(?=::)|(?<=\bnamespace ){name}\b", _FOLDED, text)
        texts.append(text.splitlines(keepends=True))
    old, new = texts
    return "".join(difflib.unified_diff(old, new, str(before.source), str(after.source)))
