"""The instructions of warpgroups: `wgmma` (PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
Instructions") and `setmaxnreg`."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import MatrixDescriptorError
from flash_helpers.ptx.read.flow import Program, is_wgmma
from flash_helpers.ptx.read.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Vector,
)
from flash_helpers.ptx.read.registers import has_result
from flash_helpers.ptx.run.asynchronous.products import Product
from flash_helpers.ptx.run.asynchronous.register_pool import wanted_count
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import per_register
from flash_helpers.ptx.run.asynchronous.wgmma_sparse import Sparsity
from flash_helpers.ptx.run.instructions.forms import WARP_WIDE, Form
from flash_helpers.ptx.run.instructions.tensor import check_types
from flash_helpers.ptx.run.machine import Action, Machine, Wait, pick
from flash_helpers.ptx.run.memory.descriptors import MatrixOperand
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.numbers.elements import ELEMENTS

_M = 64
_SIGNS = {"f16": 2, "bf16": 2, "tf32": 2, "e4m3": 2, "e5m2": 2, "s8": 0, "u8": 0, "b1": 0}
"""Literals that negate A and B, by type."""
_TRANSPOSED = ("f16", "bf16")
"""Types with further literals that say which of A and B, in shared memory, are MN-major."""


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


def _columns(machine: Machine, type_name: str, *, is_sparse: bool) -> int:
    """N by the shape in the name of an instruction, which the type of A limits."""
    k = 8 * ELEMENTS[type_name] * (2 if is_sparse else 1)
    # Of integers, above 32 only every other one.
    step = 8 if _SIGNS[type_name] else 16
    shapes = {f"m{_M}n{n}k{k}": n for n in (*range(8, 32, 8), *range(32, 257, step))}
    return shapes[machine.one_of(shapes)]


def _check_kind(machine: Machine, instruction: Instruction, is_sparse: bool) -> None:
    """Refuses types and modifiers that do not go together."""
    d_type, a_type, b_type = instruction.types
    check_types(machine, tuple(_SIGNS), (d_type, a_type, b_type, d_type))
    is_b1 = a_type == "b1"
    if is_b1 != (instruction.has("and") and instruction.has("popc")) or (is_b1 and is_sparse):
        raise machine.unsupported("single bits, of a dense A, take .and.popc, and no others do")
    if instruction.has("satfinite") and a_type not in ("s8", "u8"):
        raise machine.unsupported("only products of s8 and u8 take .satfinite")


def _mma_async(machine: Machine, instruction: Instruction) -> Action:
    """wgmma.mma_async"""
    if not instruction.has("mma_async"):
        raise machine.unsupported("only wgmma.mma_async has types")
    d_type, a_type, b_type = instruction.types
    is_sparse = instruction.has("sp")
    _check_kind(machine, instruction, is_sparse)
    n = _columns(machine, a_type, is_sparse=is_sparse)
    d_operand, a_operand, b_operand, *rest = instruction.operands
    sparsity, metadata, told_by = None, np.zeros(1, np.uint32), rest[0]
    if is_sparse and len(rest) > 2:
        metadata = machine.source(told_by, "b32")
        pairs = (0, 1) if ELEMENTS[a_type] <= 2 else (0,)
        sparsity = Sparsity(a_type, _literal(machine, rest[1], pairs))
        rest = rest[2:]
    adds, *literals = rest
    in_registers = isinstance(a_operand, Vector)
    due = _SIGNS[a_type]
    if a_type in _TRANSPOSED:
        due += 2 - in_registers
    if len(literals) != due:
        raise machine.unsupported(f"{len(literals)} literals where {due} are due")
    signs = [_literal(machine, operand, (-1, 1)) for operand in literals[: _SIGNS[a_type]]]
    transposed = [_literal(machine, operand, (0, 1)) for operand in literals[_SIGNS[a_type] :]]
    *a_trans, b_trans = transposed or (0, 0)
    d = machine.elements(d_operand, n // 2 // per_register(d_type))
    a = machine.elements(a_operand, 4) if in_registers else ()
    warpgroups = machine.warpgroups
    product = Product(
        position=machine.position,
        n=n,
        d_type=d_type,
        a_type=a_type,
        b_type=b_type,
        sign=math.prod(signs),
        saturates=instruction.has("satfinite"),
        sparsity=sparsity,
        d=tuple(machine.destination(register, "b32") for register in d),
        d_names=_names(machine, d),
        a=tuple(machine.source(register, "b32") for register in a),
        a_names=_names(machine, a),
        a_matrix=None if in_registers else MatrixOperand(_M, not a_trans[0]),
        b_matrix=MatrixOperand(n, not b_trans, 4 if is_sparse else 2),
        d_fragments=warpgroups.registers.fragments(d),
        a_fragments=warpgroups.registers.fragments(a),
        goes_on=_goes_on(machine.program, machine.position),
    )
    none = np.zeros(1, np.uint64)
    a_bits = none if in_registers else machine.source(a_operand, "u64")
    b_bits = machine.source(b_operand, "u64")
    is_added = machine.predicate(adds)

    def of_lanes(values: np.ndarray, selection: Selection) -> np.ndarray:
        """The values of each warp's lanes, (warps, 32)."""
        lanes = machine.lanes_of(selection)
        if values.shape != lanes.shape:
            values = np.broadcast_to(values, lanes.shape)
        return values.reshape(-1, WARP)

    def uniform(values: np.ndarray, name: str, selection: Selection) -> np.ndarray:
        """One value for each warp."""
        lanes = machine.lanes_of(selection)
        rows = of_lanes(values, selection)
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
        if sparsity is not None and isinstance(told_by, Register):
            lanes = machine.lanes_of(selection)
            lanes = lanes[sparsity.counts(lanes)]
            codes = machine.poison.of(told_by.name, lanes)
            what = "the metadata of this wgmma"
            machine.poison.report(product.position, lanes, codes, what)
        warpgroups.issue(
            product,
            warps_of(machine, selection),
            uniform(pick(a_bits, selection), "the descriptor of A", selection),
            uniform(pick(b_bits, selection), "the descriptor of B", selection),
            uniform(is_added(selection), "scale-d", selection),
            of_lanes(pick(metadata, selection), selection).copy(),
        )

    return machine.from_some(run_some)


def _goes_on(program: Program, position: int) -> bool:
    """Whether the next instruction of the block that does more than write registers is a product,
    of all lanes that execute this one."""
    for each in program.instructions[position + 1 : program.block_at(position).end]:
        if is_wgmma(each):
            return each.guard is None
        if not has_result(each) or any(isinstance(o, Address) for o in each.operands):
            return False
    return False


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


_FACTORS = " ".join(_SIGNS)
_SHAPES = " ".join(f"m{_M}n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32, 64, 256))

FORMS = (
    Form("setmaxnreg", _setmaxnreg, (1,), ("u32",), "inc dec", WARP_WIDE),
    Form("wgmma", _order, (0, 1), (), "fence commit_group wait_group", WARP_WIDE),
    Form(
        "wgmma",
        _mma_async,
        (4, 6, 7, 8, 9, 10),
        ("f16 f32 s32", _FACTORS, _FACTORS),
        f"mma_async sp satfinite and xor popc {_SHAPES}",
        WARP_WIDE,
    ),
)
