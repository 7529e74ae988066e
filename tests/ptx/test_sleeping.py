"""Threads that sleep at an instruction until something has happened: here, at a `pmevent`, until
the first word of their block's shared memory is not zero."""

from dataclasses import replace

import numpy as np
import pytest
from ptx_snippets import entry, launch_on

from flash_helpers.ptx import DeadlockError
from flash_helpers.ptx.run.instructions import operations
from flash_helpers.ptx.run.machine import Wait

DECLARATIONS = """
.shared .align 4 .b32 word[8];
.reg .pred %p, %q;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
"""
# Each thread writes 1 to its place of `out` at the end.
START = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r3, %r1, %r2, %r0;
ld.param.u64 %rd0, [out];
mad.wide.u32 %rd0, %r3, 4, %rd0;
mov.u32 %r4, 1;
"""
END = "st.global.u32 [%rd0], %r4;"


@pytest.fixture(autouse=True)
def _waiting_instruction(monkeypatch):
    (form,) = operations.FORMS["pmevent"][()]

    def build(machine, instruction):
        shared = machine.shared

        def is_ready(lanes):
            return shared.data.view(np.uint32)[shared.base[lanes] // 4] != 0

        machine.waits[machine.position] = Wait(is_ready, lambda lanes: "for a word of 1")
        return form.build(machine, instruction)

    monkeypatch.setitem(operations.FORMS, "pmevent", {(): [replace(form, build=build)]})


def launch(body, grid=1, block=64, **options):
    text = entry(START + body + END, ".param .u64 out", DECLARATIONS)
    run, (out,) = launch_on(text, [np.zeros(grid * block, np.uint32)], grid, block, **options)
    return run, out


# The threads from %r5 on write the word; the others wait for it.
ROLES = """
setp.ge.u32 %p, %r0, {first};
@%p bra WRITE;
pmevent 1;
bra DONE;
WRITE:
st.shared.u32 [word], %r4;
DONE:
"""


class TestWaking:
    @pytest.mark.parametrize("first", [1, 31, 32, 63])
    @pytest.mark.parametrize("grid", [1, 3])
    def test_sleepers_go_on_when_it_has_happened(self, first, grid):
        run, out = launch(ROLES.format(first=first), grid)
        assert out.all()
        assert run.counters.by_opcode()["pmevent"].instructions == grid * (1 + (first > 32))

    def test_while_others_spin_for_them(self):
        # Warp 1 writes the word, warp 0 sleeps for it and writes another one, warp 1 spins on that.
        body = """
        st.relaxed.cta.shared.u32 [word+4], 0;
        bar.sync 0;
        setp.ge.u32 %p, %r0, 32;
        @%p bra WRITE;
        pmevent 1;
        st.relaxed.cta.shared.u32 [word+4], %r4;
        bra DONE;
        WRITE:
        st.shared.u32 [word], %r4;
        SPIN:
        ld.relaxed.cta.shared.u32 %r5, [word+4];
        setp.eq.u32 %q, %r5, 0;
        @%q bra SPIN;
        DONE:
        """
        assert launch(body, max_instructions=10_000)[1].all()

    def test_threads_whose_predicate_is_false_do_not_sleep(self):
        body = "setp.lt.u32 %p, %r0, 40;\n@!%p pmevent 1;\n@!%p bra DONE;\n"
        body += "st.shared.u32 [word], %r4;\nDONE:\n"
        assert launch(body)[1].all()

    def test_lanes_that_come_late_meet_those_of_their_warp_that_wait(self):
        # Lanes 16 to 31 stand at the shuffle, within its block, before the others wake.
        body = """
        setp.lt.u32 %p, %r0, 16;
        setp.ge.u32 %q, %r0, 32;
        @%q bra WRITE;
        @!%p bra MEET;
        pmevent 1;
        MEET:
        add.u32 %r5, %r0, 7;
        shfl.sync.idx.b32 %r4, %r5, 3, 31, 0xffffffff;
        bra DONE;
        WRITE:
        st.shared.u32 [word], %r4;
        DONE:
        """
        assert launch(body)[1].tolist() == [10] * 32 + [1] * 32

    def test_lanes_of_one_mask_do_not_wait_for_those_of_another(self):
        # 16 to 23 wait for 24 to 31, which sleep until 0 to 15 have met and written.
        body = """
        setp.lt.u32 %p, %r0, 16;
        selp.b32 %r6, 0xffff, 0xffff0000, %p;
        setp.ge.u32 %q, %r0, 24;
        @!%q bra MEET;
        pmevent 1;
        MEET:
        add.u32 %r5, %r0, 7;
        shfl.sync.idx.b32 %r4, %r5, 3, 0x100f, %r6;
        @%p st.shared.u32 [word], %r4;
        """
        assert launch(body, block=32)[1].tolist() == [10] * 16 + [26] * 16

    def test_all_threads_together(self):
        body = "st.shared.u32 [word], %r4;\nbar.sync 0;\npmevent 1;\n"
        assert launch(body, grid=2)[1].all()


class TestDeadlock:
    def test_names_who_waits_for_what(self):
        body = """
        setp.lt.u32 %p, %r0, 96;
        @%p bra SLEEP;
        bar.sync 0;
        SLEEP:
        setp.ge.u32 %q, %r0, 64;
        @%q bra DONE;
        pmevent 1;
        DONE:
        """
        with pytest.raises(DeadlockError) as caught:
            launch(body, block=128)
        text = str(caught.value)
        assert "64 threads (warps 0, 1 of block (0, 0, 0)) wait\n      for a word of 1" in text
        assert "32 threads (warp 3 of block (0, 0, 0)) wait\n      for barrier 0: 32 of 128" in text
        assert "32 threads have ended" in text
        assert caught.value.site.opcode == "pmevent"

    def test_names_each_barrier_and_who_waits_there(self):
        # The name is a register's: all wait at one instruction. Warp 3 only arrives.
        body = """
        shr.u32 %r5, %r0, 5;
        add.u32 %r5, %r5, 4;
        setp.eq.u32 %p, %r5, 7;
        @%p bar.arrive 5, 128;
        @%p bar.arrive 9, 64;
        setp.eq.u32 %q, %r0, 0;
        @%q pmevent 1;
        @!%p bar.sync %r5, 128;
        """
        with pytest.raises(DeadlockError) as caught:
            launch(body, block=128)
        text = " ".join(str(caught.value).split())
        for told in (
            "31 threads (warp 0 of block (0, 0, 0)) wait for barrier 4: 31 of 128 threads wait, "
            "32 have ended",
            "32 threads (warp 1 of block (0, 0, 0)) wait for barrier 5: 32 of 128 threads wait, "
            "32 have arrived, 32 have ended",
            "32 threads (warp 2 of block (0, 0, 0)) wait for barrier 6: 32 of 128 threads wait, "
            "32 have ended",
            "no thread waits at a barrier of block (0, 0, 0) barrier 9: 0 of 64 threads wait, "
            "32 have arrived, 32 have ended",
        ):
            assert told in text

    def test_ends_the_block_where_faults_are_collected(self):
        # Block 1 has the word, blocks 0 and 2 sleep for ever.
        body = """
        setp.eq.u32 %p, %r1, 1;
        @%p st.shared.u32 [word], %r4;
        pmevent 1;
        """
        run, out = launch(body, grid=3, block=32, keep_going=True)
        (fault,) = run.faults
        assert isinstance(fault, DeadlockError) and fault.count == 2
        assert out.reshape(3, 32).any(axis=1).tolist() == [False, True, False]
