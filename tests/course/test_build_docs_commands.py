"""The commands of pages: which are run, where, how they must end, and what is shown of them."""

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from course_book import Book

from flash_helpers.course.commands import Command, Runner, StoppedError, copies_of

pytestmark = pytest.mark.slow


TELL_PYTHON = "import sys; print(sys.executable)"


def console(*lines: str, attributes: str = "") -> str:
    return "\n".join([f"```console {attributes}".rstrip(), *lines, "```", ""])


def output(text: str, arguments: str = "") -> str:
    return f"<!-- build:{f'output {arguments}'.strip()} -->\n\n{text}\n<!-- /build -->\n"


def check(book: Book) -> int:
    return book.run("--check", "docs/page.md")


def test_a_command_that_fails_fails_the_check_and_is_told(book: Book, capsys) -> None:
    book.write("text\n\n" + console("$ true", "$ echo said >&2; exit 3", "whatever"))
    assert check(book) == 1
    out = capsys.readouterr().out
    assert "docs/page.md:5: $ echo said >&2; exit 3\n" in out
    assert "status 3, not 0" in out
    assert "| said" in out
    assert "$ true" not in out


@pytest.mark.parametrize(
    ("attributes", "line", "status"),
    [
        ("", "$ true", 0),
        ("", "$ false", 1),
        ("", "$ false | cat", 1),
        ("exit=1", "$ false", 0),
        ("exit=1", "$ true", 1),
        ("exit=2", "$ false", 1),
        ("gpu", "$ false", 0),
        ("", "$ test -z $CUDA_VISIBLE_DEVICES", 0),
        ("", f"$ test $(command -v python) -ef $(python -c '{TELL_PYTHON}')", 0),
        ("", "$ python -c 'import flash_helpers'", 0),
    ],
)
def test_how_a_command_must_end(book: Book, attributes: str, line: str, status: int) -> None:
    book.write(console(line, attributes=attributes))
    assert check(book) == status


def test_blocks_of_other_languages_and_lines_without_a_prompt_are_not_run(book: Book) -> None:
    book.write("```sh\n$ false\n```\n" + console("$ true", "false"))
    assert check(book) == 0


@pytest.mark.parametrize(
    ("lines", "arguments", "attributes", "shown"),
    [
        (["$ echo a \\", "    b"], "", "", "$ echo a \\\n    b\na b\n```"),
        (["$ echo one", "old", "$ printf 'two  \\nthree\\n'"], "", "",
         "```console\n$ echo one\none\n$ printf 'two  \\nthree\\n'\ntwo\nthree\n```"),
        (["$ seq 9"], "lines=2", "", "$ seq 9\n1\n2\n...\n```"),
        # what a command complains of is shown where it must fail
        (["$ echo no >&2; false"], "", "exit=1", "\nno\n```"),
    ],
    ids=["a line that goes on", "under its command", "long", "errors"],
)  # fmt: skip
def test_output_is_written(book: Book, lines, arguments, attributes, shown) -> None:
    assert shown in book.built(output(console(*lines, attributes=attributes), arguments))
    assert check(book) == 0


def test_commands_run_in_a_copy_of_the_repository_one_after_the_other(book: Book) -> None:
    (book.root / "kept.txt").write_text("as it was\n")
    book.write(console("$ cat kept.txt && echo new > kept.txt", "$ grep new kept.txt"))
    assert check(book) == 0
    assert (book.root / "kept.txt").read_text() == "as it was\n"


def test_the_copy_lacks_what_is_built_or_cached_at_the_root_alone(book: Book) -> None:
    for folder in (".git", "build", "tools/build", "tools/__pycache__"):
        (book.root / folder).mkdir(parents=True)
        (book.root / folder / "file").touch()
    book.write(console("$ test ! -e build && test ! -e .git", "$ ls tools"))
    assert check(book) == 0
    assert "$ ls tools\nbuild\n```" in book.built(output(console("$ ls tools")))


def test_a_page_does_not_see_what_another_page_left(book: Book) -> None:
    book.write(console("$ touch left", "$ test -e left"), "a.md")
    book.write(console("$ test ! -e left", "$ touch left"), "b.md")
    assert book.run("--check", "docs/a.md", "docs/b.md") == 0


@pytest.mark.parametrize("left", ["kept.txt", "new.txt", "inside/new.txt"])
def test_a_copy_serves_again_unless_something_was_left_in_it(tmp_path: Path, left: str) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "kept.txt").write_text("as it was\n")
    with copies_of(root) as lend:
        with lend() as first:
            assert (first / "kept.txt").read_text() == "as it was\n"
        with lend() as second, lend() as other:
            assert second == first != other
            (second / left).write_text("another")
        with lend() as third, lend() as fourth:
            assert third == other and fourth not in (first, other)
            assert sorted(fourth.rglob("*")) == [fourth / "inside", fourth / "kept.txt"]
            assert (fourth / "kept.txt").read_text() == "as it was\n"


