"""Results of several families: every step has its row and its place, in the registry's order."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
from benchmark_results import full_results, measurement, synthetic_results
from general_hopper import GENERAL

from flash_helpers.kernel_configs import Element, FlashForwardKernelConfig
from flash_helpers.measure import benchmark_tables
from flash_helpers.measure.benchmark import kernel_contender
from flash_helpers.measure.benchmark_tables import (
    lengths_table,
    progression_table,
    supports_table,
)
from flash_helpers.measure.plots import PROGRESSION, plot_svg, progression_numbers, seq_len_numbers
from flash_helpers.measure.results import (
    BURST,
    CUDNN,
    FLASH,
    LIBRARY_NAMES,
    SUSTAINED,
    BenchmarkResults,
)
from flash_helpers.operations.attention_forward.problems import MEASURED_LENGTHS, default_shape
from flash_helpers.registry import families
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.config import number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.supports import Supports


@dataclass(frozen=True)
class OtherConfig(FlashForwardKernelConfig):
    """Config of a made-up family whose kernels are like those of the first."""

    example: ClassVar[str] = "o1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"

    version: int = number("o")

    @property
    def family(self) -> Family:
        return OTHER


class WideConfig(OtherConfig):
    """Config of the same family, with tiles of 192 rows and 80 keys."""

    @property
    def supports(self) -> Supports:
        return replace(super().supports, blocks={"B_r": 192, "B_c": 80})


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
    operation=AMPERE.operation,
    kernels=AMPERE.kernels,
    header=AMPERE.header,
    dtypes=AMPERE.dtypes,
)


@pytest.fixture
def results(monkeypatch) -> BenchmarkResults:
    """o1 at 290 TFLOP/s, o2 at 300, its wide tile at 360, beside the first family's steps."""
    measured = full_results().measurements
    own = [m for m in measured if m.config is None or m.config.family is AMPERE]
    both = {"ampere": AMPERE, "other": OTHER}
    monkeypatch.setattr(families, "FAMILIES", both)
    first, second = (c for c in OTHER.progression() if c.dtype == Element.BF16)
    speeds = {first: 290.0, second: 300.0, second.replace(B_r=128): 360.0}
    more = [
        measurement(config.short_form(), seq_len, tflops, load=load)
        for load in (BURST, SUSTAINED)
        for seq_len in (1024, 4096)
        for config, tflops in speeds.items()
    ]
    return synthetic_results(*own, *more)


def test_the_table_has_a_row_for_each_step_of_each_family(results: BenchmarkResults) -> None:
    table, _, folded = progression_table(results).partition("<details>")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == [*AMPERE.steps, "o1", "o2", "", ""]
    assert rows[-4][1:6] == ["a first idea", "96.7", "", "", "348"]
    # a tile that is none of the two stands below
    assert rows[-3][2:6] == ["100.0", "", "", "360"]
    assert "| o2 | `o2_bf16_d128_Br128_" in folded


def test_tiles_of_192_rows_and_80_keys_are_measured_at_multiples_of_960() -> None:
    first = next(c for c in OTHER.progression() if c.dtype == Element.BF16)
    contender = kernel_contender(
        WideConfig(**{f.name: getattr(first, f.name) for f in fields(first)}),
        lambda *arguments: None,
    )
    taken = {n: default_shape(n) for n in (960, 7680, 15360)}
    assert not any(map(contender.refusal, taken.values()))
    assert [shape.batch for shape in taken.values()] == [16, 8, 4]
    refused = contender.refusal(default_shape(7680 + 192))
    assert "seq_len 7872 is not a multiple of B_c 80" in refused and "use 8640" in refused
    assert all(contender.refusal(default_shape(n)) for n in MEASURED_LENGTHS)


def test_the_table_by_length_has_a_row_for_each_kernel_of_each_family(
    results: BenchmarkResults,
) -> None:
    text = lengths_table(results, "bf16", SUSTAINED)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    speeds = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[: len(rows) // 2]}
    assert speeds["v1"] == ["110", "110"]
    assert speeds["o1"] == ["290", "290"]
    assert speeds["o2 Br64"] == ["300", "300"]
    assert speeds["o2 Br128"] == ["360", "360"]


def test_what_the_kernels_take_has_a_row_for_each_family(
    results: BenchmarkResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_tables, "FAMILIES", families.FAMILIES)
    _, _, first, second = supports_table().splitlines()
    assert first.startswith("| ampere | fp16, bf16 | 128 | multiples of B_r and B_c,")
    assert second == first.replace("ampere", "other")


def test_what_the_kernels_take_has_a_row_for_each_kind_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_tables, "FAMILIES", {"hopper": GENERAL})
    _, _, *rows = supports_table().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(row[0], row[6]) for row in cells] == [
        ("hopper h1 to h18", "none"),
        ("hopper h19", "none"),
        ("hopper h20", "softmax_scale, return_lse"),
        ("hopper h21 to h22", "causal, softmax_scale, return_lse"),
        ("hopper h23 to h24", "causal, softmax_scale, return_lse"),  # of clusters: shorter ones
    ]
    assert [row[3].partition(", up to")[0] for row in cells] == [
        "multiples of B_r and B_c",
        *4 * ["any, different ones"],
    ]


def test_the_plots_have_a_place_for_each_step_and_a_line_for_the_last_of_each_family(
    results: BenchmarkResults,
) -> None:
    numbers = progression_numbers(results, "bf16")
    assert numbers["steps"] == [*AMPERE.steps, "o1", "o2"]
    assert numbers["fixed"][-2:] == [96.7, 100.0]
    assert numbers["large"][-2:] == [None, None]
    lines = seq_len_numbers(results, "bf16")["lines"]
    assert {LIBRARY_NAMES[FLASH], LIBRARY_NAMES[CUDNN], "v16, large tile"} <= set(lines)
    assert lines["o2"] == [360.0, 360.0]
    assert "o1" not in lines  # no faster than the steps before it
    assert ">o2<" in plot_svg(results, [PROGRESSION]).replace(" ", "")
