"""The baseline of what kernels take, and what counts as worse."""

import json
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import pytest
from attention_configs import attention_progression

from flash_helpers.compile.codegen import listed_configs
from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.compile.toolchain import DEFAULT_ARCHITECTURES
from flash_helpers.kernel_configs import (
    Config,
    config_from_short_form,
    config_from_symbol,
    get_kernel_progression_configs,
)
from flash_helpers.measure import machine_code
from flash_helpers.measure import origins as origins_module
from flash_helpers.measure.baseline import (
    Baseline,
    KernelFigures,
    Reading,
    by_kernel,
    compare,
    comparison_text,
    load_baseline,
    natural,
)
from flash_helpers.measure.code import codes_of
from flash_helpers.measure.machine_code import own_kernels
from flash_helpers.measure.origins import READERS, origins, readers_digest
from flash_helpers.measure.staircases import large_tile
from flash_helpers.registry import decode
from flash_helpers.registry.families import with_siblings
from flash_helpers.registry.linear_rowsum import ROWSUM
from flash_helpers.registry.mma_sync import MMA_ROW_SUM, RAGGED
from flash_helpers.registry.overlap import OVERLAP
from flash_helpers.registry.wgmma import WARPGROUP
from flash_helpers.runtime import library
from flash_helpers.sass.read.records import Compiler, Kernel, SassError

pytestmark = pytest.mark.slow

CUDA_13 = Compiler("ptxas", (13, 0, 88), "")
CUDA_12 = Compiler("ptxas", (12, 4, 131), "")
V1, V2, V10 = (
    next(c.short_form() for c in get_kernel_progression_configs() if c.version == number)
    for number in (1, 2, 10)
)
# Kernels that take one block of K and V in an iteration of their loop.
STEPS = with_siblings(
    config
    for step in attention_progression()
    for config in (
        step,
        large_tile(step) or step,
    )
)
FIGURES = KernelFigures(
    kernel=V1,
    architecture="sm_90",
    registers=200,
    stack_bytes=16,
    spill_store_bytes=8,
    spill_load_bytes=12,
    smem_bytes=49152,
    blocks_per_sm=2,
    loop_instructions=648,
    loop_hmma=128,
    between_hgmma=7,
    moves_between_hgmma=2,
    code="0123456789abcdef",
    made_from="fedcba9876543210",
)


def committed(root: Path) -> Baseline:
    return load_baseline(root / "benchmarks" / "resources.json")


def kernel_named(name: str) -> tuple[Config, str]:
    """A kernel's config and C++ function, by its name."""
    config = config_from_short_form(name.partition("__")[0])
    (function,) = (function for function, own in config.kernels.items() if own == name)
    return config, function


