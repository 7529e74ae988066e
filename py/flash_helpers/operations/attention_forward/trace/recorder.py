"""A recorder of a kernel's quantities while it runs, by block of keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from flash_helpers.gpu import WARP
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.configs import AttentionConfig
from flash_helpers.operations.attention_forward.trace.blockwise import BlockStep
from flash_helpers.ptx import Observation
from flash_helpers.registry.mma_sync import MMA_N, MMA_ROW_SUM

Traced = TypeVar("Traced", bound=AttentionConfig)

MAX_TRACE_BYTES = 2**30
QUAD = 4
"""Lanes that share a row."""
HALF_TILE = 8
"""Distance between the two rows that a lane has of a tile of 16."""


class UntraceableKernel(ValueError):
    """The kernel does not have the structure that the trace relies on."""


@dataclass
class Recorder(Generic[Traced]):
    """The values of one launch. Tiles of queries are numbered as (batch, head, block of rows), and
    turns are the blocks of keys in the order in which the kernel walks them; a warp may leave out
    the first ones.

    `values`: arrays by quantity, whose first dimensions are (tiles, turns). Raises ValueError if
    they would take more than MAX_TRACE_BYTES.
    """

    config: Traced
    problem: AttentionForward
    values: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        config, warps = self.config, self.config.n_warps
        B_r, B_c = config.B_r, config.B_c
        d_head, d_v = self.problem.d_head, self.problem.d_v
        lead = (self.n_tiles, len(self.key_blocks))
        shapes = {
            "Q": (B_r, d_head),
            "K": (warps, B_c, d_head),
            "S": (B_r, B_c),
            "m": (B_r, QUAD),
            "l": (B_r, MMA_N if MMA_ROW_SUM in config.step.traits else QUAD),
            "P": (B_r, B_c),
            "V": (warps, B_c, d_v),
            "O": (B_r, d_v),
        }
        size = 4 * lead[0] * lead[1] * sum(int(np.prod(shape)) for shape in shapes.values())
        if size > MAX_TRACE_BYTES:
            raise ValueError(
                f"tracing {lead[0]} tiles of queries over {lead[1]} blocks of keys takes "
                f"{size >> 20} MiB, over {MAX_TRACE_BYTES >> 20}: use a shorter sequence or fewer "
                "heads"
            )
        # NaN is what was never computed
        self.values = {n: np.full((*lead, *s), np.nan, np.float32) for n, s in shapes.items()}

    @property
    def n_row_blocks(self) -> int:
        """Tiles of queries of one head."""
        return -(-self.problem.len_q // self.config.B_r)

    @property
    def n_tiles(self) -> int:
        """Tiles of queries of all heads and batches."""
        return self.problem.batch * self.problem.heads * self.n_row_blocks

    @property
    def key_blocks(self) -> range:
        """The block of keys of each turn."""
        return self.config.key_blocks(self.problem.len_k)

    @property
    def rows_of_warp(self) -> int:
        """Rows of a tile of queries that a warp has."""
        return self.config.B_r // self.config.n_warps

    def put_row(
        self,
        name: str,
        observation: Observation,
        found: np.ndarray,
        half: int,
        place: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Record m or l, as each lane has found it for its row of a half tile. `place`: tile and
        turn for each lane, a turn below zero where it belongs to none."""
        tile, turn = place
        lane = observation.lanes % WARP
        row = observation.warps * self.rows_of_warp + half * HALF_TILE + lane // QUAD
        some = turn >= 0
        where = (tile[some], turn[some], row[some], lane[some] % QUAD)
        self.values[name][where] = found[some]

    def steps(self) -> tuple[BlockStep, ...]:
        """The record, one step for each block of keys."""
        arrays = dict(self.values)
        if MMA_ROW_SUM not in self.config.step.traits:
            # l stays in four parts, one per lane, until the end: added as the kernel will add them
            parts = arrays["l"]
            pairs = parts[..., 0::2] + parts[..., 1::2]
            arrays["l"] = pairs[..., :1] + pairs[..., 1:]
        lead = (self.problem.batch, self.problem.heads, self.n_row_blocks)
        return tuple(
            BlockStep(
                key_block,
                **{
                    name: torch.from_numpy(array[:, n].reshape(*lead, *array.shape[2:]))
                    for name, array in arrays.items()
                },
            )
            for n, key_block in enumerate(self.key_blocks)
        )
