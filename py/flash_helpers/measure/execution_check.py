"""Are the instructions that the text predicts those that a GPU executes?

Static counts weighted with trip counts, beside the counters of Nsight Compute. The warps of family
hopper have roles, and spin where they wait: of its kernels only those opcodes are predicted that
ptxas makes one for one of PTX, as often as the simulator executes that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.console.tables import Table
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.counter_check import (
    CountedLaunch,
    CounterCheck,
    Quantity,
    count_launches,
    with_hardware,
)
from flash_helpers.measure.machine_code import trips
from flash_helpers.measure.nsight import EXECUTED_METRICS, NsightCompute, operation_metrics
from flash_helpers.sass.analyse.counts import Bucket, count_executed, with_buckets
from flash_helpers.sass.analyse.phases import NotDeterminedError, block_executions
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.records import Kernel

OPCODE_METRIC = "sass__inst_executed_per_opcode"
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
"""Opcodes of SASS, and which of PTX they are made of."""
_ROLES_COUNTED = MappingProxyType(
    {"wgmma": "HGMMA", "TMA loads": "UTMALDG", "TMA stores": "UTMASTG"}
)
WORK = "work"
FILLER = "filler"

_PIPES = ("alu", "fma", "fmaheavy", "fp16", "xu", "lsu", "uniform", "cbu", "adu")
_HMMA = "inst_executed_pipe_tensor_op_hmma.sum"

QUANTITIES = (
    Quantity("all instructions", EXECUTED_METRICS, (WORK, FILLER)),
    Quantity("issued instructions", ("smsp__inst_issued.sum",), (WORK, FILLER), None),
    Quantity(
        "tensor instructions",
        (f"smsp__{_HMMA}", f"sm__{_HMMA}", "smsp__inst_executed_pipe_tensor.sum"),
        (opcodes.TENSOR,),
    ),
    Quantity("ldmatrix", operation_metrics("ldsm"), (opcodes.LDMATRIX,)),
    Quantity("async copies", operation_metrics("ldgsts"), (opcodes.ASYNC_COPY,)),
    Quantity("wgmma", ("sm__inst_executed_pipe_tensor_op_gmma.sum",)),
    Quantity("TMA loads", ("smsp__inst_executed_op_tma_ld_pred_on_any.sum",)),
    Quantity("TMA stores", ("smsp__inst_executed_op_tma_st_pred_on_any.sum",)),
    Quantity("shared stores", operation_metrics("shared_st"), (opcodes.SHARED_STORE,)),
    Quantity("shared loads", operation_metrics("shared_ld"), (opcodes.SHARED_LOAD,), None),
    Quantity("global stores", operation_metrics("global_st"), (opcodes.GLOBAL_STORE,)),
    Quantity("local stores", operation_metrics("local_st"), (opcodes.LOCAL_STORE,)),
    Quantity("local loads", operation_metrics("local_ld"), (opcodes.LOCAL_LOAD,)),
    *(
        Quantity(
            f"{pipe} pipe",
            (f"smsp__inst_executed_pipe_{pipe}.sum", f"sm__inst_executed_pipe_{pipe}.sum"),
            tolerance=None,
        )
        for pipe in _PIPES
    ),
)
METRICS = tuple(dict.fromkeys(metric for q in QUANTITIES for metric in q.metrics))


@dataclass(frozen=True, kw_only=True)
class ExecutionRecord(CountedLaunch):
    """compiler: of the machine code. predicted_opcodes: by opcode without modifiers, filler
    included; all of them, unless WORK is not predicted. hardware_opcodes: as Nsight Compute names
    opcodes; empty if it did not tell."""

    compiler: str
    predicted_opcodes: Mapping[str, int]
    hardware_opcodes: Mapping[str, float] = field(default_factory=dict)

    @property
    def differing_opcodes(self) -> dict[str, tuple[int, float]]:
        """Opcodes of which another number is predicted than counted: both numbers."""
        ours, theirs = self.predicted_opcodes, self.hardware_opcodes
        names = sorted({*ours, *theirs} if WORK in self.predicted else ours) if theirs else ()
        pairs = {name: (ours.get(name, 0), theirs.get(name, 0.0)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, kw_only=True)
class ExecutionCheck(CounterCheck):
    """unavailable: metrics that this GPU does not have."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "check of executed counts"
    MARKERS: ClassVar[tuple[str, str]] = ("<!-- executed:begin -->", "<!-- executed:end -->")
    LEFT_OUT: ClassVar[str] = (
        "Of family hopper those opcodes are compared of which the machine code has as many as the "
        f"PTX has instructions that they are made of, among {', '.join(ONE_FOR_ONE)}. Not "
        "compared: SYNCS, USETMAXREG, NANOSLEEP and the branches around them, which run as often "
        "as a warp happens to wait; what ptxas has put under a predicate where the PTX has a "
        "branch, since a GPU counts it if the predicate is false, too; and all others, since the "
        "text does not tell how often warps of a role run a loop."
    )
    QUANTITIES: ClassVar[tuple[Quantity, ...]] = QUANTITIES
    SIDES: ClassVar[tuple[str, str]] = ("predicted", "counted")
    UNCLAIMED: ClassVar[str] = "not claimed"

    unavailable: tuple[str, ...]
    kernels: tuple[ExecutionRecord, ...]

    def disagreements(self) -> list[str]:
        """A line for each count of a kernel that should agree and does not, and each opcode."""
        return super().disagreements() + [
            f"{record.name}: {opcode}: {predicted:,} predicted, {counted:,.0f} counted "
            f"({OPCODE_METRIC})"
            for record in self.kernels
            for opcode, (predicted, counted) in record.differing_opcodes.items()
        ]

    @property
    def made_by(self) -> str:
        """The compilers of the machine code."""
        return " and ".join(dict.fromkeys(record.compiler for record in self.kernels))

    def kernel_table(self) -> Table:
        """Work, filler, what the GPU executed, and whether each opcode is as often as predicted;
        without columns that no kernel has anything in."""
        executed = "executed on the GPU"
        header = ["kernel", "work", "filler", executed, "work per tensor instruction", "opcodes"]
        rows = [_kernel_row(record) for record in self.kernels]
        columns = [n for n in range(len(header)) if any(row[n] for row in rows)]
        return Table([header[n] for n in columns], [[row[n] for n in columns] for row in rows])


