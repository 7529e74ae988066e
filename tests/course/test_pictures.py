"""The pictures of the course: all there and current, readable by everybody, and right.

What a picture says is compared with the simulator, with the machine code that was counted, and with
arithmetic that is written down here a second time.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browser import open_browser, skip_or_fail
from drawn_picture import SVG, DrawnPicture
from fake_backend import load_tool
from PIL import Image

import flash_attention
from flash_helpers.check.inputs import make_inputs
from flash_helpers.course.pictures import (
    PICTURES,
    draw,
    picture_path,
    stale_pictures,
    unknown_pictures,
)
from flash_helpers.course.pictures.addressing import copy_rows
from flash_helpers.course.pictures.overlap import (
    AHEAD,
    BLOCK_MAXIMA,
    MAX_GROWTH,
    RING,
    lazy_maxima,
)
from flash_helpers.course.pictures.svg import COLOURS, DARK, LIGHT, Drawing, typeset, wrapped
from flash_helpers.course.pictures.text_width import BOLD_WIDTHS, WIDTHS, text_width
from flash_helpers.course.pictures.work import large_tile, overlap_step, step_config, work_of
from flash_helpers.kernel_configs import AttentionForward, FlashForwardKernelConfig
from flash_helpers.measure.baseline import load_baseline
from flash_helpers.ptx import Counts, DeviceMemory, load_ptx
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import as_matrix
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.instructions.tensor import matrix_of_a, matrix_of_b, matrix_of_c
from flash_helpers.ptx.run.memory.boxes import swizzled

ROOT = Path(__file__).resolve().parents[2]
TOOL = "tools/docs/draw_pictures.py"
# what the pages of the course show
EXPECTED = (
    "attention_tiles",
    "sm",
    "mma_fragments",
    "ldmatrix",
    "roofline",
    "bank_conflicts",
    "swizzle",
    "timeline_copies",
    "fragments_whole_vs_interleaved",
    "double_buffer",
    "ffma_fold",
    "tile_shapes",
    "swizzle_constants",
    "fragment_order",
    "peeled_loop",
    "output_swizzle",
    "block_index",
    "backwards",
    "cache_policy",
    "pieces",
    "row_stride",
    "shared_memory_reads",
    "lazy_rescale",
    "two_buffers",
    "fragment_ring",
    "mma_row_sum",
    "tma_tile",
    "wgmma_fragments",
    "two_slots",
    "barrier_ring",
    "ping_pong",
    "own_products",
    "flattened",
    "causal_blocks",
    "own_keys",
    "shared_loads",
    "head_pairs",
    "half_blocks",
    "early_slot",
    "no_fence",
    "late_take",
)
# GitHub, light and dark; Material for MkDocs, light and "slate"
PAGES = {"light": ("#ffffff",), "dark": ("#0d1117", "#1e2129")}
PHONE = 390 - 32  # pixels that a phone has for a picture: its width without the page's padding
SMALLEST_TEXT = 9.0  # pixels, there

ROW_BYTES = 256  # of a tile: 128 columns of 2 bytes


@cache
def drawn(name: str) -> DrawnPicture:
    return DrawnPicture(ROOT / picture_path(name))


def style_of(name: str) -> str:
    return drawn(name).root.findtext(f"{SVG}style")


every_picture = pytest.mark.parametrize("name", EXPECTED)


# -- all there and current -----------------------------------------------------------------------


def test_the_pictures_are_those_that_the_course_shows() -> None:
    assert sorted(PICTURES) == sorted(EXPECTED)
    assert unknown_pictures(ROOT) == []


@every_picture
def test_a_committed_picture_is_what_would_be_drawn_now(name: str) -> None:
    assert stale_pictures(ROOT, [name]) == {}, f"run python {TOOL} {name}"


@every_picture
def test_a_picture_is_drawn_the_same_each_time(name: str) -> None:
    assert draw(name).to_svg(name) == draw(name).to_svg(name)


def test_the_tool_draws_what_is_stale_and_nothing_else(tmp_path: Path, capsys) -> None:
    main = load_tool(TOOL).main
    root = ["--root", str(tmp_path)]
    assert main(["swizzle", "sm", *root]) == 0
    swizzle, sm = (tmp_path / picture_path(name) for name in ("swizzle", "sm"))
    before = sm.stat().st_mtime_ns
    swizzle.write_text(swizzle.read_text().replace("784", "785"))
    assert main(["swizzle", "sm", "--check", *root]) == 1
    assert "swizzle.svg" in capsys.readouterr().out.splitlines()[-1]
    assert "785" in swizzle.read_text(), "--check writes nothing"
    assert main(["swizzle", "sm", *root]) == 0
    assert capsys.readouterr().out == f"{picture_path('swizzle')} written\n"
    assert sm.stat().st_mtime_ns == before
    assert main(["swizzle", "sm", "--check", *root]) == 0


def test_the_tool_finds_absent_pictures_and_strange_files(
    root: Path, tmp_path: Path, capsys
) -> None:
    main = load_tool(TOOL).main
    (tmp_path / "benchmarks").symlink_to(root / "benchmarks")
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / picture_path("sm")).rename(tmp_path / picture_path("ms"))
    capsys.readouterr()
    assert main(["--root", str(tmp_path), "--check"]) == 1
    out = capsys.readouterr().out
    assert "sm.svg is absent" in out and "ms.svg is no picture" in out


def test_a_name_that_is_no_picture_is_told_with_those_that_are(capsys) -> None:
    assert load_tool(TOOL).main(["swizle"]) == 2
    error = capsys.readouterr().err
    assert "'swizle'" in error and "swizzle" in error and error.count("\n") == 1


def test_the_list_names_every_picture(capsys) -> None:
    assert load_tool(TOOL).main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == list(PICTURES)


# -- readable ------------------------------------------------------------------------------------


@every_picture
def test_a_picture_says_in_words_what_it_shows(name: str) -> None:
    root = drawn(name).root
    title, desc = (root.find(f"{SVG}{tag}") for tag in ("title", "desc"))
    assert title is not None and desc is not None
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"].split() == [title.attrib["id"], desc.attrib["id"]]
    assert len(title.text) > 15 and len(desc.text) > 80
    # all pictures may stand in one page
    assert title.attrib["id"].startswith(f"{name}-")


@every_picture
def test_a_picture_needs_nothing_from_elsewhere(name: str) -> None:
    picture = drawn(name)
    tags = {element.tag.removeprefix(SVG) for element in picture.root.iter()}
    assert tags <= {"svg", "title", "desc", "style", "text", "rect", "polyline", "polygon"}
    assert not re.search(r"href|url\(|@import|transform|var\(", picture.source)


@every_picture
def test_every_viewer_draws_the_light_picture(name: str) -> None:
    """Colours and fonts are plain attributes, of text and of shapes; what a style sheet says is for
    the dark scheme alone."""
    root = drawn(name).root
    assert root.attrib["font-family"].endswith("sans-serif")
    shapes = [e for tag in ("text", "rect", "polyline", "polygon") for e in root.iter(SVG + tag)]
    for element in shapes:
        filled, stroke = element.attrib["fill"], element.get("stroke", "none")
        assert {filled, stroke} <= {*LIGHT.values(), "none"} and {filled, stroke} != {"none"}
        if element.tag == f"{SVG}text":
            assert filled != "none" and float(element.attrib["font-size"]) > 0
    (rule,) = re.findall(r"@media\(prefers-color-scheme:dark\)\{(.*)\}$", style_of(name))
    assert "@" not in rule


@every_picture
def test_every_colour_has_its_dark_one(name: str) -> None:
    rules = re.findall(r"\.course-picture \.([\w-]+)\{([^:}]+):([^;}]+)\}", style_of(name))
    dark = {css: (key, colour) for css, key, colour in rules}
    for element in drawn(name).root.iter():
        classes = element.get("class", "").split()
        if element.tag == f"{SVG}svg":
            continue
        shown = {k: v for k in ("fill", "stroke") if (v := element.get(k, "none")) != "none"}
        assert len(classes) == len(shown)
        for one in classes:
            key, _, colour = one.partition("-")
            assert dark[one] == (key, DARK[colour]) and shown[key] == LIGHT[colour]


@every_picture
def test_a_light_picture_brings_its_page_along(name: str) -> None:
    """Dark ink would be lost in a viewer that is dark and shows no dark picture."""
    picture = drawn(name)
    page, *others = picture.rects
    assert page.box == picture.page and page.classes == ("fill-page",)
    assert (LIGHT["page"], DARK["page"]) == (PAGES["light"][0], "none")
    for rect in others:
        assert rect.box.bottom - rect.box.top < 0.8 * picture.page.bottom


@every_picture
def test_a_viewer_without_variables_draws_it(name: str) -> None:
    """Ink on a light page, with as many tones as the picture has colours."""
    if not shutil.which("rsvg-convert"):
        skip_or_fail("there is no rsvg-convert: apt-get install librsvg2-bin")
    png = subprocess.run(
        ["rsvg-convert", ROOT / picture_path(name)], capture_output=True, check=True
    ).stdout
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    assert image.getchannel("A").getextrema() == (255, 255), "no page below the picture"
    tones = np.asarray(image.convert("L"))
    assert np.median(tones) > 200 and tones.min() < 60
    assert (tones < 60).mean() < 0.12, "black boxes"


@every_picture
def test_no_text_is_small_on_a_phone(name: str) -> None:
    picture = drawn(name)
    shown = min(1, PHONE / picture.page.right)
    assert min(text.size for text in picture.texts) * shown >= SMALLEST_TEXT


@every_picture
def test_every_text_lies_on_the_page(name: str) -> None:
    picture = drawn(name)
    assert [t.text for t in picture.texts if not picture.page.holds(t.box)] == []


@every_picture
def test_no_two_texts_overlap(name: str) -> None:
    found = itertools.combinations(drawn(name).texts, 2)
    assert [(a.text, b.text) for a, b in found if a.box.meets(b.box, 0.5)] == []


@every_picture
def test_no_text_is_cut_by_an_edge_or_a_line(name: str) -> None:
    """A text lies inside a rectangle or outside of it, and no line runs through it."""
    picture = drawn(name)
    for text in picture.texts:
        for rect in picture.rects[1:]:
            if text.box.meets(rect.box, 1.5):
                assert rect.box.holds(text.box, 1.5), (text.text, rect)
        for line in picture.lines:
            assert not line.crosses(text.box), (text.text, line)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _contrast(a: str, b: str) -> float:
    """Of WCAG 2.1, "contrast ratio"."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_edges_stand_out(scheme: str) -> None:
    """Text 4.5 : 1, what carries meaning 3 : 1, as WCAG 2.1 asks for (1.4.3 and 1.4.11)."""
    colours = {"light": LIGHT, "dark": DARK}[scheme]
    for page in PAGES[scheme]:
        for name in ("ink", "muted", *COLOURS):
            assert _contrast(colours[name], page) >= 4.5, (name, page)
        assert _contrast(colours["rule"], page) >= 3, page
    for name in COLOURS:
        assert _contrast(colours["ink"], colours[f"{name}-tint"]) >= 7
        assert _contrast(colours[name], colours[f"{name}-tint"]) >= 3


