"""What a newcomer reads first: short, and it runs as it stands."""

from __future__ import annotations

import pytest
from fake_backend import ROOT, load_tool

QUICK_START = ROOT / "docs/quickstart.md"


def test_the_quick_start_is_one_screen() -> None:
    assert len(QUICK_START.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
def test_the_commands_of_the_quick_start_print_what_it_shows(capsys) -> None:
    tool = load_tool("tools/docs/build_docs.py")
    status = tool.main([str(QUICK_START), "--check"])
    assert status == 0, capsys.readouterr().out
