"""Pictures of time: what overlaps what. Lengths are counted cycles, not measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flash_helpers.course.pictures.svg import (
    BLUE,
    GREEN,
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
    LAST_STEP,
    LDMATRIX_CYCLES,
    MMA_CYCLES,
    WAVEFRONT_BYTES,
    large_tile,
    step_config,
    two_stages,
    work_of,
)
from flash_helpers.gpu import WARP
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.registry.ampere import MMA_K, MMA_M
from flash_helpers.registry.problem import ELEMENT_BYTES
from flash_helpers.sass.analyse.occupancy import SUB_PARTITIONS

_LEFT = 92
_LANE_HEIGHT, _LANE_GAP = 26, 6
_TRIP = 256  # cycles: as long as the trip to L2 is drawn; nothing counts it
_WAIT = "wait"


@dataclass(frozen=True)
class Segment:
    """A stretch of a lane, in cycles. colour: empty for one that is not counted, or not busy."""

    start: float
    length: float
    label: str
    colour: str = ""

    @property
    def end(self) -> float:
        return self.start + self.length


class _Timeline:
    """Lanes over one axis of cycles."""

    def __init__(self, d: Drawing, y: float, cycles: float) -> None:
        self.d, self.y, self.cycles = d, y, cycles
        self._scale = (PAGE_WIDTH - MARGIN - _LEFT) / cycles

    def x(self, cycle: float) -> float:
        return _LEFT + min(cycle, self.cycles) * self._scale

    def lane(self, name: str, segments: Sequence[Segment]) -> None:
        d, y = self.d, self.y
        d.text(MARGIN, y + 18, name, size=SMALL, colour="muted")
        for s in segments:
            if s.start >= self.cycles:
                continue
            x, width = self.x(s.start), self.x(s.end) - self.x(s.start)
            fits = text_width(s.label, SMALL) <= width - 2
            d.cell(
                x,
                y,
                width,
                _LANE_HEIGHT,
                s.label if fits else "",
                s.colour or "plain",
                dashed=not s.colour,
                data={"lane": name, "what": s.label, "start": round(s.start), "end": round(s.end)},
            )
        self.y = y + _LANE_HEIGHT + _LANE_GAP

    def axis(self, ticks: Sequence[float], unit: str = "cycles") -> None:
        d = self.d
        d.line([(_LEFT, self.y), (self.x(self.cycles), self.y)])
        d.text(MARGIN, self.y + 16, unit, size=SMALL, colour="muted")
        for tick in ticks:
            x = self.x(tick)
            d.line([(x, self.y), (x, self.y + 4)])
            anchor = "end" if tick >= 0.98 * self.cycles else "middle" if tick else "start"
            d.text(x, self.y + 17, f"{tick:.0f}", size=SMALL, anchor=anchor, colour="muted")
        self.y += 26


@dataclass(frozen=True)
class _Phases:
    """Cycles of an SM that one thread block, alone on it, takes for its parts of a block of keys.

    copy: of shared memory, to store a tile of K or V.
    """

    S: float
    softmax: float
    O: float  # noqa: E741
    copy: float

    @property
    def block(self) -> float:
        return self.S + self.softmax + self.O


def phases_of(config: FlashForwardKernelConfig) -> _Phases:
    """The parts of a thread block of so many warps; S and O the busier of tensor cores and shared
    memory, the softmax its exponentials."""
    work, n = work_of(config), config.n_warps
    tile = config.B_c * config.d_head * ELEMENT_BYTES
    return _Phases(
        n * work.S_cycles, n * work.ex2_cycles, n * work.O_cycles, tile / WAVEFRONT_BYTES
    )


def _copy(start: float, name: str, p: _Phases, colour: str, behind: float = 0) -> list[Segment]:
    """A copy: the trip, and the stores. behind: cycles for which another tile's stores go first."""
    return [
        Segment(start, _TRIP, "trip"),
        Segment(start + _TRIP + behind, p.copy, name, colour),
    ]


