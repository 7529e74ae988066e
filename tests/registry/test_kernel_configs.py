"""The registry's face: steps and configs."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys

import pytest

from flash_helpers import kernel_configs
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    Element,
    FlashForwardKernelConfig,
    config_from_short_form,
    config_from_symbol,
    differing_fields,
    get_autotuning_kernel_configs,
    get_kernel_progression_configs,
    get_listed_configs,
    nearest_config,
    read_configs,
)
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.families import with_siblings
from flash_helpers.registry.general import GENERAL
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.registry.overlap import OVERLAP

PROGRESSION = get_kernel_progression_configs()
TO_BUILD = get_listed_configs()
SWEEP = get_autotuning_kernel_configs()
EVERY_CONFIG = sorted({*PROGRESSION, *TO_BUILD, *SWEEP})
# of the families of attention
ATTENTION = [c for c in TO_BUILD if c.family.operation is AMPERE.operation]
SWEPT = [c for c in SWEEP if c.family.operation is AMPERE.operation]


def progression(version: int, dtype: Element = Element.BF16) -> FlashForwardKernelConfig:
    return next(c for c in PROGRESSION if (c.step.id, c.dtype) == (f"v{version}", dtype))


def fields_of(family) -> list[str]:
    return [field.name for field in dataclasses.fields(family.config)]


def mangled(config: FlashForwardKernelConfig) -> str:
    """The kernel's symbol by the rules of the Itanium C++ ABI."""
    namespace, name = config.step.namespace, config.short_form()
    function = config.main_kernel
    kernel = f"{len(namespace)}{namespace}{len(function)}{function}I{len(name)}{name}E"
    return f"_ZN{kernel}Ev17ForwardKernelArgs"


class TestSteps:
    def test_are_numbered_from_one_in_each_family(self):
        for family in FAMILIES.values():
            assert [step.number for step in family.steps.values()] == list(
                range(1, len(family.entries) + 1)
            )
            assert list(family.steps) == [
                f"{family.prefix}{step.number}" for step in family.steps.values()
            ]

    def test_stand_on_a_parent_that_comes_before_them(self):
        known: list[str] = []
        for step in STEPS.values():
            assert step.parent is None or step.parent in known
            known.append(step.id)
        # one for each operation
        first = {FAMILIES[step.family].operation.name for step in STEPS.values() if not step.parent}
        assert first == set(OPERATIONS)
        assert sum(step.parent is None for step in STEPS.values()) == len(OPERATIONS)

    def test_have_ids_slugs_and_ideas_of_their_own(self):
        for values in (
            [step.id for step in STEPS.values()],
            [(step.family, step.slug) for step in STEPS.values()],
            [(step.family, step.idea) for step in STEPS.values()],
        ):
            assert len(set(values)) == len(values)
            assert all(values)

    def test_live_in_one_file_each(self, root):
        for step in STEPS.values():
            source = root / step.source
            assert source.is_file(), source
            assert f"namespace {step.namespace} {{" in source.read_text()

    def test_fix_or_tune_every_option(self):
        for step in STEPS.values():
            _, second, *options = fields_of(FAMILIES[step.family])
            assert second == "dtype"
            assert step.fixed.keys() | step.tunable.keys() == set(options)
            assert not step.fixed.keys() & step.tunable.keys()

    def test_of_the_ampere_family_are_sixteen_and_can_be_tuned_from_the_seventh_on(self):
        steps = AMPERE.steps.values()
        assert [step.id for step in steps] == [f"v{n}" for n in range(1, len(AMPERE.entries) + 1)]
        assert next(step.number for step in steps if step.tunable) == 7

    def test_keep_what_a_step_before_them_brought(self):
        assert "keys_backwards" not in STEPS["v12"].traits
        assert {"keys_backwards", "pieces"} <= STEPS["v16"].traits

    def test_cannot_be_changed_by_accident(self):
        with pytest.raises(TypeError):
            STEPS["v17"] = STEPS["v16"]
        with pytest.raises(TypeError):
            STEPS["v1"].fixed["B_r"] = 128


