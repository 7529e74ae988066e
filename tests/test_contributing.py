"""CONTRIBUTING's ways to a new step and a new family, walked in copies by the page's own words.

Nothing is built: each kernel is compiled when a command first needs it, without nvcc.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flash_helpers.course.commands import copy_of
from flash_helpers.course.form import FORMS
from flash_helpers.kernel_configs import FAMILIES, STEPS, Element
from flash_helpers.registry.family import LOGBOOK

pytestmark = pytest.mark.slow

# Where the page's entries go, by the last file that is linked before them: the line that closes
# what they are the last of.
CLOSINGS = {
    "py/flash_helpers/registry/ampere.py": "    ),\n    targets=",
    "py/flash_helpers/operations/attention_forward/faults.py": "}  # fmt: skip",
    "py/flash_helpers/operations/rows/faults.py": "}  # fmt: skip",
}


END = r"(?:## |\*\*\d+\. Measure\*\*, on a GPU)"  # of what is walked in a section
STEP_PAGE = "docs/17_practice.md"
KERNEL = "kernels/v17/forward_kernel.cuh"
NO_NVCC = Path(__file__).parent / "support/no_nvcc"
"""Folder of an nvcc that fails."""


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
    """The indented blocks and those in Python of a section, in order, up to those for a GPU."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^{END})", page, re.DOTALL | re.MULTILINE)
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


