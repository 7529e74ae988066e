"""The problem of an append to a cache of keys and values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward.problem import MAX_EXPORTED, AttentionForward
from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

_ROWS = AttentionForward.axes["q"]
_CACHE = ("row", "slot", *_ROWS[2:])
_TABLE = ("position", "pair")
_BATCH = ("batch",)
_INTEGERS = ("cache_seqlens", "rotary_seqlens", "block_table", "cache_batch_idx")


@dataclass(frozen=True, order=True)
class Append(Problem):
    """New keys and values of each sequence, written to its cache in place, and turned by rotary
    embedding on the way.

    k and v are (batch, len_new, kv_heads, d_head). Without pages k_cache and v_cache are (batch,
    room, kv_heads, d_head), and with `caches` (caches, room, kv_heads, d_head): then sequence b has
    row cache_batch_idx[b], an input (batch,). With a `page_size` they are (pages, page_size,
    kv_heads, d_head), and key j of sequence b lies in page block_table[b, j // page_size], an input
    (batch, room / page_size). New key i of sequence b is its key cache_seqlens[b] + i, an input
    (batch,). A key whose place is not in the cache is not written, and nothing else of the cache
    is: both are read and written, and a check fills them with NaN before a call.

    `rotary_dim`: if it is not 0, the first rotary_dim columns of each head of K are turned by the
    angles of their position, whose cosines and sines are in two tables, (positions, rotary_dim /
    2), of the dtype of k or with `fp32_tables` of fp32. A pair, a' = a cos - b sin and b' = a sin +
    b cos, is one column of each half of them, or two columns side by side if `interleaved`. New key
    i has the position cache_seqlens[b] + i, or with `rotary_seqlens` rotary_seqlens[b] + i, an
    input (batch,). A position that the tables lack is the nearest that they have.

    `heads`: if it is not 0, q (batch, len_q, heads, d_head) is turned too, into q_rotated. Query i
    has the position of new key i if `in_order`, else that of the first.

    All integer inputs are int32. `positions` are as many as the room unless they are given, and
    `pages` as many as the sequences have together. Two new keys with one place give the values of
    either.

    Raises ValueError for sizes that are not positive or do not fit together, and for q without
    tables.
    """

    operation: ClassVar[str] = "append"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **dict.fromkeys("kvq", _ROWS),
            **dict.fromkeys(("cos", "sin"), _TABLE),
            **dict.fromkeys(_INTEGERS, _BATCH),
            "block_table": ("batch", "block"),
            **dict.fromkeys(("k_cache", "v_cache"), _CACHE),
            "q_rotated": _ROWS,
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset({"q", "cos", "sin", "q_rotated", *_INTEGERS[1:]})
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    kv_heads: int = option("heads of K and V", most=MAX_EXPORTED)
    len_new: int = option("new keys of each sequence", title="new keys", most=MAX_EXPORTED)
    room: int = option("keys that there is room for in each sequence", title="cache length")
    d_head: int = option("head size", 128, most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    page_size: int = option("keys of a page, 0 for a cache without pages", 0, least=0)
    pages: int = option("pages of the cache", 0, least=0)
    caches: int = option("rows of a cache that sequences share, 0 for their own", 0, least=0)
    rotary_dim: int = option(
        "columns of a head that are turned, 0 for none", 0, least=0, most=MAX_EXPORTED
    )
    positions: int = option("rows of the tables of cosines and sines", 0, least=0)
    interleaved: bool = option("pairs are columns side by side", False)
    fp32_tables: bool = option("cosines and sines are fp32", False)
    rotary_seqlens: bool = option("positions differ from those in the cache", False)
    heads: int = option("heads of Q, 0 without queries", 0, least=0, most=MAX_EXPORTED)
    len_q: int = option("queries of each sequence", 0, least=0, title="queries", most=MAX_EXPORTED)
    in_order: bool = option("queries have the positions of new keys", True)

    def __post_init__(self) -> None:
        for name in ("batch", "kv_heads", "len_new", "room", "d_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        for name in ("page_size", "pages", "caches", "rotary_dim", "positions", "heads", "len_q"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative: use 0 for none")
        self._check_pages()
        self._check_rotary()

    def _check_pages(self) -> None:
        if not self.page_size:
            if self.pages:
                raise ValueError(f"pages {self.pages} without page_size: pass both")
            return
        if self.caches:
            raise ValueError(
                f"caches {self.caches} with page_size {self.page_size}: block_table says which "
                "pages a sequence has: leave out cache_batch_idx"
            )
        if self.room % self.page_size:
            more = -(-self.room // self.page_size) * self.page_size
            raise ValueError(
                f"room {self.room} is not a multiple of page_size {self.page_size}: use {more}"
            )
        if not self.pages:
            object.__setattr__(self, "pages", self.batch * self.blocks)

    def _check_rotary(self) -> None:
        if bool(self.heads) != bool(self.len_q):
            raise ValueError(f"heads {self.heads} with len_q {self.len_q}: pass both, or neither")
        if not self.rotary_dim:
            for name in ("positions", "rotary_seqlens", "heads"):
                if getattr(self, name):
                    raise ValueError(f"{name} {getattr(self, name)} without rotary_dim: pass both")
            return
        if self.rotary_dim % 2 or self.rotary_dim > self.d_head:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} is not an even number up to d_head {self.d_head}: "
                "use one"
            )
        if not self.positions:
            object.__setattr__(self, "positions", self.room)

    def __str__(self) -> str:
        sizes = ("batch", "kv_heads", "len_new", "room", "d_head")
        found = [f"{name} {getattr(self, name)}" for name in sizes]
        if self.page_size:
            found.append(f"{self.pages} pages of {self.page_size}")
        if self.caches:
            found.append(f"{self.caches} rows of cache")
        if self.rotary_dim:
            found.append(f"rotary_dim {self.rotary_dim} of {self.positions} positions")
        if self.heads:
            found += [f"heads {self.heads}", f"len_q {self.len_q}"]
        found += [] if self.in_order else ["queries at the first position"]
        flags = ("interleaved", "fp32_tables", "rotary_seqlens")
        return ", ".join([*found, *(name for name in flags if getattr(self, name))])

    @property
    def blocks(self) -> int:
        """Pages that a row of block_table has room for; 0 without pages."""
        return self.room // self.page_size if self.page_size else 0

    @property
    def rows(self) -> int:
        """Rows of the cache: pages, or those that sequences have."""
        return self.pages if self.page_size else self.caches or self.batch

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        interleaved: bool = False,
        fp32_tables: bool = False,
        in_order: bool = True,
    ) -> Append:
        """Return the problem of k, v, cache_seqlens and the caches, and of the optional tensors
        that are given. Raises KeyError for a cache that is missing."""
        for name, shape in shapes.items():
            for axis, size in zip(cls.axes[name], shape, strict=True):
                if size == 0:
                    raise ValueError(
                        f"{name} has {axis} 0, shape {shape}, and a kernel needs at least 1"
                    )
        if "block_table" in shapes and "cache_batch_idx" in shapes:
            raise ValueError("block_table and cache_batch_idx are both given: pass one of them")
        for one, other in (("cos", "sin"), ("sin", "cos"), ("q", "q_rotated"), ("q_rotated", "q")):
            if one in shapes and other not in shapes:
                raise ValueError(f"{one} is given without {other}: pass both, or neither")
        batch, len_new, kv_heads, d_head = shapes["k"]
        rows, slots, *_ = shapes["k_cache"]
        if "v_cache" not in shapes:
            raise KeyError("v_cache")  # no call makes a cache
        paged = "block_table" in shapes
        positions, pairs = shapes.get("cos", (0, 0))
        _, len_q, heads, _ = shapes.get("q", (0, 0, 0, 0))
        problem = cls(
            *(batch, kv_heads, len_new),
            shapes["block_table"][1] * slots if paged else slots,
            *(d_head, dtype),
            page_size=slots if paged else 0,
            pages=rows if paged else 0,
            caches=rows if "cache_batch_idx" in shapes else 0,
            rotary_dim=2 * pairs,
            positions=positions,
            interleaved=interleaved,
            fp32_tables=fp32_tables,
            rotary_seqlens="rotary_seqlens" in shapes,
            heads=heads,
            len_q=len_q,
            in_order=in_order,
        )
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and k {shapes['k']}: {tensor.name} must have "
                    f"shape {tensor.shape}"
                )
        return problem

    def call_options(self) -> dict[str, Any]:
        """Return the order of pairs, the dtype of the tables and the positions of queries, which
        no shape tells."""
        names = ("interleaved", "fp32_tables", "in_order")
        return {name: getattr(self, name) for name in names}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""
        new = (self.batch, self.len_new, self.kv_heads, self.d_head)
        q = (self.batch, max(self.len_q, 1), max(self.heads, 1), self.d_head)
        slots = self.page_size if self.page_size else self.room
        cache = (self.rows, slots, self.kv_heads, self.d_head)
        table = (max(self.positions, 1), max(self.rotary_dim // 2, 1))
        of_table = Element.FP32 if self.fp32_tables else self.dtype
        turns, has_q = self.rotary_dim > 0, self.heads > 0
        batch, of_batch = (self.batch,), Element.INT32
        found = {
            "k": (new, self.dtype, True),
            "v": (new, self.dtype, True),
            "q": (q, self.dtype, has_q),
            "cos": (table, of_table, turns),
            "sin": (table, of_table, turns),
            "cache_seqlens": (batch, of_batch, True),
            "rotary_seqlens": (batch, of_batch, self.rotary_seqlens),
            "block_table": ((*batch, max(self.blocks, 1)), of_batch, self.page_size > 0),
            "cache_batch_idx": (batch, of_batch, self.caches > 0),
            "k_cache": (cache, self.dtype, True),
            "v_cache": (cache, self.dtype, True),
            "q_rotated": (q, self.dtype, has_q),
        }
        roles = {"k_cache": Role.INOUT, "v_cache": Role.INOUT, "q_rotated": Role.OUT}
        return tuple(
            Tensor(
                *(name, shape, element),
                roles.get(name, Role.IN) if is_given else Role.OPTIONAL,
                self.axes[name],
            )
            for name, (shape, element, is_given) in found.items()
        )

    @property
    def rows_moved(self) -> int:
        """Rows of all heads, of d_head elements, that are read and written."""
        return self.batch * (2 * self.len_new * self.kv_heads + self.len_q * self.heads)

    @property
    def operations(self) -> int:
        """Floating-point operations: four products and two sums of each pair."""
        turned = self.batch * (self.len_new * self.kv_heads + self.len_q * self.heads)
        return 3 * turned * self.rotary_dim

    @property
    def bytes(self) -> int:
        """Least bytes moved: each row read once and written once, with the rows of the tables at
        its positions and the integers of its place."""
        tokens = max(self.len_new, self.len_q)
        angles = min(self.batch * tokens, self.positions) * self.rotary_dim
        of_table = Element.FP32 if self.fp32_tables else self.dtype
        integers = 1 + self.rotary_seqlens + (self.caches > 0)
        if self.page_size:
            integers += -(-self.len_new // self.page_size)
        return (
            2 * self.rows_moved * self.d_head * self.dtype.bytes
            + angles * of_table.bytes
            + self.batch * integers * Element.INT32.bytes
        )

    def wrong_values(self, values: Mapping[str, Any]) -> list[str]:
        """Return new keys without room, entries of block_table for them that name no page, and rows
        of the cache that do not exist."""
        found = []
        tables, rows = values.get("block_table"), values.get("cache_batch_idx")
        for n, length in enumerate(values.get("cache_seqlens", ())):
            if not 0 <= length <= self.room - self.len_new:
                found.append(
                    f"cache_seqlens {length} of sequence {n} leaves no room for {self.len_new} new "
                    f"keys, and those without are not written: pass one from 0 to "
                    f"{self.room - self.len_new}"
                )
            if tables is not None:
                keys = range(max(length, 0), min(length + self.len_new, self.room))
                found += [
                    f"block_table {tables[n][block]} of sequence {n}, block {block}, names no "
                    f"page, and its new keys are not written: pass one from 0 to {self.pages - 1}"
                    for block in dict.fromkeys(key // self.page_size for key in keys)
                    if not 0 <= tables[n][block] < self.pages
                ]
            if rows is not None and not 0 <= rows[n] < self.caches:
                found.append(
                    f"cache_batch_idx {rows[n]} of sequence {n} names no row of the cache, and its "
                    f"new keys are not written: pass one from 0 to {self.caches - 1}"
                )
        return found
