"""Number of blocks of a kernel that an SM holds at a time. Standard library only.

The rules are those of CUDA's own calculator, `cuda_occupancy.h`, for compute capability 7.5 to
12.1; the limits those of the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability". The driver is assumed to give an SM as much shared memory as it needs, up to the
largest carve-out, which is its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flash_helpers import gpu
from flash_helpers.gpu import (
    REGISTERS_ALLOCATED_AT_ONCE,
    REGISTERS_PER_SM,
    RESERVED_SMEM_BYTES,
    SMEM_ALLOCATED_AT_ONCE,
    SUB_PARTITIONS,
)
from flash_helpers.sass.read.records import Kernel, SassError


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of one kernel on an SM.

    `by_limit`: blocks that each resource would allow: "warps", "blocks", "registers", "shared
    memory" if any is taken, and, from 9.0 on, "barriers". `max_warps`: most warps that the SM
    holds.
    """

    blocks: int
    warps: int
    max_warps: int
    by_limit: Mapping[str, int]

    @property
    def limiters(self) -> tuple[str, ...]:
        """The resources that allow no more blocks than there are."""
        return tuple(name for name, blocks in self.by_limit.items() if blocks == self.blocks)


def occupancy(
    capability: int, registers: int, smem_bytes: int, threads: int, barriers: int = 0
) -> Occupancy:
    """Number of blocks that an SM holds; 0 if a block cannot be launched.

    `capability`: such as 90. `registers`: registers per thread. `smem_bytes`: shared memory per
    block, static and dynamic together. `threads`, `barriers`: threads and named barriers per block.

    Raises SassError for a compute capability that is not known, or a block without threads.
    """
    limits = gpu.LIMITS.get(capability)
    if limits is None:
        known = ", ".join(f"sm_{number}" for number in gpu.LIMITS)
        raise SassError(f"the limits of sm_{capability} are not known: only those of {known}")
    if not 1 <= threads <= gpu.MAX_THREADS:
        raise SassError(f"a block has {threads} threads: it must have 1 to {gpu.MAX_THREADS}")
    warps = -(-threads // gpu.WARP)
    by_limit = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": _blocks_by_registers(registers, warps),
    }
    if capability >= 80 or smem_bytes:
        by_limit["shared memory"] = _blocks_by_smem(capability, smem_bytes)
    if limits.barriers is not None and barriers:
        by_limit["barriers"] = limits.barriers // barriers
    blocks = min(by_limit.values())
    return Occupancy(blocks, blocks * warps, limits.warps, by_limit)


def kernel_occupancy(kernel: Kernel, threads: int, dynamic_smem_bytes: int) -> Occupancy:
    """The occupancy of a kernel on the architecture that it was compiled for, launched with the
    given threads and dynamic shared memory per block. Raises SassError as `occupancy` does."""
    resources = kernel.resources
    return occupancy(
        kernel.capability,
        resources.registers,
        resources.static_smem_bytes + dynamic_smem_bytes,
        threads,
        resources.barriers,
    )


def require_threads(kernel: Kernel, threads: int) -> None:
    """Raises SassError if a block of a kernel cannot have so many threads: more than it was
    compiled for, or more than there are registers for."""
    most, registers = kernel.resources.max_threads, kernel.resources.registers
    if most is not None and threads > most:
        raise SassError(
            f"{kernel.name} cannot be launched with {threads} threads per block: it was compiled "
            f"for at most {most} (__launch_bounds__, .maxntid or .reqntid)"
        )
    warps = _round_up(-(-threads // gpu.WARP), SUB_PARTITIONS)
    taken = warps * _registers_of_warp(registers)
    if taken > REGISTERS_PER_SM:
        fitting = REGISTERS_PER_SM // SUB_PARTITIONS // _registers_of_warp(registers)
        raise SassError(
            f"{kernel.name} cannot be launched with {threads} threads per block: with {registers} "
            f"registers per thread they take {taken:,} registers, and an SM has "
            f"{REGISTERS_PER_SM:,}: launch at most {fitting * SUB_PARTITIONS * gpu.WARP} threads, "
            "or compile it with fewer registers (__launch_bounds__)"
        )


def misfit(kernel: Kernel, dynamic_smem_bytes: int) -> str:
    """The reason for which no SM has room for a block of a kernel, with value and limit; "" if one
    has, or if the limits of its architecture are not known."""
    limits = gpu.LIMITS.get(kernel.capability)
    taken = kernel.resources.static_smem_bytes + dynamic_smem_bytes
    if limits is None or taken <= limits.smem_bytes:
        return ""
    return f"{taken:,} bytes of shared memory per block, limit {limits.smem_bytes:,}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _registers_of_warp(registers: int) -> int:
    return _round_up(max(registers, 1) * gpu.WARP, REGISTERS_ALLOCATED_AT_ONCE)


def _blocks_by_registers(registers: int, warps: int) -> int:
    per_warp = _registers_of_warp(registers)
    # the hardware checks a launch as if warps came in fours, one for each sub-partition
    if per_warp * _round_up(warps, SUB_PARTITIONS) > REGISTERS_PER_SM:
        return 0
    return REGISTERS_PER_SM // SUB_PARTITIONS // per_warp * SUB_PARTITIONS // warps


def _blocks_by_smem(capability: int, smem_bytes: int) -> int:
    limits = gpu.LIMITS[capability]
    if smem_bytes > limits.smem_bytes:
        return 0
    reserved, at_once = RESERVED_SMEM_BYTES, SMEM_ALLOCATED_AT_ONCE
    if capability < 80:
        reserved, at_once = 0, 2 * SMEM_ALLOCATED_AT_ONCE
    each = _round_up(smem_bytes + reserved, at_once)
    return (limits.smem_bytes + reserved) // each
