"""Groups of lanes in one instruction: lanes with different masks, and lanes that have ended."""

import numpy as np
import pytest
from ptx_snippets import evaluate, run_body

from flash_helpers.gpu import WARP
from flash_helpers.ptx import MissingLanesError, UnsupportedInstruction

LANES = np.arange(WARP)
THIRDS = [np.arange(r, WARP, 3) for r in LANES % 3]
"""For each lane the lanes of its group."""
DECLARATIONS = ".reg .pred %p, %q;\n.reg .b32 %group, %member, %x, %y;\n.reg .b64 %wide;"
# As __match_any_sync makes the masks of a labeled partition.
THREE = "rem.u32 %group, %thread, 3;\nmatch.any.sync.b32 %member, %group, -1;\n"
WORDS = np.random.default_rng(1).integers(0, 1 << 32, WARP, np.uint32)
NUMBERS = np.random.default_rng(2).normal(size=WARP).astype(np.float32)
SOME_NAN = np.where(LANES % 9 == 4, np.float32(np.nan), NUMBERS)


def of_groups(function, values):
    """A function of the values of each lane's group."""
    return np.array([function(values[group]) for group in THIRDS])


def in_thirds(body, values, type_name="u32", result="u32"):
    inputs = {"a": (type_name, list(values))}
    target = "sm_100a" if type_name == "f32" else "sm_80"
    return evaluate(THREE + body, inputs, result, declarations=DECLARATIONS, target=target)


