"""Mistakes planted in kernels of Hopper's units are found and told, with their line."""

import re

import pytest
from hopper_cases import CASES
from hopper_faults import HAZARDS, KERNELS, LINTS, Fault, module_of, plant, source_of
from hopper_launches import launched

from flash_helpers.ptx import errors, load_ptx

FAULTS = {f"{kind}: {name}": f for kind, faults in HAZARDS.items() for name, f in faults.items()}
RAISED = [name for name, fault in FAULTS.items() if fault.error not in LINTS]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_its_place(name) -> None:
    fault = FAULTS[name]
    case = CASES[fault.case]
    right = (KERNELS / f"{case.module}.ptx").read_text()
    assert (plant(fault) != right) == bool(fault.edits)
    assert fault.launch(case) is not case or fault.edits
    assert any(fault.at in line for line in source_of(case))


def test_every_kind_is_planted_in_kernels_of_different_design() -> None:
    for kind, faults in HAZARDS.items():
        assert len({CASES[fault.case].kernel for fault in faults.values()}) >= 2, kind


def told_lines(fault: Fault, message: str) -> list[str]:
    """The lines of the .cu file that a message names."""
    case = CASES[fault.case]
    source = source_of(case)
    return [source[int(n) - 1] for n in re.findall(rf"\b{case.module}\.cu:(\d+)", message)]


@pytest.mark.parametrize("name", RAISED)
def test_a_fault_is_found_and_told(name) -> None:
    fault = FAULTS[name]
    case = fault.launch(CASES[fault.case])
    module = load_ptx(plant(fault)) if fault.edits else module_of(case.module)
    with pytest.raises(errors.SimulatorError) as caught:
        launched(case, module)
    assert type(caught.value).__name__ == fault.error, caught.value
    assert any(fault.at in line for line in told_lines(fault, str(caught.value))), caught.value
