"""Errors that arise while PTX is read, launched and run."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import ClassVar

from flash_helpers.console.symbols import short_name


class PtxError(Exception):
    """Base of every error of this package."""


class PtxSyntaxError(PtxError, ValueError):
    """The text is not PTX that this reader understands, or it is cut off. `file`: the file that
    holds the text, if any."""

    def __init__(self, message: str, line: int, file: str = "PTX") -> None:
        super().__init__(f"{file} line {line}: {message}")
        self.message = message
        self.line = line


class NotPtxError(PtxError, ValueError):
    """The file holds something other than PTX; the message says what it holds, and the way out."""


class UnsupportedInstruction(PtxError, NotImplementedError):
    """A well-formed instruction that the simulator does not know. Raised when a thread reaches it;
    before the launch only if the control flow is unknown."""

    def __init__(self, opcode: str, line: int, reason: str = "") -> None:
        detail = f": {reason}" if reason else ""
        super().__init__(f"PTX line {line}: the simulator does not know {opcode!r}{detail}")
        self.opcode = opcode
        self.line = line


class LaunchError(PtxError, ValueError):
    """A launch that no GPU accepts: its shape, its arguments or the target's limits."""


def is_header(file: str) -> bool:
    """Whether a file lies in a folder of headers, as those of libraries do."""
    return "include" in PurePath(file).parts[:-1]


@dataclass(frozen=True)
class Site:
    """The place of a fault in the kernel. `source`: file:line of the CUDA source, with the chain of
    inlined calls as `Location` shows it; None without `.loc`."""

    kernel: str
    ptx_line: int
    opcode: str
    source: str | None

    def __str__(self) -> str:
        source = self.source or "no source line (compile with -lineinfo)"
        return f"{source} [{self.opcode}, PTX line {self.ptx_line}]"

    @property
    def brief(self) -> str:
        """The place for a message that names many: of the line and its calls the two innermost and
        the outermost that stand outside of header folders, or of all if none does; the line of PTX
        if there is no source."""
        if self.source is None:
            return f"PTX line {self.ptx_line}"
        calls = [c.removeprefix("inlined at ") for c in self.source.split(", ")]
        calls = [call for call in calls if not call.startswith("…")]
        own = [call for call in calls if not is_header(call)] or calls
        return ", inlined at ".join(dict.fromkeys((*own[:2], own[-1])))


@dataclass(frozen=True)
class Thread:
    """One thread of the launch."""

    block: tuple[int, int, int]
    warp: int
    lane: int

    def __str__(self) -> str:
        x, y, z = self.block
        return f"block ({x}, {y}, {z}) warp {self.warp} lane {self.lane}"


MOST_LINES, MOST_CHARACTERS = 15, 1_200
"""Size of the message of a fault at most, so that a terminal shows it whole."""


