"""The base of all problems: an operation and its tensors, independent of any kernel.

A problem knows its tensors and its least cost, and nothing of how it is computed. Inputs,
references and error bounds are in the operation's folder. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum, IntEnum
from typing import Any, ClassVar, TypeAlias, TypeVar

Own = TypeVar("Own", bound="Problem")


class Element(IntEnum):
    """Element type of a tensor. The values are those of the C++ enum `Element`."""

    FP16 = 0
    BF16 = 1
    FP32 = 2
    INT32 = 3
    FP8 = 4

    @property
    def short(self) -> str:
        """Name in a config's short form, such as "bf16"."""
        return self.name.lower()

    @property
    def torch_name(self) -> str:
        """Name of the same type in torch, such as "bfloat16"."""
        return _TORCH_NAMES[self]

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return _BYTES[self]

    @classmethod
    def from_name(cls, name: str) -> Element:
        """Return the type called `name` ("bf16", "bfloat16", …; case ignored).

        Raises ValueError for any other name.
        """
        for element in cls:
            if name.lower() in (element.short, element.torch_name):
                return element
        accepted = ", ".join(f"{element.short} ({element.torch_name})" for element in cls)
        raise ValueError(f"dtype {name!r} is not one of {accepted}")


_TORCH_NAMES = {
    Element.FP16: "float16",
    Element.BF16: "bfloat16",
    Element.FP32: "float32",
    Element.INT32: "int32",
    Element.FP8: "float8_e4m3fn",
}
_BYTES = {
    Element.FP16: 2,
    Element.BF16: 2,
    Element.FP32: 4,
    Element.INT32: 4,
    Element.FP8: 1,
}


class Role(Enum):
    """Use of a tensor by a kernel. OPTIONAL: a tensor that the problem does not ask for."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"
    OPTIONAL = "optional"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a problem. `shape`: elements. `axes`: names of the dimensions, in their order."""

    name: str
    shape: tuple[int, ...]
    element: Element
    role: Role
    axes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Size without gaps."""
        return math.prod(self.shape) * self.element.bytes

    @property
    def is_output(self) -> bool:
        """Whether the kernel writes it."""
        return self.role in (Role.OUT, Role.INOUT)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dimension of a contiguous tensor, 0 along a
        dimension of size 1, where the distance means nothing."""
        found: list[int] = []
        step = 1
        for size in reversed(self.shape):
            found.append(step if size > 1 else 0)
            step *= size
        return tuple(reversed(found))


# The value of all elements of an output, or a function of the call's tensors, by name, whose result
# is expanded to the output's shape.
Elements: TypeAlias = "float | Callable[[Mapping[str, Any]], Any]"


@dataclass(frozen=True)
class Constant:
    """A call whose outputs are known without a kernel, such as one over empty tensors. `tensors`:
    those of the call, with their shapes. `values`: of each output's elements, by name."""

    tensors: tuple[Tensor, ...]
    values: Mapping[str, Elements]


# Elements between neighbours along each dimension, by tensor; 0 along a dimension of size 1.
Strides = Mapping[str, tuple[int, ...]]


def option(text: str, default: Any = MISSING, **flag: Any) -> Any:
    """Return a field that the command line has an option for.

    `text`: help of the option. `flag`: `name` of the option if it is not the field's; `metavar`;
    `title`: the field in words, if they differ from the option's name; `least`, `most`: smallest
    and largest value in a call of an exported kernel; `tensor`: the optional input that is given
    if the field is not None; a launch depends on the field by that input's address alone;
    `exported`: False if calls of exported kernels leave it at its default.
    """
    return field(default=default, metadata={"help": text, **flag})


