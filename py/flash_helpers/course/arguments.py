"""What is written behind the kind of a block: words, options, and the names of kernels."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flash_helpers.gpu import LIMITS
from flash_helpers.kernel_configs import (
    FAMILIES,
    LARGE_TILE,
    TWO_STAGES,
    Config,
    DType,
    config_from_short_form,
)
from flash_helpers.registry.ampere import LARGE_TILE_STEPS, STAGES_STEP
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError, find_steps

DTYPE = DType.BF16  # of all kernels that the pages show, unless a short form says otherwise
ARCHITECTURES = tuple(f"sm_{capability}" for capability in LIMITS)
DEFAULT_ARCHITECTURE = "sm_90"  # that of the committed measurements
KERNEL_NAMES = (
    f"a step (9 or v9), which means its fixed config in {DTYPE.short}; "
    f"{' or '.join(f'{step}:large' for step in LARGE_TILE_STEPS)}, the large tile; "
    f"{STAGES_STEP}:stages, the large tile with two stages; or the short form of a config"
)

_WORD = re.compile(
    r"""(?:(?P<name>\w+)=)?(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"']\S*))(?=\s|$)"""
)


@dataclass(frozen=True)
class Arguments:
    """words: in order. options: what was written as NAME=VALUE."""

    words: tuple[str, ...]
    options: Mapping[str, str]

    def number(self, name: str, default: int) -> int:
        """The option as a number from 1. Raises UsageError for anything else."""
        text = self.options.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"{name}={text} is no number from 1 on")
        return int(text)

    def choice(self, name: str, accepted: Collection[str], default: str) -> str:
        """The option as one of the accepted values. Raises UsageError for anything else."""
        text = self.options.get(name, default)
        if text not in accepted:
            raise UsageError(f"{name}={text} is not one of {', '.join(accepted)}")
        return text

    def architecture(self) -> str:
        """The option `arch`, such as "sm_90". Raises UsageError for one that is not built."""
        return self.choice("arch", ARCHITECTURES, DEFAULT_ARCHITECTURE)


def parse_arguments(text: str, options: Collection[str] = ()) -> Arguments:
    """Words apart by blanks; "..." and '...' keep blanks together, and there are no escapes.

    options: names that may stand before "="; a word with any other is a word.

    Raises UsageError for a quotation mark without its partner, and an option given twice.
    """
    words: list[str] = []
    found: dict[str, str] = {}
    at = 0
    text = text.strip()
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise UsageError(f"the quotation marks of {text[at:]!r} have no partners")
        value = next(v for v in (match["double"], match["single"], match["bare"]) if v is not None)
        name = match["name"]
        if name in options:
            if name in found:
                raise UsageError(f"{name} is given twice")
            found[name] = value
        elif name:
            words.append(f"{name}={value}")
        else:
            words.append(value)
        at = match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip())
    return Arguments(tuple(words), found)


def parse_step(word: str) -> Step:
    """The step of that name. Raises UsageError."""
    found = find_steps(word) or ()
    if len(found) != 1:
        raise UsageError(f"{word!r} is not a step, such as 9 or v9")
    return found[0]


def fixed_config(step: Step) -> Config:
    """The config of a step that the pages show."""
    return FAMILIES[step.family].fixed_config(step, DTYPE)


def parse_kernel(word: str) -> Config:
    """The config that one of KERNEL_NAMES names. Raises UsageError."""
    name, colon, variant = word.partition(":")
    if find_steps(name):
        step = parse_step(name)
        if not colon:
            return fixed_config(step)
        if variant == "large" and step.id in LARGE_TILE_STEPS:
            return fixed_config(step).replace(**LARGE_TILE)
        if variant == "stages" and step.id == STAGES_STEP:
            return fixed_config(step).replace(**TWO_STAGES)
    try:
        return config_from_short_form(word)
    except ValueError as error:
        raise UsageError(f"{word!r} is no kernel: write {KERNEL_NAMES}") from error
