"""What the machine code of one kernel tells about its speed, put together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import BenchmarkResults, Measurement
from flash_helpers.sass.analyse.bound import (
    ISSUE,
    LATENCY,
    Bound,
    Launch,
    Prediction,
    loop_bound,
    measured_launch,
    predict,
)
from flash_helpers.sass.analyse.counts import Counts, count_all, count_loop
from flash_helpers.sass.analyse.occupancy import Occupancy, kernel_occupancy
from flash_helpers.sass.analyse.phases import (
    NotDeterminedError,
    PhaseCounts,
    Unrolling,
    count_phases,
    main_loop,
    unrolling,
)
from flash_helpers.sass.analyse.stalls import Wait, body_of, scoreboard_waits
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.reader import local_bytes
from flash_helpers.sass.read.records import Instruction, Kernel, Loop, SassError

SEQ_LEN = 4096  # of the measurement that the bound is compared with


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched: threads and dynamic shared memory of a block."""

    threads: int
    dynamic_smem_bytes: int

    @classmethod
    def of(cls, config: Config) -> LaunchShape:
        """What the library launches."""
        return cls(config.n_threads, config.smem_bytes)


@dataclass(frozen=True)
class SpillSite:
    """The local loads and stores of one loop, or outside all loops.

    loop: None outside. instructions: loads and stores. store_bytes, load_bytes: a thread, each
    instruction once.
    """

    loop: int | None
    instructions: int
    store_bytes: int
    load_bytes: int


@dataclass(frozen=True)
class KernelReport:
    """One kernel, and one of its loops.

    config: None for a kernel that is not ours. loop: None for a kernel without loops; then bound,
    unrolling and waits are empty. occupancy: None if it is not known how the kernel is launched.
    peak: where most general registers are live. prediction: of the launch that was asked for, or of
    the one that was measured.
    """

    kernel: Kernel
    config: Config | None
    loop: Loop | None
    is_main_loop: bool
    counts: Counts
    phases: PhaseCounts
    loop_counts: Counts | None
    occupancy: Occupancy | None
    peak: Instruction | None
    spills: tuple[SpillSite, ...]
    unrolling: Unrolling | None
    bound: Bound | None
    waits: tuple[Wait, ...]
    prediction: Prediction | None
    measurement: Measurement | None

    @property
    def body(self) -> tuple[Instruction, ...]:
        """The instructions of the loop."""
        return body_of(self.kernel, self.loop) if self.loop else ()

    @property
    def resident_warps(self) -> int:
        """Warps of an SM that the bound is told for; 1 if the occupancy is not known."""
        return self.occupancy.warps if self.occupancy and self.occupancy.warps else 1

    @property
    def name(self) -> str:
        """The config's short form, or the symbol."""
        return self.config.short_form() if self.config else self.kernel.symbol


def build_report(
    kernel: Kernel,
    config: Config | None = None,
    loop: int | None = None,
    launch: LaunchShape | None = None,
    results: BenchmarkResults | None = None,
    problem: Launch | None = None,
) -> KernelReport:
    """Everything that is known of a kernel.

    loop: index of the loop to look into; None takes the main loop. launch: None takes the config's,
    or for a kernel that is not ours the most threads that it was compiled for. results: of a GPU of
    the kernel's architecture. problem: what to predict the time of, instead of what was measured.

    Raises SassError if there is no such loop, and NotDeterminedError if the time of the problem
    cannot be predicted from the text.
    """
    chosen = _choose_loop(kernel, loop)
    occupancy = _occupancy(kernel, config, launch)
    if problem is not None and config is not None:
        prediction, measurement = predict(kernel, config, problem), None
    else:
        prediction, measurement = _predict_measured(kernel, config, results)
    return KernelReport(
        kernel=kernel,
        config=config,
        loop=chosen,
        is_main_loop=chosen == main_loop(kernel),
        counts=count_all(kernel.instructions),
        phases=count_phases(kernel),
        loop_counts=count_loop(kernel, chosen) if chosen else None,
        occupancy=occupancy,
        peak=_peak(kernel),
        spills=_spills(kernel),
        unrolling=unrolling(kernel, chosen) if chosen else None,
        bound=loop_bound(kernel, chosen) if chosen else None,
        waits=tuple(scoreboard_waits(kernel, chosen)) if chosen else (),
        prediction=prediction,
        measurement=measurement,
    )


def _choose_loop(kernel: Kernel, loop: int | None) -> Loop | None:
    if loop is None:
        return main_loop(kernel)
    if not 0 <= loop < len(kernel.loops):
        there = f"they are 0 to {len(kernel.loops) - 1}" if kernel.loops else "it has no loop"
        raise SassError(f"loop {loop} is not in {kernel.symbol}: {there}")
    return kernel.loops[loop]


