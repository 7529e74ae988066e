"""Choosing kernels of a file by a name: of the whole, of a part, or by a pattern."""

import pytest
from sass_text import DEFAULT, list_kernels

from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.machine_code import kernel_names
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.choice import (
    choose,
    identifiers,
    matching,
    require_one,
    require_one_architecture,
)
from flash_helpers.sass.read.records import SassError

V1 = "_ZN2v114forward_kernelI20v1_bf16_d128_Br64_Q0EEv17ForwardKernelArgs"
V11 = "_ZN3v1114forward_kernelI21v11_bf16_d128_Br64_Q0EEv17ForwardKernelArgs"
V11_DB = "_ZN3v1114forward_kernelI24v11_bf16_d128_Br64_Q0_dbEEv17ForwardKernelArgs"
OURS = [V1, V11, V11_DB]
FLOATS = "_Z4gemmIfLi64EEvPKT_PS0_i"  # void gemm<float, 64>(float const*, float*, int)
DOUBLES = "_Z4gemmIdLi64EEvPKT_PS0_i"
LAMBDA = "_ZZ4mainENKUlvE0_clEv"  # main::{lambda()#2}::operator()() const


class TestIdentifiers:
    @pytest.mark.parametrize(
        ("symbol", "names"),
        [
            ("spills", ["spills"]),
            ("_Z5callsPfi", ["calls"]),
            (V1, ["v1", "forward_kernel", "v1_bf16_d128_Br64_Q0", "ForwardKernelArgs"]),
            # numbers that are values or substitutions, and no lengths
            ("_Z4gemmILi64ELb1ELin3EEvPKfS0_", ["gemm"]),
            ("_ZN8mma_rate4loopIL5DType1EEEvPfi", ["mma_rate", "loop", "DType"]),
            ("_ZN1a1bINS_1cES1_EEvT0_T_", ["a", "b", "c"]),
            (
                "void v1::forward_kernel<v1_a>(Args)",
                ["void", "v1", "forward_kernel", "v1_a", "Args"],
            ),
            # cut off
            ("_ZN2v114forward", ["v1", "forward"]),
            ("", []),
        ],
    )
    def test_are_names_of_a_symbol(self, symbol, names) -> None:
        assert list(identifiers(symbol)) == names


class TestMatching:
    @pytest.mark.parametrize(
        ("name", "symbols"),
        [
            (V1, [V1]),
            ("v1", [V1]),
            ("v11", [V11, V11_DB]),
            # itself, though it begins another
            ("v11_bf16_d128_Br64_Q0", [V11]),
            ("v11_bf16", [V11, V11_DB]),
            # no part of 64
            ("Br6", []),
            ("d128_Br64", OURS),
            ("forward_kernel", OURS),
            ("*v11_bf16*", [V11, V11_DB]),
            ("*I??v1_*", [V1]),
            ("v2", []),
            ("v1*", []),
        ],
    )
    def test_prefers_the_whole_to_a_part(self, name, symbols) -> None:
        assert matching(OURS, name) == symbols

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            (FLOATS, [FLOATS]),
            ("void gemm<float, 64>(float const*, float*, int)", [FLOATS]),
            ("void gemm<float,64>(float const *, float *, int)", [FLOATS]),
            ("gemm<float, 64>", [FLOATS]),
            ("gemm<double", [DOUBLES]),
            ("gemm", [FLOATS, DOUBLES]),
            ("main::{lambda()#2}", [LAMBDA]),
            ("*gemm<*, 64>*int)", [FLOATS, DOUBLES]),
            ("gemm<float, 6", []),  # cuts a number
            ("gemm<half", []),
        ],
    )
    def test_of_names_in_cpp(self, name, found) -> None:
        assert matching([FLOATS, DOUBLES, LAMBDA], name) == found

    def test_prefers_a_symbol_to_those_that_hold_it(self) -> None:
        assert matching(["vec_add", "add"], "add") == ["add"]
        assert matching(["vec_add", "vec_mul"], "add") == ["vec_add"]

    def test_finds_each_kernel_of_the_library_by_its_short_form(self) -> None:
        symbols = [symbol for _, symbol in list_kernels(library_path(), DEFAULT)]
        for config in AMPERE.progression():
            (symbol,) = matching(symbols, config.short_form())
            assert config.step.namespace in identifiers(symbol)


class TestChoice:
    THERE = (("sm_80", V1), ("sm_90", V1), ("sm_90", V11), ("sm_90", V11_DB))

    def test_without_names_is_all(self) -> None:
        assert choose("file", self.THERE) == list(self.THERE)
        assert choose("file", self.THERE, "sm_80") == [("sm_80", V1)]

    def test_of_several_names_is_all_that_they_mean_in_the_order_of_the_file(self) -> None:
        assert choose("file", self.THERE, "sm_90", ["v11_bf16_d128_Br64_Q0", "v1"]) == [
            ("sm_90", V1),
            ("sm_90", V11),
        ]

    @pytest.mark.parametrize(
        ("architecture", "names", "message"),
        [
            ("sm_75", [], "file holds no kernel for sm_75, only for sm_80, sm_90"),
            (
                None,
                ["v1", "v3"],
                "no kernel 'v3', only v1_bf16_d128_Br64_Q0, v11_bf16_d128_Br64_Q0, v11_bf16_d128_B",
            ),
            ("sm_80", ["v11"], "file holds no kernel 'v11', only v1_bf16_d128_Br64_Q0"),
        ],
    )
    def test_of_what_is_not_there_says_what_is(self, architecture, names, message) -> None:
        with pytest.raises(SassError) as error:
            choose("file", self.THERE, architecture, names)
        assert message in str(error.value)

    def test_of_one_says_what_tells_several_apart(self) -> None:
        with pytest.raises(
            SassError,
            match="2 such kernels: name one of v11_bf16_d128_Br64_Q0, v11_bf16_d128_Br64_Q0_db",
        ):
            require_one("file", choose("file", self.THERE, None, ["v11"]))
        with pytest.raises(SassError, match="code for sm_80, sm_90: choose one with --arch"):
            require_one("file", choose("file", self.THERE, None, [V1]))
        require_one("file", choose("file", self.THERE, "sm_90", ["v1"]))
        require_one_architecture("file", choose("file", self.THERE, "sm_90"))

    def test_of_many_is_told_in_short(self) -> None:
        there = [("sm_90", f"_Z3k{number:02}v") for number in range(40)]
        with pytest.raises(SassError, match=r"no kernel 'x', only k00, k01, .*, k15 and 24 more$"):
            choose("file", there, None, ["x"])


class TestSteps:
    def test_are_their_namespaces(self) -> None:
        assert kernel_names(["7", "v9", "1..3"]) == ["v7", "v9", "v1", "v2", "v3"]
        assert {name for name in kernel_names([f"1..{len(AMPERE.steps)}"])} <= set(STEPS)

    @pytest.mark.parametrize(
        "name", ["v99", "k2", "9..7", "all", "ampere", "gemm_64", "v7_bf16", ""]
    )
    def test_that_there_are_none_of_are_names_of_other_kernels(self, name) -> None:
        assert kernel_names([name]) == [name]
