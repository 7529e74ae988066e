"""A family: one progression of kernels, each step one idea from its parent.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from flash_helpers import gpu
from flash_helpers.registry.call import StructLayout
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.problem import Element

C = TypeVar("C", bound=Any)  # the family's config class

# Places of a step's page in the course: on the path that every reader takes, about what a user
# of the library needs, about experiments of one kind, or looked up.
CORE, LIBRARY, LAB, LOGBOOK = "core", "library", "lab", "logbook"

# A trait of steps of any family: thread blocks add to sums in memory, in an order that differs from
# call to call, and with it the last bits of the results.
UNORDERED_SUMS = "unordered_sums"
# Another, of one step alone: it was not measured, or not found right on a GPU in all random tests.
# Calls that name no kernel pass it over.
HELD_BACK = "held_back"
# Another, of one step alone: calls that name no kernel take it for problems alone that no step
# before it takes, since it was not measured or is slower.
LAST_RESORT = "last_resort"
_OF_ONE_STEP = frozenset({HELD_BACK, LAST_RESORT})


@dataclass(frozen=True)
class StepEntry:
    """A step's entry in the registry.

    `slug`: the idea in a word or two, for names of pages. `idea`: the idea in one line. `source`:
    the kernel's file, relative to the root of the repository. `sets`: options that the step turns
    on, by name of the config's field. `opens`: options that it makes tunable, with the values that
    a sweep tries; with none, an option that it fixes again. `traits`: facts about the kernel from
    this step on that its config does not show, and HELD_BACK or LAST_RESORT, which say nothing of
    later steps. `drops`: traits of the steps before that it does not have, nor do those behind it.
    `parent`: id of another step than the one before it, of this family or another; None stands for
    the step before it. `place`: the place of its page in the course.
    """

    slug: str
    idea: str
    source: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    opens: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    parent: str | None = None
    place: str = LOGBOOK


@dataclass(frozen=True)
class Step:
    """One step of a family.

    `id`: such as "v9", which names it everywhere. `parent`: id of the step that it is one idea
    from; None for the first step of all. `fixed`: config field to the only value that this step's
    kernel accepts. `tunable`: config field to the values that a sweep tries; the kernel accepts any
    value that the config lets through. `options`: the fixed config's, d_head and tile shape
    included. `place`: the place of the step's page in the course.
    """

    id: str
    number: int
    family: str
    slug: str
    idea: str
    parent: str | None
    source: PurePosixPath
    fixed: Mapping[str, Any] = field(hash=False)
    tunable: Mapping[str, tuple[Any, ...]] = field(hash=False)
    options: Mapping[str, Any] = field(hash=False)
    traits: frozenset[str]
    place: str

    @property
    def namespace(self) -> str:
        """C++ namespace of the kernel."""
        return self.id

    @property
    def is_deterministic(self) -> bool:
        """Whether every call gives the same bits for the same inputs."""
        return UNORDERED_SUMS not in self.traits


@dataclass(frozen=True)
class Family(Generic[C]):
    """A progression of kernels that share a config class and argument structs.

    `prefix`: one letter of the steps' ids, or two. `rank`: families sort by it. `base`: options of
    a step that sets nothing. `targets`: architectures that the kernels are compiled for, such as
    "80" or "90a", each with machine code. `kernels`: argument struct of each kernel of a config, by
    the name of the C++ function, in the order of their first launch. `header`: the file that
    defines the C++ struct of the config class. `dtypes`: element types that steps are made for.
    `computing`: traits with which a step computes other numbers than the step before it, so that
    fp16 is worth a kernel of its own. With None every step is listed in every dtype.
    `simulated_budget`: warp instructions of its kernels that one run of the tests may simulate;
    none for a family that no test simulates. `matrix_budget`: the same for a run of the tests with
    marker `matrix`. `in_library`: the library holds the fixed configs and the winners of sweeps;
    what it does not hold is compiled at first use. `also_listed`: configs that are listed beside
    the progression and the winners. `successor`: a sentence about the present name of a short form
    that a family once had; "" for any other text.
    """

    name: str
    title: str
    operation: Operation
    prefix: str
    rank: int
    config: type[C]
    base: Mapping[str, Any]
    entries: tuple[StepEntry, ...]
    targets: tuple[str, ...]
    kernels: Mapping[str, StructLayout]
    header: PurePosixPath
    dtypes: tuple[Element, ...]
    computing: frozenset[str] | None = None
    simulated_budget: int = 0
    matrix_budget: int = 0
    in_library: bool = False
    also_listed: Callable[[], Iterable[C]] = field(default=tuple, compare=False)
    successor: Callable[[str], str] = field(default=lambda _: "", compare=False)

    @property
    def map_header(self) -> PurePosixPath:
        """The generated map from config to kernel, relative to the root, of a family in the
        library."""
        return PurePosixPath(f"src/include/{self.name}_kernels.cuh")

    def step_id(self, number: int) -> str:
        """Return the id of a step by its number: "v9" for 9."""
        return f"{self.prefix}{number}"

    @cached_property
    def steps(self) -> Mapping[str, Step]:
        """The steps by id, in order."""
        options = dict(self.base)
        tunable: dict[str, tuple[Any, ...]] = {}
        traits: frozenset[str] = frozenset()
        found = {}
        for number, entry in enumerate(self.entries, start=1):
            options |= entry.sets
            opened = {**tunable, **entry.opens}
            tunable = {name: values for name, values in opened.items() if values}
            traits = (traits - entry.drops) | (entry.traits - _OF_ONE_STEP)
            before = self.step_id(number - 1) if number > 1 else None
            found[self.step_id(number)] = Step(
                id=self.step_id(number),
                number=number,
                family=self.name,
                slug=entry.slug,
                idea=entry.idea,
                parent=entry.parent or before,
                source=PurePosixPath(entry.source),
                fixed=MappingProxyType({k: v for k, v in options.items() if k not in tunable}),
                tunable=MappingProxyType(dict(tunable)),
                options=MappingProxyType(dict(options)),
                traits=traits | entry.traits,
                place=entry.place,
            )
        return MappingProxyType(found)

    @cached_property
    def preferred(self) -> tuple[Step, ...]:
        """The steps that a call takes which names no kernel, if no measurement speaks for another.

        The first is the last that is neither held back nor a last resort. If its bits differ from
        call to call, the last of these whose bits do not is behind it. The steps that are a last
        resort stand behind both, the newest first.
        """
        ready = [step for step in self.steps.values() if not step.traits & _OF_ONE_STEP]
        deterministic = [step for step in ready if step.is_deterministic]
        resort = [step for step in self.steps.values() if LAST_RESORT in step.traits]
        return tuple(dict.fromkeys((*ready[-1:], *deterministic[-1:], *reversed(resort))))

    def fixed_config(self, step: Step, dtype: Element) -> C:
        """Return the config with which the progression shows a step."""
        return self.config(step.number, dtype, **step.options)

    def dtypes_of(self, step: Step) -> tuple[Element, ...]:
        """Return the dtypes that a step is listed in. All dtypes, if it is the first, a preferred
        one or the last of the family, or computes other numbers than the step before it; else all
        but fp16."""
        preferred = (own.number for own in self.preferred)
        if self.computing is None or step.number in (1, *preferred, len(self.steps)):
            return self.dtypes
        before = self.steps[self.step_id(step.number - 1)]
        if (step.traits - before.traits) & self.computing:
            return self.dtypes
        return tuple(dtype for dtype in self.dtypes if dtype is not Element.FP16)

    def progression(self) -> list[C]:
        """Return every step at its fixed config, in each dtype that it is listed in, in order."""
        return [
            self.fixed_config(step, dtype)
            for step in self.steps.values()
            for dtype in self.dtypes_of(step)
        ]

    def sweep(self) -> list[C]:
        """Return every possible config that a sweep tries, for each step with tunable options."""
        return sorted(
            config
            for step in self.steps.values()
            if math.prod(map(len, step.tunable.values())) > 1
            for dtype in self.dtypes
            for config in self._candidates(step, dtype)
        )

    def _candidates(self, step: Step, dtype: Element) -> Iterator[C]:
        for values in itertools.product(*step.tunable.values()):
            options = dict(zip(step.tunable, values, strict=True))
            try:
                yield self.config(step.number, dtype, **step.fixed, **options)
            except ValueError:
                continue  # this combination of values is impossible

    @property
    def is_portable(self) -> bool:
        """Whether the kernels run on GPUs later than their targets; kernels that use one
        architecture's own instructions, such as 90a, do not."""
        return all(target.isdecimal() for target in self.targets)

    def targets_for(self, architectures: Iterable[int]) -> tuple[str, ...]:
        """Return the family's targets in a library for architectures such as 90, which includes
        90a; none for an architecture that the kernels do not run on."""
        if self.is_portable:
            lowest = min(self.capabilities)
            return tuple(str(number) for number in architectures if number >= lowest)
        numbers = [str(architecture) for architecture in architectures]
        return tuple(target for target in self.targets if target[:-1] in numbers)

    def target_on(self, architecture: str) -> str:
        """Return the target of the kernels for an architecture: "sm_90a" for "sm_90" if the family
        is made for that. Raises ValueError for an architecture that it is not made for."""
        number = gpu.capability_of(architecture)
        own = [f"sm_{target}" for target in self.targets_for([number])]
        if number < min(self.capabilities) or architecture not in (*own, *(t[:-1] for t in own)):
            raise ValueError(
                f"the kernels of family {self.name} are made for "
                f"{', '.join(f'sm_{target}' for target in self.targets)}"
                f"{' and later' if self.is_portable else ''}, not for {architecture}"
            )
        return own[0]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of a compute capability such as (9, 0) can run the kernels."""
        own = 10 * capability[0] + capability[1]
        return own >= min(self.capabilities) if self.is_portable else own in self.capabilities

    def refusal_on(self, name: str, capability: tuple[int, int]) -> str:
        """Return the reason why the kernels do not run on a GPU of this name and compute
        capability, with the way out; "" if they do."""
        if self.runs_on(capability):
            return ""
        lowest = min(self.capabilities)
        needed = f"{lowest // 10}.{lowest % 10}{' or higher' if self.is_portable else ''}"
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]} and the kernels of "
            f"family {self.name} need {needed}: use another GPU"
        )

    @property
    def capabilities(self) -> tuple[int, ...]:
        """Compute capabilities of the targets: 90 for 90a."""
        return tuple(gpu.capability_of(f"sm_{target}") for target in self.targets)