def _compute(start: float, j: int, p: _Phases) -> list[Segment]:
    return [
        Segment(start, p.S, f"S = Q @ K_{j}^T", BLUE),
        Segment(start + p.S, p.softmax, "softmax", RED),
        Segment(start + p.S + p.softmax, p.O, f"O += P @ V_{j}", PURPLE),
    ]


def timeline_copies() -> Drawing:
    """Step 2 against step 3: who waits for copies."""
    p = phases_of(step_config(3))
    window = 2 * p.block
    d = Drawing(
        "timeline_copies",
        "Step 3: the next tile is on its way while this one is used",
        "Two timelines of one thread block. In step 2 each block of keys begins with a wait until "
        "K has made the trip from L2 and was stored. In step 3 the next K is copied during softmax "
        "and P V, and the next V during Q K and softmax, so that the warps never wait.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "One thread block alone on an SM. Lengths are cycles counted for sm_90, not measured; "
        f"'trip' is the way from L2, drawn as {_TRIP} cycles and counted nowhere.",
        colour="muted",
    )
    d.text(MARGIN, y + 20, "Step 2: ask, then wait", bold=True)
    line = _Timeline(d, y + 30, window)
    wait = _TRIP + p.copy
    copies_K, copies_V, warps = [], [], []
    for j in range(2):
        start = j * (wait + p.block)
        copies_K += _copy(start, f"K_{j}", p, ORANGE)
        copies_V += _copy(start, f"V_{j}", p, GREEN, behind=p.copy)
        warps += [Segment(start, wait, _WAIT), *_compute(start + wait, j, p)]
    line.lane("copy of K", copies_K)
    line.lane("copy of V", copies_V)
    line.lane("warps", warps)

    d.text(MARGIN, line.y + 20, "Step 3: ask as soon as the tile's place is free", bold=True)
    line.y += 30
    K_start, V_start = p.S, p.block
    line.lane(
        "copy of K",
        [*_copy(K_start, "K_1", p, ORANGE), *_copy(K_start + p.block, "K_2", p, ORANGE)],
    )
    line.lane("copy of V", [*_copy(0, "V_0", p, GREEN), *_copy(V_start, "V_1", p, GREEN)])
    line.lane("warps", [*_compute(0, 0, p), *_compute(p.block, 1, p)])
    line.axis([0, p.S, p.S + p.softmax, p.block, p.block + p.S, window])
    d.result(
        line.y + 8,
        f"K_1 is stored in {p.copy:.0f} cycles ({p.copy * WAVEFRONT_BYTES / 1024:.0f} KiB at "
        f"{WAVEFRONT_BYTES} bytes) and has softmax and P @ V to land in: {p.softmax:.0f} + "
        f"{p.O:.0f} = {p.softmax + p.O:.0f}. Step 2 waits for trip and store in every block of "
        "keys, unless the SM's other thread block fills the gap.",
    )
    return d


def stage_buffers(p: _Phases, j: int, stages: int) -> dict[str, tuple[float, float]]:
    """When the tiles that block of keys j has copied are on their way: the cycles from issue to
    when they must have landed, with two blocks in `p.block` cycles each.

    With one stage K_{j+1} has the time from S_j to S_{j+1}, V_{j+1} that from O_j to O_{j+1}. With
    two, both copies are issued behind block j's barrier, and must have landed at that of j + 1.
    """
    start = j * p.block
    if stages == 1:
        return {
            "K": (start + p.S, start + p.block),
            "V": (start + p.block, start + p.block + p.S + p.softmax),
        }
    barrier = start + p.S
    return {"K": (barrier, barrier + p.block), "V": (barrier, barrier + p.block)}


