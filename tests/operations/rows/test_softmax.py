"""Softmax along rows: its problem, its bounds, and its kernels in the simulator."""

from __future__ import annotations

import collections
import math
from dataclasses import replace

import pytest
import torch
from matrices import DTYPES, each_dtype, padded
from tiers import committed, each

import flash_attention
from flash_helpers.check.debugging import ComparedOutputs
from flash_helpers.check.difference import output_difference
from flash_helpers.check.errors import measure_error
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Element, config_from_short_form
from flash_helpers.operations.rows import OPERATION
from flash_helpers.operations.rows.baselines import run
from flash_helpers.operations.rows.inputs import draw
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.rows.reference import reference, softmax_reference
from flash_helpers.registry.row_threads import MAX_WIDTH
from flash_helpers.registry.rows import SOFTMAX, SoftmaxKernelConfig
from flash_helpers.registry.softmax_cluster import SoftmaxClusterKernelConfig
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.simulator import run_shipped

CONFIGS = committed(OPERATION)
WIDTHS = (1, 2, 31, 33, 127, 1000, 4099)

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> SoftmaxKernelConfig:
    return SOFTMAX.fixed_config(SOFTMAX.steps["s3"], Element.BF16)


def check(config: SoftmaxKernelConfig, x: torch.Tensor, y: torch.Tensor | None = None) -> None:
    """Simulate, watched, and compare with the reference."""
    call = prepare(config, x, y)
    found = call.simulate(keep_going=True)
    assert not found.faults
    expected = softmax_reference(x)
    error = measure_error(call.output, expected.expected["y"])
    assert error.within(expected.bounds["y"]), error.excess(expected.bounds["y"])


# -- the problem -----------------------------------------------------------------------------------


def test_each_element_is_read_once_and_written_once_and_takes_five_operations() -> None:
    problem = Rows(8, 1000, Element.FP32)
    assert problem.bytes == 2 * 4 * 8 * 1000
    assert problem.operations == 5 * 8 * 1000
    assert Rows.from_record(problem.record()) == problem


@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_move_the_same_bytes(width: int) -> None:
    problem = OPERATION.measured(width)
    assert (problem.width, problem.tensor("x").bytes) == (width, 2**28)


@pytest.mark.parametrize("make", [lambda: Rows(0, 5), lambda: Rows(5, 0), lambda: Rows(2, -1)])
def test_a_size_below_1_is_refused(make) -> None:
    with pytest.raises(ValueError, match="is not positive: use 1 or more"):
        make()


# -- the reference ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_reference_is_the_formula_in_float64(distribution: str, dtype: Element) -> None:
    problem = Rows(5, 129, dtype)
    inputs = draw(distribution, problem)
    x = inputs["x"].double()
    e = (x - x.amax(-1, keepdim=True)).exp()
    expected = reference(problem, inputs).expected["y"]
    torch.testing.assert_close(expected, e / e.sum(-1, keepdim=True), equal_nan=True)


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_an_error_of_one_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = Rows(4, 1000, dtype)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    y = run("pytorch", problem, inputs)["y"]
    assert measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])
    y[0, int(y[0].float().argmax())] *= 1.05
    assert not measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(Element.FP16, 1.01), (Element.BF16, 1.02), (Element.FP32, 1.0001)],
)
def test_a_wrong_row_beside_a_nearly_one_hot_row_is_caught(dtype: Element, factor: float) -> None:
    x = torch.zeros(3, 1000, dtype=DTYPES[dtype])
    x[0, 7] = 15.0  # y is 0.997 there, and 0.001 in all of the other rows
    wanted = softmax_reference(x)
    bound = wanted.bounds["y"]
    y = torch.softmax(x, -1)
    assert measure_error(y, wanted.expected["y"]).within(bound)
    y[2] *= factor
    error = measure_error(y, wanted.expected["y"])
    # over all rows, the error is hidden by what the first may have
    assert error.max_abs < bound.max_abs and error.relative < bound.relative
    assert not error.within(bound)
    assert error.excess(bound).startswith("row 2: max abs error ")


