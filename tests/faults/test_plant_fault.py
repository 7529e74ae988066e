"""The command that plants a mistake in a kernel and tells how it comes to light."""

from __future__ import annotations

import pytest
from fake_backend import ARRIVAL, load_tool

from flash_helpers.check.faults import Fault, NotPlantedError, all_faults, drop, nth, swap
from flash_helpers.check.planting import plant
from flash_helpers.operations.attention_forward.faults import EPILOGUE, FAULTS, FP16, MAIN_LOOP, MMA

pytestmark = pytest.mark.slow

tool = load_tool("tools/debug/plant_fault.py")

RACE = "v1: copies of the next V begin before all have read the last"
WRONG = "v1: O and l of half the rows are not rescaled"


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    status = tool.main([*arguments])
    return status, *capsys.readouterr()


def test_the_mistakes_are_listed_of_a_step_or_of_all(capsys) -> None:
    assert run(capsys, "--list") == (0, "".join(f"{name}\n" for name in all_faults()), "")
    _, listed, _ = run(capsys, "v1..v2", "--list")
    assert listed.splitlines() == [name for name in FAULTS if name.startswith(("v1:", "v2:"))]


def test_a_race_is_told_with_the_edit_and_the_lines_of_cuda(capsys) -> None:
    status, out, err = run(capsys, "1", "copies", "of", "the", "next", "V")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == RACE
    assert lines[1].endswith(", batch 1, heads 1, seq 192, d_head 128")
    assert lines[3].startswith("  - bar.sync")
    assert not [line for line in lines if line.startswith("  + ")]
    before, caught = out.split("caught by the watcher: ")
    assert "__syncthreads();" in before
    assert "race" in caught and "copy_tile_async<B_c, kThreads>(V_smem" in caught


def test_a_wrong_output_is_told_with_its_error_and_where_it_begins(capsys) -> None:
    status, out, err = run(capsys, "v1", "not rescaled")
    assert (status, err) == (0, "")
    assert out.startswith(f"{WRONG}\n")
    assert "  - ex2.approx" in out and "  + mov.f32" in out
    assert "caught by the check of the output: max abs error " in out
    assert "first difference: l, key block 1, " in out


def test_a_mistake_that_is_not_caught_is_a_failure(monkeypatch, capsys) -> None:
    harmless = Fault("v1", FP16, MAIN_LOOP, MMA, swap(";", "; // harmless"), nth(0))
    monkeypatch.setitem(FAULTS, "v1: a comment", harmless)
    status, out, _ = run(capsys, "v1", "a comment")
    assert status == 1
    assert "NOT caught: max abs error " in out


def test_lints_are_told_too(monkeypatch, capsys) -> None:
    legal = Fault("v1", FP16, EPILOGUE, "ret", lambda line: f"{ARRIVAL}\n{line}")
    monkeypatch.setitem(FAULTS, "v1: an arrival", legal)
    status, out, _ = run(capsys, "v1", "an arrival")
    assert status == 1
    caught, lint = out.split("\nlint: ")
    assert "NOT caught: max abs error " in caught
    assert lint.startswith("arrivals that no thread waits for: 32 of 128 threads")


def test_a_kernel_without_what_is_edited_says_so(monkeypatch, capsys) -> None:
    for edit, instruction in ((swap("nothing", ""), MMA), (drop, "nothing")):
        fault = Fault("v1", FP16, MAIN_LOOP, instruction, edit)
        with pytest.raises(NotPlantedError, match="nothing"):
            plant(fault)
        monkeypatch.setitem(FAULTS, "v1: nothing", fault)
        status, out, err = run(capsys, "v1", "nothing")
        assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v99"], "the steps are v1 to v"),
        (
            ["v1", "no", "such"],
            f"no mistake of v1 has 'no such' in its name; its mistakes are\n  {RACE}\n",
        ),
    ],
)
def test_what_does_not_exist_is_wrong_usage(arguments, message, capsys) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_without_a_step_the_way_out_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([])
    assert ended.value.code == 2
    assert "name a STEP, such as v3, or use --list" in capsys.readouterr().err
