"""What attention is, in float64, and how far from it an output may be.

The rule, for an output O of one dtype with unit roundoff u (2^-11 for fp16, 2^-8 for bf16) and the
float64 result R on the same inputs:

    max |O - R|          <=  2 max |plain - R|  +  half an ulp at max |R|
    ||O - R|| / ||R||    <=  u

`plain` is plain PyTorch, every operation rounded to the dtype. The second bound does not grow with
plain's error. A FlashAttention kernel rounds to the dtype twice, P before P @ V and O at the end;
all else is float32. A rounding changes a value by a fraction of at most u, which over many values
has a root mean square of at most u / sqrt(3), so the two together stay below 0.82 u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Elements of the score matrix held at once: 256 MiB in float64.
MAX_SCORES = 2**25


@dataclass(frozen=True)
class AttentionError:
    """Distance of an output from the float64 result, or the largest one allowed.

    max_abs: largest absolute difference of an element; NaN if any element is NaN.
    relative: Frobenius norm of the difference over that of the result.
    """

    max_abs: float
    relative: float

    def within(self, bound: AttentionError) -> bool:
        """True if both errors are finite and no larger than the bound's."""
        # every comparison with NaN is false
        return self.max_abs <= bound.max_abs < math.inf and self.relative <= bound.relative


@dataclass(frozen=True)
class AttentionReference:
    """The float64 result for some inputs, (batch, seq_len, heads, d_head), and the bound."""

    expected: torch.Tensor
    bound: AttentionError


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, max_scores: int
) -> torch.Tensor:
    if not q.shape == k.shape == v.shape or q.dim() != 4:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape "
            "(batch, seq_len, heads, d_head)"
        )
    batch, seq_len, heads, d_head = q.shape
    scale = 1 / math.sqrt(d_head)
    # (batch * heads, seq_len, d_head)
    Q, K, V = (x.transpose(1, 2).reshape(batch * heads, seq_len, d_head) for x in (q, k, v))
    output = torch.empty(batch * heads, seq_len, d_head, dtype=dtype, device=q.device)
    n_rows = max(1, min(seq_len, max_scores // seq_len))
    n_sequences = max(1, max_scores // (n_rows * seq_len))
    for first in range(0, batch * heads, n_sequences):
        some = slice(first, first + n_sequences)
        K_T, V_some = K[some].to(dtype).mT, V[some].to(dtype)
        for row in range(0, seq_len, n_rows):
            rows = slice(row, row + n_rows)
            S = (Q[some, rows].to(dtype) @ K_T).mul_(scale)
            output[some, rows] = torch.softmax(S, dim=-1) @ V_some
    return output.view(batch, heads, seq_len, d_head).transpose(1, 2)


def attention_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES
) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d_head)) V in float64.

    q, k, v: (batch, seq_len, heads, d_head), any floating dtype and strides, one device.
    max_scores: elements of the score matrix that are held at once.

    Returns a float64 tensor of the same shape. Raises ValueError if the shapes differ.
    """
    return _attention(q, k, v, torch.float64, max_scores)


def attention_same_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES
) -> torch.Tensor:
    """Plain PyTorch: the same formula with every operation's result rounded to q's dtype.

    Shapes and errors as in `attention_float64`; the result has q's dtype.
    """
    return _attention(q, k, v, q.dtype, max_scores)


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Half the distance between neighbours of `dtype` at `magnitude`: the largest rounding error
    of a value of that size."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(magnitude), info.tiny))
    return math.ldexp(info.eps, exponent - 1) / 2


def measure_error(output: torch.Tensor, expected: torch.Tensor) -> AttentionError:
    """Distance of `output` from the float64 `expected`, over all elements.

    Raises ValueError if the shapes differ.
    """
    if output.shape != expected.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}, the reference {tuple(expected.shape)}"
        )
    difference = output.double().sub_(expected)
    norm = torch.linalg.vector_norm(expected).item()
    error = torch.linalg.vector_norm(difference).item()
    return AttentionError(
        max_abs=difference.abs_().max().item(),
        relative=error / norm if norm else math.inf if error else 0.0,
    )


def relative_bound(dtype: torch.dtype) -> float:
    """Largest relative Frobenius error allowed: the unit roundoff of `dtype` (see the module)."""
    return torch.finfo(dtype).eps / 2


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_scores: int = MAX_SCORES
) -> AttentionReference:
    """The float64 result and the bound that the module's rule gives for q's dtype.

    Raises ValueError if the shapes differ, or if plain PyTorch overflows on these inputs, so that
    they give no bound.
    """
    expected = attention_float64(q, k, v, max_scores)
    plain = measure_error(attention_same_dtype(q, k, v, max_scores), expected)
    if not math.isfinite(plain.max_abs):
        raise ValueError(
            f"plain PyTorch in {q.dtype} gives a non-finite result on these inputs, so that they "
            "set no bound: use smaller values"
        )
    largest = expected.abs().max().item()
    bound = AttentionError(
        max_abs=2 * plain.max_abs + half_ulp(largest, q.dtype),
        relative=relative_bound(q.dtype),
    )
    return AttentionReference(expected, bound)
