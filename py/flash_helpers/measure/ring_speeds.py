"""Records of attention on a sequence that several GPUs share. Standard library and msgspec only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.console.tables import DASH, Table, number, percent
from flash_helpers.measure.results import Provenance, RecordFile

ONE, RING = "one GPU", "ring"
PYTORCH = {
    "PyTorch's context parallel, flash": "FLASH_ATTENTION",
    "PyTorch's context parallel, cuDNN": "CUDNN_ATTENTION",
}
"""PyTorch's context parallel, with the `SDPBackend` that it runs on."""
FORWARD, BOTH = "forward", "forward and backward"
_OF_BOTH = 3.5  # operations of both passes over those of the forward pass


@dataclass(frozen=True)
class RingSpeed:
    """A contender on a problem.

    ranks: GPUs that share the sequence. tokens: of each GPU. samples_ms: of a call, in each round,
    on the slowest rank. transfers_ms, stalls_ms: of all transfers of a call, and of the waits of
    the kernels for them, by events on that rank; empty where nothing is recorded. memory_bytes:
    most that a rank held, with its shards of the inputs. relative_error: the largest of o and, with
    both passes, of the gradients, beside one GPU on the whole sequence; None where that was left
    out. repeats: whether a second call gave the same bits.
    not_run: the reason, if it was not measured.
    """

    name: str
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    d_head: int
    dtype: str
    causal: bool
    passes: str
    samples_ms: tuple[float, ...] = ()
    transfers_ms: tuple[float, ...] = ()
    stalls_ms: tuple[float, ...] = ()
    memory_bytes: int = 0
    relative_error: float | None = None
    repeats: bool | None = None
    not_run: str = ""

    @property
    def problem(self) -> tuple[int, int, int, int, str, bool, str]:
        """The sizes and options that a contender shares with one GPU of as many tokens."""
        sizes = self.tokens, self.heads, self.kv_heads, self.d_head
        return (*sizes, self.dtype, self.causal, self.passes)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's shards of q, k, v and dO."""
        return 4 * self.tokens * (self.heads + self.kv_heads) * self.d_head

    @property
    def operations(self) -> float:
        """Floating-point operations of one GPU: its queries on the keys of all."""
        keys = self.ranks * self.tokens * (0.5 if self.causal else 1.0)
        forward = 4.0 * self.tokens * keys * self.heads * self.d_head
        return forward * (_OF_BOTH if self.passes == BOTH else 1.0)

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of each GPU, by the median; None if it was not measured."""
        if not self.samples_ms:
            return None
        return self.operations / statistics.median(self.samples_ms) / 1e9

    @property
    def hidden(self) -> float | None:
        """The share of the time of transfers for which no kernel waited; None without events."""
        whole = sum(self.transfers_ms)
        return 1.0 - sum(self.stalls_ms) / whole if whole else None

    @property
    def link(self) -> float | None:
        """GB/s of the transfers of a forward pass, K and V to the next rank, with the waits for
        one another around them; None without events, and for both passes."""
        if not self.transfers_ms or self.passes != FORWARD:
            return None
        sent = (self.ranks - 1) * 4 * self.tokens * self.kv_heads * self.d_head
        return sent / statistics.median(self.transfers_ms) / 1e6


@dataclass(frozen=True)
class RingSpeeds(RecordFile):
    """Everything that one run measured.

    sample_ms: least time of a round's calls. simulated: kernels ran in the simulator, whose times
    mean nothing.
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "speeds of sequences that several GPUs share"

    provenance: Provenance
    rounds: int
    sample_ms: float
    simulated: bool
    speeds: tuple[RingSpeed, ...]

    def table(self) -> Table:
        """One row per measurement: TFLOP/s of each GPU, over those of one GPU with as many tokens,
        the share of transfers that is hidden, and memory; or the reason why there is none. A
        simulator has no times."""
        has_gaps = any(found.not_run for found in self.speeds)
        known = () if self.simulated else self.speeds
        ones = {found.problem: found.tflops for found in known if found.name == ONE}
        rows = []
        for found in self.speeds:
            mask = "causal" if found.causal else "none"
            sizes = [f"{found.ranks * found.tokens:,}", mask, found.passes, str(found.ranks)]
            one, own = ones.get(found.problem), None if self.simulated else found.tflops
            cells = [
                number(own, 0),
                number(own / one, 2) if own and one else DASH,
                percent(found.hidden, 0),
                f"{found.memory_bytes / 2**30:.1f}" if found.memory_bytes else DASH,
                *([found.not_run or DASH] if has_gaps else []),
            ]
            rows.append([found.name, *sizes, *cells])
        header = [
            *("", "sequence", "mask", "passes", "GPUs", "TFLOP/s per GPU", "of one GPU"),
            *("hidden", "GiB per GPU", *(["not run"] if has_gaps else [])),
        ]
        return Table(header, rows)

    def markdown(self) -> str:
        """Markdown of the table, and of the machine and software of the measurement."""
        found = self.provenance
        links = [link for speed in self.speeds if (link := speed.link) is not None]
        told = f"K and V travel at up to {max(links):.0f} GB/s. " if links else ""
        facts = [found.built_with, f"PyTorch {found.torch}"]
        facts.append(f"medians of {self.rounds} rounds of {self.sample_ms:g} ms, in turns")
        return f"{self.table().markdown()}\n\n{told}{found.sentence(*facts)}"
