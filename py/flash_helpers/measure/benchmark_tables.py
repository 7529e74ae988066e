"""Tables of benchmark results, for the terminal and for Markdown files."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from flash_helpers.console.tables import DASH, Table, number, percent
from flash_helpers.kernel_configs import (
    FAMILIES,
    Config,
    Element,
    config_from_short_form,
)
from flash_helpers.measure.code import DAGGER, changed_names
from flash_helpers.measure.results import (
    BEST_OTHER,
    FP16_MANTISSA_BITS,
    LIBRARY_NAMES,
    LOAD_TEXTS,
    MMA_SYNC,
    RATE_NAMES,
    SUSTAINED,
    BenchmarkResults,
    Load,
    Measurement,
    SkippedRecord,
    interval,
)
from flash_helpers.measure.staircases import (
    Pair,
    beside_parents,
    measured_families,
    stair,
    stairs,
    tile_text,
)
from flash_helpers.registry.config import ranges_text
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.operation import TFLOPS
from flash_helpers.registry.selection import names_of

TABLE_SEQ_LEN = 4096
MAIN_DTYPE = "bf16"
RATE_TITLE = f"{RATE_NAMES[MMA_SYNC]} alone, on registers"
HEADER_BEGIN_MARKER = "// benchmark:begin"
HEADER_END_MARKER = "// benchmark:end"
COMMENT_WIDTH = 96

CHANGED = f"{DAGGER} The kernel's machine code has changed since it was measured."

# Maps (contender, dtype, size or None for the mean over all sizes, load) to a number or None.
Share = Callable[[str, str, "int | None", str], "float | None"]

Column = tuple[str, str]  # dtype and load


def main_dtype(results: BenchmarkResults) -> str:
    """The dtype that tables and plots of one dtype show: bf16 if it was measured.

    Raises ValueError if nothing was.
    """
    if not results.measurements:
        raise ValueError("the results hold no measurement: run the benchmark first")
    return MAIN_DTYPE if MAIN_DTYPE in results.dtypes else results.dtypes[0]


def share_text(share: float | None) -> str:
    """A share in percent, without the sign, which the column's title has; a dash for None."""
    return number(None if share is None else 100 * share, 1)


def unit(results: BenchmarkResults) -> str:
    """The unit of the speeds."""
    return results.operation.metric.unit


class _Marks:
    """Daggers for contenders whose code has changed since they were measured."""

    def __init__(self, *results: BenchmarkResults) -> None:
        self._changed = frozenset[str]().union(*map(changed_names, results))
        self.any = False

    def __call__(self, text: str, *names: str) -> str:
        """The text, with a dagger if one of the names is such a contender's."""
        if self._changed.isdisjoint(names):
            return text
        self.any = True
        return f"{text} {DAGGER}"

    @property
    def line(self) -> list[str]:
        """The line under the table, if the table has a dagger."""
        return [CHANGED] if self.any else []


def supports_table() -> str:
    """Markdown of the problems that each family's kernels take: one table per operation. A family
    whose steps take different problems has one row per group of steps."""
    operations: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        operations.setdefault(family.operation.title, []).append(family)
    return "\n\n".join(_supports_of(title, families) for title, families in operations.items())


def _supports_of(title: str, families: Iterable[Family]) -> str:
    rows = []
    for family in families:
        dtypes = ", ".join(dtype.short for dtype in family.dtypes)
        kinds = [
            (taken, [*steps])
            for taken, steps in itertools.groupby(family.steps.values(), partial(_taken, family))
        ]
        for taken, steps in kinds:
            name = family.name if len(kinds) == 1 else f"{family.name} {ranges_text(steps)}"
            row = {title: name, "dtype": dtypes} | taken
            rows.append(list(row.values()))
    return Table(list(row), rows, align="l" * len(row)).markdown()


def _taken(family: Family, step: Step) -> dict[str, str]:
    """Problems that a step's fixed config and its variants take, in words: all sizes that they are
    built for, and the rest of the variant with the most options."""
    config = family.fixed_config(step, Element.from_name(MAIN_DTYPE))
    found = [variant.supports for variant in config.variants()]
    widest = max((s.described() for s in found), key=lambda taken: len(taken["options"]))
    found.sort(key=lambda supports: [*supports.sizes.values()])
    in_order = [(supports.sizes, supports.described()) for supports in found]
    return {
        name: ", ".join(dict.fromkeys(taken[name] for sizes, taken in in_order if name in sizes))
        or text
        for name, text in widest.items()
    }


