#!/usr/bin/env python3
"""Measure the same kernels compiled by nvcc and by NVRTC."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flash_helpers.compile import cache
from flash_helpers.compile.build import requested_jobs
from flash_helpers.compile.compilers import (
    Compiler,
    NvrtcCompiler,
    find_compiler,
    find_nvcc_compiler,
    how_to_get_nvrtc,
)
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.console.command_line import make_parser, positive
from flash_helpers.console.progress import bar, task
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import FAMILIES, STEPS, Config, Element, Problem
from flash_helpers.measure.code import cubin_code
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.compilers import (
    CompiledTwice,
    CompilerComparison,
    Pair,
    timed_kernels,
    timed_on,
    without_first_round,
)
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.results import BURST, LOADS, SUSTAINED, Load, Protocol, refuse_mixing
from flash_helpers.registry.selection import (
    UsageError,
    add_kernel_arguments,
    parse_dtypes,
    select_kernels,
)
from flash_helpers.runtime.backend import Backend, find_backend
from flash_helpers.tune.process import CompiledConfig, KernelFile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/compilers_h100.json"
STEPS_TIMED = ("v16", "o5", "h12", "h20", "h30")
SIZES = (4096, 16384)
# One kernel from two compilers draws nearly the same power, so that no sample needs a lead in which
# the power limiter settles on its contender.
LOADS_TIMED = {
    BURST: LOADS[BURST],
    SUSTAINED: Load(SUSTAINED, LOADS[SUSTAINED].sample_ms),
}

DESCRIPTION = f"""\
Compile kernels by nvcc and by NVRTC, and time the two in turns in one process. Each line has the
digest of the machine code from each compiler, unless they are the same, the registers per thread,
the speed, and the ratio of NVRTC's speed to nvcc's: the median over the rounds, and the interval of
the middle 80% of the rounds. Of kernels with the same machine code from both compilers, only the
last of each family is timed.

A pair of the same machine code, loaded twice, is a control. It is a kernel with the same code from
both compilers, or nvcc's code against itself for the last kernel of a family and every eighth
before it. The farther end of the interval over all rounds of a family's controls under one load is
the noise. A line ends with = if its median lies within the noise. Tables of other results do not
mark a kernel as changed whose two codes were equally fast at each size and under each load
(flash_helpers.measure.compilers.equal_codes).

Bursts are samples of {LOADS[BURST].sample_ms:g} ms, after each of which the chip rests.
Sustained samples take {LOADS[SUSTAINED].sample_ms:g} ms, without a pause. The first round is not
kept. The problems are those of pt_bench.py, with 16 heads; a kernel whose tiles do not divide a
size is timed at 15/16 of it. Outputs are compared with float64 before and after.
"""

EXAMPLES = f"""\
examples:
  measure, print and write {RESULTS}, within two minutes; needs a
  GPU, nvcc and NVRTC:
    python benchmarks/compilers.py
  every listed config of three families, within six minutes:
    python benchmarks/compilers.py --kernel overlap hopper softmax --size 4096 --load sustained \\
      --rounds 4 --json benchmarks/results/compilers_all_h100.json
  one kernel in a copy without git, keeping the data elsewhere:
    python benchmarks/compilers.py --kernel h30 --dtype bf16 --commit 68cfc22 --json h30.json

exit status: 0 every kernel was right and timed, 1 a kernel failed, 2 wrong usage or no GPU,
130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_kernel_arguments(parser, default=f"the fixed configs of {', '.join(STEPS_TIMED)} in bf16")
    parser.add_argument(
        "--size",
        type=positive,
        nargs="+",
        default=SIZES,
        metavar="N",
        help=f"sequence lengths of attention, widths of rows (default: {SIZES[0]} {SIZES[1]})",
    )
    parser.add_argument("--load", choices=(*LOADS_TIMED, "both"), default="both")
    parser.add_argument(
        "--rounds", type=positive, default=7, metavar="N", help="rounds that are kept (default: 7)"
    )
    add_results_arguments(parser, ROOT, RESULTS)
    return parser.parse_args(argv)


def find_compilers() -> tuple[Compiler, Compiler]:
    """nvcc and NVRTC. Raises BuildError without one of them."""
    nvcc, nvrtc = find_nvcc_compiler(), find_compiler()
    if not isinstance(nvrtc, NvrtcCompiler):
        raise BuildError(
            f"there is no NVRTC to compare {nvcc.name} with: {how_to_get_nvrtc(nvcc.version[0])}"
        )
    return nvcc, nvrtc


def chosen_kernels(arguments: argparse.Namespace, backend: Backend, gpu: Device) -> list[Config]:
    """The chosen kernels, sorted. Raises UsageError, also for a kernel that is not made for the
    GPU."""
    fixed = [
        family.fixed_config(STEPS[name], Element.BF16)
        for name in STEPS_TIMED
        if (family := FAMILIES[STEPS[name].family]).runs_on(gpu.capability)
    ]
    dtypes = parse_dtypes(arguments.dtype)
    chosen = select_kernels(backend.kernels, arguments.kernel, dtypes, fixed)
    for config in chosen:
        if refusal := config.family.refusal_on(gpu.name, gpu.capability):
            raise UsageError(f"{config.short_form()}: {refusal}")
    return chosen


class Compiled(NamedTuple):
    """A config's files by nvcc and by NVRTC, a copy of the first, and their digests."""

    files: tuple[CompiledConfig, CompiledConfig]
    copy: CompiledConfig
    record: CompiledTwice