class TestProgression:
    def test_has_every_step_in_its_dtypes_in_order(self):
        wanted = [
            (step.id, dtype)
            for step in STEPS.values()
            for dtype in FAMILIES[step.family].dtypes_of(step)
        ]
        assert [(c.step.id, c.dtype) for c in PROGRESSION] == wanted

    def test_has_the_steps_in_fp16_of_which_numbers_or_place_make_it_worth_a_kernel(self):
        in_fp16 = {c.step.id for c in PROGRESSION if c.dtype is Element.FP16}
        for family in FAMILIES.values():
            steps = [*family.steps]
            assert {steps[0], steps[-1]} <= in_fp16
        assert {*AMPERE.steps} <= in_fp16
        middle = {"o2", "h8", "h12", "h16", "h18", "h19"}
        assert in_fp16 & {*[*OVERLAP.steps][1:4], *[*HOPPER.steps][1:-1]} == middle
        assert {c.step.id for c in PROGRESSION if c.dtype is Element.BF16} == {*STEPS}

    def test_of_the_ampere_family_keeps_the_tile_shape(self):
        shapes = {(c.B_r, c.B_c, c.n_warps, c.d_head) for c in AMPERE.progression()}
        assert shapes == {(64, 64, 4, 128)}

    @pytest.mark.parametrize(
        ("version", "changes"),
        [
            (2, {"swizzled": True}),
            (3, {"eager_load_blocks": True}),
            (4, {f"{name}_mma_load_K_tiles": 1 for name in "QKV"}),
            (5, {"mma_double_buffer_loads": True}),
            (6, {"optimized_softmax": True}),
            *((version, {}) for version in range(7, 16)),
            (16, {"static_row_stride": 2048}),
        ],
    )
    def test_changes_one_thing_a_step(self, version, changes):
        before, after = progression(version - 1), progression(version)
        differing = differing_fields(before, after)
        assert {name: getattr(after, name) for name in differing if name != "version"} == changes

    def test_follows_the_entries_of_the_registry(self):
        for family in FAMILIES.values():
            steps = list(family.steps.values())
            for before, after, entry in zip(steps, steps[1:], family.entries[1:], strict=False):
                changed = {k: v for k, v in after.options.items() if before.options[k] != v}
                assert changed == {k: v for k, v in entry.sets.items() if before.options[k] != v}


class TestSetsOfConfigs:
    def test_to_build_holds_the_progression_and_large_tiles(self):
        assert set(PROGRESSION) <= set(TO_BUILD)
        large = {
            (c.step.id, c.dtype) for c in ATTENTION if (c.B_r, c.B_c, c.n_warps) == (128, 64, 4)
        }
        steps = [
            step
            for step in STEPS.values()
            if step.family == "overlap" or (step.family == "ampere" and step.number >= 7)
        ]
        wanted = {
            (step.id, dtype) for step in steps for dtype in FAMILIES[step.family].dtypes_of(step)
        }
        assert large == wanted

    def test_to_build_is_sorted_and_without_doubles(self):
        assert sorted(set(TO_BUILD)) == TO_BUILD

    def test_every_static_stride_has_its_general_sibling(self):
        static = [config for config in TO_BUILD if getattr(config, "static_row_stride", 0)]
        assert static
        assert {config.replace(static_row_stride=0) for config in static} <= set(TO_BUILD)

    def test_siblings_are_added_once(self):
        static = progression(16)
        general = static.replace(static_row_stride=0)
        assert with_siblings([static, static]) == [general, static]
        assert with_siblings([general]) == [general]

    def test_sweep_covers_the_tunable_versions_and_holds_their_progression_config(self):
        tunable = {f"v{number}" for number in range(7, 17)}
        tunable |= {step.id for step in OVERLAP.steps.values() if step.number >= 5}
        tunable |= {step.id for step in HOPPER.steps.values() if step.number >= 7}
        tunable |= {*GENERAL.steps}
        assert {config.step.id for config in SWEPT} == tunable
        assert {c for c in PROGRESSION if c.step.id in tunable} <= set(SWEEP)
        assert {
            config for config in ATTENTION if config.B_r == 128 and config.step.id == "v7"
        } <= set(SWEEP)

    def test_sweep_of_hopper_tries_both_orders_of_its_warpgroups(self):
        found = {c.ping_pong for c in SWEPT if c.step.id == "h7"}
        assert found == {False, True}

    def test_sweep_tries_every_tile_shape_that_fits(self):
        shapes = {(c.B_r, c.B_c, c.n_warps) for c in SWEPT if isinstance(c, MmaSyncConfig)}
        assert shapes == {
            *((64, B_c, 4) for B_c in (32, 64, 128)),
            *((128, B_c, 4) for B_c in (32, 64)),  # B_c 128 leaves no register for the rest
            *((128, B_c, 8) for B_c in (32, 64, 128)),
            *((256, B_c, 8) for B_c in (32, 64)),  # of overlap alone
        }


