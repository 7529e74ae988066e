"""Warp roles: a kernel whose warps take different ways. Standard library only.

Warps that run the same loops have one role. The loops of a warp follow from the branches that its
number decides (`warp_values`), its registers from USETMAXREG on the way to its loop. A loop that
only waits, for an mbarrier or for registers, is a wait and does not count as a loop.

A warp is taken to run each loop that it may reach, with two exceptions. It is not known whether a
warp runs a loop

- where the loop is one of several to which a branch leads, by a value in which warps may differ, or
  that only some of the warps at the branch are known to have;
- where a branch may pass it by, by such a value: one that memory told at an address of the warp's
  own, an atomic, a clock (`divergence`), or a computation from the thread's number that is not
  followed here.

A branch that all warps of a block take the same way leaves the roles as they are: they are those
of a block that runs the loop. So does a branch that compares the thread's number with a size of the
launch, as where rows of a matrix end: the roles are those of a block that is full. How many turns
of a loop a warp makes is not told, and the end of a turn is no such branch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from flash_helpers.gpu import WARP
from flash_helpers.sass.analyse.phases import is_replay, is_wait, working_loop
from flash_helpers.sass.analyse.slices import last_of
from flash_helpers.sass.analyse.warp_values import Decision, WarpWays, ways_of_warps
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import COMPUTED_JUMPS, may_execute, reach
from flash_helpers.sass.read.records import Kernel, Loop

PRODUCER = "producer"
CONSUMER = "consumer"
OTHER = "other"
IDLE = "idle"
UNKNOWN = "not known"

_COPIES = frozenset({"UTMALDG", "UBLKCP", "LDGSTS"})  # to shared memory


@dataclass(frozen=True)
class Role:
    """Warps of a thread block that run the same loops.

    `name`: "consumer" for warps with tensor instructions in a loop, "producer" for warps that copy
    to shared memory in a loop, "idle" for warps without a loop, "other" for the rest; with a number
    where there are several roles of one name. It is "not known" if that is not known of the loop
    where the work is. `warps`: numbers of the warps. `registers`: registers per thread in the
    working loop, or else at the end; None if several limits may be in force there. `loops`: indices
    of those that the warps may run, without waits and replays. `waits`: number of waits.
    `working_loop`: index of the loop where the tensor instructions, or else the copies, or else
    most instructions are; None without loops, and if the role is not known. `unsure`: indices of
    the loops of which it is not known whether each of the warps runs them, for a `reason`.
    """

    name: str
    warps: tuple[int, ...]
    registers: int | None
    loops: tuple[int, ...]
    waits: int
    working_loop: int | None
    unsure: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the loop is known where the warps work, or that they have none."""
        return self.working_loop is not None or not self.loops


