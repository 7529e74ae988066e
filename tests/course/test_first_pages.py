"""README and quick start, the first pages of a newcomer, are short and run as they stand."""

import re
import subprocess
from pathlib import Path

import pytest
from fake_backend import ROOT, load_tool

from flash_helpers.course.commands import command_environment

README, QUICK_START = ROOT / "README.md", ROOT / "docs/quickstart.md"


@pytest.mark.parametrize(("page", "limit"), [(README, 120), (QUICK_START, 60)])
def test_it_is_short(page: Path, limit: int) -> None:
    shown = re.sub(r"<!--.*?-->\n*", "", page.read_text(encoding="utf-8"))
    assert len(shown.splitlines()) <= limit


def test_the_readme_points_to_the_quick_start_before_anything_is_installed() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.index("(docs/quickstart.md)") < text.index("pip install")


@pytest.mark.slow
def test_the_readme_s_use_runs_without_a_gpu(warm: Path) -> None:
    (use,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    right = """
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.float().transpose(1, 2) for x in (q, k, v))
).transpose(1, 2)
torch.testing.assert_close(o.float(), expected, atol=0.02, rtol=0.02)
"""
    subprocess.run([warm, "-c", use + right], env=command_environment(), check=True)


@pytest.mark.slow
def test_the_commands_of_the_quick_start_print_what_it_shows(capsys) -> None:
    tool = load_tool("tools/docs/build_docs.py")
    status = tool.main([str(QUICK_START), "--check"])
    assert status == 0, capsys.readouterr().out
