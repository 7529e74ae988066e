"""Libraries that kernels of several operations are measured beside: torch.compile, and a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MOST_SHAPES = 1000


class Package(NamedTuple):
    """A library that is a package of its own. `name`: of the package for pip. `module`: that is
    imported."""

    name: str
    module: str

    @property
    def is_installed(self) -> bool:
        """Whether the module can be imported."""
        return importlib.util.find_spec(self.module) is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile of a function, with a graph for each shape, since sizes that are known
    when it is made give the fastest code. PyTorch by itself gives up after 8 shapes, and runs the
    function's operators one by one."""
    import torch._dynamo.config as limits  # late, since it takes time

    limits.recompile_limit = max(limits.recompile_limit, MOST_SHAPES)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_SHAPES)
    return torch.compile(function, dynamic=False)


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, by a kernel that computes x · 1. The copy that the driver makes is
    as fast below 512 MB, and from there on slower: on an H200 2.7 TB/s instead of 4.2."""
    return torch.mul(x, 1)


TRITON = Package("triton", "triton")
LIGER = Package("liger-kernel", "liger_kernel")
