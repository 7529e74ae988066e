"""Benchmark results as tables: for the terminal, and of the steps for a Markdown file."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial

from tabulate import tabulate

from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    Config,
    DType,
    config_from_short_form,
    get_kernel_progression_configs,
)
from flash_helpers.measure.results import FLASH, LIBRARY_NAMES, RATE_NAMES, BenchmarkResults
from flash_helpers.registry.family import Step

BEGIN_MARKER = "<!-- benchmark:begin -->"
END_MARKER = "<!-- benchmark:end -->"
TABLE_SEQ_LEN = 4096
MAIN_DTYPE = "bf16"
HEADER_BEGIN_MARKER = "// benchmark:begin"
HEADER_END_MARKER = "// benchmark:end"
COMMENT_WIDTH = 96

# (contender, dtype, length or None for the mean over all lengths) to a number, if there is one
Share = Callable[[str, str, "int | None"], "float | None"]


def main_dtype(results: BenchmarkResults) -> str:
    """The dtype that tables and plots of one dtype show: bf16 if it was measured.

    Raises ValueError if nothing was.
    """
    if not results.measurements:
        raise ValueError("the results hold no measurement: run the benchmark first")
    return MAIN_DTYPE if MAIN_DTYPE in results.dtypes else results.dtypes[0]


def format_cell(value: float | None, factor: float = 1, digits: int = 0) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{factor * value:.{digits}f}"


def _length_table(
    results: BenchmarkResults, dtype: str, title: str, value: Share, factor: float, digits: int
) -> str:
    """A row a contender, a column a length and one for the mean, for which `value` gets None; then
    the widest spread over the lengths."""
    columns = (*results.seq_lens, None)
    headers = [f"{dtype}, {title}", *(f"seq {n}" for n in results.seq_lens)]
    return tabulate(
        [
            [
                name,
                *(format_cell(value(name, dtype, n), factor, digits) for n in columns),
                format_cell(_widest_spread(results, name, dtype), 100, 1),
            ]
            for name in results.names(dtype)
        ],
        headers=[*headers, "harmonic mean", "spread %"],
        disable_numparse=True,
        colalign=("left", *["right"] * (len(columns) + 1)),
    )


def _widest_spread(results: BenchmarkResults, name: str, dtype: str) -> float | None:
    found = (results.find(name, dtype, seq_len) for seq_len in results.seq_lens)
    return max((m.spread for m in found if m is not None), default=None)


def _tables(results: BenchmarkResults, dtype: str) -> list[str]:
    def tflops(name: str, dtype: str, seq_len: int | None) -> float | None:
        if seq_len is None:
            return results.mean_tflops(name, dtype)
        return results.tflops(name, dtype, seq_len)

    shares: dict[str, Share] = {"% of flash": results.of_flash}
    for rate, title in RATE_NAMES.items():
        if results.rate(rate, dtype) is not None:
            shares[f"% of {title}"] = partial(results.of_rate, rate)
    return [
        _length_table(results, dtype, "TFLOP/s", tflops, 1, 0),
        *(_length_table(results, dtype, title, share, 100, 1) for title, share in shares.items()),
    ]


def report_text(results: BenchmarkResults) -> str:
    """For each dtype the TFLOP/s and the percent of PyTorch's flash backend and of the rates of the
    chip that were measured; then what to mind."""
    parts = []
    for dtype in results.dtypes:
        parts += [f"{table}\n" for table in _tables(results, dtype)]
    parts += [
        f"{record.dtype} {RATE_NAMES[record.name]}: "
        + (record.failure or f"{format_cell(record.tflops)} TFLOP/s")
        for record in results.rates
    ]
    parts += [f"{library.name} {library.version}" for library in results.libraries]
    valid = [m for m in results.measurements if m.valid]
    if valid:
        widest = max(valid, key=lambda m: m.spread)
        parts.append(
            "speeds are those at the median time; spread is the interquartile range over it, the "
            f"widest of a contender's lengths; largest spread: {100 * widest.spread:.1f}% of "
            f"{widest.name} at {widest.seq_len}"
        )
    parts += [
        f"{c.dtype} at {c.seq_len}: SM clock {c.sm_mhz[1]:.0f} MHz ({c.sm_mhz[0]:.0f} to "
        f"{c.sm_mhz[2]:.0f}), {c.power_w[1]:.0f} W, {c.temperature_c:.0f} degrees C"
        for c in results.clocks
    ]
    parts += [
        f"{m.name} at {m.seq_len} was run by {m.ran}"
        for m in results.measurements
        if m.ran not in ("", m.name)
    ]
    parts += [f"{m.name} at {m.seq_len}: {m.failure}" for m in results.measurements if m.failure]
    parts += [f"{s.dtype} at {s.seq_len} skipped: {s.reason}" for s in results.skipped]
    return "\n".join(parts)


def markdown_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    alignment: Sequence[str] | None = None,
) -> list[str]:
    """The lines of a table. alignment: ":--" or "--:" a column; by default all but the first are
    aligned to the right."""
    alignment = alignment or [":--", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, alignment, *rows)]


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
    return f"{before}{begin}\n{body.strip()}\n{end}{after}"


def _measured_configs(results: BenchmarkResults, dtype: str) -> Mapping[str, list[Config]]:
    by_step: dict[str, list[Config]] = {step: [] for step in STEPS}
    for name in results.names(dtype):
        if name not in LIBRARY_NAMES:
            config = config_from_short_form(name)
            by_step[config.step.id].append(config)
    return by_step


def _tuned_text(config: Config) -> str:
    text = (
        f"B_r {config.B_r}, B_c {config.B_c}, {config.n_warps} warps, loads "
        f"{config.Q_mma_load_K_tiles}/{config.K_mma_load_K_tiles}/{config.V_mma_load_K_tiles}"
    )
    parts = [text, *(["double-buffered"] if config.mma_double_buffer_loads else [])]
    for field in fields(config):
        value = getattr(config, field.name)
        # the options above have no default; what the sweep does not vary is no news
        is_swept = len(config.step.tunable.get(field.name, ())) > 1
        if is_swept and field.default not in (MISSING, value):
            parts.append(field.name if value is True else f"{field.name} {value}")
    return ", ".join(parts)


def _speed_cells(results: BenchmarkResults, name: str, dtype: str, seq_len: int) -> list[str]:
    return [
        format_cell(results.tflops(name, dtype, seq_len)),
        format_cell(results.of_flash(name, dtype, seq_len), 100, 1),
        format_cell(results.of_flash(name, dtype), 100, 1),
    ]


def _step_row(
    results: BenchmarkResults,
    fixed: Config,
    measured: list[Config],
    seq_len: int,
) -> list[str]:
    dtype = fixed.dtype.short
    row = [
        fixed.step.id,
        fixed.step.idea,
        *_speed_cells(results, fixed.short_form(), dtype, seq_len),
    ]
    means = {config: results.mean_tflops(config.short_form(), dtype) for config in measured}
    complete = {config: mean for config, mean in means.items() if mean is not None}
    if len(complete) < 2:
        return [*row, "", "", "", ""]
    best = max(complete, key=lambda config: complete[config])
    return [*row, *_speed_cells(results, best.short_form(), dtype, seq_len), _tuned_text(best)]


_PROTOCOL_TEXTS = {
    "graph": "CUDA graph replays",
    "events": "launches one by one",
    "rotate": "",
    "flush": "L2 cache overwritten before each",
}


def _rates_text(results: BenchmarkResults, dtype: str) -> str:
    measured = [
        f"{title} {format_cell(speed)} TFLOP/s"
        for rate, title in RATE_NAMES.items()
        if (speed := results.rate(rate, dtype)) is not None
    ]
    if not measured:
        return ""
    return f" The chip's own rates, measured in the same process: {', '.join(measured)}."


def _provenance_text(results: BenchmarkResults, dtype: str) -> str:
    found = results.provenance
    shapes = {(m.batch, m.n_heads, m.seq_len) for m in results.measurements if m.dtype == dtype}
    heads = "/".join(str(n) for n in sorted({n_heads for _, n_heads, _ in shapes}))
    batches = ", ".join(f"{batch} at {seq_len}" for batch, _, seq_len in sorted(
        shapes, key=lambda shape: shape[2]))  # fmt: skip
    counts = sorted({len(m.samples_ms) for m in results.measurements if m.valid})
    rounds = " to ".join(str(n) for n in dict.fromkeys((*counts[:1], *counts[-1:])))
    clocks = [record.sm_mhz[1] for record in results.clocks if record.dtype == dtype]
    parts = [
        found.gpu,
        f"SM clock {statistics.median(clocks):.0f} MHz (median)" if clocks else "",
        f"driver {found.driver}" if found.driver else "",
        f"kernels built with {found.library}" if found.library else "",
        f"PyTorch {found.torch}, CUDA {found.cuda}, cuDNN {found.cudnn}",
        *(f"{library.name} {library.version}" for library in results.libraries),
        f"{dtype}, {heads} heads, batch {batches}",
        f"median of {rounds} rounds of {_PROTOCOL_TEXTS[results.protocol.timing]}",
        _PROTOCOL_TEXTS[results.protocol.cache],
        found.date,
        f"commit {found.commit}" if found.commit else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def header_lines(results: BenchmarkResults, step: Step) -> str:
    """What was measured of a step at its fixed config, as comment lines for its kernel file."""
    name = FAMILIES[step.family].fixed_config(step, DType.from_name(MAIN_DTYPE)).short_form()
    speed = results.tflops(name, MAIN_DTYPE, TABLE_SEQ_LEN)
    of_flash = results.of_flash(name, MAIN_DTYPE, TABLE_SEQ_LEN)
    mean_of_flash = results.of_flash(name, MAIN_DTYPE)
    lines = [
        f"Measured ({results.provenance.gpu}, CUDA {results.provenance.cuda}, {MAIN_DTYPE}): "
        f"{format_cell(speed)} TFLOP/s at length {TABLE_SEQ_LEN}, {format_cell(of_flash, 1, 2)} of "
        f"PyTorch's flash backend; {format_cell(mean_of_flash, 1, 2)} in the harmonic mean."
    ]
    for record in results.resources:
        if record.name == name:
            spilled = f", {record.local_bytes} bytes of it spilled" if record.local_bytes else ""
            lines.append(
                f"Cost: {record.registers} registers a thread{spilled}, "
                f"{record.smem_bytes // 1024} KiB of shared memory a block, "
                f"{record.blocks_per_sm} blocks an SM."
            )
    wrapped = textwrap.wrap(" ".join(lines), COMMENT_WIDTH)
    return "\n".join(f"// {line}" for line in wrapped)


def progression_table(results: BenchmarkResults) -> str:
    """Markdown: a row a version in the order of the steps, then the libraries.

    Speeds are TFLOP/s at TABLE_SEQ_LEN (the longest length measured, if that was not), and percent
    of PyTorch's flash backend there and of the harmonic means over all lengths.
    """
    dtype = main_dtype(results)
    lengths = results.seq_lens
    seq_len = TABLE_SEQ_LEN if TABLE_SEQ_LEN in lengths else lengths[-1]
    speed = [f"TFLOP/s at {seq_len}", f"% of flash at {seq_len}", "% of flash, mean"]
    header = ["step", "idea", *speed, *(f"best config: {name}" for name in speed), "best config"]
    measured = _measured_configs(results, dtype)
    rows = [
        _step_row(results, config, measured[config.step.id], seq_len)
        for config in get_kernel_progression_configs()
        if config.dtype == DType.from_name(dtype)
    ]
    rows += [
        ["", LIBRARY_NAMES[name], *_speed_cells(results, name, dtype, seq_len), "", "", "", ""]
        for name in LIBRARY_NAMES
        if name in results.names(dtype)
    ]
    alignment = ["--:", ":--", *["--:"] * 6, ":--"]
    span = f"{lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    return "\n".join(
        [
            *markdown_table(header, rows, alignment),
            "",
            f"TFLOP/s count 4·B·H·S²·D operations. Flash is {LIBRARY_NAMES[FLASH]}, "
            f"timed in the same process; mean is the harmonic mean over sequence lengths {span}. "
            "The best config is the fastest by that mean among those measured for the step, with "
            f"the fragment loads of Q/K/V.{_rates_text(results, dtype)}",
            "",
            _provenance_text(results, dtype),
        ]
    )
