"""A site that was built, for the tests that look at it, and views that stand in for those that the
first tier does not build."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from browser import skip_or_fail

from flash_helpers.course.evidence import Evidence
from flash_helpers.course.site import SiteError, require_site_packages
from flash_helpers.course.site_views import View, step_views, view_name
from flash_helpers.kernel_configs import FAMILIES, STEPS
from flash_helpers.registry.family import Family, Step

STEP = STEPS["v7"]
"""The step whose page and view the tests of the browser look at."""
INDENTED = STEPS["v3"]
"""The step whose first change begins beyond column 40."""


def _first_families() -> list[Family]:
    """Return the first family of each operation and kind of tensor instructions."""
    kinds = {(f.operation.name, f.is_portable): f for f in reversed(FAMILIES.values())}
    return [family for family in FAMILIES.values() if family in kinds.values()]


ENDS = [[*family.steps.values()][n] for family in _first_families() for n in (0, -1)]
"""The first and the last step of one family of each kind."""
BUILT = list(dict.fromkeys([*ENDS, STEP, INDENTED]))
"""The steps whose views stand in the site of the first tier: all views are made in one way."""


@dataclass(frozen=True)
class BuiltSite:
    """folder: of the site. warnings: of its build."""

    folder: Path
    warnings: list[str]

    def text(self, name: str) -> str:
        """A page as it stands in its file."""
        return (self.folder / name).read_text(encoding="utf-8")


def require_builder() -> None:
    """Skip the test where a site cannot be built, or fail it where it must be (see `browser`)."""
    try:
        require_site_packages()
    except SiteError as error:
        skip_or_fail(str(error))


def stand_ins(steps: Iterable[Step]) -> Iterator[View]:
    """Yield empty views of steps, which links lead to."""
    return (View(view_name(step), "<html></html>", ()) for step in steps)


def some_views(evidence: Evidence, pages: Mapping[str, str]) -> Iterator[View]:
    """Yield the views of the steps in BUILT, and stand-ins of the others."""
    yield from step_views(evidence, pages, BUILT)
    yield from stand_ins(step for step in STEPS.values() if step not in BUILT)
