"""Instructions in which the lanes of a warp see each other: shuffles, votes, reductions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.errors import MissingLanesError
from flash_helpers.ptx.read.module import Immediate, Instruction, Pair
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Machine, warp_masks
from flash_helpers.ptx.run.shared import Selection

MATRIX = frozenset({"mma", "ldmatrix", "movmatrix"})
"""Instructions that need all 32 lanes."""

_FULL = np.uint32(0xFFFF_FFFF)


def _active(machine: Machine, selection: Selection) -> np.ndarray:
    active = np.zeros(machine.lanes, bool)
    active[selection] = True
    return active


def _everywhere(array: np.ndarray, machine: Machine) -> np.ndarray:
    return np.broadcast_to(array, (machine.lanes,))


def shfl(machine: Machine, instruction: Instruction) -> Action:
    """shfl.sync: up, down, bfly, idx, with segments and clamping."""
    target, a, b, c, *rest = instruction.operands
    predicate = None
    if isinstance(target, Pair):
        predicate = machine.destination(target.second, "pred")
        target = target.first
    if not rest:
        raise machine.unsupported("only the .sync form, with a member mask")
    destination = machine.destination(target, "b32")
    value = machine.source(a, "b32")
    b_value, c_value = machine.source(b, "u32"), machine.source(c, "u32")
    mode = next(m for m in instruction.modifiers if m in ("up", "down", "bfly", "idx"))
    lane = machine.lane_ids % 32
    first = machine.lane_ids - lane
    position = machine.position
    constant = isinstance(b, Immediate) and isinstance(c, Immediate)

    def sources() -> tuple[np.ndarray, np.ndarray]:
        """Lane to read from, and whether it is in range, for every lane."""
        b_lane = b_value.astype(np.int64) & 31
        segment = (c_value.astype(np.int64) >> 8) & 31
        clamp = c_value.astype(np.int64) & 31
        limit = (lane & segment) | (clamp & ~segment)
        low = lane & segment
        if mode == "up":
            j = lane - b_lane
            inside = j >= limit
        elif mode == "down":
            j = lane + b_lane
            inside = j <= limit
        elif mode == "bfly":
            j = lane ^ b_lane
            inside = j <= limit
        else:
            j = low | (b_lane & ~segment)
            inside = j <= limit
        return first + np.where(inside, j, lane), inside

    fixed = sources() if constant else None

    def run() -> None:
        index, inside = fixed or sources()
        shuffled = _everywhere(value, machine)[index]
        if destination is not None:
            destination.put(shuffled)
        if predicate is not None:
            predicate.put(inside)

    def run_some(selection: Selection) -> None:
        index, inside = fixed or sources()
        active = _active(machine, selection)
        absent = np.flatnonzero(active & ~active[index])
        if absent.size:
            machine.log.report(
                MissingLanesError,
                f"lane {int(index[absent[0]]) % 32}, whose value is read, does not take part",
                position,
                machine.geometry.thread(absent[0]),
                count=absent.size,
            )
        shuffled = _everywhere(value, machine)[index]
        if destination is not None:
            destination.put_some(selection, shuffled[selection])
        if predicate is not None:
            predicate.put_some(selection, inside[selection])

    return Action(run, run_some)


def vote(machine: Machine, instruction: Instruction) -> Action:
    target, source, *rest = instruction.operands
    mode = next(m for m in instruction.modifiers if m in ("all", "any", "uni", "ballot"))
    values = machine.source(source, "pred")
    negated = getattr(source, "negated", False)
    members = machine.source(rest[0], "u32") if rest else np.array([_FULL])
    destination = machine.destination(target, "b32" if mode == "ballot" else "pred")
    warp = machine.lane_ids // 32

    def run_some(selection: Selection) -> None:
        truth = _everywhere(~values if negated else values, machine)
        taking = warp_masks(_active(machine, selection))[warp] & members
        yes = warp_masks(np.ascontiguousarray(truth))[warp] & taking
        result = {
            "ballot": yes,
            "all": yes == taking,
            "any": yes != 0,
            "uni": (yes == taking) | (yes == 0),
        }[mode]
        if destination is not None:
            destination.put_some(selection, result[selection])

    return machine.from_some(run_some)


def activemask(machine: Machine, instruction: Instruction) -> Action:
    destination = machine.destination(instruction.operands[0], "b32")
    warp = machine.lane_ids // 32

    def run_some(selection: Selection) -> None:
        if destination is not None:
            masks = warp_masks(_active(machine, selection))[warp]
            destination.put_some(selection, masks[selection])

    return machine.from_some(run_some)


def match(machine: Machine, instruction: Instruction) -> Action:
    target, source, member = instruction.operands
    everyone = instruction.has("all")
    predicate = None
    if isinstance(target, Pair):
        predicate = machine.destination(target.second, "pred")
        target = target.first
    values = machine.source(source, instruction.types[-1])
    members = machine.source(member, "u32")
    destination = machine.destination(target, "b32")
    warp = machine.lane_ids // 32
    bits = np.uint32(1) << (np.arange(32, dtype=np.uint32))

    def run_some(selection: Selection) -> None:
        rows = _everywhere(values, machine).reshape(-1, 32)
        same = rows[:, :, None] == rows[:, None, :]
        equal = (same * bits).sum(axis=2, dtype=np.uint32).reshape(-1)
        taking = warp_masks(_active(machine, selection))[warp] & members
        equal &= taking
        if everyone:
            agree = equal == taking
            equal = np.where(agree, taking, np.uint32(0))
            if predicate is not None:
                predicate.put_some(selection, agree[selection])
        if destination is not None:
            destination.put_some(selection, equal[selection])

    return machine.from_some(run_some)


def redux(machine: Machine, instruction: Instruction) -> Action:
    target, source, member = instruction.operands
    type_name = instruction.types[-1]
    functions = {
        "add": (np.add, 0),
        "min": (np.minimum, None),
        "max": (np.maximum, None),
        "and": (np.bitwise_and, -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }
    name = next(m for m in instruction.modifiers if m in functions)
    function, neutral = functions[name]
    values = machine.source(source, type_name)
    if values.dtype.kind not in "iu":
        raise machine.unsupported("only integers on compute capability 8.x")
    limits = np.iinfo(values.dtype)
    if neutral is None:
        neutral = limits.max if name == "min" else limits.min
    start = np.array([neutral & ((1 << 32) - 1)], np.uint32).view(values.dtype)[0]
    members = machine.source(member, "u32")
    destination = machine.destination(target, type_name)
    lane = (machine.lane_ids % 32).astype(np.uint32)

    def run_some(selection: Selection) -> None:
        member_bit = (_everywhere(members, machine) >> lane) & np.uint32(1)
        taking = _active(machine, selection) & (member_bit == 1)
        rows = np.where(taking, _everywhere(values, machine), start).reshape(-1, 32)
        result = np.repeat(function.reduce(rows, axis=1, dtype=values.dtype), 32)
        if destination is not None:
            destination.put_some(selection, result[selection])

    return machine.from_some(run_some)


def elect(machine: Machine, instruction: Instruction) -> Action:
    """elect.sync: the lowest member is elected."""
    target, member = instruction.operands
    destination = machine.destination(target.first, "b32") if isinstance(target, Pair) else None
    last = target.second if isinstance(target, Pair) else target
    predicate = machine.destination(last, "pred")
    members = machine.source(member, "u32")
    lane = (machine.lane_ids % 32).astype(np.uint32)
    warp = machine.lane_ids // 32

    def run_some(selection: Selection) -> None:
        taking = warp_masks(_active(machine, selection))[warp] & members
        lowest = taking & (~taking + np.uint32(1))
        if destination is not None:
            leader = np.bitwise_count(lowest - np.uint32(1)).astype(np.uint32)
            destination.put_some(selection, leader[selection])
        if predicate is not None:
            predicate.put_some(selection, (lowest == np.uint32(1) << lane)[selection])

    return machine.from_some(run_some)


def member_mask(machine: Machine, instruction: Instruction) -> np.ndarray | None:
    """Lanes that must execute an instruction together, as masks; None if it needs none."""
    name = instruction.name
    if name in MATRIX:
        return np.array([_FULL])
    if name in ("shfl", "match", "redux", "elect") and instruction.has("sync"):
        return machine.source(instruction.operands[-1], "u32")
    if name == "vote" and instruction.has("sync"):
        return machine.source(instruction.operands[-1], "u32")
    if name in ("bar", "barrier") and instruction.has("warp"):
        return machine.source(instruction.operands[0], "u32")
    return None


OPERATIONS: Mapping[str, Builder] = {
    "shfl": shfl,
    "vote": vote,
    "activemask": activemask,
    "match": match,
    "redux": redux,
    "elect": elect,
}
