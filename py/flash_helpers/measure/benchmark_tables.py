"""Benchmark results as tables: for the terminal, and of the steps for a Markdown file."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from flash_helpers.console.tables import DASH, Table, number, percent
from flash_helpers.kernel_configs import FAMILIES, Config, Element, config_from_short_form
from flash_helpers.measure.results import (
    BEST_OTHER,
    CONTROL,
    FLASH,
    FP16_MANTISSA_BITS,
    LIBRARY_NAMES,
    LOAD_TEXTS,
    MMA_SYNC,
    OTHERS,
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
from flash_helpers.registry.selection import names_of

BEGIN_MARKER = "<!-- benchmark:begin -->"
END_MARKER = "<!-- benchmark:end -->"
LOADS_MARKERS = ("<!-- loads:begin -->", "<!-- loads:end -->")
BEST_MARKERS = ("<!-- best:begin -->", "<!-- best:end -->")
SUPPORTS_MARKERS = ("<!-- supports:begin -->", "<!-- supports:end -->")
TABLE_SEQ_LEN = 4096
MAIN_DTYPE = "bf16"
RATE_TITLE = f"{RATE_NAMES[MMA_SYNC]} alone, on registers"
HEADER_BEGIN_MARKER = "// benchmark:begin"
HEADER_END_MARKER = "// benchmark:end"
COMMENT_WIDTH = 96

# (contender, dtype, length or None for the mean over all, load) to a number, if there is one
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
    """A share as a number of percent, under a title that says so; a dash where there is none."""
    return number(None if share is None else 100 * share, 1)


def supports_table() -> str:
    """The problems that each family's kernels take, for a Markdown file: a table for each
    operation; of a family whose steps take different ones, a row for the steps of each kind."""
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
    """Problems that a step's fixed config and its variants take, in words."""
    config = family.fixed_config(step, Element.from_name(MAIN_DTYPE))
    taken = [variant.supports.described() for variant in config.variants()]
    return max(taken, key=lambda quantities: len(quantities["options"]))


def _length_table(
    results: BenchmarkResults,
    dtype: str,
    load: str,
    title: str,
    value: Share,
    text: Callable[..., str],
) -> Table:
    """A row a contender, a column a length and one for the mean, for which `value` gets None; then
    the widest spread over the lengths, the SM's clock and the power."""
    lengths = results.seq_lens
    header = [f"{dtype}, {load}, {title}", *(f"seq {n}" for n in lengths), "harmonic mean"]
    rows = []
    for name in results.names(dtype):
        cells = [text(value(name, dtype, n, load)) for n in (*lengths, None)]
        found = [m for n in lengths if (m := results.find(name, dtype, n, load)) is not None]
        cells.append(share_text(_widest_spread(results, found)))
        cells += [number(_median(readings)) for readings in _readings(found)]
        rows.append([name, *cells])
    return Table([*header, "spread %", "MHz", "W"], rows)


def _widest_spread(results: BenchmarkResults, found: Iterable[Measurement]) -> float | None:
    """The longest interval of the ratios to the flash backend, over their median."""
    widths = []
    for m in found:
        if ratios := results.pairs(m.name, FLASH, m.dtype, m.seq_len, m.load):
            low, high = interval(ratios)
            widths.append((high - low) / statistics.median(ratios))
    return max(widths, default=None)


def _readings(found: Sequence[Measurement]) -> tuple[list[float], list[float]]:
    """SM clocks in MHz and powers in W of all samples."""
    return [x for m in found for x in m.sm_mhz], [x for m in found for x in m.power_w]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _tables(results: BenchmarkResults, dtype: str, load: str) -> list[Table]:
    shares: dict[str, Share] = {"% of flash": results.of_flash}
    for rate, title in RATE_NAMES.items():
        if results.rate(rate, dtype, load) is not None:
            shares[f"% of {title}"] = partial(results.of_rate, rate)
    if results.provenance.tensor_peak is not None:
        shares["% of the tensor cores' peak at this clock"] = results.of_tensor_peak
    shares["% of the best of the others"] = results.of_best_other
    return [
        _length_table(results, dtype, load, "TFLOP/s", results.tflops, number),
        *(
            _length_table(results, dtype, load, title, share, share_text)
            for title, share in shares.items()
        ),
        Table([f"{dtype}, {load}", *_length_titles(results)], _best_rows(results, dtype, load)),
    ]


def _length_titles(results: BenchmarkResults) -> list[str]:
    return [f"seq {n}" for n in results.seq_lens]


