"""Are the instructions that the text predicts those that a GPU executes?

Static counts weighted with trip counts, beside the counters of Nsight Compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.benchmark_tables import markdown_table
from flash_helpers.measure.machine_code import trips
from flash_helpers.measure.nsight import (
    FORWARD_KERNEL,
    NsightCompute,
    ProfiledLaunch,
    ProfilerError,
    find_launch,
    launch_commands,
)
from flash_helpers.measure.results import (
    Provenance,
    load_measured,
    measured_json,
    read_record,
    read_records,
)
from flash_helpers.sass.analyse.counts import Bucket, Counts, buckets, weigh
from flash_helpers.sass.analyse.phases import block_executions
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.records import Kernel

FORMAT = 1
BEGIN_MARKER = "<!-- executed:begin -->"
END_MARKER = "<!-- executed:end -->"
OPCODE_METRIC = "sass__inst_executed_per_opcode"
ALL = "all instructions"
WORK = "work"
FILLER = "filler"

_PIPES = ("alu", "fma", "fmaheavy", "fp16", "xu", "lsu", "uniform", "cbu", "adu")


@dataclass(frozen=True)
class Quantity:
    """Something that the text predicts and the GPU counts.

    predicted: keys of `predicted_counts`, added up. metrics: of Nsight Compute; the first that the
    GPU has is compared. exact: False where no agreement is claimed, because it is this that is to
    be found out.
    """

    name: str
    predicted: tuple[str, ...]
    metrics: tuple[str, ...]
    exact: bool = True


def _operation_metrics(name: str) -> tuple[str, ...]:
    return (f"smsp__inst_executed_op_{name}.sum", f"smsp__sass_inst_executed_op_{name}.sum")


QUANTITIES = (
    Quantity(ALL, (WORK, FILLER), ("smsp__inst_executed.sum", "sm__inst_executed.sum")),
    Quantity("issued instructions", (WORK, FILLER), ("smsp__inst_issued.sum",), exact=False),
    Quantity(
        "tensor instructions",
        (opcodes.TENSOR,),
        (
            "smsp__inst_executed_pipe_tensor_op_hmma.sum",
            "sm__inst_executed_pipe_tensor_op_hmma.sum",
            "smsp__inst_executed_pipe_tensor.sum",
        ),
    ),
    Quantity("ldmatrix", (opcodes.LDMATRIX,), _operation_metrics("ldsm")),
    Quantity("async copies", (opcodes.ASYNC_COPY,), _operation_metrics("ldgsts")),
    Quantity("shared stores", (opcodes.SHARED_STORE,), _operation_metrics("shared_st")),
    Quantity("shared loads", (opcodes.SHARED_LOAD,), _operation_metrics("shared_ld"), exact=False),
    Quantity("global stores", (opcodes.GLOBAL_STORE,), _operation_metrics("global_st")),
    Quantity("local stores", (opcodes.LOCAL_STORE,), _operation_metrics("local_st")),
    Quantity("local loads", (opcodes.LOCAL_LOAD,), _operation_metrics("local_ld")),
    *(
        Quantity(
            f"{pipe} pipe",
            (f"{pipe} pipe",),
            (f"smsp__inst_executed_pipe_{pipe}.sum", f"sm__inst_executed_pipe_{pipe}.sum"),
            exact=False,
        )
        for pipe in _PIPES
    ),
)
METRICS = tuple(dict.fromkeys(metric for quantity in QUANTITIES for metric in quantity.metrics))


@dataclass(frozen=True)
class ExecutionRecord:
    """One launch of one kernel. name: the short form of the config that was launched.

    compiler: of the machine code. predicted: by name. predicted_opcodes: by opcode without
    modifiers, filler included. hardware: by metric; None where the GPU has no number.
    hardware_opcodes: as Nsight Compute names opcodes; empty if it did not tell.
    """

    name: str
    compiler: str
    batch: int
    n_heads: int
    seq_len: int
    predicted: Mapping[str, int]
    predicted_opcodes: Mapping[str, int]
    hardware: Mapping[str, float | None] = field(default_factory=dict)
    hardware_opcodes: Mapping[str, float] = field(default_factory=dict)

    def counted(self, quantity: Quantity) -> tuple[int, float | None]:
        """What is predicted, and the GPU's count, which is None if it has none."""
        predicted = sum(self.predicted[key] for key in quantity.predicted)
        metric = self.metric(quantity)
        return predicted, None if metric is None else self.hardware[metric]

    def metric(self, quantity: Quantity) -> str | None:
        """The metric that `counted` takes."""
        return next((m for m in quantity.metrics if self.hardware.get(m) is not None), None)

    @property
    def differing_opcodes(self) -> dict[str, tuple[int, float]]:
        """Opcodes of which another number is predicted than counted: both numbers."""
        if not self.hardware_opcodes:
            return {}
        names = sorted({*self.predicted_opcodes, *self.hardware_opcodes})
        pairs = {
            name: (self.predicted_opcodes.get(name, 0), self.hardware_opcodes.get(name, 0.0))
            for name in names
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class ExecutionCheck:
    """Everything that one run of the check found.

    profiler: version of Nsight Compute. profiler_failure: why counters are missing; else empty.
    unavailable: metrics that this GPU does not have.
    """

    provenance: Provenance
    profiler: str
    profiler_failure: str
    unavailable: tuple[str, ...]
    kernels: tuple[ExecutionRecord, ...]

    def to_json(self) -> str:
        """Text for a file; one line a kernel."""
        head = {
            "format": FORMAT,
            "provenance": asdict(self.provenance),
            "profiler": self.profiler,
            "profiler_failure": self.profiler_failure,
            "unavailable": self.unavailable,
        }
        return measured_json(head, {"kernels": map(asdict, self.kernels)})

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())


