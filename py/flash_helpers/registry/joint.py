"""The joint family of operation `joint_attention`. Standard library only."""

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
from flash_helpers.operations.joint_attention import OPERATION
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.supports import JointSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    Address,
    Buffer,
    Call,
    Kind,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, buildable_sizes, element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    MAX_WARPS,
    MMA_K,
    MMA_M,
    MMA_N,
    TARGETS,
)
from flash_helpers.registry.problem import Element, Strides

ROW_STRIDES = Kind("2q", 8)  # RowStrides: batch, row

# Kernels, by their C++ functions.
NORM, ROTARY, ATTENTION = "norm_kernel", "rotary_kernel", "attention_kernel"

# Traits of steps.
ONE_PASS = "one_pass"  # norm and rotary embedding in one kernel
AT_LOAD = "at_load"  # and in the attention kernel from then on, without buffers
ALL_HEADS = "all_heads"  # a thread block has several heads, and fields `B_r` and `columns`
ROW_LANES = "row_lanes"  # a row has from 8 to 32 lanes of the norm kernel, not always 32
ALL_KEYS = "all_keys"  # a thread block has up to 256 keys of a head in shared memory, S of 32

# Buffers: Q and K behind norm and rotary embedding.
Q_NORMED, K_NORMED = "Q_normed", "K_normed"

_INPUTS = ("q", "k", "v", "q_weight", "k_weight", "rotary")
_OF_CONTEXT = ("context_q", "context_k", "context_v", "context_q_weight", "context_k_weight")
_STRIDED = ("q", "k", "v", *_OF_CONTEXT[:3], "o", "context_o")

ARGUMENTS = StructLayout(
    "JointKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys((*_INPUTS, *_OF_CONTEXT, "o", "context_o"), POINTER),
            **{f"{name}_strides": ROW_STRIDES for name in _STRIDED},
            **dict.fromkeys(("batch", "length", "context", "context_queries", "heads"), INT),
            **dict.fromkeys(("eps", "scale"), FLOAT),
            **dict.fromkeys((Q_NORMED, K_NORMED), POINTER),
        }
    ),
)


def call_values(problem: JointAttention, strides: Strides) -> dict[str, tuple[float, ...]]:
    """Return the arguments of a kernel but for addresses, by name."""
    names = {tensor.name for tensor in (*problem.inputs, *problem.outputs)}
    return {
        **{f"{name}_strides": strides[name][:2] for name in _STRIDED if name in names},
        "batch": (problem.batch,),
        "length": (problem.length,),
        "context": (problem.context,),
        "context_queries": (problem.n_queries - problem.length,),
        "heads": (problem.heads,),
        "eps": (problem.eps,),
        "scale": (problem.softmax_scale * math.log2(math.e),),
    }


D_HEADS = (16, 32, 64)
_BLOCKS = (32, 64)  # of keys
_LARGE_BLOCKS = (64, 128, 256)
_KEYS = 32  # of S at once
_MOST_COLUMNS = 256  # a chunk for each lane of a warp
_MOST_TILE_COLUMNS = 96  # of O and S together, which a warp has in registers


