"""An operation: everything that problems of one kind have in common. Standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import ModuleType
from typing import Any

from flash_helpers.registry.problem import Problem


@dataclass(frozen=True)
class Metric:
    """Speed of a problem. `unit`: unit of the speed. `quantity`: property of the problem that is
    counted per second. `scale`: size of the unit, such as 1e12 for TFLOP/s."""

    unit: str
    quantity: str
    scale: float

    def speed(self, problem: Problem, ms: float) -> float:
        """Return the speed, in the unit, of a problem that took so many milliseconds."""
        return getattr(problem, self.quantity) / (ms * 1e-3) / self.scale


TFLOPS = Metric("TFLOP/s", "operations", 1e12)
GBPS = Metric("GB/s", "bytes", 1e9)


@dataclass(frozen=True)
class Operation:
    """An operation and the places of its parts.

    `name`: name of its folder in flash_helpers.operations. `title`: a noun phrase for readers.
    `small`, `usual`: problems that its kernels are checked on, the small one in the simulator.
    `small_variant`: instead of `small`, for kernels with an option such as a mask, where they take
    it.
    `debugged`: the problem that debug.py looks into. `swept`: field of the problem that benchmarks
    and plots vary. `measured`: returns the problem that is measured at one value of that field.
    `measured_at`: the usual values.

    `distributions`: kinds of inputs, by name, in words. `libraries`: libraries that kernels are
    measured beside, by name, in words; the first is 100%. `ceiling`: the library that moves the
    same bytes and computes nothing, so that its output is not compared; "" if there is none.
    `short_names`: short names of libraries, for tables. `metric`: the metric of speed. `families`:
    its families, in their order, as "module:name" in flash_helpers.registry. `simulated_ns`: time
    of one floating-point operation in the simulator on one core, in nanoseconds, for estimates.

    The folder has these modules, which `part` imports when they are used:

    - inputs: draw(distribution, problem, device, seed) -> tensors by name
    - reference: reference(problem, tensors) -> flash_helpers.check.errors.Reference
    - baselines: run(library, problem, tensors) -> outputs by name; packages
    - faults: FAULTS, planted mistakes by name; problem_of(config), where they show
    - trace, optional: the values inside a kernel, beside the right values
    """

    name: str
    title: str
    problem: type[Problem]
    small: Problem
    usual: Problem
    debugged: Problem
    counted: Problem
    counted_within: Problem
    swept: str
    measured: Callable[..., Problem] = field(compare=False)
    measured_at: tuple[int, ...]
    distributions: Mapping[str, str] = field(compare=False)
    libraries: Mapping[str, str] = field(compare=False)
    metric: Metric
    families: tuple[str, ...]
    simulated_ns: float
    has_trace: bool = False
    small_variant: Problem | None = None
    ceiling: str = ""
    short_names: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def size_field(self) -> Field[Any]:
        """The field of the problem that benchmarks vary."""
        (found,) = (f for f in fields(self.problem) if f.name == self.swept)
        return found

    @property
    def size_name(self) -> str:
        """The name of the size on a command line, such as "seq"."""
        return self.size_field.metadata.get("name", self.swept).replace("_", "-")

    @property
    def size_title(self) -> str:
        """The size in words, such as "sequence length"."""
        return self.size_field.metadata.get("title", self.size_name)

    @property
    def size_word(self) -> str:
        """The size in one word, such as "length"."""
        return self.size_title.split()[-1]

    @property
    def sizes_title(self) -> str:
        """The title of several sizes, such as "sequence lengths"."""
        return self.size_title.removesuffix("s") + "s"

    @property
    def first(self) -> str:
        """The library that is 100%."""
        return next(iter(self.libraries))

    def short_name(self, library: str) -> str:
        """Return the name that a library has in tables."""
        return self.short_names.get(library, library)

    def part(self, module: str) -> ModuleType:
        """Return a module of the operation's folder."""
        return importlib.import_module(f"flash_helpers.operations.{self.name}.{module}")

    def has_part(self, module: str) -> bool:
        """Return whether the operation's folder has a module; it is not imported."""
        name = f"flash_helpers.operations.{self.name}.{module}"
        return importlib.util.find_spec(name) is not None

    def simulated_seconds(self, problem: Problem) -> float:
        """Return an estimate of the seconds that the simulator takes for a problem on one core."""
        return problem.operations * self.simulated_ns * 1e-9
