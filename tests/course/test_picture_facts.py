"""The pictures of the course are true of the kernels: their files carry each fact as a data
attribute, which is compared with the simulator, the sources, the costs of instructions and the
measurements."""

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawn_picture import Shape
from test_pictures import ROOT, drawn

import flash_attention
from flash_helpers.kernel_configs import FAMILIES, LARGE_TILE, STEPS, AttentionForward, Config
from flash_helpers.measure.baseline import load_baseline
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.ptx import Counts, DeviceMemory, load_ptx
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import as_matrix
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.instructions.tensor import matrix_of_a, matrix_of_b, matrix_of_c
from flash_helpers.ptx.run.memory.boxes import swizzled
from flash_helpers.registry.problem import Element
from flash_helpers.sass.read import opcodes

ROW_BYTES = 256  # of a tile: 128 columns of 2 bytes


def config_of(step: str, **options: object) -> Config:
    """The fixed config of a step in bf16, with some options replaced."""
    found = FAMILIES[STEPS[step].family].fixed_config(STEPS[step], Element.BF16)
    return found.replace(**options) if options else found


def source_of(step: str) -> str:
    return (ROOT / STEPS[step].source).read_text(encoding="utf-8")


def numbers(cell: Shape, *names: str) -> tuple[int, ...]:
    return tuple(int(cell.data[name]) for name in names)


# -- places in shared memory ---------------------------------------------------------------------


def counted_wavefronts(addresses: list[int]) -> int:
    """Wavefronts in the simulator of one 16-byte access of the lanes with these addresses."""
    tally = Tally(SimpleNamespace(instructions=[SimpleNamespace(name="ldmatrix")]))
    tally.shared_access(0, np.array(addresses), 16, np.arange(len(addresses)))
    return tally.accesses[0].shared_wavefronts


@pytest.mark.parametrize(
    ("name", "step", "place", "expected"),
    [
        ("bank_conflicts", "v1", lambda row, chunk: chunk, 8),
        ("swizzle", "v2", lambda row, chunk: chunk ^ row % 8, 1),
    ],
)
def test_banks_and_wavefronts_are_those_of_the_kernel(
    name: str, step: str, place: Callable[[int, int], int], expected: int
) -> None:
    picture = drawn(name)
    cells = picture.with_data("row", "chunk", "place", "bank")
    assert sorted(numbers(c, "row", "chunk") for c in cells) == [
        *itertools.product(range(8), range(16))
    ]
    columns = sorted({c.box.left for c in cells})
    for cell in cells:
        row, chunk, at, bank = numbers(cell, "row", "chunk", "place", "bank")
        assert at == place(row, chunk) == columns.index(cell.box.left)
        assert picture.label(cell) == str(chunk)
        assert bank == (row * ROW_BYTES + at * 16) // 4 % 32
    (chunk,) = {int(c.data["chunk"]) for c in cells if "fill-orange-tint" in c.classes}
    accesses = picture.with_data("access-row", "bank", "wavefront")
    bank_of = {c.data["row"]: c.data["bank"] for c in cells if c.data["chunk"] == str(chunk)}
    assert {a.data["access-row"]: a.data["bank"] for a in accesses} == bank_of
    addresses = [row * ROW_BYTES + place(row, chunk) * 16 for row in range(8)]
    shown = max(int(a.data["wavefront"]) for a in accesses)
    assert shown == counted_wavefronts(addresses) == expected
    loads = by_operation(config_of(step), 64)["ldmatrix"]
    each = loads.shared_wavefronts / (4 * loads.instructions)
    assert f"64 · 4 · {each:.0f} = {256 * each:.0f} wavefronts" in picture.words


def test_constants_reach_every_chunk_that_the_swizzle_names() -> None:
    picture = drawn("swizzle_constants")
    cells = picture.with_data("lane", "k", "offset")
    assert [c.data["k"] for c in cells] == [str(k) for k in range(8)]
    for cell in cells:
        lane, k, offset = numbers(cell, "lane", "k", "offset")
        row, half = lane % 16, lane // 16
        assert offset == row * ROW_BYTES + ((2 * k + half) ^ row % 8) * 16
        assert sum(map(int, picture.label(cell).split(" + "))) == offset


