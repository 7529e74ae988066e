"""setmaxnreg: registers that go from one warpgroup to another."""

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


GIVE_AND_TAKE = ROLES.format(give(24), take(240))


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
        assert entry_registers(kernel(GIVE_AND_TAKE, directives).function) == found

    def test_no_more_than_the_largest_that_is_named(self):
        for named, found in ((64, 64), (104, 104), (256, 256)):
            body = ROLES.format(give(24), take(named))
            directives = ".maxntid 128, 1, 1\n.minnctapersm 1"
            assert entry_registers(kernel(body, directives).function) == found

    def test_maxnreg(self):
        assert entry_registers(kernel(GIVE_AND_TAKE, ".maxnreg 100").function) == 104

    @pytest.mark.parametrize("directives", ["", ".maxntid 384, 1, 1"])
    def test_without_them_it_has_no_effect(self, directives):
        assert entry_registers(kernel(GIVE_AND_TAKE, directives).function) is None
        run(ROLES.format(take(240), take(256)), directives=directives)


class TestPool:
    def test_what_one_warpgroup_gives_the_others_take(self):
        # 168 - 24 = 144 of each warp, 72 for each of two warps of the others: 240.
        counters = run(GIVE_AND_TAKE, grid=3).counters.by_opcode()
        assert counters["setmaxnreg.inc.sync.aligned.u32"].instructions == 3 * 8
        assert counters["setmaxnreg.dec.sync.aligned.u32"].instructions == 3 * 4

    def test_more_than_there_will_ever_be(self):
        with pytest.raises(DeadlockError) as caught:
            run(ROLES.format(give(32), take(240)))
        text = str(caught.value)
        assert "for 72 more registers for each thread of a warp" in text
        assert "[setmaxnreg.inc" in text and "352 threads have ended" in text

    def test_who_waits_for_a_barrier_before_he_gives(self):
        late = ROLES.format(f"bar.sync 0;\n{give(24)}", f"{take(240)}\nbar.sync 0;")
        with pytest.raises(DeadlockError, match=r"128 of 384 threads wait, 0 have ended"):
            run(late)
        run(ROLES.format(f"{give(24)}\nbar.sync 0;", f"{take(240)}\nbar.sync 0;"))

    def test_registers_that_the_launch_names(self):
        run(GIVE_AND_TAKE, directives="", registers=168)
        with pytest.raises(DeadlockError):
            run(GIVE_AND_TAKE, directives="", registers=160)


EVEN = "and.b32 %r1, %r0, 1;\nsetp.eq.u32 %q, %r1, 0;\n"
# The first warp comes a second time before another has come once.
FIRST_WARP_TWICE = f"""
mov.u32 %r1, 0;
setp.lt.u32 %q, %r0, 32;
AGAIN:
{give(24)}
@!%q bra END;
setp.eq.u32 %p, %r1, 0;
mov.u32 %r1, 1;
@%p bra AGAIN;
"""
# What warpgroup 0 does, what the others do.
MISTAKES = {
    "nobody gives": ("", take(176), DeadlockError, "the block has 0 to spare"),
    "a dec that raises": (give(176), "", RegisterCountError, "it lowers to 176 what is 168, fewer"),
    "an inc that lowers":
        (give(168), take(160), RegisterCountError, "it raises to 160 what is 168, more"),
    "twice without a barrier": (give(64) + give(24), take(216), RegisterCountError,
                                "no barrier stands between this and"),
    "twice by one warp": (FIRST_WARP_TWICE, "", RegisterCountError, "no barrier stands between"),
    "not by all warps": ("setp.lt.u32 %q, %r0, 64;\n@%q bra END;\n" + give(24), "",
                         WarpgroupError, "warp 0 ends without having executed this"),
    "not by all threads of a warp": (f"{EVEN}@%q {give(24)}", "", MissingLanesError, None),
    "by threads that parted": (f"{EVEN}@%q bra END;\n{give(24)}", "", MissingLanesError, None),
}  # fmt: skip


class TestMistakes:
    @pytest.mark.parametrize(("first", "others", "error", "words"), MISTAKES.values(), ids=MISTAKES)
    def test_are_told(self, first, others, error, words):
        with pytest.raises(error, match=words):
            run(ROLES.format(first, others))

    def test_are_none_with_a_barrier_between_or_with_as_many_as_it_has(self):
        run(ROLES.format(f"{give(64)}\nbar.sync 1, 128;\n{give(24)}", take(216)))
        run(ROLES.format(give(168), take(168)))

    @pytest.mark.parametrize("count", [16, 20, 25, 264, "%r0"])
    def test_a_number_that_it_may_not_name(self, count):
        with pytest.raises(UnsupportedInstruction, match="a literal from 24 to 256"):
            run(give(count), directives="")

    def test_by_a_block_whose_warps_are_no_warpgroup(self):
        with pytest.raises(WarpgroupError, match="its block has 3 warps"):
            run(give(24), threads=96, directives=".maxntid 96, 1, 1\n.minnctapersm 1")
