"""Pictures of tiles in shared memory: bank conflicts, and the swizzle that ends them."""

from __future__ import annotations

from collections import defaultdict

from flash_helpers.course.pictures.banks import (
    BANK_BYTES,
    BANKS,
    BANKS_PER_CHUNK,
    CHUNKS_AROUND,
    MATRIX_ROWS,
    Placement,
    address,
    banks,
    straight,
    swizzled,
    wavefronts,
)
from flash_helpers.course.pictures.svg import ORANGE, Drawing, Grid
from flash_helpers.course.pictures.work import step_config, work_of
from flash_helpers.registry.mma_sync import CHUNK_BYTES
from flash_helpers.registry.problem import ELEMENT_BYTES

_CHUNK = 2  # the one that is followed: columns 16 to 23, the left half of k-tile 1
_ROW = 3  # the row of the worked number
_ROW_BYTES = step_config(1).d_head * ELEMENT_BYTES
_LEFT = 66
_CELL = 25  # width of a chunk
_UNIT = 17  # height of an access in the panel of wavefronts


def _bank_span(place: int) -> str:
    first = place % CHUNKS_AROUND * BANKS_PER_CHUNK
    return f"{first}-{first + BANKS_PER_CHUNK - 1}"


def _tile_rows(d: Drawing, y: float, place: Placement) -> float:
    """Rows 0 to 7 of a tile, chunk by chunk as they lie; returns where they end."""
    n_chunks = _ROW_BYTES // CHUNK_BYTES
    half = CHUNKS_AROUND * _CELL
    tile = Grid(d, _LEFT, y + 52, _CELL, 22)
    for turn, label in enumerate(
        (f"{BANKS} banks: {BANKS * BANK_BYTES} bytes", "the same banks again")
    ):
        x = _LEFT + turn * half
        d.brace(x + 3, x + half - 3, y + 22)
        d.note(x + half / 2, y + 16, label, "middle")
    d.note(d.left, tile.y - 8, "bank")
    for p in range(n_chunks):
        d.small(tile.middle(p), tile.y - 8, str(banks(p * CHUNK_BYTES).start), "middle")
    for row in range(MATRIX_ROWS):
        d.note(d.left, tile.top(row) + 16, f"row {row}")
        for p, chunk in sorted((place(row, chunk), chunk) for chunk in range(n_chunks)):
            followed = chunk == _CHUNK
            bank = banks(address(row, chunk, _ROW_BYTES, place)).start
            data = {"row": row, "chunk": chunk, "place": p, "bank": bank}
            colour = ORANGE if followed else "plain"
            tile.cell(row, p, str(chunk), colour, bold=followed, **data)
    return tile.top(MATRIX_ROWS)


def _accesses(d: Drawing, y: float, place: Placement) -> float:
    """The 8 rows of one matrix over the banks that they hit; returns where the panel ends."""
    d.bold(d.left, y + 14, f"ldmatrix reads chunk {_CHUNK} of rows 0 to 7:")
    y += 30
    hits: dict[int, list[int]] = defaultdict(list)
    for row in range(MATRIX_ROWS):
        hits[banks(address(row, _CHUNK, _ROW_BYTES, place)).start].append(row)
    height = max(map(len, hits.values())) * _UNIT
    d.note(d.left, y + 10, "wavefront")
    y += 18
    panel = Grid(d, _LEFT + 2, y + height, 2 * _CELL, _UNIT, gap=4)  # counted upwards from -1
    for group in range(CHUNKS_AROUND):
        bank = group * BANKS_PER_CHUNK
        for n, row in enumerate(hits[bank], start=1):
            panel.cell(-n, group, f"row {row}", ORANGE, access_row=row, bank=bank, wavefront=n)
        d.small(panel.middle(group), panel.y + 17, _bank_span(group), "middle")
    d.line([(_LEFT, panel.y), (panel.left(CHUNKS_AROUND) - 2, panel.y)])
    d.note(d.left, panel.y + 17, "banks")
    for n in range(height // _UNIT):
        d.note(d.left, panel.top(-n) - 5, str(n + 1))
    return panel.y + 26


def _layout(
    title: str, description: str, introduction: str, place: Placement, closing: str
) -> Drawing:
    d = Drawing(title, description, introduction)
    y = _accesses(d, _tile_rows(d, d.y + 4, place) + 10, place)
    at, lies = address(_ROW, _CHUNK, _ROW_BYTES, place), place(_ROW, _CHUNK)
    rule = ":" if lies == _CHUNK else f" lies at place {_CHUNK} ^ {_ROW} = {lies},"
    d.result(
        y + 8,
        f"Row {_ROW}, chunk {_CHUNK}{rule} byte {_ROW} · {_ROW_BYTES} + {lies} · "
        f"{CHUNK_BYTES} = {at}, word {at} / {BANK_BYTES} = {at // BANK_BYTES}, bank "
        f"{at // BANK_BYTES} mod {BANKS} = {at // BANK_BYTES % BANKS}.",
    )
    d.paragraph(d.left, d.y + 3, closing)
    return d


def _one_matrix(place: Placement) -> int:
    return wavefronts(address(row, _CHUNK, _ROW_BYTES, place) for row in range(MATRIX_ROWS))


def bank_conflicts() -> Drawing:
    """Step 1: the 8 rows of a matrix on the same banks."""
    each, loads = _one_matrix(straight), work_of(step_config(1)).ldmatrix
    return _layout(
        "Step 1: eight rows, the same four banks",
        f"Rows 0 to 7 of a tile in shared memory, each {_ROW_BYTES} bytes long: 16 chunks of "
        f"{CHUNK_BYTES} bytes, twice around the {BANKS} banks. Chunk {_CHUNK} of every row lies in "
        f"banks {_bank_span(_CHUNK)}, so that ldmatrix needs {each} wavefronts to read it from "
        "eight rows.",
        f"Rows 0 to 7 of a tile, {_ROW_BYTES} bytes each, in numbered chunks of {CHUNK_BYTES} "
        "bytes.",
        straight,
        f"All {MATRIX_ROWS} rows hit the same {BANKS_PER_CHUNK} banks: {each} wavefronts for one "
        f"8 x 8 matrix instead of 1. A warp has {loads} ldmatrix.x4 per block of keys: "
        f"{loads} · 4 · {each} = {loads * 4 * each} wavefronts.",
    )


def swizzle() -> Drawing:
    """Step 2: the same rows with their chunks permuted."""
    each, loads = _one_matrix(swizzled), work_of(step_config(2)).ldmatrix
    return _layout(
        "Step 2: chunk c of row r lies at place c ^ (r % 8)",
        f"The same rows 0 to 7 with their chunks permuted: chunk c of row r lies at place c XOR "
        f"(r mod 8). Chunk {_CHUNK} of the eight rows now lies in eight different groups of four "
        f"banks, so that ldmatrix needs {each} wavefront to read it from all of them.",
        "The same rows. A chunk keeps its number and changes its place: row 0 is as it was, in the "
        "others the XOR swaps chunks within each group of eight.",
        swizzled,
        f"The {MATRIX_ROWS} rows hit all {BANKS} banks once: {each} wavefront for one 8 x 8 "
        f"matrix. A warp's {loads} ldmatrix.x4: {loads} · 4 · {each} = {loads * 4 * each} "
        "wavefronts, an eighth of step 1's.",
    )
