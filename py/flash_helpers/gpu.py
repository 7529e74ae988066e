"""Limits of GPUs: those of each compute capability. Standard library only.

CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; reserved shared
memory from "Shared Memory" of the sections on compute capability 8.x and 9.0; parameters from the
PTX ISA, "Parameter State Space". The numbers of warps and blocks per SM of compute capability 11.0
and 12.1 are from CCCL's arch_traits. Barriers and granularities are from CUDA 13.0's
cuda_occupancy.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

WARP = 32  # lanes
MAX_THREADS = 1024  # of a block
MAX_BLOCK_Z = 64
MAX_REGISTERS = 255  # of a thread; the zero register takes the 256th name
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_LOCAL_BYTES = 512 * 1024  # of a thread
MAX_CONSTANT_BYTES = 64 * 1024  # of a module
MAX_PARAMETER_BYTES = 32764  # of a kernel
FIRST_WITH_CLUSTERS = 9  # compute capability
MAX_CLUSTER = 16  # blocks
PORTABLE_CLUSTER = 8  # more need cudaFuncAttributeNonPortableClusterSizeAllowed

# Of an SM, from 7.5 to 12.1.
SUB_PARTITIONS = 4
REGISTERS_PER_SM = 64 * 1024
REGISTERS_ALLOCATED_AT_ONCE = 256  # to a warp
SMEM_ALLOCATED_AT_ONCE = 128  # to a block, from 8.0 on; twice that before
RESERVED_SMEM_BYTES = 1024  # of a block, which the driver takes from 8.0 on besides its own


@dataclass(frozen=True)
class Limits:
    """Most resources that a GPU gives. `smem_bytes`: most shared memory per block. `warps`,
    `blocks`: most warps and blocks per SM. `barriers`: named barriers per SM; None before 9.0,
    where they limit nothing."""

    smem_bytes: int
    warps: int
    blocks: int
    barriers: int | None = None


# By compute capability, as in sm_80.
LIMITS: Mapping[int, Limits] = MappingProxyType(
    {
        75: Limits(64 * 1024, warps=32, blocks=16),
        80: Limits(163 * 1024, warps=64, blocks=32),
        86: Limits(99 * 1024, warps=48, blocks=16),
        87: Limits(163 * 1024, warps=48, blocks=16),
        89: Limits(99 * 1024, warps=48, blocks=24),
        90: Limits(227 * 1024, warps=64, blocks=32, barriers=64),
        100: Limits(227 * 1024, warps=64, blocks=32, barriers=64),
        103: Limits(227 * 1024, warps=64, blocks=32, barriers=64),
        110: Limits(227 * 1024, warps=48, blocks=24, barriers=24),
        120: Limits(99 * 1024, warps=48, blocks=24, barriers=24),
        121: Limits(99 * 1024, warps=48, blocks=24, barriers=24),
    }
)

# Most shared memory per block in bytes. The capabilities that `LIMITS` lacks are from the guide of
# CUDA 12.
SMEM_BYTES: Mapping[int, int] = MappingProxyType(
    {
        **dict.fromkeys((50, 52, 53, 60, 61, 62), 48 * 1024),
        **dict.fromkeys((70, 72), 96 * 1024),
        **{capability: limits.smem_bytes for capability, limits in LIMITS.items()},
    }
)

# Streaming multiprocessors of the largest GPU of a compute capability: of TU102 (NVIDIA Turing GPU
# Architecture), A100 (NVIDIA A100 Tensor Core GPU Architecture), GA102 (NVIDIA Ampere GA102 GPU
# Architecture), Jetson AGX Orin (its technical brief), AD102 in the RTX 6000 Ada (NVIDIA Ada GPU
# Architecture), H100 SXM5 (NVIDIA H100 Tensor Core GPU Architecture).
MOST_SMS: Mapping[int, int] = MappingProxyType({75: 72, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132})

# Streaming multiprocessors, by the name that the driver gives. The H100's are those of the SXM5
# card in NVIDIA H100 Tensor Core GPU Architecture, "H100 GPU". The H200's are as CUDA counts them:
# on both cards the benchmark's loop of mma.sync, which runs on every SM, does the same number of
# operations.
SM_COUNTS: Mapping[str, int] = MappingProxyType({"NVIDIA H100 80GB HBM3": 132, "NVIDIA H200": 132})


TPC_SMS = 2
GPC_SMS = 16  # a GPC, whose SMs the blocks of a cluster run on, has as many or a few more


@dataclass(frozen=True)
class Device:
    """A GPU as launches see it. `name`: the driver's name of it. `capability`: such as (9, 0).
    `sms`: its number of streaming multiprocessors. `counted`: what the driver says of clusters:
    the blocks of a cluster, the blocks that an SM has room for, and the clusters that the GPU has
    room for. Two GPUs of one name may differ, since their GPCs lack other SMs."""

    name: str
    capability: tuple[int, int]
    sms: int
    counted: tuple[tuple[int, int, int], ...] = ()

    def resident_clusters(self, blocks: int, per_sm: int) -> int:
        """Return the clusters of so many blocks that run at the same time where an SM has room for
        `per_sm` blocks; at least one. Without a driver's count each GPC has `GPC_SMS` SMs, and
        each TPC `TPC_SMS`."""
        if blocks == 1:
            return self.sms * per_sm
        for *shape, clusters in self.counted:
            if shape == [blocks, per_sm]:
                return clusters
        group = TPC_SMS if blocks == TPC_SMS else GPC_SMS
        return max(1, self.sms // group * (group * per_sm // blocks))


def largest_device(capability: int) -> Device:
    """Return the largest GPU of a compute capability such as 90, for which launches are made on a
    machine without a GPU. Raises KeyError for a capability that `MOST_SMS` lacks."""
    return Device(f"sm_{capability}", divmod(capability, 10), MOST_SMS[capability])


def capability_of(target: str) -> int:
    """Return 90 for sm_90 and for sm_90a. Raises ValueError for a text that is no target."""
    number = target.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")
    if not target.startswith("sm_") or not number.isdecimal():
        raise ValueError(f"{target!r} is no architecture: write it as in sm_90")
    return int(number)
