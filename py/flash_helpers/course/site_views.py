"""For each step a page with the CUDA, PTX and SASS of the step and of its parent."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from flash_helpers.console.tables import Table
from flash_helpers.course.arguments import DEFAULT_ARCHITECTURE, DTYPE, with_parent
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.pages import file_stem
from flash_helpers.kernel_configs import STEPS, Config
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import names_of
from flash_helpers.runtime.library import ptx_path
from flash_helpers.sass.analyse.ptx_links import ptx_sources
from flash_helpers.sass.read.records import SourceLine
from flash_helpers.sass.show.comparison_page import page_facts
from flash_helpers.sass.show.page import PANES, PageKernel, page_html, read_sources
from flash_helpers.sass.show.page_parts import pane_scripts

VIEWS = PurePosixPath("views")  # folder of the site
KERNELS = "kernels"  # folder of the views, with the panes of each kernel


@dataclass(frozen=True)
class View:
    """A page with the CUDA, PTX and SASS of a step.

    `name`: of its file, relative to the site. `missing`: the kernels' own files that the page
    cannot show, because the library was built from other ones. `panes`: texts of the script files
    that the page loads, by name, relative to the site; those that an earlier view has are left out.
    """

    name: PurePosixPath
    text: str
    missing: tuple[str, ...]
    panes: Mapping[PurePosixPath, str] = field(default_factory=dict)

    def files(self) -> Iterator[tuple[PurePosixPath, str]]:
        """Name, relative to the site, and text of each file."""
        yield self.name, self.text
        yield from self.panes.items()


def view_name(step: Step) -> PurePosixPath:
    """The file of a step's page, relative to the site."""
    return VIEWS / f"step_{file_stem(step)}.html"


def view_title(step: Step) -> str:
    """Title of a step's page."""
    return f"CUDA, PTX and SASS of {_beside(step)}"


def _beside(step: Step) -> str:
    return f"step {step.id}" if step.parent is None else f"step {step.id} beside {step.parent}"


def step_views(
    evidence: Evidence, pages: Mapping[str, str], steps: Iterable[Step] = tuple(STEPS.values())
) -> Iterator[View]:
    """The view of each of some steps. pages: names of the pages about a step, which the views lead
    back to, by its id.

    Raises SassError, BuildError or OSError if a kernel cannot be read.
    """
    shown_in = {step: with_parent(step) for step in steps}
    evidence.read({c for configs in shown_in.values() for c in configs}, DEFAULT_ARCHITECTURE)

    @functools.cache  # a kernel is shown with its parent, and with each that it is the parent of
    def ptx_sources_of(config: Config) -> Mapping[int, tuple[SourceLine, ...]]:
        kernel = evidence.facts(config, DEFAULT_ARCHITECTURE).kernel
        return ptx_sources(kernel, ptx_path(config).read_text(encoding="utf-8"))

    written: set[str] = set()
    for step, configs in shown_in.items():
        found = [evidence.facts(config, DEFAULT_ARCHITECTURE) for config in configs]
        shown = [
            PageKernel(
                kernel=facts.kernel,
                name=name,
                title=config.step.idea,
                facts=page_facts(facts, facts.timed),
                ptx_sources=ptx_sources_of(config),
            )
            for config, name, facts in zip(configs, names_of(configs), found, strict=True)
        ]
        sources = read_sources([facts.kernel for facts in found], evidence.root)
        nav = _links(step, pages)
        files = [_pane_files(config) for config in configs]
        text = page_html(
            shown, sources, view_title(step), nav=nav, shown=len(shown) - 1, files=files
        )
        panes = {
            VIEWS / name: script
            for page, names in zip(shown, files, strict=True)
            if not written.issuperset(names.values())
            for name, script in pane_scripts(
                page, read_sources([page.kernel], evidence.root), names
            )
        }
        written.update(name for names in files for name in names.values())
        own = (str(config.step.source) for config in configs)
        missing = tuple(path for path in own if path not in sources)
        yield View(view_name(step), text, missing, panes)


def _pane_files(config: Config) -> dict[str, str]:
    """The script file of each pane of a kernel, relative to the views."""
    return {pane: f"{KERNELS}/{config.short_form()}.{pane}.js" for pane in PANES}


def _links(step: Step, pages: Mapping[str, str]) -> str:
    """The way back, and to the neighbours."""
    order = list(STEPS.values())
    at = order.index(step)
    links = [
        (f"../{pages.get(step.id, 'index')}.html", f"step {step.id} of the course", "course"),
        *((view_name(o).name, f"previous: step {o.id}", f"← {o.id}") for o in order[:at][-1:]),
        *((view_name(o).name, f"next: step {o.id}", f"{o.id} →") for o in order[at + 1 : at + 2]),
    ]
    text = "".join(
        f'<a href="{address}" title="{html.escape(title)}">{html.escape(text)}</a>'
        for address, title, text in links
    )
    return f'<nav id="course" aria-label="The course">{text}</nav>'


def card_html(step: Step) -> str:
    """The way from a step's page to its view."""
    return (
        f'<p class="view-card"><a href="{view_name(step)}"><strong>{view_title(step)}</strong> '
        "<span>What changed is marked; every line is linked to what was made of it, with control "
        "words and live registers.</span></a></p>"
    )


def views_markdown() -> str:
    """The page that lists all views."""
    rows = [
        [step.id, step.idea, f"[{_beside(step)}]({view_name(step)})"] for step in STEPS.values()
    ]
    return (
        "# CUDA, PTX and SASS, side by side\n\n"
        f"Each step with its parent, as compiled for {DEFAULT_ARCHITECTURE} in {DTYPE.short}: "
        "three panes, what changed marked, and every line linked to what was made of it.\n\n"
        f"{Table(['step', 'idea', 'view'], rows, 'rll').markdown()}\n"
    )