def _best_rows(results: BenchmarkResults, dtype: str, load: str) -> list[list[str]]:
    """The fastest library and the fastest kernel at each length, and how the two compare."""
    labels = _kernel_labels(results, dtype)
    rows = [["best of the others"], ["best of ours"], ["ours over the others"]]
    for n in results.seq_lens:
        other = results.find(BEST_OTHER, dtype, n, load)
        own = results.fastest(labels, dtype, n, load)
        rows[0].append(f"{number(other.tflops)} {other.name}" if other else DASH)
        rows[1].append(f"{number(own.tflops)} {labels[own.name]}" if own else DASH)
        place = (own.name if own else "", BEST_OTHER, dtype, n, load)
        ratio = number(results.ratio(*place), 2)
        rows[2].append(f"= {ratio}" if results.is_equal(*place) else ratio)
    return rows


def _kernel_labels(results: BenchmarkResults, dtype: str) -> dict[str, str]:
    """A short label for each kernel that was measured, by its name, sorted as configs are."""
    names = (name for name in results.names(dtype) if name not in LIBRARY_NAMES)
    configs = sorted(map(config_from_short_form, names))
    return dict(zip((c.short_form() for c in configs), names_of(configs), strict=True))


def report_text(results: BenchmarkResults) -> str:
    """For each dtype and load the TFLOP/s and the percent of PyTorch's flash backend, of the rates
    of the chip that were measured, of the tensor cores' peak and of the fastest library, and the
    fastest at each length; then what to mind."""
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
        f"{dtype}, {load}: {CONTROL} is within {100 * noise:.2f}% of {FLASH} in the mean over "
        "lengths; less than that is no difference"
        for dtype, load in loads
        if (noise := results.noise(dtype, load=load)) is not None
    ]
    parts.append(
        "speeds are those at the median time; % of flash is the median of ratios within a round; "
        "spread is what 80% of them lie in, the widest of a contender's lengths"
    )
    parts += [
        f"{m.name} at {m.seq_len} was run by {m.ran}"
        for m in results.measurements
        if m.ran not in ("", m.name) and m.load == results.main_load
    ]
    parts += [
        f"{m.name} at {m.seq_len}, {m.load}: {m.failure}" for m in results.measurements if m.failure
    ]
    parts += _skipped_lines(results.skipped)
    return "\n".join(parts)


def _skipped_lines(skipped: Iterable[SkippedRecord]) -> list[str]:
    """Contenders that were left out, at which lengths, and why."""
    return _lines_by_reason(
        (f"{s.name}, {s.dtype}," if s.name else s.dtype, s.seq_len, f"skipped: {s.reason}")
        for s in skipped
    )


def _lines_by_reason(found: Iterable[tuple[str, int, str]]) -> list[str]:
    """A line per subject and reason, with all lengths."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for what, seq_len, reason in found:
        lengths.setdefault((what, reason), []).append(seq_len)
    return [
        f"{what} at {', '.join(map(str, at))} {reason}" for (what, reason), at in lengths.items()
    ]


def replace_between_markers(
    text: str, body: str, begin: str = BEGIN_MARKER, end: str = END_MARKER
) -> str:
    """`text` with the lines between the two markers replaced by `body`.

    Raises ValueError unless each marker is there once, in order.
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
    """How the samples of a load were taken, with the clock and the power."""
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
    """The mask and the heads of the problems, and the batch at each length."""
    problems = {m.problem for m in found}
    causal = any(p.causal for p in problems)
    heads = sorted({(p.heads, p.kv_heads) for p in problems})
    batches = sorted({(p.len_q, p.batch) for p in problems})
    parts = [
        "causal (TFLOP/s count the keys that a query sees)" if causal else "",
        " and ".join(f"{n} heads" + (f" on {kv}" if kv != n else "") for n, kv in heads),
        "batch " + ", ".join(f"{batch} at {n}" for n, batch in batches),
    ]
    return ", ".join(filter(None, parts))


def _provenance_text(results: BenchmarkResults, dtypes: Sequence[str], loads: Sequence[str]) -> str:
    """The line below a table of these dtypes and loads."""
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


