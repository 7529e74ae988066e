"""Mistakes planted in a kernel: each is an edit of its PTX, and the way in which it must be found.

Each operation lists its own faults (`faults` in its folder); `check.planting` plants them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_helpers.kernel_configs import FAMILIES, OPERATIONS, STEPS, Config, Element
from flash_helpers.ptx import Phase, SimulatorError
from flash_helpers.registry.selection import UsageError, parse_steps

Edit = Callable[[str], str]


class NotPlantedError(ValueError):
    """The PTX has no instruction that the fault can edit."""


PROLOGUE, MAIN_LOOP, EPILOGUE = Phase.PROLOGUE, Phase.MAIN_LOOP, Phase.EPILOGUE


def drop(line: str) -> str:
    """Leave the instruction out."""
    return ""


def swap(pattern: str, replacement: str) -> Edit:
    """Return an edit that replaces a pattern; it raises NotPlantedError if the pattern is
    absent."""

    def edit(line: str) -> str:
        changed = re.sub(pattern, replacement, line)
        if changed == line:
            raise NotPlantedError(f"{pattern} does not occur in {line.strip()!r}")
        return changed

    return edit


def of_warp(warp: int, edit: Edit) -> Edit:
    """Return an edit that applies `edit` to one warp only."""

    def both(line: str) -> str:
        return f"""{{
.reg .b32 %warp;
.reg .pred %fault;
mov.u32 %warp, %tid.x;
shr.u32 %warp, %warp, 5;
setp.eq.u32 %fault, %warp, {warp};
@%fault {edit(line).strip()}
@!%fault {line.strip()}
}}"""

    return both


def other_chunk(line: str) -> str:
    """Read the neighbouring 16 bytes of shared memory instead."""
    changed = swap(r"\[(%r\d+)(\+\d+)?\]", r"[%fault\2]")(line)
    address = re.search(r"\[(%r\d+)", line)
    assert address is not None
    return f"{{ .reg .b32 %fault; xor.b32 %fault, {address[1]}, 16;\n{changed}\n}}"


def leave(line: str) -> str:
    """End the last warp, once the thread index is known."""
    register = re.search(r"(%r\d+),", line)
    assert register is not None
    return f"{line}\n{{ .reg .pred %fault; setp.gt.u32 %fault, {register[1]}, 95;\n@%fault ret;\n}}"


@dataclass(frozen=True)
class Fault:
    """An edit of a step's kernel, and the way in which it is found.

    step: id. kernel: the one of the family's kernels that is edited, by its C++ function; "" is the
    first. instruction: regular expression of the PTX lines to edit. phase: only lines of this
    phase are edited. which: slice of these lines, in the order of their execution; None takes all.
    options: fixed by the config, such as a mask, for a config that is not its step's fixed one.

    A fault is found in one of two ways. Either the watcher raises `error`, at an instruction of a
    line of CUDA source that contains `source`. Or the output is wrong, and the first wrong quantity
    is `quantity`, in the turn-th block of keys that the kernel takes.
    warp, rows: place of the first wrong value, if it is checked. Rows are of the output, or for K
    of the block of keys.
    """

    step: str
    dtype: Element
    phase: Phase
    instruction: str
    edit: Edit
    which: slice | None = None
    error: type[SimulatorError] | None = None
    source: str = ""
    quantity: str = ""
    turn: int = 0
    warp: int | None = None
    rows: range | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kernel: str = ""

    @property
    def config(self) -> Config:
        """The step's config in the progression, or its variant with these options."""
        step = STEPS[self.step]
        fixed = FAMILIES[step.family].fixed_config(step, self.dtype)
        variants = [
            variant
            for variant in fixed.variants()
            if all(getattr(variant, name) == value for name, value in self.options.items())
        ]
        return variants[0]


def nth(n: int) -> slice:
    """Slice of one match only; negative numbers count from the end."""
    return slice(n, n + 1 or None)


def all_faults() -> dict[str, Fault]:
    """Return the faults of all operations, by name."""
    found: dict[str, Fault] = {}
    for operation in OPERATIONS.values():
        found |= operation.part("faults").FAULTS
    return found


def chosen_faults(step: str | None, words: Sequence[str]) -> list[str]:
    """Return the names of the faults of a step, a range, a family or all steps, if they contain the
    words in this order. Raises UsageError without a match."""
    steps = [found.id for found in parse_steps([step])] if step else None
    own = [name for name, fault in all_faults().items() if steps is None or fault.step in steps]
    text = " ".join(words).lower()
    chosen = [name for name in own if text in name.lower()]
    if not chosen:
        listed = "".join(f"\n  {name}" for name in own)
        raise UsageError(f"no mistake of {step} has {text!r} in its name; its mistakes are{listed}")
    return chosen
