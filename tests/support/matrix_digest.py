"""What a family's matrix tests depend on, as digests, and the record of those with which they
passed (tests/matrix.json)."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flash_helpers.compile.codegen import listed_configs
from flash_helpers.console.files import write_if_different
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.family import Family
from flash_helpers.runtime.library import ptx_paths

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/matrix.json"
SUPPORT = "tests/support"
HELPERS = "py/flash_helpers"
ALWAYS = ("check", "ptx", "runtime")
"""The rooms of flash_helpers that every matrix test depends on."""
IN_KERNELS = ("kernel_configs", "operations", "registry")
"""The rooms of which a family's kernels and its own operation are all that its tests depend on."""
DIGITS = 16

_COMPILER = re.compile(r"^// Cuda compilation tools, (release .*)$", re.MULTILINE)
# Comments, lines of the source, names of its files, with the compiler's folder among them, and the
# sections for a debugger, where names hold a digest of the folder.
_NO_CODE = re.compile(
    r"//.*|^\s*\.(?:loc|file)\b.*|^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", re.MULTILINE
)


@dataclass(frozen=True)
class MatrixDigest:
    """What the matrix tests of a family in one file depend on.

    kernels: digest of the PTX, of the compiler that it comes from, and of the launches at the
    corners that the configs declare. sources: digest of the sources that run the kernels and say
    what is right: simulator, checks, the family's operation, the test file, and what it imports.
    """

    kernels: str
    sources: str

    def differences(self, recorded: MatrixDigest | None) -> list[str]:
        """Return why this is not what passed, in words; nothing if it is."""
        if recorded is None:
            return ["no run has passed yet"]
        words = {
            "kernels": "the kernels differ from what passed",
            "sources": "the test, or what it imports, differs from what passed",
        }
        return [
            text for name, text in words.items() if getattr(self, name) != getattr(recorded, name)
        ]


def ptx_code(text: str) -> str:
    """Return what a PTX text computes: without comments, and without what holds folders of the
    machine that compiled it."""
    lines = (line.strip() for line in _NO_CODE.sub("", text).splitlines())
    return "\n".join(filter(None, lines))


def files_digest(root: Path, paths: Iterable[Path]) -> str:
    """Return a digest of the names, relative to the root, and the bytes of files."""
    found = hashlib.sha256()
    for path in sorted({*paths}):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root)}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:DIGITS]


def imported(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a Python file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def with_support(root: Path, test: Path) -> set[Path]:
    """Return a test file and the modules of tests/support that it imports, and that these do."""
    found: set[Path] = set()
    waiting = [test]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            modules = (root / SUPPORT / f"{name}.py" for name in imported(path))
            waiting += [module for module in modules if module.is_file()]
    return found


def rooms(root: Path, test: Path) -> set[Path]:
    """Return the sources of the rooms of flash_helpers that a test file imports itself, and of
    those that every test depends on."""
    parts = (name.split(".") for name in imported(test))
    names = {part[1] for part in parts if part[0] == "flash_helpers" and len(part) > 1}
    folders = {root / HELPERS / name for name in {*ALWAYS, *names} - {*IN_KERNELS}}
    modules = (folder.with_suffix(".py") for folder in folders)
    below = (path for folder in folders for path in folder.rglob("*.py"))
    return {*below, *filter(Path.is_file, modules)}


def launches_text(config: Config) -> str:
    """Return the launches of a config at the corners that it declares."""
    device = largest_device(config.family.capabilities[-1])
    calls = (config.call(corner, corner.strides(), device) for corner in config.supports.corners())
    return "\n".join(map(repr, calls))


def kernels_digest(configs: Iterable[Config], texts: Mapping[str, str]) -> str:
    """Return a digest of the kernels of configs. texts: their PTX, by the name of the kernel."""
    found = hashlib.sha256()
    for config in configs:
        for name in config.kernels.values():
            compiler = _COMPILER.search(texts[name])
            found.update(f"{name}\0{compiler and compiler[1]}\0".encode())
            found.update(f"{ptx_code(texts[name])}\0".encode())
        found.update(launches_text(config).encode())
    return found.hexdigest()[:DIGITS]


def matrix_digests(
    family: Family[Any], tests: Iterable[Path], root: Path = ROOT
) -> dict[Path, MatrixDigest]:
    """Return what the matrix tests of a family depend on, by the files that hold them.

    Raises BuildError if a kernel does not compile.
    """
    configs = [config for config in listed_configs(root) if config.family is family]
    texts = {name: path.read_text() for name, path in ptx_paths(configs).items()}
    kernels = kernels_digest(configs, texts)
    operation = [*(root / HELPERS / "operations" / family.operation.name).rglob("*.py")]
    return {
        test: MatrixDigest(
            kernels,
            files_digest(root, [*operation, *rooms(root, test), *with_support(root, test)]),
        )
        for test in tests
    }


Record = dict[tuple[str, str], MatrixDigest]
"""By family and test file, relative to the root, what passed."""


def load_record(path: Path) -> Record:
    """Return what passed; nothing without a file."""
    if not path.is_file():
        return {}
    return {
        (family, test): MatrixDigest(**digest)
        for family, tests in json.loads(path.read_text()).items()
        for test, digest in tests.items()
    }


def save_record(path: Path, record: Record) -> None:
    """Write what passed."""
    document: dict[str, dict[str, dict[str, str]]] = {}
    for (family, test), digest in sorted(record.items(), key=lambda item: item[0]):
        document.setdefault(family, {})[test] = asdict(digest)
    write_if_different(path, json.dumps(document, indent=1) + "\n")
