"""The page as text: what it holds, and that it needs nothing else."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from edited_kernels import library_kernel
from sass_text import of_version

from flash_helpers.measure.machine_code import config_facts, facts_matrix, matrix_page
from flash_helpers.sass.analyse.counts import Bucket, buckets
from flash_helpers.sass.analyse.matrix import GROUP_NAMES, Matrix
from flash_helpers.sass.read.records import Kernel
from flash_helpers.sass.read.symbols import demangled, with_demangled_symbols
from flash_helpers.sass.show.page import PageKernel, packed_control, page_html
from flash_helpers.sass.show.picture import picture_svg

FEW = (8, 9)


class Elements(HTMLParser):
    """The elements of a page, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        is_data = tag == "script" and dict(attrs).get("type") == "application/json"
        self.inside = dict(attrs).get("id") if is_data else None

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.data[self.inside] = json.loads(data)
            self.inside = None


def matrix_of(versions: tuple[int, ...]) -> Matrix:
    rows = [config_facts(of_version(n), library_kernel(n), None) for n in versions]
    return facts_matrix(rows, None)


@pytest.fixture(scope="module")
def page(root) -> str:
    return matrix_page(matrix_of(FEW), root)


@pytest.fixture(scope="module")
def elements(page) -> Elements:
    return Elements(page)


def bare(kernel: Kernel, name: str = "k") -> PageKernel:
    return PageKernel(kernel, name, "title", [("term", "value")], {})


class TestDocument:
    def test_loads_nothing(self, page, elements) -> None:
        for tag, attributes in elements.found:
            assert tag not in ("img", "iframe", "object", "embed", "audio", "video")
            assert "src" not in attributes
            assert attributes.get("href") in (None, "data:,")
        style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
        assert "url(" not in style and "@import" not in style
        assert "default-src 'none'" in page

    def test_is_the_same_each_time(self, page, root) -> None:
        assert matrix_page(matrix_of(FEW), root) == page

    def test_no_text_can_end_a_script(self) -> None:
        text = "</script><script>alert(1)</script><!--"
        kernel = replace(library_kernel(9), symbol=text)
        sources = {str(kernel.instructions[0].source[-1].file): text}
        found = Elements(page_html([bare(kernel)], sources, text))
        scripts = [attributes for tag, attributes in found.found if tag == "script"]
        assert len(scripts) == 3  # index, kernel, program
        assert found.data["index"]["kernels"][0]["symbol"] == text
        assert list(found.data["index"]["sources"].values()) == [text]

    def test_placeholders_in_texts_stay(self, kernel) -> None:
        name = kernel.instructions[0].source[-1].file
        found = Elements(page_html([bare(kernel)], {name: "a @title@ b"}, "t"))
        assert found.data["index"]["sources"][name] == "a @title@ b"

    def test_grows_with_its_kernels_only(self, page, root) -> None:
        """Sixteen kernels must stay small enough to load at once."""
        each = [
            len(text) for text in re.findall(r'id="kernel-\d+">(.*?)</script>', page, re.DOTALL)
        ]
        assert len(each) == len(FEW)
        assert max(each) < 300_000