def test_a_wrong_row_is_told_by_the_sanity_check_and_the_debugger() -> None:
    problem = Rows(3, 1000)
    x = torch.zeros(3, 1000, dtype=torch.bfloat16)
    x[0, 7] = 15.0
    wanted = reference(problem, {"x": x})
    y = torch.softmax(x, -1)
    y[2, 5:] *= 1.02
    compared = ComparedOutputs(problem, {"y": y}, wanted, "a test")
    found = compared.disagreement
    assert found is not None and found.place == (2, 5)
    axes = problem.axes["y"]
    limits = wanted.bounds["y"].of_elements
    difference = output_difference("y", y, wanted.expected["y"], limits, axes)
    assert (difference.n_wrong, difference.n_wrong_rows) == (995, 1)


def test_subnormal_probabilities_of_fp16_have_their_allowance() -> None:
    x = torch.zeros(1, 40000, dtype=torch.float16)
    wanted = softmax_reference(x)
    error = measure_error(torch.softmax(x, -1), wanted.expected["y"])
    assert 2.0**-11 < error.relative <= wanted.bounds["y"].relative


def test_a_row_of_minus_infinity_is_nan_and_sets_no_bound() -> None:
    x = draw("masked", Rows(3, 100))["x"]
    wanted = softmax_reference(x)
    assert wanted.expected["y"][-1].isnan().all()
    assert wanted.bounds == softmax_reference(x[:-1]).bounds
    y = torch.softmax(x, -1)
    assert measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])
    wrong = torch.softmax(x, -1).nan_to_num_(0.0)
    assert not measure_error(wrong, wanted.expected["y"]).within(wanted.bounds["y"])


def test_a_copy_is_measured_and_not_verified() -> None:
    problem = Rows(2, 10)
    inputs = draw("normal", problem)
    assert OPERATION.ceiling in OPERATION.libraries
    assert run("copy", problem, inputs)["y"].equal(inputs["x"])


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: SoftmaxKernelConfig) -> None:
    for number, width in enumerate(WIDTHS):
        x = draw("normal", Rows(2, width, config.dtype), seed=number)["x"]
        check(config, padded(x, gap=number % 3, first=number % 5))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: SoftmaxKernelConfig, distribution: str) -> None:
    check(config, draw(distribution, Rows(3, 301, config.dtype))["x"])


@each_config
def test_y_may_lie_otherwise_between_multiples_of_16_bytes_than_x(
    config: SoftmaxKernelConfig,
) -> None:
    x = draw("normal", Rows(2, 555, config.dtype))["x"]
    y = padded(torch.full_like(x, math.nan), gap=2, first=1)
    memory = torch.as_strided(y, (2 * 557,), (1,), y.storage_offset())
    check(config, padded(x, gap=3, first=2), y)
    assert memory[555:557].isnan().all()  # nothing is written between the rows
    assert memory[-2:].isnan().all()


@each_config
def test_rows_of_nan_or_infinities_are_nan_and_leave_their_neighbours_alone(
    config: SoftmaxKernelConfig,
) -> None:
    x = draw("normal", Rows(4, 70, config.dtype))["x"]
    x[0, 13] = math.nan
    x[1, 69] = math.inf
    x[2] = -math.inf
    check(config, x)
    found = flash_attention.run(config, x)["y"].isnan()
    assert found[:3].all()
    assert not found[3].any()


@each_config
def test_the_corners_of_the_declaration_are_right(config: SoftmaxKernelConfig) -> None:
    for problem in config.supports.corners():
        if problem.width < 5000:  # of the large ones s3 alone has more than one pass
            check(config, draw("normal", problem)["x"])


def test_a_row_longer_than_the_registers_is_read_again_beyond_them(
    bf16: SoftmaxKernelConfig,
) -> None:
    held = bf16.pass_elements
    check(bf16, draw("outliers", Rows(1, held + 1003))["x"])


def test_rows_may_share_memory_in_x(bf16: SoftmaxKernelConfig) -> None:
    check(bf16, draw("normal", Rows(1, 100))["x"].expand(3, -1))


