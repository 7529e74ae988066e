"""Predicted counts of executed instructions, beside Nsight Compute's counts of the same launches.

Predictions come from the SASS or from the simulator (flash_helpers.measure.predictions). Records,
verdicts and tables are the same for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.console.tables import Table
from flash_helpers.kernel_configs import FAMILIES, STEPS, config_from_short_form
from flash_helpers.measure.asked import problem_options
from flash_helpers.measure.nsight import (
    EXECUTED_METRICS,
    NsightCompute,
    ProfiledLaunch,
    ProfilerError,
    find_launch,
    kernel_pattern,
    operation_metrics,
)
from flash_helpers.measure.results import OfProblem, Provenance, RecordFile
from flash_helpers.sass.read import opcodes

OPCODE_METRIC = "sass__inst_executed_per_opcode"
WORK = "work"
FILLER = "filler"
PIPES = ("alu", "fma", "fmaheavy", "fp16", "xu", "lsu", "uniform", "cbu", "adu")

_CONFLICTS = "data_bank_conflicts_pipe_lsu_mem_shared"
_WAVEFRONTS = "data_pipe_lsu_wavefronts_mem_shared"
_SECTORS = "t_sectors_pipe_lsu_mem_global"
_PATCHED = "smsp__sass_l1tex"  # counted by patching the code


@dataclass(frozen=True)
class Quantity:
    """A quantity that is both predicted and counted.

    metrics: of Nsight Compute; the first that the GPU has is compared.
    keys: alternatives, each a tuple of keys whose predictions are added up; the quantity's name if
    there are none.
    tolerance: relative difference that counts as agreement; None where no agreement is claimed.
    shown: whether the table by kernel has a column for the quantity.
    """

    name: str
    metrics: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...] = ()
    tolerance: float | None = 0.0
    shown: bool = False

    def predicted(self, predictions: Mapping[str, int]) -> int | None:
        """The predicted number; None if a part of it is missing."""
        for keys in self.keys or ((self.name,),):
            if all(key in predictions for key in keys):
                return sum(predictions[key] for key in keys)
        return None

    def agrees(self, predicted: float, counted: float | None) -> bool:
        """Whether the two numbers do not contradict each other."""
        if self.tolerance is None or counted is None:
            return True
        return abs(predicted - counted) <= self.tolerance * max(predicted, counted)


def _executed(name: str, operation: str, sass: str) -> Quantity:
    keys = ((f"{name} instructions",), (sass,))
    return Quantity(f"{name} instructions", operation_metrics(operation), keys)


ALL_INSTRUCTIONS = Quantity("all instructions", EXECUTED_METRICS, ((WORK, FILLER),), shown=True)
_HMMA = "inst_executed_pipe_tensor_op_hmma.sum"
_TENSOR = "inst_executed_pipe_tensor.sum"
QUANTITIES = (
    ALL_INSTRUCTIONS,
    Quantity("issued instructions", ("smsp__inst_issued.sum",), ((WORK, FILLER),), None),
    Quantity(
        "mma instructions",
        tuple(f"{unit}__{pipe}" for pipe in (_HMMA, _TENSOR) for unit in ("smsp", "sm")),
        (("mma instructions",), (opcodes.TENSOR,)),
        shown=True,
    ),
    _executed("ldmatrix", "ldsm", opcodes.LDMATRIX),
    _executed("cp.async", "ldgsts", opcodes.ASYNC_COPY),
    _executed("shared store", "shared_st", opcodes.SHARED_STORE),
    _executed("global store", "global_st", opcodes.GLOBAL_STORE),
    Quantity(
        "shared load instructions",
        operation_metrics("shared_ld"),
        ((opcodes.SHARED_LOAD,),),
        tolerance=None,
    ),
    Quantity("local stores", operation_metrics("local_st"), ((opcodes.LOCAL_STORE,),)),
    Quantity("local loads", operation_metrics("local_ld"), ((opcodes.LOCAL_LOAD,),)),
    *(
        Quantity(
            f"{pipe} pipe",
            (f"smsp__inst_executed_pipe_{pipe}.sum", f"sm__inst_executed_pipe_{pipe}.sum"),
            tolerance=None,
        )
        for pipe in PIPES
    ),
    *(
        Quantity(
            f"{family} bank conflicts",
            (f"{_PATCHED}_{_CONFLICTS}_{operation}.sum", f"{other}_{_CONFLICTS}_{operation}.sum"),
            ((f"{family} conflicts",),),
            0.05,
            shown=family != "cp.async",
        )
        for family, operation, other in (
            ("ldmatrix", "op_ldsm", "sm__sass_l1tex"),
            ("shared store", "op_st", "l1tex_"),
            ("cp.async", "op_ldgsts", "sm__sass_l1tex"),
        )
    ),
    Quantity(
        "load bank conflicts, counter of L1",
        (f"l1tex__{_CONFLICTS}_op_ld.sum",),
        (("ldmatrix conflicts", "shared load conflicts"),),
        None,
    ),
    Quantity(
        "all bank conflicts, counter of L1",
        (f"l1tex__{_CONFLICTS}.sum",),
        (
            tuple(
                f"{family} conflicts"
                for family in ("mma", "ldmatrix", "cp.async", "shared store", "shared load")
            ),
        ),
        None,
    ),
    Quantity("ldmatrix wavefronts", (f"{_PATCHED}_{_WAVEFRONTS}_op_ldsm.sum",), tolerance=0.05),
    Quantity(
        "shared store wavefronts",
        (f"{_PATCHED}_{_WAVEFRONTS}_op_st.sum", f"l1tex__{_WAVEFRONTS}_op_st.sum"),
        tolerance=0.05,
    ),
    Quantity(
        "sectors read by cp.async",
        (
            f"l1tex__{_SECTORS}_op_ldgsts.sum",
            f"l1tex__{_SECTORS}_op_ldgsts_cache_bypass.sum",
            f"{_PATCHED}_{_SECTORS}_op_ldgsts.sum",
        ),
        (("cp.async sectors",),),
        shown=True,
    ),
    Quantity(
        "sectors that L2 reads",
        ("lts__t_sectors_srcunit_tex_op_read.sum",),
        (("cp.async sectors",),),
        None,
    ),
    Quantity(
        "sectors written by global stores",
        (f"l1tex__{_SECTORS}_op_st.sum", f"{_PATCHED}_{_SECTORS}_op_st.sum"),
        (("global store sectors",),),
        shown=True,
    ),
    Quantity(
        "wgmma instructions",
        ("sm__inst_executed_pipe_tensor_op_gmma.sum",),
        (("wgmma instructions",), ("wgmma",)),
        shown=True,
    ),
    Quantity(
        "bytes of wgmma operands",
        ("sm__sass_data_bytes_mem_shared_op_gmma.sum",),
        shown=True,
    ),
    *(
        Quantity(
            f"TMA {name} instructions",
            (f"smsp__inst_executed_op_tma_{operation}_pred_on_any.sum",),
            ((f"TMA {name} instructions",), (f"TMA {name}s",)),
        )
        for name, operation in (("load", "ld"), ("store", "st"))
    ),
    *(
        Quantity(
            f"sectors of TMA {name}s",
            (f"l1tex__m_{way}_sectors_mem_global_op_tma_{operation}.sum",),
            ((f"TMA {name} sectors",),),
            shown=True,
        )
        for name, operation, way in (
            ("load", "ld", "xbar2l1tex_read"),
            ("store", "st", "l1tex2xbar_write"),
        )
    ),
    Quantity("stmatrix wavefronts", (f"sm__sass_l1tex_{_WAVEFRONTS}_op_stsm.sum",), shown=True),
    Quantity("all instructions (PTX and SASS)", EXECUTED_METRICS, (("instructions",),), None),
)
METRICS = tuple(dict.fromkeys(metric for q in QUANTITIES for metric in q.metrics))

ONE_FOR_ONE = MappingProxyType(
    {
        "HGMMA": r"wgmma\.mma_async",
        "WARPGROUP": r"wgmma\.(fence|wait_group)",
        "UTMALDG": r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global",
        "UTMASTG": r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta",
        "UTMACMDFLUSH": r"cp\.async\.bulk\.commit_group",
        "DEPBAR": r"cp\.async\.bulk\.wait_group",
        "BAR": r"bar(rier)?\.(sync|arrive)\b",
        "STSM": r"stmatrix",
        "SHFL": r"shfl",
        "F2FP": r"cvt\.rn\.b?f16x2",
        "FMNMX": r"(max|min)\.f32",
    }
)
"""Opcodes of SASS, and a pattern of the PTX opcodes that ptxas makes them of."""


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputComparison:
    """Two outputs of one kernel, element by element.

    bit_equal: share of elements with the same bits.
    max_ulps: largest difference in units of the last place of the element itself, counted in
        representable values between the two; large for elements that nearly cancel.
    max_row_ulps: largest difference in units of the last place of the row's largest element.
    """

    bit_equal: float
    max_ulps: int
    max_row_ulps: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class CountedKernel(OfProblem):
    """One launch of one kernel for a problem. name: the short form of its config.

    predicted: numbers by name.
    hardware: numbers by metric; None where the GPU has no number.
    outputs: the simulator's beside the GPU's; None unless the kernel was both simulated and run.
    compiler: of the machine code behind the prediction; "" without one.
    predicted_opcodes: by opcode of SASS without modifiers, filler included. Opcodes are missing
    only if WORK is not predicted.
    hardware_opcodes: counts by Nsight Compute's names of opcodes; empty if it gave none.
    """

    name: str
    problem: dict[str, Any]
    predicted: Mapping[str, int]
    hardware: Mapping[str, float | None] = field(default_factory=dict)
    outputs: OutputComparison | None = None
    compiler: str = ""
    predicted_opcodes: Mapping[str, int] = field(default_factory=dict)
    hardware_opcodes: Mapping[str, float] = field(default_factory=dict)

    def has(self, quantity: Quantity) -> bool:
        """Whether the quantity is predicted for this kernel."""
        return quantity.predicted(self.predicted) is not None

    def metric(self, quantity: Quantity) -> str | None:
        """The metric that is compared; None if the GPU has none."""
        return next((m for m in quantity.metrics if self.hardware.get(m) is not None), None)

    def counted(self, quantity: Quantity) -> tuple[int, float | None]:
        """The predicted number, and the GPU's number or None. Raises ValueError for a quantity that
        is not predicted."""
        predicted, metric = quantity.predicted(self.predicted), self.metric(quantity)
        if predicted is None:
            raise ValueError(f"{quantity.name} is not predicted for {self.name}")
        return predicted, None if metric is None else self.hardware[metric]

    @property
    def differing_opcodes(self) -> dict[str, tuple[int, float]]:
        """Predicted and counted number of each opcode for which the two differ."""
        ours, theirs = self.predicted_opcodes, self.hardware_opcodes
        names = sorted({*ours, *theirs} if WORK in self.predicted else ours) if theirs else ()
        pairs = {name: (ours.get(name, 0), theirs.get(name, 0.0)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Source:
    """A source of predictions. marker: name of the markers around its tables. note: text above the
    table by kernel. left_out: text below the table, if one of the kernels multiplies by wgmma."""

    marker: str
    note: str
    left_out: str


SASS = "sass"
SIMULATOR = "simulator"
_NOTE = "Predicted / counted; one number where both are equal, bold where they disagree."
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        SASS: Source(
            "executed",
            _NOTE,
            f"In family hopper these opcodes are compared: {', '.join(ONE_FOR_ONE)}. An opcode is "
            "left out where the machine code holds it another number of times than the PTX holds "
            "its instructions. SYNCS, USETMAXREG, NANOSLEEP and the branches around them are not "
            "compared: they run as often as a warp happens to wait. Instructions that ptxas has "
            "put under a predicate in place of a branch are not compared either: a GPU counts "
            "them even where the predicate is false. No other opcode is compared, since the text "
            "does not tell how often warps of a role run a loop.",
        ),
        SIMULATOR: Source(
            "simulator",
            f"{_NOTE} Differences of outputs are in units of the last place (ulps): those of the "
            "row's largest element, and those of the element itself. The second number is large "
            "where an element nearly cancels.",
            "Two counts are not compared in family hopper. The number of executed try_wait differs "
            "from launch to launch, because threads spin there. The wavefronts of TMA and of the "
            "operands of wgmma are not simulated.",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class CountCheck(RecordFile):
    """Results of one comparison.

    source: a key of SOURCES. profiler: version of Nsight Compute. profiler_failure: reason for
    missing counters; else empty. unavailable: metrics that this GPU does not have.
    """

    FORMAT: ClassVar[int] = 4
    HOLDS: ClassVar[str] = "comparison of counts"

    source: str
    provenance: Provenance
    profiler: str
    profiler_failure: str
    unavailable: tuple[str, ...] = ()
    kernels: tuple[CountedKernel, ...]

    def disagreements(self) -> list[str]:
        """One line for each count and opcode of a kernel that should agree and does not."""
        wrong = [
            (record.name, quantity.name, *record.counted(quantity), record.metric(quantity))
            for record in self.kernels
            for quantity in filter(record.has, QUANTITIES)
            if not quantity.agrees(*record.counted(quantity))
        ]
        wrong += [
            (record.name, opcode, *pair, OPCODE_METRIC)
            for record in self.kernels
            for opcode, pair in record.differing_opcodes.items()
        ]
        return [
            f"{name}: {quantity}: {predicted:,} predicted, {counted:,.0f} counted ({metric})"
            for name, quantity, predicted, counted, metric in wrong
        ]

    @property
    def markers(self) -> tuple[str, str]:
        """Markers around the tables in the page. Each family other than the first has markers of
        its own."""
        families = {STEPS[record.name.partition("_")[0]].family for record in self.kernels}
        own = families.pop() if len(families) == 1 else ""
        name = SOURCES[self.source].marker + ("" if own in ("", *[*FAMILIES][:1]) else f"-{own}")
        return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"

    def tables(self) -> str:
        """Markdown of one row per quantity over all kernels, one row per kernel, and the machine.

        Raises ValueError for a comparison without kernels.
        """
        if not self.kernels:
            raise ValueError("the comparison holds no kernel: run it on a machine with a GPU")
        header = ["quantity", "equal", "largest difference", "agrees", "metric of Nsight Compute"]
        by_quantity = Table(header, list(map(self._quantity_row, self._predicted())))
        source = SOURCES[self.source]
        is_on_wgmma = any("wgmma" in key for record in self.kernels for key in record.predicted)
        compilers = " and ".join(dict.fromkeys(r.compiler for r in self.kernels if r.compiler))
        problems = dict.fromkeys(str(record.asked) for record in self.kernels)
        parts = [
            by_quantity.markdown(),
            source.note,
            self._kernel_table().markdown(),
            source.left_out if is_on_wgmma else "",
            f"Without some counters: {self.profiler_failure.splitlines()[0]}"
            if self.profiler_failure
            else "",
            self.provenance.sentence(
                compilers or self.provenance.built_with,
                self.profiler,
                "; ".join(problems),
            ),
        ]
        return "\n\n".join(filter(None, parts))

    def _predicted(self) -> list[Quantity]:
        return [q for q in QUANTITIES if any(record.has(q) for record in self.kernels)]

    def _quantity_row(self, quantity: Quantity) -> list[str]:
        records = [record for record in self.kernels if record.has(quantity)]
        pairs = [(a, b) for a, b in (r.counted(quantity) for r in records) if b is not None]
        if not pairs:
            return [quantity.name, "not measured", "", "", ""]
        equal = sum(ours == theirs for ours, theirs in pairs)
        worst = max(abs(a - b) / max(a, b) if max(a, b) else 0.0 for a, b in pairs)
        if not all(quantity.agrees(*pair) for pair in pairs):
            verdict = "**no**"
        elif quantity.tolerance:
            verdict = f"within {100 * quantity.tolerance:.0f}%"
        else:
            is_claimed = quantity.tolerance is not None or equal == len(pairs)
            verdict = "yes" if is_claimed else "not claimed"
        metrics = sorted(set(filter(None, (record.metric(quantity) for record in records))))
        names = ", ".join(f"`{metric}`" for metric in metrics)
        return [quantity.name, f"{equal} of {len(pairs)}", f"{100 * worst:.2g}%", verdict, names]

    def _kernel_table(self) -> Table:
        """Table of one row per kernel, without columns that are empty for all kernels."""
        shown = [quantity for quantity in self._predicted() if quantity.shown]
        header = ["kernel", "outputs bit-equal", "largest difference, ulps of the row"]
        header += ["of the element", *(quantity.name for quantity in shown)]
        header += ["filler", "work per mma", "opcodes"]
        rows = [
            [
                f"`{record.name}`",
                *_output_cells(record.outputs),
                *(_pair_text(record, quantity) for quantity in shown),
                *_opcode_cells(record),
            ]
            for record in self.kernels
        ]
        columns = [n for n in range(len(header)) if any(row[n] for row in rows)]
        return Table([header[n] for n in columns], [[row[n] for n in columns] for row in rows])


def _output_cells(outputs: OutputComparison | None) -> list[str]:
    if outputs is None:
        return ["", "", ""]
    return [f"{100 * outputs.bit_equal:.3f}%", f"{outputs.max_row_ulps:.2g}", str(outputs.max_ulps)]


def _pair_text(record: CountedKernel, quantity: Quantity) -> str:
    if not record.has(quantity):
        return ""
    predicted, counted = record.counted(quantity)
    if counted is None:
        return f"{predicted:,} / not measured"
    if predicted == counted:
        return f"{predicted:,}"
    text = f"{predicted:,} / {counted:,.0f}"
    return text if quantity.agrees(predicted, counted) else f"**{text}**"


def _opcode_cells(record: CountedKernel) -> list[str]:
    """Cells for filler, work per tensor instruction, and the agreement of each opcode's count."""
    predicted, ours = record.predicted, record.predicted_opcodes
    if not ours:
        return ["", "", ""]
    differing = ", ".join(record.differing_opcodes)
    verdict = f"differ: {differing}" if differing else "all equal"
    if not record.hardware_opcodes:
        verdict = "not measured"
    if WORK not in predicted:
        return ["", "", f"of {len(ours)}: {verdict}"]
    work, mma = predicted[WORK], predicted[opcodes.TENSOR]
    return [f"{predicted[FILLER]:,}", f"{work / mma:.2f}" if mma else "", verdict]


