"""Pictures of registers: which lane holds what, and how it gets there."""

from __future__ import annotations

from flash_helpers.course.pictures.fragments import (
    LANES,
    MATRIX,
    Held,
    a_fragment,
    a_order,
    b_fragment,
    c_fragment,
    k_order,
)
from flash_helpers.course.pictures.svg import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SMALL,
    Drawing,
    Grid,
)
from flash_helpers.course.pictures.text_width import text_width
from flash_helpers.course.pictures.work import LDMATRIX_BYTES, LDMATRIX_CYCLES, step_config, work_of
from flash_helpers.gpu import MAX_REGISTERS, WARP
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.registry.mma_sync import CHUNK_BYTES, MMA_K, MMA_M

_LANE = 5  # the one that is followed
_REGISTER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def _spans(values: set[int]) -> str:
    """{2, 3, 10, 11} as "2-3 and 10-11"."""
    starts = [v for v in sorted(values) if v - 1 not in values]
    ends = [v for v in sorted(values) if v + 1 not in values]
    pairs = zip(starts, ends, strict=True)
    return " and ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _held_cells(grid: Grid, operand: str, held: list[Held]) -> None:
    """A cell for each two elements that one lane holds side by side; of B one below the other."""
    across, down = (1, 2) if operand == "B" else (2, 1)
    for h in sorted(held, key=lambda h: (h.lane == _LANE, h.row, h.column)):
        if h.row % down or h.column % across:
            continue
        row, column, colour = h.row // down, h.column // across, _REGISTER_COLOURS[h.register]
        followed = h.lane == _LANE
        grid.cell(row, column, str(h.lane), colour, strong=followed, operand=operand, **vars(h))


def mma_fragments() -> Drawing:
    """Which lane holds what of A, B and C."""
    fragments = {"A": a_fragment, "B": b_fragment, "C": c_fragment}
    own = {name: of(_LANE) for name, of in fragments.items()}
    g, t = divmod(_LANE, 4)
    d = Drawing(
        "mma.m16n8k16: which lane holds what",
        "The operands of C (16 x 8) += A (16 x 16) @ B (16 x 8) as grids. Each cell is a pair of "
        "neighbouring elements and names the lane of the warp that holds them; its colour and the "
        "label beside it name the register. Lane numbers run along the rows of A and C and down "
        "the columns of B, four lanes to a row of eight.",
    )
    height, x = 20, 290  # of a cell, and where B and C begin, whose columns are the same
    y_b = d.y + 24
    y_a = y_b + 8 * height + 46
    y_end = y_a + 16 * height + 16
    grids = {
        "A": Grid(d, 54, y_a, 25, height),
        "B": Grid(d, x, y_b, 18.5, height),
        "C": Grid(d, x, y_a, 37, height),
    }

    y = d.paragraph(
        d.left,
        d.y,
        "A cell is two neighbouring elements, and names the lane that holds them: with g = lane / "
        "4 and t = lane % 4, row g and columns 2t, 2t + 1 of each 8 x 8 quarter.",
        width=260,
        colour="muted",
    )
    y = d.paragraph(d.left, y + 6, f"Lane {_LANE}: g = {g}, t = {t}.", width=260, bold=True)
    for n, (name, elements) in enumerate(own.items()):
        rows, columns = {h.row for h in elements}, {h.column for h in elements}
        plural = "s" if len(columns) > 1 else ""
        text = f"{name}: rows {_spans(rows)}, column{plural} {_spans(columns)}"
        d.small(d.left, y + 14 + 19 * n, text)

    for name, of in fragments.items():
        _held_cells(grids[name], name, [h for lane in LANES for h in of(lane)])
    a, b, c = grids.values()
    for half in range(2):
        x = a.left(half * 4 + 2)
        d.bold(x, y_a - 7, f"a{2 * half}", "middle")
        d.bold(x, y_end, f"a{2 * half + 1}", "middle")
        d.small(c.left(4) + 4, c.top(half * 8 + 4) + 5, f"c{2 * half} c{2 * half + 1}", bold=True)
        d.bold(b.left(8) + 6, b.top(half * 4 + 2) + 5, f"b{half}")
    for row in range(16):
        d.note(a.x - 6, a.top(row) + 15, str(row) if row else "row 0", "end")
    d.note(b.left(4), y_b - 8, "B (16 x 8)", "middle")
    d.note(a.left(4), y_end, "A (16 x 16)", "middle")
    d.note(c.left(2), y_end, "C (16 x 8)", "middle")
    return d.result(
        y_end + 14,
        f"A lane holds 16 · 16 / 32 = {len(own['A'])} elements of A in 4 registers, 16 · 8 / 32 = "
        f"{len(own['B'])} of B in 2 and {len(own['C'])} of C in 4. A row of C lies in four lanes: "
        "two shuffles reduce it.",
    )