class TestShortForm:
    def test_reads_as_documented(self):
        assert (
            progression(1, Element.FP16).short_form() == "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"
        )
        assert (
            progression(16).short_form()
            == "v16_bf16_d128_Br64_Bc64_w4_async_eager_swizzled_Q1_K1_V1_db_ffma_rs2048"
        )

    def test_round_trips_for_every_config(self):
        for config in EVERY_CONFIG:
            assert config_from_short_form(config.short_form()) == config

    def test_is_unique_and_an_identifier(self):
        names = [config.short_form() for config in EVERY_CONFIG]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) for name in names)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "v1",
            "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0 ",
            "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0\n",
            "v01_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0",
            "v2_fp16_d128_Br64_Bc64_w4_swizzled_async_Q0_K0_V0",
            "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0_rs0",
        ],
    )
    def test_of_nothing_else_is_accepted(self, text):
        with pytest.raises(ValueError, match="not a config's short form"):
            FlashForwardKernelConfig.from_short_form(text)

    def test_of_a_dtype_that_the_family_has_not_names_those_that_it_has(self):
        with pytest.raises(ValueError, match="dtype fp32: family ampere has fp16 and bf16"):
            config_from_short_form("v1_fp32_d128_Br64_Bc64_w4_async_Q0_K0_V0")

    @pytest.mark.parametrize(
        ("options", "successor"),
        [
            ("", "o4_bf16_d128_Br128_Bc64_w4 is the same loop, but for its lazy rescale"),
            ("_lazy", "o4_bf16_d128_Br128_Bc64_w4 is the same loop$"),
            ("_mmasum", "o5_bf16_d128_Br128_Bc64_w4 is the same loop, but for its lazy rescale"),
            ("_lazy_mmasum", "o5_bf16_d128_Br128_Bc64_w4 is the same loop$"),
        ],
    )
    def test_of_the_former_options_of_step_16_names_the_step_that_they_are_now(
        self, options, successor
    ):
        large = progression(16).replace(B_r=128).general().short_form()
        with pytest.raises(ValueError, match=successor):
            config_from_short_form(f"{large}_st2{options}")
        with pytest.raises(ValueError, match="Bc64_w4_rs4096 is the same loop"):
            config_from_short_form(f"{large}_rs4096_st2_lazy")

    def test_of_an_impossible_config_tells_the_reason(self):
        with pytest.raises(ValueError, match="v1 fixes swizzled False"):
            FlashForwardKernelConfig.from_short_form(
                "v1_fp16_d128_Br64_Bc64_w4_async_swizzled_Q0_K0_V0"
            )


class TestSymbol:
    def test_demangled_and_mangled_parse_back_for_every_config(self):
        for config in EVERY_CONFIG:
            namespace, name = config.step.namespace, config.short_form()
            function = config.main_kernel
            demangled = f"void {namespace}::{function}<{name}>(Arguments)"
            assert config_from_symbol(demangled) == config
            assert config_from_symbol(mangled(config)) == config
            assert config_from_symbol(f".text.{mangled(config)}") == config

    @pytest.mark.parametrize(
        "symbol", ["main", "void v7::other<int>(int)", "_ZN2v714forward_kernelIiEEvi"]
    )
    def test_of_another_function_is_refused(self, symbol):
        with pytest.raises(ValueError, match="is not the symbol of a kernel of this library"):
            config_from_symbol(symbol)

    def test_in_the_namespace_of_another_version_is_refused(self):
        symbol = f"void v8::forward_kernel<{progression(7).short_form()}>(ForwardKernelArgs)"
        with pytest.raises(ValueError, match="a config of v7 in namespace v8"):
            config_from_symbol(symbol)


