"""The site of the repository: its files, and in a headless browser, opened from files: reading,
finding things, pointing at them."""

import html
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser, requested_urls, waiting
from built_site import BUILT, ENDS, INDENTED, STEP, BuiltSite, stand_ins

from flash_helpers.course.pages import COURSE, PAGES, Page
from flash_helpers.course.site_links import broken_links
from flash_helpers.course.site_views import VIEWS, step_views, view_name
from flash_helpers.course.stairs import has_tiles, stairs_path
from flash_helpers.kernel_configs import FAMILIES, STEPS
from flash_helpers.measure.plots import PLOT_TITLES
from flash_helpers.measure.results import FLASH, RESULTS, load_results
from flash_helpers.registry.family import Step

pytestmark = pytest.mark.slow

WIDE = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
MIDDLE = {"width": 1100, "height": 800, "deviceScaleFactor": 1, "mobile": False}
LOW = {"width": 1366, "height": 625, "deviceScaleFactor": 1, "mobile": False}
NARROW = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
SMALL = {"width": 1366, "height": 420, "deviceScaleFactor": 1, "mobile": False}
SCREENS = {"narrow": NARROW, "middle": MIDDLE, "wide": WIDE}
ENTER = "\ue007"


def menu(text: str) -> list[tuple[str, str]]:
    """Address and title of each entry of a page's menu, in order."""
    tree = text[text.index('class="sidebar-tree"') :]
    tree = tree[: tree.index("</div>")]
    found = re.findall(r'<a [^>]*?href="([^"]*)"[^>]*>(.*?)</a>', tree)
    return [(address, html.unescape(title)) for address, title in found]


def page_of(step: Step) -> str:
    return next(f"{page.path.stem}.html" for page in PAGES if page.step == step.id)


class TestRepository:
    """The site of the repository."""

    def test_has_no_faults(self, built: BuiltSite) -> None:
        assert built.warnings == []

    def test_has_every_page_of_the_course_in_its_order(self, built: BuiltSite) -> None:
        entries = menu(built.text("index.html"))
        course = [(f"{page.path.stem}.html", page.title) for page in COURSE]
        assert entries[: len(course)] == course
        others = {(f"{page.path.stem}.html", page.title) for page in PAGES if page not in COURSE}
        assert others <= set(entries[len(course) :])

    def test_pages_lead_to_their_neighbours(self, built: BuiltSite) -> None:
        names = [f"{page.path.stem}.html" for page in COURSE]
        for before, after in itertools.pairwise(names):
            assert f'class="next-page" href="{after}"' in built.text(before)
            assert f'class="prev-page" href="{before}"' in built.text(after)

    def test_the_menu_marks_the_page_that_is_read(self, built: BuiltSite) -> None:
        for page in COURSE:
            marked = re.findall(
                r'<li class="[^"]*\bcurrent-page\b[^"]*"><a [^>]*>(.*?)</a>',
                built.text(f"{page.path.stem}.html"),
            )
            assert [html.unescape(title) for title in marked] == [page.title], page.path

    def test_shows_no_marker(self, built: BuiltSite) -> None:
        for page in built.folder.glob("*.html"):
            comments = re.findall(r"<!--(.*?)-->", page.read_text(encoding="utf-8"), re.DOTALL)
            assert [c for c in comments if "Generated with Sphinx" not in c] == [], page.name

    def test_needs_nothing_from_elsewhere(self, built: BuiltSite) -> None:
        """A second witness beside `broken_links`, and for what style sheets load."""
        loads = re.compile(
            r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
            r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//(?![^>]*rel=["']author)"""
            r"""|@import|url\(["']?(?:https?:)?//"""
        )
        for path in (*built.folder.rglob("*.html"), *built.folder.rglob("*.css")):
            found = loads.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path.name}: {found[0] if found else ''}"

    @pytest.mark.parametrize("step", STEPS)
    def test_the_page_of_a_step_leads_to_its_view(self, built: BuiltSite, step: str) -> None:
        assert f'href="{view_name(STEPS[step])}"' in built.text(page_of(STEPS[step]))

    def test_measurements_have_plots_and_tables_of_their_numbers(
        self, built: BuiltSite, root: Path
    ) -> None:
        text = built.text("measurements.html")
        pictures = re.findall(r'<img alt="([^"]+)" [^>]*src="_images/(\w+).svg"', text)
        assert pictures == [(title, name) for name, title in PLOT_TITLES.items()]
        results = load_results(root / RESULTS)
        for length in results.sizes:
            assert f"<td><p>{results.speed(FLASH, 'bf16', length):.0f}</p></td>" in re.sub(
                r"<(td|p)\b[^>]*>", r"<\1>", text
            )

    @pytest.mark.parametrize("step", STEPS)
    def test_the_page_of_a_step_shows_its_staircase_with_the_step_lit(
        self, built: BuiltSite, step: str, root: Path
    ) -> None:
        """A family that was not measured has none."""
        family = STEPS[step].family
        address = f'src="_images/{family}.svg#step-{step}"'
        assert (address in built.text(page_of(STEPS[step]))) == (
            root / stairs_path(family)
        ).exists()