class Problem:
    """A frozen dataclass of one operation: sizes, element types and options.

    `operation`: name of the operation's folder. `axes`: dimensions of each tensor that a call may
    pass, by name, in the order in which calls take them. `optional`: names of tensors that a call
    may leave out; such an output is computed only if a call passes it. `elements`: possible element
    types of the first tensor.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # each subclass is a dataclass
    operation: ClassVar[str]
    axes: ClassVar[Mapping[str, tuple[str, ...]]]
    optional: ClassVar[frozenset[str]] = frozenset()
    elements: ClassVar[tuple[Element, ...]] = tuple(Element)
    dtype: Element

    @classmethod
    def together(cls, problems: Iterable[Any], swept: str) -> str:
        """Return the problems of one class in words, with the values of the other fields at each
        size.

        `swept`: the field that is the size.
        """
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: getattr(problem, swept))
        names = sorted(f.name for f in fields(cls) if f.name not in ("dtype", swept))
        values = {
            name: dict.fromkeys(f"{getattr(p, name)} at {getattr(p, swept)}" for p in ordered)
            for name in names
        }
        return ", ".join(f"{name} {', '.join(found)}" for name, found in values.items())

    @classmethod
    def names(cls, given: Sequence[object | None]) -> tuple[str, ...]:
        """Return the names of a call's tensors, which are given in the order of `axes`; those that
        may be left out are None or missing at the end."""
        every = itertools.zip_longest(cls.axes, given)
        return tuple(n for n, x in every if x is not None or n not in cls.optional)

    @classmethod
    def arranged(cls, tensors: Mapping[str, Any]) -> list[Any]:
        """Return tensors, given by name, in the order of `axes`, with None for those left out and
        nothing behind the last one."""
        last = max((n for n, name in enumerate(cls.axes) if name in tensors), default=-1)
        return [tensors.get(name) for name in [*cls.axes][: last + 1]]

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """Floating-point operations."""

    @classmethod
    @abstractmethod
    def posed(
        cls: type[Own],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *_: Any,  # with `options` it lets a type checker accept each subclass's own options
        **options: Any,
    ) -> Own:
        """Return the problem that tensors of these shapes pose.

        `shapes`: shapes of the tensors given, each with as many dimensions as `axes` has names; an
        optional tensor that is given is used, or computed. `dtype`: dtype of the first tensor.
        `options`: fields that no shape tells. Raises ValueError for shapes that do not fit together
        or are empty.
        """

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the call on tensors of these shapes if its outputs are known without a kernel;
        None for all others, which `posed` takes or refuses. Arguments and errors are those of
        `posed`."""
        return None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the kernel reads."""
        return tuple(t for t in self.tensors if t.role in (Role.IN, Role.INOUT))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that the kernel writes."""
        return tuple(t for t in self.tensors if t.is_output)

    @property
    def bytes(self) -> int:
        """Least bytes moved: each input read once, each output written once."""
        return sum(tensor.bytes for tensor in (*self.inputs, *self.outputs))

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of this name. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.tensors}[name]

    def strides(self) -> dict[str, tuple[int, ...]]:
        """Return the strides of contiguous inputs and outputs."""
        return {tensor.name: tensor.strides for tensor in (*self.inputs, *self.outputs)}

    def in_dtype(self: Own, dtype: Element) -> Own:
        """Return the same problem in another element type."""
        return replace(self, dtype=dtype)

    def call_options(self) -> dict[str, Any]:
        """Return the options that a call passes beside the tensors (`posed`)."""
        return {}

    def for_choice(self: Own) -> Own:
        """Return the problem for which the fastest kernel computes this one: this one itself,
        unless its results must not depend on some of its sizes."""
        return self

    def wrong_values(self, values: Mapping[str, Any]) -> list[str]:
        """Return the faults of the values of integer inputs, each with the limit and the way out.

        values: nested lists, by name. No call checks these, since it would wait for the device.
        """
        return []

    def record(self) -> dict[str, Any]:
        """Return the operation and all fields, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: v.short if isinstance(v, Element) else v for k, v in values.items()}
        return {"operation": self.operation, **plain}

    @classmethod
    def from_record(cls: type[Own], record: Mapping[str, Any]) -> Own:
        """Return the problem of a record of this operation; fields that it lacks have their
        defaults.

        Raises ValueError for another operation, and for a field that is unknown or missing.
        """
        values = dict(record)
        if (operation := values.pop("operation", None)) != cls.operation:
            raise ValueError(f"a record of operation {operation!r} is none of {cls.operation}")
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"{cls.operation} has no fields {unknown}: it has {sorted(known)}")
        needed = {name for name, f in known.items() if f.default is MISSING}
        if missing := sorted(needed - values.keys()):
            raise ValueError(f"a record of {cls.operation} lacks the fields {missing}")
        return cls(**{name: _read(known[name], value) for name, value in values.items()})


# JSON types of a field, by its annotation, which is a text.
_IN_JSON: Mapping[str, tuple[type, ...]] = {
    "Element": (str,),
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
}


def _read(field: Field[Any], value: Any) -> Any:
    """Return a field's value from its JSON value. Raises ValueError for another type."""
    kind = str(field.type)
    fits = isinstance(value, _IN_JSON[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"{field.name} {value!r} is no {kind}")
    return Element.from_name(value) if kind == "Element" else value
