"""Every text ends in a documented error, and soon: whoever made it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mutants import Hang, kernels_of, mutants, outcome, time_limit
from ptx_snippets import entry, run_body

from flash_helpers.ptx import (
    DeviceMemory,
    LaunchError,
    OutOfBoundsError,
    PtxError,
    PtxSyntaxError,
    UnsupportedInstruction,
    load_ptx,
)

KERNELS = Path(__file__).parent / "kernels"
DECLARATIONS = ".reg .pred %p, %q; .reg .b32 %a, %b; .reg .b64 %rd; .reg .f32 %f;"
SECONDS = 20


def launch(body: str, before: str = "", parameters: str = "", **options: object) -> None:
    text = entry(body, parameters, DECLARATIONS, before)
    with time_limit(SECONDS):
        kernel = load_ptx(text).kernel("k")
        arguments = [bytes(min(v.size, 1 << 16)) for v in kernel.function.parameters]
        kernel.launch(grid=1, block=32, args=arguments, **options)


def nested_loops(depth: int) -> str:
    heads = "".join(f"L{i}: add.u32 %a, %a, 1;\n" for i in range(depth))
    ends = "".join(f"setp.lt.u32 %p, %a, 9; @%p bra L{i};\n" for i in reversed(range(depth)))
    return f"mov.u32 %a, 0;\n{heads}{ends}"


def inlined(depth: int) -> str:
    chain = (f".loc 1 {i} 1, function_name F, inlined_at 1 {i - 1} 1\n" for i in range(2, depth))
    return ".loc 1 1 1\n" + "".join(chain) + "mov.u32 %a, 1;\n"


BODIES = {
    "a list without its last operand": ("add.u32 {%a,}, 1;", "an operand is missing"),
    "a register with a sign in its name": ("add.u32 %+a, 1;", "cannot read"),
    "a literal of octal digits that are none": ("add.u32 %a, %a, 09;", "cannot read"),
    "registers whose number has no end": (".reg .b64 %rd<7;", "cannot read the register"),
    "a size by a name": (".shared .b8 t[many];", "'many' is no integer"),
    "a list of targets that are not there": (
        "ts: .branchtargets NOWHERE;\nbrx.idx %a, ts;",
        "does not exist",
    ),
    "a guard that is no predicate": ("@%a bra END; END:", "the guard %a is no predicate"),
    "of an instruction": ("@!%b mov.u32 %a, 1;", "the guard %b is no predicate"),
    "of one without effect": ("@%rd membar.gl;", "the guard %rd is no predicate"),
    "of one that ends a block": ("@%a ret;", "the guard %a is no predicate"),
    "a guard that is no register": ("@%tid ret;", "%tid is not declared"),
    "a size that is no number": (".shared .b8 s[08];", "'08' is no integer"),
    "a negative size": (".shared .b8 s[-8];", "cannot read the declaration"),
    "a size of thousands of digits": (f".shared .b8 s[{'9' * 5000}];", "is no integer of at most"),
    "digits of another script": ("mov.u32 %a, \u0663;", "cannot read the operand"),
    "a literal beyond 64 bits": ("mov.u64 %rd, 18446744073709551616;", "is no integer of at most"),
    "an offset beyond 64 bits": (
        "ld.global.u32 %a, [%rd+99999999999999999999];",
        r"'\+99999999999999999999': an integer of more than 64 bits",
    ),
    "registers without number": (".reg .b32 %r<99999999>;", "more than 262,144 registers in one"),
    "registers of many declarations": (
        "\n".join(f".reg .b32 %r{c}<100000>;" for c in "abc"),
        "more than 262,144 registers in one",
    ),
    "a register declared twice": (".reg .b32 %a;", "registers declared twice"),
    "a label in two places": ("L: L:", "the label L stands in two places"),
    "a branch that is off its label": ("bra L+4; L:", "a branch to a label that does not exist"),
    "a branch to two labels": ("bra L, L; L:", "a branch to a label that does not exist"),
    "vectors in vectors": ("{" * 5000 + "}" * 5000 + ";", "more than 256 braces within braces"),
    "vectors in an operand": (f"mov.b64 %rd, {'{' * 90}%a{'}' * 90};", "cannot read the operand"),
    "brackets in brackets": (f"ld.u32 %a, {'[' * 900}%a{']' * 900};", "cannot read the operand"),
    "alternatives without end": (f"mov.u32 {'|'.join(['%a'] * 2000)};", "cannot read the operand"),
    "a half bracket": ("ld.u32 %a, [;", "cannot read the operand"),
    "blocks in blocks": ("{" * 2000 + "}" * 2000, "more than 256 braces within braces"),
    "calls inlined into each other": (inlined(5000), "more than 256 calls inlined into each"),
    "an instruction without end": (f"mov.u32 %a{', %a' * 9000};", "cannot read the instruction"),
    "an alignment of 3": (".shared .align 3 .b8 s[8];", "an alignment of 3 is no power of two"),
    "an alignment of 2 MiB": (
        ".shared .align 2097152 .b8 s[8];",
        "no power of two up to 1,048,576",
    ),
    "a variable of predicates": (".local .pred s[8];", "the attribute .pred is not known"),
    "an initial value of shared memory": (".shared .u32 s = 1;", r"in \.shared has no initial"),
}

VARIABLES = {
    "more values than elements": (".u32 x[2] = {1, 2, 3}", "3 initial values for 2 elements"),
    "rows that leave out elements": (".u32 x[2][2] = {{1}, {2}}", "rows .* leave out elements"),
    "a fraction of an integer": (".u32 x = 1.5", r"1\.5 is no initial value of a \.u32"),
    "an integer for a float": (".f32 x = 5", r"5 is no initial value of a \.f32"),
    "bits of another width": (".f64 x = 0f3F800000", r"no initial value of a \.f64"),
    "a float that is too large": (".f32 x = 1.0e300", r"no initial value of a \.f32"),
    "an integer beyond 64 bits": (".u64 x = 0x10000000000000000", "is no integer of at most 64"),
    "an address that is nowhere": (".u64 x = nowhere+8", "names nowhere, which is not"),
    "a mask with holes": (".u8 x = 0xF0F(x)", "0xF0F is no mask of 8 bits"),
    "a mask of nothing": (".u8 x = 0x0(x)", "0x0 is no mask of 8 bits"),
    "a size in the middle": (".u32 x[2][]", "only the first size may be left out"),
}

LAUNCHES = {
    "shared memory": ("mov.u64 %rd, x;", ".shared .b8 x[99999999999];", "", "99999999999 bytes of"),
    "local memory": ("mov.u64 %rd, x;", ".local .b8 x[99999999999];", "", "bytes of local memory"),
    "constants": ("mov.u64 %rd, x;", ".const .b8 x[70000];", "", "70000 bytes of const memory"),
    "variables": ("mov.u64 %rd, x;", ".global .b8 x[9999999999];", "", "bytes of global memory"),
    "parameters": ("", "", ".param .align 4 .b8 p[99999999999]", "99999999999 bytes of parameters"),
}


class TestTexts:
    @pytest.mark.parametrize(("body", "words"), BODIES.values(), ids=BODIES)
    def test_malformed_bodies_are_syntax_errors(self, body, words) -> None:
        with pytest.raises(PtxSyntaxError, match=words):
            launch(body, before='.file 1 "k.cu"')

    @pytest.mark.parametrize(("declaration", "words"), VARIABLES.values(), ids=VARIABLES)
    def test_malformed_variables_are_syntax_errors(self, declaration, words) -> None:
        with pytest.raises(PtxSyntaxError, match=words):
            launch("mov.u64 %rd, x;", f".global {declaration};")

    @pytest.mark.parametrize(
        ("body", "before", "parameters", "words"), LAUNCHES.values(), ids=LAUNCHES
    )
    def test_what_no_gpu_has_room_for_is_a_launch_error(
        self, body, before, parameters, words
    ) -> None:
        with pytest.raises(LaunchError, match=words):
            launch(body, before, parameters)

    @pytest.mark.parametrize("line", [".version", ".target", ".file one"])
    def test_directives_of_a_module(self, line) -> None:
        with pytest.raises(PtxSyntaxError, match=rf"PTX line 5: .*{line}"):
            load_ptx(entry("", before=f"\n{line}"))

    @pytest.mark.parametrize("end", [30, 60, 85, 100, -3])
    def test_that_are_cut_off_name_a_line(self, end) -> None:
        with pytest.raises(PtxSyntaxError, match="PTX line"):
            load_ptx(entry("mov.u32 %a, %tid.x;", "", DECLARATIONS)[:end])

    def test_that_are_no_ptx(self) -> None:
        with pytest.raises(PtxSyntaxError, match=r"not a PTX|no \.version"):
            load_ptx("hello\nworld\n")

    @pytest.mark.parametrize(
        ("directive", "words"),
        [("maxntid 0, 1, 1", "at most 0"), (f"maxntid {'9' * 5000}", "is no integer of at most")],
    )
    def test_directives_of_a_kernel(self, directive, words) -> None:
        text = entry("").replace("k()", f"k() .{directive}")
        with pytest.raises(PtxError, match=words):
            load_ptx(text).kernel("k").launch(1, 32)

    @pytest.mark.parametrize(
        "text",
        ["/*" * 100_000, "{" * 100_000, '"' * 100_001, ".entry k(" * 20_000, ":" * 100_000,
         " " * 200_000 + "x", ".global .b8 x" + " " * 50_000 + "[" * 50_000 + ";",
         ".entry k() {" + "{,{,{," * 30_000 + ";}", ".file 1 " * 50_000, "\0\n"],
    )  # fmt: skip
    def test_long_nonsense_is_refused_soon(self, text) -> None:
        with time_limit(SECONDS), pytest.raises(PtxError):
            load_ptx(entry("") + text + "\n").kernel("nobody")

    def test_literals_of_floating_point_are_no_integers(self) -> None:
        for body in ("mov.u32 %a, 1.5;", "add.s32 %a, %a, 1.0e999;", "ld.u32 %a, [1.5];",
                     "shl.b32 %a, %a, 1.5;", "lop3.b32 %a, %a, %a, %a, 1.0e999;",
                     "cp.async.wait_group 1.0e999;", "mov.b32 %a, 0d3FF0000000000000;",
                     "cp.async.ca.shared.global [%a], [%rd], 1.0e999;"):  # fmt: skip
            with pytest.raises(PtxError, match="PTX line"):
                launch(body)


class TestRuns:
    def test_addresses_wrap_at_64_bits(self) -> None:
        for address in ("%rd+18446744073709551615", "%rd+-9223372036854775808", "x-4096",
                        "18446744073709551612", "x+18446744073709551612"):  # fmt: skip
            with pytest.raises(OutOfBoundsError):
                launch(f"mov.u64 %rd, 5; ld.u8 %a, [{address}];", ".global .b32 x;")
        launch("mov.u64 %rd, x-4; ld.u32 %a, [%rd+4];", ".global .b32 x;")

    def test_loops_inside_each_other(self) -> None:
        launch(nested_loops(60))
        with pytest.raises(UnsupportedInstruction, match="more than 64 loops inside each other"):
            launch(nested_loops(2000))

    def test_loops_beside_each_other(self) -> None:
        loops = "".join(f"L{i}: setp.ne.u32 %p, %a, %a; @%p bra L{i};\n" for i in range(5000))
        launch("mov.u32 %a, 0;\n" + loops)

    def test_an_indexed_branch_beyond_its_list_is_out_of_bounds(self) -> None:
        body = "mov.u32 %a, %tid.x; ts: .branchtargets A, B;\nbrx.idx %a, ts; A: B:"
        launch(body.replace("%tid.x", "1"))
        with pytest.raises(OutOfBoundsError, match=r"target 2 of a list of 2"):
            launch(body)
        run = run_body(body, ".reg .b32 %a;", threads=32, keep_going=True)
        assert [fault.count for fault in run.faults] == [30]

    def test_waiting_for_more_groups_than_there_are_is_no_wait(self) -> None:
        launch("cp.async.commit_group; cp.async.wait_group 18446744073709551615;")

    def test_the_largest_alignment_counts_in_global_memory(self) -> None:
        memory = DeviceMemory()
        assert memory.allocate(1, 1 << 20) % (1 << 20) == 0
        address = memory.upload(np.arange(4))
        assert memory.download(address, 4, np.int64).tolist() == [0, 1, 2, 3]
        behind = memory.upload(np.arange(4), behind=4)
        assert behind % 256 == 4
        assert memory.download(behind, 4, np.int64).tolist() == [0, 1, 2, 3]


def check_mutants(paths: list[Path], seeds: range) -> Counter[str]:
    """How many mutants end how. A traceback or a hang is told with the mutant's name."""
    outcomes: Counter[str] = Counter()
    for mutant in mutants(kernels_of(paths), seeds):
        try:
            with time_limit(SECONDS):
                outcomes[outcome(mutant, max_instructions=200)] += 1
        except Hang:
            pytest.fail(f"{mutant} does not end")
        except Exception as error:
            raise AssertionError(f"{mutant} is a traceback") from error
    return outcomes


class TestMutants:
    """Mutants of the small kernels here; of all of them and the package's, where that is asked
    for."""

    @pytest.mark.slow
    def test_end_in_documented_errors_or_run(self) -> None:
        paths = [KERNELS / f"{name}.ptx" for name in ("arithmetic", "gemm", "parallel")]
        outcomes = check_mutants(paths, range(500))
        # of each kind enough to say that more than the reader was tried
        assert outcomes["PtxSyntaxError"] < 400 and outcomes["runs"] > 30
        assert sum(outcomes.values()) == 500 and len(outcomes) >= 6

    @pytest.mark.mutants
    @pytest.mark.parametrize("part", range(20))
    def test_ten_thousand_of_them_do(self, part: int, package) -> None:
        shipped = sorted((package / "ptx").glob("*.ptx"))
        assert shipped, "the package holds no PTX: build it first"
        small = sorted(KERNELS.glob("*.ptx"))
        outcomes = check_mutants(small, range(450 * part, 450 * (part + 1)))
        outcomes += check_mutants(shipped, range(50 * part, 50 * (part + 1)))
        print(dict(outcomes.most_common()))
        assert sum(outcomes.values()) == 500