def test_the_schemes_name_the_same_colours() -> None:
    assert set(LIGHT) == set(DARK)


def test_widths_are_those_of_the_font() -> None:
    from matplotlib import font_manager, ft2font

    for widths, weight in ((WIDTHS, "normal"), (BOLD_WIDTHS, "bold")):
        path = font_manager.findfont(
            font_manager.FontProperties(family="DejaVu Sans", weight=weight)
        )
        font = ft2font.FT2Font(path)
        font.set_size(1000, 72)
        for character, width in widths.items():
            glyph = font.load_char(ord(character), flags=ft2font.LoadFlags.NO_HINTING)
            assert glyph.linearHoriAdvance / 65536 == pytest.approx(width, abs=1), character


def test_a_text_that_does_not_fit_its_cell_is_told() -> None:
    drawing = Drawing("A title of a drawing", "What it shows")
    with pytest.raises(ValueError, match="'too long' does not fit"):
        drawing.cell(0, 0, 20, 20, "too long")
    with pytest.raises(ValueError, match="width of 語 is not known"):
        drawing.text(0, 0, "語")


def test_lines_are_broken_at_spaces_but_not_in_products() -> None:
    text = "each warp has 64 · 4 · 8 = 2048 of them"
    lines = wrapped(text, 90, 14)
    assert all(text_width(line, 14) <= 90 or " " not in line for line in lines)
    assert " ".join(lines).replace("\N{NO-BREAK SPACE}", " ") == text
    assert any("64\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}4" in line for line in lines)


def test_hyphens_become_the_signs_that_they_stand_for() -> None:
    assert typeset("rows 0-7 - 3 = -4, 16-byte") == "rows 0–7 − 3 = −4, 16-byte"  # noqa: RUF001


@every_picture
def test_british_spelling(name: str) -> None:
    words = drawn(name).words + " " + drawn(name).root.find(f"{SVG}desc").text
    american = r"\b\w*(?:color|behavior|optimiz|normaliz|initializ|neighbor|center)\w*"
    assert re.findall(american, words, re.IGNORECASE) == []


@every_picture
def test_a_picture_works_a_number(name: str) -> None:
    """Somewhere it says how a number comes about: operands, an equals sign, a result."""
    assert re.search(r"\d[^=]*[·/+^−][^=]*= [\d−]", drawn(name).words), drawn(name).words  # noqa: RUF001


_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_OPERATORS = {"·": "*", "/": "/", "+": "+", "−": "-", "^": "^"}  # noqa: RUF001
_SUM = re.compile(
    r"(?<![\d.,])(?<![·/+−^] )(?<!\()"  # noqa: RUF001
    rf"((?:{_NUMBER} [·/+−^] )+{_NUMBER}) = (−?{_NUMBER})"  # noqa: RUF001
)


def _evaluated(operands: str) -> float:
    """Of a text that _SUM has found: numbers and operators between spaces; ^ is XOR."""
    words = [_OPERATORS.get(word, word.replace(",", "")) for word in operands.split(" ")]
    return eval(" ".join(words), {"__builtins__": {}})


@every_picture
def test_the_arithmetic_is_right(name: str) -> None:
    for operands, result in _SUM.findall(drawn(name).words):
        shown = result.replace(",", "").replace("−", "-")  # noqa: RUF001
        decimals = len(shown.partition(".")[2])
        # what is rounded to be shown may be off by a unit of its last digit
        tolerance = 2 * 10**-decimals if decimals else 1e-9
        assert _evaluated(operands) == pytest.approx(float(shown), abs=tolerance), operands


def test_the_test_of_arithmetic_finds_what_is_shown() -> None:
    found = [m for name in EXPECTED for m in _SUM.findall(drawn(name).words)]
    assert len(found) > 40 and ("64 · 4 · 8", "2048") in found and ("2 ^ 3", "1") in found
    assert _evaluated("512 − 9 · 64") == -64  # noqa: RUF001
    assert _evaluated("4 · 4 / 6") == pytest.approx(8 / 3)
    assert _evaluated("2 ^ 3") == 1


