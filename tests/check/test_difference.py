"""Where an output differs from the reference, by row and by element."""

from __future__ import annotations

import math

import torch

from flash_helpers.check.difference import OutputDifference, output_difference
from flash_helpers.kernel_configs import AttentionForward

SHAPE = AttentionForward(batch=2, heads=3, len_q=128)


def difference_of(output: torch.Tensor, expected: torch.Tensor, bound: float) -> OutputDifference:
    return output_difference("o", output, expected, bound, AttentionForward.axes["o"])


def test_the_difference_names_the_first_wrong_element_by_its_place() -> None:
    expected = torch.zeros(SHAPE.shape, dtype=torch.float64)
    output = expected.half()
    output[1, 93, 0, 100] = 0.5  # (batch, row, head, column)
    output[1, 90, 1, 7] = -2.0  # an earlier row comes first
    output[1, 90, 1, 8] = 0.25
    difference = difference_of(output, expected, 0.1)
    first = difference.first_wrong
    assert first is not None
    assert first.place == (1, 90, 1, 7)
    assert (first.got, first.expected) == (-2.0, 0.0)
    assert (difference.n_wrong, difference.n_wrong_rows) == (3, 2)
    worst, second = difference.worst_rows[:2]
    assert (worst.place, worst.max_abs, worst.n_wrong) == ((1, 90, 1), 2.0, 2)
    assert (second.place, second.max_abs) == ((1, 93, 0), 0.5)
    assert "o (batch 1, seq 90, heads 1, d_head 7): got -2, expected 0" in difference.text()


def test_the_difference_puts_nan_first_and_counts_it_as_wrong() -> None:
    expected = torch.zeros(1, 64, 1, 128, dtype=torch.float64)
    output = expected.half()
    output[0, 10, 0, 0] = 60000.0
    output[0, 20, 0, 5] = math.nan
    difference = difference_of(output, expected, 0.1)
    assert difference.n_wrong == 2
    assert difference.worst_rows[0].place == (0, 20, 0)
    assert math.isnan(difference.worst_rows[0].max_abs)


def test_the_difference_of_a_right_output_has_no_wrong_element() -> None:
    expected = torch.ones(1, 64, 1, 128, dtype=torch.float64)
    difference = difference_of(expected.half(), expected, 0.0)
    assert difference.first_wrong is None
    assert difference.n_wrong == 0
    assert "first wrong element: none" in difference.text()
