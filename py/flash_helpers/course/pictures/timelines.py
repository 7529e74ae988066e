"""Pictures of time: what overlaps what. Lengths are counted cycles, not measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flash_helpers.course.pictures.svg import BLUE, GREEN, ORANGE, PURPLE, RED, SMALL, Drawing
from flash_helpers.course.pictures.text_width import text_width
from flash_helpers.course.pictures.work import (
    EX2_CYCLES,
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
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.registry.mma_sync import MMA_K, MMA_M
from flash_helpers.registry.problem import ELEMENT_BYTES
from flash_helpers.sass.analyse.occupancy import SUB_PARTITIONS

_LEFT = 76
_LANE_HEIGHT, _LANE_GAP = 26, 6
_TRIP = 256  # cycles: as long as the trip to L2 is drawn; nothing counts it


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


class Timeline:
    """Lanes over one axis of cycles."""

    def __init__(self, d: Drawing, cycles: float) -> None:
        self.d, self.cycles = d, cycles
        self._scale = (d.right - _LEFT) / cycles

    def x(self, cycle: float) -> float:
        return _LEFT + min(cycle, self.cycles) * self._scale

    def heading(self, text: str) -> None:
        self.d.bold(self.d.left, self.d.y + 20, text)
        self.d.y += 30

    def lane(self, name: str, segments: Iterable[Segment]) -> None:
        d = self.d
        d.note(d.left, d.y + 18, name)
        for s in segments:
            if s.start >= self.cycles:
                continue
            x, width = self.x(s.start), self.x(s.end) - self.x(s.start)
            label = s.label if text_width(s.label, SMALL) <= width - 2 else ""
            data = {"lane": name, "what": s.label, "start": round(s.start), "end": round(s.end)}
            look = {"colour": s.colour or "plain", "dashed": not s.colour}
            d.cell(x, d.y, width, _LANE_HEIGHT, label, **look, **data)
        d.y += _LANE_HEIGHT + _LANE_GAP

    def axis(self, ticks: Sequence[float]) -> None:
        d = self.d
        d.line([(_LEFT, d.y), (self.x(self.cycles), d.y)])
        d.note(d.left, d.y + 16, "cycles")
        for tick in ticks:
            x = self.x(tick)
            d.line([(x, d.y), (x, d.y + 4)])
            anchor = "end" if tick >= 0.98 * self.cycles else "middle" if tick else "start"
            d.note(x, d.y + 17, f"{tick:.0f}", anchor)
        d.y += 26


@dataclass(frozen=True)
class _Phases:
    """Cycles of an SM that one thread block, alone on it, takes for its parts of a block of keys: S
    and O the busier of tensor cores and shared memory, the softmax its exponentials.

    copy: of shared memory, to store a tile of K or V.
    """

    S: float
    softmax: float
    O: float  # noqa: E741
    copy: float

    @property
    def block(self) -> float:
        return self.S + self.softmax + self.O

    @property
    def ticks(self) -> list[float]:
        """Of an axis: where S, P and O of the first block end, and S of the second."""
        return [0, self.S, self.S + self.softmax, self.block, self.block + self.S]

    def compute(self, start: float, j: int) -> list[Segment]:
        """What the warps do with block of keys j."""
        return [
            Segment(start, self.S, f"S_{j}", BLUE),
            Segment(start + self.S, self.softmax, f"P_{j}", RED),
            Segment(start + self.S + self.softmax, self.O, f"O_{j}", PURPLE),
        ]

    def copied(self, start: float, name: str, colour: str, behind: float = 0) -> list[Segment]:
        """The trip, and the stores. behind: cycles for which another tile's stores go first."""
        return [
            Segment(start, _TRIP, "trip"),
            Segment(start + _TRIP + behind, self.copy, name, colour),
        ]


def phases_of(config: FlashForwardKernelConfig) -> _Phases:
    """The parts of a thread block of a config's warps."""
    each, n = work_of(config), config.n_warps
    copy = tile_bytes(config) / WAVEFRONT_BYTES
    return _Phases(n * each.S_cycles, n * each.ex2 * EX2_CYCLES, n * each.O_cycles, copy)


_PHASES = "S_j = Q @ K_j^T, P_j = softmax(S_j), O_j: O += P_j @ V_j."


