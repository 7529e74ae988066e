"""Resident blocks, against CUDA's own calculator and what an H100 reported."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sass_text import DEFAULT, PROGRESSION, in_tiers, kernel_of, kernels_of, needs, of_version
from sass_text import kernel as text_kernel

from flash_helpers.gpu import LIMITS
from flash_helpers.measure.machine_code import config_facts
from flash_helpers.measure.results import load_results
from flash_helpers.sass.analyse.bound import Launch
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.analyse.occupancy import (
    kernel_occupancy,
    misfit,
    occupancy,
    require_threads,
)
from flash_helpers.sass.analyse.report import report_on
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.report_text import report_json, report_text

# blocks by compute capability, as cuda_occupancy.h of CUDA 13.0 computes them
CALCULATED = """
registers  smem threads barriers |  75  80  86  89  90 100 103 110 120 121
       32      0     32        0 |  16  32  16  24  32  32  32  24  24  24
       32      0   1024        1 |   1   2   1   -   -   2   -   1   1   -
       16      0     32        4 |  16  32   -   -  16  16  16   6   6   6
       16      0     32       16 |  16   -   -   -   4   4   4   1   1   1
      168  49152    128        1 |   1   3   2   -   3   3   -   3   2   -
      169  49152    128        1 |   1   2   -   -   -   2   -   2   2   -
      255  49152    256        1 |   -   -   -   -   1   -   -   -   -   -
      255      0    512        1 |   0   -   -   -   0   0   -   0   0   -
      128 101376    128        1 |   0   -   -   1   -   2   -   2   1   -
      128 101377    128        1 |   -   -   -   0   -   -   -   -   -   -
       64  65536    160        1 |   1   -   -   -   3   3   3   3   1   1
      243      0     96        0 |   2   2   -   -   -   2   -   2   2   -
       16      0     32        1 |  16   -   -   -   -  32  32  24  24  24
       40   1000     96        0 |  10   -   -   -   -  16   -  16  16   -
       64  32768    160        1 |   2   -   -   -   -   6   6   6   3   3
       32  16384     64        2 |   4   -   -   -   -  13  13  12   5   5
"""


def calculated() -> Iterator[tuple[tuple[int, ...], int]]:
    """The arguments of `occupancy`, and the blocks."""
    header, *rows = CALCULATED.strip().splitlines()
    for row in rows:
        launch, blocks = (part.split() for part in row.split("|"))
        for capability, found in zip(header.partition("|")[2].split(), blocks, strict=True):
            if found != "-":
                yield (int(capability), *map(int, launch)), int(found)


@pytest.mark.parametrize(("launch", "blocks"), calculated())
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
@in_tiers(PROGRESSION)
def test_the_kernels_are_resident_as_the_h100_reported(root: Path, configs):
    results = load_results(root / "benchmarks/results/h100.json")
    reported = {record.name: record for record in results.resources}
    kernels = kernels_of(configs, "sm_90")
    checked = 0
    for config in configs:
        record = reported.get(config.short_form())
        if record is None:
            continue
        found = occupancy(90, record.registers, record.smem_bytes, config.n_threads, barriers=1)
        assert found.blocks == record.blocks_per_sm
        if kernels[config].resources.registers == record.registers:
            held = config_facts(config, kernels[config], None).occupancy
            assert held.blocks == record.blocks_per_sm
        checked += 1
    if of_version(1) in configs:  # the part that leads
        assert checked >= 16


def test_a_kernel_is_resident_as_it_is_launched():
    config = of_version(16)
    kernel = kernel_of(config, DEFAULT)
    assert config_facts(config, kernel, None).occupancy == kernel_occupancy(
        kernel, config.n_threads, config.smem_bytes
    )
    most = LIMITS[kernel.capability].smem_bytes
    assert kernel_occupancy(kernel, 128, most).blocks == 1
    assert kernel_occupancy(kernel, 128, most + 1).blocks == 0


@pytest.mark.parametrize(
    ("registers", "most", "threads", "reason"),
    (
        (32, 256, 257, r"257 threads per block: it was compiled for at most 256 \("),
        (168, None, 512, r"with 168 registers .* take 86,016 registers, .* 65,536: .* 384 threads"),
        (255, None, 257, r"take 98,304 registers, .* launch at most 256 threads"),
        (32, None, 1024, ""),
        (128, 512, 512, ""),
        (255, None, 256, ""),
    ),
)
def test_more_threads_than_a_launch_takes_are_refused(registers, most, threads, reason):
    planted = text_kernel("EXIT", registers=registers)
    planted = replace(planted, resources=replace(planted.resources, max_threads=most))
    if not reason:
        require_threads(planted, threads)
        # what is refused has no block, and what is not has one
        assert kernel_occupancy(planted, threads, 0).blocks
        return
    with pytest.raises(SassError, match=reason):
        require_threads(planted, threads)
    with pytest.raises(SassError, match=reason):
        _ = KernelFacts(kernel=planted, name="planted", launch=Launch(threads)).occupancy


def test_a_block_without_room_is_told_with_what_it_takes_and_the_limit():
    planted = text_kernel("EXIT")
    planted = replace(planted, resources=replace(planted.resources, static_smem_bytes=1024))
    assert misfit(planted, 226 * 1024) == ""
    report = report_on(KernelFacts(kernel=planted, name="planted", launch=Launch(64, 229 * 1024)))
    text = report_text(report)
    told = "a block does not fit on an SM: 235,520 bytes of shared memory per block, limit 232,448"
    assert text.count("does not fit") == text.count(told) == 1
    assert "0 blocks" not in text and "occupancy" not in text
    held = report_json(report)["occupancy"]
    assert (held["blocks"], held["misfit"]) == (0, told.partition(": ")[2])