@dataclass(frozen=True)
class JointKernelConfig(Config):
    """The kernels of one config of the joint family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "jo1_bf16_d16_Bc64_w4"

    joint: int = number("jo", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_c: int = number("Bc", "keys of a block in shared memory")
    n_warps: int = number(
        "w", "of a thread block; each of attention has 16 queries of a head, from jo4 on more"
    )
    B_r: int = number("Br", "queries of a thread block; 0 before jo4: 16 of each warp", default=0)
    columns: int = number(
        "col", "of the heads of a thread block; 0 before jo4: those of one", default=0
    )

    @property
    def family(self) -> Family[Any]:
        """The joint family."""
        return JOINT

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block of attention in bytes: keys of K and of V of each head.
        From jo4 on Q lies there, too, and an unused row behind each head."""
        if ALL_HEADS not in self.step.traits:
            return 2 * self.B_c * self.d_head * ELEMENT_BYTES
        return (self.B_r + 2 * self.B_c + 1) * self.columns * ELEMENT_BYTES

    @property
    def block_queries(self) -> int:
        """Queries of a thread block of attention."""
        return self.B_r or self.n_warps * MMA_M

    @property
    def block_heads(self) -> int:
        """Heads of a thread block of attention."""
        return self.columns // self.d_head or 1

    @property
    def keys_at_once(self) -> int:
        """Keys whose S a warp has in its registers."""
        return _KEYS if ALL_KEYS in self.step.traits else self.B_c

    @property
    def warp_tiles(self) -> int:
        """Tiles of 16 queries of a head that each warp of attention has."""
        return self.block_queries * self.block_heads // (self.n_warps * MMA_M)

    @property
    def functions(self) -> tuple[str, ...]:
        """The C++ functions of the step's kernels."""
        if AT_LOAD in self.step.traits:
            return (ATTENTION,)
        return (NORM, ATTENTION) if ONE_PASS in self.step.traits else (NORM, ROTARY, ATTENTION)

    @property
    def main_kernel(self) -> str:
        """Attention, which has the tensor instructions."""
        return ATTENTION

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        return self.n_threads, self.smem_bytes if kernel == ATTENTION else 0

    def variants(self) -> tuple[JointKernelConfig, ...]:
        """Return the config, and those of the other head sizes."""
        return _variants(self)

    def of_size(self, d_head: int) -> JointKernelConfig:
        """Return the config of the same tile and another head size."""
        return self.replace(d_head=d_head)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.d_head not in D_HEADS:
            raise ValueError(
                f"d_head {self.d_head} is not built: choose one of {', '.join(map(str, D_HEADS))}"
            )
        blocks = _LARGE_BLOCKS if ALL_KEYS in self.step.traits else _BLOCKS
        if self.B_c not in blocks:
            *others, last = map(str, blocks)
            raise ValueError(
                f"B_c {self.B_c} is not {', '.join(others)} or {last}: choose one of these"
            )
        if not 1 <= self.n_warps <= MAX_WARPS // 2:
            raise ValueError(
                f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS // 2}: choose 4 or 16"
            )
        if ALL_HEADS in self.step.traits:
            self._check_tile()
        elif self.B_r or self.columns:
            raise ValueError(
                f"B_r {self.B_r} and columns {self.columns}: {self.step.id} has 16 queries of each "
                "warp and one head; choose 0 for both, or jo4 or jo5"
            )

    def _check_tile(self) -> None:
        """Raises ValueError unless the warps can share the thread block's queries and columns."""
        if self.columns % self.d_head or not 0 < self.columns <= _MOST_COLUMNS:
            raise ValueError(
                f"columns {self.columns} is not a multiple of d_head {self.d_head} up to "
                f"{_MOST_COLUMNS}: choose 128"
            )
        if self.n_warps % self.block_heads:
            raise ValueError(
                f"n_warps {self.n_warps} is not a multiple of {self.block_heads}, the heads of "
                f"{self.d_head} in columns {self.columns}: choose {MAX_WARPS // 2}"
            )
        of_each = self.n_warps // self.block_heads * MMA_M  # if each warp has 16 queries
        if self.B_r % of_each or self.B_r == 0:
            raise ValueError(
                f"B_r {self.B_r} is not a multiple of {of_each}, 16 queries of each of "
                f"{self.n_warps} warps: choose {of_each}"
            )
        tile_columns = self.warp_tiles * self.d_head + self.B_c
        most = (_MOST_TILE_COLUMNS - self.B_c) // self.d_head * of_each
        if tile_columns > _MOST_TILE_COLUMNS:
            raise ValueError(
                f"B_r {self.B_r} and B_c {self.B_c} give each of {self.n_warps} warps "
                f"{tile_columns} columns of O and S, over the limit {_MOST_TILE_COLUMNS} of its "
                f"registers: choose {f'B_r {most}' if most else 'B_c 32'}"
            )

    @property
    def supports(self) -> JointSupports:
        """Sequences and contexts of any length, with one head size."""
        return JointSupports(self.dtype, self.d_head, CHUNK_BYTES, self.block_queries, self.B_c)

    def _row_lanes(self, problem: JointAttention) -> int:
        """Return the lanes of a row of norm_kernel."""
        chunks = problem.heads * (self.d_head // MMA_N)
        if ROW_LANES not in self.step.traits or chunks > gpu.WARP // 2:
            return gpu.WARP
        return gpu.WARP // 2 if chunks > gpu.WARP // 4 else gpu.WARP // 4

    def _blocks(self, problem: JointAttention) -> dict[str, tuple[int, int, int]]:
        """Return the grid of each kernel that the problem needs."""
        rows = problem.batch * (problem.n_queries + problem.n_keys)
        chunks = 2 * problem.batch * problem.length * (problem.heads * self.d_head // MMA_N)
        tiles = -(-problem.n_queries // self.block_queries)
        groups = -(-problem.heads // self.block_heads)
        grids = {NORM: (-(-rows // (self.n_threads // self._row_lanes(problem))), 1, 1)}
        if problem.rotary:
            grids[ROTARY] = (-(-chunks // self.n_threads), 1, 1)
        grids[ATTENTION] = (tiles, groups, problem.batch)
        return {name: grid for name, grid in grids.items() if name in self.functions}

    def call(self, problem: JointAttention, strides: Strides, device: Device) -> Call:
        """Return the launches of norm, rotary embedding and attention, those that the step has."""
        buffers: tuple[Buffer, ...] = ()
        if AT_LOAD not in self.step.traits:
            of_token = problem.batch * problem.heads * self.d_head * ELEMENT_BYTES
            buffers = (
                Buffer(Q_NORMED, problem.n_queries * of_token, zeroed=False),
                Buffer(K_NORMED, problem.n_keys * of_token, zeroed=False),
            )
        names = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        pointers = [*names, *(buffer.name for buffer in buffers)]
        values = call_values(problem, strides)
        launches = tuple(
            Launch(
                kernel=self.kernels[function],
                grid=grid,
                block=self.block(function)[0],
                shared_bytes=self.block(function)[1],
                layout=ARGUMENTS,
                values=values,
                addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in pointers),
            )
            for function, grid in self._blocks(problem).items()
        )
        return Call(launches, buffers)

    def work(self, problem: JointAttention, device: Device) -> float:
        """Return the scores of queries and keys that are computed, in whole tiles, as many on each
        SM as on the busiest."""
        tiles, groups, batch = self._blocks(problem)[ATTENTION]
        blocks = -(-tiles * groups * batch // device.sms) * device.sms
        rows = blocks * self.block_queries * self.block_heads
        return rows * -(-problem.n_keys // self.keys_at_once) * self.keys_at_once

    def most_runs(self, problem: JointAttention, device: Device) -> int:
        """Return the turns of the longest loop, over blocks of keys, their rows, or the chunks of a
        row, and as many again for loops that nvcc unrolls."""
        blocks = -(-problem.n_keys // self.B_c)
        chunks = -(-problem.heads * self.d_head // (MMA_N * gpu.WARP))
        return 2 * (blocks + 1) * (self.B_c + MMA_M) * (chunks + 1)

    def counted_on(self, size: int) -> JointAttention:
        """Return a problem of as many keys, without a context."""
        return JointAttention(1, 2, size, self.d_head, self.dtype, rotary=True)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """The keys that a warp has at once, and its tensor instructions for both products."""
        per_tile = 2 * (self.keys_at_once // MMA_N) * (self.d_head // MMA_K)
        name = f"{_KEYS} keys" if ALL_KEYS in self.step.traits else "block of K and V"
        return name, self.warp_tiles * per_tile

    def loop_runs(self, size: int) -> int:
        """Return how often a warp has other keys."""
        return -(-size // self.keys_at_once)


@functools.cache  # a choice asks for them at each call
def _variants(own: JointKernelConfig) -> tuple[JointKernelConfig, ...]:
    return buildable_sizes(own, D_HEADS)


def _file(number: int) -> str:
    return f"kernels/joint/jo{number}.cuh"


_BASE: Mapping[str, Any] = MappingProxyType(
    {"d_head": 16, "B_c": 64, "n_warps": 4, "B_r": 0, "columns": 0}
)

JOINT = Family(
    name="joint",
    title="attention of a sequence and its context, with norm and rotary embedding",
    operation=OPERATION,
    prefix="jo",
    rank=27,
    config=JointKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "separate_operations",
            "norm, rotary embedding and attention, a launch each",
            _file(1),
            opens={"d_head": (16,), "B_c": _BLOCKS, "n_warps": (2, 4, 8, 16)},
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "norm_and_rotary",
            "norm and rotary embedding in one pass",
            _file(2),
            traits=frozenset({ONE_PASS}),
        ),
        StepEntry(
            "norm_at_load",
            "norm and rotary embedding while attention loads Q and K, in one launch",
            _file(3),
            sets={"n_warps": 16},
            traits=frozenset({AT_LOAD, HELD_BACK}),
        ),
        StepEntry(
            "all_heads",
            "a thread block has all heads, so that the norm of a row serves them all",
            _file(4),
            sets={"B_c": 32, "B_r": 128, "columns": 128},
            opens={"B_r": (16, 32, 64, 128), "columns": (64, 128)},
            traits=frozenset({ALL_HEADS, HELD_BACK}),
        ),
        StepEntry(
            "rows_per_warp",
            "a warp norms as many rows at once as it has lanes for",
            _file(5),
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "lanes_per_row",
            "a row has as many lanes of the norm kernel as it has chunks, and stays in registers",
            _file(6),
            sets={"B_c": 64, "n_warps": 4, "B_r": 0, "columns": 0},
            opens={"B_r": (0,), "columns": (0,)},
            traits=frozenset({ROW_LANES, HELD_BACK}),
            drops=frozenset({AT_LOAD, ALL_HEADS}),
            parent="jo2",
        ),
        StepEntry(
            "all_keys",
            "up to 256 keys of a head in shared memory at once",
            _file(7),
            sets={"B_c": 256, "n_warps": 16},
            opens={"B_c": _LARGE_BLOCKS},
            traits=frozenset({ALL_KEYS, HELD_BACK}),
        ),
        StepEntry(
            "first_maximum",
            "m is the maximum of a row's first 32 keys, and overflow is found at the end",
            _file(8),
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "sums_by_mma",
            "tensor cores add up the rows of P, as a column of O",
            _file(9),
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "scale_in_product",
            "the scale is in Q, and -m is what the accumulators of S begin with",
            _file(10),
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType(dict.fromkeys((NORM, ROTARY, ATTENTION), ARGUMENTS)),
    header=PurePosixPath("kernels/joint/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=9_000_000,
    matrix_budget=6_800_000,
)