def two_stage_loop() -> Drawing:
    """Version 16's loop with one buffer each for K and V, and with two."""
    one, two = large_tile(LAST_STEP), two_stages()
    p = phases_of(one)
    window = 2 * p.block
    d = Drawing(
        "two_stages",
        "Two stages: one barrier a block of keys instead of four",
        "Two timelines of the large tile's loop. With one buffer each for K and V a barrier stands "
        "before and behind each product, and a copy has the time until its tile is read again. "
        "With two buffers one barrier between S and the softmax is enough, and each copy has the "
        "time of a whole block of keys.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"B_r {one.B_r}, B_c {one.B_c}, {one.n_warps} warps. Lengths are cycles counted for sm_90, "
        "not measured. A copy's bar spans from its issue to when it must have landed.",
        colour="muted",
    )
    times: dict[int, dict[str, tuple[float, float]]] = {}
    for stages, config in ((1, one), (2, two)):
        kib = config.smem_bytes // 1024
        word = "buffer" if stages == 1 else "buffers"
        d.text(
            MARGIN, y + 22,
            f"{'One' if stages == 1 else 'Two'} {word} each for K and V: {kib} KiB", bold=True,
        )  # fmt: skip
        line = _Timeline(d, y + 48, window)
        top = line.y
        first, second = (stage_buffers(p, j, stages) for j in (0, 1))
        before = stage_buffers(p, -1, stages)
        times[stages] = first
        ahead = 1 if stages == 1 else 2
        lanes: dict[str, list[Segment]] = {"K": [], "V": []}
        for name, colour, distance in (("K", ORANGE, ahead), ("V", GREEN, 1)):
            for j, issued in ((-1, before), (0, first), (1, second)):
                start, end = issued[name]
                start = max(start, 0.0)
                if min(end, window) - start > 0 and j + distance >= 0:
                    label = f"{name}_{j + distance} on its way"
                    lanes[name].append(Segment(start, min(end, window) - start, label, colour))
        line.lane("warps", [*_compute(0, 0, p), *_compute(p.block, 1, p)])
        line.lane("copy of K", lanes["K"])
        line.lane("copy of V", lanes["V"])
        in_block = [0, p.S, p.S + p.softmax, p.block] if stages == 1 else [p.S]
        marks = sorted({j * p.block + at for j in range(2) for at in in_block})
        for mark in marks:
            double = stages == 1 and mark == p.block  # behind O_0, and before S_1
            x = line.x(mark)
            for dx in (-2, 2) if double else (0,):
                d.line([(x + dx, top - 7), (x + dx, top + _LANE_HEIGHT + 3)], "ink")
        each = len(in_block)
        label = f"upright lines: {each} barrier{'s' if each > 1 else ''} a block of keys"
        d.text(PAGE_WIDTH - MARGIN, top - 12, label, size=SMALL, anchor="end")
        y = line.y
    line.axis([0, p.S, p.S + p.softmax, p.block, p.block + p.S, window])
    spans = {s: times[s]["K"][1] - times[s]["K"][0] for s in times}
    d.result(
        line.y + 8,
        f"With one buffer K has {p.softmax:.0f} + {p.O:.0f} = {spans[1]:.0f} cycles to land in, "
        f"with two {p.S:.0f} + {p.softmax:.0f} + {p.O:.0f} = {spans[2]:.0f}. It costs 2 · "
        f"{one.B_c} · {one.d_head} · {ELEMENT_BYTES} bytes = "
        f"{(two.smem_bytes - one.smem_bytes) // 1024} KiB of shared memory.",
    )
    return d