REDUX = {
    "add.u32": np.add, "add.s32": np.add, "min.u32": np.minimum, "min.s32": np.minimum,
    "max.u32": np.maximum, "max.s32": np.maximum,
    "and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor,
    "min.f32": np.fmin, "max.f32": np.fmax, "min.NaN.f32": np.minimum, "max.NaN.f32": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("name", REDUX)
def test_redux_reduces_each_group_alone(name):
    type_name = name.rpartition(".")[2]
    values = {"s32": WORDS.view(np.int32), "f32": SOME_NAN}.get(type_name, WORDS)
    if type_name == "b32":  # so that no result is 0 or all ones
        values = {"and": WORDS | 0x00F0_0F00, "or": WORDS & 0x00F0_0F00}.get(name[:-4], WORDS)
    with np.errstate(over="ignore"):
        expected = of_groups(lambda x: REDUX[name].reduce(x, dtype=x.dtype), values)
    out = in_thirds(f"redux.sync.{name} %d, %a, %member;", values, type_name, type_name)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", ["add.f32", "and.u32", "xor.s32", "min.b32", "min.NaN.u32"])
def test_redux_of_another_type_is_refused(name):
    with pytest.raises(UnsupportedInstruction, match=r"redux\.sync"):
        in_thirds(f"redux.sync.{name} %d, %a, %member;", WORDS)


@pytest.mark.parametrize("operation", ["min", "max"])
def test_redux_of_magnitudes(operation):
    out = in_thirds(f"redux.sync.{operation}.abs.f32 %d, %a, %member;", NUMBERS, "f32", "f32")
    np.testing.assert_array_equal(out, of_groups(getattr(np, operation), np.abs(NUMBERS)))


def test_redux_of_numbers_that_are_all_nan():
    nan = np.full(WARP, np.nan, np.float32)
    for operation in ("min", "max"):
        out = in_thirds(f"redux.sync.{operation}.f32 %d, %a, %member;", nan, "f32", "f32")
        assert np.isnan(out).all()


def bits(lanes):
    return sum(1 << int(i) for i in lanes)


ODD = WORDS & 1 == 1
GROUPWISE = {
    "ballot": (
        "setp.ne.u32 %p, %a, 0;\nvote.sync.ballot.b32 %d, %p, %member;",
        ODD, [bits(g[ODD[g]]) for g in THIRDS],
    ),
    "any": (
        "setp.eq.u32 %p, %a, 7;\nvote.sync.any.pred %q, %p, %member;\nselp.u32 %d, 1, 0, %q;",
        LANES, LANES % 3 == 7 % 3,
    ),
    "all": (
        "setp.ne.u32 %p, %a, 7;\nvote.sync.all.pred %q, %p, %member;\nselp.u32 %d, 1, 0, %q;",
        LANES, LANES % 3 != 7 % 3,
    ),
    "uni": (
        "setp.ne.u32 %p, %a, 1;\nvote.sync.uni.pred %q, %p, %member;\nselp.u32 %d, 1, 0, %q;",
        np.where(LANES == 7, 2, LANES % 3), LANES % 3 != 1,
    ),
    "match.any": (
        "match.any.sync.b32 %d, %a, %member;",
        WORDS % 2, [bits(g[WORDS[g] % 2 == WORDS[i] % 2]) for i, g in enumerate(THIRDS)],
    ),
    "match.all": (
        "match.all.sync.b32 %d, %a, %member;",
        LANES % 3 * (LANES != 7), [bits(g) * (7 not in g) for g in THIRDS],
    ),
    "elect": ("elect.sync %d|%p, %member;", LANES, [g[0] for g in THIRDS]),
    "shuffle": (
        "mul.hi.u32 %x, %thread, 0x55555556;\nadd.u32 %x, %x, 1;\nrem.u32 %x, %x, 10;\n"
        "mad.lo.u32 %x, %x, 3, %group;\nshfl.sync.idx.b32 %d, %a, %x, 31, %member;",
        WORDS, WORDS[(LANES // 3 + 1) % 10 * 3 + LANES % 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPWISE)
def test_each_group_is_alone_in(name):
    body, values, expected = GROUPWISE[name]
    np.testing.assert_array_equal(in_thirds(body, values), np.array(expected, np.uint32))


@pytest.mark.parametrize("name", GROUPWISE)
def test_groups_that_come_one_after_the_other(name):
    """The group 0 takes longer; the others do not wait for it."""
    body, values, expected = GROUPWISE[name]
    late = "setp.ne.u32 %q, %group, 0;\n@%q bra HERE;\nadd.u32 %x, %x, 1;\nHERE:\n"
    np.testing.assert_array_equal(in_thirds(late + body, values), np.array(expected, np.uint32))


# -- threads that have ended -----------------------------------------------------------------------

TWENTY = bits(range(20))
# Lanes from 20 on end first, or in a block behind the instruction, where the others wait for them.
ENDS = {
    "before": "setp.ge.u32 %q, %thread, 20;\n@%q exit;\n{}\n",
    "after": "setp.ge.u32 %q, %thread, 20;\n@%q bra END;\n{}\nbra STORE;\nEND:\nexit;\nSTORE:\n",
}
LEFT = {
    "ballot": ("setp.lt.u32 %p, %thread, 99;\nvote.sync.ballot.b32 %d, %p, -1;", TWENTY),
    "all": (
        "setp.lt.u32 %p, %thread, 20;\nvote.sync.all.pred %q, %p, -1;\nselp.u32 %d, 1, 0, %q;", 1,
    ),
    "any": (
        "setp.ge.u32 %p, %thread, 20;\nvote.sync.any.pred %q, %p, -1;\nselp.u32 %d, 1, 0, %q;", 0,
    ),
    "match.any": ("mov.u32 %x, 5;\nmatch.any.sync.b32 %d, %x, -1;", TWENTY),
    "match.all": ("mov.u32 %x, 5;\nmatch.all.sync.b32 %d, %x, -1;", TWENTY),
    "redux": ("redux.sync.add.u32 %d, %thread, -1;", sum(range(20))),
    "redux.max": ("redux.sync.max.u32 %d, %thread, -1;", 19),
    "elect": ("elect.sync %d|%p, -1;", 0),
    "shuffle": ("shfl.sync.idx.b32 %d, %thread, 19, 31, -1;", 19),
    "barrier": ("bar.warp.sync -1;\nmov.u32 %d, 8;", 8),
}  # fmt: skip


@pytest.mark.parametrize("when", ENDS)
@pytest.mark.parametrize("name", LEFT)
def test_no_lane_waits_for_one_that_has_ended(name, when):
    body, expected = LEFT[name]
    out = evaluate(ENDS[when].format(body), declarations=DECLARATIONS)
    assert out.tolist() == [expected] * 20 + [0] * 12


def test_a_predicate_does_not_make_a_lane_that_has_ended_missing():
    body = ENDS["before"].format("setp.lt.u32 %p, %thread, 20;\n@%p redux.sync.add.u32 %d, 1, -1;")
    assert evaluate(body, declarations=DECLARATIONS)[0] == 20


# -- lanes that do not come ------------------------------------------------------------------------

WRONG = {
    "wait elsewhere": (
        "setp.gt.u32 %q, %thread, 3;\n@%q bra B;\nredux.sync.add.u32 %x, %thread, -1;\n"
        "B: bar.sync 0;",
        r"0xfffffff0 do not come\n",
    ),
    "are predicated off": (
        "setp.lt.u32 %q, %thread, 4;\n@%q redux.sync.add.u32 %x, %thread, -1;",
        "0xfffffff0 are predicated off",
    ),
    "name other members": (
        "setp.lt.u32 %q, %thread, 4;\nselp.b32 %member, 15, -1, %q;\n"
        "redux.sync.add.u32 %x, %thread, %member;",
        "0x0000000f execute it with another mask",
    ),
    "name other members, apart": (
        "setp.gt.u32 %q, %thread, 30;\n@%q exit;\n"
        "setp.lt.u32 %q, %thread, 4;\nselp.b32 %member, 15, -1, %q;\n"
        "redux.sync.add.u32 %x, %thread, %member;\nbar.sync 0;",
        "0x8000000f do not come .0x80000000 have ended.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_lanes_of_a_mask_that(name):
    body, words = WRONG[name]
    with pytest.raises(MissingLanesError, match=words):
        run_body("mov.u32 %thread, %tid.x;\n" + body, f".reg .b32 %thread;\n{DECLARATIONS}", 32)


def test_a_lane_that_is_predicated_off_waits_for_none():
    """Lanes from 16 on pass the instruction, the others never come to it."""
    body = """
    setp.lt.u32 %q, %thread, 16;
    @%q bra STORE;
    @%q redux.sync.add.u32 %x, %thread, 0xffff;
    STORE:
    mov.u32 %d, 1;
    """
    assert evaluate(body, declarations=DECLARATIONS).tolist() == [1] * WARP


# -- values of lanes that take no part -------------------------------------------------------------

TREE = "".join(
    f"shfl.sync.down.b32 %x, %y, {n}, 31, {{mask}};\nadd.u32 %y, %y, %x;\n" for n in (8, 4, 2, 1)
)
# Half a warp adds its lanes' numbers: those of lanes from 8 on read lanes that take no part.
HALVES = {
    "ended": "setp.ge.u32 %q, %thread, 16;\n@%q exit;\n" + TREE.format(mask=-1),
    "not named": "setp.ge.u32 %q, %thread, 16;\n@%q bra STORE;\n" + TREE.format(mask="0xffff"),
    "predicated off": "setp.lt.u32 %q, %thread, 16;\n"
    + TREE.format(mask="0xffff").replace("shfl", "@%q shfl"),
    "of another group": "setp.lt.u32 %q, %thread, 16;\nselp.b32 %member, 0xffff, 0xffff0000, %q;\n"
    + TREE.format(mask="%member"),
}
WHY = {"ended": "which had ended"}
USES = {
    "memory": ("mov.u32 %d, %y;", "the value that goes to global memory"),
    "an address": ("{ .shared .b32 s[9999];\nst.shared.u32 [%y], 1; }", "its address"),
    "a branch": (
        "setp.gt.u32 %p, %y, 9;\n@%p bra A;\nbar.warp.sync -1;\nA:",
        "the predicate of this branch",
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_tree_of_half_a_warp_reads_what_it_does_not_use(name):
    body = f"mov.u32 %y, %thread;\nmov.u32 %d, 0;\n{HALVES[name]}STORE:\n"
    body += "setp.eq.u32 %p, %thread, 0;\n@%p mov.u32 %d, %y;"
    assert evaluate(body, declarations=DECLARATIONS).tolist() == [sum(range(16)), *[0] * 31]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", HALVES)
def test_what_comes_from_a_lane_that_takes_no_part_reaches(name, use):
    (body, what), half = USES[use], HALVES[name]
    body = f"mov.u32 %y, %thread;\nmov.u32 %d, 0;\n.loc 1 5 1\n{half}\n.loc 1 6 1\n{body}\nSTORE:"
    with pytest.raises(MissingLanesError) as caught:
        evaluate(body, declarations=DECLARATIONS, before='.file 1 "kernel.cu"')
    error = caught.value
    # Lane 1 adds what lane 9 has added, which has read lane 17.
    why = WHY.get(name, "which its mask does not name")
    assert error.detail.startswith(f"{what} comes from lane 1")
    assert f", {why}, by the shuffle at kernel.cu:5 [shfl.sync.down.b32" in error.detail
    assert error.address is None


SHUFFLES = {
    "down by one, clamped": ("shfl.sync.down.b32 %d, %thread, 1, 31, 0xffff;", 15, 16),
    "up by one": ("shfl.sync.up.b32 %d, %thread, 1, 0, 0xffff;", None, None),
    "down in segments": ("shfl.sync.down.b32 %d, %thread, 1, 0x101f, 0xffff;", None, None),
    "of one lane": ("shfl.sync.idx.b32 %d, %thread, 20, 31, 0xffff;", 0, 20),
    "of one lane of a segment": ("shfl.sync.idx.b32 %d, %thread, 4, 0x101f, 0xffff;", None, None),
    "crosswise": ("shfl.sync.bfly.b32 %d, %thread, 16, 31, 0xffff;", 0, 16),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_the_lane_that_is_read_decides(name):
    """`reader`: the first lane that reads one of the other half."""
    body, reader, source = SHUFFLES[name]
    body = f"setp.ge.u32 %q, %thread, 16;\n@%q exit;\n{body}"
    if reader is None:
        evaluate(body, declarations=DECLARATIONS)
        return
    with pytest.raises(MissingLanesError, match=f"comes from lane {source}, which had") as caught:
        evaluate(body, declarations=DECLARATIONS)
    assert caught.value.thread.lane == reader


def test_whether_the_lane_is_in_range_is_known():
    """The predicate of a shuffle does not depend on who takes part."""
    body = """
    setp.ge.u32 %q, %thread, 16;
    @%q exit;
    shfl.sync.down.b32 %x|%p, %thread, 1, 0x100f, -1;
    selp.u32 %d, 1, 0, %p;
    """
    assert evaluate(body, declarations=DECLARATIONS).tolist() == [1] * 15 + [0] * 17
