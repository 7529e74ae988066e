"""Kernels, measurements and the browser that several of the room's tests ask for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from edited_kernels import library_kernel
from listing_files import SEVERAL, V1, extract

from flash_helpers.measure.results import BenchmarkResults, load_results
from flash_helpers.sass.read.records import Kernel


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Version 9: one block is its main loop."""
    return library_kernel(9)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four kernels, by architecture."""
    found = extract(SEVERAL, "all", tmp_path_factory.mktemp("cubins"))
    return {path.name.split(".")[-2]: path for path in found}


@pytest.fixture(scope="module")
def cubin(cubins: dict[str, Path]) -> Path:
    """Four kernels for sm_80."""
    return cubins["sm_80"]


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory, package: Path) -> Path:
    """A kernel of the library, which has line tables; for sm_90, if the library is."""
    return extract(package / "libflash_attention.so", V1, tmp_path_factory.mktemp("v1"))[-1]


@pytest.fixture(scope="module")
def results(root: Path) -> BenchmarkResults:
    return load_results(root / "benchmarks/results/h100.json")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
