"""The sizes of a launch, and whether a GPU would take them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from flash_helpers import gpu
from flash_helpers.ptx.errors import LaunchError
from flash_helpers.ptx.read.module import Function, Variable
from flash_helpers.ptx.run.layout import aligned, placed

Three = tuple[int, int, int]

_MAX_VARIABLE_BYTES = 1 << 30
"""Limit of the simulator for the total size of the global variables that a kernel names."""

_SPACE_LIMITS = (
    (gpu.MAX_LOCAL_BYTES, "local", "a thread"),
    (gpu.MAX_CONSTANT_BYTES, "const", "a module"),
    (_MAX_VARIABLE_BYTES, "global", "in variables"),
)


def count(value: int | np.integer, name: str) -> int:
    """A number that is not negative."""
    try:
        count = operator.index(value)
    except TypeError:
        raise LaunchError(f"{name} is {value!r}: give an integer") from None
    if count < 0:
        raise LaunchError(f"{name} is {count}: give 0 or more")
    return count


def three(value: Sequence[int] | int, name: str) -> Three:
    """One to three sizes, with 1 for those that are left out."""
    values = value if isinstance(value, Sequence | np.ndarray) else (value,)
    if not 1 <= len(values) <= 3 or isinstance(value, str | bytes):
        raise LaunchError(f"{name} is {value!r}: give one to three positive numbers")
    x, y, z = (*(count(v, name) for v in values), 1, 1)[:3]
    if 0 in (x, y, z):
        raise LaunchError(f"{name} is {value!r}: give one to three positive numbers")
    return x, y, z


def check_block(function: Function, grid: Three, block: Three, target: str) -> None:
    """Refuses a grid or block beyond what the target allows or the kernel is compiled for."""
    if any(n > most for n, most in zip(grid, gpu.MAX_GRID, strict=True)):
        raise LaunchError(f"a grid of {grid}: the limits are {', '.join(map(str, gpu.MAX_GRID))}")
    try:
        gpu.SMEM_BYTES[gpu.capability_of(target)]
    except (ValueError, KeyError):
        known = ", ".join(f"sm_{capability}" for capability in gpu.SMEM_BYTES)
        raise LaunchError(
            f"the limits of {target} are not known: give one of these as target: {known}"
        ) from None
    threads = math.prod(block)
    if threads > gpu.MAX_THREADS or block[2] > gpu.MAX_BLOCK_Z:
        raise LaunchError(
            f"a block of {block} has {threads} threads; {target} allows {gpu.MAX_THREADS} "
            f"and {gpu.MAX_BLOCK_Z} in z: use a smaller block"
        )
    bound = function.directives.get("maxntid") or function.directives.get("reqntid")
    if bound and threads > math.prod(bound):
        raise LaunchError(
            f"a block of {threads} threads, but {function.name} is compiled for at most "
            f"{math.prod(bound)}: launch fewer or change __launch_bounds__"
        )


def check_memory(variables: Iterable[Variable], static: int, dynamic: int, target: str) -> None:
    """Refuses more memory than the target has. `static`, `dynamic`: bytes of shared memory per
    block."""
    most = gpu.SMEM_BYTES[gpu.capability_of(target)]
    total = static + dynamic
    if total > most:
        raise LaunchError(
            f"{total} bytes of shared memory a block ({static} static, "
            f"{dynamic} dynamic), but {target} has {most}: use smaller "
            "tiles or another target"
        )
    for limit, space, owner in _SPACE_LIMITS:
        size = placed([v for v in variables if v.space == space])[1]
        if size > limit:
            raise LaunchError(f"{size} bytes of {space} memory {owner}: the limit is {limit}")


def cluster_of(
    function: Function, given: Sequence[int] | int | None, grid: Three, target: str
) -> Three | None:
    """Blocks per cluster, from the launch or the kernel (PTX ISA 9.0, "Cluster Dimension
    Directives")."""
    directives = function.directives
    if "blocksareclusters" in directives:
        raise LaunchError(f"{function.name} counts its grid in clusters, which is not simulated")
    compiled = directives.get("reqnctapercluster")
    required = three(compiled, "reqnctapercluster") if compiled else None
    cluster = required if given is None else three(given, "cluster")
    if cluster is None:
        if "explicitcluster" in directives:
            raise LaunchError(f"{function.name} must be launched with clusters: give cluster")
        return None
    size = math.prod(cluster)
    if gpu.capability_of(target) < 90:
        raise LaunchError(f"a cluster of {cluster}: {target} has none, sm_90 is the first")
    if required not in (None, cluster):
        raise LaunchError(
            f"a cluster of {cluster}, but {function.name} is compiled for {required}: leave it out "
            "or change __cluster_dims__"
        )
    most, *_ = directives.get("maxclusterrank", (gpu.MAX_CLUSTER,))
    if size > gpu.MAX_CLUSTER:
        raise LaunchError(
            f"a cluster of {cluster} has {size} blocks: the limit is {gpu.PORTABLE_CLUSTER}, "
            f"or {gpu.MAX_CLUSTER} with cudaFuncAttributeNonPortableClusterSizeAllowed: use "
            "fewer"
        )
    if size > most:
        raise LaunchError(
            f"a cluster of {cluster} has {size} blocks, but {function.name} is compiled for at "
            f"most {most}: use fewer or change __launch_bounds__"
        )
    if any(n % c for n, c in zip(grid, cluster, strict=True)):
        raise LaunchError(
            f"a grid of {grid} is no multiple of its cluster of {cluster}: enlarge the grid to "
            f"{tuple(aligned(n, c) for n, c in zip(grid, cluster, strict=True))} or choose "
            "another cluster"
        )
    return cluster
