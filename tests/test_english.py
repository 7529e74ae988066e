"""The English of docstrings, and of the comments at the head of kernel files, by the checks of the
course's pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_helpers.course.english import english_errors

ROOT = Path(__file__).parents[1]

# A parameter begins a sentence: "rows: of Q. columns: of K."
PARAMETER = re.compile(r"(?<=[.;:])\s+(?=\w+(?:, \w+)*(?: \([^)]*\))?: )")
# An indented line right below another belongs to its sentence; after an empty line it is code.
CONTINUED = re.compile(r"(?<=\S)\n +(?=\S)(?![-*] |\d+\. )")
COMMENT = re.compile(r"^// ?(.*)$")
# Lines of a header that are no sentences: titles above numbered items, and a tool's markers.
NO_SENTENCE = re.compile(r"^(?:What changed|Phases|benchmark:\w+)$")


def folders() -> list[str]:
    """Folders whose Python files are checked, by path from the root; setup.py counts as one."""
    rooms = [p for p in (ROOT / "py/flash_helpers").iterdir() if (p / "__init__.py").is_file()]
    tools = [p for p in (ROOT / "tools").iterdir() if p.is_dir() and any(p.glob("*.py"))]
    named = ["flash_attention", "benchmarks", "setup.py"]
    return sorted([*(str(p.relative_to(ROOT)) for p in (*rooms, *tools)), *named])


def python_files(folder: str) -> list[Path]:
    path = ROOT / folder
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstring of a module and of each class and function in it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def docstring_errors(text: str) -> Iterator[str]:
    """Faults of a docstring, whose parameters are sentences of their own."""
    for part in PARAMETER.split(CONTINUED.sub(" ", text)):
        yield from english_errors(part)


def header(text: str) -> str:
    """The comment at the head of a CUDA file, before its first line of code."""
    lines = []
    for line in text.splitlines():
        if found := COMMENT.match(line):
            lines.append("" if NO_SENTENCE.match(found[1]) else found[1])
        elif line.strip() and not line.startswith("#"):
            break
        else:
            lines.append("")
    return "\n".join(lines)


def header_errors(text: str) -> Iterator[str]:
    """Faults of a kernel file's header, in which an indented line continues the one above it."""
    return english_errors(CONTINUED.sub(" ", header(text)))


@pytest.mark.parametrize("folder", folders())
def test_docstrings(folder: str) -> None:
    files = python_files(folder)
    assert files
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {error}"
        for path in files
        for line, text in docstrings(path)
        for error in docstring_errors(text)
    ]


def test_docstrings_of_the_files_beside_the_rooms() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {error}"
        for path in sorted((ROOT / "py/flash_helpers").glob("*.py"))
        for line, text in docstrings(path)
        for error in docstring_errors(text)
    ]


@pytest.mark.parametrize("folder", ["kernels", "previous_kernels", "src"])
def test_headers_of_kernel_files(folder: str) -> None:
    files = [p for end in ("cuh", "cu", "h") for p in sorted((ROOT / folder).rglob(f"*.{end}"))]
    assert any(header(path.read_text()).strip() for path in files)
    assert not [
        f"{path.relative_to(ROOT)}: {error}"
        for path in files
        for error in header_errors(path.read_text())
    ]


class TestDocstrings:
    LONG = "bytes " * 46

    def test_a_parameter_begins_a_sentence(self) -> None:
        rows, columns = "of Q " * 15, "of K " * 15
        assert not [
            *docstring_errors(f"A tile. rows, n: {rows}. columns (all of them): {columns}.")
        ]
        assert len([*docstring_errors(f"A tile. rows: {self.LONG}.")]) == 1

    def test_an_indented_line_continues_the_sentence_before_it(self) -> None:
        (error,) = docstring_errors(f"A tile.\n\nrows: of Q,\n    {self.LONG}.")
        assert error.startswith("a sentence of 50 words")

    def test_code_after_an_empty_line_is_none(self) -> None:
        assert not [*docstring_errors(f"An example:\n\n    {self.LONG}\n")]

    def test_items_of_a_list_are_apart(self) -> None:
        items = "\n".join(f"  {n}. the tile {'of Q ' * 10};" for n in range(1, 5))
        assert not [*docstring_errors(f"The first of these:\n{items}")]


class TestHeaders:
    def test_a_header_ends_at_the_first_code(self) -> None:
        text = "// Step 1: a tile.\n//\n//   1. Load.\n\n#include <x>\nint x;\n// whoever reads\n"
        assert header(text).split() == ["Step", "1:", "a", "tile.", "1.", "Load."]
        assert not [*header_errors(text)]

    def test_titles_and_markers_are_no_sentences(self) -> None:
        text = "// What changed\n//   1. A.\n// benchmark:begin\n// B.\n// benchmark:end\n// C."
        assert header(text).split() == ["1.", "A.", "B.", "C."]
        assert not [*header_errors(text)]

    def test_its_sentences_are_checked(self) -> None:
        (error,) = header_errors("// Step 1: a tile, for\n// whoever reads.\n")
        assert error.startswith("'whoever' names nothing")
