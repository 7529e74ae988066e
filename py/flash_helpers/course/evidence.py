"""Where the numbers of the pages come from, each read once: the machine code of the installed
library, the simulator, and committed measurements."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import flash_attention
from flash_helpers.course.arguments import DTYPE, fixed_config
from flash_helpers.course.counting import KernelCounts, count_kernel
from flash_helpers.course.published import Published, load_published
from flash_helpers.course.sources import StepDiff, step_diff
from flash_helpers.kernel_configs import STEPS, Config, get_kernel_progression_configs
from flash_helpers.measure.machine_code import (
    ConfigFacts,
    config_facts,
    installed_library,
    library_kernels,
)
from flash_helpers.measure.results import BenchmarkResults, load_results
from flash_helpers.registry.family import Step
from flash_helpers.sass.read.reader import progress_bar
from flash_helpers.sass.read.records import Kernel

RESULTS = Path("benchmarks/results/h100.json")
PUBLISHED = Path("docs/data/published.json")
CACHE = Path("build/course")


class Evidence:
    """The sources of numbers below one checkout of the repository.

    root: of the repository. Whatever is asked for raises ValueError (SassError and UsageError
    among them), OSError or RuntimeError where it cannot be had.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._facts: dict[tuple[Config, str], ConfigFacts] = {}
        self._kernels: dict[tuple[Config, str], Kernel] = {}
        self._counts: dict[Config, KernelCounts] = {}
        self._diffs: dict[int, StepDiff] = {}

    @cached_property
    def results(self) -> BenchmarkResults:
        """What was measured on the H100."""
        return load_results(self.root / RESULTS)

    @cached_property
    def published(self) -> Published:
        """What was published for other GPUs."""
        return load_published(self.root / PUBLISHED)

    def facts(self, config: Config, architecture: str) -> ConfigFacts:
        """The machine code of a kernel of the library, counted."""
        key = (config, architecture)
        if key not in self._facts:
            kernel = self._kernel(config, architecture)
            self._facts[key] = config_facts(config, kernel, self.results)
        return self._facts[key]

    def _kernel(self, config: Config, architecture: str) -> Kernel:
        if (config, architecture) not in self._kernels:
            # the whole progression at once: opening the library takes longer than reading a kernel
            wanted = {config}
            if not any(there == architecture for _, there in self._kernels):
                wanted.update(c for c in get_kernel_progression_configs() if c.dtype == DTYPE)
            with progress_bar(f"read SASS of {architecture}") as progress:
                found = library_kernels(architecture, wanted, progress=progress)
            self._kernels.update({(c, architecture): kernel for c, kernel in found.items()})
        return self._kernels[config, architecture]

    def counts(self, config: Config) -> KernelCounts:
        """What the simulator counts of a kernel."""
        if config not in self._counts:
            ptx = installed_library().parent / "ptx" / f"{config.short_form()}.ptx"
            self._counts[config] = count_kernel(
                config, ptx, self.root / CACHE, flash_attention.simulate
            )
        return self._counts[config]

    def step_diff(self, step: Step) -> StepDiff:
        """What a step changed in the source."""
        if step.id not in self._diffs:
            self._diffs[step.id] = step_diff(step, self.root)
        return self._diffs[step.id]


def with_parent(step: Step) -> list[Config]:
    """The configs of the parent, if there is one, and of the step."""
    parent = [STEPS[step.parent]] if step.parent else []
    return [fixed_config(found) for found in (*parent, step)]
