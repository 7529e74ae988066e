"""Resident blocks, against CUDA's own calculator and what an H100 reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from sass_text import DEFAULT, PROGRESSION, needs, of_version, progression_kernels

from flash_helpers.gpu import LIMITS
from flash_helpers.measure.machine_code import config_facts
from flash_helpers.measure.results import load_results
from flash_helpers.sass.analyse.occupancy import kernel_occupancy, occupancy
from flash_helpers.sass.read.records import SassError

# capability, registers, shared memory, threads, barriers: blocks, as cuda_occupancy.h of CUDA 13.0
# computes them
CALCULATED = (
    ((80, 32, 0, 32, 0), 32),
    ((86, 32, 0, 32, 0), 16),
    ((89, 32, 0, 32, 0), 24),
    ((90, 32, 0, 32, 0), 32),
    ((80, 32, 0, 1024, 1), 2),
    ((86, 32, 0, 1024, 1), 1),
    ((90, 16, 0, 32, 4), 16),
    ((80, 16, 0, 32, 4), 32),
    ((90, 16, 0, 32, 16), 4),
    ((80, 168, 49152, 128, 1), 3),
    ((80, 169, 49152, 128, 1), 2),
    ((86, 168, 49152, 128, 1), 2),
    ((90, 168, 49152, 128, 1), 3),
    ((90, 255, 49152, 256, 1), 1),
    ((90, 255, 0, 512, 1), 0),
    ((89, 128, 101376, 128, 1), 1),
    ((89, 128, 101377, 128, 1), 0),
    ((90, 64, 65536, 160, 1), 3),
    ((80, 243, 0, 96, 0), 2),
    ((75, 32, 0, 32, 0), 16),
    ((75, 32, 0, 1024, 1), 1),
    ((75, 16, 0, 32, 4), 16),
    ((75, 16, 0, 32, 1), 16),
    ((75, 168, 49152, 128, 1), 1),
    ((75, 169, 49152, 128, 1), 1),
    ((75, 64, 65536, 160, 1), 1),
    ((75, 243, 0, 96, 0), 2),
    ((75, 255, 0, 512, 1), 0),
    ((75, 16, 0, 32, 16), 16),
    ((75, 40, 1000, 96, 0), 10),
    ((75, 64, 32768, 160, 1), 2),
    ((75, 128, 101376, 128, 1), 0),
    ((75, 32, 16384, 64, 2), 4),
    ((100, 32, 0, 32, 0), 32),
    ((100, 32, 0, 1024, 1), 2),
    ((100, 16, 0, 32, 4), 16),
    ((100, 16, 0, 32, 1), 32),
    ((100, 168, 49152, 128, 1), 3),
    ((100, 169, 49152, 128, 1), 2),
    ((100, 64, 65536, 160, 1), 3),
    ((100, 243, 0, 96, 0), 2),
    ((100, 255, 0, 512, 1), 0),
    ((100, 16, 0, 32, 16), 4),
    ((100, 40, 1000, 96, 0), 16),
    ((100, 64, 32768, 160, 1), 6),
    ((100, 128, 101376, 128, 1), 2),
    ((100, 32, 16384, 64, 2), 13),
    ((110, 32, 0, 32, 0), 24),
    ((110, 32, 0, 1024, 1), 1),
    ((110, 16, 0, 32, 4), 6),
    ((110, 16, 0, 32, 1), 24),
    ((110, 168, 49152, 128, 1), 3),
    ((110, 169, 49152, 128, 1), 2),
    ((110, 64, 65536, 160, 1), 3),
    ((110, 243, 0, 96, 0), 2),
    ((110, 255, 0, 512, 1), 0),
    ((110, 16, 0, 32, 16), 1),
    ((110, 40, 1000, 96, 0), 16),
    ((110, 64, 32768, 160, 1), 6),
    ((110, 128, 101376, 128, 1), 2),
    ((110, 32, 16384, 64, 2), 12),
    ((120, 32, 0, 32, 0), 24),
    ((120, 32, 0, 1024, 1), 1),
    ((120, 16, 0, 32, 4), 6),
    ((120, 16, 0, 32, 1), 24),
    ((120, 168, 49152, 128, 1), 2),
    ((120, 169, 49152, 128, 1), 2),
    ((120, 64, 65536, 160, 1), 1),
    ((120, 243, 0, 96, 0), 2),
    ((120, 255, 0, 512, 1), 0),
    ((120, 16, 0, 32, 16), 1),
    ((120, 40, 1000, 96, 0), 16),
    ((120, 64, 32768, 160, 1), 3),
    ((120, 128, 101376, 128, 1), 1),
    ((120, 32, 16384, 64, 2), 5),
    ((103, 32, 0, 32, 0), 32),
    ((103, 16, 0, 32, 4), 16),
    ((103, 16, 0, 32, 1), 32),
    ((103, 64, 65536, 160, 1), 3),
    ((103, 16, 0, 32, 16), 4),
    ((103, 64, 32768, 160, 1), 6),
    ((103, 32, 16384, 64, 2), 13),
    ((121, 32, 0, 32, 0), 24),
    ((121, 16, 0, 32, 4), 6),
    ((121, 16, 0, 32, 1), 24),
    ((121, 64, 65536, 160, 1), 1),
    ((121, 16, 0, 32, 16), 1),
    ((121, 64, 32768, 160, 1), 3),
    ((121, 32, 16384, 64, 2), 5),
)


@pytest.mark.parametrize(("launch", "blocks"), CALCULATED)
def test_blocks_are_those_of_cudas_calculator(launch, blocks):
    assert occupancy(*launch).blocks == blocks


def test_the_limiter_is_named():
    assert occupancy(90, 168, 49152, 128, 1).limiters == ("registers",)
    assert occupancy(86, 168, 49152, 128, 1).limiters == ("shared memory",)
    assert occupancy(80, 160, 49152, 128, 1).limiters == ("registers", "shared memory")
    assert occupancy(80, 16, 0, 32).limiters == ("blocks",)
    assert occupancy(80, 16, 0, 256).limiters == ("warps",)
    assert occupancy(90, 16, 0, 32, 16).limiters == ("barriers",)


def test_warps_are_those_of_all_blocks():
    found = occupancy(90, 168, 49152, 100)
    assert (found.blocks, found.warps, found.max_warps) == (3, 12, 64)


@pytest.mark.parametrize(
    ("launch", "reason"),
    (
        ((70, 32, 0, 32), "sm_70 are not known: only those of sm_75, sm_80, sm_86, sm_87, sm_89"),
        ((90, 32, 0, 0), "0 threads"),
        ((90, 32, 0, 1025), "1025 threads"),
    ),
)
def test_what_cannot_be_launched_or_is_not_known_is_an_error(launch, reason):
    with pytest.raises(SassError, match=reason):
        occupancy(*launch)


@needs("sm_90")
def test_the_kernels_are_resident_as_the_h100_reported(root: Path):
    results = load_results(root / "benchmarks/results/h100.json")
    reported = {record.name: record for record in results.resources}
    kernels = progression_kernels("sm_90")
    checked = 0
    for config in PROGRESSION:
        record = reported.get(config.short_form())
        if record is None:
            continue
        found = occupancy(90, record.registers, record.smem_bytes, config.n_threads, barriers=1)
        assert found.blocks == record.blocks_per_sm
        if kernels[config].resources.registers == record.registers:
            held = config_facts(config, kernels[config], None).occupancy
            assert held.blocks == record.blocks_per_sm
        checked += 1
    assert checked >= 16


def test_a_kernel_is_resident_as_it_is_launched():
    config = of_version(16)
    kernel = progression_kernels(DEFAULT)[config]
    assert config_facts(config, kernel, None).occupancy == kernel_occupancy(
        kernel, config.n_threads, config.smem_bytes
    )
    most = LIMITS[kernel.capability].smem_bytes
    assert kernel_occupancy(kernel, 128, most).blocks == 1
    assert kernel_occupancy(kernel, 128, most + 1).blocks == 0
