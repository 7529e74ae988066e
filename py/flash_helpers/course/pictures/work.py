"""What a warp executes for one block of keys, counted from the config, and what it costs.

Costs are those of flash_helpers.sass.read.opcodes, which names their sources, for compute
capability 9.0 with mma.sync. They say how long a pipe of the SM is busy at least: counted, not
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.gpu import WARP
from flash_helpers.kernel_configs import (
    LARGE_TILE,
    DType,
    FlashForwardKernelConfig,
    OverlapKernelConfig,
)
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.mma_sync import CHUNK_BYTES, MMA_K, MMA_M
from flash_helpers.registry.overlap import OVERLAP
from flash_helpers.registry.problem import ELEMENT_BYTES
from flash_helpers.sass.read import opcodes

CAPABILITY = 90
LAST_STEP = 16  # where ampere is closed
LDMATRIX_BYTES = 4 * 8 * CHUNK_BYTES  # ldmatrix.x4: four matrices of 8 rows
WAVEFRONT_BYTES = 128


def _cost(opcode: str) -> float:
    cycles = opcodes.cost(opcode, CAPABILITY)
    if cycles is None:
        raise ValueError(f"{opcode}: what it costs on sm_{CAPABILITY} is not known")
    return cycles


MMA_CYCLES = _cost("HMMA.16816.F32.BF16")
LDMATRIX_CYCLES = _cost("LDSM.16.M88.4")
EX2_CYCLES = _cost("MUFU.EX2")
FFMA_CYCLES = _cost("FFMA")


def step_config(number: int) -> FlashForwardKernelConfig:
    """The fixed config of a step of the ampere family, in bf16."""
    return AMPERE.fixed_config(AMPERE.steps[AMPERE.step_id(number)], DType.BF16)


def large_tile(number: int) -> FlashForwardKernelConfig:
    """The same with the large tile, for a step that has a choice."""
    return step_config(number).replace(**LARGE_TILE)


def overlap_step(number: int) -> OverlapKernelConfig:
    """The fixed config of a step of the overlap family, in bf16."""
    return OVERLAP.fixed_config(OVERLAP.steps[OVERLAP.step_id(number)], DType.BF16)


@dataclass(frozen=True)
class Work:
    """Warp instructions of one warp for one block of keys.

    rows: of Q. mma_per_product: as the config has it. ldmatrix_Q, ldmatrix_tile: fragment
    loads of Q, and of K or V. ex2: exponentials of S and of the rescale. fp32: other arithmetic of
    the softmax. copied_bytes: the warp's share of K and V in shared memory.
    """

    rows: int
    mma_per_product: int
    ldmatrix_Q: int
    ldmatrix_tile: int
    ex2: int
    fp32: int
    copied_bytes: int

    @property
    def mma(self) -> int:
        return 2 * self.mma_per_product

    @property
    def ldmatrix(self) -> int:
        return self.ldmatrix_Q + 2 * self.ldmatrix_tile

    @property
    def S_cycles(self) -> float:
        """Of S = Q @ K^T: the busier of tensor cores and shared memory."""
        loads = self.ldmatrix_Q + self.ldmatrix_tile
        return max(self.mma_per_product * MMA_CYCLES, loads * LDMATRIX_CYCLES)

    @property
    def O_cycles(self) -> float:
        """Of O += P @ V: the busier of tensor cores and shared memory."""
        return max(self.mma_per_product * MMA_CYCLES, self.ldmatrix_tile * LDMATRIX_CYCLES)

    @property
    def issue_cycles(self) -> float:
        """Cycles of the four schedulers for the instructions counted here: at least."""
        return (self.mma + self.ldmatrix + self.ex2 + self.fp32) * opcodes.ISSUE_CYCLES

    def cycles(self) -> dict[str, float]:
        """Cycles of an SM by what is busy. Of shared memory: fragments without conflicts, and the
        copies' stores."""
        return {
            "tensor cores": self.mma * MMA_CYCLES,
            "shared memory": self.ldmatrix * LDMATRIX_CYCLES + self.copied_bytes / WAVEFRONT_BYTES,
            "exponentials": self.ex2 * EX2_CYCLES,
            "issue": self.issue_cycles,
        }


def tile_bytes(config: FlashForwardKernelConfig) -> int:
    """Of a tile of K or V."""
    return config.B_c * config.d_head * ELEMENT_BYTES


def work_of(config: FlashForwardKernelConfig, row_tiles: int = 0) -> Work:
    """What a warp of a config executes for one block of keys, from step 6 on (before that the
    softmax has more arithmetic). row_tiles: instead of the config's own, registers permitting."""
    row_tiles = row_tiles or config.row_tiles
    rows = row_tiles * MMA_M
    elements_S, elements_O = (rows * n // WARP for n in (config.B_c, config.d_head))  # of a lane
    lane_rows = 2 * row_tiles  # rows that a lane holds a part of
    return Work(
        rows=rows,
        mma_per_product=row_tiles * config.mma_per_product // config.row_tiles,
        ldmatrix_Q=row_tiles * config.d_head // MMA_K if config.Q_mma_load_K_tiles else 0,
        ldmatrix_tile=tile_bytes(config) // LDMATRIX_BYTES,
        ex2=elements_S + lane_rows,
        # an FFMA, a maximum and an addition for each element of S, a multiplication for each of O
        # and l, half a conversion for each of P
        fp32=3 * elements_S + elements_O + lane_rows + elements_S // 2,
        copied_bytes=2 * tile_bytes(config) // config.n_warps,
    )
