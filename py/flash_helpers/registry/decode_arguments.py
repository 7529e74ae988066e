"""Members of the arguments that both families of decode have. Standard library only."""

from __future__ import annotations

import math

from flash_helpers import gpu
from flash_helpers.operations.decode.problem import Decode

MAX_LENGTH = 2**29  # of the cache: sums of two lengths and a bound of the window are an int
# Tensors that a call may have, and whose members of the arguments have their names.
GIVEN = ("lse", "sinks", "cache_seqlens", "cache_batch_idx", "block_table")


def given_names(problem: Decode) -> dict[str, str]:
    """Return the tensors of `GIVEN` that a problem has, by member of the arguments."""
    given = {tensor.name for tensor in (*problem.inputs, *problem.outputs)}
    return {name: name for name in GIVEN if name in given}


def most_pieces(problem: Decode, size: int) -> int:
    """Return the most pieces of `size` keys that queries of one sequence see a key of."""
    # no more are taken: in a form whose range an export can tell
    every = min(-(-problem.len_k // size), gpu.MAX_GRID[2])
    if problem.window_left is None:
        return every
    seen = problem.window_left + problem.len_q  # keys from the first to the last
    return min(every, 1 - (1 - seen) // size)


def option_values(problem: Decode) -> dict[str, tuple[float, ...]]:
    """Return the members of the arguments that tell sizes, scale, masks and pages."""
    scale = problem.softcap or problem.softmax_scale
    left = problem.window_left
    right = 0 if problem.causal else problem.window_right
    return {
        "len_q": (problem.len_q,),
        "len_k": (problem.len_k,),
        "kv_heads": (problem.kv_heads,),
        "heads_per_kv": (problem.heads // problem.kv_heads,),
        "scale": (scale * math.log2(math.e),),
        "scale_in_cap": (problem.softmax_scale / scale if problem.softcap else 0.0,),
        "window_left": (problem.len_k if left is None else left,),
        "window_right": (problem.len_q if right is None else right,),
        "table_blocks": (problem.blocks,),
        "page_size": (problem.page_size,),
    }
