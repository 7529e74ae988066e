"""Which modules of flash_helpers may import which."""

import ast
from pathlib import Path

import pytest

import flash_helpers
from flash_helpers.ptx.read.graph import strongly_connected_components

ROOT = Path(flash_helpers.__file__).parent


ROOMS = (
    *("numbers", "geometry", "memory", "watch", "asynchronous"),
    *("count", "machine", "instructions", "execute"),
)
"""The rooms of the simulator; each imports only those before it."""
COMMAND_LINES = ("ptx.__main__", "sass.__main__")
"""Modules that `python -m` runs: each hands over to the room that has its command line."""
KNOWN = {"ptx": (), "sass": ("ptx.read", "ptx.errors")}
"""Rooms for anybody's kernels, and what they import besides gpu, console and themselves."""


def _imported(tree: ast.AST, names: set[str]) -> set[str]:
    """Modules that a file imports anywhere: in functions and for type checkers too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # of a name that is no module, the module that holds it
            found.update(name if name in names else node.module for name in inner)
    return found & {*names, "flash_attention"}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Modules that each module imports, by their names below flash_helpers."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("flash_helpers", *parts)).removesuffix(".__init__")
        paths[name] = path
    names = set(paths)
    return {
        name.removeprefix("flash_helpers."): {
            other.removeprefix("flash_helpers.") for other in _imported(tree, names) - {name}
        }
        for name, tree in ((n, ast.parse(p.read_text())) for n, p in paths.items())
    }


def _circles(imports: dict[str, set[str]]) -> list[frozenset[str]]:
    components = strongly_connected_components(
        {name: sorted(others) for name, others in imports.items()}, sorted(imports)
    )
    return [frozenset(component) for component in components if len(component) > 1]


def test_an_import_within_a_function_is_seen() -> None:
    text = "def f():\n    from flash_helpers import registry\n    import flash_attention\n"
    names = {"flash_helpers.registry"}
    assert _imported(ast.parse(text), names) == {*names, "flash_attention"}


def test_circles_are_seen() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert _circles(imports) == [frozenset("abc")]


def test_no_modules_import_each_other_in_a_circle(imports) -> None:
    found = _circles(imports)
    assert not found, "\n".join(", ".join(sorted(circle)) for circle in found)


@pytest.mark.parametrize("room", KNOWN)
def test_rooms_for_anybodys_kernels_know_no_other_room(imports, room) -> None:
    known = tuple(f"{name}." for name in (room, "gpu", "console", *KNOWN[room]))
    inside = {
        name: others
        for name, others in imports.items()
        if name.split(".")[0] == room and name not in COMMAND_LINES
    }
    assert len(inside) > 20
    outside = {
        f"{name} imports {other}"
        for name, others in inside.items()
        for other in others
        if not f"{other}.".startswith(known)
    }
    assert not outside


def test_rooms_of_the_simulator_import_those_before_them(imports) -> None:
    run = "ptx.run."
    room_of = {n: n.removeprefix(run).split(".")[0] for n in imports if n.startswith(run)}
    ranks = {name: ROOMS.index(room) for name, room in room_of.items() if room in ROOMS}
    assert set(ranks.values()) == set(range(len(ROOMS)))
    upward = [
        f"{name} imports {other}"
        for name, rank in ranks.items()
        for other in imports[name]
        if ranks.get(other, 0) > rank
    ]
    assert not upward


def test_only_their_integrations_import_the_libraries_of_models() -> None:
    """The package is imported where these extras are not installed."""
    of_models = {"transformers", "diffusers", "flash_attention.integrations"}
    package = ROOT.parents[1] / "flash_attention"
    for path in (*ROOT.rglob("*.py"), *package.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            assert not of_models & set(names), path
