"""A config: one implementation from a family's step, with all values that are fixed when it is
compiled.

A family's config class lists its fields, each once, with `number`, `flag` and `element`; the short
form, its parser, the C++ struct with its initialisers, and JSON follow from these. Standard library
only.
"""

from __future__ import annotations

import contextlib
import functools
import re
import typing
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, field, fields, replace
from typing import Any, ClassVar, TypeVar

from flash_helpers.gpu import Device
from flash_helpers.registry.call import Call
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.problem import Element, Problem, Strides
from flash_helpers.registry.supports import Supports

Own = TypeVar("Own", bound="Config")

_NUMBER = "0|-?[1-9][0-9]*"


def number(prefix: str, comment: str = "", default: Any = MISSING) -> Any:
    """Return the field of an int: PREFIX and its value in the short form, left out where it is the
    default."""
    return field(default=default, metadata={"short": prefix, "comment": comment})


def flag(word: str, comment: str = "", default: Any = MISSING) -> Any:
    """Return the field of a bool: WORD in the short form if it is true."""
    return field(default=default, metadata={"short": word, "comment": comment})


def element() -> Any:
    """Return the field of an Element, whose short name stands in the short form."""
    return field(metadata={"short": "", "comment": ""})


@functools.total_ordering
class Config:
    """The base of all families' configs. Configs sort by family, then by their fields.

    The first field is the number of the step in its family. A subclass is a frozen dataclass; its
    `check` raises ValueError, with the reason and a way out, for a config that no kernel can be
    built for.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # each subclass is a dataclass
    example: ClassVar[str] = ""
    _short_form: str

    def __post_init__(self) -> None:
        self._check_types()
        self._check_step()
        self.check()
        # Not a field, and made once: torch.compile reads a string attribute as a constant, but
        # cannot format a number that it has come to take for a variable.
        object.__setattr__(self, "_short_form", self._format())

    # -- what a family's config says of itself -----------------------------------------------------

    dtype: Element

    @property
    @abstractmethod
    def family(self) -> Family[Any]:
        """The family of the config."""

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
        """The problems that the config takes."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""

    @abstractmethod
    def call(self, problem: Any, strides: Strides, device: Device) -> Call:
        """Return the launches for tensors of these strides on a device.

        `problem`: a problem of the family's operation that the config takes.
        """

    @abstractmethod
    def most_runs(self, problem: Any, device: Device) -> int:
        """Return the most times that a warp may run any one instruction of a kernel: a warp that
        exceeds this is taken never to end."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The C++ functions of the config's kernels, in the order of their first launch: those that
        the family names, or some of them."""
        return tuple(self.family.kernels)

    @property
    def main_kernel(self) -> str:
        """The one of the config's kernels that does the most work, whose loop has `loop_unit`, by
        its C++ function. Tables of machine code show it."""
        return self.functions[0]

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel, by its
        C++ function."""
        return self.n_threads, self.smem_bytes

    def runs_as(self: Own, strides: Strides) -> Own:
        """Return the config whose kernels are launched for tensors of these strides: this one, or
        one that replaces it."""
        return self

    def own_strides(self, problem: Any) -> dict[str, tuple[int, ...]]:
        """Return strides for which this config itself is launched."""
        return problem.strides()

    def siblings(self: Own) -> tuple[Own, ...]:
        """Return the config and all that `runs_as` may name, which are built along with it."""
        return (self,)

    def variants(self: Own) -> tuple[Own, ...]:
        """Return the config, and the configs of the same step and tiles that are compiled for
        problems that it refuses."""
        return (self,)

    def measured(self, size: int) -> Problem:
        """Return the problem of a given size on which the config is measured and tuned, in its
        dtype and with the options that are compiled into it."""
        measured = self.family.operation.measured(size, **self.supports.options)
        return self.supports.adapted(measured.in_dtype(self.dtype))

    def counted_on(self, size: int) -> Problem:
        """Return a small problem of about a given size for which this config itself is launched."""
        operation = self.family.operation
        return replace(operation.small, **{operation.swept: size}).in_dtype(self.dtype)

    @property
    def loop_unit(self) -> tuple[str, int] | None:
        """The name of the unit of work of a kernel's loop, and a warp's tensor instructions per
        unit; None for a kernel without tensor instructions."""
        return None

    def loop_runs(self, size: int) -> int:
        """Return the number of units that a warp works on for a problem of a given size.

        Raises NotImplementedError for a config without `loop_unit`.
        """
        raise NotImplementedError(f"{self.short_form()} has no tensor instructions")

    def work(self, problem: Any, device: Device) -> float:
        """Return the work of the config for a problem, in a unit of its own. Idle units count, so
        partly filled tiles make it more than the problem's own work."""
        return problem.operations

    # -- what follows ------------------------------------------------------------------------------

    @property
    def step(self) -> Step:
        """The step of the config."""
        return self.family.steps[self.family.step_id(getattr(self, fields(self)[0].name))]

    @property
    def is_deterministic(self) -> bool:
        """Whether every call gives the same bits for the same inputs."""
        return self.step.is_deterministic

    @property
    def kernels(self) -> Mapping[str, str]:
        """Names of the config's kernels, as the library registers them, by C++ function: the short
        form; with several kernels, the short form and the function."""
        if len(self.functions) == 1:
            return dict.fromkeys(self.functions, self.short_form())
        return {function: f"{self.short_form()}__{function}" for function in self.functions}

    def refusal(self, problem: Problem) -> str:
        """Return the reason why the config does not take a problem, with the way out; "" if it
        does."""
        operation = self.family.operation
        if problem.operation != operation.name:
            return (
                f"{self.short_form()} computes {operation.name} and the problem is one of "
                f"{problem.operation}: choose a config of that operation"
            )
        return self.supports.refusal(problem, self.short_form())

    def replace(self: Own, **changes: Any) -> Own:
        """Return the same config with some fields changed; checked again."""
        return replace(self, **changes)

    def at_step(self: Own, step: Step) -> Own:
        """Return the config of the same tile and options at another step; checked again."""
        return self.replace(**{fields(self)[0].name: step.number})

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self._key < other._key

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.family.rank, *(getattr(self, f.name) for f in fields(self)))

    def short_form(self) -> str:
        """Return a readable id and C identifier, e.g. o1_bf16_d128_Br128_Bc64_w4_rs2048."""
        return self._short_form

    def _format(self) -> str:
        return "_".join(filter(None, (self.part(f.name) for f in fields(self))))

    def part(self, name: str) -> str:
        """Return a field's part of the short form; "" for one that is left out."""
        found = type(self).__dataclass_fields__[name]
        value, short = getattr(self, name), found.metadata["short"]
        if isinstance(value, Element):
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
            if kind is Element:
                part = rf"_(?P<{f.name}>{'|'.join(d.short for d in Element)})"
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
        """Return the config of a short form.

        Raises ValueError for a text that is no short form, or whose config is impossible.
        """
        return typing.cast("Own", cls._read(text))

    @classmethod
    @functools.cache  # a table of measurements names a config hundreds of times
    def _read(cls, text: str) -> Config:
        match = cls._pattern().fullmatch(text)
        values: dict[str, Any] = {}
        for name, found in (match.groupdict() if match else {}).items():
            kind = cls._kinds()[name]
            if kind is bool:
                values[name] = found is not None
            elif found is not None:
                values[name] = Element.from_name(found) if kind is Element else int(found)
        config = cls(**values) if match else None
        if config is None or config.short_form() != text:
            raise ValueError(
                f"{text!r} is not a config's short form; an example of one is {cls.example}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON; dtype by its short name."""
        return {name: v.short if isinstance(v, Element) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls: type[Own], values: Mapping[str, Any]) -> Own:
        """Return the config of these fields. Raises ValueError for a missing or unknown field."""
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"config has unknown fields {unknown}: the fields are {sorted(names)}")
        optional = {f.name for f in fields(cls) if f.default is not MISSING}
        if missing := sorted(names - optional - set(values)):
            raise ValueError(f"config lacks the fields {missing}")
        return cls(
            **{
                name: Element.from_name(value)
                if cls._kinds()[name] is Element and isinstance(value, str)
                else value
                for name, value in values.items()
            }
        )

    # -- C++ ---------------------------------------------------------------------------------------

    @classmethod
    def cpp_fields(cls) -> str:
        """Return the members of the C++ struct of the same name, in order, one per line."""
        lines = []
        for f in fields(cls):
            comment = f.metadata["comment"]
            kind = cls._kinds()[f.name]
            declared = f"    {'DType' if kind is Element else kind.__name__} {f.name};"
            lines.append(f"{declared} // {comment}" if comment else declared)
        return "\n".join(lines)

    def cpp_initializer(self) -> str:
        """Return an initialiser of the C++ struct, by member names."""
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
        if self.dtype not in self.family.dtypes:
            known = " and ".join(dtype.short for dtype in self.family.dtypes)
            raise ValueError(
                f"dtype {self.dtype.short}: family {self.family.name} has {known}: choose one"
            )
        for name, fixed in step.fixed.items():
            value = getattr(self, name)
            if value == fixed:
                continue
            others = [s for s in steps.values() if s.fixed.get(name, value) == value]
            way_out = f"choose {ranges_text(others)}" if others else f"no step has {value}"
            raise ValueError(f"{name} {value}: {step.id} fixes {name} {fixed}; {way_out}")


