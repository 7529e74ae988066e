#!/usr/bin/env python3
"""Find the fastest configs of this GPU, by compiling and timing configs of the registry."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flash_helpers.compile.cache import Cache
from flash_helpers.compile.codegen import read_config_file
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.jit import Jit
from flash_helpers.console.command_line import (
    add_commit_argument,
    make_parser,
    not_negative,
    positive,
    positive_seconds,
    run_tool,
)
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import OPERATIONS, STEPS, Config, get_autotuning_kernel_configs
from flash_helpers.measure.asked import one_operation
from flash_helpers.measure.machine import git_commit
from flash_helpers.registry.config import ranges_text
from flash_helpers.registry.selection import (
    ALL,
    DTYPE_CHOICES,
    STEP_NAMES,
    UsageError,
    parse_dtypes,
    parse_steps,
    require_taken,
)
from flash_helpers.tune.measurer import Journal, Measurer
from flash_helpers.tune.process import WORKER_COMMAND, WorkerError, WorkerProcess
from flash_helpers.tune.sweep import (
    SCREEN_SIZES,
    Sweep,
    SweepRow,
    kernel_of,
    load_sweep,
    outcomes_text,
)
from flash_helpers.tune.winners import BestConfig, BestConfigs, best_file, gpu_slug, sweep_file

ROOT = Path(__file__).resolve().parents[2]
COMPILE_TIMEOUT_S = 300.0

DESCRIPTION = f"""\
Search for the fastest configs of this GPU. Candidates are compiled in the background, into machine
code for this GPU alone, and dropped if they spill or do not fit. The others are compared with
float64 and timed beside the operation's first library (PyTorch's flash backend for attention), in a
process that they may hang or crash.

The first round is at {" and ".join(map(str, SCREEN_SIZES))}, on the problems of pt_bench.py. Then
the fastest few of each step meet in one run at all sizes, under sustained load, and the harmonic
mean decides. Configs that are faster at single sizes are recorded. Configs for causal problems are
tuned on causal problems, in a contest of their own.

The winners are written to configs/best_GPU.json and all candidates to configs/sweep_GPU.json;
entries of other steps in these files stay. Measurements are kept in build/autotune, so that an
interrupted sweep can continue. A candidate that failed is not tried again, unless that folder is
deleted.
"""

EXAMPLES = """\
examples:
  the final kernel, within six minutes:
    python tools/benchmark/autotune.py --steps 16 --budget 240
  every step with options to tune, in both dtypes; it takes long and can be interrupted:
    python tools/benchmark/autotune.py --dtype all
  the last kernel of hopper in both dtypes, by length, causal too:
    python tools/benchmark/autotune.py --steps h30 --dtype all
  one winner of three steps, which may be a config of an earlier step:
    python tools/benchmark/autotune.py --steps h24 h26 h30 --together
  with tiles that spill a little, which can be faster:
    python tools/benchmark/autotune.py --steps 16 --allow-spills 128
  a few configs, as a JSON list of short forms or of fields:
    python tools/benchmark/autotune.py --configs few.json
  then check the winners, which are listed from now on:
    python tools/debug/sanity_check.py --small --kernel 16

