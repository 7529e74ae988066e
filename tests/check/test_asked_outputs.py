"""Outputs that the command line asks for are computed by the tools that do not check them."""

from __future__ import annotations

import json

import pytest
from fake_backend import load_tool


@pytest.mark.parametrize(("words", "n_bytes"), [((), 0), (("--lse",), 64 * 4)])
def test_the_lse_is_computed_where_it_is_asked_for(capsys, words, n_bytes):
    # O is stored by TMA, which global_bytes leaves out
    sizes = ("--seq", "64", "--heads", "1", "--batch", "1")
    profile = load_tool("tools/analysis/profile_kernel.py")
    assert profile.main(["h20", *sizes, *words, "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["phases"]["whole kernel"]["global_bytes"] == n_bytes
