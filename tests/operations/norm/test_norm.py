"""Layer norm and RMS norm along rows: their problem, their bounds, and kernels in the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from matrices import DTYPES, each_dtype, spread
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.norm import OPERATION
from flash_helpers.operations.norm.baselines import run
from flash_helpers.operations.norm.inputs import draw
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.norm.reference import reference
from flash_helpers.registry.norm import (
    LAYER_NORM,
    RMS_NORM,
    LayerNormKernelConfig,
    NormConfig,
    RmsNormKernelConfig,
)
from flash_helpers.registry.norm_cluster import NORM_CLUSTER, NormClusterKernelConfig
from flash_helpers.registry.row_threads import MAX_WIDTH, ROWS_IN_FLIGHT
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.simulator import run_shipped

CONFIGS = committed(OPERATION)
WIDTHS = (1, 2, 31, 33, 127, 1000, 2059)
FULL = {"weight": True, "bias": True, "rstd": True}  # and the mean, of layer norm

each_config = each(CONFIGS)
each_function = pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])


@pytest.fixture
def bf16() -> LayerNormKernelConfig:
    return LAYER_NORM.fixed_config(LAYER_NORM.steps["n4"], Element.BF16)


def full(config: NormConfig, rows: int, width: int) -> Norm:
    """The problem with all tensors."""
    return Norm(rows, width, config.dtype, rms=config.rms, mean=not config.rms, **FULL)


def wrong(outputs: Mapping[str, torch.Tensor], wanted: Reference) -> list[str]:
    """Names of the outputs that are not within their bounds."""
    errors = {name: measure_error(outputs[name], wanted.expected[name]) for name in wanted.expected}
    return [name for name, error in errors.items() if not error.within(wanted.bounds[name])]


def check(
    config: NormConfig, problem: Norm, tensors: Mapping[str, torch.Tensor], **outputs: torch.Tensor
) -> None:
    """Simulate, watched, and compare all outputs with the reference."""
    given = {
        tensor.name: torch.full(tensor.shape, math.nan, dtype=DTYPES[tensor.element])
        for tensor in problem.outputs
    }
    given |= outputs
    call = prepare(config, *problem.arranged({**tensors, **given}), **problem.call_options())
    assert not call.simulate(keep_going=True).faults
    assert not wrong(given, reference(problem, tensors))


# -- the problem -----------------------------------------------------------------------------------


def test_each_tensor_that_is_given_is_moved_once() -> None:
    problem = Norm(8, 1000, Element.FP32)
    assert problem.bytes == 2 * 4 * 8 * 1000
    assert replace(problem, **FULL).bytes == problem.bytes + 2 * 4 * 1000 + 4 * 8
    assert problem.operations == 7 * 8 * 1000
    assert replace(problem, rms=True).operations == 4 * 8 * 1000
    assert Norm.from_record(replace(problem, eps=1e-6).record()) == replace(problem, eps=1e-6)


@each_function
@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_move_the_same_bytes(width: int, rms: bool) -> None:
    problem = OPERATION.measured(width, rms=rms)
    assert (problem.width, problem.tensor("x").bytes) == (width, 2**28)
    assert (problem.weight, problem.bias) == (True, not rms)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rows": 0}, "rows 0 is not positive: use 1 or more"),
        ({"width": -1}, "width -1 is not positive: use 1 or more"),
        ({"eps": -1e-5}, "eps -1e-05 is not a number from 0 on"),
        ({"eps": math.nan}, "eps nan is not a number from 0 on"),
        ({"rms": True, "mean": True}, "RMS norm has no mean, leave it out"),
    ],
)
def test_a_problem_that_has_no_result_is_refused(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(Norm(2, 3), **fields)


# -- the reference ---------------------------------------------------------------------------------


@each_function
@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_reference_is_pytorch_in_float64(distribution: str, dtype: Element, rms: bool) -> None:
    problem = Norm(5, 129, dtype, rms=rms, **FULL)
    inputs = draw(distribution, problem)
    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    if not rms:
        # its mean of a row with an infinity is NaN, since it updates a mean element by element
        y, _, rstd = torch.native_layer_norm(
            doubles["x"], (129,), doubles["weight"], doubles["bias"], problem.eps
        )
        mean = doubles["x"].mean(-1)
        problem = replace(problem, mean=True)
    else:
        y = torch.nn.functional.rms_norm(doubles["x"], (129,), doubles["weight"], problem.eps)
        y += doubles["bias"]
        mean, rstd = None, (doubles["x"].square().mean(-1) + problem.eps).rsqrt()
    found = reference(problem, inputs).expected
    close = {"equal_nan": True, "rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found["y"], y, **close)
    torch.testing.assert_close(found["rstd"], rstd.flatten(), **close)
    if mean is not None:
        torch.testing.assert_close(found["mean"], mean.flatten(), **close)


@each_function
@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_an_error_of_one_element_is_not(
    distribution: str, dtype: Element, rms: bool
) -> None:
    problem = Norm(4, 1000, dtype, rms=rms, weight=True, bias=not rms)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    y = run("pytorch_norm", problem, inputs)["y"]
    assert not wrong({"y": y}, wanted)
    y[1, int(y[1].float().abs().argmax())] *= 1.05
    assert wrong({"y": y}, wanted)


@each_dtype
def test_the_mean_of_squares_less_the_square_of_the_mean_is_caught(dtype: Element) -> None:
    problem = Norm(4, 1000, dtype)
    inputs = draw("far_mean", problem)
    x = inputs["x"].float()
    mean = x.mean(-1, keepdim=True)
    variance = {
        "of one pass": x.square().mean(-1, keepdim=True) - mean * mean,
        "of two passes": (x - mean).square().mean(-1, keepdim=True),
    }
    y = {
        name: ((x - mean) * (found.clamp(min=0) + problem.eps).rsqrt()).to(DTYPES[dtype])
        for name, found in variance.items()
    }
    wanted = reference(problem, inputs)
    assert wrong({"y": y["of one pass"]}, wanted)
    assert not wrong({"y": y["of two passes"]}, wanted)


@each_dtype
def test_rows_of_one_value_are_the_bias_and_a_mean_that_is_off_shows(dtype: Element) -> None:
    problem = Norm(3, 777, dtype, **FULL, mean=True)
    inputs = draw("constant_rows", problem)
    wanted = reference(problem, inputs)
    bias = inputs["bias"].double().expand(3, -1)
    torch.testing.assert_close(wanted.expected["y"], bias, rtol=1e-9, atol=1e-9)
    x = inputs["x"].float()
    found = {"mean": x[:, 0], "rstd": torch.full((3,), problem.eps).rsqrt()}
    found["y"] = inputs["bias"].expand(3, -1)
    assert not wrong(found, wanted)
    # as if the mean were a product with a rounded 1 / width, over and over
    off = (x * 1e-4) * found["rstd"][:, None] * inputs["weight"].float() + bias
    assert wrong({**found, "y": off.to(DTYPES[dtype])}, wanted) == ["y"]
    assert wrong({**found, "mean": found["mean"] * 1.0001}, wanted) == ["mean"]
    assert wrong({**found, "rstd": found["rstd"] * 1.0001}, wanted) == ["rstd"]


def test_libraries_compute_the_problem_and_a_copy_is_not_verified() -> None:
    problem = Norm(2, 10, Element.FP32, weight=True)
    inputs = draw("normal", problem)
    assert OPERATION.ceiling in OPERATION.libraries
    assert run("copy", problem, inputs)["y"].equal(inputs["x"])
    y = run("pytorch_norm", replace(problem, eps=0.5), inputs)["y"]
    assert y.equal(torch.nn.functional.layer_norm(inputs["x"], (10,), inputs["weight"], eps=0.5))


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: NormConfig) -> None:
    for number, width in enumerate(WIDTHS):
        problem = full(config, 2, width)
        tensors = draw("normal", problem, seed=number)
        at = {"x": (number % 3, number % 5), "weight": (0, number % 2), "bias": (0, number % 4)}
        laid = {name: spread(tensors[name], *where) for name, where in at.items()}
        check(config, problem, {name: laid[name].copy_(tensors[name]) for name in laid})


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: NormConfig, distribution: str) -> None:
    whole = ROWS_IN_FLIGHT in config.step.traits or config.family is NORM_CLUSTER
    problem = full(config, 3, 304 if whole else 301)  # of 8 elements, or with a head and a tail
    check(config, problem, draw(distribution, problem))


@each_config
def test_y_may_lie_otherwise_between_multiples_of_16_bytes_than_x(config: NormConfig) -> None:
    problem = full(config, 2, 555)
    tensors = draw("normal", problem)
    y = spread(tensors["x"], gap=2, first=1)
    memory = torch.as_strided(y, (2 * 557,), (1,), y.storage_offset())
    x = spread(tensors["x"], gap=3, first=2).copy_(tensors["x"])
    check(config, problem, {**tensors, "x": x}, y=y)
    assert memory[555:557].isnan().all()  # nothing is written between the rows
    assert memory[-2:].isnan().all()


@each_config
def test_weight_bias_and_statistics_may_be_left_out(config: NormConfig) -> None:
    for given in ({}, {"weight": True}, {"bias": True}, {"rstd": True}):
        problem = Norm(3, 70, config.dtype, rms=config.rms, eps=1e-3, **given)
        check(config, problem, draw("normal", problem))


@each(CONFIGS, at_corners=True)
def test_the_corners_of_the_declaration_are_right(config: NormConfig) -> None:
    for problem in config.supports.corners():
        if problem.width < 5000:
            check(config, problem, draw("normal", problem))


@pytest.mark.parametrize(
    "text",
    [
        "n3_bf16_w1_c1",
        "n4_fp32_w1_c2_t8",
        "n4_bf16_w2_c1_t8",  # two elements of head and tail for some threads
        "n4_fp16_w4_c1_t64",
        "n7_bf16_w4_c1_t8",
        "n7_fp16_w4_c2_t64",
        "n7_fp32_w4_c1_t128",
        "n8_bf16_w4_c2_t64",
        "n8_fp32_w4_c2_t128",
        "n9_fp16_w4_c1_t128_f1",
        "r1_bf16_w2_c2_t16",
        "r1_fp32_w4_c1_t128",
        "r3_bf16_w4_c1_t64_f2",
    ],
)
def test_rows_longer_than_the_registers_and_rows_of_a_block_are_right(text: str) -> None:
    kind = RmsNormKernelConfig if text.startswith("r") else LayerNormKernelConfig
    config = kind.from_short_form(text)
    widths = (63, min(config.pass_elements + 203, config.supports.max_width))
    for width in widths:
        problem = full(config, config.block_rows + 1, width)
        check(config, problem, draw("outliers", problem))


@pytest.mark.parametrize(
    "text",
    [
        "n5_bf16_w4_c1_t8_f4",
        "n5_fp16_w1_c2_t16_f2",
        "n5_fp32_w4_c4_t64_f1",
        "n6_bf16_w4_c1_t8_f4",
        "n6_fp16_w4_c2_t16_f2",
        "n6_fp32_w4_c1_t64_f4",  # two warps of a row, in turn
        "n6_fp32_w4_c2_t8_f2",
        "n9_bf16_w4_c1_t8_f1",
        "n9_fp16_w4_c1_t128_f2",
        "n9_fp32_w4_c2_t64_f1",
        "r2_bf16_w4_c1_t8_f4",
        "r2_fp16_w4_c2_t16_f2",
        "r2_fp32_w4_c1_t64_f4",
        "r2_fp32_w4_c2_t8_f2",
        "r3_bf16_w4_c1_t8_f1",
        "r3_fp16_w4_c1_t128_f2",
        "r3_fp32_w4_c2_t64_f1",
        "r4_bf16_w4_c1_t8_f2",
    ],
)
@pytest.mark.parametrize("width", [8, 56, 64])
@pytest.mark.parametrize("distribution", ["far_mean", "not_finite"])
def test_several_rows_of_a_thread_have_whole_chunks_or_are_taken_in_turn(
    text: str, width: int, distribution: str
) -> None:
    kind = RmsNormKernelConfig if text.startswith("r") else LayerNormKernelConfig
    config = kind.from_short_form(text)
    problem = full(config, config.block_rows + 1, width)
    tensors = draw(distribution, problem)
    check(config, problem, tensors)
    for name in ("x", "weight"):
        moved = spread(tensors[name], 0, 1)  # not at a multiple of 16 bytes
        check(config, problem, {**tensors, name: moved.copy_(tensors[name])})


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("r3_bf16_w4_c1_t8_f1", 64),  # 8 lanes have a row
        ("r3_fp16_w4_c2_t64_f1", 1000),  # two warps, and threads without a chunk
        ("r3_fp32_w4_c1_t128_f2", 512),  # two rows of all threads
        ("r4_bf16_w4_c1_t8_f1", 64),  # a row fills the registers; the last block lacks rows
        ("r4_fp16_w4_c2_t64_f1", 1024),
        ("r4_fp32_w4_c1_t128_f1", 512),
        ("r4_fp16_w4_c2_t64_f1", 1000),
        ("a7_bf16_w8_c1_k2_rms", 4096),
        ("a8_bf16_w8_c1_k2_rms", 4096),  # a row fills the registers
        ("a8_fp32_w8_c1_k4_rms", 4096),
    ],
)
@pytest.mark.parametrize("distribution", ["far_mean", "not_finite"])
def test_rms_norm_has_as_usual_a_weight_and_no_bias(
    text: str, width: int, distribution: str
) -> None:
    kind = RmsNormKernelConfig if text.startswith("r") else NormClusterKernelConfig
    config = kind.from_short_form(text)
    rows = 3 if text.startswith("a") else config.block_rows + 1
    problem = Norm(rows, width, config.dtype, rms=True, weight=True, rstd=True)
    check(config, problem, draw(distribution, problem))


@pytest.mark.parametrize("distribution", ["far_mean", "not_finite", "constant_rows"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("n7_bf16_w4_c2_t128", 2048),  # all threads have as many elements
        ("n7_fp16_w4_c2_t128", 1336),  # some threads have a chunk more than others
        ("n7_fp32_w4_c1_t128", 37),  # some threads have one element, most have none
        ("n8_bf16_w4_c2_t128", 2048),  # all chunks exist
        ("n8_fp16_w4_c2_t128", 1336),
        ("n8_fp32_w4_c2_t64", 37),
        ("n10_bf16_w4_c2_t128", 2048),  # a row fills the registers
        ("n10_fp16_w4_c2_t128", 2048),
        ("n10_fp32_w8_c2_t256", 2048),
        ("n10_bf16_w4_c2_t64", 1024),  # two rows of a block
    ],
)
def test_moments_of_unequal_parts_are_combined(text: str, width: int, distribution: str) -> None:
    config = LayerNormKernelConfig.from_short_form(text)
    problem = full(config, 2, width)
    tensors = draw(distribution, problem)
    check(config, problem, tensors)
    for name in ("x", "bias"):
        moved = spread(tensors[name], 0, 1)  # not at a multiple of 16 bytes
        check(config, problem, {**tensors, name: moved.copy_(tensors[name])})
    lacking = replace(problem, weight=False, bias=False)
    check(config, lacking, {"x": tensors["x"]})


@pytest.mark.parametrize("distribution", ["far_mean", "not_finite"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("a1_bf16_w8_c1_k2", 4096),  # as many as the registers of a cluster hold
        ("a1_bf16_w8_c1_k2_rms", 4096),
        ("a1_fp16_w8_c2_k4", 999),  # no whole chunks
        ("a1_fp32_w8_c1_k8", 20),  # fewer chunks than blocks
        ("a1_fp32_w8_c1_k2_rms", 2052),  # longer than the registers
        ("a2_bf16_w16_c1_k2", 8192),
        ("a2_bf16_w16_c4_k1", 9000),
        ("a2_fp16_w16_c2_k2_rms", 9000),  # with a bias
        ("a2_fp32_w16_c2_k4", 999),
        ("a3_bf16_w16_c1_k2", 8192),
        ("a3_bf16_w16_c2_k1", 5000),  # one block, and no sum is sent
        ("a3_fp16_w16_c2_k2_rms", 9000),  # with a bias
        ("a3_fp32_w16_c1_k4_rms", 2052),
        ("a3_fp32_w16_c2_k8", 999),
        ("a6_bf16_w8_c1_k2", 4096),  # as many as the registers of a cluster hold
        ("a6_fp16_w8_c2_k2_rms", 1000),  # fewer chunks than a piece of one block has
        ("a6_fp16_w8_c1_k2", 4100),
        ("a6_fp32_w8_c1_k4", 1001),  # rows that begin anywhere
        ("a5_bf16_w8_c1_k1", 2048),
        ("a5_bf16_w8_c1_k2", 4096),  # as many as the registers of a cluster hold
        ("a5_fp16_w8_c2_k2", 1001),  # rows that begin anywhere
        ("a5_fp16_w8_c1_k2_rms", 4100),  # longer than the registers, with a bias
        ("a5_fp32_w8_c1_k4", 20),  # fewer chunks than threads
        ("a5_fp32_w8_c1_k4_rms", 2052),
    ],
)
def test_a_cluster_has_one_row_after_the_other(text: str, width: int, distribution: str) -> None:
    config = NormClusterKernelConfig.from_short_form(text)
    device = replace(largest_device(90), sms=1)
    problem = full(config, 5, width)
    (launch,) = config.call(problem, problem.strides(), device).launches
    assert launch.cluster == (config.cluster_blocks, 1, 1)
    assert launch.grid[0] < 5 * config.cluster_blocks
    tensors = draw(distribution, problem)
    outputs = {
        tensor.name: torch.full(tensor.shape, math.nan, dtype=DTYPES[tensor.element])
        for tensor in problem.outputs
    }
    run_shipped(config, {**tensors, **outputs}, device=device, **problem.call_options())
    assert not wrong(outputs, reference(problem, tensors))


@pytest.mark.parametrize("distribution", ["far_mean", "not_finite", "constant_rows"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("a4_bf16_w8_c1_k1", 2048),  # one block, which sends to itself
        ("a4_bf16_w8_c1_k2", 4096),  # as many as the registers of a cluster hold
        ("a4_bf16_w8_c1_k4_rms", 8192),
        ("a4_fp16_w8_c2_k2", 1001),  # a head and a tail, and a block without a chunk
        ("a4_fp16_w8_c1_k2_rms", 4099),  # longer than the registers
        ("a4_fp32_w16_c1_k8", 20),  # fewer chunks than blocks
        ("a4_fp32_w8_c1_k2_rms", 2077),
        ("a7_bf16_w8_c1_k2", 4096),  # all chunks exist
        ("a7_bf16_w16_c1_k2_rms", 9000),
        ("a7_fp16_w8_c1_k2_rms", 4099),
        ("a7_fp32_w8_c1_k4", 1001),
        ("a8_bf16_w8_c1_k2", 4096),  # a row fills the registers
        ("a8_fp16_w8_c1_k4", 8192),
        ("a8_fp32_w8_c1_k2", 2048),
        ("a8_fp32_w8_c2_k1_rms", 999),
    ],
)
def test_a_cluster_of_its_own_has_each_row(text: str, width: int, distribution: str) -> None:
    config = NormClusterKernelConfig.from_short_form(text)
    problem = full(config, 3, width)
    (launch,) = config.call(problem, problem.strides(), largest_device(90)).launches
    assert launch.grid == (3 * config.cluster_blocks, 1, 1)
    assert "split the call by rows" in config.refusal(
        replace(problem, rows=2**31 // config.cluster_blocks)
    )
    tensors = draw(distribution, problem)
    check(config, problem, tensors)
    for name in ("x", "bias"):
        moved = spread(tensors[name], 0, 1)  # not at a multiple of 16 bytes
        check(config, problem, {**tensors, name: moved.copy_(tensors[name])})


@pytest.mark.parametrize(
    ("text", "clusters"), [("a1_bf16_w16_c4_k4", 64), ("a1_bf16_w32_c4_k8", 16)]
)
def test_clusters_fit_into_groups_of_16_sms(text: str, clusters: int) -> None:
    config = NormClusterKernelConfig.from_short_form(text)
    assert config.clusters(largest_device(90)) == clusters
    assert config.clusters(replace(largest_device(90), sms=4)) == 1


def test_a_grid_has_the_clusters_that_the_driver_counts() -> None:
    """A GPC lacks SMs here and there: an H200 was seen with room for 30 clusters of 4."""
    device = replace(largest_device(90), counted=((4, 2, 62), (8, 1, 15), (4, 1, 30)))
    many = Norm(100, 4096)
    for short, clusters in {
        "a3_bf16_w32_c4_k4": 30,
        "a3_bf16_w16_c4_k4": 62,
        "a3_bf16_w32_c4_k8": 15,
        "a3_bf16_w16_c4_k8": 32,  # not counted: of GPCs of 16 SMs
        "a3_bf16_w32_c4_k1": 100,  # rows, fewer than SMs
    }.items():
        config = NormClusterKernelConfig.from_short_form(short)
        (launch,) = config.call(many, many.strides(), device).launches
        assert launch.grid == (clusters * config.cluster_blocks, 1, 1), short


# -- refusals --------------------------------------------------------------------------------------


def test_empty_rows_and_columns_are_computed_without_a_kernel(bf16: LayerNormKernelConfig) -> None:
    none = flash_attention.run(bf16, torch.zeros(0, 10, dtype=torch.bfloat16))["y"]
    assert none.shape == (0, 10)
    mean = torch.zeros(3)
    x = torch.zeros(3, 0, dtype=torch.bfloat16)
    assert flash_attention.run(bf16, x, None, None, x.clone(), mean)["y"].shape == (3, 0)
    assert mean.isnan().all()


def bfloats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ((torch.zeros(2, 10),), TypeError, "x is torch.float32 and n4_bf16_w4_c16_t32 takes"),
        ((bfloats(2, 20)[:, ::2],), ValueError, "x has stride 2 in its last dimension"),
        ((bfloats(10),), ValueError, "x has 1 dimensions"),
        ((bfloats(2, 10), bfloats(11)), ValueError, r"weight has shape \(11,\) and x \(2, 10\)"),
        ((bfloats(2, 10), torch.zeros(10)), TypeError, "weight is torch.float32"),
        ((bfloats(2, 10), None, bfloats(1).expand(10)), ValueError, "bias has stride 0"),
        ((bfloats(1, 1).expand(1, MAX_WIDTH + 1),), ValueError, "stride 0|over the limit"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    tensors, error: type[Exception], text: str, bf16: LayerNormKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *tensors)


def test_problems_beyond_the_limits_are_refused_with_a_way_out(bf16: LayerNormKernelConfig) -> None:
    assert "split the call by rows" in bf16.refusal(Norm(2**31, 1))
    assert "split the rows" in bf16.refusal(Norm(1, MAX_WIDTH + 1))
    few = bf16.replace(row_threads=8, chunks=1)
    assert not few.refusal(Norm(1, 1024))
    assert "choose a config with more row_threads than 8" in few.refusal(Norm(1, 1025))
    assert few.refusal(Norm(1, 8, rms=True)) == (
        "the problem is one of RMS norm and n4_bf16_w4_c1_t8 computes layer norm: choose a kernel "
        "of RMS norm"
    )


def test_a_kernel_of_one_function_has_the_usual_problem_of_the_other_adapted(
    bf16: LayerNormKernelConfig,
) -> None:
    rms = RMS_NORM.progression()[0]
    usual = OPERATION.usual
    adapted = rms.supports.adapted(replace(usual, mean=True))
    assert adapted == replace(usual, rms=True, bias=False)
    assert rms.supports.adapted(adapted) == adapted
    assert bf16.supports.adapted(adapted) == usual
    assert rms.supports.adapted(replace(usual, rms=True)) == replace(usual, rms=True)


def test_outputs_may_not_be_inputs(bf16: LayerNormKernelConfig) -> None:
    x = bfloats(2, 10)
    with pytest.raises(ValueError, match="y overlaps x in memory"):
        flash_attention.run(bf16, x, None, None, x)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "n1 fixes chunks 0; choose n3 to n10"),
        ((2, Element.BF16, 3), "n_warps 3"),
        ((3, Element.BF16, 8), "chunks 0 is not from 1 to 16"),
        ((3, Element.BF16, 32, 8), "choose chunks 4, or fewer warps"),
        ((3, Element.BF16, 8, 4, 32), "n3 fixes row_threads 0; choose n4|no step has"),
        ((4, Element.BF16, 4, 4, 256), "from 8 to the 128 threads of n_warps 4: choose 32"),
        ((4, Element.BF16, 4, 4, 48), "row_threads 48 is not a power of two"),
        ((4, Element.FP8, 8, 4, 32), "family layer_norm has"),
        ((4, Element.BF16, 4, 4, 32, 2), "n4 fixes rows_in_flight 0; choose n5 to n6"),
        ((5, Element.BF16, 4, 4, 32), "rows_in_flight 0 is not positive: choose 1"),
        ((5, Element.BF16, 4, 8, 32, 4), "have 32 chunks per thread, .* rows_in_flight 1"),
        ((7, Element.BF16, 8, 8, 256, 2), "n7 fixes rows_in_flight 0; choose n5 to n6"),
        ((7, Element.BF16, 8, 16, 256), "chunks 16 is not from 1 to 8: choose 4"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LayerNormKernelConfig(*fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 4, 4, 4), "n_warps 4 is not built: choose 8, 16 or 32"),
        ((1, Element.BF16, 8, 8, 4), "chunks 8 is not built: choose 1, 2 or 4"),
        ((1, Element.BF16, 8, 4, 16), "cluster_blocks 16 is not built: choose 2, 4 or 8"),
    ],
)
def test_a_cluster_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NormClusterKernelConfig(*fields)


def test_a_sweep_tries_all_that_fits_into_registers() -> None:
    found = [*LAYER_NORM.sweep(), *RMS_NORM.sweep()]
    steps = {f"n{step}" for step in range(3, 11)} | {"r1", "r2", "r3", "r4"}
    assert {config.step.id for config in found} == steps
    for config in found:
        chunks = config.chunks * config.thread_rows
        assert chunks <= 16 and chunks * 4 + 48 <= 65536 // config.n_threads
    few = {config.row_threads for config in found if config.step.id != "n3"}
    assert few == {8, 16, 32, 64, 128, 256, 512, 1024}
