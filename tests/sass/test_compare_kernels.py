"""tools/analysis/compare_kernels.py, as it is called: on steps, and on anybody's files."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from edited_kernels import edit_all, library_kernel
from fake_backend import load_tool, run_tool
from sass_text import DEFAULT, needs

from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.machine_code import source_diff, with_sources
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.records import Instruction
from flash_helpers.sass.show.page import read_sources

pytestmark = pytest.mark.slow

TOOL = "tools/analysis/compare_kernels.py"
OWN = "examples/own_kernel"
BEFORE, AFTER = (f"{OWN}/row_softmax{fixed}.sm_90.cubin" for fixed in ("", "_fixed"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, root) -> None:
    monkeypatch.chdir(root)


class TestFormats:
    def test_tables_by_default(self, capsys) -> None:
        status, out, err = run_tool(capsys, TOOL, "8", "9")
        assert (status, err) == (0, "")
        assert out.startswith(f"2 kernels, bf16, {DEFAULT}, compiled by ptxas")
        assert "MOV" in out and STEPS["v9"].idea.split()[0] in out

    def test_csv(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, "8..9", "--csv", "--dtype", "fp16")
        rows = list(csv.DictReader(out.splitlines()))
        assert [(row["step"], row["dtype"]) for row in rows] == [("v8", "fp16"), ("v9", "fp16")]

    def test_all_dtypes_are_those_that_all_of_the_steps_are_built_in(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, "o4..5", "--csv", "--dtype", "all")
        rows = list(csv.DictReader(out.splitlines()))
        assert [(row["step"], row["dtype"]) for row in rows] == [("o4", "bf16"), ("o5", "bf16")]
        status, _, err = run_tool(capsys, TOOL, "o4", "--dtype", "fp16")
        assert status == 2 and "no config of o4 is listed in fp16" in err

    def test_json_with_diffs(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, "8", "9", "--json", "--sass", "--source")
        document = json.loads(out)
        assert [entry["name"] for entry in document["kernels"]] == ["v8", "v9"]
        assert document["size"] == 4096
        assert document["diffs"]["SASS, v8 to v9"]["likenesses"]["removed"] > 0
        assert "namespace v9" in document["diffs"]["Source, v8 to v9"]

    def test_markdown(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, "8", "9", "--markdown", "--sass")
        assert "**Resources**" in out and "| v8 " in out
        assert out.count("```diff\n") == 1 and out.rstrip().endswith("```")

    def test_sass_of_each_neighbouring_pair(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, "13..15", "--sass")
        assert "SASS, v13 to v14\n" in out and "SASS, v14 to v15\n" in out
        assert "SASS, v13 to v15" not in out

    @needs("sm_80", "sm_90")
    def test_two_architectures(self, capsys) -> None:
        status, out, _ = run_tool(capsys, TOOL, "16", "--arch", "sm_80", "--arch", "sm_90")
        assert status == 0
        assert "\nv16 sm_80 " in out and "\nv16 sm_90 " in out

    def test_html_is_one_file(self, capsys, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        status, out, _ = run_tool(capsys, TOOL, "8", "9", "--html", str(page))
        assert status == 0 and out
        assert [path.name for path in page.parent.iterdir()] == ["page.html"]
        assert page.read_text().startswith("<!doctype html>")


class TestSource:
    def test_is_that_of_the_two_files(self, root) -> None:
        text = source_diff(STEPS["v8"], STEPS["v9"], root)
        assert text.startswith("--- previous_kernels/v8/forward_kernel.cuh\n")
        assert "-namespace v8 {" in text and "+namespace v9 {" in text

    def test_folds_the_namespace(self, root) -> None:
        text = source_diff(STEPS["v8"], STEPS["v9"], root, fold_namespace=True)
        changed = [line for line in text.splitlines() if line[:1] in "+-"]
        assert not any("namespace v" in line for line in changed)
        assert len(text) < len(source_diff(STEPS["v8"], STEPS["v9"], root))

    def test_that_is_not_at_hand_is_said(self, capsys, monkeypatch, tmp_path) -> None:
        """As after installing, without a checkout: the rest works."""
        tool = load_tool(TOOL)
        monkeypatch.setattr(tool, "ROOT", tmp_path)
        page = tmp_path / "page.html"
        status, out, err = run_tool(capsys, tool, "8", "9", "--source", "--html", page)
        assert (status, err) == (0, "")
        assert "forward_kernel.cuh is missing" in out
        assert "No measurement of these kernels" in out
        assert "is not in this page" in page.read_text()

    def test_that_changed_since_the_build_is_not_shown(self, root, tmp_path) -> None:
        kernel = library_kernel(9)
        name = str(STEPS["v9"].source)
        assert name in read_sources([kernel], root)
        text = (root / name).read_text()
        (tmp_path / name).parent.mkdir(parents=True)
        for damaged in ("// a new line\n" * 40 + text, text[: len(text) // 2]):
            (tmp_path / name).write_text(damaged)
            assert name not in read_sources([kernel], tmp_path)

    def test_is_shown_although_the_compiler_takes_lines_of_a_header_for_its_own(self, root) -> None:
        """It does so where it inlines the header's function; the line may be empty here."""
        kernel = library_kernel(9)
        name = str(STEPS["v9"].source)
        empty = (root / name).read_text().split("\n").index("") + 1
        for order, is_shown in ((1, True), (-1, False)):
            moved = edit_all(
                kernel,
                lambda i, order=order: replace(
                    i,
                    source=(replace(i.source[-1], line=empty), i.source[-1])[::order]
                    if i.source and i.source[-1].file == name
                    else i.source,
                ),
            )
            assert (name in read_sources([moved], root)) == is_shown


