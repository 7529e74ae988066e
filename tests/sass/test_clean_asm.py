"""clean_asm.sh: listings without what moves when an instruction does."""

from __future__ import annotations

import difflib
import re
import subprocess
from pathlib import Path

import pytest
from listing_files import (
    LIVE_FORMATS,
    NVDISASM_FORMATS,
    SEVERAL,
    code_sizes,
    extract,
    listing,
    run_nvidia,
)

from flash_helpers.sass.read import reader
from flash_helpers.sass.read.listing import parse_listing
from flash_helpers.sass.show import clean_listing
from flash_helpers.sass.show.extract import listing_text
from flash_helpers.sass.show.listing_counts import load_counts

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools/build/clean_asm.sh"
# what is left of code: instructions, and the labels that they name
CODE = re.compile(r"        [@A-Z].*;|\.L_x_\d+:")


@pytest.fixture(scope="module")
def cubin(tmp_path_factory) -> Path:
    """Four kernels for sm_80."""
    return extract(SEVERAL, "sm_80", tmp_path_factory.mktemp("cubin"))[0]


@pytest.fixture(scope="module")
def with_lines(tmp_path_factory, package) -> Path:
    """A kernel of the library, which has line tables."""
    name = "v1_bf16_d128_Br64_Bc64_w4_async_Q0_K0_V0"
    folder = tmp_path_factory.mktemp("library")
    return extract(package / "libflash_attention.so", name, folder)[-1]


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *arguments], input=stdin, capture_output=True, text=True)


def clean(text: str) -> str:
    """What the tool prints, without a process for each."""
    return clean_listing.clean(text, "listing")


def code(text: str) -> list[str]:
    """Instructions and labels of a cleaned listing."""
    return [line for line in text.splitlines() if CODE.fullmatch(line)]


def loop(*body: str) -> str:
    """A listing as cuobjdump -sass prints it, of a loop with a body."""
    instructions = [
        "MOV R1, c[0x0][0x28] ;",
        *body,
        "@P0 BRA {loop:#x} ;",
        "EXIT ;",
        "BRA {end:#x};",
    ]
    last = 0x10 * (len(instructions) - 1)
    lines = ["\tcode for sm_90", "\t\tFunction : k"]
    for number, text in enumerate(instructions):
        text = text.format(loop=0x10, end=last)
        lines.append(f"        /*{0x10 * number:04x}*/   {text}   /* 0x{number:016x} */")
        lines.append(f"{'':60}/* 0x000fe20000000f00 */")
    return "\n".join(lines) + "\n"


