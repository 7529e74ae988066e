"""tools/analysis/compare_kernels.py, as it is called."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from edited_kernels import library_kernel
from fake_backend import load_tool
from sass_text import ARCHITECTURES, DEFAULT, needs

from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.machine_code import source_diff
from flash_helpers.sass.show.page import read_sources

pytestmark = pytest.mark.slow

TOOL = "tools/analysis/compare_kernels.py"


@pytest.fixture(scope="module")
def tool():
    return load_tool(TOOL)


def run(tool, capsys, *arguments: str) -> tuple[int, str, str]:
    status = tool.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class TestFormats:
    def test_tables_by_default(self, tool, capsys) -> None:
        status, out, err = run(tool, capsys, "8", "9")
        assert (status, err) == (0, "")
        assert out.startswith(f"2 kernels, bf16, {DEFAULT}, compiled by ptxas")
        assert "MOV" in out and STEPS["v9"].idea.split()[0] in out

    def test_csv(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, "8..9", "--csv", "--dtype", "fp16")
        rows = list(csv.DictReader(out.splitlines()))
        assert [(row["step"], row["dtype"]) for row in rows] == [("v8", "fp16"), ("v9", "fp16")]

    def test_json_with_diffs(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, "8", "9", "--json", "--sass", "--source")
        document = json.loads(out)
        assert [entry["name"] for entry in document["kernels"]] == ["v8", "v9"]
        assert document["seq_len"] == 4096
        assert document["diffs"]["SASS, v8 to v9"]["likenesses"]["removed"] > 0
        assert "namespace v9" in document["diffs"]["Source, v8 to v9"]

    def test_markdown(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, "8", "9", "--markdown", "--sass")
        assert "**Resources**" in out and "| v8 " in out
        assert out.count("```diff\n") == 1 and out.rstrip().endswith("```")

    def test_sass_of_each_neighbouring_pair(self, tool, capsys) -> None:
        _, out, _ = run(tool, capsys, "13..15", "--sass")
        assert "SASS, v13 to v14\n" in out and "SASS, v14 to v15\n" in out
        assert "SASS, v13 to v15" not in out

    @needs("sm_80", "sm_90")
    def test_two_architectures(self, tool, capsys) -> None:
        status, out, _ = run(tool, capsys, "16", "--arch", "sm_80", "--arch", "sm_90")
        assert status == 0
        assert "\nv16 sm_80 " in out and "\nv16 sm_90 " in out

    def test_without_the_usual_architecture_take_the_latest_and_say_so(
        self, tool, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr("flash_helpers.measure.machine_code.ARCHITECTURE", "sm_10")
        status, out, err = run(tool, capsys, "16")
        latest = ARCHITECTURES[-1]
        assert (status, err) == (0, f"the library holds nothing for sm_10: this is {latest}\n")
        assert out.startswith(f"1 kernel, bf16, {latest}, compiled by")

    def test_html_is_one_file(self, tool, capsys, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        status, out, _ = run(tool, capsys, "8", "9", "--html", str(page))
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

    def test_that_is_not_at_hand_is_said(self, tool, capsys, monkeypatch, tmp_path) -> None:
        """As after installing, without a checkout: the rest works."""
        monkeypatch.setattr(tool, "ROOT", tmp_path)
        monkeypatch.setattr(tool, "RESULTS", tmp_path / "h100.json")
        page = tmp_path / "page.html"
        status, out, err = run(tool, capsys, "8", "9", "--source", "--html", str(page))
        assert (status, err) == (0, "")
        assert "forward_kernel.cuh is not at hand" in out
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
