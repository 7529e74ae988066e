"""Inputs of a distribution that an operation does not know."""

from __future__ import annotations

import pytest

from flash_helpers.kernel_configs import OPERATIONS
from flash_helpers.registry.operation import Operation


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_distribution_that_is_not_known_is_refused_with_those_that_are(
    operation: Operation,
) -> None:
    known = ", ".join(operation.distributions)
    with pytest.raises(ValueError, match=f"inputs 'even' are not known: choose one of {known}"):
        operation.part("inputs").draw("even", operation.small)