class TestData:
    @pytest.fixture
    def data(self, elements) -> dict[str, Any]:
        return elements.data["kernel-1"]

    def test_has_a_row_an_instruction(self, data, kernel) -> None:
        assert {len(column) for column in data["sass"].values()} == {len(kernel.instructions)}
        for text, control, instruction in zip(
            data["sass"]["text"], data["sass"]["control"], kernel.instructions, strict=True
        ):
            assert " ".join(text.split()) == " ".join(instruction.text.split())
            assert control & 15 == instruction.control.stall
            assert control >> 11 & 63 == instruction.control.wait_mask

    def test_follows_inlined_calls(self, data, kernel) -> None:
        for number, instruction in zip(data["sass"]["chain"], kernel.instructions, strict=True):
            flat = data["chains"][number]
            chain = [
                (data["files"][f], line) for f, line in zip(flat[::2], flat[1::2], strict=True)
            ]
            assert chain == [(line.file, line.line) for line in instruction.source]

    def test_shows_every_ptx_instruction_with_its_cuda_line(self, data, kernel) -> None:
        shown = dict(zip(data["ptx"]["line"], data["ptx"]["text"], strict=True))
        named = {i.ptx_line for i in kernel.instructions if i.ptx_line is not None}
        assert named <= set(shown)
        lines = kernel.ptx.split("\n")
        assert not any(kernel.symbol in text for text in shown.values())
        for number, text in shown.items():
            line = " ".join(lines[number - 1].replace(kernel.symbol, "kernel").split())
            assert text == line.replace("_ZN2v94smemE", "v9::smem")
        marked = sum(data["ptx"]["isInstruction"])
        with_source = sum(number >= 0 for number in data["ptx"]["chain"])
        assert marked == with_source

    def test_has_the_loop_and_its_blocks(self, data, kernel) -> None:
        (loop,) = data["loops"]
        inside = [n for n, number in enumerate(data["sass"]["loop"]) if number == 0]
        assert (loop["first"], loop["last"], loop["length"]) == (inside[0], inside[-1], len(inside))
        starts = [block["start"] for block in data["blocks"]]
        assert starts == sorted(starts) and starts[0] == 0
        assert data["blocks"][kernel.loops[0].header]["phase"] == "main loop"

    def test_jumps_lead_to_blocks(self, data) -> None:
        starts = {block["start"] for block in data["blocks"]}
        targets = {target for target in data["sass"]["target"] if target >= 0}
        assert targets and targets <= starts

    def test_packs_control_words_apart(self, kernel) -> None:
        controls = {replace(i.control, reuse=0) for i in kernel.instructions}
        assert len({packed_control(control) for control in controls}) == len(controls)

    def test_of_a_kernel_that_tells_little(self, kernel) -> None:
        """No PTX, no lines, no live registers, no loop: the rest is still shown."""
        instructions = tuple(
            replace(i, live=None, source=(), ptx_line=None, loop=None, pipe="new", cost=None)
            for i in kernel.instructions
        )
        poor = replace(kernel, instructions=instructions, loops=(), ptx=None)
        data = Elements(page_html([bare(poor)], {}, "t")).data["kernel-0"]
        assert data["ptx"]["line"] == [] and "-lineinfo" in data["ptx"]["note"]
        assert data["files"] == [] and data["loops"] == []
        assert set(data["sass"]["live"]) == {-1}

    def test_leaves_other_kernels_of_the_module_out(self, kernel) -> None:
        other = ".visible .entry other()\n{\nret;\n}\n"
        both = replace(kernel, ptx=kernel.ptx + "\n" + other)
        data = Elements(page_html([bare(both)], {}, "t")).data["kernel-0"]
        assert not any("other" in text for text in data["ptx"]["text"])
        assert len(data["ptx"]["line"]) > 1000


def rows_of(runs: list[list[Any]]) -> list[tuple[str, int, int]]:
    return [
        (mark, before if before < 0 else before + n, after if after < 0 else after + n)
        for mark, before, after, length in runs
        for n in range(length)
    ]


