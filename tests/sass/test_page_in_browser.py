"""The page in a headless browser: links between panes, picker, themes, narrow screens, keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import requested_urls
from edited_kernels import library_kernel
from sass_text import of_version

from flash_helpers.measure.machine_code import (
    config_facts,
    facts_matrix,
    file_facts,
    matrix_page,
)
from flash_helpers.sass.analyse.diff import KernelDiff, Likeness, Side, diff_kernels
from flash_helpers.sass.read.choice import KernelPath
from flash_helpers.sass.read.flow import NEVER
from flash_helpers.sass.read.opcodes import TENSOR
from flash_helpers.sass.read.records import Instruction, Kernel

pytestmark = pytest.mark.slow

SHOWN = (8, 9, 16)
PANES = ("cuda", "ptx", "sass")
NARROW = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(scope="module")
def page(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    matrix = facts_matrix(
        [config_facts(of_version(n), library_kernel(n), None) for n in SHOWN], None
    )
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(matrix_page(matrix, root))
    return file


class Page:
    """The page as a person uses it: pointing, clicking and typing."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def each(self, selector: str, expression: str) -> list[Any]:
        """The value of a JavaScript expression of each element, which it calls e."""
        return self.js(
            f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})",
            selector,
        )

    def row(self, pane: str, key: object) -> Any:
        """A row, scrolled to where the pointer can reach it."""
        element = self.driver.find_element("id", f"{pane}-{key}")
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def start_of(self, pane: str, key: object) -> Any:
        """The first column of a row: rows may be wider than what can be seen of them."""
        row = self.row(pane, key)
        self.js("arguments[0].closest('.code').scrollLeft = 0", row)
        return row.find_element("css selector", ".number, .at")

    @property
    def actions(self) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        return ActionChains(self.driver)

    def hover(self, pane: str, key: object) -> None:
        self.actions.move_to_element(self.start_of(pane, key)).perform()

    def click(self, pane: str, key: object) -> None:
        self.start_of(pane, key).click()

    def press(self, *keys: str) -> None:
        self.actions.send_keys(*keys).perform()

    def keys_with(self, pane: str, name: str) -> set[str]:
        """Keys of the rows of a pane that have a class."""
        return set(self.each(f"[data-pane={pane}] .row[data-key].{name}", "e.dataset.key"))

    def lit(self, pane: str) -> set[str]:
        return self.keys_with(pane, "lit")

    def choose_file(self, ending: str) -> int:
        """Show a source file; returns its number."""
        files = self.each("#file option", "e.text")
        number = next(n for n, name in enumerate(files) if name.endswith(ending))
        self.js(
            "const s = document.getElementById('file'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change', {bubbles: true}))",
            str(number),
        )
        return number

    def is_in_view(self, pane: str, key: object) -> bool:
        return self.js(
            "const r = document.getElementById(arguments[0]).getBoundingClientRect();"
            "const p = document.querySelector(`[data-pane=${arguments[1]}] .code`)"
            ".getBoundingClientRect(); return r.top >= p.top - 1 && r.bottom <= p.bottom + 1",
            f"{pane}-{key}",
            pane,
        )

    def emulate(self, command: str, settings: dict[str, Any]) -> None:
        """Another screen or theme; what is drawn anew for it has been when this returns."""
        self.driver.execute_cdp_cmd(f"Emulation.{command}", settings)
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text


@pytest.fixture
def shown(browser, page: Path) -> Iterator[Page]:
    """The page, freshly opened on version 9; afterwards its logs must be clean."""
    browser.get("about:blank")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "light"}]},
    )
    browser.get_log("browser")
    requested_urls(browser)  # those of the browser's own first page
    browser.get(f"{page.as_uri()}#v9")
    yield Page(browser)
    browser.execute_script("localStorage.clear()")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    outside = {url for url in requested_urls(browser) if not url.startswith(("file:", "data:"))}
    assert outside <= {"about:blank"}


def first(kernel: Kernel, base: str) -> tuple[int, Instruction]:
    """The first instruction of an opcode in the loop, and its number."""
    return next(
        (n, i) for n, i in enumerate(kernel.instructions) if i.base == base and i.loop is not None
    )


