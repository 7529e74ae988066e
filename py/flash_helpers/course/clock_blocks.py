"""Blocks about time: measurements of this repository, and published figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.console.tables import DASH, Table, number, percent
from flash_helpers.course.arguments import DTYPE, Arguments, fixed_config, parse_step, with_parent
from flash_helpers.course.evidence import Evidence, Published
from flash_helpers.course.links import image, relative
from flash_helpers.course.metric import metric_of, share, speed
from flash_helpers.course.pages import GLOSSARY, page_of_step
from flash_helpers.course.stairs import (
    OWN,
    has_tiles,
    is_measured,
    stairs_link,
    stairs_numbers,
    tile_configs,
)
from flash_helpers.kernel_configs import FAMILIES, STEPS, Config, config_from_short_form
from flash_helpers.measure.benchmark_tables import (
    lengths_table,
    loads_table,
    main_dtype,
    progression_table,
    supports_table,
    table_length,
)
from flash_helpers.measure.call_overhead import CallOverhead
from flash_helpers.measure.choice_table import choice_table, grid_tables
from flash_helpers.measure.code import changed_names
from flash_helpers.measure.compilers import CompilerComparison
from flash_helpers.measure.first_call import FirstCalls
from flash_helpers.measure.plots import (
    PLOTS,
    PROGRESSION,
    SEQ_LEN,
    progression_numbers,
    seq_len_numbers,
)
from flash_helpers.measure.results import (
    LIBRARY_NAMES,
    LOAD_TEXTS,
    RESULTS,
    BenchmarkResults,
    interval,
    load_results,
)
from flash_helpers.measure.staircases import parent_at_tile
from flash_helpers.measure.width_plot import width_alt, width_numbers, width_picture, width_table
from flash_helpers.registry.family import CORE, Family, Step
from flash_helpers.registry.selection import UsageError, names_of

(STAIRCASE,) = (path for path, (panel, _) in PLOTS.items() if panel == PROGRESSION)
SPEEDS = {family: path for path, (panel, family) in PLOTS.items() if panel == SEQ_LEN}
NOT_MEASURED = "{} was not measured on the GPU of the other steps."


@dataclass(frozen=True)
class Speedup:
    """Ratio of a kernel's speed to another's at one length, minus 1, formed within each round.

    Both are timed in every round, so that a clock that drifts from round to round cancels. median:
    over the rounds. low, high: interval that holds 80% of the rounds. is_equal: whether the median
    lies within the noise.
    """

    median: float
    low: float
    high: float
    is_equal: bool

    @property
    def verdict(self) -> str:
        """Verdict in words; a change counts if it exceeds the noise."""
        if self.is_equal:
            return "="
        return "faster" if self.median > 0 else "slower"


def speedup(
    results: BenchmarkResults, before: Config, after: Config, seq_len: int
) -> Speedup | None:
    """Compare two configs at one length; None unless both were measured there."""
    place = (after.short_form(), before.short_form(), after.dtype.short, seq_len)
    ratios = [ratio - 1 for ratio in results.pairs(*place)]
    if not ratios:
        return None
    return Speedup(statistics.median(ratios), *interval(ratios), results.is_equal(*place))


def mean_change(results: BenchmarkResults, before: Config, after: Config) -> float | None:
    """Ratio of the harmonic means of the speeds, minus 1, if each length changes by its `speedup`;
    None unless both configs were measured at every length."""
    ratio = results.ratio(after.short_form(), before.short_form(), after.dtype.short)
    return None if ratio is None else ratio - 1


def clock_block(evidence: Evidence, arguments: Arguments) -> str:
    """Measured times by length, then published figures; for a step without measurements a line that
    says so."""
    step = arguments.step()
    results = evidence.results_of(step)
    measured = [
        _measured_table(results, step),
        _measured_note(results, step),
        *_other_configs(results, step),
    ]
    if not _is_measured(results, step):
        measured = [NOT_MEASURED.format(step.id)]
    return "\n\n".join([*measured, *_published(evidence.published, step)])


def _is_measured(results: BenchmarkResults, step: Step) -> bool:
    """Whether any config of a step was measured at any length."""
    names = (n for n in results.names(DTYPE.short) if n not in LIBRARY_NAMES)
    return any(config_from_short_form(name).step is step for name in names)


def _measured_table(results: BenchmarkResults, step: Step) -> str:
    *before, own = with_parent(step)
    metric = metric_of(own.family)
    operation = own.family.operation
    has_ceiling = operation.ceiling not in ("", operation.first)  # else a column has it already
    headers = [operation.size_title, *(f"{c.step.id}, {metric.unit}" for c in (*before, own))]
    if before:
        headers += ["change", "80% of the rounds", "verdict"]
    rows = []
    for seq_len in (*results.sizes, None):
        cells = [number(speed(results, config, seq_len)) for config in (*before, own)]
        if before and seq_len is None:
            cells += [percent(mean_change(results, before[0], own), signed=True), "", ""]
        elif before and seq_len:
            cells += _change_cells(speedup(results, before[0], own, seq_len))
        length = "harmonic mean" if seq_len is None else str(seq_len)
        cells.append(percent(share(results, own, own.dtype.short, seq_len)))
        if has_ceiling:
            place = (own.short_form(), operation.ceiling, own.dtype.short, seq_len)
            cells.append(percent(results.ratio(*place)))
        rows.append([length, *cells])
    headers += [metric.heading, *([f"of {operation.ceiling}"] if has_ceiling else [])]
    return Table(headers, rows, "lrrrrlrr"[: len(headers)] if before else "l").markdown()


def _change_cells(found: Speedup | None) -> list[str]:
    if found is None:
        return [DASH, "", ""]
    median, low, high = (percent(x, signed=True) for x in (found.median, found.low, found.high))
    return [median, f"{low} … {high}", found.verdict]


def _measured_note(results: BenchmarkResults, step: Step) -> str:
    found, metric = results.provenance, metric_of(FAMILIES[step.family])
    note = (
        f"Measured on {found.gpu}, {found.date}, CUDA {found.cuda}, PyTorch {found.torch}, "
        f"{DTYPE.short}, at the fixed config, {LOAD_TEXTS[results.main_load]}; "
        f"{metric.short} is {metric.title} in the same process."
    )
    operation = FAMILIES[step.family].operation
    if operation.ceiling not in ("", operation.first):
        note += f" {operation.ceiling} is {operation.libraries[operation.ceiling]}."
    changed = changed_names(results)
    if names := [c.step.id for c in with_parent(step) if c.short_form() in changed]:
        note += f" The machine code of {' and '.join(names)} has changed since."
    if step.parent is not None:
        note += (
            " Both are timed in every round. The change is the median of the ratios within a "
            "round, so that a drifting clock cancels. It counts if it exceeds the difference of "
            f"{metric.short} from itself, timed twice."
        )
    return note


def _other_configs(results: BenchmarkResults, step: Step) -> Iterator[str]:
    fixed, dtype = fixed_config(step), DTYPE.short
    measured = [config_from_short_form(n) for n in results.names(dtype) if n not in LIBRARY_NAMES]
    configs = [fixed, *(c for c in measured if c.step is step and c != fixed)]
    if len(configs) == 1:
        return
    rows = [
        [
            label,
            number(speed(results, config, table_length(results))),
            number(speed(results, config)),
            percent(share(results, config, dtype)),
        ]
        for label, config in zip(names_of(configs), configs, strict=True)
    ]
    metric = metric_of(fixed.family)
    headers = ["config", f"{metric.unit} at {table_length(results)}", "harmonic mean"]
    headers.append(f"{metric.heading}, mean")
    yield "Every config of this step that was measured, the fixed one first:"
    yield Table(headers, rows).markdown()


def _published(published: Published, step: Step) -> Iterator[str]:
    """Lines with published figures of the step, if there are any."""
    names = [config.step.id for config in with_parent(step)]
    if not any(published.find(step.id, gpu.key) for gpu in published.gpus):
        return
    rows = []
    for gpu in published.gpus:
        found = [published.find(name, gpu.key) for name in names]
        cells = (f"{f.percent}% ({f.percent_mean}%)" if f else DASH for f in found)
        rows.append([gpu.name, *cells])
    yield Table(["published", *names], rows).markdown()
    yield (
        f"Published: percent of the official FlashAttention-2 at {published.seq_len}, in brackets "
        f"of the harmonic mean over {published.shortest} … {published.longest}. Source: "
        f"{published.source}."
    )


def stairs_block(evidence: Evidence, arguments: Arguments) -> str:
    """The staircase of a step's family with the step lit, if the family was measured. A sentence
    tells the step's gain and the speed of other libraries in the same run."""
    step = arguments.step()
    results, metric = evidence.results_of(step), metric_of(FAMILIES[step.family])
    told = ", ".join(_stairs_told(results, step, relative(GLOSSARY, arguments.page)))
    sentence = f"{step.id}: {told}." if told else NOT_MEASURED.format(step.id)
    titles = FAMILIES[step.family].operation.libraries
    beside = {titles[n]: share(results, n, DTYPE.short) for n in metric.beside}
    if others := ", ".join(f"{name} {percent(of)}" for name, of in beside.items() if of):
        sentence += f" On the same GPU: {others}."
    if not is_measured(stairs_numbers(FAMILIES[step.family], results)):
        return sentence
    alt = f"The {step.family} staircase with step {step.id} lit"
    return f"{image(stairs_link(step), alt, arguments.page)}\n\n{sentence}"


