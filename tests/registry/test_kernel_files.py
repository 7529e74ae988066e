"""The kernels' source: each a file that can be read whole, whose diff to its parent is its idea."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from flash_helpers.kernel_configs import STEPS

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
MAX_HEADER_LINES = 40
MAX_CHANGED_LINES = 120


def source(name: str) -> str:
    return (ROOT / STEPS[name].source).read_text(encoding="utf-8")


def header(name: str) -> list[str]:
    """The comment between `#pragma once` and the first include."""
    lines = source(name).partition("#pragma once\n")[2].splitlines()
    return lines[: next(n for n, line in enumerate(lines) if line.startswith("#include"))]


def code(name: str) -> list[str]:
    """The lines without comments and blank lines."""
    stripped = (re.sub(r"//.*", "", line).rstrip() for line in source(name).splitlines())
    return [line for line in stripped if line]


def left_out(name: str) -> list[str]:
    """The kernels of its parent that it says it has not."""
    return re.findall(r"(\w+_kernel) is left out\.", "\n".join(header(name)))


def without(kernel: str, lines: list[str]) -> list[str]:
    """The code without a kernel, which it must have."""
    text = "\n".join(lines)
    found = re.search(
        rf"^template <typename \w+>\n__global__ [^{{]*\b{kernel}\(.*?^}}$",
        text,
        re.DOTALL | re.MULTILINE,
    )
    assert found
    return text.replace(found[0], "").splitlines()


def begins_anew(name: str) -> bool:
    """Whether it says that it has nothing of its parent but the place in the story."""
    parent = STEPS[name].parent
    return f"Parent in the story: {parent}; no line of it is left." in "\n".join(header(name))


def reshapes(name: str) -> bool:
    """Whether it says that it does what its parent does, in the form that its family has."""
    return f"Parent: {STEPS[name].parent}. The same work in another form." in header(name)[0]


def test_only_the_first_of_a_family_begins_anew_or_reshapes() -> None:
    assert {STEPS[name].number for name in STEPS if begins_anew(name) or reshapes(name)} <= {1}


@pytest.mark.parametrize("name", STEPS)
def test_a_kernel_is_one_readable_file(name: str) -> None:
    assert len(source(name).splitlines()) <= MAX_LINES
    assert f"namespace {name} {{" in source(name)
    assert "__global__" in source(name)
    assert not re.search(r"#if\b|#ifdef|\bprintf\b|/\*", source(name))


@pytest.mark.parametrize("name", STEPS)
def test_its_header_tells_step_parent_change_expectation_and_verdict(name: str) -> None:
    lines = header(name)
    text = "\n".join(lines)
    assert len(lines) <= MAX_HEADER_LINES
    assert f"// Step {STEPS[name].number}" in text
    parent = STEPS[name].parent
    assert parent is None or f"Parent: {parent}." in text or begins_anew(name)
    for part in ("//   1. ", "// Why", "// Expected", "// Verdict: ", "// Phases"):
        assert part in text, part


@pytest.mark.parametrize(
    "name", [n for n in STEPS if STEPS[n].parent and not begins_anew(n) and not reshapes(n)]
)
def test_it_differs_from_its_parent_by_an_idea(name: str) -> None:
    old, new = code(STEPS[name].parent), code(name)
    for kernel in left_out(name):  # nobody compares its lines with anything
        old = without(kernel, old)
        assert kernel not in "\n".join(new)
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    changed = [line for line in diff if re.match(r"[+-](?![+-]{2})", line)]
    assert 0 < len(changed) <= MAX_CHANGED_LINES
