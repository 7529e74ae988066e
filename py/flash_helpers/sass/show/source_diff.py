"""What changed in the CUDA source of a kernel."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from flash_helpers.registry.family import Step
from flash_helpers.sass.read.records import Kernel

_FOLDED = "vN"


def source_diff(before: Step, after: Step, root: Path, fold_namespace: bool = False) -> str:
    """The unified diff of two steps' own files.

    root: of the repository; the sources are not part of the installed package, and where they are
        missing the text says so.
    fold_namespace: the steps' namespaces, which differ in every pair, are written as one name.
    """
    texts = []
    for step in (before, after):
        path = root / step.source
        if not path.is_file():
            return (
                f"{step.source} is not at hand: the sources are no part of the installed package, "
                "so run the tool from a checkout of the repository\n"
            )
        text = path.read_text(encoding="utf-8")
        if fold_namespace:
            text = re.sub(rf"\b{step.namespace}(?=::)", _FOLDED, text)
            text = re.sub(rf"\bnamespace {step.namespace}\b", f"namespace {_FOLDED}", text)
        texts.append(text.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*texts, str(before.source), str(after.source)))


def read_sources(kernels: Iterable[Kernel], root: Path) -> Mapping[str, str]:
    """The texts of the files that kernels were made of, by the paths of their line tables.

    Left out: files that are not below `root`, and those that have changed since a kernel was built,
    so that a line that it names is gone, empty or a comment.
    """
    named: dict[str, set[int]] = {}
    for kernel in kernels:
        for chain in {instruction.source for instruction in kernel.instructions}:
            for line in chain:
                named.setdefault(line.file, set()).add(line.line)
    found = {}
    for name, numbers in named.items():
        path = root / name
        if Path(name).is_absolute() or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if not _is_out_of_date(text, numbers):
            found[name] = text
    return found


def _is_out_of_date(text: str, numbers: Iterable[int]) -> bool:
    lines = text.split("\n")
    for number in numbers:
        if number < 1:  # code of the compiler's own
            continue
        line = lines[number - 1].strip() if number <= len(lines) else ""
        if not line or line.startswith("//"):
            return True
    return False
