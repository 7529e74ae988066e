"""The staircases show what was measured, and light a step by its name."""

import io
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import open_browser
from drawn_figure import collisions
from fake_backend import load_tool
from PIL import Image

from flash_helpers.course.stairs import (
    CROWDED,
    LARGE,
    OWN,
    is_measured,
    stairs_figure,
    stairs_link,
    stairs_numbers,
    stairs_path,
    stairs_svg,
    tile_configs,
)
from flash_helpers.kernel_configs import FAMILIES, STEPS
from flash_helpers.measure.results import (
    CUDNN,
    FA3,
    RESULTS,
    BenchmarkResults,
    load_results,
    results_by_family,
)
from flash_helpers.registry.family import Family

TOOL = "tools/docs/draw_pictures.py"
ROOT = Path(__file__).resolve().parents[2]
BY_FAMILY = results_by_family(ROOT, load_results(ROOT / RESULTS))
MEASURED = [f for f in FAMILIES.values() if is_measured(stairs_numbers(f, BY_FAMILY[f.name]))]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
each_measured = pytest.mark.parametrize("family", MEASURED, ids=lambda family: family.name)


@pytest.fixture(scope="module")
def by_family() -> dict[str, BenchmarkResults]:
    return BY_FAMILY


@every_family
def test_a_staircase_has_the_measured_height_of_each_step(
    by_family: dict[str, BenchmarkResults], family: Family
) -> None:
    results = by_family[family.name]
    numbers = stairs_numbers(family, results)
    assert numbers["steps"] == [*family.steps]
    for tile, heights in numbers["heights"].items():
        for step, height in zip(family.steps.values(), heights, strict=True):
            config = tile_configs(step)[tile]
            share = config and results.of_first(config.short_form(), "bf16")
            assert height == (round(100 * share, 1) if share else None)


def test_tiles_are_those_that_the_steps_take(by_family: dict[str, BenchmarkResults]) -> None:
    tiles = {
        name: [*stairs_numbers(family, by_family[name])["heights"]]
        for name, family in FAMILIES.items()
        if name in ("ampere", "overlap", "hopper")
    }
    heights = stairs_numbers(FAMILIES["ampere"], by_family["ampere"])["heights"]
    assert heights["fixed"][0] and heights["large"][-1], "measured"
    assert tiles == {"ampere": ["fixed", "large"], "overlap": [LARGE], "hopper": [OWN]}


def test_the_faster_library_stands_beside_a_family_for_one_architecture(
    by_family: dict[str, BenchmarkResults],
) -> None:
    family, results = FAMILIES["hopper"], by_family["ampere"]
    assert [*stairs_numbers(family, results)["lines"]] == ["flash", "cuDNN"]
    fa3 = [replace(m, name=FA3) for m in results.measurements if m.name == CUDNN]
    faster = [replace(m, samples_ms=tuple(ms / 2 for ms in m.samples_ms)) for m in fa3]
    results = replace(results, measurements=(*results.measurements, *faster))
    assert [*stairs_numbers(family, results)["lines"]] == ["flash", "FA3"]


@each_measured
def test_every_step_has_a_place_to_light_and_a_label(root: Path, family: Family) -> None:
    tree = ElementTree.parse(root / stairs_path(family.name))
    ids = {element.get("id") for element in tree.iter()}
    assert {f"step-{step}" for step in family.steps} <= ids
    texts = {(element.text or "").strip() for element in tree.iter() if element.text}
    prefix = family.prefix if len(family.steps) > CROWDED else ""
    assert {step.removeprefix(prefix) for step in family.steps} <= texts


@each_measured
def test_no_text_is_crossed_by_a_line_or_meets_another(
    by_family: dict[str, BenchmarkResults], family: Family
) -> None:
    assert collisions(stairs_figure(stairs_numbers(family, by_family[family.name]))) == []


def test_a_browser_lights_the_step_that_a_link_names(root: Path, tmp_path: Path) -> None:
    step = STEPS["h12"]
    green = {}
    with open_browser(tmp_path / "profile") as browser:
        for link in (stairs_path(step.family), stairs_link(step)):
            page = tmp_path / "page.html"
            page.write_text(f"<body style='background:#fff'><img src='file://{root / link}'>")
            browser.get(page.as_uri())
            browser.execute_async_script(
                "const done = arguments[0]; document.images[0].decode().then(() => "
                "requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            shot = np.asarray(
                Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
            )
            red, green_, blue = (shot[..., n].astype(int) for n in range(3))
            green[link] = ((green_ > red + 30) & (green_ > blue + 20)).sum()
    unlit, lit = green.values()
    assert unlit == 0 and lit > 500


def test_the_committed_ones_are_current(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool(TOOL).main(["--root", str(root), "--check"]) == 0
    assert capsys.readouterr().out == "all is up to date\n"


def test_the_tool_draws_what_is_stale_and_nothing_else(root: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "benchmarks").symlink_to(root / "benchmarks")
    tool = load_tool(TOOL)
    arguments = ["--root", str(tmp_path)]
    assert tool.main([*arguments, "--check"]) == 1
    absent = capsys.readouterr().out
    assert absent.count("is absent or shows other numbers") == len(MEASURED) + 3
    for name in ("training_h200", "long_sequences_h200", "long_sequences_nccl_h200"):
        assert f"docs/images/{name}.svg is absent" in absent
    assert tool.main(arguments) == 0
    path = tmp_path / stairs_path("ampere")
    path.write_text(path.read_text().replace("16.4", "16.5"))
    capsys.readouterr()
    assert tool.main([*arguments, "--check"]) == 1
    assert tool.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{stairs_path('ampere')} written"
    assert tool.main([*arguments, "--check"]) == 0


def test_a_step_that_was_not_measured_has_no_height_and_a_family_of_such_no_picture(
    root: Path,
) -> None:
    numbers = {"steps": ["s1", "s2"], "heights": {OWN: [70.0, None]}, "lines": {"torch": 100.0}}
    svg = stairs_svg(numbers)
    assert 'id="step-s2"' in svg and "% of torch" in svg
    assert is_measured(numbers)
    assert not is_measured({**numbers, "heights": {OWN: [None, None]}})
    drawn = {path.stem for path in (root / stairs_path("ampere")).parent.glob("*.svg")}
    assert drawn == {family.name for family in MEASURED}


def test_the_same_numbers_give_the_same_file(by_family: dict[str, BenchmarkResults]) -> None:
    numbers = stairs_numbers(FAMILIES["ampere"], by_family["ampere"])
    assert stairs_svg(numbers) == stairs_svg(numbers)
