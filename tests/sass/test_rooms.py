"""Who knows whom: the rooms ptx/ and sass/ are for anybody's kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_helpers

PACKAGE = Path(flash_helpers.__file__).parent
COMMON = ("gpu", "console")
ALLOWED = {
    "ptx": (*COMMON, "ptx", "sass.read"),
    "sass": (*COMMON, "sass", "ptx.read", "ptx.errors"),
}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, inside of functions too; a name that is imported from a
    package counts as a module of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_no_other_room(room: str) -> None:
    allowed = tuple(f"flash_helpers.{name}." for name in ALLOWED[room])
    modules = sorted((PACKAGE / room).rglob("*.py"))
    assert len(modules) > 20
    strange = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in modules
        for name in imports(path)
        if name.startswith("flash_") and not f"{name}.".startswith(allowed)
    ]
    assert strange == []


def test_an_import_within_a_function_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from flash_helpers import registry\n    import flash_attention\n"
    )
    assert list(imports(path)) == ["flash_helpers.registry", "flash_attention"]
