"""Calls: of device functions, which are put in their place, and of what no module defines."""

import io

import numpy as np
import pytest
from ptx_snippets import entry, evaluate

from flash_helpers.ptx import (
    AssertError,
    DeviceMemory,
    OutOfBoundsError,
    Run,
    UnsupportedInstruction,
    load_ptx,
)

DECLARATIONS = ".reg .pred %p; .reg .b32 %r0, %r1, %thread; .reg .b64 %rd0, %rd1;"


def launch(body: str, before: str = "", threads: int = 32, **options: object) -> Run:
    module = load_ptx(entry(f"mov.u32 %thread, %tid.x;\n{body}", "", DECLARATIONS, before))
    return module.kernel("k").launch(grid=1, block=threads, **options)


def text(name: str, value: str) -> str:
    codes = ", ".join(map(str, [*value.encode(), 0]))
    return f".global .align 1 .b8 {name}[{len(value.encode()) + 1}] = {{{codes}}};\n"


class TestDeviceFunctions:
    ADD_ONE = """
    .func (.param .b32 out) add_one(.param .b32 in)
    {
    .reg .b32 %r;
    ld.param.b32 %r, [in];
    add.u32 %r, %r, 1;
    st.param.b32 [out], %r;
    ret;
    }
    """
    CALL = """
    .param .b32 given; .param .b32 got;
    mov.u32 %d, 0;
    st.param.b32 [got], 7;
    st.param.b32 [given], %thread;
    {guard} call (got), add_one, (given);
    ld.param.b32 %d, [got];
    """

    def test_a_call_under_a_predicate_is_made_by_its_lanes_alone(self):
        body = self.CALL.replace("{guard}", "setp.lt.u32 %p, %thread, 3;\n@%p")
        got = evaluate(body, declarations=".reg .pred %p;", before=self.ADD_ONE)
        np.testing.assert_array_equal(got, [1, 2, 3] + [7] * 29)
        got = evaluate(
            body.replace("@%p", "@!%p"), declarations=".reg .pred %p;", before=self.ADD_ONE
        )
        np.testing.assert_array_equal(got, [7] * 3 + list(range(4, 33)))

    def test_functions_that_call_others_twice_each_do_not_grow_without_bounds(self):
        functions = ".func f0()\n{\nret;\n}\n" + "".join(
            f".func f{n}()\n{{\ncall f{n - 1};\ncall f{n - 1};\nret;\n}}\n" for n in range(1, 40)
        )
        with pytest.raises(UnsupportedInstruction, match="calls of more than 50000 instructions"):
            launch("call f39;", functions)
        assert launch("call f5;", functions).counters.total.instructions == 2**6 + 1


class TestCallsThatStay:
    """They are refused when a thread reaches them, and not before."""

    FUNCTIONS = """
    .func (.param .b32 out) f(.param .b32 in)
    {
    ret;
    }
    .func twice()
    {
    call twice;
    ret;
    }
    .func ping();
    .func pong()
    {
    call ping;
    ret;
    }
    .func ping()
    {
    call pong;
    ret;
    }
    """
    CALLS = (
        ("call.uni (one), f, (one, one);", "3 arguments and results, f has 2"),
        ("call.uni f;", "0 arguments and results, f has 2"),
        ("call.uni (one), f, (%r0);", r"in of f is in \.param space: give a variable"),
        ("call.uni (one), f, (wide);", "wide has 8 bytes, in of f 4"),
        ("call.uni (one), f, (none);", "none has no bytes, in of f 4"),
        ("call.uni cudaLaunchDeviceV2, (one);", "cudaLaunchDeviceV2 is not defined"),
        ("call.uni (one), %rd0, (one), proto;", "calls through pointers are not simulated"),
        ("call.uni;", "calls through pointers are not simulated"),
        ("call.uni twice;", "twice calls itself, and recursion is not simulated"),
        ("call.uni ping;", "ping calls itself, and recursion is not simulated"),
        ("call.uni vprintf, (wide, wide);", "its result and arguments have 4 and 8 and 8 bytes"),
        ("call.uni (wide), vprintf, (wide, wide);", "its result and arguments have 4 and 8 and 8"),
        ("call.uni free, (7);", "its result and arguments have 8 bytes"),
    )

    @pytest.mark.parametrize(("call", "words"), CALLS)
    def test_refused_when_reached(self, call, words):
        body = f"""
        proto: .callprototype (.param .b32 _) _ (.param .b32 _);
        .param .b32 one; .param .b64 wide;
        setp.gt.u32 %p, %thread, 40;
        @!%p bra OVER;
        {call}
        OVER:
        """
        launch(body, self.FUNCTIONS, threads=32)
        with pytest.raises(UnsupportedInstruction, match=words) as caught:
            launch(body, self.FUNCTIONS, threads=64)
        assert caught.value.opcode in ("call", "call.uni")


