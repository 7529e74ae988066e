#!/usr/bin/env python3
"""Compare predicted counts of executed instructions with the counts of a GPU."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from flash_helpers.console.command_line import (
    add_architecture_argument,
    add_commit_argument,
    make_parser,
    output_file,
    output_folder,
    positive,
    run_tool,
    typed_command,
    write_or_check,
)
from flash_helpers.console.progress import bar, progress_bar
from flash_helpers.course.glossary import link_first_uses, read_terms
from flash_helpers.measure.benchmark_tables import replace_between_markers
from flash_helpers.measure.command_line import provenance_here
from flash_helpers.measure.counts import (
    METRICS,
    SASS,
    SIMULATOR,
    SOURCES,
    CountCheck,
    CountedKernel,
    with_counters,
)
from flash_helpers.measure.machine_code import own_kernels
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.measure.predictions import predict_launch, simulate_launch
from flash_helpers.registry.selection import UsageError, add_kernel_arguments, chosen_kernels
from flash_helpers.runtime.backend import Backend, KernelsNotRun, find_backend
from flash_helpers.sass.analyse.phases import NotDeterminedError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {source: Path(f"benchmarks/results/{source}_h100.json") for source in (SASS, SIMULATOR)}
HOPPER_RESULTS = {
    source: Path(f"benchmarks/results/{source}_hopper_h200.json") for source in (SASS, SIMULATOR)
}
PAGES = {source: Path(f"docs/{source}.md") for source in (SASS, SIMULATOR)}
LAUNCHER = ROOT / "tools/benchmark/run_kernels.py"

DESCRIPTION = """\
Predict the counts of each kernel, run it on a GPU under Nsight Compute, and compare the counts.
Predictions come from the SASS or from the simulator. In SASS, each instruction is weighted with the
trip counts that follow from the config and the sequence length. The simulator's outputs are
compared with the GPU's bit by bit, too. The warps of family hopper have roles and spin where they
wait: from its SASS only opcodes are predicted that ptxas makes one for one of PTX, with the
simulator's counts of that PTX. With --write-docs or --check no kernel is run: the page of each
source is updated from the file, or compared with it.
"""

EXAMPLES = """\
examples:
  all kernels of the progression; keep the output of ncu, for diagnosis:
    python tools/analysis/check_counts.py --source sass --json sass.json --raw ncu_raw
  family hopper, which has a file and a table of its own:
    python tools/analysis/check_counts.py --source simulator --kernel hopper --dtype bf16 \\
      --json benchmarks/results/simulator_hopper_h200.json
  the predictions, on a machine without a GPU:
    python tools/analysis/check_counts.py --source sass --predict --arch sm_80 --kernel 16
  the tables in the docs, from the files (no GPU needed):
    python tools/analysis/check_counts.py --write-docs
  do the pages agree with the data? (exit 1 and a diff if not)
    python tools/analysis/check_counts.py --check

