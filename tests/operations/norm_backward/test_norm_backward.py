"""The backward pass of norms: its problem, its bounds, and kernels in the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from matrices import DTYPES, each_dtype, padded, spread
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element, config_from_short_form
from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.norm_backward import OPERATION
from flash_helpers.operations.norm_backward.baselines import run
from flash_helpers.operations.norm_backward.inputs import draw
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.reference import reference
from flash_helpers.registry.norm_backward import (
    LAYER_NORM_BACKWARD,
    RMS_NORM_BACKWARD,
    LayerNormBackwardKernelConfig,
    NormBackwardConfig,
    NormBackwardKernels,
)
from flash_helpers.registry.norm_backward_cluster import (
    NORM_BACKWARD_CLUSTER,
    NormBackwardClusterKernelConfig,
    competing_clusters,
)
from flash_helpers.registry.norm_backward_staged import NormBackwardStagedKernelConfig
from flash_helpers.registry.row_threads import MAX_WIDTH
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)


def few_sms(config: Config) -> Device:
    """A GPU on which a thread block has several rows."""
    return replace(largest_device(config.family.capabilities[0]), sms=1)


each_config = each(CONFIGS)
WITHIN_BLOCKS = [c for c in CONFIGS if c.family is not NORM_BACKWARD_CLUSTER]
"""Configs in which a thread block has a row, wherever the row begins."""
each_function = pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])


@pytest.fixture
def bf16() -> LayerNormBackwardKernelConfig:
    return LAYER_NORM_BACKWARD.fixed_config(LAYER_NORM_BACKWARD.steps["e4"], Element.BF16)


def full(rows: int, width: int, dtype: Element, *, rms: bool = False) -> NormBackward:
    """The problem with all tensors."""
    return NormBackward(rows, width, dtype, rms=rms, weight=True, dweight=True, dbias=not rms)


def wrong(outputs: Mapping[str, torch.Tensor], wanted: Reference) -> list[str]:
    """Names of the outputs that are not within their bounds."""
    errors = {name: measure_error(outputs[name], wanted.expected[name]) for name in wanted.expected}
    return [name for name, error in errors.items() if not error.within(wanted.bounds[name])]


def simulate(
    config: NormBackwardKernels,
    problem: NormBackward,
    tensors: Mapping[str, torch.Tensor],
    on_few: bool = True,
    **outputs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Simulate, watched, and return the outputs."""
    given = {
        tensor.name: torch.full(tensor.shape, math.nan, dtype=DTYPES[tensor.element])
        for tensor in problem.outputs
    }
    given |= outputs
    call = prepare(config, *problem.arranged({**tensors, **given}))
    device = few_sms(config) if on_few else None
    assert not call.simulate(keep_going=True, device=device).faults
    return given


def check(
    config: NormBackwardKernels,
    problem: NormBackward,
    tensors: Mapping[str, torch.Tensor],
    on_few: bool = True,
    **outputs: torch.Tensor,
) -> None:
    """Simulate, and compare all outputs with the reference."""
    found = simulate(config, problem, tensors, on_few, **outputs)
    assert not wrong(found, reference(problem, tensors))


# -- the problem -----------------------------------------------------------------------------------


def test_each_tensor_that_is_given_is_moved_once() -> None:
    problem = NormBackward(8, 1000, Element.FP32)
    matrices, row_vectors = 3 * 4 * 8 * 1000, 2 * 4 * 8
    assert problem.bytes == matrices + row_vectors
    assert full(8, 1000, Element.FP32).bytes == problem.bytes + 3 * 4 * 1000
    assert full(8, 1000, Element.FP32, rms=True).bytes == matrices + 4 * 8 + 2 * 4 * 1000
    assert problem.operations == 13 * 8 * 1000
    assert NormBackward.from_record(problem.record()) == problem