class TestEmptyPanes:
    @pytest.fixture(scope="class")
    @classmethod
    def page(cls, root: Path, planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Two kernels without lines and PTX."""
        names = ("no_lines.sm_90.cubin#nested", "no_lines.sm_90.cubin#divergent")
        rows = [file_facts(KernelPath.parse(str(planted / name)), None, None) for name in names]
        file = tmp_path_factory.mktemp("empty") / "page.html"
        file.write_text(matrix_page(facts_matrix(rows, None), root))
        return file

    def test_are_folded_and_say_why(self, shown: Page) -> None:
        widths = dict(shown.each(".pane", "[e.dataset.pane, e.getBoundingClientRect().width]"))
        assert widths["cuda"] == widths["ptx"] < 40
        assert widths["sass"] > 1300
        cuda = shown.find("[data-pane=cuda]")
        assert cuda.get_attribute("title") == (
            "The cubin has no line table: compile with -lineinfo."
        )
        assert not shown.find("[data-pane=cuda] .code").is_displayed()
        cuda.click()
        assert "compile with -lineinfo" in shown.text("[data-pane=cuda] .code")

    def test_side_by_side_each_line_can_be_read_whole(self, shown: Page) -> None:
        """Cells are cut at the middle; the whole line stands in a tooltip."""
        shown.press("s")
        cells = shown.each("[data-pane=sass] .cell[data-key]", "[e.title, e.textContent]")
        assert cells
        for title, text in cells:
            assert title
            assert text.rstrip().endswith(title)


def test_panes_with_text_share_the_room(shown: Page) -> None:
    widths = shown.each(".pane", "e.getBoundingClientRect().width")
    assert widths[0] == pytest.approx(widths[1], abs=1)
    assert widths[2] / widths[0] == pytest.approx(7 / 5, abs=0.02)
    assert shown.each(".pane.folded", "e.dataset.pane") == []


class TestLinks:
    def test_sass_lights_its_ptx_and_cuda(self, shown: Page, kernel: Kernel) -> None:
        number, instruction = first(kernel, "LDSM")
        own_file = shown.choose_file("ldmatrix.cuh")
        shown.hover("sass", number)
        assert shown.lit("sass") == {str(number)}
        assert shown.lit("ptx") == {str(instruction.ptx_line)}
        assert shown.lit("cuda") == {f"{own_file}:{instruction.source[0].line}"}

    def test_inlined_calls_are_followed(self, shown: Page, kernel: Kernel) -> None:
        number, instruction = first(kernel, "LDSM")
        assert len(instruction.source) > 1
        own_file = shown.choose_file("v9/forward_kernel.cuh")
        shown.hover("sass", number)
        calls = {f"{own_file}:{line.line}" for line in instruction.source[1:]}
        assert shown.keys_with("cuda", "near") == calls

    def test_ptx_lights_its_sass_and_cuda(self, shown: Page, kernel: Kernel) -> None:
        _, instruction = first(kernel, "MUFU")
        made = {
            str(n) for n, i in enumerate(kernel.instructions) if i.ptx_line == instruction.ptx_line
        }
        own_file = shown.choose_file(instruction.source[0].file)
        shown.hover("ptx", instruction.ptx_line)
        assert shown.lit("sass") == made
        assert shown.lit("cuda") == {f"{own_file}:{instruction.source[0].line}"}

    def test_cuda_lights_all_that_it_became(self, shown: Page, kernel: Kernel) -> None:
        """Code that was inlined there is included."""
        _, instruction = first(kernel, "MUFU")
        line = instruction.source[-1]
        made = {n for n, i in enumerate(kernel.instructions) if line in i.source}
        own_file = shown.choose_file(line.file)
        shown.hover("cuda", f"{own_file}:{line.line}")
        assert shown.lit("sass") == {str(n) for n in made}
        named = {str(kernel.instructions[n].ptx_line) for n in made}
        assert named & shown.lit("ptx") and len(shown.lit("ptx")) >= len(named) / 2

    def test_ptx_that_vanished_still_leads_to_its_cuda_line(self, shown: Page) -> None:
        key = shown.js(
            "return [...document.querySelectorAll('[data-pane=ptx] .row.gone')]"
            ".find((r) => r.textContent.includes('ld.param')).dataset.key"
        )
        shown.choose_file("v9/forward_kernel.cuh")
        shown.hover("ptx", key)
        assert shown.lit("sass") == set()
        assert shown.lit("cuda") | shown.keys_with("cuda", "near")
        assert "nothing is left of it" in shown.text("#detail")

    def test_clicking_pins_and_brings_into_view(self, shown: Page, kernel: Kernel) -> None:
        number, instruction = first(kernel, "MUFU")
        shown.click("sass", number)
        assert shown.is_in_view("ptx", instruction.ptx_line)
        assert shown.is_in_view("sass", number)
        other, _ = first(kernel, "LDSM")
        shown.hover("sass", other)
        assert shown.lit("sass") == {str(number)}
        shown.press("\ue00c")  # Escape
        assert shown.lit("sass") == set()

    def test_pinning_shows_a_file_with_a_linked_line(self, shown: Page, kernel: Kernel) -> None:
        number, _ = first(kernel, "LDSM")
        shown.choose_file("cp_async.cuh")
        shown.click("sass", number)
        assert shown.lit("cuda") | shown.keys_with("cuda", "near")

    def test_the_chain_leads_to_its_callers(self, shown: Page, kernel: Kernel) -> None:
        number, instruction = first(kernel, "LDSM")
        shown.choose_file("ldmatrix.cuh")
        shown.click("sass", number)
        buttons = shown.driver.find_elements("css selector", "#detail [data-goto]")
        assert len(buttons) == len(instruction.source)
        buttons[-1].click()
        assert shown.text("#file option:checked").endswith(instruction.source[-1].file)
        key = f"{shown.js('return file')}:{instruction.source[-1].line}"
        assert shown.lit("cuda") == {key} and shown.is_in_view("cuda", key)

    def test_a_jump_leads_to_its_target(self, shown: Page, kernel: Kernel) -> None:
        number, branch = first(kernel, "BRA")
        assert branch.target is not None
        shown.row("sass", number).find_element("css selector", ".target").click()
        assert shown.lit("sass") == {str(branch.target // 16)}
        assert shown.is_in_view("sass", branch.target // 16)

    def test_are_kept_in_the_address(self, shown: Page, kernel: Kernel, page: Path) -> None:
        number, instruction = first(kernel, "MUFU")
        shown.click("sass", number)
        address = shown.driver.current_url
        shown.driver.get("about:blank")
        shown.driver.get(address)
        assert shown.lit("sass") == {str(number)}
        assert shown.is_in_view("ptx", instruction.ptx_line)


class TestColumns:
    def test_show_the_control_word(self, shown: Page, kernel: Kernel) -> None:
        number, control = next(
            (n, i.control)
            for n, i in enumerate(kernel.instructions)
            if i.control.wait_mask and i.control.write_scoreboard is not None
        )
        row = shown.row("sass", number)
        boards = [e.text for e in row.find_elements("css selector", ".board")]
        assert row.find_element("css selector", ".stall").text == str(control.stall)
        assert boards[0] == str(control.write_scoreboard)
        waits = row.find_element("css selector", ".waits").text
        assert [c != "-" for c in waits] == [bool(control.wait_mask >> b & 1) for b in range(6)]

    def test_detail_says_it_in_words(self, shown: Page, kernel: Kernel) -> None:
        number, instruction = next(
            (n, i)
            for n, i in enumerate(kernel.instructions)
            if i.base == "LDSM" and i.control.write_scoreboard is not None
        )
        shown.hover("sass", number)
        text = shown.text("#detail")
        assert f"raises {instruction.control.write_scoreboard} until its result" in text
        assert f"{instruction.live.general} registers live" in text
        assert "pipe lsu" in text

    def test_the_loop_is_marked(self, shown: Page, kernel: Kernel) -> None:
        inside = {str(n) for n, i in enumerate(kernel.instructions) if i.loop is not None}
        own = {key for key in shown.keys_with("sass", "in-loop") if not key.startswith("-")}
        assert own == inside
        assert len(shown.keys_with("sass", "loop-last")) == 1

    def test_the_loop_is_counted_with_its_filler(self, shown: Page, kernel: Kernel) -> None:
        inside = [i for i in kernel.instructions if i.loop is not None]
        filler = sum(i.predicate in NEVER for i in inside)
        heads = shown.each(".row.block", "e.textContent")
        assert filler
        (head,) = (head for head in heads if "loop of" in head)
        assert f"loop of {len(inside)} instructions, {filler} of them filler;" in head


class TestDiff:
    """Version 9 beside version 8."""

    @pytest.fixture
    def diff(self, kernel: Kernel) -> KernelDiff:
        return diff_kernels(library_kernel(8), kernel)

    def marked(self, page: Page, pane: str, mark: str) -> list[str]:
        """The keys of the rows with a mark, from top to bottom."""
        rows = page.each(
            f"[data-pane={pane}] .row[data-key]",
            "[e.dataset.key, e.querySelector('.mark').textContent]",
        )
        return [key for key, own in rows if own == mark]

    def cursor(self, page: Page, pane: str = "sass") -> str:
        (key,) = page.keys_with(pane, "cursor")
        return key

    def active(self, page: Page) -> str:
        """The one pane whose title looks unlike the others'."""
        looks = page.each(
            ".pane", "[e.dataset.pane, getComputedStyle(e.querySelector('h2')).backgroundColor]"
        )
        colours = [colour for _, colour in looks]
        (name,) = (name for name, colour in looks if colours.count(colour) == 1)
        return name

    def test_marks_what_changed(self, shown: Page, diff: KernelDiff) -> None:
        def number(side: Side | None) -> str:
            assert side is not None
            return str(side.instruction.address // 16)

        def keys(likeness: Likeness) -> set[str]:
            return {number(c.after) for c in diff.changes if c.likeness is likeness and not c.moved}

        assert set(self.marked(shown, "sass", "+")) == keys(Likeness.ADDED)
        assert set(self.marked(shown, "sass", "≈")) == keys(Likeness.RENAMED)
        removed = {f"-{number(c.before)}" for c in diff.changes if c.after is None}
        assert set(self.marked(shown, "sass", "-")) == removed
        moved = {number(c.after) for c in diff.changes if c.moved}
        arrived = [*self.marked(shown, "sass", ">"), *self.marked(shown, "sass", "}")]
        assert moved == {key for key in arrived if not key.startswith("-")}

    def test_shows_what_a_line_was_above_it(self, shown: Page) -> None:
        was, now = self.marked(shown, "ptx", "~")[:2]
        assert was.startswith("-") and not now.startswith("-")
        rows = [shown.row("ptx", key) for key in (was, now)]
        assert int(rows[0].get_attribute("data-n")) + 1 == int(rows[1].get_attribute("data-n"))
        shown.hover("ptx", now)
        text = shown.js("return document.querySelector('#detail').textContent")
        assert "~ changed" in text and "was" in text

    def test_links_what_was_removed_to_what_it_was_made_of(self, shown: Page) -> None:
        before = library_kernel(8)
        key = next(
            key
            for key in self.marked(shown, "sass", "-")
            if before.instructions[-int(key)].source and before.instructions[-int(key)].ptx_line
        )
        shown.hover("sass", key)
        instruction = before.instructions[-int(key)]
        line = f"-{instruction.ptx_line}"
        assert shown.js("return [...links.ptx.lit]") == [line]
        assert shown.js("return pane.ptx.rows.get(arguments[0]).classList.contains('lit')", line)
        name, _, number = shown.js("return [...links.cuda.lit][0]").partition(":")
        assert shown.js("return pathOf(arguments[0])", name) == instruction.source[0].file
        assert int(number) == instruction.source[0].line

    def test_opens_at_the_first_change(self, shown: Page) -> None:
        for pane in PANES:
            first = shown.js(
                "return [...document.querySelectorAll(`[data-pane=${arguments[0]}] "
                ".row[data-key]`)].find((r) => !' ≈'.includes(r.querySelector('.mark').textContent)"
                "&& !(arguments[0] === 'cuda' && /^(\\/\\/.*)?$/"
                ".test(r.lastChild.textContent.trim()))).dataset.key",
                pane,
            )
            assert shown.is_in_view(pane, first), pane
        assert not shown.is_in_view("cuda", f"{shown.js('return file')}:1")

    def test_keys_belong_to_cuda_until_another_pane_is_used(self, shown: Page) -> None:
        def moved_by_j() -> set[str]:
            before = {pane: self.cursor(shown, pane) for pane in PANES}
            shown.press("j")
            return {pane for pane in PANES if self.cursor(shown, pane) != before[pane]}

        assert self.active(shown) == "cuda" and moved_by_j() == {"cuda"}
        shown.find("[data-pane=sass] h2").click()
        assert self.active(shown) == "sass" and moved_by_j() == {"sass"}
        shown.js("document.querySelector('[data-pane=sass] .code').focus()")
        shown.press("\ue012")  # left
        assert self.active(shown) == "ptx" and moved_by_j() == {"ptx"}

    def test_keys_lead_from_change_to_change(self, shown: Page) -> None:
        shown.find("[data-pane=sass] h2").click()
        news = {key for mark in "+-~>}" for key in self.marked(shown, "sass", mark)}
        visited = [self.cursor(shown)]
        for _ in range(3):
            shown.press("j")
            visited.append(self.cursor(shown))
            assert visited[-1] in shown.lit("sass")
        assert set(visited) <= news and len(set(visited)) == 4
        assert shown.text("#change").startswith("change 4 of ")
        shown.press("k")
        assert self.cursor(shown) == visited[-2]
        shown.find("[data-do=next]").click()
        assert self.cursor(shown) == visited[-1]

    def test_a_key_leads_to_the_main_loop(self, shown: Page, kernel: Kernel) -> None:
        shown.press("m")
        start = kernel.blocks[kernel.loops[0].header].start // 16
        assert self.cursor(shown) == str(start) and shown.is_in_view("sass", start)
        assert shown.is_in_view("ptx", first(kernel, "LDSM")[1].ptx_line)

    def test_the_first_kernel_stands_alone(self, shown: Page) -> None:
        shown.find('#versions [data-kernel="0"]').click()
        assert {mark for mark in "+-~>}≈" if self.marked(shown, "sass", mark)} == set()
        assert not shown.find("#changes").is_displayed()
        assert "beside" not in shown.text("#title")

    def test_side_by_side(self, shown: Page, kernel: Kernel) -> None:
        """Each instruction of both once, and those that did not move in one row."""
        shown.press("s")
        cells = shown.each(
            "[data-pane=sass] .row[data-key]", "[...e.children].map((c) => c.dataset.key ?? null)"
        )
        assert [left for left, _ in cells if left] == [
            f"-{n}" for n in range(sum(left is not None for left, _ in cells))
        ]
        assert [right for _, right in cells if right] == [
            str(n) for n in range(len(kernel.instructions))
        ]
        assert sum(None not in pair for pair in cells) > len(kernel.instructions) / 3
        shown.find("[data-tab=cuda]").click()
        assert len(shown.driver.find_elements("css selector", "[data-pane=cuda] .cell")) > 400
        shown.press("s")
        assert all(shown.find(f"[data-pane={pane}]").is_displayed() for pane in PANES)

    def test_facts_of_both_stand_beside_one_another(self, shown: Page) -> None:
        shown.press("i")
        header = shown.text("#about thead").split()
        assert header == ["v8", "v9"]
        assert "forward_kernel<v8_bf16" in shown.text("#about .before")
        registers = str(library_kernel(9).resources.registers)
        assert registers in shown.text("#about .facts").split()
        shown.press("\ue00c")


class TestFinding:
    ENTER = "\ue007"

    def opcodes(self, page: Page) -> list[str]:
        return page.each("[data-pane=sass] .row[data-key] .opcode", "e.textContent")

    def choose(self, page: Page, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(page.driver.find_element("id", "filter")).select_by_value(value)

    def test_search_goes_from_line_to_line(self, shown: Page, kernel: Kernel) -> None:
        shown.press("/")
        shown.press("hmma.16816", self.ENTER)
        own = {str(n) for n, i in enumerate(kernel.instructions) if i.base == "HMMA"}
        assert own <= shown.keys_with("sass", "hit")
        # what changed is a hit as it was before, too
        keys = shown.each("[data-pane=sass] .row.hit", "e.dataset.key")
        assert shown.keys_with("sass", "cursor") == {keys[0]}
        assert shown.is_in_view("sass", keys[0])
        assert shown.text("#hits").startswith("1 of ")
        shown.press(self.ENTER)
        assert shown.keys_with("sass", "cursor") == {keys[1]}
        shown.js(
            "byId('search').dispatchEvent(new KeyboardEvent('keydown',"
            "{key: 'Enter', shiftKey: true, bubbles: true}))"
        )
        assert shown.keys_with("sass", "cursor") == {keys[0]}

    def test_search_looks_into_every_pane(self, shown: Page) -> None:
        shown.press("/")
        shown.press("ldmatrix_x4", self.ENTER)
        assert shown.keys_with("sass", "hit") == set() != shown.keys_with("cuda", "hit")
        (cursor,) = shown.keys_with("cuda", "cursor")
        assert shown.is_in_view("cuda", cursor)

    def test_search_says_when_there_is_nothing(self, shown: Page) -> None:
        shown.press("/")
        shown.press("xyzzy", self.ENTER)
        assert shown.text("#hits") == "none"
        shown.press("\ue00c", "j")  # Escape gives the keys back
        assert shown.js("return byId('search').value") == "xyzzy"

    def test_filter_by_opcode(self, shown: Page, kernel: Kernel) -> None:
        self.choose(shown, "opcode:LDSM")
        found = self.opcodes(shown)
        assert len(found) >= sum(i.base == "LDSM" for i in kernel.instructions)
        assert {opcode.split(".")[0] for opcode in found} == {"LDSM"}
        ptx = shown.each("[data-pane=ptx] .row[data-key]", "e.textContent")
        assert ptx and all("ldmatrix" in text for text in ptx)
        pale = shown.keys_with("cuda", "pale")
        assert pale and shown.js("return pane.cuda.rows.size") > len(pale)
        self.choose(shown, "")
        assert "HMMA.16816.F32.BF16" in self.opcodes(shown)

    def test_filter_by_class(self, shown: Page) -> None:
        self.choose(shown, f"group:{TENSOR}")
        assert {opcode.split(".")[0] for opcode in self.opcodes(shown)} == {"HMMA"}

    def test_filter_by_change(self, shown: Page) -> None:
        everything = len(self.opcodes(shown))
        self.choose(shown, "changes")
        marks = shown.each(
            "[data-pane=sass] .row:not(.block, .columns)",
            "e.querySelector('.mark')?.textContent ?? 'fold'",
        )
        assert len(self.opcodes(shown)) < everything
        for n, mark in enumerate(marks):
            if mark in " ≈":
                assert any(m in "+-~>}" for m in marks[max(0, n - 3) : n + 4])


class TestPicker:
    def test_shows_another_kernel(self, shown: Page) -> None:
        for index, version in enumerate(SHOWN):
            shown.find(f'#versions [data-kernel="{index}"]').click()
            rows = shown.each("[data-pane=sass] [data-key]:not([data-key^='-'])", "1")
            assert len(rows) == len(library_kernel(version).instructions)
            assert of_version(version).step.idea in shown.text("#title")
            assert shown.text("#file option:checked") == str(of_version(version).step.source)

    def test_the_picture_picks_too(self, shown: Page) -> None:
        shown.find("#overview summary").click()
        shown.find('#overview [data-kernel="0"] .name').click()
        assert of_version(SHOWN[0]).step.idea in shown.text("#title")
        current = shown.js(
            "return document.querySelector('#versions [aria-current=true]').textContent"
        )
        assert current == f"v{SHOWN[0]}"


class TestKeys:
    def test_move_through_lines_panes_and_kernels(self, shown: Page) -> None:
        shown.js("document.querySelector('[data-pane=sass] .code').focus()")
        home, down, left, enter = "\ue011", "\ue015", "\ue012", "\ue007"
        shown.press(home, down, down)
        assert shown.lit("sass") == {"2"}
        assert shown.keys_with("sass", "cursor") == {"2"}
        shown.press(enter)
        assert shown.js("return document.body.classList.contains('pinned')")
        shown.press(left)
        assert shown.js("return document.activeElement.closest('.pane').dataset.pane") == "ptx"
        shown.press("n")
        assert shown.keys_with("ptx", "cursor") == shown.lit("ptx")
        shown.press("]")
        assert of_version(16).step.idea in shown.text("#title")
        shown.press("[", "[")
        assert of_version(8).step.idea in shown.text("#title")

    def test_explain_themselves(self, shown: Page) -> None:
        shown.press("?")
        assert "bring it into view" in shown.text("#help")
        assert "tensor" in shown.text("#pipes")
        marks = shown.js("return document.querySelector('#marks').textContent")
        assert all(mark in marks for mark in "+-~>}<≈")
        shown.press("\ue00c")
        assert not shown.js("return document.getElementById('help').open")


class TestWidth:
    def test_a_pane_scrolls_as_far_as_its_longest_line_goes(self, shown: Page) -> None:
        """Also while that is out of sight, where it is not drawn."""
        before = shown.each(".rows", "e.offsetWidth")
        shown.js(
            "const style = document.body.appendChild(document.createElement('style'));"
            "style.textContent = '.row[data-key] { content-visibility: visible !important }'"
        )
        assert before == shown.each(".rows", "e.offsetWidth")


class TestThemes:
    def background(self, shown: Page) -> tuple[int, ...]:
        text = shown.js("return getComputedStyle(document.body).backgroundColor")
        return tuple(int(part) for part in text[4:-1].split(","))

    def test_follow_the_system_and_the_button(self, shown: Page, page: Path) -> None:
        light = self.background(shown)
        shown.emulate(
            "setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        dark = self.background(shown)
        assert min(light) > 200 and max(dark) < 60
        shown.find("#theme").click()
        assert self.background(shown) == light
        shown.press("t")
        assert self.background(shown) == dark

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_text_has_contrast(self, shown: Page, theme: str) -> None:
        """WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1."""
        shown.js("setTheme(arguments[0])", theme)
        ratio = shown.js(
            """
            const style = getComputedStyle(document.documentElement);
            const light = (name) => {
              const hex = style.getPropertyValue(name).trim().slice(1);
              const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
                .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const against = (a, b) => {
              const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
              return (high + 0.05) / (low + 0.05);
            };
            return Math.min(...["--ink", "--soft", "--accent"].flatMap((text) =>
              ["--panel", "--paper", "--lit", "--near"].map((back) => against(text, back))),
              ...["added", "removed", "changed", "moved"].flatMap((mark) => [
                against(`--${mark}`, `--${mark}-row`), against(`--${mark}`, "--panel"),
                against("--ink", `--${mark}-row`)]));
            """
        )
        assert ratio >= 4.5


class TestNarrow:
    @pytest.fixture
    def narrow(self, shown: Page) -> Page:
        shown.emulate("setDeviceMetricsOverride", NARROW)
        return shown

    def visible(self, page: Page) -> list[str]:
        return [pane for pane in PANES if page.find(f"[data-pane={pane}]").is_displayed()]

    def test_the_page_does_not_scroll_sideways(self, narrow: Page) -> None:
        for pane in PANES:
            narrow.find(f"[data-tab={pane}]").click()
            width = narrow.js("return document.documentElement.scrollWidth")
            assert width <= NARROW["width"]

    def test_panes_are_tabs(self, narrow: Page, kernel: Kernel) -> None:
        assert self.visible(narrow) == ["cuda"]
        narrow.find("[data-tab=sass]").click()
        number, instruction = first(kernel, "MUFU")
        narrow.click("sass", number)
        assert narrow.text("[data-tab=ptx] .found") == "1"
        narrow.find("[data-tab=ptx]").click()
        assert self.visible(narrow) == ["ptx"]
        assert narrow.is_in_view("ptx", instruction.ptx_line)

    def test_wide_screens_show_all_panes(self, shown: Page) -> None:
        assert self.visible(shown) == list(PANES)
        width = shown.js("return [document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]
