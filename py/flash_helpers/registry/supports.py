"""A kernel's declaration of the problems that it takes. Refusals, the tests' corner cases and the
table of the docs follow from it. Each operation has its own class; those on rows of matrices have a
base. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from flash_helpers.registry.problem import Element, Tensor


class Supports(Protocol):
    """The problems of one operation that a kernel takes. Its methods take problems of that
    operation only."""

    @property
    def alignment(self) -> int:
        """Largest alignment of a tensor's address in bytes, a power of two."""

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes, which divides `alignment`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of a problem that the kernel fixes when it is compiled, such as a mask."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of a problem that the kernel fixes when it is compiled, by the problem's fields."""

    @property
    def smallest(self) -> int:
        """Size of the smallest problem, by which kernels of one operation are compared."""

    def lacking(self, problem: Any) -> dict[str, tuple[str, str]]:
        """Return the sizes and abilities that a problem needs and the kernel lacks, by name: the
        values in words, and the way out."""

    def adapted(self, problem: Any) -> Any:
        """Return the problem with the options that are compiled into the kernel, such as a mask:
        as they are, or usual ones where the problem lacks them."""

    def refusal(self, problem: Any, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides (elements, 0 along a dimension
        of size 1), with the way out; "" if it can."""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""

    def corners(self) -> Iterator[Any]:
        """Yield small problems at the edges of the declaration."""


class WithoutOptions:
    """Problems of kernels that take any size and every option as it is: a base of the classes of
    such operations."""

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
        """The least size."""
        return 1

    def lacking(self, problem: Any) -> dict[str, tuple[str, str]]:
        """Return nothing: no kernel lacks an option."""
        return {}

    def adapted(self, problem: Any) -> Any:
        """Return the problem: no option is compiled in."""
        return problem


@dataclass(frozen=True)
class MatrixSupports(WithoutOptions):
    """Problems of kernels on rows of matrices, which may begin at any element, without options: a
    base of the classes of such operations.

    `dtype`: element type of the matrices. `any_stride`: names of the tensors whose elements may be
    any distance apart.
    """

    any_stride: ClassVar[frozenset[str]] = frozenset()

    dtype: Element

    @property
    def alignment(self) -> int:
        """Bytes of an element of a matrix."""
        return self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the bytes of an element: a tensor may begin at any."""
        return tensor.element.bytes

    def refusal(self, problem: Any, kernel: str) -> str:
        """Return the reason why the kernel does not take the problem's dtype; "" if it does."""
        if problem.dtype == self.dtype:
            return ""
        return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        is_row = strides[-1] == 1 or (not strides[-1] and tensor.shape[-1] == 1)
        if is_row or tensor.name in self.any_stride:
            return ""
        return (
            f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: call "
            ".contiguous()"
        )