@each_function
@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_read_as_much_as_those_of_the_forward_pass(
    width: int, rms: bool
) -> None:
    problem = OPERATION.measured(width, rms=rms)
    assert (problem.width, problem.tensor("x").bytes) == (width, 2**28)
    assert (problem.weight, problem.dweight, problem.dbias) == (True, True, not rms)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rows": 0}, "rows 0 is not positive: use 1 or more"),
        ({"width": -1}, "width -1 is not positive: use 1 or more"),
        ({"rms": True, "dbias": True}, "dbias: RMS norm has no bias, leave it out"),
    ],
)
def test_a_problem_that_has_no_result_is_refused(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(NormBackward(2, 3), **fields)


# -- the reference ---------------------------------------------------------------------------------


@each_function
@each_dtype
@pytest.mark.parametrize("distribution", [name for name in DISTRIBUTIONS if name != "not_finite"])
def test_the_reference_is_the_gradient_of_pytorch_in_float64(
    distribution: str, dtype: Element, rms: bool
) -> None:
    problem = full(5, 129, dtype, rms=rms)
    inputs = draw(distribution, problem)
    dy, x, weight = (inputs[name].double() for name in ("dy", "x", "weight"))
    mean = 0.0 if rms else x.mean(-1, keepdim=True)
    inputs["rstd"] = ((x - mean).square().mean(-1) + problem.forward.eps).rsqrt()
    inputs |= {} if rms else {"mean": x.mean(-1)}  # both in float64, too
    leaves = [leaf.requires_grad_() for leaf in (x, weight, torch.zeros_like(weight))]
    if rms:
        y = torch.nn.functional.rms_norm(x, (129,), weight, problem.forward.eps)
        leaves.pop()
    else:
        y = torch.nn.functional.layer_norm(x, (129,), *leaves[1:], problem.forward.eps)
    found = reference(problem, inputs).expected
    for own, other in zip(found.values(), torch.autograd.grad(y, leaves, dy), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_a_nan_or_an_infinity_goes_where_pytorch_has_it() -> None:
    problem = full(4, 129, Element.FP32)
    inputs = draw("not_finite", problem)
    found = reference(problem, inputs).expected
    by_pytorch = run("pytorch_norm", problem, inputs)
    for name, values in found.items():
        assert values.isfinite().equal(by_pytorch[name].isfinite()), name
    assert found["dx"].isfinite().all(-1).tolist() == [False, False, True, False]
    assert not found["dweight"].isfinite().any() and found["dbias"].isfinite().sum() == 128


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["dx", "dweight", "dbias"])
def test_rounded_results_are_within_the_bound_and_an_error_of_one_element_is_not(
    name: str, distribution: str, dtype: Element
) -> None:
    problem = full(4, 1000, dtype)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = {name: x.to(DTYPES[dtype]) for name, x in wanted.expected.items()}
    assert not wrong(found, wanted)
    values = found[name][2] if name == "dx" else found[name]
    place = int(values.nan_to_num(0.0, 0.0, 0.0).float().abs().argmax())
    is_number = values[place].isfinite() and values[place] != 0  # x of constant rows is their mean
    values[place] = values[place] * 1.05 if is_number else 1.0
    assert wrong(found, wanted) == [name]


def test_libraries_compute_the_problem_and_a_copy_is_not_verified() -> None:
    problem = full(3, 50, Element.FP32)
    inputs = draw("normal", problem)
    assert OPERATION.ceiling in OPERATION.libraries
    assert run("copy", problem, inputs)["dx"].equal(inputs["dy"])
    assert not wrong(run("pytorch_norm", problem, inputs), reference(problem, inputs))
    alone = replace(problem, weight=False, dweight=False, dbias=False)
    found = run("pytorch_norm", alone, inputs | {"weight": None})
    assert not wrong(found, reference(alone, inputs)) and found.keys() == {"dx"}


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: NormBackwardKernels) -> None:
    for number, width in enumerate((1, 2, 33, 136, 1000)):
        problem = full(3, width, config.dtype, rms=config.is_rms)
        tensors = draw("normal", problem, seed=number)
        at = {"x": (number % 3, number % 5), "dy": (number % 2, 8), "weight": (0, number % 4)}
        laid = {name: padded(tensors[name], *where) for name, where in at.items()}
        check(config, problem, {**tensors, **laid})


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: NormBackwardKernels, distribution: str) -> None:
    problem = full(3, 264, config.dtype, rms=config.is_rms)
    check(config, problem, draw(distribution, problem), False)


