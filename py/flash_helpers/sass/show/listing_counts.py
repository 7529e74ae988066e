"""Instructions counted by opcode, in a listing, a file of counts or machine code."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_parser,
    print_text,
    run_tool,
)
from flash_helpers.console.progress import Progress, progress_bar
from flash_helpers.console.tables import Table, csv_text, json_text
from flash_helpers.sass.analyse.counts import WORK, Bucket, buckets
from flash_helpers.sass.read import reader
from flash_helpers.sass.read.choice import (
    NAMED_SO,
    Found,
    KernelPath,
    choose,
    require_one,
    require_one_architecture,
    require_one_member,
)
from flash_helpers.sass.read.listing import (
    COUNT_COLUMNS,
    counts_in_text,
    decode,
    is_binary,
    is_counts,
    parse_listing,
)
from flash_helpers.sass.read.records import Operation, SassError

_HEAD_BYTES = 4096  # that tell machine code from text


@dataclass(frozen=True)
class OpcodeCounts:
    """Numbers of each opcode in some code.

    `work`: executed and predicated instructions, or the numbers of a file of bare counts.
    `by_bucket`: opcodes by their bucket; None where a file of counts does not tell. `functions`:
    number of counted functions; None where a file of counts does not tell. `compiler`: compiler of
    machine code, such as "ptxas 13.0.88"; "" where unknown.
    """

    work: Counter[str]
    by_bucket: Mapping[Bucket, Counter[str]] | None
    functions: int | None = None
    compiler: str = ""

    def base(self) -> OpcodeCounts:
        """The same by opcode without modifiers."""
        by_bucket = {kind: _bases(counted) for kind, counted in (self.by_bucket or {}).items()}
        return replace(self, work=_bases(self.work), by_bucket=by_bucket or None)

    def records(self) -> list[dict[str, Any]]:
        """Opcode, and the numbers of COUNT_COLUMNS: most work first, None for unknown numbers."""
        opcodes = set(self.work).union(*(self.by_bucket or {}).values())
        ordered = sorted(opcodes, key=lambda name: (-self.work[name], name))
        return [{"opcode": o, **self._numbers(itemgetter(o))} for o in ordered]

    def totals(self) -> dict[str, int | None]:
        """The numbers of COUNT_COLUMNS, over all opcodes."""
        return self._numbers(Counter.total)

    def _numbers(self, number: Callable[[Counter[str]], int]) -> dict[str, int | None]:
        counted = {kind.value: found for kind, found in (self.by_bucket or {}).items()}
        counted[COUNT_COLUMNS[0]] = self.work
        return {c: number(counted[c]) if c in counted else None for c in COUNT_COLUMNS}


def _bases(counted: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for opcode, number in counted.items():
        found[opcode.partition(".")[0]] += number
    return found


def count_functions(functions: Iterable[Sequence[Operation]], compiler: str = "") -> OpcodeCounts:
    """Count whole functions, together."""
    by_bucket: dict[Bucket, Counter[str]] = {kind: Counter() for kind in Bucket}
    n_functions = 0
    for operations in functions:
        n_functions += 1
        for operation, kind in zip(operations, buckets(operations), strict=True):
            by_bucket[kind][operation.opcode] += 1
    work = sum((by_bucket[kind] for kind in WORK), Counter())
    return OpcodeCounts(work, by_bucket, n_functions, compiler)


def load_counts(
    path: Path,
    function: str | None = None,
    architecture: str | None = None,
    member: str = "",
    *,
    progress: Progress | None = None,
) -> OpcodeCounts:
    """Count what a file holds: a listing, a file of counts, or machine code.

    `function`: name of the function, as in `choice.matching`; "" or None takes all together.
    `architecture`: such as "sm_90"; needed where the file holds several. `member`, `progress`: as
    for `reader.load_kernels`.

    Raises OSError if the file cannot be read, and SassError for a file of another kind, and for a
    function, an architecture or a member that is not in it.
    """
    with path.open("rb") as file:  # once: a pipe cannot be read again
        data = file.read(_HEAD_BYTES)
        data += b"" if is_binary(data) else file.read()
    if is_binary(data):
        return _of_machine_code(path, function, architecture, member, progress)
    if member:
        raise SassError(f"{path} is a text, which has no member {member!r}")
    text = decode(data, str(path))
    if is_counts(text):
        return _counted(path, text, function, architecture)
    listed = parse_listing(text, str(path))
    chosen = _choose(path, [f.found for f in listed], function, architecture)
    return count_functions(f.operations for f in listed if f.found in chosen)


def _of_machine_code(
    path: Path,
    function: str | None,
    architecture: str | None,
    member: str,
    progress: Progress | None,
) -> OpcodeCounts:
    """One kernel is in memory at a time."""
    names = [function] if function else []
    chosen = reader.chosen_kernels(path, architecture, names, member)
    _require(path, [kernel.found for _, kernel in chosen], function)
    if function:
        require_one_member(str(path), chosen[0][1].symbol, [k.member for _, k in chosen])
    compilers = set()

    def functions() -> Iterator[Sequence[Operation]]:
        for kernel in reader.read_chosen(chosen, progress=progress):
            compilers.add(str(kernel.compiler))
            yield kernel.instructions

    counts = count_functions(functions())
    return replace(counts, compiler=" and ".join(sorted(compilers)))


def _require(path: Path, chosen: Sequence[Found], function: str | None) -> None:
    """Raise SassError unless the functions are of one architecture, and one if named."""
    if function:
        require_one(str(path), chosen)
    require_one_architecture(str(path), chosen)


def _choose(
    path: Path, there: Sequence[Found], function: str | None, architecture: str | None
) -> list[Found]:
    """One function, or all of them, of one architecture."""
    chosen = choose(str(path), there, architecture, [function] if function else [])
    _require(path, chosen, function)
    return chosen


def _counted(path: Path, text: str, function: str | None, architecture: str | None) -> OpcodeCounts:
    if function or architecture:
        raise SassError(
            f"{path} is a file of counts, which tells no function or architecture: name the "
            "listing it was made from"
        )
    found = counts_in_text(text, str(path))
    if len(found) < len(COUNT_COLUMNS):
        return OpcodeCounts(found[COUNT_COLUMNS[0]], None)
    return OpcodeCounts(+found[COUNT_COLUMNS[0]], {kind: +found[kind.value] for kind in Bucket})


def counts_as_text(counts: OpcodeCounts) -> str:
    """A table, most work first; `listing.counts_in_text` reads it back."""
    columns = COUNT_COLUMNS if counts.by_bucket is not None else COUNT_COLUMNS[:1]
    records = [*counts.records(), {"opcode": "total", **counts.totals()}]
    rows = [[str(record[name]) for name in (*columns, "opcode")] for record in records]
    return Table([*columns, "opcode"], rows, "r" * len(columns) + "l").text()


def counts_as_csv(counts: OpcodeCounts) -> str:
    """A row for each opcode."""
    rows = (list(record.values()) for record in counts.records())
    return csv_text(["opcode", *COUNT_COLUMNS], rows)


def counts_as_json(counts: OpcodeCounts) -> str:
    """The totals, and an object for each opcode."""
    return json_text(
        {
            "functions": counts.functions,
            "compiler": counts.compiler,
            "total": counts.totals(),
            "opcodes": counts.records(),
        }
    )


DESCRIPTION = """\
Count the instructions of SASS by opcode, most frequent first. The column count has instructions
that do work: executed (no guard) or predicated (a guard decides). It leaves out filler (@!PT,
@!UPT: never executed) and padding (which fills the section behind the code). FILE is a listing of
nvdisasm, cuobjdump -sass or extract_sass.py, or machine code: a cubin, an object file, a library.
A listing of nvdisasm -plr does not show all padding.
"""

EXAMPLES = """\
examples:
  one kernel of the library:
    tools/analysis/count_sass_instructions.sh --arch sm_90 \\
        flash_attention/libflash_attention.so#v1_bf16_d128_Br64_Bc64_w4_async_Q0_K0_V0
  a file, by opcode without modifiers:
    tools/analysis/count_sass_instructions.sh examples/own_kernel/row_softmax.sm_90.cubin --base
  counts to compare later:
    tools/analysis/count_sass_instructions.sh examples/own_kernel/row_softmax.sm_90.cubin \\
        > before.txt
  what a pipe brings:
    python tools/build/extract_sass.py examples/own_kernel/row_softmax.sm_90.cubin \\
        | tools/analysis/count_sass_instructions.sh -

