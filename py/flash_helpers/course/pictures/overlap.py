"""Pictures of the overlap family; that of step o3 is a timeline of copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from flash_helpers.course.pictures.svg import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Drawing,
    Grid,
)
from flash_helpers.course.pictures.timelines import Segment, Timeline
from flash_helpers.course.pictures.work import (
    LAST_STEP,
    LDMATRIX_CYCLES,
    MMA_CYCLES,
    WAVEFRONT_BYTES,
    large_tile,
    overlap_step,
    step_config,
    tile_bytes,
    work_of,
)
from flash_helpers.gpu import WARP
from flash_helpers.registry.mma_sync import MMA_K, MMA_M
from flash_helpers.sass.analyse.occupancy import SUB_PARTITIONS

# As kernels/overlap has them.
MAX_GROWTH = 8  # kMaxGrowth
RING = 3  # kRing
AHEAD = RING - 1  # kAhead


def shared_memory_reads() -> Drawing:
    """Step o1: how often K and V are read from shared memory for the same rows."""
    small, large = step_config(LAST_STEP), large_tile(LAST_STEP)
    rows, kib = large.B_r, 2 * tile_bytes(large) // 1024
    d = Drawing(
        "Step o1: twice the rows per warp, half the reads",
        f"The same {rows} rows of Q, by eight warps of 16 rows and by four warps of 32. Every warp "
        "reads all of K and V from shared memory. Eight warps do so eight times, four warps four "
        "times, for as many mma.",
        f"{rows} rows of Q meet a block of {large.B_c} keys. Every arrow is a warp that reads all "
        f"of K_j and V_j, {kib} KiB, from shared memory.",
    )
    loads = {}
    for config in (small, large):
        work = work_of(config)
        n = rows // work.rows
        fragments = 2 * work.ldmatrix_tile
        loads[work.rows] = n * fragments
        y = d.y + 12
        d.bold(d.left, y + 16, f"{n} warps of {work.rows} rows")
        y += 28
        d.cell(d.left, y, d.width, 30, "K_j and V_j in shared memory", ORANGE)
        warps = Grid(d, d.left, y + 64, (d.width + 4) / n, 34, gap=4)
        for warp in range(n):
            label = f"{work.rows} rows"
            data = {"rows": work.rows, "warp": warp, "loads": fragments, "mma": work.mma}
            warps.cell(0, warp, label, BLUE, **data)
            d.arrow((warps.middle(warp), y + 33), (warps.middle(warp), y + 61), colour=ORANGE)
        each = work.mma // fragments
        d.small(
            d.left,
            y + 116,
            f"{n} · {fragments} = {n * fragments} ldmatrix for {n} · {work.mma} = {n * work.mma} "
            f"mma: each serves {each}",
        )
        d.y = y + 124
    work = work_of(large)
    n = rows // work.rows
    copies = work.copied_bytes // WAVEFRONT_BYTES
    memory = work.ldmatrix * LDMATRIX_CYCLES + copies
    return d.result(
        d.y + 4,
        f"With Q's fragments and the copies {n} warps of {work.rows} rows take shared memory {n} · "
        f"({work.ldmatrix} · {LDMATRIX_CYCLES:g} + {copies}) = {n * memory:.0f} cycles, and the "
        f"tensor cores {n} · {work.mma} · {MMA_CYCLES:g} = {n * work.mma * MMA_CYCLES:.0f}: even.",
    )


@dataclass(frozen=True)
class LazyMaximum:
    """A row after a block of keys. maximum: of all so far. kept: what P, l and O are relative to.
    rescaled: whether l and O were. All in powers of two."""

    maximum: int
    kept: int
    rescaled: bool


BLOCK_MAXIMA = (10, 13, 12, 16, 14, 21, 17, 20)  # of S · scale · log2 e, in blocks of keys


def lazy_maxima(block_maxima: tuple[int, ...]) -> list[LazyMaximum]:
    """What step o2 keeps as a row's maximum, block by block: the maximum when it last grew by more
    than MAX_GROWTH."""
    found: list[LazyMaximum] = []
    for maximum in accumulate(block_maxima, max):
        rescaled = not found or maximum - found[-1].kept > MAX_GROWTH
        found.append(LazyMaximum(maximum, maximum if rescaled else found[-1].kept, rescaled))
    return found


def lazy_rescale() -> Drawing:
    """Step o2: a row's maximum, the one that is kept, and which blocks rescale."""
    steps = lazy_maxima(BLOCK_MAXIMA)
    config = overlap_step(2)
    fmul = config.row_tiles * MMA_M * config.d_head // WARP
    d = Drawing(
        "Step o2: rescale only when the maximum has grown much",
        "A row's maximum over eight blocks of keys as a staircase, and below it the maximum that "
        "is kept. The kept one follows only when the maximum has grown by more than eight powers "
        "of two, in the first block and in one other. Before, every block behind the first "
        "rescales.",
        "One row's scores over blocks of keys, in powers of two. P = 2^(S - m) is right for any m "
        f"as long as nothing overflows: m may lag behind by up to {MAX_GROWTH}.",
    )
    unit, bottom, left = 5.0, d.y + 156, 98.0  # a power of two is 5 high
    chart = Grid(d, left, bottom, (d.right - left) / len(steps), 30)
    for kept, blocks in groupby(range(len(steps)), key=lambda n: steps[n].kept):
        n, *more = blocks
        x, top, width = chart.left(n), bottom - (kept + MAX_GROWTH) * unit, chart.width
        data = {"kept": kept, "room": MAX_GROWTH}
        d.rect(x, top, width * (1 + len(more)), MAX_GROWTH * unit, GREEN, **data)
    for n, score in enumerate(BLOCK_MAXIMA):
        d.rect(chart.left(n) + 12, bottom - score * unit, chart.width - 24, score * unit, GREY)
    for colour, values in (
        (ORANGE, [step.maximum for step in steps]),
        (BLUE, [step.kept for step in steps]),
    ):
        corners = (
            (chart.left(n + end), bottom - v * unit) for n, v in enumerate(values) for end in (0, 1)
        )
        d.line(list(corners), colour)
    d.line([(left, bottom), (d.right, bottom)])
    y = bottom - steps[0].kept * unit
    d.small(d.left, y - MAX_GROWTH * unit / 2 + 5, f"room: 2^{MAX_GROWTH}", colour=GREEN)
    d.small(d.left, y + 5, "kept m", colour=BLUE)
    y = bottom + 8
    rows = (
        ("largest S", [str(score) for score in BLOCK_MAXIMA], GREY, ""),
        ("m in o1", [str(s.maximum) for s in steps], ORANGE, ""),
        ("m in o2", [str(s.kept) for s in steps], BLUE, ""),
        ("rescale, o1", ["R" if n else "" for n in range(len(steps))], RED, "o1"),
        ("rescale, o2", ["R" if s.rescaled else "" for s in steps], RED, "o2"),
    )
    for name, labels, colour, step_id in rows:
        cells = Grid(d, left, y, chart.width, 26, gap=4)
        d.small(d.left, y + 18, name)
        for n, label in enumerate(labels):
            data = {"step": step_id, "block": n, "rescale": int(bool(label))} if step_id else {}
            cells.cell(0, n, label, colour if label else "plain", bold=bool(step_id), **data)
        y += 30
    many, few = len(steps) - 1, sum(step.rescaled for step in steps)
    most = max(steps, key=lambda step: step.maximum - step.kept)
    rows_per_warp = config.row_tiles * MMA_M
    return d.result(
        y + 4,
        f"R: a warp rescales l and O, {rows_per_warp} · {config.d_head} / {WARP} = {fmul} FMUL per "
        f"thread; here {many} times in o1, {few} in o2. P is 2^({most.maximum} - {most.kept}) at "
        f"most, below 2^{MAX_GROWTH}.",
    )


