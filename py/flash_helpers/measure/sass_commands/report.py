"""Report on the machine code of one kernel: its main loop and the loop's bounds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_command_parser,
    print_text,
    run_tool,
)
from flash_helpers.console.progress import progress_bar
from flash_helpers.console.tables import json_text
from flash_helpers.kernel_configs import Element
from flash_helpers.measure.machine_code import (
    ARCHITECTURE,
    SIZE,
    ConfigFacts,
    config_facts,
    file_facts,
    file_in,
    listed_configs,
    own_kernels,
    predict_config,
)
from flash_helpers.measure.results import results_for
from flash_helpers.measure.sass_commands.arguments import (
    DEFAULT_ARCHITECTURE,
    add_dtype_argument,
    add_format_arguments,
    add_launch_arguments,
    add_results_argument,
    with_launch,
)
from flash_helpers.registry.selection import (
    DTYPE_CHOICES,
    UsageError,
    add_problem_options,
    asked_problem,
    choose_kernels,
    require_options_of,
    require_supported,
)
from flash_helpers.sass.analyse.bound import Chip
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.report import report_on
from flash_helpers.sass.read.choice import NAMED_SO
from flash_helpers.sass.show.report_text import (
    SourceText,
    report_json,
    report_markdown,
    report_text,
)

COMMAND = "python tools/analysis/sass_report.py"

DESCRIPTION = """\
Report on the SASS of one kernel, from the installed library or from any cubin, fatbin, object file
or library. The report has instructions by phase and class, registers, spills and their loops, lower
bounds for an iteration of the main loop by pipe, issue and latency, stalls and scoreboard waits. It
ends with the loop itself, its control words decoded. Neither a GPU nor a CUDA toolkit is needed.

A control word reads: s stall cycles; y if the scheduler may turn to another warp; w and r the
scoreboards raised until the result is written and the operands are read; b the scoreboards waited
for; u the operands kept in the reuse cache.
"""

EXAMPLES = """\
examples:
  the main loop of step 16 on an H100, and its bounds:
    python tools/analysis/sass_report.py 16
  the same loop for an RTX 4090, in fp16, with the CUDA lines:
    python tools/analysis/sass_report.py 16 --arch sm_89 --dtype fp16 --source
  the least time of a launch on an A100 with 108 multiprocessors at 1410 MHz:
    python tools/analysis/sass_report.py 16 --arch sm_80 --sms 108 --mhz 1410 --seq 8192
  the spills of a tile of 128 rows:
    python tools/analysis/sass_report.py v7_bf16_d128_Br128_Bc64_w4_async_eager_swizzled_Q1_K1_V1_db_ffma
  a kernel of your own, launched with 64 threads and 8 KiB of dynamic shared memory:
    python tools/analysis/sass_report.py \\
        examples/own_kernel/row_softmax.sm_90.cubin#row_softmax --threads 64 --smem 8192
  one loop of a kernel, for a page:
    python tools/analysis/sass_report.py 16 --loop 0 --markdown > v16.md

exit status: 0 reported, 2 wrong usage or a file that cannot be read, 130 interrupted
"""  # noqa: E501


def parse_arguments(argv: Sequence[str] | None, command: str = COMMAND) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong. `command`: as a user calls it."""
    parser = make_command_parser(DESCRIPTION, EXAMPLES, COMMAND, command)
    parser.add_argument(
        "kernel_or_file",
        metavar="STEP|FILE",
        help="a step (7 or v7: its config in the progression), the short form of a config, or a "
        f"file that holds machine code: {NAMED_SO}",
    )
    parser.add_argument(
        "--kernel",
        metavar="NAME",
        help="of a FILE: its kernel's name, instead of FILE#NAME",
    )
    add_architecture_argument(parser, f"such as sm_89 ({DEFAULT_ARCHITECTURE})")
    add_dtype_argument(parser, DTYPE_CHOICES[:-1])
    parser.add_argument(
        "--loop", type=int, metavar="N", help="number of the loop to show (default: the main loop)"
    )
    add_launch_arguments(parser)
    time = parser.add_argument_group(
        "least time of a launch, on another GPU or problem",
        f"The problem is the one that is measured at {SIZE}, with these changes.",
    )
    time.add_argument("--sms", type=int, metavar="N", help="streaming multiprocessors")
    time.add_argument("--mhz", type=float, metavar="F", help="their clock")
    add_problem_options(time)
    parser.add_argument(
        "--source", action="store_true", help="print CUDA lines above their instructions"
    )
    add_results_argument(parser, f", to print beside the bound for {ARCHITECTURE}")
    add_format_arguments(parser, csv=False)
    arguments = parser.parse_args(argv)
    if (arguments.sms is None) != (arguments.mhz is None):
        parser.error("--sms and --mhz go together")
    for name in ("sms", "mhz"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} {value} is not positive")
    return arguments


def read_kernel(arguments: argparse.Namespace, root: Path) -> KernelFacts:
    """The named kernel, from a file or from the installed library. Raises UsageError, SassError and
    ValueError."""
    results = results_for(arguments.results, root)
    where = file_in(arguments.kernel_or_file)
    if where is not None:
        names = [arguments.kernel] if arguments.kernel else []
        with progress_bar("disassembling") as progress:
            return file_facts(where, arguments.arch, results, names=names, progress=progress)
    architecture = arguments.arch or ARCHITECTURE
    dtype = Element.from_name(arguments.dtype)
    configs = choose_kernels(listed_configs(architecture), [arguments.kernel_or_file], dtype)
    if len(configs) != 1:
        raise UsageError(
            f"{arguments.kernel_or_file!r} names {len(configs)} kernels: name one step or one "
            "short form"
        )
    (kernel,) = own_kernels(architecture, configs).values()
    return config_facts(configs[0], kernel, results)


def with_prediction(facts: KernelFacts, arguments: argparse.Namespace) -> KernelFacts:
    """The facts with the requested launch instead of the measured one. Raises UsageError and
    ValueError."""
    if not isinstance(facts, ConfigFacts):
        raise UsageError(
            "--sms and --mhz need trip counts of loops, which are known only for kernels of this "
            "library: leave them out"
        )
    if facts.unit is None:
        raise UsageError(
            f"--sms and --mhz: {facts.config.short_form()} has no tensor instructions, which tell "
            "the trip counts of loops: leave them out"
        )
    config = facts.config
    require_options_of(arguments, [config.family.operation.name])
    problem = asked_problem(arguments, config.measured(SIZE)).in_dtype(config.dtype)
    require_supported([config], problem)
    chip = Chip(arguments.sms, arguments.mhz)
    prediction = predict_config(facts.kernel, config, problem, chip)
    return replace(facts, prediction=prediction, measurement=None)


def report(arguments: argparse.Namespace, root: Path) -> str:
    """The text to print. `root`: of the repository, whose measurements and sources are shown.
    Raises ValueError and OSError."""
    facts = read_kernel(arguments, root)
    if arguments.sms is not None:
        facts = with_prediction(facts, arguments)
    found = report_on(with_launch(facts, arguments), arguments.loop)
    source = SourceText(root) if arguments.source else None
    if arguments.json:
        return json_text(report_json(found))
    make = report_markdown if arguments.markdown else report_text
    return make(found, source) + "\n"


def main(argv: Sequence[str] | None, root: Path, command: str = COMMAND) -> int:
    """Print the report; returns the exit status. `root`, `command`: as above."""
    arguments = parse_arguments(argv, command)
    return run_tool(lambda: print_text(report(arguments, root)), ValueError, OSError)
