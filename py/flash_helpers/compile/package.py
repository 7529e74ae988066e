"""The installed package flash_attention, which is found and not imported, and the kernels' sources.

Standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from flash_helpers.compile.codegen import KERNEL_HEADER

HOW_TO_BUILD = "build it with `pip install . ./py` in the repository"
SOURCES_FOLDER = "sources"  # in a package that was not installed from a checkout in place
COMPARED_COMPILERS = "benchmarks/results/compilers_*.json"  # below the root of the sources
COMPILED_FOLDER = "compiled"  # in the package: kernels that a wheel brings


def package_folder() -> Path:
    """Return the folder in which the installed package flash_attention keeps the library. Raises
    RuntimeError."""
    spec = importlib.util.find_spec("flash_attention")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the package flash_attention is not installed: {HOW_TO_BUILD}")
    return _folder(spec.origin)


@functools.cache
def _folder(file: str) -> Path:
    return Path(file).resolve().parent


def sources_root(package: Path) -> Path:
    """Return the folder that the kernels of a package are compiled in: the checkout that holds the
    package, or the copy of the sources within the package. Raises RuntimeError without either."""
    for root in (package.parent, package / SOURCES_FOLDER):
        if (root / KERNEL_HEADER).is_file():
            return root
    raise RuntimeError(
        f"{package} comes without the kernels' sources, so that nothing can be compiled: "
        f"{HOW_TO_BUILD}"
    )