def _shortened(text: str, most_lines: int, most_characters: int) -> str:
    """A text without its last lines, if there are too many, and without the middle of its first, if
    that is too long alone."""
    lines, left = text.split("\n"), ""
    count = len(lines)
    while len(lines) > 1 and (
        len(lines) + bool(left) > most_lines or len("\n".join(lines) + left) > most_characters
    ):
        lines.pop()
        left = f"\n    … {count - len(lines)} more lines"
    half = max((most_characters - len(left)) // 2 - 1, 0)
    if len(lines[0]) > 2 * half + 1:
        lines[0] = f"{lines[0][:half]}…{lines[0][len(lines[0]) - half :]}"
    return "\n".join(lines) + left


@dataclass(eq=False, repr=False)
class SimulatorError(PtxError, RuntimeError):
    """A fault of the kernel found while it ran.

    `title`: the kind of fault, in words. `site`: the instruction. `thread`: the first thread that
    shows the fault, None if it has no single thread. `address`: the address as the instruction saw
    it, None if no address is involved. `count`: number of faulting lanes, over the whole run where
    faults are collected. `ptx_lines`: the instructions that show it, where they are collected: a
    line of CUDA source may have become several.
    """

    title: ClassVar[str] = "fault"

    detail: str
    site: Site | None = None
    thread: Thread | None = None
    address: int | None = None
    count: int = 1
    ptx_lines: set[int] = field(default_factory=set)

    @property
    def cause(self) -> Hashable:
        """A key that faults have in common if one line of source, or without lines one instruction,
        is at fault."""
        at = self.site
        return type(self), at and (at.opcode, at.source or at.ptx_line)

    def __init_subclass__(cls, title: str) -> None:
        cls.title = title

    def __str__(self) -> str:
        """The message, within MOST_LINES and MOST_CHARACTERS; `detail` has all of it."""
        parts = []
        if self.site is not None:
            parts.append(f"  at {self.site} in {short_name(self.site.kernel)}")
        if self.thread is not None:
            parts.append(f"  by {self.thread}")
        if self.address is not None:
            parts.append(f"  address {self.address:#x}")
        if self.count != 1:
            n = len(self.ptx_lines)
            parts.append(f"  {self.count} times" + (f", on {n} lines of PTX" if n > 1 else ""))
        room = MOST_CHARACTERS - len("\n".join(parts)) - 1
        detail = _shortened(f"{self.title}: {self.detail}", MOST_LINES - len(parts), room)
        return "\n".join([detail, *parts])


class OutOfBoundsError(SimulatorError, title="out-of-bounds access"):
    """An access outside every allocation, or outside the block's shared memory."""


class MisalignedError(SimulatorError, title="misaligned access"):
    """An address that is not a multiple of the access size."""


class UninitialisedReadError(SimulatorError, title="uninitialised memory"):
    """Bytes read from shared or local memory that nothing had written reached global memory, an
    address, a branch that decides about more than registers, a barrier or the predicate of an
    instruction with a visible effect. `address`: address of that memory.
    """


class UninitialisedRegisterError(SimulatorError, title="uninitialised register"):
    """A register that nothing had written was read, and the value reached global memory, an
    address, a branch that decides about more than registers, a barrier or the predicate of an
    instruction with a visible effect."""


class PendingCopyError(SimulatorError, title="asynchronous copy not waited for"):
    """Memory touched between a `cp.async` and the wait that completes it: shared memory that it
    will write, or global memory that it reads."""


class RaceError(SimulatorError, title="shared-memory race"):
    """Two threads touch the same shared bytes, one of them writing, and nothing orders them: no
    barrier between two warps, or no `__syncwarp` within one warp."""


class ProxyError(SimulatorError, title="missing proxy fence"):
    """An agent touches shared or global memory that a thread has written, and no
    `fence.proxy.async` stands between the two. Or a tensor copy reads a tensor map that a thread
    has changed, with no `fence.proxy.tensormap` between. The write is in order, but may not be
    visible to the agent.

    Source: PTX ISA 9.0, "Async Proxy": accessing the same memory location across multiple proxies
    needs a cross-proxy fence.
    """


class LaunchOrderError(SimulatorError, title="global memory touched before griddepcontrol.wait"):
    """A thread of a programmatic launch touches global memory, and neither it nor a thread that it
    has synchronised with has waited for the launch before.

    Source: PTX ISA 9.0, "griddepcontrol": .wait lets the thread wait until all prerequisite grids
    have completed and their memory operations are visible."""


class AbsentBlockError(SimulatorError, title="block not there"):
    """A thread touches shared memory of another block of its cluster that may not have begun yet,
    or may have ended.

    Source: CUDA C++ Programming Guide, "Distributed Shared Memory": all the thread blocks have to
    exist, and all operations have to happen before a thread block exits."""


class BarrierError(SimulatorError, title="barrier not reached by all threads"):
    """A barrier that not all of its threads reach."""


class BarrierOperandError(BarrierError, title="impossible barrier"):
    """A barrier whose number or thread count no block can have, or at which more threads arrive at
    once than it waits for (PTX ISA 9.0, "barrier": operand b is the number of participating
    threads)."""


class MixedArrivalsError(BarrierError, title="arrivals at a barrier may mix"):
    """An arrival at a barrier with a thread count that no synchronisation orders behind all
    arrivals of the time before. On another run it may come first and take the place of one of
    them. The barrier then lets threads go before the threads that they wait for have come.

    Source: PTX ISA 9.0, "barrier": it completes when the specified number of threads have arrived,
    whichever threads these are."""


class ClusterBarrierError(BarrierError, title="cluster barrier misused"):
    """A thread that arrives at the barrier of its cluster again before it has waited, or waits
    before it has arrived (PTX ISA 9.0, "barrier.cluster": each thread must arrive only once before
    the barrier completes)."""


class MbarrierError(SimulatorError, title="mbarrier misused"):
    """An operation on an mbarrier object that the PTX ISA leaves undefined, or another instruction
    that touches the object.

    Undefined are: a use before mbarrier.init or after mbarrier.inval; mbarrier.init of a live
    object; counts out of range; bytes that arrive in another phase than the one that expects them.

    Source: PTX ISA 9.0, "Parallel Synchronization and Communication Instructions: mbarrier"."""


class BulkCopyError(SimulatorError, title="impossible bulk copy"):
    """Operands of a bulk copy that the PTX ISA leaves undefined, or that an H200 refuses.

    Undefined are: unaligned addresses, sizes and coordinates; bytes that are no tensor map; a
    tensor map that a thread loads ("Tensor-map": it is opaque); destinations that the instruction
    cannot have. An H200 refuses rows of a box that begin between two multiples of 16 bytes.

    Source: PTX ISA 9.0, "cp.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk"."""


class OutlivedError(SimulatorError, title="copy not waited for at the end"):
    """A block has ended while a bulk copy may still write or read its shared memory: none of the
    block's threads knows that the copy is done.

    Sources: CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA 9.0,
    "cp.async.bulk.wait_group", and "mbarrier.try_wait" for a copy that completes on an mbarrier."""


class DeadlockError(SimulatorError, title="deadlock"):
    """Threads that sleep while no thread or copy can wake them. The message says which threads wait
    for what."""


class MissingLanesError(SimulatorError, title="missing lanes"):
    """A warp-wide instruction executed without lanes that it needs, or a value that a shuffle took
    from a lane that takes no part in it, where it reaches what `UninitialisedReadError` names.

    Source: PTX ISA 9.0, "shfl.sync": results are undefined if the source lane is inactive or not in
    membermask."""


class WarpgroupError(SimulatorError, title="warpgroup not together"):
    """The four warps of a warpgroup do not execute the same `wgmma` or `setmaxnreg` instructions in
    the same order, or a block lacks one of the four. "All threads in the warpgroup must execute the
    same" instruction (PTX ISA 9.0, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group", "setmaxnreg": .aligned)."""


class MatrixDescriptorError(SimulatorError, title="matrix descriptor"):
    """A matrix descriptor of a `wgmma` that describes no matrix (PTX ISA 9.0, "Matrix Descriptor
    Format"), or that differs between the lanes of a warp or the warps of a warpgroup
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
    """A legal operation that is seldom intended. Collected in `Run.lints`, never raised."""


class ZeroFillLint(Lint, title="filled bytes read as data"):
    """Bytes of a box outside its tensor, which TMA has filled, read as data by a thread or a
    `wgmma` (PTX ISA 9.0, "Tensors: Tiled Mode")."""


class NeverReadLint(Lint, title="bytes delivered and never read"):
    """Bytes that a bulk copy brings to shared memory, and that are not read before they are
    overwritten or the block ends."""


class EarlyReleaseLint(Lint, title="released by one warp for others"):
    """Memory that a `wgmma` of several warps reads, released after only some of them have waited:
    right if one warp's `wgmma.wait_group` holds for the warpgroup (PTX ISA 9.0,
    "wgmma.wait_group": it waits for groups of the executing threads)."""


class LeftArrivalsLint(Lint, title="arrivals that no thread waits for"):
    """Arrivals at a named barrier that no thread has waited for when the block ends. No rule is
    broken, and the barrier ends with the block (PTX ISA 9.0, "barrier": `arrive` is for a `sync` or
    `red` of other threads)."""


class RepeatedWorkLint(Lint, title="one lane's work by several lanes"):
    """Lanes of a warp that execute the same bulk store, reduction or prefetch: each makes one of
    its own (PTX ISA 9.0, "cp.async.bulk": the executing thread initiates the copy)."""


class UnfencedInitLint(Lint, title="mbarrier made without a fence"):
    """An mbarrier object handed to a bulk copy without a fence after its mbarrier.init, which is a
    write of the generic proxy, while the copy counts its bytes in the async proxy. A
    `fence.proxy.async` is due (PTX ISA 9.0, "Async proxy"; the CUDA C++ Programming Guide has it in
    its examples of TMA), or a `fence.mbarrier_init`, which libraries use instead. Triton emits
    neither and relies on the barrier of the block."""


class BlockScopeLint(Lint, title="release to the own block only"):
    """An arrival without a scope at an mbarrier of another block, by a thread that has written
    there. The scope is then .cta (PTX ISA 9.0, "mbarrier.arrive"), and ptxas puts a MEMBAR before
    an arrival with .release.cluster only. Memory that was only read may be released so."""


class LayoutLint(Lint, title="layouts that differ"):
    """Bytes that a tensor copy or a `stmatrix` wrote in one layout and that a `wgmma`, an
    `ldmatrix`, a tensor copy or the loads of a warp read in another one: another swizzle, or rows
    of another width. The reader gets other elements than those it is meant to get (PTX ISA 9.0,
    "Swizzling Modes", "Matrix Descriptor Format")."""


class OverlappingStoresLint(Lint, title="stores in no order"):
    """Bulk copies to the same bytes of global memory, one of them issued before a thread has waited
    for the other. They are right if they write the same values, since either may be last (PTX ISA
    9.0, "cp.async.bulk.commit_group": no order between two of them)."""


class NotResidentError(SimulatorError, title="block not resident"):
    """Resident blocks that wait for a block which begins only when one of them has ended."""


class InstructionLimitError(SimulatorError, title="instruction limit"):
    """The kernel ran longer than it was allowed to."""
