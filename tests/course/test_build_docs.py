"""Pages are written between their markers, all or none, and what is stale or fails is found."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from course_book import TOOL, Book
from sass_text import needs

from flash_helpers.course.pages import COURSE, PAGES, file_stem, neighbours
from flash_helpers.kernel_configs import STEPS
from flash_helpers.registry.family import CORE, LAB, LIBRARY, LOGBOOK

pytestmark = pytest.mark.slow

BLOCK = "<!-- build:next 8 -->\nold\n<!-- /build -->\n"
BAD = "# A\n\n<!-- build:nothing 8 -->\n<!-- /build -->\n"


def test_what_stands_between_markers_is_replaced_and_nothing_else_is(book: Book) -> None:
    text = book.built(f"before\n{BLOCK}after `<!-- build:x -->`\n")
    assert text.startswith("before\n<!-- build:next 8 -->\n\nNext: [")
    assert text.endswith("\n\n<!-- /build -->\nafter `<!-- build:x -->`\n")
    assert "old" not in text


def test_building_twice_writes_nothing_the_second_time(book: Book, capsys) -> None:
    path = book.write(BLOCK)
    assert book.run() == 0
    assert "docs/page.md written" in capsys.readouterr().out
    before = path.stat()
    assert book.run() == 0
    assert capsys.readouterr().out == ""
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_one_block_that_cannot_be_made_keeps_every_page_from_being_written(
    book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    good = book.write(BLOCK, "a.md")
    book.write(BAD, "b.md")
    assert book.run() == 2
    assert good.read_text() == BLOCK
    assert capsys.readouterr().err.startswith("docs/b.md:3: there is no kind 'nothing'")


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("<!-- build:nothing -->\n<!-- /build -->\n", 1, "the kinds are facts, diff, "),
        ("\n<!-- build:facts 99 -->\n<!-- /build -->\n", 2, "'99': the steps are v1 to v"),
        ("<!-- build:facts -->\n<!-- /build -->\n", 1, "accepted is `build:facts N`"),
        ("<!-- build:nav 3 -->\n<!-- /build -->\n", 1, "accepted is `build:nav`"),
        ("<!-- build:diff 1 -->\n<!-- /build -->\n", 1, "step v1 has no parent"),
        ("<!-- build:counters x -->\n<!-- /build -->\n", 1, "'x' is no kernel"),
        ("<!-- build:sass 8 arch=sm_70 -->\n<!-- /build -->\n", 1, "arch=sm_70 is not one of"),
        ("<!-- build:counters 8 arch=sm_80 -->\n<!-- /build -->\n", 1, "is no kernel"),
        ('<!-- build:picture a "b -->\n<!-- /build -->\n', 1, "quotation marks"),
        ("<!-- build:listing 8 ( -->\n<!-- /build -->\n", 1, "'(' is no regular expression"),
        ("<!-- build:listing 8 HGMMA -->\n<!-- /build -->\n", 1, "matches 'HGMMA'"),
        ("<!-- build:listing 8 LDSM lines=0 -->\n<!-- /build -->\n", 1, "lines=0"),
        ("<!-- build:nav -->\n<!-- /build -->\n", 1, "docs/page.md is not in the list of pages"),
        ("<!-- build:output -->\n<!-- /build -->\n", 1, "holds no ```console block"),
        ("<!-- build:output 5 -->\n```console\n$ true\n```\n<!-- /build -->\n", 1, "[lines=20]"),
        ("<!-- build:facts 8 -->\n\ntext\n", 1, "is never closed"),
        ("a\n<!-- build:facts 8 -->\n<!-- build:nav -->\n<!-- /build -->\n", 3, "line 2 opens"),
        ("a\n\n<!-- /build -->\n", 3, "closes nothing"),
        ("  <!-- build:facts 8 -->\n<!-- /build -->\n", 1, "at the margin"),
        ("a <!-- build:facts 8 --><!-- /build -->\n", 1, "lines of their own"),
        ("<!--build:facts 8-->\n<!-- /build -->\n", 1, "is no pair of markers"),
        ("<!-- build:numbers 8 -->\n<!-- /build -->\n", 1, "give one of sass, bound, counters"),
        ("<!-- build:numbers 8 sass=NONE -->\n<!-- /build -->\n", 1, "no row of sass matches"),
        ("<!-- build:numbers 8 sass=( -->\n<!-- /build -->\n", 1, "'(' is no regular expression"),
        ("```console nope\n$ true\n```\n", 1, "it takes gpu or exit=N"),
        ("\n```console\ntrue\n```\n", 2, "needs a line that begins with '$ '"),
    ],
)
def test_what_is_wrong_is_named_with_its_page_and_line_and_what_is_accepted(
    book: Book, capsys: pytest.CaptureFixture[str], text: str, line: int, told: str
) -> None:
    path = book.write(text)
    assert book.run() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"docs/page.md:{line}: ")
    assert told in error
    assert len(error.splitlines()) == 1
    assert path.read_text() == text


def test_all_errors_of_all_pages_are_told_at_once(book: Book, capsys) -> None:
    book.write(BAD + BAD, "a.md")
    book.write(BAD, "b.md")
    assert book.run() == 2
    places = [line.partition(": ")[0] for line in capsys.readouterr().err.splitlines()]
    assert places == ["docs/a.md:3", "docs/a.md:7", "docs/b.md:3"]


def test_a_page_that_is_not_there_is_refused(book: Book, capsys) -> None:
    book.write(BLOCK)
    assert book.run("docs/other.md") == 2
    assert capsys.readouterr().err == "docs/other.md is not a page: pages are docs/page.md\n"


def test_only_the_pages_that_are_named_are_built(book: Book) -> None:
    left = book.write(BLOCK, "a.md")
    wanted = book.write(BLOCK, "b.md")
    assert book.run("docs/b.md") == 0
    assert left.read_text() == BLOCK
    assert wanted.read_text() != BLOCK


def test_the_readme_is_a_page_and_links_from_where_it_stands(book: Book) -> None:
    path = book.root / "README.md"
    path.write_text("<!-- build:next 8 -->\n<!-- /build -->\n")
    assert book.run() == 0
    assert "(docs/10_first_block_peeled.md)" in path.read_text()


def test_a_stale_page_fails_the_check_with_a_diff_and_is_not_written(book: Book, capsys) -> None:
    path = book.write(BLOCK)
    assert book.run("--check", "docs/page.md") == 1
    assert "\n-old\n" in capsys.readouterr().out
    assert path.read_text() == BLOCK
    assert book.run() == 0
    assert book.run("--check", "docs/page.md") == 0


@needs("sm_80", "sm_90")  # which the block shows
def test_a_stale_page_of_another_compiler_says_so(book: Book, capsys) -> None:
    path = book.write("<!-- build:facts 2 -->\n<!-- /build -->\n")
    assert book.run() == 0
    path.write_text(re.sub(r"ptxas [\d.]+\d", "ptxas 1.2.3", path.read_text()))
    capsys.readouterr()
    assert book.run("--check", "docs/page.md") == 1
    assert "the pages have figures of ptxas 1.2.3, and the kernels were compiled by" in (
        capsys.readouterr().out
    )


def test_a_missing_picture_fails_the_check_and_only_warns_the_writer(book: Book, capsys) -> None:
    path = book.write('<!-- build:picture banks "eight rows" -->\n<!-- /build -->\n')
    assert book.run() == 0
    assert "![eight rows](images/course/banks.svg)" in path.read_text()
    assert "docs/images/course/banks.svg is not there" in capsys.readouterr().err
    assert book.run("--check", "docs/page.md") == 1
    (book.root / "docs/images/course").mkdir(parents=True)
    (book.root / "docs/images/course/banks.svg").write_text("<svg/>")
    assert book.run("--check", "docs/page.md") == 0


def test_the_check_of_everything_misses_the_pages_of_the_list(book: Book, capsys) -> None:
    for page in PAGES[1:]:
        book.write("nothing\n", page.name)
    assert book.run("--check") == 1
    out = capsys.readouterr().out
    assert f"{PAGES[0].path} is not there, and py/flash_helpers/course/pages.py lists it\n" in out


def test_list_shows_pages_blocks_and_commands(book: Book, capsys) -> None:
    book.write(f"{BLOCK}\n```console\n$ false\n```\n")
    assert book.run("--list") == 0
    assert capsys.readouterr().out == "docs/page.md\n     1  next 8\n     6  $ false\n"


@pytest.mark.parametrize("arguments", [("--check", "--list"), ("--bad",)])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        TOOL.main(list(arguments))
    assert left.value.code == 2


def test_an_interrupt_leaves_quietly(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    path = book.write(BLOCK)
    monkeypatch.setattr(TOOL, "build_pages", interrupt)
    assert book.run() == 130
    assert path.read_text() == BLOCK


def test_every_step_has_one_page_and_the_course_is_one_row() -> None:
    steps = [page.step for page in COURSE if page.step]
    assert sorted(steps) == sorted(STEPS)
    for place in (CORE, LIBRARY, LAB, LOGBOOK):
        of_place = [step for step in steps if STEPS[step].place == place]
        assert of_place == [step.id for step in STEPS.values() if step.place == place]
    assert len({page.name for page in PAGES}) == len(PAGES)
    for before, after in itertools.pairwise(COURSE):
        assert neighbours(before)[1] == after
        assert neighbours(after)[0] == before
    assert neighbours(COURSE[0])[0] is neighbours(COURSE[-1])[1] is None


def test_steps_of_another_family_have_files_of_their_own() -> None:
    ninth = STEPS["v9"]
    assert file_stem(ninth) == "09"
    assert file_stem(replace(ninth, id="o9", family="overlap")) == "o9"


def test_navigation_names_both_neighbours(book: Book) -> None:
    path = book.write("<!-- build:nav -->\n<!-- /build -->\n", "08_integer_instructions.md")
    assert book.run() == 0
    links = re.findall(r"\]\((\S+)\)", Path(path).read_text())
    assert links == ["06_fp32_throughput.md", "10_first_block_peeled.md"]
