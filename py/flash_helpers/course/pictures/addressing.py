"""Pictures of addresses, and of the softmax's arithmetic: where steps 6 to 16 save instructions."""

from __future__ import annotations

import math

from flash_helpers.course.pictures.banks import (
    CHUNKS_AROUND,
    MATRIX_ROWS,
    address,
    swizzled,
)
from flash_helpers.course.pictures.fragments import a_order
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
from flash_helpers.course.pictures.work import step_config, work_of
from flash_helpers.gpu import WARP
from flash_helpers.registry.ampere import CHUNK_BYTES, MMA_K, PIECE, PIECES, PROGRESSION_ROW_STRIDE
from flash_helpers.registry.problem import ELEMENT_BYTES

_BIT = 34  # width of a bit
_LINE_BYTES, _SECTOR_BYTES = 128, 32  # of L2; CUDA C++ Best Practices Guide, "Device Memory"
_L2_MB = 50  # NVIDIA H100 Tensor Core GPU Architecture, "H100 GPU": the SXM5 card


def _bits(
    d: Drawing, x: float, y: float, value: int, width: int, marked: range, colour: str
) -> None:
    """A binary number, its highest bit first; the bits of `marked` in a colour."""
    for n in range(width):
        bit = width - 1 - n
        chosen = bit in marked
        d.cell(
            x + n * _BIT, y, _BIT, 24, str(value >> bit & 1), colour if chosen else "plain",
            bold=chosen,
        )  # fmt: skip


def ffma_fold() -> Drawing:
    """Step 6: three instructions for each element of S become one."""
    config = step_config(6)
    elements = config.B_r // config.n_warps * config.B_c // WARP
    scale, log2e = 1 / math.sqrt(config.d_head), math.log2(math.e)
    S, m = 30.0, 40.0
    d = Drawing(
        "ffma_fold",
        "Step 6: three instructions before the exponential become one",
        "Two chains from an element of S to an element of P. In step 5 S is multiplied by the "
        "scale, the maximum is subtracted, the difference is multiplied by log2 e, and ex2 "
        "follows. In step 6 one FFMA with the constant c = scale times log2 e does all three.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"One element: S = {S:g}, and {m:g} is its row's maximum m. The scale is 1 / "
        f"√{config.d_head} = {scale:.4f}, log2 e is {log2e:.4f}, and their product c "
        f"{scale * log2e:.4f}. Below each instruction, its result.",
        colour="muted",
    )
    before = (
        ("S", f"{S:g}", ""),
        ("FMUL", f"{S * scale:.3f}", "· scale"),
        ("FADD", f"{(S - m) * scale:.3f}", "- m"),
        ("FMUL", f"{(S - m) * scale * log2e:.3f}", "· log2 e"),
        ("MUFU.EX2", f"{2 ** ((S - m) * scale * log2e):.3f}", "P = 2^x"),
    )
    after = (
        ("S", f"{S:g}", ""),
        ("FFMA", f"{S * scale * log2e - m * scale * log2e:.3f}", "S · c - m · c"),
        ("MUFU.EX2", f"{2 ** (S * scale * log2e - m * scale * log2e):.3f}", "P = 2^x"),
    )
    left, width, step_width = 84.0, 94.0, 126.0
    for n, (title, chain) in enumerate((("Step 5", before), ("Step 6", after))):
        top = y + 26 + n * 104
        d.text(MARGIN, top + 24, title, bold=True)
        for k, (name, value, what) in enumerate(chain):
            last = k == len(chain) - 1
            x = left + (len(before) - 1 if last else k) * step_width
            extra = step_width if name == "FFMA" else 0
            colour = GREY if k == 0 else RED if last else ORANGE if n == 0 else GREEN
            d.cell(
                x, top, width + extra, 36, name, colour, bold=True,
                data={"step": 5 + n, "instruction": name, "value": value},
            )  # fmt: skip
            d.text(x + (width + extra) / 2, top - 8, what, size=SMALL, anchor="middle")
            d.text(x + (width + extra) / 2, top + 54, value, anchor="middle")
            if not last:
                start = x + width + extra + 3
                stop = left + (len(before) - 1 if k == len(chain) - 2 else k + 1) * step_width - 3
                d.arrow([(start, top + 18), (stop, top + 18)])
    d.result(
        y + 26 + 2 * 104 - 18,
        f"A thread has {config.B_r // config.n_warps} · {config.B_c} / {WARP} = {elements} "
        f"elements of S in a block of keys: {elements} · 3 = {3 * elements} instructions become "
        f"{elements}. m · c is one FMUL a row.",
    )
    return d


