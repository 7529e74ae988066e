"""The grid of problems that the choice of a kernel is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.problems import default_shape

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_SOME = (512, 2048, 8192)
HEAD_SIZES = ((64, 64), (96, 96), (192, 192), (192, 128), (256, 256))
# Batch, heads and length where a GPU is not full, or where tiles are not.
_SHORT = ((1, 12, 128), (1, 16, 300), (4, 16, 300), (64, 12, 77), (64, 16, 197))
_ONE = tuple((1, 16, n) for n in (64, 512, 1024, 2048, 4096, 8192, 16384))
_FEW = ((4, 16, 64), (4, 16, 1024), (4, 16, 4096), (16, 16, 128), (64, 16, 64), (64, 16, 512))
_ONE_HEAD = ((1, 1, 512), (1, 1, 4096), (1, 1, 16384), (64, 1, 128), (64, 1, 1024), (64, 1, 4096))
_MANY_HEADS = ((1, 64, 128), (1, 64, 512), (1, 64, 2048), (1, 64, 8192), (16, 64, 300))


def _both(
    shapes: Sequence[tuple[int, int, int]], d_head: int = 128, d_v: int = 128
) -> Iterator[AttentionForward]:
    for (batch, heads, length), causal in itertools.product(shapes, (False, True)):
        yield AttentionForward(batch, heads, length, d_head, causal=causal, d_v=d_v)


def _usual(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the batch, heads and length of the problems that steps are measured on."""
    shapes = [default_shape(n) for n in lengths]
    return [(shape.batch, shape.heads, shape.len_q) for shape in shapes]


def _windows() -> Iterator[AttentionForward]:
    for n, causal in itertools.product((8192, 16384), (False, True)):
        batch = default_shape(n).batch
        right = None if causal else 1024
        yield AttentionForward(*(batch, 16, n), causal=causal, window_left=1024, window_right=right)


GROUPS: Mapping[str, tuple[AttentionForward, ...]] = MappingProxyType(
    {
        "usual": tuple(_both(_usual(LENGTHS))),
        **{
            f"d{d_head}" + f"_{d_v}" * (d_v != d_head): tuple(_both(_usual(_SOME), d_head, d_v))
            for d_head, d_v in HEAD_SIZES
        },
        "short": tuple(_both(_SHORT)),
        "short_d64": tuple(_both(_SHORT, 64, 64)),
        "window": tuple(_windows()),
        "softcap": tuple(
            AttentionForward(default_shape(n).batch, 16, n, causal=causal, softcap=50.0)
            for n in (2048, 8192)
            for causal in (False, True)
        ),
        # 800 tokens in the mean
        "lengths": tuple(
            AttentionForward(1, 16, 64 * 800, d_head, causal=causal, sequences=64)
            for d_head in (128, 64)
            for causal in (True, False)
        ),
        "few": tuple(_both((*_ONE, *_FEW))),
        "heads": tuple(_both((*_ONE_HEAD, *_MANY_HEADS))),
    }
)

Fields = Mapping[str, Any]


def _tile(
    B_r: int,
    B_c: int,
    K_slots: int,
    V_slots: int,
    *,
    ping_pong: bool = True,
    cluster: int = 1,
    Q_slots: int = 2,
) -> tuple[str, Fields]:
    fields = {"B_r": B_r, "B_c": B_c, "K_slots": K_slots, "V_slots": V_slots}
    fields |= {"ping_pong": ping_pong, "cluster": cluster, "Q_slots": Q_slots}
    return "general", fields


