"""Facts of a library of NVRTC, remembered between processes. Standard library only."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_helpers.compile import nvrtc
from flash_helpers.console.files import write_if_different


@dataclass(frozen=True)
class Facts:
    """Description of a library by itself.

    `version`: CUDA release. `build`: version and number of the build. `architectures`: compute
    capabilities times ten.
    """

    version: tuple[int, int]
    build: str
    architectures: frozenset[int]


def nvrtc_facts(library: Path, memory: Path | None = None) -> Facts:
    """Return the facts of a library. It is loaded, which takes longer than all else in finding a
    kernel in the cache, unless `memory` has the facts and the file is still the same.

    `memory`: a file that keeps facts between processes. One that cannot be read or written is done
    without.

    Raises NvrtcError if the library cannot be used.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        known = _read(memory)[str(library)]
        if known["file"] == _state(library):
            (major, minor), build = known["version"], str(known["build"])
            return Facts((int(major), int(minor)), build, frozenset(known["architectures"]))
    loaded = nvrtc.Nvrtc(library)
    found = Facts(loaded.version(), loaded.build(), loaded.architectures())
    if memory is not None:
        with contextlib.suppress(OSError):
            _remember(memory, library, found)
    return found


def _read(memory: Path | None) -> dict[str, Any]:
    return json.loads(memory.read_bytes()) if memory else {}


def _state(library: Path) -> list[int]:
    """Numbers that change with the file's content."""
    status = library.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remember(memory: Path, library: Path, found: Facts) -> None:
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        known = {path: facts for path, facts in _read(memory).items() if Path(path).exists()}
    known[str(library)] = {
        "file": _state(library),
        "version": found.version,
        "build": found.build,
        "architectures": sorted(found.architectures),
    }
    memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_if_different(memory, json.dumps(known, indent=1) + "\n")
