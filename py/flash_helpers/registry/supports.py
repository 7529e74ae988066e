"""A kernel's declaration of the problems that it takes: refusals, tests' corners and the docs'
table follow. Each operation has its own class. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from flash_helpers.registry.problem import Tensor


class Supports(Protocol):
    """The problems of one operation that a kernel takes. The problems passed to its methods are of
    that operation."""

    @property
    def alignment(self) -> int:
        """Bytes that the address of each tensor is a multiple of; a power of two."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of a problem that the kernel fixes when it is compiled, such as a mask."""

    @property
    def smallest(self) -> int:
        """Size of the smallest problem, to compare kernels of one operation by."""

    def lacking(self, problem: Any) -> dict[str, tuple[str, str]]:
        """Return what a problem asks for and the kernel has not, by name: the values in words, and
        the way out."""

    def refusal(self, problem: Any, kernel: str) -> str:
        """Return why the kernel does not take a problem, with the way out; "" if it does.

        kernel: how the text names it.
        """

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return why a tensor cannot have these strides (elements, 0 along a dimension of size 1),
        with the way out; "" if it can."""

    def described(self) -> dict[str, str]:
        """Return what is taken, in words: quantities by name."""

    def corners(self) -> Iterator[Any]:
        """Yield small problems at the edges of the declaration."""