def _length_table(
    results: BenchmarkResults,
    dtype: str,
    load: str,
    title: str,
    value: Share,
    text: Callable[..., str],
) -> Table:
    """Table of one row per contender and one column per size, then the mean, for which `value` gets
    None, the widest spread over the sizes, the SM clock and the power."""
    lengths, marks = results.sizes, _Marks(results)
    header = [f"{dtype}, {load}, {title}", *_length_titles(results), "harmonic mean"]
    rows = []
    for name in results.names(dtype):
        cells = [text(value(name, dtype, n, load)) for n in (*lengths, None)]
        found = [m for n in lengths if (m := results.find(name, dtype, n, load)) is not None]
        cells.append(share_text(_widest_spread(results, found)))
        cells += [number(_median(readings)) for readings in _readings(found)]
        rows.append([marks(name, name), *cells])
    return Table([*header, "spread %", "MHz", "W"], rows)


def _widest_spread(results: BenchmarkResults, found: Iterable[Measurement]) -> float | None:
    """The widest interval of the ratios to the first library at any size, over their median."""
    widths = []
    for m in found:
        if ratios := results.pairs(m.name, results.first, m.dtype, m.size, m.load):
            low, high = interval(ratios)
            widths.append((high - low) / statistics.median(ratios))
    return max(widths, default=None)


def _readings(found: Sequence[Measurement]) -> tuple[list[float], list[float]]:
    """SM clocks in MHz and powers in W of all samples."""
    return [x for m in found for x in m.sm_mhz], [x for m in found for x in m.power_w]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _tables(results: BenchmarkResults, dtype: str, load: str) -> list[Table]:
    shares: dict[str, Share] = {f"% of {results.first_short}": results.of_first}
    for rate, title in RATE_NAMES.items():
        if results.rate(rate, dtype, load) is not None:
            shares[f"% of {title}"] = partial(results.of_rate, rate)
    is_counted = results.operation.metric == TFLOPS
    if is_counted and results.provenance.tensor_peak is not None:
        shares["% of the tensor cores' peak at this clock"] = results.of_tensor_peak
    shares["% of the best of the others"] = results.of_best_other
    in_microseconds = (dtype, load, "µs", results.microseconds, partial(number, digits=1))
    return [
        _length_table(results, dtype, load, unit(results), results.speed, number),
        *([] if is_counted else [_length_table(results, *in_microseconds)]),
        *(
            _length_table(results, dtype, load, title, share, share_text)
            for title, share in shares.items()
        ),
        Table([f"{dtype}, {load}", *_length_titles(results)], _best_rows(results, dtype, load)),
    ]


def _length_titles(results: BenchmarkResults) -> list[str]:
    return [f"{results.operation.size_name} {n}" for n in results.sizes]


def _best_rows(results: BenchmarkResults, dtype: str, load: str) -> list[list[str]]:
    """The fastest library and the fastest kernel at each size, and the ratio of the two."""
    labels = _kernel_labels(results, dtype)
    others, own, ratios = _against_others(results, labels, dtype, load)
    return [
        ["best of the others", *others],
        ["best of ours", *(f"{number(m.speed)} {labels[m.name]}" if m else DASH for m in own)],
        ["ours over the others", *ratios],
    ]


def _last_step_rows(
    results: BenchmarkResults, dtype: str, load: str, marks: _Marks
) -> list[list[str]]:
    """The fastest library at each size, and the speed of the last step's fastest config over it."""
    configs = sorted(map(config_from_short_form, _kernel_labels(results, dtype)))
    last = configs[-1].step if configs else None
    names = [config.short_form() for config in configs if config.step is last]
    others, _, ratios = _against_others(results, names, dtype, load)
    rows = [["fastest of the others", *others]]
    return [*rows, [marks(f"{last.id} over it", *names), *ratios]] if last else rows


