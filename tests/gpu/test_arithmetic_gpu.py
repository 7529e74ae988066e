"""Arithmetic beside the hardware's, with each modifier, on values at the edges of its type.

Results must be equal bit by bit, but for the bits of a NaN, which the simulator does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from warp_kernel import WarpKernel

from flash_helpers.gpu import WARP

pytestmark = pytest.mark.gpu

WARPS = 16
# Opcodes with the types of their destination and sources; a type alone stands for all of them.
TABLE = """
add.sat.s32 s32 s32 s32 | sub.sat.s32 s32 s32 s32 | mad.hi.sat.s32 s32 s32 s32 s32
mad24.hi.sat.s32 s32 s32 s32 s32 | mad24.lo.s32 s32 s32 s32 s32 | mul24.hi.u32 u32 u32 u32
min.relu.s32 s32 s32 s32 | max.relu.s16x2 u32 u32 u32 | add.u16x2 u32 u32 u32
min.s16x2 u32 u32 u32 | max.u16x2 u32 u32 u32 | mul.hi.s64 u64 u64 u64
mad.lo.u64 u64 u64 u64 u64 | dp4a.s32.u32 s32 s32 u32 s32 | dp2a.hi.s32.s32 s32 s32 s32 s32
sad.s32 s32 s32 s32 s32 | div.s32 s32 s32 s32 | rem.s32 s32 s32 s32 | div.u64 u64 u64 u64
rem.s64 u64 u64 u64 | shf.l.clamp.b32 u32 u32 u32 u32 | shf.r.wrap.b32 u32 u32 u32 u32
shl.b32 u32 u32 u32 | shr.s64 u64 u64 u32 | bfe.s32 s32 s32 u32 u32 | bfe.u64 u64 u64 byte byte
bfe.s64 u64 u64 byte byte | bfi.b64 u64 u64 u64 byte byte
bfi.b32 u32 u32 u32 u32 u32 | bmsk.clamp.b32 u32 u32 u32 | bmsk.wrap.b32 u32 u32 u32
szext.clamp.s32 s32 s32 u32 | szext.wrap.u32 u32 u32 u32 | fns.b32 u32 u32 lane small
bfind.shiftamt.s32 u32 s32 | prmt.b32.f4e u32 u32 u32 u32 | prmt.b32.ecr u32 u32 u32 u32
prmt.b32 u32 u32 u32 u32 | add.rn.f32 f32 f32 f32 | add.rz.ftz.f32 f32 f32 f32
sub.rm.f32 f32 f32 f32 | mul.rp.f32 f32 f32 f32 | add.sat.f32 f32 f32 f32
mul.ftz.sat.f32 f32 f32 f32 | fma.rn.ftz.sat.f32 f32 f32 f32 f32 | fma.rz.f32 f32 f32 f32 f32
fma.rp.ftz.f32 f32 f32 f32 f32 | div.rn.f32 f32 f32 f32 | div.rm.ftz.f32 f32 f32 f32
rcp.rz.f32 f32 f32 | rcp.rn.ftz.f32 f32 f32 | sqrt.rp.f32 f32 f32 | min.f32 f32 f32 f32
max.f32 f32 f32 f32 | min.ftz.f32 f32 f32 f32 | max.NaN.f32 f32 f32 f32
min.xorsign.abs.f32 f32 f32 f32 | max.ftz.NaN.xorsign.abs.f32 f32 f32 f32 | abs.ftz.f32 f32 f32
neg.ftz.f32 f32 f32 | neg.f32 f32 f32 | copysign.f32 f32 f32 f32 | add.rn.f64 f64 f64 f64
fma.rn.f64 f64 f64 f64 f64 | min.f64 f64 f64 f64 | max.f64 f64 f64 f64 | div.rn.f64 f64 f64 f64
sqrt.rn.f64 f64 f64 | add.sat.f16x2 f16x2 f16x2 f16x2 | mul.ftz.f16x2 f16x2 f16x2 f16x2
sub.ftz.sat.f16x2 f16x2 f16x2 f16x2 | fma.rn.sat.f16x2 f16x2 f16x2 f16x2 f16x2
fma.rn.ftz.relu.f16x2 f16x2 f16x2 f16x2 f16x2 | min.f16x2 f16x2 f16x2 f16x2
max.NaN.f16x2 f16x2 f16x2 f16x2 | max.xorsign.abs.f16x2 f16x2 f16x2 f16x2
abs.ftz.f16x2 f16x2 f16x2 | neg.ftz.f16x2 f16x2 f16x2 | add.bf16x2 bf16x2 bf16x2 bf16x2
mul.bf16x2 bf16x2 bf16x2 bf16x2 | fma.rn.relu.bf16x2 bf16x2 bf16x2 bf16x2 bf16x2
min.bf16x2 bf16x2 bf16x2 bf16x2 | max.NaN.xorsign.abs.bf16x2 bf16x2 bf16x2 bf16x2
set.lt.u32.f32 u32 f32 f32 | set.gtu.ftz.f32.f32 f32 f32 f32
set.ge.f16x2.f16x2 f16x2 f16x2 f16x2 | set.neu.bf16x2.bf16x2 bf16x2 bf16x2 bf16x2
set.nan.ftz.u32.f32 u32 f32 f32 | slct.ftz.u32.f32 u32 u32 u32 f32 | slct.b64.s32 u64 u64 u64 s32
cvt.sat.s32.u32 s32 u32 | cvt.rni.s32.f32 s32 f32 | cvt.rpi.ftz.s32.f32 s32 f32
cvt.rzi.u32.f32 u32 f32 | cvt.rmi.s64.f32 u64 f32 | cvt.rzi.u64.f64 u64 f64
cvt.rzi.s32.f64 s32 f64
cvt.rzi.u32.f64 u32 f64 | rem.u32 u32 u32 u32 | add.rm.f32 f32 f32 f32 | fma.rm.f32 f32 f32 f32 f32
cvt.rn.f32.s32 f32 s32 | cvt.rz.sat.f32.s32 f32 s32
cvt.rp.f32.u64 f32 u64 | cvt.rn.f64.u64 f64 u64 | cvt.rni.ftz.sat.f32.f32 f32 f32
cvt.rn.f32.f64 f32 f64 | cvt.rm.ftz.sat.f32.f64 f32 f64 | cvt.ftz.f64.f32 f64 f32
cvt.rna.tf32.f32 u32 finite | cvt.rn.relu.tf32.f32 u32 finite
cvt.rna.satfinite.tf32.f32 u32 finite | cvt.rn.f16x2.f32 f16x2 f32 f32
cvt.rz.relu.f16x2.f32 f16x2 f32 f32 | cvt.rn.relu.bf16x2.f32 bf16x2 f32 f32
cvt.rn.satfinite.f16x2.f32 f16x2 f32 f32 | cvt.rn.satfinite.bf16x2.f32 bf16x2 f32 f32
cvt.pack.sat.u8.s32.b32 u32 s32 s32 u32
"""
# Bodies that need more than one instruction; %a0, %b0, %c0 hold words.
BODIES = {
    "sub.cc addc": "sub.cc.u32 %t, %a0, %b0; addc.u32 %d0, %c0, 0;",
    "add.cc subc": "add.cc.u32 %t, %a0, %b0; subc.u32 %d0, %c0, 5;",
    "sub.cc subc": "sub.cc.u32 %t, %a0, %b0; subc.cc.u32 %t, %b0, %c0; subc.u32 %d0, %t, %a0;",
    "mad.cc madc": "mad.lo.cc.u32 %t, %a0, %b0, %c0; madc.hi.u32 %d0, %a0, %b0, %c0;",
    "mad.hi.cc addc": "mad.hi.cc.s32 %t, %a0, %b0, %c0; addc.u32 %d0, 0, 0;",
    "lop3.or": "setp.lt.u32 %p, %a0, %b0; lop3.or.b32 %d0|%p, %a0, %b0, %c0, 0x28, %p;"
    "@%p xor.b32 %d0, %d0, -1;",
    "lop3.and": "setp.lt.u32 %p, %a0, %b0; lop3.and.b32 %d0|%p, %a0, %b0, %c0, 0xC0, %p;"
    "@%p xor.b32 %d0, %d0, -1;",
    "negative base": ".shared .align 4 .b32 tile[32]; mov.u32 %t, tile; add.u32 %t, %t, -128;"
    "and.b32 %d0, %a0, 31; mad.lo.u32 %t, %d0, 4, %t; st.shared.b32 [%t+128], %d0;"
    "bar.warp.sync -1; ld.shared.b32 %d0, [%t+128];",
    "generic symbol": ".shared .align 4 .b32 tile[32]; setp.eq.u32 %p, %lane, 0;"
    "@%p st.b32 [tile+4], 5; bar.warp.sync -1; ld.b32 %d0, [tile+4];",
    "vector registers": "{ .reg .v2 .b32 v; mov.b32 v.x, %a0; mov.b32 v.y, %b0;"
    "sub.u32 %d0, v.r, v.y; }",
    "constants": "add.u32 %d0, %a0, (7/-2 + -7 % 3) ^ (WARP_SZ << 2);",
    "atom.add.f32 in global memory": ".global .align 16 .b32 word[2048]; mov.b64 %w, word;"
    "mad.wide.u32 %w, %thread, 4, %w;"
    "st.global.b32 [%w], 0x00400000; atom.global.add.f32 %t, [%w], 0f00400000;"
    "ld.global.b32 %d0, [%w];",
    "atom.add.f32 in shared memory": ".shared .align 4 .b32 tile[32]; mov.u32 %t, tile;"
    "mad.lo.u32 %t, %lane, 4, %t; st.shared.b32 [%t], 0x00400000;"
    "atom.shared.add.f32 %d0, [%t], 0f00400000;"
    "ld.shared.b32 %d0, [%t];",
    "red.v4.f32": ".global .align 16 .b32 word[2048]; mov.b64 %w, word;"
    "mad.wide.u32 %w, %thread, 16, %w;"
    "red.global.add.v4.f32 [%w], {0f3F800000, 0f40000000, 0f40400000, 0f00400000};"
    "ld.global.b32 %d0, [%w+8]; ld.global.b32 %t, [%w+12]; add.u32 %d0, %d0, %t;",
    "div.approx of large divisors": "or.b32 %t, %b0, 0x7F000000; and.b32 %t, %t, 0xFF7FFFFF;"
    "and.b32 %d0, %a0, 0xBFFFFFFF; div.approx.f32 %d0, %d0, %t;",
    "wide registers": ".global .align 16 .b32 word[2048]; mov.b64 %v, word;"
    "mad.wide.u32 %v, %thread, 4, %v; st.global.b32 [%v], %a0; mov.b64 %w, -1;"
    "ld.global.f32 %w, [%v]; mov.b64 {%t, %d0}, %w; add.u32 %d0, %d0, %t;",
}  # fmt: skip

FLOATS = {"f32": np.float32, "f64": np.float64, "f16x2": np.float16, "finite": np.float32}


def edges(type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Words of one register for each thread."""
    count, size = WARPS * WARP, 8 if type_name.endswith("64") else 4
    if type_name == "lane":
        return (np.arange(count) % WARP).astype(np.uint32)
    if type_name in ("small", "byte"):
        return rng.integers(0, 70 if type_name == "small" else 256, count, np.uint32)
    if type_name not in FLOATS and type_name != "bf16x2":
        few = [0, 1, 2, 3, 5, 31, 32, 33, 40, 127, 128, 255, 0x7FFF, 0x8000, 0x7FFFFF, -1, -2, -128]
        few += [(1 << (8 * size - 1)) - 1, -(1 << (8 * size - 1))]
        all_bits = rng.integers(-(1 << 63), (1 << 63) - 1, count)
        chosen = np.where(rng.random(count) < 0.6, rng.choice(few, count), all_bits)
        return chosen.astype(f"i{size}").view(f"u{size}")
    kind = FLOATS.get(type_name, np.float32)
    tiny, most = np.finfo(kind).tiny, np.finfo(kind).max
    few = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, 0.3, 7.0, tiny / 2, -tiny / 4, tiny, most, -most]
    few += [1e9, -1e9, 1 + 2.0**-11, 1 + 2.0**-8, 1e-40, 3e-39, 1e-5, 65519.0, 65520.0, 2.0**31]
    few += [] if type_name == "finite" else [np.inf, -np.inf, np.nan]
    lanes = count * (2 if type_name.endswith("x2") else 1)
    with np.errstate(over="ignore"):
        chosen = np.where(rng.random(lanes) < 0.6, rng.choice(few, lanes), rng.normal(size=lanes))
        chosen = chosen.astype(kind)
    if type_name == "bf16x2":
        chosen = (chosen.view(np.uint32) >> 16).astype(np.uint16)
    return chosen.view(f"u{size}")


