"""The launch of a config's kernel as formulas of the problem's sizes, by `Config.call` itself.
Standard library only.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from flash_helpers.export.formulas import (
    Condition,
    Facts,
    Formula,
    Path,
    Tree,
    explore,
    facts,
    leaves,
    merged,
    refusals,
    value_of,
)
from flash_helpers.gpu import Device, capability_of
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.call import Buffer, Call, Launch, Member, StructLayout, TensorMap
from flash_helpers.registry.problem import Problem, Role, Tensor

SMS = "sms"
_MOST_SIZE = 2**31 - 1
_MOST_SMS = 2**12  # 64 bits count the bytes that pieces of as many tiles as a grid may have need
_MOST_STRIDE = 2**40  # elements
_MOST_ADDRESS = 2**62
_MOST_REAL = 3.4028234663852886e38  # the largest float32


def name_in_c(tensor: str) -> str:
    """Return the name of an input that is a tensor's address: that of the tensor, but for dO."""
    return "do_" if tensor == "do" else tensor  # a word of C


@dataclass(frozen=True)
class Input:
    """A number that a call takes. `kind`: "size", "option" (0 or 1), "real", "stride" in elements
    or "address" on the device. `least`, `most`: its range. `text`: what it is, in words."""

    name: str
    kind: str
    least: float
    most: float
    text: str


@dataclass(frozen=True)
class Check:
    """A call that is refused: all conditions hold. `text`: the reason, with `MARK`s of formulas."""

    conditions: tuple[Condition, ...]
    text: str


@dataclass(frozen=True)
class MapFormula:
    """A tensor map. `form`: has its tensor, element type and swizzle. `member`: the member of the
    arguments that it fills. `dims`, `strides`, `box`: as in `TensorMap`."""

    member: Member
    form: TensorMap
    address: Formula
    dims: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    box: tuple[Formula, ...]


@dataclass(frozen=True)
class BufferFormula:
    """Device memory that a call needs. `bytes`: 0 where it needs none."""

    name: str
    bytes: Formula
    zeroed: bool


@dataclass(frozen=True)
class LaunchFormula:
    """A kernel's launch for every problem that the config takes.

    `inputs`: what the formulas depend on. `named`: formulas in the texts of `checks`, by number.
    `block`: threads. `programmatic`: as in `Launch`. `members`: values of the arguments' members,
    but for tensor maps.
    """

    config: Config
    function: str
    inputs: tuple[Input, ...]
    checks: tuple[Check, ...]
    named: tuple[Formula, ...]
    grid: tuple[Formula, ...]
    cluster: tuple[Formula, ...]
    block: int
    shared_bytes: int
    programmatic: bool
    layout: StructLayout
    members: Mapping[str, tuple[Formula, ...]]
    tensor_maps: tuple[MapFormula, ...]
    buffers: tuple[BufferFormula, ...]

    @property
    def kernel(self) -> str:
        """The kernel's name, as the library has it."""
        return self.config.kernels[self.function]

    @property
    def outputs(self) -> list[Formula]:
        """All formulas of the launch."""
        maps = (x for m in self.tensor_maps for x in (m.address, *m.dims, *m.strides, *m.box))
        members = (x for values in self.members.values() for x in values)
        buffers = (buffer.bytes for buffer in self.buffers)
        return [*self.grid, *self.cluster, *members, *maps, *buffers]


def launch_formula(config: Config, function: str, target: str) -> LaunchFormula:
    """Return the launch of one of a config's kernels. `target`: such as "sm_90a".

    Options of the problem that the launch does not depend on keep their usual values.
    """
    first = _Tracer(config, function, target)
    used = set().union(*(formula.inputs() for formula in first.formula.outputs))
    used |= first.inputs_of_strides(used) | first.needed_options()
    return _Tracer(config, function, target, used).formula


def input_name(problem: type[Problem], field: str) -> str:
    """Return the name of an input of a call for a field of the problem. A field that tells whether
    an optional tensor is there has the tensor's name, which is that of its address in a call."""
    return f"has_{field}" if field in problem.axes else field


