"""A tiny GPT, trained with attention() in the simulator."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import pytest
import torch
from drawn_figure import collisions
from fake_backend import ROOT, fake_backend, load_tool

import flash_attention
from flash_helpers.console.tables import DASH
from flash_helpers.course.blocks import render
from flash_helpers.course.evidence import Evidence
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.plots import plotted_numbers
from flash_helpers.measure.results import RESULTS
from flash_helpers.measure.training import SIGNS, Attention, losses, sums
from flash_helpers.measure.training_plot import (
    FILES,
    stale_trainings,
    training_figure,
    training_numbers,
    training_svg,
)
from flash_helpers.measure.training_runs import (
    FLOAT32,
    LAB,
    PYTORCH,
    Training,
    TrainingRecord,
    TrainingRuns,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# Two steps that are long enough to tell right gradients from none.
TOY = Training(128, steps=2, batch=1, seq=48, width=128, learning_rate=1e-2)


def lab(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attention.attention(q, k, v, causal=True)


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2).bfloat16()


def without_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return in_float32(q, k, v).detach()


@pytest.mark.parametrize("d_head", [64, 128])
def test_a_step_with_the_kernels_gradients_leads_where_it_should(d_head) -> None:
    def after_a_step(attention: Attention) -> float:
        return losses(replace(TOY, d_head=d_head), attention, CPU, torch.bfloat16)[1]

    right = after_a_step(in_float32)
    off = abs(after_a_step(without_gradient) - right)
    assert abs(after_a_step(lab) - right) < off / 10


def test_the_text_is_sums_that_are_right_and_the_same_for_a_seed() -> None:
    text = next(sums(TOY))
    assert text.equal(next(sums(TOY))) and not text.equal(next(sums(replace(TOY, seed=1))))
    assert text.shape == (1, TOY.seq + 1)
    first, *_ = "".join(SIGNS[i] for i in text[0]).splitlines()
    left, _, right = first.partition("=")
    a, _, b = left.partition("+")
    assert int(a) + int(b) == int(right)


def test_weights_are_changed_by_a_millionth_and_the_same_way_for_a_seed() -> None:
    short = replace(TOY, steps=1, seq=16)
    unchanged, once, again, other = (
        losses(replace(short, moved=moved), in_float32, CPU, torch.bfloat16)
        for moved in (0, 1, 1, 2)
    )
    assert once == again != unchanged and other not in (once, unchanged)
    assert once == pytest.approx(unchanged, abs=1e-3)


def runs_of(records: Sequence[tuple[str, int, tuple[float, ...]]]) -> TrainingRuns:
    """Trainings by attention and seed of the change of the weights."""
    return TrainingRuns(
        provenance(fake_backend(), "training.py", "68cfc22"),
        "bf16",
        tuple(TrainingRecord(replace(TOY, moved=m), name, own) for name, m, own in records),
    )


ONCE = runs_of([(LAB, 0, (2.5, 2.2504)), (PYTORCH, 0, (2.5, 2.25)), (FLOAT32, 0, (2.5, 2.25))])
TWICE = runs_of(
    [
        (LAB, 1, (2.5, 2.24)),
        (LAB, 0, (2.5, 2.26)),
        (PYTORCH, 0, (2.5, 2.25)),
        (PYTORCH, 1, (2.5, 2.29)),
        (FLOAT32, 0, (2.5, 2.25)),
        (FLOAT32, 1, (2.5, 2.20)),
    ]
)


def test_a_file_and_its_table(tmp_path) -> None:
    ONCE.save(tmp_path / "training.json")
    assert TrainingRuns.load(tmp_path / "training.json") == ONCE
    own, _, in_float32 = ONCE.table().rows
    assert own == ["128", LAB, "2.500", "2.375", "0.00028", "0.0003", "0.0004"]
    assert in_float32[-3:] == [DASH] * 3, "the others are compared with it"


def test_of_several_trainings_the_table_has_the_smallest_and_the_largest_figure() -> None:
    most = [row[-1] for row in TWICE.table().rows]
    assert most == ["0.0100", "0.0000 to 0.0400", "0.0500"]
    assert TWICE.table().rows[0][3] == "2.370 to 2.380"
    assert "Each row has 2 trainings" in TWICE.markdown()
    assert "trainings" not in ONCE.markdown()


def test_a_page_shows_the_picture_the_table_and_what_the_plots_are(tmp_path) -> None:
    path = tmp_path / RESULTS.with_name("training_h100.json")
    path.parent.mkdir(parents=True)
    for runs, said in ((ONCE, "each 10 steps."), (TWICE, "the median of the trainings")):
        runs.save(path)
        block = "training_h100", PurePosixPath("docs/using.md")
        text = render(Evidence(tmp_path), "training", *block)
        assert "2.250 with PyTorch's attention" in text and "](images/training_h100.svg)" in text
        assert runs.table().markdown() in text and said in text


def test_the_picture_has_the_losses_and_the_spread_of_the_distances() -> None:
    own = training_numbers(TWICE)["d_heads"]["128"]
    assert own["losses"] == {LAB: [2.5, 2.26], PYTORCH: [2.5, 2.25], FLOAT32: [2.5, 2.25]}
    # the root mean square of two steps, of which the first has no distance
    low, median, high = own["distances"][PYTORCH]
    assert (low, median, high) == ([0.0], [pytest.approx(0.0141)], [pytest.approx(0.0283)])
    assert FLOAT32 not in training_numbers(ONCE)["d_heads"]["128"]["distances"]
    assert plotted_numbers(training_svg(training_numbers(TWICE))) == json.dumps(
        training_numbers(TWICE)
    )


def test_no_text_of_the_committed_picture_is_crossed_by_a_line_or_meets_another() -> None:
    (file,) = (ROOT / RESULTS).parent.glob(FILES)
    assert collisions(training_figure(training_numbers(TrainingRuns.load(file)))) == []


def test_a_picture_is_drawn_when_its_numbers_change(tmp_path) -> None:
    file = tmp_path / RESULTS.with_name("training_h100.json")
    picture = tmp_path / "docs/images/training_h100.svg"
    for folder in (file.parent, picture.parent):
        folder.mkdir(parents=True)
    assert stale_trainings(tmp_path) == {}
    ONCE.save(file)
    assert [*stale_trainings(tmp_path)] == [picture]
    picture.write_text(training_svg(stale_trainings(tmp_path)[picture]))
    assert stale_trainings(tmp_path) == {}
    TWICE.save(file)
    assert [*stale_trainings(tmp_path)] == [picture]


def test_the_tool_trains_in_the_simulator(tmp_path) -> None:
    file = tmp_path / "training.json"
    sizes = ["--runs", "1", "--steps", "2", "--batch", "1", "--seq", "32"]
    tool = load_tool("benchmarks/training.py")
    assert tool.main(["--device", "cpu", *sizes, "--json", str(file)]) == 0
    runs = TrainingRuns.load(file)
    assert [(r.training.d_head, r.attention) for r in runs.records] == [
        (d_head, name) for d_head in (64, 128) for name in (LAB, PYTORCH, FLOAT32)
    ]
    for d_head in (64, 128):
        (own,) = runs.distances(d_head)[LAB]
        first, second = runs.by_attention(d_head)[FLOAT32][0].losses
        assert max(own) < abs(first - second) / 10
