"""The problems of norms that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from flash_helpers import gpu
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.registry.problem import Element, Tensor

FUNCTIONS = MappingProxyType({False: "layer norm", True: "RMS norm"})


@dataclass(frozen=True)
class NormSupports:
    """Problems of norms.

    `dtype`: element type of all tensors but mean and rstd. `rms`: the function. `max_width`:
    elements of a row; `wider`: the way out for a wider one. `held`: elements of a row that a block
    takes in one pass of its loops; the corners lie around it.
    """

    dtype: Element
    rms: bool
    max_width: int
    wider: str
    held: int
    max_rows: int = gpu.MAX_GRID[0]

    @property
    def alignment(self) -> int:
        """Bytes of an element of mean and rstd, the largest."""
        return Element.FP32.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the bytes of an element: tensors may begin at any element."""
        return tensor.element.bytes

    @property
    def options(self) -> Mapping[str, Any]:
        """The function."""
        return MappingProxyType({"rms": self.rms})

    @property
    def sizes(self) -> Mapping[str, int]:
        """No sizes."""
        return MappingProxyType({})

    @property
    def smallest(self) -> int:
        """The least width."""
        return 1

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
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        if problem.width > self.max_width:
            return (
                f"width {problem.width} is over the limit {self.max_width} of {kernel}: "
                f"{self.wider}"
            )
        if problem.rows > self.max_rows:
            return (
                f"rows {problem.rows} is over the limit {self.max_rows} of a CUDA grid: split the "
                "call by rows"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        if strides[-1] in (0, 1) and (strides[-1] or tensor.shape[-1] == 1):
            return ""
        return (
            f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: call "
            ".contiguous()"
        )

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "width": f"1 to {self.max_width:,}",
            "rows": f"up to {self.max_rows:,}",
            "options": "weight, bias, eps; also stored: " + ("rstd" if self.rms else "mean, rstd"),
            "strides": "1 along a row; any from row to row",
        }

    def corners(self) -> Iterator[Norm]:
        """Yield small problems at the edges of the declaration: one element; a row within a chunk;
        lengths around a warp and around one pass of a block's loops; weight, bias and statistics
        there and not. Odd widths put every other row between the multiples of 16 bytes."""
        sizes = [(1, 1), (3, 2), (2, 31), (3, 33), (2, 127), (1, 1000)]
        sizes += [(2, width) for width in (self.held, self.held + 1, 2 * self.held - 1)]
        for n, (rows, width) in enumerate(sizes):
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
