"""Errors of the tools for machine code: a reason on stderr and status 2. Files of another kind are
in tests/console/test_file_kinds.py."""

from collections.abc import Callable, Sequence

import pytest
from fake_backend import load_tool
from sass_text import ARCHITECTURES, DEFAULT

from flash_helpers.runtime.library import library_path
from flash_helpers.sass.show import listing_counts

pytestmark = pytest.mark.slow

OWN = "examples/own_kernel"
BEFORE, AFTER = (f"{OWN}/row_softmax{fixed}.sm_90.cubin" for fixed in ("", "_fixed"))
PLANTED = "tests/sass/kernels"
DISPATCH = f"{PLANTED}/dispatch.sm_90a.cubin#limits"
SEVERAL, ONE = f"{PLANTED}/several.sm_90.cubin", f"{PLANTED}/libone.so"
LIBRARY = str(library_path())
V3 = (LIBRARY, "--kernel", "v3_bf16")

Main = Callable[[Sequence[str]], int]


def main_of(tool: str) -> Main:
    if tool == "count":
        return listing_counts.main
    return load_tool(f"tools/{tool}.py").main


COMPARE, COMPARE_COUNTS = "analysis/compare_kernels", "analysis/compare_sass_instruction_counts"
REPORT, FILTER = "analysis/sass_report", "analysis/ptx_sass_filter"
EXTRACT, EMBEDDED = "build/extract_sass", "build/get_embedded_ptx_from_cubin"
ROWS = [
    (EXTRACT, ["no_such_file"], "no_such_file cannot be read: No such file"),
    (EXTRACT, [f"{PLANTED}/one.o", "--arch", "sm_75"], "no kernel for sm_75, only for sm_80, sm_9"),
    (EXTRACT, [f"{PLANTED}/one.o", "--kernel", "two"], "holds no kernel 'two', only one"),
    (EXTRACT, [f"{PLANTED}/only_ptx.fatbin"], "holds no cubin, only PTX"),
    (EMBEDDED, [f"{PLANTED}/no_lines.sm_90.cubin"], "holds no PTX: compile with -lineinfo"),
    (EMBEDDED, [f"{PLANTED}/only_ptx.fatbin", "--arch", "sm_80"], "only for sm_90"),
    ("count", ["nix.sass"], "nix.sass"),
    ("count", [PLANTED], "directory"),
    ("count", [f"{PLANTED}/one.o"], "choose one with --arch"),
    (COMPARE_COUNTS, [BEFORE, "nix"], "nix"),
    (COMPARE_COUNTS, [f"{ONE}#two", BEFORE], "libone.so holds no kernel 'two', only one, other"),
    (COMPARE_COUNTS, [f"{ONE}#one", BEFORE], "code for sm_80, sm_90: choose one with --arch"),
    (COMPARE_COUNTS, [f"{ONE}@nix#one", BEFORE], "has no member 'nix', only one.sm_80.cubin"),
    (
        FILTER,
        [LIBRARY, "--arch", DEFAULT, "--kernel", "v16", "--fan-out"],
        "such kernels: name one of ",
    ),
    (FILTER, [*V3, "--arch", DEFAULT, "1"], "holds no instruction"),
    (FILTER, [*V3, "--arch", DEFAULT, "999999"], "the nearest that does"),
    (REPORT, ["99"], "the steps are v1 to v"),
    (REPORT, ["7..8"], "names 2 kernels"),
    (REPORT, ["missing.cubin"], "not a file that is there"),
    (COMPARE, ["16", "--arch", "sm_70"], "no kernel is made for sm_70"),
    (REPORT, ["16", "--arch", "sm_70"], "no kernel is made for sm_70"),
    (REPORT, ["16", "--loop", "3"], "they are 0 to 0"),
    (REPORT, [DISPATCH, "--threads", "257"], "257 threads per block: it was compiled for at most"),
    (REPORT, [f"{ONE}#one", "--arch", "sm_90", "--smem", "8"], "--smem needs --threads: one"),
    (COMPARE, [f"{ONE}#one", "--arch", "sm_90", "--smem", "8"], "--smem needs --threads: one"),
    (REPORT, [BEFORE, "--sms", "1", "--mhz", "1"], "only for kernels of this library"),
    (REPORT, ["16", "--sms", "1", "--mhz", "1", "--seq", "1000"], "1000 is not a multiple of B_r "),
    (REPORT, ["s3", "--sms", "1", "--mhz", "1"], "s3_bf16_w8_c4 has no tensor instructions"),
    (REPORT, ["16", "--sms", "1", "--mhz", "1", "--width", "1000"], "--width is an option of rows"),
    (REPORT, ["16", "--sms", "1", "--mhz", "1", "--heads", "0"], "heads 0 is not positive"),
    (REPORT, ["16", "--sms", "1", "--mhz", "1", "--len-k", "64"], "with len_k 64 is not supported"),
    (COMPARE, ["s1", "s2", "--seq", "512"], "--seq is an option of attention_forward"),
    (COMPARE, ["1", "2", "--width", "512"], "--width is an option of rows"),
    (REPORT, [LIBRARY, "--arch", DEFAULT, "--kernel", "v16_bf16"], "such kernels: name one of v16"),
    (REPORT, [f"{ONE}@nix#one"], "has no member 'nix', only one.sm_80.cubin"),
    (COMPARE, ["99"], "the steps are v1 to v"),
    (COMPARE, ["v7_bf16"], "is not a config's short form"),
    (COMPARE, ["6", "--config", "B_r=128"], "no such config of v6 is listed"),
    (COMPARE, ["8", "--config", "width=1"], "expected a field and its value"),
    (COMPARE, ["8", "--results", "nowhere.json"], "nowhere.json"),
    (COMPARE, ["nowhere/a.so#f", AFTER], "nowhere/a.so is not a file that is there"),
    (COMPARE, [f"{BEFORE}#none", AFTER], "holds no kernel 'none', only row_softmax"),
    (COMPARE, [f"{OWN}/compile.sh", AFTER], "is not an ELF file"),
    (COMPARE, [BEFORE, "9", "--source"], "--source compares the files of steps"),
    (COMPARE, [BEFORE, AFTER, "--arch", "sm_80"], "holds no kernel for sm_80"),
    (COMPARE, [BEFORE, AFTER, "--threads", "2000"], "2000"),
    (COMPARE, [SEVERAL, AFTER], "holds 4 such kernels: name one of"),
]
if len(ARCHITECTURES) > 1:
    told = ", ".join(sorted(ARCHITECTURES))
    ROWS += [
        (REPORT, [*V3], f"{told}: choose one with --arch"),
        (FILTER, [*V3, "--fan-out"], f"{told}: choose one with --arch"),
    ]