def _stairs_told(results: BenchmarkResults, step: Step, glossary: str) -> Iterator[str]:
    metric = metric_of(FAMILIES[step.family])
    for tile, config in tile_configs(step).items():
        found = share(results, config, DTYPE.short) if config else None
        if config is None or found is None:
            continue
        parent = parent_at_tile(config)
        gained = mean_change(results, parent, config) if parent else None
        library = f"[{metric.short}]({glossary}#{metric.term})" if metric.term else metric.short
        told = f"**{percent(found)}** of {library}"
        if tile != OWN:
            told += f" at the [{tile} tile]({glossary}#{tile}-tile)"
        if parent and gained is not None:
            equal = results.is_equal(config.short_form(), parent.short_form(), DTYPE.short)
            change = "no change" if equal else percent(gained, signed=True)
            told += f" ({change} against {step.parent})"
        yield told


def staircase_block(evidence: Evidence, arguments: Arguments) -> str:
    """The plot of the progression; its text tells the numbers of the first and the last measured
    step."""
    numbers = progression_numbers(evidence.results, DTYPE.short)
    ends = []
    for tile, shared, where in (
        ("fixed", True, "at the fixed tile"),
        ("large", True, "at the large tile"),
        ("fixed", False, "at tiles of their own"),
    ):
        heights = zip(numbers["steps"], numbers[tile], strict=True)
        measured = [
            f"{height:.0f}% at step {step}"
            for step, height in heights
            if height and has_tiles(FAMILIES[STEPS[step].family]) == shared
        ]
        if measured:
            ends.append(f"{measured[0]} to {measured[-1]} {where}")
    title = metric_of(next(iter(FAMILIES.values()))).title
    gpu = evidence.results.provenance.gpu
    alt = f"Percent of {title} by step on {gpu}: {'; '.join(ends)}"
    return image(STAIRCASE, alt, arguments.page)


