"""The problems of decode that are checked and measured, and distributions of inputs.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from flash_helpers.operations.attention_forward import problems as forward
from flash_helpers.operations.decode.problem import Decode

DISTRIBUTIONS: Mapping[str, str] = forward.DISTRIBUTIONS
COPY = "cache_copy"  # name of the library that copies as many bytes as kernels read
MEASURED_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
N_HEADS, N_KV_HEADS = 32, 8
MAX_TOKENS = 131072  # of a measured cache: 512 MiB of K and V, ten times an H100's L2
MAX_BATCH = 256


def measured(
    len_k: int,
    heads: int = N_HEADS,
    kv_heads: int | None = None,
    batch: int | None = None,
    page_size: int = 0,
    fp8_cache: bool = False,
) -> Decode:
    """Return the problem of one cache length that is measured: by default 32 heads on 8, and as
    many sequences as have MAX_TOKENS together, at most MAX_BATCH. A cache in fp8 has no scales,
    since not all libraries take these.

    Raises ValueError as `Decode` does.
    """
    if batch is None:
        batch = max(1, min(MAX_BATCH, MAX_TOKENS // len_k))
    if kv_heads is None:
        kv_heads = N_KV_HEADS if heads == N_HEADS else heads
    return Decode(
        *(batch, heads),
        len_k=len_k,
        kv_heads=kv_heads,
        page_size=page_size,
        fp8_cache=fp8_cache,
    )
