"""tools/analysis/compare_kernels.py on anybody's files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from edited_kernels import library_kernel
from fake_backend import load_tool
from sass_text import DEFAULT

from flash_helpers.measure.machine_code import installed_library
from flash_helpers.sass.read.records import Kernel
from flash_helpers.sass.show.page import read_sources

pytestmark = pytest.mark.slow

OWN = "examples/own_kernel"
BEFORE, AFTER = (f"{OWN}/row_softmax{fixed}.sm_90.cubin" for fixed in ("", "_fixed"))


@pytest.fixture(scope="module")
def tool():
    return load_tool("tools/analysis/compare_kernels.py")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, root) -> None:
    monkeypatch.chdir(root)


def run(tool, capsys, *arguments: str) -> tuple[int, str, str]:
    status = tool.main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def page_data(text: str) -> dict[str, object]:
    """The JSON elements of a page, by their id."""
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', text, re.S)
    return {name: json.loads(data) for name, data in found}


class TestTwoFiles:
    def test_tables(self, tool, capsys) -> None:
        """One kernel in two files: the files tell them apart."""
        status, out, err = run(tool, capsys, f"{BEFORE}#row_softmax", AFTER)
        assert (status, err) == (0, "")
        assert out.startswith("2 kernels, sm_90, compiled by ptxas 13.0.88\n")
        assert f"row_softmax.sm_90: row_softmax of {BEFORE}\n" in out
        rows = [line.split() for line in out.splitlines() if line.startswith("row_softmax")]
        resources = {name: values for name, *values in rows if "shared" in values}
        assert resources["row_softmax.sm_90"][:6] == [
            "64",
            "348/348",
            "296",
            "16,384",
            "13",
            "26/64",
        ]
        assert resources["row_softmax_fixed.sm_90"][:3] == ["78", "0/0", "0"]
        assert "LDL.LU -" in out  # opcodes of kernels without a loop are compared, too

    def test_json_has_all_of_both_and_the_diff(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, BEFORE, AFTER, "--json", "--sass")
        document = json.loads(out)
        before, after = document["kernels"]
        assert (before["registers"], after["registers"]) == (64, 78)
        assert (before["spill_store_bytes"], after["spill_store_bytes"]) == (348, 0)
        assert (before["blocks_per_sm"], after["blocks_per_sm"]) == (13, 12)
        assert before["file"] == BEFORE and before["kernel"] == "row_softmax"
        assert after["changes"]["STL"] == -before["phases"]["prologue"]["opcodes"]["STL"]
        (title,) = document["diffs"]
        assert title == "SASS, row_softmax.sm_90 to row_softmax_fixed.sm_90"

    def test_bounds_of_loops(self, tool, capsys, planted: Path) -> None:
        names = [f"{planted}/several.sm_{number}.cubin#nested" for number in (80, 90)]
        _, out, _ = run(tool, capsys, *names, "--threads", "128", "--json")
        kernels = json.loads(out)["kernels"]
        assert [kernel["architecture"] for kernel in kernels] == ["sm_80", "sm_90"]
        assert all(kernel["loop_bounds"]["issue"] > 0 for kernel in kernels)
        assert all(kernel["warps_per_sm"] > 0 for kernel in kernels)

    def test_kernels_of_one_file_are_told_apart_by_their_names(self, tool, capsys, planted) -> None:
        file = planted / "several.sm_90.cubin"
        status, out, _ = run(tool, capsys, f"{file}#nested", f"{file}#table")
        assert status == 0
        assert "\nnested " in out and "\ntable " in out

    def test_csv_has_one_header(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, BEFORE, "9", "--csv")
        file, step = csv.DictReader(out.splitlines())
        assert (file["kernel"], file["step"]) == ("row_softmax", "")
        assert (step["kernel"], step["step"]) == ("", "v9")

    def test_threads_and_shared_memory_make_the_occupancy(self, tool, capsys, planted) -> None:
        file = f"{planted}/several.sm_90.cubin#nested"
        _, out, _ = run(tool, capsys, file, file)
        assert "how a kernel is launched: give --threads" in " ".join(out.split())
        _, out, _ = run(tool, capsys, file, file, "--threads", "256", "--smem", "102400", "--json")
        assert [k["blocks_per_sm"] for k in json.loads(out)["kernels"]] == [2, 2]


class TestMixed:
    def test_a_step_beside_a_file(self, tool, capsys) -> None:
        status, out, err = run(tool, capsys, "9", AFTER, "--sass")
        assert (status, err) == (0, "")
        assert "\nv9 " in out and "\nrow_softmax " in out
        assert "SASS, v9 to row_softmax" in out
        last = [line for line in out.splitlines() if line.startswith("row_softmax ")][-1]
        assert "HMMA" in last  # gone, and not "none"

    def test_a_kernel_of_this_library_in_a_file_is_known(self, tool, capsys) -> None:
        file = f"{installed_library()}#{library_kernel(9).symbol}"
        _, out, _ = run(tool, capsys, "9", file, "--arch", DEFAULT, "--json")
        step, file = json.loads(out)["kernels"]
        assert file["warps_per_sm"] == step["warps_per_sm"]
        assert file["loop_bounds"] == step["loop_bounds"] and file["step"] == "v9"


class TestPage:
    @pytest.fixture
    def page(self, tool, capsys, tmp_path):
        def make(*arguments: str) -> str:
            path = tmp_path / "page.html"
            status, _, err = run(tool, capsys, *arguments, "--html", str(path))
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
        assert (
            sources[f"{tmp_path}/before/row_softmax.cu"]
            != (sources[f"{tmp_path}/after/row_softmax_fixed.cu"])
        )

    def test_takes_no_file_from_elsewhere(self, tmp_path: Path) -> None:
        """A line table may name any file."""
        inside = tmp_path / "inside"
        inside.mkdir()
        (tmp_path / "secret.cu").write_text("secret\n" * 4096)
        kernel = library_kernel(9)
        line = next(i.source[0] for i in kernel.instructions if i.source)
        for name in ("../secret.cu", str(tmp_path / "secret.cu")):
            moved = _with_file(kernel, line.file, name)
            assert name not in read_sources([moved], inside)


def _with_file(kernel: Kernel, old: str, new: str) -> Kernel:
    return replace(
        kernel,
        instructions=tuple(
            replace(
                i,
                source=tuple(replace(s, file=new) if s.file == old else s for s in i.source),
            )
            for i in kernel.instructions
        ),
    )