def ldmatrix() -> Drawing:
    """Addresses and registers of ldmatrix.x4."""
    order = [a_order(lane) for lane in LANES]
    followed = order[_LANE + MATRIX]
    d = Drawing(
        "ldmatrix.x4: a lane names a row, four lanes receive it",
        "Left, a 16 x 16 piece of a tile in shared memory: 16 rows of two chunks of 16 bytes, each "
        "with the lane whose address names it. Right, the four registers that the instruction "
        "writes, one for each 8 x 8 matrix: of every matrix, the four words of row g go to lanes "
        "4g to 4g + 3.",
        f"32 addresses, one per lane, each of a row of {CHUNK_BYTES} bytes in one of four 8 x 8 "
        "matrices. Matrix i becomes register i of all lanes: the layout that mma wants.",
    )
    y, height = d.y + 42, 22
    tile = Grid(d, 54, y, 88, height)
    d.bold(d.left, y - 26, "shared memory, 16 x 16")
    for chunk, text in enumerate(("columns 0-7", "columns 8-15")):
        d.note(tile.middle(chunk), y - 6, text, "middle")
    for named in order:
        matrix, row, chunk = named.matrix, named.row, named.chunk
        label, colour = f"lane {named.lane}", _REGISTER_COLOURS[matrix]
        data = {"names": named.lane, "matrix": matrix, "row": row, "chunk": chunk}
        tile.cell(row, chunk, label, colour, **data)
    for row in range(16):
        d.note(tile.x - 6, tile.top(row) + 16, str(row) if row else "row 0", "end")

    x_right, word = 270, 24
    right = d.right - 4 * word  # where the second column of matrices begins
    registers = [
        Grid(d, x, top, word, height) for x in (x_right, right) for top in (y, y + 8 * height)
    ]
    d.bold(x_right, y - 26, "registers of the lanes")
    for register, grid in enumerate(registers):
        label_y = y + 16 * height + 16 if register % 2 else y - 6
        d.note(grid.left(2), label_y, f"register {register}", "middle")
        for named in (n for n in order if n.matrix == register):
            for w, lane in enumerate(named.receivers):
                row, colour = named.lane % MATRIX, _REGISTER_COLOURS[register]
                data = {"receives": lane, "register": register, "word": w, "named_by": named.lane}
                grid.cell(row, w, str(lane), colour, **data)
    # the followed row, outlined on both sides
    x, at = tile.left(followed.chunk), tile.top(followed.row)
    d.rect(x, at, tile.width, height, "ink", strong=True)
    received = registers[followed.matrix]
    at = received.top(followed.lane % MATRIX)
    d.rect(received.x, at, 4 * word, height, "ink", strong=True)
    d.arrow((tile.left(2) + 6, at + height / 2), (x_right - 4, at + height / 2))
    return d.result(
        y + 16 * height + 28,
        f"Lane {followed.lane} names row {followed.row}, columns {8 * followed.chunk}-"
        f"{8 * followed.chunk + 7}: its four words become register {followed.matrix} of lanes "
        f"{followed.receivers[0]}-{followed.receivers[-1]}. In all {len(order)} · {CHUNK_BYTES} = "
        f"{LDMATRIX_BYTES} bytes, one wavefront of 128 bytes per matrix: {LDMATRIX_CYCLES:.0f} "
        "cycles of shared memory if no banks conflict.",
    )