def run(root: Path, commands: str, status: int = 0) -> str:
    """Output of a block of commands, in the copy, as if that were installed as editable.

    status: their expected exit status.
    """
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {
        "PATH": f"{NO_NVCC}:{os.environ['PATH']}",
        "PYTHONPATH": f"{root / 'py'}:{root}",
        "PYTEST_ADDOPTS": "-n 0 --assert=plain",  # else each copy's tests are rewritten anew
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
    assert result.returncode == status, f"{commands}\n{result.stdout[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def python(warm: Path) -> Iterator[None]:
    """What the page's commands call so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{warm.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


def walked(copy: Path, heading: str) -> Walk:
    """Return what the commands of a section printed; its entries stand in the copy."""
    found = Walk(copy)
    for block in blocks_of((copy / "CONTRIBUTING.md").read_text(), heading):
        if not block.is_shell:
            insert(copy, block)
        for commands in shell_commands(block):
            found.said[commands] = run(copy, commands)
    return found


@pytest.fixture(scope="module")
def step_walk(root: Path) -> Iterator[Walk]:
    """The way to a step seventeen of family ampere."""
    with copy_of(root) as copy:
        yield walked(copy, "Add a step")


@pytest.fixture(scope="module")
def step_page(step_walk: Walk) -> Walk:
    """The step's page, written from the page's skeleton, and the map."""
    copy = step_walk.copy
    contributing = (copy / "CONTRIBUTING.md").read_text()
    (skeleton,) = re.findall(r"^```markdown\n(.*?)^```$", contributing, re.DOTALL | re.MULTILINE)
    (copy / STEP_PAGE).write_text(skeleton)
    commands = f"python tools/docs/build_docs.py {STEP_PAGE} docs/map.md --no-commands"
    return Walk(copy, {commands: run(copy, commands)})


class TestStep:
    """What the commands of a step seventeen do."""

    def test_the_debugger_finds_the_copied_kernel_right(self, step_walk: Walk) -> None:
        for ptx in ("debug.py 17", "debug.py --ptx"):
            assert "all quantities agree within rounding" in step_walk.of(ptx)

    def test_an_edit_of_the_kernel_counts_at_the_next_call(self, step_walk: Walk) -> None:
        path = step_walk.copy / KERNEL
        text = path.read_text()
        (command,) = (command for command in step_walk.said if "debug.py 17" in command)
        try:
            path.write_text(
                text.replace("S[1] = exp2_approx(fmaf(S[1]", "S[1] = exp2_approx(fmaf(S[0]")
            )
            assert "first difference: l" in run(step_walk.copy, command, status=1)
            path.write_text(text + "oh no;\n")
            said = run(step_walk.copy, command, status=2)
            assert f"{KERNEL}({len(text.splitlines()) + 1}): error" in said
        finally:
            path.write_text(text)

    def test_the_new_kernels_pass_the_sanity_check(self, step_walk: Walk) -> None:
        said = step_walk.of("sanity_check.py")
        assert "v17_bf16" in said and "v17_fp16" in said and "v16" not in said

    def test_the_planted_fault_is_caught(self, step_walk: Walk) -> None:
        assert "caught by the check of the output" in step_walk.of("plant_fault.py")

    def test_the_registry_s_tests_and_the_planted_fault_take_the_step(
        self, step_walk: Walk
    ) -> None:
        said = step_walk.of("pytest")
        assert re.search(r"\d+ passed", said) and "failed" not in said

    def test_the_step_stands_beside_its_parent(self, step_walk: Walk) -> None:
        for tool in ("compare_kernels.py", "profile_kernel.py"):
            assert "v17" in step_walk.of(tool)

    def test_the_copied_header_makes_no_claim_of_its_parent(self, step_walk: Walk) -> None:
        parent, own = (
            (step_walk.copy / path).read_text().partition("#include")[0]
            for path in ("src/include/forward_kernel.cuh", "kernels/v17/forward_kernel.cuh")
        )
        assert "Step 17" in own and "Parent: v16." in own
        assert "TFLOP/s" in parent and "TFLOP/s" not in own  # the measured lines
        verdict = re.compile(r"^// Verdict: (.*?)^//$", re.DOTALL | re.MULTILINE)
        assert verdict.findall(own) == ["not measured yet.\n"] != verdict.findall(parent)

    def test_that_was_not_measured_has_a_page_of_the_logbook_by_the_skeleton(
        self, step_page: Walk
    ) -> None:
        assert step_page.of(STEP_PAGE).splitlines() == [  # and no fault of form or English
            f"{STEP_PAGE} written",
            "docs/map.md written",
        ]
        page = (step_page.copy / STEP_PAGE).read_text()
        assert "**Logbook of ampere**" in page and "v17 was not measured" in page
        headings = re.findall(r"^## (.+)", page, re.MULTILINE)
        assert headings == [*FORMS[LOGBOOK].sections]

    def test_that_was_not_measured_stands_in_the_map_without_numbers(self, step_page: Walk) -> None:
        steps = (step_page.copy / "docs/map.md").read_text()
        (row,) = re.findall(r"^\| \[v17\].*$", steps, re.MULTILINE)
        assert "(17_practice.md) | logbook | the same once more |" in row and "%" not in row


def test_nothing_on_the_page_is_built_except_the_library(root: Path) -> None:
    page = (root / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE))
    (change,) = (change for change, counts in rows.items() if "build_kernels" in counts)
    assert "C ABI" in change
    assert page.count("build_kernels") == 1 and "mine.json" not in page


def test_the_exported_ptx_of_a_step_of_hopper_runs_too(root: Path, tmp_path: Path) -> None:
    """The page's own words, with another config."""
    (block,) = (
        block.text
        for block in blocks_of((root / "CONTRIBUTING.md").read_text(), "Add a step")
        if "flash_attention export" in block.text
    )
    config = FAMILIES["hopper"].fixed_config(STEPS["h30"], Element.BF16)
    commands = re.sub(r"v17_\w+", config.short_form(), block).replace("--arch 90", "--arch 90a")
    commands = commands.replace("exported", str(tmp_path)).rstrip() + f" --out {tmp_path}\n"
    assert "all quantities agree within rounding" in run(root, commands)
    assert ".target sm_90a" in (tmp_path / f"{config.short_form()}.ptx").read_text()


def files_of(root: Path) -> dict[str, bytes]:
    """Return the contents of the files that a commit may hold, by path."""
    built = {"flash_attention", "debug"}
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {
        str(path): (root / path).read_bytes()
        for path in paths
        if path.parts[0] not in built and not {*path.parts} & {"__pycache__", ".pytest_cache"}
    }


@dataclass(frozen=True)
class FamilyWalk:
    """The way to a second family of operation rows. changed: paths of files that it wrote."""

    walk: Walk
    changed: set[str]


@pytest.fixture(scope="module")
def family(root: Path) -> Iterator[FamilyWalk]:
    """The way to family practice."""
    with copy_of(root) as copy:
        before = files_of(copy)
        walk = walked(copy, "Add a family")
        after = files_of(copy)
        yield FamilyWalk(walk, {path for path in after if before.get(path) != after[path]})


WRITTEN_BY_HAND = {
    "kernels/practice/arguments.cuh",
    "kernels/practice/z1.cuh",
    "py/flash_helpers/operations/rows/__init__.py",
    "py/flash_helpers/operations/rows/faults.py",
    "py/flash_helpers/registry/practice.py",
}
GENERATED = {
    "docs/glossary.md",
    "docs/using.md",
}


class TestFamily:
    """What the commands of a second family of operation rows do."""

    def test_is_made_by_the_files_of_the_page_alone(self, family: FamilyWalk) -> None:
        assert family.changed == WRITTEN_BY_HAND | GENERATED

    def test_has_the_fields_of_its_struct_and_no_map_in_the_library(
        self, family: FamilyWalk
    ) -> None:
        structs = (family.walk.copy / "kernels/practice/arguments.cuh").read_text()
        assert "    int practice; // the step\n    DType dtype;" in structs
        said = family.walk.of("generate_kernel_instantiations.py")
        assert "practice_kernels.cuh" not in said

    def test_passes_the_sanity_check_in_all_dtypes(self, family: FamilyWalk) -> None:
        said = family.walk.of("sanity_check.py")
        assert re.findall(r"^z1 .* (\w+) +\S+ +\S+ +\S+, \S+ +pass$", said, re.M) == [
            "fp16",
            "bf16",
            "fp32",
        ]

    def test_that_has_a_fault_is_caught(self, family: FamilyWalk) -> None:
        said = family.walk.of("plant_fault.py")
        assert "caught by the check of the output: max abs error" in said
        assert "first difference: y (row 0, column " in said

    def test_passes_the_tests_of_all_families(self, family: FamilyWalk) -> None:
        for part in ("pytest tests/registry", "tests/faults -k z1"):  # run() asserts the status
            assert re.search(r" [1-9]\d* passed", family.walk.of(part))

    def test_stands_beside_its_parent(self, family: FamilyWalk) -> None:
        said = family.walk.of("compare_kernels.py")
        resources, *_ = said.partition("Resources")[2].split("\n\n")
        assert re.findall(r"^(\w+) +\d", resources, re.M) == ["s1", "z1"]

    def test_is_known_to_help_and_lists(self, family: FamilyWalk) -> None:
        help_text = run(family.walk.copy, "python tools/debug/sanity_check.py --help")
        assert re.search(r"a family\s+\([^)]*\bpractice\b", help_text)
        assert "z1_bf16_w8" in run(family.walk.copy, "python -m flash_attention")
        listed = run(family.walk.copy, "python tools/debug/plant_fault.py practice --list")
        assert listed == "z1: the exponents of base 2 lack the factor log2(e)\n"

    def test_stands_in_the_table_of_what_kernels_take(self, family: FamilyWalk) -> None:
        using = (family.walk.copy / "docs/using.md").read_text()
        (row,) = re.findall(r"^\| practice \|.*$", using, re.M)
        assert "fp16, bf16, fp32" in row
