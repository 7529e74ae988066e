"""Cost of a ring of GPUs that share a sequence, by arithmetic. Standard library only.

Nothing here is measured: bandwidths are those of data sheets, and speeds are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.console.tables import Table, number

GPUS_PER_NODE = 8
_HALF, _FLOAT = 2, 4  # bytes of an element


@dataclass(frozen=True)
class Machine:
    """Speeds of a GPU and its links. Defaults are those of an H200 in a node of 8.

    forward, backward: speed of the kernels in TFLOP/s, assumed: round numbers below those that
    `attention()` reaches on one H200 at 16,384 tokens. nvlink: GB/s of a GPU in one direction,
    half of 900 (NVIDIA H200 data sheet). network: GB/s of a GPU in one direction, a port of
    400 Gbit/s for each. memory: GB/s (NVIDIA H200 data sheet). reached: assumed share of these
    bandwidths.
    """

    forward: float = 700.0
    backward: float = 600.0
    nvlink: float = 450.0
    network: float = 50.0
    memory: float = 4800.0
    reached: float = 0.8

    def link(self, ranks: int) -> float:
        """Return the GB/s of the slowest link of a ring, with the share that is reached."""
        return self.reached * (self.nvlink if ranks <= GPUS_PER_NODE else self.network)


@dataclass(frozen=True)
class Step:
    """One of the steps of a ring in one rank: a rank's queries on the keys of one rank.

    operations: of the kernels, in the mean over the steps. sent: bytes to the next rank. merged:
    bytes of memory that merging and adding cost beside the kernels.
    """

    operations: float
    sent: float
    merged: float

    @property
    def bytes_per_operation(self) -> float:
        """Bytes sent for each operation."""
        return self.sent / self.operations


@dataclass(frozen=True)
class Shape:
    """The shard of a rank. tokens: of a rank, queries and keys. causal: balanced, so that each
    rank has half of the work of all keys."""

    tokens: int
    heads: int = 16
    kv_heads: int = 16
    d_head: int = 128
    causal: bool = True

    def forward(self) -> Step:
        """Two products; K and V travel in 16 bits. Merging reads o of the step, and behind the last
        step writes o."""
        own = self.tokens * self.heads * self.d_head
        of_keys = self.tokens * self.kv_heads * self.d_head
        merged = own * 2 * _HALF  # for one step, the most
        return Step(4 * own * self.tokens * self._share, 2 * _HALF * of_keys, merged)

    def backward(self) -> Step:
        """Five products; dK and dV travel with K and V, in fp32. Sums of dQ, dK and dV are read
        and written for the gradients of each step."""
        own = self.tokens * self.heads * self.d_head
        of_keys = self.tokens * self.kv_heads * self.d_head
        sent = 2 * (_HALF + _FLOAT) * of_keys
        merged = (own + 2 * of_keys) * (_HALF + 2 * _FLOAT)
        return Step(10 * own * self.tokens * self._share, sent, merged)

    @property
    def _share(self) -> float:
        return 0.5 if self.causal else 1.0


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step: of its kernels, its transfer and its sums."""

    kernels: float
    transfer: float
    sums: float

    @property
    def exposed(self) -> float:
        """Milliseconds of the transfer that no kernel hides."""
        return max(0.0, self.transfer - self.kernels - self.sums)


def times(step: Step, speed: float, ranks: int, machine: Machine) -> Times:
    """Return the times of a step with kernels of so many TFLOP/s."""
    return Times(
        step.operations / speed / 1e9,
        step.sent / machine.link(ranks) / 1e6,
        step.merged / (machine.reached * machine.memory) / 1e6,
    )


def share_of_one(shape: Shape, ranks: int, machine: Machine, *, backward: bool) -> float:
    """Return the speed of each GPU of a ring over that of one GPU with as many tokens.

    backward: of both passes; otherwise of the forward pass. The sums of dK and dV make one more
    hop, in 16 bits, which nothing hides.
    """
    passes = [times(shape.forward(), machine.forward, ranks, machine)]
    last_hop = 0.0
    if backward:
        step = shape.backward()
        passes.append(times(step, machine.backward, ranks, machine))
        last_hop = step.sent * _HALF / (_HALF + _FLOAT) / machine.link(ranks) / 1e6
    kernels = ranks * sum(of_pass.kernels for of_pass in passes)
    whole = kernels + ranks * sum(of_pass.sums for of_pass in passes)
    whole += (ranks - 1) * sum(of_pass.exposed for of_pass in passes)
    return kernels / (whole + last_hop)


def least_tokens(shape: Shape, speed: float, bandwidth: float, step: Step) -> float:
    """Return the tokens per rank from which a transfer is hidden: operations grow by the square of
    the tokens, bytes by the tokens. bandwidth: GB/s. step: of `shape`."""
    kernels, transfer = step.operations / speed / 1e3, step.sent / bandwidth
    return shape.tokens * transfer / kernels


# -- tables ----------------------------------------------------------------------------------------

_TOKENS = (2048, 8192, 32768, 131072)
_RANKS = (8, 64, 512)


def bytes_table(machine: Machine = Machine()) -> Table:
    """One row per number of tokens: bytes sent for each million operations, and the times of a
    step over NVLink."""
    rows = []
    for tokens in _TOKENS:
        shape = Shape(tokens)
        forward, backward = shape.forward(), shape.backward()
        both = [
            times(step, speed, GPUS_PER_NODE, machine)
            for step, speed in ((forward, machine.forward), (backward, machine.backward))
        ]
        rows.append(
            [
                f"{tokens:,}",
                *(number(1e6 * step.bytes_per_operation, 1) for step in (forward, backward)),
                *(f"{of.kernels:.2f} / {of.transfer:.2f} / {of.sums:.2f}" for of in both),
            ]
        )
    header = [
        "tokens per GPU",
        *("B per MFLOP, forward", "backward"),
        *("forward: kernels / transfer / sums, ms", "backward"),
    ]
    return Table(header, rows)


def hidden_table(machine: Machine = Machine()) -> Table:
    """One row per link, mask and heads: tokens per GPU from which transfers are hidden."""
    rows = []
    for link, gb_s in (("NVLink", machine.nvlink), ("network", machine.network)):
        for causal in (False, True):
            found = []
            for kv_heads in (16, 2):
                shape = Shape(1024, kv_heads=kv_heads, causal=causal)
                for step, speed in (
                    (shape.forward(), machine.forward),
                    (shape.backward(), machine.backward),
                ):
                    least = least_tokens(shape, speed, machine.reached * gb_s, step)
                    found.append(f"{least:,.0f}")
            rows.append([link, "causal" if causal else "none", *found])
    header = ["link", "mask", "forward", "backward", "forward, 2 heads of K and V", "backward"]
    return Table(header, rows)


def scale_table(machine: Machine = Machine()) -> Table:
    """One row per number of GPUs and of tokens per GPU: the speed of each GPU over that of one."""
    rows = []
    for ranks in _RANKS:
        link = "NVLink" if ranks <= GPUS_PER_NODE else "network"
        for tokens in _TOKENS:
            shares = [
                share_of_one(shape, ranks, machine, backward=backward)
                for shape in (Shape(tokens), Shape(tokens, kv_heads=2))
                for backward in (False, True)
            ]
            cells = (number(share, 2) for share in shares)
            rows.append([str(ranks), f"{tokens:,}", f"{ranks * tokens:,}", link, *cells])
    header = [
        *("GPUs", "tokens per GPU", "sequence", "slowest link", "forward", "both passes"),
        *("forward, 2 heads of K and V", "both passes"),
    ]
    return Table(header, rows)