V7 = progression(7)


class TestImpossibleConfig:
    @pytest.mark.parametrize(
        ("config", "changes", "reason"),
        [
            (V7, {"version": 0}, "version 0 does not exist: choose one of 1 to "),
            (V7, {"version": 99}, "version 99 does not exist"),
            (V7, {"d_head": 64}, "d_head 64: v7 fixes d_head 128; no step has 64"),
            (progression(3), {"B_r": 128}, "v3 fixes B_r 64; choose v7 to v"),
            (progression(2), {"swizzled": False}, "v2 fixes swizzled True; choose v1$"),
            (
                progression(5),
                {"mma_double_buffer_loads": False},
                "v5 fixes mma_double_buffer_loads True; choose v1 to v4 or v7 to v",
            ),
            (V7, {"async_copy": False}, "no step has False"),
            (V7, {"n_warps": 3}, "n_warps 3 is not a power of two from 1 to 32"),
            (V7, {"n_warps": 64}, "n_warps 64 is not a power of two from 1 to 32"),
            (V7, {"n_warps": 0}, "n_warps 0 is not a power of two"),
            (V7, {"B_r": 96}, "B_r 96 is not a multiple of 64 .*: choose 128"),
            (V7, {"B_r": 0}, "B_r 0 is not a multiple of 64 .*: choose 64"),
            (V7, {"B_c": 40}, "B_c 40 is not a multiple of 16.*: choose 48"),
            (V7, {"B_c": -16}, "B_c -16 is not a multiple of 16.*: choose 16"),
            (
                V7,
                {"B_c": 16, "B_r": 256, "n_warps": 16, "V_mma_load_K_tiles": 0},
                "B_c 16: 64 columns of its tile are 128 chunks of 16 bytes, which 512 threads",
            ),
            (V7, {"B_r": 128, "B_c": 512, "n_warps": 8}, "need 294912 bytes of shared memory"),
            (V7, {"B_r": 128, "B_c": 128}, "need 256 accumulator registers"),
            (V7, {"K_mma_load_K_tiles": 3}, "3 does not divide 8 .*: choose 1, 2, 4, or 0"),
            (V7, {"V_mma_load_K_tiles": -1}, "V_mma_load_K_tiles -1 does not divide 4"),
            (V7, {"K_mma_load_K_tiles": 8}, "K_mma_load_K_tiles 8 is the whole tile .*: write 0"),
            (V7, {"V_mma_load_K_tiles": 4}, "V_mma_load_K_tiles 4 is the whole tile .*: write 0"),
            (V7, {"Q_mma_load_K_tiles": 2}, "2 is neither 0 .* nor K_mma_load_K_tiles 1"),
            (V7, {"Q_mma_load_K_tiles": 0, "K_mma_load_K_tiles": 0}, "nothing is left to buffer"),
            (V7, {"V_mma_load_K_tiles": 0}, "nothing is left to buffer"),
            (
                progression(15),
                {"static_row_stride": 2048},
                "v15 fixes static_row_stride 0; choose v16",
            ),
            (progression(16), {"static_row_stride": 100}, "100 is not a multiple of d_head 128"),
            (progression(16), {"static_row_stride": -128}, "-128 is not a multiple of d_head 128"),
            (V7, {"B_r": 64.0}, "B_r 64.0 has type float: it must be of type int"),
            (V7, {"B_r": True}, "B_r True has type bool"),
            (V7, {"swizzled": 1}, "swizzled 1 has type int: it must be of type bool"),
            (V7, {"dtype": "bf16"}, "dtype 'bf16' has type str: it must be of type Element"),
        ],
    )
    def test_is_refused_with_the_reason(self, config, changes, reason):
        with pytest.raises(ValueError, match=reason):
            config.replace(**changes)

    def test_is_refused_when_made_anew(self):
        with pytest.raises(ValueError, match="B_c 40"):
            FlashForwardKernelConfig(**{**dataclasses.asdict(V7), "B_c": 40})


