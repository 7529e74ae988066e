"""The problems of linear_rowsum that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.registry.problem import Element, Tensor

MAX_SIZE = 2**30  # of rows and features: sums of a size and a tile are an int


@dataclass(frozen=True)
class LinearRowsumSupports:
    """Problems of linear_rowsum.

    `dtype`: element type of all tensors. `tile`: rows of x, input features and rows of W that a
    thread block takes at once; the corners lie around them. `max_tiles`: tiles of rows of x and of
    W; None for any number.
    """

    dtype: Element
    tile: tuple[int, int, int]
    max_size: int = MAX_SIZE
    max_tiles: int | None = None

    @property
    def alignment(self) -> int:
        """Bytes of an element: tensors may begin at any element."""
        return self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the bytes of an element."""
        return self.alignment

    @property
    def options(self) -> Mapping[str, Any]:
        """No options: a bias comes with the call."""
        return MappingProxyType({})

    @property
    def sizes(self) -> Mapping[str, int]:
        """No sizes."""
        return MappingProxyType({})

    @property
    def smallest(self) -> int:
        """The least number of input features."""
        return 1

    def lacking(self, problem: LinearRowsum) -> dict[str, tuple[str, str]]:
        """Return nothing: every kernel takes a bias and does without."""
        return {}

    def adapted(self, problem: LinearRowsum) -> LinearRowsum:
        """Return the problem: no option is compiled in."""
        return problem

    def refusal(self, problem: LinearRowsum, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        ways_out = {
            "rows": "split the call by rows",
            "in_features": "add up the results of parts of x and W",
            "out_features": "add up the results of parts of W",
        }
        for name, way_out in ways_out.items():
            if getattr(problem, name) > self.max_size:
                return (
                    f"{name} {getattr(problem, name)} is over the limit {self.max_size} of "
                    f"{kernel}: {way_out}"
                )
        tiles = -(-problem.rows // self.tile[0]) * -(-problem.out_features // self.tile[2])
        if self.max_tiles is not None and tiles > self.max_tiles:
            return (
                f"rows {problem.rows} and out_features {problem.out_features} have {tiles} tiles, "
                f"over the limit {self.max_tiles} of a CUDA grid: split the call by rows"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it can.
        bias and y may have any."""
        if len(strides) == 1 or strides[-1] == 1 or (not strides[-1] and tensor.shape[-1] == 1):
            return ""
        return (
            f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: call "
            ".contiguous()"
        )

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        sizes = f"1 to {self.max_size:,}"
        return {
            "rows": sizes,
            "input features": sizes,
            "output features": sizes,
            "options": "a bias",
            "strides": "1 along a row of x and W; any else",
        }

    def corners(self) -> Iterator[LinearRowsum]:
        """Yield small problems at the edges of the declaration: one element; sizes within a tile,
        at its end and one beyond."""
        rows, ins, outs = self.tile
        yield LinearRowsum(1, 1, 1, self.dtype)
        yield LinearRowsum(1, 1, 1, self.dtype, bias=True)
        yield LinearRowsum(3, 37, 5, self.dtype, bias=True)
        yield LinearRowsum(rows, ins, outs, self.dtype)
        yield LinearRowsum(rows + 1, ins + 1, outs + 1, self.dtype, bias=True)
