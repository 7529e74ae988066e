"""The problems of norms that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any

from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.rows.supports import RowsSupports
from flash_helpers.registry.problem import Element

FUNCTIONS = MappingProxyType({False: "layer norm", True: "RMS norm"})


@dataclass(frozen=True)
class NormSupports(RowsSupports):
    """Problems of norms, whose rows are those of `RowsSupports`. `rms`: the function."""

    _: KW_ONLY
    rms: bool

    @property
    def alignment(self) -> int:
        """Bytes of an element of mean and rstd, the largest."""
        return Element.FP32.bytes

    @property
    def options(self) -> Mapping[str, Any]:
        """The function."""
        return MappingProxyType({"rms": self.rms})

    def lacking(self, problem: Norm) -> dict[str, tuple[str, str]]:
        """Return the function, if the kernel computes the other one."""
        if problem.rms == self.rms:
            return {}
        wanted = FUNCTIONS[problem.rms]
        return {"rms": (wanted, f"choose a kernel of {wanted}")}

    def adapted(self, problem: Norm) -> Norm:
        """Return the problem of the kernel's function. RMS norm has no mean, and as usual no bias,
        where the problem is one of layer norm; layer norm has as usual a bias."""
        if problem.rms == self.rms:
            return problem
        return replace(problem, rms=self.rms, mean=False, bias=not self.rms and problem.weight)

    def refusal(self, problem: Norm, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        for wanted, way_out in self.lacking(problem).values():
            return (
                f"the problem is one of {wanted} and {kernel} computes {FUNCTIONS[self.rms]}: "
                f"{way_out}"
            )
        return super().refusal(problem, kernel)

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        stored = "rstd" if self.rms else "mean, rstd"
        return {**super().described(), "options": f"weight, bias, eps; also stored: {stored}"}

    def corners(self) -> Iterator[Norm]:
        """Yield small problems of `corner_sizes`; weight, bias and statistics there and not."""
        for n, (rows, width) in enumerate(self.corner_sizes()):
            yield Norm(
                rows,
                min(width, self.max_width),
                self.dtype,
                rms=self.rms,
                weight=n % 2 == 0,
                bias=n % 4 < 2,
                mean=n % 3 == 0 and not self.rms,
                rstd=n % 3 < 2,
                eps=1e-6 if n % 5 == 0 else 1e-5,
            )
