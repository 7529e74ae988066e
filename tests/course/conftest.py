"""Pages of a test's own to build, and the site of the repository, built once for all its tests."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from built_site import BuiltSite, require_builder, some_views
from course_book import Book

from flash_helpers.course import site
from flash_helpers.course.blocks import render
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.site import build_site


@pytest.fixture(scope="session")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> BuiltSite:
    """The site, with the views of the steps in BUILT."""
    require_builder()
    folder = tmp_path_factory.mktemp("course") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "step_views", some_views)
        return BuiltSite(folder, build_site(root, folder))


@pytest.fixture
def book(root: Path, tmp_path: Path) -> Book:
    for name in ("src", "previous_kernels", "benchmarks"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/data").symlink_to(root / "docs/data")
    return Book(tmp_path)


@pytest.fixture(scope="session")
def evidence(root: Path) -> Evidence:
    """That of the real repository."""
    return Evidence(root)


@pytest.fixture(scope="session")
def show(evidence: Evidence) -> Callable[..., str]:
    """The text of a block, written as on a page, which is given as `page`."""

    def rendered(block: str, page: str = "docs/page.md") -> str:
        kind, _, arguments = block.partition(" ")
        return render(evidence, kind, arguments, PurePosixPath(page))

    return rendered