def hmma_of_tile(config: Config) -> int:
    """mma.m16n8k16 of a warp for a block of K and V: Q @ K^T has B_r/n_warps rows, B_c columns and
    depth d_head; P @ V has d_head columns and depth B_c, and 8 columns more where it sums rows.
    wgmma takes all rows and columns at once."""
    if not config.family.is_portable:
        return config.d_head // 16 + config.B_c // 16
    rows = config.B_r // config.n_warps
    columns = config.d_head + (8 if MMA_ROW_SUM in config.step.traits else 0)
    return (rows // 16) * (
        (config.B_c // 8) * (config.d_head // 16) + (columns // 8) * (config.B_c // 16)
    )


class TestCommitted:
    def test_holds_every_kernel_that_is_built_for_every_architecture(self, root) -> None:
        wanted = {
            (kernel, f"sm_{architecture}")
            for config in listed_configs(root)
            for kernel in config.kernels.values()
            for architecture in config.family.targets_for(DEFAULT_ARCHITECTURES)
        }
        figures = committed(root).figures
        assert figures
        for compiler, kernels in figures.items():
            assert kernels.keys() == wanted, compiler

    def test_has_as_many_hmma_in_a_loop_as_the_tiles_take(self, root) -> None:
        for kernels in committed(root).figures.values():
            for config in STEPS:
                for architecture in config.family.targets_for(DEFAULT_ARCHITECTURES):
                    figures = kernels[config.short_form(), f"sm_{architecture}"]
                    assert figures.loop_hmma == hmma_of_tile(config), figures

    def test_has_resources_that_the_tiles_and_an_sm_have(self, root) -> None:
        """Kernels of family overlap for sequences of various lengths keep a tile's place in static
        shared memory, which is aligned like the tiles; where family decode has equal shares, four
        warpgroups add up 8 values of a thread, in 9 words, and m and l of a row. In l6 a thread
        block is told its unit in a word, for which 16 bytes are kept. Others declare none. Those
        for Hopper spill nothing, nor do those of family overlap from its first step for any length
        on, which attention takes elsewhere."""
        for kernels in committed(root).figures.values():
            for figures in kernels.values():
                config, function = kernel_named(figures.kernel)
                n_threads, smem_bytes = config.block(function)
                is_kept = config.family is OVERLAP and config.varlen
                static = 128 if is_kept else 0
                if function == decode.COMBINE and decode.SHARES in config.step.traits:
                    static = decode.GROUPS * WARPGROUP * 9 * 4 + config.B_r * 8
                if function == ROWSUM:
                    static = 16
                assert figures.smem_bytes == smem_bytes + static, figures
                registers = figures.blocks_per_sm * n_threads * figures.registers
                assert 0 < registers <= 64 * 1024, figures
                serves_calls = config.family is OVERLAP and RAGGED in config.step.traits
                if figures.architecture == "sm_90a" or serves_calls:
                    spills = figures.spill_store_bytes, figures.spill_load_bytes
                    assert (*spills, figures.stack_bytes) == (0, 0, 0), figures
            assert any(architecture == "sm_90a" for _, architecture in kernels)

    def test_has_no_moves_between_hgmma_once_descriptors_are_uniform(self, root) -> None:
        for kernels in committed(root).figures.values():
            moves = {
                kernel_named(f.kernel)[0].step.id: f.moves_between_hgmma
                for f in kernels.values()
                if f.architecture == "sm_90a"
            }
            assert moves["h8"] > 0 == moves["h9"]

    def test_says_what_ptxas_said(self, root, package) -> None:
        """In the logs that ship with the library, if the baseline knows its compiler."""
        (kernel,) = own_kernels("sm_90", [config_from_short_form(V1)]).values()
        known = committed(root).of(replace(kernel.compiler, options=""))
        if not known:
            pytest.skip(f"the baseline does not know {kernel.compiler}")
        said = {
            (config_from_symbol(report.symbol).short_form(), report.target): report
            for log in (package / "ptxas").glob("*.log")
            for report in parse_ptxas_log(log.read_text())
        }
        assert said
        assert said.keys() <= known.keys()
        for key, report in said.items():
            for name in ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes"):
                assert getattr(known[key], name) == getattr(report, name), (key, name)

    def test_is_written_as_the_tool_writes_it(self, root) -> None:
        assert committed(root).to_json() == (root / "benchmarks" / "resources.json").read_text()


class TestFile:
    def test_is_read_as_it_was_written(self, tmp_path) -> None:
        other = replace(FIGURES, architecture="sm_100", blocks_per_sm=None)
        baseline = Baseline({CUDA_13: by_kernel([FIGURES, other]), CUDA_12: by_kernel([FIGURES])})
        path = tmp_path / "new" / "baseline.json"
        baseline.save(path)
        assert load_baseline(path) == baseline

    def test_has_a_line_for_each_kernel_in_the_order_of_versions(self) -> None:
        figures = [replace(FIGURES, kernel=name) for name in (V10, V2, V1)]
        lines = Baseline({CUDA_13: by_kernel(figures)}).to_json().splitlines()
        rows = [json.loads(line.strip().rstrip(",")) for line in lines if '"kernel"' in line]
        assert [row["kernel"] for row in rows] == [V1, V2, V10]
        assert rows[0] == asdict(FIGURES)

    def test_does_not_depend_on_the_order_it_was_made_in(self) -> None:
        figures = [replace(FIGURES, kernel=name) for name in (V1, V2)]
        one = Baseline({CUDA_12: by_kernel(figures), CUDA_13: by_kernel(figures)})
        other = Baseline({CUDA_13: by_kernel(figures[::-1]), CUDA_12: by_kernel(figures[::-1])})
        assert one.to_json() == other.to_json()

    def test_that_is_missing_is_told_apart(self, tmp_path) -> None:
        with pytest.raises(SassError, match=r"nix\.json is not there: --update makes"):
            load_baseline(tmp_path / "nix.json")

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: "",
            lambda text: text[:-20],
            lambda text: "[]",
            lambda text: "{}",
            lambda text: '{"format": 2, "compilers": 7}',
            lambda text: '{"format": 2, "compilers": ["ptxas"]}',
            lambda text: text.replace('"format": 2', '"format": 99'),
            lambda text: text.replace('"registers": 200', '"registers": "200"'),
            lambda text: text.replace('"registers": 200', '"registers": null'),
            lambda text: text.replace('"registers": 200', '"registers": true'),
            lambda text: text.replace('"registers"', '"register"'),
            lambda text: text.replace("[13, 0, 88]", "13"),
        ],
    )
    def test_that_is_damaged_is_refused(self, tmp_path, change) -> None:
        path = tmp_path / "baseline.json"
        whole = Baseline({CUDA_13: by_kernel([FIGURES])}).to_json()
        path.write_text(change(whole))
        assert path.read_text() != whole
        with pytest.raises(SassError, match="holds no baseline"):
            load_baseline(path)


