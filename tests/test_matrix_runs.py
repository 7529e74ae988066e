"""A matrix test runs again when what it depends on has changed, and the record is written by a run
in which all tests of a family in a file passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matrix_digest import (
    MatrixDigest,
    files_digest,
    kernels_digest,
    load_record,
    ptx_code,
    rooms,
    save_record,
    with_support,
)

from flash_helpers.registry.overlap import OVERLAP

ROOT = Path(__file__).resolve().parents[1]
PASSED = MatrixDigest(kernels="a", sources="b")

PTX = """\
//
// Cuda compilation tools, release 13.0, V13.0.88
//
.target sm_80
{
	.loc	1 90 0
	mov.u32 	%r1, %tid.x;
}
	.file	1 "kernels/o1.cuh"
	.file	2 "/usr/local/cuda-13.0/include/sm_30_intrinsics.hpp"
	.section	.debug_info
	{
.b8 95,73,78
.b64 .debug_abbrev
	}
"""

# -- what is due -----------------------------------------------------------------------------------


def test_what_passed_is_not_due() -> None:
    assert PASSED.differences(PASSED) == []


def test_what_differs_from_what_passed_is_due() -> None:
    assert PASSED.differences(None) == ["no run has passed yet"]
    assert MatrixDigest("c", "b").differences(PASSED) == ["the kernels differ from what passed"]
    assert MatrixDigest("a", "c").differences(PASSED) == [
        "the test, or what it imports, differs from what passed"
    ]


# -- digests ---------------------------------------------------------------------------------------


def test_the_code_of_ptx_is_without_lines_and_folders() -> None:
    moved = PTX.replace("90 0", "91 0").replace("/usr/local/cuda-13.0", "/opt/cuda")
    moved = moved.replace("95,73,78", "95,73,79")
    assert ptx_code(moved.replace("V13.0.88", "V13.0.89")) == ptx_code(PTX)
    assert ptx_code(PTX) == ".target sm_80\n{\nmov.u32 \t%r1, %tid.x;\n}"


def test_another_instruction_launch_or_compiler_is_another_kernel() -> None:
    config = OVERLAP.progression()[0]
    texts = {config.short_form(): PTX}
    digest = kernels_digest([config], texts)
    assert digest == kernels_digest([config], {config.short_form(): PTX.replace("90 0", "91 0")})
    assert digest != kernels_digest([config], {config.short_form(): PTX.replace("%r1", "%r2")})
    assert digest != kernels_digest([config], {config.short_form(): PTX.replace(".88", ".89")})
    other = config.replace(static_row_stride=0)
    assert digest != kernels_digest([other], {other.short_form(): PTX})


def test_every_process_has_the_same_launches() -> None:
    """The order of a set is its process's own."""
    program = (
        "from matrix_digest import ROOT, launches_text, listed_configs\n"
        "print(*map(launches_text, listed_configs(ROOT)), sep='\\n')"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "2")
    }
    (text,) = texts
    assert text


