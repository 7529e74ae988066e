"""Sources of the numbers on the pages, each read once: the machine code of the installed library,
the simulator, and committed measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

from flash_helpers.console.progress import progress_bar
from flash_helpers.course.sources import CodeDiff, code_diff
from flash_helpers.kernel_configs import STEPS, Config
from flash_helpers.measure.machine_code import ConfigFacts, config_facts, own_kernels
from flash_helpers.measure.results import (
    RESULTS,
    BenchmarkResults,
    RecordFile,
    load_results,
    results_by_family,
)
from flash_helpers.ptx import Counts, Phase
from flash_helpers.registry.family import Step
from flash_helpers.registry.problem import Problem
from flash_helpers.registry.selection import UsageError
from flash_helpers.sass.read.records import Kernel

PUBLISHED = Path("docs/data/published.json")


@dataclass(frozen=True)
class PublishedGpu:
    """One GPU of the publication.

    key: the GPU's name in `PublishedStep`. official_tflops: speed of the official FlashAttention-2
    at `seq_len`.
    """

    key: str
    name: str
    official_tflops: float


@dataclass(frozen=True)
class PublishedStep:
    """Percent of the official FlashAttention-2, at one length and of the harmonic means."""

    step: str
    gpu: str
    percent: float
    percent_mean: float


@dataclass(frozen=True)
class Published(RecordFile):
    """Published figures of these ideas on other GPUs.

    source: author and place of the publication. seq_len: of `PublishedStep.percent`. shortest,
    longest: sequence lengths of the mean.
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "published figures"

    source: str
    seq_len: int
    shortest: int
    longest: int
    gpus: tuple[PublishedGpu, ...]
    steps: tuple[PublishedStep, ...]

    def find(self, step: str, gpu: str) -> PublishedStep | None:
        """Published figures of a step on the GPU with this key; None without figures."""
        return next((s for s in self.steps if (s.step, s.gpu) == (step, gpu)), None)


@dataclass(frozen=True)
class KernelCounts:
    """Counts of a kernel in the simulator.

    total: counts of all instructions. main_loop: counts of its instructions. by_opcode: number of
    instructions by PTX opcode.
    """

    total: Counts
    main_loop: Counts
    by_opcode: Mapping[str, Counts]


def count_kernel(
    config: Config, problem: Problem | None = None, within: Problem | None = None
) -> KernelCounts:
    """Return the counts of a problem that lies in the tensors of a larger one. The strides of these
    tensors make the config itself run.

    problem, within: the problem and the larger one, by default the operation's `counted` and
    `counted_within`. Raises RuntimeError if the library's PTX cannot be read.
    """
    from flash_helpers.check.tensors import tensors_for
    from flash_helpers.runtime.simulator import run_shipped

    operation = config.family.operation
    problem, wide_problem = (
        config.supports.adapted(each.in_dtype(config.dtype))
        for each in (problem or operation.counted, within or operation.counted_within)
    )
    wide = config.own_strides(wide_problem)
    strides = {
        tensor.name: tuple(
            stride if size > 1 else 0
            for stride, size in zip(wide[tensor.name], tensor.shape, strict=True)
        )
        for tensor in (*problem.inputs, *problem.outputs)
    }
    inputs = operation.part("inputs").draw("normal", problem)
    tensors = tensors_for(config, problem, inputs, strides)
    counters = run_shipped(config, tensors, **problem.call_options()).counters
    main_loop = counters.by_phase()[Phase.MAIN_LOOP]
    return KernelCounts(counters.total, main_loop, counters.by_opcode())


class Evidence:
    """The sources of numbers in one checkout of the repository.

    root: of the repository. Every method raises ValueError (SassError and UsageError among them),
    OSError or RuntimeError (BuildError among them) if a number is not available.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kernels: dict[tuple[Config, str], Kernel] = {}
        self._facts = cache(self._read_facts)
        # The simulator's counts, by kernel.
        self.counts: Callable[[Config], KernelCounts] = cache(count_kernel)

    @cached_property
    def results(self) -> BenchmarkResults:
        """Measurements on the H100."""
        return load_results(self.root / RESULTS)

    @cached_property
    def _by_family(self) -> Mapping[str, BenchmarkResults]:
        return results_by_family(self.root, self.results)

    def results_of(self, step: Step) -> BenchmarkResults:
        """Results with a step's measurements."""
        return self._by_family[step.family]

    @cached_property
    def published(self) -> Published:
        """Published figures on other GPUs."""
        return Published.load(self.root / PUBLISHED)

    def facts(self, config: Config, architecture: str) -> ConfigFacts:
        """Facts of the machine code of a kernel.

        architecture: such as "sm_90", which stands for sm_90a where a family is built for that.
        """
        return self._facts(config, config.family.target_on(architecture))

    def read(self, configs: Iterable[Config], architecture: str) -> None:
        """Read the machine code of all kernels that `facts` will be asked for: those that the cache
        lacks are compiled at the same time instead of one after the other."""
        wanted: dict[str, list[Config]] = {}
        for config in configs:
            target = config.family.target_on(architecture)
            if (config, target) not in self._kernels:
                wanted.setdefault(target, []).append(config)
        for target, missing in wanted.items():
            with progress_bar(f"read SASS of {target}") as progress:
                found = own_kernels(target, missing, progress=progress)
            self._kernels.update({(c, target): kernel for c, kernel in found.items()})

    def _read_facts(self, config: Config, target: str) -> ConfigFacts:
        self.read([config], target)
        kernel = self._kernels[config, target]
        return config_facts(config, kernel, self.results_of(config.step))

    def step_diff(self, step: Step) -> CodeDiff:
        """Changes of a step to its parent's code. Raises UsageError for a step without a
        parent."""
        if step.parent is None:
            raise UsageError(f"step {step.id} has no parent: there is nothing to compare it with")
        return code_diff(STEPS[step.parent], step, self.root)
