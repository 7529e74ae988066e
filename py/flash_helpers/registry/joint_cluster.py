"""The joint_cluster family of operation `joint_attention`: a cluster has the heads of a sample, on
Hopper and later. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.joint_attention import OPERATION
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.supports import CLUSTER_KEYS, JointClusterSupports
from flash_helpers.registry.call import FLOAT, Address, Call, Launch
from flash_helpers.registry.config import Config, buildable_sizes, element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.joint import ARGUMENTS, ATTENTION, D_HEADS, call_values
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    MAX_WARPS,
    MMA_K,
    MMA_M,
    MMA_N,
)
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_clusters import CLUSTERS, TARGETS

KEYS = 32  # of S at once
WARPS = (2, 4, 8, 16)


@dataclass(frozen=True)
class JointClusterKernelConfig(Config):
    """One kernel of the joint_cluster family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "jc1_bf16_d16_Bc256_w16_k8"

    joint_cluster: int = number("jc", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_c: int = number("Bc", "most keys, all in shared memory")
    n_warps: int = number("w", "of a thread block; each has 16 queries of a head")
    cluster_blocks: int = number("k", "thread blocks of a cluster; each has a head, or none")

    @property
    def family(self) -> Family[Any]:
        """The joint_cluster family."""
        return JOINT_CLUSTER

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def block_queries(self) -> int:
        """Queries of a thread block."""
        return self.n_warps * MMA_M

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block in bytes: Q, K and V of a head, and a sum of squares for
        each row of Q and K."""
        rows = self.block_queries + self.B_c
        return (rows + self.B_c) * self.d_head * ELEMENT_BYTES + rows * FLOAT.size

    def variants(self) -> tuple[JointClusterKernelConfig, ...]:
        """Return the config, those of the other head sizes, and those of more keys."""
        return _variants(self)

    def of_size(self, d_head: int) -> JointClusterKernelConfig:
        """Return the config of the same tile and another head size."""
        return self.replace(d_head=d_head)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        choices = {"d_head": D_HEADS, "B_c": CLUSTER_KEYS, "cluster_blocks": CLUSTERS}
        for name, values in choices.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(
                    f"{name} {value} is not built: choose one of {', '.join(map(str, values))}"
                )
        if not 1 <= self.n_warps <= MAX_WARPS // 2:
            raise ValueError(
                f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS // 2}: choose 4 or 16"
            )
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGETS[0]}")].smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(
                f"B_c {self.B_c} and {self.n_warps} warps need {self.smem_bytes} bytes of shared "
                f"memory, over the limit {limit}: choose n_warps 8 or B_c 512"
            )

    @property
    def supports(self) -> JointClusterSupports:
        """As many heads of one size as a cluster has blocks, and keys as shared memory holds."""
        return JointClusterSupports(
            self.dtype, self.d_head, CHUNK_BYTES, self.block_queries, self.B_c, self.cluster_blocks
        )

    def _blocks(self, problem: JointAttention) -> tuple[int, int, int]:
        """Return the grid: tiles of queries, blocks of a cluster, samples."""
        tiles = -(-problem.n_queries // self.block_queries)
        return tiles, self.cluster_blocks, problem.batch

    def call(self, problem: JointAttention, strides: Strides, device: Device) -> Call:
        """Return one launch. A cluster has the heads of some queries of a sample."""
        given = (*problem.inputs, *problem.outputs)
        launch = Launch(
            kernel=self.kernels[ATTENTION],
            grid=self._blocks(problem),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=call_values(problem, strides),
            addresses=tuple(Address(ARGUMENTS.offset(x.name), x.name) for x in given),
            cluster=(1, self.cluster_blocks, 1),
        )
        return Call((launch,))

    def work(self, problem: JointAttention, device: Device) -> float:
        """Return the scores of queries and keys that are computed, in whole tiles, as many on each
        SM as on the busiest."""
        blocks = -(-math.prod(self._blocks(problem)) // device.sms) * device.sms
        return blocks * self.block_queries * -(-problem.n_keys // KEYS) * KEYS

    def most_runs(self, problem: JointAttention, device: Device) -> int:
        """Return the turns of the longest loop, over the rows of a thread or the keys of a warp,
        and as many again for loops that nvcc unrolls."""
        return 8 * (self.B_c + self.block_queries)

    def counted_on(self, size: int) -> JointAttention:
        """Return a problem of as many keys, without a context."""
        return JointAttention(1, 2, size, self.d_head, self.dtype, rotary=True)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """The keys that a warp has at once, and its tensor instructions for both products."""
        return f"{KEYS} keys", 2 * (KEYS // MMA_N) * (self.d_head // MMA_K)

    def loop_runs(self, size: int) -> int:
        """Return how often a warp has other keys."""
        return -(-size // KEYS)


@functools.cache  # a choice asks for them at each call
def _variants(own: JointClusterKernelConfig) -> tuple[JointClusterKernelConfig, ...]:
    found = [*buildable_sizes(own, D_HEADS)]
    for B_c in CLUSTER_KEYS:
        if B_c > own.B_c:
            with contextlib.suppress(ValueError):  # too many for heads of this size
                found += buildable_sizes(own.replace(B_c=B_c), D_HEADS)
    return tuple(found)


def _of_most_keys() -> Iterator[JointClusterKernelConfig]:
    """Yield a kernel that takes all problems on which the operation is measured."""
    for config in JOINT_CLUSTER.progression():
        if config.dtype is Element.BF16:
            yield config.replace(B_c=CLUSTER_KEYS[-1])


_BASE: Mapping[str, Any] = MappingProxyType(
    {"d_head": 16, "B_c": 256, "n_warps": 16, "cluster_blocks": 8}
)

JOINT_CLUSTER = Family(
    name="joint_cluster",
    title="attention of a sequence and its context, with norm and rotary embedding, in a cluster",
    operation=OPERATION,
    prefix="jc",
    rank=28,
    config=JointClusterKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "cluster_per_sample",
            "a cluster has the heads of a sample, and its blocks exchange the sums of the norm",
            "kernels/joint/jc1.cuh",
            parent="jo9",
            opens={
                "d_head": (16,),
                "B_c": CLUSTER_KEYS,
                "n_warps": WARPS,
                "cluster_blocks": CLUSTERS,
            },
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({ATTENTION: ARGUMENTS}),
    header=PurePosixPath("kernels/joint/cluster.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=3_100_000,
    matrix_budget=500_000,
    also_listed=_of_most_keys,
)
