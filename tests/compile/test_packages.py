"""Files that outside tools read, and `.ci` on a machine that lacks system packages."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import flash_attention
import flash_helpers

VERSION = flash_helpers.__version__


def test_one_version_is_told_everywhere(root):
    assert flash_attention.__version__ == VERSION
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == VERSION
    newest = re.search(r"^## (\S+) \(", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == VERSION


def test_hooks_of_pre_commit_have_the_versions_of_ci(root):
    pinned = dict(re.findall(r"^(\S+)==(\S+)", (root / ".ci/constraints.txt").read_text(), re.M))
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {Path(hook["repo"]).name: hook.get("rev") for hook in hooks}
    assert revisions == {
        "ruff-pre-commit": f"v{pinned['ruff']}",
        "mirrors-clang-format": f"v{pinned['clang-format']}",
        "local": None,
    }


@pytest.fixture
def programs(tmp_path) -> Path:
    """A folder for PATH: a shell, a sudo for nothing, an apt-get that prints its arguments."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    write_program(tmp_path / "apt-get", 'echo "$@"')
    write_program(tmp_path / "sudo", '"$@"')
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def run(script: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    command = [programs / "bash", script]
    return subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["chromedriver", "rsvg-convert"])
def test_ci_names_a_program_that_is_missing_and_installs_nothing(missing, root, programs):
    for name in {"chromedriver", "rsvg-convert"} - {missing}:
        write_program(programs / name, "")
    ended = run(root / ".ci/run", programs)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"there is no {missing}" in ended.stderr and "bash .ci/setup" in ended.stderr


@pytest.mark.parametrize(
    ("there", "packages"),
    [
        ([], "chromium chromium-driver librsvg2-bin"),
        (["rsvg-convert"], "chromium chromium-driver"),
        (["chromedriver", "rsvg-convert"], None),
    ],
)
def test_setup_installs_the_packages_that_are_missing(there, packages, root, programs):
    for name in there:
        write_program(programs / name, "")
    ended = run(root / ".ci/setup", programs)
    assert ended.returncode == 0, ended.stderr
    installed = re.findall(r"^install .*--no-install-recommends (.*)", ended.stdout, re.MULTILINE)
    assert installed == ([packages] if packages else [])
