"""Registers that nothing has written may be read and thrown away; what depends on them may not
reach memory, an address or a branch."""

import numpy as np
import pytest
from ptx_snippets import entry, launch_on
from wgmma_snippets import COMMIT, FENCE, WAIT, Snippet, chunks, descriptor, mma

from flash_helpers.ptx import Observer, UninitialisedRegisterError, load_ptx
from flash_helpers.ptx.read.registers import unset_registers

DECLARATIONS = """
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<40>;
.reg .b64 %rd<8>;
"""
# %p0 lanes below 20; %rd2 is where each thread's word of the output is.
START = """
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mad.wide.u32 %rd2, %r0, 4, %rd0;
setp.lt.u32 %p0, %r0, 20;
"""
STORE = "st.global.u32 [%rd2], {};\n"


def kernel_of(body, before=""):
    text = entry(START + body, ".param .u64 out", DECLARATIONS, f'.file 1 "kernel.cu"\n{before}')
    return load_ptx(text).kernel("k"), text


def launch(body, threads=64, before="", **options):
    """Runs the body after START; the run, and the output of 1024 words."""
    text = kernel_of(body, before)[1]
    run, (out,) = launch_on(text, [np.zeros(1024, np.uint32)], block=threads, **options)
    return run, out


def unset(body):
    return unset_registers(kernel_of(body)[0].program).names


# -- the analysis ----------------------------------------------------------------------------------