@pytest.mark.parametrize("dtype", [Element.BF16, Element.FP32])
@pytest.mark.parametrize("of_row", [8, 16, 64])
def test_rows_share_a_block_and_the_last_block_may_have_too_few(
    of_row: int, dtype: Element
) -> None:
    config = SoftmaxKernelConfig(4, dtype, 4, 1, of_row)
    rows = 2 * config.block_rows + 1
    for width in (1, 61, 64, config.pass_elements + 13):
        check(config, padded(draw("outliers", Rows(rows, width, dtype))["x"], gap=3, first=1))


@pytest.mark.parametrize(
    "text",
    ["s5_bf16_w4_c1_t8_f4", "s5_fp16_w4_c4_t32_f1", "s5_fp32_w4_c2_t8_f2", "s5_bf16_w4_c2_t64_f2"],
)
@pytest.mark.parametrize("distribution", ["normal", "masked", "large_logits"])
def test_several_rows_of_a_thread_have_whole_chunks_or_are_taken_in_turn(
    text: str, distribution: str
) -> None:
    config = SoftmaxKernelConfig.from_short_form(text)
    for width in (8, 56, 61, 64):
        x = draw(distribution, Rows(config.block_rows + 1, width, config.dtype))["x"]
        check(config, x)
        check(config, padded(x, gap=0, first=1))  # not at a multiple of 16 bytes


@pytest.mark.parametrize("distribution", ["normal", "masked"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("x1_bf16_w16_c2_k1", 8000),
        ("x1_fp16_w16_c1_k2", 8192),  # as many as the registers of a cluster hold
        ("x1_bf16_w16_c1_k2", 999),  # no whole chunks
        ("x1_fp32_w16_c1_k4", 20),  # fewer chunks than blocks have threads
        ("x1_fp32_w16_c1_k1", 2052),  # longer than the registers
        ("x2_bf16_w16_c2_k1", 5000),  # one block, and nothing is sent
        ("x2_bf16_w16_c1_k2", 8192),
        ("x2_fp16_w16_c1_k2", 9000),
        ("x2_fp32_w16_c1_k8", 999),
    ],
)
def test_a_block_or_a_cluster_has_one_row_after_the_other(
    text: str, width: int, distribution: str
) -> None:
    config = SoftmaxClusterKernelConfig.from_short_form(text)
    device = replace(largest_device(90), sms=1)
    problem = Rows(5, width, config.dtype)
    assert config.clusters(device) < problem.rows
    x = draw(distribution, problem)["x"]
    y = torch.full_like(x, math.nan)
    run_shipped(config, {"x": x, "y": y}, device=device)
    right = reference(problem, {"x": x})
    assert measure_error(y, right.expected["y"]).within(right.bounds["y"])


@pytest.mark.parametrize("distribution", ["normal", "masked"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("x3_bf16_w8_c1_k1", 2048),  # one block, and nothing is sent
        ("x3_bf16_w8_c1_k2", 4096),  # as many as the registers of a cluster hold
        ("x3_fp16_w8_c2_k4", 1000),  # whole chunks, fewer than threads
        ("x3_fp16_w8_c1_k2", 4098),  # longer than the registers
        ("x3_fp32_w16_c1_k8", 20),  # fewer chunks than blocks
    ],
)
def test_a_cluster_of_its_own_has_each_row(text: str, width: int, distribution: str) -> None:
    config = SoftmaxClusterKernelConfig.from_short_form(text)
    problem = Rows(3, width, config.dtype)
    (launch,) = config.call(problem, problem.strides(), largest_device(90)).launches
    assert launch.grid == (3 * config.cluster_blocks, 1, 1)
    assert "split the call by rows" in config.refusal(
        replace(problem, rows=2**31 // config.cluster_blocks)
    )
    x = draw(distribution, problem)["x"]
    check(config, x)
    check(config, padded(x, gap=0, first=1))  # not at a multiple of 16 bytes


# -- refusals --------------------------------------------------------------------------------------


def test_y_may_not_be_x(bf16: SoftmaxKernelConfig) -> None:
    x = torch.zeros(2, 10, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="y overlaps x in memory"):
        flash_attention.run(bf16, x, x)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.zeros(2, 10), TypeError, "x is torch.float32 and s3_bf16_w8_c4 takes"),
        (torch.zeros(2, 20)[:, ::2].bfloat16().expand(2, 10).T, ValueError, "last dimension"),
        (torch.zeros(10).bfloat16(), ValueError, "has 1 dimensions"),
        (torch.zeros(0, 10).bfloat16(), ValueError, "softmax over nothing"),
        (torch.zeros(1, 1).bfloat16().expand(1, MAX_WIDTH + 1), ValueError, "over the limit"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    x: torch.Tensor, error: type[Exception], text: str, bf16: SoftmaxKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, x)


