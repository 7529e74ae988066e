"""Decode on a GPU: every kernel beside float64 at its corners and on random caches, whose
neighbours in memory are NaN; in a graph, on one stream and on two."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from gpu_problems import each, where_it_runs
from random_caches import (
    Cache,
    Placed,
    alone,
    asked,
    computed,
    drawn,
    faults,
    faults_of,
    last_configs,
    place_all,
    wrong_outputs,
)
from tiers import committed, matrix_mark

import flash_attention
from flash_attention.flash_attn_3 import flash_attn_with_kvcache
from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import lengths_of

pytestmark = pytest.mark.gpu

CONFIGS = committed(OPERATION)
DECODING = [family for family in FAMILIES.values() if family.operation is OPERATION]
KEYS = 3000  # room of a sequence in a random cache at most; a few have five times as many
FEW, MANY = 60, 2000
RANDOM = [
    pytest.param(
        configs,
        count,
        marks=[where_it_runs(configs[0]), *marks],
        id=f"{configs[0].family.name} {count}",
    )
    for configs in map(last_configs, DECODING)
    for count, marks in ((FEW, []), (MANY, [matrix_mark(configs[0])]))
]


def usual(config: Config, batch: int, len_k: int, **options: object) -> Decode:
    """Sequences of various lengths with 8 heads on 2; in pages of 16 if the kernel takes them."""
    sizes = {"kv_heads": 2, "d_head": config.supports.d_heads[0], "dtype": config.dtype}
    page_size = 16 * config.supports.pages
    if config.supports.fp8_cache:
        sizes |= dict.fromkeys(("fp8_cache", "k_scale", "v_scale"), True)
    return Decode(batch, 8, len_k=len_k, page_size=page_size, return_lse=True, **sizes, **options)


def check(config: Config, problem: Decode, device: torch.device, kind: str = "normal") -> None:
    assert faults_of(Cache(problem, kind, {}, seed=0), config, device) == []


@each(CONFIGS)
def test_every_kernel_is_right_at_the_corners_that_it_declares(config, cuda_device) -> None:
    for corner in config.supports.corners():
        check(config, corner, cuda_device)


@each(CONFIGS, once=True)
def test_every_kernel_is_right_where_each_sm_has_many_blocks(config, cuda_device) -> None:
    check(config, usual(config, 300, 2048, total_k=300 * 500), cuda_device)


@each(CONFIGS, once=True)
def test_every_kernel_is_right_for_one_long_sequence(config, cuda_device) -> None:
    check(config, usual(config, 1, 131072), cuda_device)


@each(CONFIGS, once=True)
def test_repeated_calls_have_the_same_bits(config, cuda_device) -> None:
    cut = asked(config, 16) if config.supports.keys_per_piece else {}
    for problem in (usual(config, 1, 16384), usual(config, 40, 4096, total_k=40 * 900)):
        given = draw("normal", problem, cuda_device)
        first, *others = (
            bits(config, replace(problem, **cut), given, cuda_device) for _ in range(20)
        )
        for other in others:
            assert all(map(torch.equal, first, other))


@each(CONFIGS)
@pytest.mark.parametrize("distribution", OPERATION.distributions)
def test_every_kernel_is_right_on_keys_of_all_distributions(
    config, distribution, cuda_device
) -> None:
    check(config, usual(config, 3, 1008, total_k=1500), cuda_device, distribution)


@pytest.mark.parametrize(("configs", "count"), RANDOM)
def test_random_caches_are_right(configs, count, cuda_device) -> None:
    first = secrets.randbelow(2**31)
    if found := faults(range(first, first + count), configs, KEYS, cuda_device):
        pytest.fail("\n".join(found), pytrace=False)


def bits(
    config: Config, problem: Decode, given: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse as whole numbers."""
    places = place_all(Cache(problem, "normal", {}, 0), given, device)
    tensors = {name: place.tensor for name, place in places.items()}
    computed(config, problem, tensors)
    return tensors["o"].view(torch.int16), tensors["lse"].view(torch.int32)


CUT = [c for c in CONFIGS if c.supports.keys_per_piece or c.supports.max_pieces > 1]


@each(CUT, once=True)
def test_a_sequence_has_the_same_bits_in_every_batch(config, cuda_device) -> None:
    window = {"window_left": 1000}
    for blocks, pieces, options in ((1, 7, {}), (4, 1, {}), (16, 3, {}), (4, 5, window)):
        cut = asked(config, blocks, pieces)
        problem = replace(usual(config, 40, 4096, total_k=40 * 900), **cut, **options)
        given = draw("normal", problem, cuda_device)
        together = bits(config, problem, given, cuda_device)
        lengths = lengths_of(problem, given)
        for n in (0, 1, 2, 39):
            for room, page_size in ((max(lengths[n], 1), 0), (8192, 16), (65536, 0)):
                own = bits(config, *alone(problem, given, n, room, page_size), cuda_device)
                for x, y in zip(together, own, strict=True):
                    assert torch.equal(x[n], y[0]), f"sequence {n} of {problem}, room {room}"
        again = bits(config, problem, given, cuda_device)
        assert all(map(torch.equal, together, again))


def wrong(
    cache: Cache, given: Mapping[str, torch.Tensor], places: Mapping[str, Placed]
) -> list[str]:
    return wrong_outputs(cache.problem, given, {name: x.tensor for name, x in places.items()})


