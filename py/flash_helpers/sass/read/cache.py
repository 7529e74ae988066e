"""Disassemblies kept between runs, since making one takes most of a second.

An entry holds the output of nvdisasm, the line tables and the live registers of one kernel. The
data of the ELF file is read again each time, and other values are computed again. An entry is named
by a hash of the whole cubin, the kernel's symbol, nvdisasm's version and FORMAT, so that it never
gets stale. It is JSON, compressed by zlib, which adds a checksum. Reading it can give wrong text at
worst, never run anything. An entry that is cut off, damaged or does not fit its kernel counts as
absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from flash_helpers.console.files import user_cache
from flash_helpers.sass.read.disassembly import Disassembly
from flash_helpers.sass.read.elf import Content
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    LiveRegisters,
    Operation,
    SassError,
    SourceLine,
)

FORMAT = 9  # raise it when `Disassembly` or its contents change, such as the live registers
FOLDER_VARIABLE = "FLASH_HELPERS_SASS_CACHE"
MAX_BYTES = 256 << 20  # of all entries; a kernel of this library takes about 30 KB
MAX_ENTRY_BYTES = 256 << 20  # of one entry, unpacked

_SUFFIX = ".sass"
_COMPRESSION = 1  # fast: the entries are small anyway

H = TypeVar("H", bound=Hashable)


def cache_folder() -> Path:
    """$FLASH_HELPERS_SASS_CACHE, or flash_helpers/sass in the user's cache folder."""
    return user_cache(FOLDER_VARIABLE, "flash_helpers", "sass")


class DisassemblyCache:
    """Entries in a folder, of which the longest unused make room for new ones.

    A folder that cannot be read or written keeps nothing, without an error.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def read(self, key: str, code: bytes) -> Disassembly | None:
        """The entry of that key for a kernel of these instruction words; None if there is none."""
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        try:
            return decode(data, code)
        except SassError:
            return None

    def write(self, key: str, disassembly: Disassembly) -> None:
        """Keep an entry; a reader never sees half of it."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(encode(disassembly))
                Path(temporary).replace(self.folder / f"{key}{_SUFFIX}")
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise

    def prune(self) -> None:
        """Remove the longest unused entries if all take more than `max_bytes`: down to half."""
        with contextlib.suppress(OSError):
            entries = [(path.stat(), path) for path in self.folder.glob(f"*{_SUFFIX}")]
            total = sum(status.st_size for status, _ in entries)
            if total <= self.max_bytes:
                return
            for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
                path.unlink(missing_ok=True)
                total -= status.st_size
                if total <= self.max_bytes // 2:
                    return


def cubin_digest(cubin: Content) -> str:
    """The digest that identifies a cubin."""
    return hashlib.sha256(cubin).hexdigest()


def entry_key(digest: str, symbol: str, disassembler: str) -> str:
    """The name of a kernel's entry. `digest`: digest of its cubin. `disassembler`: name and
    version."""
    named = [FORMAT, disassembler, digest, symbol]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def encode(disassembly: Disassembly) -> bytes:
    """The bytes of an entry. Texts, live registers and locations repeat: each stands once."""
    columns = (
        [(o.predicate, o.opcode, o.operands, o.target) for o in disassembly.operations],
        disassembly.live,
        disassembly.sources,
        disassembly.ptx_lines,
    )
    text = json.dumps([*map(_numbered, columns)], separators=(",", ":"), default=_fields)
    return zlib.compress(text.encode(), _COMPRESSION)


def decode(data: bytes, code: bytes) -> Disassembly:
    """Inverse of `encode`. `code`: the kernel's instruction words.

    Raises SassError for bytes that `encode` did not write for a kernel of that many instructions.
    """
    addresses = range(0, len(code), INSTRUCTION_BYTES)
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_ENTRY_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut off")
        texts, live, sources, ptx_lines = json.loads(text)
        columns = (
            _column(texts, tuple),
            _column(live, lambda counts: counts and LiveRegisters(*counts)),
            _column(sources, lambda chain: tuple(SourceLine(*line) for line in chain)),
            _column(ptx_lines, lambda line: line),
        )
        if any(len(column) != len(addresses) for column in columns):
            raise ValueError(f"it is not of {len(addresses)} instructions")
        operations = tuple(
            Operation(at, int.from_bytes(code[at : at + INSTRUCTION_BYTES], "little"), *text)
            for at, text in zip(addresses, columns[0], strict=True)
        )
        return Disassembly(operations, *columns[1:])
    except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
        raise SassError(f"the entry was written by another version ({error!r})") from error


def _fields(record: LiveRegisters | SourceLine) -> tuple[int | str, ...]:
    return tuple(getattr(record, name) for name in record.__slots__)


def _numbered(items: Iterable[H]) -> tuple[list[H], list[int]]:
    """The items, each once, and the number of each."""
    numbers: dict[H, int] = {}
    number_of = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), number_of


def _column(numbered: tuple[list[Any], list[int]], make: Callable[[Any], H]) -> tuple[H, ...]:
    """Inverse of `_numbered`. `make`: makes an item from its JSON value."""
    items = [make(item) for item in numbered[0]]
    return tuple(items[number] for number in numbered[1])
