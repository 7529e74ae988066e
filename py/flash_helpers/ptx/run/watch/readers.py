"""A lint for lanes that load bytes of a box in another layout than a tensor copy wrote them in.

A load alone tells nothing: a kernel that scales all elements in place is right in any layout, and
so is the sum of a row. The lint looks at where the values go. `execute.follow` follows them through
the registers of each lane, to a store to global memory or to an operand of `mma`. There it compares
two lanes of a warp: how many rows and columns their bytes lie apart in the box, and how many bytes
their results lie apart. There are three rules, each for one warp and one register.

- "row": lanes n and n + 1 have read one row. In a copy, in a transposition and in sums over columns
  each step between results is k times the step between columns, with one k.
- "rows": they have read different rows, by one load. The steps between results are equal, and so
  are those between rows and between columns. The sum of several loads has no such rule.
- "mma": lanes n and n + 4 hold elements of one column of A or one row of B (PTX ISA 9.0, "Matrix
  Fragments for mma.m16n8k16 with floating point type"; other shapes agree). In different rows of
  the box they have one column, since k runs along the rows. In one row their steps are equal.

Each rule is asked of several views of the box: of the true columns, and of the columns that a
reader has in mind who takes the bytes for a box with another swizzle. One more view has the pattern
of the swizzle begin at the box, and not at a multiple of its length ("Swizzling Modes"). A view is
the reader's if its rule holds in every warp, while the true columns break the rule in one of them.
Copies of an instruction in an unrolled loop read different rows of a box, so they are judged
together: by their line of source, or else by their basic block.

All blocks are alike, and so are the passes of a loop. So the lint looks at the first block of a
batch, or cluster, and at the first _MOST_LOADS loads of a line: a tile or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import LayoutLint
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.boxes import CHUNK, swizzled
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.tensor_map import TensorMap

_NEXT, _GROUP = range(2)
_DISTANCES = (1, 4)
"""Lanes from one of a pair to the other: neighbours, and neighbours in a column of a fragment."""

_SWIZZLES = (0, 32, 64, 128)
_TRUE, _SHIFTED = 0, 1 + len(_SWIZZLES)
_VIEWS = 1 + _SHIFTED
"""Views of a box: the true one, one for each swizzle, and the pattern that begins at the box."""

# A step of r rows and c bytes along them is r * _ROW + c. 0 stands for none.
_ROW = 1 << 13
_SEVERAL = np.iinfo(np.int32).min
"""Steps that differ."""
_LOAD = np.int64(0x1E37_79B9_7F4A_7C15)
"""The n-th load has the number n * _LOAD, so that sums of several seldom agree."""

_ALL_BITS = WARP - 1
"""Bits of a lane: a value that was exchanged and combined by all of them is one for the warp."""

_MOST_LOADS = 32

_Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether a rule holds in each warp, from steps (warps, pairs) and the pairs that count."""


def swizzle_name(size: int) -> str:
    """A swizzle of so many bytes in words."""
    return f"swizzle {size}B" if size else "no swizzle"


class Placed(NamedTuple):
    """A box in shared memory. `position`: the instruction of its copy. `start`: its address."""

    position: int
    map: TensorMap
    start: int

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return self.map.swizzle_bytes or self.map.row_bytes

    @property
    def repeat(self) -> int:
        """Bytes after which the pattern of the swizzle repeats."""
        return 8 * self.map.swizzle_bytes or 1