exit status: 0 counted, 2 wrong usage, or a file that cannot be counted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES, prog="count_sass_instructions.sh")
    parser.add_argument(
        "file", metavar="FILE", type=KernelPath.parse, help=f"- is standard input; {NAMED_SO}"
    )
    add_choice_arguments(parser)
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--csv", action="store_true", help="CSV on stdout")
    machine.add_argument("--json", action="store_true", help="JSON on stdout, with the totals")
    return parser.parse_args(argv)


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a tool that counts files: --function, --arch and --base."""
    parser.add_argument(
        "--function",
        metavar="NAME",
        help="another way to give NAME (default: all functions together)",
    )
    add_architecture_argument(parser, "needed where a file holds several")
    parser.add_argument("--base", action="store_true", help="opcodes without their modifiers")


def count(arguments: argparse.Namespace) -> str:
    """The text to print. Raises SassError and OSError."""
    where = arguments.file
    path = Path("/dev/stdin") if str(where.path) == "-" else where.path
    function = where.name or arguments.function
    with progress_bar("reading") as progress:
        counts = load_counts(path, function, arguments.arch, where.member, progress=progress)
    if arguments.base:
        counts = counts.base()
    if arguments.csv:
        return counts_as_csv(counts)
    if arguments.json:
        return counts_as_json(counts)
    return counts_as_text(counts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: print_text(count(arguments)), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
