"""The plots show the numbers of the results, and say which ones they show."""

import dataclasses
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attention_configs import ATTENTION_STEPS
from benchmark_results import (
    BF16,
    BURST_GAIN,
    LARGE_TILE_7,
    STAIRS,
    full_results,
    measurement,
    synthetic_results,
    with_rates,
)
from browser import open_browser
from drawn_figure import collisions
from matplotlib.axes import Axes
from test_benchmark import pt_bench as pt_bench
from test_benchmark import repository as repository
from test_benchmark import update_tables

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.course.stairs import stairs_path
from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.measure import plots
from flash_helpers.measure.plots import (
    PLOTS,
    PROGRESSION,
    SEQ_LEN,
    PlotError,
    description,
    drawable_panels,
    drawn_figure,
    plot_figure,
    plot_svg,
    plotted_numbers,
    progression_numbers,
    require_plotting,
    seq_len_numbers,
)
from flash_helpers.measure.results import (
    CUDNN,
    FLASH,
    LIBRARY_NAMES,
    RESULTS,
    BenchmarkResults,
    load_results,
    results_by_family,
)
from flash_helpers.measure.ring_plot import FILES as RINGS
from flash_helpers.measure.training_plot import FILES, picture_path
from flash_helpers.measure.width_plot import width_numbers, width_picture
from flash_helpers.tune.best import config_for
from flash_helpers.tune.choices import load_choices

BOTH = (PROGRESSION, SEQ_LEN)