def load_check(path: Path) -> ExecutionCheck:
    """Read what `ExecutionCheck.save` wrote. Raises as `load_measured` does."""
    return load_measured(
        path,
        "check of executed counts",
        FORMAT,
        lambda data: ExecutionCheck(
            provenance=read_record(Provenance, data["provenance"]),
            profiler=data["profiler"],
            profiler_failure=data["profiler_failure"],
            unavailable=tuple(data["unavailable"]),
            kernels=read_records(ExecutionRecord, data["kernels"]),
        ),
    )


def predicted_counts(kernel: Kernel, times: Sequence[int]) -> dict[str, int]:
    """What is compared, by name, for one warp: all work and filler, each class of opcodes, and each
    pipe, to which filler does not count. times: executions of each block."""
    kinds = buckets(kernel.instructions)
    counts: Counts = weigh(
        (i, kind, times[i.block]) for i, kind in zip(kernel.instructions, kinds, strict=True)
    )
    pipes: Counter[str] = Counter()
    for instruction, kind in zip(kernel.instructions, kinds, strict=True):
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
    times = block_executions(kernel, trips(kernel, config, shape.seq_len))
    launches = config.launch(shape, shape.strides())
    warps = sum(launch.n_blocks * launch.n_warps for launch in launches)
    by_base: Counter[str] = Counter()
    for instruction in kernel.instructions:
        by_base[instruction.base] += times[instruction.block]
    return ExecutionRecord(
        name=config.short_form(),
        compiler=str(kernel.compiler),
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=shape.seq_len,
        predicted={name: warps * n for name, n in predicted_counts(kernel, times).items()},
        predicted_opcodes={name: warps * n for name, n in sorted(by_base.items()) if n},
    )


