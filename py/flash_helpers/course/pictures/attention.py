"""Pictures of the algorithm: its tiles and loops, and the online softmax with numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flash_helpers.course.pictures.svg import (
    BLUE,
    GREEN,
    GREY,
    MARGIN,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    RED,
    SMALL,
    Drawing,
)
from flash_helpers.course.pictures.work import step_config
from flash_helpers.registry.problem import ELEMENT_BYTES

_TILES = 4  # of the sequence that is drawn
_Q_TILE, _KEY_TILE = 1, 2  # the thread block, and the block of keys, that are drawn
_COLOUR_OF = {"Q": BLUE, "K": ORANGE, "V": GREEN, "O": PURPLE}


def attention_tiles() -> Drawing:
    """Q, K, V, S, P and O, and what loops over what."""
    config = step_config(1)
    B_r, B_c, d_head = config.B_r, config.B_c, config.d_head
    kib = B_c * d_head * ELEMENT_BYTES // 1024
    d = Drawing(
        "attention_tiles",
        "A thread block keeps one tile of Q; K and V pass by",
        f"Q, K, V and O of one head in global memory, cut into tiles of {B_r} or {B_c} rows. A "
        "thread block copies one tile of Q, and one after the other each tile of K and V, to "
        "shared memory. In registers it computes S = Q K^T, P = softmax(S) and O += P V, and at "
        "the end writes its tile of O.",
    )
    width, height, top = 104.0, 30.0, d.top + 46
    xs = {"Q": 72.0, "K": 228.0, "V": 384.0, "O": 540.0}
    d.text(MARGIN, d.top + 14, "global memory, one head", bold=True)
    d.text(
        PAGE_WIDTH - MARGIN, d.top + 14, f"tiles of {B_r} x {d_head}: {kib} KiB", size=SMALL,
        anchor="end", colour="muted",
    )  # fmt: skip
    for name, x in xs.items():
        d.text(x + width / 2, top - 8, name, anchor="middle", bold=True)
        letter = "i" if name in "QO" else "j"
        used = _Q_TILE if letter == "i" else _KEY_TILE
        for n in range(_TILES):
            chosen = n == used
            d.cell(
                x,
                top + n * height,
                width,
                height,
                f"{name}_{letter}" if chosen else "",
                _COLOUR_OF[name] if chosen else "plain",
                strong=chosen,
                bold=chosen,
                data={"tile": name, "index": n, "rows": B_r if letter == "i" else B_c},
            )
    bottom = top + _TILES * height
    for name in "KV":  # the loop over the keys
        x = xs[name] + width + 12
        d.arrow([(x, top + 6), (x, bottom - 6)])
    d.text(xs["K"] + width + 20, (top + bottom) / 2 + 5, "j", bold=True)
    d.text(xs["V"] + width + 20, (top + bottom) / 2 + 5, "j", bold=True)
    d.text(16, (top + bottom) / 2 + 5, "seq_len", size=SMALL, colour="muted")

    y = bottom + 34
    d.text(MARGIN, y, "shared memory", bold=True)
    d.text(MARGIN, y + 17, "of thread block i", size=SMALL, colour="muted")
    box = {"Q": 160.0, "K": 316.0, "V": 472.0}
    for name, x in box.items():
        letter = "i" if name == "Q" else "j"
        d.cell(x, y - 14, 116, 36, f"{name}_{letter} · {kib} KiB", _COLOUR_OF[name])
        used = _Q_TILE if letter == "i" else _KEY_TILE
        start = (xs[name] + width / 2, top + _TILES * height + 2)
        d.arrow([start, (start[0], y - 26), (x + 58, y - 26), (x + 58, y - 16)])
    d.text(604, y + 9, f"{3 * kib} KiB", size=SMALL, colour="muted")

    y += 78
    d.text(MARGIN, y, "registers", bold=True)
    d.text(MARGIN, y + 17, "16 rows a warp", size=SMALL, colour="muted")
    stages = (
        ("S = Q_i @ K_j^T", GREY, f"{B_r} x {B_c}"),
        ("P = softmax(S)", RED, f"{B_r} x {B_c}"),
        ("O_i += P @ V_j", PURPLE, f"{B_r} x {d_head}"),
    )
    x = 160.0
    for n, (label, colour, shape) in enumerate(stages):
        d.cell(x, y - 16, 140, 38, label, colour)
        d.text(x + 70, y + 38, shape, size=SMALL, anchor="middle", colour="muted")
        if n:
            d.arrow([(x - 30, y + 3), (x - 3, y + 3)])
        x += 172
    d.arrow([(218, y - 54), (218, y - 18)])
    d.arrow([(374, y - 54), (374, y - 40), (250, y - 40), (250, y - 18)])
    d.arrow([(530, y - 54), (530, y - 18)])
    d.arrow([(644, y + 3), (672, y + 3), (672, top + 45), (646, top + 45)])
    d.result(
        y + 58,
        f"The thread blocks run side by side, one for each tile of Q and head; for keys there is a "
        f"loop. At seq_len 4096 a thread block reads {4096 // B_c} tiles each of K and V, "
        f"{2 * 4096 // B_c} · {kib} KiB = {2 * 4096 // B_c * kib // 1024} MiB; S and P, "
        f"4096 · 4096 for each head, never leave the registers.",
    )
    return d


@dataclass(frozen=True)
class SoftmaxStep:
    """A row's running softmax after one block of keys. rescale: of what was summed before."""

    S: tuple[float, ...]
    m: float
    rescale: float
    P: tuple[float, ...]
    l: float  # noqa: E741
    O: float  # noqa: E741


