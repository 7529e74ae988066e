"""Progress bars are for those who look at a terminal."""

import pytest

from flash_helpers.console.progress import bar, progress_bar, task


def work() -> list[int]:
    with progress_bar("reading") as progress:
        progress(1, 2)
        progress(2, 2)
    with task("waiting"):
        pass
    with bar(total=3, desc="by hand") as shown:
        shown.update(3)
    return list(bar(range(3), desc="counting", unit="step"))


def test_on_a_terminal_they_tell_how_far_the_work_is(terminal, capsys) -> None:
    assert work() == [0, 1, 2]
    err = capsys.readouterr().err
    assert "reading:   0%" in err and "0/2" in err  # it is gone in the end
    assert "waiting ..." in err
    assert "by hand: 100%" in err and "counting: 100%" in err


def test_elsewhere_nothing_is_written(capsys) -> None:
    assert work() == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("folder", ["py", "tools", "benchmarks", "flash_attention"])
def test_every_bar_is_one_of_these(folder, root) -> None:
    own = {
        path.relative_to(root).as_posix()
        for path in (root / folder).rglob("*.py")
        if any("tqdm(" in line and "disable=None" not in line for line in path.open())
    }
    assert own == set()
