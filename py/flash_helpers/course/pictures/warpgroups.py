"""Pictures of Hopper's units: tiles as TMA writes and wgmma reads them, accumulators of a
warpgroup, the ring of barriers, and what warpgroups do side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

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
from flash_helpers.course.pictures.timelines import Segment, Timeline
from flash_helpers.course.pictures.work import CAPABILITY, EX2_CYCLES
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.registry.hopper import (
    CHUNK_BYTES,
    HOPPER,
    LONG_TILE,
    PIECE,
    WARP_ROWS,
    WGMMA_K,
    WGMMA_M,
    HopperKernelConfig,
)
from flash_helpers.registry.problem import ELEMENT_BYTES, DType
from flash_helpers.sass.analyse.occupancy import SUB_PARTITIONS
from flash_helpers.sass.read import opcodes

_ROW_BYTES = PIECE * ELEMENT_BYTES
_ROWS = 8  # after which the swizzle's pattern repeats
_STEP_BYTES = WGMMA_K * ELEMENT_BYTES  # of a row in one k-tile
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
_COPY = 768  # cycles: as long as a copy from L2 is drawn; nothing counts it
_STORE = 256  # the same of a store of O
_READ = 128  # and of TMA's way through it in shared memory
# Of a block's first cycles, as benchmarks/results/first_cycles_h100.json has them, to tens: until
# its cluster has met, if nobody waits for memory; what a MEMBAR.ALL.GPU adds; from there until the
# producer asks for Q.
_MEET, _FENCE, _ASK = 340, 940, 1220
_LANE = 5  # the one that is followed
_ARROW = 30  # from the lane of the store to that of a slot
_RING_COLUMNS = 16  # of the picture of the ring


def hopper_step(number: int) -> HopperKernelConfig:
    """The fixed config of a step of the hopper family, in bf16."""
    return HOPPER.fixed_config(HOPPER.steps[HOPPER.step_id(number)], DType.BF16)


def place(row: int, chunk: int) -> int:
    """Where a chunk of a row of a piece lies."""
    return chunk ^ row % _ROWS


def column_offset(k: int, rows: int) -> int:
    """Bytes from the start of a tile of some rows to its k-tile, as its descriptor has them."""
    piece, inside = divmod(k * _STEP_BYTES, _ROW_BYTES)
    return piece * rows * _ROW_BYTES + inside


def tma_tile() -> Drawing:
    """Step h1: eight rows of a piece, and where the descriptor of each k-tile points."""
    config = hopper_step(1)
    d = Drawing(
        "Step h1: a tile as TMA writes it and wgmma reads it",
        f"A piece of a tile is rows of {_ROW_BYTES} bytes: eight chunks of {CHUNK_BYTES} bytes. "
        "Eight rows are drawn. In row r chunk c lies at place c XOR r, so that the two chunks of a "
        "k-tile are in other places in each row. The descriptor of a k-tile only names the place "
        "that they have in row 0.",
        f"Rows 0-7 of a piece of {PIECE} columns. A cell is {CHUNK_BYTES} bytes and has the number "
        "of its chunk; a colour is a k-tile.",
    )
    grid = Grid(d, 64, d.y + 24, 50, 24)
    chunks = _ROW_BYTES // CHUNK_BYTES
    for p in range(chunks):
        d.note(grid.middle(p), grid.y - 7, f"+{p * CHUNK_BYTES}", "middle")
    d.note(d.left, grid.y - 7, "byte")
    for row in range(_ROWS):
        d.note(d.left, grid.top(row) + 17, f"row {row}")
        for chunk in range(chunks):
            k = chunk * CHUNK_BYTES // _STEP_BYTES
            at = place(row, chunk)
            data = {"row": row, "chunk": chunk, "place": at, "k": k}
            grid.cell(row, at, str(chunk), _COLOURS[k], strong=row == 0, **data)
    y = grid.top(_ROWS) + 12
    d.bold(d.left, y + 14, f"Start of each k-tile, for the {config.B_c} rows of K:")
    y += 24
    table = Grid(d, d.left, y, d.width / 4, 24, gap=4, below=4)
    for k in range(config.d_head // WGMMA_K):
        offset = column_offset(k, config.B_c)
        colour = _COLOURS[k % len(_COLOURS)]
        table.cell(k // 4, k % 4, f"k {k}: + {offset:,}", colour, step=k, offset=offset)
    pattern = _ROWS * _ROW_BYTES
    return d.result(
        table.top(2) + 6,
        f"A k-tile is {WGMMA_K} columns, {_STEP_BYTES} bytes: the start moves by {_STEP_BYTES}, as "
        "if nothing were permuted, since the hardware swizzles each address that follows from it. "
        f"After {_ROW_BYTES // _STEP_BYTES} k-tiles comes the next piece, {config.B_c} · "
        f"{_ROW_BYTES} = {config.B_c * _ROW_BYTES:,} bytes on. From 8 rows to the next it is "
        f"{_ROWS} · {_ROW_BYTES} = {pattern:,}, which the descriptor says too.",
    )


def d_fragment(lane: int, register: int) -> tuple[int, int]:
    """Row and column, in the 16 rows of a warp, of an accumulator of wgmma (PTX ISA 9.0, "Register
    Fragments for wgmma.mma_async.m64nNk16")."""
    g, t = divmod(lane, 4)
    return g + _ROWS * (register // 2 % 2), _ROWS * (register // 4) + 2 * t + register % 2


def a_registers(lane: int, register: int) -> tuple[int, int]:
    """Row and first column of what a register of A holds, two elements each."""
    g, t = divmod(lane, 4)
    return g + _ROWS * (register % 2), _ROWS * (register // 2) + 2 * t


def wgmma_fragments() -> Drawing:
    """Step h2: an accumulator in 16 bits is an operand A."""
    d = Drawing(
        "Step h2: S as wgmma leaves it is P as wgmma takes it",
        "Two grids of 16 rows and 16 columns: the first accumulators of a warp, and operand A in "
        "registers. Each cell is two neighbouring elements and names the lane that holds them. "
        "Both grids have the same lanes in the same places.",
        f"The {WARP_ROWS} rows of a warp, 16 columns. A cell is two neighbouring elements, and "
        "names the lane that holds them; its colour is the register.",
    )
    top = d.y + 26
    left = Grid(d, 40, top, 26, 20)
    right = Grid(d, 262, top, 26, 20)
    d.bold(left.middle(3.5), top - 9, "accumulators of S", "middle")
    d.bold(right.middle(3.5), top - 9, "operand A: P", "middle")
    for row in range(WARP_ROWS):
        d.note(left.x - 6, left.top(row) + 15, str(row), "end")
    cells = []
    for lane in range(32):
        for n in range(4):
            cells.append((left, "S", lane, n, d_fragment(lane, 2 * n)))
            cells.append((right, "P", lane, n, a_registers(lane, n)))
    for grid, operand, lane, n, (row, column) in sorted(cells, key=lambda c: c[2] == _LANE):
        data = {"operand": operand, "lane": lane, "register": n, "row": row, "column": column}
        grid.cell(row, column // 2, str(lane), _COLOURS[n], strong=lane == _LANE, **data)
    y = left.top(WARP_ROWS) + 10
    legend = Grid(d, d.left, y, d.width / 4, 24, gap=4, below=4)
    for n in range(4):
        legend.cell(0, n, f"D{2 * n}, D{2 * n + 1} to a{n}", _COLOURS[n])
    return d.result(
        legend.top(1) + 4,
        f"Of 16 columns a lane has {WARP_ROWS} · 16 / 32 = {WARP_ROWS * 16 // 32} accumulators. "
        f"Lane {_LANE} packs D0 and D1 into a0, D2 and D3 into a1, and so on: 4 registers of two "
        "16-bit elements. P needs no shuffle, no store and no barrier. The next 16 columns are D8 "
        "to D15.",
    )


class _Costs:
    """Cycles of an SM of one warpgroup for one block of keys: products, and exponentials."""

    def __init__(self, config: HopperKernelConfig) -> None:
        columns = {"S": config.B_c, "O": config.d_head}
        depths = {"S": config.d_head, "O": config.B_c}
        self.S, self.O = (
            depths[name] // WGMMA_K * _wgmma_cycles(columns[name]) for name in ("S", "O")
        )
        # of each lane, and of the rescale of its two rows
        self.ex2 = (64 * config.B_c // 128 + 2) * SUB_PARTITIONS * EX2_CYCLES


def _wgmma_cycles(n: int) -> float:
    """Of the four warps of a warpgroup."""
    cycles = opcodes.cost(f"HGMMA.64x{n}x16.F32.BF16", CAPABILITY)
    assert cycles is not None
    return SUB_PARTITIONS * cycles


def _laid(start: float, parts: Sequence[tuple[str, float, str]]) -> Iterator[Segment]:
    """One behind the other: label, length, colour."""
    ends = accumulate((length for _, length, _ in parts), initial=start)
    for (label, length, colour), begin in zip(parts, ends, strict=False):
        yield Segment(begin, length, label, colour)


def _copies(starts: Sequence[float]) -> list[Segment]:
    return [Segment(at, _COPY, f"K, V {j}", ORANGE) for j, at in enumerate(starts)]


_COUNTED = (
    "S = Q @ K^T, P = softmax(S), O: O += P @ V, numbered by block of keys. Cycles of tensor cores "
    "and exponentials counted for sm_90a, not measured; the rest is left out."
)


def two_slots() -> Drawing:
    """Steps h3 and h4: one slot each for K and V, and two."""
    four = hopper_step(4)
    cost = _Costs(four)
    S, O, ex2 = 2 * cost.S, 2 * cost.O, cost.ex2  # noqa: E741  both warpgroups
    block = S + ex2 + O
    d = Drawing(
        "Step h4: the next K and V are on their way while these are used",
        "Two timelines of a thread block of two warpgroups. In step h3 each block of keys begins "
        "with a copy that everybody waits for. In step h4 it was started a block earlier, into the "
        "other slot, and has arrived.",
        f"{_COUNTED} A copy from L2 is drawn as {_COPY} cycles, which nothing counts.",
    )
    line = Timeline(d, 2 * (_COPY + block))
    own = [
        [("", _COPY, ""), (f"S_{j}", S, BLUE), (f"P_{j}", ex2, RED), (f"O_{j}", O, PURPLE)]
        for j in range(3)
    ]
    line.heading("Step h3: one slot")
    line.lane("copies", _copies([0, _COPY + block]))
    line.lane("groups 1, 2", [s for s in _laid(0, own[0] + own[1]) if s.label])
    line.heading("Step h4: two slots")
    line.lane("copies", _copies([0, _COPY, _COPY + block]))
    line.lane("groups 1, 2", list(_laid(_COPY, [part for of in own for part in of if part[0]])))
    line.axis([0, _COPY, _COPY + block])
    return d.result(
        d.y + 8,
        f"Both warpgroups together take 2 · {cost.S:.0f} = {S:.0f} cycles for S and as many for O. "
        f"A copy of h4 has {S:.0f} + {ex2:.0f} + {O:.0f} = {block:.0f} cycles to land in. The "
        f"price: 2 · {four.B_c} · {four.d_head} · {ELEMENT_BYTES} bytes = "
        f"{(four.smem_bytes - hopper_step(3).smem_bytes) // 1024} KiB of shared memory.",
    )


def barrier_ring() -> Drawing:
    """Step h5: the slots of K, and the phases of their barriers."""
    config = hopper_step(5)
    arrives, used = 2, 4  # columns of the grid; not to scale
    d = Drawing(
        "Step h5: a slot is full, empty, full again",
        "The two slots of K over five blocks of keys, each with the phases of its two barriers. A "
        "full barrier ends a phase when the bytes of a copy have come, an empty barrier when all "
        "warps that compute have released the slot. Phases alternate between parity 0 and 1.",
        "Time runs to the right, not to scale. A phase is named by its parity; it ends where the "
        "next one begins.",
    )
    grid = Grid(d, 66, d.y + 8, (d.right - 66) / _RING_COLUMNS, 24, below=4)
    y = 0
    for slot in range(config.K_slots):
        begin = slot * 3
        blocks = range(slot, 5, config.K_slots)
        d.bold(d.left, grid.top(y) + 16, f"slot {slot}")
        d.note(d.left, grid.top(y + 1) + 15, "full")
        d.note(d.left, grid.top(y + 2) + 15, "empty")
        ends: dict[str, list[int]] = {"full": [], "empty": []}
        at = begin
        for j in blocks:
            _bar(grid, y, at, at + arrives, f"K_{j}", ORANGE, slot=slot, block=j, what="copied")
            _bar(
                grid, y, at + arrives, at + 6, f"read K_{j}", BLUE, slot=slot, block=j, what="read"
            )
            ends["full"].append(at + arrives)
            ends["empty"].append(at + arrives + used)
            at += arrives + used
        for row, (name, marks) in enumerate(ends.items(), start=1):
            edges = [0, *(mark for mark in marks if mark < _RING_COLUMNS), _RING_COLUMNS]
            for phase, (a, b) in enumerate(pairwise(edges)):
                parity = phase % 2
                colour = PURPLE if parity else GREY
                data = {"barrier": name, "slot": slot, "phase": phase, "parity": parity}
                _bar(grid, y + row, a, b, str(parity), colour, **data)
        y += 3.4
    d.y = grid.top(y) + 2
    return d.result(
        d.y,
        "K_2 is in slot 2 mod 2 = 0, in lap 2 / 2 = 1. Whoever waits names the parity of the phase "
        "that must have ended: for K_0 parity 0 of full, for K_2, a lap later, parity 1. The "
        "producer waits for empty with the other one: before K_0 parity 1, of the phase before the "
        "first, which counts as ended; before K_2 parity 0.",
    )


def _bar(
    grid: Grid, row: float, begin: int, end: int, label: str, colour: str, **data: object
) -> None:
    """Cells begin … end of a row as one, with its label if that fits."""
    width = (min(end, _RING_COLUMNS) - begin) * grid.width
    if width > 0:
        label = label if text_width(label, SMALL) <= width - 2 else ""
        height = grid.height - grid.below
        grid.drawing.cell(grid.left(begin), grid.top(row), width, height, label, colour, **data)


def _busy(segments: Iterable[Segment]) -> Iterator[Segment]:
    """When products of these run, without the gaps between neighbours."""
    products = sorted((s for s in segments if s.label[:1] in "SO"), key=lambda s: s.start)
    begin, end = 0.0, 0.0
    for s in products:
        if s.start > end:
            yield Segment(begin, end - begin, "busy", GREEN)
            begin = s.start
        end = max(end, s.end)
    yield Segment(begin, end - begin, "busy", GREEN)


def ping_pong() -> Drawing:
    """Steps h5 and h6: two warpgroups in step, and in turns."""
    cost = _Costs(hopper_step(6))
    S, O, ex2 = cost.S, cost.O, cost.ex2  # noqa: E741
    together = 2 * (S + O) + ex2
    d = Drawing(
        "Step h6: one computes exponentials while the other multiplies",
        "Timelines of two warpgroups. In step, as nothing in step h5 forbids, both multiply at the "
        "same time, each at half the speed, and both compute exponentials at the same time, when "
        "the tensor cores idle. In step h6 they take turns at the exponentials, and the tensor "
        "cores have work. The producer fills a slot when both have released it.",
        f"{_COUNTED} A copy is drawn as {_COPY / 2:.0f} cycles, which nothing counts.",
    )
    begin = max(2 * S, S + ex2)  # of O_0, in turns
    line = Timeline(d, begin + 3 * (O + S))
    line.heading("Step h5, if both happen to be in step")
    block = [("O_0", 2 * O, PURPLE), ("S_1", 2 * S, BLUE), ("P_1", ex2, RED)]
    in_step = [*_laid(0, [("S_0", 2 * S, BLUE), ("P_0", ex2, RED), *block])]
    for n in (1, 2):
        line.lane(f"group {n}", in_step)
    line.lane("tensor", _busy(in_step))
    line.heading("Step h6: in turns")
    groups = []
    for n in range(2):
        found = [Segment(n * S, S, "S_0", BLUE), Segment(S + n * ex2, ex2, "P_0", RED)]
        for j in range(2):
            parts = [(f"O_{j}", O, PURPLE), (f"S_{j + 1}", S, BLUE), (f"P_{j + 1}", ex2, RED)]
            found += _laid(begin + (2 * j + n) * (O + S), parts)
        groups.append(found)
    released = {s.label: s.end for s in groups[1]}
    copies = [
        Segment(released[f"{by}_{j}"], _COPY / 2, f"{name}_{j + 2}", colour)
        for name, by, colour in (("K", "S", ORANGE), ("V", "O", GREY))
        for j in range(2)
    ]
    line.lane("producer", copies)
    for n, found in enumerate(groups, start=1):
        line.lane(f"group {n}", found)
    line.lane("tensor", _busy([s for found in groups for s in found]))
    line.axis([0, 2 * S, together, line.cycles])
    return d.result(
        d.y + 8,
        f"In step, a block of keys takes 2 · ({S:.0f} + {O:.0f}) + {ex2:.0f} = {together:.0f} "
        f"cycles, {2 * (S + O) / together:.0%} of them with busy tensor cores. In turns the "
        f"{ex2:.0f} of one lie beside the {S + O:.0f} of the other.",
    )


def own_products() -> Drawing:
    """Steps h6 and h7: one warpgroup."""
    cost = _Costs(hopper_step(7))
    S, O, ex2 = cost.S, cost.O, cost.ex2  # noqa: E741
    serial, beside = S + ex2 + O, S + max(ex2, O)
    d = Drawing(
        "Step h7: the softmax beside the warpgroup's own product",
        "Timelines of one warpgroup, its products above its exponentials. In step h6 nothing is "
        "multiplied while it computes exponentials. In step h7 S of the next block of keys is "
        "issued before O of this one, and the softmax of that S runs beside O.",
        f"One warpgroup alone. {_COUNTED}",
    )
    line = Timeline(d, 3 * serial)
    line.heading("Step h6")
    line.lane(
        "products",
        [
            s
            for j in range(3)
            for s in (
                Segment(j * serial, S, f"S_{j}", BLUE),
                Segment(j * serial + S + ex2, O, f"O_{j}", PURPLE),
            )
        ],
    )
    line.lane("softmax", [Segment(j * serial + S, ex2, f"P_{j}", RED) for j in range(3)])
    line.heading("Step h7")
    begin = S + ex2
    products = [Segment(0, S, "S_0", BLUE)]
    softmax = [Segment(S, ex2, "P_0", RED)]
    for j in range(1, 5):
        at = begin + (j - 1) * beside
        products += [
            Segment(at, S, f"S_{j}", BLUE),
            Segment(at + S, O, f"O_{j - 1}", PURPLE),
        ]
        softmax.append(Segment(at + S, ex2, f"P_{j}", RED))
    line.lane("products", products)
    line.lane("softmax", softmax)
    line.axis([0, S, serial, 2 * serial])
    return d.result(
        d.y + 8,
        f"A block of keys takes {S:.0f} + {ex2:.0f} + {O:.0f} = {serial:.0f} cycles in h6, and "
        f"{S:.0f} + {max(ex2, O):.0f} = {beside:.0f} in h7. Alone, a warpgroup keeps the tensor "
        f"cores busy for {(S + O) / serial:.0%} of the time, and {(S + O) / beside:.0%}.",
    )


def flattened() -> Drawing:
    """Steps h10 and h11: one warpgroup from tile to tile."""
    cost = _Costs(hopper_step(11))
    S, O, ex2 = cost.S, cost.O, cost.ex2  # noqa: E741
    beside = max(ex2, O)
    d = Drawing(
        "Step h11: the next tile's first product beside this one's last",
        "Timelines of one warpgroup that goes from one tile of Q to the next. In step h10 the last "
        "product of a tile, its store, the first product of the next tile and its softmax stand "
        "one behind the other. In step h11 the first product of the next tile is issued before the "
        "last one of this tile, and its softmax runs beside that one.",
        f"One warpgroup alone; blocks of keys 2 and 3 of one tile, 0 and 1 of the next. {_COUNTED} "
        f"The store of O is drawn as {_STORE} cycles, which nothing counts.",
    )

    def lanes(segments: Sequence[Segment]) -> None:
        for name, kinds in (("products", "SO"), ("softmax", "P"), ("store", "s")):
            line.lane(name, [s for s in segments if s.label[0] in kinds])

    last = [Segment(0, S, "S_3", BLUE), Segment(S, O, "O_2", PURPLE), Segment(S, ex2, "P_3", RED)]
    at = S + beside
    serial = [*_laid(at, [("O_3", O, PURPLE), ("store", _STORE, GREY), ("S_0", S, BLUE)])]
    after = serial[-1].end
    serial += [Segment(after, ex2, "P_0", RED)]
    tiles = {10: after + ex2, 11: at + S + beside}
    line = Timeline(d, tiles[10] + S + beside)
    line.heading("Step h10")
    lanes([*last, *serial, *_next_block(tiles[10], S, O, ex2)])
    line.heading("Step h11")
    flat = [
        Segment(at, S, "S_0", BLUE),
        Segment(at + S, O, "O_3", PURPLE),
        Segment(at + S, ex2, "P_0", RED),
        Segment(at + S + O, _STORE, "store", GREY),
    ]
    lanes([*last, *flat, *_next_block(tiles[11] + _STORE, S, O, ex2)])
    line.axis([0, at, tiles[11], tiles[10]])
    return d.result(
        d.y + 8,
        f"From the last softmax of a tile to the first block that overlaps again h10 takes {O:.0f} "
        f"+ {_STORE} + {S:.0f} + {ex2:.0f} = {tiles[10] - at:.0f} cycles, and h11 for the same "
        f"work {S:.0f} + {beside:.0f} + {_STORE} = {tiles[11] + _STORE - at:.0f}.",
    )


def _causal_table(
    d: Drawing, config: HopperKernelConfig, rows: int, len_q: int, len_k: int
) -> tuple[list[int], list[int]]:
    """A row for so many queries, a column for each block of keys: those that the queries see have
    the number of their turn.

    Returns for each row how many blocks it sees, and how many are loaded for its tile.
    """
    B_r, B_c, ahead = config.B_r, config.B_c, len_k - len_q
    blocks, x, is_tile = -(-len_k // B_c), d.left + 92, rows == B_r
    grid = Grid(d, x, d.y + 28, (d.right - x) / blocks, 46 if is_tile else 30)
    for column in range(blocks):
        label = f"{column * B_c} …" if column else "keys 0 …"
        d.small(grid.middle(column), d.y + 18, label, "middle")
    seen, loaded, diagonal = [], [], []
    for query in range(0, len_q, rows):
        end, tile = query + rows, query // B_r
        row = query / rows + (0 if is_tile else tile / 3)  # tiles of several rows stand apart
        seen.append(-(-(end + ahead) // B_c))
        loaded.append(-(-((tile + 1) * B_r + ahead) // B_c))
        d.small(d.left, grid.top(row) + grid.height / 2 + 4, f"queries {query} …")
        for column in range(blocks):
            turn, whole = seen[-1] - 1 - column, (column + 1) * B_c <= query + 1 + ahead
            data = {"query": query, "block": column}
            if turn >= 0:
                part = "all" if whole else "part"
                colour = BLUE if whole else ORANGE
                grid.cell(row, column, "", colour, **data, seen=part, turn=turn)
                crossed = (query + rows / 2 + ahead) / B_c - column  # at half height
                beside = 0 if abs(crossed - 0.5) > 0.3 else 0.3 if crossed < 0.5 else -0.3
                at = grid.middle(column + beside), grid.top(row) + grid.height / 2 + 4.5
                d.small(*at, str(turn), "middle")
            elif column < loaded[-1]:
                grid.cell(row, column, "left out", GREY, **data, seen="none", turn="passed")
            else:
                grid.cell(row, column, "", dashed=True, **data, seen="none")
        ends = ((x + (at + ahead) / B_c * grid.width) for at in (query, end))
        diagonal += zip(ends, (grid.top(row), grid.top(row + 1)), strict=True)
    d.line(diagonal, RED)
    d.y = grid.top(row + 1) + 16
    return seen, loaded


def causal_blocks() -> Drawing:
    """Step h21: the blocks of keys of each tile, in the order in which they are taken."""
    config, len_q, len_k = hopper_step(21), 512, 560
    B_r, B_c = config.B_r, config.B_c
    n, blocks = len_q // B_r, -(-len_k // B_c)
    d = Drawing(
        "Step h21: what a causal mask touches is a tile's first two blocks",
        f"A table: {n} tiles of queries, {blocks} blocks of keys. In each tile the blocks up to "
        "the diagonal are numbered from the right, from 0 on; only those with the numbers 0 and 1 "
        "are touched by the diagonal. What lies right of it is not loaded.",
        f"{len_q} queries in tiles of {B_r}, {len_k} keys in blocks of {B_c}. The number is that "
        "of the turn in which a tile has the block; the line is the last key that a query sees.",
    )
    seen, _ = _causal_table(d, config, B_r, len_q, len_k)
    return d.result(
        d.y,
        f"Orange: hidden in part. Blue: seen whole; the loop has numbers 2 and up, and no mask. "
        f"{' + '.join(map(str, seen))} = {sum(seen)} blocks of {n * blocks} are taken. With "
        "as many keys as queries the diagonal lies in block 0 alone.",
    )


def own_keys() -> Drawing:
    """Step h24: the blocks of keys of each warpgroup of two tiles, in the order in which it takes
    them."""
    config = hopper_step(24).replace(**LONG_TILE)
    B_r, B_c, n = config.B_r, config.B_c, config.consumers
    length = 2 * B_r
    d = Drawing(
        "Step h24: each warpgroup begins with keys that it sees",
        f"A table: two tiles of queries, each of {n} warpgroups, and the blocks of keys. Each "
        "warpgroup numbers its own blocks from the right, from 0 on, and begins where its own rows "
        "end; only those with the numbers 0 and 1 are touched by the diagonal. What the tile has "
        "right of that is left out.",
        f"{length} queries in tiles of {B_r}, as many keys in blocks of {B_c}. A row is a "
        f"warpgroup, {WGMMA_M} queries; the number is that of its own turn.",
    )
    seen, loaded = _causal_table(d, config, WGMMA_M, length, length)
    tiles = " + ".join(f"{n} · {blocks}" for blocks in loaded[::n])
    return d.result(
        d.y,
        "Orange: hidden in part, in turns 0 and 1 alone. Blue: seen whole. Grey: loaded for the "
        "tile, and passed on unread. Dashed: not loaded. "
        f"{' + '.join(map(str, seen))} = {sum(seen)} blocks are computed, and not {tiles} = "
        f"{sum(loaded)}.",
    )


def shared_loads() -> Drawing:
    """Steps h24 and h25: the blocks of keys that tiles of one head load, turn by turn."""
    tiles = 4
    config = hopper_step(25)
    length = tiles * config.B_r
    d = Drawing(
        "Step h25: causal tiles share loads in pairs",
        f"Three tables: {tiles} tiles of one head that begin together, and the blocks of keys that "
        "they load in each turn. Without a mask all load the same block in a turn. With one, each "
        "loads another. In step h25 two tiles load together, for both.",
        f"{length} queries in tiles of {config.B_r}, as many keys in blocks of {config.B_c}. A "
        "column is a turn; the number in a cell is that of the block that is loaded there.",
    )
    x, counts = d.left + 60, []
    for heading, causal, together in (
        ("No mask: requests for the same bytes can meet", False, 1),
        ("Causal, step h24: none can", True, 1),
        ("Causal, step h25: one load for both", True, config.cluster_blocks),
    ):
        d.bold(d.left, d.y + 20, heading)
        grid = Grid(d, x, d.y + 32, (d.right - x) / tiles, 28, gap=6, below=6)
        loads = [0] * (tiles // together)
        for tile in range(tiles):
            d.small(d.left, grid.top(tile) + 15, f"tile {tile}")
            first = (tile // together + 1) * together - 1 if causal else tiles - 1
            for turn in range(first + 1):
                block = first - turn
                unseen = causal and block > tile
                meets = not causal or together > 1
                colour = GREY if unseen else BLUE if meets else ORANGE
                data = {"tile": tile, "turn": turn, "block": block, "together": together}
                grid.cell(tile, turn, str(block), colour, **data, causal=causal)
            loads[tile // together] = first + 1
        counts.append(f"{' + '.join(map(str, loads))} = {sum(loads)}")
        d.y = grid.top(tiles) + 6
    return d.result(
        d.y,
        "Blue: what another tile loads too, in the same turn. Orange: what nobody else does. Grey: "
        "loaded for the other tile, and passed on unread. "
        f"{counts[0]} loads of which {tiles} at a time can become one, if all come in time; "
        f"{counts[1]} of which none can; {counts[2]} that are for two.",
    )


def head_pairs() -> Drawing:
    """Steps h25 and h26: what the two blocks of a cluster do with two heads that share K and V."""
    config, heads, tiles = hopper_step(26), 2, 3
    length = tiles * config.B_r
    d = Drawing(
        "Step h26: two heads instead of neighbouring rows",
        f"Two tables: the two thread blocks of a cluster, turn by turn, for {heads} heads of "
        f"{tiles} causal tiles that share K and V. In step h25 they take two tiles of a head: the "
        "first passes on a block of keys in each, and the last pair has one tile. In step h26 they "
        "take the same tile of two heads, and both compute in every turn.",
        f"{length} queries in tiles of {config.B_r}, as many keys in blocks of {config.B_c}. A "
        "column is a turn of the cluster; the number in a cell is that of the block of keys.",
    )
    problem = AttentionForward(1, heads, length, kv_heads=1, causal=True)
    x, counts = d.left + 60, []
    for heading, number in (("Step h25: two tiles of a head", 25), ("Step h26: two heads", 26)):
        taken = hopper_step(number).replace(causal=True).tiles(problem)
        d.bold(d.left, d.y + 20, heading)
        grid = Grid(d, x, d.y + 50, (d.right - x) / (heads * (2 * tiles - 1)), 28, gap=4, below=6)
        for lane in range(config.cluster_blocks):
            d.small(d.left, grid.top(lane) + 15, f"block {lane}")
        loads: list[int] = []
        for pair in zip(taken[::2], taken[1::2], strict=True):
            of_rows = sorted({tile for _, tile in pair if tile < tiles})
            word = "tiles" if len(of_rows) > 1 else "tile"
            d.small(grid.left(sum(loads)), d.y + 42, f"{word} {', '.join(map(str, of_rows))}")
            last = of_rows[-1]
            for lane, (head, tile) in enumerate(pair):
                for block in range(last + 1):
                    turn = sum(loads) + last - block
                    idle = tile >= tiles or block > tile
                    data = {"lane": lane, "turn": turn, "head": head, "tile": tile, "block": block}
                    colour = GREY if idle else ORANGE if head else BLUE
                    grid.cell(lane, turn, str(block), colour, **data, step=number)
            loads.append(last + 1)
        counts.append(f"{' + '.join(map(str, loads))} = {sum(loads)}")
        d.y = grid.top(config.cluster_blocks) + 6
    return d.result(
        d.y,
        "Blue: head 0. Orange: head 1. Grey: a block of keys that is passed on unread, or that "
        f"counts for a tile without rows. {counts[0]} turns in h25, {counts[1]} in h26.",
    )


def half_blocks() -> Drawing:
    """Steps h26 and h27: the halves of blocks of keys that each warpgroup multiplies with Q."""
    config, length = hopper_step(27).replace(causal=True), 512
    keys, B_r, B_c = config.few_keys, config.B_r, config.B_c
    problem = AttentionForward(1, 1, length, causal=True)
    columns = length // keys
    d = Drawing(
        "Step h27: half a block where no more is seen",
        f"A table: {length // WGMMA_M} warpgroups of {length // B_r} causal tiles, and {columns} "
        f"halves of {length // B_c} blocks of keys. The diagonal of a tile ends in its last block. "
        "The tile's first warpgroup sees nothing of that block's second half: step h26 multiplies "
        "with it, step h27 does not.",
        f"{length} queries in tiles of {B_r}, as many keys in blocks of {B_c}. A row is a "
        f"warpgroup, {WGMMA_M} queries, and a cell {keys} keys.",
    )
    x = d.left + 92
    grid = Grid(d, x, d.y + 28, (d.right - x) / columns, 26)
    for column in range(0, columns, B_c // keys):
        label = f"{column * keys} …" if column else "keys 0 …"
        d.small(grid.left(column), d.y + 18, label)
    counts: dict[str, list[int]] = {"h26": [], "h27": []}  # of each row
    diagonal = []
    for query in range(0, length, WGMMA_M):
        row = query / WGMMA_M + query // B_r / 3  # tiles stand apart
        d.small(d.left, grid.top(row) + grid.height / 2 + 4, f"queries {query} …")
        end = (config.own_key_blocks(problem, query)[0] + 1) * B_c
        own_end = end - B_c + config.first_keys(problem, query)
        for column in range(columns):
            first = column * keys
            by = "both" if first < own_end else "h26" if first < end else "none"
            seen = "all" if first + keys <= query + 1 else "part" if first <= query else "none"
            data = {"query": query, "key": first, "by": by, "seen": seen}
            if by == "none":
                grid.cell(row, column, "", dashed=True, **data)
                continue
            colour = GREY if by == "h26" else BLUE if seen == "all" else ORANGE
            grid.cell(row, column, "h26" if by == "h26" else "", colour, **data)
        counts["h26"].append(end // keys)
        counts["h27"].append(own_end // keys)
        ends = (x + at / keys * grid.width for at in (query, query + WGMMA_M))
        diagonal += zip(ends, (grid.top(row), grid.top(row + 1)), strict=True)
    d.line(diagonal, RED)
    d.y = grid.top(row + 1) + 16
    sums = {by: f"{' + '.join(map(str, rows))} = {sum(rows)}" for by, rows in counts.items()}
    return d.result(
        d.y,
        "Blue: seen whole. Orange: hidden in part. Grey: computed by h26 and hidden whole. Dashed: "
        f"not computed. {sums['h27']} halves are multiplied with Q, and not {sums['h26']}.",
    )


def early_slot() -> Drawing:
    """Steps h27 and h28: one warpgroup in a short tile, and the slots of Q below it."""
    cost = _Costs(hopper_step(28))
    S, O, ex2, load = cost.S, cost.O, cost.ex2, _COPY / 2  # noqa: E741
    block_1 = S + max(O, ex2)  # where it begins, beside the last product of tile A
    has_S = block_1 + S
    goes_back = {27: has_S + max(O, ex2), 28: has_S}
    d = Drawing(
        "Step h28: the slot of Q goes back early",
        "Two timelines of one warpgroup in a tile B of two blocks of keys, between a tile A and a "
        "tile C, with the two slots of Q below. O of A is stored through slot 0 beside the product "
        "S_1 of B. In step h27 the slot goes back at the end of block 1; then the load of C's Q "
        "begins, and the warpgroup waits for it. In step h28 the slot goes back as soon as S_1 is "
        "there, and the load runs beside the softmax.",
        f"One warpgroup alone. {_COUNTED} The store of O, TMA's read of it and a load of Q are "
        f"drawn as {_STORE}, {_READ} and {load:.0f} cycles, which nothing counts.",
    )
    begins = {step: max(goes_back[27], at + load) for step, at in goes_back.items()}  # S_0 of C
    line = Timeline(d, begins[28] + S + O)
    stored = block_1 + _STORE + _READ
    waits = {step: begin - goes_back[27] for step, begin in begins.items()}
    for step, when in ((27, "at the end of the block"), (28, "as soon as S_1 is there")):
        back, begin = goes_back[step], begins[step]
        line.heading(f"Step h{step}: slot 0 goes back {when}")
        wait = [Segment(goes_back[27], waits[step], "wait")] if waits[step] else []
        line.lane(
            "products",
            [
                Segment(0, S, "S_0 of B", BLUE),
                Segment(S, O, "O of A", PURPLE),
                Segment(block_1, S, "S_1 of B", BLUE),
                Segment(has_S, O, "O_0 of B", PURPLE),
                *wait,
                Segment(begin, S, "S_0 of C", BLUE),
                Segment(begin + S, O, "O_1 of B", PURPLE),
            ],
        )
        line.lane(
            "softmax",
            [
                Segment(S, ex2, "P_0 of B", RED),
                Segment(has_S, ex2, "P_1 of B", RED),
                Segment(begin + S, ex2, "P_0 of C", RED),
            ],
        )
        arrow = [(line.x(back), d.y - 4), (line.x(back), d.y + _ARROW)]
        d.small(line.x(back) + 8, d.y + 16, "goes back")
        line.lane("store", [Segment(block_1, _STORE, "store", GREY)])
        d.arrow(*arrow)
        line.lane(
            "slot 0",
            [
                Segment(0, block_1, "Q of A, done"),
                Segment(block_1, stored - block_1, "O of A", GREEN),
                Segment(stored, back - stored, "kept"),
                Segment(back, load, "load", ORANGE),
                Segment(back + load, line.cycles, "Q of C", BLUE),
            ],
        )
        line.lane(
            "slot 1",
            [Segment(0, has_S, "Q of B", BLUE), Segment(has_S, line.cycles, "Q of B, done")],
        )
    line.axis([0, block_1, goes_back[28], goes_back[27]])
    return d.result(
        d.y + 8,
        "Dashed in a slot: needed by nobody. Slot 0 goes back a softmax earlier, by "
        f"{goes_back[27]:.0f} - {goes_back[28]:.0f} = {goes_back[27] - goes_back[28]:.0f} cycles. "
        f"As it is drawn, the warpgroup waits {waits[27]:.0f} in h27 and {waits[28]:.0f} in h28. "
        f"With a third block of keys in tile B, {S:.0f} + {max(O, ex2):.0f} = "
        f"{S + max(O, ex2):.0f} more lie between, and it waits in neither.",
    )


def no_fence() -> Drawing:
    """Steps h28 and h29: how the thread blocks of a cluster begin, and how they end."""
    d = Drawing(
        "Step h29: a cluster meets and parts without a fence",
        "Timelines of the first cycles and of the last ones of a thread block. In step h28 each "
        "thread waits for a fence until the blocks of the cluster have met, and the producer asks "
        "for Q behind that; at the end each waits for another fence before the block is gone. In "
        "step h29 they meet without one, and at the end the first block's producer alone waits, "
        "until all slots are empty.",
        f"{_MEET} cycles for the barriers and the meeting, {_FENCE} for the fence and {_ASK} until "
        "Q is asked for are medians of stamps of clock64() on an H100.",
    )
    line = Timeline(d, 2 * _MEET + _FENCE + _ASK)
    for step in (28, 29):
        fences = [_FENCE] if step == 28 else []
        met = _MEET + sum(fences)
        line.heading(f"Step h{step}: the beginning")
        waits = [Segment(_MEET, fence, "fence", RED) for fence in fences]
        line.lane("threads", [Segment(0, _MEET, "meet", BLUE), *waits])
        asks = Segment(met, _ASK, "where the tile is", PURPLE)
        rest = Segment(asks.end, line.cycles - asks.end, "Q is on its way", ORANGE)
        line.lane("producer", [asks, rest])
    for step in (28, 29):
        line.heading(f"Step h{step}: the end")
        stored = _STORE + _READ
        fence = [Segment(stored, _FENCE, "fence", RED)] if step == 28 else []
        line.lane("warps", [Segment(0, stored, "O", GREEN), *fence])
        if step == 29:
            line.lane("producer", [Segment(0, stored, "waits")])
    line.axis([0, _MEET, _MEET + _FENCE, _MEET + _ASK, _MEET + _FENCE + _ASK])
    return d.result(
        d.y + 8,
        f"Q is asked for {_FENCE} cycles earlier: at {_MEET} + {_ASK} = {_MEET + _ASK}, and not at "
        f"{_MEET + _FENCE + _ASK}. At the end the producer of h28 has long gone, and that of h29 "
        f"is the one that stays. The store of O and TMA's read of it are drawn as {_STORE} and "
        f"{_READ} cycles, which nothing counts.",
    )


def _taken_by_turn(lengths: Sequence[int], takers: int, *, late: bool) -> list[list[int]]:
    """Which tiles each has: the first that it knows, then the next that nobody has taken, when it
    begins with one, or late, when it ends one."""
    taken = [[n] for n in range(takers)]
    ends = [lengths[n] for n in range(takers)]
    asks = [end if late else 0 for end in ends]
    for tile in range(takers, len(lengths)):
        taker = min(range(takers), key=lambda n: (asks[n], n))
        taken[taker].append(tile)
        asks[taker] = ends[taker] + (lengths[tile] if late else 0)
        ends[taker] += lengths[tile]
    return taken


def late_take() -> Drawing:
    """Steps h29 and h30: which cluster has which causal tiles."""
    heads, tiles, clusters = 4, 3, 3
    config = hopper_step(30).replace(causal=True)
    rows = config.cluster_blocks * config.B_r
    d = Drawing(
        "Step h30: who takes a tile late knows better whose turn it is",
        f"Two timelines of {clusters} clusters that share {heads * tiles} causal tiles of three "
        "lengths, longest first. In step h29 each takes its next tile when it begins with one, and "
        "one cluster ends after the others. In step h30 each takes it at the end of one, and all "
        "end together.",
        f"{heads} heads of {tiles * rows} queries, in tiles of {rows} for a cluster, and as many "
        f"keys in blocks of {config.B_c}. A number is that of a tile's blocks of keys.",
    )
    key_blocks = rows // config.B_c
    lengths = [key_blocks * (row + 1) for row in reversed(range(tiles)) for _ in range(heads)]
    colours = dict(zip(sorted(set(lengths)), (GREY, ORANGE, BLUE), strict=True))
    shared = {late: _taken_by_turn(lengths, clusters, late=late) for late in (False, True)}
    ends = {late: [sum(map(lengths.__getitem__, own)) for own in of] for late, of in shared.items()}
    x, last = d.left + 60, max(map(max, ends.values()))
    for late, heading in (
        (False, "Step h29: at the beginning of a tile"),
        (True, "Step h30: late"),
    ):
        d.bold(d.left, d.y + 20, heading)
        grid = Grid(d, x, d.y + 32, (d.right - x) / last, 28, gap=2, below=6)
        for lane, own in enumerate(shared[late]):
            d.small(d.left, grid.top(lane) + 15, f"cluster {lane}")
            begin = 0
            for tile in own:
                length = lengths[tile]
                d.cell(
                    grid.left(begin),
                    grid.top(lane),
                    length * grid.width - grid.gap,
                    grid.height - grid.below,
                    str(length),
                    colours[length],
                    lane=lane,
                    tile=tile,
                    begin=begin,
                    late=late,
                )
                begin += length
        d.y = grid.top(clusters) + 6
    return d.result(
        d.y,
        f"Of all blocks of keys each cluster has {sum(lengths)} / {clusters} = "
        f"{sum(lengths) // clusters} in the mean. In h29 the busiest has {max(ends[False])}, in "
        f"h30 {max(ends[True])}.",
    )


def _next_block(at: float, S: float, O: float, ex2: float) -> list[Segment]:  # noqa: E741
    return [
        Segment(at, S, "S_1", BLUE),
        Segment(at + S, O, "O_0", PURPLE),
        Segment(at + S, ex2, "P_1", RED),
    ]