def header_lines(results: BenchmarkResults, step: Step) -> str:
    """Speed and cost of a step at its tiles, as comment lines for its kernel file; "" for a step
    that was not measured."""
    fixed = FAMILIES[step.family].fixed_config(step, Element.from_name(MAIN_DTYPE))
    found = results.provenance
    lines = [
        f"Measured {LOAD_TEXTS[results.main_load]} ({found.gpu}, CUDA {found.cuda}, {MAIN_DTYPE}), "
        f"TFLOP/s at length {TABLE_SEQ_LEN}, and share of PyTorch's flash backend in the harmonic "
        "mean over lengths."
    ]
    resources = {record.name: record for record in results.resources}
    own = stair(fixed)
    tiles = [c for c in (own.fixed, own.large) if c is not None]
    if not any(results.tflops(c.short_form(), MAIN_DTYPE) for c in tiles):
        return ""
    for config in tiles:
        name = config.short_form()
        speed = number(results.tflops(name, MAIN_DTYPE, TABLE_SEQ_LEN))
        share = number(results.of_flash(name, MAIN_DTYPE), 2)
        lines.append(f"{tile_text(config)}: {speed}, {share}.")
        if record := resources.get(name):
            spilled = f", {record.local_bytes} bytes of it spilled" if record.local_bytes else ""
            lines.append(
                f"Cost: {record.registers} registers per thread{spilled}, "
                f"{record.smem_bytes // 1024} KiB of shared memory per block, "
                f"{record.blocks_per_sm} block{'s' * (record.blocks_per_sm != 1)} per SM."
            )
    wrapped = textwrap.wrap(" ".join(lines), COMMENT_WIDTH)
    return "\n".join(f"// {line}" for line in wrapped)


def progression_table(results: BenchmarkResults) -> str:
    """Markdown: a row a step in the order of the registry, then the libraries and the rate of
    mma.sync; below, folded, the other configs that were measured.

    Percent of PyTorch's flash backend in the harmonic mean over all lengths at both tiles, and
    TFLOP/s at TABLE_SEQ_LEN (the longest length measured, if that was not), under the main load.
    """
    dtype = main_dtype(results)
    rows = [*_step_rows(results, dtype), *_ceiling_rows(results, dtype)]
    header = ["step", "idea", "fixed tile: % of flash", "large tile: % of flash"]
    header += ["stride read: % of flash", f"TFLOP/s at {_table_length(results)}"]
    parts = [
        Table(header, rows, "ll").markdown(),
        _legend(results, dtype),
        *_other_configs(results, dtype),
        _provenance_text(results, [dtype], [results.main_load]),
    ]
    return "\n\n".join(parts)


def _table_length(results: BenchmarkResults) -> int:
    lengths = results.seq_lens
    return TABLE_SEQ_LEN if TABLE_SEQ_LEN in lengths else lengths[-1]


def _speed_cell(results: BenchmarkResults, name: str, dtype: str, load: str | None = None) -> str:
    return number(results.tflops(name, dtype, _table_length(results), load))


def _share_cell(results: BenchmarkResults, pair: Pair, dtype: str, load: str | None = None) -> str:
    """Percent of flash in the mean; with "=" if it differs from the parent's by no more than the
    noise."""
    config, parent = pair
    if config is None:
        return ""
    name = config.short_form()
    text = share_text(results.of_flash(name, dtype, load=load))
    is_equal = parent is not None and results.is_equal(name, parent.short_form(), dtype, load=load)
    return f"= {text}" if is_equal else text


def _step_rows(results: BenchmarkResults, dtype: str) -> Iterator[list[str]]:
    measured = measured_families(results.names(dtype))
    for own, pairs in beside_parents(dtype):
        if own.step.family not in measured:
            continue
        cells = [_share_cell(results, pair, dtype) for pair in pairs]
        speed = _speed_cell(results, own.widest.short_form(), dtype)
        yield [own.step.id, own.step.idea, *cells, speed]


def _ceiling_rows(results: BenchmarkResults, dtype: str) -> Iterator[list[str]]:
    """The libraries, and mma.sync back to back."""
    for name, title in _libraries(results, dtype):
        share = share_text(results.of_flash(name, dtype))
        yield ["", title, share, share, "", _speed_cell(results, name, dtype)]
    if (rate := results.rate(MMA_SYNC, dtype)) is not None:
        share = share_text(_rate_of_flash(results, dtype, results.main_load))
        yield ["", RATE_TITLE, share, share, "", number(rate)]


def _libraries(results: BenchmarkResults, dtype: str) -> Iterator[tuple[str, str]]:
    """Those that were measured, with their titles; the control is none."""
    names = results.names(dtype)
    return ((name, LIBRARY_NAMES[name]) for name in OTHERS if name in names)