def lane_offset(lane: int, k: int) -> int:
    """Byte offset in a tile that a lane gives to ldmatrix for k-tile k of the piece in rows 0-15,
    by the formula: row and column, swizzled (steps 2 to 7)."""
    named = a_order(lane)
    config = step_config(8)
    return address(named.row, 2 * k + named.chunk, config.d_head * ELEMENT_BYTES, swizzled)


def constant_offset(lane: int, k: int) -> int:
    """The same as step 8 has it: one of four offsets a lane, and a constant."""
    base = lane_offset(lane, 0)
    return (base ^ k % 4 * 2 * CHUNK_BYTES) + k // 4 * CHUNKS_AROUND * CHUNK_BYTES


def swizzle_constants() -> Drawing:
    """Step 8: four offsets a lane, the rest are constants."""
    lane, n_k = 21, step_config(8).d_head // MMA_K
    named = a_order(lane)
    base = lane_offset(lane, 0)
    d = Drawing(
        "swizzle_constants",
        "Step 8: a k-tile flips two bits or adds a constant",
        "The byte offset of lane 21 in binary. The k-tile number changes only bits 5 and 6, by "
        "XOR, and bit 7, by addition. So eight k-tiles need four offsets computed before the loop, "
        "and a constant 128 added for the upper four.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"Lane {lane} names row {named.row}, and of k-tile k the chunk 2k + {named.chunk}, which "
        f"lies at (2k + {named.chunk}) ^ {named.row % MATRIX_ROWS}. Its byte offset in binary:",
        colour="muted",
    )
    width = 12
    left = PAGE_WIDTH - MARGIN - width * _BIT
    y += 26
    labels = ((11, 8, "row"), (7, 7, "k / 4"), (6, 5, "k % 4"), (4, 4, "half"), (3, 0, "byte"))
    for high, low, label in labels:
        x0 = left + (width - 1 - high) * _BIT
        x1 = left + (width - low) * _BIT
        d.text((x0 + x1) / 2, y - 5, label, size=SMALL, anchor="middle", colour="muted")
        d.brace(x0 + 3, x1 - 3, y)
    y += 10
    for k in range(4):
        d.text(MARGIN, y + 17, f"k = {k}", bold=True)
        how = f"= {base}" if k == 0 else f"{base} ^ {k * 2 * CHUNK_BYTES} = {lane_offset(lane, k)}"
        d.text(82, y + 17, how if k else str(base))
        _bits(d, left, y, lane_offset(lane, k), width, range(5, 7), ORANGE)
        y += 28
    d.text(MARGIN, y + 17, f"k = 4 to {n_k - 1}", bold=True)
    d.text(
        left,
        y + 17,
        f"the same four, + {CHUNKS_AROUND * CHUNK_BYTES} in the instruction:",
        size=SMALL,
    )
    y += 28
    cell = (PAGE_WIDTH - 2 * MARGIN) / n_k
    for k in range(n_k):
        x = MARGIN + k * cell
        offset = constant_offset(lane, k)
        d.text(x + cell / 2, y + 14, f"k = {k}", size=SMALL, anchor="middle", colour="muted")
        text = str(offset) if k < 4 else f"{constant_offset(lane, k - 4)} + 128"
        d.cell(
            x + 2, y + 20, cell - 4, 28, text, ORANGE if k < 4 else GREEN,
            data={"lane": lane, "k": k, "offset": offset},
        )  # fmt: skip
        y_below = y + 62
        d.text(
            x + cell / 2,
            y_below,
            f"= {offset}" if k >= 4 else f"offset {k}",
            size=SMALL,
            anchor="middle",
        )
    d.result(
        y + 78,
        f"A warp has {work_of(step_config(8)).ldmatrix} ldmatrix in a block of keys. Lane and k % "
        "4 are in four registers; tile, 16-row piece and k / 4 are constants in the instruction.",
    )
    return d


