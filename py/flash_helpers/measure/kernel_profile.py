"""Tables of the simulator's counts: kernels side by side, by opcode and by source line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from flash_helpers.console.tables import Table, change, number, records_csv
from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.ptx import Counts, Phase, Role
from flash_helpers.ptx.run.count.counts import ROLES
from flash_helpers.registry.selection import UsageError, names_of, require_supported

if TYPE_CHECKING:
    import torch

    from flash_helpers.ptx import Run

# Called as (config, inputs): runs the config in the simulator.
Simulate: TypeAlias = "Callable[[Config, Sequence[torch.Tensor]], Run]"

# The counts do not depend on the values.
_INPUTS = "normal"

_LABELS = {
    "instructions": "warp instructions",
    "mma": "mma",
    "wgmma": "wgmma",
    "shared_requests": "shared requests",
    "shared_wavefronts": "shared wavefronts",
    "bank_conflicts": "bank conflicts",
    "shared_bytes": "shared bytes",
    "global_requests": "global requests",
    "global_sectors": "global sectors",
    "global_bytes": "global bytes",
    "tma_requests": "TMA requests",
    "tma_boxes": "TMA boxes",
    "tma_bytes": "TMA bytes",
    "tma_sectors": "TMA sectors",
    "barriers": "barriers",
    "waits": "waits for async groups",
    "mbarrier_waits": "mbarrier waits",
    "blocked": "blocked warps",
}
_LINE_COLUMNS = {
    "instructions": "instr",
    "mma": "mma",
    "shared_wavefronts": "wavefr",
    "bank_conflicts": "confl",
    "global_sectors": "sectors",
}
_OVERVIEW = (
    "instructions",
    "mma",
    "wgmma",
    "shared_wavefronts",
    "bank_conflicts",
    "global_sectors",
    "tma_bytes",
    "barriers",
    "waits",
    "mbarrier_waits",
)
_MOST_SIDE_BY_SIDE = 4


@dataclass(frozen=True)
class KernelProfile:
    """Counts of one launch. config: asked for. ran: the config that was launched for it."""

    config: Config
    ran: Config
    shape: Problem
    run: Run

    @property
    def phases(self) -> dict[str, Counts]:
        """Counts of the whole kernel and of each of its phases, by name."""
        parts = {phase.value: counts for phase, counts in self.run.counters.by_phase().items()}
        return {"whole kernel": self.run.counters.total, **parts}

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Counts by role, as in `Counters.by_role`."""
        return self.run.counters.by_role()


@dataclass(frozen=True)
class SourceLine:
    """One line of a kernel's file; counts is None where nothing was executed."""

    number: int
    text: str
    counts: Counts | None


def profile_kernels(
    configs: Sequence[Config], shape: Problem, simulate: Simulate
) -> list[KernelProfile]:
    """Run each config once on a shape.

    simulate: runs a config on inputs, and returns the run.

    Raises UsageError if the sequence is not a whole number of blocks, and what `simulate` raises.
    """
    require_supported(configs, shape)
    profiles = []
    for config in configs:
        inputs = config.family.operation.part("inputs").draw(_INPUTS, shape.in_dtype(config.dtype))
        run = simulate(config, list(inputs.values()))
        profiles.append(KernelProfile(config, config.runs_as(shape.strides()), shape, run))
    return profiles


def as_dict(counts: Counts) -> dict[str, int]:
    """Counts by name, bank conflicts included."""
    return {**asdict(counts), "bank_conflicts": counts.bank_conflicts}


def _digits(value: float | None) -> int:
    return 2 if isinstance(value, float) else 0


def _cells(values: Sequence[float | None]) -> list[str]:
    """Cells of the numbers; from the second on with the change from the number before, and empty
    where a number is missing."""
    cells: list[str] = []
    for n, value in enumerate(values):
        cells.append("" if value is None else number(value, _digits(value)))
        if n:
            cells.append(change(values[n - 1], value, _digits(value)))
    return cells


def _side_by_side(
    profiles: Sequence[KernelProfile],
    rows: Iterable[tuple[str, Sequence[float | None]]],
    title: str = "",
) -> str:
    first, *others = names_of([profile.config for profile in profiles])
    header = ["", first, *(cell for name in others for cell in (name, "change"))]
    return Table(header, [[label, *_cells(values)] for label, values in rows], title=title).text()


def _per(unit: str, counts: Counts, name: str) -> float | None:
    """A count per instruction of a unit, mma or wgmma; None without such instructions."""
    count = getattr(counts, unit)
    return getattr(counts, name) / count if count else None


