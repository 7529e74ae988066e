"""The order of transfers and kernels on their streams, with streams that only write a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_attention.distributed._group import Ranks, Ring
from flash_attention.distributed._peers import Place
from flash_attention.distributed._ring import _Keys


@dataclass
class Moves:
    """A ring that writes down its transfers. Marks are numbers: how many came before."""

    places: list[Place]
    marks: int = 0
    found: list[tuple[Any, Any, int]] = field(default_factory=list)

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def pass_on(self, sent: Any, place: Place, after: int, _what: str, _step: int) -> Moves:
        self.found.append((sent, place.own, after))
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_keys_arrive_where_no_kernel_and_no_transfer_reads(size) -> None:
    k = torch.zeros(1, 2, 1, 8)
    likes = _Keys.likes(k, k, size)
    ring: Any = Moves([Place((torch.empty_like(x), torch.empty_like(y))) for x, y in likes])
    keys = _Keys(ring, k, k, size)
    held = []  # by the kernels of each step
    for step in range(size):
        keys.start(step)
        held.append(keys.held)
        keys.finish()
    assert held[0][0] is k
    assert len(ring.found) == size - 1
    for step, (sent, received, after) in enumerate(ring.found):
        assert sent is held[step] and received is held[step + 1]
        assert received is not sent
        # mark n + 1 is behind the kernels of step n
        readers = [n for n in range(step) if held[n] is received]
        assert all(after >= n + 1 for n in readers), (step, readers, after)
        # and the transfer does not wait for the kernels right before its step
        assert step == 0 or after <= step - 1


class Log(list):
    """What streams were told, in order."""

    def stream(self, name: str) -> Any:
        return LoggedStream(name, self)


@dataclass
class LoggedStream:
    name: str
    log: Log

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"the event of {self.name}"


def test_a_transfer_waits_for_its_mark_and_kernels_for_the_transfer(
    monkeypatch, tmp_path: Path
) -> None:
    log = Log()
    kernels, transfers = log.stream("kernels"), log.stream("transfers")

    class Work:
        def wait(self) -> None:
            log.append("work is waited for")

    def moved(moves: list[dist.P2POp]) -> list[Work]:
        log.append(f"{len(moves)} moves")
        return [Work()]

    @contextmanager
    def on(stream: LoggedStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pair = torch.zeros(2), torch.zeros(2)
        ring = Ring(Ranks.of(None, "ring_attention"), [pair], torch.device("cpu"))
        ring._stream = transfers
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: kernels)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(dist, "batch_isend_irecv", moved)
        mark = ring.mark()
        ring.pass_on(pair, ring.places[0], mark, "keys", 0).wait()
    finally:
        dist.destroy_process_group()
    assert log == [
        "kernels records",
        "transfers waits for the event of kernels",
        "on transfers",
        "4 moves",
        "work is waited for",
        "transfers records",
        "off transfers",
        "kernels waits for the event of transfers",
    ]
