"""Messages of ptxas -v: read from logs of three releases, and tabulated."""

import csv
import io
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_backend import run_tool
from listing_files import FILES, SEVERAL

from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log
from flash_helpers.compile.ptxas_tables import LogError, entries_as_csv, entries_as_json, read_logs
from flash_helpers.kernel_configs import config_from_short_form
from flash_helpers.sass.read import reader

pytestmark = pytest.mark.slow

TOOL = "tools/build/parse_ptx_build.py"
LOGS = {path.stem: path.read_text() for path in FILES.glob("*.log")}
NOTHING = io.BytesIO()


def reports(log: str) -> dict[tuple[str, str], PtxasReport]:
    return {(report.symbol, report.target): report for report in parse_ptxas_log(LOGS[log])}


class TestLog:
    def test_agrees_with_the_headers_of_what_was_compiled(self) -> None:
        found = reports("nvcc-13.0")
        kernels = reader.load_kernels(SEVERAL)
        assert found.keys() == {(kernel.symbol, kernel.architecture) for kernel in kernels}
        for kernel in kernels:
            report = found[kernel.symbol, kernel.architecture]
            resources = kernel.resources
            assert report.registers == resources.registers
            assert report.stack_bytes == resources.stack_bytes
            assert report.barriers == resources.barriers
            assert report.smem_bytes == resources.static_smem_bytes

    def test_of_cuda_13(self) -> None:
        found = reports("nvcc-13.0")
        assert found["_Z6sharesPfi", "sm_80"] == PtxasReport(
            symbol="_Z6sharesPfi",
            target="sm_80",
            registers=10,
            stack_bytes=0,
            spill_store_bytes=0,
            spill_load_bytes=0,
            barriers=1,
            smem_bytes=32,
            cmem_bytes={0: 364},
        )
        spills = found["_Z6spillsPfi", "sm_90"]
        assert (spills.stack_bytes, spills.spill_store_bytes, spills.spill_load_bytes) == (
            160,
            316,
            340,
        )
        assert spills.cmem_bytes == {}

    @pytest.mark.parametrize("log", ["ptxas-11.8", "ptxas-12.4"])
    def test_of_older_releases_tells_the_same_but_for_barriers(self, log) -> None:
        """That all three allocate the same for these kernels is what their logs say."""
        old, new = reports(log), reports("nvcc-13.0")
        assert len(old) == 4
        for key, report in old.items():
            assert report.barriers is None
            assert asdict(report) == {**asdict(new[key]), "barriers": None}

    def test_does_not_take_a_function_for_the_kernel_before_it(self) -> None:
        log = LOGS["nvcc-13.0-rdc"]
        assert "Function properties for _Z7look_upfi\n    72 bytes stack frame" in log
        assert {report.stack_bytes for report in parse_ptxas_log(log)} == {0, 160}
        assert {report.symbol for report in parse_ptxas_log(log)} == {
            "_Z8divergesPfi",
            "_Z6spillsPfi",
            "_Z6sharesPfi",
            "_Z5callsPfi",
        }

    def test_does_not_take_a_function_for_the_kernel_that_calls_it(self) -> None:
        log = LOGS["nvcc-13.0"].replace(
            "ptxas info    : Function properties for _Z5callsPfi\n",
            "ptxas info    : Function properties for _Z7look_upfi\n"
            "    72 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
            "ptxas info    : Function properties for _Z5callsPfi\n",
        )
        assert parse_ptxas_log(log) == parse_ptxas_log(LOGS["nvcc-13.0"])

    def test_tells_architectures_with_a_letter(self) -> None:
        targets = {
            report.target: report.architecture for report in parse_ptxas_log(LOGS["nvcc-13.0-rdc"])
        }
        assert targets == {"sm_80": 80, "sm_90a": 90}

    def test_may_have_its_lines_in_another_order(self) -> None:
        log = LOGS["nvcc-13.0"]
        swapped = re.sub(r"(.*Function properties.*\n    .*\n)(.* Used .*\n)", r"\2\1", log)
        assert swapped != log
        assert parse_ptxas_log(swapped) == parse_ptxas_log(log)

    def test_may_have_its_numbers_in_another_order(self) -> None:
        line = "Used 10 registers, used 1 barriers, 32 bytes smem, 364 bytes cmem[0]"
        assert line in LOGS["nvcc-13.0"]
        other = (
            "Used 10 registers, used 1 barriers, 364 bytes cmem[0], 8 bytes cmem[2], 32 bytes smem"
        )
        log = LOGS["nvcc-13.0"].replace(line, other)
        (report,) = [
            r for r in parse_ptxas_log(log) if (r.symbol, r.target) == ("_Z6sharesPfi", "sm_80")
        ]
        assert (report.smem_bytes, report.cmem_bytes) == (32, {0: 364, 2: 8})

    def test_may_be_inside_the_log_of_a_build(self) -> None:
        log = LOGS["nvcc-13.0"]
        built = "".join(
            f"#12 3.45 {line}\r\nnote: {number} warnings\n"
            for number, line in enumerate(log.splitlines())
        )
        assert parse_ptxas_log(built) == parse_ptxas_log(log)

    def test_that_breaks_off_is_refused_or_read_so_far(self) -> None:
        log, whole = LOGS["nvcc-13.0"], parse_ptxas_log(LOGS["nvcc-13.0"])
        lines = log.splitlines(keepends=True)
        n_refused = 0
        for number in range(len(lines)):
            try:
                found = parse_ptxas_log("".join(lines[:number]))
            except ValueError:
                n_refused += 1
                continue
            assert found == whole[: len(found)]
        assert n_refused == 3 * len(whole)

    def test_of_two_compilers_at_a_time_is_refused(self) -> None:
        one, other = LOGS["nvcc-13.0"].split("ptxas info    : 0 bytes gmem\n")
        mixed = [
            line
            for pair in zip(one.splitlines(True), other.splitlines(True), strict=False)
            for line in pair
        ]
        with pytest.raises(ValueError, match=r"ptxas -v tells (no registers|the registers)"):
            parse_ptxas_log("".join(mixed))

    def test_that_lost_a_line_is_refused(self) -> None:
        lines = LOGS["nvcc-13.0"].splitlines(keepends=True)
        without = [line for line in lines if "_Z6sharesPfi' for 'sm_80'" not in line]
        assert len(without) == len(lines) - 1
        with pytest.raises(ValueError, match="the registers of _Z6spillsPfi twice"):
            parse_ptxas_log("".join(without))

    def test_without_kernels_is_empty(self) -> None:
        assert parse_ptxas_log("nvcc warning : something\nptxas info    : 0 bytes gmem\n") == []


