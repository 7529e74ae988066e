"""Random calls on a GPU: each is right, or refused with a way out."""

from __future__ import annotations

import secrets

import pytest
from random_calls import faults

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_calls_are_right_or_refused_in_words(count: int) -> None:
    first = secrets.randbelow(2**31)
    assert faults(range(first, first + count), "cuda", has_values=True) == []
