"""What a warp executes for one block of keys, counted from the config, and what it costs.

Costs are those of flash_helpers.sass.read.opcodes, which names their sources, for compute
capability 9.0 with mma.sync. They say how long a pipe of the SM is busy at least: counted, not
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from flash_helpers.gpu import WARP
from flash_helpers.kernel_configs import (
    LARGE_TILE,
    TWO_STAGES,
    DType,
    FlashForwardKernelConfig,
)
from flash_helpers.registry.ampere import AMPERE, CHUNK_BYTES, MMA_K, MMA_M, MMA_N
from flash_helpers.registry.problem import ELEMENT_BYTES
from flash_helpers.sass.read import opcodes

CAPABILITY = 90
LAST_STEP = len(AMPERE.steps)
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
    step = AMPERE.steps[AMPERE.step_id(number)]
    return FlashForwardKernelConfig(number, DType.BF16, **step.options)


def large_tile(number: int) -> FlashForwardKernelConfig:
    """The same with the large tile, for a step that has a choice."""
    return step_config(number).replace(**LARGE_TILE)


def two_stages() -> FlashForwardKernelConfig:
    """The last step with two buffers each for K and V."""
    return step_config(LAST_STEP).replace(**TWO_STAGES)


@dataclass(frozen=True)
class Work:
    """Warp instructions of one warp for one block of keys.

    mma_S, mma_O: of S = Q @ K^T and O += P @ V. ldmatrix_Q, _K, _V: fragment loads. ex2:
    exponentials of S and of the rescale. fp32: other arithmetic of the softmax, of which there are
    an FFMA, a maximum and an addition for each element of S, a multiplication for each of O and l,
    and half a conversion for each of P. copied_bytes: its share of K and V in shared memory.
    """

    rows: int
    mma_S: int
    mma_O: int
    ldmatrix_Q: int
    ldmatrix_K: int
    ldmatrix_V: int
    ex2: int
    fp32: int
    copied_bytes: int

    @property
    def mma(self) -> int:
        return self.mma_S + self.mma_O

    @property
    def ldmatrix(self) -> int:
        return self.ldmatrix_Q + self.ldmatrix_K + self.ldmatrix_V

    @property
    def tensor_cycles(self) -> float:
        """Cycles of the SM's tensor cores."""
        return self.mma * MMA_CYCLES

    @property
    def smem_cycles(self) -> float:
        """Cycles of shared memory: fragments without conflicts, and the copies' stores."""
        return self.ldmatrix * LDMATRIX_CYCLES + self.copied_bytes / WAVEFRONT_BYTES

    @property
    def S_cycles(self) -> float:
        """Of S = Q @ K^T: the busier of tensor cores and shared memory."""
        loads = self.ldmatrix_Q + self.ldmatrix_K
        return max(self.mma_S * MMA_CYCLES, loads * LDMATRIX_CYCLES)

    @property
    def O_cycles(self) -> float:
        """Of O += P @ V: the busier of tensor cores and shared memory."""
        return max(self.mma_O * MMA_CYCLES, self.ldmatrix_V * LDMATRIX_CYCLES)

    @property
    def ex2_cycles(self) -> float:
        """Cycles of the special function units."""
        return self.ex2 * EX2_CYCLES

    @property
    def issue_cycles(self) -> float:
        """Cycles of the four schedulers for the instructions counted here: at least."""
        return (self.mma + self.ldmatrix + self.ex2 + self.fp32) * opcodes.ISSUE_CYCLES

    def cycles(self) -> MappingProxyType[str, float]:
        """By what is busy, in the order: tensor cores, shared memory, exponentials, issue."""
        return MappingProxyType(
            {
                "tensor cores": self.tensor_cycles,
                "shared memory": self.smem_cycles,
                "exponentials": self.ex2_cycles,
                "issue": self.issue_cycles,
            }
        )


def work_of(config: FlashForwardKernelConfig) -> Work:
    """What a warp of a config executes for one block of keys, from step 6 on (before that the
    softmax has more arithmetic)."""
    return warp_work(
        config.B_r // config.n_warps,
        config.B_c,
        config.d_head,
        config.n_warps,
        Q_in_registers=config.Q_mma_load_K_tiles == 0,
    )


def warp_work(
    rows: int, B_c: int, d_head: int, n_warps: int, *, Q_in_registers: bool = False
) -> Work:
    """The same for a warp with so many rows of Q, registers permitting."""
    row_tiles, k_tiles = rows // MMA_M, d_head // MMA_K
    S_elements, O_elements = rows * B_c // WARP, rows * d_head // WARP  # of a lane
    lane_rows = 2 * row_tiles  # rows that a lane holds a part of
    tile_bytes = B_c * d_head * ELEMENT_BYTES
    return Work(
        rows=rows,
        mma_S=row_tiles * (B_c // MMA_N) * k_tiles,
        mma_O=row_tiles * (d_head // MMA_N) * (B_c // MMA_K),
        ldmatrix_Q=0 if Q_in_registers else row_tiles * k_tiles,
        ldmatrix_K=tile_bytes // LDMATRIX_BYTES,
        ldmatrix_V=tile_bytes // LDMATRIX_BYTES,
        ex2=S_elements + lane_rows,
        fp32=3 * S_elements + O_elements + lane_rows + S_elements // 2,
        copied_bytes=2 * tile_bytes // n_warps,
    )
