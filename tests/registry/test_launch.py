"""A launch as data: arguments, grid, and what a family besides ampere needs."""

from __future__ import annotations

import itertools
import math
import re
import struct
import subprocess
from dataclasses import replace

import pytest
from general_hopper import (
    BEFORE,
    GENERAL,
    WITH_CAUSAL,
    WITH_CLUSTERS,
    WITH_COUNTER,
    WITH_LENGTHS,
    WITH_OPTIONS,
    WITH_PAIRS,
    GeneralConfig,
    general,
)
from other_family import ARGUMENTS, COUNTER, OTHER, TILE, OtherConfig

from flash_helpers.compile.codegen import kernel_map_header, kernel_unit, with_fields
from flash_helpers.compile.toolchain import BuildError, find_toolchain
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.operations.attention_forward.supports import (
    ABILITIES,
    GROUPED_HEADS,
    RETURN_LSE,
    SOFTCAP,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    WINDOW,
    asked_for,
)
from flash_helpers.registry import mma_sync
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    STRIDES,
    Address,
    Buffer,
    StructLayout,
)
from flash_helpers.registry.hopper import ARGUMENTS as ARGUMENTS_OF_HOPPER
from flash_helpers.registry.hopper import HOPPER, LONG_TILE
from flash_helpers.registry.wgmma import NEXT_TILE

V16 = AMPERE.progression()[-1]
H100 = largest_device(90)
PROBLEM = AttentionForward(batch=2, heads=3, len_q=256)
X3 = OtherConfig(3, Element.BF16, 128, lazy=True)


class TestLayout:
    def test_follows_the_rules_of_c(self):
        layout = StructLayout("A", {"a": INT, "b": POINTER, "c": INT, "d": STRIDES, "e": INT})
        assert [member.offset for member in layout.members] == [0, 8, 16, 24, 48]
        assert layout.size == 56

    def test_packs_a_float_as_float32(self):
        layout = StructLayout("A", {"a": INT, "b": FLOAT})
        assert layout.pack({"a": (1,), "b": (0.1,)}) == struct.pack("<if", 1, 0.1)

    def test_puts_a_tensor_map_on_128_bytes(self):
        assert ARGUMENTS.offset("Q") == 128
        assert ARGUMENTS.size == 384  # as large as its alignment asks for

    def test_packs_values_and_zeros(self):
        data = mma_sync.ARGUMENTS.pack({"seq_len": (7,), "K_strides": (1, 2, 3)})
        assert data == struct.pack("<4Q12qi4x", *[0] * 4, 0, 0, 0, 1, 2, 3, *[0] * 6, 7)

    def test_is_asserted_in_the_unit_of_every_kernel(self):
        assert mma_sync.ARGUMENTS.assertions() in kernel_unit(V16)
        assert "offsetof(ForwardKernelArgs, seq_len) == 128" in mma_sync.ARGUMENTS.assertions()

    def test_that_has_drifted_does_not_compile(self, root, tmp_path):
        try:
            nvcc = find_toolchain((80,)).nvcc
        except BuildError as error:
            pytest.skip(str(error).splitlines()[0])
        drifted = {**mma_sync.ARGUMENTS.kinds, "seq_len": POINTER}
        texts = {
            "right": mma_sync.ARGUMENTS.assertions(),
            "drifted": replace(mma_sync.ARGUMENTS, kinds=drifted).assertions(),
        }
        status = {}
        for name, assertions in texts.items():
            unit = tmp_path / f"{name}.cu"
            unit.write_text(f'#include "flash_attention.cuh"\n#include <cstddef>\n{assertions}\n')
            command = [nvcc, "-std=c++20", "-Isrc/include", "-ptx", "-o", tmp_path / "out", unit]
            status[name] = subprocess.run(command, cwd=root, capture_output=True).returncode
        assert status["right"] == 0
        assert status["drifted"] != 0


