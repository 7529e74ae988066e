"""Memory that nothing wrote may be read and thrown away; what depends on it may not reach memory,
an address, a branch or a barrier."""

import numpy as np
import pytest
from ptx_snippets import entry, launch_on

from flash_helpers.ptx import UninitialisedReadError

DECLARATIONS = """
.reg .pred %p, %q, %edge;
.reg .b16 %h<4>;
.reg .b32 %r<40>;
.reg .b64 %rd<8>;
.shared .align 16 .b8 tile[1024];
.local .align 8 .b8 depot[32];
"""
# Lanes below 20 write their word of `tile`; %rd2 is where each thread's word of the output is.
START = """
ld.param.u64 %rd0, [out];
cvta.to.global.u64 %rd1, %rd0;
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd2, %rd1, %rd2;
mov.u32 %r1, tile;
shl.b32 %r2, %r0, 2;
add.u32 %r3, %r1, %r2;
setp.lt.u32 %edge, %r0, 20;
@%edge st.shared.u32 [%r3], %r0;
bar.sync 0;
"""
READ = ".loc 1 7 1\nld.shared.u32 %r4, [%r3];\n.loc 1 9 1\n"
STORE = "st.global.u32 [%rd2], {};\n"


def launch(body, threads=32, **options):
    """Runs the body after START; the run, and the output of 1024 words."""
    text = entry(START + body, ".param .u64 out", DECLARATIONS, f'.file 1 "kernel.cu"\n{CALLEE}')
    run, (out,) = launch_on(text, [np.zeros(1024, np.uint32)], block=threads, **options)
    return run, out


def complaint(body, **options):
    with pytest.raises(UninitialisedReadError) as caught:
        launch(body, **options)
    return caught.value


# -- what is thrown away -----------------------------------------------------------------------


