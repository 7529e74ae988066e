"""An attention back end for diffusers: `model.set_attention_backend(register())`."""

from __future__ import annotations

from typing import Any

import torch

from flash_attention.flash_attn import flash_attn_func
from flash_attention.integrations import NAME

try:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
except ImportError as error:
    raise ImportError(f"diffusers is not there: pip install diffusers ({error})") from None

_OTHERS = 'call model.set_attention_backend("native")'


def register() -> str:
    """Make the kernels an attention back end of diffusers; return its name, for
    model.set_attention_backend() and the context manager attention_backend()."""
    names = AttentionBackendName
    if NAME not in names.__members__:
        # diffusers looks a back end up among the members of this enumeration, which has no way to
        # add one
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME, NAME
        names._member_map_[NAME] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME)
    _AttentionBackendRegistry.register(names(NAME))(attention_backend)
    return NAME


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    deterministic: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention; return o, as query, with return_lse (o, lse).

    query: (batch, len_q, heads, d_head). key, value: (batch, len_k, kv_heads, d_head).
    is_causal: aligned to the top left in diffusers, so that both lengths must be equal.
    deterministic: as for `attention`; attention_kwargs of a model pass it.

    Raises ValueError for a mask, dropout and context parallelism, and the errors of `attention`.
    """
    if attn_mask is not None:
        raise ValueError(
            f"attn_mask is a tensor, {tuple(attn_mask.shape)}, and no kernel reads one: pass "
            f"tokens without padding, and no mask, or {_OTHERS}"
        )
    if dropout_p:
        raise ValueError(f"dropout_p {dropout_p:g} is not built: call model.eval(), or {_OTHERS}")
    if _parallel_config is not None:
        raise ValueError(f"context parallelism is not built: use one device, or {_OTHERS}")
    if is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"is_causal has {query.shape[1]} queries and {key.shape[1]} keys, which the kernels "
            f"would align to the bottom right: {_OTHERS}"
        )
    found = flash_attn_func(
        *(query, key, value),
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_size,
        deterministic=deterministic,
        return_attn_probs=return_lse,
    )
    return found[:2] if isinstance(found, tuple) else found
