"""Instructions in which the lanes of a warp see each other: shuffles, votes, reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import BARRIERS
from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.run.instructions.forms import OPERATIONS, Form
from flash_helpers.ptx.run.machine import Action, Machine, pick, warp_masks
from flash_helpers.ptx.run.memory.regions import ALL, Selection

WHOLE_WARP = frozenset({"mma", "ldmatrix", "stmatrix", "movmatrix", "wmma", "wgmma", "setmaxnreg"})
"""Instructions that need all 32 lanes."""

_FULL = np.array([0xFFFF_FFFF], np.uint32)


def are_all_named(machine: Machine, members: np.ndarray, selection: Selection) -> bool:
    """Whether whole warps are selected, and each lane names all lanes as members."""
    return machine.counted(selection) is None and bool((pick(members, selection) == _FULL).all())


def _everywhere(array: np.ndarray, machine: Machine) -> np.ndarray:
    return np.broadcast_to(array, (machine.lanes,))


def shuffled_from(
    machine: Machine, instruction: Instruction
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """For every lane, the lane from which a shuffle reads, and whether that lane is in range."""
    _, _, b, c, _ = instruction.operands
    b_value, c_value = machine.source(b, "u32"), machine.source(c, "u32")
    mode = machine.one_of(("up", "down", "bfly", "idx"))
    lane = machine.lane_ids % WARP
    first = machine.lane_ids - lane

    def sources() -> tuple[np.ndarray, np.ndarray]:
        b_lane, c_bits = b_value.astype(np.int64) & 31, c_value.astype(np.int64)
        segment, clamp = c_bits >> 8 & 31, c_bits & 31
        low = lane & segment
        limit = low | (clamp & ~segment)
        j = {
            "up": lane - b_lane,
            "down": lane + b_lane,
            "bfly": lane ^ b_lane,
            "idx": low | (b_lane & ~segment),
        }[mode]
        inside = j >= limit if mode == "up" else j <= limit
        return first + np.where(inside, j, lane), inside

    if isinstance(b, Immediate) and isinstance(c, Immediate):
        fixed = sources()
        return lambda: fixed
    return sources


def _shfl(machine: Machine, instruction: Instruction) -> Action:
    """shfl.sync: up, down, bfly, idx, with segments and clamping. The value of a lane that does
    not take part is poison."""
    target, a, _, _, member = instruction.operands
    destination, predicate = machine.destinations(target, "b32", "pred")
    value, sources = machine.source(a, "b32"), shuffled_from(machine, instruction)
    members, position = machine.source(member, "u32"), machine.position

    def run_some(selection: Selection) -> None:
        index, inside = sources()
        if not are_all_named(machine, members, selection):
            taking = machine.fellows(selection, members) & members
            lanes = machine.lanes_of(selection)
            lost = lanes[(taking & machine.lane_bits[index])[lanes] == 0]
            if lost.size:
                machine.poison.lost(position, lost, index[lost], machine.gone[index[lost]])
        shuffled = _everywhere(value, machine)[index]
        destination[selection] = shuffled[selection]
        predicate[selection] = inside[selection]

    return machine.from_some(run_some)


def _warp_wide(
    machine: Machine,
    destinations: Sequence[np.ndarray],
    members: np.ndarray,
    compute: Callable[[np.ndarray], Sequence[np.ndarray]],
) -> Action:
    """The action of a warp-wide function. `compute`: takes, for each lane, a mask of the members of
    its warp that take part with it; returns one array over all lanes for each destination. Lanes
    that name other members are another group, and threads that have ended are in none."""

    def run_some(selection: Selection) -> None:
        results = compute(machine.fellows(selection, members) & members)
        for destination, result in zip(destinations, results, strict=True):
            destination[selection] = result[selection]

    return machine.from_some(run_some)


def _vote(machine: Machine, instruction: Instruction) -> Action:
    target, source, *rest = instruction.operands
    mode = machine.one_of(("all", "any", "uni", "ballot"))
    holds = machine.predicate(source)
    members = machine.source(rest[0], "u32") if rest else _FULL
    destination = machine.destination(target, "b32" if mode == "ballot" else "pred")

    def vote(taking: np.ndarray) -> Sequence[np.ndarray]:
        yes = warp_masks(_everywhere(holds(ALL), machine)) & taking
        result = {
            "ballot": yes,
            "all": yes == taking,
            "any": yes != 0,
            "uni": (yes == taking) | (yes == 0),
        }
        return (result[mode],)

    return _warp_wide(machine, [destination], members, vote)


def _activemask(machine: Machine, instruction: Instruction) -> Action:
    destination = machine.destination(instruction.operands[0], "b32")
    return _warp_wide(machine, [destination], _FULL, lambda taking: (taking,))


def _match(machine: Machine, instruction: Instruction) -> Action:
    target, source, member = instruction.operands
    everyone = instruction.has("all")
    values = machine.source(source, instruction.types[-1])
    bits = machine.lane_bits[:WARP]

    def match(taking: np.ndarray) -> Sequence[np.ndarray]:
        rows = _everywhere(values, machine).reshape(-1, WARP)
        same = rows[:, :, None] == rows[:, None, :]
        equal = (same * bits).sum(axis=2, dtype=np.uint32).reshape(-1) & taking
        agree = equal == taking
        return np.where(agree | (not everyone), equal, np.uint32(0)), agree

    destinations = machine.destinations(target, "b32", "pred")
    return _warp_wide(machine, destinations, machine.source(member, "u32"), match)


_REDUX: Mapping[str, tuple[str, ...]] = {
    "integer": ("add", "min", "max"),
    "bits": ("and", "or", "xor"),
    "float": ("min", "max"),
}


def _redux(machine: Machine, instruction: Instruction) -> Action:
    """redux.sync; those of f32 leave out NaNs, unless they have `.NaN` (PTX ISA 9.0,
    "redux.sync")."""
    target, source, member = instruction.operands
    type_name = instruction.types[-1]
    kind = {"b32": "bits", "f32": "float"}.get(type_name, "integer")
    name = machine.one_of(_REDUX[kind])
    values = machine.source(source, type_name)
    function = OPERATIONS[name]
    if kind == "float" and not instruction.has("NaN"):
        function = {"min": np.fmin, "max": np.fmax}[name]
    is_absolute = instruction.has("abs")
    if kind != "float" and (is_absolute or instruction.has("NaN")):
        raise machine.unsupported("only a reduction of .f32 has .abs and .NaN")
    start = _neutral(function, values.dtype)

    def reduce(taking: np.ndarray) -> Sequence[np.ndarray]:
        own = _everywhere(values, machine).reshape(-1, 1, WARP)
        takes_part = (taking.reshape(-1, WARP, 1) & machine.lane_bits[:WARP]) != 0
        each = np.where(takes_part, np.abs(own) if is_absolute else own, start)
        return (function.reduce(each, axis=2, dtype=values.dtype).reshape(-1),)

    destination = machine.destination(target, type_name)
    return _warp_wide(machine, [destination], machine.source(member, "u32"), reduce)


def _neutral(function: np.ufunc, dtype: np.dtype) -> np.generic:
    """The value that changes no result of a reduction."""
    if function in (np.fmin, np.fmax):
        return dtype.type(np.nan)
    if function is np.bitwise_and:
        return ~dtype.type(0)
    if function not in (np.minimum, np.maximum):
        return dtype.type(0)
    least, most = -np.inf, np.inf
    if dtype.kind != "f":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return dtype.type(most if function is np.minimum else least)


def _elect(machine: Machine, instruction: Instruction) -> Action:
    """elect.sync: the lowest member is elected."""
    target, member = instruction.operands

    def elect(taking: np.ndarray) -> Sequence[np.ndarray]:
        lowest = taking & (~taking + np.uint32(1))
        return np.bitwise_count(lowest - np.uint32(1)), lowest == machine.lane_bits

    destinations = machine.destinations(target, "b32", "pred")
    return _warp_wide(machine, destinations, machine.source(member, "u32"), elect)


def member_mask(machine: Machine, instruction: Instruction) -> np.ndarray | None:
    """Lanes that must execute an instruction together, as masks; None if it needs none."""
    name = instruction.name
    if name in WHOLE_WARP or instruction.has("cp_fenceproxy"):
        return _FULL
    if name in ("shfl", "match", "redux", "elect", "vote") and instruction.has("sync"):
        return machine.source(instruction.operands[-1], "u32")
    if name in BARRIERS and instruction.has("warp"):
        return machine.source(instruction.operands[0], "u32")
    if name == "barrier" and instruction.has("cluster") and instruction.has("aligned"):
        return _FULL
    return None


FORMS = (
    Form("shfl", _shfl, (5,), ("b32",), "sync up down bfly idx"),
    Form("vote", _vote, (2, 3), ("pred b32",), "sync all any uni ballot"),
    Form("activemask", _activemask, (1,), ("b32",)),
    Form("match", _match, (3,), ("b32 b64",), "sync all any"),
    Form("redux", _redux, (3,), ("u32 s32 b32 f32",), f"sync {' '.join(OPERATIONS)} abs NaN"),
    Form("elect", _elect, (2,), (), "sync"),
)
