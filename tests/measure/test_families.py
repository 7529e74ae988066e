"""Results of several families: every step has its row and its place, in the registry's order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar

import pytest
from benchmark_results import BF16, full_results, measurement

from flash_helpers.kernel_configs import STEPS, DType, FlashForwardKernelConfig
from flash_helpers.measure import plots
from flash_helpers.measure.benchmark_tables import progression_table
from flash_helpers.measure.plots import PROGRESSION, plot_svg, progression_numbers, seq_len_numbers
from flash_helpers.measure.results import CUDNN, FLASH, LIBRARY_NAMES, BenchmarkResults
from flash_helpers.registry import families
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.config import number
from flash_helpers.registry.family import Family, StepEntry


@dataclass(frozen=True)
class OtherConfig(FlashForwardKernelConfig):
    """Of a made-up family whose kernels are like those of the first."""

    example: ClassVar[str] = "o1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"

    version: int = number("o")

    @property
    def family(self) -> Family:
        return OTHER


OTHER = Family(
    name="other",
    title="a made-up family",
    prefix="o",
    rank=1,
    config=OtherConfig,
    base=AMPERE.base,
    entries=(
        StepEntry("first", "a first idea", "o1.cuh", parent="v16"),
        StepEntry("tuned", "another tile", "o2.cuh", opens={"B_r": (64, 128)}),
    ),
    targets=AMPERE.targets,
    arguments=AMPERE.arguments,
    map_header=PurePosixPath("other_kernels.cuh"),
)


@pytest.fixture
def results(monkeypatch) -> BenchmarkResults:
    """o1 at 290 TFLOP/s, o2 at 300, its wide tile at 360, beside the first family's steps."""
    both = {"ampere": AMPERE, "other": OTHER}
    monkeypatch.setattr(families, "FAMILIES", both)
    monkeypatch.setattr(plots, "FAMILIES", both)
    first, second = (c for c in OTHER.progression() if c.dtype == DType.BF16)
    speeds = {first: 290.0, second: 300.0, second.replace(B_r=128): 360.0}
    found = full_results()
    more = [
        measurement(config.short_form(), seq_len, tflops)
        for seq_len in found.seq_lens
        for config, tflops in speeds.items()
    ]
    return dataclasses.replace(found, measurements=(*found.measurements, *more))


def test_the_table_has_a_row_for_each_step_of_each_family(results: BenchmarkResults) -> None:
    lines = [line for line in progression_table(results).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == [*STEPS, "o1", "o2", "", ""]
    assert rows[-4][1:3] == ["a first idea", "290"]
    assert (rows[-3][5], rows[-3][8]) == ("360", "B_r 128")


def test_the_plots_have_a_place_for_each_step_and_a_line_for_the_last_of_each_family(
    results: BenchmarkResults,
) -> None:
    numbers = progression_numbers(results, "bf16")
    assert numbers["steps"] == [*STEPS, "o1", "o2"]
    assert numbers["best"][-1] == 120.0  # 360 over flash's 300
    lines = seq_len_numbers(results, "bf16")["lines"]
    assert {LIBRARY_NAMES[FLASH], LIBRARY_NAMES[CUDNN], BF16[-1].step.id} <= set(lines)
    assert lines["o2"] == [300.0, 300.0] and lines["o2, best config"] == [360.0, 360.0]
    assert "o1" in lines  # 5% more than any step before it
    assert ">o2<" in plot_svg(results, [PROGRESSION]).replace(" ", "")