_LONG = {"B_r": 192, "B_c": 80, "K_slots": 3, "V_slots": 3}
_ONE_GROUP: Fields = {"ping_pong": False}
# by head size of Q and of V
COMPETING: Mapping[tuple[int, int], tuple[tuple[str, Fields], ...]] = MappingProxyType(
    {
        (128, 128): (
            *((step, {}) for step in ("h20", "h24", "h26", "h30")),
            *((step, {**_LONG, **more}) for step in ("h26", "h30") for more in ({}, _ONE_GROUP)),
            _tile(128, 128, 3, 2, cluster=2),
            _tile(128, 128, 3, 2),
            _tile(128, 128, 2, 2, Q_slots=3),
            _tile(128, 80, 3, 3, Q_slots=3),
            _tile(128, 80, 2, 2, Q_slots=4),
            _tile(128, 64, 4, 4),
            _tile(128, 64, 4, 4, Q_slots=3),
            _tile(64, 64, 4, 4, ping_pong=False),
            _tile(64, 128, 3, 2, ping_pong=False),
            _tile(192, 80, 3, 3),
            ("overlap", {}),
            ("overlap", {"B_r": 64}),
        ),
        (64, 64): (
            _tile(256, 64, 6, 6),
            _tile(256, 64, 6, 6, ping_pong=False),
            _tile(256, 64, 5, 5, ping_pong=False, Q_slots=3),
            _tile(256, 64, 4, 4, Q_slots=3),
            _tile(128, 80, 4, 4, Q_slots=4),
            _tile(128, 128, 4, 4),
            _tile(192, 128, 4, 4),
            _tile(192, 128, 3, 3, Q_slots=3),
            _tile(192, 128, 3, 3, ping_pong=False, Q_slots=3),
            _tile(192, 96, 5, 5, ping_pong=False),
            _tile(192, 96, 5, 5, ping_pong=False, Q_slots=1),
            _tile(192, 96, 4, 4, ping_pong=False, Q_slots=3),
            _tile(192, 96, 4, 4, Q_slots=3),
            _tile(192, 80, 5, 5),
            _tile(64, 64, 4, 4, ping_pong=False),
            ("overlap", {}),
            ("overlap", {"B_r": 64}),
        ),
        (96, 96): (
            _tile(128, 128, 3, 2, cluster=2),
            _tile(128, 128, 3, 2),
            _tile(128, 80, 3, 3, Q_slots=3),
            _tile(192, 96, 3, 2),
            _tile(192, 80, 3, 3),
            _tile(192, 80, 3, 3, ping_pong=False),
            ("overlap", {}),
        ),
        (192, 192): (
            _tile(128, 80, 2, 2),
            _tile(128, 80, 2, 2, ping_pong=False),
            _tile(128, 64, 3, 2),
            _tile(128, 64, 3, 2, ping_pong=False),
            _tile(128, 80, 3, 2, ping_pong=False, Q_slots=1),
            _tile(128, 96, 2, 2, ping_pong=False, Q_slots=1),
            ("overlap", {}),
        ),
        (192, 128): (
            _tile(128, 96, 2, 2),
            _tile(128, 96, 2, 2, ping_pong=False),
            _tile(128, 96, 2, 2, cluster=2),
            _tile(128, 80, 3, 2),
            _tile(128, 64, 3, 2, ping_pong=False),
        ),
        (256, 256): (
            _tile(128, 64, 2, 1, ping_pong=False),
            _tile(128, 64, 2, 1, ping_pong=False, cluster=2),
            _tile(128, 80, 2, 2, ping_pong=False, Q_slots=1),
            _tile(128, 80, 2, 2, ping_pong=False, cluster=2, Q_slots=1),
            _tile(128, 64, 3, 2, ping_pong=False, Q_slots=1),
            _tile(64, 64, 3, 2, ping_pong=False),
            _tile(64, 80, 2, 2, ping_pong=False),
            ("overlap", {}),
        ),
    }
)


def competing(problem: AttentionForward) -> tuple[tuple[str, Fields], ...]:
    """Return steps, or families for their last steps, and the fields in which a competing config
    differs from the usual one of the problem's head sizes."""
    return COMPETING[problem.d_head, problem.d_v]


_OTHER_KIND = 20.0  # octaves
# Problems of other head sizes are so far apart, and tell nothing of each other.
UNRELATED = 10 * _OTHER_KIND


def distance(one: AttentionForward, other: AttentionForward) -> float:
    """Return how far apart two problems are, in octaves of their sizes. Head sizes count most, then
    what a kernel is compiled for."""
    sizes = (
        (one.len_q, other.len_q),
        (one.len_k, other.len_k),
        (one.batch * one.heads, other.batch * other.heads),
    )
    octaves = sum(abs(math.log2(a / b)) for a, b in sizes)
    kinds = ((p.causal, p.has_window, p.softcap > 0, p.sequences > 0) for p in (one, other))
    octaves += _OTHER_KIND * sum(a != b for a, b in zip(*kinds, strict=True))
    heads = (one.d_head, one.d_v) == (other.d_head, other.d_v)
    return octaves if heads else octaves + UNRELATED
