"""The backward_sync family: the gradients of attention with `mma.sync`, on every GPU from sm_80 on.

Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.supports import AttentionBackwardSupports
from flash_helpers.operations.attention_forward.supports import (
    GROUPED_HEADS,
    MAX_LENGTH,
    SOFTCAP,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    VARLEN,
    WINDOW,
)
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    STRIDES,
    Address,
    Buffer,
    Call,
    Launch,
    StructLayout,
    starts,
)
from flash_helpers.registry.config import (
    Config,
    differing_fields,
    element,
    flag,
    number,
    with_flags,
)
from flash_helpers.registry.family import HELD_BACK, UNORDERED_SUMS, Family, Step, StepEntry
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    MAX_ROW_STRIDE,
    MMA_K,
    MMA_M,
    MMA_N,
    TARGETS,
)
from flash_helpers.registry.problem import Element, Strides

FLAGS = ("causal", "window", "softcap", "varlen")  # of a config, for which kernels are compiled

STATISTICS = "statistics"  # a buffer: of each query the scaled LSE and delta, float32
STATISTICS_BYTES = 8
DQ_SUMS = "dQ_sums"  # another, of steps with one kernel: of each query the sums of dQ, float32
# Sums of two lengths and a bound of the window are an int.
MAX_ROWS = MAX_LENGTH // 4
DELTA_THREADS = 128
WIDE_HEAD = 128  # of wider heads two warps share 16 rows of dK and dV
# Traits of steps.
RING = "ring"  # a block is copied while another is multiplied
ONE_KERNEL = "one_kernel"  # for dQ, dK and dV: dS passes through shared memory for dQ alone
DS_SLOTS = 2  # of that dS
ROLES = "roles"  # a warp multiplies for dV or for dK
P_SLOTS = 2  # of P, which passes from the one to the other

DELTA, DQ, DKDV = "delta_kernel", "dq_kernel", "dkdv_kernel"
GRADIENTS_KERNEL, CONVERT = "gradients_kernel", "convert_kernel"
_WRITTEN = {
    **dict.fromkeys((DQ, CONVERT), ("dq",)),
    DKDV: ("dk", "dv"),
}
_POINTERS = {"dO": "do", **{name: name.lower() for name in "QKVO"}}
_GRADIENTS = {f"d{of.upper()}": name for name, of in GRADIENTS.items()}

ARGUMENTS = StructLayout(
    "BackwardSyncKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys((*_POINTERS, *_GRADIENTS), POINTER),
            **{f"{name}_strides": STRIDES for name in (*_POINTERS, *_GRADIENTS)},
            **dict.fromkeys(("lse", STATISTICS), POINTER),
            **dict.fromkeys(("len_q", "len_k", "heads_per_kv"), INT),
            **dict.fromkeys(("softmax_scale", "scale", "scale_in_cap"), FLOAT),
            **dict.fromkeys(("window_left", "window_right"), INT),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), POINTER),
            "n_sequences": INT,
            DQ_SUMS: POINTER,
            **dict.fromkeys(("sum_rows", "heads"), INT),
        }
    ),
)


@dataclass(frozen=True)
class BackwardSyncKernelConfig(Config):
    """The three kernels of one config: the statistics of queries, dQ, and dK with dV.

    `B_r`, `B_c`: rows of a thread block's own tile, and of the blocks that it walks. In dq_kernel
    the own rows are queries, in dkdv_kernel they are keys. `causal`: the kernels mask, and take
    causal problems alone. `window`, `softcap`, `varlen`: likewise of problems with a window, with a
    softcap, and of sequences of various lengths.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "p1_bf16_d128_Br64_Bc64"

    backward_sync: int = number("p", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_r: int = number("Br", "rows of a thread block: of dQ, or of dK and dV")
    B_c: int = number("Bc", "rows of one step of its main loop: keys, or queries")
    causal: bool = flag("causal", "a causal mask, aligned to the bottom right", default=False)
    window: bool = flag("window", "a query sees keys within a distance", default=False)
    softcap: bool = flag("softcap", "limits the logits by tanh", default=False)
    varlen: bool = flag(
        "varlen", "sequences of various lengths, one after the other", default=False
    )

    @property
    def family(self) -> Family[Any]:
        """The backward_sync family."""
        return BACKWARD_SYNC

    @property
    def has_one_kernel(self) -> bool:
        """Whether a kernel finds dQ, dK and dV together."""
        return ONE_KERNEL in self.step.traits

    @property
    def functions(self) -> tuple[str, ...]:
        """delta_kernel and two others."""
        if self.has_one_kernel:
            return DELTA, GRADIENTS_KERNEL, CONVERT
        return DELTA, DQ, DKDV

    @property
    def main_kernel(self) -> str:
        """The kernel of all five products, or dkdv_kernel: four of the seven products."""
        return GRADIENTS_KERNEL if self.has_one_kernel else DKDV

    @property
    def n_threads(self) -> int:
        """Threads of one block of the main kernel, the most of all kernels."""
        return self.block(self.main_kernel)[0]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block of the main kernel in bytes, the most of all
        kernels."""
        return self.block(self.main_kernel)[1]

    @property
    def delta_rows(self) -> int:
        """Queries of one block of delta_kernel: a lane has 16 bytes of a row, and a row a power of
        two of lanes."""
        lanes = 1 << (self.d_head * ELEMENT_BYTES // CHUNK_BYTES - 1).bit_length()
        return DELTA_THREADS // lanes

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        if kernel == DELTA:
            return DELTA_THREADS, 0
        own, block = (2 * rows * self.d_head * ELEMENT_BYTES for rows in (self.B_r, self.B_c))
        warps = self.B_r // MMA_M
        if kernel != DQ:
            block += self.B_c * STATISTICS_BYTES
            warps *= 2 if self.d_head > WIDE_HEAD else 1
        has_ring = RING in self.step.traits and self.d_head <= WIDE_HEAD
        if kernel == CONVERT:
            return warps * gpu.WARP, 0
        if kernel == GRADIENTS_KERNEL:  # K has a place of its own
            own //= 2
            kept = own + DS_SLOTS * self.B_r * self.B_c * ELEMENT_BYTES
            if ROLES in self.step.traits:
                part = self.B_c if self.d_head > WIDE_HEAD else MMA_K
                kept += P_SLOTS * self.B_r * part * ELEMENT_BYTES
        else:
            kept = 0
        walked = max(own, 2 * block) if has_ring else own + block
        return warps * gpu.WARP, kept + walked

    def tiles(self, kernel: str) -> tuple[int, int]:
        """Return the rows of a thread block of a kernel that multiplies, and the rows of the blocks
        that it walks: the same of each."""
        return self.B_r, self.B_c

    def variants(self) -> tuple[BackwardSyncKernelConfig, ...]:
        """Return the config, and those with other flags, the most alike first; then the same of the
        other head sizes' tiles."""
        return _variants(self)

    def of_size(self, d_head: int) -> BackwardSyncKernelConfig:
        """Return the config of the same step, dtype and flags with the usual tile of a head
        size."""
        return self.replace(d_head=d_head, **tile_of(self.step, d_head))

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.d_head not in TILES:
            raise ValueError(
                f"d_head {self.d_head} is not built: choose one of "
                f"{', '.join(map(str, TILES))}, and pad with zeros"
            )
        for name, rows in (("B_r", self.B_r), ("B_c", self.B_c)):
            if rows not in (32, 64, 128):
                raise ValueError(f"{name} {rows} is not 32, 64 or 128: choose one of these")
        for kernel in self.functions[1:]:
            per_pass = self.block(kernel)[0] * CHUNK_BYTES // self._piece_bytes
            if self.B_c % per_pass or self.B_r % per_pass:
                raise ValueError(
                    f"B_r {self.B_r} and B_c {self.B_c}: the threads of {kernel} copy {per_pass} "
                    f"rows at once: choose multiples of {per_pass}, or a smaller B_r"
                )
        if self.has_one_kernel:
            rows = self.B_c // self.query_warps
            if rows < MMA_M:
                raise ValueError(
                    f"B_r {self.B_r} and B_c {self.B_c}: a warp has {rows} queries of dQ, and mma "
                    f"{MMA_M}: choose a smaller B_r, or a larger B_c"
                )
        most = {target: gpu.LIMITS[int(target)].smem_bytes for target in TARGETS}
        if self.smem_bytes > max(most.values()):
            limits = ", ".join(f"sm_{target} {limit}" for target, limit in most.items())
            raise ValueError(
                f"B_r {self.B_r} and B_c {self.B_c} need {self.smem_bytes} bytes of shared memory, "
                f"over every limit ({limits}): lower B_r or B_c"
            )

    @property
    def query_warps(self) -> int:
        """Warps that share the queries of a block of dQ, 32 at most each; the others share its
        columns."""
        warps = self.n_threads // gpu.WARP
        return max(warps // (2 if self.d_head <= 96 else 4), self.B_c // 32)

    @property
    def _piece_bytes(self) -> int:
        """Bytes of a row that neighbouring threads copy together."""
        return (32 if self.d_head % 64 else 64) * ELEMENT_BYTES

    @property
    def supports(self) -> AttentionBackwardSupports:
        """Any lengths, with one head size; flags of the config add to that."""
        flags = {WINDOW: self.window, SOFTCAP: self.softcap, VARLEN: self.varlen}
        compiled = frozenset(name for name, is_on in flags.items() if is_on)
        return AttentionBackwardSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({}),
            alignment=CHUNK_BYTES,
            max_row_stride=MAX_ROW_STRIDE,
            max_length=MAX_ROWS,
            max_tiles=gpu.MAX_GRID[0],
            B_r=self.B_r,
            B_c=self.B_c,
            causal=self.causal,
            deterministic=self.is_deterministic,
            abilities=compiled | {TWO_LENGTHS, GROUPED_HEADS, SOFTMAX_SCALE},
            exact=compiled,
        )

    def _tiles(self, length: int, rows: int, sequences: int) -> int:
        """Return the tiles of a length: of sequences of various lengths so many at most."""
        return length // rows + sequences if sequences else -(-length // rows)

    def _sum_tiles(self, problem: AttentionBackward) -> int:
        """Return the tiles of `B_r` rows, whole blocks, of the sums of dQ of a head; 0 without
        sums."""
        if not self.has_one_kernel:
            return 0
        return self._tiles(problem.len_q, self.B_r, problem.sequences)

    def _grids(self, problem: AttentionBackward) -> dict[str, tuple[int, int]]:
        """Return the x and y dimensions of each kernel's grid; z is the batch."""
        sequences = problem.sequences
        keys = (self._tiles(problem.len_k, self.B_r, sequences), problem.kv_heads)
        if self.has_one_kernel:
            blocks = self._tiles(problem.len_q, self.B_c, sequences)
            return {
                DELTA: (blocks * (self.B_c // self.delta_rows), problem.heads),
                GRADIENTS_KERNEL: keys,
                CONVERT: (blocks, problem.heads),
            }
        return {
            DELTA: (-(-problem.len_q // self.delta_rows), problem.heads),
            DQ: (self._tiles(problem.len_q, self.B_r, sequences), problem.heads),
            DKDV: keys,
        }

    def _values(self, problem: AttentionBackward, strides: Strides) -> dict[str, tuple[float, ...]]:
        """Return the members of the arguments that are no addresses."""
        scale = problem.softcap or problem.softmax_scale
        left, right = problem.window_left, problem.window_right
        own = {**_POINTERS, **_GRADIENTS}
        return {
            **{f"{member}_strides": strides[name][:3] for member, name in own.items()},
            "len_q": (problem.len_q,),
            "len_k": (problem.len_k,),
            "heads_per_kv": (problem.heads // problem.kv_heads,),
            "softmax_scale": (problem.softmax_scale,),
            "scale": (scale * math.log2(math.e),),
            "scale_in_cap": (problem.softmax_scale / scale,),
            "window_left": (problem.len_k if left is None else left,),
            "window_right": (problem.len_q if right is None else right,),
            "n_sequences": (problem.sequences,),
            "sum_rows": (self.B_r * self._sum_tiles(problem),),
            "heads": (problem.heads,),
        }

    def call(self, problem: AttentionBackward, strides: Strides, device: Device) -> Call:
        """Return the launches of the three kernels in turn; several of each if the batches exceed
        the z dimension of a grid."""
        names = {**_POINTERS, **_GRADIENTS, "lse": "lse", STATISTICS: STATISTICS}
        if problem.sequences:
            names |= {name: name for name in ("cu_seqlens_q", "cu_seqlens_k")}
        buffers = {STATISTICS: problem.heads * problem.len_q * STATISTICS_BYTES}
        sizes = {name: problem.batch * size for name, size in buffers.items()}
        if self.has_one_kernel:
            names[DQ_SUMS] = DQ_SUMS
            tiles, tile_bytes = self._sum_tiles(problem), self.B_r * self.d_head * FLOAT.size
            buffers[DQ_SUMS] = tiles * problem.heads * tile_bytes
            # the tiles of all heads, which are limited, come first
            sizes[DQ_SUMS] = tiles * problem.heads * problem.batch * tile_bytes
        batch_bytes = buffers | {
            tensor.name: strides[tensor.name][0] * tensor.element.bytes * ("batch" in tensor.axes)
            for tensor in problem.tensors
            if tensor.name in names.values()
        }
        values = self._values(problem, strides)
        most = gpu.MAX_GRID[2]
        launches = tuple(
            Launch(
                kernel=self.kernels[kernel],
                grid=(*grid, min(problem.batch - first, most)),
                block=self.block(kernel)[0],
                shared_bytes=self.block(kernel)[1],
                layout=ARGUMENTS,
                values=values,
                addresses=tuple(
                    Address(ARGUMENTS.offset(member), name, first * batch_bytes[name])
                    for member, name in names.items()
                ),
                outputs=_WRITTEN.get(kernel, ()),
            )
            for kernel, grid in self._grids(problem).items()
            for first in starts(problem.batch, most)
        )
        return Call(
            launches,
            tuple(Buffer(name, size, zeroed=False) for name, size in sizes.items()),
        )

    def work(self, problem: AttentionBackward, device: Device) -> float:
        """Return the scores of queries and keys that the kernels compute, in whole tiles, as many
        on each SM as on the busiest; weighted by the products: three of dq_kernel and four of
        dkdv_kernel, or five."""
        grids = self._grids(problem)
        queries = problem.len_q * problem.heads // problem.kv_heads
        walked = {DQ: problem.len_k, DKDV: queries, GRADIENTS_KERNEL: queries}
        total = 0.0
        for kernel, products in ((DQ, 3), (DKDV, 4), (GRADIENTS_KERNEL, 5)):
            if kernel not in grids:
                continue
            tiles = math.prod(grids[kernel]) * problem.batch
            tiles = -(-tiles // device.sms) * device.sms
            blocks = -(-walked[kernel] // self.B_c)
            total += products * tiles * blocks * self.B_r * self.B_c
        return total

    def most_runs(self, problem: AttentionBackward, device: Device) -> int:
        """Return twice the blocks of columns that a tile walks, and as many as a search for a
        sequence takes."""
        group = problem.heads // problem.kv_heads
        blocks = -(-max(problem.len_k, problem.len_q) // self.B_c)
        return 2 * (group * (blocks + 2) + problem.sequences.bit_length() + 8)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of queries of the main kernel, and the tensor instructions per warp for its
        products."""
        warps = self.n_threads // gpu.WARP
        product = self.B_c * self.B_r * self.d_head // (MMA_M * MMA_N * MMA_K) // warps
        shared = self.d_head > WIDE_HEAD and ROLES not in self.step.traits  # S and dP, by two warps
        return "block of queries", product * (4 + 2 * shared + self.has_one_kernel)

    def loop_runs(self, size: int) -> int:
        """Return the number of blocks of queries."""
        return -(-size // self.B_c)


def _tile(B_r: int, B_c: int) -> Mapping[str, int]:
    return MappingProxyType({"B_r": B_r, "B_c": B_c})


# Usual tiles by head size, of 96 KB of shared memory at most: sm_86 and sm_89 have 99 KB per block.
TILES: Mapping[int, Mapping[str, int]] = MappingProxyType(
    {64: _tile(64, 64), 96: _tile(64, 32), 128: _tile(64, 32), 256: _tile(64, 32)}
)

# Those of one kernel: at d_head 256 K and V of 64 keys and slots of dS are more than 99 KB.
_TILES_OF_ONE_KERNEL = MappingProxyType({128: _tile(128, 32), 256: _tile(32, 32)})


def tile_of(step: Step, d_head: int) -> Mapping[str, int]:
    """Return the usual tile of a step for a head size."""
    own = _TILES_OF_ONE_KERNEL if ONE_KERNEL in step.traits else {}
    return own.get(d_head, TILES[d_head])


# Of the other head sizes these are listed: each once, in every dtype, and flags.
_LISTED: Mapping[int, tuple[Element, Mapping[str, bool]]] = MappingProxyType(
    {
        64: (Element.FP16, {"causal": True}),
        96: (Element.BF16, {}),
        256: (Element.FP16, {"causal": True, "window": True}),
    }
)

_BASE: Mapping[str, Any] = MappingProxyType(
    {"d_head": 128, **TILES[128], **dict.fromkeys(FLAGS, False)}
)


@functools.cache  # a choice asks for them at each call
def _variants(own: BackwardSyncKernelConfig) -> tuple[BackwardSyncKernelConfig, ...]:
    sizes = [own, *(own.of_size(d_head) for d_head in TILES if d_head != own.d_head)]
    return tuple(found for config in sizes for found in with_flags(config, FLAGS))


def listed_variants() -> list[BackwardSyncKernelConfig]:
    """Return, of the preferred steps and of the last, the config in bf16 with each flag alone, and
    with all; and one config of each other head size."""
    *_, last = BACKWARD_SYNC.steps.values()
    steps = dict.fromkeys((*BACKWARD_SYNC.preferred, last))
    return [config for step in steps for config in _listed_variants(step)]


def _listed_variants(step: Step) -> list[BackwardSyncKernelConfig]:
    own = BACKWARD_SYNC.fixed_config(step, Element.BF16)
    *fewer, every = with_flags(own, FLAGS)
    alone = (config for config in fewer if len(differing_fields(config, own)) < 2)
    others = (
        BACKWARD_SYNC.fixed_config(step, dtype).of_size(d_head).replace(**flags)
        for d_head, (dtype, flags) in _LISTED.items()
    )
    return [*alone, every, *others]


def _file(number: int) -> str:
    return f"kernels/backward_sync/p{number}.cuh"


BACKWARD_SYNC = Family(
    name="backward_sync",
    operation=OPERATION,
    title="the gradients of attention with `mma.sync`",
    prefix="p",
    rank=6,
    config=BackwardSyncKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "two_kernels",
            "a kernel for dQ and one for dK and dV, and no sum over thread blocks",
            _file(1),
            opens={
                "d_head": (128,),
                "B_r": (32, 64, 128),
                "B_c": (32, 64),
                **dict.fromkeys(FLAGS, (False,)),
            },
        ),
        StepEntry(
            "own_rows_in_registers",
            "a warp's rows of its thread block's tiles stay in registers",
            _file(2),
        ),
        StepEntry(
            "next_block_in_flight",
            "the next block is copied while a block is multiplied",
            _file(3),
            traits=frozenset({RING}),
        ),
        StepEntry(
            "one_kernel",
            "dQ, dK and dV in one kernel, which adds dQ in memory: five products instead of seven",
            _file(4),
            sets={"B_r": 128},
            traits=frozenset({ONE_KERNEL, UNORDERED_SUMS}),
        ),
        StepEntry(
            "roles",
            "a warp multiplies for dV or for dK, of twice as many keys",
            _file(5),
            traits=frozenset({ROLES}),
        ),
        StepEntry(
            "products_side_by_side",
            "a warp multiplies for two products at once: for a sum, and for scores or dQ",
            _file(6),
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType(
        dict.fromkeys((DELTA, DQ, DKDV, GRADIENTS_KERNEL, CONVERT), ARGUMENTS)
    ),
    header=PurePosixPath("kernels/backward_sync/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=15_000_000,
    matrix_budget=40_000_000,
    also_listed=listed_variants,
)
