"""The problems of rows that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flash_helpers import gpu
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.registry.problem import Element, Tensor


@dataclass(frozen=True)
class RowsSupports:
    """Problems of rows.

    `dtype`: element type of x and y. `max_width`: elements of a row; `wider`: the way out for a
    wider one. `held`: elements of a row that its threads take in one pass of their loops; the
    corners lie around it.
    """

    dtype: Element
    max_width: int
    wider: str
    held: int
    max_rows: int = gpu.MAX_GRID[0]

    @property
    def alignment(self) -> int:
        """Bytes of an element: tensors may begin at any element."""
        return self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the bytes of an element."""
        return self.alignment

    @property
    def options(self) -> Mapping[str, Any]:
        """No options."""
        return MappingProxyType({})

    @property
    def sizes(self) -> Mapping[str, int]:
        """No sizes."""
        return MappingProxyType({})

    @property
    def smallest(self) -> int:
        """The least width."""
        return 1

    def lacking(self, problem: Rows) -> dict[str, tuple[str, str]]:
        """Return nothing: a problem has no options."""
        return {}

    def adapted(self, problem: Rows) -> Rows:
        """Return the problem: no option is compiled in."""
        return problem

    def refusal(self, problem: Rows, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
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
            "options": "none",
            "strides": "1 along a row; any from row to row",
        }

    def corners(self) -> Iterator[Rows]:
        """Yield small problems at the edges of the declaration: one element; a row within a chunk;
        lengths around a warp and around one pass of a block's loops. Odd widths put every other
        row between the multiples of 16 bytes."""
        for rows, width in ((1, 1), (3, 2), (2, 31), (3, 33), (2, 127), (1, 1000)):
            yield Rows(rows, width, self.dtype)
        for width in (self.held, self.held + 1, 2 * self.held - 1):
            yield Rows(2, width, self.dtype)
