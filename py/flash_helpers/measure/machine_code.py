"""The machine code of this library's kernels: what `sass/` finds in it, by config, beside what was
measured; and of anybody's kernels beside them."""

from __future__ import annotations

import difflib
import re
import statistics
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.console.progress import Progress
from flash_helpers.gpu import SM_COUNTS, capability_of, largest_device
from flash_helpers.kernel_configs import (
    Config,
    Problem,
    find_config,
    get_kernel_progression_configs,
)
from flash_helpers.measure.results import BenchmarkResults, size_of
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError, find_steps, names_of
from flash_helpers.runtime import library
from flash_helpers.sass.analyse.bound import Chip, Launch, Measured, Prediction, predict
from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.analyse.phases import NotDeterminedError, Unit, trip_counts
from flash_helpers.sass.read.choice import KernelPath
from flash_helpers.sass.read.lines import Chain, relative_to_repository
from flash_helpers.sass.read.reader import list_kernels, load_kernel, load_kernels
from flash_helpers.sass.read.records import Kernel, SassError, SassWarning, SourceLine
from flash_helpers.sass.read.symbols import plain_name
from flash_helpers.sass.show.comparison_page import comparison_page
from flash_helpers.sass.show.page import read_sources

ARCHITECTURE = "sm_90"  # of the committed measurements
SIZE = 4096  # of the problem whose measurement that a bound is compared with

_FOLDED = "vN"


# -- the library's kernels -------------------------------------------------------------------------


def installed_library() -> Path:
    """The kernel library. Raises SassError if it is not there."""
    try:
        return library.library_path()
    except RuntimeError as error:
        raise SassError(str(error)) from error


def library_configs(architecture: str) -> list[Config]:
    """The configs that the installed library holds for an architecture such as "sm_90", sorted.

    Raises SassError as `reader.list_kernels` does, and if there are none.
    """
    path = installed_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SassWarning)  # the library has families of one variant
        symbols = [symbol for _, symbol in list_kernels(path, architecture)]
    # it may hold kernels of another kind, too
    found = [config for config in map(find_config, symbols) if config is not None]
    if not found:
        raise SassError(f"{path} holds no forward kernel for {architecture}: build it again")
    return sorted(found)


def default_architecture() -> str:
    """ARCHITECTURE if the installed library has it; otherwise the latest that it has, which a line
    on stderr then says.

    Raises SassError if the library is not there, or is none.
    """
    try:
        there = [name for name in library.architectures() if name.startswith("sm_")]
    except RuntimeError as error:
        raise SassError(str(error)) from error
    if ARCHITECTURE in there:
        return ARCHITECTURE
    found = max(there, key=capability_of)
    print(f"the library holds nothing for {ARCHITECTURE}: this is {found}", file=sys.stderr)
    return found


def library_kernels(
    architecture: str,
    configs: Iterable[Config] | None = None,
    *,
    progress: Progress | None = None,
) -> dict[Config, Kernel]:
    """Forward kernels of the installed library, by config, sorted; configs: None takes all.

    Raises SassError as `reader.load_kernels` does, when the library is not there, and for configs
    that it does not hold.
    """
    names = None if configs is None else sorted(config.short_form() for config in configs)
    if names == []:
        return {}
    kernels = load_kernels(
        installed_library(), architecture, names or (), sources=own_paths, progress=progress
    )
    found = {find_config(kernel.symbol): kernel for kernel in kernels}
    return {config: found[config] for config in sorted(filter(None, found))}


def own_paths(symbol: str, sources: Sequence[Chain]) -> Sequence[Chain]:
    """The source lines of a kernel, with paths relative to the repository if it is one of this
    library; of another one as they are."""
    config = find_config(symbol)
    return sources if config is None else relative_to_repository(sources, str(config.step.source))


def readable_name(symbol: str) -> str:
    """The short form of a kernel of this library; for others, the name in C++."""
    config = find_config(symbol)
    return config.short_form() if config else plain_name(symbol)


def kernel_names(selectors: Iterable[str]) -> list[str]:
    """Choice of kernels in a file, as `sass.read.choice` takes it: steps, which may be numbers
    or ranges, become their namespaces."""
    names = []
    for selector in selectors:
        try:
            steps = find_steps(selector) if selector[-1:].isdigit() else None
        except UsageError:  # no step, but perhaps somebody's kernel
            steps = None
        names += [selector] if steps is None else [step.namespace for step in steps]
    return names


# -- files of anybody ------------------------------------------------------------------------------


def file_in(text: str) -> KernelPath | None:
    """The file that FILE or FILE#NAME is; None for what cannot be one, such as a step. Raises
    UsageError for a file that is not there."""
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
    launch: Launch | None = None,
    progress: Progress | None = None,
) -> KernelFacts:
    """Facts of a kernel of a file; for one of this library, of its config.

    architecture, names: as for `reader.load_kernel`, besides the name in `where`, and it raises as
    that does. results: as for `config_facts`. launch: None takes that of the config, if it is one.
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
    return replace(facts, where=where, launch=launch or facts.launch)


def with_sources(kernel: Kernel, folder: Path) -> tuple[Kernel, dict[str, str]]:
    """The kernel, with paths of the sources that lie beside its file beginning with that folder,
    and their texts by these paths: files of one name in several folders are several."""
    texts = {str(folder / name): text for name, text in read_sources([kernel], folder).items()}

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
    """How a kernel is launched; for no problem in particular, a block of it."""
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
    """Work of a kernel's loops, where tensor instructions tell it."""
    return Unit(*config.loop_unit) if config.loop_unit else None