def available_metrics(profiler: NsightCompute) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The metrics that this GPU lists, and those that it does not; all, if it lists none.

    Those that ncu counts by patching the code are never listed, and tried.
    """
    known = profiler.metric_names()
    listed = [
        metric
        for metric in METRICS
        if not known or metric.partition(".")[0] in known or "sass" in metric
    ]
    return tuple(listed), tuple(metric for metric in METRICS if metric not in listed)


def profile_launches(
    records: Sequence[ExecutionRecord],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str],
) -> tuple[list[ExecutionRecord], str]:
    """The records with hardware counters, and why some have none.

    launcher: command of a program that takes --kernel, --batch, --heads and --seq and launches the
        kernels once. It is run twice for each shape: for the counters, and for those by opcode.
    """
    failures: list[str] = []
    counted: list[ProfiledLaunch] = []
    by_opcode: list[ProfiledLaunch] = []
    kernels = [(r.name, (r.batch, r.n_heads, r.seq_len)) for r in records]
    for name, command in launch_commands(launcher, kernels).items():
        try:
            counted += profiler.profile(command, FORWARD_KERNEL, metrics, name)
        except ProfilerError as error:
            failures.append(str(error))
        try:
            by_opcode += profiler.profile(
                command, FORWARD_KERNEL, [OPCODE_METRIC], f"{name}_opcodes", instances=True
            )
        except ProfilerError as error:
            failures.append(f"by opcode: {error}")
    return [_with_hardware(record, counted, by_opcode) for record in records], "\n".join(failures)


def _with_hardware(
    record: ExecutionRecord,
    counted: Iterable[ProfiledLaunch],
    by_opcode: Iterable[ProfiledLaunch],
) -> ExecutionRecord:
    values = find_launch(record.name, counted)
    opcode_values = find_launch(record.name, by_opcode)
    return replace(
        record,
        hardware={m: values.values.get(m) for m in METRICS} if values else {},
        hardware_opcodes=dict(opcode_values.instances.get(OPCODE_METRIC, {}))
        if opcode_values
        else {},
    )


# -- tables ----------------------------------------------------------------------------------------


def disagreements(check: ExecutionCheck) -> list[str]:
    """A line for each count of a kernel that should agree and does not."""
    lines = []
    for record in check.kernels:
        for quantity in QUANTITIES:
            predicted, counted = record.counted(quantity)
            if quantity.exact and counted is not None and predicted != counted:
                lines.append(
                    f"{record.name}: {quantity.name}: {predicted:,} predicted, {counted:,.0f} "
                    f"counted ({record.metric(quantity)})"
                )
        for opcode, (predicted, counted) in record.differing_opcodes.items():
            lines.append(
                f"{record.name}: {opcode}: {predicted:,} predicted, {counted:,.0f} counted "
                f"({OPCODE_METRIC})"
            )
    return lines


def check_tables(check: ExecutionCheck) -> str:
    """Markdown: a row a quantity over all kernels, a row a kernel, and where it was measured.

    Raises ValueError for a check without kernels.
    """
    if not check.kernels:
        raise ValueError("the check holds no kernel: run it on a machine with a GPU")
    lines = markdown_table(
        ["quantity", "equal", "largest difference", "agrees", "metric of Nsight Compute"],
        [row for quantity in QUANTITIES if (row := _quantity_row(check, quantity))],
    )
    lines += [""]
    lines += markdown_table(
        [
            "kernel",
            "work",
            "filler",
            "executed on the GPU",
            "work per tensor instruction",
            "opcodes",
        ],
        [_kernel_row(record) for record in check.kernels],
    )
    if check.profiler_failure:
        lines += ["", f"Without some counters: {check.profiler_failure.splitlines()[0]}"]
    return "\n".join([*lines, "", _provenance_text(check)])


def _quantity_row(check: ExecutionCheck, quantity: Quantity) -> list[str]:
    pairs = [record.counted(quantity) for record in check.kernels]
    measured = [(predicted, counted) for predicted, counted in pairs if counted is not None]
    metrics = sorted({m for m in (r.metric(quantity) for r in check.kernels) if m is not None})
    if not measured:
        return [quantity.name, "not measured", "", "", ""]
    equal = sum(predicted == counted for predicted, counted in measured)
    worst = max(abs(p - c) / max(p, c) if max(p, c) else 0.0 for p, c in measured)
    verdict = "yes" if equal == len(measured) else "**no**" if quantity.exact else "not claimed"
    names = ", ".join(f"`{metric}`" for metric in metrics)
    return [quantity.name, f"{equal} of {len(measured)}", f"{100 * worst:.2g}%", verdict, names]


def _kernel_row(record: ExecutionRecord) -> list[str]:
    predicted, counted = record.counted(QUANTITIES[0])
    tensor = record.predicted[opcodes.TENSOR]
    if counted is None:
        executed = "not measured"
    else:
        executed = f"{counted:,.0f}" if counted == predicted else f"**{counted:,.0f}**"
    if not record.hardware_opcodes:
        by_opcode = "not measured"
    else:
        differing = record.differing_opcodes
        by_opcode = f"differ: {', '.join(differing)}" if differing else "all equal"
    return [
        f"`{record.name}`",
        f"{record.predicted[WORK]:,}",
        f"{record.predicted[FILLER]:,}",
        executed,
        f"{record.predicted[WORK] / tensor:.2f}" if tensor else "",
        by_opcode,
    ]


def _provenance_text(check: ExecutionCheck) -> str:
    found = check.provenance
    shapes = dict.fromkeys((r.batch, r.n_heads, r.seq_len) for r in check.kernels)
    compilers = dict.fromkeys(record.compiler for record in check.kernels)
    parts = [
        found.gpu,
        f"driver {found.driver}" if found.driver else "",
        " and ".join(compilers),
        check.profiler,
        "batch, heads, seq_len " + " and ".join(f"{b}, {h}, {s}" for b, h, s in shapes),
        found.date,
        f"commit {found.commit}" if found.commit else "",
    ]
    return "; ".join(part for part in parts if part) + "."
