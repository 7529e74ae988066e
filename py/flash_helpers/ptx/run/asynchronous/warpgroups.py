"""The products of `wgmma` of a batch, from issue to retirement (PTX ISA 9.0, "Asynchronous
Warpgroup Level Matrix Multiply-Accumulate Instructions").

A warp issues a product and commits it to a group. From then on until the group retires the product
may read its matrices: an agent reads their bytes of shared memory, and no thread may touch its
registers (`wgmma_registers`). It is computed at the latest moment that is allowed, when the group
retires, separately for the 16 rows of each warp. With a seed it is computed at a random moment
before, once the warps that retire together have committed it.

The reads of products that follow each other, with nothing but arithmetic in between, are checked
and marked together (`Product.goes_on`).

A group retires for the whole warpgroup as soon as one of its warps has waited for it, and that warp
waits until all four have committed the group. Where warps retire alone (`strict`), each waits for
its own part, and a warp that has waited knows nothing of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import proxy

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    MatrixDescriptorError,
    OutOfBoundsError,
    SimulatorError,
    UnfinishedError,
    WarpgroupError,
)
from flash_helpers.ptx.read.flow import Program
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.asynchronous.products import (
    Chain,
    Factors,
    Issue,
    Product,
    lanes_of_warps,
)
from flash_helpers.ptx.run.asynchronous.together import WARPS, Together
from flash_helpers.ptx.run.asynchronous.transfers import CHANCE
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import WARP_ROWS
from flash_helpers.ptx.run.asynchronous.wgmma_registers import RegisterWatch
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.descriptors import CHUNK, MatrixOperand
from flash_helpers.ptx.run.watch.agents import AgentAccess
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.lints import Lints
from flash_helpers.ptx.run.watch.order import Knowledge
from flash_helpers.ptx.run.watch.poison import Poison
from flash_helpers.ptx.run.watch.shared import WatchedMemory


@dataclass(frozen=True)
class ComputedProduct:
    """A wgmma.mma_async that has just been computed for some warps, in float64.

    `blocks`: `ctaid` of each warp's block, (warps, 3). `warps`: numbered within their block. `a`:
    each warp's rows of A, (warps, 16, K), negated if the product is. `b`: each warp's B, (warps, K,
    N). `d`: each warp's rows of D after this product, (warps, 16, N). `issue`: the product as the
    warps have issued it.
    """

    instruction: Instruction
    blocks: np.ndarray
    warps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    d: np.ndarray
    issue: Issue

    @property
    def b_is_k_major(self) -> bool:
        """Whether elements along the depth are neighbours in B."""
        return self.issue.product.b_matrix.k_major

    def a_addresses(self, i: int) -> np.ndarray | None:
        """Return where the 16-byte chunks of a warp's rows of A lie in its block's shared memory,
        as `MatrixOperand.rows_at`; None for an A in registers."""
        matrix = self.issue.product.a_matrix
        if matrix is None:
            return None
        return _addresses(matrix, int(self.issue.a_bits[i]), 1 + int(self.warps[i]) % WARPS)

    def b_addresses(self, i: int) -> np.ndarray:
        """Return where the chunks of a warp's B lie, as `MatrixOperand.addresses`."""
        return _addresses(self.issue.product.b_matrix, int(self.issue.b_bits[i]), 0)


