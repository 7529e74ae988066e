"""The problems of the backward pass of norms that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flash_helpers.operations.norm.supports import NormSupports
from flash_helpers.operations.norm_backward.problem import NormBackward


@dataclass(frozen=True)
class NormBackwardSupports(NormSupports):
    """Problems of the backward pass of norms, whose rows are those of the forward pass."""

    def adapted(self, problem: Any) -> Any:
        """Return the problem of the kernel's function. RMS norm has no dbias; that of layer norm
        is as usual computed where dweight is."""
        if problem.rms == self.rms:
            return problem
        return replace(problem, rms=self.rms, dbias=not self.rms and problem.dweight)

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        computed = "dweight" if self.rms else "dweight, dbias"
        return {**super().described(), "options": f"weight; also computed: {computed}"}

    def corners(self) -> Iterator[Any]:
        """Yield small problems of `corner_sizes`; weight, dweight and dbias there and not."""
        for n, (rows, width) in enumerate(self.corner_sizes()):
            yield NormBackward(
                rows,
                min(width, self.max_width),
                self.dtype,
                rms=self.rms,
                weight=n % 2 == 0,
                dweight=n % 3 < 2,
                dbias=n % 4 < 2 and not self.rms,
            )