def test_stale_output_fails_the_check(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    book.write(output(console("$ echo new", "old")))
    assert check(book) == 1
    assert "-old\n+new\n" in capsys.readouterr().out


def test_output_of_a_command_that_fails_is_not_written(book: Book, capsys) -> None:
    text = output(console("$ false", "old"))
    path = book.write(text)
    assert book.run() == 1
    assert path.read_text() == text
    assert "nothing was written" in capsys.readouterr().err


def test_writing_runs_commands_up_to_the_last_output_only(book: Book) -> None:
    text = console("$ echo 5 > five") + output(console("$ cat five")) + console("$ false")
    assert "$ cat five\n5\n" in book.built(text)


def test_no_commands_runs_none_and_leaves_outputs_as_they_are(book: Book) -> None:
    text = output(console("$ false", "old"))
    path = book.write(text)
    assert book.run("--no-commands") == 0
    assert book.run("--check", "--no-commands", "docs/page.md") == 0
    assert path.read_text() == text


def test_a_gpu_block_cannot_be_an_output(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    book.write(output(console("$ true", attributes="gpu")))
    assert book.run() == 2
    assert "cannot show what runs on a GPU" in capsys.readouterr().err


def test_a_command_is_killed_at_the_time_limit_with_what_it_started(tmp_path: Path) -> None:
    command = Command("sleep 600 & echo $! > child; wait", 7, 0)
    outcome = Runner(os.environ, time_limit=0.5).run(command, tmp_path)
    assert outcome.failed
    assert "killed at the time limit" in outcome.failure_text("docs/page.md")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    assert _is_gone(child)


class TestPythonFile:
    """`python FILE ...` and `python -m ...` run in a fork of a process that has imported much."""

    SCRIPT = """\
import os, sys, time
from pathlib import Path
print(sys.argv[1:], os.environ["SAID"], Path.cwd() == Path(sys.argv[0]).parent.absolute())
print("é, of", __name__, file=sys.stderr)
if "wait" in sys.argv:
    Path("begun").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(3 if "fail" in sys.argv else None)
"""

    RUNNER = Runner({**os.environ, "SAID": "x"})

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "script.py").write_text(self.SCRIPT)
        return tmp_path

    @pytest.mark.parametrize(
        ("text", "status", "printed"),
        [
            ("", 0, "[] x True\n"),
            ("a 'b | c' \"d'e\" \\\n  -f=1", 0, "['a', 'b | c', \"d'e\", '-f=1'] x True\n"),
            ("fail", 3, "['fail'] x True\n"),
            ("a | tr a b", 0, "['b'] x True\n"),
            ("a | grep -c x | cat", 0, "1\n"),
            ("fail | cat", 3, "['fail'] x True\n"),
            ("a | grep nothing", 1, ""),
            ("$SAID", 0, "['x'] x True\n"),
            ("a > file; cat file", 0, "['a'] x True\n"),
        ],
    )
    def test_does_what_it_does_in_a_shell(
        self, folder: Path, text: str, status: int, printed: str
    ) -> None:
        outcome = self.RUNNER.run(Command(f"python script.py {text}", 1, 0), folder)
        assert (outcome.status, outcome.output, outcome.timed_out) == (status, printed, False)
        assert outcome.errors == "é, of __main__\n"

    def test_has_its_status_although_others_begin_when_it_ends(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """multiprocessing asks for the status of all processes whenever one is started, and a
        status can be read once."""
        read = multiprocessing.forkserver.read_signed

        def read_slowly(sentinel: int) -> int:
            time.sleep(0.05)
            return read(sentinel)

        monkeypatch.setattr(multiprocessing.forkserver, "read_signed", read_slowly)
        command = Command("python script.py", 1, 0)
        with ThreadPoolExecutor(4) as pool:
            outcomes = pool.map(lambda _: self.RUNNER.run(command, folder), range(16))
        assert [outcome.status for outcome in outcomes] == [0] * 16

    def test_runs_a_module_as_well(self, folder: Path) -> None:
        outcome = self.RUNNER.run(Command("python -m script a | cat", 1, 0), folder)
        assert (outcome.status, outcome.output) == (0, "['a'] x True\n")

    def test_that_must_fail_shows_what_it_complains_of(self, folder: Path) -> None:
        outcome = self.RUNNER.run(Command("python script.py fail", 1, 3), folder)
        assert not outcome.failed
        assert sorted(outcome.output.splitlines()) == ["['fail'] x True", "é, of __main__"]

    def test_is_killed_at_the_time_limit(self, folder: Path) -> None:
        runner = Runner({**os.environ, "SAID": "x"}, time_limit=5)
        outcome = runner.run(Command("python script.py wait | cat", 1, 0), folder)
        assert outcome.timed_out
        assert _is_gone(Path("/proc", (folder / "begun").read_text(), "stat"))


def test_stopping_kills_what_runs_and_lets_nothing_begin(tmp_path: Path) -> None:
    runner = Runner(os.environ)
    outcomes = []
    command = Command("touch begun; sleep 600", 1, 0)
    thread = threading.Thread(target=lambda: outcomes.append(runner.run(command, tmp_path)))
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    runner.stop()
    thread.join()
    assert outcomes[0].status < 0
    with pytest.raises(StoppedError):
        runner.run(command, tmp_path)


def test_a_tool_that_is_killed_leaves_neither_commands_nor_copies(
    book: Book, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    book.write(console("$ echo $$ > $BEGUN.new; mv $BEGUN.new $BEGUN; sleep 600"))
    copies = tmp_path_factory.mktemp("copies")
    begun = tmp_path_factory.mktemp("signs") / "begun"
    process = subprocess.Popen(
        [sys.executable, root / "tools/docs/build_docs.py", "--check", "--root", book.root],
        env={**os.environ, "TMPDIR": str(copies), "BEGUN": str(begun)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not begun.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert _is_gone(Path("/proc", begun.read_text().strip(), "stat"))
    assert list(copies.iterdir()) == []


def _is_gone(stat: Path) -> bool:
    """Waits until a killed process is no more, or only waits to be buried."""
    for _ in range(1000):
        try:
            if stat.read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
