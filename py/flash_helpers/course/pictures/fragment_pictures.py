"""Pictures of registers: which lane holds what, and how it gets there."""

from __future__ import annotations

from flash_helpers.course.pictures.fragments import (
    LANES,
    MATRIX,
    Held,
    NamedRow,
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
    MARGIN,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    RED,
    SMALL,
    Drawing,
)
from flash_helpers.course.pictures.text_width import text_width
from flash_helpers.course.pictures.work import (
    LDMATRIX_BYTES,
    LDMATRIX_CYCLES,
    step_config,
    work_of,
)
from flash_helpers.gpu import MAX_REGISTERS, WARP
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.registry.ampere import CHUNK_BYTES, MMA_K, MMA_M

_LANE = 5  # the one that is followed
_REGISTER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
_PAIR_WIDTH, _ROW_HEIGHT = 40, 21  # of a register of two elements of A; of a row
_B_WIDTH, _B_HEIGHT = 30, 21
_C_WIDTH = 60


def _spans(values: set[int]) -> str:
    """{2, 3, 10, 11} as "2-3 and 10-11"."""
    starts = [v for v in sorted(values) if v - 1 not in values]
    ends = [v for v in sorted(values) if v + 1 not in values]
    pairs = zip(starts, ends, strict=True)
    return " and ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _held_cells(
    d: Drawing,
    operand: str,
    held: list[Held],
    x: float,
    y: float,
    width: float,
    height: float,
    across: int,
    down: int,
) -> None:
    """A cell for each `across` x `down` elements that one lane holds side by side."""
    ordered = sorted(held, key=lambda h: (h.lane == _LANE, h.row, h.column))
    for h in ordered:
        if h.row % down or h.column % across:
            continue
        followed = h.lane == _LANE
        d.cell(
            x + h.column // across * width,
            y + h.row // down * height,
            width,
            height,
            str(h.lane),
            _REGISTER_COLOURS[h.register],
            bold=followed,
            strong=followed,
            data={
                "operand": operand,
                "lane": h.lane,
                "register": h.register,
                "row": h.row,
                "column": h.column,
            },
        )


def mma_fragments() -> Drawing:
    """Which lane holds what of A, B and C."""
    a, b, c = (
        [h for lane in LANES for h in fragment(lane)]
        for fragment in (a_fragment, b_fragment, c_fragment)
    )
    g, t = divmod(_LANE, 4)
    d = Drawing(
        "mma_fragments",
        "mma.m16n8k16: which lane holds what",
        "The operands of C (16 x 8) += A (16 x 16) @ B (16 x 8) as grids. Each cell is a pair of "
        "neighbouring elements and names the lane of the warp that holds them; its colour and the "
        "label beside it name the register. Lane numbers run along the rows of A and C and down "
        "the columns of B, four lanes to a row of eight.",
    )
    x_a, x_c = 58.0, 58.0 + 8 * _PAIR_WIDTH + 22
    y_b = d.top + 24
    y_a = y_b + 8 * _B_HEIGHT + 30

    notes_y = d.paragraph(
        MARGIN,
        d.top,
        "A cell is two neighbouring elements: in A and B one register of 16-bit pairs, in C two "
        "registers. It names the lane that holds them: with g = lane / 4 and t = lane % 4, row g "
        "and columns 2t, 2t + 1 of each 8 x 8 quarter.",
        width=330,
        colour="muted",
    )
    notes_y = d.paragraph(
        MARGIN, notes_y + 6, f"Lane {_LANE}: g = {g}, t = {t}.", width=330, bold=True
    )
    own = {name: [h for h in x if h.lane == _LANE] for name, x in (("A", a), ("B", b), ("C", c))}
    for name, held in own.items():
        columns = _spans({h.column for h in held})
        plural = "s" if len({h.column for h in held}) > 1 else ""
        rows = _spans({h.row for h in held})
        line = f"{name}: rows {rows}, column{plural} {columns}"
        d.text(MARGIN, notes_y + 14, line)
        notes_y += 19

    _held_cells(d, "A", a, x_a, y_a, _PAIR_WIDTH, _ROW_HEIGHT, 2, 1)
    _held_cells(d, "B", b, x_c, y_b, _B_WIDTH, _B_HEIGHT, 1, 2)
    _held_cells(d, "C", c, x_c, y_a, _C_WIDTH, _ROW_HEIGHT, 2, 1)
    for half in range(2):
        middle = x_a + (half * 4 + 2) * _PAIR_WIDTH
        y = y_a + half * 8 * _ROW_HEIGHT
        d.text(middle, y_a - 7, f"a{2 * half}", anchor="middle", bold=True)
        d.text(middle, y_a + 16 * _ROW_HEIGHT + 16, f"a{2 * half + 1}", anchor="middle", bold=True)
        d.text(
            x_c + 4 * _C_WIDTH + 8, y + 4 * _ROW_HEIGHT + 5, f"c{2 * half}, c{2 * half + 1}",
            size=SMALL, bold=True,
        )  # fmt: skip
        d.text(x_c + 8 * _B_WIDTH + 6, y_b + (half * 4 + 2) * _B_HEIGHT + 5, f"b{half}", bold=True)
    for row in range(16):
        d.text(
            x_a - 8,
            y_a + row * _ROW_HEIGHT + 15,
            f"row {row}" if row == 0 else str(row),
            size=SMALL,
            anchor="end",
            colour="muted",
        )
    d.text(
        x_c + 4 * _B_WIDTH, y_b - 8, "B (16 x 8): depth down, columns across", size=SMALL,
        anchor="middle", colour="muted",
    )  # fmt: skip
    y = y_a + 16 * _ROW_HEIGHT + 16
    d.text(x_a + 4 * _PAIR_WIDTH, y, "A (16 x 16)", size=SMALL, anchor="middle", colour="muted")
    d.text(x_c + 2 * _C_WIDTH, y, "C (16 x 8)", size=SMALL, anchor="middle", colour="muted")
    d.result(
        y + 14,
        f"A lane holds 16 · 16 / 32 = {len(own['A'])} elements of A in 4 registers, 16 · 8 / 32 = "
        f"{len(own['B'])} of B in 2 and {len(own['C'])} of C in 4. A row of C lies in four lanes: "
        "two shuffles reduce it.",
    )
    return d


