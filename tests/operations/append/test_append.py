"""Append to a cache with rotary embedding: its problem, its bounds, and its kernels in the
simulator, which give PyTorch's bits and touch nothing else of a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.append import OPERATION
from flash_helpers.operations.append.baselines import run, write
from flash_helpers.operations.append.inputs import draw
from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.problems import DISTRIBUTIONS
from flash_helpers.operations.append.reference import reference
from flash_helpers.registry.append import APPEND, AppendKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
CACHES = ("k_cache", "v_cache")
Tensors = dict[str, torch.Tensor]

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> AppendKernelConfig:
    return APPEND.fixed_config(APPEND.steps["ka1"], Element.BF16)


def filled(problem: Append, distribution: str = "normal", seed: int = 0) -> Tensors:
    """The inputs, caches that hold something, and an output for q."""
    found = draw(distribution, problem, seed=seed)
    if problem.heads:
        found["q_rotated"] = torch.full_like(found["q"], math.nan)
    tensor = problem.tensor("k_cache")
    generator = torch.Generator().manual_seed(seed + 1)
    dtype = found["k"].dtype
    return found | {n: torch.randn(tensor.shape, generator=generator).to(dtype) for n in CACHES}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def check(config: AppendKernelConfig, problem: Append, tensors: Tensors) -> Tensors:
    """Simulate, watched, and compare with the reference, and bit by bit with PyTorch; return all
    tensors."""
    wanted = reference(problem, tensors)
    copies = [tensors[name].clone() for name in CACHES]
    plain = write(problem, tensors, *copies)
    call = prepare(config, *problem.arranged(tensors), **problem.call_options())
    assert call.problem == problem
    found = call.simulate(keep_going=True)
    assert not found.faults and not found.lints
    for name, expected in wanted.expected.items():
        error = measure_error(call.tensors[name], expected)
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))
        got, right = call.tensors[name], plain[name]
        same = (bits(got) == bits(right)) | (got.isnan() & right.isnan())
        assert same.all(), name
    return dict(call.tensors)


# -- the problem and the reference -----------------------------------------------------------------


def test_bytes_are_those_of_the_new_rows_alone() -> None:
    plain = Append(4, 2, 1, 4096, 64)
    assert plain.bytes == 2 * (4 * 2 * 2 * 64 * 2) + 4 * 4
    turned = replace(plain, rotary_dim=32, heads=8, len_q=1)
    tables = 4 * 32 * 2
    assert turned.bytes == plain.bytes + 2 * (4 * 8 * 64 * 2) + tables
    assert turned.operations == 3 * 32 * (4 * 2 + 4 * 8)
    assert Append.from_record(turned.record()) == turned


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"len_new": 0}, "len_new 0 is not positive"),
        ({"page_size": 5}, "room 24 is not a multiple of page_size 5: use 25"),
        ({"page_size": 8, "caches": 3}, "caches 3 with page_size 8: block_table says"),
        ({"pages": 3}, "pages 3 without page_size"),
        ({"rotary_dim": 65}, "rotary_dim 65 is not an even number up to d_head 64"),
        ({"rotary_dim": 66}, "rotary_dim 66 is not an even number up to d_head 64"),
        ({"heads": 4, "len_q": 1}, "heads 4 without rotary_dim"),
        ({"heads": 4, "rotary_dim": 32}, "heads 4 with len_q 0: pass both"),
        ({"positions": -1}, "positions -1 is negative"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(Append(3, 2, 2, 24, 64), **changes)  # type: ignore[arg-type]


def test_values_that_lead_nowhere_are_named() -> None:
    problem = Append(3, 1, 2, 8, 8, page_size=4, pages=5)
    found = problem.wrong_values(
        {"cache_seqlens": [0, 7, -1], "block_table": [[4, 9], [9, 5], [-1, 0]]}
    )
    assert [text.split(":")[0] for text in found] == [
        "cache_seqlens 7 of sequence 1 leaves no room for 2 new keys, and those without are not "
        "written",
        "block_table 5 of sequence 1, block 1, names no page, and its new keys are not written",
        "cache_seqlens -1 of sequence 2 leaves no room for 2 new keys, and those without are not "
        "written",
        "block_table -1 of sequence 2, block 0, names no page, and its new keys are not written",
    ]
    (text,) = Append(1, 1, 1, 8, 8, caches=2).wrong_values(
        {"cache_seqlens": [0], "cache_batch_idx": [2]}
    )
    assert "cache_batch_idx 2 of sequence 0 names no row of the cache" in text


@pytest.mark.parametrize("dtype", [Element.FP16, Element.BF16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = OPERATION.small.in_dtype(dtype)
    assert isinstance(problem, Append)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch_append", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        output = found[name].clone()
        assert measure_error(output, expected).within(bound)
        place = tuple(expected.isfinite().nonzero()[0].tolist())
        output[place] = 1.05 * expected.nan_to_num(0.0, 0.0, 0.0).abs().max() + 1
        assert not measure_error(output, expected).within(bound)


def test_what_a_call_does_not_write_has_to_stay() -> None:
    problem = Append(2, 1, 1, 4, 8)
    inputs = draw("normal", problem)
    wanted = reference(problem, inputs)
    assert wanted.expected["k_cache"].isnan().sum() == 6 * 8
    found = run("pytorch_append", problem, inputs)["k_cache"]
    found[0, 3, 0, 5] = 0.0
    assert not measure_error(found, wanted.expected["k_cache"]).within(wanted.bounds["k_cache"])


# -- the kernels, simulated ------------------------------------------------------------------------


@each_config
def test_the_corners_of_the_declaration_are_right(config: AppendKernelConfig) -> None:
    for number, problem in enumerate(config.supports.corners()):
        check(config, problem, filled(problem, seed=number))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: AppendKernelConfig, distribution: str) -> None:
    problem = replace(OPERATION.small, dtype=config.dtype)
    assert isinstance(problem, Append)
    check(config, problem, filled(problem, distribution))


PLACES: dict[str, dict[str, Any]] = {
    "rows": {},
    "chosen rows": {"caches": 5},
    "pages of 1": {"page_size": 1, "pages": 50},
    "pages of 4": {"page_size": 4},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fp32_tables", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("places", PLACES)
def test_all_options_go_together(
    places: str, in_order: bool, fp32_tables: bool, interleaved: bool, bf16: AppendKernelConfig
) -> None:
    options: dict[str, Any] = {"rotary_dim": 16, "heads": 2, "len_q": 3, **PLACES[places]}
    options |= {"interleaved": interleaved, "fp32_tables": fp32_tables, "in_order": in_order}
    problem = Append(3, 1, 2, 12, 24, rotary_seqlens=in_order, **options)
    check(bf16, problem, filled(problem))


def test_keys_without_a_place_are_not_written(bf16: AppendKernelConfig) -> None:
    problem = Append(4, 1, 3, 8, 16, page_size=4, pages=6, rotary_dim=16)
    tensors = filled(problem)
    tensors["cache_seqlens"] = torch.tensor([-2, 6, 2**31 - 1, 3]).int()
    tensors["block_table"] = torch.tensor([[0, 9], [9, 1], [2, 3], [6, -1]]).int()
    before = tensors["k_cache"].clone()
    check(bf16, problem, tensors)
    changed = (tensors["k_cache"] != before).flatten(2).any(-1)
    assert changed.nonzero().tolist() == [[0, 0], [1, 2], [1, 3]]
    rows = Append(3, 1, 1, 4, 16, caches=2)
    tensors = filled(rows)
    tensors["cache_batch_idx"] = torch.tensor([-1, 1, 2]).int()
    before = tensors["v_cache"].clone()
    check(bf16, rows, tensors)
    assert (tensors["v_cache"] != before).flatten(1).any(-1).tolist() == [False, True]


def test_positions_that_the_tables_lack_are_the_nearest(bf16: AppendKernelConfig) -> None:
    problem = Append(3, 1, 2, 9, 16, rotary_dim=16, rotary_seqlens=True, positions=4)
    tensors = filled(problem)
    tensors["rotary_seqlens"] = torch.tensor([-5, 3, 2**31 - 1]).int()
    check(bf16, problem, tensors)


@each_config
def test_strides_are_any_and_neighbours_are_not_touched(config: AppendKernelConfig) -> None:
    problem = Append(2, 3, 2, 8, 16, config.dtype, page_size=4, rotary_dim=16, heads=2, len_q=1)
    plain = filled(problem)
    pages, size, heads, d_head = problem.tensor("k_cache").shape
    # K and V of a page side by side, heads before keys, and 8 columns between keys that belong to
    # none
    memory = torch.full((pages, 2, heads, size, d_head + 8), math.nan, dtype=plain["k"].dtype)
    laid = dict(plain)
    for name, own in zip(CACHES, memory.unbind(1), strict=True):
        laid[name] = own[..., :d_head].transpose(1, 2).copy_(plain[name])
    qkv = torch.cat([plain[n][:, :1] for n in "qkv"], 2)  # one projection, of which q is a part
    laid["q"] = qkv[:, :, :2]
    table = torch.full((2, 5), -7).int()
    laid["block_table"] = table[:, 1:3].copy_(plain["block_table"])
    angles = torch.stack([plain["cos"], plain["sin"]], 1)
    laid["cos"], laid["sin"] = angles.unbind(1)
    found = check(config, problem, laid)
    right = check(config, problem, {name: x.clone() for name, x in plain.items()})
    for name in (*CACHES, "q_rotated"):
        assert torch.equal(bits(found[name]), bits(right[name]))
    assert memory[..., d_head:].isnan().all()


def test_any_number_of_warps_computes_the_same(bf16: AppendKernelConfig) -> None:
    problem = Append(2, 2, 1, 8, 64, rotary_dim=64, heads=4, len_q=1)
    for n_warps in (1, 8):
        check(bf16.replace(n_warps=n_warps), problem, filled(problem))


# -- refusals --------------------------------------------------------------------------------------

K, LENGTHS = torch.zeros(2, 1, 2, 16).bfloat16(), torch.zeros(2).int()
CACHE, TABLE = torch.zeros(2, 8, 2, 16).bfloat16(), torch.ones(8, 8).bfloat16()
GIVEN: Tensors = {
    "k": K,
    "v": K.clone(),
    "cache_seqlens": LENGTHS,
    "k_cache": CACHE,
    "v_cache": CACHE.clone(),
}
BOTH = torch.zeros(2, 8, 2, 16).bfloat16()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": K.float()}, TypeError, r"k is torch\.float32 and ka1_bf16_w4 takes"),
        ({"v": K.half()}, TypeError, r"v is torch\.float16 and ka1_bf16_w4 takes"),
        ({"cache_seqlens": LENGTHS.long()}, TypeError, r"cache_seqlens is torch\.int64"),
        ({"k_cache": CACHE.half()}, TypeError, r"k_cache is torch\.float16"),
        ({"v": K[:1]}, ValueError, r"v has shape \(1, 1, 2, 16\) and k \(2, 1, 2, 16\)"),
        ({"v_cache": CACHE[:, :7]}, ValueError, r"v_cache has shape \(2, 7, 2, 16\) and k"),
        ({"k_cache": None}, ValueError, "k_cache is missing"),
        ({"v_cache": None}, ValueError, "v_cache is missing"),
        ({"cos": TABLE}, ValueError, "cos is given without sin: pass both"),
        ({"q": K, "q_rotated": K.clone()}, ValueError, "heads 2 without rotary_dim"),
        ({"k": torch.zeros(2, 1, 2, 12).bfloat16()}, ValueError, "v has shape"),
        ({"v_cache": CACHE[:, :, :, :]}, ValueError, "k_cache overlaps v_cache in memory"),
        ({"k": CACHE[:, :1]}, ValueError, "k_cache overlaps k in memory"),
        ({"k": torch.zeros(2, 1, 2, 32).bfloat16()[..., ::2]}, ValueError, "k has stride 2 in its"),
        ({"k": torch.zeros(2, 1, 2, 20).bfloat16()[..., :16]}, ValueError, "k has strides .* mult"),
        ({"v": torch.zeros(65).bfloat16()[1:].view(K.shape)}, ValueError, "v starts at address"),
        (
            {"block_table": LENGTHS[:, None], "cache_batch_idx": LENGTHS},
            ValueError,
            "block_table and cache_batch_idx are both given",
        ),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str, bf16: AppendKernelConfig
) -> None:
    given = {**GIVEN, **changes}
    arranged = [given.get(name) for name in Append.axes]
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *arranged)


def test_sizes_that_a_kernel_does_not_take_have_a_way_out(bf16: AppendKernelConfig) -> None:
    def refusal(**options: Any) -> str:
        return bf16.refusal(Append(1, 1, 1, 8, **options))

    assert not refusal(d_head=8)
    assert "d_head 12 is not a multiple of 8 (ka1_bf16_w4): pad the heads" in refusal(d_head=12)
    assert "rotary_dim 24 is not a multiple of 16" in refusal(d_head=32, rotary_dim=24)
    many = Append(2**20, 1, 2**12, 2**12, 8)
    assert "split the call by batch" in bf16.refusal(many)
    wide = Append(1, 2**22, 1, 8, 128)
    assert "split the call by heads" in bf16.refusal(wide)