def texts_of(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip()
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


# What is plotted


def test_each_staircase_has_a_height_for_each_step_in_percent_of_flash() -> None:
    # flash at 300, the n-th step at 100 + 10 n, at the large tile at 200 + 10 n
    numbers = progression_numbers(with_rates(full_results()), "bf16")
    assert numbers["steps"] == list(ATTENTION_STEPS)
    places = {step: n for n, step in enumerate(ATTENTION_STEPS, start=1)}

    def heights(base: int, *families: str) -> list[float | None]:
        """From v7 on, if it is not the staircase of the ampere family's fixed tile."""
        return [
            round((base + 10 * n) / 3, 1)
            if ATTENTION_STEPS[step].family in families and (base == 100 or n >= places["v7"])
            else None
            for step, n in places.items()
        ]

    assert numbers["fixed"] == heights(100, "ampere", "hopper", "general")
    assert numbers["large"] == heights(200, "ampere", "overlap")
    assert numbers["read"] == [
        height if STAIRS[step].read else None
        for step, height in zip(places, heights(190, "ampere", "overlap"), strict=True)
    ]
    assert numbers["lines"] == {
        "PyTorch's flash backend": 100.0,
        "PyTorch's cuDNN backend": 200.0,
        "mma.sync of the chip": 200.0,
    }


def test_a_step_that_failed_at_a_length_has_no_height() -> None:
    results = full_results()
    name = BF16[2].short_form()
    broken = [
        dataclasses.replace(m, samples_ms=(), failure="wrong output")
        if (m.name, m.size) == (name, 1024)
        else m
        for m in results.measurements
    ]
    heights = progression_numbers(dataclasses.replace(results, measurements=tuple(broken)), "bf16")[
        "fixed"
    ]
    missing = [
        step
        for step, height in zip(STAIRS, heights, strict=True)
        if height is None and STAIRS[step].fixed is not None
    ]
    assert missing == ["v3"]


def test_lines_are_those_of_the_libraries_and_of_the_steps_that_gained() -> None:
    numbers = seq_len_numbers(with_rates(full_results()), "bf16")
    assert numbers["seq_lens"] == [1024, 4096]
    lines = numbers["lines"]
    assert lines["PyTorch's flash backend"] == [360.0, 360.0]  # 300 sustained
    assert not any("control" in label for label in lines)
    # each of the first steps gains over 5%, and so does the large tile; after it, it is less
    assert lines["v2"] == [144.0, 144.0]
    assert lines["v7, large tile"] == [324.0, 324.0]
    assert not {"v12", "v12, large tile"} & set(lines)
    # the last step of each family always, by the faster tile
    assert lines["v16, large tile"] == [432.0, 432.0]
    base = 200.0 if STAIRS[BF16[-1].step.id].large else 100.0
    assert lines[BF16[-1].step.id] == [BURST_GAIN * (base + 10 * len(ATTENTION_STEPS))] * 2
    assert numbers["rates"] == {"matmul of the chip": 960.0, "mma.sync of the chip": 720.0}


def test_without_the_flash_backend_there_is_no_staircase() -> None:
    results = synthetic_results(measurement(BF16[0].short_form(), 1024, 100.0))
    assert drawable_panels(results) == [SEQ_LEN]
    with pytest.raises(PlotError, match="no step of bf16 was measured beside"):
        description(results, [PROGRESSION])


def test_without_a_valid_measurement_there_is_nothing_to_draw() -> None:
    results = synthetic_results(measurement(CUDNN, 1024, 1.0, failure="not available"))
    assert drawable_panels(results) == []
    with pytest.raises(PlotError, match="nothing to draw"):
        plot_svg(results, [])


# How it is drawn


@pytest.fixture(scope="module")
def svg() -> str:
    return plot_svg(with_rates(full_results()), BOTH)


def test_the_same_results_give_the_same_file(svg: str) -> None:
    assert plot_svg(with_rates(full_results()), BOTH) == svg
    assert "dc:date" not in svg


def test_the_file_says_which_numbers_it_shows(svg: str) -> None:
    said = json.loads(plotted_numbers(svg))
    assert said["gpu"] == "NVIDIA H100 80GB HBM3"
    assert said[PROGRESSION]["fixed"][0] == 36.7  # 110 of 300
    assert said[PROGRESSION]["load"] == said[SEQ_LEN]["load"] == "burst"
    assert plotted_numbers(svg) == description(with_rates(full_results()), BOTH)
    assert plotted_numbers("no picture") == ""
    assert plotted_numbers("<svg/>") == ""


def test_lines_and_steps_are_labelled_in_the_picture(svg: str) -> None:
    texts = texts_of(svg)
    assert set(ATTENTION_STEPS) <= set(texts)
    assert {LIBRARY_NAMES[FLASH], LIBRARY_NAMES[CUDNN]} <= set(texts)
    assert {"37", "90"} <= set(texts)  # the first step of each staircase, in percent
    assert {"fixed tile", "large tile", "large tile, stride read at run time"} <= set(texts)
    assert "mma.sync of the chip" in texts
    assert any("NVIDIA H100 80GB HBM3, bf16, in bursts" in text for text in texts)


@pytest.mark.parametrize(("panel", "family"), [*PLOTS.values()])
def test_no_text_is_crossed_by_a_line_or_meets_another(root: Path, panel: str, family: str) -> None:
    results = results_by_family(root, load_results(root / RESULTS))[family]
    assert collisions(plot_figure(description(results, [panel]), [panel])) == []


_STRUCK = """
const boxes = [...document.querySelectorAll("text")].map((text) => {
  const { left, right, top, bottom } = text.getBoundingClientRect(); // with room for accents
  const margin = (bottom - top) / 6;
  return { name: text.textContent, left, right, top: top + margin, bottom: bottom - margin };
});
const found = [];
for (const path of document.querySelectorAll("path")) {
  const style = getComputedStyle(path);
  if (style.stroke === "none" || path.closest("defs") || !path.getTotalLength()) continue;
  const place = path.getScreenCTM();
  for (let at = 0; at <= path.getTotalLength(); at++) {
    const { x, y } = path.getPointAtLength(at).matrixTransform(place);
    for (const box of boxes) {
      if (x > box.left && x < box.right && y > box.top && y < box.bottom) found.push(box.name);
    }
  }
}
boxes.forEach((a, n) => boxes.slice(n + 1).forEach((b) => {
  if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) {
    found.push(`${a.name} and ${b.name}`);
  }
}));
return [...new Set(found)];
"""


@pytest.mark.slow
def test_no_text_of_a_committed_plot_is_crossed_in_a_browser(root: Path, tmp_path: Path) -> None:
    """The files may be older than the code that draws them."""
    files = [file for names in (FILES, RINGS) for file in (root / RESULTS).parent.glob(names)]
    others = (picture_path(file.stem) for file in files)
    widths = width_numbers(load_choices(root / CONFIG_FOLDER), config_for)
    by_width = (width_picture(group, gpu) for group, gpu in widths)
    of_families = (path for path in map(stairs_path, FAMILIES) if (root / path).exists())
    pictures = [*PLOTS, *of_families, *others, *by_width]
    with open_browser(tmp_path) as browser:
        struck = {}
        for picture in pictures:
            browser.get((root / picture).as_uri())
            struck[str(picture)] = browser.execute_script(_STRUCK)
    assert {picture: texts for picture, texts in struck.items() if texts} == {}


def test_the_test_of_crossed_texts_finds_them() -> None:
    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1])
        axes.text(0.5, 0.5, "struck")
        axes.text(0.1, 0.9, "one")
        axes.text(0.11, 0.9, "two")

    assert collisions(drawn_figure(draw, (4, 3))) == ["struck", "one and two"]


