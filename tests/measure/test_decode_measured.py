"""The benchmark of decode: caches that no call finds in L2, what takes part, and the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_results import FakeSensor, FakeTimer, measurement, synthetic_results

from flash_helpers.kernel_configs import Config, Element
from flash_helpers.measure.benchmark import (
    BenchmarkRun,
    contenders_for,
    make_input_sets,
    run_benchmark,
)
from flash_helpers.measure.benchmark_tables import report_text
from flash_helpers.measure.results import LOADS, SUSTAINED, Protocol
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.problems import COPY
from flash_helpers.operations.decode.reference import reference
from flash_helpers.registry.decode_sync import DECODE_SYNC
from flash_helpers.runtime.backend import Backend, Findings

OWN = [config for config in DECODE_SYNC.progression() if config.dtype is Element.BF16]
KERNEL, PAGED_KERNEL = OWN[0], next(config for config in OWN if config.supports.pages)
CPU = torch.device("cpu")
PROTOCOL = Protocol(rounds=2, loads=(LOADS[SUSTAINED],))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, 256),
        ({"window_left": 15}, 16),
        ({"page_size": 16, "total_k": 64}, 64),
        ({"page_size": 16, "pages": 64}, 256),  # pages that no sequence has are not read
    ],
    ids=str,
)
def test_caches_rotate_so_that_no_call_finds_its_own_in_l2(options, keys) -> None:
    problem = Decode(1, 1, d_head=32, len_k=256, **options)
    timer = FakeTimer(cache_bytes=40_000)
    found = make_input_sets(problem, Element.BF16, CPU, timer, Protocol())
    sets = len(found)
    row_bytes = 2 * 32 * 2  # of K and of V
    assert keys * row_bytes < problem.bytes < keys * row_bytes + 512
    assert (sets - 1) * problem.bytes >= 2 * timer.cache_bytes > (sets - 2) * problem.bytes
    for name in ("k", "v"):
        assert len({own.inputs[name].data_ptr() for own in found}) == sets
    assert not found[0].inputs["q"].equal(found[1].inputs["q"])


def by_the_reference(
    config: Config, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Findings:
    """A kernel that is right."""
    named = dict(zip(Decode.axes, tensors, strict=False))
    given = {name: x for name, x in named.items() if x is not None}
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    problem = Decode.posed(shapes, config.dtype, **options)
    given["o"].copy_(reference(problem, given).expected["o"])
    return Findings()


def run(problem: Decode) -> BenchmarkRun:
    backend = Backend(CPU, "a fake device", by_the_reference, (KERNEL, PAGED_KERNEL))
    contenders = contenders_for(backend.kernels, Element.BF16, backend, OPERATION)
    return run_benchmark(
        *({Element.BF16: contenders}, [problem.len_k], CPU, FakeTimer(), PROTOCOL, FakeSensor()),
        shape_for=lambda size: problem,
    )


@pytest.mark.parametrize(
    ("options", "taking", "refusing"),
    [
        ({}, {"pytorch_flash": ""}, ()),
        ({"page_size": 8, "total_k": 90}, {"pytorch_flash": "lengths that differ"}, (KERNEL,)),
    ],
    ids=["whole", "pages"],
)
def test_each_kernel_is_timed_beside_a_copy_on_every_cache(options, taking, refusing) -> None:
    found = run(Decode(3, 4, len_k=40, kv_heads=2, **options))
    own = {m.name: m for m in found.measurements}
    kernels = {c.short_form() for c in {KERNEL, PAGED_KERNEL} - {*refusing}}
    for name in (*kernels, COPY, f"{COPY}_again"):
        assert own[name].failure == "" and len(own[name].samples_ms) == 2
        assert own[name].first_ms and own[name].is_verified == (name in kernels)
    for name, reason in taking.items():
        assert reason in own[name].failure and bool(reason) == bool(own[name].failure)
    skipped = {skipped.name for skipped in found.skipped}
    assert {c.short_form() for c in refusing} <= skipped and not skipped & kernels
    assert (
        synthetic_results(*found.measurements).failures == []
    )  # a library that does not take pages is none


def test_the_report_has_microseconds_and_percent_of_the_copy() -> None:
    problem = Decode(1, 32, len_k=1024, kv_heads=8)
    times = {COPY: 0.006, "flash_attn": 0.0125, KERNEL.short_form(): 0.008}
    rows = [
        replace(
            measurement(name, 1024, 1.0),
            **{"problem": problem.record(), "samples_ms": (ms,) * 3, "first_ms": (0.006,) * 3},
            **({"relative_bound": None} if name == COPY else {}),
        )
        for name, ms in times.items()
    ]
    text = report_text(synthetic_results(*rows))
    tables = {part.partition("  ")[0]: part.splitlines() for part in text.split("\n\n")}

    def cells(title: str) -> dict[str, str]:
        return {line.split()[0]: line.split()[1] for line in tables[f"bf16, sustained{title}"][1:]}

    speed = problem.bytes / 8000  # bytes per nanosecond
    assert cells(", GB/s")[KERNEL.short_form()] == f"{speed:,.0f}"
    assert cells(", µs")[KERNEL.short_form()] == "8.0"
    assert cells(", µs")["flash_attn"] == "12.5"
    assert cells(", % of copy")[KERNEL.short_form()] == "75.0"
    assert cells(", % of the best of the others")[KERNEL.short_form()] == "156.2"  # not of the copy