def _against_others(
    results: BenchmarkResults, names: Collection[str], dtype: str, load: str
) -> tuple[list[str], list[Measurement | None], list[str]]:
    """The fastest library, the fastest of these kernels, and the kernel's ratio to the library, at
    each size."""
    own = [results.fastest(names, dtype, n, load) for n in results.sizes]
    others = [results.find(BEST_OTHER, dtype, n, load) for n in results.sizes]
    ratios = [
        _ratio_cell(results, (m.name if m else "", BEST_OTHER, dtype, n, load))
        for n, m in zip(results.sizes, own, strict=True)
    ]
    return [f"{number(m.speed)} {m.name}" if m else DASH for m in others], own, ratios


def _ratio_cell(results: BenchmarkResults, place: tuple[str, str, str, int, str]) -> str:
    """Ratio of two contenders, with an "=" where it is within the noise."""
    ratio = number(results.ratio(*place), 2)
    return f"= {ratio}" if results.is_equal(*place) else ratio


def _kernel_labels(results: BenchmarkResults, dtype: str) -> dict[str, str]:
    """A short label for each kernel that was measured, by its name, sorted as configs are."""
    names = (name for name in results.names(dtype) if name not in LIBRARY_NAMES)
    configs = sorted(map(config_from_short_form, names))
    return dict(zip((c.short_form() for c in configs), names_of(configs), strict=True))


def report_text(results: BenchmarkResults) -> str:
    """Tables for each dtype and load, then notes. The tables give the speed, its percent of the
    first library, of the measured rates of the chip, of the tensor cores' peak and of the fastest
    library, and the fastest contender at each size. An operation that is measured in bytes per
    second has a table of times, too."""
    loads = [(dtype, load) for dtype in results.dtypes for load in results.loads]
    parts = [f"{t.text()}\n" for dtype, load in loads for t in _tables(results, dtype, load)]
    parts += [
        f"{record.dtype}, {record.load}, {RATE_NAMES[record.name]}: "
        + (record.failure or f"{number(record.tflops)} TFLOP/s")
        for record in results.rates
    ]
    parts.append(_problems_text(results.measurements))
    parts += [f"{library.name} {library.version}" for library in results.libraries]
    parts += [
        f"{dtype}, {load}: {results.control} is within {100 * noise:.2f}% of {results.first} in "
        f"the mean over {_sizes_word(results)}; a smaller difference is noise"
        for dtype, load in loads
        if (noise := results.noise(dtype, load=load)) is not None
    ]
    parts.append(
        f"speeds are those at the median time; % of {results.first_short} is the median of the "
        "ratios within a round; spread is the interval that holds 80% of these ratios, the widest "
        f"over a contender's {_sizes_word(results)}"
    )
    parts += [
        f"{m.name} at {m.size} was run by {m.ran}"
        for m in results.measurements
        if m.ran not in ("", m.name) and m.load == results.main_load
    ]
    parts += [
        f"{m.name} at {m.size}, {m.load}: {m.failure}" for m in results.measurements if m.failure
    ]
    parts += _skipped_lines(results.skipped)
    parts += [CHANGED] if changed_names(results) else []
    return "\n".join(parts)


def _sizes_word(results: BenchmarkResults) -> str:
    """The word for the sizes: lengths, widths."""
    return results.operation.sizes_title.split()[-1]


def _skipped_lines(skipped: Iterable[SkippedRecord]) -> list[str]:
    """Contenders that were left out, with the sizes and the reason."""
    return _lines_by_reason(
        (f"{s.name}, {s.dtype}," if s.name else s.dtype, s.size, f"skipped: {s.reason}")
        for s in skipped
    )


def _lines_by_reason(found: Iterable[tuple[str, int, str]]) -> list[str]:
    """One line per subject and reason, with all sizes."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for what, size, reason in found:
        lengths.setdefault((what, reason), []).append(size)
    return [
        f"{what} at {', '.join(map(str, at))} {reason}" for (what, reason), at in lengths.items()
    ]


def replace_between_markers(text: str, body: str, begin: str, end: str) -> str:
    """`text` with the lines between the two markers replaced by `body`.

    Raises ValueError unless the text has each marker once, in order.
    """
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(end) < text.index(begin):
        raise ValueError(f"the text needs one line {begin} and after it one line {end}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    lines = "\n".join(filter(None, (begin, body.strip(), end)))
    return f"{before}{lines}{after}"


_PROTOCOL_TEXTS = {
    "graph": "CUDA graph replays",
    "events": "launches one by one",
    "rotate": "",
    "flush": "L2 cache overwritten before each",
}


def _load_text(load: Load, found: Sequence[Measurement]) -> str:
    """Protocol of a load's samples, with the clock and the power."""
    counts = sorted({len(m.samples_ms) for m in found})
    rounds = " to ".join(str(n) for n in dict.fromkeys((*counts[:1], *counts[-1:])))
    how = f"{rounds} rounds of {load.sample_ms:g} ms each"
    if load.lead_ms:
        how += f" after {load.lead_ms:g} ms of the same load, without a pause"
    if load.rest:
        how += f", with pauses {load.rest:g} times as long"
    clock, power = map(_median, _readings(found))
    if clock is not None:
        how += f": SM clock {clock:.0f} MHz, {power:.0f} W in the median"
    return f"{load.name}: {how}"


