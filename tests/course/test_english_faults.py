"""The check of the English: which faults it finds, how it splits sentences, and which text it
leaves out."""

import pytest

from flash_helpers.course.english import MOST_WORDS, english_errors, sentences

LONGEST = "word " * (MOST_WORDS - 1) + "word."
TOO_LONG = f"One {LONGEST}"


def errors(text: str) -> list[str]:
    return [*english_errors(text)]


def split(text: str) -> list[str]:
    return [*sentences(text)]


class TestUnnamed:
    @pytest.mark.parametrize(
        "word", ["whoever", "Whoever", "whosoever", "whomever", "somebody", "someone", "lest"]
    )
    def test_a_word_without_a_noun_is_a_fault(self, word: str) -> None:
        (error,) = errors(f"The warp, {word} it is, waits at the barrier of the loop.")
        assert error == f"{word!r} names nothing: 'The warp, {word} it is, waits at the' …"

    @pytest.mark.parametrize("word", ["celeste", "lesten", "someones", "who", "everyone"])
    def test_no_other_word_is(self, word: str) -> None:
        assert not errors(f"The warp, {word} it is, waits.")

    def test_one_of_a_sentence_is_told(self) -> None:
        assert len(errors("Somebody waits, lest someone else does. Somebody goes.")) == 2


class TestOpenings:
    @pytest.mark.parametrize("text", ["What is left is one barrier.", "Who waits last is slow."])
    def test_a_statement_begins_with_its_subject(self, text: str) -> None:
        (error,) = errors(f"The loop ends. {text}")
        assert error.startswith("the subject of a sentence is a noun: ")
        assert text.split()[1] in error

    @pytest.mark.parametrize("text", ["What is left?", "Who waits? The last warp waits."])
    def test_a_question_may(self, text: str) -> None:
        assert not errors(text)

    @pytest.mark.parametrize("text", ["Whatever is left, one barrier stays.", "Whose tile it is."])
    def test_so_may_longer_words(self, text: str) -> None:
        assert not errors(text)

    def test_the_words_within_a_sentence_are_fine(self) -> None:
        assert not errors("The table shows what is left, and who waits.")

    @pytest.mark.parametrize("mark", ["- ", "* ", "1. "])
    def test_an_item_of_a_list_is_a_sentence(self, mark: str) -> None:
        assert errors(f"{mark}What is left is one barrier.")


class TestLength:
    def test_a_sentence_has_at_most_so_many_words(self) -> None:
        assert not errors(LONGEST)
        (error,) = errors(TOO_LONG)
        assert error == (
            f"a sentence of {MOST_WORDS + 1} words, {MOST_WORDS} at most: "
            f"'One {' '.join(['word'] * 7)}' …"
        )

    def test_the_lines_of_a_paragraph_are_one_sentence(self) -> None:
        assert errors(TOO_LONG.replace(" ", "\n"))

    def test_a_code_span_is_one_word(self) -> None:
        assert not errors(f"`{TOO_LONG}` is one word.")

    def test_a_link_has_the_words_of_its_text(self) -> None:
        link = f'[{LONGEST[:-1]}](page.md#a "a title of four words")'
        assert not errors(f"{link}.")
        assert errors(f"One {link}.")

    def test_faults_of_one_sentence_are_all_told(self) -> None:
        assert len(errors(f"What somebody does {LONGEST}")) == 3


class TestSentences:
    @pytest.mark.parametrize("end", [".", "!", "?", ":", ";", '."', ".)", ".**"])
    @pytest.mark.parametrize("begin", ["T", "9", "`t`", '"T', "(T", "*T", "[T"])
    def test_an_end_and_a_beginning_part_them(self, end: str, begin: str) -> None:
        found = split(f"The first{end} {begin} is second.")
        assert len(found) == 2
        assert found[0].startswith("The first") and found[1].endswith("is second.")

    @pytest.mark.parametrize("text", ["Of 2.5 cycles.", "Step h12, e.g. its loop.", "sm_90.v2"])
    def test_other_full_stops_do_not(self, text: str) -> None:
        assert split(text) == [text]

    @pytest.mark.parametrize("gap", ["\n\n", "\n \n", "\n- ", "\n* ", "\n1. ", "\n   12. "])
    def test_paragraphs_and_items_do(self, gap: str) -> None:
        assert split(f"the first{gap}the second") == ["the first", "the second"]

    def test_each_is_on_one_line(self) -> None:
        assert split("The first\nline. The\n  second.") == ["The first line.", "The second."]


class TestSkipped:
    @pytest.mark.parametrize(
        "text",
        [
            "```cpp\n{}\n```",
            "~~~\n{}\n~~~",
            "    {}",
            "\t{}",
            "`{}`",
            "| {} |",
            "## {}",
            "![{}](a.svg)",
            "<!-- {} -->",
            "<!--\n{}\n-->",
            "<summary>{}</summary>",
            '<a title="{}">a</a>',
        ],
    )
    def test_what_is_not_prose_is_left_out(self, text: str) -> None:
        assert not errors(text.format(f"What somebody does {TOO_LONG}"))

    @pytest.mark.parametrize("text", ["# A", "| a |", "```\na\n```", "<!-- a -->", "    a"])
    def test_it_parts_the_prose_around_it(self, text: str) -> None:
        assert [s for s in split(f"before\n{text}\nafter") if s != "a"] == ["before", "after"]

    @pytest.mark.parametrize("text", ["<details>{}</details>", "<b>{}</b>", "> {}", "*{}*"])
    def test_prose_in_marks_is_checked(self, text: str) -> None:
        assert errors(text.format(TOO_LONG))
