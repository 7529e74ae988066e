"""The problems of norms of a sum that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.norm.supports import NormSupports


@dataclass(frozen=True)
class AddNormSupports(NormSupports):
    """Problems of norms of a sum, whose rows are those of `NormSupports`."""

    def corners(self) -> Iterator[Any]:
        """Yield the small problems of a norm, each with a residual."""
        for problem in super().corners():
            yield AddNorm(**{field.name: getattr(problem, field.name) for field in fields(problem)})