def _problems_text(found: Sequence[Measurement]) -> str:
    """The problems and their sizes; "" without measurements."""
    if not found:
        return ""
    return type(found[0].asked).together((m.asked for m in found), found[0].operation.swept)


def _provenance_text(results: BenchmarkResults, dtypes: Sequence[str], loads: Sequence[str]) -> str:
    """Line below a table of these dtypes and loads: machine, software, problems and protocol."""
    found, protocol = results.provenance, results.protocol
    own = [m for m in results.measurements if m.dtype in dtypes and m.load in loads]
    return found.sentence(
        found.built_with,
        f"PyTorch {found.torch}, CUDA {found.cuda}, cuDNN {found.cudnn}",
        *(f"{library.name} {library.version}" for library in results.libraries),
        f"{' and '.join(dtypes)}, {_problems_text(own)}",
        _PROTOCOL_TEXTS[protocol.timing],
        _PROTOCOL_TEXTS[protocol.cache],
        f"inputs of {bits} bits of mantissa"
        if (bits := protocol.mantissa_bits) < FP16_MANTISSA_BITS
        else "",
        *(
            _load_text(load, [m for m in own if m.load == load.name and m.valid])
            for load in protocol.loads
            if load.name in loads
        ),
    )


def header_lines(results: BenchmarkResults, step: Step, changed: Collection[str]) -> str:
    """Speed and cost of a step at its tiles, as comment lines for the step's kernel file; "" for a
    step that was not measured. changed: what `changed_names` returns for the results."""
    fixed = FAMILIES[step.family].fixed_config(step, Element.from_name(MAIN_DTYPE))
    found = results.provenance
    own = stair(fixed)
    tiles = [c for c in (own.fixed, own.large) if c is not None]
    if not any(results.speed(c.short_form(), MAIN_DTYPE) for c in tiles):
        return ""
    swept = _sizes_word(results)
    lines = [
        f"Measured {LOAD_TEXTS[results.main_load]} ({found.gpu}, CUDA {found.cuda}, {MAIN_DTYPE}), "
        f"{unit(results)} at {results.operation.size_word} {table_length(results)}, and share of "
        f"{results.operation.libraries[results.first]} in the harmonic mean over {swept}."
    ]
    resources = {record.name: record for record in results.resources}
    for config in tiles:
        name = config.short_form()
        speed = number(results.speed(name, MAIN_DTYPE, table_length(results)))
        share = number(results.of_first(name, MAIN_DTYPE), 2)
        lines.append(f"{tile_text(config)}: {speed}, {share}.")
        if record := resources.get(name):
            spilled = f", {record.local_bytes} bytes of it spilled" if record.local_bytes else ""
            lines.append(
                f"Cost: {record.registers} registers per thread{spilled}, "
                f"{_size_text(record.smem_bytes)} of shared memory per block, "
                f"{record.blocks_per_sm} block{'s' * (record.blocks_per_sm != 1)} per SM."
            )
    if any(config.short_form() in changed for config in tiles):
        lines.append("The machine code has changed since.")
    wrapped = textwrap.wrap(" ".join(lines), COMMENT_WIDTH)
    return "\n".join(f"// {line}" for line in wrapped)


def _size_text(size: int) -> str:
    return f"{size} bytes" if size < 1024 else f"{size // 1024} KiB"