def compile_all(
    configs: Sequence[Config], compilers: Sequence[Compiler], capability: int, folder: Path
) -> list[Compiled]:
    """Each config's kernels, compiled by each compiler for GPUs of a compute capability such as 90.
    The files lie below `folder`. Raises BuildError."""
    wanted = [(config, unit) for config in configs for unit in units_of(config)]
    targets = [f"sm_{config.family.targets_for([capability])[0]}" for config, _ in wanted]
    made = []
    for number, compiler in enumerate(compilers):
        own_cache = cache.Cache(folder / str(number))
        jit = Jit(ROOT, own_cache, partial(_given, compiler), requested_jobs(os.environ))
        compiled = jit.get([unit for _, unit in wanted], targets)
        own: dict[Config, list[cache.Compiled]] = {config: [] for config in configs}
        for (config, _), kernel in zip(wanted, compiled, strict=True):
            own[config].append(kernel)
        made.append(own)
    found = []
    for config in configs:
        first, second = (own[config] for own in made)
        copies = [shutil.copy(k.cubin_path, folder / f"{k.name}.cubin") for k in first]
        record = CompiledTwice(
            config.short_form(),
            (_code(first), _code(second)),
            (max(map(_registers, first)), max(map(_registers, second))),
        )
        files = _files(config, first), _files(config, second)
        found.append(Compiled(files, _files(config, first, copies), record))
    return found


def _given(compiler: Compiler) -> Compiler:
    return compiler


def _files(
    config: Config, kernels: Sequence[cache.Compiled], cubins: Sequence[str | Path] = ()
) -> CompiledConfig:
    """A config's files. `cubins`: instead of those of the kernels."""
    paths = cubins or [kernel.cubin_path for kernel in kernels]
    found = [
        KernelFile(kernel.name, str(path), kernel.symbol)
        for kernel, path in zip(kernels, paths, strict=True)
    ]
    return CompiledConfig(config.short_form(), tuple(found))


def _code(kernels: Iterable[cache.Compiled]) -> str:
    return cubin_code(*(kernel.cubin_path for kernel in kernels))


def _registers(kernel: cache.Compiled) -> int:
    (report,) = parse_ptxas_log(kernel.log_path.read_text())
    return report.registers


def measure(
    compiled: Sequence[Compiled], sizes: Sequence[int], backend: Backend, protocol: Protocol
) -> list[Pair]:
    """Time the kernels of `timed_kernels` at every size. Raises UsageError for a problem that does
    not fit in the GPU's memory."""
    import torch  # late, so that --help is fast

    from flash_helpers.measure.benchmark import make_input_sets, measure_problem
    from flash_helpers.measure.timing import make_timer
    from flash_helpers.tune.worker import cubin_contender

    of_record = {each.record: each for each in compiled}
    cases: dict[Problem, list[tuple[CompiledConfig, CompiledConfig]]] = defaultdict(list)
    for record, has_control in timed_kernels(of_record):
        own = of_record[record]
        both = [own.files, (own.files[0], own.copy)] if has_control else [own.files]
        for size in sizes:
            cases[timed_on(record.config, size)] += both
    timer, sensor = make_timer(backend.device, protocol), GpuSensor(backend.device)
    pairs = []
    with bar(total=sum(map(len, cases.values())), desc="timing", unit="pair") as shown:
        for problem, files in cases.items():
            try:
                sets = make_input_sets(problem, problem.dtype, backend.device, timer, protocol)
                for pair in files:
                    contenders = [cubin_contender(file, backend.execute) for file in pair]
                    found = measure_problem(
                        contenders, sets, problem, problem.dtype, timer, protocol, sensor
                    )
                    kept = map(without_first_round, found)
                    pairs += [Pair(*turns) for turns in zip(kept, kept, strict=True)]
                    shown.update()
            except torch.cuda.OutOfMemoryError as error:
                raise UsageError(
                    f"{problem} does not fit in the GPU's memory: choose a smaller --size"
                ) from error
            del sets  # before those of the next problem are made
    return pairs


def run(arguments: argparse.Namespace, command: str) -> int:
    """Compile, measure, print and write; returns the exit status.

    Raises KernelsNotRun without a GPU, BuildError without a compiler, OSError and ValueError.
    """
    backend = find_backend("cuda")
    found = provenance_here(backend, command, arguments, ROOT)
    if arguments.json.exists():
        before = CompilerComparison.load(arguments.json)
        refuse_mixing(arguments.json, before.provenance.gpu, found.gpu)
    compilers = find_compilers()
    major, minor = found.device.capability
    configs = chosen_kernels(arguments, backend, found.device)
    protocol = Protocol(
        rounds=arguments.rounds + 1,  # the first is not kept
        loads=tuple(x for name, x in LOADS_TIMED.items() if arguments.load in (name, "both")),
    )
    with tempfile.TemporaryDirectory() as folder:
        with task(f"compiling {len(configs)} kernels twice"):
            compiled = compile_all(configs, compilers, 10 * major + minor, Path(folder))
        pairs = measure(compiled, arguments.size, backend, protocol)
    measured = CompilerComparison(
        found,
        (compilers[0].name, compilers[1].name),
        protocol,
        tuple(each.record for each in compiled),
        tuple(pairs),
    )
    print(measured.table().text())
    print(measured.summary())
    measured.save(arguments.json)
    return 1 if measured.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and measure; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(run, arguments, "benchmarks/compilers.py", argv, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