def timeline_copies() -> Drawing:
    """Step 2 against step 3: who waits for copies."""
    p = phases_of(step_config(3))
    d = Drawing(
        "Step 3: the next tile is on its way while this one is used",
        "Two timelines of one thread block. In step 2 each block of keys begins with a wait until "
        "K has made the trip from L2 and was stored. In step 3 the next K is copied during softmax "
        "and P V, and the next V during Q K and softmax, so that the warps never wait.",
        f"{_PHASES} One thread block alone on an SM; cycles counted for sm_90, not measured. The "
        f"trip from L2 is drawn as {_TRIP} cycles.",
    )
    line = Timeline(d, p.ticks[-1])
    line.heading("Step 2: ask, then wait")
    wait = _TRIP + p.copy
    K, V, warps = [], [], []
    for j in range(2):
        start = j * (wait + p.block)
        K += p.copied(start, f"K_{j}", ORANGE)
        V += p.copied(start, f"V_{j}", GREEN, p.copy)
        warps += [Segment(start, wait, "wait"), *p.compute(start + wait, j)]
    line.lane("copy of K", K)
    line.lane("copy of V", V)
    line.lane("warps", warps)
    line.heading("Step 3: ask as soon as there is room")
    line.lane("copy of K", [*p.copied(p.S, "K_1", ORANGE), *p.copied(p.S + p.block, "K_2", ORANGE)])
    line.lane("copy of V", [*p.copied(0, "V_0", GREEN), *p.copied(p.block, "V_1", GREEN)])
    line.lane("warps", [*p.compute(0, 0), *p.compute(p.block, 1)])
    line.axis(p.ticks)
    return d.result(
        d.y + 8,
        f"K_1 is stored in {p.copy:.0f} cycles ({p.copy * WAVEFRONT_BYTES / 1024:.0f} KiB at "
        f"{WAVEFRONT_BYTES} bytes) and has P_0 and O_0 to land in: {p.softmax:.0f} + {p.O:.0f} = "
        f"{p.softmax + p.O:.0f}. Step 2 waits in every block of keys, unless the SM's other "
        "thread block fills the gap.",
    )


def two_buffers() -> Drawing:
    """Overlap steps 2 and 3: one buffer each for K and V, and two."""
    one, two = overlap_step(2), overlap_step(3)
    p = phases_of(large_tile(LAST_STEP))  # the tile of both
    window = 2 * p.block
    d = Drawing(
        "Step o3: one barrier per block of keys instead of four",
        "Two timelines of the large tile's loop. With one buffer each for K and V a barrier stands "
        "before and behind each product, and a copy has the time until its tile is read again. "
        "With two buffers one barrier between S and the softmax is enough, and each copy has the "
        "time of a whole block of keys.",
        f"{_PHASES} Cycles counted for sm_90, not measured. A copy's bar spans from its issue to "
        "when it must have landed.",
    )
    line = Timeline(d, window)
    # From when to when the copies are on their way that are issued in a block of keys. With one
    # stage K has the time from S to the next S, V that from O to the next O; with two both are
    # issued behind the barrier, and must have landed at the next one. Then: which block's they are.
    copies = {
        1: {"K": (p.S, p.block, 1), "V": (p.block, p.block + p.S + p.softmax, 1)},
        2: {"K": (p.S, p.S + p.block, 2), "V": (p.S, p.S + p.block, 1)},
    }
    for config, word in ((one, "One buffer"), (two, "Two buffers")):
        stages = config.kv_buffers
        d.bold(d.left, d.y + 22, f"{word} each for K and V: {config.smem_bytes // 1024} KiB")
        barriers = [0, p.S, p.S + p.softmax, p.block] if stages == 1 else [p.S]
        n = len(barriers)
        label = f"upright lines: {n} barrier{'s' if n > 1 else ''} per block of keys"
        d.small(d.left, d.y + 41, label)
        d.y += 54
        top = d.y
        line.lane("warps", [*p.compute(0, 0), *p.compute(p.block, 1)])
        for name, colour in (("K", ORANGE), ("V", GREEN)):
            issued, landed, ahead = copies[stages][name]
            segments = []
            for j in (-1, 0, 1):
                start, end = max(j * p.block + issued, 0), min(j * p.block + landed, window)
                if end > start:
                    what = f"{name}_{j + ahead}"
                    segments.append(Segment(start, end - start, what, colour))
            line.lane(f"copy of {name}", segments)
        for mark in sorted({j * p.block + at for j in range(2) for at in barriers}):
            double = stages == 1 and mark == p.block  # behind O_0, and before S_1
            for x in (line.x(mark) + dx for dx in ((-2, 2) if double else (0,))):
                d.line([(x, top - 7), (x, top + _LANE_HEIGHT + 3)], "ink")
    line.axis([*p.ticks, window])
    return d.result(
        d.y + 8,
        f"With one buffer K has {p.softmax:.0f} + {p.O:.0f} = {p.softmax + p.O:.0f} cycles to land "
        f"in, with two {p.S:.0f} + {p.softmax:.0f} + {p.O:.0f} = {p.block:.0f}. The price: 2 "
        f"· {one.B_c} · {one.d_head} · {ELEMENT_BYTES} bytes = "
        f"{(two.smem_bytes - one.smem_bytes) // 1024} KiB of shared memory.",
    )