def _occupancy(
    kernel: Kernel, config: Config | None, launch: LaunchShape | None
) -> Occupancy | None:
    if launch is None and config is not None:
        launch = LaunchShape.of(config)
    if launch is None and kernel.resources.max_threads is not None:
        launch = LaunchShape(kernel.resources.max_threads, 0)
    if launch is None:
        return None
    return kernel_occupancy(kernel, launch.threads, launch.dynamic_smem_bytes)


def _predict_measured(
    kernel: Kernel, config: Config | None, results: BenchmarkResults | None
) -> tuple[Prediction | None, Measurement | None]:
    found = measured_launch(results, config, SEQ_LEN) if results and config else None
    if found is None or config is None:
        return None, None
    launch, measurement = found
    try:
        return predict(kernel, config, launch), measurement
    except NotDeterminedError:
        return None, measurement


def _peak(kernel: Kernel) -> Instruction | None:
    known = [i for i in kernel.instructions if i.live is not None]
    return max(known, key=lambda i: i.live.general if i.live else 0, default=None)


def _spills(kernel: Kernel) -> tuple[SpillSite, ...]:
    sites: dict[int | None, list[Instruction]] = defaultdict(list)
    for instruction in kernel.instructions:
        if instruction.base in ("LDL", "STL") and may_execute(instruction):
            sites[instruction.loop].append(instruction)
    return tuple(
        SpillSite(loop, len(found), local_bytes(found, "STL"), local_bytes(found, "LDL"))
        for loop, found in sorted(
            sites.items(), key=lambda site: -1 if site[0] is None else site[0]
        )
    )


def verdicts(report: KernelReport) -> list[str]:
    """What the numbers come to, a sentence or two each."""
    found = [_spill_verdict(report)]
    if report.bound is not None:
        found += [_bound_verdict(report, report.bound), _wait_verdict(report)]
        if not report.bound.straight:
            found.append(
                "The loop branches, and each of its blocks is counted once: what an iteration "
                "takes depends on its way through them."
            )
    if report.prediction is not None:
        found.append(_launch_verdict(report.prediction, report.measurement))
    return found


def _spill_verdict(report: KernelReport) -> str:
    if not report.spills:
        return "No spills: local memory is not accessed."
    inside = [site for site in report.spills if site.loop is not None]
    stores = sum(site.store_bytes for site in report.spills)
    loads = sum(site.load_bytes for site in report.spills)
    total = f"{stores} bytes of local stores and {loads} of local loads a thread"
    if not report.kernel.loops:
        return f"Spills: {total}; the kernel has no loop, so that each is paid once a thread."
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
    warps = report.resident_warps
    (name, cycles), *others = bound.cycles(warps).items()
    share = ", ".join(f"{other} {100 * value / cycles:.0f}%" for other, value in others[:3])
    unknown = (
        f"; {bound.unknown} instructions of unknown cost are left out" if bound.unknown else ""
    )
    if name == LATENCY:
        return (
            f"Bound by latency: a warp alone takes {cycles:,.0f} cycles for an iteration, more "
            f"than any pipe needs for {warps_text(warps)} ({share} of that{unknown})."
        )
    if any(row.pipe == name and row.cycles and not row.certain for row in bound.rows):
        unknown += "; its costs are not certain"
    return (
        f"Bound by {_limit_text(name)}: {warps_text(warps)} take {cycles:,.0f} cycles of an SM for "
        f"an iteration ({share} of that{unknown})."
    )


def _limit_text(name: str) -> str:
    return name if name in (ISSUE, LATENCY) else f"the {name} pipe"


def warps_text(number: int) -> str:
    """As in a sentence."""
    return "one warp" if number == 1 else f"{number} resident warps"


def _wait_verdict(report: KernelReport) -> str:
    for_result = [wait for wait in report.waits if wait.for_result]
    if not for_result:
        return "No instruction of the loop waits for a scoreboard's result."
    shortest = min(for_result, key=lambda wait: wait.cycles)
    return (
        f"{len(for_result)} waits for results in an iteration; the shortest distance is "
        f"{shortest.cycles} cycles, from {shortest.producer.text!r} at "
        f"{shortest.producer.address:#06x} to {shortest.consumer.text!r} at "
        f"{shortest.consumer.address:#06x}. What a latency exceeds its distance by, other warps "
        "have to hide."
    )


def _launch_verdict(prediction: Prediction, measurement: Measurement | None) -> str:
    launch = prediction.launch
    least = (
        f"{prediction.least_ms:.3f} ms ({prediction.most_tflops:.0f} TFLOP/s) with "
        f"{launch.sms} SMs at {launch.mhz:.0f} MHz and no bank conflict"
    )
    if measurement is None:
        return (
            f"Batch {launch.batch}, heads {launch.n_heads}, seq_len {launch.seq_len}: "
            f"{_limit_text(prediction.binding)} allows no less than {least}."
        )
    return (
        f"Measured: {measurement.median_ms:.3f} ms ({measurement.tflops:.0f} TFLOP/s) at seq_len "
        f"{measurement.seq_len}, {measurement.median_ms / prediction.least_ms:.2f} times the least "
        f"that {_limit_text(prediction.binding)} allows, {least}."
    )
