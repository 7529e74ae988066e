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
    shared_memory,
    timelines,
)
from flash_helpers.course.pictures.svg import Drawing

FOLDER = PurePosixPath("docs/images/course")

# In the order in which a reader of the course meets them.
PICTURES: Mapping[str, Callable[[], Drawing]] = MappingProxyType(
    {
        "attention_tiles": attention.attention_tiles,
        "online_softmax": attention.online_softmax,
        "sm": hardware.sm,
        "mma_fragments": fragment_pictures.mma_fragments,
        "ldmatrix": fragment_pictures.ldmatrix,
        "bank_conflicts": shared_memory.bank_conflicts,
        "swizzle": shared_memory.swizzle,
        "timeline_copies": timelines.timeline_copies,
        "fragments_whole_vs_interleaved": fragment_pictures.fragments_whole_vs_interleaved,
        "double_buffer": timelines.double_buffer,
        "ffma_fold": addressing.ffma_fold,
        "tile_shapes": hardware.tile_shapes,
        "swizzle_constants": addressing.swizzle_constants,
        "fragment_order": fragment_pictures.fragment_order,
        "peeled_loop": timelines.peeled_loop,
        "output_swizzle": addressing.output_swizzle,
        "block_index": addressing.block_index,
        "backwards": addressing.backwards,
        "cache_policy": addressing.cache_policy,
        "pieces": addressing.pieces,
        "row_stride": addressing.row_stride,
        "two_stages": timelines.two_stage_loop,
        "roofline": hardware.roofline,
    }
)


def picture_path(name: str) -> PurePosixPath:
    """Where the picture lies in the repository."""
    return FOLDER / f"{name}.svg"


def picture_svg(name: str) -> str:
    """Text of the picture's file. Raises ValueError, with the names, for one that is not there."""
    if name not in PICTURES:
        raise ValueError(f"{name!r} is no picture: choose from {', '.join(PICTURES)}")
    return PICTURES[name]().to_svg()


def picture_title(name: str) -> str:
    """The sentence above the picture. Raises as `picture_svg` does."""
    if name not in PICTURES:
        raise ValueError(f"{name!r} is no picture: choose from {', '.join(PICTURES)}")
    return PICTURES[name]().title


def stale_pictures(root: Path, names: Iterable[str] = PICTURES) -> dict[Path, str]:
    """Files of pictures that are absent or differ from what would be drawn now, with that text.

    root: of the repository. Raises ValueError as `picture_svg` does, or OSError.
    """
    stale = {}
    for name in names:
        path, drawn = root / picture_path(name), picture_svg(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale[path] = drawn
    return stale


def unknown_pictures(root: Path) -> list[Path]:
    """Files in the folder of the pictures that are none of them."""
    wanted = {picture_path(name).name for name in PICTURES}
    return sorted(path for path in (root / FOLDER).glob("*") if path.name not in wanted)
