"""A cache in fp8: its numbers in a kernel, its scales, and what problems and records make of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.compile.jit import default_jit, units_of
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import caches_of, reference
from flash_helpers.registry.decode import DECODE_FAMILY
from flash_helpers.registry.decode_sync import DECODE_SYNC
from flash_helpers.registry.problem import Element
from flash_helpers.runtime.simulator import load_kernel, run_kernel
from flash_helpers.tune.best import config_for

FP8 = torch.float8_e4m3fn
STEP = DECODE_SYNC.steps["c6"]
CONFIGS = [DECODE_SYNC.fixed_config(STEP, dtype) for dtype in DECODE_SYNC.dtypes]
BF16 = DECODE_SYNC.fixed_config(STEP, Element.BF16)
# sm_80 converts with integers, sm_89 and later with an instruction
TARGETS = {"compute_80": Device("of 8.0", (8, 0), 108), "compute_89": Device("of 8.9", (8, 9), 128)}
each_config = pytest.mark.parametrize("config", CONFIGS, ids=Config.short_form)
each_target = pytest.mark.parametrize("target", TARGETS)


def run(
    config: Config, problem: Decode, given: Mapping[str, torch.Tensor], target: str
) -> dict[str, torch.Tensor]:
    """The tensors of a call, after the PTX for a target has run without a fault."""
    functions = [*config.kernels]
    compiled = default_jit().get(units_of(config), target)
    kernels = {
        config.kernels[function]: load_kernel(config, each.ptx_path, function)
        for function, each in zip(functions, compiled, strict=True)
    }
    tensors = tensors_for(config, problem, given)
    options = problem.call_options()
    assert run_kernel(config, kernels, tensors, device=TARGETS[target], **options).faults == ()
    return tensors


def every_number(first: int) -> torch.Tensor:
    """128 of the 256 numbers of e4m3, two of which are NaN."""
    return torch.arange(first, first + 128, dtype=torch.uint8).view(FP8)


@pytest.mark.parametrize("first", [0, 128])
@each_target
@each_config
def test_every_number_of_a_value_is_computed_exactly(config, target, first) -> None:
    problem = Decode(1, 1, len_k=2, dtype=config.dtype, fp8_cache=True)
    shape = problem.kv_shape
    given = {
        "q": torch.zeros(problem.shape),
        "k": torch.zeros(shape).to(FP8),
        "v": every_number(first).view(torch.uint8).expand(shape).contiguous().view(FP8),
    }
    found = run(config, problem, given, target)["o"].flatten().float()
    torch.testing.assert_close(found, every_number(first).float(), rtol=0, atol=0, equal_nan=True)


@each_target
@each_config
def test_every_number_of_a_key_is_a_logit(config, target) -> None:
    # sequence n has one key, whose columns 3, 10, 17 … have the numbers 16n, 16n + 1 …; query h
    # takes the h-th of these
    problem = Decode(
        16, 16, len_k=1, dtype=config.dtype, softmax_scale=1.0, return_lse=True, fp8_cache=True
    )
    columns = 3 + 7 * torch.arange(16)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float().view(16, 16)
    numbers = numbers.nan_to_num(0.0)  # the next test has NaN
    k = torch.zeros(problem.kv_shape)
    k[:, 0, 0, columns] = numbers
    q = torch.nn.functional.one_hot(columns, 128).expand(problem.shape)
    given = {"q": q, "k": k.to(FP8), "v": torch.zeros(problem.kv_shape).to(FP8)}
    found = run(config, problem, given, target)["lse"].view(16, 16)
    torch.testing.assert_close(found, numbers, rtol=1e-6, atol=1e-6)


@each_config
def test_a_key_that_is_nan_makes_the_output_nan(config) -> None:
    problem = Decode(1, 1, len_k=3, dtype=config.dtype, fp8_cache=True)
    given = draw("normal", problem)
    for bits in (0x7F, 0xFF):
        given["k"].view(torch.uint8)[0, 1, 0, 5] = bits
        assert run(config, problem, given, "compute_80")["o"].isnan().all()


@pytest.mark.parametrize(
    ("config", "target"), [*zip(CONFIGS, TARGETS, strict=True)], ids=["sm_80", "sm_89"]
)
def test_scales_are_those_of_each_sequence_and_head(config, target) -> None:
    sizes = {"len_k": 40, "kv_heads": 2, "dtype": config.dtype, "softcap": 2.0, "return_lse": True}
    problem = Decode(2, 4, **sizes, fp8_cache=True, k_scale=True, v_scale=True)
    given = draw("normal", problem)
    for name in ("k_scale", "v_scale"):  # none is near another
        scales = sorted(given[name].flatten().tolist())
        assert all(y > 1.1 * x for x, y in pairwise(scales))
    right = reference(problem, given)
    found = run(config, problem, given, target)
    for name in ("o", "lse"):
        error = measure_error(found[name], right.expected[name])
        assert error.within(right.bounds[name]), f"{name}: {error}"


def test_inputs_fill_the_range_of_fp8_with_scales_and_are_as_they_are_without() -> None:
    plain = Decode(2, 4, len_k=9, kv_heads=2, total_k=14)
    given = draw("normal", plain)
    scaled = draw("normal", replace(plain, fp8_cache=True, k_scale=True, v_scale=True))
    unscaled = draw("normal", replace(plain, fp8_cache=True))
    for name in "kv":
        assert scaled[name].dtype is unscaled[name].dtype is FP8
        keys = scaled[name].float()
        largest = torch.finfo(FP8).max / torch.tensor([[1, 2], [3, 4]])
        torch.testing.assert_close(
            keys.nan_to_num(0.0).abs().amax((1, 3)), largest, rtol=0.07, atol=0
        )
        own = keys * scaled[f"{name}_scale"][:, None, :, None]
        close = {"rtol": 0.07, "atol": 0.02, "equal_nan": True}
        torch.testing.assert_close(own, given[name].float(), **close)
        torch.testing.assert_close(unscaled[name].float(), given[name].float(), **close)


@pytest.mark.parametrize("place", [{"page_size": 3, "pages": 9}, {"caches": 3}, {}], ids=str)
def test_inputs_lie_in_pages_and_rows_as_others_do(place) -> None:
    problem = Decode(2, 2, len_k=12, d_head=64, total_k=17, fp8_cache=True, **place)
    given = draw("normal", problem, seed=4)
    assert {x.name: x.shape for x in problem.inputs} == {
        n: tuple(x.shape) for n, x in given.items()
    }
    lengths = given["cache_seqlens"].tolist()
    for length, (k, v) in zip(lengths, caches_of(problem, given), strict=True):
        assert k.shape == v.shape == (1, length, 1, 64)
        assert not k.isnan().any() and not v.isnan().any()


def test_records_of_other_caches_are_what_they_were() -> None:
    plain = Decode(2, 4, len_k=9)
    assert {"fp8_cache", "k_scale", "v_scale"}.isdisjoint(plain.record())
    assert {"fp8_cache"}.isdisjoint(plain.call_options())
    fp8 = replace(plain, fp8_cache=True, v_scale=True)
    assert Decode.from_record(fp8.record()) == fp8 != plain
    assert Decode.from_record(plain.record()) == plain
    assert str(fp8) == f"{plain}, cache in fp8, v_scale"


def test_a_cache_in_fp8_has_half_the_bytes() -> None:
    plain = Decode(1, 1, len_k=1000)
    fp8 = replace(plain, fp8_cache=True)
    assert plain.bytes - fp8.bytes == 2 * 1000 * 128
    assert replace(fp8, k_scale=True, v_scale=True).bytes == fp8.bytes + 2 * 4


def test_scales_pose_a_problem_of_fp8_alone() -> None:
    shapes = {"q": (3, 2, 6, 64), "k": (3, 40, 2, 64), "v": (3, 40, 2, 64), "k_scale": (3, 2)}
    problem = Decode.posed(shapes, Element.FP16, fp8_cache=True)
    elements = {x.name: x.element for x in problem.tensors}
    assert [elements[name] for name in ("q", "k", "v", "o", "k_scale")] == [
        *(Element.FP16, Element.FP8, Element.FP8, Element.FP16, Element.FP32)
    ]
    assert problem.k_scale and not problem.v_scale
    text = "k_scale is given and the cache is in fp16: pass a cache in float8_e4m3fn, or leave k_sc"
    with pytest.raises(ValueError, match=re.escape(text)):
        Decode.posed(shapes, Element.FP16)
    text = "k_scale has shape (2,) and q (3, 2, 6, 64): batch and heads of k must be equal, k_scale"
    with pytest.raises(ValueError, match=re.escape(text)):
        Decode.posed({**shapes, "k_scale": (2,)}, Element.FP16, fp8_cache=True)


class TestChoice:
    @pytest.mark.parametrize("gpu", [None, largest_device(90), largest_device(80)], ids=str)
    @pytest.mark.parametrize("d_head", [64, 128, 192, 256])
    def test_of_a_cache_in_fp8_is_the_step_that_takes_it_and_no_other_problem(self, gpu, d_head):
        plain = Decode(2, 8, d_head=d_head, len_k=300)
        found = config_for(replace(plain, fp8_cache=True, k_scale=True), gpu)
        assert found.step is STEP and found.d_head == d_head
        assert config_for(plain, gpu).step is not STEP
        assert config_for(replace(plain, keys_per_piece=64), gpu).step is not STEP

    def test_names_a_head_size_that_is_not_built(self):
        problem = Decode(2, 8, d_head=96, len_k=300, fp8_cache=True)
        text = (
            r"a cache in fp8 is not supported by .*: choose a step that .* convert k and v to bf16"
        )
        with pytest.raises(ValueError, match=text):
            config_for(problem, None)
        assert re.match("d_head 96 is not supported by c6_.*: pad the last", BF16.refusal(problem))
        with pytest.raises(ValueError, match="d_head 96 is not built for a cache in fp8: choose"):
            BF16.of_size(96)

    def test_names_pieces_of_a_size_that_no_kernel_cuts(self):
        problem = Decode(2, 8, len_k=300, fp8_cache=True, keys_per_piece=64)
        with pytest.raises(ValueError, match=r"keys_per_piece 64 is not supported by c6_.*: cho"):
            config_for(problem, None)


def test_each_kernel_takes_one_kind_of_cache() -> None:
    plain = Decode(1, 1, len_k=64)
    fp8 = replace(plain, fp8_cache=True)
    for family, number in ((DECODE_SYNC, "c4"), (DECODE_FAMILY, "d7")):
        config = family.fixed_config(family.steps[number], Element.BF16)
        assert re.fullmatch(
            "a cache in fp8 is not supported by .*: choose a step that takes it, or convert k and v"
            " to bf16",
            config.refusal(fp8),
        )
        assert config.supports.adapted(replace(fp8, k_scale=True)) == plain
    assert BF16.refusal(fp8) == "" and BF16.supports.adapted(plain) == fp8
    assert BF16.refusal(plain).startswith(
        "a cache in bf16 is not supported by c6_bf16_d128_Bc32_w4"
    )


def test_rows_of_a_cache_begin_at_whole_chunks_of_its_own_elements() -> None:
    problem = Decode(2, 4, len_k=100, kv_heads=2, d_head=64, fp8_cache=True)
    supports = BF16.of_size(64).supports
    for name, strides, text in (
        ("k", (12816, 128, 64, 1), ""),
        (
            "k",
            (12808, 128, 64, 1),
            "k has batch stride 12808, not a multiple of 16 elements (16",
        ),
        ("q", (264, 264, 72, 1), ""),
        ("k_scale", (0, 0), "k_scale has strides (0, 0) for shape (2, 2) and must be contiguous"),
    ):
        own = replace(problem, k_scale=True).tensor(name)
        found = supports.layout_refusal(own, strides)
        assert found.startswith(text) and bool(found) == bool(text)
