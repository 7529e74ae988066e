"""The gradients of attention in float64, and the largest errors allowed of a kernel's.

Shapes, masks and logits are those of `attention_forward.reference`; `AttentionBackward` has the
formulas. The expected gradients follow from dO, Q, K and V alone, so that an O or an LSE that does
not belong to them shows.

The bound of a gradient G, with u the unit roundoff of the dtype (2^-11 for fp16, 2^-8 for bf16), R
the float64 result and `plain` plain PyTorch, with each operation's result rounded to the dtype:

    max |G - R|          <=  2 max |plain - R|  +  half an ulp at max |R|  +  e / u max A
    ||G - R|| / ||R||    <=  ||A|| / ||R||

The relative error cannot stay below u, as that of O does: dP - delta cancels, and with uniform rows
or a single key per query all of dQ and dK does. A has, for each element, twice the root mean square
of what a kernel's roundings to the dtype do to it, and u |R| for roundings that all point one way,
as those of equal values. A kernel rounds P and dS before their products, O before it is read, and
the gradients; the rest is float32. A rounding changes a value by a fraction of at most u, whose
root mean square is at most r = u / sqrt(3), and independent ones add up by their squares. Of values
that are subnormal in the dtype, r and u are larger (`rounding_errors`). The error of a query's
delta is one and the same for all of its keys, so that in dQ it multiplies the sum over them. With
squares element by element, t = r + c and f = t^2 + r^2 + s^2:

    of dV^2      t^2 (P^T)^2 dO^2  +  r^2 dV^2
    of delta^2   r^2 (dO^2 . O^2)
    of dS^2      P^2 f (dP - delta)^2
    of dQ^2      softmax_scale^2 ((of dS^2) K^2  +  (of delta^2) (P' K)^2)  +  r^2 dQ^2
    of dK^2      softmax_scale^2 (of dS^2  +  P^2 (of delta^2))^T Q^2  +  r^2 dK^2

P' is P, and with a softcap P (1 - tanh^2). c and s are 0 without a softcap. With one, c is the
error of the logarithm of P by the hardware's tanh (`attention_forward.reference`), and s = 2^-15
that of 1 - tanh^2, whose tanh is right to 2^-16. Where ||A|| exceeds ||R||, as with a dQ of 0, the
first line alone limits the error. Its last term is that of sums in float32: with one key, plain
PyTorch may be exact. Their error e is that of 16 roundings of 2^-24, or, from d_head 128 on, of the
d_head / 16 steps of a dP on tensor cores, each of which cuts off what is below 2^-23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    half_ulp,
    measure_error,
    rounding_errors,
)
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_forward.reference import (
    MAX_SCORES,
    hidden_keys,
    larger,
    options_of,
    sequences_of,
    tanh_error,
)

_TANH_SQUARED_ERROR = 2.0**-15


def _sums_error(d_head: int) -> float:
    """Return the relative error of sums in float32 over d_head products."""
    return max(16 * 2.0**-24, d_head / 16 * 2.0**-23)


class Gradients(NamedTuple):
    """dQ, dK and dV, or numbers that belong to their elements."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _by_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return (batch * kv_heads, len * group, d_head): rows that share keys lie together, and row r
    is query r // group."""
    return x.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _by_head(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of `_by_kv_head` in the shape of the tensor that they came from."""
    batch, length, heads, d_head = like.shape
    kv_heads = x.shape[0] // batch
    return (
        x.view(batch, kv_heads, length, heads // kv_heads, d_head)
        .transpose(1, 2)
        .reshape(like.shape)
    )


def _gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    max_scores: int = MAX_SCORES,
    *,
    with_allowed: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: None = None,
) -> tuple[Gradients, Gradients]:
    """The gradients, every operation's result rounded to `dtype`; and with `with_allowed` A of
    the module."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    dO, Q = (_by_kv_head(x, kv_heads) for x in (do, q))
    K, V = (_by_kv_head(x, kv_heads) for x in (k, v))
    n_sequences, n_rows, _ = Q.shape
    len_q, len_k = q.shape[1], k.shape[1]
    dQ = torch.zeros(Q.shape, dtype=dtype, device=q.device)
    # sums over pieces of the rows, rounded once
    sums = torch.promote_types(dtype, torch.float32)
    dK, dV = (torch.zeros(x.shape, dtype=sums, device=q.device) for x in (K, V))
    of_dQ, of_dK, of_dV = (torch.zeros_like(x) for x in (dQ, dK, dV))

    def mean_error(x: torch.Tensor) -> torch.Tensor:
        return rounding_errors(x, q.dtype) / math.sqrt(3)

    of_tanh = tanh_error(q, k, softmax_scale, softcap)
    of_factor = _TANH_SQUARED_ERROR if softcap else 0.0
    rows_at_once = max(1, min(n_rows, max_scores // len_k))
    at_once = max(1, max_scores // (rows_at_once * len_k))
    for first in range(0, n_sequences, at_once):
        some = slice(first, first + at_once)
        K_some, V_some = K[some].to(dtype), V[some].to(dtype)
        for row in range(0, n_rows, rows_at_once):
            rows = slice(row, min(row + rows_at_once, n_rows))
            query = torch.arange(rows.start, rows.stop, device=q.device) // group
            hidden = hidden_keys(query, len_q, len_k, 0 if causal else window_right, window_left)
            Q_some, dO_some = Q[some, rows].to(dtype), dO[some, rows].to(dtype)
            S = (Q_some @ K_some.mT).mul_(scale)
            factor = None
            if softcap:
                capped = S.div_(softcap).tanh_()
                factor = 1 - capped * capped
                S = capped * softcap
            if hidden is not None:
                S.masked_fill_(hidden, -math.inf)
            P = torch.softmax(S, dim=-1).nan_to_num_(nan=0.0)  # rows that see no key
            output = P @ V_some
            delta = (dO_some * output).sum(-1, keepdim=True)
            difference = dO_some @ V_some.mT - delta
            weights = P if factor is None else P * factor
            dS = weights * difference
            dQ[some, rows] = (dS @ K_some).mul_(scale)
            dK[some] += (dS.mT @ Q_some).mul_(scale)
            dV[some] += P.mT @ dO_some
            if with_allowed:
                of_delta = (dO_some * mean_error(output)).square().sum(-1, keepdim=True)
                of_P = (mean_error(P) + of_tanh * P).square()
                uncapped = P * difference
                of_dS = of_P * difference.square() + mean_error(uncapped).square()
                of_dS += (of_factor * uncapped).square()
                sums_of_dQ = of_dS @ K_some.square() + of_delta * (weights @ K_some).square()
                of_dQ[some, rows] = sums_of_dQ.mul_(scale**2)
                of_dS += of_delta * P.square()
                of_dK[some] += (of_dS.mT @ Q_some.square()).mul_(scale**2)
                of_dV[some] += of_P.mT @ dO_some.square()
    found = (dQ, dK, dV)
    allowed = (
        2 * (squares + mean_error(x).square()).sqrt() + rounding_errors(x, q.dtype)
        for squares, x in zip((of_dQ, of_dK, of_dV), found, strict=True)
    )
    both = (
        Gradients(*(_by_head(x.to(dtype), like) for x, like in zip(some, (q, k, v), strict=True)))
        for some in (found, allowed)
    )
    return next(both), next(both)


def gradients_float64(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> Gradients:
    """Return dQ, dK and dV in float64.

    `do`, `q`: (batch, len_q, heads, d_head). `k`, `v`: (batch, len_k, kv_heads, d_head). `options`:
    those of `attention_forward.reference.attention_float64`, without sinks.
    """
    return _gradients(do, q, k, v, torch.float64, **options)[0]


def gradients_reference(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> Reference:
    """Return the float64 gradients, and the bounds that the module's rules give for q's dtype.

    Arguments as in `gradients_float64`. Raises ValueError if plain PyTorch overflows on these
    inputs, so that they give no bound.
    """
    expected, allowed = _gradients(do, q, k, v, torch.float64, with_allowed=True, **options)
    plain, _ = _gradients(do, q, k, v, q.dtype, **options)
    sums_share = _sums_error(v.shape[-1]) / (torch.finfo(q.dtype).eps / 2)
    bounds = {}
    for name in GRADIENTS:
        right: torch.Tensor = getattr(expected, name)
        error = measure_error(getattr(plain, name), right)
        if not math.isfinite(error.max_abs):
            raise ValueError(
                f"plain PyTorch in {q.dtype} gives a non-finite {name} on these inputs, so that "
                "they set no bound: use smaller values"
            )
        norm = torch.linalg.vector_norm(right).item()
        roundings: torch.Tensor = getattr(allowed, name)
        of_all = torch.linalg.vector_norm(roundings).item()
        of_sums = sums_share * roundings.max().item()
        bounds[name] = OutputError(
            max_abs=2 * error.max_abs + half_ulp(right.abs().max().item(), q.dtype) + of_sums,
            relative=of_all / norm if of_all < norm else math.inf,
        )
    return Reference(expected._asdict(), bounds)


def reference(problem: AttentionBackward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the gradients of a problem; of sequences of various lengths each has the largest bound
    of a sequence. Raises as `gradients_reference` does."""
    given = {name: inputs[name] for name in ("do", "q", "k", "v")}
    options = options_of(problem, inputs)
    expected = {
        name: torch.zeros(given[of].shape, dtype=torch.float64, device=given[of].device)
        for name, of in GRADIENTS.items()
    }
    bounds = dict.fromkeys(GRADIENTS, OutputError(0.0, 0.0))
    for rows, keys in sequences_of(problem, inputs):
        own = {"do": rows, "q": rows, "k": keys, "v": keys}
        found = gradients_reference(*(given[name][:, own[name]] for name in given), **options)
        for name, of in GRADIENTS.items():
            expected[name][:, own[of]] = found.expected[name]
            bounds[name] = larger(bounds[name], found.bounds[name])
    return Reference(expected, bounds)
