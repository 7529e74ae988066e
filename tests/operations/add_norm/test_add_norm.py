"""Layer norm and RMS norm of a sum: their problem, their bounds, and kernels in the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from matrices import DTYPES, each_dtype, padded, spread
from tiers import committed, each

from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.kernel_configs import Element, config_from_short_form
from flash_helpers.operations.add_norm import OPERATION
from flash_helpers.operations.add_norm.baselines import run
from flash_helpers.operations.add_norm.inputs import draw
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.add_norm.reference import reference
from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.registry.add_norm import ADD_NORM, AddNormKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
each_config = each(CONFIGS)
each_function = pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])


def full(rows: int, width: int, dtype: Element, *, rms: bool = False) -> AddNorm:
    """The problem with all tensors."""
    given = {"weight": True, "bias": True, "mean": not rms, "rstd": True}
    return AddNorm(rows, width, dtype, rms=rms, **given)


def wrong(outputs: Mapping[str, torch.Tensor], wanted: Reference) -> list[str]:
    """Names of the outputs that are not within their bounds."""
    errors = {name: measure_error(outputs[name], wanted.expected[name]) for name in wanted.expected}
    return [name for name, error in errors.items() if not error.within(wanted.bounds[name])]


def check(
    config: AddNormKernelConfig,
    problem: AddNorm,
    tensors: Mapping[str, torch.Tensor],
    **outputs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Simulate, watched, compare all outputs with the reference, and return them."""
    given = {
        tensor.name: torch.full(tensor.shape, math.nan, dtype=DTYPES[tensor.element])
        for tensor in problem.outputs
    }
    given |= outputs
    call = prepare(config, *problem.arranged({**tensors, **given}), **problem.call_options())
    assert not call.simulate(keep_going=True).faults
    assert not wrong(given, reference(problem, tensors))
    return given


# -- the problem and the reference -----------------------------------------------------------------


def test_each_tensor_that_is_given_is_moved_once() -> None:
    problem = AddNorm(8, 1000, Element.FP32)
    assert problem.bytes == 4 * 4 * 8 * 1000
    assert full(8, 1000, Element.FP32).bytes == problem.bytes + 2 * 4 * 1000 + 2 * 4 * 8
    assert problem.operations == 8 * 8 * 1000
    assert AddNorm.from_record(problem.record()) == problem


@each_function
@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_read_as_much_of_x_as_those_of_norms(
    width: int, rms: bool
) -> None:
    problem = OPERATION.measured(width, rms=rms)
    assert (problem.width, problem.tensor("x").bytes) == (width, 2**28)
    assert (problem.weight, problem.bias) == (True, not rms)


@each_function
@each_dtype
def test_the_reference_is_the_norm_of_the_rounded_sum(dtype: Element, rms: bool) -> None:
    problem = full(5, 129, dtype, rms=rms)
    inputs = draw("normal", problem)
    assert not inputs["x"].equal(inputs["residual"])
    rounded = inputs["x"] + inputs["residual"]
    found = reference(problem, inputs).expected
    torch.testing.assert_close(found["sum"].to(rounded.dtype), rounded, rtol=0, atol=0)
    scaled = [inputs[name].double() for name in ("weight", "bias")]
    if rms:
        y = torch.nn.functional.rms_norm(rounded.double(), (129,), scaled[0], problem.eps)
        y = y + scaled[1]
    else:
        y = torch.nn.functional.layer_norm(rounded.double(), (129,), *scaled, problem.eps)
    torch.testing.assert_close(found["y"], y, rtol=1e-9, atol=1e-9)


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["y", "sum"])
def test_rounded_results_are_within_the_bound_and_an_error_of_one_element_is_not(
    name: str, distribution: str, dtype: Element
) -> None:
    problem = full(4, 1000, dtype)
    wanted = reference(problem, draw(distribution, problem))
    found = {
        key: x.to(torch.float32 if x.ndim == 1 else DTYPES[dtype])
        for key, x in wanted.expected.items()
    }
    assert not wrong(found, wanted)
    values = found[name][2]
    place = int(values.float().abs().argmax())
    values[place] = values[place] * 1.05
    assert wrong(found, wanted) == [name]


