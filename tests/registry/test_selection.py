"""Steps, families and configs by the names that a command line gives them."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import pytest
from other_family import OTHER

from flash_helpers.kernel_configs import (
    FAMILIES,
    LARGE_TILE,
    STEPS,
    AttentionForward,
    Element,
    get_kernel_progression_configs,
    get_listed_configs,
)
from flash_helpers.registry import families, selection
from flash_helpers.registry.config import ranges_text
from flash_helpers.registry.selection import (
    UsageError,
    choose_kernels,
    find_steps,
    names_of,
    parse_config_option,
    parse_steps,
    require_supported,
    require_taken,
    select_kernels,
)

LISTED = get_listed_configs()
PROGRESSION = get_kernel_progression_configs()


@pytest.fixture
def two_families(monkeypatch) -> Iterator[None]:
    """The registry with a second family."""
    both = MappingProxyType({**FAMILIES, "other": OTHER})
    steps = MappingProxyType({**STEPS, **OTHER.steps})
    for module in (selection, families):
        monkeypatch.setattr(module, "FAMILIES", both)
        monkeypatch.setattr(module, "STEPS", steps)
    yield


def ids(selector: str) -> list[str]:
    found = find_steps(selector)
    assert found is not None
    return [step.id for step in found]


class TestSteps:
    @pytest.mark.parametrize("selector", ["9", "v9"])
    def test_a_bare_number_is_of_the_ampere_family(self, selector):
        assert ids(selector) == ["v9"]

    @pytest.mark.parametrize("selector", ["7..9", "v7..v9", "v7..9", "7..v9", "7-9"])
    def test_a_range_has_both_ends(self, selector):
        assert ids(selector) == ["v7", "v8", "v9"]

    def test_a_family_is_all_its_steps(self, two_families):
        assert ids("ampere") == [step for step in STEPS if step.startswith("v")]
        assert ids("other") == ["y1", "y2", "y3"]

    def test_all_is_every_family(self, two_families):
        assert ids("all") == [*STEPS, "y1", "y2", "y3"]

    def test_of_another_family_go_by_its_letter(self, two_families):
        assert ids("y2") == ["y2"]
        assert ids("y1..y3") == ids("y1..3") == ["y1", "y2", "y3"]

    @pytest.mark.parametrize("selector", ["v7..y2", "7..y2"])
    def test_a_range_across_families_is_refused(self, two_families, selector):
        with pytest.raises(UsageError, match=r"goes from one family to another: .* v7\.\.v"):
            find_steps(selector)

    @pytest.mark.parametrize(
        ("selector", "reason"),
        [
            ("v99", r"the nearest is v\d+"),
            ("0", "the nearest is v1$"),
            ("h99", r"the nearest is h\d+"),
            ("9..7", r"a range goes from the lower to the higher step, such as v7\.\.v9$"),
            ("v9..99", r"the nearest is v\d\d"),
            ("y6", r"no family has steps y1, y2, …; there are v1 to v\d+.*; the nearest is v6"),
            ("yz3", r"no family has steps yz1, yz2, …; there are v1 to v\d+"),
        ],
    )
    def test_that_do_not_exist_are_refused_with_the_nearest(self, selector, reason):
        with pytest.raises(UsageError, match=reason):
            find_steps(selector)

    @pytest.mark.parametrize("selector", ["99", "0", "h99", "v9..99", "q3"])
    def test_that_do_not_exist_are_refused_with_those_of_all_families(self, selector):
        with pytest.raises(UsageError) as refused:
            find_steps(selector)
        for family in FAMILIES.values():
            assert ranges_text(family.steps.values()) in str(refused.value)

    @pytest.mark.parametrize("selector", ["v7_bf16", "ampere7", "", "v", "v7..", "1.5"])
    def test_have_no_other_form(self, selector):
        assert find_steps(selector) is None
        with pytest.raises(UsageError, match="is not a step"):
            parse_steps([selector])

    @pytest.mark.parametrize(
        ("misspelt", "nearest"), [("ampare", "ampere"), ("Ampere", "ampere"), ("al", "all")]
    )
    def test_that_are_misspelt_name_the_nearest(self, misspelt, nearest):
        with pytest.raises(UsageError, match=f"the nearest is {nearest}$"):
            parse_steps([misspelt])
        with pytest.raises(UsageError, match=f"the nearest is {nearest}$"):
            select_kernels(LISTED, [misspelt], Element, PROGRESSION)

    def test_are_given_in_order_each_once(self):
        assert [step.id for step in parse_steps(["9", "7..8", "v8"])] == ["v7", "v8", "v9"]


class TestSelectKernels:
    def test_of_a_step_takes_every_built_config(self):
        found = select_kernels(LISTED, ["v7"], [Element.BF16], PROGRESSION)
        assert found == [c for c in LISTED if c.step.id == "v7" and c.dtype == Element.BF16]
        assert len(found) > 1

    def test_of_a_step_with_a_problem_takes_the_configs_made_for_such(self):
        problem = AttentionForward(1, 1, 100)
        causal = AttentionForward(1, 1, 100, causal=True)

        def names(selectors: list[str], asked: AttentionForward) -> list[str]:
            found = select_kernels(
                LISTED, selectors, [Element.BF16], problems={asked.operation: asked}
            )
            return [config.short_form() for config in found]

        built = [c.short_form() for c in LISTED if c.step.id == "h21" and c.dtype == Element.BF16]
        own = [name for name in built if name.endswith("_causal")]
        assert own and names(["h21"], causal) == own
        assert names(["h21"], problem) == [name for name in built if name not in own]
        # named itself it stays, as does a step that has none: each says why it refuses
        assert set(names(["h21", own[0]], problem)) == set(built)
        assert names(["v1"], causal) == names(["v1"], problem) != []

    def test_without_a_selector_takes_the_default_that_is_built(self):
        assert select_kernels(LISTED[:3], [], Element, PROGRESSION) == LISTED[:3]

    def test_all_and_a_family_take_what_is_built_of_them(self):
        assert select_kernels(LISTED, ["all"], Element, []) == LISTED
        some = [config for config in LISTED if config.step.id in ("v3", "v4")]
        assert select_kernels(some, ["ampere"], Element, []) == some

    def test_a_short_form_means_itself(self):
        assert select_kernels(LISTED, [LISTED[5].short_form()], Element, []) == [LISTED[5]]

    def test_that_are_no_short_form_are_refused_with_one_of_each_family(self):
        with pytest.raises(UsageError) as refused:
            select_kernels(LISTED, ["row_softmax"], Element, [])
        for family in FAMILIES.values():
            assert family.name in str(refused.value)
            assert family.config.example in str(refused.value)

    @pytest.mark.parametrize("file", ["my.ptx", "./kernel", "a/b.cubin", "lib.so", "v7.cu"])
    def test_that_are_files_name_the_tools_for_files(self, file):
        with pytest.raises(UsageError, match=r"is a file, .*debug\.py --ptx .*simulate\.py"):
            select_kernels(LISTED, [file], Element, [])

    def test_take_a_config_that_is_not_listed_and_no_step_without_a_listed_one(self):
        config = LISTED[0].replace(version=2, swizzled=True)
        assert select_kernels([LISTED[0]], [config.short_form()], Element, []) == [config]
        with pytest.raises(UsageError, match="no config of v9 is listed"):
            select_kernels([LISTED[0]], ["9"], Element, [])

    def test_of_a_dtype_that_is_not_there_name_those_that_are(self):
        with pytest.raises(UsageError, match=r"and dtype fp32: .*; there is fp16, bf16$"):
            select_kernels(LISTED, ["v7"], [Element.FP32], [])
        with pytest.raises(UsageError, match="no config of v7 is listed in fp32; there is fp16, b"):
            choose_kernels(LISTED, ["v7"], Element.FP32)
        with pytest.raises(UsageError, match=r"'hopper': no config of h1 to h.* in fp32; there"):
            choose_kernels(LISTED, ["hopper"], Element.FP32)

    def test_of_a_dtype_that_is_not_there_are_refused(self):
        with pytest.raises(UsageError, match="dtype fp16: widen one of the two"):
            select_kernels(LISTED, [PROGRESSION[1].short_form()], [Element.FP16], [])


class TestChooseKernels:
    def test_takes_the_fixed_config_of_each_step_in_the_order_asked_for(self):
        found = choose_kernels(LISTED, ["9", "v7..8", "9"], Element.BF16)
        assert [config.step.id for config in found] == ["v9", "v7", "v8"]
        assert set(found) <= set(PROGRESSION)

    def test_takes_the_config_with_the_wanted_values(self):
        (found,) = choose_kernels(LISTED, ["7"], Element.BF16, {"B_r": 128})
        assert found.B_r == 128
        with pytest.raises(UsageError, match="--config B_r=256: no such config of v7 is listed"):
            choose_kernels(LISTED, ["7"], Element.BF16, {"B_r": 256})

    def test_names_the_dtype_that_a_step_is_not_listed_in(self):
        with pytest.raises(UsageError, match="no config of o4 is listed in fp16"):
            choose_kernels(LISTED, ["o4..5"], Element.FP16)

    def test_takes_the_nearest_to_a_config(self):
        large = PROGRESSION[13].replace(**LARGE_TILE)
        found = choose_kernels(LISTED, ["7", "8"], Element.BF16, large)
        assert found[0] == large
        assert found[1].step.id == "v8"


class TestConfigOption:
    def test_is_a_short_form_or_values_of_fields(self):
        assert parse_config_option([LISTED[0].short_form()]) == LISTED[0]
        found = parse_config_option(["B_r=128", "mma_double_buffer_loads=false"])
        assert found == {"B_r": 128, "mma_double_buffer_loads": False}

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("tile=3", "expected a field and its value, such as B_r=128"),
            ("version=3", "expected a field"),
            ("B_r=many", "B_r takes a number, not 'many'"),
            ("swizzled=2", "swizzled takes true or false, not '2'"),
            ("v7_bf16", "is not a config's short form"),
        ],
    )
    def test_is_nothing_else(self, word, reason):
        with pytest.raises(UsageError, match=reason):
            parse_config_option([word])


def test_names_tell_apart_configs_of_one_step():
    v7 = next(c for c in PROGRESSION if c.step.id == "v7" and c.dtype == Element.BF16)
    large = v7.replace(**LARGE_TILE)
    assert names_of([v7, PROGRESSION[-1]]) == ["v7", PROGRESSION[-1].step.id]
    assert names_of([v7, large]) == ["v7 Br64", "v7 Br128"]
    assert names_of([v7, v7.replace(dtype=Element.FP16)]) == ["v7 bf16", "v7 fp16"]


def test_a_problem_that_a_kernel_does_not_take_is_refused_with_the_way_out():
    v7 = next(c for c in PROGRESSION if c.step.id == "v7")
    require_supported([v7], AttentionForward(1, 1, 128))
    with pytest.raises(UsageError, match=r"seq_len 100 is not a multiple of B_r 64 .*: use 128"):
        require_supported([v7], AttentionForward(1, 1, 100))


def test_a_problem_that_one_of_the_kernels_takes_is_not_refused():
    v7 = next(c for c in PROGRESSION if c.step.id == "v7")
    configs = [v7.replace(**LARGE_TILE), v7]
    require_taken(configs, AttentionForward(1, 1, 64))
    with pytest.raises(UsageError, match=r"seq_len 100 is not a multiple of B_r 128 .*: use 128"):
        require_taken(configs, AttentionForward(1, 1, 100))
