"""Every picture of the course can be read by everybody, in both colour schemes."""

import io
import itertools
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from browser import open_browser, skip_or_fail, waiting
from drawn_picture import SVG, DrawnPicture
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "docs/images/course").glob("*.svg"))}
# backgrounds of GitHub, light and dark; and of Material for MkDocs, light and "slate"
PAGES = {"light": ("#ffffff",), "dark": ("#0d1117", "#1e2129")}
PHONE = 390 - 32  # pixels that a phone has for a picture: its width without the page's padding
SMALLEST_TEXT = 9.0  # pixels, there
SHAPES = ("text", "rect", "polyline", "polygon")

every_picture = pytest.mark.parametrize("name", FILES)


@cache
def drawn(name: str) -> DrawnPicture:
    return DrawnPicture(FILES[name])


def test_each_picture_stands_on_one_page() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = [name for text in pages for name in re.findall(r"<!-- build:picture (\w+) ", text)]
    assert sorted(shown) == [*FILES]


@every_picture
def test_a_picture_describes_itself_and_needs_nothing_from_elsewhere(name: str) -> None:
    picture = drawn(name)
    root = picture.root
    title, desc = (root.find(f"{SVG}{tag}") for tag in ("title", "desc"))
    assert title is not None and desc is not None
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"].split() == [title.attrib["id"], desc.attrib["id"]]
    assert len(title.text) > 15 and len(desc.text) > 80
    assert title.attrib["id"].startswith(f"{name}-"), "all pictures may stand in one page"
    assert root.attrib["font-family"].endswith("sans-serif")
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "desc", "style", *SHAPES}
    assert not re.search(r"href|url\(|@import|transform|var\(", picture.source)
    american = r"\b\w*(?:color|behavior|optimiz|normaliz|initializ|neighbor|center)\w*"
    assert re.findall(american, f"{picture.words} {desc.text}", re.IGNORECASE) == []


# -- colours -------------------------------------------------------------------------------------