LEGAL = {
    "it is not used": "",
    "it is selected away": "selp.b32 %r5, %r4, 0, %edge;\n" + STORE.format("%r5"),
    "it is overwritten": "@!%edge mov.b32 %r4, 0;\n" + STORE.format("%r4"),
    "it is not stored": "@%edge " + STORE.format("%r4"),
    "it is masked": "selp.b32 %r5, -1, 0, %edge;\nand.b32 %r5, %r4, %r5;\n" + STORE.format("%r5"),
    "the lanes that have it have left": "@!%edge ret;\n" + STORE.format("%r4"),
    "a comparison with it does not decide":
        "setp.gt.and.u32 %p, %r4, 3, %edge;\n@%p " + STORE.format("%r4"),
    "it stays in shared memory": "st.shared.u32 [%r3+512], %r4;\n",
    "it stays in local memory": "st.local.u32 [depot], %r4;\nld.local.u32 %r5, [depot];\n",
    "a sum takes the neutral element instead": """
        selp.b32 %r5, %r4, 0, %edge;
        shfl.sync.bfly.b32 %r6, %r5, 16, 31, -1;
        add.u32 %r5, %r5, %r6;
        shfl.sync.bfly.b32 %r6, %r5, 8, 31, -1;
        add.u32 %r5, %r5, %r6;
        setp.eq.u32 %p, %r5, 17;
        @%p trap;
    """ + STORE.format("%r5"),
    "its half of a register is not taken": """
        @!%edge st.shared.u16 [%r3], 5;
        ld.shared.u32 %r4, [%r3];
        mov.b32 {%h0, %h1}, %r4;
        cvt.u32.u16 %r5, %h0;
    """ + STORE.format("%r5"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_unwritten_memory_may_be_read_if(name):
    run, _ = launch(READ + LEGAL[name])
    assert run.faults == ()


def test_values_are_those_of_a_run_without_poison():
    _, out = launch(READ + LEGAL["it is selected away"])
    assert out[:32].tolist() == [*range(20), *[0] * 12]


# -- where it is reported ----------------------------------------------------------------------

REACHES = {
    "a store": (STORE.format("%r4"), "the value that goes to global memory"),
    "a store of a vector": ("@!%edge st.global.v2.u32 [%rd1], {0, %r4};", "the value that goes"),
    "a generic store": ("st.u32 [%rd2], %r4;", "the value that goes to global memory"),
    "an atomic": ("atom.global.add.u32 %r5, [%rd2], %r4;", "the value that goes"),
    "a reduction": ("red.global.add.u32 [%rd2], %r4;", "the value that goes"),
    "a compare-and-swap": ("atom.global.cas.b32 %r5, [%rd2], %r4, 1;", "the value that goes"),
    "a store's guard": ("setp.gt.u32 %p, %r4, 99;\n@%p " + STORE.format("1"), "its predicate"),
    "a copy's guard": (
        "setp.gt.u32 %p, %r4, 99;\n@%p cp.async.ca.shared.global [%r3], [%rd2], 4;",
        "its predicate",
    ),
    "the address of a load": (
        "cvt.u64.u32 %rd3, %r4;\nadd.u64 %rd3, %rd1, %rd3;\nld.global.u8 %h0, [%rd3];",
        "its address",
    ),
    "the address of a shared load": (
"add.u32 %r5, %r4, %r1;\nld.shared.u8 %h0, [%r5];", "its address",),
    "the address of a store": (
        "cvt.u64.u32 %rd3, %r4;\nadd.u64 %rd3, %rd1, %rd3;\nst.global.u8 [%rd3], 0;",
        "its address",
    ),
    "the address of a shared atomic": (
        "shl.b32 %r5, %r4, 2;\nadd.u32 %r5, %r5, %r1;\nred.shared.add.u32 [%r5+512], 1;",
        "its address",
    ),
    "the address of ldmatrix": (
        "and.b32 %r5, %r4, 16;\nadd.u32 %r5, %r5, %r1;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6,%r7,%r8,%r9}, [%r5];",
        "its address",
    ),
    "the address of a copy": (
        "shl.b32 %r5, %r4, 2;\nadd.u32 %r5, %r5, %r1;\n"
        "cp.async.ca.shared.global [%r5+512], [%rd2], 4;",
        "its address",
    ),
    "the size of a copy": (
        "cp.async.ca.shared.global [%r3], [%rd2], 4, %r4;", "the number of bytes that it copies",
    ),
    **{
        f"a branch around {what}": (
            f"setp.gt.u32 %p, %r4, 99;\n@%p bra END;\n{body}\nEND:",
            "the predicate of this branch",
        )
        for what, body in {
            "a global store": "st.global.u32 [%rd2], 1;",
            "a shared store": "st.shared.u32 [%r3], 1;",
            "an atomic": "atom.global.add.u32 %r5, [%rd2], 1;",
            "a shuffle": "shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;",
            "a barrier": "bar.sync 1;",
            "an exit": "exit;",
            "a second branch around a store":
                "setp.eq.u32 %q, %r0, 40;\n@!%q bra END;\nst.global.u32 [%rd2], 1;",
        }.items()
    },
    "a branch back": (
        "BACK:\nsetp.gt.u32 %p, %r4, 99;\n@%p bra BACK;", "the predicate of this branch"
    ),
    "an indexed branch": (
        "ts: .branchtargets END, END;\nand.b32 %r5, %r4, 1;\nbrx.idx %r5, ts;\nEND:",
        "the index of this branch",
    ),
    "an exit": ("setp.gt.u32 %p, %r4, 99;\n@%p exit;", "its predicate"),
    "a trap": ("setp.gt.u32 %p, %r4, 99;\n@%p trap;", "its predicate"),
    "a barrier's guard": ("setp.lt.u32 %p, %r4, 99;\n@%p bar.sync 1;", "its predicate"),
    "a barrier's number": ("and.b32 %r5, %r4, 0x80;\nbar.sync %r5;", "an operand of this barrier"),
    "a barrier's reduction": (
        "setp.lt.u32 %p, %r4, 99;\nbar.red.popc.u32 %r5, 0, %p;", "an operand of this barrier",
    ),
    "a branch by way of a vote": (
        "setp.lt.u32 %p, %r4, 99;\nvote.sync.any.pred %q, %p, -1;\n@%q bra END;\n"
        "st.global.u32 [%rd2], 1;\nEND:",
        "the predicate of this branch",
    ),
    "a store by way of a shuffle": (
        "shfl.sync.idx.b32 %r5, %r4, 20, 31, -1;\n@%edge " + STORE.format("%r5"),
        "the value that goes",
    ),
    "a store by way of shared memory": (
        "st.shared.u32 [%r3+512], %r4;\nbar.sync 0;\nld.shared.u32 %r5, [%r3+512];\n"
        + STORE.format("%r5"),
        "the value that goes",
    ),
    "a store by way of local memory": (
        "st.local.u32 [depot+4], %r4;\nld.local.v2.u32 {%r5, %r6}, [depot];\n"
        + STORE.format("%r6"),
        "the value that goes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REACHES)
def test_what_was_not_written_reaches(name):
    body, what = REACHES[name]
    error = complaint(READ + body)
    assert error.detail.startswith(what)
    assert "comes from shared memory, address 80, which nothing had written" in error.detail
    assert "when it was read at kernel.cu:7 [ld.shared.u32" in error.detail
    assert error.site.source == "kernel.cu:9" and error.address == 80
    # The first lane that uses what lane 20 has read.
    spread = ("a store by way of a shuffle", "a branch by way of a vote")
    assert error.thread.lane == (0 if name in spread else 20)


@pytest.mark.parametrize("name", REACHES)
def test_what_was_written_may_reach(name):
    run, _ = launch(
        "st.shared.u32 [%r3], %r0;\nst.local.u32 [depot], 0;\nbar.sync 0;\n"
        + READ
        + REACHES[name][0]
    )
    assert run.faults == ()


@pytest.mark.parametrize("guard", ["%p", "!%p"])
@pytest.mark.parametrize("where", ["together", "apart"])
def test_a_branch_that_only_selects_poisons_what_it_selects(guard, where):
    # x == 0 ? 1 : 1 / x becomes a branch: its result depends on x, whichever way was taken.
    body = f"""
    setp.ne.u32 %p, %r4, 0;
    mov.b32 %r5, 1;
    mov.b32 %r6, 3;
    @{guard} bra MEET;
    setp.eq.u32 %q, %r4, 99;
    @%q bra OTHER;
    mov.b32 %r5, 2;
    bra.uni MEET;
    OTHER:
    ld.global.u32 %r5, [%rd2];
    MEET:
    """
    part = "setp.eq.u32 %q, %r0, 3;\n@%q bra END;\n" if where == "apart" else ""
    launch(part + READ + body + "@%edge " + STORE.format("%r5") + "END:")
    launch(part + READ + body + STORE.format("%r6") + "END:")
    error = complaint(part + READ + body + STORE.format("%r5") + "END:")
    assert error.detail.startswith("the value that goes to global memory")
    assert (error.count, error.thread.lane, error.address) == (12, 20, 80)


def test_what_a_poisoned_branch_selected_is_clean_once_it_is_overwritten():
    body = "setp.ne.u32 %p, %r4, 0;\n@%p bra MEET;\nmov.b32 %r5, 2;\nMEET:\nmov.b32 %r5, 1;\n"
    launch(READ + body + STORE.format("%r5"))


def test_a_kernel_that_forgets_its_mask_is_caught():
    body = "selp.b32 %r5, %r4, 0, %edge;\nredux.sync.add.s32 %r6, {}, -1;\n" + STORE.format("%r6")
    _, out = launch(READ + body.format("%r5"))
    assert out[0] == sum(range(20))
    error = complaint(READ + body.format("%r4"))
    assert error.count == 32 and error.thread.lane == 0


@pytest.mark.parametrize("where", ["together", "apart"])
def test_poison_is_followed_from_the_middle_of_a_block_on(where):
    part = "setp.eq.u32 %q, %r0, 3;\n@%q bra END;\n" if where == "apart" else ""
    error = complaint(part + READ + "add.u32 %r5, %r4, 1;\n" + STORE.format("%r5") + "END:")
    assert (error.count, error.address) == (12, 80)


def test_a_branch_of_threads_that_run_apart_is_checked_too():
    body = """
    setp.eq.u32 %q, %r0, 3;
    @%q bra END;
    ld.shared.u32 %r4, [%r3];
    setp.gt.u32 %p, %r4, 99;
    @%p bra END;
    st.global.u32 [%rd2], 1;
    END:
    """
    error = complaint(body)
    assert error.detail.startswith("the predicate of this branch") and error.count == 12


def test_poison_of_one_warp_is_not_that_of_another():
    # Lanes from 20 on read what nothing wrote; the first warp alone stores what it has added.
    body = "redux.sync.add.s32 %r5, %r4, -1;\nsetp.ge.u32 %p, %r0, 32;\n"
    first = (
        "mov.u32 %r4, 1;\nst.shared.u32 [%r3], %r0;\nsetp.lt.u32 %p, %r0, 32;\n"
        "@!%p ld.shared.u32 %r4, [%r3+512];"
    )
    launch(f"{first}\n{body}@!%p {STORE.format('%r5')}", threads=64)
    complaint(f"{first}\n{body}@%p {STORE.format('%r5')}", threads=64)


def test_faults_are_collected_by_the_instruction_that_poison_reaches():
    body = "setp.gt.u32 %p, %r4, 99;\n" + STORE.format("%r4") + "@%p bra END;\nexit;\nEND:"
    run, out = launch(READ + body, keep_going=True)
    assert [fault.detail.split(" comes ")[0] for fault in run.faults] == [
        "the value that goes to global memory",
        "the predicate of this branch",
    ]
    assert [fault.count for fault in run.faults] == [12, 12]
    assert out[:20].tolist() == list(range(20))


# -- memory ------------------------------------------------------------------------------------


CLEANS = {
    "a store": "st.shared.u32 [%r3], 1;",
    "a copy": "cp.async.ca.shared.global [%r3], [%rd2], 4;\ncp.async.wait_all;",
    "an exchange": "atom.shared.exch.b32 %r5, [%r3], 1;",
}


@pytest.mark.parametrize("name", CLEANS)
def test_memory_is_clean_once_it_is_overwritten_by(name):
    # The words were poisoned, not unwritten: a store of what was read made them so.
    again = f"st.shared.u32 [%r3], %r4;\n{{}}\nld.shared.u32 %r5, [%r3];\n{STORE.format('%r5')}"
    complaint(READ + again.format(""))
    launch(READ + again.format(CLEANS[name]))


def test_bytes_of_a_word_are_told_apart():
    body = "st.shared.u32 [%r3], %r4;\nst.shared.u8 [%r3+1], 3;\nld.shared.u8 %h0, [%r3+{}];\n"
    body += "st.global.u8 [%rd2], %h0;"
    launch(READ + body.format(1))
    assert complaint(READ + body.format(2)).address == 82


@pytest.mark.parametrize(
    "use", ["st.global.u32 [%rd2], %r5;", "ld.shared.u32 %r6, [%r3];\nst.global.u32 [%rd2], %r6;"]
)
def test_an_atomic_on_unwritten_memory_returns_and_stores_poison(use):
    launch("atom.shared.add.u32 %r5, [%r3], 1;\n@%edge st.global.u32 [%rd2], %r5;")
    error = complaint(".loc 1 7 1\natom.shared.add.u32 %r5, [%r3], 1;\n" + use)
    assert "shared memory, address 80" in error.detail


def test_lanes_that_meet_at_a_word_share_its_poison():
    body = "ld.shared.u32 %r4, [%r3];\nbar.sync 0;\nred.shared.add.u32 [tile], %r4;\nbar.sync 0;\n"
    complaint(body + "ld.shared.u32 %r5, [tile];\n" + STORE.format("%r5"))
    launch(
        body.replace("red.shared", "@%edge red.shared")
        + "ld.shared.u32 %r5, [tile];\n"
        + STORE.format("%r5")
    )


def test_unwritten_memory_is_known_beside_poisoned_memory():
    body = READ + "st.shared.u32 [%r3+512], %r4;\nld.shared.u32 %r5, [%r3+256];\n"
    error = complaint(body + "@%edge " + STORE.format("%r5"))
    assert (error.address, error.count) == (256, 20)


def test_an_atomic_returns_what_other_lanes_have_added():
    # Lanes that meet at a word take turns: the sum that one sees may hold what another read.
    add = "st.shared.u32 [%r3+512], 0;\nbar.sync 0;\natom.shared.add.u32 %r5, [{}], %r4;\n"
    use = "@%edge " + STORE.format("%r5")
    complaint(READ + add.format("tile+512") + use)
    launch(READ + "st.shared.u32 [%r3+256], 0;\n" + add.format("%r3+256") + use)


def test_an_exchange_returns_what_nothing_wrote():
    error = complaint("atom.shared.exch.b32 %r5, [%r3], %r0;\n" + STORE.format("%r5"))
    assert error.address == 80


# An 8 x 8 matrix at tile + 512, of which 5 rows are written; %r12 is lane / 4, %r13 lane % 4.
MATRIX = """
shl.b32 %r9, %r0, 4;
add.u32 %r9, %r9, %r1;
setp.lt.u32 %p, %r0, 5;
@%p st.shared.v4.u32 [%r9+512], {%r0, %r0, %r0, %r0};
bar.sync 0;
shr.u32 %r12, %r0, 2;
and.b32 %r13, %r0, 3;
"""


@pytest.mark.parametrize(
    ("trans", "low", "high"),
    # A lane has row g and columns 2t and 2t + 1, or rows 2t and 2t + 1 and column g.
    [("", "%r12, 5", "%r12, 5"), (".trans", "%r13, 3", "%r13, 2")],
)
def test_rows_of_a_matrix_that_nothing_wrote(trans, low, high):
    def body(low, high):
        return (
            MATRIX
            + f"""
        ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r10}}, [%r9+512];
        mov.b32 {{%h0, %h1}}, %r10;
        setp.lt.u32 %p, {low};
        @%p st.global.u16 [%rd2], %h0;
        setp.lt.u32 %p, {high};
        @%p st.global.u16 [%rd2+2], %h1;
        """
        )

    launch(body(low, high))
    for n, text in enumerate((low, high)):
        register, rows = text.split(", ")
        one_more = f"{register}, {int(rows) + 1}"
        complaint(body(one_more, high) if n == 0 else body(low, one_more))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_rows_of_a_matrix_that_are_stored_again(trans):
    # What ldmatrix has read, stmatrix puts where it was: 5 rows are clean.
    body = (
        MATRIX
        + f"""
    ldmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 {{%r10, %r11}}, [%r9+512];
    stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [%r9], {{%r11, %r10}};
    ld.shared.v4.u32 {{%r14, %r15, %r16, %r17}}, [%r9];
    setp.ge.u32 %p, %r0, 8;
    setp.lt.and.u32 %p, %r0, %ROWS%, %p;
    @%p st.global.v4.u32 [%rd1], {{%r14, %r14, %r14, %r17}};
    """
    )
    launch(body.replace("%ROWS%", "13"))
    assert complaint(body.replace("%ROWS%", "14")).thread.lane == 13


@pytest.mark.parametrize(("lanes", "is_legal"), [("setp.ge.u32", True), ("setp.lt.u32", False)])
def test_addresses_of_lanes_that_give_no_row_do_not_matter(lanes, is_legal):
    body = (
        MATRIX
        + READ
        + f"""
    mov.u32 %r11, 0;
    {lanes} %p, %r0, 8;
    @%p ld.shared.u32 %r11, [%r3+256];
    add.u32 %r9, %r9, %r11;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r10}}, [%r9+512];
    """
    )
    if is_legal:
        launch(body)
    else:
        assert complaint(body).detail.startswith("its address")


@pytest.mark.parametrize(
    ("space", "base"), [("shared", "add.u32 %r9, %r1, 512;\n"), ("local", "mov.u32 %r9, depot;\n")]
)
def test_padding_of_a_structure_may_be_copied(space, base):
    # Bytes 4 to 7 of { int, double }, and 1 to 3 of { char, int }.
    members = [
        f"st.{space}.u32 [%r9], 1;\n",
        f"st.{space}.u64 [%r9+8], 2;\n",
        f"st.{space}.u8 [%r9+16], 3;\n",
        f"st.{space}.u32 [%r9+20], 4;\n",
    ]
    read = f"bar.sync 0;\nld.{space}.v2.u32 {{%r5, %r6}}, [%r9];\nld.{space}.u32 %r7, [%r9+16];\n"
    store = "st.global.v4.u32 [%rd1], {%r5, %r6, %r7, %r6};\n"
    write = base + "".join(members)
    launch(write + read + f"st.{space}.u32 [%r9+24], %r6;\n" + store)
    for register in ("%r6", "%r7"):
        complaint(write + read + f"add.u32 {register}, {register}, 0;\n" + store)
    # A gap is padding only between members, and only before one as wide as its group.
    narrow = write.replace("u64 [%r9+8], 2", "v2.u32 [%r9+8], {0, 0}")
    complaint(narrow + read + store)
    for n in range(4):
        complaint(base + "".join(members[:n] + members[n + 1 :]) + read + store)


# -- local memory ------------------------------------------------------------------------------


def test_local_memory_that_nothing_wrote():
    body = "st.local.u32 [depot+8], %r0;\n.loc 1 7 1\nld.local.u32 %r4, [depot+{}];\n"
    launch(body.format(8) + STORE.format("%r4"))
    launch(body.format(4))
    error = complaint(body.format(4) + STORE.format("%r4"))
    assert "comes from local memory, address 4, which nothing had written" in str(error)
    assert "kernel.cu:7" in error.detail and (error.thread.lane, error.count) == (0, 32)


def test_local_memory_of_a_lane_is_its_own():
    error = complaint("@%edge st.local.u32 [depot], 1;\nld.local.u32 %r4, [depot];\n"
                      + STORE.format("%r4"))  # fmt: skip
    assert (error.thread.lane, error.count) == (20, 12)


def test_code_for_a_debugger_keeps_its_variables_in_local_memory():
    launch(
        """
        mov.u64 %rd3, depot;
        cvta.local.u64 %rd4, %rd3;
        add.u64 %rd5, %rd4, 0;
        st.u32 [%rd5+16], %r0;
        ld.u32 %r4, [%rd5+20];
        st.u32 [%rd5+24], %r4;
        ld.u32 %r5, [%rd5+16];
        st.u32 [%rd5+20], %r5;
        ld.local.v2.u32 {%r6, %r7}, [%rd3+16];
        add.u32 %r6, %r6, %r7;
        """
        + STORE.format("%r6")
    )


CALLEE = """
.func (.param .b32 result) sum(.param .align 4 .b8 pair[8], .param .b32 unused)
{
.reg .b32 %x, %y;
ld.param.u32 %x, [pair];
ld.param.u32 %y, [pair+4];
add.u32 %x, %x, %y;
st.param.b32 [result], %x;
ret;
}
"""


@pytest.mark.parametrize("second", ["st.param.b32 [a+4], 5;", ""])
def test_arguments_of_calls_are_local_memory(second):
    body = f"""
    {{ .param .align 4 .b8 a[8]; .param .b32 b; .param .b32 c;
    st.param.b32 [a], %r0;
    {second}
    st.param.b32 [b], 0;
    call.uni (c), sum, (a, b);
    ld.param.b32 %r5, [c]; }}
    """ + STORE.format("%r5")
    if second:
        assert launch(body)[1][:32].tolist() == [5 + i for i in range(32)]
    else:
        assert "local memory" in str(complaint(body))


# -- a ragged tile -----------------------------------------------------------------------------

# S = Q K^T with 16 rows and 8 columns, of which 11 rows and 5 columns exist: rows of 32 bytes that
# nothing wrote are loaded into the fragments. Then columns are masked, rows of S summed, and rows
# stored.
RAGGED = """
.reg .f32 %s<4>, %t<4>;
mov.u32 %r1, tile;
and.b32 %r4, %r0, 15;
shl.b32 %r5, %r0, 5;
add.u32 %r6, %r1, %r5;
setp.lt.u32 %p, %r0, 11;
@%p st.shared.v4.u32 [%r6], {{%r7, %r7, %r7, %r7}};
@%p st.shared.v4.u32 [%r6+16], {{%r7, %r7, %r7, %r7}};
setp.lt.u32 %p, %r0, 5;
@%p st.shared.v4.u32 [%r6+512], {{%r7, %r7, %r7, %r7}};
@%p st.shared.v4.u32 [%r6+528], {{%r7, %r7, %r7, %r7}};
bar.sync 0;
shl.b32 %r8, %r4, 5;
shr.u32 %r9, %r0, 4;
shl.b32 %r9, %r9, 4;
add.u32 %r8, %r8, %r9;
add.u32 %r8, %r8, %r1;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8];
and.b32 %r14, %r0, 7;
shl.b32 %r14, %r14, 5;
and.b32 %r15, %r0, 8;
shl.b32 %r15, %r15, 1;
add.u32 %r14, %r14, %r15;
add.u32 %r14, %r14, %r1;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r16, %r17}}, [%r14+512];
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%s0, %s1, %s2, %s3}},
    {{%r10, %r11, %r12, %r13}}, {{%r16, %r17}}, {{0f00000000, 0f00000000, 0f00000000, 0f00000000}};
and.b32 %r18, %r0, 3;
shl.b32 %r18, %r18, 1;
{mask_first}
{mask_second}
add.f32 %t0, %s0, %s1;
add.f32 %t1, %s2, %s3;
shfl.sync.bfly.b32 %r20, %t0, 1, 31, -1;
add.f32 %t0, %t0, %r20;
shfl.sync.bfly.b32 %r20, %t0, 2, 31, -1;
add.f32 %t0, %t0, %r20;
shfl.sync.bfly.b32 %r21, %t1, 1, 31, -1;
add.f32 %t1, %t1, %r21;
shfl.sync.bfly.b32 %r21, %t1, 2, 31, -1;
add.f32 %t1, %t1, %r21;
shr.u32 %r22, %r0, 2;
mul.wide.u32 %rd3, %r22, 4;
add.s64 %rd3, %rd1, %rd3;
st.global.f32 [%rd3], %t0;
add.u32 %r23, %r22, 8;
setp.lt.u32 %q, %r23, {rows};
@%q st.global.f32 [%rd3+32], %t1;
"""
MASKS = {
    "mask_first": """
        setp.lt.u32 %p, %r18, 5;
        selp.f32 %s0, %s0, 0f00000000, %p;
        selp.f32 %s2, %s2, 0f00000000, %p;""",
    "mask_second": """
        add.u32 %r19, %r18, 1;
        setp.ge.u32 %p, %r19, 5;
        @%p mov.f32 %s1, 0f00000000;
        @%p mov.f32 %s3, 0f00000000;""",
    "rows": "11",
}


def ragged(**edits):
    # 1.0 twice
    body = START[: START.index("mov.u32 %r1")] + "mov.b32 %r7, 0x3c003c00;\n"
    text = entry(body + RAGGED.format(**(MASKS | edits)), ".param .u64 out", DECLARATIONS)
    return launch_on(text, [np.zeros(16, np.float32)])[1][0]


def test_rows_and_columns_beyond_the_end_of_a_tile_are_masked_or_not_stored():
    assert ragged().tolist() == [16.0 * 5] * 11 + [0.0] * 5


@pytest.mark.parametrize("forgotten", ["mask_first", "mask_second"])
def test_a_column_mask_that_is_forgotten_is_caught(forgotten):
    with pytest.raises(UninitialisedReadError, match=r"ldmatrix\S*x2\.shared") as caught:
        ragged(**{forgotten: ""})
    # The first of the rows of K that nothing wrote is row 5.
    assert caught.value.address in {512 + 32 * row + 4 * t for row in (5, 6, 7) for t in range(8)}


def test_a_row_stored_past_the_end_is_caught():
    with pytest.raises(UninitialisedReadError, match=r"ldmatrix\S*x4\.shared") as caught:
        ragged(rows="12")
    assert caught.value.thread.lane == 12


@pytest.mark.parametrize("space", ["global", "shared"])
def test_wmma_knows_no_more_than_the_warp(space):
    registers = ", ".join(f"%r{n}" for n in range(10, 18))
    to = {"global": "[%rd1]", "shared": "[tile+512]"}[space]
    body = f"""
    {{}}
    mov.b64 {{{{%r24, %r25}}}}, 0;
    mov.b64 {{{{%r26, %r27}}}}, 0;
    wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {{{{{registers}}}}}, [tile], 16;
    wmma.mma.sync.aligned.row.col.m16n16k16.f16.f16
        {{{{%r20, %r21, %r22, %r23}}}}, {{{{{registers}}}}}, {{{{{registers}}}}},
        {{{{%r24, %r25, %r26, %r27}}}};
    wmma.store.d.sync.aligned.row.m16n16k16.{space}.f16 {to}, {{{{%r20, %r21, %r22, %r23}}}}, 16;
    bar.sync 0;
    ld.shared.u32 %r5, [%r3+512];
    """ + STORE.format("%r5")
    lines = "\n".join(
        f"st.shared.u32 [%r3+{at}], %r0;" for at in (0, 128, 256, 384, 512, 640, 768, 896)
    )
    launch(body.format(lines + "bar.sync 0;"))
    assert complaint(body.format("st.shared.u32 [%r3+512], 0;\nbar.sync 0;")).address == 80
