"""Our counts of what a kernel executes, beside Nsight Compute's of the same launches.

What the checks share: quantities, records, verdicts, tables, the file, and the tools' command line.
What is left to each is its list of quantities and how it counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from flash_helpers.console.command_line import (
    add_commit_argument,
    output_file,
    output_folder,
    positive,
    write_or_check,
)
from flash_helpers.console.tables import Table
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.benchmark_tables import replace_between_markers
from flash_helpers.measure.nsight import (
    FORWARD_KERNEL,
    NsightCompute,
    ProfiledLaunch,
    ProfilerError,
    find_launch,
)
from flash_helpers.measure.results import Provenance, RecordFile
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.selection import add_kernel_arguments


@dataclass(frozen=True)
class Quantity:
    """Something that both count.

    metrics: of Nsight Compute; the first that the GPU has is compared. keys: of our counts, added
    up; the name if there are none. tolerance: relative difference that counts as agreement; None
    where no agreement is claimed.
    """

    name: str
    metrics: tuple[str, ...]
    keys: tuple[str, ...] = ()
    tolerance: float | None = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """The keys of our counts that are added up."""
        return self.keys or (self.name,)

    def agrees(self, predicted: float, counted: float | None) -> bool:
        """Whether nothing speaks against it."""
        if self.tolerance is None or counted is None:
            return True
        return abs(predicted - counted) <= self.tolerance * max(predicted, counted)


@dataclass(frozen=True, kw_only=True)
class CountedLaunch:
    """One launch of one kernel. name: the short form of its config.

    predicted: our counts, by name; a quantity of which some are missing is not compared. hardware:
    by metric; None where the GPU has no number.
    """

    name: str
    batch: int
    n_heads: int
    seq_len: int
    predicted: Mapping[str, int]
    hardware: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads, length."""
        return self.batch, self.n_heads, self.seq_len

    def metric(self, quantity: Quantity) -> str | None:
        """The metric that is compared, if the GPU has one."""
        return next((m for m in quantity.metrics if self.hardware.get(m) is not None), None)

    def has(self, quantity: Quantity) -> bool:
        """Whether we count it in this kernel."""
        return all(key in self.predicted for key in quantity.parts)

    def counted(self, quantity: Quantity) -> tuple[int, float | None]:
        """Our count, and the GPU's, which is None if it has none."""
        predicted = sum(self.predicted[key] for key in quantity.parts)
        metric = self.metric(quantity)
        return predicted, None if metric is None else self.hardware[metric]


@dataclass(frozen=True, kw_only=True)
class CounterCheck(RecordFile):
    """Everything that one run of a check found.

    MARKERS: around the tables of its page; a check of family hopper alone has that name in its own.
    QUANTITIES: what is compared. SIDES: where the two counts come from. UNCLAIMED: what the table
    says of a quantity without a tolerance. NOTE: stands over the table by kernel. LEFT_OUT: what is
    not compared of family hopper, and why.

    profiler: version of Nsight Compute. profiler_failure: why counters are missing; else empty.
    """

    MARKERS: ClassVar[tuple[str, str]]
    LEFT_OUT: ClassVar[str]
    QUANTITIES: ClassVar[tuple[Quantity, ...]]
    SIDES: ClassVar[tuple[str, str]]
    UNCLAIMED: ClassVar[str]
    NOTE: ClassVar[str] = ""

    provenance: Provenance
    profiler: str
    profiler_failure: str
    kernels: tuple[CountedLaunch, ...]

    def disagreements(self) -> list[str]:
        """A line for each count of a kernel that should agree and does not."""
        lines = []
        for record in self.kernels:
            for quantity in filter(record.has, self.QUANTITIES):
                predicted, counted = record.counted(quantity)
                if not quantity.agrees(predicted, counted):
                    lines.append(
                        f"{record.name}: {quantity.name}: {predicted:,} {self.SIDES[0]}, "
                        f"{counted:,.0f} {self.SIDES[1]} ({record.metric(quantity)})"
                    )
        return lines

    def tables(self) -> str:
        """Markdown: a row a quantity over all kernels, a row a kernel, and where it was measured.

        Raises ValueError for a check without kernels.
        """
        if not self.kernels:
            raise ValueError("the check holds no kernel: run it on a machine with a GPU")
        header = ["quantity", "equal", "largest difference", "agrees", "metric of Nsight Compute"]
        counted = [q for q in self.QUANTITIES if any(record.has(q) for record in self.kernels)]
        by_quantity = Table(header, [self._quantity_row(q) for q in counted])
        parts = [by_quantity.markdown(), self.NOTE, self.kernel_table().markdown()]
        if any(map(is_on_wgmma, self.kernels)):
            parts.append(self.LEFT_OUT)
        if self.profiler_failure:
            parts.append(f"Without some counters: {self.profiler_failure.splitlines()[0]}")
        shapes = dict.fromkeys(record.shape for record in self.kernels)
        sizes = " and ".join(", ".join(map(str, shape)) for shape in shapes)
        parts.append(
            self.provenance.sentence(self.made_by, self.profiler, f"batch, heads, seq_len {sizes}")
        )
        return "\n\n".join(filter(None, parts))

    @property
    def markers(self) -> tuple[str, str]:
        """Around the tables of its page."""
        if not all(map(is_on_wgmma, self.kernels)):
            return self.MARKERS
        begin, end = (marker.replace(":", f"-{HOPPER.name}:") for marker in self.MARKERS)
        return begin, end

    @abstractmethod
    def kernel_table(self) -> Table:
        """A row a kernel."""

    @property
    def made_by(self) -> str:
        """What the kernels were compiled with."""
        return self.provenance.built_with

    def _quantity_row(self, quantity: Quantity) -> list[str]:
        pairs = [record.counted(quantity) for record in self.kernels if record.has(quantity)]
        measured = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
        if not measured:
            return [quantity.name, "not measured", "", "", ""]
        equal = sum(ours == theirs for ours, theirs in measured)
        worst = max(abs(a - b) / max(a, b) if max(a, b) else 0.0 for a, b in measured)
        if not all(quantity.agrees(*pair) for pair in measured):
            verdict = "**no**"
        elif quantity.tolerance:
            verdict = f"within {100 * quantity.tolerance:.0f}%"
        else:
            is_claimed = quantity.tolerance is not None or equal == len(measured)
            verdict = "yes" if is_claimed else self.UNCLAIMED
        there = filter(None, (r.metric(quantity) for r in self.kernels if r.has(quantity)))
        metrics = sorted(set(there))
        names = ", ".join(f"`{metric}`" for metric in metrics)
        shares = [f"{equal} of {len(measured)}", f"{100 * worst:.2g}%"]
        return [quantity.name, *shares, verdict, names]