class TestUpdate:
    def test_replaces_what_was_read_and_keeps_the_rest(self) -> None:
        on_80 = replace(FIGURES, architecture="sm_80")
        other_step = replace(FIGURES, kernel=V2)
        gone = replace(FIGURES, kernel=V1.replace("fp16", "bf16"))
        known = [FIGURES, gone, on_80, other_step]
        before = Baseline({CUDA_13: by_kernel(known), CUDA_12: by_kernel([gone])})
        now = replace(FIGURES, registers=100)
        assert before.updated(CUDA_13, [now]) == Baseline(
            {CUDA_13: by_kernel([on_80, other_step, now]), CUDA_12: by_kernel([gone])}
        )

    def test_adds_a_compiler(self) -> None:
        before = Baseline({CUDA_13: by_kernel([FIGURES])})
        assert before.updated(CUDA_12, [FIGURES]).figures.keys() == {CUDA_13, CUDA_12}

    def test_of_an_unknown_compiler_is_refused(self) -> None:
        unknown = Compiler("", (), "")
        with pytest.raises(SassError, match="does not name its compiler"):
            Baseline().updated(unknown, [FIGURES])
        assert not Baseline({unknown: by_kernel([FIGURES])}).of(unknown)

    @pytest.mark.parametrize(
        ("version", "nearest"),
        [((13, 1, 0), CUDA_13), ((13, 0, 87), CUDA_12), ((12, 0, 1), CUDA_12)],
    )
    def test_knows_the_nearest_compiler(self, version, nearest) -> None:
        baseline = Baseline({CUDA_13: {}, CUDA_12: {}})
        assert baseline.nearest(Compiler("ptxas", version, "")) == nearest

    def test_of_nothing_has_no_nearest_compiler(self) -> None:
        with pytest.raises(SassError, match="--update"):
            Baseline().nearest(CUDA_13)


