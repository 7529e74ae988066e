"""The examples of the help of the tools for machine code run, in a checkout with its library."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool
from sass_text import ARCHITECTURES

from flash_helpers.measure.sass_commands import command_line, extract
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.show import clean_listing, listing_counts

pytestmark = pytest.mark.slow

TOOLS = {
    tool: load_tool(tool).EXAMPLES
    for tool in (
        "tools/analysis/compare_kernels.py",
        "tools/analysis/compare_sass_instruction_counts.py",
        "tools/analysis/ptx_sass_filter.py",
        "tools/analysis/sass_report.py",
        "tools/build/extract_sass.py",
        "tools/build/get_embedded_ptx_from_cubin.py",
    )
} | {
    "tools/analysis/count_sass_instructions.sh": listing_counts.EXAMPLES,
    "tools/build/clean_asm.sh": clean_listing.EXAMPLES,
    "python -m flash_helpers.sass": command_line.EXAMPLES,
    "python -m flash_helpers.sass list": extract.LIST_EXAMPLES,
}
SECONDS = 120  # of the longest, all versions as a page, on two cores


def examples(text: str) -> list[str]:
    """The commands of a tool's examples, each with those that follow it below one title."""
    text = text.partition("examples:\n")[2].partition("\nexit status")[0].replace("\\\n", " ")
    return [
        "\n".join(line.strip() for line in part.splitlines())
        for part in re.split(r"^  \S.*\n", text, flags=re.MULTILINE)
        if part.strip()
    ]


@pytest.mark.parametrize(
    ("tool", "command"),
    [(tool, command) for tool, text in TOOLS.items() for command in examples(text)],
)
def test_an_example_runs(tool: str, command: str, tmp_path: Path) -> None:
    assert "tools/" in command or command.startswith("python -m ")
    for architecture in re.findall(r"\bsm_\d+\b(?!\.cubin)", command):
        if architecture not in ARCHITECTURES:
            pytest.skip(f"the library is not built for {architecture}")
    for name in ("tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "flash_attention").symlink_to(library_path().parent)
    # of a picture, only what is drawn
    command = command.replace("| dot -Tsvg", "| cat")
    python = Path(sys.executable).parent
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    differs = int(bool(re.search(r"^diff ", command, re.MULTILINE)))
    assert result.returncode == differs, result.stderr
    written = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert result.stdout or written


def test_each_of_these_tools_has_several() -> None:
    assert all(examples(text) for text in TOOLS.values())


class TestFrontDoor:
    """python -m flash_helpers.sass."""

    def test_names_its_commands(self, capsys) -> None:
        with pytest.raises(SystemExit) as stop:
            command_line.main(["--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in command_line.COMMANDS)

    @pytest.mark.parametrize("name", command_line.COMMANDS)
    def test_a_command_has_help_with_examples_of_its_own(self, name: str, capsys) -> None:
        with pytest.raises(SystemExit) as stop:
            command_line.main([name, "--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert examples(out)
        assert all(f"python -m flash_helpers.sass {name} " in text for text in examples(out))

    @pytest.mark.parametrize(
        "arguments", [[], ["nix"], ["list"], ["report", "--nix"], ["extract", "f", "--arch", "x"]]
    )
    def test_wrong_usage_ends_with_2(self, arguments: list[str], capsys) -> None:
        with pytest.raises(SystemExit) as stop:
            command_line.main(arguments)
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m flash_helpers.sass")

    @pytest.mark.parametrize("name", ["list", "report", "compare", "extract"])
    def test_a_file_that_is_no_machine_code_ends_with_2(
        self, name: str, root: Path, capsys
    ) -> None:
        assert command_line.main([name, str(root / "README.md")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "README.md is not an ELF file" in line

    def test_prints_what_the_tools_print(self, root: Path, capsys) -> None:
        file = str(root / "examples/own_kernel/row_softmax.sm_90.cubin")
        for name, tool, options in (
            ("list", "tools/build/extract_sass.py", ["--list"]),
            ("report", "tools/analysis/sass_report.py", []),
        ):
            assert load_tool(tool).main([file, *options]) == 0
            expected = capsys.readouterr().out
            assert command_line.main([name, file]) == 0
            assert capsys.readouterr().out == expected
