"""check_resources.py: the gate that fails when a kernel takes more than it did."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_backend import load_tool

TOOL = "tools/analysis/check_resources.py"
V1 = "v1_bf16_d128_Br64_Bc64_w4_async_Q0_K0_V0"

Edit = Callable[[dict[str, Any]], None]  # of a baseline's JSON


@pytest.fixture
def baseline(tmp_path, capsys) -> Path:
    """A baseline of that kernel alone."""
    path = tmp_path / "baseline.json"
    assert run(capsys, path, "--update")[0] == 0
    return path


def run(capsys, baseline: Path, *arguments: str) -> tuple[int, str, str]:
    """The tool's exit status, and what it printed."""
    options = ["--kernel", V1, "--arch", "sm_90", "--baseline", str(baseline), *arguments]
    status = load_tool(TOOL).main(options)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def edit(path: Path, change: Edit) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def figures(document: dict[str, Any]) -> dict[str, Any]:
    """The only kernel of a baseline."""
    ((row,),) = [section["kernels"] for section in document["compilers"]]
    return row


def add(name: str, amount: int) -> Edit:
    def change(document: dict[str, Any]) -> None:
        figures(document)[name] += amount
        figures(document)["made_from"] = "something else"

    return change


def newer_compiler(document: dict[str, Any]) -> None:
    document["compilers"][0]["compiler"]["version"] = [99, 1, 2]
    figures(document)["made_from"] = "something else"


class TestArchitectures:
    """Without --arch a kernel is read for those that it is made for."""

    def test_of_a_step_of_hopper_are_its_own(self, capsys) -> None:
        assert load_tool(TOOL).main(["--kernel", "g1", "--any-compiler"]) in (0, 1)
        assert "3 kernels compared: " in capsys.readouterr().out

    def test_that_it_is_not_made_for_are_refused(self, capsys) -> None:
        unlisted = "g1_bf16_d128_Br128_Bc96_K3_V2_pp"
        assert load_tool(TOOL).main(["--kernel", unlisted, "--arch", "sm_80"]) == 2
        assert "is made for none of sm_80: use --arch with one of sm_90a" in capsys.readouterr().err


class TestCheck:
    def test_passes_when_nothing_changed(self, capsys, baseline) -> None:
        before = baseline.read_text()
        status, out, _ = run(capsys, baseline)
        assert status == 0
        assert "1 kernels compared: 0 worse, 0 better, 1 the same" in out
        assert baseline.read_text() == before

    def test_fails_when_a_kernel_got_worse_and_tells_what_got_better(
        self, capsys, baseline
    ) -> None:
        edit(baseline, add("between_hgmma", -1))
        edit(baseline, add("registers", 8))
        status, out, _ = run(capsys, baseline)
        assert status == 1
        worse, _, better = out.partition("worse:")[2].partition("better:")
        assert V1 in worse and "instructions between HGMMA" in worse
        assert "-8" in better

    def test_lists_what_is_missing_and_what_is_new(self, capsys, baseline) -> None:
        edit(baseline, lambda document: figures(document).update(kernel="v1_other", made_from=""))
        status, out, _ = run(capsys, baseline)
        assert status == 1
        assert "missing from the library:\n  v1_other" in out
        assert f"not in the baseline:\n  {V1}" in out


class TestUnchanged:
    """The kernel is made from the same as in the baseline."""

    def test_is_not_read_again(self, capsys, baseline, monkeypatch) -> None:
        monkeypatch.setattr("flash_helpers.measure.baseline.all_kernels", pytest.fail)
        status, out, _ = run(capsys, baseline)
        assert status == 0
        assert "1 kernels compared: 0 worse, 0 better, 1 the same" in out
        assert "1 are made from the same as in the baseline and were not read again (--all)" in out

    def test_is_read_again_if_all_are_asked_for(self, capsys, baseline) -> None:
        edit(baseline, lambda document: figures(document).update(registers=1))
        assert run(capsys, baseline)[0] == 0
        status, out, _ = run(capsys, baseline, "--all")
        assert status == 1
        assert "registers" in out and "were not read again" not in out


class TestRenew:
    """The kernel is made from something else than in the baseline."""

    def test_writes_what_kernels_are_made_from_if_no_figure_differs(self, capsys, baseline) -> None:
        whole = baseline.read_text()
        edit(baseline, add("registers", 0))
        status, out, _ = run(capsys, baseline, "--renew")
        assert (status, baseline.read_text()) == (0, whole)
        assert out.endswith("now holds what they are made from\n")
        assert "now holds" not in run(capsys, baseline, "--renew")[1]

    @pytest.mark.parametrize(("amount", "status"), [(-1, 1), (1, 0)])
    def test_writes_nothing_if_one_does(self, capsys, baseline, amount: int, status: int) -> None:
        edit(baseline, add("registers", amount))
        before = baseline.read_text()
        assert run(capsys, baseline, "--renew")[0] == status
        assert baseline.read_text() == before


class TestCompiler:
    def test_another_is_refused_with_the_ways_out(self, capsys, baseline) -> None:
        edit(baseline, newer_compiler)
        status, out, err = run(capsys, baseline)
        assert (status, out) == (2, "")
        assert "has figures of ptxas 99.1.2: --update adds" in err

    def test_another_is_compared_on_demand(self, capsys, baseline) -> None:
        edit(baseline, newer_compiler)
        status, out, _ = run(capsys, baseline, "--any-compiler")
        assert status == 0
        assert "compared with ptxas 99.1.2" in out
        edit(baseline, add("registers", -1))
        assert run(capsys, baseline, "--any-compiler")[0] == 1

    def test_another_stands_beside_the_present_one(self, capsys, baseline) -> None:
        whole = json.loads(baseline.read_text())
        edit(baseline, newer_compiler)
        assert run(capsys, baseline, "--update")[0] == 0
        present, newer = json.loads(baseline.read_text())["compilers"]
        assert present == whole["compilers"][0]
        assert newer["compiler"]["version"] == [99, 1, 2]
        status, out, _ = run(capsys, baseline)
        assert (status, "99.1.2" in out) == (0, False)


class TestUpdate:
    def test_writes_what_the_library_takes_now(self, capsys, baseline) -> None:
        whole = baseline.read_text()
        edit(baseline, add("registers", -1))
        status, out, _ = run(capsys, baseline, "--update")
        assert status == 0
        assert "1 worse" in out
        assert baseline.read_text() == whole
        assert list(baseline.parent.iterdir()) == [baseline]

    def test_leaves_a_damaged_baseline_alone(self, capsys, baseline) -> None:
        baseline.write_text("damaged")
        status, _, err = run(capsys, baseline, "--update")
        assert status == 2
        assert "holds no baseline" in err
        assert baseline.read_text() == "damaged"


class TestBadInput:
    def test_of_a_baseline_that_is_not_there(self, capsys, tmp_path) -> None:
        status, out, err = run(capsys, tmp_path / "nix.json")
        assert (status, out) == (2, "")
        assert "nix.json is not there: --update makes" in err

    def test_of_a_kernel(self, capsys, baseline) -> None:
        status, out, err = run(capsys, baseline, "--kernel", "v99")
        assert (status, out) == (2, "")
        assert "'v99': the steps are v1 to" in err

    def test_of_an_architecture(self, capsys, baseline) -> None:
        status, _, err = run(capsys, baseline, "--arch", "sm_75")
        assert status == 2
        assert "sm_75" in err

    def test_of_the_command_line(self, capsys) -> None:
        with pytest.raises(SystemExit) as exit_info:
            load_tool(TOOL).main(["--nix"])
        assert exit_info.value.code == 2
