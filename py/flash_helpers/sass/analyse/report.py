"""Report on the machine code of one kernel: its loops, their bounds, spills and waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flash_helpers.sass.analyse.bound import ISSUE, LATENCY, Bound, Prediction, loop_bound
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.phases import Unrolling, is_wait, main_loop, unrolling
from flash_helpers.sass.analyse.roles import Role, numbers_text
from flash_helpers.sass.analyse.stalls import Wait, body_of, scoreboard_waits
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import is_trap_stub, may_execute
from flash_helpers.sass.read.reader import local_bytes
from flash_helpers.sass.read.records import Instruction, Kernel, Loop, SassError


@dataclass(frozen=True)
class LocalSite:
    """Local loads and stores of one loop, or outside all loops.

    `loop`: index of the loop, None outside loops. `instructions`: number of loads and stores.
    `store_bytes`, `load_bytes`: bytes per thread, each instruction counted once.
    """

    loop: int | None
    instructions: int
    store_bytes: int
    load_bytes: int


@dataclass(frozen=True)
class KernelReport:
    """One kernel and the loop of the report, None in a kernel without loops."""

    facts: KernelFacts
    loop: Loop | None

    @property
    def kernel(self) -> Kernel:
        """The kernel of the report."""
        return self.facts.kernel

    @property
    def is_main_loop(self) -> bool:
        """Whether the loop is the main loop."""
        return self.loop == main_loop(self.kernel)

    @cached_property
    def body(self) -> tuple[Instruction, ...]:
        """The instructions of the loop."""
        return body_of(self.kernel, self.loop) if self.loop else ()

    @cached_property
    def bound(self) -> Bound | None:
        """The bound of one iteration of the loop."""
        return loop_bound(self.kernel, self.loop) if self.loop else None

    @property
    def warps(self) -> int | None:
        """Warps per SM that run the loop; 1 without a loop, None if that is not known."""
        return self.facts.loop_warps(self.loop) if self.loop else 1

    @cached_property
    def n_waits(self) -> int:
        """Loops of the kernel that only wait."""
        return sum(is_wait(self.kernel, loop) for loop in self.kernel.loops)

    @cached_property
    def unrolling(self) -> Unrolling | None:
        """Signs of unrolling in the loop."""
        return unrolling(self.kernel, self.loop) if self.loop else None

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Waits for scoreboards in the loop."""
        return tuple(scoreboard_waits(self.kernel, self.loop)) if self.loop else ()

    @cached_property
    def peak(self) -> Instruction | None:
        """The instruction with the most live general registers; None if that is unknown."""
        known = [i for i in self.kernel.instructions if i.live is not None]
        return max(known, key=lambda i: i.live.general if i.live else 0, default=None)

    @cached_property
    def spills(self) -> tuple[LocalSite, ...]:
        """The local accesses that the cubin marks as spills, outside loops first, then by loop."""
        return _local_sites(i for i in self.kernel.instructions if i.is_spill)

    @cached_property
    def local_accesses(self) -> tuple[LocalSite, ...]:
        """The local accesses without a mark: to arrays, if spills are marked (`Resources`)."""
        return _local_sites(i for i in self.kernel.instructions if not i.is_spill)


def _local_sites(instructions: Iterable[Instruction]) -> tuple[LocalSite, ...]:
    sites: dict[int, list[Instruction]] = defaultdict(list)
    for i in instructions:
        if i.base in ("LDL", "STL") and may_execute(i):
            sites[-1 if i.loop is None else i.loop].append(i)
    return tuple(
        LocalSite(
            None if loop < 0 else loop,
            len(found),
            local_bytes(found, "STL"),
            local_bytes(found, "LDL"),
        )
        for loop, found in sorted(sites.items())
    )


def report_on(facts: KernelFacts, loop: int | None = None) -> KernelReport:
    """The report of a kernel. `loop`: index of the loop of the report; None takes the main loop.

    Raises SassError if there is no such loop.
    """
    loops = facts.kernel.loops
    if loop is None:
        return KernelReport(facts, main_loop(facts.kernel))
    if not 0 <= loop < len(loops):
        there = f"they are 0 to {len(loops) - 1}" if loops else "it has no loop"
        raise SassError(f"loop {loop} is not in {facts.kernel.name}: {there}")
    return KernelReport(facts, loops[loop])


def verdicts(report: KernelReport) -> list[str]:
    """Conclusions from the numbers, a sentence or two each."""
    if is_trap_stub(report.kernel):
        return [
            f"The kernel is a stub, which only traps (BPT.TRAP): for {report.kernel.architecture} "
            "its author left the code out."
        ]
    found = [_role_verdict(report.facts.roles)] if report.facts.roles else []
    found.append(_spill_verdict(report))
    if report.bound is not None:
        found += [_bound_verdict(report, report.bound), _wait_verdict(report)]
        if not report.bound.straight:
            found.append(
                "The loop branches: each bound is that of the way through it that takes least, and "
                f"the costs are those of its whole text, {len(report.body)} instructions."
            )
    if report.facts.prediction is not None:
        found.append(_launch_verdict(report.facts, report.facts.prediction))
    return found