def speeds_block(evidence: Evidence, arguments: Arguments) -> str:
    """The plot of a family's speeds by length; its text tells each line's first and last speed."""
    (family,) = arguments.words
    if family not in SPEEDS:
        raise UsageError(f"{family!r} has no plot of speeds: {', '.join(SPEEDS)} have one")
    results = evidence.results_of(next(iter(FAMILIES[family].steps.values())))
    numbers = seq_len_numbers(results, DTYPE.short)
    speeds = [
        f"{label} {known[0]:.0f} to {known[-1]:.0f}"
        for label, found in numbers["lines"].items()
        if (known := [speed for speed in found if speed is not None])
    ]
    first, last = numbers["seq_lens"][0], numbers["seq_lens"][-1]
    alt = (
        f"TFLOP/s at lengths {first} to {last} on {results.provenance.gpu}, "
        f"{LOAD_TEXTS[numbers['load']]}: {'; '.join(speeds)}"
    )
    return image(SPEEDS[family], alt, arguments.page)


def loads_block(evidence: Evidence, arguments: Arguments) -> str:
    """Results of a file in the folder of `RESULTS`, in bursts and sustained."""
    return loads_table(_named_results(evidence, arguments))


def lengths_block(evidence: Evidence, arguments: Arguments) -> str:
    """Results of a file in the folder of `RESULTS` by length, in one dtype under one load, for the
    steps that the further words name or for all steps."""
    results = _named_results(evidence, arguments)
    dtype = arguments.choice("dtype", results.dtypes, main_dtype(results))
    load = arguments.choice("load", results.loads, results.main_load)
    if steps := [parse_step(word).id for word in arguments.words[1:]]:
        results = results.of_steps(steps)
    return lengths_table(results, dtype, load)


def _named_results(evidence: Evidence, arguments: Arguments) -> BenchmarkResults:
    return load_results(evidence.root / RESULTS.with_name(f"{arguments.words[0]}.json"))