class TestAssert:
    BEFORE = text("expression", "x[i] > 0") + text("file", "a.cu") + text("function", "void k()")
    BODY = """
    setp.ne.u32 %p, %thread, 5;
    @%p bra HOLDS;
    .param .b64 param0; .param .b64 param1; .param .b32 param2; .param .b64 param3;
    .param .b64 param4;
    mov.u64 %rd0, expression;
    cvta.global.u64 %rd0, %rd0;
    st.param.b64 [param0], %rd0;
    mov.u64 %rd0, file;
    st.param.b64 [param1], %rd0;
    st.param.b32 [param2], 12;
    mov.u64 %rd0, function;
    st.param.b64 [param3], %rd0;
    st.param.b64 [param4], 1;
    call.uni __assertfail, (param0, param1, param2, param3, param4);
    HOLDS:
    """

    def test_it_stops_the_kernel_with_expression_file_and_line(self):
        with pytest.raises(AssertError) as caught:
            launch(self.BODY, self.BEFORE)
        assert str(caught.value).startswith(
            "assertion failed: `x[i] > 0` at a.cu:12 in void k()\n  at "
        )
        assert caught.value.thread.lane == 5

    def test_it_is_collected(self):
        run = launch(self.BODY, self.BEFORE, keep_going=True)
        (fault,) = run.faults
        assert isinstance(fault, AssertError)
        assert fault.count == 1

    def test_one_that_holds_says_nothing(self):
        assert not launch(self.BODY, self.BEFORE, threads=5, keep_going=True).faults


class TestPrintf:
    """A call as nvcc makes it: arguments in a buffer in local memory, each at a multiple of its
    size, floats as doubles."""

    CALL = """
    .local .align 8 .b8 buffer[64];
    .param .b64 format; .param .b64 arguments; .param .b32 result;
    mov.u64 %rd0, buffer;
    cvta.local.u64 %rd1, %rd0;
    {stores}
    st.param.b64 [arguments], %rd1;
    mov.u64 %rd0, form;
    cvta.global.u64 %rd0, %rd0;
    st.param.b64 [format], %rd0;
    call.uni (result), vprintf, (format, arguments);
    ld.param.b32 %r0, [result];
    """

    def printed(self, form: str, *stores: str, before: str = "", threads: int = 1) -> str:
        body = self.CALL.replace("{stores}", "\n".join(stores))
        output = io.StringIO()
        launch(body, text("form", form) + before, threads, output=output)
        return output.getvalue()

    def test_lanes_print_in_order(self):
        store = "st.local.u32 [%rd0], %thread;"
        assert self.printed("%d ", store, threads=40) == "".join(f"{i} " for i in range(40))

    def test_arguments_stand_at_multiples_of_their_sizes(self):
        got = self.printed(
            "%c|%f|%d|%lld|%5.1e|%hhd%%\n",
            "st.local.u32 [%rd0], 65;",
            "st.local.f64 [%rd0+8], 0d3FF8000000000000;",
            "st.local.u32 [%rd0+16], -7;",
            "st.local.u64 [%rd0+24], -8589934592;",
            "st.local.f64 [%rd0+32], 0dC059000000000000;",
            "st.local.u32 [%rd0+40], 511;",
        )
        assert got == "A|1.500000|-7|-8589934592|-1.0e+02|-1%\n"

    def test_strings_and_pointers(self):
        got = self.printed(
            "<%-6s><%.2s><%s><%p><%p>",
            "mov.u64 %rd0, word;",
            "st.u64 [%rd1], %rd0;",
            "st.u64 [%rd1+8], %rd0;",
            "st.u64 [%rd1+16], 0;",
            "st.u64 [%rd1+24], 255;",
            "st.u64 [%rd1+32], 0;",
            before=text("word", "h\u00e9y"),
        )
        # Widths and precisions are of bytes.
        assert got == "<h\u00e9y  ><h\ufffd><(null)><0xff><(nil)>"

    def test_it_returns_the_number_of_arguments(self):
        body = self.CALL.replace("{stores}", "st.local.v2.u32 [%rd0], {1, 2};")
        body += "setp.ne.u32 %p, %r0, 2;\n@%p trap;"
        launch(body, text("form", "%d and %d"), 1, output=io.StringIO())

    def test_to_standard_output(self, capsys):
        launch(self.CALL.replace("{stores}", ""), text("form", "hello\n"), 2)
        assert capsys.readouterr().out == "hello\nhello\n"

    def test_a_string_outside_of_memory_is_a_fault(self):
        with pytest.raises(OutOfBoundsError):
            self.printed("%s", "st.u64 [%rd1], 64;")
        with pytest.raises(OutOfBoundsError):
            self.printed("%d", "mov.u64 %rd1, 0;")