def _role_verdict(found: Sequence[Role]) -> str:
    known = [
        f"{role.name} ({numbers_text('warp', role.warps)}, {registers_text(role)} registers, "
        f"{'no loop' if role.working_loop is None else f'loop {role.working_loop}'})"
        for role in found
        if role.is_known
    ]
    told = []
    if known:
        number = "roles" if len(known) > 1 else "role" if len(found) == 1 else "known role"
        told.append(f"The warps of a block have {len(known)} {number}: {', '.join(known)}.")
    for role in found:
        warps = numbers_text("warp", role.warps)
        if not role.is_known:
            told.append(f"The role of {warps} is not known: {role.reason}.")
        elif role.unsure:
            loops = numbers_text("loop", role.unsure)
            told.append(f"Which of {warps} run {loops} is not known: {role.reason}.")
    return " ".join(told)


def registers_text(role: Role) -> str:
    """The registers of a role in words."""
    return "an unknown number of" if role.registers is None else str(role.registers)


def _spill_verdict(report: KernelReport) -> str:
    if not report.spills and not report.local_accesses:
        return "No spills: local memory is not accessed."
    sites = report.spills or report.local_accesses
    inside = [site for site in sites if site.loop is not None]
    stores = sum(site.store_bytes for site in sites)
    loads = sum(site.load_bytes for site in sites)
    total = f"{stores} bytes of local stores and {loads} of local loads per thread"
    if report.kernel.resources.spill_store_bytes is None:
        return (
            f"Local memory is accessed, {total}; which of it spills registers is not known, as "
            "ptxas marks that only from CUDA 12.6 on."
        )
    if not report.spills:
        return (
            "No spills: local memory holds arrays, or registers that a called function saves, "
            f"{total}."
        )
    if not report.kernel.loops:
        return f"Spills: {total}; the kernel has no loop, so that each is paid once per thread."
    if not inside:
        return f"Harmless spills: {total}, none of them in a loop."
    main = main_loop(report.kernel)
    places = "; ".join(
        f"{'the main loop' if main and site.loop == main.index else f'loop {site.loop}'}: "
        f"{site.store_bytes} bytes stored and {site.load_bytes} loaded in each iteration"
        for site in inside
    )
    return f"Spills in loops: {places} ({total} in all)."


def _bound_verdict(report: KernelReport, bound: Bound) -> str:
    warps = report.warps
    if warps is None:
        return "No bound: how many warps run the loop is not known."
    if not bound.tells_tensor:
        without = [row for row in bound.rows if row.name == opcodes.TENSOR and row.cycles is None]
        return (
            f"No bound: what {sum(row.number for row in without)} of the tensor instructions take "
            f"is not known for {report.kernel.architecture}."
        )
    if not bound.pipes and report.kernel.capability not in opcodes.KNOWN:
        return (
            f"No bound: what instructions cost on {report.kernel.architecture} is not known. To "
            f"issue an iteration of {warps_text(report)} takes {warps * bound.issue:,.0f} cycles "
            "of an SM."
        )
    (name, cycles), *others = bound.cycles(warps).items()
    share = ", ".join(f"{other} {100 * value / cycles:.0f}%" for other, value in others[:3])
    unknown = (
        f"; {bound.unknown} instructions of unknown cost are left out" if bound.unknown else ""
    )
    if name == LATENCY:
        return (
            f"Bound by latency: a warp alone takes {cycles:,.0f} cycles for an iteration, more "
            f"than any pipe needs for {warps_text(report)} ({share} of that{unknown})."
        )
    if any(row.pipe == name and row.cycles and not row.certain for row in bound.rows):
        unknown += "; its costs are not certain"
    return (
        f"Bound by {_limit_text(name)}: {warps_text(report)} take {cycles:,.0f} cycles of an SM "
        f"for an iteration ({share} of that{unknown})."
    )


def _limit_text(name: str) -> str:
    return name if name in (ISSUE, LATENCY) else f"the {name} pipe"


def warps_text(report: KernelReport) -> str:
    """The warps for which the loop's bounds are told, in words."""
    number = report.warps
    if number == 1:
        return "one warp"
    return f"{number} warps that run the loop" if report.facts.roles else f"{number} resident warps"


def _wait_verdict(report: KernelReport) -> str:
    for_result = [wait for wait in report.waits if wait.for_result]
    if not for_result:
        return "No instruction of the loop waits for a scoreboard's result."
    shortest = min(for_result, key=lambda wait: wait.cycles)
    return (
        f"{len(for_result)} waits for results in an iteration; the shortest distance is "
        f"{shortest.cycles} cycles, from {shortest.producer.text!r} at "
        f"{shortest.producer.address:#06x} to {shortest.consumer.text!r} at "
        f"{shortest.consumer.address:#06x}. Other warps have to hide the part of a "
        "latency that exceeds its distance."
    )


def _launch_verdict(facts: KernelFacts, prediction: Prediction) -> str:
    measured, chip, speed = facts.measurement, prediction.chip, prediction.most_tflops
    least = (
        f"{prediction.least_ms:.3f} ms{'' if speed is None else f' ({speed:.0f} TFLOP/s)'} with "
        f"{chip.sms} SMs at {chip.mhz:.0f} MHz and no bank conflict"
    )
    limit = _limit_text(prediction.binding)
    if measured is None:
        words = prediction.launch.words
        return f"{words[:1].upper()}{words[1:]}: {limit} allows no less than {least}."
    return (
        f"Measured: {measured.median_ms:.3f} ms ({measured.speed_text()}) at "
        f"{facts.timed}, {measured.median_ms / prediction.least_ms:.2f} times the least that "
        f"{limit} allows, {least}."
    )
