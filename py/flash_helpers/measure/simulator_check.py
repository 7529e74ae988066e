"""Does the simulator tell the truth? Its outputs and counts beside those of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from flash_helpers.check.inputs import make_inputs
from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.benchmark_tables import markdown_table
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
from flash_helpers.ptx import Run
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel, run_kernel

FORMAT = 1
BEGIN_MARKER = "<!-- simulator:begin -->"
END_MARKER = "<!-- simulator:end -->"

# PTX opcodes begin with one of these; each becomes one SASS instruction.
_FAMILIES = {
    "mma": ("mma.",),
    "ldmatrix": ("ldmatrix.",),
    "cp.async": ("cp.async.ca.", "cp.async.cg."),
    "shared store": ("st.shared",),
    "shared load": ("ld.shared",),
    "global store": ("st.global",),
}
_CONFLICTS = "data_bank_conflicts_pipe_lsu_mem_shared"
_WAVEFRONTS = "data_pipe_lsu_wavefronts_mem_shared"


@dataclass(frozen=True)
class Quantity:
    """Something that both count.

    simulated: keys of `simulated_counts`, added up.
    metrics: of Nsight Compute; the first that the GPU has is compared.
    tolerance: relative difference that counts as agreement; None if none is expected, for a reason
        that docs/simulator.md gives.
    """

    name: str
    simulated: tuple[str, ...]
    metrics: tuple[str, ...]
    tolerance: float | None = 0.0


QUANTITIES = (
    Quantity(
        "mma instructions",
        ("mma instructions",),
        (
            "sm__inst_executed_pipe_tensor_op_hmma.sum",
            "smsp__inst_executed_pipe_tensor_op_hmma.sum",
            "sm__inst_executed_pipe_tensor.sum",
            "smsp__inst_executed_pipe_tensor.sum",
        ),
    ),
    Quantity(
        "ldmatrix instructions",
        ("ldmatrix instructions",),
        ("smsp__inst_executed_op_ldsm.sum", "smsp__sass_inst_executed_op_ldsm.sum"),
    ),
    Quantity(
        "cp.async instructions",
        ("cp.async instructions",),
        ("smsp__inst_executed_op_ldgsts.sum", "smsp__sass_inst_executed_op_ldgsts.sum"),
    ),
    Quantity(
        "shared store instructions",
        ("shared store instructions",),
        ("smsp__inst_executed_op_shared_st.sum", "smsp__sass_inst_executed_op_shared_st.sum"),
    ),
    Quantity(
        "global store instructions",
        ("global store instructions",),
        ("smsp__inst_executed_op_global_st.sum", "smsp__sass_inst_executed_op_global_st.sum"),
    ),
    Quantity(
        "ldmatrix bank conflicts",
        ("ldmatrix conflicts",),
        (f"smsp__sass_l1tex_{_CONFLICTS}_op_ldsm.sum", f"sm__sass_l1tex_{_CONFLICTS}_op_ldsm.sum"),
        0.05,
    ),
    Quantity(
        "shared store bank conflicts",
        ("shared store conflicts",),
        (f"smsp__sass_l1tex_{_CONFLICTS}_op_st.sum", f"l1tex__{_CONFLICTS}_op_st.sum"),
        0.05,
    ),
    Quantity(
        "cp.async bank conflicts",
        ("cp.async conflicts",),
        (
            f"smsp__sass_l1tex_{_CONFLICTS}_op_ldgsts.sum",
            f"sm__sass_l1tex_{_CONFLICTS}_op_ldgsts.sum",
        ),
        0.05,
    ),
    Quantity(
        "load bank conflicts, counter of L1",
        ("ldmatrix conflicts", "shared load conflicts"),
        (f"l1tex__{_CONFLICTS}_op_ld.sum",),
        None,
    ),
    Quantity(
        "all bank conflicts, counter of L1",
        tuple(f"{family} conflicts" for family in _FAMILIES if family != "global store"),
        (f"l1tex__{_CONFLICTS}.sum",),
        None,
    ),
    Quantity(
        "ldmatrix wavefronts",
        ("ldmatrix wavefronts",),
        (f"smsp__sass_l1tex_{_WAVEFRONTS}_op_ldsm.sum",),
        0.05,
    ),
    Quantity(
        "shared store wavefronts",
        ("shared store wavefronts",),
        (f"smsp__sass_l1tex_{_WAVEFRONTS}_op_st.sum", f"l1tex__{_WAVEFRONTS}_op_st.sum"),
        0.05,
    ),
    Quantity(
        "sectors read by cp.async",
        ("cp.async sectors",),
        (
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass.sum",
            "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
        ),
    ),
    Quantity(
        "sectors that L2 reads",
        ("cp.async sectors",),
        ("lts__t_sectors_srcunit_tex_op_read.sum",),
        None,
    ),
    Quantity(
        "sectors written by global stores",
        ("global store sectors",),
        (
            "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
            "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum",
        ),
    ),
    Quantity(
        "all instructions (PTX and SASS)",
        ("instructions",),
        ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
        None,
    ),
)
METRICS = tuple(dict.fromkeys(metric for q in QUANTITIES for metric in q.metrics))

# Columns of the table by kernel.
_SHOWN = (
    "mma instructions",
    "ldmatrix bank conflicts",
    "shared store bank conflicts",
    "sectors read by cp.async",
    "sectors written by global stores",
)


def simulated_counts(run: Run) -> dict[str, int]:
    """What is compared, by name."""
    by_opcode = run.counters.by_opcode()
    counts = {"instructions": run.counters.total.instructions}
    for family, prefixes in _FAMILIES.items():
        found = [count for opcode, count in by_opcode.items() if opcode.startswith(prefixes)]
        counts[f"{family} instructions"] = sum(c.instructions for c in found)
        counts[f"{family} conflicts"] = sum(c.bank_conflicts for c in found)
        counts[f"{family} wavefronts"] = sum(c.shared_wavefronts for c in found)
        counts[f"{family} sectors"] = sum(c.global_sectors for c in found)
    return counts


@dataclass(frozen=True)
class OutputComparison:
    """Two outputs of one kernel, element by element.

    bit_equal: share of elements with the same bits. max_ulps: largest difference in units of the
        last place of the element itself, counted in representable values between the two; large for
        elements that nearly cancel. max_row_ulps: the same in units of the last place of the
        largest element of the row.
    """

    bit_equal: float
    max_ulps: int
    max_row_ulps: float
    max_abs: float


def compare_outputs(one: torch.Tensor, other: torch.Tensor) -> OutputComparison:
    """Compare two tensors of one 16-bit dtype and shape. Raises ValueError if these differ."""
    if one.dtype != other.dtype or one.shape != other.shape or one.element_size() != 2:
        raise ValueError(
            f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)} are not "
            "tensors of one 16-bit dtype and shape"
        )
    a, b = (_ordered(x) for x in (one, other))
    difference = (one.double() - other.double()).abs()
    _, exponent = torch.frexp(one.double().abs().amax(-1, keepdim=True))
    unit = torch.finfo(one.dtype).eps * torch.exp2((exponent - 1).double())
    return OutputComparison(
        bit_equal=(one.view(torch.int16) == other.view(torch.int16)).double().mean().item(),
        max_ulps=int((a - b).abs().max()),
        max_row_ulps=(difference / unit).max().item(),
        max_abs=difference.max().item(),
    )


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring floats as neighbouring integers; both zeros are 0."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@dataclass(frozen=True)
class KernelRecord:
    """One kernel on one problem. ran: the config that was launched for it.

    simulated: by name. hardware: by metric; None where the GPU has no number.
    """

    name: str
    ran: str
    batch: int
    n_heads: int
    seq_len: int
    bit_equal: float
    max_ulps: int
    max_row_ulps: float
    max_abs: float
    simulated: Mapping[str, int]
    hardware: Mapping[str, float | None]

    def counted(self, quantity: Quantity) -> tuple[int, float | None]:
        """The simulator's count and the GPU's, which is None if it has none."""
        simulated = sum(self.simulated[key] for key in quantity.simulated)
        found = (self.hardware.get(metric) for metric in quantity.metrics)
        return simulated, next((value for value in found if value is not None), None)

    def metric(self, quantity: Quantity) -> str | None:
        """The metric that `counted` takes."""
        return next((m for m in quantity.metrics if self.hardware.get(m) is not None), None)


@dataclass(frozen=True)
class SimulatorCheck:
    """Everything that one run of the check found.

    profiler: version of Nsight Compute. profiler_failure: why there are no counters; else empty.
    """

    provenance: Provenance
    profiler: str
    profiler_failure: str
    kernels: tuple[KernelRecord, ...]

    def to_json(self) -> str:
        """Text for a file; one line a kernel."""
        head = {
            "format": FORMAT,
            "provenance": asdict(self.provenance),
            "profiler": self.profiler,
            "profiler_failure": self.profiler_failure,
        }
        return measured_json(head, {"kernels": map(asdict, self.kernels)})

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())


def load_check(path: Path) -> SimulatorCheck:
    """Read what `SimulatorCheck.save` wrote. Raises as `load_measured` does."""
    return load_measured(
        path,
        "check of the simulator",
        FORMAT,
        lambda data: SimulatorCheck(
            provenance=read_record(Provenance, data["provenance"]),
            profiler=data["profiler"],
            profiler_failure=data["profiler_failure"],
            kernels=read_records(KernelRecord, data["kernels"]),
        ),
    )


def shape_for(config: Config, seq_len: int) -> AttentionForward:
    """A problem for one kernel: one head, or as many as give it its static row stride; then the
    sequence is shorter by the square root of the heads, so that all take the same time."""
    heads = max(1, config.static_row_stride // config.d_head)
    block = config.supports.whole
    shorter = max(block, int(seq_len / heads**0.5) // block * block)
    return AttentionForward(batch=1, heads=heads, seq_len=shorter)


def compare_kernel(config: Config, shape: AttentionForward, backend: Backend) -> KernelRecord:
    """Run one kernel on the GPU and in the simulator, on the same inputs; no counters yet."""
    ran = config.runs_as(shape.strides())
    q, k, v = make_inputs("normal", shape, getattr(torch, config.dtype.torch_name))
    simulated = torch.full_like(q, torch.nan)
    tensors = {"q": q, "k": k, "v": v, "o": simulated}
    run = run_kernel(ran, load_kernel(ran, ptx_path(ran)), tensors)
    on_device = [x.to(backend.device) for x in (q, k, v)]
    output = torch.full_like(on_device[0], torch.nan)
    backend.forward(config, *on_device, output)
    backend.synchronize()
    difference = compare_outputs(output.cpu(), simulated)
    return KernelRecord(
        name=config.short_form(),
        ran=ran.short_form(),
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=shape.seq_len,
        **asdict(difference),
        simulated=simulated_counts(run),
        hardware={},
    )


def with_hardware(record: KernelRecord, launches: Iterable[ProfiledLaunch]) -> KernelRecord:
    """The record with the counters of its launch, if there is one among the launches."""
    launch = find_launch(record.ran, launches)
    if launch is None:
        return record
    return replace(record, hardware={m: launch.values.get(m) for m in METRICS})


def profile_kernels(
    records: Sequence[KernelRecord], profiler: NsightCompute, launcher: Sequence[str]
) -> tuple[list[KernelRecord], str]:
    """The records with hardware counters, and why some have none.

    launcher: command of a program that takes --kernel, --batch, --heads and --seq and launches the
        kernels once. It is run once for each shape.
    """
    failures = []
    launches: list[ProfiledLaunch] = []
    kernels = [(r.ran, (r.batch, r.n_heads, r.seq_len)) for r in records]
    for name, command in launch_commands(launcher, kernels).items():
        try:
            launches += profiler.profile(command, FORWARD_KERNEL, METRICS, name)
        except ProfilerError as error:
            failures.append(str(error))
    return [with_hardware(record, launches) for record in records], "\n".join(failures)


# -- tables ----------------------------------------------------------------------------------------


def _agrees(simulated: int, hardware: float, tolerance: float) -> bool:
    return abs(simulated - hardware) <= tolerance * max(simulated, hardware)


def _pair_text(record: KernelRecord, quantity: Quantity) -> str:
    simulated, hardware = record.counted(quantity)
    if hardware is None:
        return f"{simulated:,} / not measured"
    text = f"{simulated:,} / {hardware:,.0f}"
    if simulated == hardware:
        return f"{simulated:,}"
    if quantity.tolerance is not None and not _agrees(simulated, hardware, quantity.tolerance):
        return f"**{text}**"
    return text


def _summary_row(check: SimulatorCheck, quantity: Quantity) -> list[str]:
    measured = [
        (simulated, hardware)
        for simulated, hardware in (record.counted(quantity) for record in check.kernels)
        if hardware is not None
    ]
    metrics = sorted({m for m in (r.metric(quantity) for r in check.kernels) if m is not None})
    if not measured:
        return [quantity.name, "not measured", "", "", ""]
    exact = sum(simulated == hardware for simulated, hardware in measured)
    worst = max(abs(s - h) / max(s, h) if max(s, h) else 0.0 for s, h in measured)
    if quantity.tolerance is None:
        verdict = "not expected to agree"
    elif all(_agrees(s, h, quantity.tolerance) for s, h in measured):
        verdict = "yes" if quantity.tolerance == 0 else f"within {100 * quantity.tolerance:.0f}%"
    else:
        verdict = "**no**"
    names = ", ".join(f"`{metric}`" for metric in metrics)
    return [quantity.name, f"{exact} of {len(measured)}", f"{100 * worst:.2g}%", verdict, names]


def _provenance_text(check: SimulatorCheck) -> str:
    found = check.provenance
    shapes = dict.fromkeys((r.batch, r.n_heads, r.seq_len) for r in check.kernels)
    parts = [
        found.gpu,
        f"driver {found.driver}" if found.driver else "",
        f"kernels built with {found.library}" if found.library else "",
        check.profiler,
        "batch, heads, seq_len " + " and ".join(f"{b}, {h}, {s}" for b, h, s in shapes),
        found.date,
        f"commit {found.commit}" if found.commit else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def check_tables(check: SimulatorCheck) -> str:
    """Markdown: a row a quantity over all kernels, a row a kernel, and where it was measured.

    Raises ValueError for a check without kernels.
    """
    if not check.kernels:
        raise ValueError("the check holds no kernel: run it on a machine with a GPU")
    shown = [quantity for quantity in QUANTITIES if quantity.name in _SHOWN]
    rows = [
        [
            f"`{record.ran}`",
            f"{100 * record.bit_equal:.3f}%",
            f"{record.max_row_ulps:.2g}",
            str(record.max_ulps),
            *(_pair_text(record, quantity) for quantity in shown),
        ]
        for record in check.kernels
    ]
    lines = markdown_table(
        ["quantity", "equal", "largest difference", "agrees", "metric of Nsight Compute"],
        [_summary_row(check, quantity) for quantity in QUANTITIES],
    )
    lines += [
        "",
        "Simulator / GPU; one number where both are equal, bold where they disagree. Differences "
        "of outputs are in units of the last place: of the largest element of the row, and of the "
        "element itself, which is large where an element nearly cancels.",
        "",
    ]
    columns = [
        "kernel",
        "outputs bit-equal",
        "largest difference, ulps of the row",
        "of the element",
        *(quantity.name for quantity in shown),
    ]
    lines += markdown_table(columns, rows)
    if check.profiler_failure:
        lines += ["", f"Without counters: {check.profiler_failure.splitlines()[0]}"]
    return "\n".join([*lines, "", _provenance_text(check)])


def disagreements(check: SimulatorCheck) -> list[str]:
    """A line for each count of a kernel that does not agree."""
    lines = []
    for record in check.kernels:
        for quantity in QUANTITIES:
            simulated, hardware = record.counted(quantity)
            if hardware is None or quantity.tolerance is None:
                continue
            if not _agrees(simulated, hardware, quantity.tolerance):
                lines.append(
                    f"{record.ran}: {quantity.name}: {simulated} in the simulator, "
                    f"{hardware:.0f} on the GPU ({record.metric(quantity)})"
                )
    return lines