class TestHeap:
    MALLOC = """
    .param .b64 size; .param .b64 result;
    st.param.b64 [size], {size};
    call.uni (result), malloc, (size);
    ld.param.b64 %rd0, [result];
    """
    FREE = "st.param.b64 [size], %rd0;\ncall.uni free, (size);\n"

    def test_each_thread_has_its_own(self):
        body = self.MALLOC.replace("{size}", "8") + """
        st.u32 [%rd0+4], %thread;
        bar.sync 0;
        ld.u32 %r0, [%rd0+4];
        setp.ne.u32 %p, %r0, %thread;
        @%p trap;
        """ + self.FREE  # fmt: skip
        memory = DeviceMemory()
        for _ in range(2):
            launch(body, threads=64, memory=memory)

    def test_what_does_not_fit_is_a_null_pointer(self):
        check = "setp.ne.u64 %p, %rd0, 0;\n@%p trap;"
        launch(self.MALLOC.replace("{size}", "9000000") + check, threads=1)
        launch(self.MALLOC.replace("{size}", "0") + check, threads=1)
        launch(self.MALLOC.replace("{size}", "8000000") + check.replace("ne", "eq"), threads=1)

    def test_what_is_free_is_outside(self):
        body = self.MALLOC.replace("{size}", "8") + self.FREE
        with pytest.raises(OutOfBoundsError, match=r"ld\.u32"):
            launch(body + "ld.u32 %r0, [%rd0];", threads=1)
        with pytest.raises(OutOfBoundsError, match="what is free already"):
            launch(body + self.FREE, threads=1)
        again = body + self.MALLOC.replace(".param .b64 size; .param .b64 result;", "")
        launch(again.replace("{size}", "8") + "st.u32 [%rd0], 1;", threads=1)

    def test_a_null_pointer_may_be_freed(self):
        launch(".param .b64 size;\nmov.u64 %rd0, 0;\n" + self.FREE, threads=1)


REGISTERS = """
.func (.reg .pred out, .reg .u32 twice) f(.reg .pred in, .reg .u32 x)
{
    add.u32 x, x, x;
    mov.u32 twice, x;
    not.pred out, in;
    @in ret;
    add.u32 twice, twice, 1;
    ret;
}
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("call (%q, %d), f, (%p, %x);", [10, 111]),
        ("call (%q, %d), f, (%p, 7);", [14, 115]),
        ("mov.u32 %d, 3; @%p call (%q, %d), f, (%p, %x);", [10, 103]),
        ("call (%q, %x), f, (%p, %x); call (%p, %d), f, (%q, %x);", [21, 122]),
    ],
)
def test_values_in_registers_predicates_too(call, expected):
    """ptxas passes no predicates, but inlines nothing else either: the grammar has them."""
    body = f"""
    setp.eq.u32 %p, %thread, 0;
    mov.u32 %x, 5;
    setp.ne.u32 %q, %thread, 0;
    {call}
    @%q add.u32 %d, %d, 100;
    """
    declarations = ".reg .pred %p, %q; .reg .b32 %x;"
    found = evaluate(body, {}, "u32", declarations, threads=2, before=REGISTERS)
    np.testing.assert_array_equal(found, expected)
