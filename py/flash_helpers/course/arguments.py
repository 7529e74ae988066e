"""Arguments of a block: words, options, and the names of kernels."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from flash_helpers.gpu import LIMITS
from flash_helpers.kernel_configs import (
    FAMILIES,
    LARGE_TILE,
    Config,
    Element,
    config_from_short_form,
)
from flash_helpers.measure.staircases import parent_at_tile
from flash_helpers.registry.ampere import AMPERE, LARGE_TILE_FROM
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError, find_steps

DTYPE = Element.BF16  # of all kernels on the pages, unless a short form says otherwise
ARCHITECTURES = tuple(f"sm_{capability}" for capability in LIMITS)
DEFAULT_ARCHITECTURE = "sm_90"  # of the committed measurements
KERNEL_NAMES = (
    f"a step (9 or v9), which means its fixed config in {DTYPE.short}; "
    f"{LARGE_TILE_FROM}:large, of any step of {AMPERE.name} from there on, the large tile; or the "
    "short form of a config"
)


@dataclass(frozen=True)
class Arguments:
    """Arguments of one block.

    words: in order. options: value by name, written as NAME=VALUE. page: the block's page, relative
    to the root of the repository. said: footnotes of the blocks before it on that page.
    """

    words: tuple[str, ...]
    options: Mapping[str, str]
    page: PurePosixPath
    said: set[str] = field(default_factory=set)

    def once(self, footnote: str) -> list[str]:
        """Return a paragraph with the footnote; none if the page has it already."""
        if footnote in self.said:
            return []
        self.said.add(footnote)
        return [footnote]

    def number(self, name: str, default: int) -> int:
        """The option as a whole number of at least 1. Raises UsageError for any other value."""
        text = self.options.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"{name}={text} is no number from 1 on")
        return int(text)

    def choice(self, name: str, accepted: Collection[str], default: str) -> str:
        """The option as one of the accepted values. Raises UsageError for any other value."""
        text = self.options.get(name, default)
        if text not in accepted:
            raise UsageError(f"{name}={text} is not one of {', '.join(accepted)}")
        return text

    def architecture(self) -> str:
        """The option `arch`, such as "sm_90". Raises UsageError for an architecture that does not
        exist."""
        return self.choice("arch", ARCHITECTURES, DEFAULT_ARCHITECTURE)

    def step(self) -> Step:
        """The step that the first word names. Raises UsageError if it names none."""
        return parse_step(self.words[0])

    def kernels(self) -> list[Config]:
        """The kernels that the words name; for a single step, its parent and the step itself.

        Raises UsageError for a word that names no kernel.
        """
        if len(self.words) == 1 and find_steps(self.words[0]):
            return with_parent(self.step())
        return list(dict.fromkeys(map(parse_kernel, self.words)))


def parse_arguments(
    text: str, options: Collection[str], page: PurePosixPath, said: set[str] | None = None
) -> Arguments:
    """Parse words separated by blanks; "..." and '...' enclose blanks, and there are no escapes.

    options: names that may stand before "="; any other text with "=" is a word. said: as in
    `Arguments`.

    Raises UsageError for a quotation mark without its partner, and for an option given twice.
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        parts = list(lexer)
    except ValueError as error:
        raise UsageError(f"the quotation marks of {text!r} have no partners") from error
    words: list[str] = []
    found: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or name not in options:
            words.append(part)
        elif name in found:
            raise UsageError(f"{name} is given twice")
        else:
            found[name] = value
    return Arguments(tuple(words), found, page, set() if said is None else said)


def compiled_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises UsageError for a text that is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{text!r} is no regular expression: {error}") from error


def parse_step(word: str) -> Step:
    """Return the step that a word names. Raises UsageError if it names none."""
    found = find_steps(word) or ()
    if len(found) != 1:
        raise UsageError(f"{word!r} is not a step, such as 9 or v9")
    return found[0]


def fixed_config(step: Step) -> Config:
    """Return the config of a step that the pages show."""
    return FAMILIES[step.family].fixed_config(step, DTYPE)


def with_parent(step: Step) -> list[Config]:
    """Return the configs of the parent, if there is one, and of the step, at the step's tile."""
    own = fixed_config(step)
    parent = parent_at_tile(own)
    return [own] if parent is None else [parent, own]


def parse_kernel(word: str) -> Config:
    """Return the config that a word of the form KERNEL_NAMES names. Raises UsageError if it names
    none."""
    name, colon, variant = word.partition(":")
    if find_steps(name):
        step = parse_step(name)
        if not colon:
            return fixed_config(step)
        first = AMPERE.steps[LARGE_TILE_FROM].number
        if variant == "large" and step.family == AMPERE.name and step.number >= first:
            return fixed_config(step).replace(**LARGE_TILE)
    try:
        return config_from_short_form(word)
    except ValueError as error:
        raise UsageError(f"{word!r} is no kernel: write {KERNEL_NAMES}") from error
