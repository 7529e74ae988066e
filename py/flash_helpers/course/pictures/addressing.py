"""Pictures of addresses, and of the softmax's arithmetic: where steps 6 to 16 save instructions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flash_helpers.course.pictures.banks import CHUNKS_AROUND, MATRIX_ROWS, address, swizzled
from flash_helpers.course.pictures.fragments import a_order
from flash_helpers.course.pictures.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Drawing, Grid
from flash_helpers.course.pictures.work import step_config, work_of
from flash_helpers.gpu import WARP
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    MMA_K,
    PIECE,
    PIECES,
    PROGRESSION_ROW_STRIDE,
)
from flash_helpers.registry.problem import ELEMENT_BYTES

_BIT = 22  # width of a bit
_L2_MB, _SMS = 50, 132  # NVIDIA H100 Tensor Core GPU Architecture, "H100 GPU": the SXM5 card
_WARPS_PER_SM = 12  # that step 14's launch bounds ask room for
_ROW_BYTES = step_config(1).d_head * ELEMENT_BYTES  # of a tile, and of a head's row


def _bits(d: Drawing, y: float, value: int, width: int, marked: Mapping[int, str]) -> None:
    """A binary number at the right margin, its highest bit first. marked: colours of some bits."""
    bits = Grid(d, d.right - width * _BIT, y, _BIT, 24)
    for n, label in enumerate(f"{value:0{width}b}"):
        colour = marked.get(width - 1 - n, "plain")
        bits.cell(0, n, label, colour, bold=colour != "plain")


def ffma_fold() -> Drawing:
    """Step 6: three instructions for each element of S become one."""
    config = step_config(6)
    rows = config.B_r // config.n_warps
    elements = rows * config.B_c // WARP
    scale, log2e = 1 / math.sqrt(config.d_head), math.log2(math.e)
    S, m = 30.0, 40.0
    d = Drawing(
        "Step 6: three instructions before the exponential become one",
        "Two chains from an element of S to an element of P. In step 5 S is multiplied by the "
        "scale, the maximum is subtracted, the difference is multiplied by log2 e, and ex2 "
        "follows. In step 6 one FFMA with the constant c = scale times log2 e does all three.",
        f"One element: S = {S:g}, and {m:g} is its row's maximum m. The scale is 1 / "
        f"√{config.d_head} = {scale:.4f}, log2 e is {log2e:.4f}, and their product c "
        f"{scale * log2e:.4f}.",
    )
    exponent = (S - m) * scale * log2e
    start, end = (0, "S", "", f"{S:g}", GREY), (4, "MUFU.EX2", "P = 2^x", f"{2**exponent:.3f}", RED)
    # place, instruction, operation, result and colour
    chains = {
        5: (
            start,
            (1, "FMUL", "· scale", f"{S * scale:.3f}", ORANGE),
            (2, "FADD", "- m", f"{(S - m) * scale:.3f}", ORANGE),
            (3, "FMUL", "· log2 e", f"{exponent:.3f}", ORANGE),
            end,
        ),
        6: (start, (1, "FFMA", "S · c - m · c", f"{exponent:.3f}", GREEN), end),
    }
    top, each = d.y + 34, 56
    for left, (step, chain) in zip((d.left, d.left + d.width / 2), chains.items(), strict=True):
        d.bold(left, top - 12, f"Step {step}")
        for k, (place, name, what, value, colour) in enumerate(chain):
            height = 36 + (2 * each if name == "FFMA" else 0)
            y = top + place * each
            data = {"step": step, "instruction": name, "value": value}
            d.cell(left, y, 92, height, name, colour, bold=True, **data)
            if what:
                d.small(left + 102, y + height / 2 - 4, what)
            d.text(left + 102, y + height / 2 + (14 if what else 5), f"= {value}")
            if k + 1 < len(chain):
                d.arrow((left + 46, y + height + 2), (left + 46, top + chain[k + 1][0] * each - 2))
    return d.result(
        top + 5 * each - 10,
        f"A thread has {rows} · {config.B_c} / {WARP} = {elements} elements of S per block of "
        f"keys: {elements} · 3 = {3 * elements} instructions become {elements}. m · c is one FMUL "
        "per row.",
    )


def lane_offset(lane: int, k: int) -> int:
    """Byte offset in a tile that a lane gives to ldmatrix for k-tile k of the piece in rows 0-15,
    by the formula: row and column, swizzled (steps 2 to 7)."""
    named = a_order(lane)
    return address(named.row, 2 * k + named.chunk, _ROW_BYTES, swizzled)


def constant_offset(lane: int, k: int) -> int:
    """The same as step 8 has it: one of four offsets a lane, and a constant."""
    base = lane_offset(lane, 0)
    return (base ^ k % 4 * 2 * CHUNK_BYTES) + k // 4 * CHUNKS_AROUND * CHUNK_BYTES


def swizzle_constants() -> Drawing:
    """Step 8: four offsets a lane, the rest are constants."""
    lane, n_k, width = 21, step_config(8).d_head // MMA_K, 12
    named = a_order(lane)
    base = lane_offset(lane, 0)
    d = Drawing(
        "Step 8: a k-tile flips two bits or adds a constant",
        "The byte offset of lane 21 in binary. The k-tile number changes only bits 5 and 6, by "
        "XOR, and bit 7, by addition. So eight k-tiles need four offsets computed before the loop, "
        "and a constant 128 added for the upper four.",
        f"Lane {lane} names row {named.row}, and of k-tile k the chunk 2k + {named.chunk}, which "
        f"lies at (2k + {named.chunk}) ^ {named.row % MATRIX_ROWS}. Its byte offset in binary:",
    )
    y = d.y + 26
    marked = dict.fromkeys((5, 6), ORANGE) | {7: GREEN}
    for high, low, label in ((11, 8, "row"), (7, 5, "k"), (4, 4, "half"), (3, 0, "byte")):
        x0, x1 = d.right - (high + 1) * _BIT, d.right - low * _BIT
        d.note((x0 + x1) / 2, y - 5, label, "middle")
        d.brace(x0 + 3, x1 - 3, y)
    y += 10
    for k in range(4):
        offset = lane_offset(lane, k)
        d.small(d.left, y + 17, f"k = {k}", bold=True)
        d.small(62, y + 17, f"{base} ^ {k * 2 * CHUNK_BYTES} = {offset}" if k else str(base))
        _bits(d, y, offset, width, marked)
        y += 28
    more = CHUNKS_AROUND * CHUNK_BYTES
    y = d.paragraph(d.left, y + 4, f"k = 4 to {n_k - 1}: the same four, and {more} more.")
    cells = Grid(d, d.left, y + 24, d.width / 4, 50, gap=6, below=22)
    for k in range(n_k):
        row, column = divmod(k, 4)
        offset = constant_offset(lane, k)
        text, colour = (f"{offset - more} + {more}", GREEN) if row else (str(offset), ORANGE)
        d.note(cells.middle(column), cells.top(row) - 6, f"k = {k}", "middle")
        cells.cell(row, column, text, colour, lane=lane, k=k, offset=offset)
    return d.result(
        cells.top(2) - 8,
        f"A warp has {work_of(step_config(8)).ldmatrix} ldmatrix per block of keys. Lane and k % "
        "4 are in four registers; tile, 16-row piece and k / 4 are constants in the instruction.",
    )


def output_swizzle() -> Drawing:
    """Step 11: a lane's place in the O tile, and the three bits that a column tile flips."""
    lane, n_shown = 13, 2
    g, t = divmod(lane, 4)
    d = Drawing(
        "Step 11: column tile n flips three bits of one address",
        "Above, the chunks in which the lanes of rows g = 0 to 7 store column tile 2 of O: chunk 2 "
        "XOR g. Below, the address of lane 13 in binary for three column tiles: only bits 4 to 6 "
        "change.",
        "Lane 4g + t stores two elements of O in row g of 8. Column tile n, 8 columns or one "
        f"chunk, lies at chunk n ^ g. Tile n = {n_shown}, and the lanes that store it:",
    )
    tile = Grid(d, 62, d.y + 30, 51, 21)
    d.note(d.left, tile.y - 8, "chunk")
    for place in range(CHUNKS_AROUND):
        d.note(tile.middle(place), tile.y - 8, str(place), "middle")
    for row in range(MATRIX_ROWS):
        d.note(d.left, tile.top(row) + 15, f"g = {row}")
        for place in range(CHUNKS_AROUND):
            stores = swizzled(row, n_shown) == place
            lanes, colour = (f"{4 * row}-{4 * row + 3}", ORANGE) if stores else ("", "plain")
            data = {"g": row, "place": place, "stores": int(stores)}
            tile.cell(row, place, lanes, colour, bold=stores, **data)
    y = tile.top(MATRIX_ROWS) + 14
    d.bold(d.left, y + 14, f"The address of lane {lane}: g = {g}, t = {t}")
    y += 24
    first = address(g, 0, _ROW_BYTES, swizzled) + 4 * t
    for n in (0, 1, 6):
        at = address(g, n, _ROW_BYTES, swizzled) + 4 * t
        d.bold(d.left, y + 17, f"n = {n}")
        d.text(72, y + 17, f"{first} ^ {16 * n} = {at}" if n else str(at), n=n, address=at)
        _bits(d, y, at, 10, dict.fromkeys(range(4, 7), ORANGE))
        y += 28
    return d.result(
        y + 4,
        f"n = 0: {g} · {_ROW_BYTES} + {g} · 16 + {t} · 4 = {first}. {CHUNKS_AROUND} of "
        f"{step_config(11).d_head // 8} column tiles take at most one XOR with a constant; the "
        f"others are {CHUNKS_AROUND * CHUNK_BYTES} bytes on, rows g + 8 are 8 · {_ROW_BYTES} = "
        f"{8 * _ROW_BYTES} on.",
    )