def test_a_browser_draws_no_text_wider_and_follows_the_pages_scheme(tmp_path: Path) -> None:
    """In a page that is dark where the system is not, and the other way round."""
    pictures = [ROOT / picture_path(name) for name in EXPECTED]
    page = tmp_path / "page.html"
    page.write_text("".join(path.read_text(encoding="utf-8") for path in pictures))
    with open_browser(tmp_path / "profile") as browser:
        browser.get(page.as_uri())
        measured = browser.execute_script(
            "return [...document.querySelectorAll('svg text')]"
            ".map(t => [t.textContent, t.getComputedTextLength()])"
        )
        estimated = [text for name in EXPECTED for text in drawn(name).texts]
        assert [text for text, _ in measured] == [text.text for text in estimated]
        for (text, width), estimate in zip(measured, estimated, strict=True):
            assert width <= 1.03 * (estimate.box.right - estimate.box.left) + 0.5, text

        inks = {}
        for system, scheme in itertools.product(PAGES, PAGES):
            feature = {"name": "prefers-color-scheme", "value": system}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            page.write_text(
                f"<body style='color-scheme:{scheme};margin:0;background:#808080'>"
                f"<img src='{pictures[0].as_uri()}'>"
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


# -- right: shared memory ------------------------------------------------------------------------


def counted_wavefronts(addresses: list[int]) -> int:
    """What the simulator counts for one 16-byte access of the lanes that give these addresses."""
    tally = Tally(SimpleNamespace(instructions=[SimpleNamespace(name="ldmatrix")]))
    lanes = np.arange(len(addresses))
    tally.shared_access(0, np.array(addresses), 16, lanes)
    return tally.accesses[0].shared_wavefronts


@pytest.mark.parametrize(
    ("name", "place", "expected"),
    [
        ("bank_conflicts", lambda row, chunk: chunk, 8),
        ("swizzle", lambda row, chunk: chunk ^ row % 8, 1),
    ],
)
def test_banks_are_those_of_the_addresses(name: str, place, expected: int) -> None:
    picture = drawn(name)
    cells = picture.with_data("row", "chunk", "place", "bank")
    assert Counter((c.data["row"], c.data["chunk"]) for c in cells) == Counter(
        (str(row), str(chunk)) for row in range(8) for chunk in range(16)
    )
    columns = sorted({c.box.left for c in cells})
    for cell in cells:
        row, chunk, at = (int(cell.data[k]) for k in ("row", "chunk", "place"))
        assert at == place(row, chunk) == columns.index(cell.box.left)
        assert picture.label(cell) == str(chunk)
        address = row * ROW_BYTES + at * 16
        assert int(cell.data["bank"]) == address // 4 % 32
        # the head of the column says so too
        heads = [t for t in picture.texts if t.text == cell.data["bank"]]
        middle = (cell.box.left + cell.box.right) / 2
        assert any(abs((t.box.left + t.box.right) / 2 - middle) < 1 for t in heads)

    accesses = picture.with_data("access-row", "bank", "wavefront")
    assert sorted(a.data["access-row"] for a in accesses) == [str(row) for row in range(8)]
    followed = {c.data["chunk"] for c in cells if "fill-orange-tint" in c.classes}
    assert len(followed) == 1
    chunk = int(followed.pop())
    bank_of = {c.data["row"]: c.data["bank"] for c in cells if c.data["chunk"] == str(chunk)}
    assert {a.data["access-row"]: a.data["bank"] for a in accesses} == bank_of
    shown = max(int(a.data["wavefront"]) for a in accesses)
    addresses = [row * ROW_BYTES + place(row, chunk) * 16 for row in range(8)]
    assert shown == counted_wavefronts(addresses) == expected


@pytest.mark.parametrize(("name", "version"), [("bank_conflicts", 1), ("swizzle", 2)])
def test_wavefronts_are_those_of_the_kernel_in_the_simulator(name: str, version: int) -> None:
    """One block of keys: the loads of K and V by 4 warps, and of Q before them."""
    loads = by_operation(step_config(version), 64)["ldmatrix"]
    each = loads.shared_wavefronts / (4 * loads.instructions)
    total = 64 * 4 * each
    assert f"64 · 4 · {each:.0f} = {total:.0f} wavefronts" in drawn(name).words


def test_the_o_tile_is_stored_where_the_kernel_stores_it() -> None:
    picture = drawn("output_swizzle")
    cells = picture.with_data("g", "place", "stores")
    stores = {int(c.data["g"]): int(c.data["place"]) for c in cells if c.data["stores"] == "1"}
    (tile,) = {place ^ g for g, place in stores.items()}
    assert f"Tile n = {tile}," in picture.words
    # 32 lanes, 4 bytes each: no bank twice
    words = [(g * ROW_BYTES + place * 16) // 4 + t for g, place in stores.items() for t in range(4)]
    assert len({word % 32 for word in words}) == 32
    for cell in cells:
        g = int(cell.data["g"])
        wanted = f"{4 * g}–{4 * g + 3}" if cell.data["stores"] == "1" else ""  # noqa: RUF001
        assert picture.label(cell) == wanted
    g, t = 3, 1  # lane 13
    for text in (t for t in picture.texts if "address" in t.data):
        n, address = int(text.data["n"]), int(text.data["address"])
        assert address == g * ROW_BYTES + (n ^ g) * 16 + t * 4
        row = sorted(
            (r for r in picture.rects if abs(r.box.top - text.box.top) < 12 and not r.data),
            key=lambda r: r.box.left,
        )
        assert "".join(picture.label(r) for r in row) == f"{address:010b}"


def test_constants_reach_every_chunk_that_the_swizzle_names() -> None:
    picture = drawn("swizzle_constants")
    cells = picture.with_data("lane", "k", "offset")
    assert [c.data["k"] for c in cells] == [str(k) for k in range(8)]
    lane = int(cells[0].data["lane"])
    row, half = lane % 16, lane // 16
    for cell in cells:
        k = int(cell.data["k"])
        chunk = (2 * k + half) ^ row % 8
        assert int(cell.data["offset"]) == row * ROW_BYTES + chunk * 16
        label = picture.label(cell)
        assert sum(map(int, label.split(" + "))) == int(cell.data["offset"])


# -- right: registers ----------------------------------------------------------------------------


def pairs(n: int) -> list[np.ndarray]:
    """Registers of two fp16 numbers that say lane and register: 8 · lane + register."""
    number = [(8 * np.arange(32) + i).astype(np.float16) for i in range(n)]
    return [np.stack([x, x], axis=1).reshape(-1).view(np.uint32) for x in number]


def test_fragments_are_those_of_the_simulators_mma() -> None:
    """Every element is numbered by lane, register and half, and mma's matrices are looked up."""
    lanes = np.arange(32)
    a = matrix_of_a(pairs(4), "f16")[0]
    b = matrix_of_b(pairs(2), "f16")[0].T  # (16, 8)
    c = matrix_of_c([(8 * lanes + i).astype(np.float32) for i in range(4)], "f32")[0]
    picture = drawn("mma_fragments")
    for operand, matrix, across, down in (("A", a, 2, 1), ("B", b, 1, 2), ("C", c, 2, 1)):
        cells = [x for x in picture.with_data("operand") if x.data["operand"] == operand]
        assert len(cells) == matrix.size // 2
        seen = np.zeros_like(matrix)
        for cell in cells:
            row, column, lane, register = (
                int(cell.data[k]) for k in ("row", "column", "lane", "register")
            )
            part = matrix[row : row + down, column : column + across]
            assert {int(x) // 8 for x in part.flat} == {lane}
            assert int(part.flat[0]) % 8 == register
            assert picture.label(cell) == str(lane)
            seen[row : row + down, column : column + across] += 1
        assert (seen == 1).all()
        # where a cell stands is where its elements are
        tops, lefts = ({x.box.top for x in cells}, {x.box.left for x in cells})
        for cell in cells:
            assert sorted(tops).index(cell.box.top) == int(cell.data["row"]) // down
            assert sorted(lefts).index(cell.box.left) == int(cell.data["column"]) // across


LDMATRIX = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{
.shared .align 128 .b8 tile[512];
.reg .b32 %r<20>;
.reg .b64 %rd<4>;
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mov.u32 %r3, tile;
add.s32 %r4, %r3, %r2;
shl.b32 %r5, %r1, 2;
add.s32 %r6, %r5, 1;
add.s32 %r7, %r5, 2;
add.s32 %r8, %r5, 3;
st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};
bar.sync 0;
and.b32 %r9, %r1, 15;
shl.b32 %r9, %r9, 5;
shr.u32 %r10, %r1, 4;
shl.b32 %r10, %r10, 4;
add.s32 %r11, %r9, %r10;
add.s32 %r11, %r11, %r3;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r12, %r13, %r14, %r15}, [%r11];
ld.param.u64 %rd1, [out];
mul.wide.u32 %rd2, %r1, 16;
add.s64 %rd3, %rd1, %rd2;
st.global.v4.b32 [%rd3], {%r12, %r13, %r14, %r15};
ret;
}
"""


def test_ldmatrix_is_that_of_the_simulator() -> None:
    """A 16 x 16 piece whose words are numbered, loaded in A's order: (row, chunk, word) by lane and
    register."""
    memory = DeviceMemory()
    out = memory.upload(np.zeros(128, np.uint32))
    kernel = load_ptx(LDMATRIX).kernel("k")
    kernel.launch(grid=(1, 1, 1), block=32, shared_bytes=0, args=[out], memory=memory)
    received = memory.download(out, 128, np.uint32).reshape(32, 4)
    picture = drawn("ldmatrix")
    named = {
        int(x.data["names"]): (int(x.data["row"]), int(x.data["chunk"]), int(x.data["matrix"]))
        for x in picture.with_data("names")
    }
    assert sorted(named) == list(range(32))
    cells = picture.with_data("receives", "register", "word", "named-by")
    assert len(cells) == 128
    for cell in cells:
        lane, register, word, by = (
            int(cell.data[k]) for k in ("receives", "register", "word", "named-by")
        )
        row, chunk, matrix = named[by]
        assert matrix == register
        assert received[lane, register] == row * 8 + chunk * 4 + word
        assert picture.label(cell) == str(lane)


def test_the_new_order_of_k_makes_pairs_of_neighbours() -> None:
    """An mma of 8 keys reads both halves of the depth."""
    cells = drawn("fragment_order").with_data("order", "half", "chunk", "register")
    pairs = defaultdict(list)
    for cell in cells:
        pairs[int(cell.data["order"]), int(cell.data["half"])].append(int(cell.data["register"]))
    # v1: K_rmem[n % 2], K_rmem[n % 2 + 2]; v9: K_rmem[n % 2 * 2], K_rmem[n % 2 * 2 + 1]
    assert {key: sorted(found) for key, found in pairs.items()} == {
        (0, 0): [0, 2],
        (0, 1): [1, 3],
        (1, 0): [0, 1],
        (1, 1): [2, 3],
    }


def test_registers_hold_the_elements_of_the_tiles() -> None:
    """16 rows a warp, 32 lanes; fp32 one element a register, 16-bit types two."""
    shown: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    picture = drawn("fragments_whole_vs_interleaved")
    for cell in picture.with_data("matrix", "registers"):
        key = cell.data["step"], cell.data["product"]
        shown[key][cell.data["matrix"]] = int(cell.data["registers"])
    O, S, P = 16 * 128 // 32, 16 * 64 // 32, 16 * 64 // 2 // 32  # noqa: E741
    tile, Q = 64 * 128 // 2 // 32, 16 * 128 // 2 // 32
    assert shown == {
        ("3", "S"): {"O": O, "S": S, "K": tile, "Q": Q},
        ("3", "O"): {"O": O, "P": P, "V": tile, "Q": Q},
        ("4", "S"): {"O": O, "S": S, "K": tile // 8, "Q": Q // 8},
        ("4", "O"): {"O": O, "P": P, "V": tile // 4},
    }
    # lengths of bars tell the numbers
    for cell in picture.with_data("matrix", "registers"):
        width = cell.box.right - cell.box.left
        assert width / int(cell.data["registers"]) == pytest.approx(
            (picture.with_data("matrix")[0].box.right - picture.with_data("matrix")[0].box.left)
            / O,
            rel=0.02,
        )


# -- right: counted work -------------------------------------------------------------------------


@cache
def by_operation(config: FlashForwardKernelConfig, seq_len: int) -> dict[str, Counts]:
    """What a launch for one head executes in the simulator, by opcode without modifiers."""
    inputs = make_inputs("normal", AttentionForward(1, 1, seq_len), torch.bfloat16)
    _, run = flash_attention.simulate(config, *inputs)
    found: dict[str, Counts] = defaultdict(Counts)
    for opcode, counts in run.counters.by_opcode().items():
        parts = opcode.split(".")
        # integers are told apart from the softmax's arithmetic
        name = f"{parts[0]}.f32" if parts[-1] == "f32" and parts[0] != "mma" else parts[0]
        found[name].add(counts)
    return found


def for_a_block_of_keys(config: FlashForwardKernelConfig, name: str) -> float:
    """Instructions of one warp for one more block of keys: from two sequence lengths."""
    lengths = (128, 256)
    each = []
    for seq_len in lengths:
        warps = seq_len // config.B_r * config.n_warps
        each.append(by_operation(config, seq_len)[name].instructions / warps)
    return (each[1] - each[0]) / ((lengths[1] - lengths[0]) // config.B_c)


@pytest.mark.parametrize(
    "config", [step_config(3), step_config(6), step_config(16), large_tile(16)]
)
def test_work_is_what_the_simulator_counts(config: FlashForwardKernelConfig) -> None:
    work = work_of(config)
    assert for_a_block_of_keys(config, "mma") == work.mma
    assert for_a_block_of_keys(config, "ldmatrix") == work.ldmatrix
    assert for_a_block_of_keys(config, "ex2.f32") == work.ex2
    copies = for_a_block_of_keys(config, "cp") - 2 - 2  # two commits, two waits
    assert copies * 32 * 16 == work.copied_bytes


@pytest.mark.parametrize("config", [step_config(16), large_tile(16)])
def test_the_issue_bar_is_a_bound_and_not_far_from_the_machine_code(
    config: FlashForwardKernelConfig,
) -> None:
    """benchmarks/resources.json: instructions of the main loop, as ptxas made it for sm_90."""
    work = work_of(config)
    figures = load_baseline(ROOT / "benchmarks/resources.json").figures.values()
    loops = [of[config.short_form(), "sm_90"].loop_instructions for of in figures]
    assert loops
    for instructions in loops:
        assert 0.75 * instructions / 4 < work.issue_cycles <= instructions / 4


def test_the_roofline_shows_the_same_work_for_both_shapes() -> None:
    bars = drawn("roofline").with_data("part", "rows", "cycles")
    shown = {(b.data["rows"], b.data["part"]): float(b.data["cycles"]) for b in bars}
    mma = 32 * 64 * 128 * 2 / (16 * 8 * 16)  # S and O, 32 rows, 64 keys
    tile_loads = 2 * 64 * 128 * 2 / 512  # K and V, once a warp
    assert shown["16", "tensor cores"] == shown["32", "tensor cores"] == mma * 1.5
    copies = 2 * 64 * 128 * 2 / 128 / 4  # a quarter of the tiles' wavefronts
    assert shown["16", "shared memory"] == 2 * (4 * (tile_loads + 8) + copies)
    assert shown["32", "shared memory"] == 4 * (tile_loads + 16) + copies
    assert shown["16", "exponentials"] == shown["32", "exponentials"] == 2 * (64 + 4)
    widths = {b.data["cycles"]: b.box.right - b.box.left for b in bars}
    for cycles, width in widths.items():
        assert width / float(cycles) == pytest.approx(widths["704.0"] / 704, rel=0.01)
    strong = {(b.data["rows"], b.data["part"]) for b in bars if b.strong}
    most = {
        rows: max(cycles for key, cycles in shown.items() if key[0] == rows)
        for rows in ("16", "32")
    }
    assert strong == {key for key, cycles in shown.items() if cycles == most[key[0]]}
    # of 32 rows both, as the picture's description says
    assert strong == {("16", "shared memory"), ("32", "shared memory"), ("32", "tensor cores")}


def test_tile_shapes_count_loads_and_mma() -> None:
    bars = drawn("tile_shapes").with_data("rows", "ldmatrix", "mma", "cycles")
    assert [b.data["rows"] for b in bars] == ["16", "32", "64"]
    for bar in bars:
        rows = int(bar.data["rows"])
        loads = (2 * 64 + rows) * 128 * 2 / 512  # K, V and the warp's rows of Q
        mma = 2 * rows * 64 * 128 / (16 * 8 * 16)
        assert (int(bar.data["ldmatrix"]), int(bar.data["mma"])) == (loads, mma)
        assert drawn("tile_shapes").label(bar) == f"{512 * loads / mma:.0f} bytes"
        assert float(bar.data["cycles"]) == 4 * loads / mma
    possible = [not b.dashed for b in bars]
    assert possible == [rows * 128 // 32 < 255 for rows in (16, 32, 64)]


@pytest.mark.parametrize(
    "name", ["timeline_copies", "two_buffers", "double_buffer", "fragment_ring"]
)
def test_times_are_drawn_to_one_scale(name: str) -> None:
    bars = drawn(name).with_data("lane", "start", "end")
    assert len(bars) > 8
    first = min(b.box.left for b in bars)
    scales = [
        (b.box.left - first) / int(b.data["start"]) for b in bars if int(b.data["start"]) > 20
    ]
    assert max(scales) / min(scales) < 1.03
    for bar in bars:
        # a bar may be cut where the picture ends
        width = (int(bar.data["end"]) - int(bar.data["start"])) * scales[0]
        assert bar.box.right - bar.box.left <= width + 2
        assert bar.box.right - bar.box.left >= width - 2 or bar.box.right == pytest.approx(470)


def bars_of(name: str, lane: str) -> list[tuple[str, int, int]]:
    """What a lane of a timeline shows: label, start and end, panel by panel."""
    found = [b for b in drawn(name).with_data("lane") if b.data["lane"] == lane]
    return [(b.data["what"], int(b.data["start"]), int(b.data["end"])) for b in found]


def test_copies_are_awaited_in_step_2_and_hidden_in_step_3() -> None:
    """32 ldmatrix of 4 wavefronts and 64 mma of 1.5 cycles a product, 34 ex2 of 2 a softmax, of 4
    warps; 128 wavefronts of 128 bytes for a tile's copy."""
    S = O = 4 * max(32 * 4, 64 * 1.5)  # noqa: E741
    softmax, copy = 4 * 34 * 2, 64 * 256 / 128
    warps = bars_of("timeline_copies", "warps")
    step_3 = warps[next(i for i, w in enumerate(warps[1:], 1) if w[1] == 0) :]
    step_2 = warps[: len(warps) - len(step_3)]
    assert [w[0] for w in step_2[:4]] == ["wait", "S_0", "P_0", "O_0"]
    assert [end - start for _, start, end in step_3] == [S, softmax, O, S]
    assert step_3[-1][2] == S + softmax + O + S, "no wait between the blocks"
    # step 3: a tile's copy begins when the last read of its place ends, and lands before the next
    stores = {w: (start, end) for w, start, end in bars_of("timeline_copies", "copy of K")}
    trip = next(e - s for w, s, e in bars_of("timeline_copies", "copy of K") if w == "trip")
    assert stores["K_1"][0] - trip == S and stores["K_1"][1] - stores["K_1"][0] == copy
    assert stores["K_1"][1] <= S + softmax + O
    assert f"= {softmax + O:.0f}" in drawn("timeline_copies").words


def test_two_buffers_give_copies_the_time_of_a_block() -> None:
    """32 rows per warp: 48 ldmatrix or 128 mma for S, 32 or 128 for O, 68 ex2; 4 warps."""
    S, softmax = 4 * max(48 * 4, 128 * 1.5), 4 * 68 * 2
    O = 4 * max(32 * 4, 128 * 1.5)  # noqa: E741
    words = drawn("two_buffers").words
    assert f"= {softmax + O:.0f} cycles" in words and f"= {S + softmax + O:.0f}." in words
    one, two = overlap_step(2), overlap_step(3)
    assert (one.smem_bytes, two.smem_bytes) == (64 * 1024, 96 * 1024)
    for text in ("64 KiB", "96 KiB", "= 32 KiB"):
        assert text in words
    warps, blocks = 8, 4
    barriers = [by_operation(c, 256)["bar"].barriers / warps for c in (one, two)]
    assert barriers == [4 * blocks, blocks + 1], "with two buffers one stands before the loop"
    assert "4 barriers per block of keys" in words and "1 barrier per block of keys" in words


def test_constants_of_the_overlap_family_are_those_of_its_kernels() -> None:
    sources = {n: (ROOT / f"kernels/overlap/o{n}.cuh").read_text() for n in (2, 4)}
    assert f"constexpr float kMaxGrowth = {MAX_GROWTH};" in sources[2]
    assert f"constexpr int kAhead = {AHEAD};" in sources[4]
    assert "constexpr int kRing = kAhead + 1;" in sources[4] and RING == AHEAD + 1


def test_warps_with_more_rows_read_k_and_v_less_often() -> None:
    """Per 128 rows and 64 keys; the simulator counts Q's fragments, 8 per 16 rows, too."""
    warps = drawn("shared_memory_reads").with_data("rows", "warp", "loads", "mma")
    reads = {rows: [w for w in warps if w.data["rows"] == rows] for rows in ("16", "32")}
    assert {rows: len(found) for rows, found in reads.items()} == {"16": 8, "32": 4}
    for config, rows in ((step_config(16), "16"), (overlap_step(1), "32")):
        for name, key, Q in (("ldmatrix", "loads", 8 * config.row_tiles), ("mma", "mma", 0)):
            counted = for_a_block_of_keys(config, name) - Q
            assert {int(w.data[key]) for w in reads[rows]} == {counted}
    words = drawn("shared_memory_reads").words
    assert "4 · (80 · 4 + 64) = 1536 cycles" in words and "4 · 256 · 1.5 = 1536: even" in words


def test_a_lagging_maximum_changes_no_output() -> None:
    """A row with one key per block, V = 1, 2, …: with what o2 keeps as with the whole softmax."""
    steps = lazy_maxima(BLOCK_MAXIMA)
    l = O = 0.0  # noqa: E741
    before = -math.inf
    for value, (score, step) in enumerate(zip(BLOCK_MAXIMA, steps, strict=True), start=1):
        assert step.rescaled == (step.kept != before)
        assert step.maximum - step.kept <= MAX_GROWTH
        P, rescale = 2.0 ** (score - step.kept), 2.0 ** (before - step.kept)
        assert P <= 2**MAX_GROWTH
        l, O = l * rescale + P, O * rescale + P * value  # noqa: E741
        before = step.kept
    scores = np.exp2(np.array(BLOCK_MAXIMA, dtype=np.float64))
    assert O / l == pytest.approx(scores @ np.arange(1, 9) / scores.sum(), rel=1e-12)
    cells = drawn("lazy_rescale").with_data("step", "block", "rescale")
    shown = {
        step: [int(c.data["rescale"]) for c in cells if c.data["step"] == step]
        for step in ("o1", "o2")
    }
    assert shown == {"o1": [0] + [1] * 7, "o2": [int(step.rescaled) for step in steps]}
    assert "here 7 times in o1, 2 in o2" in drawn("lazy_rescale").words


def test_a_ring_holds_each_fragment_until_its_mma() -> None:
    """No slot holds two at a time, and of V two are asked for before the softmax."""
    bars = drawn("fragment_ring").with_data("lane")
    for slot in range(3):
        spans = sorted(
            (int(b.data["start"]), int(b.data["end"]))
            for b in bars
            if b.data["lane"] == f"slot {slot}"
        )
        assert len(spans) > 3
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), slot
    warps = bars_of("fragment_ring", "warp")
    product = [start for what, start, _ in warps if what.startswith("O")]
    softmax = next(start for what, start, _ in warps if what == "softmax")
    assert product[0] - product[1] == 8 * 4 + 30, "o3 waits for 8 ldmatrix and their latency"
    issued = {b.data["what"]: int(b.data["start"]) for b in bars if b.data["what"][:2] == "V_"}
    assert issued["V_0"] == softmax and issued["V_1"] == softmax + 4 < issued["V_2"]


