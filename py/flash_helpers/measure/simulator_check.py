"""Does the simulator tell the truth? Its outputs and counts beside those of a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch

from flash_helpers.check.inputs import make_inputs, tensors_for
from flash_helpers.console.tables import Table
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.counter_check import CountedLaunch, CounterCheck, Quantity
from flash_helpers.measure.nsight import EXECUTED_METRICS, operation_metrics
from flash_helpers.ptx import Counters
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel, run_kernel

# PTX opcodes begin with one of these; each becomes one SASS instruction.
_FAMILIES = {
    "mma": ("mma.",),
    "ldmatrix": ("ldmatrix.",),
    "cp.async": ("cp.async.ca.", "cp.async.cg."),
    "shared store": ("st.shared",),
    "shared load": ("ld.shared",),
    "global store": ("st.global",),
}
_TMA = "cp.async.bulk.tensor"
# The same of family hopper.
_HOPPER_FAMILIES = {
    "wgmma": ("wgmma.mma_async.",),
    "TMA load": tuple(f"{_TMA}.{n}d.shared::cluster.global." for n in range(1, 6)),
    "TMA store": tuple(f"{_TMA}.{n}d.global.shared::cta." for n in range(1, 6)),
    "stmatrix": ("stmatrix.",),
}
_CONFLICTS = "data_bank_conflicts_pipe_lsu_mem_shared"
_WAVEFRONTS = "data_pipe_lsu_wavefronts_mem_shared"
_SECTORS = "t_sectors_pipe_lsu_mem_global"
_PATCHED = "smsp__sass_l1tex"  # counted by patching the code


def _tensor_metrics() -> tuple[str, ...]:
    pipes = ("tensor_op_hmma", "tensor")
    return tuple(f"{unit}__inst_executed_pipe_{p}.sum" for p in pipes for unit in ("sm", "smsp"))


QUANTITIES = (
    Quantity("mma instructions", _tensor_metrics()),
    *(
        Quantity(f"{family} instructions", operation_metrics(operation))
        for family, operation in (
            ("ldmatrix", "ldsm"),
            ("cp.async", "ldgsts"),
            ("shared store", "shared_st"),
            ("global store", "global_st"),
        )
    ),
    *(
        Quantity(
            f"{family} bank conflicts",
            (f"{_PATCHED}_{_CONFLICTS}_{operation}.sum", f"{other}_{_CONFLICTS}_{operation}.sum"),
            (f"{family} conflicts",),
            0.05,
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
        ("ldmatrix conflicts", "shared load conflicts"),
        None,
    ),
    Quantity(
        "all bank conflicts, counter of L1",
        (f"l1tex__{_CONFLICTS}.sum",),
        tuple(f"{family} conflicts" for family in _FAMILIES if family != "global store"),
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
        ("cp.async sectors",),
    ),
    Quantity(
        "sectors that L2 reads",
        ("lts__t_sectors_srcunit_tex_op_read.sum",),
        ("cp.async sectors",),
        None,
    ),
    Quantity(
        "sectors written by global stores",
        (f"l1tex__{_SECTORS}_op_st.sum", f"{_PATCHED}_{_SECTORS}_op_st.sum"),
        ("global store sectors",),
    ),
    Quantity("wgmma instructions", ("sm__inst_executed_pipe_tensor_op_gmma.sum",)),
    Quantity("bytes of wgmma operands", ("sm__sass_data_bytes_mem_shared_op_gmma.sum",)),
    Quantity("TMA load instructions", ("smsp__inst_executed_op_tma_ld_pred_on_any.sum",)),
    Quantity("TMA store instructions", ("smsp__inst_executed_op_tma_st_pred_on_any.sum",)),
    Quantity(
        "sectors of TMA loads",
        ("l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld.sum",),
        ("TMA load sectors",),
    ),
    Quantity(
        "sectors of TMA stores",
        ("l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.sum",),
        ("TMA store sectors",),
    ),
    Quantity(
        "stmatrix wavefronts",
        (f"sm__sass_l1tex_{_WAVEFRONTS}_op_stsm.sum",),
    ),
    Quantity("all instructions (PTX and SASS)", EXECUTED_METRICS, ("instructions",), None),
)
METRICS = tuple(dict.fromkeys(metric for q in QUANTITIES for metric in q.metrics))

# Columns of the table by kernel.
_SHOWN = (
    "mma instructions",
    "ldmatrix bank conflicts",
    "shared store bank conflicts",
    "sectors read by cp.async",
    "sectors written by global stores",
    "wgmma instructions",
    "bytes of wgmma operands",
    "sectors of TMA loads",
    "sectors of TMA stores",
    "stmatrix wavefronts",
)


def simulated_counts(counters: Counters) -> dict[str, int]:
    """What is compared, by name. Of a kernel on `wgmma` other families of instructions are."""
    by_opcode, total = counters.by_opcode(), counters.total
    counts = {"instructions": total.instructions}
    if total.wgmma:
        counts["bytes of wgmma operands"] = total.wgmma_bytes
    for family, prefixes in (_HOPPER_FAMILIES if total.wgmma else _FAMILIES).items():
        found = [count for opcode, count in by_opcode.items() if opcode.startswith(prefixes)]
        counts[f"{family} instructions"] = sum(c.instructions for c in found)
        counts[f"{family} conflicts"] = sum(c.bank_conflicts for c in found)
        counts[f"{family} wavefronts"] = sum(c.shared_wavefronts for c in found)
        counts[f"{family} sectors"] = sum(c.global_sectors + c.tma_sectors for c in found)
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
class KernelRecord(OutputComparison, CountedLaunch):
    """One kernel on one problem: its outputs compared, and its counts."""


@dataclass(frozen=True, kw_only=True)
class SimulatorCheck(CounterCheck):
    """What the simulator and a GPU made of the same kernels."""

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "check of the simulator"
    MARKERS: ClassVar[tuple[str, str]] = ("<!-- simulator:begin -->", "<!-- simulator:end -->")
    LEFT_OUT: ClassVar[str] = (
        "Not compared of family hopper: how often a try_wait is executed, which differs from "
        "launch to launch as threads spin there; wavefronts of the operands of wgmma and of TMA, "
        "which are not simulated."
    )
    QUANTITIES: ClassVar[tuple[Quantity, ...]] = QUANTITIES
    SIDES: ClassVar[tuple[str, str]] = ("in the simulator", "on the GPU")
    UNCLAIMED: ClassVar[str] = "not expected to agree"
    NOTE: ClassVar[str] = (
        "Simulator / GPU; one number where both are equal, bold where they disagree. Differences "
        "of outputs are in units of the last place: of the largest element of the row, and of the "
        "element itself, which is large where an element nearly cancels."
    )

    kernels: tuple[KernelRecord, ...]

    def kernel_table(self) -> Table:
        """How far the outputs are from each other, and some of the counts."""
        shown = [
            quantity
            for quantity in QUANTITIES
            if quantity.name in _SHOWN and any(record.has(quantity) for record in self.kernels)
        ]
        ulps = "largest difference, ulps of the row"
        rows = [
            [
                f"`{record.name}`",
                f"{100 * record.bit_equal:.3f}%",
                f"{record.max_row_ulps:.2g}",
                str(record.max_ulps),
                *(_pair_text(record, quantity) for quantity in shown),
            ]
            for record in self.kernels
        ]
        names = [quantity.name for quantity in shown]
        return Table(["kernel", "outputs bit-equal", ulps, "of the element", *names], rows)


def _pair_text(record: KernelRecord, quantity: Quantity) -> str:
    if not record.has(quantity):
        return ""
    simulated, hardware = record.counted(quantity)
    if hardware is None:
        return f"{simulated:,} / not measured"
    if simulated == hardware:
        return f"{simulated:,}"
    text = f"{simulated:,} / {hardware:,.0f}"
    return text if quantity.agrees(simulated, hardware) else f"**{text}**"


def compare_kernel(config: Config, shape: AttentionForward, backend: Backend) -> KernelRecord:
    """Run one kernel on the GPU and in the simulator, on the same inputs; no counters yet.

    shape: one for which the config itself is launched.
    """
    q, k, v = make_inputs("normal", shape, getattr(torch, config.dtype.torch_name))
    tensors = tensors_for(config, q, k, v)
    run = run_kernel(config, load_kernel(config, ptx_path(config)), tensors)
    on_device = [x.to(backend.device) for x in (q, k, v)]
    output = torch.full_like(on_device[0], torch.nan)
    backend.forward(config, *on_device, output)
    backend.synchronize()
    return KernelRecord(
        name=config.short_form(),
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=shape.len_q,
        predicted=simulated_counts(run.counters),
        **asdict(compare_outputs(output.cpu(), tensors["o"])),
    )