def copy_rows(number: int, thread: int) -> list[tuple[int, int]]:
    """Row and first column of each 16 bytes of a tile of K that a thread copies, in order."""
    config = step_config(number)
    width = PIECE if PIECES in config.step.traits else config.d_head
    chunk = CHUNK_BYTES // ELEMENT_BYTES
    a_row = width // chunk  # threads that share one
    rows_a_pass = config.n_threads // a_row
    return [
        (thread // a_row + row, thread % a_row * chunk + piece)
        for row in range(0, config.B_c, rows_a_pass)
        for piece in range(0, config.d_head, width)
    ]


def _row_addresses(number: int) -> list[int]:
    """The rows whose addresses thread 0 needs."""
    return sorted({row for row, _ in copy_rows(number, 0)})


def block_index() -> Drawing:
    """Step 12: addresses from an index, not one from the other."""
    rows = _row_addresses(12)
    n = len(rows)
    d = Drawing(
        "Step 12: base + row · stride, not a pointer that walks",
        "The eight addresses of a thread's copies of one tile. In step 11 each is the one before "
        "plus eight rows, a chain of 64-bit additions. In step 12 each is computed from the base "
        "on its own.",
        f"A thread copies {n} times 16 bytes of a tile of K, every {rows[1]} rows (thread 0: rows "
        f"{rows[0]}, {rows[1]}, … {rows[-1]}).",
    )
    y, place = d.y + 10, (d.width + 20) / n
    d.bold(d.left, y + 16, f"Step 11: the one before + {rows[1]} · stride")
    cells = Grid(d, d.left, y + 28, place, 34, gap=20)
    for k, row in enumerate(rows):
        cells.cell(0, k, str(row), BLUE, step=11, row=row)
        if k + 1 < n:
            level = cells.y + 17
            d.arrow((cells.left(k + 1) - 18, level), (cells.left(k + 1) - 2, level))
    d.small(d.left, y + 80, "2 IADD3 each, one after the other")
    y += 98
    d.bold(d.left, y + 16, "Step 12: base + row · stride")
    middle, cells = d.left + d.width / 2, Grid(d, d.left, y + 94, place, 34, gap=20)
    d.cell(middle - 66, y + 28, 132, 30, "base of K, stride", ORANGE)
    for k, row in enumerate(rows):
        d.arrow((middle + (k - 3.5) * 15, y + 60), (cells.middle(k), y + 91))
        cells.cell(0, k, str(row), GREEN, step=12, row=row)
    d.small(d.left, y + 146, "one IMAD.WIDE each, in any order")
    return d.result(
        y + 158,
        f"A block of keys, K and V: 2 tiles · {n} addresses · 2 IADD3 = {2 * n * 2} against "
        f"2 · {n} = {2 * n} IMAD.WIDE. Both factors must have 32 bits for that.",
    )


def backwards() -> Drawing:
    """Step 13: the row of the next block is counter, address and condition."""
    config, seq_len = step_config(13), 512
    n, B_c = seq_len // config.B_c, config.B_c
    d = Drawing(
        "Step 13: count the rows down, stop below zero",
        f"{n} blocks of keys in a row. Forwards a counter j runs up and is compared with the "
        "number of blocks. Backwards the first row of the next block runs down by 64 and the loop "
        "ends when it is negative.",
        f"seq_len {seq_len}, B_c {B_c}: {n} blocks of keys.",
    )
    gap = 6
    y, place = d.y + 10, (d.width + gap) / (n + 1)
    first, end = d.left + place, d.right

    def blocks(step: int, name: str, each: int, colour: str) -> None:
        """What counts the blocks: its value in each."""
        cells = Grid(d, first, y + 36, place, 30, gap=gap)
        d.bold(d.left, y + 16, f"Step {step}: {name}")
        for k in range(n):
            cells.cell(0, k, str(k * each), colour, step=step, value=k * each)

    blocks(12, "j", 1, BLUE)
    d.arrow((first, y + 28), (end, y + 28))
    d.small(first, y + 84, f"go on if j < {n}; address: j · {B_c} rows; a register for {n}")
    y += 102
    blocks(13, "next_key", B_c, GREEN)
    d.cell(d.left, y + 36, place - gap, 30, str(-B_c), RED, dashed=True)
    d.arrow((end, y + 28), (d.left, y + 28))
    d.small(d.left, y + 84, "stop", bold=True)
    d.small(first, y + 84, "go on if next_key >= 0; address: next_key rows")
    return d.result(
        y + 98,
        f"The first block of keys is row {seq_len} - {B_c} = {seq_len - B_c}; after {n} steps "
        f"next_key is {seq_len} - {n + 1} · {B_c} = {seq_len - (n + 1) * B_c}.",
    )


def cache_policy() -> Drawing:
    """Step 14: what L2 holds, and how much room is left."""
    config = step_config(14)
    blocks = _SMS * _WARPS_PER_SM // config.n_warps
    d = Drawing(
        "Step 14: L2 has room for everything in flight",
        f"The L2 cache of an H100, {_L2_MB} MB, as a bar for two lengths of the sequence. K and V "
        "of the heads that are computed at one time fill about a third of it and their O half as "
        "much; the rest is free: there is nothing that a cache policy could save.",
        f"L2 of an H100, {_L2_MB} MB, to scale. K and V of a head are read by all of its thread "
        "blocks and should stay; O is written once and may leave first.",
    )
    mib = d.width / (_L2_MB * 1e6 / 2**20)
    y, shown = d.y + 8, {}
    for seq_len in (4096, 16384):
        per_head = seq_len // config.B_r
        tensor = seq_len * _ROW_BYTES // 2**20
        heads = shown[seq_len] = -(-blocks // per_head)
        d.bold(d.left, y + 16, f"Length {seq_len}: {heads} heads of {per_head} thread blocks")
        x, y = d.left, y + 24
        for name, size, colour in (("K, V", 2 * tensor, BLUE), ("O", tensor, PURPLE)):
            start = x
            for head in range(heads):
                data = {"seq_len": seq_len, "tensor": name, "head": head, "mib": size}
                d.rect(x, y, size * mib, 34, colour, dashed=name == "O", **data)
                x += size * mib
            d.small((start + x) / 2, y + 50, f"{name}: {heads * size} MiB", "middle")
        d.cell(x, y, d.right - x, 34, "free")
        y += 58
    per_head, heads = 4096 // config.B_r, shown[4096]
    size = 2 * 4096 * _ROW_BYTES // 2**20
    return d.result(
        y + 6,
        f"{_SMS} SMs · {_WARPS_PER_SM // config.n_warps} = {blocks} thread blocks run at a time, "
        f"at length 4096 those of {heads} heads; K and V take {heads} · {size} MiB = "
        f"{heads * size} MiB. They stay in L2 whether O is the first to leave or not.",
    )


def pieces() -> Drawing:
    """Step 15: a thread's copies of a tile, whole and cut into pieces."""
    config = step_config(15)
    d = Drawing(
        "Step 15: half as many row addresses",
        "A tile of 64 rows by 128 columns, whole in step 14 and as two pieces of 64 columns in "
        "step 15, with the eight places that thread 0 copies. In step 14 they lie in eight rows, "
        "in step 15 in four rows, the same place in both pieces.",
        "A tile of K in shared memory, and the 16-byte chunks that thread 0 copies (drawn taller "
        "than they are).",
    )
    chunk_height, row_height, top = 16, 3, d.y + 28
    bottom = top + config.B_c * row_height
    n_rows = {step: len(_row_addresses(step)) for step in (14, 15)}
    for step, left, columns in ((14, 36.0, config.d_head), (15, 274.0, PIECE)):
        copies = copy_rows(step, 0)
        d.small(
            left - 26, d.y + 16, f"Step {step}: rows of {columns * ELEMENT_BYTES} bytes", bold=True
        )
        n_pieces = config.d_head // columns
        width, gap = 180 / n_pieces, 16 * (n_pieces - 1)
        tile = Grid(d, left, top, width + gap, row_height)
        for piece in range(n_pieces):
            x = tile.left(piece)
            d.rect(x, top, width, bottom - top)
            label = f"columns {piece * columns}-{(piece + 1) * columns - 1}"
            d.note(x + width / 2, bottom + 16, label, "middle")
        for row, column in copies:
            piece, inside = divmod(column, columns)
            x, y = tile.left(piece) + inside / columns * width, tile.top(row)
            data = {"step": step, "row": row, "column": column}
            d.rect(x, y, 180 / 16, chunk_height, ORANGE, **data)
        for row in _row_addresses(step):
            d.note(left - 8, tile.top(row) + 12, str(row), "end")
        d.small(left, bottom + 36, f"{n_rows[step]} row addresses, {len(copies)} copies")
    return d.result(
        bottom + 48,
        f"The second piece of a row is {PIECE} · {ELEMENT_BYTES} = {PIECE * ELEMENT_BYTES} bytes "
        f"on in global memory: a constant. {n_rows[14]} addresses per tile become {n_rows[15]}.",
    )


def row_stride() -> Drawing:
    """Step 16: the distance of two rows, read or known."""
    config, stride = step_config(16), PROGRESSION_ROW_STRIDE
    heads, head = stride // config.d_head, 3
    rows = _row_addresses(16)
    d = Drawing(
        "Step 16: the row stride as a constant",
        f"Two rows of a (batch, seq, heads, d_head) tensor with {heads} heads, one head marked. "
        f"The next row of the same head is {stride} elements on. In step 15 each "
        "row's address is the one before plus a stride in a register, in step 16 it is the first "
        "one plus a constant.",
        f"(batch, seq, heads, d_head) with {heads} heads: a row of the sequence holds {heads} · "
        f"{config.d_head} elements; a thread block wants those of its head.",
    )
    left = 54.0
    cells = Grid(d, left, d.y + 10, (d.right - left) / heads, 58, below=32)
    for row in range(2):
        d.note(d.left, cells.top(row) + 18, f"row {row}")
        for h in range(heads):
            colour = ORANGE if h == head else "plain"
            cells.cell(row, h, str(h), colour, bold=h == head)
        if row == 0:
            x, y = cells.middle(head), cells.y
            d.arrow((x, y + 28), (x, y + 55), colour=ORANGE)
            elements = f"{heads} · {config.d_head} = {stride} elements"
            d.small(x + 10, y + 47, f"{elements} = {stride * ELEMENT_BYTES} bytes")
    y = cells.top(1) + 44
    shown = ", ".join(map(str, rows))
    d.text(d.left, y + 16, f"The rows {shown} that a thread copies:")
    y += 24
    for step, how in ((15, "each from the one before"), (16, "each from the first")):
        d.bold(d.left, y + 18, f"Step {step}: {how}")
        addresses = Grid(d, d.left, y + 28, (d.width + 12) / len(rows), 30, gap=12)
        for n, row in enumerate(rows):
            offset = row * stride * ELEMENT_BYTES
            text, colour = "+ 16 · stride", BLUE
            if step == 16:
                text, colour = f"first + {offset:#x}", GREEN
            elif n:
                x, level = addresses.left(n), addresses.y + 15
                d.line([(x - 12, level), (x, level)], "ink")
            label = text if n else "first"
            addresses.cell(0, n, label, colour if n else GREY, step=step, row=row, offset=offset)
        y += 66
    gap = rows[1] - rows[0]
    apart = gap * stride * ELEMENT_BYTES
    return d.result(
        y + 4,
        f"{gap} rows on: {gap} · {stride} · {ELEMENT_BYTES} = {apart} bytes = {apart:#x}, a "
        "constant of the addition: no register for the stride, and no address waits for another.",
    )
