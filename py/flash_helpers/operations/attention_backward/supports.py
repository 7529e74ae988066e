"""The problems of the backward pass that a kernel takes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import AttentionSupports


@dataclass(frozen=True)
class AttentionBackwardSupports(AttentionSupports):
    """Problems of the backward pass, with the fields of `AttentionSupports`."""

    problems: ClassVar[type[AttentionForward]] = AttentionBackward
    of_heads: ClassVar[frozenset[str]] = frozenset({"do", *"qkvo", "dq", "dk", "dv"})
