"""The problem of decode: few queries of each sequence on a cache of keys. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward.problem import MAX_EXPORTED, AttentionForward
from flash_helpers.registry.problem import Constant, Element, Elements, Role, Tensor, option

_OF_HEADS = AttentionForward.axes["q"]
# Inputs that say where the keys of a sequence are, and their axes.
_PLACES = MappingProxyType(
    {
        "cache_seqlens": ("batch",),
        "block_table": ("batch", "blocks"),
        "cache_batch_idx": ("batch",),
    }
)
# Inputs by which a cache in fp8 is multiplied, and their axes. Fields tell whether they are there.
_SCALES = MappingProxyType(dict.fromkeys(("k_scale", "v_scale"), ("batch", "heads")))
# Sizes for which kernels are chosen whose results must not depend on the sizes of a call.
_MANY_SEQUENCES, _MANY_KEYS = 64, 8192


@dataclass(frozen=True, order=True)
class Decode(AttentionForward):
    """softmax(Q K^T · softmax_scale) V for the last queries of each sequence, whose keys lie in a
    cache.

    Q and O are (batch, len_q, heads, d_head). Without pages K and V are (batch, len_k, kv_heads,
    d_head), and with `caches` (caches, len_k, kv_heads, d_head): then sequence b has row
    cache_batch_idx[b], an input (batch,). With a `page_size` they are (pages, page_size, kv_heads,
    d_head), and key j of sequence b lies in page block_table[b, j // page_size], an input (batch,
    len_k / page_size).

    `total_k`: if it is not None, an input cache_seqlens (batch,) has the keys of each sequence, as
    many as this together; without it each has len_k. Keys behind the last are not read. All three
    inputs are int32. Entries of block_table whose keys no query sees may be anything.

    `pieces`: the keys of each sequence are computed in as many equal pieces, and these added up in
    order. `keys_per_piece`: in pieces of as many keys, which begin at the sequence's key 0. With
    either of them the bits of a sequence's results do not depend on the other sequences; with
    neither the kernel chooses.

    `fp8_cache`: K and V are e4m3. `k_scale`, `v_scale`: inputs (batch, kv_heads) in float32 by
    which they are multiplied, for each sequence and head.

    Masks are those of `AttentionForward` at each sequence's own length: the last query stands at
    the last key. One query sees all keys, and is never `causal`. Softcap, sinks, LSE and queries
    without a key are as there, too.

    len_k is a multiple of page_size; pages are as many as the sequences have together, unless they
    are given. Raises ValueError as `AttentionForward` does, for sizes that do not fit together, and
    for both kinds of pieces at once, and for scales of a cache that is not in fp8.
    """

    operation: ClassVar[str] = "decode"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {name: AttentionForward.axes[name] for name in (*"qkvo", "lse", "sinks")}
        | {**_PLACES, **_SCALES}
    )
    optional: ClassVar[frozenset[str]] = frozenset({"lse", "sinks", *_PLACES, *_SCALES})

    len_q: int = option("queries of each sequence", 1, title="queries", most=MAX_EXPORTED)
    _: KW_ONLY
    len_k: int = option("keys that there is room for in each sequence", 1, title="cache length")
    kv_heads: int = option("heads of K and V", 1, most=MAX_EXPORTED)
    total_k: int | None = option(
        "keys of all sequences, if their lengths differ; each has all by default",
        None,
        least=0,
        tensor="cache_seqlens",
    )
    page_size: int = option("keys of a page, 0 for a cache without pages", 0, least=0)
    pages: int = option("pages of the cache", 0, least=0)
    caches: int = option("rows of a cache that sequences share, 0 for their own", 0, least=0)
    pieces: int = option(
        "pieces of each sequence's keys, 0 for the kernel's choice", 0, least=0, exported=False
    )
    keys_per_piece: int = option("keys of a piece, 0 for the kernel's choice", 0, least=0)
    fp8_cache: bool = option("a cache in fp8 (e4m3)", False)
    k_scale: bool = option("a factor of K in fp8 for each sequence and head", False)
    v_scale: bool = option("a factor of V in fp8 for each sequence and head", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.len_q == 1:  # the last key is the query's own, and a window_right of 0 hides none
            object.__setattr__(self, "causal", False)
        if self.sequences:
            raise ValueError(
                f"sequences {self.sequences}: a cache has a row for each sequence: use total_k"
            )
        if self.d_v != self.d_head:
            raise ValueError(f"d_v {self.d_v} is not d_head {self.d_head}: pad the smaller one")
        if self.total_k is not None and not 0 <= self.total_k <= self.batch * self.len_k:
            raise ValueError(
                f"total_k {self.total_k} is not from 0 to {self.batch * self.len_k}, all keys of "
                f"{self.batch} sequences"
            )
        self._check_pages()
        for name in ("pieces", "keys_per_piece"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} {getattr(self, name)} is negative: use 0 for the kernel's choice"
                )
        if self.pieces and self.keys_per_piece:
            raise ValueError(
                f"pieces {self.pieces} with keys_per_piece {self.keys_per_piece}: pass one of them"
            )
        for name in _SCALES:
            if getattr(self, name) and not self.fp8_cache:
                raise ValueError(
                    f"{name} is given and the cache is in {self.dtype.short}: pass a cache in "
                    f"{Element.FP8.torch_name}, or leave {name} out"
                )

    def _check_pages(self) -> None:
        for name in ("page_size", "pages", "caches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative: use 0 for none")
        if not self.page_size:
            if self.pages:
                raise ValueError(f"pages {self.pages} without page_size: pass both")
            return
        if self.caches:
            raise ValueError(
                f"caches {self.caches} with page_size {self.page_size}: block_table says which "
                "pages a sequence has: leave out cache_batch_idx"
            )
        if self.len_k % self.page_size:
            longer = -(-self.len_k // self.page_size) * self.page_size
            raise ValueError(
                f"len_k {self.len_k} is not a multiple of page_size {self.page_size}: use {longer}"
            )
        if not self.pages:
            object.__setattr__(self, "pages", self.batch * self.blocks)

    @property
    def blocks(self) -> int:
        """Pages that a row of block_table has room for; 0 without pages."""
        return self.len_k // self.page_size if self.page_size else 0

    def _variations(self) -> list[str]:
        found = super()._variations()
        if self.total_k is not None:
            found.append(f"{self.total_k} keys together")
        if self.page_size:
            found.append(f"{self.pages} pages of {self.page_size}")
        if self.caches:
            found.append(f"{self.caches} rows of cache")
        if self.pieces:
            found.append(f"{self.pieces} pieces")
        if self.keys_per_piece:
            found.append(f"pieces of {self.keys_per_piece} keys")
        if self.fp8_cache:
            found.append("cache in fp8")
        found += [name for name in _SCALES if getattr(self, name)]
        return found

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float = 0.0,
        pieces: int = 0,
        keys_per_piece: int = 0,
        fp8_cache: bool = False,
    ) -> Decode:
        """Return the problem of q, k and v, and of the optional tensors that are given."""
        cls._fitting(shapes)
        paged = "block_table" in shapes
        of_k = ("pages", "page_size", *_OF_HEADS[2:]) if paged else _OF_HEADS
        axes = {**cls.axes, "k": of_k}
        for name in ("q", "k", *_PLACES):
            for axis, size in zip(axes[name], shapes.get(name, ()), strict=False):
                if size == 0:
                    raise ValueError(
                        f"{name} has {axis} 0, shape {shapes[name]}, and a kernel needs at least 1"
                    )
        batch, len_q, heads, d_head = shapes["q"]
        rows, room, kv_heads, _ = shapes["k"]
        len_k = shapes["block_table"][1] * room if paged else room
        return cls(
            *(batch, heads, len_q, d_head, dtype),
            len_k=len_k,
            kv_heads=kv_heads,
            causal=causal,
            softmax_scale=1 / math.sqrt(d_head) if softmax_scale is None else softmax_scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            sinks="sinks" in shapes,
            return_lse="lse" in shapes,
            total_k=batch * len_k if "cache_seqlens" in shapes else None,
            page_size=room if paged else 0,
            pages=rows if paged else 0,
            caches=rows if "cache_batch_idx" in shapes else 0,
            pieces=pieces,
            keys_per_piece=keys_per_piece,
            fp8_cache=fp8_cache,
            k_scale="k_scale" in shapes,
            v_scale="v_scale" in shapes,
        )

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the outputs without a kernel: no elements if there is no batch, head or query; 0,
        and an LSE of -infinity or the sinks, if the cache has room for no key."""
        if {"q", "k"} - shapes.keys():
            return None
        has_room = all(shapes["k"][:2]) and all(shapes.get("block_table", (1,)))
        if all(shapes["q"][:-1]) and has_room:
            return None
        cls._fitting(shapes)
        # refuses wrong options, and knows the tensors' elements and roles
        alike = {name: (1,) * (len(x) - 1) + x[-1:] for name, x in shapes.items() if len(x) == 4}
        alike |= {name: (1,) * len(shapes[name]) for name in shapes.keys() - alike.keys()}
        problem = cls.posed(alike, dtype, **options)
        found = {"q": shapes["q"], "o": shapes["q"], **shapes}
        found["lse"] = tuple(shapes["q"][n] for n in (0, 2, 1))
        tensors = tuple(replace(x, shape=found.get(x.name, x.shape)) for x in problem.tensors)
        lse: Elements = (lambda given: given["sinks"][:, None]) if problem.sinks else -math.inf
        return Constant(tensors, {"o": 0.0, "lse": lse})

    @classmethod
    def _fitting(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors but q and those of `_PLACES` and `_SCALES`.

        Raises ValueError for a shape that does not fit, for a d_head of 0, and for heads of Q if K
        and V have none.
        """
        batch, len_q, heads, d_head = shapes["q"]
        if "block_table" in shapes and "cache_batch_idx" in shapes:
            raise ValueError("block_table and cache_batch_idx are both given: pass one of them")
        own_rows = not {"block_table", "cache_batch_idx"} & shapes.keys()
        rows, room, kv_heads, _ = shapes["k"]
        if "block_table" in shapes and not room:
            raise ValueError(
                f"k has page_size 0, shape {shapes['k']}, with a block_table: use at least 1"
            )
        k = (batch if own_rows else rows, room, kv_heads, d_head)
        table = shapes.get("block_table", (batch, 1))
        fitting = {
            "k": ("q", "batch and d_head" if own_rows else "d_head", k),
            "v": ("k", "all sizes", k),
            "o": ("q", "all sizes", shapes["q"]),
            "lse": ("q", "batch, heads and seq", (batch, heads, len_q)),
            "sinks": ("q", "heads", (heads,)),
            "cache_seqlens": ("q", "batch", (batch,)),
            "block_table": ("q", "batch", (batch, table[-1])),
            "cache_batch_idx": ("q", "batch", (batch,)),
            **dict.fromkeys(_SCALES, ("q", "batch and heads of k", (batch, kv_heads))),
        }
        for name, (other, sizes, wanted) in fitting.items():
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {other} {shapes[other]}: {sizes} must be "
                    f"equal, {name} {wanted}"
                )
        if d_head == 0:
            raise ValueError(f"q has d_head 0, shape {shapes['q']}: use at least 1")
        if heads % max(kv_heads, 1) or (heads and not kv_heads):
            raise ValueError(
                f"k has heads {kv_heads}, shape {shapes['k']}, and q has {heads}: use a divisor "
                f"of {heads}"
            )
        others = {**_PLACES, **_SCALES}
        return {name: wanted for name, (_, _, wanted) in fitting.items() if name not in others}

    def call_options(self) -> dict[str, Any]:
        """Return the scale, the masks, the softcap and the pieces, and fp8_cache where it is so: no
        other option is compiled into a kernel."""
        found = {"pieces": self.pieces, "keys_per_piece": self.keys_per_piece}
        found |= {"fp8_cache": True} if self.fp8_cache else {}
        return {"causal": self.causal, **super().call_options(), **found}

    def record(self) -> dict[str, Any]:
        """Return the operation and all fields; those of a cache in fp8 only where there is one."""
        fp8 = "fp8_cache", *_SCALES
        return {k: v for k, v in super().record().items() if k not in fp8 or v}

    def for_choice(self) -> Decode:
        """Return many long sequences without masks in place of this problem's own, if its results
        must not depend on these: the same kernel then computes a sequence in every batch."""
        if not (self.pieces or self.keys_per_piece):
            return self
        own: dict[str, Any] = dict.fromkeys(("total_k", "window_left", "window_right"))
        own |= dict.fromkeys(("page_size", "pages", "caches"), 0)
        return replace(self, batch=_MANY_SEQUENCES, len_k=_MANY_KEYS, **own)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of K and V."""
        room = (self.pages, self.page_size) if self.page_size else (self._rows, self.len_k)
        return *room, self.kv_heads, self.d_head

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Shape of V."""
        return self.kv_shape

    @property
    def _rows(self) -> int:
        return self.caches or self.batch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, the output o, lse, sinks, the inputs that say where keys are, and the scales."""
        own = {tensor.name: tensor for tensor in super().tensors}
        own |= {name: replace(own[name], element=self.cache_element) for name in "kv"}
        given = {
            "cache_seqlens": ((self.batch,), self.total_k is not None),
            "block_table": ((self.batch, max(self.blocks, 1)), self.page_size > 0),
            "cache_batch_idx": ((self.batch,), self.caches > 0),
        }
        return (
            *(own[name] for name in (*"qkvo", "lse", "sinks")),
            *(
                Tensor(
                    name,
                    shape,
                    Element.INT32,
                    Role.IN if is_given else Role.OPTIONAL,
                    _PLACES[name],
                )
                for name, (shape, is_given) in given.items()
            ),
            *(
                Tensor(
                    name,
                    (self.batch, self.kv_heads),
                    Element.FP32,
                    Role.IN if getattr(self, name) else Role.OPTIONAL,
                    axes,
                )
                for name, axes in _SCALES.items()
            ),
        )

    @property
    def cache_element(self) -> Element:
        """Element type of K and V."""
        return Element.FP8 if self.fp8_cache else self.dtype

    @property
    def mean_k(self) -> int:
        """Keys of a sequence, on average if lengths differ, rounded up."""
        return self.len_k if self.total_k is None else -(-self.total_k // self.batch)

    def contiguous(self, len_k: int) -> AttentionForward:
        """Return the problem of each sequence, if it had `len_k` keys, as one of attention; sinks
        and LSE included."""
        return AttentionForward(
            *(self.batch, self.heads, self.len_q, self.d_head, self.dtype),
            len_k=len_k,
            kv_heads=self.kv_heads,
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            sinks=self.sinks,
            return_lse=self.return_lse,
        )

    @property
    def operations(self) -> int:
        """Floating-point operations of Q @ K^T and P @ V, of as many keys as a sequence has on
        average."""
        return self.contiguous(self.mean_k).operations if self.mean_k else 0

    @property
    def bytes(self) -> int:
        """Least bytes moved: Q, O and the rest once, and of K and V the keys that a query sees, in
        a shared row once. Where lengths differ under a window, no fewer than these."""
        once = (*self.inputs, *self.outputs)
        others = sum(tensor.bytes for tensor in once if tensor.name not in ("k", "v"))
        return others + 2 * self.keys_read * self.kv_heads * self.d_head * self.cache_element.bytes

    @property
    def keys_read(self) -> int:
        """Keys that some query sees, in all rows of the cache."""
        found = self.batch * self.len_k if self.total_k is None else self.total_k
        if self.caches:
            found = min(found, self.caches * self.len_k)
        if self.window_left is not None:
            found = min(found, self.batch * (self.window_left + self.len_q))
        return found

    def needed_blocks(self, length: int) -> range:
        """Return the entries of a row of block_table that a sequence of `length` keys needs: those
        with a key that some query sees. The last query sees the last key."""
        length = min(max(length, 0), self.len_k)
        hidden = 0 if self.window_left is None else length - self.len_q - self.window_left
        return range(max(hidden, 0) // self.page_size, -(-length // self.page_size))

    def wrong_values(self, values: Mapping[str, Any]) -> list[str]:
        """Return lengths over the room, entries of block_table that keys need and that name no
        page, and rows of the cache that do not exist."""
        lengths = values.get("cache_seqlens", [self.len_k] * self.batch)
        found = [
            f"cache_seqlens {length} of sequence {n} is over the room of {self.len_k} keys, which "
            f"count: pass at most {self.len_k}"
            for n, length in enumerate(lengths)
            if length > self.len_k
        ]
        for n, row in enumerate(values.get("block_table", ())):
            found += [
                f"block_table {row[block]} of sequence {n}, block {block}, names no page: pass one "
                f"from 0 to {self.pages - 1}"
                for block in self.needed_blocks(lengths[n])
                if not 0 <= row[block] < self.pages
            ]
        found += [
            f"cache_batch_idx {row} of sequence {n} names no row of the cache: pass one from 0 to "
            f"{self.caches - 1}"
            for n, row in enumerate(values.get("cache_batch_idx", ()))
            if not 0 <= row < self.caches
        ]
        return found
