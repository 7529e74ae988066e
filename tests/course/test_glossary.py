"""The glossary: which use of a term is linked, and that every term is told, found and used."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path, PurePosixPath

import pytest
from course_book import Book

from flash_helpers.course.glossary import (
    GlossaryError,
    Term,
    link_first_uses,
    parse_terms,
    read_terms,
)
from flash_helpers.course.markers import FENCED
from flash_helpers.course.pages import GLOSSARY, all_pages
from flash_helpers.kernel_configs import FAMILIES, Element

PAGE = PurePosixPath("docs/page.md")
TEXT = """\
# Glossary

## Memory

### Bank
A column of shared memory.

### Bank conflict
*also:* conflict

A wait for a bank.

### Ring
*as in:* fragment ring

Places in turn. Nothing of a bank conflict.

## Chip

### ldmatrix
*also:* `ldmatrix` · `ldmatrix.x4`

Loads from `cp.async`; an SM has one.

### SM
Runs warps: 132. And more.
"""
TERMS = parse_terms(TEXT)


def linked(text: str, page: PurePosixPath = PAGE) -> str:
    """The page with its links; made again, they are the same."""
    once = link_first_uses(text, page, TERMS)
    assert link_first_uses(once, page, TERMS) == once
    return once


class TestFirstUse:
    def test_is_linked_and_no_later_one(self) -> None:
        assert linked("A bank and a bank.\n") == "A [bank](glossary.md#bank) and a bank.\n"

    def test_of_a_term_that_is_no_more_is_taken_away(self) -> None:
        assert linked("An [old word](glossary.md#old-word) here.") == "An old word here."

    def test_moves_to_a_use_that_has_come_before_it(self) -> None:
        old = linked("A bank.\n")
        assert linked(f"Banks first.\n\n{old}") == "[Banks](glossary.md#bank) first.\n\nA bank.\n"

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("Two banks.", "banks"),
            ("Bank it.", "Bank"),
            ("the bank's", "bank"),
            ("an SM.", "SM"),
            ("SMs", "SMs"),
            ("a conflict", "conflict"),
            ("no bank\n  conflicts", "bank\n  conflicts"),
            ("a fragment ring", "fragment ring"),
            ("an `ldmatrix`", "`ldmatrix`"),
            ("an `ldmatrix.x4`", "`ldmatrix.x4`"),
            ("an ldmatrix.", "ldmatrix"),
            ("| a bank |\n| :-- |\n", "bank"),
            ("**A bank.**", "bank"),
            ("- 1 of\n  a bank", "bank"),
        ],
    )
    def test_is_a_plural_a_capital_another_spelling_or_a_code_span(
        self, text: str, found: str
    ) -> None:
        assert re.findall(r"\[([^]]*)\]\(glossary", linked(text)) == [found]

    @pytest.mark.parametrize(
        "text",
        [
            "# A bank\n",
            "`bank`",
            "`x = ldmatrix(y)`",
            "```\na bank\n```\n",
            "text:\n\n    bank = 1\n    bank = 2\n",
            "[a bank](other.md)",
            "![a bank](bank.svg)",
            "<!-- a bank -->",
            "<summary>A bank</summary>",
            "<!-- benchmark:begin -->\na bank\n<!-- benchmark:end -->\n",
            "<!-- build:facts 8 -->\n\na bank\n\n<!-- /build -->\n",
            "of <!-- a bank --> x\n",
            "bankrupt, databank, bank-like, bank.md, in/bank, https://x.org/bank",
            "a ring, an sm",
        ],
    )
    def test_is_none_in_headings_code_links_comments_generated_text_and_other_words(
        self, text: str
    ) -> None:
        assert linked(text) == text

    def test_of_a_longer_term_is_none_of_the_shorter(self) -> None:
        assert linked("Bank conflicts in a bank.") == (
            "[Bank conflicts](glossary.md#bank-conflict) in a [bank](glossary.md#bank)."
        )

    def test_that_is_open_counts_before_one_that_is_folded(self) -> None:
        folded = "<details>\n<summary>Answer</summary>\n\nA bank.\n\n</details>\n"
        assert linked(f"{folded}\nA bank.") == f"{folded}\nA [bank](glossary.md#bank)."
        assert "A [bank](glossary.md#bank)" in linked(f"{folded}\nNothing.")

    def test_links_of_the_author_stay(self) -> None:
        text = "[all terms](glossary.md), [here](#bank), [there](other.md#bank)"
        assert linked(text) == text

    def test_is_linked_from_where_the_page_lies(self) -> None:
        assert linked("bank", PurePosixPath("docs/part/x.md")) == "[bank](../glossary.md#bank)"
        assert linked("bank", PurePosixPath("README.md")) == "bank"


class TestGlossary:
    def test_every_definition_links_the_others_first_uses(self) -> None:
        text = linked(TEXT, GLOSSARY)
        assert "A wait for a [bank](#bank)." in text
        assert "Nothing of a [bank conflict](#bank-conflict)." in text
        assert "an [SM](#sm) has one" in text
        assert "*also:* conflict\n" in text and "[ldmatrix]" not in text

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("### A\n\n## Group\n\nText.\n", "'A' has no definition"),
            ("### Ab\nx\n\n### Cd\n*also:* AB\n\ny\n", "'ab' is 'Ab' and 'Cd'"),
            ("### A b\nx\n\n### A (b)\ny\n", "'a-b' is 'A b' and 'A (b)'"),
        ],
    )
    def test_what_is_wrong_is_named(self, text: str, told: str) -> None:
        with pytest.raises(GlossaryError, match=re.escape(told)):
            parse_terms(text)


class TestPages:
    def test_are_written_with_links_and_stale_without(self, book: Book, capsys) -> None:
        book.write(TEXT, GLOSSARY.name)
        path = book.write("A bank.\n")
        assert book.run("--check", "docs/page.md") == 1
        assert "+A [bank](glossary.md#bank)." in capsys.readouterr().out
        assert book.run() == 0
        assert path.read_text() == "A [bank](glossary.md#bank).\n"
        path.write_text(f"One bank more. {path.read_text()}")
        assert book.run("--check", "docs/page.md") == 1

    def test_a_glossary_that_is_wrong_is_told(self, book: Book, capsys) -> None:
        book.write("### A\n", GLOSSARY.name)
        assert book.run() == 2
        assert "docs/glossary.md: 'A' has no definition" in capsys.readouterr().err


@pytest.fixture(scope="module")
def terms(root: Path) -> list[Term]:
    return read_terms(root)


class TestRepository:
    """The glossary of the repository."""

    def test_every_term_is_linked_from_somewhere(self, root: Path, terms: list[Term]) -> None:
        found: set[str] = set()
        for page in all_pages(root):
            text = link_first_uses((root / page).read_text(encoding="utf-8"), page, terms)
            found.update(re.findall(r"\]\((?:glossary\.md)?#([\w-]+)\)", FENCED.sub("", text)))
        assert [term.title for term in terms if term.anchor not in found] == []

    def test_definitions_are_short(self, terms: list[Term]) -> None:
        sentences = {
            term.title: len(re.findall(r"[.](?=\s|$)", term.definition.split("<!--")[0]))
            for term in terms
        }
        assert {title: n for title, n in sentences.items() if not 1 <= n <= 3} == {}

    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_part_of_a_short_form_is_told(self, show: Callable[..., str], name: str) -> None:
        table = show("short_forms", str(GLOSSARY))
        family = FAMILIES[name]
        for config in family.progression():
            for field in fields(config):
                parts = re.findall(rf"^\| `(\w+)` \| `{field.name}` \| \S.*\|$", table, re.M)
                short = field.metadata["short"] or rf"(?:{'|'.join(d.short for d in Element)})"
                assert any(re.fullmatch(rf"{short}\d*", part) for part in parts), field.name