def _named_rows(
    d: Drawing, x: float, y: float, width: float, height: float, order: list[NamedRow]
) -> None:
    """The 16 x 16 piece in shared memory: each row of a matrix, with the lane that names it."""
    for named in order:
        d.cell(
            x + named.chunk * width,
            y + named.row * height,
            width,
            height,
            f"lane {named.lane}",
            _REGISTER_COLOURS[named.matrix],
            data={
                "names": named.lane,
                "matrix": named.matrix,
                "row": named.row,
                "chunk": named.chunk,
            },
        )


def ldmatrix() -> Drawing:
    """Addresses and registers of ldmatrix.x4."""
    order = [a_order(lane) for lane in LANES]
    followed = order[_LANE + MATRIX]
    d = Drawing(
        "ldmatrix",
        "ldmatrix.x4: a lane names a row, four lanes receive it",
        "Left, a 16 x 16 piece of a tile in shared memory: 16 rows of two chunks of 16 bytes, each "
        "with the lane whose address names it. Right, the four registers that the instruction "
        "writes, one for each 8 x 8 matrix: of every matrix, the four words of row g go to lanes "
        "4g to 4g + 3.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"32 addresses, one a lane, each of a row of {CHUNK_BYTES} bytes in one of four 8 x 8 "
        "matrices. Matrix i becomes register i of all lanes: the layout that mma wants.",
        colour="muted",
    )
    x_left, chunk_width, height = 58.0, 100.0, 22.0
    y += 38
    d.text(x_left + chunk_width, y - 22, "shared memory, 16 x 16", anchor="middle", bold=True)
    for chunk, text in enumerate(("columns 0-7", "columns 8-15")):
        d.text(
            x_left + (chunk + 0.5) * chunk_width, y - 6, text, size=SMALL, anchor="middle",
            colour="muted",
        )  # fmt: skip
    _named_rows(d, x_left, y, chunk_width, height, order)
    for row in range(16):
        label = f"row {row}" if row == 0 else str(row)
        d.text(x_left - 6, y + row * height + 16, label, size=SMALL, anchor="end", colour="muted")

    x_right, word = 330.0, 42.0
    gap = PAGE_WIDTH - MARGIN - x_right - 8 * word
    d.text(
        (x_right + PAGE_WIDTH - MARGIN) / 2, y - 22, "registers: who receives which word",
        anchor="middle", bold=True,
    )  # fmt: skip
    for matrix in range(4):
        left = x_right + matrix // 2 * (4 * word + gap)
        top = y + matrix % 2 * 8 * height
        label_y = y + 16 * height + 16 if matrix % 2 else y - 6
        d.text(
            left + 2 * word, label_y, f"register {matrix}", size=SMALL, anchor="middle",
            colour="muted",
        )  # fmt: skip
        for named in (n for n in order if n.matrix == matrix):
            for w, lane in enumerate(named.receivers):
                d.cell(
                    left + w * word,
                    top + named.lane % MATRIX * height,
                    word,
                    height,
                    str(lane),
                    _REGISTER_COLOURS[matrix],
                    data={"receives": lane, "register": matrix, "word": w, "named-by": named.lane},
                )
    # the followed row, outlined on both sides
    d.rect(
        x_left + followed.chunk * chunk_width, y + followed.row * height, chunk_width, height,
        "ink", strong=True,
    )  # fmt: skip
    at = y + (followed.matrix % 2 * 8 + followed.lane % MATRIX) * height
    d.rect(
        x_right + followed.matrix // 2 * (4 * word + gap), at, 4 * word, height, "ink", strong=True
    )
    d.arrow([(x_left + 2 * chunk_width + 6, at + height / 2), (x_right - 4, at + height / 2)])
    d.result(
        y + 16 * height + 28,
        f"Lane {followed.lane} names row {followed.row}, columns {8 * followed.chunk}-"
        f"{8 * followed.chunk + 7}: its four words become register {followed.matrix} of lanes "
        f"{followed.receivers[0]}-{followed.receivers[-1]}. In all {len(order)} · {CHUNK_BYTES} = "
        f"{LDMATRIX_BYTES} bytes, one wavefront of 128 bytes a matrix: {LDMATRIX_CYCLES:.0f} "
        "cycles of shared memory if no banks conflict.",
    )
    return d