@dataclass(eq=False, repr=False)
class Warpgroups:
    """Products that the warps of a batch have issued and not retired. `show`: called with each
    product when it is computed."""

    geometry: Geometry
    program: Program
    shared: WatchedMemory
    poison: Poison
    log: FaultLog
    strict: bool
    random: np.random.Generator | None = None
    lints: Lints | None = None
    show: Callable[[ComputedProduct], None] | None = None

    def __post_init__(self) -> None:
        geometry, log = self.geometry, self.log
        self._factors = Factors(geometry, self.shared, self.poison)
        self.registers = RegisterWatch(self.program, geometry, log)
        self._together = Together(geometry, log, values=3)
        self.committed = np.zeros(self._together.ended.size, np.int64)
        """Groups that each warp has committed."""
        # By the owner, the warps that retire together: a warpgroup, or a warp.
        self._owner_of = self._together.group_of
        if self.strict:
            self._owner_of = np.arange(geometry.warps)
        self._issued: list[Issue] = []
        # Products computed early, until a warp has waited for them.
        self._early: list[Issue] = []
        # Products whose reads have not begun.
        self._unread: list[Issue] = []
        self._reads: dict[int, list[tuple[int, AgentAccess]]] = defaultdict(list)
        owners = int(self._owner_of.max()) + 1
        # Up to when the reads of each owner are over.
        self._over = np.zeros(owners, np.int64)
        # The agent of each owner, -1 before its first product.
        self._agents = np.full(owners, -1)
        weak = proxy(self)
        stories = self.shared.marks.stories
        stories.append(lambda agent, lane, position: weak._explain(agent, position))

    # -- instructions ------------------------------------------------------------------------------

    def fence(self, position: int, warps: np.ndarray) -> None:
        """wgmma.fence"""
        self._record(position, warps)
        self.registers.fence(warps)

    def commit(self, position: int, warps: np.ndarray) -> None:
        """wgmma.commit_group"""
        self._record(position, warps)
        self.committed[warps] += 1

    def may_wait(self, warps: np.ndarray, allowed: int) -> np.ndarray:
        """Whether a wgmma.wait_group for all but so many groups is over at once for each of the
        `warps`: the others of its warpgroup have committed what it waits for."""
        if self.strict:
            return np.ones(warps.size, bool)
        mates = self._together.mates[warps]
        target = self.committed[warps] - allowed
        return ((self.committed[mates] >= target[:, None]) | self._together.ended[mates]).all(1)

    def whom_it_awaits(self, warp: int, allowed: int) -> str:
        """Text for a warp that waits because `may_wait` is false for it."""
        target = self.committed[warp] - allowed
        mates = self._together.mates[warp]
        late = mates[self.committed[mates] < target] // len(self.geometry.blocks)
        return (
            f"for wgmma groups up to number {target} of their warpgroup, which warps "
            f"{', '.join(map(str, late))} have not committed"
        )

    def wait(self, position: int, warps: np.ndarray, allowed: int) -> None:
        """wgmma.wait_group"""
        self._record(position, warps)
        targets = self.committed[warps] - allowed
        owners = self._owner_of[warps]
        limits = np.zeros(self._over.size, np.int64)
        np.maximum.at(limits, owners, targets)
        self._compute(limits)
        self._early, _ = self._parted(self._early, limits)
        self.registers.waited(position, warps, self.committed[warps], allowed)
        if self.lints is not None:
            self.lints.wait(warps, targets)
        learned = []
        for owner in np.unique(owners).tolist():
            self._end_reads(owner, int(limits[owner]))
            known = np.zeros((1, self._agent_of(owner) + 1), np.int64)
            known[0, -1] = self._over[owner]
            learned.append((lanes_of_warps(warps[owners == owner]), [Knowledge(known)]))
        self.shared.order.acquire_each(learned)

    def issue(
        self,
        product: Product,
        warps: np.ndarray,
        a_bits: np.ndarray,
        b_bits: np.ndarray,
        adds: np.ndarray,
        metadata: np.ndarray,
    ) -> None:
        """wgmma.mma_async; the other arguments are as in `Issue`."""
        issue = Issue(product, warps, self.committed[warps], a_bits, b_bits, adds, metadata)
        found = self._record(product.position, warps, a_bits, b_bits, adds)
        wrong = (found[:, 0] != a_bits) | (found[:, 1] != b_bits)
        if wrong.any():
            self._report_descriptors(issue, found, wrong)
        others = found[:, 2] != adds
        if others.any():
            text = "its scale-d is not that of another warp of its warpgroup"
            self._report(WarpgroupError, text, product.position, warps, others)
        self.registers.issue(
            product.position,
            warps,
            issue.groups,
            product.n,
            product.d_fragments,
            product.a_fragments,
        )
        good = self._are_inside(issue)
        if product.sparsity is not None:
            meant = product.sparsity.is_valid(metadata)
            if not meant.all():
                text = "its metadata have fields other than 0b0100 and 0b1110"
                self._report(MatrixDescriptorError, text, product.position, warps, ~meant)
                good &= meant
        if not good.all():
            issue = issue.some(good)
        if good.any():
            self._issued.append(issue)
            self._unread.append(issue)
        if not product.goes_on:
            for _, alike in groupby(self._unread, lambda each: each.footprint):
                self._begin_reads(list(alike))
            self._unread.clear()

    def end(self, warps: np.ndarray) -> None:
        """All threads of warps end."""
        self._together.end(warps)
        for issue in (*self._early, *self._issued):
            open_ = np.isin(issue.warps, warps)
            if open_.any():
                text = "no wgmma.wait_group has waited for this when its warp ends"
                text += self._why_pending(issue, int(issue.warps[open_.argmax()]))
                position = issue.product.position
                self._report(UnfinishedError, text, position, issue.warps, open_)
                for owner in np.unique(self._owner_of[issue.warps[open_]]).tolist():
                    for _, access in self._reads[owner]:
                        self.shared.agents.forget(access)
        for issues in (self._early, self._issued):
            left = [i.some(~np.isin(i.warps, warps)) for i in issues]
            issues[:] = [i for i in left if i.warps.size]

    def step(self) -> None:
        """Computes, at random, some of the products that no warp has waited for."""
        if self.random is None or not self._issued or self.random.random() > CHANCE:
            return
        issue = self._issued[int(self.random.integers(len(self._issued)))]
        i = int(self.random.integers(issue.warps.size))
        owner, limit = self._owner_of[issue.warps[i]], issue.groups[i] + 1
        mates = self._owner_of == owner
        if (self.committed[mates] >= limit).all():
            limits = np.zeros(self._over.size, np.int64)
            limits[owner] = limit
            self._early += self._compute(limits)

    def _record(self, position: int, warps: np.ndarray, *values: np.ndarray) -> np.ndarray:
        none = np.zeros(warps.size, np.uint64)
        return self._together.record(position, warps, *(values or (none, none, none)))

    # -- what they read ----------------------------------------------------------------------------

    def _are_inside(self, issue: Issue) -> np.ndarray:
        """Reports invalid descriptors and those that reach beyond the block's shared memory;
        returns which warps have good ones."""
        good = np.ones(issue.warps.size, bool)
        product = issue.product
        for matrix, bits in ((product.a_matrix, issue.a_bits), (product.b_matrix, issue.b_bits)):
            if matrix is None:
                continue
            for each in sorted(set(bits[good].tolist())):
                kind: type[SimulatorError]
                try:
                    end = matrix.end(each)
                except ValueError as error:
                    kind, text, address = MatrixDescriptorError, str(error), None
                else:
                    if end <= self.shared.size:
                        continue
                    name = "A" if matrix is product.a_matrix else "B"
                    kind, address = OutOfBoundsError, end - CHUNK
                    text = f"{name} by {self.shared.outside(address, CHUNK)}"
                its = bits == each
                self._report(kind, text, product.position, issue.warps, its, address)
                good &= ~its
        return good

    def _begin_reads(self, issues: Sequence[Issue]) -> None:
        """Begin the reads of products of the same warps and shape: of B, by all warps of an owner
        that issue together, and of each warp's rows of A."""
        product, warps = issues[0].product, issues[0].warps
        owners = self._owner_of[warps]
        by_owner = np.argsort(owners, kind="stable")
        starts = np.flatnonzero(np.diff(owners[by_owner], prepend=-1))
        known = self.shared.order.common_knowledge(warps)
        of_owners = np.minimum.reduceat(known[:, by_owner], starts, axis=1)
        bits = np.stack([issue.b_bits for issue in issues])
        first = by_owner[starts]
        self._read(issues, first, of_owners, product.b_matrix, bits[:, first])
        if product.a_matrix is not None:
            bits = np.stack([issue.a_bits for issue in issues])
            self._read(issues, np.arange(warps.size), known, product.a_matrix, bits)

    def _read(
        self,
        issues: Sequence[Issue],
        which: np.ndarray,
        known: np.ndarray,
        matrix: MatrixOperand,
        bits: np.ndarray,
    ) -> None:
        """Reads of a matrix by products for some warps. `which`: these warps, (n,). `known`: what
        they rely on, (planes, n, columns). `bits`: their descriptors, (products, n)."""
        warps, count = issues[0].warps[which], len(issues)
        n_blocks = len(self.geometry.blocks)
        parts = np.zeros(warps.size, np.int64)
        if matrix is issues[0].product.a_matrix:
            parts = 1 + warps // n_blocks % WARPS
        named = zip(bits.reshape(-1).tolist(), np.tile(parts, count).tolist(), strict=True)
        addresses = [_addresses(matrix, *each) for each in named]
        blocks = np.tile(warps % n_blocks, count)
        chunks = np.stack(addresses).reshape(len(addresses), -1)
        granules = self.shared.granules_at(blocks, chunks, CHUNK)
        owners, number = np.unique(self._owner_of[warps], return_inverse=True)
        agents = np.array([self._agent_of(owner) for owner in owners.tolist()])
        begun, unwritten = self.shared.agents.begin_read(
            np.array([issue.product.position for issue in issues]).repeat(warps.size),
            np.tile(agents[number], count),
            np.tile(warps * WARP, count),
            np.tile(known, (1, count, 1)),
            granules,
            np.tile(number, count),
        )
        groups = np.zeros(owners.size, np.int64)
        groups[number] = issues[0].groups[which]
        for owner, group, access in zip(owners.tolist(), groups.tolist(), begun, strict=True):
            self._reads[owner].append((group, access))
        if unwritten is not None:
            self.poison.start()
        if self.lints is not None:
            step = warps.size
            for i, issue in enumerate(issues):
                these = slice(i * step, (i + 1) * step)
                self._lint(issue, which, addresses[these], granules[these], bits[i])

    def _lint(
        self,
        issue: Issue,
        which: np.ndarray,
        addresses: Sequence[np.ndarray],
        granules: np.ndarray,
        bits: np.ndarray,
    ) -> None:
        """Lints of the reads of a matrix by a product for some warps."""
        assert self.lints is not None
        position, warps = issue.product.position, issue.warps[which]
        self.lints.layouts.multiply(position, warps, bits.tolist(), addresses)
        # Of B each warp reads what the first of its owner does.
        i, j = np.nonzero(self._owner_of[issue.warps][:, None] == self._owner_of[warps])
        if which.size == issue.warps.size:
            i = j = np.arange(which.size)
        self.lints.multiply(position, issue.warps[i], issue.groups[i], granules[j])

    def _agent_of(self, owner: int) -> int:
        """The agent that reads for an owner."""
        if self._agents[owner] < 0:
            block, number = owner % len(self.geometry.blocks), owner // len(self.geometry.blocks)
            what = "warp" if self.strict else "warpgroup"
            self._agents[owner] = self.shared.order.agent(block, f"wgmma of {what} {number}")
        return int(self._agents[owner])

    def _end_reads(self, owner: int, limit: int) -> None:
        """Ends the reads of groups before a limit."""
        over = [access for group, access in self._reads[owner] if group < limit]
        if over:
            self._over[owner] = self.shared.agents.end(over)
            self._reads[owner] = [each for each in self._reads[owner] if each[0] >= limit]

    # -- what they compute -------------------------------------------------------------------------

    def _compute(self, limits: np.ndarray) -> list[Issue]:
        """Computes the products of all groups before a limit, by their owner; returns these
        products."""
        self._issued, due = self._parted(self._issued, limits)
        for _, alike in groupby(due, lambda issue: issue.chain):
            issues = list(alike)
            chain = Chain(issues[0], self.poison)
            for issue, (a, b, which) in zip(issues, self._factors.values(issues), strict=True):
                d = chain.add(issue, a, b, which)
                if self.show is not None:
                    self.show(self._computed(issue, a, b[which].transpose(0, 2, 1), d))
                if self.poison.active:
                    chain.add_poison(issue, *self._factors.codes(issue))
            chain.store()
        return due

    def _computed(
        self, issue: Issue, a: np.ndarray, b: np.ndarray, d: np.ndarray
    ) -> ComputedProduct:
        instruction = self.program.instructions[issue.product.position]
        geometry, lanes = self.geometry, issue.warps * WARP
        blocks = np.array(geometry.blocks)[geometry.block_of(lanes)]
        return ComputedProduct(instruction, blocks, geometry.warp_of(lanes), a, b, d, issue)

    def _parted(
        self, issues: Sequence[Issue], limits: np.ndarray
    ) -> tuple[list[Issue], list[Issue]]:
        """The products of groups from a limit on, by their owner, and the products before."""
        left, before = [], []
        for issue in issues:
            due = issue.groups < limits[self._owner_of[issue.warps]]
            if not due.all():
                left.append(issue if not due.any() else issue.some(~due))
            if due.any():
                before.append(issue if due.all() else issue.some(due))
        return left, before

    # -- what is said of it ------------------------------------------------------------------------

    def _why_pending(self, issue: Issue, warp: int) -> str:
        return self.registers.why_pending(int(issue.product.d_fragments[0]), warp)

    def _explain(self, agent: int, position: int) -> str:
        """Text for a lane that overwrites what a product reads, if a wait has missed it."""
        for issue in self._issued:
            agents = [self._agent_of(owner) for owner in self._owner_of[issue.warps].tolist()]
            if issue.product.position == position and agent in agents:
                return self._why_pending(issue, int(issue.warps[agents.index(agent)]))
        return ""

    def _report_descriptors(self, issue: Issue, found: np.ndarray, wrong: np.ndarray) -> None:
        i = int(wrong.argmax())
        name, own, other = "A", issue.a_bits[i], found[i, 0]
        if own == other:
            name, own, other = "B", issue.b_bits[i], found[i, 1]
        text = (
            f"the descriptor of {name} is {int(own):#018x}, that of another warp of its warpgroup "
            f"{int(other):#018x}"
        )
        self._report(MatrixDescriptorError, text, issue.product.position, issue.warps, wrong)

    def _report(
        self,
        kind: type[SimulatorError],
        text: str,
        position: int,
        warps: np.ndarray,
        bad: np.ndarray,
        address: int | None = None,
    ) -> None:
        """Reports a fault of some warps. `bad`: the warps at fault."""
        thread = self.geometry.thread(warps[bad.argmax()] * WARP)
        self.log.report(kind, text, position, thread, address, int(bad.sum()))


def _addresses(matrix: MatrixOperand, bits: int, part: int) -> np.ndarray:
    """Addresses of the chunks of a matrix, or of the rows of a warp: warp number `part` - 1."""
    if not part:
        return matrix.addresses(bits)
    return matrix.rows_at(bits, WARP_ROWS * (part - 1), WARP_ROWS)
