"""Decode in float64, and the largest errors allowed of an output: those of
`attention_forward.reference` for each sequence's own keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from flash_helpers.check.errors import OutputError, Reference
from flash_helpers.operations.attention_forward.reference import (
    attention_reference,
    larger,
    lse_bound,
    options_of,
    without_keys,
)
from flash_helpers.operations.decode.problem import Decode


def lengths_of(problem: Decode, inputs: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the keys of each sequence."""
    if "cache_seqlens" in inputs:
        return inputs["cache_seqlens"].tolist()
    return [problem.len_k] * problem.batch


def caches_of(
    problem: Decode, inputs: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys and the values of each sequence, (1, length, kv_heads, d_head). Keys in
    pages of which no query sees a key are zeros. Those of a cache in fp8 are float32, not
    multiplied by the scales."""
    k, v = (x.float() if problem.fp8_cache else x for x in (inputs["k"], inputs["v"]))
    for n, length in enumerate(lengths_of(problem, inputs)):
        if problem.page_size:
            needed = problem.needed_blocks(length)
            pages = inputs["block_table"][n, [*needed]].long()
            hidden = needed.start * problem.page_size
            seen = [x[pages].flatten(0, 1) for x in (k, v)]
            own = [torch.cat((x.new_zeros(hidden, *x.shape[1:]), x)) for x in seen]
        else:
            row = int(inputs["cache_batch_idx"][n]) if problem.caches else n
            own = [k[row], v[row]]
        keys, values = (x[None, :length] for x in own)
        yield keys, values


def reference(problem: Decode, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return o and lse of a problem; each output has the largest bound of a sequence. The LSE of a
    sequence without keys may be rounded as that of a key of zeros. Raises as `attention_reference`
    does."""
    q = inputs["q"]
    options = options_of(problem, inputs)
    for name in ("pieces", "keys_per_piece", "fp8_cache"):  # the order of sums, and the cache
        options.pop(name, None)
    o, lse = without_keys(q, q, options["sinks"])
    bounds = dict.fromkeys(("o", "lse"), OutputError(0.0, 0.0))
    for n, (k, v) in enumerate(caches_of(problem, inputs)):
        k, v = (
            x.double() * inputs[name][n, :, None] if name in inputs else x
            for x, name in ((k, "k_scale"), (v, "v_scale"))
        )
        if not k.shape[1]:
            own = lse_bound(q, k.new_zeros(1, 1, *k.shape[2:]), sinks=options["sinks"])
            bounds["lse"] = larger(bounds["lse"], OutputError(own, math.inf))
            continue
        found = attention_reference(q[n : n + 1], k, v, **options)
        o[n], lse[n] = found.expected["o"][0], found.expected["lse"][0]
        bounds = {name: larger(bounds[name], found.bounds[name]) for name in bounds}
    return Reference({"o": o, "lse": lse}, bounds)
