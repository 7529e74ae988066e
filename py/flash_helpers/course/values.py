"""Numbers for the middle of a sentence, by key: `SOURCE.KERNEL.QUANTITY`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from flash_helpers.console.tables import number, percent
from flash_helpers.course.arguments import (
    ARCHITECTURES,
    DEFAULT_ARCHITECTURE,
    DTYPE,
    KERNEL_NAMES,
    parse_kernel,
    parse_step,
)
from flash_helpers.course.clock_blocks import mean_change, speedup
from flash_helpers.course.counter_blocks import OPCODE_GROUPS, QUANTITIES, of_group, per_mma
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.sass_blocks import PHASES, phase_counts
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.benchmark_tables import TABLE_SEQ_LEN
from flash_helpers.measure.results import LIBRARY_NAMES, RATE_NAMES, BenchmarkResults
from flash_helpers.measure.staircases import parent_at_tile
from flash_helpers.registry.selection import UsageError
from flash_helpers.sass.analyse.counts import Bucket
from flash_helpers.sass.analyse.matrix import GROUP_NAMES, KernelFacts
from flash_helpers.sass.read import opcodes

_SASS: Mapping[str, tuple[str, Callable[[KernelFacts], str]]] = MappingProxyType(
    {
        "registers": ("registers per thread", lambda f: number(f.kernel.resources.registers)),
        "spill_stores": (
            "spilled bytes stored, per thread",
            lambda f: number(f.kernel.resources.spill_store_bytes),
        ),
        "spill_loads": (
            "spilled bytes loaded, per thread",
            lambda f: number(f.kernel.resources.spill_load_bytes),
        ),
        "smem_kib": ("shared memory per block, KiB", lambda f: f"{f.smem_bytes / 1024:g}"),
        "blocks": ("blocks per SM", lambda f: number(f.occupancy.blocks)),
        "warps": ("warps per SM", lambda f: number(f.occupancy.warps)),
        "limited_by": ("what limits them", lambda f: " and ".join(f.occupancy.limiters)),
        "compiler": ("compiler and version", lambda f: str(f.kernel.compiler)),
        "loop": ("instructions of the main loop", lambda f: number(phase_counts(f, "main").work)),
        "prologue": ("of the prologue", lambda f: number(phase_counts(f, "prologue").work)),
        "epilogue": ("of the epilogue", lambda f: number(phase_counts(f, "epilogue").work)),
        "per_hmma": (
            "instructions of the main loop per HMMA",
            lambda f: number(f.per_hmma(phase_counts(f, "main").work), 2),
        ),
        "filler": (
            "filler in the main loop",
            lambda f: number(phase_counts(f, "main").by_bucket[Bucket.FILLER]),
        ),
    }
)
_BOUND: Mapping[str, tuple[str, Callable[[KernelFacts], str]]] = MappingProxyType(
    {
        "limit": ("what bounds an iteration", lambda f: next(iter(_cycles(f)))),
        "cycles": ("its cycles, all warps of an SM", lambda f: number(max(_cycles(f).values()))),
        "least_ms": (
            f"least time of the launch at {TABLE_SEQ_LEN}, ms",
            lambda f: number(f.prediction.least_ms if f.prediction else None, 3),
        ),
        "share": ("least time over measured time", lambda f: percent(f.of_bound)),
    }
)
_PROVENANCE = ("gpu", "date", "cuda")
_SPEEDS: Mapping[str, str] = MappingProxyType(
    {
        "tflops": f"TFLOP/s at {TABLE_SEQ_LEN}",
        "mean": "TFLOP/s, harmonic mean over all lengths",
        "of_flash": f"percent of PyTorch's flash backend at {TABLE_SEQ_LEN}",
        "of_flash_mean": "the same of the means",
    }
)
_CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "change": f"against the parent at {TABLE_SEQ_LEN}, percent with sign",
        "change_mean": "the same of the means",
        "verdict": f'"faster", "slower" or "=" at {TABLE_SEQ_LEN}',
    }
)


def value(evidence: Evidence, key: str) -> str:
    """The text that a key stands for. Raises UsageError for one that is none."""
    source, *parts = key.split(".")
    if source not in _SOURCES or not parts:
        raise UsageError(
            f"value {key!r}: a key begins with {', '.join(f'{s}.' for s in _SOURCES)}; see "
            "build_docs.py --values"
        )
    try:
        return _SOURCES[source](evidence, parts)
    except UsageError as error:
        raise UsageError(f"value {key!r}: {error}") from error


def _chosen(name: str, accepted: Mapping[str, object] | tuple[str, ...]) -> str:
    if name not in accepted:
        raise UsageError(f"{name!r} is not one of {', '.join(accepted)}")
    return name


def _only(parts: list[str], length: int) -> list[str]:
    if len(parts) != length:
        raise UsageError(f"it has {len(parts) + 1} parts, and {length + 1} are expected")
    return parts


def _clock(evidence: Evidence, parts: list[str]) -> str:
    results = evidence.results
    if len(parts) == 1:
        return str(getattr(results.provenance, _chosen(parts[0], _PROVENANCE)))
    name, quantity = _only(parts, 2)
    if name in RATE_NAMES:
        _chosen(quantity, ("tflops",))
        return _measured(results.rate(name, DTYPE.short), name, number)
    if name in LIBRARY_NAMES:
        return _speed_text(results, name, DTYPE.short, _chosen(quantity, _SPEEDS))
    config = parse_kernel(name)
    results = evidence.results_of(config.step)
    if quantity in _SPEEDS:
        return _speed_text(results, config.short_form(), config.dtype.short, quantity)
    return _change_text(results, config, _chosen(quantity, (*_SPEEDS, *_CHANGES)))


def _speed_text(results: BenchmarkResults, name: str, dtype: str, quantity: str) -> str:
    length = None if quantity in ("mean", "of_flash_mean") else TABLE_SEQ_LEN
    if quantity in ("tflops", "mean"):
        return _measured(results.tflops(name, dtype, length), name, number)
    return _measured(results.of_flash(name, dtype, length), name, percent)


def _measured(found: float | None, name: str, text: Callable[[float], str]) -> str:
    if found is None:
        raise UsageError(f"{name} was not measured at every length that this asks for")
    return text(found)


def _change_text(results: BenchmarkResults, config: Config, quantity: str) -> str:
    parent = config.step.parent
    if parent is None:
        raise UsageError(f"step {config.step.id} has no parent")
    before = parent_at_tile(config)
    if before is None:
        raise UsageError(f"step {parent} has no kernel at the tile of {config.short_form()}")
    names = f"{before.short_form()} or {config.short_form()}"
    if quantity == "change_mean":
        return _measured(mean_change(results, before, config), names, _signed)
    found = speedup(results, before, config, TABLE_SEQ_LEN)
    if quantity == "verdict" and found is not None:
        return found.verdict
    return _measured(found.median if found else None, names, _signed)


def _signed(share: float) -> str:
    return percent(share, signed=True)


def _facts(evidence: Evidence, name: str) -> KernelFacts:
    kernel, _, architecture = name.partition("@")
    architecture = _chosen(architecture or DEFAULT_ARCHITECTURE, ARCHITECTURES)
    return evidence.facts(parse_kernel(kernel), architecture)


def _sass(evidence: Evidence, parts: list[str]) -> str:
    if len(parts) == 3:
        name, phase, base = parts
        if opcodes.classify(base) == opcodes.OTHER:
            raise UsageError(f"{base!r} is no opcode: write it without modifiers, such as LDSM")
        facts = _facts(evidence, name)
        return number(phase_counts(facts, _chosen(phase, PHASES)).by_base.get(base, 0))
    name, quantity = _only(parts, 2)
    facts = _facts(evidence, name)
    if quantity in GROUP_NAMES:
        return number(facts.groups[quantity])
    _chosen(quantity, (*_SASS, *GROUP_NAMES))
    return _SASS[quantity][1](facts)


def _bound(evidence: Evidence, parts: list[str]) -> str:
    name, quantity = _only(parts, 2)
    facts = _facts(evidence, name)
    cycles = _cycles(facts)
    if quantity in cycles:
        return number(cycles[quantity])
    _chosen(quantity, (*_BOUND, *cycles))
    return _BOUND[quantity][1](facts)


def _cycles(facts: KernelFacts) -> Mapping[str, float]:
    if not facts.bound_cycles:
        raise UsageError(f"{facts.config.short_form()} has no loop")
    return facts.bound_cycles


def _counters(evidence: Evidence, parts: list[str]) -> str:
    name, *rest = parts
    counts = evidence.counts(parse_kernel(name))
    if rest == ["per_mma"]:
        return number(per_mma(counts.main_loop), 2)
    if len(rest) == 2:
        group, quantity = rest
        found = of_group(counts, _chosen(group, OPCODE_GROUPS))
    else:
        (quantity,) = _only(rest, 1)
        _chosen(quantity, (*QUANTITIES, "per_mma"))
        found = counts.total
    return number(QUANTITIES[_chosen(quantity, QUANTITIES)][1](found))


def _diff(evidence: Evidence, parts: list[str]) -> str:
    name, quantity = _only(parts, 2)
    diff = evidence.step_diff(parse_step(name))
    return number(getattr(diff, _chosen(quantity, ("changed", "added", "removed"))))


def _published(evidence: Evidence, parts: list[str]) -> str:
    name, quantity = _only(parts, 2)
    published = evidence.published
    accepted = {
        f"{gpu.key}{suffix}": (gpu.key, field)
        for gpu in published.gpus
        for suffix, field in (("", "percent"), ("_mean", "percent_mean"))
    }
    gpu, field = accepted[_chosen(quantity, accepted)]
    found = published.find(parse_step(name).id, gpu)
    if found is None:
        raise UsageError(f"nothing was published of step {name}")
    return f"{getattr(found, field)}%"


_SOURCES: Mapping[str, Callable[[Evidence, list[str]], str]] = MappingProxyType(
    {
        "clock": _clock,
        "sass": _sass,
        "bound": _bound,
        "counters": _counters,
        "diff": _diff,
        "published": _published,
    }
)


def value_lines() -> Iterator[str]:
    """What keys there are, for a reader."""
    yield f"KERNEL: {KERNEL_NAMES}"
    yield f"  (in keys of sass and bound with @ARCH or without: 8@sm_80; {DEFAULT_ARCHITECTURE})"
    yield "N: a step"
    yield ""
    rows = [(f"clock.KERNEL.{name}", text) for name, text in {**_SPEEDS, **_CHANGES}.items()]
    rows += [
        (f"clock.{library}.{{{','.join(_SPEEDS)}}}", title)
        for library, title in LIBRARY_NAMES.items()
    ]
    rows += [(f"clock.{rate}.tflops", f"{title} of the chip") for rate, title in RATE_NAMES.items()]
    rows += [(f"clock.{{{','.join(_PROVENANCE)}}}", "what was measured on, when, with what")]
    rows += [(f"sass.KERNEL.{name}", text) for name, (text, _) in _SASS.items()]
    rows += [(f"sass.KERNEL.{{{','.join(GROUP_NAMES)}}}", "of the main loop, by class")]
    rows += [(f"sass.KERNEL.{{{','.join(PHASES)}}}.OPCODE", "of a phase, such as main.LDSM")]
    rows += [(f"bound.KERNEL.{name}", text) for name, (text, _) in _BOUND.items()]
    rows += [("bound.KERNEL.{lsu,tensor,alu,fma,xu,issue,latency}", "cycles of all warps")]
    rows += [(f"counters.KERNEL.{name}", text) for name, (text, _) in QUANTITIES.items()]
    rows += [("counters.KERNEL.per_mma", "main-loop instructions of PTX for each mma")]
    rows += [(f"counters.KERNEL.{{{','.join(OPCODE_GROUPS)}}}.QUANTITY", "of these opcodes alone")]
    rows += [("diff.N.{changed,added,removed}", "lines of code against the parent")]
    rows += [("published.N.{a100,a100_mean,rtx3090,rtx3090_mean}", "percent of the official one")]
    for key, text in rows:
        yield f"{key:<44} {text}" if len(key) < 44 else f"{key}\n{'':<44} {text}"
