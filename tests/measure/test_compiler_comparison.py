"""Kernels by two compilers: when they count as equally fast, and how they are timed and written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_results import measurement
from both_compilers import nvrtc_compiler
from fake_backend import fake_backend, load_tool

from flash_helpers.compile.build import copy_sources
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import FAMILIES, Config, Element, config_from_short_form
from flash_helpers.measure import benchmark, timing
from flash_helpers.measure.compilers import (
    CONTROL_EVERY,
    CompiledTwice,
    CompilerComparison,
    Pair,
    equal_codes,
    timed_kernels,
    timed_on,
    without_first_round,
)
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import BURST, SUSTAINED, Protocol
from flash_helpers.tune import worker

AMPERE, HOPPER = (
    [c for c in FAMILIES[name].progression() if c.dtype == Element.BF16]
    for name in ("ampere", "hopper")
)
H1, H2, H3 = (config.short_form() for config in HOPPER[:3])
O1 = FAMILIES["overlap"].progression()[0].short_form()
NVCC, NVRTC, THIRD = "0123456789abcdef", "fedcba9876543210", "0" * 16
OF_1000 = (1.0, 2.0, 1.5)  # milliseconds of nvcc's kernel, whose clock drifts


def pair(
    name: str,
    ratios: Sequence[float],
    codes: tuple[str, str] = (NVCC, NVRTC),
    load: str = SUSTAINED,
    size: int = 1024,
) -> Pair:
    """nvcc's kernel, and another that was so many times as fast in each round."""
    first = replace(measurement(name, size, 100.0, load=load), samples_ms=OF_1000, code=codes[0])
    times = tuple(ms / ratio for ms, ratio in zip(OF_1000, ratios, strict=True))
    return Pair(first, replace(first, samples_ms=times, code=codes[1]))


def control(ratios: Sequence[float], load: str = SUSTAINED, name: str = H3) -> Pair:
    return pair(name, ratios, (NVCC, NVCC), load)


def comparison(*pairs: Pair) -> CompilerComparison:
    names = dict.fromkeys(pair.first.name for pair in pairs)
    kernels = tuple(CompiledTwice(name, (NVCC, NVRTC), (168, 167)) for name in names)
    found = provenance(fake_backend(), "compilers.py", "68cfc22")
    return CompilerComparison(found, ("nvcc 13.0", "NVRTC 13.0"), Protocol(), kernels, pairs)


QUIET = control((0.99, 1.0, 1.01))


class TestEquallyFast:
    @pytest.mark.parametrize(
        ("ratios", "expected"),
        [
            ((1.007, 1.007, 1.007), True),
            ((1.2, 0.8, 1.0), True),  # the median
            ((1.009, 1.009, 0.9), False),
            ((0.991, 0.991, 1.1), False),  # slower
        ],
    )
    def test_is_a_median_ratio_within_the_middle_80_percent_of_the_controls_rounds(
        self, ratios, expected
    ) -> None:
        found = comparison(QUIET, pair(H1, ratios))
        assert found.noise == {("hopper", SUSTAINED): pytest.approx(0.008)}
        assert found.is_equal(found.pairs[1]) is expected
        assert found.verdicts() == {frozenset((NVCC, NVRTC)): expected}

    def test_takes_the_rounds_of_all_controls_of_the_family_under_the_load(self) -> None:
        found = comparison(
            *(QUIET, control((0.9, 1.0, 1.1)), control((0.5, 1.0, 1.5), BURST)),
            control((0.7, 1.0, 1.3), name=O1),
        )
        assert found.noise == {
            ("hopper", SUSTAINED): pytest.approx(0.055),
            ("hopper", BURST): pytest.approx(0.4),
            ("overlap", SUSTAINED): pytest.approx(0.24),
        }

    def test_is_not_known_without_a_control_of_the_family(self) -> None:
        found = comparison(control((0.9, 1.0, 1.1), name=O1), pair(H1, (1.0,) * 3))
        assert not found.is_equal(found.pairs[1])

    def test_is_not_known_of_a_kernel_that_failed(self) -> None:
        wrong = pair(H1, (1.0,) * 3)
        failed = replace(wrong.second, samples_ms=(), failure="wrong output")
        found = comparison(QUIET, Pair(wrong.first, failed))
        assert found.failures == [failed]
        assert found.verdicts() == {frozenset((NVCC, NVRTC)): False}

    def test_holds_only_if_it_does_at_each_size_and_under_each_load(self) -> None:
        equal, slower = (1.0,) * 3, (0.9,) * 3
        in_bursts = control((0.99, 1.0, 1.01), BURST)
        both = comparison(QUIET, in_bursts, pair(H1, equal), pair(H1, equal, load=BURST))
        assert both.verdicts() == {frozenset((NVCC, NVRTC)): True}
        for other in (pair(H1, slower, load=BURST), pair(H1, slower, size=4096)):
            found = comparison(QUIET, in_bursts, pair(H1, equal), other)
            assert found.verdicts() == {frozenset((NVCC, NVRTC)): False}


