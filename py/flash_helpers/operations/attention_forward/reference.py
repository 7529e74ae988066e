"""Attention in float64, and the largest errors allowed of an output.

The bound of O is the rule of flash_helpers.check.errors. Its second part does not grow with the
error of plain PyTorch. A FlashAttention kernel rounds to the dtype twice, P before P @ V and O at
the end; everything else is float32. A rounding changes a value by a fraction of at most u. Over
many values that has a root mean square of at most u / sqrt(3), so the two roundings together stay
below 0.82 u. Where sinks or zeros in V leave results that are subnormal in fp16, rounding O changes
them by more than u, and the bound allows for that. With a softcap the hardware's tanh, which is
right to 2^-16 of its result, may move each logit and so the logarithm of each P: by 2^-16 of the
largest logit at most.

Shapes: q is (batch, len_q, heads, d_head), k is (batch, len_k, kv_heads, d_head), v is (batch,
len_k, kv_heads, d_v), and query head h attends to head h // (heads / kv_heads) of k and v. Query i
stands at key i + len_k - len_q, so that the last query stands at the last key. A causal mask hides
the keys behind that one, and a window hides those that are farther away than window_left before it
or window_right behind it. The first queries may see no key, as with len_q > len_k and a causal
mask: their output is 0, as flash-attn documents, and their LSE is -inf, the logarithm of an empty
sum, or the sink of their head.

The logit of query i and key j is s = softmax_scale q_i . k_j, or softcap tanh(s / softcap). The LSE
is the logarithm of the sum of exp over the logits of the keys that query i sees, and over the sink
of its head. `lse_bound` is the largest error allowed of a kernel's LSE.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    half_ulp,
    measure_error,
    rounding_errors,
)
from flash_helpers.operations.attention_forward.problem import AttentionForward

# Elements of the score matrix held at once: 256 MiB in float64.
MAX_SCORES = 2**25


def _attend(
    Q: torch.Tensor,
    K_T: torch.Tensor,
    V: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    hidden: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE of some rows, each of which sees a key. `hidden`: (rows, keys), True
    where a row does not see a key. `sink`: (..., rows)."""
    S = (Q @ K_T).mul_(scale)
    if softcap:
        S = S.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        S.masked_fill_(hidden, -math.inf)
    keys = S.shape[-1]
    if sink is not None:
        S = torch.cat((S, sink[..., None]), dim=-1)
    P = torch.softmax(S, dim=-1)
    # the largest of P belongs to the largest of S: exp(max S) / sum_j exp(S_j)
    return P[..., :keys] @ V, S.amax(-1) - P.amax(-1).log()


