"""Parts that the command lines of the tools share."""

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from flash_helpers.compile.toolchain import BuildError
from flash_helpers.console.command_line import (
    add_commit_argument,
    make_parser,
    not_negative,
    output_file,
    output_folder,
    positive,
    positive_seconds,
    print_text,
    run_tool,
    typed_command,
    write_or_check,
)


def test_help_shows_the_texts_as_they_are() -> None:
    description, examples = "Two\n  lines.\n", "examples:\n    tool --all   # everything\n"
    text = make_parser(description, examples, prog="tool").format_help()
    assert text.startswith("usage: tool ")
    assert description in text
    assert text.endswith(examples)


def test_wrong_usage_is_told_in_one_line(capsys) -> None:
    parser = make_parser("Does.", "", prog="tool")
    parser.add_argument("--dtype", choices=("fp16", "bf16"))
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--dtype", "fp64"])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"tool: error: .*'fp64'.*fp16.*bf16.*\n", err)


def test_the_commit_is_asked_from_git_unless_it_is_given() -> None:
    parser = argparse.ArgumentParser()
    add_commit_argument(parser)
    assert parser.parse_args([]).commit is None
    assert parser.parse_args(["--commit", "abc"]).commit == "abc"


class TestTypesOfArguments:
    @pytest.mark.parametrize(
        ("kind", "text", "value"),
        [(positive, "1", 1), (not_negative, "0", 0), (positive_seconds, "0.5", 0.5)],
    )
    def test_take_what_is_in_range(self, kind, text, value) -> None:
        assert kind(text) == value

    @pytest.mark.parametrize(
        ("kind", "text"),
        [(positive, "0"), (not_negative, "-1"), (positive_seconds, "0"), (positive_seconds, "nan")],
    )
    def test_name_a_value_that_is_not(self, kind, text) -> None:
        with pytest.raises(argparse.ArgumentTypeError, match=rf"^{text} "):
            kind(text)

    @pytest.mark.parametrize("kind", [positive, not_negative, positive_seconds])
    def test_refuse_what_is_no_number(self, kind) -> None:
        with pytest.raises(ValueError, match="'many'"):
            kind("many")


OUTPUTS = {
    "benchmarks/call_overhead.py": ["--json"],
    "benchmarks/compilers.py": ["--json"],
    "benchmarks/experiments/run_experiments.py": ["--json"],
    "benchmarks/first_call.py": ["--json"],
    "benchmarks/hopper_kernels.py": ["--json"],
    "benchmarks/long_sequences.py": ["--json"],
    "benchmarks/mma_cycles.py": ["--json"],
    "benchmarks/multimodal.py": ["--json"],
    "benchmarks/shared_wavefronts.py": ["--json"],
    "benchmarks/simulator.py": ["--json"],
    "benchmarks/simulator_speed.py": ["--json"],
    "tools/analysis/check_counts.py": ["--json", "--raw"],
    "tools/analysis/check_live_registers.py": ["--json"],
    "tools/analysis/check_resources.py": ["--baseline"],
    "tools/analysis/compare_kernels.py": ["--html"],
    "tools/benchmark/ncu_bench.py": ["--csv", "--json", "--raw"],
    "tools/benchmark/pt_bench.py": ["--csv", "--json", "--plot"],
    "tools/build/clean_asm.sh": ["-o"],
    "tools/build/extract_sass.py": ["-o"],
    "tools/build/get_embedded_ptx_from_cubin.py": ["-o"],
    "tools/build/parse_ptx_build.py": ["--output"],
    "tools/debug/debug.py": ["--out"],
    "tools/docs/build_site.py": ["--output"],
}


