"""The process whose first calls benchmarks/first_call.py measures. It prints ProcessTimes as JSON.

Arguments: the short form of a kernel, "cuda" or "cpu", the number of calls, and the shape of q, k
and v.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch


def times_us(
    call: Callable[[], object], calls: int, clock: Callable[[], int] = time.perf_counter_ns
) -> list[float]:
    """Microseconds of host time of each call, without waiting for the device between them. clock:
    gives nanoseconds."""
    stamps = [clock()]
    for _ in range(calls):
        call()
        stamps.append(clock())
    return [(end - begin) / 1e3 for begin, end in itertools.pairwise(stamps)]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    kernel, device, calls, *shape = arguments
    q, k, v = torch.zeros(3, *map(int, shape), device=device, dtype=torch.bfloat16).unbind()
    if device == "cuda":
        torch.cuda.synchronize()  # the context is there
    began = time.perf_counter_ns()
    import flash_attention

    import_ms = (time.perf_counter_ns() - began) / 1e6
    from flash_helpers.compile.jit import default_jit
    from flash_helpers.runtime import library

    def call() -> object:
        if device == "cuda":
            return flash_attention.forward(kernel, q, k, v)
        return library.ptx_path(library.resolve(kernel))

    found = times_us(call, int(calls))
    compiler = default_jit().compiler.name
    print(json.dumps({"import_ms": import_ms, "calls_us": found, "compiler": compiler}))


if __name__ == "__main__":
    main(sys.argv[1:])
