"""The problems of decode that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import (
    GROUPED_HEADS,
    RETURN_LSE,
    SINKS,
    SOFTCAP,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    WINDOW,
    AttentionSupports,
)
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.registry.problem import Element

PAGES = "pages"
PIECES, KEYS_PER_PIECE = "pieces", "keys_per_piece"
FP8_CACHE = "fp8_cache"
USUAL_PIECE = 1024  # keys of a piece of a fixed size, where a call names none
# What every kernel of the operation takes.
ALWAYS = frozenset({GROUPED_HEADS, RETURN_LSE, SINKS, SOFTCAP, SOFTMAX_SCALE, TWO_LENGTHS, WINDOW})


@dataclass(frozen=True)
class DecodeSupports(AttentionSupports):
    """Problems of decode, with the fields of `AttentionSupports`.

    B_r: queries and heads that share keys, in one tile. B_c: keys of a block. `pages`: whether the
    kernel takes a cache in pages. `max_blocks`: blocks of keys, each counted for each tile that
    reads it, of all sequences; None for any number. `max_pieces`: the most pieces that a call may
    ask for; 0 where none. `keys_per_piece`: whether it may ask for pieces of so many keys.
    `fp8_cache`: whether the kernel takes caches in fp8, and no others.
    """

    problems: ClassVar[type[AttentionForward]] = Decode
    of_heads: ClassVar[frozenset[str]] = frozenset("qkvo")

    pages: bool = False
    max_batch: int = gpu.MAX_GRID[0]
    max_blocks: int | None = None
    max_pieces: int = 1
    keys_per_piece: bool = False
    fp8_cache: bool = False

    @property
    def options(self) -> Mapping[str, Any]:
        """A cache in fp8; all other options come with the call."""
        return {FP8_CACHE: True} if self.fp8_cache else {}

    def adapted(self, problem: AttentionForward) -> AttentionForward:
        """Return the problem with the kernel's kind of cache; without scales if that is not in
        fp8."""
        assert isinstance(problem, Decode)
        k_scale, v_scale = (self.fp8_cache and has for has in (problem.k_scale, problem.v_scale))
        return replace(problem, fp8_cache=self.fp8_cache, k_scale=k_scale, v_scale=v_scale)

    def lacking(self, problem: AttentionForward) -> dict[str, tuple[str, str]]:
        """Return the head sizes of a problem that the kernel is not built for, pages and pieces;
        options come with the call."""
        found = self._other_sizes(problem)
        assert isinstance(problem, Decode)
        if problem.fp8_cache != self.fp8_cache:
            cache = f"a cache in {problem.cache_element.short}"
            way_out = (
                f"choose a step that takes it, or convert k and v to {self.dtype.short}"
                if problem.fp8_cache
                else f"choose a step that takes it, or convert k and v to {Element.FP8.torch_name}"
            )
            found[FP8_CACHE] = cache, way_out
        if problem.page_size and not self.pages:
            found[PAGES] = (
                f"page_size {problem.page_size}",
                "choose a step that takes pages, or gather the pages of each sequence",
            )
        if problem.pieces > self.max_pieces and self.max_pieces <= 1:
            found[PIECES] = (
                f"pieces {problem.pieces}",
                "choose a step that takes pieces, or leave pieces out",
            )
        if problem.keys_per_piece and not self.keys_per_piece:
            found[KEYS_PER_PIECE] = (
                f"keys_per_piece {problem.keys_per_piece}",
                "choose a step that takes keys_per_piece, or pass pieces",
            )
        return found

    def tiles(self, problem: Decode) -> int:
        """Return the tiles of queries of all heads of K, for one sequence."""
        per_head = -(-problem.len_q * (problem.heads // problem.kv_heads) // self.B_r)
        return problem.kv_heads * per_head

    def key_blocks(self, problem: Decode) -> int:
        """Return the blocks of keys of all tiles, if each sequence has all keys there is room for;
        one for a sequence without keys."""
        blocks = max(1, -(-problem.len_k // self.B_c))
        return problem.batch * self.tiles(problem) * blocks

    def refusal(self, problem: AttentionForward, kernel: str) -> str:
        """Return what `AttentionSupports.refusal` does, and the limits of a grid."""
        assert isinstance(problem, Decode)
        if reason := super().refusal(problem, kernel):
            return reason
        if problem.batch > self.max_batch:
            return (
                f"batch {problem.batch} is over the limit {self.max_batch} of a CUDA grid: split "
                "the call by sequences"
            )
        if (tiles := self.tiles(problem)) > self.max_heads:
            return (
                f"len_q {problem.len_q} with heads {problem.heads} on {problem.kv_heads} has "
                f"{tiles} tiles of queries, over the limit {self.max_heads} of a CUDA grid: split "
                "the call by heads"
            )
        if self.max_blocks is not None and (blocks := self.key_blocks(problem)) > self.max_blocks:
            return (
                f"batch {problem.batch} with len_k {problem.len_k} and heads {problem.heads} on "
                f"{problem.kv_heads} has {blocks} blocks of {self.B_c} keys, over the limit "
                f"{self.max_blocks} of an int: split the call by sequences"
            )
        if problem.pieces > max(self.max_pieces, 1):
            return (
                f"pieces {problem.pieces} is over the limit {self.max_pieces} of a CUDA grid: use "
                f"{self.max_pieces}"
            )
        return self._piece_refusal(problem, kernel)

    def _piece_refusal(self, problem: Decode, kernel: str) -> str:
        """Return the reason why pieces cannot have so many keys, with the way out; "" if they
        can."""
        keys, B_c = problem.keys_per_piece or USUAL_PIECE * self.keys_per_piece, self.B_c
        if keys % B_c:
            longer = -(-keys // B_c) * B_c
            return (
                f"keys_per_piece {keys} is not a multiple of the {B_c} keys that {kernel} computes "
                f"at once: use {longer}"
            )
        most = gpu.MAX_GRID[2]
        if keys and keys * most < problem.len_k:
            longer = -(-problem.len_k // (most * B_c)) * B_c
            return (
                f"keys_per_piece {keys} makes over {most} pieces of len_k {problem.len_k}, the "
                f"limit of a CUDA grid: use {longer} or more"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return what `AttentionSupports.described` does, and pages."""
        found = super().described()
        named = {PAGES: self.pages, PIECES: self.max_pieces > 1}
        named[KEYS_PER_PIECE] = self.keys_per_piece
        named |= dict.fromkeys((FP8_CACHE, "k_scale", "v_scale"), self.fp8_cache)
        if self.fp8_cache:
            found["strides"] += f"; of k and v multiples of {self.alignment}"
        found["options"] = ", ".join(
            [
                *("causal, cache_seqlens, cache_batch_idx", found["options"]),
                *(name for name, is_taken in named.items() if is_taken),
            ]
        )
        return found

    def corners(self) -> Iterator[Decode]:
        """Yield small problems at the edges of the declaration.

        One key; a block, and one key more or less; lengths that differ, with none and with all;
        each option, and all of them. Tiles of queries that are not full, and several. Windows
        within a block and over one. A cache that sequences share; one that kernels may cut; pieces
        of a number, and of a size; pages of one key, of a few, of a block.
        """
        B_c, B_r = self.B_c, self.B_r
        rows = B_r // 2 + 1  # queries of one head that do not fill a tile
        of_size = {"d_head": self.d_heads[0], "dtype": self.dtype, FP8_CACHE: self.fp8_cache}

        def make(batch: int, heads: int, len_k: int, **options: Any) -> Decode:
            return Decode(batch, heads, len_k=len_k, **{"kv_heads": 1, **of_size, **options})

        yield make(1, 1, 1)
        yield make(1, 2, B_c)
        yield make(1, 1, 3 * B_c + 1)
        yield make(2, 6, B_c - 1, kv_heads=2, softmax_scale=0.2, return_lse=True)
        yield make(5, 3, 2 * B_c + 1, total_k=5 * B_c, return_lse=True)
        yield make(4, 2, 2 * B_c, total_k=3 * B_c, caches=3, return_lse=True)
        for option in ({"softcap": 1.0}, {"sinks": True}):
            yield make(3, 4, B_c + 1, kv_heads=2, total_k=B_c + 3, return_lse=True, **option)
        for left, right in ((0, None), (3, 1), (B_c + 1, None), (None, 1)):
            window = {"window_left": left, "window_right": right}
            yield make(1, 2, 3 * B_c, len_q=3, **window)
        yield make(2, 2, 2 * B_c, len_q=rows, causal=True, total_k=B_c + 2, return_lse=True)
        yield make(3, 2, 8 * B_c + 5, total_k=8 * B_c + 65, return_lse=True)  # several pieces
        if self.max_pieces > 1:
            yield make(3, 2, 4 * B_c, total_k=5 * B_c + 5, pieces=3, return_lse=True)
        if self.keys_per_piece:
            yield make(
                *(3, 2, 5 * B_c), len_q=2, window_left=2 * B_c, total_k=6 * B_c + 5,
                keys_per_piece=B_c, return_lse=True,
            )  # fmt: skip
        if self.fp8_cache:
            for scales in ({"k_scale": True}, {"v_scale": True}):
                yield make(2, 4, B_c + 1, kv_heads=2, softcap=1.0, return_lse=True, **scales)
            yield make(
                *(2, 4, 8 * B_c + 5), kv_heads=2, k_scale=True, v_scale=True, sinks=True,
                return_lse=True,
            )  # fmt: skip
        yield make(1, 2 * B_r, B_c + 1, kv_heads=2, len_q=2, causal=True)
        yield make(
            *(3, 6, 3 * B_c), kv_heads=2, len_q=3, causal=True, window_left=B_c, total_k=4 * B_c,
            softcap=2.0, sinks=True, softmax_scale=0.3, return_lse=True,
        )  # fmt: skip
        if not self.pages:
            return
        for page_size in (1, 3, 16, B_c):
            room = page_size * -(-(2 * B_c + 1) // page_size)
            yield make(
                *(3, 4, room), kv_heads=2, page_size=page_size, total_k=2 * B_c + 5,
                pages=4 * -(-room // page_size), window_left=B_c, return_lse=True,
            )  # fmt: skip
        # more queries than keys, so that the first stand far before them, in room for pieces
        yield make(1, 1, 8 * B_c, len_q=300, causal=True, page_size=B_c, total_k=3, return_lse=True)
