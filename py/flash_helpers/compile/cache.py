"""Compiled kernels kept between processes, each in a folder of its own.

An entry is a folder `<kernel>-<target>-<key>` with the PTX, the machine code, the compiler's
messages and a manifest, which names every ingredient of the key and the SHA-256 of each file. It is
renamed into place when it is whole, and checked when it is read: an entry that was cut off, changed
or made from anything else counts as absent. The folder in which a kernel is being compiled holds a
lock, which the operating system takes away from a process that ends, however it ends.

Standard library only: the build of a wheel fills a cache, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flash_helpers.compile.processes import Stopped
from flash_helpers.compile.sources import Unit, digest
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.console.files import user_cache, write_if_different

FORMAT = 1  # raise it when an entry of an older version would be read wrongly
FOLDER_VARIABLE = "FLASH_ATTENTION_CACHE_DIR"

COMPILERS = "compilers.json"  # beside the entries: facts of compilers, for `nvrtc_facts`
PTX, CUBIN, LOG, MANIFEST = "kernel.ptx", "kernel.cubin", "kernel.log", "manifest.json"
_ENTRY_NAME = re.compile(r"(\w+)-((?:sm|compute)_\w+)-[0-9a-f]{16}")
_CLAIM = ".compiling-"  # before the name of an entry that is being made
_LOCK = "lock"
_UNITS = "units"
_WAIT_S = 0.02
_ROOM_BYTES = 8 << 20  # more than all files of a kernel


def cache_folder() -> Path:
    """$FLASH_ATTENTION_CACHE_DIR, or flash_attention in the user's cache folder."""
    return user_cache(FOLDER_VARIABLE, "flash_attention")


def machine_target(target: str) -> bool:
    """Whether a target is machine code, such as sm_90a, and not PTX alone, such as compute_90a."""
    return target.startswith("sm_")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. `symbol`: the kernel's in its PTX and machine code."""

    name: str
    target: str
    symbol: str
    folder: Path

    @property
    def ptx_path(self) -> Path:
        """The PTX."""
        return self.folder / PTX

    @property
    def cubin_path(self) -> Path:
        """The machine code; there is none for a target such as compute_90a."""
        return self.folder / CUBIN

    @property
    def log_path(self) -> Path:
        """The messages of the compiler and of ptxas."""
        return self.folder / LOG

    @property
    def compiler(self) -> str:
        """Name and version of the compiler."""
        return json.loads((self.folder / MANIFEST).read_text())["compiler"]["name"]


@dataclass(frozen=True)
class Recipe:
    """Everything that a kernel is made from, apart from the compiler.

    `unit`: SHA-256 of the translation unit. `sources`: that of each file that the unit includes, by
    its path relative to the root.
    """

    name: str
    target: str
    debug: bool
    unit: str
    sources: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """Digest of all of it."""
        named = [self.name, self.target, self.debug, self.unit, list(self.sources.items())]
        return digest(FORMAT, *named)

    def key(self, compiler: Mapping[str, Any]) -> str:
        """Digest of the recipe and of the compiler: its name, identity and flags."""
        return digest(self.digest, sorted(compiler.items()))


@dataclass(frozen=True)
class Entry:
    """An entry as `Cache.entries` lists it. `used`: time of its last use, in seconds since 1970.

    `compiler`, `key`: "" for an entry without a manifest.
    """

    folder: Path
    name: str
    target: str
    debug: bool
    compiler: str
    key: str
    n_bytes: int
    used: float


