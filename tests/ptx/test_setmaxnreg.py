"""setmaxnreg: registers that go from one warpgroup to another."""

from __future__ import annotations

import pytest
from ptx_snippets import HEAD

from flash_helpers.ptx import (
    DeadlockError,
    MissingLanesError,
    RegisterCountError,
    UnsupportedInstruction,
    WarpgroupError,
    load_ptx,
)
from flash_helpers.ptx.run.asynchronous.register_pool import entry_registers

# Warpgroup 0 goes one way, the others another.
ROLES = """
mov.u32 %r0, %tid.x;
setp.ge.u32 %p, %r0, 128;
@%p bra OTHERS;
{}
bra END;
OTHERS:
{}
END:
"""


def give(count):
    return f"setmaxnreg.dec.sync.aligned.u32 {count};"


def take(count):
    return f"setmaxnreg.inc.sync.aligned.u32 {count};"


def kernel(body, directives=".maxntid 384, 1, 1\n.minnctapersm 1"):
    head = HEAD.replace("sm_80", "sm_90a")
    declarations = ".reg .pred %p, %q; .reg .b32 %r<8>;"
    text = f"{head}.visible .entry k()\n{directives}\n{{\n{declarations}\n{body}\nret;\n}}\n"
    return load_ptx(text).kernel("k")


def run(body, threads=384, grid=1, directives=".maxntid 384, 1, 1\n.minnctapersm 1", **options):
    return kernel(body, directives).launch(grid, threads, **options)


class TestRegistersAtEntry:
    """As `nvcc -Xptxas -v` of CUDA 13.0 tells them for kernels with these setmaxnreg."""

    @pytest.mark.parametrize(
        "threads, blocks, found",
        [
            (128, 1, 240),
            (160, 1, 240),
            (288, 1, 168),  # as three warpgroups
            (384, 1, 168),
            (512, 1, 128),
            (640, 1, 96),
            (768, 1, 80),
            (896, 1, 72),
            (1024, 1, 64),
            (128, 3, 168),
            (256, 2, 128),
            (384, 2, 80),
        ],
    )
    def test_by_launch_bounds(self, threads, blocks, found):
        directives = f".maxntid {threads}, 1, 1\n.minnctapersm {blocks}"
        body = ROLES.format(give(24), take(240))
        assert entry_registers(kernel(body, directives).function) == found

    def test_no_more_than_the_largest_that_is_named(self):
        for named, found in ((64, 64), (104, 104), (256, 256)):
            body = ROLES.format(give(24), take(named))
            directives = ".maxntid 128, 1, 1\n.minnctapersm 1"
            assert entry_registers(kernel(body, directives).function) == found

    def test_maxnreg(self):
        body = ROLES.format(give(24), take(240))
        assert entry_registers(kernel(body, ".maxnreg 100").function) == 104

    @pytest.mark.parametrize("directives", ["", ".maxntid 384, 1, 1"])
    def test_without_them_it_has_no_effect(self, directives):
        body = ROLES.format(give(24), take(240))
        assert entry_registers(kernel(body, directives).function) is None
        run(ROLES.format(take(240), take(256)), directives=directives)


class TestPool:
    def test_what_one_warpgroup_gives_the_others_take(self):
        # 168 - 24 = 144 of each warp, 72 for each of two warps of the others: 240.
        counters = run(ROLES.format(give(24), take(240)), grid=3).counters.by_opcode()
        assert counters["setmaxnreg.inc.sync.aligned.u32"].instructions == 3 * 8
        assert counters["setmaxnreg.dec.sync.aligned.u32"].instructions == 3 * 4

    def test_more_than_there_will_ever_be(self):
        with pytest.raises(DeadlockError) as caught:
            run(ROLES.format(give(32), take(240)))
        text = str(caught.value)
        assert "for 72 more registers for each thread of a warp" in text
        assert "[setmaxnreg.inc" in text and "352 threads have ended" in text

    def test_nobody_gives(self):
        with pytest.raises(DeadlockError, match="the block has 0 to spare"):
            run(ROLES.format("", take(176)))

    def test_who_waits_for_a_barrier_before_he_gives(self):
        late = ROLES.format(f"bar.sync 0;\n{give(24)}", f"{take(240)}\nbar.sync 0;")
        with pytest.raises(DeadlockError, match=r"128 of 384 threads wait, 0 have ended"):
            run(late)
        run(ROLES.format(f"{give(24)}\nbar.sync 0;", f"{take(240)}\nbar.sync 0;"))

    def test_registers_that_the_launch_names(self):
        body = ROLES.format(give(24), take(240))
        run(body, directives="", registers=168)
        with pytest.raises(DeadlockError):
            run(body, directives="", registers=160)

    def test_as_many_as_it_has(self):
        run(ROLES.format(give(168), take(168)))


class TestMistakes:
    def test_a_dec_that_raises(self):
        with pytest.raises(RegisterCountError, match="it lowers to 176 what is 168, fewer"):
            run(ROLES.format(give(176), ""))

    def test_an_inc_that_lowers(self):
        with pytest.raises(RegisterCountError, match="it raises to 160 what is 168, more"):
            run(ROLES.format(give(168), take(160)))

    def test_twice_without_a_barrier(self):
        with pytest.raises(RegisterCountError, match="no barrier stands between this and"):
            run(ROLES.format(give(64) + give(24), take(216)))
        run(ROLES.format(f"{give(64)}\nbar.sync 1, 128;\n{give(24)}", take(216)))

    def test_a_warp_that_comes_a_second_time_before_another_has_come_once(self):
        body = "setp.lt.u32 %q, %r0, 32;\nAGAIN:\n" + give(24) + "\n@!%q bra END;\n"
        body += "setp.eq.u32 %p, %r1, 0;\nmov.u32 %r1, 1;\n@%p bra AGAIN;\n"
        with pytest.raises(RegisterCountError, match="no barrier stands between"):
            run("mov.u32 %r1, 0;\n" + ROLES.format(body, ""))

    @pytest.mark.parametrize("count", [16, 20, 25, 264, "%r0"])
    def test_a_number_that_it_may_not_name(self, count):
        with pytest.raises(UnsupportedInstruction, match="a literal from 24 to 256"):
            run(give(count), directives="")

    def test_not_by_all_warps_of_a_warpgroup(self):
        some = "setp.lt.u32 %q, %r0, 64;\n@%q bra END;\n" + give(24)
        with pytest.raises(WarpgroupError, match="warp 0 ends without having executed this"):
            run(ROLES.format(some, ""))

    def test_by_a_block_whose_warps_are_no_warpgroup(self):
        directives = ".maxntid 96, 1, 1\n.minnctapersm 1"
        with pytest.raises(WarpgroupError, match="its block has 3 warps"):
            run(give(24), threads=96, directives=directives)

    def test_not_by_all_threads_of_a_warp(self):
        some = "and.b32 %r1, %r0, 1;\nsetp.eq.u32 %q, %r1, 0;\n@%q " + give(24)
        with pytest.raises(MissingLanesError):
            run(ROLES.format(some, ""))

    def test_by_threads_of_a_warp_that_parted(self):
        some = "and.b32 %r1, %r0, 1;\nsetp.eq.u32 %q, %r1, 0;\n@%q bra END;\n" + give(24)
        with pytest.raises(MissingLanesError):
            run(ROLES.format(some, ""))
