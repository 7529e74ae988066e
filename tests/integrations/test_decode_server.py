"""examples/decode_server.py: its answers are right, its pages come back, and its check can fail."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_backend import ROOT

pytestmark = pytest.mark.slow
SMALL = ("--requests", "5", "--longest", "6", "--rows", "2", "--pages", "7", "--page-size", "3")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        return importlib.import_module("decode_server")


def test_every_token_is_that_of_a_plain_loop(example, capsys):
    assert example.main([*SMALL]) == 0
    out = capsys.readouterr().out
    assert re.search(r"of up to 2 requests, .*; 0 wrong; 7 of 7 pages free", out), out


def test_a_request_waits_for_a_row_and_for_pages(example):
    """Of three requests the second waits for pages, and the third takes those of the first."""
    served: list[Any] = []
    with torch.inference_mode():
        model = example.Model("cpu", most_tokens=8)
        server = example.Server(model, 2, pages=3, page_size=4, most_tokens=8, device="cpu")
        admit = server.admit

        def watched(request: Any) -> bool:
            is_taken = admit(request)
            served.append((request.arrival, is_taken))
            return is_taken

        server.admit = watched
        requests = [example.Request(n, [1, 2, 3], new) for n, new in ((0, 4), (0, 3), (1, 1))]
        server.serve(requests)
        assert [example.wrong_tokens(model, request) for request in requests] == [0, 0, 0]
    assert served.count((0, False)) > 0 and served[-1] == (1, True)
    assert [len(request.answer) for request in requests] == [4, 3, 1]
    assert sorted(server.free) == [0, 1, 2] and server.promised == 0


def test_the_check_finds_keys_of_another_request(example, monkeypatch, capsys):
    give_pages = example.Server.give_pages

    def give_one_page_to_all(server: Any, row: int, length: int) -> None:
        give_pages(server, row, length)
        server.table.zero_()

    monkeypatch.setattr(example.Server, "give_pages", give_one_page_to_all)
    assert example.main([*SMALL]) == 1
    assert not re.search(r"; 0 wrong;", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pages", "2"], "2 pages of 4 keys do not hold a request of 20: pass --pages 5"),
        (["--page-size", "0"], "page_size 0 is less than 1: pass 1 or more"),
    ],
)
def test_what_cannot_be_served_is_refused(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        example.main(arguments)
    assert exit_.value.code == 2 and message in capsys.readouterr().err
