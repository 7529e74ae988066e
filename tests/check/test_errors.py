"""Errors of an output: their size, and what is right where a result is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from flash_helpers.check.errors import OutputError, half_ulp, measure_error


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
