#!/usr/bin/env python3
"""Run the simulator's kernels for Hopper on a GPU: outputs, and Nsight Compute's counts."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import functools
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from hopper_cases import CASES, WHOLE, Case, map_variants

from flash_helpers.console.command_line import make_parser
from flash_helpers.console.progress import bar
from flash_helpers.console.tables import Table
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.measure.results import Provenance, RecordFile
from flash_helpers.runtime.backend import Backend, KernelsNotRun
from flash_helpers.runtime.driver import DriverError, LoadedKernel, encode_tensor_map

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "tests" / "ptx" / "kernels"
RESULTS = "benchmarks/results/hopper_kernels_h200.json"
LONGEST_S = 5.0  # of one launch

OPCODES = (
    "sass__inst_executed_per_opcode_with_modifier_all",  # by warps, even if the predicate is off
    "sass__thread_inst_executed_true_per_opcode_with_modifier_all",
)
METRICS = (
    "smsp__inst_executed.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32.sum",
    "sm__ops_path_tensor_op_hgmma_src_fp16.sum",
    "sm__sass_data_bytes_mem_shared_op_gmma.sum",
    "smsp__inst_executed_op_tma_ld_pred_on_any.sum",
    "smsp__inst_executed_op_tma_st_pred_on_any.sum",
    "sm__inst_executed_pipe_tma_pred_on_any.sum",
    "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld_dest_self.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld_dest_multicast.sum",
    "l1tex__m_l1tex2xbar_read_requests_mem_global_op_tma_ld_dest_multicast.sum",
    "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum",
    "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_red.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_dshared.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_dshared_op_tma_st.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_dshared_op_st.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_dshared_op_ld.sum",
    "lts__t_requests_srcunit_tex_op_read.sum",
    "lts__t_requests_srcunit_tex_op_write.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_sectors_srcunit_tex_op_red.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_gmma.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_gmma.sum",
    "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_stsm.sum",
    "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
)

DESCRIPTION = f"""\
Run the kernels of tests/ptx/kernels/hopper_*.cu, from the committed PTX, on the inputs of
hopper_cases.py, and compare their outputs with NumPy's. Nsight Compute then counts in the kernels
that do more than a single copy or product, and the driver tells which tensor maps it takes.
Errors, counts and verdicts go to {RESULTS}. The file beside it with the ending .npz gets the
outputs of kernels whose sums depend on the order. The tests compare the simulator with both files.
"""

EXAMPLES = f"""\
examples:
  run, count and write {RESULTS}; needs a GPU of compute capability 9.0 and ncu:
    python benchmarks/hopper_kernels.py
  in a copy without git, and keeping the data elsewhere:
    python benchmarks/hopper_kernels.py --commit 68cfc22 --json hopper.json

exit status: 0 all outputs are right, 1 an output is wrong, 2 wrong usage, no GPU or no profiler,
130 interrupted
"""


@dataclass(frozen=True)
class Output:
    """The record of one case. error: as `Case.error`, against NumPy's output."""

    case: str
    error: float


@dataclass(frozen=True)
class CountedCase:
    """One launch. counts: by metric; None if the GPU has no number. opcodes: executions by warps,
    by opcode of SASS. true: executions by threads whose predicate holds."""

    case: str
    counts: Mapping[str, float | None]
    opcodes: Mapping[str, float]
    true: Mapping[str, float]


@dataclass(frozen=True)
class MapVerdict:
    """The driver's verdict on a tensor map. fields: of `map_variants`, as text."""

    fields: str
    is_taken: bool


