"""The ranks among which a sequence is split: what they must agree on, and what they exchange."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flash_attention.distributed._peers import Peers, Place, bytes_of, peers_of

Group = dist.ProcessGroup | DeviceMesh | None
_REFUSED = "refused"  # whether a rank has refused its arguments


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a sequence.

    function: its name, for messages. rank: of this process in the group. size: of the group.
    """

    function: str
    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: Group, function: str) -> Ranks:
        """Return the ranks of a group, of a mesh of one dimension, or of all processes.

        Raises RuntimeError if torch.distributed is not initialised, TypeError for what is no group,
        ValueError for a mesh of several dimensions and for a group without this process.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{function} needs a process group, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() first, or attention() in one process"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"the mesh has {group.ndim} dimensions, {group.mesh_dim_names}: pass one of "
                    'them, such as mesh["context"]'
                )
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        rank = -1
        if isinstance(group, dist.ProcessGroup):
            rank = dist.get_rank(group)
        elif group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"group is a {type(group).__name__}: pass a ProcessGroup, a DeviceMesh, or None "
                "for all processes"
            )
        if rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not in the group: call {function} only in the "
                "ranks of the group"
            )
        return cls(function, group, rank, dist.get_world_size(group))

    def backend(self, device: str) -> str | None:
        """Return the backend that moves tensors of a type of device, if there is one."""
        pairs = (pair.partition(":") for pair in dist.get_backend_config(self.group).split(","))
        found = {kind: name for kind, _, name in pairs}.get(device)
        # which copies CUDA tensors through the host, and sends none
        return None if found == "gloo" and device != "cpu" else found

    def check_device(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for tensors that the group's backend does not move, and RuntimeError
        while a CUDA graph is captured."""
        for name, x in tensors.items():
            if self.backend(x.device.type) is None:
                taken = [d for d in ("cpu", "cuda") if self.backend(d) is not None]
                raise ValueError(
                    f"{name} is on {x.device}, and the group's backend "
                    f"({dist.get_backend_config(self.group)}) exchanges tensors on "
                    f"{' and '.join(taken) or 'no device'}: move it there, or make a group with a "
                    'backend for it, as by init_process_group("cpu:gloo,cuda:nccl")'
                )
        if any(x.is_cuda for x in tensors.values()) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.function} was called while a CUDA graph is captured, and an exchange "
                "cannot be captured: NCCL connects ranks at the first one, and shards are checked "
                "by the host. Call it outside of torch.cuda.graph(), and capture the layers "
                "between"
            )

    def agree(self, check: Callable[[], Mapping[str, Any]], *, is_asked: bool) -> None:
        """Check that all ranks call with the same sizes and options.

        check: raises what is wrong with this rank's arguments, and returns by name what must be
        the same on all ranks. is_asked: without it no rank hears of the others.

        Raises what `check` raises, and then ValueError on all other ranks; ValueError on all ranks
        for values that differ.
        """
        if not is_asked or self.size == 1:
            check()
            return
        refusal: Exception | None = None
        own: Mapping[str, Any] = {}
        try:
            own = check()
        except (TypeError, ValueError, RuntimeError) as error:
            refusal = error
        found = self._gathered(own, refusal is not None)
        if refusal is not None:
            raise refusal
        for rank, of_rank in enumerate(found):
            if of_rank is None:
                raise ValueError(
                    f"{self.function}: rank {rank} has refused its arguments, and this is rank "
                    f"{self.rank}: see the error of that rank"
                )
            for name, value in own.items():
                if of_rank[name] != _number(value):
                    other = f"{of_rank[name]}" if isinstance(value, int) else "another value"
                    raise ValueError(
                        f"{self.function}: {name} is {value} on rank {self.rank} and {other} on "
                        f"rank {rank}: pass equal shards and options on all ranks; shard() cuts a "
                        "padded sequence so"
                    )

    def _gathered(self, own: Mapping[str, Any], refuses: bool) -> list[dict[str, int] | None]:
        """Return the values of each rank as whole numbers; None for one that refuses."""
        is_on_host = self.backend("cpu") is not None
        device = torch.device("cpu" if is_on_host else "cuda")
        names = list(AGREED)
        values = [int(refuses), *(_number(own.get(name)) for name in names)]
        sent = torch.tensor(values, dtype=torch.int64, device=device)
        into = [torch.empty_like(sent) for _ in range(self.size)]
        with self.failures("agree on its arguments with the other ranks"):
            dist.all_gather(into, sent, self.group)
            rows = torch.stack(into).tolist()
        return [None if refused else dict(zip(names, row, strict=True)) for refused, *row in rows]

    def failures(self, doing: str) -> _Failures:
        """Return a context that tells which rank could not do what, where a backend fails."""
        return _Failures(f"{self.function}: rank {self.rank} of {self.size} could not {doing}")


AGREED = (
    *("batch", "shard length", "keys of a shard", "heads", "heads of K and V", "d_head", "d_v"),
    *("dtype", "causal", "window_size", "placement", "softcap", "softmax_scale", "cu_seqlens"),
    "requires_grad",
)
"""What all ranks must have in common."""


