"""The form of a step's page: what is checked of it, and that the pages have it."""

from pathlib import Path

import pytest

from flash_helpers.course.form import (
    FORMS,
    MINUTES_PER_BLOCK,
    MOST_IDEA_SENTENCES,
    MOST_MOTIVATION_WORDS,
    WORDS_PER_MINUTE,
    form_errors,
    reading_minutes,
    unfolded_prose,
    words,
)
from flash_helpers.course.markers import parse
from flash_helpers.course.pages import PAGES, Page
from flash_helpers.registry.family import CORE, LAB, LIBRARY, LOGBOOK

FOLDED = '<details markdown="1">\n<summary>A</summary>\n\n{}\n\n</details>\n'
every_place = pytest.mark.parametrize("place", FORMS)


def block(kind: str) -> str:
    return f"<!-- build:{kind} -->\n\ngenerated text\n\n<!-- /build -->\n"


def page(place: str, **bodies: str) -> str:
    """One that is as it must be but for the sections given."""
    parts = ["# Title\n"]
    for name, kind in FORMS[place].sections.items():
        body = block(f"{kind.partition('|')[0]} 9") if kind else "Text.\n"
        if name == "The evidence":
            body = FOLDED.format(body)
        parts.append(f"## {name}\n\n{bodies.get(name.replace(' ', '_'), body)}")
    return "\n".join(parts)


def errors(place: str, **bodies: str) -> list[str]:
    return [*form_errors(place, parse(page(place, **bodies)))]


@every_place
def test_a_page_in_form_has_no_errors(place: str) -> None:
    assert errors(place) == []


@every_place
def test_sections_are_there_in_their_order(place: str) -> None:
    text = page(place).replace("## Verdict", "## Judgement")
    (error,) = form_errors(place, parse(text))
    assert "Judgement" in error and f"a page of the {place} are" in error
    swapped = page(place).replace("## Verdict", "## X").replace("## The idea", "## Verdict")
    assert [*form_errors(place, parse(swapped.replace("## X", "## The idea")))]


def test_a_logbook_page_is_no_core_page() -> None:
    assert [*form_errors(CORE, parse(page(LOGBOOK)))]
    assert [*form_errors(LOGBOOK, parse(page(CORE)))]


def test_a_heading_in_code_is_none() -> None:
    assert errors(CORE, Verdict="```text\n## Other\n```\n") == []


@pytest.mark.parametrize(
    ("place", "section", "kind"),
    [(p, s, kind) for p, form in FORMS.items() for s, kind in form.sections.items() if kind],
)
def test_a_section_needs_its_block(place: str, section: str, kind: str) -> None:
    found = errors(place, **{section.replace(" ", "_"): ""})
    assert found == [f'"{section}" needs a block build:{kind}']
    for other in kind.split("|"):
        body = block(f"{other} 9")
        body = FOLDED.format(body) if section == "The evidence" else body
        assert errors(place, **{section.replace(" ", "_"): body}) == []


def test_one_picture_carries_the_idea() -> None:
    pictures = block("picture a b") + "\n" + block("picture c d")
    assert errors(CORE, The_idea=block("picture a b")) == []
    assert errors(CORE, The_idea=pictures) == ['"The idea" has 2 pictures: 1 at most']


@every_place
def test_words_that_are_not_folded_are_counted_and_nothing_else(place: str) -> None:
    most = FORMS[place].most_words
    rest = words(unfolded_prose(parse(page(place, Verdict=""))))
    prose = "word " * (most - rest)
    hidden = FOLDED.format("word " * 99 + FOLDED.format("word")) + "| word | word |\n"
    hidden += "```text\nword\n```\n![word](a.svg)\n### word\n" + block("sass 9")
    assert errors(place, Verdict=f"{prose}\n\n{hidden}") == []
    (error,) = errors(place, Verdict=f"{prose}more\n\n{hidden}")
    assert error.startswith(f"{most + 1} words are not folded: at most {most}")


def test_a_link_counts_as_its_text() -> None:
    assert words("see [two words](a/b.md#c) of 1,024 16-byte chunks") == 7


def test_the_reading_time_is_of_open_words_and_of_what_is_looked_at() -> None:
    prose = "word " * (2 * WORDS_PER_MINUTE)
    assert reading_minutes(parse(prose)) == 2
    assert reading_minutes(parse(f"{prose}\n" + FOLDED.format(f"{prose}\n{block('sass 9')}"))) == 2
    looked_at = block("sass 9") + block("nav") + "```cpp\nint a;\n```\n"
    assert reading_minutes(parse(f"{prose}\n\n{looked_at}")) == 2 + 2 * MINUTES_PER_BLOCK
    assert reading_minutes(parse("word")) == 1


def test_a_page_takes_ten_minutes_at_most() -> None:
    excerpts = "\n".join(block(f"excerpt {n}") for n in range(30))
    (error,) = errors(CORE, The_code=excerpts)
    assert error.endswith("minutes: 10 at most")


@pytest.mark.parametrize("place", [CORE, LAB, LIBRARY])
def test_a_motivation_is_one_short_paragraph(place: str) -> None:
    name = FORMS[place].motivation
    section = name.replace(" ", "_").replace("?", "_")
    text = page(place)

    def found(body: str) -> list[str]:
        return [*form_errors(place, parse(text.replace(f"## {name}\n\nText.\n", body)))]

    assert section and name
    heading = f"## {name}\n\n"
    assert found(f"{heading}One.\n\nTwo.\n") == [f'"{name}" has 2 paragraphs: 1 at most']
    for body, n in (("", 0), ("word " * (MOST_MOTIVATION_WORDS + 1), MOST_MOTIVATION_WORDS + 1)):
        assert found(f"{heading}{body}\n") == [
            f'"{name}" has {n} words: 1 to {MOST_MOTIVATION_WORDS}'
        ]


def test_the_idea_of_a_logbook_page_is_a_few_sentences() -> None:
    idea = "It is so. " * MOST_IDEA_SENTENCES
    assert errors(LOGBOOK, The_idea=idea) == []
    (error,) = errors(LOGBOOK, The_idea=f"{idea} And so.")
    assert (
        error
        == f'"The idea" has {MOST_IDEA_SENTENCES + 1} sentences: {MOST_IDEA_SENTENCES} at most'
    )


def test_a_core_page_sends_nobody_off_the_path() -> None:
    away, on = (f"See [it]({p.name}#a)." for p in (page_of(LOGBOOK), page_of(CORE)))
    (error,) = errors(CORE, Verdict=away)
    assert "which is not on the path" in error
    assert errors(CORE, Verdict=on + FOLDED.format(away)) == errors(LAB, Verdict=away) == []


def page_of(place: str) -> Page:
    return next(page for page in PAGES if page.place == place and page.step)


@every_place
def test_evidence_is_folded(place: str) -> None:
    body = FOLDED.format(block("clock 9"))
    (error,) = errors(place, The_evidence=f"{body}\nAnd an open sentence.\n")
    assert "not folded: 'And an open sentence.'" in error


@pytest.mark.parametrize("page", [page for page in PAGES if page.step], ids=lambda page: page.name)
def test_the_pages_of_the_steps_have_the_form_of_their_place(root: Path, page: Page) -> None:
    text = (root / page.path).read_text(encoding="utf-8")
    assert [*form_errors(page.place, parse(text))] == []