def _count_rows(each: Sequence[Counts]) -> Iterable[tuple[str, list[float | None]]]:
    for name, label in _LABELS.items():
        values: list[float | None] = [getattr(counts, name) for counts in each]
        if any(values):
            yield label, values
    for unit, name in product(("mma", "wgmma"), ("instructions", "shared_wavefronts")):
        shares = [_per(unit, counts, name) for counts in each]
        if any(shares):
            yield f"{_LABELS[name]} per {unit}", shares


def _role_rows(
    profiles: Sequence[KernelProfile], name: str
) -> Iterable[tuple[str, list[float | None]]]:
    """Rows of one role: its warps, their counts in the whole kernel, and in the main loop."""
    each = [profile.roles.get(name, Role((), {})) for profile in profiles]
    none: list[float | None] = [None] * len(profiles)
    yield f"[{name}]", none
    if any(role.warps for role in each):
        yield "warps of a block", [len(role.warps) for role in each]
    yield from _count_rows([role.total for role in each])
    in_loop = list(_count_rows([role.phases.get(Phase.MAIN_LOOP, Counts()) for role in each]))
    if in_loop:
        yield f"[{name}, {Phase.MAIN_LOOP.value}]", none
        yield from in_loop


def comparison_text(profiles: Sequence[KernelProfile]) -> str:
    """Text of all counts by phase, one column per kernel, with the change from the kernel to its
    left. Counts by role follow, unless all warps of each kernel do the same."""
    rows: list[tuple[str, Sequence[float | None]]] = []
    for phase in profiles[0].phases:
        counts = [profile.phases[phase] for profile in profiles]
        rows += [(f"[{phase}]", [None] * len(profiles)), *_count_rows(counts)]
    if any(len(profile.roles) > 1 for profile in profiles):
        for name in ROLES:
            if any(name in profile.roles for profile in profiles):
                rows += _role_rows(profiles, name)
    return _side_by_side(profiles, rows)


def opcode_text(profiles: Sequence[KernelProfile], phase: Phase | None = None) -> str:
    """Warp instructions by opcode, one column per kernel, the most frequent opcode first.

    phase: count only the instructions executed in this phase.
    """
    each = [profile.run.counters.by_opcode(phase) for profile in profiles]
    found = {opcode for counts in each for opcode in counts}
    counts_of = {
        opcode: [c[opcode].instructions if opcode in c else 0 for c in each] for opcode in found
    }
    rows = sorted(counts_of.items(), key=lambda row: (-max(row[1]), row[0]))
    title = "whole kernel" if phase is None else phase.value
    return _side_by_side(profiles, rows, f"warp instructions by opcode, {title}")


def overview_text(profiles: Sequence[KernelProfile]) -> str:
    """Table of one line per kernel: totals, without those that are zero for all kernels, and the
    change of instructions per mma."""
    rows = []
    before: float | None = None
    totals = [profile.run.counters.total for profile in profiles]
    columns = [name for name in _OVERVIEW if any(getattr(total, name) for total in totals)]
    names = names_of([profile.config for profile in profiles])
    for name, profile, total in zip(names, profiles, totals, strict=True):
        share = _per("mma", profile.phases[Phase.MAIN_LOOP.value], "instructions")
        counts = (number(getattr(total, column)) for column in columns)
        own, changed = _cells([before, share])[1:]
        rows.append([name, profile.config.step.idea, *counts, own, changed])
        before = share
    header = [
        "",
        "idea",
        *(_LABELS[column] for column in columns),
        "main-loop instructions per mma",
        "change",
    ]
    return Table(header, rows, "ll").text(maxheadercolwidths=14)


def profile_text(profiles: Sequence[KernelProfile], by_opcode: bool = False) -> str:
    """Text of the profiles: side by side, or one line each if they are many."""
    shape = profiles[0].shape
    parts = [f"{shape}; counted in the simulator; PTX instructions of one warp"]
    for profile in profiles:
        if profile.ran != profile.config:
            parts.append(
                f"{profile.config.short_form()} was run by {profile.ran.short_form()}: it is made "
                f"for other strides than those of {shape}"
            )
    of_several = {p.ran.step.id: p.ran.main_kernel for p in profiles if len(p.ran.kernels) > 1}
    if of_several:
        named = ", ".join(f"{kernel} of {step}" for step, kernel in of_several.items())
        parts.append(f"{named}; other kernels of a call are not counted")
    if len(profiles) > _MOST_SIDE_BY_SIDE:
        parts.append(overview_text(profiles))
    else:
        parts.append(comparison_text(profiles))
    if by_opcode:
        parts += ["", opcode_text(profiles), "", opcode_text(profiles, Phase.MAIN_LOOP)]
    return "\n".join(parts)