exit status: 0 all counts agree or all pages are up to date, 1 a count disagrees, counters are
missing or --check found a stale page, 2 wrong usage or nothing was run, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--source", choices=SOURCES, help="source of the predictions")
    add_kernel_arguments(parser)
    parser.add_argument(
        *("--seq", "--size"),
        dest="size",
        type=positive,
        default=512,
        metavar="N",
        help="sequence length, or another operation's size, such as the width (default: 512)",
    )
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="file that the numbers are written to or read from "
        f"(default: {' or '.join(map(str, RESULTS.values()))})",
    )
    parser.add_argument("--raw", type=output_folder, metavar="DIR", help="keep all output of ncu")
    add_commit_argument(parser)
    parser.add_argument(
        "--docs", type=Path, help=f"page (default: {' or '.join(map(str, PAGES.values()))})"
    )
    add_architecture_argument(
        parser, "for --predict; a GPU has its own (default: sm_90)", default="sm_90"
    )
    parser.add_argument(
        "--no-profiler", action="store_true", help="with the simulator: compare the outputs only"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write-docs", action="store_true", help="write the tables from the files")
    action.add_argument(
        "--check", action="store_true", help="write nothing; print a diff and exit 1 if stale"
    )
    action.add_argument("--predict", action="store_true", help="print the predictions, run nothing")
    arguments = parser.parse_args(argv)
    if not (arguments.source or arguments.write_docs or arguments.check):
        parser.error("--source is needed: sass or simulator")
    if arguments.no_profiler and arguments.source != SIMULATOR:
        parser.error("--no-profiler goes with --source simulator: the SASS predicts no outputs")
    return arguments


def predict(
    arguments: argparse.Namespace, backend: Backend, arch: str, gpu: Backend | None
) -> list[CountedKernel]:
    """Predictions for the chosen kernels. Kernels whose branches depend on data are left out, and
    stderr names them.

    gpu: runs kernels whose simulated outputs are compared. Raises SassError, and UsageError if no
    kernel can be predicted.
    """
    configs = chosen_kernels(arguments, backend.kernels)
    problems = {config: config.counted_on(arguments.size) for config in configs}
    if arguments.source == SIMULATOR:
        shown = bar(configs, desc="simulating", unit="kernel")
        return [simulate_launch(config, problems[config], gpu) for config in shown]
    with progress_bar("disassembling") as progress:
        kernels = own_kernels(arch, configs, progress=progress)
    records = []
    for config in configs:
        try:
            records.append(predict_launch(kernels[config], config, problems[config]))
        except NotDeterminedError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not records:
        raise UsageError("no count of the chosen kernels can be predicted: choose other kernels")
    return records


def measure(arguments: argparse.Namespace, command: str) -> CountCheck:
    """Predict, then count on the GPU.

    Raises KernelsNotRun without a GPU, SassError, ValueError and ProfilerError.
    """
    import torch  # late, so that --help is fast

    backend = find_backend("cuda")
    ncu = None if arguments.no_profiler else NsightCompute.find(arguments.raw)
    major, minor = torch.cuda.get_device_capability(backend.device)
    records = predict(arguments, backend, f"sm_{major}{minor}", backend)
    unavailable: tuple[str, ...] = ()
    failures: list[str] = []
    if ncu:
        metrics = ncu.available(METRICS)
        unavailable = tuple(metric for metric in METRICS if metric not in metrics)
        for metric in unavailable:
            print(f"this GPU has no metric {metric}", file=sys.stderr)
        print("counting with Nsight Compute", file=sys.stderr)
        records, failures = with_counters(records, ncu, [sys.executable, str(LAUNCHER)], metrics)
    return CountCheck(
        source=arguments.source,
        provenance=provenance_here(backend, command, arguments, ROOT),
        profiler=f"Nsight Compute {ncu.version()}" if ncu else "",
        profiler_failure="\n".join(failures),
        unavailable=unavailable,
        kernels=tuple(records),
    )


def compare(arguments: argparse.Namespace, command: str) -> int:
    """Measure, save and print; returns the exit status. Raises as `measure` does."""
    check = measure(arguments, command)
    check.save(arguments.json or ROOT / RESULTS[arguments.source])
    disagreements = check.disagreements()
    print("\n".join([check.tables(), "", *(disagreements or ["all counts agree"])]))
    if check.profiler_failure:
        print(check.profiler_failure, file=sys.stderr)
    return 1 if disagreements or check.profiler_failure else 0


def update_pages(arguments: argparse.Namespace) -> int:
    """Write or check the pages; returns the exit status. Raises OSError and ValueError."""
    status = 0
    sources = [arguments.source] if arguments.source else list(SOURCES)
    shown = [ROOT / name for s in sources for name in (RESULTS[s], HOPPER_RESULTS[s])]
    terms = read_terms(ROOT)
    for path in [arguments.json] if arguments.json else shown:
        check = CountCheck.load(path)
        page = arguments.docs or ROOT / PAGES[check.source]
        old = page.read_text(encoding="utf-8")
        new = replace_between_markers(old, check.tables(), *check.markers)
        if page.resolve().is_relative_to(ROOT):
            new = link_first_uses(new, PurePosixPath(page.resolve().relative_to(ROOT)), terms)
        status |= write_or_check(page, old, new, arguments.check)
    return status


def print_predictions(arguments: argparse.Namespace) -> int:
    """Print the predictions; returns the exit status. Raises as `predict` does."""
    for record in predict(arguments, find_backend(), arguments.arch, None):
        print(f"{record.name}: {record.asked}")
        for counts in filter(None, (record.predicted, record.predicted_opcodes)):
            print("  ", ", ".join(f"{k} {v:,}" for k, v in counts.items() if v))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare counts, or bring the pages up to date; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("check_counts.py", argv)

    def run() -> int:
        if arguments.predict:
            return print_predictions(arguments)
        if arguments.write_docs or arguments.check:
            return update_pages(arguments)
        return compare(arguments, command)

    return run_tool(run, KernelsNotRun, ProfilerError, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