# -- counting --------------------------------------------------------------------------------------


def _count_launches(
    records: Sequence[CountedKernel],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str],
    *,
    instances: bool = False,
) -> tuple[list[ProfiledLaunch | None], list[str]]:
    """Nsight Compute's counts of each record's launch, and the reason for missing ones."""
    by_options: dict[tuple[str, ...], list[CountedKernel]] = {}
    for record in records:
        by_options.setdefault(tuple(problem_options(record.asked)), []).append(record)
    found: dict[str, list[ProfiledLaunch]] = {}
    failures = []
    for options, own in by_options.items():
        names = [record.name for record in own]
        pattern = kernel_pattern(map(config_from_short_form, names))
        raw = re.sub(r"\W+", "_", " ".join(options)).strip("_") + "_instances" * instances
        try:
            launches = profiler.profile(
                [*launcher, *options, "--kernel", *names],
                *(pattern, metrics, raw),
                instances=instances,
            )
        except ProfilerError as error:
            failures.append(f"by opcode: {error}" if instances else str(error))
        else:
            found |= dict.fromkeys(names, launches)
    return [find_launch(r.name, found.get(r.name, ())) for r in records], failures


def with_counters(
    records: Sequence[CountedKernel],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str] = METRICS,
) -> tuple[list[CountedKernel], list[str]]:
    """The records with hardware counters, and the reason for missing counters.

    launcher: command of a program that takes --kernel and the options of problems, and launches
    each kernel once. It runs once per problem, and a second time for counts by opcode where these
    are predicted. Metrics that the GPU lacks are left out.
    """
    wanted = {m for record in records for q in QUANTITIES if record.has(q) for m in q.metrics}
    asked = [metric for metric in metrics if metric in wanted]
    launches, failures = _count_launches(records, profiler, launcher, asked)
    by_opcode: dict[int, ProfiledLaunch | None] = {}
    if with_opcodes := [n for n, record in enumerate(records) if record.predicted_opcodes]:
        chosen = [records[n] for n in with_opcodes]
        found, more = _count_launches(chosen, profiler, launcher, [OPCODE_METRIC], instances=True)
        by_opcode = dict(zip(with_opcodes, found, strict=True))
        failures += more
    counted = []
    for n, (record, launch) in enumerate(zip(records, launches, strict=True)):
        own = by_opcode.get(n)
        opcodes_of = own.instances.get(OPCODE_METRIC, {}) if own else {}
        hardware = {m: launch.values.get(m) for m in asked} if launch else record.hardware
        counted.append(replace(record, hardware=hardware, hardware_opcodes=opcodes_of))
    return counted, failures