def test_libraries_compute_the_problem_and_a_copy_is_not_verified() -> None:
    problem = AddNorm(3, 50, Element.FP32, weight=True, bias=True)
    inputs = draw("normal", problem)
    assert OPERATION.ceiling in OPERATION.libraries
    assert run("copy", problem, inputs)["sum"].equal(inputs["residual"])
    assert not wrong(run("pytorch_add_norm", problem, inputs), reference(problem, inputs))


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: AddNormKernelConfig) -> None:
    for n, width in enumerate((1, 2, 33, 136, 1000)):
        problem = full(2, width, config.dtype, rms=config.rms)
        tensors = draw("normal", problem, seed=n)
        at = {"x": (n % 3, n % 5), "residual": (n % 2, 8), "weight": (0, n % 4), "bias": (0, n % 3)}
        check(config, problem, {name: padded(tensors[name], *where) for name, where in at.items()})


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: AddNormKernelConfig, distribution: str) -> None:
    problem = full(3, 264, config.dtype, rms=config.rms)
    check(config, problem, draw(distribution, problem))


@each(CONFIGS, once=True)
def test_results_do_not_depend_on_where_rows_begin(config: AddNormKernelConfig) -> None:
    problem = full(3, 264, config.dtype, rms=config.rms)
    tensors = draw("outliers", problem)
    aligned = check(config, problem, tensors)
    for name in ("x", "residual", "weight", "bias"):
        elsewhere = check(config, problem, {**tensors, name: padded(tensors[name], 3, 1)})
        assert all(x.equal(elsewhere[output]) for output, x in aligned.items()), name


@each_config
@pytest.mark.parametrize("name", ["y", "sum"])
def test_nothing_is_written_between_rows(config: AddNormKernelConfig, name: str) -> None:
    problem = full(2, 55, config.dtype, rms=config.rms)
    tensors = draw("normal", problem)
    rows = spread(tensors["x"], gap=2, first=1)
    memory = torch.as_strided(rows, (2 * 57,), (1,), rows.storage_offset())
    check(config, problem, tensors, **{name: rows})
    assert memory[55:57].isnan().all() and memory[-2:].isnan().all()


@each_config
def test_weight_bias_and_statistics_may_be_left_out(config: AddNormKernelConfig) -> None:
    for given in ({}, {"weight": True}, {"bias": True}, {"rstd": True}):
        problem = AddNorm(3, 72, config.dtype, rms=config.rms, eps=1e-3, **given)
        check(config, problem, draw("normal", problem))


@each(CONFIGS, at_corners=True)
def test_the_corners_of_the_declaration_are_right(config: AddNormKernelConfig) -> None:
    for problem in config.supports.corners():
        if problem.width < 5000:
            check(config, problem, draw("normal", problem))


@pytest.mark.parametrize("distribution", ["far_mean", "not_finite"])
@pytest.mark.parametrize(
    ("text", "rows", "width"),
    [
        ("an1_bf16_w4_c1_t8", 17, 64),
        ("an1_bf16_w4_c2_t8_rms", 17, 127),  # no whole chunks
        ("an1_fp16_w4_c4_t32", 5, 1000),
        ("an1_fp32_w4_c1_t32_rms", 5, 264),  # longer than the registers
        ("an1_bf16_w4_c1_t64", 3, 1999),
        ("an1_fp32_w8_c2_t256", 2, 2052),
    ],
)
def test_rows_of_a_few_threads_and_rows_longer_than_the_registers_are_right(
    text: str, rows: int, width: int, distribution: str
) -> None:
    config = config_from_short_form(text)
    assert isinstance(config, AddNormKernelConfig)
    problem = full(rows, width, config.dtype, rms=config.rms)
    check(config, problem, draw(distribution, problem))


# -- calls and refusals ----------------------------------------------------------------------------


@pytest.fixture
def bf16() -> AddNormKernelConfig:
    return ADD_NORM.fixed_config(ADD_NORM.steps["an1"], Element.BF16)


def test_one_launch_has_the_strides_of_all_matrices(bf16: AddNormKernelConfig) -> None:
    problem = full(7, 1000, Element.BF16)
    (launch,) = bf16.call(problem, problem.strides(), None).launches
    assert (launch.grid[0], launch.block) == (7, 128)
    assert {name for name in launch.values if name.endswith("_stride")} == {
        *("x_stride", "residual_stride", "y_stride", "sum_stride")
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("an1_bf16_w16_c8_t512", "need 144 registers per thread, of which there are 128"),
        ("an1_bf16_w8_c16_t256", "chunks 16 is over 8: choose 4 or 8"),
        ("an1_bf16_w4_c4_t256", "from 8 to the 128 threads of n_warps 4: choose 32"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config_from_short_form(text)


def test_a_kernel_of_one_function_refuses_the_other(bf16: AddNormKernelConfig) -> None:
    assert "choose a kernel of RMS norm" in bf16.refusal(AddNorm(2, 8, rms=True))
    rms = bf16.replace(rms=True)
    assert rms.supports.adapted(OPERATION.usual) == replace(OPERATION.usual, rms=True, bias=False)
