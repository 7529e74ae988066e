"""Planted kernels, and a cache of their own for the tests of flash_helpers.sass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flash_helpers.sass.cache import FOLDER_VARIABLE
from flash_helpers.sass.disassembler import find_disassembler, run_program
from flash_helpers.sass.reader import load_kernels
from flash_helpers.sass.records import Kernel

PLANTED = Path(__file__).resolve().parent / "kernels"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests neither read nor fill the user's cache."""
    folder = tmp_path_factory.mktemp("sass_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, FOLDER_VARIABLE, str(folder))
        yield folder


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
    """What nvdisasm prints: the second witness of what is read."""
    program = find_disassembler("nvdisasm").path
    return lambda *arguments: run_program(program, *arguments)


@pytest.fixture(scope="session")
def cuobjdump() -> Callable[..., str]:
    """What cuobjdump prints."""
    program = find_disassembler("cuobjdump").path
    return lambda *arguments: run_program(program, *arguments)