def _kernel_row(record: ExecutionRecord) -> list[str]:
    differing = ", ".join(record.differing_opcodes)
    by_opcode = f"differ: {differing}" if differing else "all equal"
    if not record.hardware_opcodes:
        by_opcode = "not measured"
    if not record.has(QUANTITIES[0]):
        compared = f"of {len(record.predicted_opcodes)}: {by_opcode}"
        return [f"`{record.name}`", "", "", "", "", compared]
    predicted, counted = record.counted(QUANTITIES[0])
    work, tensor = record.predicted[WORK], record.predicted[opcodes.TENSOR]
    if counted is None:
        executed = "not measured"
    else:
        executed = f"{counted:,.0f}" if counted == predicted else f"**{counted:,.0f}**"
    return [
        f"`{record.name}`",
        f"{work:,}",
        f"{record.predicted[FILLER]:,}",
        executed,
        f"{work / tensor:.2f}" if tensor else "",
        by_opcode,
    ]


def predicted_counts(kernel: Kernel, times: Sequence[int]) -> dict[str, int]:
    """What is compared, by name, for one warp: all work and filler, each class of opcodes, and each
    pipe, to which filler does not count. times: executions of each block."""
    counts = count_executed(kernel, times)
    pipes: Counter[str] = Counter()
    for instruction, kind in with_buckets(kernel):
        if kind in (Bucket.EXECUTED, Bucket.PREDICATED):
            pipes[instruction.pipe] += times[instruction.block]
    # from 8.6 on the heavy half is a part of the FMA pipe
    pipes["fma"] += pipes["fmaheavy"]
    return {
        WORK: counts.work,
        FILLER: counts.by_bucket[Bucket.FILLER],
        **{name: counts.by_class.get(name, 0) for name in opcodes.CLASSES},
        **{f"{pipe} pipe": pipes[pipe] for pipe in _PIPES},
    }