def fragment_ring() -> Drawing:
    """Step o4: loads of V's first fragments, behind the softmax and before it."""
    config = overlap_step(4)
    n_mma = 2 * config.row_tiles  # what one ldmatrix of K or V serves
    step = n_mma * SUB_PARTITIONS * MMA_CYCLES
    softmax, latency = 60.0, 30.0
    S_steps = config.B_c // MMA_K  # of one k-tile
    S = S_steps * step
    whole = config.d_head // MMA_K  # ldmatrix of a k-tile of V
    load = whole * LDMATRIX_CYCLES
    d = Drawing(
        "Step o4: the next product's fragments are already there",
        "Two timelines of one warp from the end of Q K to the first mma of P V. In step o3 the "
        "eight fragments of V's first k-tile are loaded behind the softmax, and mma waits for "
        "them. In step o4 fragments come one at a time into a ring of three, two of them before "
        "the softmax, and P V begins at once.",
        f"One warp, from S to O += P @ V. Cycles counted for sm_90; softmax drawn as {softmax:g}, "
        f"latency of ldmatrix as {latency:g}. Orange: on its way; then: in use.",
    )
    line = Timeline(d, S + softmax + load + latency + 3 * step)
    o3 = S + softmax + load + latency
    line.heading("o3: a k-tile at a time, behind the softmax")
    loads = [
        Segment(S + softmax + n * load, load, f"{n * whole}-{n * whole + whole - 1}", ORANGE)
        for n in range(2)
    ]
    line.lane("load V", loads)
    line.lane(
        "warp",
        [
            Segment(0, S, "S", BLUE),
            Segment(S, softmax, "softmax", RED),
            Segment(S + softmax, o3 - S - softmax, "wait"),
            Segment(o3, 3 * step, "O += P @ V", PURPLE),
        ],
    )
    line.heading("o4: one at a time, two ahead, into a ring of three")
    # fragments by the slot of the ring: K's last ones, and V's first
    o4 = S + softmax
    n_K, n_V = config.d_head // MMA_K * S_steps, int((line.cycles - o4) // step) + 1
    slots: dict[int, list[Segment]] = {slot: [] for slot in range(RING)}
    for n in range(S_steps):
        use = n * step
        label, issued = f"K_{n_K - S_steps + n}", max(0.0, use - AHEAD * step)
        slots[(n_K - S_steps + n) % RING] += _ring_segments(label, issued, use, step)
    for n in range(n_V):
        use = o4 + n * step
        issued = S + n * LDMATRIX_CYCLES if n < AHEAD else use - AHEAD * step
        slots[n % RING] += _ring_segments(f"V_{n}", issued, use, step)
    for slot, segments in slots.items():
        line.lane(f"slot {slot}", sorted(segments, key=lambda s: s.start))
    line.lane(
        "warp",
        [
            Segment(0, S, "S", BLUE),
            Segment(S, softmax, "softmax", RED),
            Segment(o4, line.cycles - o4, "O += P @ V", PURPLE),
        ],
    )
    line.axis([0, S, S + softmax, o3])
    return d.result(
        d.y + 8,
        f"o3 waits {whole} · {LDMATRIX_CYCLES:g} + {latency:g} = {load + latency:g} cycles here, "
        f"and again before the next S. In o4 a fragment has {AHEAD} · {n_mma} mma, {AHEAD} · "
        f"{step:g} = {AHEAD * step:g} cycles, to arrive in; K and V have a ring each, {RING} · 4 = "
        f"{RING * 4} registers.",
    )