@each(WITHIN_BLOCKS, once=True)
def test_results_do_not_depend_on_where_rows_begin(config: NormBackwardKernels) -> None:
    problem = full(3, 264, config.dtype, rms=config.is_rms)
    tensors = draw("outliers", problem)
    apart = {name: padded(tensors[name], 3, 1) for name in ("dy", "x")}
    found = (simulate(config, problem, given) for given in (tensors, {**tensors, **apart}))
    aligned, elsewhere = found
    assert all(x.equal(elsewhere[name]) for name, x in aligned.items())


@each_config
def test_nothing_is_written_between_the_rows_of_dx(config: NormBackwardKernels) -> None:
    problem = full(2, 55, config.dtype, rms=config.is_rms)
    tensors = draw("normal", problem)
    dx = spread(tensors["x"], gap=2, first=1)
    memory = torch.as_strided(dx, (2 * 57,), (1,), dx.storage_offset())
    check(config, problem, tensors, dx=dx)
    assert memory[55:57].isnan().all() and memory[-2:].isnan().all()


@each_config
def test_weight_and_gradients_may_be_left_out(config: NormBackwardKernels) -> None:
    given = [{}, {"weight": True}, {"dweight": True}]
    for options in given if config.is_rms else [*given, {"weight": True, "dbias": True}]:
        problem = NormBackward(3, 72, config.dtype, rms=config.is_rms, **options)
        check(config, problem, draw("normal", problem))


@each(CONFIGS, at_corners=True)
def test_the_corners_of_the_declaration_are_right(config: NormBackwardKernels) -> None:
    for problem in config.supports.corners():
        if problem.width < 5000:
            check(config, problem, draw("normal", problem))


