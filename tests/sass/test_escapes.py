"""Names from files in every page: they are read as text, whatever stands in them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sass_text import kernel

from flash_helpers.console.tables import Table, code_span, escaped_markdown, fenced
from flash_helpers.sass.analyse.bound import Launch
from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.analyse.report import report_on
from flash_helpers.sass.read.records import Compiler, Instruction, Kernel, SourceLine
from flash_helpers.sass.show.comparison_page import comparison_page
from flash_helpers.sass.show.extract import graph_text, listing_text
from flash_helpers.sass.show.matrix_tables import matrix_markdown
from flash_helpers.sass.show.picture import picture_svg
from flash_helpers.sass.show.report_text import report_markdown

HOSTILE = [
    "<script>hit = 1</script>",
    "<img src=x onerror='hit = 1'>",
    '"><svg onload="hit = 1">',
    "</script><script>hit = 1</script><!--",
    "`<script>hit = 1</script>`",
    "a|b [c](https://hit) *d* __e__ &lt; ``` ~~~ # f",
    "@script@ ${hit = 1} \\u003c",
]


def hostile(name: str) -> Kernel:
    """A kernel with that text wherever a file may name something."""
    planted = kernel("loop: FADD R1, R2, R3\nHMMA.16816.F32 R8, R16, R6, R8\n@P0 BRA loop\nEXIT")

    def named(instruction: Instruction) -> Instruction:
        return replace(instruction, source=(SourceLine(f"{name}.cu", 1),))

    return replace(
        planted,
        symbol=name,
        origin=f"{name}.so:{name}",
        compiler=Compiler(name, (13, 0), name),
        instructions=tuple(map(named, planted.instructions)),
    )


@pytest.fixture(params=HOSTILE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def matrix(name: str) -> Matrix:
    facts = KernelFacts(kernel=hostile(name), name=name, note=name, launch=Launch(128))
    return Matrix([facts, facts], [name, f"{name}2"], timed=name, measured_on=name)


def rendered(markdown: str) -> str:
    """As HTML, by a renderer that passes HTML on."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True})
    return parser.enable("table").render(markdown)


def assert_harmless(html: str) -> None:
    """Nothing of the names became an element or an attribute."""
    tags = set(re.findall(r"<(\w+)", html))
    assert not tags & {"script", "img", "svg", "a", "em"}, tags
    assert "onerror" not in re.sub(r">[^<]*<", "><", html)


class TestMarkdown:
    def test_of_a_report(self, matrix: Matrix, name: str) -> None:
        html = rendered(report_markdown(report_on(matrix.rows[0])))
        assert_harmless(html)
        assert ElementTree.fromstring(f"<p>{html}</p>").find("h1/code").text == name

    def test_of_a_comparison(self, matrix: Matrix) -> None:
        assert_harmless(rendered(matrix_markdown(matrix)))

    def test_of_texts(self, name: str) -> None:
        for text in (escaped_markdown(name), code_span(name), fenced(name, "diff")):
            html = rendered(text)
            assert_harmless(html)
            assert "".join(ElementTree.fromstring(html).itertext()).strip() == name

    def test_of_cells(self, name: str) -> None:
        html = rendered(Table(["x"], [[name]]).markdown(plain=True))
        assert ElementTree.fromstring(html).find("tbody/tr/td").text == name


class TestPictures:
    def test_hold_names_as_text(self, matrix: Matrix, name: str) -> None:
        picture = ElementTree.fromstring(picture_svg(matrix))
        names = {element.tag for element in picture.iter()}
        assert names <= {"svg", "g", "title", "rect", "text", "line", "circle", "polyline"}
        assert name in {element.text for element in picture.iter("text")}
        assert name in {g.get("aria-label") for g in picture.iter("g")}

    def test_graphs_quote_them(self, name: str) -> None:
        assert re.fullmatch(r'(?:[^"]|"(?:[^"\\]|\\.)*")*', graph_text(hostile(name)))


def test_a_listing_stays_one_line_a_name() -> None:
    text = listing_text(hostile("a\nb\x1b[31m"))
    assert text.startswith("// kernel a?b?[31m\n")


class TestPage:
    @pytest.mark.slow
    def test_runs_nothing_of_a_name(
        self, matrix: Matrix, name: str, browser: Any, tmp_path: Path
    ) -> None:
        file = tmp_path / "page.html"
        file.write_text(comparison_page(matrix, ["", ""], {f"{name}.cu": f"{name}\n"}, name))
        browser.get(file.as_uri())
        browser.find_element("css selector", "#sass-0 .at").click()
        browser.find_element("id", "facts-button").click()
        assert browser.execute_script("return typeof hit") == "undefined"
        assert browser.find_elements("css selector", "img, [onload], [onerror]") == []
        about = browser.find_element("id", "about").get_attribute("textContent")
        assert name in about
        assert browser.title.startswith(name.strip()[:5])