def test_a_column_of_ones_sums_the_rows() -> None:
    picture = drawn("mma_row_sum")

    def matrix(operand: str, shape: tuple[int, ...]) -> np.ndarray:
        found = [c for c in picture.with_data("operand") if c.data["operand"] == operand]
        found.sort(key=lambda c: (c.box.top, c.box.left))
        return np.array([float(picture.label(c)) for c in found]).reshape(shape)

    P, V = matrix("P", (3, 4)), matrix("V", (4, 2))
    assert (matrix("O", (3, 2)) == P @ V).all()
    assert (matrix("ones", (4,)) == 1).all() and (matrix("l", (3,)) == P.sum(axis=1)).all()
    more = [for_a_block_of_keys(overlap_step(n), "mma") for n in (4, 5)]
    assert more == [256, 256 + 8] and "= 8 mma" in picture.words


def test_a_fragment_is_loaded_one_k_tile_ahead() -> None:
    """S of 16 rows and 64 keys: 8 k-tiles of 4 ldmatrix for K and one for Q, and of 8 mma."""
    work = work_of(step_config(5))
    assert ((work.ldmatrix_tile + work.ldmatrix_Q) / 8, work.mma_per_product / 8) == (5, 8)
    loads, mma = bars_of("double_buffer", "ldmatrix"), bars_of("double_buffer", "mma")
    assert len(mma) == 6
    for k, (_, start, end) in enumerate(mma[3:]):  # step 5
        assert end - start == 8 * 6
        own = [w for w in loads if w[0] == str(k)][1]
        assert own[2] <= start, "loaded before it is used"
        if k:
            assert own[1] == mma[3 + k - 1][1], "issued before the mma of the k-tile before it"
    assert "8 · 6 = 48 cycles" in drawn("double_buffer").words


