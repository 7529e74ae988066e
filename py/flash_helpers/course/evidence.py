"""Where the numbers of the pages come from, each read once: the machine code of the installed
library, the simulator, and committed measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, cached_property
from pathlib import Path

from flash_helpers.course.arguments import DTYPE
from flash_helpers.course.counting import KernelCounts, count_kernel
from flash_helpers.course.published import Published
from flash_helpers.course.sources import CodeDiff, code_diff
from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import STEPS, Config, get_kernel_progression_configs
from flash_helpers.measure.machine_code import ConfigFacts, config_facts, library_kernels
from flash_helpers.measure.results import BenchmarkResults, load_results
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.selection import UsageError
from flash_helpers.runtime import library
from flash_helpers.sass.read.reader import progress_bar
from flash_helpers.sass.read.records import Kernel

RESULTS = Path("benchmarks/results/h100.json")
PUBLISHED = Path("docs/data/published.json")


class NotBuiltError(RuntimeError):
    """The library that is installed was built for other architectures; the message says so."""


class Evidence:
    """The sources of numbers below one checkout of the repository.

    root: of the repository. Whatever is asked for raises ValueError (SassError and UsageError
    among them), OSError or RuntimeError (NotBuiltError among them) where it cannot be had.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kernels: dict[tuple[Config, str], Kernel] = {}
        self._facts = cache(self._read_facts)
        # what the simulator counts of a kernel
        self.counts: Callable[[Config], KernelCounts] = cache(count_kernel)

    @cached_property
    def results(self) -> BenchmarkResults:
        """What was measured on the H100."""
        return load_results(self.root / RESULTS)

    @cached_property
    def published(self) -> Published:
        """What was published for other GPUs."""
        return Published.load(self.root / PUBLISHED)

    def require_built(self, architectures: Collection[str]) -> None:
        """Raise NotBuiltError unless the library holds code for all of these."""
        missing = set(architectures).difference(library.architectures() if architectures else ())
        if missing:
            raise NotBuiltError(
                f"the installed library holds no code for {', '.join(sorted(missing))}, only for "
                f"{', '.join(library.architectures())}"
            )

    def facts(self, config: Config, architecture: str) -> ConfigFacts:
        """The machine code of a kernel of the library, counted.

        architecture: such as "sm_90", which stands for sm_90a where a family is built for that.
        """
        return self._facts(config, target_of(config.family, architecture))

    def _read_facts(self, config: Config, target: str) -> ConfigFacts:
        return config_facts(config, self._kernel(config, target), self.results)

    def _kernel(self, config: Config, target: str) -> Kernel:
        self.require_built([target])
        if (config, target) not in self._kernels:
            # the whole progression at once: opening the library takes longer than reading a kernel
            wanted = {config}
            if not any(there == target for _, there in self._kernels):
                wanted.update(
                    c
                    for c in get_kernel_progression_configs()
                    if c.dtype == DTYPE and c.family is config.family
                )
            with progress_bar(f"read SASS of {target}") as progress:
                found = library_kernels(target, wanted, progress=progress)
            self._kernels.update({(c, target): kernel for c, kernel in found.items()})
        return self._kernels[config, target]

    def step_diff(self, step: Step) -> CodeDiff:
        """What a step changed in its parent's code. Raises UsageError for one without a parent."""
        if step.parent is None:
            raise UsageError(f"step {step.id} has no parent: there is nothing to compare it with")
        return code_diff(STEPS[step.parent], step, self.root)


def target_of(family: Family, architecture: str) -> str:
    """What a family's kernels are compiled for, for an architecture such as "sm_90".

    Raises UsageError if they are not made for it.
    """
    targets = family.targets_for([capability_of(architecture)])
    if not targets:
        raise UsageError(
            f"the kernels of family {family.name} are made for "
            f"{', '.join(f'sm_{target}' for target in family.targets)}, not for {architecture}"
        )
    return f"sm_{targets[0]}"
