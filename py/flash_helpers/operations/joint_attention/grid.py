"""The problems that the choice of a kernel of joint attention is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

import math
from typing import Any

from flash_helpers import gpu
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.problems import MEASURED_HEADS

_BATCHES = (1, 8, 64, 1024)
_SIZES = ((64, 0), (186, 0), (186, 64), (186, 256), (512, 64))  # sequence and context
_WARPS = (4, 8, 16)
_JO2_WARPS = (4, 8)  # with 64 keys, the fastest of 6 shapes on each problem but those of 64 tokens
_LARGE_BLOCKS = (128, 256)  # from jo7 on: keys, the fewest that hold those of the problem
_CLUSTER_BLOCKS = (64, 256, 512, 768)  # keys of jc1, which has all of them
# Of jo5: keys of a block, warps, queries of a thread block, columns of its heads. The two that were
# the fastest of 6 on 64 tokens, where jo5 was ahead of jo2. jo3 and jo4 were so nowhere; jo6 to jo8
# are in jo9.
_TILES = ((32, 16, 32, 128), (32, 8, 64, 128))
UNRELATED = 100.0  # octaves between problems that tell nothing of each other

GROUPS = {
    "joint_bf16": tuple(
        JointAttention(batch, MEASURED_HEADS, length, context=context, rotary=True)
        for batch in _BATCHES
        for length, context in _SIZES
    )
}


def competing(problem: JointAttention) -> list[tuple[str, dict[str, Any]]]:
    """Return the step and the fields of each config that competes."""
    one_head = [
        ("jo2", {"d_head": problem.d_head, "B_c": 64, "n_warps": n_warps}) for n_warps in _JO2_WARPS
    ]
    names = ("B_c", "n_warps", "B_r", "columns")
    B_c = next((B_c for B_c in _LARGE_BLOCKS if B_c >= problem.n_keys), _LARGE_BLOCKS[-1])
    all_keys = [
        (step, {"d_head": problem.d_head, "B_c": B_c, "n_warps": n_warps})
        for step in ("jo9", "jo10")
        for n_warps in _WARPS
    ]
    all_heads: list[tuple[str, dict[str, Any]]] = [
        ("jo5", {"d_head": problem.d_head, **dict(zip(names, tile, strict=True))})
        for tile in _TILES
    ]
    return one_head + all_keys + all_heads + _of_clusters(problem)


def _of_clusters(problem: JointAttention) -> list[tuple[str, dict[str, Any]]]:
    """Return those of jc1, with no more keys than the problem needs; none for more heads than a
    cluster has blocks."""
    if problem.heads > gpu.PORTABLE_CLUSTER:
        return []
    blocks = [B_c for B_c in _CLUSTER_BLOCKS if B_c >= problem.n_keys][:1]
    return [
        ("jc1", {"d_head": problem.d_head, "B_c": B_c, "n_warps": n_warps})
        for B_c in blocks
        for n_warps in _WARPS
    ]


def distance(one: JointAttention, other: JointAttention) -> float:
    """Return how far apart two problems are, in octaves of their sizes. Head sizes count most."""
    sizes = (
        (one.n_queries, other.n_queries),
        (one.n_keys, other.n_keys),
        (one.batch * one.heads, other.batch * other.heads),
    )
    octaves = sum(abs(math.log2(a / b)) for a, b in sizes)
    return octaves if one.d_head == other.d_head else octaves + UNRELATED