EACH_VIEW = pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in BUILT else pytest.mark.matrix(step.family))
        for step in STEPS.values()
    ],
    ids=lambda step: step.id,
)
"""The views of the steps in BUILT; in the matrix those of the others."""


def index_of(view: str) -> Any:
    """What a view's script knows of its kernels."""
    return json.loads(re.search(r'id="index">(.*?)</script>', view)[1])


class TestViews:
    """The files of views of machine code: those of the site, and in the matrix those that the site
    has stand-ins for, each beside stand-ins of the pages and views around it."""

    @pytest.fixture
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path, step: Step) -> Path:
        """The folder of a site that has the view of the step."""
        if step in BUILT:
            return request.getfixturevalue("built").folder
        stems = {page.step: page.path.stem for page in PAGES if page.step}
        (view,) = step_views(request.getfixturevalue("evidence"), stems, [step])
        assert view.missing == ()
        for stem in stems.values():
            (tmp_path / f"{stem}.html").write_text("<html></html>")
        for shown in (*stand_ins(STEPS.values()), view):
            for name, text in shown.files():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text, encoding="utf-8")
        assert broken_links(tmp_path) == []
        return tmp_path

    @pytest.fixture
    def view(self, folder: Path, step: Step) -> str:
        """The text of the view."""
        return (folder / view_name(step)).read_text(encoding="utf-8")

    @EACH_VIEW
    def test_each_is_of_its_step_and_leads_back_to_its_page(
        self, folder: Path, view: str, step: Step
    ) -> None:
        """It is small, too, and leads to the files of its panes: as links, which need no script,
        and which are followed for the whole site in `test_has_no_faults`."""
        shown = [name for name in (step.parent, step.id) if name is not None]
        index = index_of(view)
        assert f'href="../{page_of(step)}"' in view
        assert [kernel["name"] for kernel in index["kernels"]] == shown
        assert index["shown"] == len(shown) - 1
        assert ('id="diff-1"' in view) == (len(shown) == 2)
        if step.parent and has_tiles(FAMILIES[step.family]):
            tiles = {re.search(r"_Br\d+_Bc\d+_w\d+", k["symbol"])[0] for k in index["kernels"]}
            assert len(tiles) == 1  # those of step and parent
        assert len(view.encode()) < 400_000
        for pane in ("cuda", "ptx", "sass"):
            start = view.index(f'class="pane" data-pane="{pane}"')  # the style names panes, too
            code = view[start:].partition('role="listbox"')[2]
            code = code[: code.index("</div>")]
            links = re.findall(r'<a href="([^"]+)">([^<]+)</a>', code)
            assert [title for _, title in links] == [f"{pane.upper()} of {s}" for s in shown]
            for address, _ in links:
                file = folder / VIEWS / address
                assert file.read_text(encoding="utf-8").startswith(f'viewPart("{address}", {{')


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