def _contrast(a: str, b: str) -> float:
    """Contrast ratio of WCAG 2.1."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@every_picture
def test_text_and_edges_stand_out_in_both_schemes(name: str) -> None:
    """Plain attributes draw the light picture in every viewer, and a style sheet replaces each of
    them where the scheme is dark. Contrast of text is 4.5 : 1 at least, of lines 3 : 1, as WCAG 2.1
    asks for (1.4.3 and 1.4.11)."""
    picture = drawn(name)
    (rules,) = re.findall(
        r"^@media\(prefers-color-scheme:dark\)\{([^@]*)\}$", picture.root.findtext(f"{SVG}style")
    )
    found = re.findall(r"\.course-picture \.([\w-]+)\{(fill|stroke):([^;}]+)\}", rules)
    dark = {css: colour for css, key, colour in found if css.startswith(f"{key}-")}
    light: dict[str, str] = {}
    for element in (e for tag in SHAPES for e in picture.root.iter(SVG + tag)):
        paints = {key: element.get(key, "none") for key in ("fill", "stroke")}
        classes = dict(css.split("-", 1) for css in element.get("class", "").split())
        assert {key for key, colour in paints.items() if colour != "none"} == set(classes) != set()
        light |= {f"{key}-{css}": paints[key] for key, css in classes.items()}
    assert light.keys() <= dark.keys()
    assert (light.pop("fill-page"), dark.pop("fill-page")) == (PAGES["light"][0], "none")
    for scheme, colours in (("light", light), ("dark", {css: dark[css] for css in light})):
        for css, colour in colours.items():
            if css.endswith("-tint"):
                assert _contrast(colours["fill-ink"], colour) >= 7, css
                continue
            for page in PAGES[scheme]:
                assert _contrast(colour, page) >= (4.5 if css.startswith("fill-") else 3), css


@every_picture
def test_a_light_picture_brings_its_page_along(name: str) -> None:
    """Dark ink would be lost in a viewer that is dark and shows no dark picture."""
    page, *others = drawn(name).rects
    assert page.box == drawn(name).page and page.classes == ("fill-page",)
    for rect in others:
        assert rect.box.bottom - rect.box.top < 0.8 * page.box.bottom


@every_picture
def test_a_viewer_without_style_sheets_draws_it(name: str) -> None:
    """Ink on a light page, with as many tones as the picture has colours."""
    if not shutil.which("rsvg-convert"):
        skip_or_fail("there is no rsvg-convert: apt-get install librsvg2-bin")
    png = subprocess.run(["rsvg-convert", FILES[name]], capture_output=True, check=True).stdout
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    assert image.getchannel("A").getextrema() == (255, 255), "no page below the picture"
    tones = np.asarray(image.convert("L"))
    assert np.median(tones) > 200 and tones.min() < 60
    assert (tones < 60).mean() < 0.12, "black boxes"


# -- text ----------------------------------------------------------------------------------------


@every_picture
def test_every_text_has_its_place(name: str) -> None:
    """No text is small on a phone, leaves the page, meets another, or is cut by an edge or line."""
    picture = drawn(name)
    shown = min(1, PHONE / picture.page.right)
    assert min(text.size for text in picture.texts) * shown >= SMALLEST_TEXT
    pairs = itertools.combinations(picture.texts, 2)
    assert [(a.text, b.text) for a, b in pairs if a.box.meets(b.box, 0.5)] == []
    for text in picture.texts:
        assert picture.page.holds(text.box), text.text
        for rect in picture.rects[1:]:
            if text.box.meets(rect.box, 1.5):
                assert rect.box.holds(text.box, 1.5), (text.text, rect)
        for line in picture.lines:
            assert not line.crosses(text.box), (text.text, line)


def test_a_browser_draws_no_text_wider_and_follows_the_pages_scheme(tmp_path: Path) -> None:
    """In a page that is dark where the system is not, and the other way round."""
    page = tmp_path / "page.html"
    page.write_text("".join(path.read_text(encoding="utf-8") for path in FILES.values()))
    with open_browser(tmp_path / "profile") as browser:
        browser.get(page.as_uri())
        waiting(browser).until(  # a busy browser may answer before it has read the page
            lambda _: browser.execute_script("return document.readyState") == "complete"
        )
        measured = browser.execute_script(
            "return [...document.querySelectorAll('svg text')]"
            ".map(t => [t.textContent, t.getComputedTextLength()])"
        )
        estimated = [text for name in FILES for text in drawn(name).texts]
        assert [text for text, _ in measured] == [text.text for text in estimated]
        for (text, width), estimate in zip(measured, estimated, strict=True):
            assert width <= 1.03 * (estimate.box.right - estimate.box.left) + 0.5, text

        inks = {}
        for system, scheme in itertools.product(PAGES, PAGES):
            feature = {"name": "prefers-color-scheme", "value": system}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            page.write_text(
                f"<body style='color-scheme:{scheme};margin:0;background:#808080'>"
                f"<img src='{next(iter(FILES.values())).as_uri()}'>"
            )
            browser.get(page.as_uri())
            browser.execute_async_script(
                "const done = arguments[0]; document.images[0].decode().then(() => "
                "requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("L")
            tones = np.asarray(shot.crop((10, 8, 470, 34)))  # the title
            inks[system, scheme] = "dark" if tones.max() > 200 and tones.min() > 60 else "light"
        assert inks == {(system, scheme): scheme for system, scheme in inks}


# -- arithmetic ----------------------------------------------------------------------------------

_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_OPERATORS = {"·": "*", "/": "/", "+": "+", "−": "-", "^": "^"}  # noqa: RUF001
_SUM = re.compile(
    r"(?<![\d.,])(?<![·/+−^] )(?<!\()"  # noqa: RUF001
    rf"((?:{_NUMBER} [·/+−^] )+{_NUMBER}) = (−?{_NUMBER})"  # noqa: RUF001
)


def _evaluated(operands: str) -> float:
    """Value of a text that _SUM has found: numbers and operators between spaces; ^ is XOR."""
    words = [_OPERATORS.get(word, word.replace(",", "")) for word in operands.split(" ")]
    return eval(" ".join(words), {"__builtins__": {}})


@every_picture
def test_a_picture_works_a_number_and_its_arithmetic_is_right(name: str) -> None:
    words = drawn(name).words
    assert re.search(r"\d[^=]*[·/+^−][^=]*= [\d−]", words), words  # noqa: RUF001
    for operands, result in _SUM.findall(words):
        shown = result.replace(",", "").replace("−", "-")  # noqa: RUF001
        decimals = len(shown.partition(".")[2])
        # what is rounded to be shown may be off by a unit of its last digit
        tolerance = 2 * 10**-decimals if decimals else 1e-9
        assert _evaluated(operands) == pytest.approx(float(shown), abs=tolerance), operands


def test_the_test_of_arithmetic_finds_what_is_shown() -> None:
    found = [m for name in FILES for m in _SUM.findall(drawn(name).words)]
    assert len(found) > 40 and ("64 · 4 · 8", "2048") in found and ("2 ^ 3", "1") in found
    assert _evaluated("512 − 9 · 64") == -64  # noqa: RUF001
    assert _evaluated("4 · 4 / 6") == pytest.approx(8 / 3)
    assert _evaluated("2 ^ 3") == 1
