"""The attention problems that a kernel takes. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.registry.problem import Element, Tensor

MAX_LENGTH = 2**31 - 1  # of queries and of keys: the kernels take them as an int
_ANY = 2**63 - 1

CAUSAL = "causal"
# Abilities of a kernel besides problems of various sizes.
TWO_LENGTHS = "two_lengths"  # queries and keys of different lengths
GROUPED_HEADS = "grouped_heads"  # several heads of Q for one of K and V
SOFTMAX_SCALE = "softmax_scale"
RETURN_LSE = "return_lse"
WINDOW = "window"
SOFTCAP = "softcap"
SINKS = "sinks"
VARLEN = "varlen"  # sequences of various lengths in one batch
ABILITIES = (
    *(TWO_LENGTHS, GROUPED_HEADS, SOFTMAX_SCALE, RETURN_LSE, WINDOW, SOFTCAP, SINKS, VARLEN),
)


def asked_for(problem: AttentionForward) -> dict[str, tuple[str, str]]:
    """Return the ABILITIES that a problem needs: its values in words, and the nearest values that
    every kernel takes."""
    found = {}
    if problem.len_q != problem.len_k:
        way_out = (
            "pad q to as many rows as k and v, and drop those of o"
            if problem.len_q < problem.len_k
            else f"split q into calls of {problem.len_k} rows"
        )
        found[TWO_LENGTHS] = (f"len_q {problem.len_q} with len_k {problem.len_k}", way_out)
    if problem.heads != problem.kv_heads:
        times = problem.heads // problem.kv_heads
        found[GROUPED_HEADS] = (
            f"heads {problem.heads} on {problem.kv_heads} of k and v",
            f"pass k.repeat_interleave({times}, dim=2), and v likewise",
        )
    if not problem.has_usual_scale:
        found[SOFTMAX_SCALE] = (
            f"softmax_scale {problem.softmax_scale}",
            "without softmax_scale it is 1/sqrt(d_head); multiply q by "
            "softmax_scale * sqrt(d_head) for another one",
        )
    if problem.return_lse:
        found[RETURN_LSE] = (
            "return_lse",
            "without return_lse=True the output alone is returned",
        )
    if problem.has_window:
        found[WINDOW] = (
            f"window_size ({_bound(problem.window_left)}, {_bound(problem.window_right)})",
            "without window_size every query sees all keys, or those that causal=True leaves; "
            "torch.nn.functional.scaled_dot_product_attention takes a window as attn_mask",
        )
    if problem.softcap:
        found[SOFTCAP] = (
            f"softcap {problem.softcap:g}",
            "without softcap the logits are not limited; PyTorch's flex_attention takes it as a "
            "score_mod",
        )
    if problem.sinks:
        found[SINKS] = (
            "sinks",
            "without sinks and with return_lse=True, multiply o by torch.sigmoid(lse - sinks) of "
            "its row",
        )
    if problem.sequences:
        found[VARLEN] = (
            f"{problem.sequences} sequences of various lengths",
            "call attention() for each sequence, as on q[begin:end][None]",
        )
    return found


def _bound(bound: int | None) -> int:
    """Return a bound of a window as `attention` takes it."""
    return -1 if bound is None else bound


# Ways out of a kernel that takes only problems with an ability, by that ability.
_EXACT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        WINDOW: ("no window", "choose the config without window, or pass window_size"),
        SOFTCAP: ("no softcap", "choose the config without softcap, or pass softcap"),
        VARLEN: ("no cu_seqlens", "choose the config without varlen, or pass cu_seqlens"),
    }
)
# Options with which a problem needs an ability: half of the keys, the softcap of Gemma 2, and as
# many sequences as there are batches.
_USUAL: Mapping[str, Callable[[AttentionForward], dict[str, Any]]] = MappingProxyType(
    {
        WINDOW: lambda problem: {"window_left": max(problem.len_k // 2 - 1, 0)},
        SOFTCAP: lambda _: {"softcap": 50.0},
        VARLEN: lambda problem: {"batch": 1, "sequences": problem.batch},
    }
)
# Options of a corner for each ability that is not about lengths; there are 6 heads. A softcap of 1
# is below most logits.
_CORNERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        GROUPED_HEADS: {"kv_heads": 2},
        SOFTMAX_SCALE: {"softmax_scale": 0.2},
        RETURN_LSE: {"return_lse": True},
        SOFTCAP: {"softcap": 1.0},
        SINKS: {"sinks": True},
    }
)


@dataclass(frozen=True)
class AttentionSupports:
    """Attention problems.

    `dtype`: element type of Q, K, V and O. `d_heads`: head sizes of Q and K. `d_v`: head size of V
    and O, that of Q and K if None. `blocks`: numbers of which the lengths of queries and keys must
    be multiples, by name; empty if any length is taken. `alignment`: bytes; the tensors `of_heads`
    begin at multiples of it, and all their strides but the last are multiples of it. The others
    begin at any element. `max_row_stride`, `max_stride`: largest stride in elements of the
    sequence, and of heads and batches. `max_tiles`: most tiles of B_r queries of one head, where
    one dimension of the grid has them all. `max_length`: most queries and most keys. `B_r`, `B_c`:
    rows per tile of queries and of keys. `causal`: whether the kernel takes causal problems, and no
    others. `abilities`: the ABILITIES that it has. `exact`: those of them, WINDOW, SOFTCAP or
    VARLEN, that are compiled in, so that the kernel takes problems that need them and no others.

    `problems`: class of the problems. `of_heads`: names of the tensors (batch, seq, heads, d_head),
    which are copied in whole chunks of elements. Kernels read and write the others by elements.
    """

    problems: ClassVar[type[AttentionForward]] = AttentionForward
    of_heads: ClassVar[frozenset[str]] = frozenset("qkvo")

    dtype: Element
    d_heads: tuple[int, ...]
    blocks: Mapping[str, int]
    alignment: int
    max_row_stride: int
    max_stride: int = _ANY
    max_heads: int = gpu.MAX_GRID[1]
    max_tiles: int = _ANY
    max_length: int = MAX_LENGTH
    B_r: int = 1
    B_c: int = 1
    causal: bool = False
    abilities: frozenset[str] = frozenset()
    d_v: int | None = None
    exact: frozenset[str] = frozenset()

    @property
    def options(self) -> Mapping[str, Any]:
        """The mask."""
        return {CAUSAL: self.causal}

    @property
    def sizes(self) -> Mapping[str, int]:
        """The head sizes, unless the kernel takes several."""
        if len(self.d_heads) > 1:
            return {}
        (d_head,) = self.d_heads
        return {"d_head": d_head, "d_v": self.d_v or d_head}

    @property
    def smallest(self) -> int:
        """The shortest sequence."""
        return self.shortest

    @property
    def shortest(self) -> int:
        """The shortest sequence; all lengths are multiples of it."""
        return math.lcm(*self.blocks.values())

    @property
    def whole(self) -> int:
        """The shortest sequence of whole tiles."""
        return math.lcm(self.shortest, self.B_r, self.B_c)

    def lacking(self, problem: AttentionForward) -> dict[str, tuple[str, str]]:
        """Return the head sizes and abilities that a problem needs and the kernel lacks, by name:
        the values in words, and the way out."""
        found = self._other_sizes(problem)
        if problem.causal != self.causal:
            found[CAUSAL] = (
                (CAUSAL, "without causal=True every query sees all keys")
                if problem.causal
                else (f"not {CAUSAL}", "choose the config without causal, or pass causal=True")
            )
        asked = asked_for(problem)
        found |= {name: _EXACT[name] for name in ABILITIES if name in self.exact - asked.keys()}
        return found | {name: text for name, text in asked.items() if name not in self.abilities}

    def _other_sizes(self, problem: AttentionForward) -> dict[str, tuple[str, str]]:
        """Return the head sizes of a problem that the kernel is not built for, as `lacking`."""
        found = {}
        largest = max(self.d_heads)
        if problem.d_head not in self.d_heads:
            scale = (
                f"pass softmax_scale={problem.softmax_scale:.6g}, which would be that of {largest}"
                if SOFTMAX_SCALE in self.abilities
                else f"scale q, since the kernels divide by sqrt({largest})"
            )
            way_out = (
                f"pad the last dimension with zeros to {largest}, and {scale}"
                if problem.d_head < largest
                else f"use {largest} at most, or torch.nn.functional.scaled_dot_product_attention"
            )
            found["d_head"] = (f"d_head {problem.d_head}", way_out)
        d_v = self.d_v or (problem.d_head if problem.d_head in self.d_heads else largest)
        if problem.d_v != d_v:
            way_out = (
                f"pad v with zeros to {d_v}, and drop those columns of o"
                if problem.d_v < d_v
                else f"split v into calls of {d_v} columns at most"
            )
            found["d_v"] = (f"d_v {problem.d_v} with d_head {problem.d_head}", way_out)
        return found

    def problem(
        self,
        batch: int,
        heads: int,
        len_q: int,
        len_k: int,
        *,
        d_head: int | None = None,
        **options: Any,
    ) -> AttentionForward:
        """Return a problem of these sizes, with the first head size by default, the kernel's dtype,
        and the options that are compiled in."""
        sizes = (batch, heads, len_q, d_head or self.d_heads[0], self.dtype)
        return self.adapted(self.problems(*sizes, len_k=len_k, **{"d_v": self.d_v, **options}))

    def adapted(self, problem: AttentionForward) -> AttentionForward:
        """Return the problem with the options that are compiled into the kernel: as they are, or
        usual ones where the problem lacks them."""
        changes: dict[str, Any] = {CAUSAL: True} if self.causal else {}
        for name in self.exact - asked_for(problem).keys():
            changes |= _USUAL[name](problem)
        return replace(problem, **changes)

    def refusal(self, problem: AttentionForward, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        for values, way_out in self.lacking(problem).values():
            return f"{values} is not supported by {kernel}: {way_out}"
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        for length_name, length in problem.lengths.items():
            for name, rows in self.blocks.items():
                if length % rows:
                    longer = -(-length // self.shortest) * self.shortest
                    return (
                        f"{length_name} {length} is not a multiple of {name} {rows} ({kernel}): "
                        f"use {longer}, or choose a config whose {name} divides it"
                    )
            if length > self.max_length:
                return (
                    f"{length_name} {length} is over the limit {self.max_length}: split the problem"
                )
        if problem.heads > self.max_heads:
            return (
                f"heads {problem.heads} is over the limit {self.max_heads} of a CUDA grid: split "
                "the call by heads"
            )
        per_head = -(-problem.len_q // self.B_r) + problem.sequences
        tiles = per_head * problem.heads * problem.batch
        if tiles > self.max_tiles:
            batches = problem.sequences or problem.batch
            return (
                f"batch {batches} with {problem.heads} heads has {tiles} tiles of queries, over "
                f"the limit {self.max_tiles} of a CUDA grid: split the call by batches"
            )
        return ""

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes."""
        return self.alignment if tensor.name in self.of_heads else tensor.element.bytes

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it can.
        Tensors without a head size are contiguous."""
        name = tensor.name
        if name not in self.of_heads:
            if strides == tensor.strides:
                return ""
            way_out = "pass another tensor" if tensor.is_output else "call .contiguous()"
            return (
                f"{name} has strides {strides} for shape {tensor.shape} and must be contiguous: "
                f"{way_out}"
            )
        *outer, last = strides
        if last != 1 and tensor.shape[-1] > 1:
            return (
                f"{name} has stride {last} in its last dimension and must have 1: call "
                ".contiguous()"
            )
        most = (self.max_stride, self.max_row_stride, self.max_stride)
        for axis, stride, limit in zip(("batch", "seq", "heads"), outer, most, strict=True):
            if stride * tensor.element.bytes % self.alignment:
                return (
                    f"{name} has {axis} stride {stride}, not a multiple of "
                    f"{self.alignment // tensor.element.bytes} elements ({self.alignment} bytes): "
                    "call .contiguous()"
                )
            if stride > limit:
                return (
                    f"{name} has {axis} stride {stride}, over the limit of {limit} elements: call "
                    ".contiguous()"
                )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        chunk = self.alignment // self.dtype.bytes
        lengths = f"multiples of {' and '.join(self.blocks)}" if self.blocks else "any"
        different = ", different ones" if TWO_LENGTHS in self.abilities else ""
        grouped = ", grouped" if GROUPED_HEADS in self.abilities else ""
        options = [CAUSAL] if self.causal else []
        named = (SOFTMAX_SCALE, RETURN_LSE, WINDOW, SOFTCAP, SINKS, VARLEN)
        options += [name for name in named if name in self.abilities]
        of_v = f" with {self.d_v} of V" if self.d_v else ""
        return {
            "d_head": ", ".join(map(str, self.d_heads)) + of_v,
            "seq_len": f"{lengths}{different}, up to {self.max_length:,}",
            "heads": f"up to {self.max_heads:,}{grouped}",
            "batches": "any number",
            "options": ", ".join(options) or "none",
            "strides": f"1 along d_head; else multiples of {chunk}, from row to row up to "
            f"{self.max_row_stride:,}",
        }

    def corners(self) -> Iterator[AttentionForward]:
        """Yield small problems at the edges of the declaration: one block; several, in which every
        index that a kernel may confuse differs; lengths around those of blocks; more queries than
        keys, and fewer; each ability, and all of them; windows. With grouped heads three heads
        share K and V, then two."""
        lengths = [*self._corner_lengths()]
        options = [_CORNERS[name] for name in ABILITIES if name in _CORNERS.keys() & self.abilities]
        together = {key: value for option in options for key, value in option.items()}
        cases: list[tuple[int, int, int, int, Mapping[str, Any]]] = [
            *((1, 1, *both, {}) for both in lengths[:-1]),
            *((1, 3 * option.get("kv_heads", 1), *lengths[-2], option) for option in options),
            (2, 4 if options else 3, *lengths[-1], together),
            *((1, 1, *both, window) for both, window in self._corner_windows(lengths)),
        ]
        if VARLEN in self.abilities:  # some have no queries, no keys, or one token
            cases += [
                (1, 2, 3 * self.B_r, 5 * self.B_c, {"sequences": 7}),
                (1, 1, self.B_r, self.B_c, {"sequences": 40}),
            ]
        for d_head in self.d_heads:
            for *sizes, option in cases:
                problem = self.problem(*sizes, d_head=d_head, **option)
                if not self.lacking(problem):  # as one key lacks a window
                    yield problem

    def _corner_windows(
        self, lengths: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], dict[str, int | None]]]:
        """Yield lengths and windows: one key; within a block; over a block to either side, or to
        one. Each has the most keys, and the lengths at which the most queries may see nothing. A
        causal kernel has the left bounds alone."""
        if WINDOW not in self.abilities:
            return
        most_keys = max(lengths, key=lambda both: both[1])
        most_blind = max(lengths, key=lambda both: both[0] - both[1])
        for left, right in ((0, 1), (1, 2), (self.B_c + 1, self.B_c - 1), (None, 3), (5, None)):
            if left is None and self.causal:
                continue
            window = {"window_left": left, "window_right": None if self.causal else right}
            yield from ((both, window) for both in {most_keys: 0, most_blind: 0})

    def _corner_lengths(self) -> Iterator[tuple[int, int]]:
        """Yield lengths of queries and keys; the last pair is for several batches and heads."""
        shortest, B_r, B_c = self.shortest, self.B_r, self.B_c
        yield shortest, shortest
        if self.blocks:
            yield 3 * shortest, 3 * shortest
            different = [(2 * shortest, shortest), (shortest, 2 * shortest)]
        else:
            yield B_r + 1, B_r + 1
            yield B_c - 1, B_c - 1
            different = [
                (1, 2 * B_c + 1),
                (2 * B_r + 1, B_c + 1),
                (B_r + 1, 1),
                (B_r - 1, 3 * B_c),
                (B_r, B_c - 1),
                (B_r + 1, 2 * B_c + 1),
            ]
        if TWO_LENGTHS in self.abilities:
            yield from different
