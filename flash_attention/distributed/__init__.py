"""Attention on sequences longer than one GPU, on the process groups of torch.distributed.

    from flash_attention.distributed import positions, ring_attention, shard, unshard

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    q, k, v = (shard(x) for x in (q, k, v))       # of (batch, seq, heads, d_head)
    o = ring_attention(q, k, v, causal=True)      # this rank's rows; backward() works
    o = unshard(o)                                # all rows, on all ranks

`ring_attention` takes any heads, and hides its transfers under the kernels. `ulysses_attention`
exchanges heads for positions, and takes numbers of heads that the number of ranks divides.
"""

from flash_attention.distributed._placement import Placement
from flash_attention.distributed._ring import ring_attention
from flash_attention.distributed._shards import positions, shard, unshard
from flash_attention.distributed._ulysses import ulysses_attention

__all__ = ["Placement", "positions", "ring_attention", "shard", "ulysses_attention", "unshard"]
