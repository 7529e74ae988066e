"""The qk_norm_rope family of operation `qk_norm_rope`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.gpu import Device
from flash_helpers.operations.qk_norm_rope import OPERATION
from flash_helpers.operations.qk_norm_rope.problem import OUTPUTS, QkNormRope
from flash_helpers.operations.qk_norm_rope.supports import QkNormRopeSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    Address,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.joint import ROW_STRIDES
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    CHUNK_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    VECTOR_LOADS,
    RowConfig,
)

MOST_CHUNKS = 12  # with which a thread has 96 elements of a row at most
MOST_OF_TOKENS = 4  # where a thread has three rows

# A trait of steps.
TOKENS = "tokens"  # `row_threads` threads have a token, with its rows of Q, K and V

_INPUTS = ("q", "k", "v", "q_weight", "k_weight", "rotary")
_OF_CONTEXT = ("context_q", "context_k", "context_v", "context_q_weight", "context_k_weight")
_STRIDED = (*_INPUTS[:3], *_OF_CONTEXT[:3], *OUTPUTS)

ARGUMENTS = StructLayout(
    "QkNormRopeKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys((*_INPUTS, *_OF_CONTEXT, *OUTPUTS), POINTER),
            **{f"{name}_strides": ROW_STRIDES for name in _STRIDED},
            **dict.fromkeys(
                ("batch", "length", "context", "context_queries", "heads", "d_head"), INT
            ),
            "eps": FLOAT,
        }
    ),
)


@dataclass(frozen=True)
class QkNormRopeKernelConfig(RowConfig):
    """One kernel of the qk_norm_rope family."""

    example: ClassVar[str] = "qr1_bf16_w4_c6_t64"

    qk_norm_rope: int = number("qr", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the row, which a thread keeps in registers")
    row_threads: int = number("t", "that have a row; from qr2 on a token with its rows")

    @property
    def family(self) -> Family[Any]:
        """The qk_norm_rope family."""
        return QK_NORM_ROPE

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a number for each warp, and from qr2 on two,
        of Q and of K."""
        return (2 if self.has_tokens else 1) * self.n_warps * Element.FP32.bytes

    @property
    def has_tokens(self) -> bool:
        """Whether threads have a token, with its rows of Q, K and V."""
        return TOKENS in self.step.traits

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk, of all rows that it has."""
        return CHUNK_REGISTERS * (3 if self.has_tokens else 1)

    @property
    def supports(self) -> QkNormRopeSupports:
        """Heads of whole chunks that the registers of a row's threads hold together."""
        return QkNormRopeSupports(self.dtype, CHUNK_BYTES, self.pass_elements, self.block_rows)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        super().check()
        most = MOST_OF_TOKENS if self.has_tokens else MOST_CHUNKS
        if self.chunks > most:
            raise ValueError(f"chunks {self.chunks} is over {most}: choose 3 or 4")

    def variants(self) -> tuple[QkNormRopeKernelConfig, ...]:
        """Return the config, and one for rows that its threads do not hold."""
        wide = self.replace(**(_WIDE_TOKENS if self.has_tokens else _WIDE))
        return (self,) if self.pass_elements >= wide.pass_elements else (self, wide)

    def call(self, problem: QkNormRope, strides: Strides, device: Device) -> Call:
        """Return one launch, in which each block has `block_rows` rows of Q, K and V, or of tokens
        from qr2 on."""
        rows = problem.batch * problem.n_keys if self.has_tokens else problem.rows
        names = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_strides": strides[name][:2] for name in _STRIDED if name in names},
            "batch": (problem.batch,),
            "length": (problem.length,),
            "context": (problem.context,),
            "context_queries": (problem.n_queries - problem.length,),
            "heads": (problem.heads,),
            "d_head": (problem.d_head,),
            "eps": (problem.eps,),
        }
        launch = Launch(
            kernel=self.kernels[self.main_kernel],
            grid=(-(-rows // self.block_rows), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in names),
        )
        return Call((launch,))

    def most_runs(self, problem: QkNormRope, device: Device) -> int:
        """Return the runs of an instruction, of which none is in a loop that is not unrolled."""
        return 2


_WIDE = MappingProxyType({"n_warps": 8, "chunks": 8, "row_threads": 256})
_WIDE_TOKENS = MappingProxyType({"n_warps": 16, "chunks": 4, "row_threads": 512})

QK_NORM_ROPE = Family(
    name="qk_norm_rope",
    title="norm and rotary embedding of Q and K of two streams",
    operation=OPERATION,
    prefix="qr",
    rank=31,
    config=QkNormRopeKernelConfig,
    base=MappingProxyType({"n_warps": 4, "chunks": 6, "row_threads": 64}),
    entries=(
        StepEntry(
            "both_streams",
            "norm, rotary embedding and the joint sequence in one pass",
            "kernels/qk_norm_rope/qr1.cuh",
            opens={
                "n_warps": (4, 8, 16),
                "chunks": (1, 2, 3, 4, 6, 8, 12),
                "row_threads": (8, 16, 32, 64, 128, 256, 512),
            },
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
        StepEntry(
            "rows_of_a_token",
            "the same threads have Q, K and V of a token",
            "kernels/qk_norm_rope/qr2.cuh",
            sets={"chunks": 3, "row_threads": 128},
            opens={"chunks": (1, 2, 3, 4)},
            traits=frozenset({TOKENS, HELD_BACK}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"qk_norm_rope_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/qk_norm_rope/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16),
    computing=frozenset(),
    simulated_budget=2_650_000,
    matrix_budget=1_000_000,
)