class TestEqualCodes:
    EQUAL = comparison(QUIET, pair(H1, (1.0,) * 3), pair(H2, (0.9,) * 3, (NVCC, THIRD)))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "benchmarks/results"
        folder.mkdir(parents=True)
        return folder

    def test_are_the_pairs_that_were_measured_to_be_equally_fast(self, folder, tmp_path) -> None:
        assert equal_codes(tmp_path) == frozenset()
        self.EQUAL.save(folder / "compilers_h100.json")
        assert equal_codes(tmp_path) == {frozenset((NVCC, NVRTC))}

    def test_are_so_in_every_file(self, folder, tmp_path) -> None:
        self.EQUAL.save(folder / "compilers_h100.json")
        other = comparison(QUIET, pair(H1, (0.9,) * 3), pair(H2, (1.0,) * 3, (NVCC, "1" * 16)))
        other.save(folder / "compilers_all_h100.json")
        assert equal_codes(tmp_path) == {frozenset((NVCC, "1" * 16))}

    def test_are_known_where_the_package_is_installed_without_its_repository(
        self, root, tmp_path
    ) -> None:
        copy_sources(root, tmp_path / "sources")
        assert equal_codes(tmp_path / "sources") == equal_codes(root) != frozenset()


def twice(config: Config, is_same: bool) -> CompiledTwice:
    return CompiledTwice(config.short_form(), (NVCC, NVCC if is_same else NVRTC), (1, 1))


