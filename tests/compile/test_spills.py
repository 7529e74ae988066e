"""Kernels that attention() takes below Hopper keep all their values in registers, whatever a call
asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flash_helpers.kernel_configs import Config, Element
from flash_helpers.measure.baseline import figures_of
from flash_helpers.measure.machine_code import all_kernels
from flash_helpers.registry.overlap import OVERLAP, TILES

LAST: Any = OVERLAP.progression()[-1]


def spilling(architecture: str, configs: Iterable[Config]) -> list[str]:
    """Return the short forms of configs whose kernels keep registers in memory."""
    return [
        config.short_form()
        for config, kernels in all_kernels(architecture, configs).items()
        for function, kernel in kernels.items()
        if figures_of(kernel, config, function, "").stack_bytes
    ]


@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [(Element.BF16, "sm_80"), (Element.FP16, "sm_86"), (Element.BF16, "sm_90")],
    ids=["bf16-80", "fp16-86", "bf16-90"],  # 89 has the same code as 86
)
@pytest.mark.matrix("overlap")
def test_no_variant_of_the_last_step_spills(dtype: Element, architecture: str) -> None:
    assert spilling(architecture, LAST.replace(dtype=dtype).variants()) == []


def test_a_softcap_with_the_keys_of_other_kernels_spills() -> None:
    usual = LAST.replace(softcap=True).of_size(128)
    more = usual.replace(B_c=TILES[128]["B_c"])
    assert spilling("sm_90", (usual, more)) == [more.short_form()]


def test_a_tile_of_the_callers_stays_with_other_flags() -> None:
    variants = (config for config in LAST.replace(B_r=64).variants() if config.d_head == 128)
    assert {(config.B_r, config.B_c) for config in variants} == {(64, 64)}