def page_data(text: str) -> dict[str, object]:
    """The JSON elements of a page, by their id."""
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', text, re.S)
    return {name: json.loads(data) for name, data in found}


class TestTwoFiles:
    def test_tables(self, capsys) -> None:
        """One kernel in two files: the files tell them apart."""
        status, out, err = run_tool(capsys, TOOL, f"{BEFORE}#row_softmax", AFTER)
        assert (status, err) == (0, "")
        assert out.startswith("2 kernels, sm_90, compiled by ptxas 13.0.88\n")
        assert f"row_softmax.sm_90: row_softmax of {BEFORE}\n" in out
        rows = [line.split() for line in out.splitlines() if line.startswith("row_softmax")]
        resources = {name: values for name, *values in rows if "shared" in values}
        found = resources["row_softmax.sm_90"][:6]
        assert found == ["64", "348/348", "296", "16,384", "13", "26/64"]
        assert resources["row_softmax_fixed.sm_90"][:3] == ["78", "0/0", "0"]
        assert "LDL.LU -" in out  # opcodes of kernels without a loop are compared, too

    def test_json_has_all_of_both_and_the_diff(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, BEFORE, AFTER, "--json", "--sass")
        document = json.loads(out)
        before, after = document["kernels"]
        assert (before["registers"], after["registers"]) == (64, 78)
        assert (before["spill_store_bytes"], after["spill_store_bytes"]) == (348, 0)
        assert (before["blocks_per_sm"], after["blocks_per_sm"]) == (13, 12)
        assert before["file"] == BEFORE and before["kernel"] == "row_softmax"
        assert after["changes"]["STL"] == -before["phases"]["prologue"]["opcodes"]["STL"]
        (title,) = document["diffs"]
        assert title == "SASS, row_softmax.sm_90 to row_softmax_fixed.sm_90"

    def test_bounds_of_loops(self, capsys, planted: Path) -> None:
        names = [f"{planted}/several.sm_{number}.cubin#nested" for number in (80, 90)]
        _, out, _ = run_tool(capsys, TOOL, *names, "--threads", "128", "--json")
        kernels = json.loads(out)["kernels"]
        assert [kernel["architecture"] for kernel in kernels] == ["sm_80", "sm_90"]
        assert all(kernel["loop_bounds"]["issue"] > 0 for kernel in kernels)
        assert all(kernel["warps_per_sm"] > 0 for kernel in kernels)

    def test_kernels_of_one_file_are_told_apart_by_their_names(self, capsys, planted) -> None:
        file = planted / "several.sm_90.cubin"
        status, out, _ = run_tool(capsys, TOOL, f"{file}#nested", f"{file}#table")
        assert status == 0
        assert "\nnested " in out and "\ntable " in out

    def test_csv_has_one_header(self, capsys) -> None:
        _, out, _ = run_tool(capsys, TOOL, BEFORE, "9", "--csv")
        file, step = csv.DictReader(out.splitlines())
        assert (file["kernel"], file["step"]) == ("row_softmax", "")
        assert (step["kernel"], step["step"]) == ("", "v9")

    def test_threads_and_shared_memory_make_the_occupancy(self, capsys, planted) -> None:
        file = f"{planted}/several.sm_90.cubin#nested"
        _, out, _ = run_tool(capsys, TOOL, file, file)
        assert "how a kernel is launched: give --threads" in " ".join(out.split())
        _, out, _ = run_tool(
            capsys, TOOL, file, file, "--threads", "256", "--smem", "102400", "--json"
        )
        assert [k["blocks_per_sm"] for k in json.loads(out)["kernels"]] == [2, 2]

    def test_threads_that_a_kernel_tells_need_not_be_given(self, capsys, planted) -> None:
        file = f"{planted}/dispatch.sm_90a.cubin#by_switch"  # __launch_bounds__(256)
        _, out, _ = run_tool(capsys, TOOL, file, file, "--smem", "102400", "--json")
        assert [k["blocks_per_sm"] for k in json.loads(out)["kernels"]] == [2, 2]