ANALYSED = {
    "a register that is written first": ("mov.u32 %r1, 1;\nadd.u32 %r1, %r1, %r1;", ""),
    "a register that is not": ("add.u32 %r1, %r1, 1;", "%r1"),
    "an address": ("ld.global.u32 %r1, [%rd1];", "%rd1"),
    "the parts of a vector": ("mov.b64 %rd1, {%r1, %r2};\nmov.b64 {%r3, %r4}, %rd1;", "%r1 %r2"),
    "a predicate": ("@%p1 mov.u32 %r1, 1;", "%p1"),
    "a predicate's complement": ("and.pred %p2, %p0, !%p1;", "%p1"),
    "both results of a comparison": (
        "setp.lt.u32 %p1|%p2, %r0, 3;\nselp.u32 %r1, 1, 0, %p2;", "",
    ),
    "a write of some lanes": ("@%p0 mov.u32 %r1, 1;\nmov.u32 %r2, %r1;", "%r1"),
    "a read by the lanes that have written": ("@%p0 mov.u32 %r1, 1;\n@%p0 mov.u32 %r2, %r1;", ""),
    "a read by other lanes": ("@%p0 mov.u32 %r1, 1;\n@!%p0 mov.u32 %r2, %r1;", "%r1"),
    "a read under the same predicate with another value": (
        "@%p0 mov.u32 %r1, 1;\nsetp.lt.u32 %p0, %r0, 40;\n@%p0 mov.u32 %r2, %r1;", "%r1",
    ),
    "writes of all lanes in two parts": (
        "@%p0 mov.u32 %r1, 1;\n@!%p0 mov.u32 %r1, 2;\nmov.u32 %r2, %r1;", "",
    ),
    "writes on both ways": (
        "@%p0 bra A;\nmov.u32 %r1, 1;\nbra B;\nA: mov.u32 %r1, 2;\nB: mov.u32 %r2, %r1;", "",
    ),
    "a write on one way": ("@%p0 bra A;\nmov.u32 %r1, 1;\nA: mov.u32 %r2, %r1;", "%r1"),
    "a write later in a loop": (
        "A: add.u32 %r2, %r1, 1;\nmov.u32 %r1, 1;\nsetp.eq.u32 %p1, %r2, 9;\n@%p1 bra A;", "%r1",
    ),
    "a write before a loop": (
        "mov.u32 %r1, 0;\nA: add.u32 %r1, %r1, 1;\nsetp.lt.u32 %p1, %r1, 9;\n@%p1 bra A;", "",
    ),
    "a read that no way leads to": ("bra B;\nA: mov.u32 %r2, %r1;\nB:", ""),
    "a value that a hint names": ("nanosleep.u32 %r1;", ""),
    "an accumulator that is overwritten": (f"{mma('1', '2', d='r', adds='0')}", ""),
    "an accumulator that is added to": (
        f"{mma('1', '2', d='r', adds='1')}", "%r0 %r1 %r2 %r3",
    ),
    "a sparse accumulator that is overwritten": (
        mma("1", "2", d="r", adds="9, 0, 0").replace("async", "async.sp"), "",
    ),
    "an accumulator that may be added to": (
        f"{mma('1', '2', d='r', adds='%p0')}", "%r0 %r1 %r2 %r3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANALYSED)
def test_it_is_known_what_may_be_read_unwritten(name):
    body, expected = ANALYSED[name]
    assert unset(body) == set(expected.split()) - {"%r0"}


# -- what is thrown away ---------------------------------------------------------------------------

LEGAL = {
    "not used": "add.u32 %r3, %r1, 1;",
    "selected away": "selp.b32 %r2, %r1, 7, %p1;",
    "selected by lanes that have it": "@%p0 mov.u32 %r1, 3;\nselp.b32 %r2, %r1, 0, %p0;",
    "masked": "and.b32 %r2, %r1, 0;",
    "in the half that is not taken": (
        "mov.u16 %h1, 5;\nmov.b32 %r1, {%h1, %h2};\nmov.b32 {%h3, _}, %r1;\ncvt.u32.u16 %r2, %h3;"
    ),
    "in a byte that prmt leaves out": "mov.u32 %r3, 9;\nprmt.b32 %r2, %r1, %r3, 0x7654;",
    "carried around a loop until it is written": """
        mov.u32 %r4, 0;
        A: mov.u32 %r2, %r1;
        mov.u32 %r1, %r4;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p2, %r4, 3;
        @%p2 bra A;
    """,
    "read on the way that was not taken": """
        mov.u32 %r2, 1;
        setp.gt.u32 %p2, %r0, 99;
        @!%p2 bra A;
        mov.u32 %r2, %r1;
        A:
    """,
    "in lanes from which no lane takes it": """
        and.b32 %r3, %r0, 31;
        setp.eq.u32 %p2, %r3, 3;
        @%p2 mov.u32 %r1, %r0;
        shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;
    """,
    "in a sum that masks it": """
        @%p0 mov.u32 %r1, 1;
        selp.b32 %r3, %r1, 0, %p0;
        redux.sync.add.u32 %r2, %r3, -1;
    """,
    "in another group of lanes than the one that uses its sum": """
        and.b32 %r3, %r0, 1;
        setp.eq.u32 %p2, %r3, 0;
        @%p2 mov.u32 %r1, 1;
        selp.b32 %r4, 0x55555555, 0xaaaaaaaa, %p2;
        redux.sync.add.u32 %r5, %r1, %r4;
        @%p2 mov.u32 %r2, %r5;
    """,
    "packed by cvt into a half that is dropped": """
        mov.f32 %r3, 0f3F800000;
        cvt.rn.f16x2.f32 %r4, %r1, %r3;
        and.b32 %r2, %r4, 0xffff;
    """,
}
START_OF_ALL = "mov.u32 %r2, 7;\nsetp.gt.u32 %p1, %r0, 99;\n"


@pytest.mark.parametrize("threads", [64, 40])
@pytest.mark.parametrize("name", LEGAL)
def test_a_register_may_be_read_unwritten_if_its_value_is(name, threads):
    run, _ = launch(START_OF_ALL + LEGAL[name] + "\n" + STORE.format("%r2"), threads)
    assert run.faults == ()


# -- where it is reported --------------------------------------------------------------------------

REACHES = {
    "a store": (STORE.format("%r1"), "the value that goes to global memory"),
    "a part of a stored vector": (
        "st.global.v2.u32 [%rd0], {%r0, %r1};", "the value that goes to global memory",
    ),
    "an address": ("ld.global.u32 %r3, [%rd1];", "its address"),
    "the address of shared memory": ("st.shared.u32 [%r1], 0;", "its address"),
    "a branch": (
        "setp.lt.u32 %p2, %r1, 9;\n@%p2 bra A;\n" + STORE.format("1") + "A:",
        "the predicate of this branch",
    ),
    "a branch directly": ("@%p1 bra A;\n" + STORE.format("1") + "A:", "the predicate of this"),
    "a guard": ("@%p1 " + STORE.format("1"), "its predicate"),
    "a store by way of a sum": (
        "add.u32 %r2, %r1, %r0;\n" + STORE.format("%r2"), "the value that goes to global memory",
    ),
    "a store by way of shared memory": (
        ".shared .b32 s[64];\nmov.u32 %r3, s;\nmad.lo.u32 %r3, %r0, 4, %r3;\n"
        "st.shared.u32 [%r3], %r1;\nld.shared.u32 %r2, [%r3];\n" + STORE.format("%r2"),
        "the value that goes to global memory",
    ),
    "a store by way of a branch that selects": (
        "mov.u32 %r2, 0;\nsetp.lt.u32 %p2, %r1, 9;\n@%p2 bra A;\nmov.u32 %r2, 1;\nA:\n"
        + STORE.format("%r2"),
        "the value that goes to global memory",
    ),
    "a store in the first turn of a loop": (
        "mov.u32 %r4, 0;\nA: st.global.u32 [%rd2], %r1;\nmov.u32 %r1, 1;\nadd.u32 %r4, %r4, 1;\n"
        "setp.lt.u32 %p2, %r4, 3;\n@%p2 bra A;",
        "the value that goes to global memory",
    ),
    "an mma's sum": (
        "mov.u32 %r8, 0;\nmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r4,%r5,%r6,%r7}, "
        "{%r8,%r8,%r8,%r8}, {%r8,%r8}, {%r1,%r8,%r8,%r8};\n" + STORE.format("%r4"),
        "the value that goes to global memory",
    ),
}  # fmt: skip
NAMES = {"an address": "%rd1", "a branch directly": "%p1", "a guard": "%p1"}


@pytest.mark.parametrize("threads", [64, 32])
@pytest.mark.parametrize("name", REACHES)
def test_what_nothing_wrote_reaches(name, threads):
    body, what = REACHES[name]
    with pytest.raises(UninitialisedRegisterError) as caught:
        launch(".loc 1 5 1\n" + body, threads)
    error = caught.value
    assert error.detail.startswith(f"{what} ")
    assert f"register {NAMES.get(name, '%r1')}, which nothing had written" in error.detail
    assert "when it was read at kernel.cu:5" in error.detail
    assert (error.thread.lane, error.count, error.address) == (0, threads, None)


def test_the_message_names_the_instruction_that_read_the_register_first():
    body = ".loc 1 5 1\nmov.u32 %r2, %r1;\n.loc 1 6 1\nadd.u32 %r3, %r2, 1;\n.loc 1 7 1\n"
    with pytest.raises(UninitialisedRegisterError, match=r"read at kernel\.cu:5 \[mov") as caught:
        launch(body + STORE.format("%r3"))
    assert caught.value.site.source == "kernel.cu:7"


def test_only_lanes_that_have_not_written_are_told():
    body = "@%p0 mov.u32 %r1, %r0;\n" + STORE.format("%r1")
    with pytest.raises(UninitialisedRegisterError) as caught:
        launch(body)
    assert (caught.value.thread.lane, caught.value.count) == (20, 44)
    run, out = launch(body, keep_going=True)
    assert len(run.faults) == 1 and out[:20].tolist() == list(range(20))


def test_a_register_of_a_called_function_has_its_own_name():
    function = """.func (.param .b32 result) f()
{
.reg .b32 %x<2>;
add.u32 %x1, %x0, 1;
st.param.b32 [result], %x1;
ret;
}
"""
    call = "{ .param .b32 back;\ncall (back), f, ();\nld.param.b32 %r1, [back]; }\n"
    with pytest.raises(UninitialisedRegisterError, match="register %x0, which"):
        launch(call + STORE.format("%r1"), before=function)


# -- accumulators of a wgmma -----------------------------------------------------------------------

ONES = chunks(np.ones((64, 16), np.float16))
PRODUCT = Snippet("", image=np.pad(ONES, (0, 4096 - ONES.size)))
FACTORS = {"A": descriptor(0), "B": descriptor(0)}


def multiply(body, **options):
    return Snippet(body, image=PRODUCT.image, arguments=FACTORS).run(**options)


def test_an_accumulator_that_nothing_set():
    with pytest.raises(UninitialisedRegisterError) as caught:
        multiply(FENCE + mma("%A", "%B") + COMMIT + WAIT)
    assert "register %d0, which nothing had written" in caught.value.detail
    assert "when it was read at" in caught.value.detail and "[wgmma" in caught.value.detail


@pytest.mark.parametrize("threads", [128, 256])
def test_the_first_product_of_a_loop_overwrites_the_accumulator(threads):
    """As CUTLASS does it; a second warpgroup multiplies nothing, and never uses the registers.
    Nothing follows poison then, though the control flow alone does not tell that."""
    loop = f"""
    setp.ge.u32 %p, %thread, 128;
    @%p bra PRODUCER;
    mov.u32 %r8, 0;
    {FENCE}
    MORE:
    setp.ne.u32 %q, %r8, 0;
    {mma("%A", "%B", adds="%q")}
    {COMMIT}
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p, %r8, 3;
    @%p bra MORE;
    {WAIT}
    bra END;
    PRODUCER:
    mov.f32 %d0, 0f00000000;
    mov.f32 %d1, %d0;
    mov.f32 %d2, %d0;
    mov.f32 %d3, %d0;
    END:
    """
    poisons = []
    observer = Observer(lambda i: i.name == "st", lambda seen: poisons.append(seen.machine.poison))
    result = multiply(loop, threads=threads, observer=observer)
    assert (result.matrix(threads) == 48).all()
    assert not any(poison.active or poison.registers for poison in poisons[-4:])


def test_a_sum_that_begins_with_what_nothing_set():
    """scale-d is wrong in the first turn."""
    body = f"setp.ne.u32 %q, %thread, 500;\n{FENCE}{mma('%A', '%B', adds='%q')}{COMMIT}{WAIT}"
    with pytest.raises(UninitialisedRegisterError, match="register %d0"):
        multiply(body)
