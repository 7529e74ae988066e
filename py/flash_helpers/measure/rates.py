"""Rates at which a chip multiplies matrices: ceilings for a kernel's speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flash_helpers.kernel_configs import Element
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.results import MATMUL, MMA_SYNC, Protocol, RateRecord
from flash_helpers.measure.timing import CudaTimer, Recording, Work, interleaved_rounds, record
from flash_helpers.runtime.mma_loop import MmaLoop

MATMUL_SIZE = 8192  # rows, columns and depth of the matrix product


@dataclass(frozen=True)
class RateWork:
    """A work whose speed is a property of the chip. operations: floating-point operations per
    launch."""

    operations: int
    launch: Work


MakeRateWork = Callable[[Element], RateWork]


def matmul_work(dtype: Element, device: torch.device, size: int = MATMUL_SIZE) -> RateWork:
    """Product of two square matrices by PyTorch's library."""
    a, b = torch.randn(2, size, size, dtype=getattr(torch, dtype.torch_name), device=device)
    product = torch.empty_like(a)
    return RateWork(2 * size**3, lambda: torch.matmul(a, b, out=product))


def mma_sync_work(dtype: Element, device: torch.device) -> RateWork:
    """Loop of mma.sync m16n8k16 on registers. Raises RuntimeError if the library lacks it."""
    loop = MmaLoop(dtype, device)
    return RateWork(loop.operations, loop.launch)


def default_rate_works(device: torch.device) -> dict[str, MakeRateWork]:
    """Works that measure the rates of RATE_NAMES on a CUDA device."""
    return {
        MATMUL: lambda dtype: matmul_work(dtype, device),
        MMA_SYNC: lambda dtype: mma_sync_work(dtype, device),
    }


def measure_rates(
    works: Mapping[str, MakeRateWork],
    dtype: Element,
    timer: CudaTimer,
    protocol: Protocol,
    sensor: GpuSensor,
) -> list[RateRecord]:
    """Measure the rate of each work under each load, interleaved like the contenders of a problem.

    A work that raises gets records with the failure.
    """
    operations = dict.fromkeys(works, 0)
    failures = dict.fromkeys(works, "")
    recordings: dict[str, Recording] = {}
    for name, make in works.items():
        try:
            work = make(dtype)
            recordings[name] = record(work.launch, 1, timer, protocol)
            operations[name] = work.operations
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    found = []
    for load in protocol.loads:
        samples = [recording.sample(load) for recording in recordings.values()]
        rounds = interleaved_rounds(samples, timer, load, protocol.rounds, sensor)
        taken = dict(zip(recordings, rounds, strict=True))
        found += [
            RateRecord(
                name=name,
                dtype=dtype.short,
                operations=operations[name],
                samples_ms=tuple(sample.ms for sample in taken.get(name, ())),
                failure=failures[name],
                load=load.name,
            )
            for name in works
        ]
    return found
