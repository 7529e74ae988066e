"""Made-up results of the benchmark, and what stands in for a GPU's clock when there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flash_helpers.kernel_configs import (
    LARGE_TILE,
    DType,
    get_kernel_progression_configs,
)
from flash_helpers.measure.benchmark import default_shape
from flash_helpers.measure.results import (
    CUDNN,
    FLASH,
    LIBRARY_NAMES,
    MATMUL,
    MMA_SYNC,
    BenchmarkResults,
    ClockRecord,
    Measurement,
    Protocol,
    Provenance,
    RateRecord,
)

BF16 = [c for c in get_kernel_progression_configs() if c.dtype == DType.BF16]
LARGE_TILE_7 = next(c for c in BF16 if c.step.id == "v7").replace(**LARGE_TILE)


class FakeTimer:
    """Runs work at once; each start takes the next of the given times, then 5 ms for ever."""

    def __init__(
        self, times_ms: tuple[float, ...] = (), cache_bytes: int = 0, flushes: bool = False
    ) -> None:
        self.times_ms = list(times_ms)
        self.cache_bytes = cache_bytes
        self.flushes = flushes
        self.n_synchronized = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def start(self, work: Callable[[], None], times: int = 1) -> Callable[[], float]:
        for _ in range(times):
            work()
        started_before = self.n_synchronized
        milliseconds = self.times_ms.pop(0) if self.times_ms else 5.0

        def read() -> float:
            assert self.n_synchronized > started_before, "read before the device was waited for"
            return milliseconds

        return read

    def synchronize(self) -> None:
        self.n_synchronized += 1


class FakeMonitor:
    """Reads the clocks of a made-up GPU, once before its block and once after."""

    def __init__(self, device: object = None) -> None:
        self.readings: list[tuple[float, ...]] = []

    def __enter__(self) -> FakeMonitor:
        self.readings.append((1980.0, 650.0, 60.0))
        return self

    def __exit__(self, *exception: object) -> None:
        self.readings.append((1755.0, 700.0, 65.0))


def measurement(
    name: str, seq_len: int, tflops: float, dtype: str = "bf16", failure: str = ""
) -> Measurement:
    """A synthetic one of the given speed, on the benchmark's own problem."""
    shape = default_shape(seq_len)
    milliseconds = shape.operations / tflops / 1e9
    return Measurement(
        name=name,
        ran="" if name in LIBRARY_NAMES else name,
        dtype=dtype,
        batch=shape.batch,
        n_heads=shape.heads,
        seq_len=seq_len,
        d_head=shape.d_head,
        input_sets=2,
        launches_per_sample=10,
        samples_ms=() if failure else (milliseconds * 0.9, milliseconds, milliseconds * 1.2),
        max_abs_error=0.001,
        relative_error=0.001,
        max_abs_bound=0.01,
        relative_bound=0.004,
        failure=failure,
    )


def synthetic_results(*measurements: Measurement) -> BenchmarkResults:
    """With the measurements, as an H100 had made them."""
    return BenchmarkResults(
        provenance=Provenance(
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
        ),
        protocol=Protocol(),
        clocks=(ClockRecord("bf16", 4096, 3, (1700.0, 1755.0, 1980.0), (600.0, 650.0, 700.0), 65),),
        resources=(),
        measurements=measurements,
    )


def full_results() -> BenchmarkResults:
    """Flash at 300, the n-th step at 100 + 10 n, v7's large tile at 330, at two lengths."""
    found = []
    for seq_len in (1024, 4096):
        found += [measurement(FLASH, seq_len, 300.0), measurement(CUDNN, seq_len, 600.0)]
        for n, config in enumerate(BF16, start=1):
            found.append(measurement(config.short_form(), seq_len, 100.0 + 10 * n))
        found.append(measurement(LARGE_TILE_7.short_form(), seq_len, 330.0))
    return synthetic_results(*found)


def with_rates(results: BenchmarkResults) -> BenchmarkResults:
    """With a matmul rate of 800 TFLOP/s and a mma.sync rate of 600."""
    rates = [
        RateRecord(name, "bf16", speed * 10**9, (1.0,), "")
        for name, speed in ((MATMUL, 800), (MMA_SYNC, 600))
    ]
    return dataclasses.replace(results, rates=tuple(rates))
