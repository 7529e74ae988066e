"""Excerpts from the file of a kernel or of a primitive, with wide comments wrapped anew."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from flash_helpers.course.arguments import Arguments, compiled_pattern, parse_step
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import relative
from flash_helpers.registry.selection import UsageError, find_steps

INCLUDES = PurePosixPath("src/include")
MOST_LINES = 40  # per excerpt
COLUMNS = 88  # width of code that a page of the site shows without wrapping
_PHASE = r"^( *)// {}\. "
# Lines of a comment that form a paragraph: one indentation, no columns, no items of a list.
_PROSE = r"// {}\S+(?: \S+)*"
_PARAGRAPH = re.compile(
    rf"^( *){_PROSE.format('')}(?:\n\1{_PROSE.format(r'(?![-*] |[0-9]+[.] )')})*$", re.MULTILINE
)


def excerpt_block(evidence: Evidence, arguments: Arguments) -> str:
    """Excerpt of functions by name, of a numbered phase of the kernel, or of lines from the first
    match."""
    word, *functions = arguments.words
    path = _file(word, evidence.root)
    lines = (evidence.root / path).read_text(encoding="utf-8").splitlines()
    found = [*_ranges(lines, functions, arguments)]
    if not found:
        raise UsageError("nothing is chosen: name a function, or give phase= or at=")
    if (total := sum(map(len, found))) > MOST_LINES:
        raise UsageError(f"{total} lines are more than {MOST_LINES}: cut the excerpt by lines=")
    code = "\n\n".join(narrowed(dedented(lines[part.start : part.stop])) for part in found)
    places = ", ".join(f"{part[0] + 1}\N{EN DASH}{part[-1] + 1}" for part in found)
    lines_linked = f"#L{found[0][0] + 1}-L{found[0][-1] + 1}"
    link = f"[{path}]({relative(path, arguments.page)}{lines_linked})"
    return f"```cpp\n{code}\n```\n\n{link}, lines {places}."


def dedented(lines: Sequence[str]) -> str:
    """The lines moved to the margin, where pragmas stand already."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() and line[0] != "#"]
    indent = min(indents, default=0)
    return "\n".join(line if line.startswith("#") else line[indent:] for line in lines)


def narrowed(code: str) -> str:
    """The code, with comment paragraphs wider than COLUMNS wrapped anew."""
    return _PARAGRAPH.sub(_filled, code)


def _filled(paragraph: re.Match[str]) -> str:
    lines, begin = paragraph[0].split("\n"), f"{paragraph[1]}// "
    if max(map(len, lines)) <= COLUMNS:
        return paragraph[0]
    return textwrap.fill(
        " ".join(line.removeprefix(begin) for line in lines),
        COLUMNS,
        initial_indent=begin,
        subsequent_indent=begin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _file(word: str, root: Path) -> PurePosixPath:
    """Path of a step's file or of a header in INCLUDES. Raises UsageError for any other word."""
    path = PurePosixPath(parse_step(word).source) if find_steps(word) else INCLUDES / word
    if not (root / path).is_file():
        raise UsageError(f"{word!r} is neither a step, such as 9 or o2, nor a header in {INCLUDES}")
    return path


def _ranges(
    lines: Sequence[str], functions: Sequence[str], arguments: Arguments
) -> Iterator[range]:
    """Ranges of the chosen lines; lines= cuts each range. Raises UsageError if a choice matches
    nothing."""
    for name in functions:
        yield function_lines(lines, name)[: arguments.number("lines", len(lines))]
    if phase := arguments.options.get("phase"):
        yield phase_lines(lines, phase)[: arguments.number("lines", len(lines))]
    if at := arguments.options.get("at"):
        yield range(_match(lines, at), len(lines))[: arguments.number("lines", 1)]


def _match(lines: Sequence[str], pattern: str) -> int:
    searched = compiled_pattern(pattern)
    for n, line in enumerate(lines):
        if searched.search(line):
            return n
    raise UsageError(f"no line there matches {pattern!r}")


def function_lines(lines: Sequence[str], name: str) -> range:
    """Lines of a function defined at the margin, with the comment above it. Raises UsageError if it
    is absent."""
    named = re.compile(rf"\b{re.escape(name)}\(")
    for at, line in enumerate(lines):
        if not line[:1].strip() or line.startswith("//") or not named.search(line):
            continue
        begin = at
        while begin and lines[begin - 1] and not lines[begin - 1].startswith("}"):
            begin -= 1
        end = next((n for n in range(at, len(lines)) if lines[n].startswith("}")), None)
        if end is not None:
            return range(begin, end + 1)
    raise UsageError(f"no function {name!r} is defined at the margin there")


def phase_lines(lines: Sequence[str], number: str) -> range:
    """Lines of a kernel's numbered phase, up to the next phase or the end of its scope.

    Raises UsageError if the phase is absent.
    """
    title = re.compile(_PHASE.format(re.escape(number)))
    begin = next((n for n, line in enumerate(lines) if title.match(line)), None)
    if begin is None:
        raise UsageError(f"no comment there begins with {number}. ")
    found = title.match(lines[begin])
    assert found is not None
    indent = found[1]
    after = re.compile(_PHASE.format(r"\d+"))
    end = begin + 1
    while end < len(lines) and not after.match(lines[end]):
        if lines[end].strip() and not lines[end].startswith((indent, "#")):
            break
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return range(begin, end)