class TestMixed:
    def test_a_step_beside_a_file(self, capsys) -> None:
        status, out, err = run_tool(capsys, TOOL, "9", AFTER, "--sass")
        assert (status, err) == (0, "")
        assert "\nv9 " in out and "\nrow_softmax " in out
        assert "SASS, v9 to row_softmax" in out
        last = [line for line in out.splitlines() if line.startswith("row_softmax ")][-1]
        assert "HMMA" in last  # gone, and not "none"

    def test_a_kernel_of_this_library_in_a_file_is_known(self, capsys) -> None:
        file = f"{library_path()}#{library_kernel(9).symbol}"
        _, out, _ = run_tool(capsys, TOOL, "9", file, "--arch", DEFAULT, "--json")
        step, file = json.loads(out)["kernels"]
        assert file["warps_per_sm"] == step["warps_per_sm"]
        assert file["loop_bounds"] == step["loop_bounds"] and file["step"] == "v9"


class TestPage:
    @pytest.fixture
    def page(self, capsys, tmp_path):
        def make(*arguments: str) -> str:
            path = tmp_path / "page.html"
            status, _, err = run_tool(capsys, TOOL, *arguments, "--html", str(path))
            assert (status, err) == (0, "")
            return path.read_text()

        return make

    def test_shows_the_diff_with_the_sources_beside_the_files(self, page, root: Path) -> None:
        data = page_data(page(BEFORE, AFTER))
        assert [k["name"] for k in data["index"]["kernels"]] == [
            "row_softmax.sm_90", "row_softmax_fixed.sm_90"
        ]  # fmt: skip
        sources = data["index"]["sources"]
        assert set(sources) == {f"{OWN}/row_softmax.cu", f"{OWN}/row_softmax_fixed.cu"}
        assert all(data["diff-1"][pane] for pane in ("cuda", "ptx", "sass"))

    def test_two_files_of_one_name_are_each_its_own(self, page, root: Path, tmp_path: Path) -> None:
        """The lines of one must not be shown as those of the other."""
        for folder, fixed in (("before", ""), ("after", "_fixed")):
            (tmp_path / folder).mkdir()
            name = f"row_softmax{fixed}"
            shutil.copy(root / OWN / f"{name}.sm_90.cubin", tmp_path / folder / "k.cubin")
            shutil.copy(root / OWN / f"{name}.cu", tmp_path / folder)
        data = page_data(page(f"{tmp_path}/before/k.cubin", f"{tmp_path}/after/k.cubin"))
        sources = data["index"]["sources"]
        names = (f"{tmp_path}/before/row_softmax.cu", f"{tmp_path}/after/row_softmax_fixed.cu")
        assert sources[names[0]] != sources[names[1]]

    def test_takes_no_file_from_elsewhere(self, tmp_path: Path) -> None:
        """A line table may name any file."""
        inside = tmp_path / "inside"
        inside.mkdir()
        (tmp_path / "secret.cu").write_text("secret\n" * 4096)
        kernel = library_kernel(9)
        line = next(i.source[0] for i in kernel.instructions if i.source)
        for name in ("../secret.cu", str(tmp_path / "secret.cu")):
            moved = edit_all(
                kernel,
                lambda i, name=name: replace(
                    i, source=tuple(replace(s, file=name) for s in i.source if s.file == line.file)
                ),
            )
            assert name not in read_sources([moved], inside)

    def test_takes_sources_from_where_the_line_table_of_a_file_says(self, tmp_path: Path) -> None:
        """By the whole path, and only files that are named as sources are."""
        kernel = library_kernel(9)
        own = next(i.source[0].file for i in kernel.instructions if i.source)
        for name, is_taken in (("k.cu", True), ("k.py", True), ("shadow", False)):
            path = tmp_path / name
            path.write_text("code\n" * 4096)

            def moved(i: Instruction, path: Path = path) -> Instruction:
                chain = tuple(replace(s, file=str(path)) for s in i.source if s.file == own)
                return replace(i, source=chain)

            changed, texts = with_sources(edit_all(kernel, moved), tmp_path / "elsewhere")
            assert (str(path) in texts) is is_taken
            assert str(path) in {line.file for i in changed.instructions for line in i.source}