def output_swizzle() -> Drawing:
    """Step 11: a lane's place in the O tile, and the three bits that a column tile flips."""
    config = step_config(11)
    row_bytes = config.d_head * ELEMENT_BYTES
    lane = 13
    g, t = divmod(lane, 4)
    d = Drawing(
        "output_swizzle",
        "Step 11: column tile n flips three bits of one address",
        "Above, the chunks in which the lanes of rows g = 0 to 7 store column tile 2 of O: chunk 2 "
        "XOR g. Below, the address of lane 13 in binary for three column tiles: only bits 4 to 6 "
        "change.",
    )
    n_shown = 2
    y = d.paragraph(
        MARGIN,
        d.top,
        "Lane 4g + t stores two elements of O, 4 bytes, in row g of 8. Column tile n, 8 columns "
        f"or one chunk, lies at chunk n ^ g. Below, tile n = {n_shown}, with the lanes that store "
        "it:",
        colour="muted",
    )
    y += 22
    left, cell = 76.0, 76.0
    for place in range(CHUNKS_AROUND):
        d.text(left + (place + 0.5) * cell, y, f"chunk {place}", size=SMALL, anchor="middle",
               colour="muted")  # fmt: skip
    y += 8
    for row in range(MATRIX_ROWS):
        d.text(MARGIN, y + 15, f"g = {row}", size=SMALL, colour="muted")
        for place in range(CHUNKS_AROUND):
            stores = swizzled(row, n_shown) == place
            d.cell(
                left + place * cell, y, cell, 21, f"{4 * row}-{4 * row + 3}" if stores else "",
                ORANGE if stores else "plain", bold=stores,
                data={"g": row, "place": place, "stores": int(stores)},
            )  # fmt: skip
        y += 21
    y += 14
    d.text(MARGIN, y + 14, f"The address of lane {lane}: g = {g}, t = {t}", bold=True)
    y += 24
    bits = 10
    x0 = PAGE_WIDTH - MARGIN - bits * _BIT
    for n in (0, 1, 6):
        at = address(g, n, row_bytes, swizzled) + 4 * t
        own = address(g, 0, row_bytes, swizzled) + 4 * t
        d.text(MARGIN, y + 17, f"n = {n}", bold=True)
        how = (
            f"{g} · {row_bytes} + {g} · 16 + {t} · 4 = {at}"
            if n == 0
            else f"{own} ^ {16 * n} = {at}"
        )
        d.text(82, y + 17, how, data={"n": n, "address": at})
        _bits(d, x0, y, at, bits, range(4, 7), ORANGE)
        y += 28
    d.result(
        y + 8,
        f"{CHUNKS_AROUND} of {config.d_head // 8} column tiles take at most one XOR with a "
        f"constant; the others are {CHUNKS_AROUND * CHUNK_BYTES} bytes on, and rows g + 8 are 8 · "
        f"{row_bytes} = {8 * row_bytes} on: constants. A warp's store hits all 32 banks once.",
    )
    return d


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