def predict_launch(kernel: Kernel, config: Config, shape: AttentionForward) -> ExecutionRecord:
    """What all warps of a launch execute, from the text alone.

    Raises NotDeterminedError where the text does not tell.
    """
    times = block_executions(kernel, trips(kernel, config, shape.len_q))
    launches = config.launch(shape, shape.strides())
    warps = sum(launch.n_blocks * launch.n_warps for launch in launches)
    by_base: Counter[str] = Counter()
    for instruction in kernel.instructions:
        by_base[instruction.base] += times[instruction.block]
    return ExecutionRecord(
        name=config.short_form(),
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=shape.len_q,
        compiler=str(kernel.compiler),
        predicted={name: warps * n for name, n in predicted_counts(kernel, times).items()},
        predicted_opcodes={name: warps * n for name, n in sorted(by_base.items()) if n},
    )


def predict_roles(kernel: Kernel, config: Config, shape: AttentionForward) -> ExecutionRecord:
    """What all warps of a launch execute of the opcodes of ONE_FOR_ONE, from the PTX as it runs in
    the simulator, without those of which the machine code has another number than the PTX, or, in
    `predicted_opcodes`, one under a predicate: a GPU counts it if the predicate is false, too.

    Raises NotDeterminedError where none is left, and what `run_kernel` raises.
    """
    import torch  # which --help does not wait for

    from flash_helpers.check.inputs import make_inputs, tensors_for
    from flash_helpers.runtime.library import ptx_path
    from flash_helpers.runtime.simulator import load_kernel, run_kernel

    ptx = load_kernel(config, ptx_path(config))
    inputs = make_inputs("normal", shape, getattr(torch, config.dtype.torch_name))
    executed = run_kernel(config, ptx, tensors_for(config, *inputs)).counters.by_opcode()
    in_text = Counter(instruction.base for instruction in kernel.instructions)
    predicated = {instruction.base for instruction in kernel.instructions if instruction.predicate}
    counts = {
        opcode: sum(c.instructions for name, c in executed.items() if re.match(pattern, name))
        for opcode, pattern in ONE_FOR_ONE.items()
        if in_text[opcode]
        == sum(bool(re.match(pattern, i.opcode)) for i in ptx.program.instructions)
    }
    if not counts:
        raise NotDeterminedError(
            f"{config.short_form()} has no opcode of which its PTX has as many: what its machine "
            "code executes cannot be told"
        )
    return ExecutionRecord(
        name=config.short_form(),
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=shape.len_q,
        compiler=str(kernel.compiler),
        predicted={n: counts[opcode] for n, opcode in _ROLES_COUNTED.items() if opcode in counts},
        predicted_opcodes={name: n for name, n in counts.items() if name not in predicated},
    )


def profile_launches(
    records: Sequence[ExecutionRecord],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str],
) -> tuple[list[ExecutionRecord], str]:
    """The records with hardware counters, and why some have none.

    launcher: as of `count_launches`. It is run twice for each shape: for the counters, and for
    those by opcode.
    """
    launches, failures = count_launches(records, profiler, launcher, metrics)
    by_opcode, more = count_launches(records, profiler, launcher, [OPCODE_METRIC], instances=True)
    counted = []
    for record, launch, opcodes_of in zip(records, launches, by_opcode, strict=True):
        found = opcodes_of.instances.get(OPCODE_METRIC, {}) if opcodes_of else {}
        counted.append(with_hardware(replace(record, hardware_opcodes=found), launch, METRICS))
    return counted, "\n".join([*failures, *(f"by opcode: {failure}" for failure in more)])
