"""A diff of machine code, for a reader and for a machine."""

from __future__ import annotations

import itertools
from typing import Any

from flash_helpers.console.tables import Table
from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.diff import ALIKE, MEANING, Change, KernelDiff, Likeness, Tally
from flash_helpers.sass.read.symbols import with_demangled_symbols

_HEADER = ("", *(name.replace("_", "\n") for name in Tally._fields))
_NO_ADDRESS = " " * 4
_MOST_DELTAS = 12


def _cells(name: str, tally: Tally) -> list[str]:
    return [name, *(str(number or "") for number in tally)]


def summary_text(diff: KernelDiff, names: tuple[str, str]) -> str:
    """Numbers of instructions by likeness, and by phase and class of opcode."""
    n_before, n_after = len(diff.before.instructions), len(diff.after.instructions)
    architectures = dict.fromkeys((diff.before.architecture, diff.after.architecture))
    verdict = (
        "equal: the same encodings in the same order"
        if diff.equal
        else "not equal: their encodings differ"
    )
    lines = [
        f"{names[0]} to {names[1]}, {' to '.join(architectures)}: {n_before:,} to {n_after:,} "
        f"instructions, padding included; {verdict}"
    ]
    if not diff.by_ptx:
        lines.append(
            "aligned by their own text only, since one of the two holds no PTX that can be read"
        )
    lines += [
        f"  {diff.likenesses[likeness]:>6,} {likeness.value}: {MEANING[likeness]}"
        for likeness in Likeness
        if diff.likenesses[likeness]
    ]
    if diff.moved:
        lines.append(f"  {diff.moved:>6,} of them moved: they stand elsewhere among the others")
    rows = []
    for phase, tallies in diff.tallies().items():
        if tallies:
            rows.append(
                _cells(f"[{phase.value}]", Tally(*map(sum, zip(*tallies.values(), strict=True))))
            )
            rows += [_cells(name, tally) for name, tally in tallies.items()]
    table = Table(_HEADER, rows).text()
    deltas = diff.opcode_deltas()
    changes = ", ".join(f"{opcode} {b - a:+d}" for opcode, a, b in deltas[:_MOST_DELTAS])
    if len(deltas) > _MOST_DELTAS:
        changes += f", {len(deltas) - _MOST_DELTAS} more"
    return "\n".join([*lines, "", table, "", f"opcodes: {changes or 'as many of each'}"])


def _address(change: Change, after: bool) -> str:
    side = change.after if after else change.before
    return _NO_ADDRESS if side is None else f"{side.instruction.address:04x}"


def change_line(change: Change) -> str:
    """One line: mark, address before, address after, text."""
    before, after = change.before, change.after
    text = with_demangled_symbols(change.side.instruction.text)
    mark = " "
    if change.likeness is Likeness.ADDED:
        mark = "+"
    elif change.likeness is Likeness.REMOVED:
        mark = "-"
    elif before is not None and after is not None:
        if change.moved:
            mark = ">"
        if change.likeness is Likeness.CHANGED:
            mark = "}" if change.moved else "~"
            text += f"   (was {with_demangled_symbols(before.instruction.text)})"
        if before.phase != after.phase:
            text += f"   (from the {before.phase.value})"
    return f"{mark} {_address(change, False)} {_address(change, True)}  {text}"


def listing_text(diff: KernelDiff) -> str:
    """Every instruction that is new, gone, changed or moved, with runs of the others folded."""
    lines = [
        "+ added, - removed, ~ changed, > moved, } moved and changed; addresses before and after"
    ]
    for phase in Phase:
        lines += ["", f"[{phase.value}]"]
        changes = (change for change in diff.changes if change.side.phase is phase)
        for is_news, found in itertools.groupby(changes, lambda change: change.is_news):
            texts = [change_line(change) for change in found]
            lines += texts if is_news else [f"            ... {len(texts)} alike"]
    return "\n".join(lines)


def diff_text(diff: KernelDiff, names: tuple[str, str]) -> str:
    """Summary and listing; of equal kernels the summary alone."""
    summary = summary_text(diff, names)
    return summary if diff.equal else f"{summary}\n\n{listing_text(diff)}"


def diff_as_json(diff: KernelDiff, names: tuple[str, str]) -> dict[str, Any]:
    """The same for a machine; instructions that are alike are left out of the changes."""
    return {
        "before": names[0],
        "after": names[1],
        "equal": diff.equal,
        "aligned_by_ptx": diff.by_ptx,
        "likenesses": {likeness.value: diff.likenesses[likeness] for likeness in Likeness},
        "moved": diff.moved,
        "phases": {
            phase.value: {name: tally._asdict() for name, tally in tallies.items()}
            for phase, tallies in diff.tallies().items()
        },
        "changes": [
            {
                "likeness": change.likeness.value,
                "moved": change.moved,
                **{
                    name: side
                    and {
                        "address": side.instruction.address,
                        "text": side.instruction.text,
                        "ptx_line": side.instruction.ptx_line,
                        "phase": side.phase.value,
                    }
                    for name, side in (("before", change.before), ("after", change.after))
                },
            }
            for change in diff.changes
            if change.is_news or change.likeness not in ALIKE
        ],
    }
