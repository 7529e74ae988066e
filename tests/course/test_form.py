"""The form of a step's page: what is checked of it, and that the pages have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_helpers.course.form import MOST_WORDS, SECTIONS, form_errors, unfolded_prose, words
from flash_helpers.course.markers import parse
from flash_helpers.course.pages import PAGES

FOLDED = '<details markdown="1">\n<summary>A</summary>\n\n{}\n\n</details>\n'


def block(kind: str) -> str:
    return f"<!-- build:{kind} -->\n\ngenerated text\n\n<!-- /build -->\n"


def page(**bodies: str) -> str:
    """One that is as it must be but for the sections given."""
    parts = ["# Title\n"]
    for name, kind in SECTIONS.items():
        body = block(f"{kind} 9") if kind else "Text.\n"
        if name == "The evidence":
            body = FOLDED.format(body)
        parts.append(f"## {name}\n\n{bodies.get(name.replace(' ', '_'), body)}")
    return "\n".join(parts)


def errors(**bodies: str) -> list[str]:
    return [*form_errors(parse(page(**bodies)))]


def test_a_page_in_form_has_no_errors() -> None:
    assert errors() == []


def test_sections_are_there_in_their_order() -> None:
    text = page().replace("## Verdict", "## Judgement")
    (error,) = form_errors(parse(text))
    assert "Judgement" in error and "Verdict" in error
    swapped = page().replace("## Verdict", "## X").replace("## Exercises", "## Verdict")
    assert [*form_errors(parse(swapped.replace("## X", "## Exercises")))]


def test_a_heading_in_code_is_none() -> None:
    assert errors(Verdict="```text\n## Other\n```\n") == []


@pytest.mark.parametrize(("section", "kind"), [(s, k) for s, k in SECTIONS.items() if k])
def test_a_section_needs_its_block(section: str, kind: str) -> None:
    found = errors(**{section.replace(" ", "_"): ""})
    assert found == [f'"{section}" needs a block build:{kind}']


def test_one_picture_carries_the_idea() -> None:
    pictures = block("picture a b") + "\n" + block("picture c d")
    assert errors(The_idea=block("picture a b")) == []
    assert errors(The_idea=pictures) == ['"The idea" has 2 pictures: one carries it']


def test_words_that_are_not_folded_are_counted_and_nothing_else() -> None:
    rest = words(unfolded_prose(parse(page(Verdict=""))))
    prose = "word " * (MOST_WORDS - rest)
    hidden = FOLDED.format("word " * 99 + FOLDED.format("word")) + "| word | word |\n"
    hidden += "```text\nword\n```\n![word](a.svg)\n### word\n" + block("sass 9")
    assert errors(Verdict=f"{prose}\n\n{hidden}") == []
    (error,) = errors(Verdict=f"{prose}more\n\n{hidden}")
    assert error.startswith(f"{MOST_WORDS + 1} words")


def test_a_link_counts_as_its_text() -> None:
    assert words("see [two words](a/b.md#c) of 1,024 16-byte chunks") == 7


def test_evidence_is_folded() -> None:
    body = FOLDED.format(block("clock 9"))
    (error,) = errors(The_evidence=f"{body}\nAnd an open sentence.\n")
    assert "not folded: 'And an open sentence.'" in error


@pytest.mark.parametrize("path", [page.path for page in PAGES if page.step])
def test_the_pages_of_the_steps_have_the_form(root: Path, path: Path) -> None:
    text = (root / path).read_text(encoding="utf-8")
    assert [*form_errors(parse(text))] == []