class _Tracer:
    """Runs a config's functions on formulas.

    `used`: names of the inputs that the launch depends on; fields of the problem that have a usual
    value keep it unless they are among them. None: it is to be found out, for strides as they come.
    """

    def __init__(
        self, config: Config, function: str, target: str, used: Container[str] | None = None
    ) -> None:
        self.config = config
        self.function = function
        self.used = used
        self.path = Path()
        self.inputs: list[Input] = []
        self.checks: list[Check] = []
        self.known: Facts = {}
        self._numbers: dict[str, Any] = {}
        self._merging = self._merging_numbers()
        kind = config.family.operation.problem
        supports = config.supports
        fixed = {f.name: getattr(config, f.name) for f in fields(config)}
        fixed |= {**supports.sizes, **supports.options}
        values = {
            f.name: fixed[f.name] if f.name in fixed else self._field(f)
            for f in fields(kind)
            if f.name in fixed
            or f.default is MISSING
            or (_is_exported(f) and (used is None or input_name(kind, f.name) in used))
        }
        # Tensors whose addresses are 0 where they are not given: a call takes no field for that.
        self.optional = {
            f.metadata["tensor"]: f.name
            for f in fields(kind)
            if "tensor" in f.metadata and f.name not in values
        }
        values |= {field: 0 for tensor, field in self.optional.items() if self._uses(tensor)}
        sms = self._input(SMS, "size", 1, _MOST_SMS, "streaming multiprocessors of the device")
        self.device = Device(target, divmod(capability_of(target), 10), sms)  # type: ignore[arg-type]
        # Made anew on each path: it brings its options into one form, by their values.
        self.problem = lambda: kind(**values)
        self._check(lambda: _refuse(config.refusal(self.problem())))
        tensors = self._tensors()
        self.sizes: dict[str, Any] = {}  # of the dimension of a stride, by the stride's name
        self.strides = {tensor.name: self._strides(tensor) for tensor in tensors}
        self.addresses = {tensor.name: self._address_of(tensor) for tensor in tensors}
        self.tree = self._check(self._launch)
        self.formula = self._formula()

    def _input(self, name: str, kind: str, least: float, most: float, text: str) -> Formula:
        if self._uses(name) or (kind == "size" and name != SMS):
            self.inputs.append(Input(name, kind, least, most, text))
        return self.path.symbol(name, least, most, is_real=kind == "real")

    def _uses(self, name: str) -> bool:
        return self.used is not None and name in self.used

    def _field(self, field: Field[Any]) -> Formula:
        text = field.metadata["help"].replace("by default", "usually")  # C has no defaults
        name = input_name(self.config.family.operation.problem, field.name)
        if field.type == "float":
            return self._input(name, "real", -_MOST_REAL, _MOST_REAL, text)
        if field.type == "bool":
            return self._input(name, "option", 0, 1, text)
        least, most = (field.metadata.get(n, v) for n, v in (("least", 1), ("most", _MOST_SIZE)))
        return self._input(name, "size", least, most, text)

    def _tensors(self) -> list[Tensor]:
        """Return the problem's tensors, with shapes that hold on all paths. An optional one has the
        role of the paths on which it is given."""
        tree = explore(self.path, lambda: self.problem().tensors, self.known)
        tensors, *others = leaves(tree)
        tensors = [
            next((x for x in on_paths if x.role is not Role.OPTIONAL), on_paths[0])
            for on_paths in zip(tensors, *others, strict=True)
        ]

        def size(number: int, axis: int) -> Any:
            return value_of(tree, self.path, lambda found: found[number].shape[axis])

        shapes = [
            tuple(size(number, axis) for axis in range(len(tensor.shape)))
            for number, tensor in enumerate(tensors)
        ]
        return [replace(x, shape=shape) for x, shape in zip(tensors, shapes, strict=True)]

    def _strides(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return a tensor's strides, 0 along dimensions of size 1; the last is 1. The kernel's
        refusals of them become checks."""
        *outer, _ = zip(tensor.axes, tensor.shape, strict=True)
        names = [f"{tensor.name}_{axis}_stride" for axis, _ in outer]
        found: list[Any] = []
        for name, (axis, size) in zip(names, outer, strict=True):
            text = f"{tensor.name}: elements from one to the next along {axis}"
            stride = self._input(name, "stride", 0, _MOST_STRIDE, text)
            has_several = self.path.formula(size) > 1
            self.sizes[name] = size
            found.append(stride if self.used is None else self.path.choice(has_several, stride, 0))
        found.append(1)
        if any(map(self._uses, names)):
            refusal = self.config.supports.layout_refusal
            self._check(lambda: _refuse(refusal(tensor, tuple(found))))
        return tuple(found)

    def inputs_of_strides(self, used: Container[str]) -> set[str]:
        """Return the inputs that tell whether the strides among `used` are 0, but for sizes that
        the config wants to be equal to others."""
        equal = {
            operand.text
            for condition, holds in self.known.values()
            if condition.operator == "==" and holds
            for operand in condition.operands
        }
        sizes = (self.path.formula(size) for name, size in self.sizes.items() if name in used)
        return set().union(*(size.inputs() for size in sizes if size.text not in equal))

    def needed_options(self) -> set[str]:
        """Return the inputs for optional tensors without which the config does not launch this
        kernel."""
        wrong = (condition for condition, holds in self.known.values() if not holds)
        texts = {each.operands[0].text for each in wrong if each.operator == "=="}
        return {name for name in texts if name.startswith("has_")}

    def _address(self, name: str, meaning: str, or_none: str = "") -> Formula:
        text = f"{meaning}: address on the device{or_none}"
        return self._input(name_in_c(name), "address", 0, _MOST_ADDRESS, text)

    def _address_of(self, tensor: Tensor) -> Formula:
        """Return the address of a tensor. That it is not aligned becomes a check."""
        name, axes = tensor.name, ", ".join(tensor.axes)
        or_none = "; 0 if it is not given" if name in self.optional else ""
        address = self._address(name, f"{name}, {tensor.element.short} ({axes})", or_none)
        if (
            self._uses(name_in_c(name))
            and (alignment := self.config.supports.alignment_of(tensor)) > 1
        ):

            def check() -> None:
                if address % alignment:
                    raise ValueError(
                        f"{name} starts at address {address}, not a multiple of {alignment} bytes"
                    )

            self._check(check)
        return address

    def _check(self, function: Callable[[], Any]) -> Tree:
        """Run a function on all its paths; its refusals become checks."""
        tree = explore(self.path, function, self.known)
        self.checks += (Check(*refusal) for refusal in refusals(tree))
        self.known = {**self.known, **(facts(tree) or {})}
        self.path.follow(self.known)
        return tree

    def _merging_numbers(self) -> Config:
        """Return the config with methods that return an int on all of their paths at once, as one
        formula. Else each path of theirs would be run with each path of `Config.call`."""
        found = copy.copy(self.config)

        def number_of(name: str, *arguments: Any) -> Any:
            method = functools.partial(getattr(type(found), name), found, *arguments)
            key = f"{name}{arguments}"
            if key not in self._numbers:
                self._numbers[key] = merged(self.path, method, self.known)
            number = self._numbers[key]
            return method() if number is None else number

        for name, method in inspect.getmembers(type(found), inspect.isfunction):
            if method.__annotations__.get("return") == "int":
                vars(found)[name] = functools.partial(number_of, name)
        return found

    def _launch(self) -> tuple[Call, Launch]:
        call = self._merging.call(self.problem(), self.strides, self.device)
        own = self.config.kernels[self.function]
        launches = [launch for launch in call.launches if launch.kernel == own]
        if not launches:
            others = [launch.kernel for launch in call.launches]
            if others[0] in self.config.kernels.values():
                raise ValueError(
                    f"{' and '.join(others)} does all of this call: do not launch {own}"
                )
            raise ValueError(f"these strides need {others[0]} instead of {own}: export that one")
        (launch,) = launches
        return call, launch

    def _value(self, pick: Callable[[tuple[Call, Launch]], Any]) -> Formula:
        found = value_of(self.tree, self.path, pick)
        assert found is not None  # no problem at all would be accepted
        return found

    def _values(self, pick: Callable[[tuple[Call, Launch]], Any]) -> tuple[Formula, ...]:
        """Return the formulas of the items of a tuple."""

        def item(number: int) -> Formula:
            return self._value(lambda found: pick(found)[number])

        return tuple(item(number) for number in range(len(pick(next(leaves(self.tree))))))

    def _formula(self) -> LaunchFormula:
        found = [*leaves(self.tree)]
        (block,) = {launch.block for _, launch in found}
        (shared_bytes,) = {launch.shared_bytes for _, launch in found}
        (programmatic,) = {launch.programmatic for _, launch in found}
        layout = self.config.family.kernels[self.function]
        buffers = {buffer.name: buffer for call, _ in found for buffer in call.buffers}
        for name in buffers:
            self.addresses[name] = self._address(name, f"{name}, a buffer")
        maps = dict(found[0][1].tensor_maps)
        return LaunchFormula(
            self.config,
            self.function,
            tuple(self.inputs),
            tuple(self.checks),
            tuple(self.path.named),
            self._values(lambda found: found[1].grid),
            self._values(lambda found: found[1].cluster),
            block,
            shared_bytes,
            programmatic,
            layout,
            {m.name: self._member(m) for m in layout.members if m.offset not in maps},
            tuple(self._map(m, maps[m.offset]) for m in layout.members if m.offset in maps),
            tuple(self._buffer(buffer) for buffer in buffers.values()),
        )

    def _member(self, member: Member) -> tuple[Formula, ...]:
        def values(found: tuple[Call, Launch]) -> tuple[Any, ...]:
            for address in found[1].addresses:
                if address.member == member.offset:
                    return (self.addresses[address.tensor] + address.offset,)
            return found[1].values.get(member.name, (0,) * member.kind.count)

        return self._values(values)

    def _map(self, member: Member, form: TensorMap) -> MapFormula:
        def part(name: str) -> tuple[Formula, ...]:
            return self._values(
                lambda found: getattr(dict(found[1].tensor_maps)[member.offset], name)
            )

        offset = self._value(lambda found: dict(found[1].tensor_maps)[member.offset].offset)
        address = self.addresses[form.tensor] + offset
        return MapFormula(member, form, address, part("dims"), part("strides"), part("box"))

    def _buffer(self, buffer: Buffer) -> BufferFormula:
        def size(found: tuple[Call, Launch]) -> Any:
            return {x.name: x.bytes for x in found[0].buffers}.get(buffer.name, 0)

        return BufferFormula(buffer.name, self._value(size), buffer.zeroed)


def _is_exported(field: Field[Any]) -> bool:
    return "help" in field.metadata and field.metadata.get("exported", True)


def _refuse(reason: str) -> None:
    if reason:
        raise ValueError(reason)
