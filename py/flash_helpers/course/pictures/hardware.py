"""Pictures of the hardware: an SM, and which of its parts a tile shape keeps busy."""

from __future__ import annotations

from flash_helpers.course.pictures.banks import BANK_BYTES, BANKS
from flash_helpers.course.pictures.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Drawing, Grid
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
    work_of,
)
from flash_helpers.gpu import LIMITS, MAX_REGISTERS, WARP
from flash_helpers.registry.mma_sync import MMA_M
from flash_helpers.sass.analyse.occupancy import REGISTERS_PER_SM, SUB_PARTITIONS

_BAR = 26


def sm() -> Drawing:
    """The parts of an SM, and what a warp instruction costs each."""
    large = LIMITS[CAPABILITY].smem_bytes // 1024
    registers = REGISTERS_PER_SM // SUB_PARTITIONS
    per_warp = SUB_PARTITIONS  # a sub-partition alone takes four times as long as the SM
    d = Drawing(
        "An SM of an H100, in the numbers that matter here",
        "A streaming multiprocessor: four sub-partitions, each with a scheduler, registers, a "
        "tensor core, FP32 lanes and a special function unit; below them shared memory for all "
        "four, and below that L2 and global memory.",
        "Cycles that one instruction of one warp takes in its sub-partition (mma.sync: as "
        "measured).",
    )
    gap = 8.0
    width = (d.width + gap) / SUB_PARTITIONS - gap
    parts = (
        ("scheduler", "1 per cycle", GREY),
        ("registers", f"{registers:,}", GREEN),
        ("tensor core", f"mma: {per_warp * MMA_CYCLES:g} cycles", BLUE),
        ("FP32 lanes", f"FFMA: {per_warp * FFMA_CYCLES:g} cycle", PURPLE),
        ("exponentials", f"ex2: {per_warp * EX2_CYCLES:g} cycles", RED),
    )
    top, height = d.y + 12, 50
    for n in range(SUB_PARTITIONS):
        x = d.left + n * (width + gap)
        middle = x + width / 2
        d.small(middle, top + 12, f"sub-partition {n}", "middle", bold=True)
        at = top + 22
        for name, cost, colour in parts:
            d.rect(x, at, width, height - 6, colour)
            d.small(middle, at + 18, name, "middle", bold=True)
            d.small(middle, at + 35, cost, "middle")
            at += height
        d.arrow((middle, at + 20), (middle, at - 3))
    y, middle = at + 22, (d.left + d.right) / 2
    bandwidth = f"{BANKS} banks · {BANK_BYTES} bytes = {WAVEFRONT_BYTES} bytes per cycle"
    d.rect(d.left, y, d.width, 61, ORANGE)
    d.small(middle, y + 18, "shared memory, for all four sub-partitions", "middle", bold=True)
    d.small(middle, y + 35, bandwidth, "middle")
    d.small(middle, y + 52, f"at most {large} KiB per thread block", "middle")
    y += 17
    d.arrow((middle, y + 66), (middle, y + 47))
    d.note(middle + 14, y + 60, "cp.async, past the registers")
    d.cell(d.left, y + 68, d.width, 30, "L2 cache, then global memory (HBM): for all SMs")
    loads = LDMATRIX_CYCLES / MMA_CYCLES
    return d.result(
        y + 112,
        f"ldmatrix.x4 brings {LDMATRIX_BYTES} bytes: {LDMATRIX_CYCLES:g} cycles of shared memory, "
        f"in which the four tensor cores can do {SUB_PARTITIONS} · {LDMATRIX_CYCLES:g} / "
        f"{per_warp * MMA_CYCLES:g} = {loads:.2f} mma. With 16 rows per warp it feeds 2 mma: too "
        "few. With 32 rows 4: enough.",
    )