def fragment_registers(config: FlashForwardKernelConfig, product: str) -> dict[str, int]:
    """Registers of a thread that the source holds at once during a product, by matrix.

    product: "S" or "O", what is computed.
    """
    rows = config.B_r // config.n_warps
    row_tiles, k_tiles = rows // MMA_M, config.d_head // MMA_K
    buffers = 2 if config.mma_double_buffer_loads else 1
    Q_tiles = config.Q_mma_load_K_tiles * buffers or k_tiles
    found = {"O": rows * config.d_head // WARP}
    if product == "S":
        found["S"] = rows * config.B_c // WARP
        found["K"] = (config.K_mma_load_K_tiles * buffers or k_tiles) * config.B_c // MMA_K * 4
    else:
        found["P"] = rows * config.B_c // WARP // 2
        found["V"] = (config.V_mma_load_K_tiles * buffers or config.B_c // MMA_K) * k_tiles * 4
    if product == "S" or not config.Q_mma_load_K_tiles:
        found["Q"] = Q_tiles * row_tiles * 4
    return found


_MATRIX_COLOURS = {"O": PURPLE, "S": GREY, "P": RED, "K": ORANGE, "V": GREEN, "Q": BLUE}


def fragments_whole_vs_interleaved() -> Drawing:
    """Step 4: registers of fragments, whole tiles against one k-tile at a time."""
    d = Drawing(
        "fragments_whole_vs_interleaved",
        "Step 4: a k-tile at a time instead of a whole tile",
        "Stacked bars of the registers of a thread that the source holds at once, in step 3 and in "
        "step 4, during S = Q K^T and O += P V. In step 3 the fragments of a whole tile of K or V "
        "are the largest part; in step 4 those of one k-tile are small, and Q is loaded with K.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "Above each bar the order of the source for S: L loads the fragments of a k-tile, M "
        "multiplies them. Bars: registers of a thread that the source holds at once (ptxas may "
        "hold fewer, or reorder).",
        colour="muted",
    )
    left = 104.0
    configs = {3: step_config(3), 4: step_config(4)}
    most = max(
        sum(fragment_registers(c, product).values()) for c in configs.values() for product in "SO"
    )
    scale = (PAGE_WIDTH - MARGIN - 40 - left) / most
    totals: dict[tuple[int, str], int] = {}
    for step, config in configs.items():
        k_tiles = config.d_head // MMA_K
        y += 10
        d.text(MARGIN, y + 17, f"Step {step}", bold=True)
        order = "L" * k_tiles + "M" * k_tiles if step == 3 else "LM" * k_tiles
        for n, letter in enumerate(order):
            d.cell(left + n * 22, y, 22, 22, letter, ORANGE if letter == "L" else BLUE)
        y += 30
        for product, label in (("S", "S = Q @ K^T"), ("O", "O += P @ V")):
            d.text(MARGIN, y + 17, label, size=SMALL)
            held = fragment_registers(config, product)
            x, narrow = left, []
            for name, registers in held.items():
                width = registers * scale
                text = f"{name} {registers}"
                fits = text_width(text, SMALL) < width - 3
                narrow += [] if fits else [text]
                d.cell(
                    x, y, width, 24, text if fits else "", _MATRIX_COLOURS[name],
                    data={
                        "step": step, "product": product, "matrix": name, "registers": registers,
                    },
                )  # fmt: skip
                x += width
            totals[step, product] = sum(held.values())
            d.text(x + 7, y + 17, f"{totals[step, product]}", bold=True)
            if narrow:
                d.text(x + 46, y + 17, f"with {', '.join(narrow)}", size=SMALL, colour="muted")
            y += 30
    whole, piece = (fragment_registers(configs[n], "S")["K"] for n in (3, 4))
    config = configs[3]
    d.result(
        y + 6,
        f"K whole: {config.B_c} · {config.d_head} elements / 2 a register / 32 lanes = {whole} "
        f"registers; one k-tile: {config.B_c} · {MMA_K} / 2 / 32 = {piece}. A thread has "
        f"{MAX_REGISTERS}: step 3's {totals[3, 'S']} fit because ptxas reorders. The "
        f"price is Q again for every block of keys, "
        f"{work_of(configs[4]).ldmatrix_Q} ldmatrix.",
    )
    return d


def fragment_order() -> Drawing:
    """Step 9: K's fragments in the order that mma reads them."""
    d = Drawing(
        "fragment_order",
        "Step 9: the two registers of a B operand become neighbours",
        "A 16 x 16 piece of K as four 8 x 8 matrices, with the register of ldmatrix.x4 that each "
        "becomes. Up to step 8 the two matrices of keys 0 to 7 become registers 0 and 2. From step "
        "9 on they become registers 0 and 1, an aligned pair as mma wants it.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "One ldmatrix.x4 of K serves two mma, one for each 8 keys; each reads both halves of the "
        "depth as an aligned pair of registers.",
        colour="muted",
    )
    y += 8
    panel = (PAGE_WIDTH - 2 * MARGIN) / 2
    loads = work_of(step_config(9)).ldmatrix_K
    for n, (title, order) in enumerate(
        (("Steps 1 to 8: A's order", a_order), ("Step 9: K's own order", k_order))
    ):
        left = MARGIN + n * panel
        d.text(left, y + 16, title, bold=True)
        quarter = {(named.row // MATRIX, named.chunk): named.matrix for named in map(order, LANES)}
        top = y + 50
        x0 = left + 78
        for chunk in range(2):
            d.text(
                x0 + (chunk + 0.5) * 96, top - 7, f"depth {8 * chunk}-{8 * chunk + 7}", size=SMALL,
                anchor="middle", colour="muted",
            )  # fmt: skip
        for (half, chunk), matrix in sorted(quarter.items()):
            d.cell(
                x0 + chunk * 96, top + half * 46, 96, 46, f"register {matrix}",
                BLUE if half == 0 else ORANGE,
                data={"order": n, "half": half, "chunk": chunk, "register": matrix},
            )  # fmt: skip
        for half in range(2):
            label = f"keys {8 * half}-{8 * half + 7}"
            d.text(x0 - 8, top + half * 46 + 27, label, size=SMALL, anchor="end", colour="muted")
        strip = top + 128
        owner = {matrix: half for (half, _), matrix in quarter.items()}
        d.text(left, strip + 20, "registers", size=SMALL, colour="muted")
        for register in range(4):
            colour = BLUE if owner[register] == 0 else ORANGE
            d.cell(x0 + register * 48, strip, 48, 30, str(register), colour, bold=True)
        for half in range(2):
            pair = sorted(r for r, h in owner.items() if h == half)
            xs = [x0 + r * 48 + 24 for r in pair]
            level = strip + 38 + (12 * half if pair[1] - pair[0] > 1 else 0)
            d.line(
                [(xs[0], strip + 33), (xs[0], level), (xs[1], level), (xs[1], strip + 33)],
                BLUE if half == 0 else ORANGE,
            )
        apart = quarter[0, 1] - quarter[0, 0] > 1
        text = "0 and 2, 1 and 3: copied first" if apart else "0 and 1, 2 and 3: read as they are"
        d.text(x0, strip + 70, text, size=SMALL)
    d.result(
        y + 264,
        f"A warp has {loads} ldmatrix of K for each block of keys, with up to 4 MOV behind each: "
        f"{loads} · 4 = {4 * loads} for {work_of(step_config(9)).mma} mma. K's own "
        "order needs none.",
    )
    return d
