"""Speed of a kernel as the pages tell it: in the unit of its operation, and beside the library that
is 100% there. All pages ask here, and nothing else of the course names a unit or a library."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import FLASH, BenchmarkResults
from flash_helpers.registry.family import Family


@dataclass(frozen=True)
class Metric:
    """Unit and comparison of an operation's speeds.

    unit: of a speed. library: contender that is 100%. title: its full name. short: its name in
    tables. term: anchor of the short name in the glossary. beside: short names of further
    libraries, by contender, of which the fastest is drawn beside kernels that need one
    architecture's own instructions.
    """

    unit: str
    library: str
    title: str
    short: str
    term: str
    beside: dict[str, str]

    @property
    def heading(self) -> str:
        """Heading of a column in percent."""
        return f"of {self.short}"


TERMS = {FLASH: "flash-backend"}  # anchors of short names in the glossary


def metric_of(family: Family) -> Metric:
    """The metric of a family's operation, beside the first of its libraries."""
    operation = family.operation
    first, title = operation.first, operation.libraries[operation.first]
    beside = dict(operation.short_names)
    short = beside.pop(first, title)
    return Metric(operation.metric.unit, first, title, short, TERMS.get(first, ""), beside)


def speed(results: BenchmarkResults, config: Config, length: int | None = None) -> float | None:
    """Speed in the metric's unit: at one length, or the harmonic mean over all; None where it was
    not measured."""
    return results.speed(config.short_form(), config.dtype.short, length)


def share(
    results: BenchmarkResults, contender: Config | str, dtype: str, length: int | None = None
) -> float | None:
    """Speed over that of the metric's library, of a config or of a library's contender."""
    name = contender if isinstance(contender, str) else contender.short_form()
    return results.of_first(name, dtype, length)
