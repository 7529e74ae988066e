"""Processes that make a group of torch.distributed by gloo, without GPUs, and run cases in it."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60
"""Of a case: a rank that takes longer hangs."""
SHORT_S = 2
"""Timeout of the groups in which a rank fails."""


@dataclass(frozen=True)
class Refused:
    """An exception of a rank."""

    kind: str
    text: str


class Ranks:
    """Processes, each with groups of the first 1, 2, … ranks.

    They are forked from a process that has imported what they need.
    """

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "flash_attention.distributed"])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, str(folder / "store"), theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], size: int, **arguments: Any) -> list[Any]:
        """Return what a function of a module returns in each of the first `size` ranks, whose
        group is its first argument; a `Refused` where it raises."""
        for pipe in self._pipes[:size]:
            pipe.send((case, size, arguments))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), TIMEOUT_S)
            assert ready, f"ranks {[*waiting.values()]} have not answered; the others: {found}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[waiting.pop(pipe)] = _received(pipe)
        return [found[rank] for rank in range(size)]

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return Refused("SystemExit", "the process has left")


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {n: dist.new_group([*range(n)]) for n in range(1, size + 1)}
    # in which a rank may fail: no other case has them
    short = dist.new_group([*range(size)], timeout=timedelta(seconds=SHORT_S))
    while True:
        try:
            case, n, arguments = pipe.recv()
        except EOFError:
            return
        try:
            group = short if arguments.pop("may_fail", False) else groups[n]
            pipe.send(case(group, **arguments))
        except Exception as error:
            pipe.send(Refused(type(error).__name__, str(error)))
