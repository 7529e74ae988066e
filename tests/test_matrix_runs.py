"""The matrix of a family runs again when what it depends on has changed, and its record is written
by a run in which all of it passed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matrix_digest import (
    MatrixDigest,
    files_digest,
    kernels_digest,
    load_record,
    ptx_code,
    save_record,
    with_support,
)
from matrix_runs import why_due

from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.overlap import OVERLAP

ROOT = Path(__file__).resolve().parents[1]
PASSED = MatrixDigest(compiler="13.0", kernels="a", simulator="b", checks="c")
OPEN = replace(AMPERE, closed=False)

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
"""

# -- what is due -----------------------------------------------------------------------------------


def test_a_closed_family_that_is_what_passed_is_not_due() -> None:
    assert why_due(AMPERE, PASSED, PASSED) == []


def test_a_family_that_is_not_closed_is_always_due() -> None:
    assert why_due(OPEN, PASSED, PASSED) == ["it is not closed"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("kernels", "its PTX or launches differ from what passed"),
        ("simulator", "the simulator differs from what passed"),
        ("checks", "its checks differ from what passed"),
    ],
)
def test_a_closed_family_is_due_when_what_it_depends_on_differs(changed: str, reason: str) -> None:
    assert why_due(AMPERE, replace(PASSED, **{changed: "other"}), PASSED) == [reason]


def test_a_closed_family_without_a_record_or_of_another_compiler_is_due() -> None:
    assert why_due(AMPERE, PASSED, None) == ["no run has passed yet"]
    newer = replace(PASSED, compiler="13.1", kernels="other")
    assert why_due(AMPERE, newer, PASSED) == ["the PTX is of 13.1, and that which passed of 13.0"]


# -- digests ---------------------------------------------------------------------------------------


def test_the_code_of_ptx_is_without_lines_and_folders() -> None:
    moved = PTX.replace("90 0", "91 0").replace("/usr/local/cuda-13.0", "/opt/cuda")
    assert ptx_code(moved.replace("V13.0.88", "V13.0.89")) == ptx_code(PTX)
    assert ptx_code(PTX) == ".target sm_80\n{\nmov.u32 \t%r1, %tid.x;\n}"


def test_another_instruction_and_another_launch_are_another_kernel() -> None:
    config = OVERLAP.progression()[0]
    texts = {config.short_form(): PTX}
    digest = kernels_digest([config], texts)
    assert digest == kernels_digest([config], {config.short_form(): PTX.replace("90 0", "91 0")})
    assert digest != kernels_digest([config], {config.short_form(): PTX.replace("%r1", "%r2")})
    other = config.replace(static_row_stride=0)
    assert digest != kernels_digest([other], {other.short_form(): PTX})


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
    found = with_support(tmp_path, [test])
    assert {path.name for path in found} == {"test_it.py", "first.py", "second.py"}


def test_a_record_keeps_what_it_says_of_other_families(tmp_path) -> None:
    path = tmp_path / "matrix.json"
    assert load_record(path) == {}
    save_record(path, {"ampere": PASSED})
    other = replace(PASSED, checks="d")
    save_record(path, {"hopper": other})
    assert load_record(path) == {"ampere": PASSED, "hopper": other}


def test_the_record_has_closed_families_alone() -> None:
    record = load_record(ROOT / "tests/matrix.json")
    assert {*record} <= {family.name for family in FAMILIES.values() if family.closed}


# -- runs ------------------------------------------------------------------------------------------

# Three families: ampere and hopper, which are closed, and overlap, which is not.
CONFTEST = """
from pathlib import Path

from matrix_digest import MatrixDigest
from matrix_runs import OPTION, MatrixRuns

from flash_helpers.kernel_configs import FAMILIES

HERE = Path(__file__).parent


def digest_of(family, tests):
    names = sorted(path.name for path in tests)
    return MatrixDigest("13.0", family.name, (HERE / "simulator.txt").read_text(), " ".join(names))


def pytest_addoption(parser):
    parser.addoption(OPTION, action="store_true")


def pytest_configure(config):
    families = {name: FAMILIES[name] for name in ("ampere", "overlap", "hopper")}
    config.pluginmanager.register(MatrixRuns(families, HERE / "matrix.json", digest_of))
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
SETTINGS = """
[pytest]
testpaths = tests
pythonpath = SUPPORT
markers = matrix: of a family
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A suite of a test file, all of whose tests pass."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "tests/simulator.txt").write_text("first")
    (tmp_path / "pytest.ini").write_text(SETTINGS.replace("SUPPORT", str(ROOT / "tests/support")))
    write_tests(tmp_path, "pass")
    return tmp_path