def test_the_first_block_alone_is_not_rescaled() -> None:
    cells = drawn("peeled_loop").with_data("step", "block", "rescale")
    rescaled = {(c.data["step"], int(c.data["block"])): c.data["rescale"] for c in cells}
    assert len(rescaled) == 2 * 384 // 64
    assert [key for key, done in rescaled.items() if done == "0"] == [("10", 0)]
    # what it saves, in the simulator: 64 + 2 multiplications and 2 ex2 of a warp
    saved = {
        name: by_operation(step_config(9), 64)[name].instructions
        - by_operation(step_config(10), 64)[name].instructions
        for name in ("ex2.f32", "mul.f32")
    }
    assert saved["ex2.f32"] / 4 == 2
    assert saved["mul.f32"] / 4 >= 64 and "64 FMUL for O and 2 ex2" in drawn("peeled_loop").words


# -- right: the algorithm, and addresses ---------------------------------------------------------


def test_the_tiles_are_those_of_the_config() -> None:
    picture = drawn("attention_tiles")
    config = step_config(1)
    tiles = Counter(t.data["tile"] for t in picture.with_data("tile"))
    assert set(tiles) == set("QKVO") and len(set(tiles.values())) == 1
    assert f"{3 * 64 * 128 * 2 // 1024} KiB" == f"{config.smem_bytes // 1024} KiB"
    assert f"{config.smem_bytes // 1024} KiB" in picture.words
    # K and V once through, for a thread block
    assert f"= {2 * 4096 * 256 // 2**20} MiB" in picture.words