def test_files_are_known_by_name_and_text(tmp_path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("x = 1")
    digest = files_digest(tmp_path, [first])
    second.write_text("x = 1")
    assert files_digest(tmp_path, [second]) != digest
    first.write_text("x = 2")
    assert files_digest(tmp_path, [first]) != digest


def test_the_support_of_a_test_is_what_it_imports_and_what_that_imports(tmp_path) -> None:
    support = tmp_path / "tests/support"
    support.mkdir(parents=True)
    (support / "first.py").write_text("def f():\n    import second\n")
    (support / "second.py").write_text("import json\n")
    (support / "third.py").write_text("")
    test = tmp_path / "tests/test_it.py"
    test.write_text("from first import f\n")
    found = with_support(tmp_path, test)
    assert {path.name for path in found} == {"test_it.py", "first.py", "second.py"}


def test_a_test_depends_on_the_rooms_that_it_imports_and_on_those_of_every_test(tmp_path) -> None:
    helpers = tmp_path / "py/flash_helpers"
    folders = ("check", "export/c", "ptx", "registry", "runtime", "sass")
    for folder in folders:
        (helpers / folder).mkdir(parents=True)
        (helpers / folder / "it.py").write_text("")
    (helpers / "gpu.py").write_text("")
    test = tmp_path / "test_it.py"
    test.write_text(
        "from flash_helpers.export.c.it import f\n"
        "from flash_helpers.gpu import g\n"
        "from flash_helpers.registry.it import h\n"
    )
    found = {path.relative_to(helpers).as_posix() for path in rooms(tmp_path, test)}
    assert found == {"check/it.py", "export/c/it.py", "gpu.py", "ptx/it.py", "runtime/it.py"}


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "matrix.json"
    assert load_record(path) == {}
    record = {
        ("hopper", "tests/test_it.py"): PASSED,
        ("ampere", "tests/test_it.py"): MatrixDigest("c", "d"),
    }
    save_record(path, record)
    assert load_record(path) == record


# -- runs ------------------------------------------------------------------------------------------

CONFTEST = """
from pathlib import Path

from matrix_digest import MatrixDigest
from matrix_runs import OPTION, MatrixRuns

from flash_helpers.kernel_configs import FAMILIES

HERE = Path(__file__).parent


def digests_of(family, tests):
    kernels = (HERE / "kernels.txt").read_text()
    return {path: MatrixDigest(kernels, f"{family.name} {path.name}") for path in tests}


def over_budget():
    return (HERE / "over_budget.txt").read_text().split()


def pytest_addoption(parser):
    parser.addoption(OPTION, action="store_true")


def pytest_configure(config):
    families = {name: FAMILIES[name] for name in ("ampere", "overlap", "hopper")}
    runs = MatrixRuns(families, HERE / "matrix.json", digests_of, over_budget)
    config.pluginmanager.register(runs)
"""
TESTS = """
import pytest


@pytest.mark.parametrize("n", range(3))
@pytest.mark.matrix("ampere")
def test_of_ampere(n):
    pass


@pytest.mark.matrix("overlap")
def test_of_overlap():
    pass


@pytest.mark.matrix("hopper")
def test_of_hopper():
    RUNS


def test_of_the_first_tier():
    pass
"""
MORE_TESTS = """
import pytest


@pytest.mark.matrix("hopper")
def test_more_of_hopper():
    pass
"""
SETTINGS = """
[pytest]
testpaths = tests
pythonpath = SUPPORT
markers = matrix: of a family
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A suite of two test files, all of whose tests pass."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "tests/kernels.txt").write_text("first")
    (tmp_path / "tests/over_budget.txt").write_text("")
    (tmp_path / "tests/test_more.py").write_text(MORE_TESTS)
    (tmp_path / "pytest.ini").write_text(SETTINGS.replace("SUPPORT", str(ROOT / "tests/support")))
    write_tests(tmp_path, "pass")
    return tmp_path


def write_tests(folder: Path, runs: str) -> None:
    """Write the tests, with the statement that hopper's runs."""
    (folder / "tests/test_it.py").write_text(TESTS.replace("RUNS", runs))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


IT, MORE = "tests/test_it.py", "tests/test_more.py"
AMPERE, OVERLAP_TEST, HOPPER, MORE_OF_HOPPER = (
    ("ampere", IT),
    ("overlap", IT),
    ("hopper", IT),
    ("hopper", MORE),
)
ALL = {AMPERE, OVERLAP_TEST, HOPPER, MORE_OF_HOPPER}


def recorded(folder: Path) -> set[tuple[str, str]]:
    """The families and files of the record."""
    return {*load_record(folder / "tests/matrix.json")}


@pytest.mark.slow
class TestRuns:
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_that_pass_are_recorded(self, folder: Path, workers: str) -> None:
        result = run(folder, "-m", "matrix", "-n", workers)
        assert result.returncode == 0, result.stdout
        assert "6 passed" in result.stdout
        assert "matrix: 4 parts of ampere, hopper, overlap: passed, matrix.json" in result.stdout
        assert load_record(folder / "tests/matrix.json") == {
            (family, file): MatrixDigest("first", f"{family} {Path(file).name}")
            for family, file in ALL
        }

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (["-m", "matrix", "-k", "hopper or n0"], {HOPPER, MORE_OF_HOPPER}),
            (["-m", "matrix", "--deselect", f"{IT}::test_of_hopper"], ALL - {HOPPER}),
            (["-m", "matrix", IT], set()),
            (["-m", "matrix", "tests"], set()),
            (["-m", "matrix", "--lf"], set()),
            (["-m", "matrix", "--ignore", "tests/other"], set()),
            (["-m", "matrix", "--collect-only"], set()),
            ([], set()),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_that_leave_tests_out_record_nothing_of_their_family_and_file(
        self, folder: Path, arguments: list[str], parts: set[tuple[str, str]]
    ) -> None:
        assert run(folder, *arguments).returncode == 0
        assert recorded(folder) == parts

    @pytest.mark.parametrize("runs", ["assert False", "pytest.skip()"])
    def test_in_which_a_test_fails_or_is_skipped_record_the_rest(
        self, folder: Path, runs: str
    ) -> None:
        write_tests(folder, runs)
        result = run(folder, "-m", "matrix", "-n", "2")
        assert result.returncode == int("assert" in runs)
        assert recorded(folder) == ALL - {HOPPER}

    def test_record_nothing_of_a_family_that_is_over_its_budget(self, folder: Path) -> None:
        (folder / "tests/over_budget.txt").write_text("hopper")
        assert run(folder, "-m", "matrix").returncode == 0
        assert recorded(folder) == {AMPERE, OVERLAP_TEST}

    def test_of_what_is_due_say_why_and_leave_the_rest_out(self, folder: Path) -> None:
        passed = MatrixDigest("first", "ampere test_it.py")
        save_record(
            folder / "tests/matrix.json",
            {AMPERE: passed, HOPPER: MatrixDigest("first", "other"), ("hopper", "gone.py"): passed},
        )
        result = run(folder, "-m", "matrix", "--due", "-n", "2")
        assert "3 passed" in result.stdout, result.stdout
        assert "matrix: ampere: not due, it is what passed" in result.stdout
        assert "matrix: overlap: due, no run has passed yet: test_it.py" in result.stdout
        assert "matrix: hopper: due, no run has passed yet: test_more.py" in result.stdout
        assert (
            "matrix: hopper: due, the test, or what it imports, differs from what passed: "
            "test_it.py" in result.stdout
        )
        assert recorded(folder) == ALL

    def test_begin_anew_with_other_kernels(self, folder: Path) -> None:
        assert run(folder, "-m", "matrix").returncode == 0
        (folder / "tests/kernels.txt").write_text("second")
        result = run(folder, "-m", "matrix", "--due")
        assert "matrix: hopper: due, the kernels differ from what passed" in result.stdout
        assert "6 passed" in result.stdout
        record = load_record(folder / "tests/matrix.json")
        assert {digest.kernels for digest in record.values()} == {"second"}

    def test_of_nothing_that_is_due_succeed(self, folder: Path) -> None:
        assert run(folder, "-m", "matrix").returncode == 0
        result = run(folder, "-m", "matrix", "--due", "-n", "2")
        assert (result.returncode, "passed in" in result.stdout) == (0, False), result.stdout

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--due"], "--due chooses among matrix tests: add -m matrix"),
            (["--due", "-m", "matrix", "tests"], "--due looks at all tests: leave paths"),
        ],
    )
    def test_that_could_not_know_what_is_due_are_refused(
        self, folder: Path, arguments: list[str], text: str
    ) -> None:
        result = run(folder, *arguments)
        assert result.returncode == pytest.ExitCode.USAGE_ERROR
        assert text in result.stderr + result.stdout

    def test_with_a_matrix_test_of_no_family_are_refused(self, folder: Path) -> None:
        text = TESTS.replace('matrix("hopper")', "matrix").replace("RUNS", "pass")
        (folder / "tests/test_it.py").write_text(text)
        result = run(folder, "-m", "matrix")
        assert result.returncode == pytest.ExitCode.USAGE_ERROR
        assert "test_of_hopper: name the family" in result.stderr + result.stdout