class TestOutputs:
    @pytest.mark.parametrize(
        ("tool", "option"), [(tool, option) for tool in OUTPUTS for option in OUTPUTS[tool]]
    )
    def test_that_cannot_be_written_are_refused_before_the_work(
        self, tool, option, root, tmp_path, monkeypatch, capfd
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = [option, "no/such folder/output"]
        if tool.endswith(".sh"):
            status = subprocess.run([root / tool, *arguments]).returncode
        else:
            monkeypatch.syspath_prepend((root / tool).parent)
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(root / tool))["main"](arguments)
            status = ended.value.code
        said = capfd.readouterr()
        assert (status, said.out) == (2, "")
        assert said.err.endswith(
            ": no/such folder/output cannot be written, there is no folder no/such folder: make it "
            "with mkdir -p 'no/such folder'\n"
        )
        assert not list(tmp_path.iterdir())

    def test_may_be_new_or_there(self, tmp_path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "file").touch()
        assert output_file(str(tmp_path / "new")) == tmp_path / "new"
        assert output_file(str(tmp_path / "file")) == tmp_path / "file"
        assert output_folder(str(tmp_path / "new")) == tmp_path / "new"
        assert output_folder(str(tmp_path / "there")) == tmp_path / "there"

    def test_in_the_current_folder_need_no_other(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert output_file("out.json") == Path("out.json")

    def test_of_the_wrong_kind_are_refused(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("there").mkdir()
        Path("file").touch()
        with pytest.raises(argparse.ArgumentTypeError, match="there is a folder: name a file"):
            output_file("there")
        with pytest.raises(argparse.ArgumentTypeError, match="file is a file: name a folder"):
            output_folder("file")


class TestRunTool:
    @pytest.mark.parametrize(("returned", "status"), [(0, 0), (1, 1), (2, 2), (None, 0)])
    def test_returns_the_status_of_the_work(self, returned, status) -> None:
        assert run_tool(lambda: returned, ValueError) == status

    @pytest.mark.parametrize(
        ("name", "reason"), [("a_folder", "Is a directory"), ("no/such/file", "No such file")]
    )
    def test_names_the_path_that_was_typed(self, name, reason, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        Path("a_folder").mkdir()
        assert run_tool(lambda: len(Path(name).read_text()), OSError) == 2
        assert re.fullmatch(rf"{name}: {reason}.*\n", capsys.readouterr().err)

    @pytest.mark.parametrize("error", [FileNotFoundError, ValueError, BuildError])
    def test_tells_bad_input_in_a_line(self, error, capsys) -> None:
        def work() -> None:
            raise error("v17 is not there")

        assert run_tool(work, OSError, ValueError) == 2
        assert capsys.readouterr() == ("", "v17 is not there\n")

    def test_tells_a_warning_in_a_line_and_goes_on(self, capsys) -> None:
        assert run_tool(lambda: warnings.warn("some is left out", UserWarning, stacklevel=1)) == 0
        assert capsys.readouterr().err == "warning: some is left out\n"

    def test_lets_a_defect_through(self) -> None:
        with pytest.raises(ZeroDivisionError):
            run_tool(lambda: 1 // 0, OSError, ValueError)

    @pytest.mark.parametrize(
        ("options", "said"), [({}, "interrupted"), ({"interrupted": "kept"}, "kept")]
    )
    def test_ends_with_130_after_an_interrupt(self, options, said, capsys) -> None:
        def work() -> None:
            raise KeyboardInterrupt

        assert run_tool(work, ValueError, **options) == 130
        assert capsys.readouterr() == ("", f"{said}\n")


ROOT = Path(__file__).resolve().parents[2]
# what is run as a file or as python -m, by the line that runs it
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in ("tools", "benchmarks", "flash_attention", "py/flash_helpers")
    for path in (ROOT / folder).rglob("*.py")
    if "\n    sys.exit(main(" in path.read_text()
)
WORKER = Path("py/flash_helpers/tune/worker.py")  # is no command line


def command_of(program: Path, *options: str) -> list[str]:
    """Runs it with --help. options: of Python."""
    module = ".".join(program.with_suffix("").parts).removeprefix("py.")
    is_module = program.parts[0] in ("flash_attention", "py")
    command = ["-m", module.removesuffix(".__main__")] if is_module else [str(program)]
    return [sys.executable, *options, *command, "--help"]


COMPUTE = {Path("benchmarks/hopper_kernels.py"), Path("benchmarks/shared_wavefronts.py")}
"""Programs whose tables of cases are arrays, which the tests read, too."""


def test_there_are_programs() -> None:
    assert {WORKER, *COMPUTE, Path("tools/debug/sanity_check.py")} <= {*PROGRAMS}


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in {WORKER, *COMPUTE}], ids=str)
def test_help_has_examples_and_waits_for_neither_torch_nor_numpy(program, root):
    command = command_of(program, "-X", "importtime")  # tells what is imported
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: ") and "\nexamples:\n" in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "argparse" in imported
    assert not {"torch", "numpy"} & imported


INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name in ("argparse", "numpy", "torch"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_an_interrupt_while_a_tool_starts_ends_it_without_a_traceback(program, root, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)  # which Python imports before all else
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command_of(program),
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == ""


def test_the_command_can_be_pasted_into_a_shell(monkeypatch) -> None:
    assert typed_command("tool.py", ["--json", "my file"]) == "tool.py --json 'my file'"
    monkeypatch.setattr(sys, "argv", ["/anywhere/tool.py", "--all"])
    assert typed_command("tool.py", None) == "tool.py --all"


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/home/someone/out.json", "out.json"),
        ("--json=/home/someone/out.json", "--json=out.json"),
        ("benchmarks/results/h100.json", "benchmarks/results/h100.json"),
        ("--arch=sm_90", "--arch=sm_90"),
        ("7..9", "7..9"),
    ],
)
def test_the_command_names_no_folder_of_the_machine(argument, kept) -> None:
    assert typed_command("tool.py", [argument]) == f"tool.py {kept}"


class TestPrintText:
    def test_writes_to_stdout(self, capsys) -> None:
        print_text("some text\n")
        assert capsys.readouterr().out == "some text\n"

    def test_ends_quietly_when_the_reader_has_seen_enough(self) -> None:
        module = "flash_helpers.console.command_line"
        program = f"from {module} import print_text; print_text('text\\n' * 10**6)"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == b"text\n"
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


class TestWriteOrCheck:
    def test_writes_what_is_stale_and_says_so(self, tmp_path, capsys) -> None:
        path = tmp_path / "page.md"
        path.write_text("old\n")
        assert write_or_check(path, "old\n", "new\n", check=False) == 0
        assert path.read_text() == "new\n"
        assert write_or_check(path, "new\n", "new\n", check=False) == 0
        assert capsys.readouterr().out == f"{path} written\n{path} is up to date\n"

    def test_a_check_prints_the_diff_and_writes_nothing(self, tmp_path, capsys) -> None:
        path = tmp_path / "page.md"
        path.write_text("same\nold\n")
        assert write_or_check(path, "same\nold\n", "same\nnew\n", check=True) == 1
        assert path.read_text() == "same\nold\n"
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == [f"--- {path}", f"+++ {path} (generated)"]
        assert lines[-3:] == [" same", "-old", "+new"]

    def test_a_check_of_what_is_up_to_date_prints_nothing(self, tmp_path, capsys) -> None:
        assert write_or_check(tmp_path / "page.md", "text\n", "text\n", check=True) == 0
        assert capsys.readouterr().out == ""

    def test_a_missing_last_newline_is_stale(self, tmp_path) -> None:
        assert write_or_check(tmp_path / "page.md", "text", "text\n", check=True) == 1


def test_only_the_standard_library_is_needed(root) -> None:
    source = str(root / "py")
    program = (
        f"import sys; sys.path.insert(0, {source!r}); import flash_helpers.console.command_line"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
