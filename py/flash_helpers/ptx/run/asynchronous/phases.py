"""The mbarrier objects of a batch: operations of lanes and copies on them, and the knowledge that
passes through them.

An object holds the knowledge of the lanes that arrive; a lane that sees a phase complete learns it
(PTX ISA 9.0, "Parallel Synchronization and Communication Instructions: mbarrier": arrive-on
releases, test_wait and try_wait acquire). Objects are named by their place in the shared memory of
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import proxy

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import MbarrierError, RaceError
from flash_helpers.ptx.run.asynchronous.mbarriers import MBARRIER_BYTES, Mbarrier, MbarrierMisuse
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Knowledge, join
from flash_helpers.ptx.run.watch.shared import WatchedMemory

_IMPATIENCE = 0.2
"""Probability that lanes give up each time they are asked whether they may go on."""


CLUSTER, BLOCK, NOBODY = "cluster", "cta", "relaxed"
"""The scope of an operation that releases or acquires; none of one that is relaxed."""


@dataclass(frozen=True)
class _Released:
    """Knowledge that an arrival hands over. `is_near`: lanes of the object's block hand it over, or
    a unit that counts for all of the cluster."""

    knowledge: Knowledge
    is_near: bool = True


@dataclass
class Phased:
    """An mbarrier object since its mbarrier.init.

    `made`: time, lane, instruction and agent of its making; a lane that knows the agent up to that
    time may use the object. `users`: lanes that were seen to know that. `arrived`: lane and
    instruction of the last arrival, if there was one.
    `seen`: for each lane that saw a phase complete, the number of complete phases, and the
    instruction. `refused`: the same for each lane that saw a phase not complete.
    """

    state: Mbarrier
    block: int
    made: tuple[int, int, int, int]
    users: np.ndarray
    arrived: tuple[int, int] | None = None
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    refused: dict[int, tuple[int, int]] = field(default_factory=dict)


class Phases:
    """All objects, by their place in `shared.data`. `wanted`: objects that some lane was found to
    wait for. `version`: number of changes to any object. `complete_phases`: number of phases that
    asynchronous operations have completed. `random`: decides when a wait gives up early; None for
    never."""

    def __init__(
        self, shared: WatchedMemory, log: FaultLog, random: np.random.Generator | None = None
    ) -> None:
        self.shared = shared
        self.random = random
        self.order = shared.order
        self.log = log
        self.objects: dict[int, Phased] = {}
        self.wanted: set[int] = set()
        self.version = self.complete_phases = 0
        self._ended: dict[int, int] = {}
        """Objects that mbarrier.inval has ended: by which instruction."""
        self.passed: dict[int, Phased] = {}
        """By lane, the object that it last saw a phase of complete."""
        self._agents: dict[tuple[int, int], int] = {}
        self._agents_at: dict[tuple[int, str], int] = {}
        self._given_up = np.zeros(shared.lane_ids.size, bool)
        # For each wait and object, the phase in which each lane has given up at once.
        self._refused: dict[tuple[int, int], np.ndarray] = {}
        # Weakly, as all that belongs to a batch: it is gone as soon as the batch is.
        weak = proxy(self)
        shared.marks.stories.append(lambda agent, lane, position: weak._explain(agent, lane))

    def address_of(self, where: int) -> int:
        """The shared address of an object in its block."""
        return where % self.shared.stride

    def agent(self, where: int, what: str = "TMA") -> int:
        """The agent for whose writes an object waits. `what`: name of the unit that carries them
        out."""
        agent = self._agents_at.get((where, what))
        if agent is None:
            block, address = divmod(where, self.shared.stride)
            agent = self.order.agent(block, f"{what} for mbarrier at shared address {address}")
            self._agents[self.shared.geometry.cluster_of(block * 32), agent] = where
            self._agents_at[where, what] = agent
        return agent

    def agent_of_threads(self, where: int) -> int:
        """As `agent`, of the copies that threads issue by cp.async."""
        agent = self.agent(where, "cp.async")
        self.order.generic_agents.add(agent)
        return agent

    # -- what lanes do -----------------------------------------------------------------------------

    def init(
        self, position: int, lanes: np.ndarray, places: np.ndarray, counts: np.ndarray
    ) -> None:
        """mbarrier.init by lanes, each at its place in `shared.data`."""
        lanes, places, counts = self._once("make", position, lanes, places, counts)
        new = np.ones(lanes.size, bool)
        makers = {lane: self._maker(lane) for lane in lanes.tolist()}
        now = self.order.now
        for i, (lane, where, count) in enumerate(
            zip(lanes.tolist(), places.tolist(), counts.tolist(), strict=True)
        ):
            known = self.objects.get(where)
            with self._reported(position, lane, where):
                if known is not None:
                    site = self.log.site(known.made[2])
                    raise MbarrierMisuse(
                        f"mbarrier.init of an object that lives since {site}: end it by "
                        "mbarrier.inval first"
                    )
                state = Mbarrier(self.address_of(where), count)
                made = (now, lane, position, makers[lane])
                users = np.zeros(self.shared.lane_ids.size, bool)
                self.objects[where] = Phased(state, where // self.shared.stride, made, users)
                continue
            new[i] = False
        if new.any():
            self.shared.lanes.hold(position, lanes[new], places[new] // MBARRIER_BYTES)
        for lane, maker in makers.items():
            self.order.acquire(np.array([lane]), [self.order.agent_knowledge(maker)])
        self.version += 1

    def _once(
        self, verb: str, position: int, lanes: np.ndarray, places: np.ndarray, *more: np.ndarray
    ) -> list[np.ndarray]:
        """The first lane of those that name one place, with the place; the others are reported."""
        _, first, counts = np.unique(places, return_index=True, return_counts=True)
        for i, n in zip(first.tolist(), counts.tolist(), strict=True):
            if n > 1:
                most = _most_of_a_warp(lanes[places == places[i]])
                who, way = f"{most} lanes", "elect one"
                if most == 1:
                    who, way = f"lanes of {n} warps", "choose one warp"
                self.log.report(
                    MbarrierError,
                    f"{who} of this instruction {verb} the same object: {way}",
                    position,
                    self.shared.geometry.thread(int(lanes[i])),
                    self.address_of(int(places[i])),
                    n,
                )
        return [array[np.sort(first)] for array in (lanes, places, *more)]

    def fence(self, lanes: np.ndarray) -> None:
        """fence.mbarrier_init by lanes: a relaxed arrival at the cluster's barrier makes known the
        objects that they made before (PTX ISA 9.0, "membar/fence")."""
        for lane in lanes.tolist():
            self.order.fence_agent(lane, self._maker(lane))

    def _maker(self, lane: int) -> int:
        thread = self.shared.geometry.thread(lane)
        name = f"mbarrier.init of warp {thread.warp} lane {thread.lane}"
        return self.order.agent(self.shared.geometry.block_of(lane), name)

    def inval(self, position: int, lanes: np.ndarray, places: np.ndarray) -> None:
        """mbarrier.inval by lanes."""
        lanes, places = self._once("end", position, lanes, places)
        for lane, where in zip(lanes.tolist(), places.tolist(), strict=True):
            if self.find(position, np.array([lane]), where) is not None:
                del self.objects[where]
                self._ended[where] = position
                self.version += 1
                rows = np.array([where // MBARRIER_BYTES])
                self.shared.lanes.let_go(position, np.array([lane]), rows)

    def arrive(
        self,
        position: int,
        lanes: np.ndarray,
        places: np.ndarray,
        counts: np.ndarray,
        *,
        expects: np.ndarray | None = None,
        drops: bool = False,
        may_complete: bool = True,
        scope: str = CLUSTER,
    ) -> np.ndarray:
        """Lanes arrive, each by `Mbarrier.arrive`; returns the states that they get. `expects`:
        bytes that they announce before. `scope`: the threads to which they release."""
        states = np.zeros(lanes.size, np.uint64)
        for where, chosen in _groups(places):
            mine = lanes[chosen]
            found = self.find(position, mine, where)
            if found is None:
                continue
            state, sums = found.state, counts[chosen]
            advice, n = "", _most_of_a_warp(mine)
            if n > 1:
                advice = f"\n    {n} lanes of this instruction arrive: elect one, or count them"
            with self._reported(position, int(mine[0]), where, advice):
                # One after the other, each sees what is pending before it arrives.
                before = np.cumsum(sums) - sums
                states[chosen] = np.uint64(state.state) - before.astype(np.uint64)
                if expects is not None:
                    state.expect(int(expects[chosen].sum()))
                released = self._released(mine, found.block, scope)
                state.arrive(int(sums.sum()), released, drops=drops, may_complete=may_complete)
            found.arrived = int(mine[-1]), position
            self.version += 1
        return states

    def _released(self, lanes: np.ndarray, block: int, scope: str) -> _Released | None:
        """The knowledge that arrivals at an object of a block release."""
        its = self.shared.geometry.block_of(lanes) == block
        if scope != CLUSTER:
            lanes = lanes[its & (scope == BLOCK)]
        if not lanes.size:
            return None
        return _Released(self.order.knowledge(lanes), bool(its.all()))

    def add_pending(self, position: int, lanes: np.ndarray, where: int) -> None:
        """An object waits for one more arrival of each lane, which `arrive_for` makes later."""
        found = self.find(position, lanes, where)
        if found is not None:
            with self._reported(position, int(lanes[0]), where):
                found.state.add_pending(lanes.size)
            self.version += 1

    def arrive_for(
        self, position: int, lanes: np.ndarray, where: int, knowledge: Knowledge
    ) -> None:
        """An asynchronous operation arrives for lanes. `knowledge`: passed to lanes that see the
        phase complete."""
        found = self.find(position, lanes, where)
        if found is not None:
            phase = found.state.phase
            with self._reported(position, int(lanes[0]), where):
                found.state.arrive(lanes.size, _Released(knowledge))
            found.arrived = int(lanes[-1]), position
            self.complete_phases += found.state.phase - phase
            self.version += 1

    def expect(
        self, position: int, lanes: np.ndarray, places: np.ndarray, sizes: np.ndarray
    ) -> None:
        """mbarrier.expect_tx by lanes."""
        for where, chosen in _groups(places):
            found = self.find(position, lanes[chosen], where)
            if found is not None:
                with self._reported(position, int(lanes[chosen][0]), where):
                    found.state.expect(int(sizes[chosen].sum()))
                self.version += 1

    def complete(
        self,
        position: int,
        lane: int,
        where: int,
        size: int,
        knowledge: Knowledge | None = None,
        phase: int | None = None,
    ) -> None:
        """`size` bytes have come. `knowledge`: passed to lanes that see the phase complete.
        `phase`: the phase in which the copy that brings the bytes was issued."""
        found = self.find(position, np.array([lane]), where)
        if found is None:
            return
        now = found.state.phase
        with self._reported(position, lane, where):
            if phase is not None and phase != now:
                raise MbarrierMisuse(
                    f"{size} bytes come in phase {now} of a copy that was issued in phase {phase}: "
                    "the phase that should have waited for them did not expect them"
                )
            found.state.complete(size, None if knowledge is None else _Released(knowledge))
        self.complete_phases += found.state.phase - now
        self.version += 1

    # -- what lanes ask ----------------------------------------------------------------------------

    def is_complete(self, places: np.ndarray, values: np.ndarray, *, parity: bool) -> np.ndarray:
        """For each lane, whether the phase that it waits for, given by a state or a parity, is
        complete; True also where asking is a fault. Notes the objects that are wanted."""
        complete = np.ones(places.size, bool)
        for where, chosen in _groups(places):
            found = self.objects.get(where)
            if found is None:
                continue
            for value in _distinct(values[chosen]):
                try:
                    is_over = _is_over(found.state, value, parity)
                except MbarrierMisuse:
                    continue
                if not is_over:
                    self.wanted.add(where)
                    complete[chosen] &= values[chosen] != value
        return complete

    def may_go_on(
        self, lanes: np.ndarray, places: np.ndarray, values: np.ndarray, *, parity: bool
    ) -> np.ndarray:
        """Which lanes may execute a try_wait: lanes that would see a phase complete, and lanes
        whose time is up, which "depends on the system" (PTX ISA 9.0, "mbarrier.try_wait")."""
        ready = self.is_complete(places, values, parity=parity)
        if self.random is not None and not ready.all() and self.random.random() < _IMPATIENCE:
            self._given_up[lanes] = True
        return ready | self._given_up[lanes]

    def refuse_once(self, position: int, lanes: np.ndarray, places: np.ndarray) -> None:
        """Ends the time of lanes at a wait that they have not tried before in this phase. Lanes
        that come back to it spin after all."""
        for where, chosen in _groups(places):
            phase = self.objects[where].state.phase
            none = np.full(self._given_up.size, -1)
            refused = self._refused.setdefault((position, where), none)
            self._given_up[lanes[chosen]] |= refused[lanes[chosen]] != phase
            refused[lanes[chosen]] = phase

    def give_up(self, lanes: np.ndarray) -> None:
        """Ends the time of lanes that wait."""
        self._given_up[lanes] = True

    def observe(
        self,
        position: int,
        lanes: np.ndarray,
        places: np.ndarray,
        values: np.ndarray,
        *,
        parity: bool,
        scope: str = CLUSTER,
    ) -> np.ndarray:
        """As `is_complete`; lanes that see a phase complete learn everything released in it and
        before. `scope`: the threads from which they acquire."""
        self._given_up[lanes] = False
        complete = np.zeros(places.size, bool)
        learned: list[tuple[np.ndarray, list[Knowledge]]] = []
        for where, chosen in _groups(places):
            found = self.find(position, lanes[chosen], where)
            if found is None:
                continue
            for value in _distinct(values[chosen]):
                mine = chosen[values[chosen] == value]
                with self._reported(position, int(lanes[mine[0]]), where):
                    complete[mine] = _is_over(found.state, value, parity)
                if complete[mine[0]]:
                    learned.append((lanes[mine], self._seen(position, found, lanes[mine], scope)))
                else:
                    refusal = found.state.phase, position
                    found.refused.update(dict.fromkeys(lanes[mine].tolist(), refusal))
        self.order.acquire_each([each for each in learned if each[1]])
        return complete

    def _seen(self, position: int, found: Phased, lanes: np.ndarray, scope: str) -> list[Knowledge]:
        """Lanes see a phase complete; returns what they learn from that."""
        state = found.state
        state.observe()
        found.seen.update(dict.fromkeys(lanes.tolist(), (state.phase, position)))
        self.passed.update(dict.fromkeys(lanes.tolist(), found))
        parts = [(near, [r for r in state.released if r.is_near == near]) for near in (True, False)]
        joint = [_Released(join([r.knowledge for r in some]), near) for near, some in parts if some]
        state.released = joint
        return [r.knowledge for r in joint if scope == CLUSTER or (r.is_near and scope == BLOCK)]

    # -- objects -----------------------------------------------------------------------------------

    def find(self, position: int, lanes: np.ndarray, where: int) -> Phased | None:
        """The object that lanes use; None, and a fault, if they may not."""
        found = self.objects.get(where)
        if found is None:
            with self._reported(position, int(lanes[0]), where):
                why = "mbarrier.init has not made one"
                if where in self._ended:
                    site = self.log.site(self._ended[where])
                    why = f"mbarrier.inval has ended it at {site}"
                raise MbarrierMisuse(f"there is no mbarrier object: {why}")
            return None
        if found.users[lanes].all():
            return found
        since, maker, made_at, agent = found.made
        known = self.order.known_of_agents(lanes, np.full((lanes.size, 1), agent))[:, 0]
        found.users[lanes] = known >= since
        if (known < since).any():
            lane = int(lanes[int((known < since).argmax())])
            warp, site = self.shared.marks.warp_place[maker], self.log.site(made_at)
            self.log.report(
                RaceError,
                f"use of the mbarrier object at shared address {self.address_of(where)} and its "
                f"making by warp {warp} at {site}\n"
                "    with no barrier between them",
                position,
                self.shared.geometry.thread(lane),
                self.address_of(where),
                int((known < since).sum()),
            )
        return found

    @contextmanager
    def _reported(self, position: int, lane: int, where: int, advice: str = "") -> Iterator[None]:
        """Makes a fault of misuse. `advice`: the last line of its text."""
        try:
            yield
        except MbarrierMisuse as misuse:
            found = self.objects.get(where)
            detail = str(misuse) if found is None else f"{misuse}\n    {found.state}"
            thread = self.shared.geometry.thread(lane)
            address = self.address_of(where)
            self.log.report(MbarrierError, detail + advice, position, thread, address)

    # -- words -------------------------------------------------------------------------------------

    def waited_for(self, places: np.ndarray, values: np.ndarray, name: Callable[[int], str]) -> str:
        """The objects that lanes wait for, in words. `name`: what is waited for, by its value."""
        told = []
        for where, chosen in _groups(places):
            names = dict.fromkeys(name(value) for value in np.unique(values[chosen]).tolist())
            told.append(f"for {', '.join(names)} of the {self.objects[where].state}")
        return "\n      and ".join(told)

    def last_arrivals(self, places: np.ndarray) -> str:
        """The last arrival at each object that lanes wait for, in words."""
        told = []
        for where, _ in _groups(places):
            found = self.objects[where]
            last = "no thread has arrived"
            if found.arrived is not None:
                lane, position = found.arrived
                thread = self.shared.geometry.thread(lane)
                last = f"the last arrival is that of {thread} at {self.log.site(position).brief}"
            told.append(last)
        return "; ".join(told)

    def _explain(self, agent: int, lane: int) -> str:
        """Text about the phases that a lane has seen of an object for whose bytes it should have
        waited."""
        where = self._agents.get((self.shared.geometry.cluster_of(lane), agent))
        if where is None or where not in self.objects:
            return ""
        found = self.objects[where]
        phase, position = found.refused.get(lane, (-1, 0))
        if phase == found.state.phase:
            return (
                f"\n    {found.state};\n    this thread has asked at {self.log.site(position)},\n"
                "    where the answer may be no at any time: ask again until it is yes"
            )
        if lane not in found.seen:
            return f"\n    {found.state}; this thread has not waited for it"
        phases, position = found.seen[lane]
        text = f"its last wait, at {self.log.site(position)}, "
        if phases:
            text += f"was for phase {phases - 1} (parity {(phases - 1) % 2})"
        else:
            text += "was for parity 1, which holds before phase 0 is complete"
        return f"\n    {found.state};\n    {text}"


def _is_over(state: Mbarrier, value: int, parity: bool) -> bool:
    return state.is_complete_parity(value) if parity else state.is_complete(value)


def _most_of_a_warp(lanes: np.ndarray) -> int:
    """The number of lanes in the warp that has most of them."""
    return int(np.bincount(lanes // WARP).max())


def _distinct(values: np.ndarray) -> list[int]:
    """The different values."""
    return values[:1].tolist() if (values == values[0]).all() else np.unique(values).tolist()


def _groups(places: np.ndarray) -> Sequence[tuple[int, np.ndarray]]:
    """Each place, and which lanes name it."""
    return _groups_in(places.tobytes())


@lru_cache(maxsize=1024)
def _groups_in(places: bytes) -> Sequence[tuple[int, np.ndarray]]:
    """As `_groups`, of the bytes of the places, which are few: those of a ring come again."""
    of = np.frombuffer(places, np.int64)
    return [(where, np.flatnonzero(of == where)) for where in np.unique(of).tolist()]