class TestAmpere:
    def test_has_a_block_for_each_tile_of_queries_head_and_batch(self):
        (launch,) = V16.call(PROBLEM, PROBLEM.strides(), H100).launches
        assert launch.grid == (256 // V16.B_r, 3, 2)
        assert launch.n_blocks == 4 * 3 * 2
        assert (launch.block, launch.n_warps) == (V16.n_threads, V16.n_warps)
        assert launch.shared_bytes == V16.smem_bytes

    def test_arguments_are_addresses_strides_and_the_length(self):
        (launch,) = V16.call(PROBLEM, PROBLEM.strides(), H100).launches
        data = launch.bind({"q": 1 << 40, "k": 2, "v": 3, "o": 4})
        assert data == struct.pack("<4Q12qi4x", 1 << 40, 2, 3, 4, *[98304, 384, 128] * 4, 256)

    def test_more_batches_than_a_grid_has_are_several_launches(self):
        problem = AttentionForward(2 * 65535 + 1, 1, 64)
        strides = dict.fromkeys("qkvo", (64 * 128, 128, 0, 1))
        launches = V16.call(problem, strides, H100).launches
        assert [launch.grid[2] for launch in launches] == [65535, 65535, 1]
        starts = [launch.bind(dict.fromkeys("qkvo", 0))[:8] for launch in launches]
        assert [int.from_bytes(start, "little") for start in starts] == [
            first * 64 * 128 * 2 for first in (0, 65535, 2 * 65535)
        ]

    def test_another_row_stride_is_taken_over_by_the_general_sibling(self):
        assert V16.static_row_stride == 2048
        (launch,) = V16.call(PROBLEM, PROBLEM.strides(), H100).launches
        assert launch.kernel == V16.general().short_form()
        wide = AttentionForward(2, 16, 256)
        (launch,) = V16.call(wide, wide.strides(), H100).launches
        assert launch.kernel == V16.short_form()
        mixed = {**wide.strides(), "k": (0, 4096, 128, 1)}
        assert V16.runs_as(mixed) == V16.general()
        assert V16.general().runs_as(wide.strides()) == V16.general()


class TestSupports:
    @pytest.mark.parametrize(
        ("problem", "reason"),
        [
            (AttentionForward(1, 1, 96), "seq_len 96 is not a multiple of B_r 64"),
            (
                AttentionForward(1, 1, 64, d_head=64),
                "d_head 64 is not .*: pad the last .* to 128",
            ),
            (AttentionForward(1, 70000, 64), "heads 70000 is over the limit 65535"),
            (AttentionForward(1, 1, 2**31), "over the limit 2147483647: split the problem"),
            (AttentionForward(1, 1, 64, dtype=Element.FP16), "dtype fp16: .* takes bf16"),
        ],
    )
    def test_refuses_with_value_limit_and_way_out(self, problem, reason):
        assert re.search(reason, V16.refusal(problem))

    def test_takes_its_own_corners(self):
        corners = list(V16.supports.corners())
        assert {(corner.len_q, corner.len_k) for corner in corners} == {(64, 64), (192, 192)}
        assert not any(V16.refusal(corner) for corner in corners)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("whole", [False, True])
    @pytest.mark.parametrize(
        "abilities", [(), (TWO_LENGTHS,), (GROUPED_HEADS,), ABILITIES], ids=str
    )
    def test_has_corners_at_all_edges_of_what_it_declares(self, causal, whole, abilities):
        supports = replace(
            V16.supports,
            blocks={"B_r": 64, "B_c": 64} if whole else {},
            causal=causal,
            abilities=frozenset(abilities),
        )
        corners = list(supports.corners())
        assert [supports.refusal(corner, "it") for corner in corners] == [""] * len(corners)
        asked = set().union(*map(asked_for, corners))
        assert (asked, {corner.causal for corner in corners}) == ({*abilities}, {causal})
        different = {corner.len_q < corner.len_k for corner in corners if TWO_LENGTHS in asked}
        assert different == ({True, False} if TWO_LENGTHS in abilities else set())
        if TWO_LENGTHS in abilities and causal:  # rows that see no key, and whole tiles of them
            assert max(corner.len_q - corner.len_k for corner in corners) >= 64
        lengths = {corner.len_q for corner in corners}
        assert whole or {1, 63, 65} <= lengths
        assert all(
            corner.operations <= AttentionForward(2, 6, 192).operations for corner in corners
        )

    def test_takes_every_length_if_it_names_no_block(self):
        ragged = replace(V16.supports, blocks={}, abilities=frozenset({TWO_LENGTHS}), max_tiles=6)
        assert (ragged.shortest, ragged.whole) == (1, 64)
        assert ragged.refusal(AttentionForward(1, 2, 3 * 64, len_k=1), "it") == ""
        refused = ragged.refusal(AttentionForward(1, 2, 3 * 64 + 1, len_k=1), "it")
        assert refused.startswith("batch 1 with 2 heads has 8 tiles of queries, over the limit 6")
        many = AttentionForward(1, 1, 1, len_k=2**31)
        assert ragged.refusal(many, "it").startswith("len_k 2147483648 is over the limit")

    def test_is_described_in_words(self):
        assert V16.supports.described()["seq_len"].startswith("multiples of B_r and B_c, up to")
        general = replace(V16.supports, blocks={}, abilities=frozenset(ABILITIES)).described()
        assert general["seq_len"] == "any, different ones, up to 2,147,483,647"
        assert general["heads"] == "up to 65,535, grouped"
        assert V16.supports.described()["options"] == "none"
        assert general["options"] == "softmax_scale, return_lse, window, softcap, sinks, varlen"
        assert replace(V16.supports, d_v=64).described()["d_head"] == "128 with 64 of V"

    def test_of_another_head_size_names_the_scale_that_pads(self):
        problem = AttentionForward(1, 1, 64, 64)
        assert "scale q, since the kernels divide by sqrt(128)" in V16.refusal(problem)
        general = replace(V16.supports, abilities=frozenset(ABILITIES))
        assert "pass softmax_scale=0.125, which" in general.refusal(problem, "it")


EVERYTHING = replace(V16.supports, blocks={}, abilities=frozenset(ABILITIES), d_v=64)


class TestOptions:
    """Declarations of kernels that take windows, softcap, sinks and another head size of V."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"window_left": 3}, r"window_size \(3, -1\) is not supported by v16_.*attn_mask"),
            ({"window_right": 3}, r"window_size \(-1, 3\) is not supported by"),
            ({"softcap": 50.0}, "softcap 50 is not supported by v16_.*: without softcap"),
            ({"sinks": True}, r"sinks is not supported by v16_.* torch\.sigmoid\(lse - sinks\)"),
            (
                {"d_v": 64},
                "d_v 64 with d_head 128 is not supported by v16_.*: pad v .* to 128",
            ),
        ],
    )
    def test_that_a_kernel_lacks_are_refused_with_a_way_out(self, options, message):
        problem = AttentionForward(1, 1, 64, **options)
        assert re.match(message, V16.refusal(problem))
        assert not replace(EVERYTHING, d_v=problem.d_v).refusal(problem, "it")

    @pytest.mark.parametrize("exact", [{WINDOW}, {SOFTCAP}, {WINDOW, SOFTCAP}])
    @pytest.mark.parametrize("causal", [False, True])
    def test_that_are_compiled_in_must_be_asked_for(self, exact, causal):
        supports = replace(EVERYTHING, exact=frozenset(exact), causal=causal)
        plain = AttentionForward(1, 1, 64, d_v=64)
        adapted = supports.adapted(plain)
        assert not supports.refusal(adapted, "it")
        assert supports.adapted(adapted) == adapted
        assert adapted.causal == causal
        asked = {"window_left": 5} if WINDOW in exact else {"softcap": 2.0}
        assert asked.items() <= vars(supports.adapted(replace(plain, **asked))).items()
        assert supports.refusal(replace(plain, causal=causal), "it").startswith("no ")
        assert not any(supports.refusal(corner, "it") for corner in supports.corners())

    def test_have_corners_of_every_kind(self):
        for causal in (False, True):
            corners = [*replace(EVERYTHING, causal=causal).corners()]
            assert {corner.causal for corner in corners} == {causal}
            for name in ("window_left", "softcap", "sinks", "return_lse"):
                assert {bool(getattr(corner, name)) for corner in corners} == {False, True}, name
            blind = (c for c in corners if c.has_window and not c.visible_keys(0))
            assert any(c.visible_keys(c.len_q - 1) for c in blind)
            assert any(len(c.visible_keys(c.len_q - 1)) == 1 for c in corners if c.len_k > 1)

    def test_of_strides_of_sinks(self):
        sinks = AttentionForward(1, 4, 64, sinks=True).tensor("sinks")
        assert V16.supports.layout_refusal(sinks, (1,)) == ""
        assert "sinks has strides (2,)" in V16.supports.layout_refusal(sinks, (2,))


class TestOtherFamily:
    def test_config_reads_writes_and_sorts_like_any(self):
        assert X3.short_form() == "y3_bf16_B128_lazy"
        assert OtherConfig.from_short_form("y3_bf16_B128_st3_lazy").stages == 3
        for text in ("y3_bf16_B128_st2_lazy", "y3_bf16_B128_lazy_st3", "y03_bf16_B128_lazy"):
            with pytest.raises(ValueError, match="short form"):
                OtherConfig.from_short_form(text)
        with pytest.raises(ValueError, match=r"lazy True: y1 fixes lazy False; choose y2 to y3"):
            OtherConfig(1, Element.BF16, 128, lazy=True)
        assert sorted([X3, V16]) == [V16, X3]
        assert [step.parent for step in OTHER.steps.values()] == ["v16", "y1", "y2"]
        assert {config.tile for config in OTHER.sweep()} == {64, 128}

    def test_runs_where_its_own_instructions_are(self):
        assert OTHER.targets_for([80, 90]) == ("90a",)
        assert OTHER.targets_for([80]) == ()
        assert OTHER.runs_on((9, 0))
        assert not OTHER.runs_on((10, 0))
        assert not OTHER.runs_on((8, 0))
        assert V16.family.runs_on((12, 0))
        assert not V16.family.runs_on((7, 5))

    def test_launch_has_cluster_tensor_maps_and_a_zeroed_counter(self):
        problem = AttentionForward(1, 1, 2 * TILE)
        (launch,) = X3.call(problem, problem.strides(), H100).launches
        assert launch.cluster == (2, 1, 1)
        assert X3.call(problem, problem.strides(), H100).buffers == (Buffer(COUNTER, 4, True),)
        asked = []

        def encode(tensor_map, address):
            asked.append((tensor_map.tensor, address))
            return b"\x77" * 128

        data = launch.bind({"q": 5, "o": 6, COUNTER: 7}, encode)
        assert asked == [("q", 5)]
        assert data[:4] == (2).to_bytes(4, "little")
        assert data[128:256] == b"\x77" * 128
        assert data[256:272] == struct.pack("<2Q", 6, 7)

    def test_generated_text_has_its_own_struct_arguments_and_map(self):
        text = kernel_map_header(OTHER, [X3, V16])
        assert "std::map<OtherConfig, std::vector<Kernel>> other_kernels" in text
        assert "v16" not in text
        unit = kernel_unit(X3)
        assert '#include "kernels/other/y3.cuh"' in unit
        assert "sizeof(OtherArgs) == 384" in unit
        header = "struct OtherConfig {\n    // fields:begin\n    // fields:end\n};\n"
        assert "    int tile; // rows\n    int stages;\n    bool lazy;\n" in with_fields(
            header, OTHER
        )


ALL_OF_HOPPER = [config for config in HOPPER.progression() if config.dtype is Element.BF16]
H2, H9 = (config for config in ALL_OF_HOPPER if config.step.id in ("h2", "h9"))


class TestHopper:
    def map_of(
        self, name: str, config: Config, problem: AttentionForward, **changes: tuple[int, ...]
    ):
        (launch,) = config.call(problem, {**problem.strides(), **changes}, H100).launches
        return next(found for _, found in launch.tensor_maps if found.tensor == name)

    def test_has_a_block_for_each_tile_in_one_dimension(self):
        (launch,) = H2.call(PROBLEM, PROBLEM.strides(), H100).launches
        assert launch.grid == (256 // 64 * 3 * 2, 1, 1)
        assert (launch.block, launch.shared_bytes) == (128, H2.smem_bytes)

    def test_maps_are_boxes_of_a_tile_in_pieces_of_the_swizzle(self):
        found = self.map_of("k", H9, PROBLEM)
        assert found.dims == (64, 256, 2, 3, 2)  # column, row, piece, head, batch
        assert found.strides == (3 * 256, 128, 256, 256 * 3 * 256)
        assert (found.box, found.swizzle) == ((64, 128, 2, 1, 1), 128)
        assert self.map_of("o", H9, PROBLEM).box == (64, 16, 1, 1, 1)  # a warp's rows

    def test_maps_of_one_head_for_all_do_not_step(self):
        assert self.map_of("k", H9, PROBLEM, k=(256 * 128, 128, 0, 1)).strides[2] == 0

    @pytest.mark.parametrize(
        ("problem", "reason"),
        [
            (AttentionForward(1, 1, 192), r"seq_len 192 is not a multiple of B_r 128 .*: use 256"),
            (AttentionForward(2**20, 2**10, 256), "2147483648 tiles .*limit 2147483647.*: split"),
            (AttentionForward(1, 2**31, 128), "heads 2147483648 is over the limit 2147483647"),
            (AttentionForward(1, 1, 2**31), "over the limit 2147483647: split the problem"),
        ],
    )
    def test_refuses_with_value_limit_and_way_out(self, problem, reason):
        assert re.search(reason, H9.refusal(problem))

    def test_general_problems_are_refused_by_all_that_take_whole_blocks(self):
        whole = [config for config in ALL_OF_HOPPER if config.supports.blocks]
        for options in ({"causal": True}, {"len_k": 128}, {"kv_heads": 1}, {"softmax_scale": 1}):
            problem = AttentionForward(2, 2, 256, **options)
            assert all("is not supported by" in config.refusal(problem) for config in whole)

    def test_takes_as_many_tiles_as_a_grid_has(self):
        assert not H9.refusal(AttentionForward(1, 2**31 - 1, 128))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"B_r": 96}, "B_r 96: h9 fixes B_r 128|B_r 96 is not 64 rows"),
            ({"B_c": 72}, "B_c 72"),
            ({"K_slots": 4}, "K_slots 4"),
        ],
    )
    def test_of_an_impossible_config_tells_the_reason(self, changes, reason):
        with pytest.raises(ValueError, match=reason):
            H9.replace(**changes)


PROBE = AttentionForward(
    2, 6, 200, len_k=130, kv_heads=2, causal=True, softmax_scale=0.25, return_lse=True
)


class TestGeneralSteps:
    """Declarations of hopper's traits, and the launches for them."""

    @pytest.mark.parametrize(
        ("step", "changes", "abilities"),
        [
            (BEFORE, {}, set()),
            (WITH_LENGTHS, {}, {TWO_LENGTHS}),
            (WITH_OPTIONS, {}, {TWO_LENGTHS, GROUPED_HEADS, SOFTMAX_SCALE, RETURN_LSE}),
            (
                WITH_CAUSAL,
                {"causal": True},
                {TWO_LENGTHS, GROUPED_HEADS, SOFTMAX_SCALE, RETURN_LSE},
            ),
        ],
        ids=lambda value: getattr(value, "id", None),
    )
    def test_declare_what_their_traits_say(self, step, changes, abilities):
        config = general(step, **changes)
        supports = config.supports
        assert (supports.abilities, supports.causal) == (abilities, config.causal)
        assert set(supports.blocks) == ({"B_r", "B_c"} if step is BEFORE else set())
        assert not any(config.refusal(corner) for corner in supports.corners())

    def test_causal_is_fixed_until_a_step_opens_it_and_last_in_the_short_form(self):
        with pytest.raises(ValueError, match="causal True: h20 fixes causal False; choose h21 to"):
            general(WITH_OPTIONS, causal=True)
        assert general(WITH_OPTIONS).variants() == (general(WITH_OPTIONS),)
        plain, causal = general(WITH_CAUSAL).variants()
        assert causal == general(WITH_CAUSAL, causal=True)
        assert causal.variants() == (causal, plain)
        assert causal.short_form() == f"{plain.short_form()}_causal"
        long = general(WITH_CAUSAL, **LONG_TILE)  # whose diagonal would lie in three blocks of keys
        assert long.variants() == (long,)
        assert GeneralConfig.from_short_form(causal.short_form()) == causal
        assert all(config.causal is False for config in GENERAL.sweep())
        assert bool(causal.refusal(replace(PROBE, causal=False)))
        assert bool(plain.refusal(PROBE))

    def test_arguments_are_those_of_the_struct(self):
        config = general(WITH_CAUSAL, causal=True)
        (launch,) = config.call(PROBE, PROBE.strides(), H100).launches
        q_tiles = -(-200 // config.B_r)
        data = launch.bind({**dict.fromkeys("qkvo", 1), "lse": 5}, lambda *_: bytes(128))
        begin = ARGUMENTS_OF_HOPPER.offset("len_k")
        found = struct.unpack_from("<6if4x2Q", data, begin)
        scale = struct.unpack("<f", struct.pack("<f", 0.25 * math.log2(math.e)))[0]
        assert found == (130, 6, q_tiles * 12, 200, q_tiles, 3, scale, 5, 0)
        assert config.call(PROBE, PROBE.strides(), H100).buffers == ()
        maps = {found.tensor: found for _, found in launch.tensor_maps}
        assert maps["q"].dims == maps["o"].dims == (64, 200, 2, 6, 2)
        assert maps["k"].dims == maps["v"].dims == (64, 130, 2, 2, 2)
        assert maps["k"].strides == (2 * 256, 128, 256, 130 * 2 * 256)

    def test_without_an_lse_has_a_null_pointer(self):
        problem = AttentionForward(1, 1, 1)
        (launch,) = general(WITH_OPTIONS).call(problem, problem.strides(), H100).launches
        assert "lse" not in {address.tensor for address in launch.addresses}
        assert launch.n_blocks == 1

    @pytest.mark.parametrize(
        ("batch", "tiles_a_head", "causal", "counts"),
        [
            (10, 4, True, False),
            (9, 5, True, True),  # 270 tiles of 132 thread blocks
            (9, 5, False, False),
            (8, 5, True, False),  # 240, two for each at most
        ],
    )
    def test_a_counter_and_who_took_which_tile_are_a_buffer_of_long_causal_problems(
        self, batch, tiles_a_head, causal, counts
    ):
        config = general(WITH_COUNTER, causal=causal)
        problem = replace(PROBE, batch=batch, len_q=tiles_a_head * config.B_r, causal=causal)
        call = config.call(problem, problem.strides(), H100)
        buffer = Buffer(NEXT_TILE, 4 * (1 + batch * 6 * 5), zeroed=True)
        assert call.buffers == ((buffer,) if counts else ())
        counter = Address(ARGUMENTS_OF_HOPPER.offset("next_tile"), NEXT_TILE)
        assert (counter in call.launches[0].addresses) == counts

    def test_heads_are_grouped_by_their_tiles(self):
        offset = ARGUMENTS_OF_HOPPER.offset("head_group")
        for length, heads in ((128, 33), (512, 8), (1024, 4), (2048, 16), (65536, 1)):
            problem = AttentionForward(1, 1, length, causal=True)
            (launch,) = (
                general(WITH_CAUSAL, causal=True).call(problem, problem.strides(), H100).launches
            )
            assert struct.unpack_from("<i", launch.arguments, offset) == (heads,)
        problem = AttentionForward(3, 16, 1024, causal=True)
        (launch,) = (
            general(WITH_COUNTER, causal=True).call(problem, problem.strides(), H100).launches
        )
        assert struct.unpack_from("<i", launch.arguments, offset) == (16,)

    def test_with_a_counter_the_last_heads_have_several_tiles_for_each_block(self):
        config = general(WITH_COUNTER, causal=True)
        problem = AttentionForward(16, 16, 1024, causal=True)
        (launch,) = config.call(problem, problem.strides(), H100).launches
        offset = ARGUMENTS_OF_HOPPER.offset("last_heads")
        assert struct.unpack_from("<i", launch.arguments, offset) == (50,)
        tiles = config.order(problem, H100).tiles()
        assert sorted(tiles) == [(head, row) for head in range(256) for row in range(8)]
        # 206 heads in groups of 16, the last 14 of them, then 50
        assert tiles[192 * 8 :: 14][:8] == tuple((192, row) for row in range(8)[::-1])
        assert tiles[206 * 8 :: 50] == tuple((206, row) for row in range(8)[::-1])

    def test_without_one_all_heads_are_taken_together_if_nobody_has_a_third_tile(self):
        offset = ARGUMENTS_OF_HOPPER.offset("head_group")
        for batch, heads in ((1, 16), (4, 64), (5, 11)):
            problem = AttentionForward(batch, 16, 512, causal=True)
            (launch,) = (
                general(WITH_COUNTER, causal=True).call(problem, problem.strides(), H100).launches
            )
            assert struct.unpack_from("<i", launch.arguments, offset) == (heads,)

    @pytest.mark.parametrize(
        ("step", "batch", "seq_len", "lots"),
        [
            (WITH_CAUSAL, 2, 1024, 2),
            (WITH_COUNTER, 1, 2048, 2),
            (WITH_COUNTER, 1, 4096, 1),
            (WITH_COUNTER, 5, 512, 3),
            (WITH_CLUSTERS, 1, 2048, 2),
            (WITH_CLUSTERS, 5, 512, 3),
            (WITH_CLUSTERS, 1, 100, 1),
        ],
    )
    def test_tiles_that_are_known_before_are_each_one_blocks(self, step, batch, seq_len, lots):
        config = general(step, causal=True)
        problem = AttentionForward(batch, 16, seq_len, causal=True)
        (launch,) = config.call(problem, problem.strides(), H100).launches
        known = [config.order(problem, H100).known_tiles(block) for block in range(launch.n_blocks)]
        assert max(map(len, known)) == lots
        tiles = config.order(problem, H100).tiles()
        of_counter = (
            range(launch.n_blocks, len(tiles)) if config.order(problem, H100).counts else ()
        )
        assert sorted([*itertools.chain(*known), *of_counter]) == [*range(len(tiles))]

    @pytest.mark.parametrize(
        ("step", "low", "high"), [(WITH_CAUSAL, 1.3, 1.8), (WITH_COUNTER, 1, 1.1)]
    )
    def test_whoever_has_the_longest_tile_has_the_shortest_too(self, step, low, high):
        config, problem = general(step, causal=True), AttentionForward(1, 16, 2048, causal=True)
        tiles = config.order(problem, H100).tiles()
        work = [
            sum(tiles[number][1] + 1 for number in config.order(problem, H100).known_tiles(block))
            for block in range(132)
        ]
        assert low < max(work) / (sum(work) / len(work)) < high

    @pytest.mark.parametrize("length", [256, 300, 512])
    def test_blocks_with_several_tiles_have_long_and_short_ones(self, length):
        config = general(WITH_COUNTER, causal=True)
        order = config.order(AttentionForward(16, 16, length, causal=True), H100)
        assert not order.counts
        tiles = order.tiles()
        work = [sum(tiles[n][1] + 1 for n in order.known_tiles(block)) for block in range(132)]
        assert max(work) < 1.1 * sum(work) / len(work)

    @pytest.mark.parametrize(("heads", "last"), [(1, 1), (16, 16), (18, 2), (32, 16)])
    def test_without_one_the_last_heads_are_those_that_are_left(self, heads, last):
        problem = AttentionForward(1, heads, 256, causal=True)
        (launch,) = (
            general(WITH_CAUSAL, causal=True).call(problem, problem.strides(), H100).launches
        )
        offset = ARGUMENTS_OF_HOPPER.offset("last_heads")
        assert struct.unpack_from("<i", launch.arguments, offset) == (last,)

    def test_tiles_are_numbered_as_the_kernels_take_them(self):
        heads, problem = range(18), AttentionForward(2, 9, 256)
        in_order = [(head, tile) for head in heads for tile in (0, 1)]
        assert [*general(WITH_CAUSAL).order(problem, H100).tiles()] == in_order
        causal = (
            general(WITH_CAUSAL, causal=True).order(replace(problem, causal=True), H100).tiles()
        )
        assert sorted(causal) == in_order
        assert causal[:17] == (*((head, 1) for head in heads[:16]), (0, 0))
        assert causal[32:] == ((16, 1), (17, 1), (16, 0), (17, 0))

    def test_those_of_a_cluster_follow_one_another(self):
        problem = AttentionForward(1, 2, 300)
        config = general(WITH_CLUSTERS)
        in_order = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
        assert config.order(problem, H100).tiles() == in_order
        causal = (
            general(WITH_CLUSTERS, causal=True).order(replace(problem, causal=True), H100).tiles()
        )
        assert causal == ((0, 2), (0, 3), (1, 2), (1, 3), (0, 0), (0, 1), (1, 0), (1, 1))
        (launch,) = config.call(problem, problem.strides(), H100).launches
        assert (launch.grid, launch.cluster) == ((8, 1, 1), (2, 1, 1))
        for member, taken in (("tiles", 4), ("q_tiles", 2)):
            offset = ARGUMENTS_OF_HOPPER.offset(member)
            assert struct.unpack_from("<i", launch.arguments, offset) == (taken,)
        problem = AttentionForward(1, 100, 300)
        (launch,) = config.call(problem, problem.strides(), H100).launches
        assert (launch.grid, launch.cluster) == ((132, 1, 1), (2, 1, 1))

    def test_a_cluster_takes_two_heads_where_they_share_keys(self):
        config = general(WITH_PAIRS)
        grouped = AttentionForward(2, 4, 300, kv_heads=2)
        pairs = [(head, row) for head in (0, 2, 4, 6) for row in (0, 1, 2)]
        in_order = tuple((head + i, row) for head, row in pairs for i in (0, 1))
        assert config.order(grouped, H100).tiles() == in_order
        (launch,) = config.call(grouped, grouped.strides(), H100).launches
        assert launch.grid == (2 * 12, 1, 1)
        for member, taken in (("tiles", 12), ("q_tiles", 3), ("heads", 4), ("heads_per_kv", 2)):
            offset = ARGUMENTS_OF_HOPPER.offset(member)
            assert struct.unpack_from("<i", launch.arguments, offset) == (taken,)
        causal = general(WITH_PAIRS, causal=True).order(replace(grouped, causal=True), H100).tiles()
        assert causal[:10] == (*((head, 2) for head in range(8)), (0, 1), (1, 1))
        for kv_heads in (1, 3):  # three heads on one, and one on one
            rows = AttentionForward(1, 3, 300, kv_heads=kv_heads)
            assert (
                config.order(rows, H100).tiles() == general(WITH_CLUSTERS).order(rows, H100).tiles()
            )

    def test_a_warpgroup_multiplies_with_the_half_of_a_block_that_it_sees(self):
        before, config = (
            HOPPER.fixed_config(HOPPER.steps[step], Element.BF16) for step in ("h26", "h27")
        )
        even, late = (AttentionForward(1, 1, 256, len_k=n, causal=True) for n in (256, 192))
        for problem, of_warpgroups in ((even, [64, 128, 64, 128]), (late, [64, 64, 128, 64])):
            causal = config.replace(causal=True)
            found = [causal.first_keys(problem, query) for query in (0, 112, 128, 255)]
            assert found == of_warpgroups
            small = causal.replace(B_c=64, K_slots=4, V_slots=3)
            for whole in (before.replace(causal=True), small, config):
                asked = problem if whole.causal else replace(problem, causal=False)
                # of which the first rows of the second problem see nothing
                assert {whole.first_keys(asked, n) for n in range(256)} == {whole.B_c}

    def test_a_causal_cluster_has_the_rows_of_two_tiles(self):
        with pytest.raises(ValueError, match=r"2 tiles of B_r 192, B_c 80 and 3 slots of K: .*4 b"):
            general(WITH_CLUSTERS, causal=True, **LONG_TILE)

    def test_a_block_of_keys_that_is_left_out_has_a_slot_of_V(self):
        with pytest.raises(ValueError, match=r"1 slots of V: .* up to 2 .*have 2 slots of V"):
            general(WITH_CLUSTERS, causal=True, V_slots=1)

    def test_causal_has_its_diagonal_in_two_blocks_of_keys(self):
        with pytest.raises(ValueError, match="causal with B_r 192 over B_c 80"):
            general(WITH_CAUSAL, causal=True, B_r=192, B_c=80, V_slots=3)

    def test_lengths_leave_room_for_the_rows_of_the_last_tile(self):
        for config, rows in ((general(WITH_LENGTHS), 128), (general(WITH_CLUSTERS), 256)):
            most = config.supports.max_length
            assert most + rows == 2**31 - 1
            assert not config.refusal(AttentionForward(1, 1, 1, len_k=most))
            assert "over the limit" in config.refusal(AttentionForward(1, 1, 1, len_k=most + 1))