def block_index() -> Drawing:
    """Step 12: addresses from an index, not one from the other."""
    rows = [row for row, _ in copy_rows(12, 0)]
    n = len(rows)
    d = Drawing(
        "block_index",
        "Step 12: base + row · stride, not a pointer that walks",
        "The eight addresses of a thread's copies of one tile. In step 11 each is the one before "
        "plus eight rows, a chain of 64-bit additions. In step 12 each is computed from the base "
        "on its own.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"A thread copies {n} times 16 bytes of a tile of K, every {rows[1]} rows (thread 0: rows "
        f"{rows[0]}, {rows[1]}, … {rows[-1]}).",
        colour="muted",
    )
    left, cell = 110.0, (PAGE_WIDTH - MARGIN - 110.0) / n
    y += 14
    d.text(MARGIN, y + 16, "Step 11", bold=True)
    d.text(MARGIN, y + 34, "64-bit adds", size=SMALL, colour="muted")
    for k, row in enumerate(rows):
        x = left + k * cell
        d.cell(x, y + 4, cell - 20, 34, str(row), BLUE, data={"step": 11, "row": row})
        if k + 1 < n:
            d.arrow([(x + cell - 18, y + 21), (x + cell - 2, y + 21)])
    d.text(
        left,
        y + 58,
        f"each address = the one before + {rows[1]} · stride: 2 IADD3, one after the other",
        size=SMALL,
    )
    y += 88
    d.text(MARGIN, y + 16, "Step 12", bold=True)
    d.cell(left + 3.5 * cell - 54, y, 132, 30, "base of K, stride", ORANGE)
    middle = left + 3.5 * cell + 12
    for k, row in enumerate(rows):
        x = left + k * cell
        d.arrow([(middle + (k - 3.5) * 15, y + 32), (x + cell / 2 - 10, y + 66)])
        d.cell(x, y + 70, cell - 20, 34, str(row), GREEN, data={"step": 12, "row": row})
    d.text(MARGIN, y + 92, "IMAD.WIDE", size=SMALL, colour="muted")
    d.text(
        left,
        y + 124,
        "each address = base + (first row + row) · stride: one IMAD.WIDE, in any order",
        size=SMALL,
    )
    d.result(
        y + 138,
        f"A block of keys, K and V: 2 tiles · {n} addresses · 2 IADD3 = {2 * n * 2} against "
        f"2 · {n} = {2 * n} IMAD.WIDE. Both factors must have 32 bits for that.",
    )
    return d


def backwards() -> Drawing:
    """Step 13: the row of the next block is counter, address and condition."""
    config, seq_len = step_config(13), 512
    n = seq_len // config.B_c
    d = Drawing(
        "backwards",
        "Step 13: count the rows down, stop below zero",
        f"{n} blocks of keys in a row. Forwards a counter j runs up and is compared with the "
        "number of blocks. Backwards the first row of the next block runs down by 64 and the loop "
        "ends when it is negative.",
    )
    y = d.paragraph(
        MARGIN, d.top, f"seq_len {seq_len}, B_c {config.B_c}: {n} blocks of keys.", colour="muted"
    )
    left = 112.0
    cell = (PAGE_WIDTH - MARGIN - left) / (n + 1)
    y += 14
    x_of = [left + (k + 1) * cell for k in range(n)]
    d.text(MARGIN, y + 16, "Step 12", bold=True)
    d.text(MARGIN, y + 34, "j", size=SMALL, colour="muted")
    for k in range(n):
        d.cell(x_of[k], y + 14, cell - 6, 30, str(k), BLUE, data={"step": 12, "value": k})
    d.arrow([(x_of[0], y + 6), (x_of[-1] + cell - 6, y + 6)])
    d.text(
        x_of[0],
        y + 64,
        f"go on if j < {n}: a register for the bound, j · {config.B_c} for the address",
        size=SMALL,
    )
    y += 88
    d.text(MARGIN, y + 16, "Step 13", bold=True)
    d.text(MARGIN, y + 34, "next_key", size=SMALL, colour="muted")
    for k in range(n):
        d.cell(
            x_of[k], y + 14, cell - 6, 30, str(k * config.B_c), GREEN,
            data={"step": 13, "value": k * config.B_c},
        )  # fmt: skip
    d.cell(left, y + 14, cell - 6, 30, str(-config.B_c), RED, dashed=True)
    d.arrow([(x_of[-1] + cell - 6, y + 6), (left, y + 6)])
    d.text(left, y + 64, "stop", size=SMALL, bold=True)
    d.text(
        x_of[0],
        y + 64,
        "go on if next_key >= 0: the row is the counter, its sign the condition",
        size=SMALL,
    )
    d.result(
        y + 80,
        f"The first block of keys is row {seq_len} - {config.B_c} = {seq_len - config.B_c}; after "
        f"{n} steps next_key is {seq_len} - {n + 1} · {config.B_c} = "
        f"{seq_len - (n + 1) * config.B_c}. The sum runs over the same keys in another order: the "
        "last bit may differ.",
    )
    return d


def cache_policy() -> Drawing:
    """Step 14: lines, sectors, and what should stay in L2."""
    config = step_config(14)
    row_bytes = config.d_head * ELEMENT_BYTES
    lines, sectors, chunks = (row_bytes // n for n in (_LINE_BYTES, _SECTOR_BYTES, CHUNK_BYTES))
    d = Drawing(
        "cache_policy",
        "Step 14: whole lines for K and V, out of the way for O",
        f"A row of K of {row_bytes} bytes as {lines} lines of L2, {sectors} sectors and {chunks} "
        "chunks of threads. Below, K and V of a head, which many thread blocks read and which "
        "should stay in L2, and O, which is written once and may leave.",
    )
    y = d.paragraph(
        MARGIN, d.top, f"One row of K, {row_bytes} bytes, as global memory and L2 see it:",
        colour="muted",
    )  # fmt: skip
    left = 150.0
    whole = PAGE_WIDTH - MARGIN - left
    y += 8
    strips = (
        ("L2 lines", lines, lambda n: f"line {n}: {_LINE_BYTES} bytes", BLUE),
        ("sectors", sectors, lambda n: f"{_SECTOR_BYTES} bytes", GREEN),
        ("cp.async", chunks, lambda n: str(n), ORANGE),
    )
    for name, count, label, colour in strips:
        note = "lanes of half a warp" if name == "cp.async" else ""
        d.text(MARGIN, y + 17, name, bold=True)
        for n in range(count):
            d.cell(
                left + n * whole / count, y, whole / count, 26, label(n), colour,
                data={"level": name, "index": n},
            )  # fmt: skip
        y += 32
        if note:
            d.text(
                left,
                y + 10,
                f"{note}, {CHUNK_BYTES} bytes each; .L2::128B asks L2 for the whole line",
                size=SMALL,
                colour="muted",
            )
    y += 34
    readers = 4096 // config.B_r
    for name, text, colour in (
        (
            "K, V",
            f"read by seq_len / {config.B_r} thread blocks, {readers} at 4096: should stay",
            BLUE,
        ),
        ("O", "written once (st.global.cs), read by none: the first to leave", PURPLE),
    ):
        d.text(MARGIN, y + 20, name, bold=True)
        d.cell(left, y, whole, 30, text, colour, dashed=name == "O")
        y += 38
    mib = 2 * 16384 * row_bytes // 2**20
    d.result(
        y + 4,
        f"K and V of one head: 2 · 4096 · {row_bytes} bytes = {2 * 4096 * row_bytes // 2**20} MiB "
        f"at length 4096, {mib} MiB at 16384. While those of the heads in flight fit L2, {_L2_MB} "
        "MB on an H100, the policy has nothing to save.",
    )
    return d


def pieces() -> Drawing:
    """Step 15: a thread's copies of a tile, whole and cut into pieces."""
    old, new = copy_rows(14, 0), copy_rows(15, 0)
    config = step_config(15)
    d = Drawing(
        "pieces",
        "Step 15: half as many row addresses for the same copies",
        "A tile of 64 rows by 128 columns, whole in step 14 and as two pieces of 64 columns in "
        "step 15, with the eight places that thread 0 copies. In step 14 they lie in eight rows, "
        "in step 15 in four rows, the same place in both pieces.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "A tile of K in shared memory. Filled are the 16-byte chunks that thread 0 copies, drawn "
        "taller than they are.",
        colour="muted",
    )
    width, height = 250.0, 16.0
    panels = ((14, old, MARGIN + 46.0, config.d_head), (15, new, 384.0, PIECE))
    for version, copies, left, columns in panels:
        rows = sorted({row for row, _ in copies})
        gap = 0 if columns == config.d_head else 16
        d.text(left, y + 16, f"Step {version}: rows of {columns * ELEMENT_BYTES} bytes", bold=True)
        top = y + 28
        n_pieces = config.d_head // columns
        for piece in range(n_pieces):
            x = left + piece * (width / n_pieces + gap)
            d.rect(x, top, width / n_pieces, 8 * height * 1.5)
            label = "columns " + f"{piece * columns}-{(piece + 1) * columns - 1}"
            d.text(
                x + width / n_pieces / 2, top + 8 * height * 1.5 + 16, label, size=SMALL,
                anchor="middle", colour="muted",
            )  # fmt: skip
        for row, column in copies:
            piece = column // columns
            x = left + piece * (width / n_pieces + gap)
            x += column % columns / columns * width / n_pieces
            at = top + row / config.B_c * 8 * height * 1.5
            d.rect(
                x, at, width / 16, height, ORANGE,
                data={"step": version, "row": row, "column": column},
            )  # fmt: skip
        for row in rows:
            at = top + row / config.B_c * 8 * height * 1.5 + 12
            d.text(left - 8, at, str(row), size=SMALL, anchor="end", colour="muted")
        bottom = top + 8 * height * 1.5 + 40
        d.text(left, bottom, f"{len(rows)} row addresses, {len(copies)} copies")
    chunk = PIECE * ELEMENT_BYTES
    d.result(
        bottom + 14,
        f"The second piece of a row is {PIECE} · {ELEMENT_BYTES} = {chunk} bytes on in global "
        f"memory: a constant. {len({r for r, _ in old})} addresses a tile become "
        f"{len({r for r, _ in new})}; for K and V {2 * len({r for r, _ in old})} become "
        f"{2 * len({r for r, _ in new})} in each block of keys.",
    )
    return d


def row_stride() -> Drawing:
    """Step 16: the distance of two rows, read or known."""
    config = step_config(16)
    heads = PROGRESSION_ROW_STRIDE // config.d_head
    rows = sorted({row for row, _ in copy_rows(16, 0)})
    d = Drawing(
        "row_stride",
        "Step 16: the row stride as a constant",
        f"Two rows of a (batch, seq, heads, d_head) tensor with {heads} heads, one head marked. "
        f"The next row of the same head is {PROGRESSION_ROW_STRIDE} elements on. In step 15 each "
        "row's address is the one before plus a stride in a register, in step 16 it is the first "
        "one plus a constant.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"(batch, seq, heads, d_head) with {heads} heads: a row of the sequence holds {heads} · "
        f"{config.d_head} elements, of which a thread block wants those of its head.",
        colour="muted",
    )
    left = 84.0
    cell = (PAGE_WIDTH - MARGIN - left) / heads
    y += 10
    head = 3
    for row in range(2):
        d.text(MARGIN, y + 18, f"row {row}", size=SMALL, colour="muted")
        for h in range(heads):
            d.cell(
                left + h * cell, y, cell, 26, str(h), ORANGE if h == head else "plain",
                bold=h == head,
            )  # fmt: skip
        y += 26 if row else 58
        if row == 0:
            x = left + (head + 0.5) * cell
            d.arrow([(x, y - 30), (x, y - 3)], ORANGE)
            stride = PROGRESSION_ROW_STRIDE * ELEMENT_BYTES
            d.text(
                x + 10, y - 11,
                f"{heads} · {config.d_head} = {PROGRESSION_ROW_STRIDE} elements = {stride} bytes",
                size=SMALL,
            )  # fmt: skip
    y += 18
    d.text(
        MARGIN,
        y + 16,
        f"Addresses of the rows {', '.join(map(str, rows))} that a thread copies:",
        bold=True,
    )
    y += 26
    quarter = (PAGE_WIDTH - MARGIN - left) / len(rows)
    for step in (15, 16):
        d.text(MARGIN, y + 20, f"Step {step}", size=SMALL, bold=True)
        for n, row in enumerate(rows):
            offset = row * PROGRESSION_ROW_STRIDE * ELEMENT_BYTES
            if step == 15:
                text = "first" if n == 0 else "before + 16 · stride"
            else:
                text = "first" if n == 0 else f"first + {offset:#x}"
            d.cell(
                left + n * quarter + 2, y, quarter - 4, 30, text,
                (GREY if n == 0 else BLUE) if step == 15 else GREEN,
                data={"step": step, "row": row, "offset": offset},
            )  # fmt: skip
        y += 36
    gap = rows[1] - rows[0]
    d.result(
        y + 4,
        f"{gap} rows on: {gap} · {PROGRESSION_ROW_STRIDE} · {ELEMENT_BYTES} = "
        f"{gap * PROGRESSION_ROW_STRIDE * ELEMENT_BYTES} bytes = "
        f"{gap * PROGRESSION_ROW_STRIDE * ELEMENT_BYTES:#x}, which the addition holds: no register "
        "for the stride, and no address waits for another. Any other stride falls back to step "
        "15's way.",
    )
    return d
