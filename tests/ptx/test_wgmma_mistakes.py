"""Mistakes with wgmma: registers touched too early, fences left out, warps that do not come."""

import pytest
from wgmma_snippets import COMMIT, DONE, FENCE, WAIT, Snippet, descriptor, mma

from flash_helpers.ptx import (
    MissingLanesError,
    UnfinishedError,
    UnsupportedInstruction,
    WarpgroupError,
    WgmmaFenceError,
    WgmmaRegisterError,
)

ARGUMENTS = {"A": descriptor(0), "B": descriptor(2048)}
A_REGISTERS = "{%a0, %a1, %a2, %a3}"
FROM_REGISTERS = mma(A_REGISTERS, "%B", rest="1, 1, 0")
COMPUTED = "add.f32 %d0, %d1, %d1;"
WAIT_0 = "wgmma.wait_group.sync.aligned 0;"
WAIT_1 = "wgmma.wait_group.sync.aligned 1;"


def zeros(letter="d", count=4):
    kind, value = ("f32", "0f00000000") if letter in "de" else ("b32", "0")
    return "\n".join(f"mov.{kind} %{letter}{i}, {value};" for i in range(count)) + "\n"


def run(*parts, threads=128, **options):
    return Snippet("\n".join(parts), arguments=ARGUMENTS).run(threads, **options).run


def fault(kind, *parts, threads=128, **options):
    """The text of what goes wrong, of which there is one."""
    with pytest.raises(kind) as caught:
        run(*parts, threads=threads, **options)
    kept = run(*parts, threads=threads, keep_going=True, **options)
    assert [type(fault) for fault in kept.faults] == [kind]
    return str(caught.value)