def test_both_ways_through_the_softmax_give_one_value() -> None:
    picture = drawn("ffma_fold")
    ends = [c.data for c in picture.with_data("instruction") if c.data["instruction"] == "MUFU.EX2"]
    assert [end["step"] for end in ends] == ["5", "6"]
    S, m = (float(x) for x in re.search(r"S = (\d+), and (\d+) is", picture.words).groups())
    for end in ends:
        assert float(end["value"]) == pytest.approx(math.exp((S - m) / math.sqrt(128)), abs=6e-4)
    # the multiplications and additions that are saved: 96 to 32 for a warp and block of keys
    assert for_a_block_of_keys(step_config(6), "fma.f32") == 32 + 2  # two for the rescale
    counted = [
        sum(for_a_block_of_keys(step_config(v), f"{op}.f32") for op in ("mul", "add", "fma", "sub"))
        for v in (5, 6)
    ]
    assert 3 * 32 - 32 - 2 <= counted[0] - counted[1] <= 3 * 32 - 32


@pytest.mark.parametrize("version", [12, 14, 15, 16])
def test_the_threads_copy_a_tile_once(version: int) -> None:
    copies = Counter(
        (row, column) for thread in range(128) for row, column in copy_rows(version, thread)
    )
    assert copies == Counter(itertools.product(range(64), range(0, 128, 8)))


def test_copies_are_drawn_where_the_threads_copy() -> None:
    for name, steps in (("block_index", (11, 12)), ("pieces", (14, 15)), ("row_stride", (15, 16))):
        for step in steps:
            cells = [c for c in drawn(name).with_data("step", "row") if c.data["step"] == str(step)]
            rows = sorted({int(c.data["row"]) for c in cells})
            assert rows == list(range(0, 64, 8 if step < 15 else 16)), (name, step)
    pieces = drawn("pieces").with_data("step", "row", "column")
    old, new = (
        {(int(c.data["row"]), int(c.data["column"])) for c in pieces if c.data["step"] == s}
        for s in ("14", "15")
    )
    assert old == {(row, 0) for row in range(0, 64, 8)}
    assert new == {(row, column) for row in range(0, 64, 16) for column in (0, 64)}


def test_the_row_stride_is_in_the_kernels_ptx(package: Path) -> None:
    offsets = {
        int(c.data["offset"])
        for c in drawn("row_stride").with_data("step", "offset")
        if c.data["step"] == "16"
    }
    assert offsets == {row * 16 * 128 * 2 for row in (0, 16, 32, 48)}
    found = {}
    for version in (15, 16):
        ptx = (package / "ptx" / f"{step_config(version).short_form()}.ptx").read_text()
        found[version] = set(map(int, re.findall(r"add\.s64 \t?%rd\d+, %rd\d+, (\d+);", ptx)))
    assert offsets - {0} <= found[16]
    assert not (offsets - {0}) & found[15]
    labels = [drawn("row_stride").label(c) for c in drawn("row_stride").with_data("offset")]
    assert "first + 0x10000" in labels


def test_rows_are_counted_down() -> None:
    cells = drawn("backwards").with_data("step", "value")
    forwards, down = (
        [int(c.data["value"]) for c in cells if c.data["step"] == s] for s in ("12", "13")
    )
    assert forwards == list(range(8))
    assert sorted(down, reverse=True) == list(range(512 - 64, -1, -64))