exit status: 0 every step has a winner, 1 a step has none, 2 wrong usage or nothing was run,
130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--steps",
        nargs="+",
        default=[],
        metavar="STEP",
        help=f"{STEP_NAMES} (default: all steps of attention with options to tune)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="choose one winner of all steps; it is kept as the last step's, for attention()",
    )
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, default="bf16", help="(default: bf16)")
    for option, default, text in (
        ("", "those of the operation", "sizes (sequence lengths, widths) of the last round"),
        ("screen-", " ".join(map(str, SCREEN_SIZES)), "sizes of the first round"),
    ):
        parser.add_argument(
            *(f"--{option}seq", f"--{option}size"),
            dest=f"{option.replace('-', '_')}sizes",
            nargs="+",
            type=positive,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--configs", type=Path, metavar="FILE", help="try the configs of a JSON file only"
    )
    parser.add_argument(
        "--budget",
        type=positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="begin no candidate after so many seconds; the last round takes extra time",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=15.0,
        metavar="SECONDS",
        help="stop a kernel that takes longer than this at one length (default: 15)",
    )
    parser.add_argument(
        "--allow-spills",
        type=not_negative,
        default=0,
        metavar="BYTES",
        help="keep candidates that store and load up to so many bytes per thread (default: 0)",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        # One core launches kernels meanwhile.
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="compilers to run at once (default: one less than the number of cores)",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    add_commit_argument(parser)
    return parser.parse_args(argv)


def candidates(arguments: argparse.Namespace) -> list[Config]:
    """The configs to try. Raises OSError, and ValueError if there are none or a config of the file
    is not valid."""
    if arguments.configs:
        configs = read_config_file(arguments.configs)
    else:
        swept: Sequence[Config] = get_autotuning_kernel_configs()
        if not arguments.steps:
            usual = next(iter(OPERATIONS.values()))
            swept = [config for config in swept if config.family.operation == usual]
        configs = sorted({variant for config in swept for variant in config.variants()})
    dtypes = parse_dtypes(arguments.dtype)
    steps = parse_steps(arguments.steps or [ALL])
    chosen = [config for config in configs if config.dtype in dtypes and config.step in steps]
    if not chosen:
        tuned = [config.step for config in configs]
        raise UsageError(
            f"no config to try for --steps {' '.join(arguments.steps) or ALL} and dtype "
            f"{arguments.dtype}: steps with options to tune are "
            f"{ranges_text(step for step in STEPS.values() if step in tuned)}"
        )
    operation = one_operation(chosen)
    arguments.sizes = sorted(set(arguments.sizes or operation.measured_at))
    arguments.screen_sizes = sorted(set(arguments.screen_sizes or SCREEN_SIZES))
    by_options: dict[Any, list[Config]] = {}
    for config in chosen:
        by_options.setdefault(tuple(config.supports.options.items()), []).append(config)
    for own in by_options.values():
        sizes = (*arguments.sizes, *arguments.screen_sizes)
        require_taken(own, *(own[0].measured(size) for size in sizes))
    return chosen


class Bar:
    """A progress bar that shows the best candidate so far. first: the first library's name."""

    def __init__(self, bar: tqdm, first: str) -> None:
        self._bar, self._first = bar, first
        self._best = 0.0

    def __call__(self, row: SweepRow) -> None:
        if row.of_first is not None and row.of_first > self._best:
            self._best = row.of_first
            self._bar.set_postfix_str(f"best {row.of_first:.3f} of {self._first}: {row.name}")
        self._bar.update()


def winner_text(found: BestConfig) -> str:
    """One line for the winner, and one line per size at which another config is faster."""
    operation = found.operation
    lines = [
        f"{found.step} {found.dtype}: {found.config}, {found.mean_speed:.0f} "
        f"{operation.metric.unit}, {found.of_first:.3f} of "
        f"{operation.libraries[operation.first]}, of {found.n_candidates} timed"
    ]
    lines += [
        f"  at {at.size}: {at.config}, {at.of_mean:.3f} of the winner's speed"
        for at in found.at_sizes
        if at.of_mean > 1
    ]
    return "\n".join(lines)


def tune(arguments: argparse.Namespace, worker: WorkerProcess) -> int:
    """Search, write the files and print the winners; returns the exit status.

    Raises BuildError, OSError, ValueError, and WorkerError if no measuring process can be started.
    """
    begin = time.monotonic()
    configs = candidates(arguments)
    info = worker.start()
    folder = arguments.root / "configs"
    own = (info.gpu, info.compute_capability)
    best = BestConfigs.load_own(best_file(folder, info.gpu), BestConfigs(*own, ()))
    table = load_sweep(sweep_file(folder, info.gpu), *own)
    runs = [c for c in configs if c.family.runs_on(divmod(info.architecture, 10))]
    if not runs:
        raise UsageError(f"{info.gpu} runs none of the chosen steps: choose others with --steps")
    step = max((config.step.id for config in runs), key=list(STEPS).index)
    step = step if arguments.together else ""
    kernels = list(dict.fromkeys(kernel_of(config, step) for config in runs))
    found = (best.find(name, dtype.short, **dict(options)) for name, dtype, options in kernels)
    champions = [config for entry in found if entry for config in entry.at_size()]
    work = arguments.root / "build/autotune" / gpu_slug(info.gpu)
    sweep = Sweep(
        jit=Jit(arguments.root, Cache(work / "compiled"), find_compiler, arguments.jobs),
        measurer=Measurer(worker, info, Journal(work / "journal.jsonl"), arguments.timeout),
        sizes=arguments.sizes,
        screen_sizes=arguments.screen_sizes,
        spill_bytes=arguments.allow_spills,
        compile_s=COMPILE_TIMEOUT_S,
        deadline=begin + arguments.budget,
        date=datetime.now(timezone.utc).date().isoformat(),
        commit=arguments.commit or git_commit(arguments.root),
        step=step,
    )
    n_candidates = len({*configs, *champions})
    with bar(total=n_candidates, desc=f"tuning for {info.gpu}", unit="config") as shown:
        operation = runs[0].family.operation
        first = operation.short_name(operation.first)
        sweep.screen(configs, Bar(shown, first), champions)
    last_round = bar(kernels, desc="last round", unit="kernel")
    chosen = {kernel: sweep.choose(*kernel) for kernel in last_round}
    winners = [winner for winner in chosen.values() if winner is not None]
    table.updated(sweep.rows()).save(sweep_file(folder, info.gpu))
    if winners:
        best.updated(winners).save(best_file(folder, info.gpu))
    print(outcomes_text(sweep.rows()))
    print("\n".join([*sweep.measurer.notes, *map(winner_text, winners)]))
    missing = [
        " ".join([step, dtype.short, *(name for name, value in options if value)])
        for (step, dtype, options), winner in chosen.items()
        if winner is None
    ]
    if missing:
        print(f"no config could be timed: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit status."""
    arguments = parse_arguments(argv)

    def run() -> int:
        with WorkerProcess(WORKER_COMMAND) as worker:
            return tune(arguments, worker)

    told = "interrupted: the measurements are kept, and the same command continues there"
    try:
        return run_tool(run, OSError, ValueError, interrupted=told)
    except WorkerError as error:
        print(f"the sweep cannot be run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