def map_block(evidence: Evidence, arguments: Arguments) -> str:
    """One row per step: its page, the page's place in the course, the idea, and the speed in
    percent at each tile. Families of one operation with the same tiles and metric share a table,
    with the libraries of the same run."""
    tables: dict[tuple[str, ...], list[Family]] = {}
    for family in FAMILIES.values():
        heading = metric_of(family).heading
        tiles = tile_configs(next(iter(family.steps.values())))
        headings = (heading if tile == OWN else f"{tile} tile" for tile in tiles)
        tables.setdefault((family.operation.name, *headings), []).append(family)
    return "\n\n".join(
        _map_table(evidence, headings, families, arguments.page)
        for (_, *headings), families in tables.items()
    )


def _map_table(
    evidence: Evidence, headings: Sequence[str], families: Sequence[Family], page: PurePosixPath
) -> str:
    rows = []
    for step in (step for family in families for step in family.steps.values()):
        own = page_of_step(step.id)
        name = f"[{step.id}]({relative(own.path, page)})" if own else step.id
        results = evidence.results_of(step)
        configs = tile_configs(step).values()
        cells = [_percent_cell(share(results, c, DTYPE.short) if c else None) for c in configs]
        is_core = step.place == CORE
        rows.append([f"**{name}**" if is_core else name, step.place, step.idea, *cells])
    metric = metric_of(families[0])
    results = evidence.results_of(next(iter(families[0].steps.values())))
    titles = families[0].operation.libraries
    for library in metric.beside:
        if found := _percent_cell(share(results, library, DTYPE.short)):
            rows.append(["", "", titles[library], *[found] * len(headings)])
    table = Table(["step", "place", "idea", *headings], rows, "lll").markdown()
    if not results.sizes:
        return f"{table}\n\nNone of these steps was measured on a GPU yet."
    measured = results.provenance
    return (
        f"{table}\n\nPercent of {metric.title}, {DTYPE.short}, {LOAD_TEXTS[results.main_load]}, by "
        f"harmonic means over {results.sizes[0]} … {results.sizes[-1]}; {measured.gpu}, "
        f"{measured.date}, commit {measured.commit}."
    )


def _percent_cell(of: float | None) -> str:
    return "" if of is None else percent(of, 0)


def progression_block(evidence: Evidence, arguments: Arguments) -> str:
    """Table of all steps at the two tiles."""
    return progression_table(evidence.results)


def best_block(evidence: Evidence, arguments: Arguments) -> str:
    """Speeds of the kernels that calls take, beside the libraries, by GPU: tables, and pictures of
    those by width."""
    from flash_helpers.tune.best import config_for  # imports torch, for which --help does not wait
    from flash_helpers.tune.choices import load_choices

    files = load_choices(evidence.root / CONFIG_FOLDER)
    parts = [grid_tables(files, config_for, arguments.words)]
    for (group, gpu), numbers in width_numbers(files, config_for).items():
        if group in arguments.words:
            shown = image(width_picture(group, gpu), width_alt(group, numbers), arguments.page)
            table = relative(width_table(group, gpu), arguments.page)
            parts.append(f"{shown}\n\nThe numbers of the picture [as CSV]({table}).")
    return "\n\n".join(parts)


def choice_block(evidence: Evidence, arguments: Arguments) -> str:
    """The steps that attention() takes, by head size, option and device."""
    from flash_helpers.tune.best import config_for  # imports torch, as above

    return choice_table(config_for)


def supports_block(evidence: Evidence, arguments: Arguments) -> str:
    """The problems that the kernels take."""
    return supports_table()


def calls_block(evidence: Evidence, arguments: Arguments) -> str:
    """Host time per call, from a file in the folder of RESULTS."""
    return CallOverhead.load(result_path(evidence, arguments)).markdown()


def first_calls_block(evidence: Evidence, arguments: Arguments) -> str:
    """Host time of a process's first calls, from a file in the folder of RESULTS."""
    return FirstCalls.load(result_path(evidence, arguments)).markdown()


def compilers_block(evidence: Evidence, arguments: Arguments) -> str:
    """Speeds of kernels by two compilers, from a file in the folder of RESULTS."""
    return CompilerComparison.load(result_path(evidence, arguments)).markdown()


def result_path(evidence: Evidence, arguments: Arguments) -> Path:
    """Path of the file in the folder of RESULTS that the first word names."""
    return evidence.root / RESULTS.with_name(f"{arguments.words[0]}.json")