def double_buffer() -> Drawing:
    """Step 5: the next k-tile's ldmatrix before this one's mma."""
    config = step_config(5)
    k_tiles, shown, latency = config.d_head // MMA_K, 3, 24.0
    each = work_of(config)
    n_loads = (each.ldmatrix_Q + each.ldmatrix_tile) // k_tiles
    n_mma = each.mma_per_product // k_tiles
    load, mma = n_loads * LDMATRIX_CYCLES, n_mma * SUB_PARTITIONS * MMA_CYCLES
    d = Drawing(
        "Step 5: load the next fragments before this tile's mma",
        "Two timelines of one warp in S = Q K^T. In step 4 the mma of each k-tile wait for its own "
        "ldmatrix. In step 5 the ldmatrix of the next k-tile are issued before the mma of this "
        "one, into a second set of registers, so that only the first k-tile is waited for.",
        f"One warp, alone, S = Q @ K^T, the first {shown} of {k_tiles} k-tiles. Cycles counted for "
        f"sm_90, not measured; the latency of ldmatrix is drawn as {latency:g} (dashed).",
    )
    first = load + latency  # until the first mma
    line = Timeline(d, shown * (first + mma))

    def lanes(title: str, loads: list[float], multiplies: list[float], waits: list[float]) -> None:
        """Where the parts of each k-tile begin."""
        d.bold(d.left, d.y + 22, title)
        d.y += 32
        segments = [Segment(at, load, f"{k}", ORANGE) for k, at in enumerate(loads)]
        segments += [Segment(at, latency, "wait") for at in waits]
        line.lane("ldmatrix", sorted(segments, key=lambda s: s.start))
        line.lane("mma", [Segment(at, mma, f"k-tile {k}", BLUE) for k, at in enumerate(multiplies)])

    alone = [k * (first + mma) for k in range(shown)]
    lanes(
        "Step 4: load, wait, multiply",
        alone,
        [at + first for at in alone],
        [at + load for at in alone],
    )
    ahead = [first + k * mma for k in range(shown)]
    lanes("Step 5: two sets of fragments", [0, *ahead[:-1]], ahead, [load])
    line.axis([0, *ahead, ahead[-1] + mma, line.cycles])
    return d.result(
        d.y + 8,
        f"Between a load and its use stand {n_mma} mma: {n_mma} · {SUB_PARTITIONS * MMA_CYCLES:g} "
        f"= {mma:g} cycles of the warp's tensor core, for {n_loads} ldmatrix of {load:g} cycles. "
        "ptxas may reorder step 4's loads like this on its own.",
    )


def peeled_loop() -> Drawing:
    """Step 10: the first block of keys has nothing to rescale."""
    config, seq_len = step_config(10), 384
    n_blocks = len(config.key_blocks(seq_len))
    rows = config.row_tiles * MMA_M
    O_registers = rows * config.d_head // WARP
    d = Drawing(
        "Step 10: the first block has nothing to rescale",
        f"The loop over {n_blocks} blocks of keys. In step 9 m, l and O are set to minus infinity "
        "and zero, and every block rescales them. In step 10 the first block stands before the "
        "loop and does not rescale; its mma take zero as a constant operand.",
        f"seq_len {seq_len}: {n_blocks} blocks of {config.B_c} keys. R: l and O are rescaled, "
        f"{rows} · {config.d_head} / {WARP} = {O_registers} FMUL per thread for O.",
    )
    left = d.left
    width, y = (d.right - left) / n_blocks, d.y
    starts = {
        9: f"O = {O_registers} zeros, m = -∞, l = 0",
        10: "no start values: the first mma reads zero",
    }
    for step, what in starts.items():
        d.bold(d.left, y + 28, f"Step {step}")
        d.small(left + 66, y + 28, what)
        y += 38
        for j in range(n_blocks):
            x, peeled = left + j * width, step == 10 and j == 0
            label, colour = ("", "plain") if peeled else ("R", RED)
            data = {"step": step, "block": j, "rescale": int(not peeled)}
            d.cell(x + 2, y, 22, 34, label, colour, dashed=peeled, **data)
            d.cell(x + 24, y, width - 26, 34, f"j = {j}", GREEN if peeled else BLUE)
        y += 40
        first = left + (width if step == 10 else 0)
        d.brace(first + 2, d.right - 4, y + 4, down=True)
        d.note((first + d.right) / 2, y + 19, "the loop's code", "middle")
        if step == 10:
            d.note(left, y + 19, "its own code")
        y += 24
    return d.result(
        y + 8,
        f"A thread saves the zeroing of {O_registers} registers, {O_registers} FMUL for O and "
        f"{2 * config.row_tiles} ex2: one rescale of {n_blocks} here, one of {16384} / "
        f"{config.B_c} = {16384 // config.B_c} at length 16384. The price is the loop's code "
        "twice.",
    )