def tile_shapes() -> Drawing:
    """Step 7: bytes of fragments per mma by the rows of a warp."""
    config = step_config(7)
    d = Drawing(
        "Step 7: more rows per warp, fewer bytes per mma",
        "Bars for warps with 16, 32 and 64 rows of Q: bytes of fragments per mma. With "
        "16 rows the bar is longer than what shared memory delivers while the tensor cores do an "
        "mma, with 32 it is shorter. With 64 it would be shorter still, but the accumulator of O "
        "alone would need more registers than a thread has.",
        f"A warp needs every fragment of K and V; each serves one mma per {MMA_M} rows. Bars: "
        f"bytes of fragments per mma, for {config.B_c} keys.",
    )
    longest, row = 2.3, 92
    scale = d.width / longest
    x_mma, top = d.left + MMA_CYCLES * scale, d.y + 12
    for n, row_tiles in enumerate((1, 2, 4)):
        y, rows = top + n * row, row_tiles * MMA_M
        work = work_of(config, row_tiles)
        cycles = work.ldmatrix * LDMATRIX_CYCLES / work.mma
        registers = rows * config.d_head // WARP
        possible = registers < MAX_REGISTERS
        d.bold(d.left, y + 18, f"{rows} rows")
        # one fragment of K or V and the row tiles that it serves
        d.cell(82, y, 44, _BAR, "K, V", ORANGE)
        d.arrow((129, y + _BAR / 2), (147, y + _BAR / 2))
        served = Grid(d, 150, y, 31, _BAR)
        for tile in range(row_tiles):
            served.cell(0, tile, str(MMA_M), BLUE)
        d.note(d.right, y + 18, f"{work.ldmatrix} ldmatrix / {work.mma} mma", "end")
        y += _BAR + 8
        binds = possible and cycles > MMA_CYCLES
        label = f"{work.ldmatrix * LDMATRIX_BYTES // work.mma} bytes"
        look = {"bold": possible, "strong": binds, "dashed": not possible}
        data = {"rows": rows, "ldmatrix": work.ldmatrix, "mma": work.mma, "cycles": cycles}
        colour = ORANGE if possible else GREY
        d.cell(d.left, y, cycles * scale, _BAR, label, colour, **look, **data)
        d.line([(x_mma, y - 4), (x_mma, y + _BAR + 4)], "ink", dashed=True)
        slower = "shared memory is" if binds else "the tensor cores are"
        verdict = f"{cycles:g} cycles: {slower} slower"
        if not possible:
            verdict = f"O needs {rows} · {config.d_head} / {WARP} = {registers} registers: too many"
        d.small(d.left, y + _BAR + 17, verdict)
    work = work_of(config, 1)
    each = work.ldmatrix * LDMATRIX_BYTES // work.mma
    return d.result(
        top + 2 + 3 * row,
        f"Dashed: the {MMA_CYCLES:g} cycles of an mma. 16 rows: {work.ldmatrix} ldmatrix of "
        f"{LDMATRIX_BYTES} bytes for {work.mma} mma, {each} bytes each; at {WAVEFRONT_BYTES} bytes "
        f"per cycle {each} / {WAVEFRONT_BYTES} = {each / WAVEFRONT_BYTES:g} cycles.",
    )


def roofline() -> Drawing:
    """Cycles of each part of an SM for the same work with 16 and with 32 rows a warp."""
    small, large = work_of(step_config(LAST_STEP)), work_of(large_tile(LAST_STEP))
    config = step_config(LAST_STEP)
    d = Drawing(
        "What bounds an SM: 32 rows of Q against 64 keys",
        "Bars of the cycles for which four parts of an SM are busy with 32 rows of Q and a block "
        "of 64 keys: tensor cores, shared memory, exponentials, issue. With two warps of 16 rows "
        "shared memory is busiest by far; with one warp of 32 rows it and the tensor cores are "
        "busy for equally long.",
        "Cycles of the SM, at least, counted for sm_90 (mma.sync at its measured rate), for the "
        "same work by warps of two shapes. The longest bar bounds.",
    )
    left = 130.0
    groups = (
        (f"Two warps of {small.rows} rows", small, 2),
        (f"One warp of {large.rows} rows", large, 1),
    )
    longest = max(n * c for _, work, n in groups for c in work.cycles().values())
    scale = (d.right - 42 - left) / longest
    y = d.y + 8
    for name, work, n in groups:
        d.bold(d.left, y + 16, name)
        y += 26
        most = max(work.cycles().values())
        for (part, cycles), colour in zip(
            work.cycles().items(), (BLUE, ORANGE, PURPLE, GREY), strict=True
        ):
            binds, length = cycles == most, n * cycles * scale
            d.small(d.left, y + 16, part, bold=binds)
            data = {"part": part, "rows": work.rows, "cycles": round(n * cycles, 1)}
            d.rect(left, y, length, 22, colour, strong=binds, **data)
            d.text(left + length + 7, y + 16, f"{n * cycles:.0f}", bold=binds)
            y += 27
        y += 8
    tensor = large.cycles()["tensor cores"]
    few, many = (work.cycles()["shared memory"] for work in (small, large))
    return d.result(
        y,
        f"Shared memory, 16 rows: 2 · ({small.ldmatrix} ldmatrix · {LDMATRIX_CYCLES:g} + "
        f"{small.copied_bytes // WAVEFRONT_BYTES} for copies) = {2 * few:.0f}; 32 rows: "
        f"{large.ldmatrix} · {LDMATRIX_CYCLES:g} + {large.copied_bytes // WAVEFRONT_BYTES} = "
        f"{many:.0f}. Tensor cores, both: {large.mma} mma · {MMA_CYCLES:g} = {tensor:.0f} for "
        f"{large.rows} rows and {config.B_c} keys.",
    )