def _rate_of_flash(results: BenchmarkResults, dtype: str, load: str) -> float | None:
    flash = results.of_rate(MMA_SYNC, FLASH, dtype, load=load)
    return 1 / flash if flash else None


def _legend(results: BenchmarkResults, dtype: str) -> str:
    lengths = results.seq_lens
    span = f"{lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    own = list(stairs(dtype).values())
    fixed = next(tile_text(s.fixed) for s in own if s.fixed)
    large = next(tile_text(s.large) for s in own if s.large)
    sentences = [
        f"Flash is {LIBRARY_NAMES[FLASH]}: each sample is set against flash's sample next to it in "
        f"the same round, and % is of the harmonic means over sequence lengths {span}.",
        f"The fixed tile is {fixed}, the large tile {large}; TFLOP/s are at the large tile where a "
        "step has it, and count 4·B·H·S²·D operations.",
        "Stride read: at the large tile, the row stride read at run time, of the steps that know "
        "it at compile time.",
        f"Speeds are {LOAD_TEXTS[results.main_load]}.",
    ]
    if (noise := results.noise(dtype)) is not None:
        sentences.append(
            "Set against itself, flash differs in the mean of a round by up to "
            f'{100 * noise:.1f}%; a step no further from its parent at the same tile has an "=".'
        )
    return " ".join(sentences)


def _off_the_stairs(results: BenchmarkResults, dtype: str) -> list[Config]:
    """Measured configs that stand on neither staircase."""
    shown = {config for own in stairs(dtype).values() for config in own.configs}
    names = [name for name in results.names(dtype) if name not in LIBRARY_NAMES]
    return sorted(c for c in map(config_from_short_form, names) if c not in shown)


def _other_configs(results: BenchmarkResults, dtype: str) -> Iterator[str]:
    """Measured configs that stand on neither staircase, folded."""
    others = _off_the_stairs(results, dtype)
    if not others:
        return
    header = ["step", "config", "% of flash", f"TFLOP/s at {_table_length(results)}"]
    rows = [
        [
            config.step.id,
            f"`{config.short_form()}`",
            share_text(results.of_flash(config.short_form(), dtype)),
            _speed_cell(results, config.short_form(), dtype),
        ]
        for config in others
    ]
    summary = "Other configs that were measured, the winners of a sweep among them"
    yield f"<details>\n<summary>{summary}</summary>"
    yield Table(header, rows, "ll").markdown()
    yield "</details>"


def lengths_table(results: BenchmarkResults, dtype: str, load: str) -> str:
    """Markdown: TFLOP/s, a row a kernel and a library and a column a length, then the best of the
    libraries, the best of the kernels, and how these compare.

    Below, folded: what stands beside each speed, and what has none at which length, and why.
    """
    names = _kernel_labels(results, dtype) | dict(_libraries(results, dtype))

    def rows(text: Callable[[Measurement], str]) -> list[list[str]]:
        places = [(name, [results.find(name, dtype, n, load) for n in lengths]) for name in names]
        return [[names[name], *(text(m) if m else DASH for m in ms)] for name, ms in places]

    def beside(m: Measurement) -> str:
        share = results.of_tensor_peak(m.name, m.dtype, m.seq_len, m.load)
        clock, power = map(_median, _readings([m]))
        texts = (percent(share), f"{number(clock)} MHz", f"{number(power)} W")
        return ", ".join(text for text in texts if not text.startswith(DASH)) or DASH

    lengths = results.seq_lens
    titles = _length_titles(results)
    speeds = [*rows(lambda m: number(m.tflops)), *_best_rows(results, dtype, load)]
    missing = _skipped_lines(s for s in results.skipped if s.dtype == dtype)
    missing += _lines_by_reason(
        (m.name, m.seq_len, f"failed: {m.failure.splitlines()[0]}")
        for m in results.measurements
        if (m.dtype, m.load) == (dtype, load) and m.failure
    )
    parts = [
        Table([f"{dtype}, {load}: TFLOP/s", *titles], speeds).markdown(),
        "Ours over the others: the fastest kernel over the fastest library at the same length, the "
        "median of the ratios within a round; within the noise of flash against itself it has an "
        '"=". A dash: not measured there.',
        '<details markdown="1">\n<summary>Share of the tensor cores\' peak at this clock, SM clock '
        "and power</summary>",
        Table(["", *titles], rows(beside)).markdown(),
        "The share is derived: TFLOP/s over what the tensor cores of all SMs do in 16 bits at the "
        "SM clock read beside it.",
        *(f"- {line}" for line in missing),
        "</details>",
        _provenance_text(results, [dtype], [load]),
    ]
    return "\n\n".join(parts)


