"""The course as a static site that needs no server and no network: the Markdown pages, rendered by
Sphinx as GitHub renders them, and the linked CUDA, PTX and SASS of every step."""

from __future__ import annotations

import importlib.util
import io
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flash_helpers.console.progress import bar
from flash_helpers.course import markers
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.glossary import read_terms
from flash_helpers.course.pages import FOLDER, PAGES, README, REFERENCE, all_pages
from flash_helpers.course.site_links import LinkTargets, broken_links
from flash_helpers.course.site_views import card_html, step_views, view_name, views_markdown
from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.benchmark_tables import lengths_table, main_dtype, progression_table
from flash_helpers.measure.plots import PLOT_TITLES
from flash_helpers.measure.results import BenchmarkResults

ASSETS = PurePosixPath("docs/assets")

MEASUREMENTS = "measurements"
VIEWS_PAGE = "views"

_PACKAGES = ("sphinx", "myst_parser", "furo")
_SITE_FILE = ".buildinfo"  # Sphinx leaves it in what it built
_NAV, _NEXT = "nav", "next"  # kinds of blocks whose links every page of the site has anyway


class SiteError(RuntimeError):
    """The site cannot be built here; the message says why, and what helps."""


class SiteWarningsError(SiteError):
    """The site would have faults, and was to have none; the message has a line for each."""


@dataclass(frozen=True)
class _Source:
    """A page before Sphinx reads it. name: in the site, without `.html`. path: of its Markdown,
    relative to the root of the repository; that of a page that is made names no file."""

    name: str
    path: PurePosixPath
    text: str


