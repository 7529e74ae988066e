"""Arguments of FlashAttention's functions that nothing here computes; and their packed tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flash_helpers.runtime.tensors import check_types

# Values of an argument that change nothing, and the way out for all others.
_UNBUILT: dict[str, tuple[tuple[float, ...], str]] = {
    "dropout_p": (
        (0.0,),
        "pass 0.0, or call torch.nn.functional.scaled_dot_product_attention, which has dropout",
    ),
    "alibi_slopes": (
        (),
        "pass None, or call torch.nn.attention.flex_attention with the bias as its score_mod",
    ),
    "block_table": ((), "pass None, and k and v without pages"),
    "qv": ((), "pass None, q with qv behind it and k with v behind it along d_head"),
    "q_descale": ((), "pass None, and q in fp16 or bf16"),
    "k_descale": ((), "pass None, and k in fp16 or bf16"),
    "v_descale": ((), "pass None, and v in fp16 or bf16"),
    "seqused_q": ((), "pass None, and q and cu_seqlens_q of the rows that are used"),
    "seqused_k": ((), "pass None, and k, v and cu_seqlens_k of the rows that are used"),
    "attention_chunk": ((0,), "pass 0, and call once for each chunk of queries and its keys"),
    "num_splits": ((0, 1), "pass 1, which computes all keys of a query in one thread block"),
    "sm_margin": ((0,), "pass 0: the kernels use all SMs"),
}
# The same of functions on a cache.
_UNBUILT_ON_CACHE: dict[str, tuple[tuple[float, ...], str]] = {
    **_UNBUILT,
    "cache_leftpad": ((), "pass None, and sequences that begin at the first key of the cache"),
    "cu_seqlens_q": ((), "pass None, and q of (batch, len_q, heads, d_head)"),
    "cu_seqlens_k_new": ((), "pass None, and k and v of (batch, len_new, kv_heads, d_head)"),
    "max_seqlen_q": ((), "pass None, and q of (batch, len_q, heads, d_head)"),
    "scheduler_metadata": ((), "pass None: the kernels need no plan"),
}


def refuse_unbuilt_on_cache(**values: Any) -> None:
    """`refuse_unbuilt` for functions on a cache of keys."""
    _refuse(_UNBUILT_ON_CACHE, values)


def refuse_unbuilt(**values: Any) -> None:
    """Refuse arguments, by name, that ask for what is not built.

    Raises TypeError for what is no number where there should be one, ValueError for another value.
    """
    _refuse(_UNBUILT, values)


def _refuse(unbuilt: Mapping[str, tuple[tuple[float, ...], str]], values: dict[str, Any]) -> None:
    for name, value in values.items():
        usual, way_out = unbuilt[name]
        if not usual:
            if value is not None:
                raise ValueError(f"{name} is not built: {way_out}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}: pass a number")
        elif value not in usual:
            raise ValueError(f"{name} {value} is not built: {way_out}")


def unpacked(name: str, packed: torch.Tensor, axes: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors that one tensor holds side by side, in its dimension -3.

    axes: names of the dimensions; the packed one's is its size. Raises TypeError for what is no
    tensor, ValueError for another shape.
    """
    check_types({name: packed})
    if packed.ndim != len(axes) or packed.shape[-3] != int(axes[-3]):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}: pass ({', '.join(axes)})")
    return packed.unbind(-3)