class TestComparison:
    @pytest.mark.parametrize(
        ("quantity", "worse", "better"),
        [
            ("registers", {"registers": 201}, {"registers": 199}),
            ("spill stores, bytes", {"spill_store_bytes": 12}, {"spill_store_bytes": 0}),
            ("spill loads, bytes", {"spill_load_bytes": 16}, {"spill_load_bytes": 8}),
            ("stack, bytes", {"stack_bytes": 24}, {"stack_bytes": 0}),
            ("shared memory, bytes", {"smem_bytes": 49153}, {"smem_bytes": 49151}),
            ("blocks per SM", {"blocks_per_sm": 1}, {"blocks_per_sm": 3}),
            ("instructions per HMMA", {"loop_instructions": 649}, {"loop_instructions": 647}),
            ("instructions between HGMMA", {"between_hgmma": 8}, {"between_hgmma": 6}),
            ("R2UR between HGMMA", {"moves_between_hgmma": 3}, {"moves_between_hgmma": 1}),
        ],
    )
    def test_tells_worse_from_better(self, quantity, worse, better) -> None:
        before = by_kernel([FIGURES])
        comparison = compare(before, [replace(FIGURES, **worse)])
        assert [d.quantity for d in comparison.worse] == [quantity]
        assert not comparison.better
        assert not comparison.passes
        comparison = compare(before, [replace(FIGURES, **better)])
        assert [d.quantity for d in comparison.better] == [quantity]
        assert comparison.passes

    @pytest.mark.parametrize("factor", [2, Fraction(1, 2), 0])
    def test_takes_another_loop_or_none_for_worse_even_if_its_ratio_is_the_same(
        self, factor
    ) -> None:
        loop = {
            name: int(getattr(FIGURES, name) * factor)
            for name in ("loop_instructions", "loop_hmma")
        }
        comparison = compare(by_kernel([FIGURES]), [replace(FIGURES, **loop)])
        assert [d.quantity for d in comparison.worse] == ["HMMA in the loop"]

    def test_compares_ratios_exactly(self) -> None:
        """Ratios that differ by less than a float can tell."""
        many = 10**17
        before = replace(FIGURES, loop_instructions=many, loop_hmma=1)
        after = replace(FIGURES, loop_instructions=many + 1, loop_hmma=1)
        assert float(many) == float(many + 1)
        assert not compare(by_kernel([before]), [after]).passes

    def test_does_not_compare_what_is_not_known(self) -> None:
        comparison = compare(by_kernel([FIGURES]), [replace(FIGURES, blocks_per_sm=None)])
        assert not comparison.differences

    def test_of_a_kernel_in_part_worse_fails(self) -> None:
        changed = replace(FIGURES, registers=201, spill_store_bytes=0)
        comparison = compare(by_kernel([FIGURES]), [changed])
        assert (len(comparison.worse), len(comparison.better)) == (1, 1)
        assert not comparison.passes
        assert "1 worse, 0 better" in comparison_text(comparison)

    def test_fails_where_a_kernel_is_missing_and_lists_what_is_new(self) -> None:
        other = V1.replace("fp16", "bf16")
        before = by_kernel([FIGURES, replace(FIGURES, kernel=other)])
        comparison = compare(before, [FIGURES, replace(FIGURES, kernel=V10)])
        assert comparison.missing == ((other, "sm_90"),)
        assert comparison.new == ((V10, "sm_90"),)
        assert not comparison.passes
        assert compare(by_kernel([FIGURES]), [FIGURES, replace(FIGURES, kernel=V10)]).passes

    @pytest.mark.parametrize(
        ("others", "left_out"),
        [
            ([{"architecture": "sm_80"}], ("sm_80",)),
            ([{"kernel": V10}, {"kernel": V2}], ("v2", "v10")),
        ],
    )
    def test_leaves_out_architectures_and_steps_that_were_not_read(self, others, left_out) -> None:
        before = by_kernel([FIGURES, *(replace(FIGURES, **other) for other in others)])
        comparison = compare(before, [FIGURES])
        assert comparison.passes
        assert comparison.left_out == left_out
        assert f"{', '.join(left_out)} was not compared" in comparison_text(comparison)

    def test_of_nothing_does_not_pass(self) -> None:
        assert not compare({}, [FIGURES]).passes

    def test_prints_each_change_in_a_row(self) -> None:
        after = replace(FIGURES, registers=255, smem_bytes=40960, loop_instructions=712)
        lines = comparison_text(compare(by_kernel([FIGURES]), [after])).splitlines()
        rows = [" ".join(line.split()) for line in lines]
        assert f"{V1} sm_90 registers 200 255 +55" in rows
        assert f"{V1} sm_90 instructions per HMMA 5.062 5.562 +0.500" in rows
        assert f"{V1} sm_90 shared memory, bytes 49,152 40,960 -8,192" in rows
        assert lines.index("worse:") < lines.index("better:")
        assert lines[-1] == "1 kernels compared: 1 worse, 0 better, 0 the same; 0 missing, 0 new"

    def test_sorts_versions_as_numbers(self) -> None:
        assert sorted([V10, V2, V1], key=natural) == [V1, V2, V10]


