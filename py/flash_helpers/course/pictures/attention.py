"""Pictures of the algorithm: its tiles and loops, and the online softmax with numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flash_helpers.course.pictures.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Drawing, Grid
from flash_helpers.course.pictures.work import step_config, tile_bytes

_TILES = 4  # of the sequence that is drawn
_Q_TILE, _KEY_TILE = 1, 2  # the thread block, and the block of keys, that are drawn


def attention_tiles() -> Drawing:
    """Q, K, V, S, P and O, and what loops over what."""
    config = step_config(1)
    B_r, B_c, d_head = config.B_r, config.B_c, config.d_head
    kib = tile_bytes(config) // 1024
    d = Drawing(
        "A thread block keeps one tile of Q; K and V pass by",
        f"Q, K, V and O of one head in global memory, cut into tiles of {B_r} or {B_c} rows. A "
        "thread block copies one tile of Q, and one after the other each tile of K and V, to "
        "shared memory. In registers it computes S = Q K^T, P = softmax(S) and O += P V, and at "
        "the end writes its tile of O.",
    )
    colours = {"Q": BLUE, "K": ORANGE, "V": GREEN, "O": PURPLE}
    index = {"Q": "i", "K": "j", "V": "j", "O": "i"}
    tiles = Grid(d, 72, d.y + 46, 156, 30, gap=52)
    columns = {name: tiles.middle(n) for n, name in enumerate(index)}
    d.bold(d.left, d.y + 14, "global memory, one head")
    d.note(d.right, d.y + 14, f"tiles of {B_r} x {d_head}: {kib} KiB", "end")
    for column, (name, x) in enumerate(columns.items()):
        d.bold(x, tiles.y - 8, name, "middle")
        used, rows = (_Q_TILE, B_r) if index[name] == "i" else (_KEY_TILE, B_c)
        for n in range(_TILES):
            label, colour = (f"{name}_{index[name]}", colours[name]) if n == used else ("", "plain")
            data = {"tile": name, "index": n, "rows": rows}
            tiles.cell(n, column, label, colour, strong=n == used, **data)
    top, bottom = tiles.y, tiles.top(_TILES)
    middle = (top + bottom) / 2 + 5
    for name in "KV":  # the loop over the keys
        x = columns[name] + 64
        d.arrow((x, top + 6), (x, bottom - 6))
    for name in "KV":
        d.bold(columns[name] + 72, middle, "j")
    d.note(d.left, middle, "seq_len")

    y = bottom + 34
    d.bold(d.left, y, "shared memory")
    d.note(d.left, y + 17, "of thread block i")
    for name, x in {"Q": 160.0, "K": 316.0, "V": 472.0}.items():
        d.cell(x, y - 14, 116, 36, f"{name}_{index[name]} · {kib} KiB", colours[name])
        start = columns[name]
        d.arrow((start, bottom + 2), (start, y - 26), (x + 58, y - 26), (x + 58, y - 16))
    d.note(604, y + 9, f"{3 * kib} KiB")

    y += 78
    d.bold(d.left, y, "registers")
    d.note(d.left, y + 17, "16 rows a warp")
    stages = (
        ("S = Q_i @ K_j^T", GREY, f"{B_r} x {B_c}"),
        ("P = softmax(S)", RED, f"{B_r} x {B_c}"),
        ("O_i += P @ V_j", PURPLE, f"{B_r} x {d_head}"),
    )
    for n, (label, colour, shape) in enumerate(stages):
        x = 160.0 + 172 * n
        d.cell(x, y - 16, 140, 38, label, colour)
        d.note(x + 70, y + 38, shape, "middle")
        if n:
            d.arrow((x - 30, y + 3), (x - 3, y + 3))
    d.arrow((218, y - 54), (218, y - 18))
    d.arrow((374, y - 54), (374, y - 40), (250, y - 40), (250, y - 18))
    d.arrow((530, y - 54), (530, y - 18))
    d.arrow((644, y + 3), (672, y + 3), (672, top + 45), (646, top + 45))
    return d.result(
        y + 58,
        f"The thread blocks run side by side, one for each tile of Q and head; for keys there is a "
        f"loop. At seq_len 4096 a thread block reads {4096 // B_c} tiles each of K and V, "
        f"{2 * 4096 // B_c} · {kib} KiB = {2 * 4096 // B_c * kib // 1024} MiB; S and P, "
        f"4096 · 4096 for each head, never leave the registers.",
    )


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


def _sum_text(before: float, after: float) -> str:
    """What was summed before, rescaled, and what this block adds to it."""
    if not before:
        return f"{after:.3f}"
    return f"{before:.3f} + {after - before:.3f} = {after:.3f}"


def online_softmax() -> Drawing:
    """m, l and O of one row over three blocks of two keys."""
    steps = online_softmax_steps(SCORES, VALUES)
    d = Drawing(
        "Online softmax: one row, three blocks of two keys",
        "A table of the running maximum m, the running sum l and the unnormalised output O of one "
        "row after each of three blocks of keys. Where m grows, l and O of the blocks before are "
        "multiplied by e to the old m minus the new m. At the end O / l equals the plain softmax.",
        "Where the maximum m grows, what was summed before is multiplied by e^(old m - new m). "
        "Nothing is looked at twice.",
    )
    rows = {
        "S": ("scores", ORANGE),
        "V": ("values", GREEN),
        "m": ("maximum", RED),
        "rescale": ("", RED),
        "P": ("e^(S - m)", BLUE),
        "l": ("sum", BLUE),
        "O": ("output", PURPLE),
    }
    table = Grid(d, 118, d.y + 34, 198, 38, gap=28, below=10)
    for n, name in enumerate(rows):
        d.bold(d.left, table.top(n) + 18, name)
    for n, (note, _) in enumerate(rows.values()):
        if note:
            d.note(table.x - 10, table.top(n) + 18, note, "end")
    before = SoftmaxStep((), -math.inf, 0, (), 0, 0)
    for n, (step, V) in enumerate(zip(steps, VALUES, strict=True)):
        d.bold(table.middle(n), table.y - 10, f"block {n}", "middle")
        grows = n > 0 and step.m > before.m
        rescale = f"e^({before.m:g} - {step.m:g}) = {step.rescale:.3f}" if n else "nothing yet"
        texts = (
            ", ".join(f"{s:g}" for s in step.S),
            ", ".join(f"{v:g}" for v in V),
            f"{step.m:g}",
            rescale,
            ", ".join(f"{p:.3f}" for p in step.P),
            _sum_text(before.l * step.rescale, step.l),
            _sum_text(before.O * step.rescale, step.O),
        )
        for r, ((name, (_, colour)), text) in enumerate(zip(rows.items(), texts, strict=True)):
            if name == "rescale" and not grows:
                colour = "plain"
            data = {"block": n, "quantity": name, "value": getattr(step, name, "")}
            table.cell(r, n, text, colour, strong=name == "rescale" and grows, **data)
            if n and name in ("m", "l", "O"):
                y = table.top(r) + 14
                d.arrow((table.left(n) - 25, y), (table.left(n) - 3, y))
        before = step
    highest = max(s for block in SCORES for s in block)
    (plain,) = online_softmax_steps([sum(SCORES, ())], [sum(VALUES, ())])
    return d.result(
        table.top(len(rows)) + 8,
        f"O / l = {before.O:.3f} / {before.l:.3f} = {before.O / before.l:.2f}. The plain softmax "
        f"over all six keys, which needs the maximum {highest:g} first, gives "
        f"{plain.O / plain.l:.2f} too.",
    )
