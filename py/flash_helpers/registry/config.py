"""A config: one kernel of a family, and everything that is fixed when it is compiled.

A family's config class lists its fields, each once, with `number`, `flag` and `element`; its short
form, the parser of it, the C++ struct with its initialisers, and JSON follow from these. Standard
library only.
"""

from __future__ import annotations

import functools
import re
import typing
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flash_helpers.registry.problem import AttentionForward, DType, Strides

if TYPE_CHECKING:
    from flash_helpers.registry.family import Family, Step
    from flash_helpers.registry.launch import Launch
    from flash_helpers.registry.supports import Supports

Own = TypeVar("Own", bound="Config")

_NUMBER = "0|-?[1-9][0-9]*"


def number(prefix: str, comment: str = "", default: Any = MISSING) -> Any:
    """An int: PREFIX with its value in the short form, left out where it is the default."""
    return field(default=default, metadata={"short": prefix, "comment": comment})


def flag(word: str, comment: str = "", default: Any = MISSING) -> Any:
    """A bool: WORD in the short form if it is true."""
    return field(default=default, metadata={"short": word, "comment": comment})


def element() -> Any:
    """A DType: its short name."""
    return field(metadata={"short": "", "comment": ""})


@functools.total_ordering
@dataclass(frozen=True)
class Config:
    """What all families' configs have in common. They sort by family, then by their fields.

    The first field is the number of the step in its family. A subclass is a frozen dataclass; its
    `check` raises ValueError, with the reason and a way out, for a config that no kernel can be
    built for.
    """

    example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_step()
        self.check()
        # Not a field, and made once: torch.compile reads a string attribute as a constant, but
        # cannot format a number that it has come to take for a variable.
        object.__setattr__(self, "_short_form", self._format())

    # -- what a family's config says of itself -----------------------------------------------------

    @property
    @abstractmethod
    def family(self) -> Family:
        """That the config belongs to."""

    @property
    @abstractmethod
    def n_threads(self) -> int:
        """Threads of one block."""

    @property
    @abstractmethod
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes."""

    @property
    @abstractmethod
    def supports(self) -> Supports:
        """The problems that the kernel takes."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""

    @abstractmethod
    def launch(
        self, problem: AttentionForward, strides: Mapping[str, Strides]
    ) -> tuple[Launch, ...]:
        """What is launched, in order, for tensors of these strides, by name."""

    def runs_as(self: Own, strides: Mapping[str, Strides]) -> Own:
        """The config whose kernel is launched for tensors of these strides: this one, or one that
        takes over."""
        return self

    def own_row_stride(self, problem: AttentionForward) -> int:
        """A row stride of tensors for which this config itself is launched."""
        return problem.row_stride

    def siblings(self: Own) -> tuple[Own, ...]:
        """The config and all that `runs_as` may name, which are built along with it."""
        return (self,)

    def computed_scores(self, problem: AttentionForward) -> int:
        """Scores of queries and keys that are computed for a problem, hidden ones too. They are
        more than are asked for where tiles are not filled."""
        tiles = self.supports
        rows = -(-problem.len_q // tiles.B_r) * tiles.B_r
        keys = -(-problem.len_k // tiles.B_c) * tiles.B_c
        return problem.batch * problem.heads * rows * keys

    def variants(self: Own) -> tuple[Own, ...]:
        """The config, and those of the same step and tiles that are compiled for problems that it
        refuses."""
        return (self,)

    # -- what follows ------------------------------------------------------------------------------

    @property
    def step(self) -> Step:
        """The step whose kernel this is a config of."""
        return self.family.steps[self.family.step_id(getattr(self, fields(self)[0].name))]

    def refusal(self, problem: AttentionForward) -> str:
        """Why the kernel does not take a problem, with the way out; "" if it does."""
        return self.supports.refusal(problem, self.short_form())

    def replace(self: Own, **changes: Any) -> Own:
        """The same config with some fields changed; checked again."""
        return replace(self, **changes)

    def at_step(self: Own, step: Step) -> Own:
        """The same tile and options of another step of the family; checked again."""
        return self.replace(**{fields(self)[0].name: step.number})

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self._key < other._key

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.family.rank, *(getattr(self, f.name) for f in fields(self)))

    def short_form(self) -> str:
        """Readable id and C identifier, e.g. v2_fp16_d128_Br64_Bc64_w4_async_swizzled_Q0_K0_V0."""
        return self._short_form

    def _format(self) -> str:
        return "_".join(filter(None, (self.part(f.name) for f in fields(self))))

    def part(self, name: str) -> str:
        """Of the short form: what a field has there, "" for one that is left out."""
        found = type(self).__dataclass_fields__[name]
        value, short = getattr(self, name), found.metadata["short"]
        if isinstance(value, DType):
            return value.short
        if isinstance(value, bool):
            return short if value else ""
        return "" if value == found.default else f"{short}{value}"

    @classmethod
    @functools.cache
    def _pattern(cls) -> re.Pattern[str]:
        parts = []
        for f in fields(cls):
            kind, short = cls._kinds()[f.name], f.metadata["short"]
            if kind is DType:
                part = rf"_(?P<{f.name}>{'|'.join(d.short for d in DType)})"
            elif kind is bool:
                part = rf"(?P<{f.name}>_{short})?"
            else:
                part = rf"_{short}(?P<{f.name}>{_NUMBER})"
                part = part if f.default is MISSING else f"(?:{part})?"
            parts.append(part)
        return re.compile("".join(parts).removeprefix("_"))

    @classmethod
    @functools.cache
    def _kinds(cls) -> Mapping[str, type]:
        hints = typing.get_type_hints(cls)
        return {f.name: hints[f.name] for f in fields(cls)}

    @classmethod
    def from_short_form(cls: type[Own], text: str) -> Own:
        """Inverse of `short_form`.

        Raises ValueError for a text that is no short form, or whose config is impossible.
        """
        match = cls._pattern().fullmatch(text)
        values: dict[str, Any] = {}
        for name, found in (match.groupdict() if match else {}).items():
            kind = cls._kinds()[name]
            if kind is bool:
                values[name] = found is not None
            elif found is not None:
                values[name] = DType.from_name(found) if kind is DType else int(found)
        config = cls(**values) if match else None
        if config is None or config.short_form() != text:
            raise ValueError(
                f"{text!r} is not a config's short form; an example of one is {cls.example}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, ready for JSON; dtype by its short name."""
        return {name: v.short if isinstance(v, DType) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls: type[Own], values: Mapping[str, Any]) -> Own:
        """Inverse of `to_dict`. Raises ValueError for a missing or an unknown field."""
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"config has unknown fields {unknown}: the fields are {sorted(names)}")
        optional = {f.name for f in fields(cls) if f.default is not MISSING}
        if missing := sorted(names - optional - set(values)):
            raise ValueError(f"config lacks the fields {missing}")
        return cls(
            **{
                name: DType.from_name(value)
                if cls._kinds()[name] is DType and isinstance(value, str)
                else value
                for name, value in values.items()
            }
        )

    # -- C++ ---------------------------------------------------------------------------------------

    @classmethod
    def cpp_fields(cls) -> str:
        """The members of the C++ struct of the same name, in order, one a line."""
        lines = []
        for f in fields(cls):
            comment = f.metadata["comment"]
            declared = f"    {cls._kinds()[f.name].__name__} {f.name};"
            lines.append(f"{declared} // {comment}" if comment else declared)
        return "\n".join(lines)

    def cpp_initializer(self) -> str:
        """The C++ struct's value, by names."""
        values = (f".{f.name} = {_cpp_value(getattr(self, f.name))}" for f in fields(self))
        return "{" + ", ".join(values) + "}"

    # -- checks ------------------------------------------------------------------------------------

    def _check_types(self) -> None:
        for name, wanted in self._kinds().items():
            value = getattr(self, name)
            # bool is an int to isinstance, but True is no tile size
            if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
                raise ValueError(
                    f"{name} {value!r} has type {type(value).__name__}: "
                    f"it must be of type {wanted.__name__}"
                )

    def _check_step(self) -> None:
        first = fields(self)[0].name
        steps = self.family.steps
        step = steps.get(self.family.step_id(getattr(self, first)))
        if step is None:
            numbers = [step.number for step in steps.values()]
            raise ValueError(
                f"{first} {getattr(self, first)} does not exist: choose one of {numbers[0]} to "
                f"{numbers[-1]}"
            )
        for name, fixed in step.fixed.items():
            value = getattr(self, name)
            if value == fixed:
                continue
            others = [s for s in steps.values() if s.fixed.get(name, value) == value]
            way_out = f"choose {ranges_text(others)}" if others else f"no step has {value}"
            raise ValueError(f"{name} {value}: {step.id} fixes {name} {fixed}; {way_out}")


def _cpp_value(value: object) -> str:
    return f"DType::{value.name}" if isinstance(value, DType) else str(value).lower()


def ranges_text(steps: Iterable[Step]) -> str:
    """Steps of a family as "v1 to v3 or v7"."""
    runs: list[list[Step]] = []
    for step in steps:
        if runs and step.number == runs[-1][-1].number + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return " or ".join(
        run[0].id if len(run) == 1 else f"{run[0].id} to {run[-1].id}" for run in runs
    )


def differing_fields(a: Config, b: Config) -> list[str]:
    """Names of the fields in which two configs of a family differ, in declaration order."""
    return [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


def difference_text(asked: Config, found: Config) -> str:
    """How `found` differs from what was asked for: "B_c 32 instead of 64"."""
    if type(asked) is not type(found):
        return f"of family {found.family.name}, not {asked.family.name}"
    values = asked.to_dict(), found.to_dict()
    return ", ".join(
        f"{name} {values[1][name]} instead of {values[0][name]}"
        for name in differing_fields(asked, found)
    )
