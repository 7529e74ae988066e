"""Clusters: addresses in the shared memory of their blocks, and their barrier (PTX ISA 9.0, "mapa",
"getctarank", "barrier.cluster")."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Special
from flash_helpers.ptx.run.instructions.access import SHARED_CLUSTER
from flash_helpers.ptx.run.instructions.forms import Form
from flash_helpers.ptx.run.machine import Action, Alu, Machine, Wait
from flash_helpers.ptx.run.memory.regions import RANK_SHIFT, WINDOW_SIZE, WINDOWS

_NOBODY = 254
"""Value instead of a rank plus one: no cluster has such a block."""


def _window(machine: Machine, instruction: Instruction) -> np.uint64:
    """The address of the first byte of a lane's own block, as the instruction names it."""
    if instruction.has(SHARED_CLUSTER):
        return np.uint64(0)
    if instruction.types[-1] == "u32":
        raise machine.unsupported("generic addresses have 64 bits")
    return np.uint64(WINDOWS["shared"])


def _mapa(machine: Machine, instruction: Instruction) -> Alu:
    """mapa. An address outside shared memory, or a rank that no block has, gives an address that no
    access may use. It is no fault by itself, since ptxas may move a mapa to a place where its
    result is not used."""
    type_name, window = instruction.types[-1], _window(machine, instruction)
    cluster = machine.geometry.cluster

    def compute(a: np.ndarray, rank: np.ndarray) -> np.ndarray:
        at = a.astype(np.uint64) - window
        good = (at < WINDOW_SIZE) & (rank < cluster)
        # Of a block that is alone all addresses are its own.
        block = np.where(good, (rank + np.uint32(1)) * (cluster > 1), _NOBODY).astype(np.uint64)
        offset = at & np.uint64((1 << RANK_SHIFT) - 1)
        return (window + (block << np.uint64(RANK_SHIFT)) + offset).astype(a.dtype)

    return Alu.of(instruction, compute, type_name, type_name, "u32")


def _getctarank(machine: Machine, instruction: Instruction) -> Alu:
    """getctarank. For an address outside shared memory it gives a rank that no block has."""
    target, address = instruction.operands
    window = _window(machine, instruction)

    def compute(a: np.ndarray, own: np.ndarray) -> np.ndarray:
        at = a.astype(np.uint64) - window
        block = np.where(at < WINDOW_SIZE, at >> np.uint64(RANK_SHIFT), np.uint64(_NOBODY))
        return np.where(block > 0, block - np.uint64(1), own).astype(np.uint32)

    sources = (address, instruction.types[-1]), (Special("%cluster_ctarank"), "u32")
    return Alu(((target, "u32"),), sources, compute)


def _barrier(machine: Machine, instruction: Instruction) -> Action:
    """barrier.cluster.arrive and wait."""
    barrier, position = machine.cluster_barrier, machine.position
    if instruction.has("arrive"):
        relaxed = instruction.has("relaxed")
        return machine.from_some(
            lambda selection: barrier.arrive(position, machine.lanes_of(selection), relaxed=relaxed)
        )
    if not instruction.has("wait") or not instruction.has("cluster"):
        raise machine.unsupported("barrier.cluster.arrive or barrier.cluster.wait is due")
    machine.waits[position] = Wait(barrier.is_ready, barrier.reason)
    return machine.from_some(lambda selection: barrier.wait(position, machine.lanes_of(selection)))


FORMS = (
    Form("barrier", _barrier, (0,), (), "cluster arrive wait relaxed aligned", "release acquire"),
    Form("mapa", _mapa, (3,), ("u32 u64",), SHARED_CLUSTER),
    Form("getctarank", _getctarank, (2,), ("u32 u64",), SHARED_CLUSTER),
)
