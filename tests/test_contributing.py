"""CONTRIBUTING's way to a new step, walked by the page's own commands and entries in a copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flash_helpers.compile.toolchain import BuildError, find_toolchain
from flash_helpers.course.commands import copy_of

pytestmark = pytest.mark.slow

# Where the page's entries go, by the last file that is linked before them: the line that closes
# what they are the last of.
CLOSINGS = {
    "py/flash_helpers/registry/ampere.py": "    ),\n    targets=",
    "py/flash_helpers/operations/attention_forward/faults.py": "}  # fmt: skip",
}


@dataclass(frozen=True)
class Block:
    """A block of code of the page. file: the last one that is linked before it."""

    text: str
    is_shell: bool
    file: str


@dataclass
class Walk:
    """Result of the page's commands. said: their output."""

    copy: Path
    said: dict[str, str] = field(default_factory=dict)

    def of(self, part: str) -> str:
        """The output of the commands that `part` stands in."""
        (found,) = [said for commands, said in self.said.items() if part in commands]
        return found


def blocks_of(page: str, heading: str) -> list[Block]:
    """The indented blocks and those in Python of a section, in order."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    found, file = [], ""
    pattern = r"\]\(([^)]+)\)|```python\n(.*?)```|((?:^    [^\n]+\n)+)"
    for link, python, shell in re.findall(pattern, section, re.DOTALL | re.MULTILINE):
        file = link or file
        if python or shell:
            found.append(Block(python or re.sub("^    ", "", shell, flags=re.M), bool(shell), file))
    return found


def shell_commands(block: Block) -> list[str]:
    """The commands of a block: each line that is a command by itself, or the whole script."""
    lines = block.text.splitlines() if block.is_shell else []
    return lines if all(line.startswith("python ") for line in lines) else [block.text]


def insert(root: Path, block: Block) -> None:
    """Put an entry of the page where the page says: last in its list."""
    path = root / block.file
    before, closing, after = path.read_text().rpartition(CLOSINGS[block.file])
    assert closing, f"{block.file} has no {CLOSINGS[block.file]!r}"
    entry = block.text.rstrip().removesuffix(",") + ",\n"
    path.write_text(before + entry + closing + after)


def run(root: Path, commands: str) -> str:
    """Output of a block of commands, in the copy, as if that were installed as editable."""
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {
        "PATH": f"{find_toolchain([90], os.environ).nvcc.parent}:{Path(sys.executable).parent}:"
        f"{os.environ['PATH']}",
        "PYTHONPATH": f"{root / 'py'}:{root}",
        "PYTEST_ADDOPTS": "-n 0",
        "COLUMNS": "100",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{commands}\n{result.stdout[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def walk(root: Path) -> Iterator[Walk]:
    """A step seventeen, added to a copy as the page says, and what its commands printed."""
    try:
        find_toolchain([90], os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    with copy_of(root) as copy:
        for best in (copy / "configs").glob("best_*.json"):
            best.unlink()  # of the step itself it is the build that compiles, not those of sweeps
        found = Walk(copy)
        for block in blocks_of((copy / "CONTRIBUTING.md").read_text(), "Add a step"):
            if not block.is_shell:
                insert(copy, block)
            for commands in shell_commands(block):
                found.said[commands] = run(copy, commands)
        yield found


def test_the_build_holds_the_step_and_its_parent(walk: Walk) -> None:
    said = walk.of("setup.py build_kernels")
    assert {name for name in re.findall(r" (v\d+)_", said)} == {"v16", "v17"}


def test_the_debugger_finds_the_copied_kernel_right(walk: Walk) -> None:
    assert "all quantities agree within rounding" in walk.of("debug.py --ptx")


def test_the_new_kernels_pass_the_sanity_check(walk: Walk) -> None:
    said = walk.of("sanity_check.py")
    assert "v17_bf16" in said and "v17_fp16" in said and "v16" not in said


def test_the_planted_fault_is_caught(walk: Walk) -> None:
    assert "caught by the check of the output" in walk.of("plant_fault.py")


def test_the_registry_s_tests_and_the_planted_fault_take_the_step(walk: Walk) -> None:
    said = walk.of("pytest")
    assert re.search(r"\d+ passed", said) and "failed" not in said


def test_the_step_stands_beside_its_parent(walk: Walk) -> None:
    assert "v17" in walk.of("compare_kernels.py") and "v17" in walk.of("profile_kernel.py")


def test_a_step_that_was_not_measured_stands_in_the_table_without_numbers(walk: Walk) -> None:
    readme = (walk.copy / "README.md").read_text()
    (row,) = re.findall(r"^\| (?:v?17) \|.*$", readme, re.MULTILINE)
    assert "the same once more" in row and not re.search(r"\d\.\d", row)
