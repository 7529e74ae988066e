"""The kernels' source: each a file that can be read whole, whose diff to its parent is its idea."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from flash_helpers.kernel_configs import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
MAX_HEADER_LINES = 40
MAX_CHANGED_LINES = 120


def source(number: int) -> str:
    return (ROOT / VERSIONS[number].source).read_text(encoding="utf-8")


def header(number: int) -> list[str]:
    """The comment between `#pragma once` and the first include."""
    lines = source(number).partition("#pragma once\n")[2].splitlines()
    return lines[: next(n for n, line in enumerate(lines) if line.startswith("#include"))]


def code(number: int) -> list[str]:
    """The lines without comments and blank lines."""
    stripped = (re.sub(r"//.*", "", line).rstrip() for line in source(number).splitlines())
    return [line for line in stripped if line]


@pytest.mark.parametrize("number", VERSIONS)
def test_a_kernel_is_one_readable_file(number: int) -> None:
    assert len(source(number).splitlines()) <= MAX_LINES
    assert f"namespace v{number} {{" in source(number)
    assert "__global__" in source(number)
    assert not re.search(r"#if\b|#ifdef|\bprintf\b|/\*", source(number))


@pytest.mark.parametrize("number", VERSIONS)
def test_its_header_tells_step_parent_change_expectation_and_verdict(number: int) -> None:
    lines = header(number)
    text = "\n".join(lines)
    assert len(lines) <= MAX_HEADER_LINES
    assert f"// Step {number}" in text
    parent = VERSIONS[number].parent
    assert parent is None or f"Parent: v{parent}." in text
    for part in ("//   1. ", "// Why", "// Expected: ", "// Verdict: ", "// Phases: "):
        assert part in text, part


@pytest.mark.parametrize("number", [n for n, version in VERSIONS.items() if version.parent])
def test_it_differs_from_its_parent_by_an_idea(number: int) -> None:
    old, new = code(VERSIONS[number].parent), code(number)
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    changed = [line for line in diff if re.match(r"[+-](?![+-]{2})", line)]
    assert 0 < len(changed) <= MAX_CHANGED_LINES
