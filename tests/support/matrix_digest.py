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
from flash_helpers.runtime.library import ptx_path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/matrix.json"
SUPPORT = "tests/support"
HELPERS = "py/flash_helpers"
SIMULATOR = (f"{HELPERS}/ptx", f"{HELPERS}/runtime")

_COMPILER = re.compile(r"^// Cuda compilation tools, (release .*)$", re.MULTILINE)
# Comments, lines of the source and names of its files, with the compiler's folder among them.
_NO_CODE = re.compile(r"//.*|^\s*\.(?:loc|file)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class MatrixDigest:
    """What the matrix tests of a family depend on.

    compiler: that the PTX comes from. kernels: digest of the PTX and of the launches at the corners
    that the configs declare. simulator: digest of the sources that run them. checks: digest of the
    sources that say what is right: references, planted faults, and the tests.
    """

    compiler: str
    kernels: str
    simulator: str
    checks: str

    def differences(self, recorded: MatrixDigest | None) -> list[str]:
        """Return why this is not what passed, in words; nothing if it is."""
        if recorded is None:
            return ["no run has passed yet"]
        if self.compiler != recorded.compiler:
            return [f"the PTX is of {self.compiler}, and that which passed of {recorded.compiler}"]
        words = {
            "kernels": "its PTX or launches differ",
            "simulator": "the simulator differs",
            "checks": "its checks differ",
        }
        return [
            f"{text} from what passed"
            for name, text in words.items()
            if getattr(self, name) != getattr(recorded, name)
        ]


def ptx_code(text: str) -> str:
    """Return what a PTX text computes: without comments, and without the lines that name source
    files, which hold folders of the machine that compiled it."""
    lines = (line.strip() for line in _NO_CODE.sub("", text).splitlines())
    return "\n".join(filter(None, lines))


def files_digest(root: Path, paths: Iterable[Path]) -> str:
    """Return a digest of the names, relative to the root, and the bytes of files."""
    found = hashlib.sha256()
    for path in sorted({*paths}):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root)}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


def sources(root: Path, folder: str) -> Iterator[Path]:
    """Yield the Python files below a folder of the root."""
    return (root / folder).rglob("*.py")


def with_support(root: Path, tests: Iterable[Path]) -> set[Path]:
    """Return test files and the modules of tests/support that they import, and that these do."""
    found: set[Path] = set()
    waiting = [*tests]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules = (root / SUPPORT / f"{name}.py" for name in names)
            waiting += [module for module in modules if module.is_file()]
    return found


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
            found.update(f"{name}\0{ptx_code(texts[name])}\0".encode())
        found.update(launches_text(config).encode())
    return found.hexdigest()


def family_digest(family: Family[Any], tests: Iterable[Path], root: Path = ROOT) -> MatrixDigest:
    """Return what the matrix tests of a family depend on. tests: the files that hold them.

    Raises OSError where a kernel of the committed maps is not built.
    """
    configs = [config for config in listed_configs(root) if config.family is family]
    texts = {
        name: ptx_path(config, function).read_text()
        for config in configs
        for function, name in config.kernels.items()
    }
    compilers = {match[1] for text in texts.values() if (match := _COMPILER.search(text))}
    operation = f"{HELPERS}/operations/{family.operation.name}"
    checks = [*sources(root, f"{HELPERS}/check"), *sources(root, operation)]
    return MatrixDigest(
        compiler=" and ".join(sorted(compilers)),
        kernels=kernels_digest(configs, texts),
        simulator=files_digest(root, (path for f in SIMULATOR for path in sources(root, f))),
        checks=files_digest(root, [*checks, *with_support(root, tests)]),
    )


def load_record(path: Path) -> dict[str, MatrixDigest]:
    """Return what passed, by family; nothing without a file."""
    if not path.is_file():
        return {}
    return {name: MatrixDigest(**digest) for name, digest in json.loads(path.read_text()).items()}


def save_record(path: Path, passed: Mapping[str, MatrixDigest]) -> None:
    """Write what passed beside what the file says of other families."""
    every = {**load_record(path), **passed}
    document = {name: asdict(every[name]) for name in sorted(every)}
    write_if_different(path, json.dumps(document, indent=1) + "\n")
