"""Kinds of blocks: their arguments on a page, and the functions that make their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from flash_helpers.course.arguments import Arguments, parse_arguments
from flash_helpers.course.clock_blocks import (
    best_block,
    calls_block,
    choice_block,
    clock_block,
    compilers_block,
    first_calls_block,
    lengths_block,
    loads_block,
    map_block,
    progression_block,
    speeds_block,
    staircase_block,
    stairs_block,
    supports_block,
)
from flash_helpers.course.counter_blocks import counters_block
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.excerpts import MOST_LINES, excerpt_block
from flash_helpers.course.gradient_blocks import training_block
from flash_helpers.course.links import nav_block, next_block, path_block, picture_block
from flash_helpers.course.number_blocks import SOURCES, numbers_block
from flash_helpers.course.result_blocks import autograd_block, multimodal_block
from flash_helpers.course.ring_blocks import TABLES, ring_block, rings_block
from flash_helpers.course.sass_blocks import (
    bound_block,
    listing_block,
    live_registers_block,
    sass_block,
)
from flash_helpers.course.short_forms import short_forms_block
from flash_helpers.course.step_blocks import diff_block, facts_block
from flash_helpers.registry.selection import UsageError

OUTPUT_KIND = "output"  # its text is the output of commands: see `commands`
DEFAULT_OUTPUT_LINES = 20
OUTPUT_USAGE = f"[lines={DEFAULT_OUTPUT_LINES}]"
OUTPUT_MEANING = "a console block with the output of its commands, of each the first lines= lines"
PICTURE_KIND = "picture"
FACTS_KIND = "facts"


@dataclass(frozen=True)
class Kind:
    """One kind of block.

    usage: its arguments. meaning: its contents. render: makes its text. fewest, most: number of
    words; None allows any number. options: names before "=".
    """

    usage: str
    meaning: str
    render: Callable[[Evidence, Arguments], str]
    fewest: int = 0
    most: int | None = 0
    options: tuple[str, ...] = ()


def _about_a_step(meaning: str, render: Callable[[Evidence, Arguments], str]) -> Kind:
    return Kind("N", meaning, render, 1, 1)


def _about_kernels(
    meaning: str, render: Callable[[Evidence, Arguments], str], *, arch: bool = True
) -> Kind:
    usage = "KERNEL [KERNEL ...]" + (" [arch=sm_80]" if arch else "")
    meaning += " (for a single step: its parent and the step)"
    return Kind(usage, meaning, render, 1, None, ("arch",) if arch else ())


KINDS: Mapping[str, Kind] = {
    FACTS_KIND: _about_a_step("the resources of a step, beside its parent", facts_block),
    "diff": _about_a_step("the code that a step changed, without comments", diff_block),
    "counters": _about_kernels("the simulator's counts", counters_block, arch=False),
    "sass": _about_kernels("instructions by phase and class", sass_block),
    "numbers": Kind(
        "KERNEL [KERNEL ...] [sass=REGEX] [counters=REGEX] [bound=REGEX] [clock=REGEX] "
        "[arch=sm_80]",
        "rows of these tables by their labels; sass also has a row per phase and opcode, such as "
        '"main loop, LDSM"',
        numbers_block,
        1,
        None,
        (*SOURCES, "arch"),
    ),
    "bound": _about_kernels("static lower bounds", bound_block),
    "listing": Kind(
        "KERNEL [REGEX] [at=REGEX] [lines=12] [phase=main|prologue|epilogue] [arch=sm_80]",
        "the first instructions that match, by their text, or by the CUDA line at=",
        listing_block,
        1,
        None,
        ("at", "lines", "phase", "arch"),
    ),
    "clock": _about_a_step("measured times and published figures", clock_block),
    "excerpt": Kind(
        "N|HEADER [FUNCTION ...] [phase=4] [at=REGEX] [lines=12]",
        "code of a step's file or of a header in src/include: functions by name, a numbered "
        f"phase, lines from the first that matches; {MOST_LINES} at most",
        excerpt_block,
        1,
        None,
        ("phase", "at", "lines"),
    ),
    "stairs": _about_a_step("the staircases with a step lit, and its number", stairs_block),
    "staircase": Kind("", "the plot of the progression", staircase_block),
    "speeds": Kind("FAMILY", "the plot of a family's speeds by length", speeds_block, 1, 1),
    "loads": Kind(
        "NAME", "benchmarks/results/NAME.json, in bursts and sustained", loads_block, 1, 1
    ),
    "lengths": Kind(
        "NAME [STEP ...] [dtype=bf16] [load=burst]",
        "the same file by length, beside the best of the libraries",
        lengths_block,
        1,
        None,
        ("dtype", "load"),
    ),
    "map": Kind("", "all steps with their pages, ideas and numbers", map_block),
    "progression": Kind("", "the table of the progression", progression_block),
    "best": Kind(
        "GROUP ...",
        "the speed of attention() beside the libraries, on groups of the grid",
        best_block,
        1,
        None,
    ),
    "choice": Kind("", "the steps that attention() takes, by head size", choice_block),
    "supports": Kind("", "the problems that the kernels take", supports_block),
    "calls": Kind("NAME", "benchmarks/results/NAME.json, host time per call", calls_block, 1, 1),
    "first_calls": Kind(
        "NAME", "benchmarks/results/NAME.json, a process's first calls", first_calls_block, 1, 1
    ),
    "compilers": Kind(
        "NAME", "benchmarks/results/NAME.json, speeds by two compilers", compilers_block, 1, 1
    ),
    "training": Kind(
        "NAME", "benchmarks/results/NAME.json, losses of trainings", training_block, 1, 1
    ),
    "autograd": Kind(
        "NAME", "benchmarks/results/NAME.json, speed through autograd", autograd_block, 1, 1
    ),
    "multimodal": Kind(
        "NAME", "benchmarks/results/NAME.json, times of multimodal parts", multimodal_block, 1, 1
    ),
    "ring": Kind("|".join(TABLES), "what a ring of GPUs costs, by arithmetic", ring_block, 1, 1),
    "rings": Kind(
        "NAME", "benchmarks/results/NAME.json, speeds of rings of GPUs", rings_block, 1, 1
    ),
    "live_registers": Kind(
        "", "the share of live registers that are those of nvdisasm", live_registers_block
    ),
    "short_forms": Kind("", "the meaning of each part of a short form", short_forms_block),
    PICTURE_KIND: Kind('NAME "ALT TEXT"', "docs/images/course/NAME.svg", picture_block, 2, 2),
    "nav": Kind(
        "", "the page's place and reading time, and links to the pages before and after", nav_block
    ),
    "path": Kind("", "the pages of the course by place, with reading times", path_block),
    "next": _about_a_step("a link to the page after a step's page", next_block),
}


def kinds_text() -> str:
    """Text of all kinds with their arguments and contents."""
    rows = [(name, kind.usage, kind.meaning) for name, kind in KINDS.items()]
    rows.append((OUTPUT_KIND, OUTPUT_USAGE, OUTPUT_MEANING))
    return "\n".join(f"  {f'{name} {usage}'.strip()}\n      {what}" for name, usage, what in rows)


def render(
    evidence: Evidence, kind: str, arguments: str, page: PurePosixPath, said: set[str] | None = None
) -> str:
    """Make the text of a block.

    page: relative to the root of the repository. said: footnotes that the page has already; the
    block's own are added.

    Raises UsageError for an unknown kind or wrong arguments, and what `Evidence` raises.
    """
    found = KINDS.get(kind)
    if found is None:
        raise UsageError(
            f"there is no kind {kind!r}: the kinds are {', '.join((*KINDS, OUTPUT_KIND))}"
        )
    try:
        parsed = parse_arguments(arguments, found.options, page, said)
        n_words = len(parsed.words)
        if n_words < found.fewest or (found.most is not None and n_words > found.most):
            raise UsageError(f"{arguments!r} has {n_words} words besides its options")
        return found.render(evidence, parsed)
    except UsageError as error:
        accepted = f"accepted is `build:{f'{kind} {found.usage}'.strip()}`"
        raise UsageError(f"build:{kind}: {error}; {accepted}") from error
