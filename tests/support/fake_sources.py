"""Repositories of a few files, for stand-ins of compilers."""

from collections.abc import Mapping
from pathlib import Path


def write_sources(root: Path, texts: Mapping[str, str]) -> Path:
    """Write files by their names relative to `root`, which is returned."""
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