def best_table(results: BenchmarkResults) -> str:
    """Markdown: at each length and under each load the fastest library, the fastest kernel, and how
    they compare, in the main dtype."""
    dtype = main_dtype(results)
    rows = [
        [f"{load}: {title}", *cells]
        for load in results.loads
        for title, *cells in _best_rows(results, dtype, load)
    ]
    table = Table([f"{dtype}: TFLOP/s", *_length_titles(results)], rows)
    names = "; ".join(f"{name}: {title}" for name, title in _libraries(results, dtype))
    return f"{table.markdown()}\n\n{names}. {_provenance_text(results, [dtype], results.loads)}"


def loads_table(results: BenchmarkResults) -> str:
    """Markdown: a row a kernel, those at the large tile first, then the libraries and the rate of
    mma.sync.

    Percent of PyTorch's flash backend in the harmonic mean over all lengths, of each dtype under
    each load; of the main dtype, sustained, TFLOP/s at TABLE_SEQ_LEN, SM clock and power.
    """
    main = main_dtype(results)
    dtypes = [main, *(dtype for dtype in results.dtypes if dtype != main)]
    columns = [(dtype, load) for dtype in dtypes for load in results.loads]
    header = ["step", "idea", *(f"{dtype}, {load}: %" for dtype, load in columns)]
    header += ["TFLOP/s", "MHz", "W"]
    rows = [*_kernel_load_rows(results, columns), *_ceiling_load_rows(results, columns)]
    noises = ((column, results.noise(column[0], load=column[1])) for column in columns)
    said = [f"{100 * n:.2f}% ({dtype}, {load})" for (dtype, load), n in noises if n is not None]
    parts = [
        Table(header, rows, "ll").markdown(),
        "At the large tile unless a config is named, % of flash; the last three columns are of "
        f"{main}, {SUSTAINED}: TFLOP/s at {_table_length(results)}, SM clock and power, medians "
        "over the samples of all lengths. A step no further from its parent than flash from "
        f'itself, up to {", ".join(said)}, has an "=".',
        _provenance_text(results, dtypes, results.loads),
    ]
    return "\n\n".join(parts)


def _kernel_load_rows(results: BenchmarkResults, columns: Sequence[Column]) -> Iterator[list[str]]:
    """Those that were measured, with the static stride and then reading it; then other tiles."""
    main, _ = columns[0]
    pairs = {dtype: [found for _, found in beside_parents(dtype)] for dtype, _ in columns}
    for n, own in enumerate(stairs(main).values()):
        for tile, title in (
            (1, own.step.idea),
            (2, "the same, with the row stride read at run time"),
        ):
            config, _ = pairs[main][n][tile]
            if config is not None and config.short_form() in results.names(main):
                shares = [_share_cell(results, pairs[d][n][tile], d, load) for d, load in columns]
                speed = _sustained_cells(results, config.short_form(), main)
                yield [own.step.id, title, *shares, *speed]
    for config in _off_the_stairs(results, main):
        shares = [
            _share_cell(results, (config.replace(dtype=Element.from_name(d)), None), d, load)
            for d, load in columns
        ]
        speed = _sustained_cells(results, config.short_form(), main)
        yield [config.step.id, f"`{config.short_form()}`", *shares, *speed]


def _ceiling_load_rows(results: BenchmarkResults, columns: Sequence[Column]) -> Iterator[list[str]]:
    """The libraries, and mma.sync back to back, whose clock was not read."""
    main, _ = columns[0]
    for name, title in _libraries(results, main):
        shares = [share_text(results.of_flash(name, d, load=load)) for d, load in columns]
        yield ["", title, *shares, *_sustained_cells(results, name, main)]
    if (rate := results.rate(MMA_SYNC, main, SUSTAINED)) is not None:
        shares = [share_text(_rate_of_flash(results, *column)) for column in columns]
        yield ["", RATE_TITLE, *shares, number(rate), "", ""]


def _sustained_cells(results: BenchmarkResults, name: str, dtype: str) -> list[str]:
    """TFLOP/s, SM clock and power."""
    found = [m for n in results.seq_lens if (m := results.find(name, dtype, n, SUSTAINED))]
    speed = _speed_cell(results, name, dtype, SUSTAINED)
    return [speed, *(number(_median(readings)) for readings in _readings(found))]
