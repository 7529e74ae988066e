"""The problems that the choice of a kernel of joint_linear is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

import math
from typing import Any

from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.joint_linear.problems import MEASURED_WIDTH

_BATCHES = (1, 8, 64, 256, 1024)
_LENGTHS = ((186, 64), (64, 0), (186, 0))  # sequence and context
_FIELDS = ("B_r", "B_c", "n_warps", "warp_rows", "depth")
_FEW_ROWS = 4000  # up to here small tiles compete, so that every SM has one
# Of jl1 and jl2 those that were the fastest of 7 or of 8 somewhere. With a norm a thread block has
# whole rows.
_SMALL_TILES = (
    *(("jl1", 16, 64, 4, 16, 0), ("jl1", 16, 128, 4, 16, 0), ("jl1", 32, 64, 4, 16, 0)),
    *(("jl3", 16, 64, 4, 16, 128), ("jl3", 32, 64, 4, 16, 128)),
)
_SMALL_ROWS = (
    *(("jl1", 16, 128, 2, 16, 0), ("jl1", 16, 128, 4, 16, 0), ("jl1", 16, 128, 8, 16, 0)),
    ("jl3", 32, 128, 4, 16, 128),
)
_OF_FEW = (("jl3", 16, 128, 4, 16, 128), ("jl3", 32, 128, 4, 32, 128))
_OF_MANY = (
    *(("jl1", 32, 128, 4, 32, 0), ("jl1", 64, 128, 4, 32, 0), ("jl2", 64, 128, 4, 32, 128)),
    *(("jl3", 32, 128, 4, 32, 128), ("jl3", 64, 128, 4, 32, 128), ("jl3", 64, 128, 8, 32, 128)),
)
# With activations, and of 512 input features, which no step but jl1 takes: tiles of few rows and of
# many.
_ACTIVATED_FEW = (
    *(("jl4", 16, 64, 4, 16, 128), ("jl4", 32, 64, 4, 16, 128), ("jl4", 16, 128, 4, 16, 128)),
    ("jl4", 32, 128, 4, 32, 128),
)
_ACTIVATED_MANY = (
    *(("jl4", 32, 128, 4, 32, 128), ("jl4", 64, 128, 4, 32, 128), ("jl4", 64, 128, 8, 32, 128)),
    *(("jl4", 64, 64, 4, 32, 128), ("jl4", 128, 128, 8, 32, 128)),
)
_DEEP_FEW = (
    *(("jl1", 16, 64, 4, 16, 0), ("jl1", 16, 128, 4, 16, 0), ("jl1", 16, 128, 8, 16, 0)),
    ("jl1", 32, 64, 4, 16, 0),
)
_DEEP_MANY = (
    *(("jl1", 32, 128, 4, 32, 0), ("jl1", 64, 128, 4, 32, 0), ("jl1", 64, 128, 8, 32, 0)),
    *(("jl1", 64, 64, 4, 32, 0), ("jl1", 128, 128, 8, 32, 0)),
)
_DEEP = 256  # input features, at most, of what other steps take
_HIDDEN, _PARTS = 4, 6  # times the width: hidden features, and outputs for a block's modulation
_BLOCK_BATCHES = (1, 64, 1024)
_TILES, _ROWS = ("jl3", 64, 64, 4, 32, 128), ("jl3", 128, 128, 8, 32, 128)
# Octaves between problems with a norm or activation and without, of twice the width, and with a
# context and without: for a kernel its tokens are rows like others, and libraries take a launch
# more.
_NORM, _WIDTHS, _CONTEXT = 100.0, 4.0, 4.0

GROUPS = {
    f"joint_linear_{'norm_' if norm else ''}bf16": tuple(
        JointLinear(
            *(batch, length, MEASURED_WIDTH, (1 if norm else 3) * MEASURED_WIDTH),
            context=context,
            norm=norm,
        )
        for batch in _BATCHES
        for length, context in _LENGTHS
    )
    for norm in (False, True)
}
# The layers of a block beside attention's: the two of its feed-forward, and that of its modulation,
# whose tokens are conditions.
GROUPS |= {
    "joint_linear_gelu_bf16": tuple(
        JointLinear(
            *(batch, _LENGTHS[0][0], MEASURED_WIDTH, _HIDDEN * MEASURED_WIDTH),
            context=_LENGTHS[0][1],
            bias=True,
            gelu=True,
        )
        for batch in _BLOCK_BATCHES
    ),
    "joint_linear_hidden_bf16": tuple(
        JointLinear(
            *(batch, _LENGTHS[0][0], _HIDDEN * MEASURED_WIDTH, MEASURED_WIDTH),
            context=_LENGTHS[0][1],
            bias=True,
        )
        for batch in _BLOCK_BATCHES
    ),
    "joint_linear_silu_bf16": tuple(
        JointLinear(
            *(1, batch, MEASURED_WIDTH, _PARTS * MEASURED_WIDTH),
            context=batch,
            bias=True,
            silu=True,
        )
        for batch in _BLOCK_BATCHES
    ),
}


def competing(problem: JointLinear) -> list[tuple[str, dict[str, Any]]]:
    """Return the step and the fields of each config that competes."""
    tiles: tuple[tuple[Any, ...], ...]
    is_few = problem.rows + problem.context_rows <= _FEW_ROWS
    if problem.gelu or problem.silu:
        tiles = _ACTIVATED_FEW if is_few else _ACTIVATED_MANY
    elif problem.in_features > _DEEP:
        tiles = _DEEP_FEW if is_few else _DEEP_MANY
    elif is_few:
        tiles = (*(_SMALL_ROWS if problem.norm else _SMALL_TILES), *_OF_FEW)
    else:
        tiles = (*_OF_MANY, _ROWS if problem.norm else _TILES)
    return [(step, dict(zip(_FIELDS, tile, strict=True))) for step, *tile in tiles]


def distance(one: JointLinear, other: JointLinear) -> float:
    """Return how far apart two problems are, in octaves of their tokens; norms, activations
    and widths count most."""
    tokens = [problem.rows + problem.context_rows for problem in (one, other)]
    widths = sum(
        abs(math.log2(getattr(one, name) / getattr(other, name)))
        for name in ("in_features", "out_features")
    )
    octaves = abs(math.log2(tokens[0] / tokens[1])) + _WIDTHS * widths
    octaves += _CONTEXT * ((one.context > 0) != (other.context > 0))
    kinds = [(problem.norm, problem.gelu, problem.silu) for problem in (one, other)]
    return octaves + _NORM * sum(a != b for a, b in zip(*kinds, strict=True))
