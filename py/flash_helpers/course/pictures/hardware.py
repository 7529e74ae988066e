"""Pictures of the hardware: an SM, and which of its parts a tile shape keeps busy."""

from __future__ import annotations

from flash_helpers.course.pictures.banks import BANK_BYTES, BANKS
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
from flash_helpers.course.pictures.work import (
    CAPABILITY,
    EX2_CYCLES,
    FFMA_CYCLES,
    LAST_STEP,
    LDMATRIX_BYTES,
    LDMATRIX_CYCLES,
    MMA_CYCLES,
    WAVEFRONT_BYTES,
    large_tile,
    step_config,
    warp_work,
    work_of,
)
from flash_helpers.gpu import LIMITS, MAX_REGISTERS, WARP
from flash_helpers.registry.ampere import MMA_M
from flash_helpers.sass.analyse.occupancy import REGISTERS_PER_SM, SUB_PARTITIONS

_BAR = 26


def sm() -> Drawing:
    """The parts of an SM, and what a warp instruction costs each."""
    large = LIMITS[CAPABILITY].smem_bytes // 1024
    registers = REGISTERS_PER_SM // SUB_PARTITIONS
    per_warp = SUB_PARTITIONS  # a sub-partition alone takes four times as long as the SM
    d = Drawing(
        "sm",
        "An SM of an H100 in the numbers that matter here",
        "A streaming multiprocessor: four sub-partitions, each with a scheduler, registers, a "
        "tensor core, FP32 lanes and a special function unit; below them shared memory for all "
        "four, and below that L2 and global memory.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "Cycles that one instruction of one warp takes in its sub-partition (mma.sync: as "
        "measured).",
        colour="muted",
    )
    width, gap = 158.0, 12.0
    parts = (
        ("scheduler", "1 instruction a cycle", GREY),
        (f"{registers:,} registers", f"{registers * 4 // 1024} KiB", GREEN),
        ("tensor core", f"mma: {per_warp * MMA_CYCLES:g} cycles", BLUE),
        ("FP32 lanes", f"FFMA: {per_warp * FFMA_CYCLES:g} cycle", PURPLE),
        ("special functions", f"ex2: {per_warp * EX2_CYCLES:g} cycles", RED),
    )
    top = y + 12
    height = 50
    for n in range(SUB_PARTITIONS):
        x = MARGIN + n * (width + gap)
        d.text(x + width / 2, top + 12, f"sub-partition {n}", anchor="middle", bold=True)
        at = top + 22
        for name, cost, colour in parts:
            d.rect(x, at, width, height - 6, colour)
            d.text(x + width / 2, at + 18, name, anchor="middle", size=SMALL, bold=True)
            d.text(x + width / 2, at + 35, cost, anchor="middle", size=SMALL)
            at += height
        d.arrow([(x + width / 2, at + 20), (x + width / 2, at - 3)])
    y = at + 22
    whole = PAGE_WIDTH - 2 * MARGIN
    d.rect(MARGIN, y, whole, 44, ORANGE)
    lines = (
        "shared memory, for all four sub-partitions",
        f"{BANKS} banks · {BANK_BYTES} bytes = {WAVEFRONT_BYTES} bytes a cycle; at most {large} "
        "KiB a thread block",
    )
    for n, line in enumerate(lines):
        at = y + 18 + 17 * n
        d.text(PAGE_WIDTH / 2, at, line, size=SMALL, anchor="middle", bold=n == 0)
    y += 8
    d.arrow([(PAGE_WIDTH / 2, y + 58), (PAGE_WIDTH / 2, y + 39)])
    d.text(PAGE_WIDTH / 2 + 14, y + 52, "cp.async, past the registers", size=SMALL, colour="muted")
    y += 60
    d.cell(MARGIN, y, whole, 30, "L2 cache, then global memory (HBM): for all SMs")
    loads = LDMATRIX_CYCLES / MMA_CYCLES
    d.result(
        y + 44,
        f"ldmatrix.x4 brings {LDMATRIX_BYTES} bytes: {LDMATRIX_CYCLES:g} cycles of shared memory, "
        f"in which the four tensor cores can do {SUB_PARTITIONS} · {LDMATRIX_CYCLES:g} / "
        f"{per_warp * MMA_CYCLES:g} = {loads:.2f} mma. With 16 rows a warp it feeds 2 mma: too "
        "few. With 32 rows 4: enough.",
    )
    return d


def tile_shapes() -> Drawing:
    """Step 7: bytes of fragments for each mma by the rows of a warp."""
    config = step_config(7)
    d = Drawing(
        "tile_shapes",
        "Step 7: more rows a warp, fewer bytes of fragments for each mma",
        "Bars for warps with 16, 32 and 64 rows of Q: bytes of fragments for each mma. With "
        "16 rows the bar is longer than what shared memory delivers while the tensor cores do an "
        "mma, with 32 it is shorter. With 64 it would be shorter still, but the accumulator of O "
        "alone would need more registers than a thread has.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        f"A warp needs every fragment of K and V, whatever rows it has; each serves one mma for "
        f"every {MMA_M} rows. Bytes of fragments for each mma, counted for {config.B_c} keys:",
        colour="muted",
    )
    left, longest = 300.0, 2.4
    scale = (PAGE_WIDTH - MARGIN - left) / longest
    x_mma = left + MMA_CYCLES * scale
    top = y + 26
    d.text(x_mma, top - 8, f"an mma: {MMA_CYCLES:g} cycles", size=SMALL, anchor="middle")
    y = top + 8
    for rows in (16, 32, 64):
        work = warp_work(rows, config.B_c, config.d_head, config.n_warps)
        cycles = work.ldmatrix * LDMATRIX_CYCLES / work.mma
        registers = rows * config.d_head // WARP
        possible = registers < MAX_REGISTERS
        d.text(MARGIN, y + 16, f"{rows} rows", bold=True)
        # one fragment of K or V and the row tiles that it serves
        d.cell(90, y, 44, _BAR, "K, V", ORANGE)
        d.arrow([(136, y + _BAR / 2), (156, y + _BAR / 2)])
        for n in range(rows // MMA_M):
            d.cell(158 + n * 31, y, 31, _BAR, str(MMA_M), BLUE)
        binds = possible and cycles > MMA_CYCLES
        d.cell(
            left,
            y,
            cycles * scale,
            _BAR,
            f"{work.ldmatrix * LDMATRIX_BYTES // work.mma} bytes",
            ORANGE if possible else GREY,
            bold=possible,
            strong=binds,
            dashed=not possible,
            data={"rows": rows, "ldmatrix": work.ldmatrix, "mma": work.mma, "cycles": cycles},
        )
        if possible:
            slower = "shared memory is" if binds else "the tensor cores are"
            verdict = f"{cycles:g} cycles: {slower} slower"
        else:
            verdict = f"O needs {rows} · {config.d_head} / {WARP} = {registers} registers: too many"
        d.text(
            90, y + _BAR + 17,
            f"{work.ldmatrix} ldmatrix / {work.mma} mma", size=SMALL, colour="muted",
        )  # fmt: skip
        d.text(left, y + _BAR + 17, verdict, size=SMALL, colour="muted")
        y += _BAR + 40
    for start, end in _between(top, y - 40, 3):
        d.line([(x_mma, start), (x_mma, end)], "ink", dashed=True)
    work = warp_work(16, config.B_c, config.d_head, config.n_warps)
    each = work.ldmatrix * LDMATRIX_BYTES // work.mma
    d.result(
        y - 4,
        f"16 rows: {work.ldmatrix} ldmatrix of {LDMATRIX_BYTES} bytes for {work.mma} mma are "
        f"{each} bytes each; at {WAVEFRONT_BYTES} bytes a cycle {each} / {WAVEFRONT_BYTES} = "
        f"{each / WAVEFRONT_BYTES:g} cycles of shared memory.",
    )
    return d


def _between(top: float, bottom: float, n_bars: int) -> list[tuple[float, float]]:
    """The stretches of a vertical line that leave out the lines of text under the bars."""
    step = _BAR + 40
    found = [(top, top + 8 + _BAR + 2)]
    found += [(top + 8 + n * step - 10, top + 8 + n * step + _BAR + 2) for n in range(1, n_bars)]
    return [(a, min(b, bottom + _BAR)) for a, b in found]


def roofline() -> Drawing:
    """Cycles of each part of an SM for the same work with 16 and with 32 rows a warp."""
    small, large = work_of(step_config(LAST_STEP)), work_of(large_tile(LAST_STEP))
    config = step_config(LAST_STEP)
    d = Drawing(
        "roofline",
        "What bounds an SM: 32 rows of Q against 64 keys",
        "Bars of the cycles for which four parts of an SM are busy with 32 rows of Q and a block "
        "of 64 keys: tensor cores, shared memory, exponentials, issue. With two warps of 16 rows "
        "shared memory is busiest by far; with one warp of 32 rows it and the tensor cores are "
        "busy for equally long.",
    )
    y = d.paragraph(
        MARGIN,
        d.top,
        "Lower bounds in cycles of the SM, counted for sm_90 (mma.sync at its measured rate), for "
        "the same work by warps of two shapes. The longest bar bounds.",
        colour="muted",
    )
    left = 150.0
    groups = (
        (f"Two warps of {small.rows} rows", small, 2),
        (f"One warp of {large.rows} rows", large, 1),
    )
    longest = max(n * c for _, work, n in groups for c in work.cycles().values())
    scale = (PAGE_WIDTH - MARGIN - 52 - left) / longest
    colours = dict(zip(small.cycles(), (BLUE, ORANGE, PURPLE, GREY), strict=True))
    y += 8
    for name, work, n in groups:
        d.text(MARGIN, y + 16, name, bold=True)
        y += 26
        most = max(work.cycles().values())
        for part, cycles in work.cycles().items():
            binds = cycles == most
            d.text(MARGIN + 8, y + 16, part, size=SMALL, bold=binds)
            d.rect(
                left, y, n * cycles * scale, 22, colours[part], strong=binds,
                data={"part": part, "rows": work.rows, "cycles": round(n * cycles, 1)},
            )  # fmt: skip
            d.text(left + n * cycles * scale + 7, y + 16, f"{n * cycles:.0f}", bold=binds)
            y += 27
        y += 8
    copies = small.copied_bytes // 128
    d.result(
        y,
        f"Shared memory, 16 rows: 2 · ({small.ldmatrix} ldmatrix · {LDMATRIX_CYCLES:g} + {copies} "
        f"for copies) = {2 * small.smem_cycles:.0f}; 32 rows: {large.ldmatrix} · "
        f"{LDMATRIX_CYCLES:g} + {large.copied_bytes // 128} = {large.smem_cycles:.0f}. Tensor "
        f"cores, both: {large.mma} mma · {MMA_CYCLES:g} = {large.tensor_cycles:.0f} for "
        f"{large.rows} rows and {config.B_c} keys.",
    )
    return d