def progression_table(results: BenchmarkResults) -> str:
    """Markdown of one row per step in the order of the registry, then the libraries and the rate of
    mma.sync. The other configs that were measured stand below, folded.

    The columns are percent of the first library in the harmonic mean over all sizes, at both tiles
    where steps have tiles, and speed at `table_length` under the main load. A dagger marks a step
    whose machine code has changed since.
    """
    dtype, marks = main_dtype(results), _Marks(results)
    share = f"% of {results.first_short}"
    rows = [*_step_rows(results, dtype, marks), *_ceiling_rows(results, dtype)]
    columns = [f"{tile}: {share}" for tile in ("fixed tile", "large tile", "stride read")]
    header = ["step", "idea", *columns, f"{unit(results)} at {table_length(results)}"]
    if not _has_tiles(results, dtype):
        header[2:5] = [share]
        rows = [[*row[:3], *row[5:]] for row in rows]
    parts = [
        Table(header, rows, "ll").markdown(),
        _legend(results, dtype),
        *_other_configs(results, dtype, marks),
        *marks.line,
        _provenance_text(results, [dtype], [results.main_load]),
    ]
    return "\n\n".join(parts)


def _has_tiles(results: BenchmarkResults, dtype: str) -> bool:
    """Whether steps of the operation take the large tile beside the fixed one."""
    return any(own.large for own in stairs(dtype, results.operation).values())


def table_length(results: BenchmarkResults) -> int:
    """Return TABLE_SEQ_LEN or, if that was not measured, the nearest size by ratio, of two the
    larger one."""
    return min(reversed(results.sizes), key=lambda n: max(n / TABLE_SEQ_LEN, TABLE_SEQ_LEN / n))


def _speed_cell(results: BenchmarkResults, name: str, dtype: str, load: str | None = None) -> str:
    return number(results.speed(name, dtype, table_length(results), load))


def _share_cell(results: BenchmarkResults, pair: Pair, dtype: str, load: str | None = None) -> str:
    """Percent of the first library in the mean; with "=" if the step and its parent differ by no
    more than the noise."""
    config, parent = pair
    if config is None:
        return ""
    name = config.short_form()
    text = share_text(results.of_first(name, dtype, load=load))
    is_equal = parent is not None and results.is_equal(name, parent.short_form(), dtype, load=load)
    return f"= {text}" if is_equal else text


def _step_rows(results: BenchmarkResults, dtype: str, marks: _Marks) -> Iterator[list[str]]:
    measured = measured_families(results.names(dtype))
    for own, pairs in beside_parents(dtype, results.operation):
        if own.step.family not in measured:
            continue
        cells = [_share_cell(results, pair, dtype) for pair in pairs]
        speed = _speed_cell(results, own.widest.short_form(), dtype)
        names = (config.short_form() for config in own.configs)
        yield [marks(own.step.id, *names), own.step.idea, *cells, speed]


def _ceiling_rows(results: BenchmarkResults, dtype: str) -> Iterator[list[str]]:
    """Rows of the libraries, and of mma.sync back to back if it was measured."""
    for name, title in _libraries(results, dtype):
        share = share_text(results.of_first(name, dtype))
        yield ["", title, share, share, "", _speed_cell(results, name, dtype)]
    if (rate := results.rate(MMA_SYNC, dtype)) is not None:
        share = share_text(_rate_of_first(results, dtype, results.main_load))
        yield ["", RATE_TITLE, share, share, "", number(rate)]


def _libraries(results: BenchmarkResults, dtype: str) -> Iterator[tuple[str, str]]:
    """The libraries that were measured, with their titles, without the control."""
    names = results.names(dtype)
    titles = results.operation.libraries
    return ((name, titles[name]) for name in results.library_names if name in names)


def _rate_of_first(results: BenchmarkResults, dtype: str, load: str) -> float | None:
    flash = results.of_rate(MMA_SYNC, results.first, dtype, load=load)
    return 1 / flash if flash else None


def _legend(results: BenchmarkResults, dtype: str) -> str:
    lengths, first = results.sizes, results.first_short
    span = f"{lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    swept = results.operation.sizes_title
    same_tile = " at the same tile" if _has_tiles(results, dtype) else ""
    title = results.operation.libraries[results.first]
    sentences = [
        f"{first.capitalize()} is {title}: each sample is compared with {first}'s sample next to "
        f"it in the same round, and % is the ratio of the harmonic means over {swept} {span}.",
        *_tile_sentences(results, dtype),
        f"Speeds are {LOAD_TEXTS[results.main_load]}.",
    ]
    if (noise := results.noise(dtype)) is not None:
        sentences.append(
            f"Compared with itself, {first} differs in the mean of a round by up to "
            f'{100 * noise:.1f}%. An "=" marks a step that is within this noise of its '
            f"parent{same_tile}."
        )
    return " ".join(sentences)