class Reader:
    """The site as a person uses it."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self._folder = folder

    def open(self, name: str, place: str = "") -> None:
        """Open a page, and go to a place of it, such as `#h2`."""
        self.driver.get((self._folder / name).as_uri() + place)

    @property
    def at(self) -> str:
        """The page that is shown, relative to the site."""
        address = self.driver.current_url.split("#")[0].split("?")[0]
        return address.removeprefix(f"{self._folder.as_uri()}/")

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def wait(self, selector: str) -> Any:
        """An element that a script is about to make, make anew, or show."""
        from selenium.common.exceptions import StaleElementReferenceException

        return waiting(self.driver, StaleElementReferenceException).until(
            lambda _: next((e for e in self.all(selector) if e.is_displayed()), None)
        )

    def show(self, element: Any) -> None:
        """Scroll to it, at once."""
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)

    def click(self, element: Any) -> None:
        """Scroll to it and click, again while pictures that come late move it away."""
        from selenium.common.exceptions import ElementClickInterceptedException

        def clicked(_: Any) -> bool:
            self.show(element)
            element.click()
            return True

        waiting(self.driver, ElementClickInterceptedException).until(clicked)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def resize(self, metrics: dict[str, Any]) -> None:
        """Give the window another size. A script that asks for a width has that of the new one;
        what scripts draw anew is still to come."""
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def screen(self, metrics: dict[str, Any]) -> None:
        """Give the window another size; what is drawn anew for it has been when this returns."""
        self.resize(metrics)
        # size observers are told between one frame's callbacks and the next one's
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def width(self, screen: int) -> int:
        """The width of all there is to scroll to, on a screen that was asked for."""
        found, width = self.js("return [innerWidth, document.documentElement.scrollWidth]")
        assert found == screen or width > screen  # a phone shows a page that is too wide as a whole
        return width

    def system_theme(self, theme: str) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": theme}]},
        )

    def is_dark(self) -> bool:
        text = self.js("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in text[4:-1].split(",")[:3]) < 3 * 128

    def remembers(self, dark: bool) -> bool:
        """Whether the page comes up dark, or light: a browser that is busy hands the choice on to
        the next page late, so the page is loaded anew until then."""

        def shows(driver: Any) -> bool:
            if self.is_dark() == dark:
                return True
            driver.refresh()
            return False

        return waiting(self.driver).until(shows, f"the page stays {'light' if dark else 'dark'}")

    def turn_theme(self) -> str:
        """Press the button once; returns the mode that it is in now."""
        self.wait(".theme-toggle").click()
        return self.js("return document.body.dataset.theme")

    def choose_theme(self, mode: str) -> None:
        """Press the button, which has three modes, until it is in this one."""
        assert mode in [self.turn_theme() for _ in range(3)]
        for _ in range(3):
            if self.js("return document.body.dataset.theme") != mode:
                self.turn_theme()

    def faults(self) -> list[str]:
        """Warnings of the console, and requests to any other place than a file."""
        entries = self.driver.get_log("browser")
        said = [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]
        asked = {url for url in requested_urls(self.driver) if not url.startswith("file:")}
        return said + sorted(u for u in asked if not u.startswith("data:") and u != "about:blank")


@contextmanager
def reading(browser: Any, built: BuiltSite) -> Iterator[Reader]:
    """A reader with a wide, light screen, who has chosen nothing and opened no page yet; afterwards
    nothing must have gone wrong, and nothing have been asked of a network."""
    browser.get("about:blank")
    browser.execute_cdp_cmd(
        "Storage.clearDataForOrigin", {"origin": "file://", "storageTypes": "local_storage"}
    )
    found = Reader(browser, built.folder)
    found.screen(WIDE)
    found.system_theme("light")
    found.faults()  # those of the browser's own first page
    yield found
    assert found.faults() == []


@pytest.fixture
def reader(browser: Any, built: BuiltSite) -> Iterator[Reader]:
    with reading(browser, built) as found:
        yield found


@dataclass(frozen=True)
class Visit:
    """A page in the browser.

    `widths`: of all there is to scroll to, by screen. `pictures`: widths of their files, 0 for one
    that is not shown. `narrow_pictures`: the pictures on the screen LOW that are not as wide as the
    text around them. `wide_code`: the code boxes, folds opened, that scroll sideways there.
    """

    widths: dict[str, int]
    pictures: list[int]
    narrow_pictures: list[str]
    wide_code: list[str]


@pytest.fixture(scope="module")
def visits(browser: Any, built: BuiltSite) -> dict[str, Visit]:
    """Every page, each opened on the first of SCREENS, and then shown on the others."""
    found = {}
    with reading(browser, built) as reader:
        for path in sorted(built.folder.glob("*.html")):
            widths = {}
            for name, metrics in SCREENS.items():
                reader.resize(metrics)
                if not widths:
                    reader.open(path.name)
                widths[name] = reader.width(metrics["width"])
            pictures = reader.js(
                "return [...document.querySelectorAll('article img')].map(async (image) => {"
                "image.loading = 'eager'; await image.decode().catch(() => {});"
                "return image.naturalWidth; })"
                ".reduce(async (all, one) => [...await all, await one], [])"
            )
            reader.resize(LOW)
            narrow, wide = reader.js(
                """
                for (const fold of document.querySelectorAll("article details")) fold.open = true;
                const pictures = [...document.querySelectorAll("article p > img:only-child")];
                const boxes = [...document.querySelectorAll("article .highlight pre")];
                return [
                  pictures.filter((image) => Math.abs(image.clientWidth
                    - image.parentElement.clientWidth) > 1).map((image) => image.alt),
                  boxes.filter((box) => box.scrollWidth > box.clientWidth)
                    .map((box) => box.textContent.slice(0, 80)),
                ];
                """
            )
            found[path.name] = Visit(widths, pictures, narrow, wide)
    return found


class TestPages:
    def test_can_be_read_one_after_the_other(self, reader: Reader) -> None:
        """The first ones; that each leads to the next is seen above, in the files."""
        reader.open("index.html")
        read = []
        reader.find('.sidebar-tree a[href="lessons.html"]').click()
        for _ in COURSE[:5]:
            read.append(reader.at)
            assert reader.find(".sidebar-tree .current-page > a").text
            reader.click(reader.find("a.next-page"))
        assert read == [f"{page.path.stem}.html" for page in COURSE[:5]]
        assert read[:4] == ["lessons.html", "map.html", "quickstart.html", "00_start.html"]

    @pytest.mark.parametrize("page", [*COURSE][::6], ids=lambda page: page.path.stem)
    def test_the_menu_is_folded_but_for_the_part_of_the_page(
        self, reader: Reader, page: Page
    ) -> None:
        reader.screen(SMALL)
        reader.open(f"{page.path.stem}.html")
        assert [
            fold.find_element("css selector", "summary").text.lower()
            for fold in reader.all(".sidebar-tree details[open]")
        ] == [page.part.lower()]
        view, entry = reader.js(
            "return ['.sidebar-scroll', '.sidebar-tree .current-page > a'].map((selector) =>"
            "document.querySelector(selector).getBoundingClientRect().toJSON())"
        )
        assert view["top"] <= entry["top"] and entry["bottom"] <= view["bottom"]

    def test_a_page_outside_the_course_opens_its_own_part(self, reader: Reader) -> None:
        reader.open("glossary.html")
        (fold,) = reader.all(".sidebar-tree details[open]")
        assert fold.find_elements("css selector", 'a[href="#"]')

    def test_without_scripts_every_entry_of_the_menu_is_seen(self, built: BuiltSite) -> None:
        text = built.text("index.html")
        tree = text[text.index('class="sidebar-tree"') :]
        folds = re.findall(r"<details([^>]*)>", tree[: tree.index("</div>")])
        assert len(folds) > 5 and set(folds) == {" open"}

    @pytest.mark.parametrize("screen", SCREENS)
    def test_fit_the_screen(self, visits: dict[str, Visit], screen: str) -> None:
        """Wide tables, code and pictures scroll by themselves; the page never does."""
        widths = {page: visit.widths[screen] for page, visit in visits.items()}
        assert {page: w for page, w in widths.items() if w > SCREENS[screen]["width"]} == {}

    def test_pictures_are_shown(self, visits: dict[str, Visit]) -> None:
        assert any(visit.pictures for visit in visits.values())
        assert [page for page, visit in visits.items() if not all(visit.pictures)] == []

    def test_pictures_are_as_wide_as_the_text(self, visits: dict[str, Visit]) -> None:
        narrow = {page: visit.narrow_pictures for page, visit in visits.items()}
        assert {page: found for page, found in narrow.items() if found} == {}

    def test_code_fits_a_window_of_1366_pixels(self, visits: dict[str, Visit]) -> None:
        wide = {page: visit.wide_code for page, visit in visits.items()}
        assert {page: found for page, found in wide.items() if found} == {}

    def test_the_menu_opens_on_a_narrow_screen(self, reader: Reader) -> None:
        reader.open("index.html")
        reader.screen(NARROW)
        link = reader.find('.sidebar-tree a[href="lessons.html"]')
        assert reader.js("return arguments[0].getBoundingClientRect().right", link) <= 0
        reader.find(".mobile-header .nav-overlay-icon").click()
        reader.js("document.querySelector('.sidebar-drawer').style.transition = 'none'")
        link.click()
        assert reader.at == "lessons.html"


class TestSearch:
    """Sphinx's search, which needs no server."""

    def look_for(self, reader: Reader, words: str) -> list[str]:
        """The pages that are found."""
        from selenium.common.exceptions import WebDriverException

        reader.open("index.html")
        reader.find("input.sidebar-search").send_keys(words, ENTER)
        # a look while the browser goes to another page is "aborted by navigation"
        waiting(reader.driver, WebDriverException).until(
            lambda _: reader.find("#search-results p.search-summary").text.startswith("Search f")
        )
        links = [a.get_attribute("href") for a in reader.all("#search-results ul.search > li > a")]
        return [link.split("/")[-1].split("#")[0].split("?")[0] for link in links]

    def test_finds_what_stands_in_text_in_code_and_in_tables(self, reader: Reader) -> None:
        assert {"01_base.html", "02_swizzle.html"} <= set(self.look_for(reader, "ldmatrix"))
        assert reader.at == "search.html"

    def test_opens_a_page_with_the_word_marked(self, reader: Reader) -> None:
        assert "glossary.html" in self.look_for(reader, "wavefront")
        reader.find("#search-results ul.search > li > a").click()
        assert reader.at != "search.html"
        assert reader.wait("article .highlighted").text.lower().startswith("wavefront")

    def test_says_when_there_is_nothing(self, reader: Reader) -> None:
        reader.open("index.html")
        reader.find("input.sidebar-search").send_keys("xyzzyplugh", ENTER)
        assert "did not match" in reader.wait("#search-results p.search-summary").text


