"""The examples of the help of the tools for machine code run, in a checkout with its library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool
from sass_text import ARCHITECTURES

from flash_helpers.measure.machine_code import installed_library
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
    assert "tools/" in command
    for architecture in re.findall(r"\bsm_\d+\b(?!\.cubin)", command):
        if architecture not in ARCHITECTURES:
            pytest.skip(f"the library is not built for {architecture}")
    for name in ("tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "flash_attention").symlink_to(installed_library().parent)
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