def _tile_sentences(results: BenchmarkResults, dtype: str) -> list[str]:
    """Sentences on the two tiles and the counted work; none for an operation without tiles."""
    if not _has_tiles(results, dtype):
        return []
    own = list(stairs(dtype, results.operation).values())
    fixed = next(tile_text(s.fixed) for s in own if s.fixed)
    large = next(tile_text(s.large) for s in own if s.large)
    return [
        f"The fixed tile is {fixed}, the large tile {large}; TFLOP/s are at the large tile where a "
        "step has it, and count 4·B·H·S²·D operations.",
        "Stride read: steps that know the row stride at compile time, built to read it at run time "
        "instead, at the large tile.",
    ]


def _off_the_stairs(results: BenchmarkResults, dtype: str) -> list[Config]:
    """Measured configs on neither staircase."""
    every = stairs(dtype, results.operation).values()
    shown = {config for own in every for config in own.configs}
    names = [name for name in results.names(dtype) if name not in LIBRARY_NAMES]
    return sorted(c for c in map(config_from_short_form, names) if c not in shown)


def _other_configs(results: BenchmarkResults, dtype: str, marks: _Marks) -> Iterator[str]:
    """Measured configs on neither staircase, folded."""
    others = _off_the_stairs(results, dtype)
    if not others:
        return
    speed = f"{unit(results)} at {table_length(results)}"
    header = ["step", "config", f"% of {results.first_short}", speed]
    rows = [
        [
            marks(config.step.id, config.short_form()),
            f"`{config.short_form()}`",
            share_text(results.of_first(config.short_form(), dtype)),
            _speed_cell(results, config.short_form(), dtype),
        ]
        for config in others
    ]
    summary = "Other configs that were measured, the winners of a sweep among them"
    yield f"<details>\n<summary>{summary}</summary>"
    yield Table(header, rows, "ll").markdown()
    yield "</details>"


def lengths_table(results: BenchmarkResults, dtype: str, load: str) -> str:
    """Markdown of the speeds: one row per kernel and library, one column per size. The fastest
    library at each size follows, then the last step's ratio to it.

    Below, folded: clock, power and share of the peak for each speed, and the reasons for missing
    speeds.
    """
    marks, first = _Marks(results), results.first_short
    names = _kernel_labels(results, dtype) | dict(_libraries(results, dtype))
    names = {name: marks(label, name) for name, label in names.items()}

    def rows(text: Callable[[Measurement], str]) -> list[list[str]]:
        places = [(name, [results.find(name, dtype, n, load) for n in lengths]) for name in names]
        return [[names[name], *(text(m) if m else DASH for m in ms)] for name, ms in places]

    def beside(m: Measurement) -> str:
        share = results.of_tensor_peak(m.name, m.dtype, m.size, m.load)
        clock, power = map(_median, _readings([m]))
        texts = (percent(share), f"{number(clock)} MHz", f"{number(power)} W")
        return ", ".join(text for text in texts if not text.startswith(DASH)) or DASH

    lengths = results.sizes
    titles = _length_titles(results)
    speeds = [*rows(lambda m: number(m.speed)), *_last_step_rows(results, dtype, load, marks)]
    missing = _skipped_lines(s for s in results.skipped if s.dtype == dtype)
    missing += _lines_by_reason(
        (m.name, m.size, f"failed: {m.failure.splitlines()[0]}")
        for m in results.measurements
        if (m.dtype, m.load) == (dtype, load) and m.failure
    )
    summary, derived = "SM clock and power", []
    if results.operation.metric == TFLOPS:
        summary = f"Share of the tensor cores' peak at this clock, {summary}"
        derived = [
            "The share is derived: measured TFLOP/s over the 16-bit TFLOP/s that the tensor cores "
            "of all SMs reach at the SM clock beside it."
        ]
    parts = [
        Table([f"{dtype}, {load}: {unit(results)}", *titles], speeds).markdown(),
        *marks.line,
        "The last row is the speed of the last step's fastest config over the fastest library at "
        f"the same {results.operation.size_word}: the median of the ratios within a round. "
        f'An "=" marks a ratio within the noise of {first} against itself. '
        "A dash marks a size that was not measured.",
        f'<details markdown="1">\n<summary>{summary}</summary>',
        Table(["", *titles], rows(beside)).markdown(),
        *derived,
        *(f"- {line}" for line in missing),
        "</details>",
        _provenance_text(results, [dtype], [load]),
    ]
    return "\n\n".join(parts)


