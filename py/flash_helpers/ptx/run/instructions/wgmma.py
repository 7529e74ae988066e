"""The instructions of warpgroups: `wgmma` (PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
Instructions") and `setmaxnreg`."""

from __future__ import annotations

from functools import partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import MatrixDescriptorError
from flash_helpers.ptx.read.module import Immediate, Instruction, Operand, Register, Vector
from flash_helpers.ptx.run.asynchronous.products import Product
from flash_helpers.ptx.run.asynchronous.register_pool import wanted_count
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import per_register
from flash_helpers.ptx.run.instructions.forms import Form
from flash_helpers.ptx.run.machine import Action, Machine, Wait, pick
from flash_helpers.ptx.run.memory.descriptors import K, MatrixOperand
from flash_helpers.ptx.run.memory.regions import Selection

_M = 64
_SHAPES = {f"m{_M}n{n}k{K}": n for n in range(8, 257, 8)}
_SUMS = {"f16": ("f16", "f32"), "bf16": ("f32",)}
_OTHERS = "e4m3 e5m2 tf32 s8 u8 b1"


def warps_of(machine: Machine, selection: Selection) -> np.ndarray:
    """The warps of selected lanes, which are whole warps."""
    return machine.lanes_of(selection)[::WARP] // WARP


def _order(machine: Machine, instruction: Instruction) -> Action:
    """wgmma.fence, wgmma.commit_group and wgmma.wait_group"""
    what = machine.one_of(("fence", "commit_group", "wait_group"))
    counted = what == "wait_group"
    if len(instruction.operands) != counted:
        raise machine.unsupported(f"{len(instruction.operands)} operands")
    warpgroups, position = machine.warpgroups, machine.position
    if not counted:
        act = warpgroups.fence if what == "fence" else warpgroups.commit
        return machine.from_some(lambda selection: act(position, warps_of(machine, selection)))
    allowed = _literal(machine, instruction.operands[0], range(1 << 31))

    def is_ready(lanes: np.ndarray) -> np.ndarray:
        return warpgroups.may_wait(lanes // WARP, allowed)

    def reason(lanes: np.ndarray) -> str:
        return warpgroups.whom_it_awaits(int(lanes[0]) // WARP, allowed)

    machine.waits[position] = Wait(is_ready, reason)

    def run_some(selection: Selection) -> None:
        warpgroups.wait(position, warps_of(machine, selection), allowed)

    return machine.from_some(run_some)


def _mma_async(machine: Machine, instruction: Instruction) -> Action:
    """wgmma.mma_async of 16-bit elements."""
    if not instruction.has("mma_async"):
        raise machine.unsupported("only wgmma.mma_async has types")
    d_type, a_type, b_type = instruction.types
    for name in (a_type, b_type):
        if name in _OTHERS.split():
            raise machine.unsupported(f"wgmma of {name} is not simulated, only f16 and bf16 are")
    if a_type != b_type or d_type not in _SUMS[a_type]:
        raise machine.unsupported(f"no wgmma multiplies {a_type} by {b_type} into {d_type}")
    n = _SHAPES[machine.one_of(_SHAPES)]
    d_operand, a_operand, b_operand, adds, *literals = instruction.operands
    in_registers = isinstance(a_operand, Vector)
    if len(literals) != 4 - in_registers:
        raise machine.unsupported(f"{len(literals)} literals where {4 - in_registers} are due")
    signs = [_literal(machine, operand, (-1, 1)) for operand in literals[:2]]
    *a_trans, b_trans = (_literal(machine, operand, (0, 1)) for operand in literals[2:])
    d = machine.elements(d_operand, n // 2 // per_register(d_type))
    a = machine.elements(a_operand, 4) if in_registers else ()
    warpgroups = machine.warpgroups
    product = Product(
        position=machine.position,
        n=n,
        d_type=d_type,
        factor_type=a_type,
        sign=signs[0] * signs[1],
        d=tuple(machine.destination(register, "b32") for register in d),
        d_names=_names(machine, d),
        a=tuple(machine.source(register, "b32") for register in a),
        a_names=_names(machine, a),
        a_matrix=None if in_registers else MatrixOperand(_M, not a_trans[0]),
        b_matrix=MatrixOperand(n, not b_trans),
        d_fragments=warpgroups.registers.fragments(d),
        a_fragments=warpgroups.registers.fragments(a),
    )
    none = np.zeros(1, np.uint64)
    a_bits = none if in_registers else machine.source(a_operand, "u64")
    b_bits = machine.source(b_operand, "u64")
    is_added = machine.predicate(adds)

    def uniform(values: np.ndarray, name: str, selection: Selection) -> np.ndarray:
        """One value for each warp."""
        lanes = machine.lanes_of(selection)
        rows = np.broadcast_to(values, lanes.shape).reshape(-1, WARP)
        differs = rows != rows[:, :1]
        if differs.any():
            i, j = np.argwhere(differs)[0]
            text = f"{name} is {int(rows[i, j]):#x}, that of lane 0 is {int(rows[i, 0]):#x}"
            thread = machine.geometry.thread(lanes[WARP * i + j])
            count = int(differs.any(axis=1).sum())
            kind = MatrixDescriptorError
            machine.log.report(kind, text, product.position, thread, count=count)
        return rows[:, 0].copy()  # the registers may change before it is computed

    def run_some(selection: Selection) -> None:
        warpgroups.issue(
            product,
            warps_of(machine, selection),
            uniform(pick(a_bits, selection), "the descriptor of A", selection),
            uniform(pick(b_bits, selection), "the descriptor of B", selection),
            uniform(is_added(selection), "scale-d", selection),
        )

    return machine.from_some(run_some)


def _setmaxnreg(machine: Machine, instruction: Instruction) -> Action:
    what = machine.one_of(("inc", "dec"))
    count = wanted_count(instruction)
    if count is None:
        raise machine.unsupported("a literal from 24 to 256 is due, a multiple of 8")
    pool, position = machine.register_pool, machine.position
    if what == "inc":
        machine.waits[position] = Wait(
            lambda lanes: pool.has_enough(lanes[::WARP] // WARP, count).repeat(WARP),
            lambda lanes: pool.what_it_lacks(int(lanes[0]) // WARP, count),
        )

    def run_some(selection: Selection) -> None:
        pool.set(position, warps_of(machine, selection), count, raises=what == "inc")

    return machine.from_some(run_some)


def watched(machine: Machine, position: int, action: Action) -> Action:
    """The action of an instruction that may touch registers of a wgmma."""
    registers = machine.warpgroups.registers
    if position not in registers.watched:
        return action

    def touch(selection: Selection) -> None:
        lanes = machine.lanes_of(selection)
        registers.touch(position, np.unique(lanes // WARP))

    check = machine.from_some(touch)
    guard = machine.program.instructions[position].guard
    if guard is not None:
        check = machine.guarded(check, guard)

    def run_some(selection: Selection) -> None:
        check.some(selection)
        action.some(selection)

    return Action(partial(_one_after_the_other, check, action), run_some)


def _one_after_the_other(first: Action, second: Action) -> None:
    first.all()
    second.all()


def _literal(machine: Machine, operand: Operand, allowed: range | tuple[int, ...]) -> int:
    value = operand.integer if isinstance(operand, Immediate) else None
    if value is None or value not in allowed:
        raise machine.unsupported(f"an operand that must be a literal of {allowed} is not")
    return value


def _names(machine: Machine, operands: tuple[Operand, ...]) -> tuple[str, ...]:
    for operand in operands:
        machine.register(operand)
    return tuple(operand.name for operand in operands if isinstance(operand, Register))


_FACTORS = f"f16 bf16 {_OTHERS}"

FORMS = (
    Form("setmaxnreg", _setmaxnreg, (1,), ("u32",)),
    Form("wgmma", _order, (0, 1)),
    Form("wgmma", _mma_async, (4, 6, 7, 8), ("f16 f32 s32", _FACTORS, _FACTORS)),
)
