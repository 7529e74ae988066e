"""The joint_linear family of operation `joint_linear`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.joint_linear import OPERATION
from flash_helpers.operations.joint_linear.problem import CONTEXT, JointLinear
from flash_helpers.operations.joint_linear.supports import MOST_IN, JointLinearSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    Address,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    MAX_WARPS,
    MMA_K,
    MMA_M,
    MMA_N,
    PIECE,
    TARGETS,
)
from flash_helpers.registry.problem import Element, Strides

BUFFERS = 2  # of pieces in shared memory
MOST_SMEM = 99 * 1024  # of a thread block on sm_86 and sm_89
MOST_COLUMNS = 256  # of a thread block
_ROWS = (16, 32, 64, 128)
_WARP_ROWS = (16, 32, 64)
# Sums of a thread: with those of 8 warps and more, 128 registers are all that a thread has.
_MOST_SUMS, _MOST_SUMS_OF_MANY = 128, 64
_SWIZZLED_ROWS = 8  # whose chunks lie in all banks
# Of an SM in jl2: with more sums of a thread each has more registers.
_FEW_SUMS, _WARPS_PER_SM, _WARPS_OF_MANY = 32, 16, 12

WEIGHTS_STAY = "weights_stay"  # trait of steps: in shared memory, so that there is a depth
CHUNKS_OF_A_COLUMN = "chunks_of_a_column"  # of y, which a thread stores
ACTIVATIONS = "activations"  # GELU of y and SiLU of x

_INPUTS = ("x", "weight", "bias", "norm_weight")
_STRIDED = ("x", "weight", "y")
_STRIDES = (*_STRIDED, *(CONTEXT + name for name in _STRIDED))
_SIZES = ("rows", "in_features", "out_features", "context_rows", "context_in", "context_out")

ARGUMENTS = StructLayout(
    "JointLinearKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_INPUTS, POINTER),
            **{CONTEXT + name: POINTER for name in _INPUTS},
            **dict.fromkeys(("y", f"{CONTEXT}y"), POINTER),
            **{f"{name}_stride": LONG for name in _STRIDES},
            **dict.fromkeys((*_SIZES, "blocks", "turns"), INT),
            "eps": FLOAT,
            "activations": INT,
        }
    ),
)


@dataclass(frozen=True)
class JointLinearKernelConfig(Config):
    """One kernel of the joint_linear family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "jl1_bf16_Br64_Bc128_w4_wr32"

    joint_linear: int = number("jl", "the step")
    dtype: Element = element()
    B_r: int = number("Br", "rows of a thread block")
    B_c: int = number("Bc", "outputs of a thread block; all of a row with a norm")
    n_warps: int = number("w", "of a thread block")
    warp_rows: int = number("wr", "rows of a warp, which has a share of the columns")
    depth: int = number(
        "in",
        "input features of the weights that stay in shared memory; 0 before jl2",
        default=0,
    )

    @property
    def family(self) -> Family[Any]:
        """The joint_linear family."""
        return JOINT_LINEAR

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def column_warps(self) -> int:
        """Warps that share the columns of a row."""
        return self.n_warps // (self.B_r // self.warp_rows)

    @property
    def warp_columns(self) -> int:
        """Columns of a warp."""
        return self.B_c // self.column_warps

    @property
    def _sums(self) -> int:
        """Sums of a thread."""
        return self.warp_rows * self.warp_columns // gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: two pieces of x and of W, bias and weights
        of the norm, and a sum for each row and each of its warps. From jl2 on two whole tiles of x,
        and one of W."""
        pieces = BUFFERS * (self.B_r + self.B_c) * PIECE * ELEMENT_BYTES
        if self.depth:
            pieces = (BUFFERS * self.B_r + self.B_c) * self.depth * ELEMENT_BYTES
        sums = self.B_r * self.column_warps * Element.FP32.bytes
        return pieces + 2 * self.B_c * ELEMENT_BYTES + sums

    @property
    def supports(self) -> JointLinearSupports:
        """Streams of any number of tokens; with a norm, rows of up to B_c outputs."""
        most_in = self.depth or MOST_IN
        return JointLinearSupports(
            *(self.dtype, CHUNK_BYTES, self.B_r, self.B_c, PIECE, most_in),
            activations=ACTIVATIONS in self.step.traits,
        )

    def variants(self) -> tuple[JointLinearKernelConfig, ...]:
        """Return the config, and for norms of wide rows that of the step with the most columns,
        where weights do not stay. Of a step with activations, which no other has, that of the
        largest depth."""
        if ACTIVATIONS in self.step.traits and self.depth < _DEEP["depth"]:
            return self, self.replace(**_DEEP)
        return (self,) if self.depth or self.B_c >= MOST_COLUMNS else (self, self.replace(**_WIDE))

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        for name, known in (("B_r", _ROWS), ("warp_rows", _WARP_ROWS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not built: choose one of "
                    f"{', '.join(map(str, known))}"
                )
        if self.B_c % PIECE or not 0 < self.B_c <= MOST_COLUMNS:
            raise ValueError(
                f"B_c {self.B_c} is not a multiple of {PIECE} up to {MOST_COLUMNS}: choose 128"
            )
        if self.B_r % self.warp_rows:
            raise ValueError(
                f"B_r {self.B_r} is not a multiple of warp_rows {self.warp_rows}: choose warp_rows "
                f"{self.B_r}"
            )
        row_warps = self.B_r // self.warp_rows
        if not 1 <= self.n_warps <= MAX_WARPS // 2 or self.n_warps % row_warps:
            raise ValueError(
                f"n_warps {self.n_warps} is not a multiple of {row_warps}, B_r {self.B_r} over "
                f"warp_rows {self.warp_rows}, up to {MAX_WARPS // 2}: choose {row_warps}"
            )
        if self.B_c % (self.column_warps * MMA_K):
            raise ValueError(
                f"{self.column_warps} warps share B_c {self.B_c} columns, which is not a multiple "
                f"of {MMA_K} for each: choose n_warps {row_warps}"
            )
        stays = WEIGHTS_STAY in self.step.traits
        if stays and (self.depth % PIECE or self.depth < self.B_c):
            raise ValueError(
                f"depth {self.depth} is not a multiple of {PIECE} from B_c {self.B_c} on, whose "
                f"outputs take the place of x: choose {self.B_c}"
            )
        step = self.n_threads // (self.B_c // (CHUNK_BYTES // ELEMENT_BYTES))
        if CHUNKS_OF_A_COLUMN in self.step.traits and (step % _SWIZZLED_ROWS or self.B_r % step):
            raise ValueError(
                f"{self.n_threads} threads store {step} rows of B_c {self.B_c} at once, no "
                f"multiple of {_SWIZZLED_ROWS} that divides B_r {self.B_r}: choose n_warps "
                f"{self.B_c * _SWIZZLED_ROWS // (MMA_N * gpu.WARP)}"
            )
        sums = self._sums
        most = _MOST_SUMS if self.n_warps <= MAX_WARPS // 4 else _MOST_SUMS_OF_MANY
        if sums > most:
            raise ValueError(
                f"warp_rows {self.warp_rows} and {self.warp_columns} columns of a warp give each "
                f"thread {sums} sums, over the limit {most} of its registers: choose a smaller B_c "
                "or warp_rows"
            )
        if self.smem_bytes > MOST_SMEM:
            raise ValueError(
                f"B_r {self.B_r} and B_c {self.B_c} take {self.smem_bytes} bytes of shared memory, "
                f"over the limit {MOST_SMEM}: choose a smaller B_r or B_c"
            )

    def _tiles(self, problem: JointLinear, turns: int = 1) -> tuple[int, int]:
        """Return the thread blocks of the sequence and those of the context, which have so many
        tiles of rows."""
        own, of_context = (
            -(-rows // (self.B_r * turns)) * -(-columns // self.B_c)
            for rows, columns in (
                (problem.rows, problem.out_features),
                (problem.context_rows, problem.context_out),
            )
        )
        return own, of_context

    def _turns(self, problem: JointLinear, device: Device) -> int:
        """Return the tiles of rows of a thread block: so many that all thread blocks run at
        once."""
        if not self.depth:
            return 1
        capability = 10 * device.capability[0] + device.capability[1]
        smem = gpu.SMEM_BYTES.get(capability, MOST_SMEM) + gpu.RESERVED_SMEM_BYTES
        warps = _WARPS_OF_MANY if self._sums > _FEW_SUMS else _WARPS_PER_SM
        per_sm = min(warps // self.n_warps, smem // (self.smem_bytes + gpu.RESERVED_SMEM_BYTES))
        if self._sums > _MOST_SUMS_OF_MANY or per_sm == 0:
            per_sm = 1
        # The last thread block of each stream and of all columns may have fewer tiles
        unfilled = sum(-(-x // self.B_c) for x in (problem.out_features, problem.context_out))
        room = max(1, per_sm * device.sms - unfilled)
        return max(1, -(-sum(self._tiles(problem)) // room))

    def call(self, problem: JointLinear, strides: Strides, device: Device) -> Call:
        """Return one launch, in which thread blocks have a tile of one of the two streams."""
        names = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        turns = self._turns(problem, device)
        own, of_context = self._tiles(problem, turns)
        values: dict[str, tuple[float, ...]] = {
            **{
                f"{name}_stride": (_row_stride(strides[name]),)
                for name in _STRIDES
                if name in names
            },
            **{name: (getattr(problem, name),) for name in _SIZES},
            "blocks": (own,),
            "turns": (turns,),
            "eps": (problem.eps,),
            "activations": (problem.gelu + 2 * problem.silu,),
        }
        launch = Launch(
            kernel=self.kernels[self.main_kernel],
            grid=(own + of_context, 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in names),
        )
        return Call((launch,))

    def work(self, problem: JointLinear, device: Device) -> float:
        """Return the outputs that are computed, in whole tiles, as many on each SM as on the
        busiest, times the input features."""
        blocks = -(-sum(self._tiles(problem)) // device.sms) * device.sms
        return blocks * self.B_r * self.B_c * max(problem.in_features, problem.context_in)

    def most_runs(self, problem: JointLinear, device: Device) -> int:
        """Return the turns of the loop over pieces of all tiles, and as many again for each row of
        a tile, for loops that nvcc does not unroll."""
        pieces = -(-max(problem.in_features, problem.context_in) // PIECE)
        return 2 * (pieces + 1) * (self.B_r + self.B_c) * (self._turns(problem, device) + 2)

    def counted_on(self, size: int) -> JointLinear:
        """Return a problem of about as many input features."""
        return JointLinear(1, 8, -(-size // PIECE) * PIECE, PIECE, self.dtype)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A piece of the input features, and a warp's tensor instructions for it."""
        tiles = self.warp_rows // MMA_M * (self.warp_columns // MMA_N)
        return "piece of x and W", tiles * (PIECE // MMA_K)

    def loop_runs(self, size: int) -> int:
        """Return the number of pieces."""
        return -(-size // PIECE)


def _row_stride(strides: tuple[int, ...]) -> int:
    """Return the distance of two tokens, or of two rows of W: strides are 0 along a dimension of
    one item."""
    return strides[-2] or strides[0]


_WIDE = MappingProxyType({"B_r": 64, "B_c": MOST_COLUMNS, "n_warps": 8, "warp_rows": 32})
_DEEP = MappingProxyType(
    {"B_r": 32, "B_c": PIECE, "n_warps": 4, "warp_rows": 16, "depth": 4 * PIECE}
)

JOINT_LINEAR = Family(
    name="joint_linear",
    title="linear layers of a sequence and its context",
    operation=OPERATION,
    prefix="jl",
    rank=29,
    config=JointLinearKernelConfig,
    base=MappingProxyType({"B_r": 64, "B_c": 128, "n_warps": 4, "warp_rows": 32, "depth": 0}),
    entries=(
        StepEntry(
            "two_streams",
            "linear layers of both streams in one launch, and the norm of their outputs",
            "kernels/joint_linear/jl1.cuh",
            opens={
                "B_r": _ROWS,
                "B_c": (64, 128, 192, 256),
                "n_warps": (2, 4, 8),
                "warp_rows": _WARP_ROWS,
            },
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "weights_stay",
            "weights stay in shared memory, and tiles of rows go past them",
            "kernels/joint_linear/jl2.cuh",
            sets={"depth": PIECE * 2},
            opens={"B_c": (64, 128), "depth": (PIECE, 2 * PIECE, 4 * PIECE)},
            traits=frozenset({WEIGHTS_STAY, HELD_BACK}),
        ),
        StepEntry(
            "fewer_instructions",
            "fewer instructions for bias, norm and the store of y",
            "kernels/joint_linear/jl3.cuh",
            traits=frozenset({CHUNKS_OF_A_COLUMN, HELD_BACK}),
        ),
        StepEntry(
            "activations",
            "GELU of y before it is rounded, and SiLU of x before the product",
            "kernels/joint_linear/jl4.cuh",
            traits=frozenset({ACTIVATIONS, HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({"linear_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/joint_linear/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=8_900_000,
    matrix_budget=1_000_000,
)