def require_site_packages() -> None:
    """Raise SiteError, with the way out, where Sphinx, its Markdown or its theme is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SiteError(f"the site needs {', '.join(missing)}: pip install '.[docs]'")


def build_site(
    root: Path, output: Path, *, strict: bool = False, repo_url: str | None = None
) -> list[str]:
    """Build the site of the repository `root` into the folder `output`; returns its warnings.

    strict: a warning fails the build. repo_url: where the files of the repository can be seen, such
    as https://host/owner/name/blob/main; without it the linked ones are copied into the site.
    A build that fails leaves the site that was there.

    Raises SiteError where no site can be built, SiteWarningsError for warnings if strict, and
    SassError, BuildError, PlotError, ValueError or OSError for a library or files that cannot be
    read.
    """
    require_site_packages()
    _require_replaceable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as name:
        build = _Build(Evidence(root), Path(name), repo_url)
        warnings = build.run()
        if strict and warnings:
            raise SiteWarningsError("\n".join(warnings))
        _replace(output, build.built, Path(name) / "old")
    return warnings


def _require_replaceable(output: Path) -> None:
    """Raise SiteError for a folder that holds anything but a site."""
    if output.is_dir() and ((output / _SITE_FILE).is_file() or not any(output.iterdir())):
        return
    if output.exists():
        raise SiteError(f"{output} is there, and is not a site: name another folder")


def _replace(output: Path, built: Path, old: Path) -> None:
    """Put the new site in the place of the old one."""
    if output.exists():
        output.rename(old)
    try:
        built.rename(output)
    except OSError:
        if old.exists():
            old.rename(output)
        raise


def _title(root: Path) -> str:
    """The first heading of the README."""
    text = (root / README).read_text(encoding="utf-8") if (root / README).is_file() else ""
    heading = re.search(r"^# (.+)", text, re.MULTILINE)
    if heading is None:
        raise SiteError(
            f"{root / README} has no heading: the site is named by it, and begins there"
        )
    return heading[1]


def _written_pages(root: Path) -> list[_Source]:
    """The Markdown files of the repository that are pages: the README, and those of the docs."""
    paths = dict.fromkeys([README, *(page.path for page in PAGES), *all_pages(root)])
    return [
        _Source(
            name="index" if path == README else path.stem.lower(),
            path=path,
            text=_without_markers(path, (root / path).read_text(encoding="utf-8")),
        )
        for path in paths
        if (root / path).is_file()
    ]


def _without_markers(path: PurePosixPath, text: str) -> str:
    """The page as a reader sees it, line for line where it was. A comment stands for what the menu
    makes needless: a heading over nothing else goes with it."""
    try:
        parts = markers.parse(text)
    except markers.MarkerError as error:
        raise SiteError(f"{path}:{error.line}: {error}") from error
    kept = []
    for part in parts:
        if isinstance(part, markers.Prose):
            kept.append(part.text)
        elif part.kind in (_NAV, _NEXT):
            head = part.body.strip().partition("\n\n")[0] if part.kind == _NAV else ""
            lines = part.body.count("\n") + 2 - 2 * bool(head)
            kept.append(f"\n{head}\n" * bool(head) + "<!-- neighbours -->" + "\n" * lines)
        else:
            kept.append(f"\n{part.body}\n")
    return "".join(kept)


def _made_pages(results: BenchmarkResults) -> list[_Source]:
    """The pages that only the site has."""
    pictures = [f"![{title}](images/{name}.svg)" for name, title in PLOT_TITLES.items()]
    lengths = lengths_table(results, main_dtype(results), results.main_load)
    parts = ["# Measurements", *pictures, progression_table(results), lengths]
    measurements = "\n\n".join(parts)
    return [
        _Source(MEASUREMENTS, FOLDER / f"{MEASUREMENTS}.md", measurements),
        _Source(VIEWS_PAGE, FOLDER / f"{VIEWS_PAGE}.md", views_markdown()),
    ]


def _unlisted_pages(root: Path) -> list[str]:
    listed = {page.path for page in PAGES}
    found = {path for path in all_pages(root) if path.parent == FOLDER}
    return [
        *(f"{path} is in the list of pages, and not there" for path in sorted(listed - found)),
        *(f"{path} is not in the list of pages" for path in sorted(found - listed)),
    ]


@dataclass(frozen=True)
class _Build:
    """One build in a folder of its own."""

    evidence: Evidence
    folder: Path
    repo_url: str | None

    @property
    def built(self) -> Path:
        """The site."""
        return self.folder / "site"

    @property
    def _source(self) -> Path:
        return self.folder / "source"

    def run(self) -> list[str]:
        """Build; returns the warnings."""
        root, results = self.evidence.root, self.evidence.results
        sources = [*_written_pages(root), *_made_pages(results)]
        names = {page.path: page.name for page in sources}
        steps = {p.step: names[p.path] for p in PAGES if p.step is not None and p.path in names}
        self._source.mkdir()
        for page in sources:
            (self._source / f"{page.name}.md").write_text(page.text, encoding="utf-8")
        total = 2 * len(sources) + len(STEPS)  # a page is read, and written
        with bar(total=total, desc="site", unit="page", leave=False) as progress:
            warnings = self._render(names, steps, progress.update)
            for view in step_views(self.evidence, steps):
                for name, text in view.files():
                    path = self.built / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
                warnings += [
                    f"{view.name} cannot show {source}: the installed library was built from "
                    "another one; build it again (pip install .)"
                    for source in view.missing
                ]
                progress.update()
        return [*_unlisted_pages(root), *warnings, *broken_links(self.built)]

    def _render(
        self,
        names: Mapping[PurePosixPath, str],
        steps: Mapping[str, str],
        on_page: Callable[[], object],
    ) -> list[str]:
        """Let Sphinx make the pages; returns what it warned of.

        names: of the pages, by the path of their Markdown. steps: those about a step.
        """
        from sphinx.application import Sphinx
        from sphinx.errors import SphinxError
        from sphinx.util.console import strip_escape_sequences
        from sphinx.util.docutils import docutils_namespace, patch_docutils

        from flash_helpers.course.site_pages import SitePages

        root, warnings = self.evidence.root, io.StringIO()
        pages = SitePages(
            source=self._source,
            targets=LinkTargets(
                root,
                {path: name for path, name in names.items() if (root / path).is_file()},
                frozenset(map(view_name, STEPS.values())),
                self.repo_url,
            ),
            paths={name: path for path, name in names.items()},
            menus=_menus(set(names.values())),
            cards={name: card_html(STEPS[step]) for step, name in steps.items()},
            terms=read_terms(root),
            on_page=on_page,
        )
        try:
            # these undo Sphinx's changes to docutils, for a later build in this process
            with patch_docutils(), docutils_namespace():
                app = Sphinx(
                    srcdir=self._source,
                    confdir=None,
                    outdir=self.built,
                    doctreedir=self.folder / "doctrees",
                    buildername="html",
                    confoverrides=self._settings(),
                    status=None,
                    warning=warnings,
                )
                pages.connect(app)
                app.build()
        except SphinxError as error:
            raise SiteError(f"Sphinx cannot build the site: {error}") from error
        text = strip_escape_sequences(warnings.getvalue())
        for path, name in names.items():
            text = text.replace(str(self._source / f"{name}.md"), str(path))
        return text.splitlines()

    def _settings(self) -> dict[str, Any]:
        """Sphinx's configuration."""
        title = _title(self.evidence.root)
        return {
            "project": title,
            "html_title": title,
            "html_short_title": title,
            "language": "en",
            "root_doc": "index",
            "suppress_warnings": ["toc.not_included"],  # _unlisted_pages tells that better
            "extensions": ["myst_parser"],
            "source_suffix": {".md": "markdown"},
            "myst_gfm_only": True,
            "myst_heading_anchors": 6,
            "highlight_language": "none",
            "pygments_style": "a11y-light",
            "html_theme": "furo",
            "html_static_path": [str(self.evidence.root / ASSETS)],
            "html_css_files": ["site.css"],
            "html_js_files": [("site.js", {"defer": "defer"})],
            "html_copy_source": False,
            "html_show_copyright": False,
            "html_use_index": False,
            "html_domain_indices": False,
            "html_show_search_summary": False,  # a page from a file may not fetch it
        }


def _menus(names: set[str]) -> dict[str, list[tuple[str, str]]]:
    """The menu: the parts of the course in their order, and what is looked up."""
    menus: dict[str, list[tuple[str, str]]] = {}
    for page in PAGES:
        if page.path.stem in names:
            menus.setdefault(page.part or REFERENCE, []).append((page.title, page.path.stem))
    made = [("Measurements", MEASUREMENTS), ("CUDA, PTX and SASS", VIEWS_PAGE)]
    contributing = [("Contributing", "contributing")] if "contributing" in names else []
    looked_up = [*made, *menus.pop(REFERENCE, []), *contributing]
    return {**menus, REFERENCE: looked_up}
