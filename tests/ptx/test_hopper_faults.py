"""Mistakes planted in kernels of Hopper's units."""

from __future__ import annotations

import pytest
from hopper_faults import CASES, HAZARDS, KERNELS, plant, source_of

FAULTS = {f"{kind}: {name}": f for kind, faults in HAZARDS.items() for name, f in faults.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_its_place(name) -> None:
    fault = FAULTS[name]
    case = CASES[fault.case]
    right = (KERNELS / f"{case.module}.ptx").read_text()
    assert (plant(fault) != right) == bool(fault.edits)
    assert (fault.launch(case) is not case) == (not fault.edits)
    assert any(fault.at in line for line in source_of(case))


def test_every_kind_is_planted_in_kernels_of_different_design() -> None:
    for kind, faults in HAZARDS.items():
        assert len({CASES[fault.case].kernel for fault in faults.values()}) >= 2, kind