def test_the_o_tile_is_stored_where_the_kernel_stores_it() -> None:
    picture = drawn("output_swizzle")
    cells = picture.with_data("g", "place", "stores")
    stores = {int(c.data["g"]): int(c.data["place"]) for c in cells if c.data["stores"] == "1"}
    (tile,) = {place ^ g for g, place in stores.items()}
    assert f"Tile n = {tile}," in picture.words
    words = [(g * ROW_BYTES + place * 16) // 4 + t for g, place in stores.items() for t in range(4)]
    assert len({word % 32 for word in words}) == 32, "32 lanes, 4 bytes each: no bank twice"
    for text in (t for t in picture.texts if "address" in t.data):
        n, address = numbers(text, "n", "address")
        assert address == 3 * ROW_BYTES + (n ^ 3) * 16 + 1 * 4  # lane 13: g = 3, t = 1
        bits = [r for r in picture.rects if abs(r.box.top - text.box.top) < 12 and not r.data]
        bits.sort(key=lambda r: r.box.left)
        assert "".join(picture.label(r) for r in bits) == f"{address:010b}"


def test_a_tile_of_tma_lies_as_the_simulator_has_it() -> None:
    picture = drawn("tma_tile")
    cells = picture.with_data("row", "chunk", "place", "k")
    assert len(cells) == 8 * 8
    for cell in cells:
        row, chunk, place, k = numbers(cell, "row", "chunk", "place", "k")
        straight = np.array([1024 + row * 128 + chunk * 16])
        assert swizzled(straight, 128)[0] == 1024 + row * 128 + place * 16
        assert k == chunk // 2
    # of K, (128 keys, 128 columns): what `column_step` of the kernels adds, in bytes
    offsets = [int(c.data["offset"]) for c in picture.with_data("step", "offset")]
    assert offsets == [k // 4 * 128 * 128 + k % 4 * 32 for k in range(8)]


# -- registers -----------------------------------------------------------------------------------


def pairs(n: int) -> list[np.ndarray]:
    """Registers of two fp16 numbers that say lane and register: 8 · lane + register."""
    number = [(8 * np.arange(32) + i).astype(np.float16) for i in range(n)]
    return [np.stack([x, x], axis=1).reshape(-1).view(np.uint32) for x in number]


def test_fragments_are_those_of_the_simulators_mma() -> None:
    """Every element is numbered by lane, register and half, and mma's matrices are looked up."""
    a = matrix_of_a(pairs(4), "f16")[0]
    b = matrix_of_b(pairs(2), "f16")[0].T  # (16, 8)
    c = matrix_of_c([(8 * np.arange(32) + i).astype(np.float32) for i in range(4)], "f32")[0]
    picture = drawn("mma_fragments")
    for operand, matrix, across, down in (("A", a, 2, 1), ("B", b, 1, 2), ("C", c, 2, 1)):
        cells = [x for x in picture.with_data("operand") if x.data["operand"] == operand]
        tops, lefts = sorted({x.box.top for x in cells}), sorted({x.box.left for x in cells})
        seen = np.zeros_like(matrix)
        for cell in cells:
            row, column, lane, register = numbers(cell, "row", "column", "lane", "register")
            part = matrix[row : row + down, column : column + across]
            assert {int(x) // 8 for x in part.flat} == {lane}
            assert int(part.flat[0]) % 8 == register
            assert picture.label(cell) == str(lane)
            assert (tops.index(cell.box.top), lefts.index(cell.box.left)) == (
                row // down,
                column // across,
            )
            seen[row : row + down, column : column + across] += 1
        assert (seen == 1).all()


LDMATRIX = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{
.shared .align 128 .b8 tile[512];
.reg .b32 %r<20>;
.reg .b64 %rd<4>;
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mov.u32 %r3, tile;
add.s32 %r4, %r3, %r2;
shl.b32 %r5, %r1, 2;
add.s32 %r6, %r5, 1;
add.s32 %r7, %r5, 2;
add.s32 %r8, %r5, 3;
st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};
bar.sync 0;
and.b32 %r9, %r1, 15;
shl.b32 %r9, %r9, 5;
shr.u32 %r10, %r1, 4;
shl.b32 %r10, %r10, 4;
add.s32 %r11, %r9, %r10;
add.s32 %r11, %r11, %r3;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r12, %r13, %r14, %r15}, [%r11];
ld.param.u64 %rd1, [out];
mul.wide.u32 %rd2, %r1, 16;
add.s64 %rd3, %rd1, %rd2;
st.global.v4.b32 [%rd3], {%r12, %r13, %r14, %r15};
ret;
}
"""


def test_ldmatrix_is_that_of_the_simulator() -> None:
    """A 16 x 16 piece whose words are numbered, loaded in A's order: (row, chunk, word) by lane and
    register."""
    memory = DeviceMemory()
    out = memory.upload(np.zeros(128, np.uint32))
    kernel = load_ptx(LDMATRIX).kernel("k")
    kernel.launch(grid=(1, 1, 1), block=32, shared_bytes=0, args=[out], memory=memory)
    received = memory.download(out, 128, np.uint32).reshape(32, 4)
    picture = drawn("ldmatrix")
    named = {
        int(x.data["names"]): numbers(x, "row", "chunk", "matrix")
        for x in picture.with_data("names")
    }
    assert sorted(named) == list(range(32))
    cells = picture.with_data("receives", "register", "word", "named-by")
    assert len(cells) == 128
    for cell in cells:
        lane, register, word, by = numbers(cell, "receives", "register", "word", "named-by")
        row, chunk, matrix = named[by]
        assert matrix == register
        assert received[lane, register] == row * 8 + chunk * 4 + word
        assert picture.label(cell) == str(lane)


def test_accumulators_of_a_warpgroup_are_where_operand_a_wants_them() -> None:
    cells = drawn("wgmma_fragments").with_data("operand", "lane", "register", "row", "column")
    S = as_matrix(np.arange(8 * 128).reshape(8, 128, 1))[0]  # register and lane of each element
    P = matrix_of_a(pairs(4), "f16")[0]
    places: dict[str, dict[tuple[int, int], tuple[int, int]]] = {"S": {}, "P": {}}
    for cell in cells:
        lane, n, row, column = numbers(cell, "lane", "register", "row", "column")
        places[cell.data["operand"]][row, column] = lane, n
        if cell.data["operand"] == "S":
            assert divmod(int(S[row, column]), 128) == (2 * n, lane)
        else:
            assert P[row, column] == 8 * lane + n
    assert places["S"] == places["P"] and len(places["S"]) == 16 * 8


def test_the_new_order_of_k_makes_pairs_of_neighbours() -> None:
    """v1 multiplies by K_rmem[n % 2] and K_rmem[n % 2 + 2], v9 by two neighbours."""
    found = defaultdict(set)
    for cell in drawn("fragment_order").with_data("order", "half", "chunk", "register"):
        order, half, register = numbers(cell, "order", "half", "register")
        found[order, half].add(register)
    assert found == {(0, 0): {0, 2}, (0, 1): {1, 3}, (1, 0): {0, 1}, (1, 1): {2, 3}}


def test_registers_hold_the_elements_of_the_tiles() -> None:
    """16 rows a warp, 32 lanes; fp32 one element a register, 16-bit types two."""
    shown: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for cell in drawn("fragments_whole_vs_interleaved").with_data("matrix", "registers"):
        key = cell.data["step"], cell.data["product"]
        shown[key][cell.data["matrix"]] = int(cell.data["registers"])
    O, S, P = 16 * 128 // 32, 16 * 64 // 32, 16 * 64 // 2 // 32  # noqa: E741
    tile, Q = 64 * 128 // 2 // 32, 16 * 128 // 2 // 32
    assert shown == {
        ("3", "S"): {"O": O, "S": S, "K": tile, "Q": Q},
        ("3", "O"): {"O": O, "P": P, "V": tile, "Q": Q},
        ("4", "S"): {"O": O, "S": S, "K": tile // 8, "Q": Q // 8},
        ("4", "O"): {"O": O, "P": P, "V": tile // 4},
    }


# -- counted instructions ------------------------------------------------------------------------


@cache
def by_operation(config: Config, seq_len: int) -> dict[str, Counts]:
    """Instructions of a launch for one head in the simulator, by opcode without modifiers."""
    inputs = make_inputs("normal", AttentionForward(1, 1, seq_len), torch.bfloat16)
    _, run = flash_attention.simulate(config, *inputs)
    found: dict[str, Counts] = defaultdict(Counts)
    for opcode, counts in run.counters.by_opcode().items():
        parts = opcode.split(".")
        # integers are told apart from the softmax's arithmetic
        name = f"{parts[0]}.f32" if parts[-1] == "f32" and parts[0] != "mma" else parts[0]
        found[name].add(counts)
    return found


def for_a_block_of_keys(config: Config, name: str) -> float:
    """Instructions of one warp for one more block of keys: from two sequence lengths."""
    lengths = (128, 256)
    each = []
    for seq_len in lengths:
        warps = seq_len // config.B_r * config.n_warps
        each.append(by_operation(config, seq_len)[name].instructions / warps)
    return (each[1] - each[0]) / ((lengths[1] - lengths[0]) // config.B_c)


V3, V5, V6, V16 = (config_of(step) for step in ("v3", "v5", "v6", "v16"))
LARGE_16 = config_of("v16", **LARGE_TILE)


@pytest.mark.parametrize(
    ("config", "opcode", "instructions", "name", "words"),
    [
        # S = Q @ K^T and P @ V of 64 keys by 16 rows a warp, and by 32
        (V3, "mma", 128, "timeline_copies", "272 + 512 = 784"),
        (V3, "ldmatrix", 64, "timeline_copies", "in 128 cycles"),
        (V3, "ex2.f32", 32 + 2, "timeline_copies", ""),
        (V5, "ldmatrix", 8 * 5 + 32, "double_buffer", "for 5 ldmatrix"),
        (V5, "mma", 2 * 8 * 8, "double_buffer", "8 · 6 = 48 cycles"),
        (V6, "fma.f32", 32 + 2, "ffma_fold", "32 · 3 = 96 instructions become 32"),
        (V16, "ldmatrix", 72, "shared_memory_reads", ""),
        (V16, "mma", 128, "shared_memory_reads", ""),
        (LARGE_16, "ldmatrix", 80, "two_buffers", "768 + 544 + 768 = 2080"),
        (LARGE_16, "mma", 256, "shared_memory_reads", "4 · 256 · 1.5 = 1536: even"),
        (LARGE_16, "ex2.f32", 64 + 4, "two_buffers", ""),
        (config_of("o1"), "ldmatrix", 80, "shared_memory_reads", "4 · (80 · 4 + 64) = 1536 cycles"),
        (config_of("o4"), "mma", 256, "mma_row_sum", ""),
        (config_of("o5"), "mma", 256 + 8, "mma_row_sum", "= 8 mma"),
    ],
)
def test_work_is_what_the_simulator_counts(
    config: Config, opcode: str, instructions: int, name: str, words: str
) -> None:
    assert for_a_block_of_keys(config, opcode) == instructions
    assert words in drawn(name).words


def test_the_fold_saves_two_of_three_instructions() -> None:
    counted = [
        sum(for_a_block_of_keys(config, f"{op}.f32") for op in ("mul", "add", "fma", "sub"))
        for config in (V5, V6)
    ]
    assert 3 * 32 - 32 - 2 <= counted[0] - counted[1] <= 3 * 32 - 32


def test_the_first_block_alone_is_not_rescaled() -> None:
    cells = drawn("peeled_loop").with_data("step", "block", "rescale")
    kept = [numbers(c, "step", "block") for c in cells if c.data["rescale"] == "0"]
    assert kept == [(10, 0)] and len(cells) == 2 * 384 // 64
    v9, v10 = (by_operation(config_of(step), 64) for step in ("v9", "v10"))
    assert v9["ex2.f32"].instructions - v10["ex2.f32"].instructions == 4 * 2
    assert v9["mul.f32"].instructions - v10["mul.f32"].instructions >= 4 * 64
    assert "64 FMUL for O and 2 ex2" in drawn("peeled_loop").words


def test_two_buffers_need_one_barrier() -> None:
    one, two = config_of("o2"), config_of("o3")
    assert (one.smem_bytes, two.smem_bytes) == (64 * 1024, 96 * 1024)
    warps, blocks = 8, 4
    barriers = [by_operation(c, 256)["bar"].barriers / warps for c in (one, two)]
    assert barriers == [4 * blocks, blocks + 1], "with two buffers one stands before the loop"
    for text in ("64 KiB", "96 KiB", "= 32 KiB", "4 barriers per block", "1 barrier per block"):
        assert text in drawn("two_buffers").words


def test_a_thread_block_needs_the_memory_that_the_tiles_take() -> None:
    words = drawn("attention_tiles").words
    assert f"{config_of('v1').smem_bytes // 1024} KiB" in words
    assert f"= {2 * 4096 * 256 // 2**20} MiB" in words, "K and V once through"


# -- costs ---------------------------------------------------------------------------------------


def cost(opcode: str) -> float:
    cycles = opcodes.cost(opcode, 90)
    assert cycles is not None
    return cycles


MMA, LOAD, EX2 = cost("HMMA.16816.F32.BF16"), cost("LDSM.16.M88.4"), cost("MUFU.EX2")


def bars_of(name: str, lane: str) -> list[tuple[str, int, int]]:
    """Bars of a lane of a timeline: label, start and end, panel by panel."""
    found = [b for b in drawn(name).with_data("lane") if b.data["lane"] == lane]
    return [(b.data["what"], *numbers(b, "start", "end")) for b in found]


def test_the_roofline_shows_the_same_work_for_both_shapes() -> None:
    """32 rows and 64 keys, by warps of 16 rows and of 32."""
    figures = load_baseline(ROOT / "benchmarks/resources.json").figures.values()
    bars = drawn("roofline").with_data("part", "rows", "cycles")
    shown = {(b.data["rows"], b.data["part"]): float(b.data["cycles"]) for b in bars}
    mma = 32 * 64 * 128 * 2 / (16 * 8 * 16)
    tile_loads = 2 * 64 * 128 * 2 / 512  # K and V, once a warp
    copies = 2 * 64 * 128 * 2 / 128 / 4  # a quarter of the tiles' wavefronts
    for rows, warps in (("16", 2), ("32", 1)):
        loads = warps * tile_loads + 16
        assert shown[rows, "tensor cores"] == mma * MMA
        assert shown[rows, "shared memory"] == LOAD * loads + warps * copies
        assert shown[rows, "exponentials"] == EX2 * (64 + 4)
        # the instructions that were counted are most of those of ptxas' loop, and no more
        config = config_of("v16") if rows == "16" else LARGE_16
        slots = [of[config.short_form(), "sm_90"].loop_instructions / 4 for of in figures]
        assert slots and all(0.75 * n < shown[rows, "issue"] / warps <= n for n in slots)
    strong = {(b.data["rows"], b.data["part"]) for b in bars if b.strong}
    assert strong == {
        key for key, c in shown.items() if c == max(v for k, v in shown.items() if k[0] == key[0])
    }


def test_tile_shapes_count_loads_and_mma() -> None:
    picture = drawn("tile_shapes")
    bars = picture.with_data("rows", "ldmatrix", "mma", "cycles")
    assert [b.data["rows"] for b in bars] == ["16", "32", "64"]
    for bar in bars:
        rows, *shown = numbers(bar, "rows", "ldmatrix", "mma")
        loads = (2 * 64 + rows) * 128 * 2 / 512  # K, V and the warp's rows of Q
        mma = 2 * rows * 64 * 128 / (16 * 8 * 16)
        assert shown == [loads, mma]
        assert picture.label(bar) == f"{512 * loads / mma:.0f} bytes"
        assert float(bar.data["cycles"]) == LOAD * loads / mma
        assert bar.dashed == (rows * 128 // 32 >= 255), "its accumulators do not fit"


def test_copies_are_awaited_in_step_2_and_hidden_in_step_3() -> None:
    S = O = 4 * max(32 * LOAD, 64 * MMA)  # noqa: E741
    softmax, copy = 4 * 34 * EX2, 64 * 256 / 128
    warps = bars_of("timeline_copies", "warps")
    begin = next(n for n, bar in enumerate(warps[1:], 1) if bar[1] == 0)
    assert [name for name, *_ in warps[: begin - 1]][:4] == ["wait", "S_0", "P_0", "O_0"]
    assert [end - start for _, start, end in warps[begin:]] == [S, softmax, O, S]
    assert warps[-1][2] == S + softmax + O + S, "no wait between the blocks"
    copies = bars_of("timeline_copies", "copy of K")
    trip = next(end - start for name, start, end in copies if name == "trip")
    start, end = {name: span for name, *span in copies}["K_1"]
    assert start - trip == S and end - start == copy and end <= S + softmax + O


def test_a_fragment_is_loaded_one_k_tile_ahead() -> None:
    loads, mma = bars_of("double_buffer", "ldmatrix"), bars_of("double_buffer", "mma")
    assert len(mma) == 6
    for k, (_, start, end) in enumerate(mma[3:]):  # step 5
        assert end - start == 8 * 4 * MMA
        own = [bar for bar in loads if bar[0] == str(k)][1]
        assert own[2] <= start, "loaded before it is used"
        assert k == 0 or own[1] == mma[3 + k - 1][1], "issued before the mma before it"


def test_a_ring_holds_each_fragment_until_its_mma() -> None:
    """No slot holds two at a time, and of V two are asked for before the softmax."""
    bars = drawn("fragment_ring").with_data("lane")
    for slot in range(3):
        spans = sorted((start, end) for _, start, end in bars_of("fragment_ring", f"slot {slot}"))
        assert len(spans) > 3
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), slot
    warps = bars_of("fragment_ring", "warp")
    product = [start for what, start, _ in warps if what.startswith("O")]
    softmax = next(start for what, start, _ in warps if what == "softmax")
    assert product[0] - product[1] == 8 * LOAD + 30, "o3 waits for 8 ldmatrix and their latency"
    issued = {b.data["what"]: int(b.data["start"]) for b in bars if b.data["what"][:2] == "V_"}
    assert issued["V_0"] == softmax and issued["V_1"] == softmax + LOAD < issued["V_2"]


def test_the_times_of_a_warpgroup_are_counted() -> None:
    """Products of 64 rows, 128 keys and 128 columns; exponentials of S and of two rescales for each
    of 128 threads."""
    S = 8 * 4 * cost("HGMMA.64x128x16.F32.BF16")
    ex2 = (64 + 2) * 4 * EX2
    for name in ("two_slots", "ping_pong", "own_products", "flattened", "early_slot"):
        for bar in drawn(name).with_data("lane", "what", "start", "end"):
            start, end = numbers(bar, "start", "end")
            if bar.data["what"][:1] == "P":
                assert end - start == ex2, (name, bar.data)
            if bar.data["what"][:1] in "SO" and not bar.data["lane"].startswith("slot"):
                assert end - start in (S, 2 * S), (name, bar.data)
    assert "= 1552 cycles in h6, and 512 + 528 = 1040 in h7" in drawn("own_products").words


@pytest.mark.parametrize(
    "name", ["timeline_copies", "two_buffers", "double_buffer", "fragment_ring"]
)
def test_times_are_drawn_to_one_scale(name: str) -> None:
    bars = drawn(name).with_data("lane", "start", "end")
    first = min(b.box.left for b in bars)
    late = [b for b in bars if int(b.data["start"]) > 20]
    scales = [(b.box.left - first) / int(b.data["start"]) for b in late]
    assert len(bars) > 8 and max(scales) / min(scales) < 1.03
    for bar in bars:
        start, end = numbers(bar, "start", "end")
        width = bar.box.right - bar.box.left
        is_cut = bar.box.right == pytest.approx(470)  # where the picture ends
        assert width <= (end - start) * scales[0] + 2
        assert is_cut or width >= (end - start) * scales[0] - 2


def test_the_sm_is_that_of_the_tables() -> None:
    words = drawn("sm").words
    assert words.count(f"registers {64 * 1024 // 4:,}") == 4
    assert words.count(f"mma: {4 * MMA:g} cycles") == words.count(f"ex2: {4 * EX2:g} cycles") == 4
    assert "32 banks · 4 bytes = 128 bytes per cycle" in words and "227 KiB" in words


# -- what the sources say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text", "count"),
    [
        ("o2", "constexpr float kMaxGrowth = 8;", 1),  # lazy_rescale
        ("o4", "constexpr int kAhead = 2;", 1),  # fragment_ring
        ("o4", "constexpr int kRing = kAhead + 1;", 1),
        ("v14", "cfg.B_r / cfg.n_warps == kMmaM && cfg.B_c <= 64 ? 12 : 8", 1),  # cache_policy
        ("h28", "cluster_sync();", 2),  # no_fence
        ("h29", "cluster_sync();", 0),
    ],
)
def test_a_kernel_says_what_its_picture_assumes(step: str, text: str, count: int) -> None:
    assert source_of(step).count(text) == count


def test_the_row_stride_is_in_the_kernels_ptx(package: Path) -> None:
    picture = drawn("row_stride")
    cells = [c for c in picture.with_data("step", "offset") if c.data["step"] == "16"]
    offsets = {int(c.data["offset"]) for c in cells}
    assert offsets == {row * 16 * 128 * 2 for row in (0, 16, 32, 48)}
    found = []
    for step in ("v15", "v16"):
        ptx = (package / "ptx" / f"{config_of(step).short_form()}.ptx").read_text()
        found.append(set(map(int, re.findall(r"add\.s64 \t?%rd\d+, %rd\d+, (\d+);", ptx))))
    assert offsets - {0} <= found[1] and not (offsets - {0}) & found[0]
    assert "first + 0x10000" in [picture.label(c) for c in cells]


def test_copies_are_drawn_where_the_threads_copy() -> None:
    """16 bytes a copy, 128 threads: a row of a tile is 16 copies wide, a piece of it 8."""
    for name, steps in (("block_index", (11, 12)), ("pieces", (14, 15)), ("row_stride", (15, 16))):
        for step in steps:
            cells = [c for c in drawn(name).with_data("step", "row") if c.data["step"] == str(step)]
            rows = sorted({int(c.data["row"]) for c in cells})
            assert rows == list(range(0, 64, 8 if step < 15 else 16)), (name, step)
    pieces = drawn("pieces").with_data("step", "row", "column")
    new = {numbers(c, "row", "column") for c in pieces if c.data["step"] == "15"}
    assert new == set(itertools.product(range(0, 64, 16), (0, 64)))


def test_rows_are_counted_down() -> None:
    cells = drawn("backwards").with_data("step", "value")
    values = [
        [v for s, v in (numbers(c, "step", "value") for c in cells) if s == n] for n in (12, 13)
    ]
    assert values[0] == list(range(8))
    assert sorted(values[1], reverse=True) == list(range(512 - 64, -1, -64))


def test_what_is_in_flight_fits_l2() -> None:
    """396 thread blocks at a time: 7 heads of 64, or 2 of 256; 1 MiB per tensor at 4096."""
    cells = drawn("cache_policy").with_data("seq-len", "tensor", "head", "mib")
    held = Counter((c.data["tensor"], *numbers(c, "seq-len", "mib")) for c in cells)
    assert held == {
        ("K, V", 4096, 2): 7,
        ("O", 4096, 1): 7,
        ("K, V", 16384, 8): 2,
        ("O", 16384, 4): 2,
    }


def test_a_lagging_maximum_changes_no_output() -> None:
    """A row with one key per block, V = 1, 2, …: with what o2 keeps as with the whole softmax."""
    picture = drawn("lazy_rescale")
    texts = [text.text for text in picture.texts]
    scores = [*map(int, texts[texts.index("largest S") + 1 :][:8])]
    kept = [*map(int, texts[texts.index("m in o2") + 1 :][:8])]
    rescaled = {
        step: [int(c.data["rescale"]) for c in picture.with_data("step") if c.data["step"] == step]
        for step in ("o1", "o2")
    }
    before, l, O = -math.inf, 0.0, 0.0  # noqa: E741
    for value, (score, m) in enumerate(zip(scores, kept, strict=True), start=1):
        assert max(scores[:value]) - m <= 8, "kMaxGrowth"
        assert rescaled["o2"][value - 1] == (m != before)
        P, rescale = 2.0 ** (score - m), 2.0 ** (before - m)
        l, O, before = l * rescale + P, O * rescale + P * value, m  # noqa: E741
    weights = np.exp2(np.array(scores, dtype=np.float64))
    assert O / l == pytest.approx(weights @ np.arange(1, 9) / weights.sum(), rel=1e-12)
    assert rescaled["o1"] == [0] + [1] * 7
    assert f"here 7 times in o1, {sum(rescaled['o2'])} in o2" in picture.words


def test_a_column_of_ones_sums_the_rows() -> None:
    picture = drawn("mma_row_sum")

    def matrix(operand: str, shape: tuple[int, ...]) -> np.ndarray:
        found = [c for c in picture.with_data("operand") if c.data["operand"] == operand]
        found.sort(key=lambda c: (c.box.top, c.box.left))
        return np.array([float(picture.label(c)) for c in found]).reshape(shape)

    P, V = matrix("P", (3, 4)), matrix("V", (4, 2))
    assert (matrix("O", (3, 2)) == P @ V).all()
    assert (matrix("ones", (4,)) == 1).all() and (matrix("l", (3,)) == P.sum(axis=1)).all()


# -- masks, turns and clusters -------------------------------------------------------------------


def seen(mask: np.ndarray, rows: slice, keys: slice) -> str:
    part = mask[rows, keys]
    return "all" if part.all() else "part" if part.any() else "none"


@pytest.mark.parametrize(
    ("name", "rows", "tile", "B_c", "shift", "shape"),
    [
        # query i sees key j if j <= i + 48, of 560 keys
        ("causal_blocks", 128, 128, 128, 48, (512, 560)),
        ("own_keys", 64, 192, 80, 0, (384, 400)),
    ],
)
def test_blocks_are_taken_where_a_row_sees_them(
    name: str, rows: int, tile: int, B_c: int, shift: int, shape: tuple[int, int]
) -> None:
    """A warpgroup leaves out what only later rows of its tile see."""
    picture = drawn(name)
    n_blocks = -(-shape[1] // B_c)
    mask = np.arange(n_blocks * B_c) <= np.minimum(
        np.arange(shape[0])[:, None] + shift, shape[1] - 1
    )
    cells = picture.with_data("query", "block")
    assert len(cells) == shape[0] // rows * n_blocks
    for cell in cells:
        query, block = numbers(cell, "query", "block")
        own, keys = slice(query, query + rows), slice(block * B_c, (block + 1) * B_c)
        assert cell.data["seen"] == seen(mask, own, keys)
        of_tile = mask[query // tile * tile :][:tile, keys].any()
        turn = cell.data.get("turn")
        assert (turn is not None) == of_tile
        assert (turn == "passed") == (of_tile and cell.data["seen"] == "none")
        if turn not in (None, "passed"):
            last = np.flatnonzero(mask[own][-1])[-1] // B_c
            assert int(turn) == last - block
            assert cell.data["seen"] == "all" or int(turn) < 2
    taken = Counter(c.data["turn"] == "passed" for c in picture.with_data("turn"))
    assert re.search(rf"= {taken[False]} blocks (of \d+ )?are (taken|computed)", picture.words)


def test_a_warpgroup_multiplies_with_the_half_of_its_first_block_that_it_sees() -> None:
    """512 queries and keys, tiles of 128 and blocks of 128, warpgroups and halves of 64."""
    picture = drawn("half_blocks")
    cells = picture.with_data("query", "key", "by", "seen")
    assert len(cells) == 8 * 8
    mask = np.arange(512) <= np.arange(512)[:, None]
    for cell in cells:
        query, key = numbers(cell, "query", "key")
        own = seen(mask, slice(query, query + 64), slice(key, key + 64))
        assert cell.data["seen"] == own
        of_tile = mask[query // 128 * 128 :][:128, key // 128 * 128 :][:, :128].any()
        assert cell.data["by"] == ("both" if own != "none" else "h26" if of_tile else "none")
    halves = Counter(cell.data["by"] for cell in cells)
    assert f"= {halves['both']} halves are multiplied" in picture.words
    assert f"= {halves['both'] + halves['h26']}." in picture.words


def test_causal_tiles_that_begin_together_load_different_blocks() -> None:
    """Four tiles of 128 queries, as many blocks of keys."""
    cells = drawn("shared_loads").with_data("tile", "turn", "block", "together", "causal")
    assert len(cells) == 4 * 4 + (4 + 3 + 2 + 1) + 2 * (4 + 2)
    loaded: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for cell in cells:
        tile, turn, block, together = numbers(cell, "tile", "turn", "block", "together")
        causal = cell.data["causal"]
        loaded[causal, together, turn].append(block)
        first = 3 if causal == "False" else tile // together
        assert block == (first if together == 1 else 2 * first + 1) - turn
    for (causal, together, _), blocks in loaded.items():
        assert max(Counter(blocks).values()) == (4 if causal == "False" else together)
    for total in ("4 + 4 + 4 + 4 = 16 loads", "= 10 of which none can", "2 + 4 = 6 that"):
        assert total in drawn("shared_loads").words


def test_two_heads_of_a_cluster_see_the_same_blocks() -> None:
    """Two heads, each of three tiles of 128 queries and as many blocks of keys."""
    picture = drawn("head_pairs")
    cells = [
        numbers(c, "step", "turn", "head", "tile", "block")
        for c in picture.with_data("lane", "turn", "head", "tile", "block", "step")
    ]
    every = [(h, t, b) for h in (0, 1) for t in range(3) for b in range(t + 1)]
    for step, turns in ((25, 10), (26, 6)):
        own = [cell[1:] for cell in cells if cell[0] == step]
        assert {turn for turn, *_ in own} == {*range(turns)}
        assert sorted((h, t, b) for _, h, t, b in own if b <= t < 3) == every
    assert len([cell for cell in cells if cell[0] == 26]) == len(every), "no turn is idle"
    assert "3 + 3 + 2 + 2 = 10 turns in h25, 3 + 2 + 1 = 6 in h26" in picture.words


def test_the_phases_of_a_ring_alternate_and_end_when_the_slot_is_full_or_empty() -> None:
    picture = drawn("barrier_ring")
    phases_of, ends_of = defaultdict(list), defaultdict(list)
    for phase in picture.with_data("barrier", "slot", "phase", "parity"):
        phases_of[phase.data["barrier"], phase.data["slot"]].append(phase)
    for span in picture.with_data("slot", "block", "what"):
        barrier = {"copied": "full", "read": "empty"}[span.data["what"]]
        ends_of[barrier, span.data["slot"]].append(span.box.right)
    assert phases_of.keys() == ends_of.keys() == {*itertools.product(("full", "empty"), "01")}
    for key, phases in phases_of.items():
        assert [int(r.data["parity"]) for r in phases] == [n % 2 for n in range(len(phases))]
        for phase, end in zip(phases[:-1], ends_of[key], strict=False):
            assert phase.box.right == pytest.approx(end, abs=0.5)


def test_a_slot_of_q_goes_back_when_it_does_in_the_kernels() -> None:
    """Tiles A, B and C: behind the softmax of h27, before that of h28, in both after O was read."""
    begins = []
    for panel, step in enumerate(("h27", "h28")):

        def span(lane: str, what: str, n: int = panel) -> tuple[int, int]:
            bars = bars_of("early_slot", lane)
            return [(start, end) for name, start, end in bars if name == what][n]

        last_O, store = span("products", "O of A"), span("store", "store")
        S_1, O_0 = span("products", "S_1 of B"), span("products", "O_0 of B")
        P_1 = span("softmax", "P_1 of B")
        O_there, load, Q_there = (span("slot 0", what) for what in ("O of A", "load", "Q of C"))
        assert last_O[1] <= store[0] == O_there[0] < store[1] < O_there[1] <= load[0]
        assert load[1] == Q_there[0] and load[1] - load[0] == 768 / 2
        assert span("slot 1", "Q of B")[1] == S_1[1]
        block = source_of(step).split("auto next_block = ")[1].split("auto begin")[0]
        early = block.index("release_stored();") < block.index("softmax")
        assert load[0] == (S_1[1] if early else max(P_1[1], O_0[1])) and early == (step == "h28")
        begins.append(span("products", "S_0 of C")[0])
        assert begins[-1] == max(load[1], P_1[1], O_0[1])
    waits = [bar for bar in bars_of("early_slot", "products") if bar[0] == "wait"]
    assert waits == [("wait", begins[1], begins[0])], "the warpgroup of h28 does not wait"
    words = drawn("early_slot").words
    assert f"waits {begins[0] - begins[1]} in h27 and 0 in h28" in words


def test_the_first_cycles_of_a_cluster_are_those_that_were_measured() -> None:
    """Q is asked for as much earlier in h29 as the fence of h28 takes."""
    measured = json.loads((ROOT / "benchmarks/results/first_cycles_h100.json").read_text())
    fenced, relaxed = (
        {what: median(calls) for what, calls in kernel["cycles"].items()}
        for kernel in measured["kernels"][:2]
    )
    (_, _, meets), (what, fence_begin, fence_end), *_ = bars_of("no_fence", "threads")
    assert what == "fence" and meets == round(relaxed["met"], -1)
    assert fence_end - fence_begin == round(fenced["met"] - relaxed["met"], -1)
    places = [bar for bar in bars_of("no_fence", "producer") if bar[0] == "where the tile is"]
    for cycles, (_, begin, end) in zip((fenced, relaxed), places, strict=True):
        assert end - begin == round(cycles["asks for Q"] - cycles["met"], -1)
    assert places[0][1] - places[1][1] == fence_end - fence_begin


def test_tiles_that_are_taken_late_end_together() -> None:
    """Four heads of three pairs of tiles with 2, 4 and 6 blocks of keys, longest first. In h29 a
    cluster's tile is chosen when the one before begins, in h30 when it ends."""
    lengths = [6] * 4 + [4] * 4 + [2] * 4
    cells = drawn("late_take").with_data("lane", "tile", "begin", "late")
    for step, late, ends in (("h29", False, [18, 16, 14]), ("h30", True, [16] * 3)):
        found = {
            int(c.data["tile"]): numbers(c, "lane", "begin")
            for c in cells
            if c.data["late"] == str(late)
        }
        assert sorted(found) == [*range(12)]
        by_lane = {lane: sorted(at for of, at in found.values() if of == lane) for lane in range(3)}
        chosen = []
        for lane, begin in (found[tile] for tile in range(3, 12)):
            before = by_lane[lane][by_lane[lane].index(begin) - 1]
            chosen.append(begin if late else before)
        assert chosen == sorted(chosen)
        last = [
            max(at + lengths[n] for n, (of, at) in found.items() if of == lane) for lane in range(3)
        ]
        assert sorted(last, reverse=True) == ends
        loop = source_of(step).split("for (int tile = ")[1]
        assert (loop.index("take_tile") > loop.index("tma_load_slots")) is late
    assert "In h29 the busiest has 18, in h30 16." in drawn("late_take").words