def double_buffer() -> Drawing:
    """Step 5: the next k-tile's ldmatrix before this one's mma."""
    work = work_of(step_config(5))
    k_tiles = step_config(5).d_head // MMA_K
    loads = (work.ldmatrix_Q + work.ldmatrix_K) // k_tiles
    each = work.mma_S // k_tiles
    load, mma = loads * LDMATRIX_CYCLES, each * SUB_PARTITIONS * MMA_CYCLES
    latency = 24.0
    shown = 4
    d = Drawing(
        "double_buffer",
        "Step 5: load the next fragments before this tile's mma",
        "Two timelines of one warp in S = Q K^T. In step 4 the mma of each k-tile wait for its own "
        "ldmatrix. In step 5 the ldmatrix of the next k-tile are issued before the mma of this "
        "one, into a second set of registers, so that only the first k-tile is waited for.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"One warp, alone, S = Q @ K^T, the first {shown} of {k_tiles} k-tiles. Lengths are cycles "
        f"counted for sm_90, not measured; the latency of ldmatrix is drawn as {latency:g} cycles "
        "(dashed) and counted nowhere.",
        colour="muted",
    )
    window = shown * (load + latency + mma)
    d.text(MARGIN, y + 22, "Step 4, in the order of the source: load, wait, multiply", bold=True)
    line = _Timeline(d, y + 32, window)
    ldmatrix, multiply = [], []
    for k in range(shown):
        start = k * (load + latency + mma)
        ldmatrix += [Segment(start, load, f"{k}", ORANGE), Segment(start + load, latency, "wait")]
        multiply.append(Segment(start + load + latency, mma, f"k-tile {k}", BLUE))
    line.lane("ldmatrix", ldmatrix)
    line.lane("mma", multiply)
    d.text(MARGIN, line.y + 22, "Step 5: two sets of fragments", bold=True)
    line.y += 32
    ldmatrix = [Segment(0, load, "0", ORANGE), Segment(load, latency, "wait")]
    multiply = []
    at = load + latency
    for k in range(shown):
        if k + 1 < shown:
            ldmatrix.append(Segment(at, load, f"{k + 1}", ORANGE))
        multiply.append(Segment(at, mma, f"k-tile {k}", BLUE))
        at += mma
    line.lane("ldmatrix", ldmatrix)
    line.lane("mma", multiply)
    line.axis([0, *(load + latency + k * mma for k in range(shown + 1)), window])
    d.result(
        line.y + 8,
        f"Between a load and its use stand {each} mma: {each} · {SUB_PARTITIONS * MMA_CYCLES:g} = "
        f"{mma:g} cycles of the warp's tensor core, for {loads} ldmatrix of {load:g} cycles. ptxas "
        "may reorder step 4's loads like this on its own: the SASS tells.",
    )
    return d


def peeled_loop() -> Drawing:
    """Step 10: the first block of keys has nothing to rescale."""
    config, seq_len = step_config(10), 512
    n_blocks = seq_len // config.B_c
    row_tiles = config.B_r // config.n_warps // MMA_M
    O_registers = row_tiles * MMA_M * config.d_head // WARP
    d = Drawing(
        "peeled_loop",
        "Step 10: the first block has nothing to rescale",
        f"The loop over {n_blocks} blocks of keys. In step 9 m, l and O are set to minus infinity "
        "and zero, and every block rescales them. In step 10 the first block stands before the "
        "loop and does not rescale; its mma take zero as a constant operand.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"seq_len {seq_len}: {n_blocks} blocks of {config.B_c} keys. R marks the rescale of l and "
        f"O: of O {row_tiles * MMA_M} · {config.d_head} / {WARP} = {O_registers} FMUL of a "
        "thread.",
        colour="muted",
    )
    left, right = 118.0, PAGE_WIDTH - MARGIN
    width = (right - left) / n_blocks
    for step in (9, 10):
        y += 12
        d.text(MARGIN, y + 16, f"Step {step}", bold=True)
        what = (
            f"O = {O_registers} zeros, m = -∞, l = 0"
            if step == 9
            else "no start values: the first mma reads RZ, the zero register"
        )
        d.text(left, y + 16, what, size=SMALL)
        y += 26
        for j in range(n_blocks):
            x = left + j * width
            peeled = step == 10 and j == 0
            d.cell(
                x + 2, y, 22, 34, "" if peeled else "R", "plain" if peeled else RED,
                dashed=peeled, data={"step": step, "block": j, "rescale": int(not peeled)},
            )  # fmt: skip
            d.cell(x + 24, y, width - 28, 34, f"j = {j}", GREEN if peeled else BLUE)
        y += 40
        first = left + (width if step == 10 else 0)
        d.brace(first + 2, right - 4, y + 4, down=True)
        d.text(
            (first + right) / 2, y + 19, "the loop's code", size=SMALL, anchor="middle",
            colour="muted",
        )  # fmt: skip
        if step == 10:
            d.text(left, y + 19, "code of its own", size=SMALL, colour="muted")
        y += 24
    d.result(
        y + 8,
        f"A thread saves the zeroing of {O_registers} registers, {O_registers} FMUL for O and "
        f"{2 * row_tiles} ex2: one rescale of {n_blocks} at length {seq_len}, one of "
        f"{16384 // config.B_c} at 16384. The price is the loop's code twice.",
    )
    return d
