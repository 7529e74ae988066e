"""Benchmark results as tables: for the terminal, and of the steps for a Markdown file."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from functools import partial

from flash_helpers.kernel_configs import (
    FAMILIES,
    Config,
    DType,
    config_from_short_form,
    get_kernel_progression_configs,
)
from flash_helpers.measure.results import FLASH, LIBRARY_NAMES, RATE_NAMES, BenchmarkResults
from flash_helpers.registry.family import Step
from flash_helpers.tables import Table, number

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


def share_text(share: float | None) -> str:
    """A share as a number of percent, under a title that says so; a dash where there is none."""
    return number(None if share is None else 100 * share, 1)


def best_configs(results: BenchmarkResults, dtype: str) -> dict[str, Config]:
    """By id of the step its fastest config by the mean over all lengths, where two or more were
    measured."""
    found: dict[str, list[tuple[float, Config]]] = {}
    for name in results.names(dtype):
        mean = results.mean_tflops(name, dtype)
        if name not in LIBRARY_NAMES and mean is not None:
            config = config_from_short_form(name)
            found.setdefault(config.step.id, []).append((mean, config))
    return {step: max(configs)[1] for step, configs in found.items() if len(configs) > 1}


def _length_table(
    results: BenchmarkResults, dtype: str, title: str, value: Share, text: Callable[..., str]
) -> Table:
    """A row a contender, a column a length and one for the mean, for which `value` gets None; then
    the widest spread over the lengths."""
    lengths = results.seq_lens
    header = [f"{dtype}, {title}", *(f"seq {n}" for n in lengths), "harmonic mean", "spread %"]
    rows = []
    for name in results.names(dtype):
        cells = [text(value(name, dtype, n)) for n in (*lengths, None)]
        rows.append([name, *cells, share_text(_widest_spread(results, name, dtype))])
    return Table(header, rows)


def _widest_spread(results: BenchmarkResults, name: str, dtype: str) -> float | None:
    found = (results.find(name, dtype, seq_len) for seq_len in results.seq_lens)
    return max((m.spread for m in found if m is not None), default=None)


def _tables(results: BenchmarkResults, dtype: str) -> list[Table]:
    shares: dict[str, Share] = {"% of flash": results.of_flash}
    for rate, title in RATE_NAMES.items():
        if results.rate(rate, dtype) is not None:
            shares[f"% of {title}"] = partial(results.of_rate, rate)
    return [
        _length_table(results, dtype, "TFLOP/s", results.tflops, number),
        *(_length_table(results, dtype, title, s, share_text) for title, s in shares.items()),
    ]


def report_text(results: BenchmarkResults) -> str:
    """For each dtype the TFLOP/s and the percent of PyTorch's flash backend and of the rates of the
    chip that were measured; then what to mind."""
    parts = [f"{t.text()}\n" for dtype in results.dtypes for t in _tables(results, dtype)]
    parts += [
        f"{record.dtype} {RATE_NAMES[record.name]}: "
        + (record.failure or f"{number(record.tflops)} TFLOP/s")
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


# How a field of a config c reads; the loads of fragments stand together.
_WORDS = {
    "n_warps": "{c.n_warps} warps",
    "Q_mma_load_K_tiles": (
        "loads {c.Q_mma_load_K_tiles}/{c.K_mma_load_K_tiles}/{c.V_mma_load_K_tiles}"
    ),
    "K_mma_load_K_tiles": "",
    "V_mma_load_K_tiles": "",
    "mma_double_buffer_loads": "double-buffered",
}


def _tuned_text(config: Config) -> str:
    """What a sweep has chosen of a config; what is off or as it always is goes without saying."""
    parts = []
    for name, tried in config.step.tunable.items():
        value = getattr(config, name)
        usual = config.__dataclass_fields__[name].default
        if len(tried) > 1 and value is not False and value != usual:
            words = name if value is True else f"{name} {value}"
            parts.append(_WORDS.get(name, words).format(c=config))
    return ", ".join(filter(None, parts))


def _speed_cells(results: BenchmarkResults, name: str, dtype: str, seq_len: int) -> list[str]:
    return [
        number(results.tflops(name, dtype, seq_len)),
        share_text(results.of_flash(name, dtype, seq_len)),
        share_text(results.of_flash(name, dtype)),
    ]


_PROTOCOL_TEXTS = {
    "graph": "CUDA graph replays",
    "events": "launches one by one",
    "rotate": "",
    "flush": "L2 cache overwritten before each",
}


def _rates_text(results: BenchmarkResults, dtype: str) -> str:
    measured = [
        f"{title} {number(speed)} TFLOP/s"
        for rate, title in RATE_NAMES.items()
        if (speed := results.rate(rate, dtype)) is not None
    ]
    if not measured:
        return ""
    return f" The chip's own rates, measured in the same process: {', '.join(measured)}."


def _provenance_text(results: BenchmarkResults, dtype: str) -> str:
    found, protocol = results.provenance, results.protocol
    own = [m for m in results.measurements if m.dtype == dtype]
    heads = "/".join(map(str, sorted({m.n_heads for m in own})))
    batches = dict(sorted((m.seq_len, m.batch) for m in own))
    counts = sorted({len(m.samples_ms) for m in results.measurements if m.valid})
    rounds = " to ".join(str(n) for n in dict.fromkeys((*counts[:1], *counts[-1:])))
    clocks = [record.sm_mhz[1] for record in results.clocks if record.dtype == dtype]
    return found.sentence(
        found.built_with,
        f"PyTorch {found.torch}, CUDA {found.cuda}, cuDNN {found.cudnn}",
        *(f"{library.name} {library.version}" for library in results.libraries),
        f"{dtype}, {heads} heads, batch {', '.join(f'{b} at {n}' for n, b in batches.items())}",
        f"median of {rounds} rounds of {_PROTOCOL_TEXTS[protocol.timing]}",
        _PROTOCOL_TEXTS[protocol.cache],
        clock=f"SM clock {statistics.median(clocks):.0f} MHz (median)" if clocks else "",
    )


def header_lines(results: BenchmarkResults, step: Step) -> str:
    """What was measured of a step at its fixed config, as comment lines for its kernel file."""
    name = FAMILIES[step.family].fixed_config(step, DType.from_name(MAIN_DTYPE)).short_form()
    speed = results.tflops(name, MAIN_DTYPE, TABLE_SEQ_LEN)
    of_flash = results.of_flash(name, MAIN_DTYPE, TABLE_SEQ_LEN)
    mean_of_flash = results.of_flash(name, MAIN_DTYPE)
    lines = [
        f"Measured ({results.provenance.gpu}, CUDA {results.provenance.cuda}, {MAIN_DTYPE}): "
        f"{number(speed)} TFLOP/s at length {TABLE_SEQ_LEN}, {number(of_flash, 2)} of "
        f"PyTorch's flash backend; {number(mean_of_flash, 2)} in the harmonic mean."
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
    """Markdown: a row a step in the order of the registry, then the libraries.

    Speeds are TFLOP/s at TABLE_SEQ_LEN (the longest length measured, if that was not), and percent
    of PyTorch's flash backend there and of the harmonic means over all lengths.
    """
    dtype = main_dtype(results)
    lengths = results.seq_lens
    seq_len = TABLE_SEQ_LEN if TABLE_SEQ_LEN in lengths else lengths[-1]
    speed = [f"TFLOP/s at {seq_len}", f"% of flash at {seq_len}", "% of flash, mean"]
    header = ["step", "idea", *speed, *(f"best config: {name}" for name in speed), "best config"]
    best_of = best_configs(results, dtype)
    rows = []
    for config in get_kernel_progression_configs():
        if config.dtype.short == dtype:
            step, best = config.step, best_of.get(config.step.id)
            cells = _speed_cells(results, config.short_form(), dtype, seq_len)
            if best is None:
                cells += [""] * 4
            else:
                cells += _speed_cells(results, best.short_form(), dtype, seq_len)
                cells.append(_tuned_text(best))
            rows.append([step.id, step.idea, *cells])
    for name, title in LIBRARY_NAMES.items():
        if name in results.names(dtype):
            rows.append(["", title, *_speed_cells(results, name, dtype, seq_len), *[""] * 4])
    span = f"{lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    return "\n\n".join(
        [
            Table(header, rows, "llrrrrrrl").markdown(),
            f"TFLOP/s count 4·B·H·S²·D operations. Flash is {LIBRARY_NAMES[FLASH]}, "
            f"timed in the same process; mean is the harmonic mean over sequence lengths {span}. "
            "The best config is the fastest by that mean among those measured for the step, with "
            f"the fragment loads of Q/K/V.{_rates_text(results, dtype)}",
            _provenance_text(results, dtype),
        ]
    )
