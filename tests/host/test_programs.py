"""Host programs run to their end without a GPU: what they call is right, or told."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flash_helpers.compile.toolchain import BuildError, Toolchain, find_toolchain
from flash_helpers.host import command_line
from flash_helpers.host.errors import HostError
from flash_helpers.host.launches import Options
from flash_helpers.host.program import check_functions, check_program, compiled
from flash_helpers.host.run import Ended, run_program
from flash_helpers.host.stub_library import FOLDER_VARIABLE, stub_library

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
MATMUL = ROOT / "examples/host_program/matmul.cu"


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return find_toolchain((90,))
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def program(toolchain, tmp_path_factory) -> Callable[[Path], Path]:
    """Compiles a program once. The stub's cache is the tests' own."""
    folder = tmp_path_factory.mktemp("programs")
    made: dict[Path, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder / "cache"))
        stub = stub_library(toolchain, folder)

        def make(source: Path) -> Path:
            if source not in made:
                made[source] = compiled(source, "sm_90a", (), toolchain, stub, folder)
            return made[source]

        yield make


class Told(NamedTuple):
    ended: Ended
    out: str
    err: str


@pytest.fixture
def run(program, capfd) -> Callable[..., Told]:
    """Runs a program of the folder."""

    def run(name: str, *arguments: str, **options: object) -> Told:
        file = program(PROGRAMS / f"{name}.cu")
        ended = run_program(file, arguments, "sm_90a", Options(output=sys.stdout, **options))
        return Told(ended, *capfd.readouterr())

    return run


def test_calls_do_what_cuda_does(run) -> None:
    ended, out, err = run("calls")
    assert out == "the program says 1\nthe kernel says 2\nthe program says 3\n"
    assert err == "note: time is not simulated: the time between two events is 0 ms\n"
    assert ended.status == 0
    kernels = [launch.kernel.partition("(")[0] for launch in ended.launches]
    assert kernels[:3] == ["scaled", "scaled", "sum_of"]
    assert [launch.cluster for launch in ended.launches if launch.kernel.startswith("ranks")] == [
        (4, 1, 1)
    ]


# The errors of an H100 (driver 580.159.04).
INVALID = "invalid argument"
CLUSTER = "a kernel launch error has occurred due to cluster misconfiguration"


@pytest.mark.parametrize(
    ("mistake", "words", "error"),
    [
        ("too_long", "cudaMemcpy: 256 bytes at the destination .* end 4 bytes past", INVALID),
        ("freed_twice", "cudaFree: no allocation begins at 0x", INVALID),
        ("wrong_kind", "cudaMemcpy: the destination 0x.* is not device memory", INVALID),
        ("shared", "takes_shared.*65,536 bytes of dynamic .* may take 49,152", INVALID),
        ("block", "fills.*2048 threads; sm_90a allows 1024", INVALID),
        ("cluster", "a cluster of 16 blocks: more than 8 need cudaFuncAttributeNon", CLUSTER),
    ],
)
def test_a_refused_call_returns_an_error_and_is_told(run, mistake, words, error) -> None:
    told = run("refused", mistake)
    assert re.search(words, told.err)
    assert told.out == f"{error}\n"
    assert told.ended.status == 1


def test_a_refused_tensor_map_names_the_rule(run) -> None:
    told = run("refused", "tensor_map")
    assert told.err.startswith("cuTensorMapEncodeTiled: strides[0] is 36 bytes: give a multiple of")
    assert told.ended.status == 1


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("graph", "the stub of libcudart has no cudaGraphCreate"),
        ("race", r"launch 1 of the program, races.*\nshared-memory race: .*refused.cu:\d+"),
        ("early", r"launch 2 of the program, fills.*\nglobal memory touched before griddepcontrol"),
        ("grid", "meets synchronises its grid: launch it with cudaLaunchCooperativeKernel"),
        ("out_of_bounds", "past the end of the 256-byte allocation"),
        ("read_by_the_program", "reads or writes device memory at 0x.*: copy it with cudaMemcpy"),
    ],
)
def test_what_cannot_go_on_ends_the_program(run, mistake, words) -> None:
    told = run("refused", mistake)
    assert re.search(words, told.err)
    assert "no error" not in told.out
    assert told.ended.status == 1


def test_faults_are_collected_on_request(run) -> None:
    told = run("refused", "race", keep_going=True)
    assert told.out == "no error\n"
    (launch,) = told.ended.launches
    assert launch.n_faults == 1
    assert "shared-memory race" in launch.report
    assert told.ended.status == 1


@pytest.mark.parametrize(
    ("argument", "status"), [("", 0), ("own_status", 7), ("null", 128 + signal.SIGSEGV)]
)
def test_the_status_is_the_programs_own(run, argument, status) -> None:
    assert run("refused", argument).ended.status == status


def test_ctrl_c_ends_both_and_leaves_no_files(program, tmp_path) -> None:
    command = [sys.executable, "-m", "flash_helpers.ptx", "run"]
    process = subprocess.Popen(
        [*command, program(PROGRAMS / "refused.cu"), "waits"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert not [*tmp_path.iterdir()]


class TestCommandLine:
    def counts(self, program, capfd, *form: str) -> str:
        status = command_line.main(["count", *form, str(program(MATMUL)), "64", "64", "128"])
        out, err = capfd.readouterr()
        assert (status, err) == (0, "right: 64 x 64 x 128\n")
        return out

    def test_counts_are_a_table(self, program, capfd) -> None:
        header, _, row = self.counts(program, capfd).splitlines()
        assert header.split("  ")[0] == "kernel"
        assert row.split()[-8:-6] == ["1x1x1", "160x1x1"]

    def test_counts_for_machines_are_all_counts(self, program, capfd) -> None:
        (launch,) = json.loads(self.counts(program, capfd, "--json"))["launches"]
        # 2 steps of K, each 4 instructions of 64 x 64 x 16 in each of 4 warps
        assert launch["wgmma"] == 2 * 4 * 4
        assert launch["tma_bytes"] == 2 * 2 * 64 * 64 * 2
        (row,) = csv.DictReader(io.StringIO(self.counts(program, capfd, "--csv")))
        assert row == {key: str(value) for key, value in launch.items()}

    def test_a_source_is_compiled_with_options_of_nvcc(
        self, toolchain, tmp_path, capfd, program
    ) -> None:
        source = tmp_path / "one.cu"
        source.write_text(
            '#include <cstdio>\n__global__ void k() { printf("%d\\n", N); }\n'
            "int main(int, char **a) { k<<<1, 1>>>(); cudaStreamSynchronize(0); puts(a[1]); }\n"
        )
        arguments = ["run", "--arch", "80", str(source), "two", "--", "-DN=3"]
        arguments += ["--default-stream", "per-thread"]  # other names of the same functions
        assert command_line.main(arguments) == 0
        assert capfd.readouterr().out == "3\ntwo\n"

    def test_relocatable_device_code_is_told(self, program, tmp_path, capfd) -> None:
        source = tmp_path / "one.cu"
        source.write_text("__global__ void k() {}\nint main() { k<<<1, 1>>>(); }\n")
        assert command_line.main(["run", str(source), "--", "-rdc=true"]) == 2
        assert "leave -rdc=true out" in capfd.readouterr().err

    def test_errors_of_the_compiler_are_wrong_usage(self, program, tmp_path, capfd) -> None:
        source = tmp_path / "one.cu"
        source.write_text("int main() { return missing; }\n")
        assert command_line.main(["run", str(source)]) == 2
        assert 'identifier "missing" is undefined' in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            ("examples/own_kernel/row_softmax.ptx", r"is PTX: give a \.cu file with a main"),
            ("no_file", "No such file"),
            ("examples/own_kernel/README.md", "is no program: give"),
        ],
    )
    def test_a_file_of_another_kind_is_wrong_usage(self, toolchain, capfd, file, words) -> None:
        assert command_line.main(["run", str(ROOT / file)]) == 2
        assert re.search(words, capfd.readouterr().err)

    def test_without_a_compiler_the_packages_are_named(self, capfd, monkeypatch) -> None:
        monkeypatch.setattr("flash_helpers.host.run.find_nvcc", lambda environ: None)
        assert command_line.main(["run", str(MATMUL)]) == 2
        assert "python -m pip install 'nvidia-cuda-nvcc==" in capfd.readouterr().err

    def test_a_target_without_a_device_is_wrong_usage(self, capfd) -> None:
        assert command_line.main(["run", "--arch", "sm_42", str(MATMUL)]) == 2
        assert "sm_42' is no target of the host runner: use sm_75" in capfd.readouterr().err


EXAMPLES_TEXT = command_line.EXAMPLES.partition("examples:\n")[2].partition("\nexit status")[0]
EXAMPLES = [line.strip() for line in EXAMPLES_TEXT.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_of_the_help_runs(program, command, tmp_path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = subprocess.run(
        command.replace("python", sys.executable, 1),
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
    if "--lints" in command:
        assert not result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


class TestPrograms:
    def linked(self, folder: Path, text: str, *options: str) -> Path:
        """A program of C."""
        source, program = folder / "program.c", folder / "program"
        source.write_text(f"{text}\nint main() {{ return 0; }}\n")
        subprocess.run(["cc", "-o", program, source, *options], check=True)
        return program

    def test_the_static_runtime_is_told(self, toolchain, tmp_path) -> None:
        program = self.linked(tmp_path, 'asm(".section .nv_fatbin,\\"a\\"; .byte 0; .text");')
        with pytest.raises(HostError, match="runtime inside: link it with nvcc -cudart shared"):
            check_program(program, toolchain)

    def test_a_program_without_cuda_is_told(self, toolchain, tmp_path) -> None:
        with pytest.raises(HostError, match="does not use CUDA"):
            check_program(self.linked(tmp_path, ""), toolchain)

    def library(self, path: Path, text: str, *options: str) -> Path:
        """A shared library of C."""
        command = ["cc", "-shared", "-x", "c", "-", "-o", path, *options]
        subprocess.run(command, input=text, text=True, check=True)
        return path

    def test_a_function_that_no_header_declares_is_named(self, toolchain, tmp_path) -> None:
        (tmp_path / "stub").mkdir()
        self.library(tmp_path / "stub/libcudart.so", "void cudaMalloc() {}")
        whole = self.library(
            tmp_path / "whole.so", "void cudaMalloc() {} void cudaGLSetGLDevice() {}"
        )
        text = "void cudaGLSetGLDevice(); void cudaMalloc();\n"
        text += "void f() { cudaMalloc(); cudaGLSetGLDevice(); }"
        program = self.linked(tmp_path, text, str(whole))
        with pytest.raises(HostError, match="uses cudaGLSetGLDevice, which the stub lacks"):
            check_functions(program, tmp_path / "stub")

    def test_a_runtime_of_another_cuda_is_told(self, toolchain, tmp_path) -> None:
        self.library(tmp_path / "libcudart.so", "", "-Wl,-soname,libcudart.so.11")
        program = self.linked(tmp_path, "", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lcudart")
        with pytest.raises(HostError, match=r"libcudart\.so\.11, and the stub is made for CUDA"):
            check_program(program, toolchain)
