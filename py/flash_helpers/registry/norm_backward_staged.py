"""The norm_backward_staged family of operation `norm_backward`: rows come to shared memory ahead of
their use. Standard library only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.norm_backward import OPERATION
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.supports import NormBackwardSupports
from flash_helpers.registry.call import FLOAT, Call
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.norm_backward import (
    ARGUMENTS,
    COMBINE,
    ONE_PASS,
    ROWS,
    THREADS_PER_SM,
    WIDE_SUMS,
    NormBackwardKernels,
)
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    MOST_OF_FEW,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    SM_REGISTERS,
    VECTOR_LOADS,
    Fields,
    RowConfig,
)

STAGES = (2, 3)  # that a sweep tries
# Registers of a thread beside its sums of columns; with fewer sums per chunk than MANY_SUMS, ptxas
# needs some more of them.
OTHERS, OTHERS_OF_FEW, MANY_SUMS = 64, 72, 16
CHUNKS = (1, 2, 4)
ROW_THREADS_TRIED = (8, 16, 32, 64, 128, 256, 512)
LEAST_WARPS = 8
MOST_CHUNKS_OF_3 = 64  # of the warps of a block, with which shared memory holds 3 stages
TARGETS = ("80", "86", "89", "90")


@dataclass(frozen=True)
class NormBackwardStagedKernelConfig(NormBackwardKernels, RowConfig):
    """One kernel of the norm_backward_staged family. `rms`: it computes gradients of RMS norm."""

    example: ClassVar[str] = "w1_bf16_w8_c2_t256_s3"

    norm_backward_staged: int = number("w", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the row, of which a thread has the columns")
    row_threads: int = number("t", "that have a row")
    staged_rows: int = number("s", "of a thread in shared memory: one in use, others on their way")
    rms: bool = flag("rms", "RMS norm instead of layer norm", default=False)

    @property
    def family(self) -> Family[Any]:
        """The norm_backward_staged family."""
        return NORM_BACKWARD_STAGED

    @property
    def sums(self) -> int:
        """Sums of a column, of dweight and of dbias; and of a row."""
        return 1 if self.rms else 2

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk: the sums of its columns."""
        return self.sums * self.chunk_elements

    @property
    def other_registers(self) -> int:
        """Registers of a thread, at most, beside its chunks."""
        return OTHERS_OF_FEW if self.chunk_registers < MANY_SUMS else OTHERS

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block of rows in bytes: x and dy of each stage, and weight;
        sums of each warp, for two rows; sums of each column where warps have rows of their own."""
        chunks = (2 * self.staged_rows + 1) * self.chunks * self.n_threads * CHUNK_BYTES
        columns = self.pass_elements if self.threads_per_row < self.n_threads else 0
        return chunks + FLOAT.size * (4 * self.n_warps + self.sums * columns)

    @property
    def supports(self) -> NormBackwardSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums")
        return NormBackwardSupports(self.dtype, *widest, rms=self.rms)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        super().check()
        if self.staged_rows < STAGES[0]:
            raise ValueError(f"staged_rows {self.staged_rows} is below {STAGES[0]}: choose 2 or 3")
        most = {target: gpu.LIMITS[int(target)].smem_bytes for target in TARGETS}
        if self.smem_bytes > max(most.values()):
            limits = ", ".join(f"sm_{target}: {limit}" for target, limit in most.items())
            raise ValueError(
                f"staged_rows {self.staged_rows} with n_warps {self.n_warps} and chunks "
                f"{self.chunks} need {self.smem_bytes} bytes of shared memory, over every limit "
                f"({limits}): lower one of them"
            )

    def variants(self) -> tuple[NormBackwardStagedKernelConfig, ...]:
        """Return the config, and that of the other function if an SM has room for it."""
        with contextlib.suppress(ValueError):
            return self, self.replace(rms=not self.rms)
        return (self,)

    def blocks_per_sm(self, device: Device) -> int:
        """Return the thread blocks of an SM."""
        registers = self.chunks * self.chunk_registers + self.other_registers
        return resident_blocks(device, self.n_threads, registers, self.smem_bytes)

    def call(self, problem: NormBackward, strides: Strides, device: Device) -> Call:
        """Return a launch for rows, and one for columns if their gradients are asked for."""
        blocks = -(-problem.rows // self.block_rows)
        parts = min(blocks, device.sms * self.blocks_per_sm(device))
        return self.call_of_parts(problem, strides, parts)

    def most_runs(self, problem: NormBackward, device: Device) -> int:
        """Return the turns of the longest loop, over the elements of a row, rows or parts, and as
        many again for loops that nvcc unrolls; those over rows are in one over tiles."""
        elements = -(-problem.width // self.threads_per_row) + 8
        return 2 * elements * (problem.rows + 8)


def resident_blocks(device: Device, n_threads: int, registers: int, smem_bytes: int) -> int:
    """Return the thread blocks that an SM has room for; at least one. registers: of a thread."""
    major, minor = device.capability
    reserved = gpu.RESERVED_SMEM_BYTES
    most = gpu.LIMITS[10 * major + minor].smem_bytes + reserved
    fitting = (SM_REGISTERS // n_threads // registers, THREADS_PER_SM // n_threads)
    return max(1, min(*fitting, most // (smem_bytes + reserved)))


def competing_stages(width: int, dtype: Element) -> list[Fields]:
    """Return n_warps, chunks, row_threads and staged_rows with which the threads of a row have just
    its chunks; none for rows that no block has room for."""
    found: list[Fields] = []
    for chunks in CHUNKS:
        row_threads = width * dtype.bytes // (chunks * CHUNK_BYTES)
        few = row_threads < gpu.WARP and width > row_threads * MOST_OF_FEW
        if row_threads in ROW_THREADS_TRIED and not few:
            n_warps = max(LEAST_WARPS, row_threads // gpu.WARP)
            stages = 2 if chunks * n_warps > MOST_CHUNKS_OF_3 else 3
            shape = {"n_warps": n_warps, "chunks": chunks, "row_threads": row_threads}
            found.append({**shape, "staged_rows": stages})
    return found


def _of_rms() -> Iterator[NormBackwardStagedKernelConfig]:
    """Yield a kernel of RMS norm: the mean, Σ g and the sums of dbias are left out."""
    for config in NORM_BACKWARD_STAGED.progression():
        if config.dtype is Element.BF16:
            yield config.replace(rms=True)


NORM_BACKWARD_STAGED = Family(
    name="norm_backward_staged",
    title="the backward pass of layer norm and RMS norm, with rows in shared memory",
    operation=OPERATION,
    prefix="w",
    rank=21,
    config=NormBackwardStagedKernelConfig,
    base=MappingProxyType(
        {"n_warps": 8, "chunks": 2, "row_threads": 256, "staged_rows": 3, "rms": False}
    ),
    entries=(
        StepEntry(
            "rows_in_shared_memory",
            "the next rows on their way to shared memory, and a loop for rows of whole chunks",
            "kernels/norm_backward/w1.cuh",
            parent="e4",
            opens={
                "n_warps": (4, 8, 16),
                "chunks": CHUNKS,
                "row_threads": ROW_THREADS_TRIED,
                "staged_rows": STAGES,
                "rms": (False, True),
            },
            traits=frozenset(
                {VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS, ONE_PASS, WIDE_SUMS, HELD_BACK}
            ),
        ),
        StepEntry(
            "dx_leaves_l2",
            "dx by streaming stores, so that L2 has room for x and dy",
            "kernels/norm_backward/w2.cuh",
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({ROWS: ARGUMENTS, COMBINE: ARGUMENTS}),
    header=PurePosixPath("kernels/norm_backward/staged.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=10_000_000,
    matrix_budget=17_500_000,
    also_listed=_of_rms,
)