def test_what_is_in_flight_fits_l2() -> None:
    """396 thread blocks at a time: 7 heads of 64, or 2 of 256; 1 MiB per tensor at 4096."""
    kernel = (ROOT / "previous_kernels/v14/forward_kernel.cuh").read_text()
    assert "cfg.B_r / cfg.n_warps == kMmaM && cfg.B_c <= 64 ? 12 : 8" in kernel, "warps per SM"
    picture = drawn("cache_policy")
    cells = picture.with_data("seq-len", "tensor", "head", "mib")
    held = {
        (int(seq_len), tensor): [int(c.data["mib"]) for c in group]
        for (seq_len, tensor), group in itertools.groupby(
            cells, key=lambda c: (c.data["seq-len"], c.data["tensor"])
        )
    }
    assert held == {
        (4096, "K, V"): [2] * 7,
        (4096, "O"): [1] * 7,
        (16384, "K, V"): [8] * 2,
        (16384, "O"): [4] * 2,
    }
    scales = {(c.box.right - c.box.left) / int(c.data["mib"]) for c in cells}
    assert max(scales) - min(scales) < 0.05
    assert 460 / max(scales) == pytest.approx(50e6 / 2**20, rel=0.01), "the bar is L2"


def test_the_sm_is_that_of_the_tables() -> None:
    words = drawn("sm").words
    assert words.count(f"registers {64 * 1024 // 4:,}") == 4
    assert words.count("mma: 6 cycles") == 4  # 4 · 1.5
    assert words.count("ex2: 8 cycles") == 4  # 32 lanes, 16 results a clock and SM: 4 · 2
    assert "32 banks · 4 bytes = 128 bytes per cycle" in words and "227 KiB" in words
    assert "4 · 4 / 6 = 2.67 mma" in words


# -- Hopper --------------------------------------------------------------------------------------