def test_the_picture_reads_on_a_light_page_and_on_a_dark_one(svg: str) -> None:
    """Every letter has a contrast of 3 : 1 on white and on GitHub's dark background."""
    colors = {
        part.split(":")[1].strip()
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
        for part in element.get("style", "").split(";")
        if part.strip().startswith("fill:")
    }
    assert colors
    for color in colors:
        for background in ("#ffffff", "#0d1117"):
            assert contrast(color, background) >= 3, color


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.1."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_labels_are_kept_apart_and_moved_no_further_than_needed() -> None:
    assert plots._apart([0, 100], 10) == [0, 100]
    assert plots._apart([50, 50], 10) == [45, 55]
    assert plots._apart([100, 0, 3], 10) == [100, -3.5, 6.5]
    crowded = sorted(plots._apart([1, 2, 3, 4, 50, 51], 10))
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(crowded))


def test_without_matplotlib_the_way_out_is_told(monkeypatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        require_plotting()


def test_the_benchmark_draws_what_it_measured(pt_bench, tmp_path: Path) -> None:
    path, json_path = tmp_path / "a.svg", tmp_path / "a.json"
    options = ["--kernel", "2", "--seq", "64", "--rounds", "1"]
    assert pt_bench.main([*options, "--plot", str(path), "--json", str(json_path)]) == 0
    assert plotted_numbers(path.read_text()) == description(load_results(json_path), BOTH)


def test_the_benchmark_measures_nothing_if_it_could_not_draw_it(
    pt_bench, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert pt_bench.main(["--plot", str(tmp_path / "a.svg")]) == 2
    assert capsys.readouterr().err.startswith("plots need matplotlib")


# The files in docs/images


def test_plots_are_drawn_once_and_are_then_up_to_date(repository: Path, capsys) -> None:
    assert update_tables(repository) == 0
    said = capsys.readouterr().out
    for name in ("docs/images/progression.svg", "docs/images/seq_len.svg"):
        assert plotted_numbers((repository / name).read_text())
        assert f"{name} written" in said
    assert update_tables(repository, "--check") == 0


def test_a_plot_of_other_numbers_is_found_without_matplotlib(
    repository: Path, monkeypatch, capsys
) -> None:
    assert update_tables(repository) == 0
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert update_tables(repository, "--check") == 0
    faster = [
        dataclasses.replace(m, first_ms=tuple(2 * ms for ms in m.first_ms))
        if m.name == LARGE_TILE_7.short_form()
        else m
        for m in full_results().measurements
    ]
    results: BenchmarkResults = dataclasses.replace(full_results(), measurements=tuple(faster))
    results.save(repository / "results.json")
    capsys.readouterr()
    assert update_tables(repository, "--check") == 1
    assert "docs/images/progression.svg is absent or shows other" in capsys.readouterr().out
    header = (repository / LARGE_TILE_7.step.source).read_text()
    assert update_tables(repository) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert (repository / LARGE_TILE_7.step.source).read_text() == header