class TestCleaned:
    def test_has_nothing_left_that_moves(self, with_lines) -> None:
        for options in (*NVDISASM_FORMATS.values(), *LIVE_FORMATS.values()):
            text = clean(listing(with_lines, *options))
            assert not re.search(r"/\*|\*/|//", text)
            assert not re.search(r"[ \t]$", text, re.MULTILINE)
            assert "\n\n\n" not in text

    def test_has_every_instruction(self, cubin) -> None:
        text = clean(listing(cubin, "-c", "-hex"))
        n_instructions = len([line for line in code(text) if line.endswith(";")])
        assert n_instructions == sum(code_sizes(cubin).values())

    @pytest.mark.parametrize("options", NVDISASM_FORMATS.values(), ids=NVDISASM_FORMATS)
    def test_is_the_same_for_every_format_of_nvdisasm(self, with_lines, options) -> None:
        expected = code(clean(listing(with_lines, "-c")))
        assert code(clean(listing(with_lines, *options))) == expected

    @pytest.mark.parametrize("options", LIVE_FORMATS.values(), ids=LIVE_FORMATS)
    def test_lacks_only_nops_where_live_registers_were_listed(self, with_lines, options) -> None:
        expected = code(clean(listing(with_lines, "-c")))
        found = code(clean(listing(with_lines, *options)))
        assert found == expected[: len(found)]
        assert set(expected[len(found) :]) == {"        NOP;"}

    def test_is_the_same_for_cuobjdump_and_this_repository(self, with_lines) -> None:
        expected = code(clean(listing(with_lines, "-c")))
        assert code(clean(run_nvidia("cuobjdump", "-sass", with_lines))) == expected
        (kernel,) = reader.load_kernels(with_lines)
        for offsets in (True, False):
            assert code(clean(listing_text(kernel, offsets))) == expected

    def test_of_several_functions_differs_in_what_is_called_alone(self, cubin) -> None:
        dumped = code(clean(run_nvidia("cuobjdump", "-sass", "-fun", "_Z6spillsPfi", cubin)))
        listed = clean(listing(cubin, "-c"))
        _, _, rest = listed.partition("\t.section\t.text._Z6spillsPfi")
        assert code(rest)[: len(dumped)] == dumped

    def test_is_not_changed_by_cleaning_it_again(self, cubin) -> None:
        once = clean(listing(cubin, "-c", "-hex"))
        assert clean(once) == once

    def test_counts_as_before(self, cubin, tmp_path) -> None:
        path = tmp_path / "clean.sass"
        path.write_text(clean(run_nvidia("cuobjdump", "-sass", cubin)))
        counts = load_counts(cubin)
        assert load_counts(path).by_bucket == counts.by_bucket

    def test_keeps_the_names_of_functions_and_architectures(self, cubin) -> None:
        for program, option in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
            functions = parse_listing(clean(run_nvidia(program, option, cubin)), "listing")
            assert {(f.architecture, f.name) for f in functions} == {
                ("sm_80", name) for name in code_sizes(cubin)
            }

    def test_may_have_had_the_line_ends_of_windows(self, cubin) -> None:
        text = run_nvidia("cuobjdump", "-sass", cubin)
        result = subprocess.run(
            [TOOL, "-"], input=text.replace("\n", "\r\n").encode(), capture_output=True
        )
        assert result.stdout.decode() == clean(text)


class TestDiff:
    def test_of_one_more_instruction_is_one_line(self) -> None:
        before = clean(loop("FADD R2, R2, R3 ;")).splitlines()
        after = clean(loop("FADD R2, R2, R3 ;", "FMUL R2, R2, R4 ;")).splitlines()
        changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert changes == ["+         FMUL R2, R2, R4;"]

    def test_of_one_more_jump_leaves_the_labels_before_it(self) -> None:
        before = clean(loop("FADD R2, R2, R3 ;")).splitlines()
        after = clean(loop("FADD R2, R2, R3 ;", "@P1 BRA {end:#x} ;")).splitlines()
        changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert changes == ["+         @P1 BRA `(.L_x_2);"]

    def test_shows_a_jump_that_goes_elsewhere(self) -> None:
        body = ("FADD R2, R2, R3 ;", "FMUL R2, R2, R4 ;")
        before = loop(*body)
        after = before.replace("@P0 BRA 0x10 ;", "@P0 BRA 0x20 ;")
        assert before != after
        assert clean(before) != clean(after)