class Cache:
    """Entries in a folder, and those that the installed package brings.

    `prebuilt`: the package's folder, which is read and never written. Its entries count whichever
    compiler made them. A folder that cannot be written is replaced by a temporary one for the rest
    of the process, with a warning, unless it `is_required`.
    """

    def __init__(
        self, folder: Path, prebuilt: Path | None = None, *, is_required: bool = False
    ) -> None:
        self.folder = folder
        self._prebuilt = prebuilt
        self._is_required = is_required
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._falling_back = threading.Lock()

    @property
    def writable(self) -> Path:
        """The folder that new entries are made in."""
        return Path(self._temporary.name) if self._temporary else self.folder

    def find_prebuilt(self, recipe: Recipe) -> Compiled | None:
        """Return the package's kernel of a recipe; None if it has none."""
        folders = self._prebuilt.glob(f"{recipe.name}-{recipe.target}-*") if self._prebuilt else ()
        found = (_read(folder, recipe, "recipe", recipe.digest) for folder in folders)
        return next((compiled for compiled in found if compiled), None)

    def find(self, recipe: Recipe, key: str) -> Compiled | None:
        """Return the kernel of a recipe with a key; None if it has not been compiled."""
        for folder in dict.fromkeys((self.writable, self.folder)):
            entry = folder / _entry_name(recipe, key)
            if found := _read(entry, recipe, "key", key):
                with contextlib.suppress(OSError):
                    os.utime(entry / MANIFEST)
                return found
        return None

    @contextlib.contextmanager
    def claim(self, recipe: Recipe, key: str, stopped: threading.Event) -> Iterator[Path]:
        """Yield a fresh folder in which this thread alone makes a kernel; it is gone in the end.

        Waits for another thread or process that makes the same kernel. Raises OSError if the
        cache's folder cannot be written, and Stopped once `stopped` is set.
        """
        folder = self.writable / f"{_CLAIM}{_entry_name(recipe, key)}"
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder, stopped):
            # Compilers of a process that was killed may still write into their folder.
            _clear(folder)
            yield Path(tempfile.mkdtemp(dir=folder))

    def keep(
        self, scratch: Path, recipe: Recipe, key: str, compiler: Mapping[str, Any], symbol: str
    ) -> Compiled:
        """Make an entry of the files that a compiler left in the folder of a claim.

        Raises OSError if the cache's folder cannot be written.
        """
        whole = scratch / "entry"
        whole.mkdir()
        files = {}
        for name in (PTX, CUBIN, LOG):
            if (scratch / name).is_file():
                (scratch / name).rename(whole / name)
                files[name] = _sha256(whole / name)
        manifest = {
            "format": FORMAT,
            "key": key,
            "recipe": recipe.digest,
            "name": recipe.name,
            "target": recipe.target,
            "debug": recipe.debug,
            "compiler": dict(compiler),
            "unit": recipe.unit,
            "sources": dict(recipe.sources),
            "symbol": symbol,
            "files": files,
        }
        (whole / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        place = scratch.parents[1] / _entry_name(recipe, key)
        with contextlib.suppress(FileNotFoundError):  # what is there was not right
            place.rename(scratch / "replaced")
        whole.rename(place)
        return Compiled(recipe.name, recipe.target, symbol, place)

    def keep_unit(self, unit: Unit) -> Path:
        """Write a unit's text beside the entries, for a user who compiles it by hand; return its
        file.

        Raises OSError if the cache's folder cannot be written.
        """
        path = self.writable / _UNITS / f"{unit.name}.cu"
        write_if_different(path, unit.text)
        return path

    def remove_units(self) -> None:
        """Remove what `keep_unit` wrote."""
        shutil.rmtree(self.folder / _UNITS, ignore_errors=True)

    def fall_back(self, folder: Path, error: OSError) -> None:
        """Make entries in a temporary folder from now on, since `folder` cannot be written.

        Raises BuildError if `folder` is required or is the temporary one already, and if none can
        be made.
        """
        why = error.strerror or error
        if self._is_required:
            raise BuildError(
                f"{folder} cannot be filled ({why}): make room there, or let it be written"
            ) from error
        with self._falling_back:
            if folder != self.writable:
                return  # another thread was faster
            said = f"the cache {folder} cannot be used ({why})"
            way_out = f"set {FOLDER_VARIABLE} to a folder that can be written"
            try:
                if self._temporary is not None:
                    raise error
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="flash_attention-", ignore_cleanup_errors=True
                )
            except OSError as also:
                raise BuildError(f"{said}, and no temporary folder either: {way_out}") from also
        warnings.warn(
            f"{said}: kernels are compiled for this process alone, in {self.writable}; {way_out}",
            RuntimeWarning,
            stacklevel=2,
        )

    def entries(self) -> list[Entry]:
        """Return the entries of the folder, sorted by name, except for those that another process
        removes meanwhile. Other folders, which a user may have there, are left out."""
        found = []
        for folder in sorted(self.folder.glob("*-*-*/")):
            if named := _ENTRY_NAME.fullmatch(folder.name):
                with contextlib.suppress(FileNotFoundError):
                    found.append(_entry(folder, *named.groups()))
        return found

    def remove(self, entry: Entry) -> None:
        """Remove an entry. A reader never sees half of it. Raises OSError."""
        prefix = f"{_CLAIM}removed-"
        with (
            tempfile.TemporaryDirectory(
                dir=self.folder, prefix=prefix, ignore_cleanup_errors=True
            ) as folder,
            contextlib.suppress(FileNotFoundError),  # another process was faster
        ):
            entry.folder.rename(Path(folder, "entry"))

    def sweep(self) -> None:
        """Remove the folders of compilations whose processes were killed."""
        for folder in self.writable.glob(f"{_CLAIM}*"):
            is_over = threading.Event()
            is_over.set()
            with contextlib.suppress(OSError, Stopped), _locked(folder, is_over):
                pass