class TestReading:
    def test_of_a_folder_takes_its_logs(self) -> None:
        entries = read_logs([str(FILES)], NOTHING)
        assert {Path(entry.log).stem for entry in entries} == set(LOGS)
        assert len(entries) == sum(len(parse_ptxas_log(log)) for log in LOGS.values())

    def test_of_stdin_takes_what_comes(self) -> None:
        entries = read_logs(["-"], io.BytesIO(LOGS["ptxas-11.8"].encode() + b"\xff"))
        assert [entry.kernel for entry in entries] == [
            report.symbol for report in parse_ptxas_log(LOGS["ptxas-11.8"])
        ]

    def test_names_kernels_of_the_library_by_their_configs_in_order(self, package) -> None:
        entries = read_logs([str(package / "ptxas")], NOTHING)
        order = list(dict.fromkeys(entry.kernel for entry in entries))
        assert {f"{name}.log" for name in order} == {
            path.name for path in (package / "ptxas").iterdir()
        }
        configs = [config_from_short_form(name) for name in order]
        assert configs == sorted(configs)
        for name in order:
            numbers = [e.report.architecture for e in entries if e.kernel == name]
            assert numbers == sorted(numbers)

    def test_leaves_out_logs_of_a_folder_that_tell_nothing(self, tmp_path) -> None:
        (tmp_path / "a.log").write_text("ptxas info    : 0 bytes gmem\n")
        (tmp_path / "b.log").write_text(LOGS["ptxas-12.4"])
        assert {Path(entry.log).stem for entry in read_logs([str(tmp_path)], NOTHING)} == {"b"}

    @pytest.mark.parametrize("text", ["", "no report\n", "\0\1\2"])
    def test_of_a_log_that_tells_nothing_is_refused(self, tmp_path, text) -> None:
        path = tmp_path / "a.log"
        path.write_text(text)
        for name in (path, tmp_path):
            with pytest.raises(LogError, match="compile with -Xptxas -v"):
                read_logs([str(name)], NOTHING)

    def test_of_a_folder_without_logs_is_refused(self, tmp_path) -> None:
        with pytest.raises(LogError, match=r"holds no \.log file"):
            read_logs([str(tmp_path)], NOTHING)


