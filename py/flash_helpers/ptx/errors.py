"""Errors that arise while PTX is read, launched and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class PtxError(Exception):
    """Base of every error of this package."""


class PtxSyntaxError(PtxError, ValueError):
    """The text is not PTX that this reader understands, or it is cut off. file: whose text it is,
    if it is that of a file."""

    def __init__(self, message: str, line: int, file: str = "PTX") -> None:
        super().__init__(f"{file} line {line}: {message}")
        self.message = message
        self.line = line


class NotPtxError(PtxError, ValueError):
    """The file holds something else; the message says what, and what to do with that."""


class UnsupportedInstruction(PtxError, NotImplementedError):
    """A well-formed instruction that the simulator does not know. Raised when a thread reaches it;
    before anything runs only where the control flow cannot be told."""

    def __init__(self, opcode: str, line: int, reason: str = "") -> None:
        detail = f": {reason}" if reason else ""
        super().__init__(f"PTX line {line}: the simulator does not know {opcode!r}{detail}")
        self.opcode = opcode
        self.line = line


class LaunchError(PtxError, ValueError):
    """A launch that cannot exist: its shape, its arguments or the target's limits."""


@dataclass(frozen=True)
class Site:
    """Where in the kernel a fault happened. source: file:line of the CUDA source, with the chain of
    inlined calls; None without `.loc`."""

    kernel: str
    ptx_line: int
    opcode: str
    source: str | None

    def __str__(self) -> str:
        source = self.source or "no source line (compile with -lineinfo)"
        return f"{source} [{self.opcode}, PTX line {self.ptx_line}] in {self.kernel}"


@dataclass(frozen=True)
class Thread:
    """One thread of the launch."""

    block: tuple[int, int, int]
    warp: int
    lane: int

    def __str__(self) -> str:
        x, y, z = self.block
        return f"block ({x}, {y}, {z}) warp {self.warp} lane {self.lane}"


@dataclass(eq=False, repr=False)
class SimulatorError(PtxError, RuntimeError):
    """A fault of the kernel found while it ran.

    title: the kind of fault, in words. site: the instruction. thread: the first that shows the
    fault, None if it has no single one. address: as the instruction saw it, None if no address is
    involved. count: of faulting lanes, over the whole run where faults are collected.
    """

    title: ClassVar[str] = "fault"

    detail: str
    site: Site | None = None
    thread: Thread | None = None
    address: int | None = None
    count: int = 1

    def __init_subclass__(cls, title: str) -> None:
        cls.title = title

    def __str__(self) -> str:
        parts = [f"{self.title}: {self.detail}"]
        if self.site is not None:
            parts.append(f"at {self.site}")
        if self.thread is not None:
            parts.append(f"by {self.thread}")
        if self.address is not None:
            parts.append(f"address {self.address:#x}")
        text = "\n  ".join(parts)
        return text if self.count == 1 else f"{text}\n  {self.count} times"


class OutOfBoundsError(SimulatorError, title="out-of-bounds access"):
    """An access outside every allocation, or outside the block's shared memory."""


class MisalignedError(SimulatorError, title="misaligned access"):
    """An address that is not a multiple of the access size."""


class UninitialisedReadError(SimulatorError, title="uninitialised memory"):
    """Bytes read from shared or local memory that nothing had written reached global memory, an
    address, a branch that decides about more than registers, a barrier or the predicate of an
    instruction with a visible effect. address: of that memory.
    """


class PendingCopyError(SimulatorError, title="asynchronous copy not waited for"):
    """Memory touched between a `cp.async` and the wait that completes it: shared memory that it
    will write, or global memory that it reads."""


class RaceError(SimulatorError, title="shared-memory race"):
    """Two threads touch the same shared bytes, one of them writing, and nothing orders them: of two
    warps, no barrier; of one warp, no `__syncwarp`."""


class ProxyError(SimulatorError, title="missing proxy fence"):
    """An agent touches shared memory that a thread has written, and no `fence.proxy.async` stands
    between the two: the write is in order, but may not be visible to the agent (PTX ISA 9.0, "Async
    Proxy": accessing the same memory location across multiple proxies needs a cross-proxy fence).
    """


class AbsentBlockError(SimulatorError, title="block not there"):
    """A thread touches shared memory of another block of its cluster when that may not have begun
    yet, or may have ended (CUDA C++ Programming Guide, "Distributed Shared Memory": all the thread
    blocks have to exist, and all operations to happen before the exit of a thread block)."""


class BarrierError(SimulatorError, title="barrier not reached by all threads"):
    """A barrier that not all of its threads reach."""


class BarrierOperandError(BarrierError, title="impossible barrier"):
    """A barrier whose number, or number of threads, no block has, or to which more threads come at
    once than it waits for (PTX ISA 9.0, "barrier": operand b is the number that participates)."""


class ClusterBarrierError(BarrierError, title="cluster barrier misused"):
    """A thread that arrives at the barrier of its cluster again before it has waited, or waits
    before it has arrived (PTX ISA 9.0, "barrier.cluster": each thread must arrive only once before
    the barrier completes)."""


