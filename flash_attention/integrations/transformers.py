"""An attention implementation for transformers: `attn_implementation=register()`.

A model calls two functions. The first makes a mask, once in each forward pass: `attention_mask`
reads from transformers' mask function what a query may see, and refuses whatever a kernel cannot
compute. The second computes a layer's attention: `attention_forward`. Sequences with padding, or
packed into one row, are computed by `flash_attn_varlen_func`'s operator, without the padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from flash_attention._forward import attention
from flash_attention._varlen import varlen_attention
from flash_attention.integrations import NAME

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        packed_sequence_mask_function,
        remap_positions_for_packed_sequence,
        sliding_window_bidirectional_overlay,
        sliding_window_overlay,
    )
except ImportError as error:
    raise ImportError(
        f"transformers is not there, or older than 5.24: pip install 'transformers>=5.24' ({error})"
    ) from None

_OTHER = 'load the model with attn_implementation="eager"'
_OTHERS = 'load the model with attn_implementation="sdpa" or "eager"'
# Arguments of models with attention of their own kind, which change the result.
_UNBUILT = ("position_bias", "block_indices", "block_table")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register() -> str:
    """Make the kernels an attention implementation of transformers; return its name, for
    attn_implementation and for model.set_attn_implementation()."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


@dataclass(frozen=True, eq=False)
class Ragged:
    """The sequences of a batch without its padding.

    rows: indices of the queries and of the keys in (batch · length); None if there is no padding.
    lengths: cu_seqlens and longest lengths, in the order of `varlen_attention`.
    """

    rows: tuple[torch.Tensor, torch.Tensor] | None
    lengths: tuple[torch.Tensor, torch.Tensor, int, int]


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that a query sees. sizes: (batch, queries, keys), or None for any."""

    causal: bool
    window: tuple[int, int] = (-1, -1)
    ragged: Ragged | None = None
    sizes: tuple[int, int, int] | None = None


# -- masks -----------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Mask:
    """Return the mask of all layers of a kind.

    q_offset, kv_offset: position of the first query and of the first key.
    mask_function: a function of transformers that tells for indices whether a query sees a key.
    attention_mask: (batch, keys or more), true for keys that are no padding.

    Raises ValueError for other masks than causal and bidirectional ones, windows, padding and
    packed sequences; for keys behind the last query; for padding between keys, in a window; and for
    another shape of attention_mask.
    """
    causal, window, packed = _read(mask_function)
    if max(window) + 1 >= kv_length:
        window = (-1, -1)
    is_positional = causal or window != (-1, -1) or packed is not None
    last_query, last_key = int(q_offset) + q_length, int(kv_offset) + kv_length
    if is_positional and last_query != last_key:
        raise ValueError(
            f"the queries end at position {last_query} and the keys at {last_key}, as with a "
            f"static cache, and the kernels align them: use a dynamic cache, or {_OTHERS}"
        )
    ragged, sizes = None, (batch_size, q_length, kv_length)
    kept = None if attention_mask is None else attention_mask[:, -kv_length:].bool()
    if kept is not None and kept.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask has shape {tuple(kept.shape)}: pass (batch, keys), "
            f"{(batch_size, kv_length)}, with the keys of the cache"
        )
    if kept is not None and kept.all():
        kept = None
    if kept is not None and window != (-1, -1):
        _refuse_gaps(kept)
    if kept is not None or packed is not None:
        ragged = _ragged(sizes, kept, packed, is_positional)
    return Mask(causal, window, ragged, sizes)


def _refuse_gaps(kept: torch.Tensor) -> None:
    """Refuse padding between tokens, where a window counts it. kept: (batch, keys)."""
    begins = kept & ~torch.nn.functional.pad(kept, (1, 0))[:, :-1]
    split = (begins.sum(dim=1) > 1).nonzero()
    if len(split):
        raise ValueError(
            f"attention_mask has padding between the tokens of row {int(split[0])}, and the "
            f"window of a kernel would not count it: pad on one side, or {_OTHERS}"
        )


def _parts(function: Callable) -> Iterator[Callable]:
    """Yield a mask function and those that it combines."""
    yield function
    if isinstance(function, FunctionType):
        for value in inspect.getclosurevars(function).nonlocals.values():
            for each in value if isinstance(value, tuple) else (value,):
                if callable(each):
                    yield from _parts(each)


def _code(function: Callable) -> object:
    return getattr(function, "__code__", function)


_CAUSAL = _code(causal_mask_function)
_BIDIRECTIONAL = _code(bidirectional_mask_function)
_WINDOW = _code(sliding_window_overlay(1))
_WINDOW_AROUND = _code(sliding_window_bidirectional_overlay(1))
_PACKED = _code(packed_sequence_mask_function(torch.empty(0)))
_COMBINED = {
    _code(and_masks()),
    _code(remap_positions_for_packed_sequence(len, torch.empty(0))),
}


def _read(function: Callable) -> tuple[bool, tuple[int, int], torch.Tensor | None]:
    """Return whether a mask is causal, its window, and the number of the sequence of each token,
    (batch, queries), if several were packed into a row."""
    causal, window, packed = False, (-1, -1), None
    for part in _parts(function):
        code = _code(part)
        values = inspect.getclosurevars(part).nonlocals if isinstance(part, FunctionType) else {}
        if code is _CAUSAL:
            causal = True
        elif code is _WINDOW:
            window = (values["sliding_window"] - 1, -1)
        elif code is _WINDOW_AROUND:
            window = (values["sliding_window"],) * 2
        elif code is _PACKED:
            packed = values["packed_sequence_mask"]
        elif code is not _BIDIRECTIONAL and code not in _COMBINED:
            name = getattr(part, "__qualname__", repr(part))
            raise ValueError(f"no kernel takes the mask of transformers' {name}: {_OTHERS}")
    return causal, window, packed


def _ragged(
    sizes: tuple[int, int, int],
    kept: torch.Tensor | None,
    packed: torch.Tensor | None,
    is_positional: bool,
) -> Ragged:
    """Return the sequences of a batch.

    kept: (batch, keys), false for padding. packed: (batch, keys), numbers of sequences.
    is_positional: queries have the positions of the last keys; those of padding are left out.
    """
    batch, len_q, _ = sizes
    like = kept if kept is not None else packed
    assert like is not None
    rows = torch.arange(batch, device=like.device)[:, None]
    if packed is None:
        packed, each = torch.zeros_like(like, dtype=torch.int64), 1
    else:
        each = int(packed.max()) + 1
    kept = torch.ones_like(packed, dtype=torch.bool) if kept is None else kept
    numbers = rows * each + packed

    def sequences(kept: torch.Tensor, numbers: torch.Tensor) -> tuple[Any, torch.Tensor, int]:
        lengths = torch.bincount(numbers[kept], minlength=batch * each)
        begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return kept.flatten().nonzero().squeeze(1), begins, int(lengths.max())

    keys, begins_k, longest_k = sequences(kept, numbers)
    if is_positional:
        queries, begins_q, longest_q = sequences(kept[:, -len_q:], numbers[:, -len_q:])
    else:
        every = torch.ones(batch, len_q, dtype=torch.bool, device=like.device)
        queries, begins_q, longest_q = sequences(every, rows.expand(batch, len_q))
    return Ragged((queries, keys), (begins_q, begins_k, longest_q, longest_k))


# -- attention -------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    deterministic: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention; return (batch, len_q, heads, d_v), and None for the
    probabilities.

    query: (batch, heads, len_q, d_head). key, value: (batch, kv_heads, len_k, d_head).
    attention_mask: as `attention_mask` returns it; None if the model makes no mask. Only then do
        is_causal, the module's by default, and sliding_window count.
    dropout: 0. scaling: of logits, 1/sqrt(d_head) by default. softcap: as for `attention`.
    s_aux: sinks, (heads,). deterministic: as for `attention`.
    kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k: the sequences of one row.

    Raises ValueError for whatever no kernel takes, and the errors of `attention`.
    """
    _refuse(dropout, kwargs)
    mask = _found(attention_mask, module, is_causal, sliding_window, kwargs)
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if mask.sizes not in (None, sizes):
        raise ValueError(
            f"the mask is for (batch, queries, keys) {mask.sizes} and the layer has {sizes}: use "
            f"a dynamic cache, or {_OTHERS}"
        )
    options: dict[str, Any] = {
        "causal": mask.causal,
        "window_size": mask.window,
        "softcap": softcap or 0.0,
        "softmax_scale": scaling,
        "sinks": None if s_aux is None else s_aux.to(query.dtype),
        "deterministic": deterministic,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _compute(mask.ragged, q, k, v, options), None


def _compute(
    ragged: Ragged | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    if ragged is None:
        return _output(attention(q, k, v, **options))
    batch = len(q)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if ragged.rows is None:
        return _output(varlen_attention(q, k, v, *ragged.lengths, **options)).unflatten(
            0, (batch, -1)
        )
    queries, keys = ragged.rows
    found = _output(varlen_attention(q[queries], k[keys], v[keys], *ragged.lengths, **options))
    o = found.new_zeros(len(q), *found.shape[1:]).index_copy(0, queries, found)
    return o.unflatten(0, (batch, -1))


def _output(found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    assert isinstance(found, torch.Tensor), "the LSE was not asked for"
    return found


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"dropout {dropout:g} is not built: call model.eval(), set the config's "
            f"attention_dropout to 0, or {_OTHERS}"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions: no kernel keeps the probabilities: {_OTHER}")
    for name in _UNBUILT:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not built: {_OTHERS}")


def _found(
    mask: Mask | torch.Tensor | None,
    module: torch.nn.Module,
    is_causal: bool | None,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> Mask:
    """Return the mask of a call."""
    if isinstance(mask, torch.Tensor):
        raise ValueError(
            f"attention_mask is a tensor, {tuple(mask.shape)}, and no kernel reads one: pass the "
            f"model a padding mask, (batch, keys), or {_OTHERS}"
        )
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # transformers' flash implementations likewise count the query's own key
        window = (-1, -1) if sliding_window is None else (sliding_window - 1,) * 2
        mask = Mask(bool(causal), window)
    if mask.ragged is None and all(kwargs.get(name) is not None for name in _LENGTHS):
        queries, keys, longest_q, longest_k = (kwargs[name] for name in _LENGTHS)
        begins = queries.to(torch.int32), keys.to(torch.int32)
        ragged = Ragged(None, (*begins, int(longest_q), int(longest_k)))
        return Mask(mask.causal, mask.window, ragged, mask.sizes)
    return mask