def roles(kernel: Kernel, threads: int) -> tuple[Role, ...]:
    """The roles of a kernel's warps, by their first warps; empty if all warps run the same loops.
    `threads`: threads per block."""
    if not kernel.loops or threads <= WARP:
        return ()
    ways = ways_of_warps(kernel, threads, -(-threads // WARP))
    working = [n for n in kernel.loops if not is_wait(kernel, n) and not is_replay(kernel, n)]
    doubts = _doubts(kernel, working, ways)
    warps: dict[tuple[tuple[int, ...], _Doubt], list[int]] = defaultdict(list)
    for warp, (own, doubt) in enumerate(zip(ways, doubts, strict=True)):
        run = tuple(loop.index for loop in working if doubt.is_lost or loop.header in own.limits)
        warps[run, doubt.of(run)].append(warp)
    if len(warps) == 1 and not any(doubt.loops for _, doubt in warps):
        return ()
    found = [
        _role(kernel, [ways[warp] for warp in own], own, loops, doubt)
        for (loops, doubt), own in warps.items()
    ]
    return tuple(_numbered(found))


@dataclass(frozen=True)
class _Doubt:
    """Loops of which it is not known whether a warp runs them. `reason`: of the first of them.
    `is_lost`: whether the warp may go anywhere."""

    loops: frozenset[int] = frozenset()
    reason: str = ""
    is_lost: bool = False

    def __or__(self, other: _Doubt) -> _Doubt:
        return _Doubt(
            self.loops | other.loops, self.reason or other.reason, self.is_lost or other.is_lost
        )

    def of(self, loops: Collection[int]) -> _Doubt:
        """The doubt about some of the loops."""
        return replace(self, loops=self.loops.intersection(loops)) if self.loops else _Doubt()


def _role(
    kernel: Kernel,
    ways: Sequence[WarpWays],
    warps: Sequence[int],
    loops: tuple[int, ...],
    doubt: _Doubt,
) -> Role:
    blocks = frozenset[int]().union(*(own.limits for own in ways))
    tensor: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    own: Counter[int] = Counter()
    for i in kernel.instructions:
        if i.block not in blocks or not may_execute(i):
            continue
        loop = i.loop
        while loop is not None and loop not in loops:
            loop = kernel.loops[loop].parent
        if loop is not None:
            own[loop] += 1
            tensor[loop] += opcodes.classify(i.opcode) == opcodes.TENSOR
            copies[loop] += i.base in _COPIES
    name, work = (OTHER, own) if own else (IDLE, own)
    if any(tensor.values()):
        name, work = CONSUMER, tensor
    elif any(copies.values()):
        name, work = PRODUCER, copies
    busiest = working_loop([kernel.loops[n] for n in loops], work, own)
    is_known = busiest is None or busiest.index not in doubt.loops
    return Role(
        name=name if is_known else UNKNOWN,
        warps=tuple(warps),
        registers=_registers(kernel, ways, busiest),
        loops=loops,
        waits=sum(is_wait(kernel, loop) and loop.header in blocks for loop in kernel.loops),
        working_loop=busiest.index if busiest and is_known else None,
        unsure=tuple(sorted(doubt.loops)),
        reason=doubt.reason,
    )


def _registers(kernel: Kernel, ways: Sequence[WarpWays], loop: Loop | None) -> int | None:
    """Registers per thread in a loop, or else where the warps end; None if that is not one
    number."""
    found = {n for own in ways for n in ([own.limits.get(loop.header)] if loop else own.at_exit)}
    limit = found.pop() if len(found) == 1 else None
    return kernel.resources.registers if limit == 0 else limit


def _doubts(kernel: Kernel, working: Sequence[Loop], ways: Sequence[WarpWays]) -> list[_Doubt]:
    """Of each warp, the loops of which it is not known whether it runs them."""
    found = [_Doubt()] * len(ways)
    for n in sorted({n for own in ways for n in own.decisions}):
        made = {warp: own.decisions[n] for warp, own in enumerate(ways) if n in own.decisions}
        open_ = [warp for warp in made if not made[warp].known]
        last = last_of(kernel, kernel.blocks[n])
        where = f"{last.text!r} at {last.address:#06x}"
        if last.base in COMPUTED_JUMPS and not kernel.blocks[n].successors:
            loops = frozenset(loop.index for loop in working)
            told = _Doubt(loops, f"the targets of {where} are not told", is_lost=True)
            in_doubt = [*made]
        elif open_:
            told = _doubt(kernel, working, n, made[open_[0]], len(open_), len(made), where)
            in_doubt = open_
        else:
            continue
        for warp in in_doubt:
            found[warp] |= told
    return found


def _doubt(
    kernel: Kernel,
    working: Sequence[Loop],
    block: int,
    decision: Decision,
    unknown: int,
    made: int,
    where: str,
) -> _Doubt:
    """The loops of which it is not known which warps run them because a decision is not known.

    These are the loops to which one way leads and another does not, before it comes back around a
    loop. `unknown`, `made`: the number of warps of which the decision is not known, and of those
    that make it; a warp alone does not differ. `where`: the jump, in words. The end of a loop's
    turn is no such decision.
    """
    around = [loop for loop in kernel.loops if block in loop.blocks]
    headers = {loop.header for loop in around}
    number = len(decision.ways) + decision.may_end
    if any(0 < sum(n in loop.blocks for n in decision.ways) < number for loop in around):
        return _Doubt()

    def following(n: int) -> list[int]:
        return [m for m in kernel.blocks[n].successors if m not in headers]

    led: list[set[int]] = [set()] * decision.may_end
    for way in decision.ways:
        reached = reach(way, following) if way not in headers else set()
        led.append({loop.index for loop in working if loop.header in reached})
    common: set[int] = set.intersection(*led)
    own = sorted({loop for loops in led for loop in loops - common})
    differs = decision.origin.differs
    apart = any(a - b and b - a for a in led for b in led)
    if apart and made > 1 and (differs or unknown < made):
        ways = f"loops {', '.join(map(str, own[:-1]))} or {own[-1]}"
        return _Doubt(frozenset(own), f"{where} leads to {ways}, by a value that is not known")
    if own and unknown > 1 and differs and not decision.origin.is_size:
        skipped = numbers_text("loop", own)
        told = f"{where} may skip {skipped}, by a value in which warps may differ"
        return _Doubt(frozenset(own), told)
    return _Doubt()


def numbers_text(name: str, numbers: Sequence[int]) -> str:
    """Numbers in words, such as "warp 0" or "warps 4 to 11"; the numbers ascend."""
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{name}s {numbers[0]} to {numbers[-1]}"
    return f"{name}s {', '.join(map(str, numbers))}"


def _numbered(found: Sequence[Role]) -> Iterator[Role]:
    total = Counter(role.name for role in found)
    seen: Counter[str] = Counter()
    for role in found:
        seen[role.name] += 1
        several = total[role.name] > 1
        yield replace(role, name=f"{role.name} {seen[role.name]}") if several else role
