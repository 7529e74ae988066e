"""Append and rotary embedding in float64, and the largest errors allowed of an output.

An element that is turned is a sum of two products. Computing in fp32 allows 2 u (|a c| + |b s|), to
first order in u = 2^-24, and the bounds are those of `computed_bound`. All other elements of a row
are copies. The rest of a cache is what it was before: NaN, where the inputs have no cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.append.baselines import append_rows, places, turned, write
from flash_helpers.operations.append.problem import Append

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller products may be flushed to zero


def _errors(problem: Append, inputs: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the error that computing in fp32 allows of each element of k or q as it is written."""
    sizes = {**inputs, name: inputs[name].double().abs()}
    sizes |= {table: inputs[table].double().abs() for table in ("cos", "sin")}
    second = turned(problem, sizes, name)  # |a| |s| + |b| |c| of the second of a pair
    first = turned(problem, {**sizes, "sin": -sizes["sin"]}, name)
    errors = 2 * _U * torch.maximum(first, second) + _SMALLEST
    errors[..., problem.rotary_dim :] = 0.0
    return errors


def reference(problem: Append, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return both caches of a problem and q_rotated, where it has q, and their bounds. inputs: with
    the caches as they are before the call, or without them for caches of NaN."""
    names = ("k_cache", "v_cache")
    usual = inputs["k"].new_full(problem.tensor("k_cache").shape, torch.nan)
    before = [inputs.get(name, usual).clone() for name in names]
    plain = write(problem, inputs, *before)
    wide = ("cos", "sin", "k", "v", "q")
    exact = {name: x.double() if name in wide else x for name, x in inputs.items()}
    before = [inputs.get(name, usual).double() for name in names]
    expected = write(problem, exact, *before)
    allowed = {name: torch.zeros_like(x) for name, x in expected.items()}
    if problem.rotary_dim:
        of_k, of_v = _errors(problem, inputs, "k"), torch.zeros_like(exact["v"])
        append_rows(of_k, of_v, *places(inputs), allowed["k_cache"], allowed["v_cache"])
    if problem.heads:
        allowed["q_rotated"] = _errors(problem, inputs, "q")
    bounds = {name: computed_bound(x, allowed[name], plain[name]) for name, x in expected.items()}
    return Reference(expected, bounds)
