"""The pictures of the course, each drawn from the facts that it shows.

Whatever a picture states is computed when it is drawn: from the kernels' formulas (`banks`,
`fragments`), from the configs of the registry, and from instructions counted with the costs of
flash_helpers.sass.read.opcodes (`work`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from flash_helpers.course.pictures import (
    addressing,
    attention,
    fragment_pictures,
    hardware,
    overlap,
    shared_memory,
    timelines,
    warpgroups,
)
from flash_helpers.course.pictures.svg import Drawing

FOLDER = PurePosixPath("docs/images/course")

# By name, in the order in which a reader of the course meets them.
PICTURES: Mapping[str, Callable[[], Drawing]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            attention.attention_tiles,
            hardware.sm,
            fragment_pictures.mma_fragments,
            fragment_pictures.ldmatrix,
            hardware.roofline,
            shared_memory.bank_conflicts,
            shared_memory.swizzle,
            timelines.timeline_copies,
            fragment_pictures.fragments_whole_vs_interleaved,
            timelines.double_buffer,
            addressing.ffma_fold,
            hardware.tile_shapes,
            addressing.swizzle_constants,
            fragment_pictures.fragment_order,
            timelines.peeled_loop,
            addressing.output_swizzle,
            addressing.block_index,
            addressing.backwards,
            addressing.cache_policy,
            addressing.pieces,
            addressing.row_stride,
            overlap.shared_memory_reads,
            overlap.lazy_rescale,
            timelines.two_buffers,
            overlap.fragment_ring,
            overlap.mma_row_sum,
            warpgroups.tma_tile,
            warpgroups.wgmma_fragments,
            warpgroups.two_slots,
            warpgroups.barrier_ring,
            warpgroups.ping_pong,
            warpgroups.own_products,
            warpgroups.flattened,
            warpgroups.causal_blocks,
            warpgroups.own_keys,
            warpgroups.shared_loads,
            warpgroups.head_pairs,
            warpgroups.half_blocks,
            warpgroups.early_slot,
            warpgroups.no_fence,
            warpgroups.late_take,
        )
    }
)


def picture_path(name: str) -> PurePosixPath:
    """Where the picture lies in the repository."""
    return FOLDER / f"{name}.svg"


def draw(name: str) -> Drawing:
    """The picture. Raises ValueError, with the names, for one that is not there."""
    if name not in PICTURES:
        raise ValueError(f"{name!r} is no picture: choose from {', '.join(PICTURES)}")
    return PICTURES[name]()


def stale_pictures(root: Path, names: Iterable[str] = PICTURES) -> dict[Path, str]:
    """Files of pictures that are absent or differ from what would be drawn now, with that text.

    root: of the repository. Raises ValueError as `draw` does, or OSError.
    """
    stale = {}
    for name in names:
        path, drawn = root / picture_path(name), draw(name).to_svg(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale[path] = drawn
    return stale


def unknown_pictures(root: Path) -> list[Path]:
    """Files in the folder of the pictures that are none of them."""
    wanted = {picture_path(name).name for name in PICTURES}
    return sorted(path for path in (root / FOLDER).glob("*") if path.name not in wanted)