def source_lines(profile: KernelProfile, root: Path) -> list[SourceLine]:
    """Each line of the kernel's own file with its counts, inlined helpers included.

    root: of the repository. Raises UsageError if the file is absent.
    """
    path = root / profile.ran.step.source
    if not path.is_file():
        raise UsageError(f"{path} is not there: run the tool from a checkout of the repository")
    counts = profile.run.counters.lines_of(str(profile.ran.step.source))
    return [
        SourceLine(number, text, counts.get(number))
        for number, text in enumerate(path.read_text().splitlines(), start=1)
    ]


def is_out_of_date(lines: Sequence[SourceLine]) -> bool:
    """True if the kernel was built from another text, so that empty lines or comments have
    counts."""
    return any(
        line.counts is not None and (not line.text.strip() or line.text.lstrip().startswith("//"))
        for line in lines
    )


def annotated_source_text(profile: KernelProfile, lines: Sequence[SourceLine]) -> str:
    """The source of a kernel with a margin of counts."""
    total = profile.run.counters.total
    widths = {
        name: max(len(title), len(f"{getattr(total, name):,}"))
        for name, title in _LINE_COLUMNS.items()
    }
    margin = " ".join(f"{title:>{widths[name]}}" for name, title in _LINE_COLUMNS.items())
    header = f"{margin}      % | line | {profile.ran.step.source}"
    rows = [header, "-" * len(header)]
    for line in lines:
        counts, share = line.counts or Counts(), ""
        values = {name: getattr(counts, name) for name in widths}
        cells = (f"{f'{values[n]:,}' if values[n] else '':>{w}}" for n, w in widths.items())
        if line.counts:
            share = f"{100 * counts.instructions / total.instructions:.1f}"
        rows.append(f"{' '.join(cells)} {share:>6} | {line.number:4} | {line.text}".rstrip())
    inside = sum(line.counts.instructions for line in lines if line.counts)
    rows.append(
        f"{inside:,} of {total.instructions:,} warp instructions are on lines of this file; code "
        "inlined from headers counts where it is called"
    )
    return "\n".join(rows)


def profiles_as_json(profiles: Sequence[KernelProfile]) -> dict[str, Any]:
    """JSON document of all counts, without the source lines."""
    shape = profiles[0].shape
    return {
        "problem": shape.record(),
        "kernels": [
            {
                "step": profile.config.step.id,
                "config": profile.config.short_form(),
                "ran": profile.ran.short_form(),
                "phases": {name: as_dict(counts) for name, counts in profile.phases.items()},
                "roles": {
                    name: {
                        "warps": list(role.warps),
                        "phases": {p.value: as_dict(c) for p, c in role.phases.items()},
                    }
                    for name, role in profile.roles.items()
                },
                "opcodes": {
                    phase.value: {
                        opcode: as_dict(counts)
                        for opcode, counts in profile.run.counters.by_opcode(phase).items()
                    }
                    for phase in Phase
                },
            }
            for profile in profiles
        ],
    }


def source_as_json(profile: KernelProfile, lines: Sequence[SourceLine]) -> dict[str, Any]:
    """JSON document of the source lines with counts."""
    return {
        "config": profile.config.short_form(),
        "ran": profile.ran.short_form(),
        "file": str(profile.ran.step.source),
        "lines": [
            {"line": line.number, "text": line.text, **as_dict(line.counts)}
            for line in lines
            if line.counts
        ],
    }


def profiles_as_csv(profiles: Sequence[KernelProfile]) -> str:
    """CSV of one row per kernel, phase and opcode."""
    return records_csv(
        [
            {
                "config": p.ran.short_form(),
                "step": p.ran.step.id,
                **p.shape.in_dtype(p.ran.dtype).record(),
                "phase": phase.value,
                "opcode": opcode,
                **as_dict(counts),
            }
            for p in profiles
            for phase in Phase
            for opcode, counts in p.run.counters.by_opcode(phase).items()
        ]
    )


def source_as_csv(profile: KernelProfile, lines: Sequence[SourceLine]) -> str:
    """CSV of one row per source line with counts."""
    found = source_as_json(profile, lines)
    own = {"config": found["ran"], "file": found["file"]}
    return records_csv([own | line | {"text": line["text"].strip()} for line in found["lines"]])