def _number(value: Any) -> int:
    """Return a value as 63 bits: itself where it is a whole number."""
    if isinstance(value, int):
        return value
    return zlib.crc32(repr(value).encode())


@dataclass(frozen=True)
class _Failures:
    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"{self.what}. A rank has failed, has left, or has not called within the group's "
                "timeout: see the first error among the ranks, and start the group again. The "
                f"backend says: {error}"
            ) from error


@dataclass(frozen=True)
class TransferTimes:
    """Events of a transfer on CUDA.

    begin, end: on the stream of transfers. before, after: on the stream of the kernels, around the
    wait for the transfer, which takes no time where the transfer is hidden.
    """

    begin: torch.cuda.Event
    end: torch.cuda.Event
    before: torch.cuda.Event
    after: torch.cuda.Event

    @classmethod
    def new(cls) -> TransferTimes:
        """Return events that have not been recorded."""
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(4)))


_TIMED: ContextVar[list[TransferTimes] | None] = ContextVar("timed", default=None)


@contextmanager
def timed_transfers() -> Iterator[list[TransferTimes]]:
    """Collect the events of the transfers on CUDA of calls that are made here, and of their
    backward passes whenever these run."""
    found: list[TransferTimes] = []
    token = _TIMED.set(found)
    try:
        yield found
    finally:
        _TIMED.reset(token)


def transfers_to_time() -> list[TransferTimes] | None:
    """Return the list of `timed_transfers`, if it is asked for."""
    return _TIMED.get()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class Transfer:
    """Tensors on their way. On CUDA `done` is an event on the stream of transfers. `sent` must live
    until the wait, behind which the current stream may use its memory again."""

    failures: _Failures
    device: torch.device
    sent: Sequence[torch.Tensor]
    work: Sequence[dist.Work]
    done: torch.cuda.Event | None
    times: TransferTimes | None = None

    def wait(self) -> None:
        """Have the current stream wait until all has arrived and been sent; on the CPU, wait."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.device)
            if self.times is not None:
                self.times.before.record(stream)
            stream.wait_event(self.done)
            if self.times is not None:
                self.times.after.record(stream)
            return
        with self.failures:
            for each in self.work:
                each.wait()


class Ring:
    """Transfers to the next rank from the one before it, on a stream of their own.

    They begin in order, each after a mark of the stream of the kernels. Kernels that are launched
    behind the mark run beside the transfer. Between GPUs of one host the copy engines move the
    tensors (`peers_of`), elsewhere the backend of the group does.

    likes: groups of tensors; `places` are as many, for tensors of their shapes and dtypes to arrive
    in.
    """

    def __init__(
        self,
        ranks: Ranks,
        likes: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
        timed: list[TransferTimes] | None = None,
    ) -> None:
        self._ranks, self._device, self._timed = ranks, device, timed
        self._stream = _stream(device) if device.type == "cuda" else None
        self._peers: Peers | None = None
        if self._stream is not None and ranks.size > 1:
            self._peers = peers_of(ranks.group, device, bytes_of(likes))
        if self._peers is not None and self._stream is not None:
            self.places = self._peers.places(likes)
            if self._peers.last_use is not None:  # perhaps on another stream
                self._stream.wait_event(self._peers.last_use)
        else:
            self.places = [
                Place(tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in group))
                for group in likes
            ]

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind all that the current stream holds now; None on the CPU, which
        computes at once."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def end(self) -> None:
        """Note that nothing which is launched later reads the places of this ring."""
        if self._peers is not None:
            self._peers.last_use = self.mark()

    def pass_on(
        self,
        sent: Sequence[torch.Tensor],
        place: Place,
        after: torch.cuda.Event | None,
        what: str,
        step: int,
    ) -> Transfer:
        """Start to send tensors, contiguous ones, and to receive as many in a place. after: a mark,
        behind the kernels that make `sent` and those that read the place. what, step: for
        messages."""
        ranks = self._ranks
        following, preceding = ((ranks.rank + n) % ranks.size for n in (1, -1))
        failures = ranks.failures(
            f"exchange {what} with ranks {preceding} and {following} in step {step} of {ranks.size}"
        )
        if not any(x.numel() for x in sent):
            return Transfer(failures, self._device, sent, (), None)

        def move() -> Sequence[dist.Work]:
            if self._peers is not None:
                self._peers.copy(sent, place)
                return ()
            moves = [
                dist.P2POp(move, x, dist.get_global_rank(ranks.group, peer), ranks.group)
                for move, tensors, peer in (
                    (dist.isend, sent, following),
                    (dist.irecv, place.own, preceding),
                )
                for x in tensors
                if x.numel()
            ]
            return dist.batch_isend_irecv(moves)

        with failures:
            if self._stream is None:
                return Transfer(failures, self._device, sent, move(), None)
            if after is not None:
                self._stream.wait_event(after)
            times = None if self._timed is None else TransferTimes.new()
            with torch.cuda.stream(self._stream):
                if times is not None:
                    times.begin.record()
                work = move()
                for each in work:
                    each.wait()  # the stream does; the host does not
                done = self._stream.record_event()
                if self._timed is not None and times is not None:
                    times.end.record()
                    self._timed.append(times)
            return Transfer(failures, self._device, sent, work, done, times)
