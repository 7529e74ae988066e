"""The problems of the backward pass that are checked and measured, and distributions of inputs.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward import problems as forward
from flash_helpers.operations.attention_forward.problems import MEASURED_LENGTHS, N_HEADS

DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {name: f"Q, K, V: {text}; dO: normal" for name, text in forward.DISTRIBUTIONS.items()}
    | {"countable": "small integers known from their position, for debugging; dO too"}
)

__all__ = ["DISTRIBUTIONS", "MEASURED_LENGTHS", "measured"]


def measured(
    seq_len: int,
    heads: int = N_HEADS,
    kv_heads: int | None = None,
    causal: bool = False,
    batch: int | None = None,
) -> AttentionBackward:
    """Return the problem of one length that is measured: that of the forward pass.

    Arguments and errors are those of `attention_forward.problems.default_shape`.
    """
    return AttentionBackward.of(forward.default_shape(seq_len, heads, kv_heads, causal, batch))
