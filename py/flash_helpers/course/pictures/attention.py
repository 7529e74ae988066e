"""The picture of the algorithm: its tiles and loops."""

from __future__ import annotations

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
        f"Global memory, one head: tiles of {B_r} x {d_head}, {kib} KiB each.",
    )
    colours = {"Q": BLUE, "K": ORANGE, "V": GREEN, "O": PURPLE}
    index = {"Q": "i", "K": "j", "V": "j", "O": "i"}
    tiles = Grid(d, 78, d.y + 26, 98, 28, gap=30)
    columns = {name: tiles.middle(n) for n, name in enumerate(index)}
    for column, (name, x) in enumerate(columns.items()):
        d.bold(x, tiles.y - 8, name, "middle")
        used, rows = (_Q_TILE, B_r) if index[name] == "i" else (_KEY_TILE, B_c)
        for n in range(_TILES):
            label, colour = (f"{name}_{index[name]}", colours[name]) if n == used else ("", "plain")
            data = {"tile": name, "index": n, "rows": rows}
            tiles.cell(n, column, label, colour, strong=n == used, **data)
    top, bottom = tiles.y, tiles.top(_TILES)
    middle = (top + bottom) / 2 + 5
    for n in (1, 2):  # the loop over the keys
        x = tiles.left(n + 1) - 22
        d.arrow((x, top + 6), (x, bottom - 6))
        d.bold(x + 6, middle, "j")
    d.note(d.left, middle, "seq_len")

    y = bottom + 26
    d.small(d.left, y + 14, "shared")
    d.small(d.left, y + 30, "memory")
    for name in "QKV":
        d.cell(columns[name] - 44, y, 88, 36, f"{name}_{index[name]}: {kib} KiB", colours[name])
        d.arrow((columns[name], bottom + 2), (columns[name], y - 3))

    y += 74
    d.small(d.left, y + 23, "registers")
    stages = (
        ("S = Q_i @ K_j^T", GREY, 120, f"{B_r} x {B_c}"),
        ("P = softmax(S)", RED, 106, f"{B_r} x {B_c}"),
        ("O_i += P @ V_j", PURPLE, 112, f"{B_r} x {d_head}"),
    )
    x = tiles.x - 6
    for n, (label, colour, width, shape) in enumerate(stages):
        if n:
            d.arrow((x - 19, y + 18), (x - 3, y + 18))
        d.cell(x, y, width, 36, label, colour)
        d.note(x + width / 2, y + 52, shape, "middle")
        x += width + 22
    level = y - 18
    d.arrow((columns["Q"], y - 36), (columns["Q"], y - 3))
    d.arrow((columns["K"], y - 36), (columns["K"], level), (158, level), (158, y - 3))
    d.arrow((columns["V"], y - 36), (columns["V"], level), (400, level), (400, y - 3))
    d.arrow((430, y - 2), (430, bottom + 3))
    return d.result(
        y + 64,
        f"The thread blocks run side by side, one per tile of Q and head; over keys there is a "
        f"loop. At seq_len 4096 a thread block reads {4096 // B_c} tiles each of K and V: "
        f"{2 * 4096 // B_c} · {kib} KiB = {2 * 4096 // B_c * kib // 1024} MiB. S and P never leave "
        f"the registers. Shared memory: 3 · {kib} = {3 * kib} KiB.",
    )