def _ring_segments(label: str, issued: float, use: float, step: float) -> list[Segment]:
    """A fragment on its way, and while its mma are issued."""
    in_use = Segment(use, step, label, BLUE if label.startswith("K") else PURPLE)
    if use == issued:
        return [in_use]
    return [Segment(issued, use - issued, label, ORANGE), replace(in_use, label="")]


WEIGHTS = ((1.0, 0.5, 0.25, 0.25), (0.5, 1.0, 0.5, 0.5), (0.25, 0.25, 1.0, 0.0))  # of P
VALUES = ((4, 8), (2, 6), (8, 0), (4, 4))  # of V


def mma_row_sum() -> Drawing:
    """Step o5: a column of ones beside V makes l a column of the product."""
    config, n_V = overlap_step(5), len(VALUES[0])
    d = Drawing(
        "Step o5: a column of ones, and l comes out of the mma",
        "A small matrix product drawn with its factors: P at the left, above the result V with one "
        "more column, which is all ones. The result is O, and one more column: the sums of P's "
        "rows, which are l.",
        "P @ V with one more column, whose elements are 1. Its result is the sum of each row of P.",
    )
    size, height = 54, 30
    top = d.y + 40
    below = top + len(VALUES) * height + 44
    P = Grid(d, 16, below, size, height, gap=4, below=4)
    V = Grid(d, 276, top, size, height, gap=4, below=4)
    O = Grid(d, V.x, below, size, height, gap=4, below=4)  # noqa: E741
    gap = 0.4  # of a column, before the new one
    d.bold(P.left(2) - 2, below - 10, "P", "middle")
    d.bold(V.left(1) - 2, top - 10, "V", "middle")
    d.bold(V.middle(n_V + gap), top - 10, "ones", "middle", colour=GREEN)
    for k, values in enumerate(VALUES):
        for column, value in enumerate(values):
            V.cell(k, column, str(value), ORANGE, operand="V", row=k, column=column)
        V.cell(k, n_V + gap, "1", GREEN, bold=True, operand="ones", row=k)
    for r, weights in enumerate(WEIGHTS):
        for k, weight in enumerate(weights):
            P.cell(r, k, f"{weight:g}", RED, operand="P", row=r, column=k)
        for column in range(n_V):
            product = sum(w * v[column] for w, v in zip(weights, VALUES, strict=True))
            O.cell(r, column, f"{product:g}", PURPLE, operand="O", row=r, column=column)
        O.cell(r, n_V + gap, f"{sum(weights):g}", GREEN, strong=True, operand="l", row=r)
    d.bold(O.left(1) - 2, below - 10, "O", "middle")
    d.bold(O.middle(n_V + gap), below - 10, "l", "middle", colour=GREEN)
    middle = below + len(WEIGHTS) * height / 2 - 2
    d.arrow((P.left(len(WEIGHTS[0])) + 4, middle), (O.x - 8, middle))
    rows, k_tiles = config.row_tiles, config.B_c // MMA_K
    more, fadd = rows * k_tiles, rows * MMA_M * config.B_c // WARP
    mma = work_of(large_tile(LAST_STEP)).mma
    first = WEIGHTS[0]
    return d.result(
        below + len(WEIGHTS) * height + 8,
        f"{' + '.join(f'{w:g}' for w in first)} = {sum(first):g}. In o4 a thread adds {fadd} "
        f"elements of P per block of keys with FADD; in o5 {rows} row tiles · {k_tiles} k-tiles = "
        f"{more} mma do it, on top of the {mma} of the products.",
    )
