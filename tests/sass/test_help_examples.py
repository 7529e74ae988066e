"""The examples of the tools' help that read the kernel library: which kernels it holds changes."""

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

pytestmark = pytest.mark.slow

LIBRARY = "flash_attention/libflash_attention.so"
TOOLS = (
    "tools/analysis/ptx_sass_filter.py",
    "tools/build/extract_sass.py",
    "tools/build/get_embedded_ptx_from_cubin.py",
)


def examples(tool: str) -> list[str]:
    """The commands of a tool's examples that name the library."""
    text = load_tool(tool).EXAMPLES.replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if LIBRARY in line]


@pytest.mark.parametrize(
    ("tool", "command"),
    [(tool, command) for tool in TOOLS for command in examples(tool)],
)
def test_an_example_on_the_library_runs(tool: str, command: str, tmp_path: Path) -> None:
    assert command.startswith(f"python {tool} ")
    for architecture in re.findall(r"\bsm_\w+", command):
        if architecture not in ARCHITECTURES:
            pytest.skip(f"the library is not built for {architecture}")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "flash_attention").symlink_to(installed_library().parent)
    python = Path(sys.executable).parent
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert result.stdout or written


def test_each_of_these_tools_has_one() -> None:
    assert all(examples(tool) for tool in TOOLS)