class TestRegistersInFlight:
    MULTIPLY = zeros() + FENCE + mma("%A", "%B") + COMMIT

    def test_an_accumulator_that_is_read(self):
        text = fault(WgmmaRegisterError, self.MULTIPLY, "add.f32 %e0, %d2, %d2;", WAIT)
        assert "it uses register %d2, an accumulator of the wgmma at" in text
        assert "before it has waited for that" in text and "[add.f32" in text
        run(self.MULTIPLY, WAIT, "add.f32 %e0, %d2, %d2;")

    def test_an_accumulator_that_is_written(self):
        assert "%d3" in fault(WgmmaRegisterError, self.MULTIPLY, "mov.f32 %d3, 0f3F800000;", WAIT)

    def test_that_of_the_newest_group_in_a_pipeline(self):
        # Two accumulators in turn; the newest is read instead of the one before.
        steps = zeros() + zeros("e") + FENCE + mma("%A", "%B") + COMMIT
        steps += mma("%A", "%B", d="e") + COMMIT + WAIT_1
        assert "%e0" in fault(WgmmaRegisterError, steps, "mov.f32 %d50, %e0;", WAIT)
        text = fault(WgmmaRegisterError, steps, "mov.f32 %d50, %e0;", WAIT)
        assert "leaves the newest group pending, and it is in one" in text
        run(steps, "mov.f32 %d50, %d0;", WAIT)

    def test_before_it_is_committed(self):
        body = (zeros(), FENCE, mma("%A", "%B"))
        text = fault(WgmmaRegisterError, *body, WAIT_0, "mov.f32 %e0, %d0;", DONE)
        assert "no wgmma.commit_group stands between it and the wait at" in text

    def test_one_warp_of_another_role_may(self):
        body = "setp.lt.u32 %p, %thread, 128;\n@!%p bra OTHER;\n" + self.MULTIPLY
        run(zeros(), body, WAIT, "bra DONE;\nOTHER:\nadd.f32 %d0, %d0, %d0;\nDONE:", threads=160)

    def test_a_predicate_that_does_not_hold(self):
        guarded = "setp.eq.u32 %p, %thread, {};\n@%p mov.f32 %d0, 0f00000000;"
        run(self.MULTIPLY, guarded.format(200), WAIT)
        text = fault(WgmmaRegisterError, self.MULTIPLY, guarded.format(70), WAIT)
        assert "warp 2" in text

    def test_the_first_of_several_is_told(self):
        both = "mov.f32 %e1, %d1;\nmov.f32 %e2, %d2;"
        assert "%d1" in fault(WgmmaRegisterError, self.MULTIPLY, both, WAIT)

    def test_a_in_registers_that_is_written(self):
        body = (zeros(), zeros("a"), FENCE, FROM_REGISTERS, COMMIT)
        text = fault(WgmmaRegisterError, *body, "mov.b32 %a1, 7;", WAIT)
        assert "register %a1, the A of the wgmma at" in text
        run(*body, WAIT, "mov.b32 %a1, 7;")

    def test_a_of_the_next_round_that_is_loaded_too_early(self):
        load = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {A_REGISTERS}, [%r5];"
        body = zeros() + "shl.b32 %r5, %thread, 4;\nmov.u32 %r6, 0;\nNEXT:\n" + load + FENCE
        body += FROM_REGISTERS + COMMIT + "{}add.u32 %r6, %r6, 1;\nsetp.lt.u32 %p, %r6, 3;\n"
        body += "@%p bra NEXT;\n" + WAIT
        assert "[ldmatrix" in fault(WgmmaRegisterError, body.replace("{}", WAIT_1))
        run(body.replace("{}", WAIT))

    def test_an_accumulator_as_a_of_another(self):
        accumulate = mma("%A", "%B", 16, d="h", d_type="f16")
        use = mma("{%h0, %h1, %h2, %h3}", "%B", rest="1, 1, 0")
        body = (zeros("h"), zeros(), FENCE, accumulate)
        text = fault(WgmmaRegisterError, *body, use, DONE)
        assert "register %h0, an accumulator of the wgmma" in text and "m64n8k16" in text
        fault(WgmmaRegisterError, *body, COMMIT, FENCE, use, DONE)
        run(*body, DONE, FENCE, use, DONE)

    def test_a_of_one_as_the_accumulator_of_another(self):
        use = mma("{%h0, %h1, %h2, %h3}", "%B", rest="1, 1, 0")
        accumulate = mma("%A", "%B", 16, d="h", d_type="f16")
        body = (zeros("h"), zeros(), FENCE, use, COMMIT)
        assert "the A of the wgmma" in fault(WgmmaRegisterError, *body, accumulate, DONE)
        run(*body, WAIT, FENCE, accumulate, DONE)

    def test_two_may_read_one_a(self):
        other = FROM_REGISTERS.replace("%d", "%e")
        run(zeros(), zeros("e"), zeros("a"), FENCE, FROM_REGISTERS, other, DONE)


