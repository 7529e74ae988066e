"""Memory that the rank before writes, with symmetric memory of one process on the CPU."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from flash_attention.distributed import _peers
from flash_attention.distributed._peers import Peers, bytes_of, peers_bytes, peers_of

CPU = torch.device("cpu")
LIKES = [
    (torch.empty(2, 3, 5, dtype=torch.bfloat16), torch.empty(7, dtype=torch.float32)),
    (torch.empty(300, device="meta", dtype=torch.float32),),
]


class Handle:
    """The memory of this rank and of the next one, which logs barriers."""

    def __init__(self, size: int) -> None:
        self.theirs = torch.zeros(size, dtype=torch.uint8)
        self.log: list[tuple[int, int, int]] = []  # channel, timeout, bytes written so far

    def get_buffer(self, _rank: int, sizes: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        assert (sizes, dtype) == (self.theirs.shape, torch.uint8)
        return self.theirs

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.log.append((channel, timeout_ms, int(self.theirs.count_nonzero())))


@pytest.fixture
def group(monkeypatch: Any, tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, _: Handle(memory.numel()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(_peers, "_milliseconds", lambda _: 1234)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_places_lie_apart_and_at_the_same_bytes_in_both_ranks(group) -> None:
    peers = Peers(group, CPU, bytes_of(LIKES))
    places = peers.places(LIKES)
    assert [[x.shape for x in place.own] for place in places] == [
        [x.shape for x in likes] for likes in LIKES
    ]
    ends = 0
    for place, likes in zip(places, LIKES, strict=True):
        for own, theirs, like in zip(place.own, place.theirs, likes, strict=True):
            begins = [
                x.data_ptr() - memory.data_ptr()
                for x, memory in ((own, peers._memory), (theirs, peers._theirs))
            ]
            assert begins[0] == begins[1] >= ends and begins[0] % 256 == 0
            assert own.dtype == theirs.dtype == like.dtype and own.is_contiguous()
            ends = begins[0] + own.nbytes
    assert ends <= peers.size


def test_a_copy_stands_between_barriers_and_changes_the_other_rank_alone(group) -> None:
    peers = Peers(group, CPU, bytes_of(LIKES))
    first, second = peers.places(LIKES)
    sent = [torch.full(x.shape, 3.0, dtype=x.dtype) for x in first.own]
    peers.copy(sent, first)
    assert [torch.equal(x, y) for x, y in zip(first.theirs, sent, strict=True)] == [True, True]
    assert not any(x.any() for x in (*first.own, *second.own, *second.theirs))
    (before, *timeout, written_before), (behind, _, written) = peers._handle.log
    assert before != behind and timeout == [1234] and written_before == 0 < written


def test_a_group_keeps_its_memory_until_more_is_needed(group) -> None:
    found = peers_of(group, CPU, 1000)
    assert found is not None and peers_of(group, CPU, 999) is found
    assert peers_bytes(group) == 1000
    assert (more := peers_of(group, CPU, 1001)) is not found and more.size == 1001
    assert peers_bytes(group) == 1001


def test_ranks_of_two_hosts_have_none(group, monkeypatch) -> None:
    names = iter(("one", "other"))
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)

    def gathered(into: list[Any], value: Any, _group: Any) -> None:
        into[:] = [value, socket.gethostname()] if isinstance(value, str) else [value, True]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    assert peers_of(group, CPU, 10) is None and peers_of(group, CPU, 10) is None
    assert peers_bytes(group) == 0


def test_an_error_of_a_driver_leaves_the_group_without(group, monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA driver error: peer access is not supported")

    monkeypatch.setattr(symmetric, "rendezvous", fails)
    assert peers_of(group, CPU, 10) is None
