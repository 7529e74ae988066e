"""Compare the machine code of kernels: resources, instructions, and changes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_command_parser,
    output_file,
    print_text,
    run_tool,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.console.progress import progress_bar
from flash_helpers.console.tables import escaped_markdown, fenced, json_text
from flash_helpers.kernel_configs import OPERATIONS, Config, Element
from flash_helpers.measure.machine_code import (
    ARCHITECTURE,
    SIZE,
    ConfigFacts,
    config_facts,
    facts_matrix,
    file_facts,
    file_in,
    listed_configs,
    matrix_page,
    own_kernels,
    source_diff,
)
from flash_helpers.measure.results import BenchmarkResults, results_for
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
    KERNEL_NAMES,
    UsageError,
    Wanted,
    add_problem_options,
    choose_kernels,
    parse_config_option,
    parse_dtypes,
    require_options_of,
)
from flash_helpers.sass.analyse.diff import diff_kernels
from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.read.choice import NAMED_SO, KernelPath
from flash_helpers.sass.show.diff_text import diff_as_json, diff_text
from flash_helpers.sass.show.matrix_tables import (
    matrix_csv,
    matrix_json,
    matrix_markdown,
    matrix_text,
)

COMMAND = "python tools/analysis/compare_kernels.py"
SIZES = sorted({operation.swept for operation in OPERATIONS.values()})  # fields that are measured

DESCRIPTION = """\
Compare the machine code (SASS) of kernels in the installed library or in any cubin, fatbin, object
file or library. The table has registers, spills, shared memory, occupancy, main-loop instructions
per HMMA, a static bound beside the measured time, and the opcodes that changed most. The tool needs
neither a GPU nor a CUDA toolkit.
"""

EXAMPLES = """\
examples:
  the whole progression, one row per step:
    python tools/analysis/compare_kernels.py 1..16
  the changes of step 9, in the machine code and in the source:
    python tools/analysis/compare_kernels.py 8 9 --sass --source
  one kernel on two architectures:
    python tools/analysis/compare_kernels.py 16 --arch sm_80 --arch sm_90 --sass
  the large tile shape:
    python tools/analysis/compare_kernels.py 7 16 --config B_r=128
  CUDA, PTX and SASS of all steps, linked, in one page that needs no network:
    python tools/analysis/compare_kernels.py 1..16 --html kernels.html
  a kernel of your own before and after a change, with the diff of its machine code:
    python tools/analysis/compare_kernels.py --sass \\
        examples/own_kernel/row_softmax.sm_90.cubin#row_softmax \\
        examples/own_kernel/row_softmax_fixed.sm_90.cubin#row_softmax
  both as a page beside a step of this library, all as if launched with 64 threads:
    python tools/analysis/compare_kernels.py examples/own_kernel/row_softmax.sm_90.cubin \\
        examples/own_kernel/row_softmax_fixed.sm_90.cubin 16 --threads 64 --html own.html
  for a spreadsheet:
    python tools/analysis/compare_kernels.py 1..16 --dtype fp16 --csv > kernels.csv

