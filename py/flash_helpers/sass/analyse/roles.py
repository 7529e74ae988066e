"""Warp roles: a kernel whose warps take different ways. Standard library only.

Warps that run the same loops have one role. The loops of a warp follow from the branches that its
number decides (`warp_values`), its registers from USETMAXREG on the way to its loop. A loop that
only waits, for an mbarrier or for registers, is a wait and does not count as a loop.

A role is not known where a branch leads to different loops, and the code does not tell which way a
warp takes, though warps may take different ones: where the branch depends on the thread's number,
or where it is decided for other warps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flash_helpers.gpu import WARP
from flash_helpers.sass.analyse.phases import is_replay, is_wait, working_loop
from flash_helpers.sass.analyse.warp_values import Decision, WarpWays, ways_of_warps
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import COMPUTED_JUMPS, may_execute, reach
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Kernel, Loop

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
    where there are several roles of one name. It is "not known" where `reason` tells why. `warps`:
    numbers of the warps. `registers`: registers per thread in the working loop, or else at the end;
    None if several limits may be in force there. `loops`: indices, without waits and replays; of a
    role that is not known, those that it may run. `waits`: number of waits. `working_loop`: index
    of the loop where the tensor instructions, or else the copies, or else most instructions are;
    None without loops, and if the role is not known.
    """

    name: str
    warps: tuple[int, ...]
    registers: int | None
    loops: tuple[int, ...]
    waits: int
    working_loop: int | None
    reason: str = ""


def roles(kernel: Kernel, threads: int) -> tuple[Role, ...]:
    """The roles of a kernel's warps, by their first warps; empty if all warps run the same loops.
    `threads`: threads per block."""
    if not kernel.loops or threads <= WARP:
        return ()
    ways = ways_of_warps(kernel, threads, -(-threads // WARP))
    working = [n for n in kernel.loops if not is_wait(kernel, n) and not is_replay(kernel, n)]
    reasons = _reasons(kernel, working, ways)
    warps: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for warp, (own, reason) in enumerate(zip(ways, reasons, strict=True)):
        run = tuple(loop.index for loop in working if loop.header in own.limits)
        warps[run, reason].append(warp)
    if len(warps) == 1 and not any(reasons):
        return ()
    found = [
        _role(kernel, [ways[warp] for warp in own], own, loops, reason)
        for (loops, reason), own in warps.items()
    ]
    return tuple(_numbered(found))


def _role(
    kernel: Kernel,
    ways: Sequence[WarpWays],
    warps: Sequence[int],
    loops: tuple[int, ...],
    reason: str,
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
    return Role(
        name=UNKNOWN if reason else name,
        warps=tuple(warps),
        registers=_registers(kernel, ways, busiest),
        loops=loops,
        waits=sum(is_wait(kernel, loop) and loop.header in blocks for loop in kernel.loops),
        working_loop=busiest.index if busiest and not reason else None,
        reason=reason,
    )


def _registers(kernel: Kernel, ways: Sequence[WarpWays], loop: Loop | None) -> int | None:
    """Registers per thread in a loop, or else where the warps end; None if that is not one
    number."""
    found = {n for own in ways for n in ([own.limits[loop.header]] if loop else own.at_exit)}
    limit = found.pop() if len(found) == 1 else None
    return kernel.resources.registers if limit == 0 else limit


def _reasons(kernel: Kernel, working: Sequence[Loop], ways: Sequence[WarpWays]) -> list[str]:
    """Of each warp, the reason for which its role is not known; "" if it is."""
    found = [""] * len(ways)
    for n in sorted({n for own in ways for n in own.decisions}):
        last = kernel.instructions[kernel.blocks[n].end // INSTRUCTION_BYTES - 1]
        made = {warp: own.decisions[n] for warp, own in enumerate(ways) if n in own.decisions}
        where = f"{last.text!r} at {last.address:#06x}"
        if last.base in COMPUTED_JUMPS and not kernel.blocks[n].successors:
            told = f"the targets of {where} are not told"
            found = [reason or (told if warp in made else "") for warp, reason in enumerate(found)]
            continue
        open_ = {warp: made[warp] for warp in made if not made[warp].known}
        differ = len(open_) < len(made) or any(decision.varies for decision in open_.values())
        if not open_ or not differ:
            continue
        loops = _alternatives(kernel, working, n, next(iter(open_.values())))
        if loops:
            told = f"{where} leads to {loops}, by a value that is not known"
            found = [reason or (told if warp in open_ else "") for warp, reason in enumerate(found)]
    return found


def _alternatives(kernel: Kernel, working: Sequence[Loop], block: int, decision: Decision) -> str:
    """The loops between which a branch decides, in words; "" if it decides between none: each way
    must lead to a loop that another way does not lead to, before it comes back around a loop. The
    end of a loop's turn is no such branch."""
    around = [loop for loop in kernel.loops if block in loop.blocks]
    headers = {loop.header for loop in around}
    if any(
        0 < sum(n in loop.blocks for n in decision.ways) < len(decision.ways) for loop in around
    ):
        return ""

    def following(n: int) -> list[int]:
        return [m for m in kernel.blocks[n].successors if m not in headers]

    led = []
    for way in decision.ways:
        reached = reach(way, following) if way not in headers else set()
        led.append({loop.index for loop in working if loop.header in reached})
    common = set.intersection(*led) if led else set()
    own = sorted({loop for loops in led for loop in loops - common})
    apart = any(a - b and b - a for a in led for b in led)
    return f"loops {', '.join(map(str, own[:-1]))} or {own[-1]}" if apart else ""


def _numbered(found: Sequence[Role]) -> Iterator[Role]:
    total = Counter(role.name for role in found)
    seen: Counter[str] = Counter()
    for role in found:
        seen[role.name] += 1
        several = total[role.name] > 1
        yield replace(role, name=f"{role.name} {seen[role.name]}") if several else role