class MbarrierError(SimulatorError, title="mbarrier misused"):
    """An operation on an mbarrier object that the PTX ISA leaves undefined: before mbarrier.init or
    after mbarrier.inval, mbarrier.init of a live object, counts out of their range, and bytes that
    come in another phase than the one that was told to expect them; or another instruction that
    touches the object (PTX ISA 9.0, "Parallel Synchronization and Communication Instructions:
    mbarrier")."""


class BulkCopyError(SimulatorError, title="impossible bulk copy"):
    """Operands of a bulk copy that the PTX ISA leaves undefined: addresses, sizes and coordinates
    that are not aligned, a tensor map that is none, or that a thread loads ("Tensor-map": it is
    opaque), destinations that the instruction cannot have
    (PTX ISA 9.0, "cp.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk"); or, of a tensor,
    that an H200 refuses: rows of a box that begin between two multiples of 16 bytes."""


class OutlivedError(SimulatorError, title="copy not waited for at the end"):
    """A block has ended while a bulk copy may still write its shared memory, or read it: none of
    its threads knows that it is done (CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX
    ISA 9.0, "cp.async.bulk.wait_group"; of a copy that completes on an mbarrier,
    "mbarrier.try_wait")."""


class DeadlockError(SimulatorError, title="deadlock"):
    """Threads that sleep, and nobody who could wake them. The message tells who waits for what."""


class MissingLanesError(SimulatorError, title="missing lanes"):
    """A warp-wide instruction executed without lanes that it needs."""


class WarpgroupError(SimulatorError, title="warpgroup not together"):
    """The four warps of a warpgroup do not execute the same `wgmma` or `setmaxnreg` instructions
    in the same order, or a block has not all four. "All threads in the warpgroup must execute the
    same" one (PTX ISA 9.0, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group", "setmaxnreg": .aligned)."""


class MatrixDescriptorError(SimulatorError, title="matrix descriptor"):
    """A matrix descriptor of a `wgmma` that describes no matrix (PTX ISA 9.0, "Matrix Descriptor
    Format"), or differs between the lanes of a warp or the warps of a warpgroup
    ("wgmma.mma_async")."""


class WgmmaRegisterError(SimulatorError, title="register of a wgmma in flight"):
    """A register of a `wgmma` touched before its warp has waited for it: the accumulator, or A
    (PTX ISA 9.0, "wgmma.wait_group": undefined behaviour)."""


class WgmmaFenceError(SimulatorError, title="missing wgmma.fence"):
    """A register that a `wgmma` uses was accessed before with no `wgmma.fence` in between, or a
    warp's first `wgmma` has none before it (PTX ISA 9.0, "wgmma.fence": undefined behaviour)."""


class RegisterCountError(SimulatorError, title="impossible setmaxnreg"):
    """A `setmaxnreg.inc` to fewer registers than the warp has, a `setmaxnreg.dec` to more, or one
    before the warpgroup has synchronised since its last one (PTX ISA 9.0, "setmaxnreg": undefined
    behaviour)."""


class UnfinishedError(SimulatorError, title="asynchronous operation not waited for before the end"):
    """A thread ends while asynchronous operations that it has begun may still be going on."""


class TrapError(SimulatorError, title="trap"):
    """The kernel executed `trap`."""


class AssertError(SimulatorError, title="assertion failed"):
    """An `assert` of the kernel does not hold."""


class Lint(SimulatorError, title="lint"):
    """Something legal that is seldom meant. Collected in `Run.lints`, never raised."""


class ZeroFillLint(Lint, title="filled bytes read as data"):
    """Bytes of a box that lie outside of its tensor, read by a thread or a `wgmma` as data: TMA has
    filled them (PTX ISA 9.0, "Tensors: Tiled Mode")."""


class NeverReadLint(Lint, title="bytes delivered and never read"):
    """Bytes that a bulk copy brings to shared memory, and that nobody reads before they are
    overwritten or the block ends."""


class EarlyReleaseLint(Lint, title="released by one warp for others"):
    """Memory that a `wgmma` of several warps reads, released after only some of them have waited:
    right if one warp's `wgmma.wait_group` holds for the warpgroup (PTX ISA 9.0,
    "wgmma.wait_group": it waits for groups of the executing threads)."""


class LeftArrivalsLint(Lint, title="arrivals that nobody waits for"):
    """Arrivals at a named barrier that no thread has waited for when the block ends: no rule is
    broken, and the barrier ends with the block (PTX ISA 9.0, "barrier": `arrive` is for a `sync` or
    `red` of other threads)."""


class OverlappingStoresLint(Lint, title="stores in no order"):
    """Bulk copies to the same bytes of global memory, one of them issued before anybody has waited
    for the other: right if they write the same, since either may be last (PTX ISA 9.0,
    "cp.async.bulk.commit_group": no order between two of them)."""


class NotResidentError(SimulatorError, title="block not resident"):
    """Blocks that wait for one which begins only when one of them has ended."""


class InstructionLimitError(SimulatorError, title="instruction limit"):
    """The kernel ran longer than it was allowed to."""