def test_more_rows_than_a_grid_are_refused(bf16: SoftmaxKernelConfig) -> None:
    problem = Rows(2**31, 1)
    assert "split the call by rows" in bf16.refusal(problem)
    assert not bf16.refusal(replace(problem, rows=2**31 - 1))


def test_a_problem_of_another_operation_is_refused_by_name(bf16: SoftmaxKernelConfig) -> None:
    other = config_from_short_form("o1_bf16_d128_Br128_Bc64_w4_rs2048")
    assert "s3_bf16_w8_c4 computes rows" in bf16.refusal(other.measured(512))
    assert "choose a config of that operation" in other.refusal(Rows(1, 1))


def test_a_call_names_what_is_missing_or_too_much(bf16: SoftmaxKernelConfig) -> None:
    x = torch.zeros(2, 10, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="pass the inputs among them"):
        flash_attention.run(bf16)
    with pytest.raises(ValueError, match="x is missing: rows takes it"):
        flash_attention.run(bf16, None, x)
    with pytest.raises(ValueError, match="at most 2 tensors"):
        flash_attention.run(bf16, x, None, None)
    with pytest.raises(TypeError, match="rows has no option causal"):
        flash_attention.run(bf16, x, causal=True)


@pytest.mark.parametrize("name", ["forward", "forward_timed", "simulate"])
def test_attention_is_not_computed_by_a_kernel_of_rows(
    name: str, bf16: SoftmaxKernelConfig
) -> None:
    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="s3_bf16_w8_c4 computes rows, not attention_forward"):
        getattr(flash_attention, name)(bf16, q, q, q)


def test_a_gradient_is_refused(bf16: SoftmaxKernelConfig) -> None:
    x = torch.zeros(2, 10, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward pass"):
        flash_attention.run(bf16, x)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "s1 fixes chunks 0; choose s3"),
        ((2, Element.BF16, 3), "n_warps 3"),
        ((3, Element.BF16, 3, 4), "n_warps 3 is not a power of two from 1 to 32: choose 4 or 8"),
        ((3, Element.BF16, 8), "chunks 0 is not from 1 to 16"),
        ((3, Element.BF16, 32, 8), "choose chunks 4, or fewer warps"),
        ((3, Element.FP8, 8, 4), "family softmax has"),
        ((4, Element.BF16, 4, 4), "row_threads 0 is not a power of two from 8 to the 128 threads"),
        ((4, Element.BF16, 4, 4, 256), "row_threads 256 is not"),
        ((4, Element.BF16, 4, 4, 24), "row_threads 24 is not .*: choose 32"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SoftmaxKernelConfig(*fields)


def test_a_sweep_tries_all_that_fits_into_registers_and_blocks() -> None:
    found = SOFTMAX.sweep()
    assert all(config.chunks * 4 + 48 <= 65536 // config.n_threads for config in found)
    assert all(config.threads_per_row <= config.n_threads for config in found)
    n = collections.Counter(config.step.id for config in found)
    # of s3 8 and 16 chunks do not fit beside 32 warps; of s4 4 warps have 128 threads at most
    assert {id: n[id] for id in ("s3", "s4")} == {"s3": 3 * (6 * 5 - 2), "s4": 3 * 5 * (5 + 7)}