def _cpp_value(value: object) -> str:
    return f"DType::{value.name}" if isinstance(value, Element) else str(value).lower()


def ranges_text(steps: Iterable[Step]) -> str:
    """Return steps of a family as "v1 to v3 or v7"."""
    runs: list[list[Step]] = []
    for step in steps:
        if runs and step.number == runs[-1][-1].number + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return " or ".join(
        run[0].id if len(run) == 1 else f"{run[0].id} to {run[-1].id}" for run in runs
    )


def with_flags(config: Own, names: Iterable[str]) -> tuple[Own, ...]:
    """Return the config, and those with other values of its flags of these names, the most alike
    first."""
    found = [config]
    for name in names:
        found += [each.replace(**{name: not getattr(each, name)}) for each in found]
    return tuple(sorted(found, key=lambda each: len(differing_fields(each, config))))


def differing_fields(a: Config, b: Config) -> list[str]:
    """Return the fields in which two configs of a family differ, in declaration order."""
    return [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


def difference_text(asked: Config, found: Config) -> str:
    """Return the difference of `found` from the config asked for: "B_c 32 instead of 64"."""
    if type(asked) is not type(found):
        return f"of family {found.family.name}, not {asked.family.name}"
    values = asked.to_dict(), found.to_dict()
    return ", ".join(
        f"{name} {values[1][name]} instead of {values[0][name]}"
        for name in differing_fields(asked, found)
    )


def buildable_sizes(own: Any, sizes: Iterable[int]) -> tuple[Any, ...]:
    """Return a config, and those of other head sizes (`of_size`) for which a kernel can be
    built."""
    found = [own]
    for size in sizes:
        if size != own.d_head:
            with contextlib.suppress(ValueError):  # such as tiles that are too large at that size
                found.append(own.of_size(size))
    return tuple(found)