def cases() -> Iterator[tuple[str, WarpKernel]]:
    """The type of the result, and a kernel."""
    for text in filter(None, (t.strip() for line in TABLE.splitlines() for t in line.split("|"))):
        opcode, result, *sources = text.split()
        rng = np.random.default_rng([*opcode.encode()])
        inputs = {"abce"[i]: edges(t, rng)[None] for i, t in enumerate(sources)}
        operands = ", ".join(f"%{name}0" for name in inputs)
        size = 64 if result.endswith("64") else 32
        yield result, WarpKernel(opcode, f"{opcode} %d0, {operands};", inputs, (1, size))
    for name, body in BODIES.items():
        rng = np.random.default_rng([*name.encode()])
        inputs = {x: edges("u32", rng)[None] for x in "abc"}
        declared = ".reg .b32 %t; .reg .b64 %w, %v; .reg .pred %p;"
        yield "u32", WarpKernel(name, declared + body, inputs, (1, 32))


CASES = [*cases()]


def numbers_of(words: np.ndarray, type_name: str) -> np.ndarray:
    """Bits of numbers, the same for every NaN."""
    if type_name == "bf16x2":
        parts = words.view(np.uint16)
        return np.where(parts & 0x7FFF > 0x7F80, 0x7FFF, parts)
    kind = FLOATS.get(type_name)
    if kind is None:
        return words
    values = words.view(kind)
    bits = values.view(f"u{values.itemsize}")
    return np.where(np.isnan(values), bits.dtype.type(~bits.dtype.type(0)), bits)


def test_every_case_runs_in_the_simulator() -> None:
    """It needs no GPU, but stands beside the cases."""
    for _, case in CASES:
        case.simulated()


@pytest.mark.parametrize(("type_name", "case"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_results_are_equal_bit_by_bit(type_name: str, case: WarpKernel) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("these kernels need compute capability 9.0")
    ours, theirs = (numbers_of(x, type_name) for x in (case.simulated(), case.on_gpu()))
    differ = np.flatnonzero(ours != theirs)
    at = differ[0] if differ.size else 0
    thread = at * case.threads // ours.size
    given = {name: hex(x[0, thread]) for name, x in case.inputs.items()}
    told = f"{differ.size} of {ours.size}: {ours.flat[at]:#x}, on the GPU {theirs.flat[at]:#x}"
    assert not differ.size, f"{told}, of {given}"