@dataclass(frozen=True)
class HopperKernels(RecordFile):
    """Results of one run. profiler: its version."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "outputs and counts of Hopper's units"

    provenance: Provenance
    profiler: str
    outputs: tuple[Output, ...]
    launches: tuple[CountedCase, ...]
    maps: tuple[MapVerdict, ...]

    def table(self) -> Table:
        """Table of one row per metric and one column per counted case."""
        rows = [
            [metric, *(f"{launch.counts.get(metric) or 0:.0f}" for launch in self.launches)]
            for metric in METRICS
        ]
        return Table(["metric", *(launch.case for launch in self.launches)], rows)


@functools.cache
def _kernel(module: str, kernel: str, shared_bytes: int) -> LoadedKernel:
    """Load a kernel; the driver compiles the PTX. Line information is removed, since it refers to
    strings that the PTX lacks."""
    text = (KERNELS / f"{module}.ptx").read_text()
    return LoadedKernel(
        re.sub(r"^\s*\.(loc|file)\s.*\n", "", text, flags=re.MULTILINE).encode(),
        *(kernel, shared_bytes),
    )


def launch(case: Case) -> np.ndarray:
    """Launch a case; return the kernel's output. Raises DriverError, and RuntimeError if the kernel
    hangs."""
    buffers = {
        name: torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()).cuda()
        for name, array in case.buffers.items()
    }
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    _kernel(case.module, case.kernel, case.shared_bytes).start(
        *(case.grid, case.block, case.bind(addresses, encode_tensor_map)),
        shared_bytes=case.shared_bytes,
        cluster=case.cluster,
    )
    ended, deadline = torch.cuda.Event(), time.monotonic() + LONGEST_S
    ended.record(torch.cuda.default_stream())
    while not ended.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{case.kernel} did not end within {LONGEST_S} s")
    before = case.buffers[case.output]
    return buffers[case.output].cpu().numpy().view(before.dtype).reshape(before.shape)


def verdict(fields: Mapping[str, Any]) -> MapVerdict:
    """Ask the driver for its verdict on a tensor map."""
    try:
        encode_tensor_map(SimpleNamespace(l2_promotion="none", **fields))
    except DriverError:
        return MapVerdict(str(fields), False)
    return MapVerdict(str(fields), True)


def recorded(case: Case, output: np.ndarray) -> np.ndarray:
    """Rows of an output that are kept."""
    return output.reshape(-1, output.shape[-1])[:: case.kept]


def count(profiler: NsightCompute) -> tuple[CountedCase, ...]:
    """Count all cases of `WHOLE`. Raises ProfilerError."""
    command = [sys.executable, __file__, "--launch"]
    names = "|".join(f"^{case.kernel}$" for case in WHOLE.values())
    metrics = profiler.available((*METRICS, *OPCODES))
    found = profiler.profile(command, names, metrics, instances=True)
    if len(found) != len(WHOLE):
        raise ProfilerError(f"{len(found)} launches were counted instead of {len(WHOLE)}")
    return tuple(
        CountedCase(
            name,
            {metric: run.values.get(metric) for metric in METRICS},
            *(run.instances.get(metric, {}) for metric in OPCODES),
        )
        for name, run in zip(WHOLE, found, strict=True)
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS, "errors and counts")
    parser.add_argument("--launch", action="store_true", help="only launch the kernels, for ncu")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Run, count, print and write; returns the exit status. Raises KernelsNotRun and
    ProfilerError."""
    if not torch.cuda.is_available():
        raise KernelsNotRun("the kernels were not run: no CUDA device was found")
    if arguments.launch:
        for case in WHOLE.values():
            launch(case)
        return 0
    found = {name: launch(case) for name, case in bar(list(CASES.items()), desc="run", unit="case")}
    outputs = tuple(Output(name, case.error(found[name])) for name, case in CASES.items())
    profiler = NsightCompute.find()
    backend = Backend(torch.device("cuda", 0), "", lambda *_: (), (), "PTX compiled by the driver")
    result = HopperKernels(
        provenance_here(backend, command, arguments, ROOT),
        *(f"Nsight Compute {profiler.version()}", outputs, count(profiler)),
        tuple(map(verdict, map_variants())),
    )
    result.save(arguments.json)
    kept = {name: recorded(CASES[name], found[name]) for name in CASES if CASES[name].kept}
    np.savez_compressed(arguments.json.with_suffix(".npz"), **kept)
    wrong = [o.case for o in outputs if not o.error <= CASES[o.case].bound]
    print(f"{result.table().text()}\n\n{result.provenance.sentence(result.profiler)}")
    print(f"{len(outputs) - len(wrong)} of {len(outputs)} outputs are right", *wrong, sep="\n")
    return int(bool(wrong))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and count; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(
        run, arguments, "hopper_kernels.py", argv, ProfilerError, ValueError, RuntimeError, OSError
    )


if __name__ == "__main__":
    sys.exit(main())