def write_tests(folder: Path, runs: str) -> None:
    """Write the tests, with the statement that hopper's runs."""
    (folder / "tests/test_it.py").write_text(TESTS.replace("RUNS", runs))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def recorded(folder: Path) -> set[str]:
    """The families of the record."""
    return {*load_record(folder / "tests/matrix.json")}


@pytest.mark.slow
class TestRuns:
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_that_pass_record_the_closed_families(self, folder: Path, workers: str) -> None:
        result = run(folder, "-m", "matrix", "-n", workers)
        assert result.returncode == 0, result.stdout
        assert "5 passed" in result.stdout
        assert "matrix: ampere, hopper: passed, matrix.json says so" in result.stdout
        assert load_record(folder / "tests/matrix.json") == {
            name: MatrixDigest("13.0", name, "first", "test_it.py") for name in ("ampere", "hopper")
        }

    @pytest.mark.parametrize(
        ("arguments", "families"),
        [
            (["-m", "matrix", "-k", "hopper or n0"], {"hopper"}),
            (["-m", "matrix", "--deselect", "tests/test_it.py::test_of_hopper"], {"ampere"}),
            (["-m", "matrix", "tests/test_it.py"], set()),
            (["-m", "matrix", "tests"], set()),
            (["-m", "matrix", "--lf"], set()),
            (["-m", "matrix", "--ignore", "tests/other"], set()),
            (["-m", "matrix", "--collect-only"], set()),
            ([], set()),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_of_a_part_record_no_family_that_they_leave_tests_out_of(
        self, folder: Path, arguments: list[str], families: set[str]
    ) -> None:
        assert run(folder, *arguments).returncode == 0
        assert recorded(folder) == families

    @pytest.mark.parametrize("runs", ["assert False", "pytest.skip()"])
    def test_in_which_a_test_fails_or_is_skipped_do_not_record_it(
        self, folder: Path, runs: str
    ) -> None:
        write_tests(folder, runs)
        result = run(folder, "-m", "matrix", "-n", "2")
        failed = "assert" in runs
        assert result.returncode == int(failed)
        assert recorded(folder) == (set() if failed else {"ampere"})

    def test_of_what_is_due_say_why_and_leave_the_rest_out(self, folder: Path) -> None:
        digest = MatrixDigest("13.0", "ampere", "first", "test_it.py")
        save_record(folder / "tests/matrix.json", {"ampere": digest})
        result = run(folder, "-m", "matrix", "--due", "-n", "2")
        assert "2 passed" in result.stdout, result.stdout
        assert "matrix: ampere: not due, it is what passed" in result.stdout
        assert "matrix: overlap: due, it is not closed" in result.stdout
        assert "matrix: hopper: due, no run has passed yet" in result.stdout
        assert recorded(folder) == {"ampere", "hopper"}

    def test_begin_anew_with_another_simulator(self, folder: Path) -> None:
        assert run(folder, "-m", "matrix").returncode == 0
        (folder / "tests/simulator.txt").write_text("second")
        result = run(folder, "-m", "matrix", "--due")
        assert "matrix: hopper: due, the simulator differs from what passed" in result.stdout
        assert "5 passed" in result.stdout
        record = json.loads((folder / "tests/matrix.json").read_text())
        assert record["hopper"]["simulator"] == "second"

    def test_of_nothing_that_is_due_succeed(self, folder: Path) -> None:
        text = TESTS.replace('@pytest.mark.matrix("overlap")\n', "").replace("RUNS", "pass")
        (folder / "tests/test_it.py").write_text(text)
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


def test_a_digest_is_a_record_of_texts() -> None:
    assert MatrixDigest(**json.loads(json.dumps(asdict(PASSED)))) == PASSED