class Trace(NamedTuple):
    """The loads that values of n lanes come from.

    `steps`: for both distances and each view, the step to the other lane of the pair, int32 (2,
    views, n). `loads`: sum of the numbers of the loads, int64 (n,); 0 for none, -1 - b for values
    that lanes have exchanged by bits b of their numbers. `origins`: index of one of the loads with
    its box, int32 (n,).
    """

    steps: np.ndarray
    loads: np.ndarray
    origins: np.ndarray

    def joined(self, other: Trace) -> Trace:
        """The trace of values that are computed from two."""
        a, b = self.steps, other.steps
        steps = np.where(a == 0, b, np.where((b == 0) | (a == b), a, _SEVERAL))
        differ = (self.loads != other.loads) & (self.loads != 0) & (other.loads != 0)
        # The sum of a row is right in any layout.
        across = differ & (_is_across(a[_NEXT, _TRUE]) | _is_across(b[_NEXT, _TRUE]))
        steps[_NEXT][:, across] = 0
        loads = np.where(self.loads == other.loads, self.loads, self.loads + other.loads)
        is_mixed = _is_mixed(self.loads) | _is_mixed(other.loads)
        loads[is_mixed] = ~(self._bits | other._bits)[is_mixed]
        # Of what the whole warp has, it does not matter which lane has which.
        is_one = loads == ~_ALL_BITS
        loads[is_one] = steps[..., is_one] = 0
        return Trace(steps, loads, np.maximum(self.origins, other.origins))

    def mixed(self, bits: int) -> Trace:
        """The trace of values that lanes have exchanged by bits of their numbers; 0 for another
        exchange."""
        return self._replace(loads=np.where(self.loads != 0, ~(self._bits | bits), 0))

    @property
    def _bits(self) -> np.ndarray:
        return np.where(_is_mixed(self.loads), ~self.loads, 0)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of lanes in n warps, m in each. `lanes`: the first of each, (n, m). `are_compared`:
    both take part, with values of the same loads. `steps`: int64 (views, n, m). `origins`: as in
    `Trace`, (n, m)."""

    lanes: np.ndarray
    are_compared: np.ndarray
    steps: np.ndarray
    origins: np.ndarray


class _Verdict:
    """The views of a box that may be the reader's, by one rule.

    `open`: the views whose rule has held so far. `found`: for each view, where the true columns
    first broke the rule and the view did not: the instruction, the lane, and the origin of its
    value.
    """

    def __init__(self, box: Placed) -> None:
        self.open = {1 + i for i, size in enumerate(_SWIZZLES) if size != box.map.swizzle_bytes}
        if box.start % box.repeat:
            self.open.add(_SHIFTED)
        self.found: dict[int, tuple[int, int, int]] = {}


class Readers:
    """The traces of the registers of a batch. `begin`: called at the first load of a box; returns
    the registers to follow, by the loads that write them."""

    def __init__(self, geometry: Geometry, log: FaultLog) -> None:
        self._geometry = geometry
        self._log = log
        self.begin: Callable[[], Callable[[], Mapping[int, Sequence[str]]] | None] | None = None
        self.held: dict[str, Trace] = {}
        """The traces of registers with values from boxes, over all lanes."""
        self._is_watched = geometry.cluster_of(np.arange(geometry.lanes)) == 0
        self._watched = np.flatnonzero(self._is_watched)
        self._followed: Mapping[int, Sequence[str]] | None = None
        self._loads = 0
        self._loads_of: Counter[Hashable] = Counter()
        # In order of the swizzle, whose widest is told of where values come from several boxes.
        self._origins: dict[int, tuple[int, Placed]] = {}
        self._origin_of: dict[tuple[int, Placed], int] = {}
        self._verdicts: dict[Hashable, _Verdict] = {}

    # -- registers ---------------------------------------------------------------------------------

    def among(self, selection: Selection) -> np.ndarray:
        """The lanes of a selection that are followed."""
        if isinstance(selection, slice):
            first, end, _ = selection.indices(len(self._is_watched))
            low, high = np.searchsorted(self._watched, (first, end))
            return self._watched[low:high]
        return selection[self._is_watched[selection]]

    def load(
        self,
        position: int,
        lanes: np.ndarray,
        addresses: np.ndarray,
        numbers: np.ndarray,
        boxes: Sequence[Placed],
    ) -> None:
        """Lanes load bytes at addresses of their blocks. `numbers`: of each lane's box in `boxes`,
        from 1 on; 0 for none."""
        if self._followed is None:
            begin = self.begin and self.begin()
            assert begin is not None
            self._followed = begin()
        where = self._where(position)
        is_due = position in self._followed and self._loads_of[where] < _MOST_LOADS
        mine = self._is_watched[lanes] if is_due else np.zeros(0, bool)
        if not mine.any():
            return
        lanes, addresses, numbers = lanes[mine], addresses[mine], numbers[mine]
        self._loads_of[where] += 1
        self._loads += 1
        found, own = np.unique(numbers, return_inverse=True)
        table = [(0, 1, 0, 0)] if found[0] == 0 else []
        for number in found[found > 0].tolist():
            box = boxes[number - 1]
            table.append((box.start, box.pitch, box.map.swizzle_bytes, self._origin(position, box)))
        start, pitch, swizzle, origins = np.array(table)[own].T
        seen = [swizzled(addresses, swizzle), *(swizzled(addresses, s) for s in _SWIZZLES)]
        seen.append(swizzled(addresses - start, swizzle) + start)
        rows, columns = np.divmod(np.stack(seen) - start, pitch)
        loads = np.where(numbers > 0, self._loads * _LOAD, 0)
        trace = Trace(_steps(lanes, numbers, rows, columns), loads, origins.astype(np.int32))
        for name in self._followed[position]:
            self.put(name, lanes, trace)

    def _where(self, position: int) -> Hashable:
        """A key that the copies of an instruction in an unrolled loop have in common."""
        return self._log.site(position).source or self._log.program.block_of[position]

    def _origin(self, position: int, box: Placed) -> int:
        key = (position, box)
        if key not in self._origin_of:
            index = box.map.swizzle_bytes << 20 | len(self._origins)
            self._origin_of[key], self._origins[index] = index, key
        return self._origin_of[key]

    def of(self, name: str, lanes: np.ndarray) -> Trace:
        """The trace of a register among `held`."""
        held = self.held[name]
        return Trace(held.steps[..., lanes], held.loads[lanes], held.origins[lanes])

    def put(self, name: str, lanes: np.ndarray, trace: Trace | None) -> None:
        """Lanes have written a register."""
        held = self.held.get(name)
        if trace is None:
            if held is not None:
                held.steps[..., lanes] = 0
                held.loads[lanes] = 0
                if not held.loads.any():
                    del self.held[name]
            return
        if held is None:
            count = self._geometry.lanes
            steps = np.zeros((len(_DISTANCES), _VIEWS, count), np.int32)
            held = Trace(steps, np.zeros(count, np.int64), np.zeros(count, np.int32))
            self.held[name] = held
        for mine, new in zip(held, trace, strict=True):
            mine[..., lanes] = new

    # -- where the values go -----------------------------------------------------------------------

    def store(
        self, position: int, names: Collection[str], lanes: np.ndarray, addresses: np.ndarray
    ) -> None:
        """Lanes, in ascending order, write registers to global memory."""
        warps, place = _warps(lanes)
        to = np.zeros(warps.size * WARP, np.int64)
        to[place] = addresses
        results = np.diff(to.reshape(-1, WARP), axis=1)
        for pairs in self._pairs(_NEXT, names, lanes):
            across = _is_across(pairs.steps[_TRUE])
            self._judge("row", position, pairs, ~across, partial(_are_multiples, results))
            self._judge("rows", position, pairs, across, partial(_are_constant, results))

    def multiply(
        self, position: int, matrix: str, names: Collection[str], lanes: np.ndarray
    ) -> None:
        """Whole warps multiply by registers of a matrix, A or B."""
        for pairs in self._pairs(_GROUP, names, lanes):
            self._judge(matrix, position, pairs, pairs.are_compared, _are_of_one_column)

    def _pairs(self, distance: int, names: Collection[str], lanes: np.ndarray) -> Iterator[_Pairs]:
        """The pairs among lanes, once for registers of the same loads, such as parts of a
        vector."""
        warps, place = _warps(lanes)
        apart, seen = _DISTANCES[distance], set()
        for held in (self.held[name] for name in names if name in self.held):
            loads = np.zeros(warps.size * WARP, np.int64)
            loads[place] = held.loads[lanes]
            key = loads.tobytes()
            if key in seen:
                continue
            seen.add(key)
            one, other = (
                loads.reshape(-1, WARP)[:, n] for n in (slice(-apart), slice(apart, None))
            )
            steps = held.steps[distance].reshape(_VIEWS, -1, WARP)[:, warps, :-apart]
            both = (one == other) & (one != 0) & ~_is_mixed(one) & (steps[_TRUE] != 0)
            if both.any():
                numbers = warps[:, None] * WARP + np.arange(WARP - apart)
                yield _Pairs(numbers, both, steps.astype(np.int64), held.origins[numbers])

    def _judge(
        self, rule: str, position: int, pairs: _Pairs, chosen: np.ndarray, holds: _Rule
    ) -> None:
        """Asks a rule about some pairs whose values come to an instruction."""
        chosen = chosen & pairs.are_compared
        if not chosen.any():
            return
        box = self._origins[int(pairs.origins[chosen][0])][1]
        key = (
            rule,
            self._where(position),
            box.position,
            box.map.swizzle_bytes,
            box.start % box.repeat,
        )
        if key not in self._verdicts:
            self._verdicts[key] = _Verdict(box)
        verdict, true = self._verdicts[key], pairs.steps[_TRUE]
        for view in sorted(verdict.open):
            steps = pairs.steps[view]
            of = chosen & (_is_across(steps) == _is_across(true))
            some = of.any(axis=1)
            if (some & ~holds(steps, of)).any():
                verdict.open.remove(view)
                continue
            broken = some & ~holds(true, of)
            if view not in verdict.found and broken.any():
                first = np.flatnonzero(of & broken[:, None])[0]
                lane, origin = pairs.lanes.flat[first], pairs.origins.flat[first]
                verdict.found[view] = position, int(lane), int(origin)

    # -- what is said of it ------------------------------------------------------------------------

    def finish(self) -> None:
        """All threads have ended."""
        for verdict in self._verdicts.values():
            for view in sorted(verdict.open & verdict.found.keys())[:1]:
                self._report(view, *verdict.found[view])

    def _report(self, view: int, position: int, lane: int, origin: int) -> None:
        load, box = self._origins[origin]
        size = box.map.swizzle_bytes
        if view == _SHIFTED:
            expected = f"a pattern that begins at the box, at address {box.start},"
            remedy = f"the pattern begins at multiples of {box.repeat} bytes: align the box to them"
        else:
            expected = swizzle_name(_SWIZZLES[view - 1])
            remedy = "without a swizzle the rows of a box lie one behind the other"
            if size:
                places = f"a ^ ((a >> 7 & {size // CHUNK - 1}) << 4)"
                remedy = f"the byte that would be at address a without a swizzle is at {places}"
        name = self._log.program.instructions[load].name
        text = (
            f"{name} expects {expected} in bytes that TMA wrote with {swizzle_name(size)}\n"
            f"    at {self._log.site(box.position)}\n"
            f"    as the order of its values shows in {self._log.site(position)}:\n"
            f"    {remedy}"
        )
        self._log.lint(LayoutLint, text, load, self._geometry.thread(lane))


def _warps(lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The warps of lanes, and the place of each lane in the lanes of these warps."""
    warps, index = np.unique(lanes // WARP, return_inverse=True)
    return warps, index * WARP + lanes % WARP


def _steps(
    lanes: np.ndarray, numbers: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Steps of lanes, as in `Trace`. `numbers`: their boxes, (n,). `rows`, `columns`: of their
    bytes, (views, n)."""
    warps, place = _warps(lanes)
    flat = np.zeros((1 + 2 * _VIEWS, warps.size * WARP), np.int64)
    flat[:, place] = np.concatenate([numbers[None], rows, columns])
    at = flat.reshape(len(flat), -1, WARP)
    steps = np.zeros((len(_DISTANCES), _VIEWS, *at.shape[1:]), np.int32)
    for of_distance, count in zip(steps, _DISTANCES, strict=True):
        between = at[..., count:] - at[..., :-count]
        is_one = (between[0] == 0) & (at[0, :, count:] > 0)
        by_row, by_column = between[1 : 1 + _VIEWS], between[1 + _VIEWS :]
        of_distance[..., :-count] = np.where(is_one, by_row * _ROW + by_column, 0)
    return steps.reshape(*steps.shape[:2], -1)[..., place]


def _is_mixed(loads: np.ndarray) -> np.ndarray:
    return (loads < 0) & (loads >= ~_ALL_BITS)


def _is_across(steps: np.ndarray) -> np.ndarray:
    """Whether steps lead to another row."""
    return (steps != _SEVERAL) & ((steps >= _ROW // 2) | (steps < -_ROW // 2))


def _firsts(values: np.ndarray, of: np.ndarray) -> np.ndarray:
    """The first value of each warp that counts, (n, 1)."""
    return values[np.arange(len(of)), of.argmax(axis=1)][:, None]


def _are_multiples(results: np.ndarray, steps: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether steps between results are one multiple of steps of each warp, other than 0."""
    result, step = _firsts(results, of), _firsts(steps, of)
    fits = (results * step == result * steps) & (results != 0) & (steps != _SEVERAL)
    return (fits | ~of).all(axis=1)


def _are_constant(results: np.ndarray, steps: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether steps between results, and steps, are the same in each warp."""
    fits = (results == _firsts(results, of)) & (results != 0) & (steps == _firsts(steps, of))
    return (fits | ~of).all(axis=1)


def _are_of_one_column(steps: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether steps in each warp lead along one column, or are the same along a row."""
    columns = (steps + _ROW // 2) % _ROW - _ROW // 2
    fits = (columns == _firsts(columns, of)) & (steps != _SEVERAL)
    fits &= (columns == 0) | ~_is_across(steps)
    return (fits | ~of).all(axis=1)