def hidden_keys(
    query: torch.Tensor, len_q: int, len_k: int, behind: int | None, before: int | None
) -> torch.Tensor | None:
    """Return (queries, keys), True where a query does not see a key; None if each sees all.

    `query`: numbers of queries. `behind`, `before`: most keys behind the query's own and before it
    that it sees; None is no limit.
    """
    if behind is None and before is None:
        return None
    ahead = torch.arange(len_k, device=query.device) - (query[:, None] + len_k - len_q)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if behind is not None:
        hidden |= ahead > behind
    if before is not None:
        hidden |= ahead < -before
    return hidden


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    max_scores: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE, every operation's result rounded to `dtype`."""
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or k.shape[:3] != v.shape[:3]
        or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])
        or 0 in (*q.shape, *k.shape, *v.shape)
        or q.shape[2] % k.shape[2]
        or (sinks is not None and sinks.shape != q.shape[2:3])
    ):
        raise ValueError(
            f"q {tuple(q.shape)} must be (batch, len_q, heads, d_head), k {tuple(k.shape)} (batch, "
            f"len_k, kv_heads, d_head), v {tuple(v.shape)} (batch, len_k, kv_heads, d_v), and "
            "sinks (heads,), with heads a multiple of kv_heads and no size 0"
        )
    batch, len_q, heads, d_head = q.shape
    _, len_k, kv_heads, d_v = v.shape
    behind = 0 if causal else window_right
    # queries that share keys lie together: row r of Q is query r // group
    group = heads // kv_heads
    n_sequences, n_rows = batch * kv_heads, len_q * group
    Q = q.unflatten(2, (kv_heads, group)).transpose(1, 2).reshape(n_sequences, n_rows, d_head)
    K, V = (x.transpose(1, 2).reshape(n_sequences, len_k, -1) for x in (k, v))
    output = torch.zeros(n_sequences, n_rows, d_v, dtype=dtype, device=q.device)
    lse = torch.full((n_sequences, n_rows), -math.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        lse = sinks.to(dtype).view(kv_heads, group).repeat(batch, len_q).contiguous()
    rows_at_once = max(1, min(n_rows, max_scores // len_k))
    sequences_at_once = max(1, max_scores // (rows_at_once * len_k))
    # those before it see no key
    first_row = 0 if behind is None else group * max(0, len_q - len_k - behind)
    for first in range(0, n_sequences, sequences_at_once):
        some = slice(first, first + sequences_at_once)
        K_T, V_some = K[some].to(dtype).mT, V[some].to(dtype)
        for row in range(first_row, n_rows, rows_at_once):
            rows = slice(row, min(row + rows_at_once, n_rows))
            query = torch.arange(rows.start, rows.stop, device=q.device) // group
            output[some, rows], lse[some, rows] = _attend(
                Q[some, rows].to(dtype),
                K_T,
                V_some,
                scale=_scale(q, softmax_scale),
                softcap=softcap,
                hidden=hidden_keys(query, len_q, len_k, behind, window_left),
                sink=None if sinks is None else lse[some, rows],
            )
    return (
        output.view(batch, kv_heads, len_q, group, d_v).transpose(1, 2).flatten(2, 3),
        lse.view(batch, kv_heads, len_q, group).transpose(2, 3).flatten(1, 2),
    )


def attention_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES, **options: Any
) -> torch.Tensor:
    """softmax(softmax_scale Q K^T) V in float64; the module defines shapes and mask.

    `q`: (batch, len_q, heads, d_head). `k`, `v`: (batch, len_k, kv_heads, d_head), or d_v in v.
    They may have any floating dtype and strides, and share one device. `max_scores`: elements of
    the score matrix that are held at once. `options`: those of `AttentionForward`: causal,
    softmax_scale, window_left, window_right and softcap, with its defaults; and sinks, a tensor
    (heads,).

    Returns a float64 tensor of the output's shape. Raises ValueError if the shapes do not fit
    together.
    """
    return _attention(q, k, v, torch.float64, max_scores, **options)[0]


def attention_same_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES, **options: Any
) -> torch.Tensor:
    """Plain PyTorch: the same formula with every operation's result rounded to q's dtype.

    Arguments and errors as in `attention_float64`; the result has q's dtype.
    """
    return _attention(q, k, v, q.dtype, max_scores, **options)[0]


def _largest_logit(q: torch.Tensor, k: torch.Tensor, softmax_scale: float | None) -> float:
    """A bound on the logits' size before a softcap, from the norms of q's and k's rows."""
    largest_q, largest_k = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).max().item() for x in (q, k)
    )
    return abs(_scale(q, softmax_scale)) * largest_q * largest_k


def tanh_error(
    q: torch.Tensor, k: torch.Tensor, softmax_scale: float | None, softcap: float
) -> float:
    """Largest error of a capped logit by tanh.approx. Its relative error is below 2^-16 for every
    float32 on a GPU of compute capability 7.5 (forums.developer.nvidia.com, topic 173291); the PTX
    ISA promises 2^-11."""
    return 2.0**-16 * min(_largest_logit(q, k, softmax_scale), softcap)