@each(CONFIGS, once=True)
def test_thread_blocks_with_several_rows_give_the_same_bits_in_each_call(
    config: NormBackwardKernels,
) -> None:
    many = full(10_000, 40, config.dtype, rms=config.is_rms)
    rows, _ = config.call(many, many.strides(), few_sms(config)).launches
    problem = replace(many, rows=min(3 * rows.grid[0] // rows.cluster[0] + 1, 100))
    tensors = draw("outliers", problem)
    first = simulate(config, problem, tensors)
    assert not wrong(first, reference(problem, tensors))
    assert all(x.equal(first[name]) for name, x in simulate(config, problem, tensors).items())


@pytest.mark.parametrize(
    "text",
    [
        "e3_bf16_w1_c1",
        "e3_fp32_w2_c1",
        "e4_bf16_w4_c1_t8",
        "e4_fp32_w2_c1_t16",
        "e4_fp16_w4_c2_t32",
        "e4_bf16_w4_c1_t64",
        "e5_bf16_w4_c1_t8",
        "e5_fp32_w4_c1_t64",
        "q1_bf16_w2_c1_t8",
        "q1_fp32_w4_c1_t64",
        "q2_bf16_w4_c2_t32",
    ],
)
def test_rows_longer_than_the_registers_and_rows_of_a_block_are_right(text: str) -> None:
    config = config_from_short_form(text)
    assert isinstance(config, NormBackwardConfig)
    rows = 2 * config.blocks_per_sm * config.block_rows + 1
    for width in (config.pass_elements - 8, min(2 * config.pass_elements + 24, 1000)):
        problem = full(rows if width < 300 else config.block_rows + 1, width, config.dtype)
        problem = config.supports.adapted(problem)
        check(config, problem, draw("outliers", problem))


@pytest.mark.parametrize("distribution", ["far_mean", "not_finite"])
@pytest.mark.parametrize(
    ("text", "rows", "width"),
    [
        ("w1_bf16_w4_c1_t8_s2", 200, 64),
        ("w1_bf16_w4_c1_t8_s3_rms", 200, 63),  # no whole chunks
        ("w1_fp16_w4_c2_t64_s3", 30, 1000),
        ("w1_fp32_w4_c2_t32_s3_rms", 40, 256),
        ("w1_fp32_w4_c1_t128_s2", 7, 1040),  # longer than a tile
        ("nc1_bf16_w8_c1_k2", 9, 4096),  # as many as the threads of a cluster have
        ("nc1_bf16_w8_c1_k2_rms", 9, 4096),
        ("nc1_fp16_w8_c2_k4", 6, 999),  # no whole chunks
        ("nc1_fp32_w8_c1_k8", 9, 20),  # fewer chunks than blocks
        ("nc1_fp32_w8_c1_k2_rms", 5, 2052),  # longer than a tile of the cluster
    ],
)
def test_a_block_or_a_cluster_has_one_row_after_the_other(
    text: str, rows: int, width: int, distribution: str
) -> None:
    config = config_from_short_form(text)
    assert isinstance(config, NormBackwardKernels)
    problem = full(rows, width, config.dtype, rms=config.is_rms)
    check(config, problem, draw(distribution, problem))


@pytest.mark.parametrize("name", ["dy", "x", "weight"])
def test_rows_at_any_element_take_the_loop_without_copies(name: str) -> None:
    config = NormBackwardStagedKernelConfig.from_short_form("w1_bf16_w4_c1_t32_s2")
    problem = full(30, 200, config.dtype)
    tensors = draw("outliers", problem)
    whole = simulate(config, problem, tensors)
    assert not wrong(whole, reference(problem, tensors))
    moved = spread(tensors[name], 0, 1).copy_(tensors[name])  # not at a multiple of 16 bytes
    for output, found in simulate(config, problem, {**tensors, name: moved}).items():
        assert found.equal(whole[output]), output


# -- calls -----------------------------------------------------------------------------------------


def test_the_grid_is_what_the_sms_hold_and_columns_are_summed_only_if_asked_for(
    bf16: LayerNormBackwardKernelConfig,
) -> None:
    device = largest_device(90)
    problem = full(10_000, 1000, Element.BF16)
    rows, combine = bf16.call(problem, problem.strides(), device).launches
    assert rows.grid[0] == 132 * bf16.blocks_per_sm == 132 * 3
    assert combine.grid[0] == 2 * 1000 // 32 + 1
    few = replace(problem, rows=7)
    assert bf16.call(few, few.strides(), device).launches[0].grid[0] == 7
    alone = replace(problem, dweight=False, dbias=False)
    (only,) = bf16.call(alone, alone.strides(), device).launches
    assert only.kernel == rows.kernel


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("w1_bf16_w4_c1_t8_s3", 6 * 132),  # 80 registers per thread
        ("w1_bf16_w8_c2_t256_s3", 2 * 132),
        ("w1_bf16_w16_c4_t512_s3", 132),
        ("w1_bf16_w8_c4_t256_s3_rms", 2 * 132),
        ("nc1_bf16_w16_c4_k2", 132),
        ("nc1_bf16_w8_c4_k2", 2 * 132),
        ("nc1_bf16_w16_c4_k4", 4 * 32),  # of 132 SMs, in groups of 16
        ("nc1_bf16_w8_c4_k8", 8 * 32),
        ("nc1_bf16_w16_c4_k8", 8 * 16),
    ],
)
def test_the_grid_is_what_registers_shared_memory_and_clusters_leave_room_for(
    text: str, blocks: int
) -> None:
    config = config_from_short_form(text)
    assert isinstance(config, NormBackwardKernels)
    problem = full(100_000, 1000, Element.BF16, rms=config.is_rms)
    rows, _ = config.call(problem, problem.strides(), largest_device(90)).launches
    assert rows.grid[0] == blocks
    assert rows.cluster[0] == getattr(config, "cluster_blocks", 1)


def test_a_gpu_of_one_sm_has_one_cluster() -> None:
    config = NormBackwardClusterKernelConfig.from_short_form("nc1_bf16_w16_c4_k8")
    assert config.clusters(few_sms(config)) == 1


@pytest.mark.parametrize(
    ("width", "dtype", "shapes"),
    [
        (8192, Element.BF16, set()),
        (16384, Element.BF16, {(8, 2)}),
        (16384, Element.FP32, {(16, 2), (8, 4)}),
        (65536, Element.BF16, {(16, 4), (8, 8)}),
        (131072, Element.BF16, {(16, 8)}),
        (131072, Element.FP32, set()),
    ],
)
def test_clusters_compete_whose_blocks_have_a_row_and_half_of_them_would_not(
    width: int, dtype: Element, shapes: set[tuple[int, int]]
) -> None:
    found = competing_clusters(width, dtype)
    assert {(shape["n_warps"], shape["cluster_blocks"]) for shape in found} == shapes