def is_on_wgmma(record: CountedLaunch) -> bool:
    """Whether the kernel is one of family hopper."""
    return record.name.partition("_")[0] in HOPPER.steps


Record = TypeVar("Record", bound=CountedLaunch)
Check = TypeVar("Check", bound=CounterCheck)


def shape_for(config: Config, seq_len: int) -> AttentionForward:
    """A problem for which a config itself is launched: one head, or as many as give it its row
    stride; then the sequence is shorter by the square root of the heads, so that all take the same
    time."""
    d_head, block = config.supports.d_heads[0], config.supports.whole
    one = AttentionForward(1, 1, block, d_head, config.dtype)
    heads = config.own_row_stride(one) // d_head
    shorter = max(block, int(seq_len / heads**0.5) // block * block)
    return AttentionForward(1, heads, shorter, d_head, config.dtype, causal=config.supports.causal)


def count_launches(
    records: Sequence[CountedLaunch],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str],
    *,
    instances: bool = False,
) -> tuple[list[ProfiledLaunch | None], list[str]]:
    """What Nsight Compute counts of each record's launch, and why some are missing.

    launcher: command of a program that takes --kernel, --batch, --heads and --seq and launches the
    kernels once; it is run once for each shape. instances: as of `NsightCompute.profile`.
    """
    found: dict[tuple[int, int, int], list[ProfiledLaunch]] = {}
    failures = []
    for shape in dict.fromkeys(record.shape for record in records):
        sizes = zip(("--batch", "--heads", "--seq"), map(str, shape), strict=True)
        command = [*launcher, *itertools.chain(*sizes), "--kernel"]
        command += [record.name for record in records if record.shape == shape]
        raw = "x".join(map(str, shape)) + ("_instances" if instances else "")
        try:
            found[shape] = profiler.profile(
                command, FORWARD_KERNEL, metrics, raw, instances=instances
            )
        except ProfilerError as error:
            failures.append(str(error))
    return [find_launch(r.name, found.get(r.shape, ())) for r in records], failures


def with_hardware(record: Record, launch: ProfiledLaunch | None, metrics: Sequence[str]) -> Record:
    """The record with the counters of its launch; as it is without one."""
    if launch is None:
        return record
    return replace(record, hardware={metric: launch.values.get(metric) for metric in metrics})


def with_counters(
    records: Sequence[Record],
    profiler: NsightCompute,
    launcher: Sequence[str],
    metrics: Sequence[str],
) -> tuple[list[Record], list[str]]:
    """The records with hardware counters, and why some have none; as of `count_launches`."""
    launches, failures = count_launches(records, profiler, launcher, metrics)
    pairs = zip(records, launches, strict=True)
    return [with_hardware(record, launch, metrics) for record, launch in pairs], failures


# -- the command line ------------------------------------------------------------------------------


def add_check_arguments(
    parser: argparse.ArgumentParser, root: Path, results: Path, page: Path
) -> argparse._MutuallyExclusiveGroup:
    """Add the kernels, the shape, and where numbers go; returns the group of --write-docs, --check.

    results, page: relative to root.
    """
    add_kernel_arguments(parser)
    parser.add_argument("--seq", type=positive, default=512, help="sequence length (default: 512)")
    parser.add_argument(
        "--json",
        type=output_file,
        default=root / results,
        metavar="FILE",
        help=f"where the numbers go or come from (default: {results})",
    )
    parser.add_argument("--raw", type=output_folder, metavar="DIR", help="keep all that ncu wrote")
    add_commit_argument(parser)
    parser.add_argument("--docs", type=Path, default=root / page, help=f"(default: {page})")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write-docs", action="store_true", help="write the table from the file")
    action.add_argument(
        "--check", action="store_true", help="write nothing; print a diff and exit 1 if stale"
    )
    return action


def run_check(
    arguments: argparse.Namespace, kind: type[Check], measure: Callable[[], Check]
) -> int:
    """Write or check the page, or measure, save and print; returns the exit status: 1 if the page
    was stale, or not all was counted and agrees. Raises OSError, ValueError, and as `measure` does.
    """
    if arguments.write_docs or arguments.check:
        old = arguments.docs.read_text(encoding="utf-8")
        check = kind.load(arguments.json)
        new = replace_between_markers(old, check.tables(), *check.markers)
        return write_or_check(arguments.docs, old, new, arguments.check)
    check = measure()
    check.save(arguments.json)
    disagreements = check.disagreements()
    print("\n".join([check.tables(), "", *(disagreements or ["all counts agree"])]))
    if check.profiler_failure:
        print(check.profiler_failure, file=sys.stderr)
    return 1 if disagreements or check.profiler_failure else 0
