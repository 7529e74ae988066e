"""What each rank of a group does in the tests of flash_attention.distributed."""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flash_attention.distributed import (
    positions,
    ring_attention,
    shard,
    ulysses_attention,
    unshard,
)

Arrays = dict[str, torch.Tensor]
FUNCTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}


def inputs(
    seq: int, heads: int, kv_heads: int, d_head: int, dtype: torch.dtype, *, packed: bool = False
) -> Arrays:
    """Return q, k, v and do of a whole sequence, with a mean that is not 0."""
    generator = torch.Generator().manual_seed(seq + heads)
    batch = () if packed else (2,)

    def drawn(count: int, mean: float) -> torch.Tensor:
        size = (*batch, seq, count, d_head)
        return (torch.randn(size, generator=generator) + mean).to(dtype)

    return {
        "q": drawn(heads, 0.2),
        "k": drawn(kv_heads, 0.1),
        "v": drawn(kv_heads, 1.0),
        "do": drawn(heads, 0.3),
    }


def attend(
    group: dist.ProcessGroup,
    function: str,
    given: Arrays,
    *,
    gradients: bool,
    times: int = 1,
    **options: Any,
) -> list[Arrays]:
    """Return, of each of several equal calls, whole outputs: o, LSE of a ring, and gradients."""
    cut = {"placement": options.get("placement", "zigzag")}
    if function == "ulysses":
        cut = {"placement": "contiguous"}
    if (begins := options.get("cu_seqlens")) is not None:
        cut["cu_seqlens"] = begins if function == "ring" else None
        cut["dim"] = 0
    found = []
    for _ in range(times):
        q, k, v, do = (shard(x, group, **cut) for x in given.values())
        for x in (q, k, v):
            x.requires_grad_(gradients)
        results: Arrays = {}
        if function == "ring":
            o, lse = ring_attention(q, k, v, group, return_lse=True, **options)
            along = {**cut, "dim": lse.ndim - 1}
            results["lse"] = unshard(lse.detach(), group, **along)
        else:
            o = ulysses_attention(q, k, v, group, **options)
        results["o"] = o
        if gradients:
            o.backward(do)
            results |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        found.append(
            {
                name: x if name == "lse" else unshard(x.detach(), group, **cut)
                for name, x in results.items()
            }
        )
    return found


def call(group: dist.ProcessGroup, function: str, of_rank: Sequence[tuple[Arrays, Any]]) -> str:
    """Call a function with the tensors and options of each rank; return "ok" unless it raises."""
    tensors, options = of_rank[dist.get_rank(group)]
    FUNCTIONS[function](*tensors.values(), group, **options)
    return "ok"


def call_unless(
    group: dist.ProcessGroup, absent: int, given: Arrays, *, leaves: bool, check_shards: bool
) -> tuple[str, float]:
    """Call a ring in all ranks but one, which leaves the group or does nothing; return the error,
    and the seconds until it was raised."""
    if dist.get_rank(group) == absent:
        if leaves:
            os._exit(1)
        return "absent", 0.0
    begin = time.monotonic()
    try:
        ring_attention(*given.values(), group, check_shards=check_shards)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "ok", time.monotonic() - begin


def differentiate(group: dist.ProcessGroup, given: Arrays, of: str) -> str:
    """Differentiate what has no gradient."""
    q, k, v = (x.clone().requires_grad_() for x in given.values())
    o, lse = ring_attention(q, k, v, group, return_lse=True)
    if of == "lse":
        lse.sum().backward()
    else:
        (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
        dq.sum().backward()
    return "ok"


def whole_of_shards(
    group: dist.ProcessGroup, begins: Sequence[int] | None, placement: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens that were cut and joined, their positions likewise, and those of this rank."""
    length = 24 if begins is None else begins[-1]
    cut = {"placement": placement, "cu_seqlens": begins, "dim": 0}
    tokens = shard(torch.arange(length), group, **cut)
    held = positions(length, group, placement=placement, cu_seqlens=begins)
    return unshard(tokens, group, **cut), unshard(held, group, **cut), tokens


def on_mesh(_group: dist.ProcessGroup, given: Arrays) -> torch.Tensor:
    """Call a ring on a mesh, with the shape of all processes; return this rank's o."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    try:
        ring_attention(*given.values(), mesh)
    except ValueError as error:
        assert "mesh has 2 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions was taken")
    cut = [shard(x, mesh["context"]) for x in given.values()]
    return unshard(ring_attention(*cut, mesh["context"], causal=True), mesh["context"])