class TestTool:
    def test_prints_a_table(self, capsys) -> None:
        status, out, err = run_tool(capsys, TOOL, FILES / "nvcc-13.0.log")
        assert (status, err) == (0, "")
        rows = [line.split() for line in out.splitlines()[2:]]
        assert ["_Z6sharesPfi", "sm_80", "10", "0", "0", "0", "32", "364", "1"] in rows
        assert ["_Z6spillsPfi", "sm_90", "32", "316", "340", "160", "0", "0"] in rows
        assert len(rows) == 8

    def test_prints_csv_and_json_with_all_that_is_known(self, capsys) -> None:
        path = FILES / "ptxas-12.4.log"
        entries = read_logs([str(path)], NOTHING)
        _, out, _ = run_tool(capsys, TOOL, path, "--csv")
        assert out == entries_as_csv(entries)
        (row,) = [r for r in csv.DictReader(io.StringIO(out)) if r["symbol"] == "_Z6sharesPfi"]
        assert (row["smem_bytes"], row["barriers"], row["log"]) == ("32", "", str(path))
        _, out, _ = run_tool(capsys, TOOL, path, "--json")
        assert out == entries_as_json(entries)
        assert json.loads(out)[0]["cmem_bytes"] == {"0": 364}

    def test_writes_where_it_is_told(self, capsys, tmp_path) -> None:
        output = tmp_path / "table.csv"
        status, out, _ = run_tool(capsys, TOOL, FILES, "--csv", "--output", output)
        assert (status, out) == (0, "")
        assert output.read_text() == entries_as_csv(read_logs([str(FILES)], NOTHING))

    def test_reads_stdin(self, capsys, monkeypatch) -> None:
        data = io.BytesIO(LOGS["nvcc-13.0"].encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
        status, out, _ = run_tool(capsys, TOOL, "-")
        assert status == 0
        assert out.count("_Z6sharesPfi") == 2

    def test_says_in_short_what_is_wrong(self, capsys, tmp_path) -> None:
        cut = tmp_path / "cut.log"
        cut.write_text(LOGS["nvcc-13.0"].rpartition("ptxas info    : Used")[0])
        for file, message in (
            (tmp_path / "nix.log", "nix.log"),
            (cut, "the log is cut off or mixed up"),
            (SEVERAL, "is a fatbin, not what ptxas -v says: use "),
            (Path(__file__), "compile with -Xptxas -v"),
        ):
            status, out, err = run_tool(capsys, TOOL, file)
            assert (status, out) == (2, "")
            assert message in err
            assert len(err.splitlines()) == 1

    def test_leaves_the_output_as_it_was_when_it_fails(self, capsys, tmp_path) -> None:
        output = tmp_path / "table.csv"
        output.write_text("before")
        assert run_tool(capsys, TOOL, SEVERAL, "--output", output)[0] == 2
        assert output.read_text() == "before"