def fragment_registers(config: FlashForwardKernelConfig, product: str) -> dict[str, int]:
    """Registers of a thread that the source holds at once during a product, by matrix.

    product: "S" or "O", what is computed.
    """
    rows, k_tiles = config.row_tiles * MMA_M, config.d_head // MMA_K
    buffers = 2 if config.mma_double_buffer_loads else 1
    found = {"O": rows * config.d_head // WARP}
    S = rows * config.B_c // WARP
    if product == "S":
        tiles = config.K_mma_load_K_tiles * buffers or k_tiles
        found |= {"S": S, "K": tiles * config.B_c // MMA_K * 4}
    else:
        tiles = config.V_mma_load_K_tiles * buffers or config.B_c // MMA_K
        found |= {"P": S // 2, "V": tiles * k_tiles * 4}
    if product == "S" or not config.Q_mma_load_K_tiles:
        found["Q"] = (config.Q_mma_load_K_tiles * buffers or k_tiles) * config.row_tiles * 4
    return found


def fragments_whole_vs_interleaved() -> Drawing:
    """Step 4: registers of fragments, whole tiles against one k-tile at a time."""
    d = Drawing(
        "Step 4: a k-tile at a time instead of a whole tile",
        "Stacked bars of the registers of a thread that the source holds at once, in step 3 and in "
        "step 4, during S = Q K^T and O += P V. In step 3 the fragments of a whole tile of K or V "
        "are the largest part; in step 4 those of one k-tile are small, and Q is loaded with K.",
        "L loads the fragments of a k-tile, M multiplies them: the order of the source for S. "
        "Bars: registers of a thread that the source holds at once.",
    )
    colours = {"O": PURPLE, "S": GREY, "P": RED, "K": ORANGE, "V": GREEN, "Q": BLUE}
    left, config = 100.0, step_config(3)
    k_tiles = config.d_head // MMA_K
    held = {
        (step, product): fragment_registers(step_config(step), product)
        for step in (3, 4)
        for product in "SO"
    }
    totals = {key: sum(registers.values()) for key, registers in held.items()}
    scale = (d.right - 34 - left) / max(totals.values())
    y = d.y
    for step, order in ((3, "L" * k_tiles + "M" * k_tiles), (4, "LM" * k_tiles)):
        y += 10
        d.bold(d.left, y + 17, f"Step {step}")
        letters = Grid(d, d.left + 62, y, 22, 22)
        for n, letter in enumerate(order):
            letters.cell(0, n, letter, ORANGE if letter == "L" else BLUE)
        y += 30
        for product, label in (("S", "S = Q @ K^T"), ("O", "O += P @ V")):
            d.small(d.left, y + 17, label)
            x, narrow = left, []
            for name, registers in held[step, product].items():
                width, text = registers * scale, f"{name} {registers}"
                if text_width(text, SMALL) >= width - 3:
                    narrow.append(text)
                    text = name if text_width(name, SMALL) < width - 3 else ""
                data = {"step": step, "product": product, "matrix": name, "registers": registers}
                d.cell(x, y, width, 24, text, colours[name], **data)
                x += width
            d.bold(x + 7, y + 17, f"{totals[step, product]}")
            if narrow and x < 300:
                d.note(x + 44, y + 17, f"with {', '.join(narrow)}")
            y += 30
    whole, piece = held[3, "S"]["K"], held[4, "S"]["K"]
    return d.result(
        y + 6,
        f"K whole: {config.B_c} · {config.d_head} elements / 2 per register / 32 lanes = "
        f"{whole} registers; one k-tile: {config.B_c} · {MMA_K} / 2 / 32 = {piece}. A thread has "
        f"{MAX_REGISTERS}: step 3's {totals[3, 'S']} fit because ptxas reorders. The "
        f"price is Q again in every block of keys, "
        f"{work_of(step_config(4)).ldmatrix_Q} ldmatrix.",
    )


def fragment_order() -> Drawing:
    """Step 9: K's fragments in the order that mma reads them."""
    d = Drawing(
        "Step 9: the two registers of a B operand become neighbours",
        "A 16 x 16 piece of K as four 8 x 8 matrices, with the register of ldmatrix.x4 that each "
        "becomes. Up to step 8 the two matrices of keys 0 to 7 become registers 0 and 2. From step "
        "9 on they become registers 0 and 1, an aligned pair as mma wants it.",
        "One ldmatrix.x4 of K serves two mma of 8 keys; each reads both halves of the depth as an "
        "aligned pair of registers.",
    )
    y, panel, colours = d.y + 8, d.width / 2, (BLUE, ORANGE)  # a colour for each half of the keys
    titles = {"Steps 1 to 8: A's order": a_order, "Step 9: K's own order": k_order}
    for n, (title, order) in enumerate(titles.items()):
        left, top = d.left + n * panel, y + 50
        tile, strip = Grid(d, left + 72, top, 74, 40), Grid(d, left + 72, top + 100, 37, 30)
        d.bold(left, y + 16, title)
        quarter = {(named.row // MATRIX, named.chunk): named.matrix for named in map(order, LANES)}
        for chunk in range(2):
            depth = f"depth {8 * chunk}-{8 * chunk + 7}"
            d.note(tile.middle(chunk), top - 7, depth, "middle")
        for (half, chunk), register in sorted(quarter.items()):
            data = {"order": n, "half": half, "chunk": chunk, "register": register}
            tile.cell(half, chunk, f"register {register}", colours[half], **data)
        for half in range(2):
            d.note(tile.x - 8, tile.top(half) + 24, f"keys {8 * half}-{8 * half + 7}", "end")
        owner = {register: half for (half, _), register in quarter.items()}
        d.note(left, strip.y + 20, "registers")
        for register in range(4):
            strip.cell(0, register, str(register), colours[owner[register]], bold=True)
        apart = quarter[0, 1] - quarter[0, 0] > 1
        for half, colour in enumerate(colours):
            a, b = (strip.middle(quarter[half, chunk]) for chunk in range(2))
            start, level = strip.y + 33, strip.y + 38 + (12 * half if apart else 0)
            d.line([(a, start), (a, level), (b, level), (b, start)], colour)
        text = "0 and 2, 1 and 3: copied first" if apart else "0 and 1, 2 and 3: read as they are"
        d.small(left, strip.y + 70, text)
    work = work_of(step_config(9))
    loads = work.ldmatrix_tile
    return d.result(
        y + 236,
        f"A warp has {loads} ldmatrix of K per block of keys, with up to 4 MOV behind each: "
        f"{loads} · 4 = {4 * loads} for {work.mma} mma. K's own order needs none.",
    )
