"""Warp roles: a kernel whose warps take different ways. Standard library only.

Warps that run the same loops have one role. The loops of a warp follow from the branches that its
number decides (`warp_values`), its registers from USETMAXREG. A loop that only waits, for an
mbarrier or for registers, is a wait and does not count as a loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from flash_helpers.gpu import WARP
from flash_helpers.sass.analyse.phases import is_replay, is_wait, working_loop
from flash_helpers.sass.analyse.warp_values import blocks_of_warps, is_one_dimensional
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.records import Kernel

PRODUCER = "producer"
CONSUMER = "consumer"
OTHER = "other"
IDLE = "idle"

_COPIES = frozenset({"UTMALDG", "UBLKCP", "LDGSTS"})  # to shared memory


@dataclass(frozen=True)
class Role:
    """Warps of a thread block that run the same loops.

    `name`: "consumer" for warps with tensor instructions in a loop, "producer" for warps that copy
    to shared memory in a loop, "idle" for warps without a loop, "other" for the rest; with a number
    where there are several roles of one name. `warps`: their numbers. `registers`: registers per
    thread after USETMAXREG. `loops`: indices, without waits and replays. `waits`: number of waits.
    `working_loop`: index of the loop where the tensor instructions, or else the copies, or else
    most instructions are; None without loops.
    """

    name: str
    warps: tuple[int, ...]
    registers: int
    loops: tuple[int, ...]
    waits: int
    working_loop: int | None


def roles(kernel: Kernel, threads: int) -> tuple[Role, ...]:
    """The roles of a kernel's warps, by their first warps; empty if all warps run the same loops,
    or if the roles cannot be told, as for blocks of more than one dimension. `threads`: threads per
    block."""
    if not kernel.loops or threads <= WARP or not is_one_dimensional(kernel):
        return ()
    working = [n for n in kernel.loops if not is_wait(kernel, n) and not is_replay(kernel, n)]
    warps: dict[tuple[int, ...], list[int]] = defaultdict(list)
    blocks: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for warp, reached in enumerate(blocks_of_warps(kernel, -(-threads // WARP))):
        run = tuple(loop.index for loop in working if loop.header in reached)
        warps[run].append(warp)
        blocks[run] |= reached
    if len(warps) == 1:
        return ()
    return tuple(_numbered([_role(kernel, blocks[run], warps[run], run) for run in warps]))


def _role(
    kernel: Kernel, blocks: Collection[int], warps: Sequence[int], loops: tuple[int, ...]
) -> Role:
    tensor: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    own: Counter[int] = Counter()
    registers = kernel.resources.registers
    for i in kernel.instructions:
        if i.block not in blocks or not may_execute(i):
            continue
        if i.base == "USETMAXREG":
            registers = int(i.operands.split(",")[-1], 16)
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
        name=name,
        warps=tuple(warps),
        registers=registers,
        loops=loops,
        waits=sum(is_wait(kernel, loop) and loop.header in blocks for loop in kernel.loops),
        working_loop=busiest.index if busiest else None,
    )


def _numbered(found: Sequence[Role]) -> Iterator[Role]:
    total = Counter(role.name for role in found)
    seen: Counter[str] = Counter()
    for role in found:
        seen[role.name] += 1
        several = total[role.name] > 1
        yield replace(role, name=f"{role.name} {seen[role.name]}") if several else role