exit status: 0 compared, 2 wrong usage, or a library or file that cannot be read, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None, command: str = COMMAND) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong. `command`: as a user calls it."""
    parser = make_command_parser(DESCRIPTION, EXAMPLES, COMMAND, command)
    parser.add_argument(
        "kernels",
        nargs="+",
        metavar="KERNEL",
        help=f"{KERNEL_NAMES}; or a file that holds machine code: {NAMED_SO}",
    )
    add_architecture_argument(
        parser,
        "may be given several times; each kernel is read for every architecture "
        f"({DEFAULT_ARCHITECTURE})",
        action="append",
    )
    add_dtype_argument(parser, DTYPE_CHOICES)
    parser.add_argument(
        "--config",
        nargs="+",
        metavar="FIELD=VALUE",
        help="built config of each step: values of fields, such as B_r=128 n_warps=4, or a short "
        "form, to take the nearest config (default: the config of the progression)",
    )
    launch = parser.add_argument_group(
        "the launch whose time is shown", f"Its size is {SIZE} by default."
    )
    add_problem_options(launch, *SIZES)
    add_results_argument(parser)
    add_launch_arguments(parser)
    parser.add_argument(
        "--source", action="store_true", help="also print the diff of the steps' source files"
    )
    parser.add_argument(
        "--fold-namespace",
        action="store_true",
        help="with --source: ignore the names of the steps' namespaces",
    )
    parser.add_argument(
        "--sass",
        action="store_true",
        help="also print the diff of the machine code: registers, labels and addresses "
        "normalised, lines aligned by PTX, moved lines marked apart from added and removed ones",
    )
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="also write a page with CUDA, PTX and SASS of each kernel, as a diff against the "
        "kernel before it",
    )
    add_format_arguments(parser, csv=True)
    arguments = parser.parse_args(argv)
    if arguments.csv and (arguments.source or arguments.sass):
        parser.error("--csv cannot hold --source and --sass: use --json")
    if arguments.fold_namespace and not arguments.source:
        parser.error("--fold-namespace goes with --source")
    if len([name for name in SIZES if getattr(arguments, name) is not None]) > 1:
        parser.error("kernels are compared at one size: name a single size")
    return arguments


def asked_size(arguments: argparse.Namespace) -> int:
    """Return the size of the launch whose time is shown."""
    given = (getattr(arguments, name) for name in SIZES)
    return next((size for size in given if size is not None), SIZE)


def diffs(
    matrix: Matrix, arguments: argparse.Namespace, root: Path
) -> Iterator[tuple[str, str, Any]]:
    """Title, text and JSON of each requested diff, between each kernel and the kernel before it."""
    for (name_a, a), (name_b, b) in itertools.pairwise(matrix.named):
        if arguments.source:
            if not (isinstance(a, ConfigFacts) and isinstance(b, ConfigFacts)):
                raise UsageError("--source compares the files of steps: leave it out for a FILE")
            text = source_diff(a.config.step, b.config.step, root, arguments.fold_namespace)
            yield f"Source, {name_a} to {name_b}", text or "the same file\n", text
        if arguments.sass:
            found = diff_kernels(a.kernel, b.kernel)
            names = (name_a, name_b)
            yield f"SASS, {name_a} to {name_b}", diff_text(found, names), diff_as_json(found, names)


def report(matrix: Matrix, arguments: argparse.Namespace, root: Path) -> str:
    """The text for stdout, in the requested format."""
    if arguments.csv:
        return matrix_csv(matrix)
    found = list(diffs(matrix, arguments, root))
    if arguments.json:
        diffs_by_title = {title: data for title, _, data in found}
        return json_text(
            {"size": asked_size(arguments), **matrix_json(matrix), "diffs": diffs_by_title}
        )
    if arguments.markdown:
        parts = [matrix_markdown(matrix)]
        parts += [
            f"**{escaped_markdown(title)}**\n\n{fenced(text.rstrip(), 'diff')}"
            for title, text, _ in found
        ]
    else:
        parts = [matrix_text(matrix)]
        parts += [f"{title}\n{'=' * len(title)}\n{text.rstrip()}" for title, text, _ in found]
    return "\n\n".join(parts) + "\n"


def read_kernels(
    arguments: argparse.Namespace, results: BenchmarkResults | None
) -> list[KernelFacts]:
    """The requested kernels, in order, each on all requested architectures. Consecutive steps are
    read together. Raises ValueError."""
    found: list[list[KernelFacts]] = []
    asked = [(file_in(text), text) for text in arguments.kernels]
    for is_file, group in itertools.groupby(asked, key=lambda pair: pair[0] is not None):
        if is_file:
            found += [_of_file(where, arguments, results) for where, _ in group if where]
        else:
            found += _of_library([text for _, text in group], arguments, results)
    return [facts for on_each in found for facts in on_each]


def _of_file(
    where: KernelPath, arguments: argparse.Namespace, results: BenchmarkResults | None
) -> list[KernelFacts]:
    """The facts of a file's kernel on each architecture."""
    with progress_bar(f"read SASS of {where.path.name}") as progress:
        return [
            with_launch(file_facts(where, architecture, results, progress=progress), arguments)
            for architecture in dict.fromkeys(arguments.arch or [None])
        ]


def _in_dtypes(
    built: Sequence[Config], selectors: Sequence[str], dtypes: Sequence[Element], wanted: Wanted
) -> list[Config]:
    """Return one config per step, for each dtype in which all the steps are built.

    Raises UsageError if there is no such dtype.
    """
    found: dict[Config, None] = {}
    refusals = []
    for dtype in dtypes:
        try:
            found |= dict.fromkeys(choose_kernels(built, selectors, dtype, wanted))
        except UsageError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return list(found)


def _of_library(
    selectors: Sequence[str], arguments: argparse.Namespace, results: BenchmarkResults | None
) -> list[list[KernelFacts]]:
    """The facts of kernels in the installed library, on each architecture."""
    wanted = parse_config_option(arguments.config) if arguments.config else None
    found: list[list[KernelFacts]] = []
    for architecture in dict.fromkeys(arguments.arch or [ARCHITECTURE]):
        built = listed_configs(architecture)
        configs = _in_dtypes(built, selectors, parse_dtypes(arguments.dtype), wanted)
        require_options_of(arguments, {config.family.operation.name for config in configs})
        with progress_bar(f"read SASS of {architecture}") as progress:
            kernels = own_kernels(architecture, configs, progress=progress)
        found.append([config_facts(c, kernels[c], results, asked_size(arguments)) for c in configs])
    return [list(on_each) for on_each in zip(*found, strict=True)]


def compare(arguments: argparse.Namespace, root: Path) -> str:
    """Write the page if it is requested; return the text for stdout. `root`: of the repository,
    whose measurements and sources are shown. Raises ValueError and OSError."""
    results = results_for(arguments.results, root)
    matrix = facts_matrix(read_kernels(arguments, results), results)
    text = report(matrix, arguments, root)
    if arguments.html:
        write_if_different(arguments.html, matrix_page(matrix, root))
    return text


def main(argv: Sequence[str] | None, root: Path, command: str = COMMAND) -> int:
    """Compare and print; returns the exit status. `root`, `command`: as above."""
    arguments = parse_arguments(argv, command)
    return run_tool(lambda: print_text(compare(arguments, root)), ValueError, OSError)
