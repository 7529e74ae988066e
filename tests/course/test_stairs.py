"""The pictures of the staircases show what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn_picture import DrawnPicture

from flash_helpers.course.pictures.stairs import (
    stairs_path,
    stairs_picture,
    stale_stairs,
    tile_configs,
)
from flash_helpers.kernel_configs import FAMILIES, STEPS, DType
from flash_helpers.measure.results import (
    CUDNN,
    FA3,
    FLASH,
    RESULTS,
    BenchmarkResults,
    load_results,
    results_by_family,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results(root: Path) -> BenchmarkResults:
    return load_results(root / RESULTS)


@pytest.mark.parametrize("step", STEPS)
def test_the_lit_step_has_its_numbers(root: Path, step: str) -> None:
    results = results_by_family(root, load_results(root / RESULTS))[STEPS[step].family]
    tree = ElementTree.fromstring(stairs_picture(step, results).to_svg("name"))
    (lit,) = (e for e in tree.iter(f"{SVG}rect") if e.get("data-lit"))
    assert lit.get("data-lit") == step
    texts = {e.get("data-tile"): e.text or "" for e in tree.iter(f"{SVG}text")}
    fixed = FAMILIES[STEPS[step].family].fixed_config(STEPS[step], DType.BF16)
    for tile, config in tile_configs(fixed).items():
        share = config and results.of_flash(config.short_form(), "bf16")
        absent = "not measured there" if config else "not there"
        assert (f"{100 * share:.1f}%" if share else absent) in texts[tile]


def test_a_family_for_one_architecture_has_a_staircase_of_its_own(
    results: BenchmarkResults,
) -> None:
    def steps(lit: str) -> list[str]:
        tree = ElementTree.fromstring(stairs_picture(lit, results).to_svg("name"))
        below = (e.text or "" for e in tree.iter(f"{SVG}text") if e.get("font-size") == "12.5")
        return [text for text in below if re.fullmatch(r"[a-z]?\d+", text)]

    assert steps("h1") == [str(s.number) for s in FAMILIES["hopper"].steps.values()]
    assert steps("v1") == steps("o1") == [*map(str, range(1, 17)), *FAMILIES["overlap"].steps]
    own = FAMILIES["hopper"].fixed_config(STEPS["h1"], DType.BF16)
    measured = [replace(m, name=own.short_form()) for m in results.measurements if m.name == FLASH]
    results = replace(results, measurements=(*results.measurements, *measured))
    picture = stairs_picture("h1", results).to_svg("name")
    assert "100.0% of flash" in picture
    assert "FA3" not in picture and "cuDNN" in picture
    fa3 = [replace(m, name=FA3) for m in results.measurements if m.name == CUDNN]
    faster = [replace(m, samples_ms=tuple(ms / 2 for ms in m.samples_ms)) for m in fa3]
    results = replace(results, measurements=(*results.measurements, *faster))
    picture = stairs_picture("h1", results).to_svg("name")
    assert "FA3" in picture and "cuDNN" not in picture  # the faster one alone


@pytest.mark.parametrize("step", STEPS)
def test_numbers_of_steps_do_not_touch(root: Path, step: str) -> None:
    texts = DrawnPicture(root / stairs_path(step)).texts
    for one, other in combinations(texts, 2):
        assert not one.box.meets(other.box, -1.0), (one.text, other.text)


def test_the_committed_ones_are_current(root: Path) -> None:
    assert stale_stairs(root) == {}