@each(CONFIGS, once=True)
def test_a_graph_follows_the_lengths_and_the_pages_of_each_replay(config, cuda_device) -> None:
    problem = usual(config, 4, 1008, total_k=1500)
    totals = (1500, 0, 4 * 1008, 700)
    tensors = {
        name: place.tensor
        for name, place in place_all(Cache(problem, "normal", {}, 0), {}, cuda_device).items()
    }
    for name in ("cache_seqlens", "block_table"):
        if name in tensors:
            tensors[name].zero_()
    computed(config, problem, tensors)  # whatever has to be compiled and loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        computed(config, problem, tensors)
    for seed, total in enumerate((*totals, *totals)):
        own = replace(problem, total_k=total)
        given = draw("normal", own, cuda_device, seed)
        for name, values in given.items():
            tensors[name].copy_(values)
        for x in own.outputs:
            tensors[x.name].fill_(torch.nan)
        graph.replay()
        assert wrong_outputs(own, given, tensors) == []


@pytest.mark.parametrize("n_streams", [1, 2])
@each(CONFIGS, once=True)
def test_calls_that_follow_one_another_do_not_disturb_one_another(
    config, n_streams, cuda_device
) -> None:
    caches = [drawn(seed, config, KEYS) for seed in range(12)]
    inputs = [draw("normal", cache.problem, cuda_device, cache.seed) for cache in caches]
    places = [
        place_all(cache, given, cuda_device) for cache, given in zip(caches, inputs, strict=True)
    ]
    streams = [torch.cuda.Stream(cuda_device) for _ in range(n_streams)]
    torch.cuda.synchronize()
    for n, (cache, own) in enumerate(3 * [*zip(caches, places, strict=True)]):
        tensors = {name: x.tensor for name, x in own.items()}
        with torch.cuda.stream(streams[n % n_streams]):
            computed(config, cache.problem, tensors)
    torch.cuda.synchronize()
    for cache, given, own in zip(caches, inputs, places, strict=True):
        assert wrong(cache, given, own) == [], str(cache)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_fp8_is_computed_exactly(dtype, cuda_device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=cuda_device).view(2, 1, 1, 128)
    q = torch.zeros(2, 1, 1, 128, dtype=dtype, device=cuda_device)
    k = torch.zeros(2, 3, 1, 128, dtype=torch.uint8, device=cuda_device).view(FP8)
    v = codes.expand(2, 3, 1, 128).contiguous().view(FP8)
    found = flash_attention.decode(q, k, v).float().cpu()
    right = codes.cpu().view(FP8).float()
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_size", [0, 16])
def test_keys_are_appended_to_a_cache_in_fp8(page_size, cuda_device) -> None:
    batch, room, heads, kv_heads, d_head = 3, 512, 8, 2, 128
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 1, heads, d_head, generator=generator).bfloat16()
    caches = [
        (30 * torch.randn(batch, room, kv_heads, d_head, generator=generator)).to(FP8)
        for _ in range(2)
    ]
    new = [torch.randn(batch, 1, kv_heads, d_head, generator=generator).bfloat16() for _ in "kv"]
    scales = [(1 + torch.arange(6.0)).view(batch, kv_heads) / own for own in (120, 90)]
    lengths = torch.tensor([511, 300, 0], dtype=torch.int32)
    right = torch.empty(q.shape, dtype=torch.float64)
    for n, length in enumerate(lengths.tolist()):
        for cache, x, scale in zip(caches, new, scales, strict=True):
            own = x[n, 0].float() / scale[n, :, None]
            cache.view(torch.uint8)[n, length] = own.clamp(-448, 448).to(FP8).view(torch.uint8)
        keys, values = (
            (cache[n, : length + 1].double() * scale[n, :, None]).repeat_interleave(4, 1)
            for cache, scale in zip(caches, scales, strict=True)
        )
        logits = torch.einsum("hd,khd->hk", q[n, 0].double(), keys) / d_head**0.5
        right[n, 0] = torch.einsum("hk,khd->hd", logits.softmax(-1), values)
    wanted = [cache.clone() for cache in caches]
    for n, length in enumerate(lengths.tolist()):
        for cache in caches:
            cache.view(torch.uint8)[n, length:] = 0x7F  # NaN, until the call writes the first
    table = None
    if page_size:
        blocks = room // page_size
        table = torch.arange(batch * blocks, dtype=torch.int32, device=cuda_device)
        table = table.view(batch, blocks)
        caches = [x.view(batch * blocks, page_size, kv_heads, d_head) for x in caches]
    on_gpu = [x.to(cuda_device) for x in caches]
    found = flash_attn_with_kvcache(
        q.to(cuda_device),
        *on_gpu,
        *(x.to(cuda_device) for x in new),
        cache_seqlens=lengths.to(cuda_device),
        page_table=table,
        k_descale=scales[0].to(cuda_device),
        v_descale=scales[1].to(cuda_device),
    )
    torch.testing.assert_close(found.double().cpu(), right, rtol=2e-2, atol=5e-3)
    for own, cache in zip(on_gpu, wanted, strict=True):
        rows = own.view(torch.uint8).cpu().view(batch, room, kv_heads, d_head)
        for n, length in enumerate(lengths.tolist()):
            assert torch.equal(rows[n, : length + 1], cache.view(torch.uint8)[n, : length + 1])
