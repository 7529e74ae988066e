"""A small repository with pages to build, and the tool that builds them."""

from dataclasses import dataclass
from pathlib import Path

from fake_backend import load_tool

TOOL = load_tool("tools/docs/build_docs.py")


@dataclass(frozen=True)
class Book:
    """A repository: the real sources and measurements, and pages of a test's own."""

    root: Path

    def write(self, text: str, name: str = "page.md") -> Path:
        """A page below docs/."""
        path = self.root / "docs" / name
        path.write_text(text, encoding="utf-8")
        return path

    def run(self, *arguments: str) -> int:
        """The tool's exit status."""
        return TOOL.main([*arguments, "--root", str(self.root)])

    def built(self, text: str) -> str:
        """A page after it was built, which must succeed."""
        path = self.write(text)
        assert self.run() == 0
        return path.read_text(encoding="utf-8")
