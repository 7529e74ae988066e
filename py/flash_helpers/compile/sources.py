"""Sources of kernels: translation units, and the files that they include. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.nvrtc import SOURCE_FOLDERS
from flash_helpers.compile.toolchain import BuildError

_INCLUDE = re.compile(
    r'(?:^[ \t]*#[ \t]*include(?:_next)?|__has_include[ \t]*\()[ \t]*(?:(["<])([^">\n]+)[">]|(.*))',
    re.MULTILINE,
)
_RACY_NS = 100_000_000  # a file system's clock may stand still for some milliseconds

# Inode, time of the last change of the contents and of the inode, and size of a file.
_Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class Unit:
    """One kernel's translation unit. `name`: the kernel's. `text`: C++, as of `kernel_unit`."""

    name: str
    text: str


@dataclass(frozen=True)
class _File:
    """Facts of a file. `places`: for each include, the paths at which it may lie, in order."""

    stamp: _Stamp | None
    digest: str
    places: tuple[tuple[str, ...], ...]


class Sources:
    """The files below a root, each read once and again when it has changed."""

    def __init__(self, root: Path) -> None:
        self.root = str(root.resolve())
        self._files: dict[str, _File] = {}
        self._units: dict[str, tuple[tuple[str, ...], ...]] = {}

    def included(self, text: str) -> Mapping[str, str]:
        """Return the SHA-256 of each file of the repository that a unit's text includes, directly
        or not, by its path relative to the root, sorted.

        All files are looked for again, so that a new file that hides another one counts. A file
        that a condition leaves out is included all the same. Raises BuildError for an include
        whose file a macro names, and for a file that cannot be read.
        """
        if text not in self._units:
            self._units[text] = self._includes(text, "the unit")
        waiting = [*self._units[text]]
        seen = {*waiting}
        found: dict[str, str] = {}
        for places in waiting:
            for path in places:
                if path in found:
                    break
                try:
                    status = os.stat(path)  # noqa: PTH116  # a Path would take longer than the call
                except OSError:
                    continue
                file = self._read(path, status)
                found[path] = file.digest
                waiting += [each for each in file.places if each not in seen]
                seen.update(file.places)
                break
        inside = f"{self.root}/"
        return {path.removeprefix(inside): found[path] for path in sorted(found)}

    def digest(self, unit: Unit) -> str:
        """Return a digest of a unit's text and of the name and content of each file that it
        includes. Raises BuildError as `included` does."""
        return digest([unit.text, list(self.included(unit.text).items())])

    def _read(self, path: str, status: os.stat_result) -> _File:
        stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = self._files.get(path)
        if known is None or known.stamp != stamp:
            # A file so young may change again and keep its stamp.
            is_racy = time.time_ns() - status.st_mtime_ns < _RACY_NS
            try:
                data = Path(path).read_bytes()
            except OSError as error:
                raise BuildError(f"{path} cannot be read: {error.strerror}") from error
            places = self._includes(data.decode(errors="replace"), path, str(Path(path).parent))
            known = _File(None if is_racy else stamp, hashlib.sha256(data).hexdigest(), places)
            self._files[path] = known
        return known

    def _includes(self, text: str, origin: str, folder: str = "") -> tuple[tuple[str, ...], ...]:
        """Return the paths at which each include of a text may lie. `folder`: of the file that has
        the text; a quoted include is looked for there first. Files of the compiler lie elsewhere.
        """
        found = []
        for mark, name, other in _INCLUDE.findall(text):
            if not mark:
                raise BuildError(
                    f"{origin} includes {other.strip()!r}: write the file's name instead of a "
                    "macro, so that a change of the file is seen"
                )
            folders = [folder] if folder and mark == '"' else []
            folders += [f"{self.root}/{each}" for each in SOURCE_FOLDERS]
            places = (os.path.join(each, name) for each in folders)  # noqa: PTH118
            found.append(tuple(map(os.path.normpath, places)))
        return tuple(dict.fromkeys(found))


def included_files(root: Path, text: str) -> list[Path]:
    """Return the files of the repository that a unit's text includes, directly or not; sorted.
    Raises BuildError as `Sources.included` does."""
    return [root.resolve() / name for name in Sources(root).included(text)]


def digest(*parts: object) -> str:
    """Return the SHA-256 of values of JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