def test_empty_rows_and_columns_are_computed_without_a_kernel(
    bf16: LayerNormBackwardKernelConfig,
) -> None:
    problem = full(1, 10, Element.BF16)
    tensors = {
        tensor.name: torch.full(
            tuple(0 if axis == "row" else 10 for axis in tensor.axes),
            math.nan,
            dtype=DTYPES[tensor.element],
        )
        for tensor in problem.tensors
    }
    found = flash_attention.run(bf16, *problem.arranged(tensors))
    assert found["dx"].shape == (0, 10)
    assert not tensors["dweight"].any() and not tensors["dbias"].any()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mean": None}, ValueError, "mean is missing"),
        ({"x": torch.zeros(3, 10)}, TypeError, "x is torch.float32 and e4_bf16_w4_c4_t128 takes"),
        ({"rstd": torch.zeros(2)}, ValueError, r"rstd has shape \(2,\)"),
        ({"mean": torch.zeros(3).bfloat16()}, TypeError, "mean is torch.bfloat16"),
        ({"weight": torch.zeros(9).bfloat16()}, ValueError, r"weight has shape \(9,\)"),
        ({"dy": torch.zeros(3, 20).bfloat16()[:, ::2]}, ValueError, "dy has stride 2"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes, error: type[Exception], text: str, bf16: LayerNormBackwardKernelConfig
) -> None:
    problem = full(3, 10, Element.BF16)
    tensors = {**draw("normal", problem), **changes}
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *problem.arranged(tensors))


def test_problems_beyond_the_limits_are_refused_with_a_way_out(
    bf16: LayerNormBackwardKernelConfig,
) -> None:
    assert "split the call by rows" in bf16.refusal(NormBackward(2**31, 1))
    assert "split the rows" in bf16.refusal(NormBackward(1, MAX_WIDTH + 1))
    few = bf16.replace(row_threads=8, chunks=1)
    assert "choose a config with more row_threads than 8" in few.refusal(NormBackward(1, 1025))
    assert bf16.refusal(NormBackward(1, 8, rms=True)) == (
        "the problem is one of RMS norm and e4_bf16_w4_c4_t128 computes layer norm: choose a "
        "kernel of RMS norm"
    )


def test_a_kernel_of_one_function_has_the_usual_problem_of_the_other_adapted(
    bf16: LayerNormBackwardKernelConfig,
) -> None:
    rms = RMS_NORM_BACKWARD.progression()[0]
    adapted = rms.supports.adapted(OPERATION.usual)
    assert adapted == replace(OPERATION.usual, rms=True, dbias=False)
    assert bf16.supports.adapted(adapted) == OPERATION.usual


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "e1 fixes chunks 0; choose e3 to e5"),
        ((3, Element.BF16, 8, 0), "chunks 0 is not from 1 to 16"),
        ((3, Element.BF16, 16, 4), "need 144 registers per thread, of which there are 128"),
        ((4, Element.BF16, 4, 9, 32), "need 264 registers per thread, of which there are 255"),
        ((4, Element.BF16, 4, 4, 256), "from 8 to the 128 threads of n_warps 4: choose 32"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LayerNormBackwardKernelConfig(*fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("w1_bf16_w4_c1_t8_s1", "staged_rows 1 is below 2: choose 2 or 3"),
        ("w1_bf16_w16_c4_t512_s4", "need 294,?[0-9]* bytes|over every limit"),
        ("w1_bf16_w32_c1_t512_s2", "need 80 registers per thread, of which there are 64"),
        ("nc1_bf16_w32_c4_k2", "n_warps 32 is not built: choose 8 or 16"),
        ("nc1_bf16_w8_c4_k1", "cluster_blocks 1 is not built: choose 2, 4 or 8"),
    ],
)
def test_a_config_without_room_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config_from_short_form(text)


def test_a_sweep_tries_all_that_fits_into_registers_and_shared_memory() -> None:
    found = [*LAYER_NORM_BACKWARD.sweep(), *RMS_NORM_BACKWARD.sweep()]
    assert {config.step.id for config in found} == {"e3", "e4", "e5", "q1", "q2"}
    assert all(config.smem_bytes <= 99 * 1024 for config in found)
    assert {config.row_threads for config in found if config.step.id == "e4"} == {
        *(8, 16, 32, 64, 128, 256, 512)
    }
