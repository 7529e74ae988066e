"""The portable kernels compile for every architecture that NVRTC knows, from sm_80 on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from both_compilers import compile_unit, nvrtc_compiler
from tiers import stands_for_its_step

from flash_helpers.compile.codegen import families_in_library, kernel_unit
from flash_helpers.compile.compilers import check_target
from flash_helpers.compile.toolchain import LOWEST_ARCHITECTURE, BuildError
from flash_helpers.kernel_configs import Config, get_listed_configs

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""Those of NVRTC 13.0."""


def cases() -> Iterator[Any]:
    """Each step's config, and each listed one of the last step, on each of its architectures; the
    first tier has the first and the last architecture for the last step of each family that is
    compiled at first use."""
    for config in get_listed_configs():
        family = config.family
        is_last = config.step is [*family.steps.values()][-1]
        if not family.is_portable or not (is_last or stands_for_its_step(config)):
            continue
        is_last &= family not in families_in_library()
        own = [number for number in ARCHITECTURES if family.targets_for([number])]
        for architecture in own:
            is_first_tier = is_last and architecture in (own[0], own[-1])
            marks = () if is_first_tier else (pytest.mark.matrix(family.name),)
            name = f"{config.step.id}-{architecture}"
            yield pytest.param(config, architecture, marks=marks, id=name)


@pytest.mark.parametrize(("config", "architecture"), list(cases()))
def test_a_portable_kernel_compiles(config: Config, architecture: int, tmp_path: Path) -> None:
    compiler = nvrtc_compiler()
    target = f"compute_{architecture}"
    try:
        check_target(compiler, target)
    except BuildError as error:
        pytest.skip(str(error))
    for function, name in config.kernels.items():
        unit = tmp_path / f"{name}.cu"
        unit.write_text(kernel_unit(config, function))
        result = compile_unit(compiler, ROOT, unit, target, tmp_path / name)
        assert result.status == 0, result.log
        assert f".target sm_{architecture}\n" in result.ptx


def test_the_table_has_what_nvrtc_has() -> None:
    compiler = nvrtc_compiler()
    if compiler.version != (13, 0):
        pytest.skip(f"the table is of 13.0, and this is {compiler.name}")
    assert {a for a in compiler.architectures if a >= LOWEST_ARCHITECTURE} == {*ARCHITECTURES}
