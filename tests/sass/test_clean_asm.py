"""clean_asm.sh: listings without what moves when an instruction does."""

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


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *arguments], input=stdin, capture_output=True, text=True)


def clean(text: str) -> str:
    """The output of the tool, without a process for each."""
    return clean_listing.clean(text, "listing")


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
    def test_is_the_same_for_every_format(self, v1) -> None:
        expected = clean(listing(v1, "-c"))
        assert not re.search(r"/\*|\*/|//|[ \t]$", expected, re.MULTILINE)
        for options in NVDISASM_FORMATS.values():
            assert clean(listing(v1, *options)) == expected
        assert clean(run_nvidia("cuobjdump", "-sass", v1)) == expected
        (kernel,) = reader.load_kernels(v1)
        for offsets in (True, False):
            assert clean(listing_text(kernel, offsets)) == expected

    @pytest.mark.parametrize("options", LIVE_FORMATS.values(), ids=LIVE_FORMATS)
    def test_lacks_only_nops_where_live_registers_were_listed(self, v1, options) -> None:
        expected = clean(listing(v1, "-c")).splitlines()
        found = clean(listing(v1, *options)).splitlines()
        assert found == expected[: len(found)]
        assert set(expected[len(found) :]) == {"        NOP;"}

    def test_keeps_functions_instructions_and_architecture(self, cubin, tmp_path) -> None:
        for program, option in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
            once = clean(run_nvidia(program, option, cubin))
            assert clean(once) == once
            functions = parse_listing(once, "listing")
            assert {f.name: len(f.lines) for f in functions} == code_sizes(cubin)
            assert {f.architecture for f in functions} == {"sm_80"}
            path = tmp_path / program
            path.write_text(once)
            assert load_counts(path).by_bucket == load_counts(cubin).by_bucket

    def test_may_have_had_the_line_ends_of_windows(self, cubin) -> None:
        text = run_nvidia("cuobjdump", "-sass", cubin)
        data = text.replace("\n", "\r\n").encode()
        result = subprocess.run([TOOL, "-"], input=data, capture_output=True)
        assert result.stdout.decode() == clean(text)


class TestDiff:
    @pytest.mark.parametrize(
        ("more", "changes"),
        [
            ("FMUL R2, R2, R4 ;", ["+         FMUL R2, R2, R4;"]),
            # the labels before a new jump stay
            ("@P1 BRA {end:#x} ;", ["+         @P1 BRA `(.L_x_2);"]),
        ],
    )
    def test_of_one_more_instruction_is_one_line(self, more: str, changes: list[str]) -> None:
        before = clean(loop("FADD R2, R2, R3 ;")).splitlines()
        after = clean(loop("FADD R2, R2, R3 ;", more)).splitlines()
        assert [line for line in difflib.ndiff(before, after) if line[0] in "+-"] == changes

    def test_shows_a_jump_that_goes_elsewhere(self) -> None:
        before = loop("FADD R2, R2, R3 ;", "FMUL R2, R2, R4 ;")
        after = before.replace("@P0 BRA 0x10 ;", "@P0 BRA 0x20 ;")
        assert before != after
        assert clean(before) != clean(after)


SECTION = '        .section        .text.k,"ax",@progbits\n'


class TestLabels:
    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            (
                loop("FADD R2, R2, R3 ;"),
                ["MOV R1, c[0x0][0x28];", ".L_x_1:", "FADD R2, R2, R3;", "@P0 BRA `(.L_x_1);",
                 "EXIT;", ".L_x_2:", "BRA `(.L_x_2);"],
            ),
            # one that nothing names is left out
            (
                f"{SECTION}.L_x_7:\n/*0000*/ MOV R1, R2 ;\n.L_x_9:\n/*0010*/ BRA `(.L_x_9) ;\n",
                ["MOV R1, R2;", ".L_x_1:", "BRA `(.L_x_1);"],
            ),
            # two at one place become one
            (
                f"{SECTION}.L_x_7:\n.L_x_8:\n/*0000*/ @P0 BRA `(.L_x_7) ;\n"
                "/*0010*/ BRA `(.L_x_8) ;\n",
                [".L_x_1:", "@P0 BRA `(.L_x_1);", "BRA `(.L_x_1);"],
            ),
            # numbers that are no addresses stay
            (
                f"{SECTION}/*0000*/ MOV R1, 0x10 ;\n/*0010*/ CALL.ABS.NOINC 0x0 ;\n",
                ["MOV R1, 0x10;", "CALL.ABS.NOINC 0x0;"],
            ),
        ],
    )  # fmt: skip
    def test_stand_where_jumps_go(self, text: str, lines: list[str]) -> None:
        found = clean(text).splitlines()
        assert [line.strip() for line in found if not line.startswith("\t")] == lines

    def test_are_numbered_in_each_function_from_its_start(self, cubin) -> None:
        for part in clean(listing(cubin, "-c")).split("\t.section\t.text.")[1:]:
            labels = re.findall(r"^\.L_x_\d+:$", part, re.MULTILINE)
            assert labels == [f".L_x_{n}:" for n in range(1, len(labels) + 1)]
            assert labels


class TestTool:
    def test_reads_a_file_and_writes_another(self, tmp_path) -> None:
        source, output = tmp_path / "a listing.sass", tmp_path / "clean.txt"
        source.write_text(loop("FADD R2, R2, R3 ;"))
        result = run(source, "-o", output)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert output.read_text() == clean(source.read_text())
        assert sorted(tmp_path.iterdir()) == [source, output]
        assert run("-", "-o", output, stdin="nothing").returncode == 2
        assert output.read_text() == clean(source.read_text())

    def test_reads_a_pipe_that_has_a_name(self, tmp_path) -> None:
        source = tmp_path / "listing.sass"
        source.write_text(loop())
        result = subprocess.run(
            ["bash", "-c", f"{TOOL} <(cat {source})"], capture_output=True, text=True
        )
        assert (result.returncode, result.stdout) == (0, clean(loop()))

    @pytest.mark.parametrize(
        ("arguments", "stdin", "message"),
        [
            (["-"], "", "standard input holds no SASS"),
            (["-"], "/*0000*/ NOP ;\n/*0010*/ MOV R1,", "standard input line 2: not an instr"),
            (["-"], "/*0000*/ NOP ;\n\0", "holds bytes that no listing does"),
            ([SEVERAL], "", "is a fatbin"),
            (["nix.sass"], "", "nix.sass cannot be read"),
            ([TOOL.parent], "", "cannot be read"),
            (["-", "-o", "nix/a"], loop(), "cannot be written"),
            (["a", "b"], "", "one listing at a time: a or b"),
            ([], "", "arguments are required: LISTING"),
        ],
    )
    def test_refuses_what_is_no_listing_and_wrong_usage(self, arguments, stdin, message) -> None:
        result = run(*arguments, stdin=stdin)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert "Traceback" not in result.stderr
