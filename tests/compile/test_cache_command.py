"""The command that lists and removes compiled kernels."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_toolchain import FakeCompiler

from flash_attention.__main__ import COMMANDS
from flash_attention.__main__ import main as flash_attention
from flash_helpers.compile import cache_command
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.compile.sources import Unit
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.kernel_configs import get_kernel_progression_configs

pytestmark = pytest.mark.slow

V1, V2 = get_kernel_progression_configs()[0], get_kernel_progression_configs()[2]
NAMES = sorted(config.short_form() for config in (V1, V2))


@pytest.fixture
def use(root, tmp_path, monkeypatch) -> Callable[..., Jit]:
    """Makes the command take the Jit of a compiler, which is returned."""

    def use(**compiler) -> Jit:
        jit = Jit(root, Cache(tmp_path / "cache"), lambda: FakeCompiler(**compiler), jobs=2)
        monkeypatch.setattr(cache_command, "default_jit", lambda: jit)
        return jit

    return use


@pytest.fixture
def filled(use) -> list[Path]:
    """The entries of two kernels."""
    units = [*units_of(V1), *units_of(V2)]
    return [found.folder for found in use().get(units, "sm_80")]


@pytest.fixture
def listed(capsys) -> Callable[..., dict[str, str]]:
    """Names and states of the kernels that the command lists."""

    def listed(*options: str) -> dict[str, str]:
        assert cache_command.main(["--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)["entries"]
        return {entry["name"]: entry["state"] for entry in found}

    return listed


def test_an_empty_cache_has_nothing(use, capsys, tmp_path) -> None:
    use()
    assert cache_command.main([]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cache'}: 0 kernels, 0.0 MB\n"


def test_kernels_are_listed_with_target_state_compiler_size_and_age(filled, capsys) -> None:
    assert cache_command.main([]) == 0
    title, _, _, *rows = capsys.readouterr().out.splitlines()
    assert ": 2 kernels, " in title
    assert [row.split()[:5] for row in rows] == [
        [name, "sm_80", "current", "fakecc", "13.0"] for name in NAMES
    ]
    assert all(row.split()[-1] == "now" for row in rows)
    assert cache_command.main(["--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["entries"][0]
    folder = filled[0].parent / entry["folder"]
    assert entry["bytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_what_another_compiler_or_nothing_known_made_is_stale(filled, use, listed) -> None:
    assert listed() == dict.fromkeys(NAMES, "current")
    (filled[0] / "manifest.json").write_text("{}")
    assert listed("--stale") == {V1.short_form(): "stale"}
    use(identity="another")
    assert listed() == dict.fromkeys(NAMES, "stale")


def test_a_kernel_of_no_config_is_neither(filled, use, listed) -> None:
    use().get([Unit("kernel_a", "// a\n")], "sm_80")
    assert listed()["kernel_a"] == "unknown"
    assert listed("--stale") == {}


@pytest.mark.parametrize(
    ("options", "stay"), [((), []), (("--stale",), NAMES[1:]), (("--days", "30"), NAMES[1:])]
)
def test_those_chosen_are_removed_and_nothing_else(filled, capsys, listed, options, stay) -> None:
    cache = filled[0].parent
    (cache / "my-own-project").mkdir()
    killed = cache / ".compiling-kernel_a-sm_80-0123456789abcdef"
    killed.mkdir()
    unit = Cache(cache).keep_unit(Unit("kernel_a", "// a\n"))
    if "--stale" in options:
        (filled[0] / "manifest.json").write_text("{}")
    month_ago = time.time() - 31 * 24 * 3600
    for path in filled[0].iterdir():
        os.utime(path, (month_ago, month_ago))
    assert cache_command.main(["--clear", *options]) == 0
    assert f"removed from {cache}: {2 - len(stay)} kernel" in capsys.readouterr().out
    assert [*listed()] == stay
    assert (cache / "my-own-project").is_dir()
    assert not killed.exists() and not unit.exists()


def test_removing_needs_no_compiler_unless_for_the_stale(filled, root, monkeypatch, capsys) -> None:
    def none():
        raise BuildError("there is no compiler")

    jit = Jit(root, Cache(filled[0].parent), none, jobs=1)
    monkeypatch.setattr(cache_command, "default_jit", lambda: jit)
    assert cache_command.main(["--stale", "--clear"]) == 2
    assert capsys.readouterr().err == "there is no compiler\n"
    assert cache_command.main(["--clear"]) == 0
    assert not filled[0].exists()


def test_wrong_usage_is_one_line_and_2(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cache_command.main(["--clear", "--json"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("--json lists, and --clear removes: give one of them\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_package_has_its_own_help(command, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        flash_attention([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m flash_attention {command} ")


def test_an_unknown_command_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        flash_attention(["compile"])
    assert stop.value.code == 2
    assert "invalid choice: 'compile'" in capsys.readouterr().err