class TestFences:
    def test_none_at_all(self):
        text = fault(WgmmaFenceError, mma("%A", "%B", adds="0"), DONE)
        assert "the first wgmma of a warp, with no wgmma.fence before it" in text

    def test_an_accumulator_that_is_set_after_it(self):
        text = fault(WgmmaFenceError, zeros(), FENCE, COMPUTED, mma("%A", "%B"), DONE)
        assert "it uses register %d0, which was accessed at" in text and "[add.f32" in text

    @pytest.mark.parametrize(
        "constants",
        [
            zeros(),
            zeros().replace("00000000", "40A00000"),
            zeros(count=1) + "".join(f"mov.f32 %d{i}, %d{i // 2};\n" for i in (1, 2, 3)),
            "{ .reg .b16 %x; mov.b16 %x, 7; "
            + "".join(f"mov.b32 %d{i}, {{%x, %x}};" for i in range(4))
            + "}",
        ],
    )
    def test_constants_may_be_moved_below_it(self, constants):
        run(FENCE, constants, mma("%A", "%B"), DONE, constants, mma("%A", "%B"), DONE)
        run(zeros(), zeros("a"), FENCE, "mov.b32 %a1, 7;", FROM_REGISTERS, DONE)
        fault(WgmmaRegisterError, zeros(), FENCE, mma("%A", "%B"), constants, DONE)

    def test_a_move_without_a_source_is_refused(self):
        with pytest.raises(UnsupportedInstruction):
            run(FENCE, "mov.f32 %d0;", mma("%A", "%B"), DONE)

    @pytest.mark.parametrize(
        "values",
        [
            "mov.b32 %d1, %thread;\n",
            "@%p mov.f32 %d1, 0f00000000;\n",
            f"{zeros()}add.f32 %d1, %d1, %d1;\n",
            f"{zeros()}add.f32 %d0, %d1, %d1;\nmov.f32 %d1, %d0;\n",
            "selp.f32 %d1, 0f3F800000, 0f00000000, %p;\n",
        ],
    )
    def test_other_values_need_one(self, values):
        before = f"setp.lt.u32 %p, %thread, 200;\n{zeros()}"
        fault(WgmmaFenceError, before, FENCE, values, mma("%A", "%B"), DONE)
        run(before, values, FENCE, mma("%A", "%B"), DONE)

    def test_an_accumulator_that_is_read_between_two_products(self):
        body = (zeros(), FENCE, mma("%A", "%B"), DONE, "mov.f32 %e0, %d0;")
        fault(WgmmaFenceError, *body, mma("%A", "%B"), DONE)
        run(*body, FENCE, mma("%A", "%B"), DONE)

    def test_a_that_is_written_after_it(self):
        of_thread = "mov.b32 %a0, %thread;"
        text = fault(WgmmaFenceError, zeros(), zeros("a"), FENCE, of_thread, FROM_REGISTERS, DONE)
        assert "it uses register %a0" in text

    def test_a_in_a_loop(self):
        step = "mov.b32 %a2, %r6;\n" + FROM_REGISTERS + DONE
        loop = (
            "mov.u32 %r6, 0;\nNEXT:\n{}add.u32 %r6, %r6, 1;\nsetp.lt.u32 %p, %r6, 3;\n@%p bra NEXT;"
        )
        fault(WgmmaFenceError, zeros(), zeros("a"), FENCE, loop.replace("{}", step))
        fenced = step.replace("wgmma.mma", FENCE + "wgmma.mma")
        run(zeros(), zeros("a"), loop.replace("{}", fenced))

    def test_products_of_two_shapes_in_one_accumulator(self):
        two = (mma("%A", "%B", 16), mma("%A", "%B", 8))
        text = fault(WgmmaFenceError, zeros(count=8), FENCE, *two, DONE)
        assert "an accumulator of the wgmma at" in text and "with no wgmma.fence since" in text
        fault(WgmmaFenceError, zeros(count=8), FENCE, two[0], DONE, two[1], DONE)
        run(zeros(count=8), FENCE, two[0], FENCE, two[1], DONE)

    def test_products_of_one_shape_need_none(self):
        run(zeros(), FENCE, 4 * mma("%A", "%B"), COMMIT, 4 * mma("%A", "%B"), DONE)
        run(zeros(), FENCE, mma("%A", "%B"), DONE, mma("%A", "%B"), DONE)


class TestDivergence:
    """.aligned instructions that not all threads of a warp execute."""

    def test_a_branch(self):
        body = "and.b32 %r5, %thread, 16;\nsetp.eq.u32 %p, %r5, 0;\n@%p bra END;\n"
        with pytest.raises(MissingLanesError, match=r"0x0000ffff do not come.*have ended"):
            run(zeros(), body, FENCE, mma("%A", "%B"), DONE, "END:")

    def test_a_predicate(self):
        body = "setp.lt.u32 %p, %thread, 100;\n"
        guarded = mma("%A", "%B").replace("wgmma", "@%p wgmma")
        with pytest.raises(MissingLanesError, match=r"0xfffffff0 are predicated off"):
            run(zeros(), body, FENCE, guarded, DONE)

    def test_a_wait(self):
        body = "setp.ne.u32 %p, %thread, 5;\n@%p wgmma.wait_group.sync.aligned 0;"
        with pytest.raises(MissingLanesError, match=r"0x00000020 are predicated off"):
            run(zeros(), FENCE, mma("%A", "%B"), COMMIT, body)