def trips(kernel: Kernel, config: Config, size: int) -> dict[int, int]:
    """How often each loop of a kernel is run, by index, for a problem of a size.

    Raises NotDeterminedError as `phases.trip_counts` does.
    """
    unit = unit_of(config)
    if unit is None:
        raise NotDeterminedError(
            f"{config.short_form()} has no tensor instructions: how often its loops are run cannot "
            "be told"
        )
    try:
        return trip_counts(kernel, unit, config.loop_runs(size))
    except NotDeterminedError as error:
        text = str(error).replace(kernel.name, config.short_form())
        raise NotDeterminedError(f"{text} ({_size_text(config, size)})") from error


def _size_text(config: Config, size: int) -> str:
    return f"{config.family.operation.size_word} {size}"


def predict_config(kernel: Kernel, config: Config, problem: Problem, chip: Chip) -> Prediction:
    """The least time of a launch for a problem. Raises as `trips` and `bound.predict` do."""
    found = trips(kernel, config, size_of(problem))
    return predict(kernel, found, launch_of(config, problem), chip)


# -- beside measurements ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigFacts(KernelFacts):
    """Facts of a kernel of this library."""

    config: Config


def measured_on(results: BenchmarkResults | None, kernel: Kernel) -> BenchmarkResults | None:
    """The results, if they are of a GPU of the kernel's architecture."""
    if results is None:
        return None
    digits = results.provenance.compute_capability.replace(".", "")
    return results if digits == str(kernel.capability) else None


def timed_launch(
    results: BenchmarkResults, config: Config, size: int
) -> tuple[Problem, Chip] | None:
    """The problem that was timed, and the GPU at its median clock while it was; None if there is no
    such measurement, no clock was read, or the GPU's number of SMs is not known."""
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

    results: of a benchmark; those of another architecture than the kernel's are left aside.
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
    """The matrix of kernels, be they configs or of files. results: as for
    `config_facts`."""
    where = ""
    if results is not None and any(facts.measurement for facts in rows):
        found = results.provenance
        where = f"{found.gpu}, {found.date}, CUDA {found.cuda}, commit {found.commit}"
    timed = next((facts.timed for facts in rows if isinstance(facts, ConfigFacts)), "")
    return Matrix(tuple(rows), _short_names(rows), timed, where)


def _short_names(rows: Sequence[KernelFacts]) -> list[str]:
    """Titles: for a config of the installed library its step; for a kernel of a file its own name,
    the file's, or both, the first that tells all of the comparison apart."""
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
    """The short form of a config; else the function's own name, without namespaces, arguments and
    those of a template."""
    config = find_config(symbol)
    if config is not None:
        return config.short_form()
    name = plain_name(symbol).replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].rpartition(" ")[2].rpartition("::")[2] or symbol


# -- sources ---------------------------------------------------------------------------------------


def shipped_ptx(config: Config) -> str:
    """The PTX that the library ships of a kernel; "" where it is not at hand."""
    path = library.ptx_path(config)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def matrix_page(matrix: Matrix, root: Path) -> str:
    """The page of a matrix. root: of the repository, whose sources are shown where they are at
    hand, as are those beside the files of other kernels."""
    rows, ptx, sources = [], [], {}
    for facts in matrix.rows:
        if facts.where is not None and not isinstance(facts, ConfigFacts):
            kernel, texts = with_sources(facts.kernel, facts.where.path.parent)
            facts = replace(facts, kernel=kernel)
            sources.update(texts)
        rows.append(facts)
        ptx.append(
            shipped_ptx(facts.config)
            if isinstance(facts, ConfigFacts) and facts.where is None
            else ""
        )
    sources.update(read_sources([f.kernel for f in rows if isinstance(f, ConfigFacts)], root))
    only_own = all(isinstance(facts, ConfigFacts) for facts in rows)
    title = "FlashAttention-2 kernels" if only_own else "Kernels"
    return comparison_page(replace(matrix, rows=tuple(rows)), ptx, sources, title)


def source_diff(before: Step, after: Step, root: Path, fold_namespace: bool = False) -> str:
    """The unified diff of two steps' own files.

    root: of the repository; the sources are not part of the installed package, and where they are
    missing the text says so. fold_namespace: the steps' namespaces, which differ in every pair, are
    written as one name.
    """
    texts = []
    for step in (before, after):
        path = root / step.source
        if not path.is_file():
            return (
                f"{step.source} is not at hand: the sources are no part of the installed package, "
                "so run the tool from a checkout of the repository\n"
            )
        text = path.read_text(encoding="utf-8")
        if fold_namespace:
            name = step.namespace
            text = re.sub(rf"\b{name}(?=::)|(?<=\bnamespace ){name}\b", _FOLDED, text)
        texts.append(text.splitlines(keepends=True))
    old, new = texts
    return "".join(difflib.unified_diff(old, new, str(before.source), str(after.source)))
