"""The measurement of long_sequences.py in one of the processes that share a sequence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attention import attention
from flash_attention.distributed import ring_attention, shard, unshard
from flash_attention.distributed._group import TransferTimes, timed_transfers
from flash_attention.distributed._peers import peers_bytes
from flash_helpers.measure.ring_speeds import BOTH, ONE, PYTORCH, RING, RingSpeed

TIMEOUT = timedelta(minutes=5)
MOST_COMPARED = 16384
"""Tokens of a whole sequence of which the results are compared with those of one GPU."""
_CP_DIM = 2  # of (batch, heads, seq, d_head), the layout of PyTorch's attention


@dataclass
class Contender:
    """A way to compute a problem.

    call: runs it once, and returns this rank's o. calls: of a sample.
    """

    record: RingSpeed
    call: Callable[[], torch.Tensor]
    samples_ms: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    calls: int = 1


class Measurer:
    """The measurements of a rank.

    device: "cuda" or "cpu". rounds: of each problem. sample_ms: least milliseconds of the calls in
    a round; the simulator makes one call. beside_pytorch: whether PyTorch's context parallel takes
    part.
    """

    def __init__(
        self, device: str, rounds: int, sample_ms: float, beside_pytorch: bool, store: str
    ) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.rounds, self.sample_ms, self.beside_pytorch = rounds, sample_ms, beside_pytorch
        self.is_cuda = device == "cuda"
        self.device = torch.device("cpu")
        backend = "gloo"
        if self.is_cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
            # NCCL's kernels take SMs before those of attention, which would leave none
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        dist.init_process_group(
            backend, init_method=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT
        )
        self.mesh = init_device_mesh(device, (self.size,), mesh_dim_names=("context",))

    def records(self, problems: Sequence[RingSpeed]) -> tuple[RingSpeed, ...]:
        """Measure each problem; return the records in rank 0, and none in others."""
        found = [record for problem in problems for record in self._of_problem(problem)]
        dist.destroy_process_group()
        return () if self.rank else tuple(found)

    def _of_problem(self, problem: RingSpeed) -> list[RingSpeed]:
        whole = problem.tokens * problem.ranks
        generator = torch.Generator(self.device).manual_seed(0)  # the same on all ranks
        counts = problem.heads, problem.kv_heads, problem.kv_heads, problem.heads
        q, k, v, do = (
            torch.randn(
                *(1, whole, count, problem.d_head),
                generator=generator,
                device=self.device,
                dtype=torch.bfloat16,
            )
            for count in counts
        )
        own = [shard(x, self.mesh) for x in (q, k, v, do)]
        ring = Contender(replace(problem, name=RING), partial(self._ring, problem, own))
        one = Contender(replace(problem, name=ONE, ranks=1), partial(self._one, problem, own))
        contenders = [one, ring]
        record = self._checked(ring.record, (q, k, v, do), own)
        ring.record = record
        not_run = ""
        if not self.is_cuda:
            not_run = "PyTorch's context parallel has kernels for CUDA tensors alone"
        elif problem.kv_heads != problem.heads:
            not_run = "PyTorch's context parallel takes equal numbers of heads"
        asked = PYTORCH if self.beside_pytorch else {}
        left_out = dict.fromkeys(asked, not_run)
        for name in () if not_run else asked:
            given = partial(self._pytorch, problem, (q, k, v, do), PYTORCH[name])
            contender = Contender(replace(problem, name=name), given)
            left_out[name] = self._why_it_fails(contender)
            contenders += [] if left_out[name] else [contender]
        self._time(contenders)
        found = [self._record(each) for each in contenders]
        found[1] = self._with_transfers(ring, found[1])
        return found + [
            replace(problem, name=name, not_run=why) for name, why in left_out.items() if why
        ]

    # -- contenders --------------------------------------------------------------------------------

    def _ring(self, problem: RingSpeed, own: Sequence[torch.Tensor]) -> torch.Tensor:
        options = {"causal": problem.causal, "check_shards": False}
        function = partial(ring_attention, group=self.mesh, **options)
        return _results(function, own, problem.passes)[0]

    def _one(self, problem: RingSpeed, own: Sequence[torch.Tensor]) -> torch.Tensor:
        return _results(partial(attention, causal=problem.causal), own, problem.passes)[0]

    def _pytorch(
        self, problem: RingSpeed, whole: Sequence[torch.Tensor], backend: str
    ) -> torch.Tensor:
        """Shards the copies of the whole itself, in place; this is timed with the rest, and small
        beside attention on long sequences."""
        from torch.distributed.tensor.experimental import _context_parallel, context_parallel

        # zigzag, which PyTorch refuses without a mask
        _context_parallel._cp_options.enable_load_balance = problem.causal
        *qkv, do = (x.transpose(1, 2).contiguous() for x in whole)
        context = context_parallel(
            self.mesh,
            buffers=[*qkv, do],
            buffer_seq_dims=[_CP_DIM] * 4,
            no_restore_buffers={*qkv, do},
        )
        with sdpa_kernel(getattr(SDPBackend, backend)), context:
            # the context puts another function in this place
            sdpa = torch.nn.functional.scaled_dot_product_attention
            is_both = problem.passes == BOTH
            leaves = [x.detach().requires_grad_(is_both) for x in qkv]
            o = sdpa(*leaves, is_causal=problem.causal)
            if is_both:
                torch.autograd.grad(o, leaves, do)
        return o.detach()

    # -- measurements ------------------------------------------------------------------------------

    def _checked(
        self, record: RingSpeed, whole: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
    ) -> RingSpeed:
        """Return the record of a ring with what two calls tell: whether their bits are the same,
        and the largest distance of o and of the gradients from one GPU. All ranks check their
        arguments here, once. The gradient of q may differ from call to call unless asked."""
        options = {"causal": record.causal, "deterministic": True}
        function = partial(ring_attention, group=self.mesh, **options)
        first, second = (_results(function, own, record.passes) for _ in range(2))
        same = torch.tensor([all(map(torch.equal, first, second))], dtype=torch.int32)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        error = None
        if whole[0].shape[1] <= MOST_COMPARED:
            alone = _results(partial(attention, **options), whole, record.passes)
            found = (unshard(x, self.mesh) for x in first)
            error = max(map(_distance, found, alone))
        return replace(record, repeats=bool(same.item()), relative_error=error)

    def _why_it_fails(self, contender: Contender) -> str:
        """Run a contender once; return the text of its error in any rank, or ""."""
        text = ""
        try:
            contender.call()
            self._wait()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text)
        return next(filter(None, texts), "")

    def _time(self, contenders: Sequence[Contender]) -> None:
        """Time all contenders in turns."""
        for each in contenders:
            if self.is_cuda:
                self._sample(each)  # warm
                each.calls = max(1, round(self.sample_ms / self._sample(each)))
                each.memory_bytes = self._memory(each)
        for _ in range(self.rounds):
            for each in contenders:
                each.samples_ms.append(self._sample(each))

    def _sample(self, contender: Contender) -> float:
        """Return the milliseconds of a call on the slowest rank, in the mean over the calls."""
        self._wait()
        dist.barrier()
        begin = time.perf_counter()
        if self.is_cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        for _ in range(contender.calls):
            contender.call()
        if self.is_cuda:
            events[1].record()
            self._wait()
            own = events[0].elapsed_time(events[1])
        else:
            own = 1e3 * (time.perf_counter() - begin)
        return self._most(own / contender.calls)

    def _memory(self, contender: Contender) -> int:
        """Return the most bytes that a rank holds in a call, with its shards of the inputs."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        contender.call()
        self._wait()
        own = torch.cuda.max_memory_allocated(self.device) - before
        if contender.record.name == RING:  # memory that the allocator does not know
            own += peers_bytes(self.mesh.get_group())
        return int(self._most(own + contender.record.shard_bytes))

    def _most(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _record(self, contender: Contender) -> RingSpeed:
        samples = tuple(contender.samples_ms)
        return replace(contender.record, samples_ms=samples, memory_bytes=contender.memory_bytes)

    def _with_transfers(self, ring: Contender, record: RingSpeed) -> RingSpeed:
        """Return the record with the transfers of one more call; on the CPU nothing records
        them."""
        if not self.is_cuda:
            return record
        found: list[tuple[float, float]] = []
        for _ in range(self.rounds):
            self._wait()
            dist.barrier()
            with timed_transfers() as timed:
                ring.call()
            self._wait()
            found.append(_milliseconds(timed))
        transfers, stalls = zip(*found, strict=True)
        return replace(record, transfers_ms=tuple(transfers), stalls_ms=tuple(stalls))


def _results(
    function: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], passes: str
) -> tuple[torch.Tensor, ...]:
    """Return o, and the gradients of q, k and v where they are asked for."""
    *qkv, do = given
    is_both = passes == BOTH
    leaves = [x.detach().requires_grad_(is_both) for x in qkv]
    o = function(*leaves)
    gradients = torch.autograd.grad(o, leaves, do) if is_both else ()
    return (o.detach(), *gradients)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted."""
    return (torch.dist(found.float(), wanted.float()) / wanted.float().norm()).item()


def _milliseconds(timed: Sequence[TransferTimes]) -> tuple[float, float]:
    """Return the time of all transfers, and of the waits for them."""
    transfers = sum(each.begin.elapsed_time(each.end) for each in timed)
    return transfers, sum(each.before.elapsed_time(each.after) for each in timed)
