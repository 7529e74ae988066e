"""Which tests of kernels the README's command runs, and which have the marker `matrix`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tiers import (
    abilities,
    fastest_configs,
    is_of_first_tier,
    is_of_gpu_tier,
    leading_configs,
    stands_for_its_step,
    usual_dtype,
)

from flash_helpers.kernel_configs import FAMILIES, STEPS, Config, Element, config_from_short_form
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.rows import SOFTMAX
from flash_helpers.tune.winners import BestConfig, BestConfigs

ROOT = Path(__file__).resolve().parents[1]
CORNERS = ("right_at_the_corners", "corners_of_the_declaration")
DISTRIBUTIONS = (
    "heads_of_all_distributions",
    "keys_of_all_distributions",
    "all_inputs_are_right",
)
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)

LISTED = """
import json
from flash_helpers.kernel_configs import Config

class Lists:
    def pytest_collection_finish(self, session):
        found = []
        for item in session.items:
            config = getattr(item, "callspec", None) and item.callspec.params.get("config")
            if isinstance(config, Config):
                is_matrix = item.get_closest_marker("matrix") is not None
                found.append([item.originalname, config.short_form(), is_matrix])
        open(FILE, "w").write(json.dumps(found))

import pytest
arguments = ["-n", "0", "-q", "--collect-only", "tests/check", "tests/operations", "-m", MARKERS]
raise SystemExit(pytest.main(arguments, plugins=[Lists()]))
"""


@dataclass(frozen=True)
class Case:
    """A test of a config."""

    test: str
    config: Config
    is_matrix: bool


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """The simulated tests that have a config, as pytest collects them, of the matrix and not."""
    file = tmp_path_factory.mktemp("listed") / "cases.json"
    program = LISTED.replace("FILE", repr(str(file))).replace("MARKERS", '"matrix or not matrix"')
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(file.read_text())
    return [Case(test, config_from_short_form(name), marked) for test, name, marked in found]


def sweeps(
    folder: Path, speeds: Mapping[str, float], gpu: str = "NVIDIA H200", **options: Any
) -> None:
    """Write the file of a GPU's winners, one of each config, with its speed. options: of the
    problems."""
    best = tuple(
        BestConfig(
            step=name.partition("_")[0],
            problem=replace(config_from_short_form(name).measured(512), **options).record(),
            config=name,
            mean_speed=1.0,
            of_first=speed,
            n_candidates=1,
            sizes=(512,),
            **dict.fromkeys(("date", "commit", "driver", "compiler", "torch"), ""),
        )
        for name, speed in speeds.items()
    )
    BestConfigs(gpu, "9.0", best).save(folder / f"best_{gpu.split()[-1].lower()}.json")


def hopper(step: str, dtype: str) -> str:
    return HOPPER.fixed_config(HOPPER.steps[step], Element.from_name(dtype)).short_form()


def test_the_fastest_of_each_dtype_is_that_of_the_sweeps(tmp_path) -> None:
    speeds = {
        hopper("h26", "bf16"): 2.0,
        hopper("h27", "bf16"): 1.9,
        hopper("h27", "fp16"): 1.8,
        hopper("h26", "fp16"): 1.7,
        AMPERE.progression()[0].short_form(): 3.0,
    }
    sweeps(tmp_path, speeds)
    found = {config.short_form() for config in fastest_configs(HOPPER, tmp_path)}
    assert found == {hopper("h26", "bf16"), hopper("h27", "fp16")}
    assert fastest_configs(SOFTMAX, tmp_path) == []


def test_of_several_gpus_the_one_with_the_highest_speed_counts(tmp_path) -> None:
    sweeps(tmp_path, {hopper("h26", "bf16"): 1.9})
    sweeps(tmp_path, {hopper("h28", "bf16"): 2.0}, "NVIDIA H100")
    found = [config.short_form() for config in fastest_configs(HOPPER, tmp_path)]
    assert found == [hopper("h28", "bf16")]


def test_a_winner_on_causal_problems_is_not_the_fastest(tmp_path) -> None:
    sweeps(tmp_path, {hopper("h27", "bf16"): 2.0}, causal=True)
    assert fastest_configs(HOPPER, tmp_path) == []


@each_family
def test_first_last_and_fastest_step_are_led_by_their_configs_in_all_dtypes(family) -> None:
    leading = leading_configs(family.name)
    steps = [*family.steps.values()]
    first, last = steps[0], steps[-1]
    for step in (first, last):
        assert {c.dtype for c in leading if c.step is step} == {*family.dtypes}
    fastest = fastest_configs(family)
    assert leading >= {*fastest}


@each_family
def test_a_step_in_the_middle_has_one_config_of_the_first_tier(family) -> None:
    steps = {c.step for c in leading_configs(family.name)}
    for step in {*family.steps.values()} - steps:
        own = [c for c in family.progression() if c.step is step]
        assert sum(map(stands_for_its_step, own)) == 1
        assert not any(map(is_of_first_tier, own))


@each_family
def test_on_a_gpu_the_first_step_is_like_any_other(family) -> None:
    steps = [*family.steps.values()]
    first, last = steps[0], steps[-1]
    for config in family.progression():
        leads = config.step is last or config in fastest_configs(family)
        assert is_of_gpu_tier(config) is leads
    assert any(is_of_gpu_tier(c, once=True) for c in family.progression() if c.step is first)


@pytest.mark.slow
class TestCollected:
    def test_the_first_tier_simulates_every_step(self, cases: list[Case]) -> None:
        assert {case.config.step.id for case in cases if not case.is_matrix} == {*STEPS}

    @pytest.mark.parametrize("kind", [CORNERS, DISTRIBUTIONS], ids=["corners", "distributions"])
    @each_family
    def test_the_leading_configs_are_on_everything(
        self, family, kind: tuple[str, ...], cases: list[Case]
    ) -> None:
        own = [case for case in cases if case.config.family is family and _is_of(case, kind)]
        first_tier = {case.config for case in own if not case.is_matrix}
        leading = leading_configs(family.name)
        fixing = {c for c in leading if getattr(c.supports, "exact", ())}  # a window or a softcap
        plain = {c for c in leading - fixing if not c.supports.options.get("causal")}
        usual = {c for c in leading if c.dtype is usual_dtype(family)}
        if kind is CORNERS:
            steps = {c for c in usual if stands_for_its_step(c) or c in fastest_configs(family)}
            assert first_tier >= steps
            for config in usual:
                of_step = (c for c in first_tier if c.step is config.step)
                assert any(abilities(c) >= abilities(config) for c in of_step)
        else:
            assert first_tier >= plain
        assert first_tier <= leading

    @pytest.mark.parametrize("kind", [CORNERS, DISTRIBUTIONS], ids=["corners", "distributions"])
    def test_no_config_is_left_out_of_both_tiers(
        self, kind: tuple[str, ...], cases: list[Case]
    ) -> None:
        tested = {case.config for case in cases if _is_of(case, kind)}
        every = {c for family in FAMILIES.values() for c in family.progression()}
        assert tested >= every


def _is_of(case: Case, kind: tuple[str, ...]) -> bool:
    return any(name in case.test for name in kind)
