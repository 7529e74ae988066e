"""FlashInfer's wrappers on a GPU: attention of each sequence on its pages, a shared prompt, and
plans that change between replays of a CUDA graph."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flash_attention.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from flash_helpers.check.errors import measure_error
from flash_helpers.operations.attention_forward.reference import attention_reference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, D_HEAD, PAGE_SIZE, PAGES = 8, 2, 128, 16, 64
SIZES = (HEADS, KV_HEADS, D_HEAD, PAGE_SIZE)
BF16 = {"q_data_type": torch.bfloat16}


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """Pages of random keys, of which sequences take some in random order; the others have NaN."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        order = torch.randperm(PAGES, generator=generator)[: sum(counts)]
        self.pages = [own.tolist() for own in order.split(counts)]
        self.lengths = lengths
        shape = (2, PAGES, PAGE_SIZE, KV_HEADS, D_HEAD)
        both = torch.full(shape, math.nan, dtype=torch.bfloat16)
        both[:, order] = torch.randn(2, len(order), *shape[2:], generator=generator).bfloat16()
        self.k, self.v = both.to(DEVICE)

    def plan(self, first: int = 0, end: int | None = None) -> tuple[torch.Tensor, ...]:
        """indptr, indices and last_page_len of some of the sequences."""
        pages, lengths = self.pages[first:end], self.lengths[first:end]
        begins = [0, *itertools.accumulate(map(len, pages))]
        full = (PAGE_SIZE * max(len(own) - 1, 0) for own in pages)
        last = [length - before for length, before in zip(lengths, full, strict=True)]
        return int32(begins), int32([*itertools.chain(*pages)]), int32(last)

    def keys(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, (keys, kv_heads, d_head)."""
        k, v = (x[self.pages[n]].flatten(0, 1)[: self.lengths[n]] for x in (self.k, self.v))
        return k, v


def is_right(o: torch.Tensor, q: torch.Tensor, *kv: torch.Tensor, causal: bool = False) -> bool:
    """Whether o, (queries, heads, d_head), is attention of q on keys and values."""
    right = attention_reference(q[None], *(x[None] for x in kv), causal=causal)
    return measure_error(o[None], right.expected["o"]).within(right.bounds["o"])


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, D_HEAD, device=DEVICE).bfloat16()


def test_decode_is_attention_on_the_pages_of_each_sequence() -> None:
    cache = Cache([100, 1, 300, 16, 0, 77])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=DEVICE))
    wrapper.plan(*cache.plan(), *SIZES, **BF16)
    q = queries(6)
    o, lse = wrapper.run(q, (cache.k, cache.v), return_lse=True)
    for n in (0, 1, 2, 3, 5):
        assert is_right(o[n : n + 1], q[n : n + 1], *cache.keys(n)), n
    assert not o[4].any() and (lse[4] == -math.inf).all()


def test_prefill_is_causal_attention_on_the_pages_of_each_sequence() -> None:
    cache = Cache([100, 33, 300])
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=DEVICE))
    begins = [0, 50, 83, 84]
    wrapper.plan(int32(begins), *cache.plan(), *SIZES, causal=True, **BF16)
    q = queries(84)
    o = wrapper.run(q, (cache.k, cache.v))
    for n in range(3):
        own = slice(begins[n], begins[n + 1])
        assert is_right(o[own], q[own], *cache.keys(n), causal=True), n


def levels(cache: Cache) -> list[list[torch.Tensor]]:
    """The lists of a plan: the first sequence is a prompt that all others share."""
    own = int32([0, 4]), *cache.plan(0, 1)
    return [[*both] for both in zip(own, (int32([*range(5)]), *cache.plan(1)), strict=True)]


def are_right(o: torch.Tensor, q: torch.Tensor, cache: Cache) -> list[bool]:
    """Whether each query's o is attention on the prompt and on its own sequence."""
    of_all = [
        [torch.cat(both) for both in zip(cache.keys(0), cache.keys(n + 1), strict=True)]
        for n in range(len(q))
    ]
    return [is_right(o[n : n + 1], q[n : n + 1], *kv) for n, kv in enumerate(of_all)]


def test_levels_are_attention_on_the_prompt_and_on_own_keys() -> None:
    cache = Cache([160, 40, 1, 200, 17])
    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(0, device=DEVICE))
    wrapper.plan(*levels(cache), *SIZES, **BF16)
    q = queries(4)
    assert all(are_right(wrapper.run(q, (cache.k, cache.v)), q, cache))


def test_a_captured_run_has_the_newest_plan() -> None:
    first, second = Cache([160, 40, 1, 200, 17]), Cache([90, 80, 300, 3, 64], seed=1)
    buffers = (
        [int32([0, 4]), int32([*range(5)])],
        [torch.zeros(n, dtype=torch.int32) for n in (2, 5)],
        [torch.zeros(n, dtype=torch.int32) for n in (16, 40)],
        [torch.zeros(n, dtype=torch.int32) for n in (1, 4)],
    )
    on_device = [[x.to(DEVICE) for x in own] for own in buffers]
    workspace = torch.empty(0, device=DEVICE)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace, "NHD", True, *on_device)
    q, k, v = queries(4), first.k.clone(), first.v.clone()

    wrapper.plan(*levels(first), *SIZES, **BF16)
    wrapper.run(q, (k, v))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = wrapper.run(q, (k, v))
    for cache in (first, second):
        k.copy_(cache.k)
        v.copy_(cache.v)
        wrapper.plan(*levels(cache), *SIZES, **BF16)
        graph.replay()
        assert all(are_right(o, q, cache))
