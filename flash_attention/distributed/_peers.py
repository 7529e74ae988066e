"""Memory of a rank that the rank before it writes with its copy engines, where all ranks of a group
run on one host.

NCCL's kernels take SMs. A kernel of attention that begins behind one finds some of them taken, and
its thread blocks there end late: 24% later on an H200 whose neighbour sends it 268 MB. The copy
engines take none. PyTorch's symmetric memory maps the memory of all ranks.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_ALIGNMENT = 256  # bytes between tensors
_BEFORE, _BEHIND = 0, 1  # channels of the barriers around a copy


@dataclass(frozen=True)
class Place:
    """Tensors of this rank that another rank writes. theirs: those of the next rank in the same
    place; empty where NCCL moves them."""

    own: tuple[torch.Tensor, ...]
    theirs: tuple[torch.Tensor, ...] = ()


class Peers:
    """Symmetric memory of a group. All ranks make it, with as many bytes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.size = size
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)
        following = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        self._theirs = self._handle.get_buffer(following, (size,), torch.uint8)
        self._timeout_ms = _milliseconds(group)
        self.last_use: torch.cuda.Event | None = None

    def places(self, likes: Sequence[Sequence[torch.Tensor]]) -> list[Place]:
        """Return a place for each group of tensors, contiguous ones of their shapes and dtypes."""
        found, begin = [], 0
        for group in likes:
            begins = [*itertools.accumulate(map(_size, group), initial=begin)]
            own, theirs = (
                tuple(_view(memory, at, x) for at, x in zip(begins, group, strict=False))
                for memory in (self._memory, self._theirs)
            )
            begin = begins[-1]
            found.append(Place(own, theirs))
        return found

    def copy(self, sent: Sequence[torch.Tensor], place: Place) -> None:
        """Copy tensors to the next rank on the current stream, between barriers of all ranks: none
        copies before all have reached the first, and behind the second all have been written."""
        self._handle.barrier(channel=_BEFORE, timeout_ms=self._timeout_ms)
        for x, theirs in zip(sent, place.theirs, strict=True):
            theirs.copy_(x, non_blocking=True)
        self._handle.barrier(channel=_BEHIND, timeout_ms=self._timeout_ms)


def bytes_of(likes: Sequence[Sequence[torch.Tensor]]) -> int:
    """Return the bytes of symmetric memory that places for these tensors need."""
    return sum(_size(x) for group in likes for x in group)


def _size(like: torch.Tensor) -> int:
    """Return the bytes of a tensor, and of the gap behind it."""
    return -(-like.numel() * like.element_size() // _ALIGNMENT) * _ALIGNMENT


def _view(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    end = begin + like.numel() * like.element_size()
    return memory[begin:end].view(like.dtype).view(like.shape)


def _milliseconds(group: dist.ProcessGroup) -> int:
    """Return the group's timeout. A rank that waits longer at a barrier ends with a CUDA error."""
    options: Any = group._get_backend(torch.device("cuda")).options
    return math.ceil(options._timeout.total_seconds() * 1000)


_peers: WeakKeyDictionary[dist.ProcessGroup, Peers | None] = WeakKeyDictionary()


def peers_of(group: dist.ProcessGroup, device: torch.device, size: int) -> Peers | None:
    """Return the symmetric memory of a group, at least so many bytes; None where its ranks run on
    several hosts, or where one of them cannot have it. All ranks call with the same size."""
    if group in _peers and ((known := _peers[group]) is None or known.size >= size):
        return known
    if group not in _peers and not _all(group, _is_one_host(group)):
        _peers[group] = None
        return None
    torch.cuda.synchronize(device)  # copies into the memory that is given up have ended
    _peers.pop(group, None)
    found: list[Peers] = []
    _peers[group] = (
        found[0] if _all(group, _try(lambda: Peers(group, device, size), found)) else None
    )
    return _peers[group]


def peers_bytes(group: dist.ProcessGroup) -> int:
    """Return the bytes of symmetric memory that this rank holds for a group."""
    known = _peers.get(group)
    return 0 if known is None else known.size


def _is_one_host(group: dist.ProcessGroup) -> bool:
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group)
    return len({*hosts}) == 1 and _try(_import, [])


def _import() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous


def _try(make: Callable[[], Any], found: list[Any]) -> bool:
    """Append what a function makes; return whether it raised nothing. PyTorch's errors have no
    type of their own where a driver or an installation cannot share memory."""
    try:
        found.append(make())
    except Exception:
        return False
    return True


def _all(group: dist.ProcessGroup, is_true: bool) -> bool:
    """Return whether something is true in all ranks."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, is_true, group)
    return all(answers)
