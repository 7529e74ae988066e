"""Blocks that wait for later ones run together with them, as many as a GPU holds at once."""

import numpy as np
import pytest
from ptx_snippets import entry, launch_on

from flash_helpers.ptx import InstructionLimitError, NotResidentError
from flash_helpers.ptx.run import batches, kernel
from flash_helpers.ptx.run.batches import most_resident

DECLARATIONS = """
.reg .pred %p, %q;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
"""
START = """
ld.param.u64 %rd0, [flags];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %nctaid.x;
mul.wide.u32 %rd1, %r1, 4;
add.s64 %rd2, %rd0, %rd1;
setp.ne.u32 %p, %r0, 0;
mov.u32 %r4, 0;
"""
# Each block but the last waits for the one after it.
BACKWARDS = """
@%p bra DONE;
add.u32 %r3, %r1, 1;
setp.eq.u32 %q, %r3, %r2;
@%q bra SET;
WAIT:
{}
ld.acquire.gpu.global.u32 %r4, [%rd2+4];
setp.eq.u32 %q, %r4, 0;
@%q bra WAIT;
SET:
add.u32 %r4, %r4, 1;
st.release.gpu.global.u32 [%rd2], %r4;
DONE:
"""
# All blocks count themselves and wait for each other.
GRID_BARRIER = """
@%p bra MEET;
fence.acq_rel.gpu;
atom.global.add.u32 %r3, [%rd0], 1;
WAIT:
ld.volatile.global.u32 %r4, [%rd0];
setp.ne.u32 %q, %r4, %r2;
@%q bra WAIT;
MEET:
bar.sync 0;
"""


def launch(body, grid, block=256, **options):
    text = entry(START + body, ".param .u64 flags", DECLARATIONS)
    run, (flags,) = launch_on(text, [np.zeros(grid, np.uint32)], grid, block, **options)
    return flags, run


def test_blocks_that_wait_for_the_next_one():
    seen = []
    found, run = launch(BACKWARDS.format(""), 20, progress=lambda *done: seen.append(done))
    assert found.tolist() == list(range(20, 0, -1))
    assert run.n_blocks == 20
    assert seen[-1] == (20, 20) and seen == sorted(seen)


def test_blocks_that_all_wait_for_each_other():
    assert launch(GRID_BARRIER, 20)[0][0] == 20


def test_threads_that_all_wait_for_each_other():
    body = GRID_BARRIER.replace("@%p bra MEET;", "mov.u32 %r5, %ntid.x;\nmul.lo.u32 %r2, %r2, %r5;")
    assert launch(body, 20)[0][0] == 20 * 256


def test_blocks_that_count_how_often_they_asked():
    """They do not come back to where they were; it is seen late that they wait."""
    found, _ = launch(BACKWARDS.format("add.u32 %r5, %r5, 1;"), 20, max_instructions=40_000)
    assert found.tolist() == list(range(20, 0, -1))


def test_blocks_that_wait_for_earlier_ones(monkeypatch):
    """As a scan with decoupled look-back does; one batch runs after the other."""
    monkeypatch.setattr(kernel, "most_resident", lambda *_: 0)
    body = BACKWARDS.replace("setp.eq.u32 %q, %r3, %r2;", "setp.eq.u32 %q, %r1, 0;")
    found, _ = launch(body.replace("[%rd2+4]", "[%rd2+-4]").format(""), 20)
    assert found.tolist() == list(range(1, 21))


def test_as_many_blocks_are_resident_as_the_target_holds():
    assert most_resident("sm_80", 256, 0) == 108 * 8
    assert most_resident("sm_86", 1024, 0) == 84 * 1
    assert most_resident("sm_90a", 32, 0) == 132 * 32
    assert most_resident("sm_80", 128, 64 * 1024) == 108 * 2


def test_a_block_that_is_not_resident_is_told(monkeypatch):
    monkeypatch.setitem(batches.gpu.__dict__, "MOST_SMS", {80: 2})
    found, _ = launch(BACKWARDS.format(""), 16)
    assert found[0] == 16
    with pytest.raises(NotResidentError) as caught:
        launch(BACKWARDS.format(""), 20)
    message = str(caught.value)
    assert "block (0, 0, 0) waits for global memory that no resident block will change" in message
    assert (
        "16 blocks are resident and all wait, as many as the largest GPU of sm_80 holds" in message
    )
    assert "block (16, 0, 0) and later ones begin when one of them has ended" in message
    assert caught.value.thread.block == (0, 0, 0)
    assert caught.value.site.opcode == "ld.acquire.gpu.global.u32"


def test_a_place_that_is_free_is_taken(monkeypatch):
    """Block 0 waits for the last one, the others end at once."""
    monkeypatch.setitem(batches.gpu.__dict__, "MOST_SMS", {80: 2})
    body = """
    setp.ne.u32 %q, %r1, 0;
    @%q bra OTHERS;
    WAIT:
    ld.acquire.gpu.global.u32 %r4, [%rd0+156];
    setp.eq.u32 %q, %r4, 0;
    @%q bra WAIT;
    OTHERS:
    st.release.gpu.global.u32 [%rd2], 1;
    """
    found, _ = launch(body, 40)
    assert found.all()


def test_blocks_that_run_long_are_not_taken_for_waiting():
    """The loop reads memory, and changes nothing but a register. Of the blocks that come after the
    first batch none has begun when that one ends."""
    body = """
    mov.u32 %r3, 0;
    @!%p red.global.add.u32 [%rd0], 1;
    LOOP:
    ld.volatile.global.u32 %r4, [%rd0];
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %q, %r3, 4000;
    @%q bra LOOP;
    setp.eq.u32 %q, %r1, 0;
    @!%q st.global.u32 [%rd2], %r4;
    """
    found, _ = launch(body, 4, block=1024)
    assert found.tolist() == [4, 2, 4, 4]


def test_an_endless_loop_is_not_taken_for_waiting():
    with pytest.raises(
        InstructionLimitError, match=r"more than 50000 instructions.* may never end"
    ):
        launch("LOOP:\nbra.uni LOOP;", 20, max_instructions=50_000)
