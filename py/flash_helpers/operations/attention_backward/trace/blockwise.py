"""The backward pass by blocks, with the roundings of the kernels, and the errors allowed of each
quantity.

S, P, dP and dS follow from Q, K, V, dO, O and the LSE as a kernel is given them. P and dS are
rounded to the inputs' dtype where they are multiplied. Sums grow by 16 queries or keys at a time,
in the order in which the kernel takes them. Every value is float64 until it is compared.

A quantity may differ by what roundings do to it. S, dP, delta and the LSE may differ as S of the
forward pass (`attention_forward.trace.compare`), P by what S and the LSE add to its exponent. A
factor carries that, and differs by a unit in the last place of the dtype. dS also carries the
rounding of P, and the error of dP - delta, which may cancel. Sums differ by what the errors of
their factors add up to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.trace.recorder import (
    BEGINS,
    CELL,
    FACTORS,
    NONE,
    SUMS,
    Record,
)
from flash_helpers.operations.attention_forward.reference import hidden_keys
from flash_helpers.operations.attention_forward.trace.compare import FP32_TOLERANCE

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Expected:
    """Values and the largest errors allowed of them, which broadcast to them."""

    values: torch.Tensor
    allowed: torch.Tensor


class Blockwise:
    """The quantities of a problem, by name, in the shapes of a kernel's record.

    `visible`: (queries, keys), whether a query sees a key. `scores`: quantities of any kernel.
    """

    def __init__(self, problem: AttentionBackward, inputs: Mapping[str, torch.Tensor]) -> None:
        """`inputs`: those of the problem, on the CPU. Raises ValueError for several sequences of
        various lengths."""
        if problem.sequences > 1:
            raise ValueError(f"{problem.sequences} sequences are not traced at once: use batch 1")
        self._problem = problem
        self._dtype = inputs["q"].dtype
        query = torch.arange(problem.len_q)
        hidden = hidden_keys(
            query,
            problem.len_q,
            problem.len_k,
            0 if problem.causal else problem.window_right,
            problem.window_left,
        )
        everything = torch.ones(problem.len_q, problem.len_k, dtype=torch.bool)
        self.visible = everything if hidden is None else ~hidden
        self._tensors = {
            name: _by_head(inputs[name], problem.heads) for name in ("q", "k", "v", "do", "o")
        }
        self.scores = self._scores(inputs["lse"].double()[..., None])

    def _scores(self, lse: torch.Tensor) -> dict[str, Expected]:
        problem = self._problem
        q, k, v, do, o = (self._tensors[name] for name in ("q", "k", "v", "do", "o"))
        fp32 = FP32_TOLERANCE["S"]
        found = {
            name: Expected(x[..., None, :], torch.zeros(1, dtype=torch.float64))
            for name, x in (("Q", q), ("K", k), ("dO", do), ("V", v))
        }
        S, dP = q @ k.mT, do @ v.mT
        logits, slope = S * problem.softmax_scale, torch.ones_like(S)
        if problem.softcap:
            capped = torch.tanh(logits / problem.softcap)
            logits, slope = capped * problem.softcap, 1 - capped**2
        # a query that sees no key has an LSE of -infinity; +infinity makes its P 0
        lse = lse.where(lse > -torch.inf, torch.inf) * _LOG2_E
        P = torch.exp2(logits * _LOG2_E - lse)
        delta, terms = (do * o).sum(-1, keepdim=True), (do * o).abs().sum(-1, keepdim=True)
        factor_of_P = (dP - delta) * slope
        for name, x in (("S", S), ("dP", dP)):
            found[name] = Expected(x, x.abs().amax(-1, keepdim=True) * fp32)
        found["LSE"] = Expected(lse.expand_as(S), lse.abs().nan_to_num(posinf=0.0) * fp32)
        found["delta"] = Expected(delta.expand_as(S), terms * fp32)
        exponents = S.abs().amax(-1, keepdim=True) * problem.softmax_scale + lse.abs() / _LOG2_E
        of_P = P * fp32 * (1 + exponents.nan_to_num(posinf=0.0)) + torch.finfo(torch.float32).tiny
        found["P"] = Expected(P, of_P)
        limits = torch.finfo(self._dtype)
        # a kernel may find dS from the rounded P
        of_dS = (of_P + (P + limits.tiny) * (limits.eps / 2)) * factor_of_P.abs()
        of_dS += P * (found["dP"].allowed + found["delta"].allowed)
        for name, factor in SUMS.values():
            x, before = (P, of_P) if factor == "P" else (P * factor_of_P, of_dS)
            x = x.where(self.visible, 0.0).to(self._dtype).double()
            allowed = before.where(self.visible, 0.0) + (x.abs() + limits.tiny) * limits.eps
            found[FACTORS[name]] = Expected(x, allowed)
        return found

    def scores_of(self, record: Record) -> dict[str, Expected]:
        """Return the scores of a kernel by its record. Where accumulators begin with the LSE or
        delta, fp32 has fewer digits for the products."""
        found = dict(self.scores)
        for name in record.begun:
            scale = self._problem.softmax_scale * _LOG2_E if name == "S" else 1.0
            begin = found[BEGINS[name]].values.abs().nan_to_num(posinf=0.0) / scale
            allowed = found[name].allowed + begin * FP32_TOLERANCE["S"]
            found[name] = Expected(found[name].values, allowed)
        return found

    def sums(self, name: str, record: Record, together: int) -> Expected:
        """Return dQ, dK or dV after each step of its sum, in the order of a kernel's record; NaN
        where it has no step. `together`: queries or keys of the depth after which a kernel begins a
        sum anew."""
        other = self._tensors[next(tensor for tensor, (of, _) in SUMS.items() if of == name)]
        given = self.scores[FACTORS[name]]
        pieces = []
        for x, y in ((given.values, other), (given.allowed, other.abs())):
            x = x if name == "dQ" else x.mT
            depths = zip(x.split(CELL, -1), y.split(CELL, -2), strict=True)
            pieces.append(torch.stack([a @ b for a, b in depths], dim=3))
        running = [torch.full_like(piece, torch.nan) for piece in pieces]
        group = 1 if name == "dQ" else self._problem.heads // self._problem.kv_heads
        for steps in _walks(name, record, group, -(-together // CELL)):
            rows = slice(steps[0][2] * CELL, (steps[0][2] + 1) * CELL)
            for total, piece in zip(running, pieces, strict=True):
                sum_so_far = torch.zeros_like(piece[0, 0, rows, 0])
                for batch, head, _, depth in steps:
                    sum_so_far = sum_so_far + piece[batch, head, rows, depth]
                    total[batch, head, rows, depth] = sum_so_far
        return Expected(*running)

    def outputs(self) -> dict[str, Expected]:
        """Return dq, dk and dv, rounded, by name of the output."""
        problem, found = self._problem, {}
        for tensor, (name, x) in SUMS.items():
            output, other, given = (
                name.lower(),
                self._tensors[tensor],
                self.scores[f"{x} of {name}"],
            )
            scale = 1.0 if name == "dV" else problem.softmax_scale
            heads = problem.heads if name == "dQ" else problem.kv_heads
            totals = []
            for a, b in ((given.values, other), (given.allowed, other.abs())):
                total = (a if name == "dQ" else a.mT) @ b * scale
                totals.append(total.unflatten(1, (heads, -1)).sum(2).transpose(1, 2))
            right = totals[0].to(self._dtype).double()
            eps = torch.finfo(self._dtype).eps
            found[output] = Expected(right, totals[1] + right.abs() * eps)
        return {output: found[output] for output in GRADIENTS}


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, heads of Q, length, d_head) in float64."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2).double()


def _walks(
    name: str, record: Record, group: int, together: int
) -> list[list[tuple[int, int, int, int]]]:
    """The steps of each sum, in their order: batch, head of Q, cell of the result's rows, cell of
    the depth. `group`: heads of Q that share the result. `together`: cells of the depth that do."""
    found: dict[tuple[int, ...], list[tuple[int, tuple[int, int, int, int]]]] = {}
    turns = record.turns[name]
    for batch, head, q_cell, k_cell in np.argwhere(turns != NONE).tolist():
        row, depth = (q_cell, k_cell) if name == "dQ" else (k_cell, q_cell)
        steps = found.setdefault((batch, head // group, row, depth // together), [])
        steps.append((int(turns[batch, head, q_cell, k_cell]), (batch, head, row, depth)))
    return [[step for _, step in sorted(steps)] for steps in found.values()]
