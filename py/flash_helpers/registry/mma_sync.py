"""The common part of families on `mma.sync`, `ldmatrix` and `cp.async`: each thread block has a
tile of Q and walks all keys; its warps share the rows. Standard library only.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TypeVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.problems import counted_problem
from flash_helpers.operations.attention_forward.supports import (
    MAX_LENGTH,
    TWO_LENGTHS,
    AttentionSupports,
)
from flash_helpers.registry.call import (
    INT,
    POINTER,
    STRIDES,
    Address,
    Call,
    Launch,
    StructLayout,
    starts,
)
from flash_helpers.registry.config import Config
from flash_helpers.registry.problem import Element, Strides

Own = TypeVar("Own", bound="MmaSyncConfig")

CHUNK_BYTES = 16  # one cp.async, one row of an 8x8 ldmatrix tile
ELEMENT_BYTES = 2  # of fp16 and bf16
PIECE = 64  # columns: tiles are copied in pieces of 128-byte rows from v15 on
MMA_M, MMA_N, MMA_K = 16, 8, 16  # of mma.m16n8k16: C is (M, N), the reduction K deep
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
# 32 warps step through 128 rows at a time in 32-bit arithmetic.
MAX_ROW_STRIDE = (2**31 - 1) // 128

TARGETS = ("80", "86", "89", "90")

# Row stride in elements of a (batch, seq, 16 heads, 128) tensor: the benchmark's shape.
PROGRESSION_ROW_STRIDE = 16 * 128

# Traits of steps.
KEYS_BACKWARDS = "keys_backwards"  # the blocks of keys are walked from the last to the first
PIECES = "pieces"  # tiles lie in shared memory in pieces of PIECE columns
LAZY_RESCALE = "lazy_rescale"  # m, l and O only follow a row's maximum that grows by MAX_GROWTH
MMA_ROW_SUM = "mma_row_sum"  # l is P @ 1: the tensor cores add up the rows of P
TWO_BUFFERS = "two_buffers"  # each for K and V in shared memory
CALL_OPTIONS = "call_options"  # softmax_scale and grouped heads come with the call
SINK_LOGITS = "sink_logits"  # sinks come with the call
RAGGED = "ragged"  # lengths are any, those of queries and keys differ; keys are walked backwards

RUNS_PER_TILE = 8  # loops inside the pass over a tile of K and V are unrolled: once is enough

MAX_GROWTH = 8  # powers of two: of a row's maximum over m, where the step is lazy

ARGUMENTS = StructLayout(
    "ForwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys("QKVO", POINTER),
            **{f"{name}_strides": STRIDES for name in "QKVO"},
            "seq_len": INT,
        }
    ),
)
KERNELS = MappingProxyType({"forward_kernel": ARGUMENTS})
HEADER = PurePosixPath("src/include/flash_attention.cuh")
DTYPES = (Element.FP16, Element.BF16)


class MmaSyncConfig(Config):
    """A kernel of such a family; a subclass adds fields of its own to these.

    `B_r`, `B_c`: rows of a Q tile and of a K or V tile. `d_head`, `static_row_stride`: elements.
    `static_row_stride`: distance of two rows of the sequence; 0 is read at run time.
    """

    dtype: Element
    d_head: int
    B_r: int
    B_c: int
    n_warps: int
    static_row_stride: int

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax scale is part of the exponent, and S is not scaled before."""
        return True

    @property
    def kv_buffers(self) -> int:
        """Buffers each for K and V in shared memory."""
        return 2 if TWO_BUFFERS in self.step.traits else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a tile of Q (later O), kv_buffers tiles each
        of K and V."""
        return (self.B_r + 2 * self.kv_buffers * self.B_c) * self.d_head * ELEMENT_BYTES

    @property
    def row_tiles(self) -> int:
        """Tiles of MMA_M rows that a warp has."""
        return self.B_r // self.n_warps // MMA_M

    @property
    def mma_per_product(self) -> int:
        """Number of `mma` per warp for Q @ K^T of one block of keys; P @ V takes as many."""
        return self.row_tiles * (self.B_c // MMA_N) * (self.d_head // MMA_K)

    @property
    def mma_per_key_block(self) -> int:
        """Number of `mma` per warp for one block of keys: both products, and the row sums as one
        more column tile of P @ V."""
        row_sums = self.row_tiles * (self.B_c // MMA_K) if MMA_ROW_SUM in self.step.traits else 0
        return 2 * self.mma_per_product + row_sums

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of keys, and the tensor instructions per warp for it."""
        return "block of K and V", self.mma_per_key_block

    def loop_runs(self, size: int) -> int:
        """Return the number of blocks of keys."""
        return len(self.key_blocks(size))

    def counted_on(self, size: int) -> AttentionForward:
        """Return a problem of one head, or of as many heads as the static row stride needs."""
        return counted_problem(self.supports, size, self.static_row_stride // self.d_head or 1)

    def key_blocks(self, len_k: int) -> range:
        """Return the blocks of keys in the order in which the kernel walks them."""
        blocks = range(-(-len_k // self.B_c))
        return blocks[::-1] if KEYS_BACKWARDS in self.step.traits else blocks

    def own_key_blocks(self, problem: AttentionForward, query: int) -> range:
        """Return the blocks of keys that the warp of a query takes: all of them."""
        return self.key_blocks(problem.len_k)

    def first_keys(self, problem: AttentionForward, query: int) -> int:
        """Return the number of keys of the first block that the warp of a query multiplies with:
        all of them."""
        return self.B_c

    @property
    def supports(self) -> AttentionSupports:
        """Whole blocks of queries and keys of one length, unless the step's traits say more."""
        ragged = RAGGED in self.step.traits
        return AttentionSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({} if ragged else {"B_r": self.B_r, "B_c": self.B_c}),
            alignment=CHUNK_BYTES,
            max_row_stride=MAX_ROW_STRIDE,
            # rows of the last tiles are numbered beyond the tensor's end
            max_length=MAX_LENGTH - (max(self.B_r, self.B_c) if ragged else 0),
            B_r=self.B_r,
            B_c=self.B_c,
            abilities=frozenset({TWO_LENGTHS} if ragged else ()),
        )

    def general(self: Own) -> Own:
        """Return the config that takes over when a tensor's row stride is not the static one."""
        return self.replace(static_row_stride=0)

    def siblings(self: Own) -> tuple[Own, ...]:
        """Return the config and its general one."""
        return (self, self.general()) if self.static_row_stride else (self,)

    def runs_as(self: Own, strides: Strides) -> Own:
        """Return the config itself, or the general one where a tensor has another row stride."""
        own = self.static_row_stride
        is_own = not own or all(strides[name][1] == own for name in "qkvo")
        return self if is_own else self.general()

    def own_strides(self, problem: AttentionForward) -> dict[str, tuple[int, ...]]:
        """Return strides with the static row stride, if there is one: those of heads in a wider
        tensor."""
        found = problem.strides()
        if row := self.static_row_stride:
            for tensor in problem.tensors:
                if tensor.name in {*"qkvo"}:
                    own = (tensor.shape[1] * row, row, problem.d_head, 1)
                    found[tensor.name] = _of_sizes(own, tensor.shape)
        return found

    def query_tiles(self, problem: AttentionForward) -> int:
        """Return the tiles of queries of one head."""
        return -(-problem.len_q // self.B_r)

    def arguments(self, problem: AttentionForward) -> dict[str, tuple[float, ...]]:
        """Return the members of the kernel's arguments that are neither addresses nor strides."""
        return {"seq_len": (problem.len_q,)}

    def call(self, problem: AttentionForward, strides: Strides, device: Device) -> Call:
        """Return launches with one block per tile of queries, head and batch; several launches if
        the batches exceed the z dimension of a grid."""
        values = self.arguments(problem)
        values |= {f"{name.upper()}_strides": strides[name][:3] for name in "qkvo"}
        most = gpu.MAX_GRID[2]
        (kernel,) = self.runs_as(strides).kernels.values()
        (layout,) = self.family.kernels.values()
        pointers = {name.upper(): name for name in "qkvo"}
        pointers |= {"lse": "lse"} if problem.return_lse else {}
        pointers |= {"sinks": "sinks"} if problem.sinks else {}
        if problem.sequences:
            pointers |= {name: name for name in ("cu_seqlens_q", "cu_seqlens_k")}
        batch_bytes = {
            tensor.name: strides[tensor.name][0] * tensor.element.bytes * ("batch" in tensor.axes)
            for tensor in problem.tensors
            if tensor.name in pointers.values()
        }
        return Call(
            tuple(
                Launch(
                    kernel=kernel,
                    grid=(
                        self.query_tiles(problem),
                        problem.heads,
                        min(problem.batch - first, most),
                    ),
                    block=self.n_threads,
                    shared_bytes=self.smem_bytes,
                    layout=layout,
                    values=values,
                    addresses=tuple(
                        Address(layout.offset(member), name, first * batch_bytes[name])
                        for member, name in pointers.items()
                    ),
                )
                for first in starts(problem.batch, most)
            )
        )

    def work(self, problem: AttentionForward, device: Device) -> float:
        """Return the scores of queries and keys that are computed, in whole tiles, as many on each
        SM as on the busiest."""
        tiles = problem.batch * problem.heads * self.query_tiles(problem)
        tiles = -(-tiles // device.sms) * device.sms
        return tiles * len(self.key_blocks(problem.len_k)) * self.B_r * self.B_c

    def most_runs(self, problem: AttentionForward, device: Device) -> int:
        """Return RUNS_PER_TILE for each block of keys, and for the code before and behind them."""
        return RUNS_PER_TILE * (len(self.key_blocks(problem.len_k)) + 2)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        self._check_tile_shape()
        self._check_row_stride()

    def _check_tile_shape(self) -> None:
        B_r, B_c, n_warps = self.B_r, self.B_c, self.n_warps
        if not 1 <= n_warps <= MAX_WARPS or n_warps & (n_warps - 1):
            raise ValueError(
                f"n_warps {n_warps} is not a power of two from 1 to {MAX_WARPS}: choose 4 or 8"
            )
        if B_r < 1 or B_r % (MMA_M * n_warps):
            raise ValueError(
                f"B_r {B_r} is not a multiple of {MMA_M * n_warps} "
                f"({MMA_M} rows for each of {n_warps} warps): choose "
                f"{_round_up(B_r, MMA_M * n_warps)} or another n_warps"
            )
        if B_c < 1 or B_c % MMA_K:
            raise ValueError(
                f"B_c {B_c} is not a multiple of {MMA_K}, the depth of one mma: "
                f"choose {_round_up(B_c, MMA_K)}"
            )
        for name, rows in (("B_r", B_r), ("B_c", B_c)):
            chunks = rows * PIECE * ELEMENT_BYTES // CHUNK_BYTES
            if chunks % self.n_threads:
                raise ValueError(
                    f"{name} {rows}: {PIECE} columns of its tile are {chunks} chunks of "
                    f"{CHUNK_BYTES} bytes, which "
                    f"{self.n_threads} threads cannot share evenly: raise {name} or lower n_warps"
                )
        most = {target: gpu.LIMITS[int(target)].smem_bytes for target in TARGETS}
        if self.smem_bytes > max(most.values()):
            limits = ", ".join(f"sm_{target} {limit}" for target, limit in most.items())
            raise ValueError(
                f"B_r {B_r} and B_c {B_c} need {self.smem_bytes} bytes of shared memory, over "
                f"every limit ({limits}): lower B_r or B_c"
            )
        accumulators = B_r // n_warps * (self.d_head + B_c) // gpu.WARP
        if accumulators >= gpu.MAX_REGISTERS:
            raise ValueError(
                f"B_r {B_r}, B_c {B_c} and n_warps {n_warps} need {accumulators} accumulator "
                f"registers per thread for S and O, but a thread has {gpu.MAX_REGISTERS}: lower "
                "B_r or B_c, or raise n_warps"
            )

    def _check_row_stride(self) -> None:
        stride = self.static_row_stride
        if stride < 0 or stride % self.d_head:
            raise ValueError(
                f"static_row_stride {stride} is not a multiple of d_head {self.d_head}: use "
                "heads * d_head, or 0 to read the stride at run time"
            )


def _of_sizes(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides with 0 along a dimension of size 1."""
    return tuple(s if size > 1 else 0 for s, size in zip(strides, shape, strict=True))


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)
