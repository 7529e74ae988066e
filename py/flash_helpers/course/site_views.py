"""For each step a page with the CUDA, PTX and SASS of the step and of its parent."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flash_helpers.course.arguments import fixed_config
from flash_helpers.course.evidence import with_parent
from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.machine_code import config_matrix, installed_library, library_kernels
from flash_helpers.measure.results import BenchmarkResults
from flash_helpers.registry.family import Step
from flash_helpers.sass.analyse.matrix import Matrix
from flash_helpers.sass.analyse.ptx_links import ptx_sources
from flash_helpers.sass.show.comparison_page import page_facts
from flash_helpers.sass.show.page import PageKernel, page_html, read_sources

VIEWS = PurePosixPath("views")  # folder of the site
ARCHITECTURE = "sm_90"  # that of the committed measurements
SEQ_LEN = 4096
_BAR = "padding:8px 14px 0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13.5px"
_LINK = "color:var(--accent)"


@dataclass(frozen=True)
class View:
    """A page with the CUDA, PTX and SASS of a step.

    name: of its file, relative to the site. missing: the kernels' own files that it cannot show,
    because the library was built from other ones.
    """

    name: PurePosixPath
    text: str
    missing: tuple[str, ...]


def view_name(step: Step) -> PurePosixPath:
    """The file of a step's page, relative to the site."""
    return VIEWS / f"step_{step.number:02}.html"


def view_title(step: Step) -> str:
    """What the page shows."""
    return f"CUDA, PTX and SASS of {_beside(step)}"


def _beside(step: Step) -> str:
    return f"step {step.id}" if step.parent is None else f"step {step.id} beside {step.parent}"


def step_views(root: Path, results: BenchmarkResults, pages: Mapping[str, str]) -> Iterator[View]:
    """The view of each step, from the kernels of the installed library. pages: names of the pages
    about a step, which the views lead back to.

    Raises SassError, UsageError or OSError if it has not all of them.
    """
    kernels = library_kernels(ARCHITECTURE, map(fixed_config, STEPS.values()))
    for step in STEPS.values():
        shown = with_parent(step)
        matrix = config_matrix([(config, kernels[config]) for config in shown], results, SEQ_LEN)
        yield _view(step, matrix, root, pages)


def _view(step: Step, matrix: Matrix, root: Path, pages: Mapping[str, str]) -> View:
    ptx_folder = installed_library().parent / "ptx"
    shown = []
    for name, facts in zip(matrix.names, matrix.rows, strict=True):
        ptx = (ptx_folder / f"{facts.config.short_form()}.ptx").read_text(encoding="utf-8")
        shown.append(
            PageKernel(
                kernel=facts.kernel,
                name=name,
                title=f"Step {facts.config.step.id}: {facts.config.step.idea}",
                facts=page_facts(facts, matrix.timed),
                ptx_sources=ptx_sources(facts.kernel, ptx),
            )
        )
    sources = read_sources([page.kernel for page in shown], root)
    text = page_html(shown, sources, view_title(step), _links(step, pages), len(shown) - 1)
    own = (str(facts.config.step.source) for facts in matrix.rows)
    return View(view_name(step), text, tuple(path for path in own if path not in sources))


def _links(step: Step, pages: Mapping[str, str]) -> str:
    """The way back, and to the neighbours."""
    links = [(f"../{pages.get(step.id, 'index')}.html", f"← step {step.id} of the course")]
    order = list(STEPS.values())
    at = order.index(step)
    neighbours = (("previous", order[at - 1 : at]), ("next", order[at + 1 : at + 2]))
    links += [
        (view_name(other).name, f"{word}: step {other.id}")
        for word, found in neighbours
        for other in found
    ]
    text = "".join(
        f'<a style="{_LINK}" href="{address}">{html.escape(text)}</a>' for address, text in links
    )
    return f'<nav id="course" aria-label="The course" style="{_BAR}">{text}</nav>'


def card_html(step: Step) -> str:
    """The way from a step's page to its view."""
    return (
        f'<p class="view-card"><a href="{view_name(step)}"><strong>{view_title(step)}</strong> '
        "<span>Three panes, linked line by line, with control words and live registers.</span>"
        "</a></p>"
    )


def views_markdown() -> str:
    """The page that lists all views."""
    rows = [
        f"| {step.id} | {step.idea} | [{_beside(step)}]({view_name(step)}) |"
        for step in STEPS.values()
    ]
    return "\n".join(
        [
            "# CUDA, PTX and SASS, side by side",
            "",
            "Each step with its parent, as compiled for "
            f"{ARCHITECTURE} in bf16: three panes, and every line linked to what was made of it.",
            "",
            "| step | idea | view |",
            "| --: | :-- | :-- |",
            *rows,
            "",
        ]
    )
