"""Pictures of addresses, and of the softmax's arithmetic: where steps 6 to 16 save instructions."""

from __future__ import annotations

import math
from collections.abc import Collection

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

_BIT = 34  # width of a bit
_LINE_BYTES, _SECTOR_BYTES = 128, 32  # of L2; CUDA C++ Best Practices Guide, "Device Memory"
_L2_MB = 50  # NVIDIA H100 Tensor Core GPU Architecture, "H100 GPU": the SXM5 card
_ROW_BYTES = step_config(1).d_head * ELEMENT_BYTES  # of a tile, and of a head's row


def _bits(d: Drawing, y: float, value: int, width: int, marked: Collection[int]) -> None:
    """A binary number at the right margin, its highest bit first; some bits are marked."""
    bits = Grid(d, d.right - width * _BIT, y, _BIT, 24)
    for n, label in enumerate(f"{value:0{width}b}"):
        chosen = width - 1 - n in marked
        bits.cell(0, n, label, ORANGE if chosen else "plain", bold=chosen)


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
        f"{scale * log2e:.4f}. Below each instruction, its result.",
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
    left, step_width = 84.0, 126.0
    for n, (step, chain) in enumerate(chains.items()):
        top = d.y + 26 + n * 104
        d.bold(d.left, top + 24, f"Step {step}")
        for k, (place, name, what, value, colour) in enumerate(chain):
            x, width = left + place * step_width, 94.0 + (step_width if name == "FFMA" else 0)
            data = {"step": step, "instruction": name, "value": value}
            d.cell(x, top, width, 36, name, colour, bold=True, **data)
            d.small(x + width / 2, top - 8, what, "middle")
            d.text(x + width / 2, top + 54, value, "middle")
            if name != "MUFU.EX2":
                following = left + chain[k + 1][0] * step_width
                d.arrow((x + width + 3, top + 18), (following - 3, top + 18))
    return d.result(
        d.y + 26 + 2 * 104 - 18,
        f"A thread has {rows} · {config.B_c} / {WARP} = {elements} elements of S in a block of "
        f"keys: {elements} · 3 = {3 * elements} instructions become {elements}. m · c is one FMUL "
        "a row.",
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
    labels = ((11, 8, "row"), (7, 7, "k / 4"), (6, 5, "k % 4"), (4, 4, "half"), (3, 0, "byte"))
    for high, low, label in labels:
        x0, x1 = d.right - (high + 1) * _BIT, d.right - low * _BIT
        d.note((x0 + x1) / 2, y - 5, label, "middle")
        d.brace(x0 + 3, x1 - 3, y)
    y += 10
    for k in range(4):
        offset = lane_offset(lane, k)
        d.bold(d.left, y + 17, f"k = {k}")
        d.text(82, y + 17, f"{base} ^ {k * 2 * CHUNK_BYTES} = {offset}" if k else str(base))
        _bits(d, y, offset, width, (5, 6))
        y += 28
    d.bold(d.left, y + 17, f"k = 4 to {n_k - 1}")
    more = CHUNKS_AROUND * CHUNK_BYTES
    d.small(d.right - width * _BIT, y + 17, f"the same four, + {more} in the instruction:")
    y += 28
    cells = Grid(d, d.left + 2, y + 20, d.width / n_k, 28, gap=4)
    for k in range(n_k):
        middle, offset = cells.middle(k), constant_offset(lane, k)
        d.note(middle, y + 14, f"k = {k}", "middle")
        text, below, colour = str(offset), f"offset {k}", ORANGE
        if k >= 4:
            text, below, colour = f"{offset - more} + {more}", f"= {offset}", GREEN
        cells.cell(0, k, text, colour, lane=lane, k=k, offset=offset)
        d.small(middle, y + 62, below, "middle")
    return d.result(
        y + 78,
        f"A warp has {work_of(step_config(8)).ldmatrix} ldmatrix in a block of keys. Lane and k % "
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
        "Lane 4g + t stores two elements of O, 4 bytes, in row g of 8. Column tile n, 8 columns "
        f"or one chunk, lies at chunk n ^ g. Below, tile n = {n_shown}, with the lanes that store "
        "it:",
    )
    tile = Grid(d, 76, d.y + 30, 76, 21)
    for place in range(CHUNKS_AROUND):
        d.note(tile.middle(place), tile.y - 8, f"chunk {place}", "middle")
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
        how = f"{first} ^ {16 * n}" if n else f"{g} · {_ROW_BYTES} + {g} · 16 + {t} · 4"
        d.bold(d.left, y + 17, f"n = {n}")
        d.text(82, y + 17, f"{how} = {at}", n=n, address=at)
        _bits(d, y, at, 10, range(4, 7))
        y += 28
    return d.result(
        y + 8,
        f"{CHUNKS_AROUND} of {step_config(11).d_head // 8} column tiles take at most one XOR with "
        f"a constant; the others are {CHUNKS_AROUND * CHUNK_BYTES} bytes on, and rows g + 8 are 8 "
        f"· {_ROW_BYTES} = {8 * _ROW_BYTES} on: constants. A warp's store hits all 32 banks once.",
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
    left = 110.0
    y, place = d.y + 14, (d.right - left) / n
    cells = Grid(d, left, y + 4, place, 34, gap=20)
    d.bold(d.left, y + 16, "Step 11")
    d.note(d.left, y + 34, "64-bit adds")
    for k, row in enumerate(rows):
        cells.cell(0, k, str(row), BLUE, step=11, row=row)
        if k + 1 < n:
            d.arrow((cells.left(k + 1) - 18, y + 21), (cells.left(k + 1) - 2, y + 21))
    chain = f"each address = the one before + {rows[1]} · stride: 2 IADD3, one after the other"
    d.small(left, y + 58, chain)
    y += 88
    middle, cells = left + 3.5 * place, Grid(d, left, y + 70, place, 34, gap=20)
    d.bold(d.left, y + 16, "Step 12")
    d.cell(middle - 54, y, 132, 30, "base of K, stride", ORANGE)
    for k, row in enumerate(rows):
        d.arrow((middle + 12 + (k - 3.5) * 15, y + 32), (cells.middle(k), y + 66))
        cells.cell(0, k, str(row), GREEN, step=12, row=row)
    d.note(d.left, y + 92, "IMAD.WIDE")
    one_each = "each address = base + (first row + row) · stride: one IMAD.WIDE, in any order"
    d.small(left, y + 124, one_each)
    return d.result(
        y + 138,
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
    left = 112.0
    y, place = d.y + 14, (d.right - left) / (n + 1)
    first = left + place
    end = first + n * place - 6

    def blocks(step: int, name: str, each: int, colour: str) -> None:
        """What counts the blocks: its value in each."""
        cells = Grid(d, first, y + 14, place, 30, gap=6)
        d.bold(d.left, y + 16, f"Step {step}")
        d.note(d.left, y + 34, name)
        for k in range(n):
            cells.cell(0, k, str(k * each), colour, step=step, value=k * each)

    blocks(12, "j", 1, BLUE)
    d.arrow((first, y + 6), (end, y + 6))
    d.small(first, y + 64, f"go on if j < {n}: a register for the bound, j · {B_c} for the address")
    y += 88
    blocks(13, "next_key", B_c, GREEN)
    d.cell(left, y + 14, place - 6, 30, str(-B_c), RED, dashed=True)
    d.arrow((end, y + 6), (left, y + 6))
    d.small(left, y + 64, "stop", bold=True)
    d.small(first, y + 64, "go on if next_key >= 0: the row is the counter, its sign the condition")
    return d.result(
        y + 80,
        f"The first block of keys is row {seq_len} - {B_c} = {seq_len - B_c}; after {n} steps "
        f"next_key is {seq_len} - {n + 1} · {B_c} = {seq_len - (n + 1) * B_c}. The sum runs over "
        "the same keys in another order: the last bit may differ.",
    )


def cache_policy() -> Drawing:
    """Step 14: lines, sectors, and what should stay in L2."""
    B_r = step_config(14).B_r
    lines, sectors, chunks = (_ROW_BYTES // n for n in (_LINE_BYTES, _SECTOR_BYTES, CHUNK_BYTES))
    d = Drawing(
        "Step 14: whole lines for K and V, out of the way for O",
        f"A row of K of {_ROW_BYTES} bytes as {lines} lines of L2, {sectors} sectors and {chunks} "
        "chunks of threads. Below, K and V of a head, which many thread blocks read and which "
        "should stay in L2, and O, which is written once and may leave.",
        f"One row of K, {_ROW_BYTES} bytes, as global memory and L2 see it:",
    )
    left = 150.0
    y, whole = d.y + 8, d.right - left
    strips = (
        ("L2 lines", [f"line {n}: {_LINE_BYTES} bytes" for n in range(lines)], BLUE),
        ("sectors", [f"{_SECTOR_BYTES} bytes"] * sectors, GREEN),
        ("cp.async", list(map(str, range(chunks))), ORANGE),
    )
    for name, labels, colour in strips:
        strip = Grid(d, left, y, whole / len(labels), 26)
        d.bold(d.left, y + 17, name)
        for n, label in enumerate(labels):
            strip.cell(0, n, label, colour, level=name, index=n)
        y += 32
    asked = f"lanes of half a warp, {CHUNK_BYTES} bytes each; .L2::128B asks L2 for the whole line"
    d.note(left, y + 10, asked)
    y += 34
    read = f"read by seq_len / {B_r} thread blocks, {4096 // B_r} at 4096: should stay"
    d.bold(d.left, y + 20, "K, V")
    d.cell(left, y, whole, 30, read, BLUE)
    written = "written once (st.global.cs), read by none: the first to leave"
    d.bold(d.left, y + 58, "O")
    d.cell(left, y + 38, whole, 30, written, PURPLE, dashed=True)
    mib = {length: 2 * length * _ROW_BYTES // 2**20 for length in (4096, 16384)}
    return d.result(
        y + 80,
        f"K and V of one head: 2 · 4096 · {_ROW_BYTES} bytes = {mib[4096]} MiB at length 4096, "
        f"{mib[16384]} MiB at 16384. While those of the heads in flight fit L2, {_L2_MB} MB on an "
        "H100, the policy has nothing to save.",
    )


def pieces() -> Drawing:
    """Step 15: a thread's copies of a tile, whole and cut into pieces."""
    config = step_config(15)
    d = Drawing(
        "Step 15: half as many row addresses for the same copies",
        "A tile of 64 rows by 128 columns, whole in step 14 and as two pieces of 64 columns in "
        "step 15, with the eight places that thread 0 copies. In step 14 they lie in eight rows, "
        "in step 15 in four rows, the same place in both pieces.",
        "A tile of K in shared memory. Filled are the 16-byte chunks that thread 0 copies, drawn "
        "taller than they are.",
    )
    chunk_height, row_height, top = 16, 3, d.y + 28
    bottom = top + config.B_c * row_height
    n_rows = {step: len(_row_addresses(step)) for step in (14, 15)}
    for step, left, columns in ((14, d.left + 46, config.d_head), (15, 384, PIECE)):
        copies = copy_rows(step, 0)
        d.bold(left, d.y + 16, f"Step {step}: rows of {columns * ELEMENT_BYTES} bytes")
        n_pieces = config.d_head // columns
        width, gap = 250 / n_pieces, 16 * (n_pieces - 1)
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
            d.rect(x, y, 250 / 16, chunk_height, ORANGE, **data)
        for row in _row_addresses(step):
            d.note(left - 8, tile.top(row) + 12, str(row), "end")
        d.text(left, bottom + 40, f"{n_rows[step]} row addresses, {len(copies)} copies")
    return d.result(
        bottom + 54,
        f"The second piece of a row is {PIECE} · {ELEMENT_BYTES} = {PIECE * ELEMENT_BYTES} bytes "
        f"on in global memory: a constant. {n_rows[14]} addresses a tile become {n_rows[15]}; for "
        f"K and V {2 * n_rows[14]} become {2 * n_rows[15]} in each block of keys.",
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
        f"{config.d_head} elements, of which a thread block wants those of its head.",
    )
    left = 84.0
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
    d.bold(d.left, y + 16, f"Addresses of the rows {shown} that a thread copies:")
    y += 26
    for step in (15, 16):
        addresses = Grid(d, left + 2, y, (d.right - left) / len(rows), 30, gap=4)
        d.small(d.left, y + 20, f"Step {step}", bold=True)
        for n, row in enumerate(rows):
            offset = row * stride * ELEMENT_BYTES
            text, colour = "before + 16 · stride", BLUE
            if step == 16:
                text, colour = f"first + {offset:#x}", GREEN
            elif not n:
                colour = GREY
            label = text if n else "first"
            addresses.cell(0, n, label, colour, step=step, row=row, offset=offset)
        y += 36
    gap = rows[1] - rows[0]
    apart = gap * stride * ELEMENT_BYTES
    return d.result(
        y + 4,
        f"{gap} rows on: {gap} · {stride} · {ELEMENT_BYTES} = {apart} bytes = {apart:#x}, which "
        "the addition holds: no register for the stride, and no address waits for another. Any "
        "other stride falls back to step 15's way.",
    )