def lse_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> float:
    """Largest absolute error of an LSE allowed, a worst case to first order in u = 2^-24.

    It is for a kernel that keeps S, m and l in float32 and sums P to l before P is rounded to the
    dtype. With A >= scale sum_d |q_d k_d|, from the norms of q's and k's rows (Cauchy-Schwarz),
    the scores are within -A and A, m too, and |ln l| <= 2 A + ln len_k. In units of u, with A' for
    A from the second line on:

        3 d_head A           S: products are exact. A tensor core aligns at least 4 of them and
                             the accumulator to the largest and truncates each of these and the
                             sum (2 u each; Fasi et al., PeerJ CS 7:e330): 2 * 6/4 per product
        3 A'                 the factor scale log2(e): two constants and their product
        6 A'                 exponents: S and m times the factor, their difference; and the
                             differences of m when it grows, which add up to 2 A' at most
        5                    ex2.approx: 2 ulp from the correctly rounded result [1]
        2 len_k              l: an addition per key in any order, and per block of at least 8
                             keys a rescale (ex2.approx and a product, 6)
        4 (|ln l| + ln 2)    lg2.approx: 2^-22, relative, but absolute between 0.5 and 2 [1]
        2 |ln l|             times ln 2: constant and product
        3 A'                 m in natural units: factor (two roundings) and product
        A' + ln len_k        the sum of both, stored as float32

    A' is A without options. With a softcap A' is the smaller of A and softcap, and these are added:

        3 A                  the factor scale / softcap and two products; tanh raises no error
        2^8 A'               tanh.approx (`tanh_error`)

    With sinks A' is the largest finite one if that is larger, and l has one more addition.

    [1] PTX ISA 9.0, "Floating Point Instructions: ex2" and "lg2".

    The first line decides, unless the scores are small. Roundings that do not all point one way
    stay about a hundred times below the bound; sums of equal products, all cut the same way, reach
    a sixth of it.

    `q`, `k`: as in `attention_float64`.
    """
    A, of_tanh = _largest_logit(q, k, softmax_scale), tanh_error(q, k, softmax_scale, softcap)
    len_k, d_head = k.shape[1], k.shape[3]
    units, logits = 3 * d_head * A, A
    if softcap:
        logits = min(A, softcap)
        units += 3 * A
    if sinks is not None:
        len_k += 1
        finite = sinks[sinks.isfinite()].abs().double()
        logits = max([logits, *finite.tolist()])
    return of_tanh + 2.0**-24 * (units + 25 * logits + 2 * len_k + 7 * math.log(len_k) + 8)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES, **options: Any
) -> Reference:
    """Return the float64 results, o and lse, and the bounds that the module's rules give for q's
    dtype.

    Arguments as in `attention_float64`. Raises ValueError if the shapes do not fit together, or if
    plain PyTorch overflows on these inputs, so that they give no bound.
    """
    expected, lse = _attention(q, k, v, torch.float64, max_scores, **options)
    plain = measure_error(attention_same_dtype(q, k, v, max_scores, **options), expected)
    if not math.isfinite(plain.max_abs):
        raise ValueError(
            f"plain PyTorch in {q.dtype} gives a non-finite result on these inputs, so that they "
            "set no bound: use smaller values"
        )
    largest = expected.abs().max().item()
    scale, softcap = options.get("softmax_scale"), options.get("softcap", 0.0)
    norm = torch.linalg.vector_norm
    of_roundings = norm(rounding_errors(expected, q.dtype)) / norm(expected) if largest else 0.0
    bound = OutputError(
        max_abs=2 * plain.max_abs + half_ulp(largest, q.dtype),
        relative=float(of_roundings) + tanh_error(q, k, scale, softcap),
    )
    of_lse = OutputError(lse_bound(q, k, scale, softcap, options.get("sinks")), math.inf)
    return Reference({"o": expected, "lse": lse}, {"o": bound, "lse": of_lse})


def options_of(problem: AttentionForward, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the options of `attention_float64` that a problem and its inputs have."""
    return {"causal": problem.causal, "sinks": inputs.get("sinks"), **problem.call_options()}


def sequences_of(
    problem: AttentionForward, inputs: Mapping[str, torch.Tensor]
) -> list[tuple[slice, slice]]:
    """Return the rows of Q and of K that belong together, for each sequence that has both; without
    sequences of various lengths all of them."""
    if not problem.sequences:
        return [(slice(None), slice(None))]
    begins = (inputs[f"cu_seqlens_{name}"].tolist() for name in "qk")
    own = [[slice(*both) for both in itertools.pairwise(found)] for found in begins]
    return [
        (rows, keys)
        for rows, keys in zip(*own, strict=True)
        if rows.start < rows.stop and keys.start < keys.stop
    ]


def attention_of(
    problem: AttentionForward, inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of a problem in float64."""
    q, k, v = (inputs[name] for name in "qkv")
    options = options_of(problem, inputs)
    o, lse = without_keys(q, v, options["sinks"])
    for rows, keys in sequences_of(problem, inputs):
        o[:, rows], lse[:, :, rows] = _attention(
            q[:, rows], k[:, keys], v[:, keys], torch.float64, MAX_SCORES, **options
        )
    return o, lse


def without_keys(
    q: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 results of queries that see no key."""
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full(
        (q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=o.dtype, device=q.device
    )
    if sinks is not None:
        lse[:] = sinks.double()[:, None]
    return o, lse


def reference(problem: AttentionForward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem; of sequences of various lengths each output has the largest
    bound of a sequence. Raises as `attention_reference` does."""
    q, k, v = (inputs[name] for name in "qkv")
    options = options_of(problem, inputs)
    if not problem.sequences:
        return attention_reference(q, k, v, **options)
    o, lse = without_keys(q, v, options["sinks"])
    bounds: dict[str, OutputError] = dict.fromkeys(("o", "lse"), OutputError(0.0, 0.0))
    for rows, keys in sequences_of(problem, inputs):
        found = attention_reference(q[:, rows], k[:, keys], v[:, keys], **options)
        o[:, rows], lse[:, :, rows] = found.expected["o"], found.expected["lse"]
        bounds = {name: larger(bounds[name], found.bounds[name]) for name in bounds}
    return Reference({"o": o, "lse": lse}, bounds)


def larger(one: OutputError, other: OutputError) -> OutputError:
    """Return the larger of both numbers of two bounds."""
    return OutputError(max(one.max_abs, other.max_abs), max(one.relative, other.relative))