def test_a_tile_of_tma_lies_as_the_simulator_has_it() -> None:
    cells = drawn("tma_tile").with_data("row", "chunk", "place", "k")
    assert len(cells) == 8 * 8
    for cell in cells:
        row, chunk, place, k = (int(cell.data[n]) for n in ("row", "chunk", "place", "k"))
        straight = np.array([1024 + row * 128 + chunk * 16])
        assert swizzled(straight, 128)[0] == 1024 + row * 128 + place * 16
        assert k == chunk // 2
    # of K, (128 keys, 128 columns): what `column_step` of the kernels adds, in bytes
    offsets = [int(c.data["offset"]) for c in drawn("tma_tile").with_data("step", "offset")]
    assert offsets == [k // 4 * 128 * 128 + k % 4 * 32 for k in range(8)]


def test_accumulators_of_a_warpgroup_are_where_operand_a_wants_them() -> None:
    cells = drawn("wgmma_fragments").with_data("operand", "lane", "register", "row", "column")
    S = as_matrix(np.arange(8 * 128).reshape(8, 128, 1))[0]  # register and lane of each element
    P = matrix_of_a(pairs(4), "f16")[0]
    places: dict[str, dict[tuple[int, int], tuple[int, int]]] = {"S": {}, "P": {}}
    for cell in cells:
        lane, n, row, column = (int(cell.data[k]) for k in ("lane", "register", "row", "column"))
        places[cell.data["operand"]][row, column] = lane, n
        if cell.data["operand"] == "S":
            assert divmod(int(S[row, column]), 128) == (2 * n, lane)
        else:
            assert P[row, column] == 8 * lane + n
    assert places["S"] == places["P"] and len(places["S"]) == 16 * 8


def test_the_phases_of_a_ring_alternate_and_end_when_the_slot_is_full_or_empty() -> None:
    picture = drawn("barrier_ring")
    for slot in ("0", "1"):
        for barrier, ended_by in (("full", "copied"), ("empty", "read")):
            phases = [
                r
                for r in picture.with_data("barrier", "slot", "phase", "parity")
                if (r.data["barrier"], r.data["slot"]) == (barrier, slot)
            ]
            assert [int(r.data["parity"]) for r in phases] == [n % 2 for n in range(len(phases))]
            ends = [
                r.box.right
                for r in picture.with_data("slot", "block", "what")
                if (r.data["what"], r.data["slot"]) == (ended_by, slot)
            ]
            for phase, end in zip(phases[:-1], ends, strict=False):
                assert phase.box.right == pytest.approx(end, abs=0.5)


def assert_turns_are_those_of_a_mask(name: str, rows: int, B_c: int, mask: np.ndarray) -> None:
    """A picture's rows have so many queries each. mask: (queries, keys), what sees what."""
    for cell in drawn(name).with_data("query", "block"):
        query, block = int(cell.data["query"]), int(cell.data["block"])
        own = mask[query : query + rows]
        part = own[:, block * B_c : (block + 1) * B_c]
        seen = "all" if part.all() else "part" if part.any() else "none"
        assert cell.data["seen"] == seen
        last = np.flatnonzero(own[-1])[-1] // B_c
        if cell.data.get("turn") not in (None, "passed"):
            assert int(cell.data["turn"]) == last - block
            assert seen == "all" or int(cell.data["turn"]) < 2
        else:
            assert seen == "none"


def test_a_diagonal_lies_in_the_first_two_blocks_of_a_tile() -> None:
    """512 queries, 560 keys: query i sees key j if j <= i + 48."""
    mask = np.arange(5 * 128) <= np.minimum(np.arange(512)[:, None] + 48, 559)
    assert_turns_are_those_of_a_mask("causal_blocks", 128, 128, mask)
    picture = drawn("causal_blocks")
    assert len(picture.with_data("query", "block")) == 4 * 5
    taken = len(picture.with_data("turn"))
    assert f"= {taken} blocks of 20 are taken" in picture.words


def test_a_warpgroup_leaves_out_what_only_later_rows_of_its_tile_see() -> None:
    """384 queries and keys, tiles of 192, warpgroups of 64, blocks of 80."""
    mask = np.arange(5 * 80) <= np.arange(384)[:, None]
    assert_turns_are_those_of_a_mask("own_keys", 64, 80, mask)
    picture = drawn("own_keys")
    cells = picture.with_data("query", "block")
    assert len(cells) == 6 * 5
    for cell in cells:
        query, block = int(cell.data["query"]), int(cell.data["block"])
        of_tile = mask[query // 192 * 192 :][:192, block * 80 : (block + 1) * 80]
        own = mask[query : query + 64, block * 80 : (block + 1) * 80]
        assert (cell.data.get("turn") == "passed") == (of_tile.any() and not own.any())
        assert ("turn" in cell.data) == of_tile.any()
    turns = Counter(cell.data.get("turn") == "passed" for cell in picture.with_data("turn"))
    assert f"= {turns[False]} blocks are computed" in picture.words
    assert f"= {turns.total()}." in picture.words


def test_causal_tiles_that_begin_together_load_different_blocks() -> None:
    """Four tiles of 128 queries, as many blocks of keys."""
    cells = drawn("shared_loads").with_data("tile", "turn", "block", "together", "causal")
    assert len(cells) == 4 * 4 + (4 + 3 + 2 + 1) + 2 * (4 + 2)
    loaded: dict[tuple[str, str, str], list[int]] = {}
    for cell in cells:
        data = cell.data
        key = data["causal"], data["together"], data["turn"]
        loaded.setdefault(key, []).append(int(data["block"]))
        tile, block = int(data["tile"]), int(data["block"])
        first = 3 if data["causal"] == "False" else tile // int(data["together"])
        last = first if data["together"] == "1" else 2 * first + 1
        assert block == last - int(data["turn"])
    for (causal, together, _), blocks in loaded.items():
        most = max(Counter(blocks).values())
        assert most == (4 if causal == "False" else int(together))
    words = drawn("shared_loads").words
    for sum_of_tiles in ("4 + 4 + 4 + 4 = 16 loads", "= 10 of which none can", "2 + 4 = 6 that"):
        assert sum_of_tiles in words


def test_two_heads_of_a_cluster_see_the_same_blocks() -> None:
    """Of two heads, three tiles of 128 queries and as many blocks of keys."""
    picture = drawn("head_pairs")
    cells = picture.with_data("lane", "turn", "head", "tile", "block", "step")
    used: dict[str, list[tuple[str, str, str]]] = {"25": [], "26": []}
    turns: dict[str, set[int]] = {"25": set(), "26": set()}
    for cell in cells:
        data = cell.data
        turns[data["step"]].add(int(data["turn"]))
        if int(data["block"]) <= int(data["tile"]) < 3:
            used[data["step"]].append((data["head"], data["tile"], data["block"]))
    every = sorted((str(h), str(t), str(b)) for h in (0, 1) for t in range(3) for b in range(t + 1))
    assert sorted(used["25"]) == sorted(used["26"]) == every
    assert len([c for c in cells if c.data["step"] == "26"]) == len(every)
    assert turns == {"25": {*range(10)}, "26": {*range(6)}}
    assert "3 + 3 + 2 + 2 = 10 turns in h25, 3 + 2 + 1 = 6 in h26" in picture.words


def test_a_warpgroup_multiplies_with_the_half_of_its_first_block_that_it_sees() -> None:
    """512 queries and keys, tiles of 128 and blocks of 128, warpgroups and halves of 64."""
    picture = drawn("half_blocks")
    cells = picture.with_data("query", "key", "by", "seen")
    assert len(cells) == 8 * 8
    mask = np.arange(512) <= np.arange(512)[:, None]
    for cell in cells:
        query, key = int(cell.data["query"]), int(cell.data["key"])
        part = mask[query : query + 64, key : key + 64]
        assert cell.data["seen"] == ("all" if part.all() else "part" if part.any() else "none")
        of_tile = mask[query // 128 * 128 :][:128, key // 128 * 128 :][:, :128].any()
        assert cell.data["by"] == ("both" if part.any() else "h26" if of_tile else "none")
    halves = Counter(cell.data["by"] for cell in cells)
    assert f"= {halves['both']} halves are multiplied" in picture.words
    assert f"= {halves['both'] + halves['h26']}." in picture.words


def test_a_slot_of_q_goes_back_when_it_does_in_the_kernels() -> None:
    """Of tiles A, B and C: behind the softmax of h27, before that of h28, and in both when O was
    read."""
    lanes = {name: bars_of("early_slot", name) for name in ("products", "softmax", "store")}
    slots = [bars_of("early_slot", f"slot {n}") for n in (0, 1)]
    begins = []
    for panel, step in enumerate((27, 28)):

        def span(bars: list[tuple[str, int, int]], what: str, n: int = panel) -> tuple[int, int]:
            return [(start, end) for name, start, end in bars if name == what][n]

        last_O, store = span(lanes["products"], "O of A"), span(lanes["store"], "store")
        S_1, O_0 = (span(lanes["products"], f"{name} of B") for name in ("S_1", "O_0"))
        P_1 = span(lanes["softmax"], "P_1 of B")
        O_there, load, Q_there = (span(slots[0], what) for what in ("O of A", "load", "Q of C"))
        assert last_O[1] <= store[0] == O_there[0] < store[1] < O_there[1] <= load[0]
        assert load[1] == Q_there[0] and load[1] - load[0] == 768 / 2
        assert span(slots[1], "Q of B")[1] == S_1[1]
        source = (ROOT / f"kernels/hopper/h{step}.cuh").read_text()
        block = source.split("auto next_block = ")[1].split("auto begin")[0]
        early = block.index("release_stored();") < block.index("softmax")
        assert load[0] == (S_1[1] if early else max(P_1[1], O_0[1])) and early == (step == 28)
        begins.append(span(lanes["products"], "S_0 of C")[0])
        assert begins[-1] == max(load[1], P_1[1], O_0[1])
    waits = [bar for bar in lanes["products"] if bar[0] == "wait"]
    assert waits == [("wait", begins[1], begins[0])], "the warpgroup of h28 does not wait"
    words = drawn("early_slot").words
    assert f"waits {begins[0] - begins[1]} in h27 and 0 in h28" in words
    assert "by 2080 \N{MINUS SIGN} 1552 = 528 cycles" in words and "512 + 528 = 1040 more" in words


def test_a_cluster_waits_for_a_fence_where_its_kernel_does() -> None:
    """At the beginning and at the end; Q is asked for as much earlier as the fence takes."""
    panels = [bars_of("no_fence", lane) for lane in ("threads", "warps")]
    for first, (begin, *rest) in zip(("meet", "O"), panels, strict=True):
        assert begin[0] == first and [bar[0] for bar in rest] == ["fence", first]
    for step, fences in ((28, 2), (29, 0)):
        source = (ROOT / f"kernels/hopper/h{step}.cuh").read_text()
        assert source.count("cluster_sync();") == fences
    places = [bar for bar in bars_of("no_fence", "producer") if bar[0] == "where the tile is"]
    (_, fence_begin, fence_end) = panels[0][1]
    assert [places[0][n] - places[1][n] for n in (1, 2)] == [fence_end - fence_begin] * 2
    assert "340 + 1220 = 1560, and not at 2500" in drawn("no_fence").words


def test_the_first_cycles_of_a_cluster_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/first_cycles_h100.json").read_text())
    fenced, relaxed = (
        {what: median(calls) for what, calls in kernel["cycles"].items()}
        for kernel in measured["kernels"][:2]
    )
    (_, _, meets), (_, fence_begin, fence_end) = bars_of("no_fence", "threads")[:2]
    assert meets == round(relaxed["met"], -1)
    assert fence_end - fence_begin == round(fenced["met"] - relaxed["met"], -1)
    places = [bar for bar in bars_of("no_fence", "producer") if bar[0] == "where the tile is"]
    for cycles, (_, begin, end) in zip((fenced, relaxed), places, strict=True):
        assert end - begin == round(cycles["asks for Q"] - cycles["met"], -1)


def test_tiles_that_are_taken_late_end_together() -> None:
    """Four heads of three pairs of tiles with 2, 4 and 6 blocks of keys, longest first. In h29 a
    cluster's tile is chosen when the one before begins, in h30 when it ends."""
    lengths = [6] * 4 + [4] * 4 + [2] * 4
    cells = drawn("late_take").with_data("lane", "tile", "begin", "late")
    for late, ends in ((False, [18, 16, 14]), (True, [16] * 3)):
        found = {
            int(cell.data["tile"]): (int(cell.data["lane"]), int(cell.data["begin"]))
            for cell in cells
            if cell.data["late"] == str(late)
        }
        assert sorted(found) == [*range(12)]
        by_lane = {lane: sorted(at for of, at in found.values() if of == lane) for lane in range(3)}
        chosen = []
        for tile in range(3, 12):
            lane, begin = found[tile]
            before = by_lane[lane][by_lane[lane].index(begin) - 1]
            chosen.append(begin if late else before)
        assert chosen == sorted(chosen)
        last = [
            max(at + lengths[n] for n, (of, at) in found.items() if of == lane) for lane in range(3)
        ]
        assert sorted(last, reverse=True) == ends
    for step, late in ((29, False), (30, True)):
        loop = (ROOT / f"kernels/hopper/h{step}.cuh").read_text().split("for (int tile = ")[1]
        assert (loop.index("take_tile") > loop.index("tma_load_slots")) is late
    assert "In h29 the busiest has 18, in h30 16." in drawn("late_take").words


def test_the_times_of_a_warpgroup_are_counted() -> None:
    """m64n128k16 takes 128 / 2 cycles of an SM; 64 · 128 exponentials and those of the rescale, two
    for each of 128 threads, 16 per cycle."""
    S, ex2 = 8 * 64, (64 * 128 + 2 * 128) / 16
    for name in ("two_slots", "ping_pong", "own_products", "flattened", "early_slot"):
        for bar in drawn(name).with_data("lane", "what", "start", "end"):
            length = int(bar.data["end"]) - int(bar.data["start"])
            if bar.data["what"][:1] == "P":
                assert length == ex2, (name, bar.data)
            if bar.data["what"][:1] in "SO" and not bar.data["lane"].startswith("slot"):
                assert length in (S, 2 * S), (name, bar.data)
    assert "= 1552 cycles in h6, and 512 + 528 = 1040 in h7" in drawn("own_products").words