class TestConfig:
    def test_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            V7.B_r = 128

    def test_sorts_by_its_fields_in_order(self):
        shuffled = random.Random(0).sample(EVERY_CONFIG, len(EVERY_CONFIG))
        assert sorted(shuffled) == sorted(
            shuffled, key=lambda c: (c.family.rank, dataclasses.astuple(c))
        )

    def test_knows_its_threads_and_shared_memory(self):
        assert V7.n_threads == 128
        assert V7.smem_bytes == 48 * 1024

    def test_dtype_has_the_values_of_the_enum(self, root):
        text = (root / "src/include/flash_attention.cuh").read_text()
        body = re.search(r"enum class DType : int \{(.*?)\}", text)[1]
        values = dict(re.findall(r"(\w+) = (\d+)", body))
        assert values == {dtype.name: str(dtype.value) for dtype in Element}


class TestDictionary:
    def test_round_trips(self):
        for config in TO_BUILD:
            assert type(config).from_dict(config.to_dict()) == config

    def test_of_unknown_or_missing_fields_is_refused(self):
        with pytest.raises(ValueError, match=r"unknown fields \['tile'\]"):
            FlashForwardKernelConfig.from_dict({**V7.to_dict(), "tile": 64})
        without = {name: value for name, value in V7.to_dict().items() if name != "B_c"}
        with pytest.raises(ValueError, match=r"lacks the fields \['B_c'\]"):
            FlashForwardKernelConfig.from_dict(without)

    def test_dtype_goes_by_its_names(self):
        names = ("fp16", "bf16", "float16", "BFLOAT16")
        assert [Element.from_name(name) for name in names] == [
            Element.FP16,
            Element.BF16,
            Element.FP16,
            Element.BF16,
        ]
        with pytest.raises(ValueError, match="'fp64' is not one of fp16"):
            Element.from_name("fp64")


class TestDocument:
    def test_is_a_list_or_an_object_of_short_forms_and_fields(self):
        items = [V7.short_form(), progression(16).to_dict()]
        wanted = [V7, progression(16)]
        assert read_configs(items) == wanted
        assert read_configs({"configs": items}) == wanted

    @pytest.mark.parametrize(
        ("document", "reason"),
        [
            ({}, "expected a list of configs"),
            ("v7", "expected a list of configs"),
            ([V7.short_form(), 3], "config 1: 3 is neither"),
            (["v7"], "config 0: 'v7' is not a config's short form"),
            ([{"version": 7}], "config 0: config lacks the fields"),
        ],
    )
    def test_of_anything_else_is_refused(self, document, reason):
        with pytest.raises(ValueError, match=reason):
            read_configs(document)


class TestNearest:
    def test_is_the_config_itself_where_it_is_there(self):
        assert nearest_config(V7, TO_BUILD) == V7

    def test_has_the_fewest_differing_fields(self):
        wanted = V7.replace(B_c=32, V_mma_load_K_tiles=1)
        assert nearest_config(wanted, PROGRESSION) == V7

    def test_prefers_the_same_dtype_then_the_nearest_version(self):
        wanted = progression(9).replace(B_c=128)
        candidates = [progression(9, Element.FP16), progression(10), progression(12)]
        assert nearest_config(wanted, candidates) == progression(10)


def test_needs_nothing_but_the_standard_library():
    names = [
        "kernel_configs",
        "registry.selection",
        *(f"compile.{name}" for name in ("codegen", "toolchain", "build", "ptxas")),
    ]
    program = "".join(f"import flash_helpers.{name}\n" for name in names) + (
        "import sys\n"
        "foreign = {m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names\n"
        "print(*sorted(m for m in foreign if not m.startswith('_')))"
    )
    source = str(kernel_configs.__file__).removesuffix("flash_helpers/kernel_configs.py")
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["flash_helpers"]
