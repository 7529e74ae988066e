"""The problems of the backward pass that a kernel takes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import AttentionSupports

DETERMINISTIC = "deterministic"


@dataclass(frozen=True)
class AttentionBackwardSupports(AttentionSupports):
    """Problems of the backward pass, with the fields of `AttentionSupports`.

    `min_scale`: the least softmax_scale. `deterministic`: whether every call gives the same bits.
    """

    problems: ClassVar[type[AttentionForward]] = AttentionBackward
    of_heads: ClassVar[frozenset[str]] = frozenset({"do", *"qkvo", "dq", "dk", "dv"})

    min_scale: float = 0.0
    deterministic: bool = True

    def lacking(self, problem: AttentionForward) -> dict[str, tuple[str, str]]:
        """Return what `AttentionSupports.lacking` does, and determinism."""
        found = super().lacking(problem)
        asked = isinstance(problem, AttentionBackward) and problem.deterministic
        if asked and not self.deterministic:
            found[DETERMINISTIC] = (
                DETERMINISTIC,
                "without deterministic=True the last bits of dq may differ from call to call",
            )
        return found

    def refusal(self, problem: AttentionForward, kernel: str) -> str:
        """Return what `AttentionSupports.refusal` does; blocks of keys are limited as tiles of
        queries are."""
        if reason := super().refusal(problem, kernel):
            return reason
        if problem.softmax_scale < self.min_scale:
            return (
                f"softmax_scale {problem.softmax_scale:g} is less than {self.min_scale:g}, and the "
                f"LSE divided by it would not be finite in {kernel}: multiply q by a part of it"
            )
        per_head = -(-problem.len_k // self.B_c) + problem.sequences
        if problem.sequences and per_head * self.B_c > self.max_length:
            return (
                f"{problem.sequences} sequences with {problem.len_k} keys have {per_head} tiles of "
                f"{self.B_c} keys, whose rows are over the limit {self.max_length}: split the call "
                "by sequences"
            )
        tiles = per_head * problem.kv_heads * problem.batch
        if tiles > self.max_tiles:
            return (
                f"batch {problem.batch} with {problem.kv_heads} heads of k has {tiles} tiles of "
                f"keys, over the limit {self.max_tiles} of a CUDA grid: split the call by batches"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return what `AttentionSupports.described` does, and determinism."""
        found = super().described()
        if self.deterministic:
            found["options"] += f", {DETERMINISTIC}"
        return found