class TestWarpgroups:
    def test_a_warp_that_has_ended(self):
        leave = "setp.ge.u32 %p, %thread, 96;\n@%p ret;\n"
        text = fault(WarpgroupError, zeros(), leave, FENCE, mma("%A", "%B"), DONE)
        assert "executes this without warp 3 of its warpgroup, which has ended" in text
        assert "[wgmma.fence" in text and "warp 0" in text

    def test_a_warp_that_goes_round_them(self):
        skip = "setp.ge.u32 %p, %thread, 96;\n@%p bra END;\n"
        text = fault(WarpgroupError, zeros(), skip, FENCE, mma("%A", "%B"), DONE, "END:")
        assert "warp 3 ends without having executed this" in text and "[wgmma.fence" in text

    def test_a_warp_that_leaves_before_the_last(self):
        skip = "setp.ge.u32 %p, %thread, 96;\n@%p bra END;\n"
        body = (zeros(), FENCE, mma("%A", "%B"), DONE)
        assert "[wgmma.commit_group" in fault(WarpgroupError, *body, skip, COMMIT, "END:")

    def test_two_copies_of_one_instruction(self):
        part = "setp.ge.u32 %p, %thread, 64;\n@%p bra OTHER;\n"
        body = (zeros(), part, FENCE, mma("%A", "%B"), DONE, "bra END;\nOTHER:")
        with pytest.raises(WarpgroupError, match=r"warp 2 executes this where a warp of its"):
            run(*body, FENCE, mma("%A", "%B"), DONE, "END:")

    def test_scale_d_differs(self):
        body = "setp.ge.u32 %p, %thread, 32;\n"
        with pytest.raises(WarpgroupError, match="its scale-d is not that of another warp"):
            run(zeros(), body, FENCE, mma("%A", "%B", adds="%p"), DONE)

    @pytest.mark.parametrize("threads", [96, 160])
    def test_a_block_that_ends_inside_one(self, threads):
        with pytest.raises(WarpgroupError, match=rf"its block has {threads // 32} warps"):
            run(zeros(), FENCE, mma("%A", "%B"), DONE, threads=threads)

    def test_warps_that_lag_far_behind_are_right(self):
        delay = "mov.u32 %r5, 0;\nLATE:\nadd.u32 %r5, %r5, 1;\nshl.b32 %r6, %thread, 3;\n"
        delay += "setp.lt.u32 %q, %r5, %r6;\n@%q bra LATE;"
        loop = "mov.u32 %r5, 0;\nNEXT:\n" + mma("%A", "%B") + COMMIT + "add.u32 %r5, %r5, 1;\n"
        loop += "setp.lt.u32 %q, %r5, 100;\n@%q bra NEXT;"
        run(zeros(), delay, FENCE, loop, WAIT, grid=2)


class TestTheEnd:
    def test_a_group_that_nobody_waits_for(self):
        text = fault(UnfinishedError, zeros(), zeros("e"), FENCE, mma("%A", "%B", d="e"), COMMIT)
        assert "no wgmma.wait_group has waited for this" in text and "[wgmma.mma_async" in text

    def test_products_that_nobody_commits(self):
        text = fault(UnfinishedError, zeros(), zeros("e"), FENCE, mma("%A", "%B", d="e"), WAIT)
        assert "no wgmma.commit_group stands between it and the wait at" in text

    def test_the_last_of_several_groups(self):
        one = mma("%A", "%B", d="e") + COMMIT
        body = "setp.ge.u32 %p, %thread, 128;\n@%p bra END;\n"
        text = fault(
            UnfinishedError,
            *(zeros(), zeros("e"), body, FENCE, one, one, WAIT_1, "END:"),
            threads=192,
        )
        assert "warp 0" in text
