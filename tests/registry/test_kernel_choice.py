"""Which kernel computes a problem that nobody names one for: what configs support decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from other_family import OTHER, OtherConfig

from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    AttentionForward,
    Config,
    Element,
)
from flash_helpers.operations.attention_backward import OPERATION as GRADIENTS
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.supports import RETURN_LSE, AttentionSupports
from flash_helpers.registry.choice import first_that_takes, preferred_steps
from flash_helpers.registry.family import HELD_BACK, LAST_RESORT, StepEntry

A100, H100, B200, T4 = (8, 0), (9, 0), (10, 0), (7, 5)
NEWEST = [
    [*family.steps.values()][-1]
    for family in reversed(FAMILIES.values())
    if family.operation is OPERATION
]
PORTABLE = [step for step in NEWEST if FAMILIES[step.family].is_portable]
WHOLE_BLOCKS = [
    FAMILIES[STEPS[name].family].fixed_config(STEPS[name], Element.BF16) for name in ("o5", "v16")
]


def fixed_configs(
    dtype: Element = Element.BF16, capability: tuple[int, int] | None = None
) -> list[Config]:
    return [
        FAMILIES[step.family].fixed_config(step, dtype)
        for step in preferred_steps(OPERATION, capability)
    ]


TAKEN_WHERE_MEASURED = {
    "norm_cluster",
    "softmax_cluster",
    "softmax_backward_cluster",
    "norm_backward_staged",
    "norm_backward_cluster",
    "joint_cluster",
    "joint_linear",
    "adaptive_norm",
}
"""Families of which calls take no step but where it was the fastest on a measured grid."""


class TestSteps:
    def test_are_the_last_of_each_family_the_newest_first(self):
        assert preferred_steps(OPERATION, H100) == NEWEST
        assert [step.family for step in NEWEST] == ["general", "hopper", "overlap", "ampere"]
        assert NEWEST[-1].id == "v16"

    @pytest.mark.parametrize("capability", [None, A100, B200])
    def test_are_of_portable_families_in_the_simulator_and_on_other_gpus(self, capability):
        assert preferred_steps(OPERATION, capability) == PORTABLE
        assert [step.family for step in PORTABLE] == ["overlap", "ampere"]

    @pytest.mark.parametrize("capability", [None, A100, H100])
    def test_of_the_forward_pass_give_the_same_bits_in_every_call(self, capability):
        """So that `deterministic=True` asks for nothing else."""
        assert all(step.is_deterministic for step in preferred_steps(OPERATION, capability))

    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
    def test_are_of_each_family_the_last_and_one_that_gives_the_same_bits(self, family):
        ready = [s for s in family.steps.values() if not s.traits & {HELD_BACK, LAST_RESORT}]
        known = [step for step in ready if step.is_deterministic]
        resort = [step for step in family.steps.values() if LAST_RESORT in step.traits]
        assert (ready == []) == (family.name in TAKEN_WHERE_MEASURED)
        is_known = not ready or ready[-1].is_deterministic
        wanted = ready[-1:] + ([] if is_known else known[-1:]) + resort[::-1]
        assert [*family.preferred] == wanted

    @pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
    @pytest.mark.parametrize("capability", [A100, H100])
    def test_of_each_operation_end_with_one_that_gives_the_same_bits(self, operation, capability):
        names = {family.partition(":")[2].lower() for family in operation.families}
        found = preferred_steps(operation, capability)
        assert found[-1].is_deterministic if found else names <= TAKEN_WHERE_MEASURED

    def test_that_add_in_any_order_stand_before_the_last_that_does_not(self):
        backward, portable = FAMILIES["backward"], [STEPS["p5"], STEPS["p3"]]
        assert preferred_steps(GRADIENTS, A100) == portable
        hopper = [STEPS["m1"], STEPS["b17"], STEPS["b4"]]
        assert preferred_steps(GRADIENTS, H100) == [*hopper, *portable]
        for step in backward.preferred:
            assert {*backward.dtypes_of(step)} == {Element.FP16, Element.BF16}

    @pytest.mark.parametrize(
        ("held_back", "wanted"),
        [
            (range(6, 14), "o5"),
            (range(6, 13), "o13"),  # no trait of an earlier step holds a measured one back
            ([13], "o12"),
            (range(1, 14), None),
        ],
    )
    def test_are_not_those_held_back(self, held_back, wanted):
        overlap = replace(
            FAMILIES["overlap"],
            entries=tuple(
                replace(entry, traits=entry.traits | ({HELD_BACK} if n in held_back else set()))
                for n, entry in enumerate(FAMILIES["overlap"].entries, start=1)
            ),
        )
        found = preferred_steps(OPERATION, A100, [overlap, FAMILIES["ampere"]])
        assert [step.id for step in found] == ["v16", *([wanted] if wanted else [])]

    @pytest.mark.parametrize(
        ("traits", "wanted"), [({HELD_BACK}, ["b8", "b4"]), (set(), ["b9", "b4"])]
    )
    def test_of_gradients_pass_over_a_step_until_it_is_measured(self, traits, wanted):
        backward = replace(
            FAMILIES["backward"],
            entries=(
                *FAMILIES["backward"].entries[:8],
                StepEntry("next", "the next step", "b9.cuh", traits=frozenset(traits)),
            ),
        )
        assert [step.id for step in backward.preferred] == wanted
        assert not backward.steps["b9"].is_deterministic

    def test_that_are_a_last_resort_stand_behind_the_others(self):
        decode = FAMILIES["decode"]
        assert [step.id for step in decode.preferred] == ["d12", "d13", "d5"]
        portable = FAMILIES["decode_sync"]
        assert [step.id for step in portable.preferred] == ["c4", "c6", "c5"]
        first, *others, last = decode.entries
        later = replace(decode, entries=(first, *others, last, replace(last, traits=frozenset())))
        assert [step.id for step in later.preferred] == ["d14", "d13", "d5"]
        assert LAST_RESORT not in later.steps["d14"].traits

    def test_have_no_trait_that_they_drop(self):
        traits = {step.id: step.traits for step in FAMILIES["decode"].steps.values()}
        assert {"shares", "programmatic"} <= traits["d7"] - traits["d8"]
        assert {"pieces", "paged", "producer"} <= traits["d8"]

    def test_are_none_where_no_family_runs(self):
        assert preferred_steps(OPERATION, T4) == []

    def test_of_one_architecture_are_preferred_there_and_left_out_elsewhere(self):
        families = [*FAMILIES.values(), OTHER]
        assert preferred_steps(OPERATION, H100, families)[0].id == "y3"
        assert preferred_steps(OPERATION, B200, families) == PORTABLE
        assert preferred_steps(OPERATION, None, families) == PORTABLE


class TestConfig:
    @pytest.mark.parametrize("capability", [None, H100])
    @pytest.mark.parametrize("dtype", OTHER.dtypes)
    def test_of_every_corner_of_every_declaration_is_the_first_that_declares_it(
        self, dtype, capability
    ):
        configs = fixed_configs(dtype, capability)
        chosen = set()
        for corner in (corner for config in configs for corner in config.supports.corners()):
            config = first_that_takes(corner, configs)
            assert not config.refusal(corner)
            assert all(earlier.refusal(corner) for earlier in configs[: configs.index(config)])
            chosen.add(config)
        assert configs[0] in chosen
        if configs[0].supports.blocks:  # who takes any length leaves none to others
            assert configs[-1] in chosen

    @pytest.mark.parametrize(("seq_len", "step"), [(128, "o5"), (64, "v16"), (192, "v16")])
    def test_of_a_length_that_the_large_tile_does_not_divide_has_smaller_ones(self, seq_len, step):
        assert first_that_takes(AttentionForward(1, 2, seq_len), WHOLE_BLOCKS).step.id == step

    def test_for_an_ability_is_the_one_that_declares_it(self):
        configs = [PLAIN, SUMMING, MASKED]
        for options, wanted in (
            ({}, PLAIN),
            ({"return_lse": True}, SUMMING),
            ({"causal": True}, MASKED),
        ):
            assert first_that_takes(AttentionForward(1, 1, 128, **options), configs) == wanted
        with pytest.raises(ValueError, match="nearest: causal is not supported by"):
            first_that_takes(AttentionForward(1, 1, 128, causal=True, return_lse=True), configs)

    def test_of_a_causal_mask_is_not_for_a_problem_without(self):
        problem = AttentionForward(1, 1, 128)
        assert first_that_takes(problem, [MASKED, PLAIN]) == PLAIN
        with pytest.raises(ValueError, match=r"not causal is not supported .*: choose the config"):
            first_that_takes(problem, [MASKED])


@dataclass(frozen=True)
class MaskedConfig(OtherConfig):
    """A config of a kernel with a causal mask."""

    @property
    def supports(self) -> AttentionSupports:
        return replace(super().supports, causal=True)


@dataclass(frozen=True)
class SummingConfig(OtherConfig):
    """A config of a kernel that writes the LSE."""

    @property
    def supports(self) -> AttentionSupports:
        return replace(super().supports, abilities=frozenset({RETURN_LSE}))


PLAIN = OtherConfig(3, Element.BF16, 128, lazy=True)
MASKED = MaskedConfig(3, Element.BF16, 128, lazy=True)
SUMMING = SummingConfig(3, Element.BF16, 128, lazy=True)


class TestRefusal:
    @pytest.mark.parametrize(
        ("problem", "message"),
        [
            (AttentionForward(1, 1, 150), r"seq_len 150 is not a multiple of .* 64 .*: use 192"),
            (
                AttentionForward(1, 1, 128, d_head=96),
                "d_head 96 is not .*: pad .* to 128",
            ),
            (AttentionForward(1, 65536, 128), "heads 65536 is over the limit 65535"),
        ],
    )
    def test_names_the_nearest_that_is_supported(self, problem, message):
        with pytest.raises(
            ValueError, match=f"no kernel of .* for this device takes {problem}; .*"
        ):
            first_that_takes(problem, WHOLE_BLOCKS)
        with pytest.raises(ValueError, match=message):
            first_that_takes(problem, WHOLE_BLOCKS)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"causal": True}, "causal is not supported by v16_.*: without causal=True every"),
            ({"return_lse": True}, "return_lse is not supported by v16_.*: without return_lse"),
            ({"softmax_scale": 1}, "softmax_scale 1 is not supported by v16_.*: without"),
            (
                {"kv_heads": 2},
                r"heads 6 on 2 of k and v is not supported by v16_.*k.repeat_interleave\(3, dim=2",
            ),
            ({"len_k": 256}, "len_q 128 with len_k 256 is not supported by v16_.*: pad q to as"),
            (
                {"len_k": 64},
                "len_q 128 with len_k 64 is not supported .*: split q into calls of 64",
            ),
        ],
    )
    def test_names_what_is_asked_for_and_what_to_do_without_it(self, options, message):
        with pytest.raises(ValueError, match=message):
            first_that_takes(AttentionForward(1, 6, 128, **options), WHOLE_BLOCKS)
