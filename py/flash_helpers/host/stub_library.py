"""The stub of libcudart and libcuda, compiled for the CUDA headers of a toolchain."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from flash_helpers.compile.toolchain import Toolchain
from flash_helpers.console.files import user_cache
from flash_helpers.console.progress import task
from flash_helpers.host.errors import HostError

FOLDER_VARIABLE = "FLASH_HELPERS_STUB_CACHE"

_SOURCES = ("stub.cpp", "wire.cpp", "wire.h")
_HEADERS = "#include <cuda_runtime_api.h>\n#include <cuda.h>\n"
_DECLARED = re.compile(r"\b(?:cudaError_t|CUresult)\s+(cu\w+)\s*\(")
_OF_THREADS = "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"
"""Other names of the same functions, in programs with one default stream per thread."""

_MOST_LINES = 20
"""Lines of a compiler's errors that are told."""


def cache_folder() -> Path:
    """$FLASH_HELPERS_STUB_CACHE, or flash_helpers/stub in the user's cache folder."""
    return user_cache(FOLDER_VARIABLE, "flash_helpers", "stub")


def stub_library(toolchain: Toolchain, scratch: Path) -> Path:
    """The folder with libcudart.so and libcuda.so, which is made if the cache lacks it. `scratch`:
    a folder of the caller, used where the cache cannot be written. Raises HostError."""
    sources = [(name, (files(__package__) / "stub" / name).read_bytes()) for name in _SOURCES]
    made_from = (toolchain.identity, sources, Path(__file__).read_bytes())
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]
    kept = cache_folder() / key
    if (kept / "libcuda.so").exists():
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(dir=kept.parent, prefix="."))
    except OSError:
        made = kept = scratch / "stub"
        made.mkdir()
    try:
        for name, content in sources:
            (made / name).write_bytes(content)
        with task("compiling the stub of the CUDA runtime, once"):
            _compile(toolchain, made)
    except BaseException:
        shutil.rmtree(made)
        raise
    if made != kept:
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(kept)
    return kept if kept.exists() else made


def _compile(toolchain: Toolchain, folder: Path) -> None:
    runtime = f"libcudart.so.{toolchain.version[0]}"
    (folder / "exported").write_text(f"{runtime} {{ global: *; }};\n")
    (folder / "headers.cpp").write_text(_HEADERS)
    declared = _names(toolchain, folder)
    lacking = (f'WEAK int {name}() {{ not_there("{name}"); }}' for name in sorted(declared))
    weak = '#define WEAK extern "C" __attribute__((weak, visibility("default")))'
    (folder / "lacking.cpp").write_text("\n".join(['#include "wire.h"', weak, *lacking, ""]))
    others = sorted(_names(toolchain, folder, _OF_THREADS) - declared)
    same = ((name, name.rpartition("_")[0]) for name in others)
    aliases = (f"{name} = {base};\n" for name, base in same if base in declared)
    (folder / "aliases.ld").write_text("".join(aliases))
    script, names = folder / "exported", folder / "aliases.ld"
    linker = f"-soname={runtime},--version-script={script},{names}"
    sources = (str(folder / f"{name}.cpp") for name in ("stub", "wire", "lacking"))
    _run(
        *(str(toolchain.nvcc), "-x", "c++", "-std=c++17", "-O1", "-shared", "-cudart", "none"),
        *("-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xlinker", linker),
        *("-o", str(folder / runtime), *sources, "-ldl", "-lpthread"),
    )
    for name in ("libcudart.so", "libcuda.so.1", "libcuda.so"):
        (folder / name).symlink_to(runtime)


def _names(toolchain: Toolchain, folder: Path, *options: str) -> set[str]:
    """Functions of CUDA that the headers declare."""
    text = _run(toolchain.nvcc, "-x", "c++", "-E", *options, folder / "headers.cpp")
    return set(_DECLARED.findall(text))


def _run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        errors = "\n".join(result.stderr.strip().splitlines()[:_MOST_LINES])
        raise HostError(
            "the stub of the CUDA runtime does not compile:\n"
            f"{' '.join(map(str, command))}\n{errors}"
        )
    return result.stdout