def test_kernels_with_two_codes_are_timed_and_each_family_has_controls() -> None:
    ampere = [twice(config, True) for config in AMPERE]
    hopper = [twice(config, False) for config in HOPPER]
    found = timed_kernels([*ampere, *hopper])
    assert [kernel for kernel, _ in found] == [ampere[-1], *hopper]
    assert found[-1][1] and not found[0][1]
    assert sum(has_control for _, has_control in found) == -(-len(hopper) // CONTROL_EVERY)


def test_a_kernel_whose_tiles_do_not_divide_a_size_is_timed_nearby() -> None:
    tall = config_from_short_form("h13_bf16_d128_Br192_Bc80_K3_V3_pp")
    assert timed_on(HOPPER[0], 4096) == HOPPER[0].measured(4096)
    assert timed_on(tall, 4096) == tall.measured(3840)
    with pytest.raises(ValueError, match=r"h13\S* is not timed at size 1000: .*B_r 192"):
        timed_on(tall, 1000)


def test_the_first_round_is_left_out_with_its_readings() -> None:
    whole = measurement(H1, 1024, 100.0)
    rest = without_first_round(whole)
    assert rest.samples_ms == whole.samples_ms[1:]
    assert rest.first_ms == whole.first_ms[1:]
    assert rest.sm_mhz == whole.sm_mhz[1:] and len(rest.power_w) == 2


class TestTable:
    def test_compares_each_kernel_with_the_noise(self) -> None:
        found = comparison(QUIET, pair(H1, (0.9, 0.8, 1.0)), pair(H3, (1.001,) * 3))
        rows = found.table().rows
        assert [row[0] for row in rows] == [f"{H3}, nvcc twice", H1, H3]
        assert rows[1][1:3] == [f"{NVCC} {NVRTC}", "168 167"]
        assert rows[1][-5:] == ["0.900", "0.820", "0.980", "0.008", ""]
        assert rows[2][-5:] == ["1.001", "1.001", "1.001", "0.008", "="]
        assert "of 1 kernels with two codes, 0 are equally fast" in found.summary()

    def test_counts_the_kernels_with_the_same_code(self) -> None:
        same = (twice(HOPPER[0], True), twice(HOPPER[1], False))
        assert "nvcc 13.0 and NVRTC 13.0 make the same machine code of 1 of 2 of hopper" in (
            replace(comparison(), kernels=same).summary()
        )

    def test_is_read_back_from_its_file(self, tmp_path) -> None:
        found = comparison(QUIET, pair(H1, (0.9, 0.8, 1.0)))
        found.save(tmp_path / "compilers.json")
        assert CompilerComparison.load(tmp_path / "compilers.json") == found


@pytest.fixture
def tool():
    return load_tool("benchmarks/compilers.py")


class TestTool:
    GPU = Device("H100", (9, 0), 132)

    def test_chooses_listed_kernels_that_the_gpu_runs(self, tool) -> None:
        backend = fake_backend()
        found = tool.chosen_kernels(tool.parse_arguments([]), backend, self.GPU)
        assert sorted(config.step.id for config in found) == sorted(tool.STEPS_TIMED)
        assert {config.dtype for config in found} == {Element.BF16}
        every = tool.chosen_kernels(tool.parse_arguments(["--kernel", "all"]), backend, self.GPU)
        assert {*every} == {*backend.kernels}

    def test_leaves_out_what_the_gpu_does_not_run_unless_it_was_named(self, tool) -> None:
        backend, gpu = fake_backend(), Device("A100", (8, 0), 108)
        found = tool.chosen_kernels(tool.parse_arguments([]), backend, gpu)
        assert {config.step.id for config in found} == {"v16", "o5"}
        with pytest.raises(ValueError, match=r"A100 .* need 9\.0"):
            tool.chosen_kernels(tool.parse_arguments(["--kernel", "h30"]), backend, gpu)

    @pytest.mark.parametrize("family", ["softmax", "backward_sync"])
    def test_compiles_each_kernel_by_each_compiler(self, tool, tmp_path, family) -> None:
        config = FAMILIES[family].progression()[0]
        (found,) = tool.compile_all([config], [nvrtc_compiler()] * 2, 90, tmp_path)
        assert found.record.is_same and found.record.name == config.short_form()
        assert found.record.registers[0] == found.record.registers[1] > 0
        compiled = (*found.files, found.copy)
        for first, second, copy in zip(*(of.kernels for of in compiled), strict=True):
            assert first.cubin != second.cubin and first.cubin != copy.cubin
            assert Path(first.cubin).read_bytes() == Path(copy.cubin).read_bytes()
            assert first.symbol == second.symbol == copy.symbol
            assert first.name == second.name == copy.name
        assert {k.name for k in found.copy.kernels} == {*config.kernels.values()}

    @pytest.fixture
    def compiled(self, tool) -> list:
        def of(config: Config, is_same: bool):
            name = config.short_form()
            first, second, copy = (
                tool.CompiledConfig(name, (tool.KernelFile(name, x, "k"),))
                for x in ("nvcc", "rtc", "copy")
            )
            return tool.Compiled((first, second), copy, twice(config, is_same))

        return [of(AMPERE[0], True), *(of(c, False) for c in HOPPER[:2])]

    @pytest.fixture
    def timed(self, monkeypatch, tool) -> list:
        """Pairs of files that were timed, and the problem."""
        timed: list = []

        def measure_problem(contenders, sets, problem, dtype, timer, protocol, sensor):
            timed.append((tuple(own.kernels[0].cubin for own in contenders), problem))
            names = [own.config for own in contenders]
            return [
                measurement(name, problem.len_q, 100.0, load=load.name)
                for load in protocol.loads
                for name in names
            ]

        monkeypatch.setattr(timing, "make_timer", lambda device, protocol: None)
        monkeypatch.setattr(benchmark, "make_input_sets", lambda *_: [])
        monkeypatch.setattr(benchmark, "measure_problem", measure_problem)
        monkeypatch.setattr(worker, "cubin_contender", lambda file, execute: file)
        monkeypatch.setattr(tool, "GpuSensor", lambda device: None)
        return timed

    def test_times_both_compilers_and_controls_one_problem_after_the_other(
        self, tool, compiled, timed
    ) -> None:
        loads = tuple(tool.LOADS_TIMED.values())
        found = tool.measure(compiled, [512, 1024], fake_backend(), Protocol(loads=loads))
        one = [("nvcc", "rtc")] * 3 + [("nvcc", "copy")]
        assert [files for files, _ in timed] == one * 2
        assert [problem.len_q for _, problem in timed] == [512] * 4 + [1024] * 4
        assert [pair.first.load for pair in found] == [BURST, SUSTAINED] * 8
        assert {len(pair.first.samples_ms) for pair in found} == {2}  # of three rounds

    def test_prints_the_table_and_writes_the_file(
        self, tool, compiled, timed, monkeypatch, tmp_path, capsys
    ) -> None:
        found = replace(provenance(fake_backend(), "c", ""), gpu="H100", compute_capability="9.0")
        monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
        monkeypatch.setattr(tool, "provenance_here", lambda *_: found)
        monkeypatch.setattr(tool, "find_compilers", lambda: [nvrtc_compiler()] * 2)
        monkeypatch.setattr(tool, "compile_all", lambda *_: compiled)
        path = tmp_path / "compilers.json"
        arguments = ["--size", "512", "--load", "burst", "--rounds", "2", "--json", str(path)]
        assert tool.main(arguments) == 0
        written = CompilerComparison.load(path)
        assert written.protocol.rounds == 3 and len(written.pairs) == 4
        assert "nvcc twice" in capsys.readouterr().out
        monkeypatch.setattr(tool, "provenance_here", lambda *_: replace(found, gpu="H200"))
        assert tool.main(arguments) == 2
        assert "results of two GPUs are never mixed" in capsys.readouterr().err
