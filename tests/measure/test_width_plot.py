"""Pictures of speeds by width of a row, under the roof of a copy, and their numbers as CSV."""

import csv
import io
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from drawn_figure import collisions

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.course.blocks import render
from flash_helpers.course.evidence import Evidence
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.measure.width_plot import (
    stale_tables,
    stale_widths,
    width_alt,
    width_csv,
    width_figure,
    width_numbers,
    width_picture,
    width_svg,
    width_table,
)
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.registry.norm import LAYER_NORM
from flash_helpers.registry.problem import Problem
from flash_helpers.tune.choices import Choices, MeasuredProblem, load_choices

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H200"
LAYER_NORM_H200 = ("layer_norm", GPU)
OURS = LAYER_NORM.fixed_config([*LAYER_NORM.steps.values()][-1], Element.BF16)


def choose(problem: Problem, device: Device) -> Config:
    return OURS


def of_width(width: int, ours: float = 2.0, **others: float) -> MeasuredProblem:
    """Times of a problem that reads and writes 2 GB of rows, besides its weights."""
    problem = Norm(2**29 // width, width, Element.BF16)
    times = {"copy": 1.0, **others}
    return MeasuredProblem(
        "layer_norm", problem.record(), {OURS.short_form(): ours}, times, 1700.0, {}
    )


def file_of(*problems: MeasuredProblem, date: str = "2026-01-02") -> Choices:
    files = load_choices(ROOT / CONFIG_FOLDER)
    found = next(file for file in files if file.provenance.gpu == GPU)
    return replace(found, problems=problems, provenance=replace(found.provenance, date=date))


def test_each_width_has_the_speeds_of_what_calls_take_of_a_copy_and_of_the_libraries() -> None:
    found = width_numbers(
        [file_of(of_width(128, compiled_norm=4.0)), file_of(of_width(64))], choose
    )
    assert [*found] == [LAYER_NORM_H200]
    numbers = found[LAYER_NORM_H200]
    assert numbers["widths"] == [64, 128]
    assert numbers["kernels"] == [OURS.short_form()] * 2
    ours, copy = numbers["speeds"]["ours"], numbers["speeds"]["copy"]
    assert [round(c / o) for c, o in zip(copy, ours, strict=True)] == [2, 2]
    assert numbers["speeds"]["torch.compile"][0] is None
    assert round(copy[1] / numbers["speeds"]["torch.compile"][1]) == 4


def test_of_a_width_in_two_files_the_last_measured_counts() -> None:
    files = [file_of(of_width(64, 4.0), date="2026-01-03"), file_of(of_width(64, 2.0))]
    (numbers,) = width_numbers(files, choose).values()
    speeds = numbers["speeds"]
    assert round(speeds["copy"][0] / speeds["ours"][0]) == 4


def test_a_kernel_that_was_not_measured_has_no_speed() -> None:
    (numbers,) = width_numbers(
        [file_of(replace(of_width(64), kernels={}), of_width(128))], choose
    ).values()
    assert numbers["speeds"]["ours"][0] is None
    assert "with 128 columns 50%" in width_alt("layer_norm", numbers)


def test_groups_without_a_width_or_a_ceiling_have_no_picture() -> None:
    attention = MeasuredProblem("d64", AttentionForward(1, 16, 512).record(), {}, {}, 1700.0, {})
    assert width_numbers([file_of(attention)], choose) == {}


def test_the_csv_has_the_numbers_of_the_picture() -> None:
    (numbers,) = width_numbers(
        [file_of(of_width(64), of_width(128, compiled_norm=4.0))], choose
    ).values()
    head, *rows = csv.reader(io.StringIO(width_csv(numbers)))
    assert head == ["width", "kernel", "ours GB/s", "copy GB/s", "torch.compile GB/s"]
    columns = zip(*numbers["speeds"].values(), strict=True)
    speeds = [["" if x is None else str(x) for x in row] for row in columns]
    assert rows == [
        [str(width), OURS.short_form(), *own]
        for width, own in zip(numbers["widths"], speeds, strict=True)
    ]


def test_a_file_is_stale_until_it_has_the_measured_numbers(tmp_path: Path) -> None:
    folder = tmp_path / CONFIG_FOLDER
    folder.mkdir(parents=True)
    file_of(of_width(64), of_width(128)).save(folder / "choice_norm_h200.json")
    picture, table = (tmp_path / path(*LAYER_NORM_H200) for path in (width_picture, width_table))
    for find, path, text in ((stale_widths, picture, width_svg), (stale_tables, table, width_csv)):
        assert [*find(tmp_path, choose)] == [path]
        path.parent.mkdir(parents=True)
        path.write_text(text(find(tmp_path, choose)[path]))
        assert find(tmp_path, choose) == {}
    file_of(of_width(64, 3.0), of_width(128)).save(folder / "choice_norm_h200.json")
    load_choices.cache_clear()
    assert [*stale_widths(tmp_path, choose)] == [picture]
    assert [*stale_tables(tmp_path, choose)] == [table]


def test_a_page_shows_picture_and_csv_below_the_table() -> None:
    page = PurePosixPath("docs/n6_loads_in_flight.md")
    text = render(Evidence(ROOT), "best", "layer_norm_bf16", page)
    assert "](images/layer_norm_bf16_h200.svg)" in text
    assert "](data/layer_norm_bf16_h200.csv)" in text
    assert "rms_norm" not in text


@pytest.mark.parametrize("group", ["layer_norm_bf16", "softmax_bf16"])
def test_the_texts_of_a_picture_do_not_meet(group: str) -> None:
    numbers = width_numbers(load_choices(ROOT / CONFIG_FOLDER), choose)
    assert collisions(width_figure(numbers[group, GPU])) == []
