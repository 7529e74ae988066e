"""A site that was built, for the tests that look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from browser import skip_or_fail

from flash_helpers.course.site import SiteError, require_site_packages


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
