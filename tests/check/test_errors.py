"""Errors of an output: their size, and what is right where a result is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from flash_helpers.check.errors import (
    OutputError,
    RowErrors,
    computed_bound,
    half_ulp,
    half_ulps,
    measure_error,
)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.float16, 2.0**-11),
        (1.999, torch.float16, 2.0**-11),
        (2.0, torch.float16, 2.0**-10),
        (-0.75, torch.bfloat16, 2.0**-9),
        (0.0, torch.float16, 2.0**-25),  # the subnormals' spacing is 2^-24
    ],
)
def test_half_ulp_is_the_largest_rounding_error_at_a_value(
    value: float, dtype: torch.dtype, expected: float
) -> None:
    assert half_ulp(value, dtype) == expected
    here = torch.tensor(abs(value), dtype=dtype)
    next_number = (here.view(torch.int16) + 1).view(dtype)
    assert (next_number.double() - here.double()).item() == 2 * expected


def test_half_ulps_are_those_of_each_value() -> None:
    values = torch.tensor([[1.0, 1.999], [-0.75, 0.0]], dtype=torch.float64)
    expected = [[half_ulp(value, torch.bfloat16) for value in row] for row in values.tolist()]
    assert half_ulps(values, torch.bfloat16).tolist() == expected


def test_errors_are_the_largest_difference_and_the_frobenius_ratio() -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    output = torch.tensor([3.0, 4.5], dtype=torch.float16)
    assert measure_error(output, expected) == OutputError(max_abs=0.5, relative=0.1)


def test_an_infinity_or_nan_is_right_where_it_is_expected_alone() -> None:
    expected = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert measure_error(torch.tensor([-math.inf, 1.5]), expected).max_abs == 0.5
    assert measure_error(torch.tensor([0.0, 1.0]), expected).max_abs == math.inf
    assert measure_error(torch.tensor([-math.inf, -math.inf]), expected).max_abs == math.inf
    assert math.isnan(measure_error(torch.tensor([math.nan, 1.0]), expected).max_abs)
    with pytest.raises(ValueError, match=r"output has shape \(1,\), the reference \(2,\)"):
        measure_error(expected[:1], expected)


@pytest.mark.parametrize("beyond", [65520.0, -70000.0])
def test_an_infinity_is_right_where_the_dtype_has_no_number_as_large(beyond: float) -> None:
    expected = torch.tensor([[1.0, beyond], [2.0, 3.0]], dtype=torch.float64)
    own = expected.half()
    assert own.isinf().sum() == 1
    bound = computed_bound(expected, expected.abs() * 2.0**-20, own)
    assert measure_error(own, expected).within(bound)
    assert bound.max_abs < 1  # what is beyond allows nothing elsewhere
    for wrong in (-beyond, math.nan, 65504.0):
        other = own.clone()
        other[0, 1] = wrong
        assert not measure_error(other, expected).within(bound), wrong
    assert not measure_error(expected.bfloat16() * math.inf, expected).within(bound)


class TestBoundsByRow:
    EXPECTED = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    BOUND = OutputError(
        max_abs=0.5,
        relative=0.1,
        rows=RowErrors(torch.tensor([0.5, 0.05, 0.0]), torch.tensor([0.1001, 0.1001, 0.0])),
    )

    def error(self, *places: tuple[int, int], by: float = 0.0) -> OutputError:
        output = self.EXPECTED.clone()
        for place in places:
            output[place] += by
        return measure_error(output, self.EXPECTED)

    def test_an_error_is_measured_in_each_row(self) -> None:
        rows = self.error((0, 1), (1, 0), by=0.5).rows
        assert rows is not None
        assert rows.max_abs.tolist() == [0.5, 0.5, 0.0]
        assert rows.relative.tolist() == pytest.approx([0.1, 1.0, 0.0])

    def test_a_row_may_have_what_its_own_bound_allows(self) -> None:
        assert self.error((0, 1), by=0.5).within(self.BOUND)
        assert self.error((1, 1), by=0.05).within(self.BOUND)
        assert self.error().within(self.BOUND)

    def test_a_row_over_its_own_bound_is_named(self) -> None:
        wrong = self.error((1, 1), by=0.06)
        assert wrong.within(OutputError(0.5, 0.1))
        assert not wrong.within(self.BOUND)
        assert wrong.excess(self.BOUND) == (
            "row 1: max abs error 6.000e-02 is over its bound 5.000e-02; "
            "relative error 1.200e-01 is over its bound 1.001e-01"
        )

    def test_a_row_of_zeros_allows_nothing(self) -> None:
        wrong = self.error((2, 0), by=1e-9)
        assert wrong.excess(self.BOUND).startswith("row 2: max abs error 1.000e-09")

    def test_an_error_without_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="use measure_error"):
            OutputError(0.0, 0.0).within(self.BOUND)
