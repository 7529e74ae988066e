"""Speed of a kernel on the pages: in the unit of its operation, and in percent of a library. No
other module of the course names a unit or a library."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import FLASH, BenchmarkResults
from flash_helpers.registry.family import Family


@dataclass(frozen=True)
class Metric:
    """Unit and comparison of an operation's speeds.

    unit: of a speed. library: contender that is 100%. title: the library's full name. short: its
    name in tables. term: anchor of the short name in the glossary.
    beside: short names of further libraries, by contender. The fastest of them is drawn beside
    kernels that use one architecture's own instructions.
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
    """Speed in the metric's unit: at one length, or the harmonic mean over all lengths; None if it
    was not measured."""
    return results.speed(config.short_form(), config.dtype.short, length)


def share(
    results: BenchmarkResults, contender: Config | str, dtype: str, length: int | None = None
) -> float | None:
    """Ratio of the speed of a config or of a library's contender to the metric's library."""
    name = contender if isinstance(contender, str) else contender.short_form()
    return results.of_first(name, dtype, length)