def loads_table(results: BenchmarkResults) -> str:
    """Markdown of one row per kernel, kernels at the large tile first, then the libraries and the
    rate of mma.sync.

    The columns are percent of the first library in the harmonic mean over all sizes, for each dtype
    under each load. For the main dtype under sustained load, speed at TABLE_SEQ_LEN, SM clock and
    power follow.
    """
    main, marks, first = main_dtype(results), _Marks(results), results.first_short
    dtypes = [main, *(dtype for dtype in results.dtypes if dtype != main)]
    columns = [(dtype, load) for dtype in dtypes for load in results.loads]
    header = ["step", "idea", *(f"{dtype}, {load}: %" for dtype, load in columns)]
    header += [unit(results), "MHz", "W"]
    rows = [*_kernel_load_rows(results, columns, marks), *_ceiling_load_rows(results, columns)]
    noises = ((column, results.noise(column[0], load=column[1])) for column in columns)
    said = [f"{100 * n:.2f}% ({dtype}, {load})" for (dtype, load), n in noises if n is not None]
    parts = [
        Table(header, rows, "ll").markdown(),
        *marks.line,
        f"Rows are at the large tile unless they name a config; % is of {first}. The last three "
        f"columns are of {main}, {SUSTAINED}: {unit(results)} at {table_length(results)}, SM "
        f"clock and power, medians over the samples of all {_sizes_word(results)}. "
        f'An "=" marks a step that differs from its parent by no more than {first} differs from '
        f"itself: {', '.join(said)}.",
        _provenance_text(results, dtypes, results.loads),
    ]
    return "\n\n".join(parts)


def _kernel_load_rows(
    results: BenchmarkResults, columns: Sequence[Column], marks: _Marks
) -> Iterator[list[str]]:
    """Rows of the measured kernels: each with the static stride, then with the stride read at run
    time; then other tiles."""
    main, _ = columns[0]
    operation = results.operation
    pairs = {
        dtype: [found for _, found in beside_parents(dtype, operation)] for dtype, _ in columns
    }
    for n, own in enumerate(stairs(main, operation).values()):
        for tile, title in (
            (1, own.step.idea),
            (2, "the same, with the row stride read at run time"),
        ):
            config, _ = pairs[main][n][tile]
            if config is not None and config.short_form() in results.names(main):
                shares = [_share_cell(results, pairs[d][n][tile], d, load) for d, load in columns]
                speed = _sustained_cells(results, config.short_form(), main)
                yield [marks(own.step.id, config.short_form()), title, *shares, *speed]
    for config in _off_the_stairs(results, main):
        shares = [
            _share_cell(results, (config.replace(dtype=Element.from_name(d)), None), d, load)
            for d, load in columns
        ]
        speed = _sustained_cells(results, config.short_form(), main)
        step = marks(config.step.id, config.short_form())
        yield [step, f"`{config.short_form()}`", *shares, *speed]


def _ceiling_load_rows(results: BenchmarkResults, columns: Sequence[Column]) -> Iterator[list[str]]:
    """Rows of the libraries, and of mma.sync back to back, without its clock, which was not
    read."""
    main, _ = columns[0]
    for name, title in _libraries(results, main):
        shares = [share_text(results.of_first(name, d, load=load)) for d, load in columns]
        yield ["", title, *shares, *_sustained_cells(results, name, main)]
    if (rate := results.rate(MMA_SYNC, main, SUSTAINED)) is not None:
        shares = [share_text(_rate_of_first(results, *column)) for column in columns]
        yield ["", RATE_TITLE, *shares, number(rate), "", ""]


def _sustained_cells(results: BenchmarkResults, name: str, dtype: str) -> list[str]:
    """Speed, SM clock and power."""
    found = [m for n in results.sizes if (m := results.find(name, dtype, n, SUSTAINED))]
    speed = _speed_cell(results, name, dtype, SUSTAINED)
    return [speed, *(number(_median(readings)) for readings in _readings(found))]