class TestView:
    """A view of machine code; links, keys and filters of its script are tested in
    tests/sass/test_page_in_browser.py."""

    def test_opens_from_the_page_of_its_step_and_leads_back(self, reader: Reader) -> None:
        reader.open(page_of(STEP))
        reader.find(".view-card a").click()
        assert reader.at == str(view_name(STEP))
        assert [button.text for button in reader.all("#versions button")] == [STEP.parent, STEP.id]
        reader.find("#course a").click()
        assert reader.at == page_of(STEP)

    def loaded(self, reader: Reader) -> set[str]:
        """The panes whose files were asked for since the last call."""
        urls = [url for url in requested_urls(reader.driver) if "/kernels/" in url]
        return {url.split(".")[-2] for url in urls}

    def test_loads_a_pane_when_it_is_first_looked_at(self, reader: Reader) -> None:
        """On a phone one by one, with the marks and counts of its lines right from the start."""
        reader.screen(NARROW)
        reader.open(str(view_name(STEP)))
        assert self.loaded(reader) == {"cuda"}
        assert any(
            reader.js("return [...document.querySelectorAll('.made')].map(e => e.innerText)")
        )
        for pane in ("sass", "ptx"):
            reader.find(f"[data-tab={pane}]").click()
            assert reader.wait(f"[data-pane={pane}] .row.cursor")
            assert self.loaded(reader) == {pane}
        reader.find("[data-tab=cuda]").click()
        assert self.loaded(reader) == set()

    @pytest.mark.parametrize("key", ["m", "/"])
    def test_loads_what_a_key_needs(self, reader: Reader, key: str) -> None:
        reader.screen(NARROW)
        reader.open(str(view_name(STEP)))
        reader.press(key, *("mma.sync" if key == "/" else ""))
        reader.wait("#detail code" if key == "m" else ".row.hit, #hits:not(:empty)")
        assert {"ptx", "sass"} <= self.loaded(reader)

    def test_loads_all_panes_for_an_address_that_names_a_line(self, reader: Reader) -> None:
        reader.open(str(view_name(STEP)), f"#{STEP.id}/sass/120")
        assert reader.wait("[data-pane=sass] .row.lit").get_attribute("data-key") == "120"

    def test_says_which_file_cannot_be_read(self, browser: Any, built: BuiltSite, tmp_path) -> None:
        view = view_name(STEP).name
        (tmp_path / view).write_text(built.text(str(view_name(STEP))), encoding="utf-8")
        alone = Reader(browser, tmp_path)
        alone.screen(WIDE)
        alone.open(view)
        for pane in ("cuda", "ptx", "sass"):
            assert f".{pane}.js" in alone.wait(f"[data-pane={pane}] .empty").text
        assert any("ERR_FILE_NOT_FOUND" in fault for fault in alone.faults())

    def share_of_code(self, reader: Reader) -> float:
        """Share of the screen's height that the pane used last gives to code."""
        return reader.js(
            "return document.querySelector('.pane.active .code').clientHeight / innerHeight"
        )

    def marks(self, reader: Reader, pane: str) -> set[str]:
        """Those of all rows of a pane."""
        return set(
            reader.js(
                "return [...document.querySelectorAll(`[data-pane=${arguments[0]}] .mark`)]"
                ".map((mark) => mark.textContent)",
                pane,
            )
        )

    def cursor_is_in_view(self, reader: Reader, pane: str) -> bool:
        return reader.js(
            "const row = document.querySelector(`[data-pane=${arguments[0]}] .cursor`)"
            ".getBoundingClientRect(), code = document.querySelector("
            "`[data-pane=${arguments[0]}] .code`).getBoundingClientRect();"
            "return code.top <= row.top && row.bottom <= code.bottom",
            pane,
        )

    @pytest.mark.parametrize("step", ENDS, ids=lambda step: step.id)
    def test_opens_at_what_changed(self, reader: Reader, step: Step) -> None:
        """CUDA at the first line that changed, and all that can be."""
        reader.screen(LOW)
        reader.open(str(view_name(step)))
        for pane in ("cuda", "ptx", "sass"):
            news = self.marks(reader, pane) & set("+-~>}")
            assert not (pane == "cuda" and step.parent and not news)
            cursors = reader.all(f"[data-pane={pane}] .cursor > .mark")
            assert len(cursors) == bool(news), pane
            for cursor in cursors:
                assert cursor.text in "+-~>}" and self.cursor_is_in_view(reader, pane)
        assert self.share_of_code(reader) >= 0.7
        size = reader.js(
            "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        assert size == [LOW["width"], LOW["height"]]

    def test_a_change_indented_beyond_its_pane_is_seen(self, reader: Reader) -> None:
        """Ten characters of it at least."""
        reader.screen(LOW)
        reader.open(str(view_name(INDENTED)))
        blanks, left, right = reader.js(
            """
            const line = document.querySelector("[data-pane=cuda] .cursor").lastElementChild;
            const blanks = line.textContent.search(/\\S/);
            const box = line.getBoundingClientRect();
            const sign = box.width / line.textContent.length;
            const code = line.closest(".code");
            const start = box.left + blanks * sign - code.getBoundingClientRect().left;
            return [blanks, start, code.clientWidth - start - 10 * sign];
            """
        )
        assert blanks > 40 and left >= 0 and right >= 0

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_marks_show_in_both_themes(self, reader: Reader, theme: str) -> None:
        """As a sign, and as a colour that no other mark has."""
        reader.system_theme(theme)
        reader.open(str(view_name(STEP)))
        looks = reader.js(
            """
            const look = (row) => [getComputedStyle(row).backgroundColor,
              getComputedStyle(row.querySelector(".mark")).color];
            const found = {};
            for (const row of document.querySelectorAll(".row[data-key]:not(.cursor)")) {
              found[row.querySelector(".mark").textContent] ??= look(row);
            }
            return found;
            """
        )
        assert {" ", "≈", "+", "-", "~", ">"} <= set(looks)
        assert len({tuple(looks[mark]) for mark in "+-~> "}) == 5

    def test_on_a_phone_shows_one_pane_at_a_time(self, reader: Reader) -> None:
        reader.screen(NARROW)
        reader.open(str(view_name(STEP)))
        for pane in ("cuda", "ptx", "sass"):
            reader.find(f"[data-tab={pane}]").click()
            shown = [e.get_attribute("data-pane") for e in reader.all(".pane") if e.is_displayed()]
            assert shown == [pane]
            assert self.marks(reader, pane) & set("+-~>}")
            before = reader.find("#change").text
            reader.find("[data-do=next]").click()
            assert reader.find("#change").text != before
            assert self.cursor_is_in_view(reader, pane)
            assert self.share_of_code(reader) >= 0.6
            assert reader.js("return document.documentElement.scrollWidth") <= NARROW["width"]


class TestThemes:
    def test_the_button_is_remembered_everywhere(self, reader: Reader) -> None:
        reader.open("index.html")
        reader.choose_theme("dark")
        assert reader.is_dark()
        reader.open(page_of(STEP))
        assert reader.remembers(dark=True)
        reader.find(".view-card a").click()
        assert reader.remembers(dark=True)
        reader.driver.back()
        reader.choose_theme("light")
        reader.open(str(view_name(STEP)))
        assert reader.remembers(dark=False)

    def test_the_button_of_a_view_is_remembered_too(self, reader: Reader) -> None:
        reader.open(str(view_name(STEP)))
        assert not reader.is_dark()
        reader.find("#theme").click()
        reader.find("#course a").click()
        assert reader.remembers(dark=True)

    def test_the_system_is_followed_until_then_and_again(self, reader: Reader) -> None:
        reader.open("index.html")
        reader.system_theme("dark")
        assert reader.is_dark()
        reader.choose_theme("light")
        assert not reader.is_dark()
        reader.choose_theme("auto")
        assert reader.is_dark()
        reader.open(str(view_name(STEP)))
        assert reader.remembers(dark=True)

    @pytest.mark.parametrize(("theme", "other"), [("light", "dark"), ("dark", "light")])
    def test_pictures_follow_the_button(self, reader: Reader, theme: str, other: str) -> None:
        """The media query in a picture asks for the scheme of the element that shows it (CSS Color
        Adjustment Module Level 1, section 2.3)."""
        reader.open("index.html")
        reader.system_theme(other)
        reader.choose_theme(theme)
        assert reader.js("return getComputedStyle(document.body).colorScheme") == theme

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_text_has_contrast(self, reader: Reader, theme: str) -> None:
        """WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1."""
        reader.open("index.html")
        reader.system_theme(theme)
        ratios = reader.js(
            """
            const probe = document.body.appendChild(document.createElement("p"));
            const colour = (name) => {
              probe.style.color = `var(${name})`;
              return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
            };
            const light = (name) => {
              const [r, g, b] = colour(name).map((c) => c / 255)
                .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const against = (a, b) => {
              const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
              return (high + 0.05) / (low + 0.05);
            };
            const texts = ["--color-foreground-primary", "--color-foreground-secondary",
              "--color-foreground-muted", "--color-brand-content", "--color-brand-visited",
              "--hunk"];
            const found = Object.fromEntries(
              texts.map((text) => [text, against(text, "--color-background-primary")]));
            probe.remove();
            return found;
            """
        )
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
