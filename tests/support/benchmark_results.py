"""Made-up results of the benchmark, and what stands in for a GPU's clock when there is none."""

import dataclasses
from collections.abc import Callable

from attention_configs import attention_progression

from flash_helpers.kernel_configs import FAMILIES, STEPS, Element
from flash_helpers.measure.machine import Reading
from flash_helpers.measure.results import (
    BURST,
    CONTROL,
    CUDNN,
    FLASH,
    LIBRARY_NAMES,
    MATMUL,
    MMA_SYNC,
    SUSTAINED,
    BenchmarkResults,
    Measurement,
    Protocol,
    Provenance,
    RateRecord,
)
from flash_helpers.measure.staircases import stairs
from flash_helpers.operations.attention_forward.problems import default_shape

BF16 = [c for c in attention_progression() if c.dtype == Element.BF16]
STAIRS = stairs("bf16")
LARGE_TILE_7 = STAIRS["v7"].large
PROVENANCE = Provenance(
    date="2026-01-02",
    commit="abc123",
    command="pt_bench.py",
    gpu="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    driver="580.1",
    max_sm_mhz="1980",
    power_limit_w="700.00",
    cuda="13.0",
    cudnn="91900",
    torch="2.13.0",
    python="3.12.3",
    library="CUDA 13.0 for sm_90",
)
# the clock drifts from round to round, and takes every contender along
DRIFT = (0.9, 1.0, 1.2)
FLASH_TFLOPS = 300.0
BURST_GAIN = 1.2


class FakeTimer:
    """Runs work at once; each start takes the next of the given times, then 5 ms for ever."""

    def __init__(
        self, times_ms: tuple[float, ...] = (), cache_bytes: int = 0, flushes: bool = False
    ) -> None:
        self.times_ms = list(times_ms)
        self.cache_bytes = cache_bytes
        self.flushes = flushes

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def start(self, work: Callable[[], None], times: int = 1) -> Callable[[], float]:
        for _ in range(times):
            work()
        milliseconds = self.times_ms.pop(0) if self.times_ms else 5.0
        return lambda: milliseconds

    def synchronize(self) -> None:
        pass


class FakeSensor:
    """Reads a made-up GPU whose clock falls with each reading; rests are noted, not taken."""

    def __init__(self, device: object = None) -> None:
        self.sm_mhz = 1980.0
        self.rests: list[float] = []

    def read(self) -> Reading:
        self.sm_mhz -= 15
        return Reading(self.sm_mhz, 700.0, 65.0)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)


def measurement(
    name: str,
    seq_len: int,
    tflops: float,
    dtype: str = "bf16",
    failure: str = "",
    load: str = SUSTAINED,
) -> Measurement:
    """A synthetic one of the given speed, on the benchmark's own problem, next to a flash backend
    of FLASH_TFLOPS (of BURST_GAIN times that in bursts) whose clock drifts as its own does."""
    shape = default_shape(seq_len).in_dtype(Element.from_name(dtype))
    gain = BURST_GAIN if load == BURST else 1.0
    own, flash = (shape.operations / speed / gain / 1e9 for speed in (tflops, FLASH_TFLOPS))
    return Measurement(
        name=name,
        ran="" if name in LIBRARY_NAMES else name,
        problem=shape.record(),
        input_sets=2,
        launches_per_sample=10,
        samples_ms=() if failure else tuple(own * drift for drift in DRIFT),
        max_abs_error=0.001,
        relative_error=0.001,
        max_abs_bound=0.01,
        relative_bound=0.004,
        failure=failure,
        load=load,
        first_ms=() if failure else tuple(flash * drift for drift in DRIFT),
        sm_mhz=(1980.0, 1965.0, 1950.0) if load == BURST else (1500.0, 1470.0, 1455.0),
        power_w=(300.0, 310.0, 320.0) if load == BURST else (699.0, 698.0, 697.0),
        temperature_c=(45.0,) * 3 if load == BURST else (65.0,) * 3,
    )


def control(
    seq_len: int, load: str = SUSTAINED, ratios: tuple[float, float, float] = (0.99, 1.0, 1.01)
) -> Measurement:
    """Flash once more, so many times as fast in each round as the flash next to it."""
    found = measurement(CONTROL, seq_len, FLASH_TFLOPS, load=load)
    beside = zip(found.first_ms, ratios, strict=True)
    return dataclasses.replace(found, first_ms=tuple(ms * ratio for ms, ratio in beside))


def synthetic_results(*measurements: Measurement) -> BenchmarkResults:
    """With the measurements, as an H100 had made them."""
    return BenchmarkResults(
        provenance=PROVENANCE, protocol=Protocol(), resources=(), measurements=measurements
    )


def speeds() -> dict[str, float]:
    """TFLOP/s by name: flash at FLASH_TFLOPS, cuDNN at 600; the n-th step at 100 + 10 n at the
    fixed tile, at 200 + 10 n at the large one, and at 190 + 10 n there with a stride that is read.
    """
    found = {FLASH: FLASH_TFLOPS, CUDNN: 600.0}
    for n, own in enumerate(STAIRS.values(), start=1):
        for config, base in ((own.fixed, 100), (own.large, 200), (own.read, 190)):
            if config is not None:
                found[config.short_form()] = base + 10.0 * n
    return found


def full_results(*more: Measurement) -> BenchmarkResults:
    """The `speeds` and the control at two lengths, sustained and in bursts."""
    found = [
        row
        for load in (BURST, SUSTAINED)
        for seq_len in (1024, 4096)
        for row in (
            *(measurement(name, seq_len, speed, load=load) for name, speed in speeds().items()),
            control(seq_len, load),
        )
    ]
    return synthetic_results(*found, *more)


def grouped_results() -> BenchmarkResults:
    """Flash at 300 TFLOP/s and the last step of hopper at 600, on causal problems of 32 heads on
    8."""
    shape = default_shape(4096, heads=32, kv_heads=8, causal=True)
    share = shape.operations / default_shape(4096).operations
    step = STEPS["h24"]
    own = FAMILIES[step.family].fixed_config(step, Element.BF16).replace(causal=True)
    return synthetic_results(
        *(
            dataclasses.replace(measurement(name, 4096, tflops / share), problem=shape.record())
            for name, tflops in ((FLASH, 300.0), (own.short_form(), 600.0))
        )
    )


def with_rates(results: BenchmarkResults) -> BenchmarkResults:
    """With a matmul rate of 800 TFLOP/s and a mma.sync rate of 600, BURST_GAIN times that in
    bursts."""
    rates = [
        RateRecord(name, "bf16", round(gain * speed * 10**9), (1.0,), "", load)
        for load, gain in ((BURST, BURST_GAIN), (SUSTAINED, 1.0))
        for name, speed in ((MATMUL, 800), (MMA_SYNC, 600))
    ]
    return dataclasses.replace(results, rates=tuple(rates))