class TestReading:
    @pytest.fixture(scope="class")
    def kernel(self) -> Kernel:
        (found,) = own_kernels("sm_90", [config_from_short_form(V1)]).values()
        return found

    def test_finds_what_the_headers_and_the_tiles_say(self, kernel) -> None:
        config = config_from_short_form(V1)
        reading = Reading(Baseline())
        reading.add("sm_90", [config])
        ((compiler, figures),) = reading.figures
        assert compiler == reading.compiler == replace(kernel.compiler, options="")
        assert (figures.kernel, figures.architecture) == (V1, kernel.architecture)
        assert figures.registers == kernel.resources.registers
        assert figures.smem_bytes == config.smem_bytes
        assert figures.loop_hmma == hmma_of_tile(config)
        assert figures.instructions_per_hmma == Fraction(
            figures.loop_instructions, hmma_of_tile(config)
        )
        assert figures.code == codes_of([config], "9.0")[config]
        assert figures.made_from == origins([config], "sm_90")[config]

    def test_of_what_several_compilers_made_is_refused(self) -> None:
        reading = Reading(Baseline(), [(CUDA_12, FIGURES), (CUDA_13, FIGURES)])
        with pytest.raises(SassError, match=r"ptxas 12\.4\.131, ptxas 13\.0\.88"):
            _ = reading.compiler


class TestUnchanged:
    """A kernel that is made from the same as in the baseline."""

    @pytest.fixture
    def config(self) -> Config:
        return config_from_short_form(V1)

    @pytest.fixture
    def known(self, config) -> KernelFigures:
        """Figures that no kernel has, made from what the kernel is made from today."""
        return replace(FIGURES, registers=1, made_from=origins([config], "sm_90")[config])

    def test_has_the_figures_of_the_baseline(self, config, known) -> None:
        reading = Reading(Baseline({CUDA_13: by_kernel([known])}))
        reading.add("sm_90", [config])
        assert (reading.figures, reading.n_read) == ([(CUDA_13, known)], 0)

    def test_is_read_if_anything_that_its_figures_follow_from_has_changed(
        self, config, known, monkeypatch
    ) -> None:
        monkeypatch.setattr(library, "code_origins", lambda configs, architecture: {V1: "changed"})
        reading = Reading(Baseline({CUDA_13: by_kernel([known])}))
        reading.add("sm_90", [config])
        ((_, figures),) = reading.figures
        assert reading.n_read == 1
        assert figures.registers > known.registers and figures.made_from != known.made_from


class TestOrigins:
    def test_no_two_kernels_are_made_from_the_same(self) -> None:
        found = [
            digest
            for architecture in ("sm_80", "sm_86", "sm_90")
            for digest in origins(machine_code.listed_configs(architecture), architecture).values()
        ]
        assert len({*found}) == len(found)

    @pytest.mark.parametrize(
        "change",
        [
            lambda patch, config: patch.setattr(type(config), "smem_bytes", 1),
            lambda patch, config: patch.setattr(origins_module, "_reader", lambda package: ""),
            lambda patch, config: patch.setattr(library, "_ptx_banner", lambda path: "V13.0.99"),
            lambda patch, config: patch.setattr(library, "COMPILE_FLAGS", ("-O0",)),
        ],
        ids=["launch", "reader", "compiler of the library", "flags of the library"],
    )
    def test_differ_where_any_part_does(self, monkeypatch, change) -> None:
        config = config_from_short_form(V1)
        monkeypatch.setattr(library, "is_built", lambda unit: True)
        before = origins([config], "sm_90")[config]
        change(monkeypatch, config)
        assert origins([config], "sm_90")[config] != before

    def test_the_reader_is_the_text_of_its_modules(self, tmp_path) -> None:
        read = [name if name.endswith(".py") else f"{name}/deep/a.py" for name in READERS]
        for name in (*read, "other.py"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        found = {readers_digest(tmp_path)}
        (tmp_path / "other.py").write_text("changed")
        assert {readers_digest(tmp_path)} == found
        for name in read:
            (tmp_path / name).write_text("changed")
            found.add(readers_digest(tmp_path))
        assert len(found) == 1 + len(read)
