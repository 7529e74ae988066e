"""Files that are written whole or not at all."""

import os

import pytest

from flash_helpers.console.files import text_diff, write_if_different


class TestWriteIfDifferent:
    def test_writes_and_creates_the_folder(self, tmp_path):
        path = tmp_path / "new" / "file"
        assert write_if_different(path, "text")
        assert path.read_text() == "text"

    def test_leaves_an_equal_file_alone(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("text")
        os.utime(path, ns=(1, 1))
        assert not write_if_different(path, "text")
        assert path.stat().st_mtime_ns == 1

    def test_leaves_the_old_file_whole_when_it_cannot_finish(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        path.write_text("old")

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("pathlib.Path.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_if_different(path, "new")
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda path: path.mkdir(), "Is a directory"),
            (lambda path: path.parent.write_text("a file"), "Not a directory|File exists"),
        ],
    )
    def test_that_is_impossible_names_the_file_that_was_asked_for(self, tmp_path, make, said):
        path = tmp_path / "folder" / "file"
        path.parent.mkdir()
        if said != "Is a directory":
            path.parent.rmdir()
        make(path)
        with pytest.raises(OSError, match=said) as error:
            write_if_different(path, "text")
        assert error.value.filename == str(path)
        assert not [left for left in tmp_path.rglob(".*")]


def test_a_diff_goes_from_the_file_to_what_it_should_be():
    assert text_diff("name", "a\nb\n", "a\nc\n").splitlines()[:2] == [
        "--- name",
        "+++ name (generated)",
    ]
    assert text_diff("name", "a\n", "a\n") == ""