class TestLabels:
    def test_stand_where_jumps_go(self) -> None:
        assert code(clean(loop("FADD R2, R2, R3 ;"))) == [
            "        MOV R1, c[0x0][0x28];",
            ".L_x_1:",
            "        FADD R2, R2, R3;",
            "        @P0 BRA `(.L_x_1);",
            "        EXIT;",
            ".L_x_2:",
            "        BRA `(.L_x_2);",
        ]

    def test_that_nothing_names_are_left_out(self) -> None:
        text = """\
        .section        .text.k,"ax",@progbits
.L_x_7:
        /*0000*/  MOV R1, R2 ;
.L_x_9:
        /*0010*/  BRA `(.L_x_9) ;
"""
        assert code(clean(text)) == ["        MOV R1, R2;", ".L_x_1:", "        BRA `(.L_x_1);"]

    def test_at_one_place_become_one(self) -> None:
        text = """\
        .section        .text.k,"ax",@progbits
.L_x_7:
.L_x_8:
        /*0000*/  @P0 BRA `(.L_x_7) ;
        /*0010*/  BRA `(.L_x_8) ;
"""
        assert code(clean(text)) == [
            ".L_x_1:",
            "        @P0 BRA `(.L_x_1);",
            "        BRA `(.L_x_1);",
        ]

    def test_are_numbered_in_each_function_from_its_start(self, cubin) -> None:
        listed = clean(listing(cubin, "-c"))
        for part in listed.split("\t.section\t.text.")[1:]:
            labels = [line for line in code(part) if line.startswith(".L_x_")]
            assert labels == [f".L_x_{n}:" for n in range(1, len(labels) + 1)]
            assert labels

    def test_name_no_number_that_is_no_address(self) -> None:
        text = "\t\tFunction : k\n/*0000*/ MOV R1, 0x10 ;\n/*0010*/ CALL.ABS.NOINC 0x0 ;\n"
        assert code(clean(text)) == ["        MOV R1, 0x10;", "        CALL.ABS.NOINC 0x0;"]


class TestTool:
    def test_reads_a_file_and_writes_another(self, tmp_path) -> None:
        source, output = tmp_path / "a listing.sass", tmp_path / "clean.txt"
        source.write_text(loop("FADD R2, R2, R3 ;"))
        result = run(source, "-o", output)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert output.read_text() == run(source).stdout == clean(source.read_text())
        assert sorted(tmp_path.iterdir()) == [source, output]

    def test_reads_a_pipe_that_has_a_name(self, tmp_path) -> None:
        source = tmp_path / "listing.sass"
        source.write_text(loop())
        result = subprocess.run(
            ["bash", "-c", f"{TOOL} <(cat {source})"], capture_output=True, text=True
        )
        assert (result.returncode, result.stdout) == (0, clean(loop()))

    def test_leaves_the_file_as_it_was_when_it_fails(self, tmp_path) -> None:
        output = tmp_path / "clean.txt"
        output.write_text("before")
        assert run("-", "-o", output, stdin="nothing").returncode == 2
        assert output.read_text() == "before"
        assert list(tmp_path.iterdir()) == [output]

    @pytest.mark.parametrize(
        ("stdin", "message"),
        [
            ("", "standard input holds no SASS"),
            ("# Words\n\nand more words\n", "standard input holds no SASS"),
            (
                "/*0000*/ MOV R1, R2 ;\n/*0010*/ MOV R1,",
                "standard input line 2: not an instruction",
            ),
            ("ld.param.u64 %rd1, [a];\n", "line 1: not an instruction"),
            ("/*0000*/ NOP ;\n\0", "holds bytes that no listing does"),
            ("\x7fELF\2\1\1", "is an object file"),
        ],
    )
    def test_refuses_what_is_no_listing(self, stdin, message) -> None:
        result = run("-", stdin=stdin)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_refuses_an_object_file(self) -> None:
        result = run(SEVERAL)
        assert (result.returncode, result.stdout) == (2, "")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "usage:"),
            (["--nix"], "usage:"),
            (["nix.sass"], "nix.sass cannot be read"),
            ([str(TOOL.parent)], "cannot be read"),
            (["a", "b"], "one listing at a time: a or b"),
            (["a", "-o"], "argument -o: expected one argument"),
        ],
    )
    def test_refuses_wrong_usage(self, arguments, message) -> None:
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr

    def test_refuses_a_folder_that_is_not_there(self, tmp_path) -> None:
        result = run("-", "-o", tmp_path / "nix" / "a", stdin=loop())
        assert result.returncode == 2
        assert "cannot be written" in result.stderr

    def test_explains_itself(self) -> None:
        result = run("--help")
        assert result.returncode == 0
        assert "examples:" in result.stdout
        assert "exit status:" in result.stdout