SCORES: tuple[tuple[float, ...], ...] = ((1, 2), (4, 3), (0, 2))
VALUES: tuple[tuple[float, ...], ...] = ((10, 20), (30, 40), (50, 60))


def online_softmax_steps(
    scores: Sequence[Sequence[float]], values: Sequence[Sequence[float]]
) -> list[SoftmaxStep]:
    """The recurrence of FlashAttention-2 for one row and one column of V, block by block."""
    steps: list[SoftmaxStep] = []
    m, l, O = -math.inf, 0.0, 0.0  # noqa: E741
    for S, V in zip(scores, values, strict=True):
        new_m = max(m, *S)
        rescale = math.exp(m - new_m)
        P = tuple(math.exp(s - new_m) for s in S)
        l = l * rescale + sum(P)  # noqa: E741
        O = O * rescale + sum(p * v for p, v in zip(P, V, strict=True))  # noqa: E741
        m = new_m
        steps.append(SoftmaxStep(tuple(S), m, rescale, P, l, O))
    return steps


def _figure(value: float) -> str:
    return f"{value:.3f}"


def _sum_text(before: float | None, after: float) -> str:
    """What was summed before, rescaled, and what this block adds to it."""
    if before is None:
        return _figure(after)
    return f"{_figure(before)} + {_figure(after - before)} = {_figure(after)}"


def online_softmax() -> Drawing:
    """m, l and O of one row over three blocks of two keys."""
    steps = online_softmax_steps(SCORES, VALUES)
    everything = [s for block in SCORES for s in block]
    d = Drawing(
        "online_softmax",
        "Online softmax: one row, three blocks of two keys",
        "A table of the running maximum m, the running sum l and the unnormalised output O of one "
        "row after each of three blocks of keys. Where m grows, l and O of the blocks before are "
        "multiplied by e to the old m minus the new m. At the end O / l equals the plain softmax.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "Where the maximum m grows, what was summed before is multiplied by e^(old m - new m). "
        "Nothing is looked at twice.",
        colour="muted",
    )
    left, width, gap, height = 118.0, 170.0, 28.0, 28.0
    rows = ("S", "V", "m", "rescale", "P", "l", "O")
    meaning = ("scores", "values", "maximum", "e^(Δm)", "e^(S - m)", "sum", "output")
    top = y + 34
    for n, name in enumerate(rows):
        at = top + n * (height + 10) + 18
        d.text(MARGIN, at, name, bold=True)
    notes = dict(zip(rows, meaning, strict=True))
    for n, name in enumerate(rows):
        if name != "rescale":
            at = top + n * (height + 10) + 18
            note = notes[name]
            d.text(left - 10, at, note, size=SMALL, anchor="end", colour="muted")
    for n, (step, V) in enumerate(zip(steps, VALUES, strict=True)):
        x = left + n * (width + gap)
        d.text(x + width / 2, top - 10, f"block {n}", anchor="middle", bold=True)
        before = steps[n - 1] if n else None
        grows = before is not None and step.m > before.m
        texts = {
            "S": ", ".join(f"{s:g}" for s in step.S),
            "V": ", ".join(f"{v:g}" for v in V),
            "m": f"{step.m:g}",
            "rescale": (
                "nothing yet"
                if before is None
                else f"e^({before.m:g} - {step.m:g}) = {_figure(step.rescale)}"
            ),
            "P": ", ".join(_figure(p) for p in step.P),
            "l": _sum_text(before.l * step.rescale if before else None, step.l),
            "O": _sum_text(before.O * step.rescale if before else None, step.O),
        }
        colours = {
            "S": ORANGE,
            "V": GREEN,
            "m": RED,
            "rescale": RED,
            "P": BLUE,
            "l": BLUE,
            "O": PURPLE,
        }
        for r, name in enumerate(rows):
            at = top + r * (height + 10)
            d.cell(
                x,
                at,
                width,
                height,
                texts[name],
                "plain" if name == "rescale" and not grows else colours[name],
                strong=name == "rescale" and grows,
                bold=name == "rescale" and grows,
                data={"block": n, "quantity": name, "value": getattr(step, name, "")},
            )
            if n and name in ("m", "l", "O"):
                d.arrow([(x - gap + 3, at + height / 2), (x - 3, at + height / 2)])
    last = steps[-1]
    plain_l = sum(math.exp(s - max(everything)) for s in everything)
    plain = (
        sum(
            math.exp(s - max(everything)) * v
            for s, v in zip(everything, (v for block in VALUES for v in block), strict=True)
        )
        / plain_l
    )
    d.result(
        top + len(rows) * (height + 10) + 8,
        f"O / l = {_figure(last.O)} / {_figure(last.l)} = {last.O / last.l:.2f}. The plain "
        f"softmax over all six keys, which needs the maximum {max(everything):g} first, gives "
        f"{plain:.2f} too.",
    )
    return d
