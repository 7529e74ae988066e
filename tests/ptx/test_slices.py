"""Blocks of a program that a slice of lanes runs again and again: they are bound to the slice."""

import numpy as np
import pytest
from ptx_snippets import entry, launch_on

from flash_helpers.ptx import UninitialisedReadError
from flash_helpers.ptx.run.execute.bound import BoundProgram

DECLARATIONS = """
.shared .align 4 .b32 words[64];
.reg .pred %p, %q, %r;
.reg .b32 %r<16>;
.reg .f32 %f<8>;
.reg .b64 %rd<4>;
"""
# Warps 0 and 1 add 2 in each of 10 rounds, the others 3 in each of 20; a round is one block.
LOOPS = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r3, %r1, %r2, %r0;
ld.param.u64 %rd0, [out];
mad.wide.u32 %rd0, %r3, 4, %rd0;
mov.u32 %r4, 0;
mov.u32 %r5, 0;
setp.lt.u32 %p, %r0, 64;
@!%p bra LONG;
SHORT:
add.u32 %r4, %r4, 2;
add.u32 %r5, %r5, 1;
{body}
setp.lt.u32 %q, %r5, 10;
@%q bra SHORT;
bra DONE;
LONG:
add.u32 %r4, %r4, 3;
add.u32 %r5, %r5, 1;
setp.lt.u32 %q, %r5, 20;
@%q bra LONG;
DONE:
st.global.u32 [%rd0], %r4;
"""


def launch(body="", grid=3, block=128, **options):
    text = entry(LOOPS.format(body=body), ".param .u64 out", DECLARATIONS)
    run, (out,) = launch_on(text, [np.zeros(grid * block, np.uint32)], grid, block, **options)
    return run, out.reshape(grid, block)


def test_each_role_has_its_own():
    run, out = launch()
    assert (out[:, :64] == 20).all() and (out[:, 64:] == 60).all()
    assert run.counters.by_opcode()["add.u32"].instructions == 3 * (2 * 2 * 10 + 2 * 2 * 20)


def test_they_are_bound_once_they_come_again(monkeypatch):
    bound, bind = [], BoundProgram._bound_to
    monkeypatch.setattr(
        BoundProgram, "_bound_to", lambda self, *key: bound.append(key) or bind(self, *key)
    )
    launch()
    lanes = 3 * 128
    assert sorted(key[1:] for key in bound) == [(0, lanes // 2), (lanes // 2, lanes)]


@pytest.mark.parametrize("round", [1, 2, 3, 4, 8])
def test_poison_that_comes_later_is_carried(round):
    load = f"setp.eq.u32 %r, %r5, {round};\n@%r ld.shared.u32 %r4, [words+8];\n"
    with pytest.raises(UninitialisedReadError, match="address 8, which"):
        launch(load)


@pytest.mark.parametrize(
    "instruction, expected",
    [
        ("mov.u32 %r4, %clock;", None),
        ("sub.u32 %r4, %r0, %r4;", lambda tid, before: tid - before),
        ("cvt.rn.f32.u32 %f0, %r4; fma.rn.f32 %f0, %f0, 0f40000000, %f0; cvt.rzi.u32.f32 %r4, %f0;",
         lambda tid, before: 3 * before),
        ("setp.gt.u32 %r, %r0, 40; @%r add.u32 %r4, %r4, 7;",
         lambda tid, before: before + 7 * (tid > 40)),
        ("shfl.sync.bfly.b32 %r4, %r4, 1, 31, -1;", lambda tid, before: before[tid ^ 1]),
        ("mad.lo.u32 %r4, %r4, %r0, 1;", lambda tid, before: before * tid + 1),
    ],
)  # fmt: skip
def test_instructions_do_the_same_there(instruction, expected):
    _, out = launch(instruction)
    if expected is None:
        assert (np.diff(out[:, :64], axis=1) == 0).all()
        return
    tid, value = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    for _ in range(10):
        value = expected(tid, value + np.uint32(2)).astype(np.uint32)
    assert (out[:, :64] == value).all()
