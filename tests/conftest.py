"""Fixtures that several rooms share, and the reason why GPU tests are skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from matrix_digest import RECORD, matrix_digests
from matrix_runs import OPTION, MatrixRuns
from simulated_work import SimulatedWork
from warm_python import warm_python

from flash_helpers.compile.cache import FOLDER_VARIABLE as COMPILED_VARIABLE
from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.runtime import library
from flash_helpers.runtime.tensors import device_for
from flash_helpers.sass.read.cache import FOLDER_VARIABLE
from flash_helpers.sass.read.disassembler import find_disassembler, run_program
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import Kernel

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ROOT / "tests/sass/kernels"
OPT_IN = ("matrix", "mutants", "seeds")
"""Markers of tests that run only if -m names them."""


def why_no_gpu() -> str | None:
    """The reason why kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        device_for(AMPERE, torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return str(error)
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        action="store_true",
        help="of matrix tests, those whose kernels, simulator or checks are not those that passed "
        "(tests/matrix.json)",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000)  # as in the tools: see quiet_start
    if not torch.cuda.is_available():  # Triton reads it when it is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    chosen = config.getoption("markexpr")
    work = SimulatedWork(FAMILIES, "matrix_budget" if "matrix" in chosen else "simulated_budget")
    if "seeds" not in chosen:  # which runs one simulation hundreds of times
        config.pluginmanager.register(work)
    runs = MatrixRuns(FAMILIES, RECORD, matrix_digests, work.over_budget)
    config.pluginmanager.register(runs)


def pytest_xdist_auto_num_workers() -> int:
    """A worker a core, but no more than the work and a GPU's memory are good for."""
    return min(len(os.sched_getaffinity(0)), 4 if torch.cuda.is_available() else 8)


def pytest_xdist_setupnodes() -> None:
    """Workers share the cores: with a thread for every core in each of them, torch spends twice the
    time of the CPU on the same tests."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "gpu", *OPT_IN)):
            item.add_marker("quick")
    unnamed = [name for name in OPT_IN if name not in config.getoption("markexpr")]
    not_asked_for = {item for item in items if any(map(item.get_closest_marker, unnamed))}
    config.hook.pytest_deselected(items=[*not_asked_for])
    items[:] = [item for item in items if item not in not_asked_for]
    # what takes long begins first, so that no worker is left with it in the end: of the files that
    # are slow, those at the root, one of which walks all of CONTRIBUTING
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, len(item.path.parents)))
    reason = why_no_gpu()
    if reason is not None:
        # of two thousand tests one a file tells it
        of_files = {item.path: item for item in reversed(items) if item.get_closest_marker("gpu")}
        for item in of_files.values():
            item.add_marker(pytest.mark.skip(reason=f"{reason}, for this test and the rest"))
        left_out = {
            item
            for item in items
            if item.get_closest_marker("gpu") and item is not of_files[item.path]
        }
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Garbage collection took a fifth of the time of the simulator's tests: what is imported and
    collected by now stays to the end, and so do the texts of kernels, of ten thousands of objects
    each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def frozen() -> None:
    """Leaves what other tests keep out of the garbage collections that a test asks for, each of
    which would take a second or two."""
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def package() -> Path:
    """The folder that the installed package lies in, with the library, PTX and logs."""
    return library.package_folder()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The lines that stand-ins of compilers and of the sweep's worker have written since the last
    call: mostly kernels' names."""
    path = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(path))

    def read() -> list[str]:
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return lines

    return read


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is a terminal, for those who ask; the test has another object of the class."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Path]:
    """The workers of a run share the cache of disassemblies, which this is, and that of compiled
    kernels: a fresh one, or the one that its variable names. The user's own are neither read nor
    filled."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with pytest.MonkeyPatch.context() as patch:
        for variable in (FOLDER_VARIABLE, COMPILED_VARIABLE):
            folder = os.environ.get(variable) or str(shared / variable.lower())
            patch.setitem(os.environ, variable, folder)
        yield Path(os.environ[FOLDER_VARIABLE])


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A program `python` whose programs do not wait for torch."""
    with warm_python(tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture(scope="session")
def planted() -> Path:
    """The folder of the planted kernels; its README says how they were compiled."""
    return PLANTED


@pytest.fixture(scope="session")
def load(planted: Path) -> Callable[[str], list[Kernel]]:
    """The kernels of a planted file, by its name."""
    return lambda name: load_kernels(planted / name)


@pytest.fixture(scope="session")
def nvdisasm() -> Callable[..., str]:
    """Output of nvdisasm: the second witness of what is read."""
    program = find_disassembler("nvdisasm").path
    return lambda *arguments: run_program(program, *arguments)


@pytest.fixture(scope="session")
def cuobjdump() -> Callable[..., str]:
    """Output of cuobjdump."""
    program = find_disassembler("cuobjdump").path
    return lambda *arguments: run_program(program, *arguments)