class TestDiff:
    """The diff of a kernel against the one before it, as the page holds it."""

    @pytest.fixture
    def diff(self, elements) -> dict[str, Any]:
        return elements.data["diff-1"]

    def test_is_of_each_kernel_but_the_first(self, elements) -> None:
        assert [name for name in elements.data if name.startswith("diff")] == ["diff-1"]

    def test_holds_every_line_of_both(self, elements, diff) -> None:
        before, after = (elements.data[f"kernel-{n}"] for n in range(2))
        texts = elements.data["index"]["sources"]
        kinds = buckets(library_kernel(FEW[0]).instructions)
        for pane, n_before, n_after in (
            ("cuda", *(len(texts[d["files"][d["main"]]].split("\n")) for d in (before, after))),
            ("ptx", *(len(data["ptx"]["line"]) for data in (before, after))),
            # the padding at the end of the first is left out
            ("sass", len(kinds) - kinds.count(Bucket.PADDING), len(after["sass"]["text"])),
        ):
            rows = rows_of(diff[pane])
            assert [j for _, _, j in rows if j >= 0] == list(range(n_after)), pane
            stood = [i for mark, i, _ in rows if i >= 0 and mark not in ">}"]
            assert stood == list(range(n_before)), pane

    def test_of_cuda_marks_lines_that_are_not_the_same(self, elements, diff) -> None:
        texts = [
            elements.data["index"]["sources"][data["files"][data["main"]]].split("\n")
            for data in (elements.data["kernel-0"], elements.data["kernel-1"])
        ]
        for mark, before, after in rows_of(diff["cuda"]):
            if before >= 0 and after >= 0:
                same = texts[0][before] == texts[1][after]
                assert mark in (" ", ">") if same else mark in "≈>", (before, after)
        renamed = [texts[1][j] for mark, _, j in rows_of(diff["cuda"]) if mark == "≈"]
        assert "namespace v9 {" in renamed

    def test_of_ptx_and_sass_does_not_count_other_registers(self, elements, diff) -> None:
        marks = {
            pane: Counter(mark for mark, _, _ in rows_of(diff[pane])) for pane in ("ptx", "sass")
        }
        for pane, count in marks.items():
            assert count["≈"] > 300, pane
        assert marks["sass"]["-"] == 140 and marks["sass"]["+"] == 36  # as the diff has them

    def test_without_texts_there_is_none(self) -> None:
        poor = bare(replace(library_kernel(9), ptx=None))
        data = Elements(page_html([poor, poor], {}, "t")).data["diff-1"]
        assert data["cuda"] is None and data["ptx"] is None
        n_instructions = len(poor.kernel.instructions)
        assert rows_of(data["sass"])[:9] == [(" ", n, n) for n in range(9)]
        assert len(rows_of(data["sass"])) == n_instructions


class TestSymbols:
    @pytest.mark.parametrize(
        ("symbol", "name"),
        [
            ("_Z4gemmPKfS0_Pfi", "gemm(float const*, float const*, float*, int)"),
            (
                "_ZN2v114forward_kernelI2abEEv17ForwardKernelArgs",
                "void v1::forward_kernel<ab>(ForwardKernelArgs)",
            ),
            ("saxpy", "saxpy"),
            ("_Z", "_Z"),
            ("_Znonsense", "_Znonsense"),
        ],
    )
    def test_are_shown_as_their_authors_wrote_them(self, symbol: str, name: str) -> None:
        assert demangled(symbol) == name

    def test_in_a_text(self) -> None:
        text = "mov.u32 %r1, _ZN2v14smemE; call _Z1fi_Z, x_Z1fi"
        assert with_demangled_symbols(text) == "mov.u32 %r1, v1::smem; call _Z1fi_Z, x_Z1fi"

    def test_on_the_page(self, elements) -> None:
        symbols = [kernel["symbol"] for kernel in elements.data["index"]["kernels"]]
        assert [symbol[:24] for symbol in symbols] == [
            f"void v{number}::forward_kernel<"[:24] for number in FEW
        ]


class TestPicture:
    @pytest.fixture
    def matrix(self) -> Matrix:
        return matrix_of(FEW)

    def test_has_a_column_a_kernel(self, matrix) -> None:
        svg = picture_svg(matrix)
        assert re.findall(r'class="version" data-kernel="(\d)"', svg) == ["0", "1"]

    def test_stacks_groups_to_the_whole(self, matrix) -> None:
        svg = picture_svg(matrix)
        for column, facts in zip(svg.split('class="version"')[1:], matrix.rows, strict=True):
            parts = re.findall(
                r'c-(\w+)" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', column
            )
            assert [name for name, _, _ in parts] == [n for n in GROUP_NAMES if facts.groups[n]]
            for (_, above, _), (_, y, height) in pairwise(parts):
                assert float(y) + float(height) == pytest.approx(float(above), abs=0.11)
            total = facts.per_hmma(facts.phases.main_loop.work)
            heights = sum(float(height) for _, _, height in parts)
            for name, _, height in parts:
                share = facts.per_hmma(facts.groups[name]) / total
                assert float(height) / heights == pytest.approx(share, abs=0.01)

    def test_of_one_kernel_is_no_comparison(self, root) -> None:
        page = matrix_page(matrix_of((9,)), root)
        assert "<svg" not in page
