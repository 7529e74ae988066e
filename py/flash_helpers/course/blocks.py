"""Every kind of block: how it is written on a page, and what makes its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from flash_helpers.course.arguments import Arguments, parse_arguments
from flash_helpers.course.clock_blocks import clock_block, progression_block, staircase_block
from flash_helpers.course.counter_blocks import counters_block
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import nav_block, next_block, picture_block
from flash_helpers.course.markers import INLINE_KIND
from flash_helpers.course.sass_blocks import bound_block, listing_block, sass_block
from flash_helpers.course.step_blocks import diff_block, facts_block
from flash_helpers.course.values import value
from flash_helpers.registry.selection import UsageError

OUTPUT_KIND = "output"  # its text is what commands print: see `commands`
DEFAULT_OUTPUT_LINES = 20
OUTPUT_USAGE = f"[lines={DEFAULT_OUTPUT_LINES}]"
OUTPUT_MEANING = "a console block with what its commands print, its first lines= lines"
PICTURE_KIND = "picture"

Render = Callable[[Evidence, Arguments, PurePosixPath], str]


@dataclass(frozen=True)
class Kind:
    """usage: the arguments as a reader is told of them. meaning: what the block shows.
    words: fewest and most words; None is any number. options: names before "="."""

    usage: str
    meaning: str
    words: tuple[int, int | None]
    options: tuple[str, ...]
    render: Render


def _anywhere(render: Callable[[Evidence, Arguments], str]) -> Render:
    """A renderer that does not ask which page it writes on."""
    return lambda evidence, arguments, page: render(evidence, arguments)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "facts": Kind(
            "N", "what a step takes, beside its parent", (1, 1), (), _anywhere(facts_block)
        ),
        "diff": Kind(
            "N", "the code that a step changed, without comments", (1, 1), (), _anywhere(diff_block)
        ),
        "counters": Kind(
            "KERNEL [KERNEL ...]",
            "what the simulator counts (of a version alone: its parent and itself)",
            (1, None),
            (),
            _anywhere(counters_block),
        ),
        "sass": Kind(
            "KERNEL [KERNEL ...] [arch=sm_80]",
            "instructions by phase and class (of a version alone: its parent and itself)",
            (1, None),
            ("arch",),
            _anywhere(sass_block),
        ),
        "bound": Kind(
            "KERNEL [KERNEL ...] [arch=sm_80]",
            "static lower bounds (of a version alone: its parent and itself)",
            (1, None),
            ("arch",),
            _anywhere(bound_block),
        ),
        "listing": Kind(
            "KERNEL [REGEX] [at=REGEX] [lines=12] [phase=main|prologue|epilogue] [arch=sm_80]",
            "the first instructions that match, by their text, or by the CUDA line at=",
            (1, None),
            ("at", "lines", "phase", "arch"),
            _anywhere(listing_block),
        ),
        "clock": Kind(
            "N", "what was measured, and what was published", (1, 1), (), _anywhere(clock_block)
        ),
        "staircase": Kind("", "the plot of the progression", (0, 0), (), staircase_block),
        "progression": Kind(
            "", "the table of the progression", (0, 0), (), _anywhere(progression_block)
        ),
        PICTURE_KIND: Kind(
            'NAME "ALT TEXT"', "docs/images/course/NAME.svg", (2, 2), (), picture_block
        ),
        "nav": Kind("", "links to the pages before and after", (0, 0), (), nav_block),
        "next": Kind("N", "a link to the page after that of a step", (1, 1), (), next_block),
        INLINE_KIND: Kind(
            "KEY",
            "a number within a line; build_docs.py --values lists the keys",
            (1, 1),
            (),
            _anywhere(lambda evidence, arguments: value(evidence, arguments.words[0])),
        ),
    }
)


def kinds_text() -> str:
    """Every kind with its arguments, one a line."""
    rows = [(name, kind.usage, kind.meaning) for name, kind in KINDS.items()]
    rows.append((OUTPUT_KIND, OUTPUT_USAGE, OUTPUT_MEANING))
    return "\n".join(f"  {f'{name} {usage}'.strip()}\n      {what}" for name, usage, what in rows)


def render(evidence: Evidence, kind: str, arguments: str, page: PurePosixPath) -> str:
    """The text of a block.

    page: relative to the root of the repository. Raises UsageError for an unknown kind or wrong
    arguments, and what `Evidence` raises.
    """
    found = KINDS.get(kind)
    if found is None:
        raise UsageError(
            f"there is no kind {kind!r}: the kinds are {', '.join((*KINDS, OUTPUT_KIND))}"
        )
    accepted = f"accepted is `build:{f'{kind} {found.usage}'.strip()}`"
    try:
        parsed = parse_arguments(arguments, found.options)
        fewest, most = found.words
        if len(parsed.words) < fewest or (most is not None and len(parsed.words) > most):
            raise UsageError(f"{arguments!r} has {len(parsed.words)} words besides options")
        return found.render(evidence, parsed, page)
    except UsageError as error:
        raise UsageError(f"build:{kind}: {error}; {accepted}") from error