def require_room(folder: Path) -> None:
    """Raises OSError unless a folder has room for the files of a kernel."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM_BYTES))


def _entry_name(recipe: Recipe, key: str) -> str:
    return f"{recipe.name}-{recipe.target}-{key[:16]}"


def _read(folder: Path, recipe: Recipe, kind: str, wanted: str) -> Compiled | None:
    """The kernel of an entry, if it is whole and its manifest has the wanted digest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or manifest[kind] != wanted:
            return None
        files, symbol = manifest["files"], manifest["symbol"]
        needed = {PTX, LOG, CUBIN} if machine_target(recipe.target) else {PTX, LOG}
        if files.keys() != needed or not isinstance(symbol, str):
            return None
        if any(_sha256(folder / name) != files[name] for name in needed):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # another's, or cut off
    return Compiled(recipe.name, recipe.target, symbol, folder)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(folder: Path, name: str, target: str) -> Entry:
    files = [path.stat() for path in folder.iterdir()]
    used = max((status.st_mtime for status in files), default=folder.stat().st_mtime)
    manifest = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        manifest = dict(json.loads((folder / MANIFEST).read_bytes()))
    compiler = manifest.get("compiler")
    return Entry(
        folder,
        name,
        target,
        manifest.get("debug") is True,
        str(compiler.get("name", "")) if isinstance(compiler, dict) else "",
        str(manifest.get("key", "")),
        sum(status.st_size for status in files),
        used,
    )


@contextlib.contextmanager
def _locked(folder: Path, stopped: threading.Event) -> Iterator[None]:
    """Make a folder and hold it for one thread of one process; it is removed in the end.

    Raises OSError, and Stopped if `stopped` is set while another holds it.
    """
    path = folder / _LOCK
    while True:
        # Not by `exist_ok`, which looks once more: its holder may remove it at any moment.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            _wait_for_lock(handle, stopped)
            if not _is_same(handle, path):
                continue  # it was removed with its folder by the one that held it
            try:
                yield
            finally:
                _clear(folder)
                with contextlib.suppress(OSError):  # another has taken the folder already
                    path.unlink()
                    folder.rmdir()
                # A process that was forked meanwhile has the file open, too.
                fcntl.flock(handle, fcntl.LOCK_UN)
            return
        finally:
            os.close(handle)


def _clear(folder: Path) -> None:
    """Remove everything from a locked folder except its lock."""
    with contextlib.suppress(FileNotFoundError):
        for left in folder.iterdir():
            if left.name != _LOCK:
                shutil.rmtree(left, ignore_errors=True)


def _wait_for_lock(handle: int, stopped: threading.Event) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        if stopped.wait(_WAIT_S):
            raise Stopped


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
