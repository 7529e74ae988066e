"""Disassemblies kept between runs, since making one takes most of a second.

An entry holds what nvdisasm and the line tables say of one kernel; what the ELF file says is read
again each time, and what is computed from both is computed again. An entry is named by a hash of
the whole cubin, the kernel's symbol, nvdisasm's version and FORMAT, so that it never gets stale. It
is compressed JSON behind its own hash: reading it can give wrong text at worst, never run anything,
and an entry that is cut off, damaged or does not fit its kernel counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_cache_path

from flash_helpers.sass.read.disassembly import Disassembly
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    LiveRegisters,
    Operation,
    SassError,
    SourceLine,
)

FORMAT = 4  # raise it when `Disassembly`, or what is put into one, changes
FOLDER_VARIABLE = "FLASH_HELPERS_SASS_CACHE"
MAX_BYTES = 256 << 20  # of all entries; a kernel of this library takes about 30 KB
MAX_ENTRY_BYTES = 256 << 20  # of one entry, unpacked

_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".sass"
_COMPRESSION = 1  # fast: the entries are small anyway

H = TypeVar("H", bound=Hashable)


def cache_folder() -> Path:
    """$FLASH_HELPERS_SASS_CACHE, or flash_helpers/sass in the user's cache folder."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return user_cache_path("flash_helpers", appauthor=False) / "sass"


class DisassemblyCache:
    """Entries in a folder, the longest unused of which make room for new ones.

    A folder that cannot be read or written keeps nothing, and says nothing.
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


def cubin_digest(cubin: bytes) -> str:
    """What tells a cubin from every other."""
    return hashlib.sha256(cubin).hexdigest()


def entry_key(digest: str, symbol: str, disassembler: str) -> str:
    """The name of a kernel's entry. digest: of its cubin. disassembler: name and version."""
    return hashlib.sha256(json.dumps([FORMAT, disassembler, digest, symbol]).encode()).hexdigest()


def encode(disassembly: Disassembly) -> bytes:
    """The bytes of an entry. Texts, live registers and locations repeat: each stands once."""
    live, live_of = _numbered(disassembly.live)
    sources, source_of = _numbered(disassembly.sources)
    document = {
        "texts": _numbered((o.predicate, o.opcode, o.operands) for o in disassembly.operations),
        "targets": [operation.target for operation in disassembly.operations],
        "live": ([item and astuple(item) for item in live], live_of),
        "sources": ([tuple(map(astuple, source)) for source in sources], source_of),
        "ptx_lines": disassembly.ptx_lines,
    }
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), _COMPRESSION)
    return hashlib.sha256(packed).digest() + packed


def decode(data: bytes, code: bytes) -> Disassembly:
    """Inverse of `encode`. code: the kernel's instruction words.

    Raises SassError for bytes that `encode` did not write for a kernel of that many instructions.
    """
    digest, packed = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(packed).digest() != digest:
        raise SassError("the entry is damaged")
    try:
        document = json.loads(zlib.decompressobj().decompress(packed, MAX_ENTRY_BYTES))
        return _from_document(document, code)
    except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
        raise SassError(f"the entry was written by another version ({error!r})") from error


def _from_document(document: Mapping[str, Any], code: bytes) -> Disassembly:
    (texts, text_of), (live, live_of), (sources, source_of) = (
        document[name] for name in ("texts", "live", "sources")
    )
    targets, ptx_lines = document["targets"], document["ptx_lines"]
    live = [item and LiveRegisters(*item) for item in live]
    sources = [tuple(SourceLine(*line) for line in source) for source in sources]
    addresses = range(0, len(code), INSTRUCTION_BYTES)
    columns = (targets, text_of, live_of, source_of, ptx_lines)
    if any(len(column) != len(addresses) for column in columns):
        raise ValueError(f"it is not of {len(addresses)} instructions")
    operations = tuple(
        Operation(
            address,
            int.from_bytes(code[address : address + INSTRUCTION_BYTES], "little"),
            *texts[text],
            target,
        )
        for address, text, target in zip(addresses, text_of, targets, strict=True)
    )
    return Disassembly(
        operations,
        tuple(live[number] for number in live_of),
        tuple(sources[number] for number in source_of),
        tuple(ptx_lines),
    )


def _numbered(items: Iterable[H]) -> tuple[list[H], list[int]]:
    """The items, each once, and the number of each."""
    numbers: dict[H, int] = {}
    number_of = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), number_of
