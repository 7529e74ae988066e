"""Whole kernels, as nvcc writes them, give what NumPy gives."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest

from flash_helpers.ptx import DeviceMemory, Observer, Phase, load_ptx
from flash_helpers.ptx.run.instructions.tensor import matrix_of_c

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def modules():
    return {path.stem: load_ptx(path) for path in KERNELS.glob("*.ptx")}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def launch(module, name, arrays, outputs, scalars=(), grid=1, block=64, **options):
    """Runs a kernel on arrays, then zeroed outputs, then scalars; returns outputs and the run."""
    memory = DeviceMemory()
    inputs = [memory.upload(a) for a in arrays]
    results = [memory.upload(o) for o in outputs]
    run = module.kernel(name).launch(
        grid, block, args=[*inputs, *results, *scalars], memory=memory, **options
    )
    downloaded = [
        memory.download(p, o.shape, o.dtype) for p, o in zip(results, outputs, strict=True)
    ]
    return (downloaded[0] if len(outputs) == 1 else downloaded), run


def bf16(x):
    """float32 rounded to bf16, as bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# -- attention ---------------------------------------------------------------------------------


def run_attention(module, name, q, k, v, heads, **options):
    seq, width = q.shape
    memory = DeviceMemory()
    addresses = [memory.upload(x) for x in (q, k, v)]
    out = memory.upload(np.zeros_like(q))
    args = struct.pack("<4Qqi4x", *addresses, out, width, seq)
    options |= {"shared_bytes": 3 * 64 * 64 * 2, "memory": memory}
    run = module.kernel(name).launch((seq // 64, heads), 128, args=[args], **options)
    return memory.download(out, q.shape, q.dtype), run


def attention64(q, k, v, heads):
    outputs = []
    for x, y, z in zip(*(np.split(a.astype(np.float64), heads, 1) for a in (q, k, v)), strict=True):
        s = x @ y.T / math.sqrt(x.shape[1])
        p = np.exp(s - s.max(axis=1, keepdims=True))
        outputs.append(p / p.sum(axis=1, keepdims=True) @ z)
    return np.concatenate(outputs, axis=1)


def test_attention_fp16_with_bank_conflicts(modules, rng):
    q, k, v = (rng.standard_normal((3, 192, 128)) + 0.3).astype(np.float16)
    o, run = run_attention(modules["attention"], "__halfLb0", q, k, v, heads=2)
    np.testing.assert_allclose(o, attention64(q, k, v, 2), atol=2e-3)
    # Rows of 128 bytes: the eight rows of every 8x8 matrix fall on the same banks.
    loads = [c for o, c in run.counters.by_opcode().items() if o.startswith("ldmatrix")]
    assert sum(c.shared_wavefronts for c in loads) == 8 * sum(
        c.shared_ideal_wavefronts for c in loads
    )


def test_attention_bf16_swizzled_without_bank_conflicts(modules, rng):
    q, k, v = rng.standard_normal((3, 128, 64)) + 0.3
    bits = [bf16(x) for x in (q, k, v)]
    o, run = run_attention(modules["attention"], "bfloat16Lb1", *bits, heads=1)
    want = attention64(*(from_bf16(b) for b in bits), 1)
    np.testing.assert_allclose(from_bf16(o), want, atol=2e-2)
    assert run.counters.total.bank_conflicts == 0


def test_attention_counts_what_its_shape_says(modules, rng):
    seq, d = 192, 64
    q, k, v = rng.standard_normal((3, seq, d)).astype(np.float16)
    _, run = run_attention(modules["attention"], "__halfLb0", q, k, v, heads=1)
    total = run.counters.total
    blocks = warps_rounds = seq // 64
    assert total.mma == blocks * warps_rounds * 4 * 2 * (64 // 8) * (64 // 16)
    assert total.mma_flops == 4 * seq * seq * d
    # Each block reads Q once, K and V whole, and writes O once.
    assert total.global_bytes == blocks * (64 + 2 * seq + 64) * d * 2
    assert total.global_sectors * 32 == total.global_bytes
    assert total.barriers == blocks * 4 * 2 * (seq // 64)
    assert total.waits == blocks * 4 * (seq // 64)
    phases = run.counters.by_phase()
    assert phases[Phase.MAIN_LOOP].mma == total.mma
    assert sum(c.instructions for c in phases.values()) == total.instructions
    by_line = {line.line: line.counts for line in run.by_line if line.file.endswith("attention.cu")}
    assert sum(line.counts.instructions for line in run.by_line) == total.instructions
    source = (KERNELS / "attention.cu").read_text().splitlines()
    conflicted = [source[n - 1] for n, c in by_line.items() if c.bank_conflicts]
    assert any("shared_address(row)" in text for text in conflicted)


def test_blocks_of_a_large_grid_run_in_batches_and_report_progress(modules):
    x = np.arange(4096 * 3, dtype=np.float32)
    seen = []
    total, _ = launch(modules["parallel"], "block_sum", [x], [np.zeros(1, np.float32)], [x.size],
                      grid=40, block=256, progress=lambda *done: seen.append(done))  # fmt: skip
    assert seen[-1] == (40, 40) and len(seen) > 1 and seen == sorted(seen)
    np.testing.assert_allclose(total[0], x.sum(dtype=np.float64), rtol=1e-5)


# -- matrix products ---------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(64, 32, 64), (40, 50, 72)])
def test_gemm_f16_zero_fills_ragged_tiles(modules, rng, m, n, k):
    a, b = (rng.integers(-4, 5, (rows, k)).astype(np.float16) for rows in (m, n))
    c, _ = launch(
        modules["gemm"], "gemm_f16", [a, b], [np.zeros((m, n), np.float16)], [m, n, k],
        grid=(-(-n // 32), -(-m // 32)), block=128,
    )  # fmt: skip
    np.testing.assert_array_equal(c, (a.astype(np.float64) @ b.astype(np.float64).T))


def test_gemm_bf16_k8(modules, rng):
    k = 24
    a, b = rng.integers(-9, 9, (16, k)), rng.integers(-9, 9, (k, 8))
    c, _ = launch(modules["gemm"], "gemm_k8_bf16", [bf16(a), bf16(b)],
                  [np.zeros((16, 8), np.float32)], [k], block=32)  # fmt: skip
    np.testing.assert_array_equal(c, a @ b)


def test_gemm_tf32_s8_f64(modules, rng):
    a, b = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (16, 8))
    start = np.zeros((16, 8))
    start[:8, 0::2], start[:8, 1::2], start[8:, 0::2], start[8:, 1::2] = 1, 2, 3, 4
    c, _ = launch(modules["gemm"], "gemm_tf32", [a, b], [np.zeros((16, 8), np.float32)], block=32)
    np.testing.assert_allclose(c, start + a @ b.T, atol=1e-2)
    a, b = (rng.integers(-128, 128, (rows, 32), np.int8) for rows in (16, 8))
    c, _ = launch(modules["gemm"], "gemm_s8", [a, b], [np.zeros((16, 8), np.int32)], block=32)
    np.testing.assert_array_equal(c, a.astype(int) @ b.astype(int).T)
    a, b = rng.standard_normal((2, 8, 4))
    c, _ = launch(modules["gemm"], "gemm_f64", [a, b], [np.zeros((8, 8))], block=32)
    np.testing.assert_allclose(c, a @ b.T, rtol=1e-14)


# -- warps and blocks --------------------------------------------------------------------------


def test_softmax(modules, rng):
    x = (4 * rng.standard_normal((3, 200))).astype(np.float16)
    y, _ = launch(modules["parallel"], "softmax", [x], [np.zeros_like(x)], [200], grid=3, block=96,
                  shared_bytes=800)  # fmt: skip
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=2e-3, atol=1e-6)


def test_transpose_of_a_ragged_matrix(modules, rng):
    x = rng.standard_normal((50, 70)).astype(np.float32)
    y, run = launch(modules["parallel"], "transpose", [x], [np.zeros((70, 50), np.float32)],
                    [70, 50], grid=(3, 2), block=(32, 8))  # fmt: skip
    np.testing.assert_array_equal(y, x.T)
    assert run.counters.total.bank_conflicts == 0


def test_lanes_leave_a_loop_one_by_one_and_meet_again(modules):
    x = np.arange(1, 101, dtype=np.uint32)

    def steps(n):
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    y, _ = launch(modules["parallel"], "collatz", [x], [np.zeros_like(x)], [100], grid=2)
    np.testing.assert_array_equal(y, [steps(int(n)) for n in x])


def test_histogram_with_shared_and_global_atomics(modules, rng):
    x = rng.integers(0, 256, 3000, np.uint8)
    bins, _ = launch(
        modules["parallel"], "histogram", [x], [np.zeros(256, np.uint32)], [3000], grid=2
    )
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=256))


def test_votes_matches_reductions_and_shuffles(modules, rng):
    x = rng.integers(-50, 50, 32, np.int32)
    y, _ = launch(modules["parallel"], "votes", [x], [np.zeros(352, np.uint32)], block=32)
    rows = y.reshape(11, 32)
    lanes = np.arange(32)
    positive = int(((x > 0) << lanes.astype(np.int64)).sum())
    c_rem = np.sign(x) * (np.abs(x) % 3)
    equal = [(int((c_rem == c).astype(np.int64) @ (1 << lanes.astype(np.int64)))) for c in c_rem]
    assert set(rows[0]) == {positive}
    assert set(rows[1]) == {2}
    np.testing.assert_array_equal(rows[2], equal)
    assert set(rows[3]) == {0}
    assert set(rows[4].view(np.int32)) == {x.sum()}
    assert set(rows[5].view(np.int32)) == {x.min()}
    assert set(rows[6].view(np.int32)) == {np.bitwise_or.reduce(x)}
    np.testing.assert_array_equal(rows[7], np.where(x > 0, positive, positive ^ 0xFFFFFFFF))
    np.testing.assert_array_equal(rows[8], np.where(x > 0, x[np.argmax(x > 0)], 0))
    up = np.where(lanes % 8 >= 3, lanes - 3, lanes)
    np.testing.assert_array_equal(rows[9].view(np.int32), x[up])
    np.testing.assert_array_equal(rows[10].view(np.int32), x[lanes // 16 * 16 + lanes * 5 % 16])


def test_warps_with_different_roles(modules, rng):
    x = rng.integers(-99, 99, (5, 32), np.int32)
    y, _ = launch(modules["parallel"], "roles", [x], [np.zeros_like(x)], [5])
    np.testing.assert_array_equal(y, 2 * x + 1)


def test_barriers_that_reduce(modules, rng):
    x = rng.integers(-99, 99, 64, np.int32)
    y, _ = launch(modules["parallel"], "counted", [x], [np.zeros_like(x)])
    np.testing.assert_array_equal(y, np.count_nonzero(x > 0) + 10000)


def test_blocks_that_spin_on_each_other(modules):
    order, _ = launch(modules["parallel"], "turns", [], [np.zeros(7, np.int32)], grid=6, block=32)
    np.testing.assert_array_equal(order, [0, 1, 2, 3, 4, 5, 6])


def test_atomics(modules):
    u = np.zeros(72, np.uint32)
    u[1], u[2], u[4] = 3, 1000, 0xFFFFFFFF
    sums = [np.zeros(1, np.float32), np.zeros(2, np.float16), np.zeros(2, np.uint16),
            np.zeros(1, np.uint64)]  # fmt: skip
    (got, f32, f16, bits, u64), _ = launch(modules["parallel"], "atomics", [], [u, *sums])
    inc, dec = 0, 3
    for _ in range(64):
        inc = 0 if inc >= 40 else inc + 1
        dec = 7 if dec == 0 or dec > 7 else dec - 1
    assert list(got[:8]) == [inc, dec, 37, 53, 0, 0xFFFFFFFF, 0, 128]
    np.testing.assert_array_equal(np.sort(got[8:]), np.arange(0, 128, 2))
    assert f32[0] == 32 and u64[0] == 64 << 33
    assert list(f16) == [64, 16] and list(from_bf16(bits)) == [32, 64]


# -- arithmetic --------------------------------------------------------------------------------


def test_integers(modules, rng):
    a, b = rng.integers(-(2**31), 2**31, (2, 64)).astype(np.int32)
    a[:4], b[:4] = [0, -1, 5, -7], [3, 0, 5, 2]
    out, _ = launch(modules["arithmetic"], "integers", [a, b], [np.zeros((23, 64), np.int32)])

    def wrap(value, bits=32):
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> (bits - 1) else value

    def c_div(x, y):
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    def expected(x, y):
        ux, uy = x % 2**32, y % 2**32
        lx, ly = wrap(x * 1000003, 64), wrap(y * 7919 + 1, 64)
        octets = list(ux.to_bytes(4, "little") + uy.to_bytes(4, "little"))
        s8 = [[o - 256 if o > 127 else o for o in octets[:4]],
              [o - 256 if o > 127 else o for o in octets[4:]]]  # fmt: skip
        low16 = wrap(x, 16)
        return [
            x * y >> 32,
            ux * uy >> 32,
            lx * ly >> 64,
            32 - ux.bit_length(),
            ux.bit_count(),
            int(f"{ux:032b}"[::-1], 2),
            (ux & -ux).bit_length(),
            ((uy << 32 | ux) << 5) >> 32,
            (uy << 32 | ux) >> 32,
            int.from_bytes(bytes([octets[0], octets[4], octets[2], octets[6]]), "little"),
            17 + sum(p * q for p, q in zip(*s8, strict=True)),
            abs(ux - uy) + 3,
            c_div(lx, ly),
            lx - c_div(lx, ly) * ly,
            c_div(x, y) if y else 0,
            x - c_div(x, y) * y if y else 0,
            ux // uy if uy else 0,
            wrap(lx * ly, 64) >> 17,
            (lx % 2**64).bit_count() + 64 - (ly % 2**64).bit_length(),
            low16 * (y & 0xFF),
            (x + y) >> 1,
            abs(x) + min(x, y) + max(x, y),
            (x & ~y) if (x < y) ^ (x == y) else (x | y),
        ]

    want = np.array(
        [[wrap(v) for v in expected(int(x), int(y))] for x, y in zip(a, b, strict=True)]
    )
    np.testing.assert_array_equal(out, want.T)


def test_halves(modules, rng):
    a, b = (2 * rng.standard_normal((2, 64, 2))).astype(np.float16)
    out, _ = launch(modules["arithmetic"], "halves", [a, b], [np.zeros((12, 64, 2), np.float16)])
    x, y = a.astype(np.float64), b.astype(np.float64)
    exact = [x + y, x * y, x * y + x, x - y, np.maximum(x, y), np.minimum(x, y), x > y, -np.abs(x)]
    for i, want in enumerate(exact):
        np.testing.assert_array_equal(out[i], want.astype(np.float16), err_msg=str(i))
    close = [
        np.exp2(x),
        np.stack([x[:, 0] / y[:, 1], np.sqrt(np.abs(x[:, 1]))], 1),
        x[:, ::-1],
        1 / y,
    ]
    for i, want in enumerate(close):
        np.testing.assert_allclose(out[8 + i], want, rtol=2e-3, err_msg=str(i))


def test_bfloats(modules, rng):
    a, b = bf16(rng.standard_normal((2, 64, 2)))
    out, _ = launch(modules["arithmetic"], "bfloats", [a, b], [np.zeros((6, 64, 2), np.uint16)])
    x, y = from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64)
    exact = [x + y, x * y, x * y + x, np.maximum(x, y), -x, np.stack([x[:, 0] * 3, y[:, 1]], 1)]
    for i, want in enumerate(exact):
        np.testing.assert_array_equal(out[i], bf16(want), err_msg=str(i))


def test_floats(modules, rng):
    a, b = rng.standard_normal((2, 64)).astype(np.float32)
    out, _ = launch(modules["arithmetic"], "floats", [a, b], [np.zeros((18, 64), np.float32)])
    x, y = a.astype(np.float64), b.astype(np.float64)
    want = [
        x / y, np.sqrt(np.abs(x)), x / y, 1 / y, x + y, x * y + x,
        np.floor(x) + np.ceil(y) + np.trunc(x) + np.rint(y), np.trunc(a * np.float32(10)),
        x * y + 1, np.exp2(x), np.log2(np.abs(x) + 1), np.exp(x), np.sin(x), np.copysign(y, x),
        np.minimum(x, y) - np.maximum(x, y), 1 / np.sqrt(np.abs(x) + 1),
        (np.abs(x) + 0.5) ** y, np.fmod(x, 0.75),
    ]  # fmt: skip
    for i, value in enumerate(want):
        np.testing.assert_allclose(out[i], value, rtol=1e-6, atol=1e-6, err_msg=str(i))
    # Directed roundings lie on their side of the exact value, within one step.
    assert (np.abs(out[3]) <= np.abs(1 / y)).all()
    assert (out[4] >= x + y).all() and (np.nextafter(out[4], np.float32(-9)) < x + y).all()
    assert (out[5] <= x * y + x).all()


def test_local_memory_constants_switches_and_structures(modules, rng):
    x = rng.standard_normal(12).astype(np.float32)
    scalars = [struct.pack("<ifh2x", 12, 0.5, 1)]
    got, _ = launch(modules["arithmetic"], "memories", [x], [np.zeros(64, np.float32)], scalars)
    stack = x * np.resize(np.float32([0.5, -1, 2, 4]), 12)
    cases = [lambda v: v + 1, lambda v: v * 2, lambda v: v - 3, lambda v: -v, lambda v: v * v,
             lambda v: 0 * v]  # fmt: skip
    want = [cases[(i + 1) % 6](stack[i * 7 % 12]) * 0.5 for i in range(64)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_device_functions_are_called(modules, rng):
    x = rng.standard_normal(64).astype(np.float32)
    y, _ = launch(modules["arithmetic"], "calls", [x], [np.zeros_like(x)])

    def polynomial(v, degree):
        total = np.zeros_like(v)
        for i in range(degree + 1):
            total = total * v + i
        return total

    want = polynomial(x, 2) + 2 * polynomial(-x, 3) + polynomial(x, 1)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_an_observer_sees_the_scores(modules, rng):
    q, k, v = (rng.standard_normal((3, 64, 64)) + 0.3).astype(np.float16)
    fragments = {}

    def see(seen):
        # The last product of each chain over d_head leaves the scores of eight keys.
        _, *_, c = seen.instruction.operands
        d = [seen.value(e, "f32") for e in seen.instruction.operands[0].elements]
        fragments[seen.instruction.line] = (c, matrix_of_c(d, "f32"))
        assert (seen.warps == np.repeat(np.arange(4), 32)).all()

    observer = Observer(lambda instruction: instruction.name == "mma", see)
    run_attention(modules["attention"], "__halfLb0", q, k, v, heads=1, observer=observer)
    # 32 products for the scores come first: chains of four over d_head, pairs of eight keys.
    scores = [fragments[line][1] for line in sorted(fragments)[:32]]
    last = [scores[8 * pair + 6 + half] for pair in range(4) for half in range(2)]
    got = np.concatenate(last, axis=2).reshape(64, 64)
    np.testing.assert_allclose(got, q.astype(np.float64) @ k.astype(np.float64).T, atol=1e-4)


def test_lanes_that_a_short_warp_lacks_are_not_waited_for(modules, rng):
    x = rng.standard_normal(1000).astype(np.float32)
    total, _ = launch(modules["parallel"], "block_max", [x], [np.zeros(1, np.float32)], [1000],
                      block=100)  # fmt: skip
    assert total[0] == x.max()


def test_counts_by_line_of_one_file_and_by_opcode_of_one_phase(modules, rng):
    q, k, v = rng.standard_normal((3, 128, 64)).astype(np.float16)
    _, run = run_attention(modules["attention"], "__halfLb0", q, k, v, heads=1)
    counters = run.counters
    lines = counters.lines_of("attention.cu")
    source = (KERNELS / "attention.cu").read_text().splitlines()
    # Shuffles come from a header; they count at the line of this file that calls them.
    shuffles = {source[n - 1].strip()[:4] for n in lines if "__shfl" in source[n - 1]}
    assert shuffles == {"m_ne", "l[h]"}
    outside = [c for c in counters.by_line() if c.file != "attention.cu"]
    assert sum(c.counts.instructions for c in outside) > 0
    assert sum(c.instructions for c in lines.values()) == counters.total.instructions
    main = counters.by_opcode(Phase.MAIN_LOOP)
    exps = sum(c.instructions for o, c in main.items() if o.startswith("ex2"))
    # Two rows of 64 scores and two rescalings a warp and round, in a quarter of the lanes each.
    assert exps == 2 * 4 * 2 * (32 + 2)
    assert (
        "div.rn.f32" not in main and counters.by_opcode(Phase.EPILOGUE)["div.rn.f32"].instructions
    )
