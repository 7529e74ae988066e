"""Lower bounds for warps of several roles that share the pipes of an SM. Standard library only.

An SM executes the loops of all roles side by side, so that its pipes and issue slots take the sum
of what the roles ask for. How often one role turns its loop while another turns its own is not
known, and the sums are those of one iteration of each.

A warp issues from one of the SM's four sub-partitions, which it never leaves, and most pipes are
split among them: roles of unequal size leave some idle while others queue. Warp w of a block issues
from the sub-partition of warp w mod 4. On an H100, with blocks of 10 and of 12 warps, ex2.approx in
warp 0 takes twice as long if warp 4 or 8 executes it too, and no longer with any other warp. The
blocks of an SM begin in different sub-partitions: warps 0 of four blocks of 12 warps do not slow
each other. So the sub-partitions are told apart for one block only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from flash_helpers.gpu import SUB_PARTITIONS
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY, loop_bound
from flash_helpers.sass.analyse.roles import Role
from flash_helpers.sass.read.records import Kernel

_OF_SUB_PARTITIONS = frozenset({ISSUE, "tensor", "fma", "fmaheavy", "alu", "fp16", "xu"})


def together(kernel: Kernel, roles: Sequence[Role], blocks: int) -> Mapping[str, float] | None:
    """Least cycles of an SM for one iteration of the working loop of each role, in all its resident
    blocks: by pipe, "issue" and "latency", the highest first. None for fewer than two roles with a
    loop, and where a role, or the cost of a tensor instruction, is not known."""
    working = [role for role in roles if role.working_loop is not None]
    if len(working) < 2 or not all(role.is_known for role in roles):
        return None
    # by limit, what each sub-partition is asked for by one block
    asked: dict[str, list[float]] = defaultdict(lambda: [0.0] * SUB_PARTITIONS)
    latency = 0.0
    for role in working:
        assert role.working_loop is not None
        bound = loop_bound(kernel, kernel.loops[role.working_loop])
        if not bound.tells_tensor:
            return None
        latency = max(latency, bound.latency)
        for name, cycles in {**bound.pipes, ISSUE: bound.issue}.items():
            for warp in role.warps:
                asked[name][warp % SUB_PARTITIONS] += cycles
    found = {LATENCY: latency}
    for name, each in asked.items():
        shared = blocks == 1 and name in _OF_SUB_PARTITIONS
        found[name] = blocks * (SUB_PARTITIONS * max(each) if shared else sum(each))
    return dict(sorted(found.items(), key=lambda item: -item[1]))