@pytest.mark.parametrize(("tool", "arguments", "message"), ROWS)
def test_is_refused_in_a_line(
    tool: str, arguments: list[str], message: str, root, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(root)
    assert main_of(tool)(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (EXTRACT, ["--list", "--cfg", "file"]),
        ("count", []),
        (FILTER, ["f"]),
        (FILTER, ["f", "3", "--fan-out"]),
        (FILTER, ["f", "3", "-ptx", "-sass"]),
        (FILTER, ["f", "x"]),
        (REPORT, ["16", "--sms", "108"]),
        (REPORT, ["16", "--sms", "0", "--mhz", "1"]),
        (REPORT, ["16", "--json", "--markdown"]),
        (COMPARE, []),
        (COMPARE, ["8", "--arch", "hopper"]),
        (EXTRACT, ["file", "--arch", "sm_"]),
        (COMPARE, ["8", "--csv", "--json"]),
        (COMPARE, ["8", "9", "--csv", "--sass"]),
        (COMPARE, ["8", "9", "--fold-namespace"]),
        (COMPARE, ["8", "s1", "--seq", "512", "--width", "512"]),
        (REPORT, ["16", "--threads", "0"]),
        (REPORT, [DISPATCH, "--smem", "-8"]),
        (COMPARE, [BEFORE, AFTER, "--threads", "0"]),
        (COMPARE, [BEFORE, AFTER, "--smem", "-8"]),
    ],
)
def test_wrong_usage_ends_with_2(tool: str, arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main_of(tool)(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": error: " in line


@pytest.mark.parametrize("text", ["sm_90a", "90a"])
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (EXTRACT, ["file"]),
        (EMBEDDED, ["file"]),
        (COMPARE, ["file"]),
        (COMPARE_COUNTS, ["file", "file"]),
        ("count", ["file"]),
        (FILTER, ["file", "3"]),
        (REPORT, ["file"]),
        ("analysis/check_resources", []),
        ("analysis/check_counts", ["--source", "sass"]),
    ],
)
def test_an_architecture_is_written_in_either_way(tool: str, arguments: list[str], text) -> None:
    module = listing_counts if tool == "count" else load_tool(f"tools/{tool}.py")
    parsed = module.parse_arguments([*arguments, "--arch", text]).arch
    assert parsed in ("sm_90a", ["sm_90a"])
