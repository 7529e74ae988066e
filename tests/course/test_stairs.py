"""The pictures of the staircases show what was measured."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from flash_helpers.course.pictures.stairs import stairs_picture, stale_stairs
from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.results import RESULTS, BenchmarkResults, load_results
from flash_helpers.measure.staircases import stairs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results(root: Path) -> BenchmarkResults:
    return load_results(root / RESULTS)


@pytest.mark.parametrize("step", STEPS)
def test_the_lit_step_has_its_numbers(results: BenchmarkResults, step: str) -> None:
    tree = ElementTree.fromstring(stairs_picture(step, results).to_svg("name"))
    (lit,) = (e for e in tree.iter(f"{SVG}rect") if e.get("data-lit"))
    assert lit.get("data-lit") == step
    texts = {e.get("data-tile"): e.text or "" for e in tree.iter(f"{SVG}text")}
    own = stairs("bf16")[step]
    for tile, config in (("fixed", own.fixed), ("large", own.large)):
        share = config and results.of_flash(config.short_form(), "bf16")
        assert texts[tile].endswith(f"{100 * share:.1f}%" if share else "not there")


def test_the_committed_ones_are_current(root: Path) -> None:
    assert stale_stairs(root) == {}
