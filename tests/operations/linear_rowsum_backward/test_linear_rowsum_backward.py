"""Gradients of a linear layer, summed by row: their problem, their bounds, and their kernels in the
simulator."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from matrices import each_dtype, padded
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.linear_rowsum_backward import OPERATION
from flash_helpers.operations.linear_rowsum_backward.baselines import run
from flash_helpers.operations.linear_rowsum_backward.inputs import draw
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.linear_rowsum_backward.reference import reference
from flash_helpers.registry.linear_rowsum_backward import (
    LINEAR_ROWSUM_BACKWARD,
    LinearRowsumBackwardKernelConfig,
)
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
GRADIENTS = ("dx", "dweight", "dbias")
ALL = dict.fromkeys(GRADIENTS, True)
SIZES = ((1, 1, 2), (2, 7, 70), (65, 8, 3), (35, 259, 33))  # rows, features, rows of W

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> LinearRowsumBackwardKernelConfig:
    return LINEAR_ROWSUM_BACKWARD.fixed_config(LINEAR_ROWSUM_BACKWARD.steps["lb2"], Element.BF16)


def check(
    config: LinearRowsumBackwardKernelConfig, *tensors: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Simulate, watched, and compare with the reference; return all tensors."""
    call = prepare(config, *tensors)
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = reference(call.problem, call.tensors)
    for name, expected in wanted.expected.items():
        error = measure_error(call.tensors[name], expected)
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))
    return call.tensors


def drawn(
    problem: LinearRowsumBackward, distribution: str = "normal", seed: int = 0
) -> list[torch.Tensor | None]:
    """The inputs, and memory full of NaN for the gradients that the problem asks for."""
    inputs = draw(distribution, problem, seed=seed)
    shapes = (inputs["x"], inputs["weight"], inputs["weight"][:, 0])
    outputs = (
        torch.full_like(x, math.nan) if getattr(problem, name) else None
        for name, x in zip(GRADIENTS, shapes, strict=True)
    )
    return [*inputs.values(), *outputs]


# -- the problem and the reference -----------------------------------------------------------------


def test_x_and_w_are_read_once_and_only_for_the_gradients_that_need_them() -> None:
    problem = LinearRowsumBackward(8, 100, 50, Element.FP32, **ALL)
    assert problem.bytes == 4 * (8 + 2 * 8 * 100 + 2 * 50 * 100 + 50)
    alone = [LinearRowsumBackward(8, 100, 50, Element.FP32, **{name: True}) for name in GRADIENTS]
    assert [each.bytes for each in alone] == [
        4 * (8 + 50 * 100 + 8 * 100),
        4 * (8 + 8 * 100 + 50 * 100),
        4 * (8 + 50),
    ]
    assert [each.operations for each in alone] == [5000 + 800, 1600, 8]
    assert LinearRowsumBackward.from_record(problem.record()) == problem


@pytest.mark.parametrize(
    ("sizes", "asked", "text"),
    [
        ((0, 5, 5), ALL, "rows 0 is not positive"),
        ((5, 5, -1), ALL, "out_features -1 is not positive"),
        ((5, 5, 5), {}, "pass dx, dweight or dbias"),
    ],
)
def test_a_problem_without_elements_or_gradients_is_refused(sizes, asked, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinearRowsumBackward(*sizes, **asked)


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_reference_is_what_autograd_computes_in_float64(
    distribution: str, dtype: Element
) -> None:
    problem = LinearRowsumBackward(5, 33, 40, dtype, **ALL)
    inputs = draw(distribution, problem)
    dy, x, weight = (inputs[name].double() for name in ("dy", "x", "weight"))
    leaves = [x.requires_grad_(), weight.requires_grad_(), torch.zeros(40).double()]
    y = torch.nn.functional.linear(*leaves[:2], leaves[2].requires_grad_()).sum(-1)
    expected = reference(problem, inputs).expected
    for name, right in zip(GRADIENTS, torch.autograd.grad(y, leaves, dy), strict=True):
        torch.testing.assert_close(expected[name], right)


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = LinearRowsumBackward(6, 50, 30, dtype, **ALL)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("algebra", problem, inputs)
    assert run("pytorch", problem, inputs).keys() == found.keys() == wanted.bounds.keys()
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        assert measure_error(found[name], expected).within(bound)
        found[name][(3,) * expected.ndim] += 0.02 * expected.abs().max()
        assert not measure_error(found[name], expected).within(bound)


def test_a_row_of_w_less_or_a_row_of_x_without_its_dy_is_out_of_bounds() -> None:
    problem = LinearRowsumBackward(40, 50, 30, Element.BF16, **ALL)
    inputs = draw("normal", problem)
    wanted = reference(problem, inputs)
    for wrong, name in (
        ({**inputs, "weight": inputs["weight"][:-1]}, "dx"),
        ({**inputs, "dy": torch.cat([inputs["dy"][:-1], torch.ones(1).bfloat16()])}, "dweight"),
    ):
        found = run("algebra", replace(problem, dbias=False), wrong)[name]
        assert not measure_error(found, wanted.expected[name]).within(wanted.bounds[name])


def test_a_copy_moves_as_many_bytes_as_the_matrices_have() -> None:
    problem = LinearRowsumBackward(6, 10, 4, **ALL)
    found = run("copy", problem, draw("normal", problem))
    assert {name: x.shape for name, x in found.items()} == {"dx": (6, 10), "dweight": (4, 10)}


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_size_is_right_in_rows_at_any_element(
    config: LinearRowsumBackwardKernelConfig, sizes: tuple[int, int, int]
) -> None:
    problem = LinearRowsumBackward(*sizes, config.dtype, **ALL)
    given = drawn(problem, seed=sum(sizes))
    moved = [
        x if x.ndim == 1 else padded(x, gap=(n + 1) % 3, first=(sum(sizes) + n) % 5)
        for n, x in enumerate(given)
    ]
    plain, found = check(config, *given), check(config, *moved)
    assert all(found[name].equal(plain[name]) for name in GRADIENTS)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: LinearRowsumBackwardKernelConfig, distribution: str) -> None:
    check(config, *drawn(LinearRowsumBackward(5, 40, 70, config.dtype, **ALL), distribution))


@each(CONFIGS, at_corners=True)
def test_the_corners_of_the_declaration_are_right(
    config: LinearRowsumBackwardKernelConfig,
) -> None:
    for problem in config.supports.corners():
        check(config, *drawn(problem))


@each(CONFIGS, once=True)
def test_a_gradient_has_the_same_bits_whatever_else_is_asked_for(
    config: LinearRowsumBackwardKernelConfig,
) -> None:
    sizes = (35, 20, 40)
    every = check(config, *drawn(LinearRowsumBackward(*sizes, config.dtype, **ALL)))
    for asked in itertools.product((False, True), repeat=3):
        if any(asked):
            wanted = dict(zip(GRADIENTS, asked, strict=True))
            found = check(config, *drawn(LinearRowsumBackward(*sizes, config.dtype, **wanted)))
            assert all(found[name].equal(every[name]) for name in GRADIENTS if wanted[name])


@each(CONFIGS, once=True)
def test_nothing_between_rows_is_written_and_the_vectors_may_have_any_stride(
    config: LinearRowsumBackwardKernelConfig,
) -> None:
    problem = LinearRowsumBackward(3, 21, 5, config.dtype, **ALL)
    dy, x, weight, dx, dweight, _ = drawn(problem)
    dx, dweight = padded(dx, gap=2, first=1), padded(dweight, gap=3, first=0)
    spread = torch.full((5, 3), math.nan, dtype=x.dtype)
    apart = dy[:, None].expand(3, 2).contiguous()[:, 1]
    found = check(config, apart, x, weight, dx, dweight, spread[:, 1])
    assert found["dbias"].stride() == (3,) and not spread[:, 1].isnan().any()
    assert spread[:, ::2].isnan().all()
    for matrix, gap in ((dx, 2), (dweight, 3)):
        size = matrix.shape[0] * (21 + gap)
        memory = torch.as_strided(matrix, (size,), (1,), matrix.storage_offset())
        assert memory.reshape(-1, 21 + gap)[:, 21:].isnan().all()
    check(config, dy[:1].expand(3), x, weight, dx)  # one element for all rows


@pytest.mark.parametrize(("n_warps", "rows"), [(1, 1), (4, 16), (16, 128)])
def test_any_number_of_warps_and_rows_is_right(
    n_warps: int, rows: int, bf16: LinearRowsumBackwardKernelConfig
) -> None:
    config = bf16.replace(n_warps=n_warps, rows=rows)
    check(config, *drawn(LinearRowsumBackward(17, 72, 33, **ALL)))


def test_a_nan_of_dy_is_in_its_row_of_dx_and_in_all_of_dw(
    bf16: LinearRowsumBackwardKernelConfig,
) -> None:
    given = drawn(LinearRowsumBackward(5, 40, 70, **ALL))
    given[0][2] = math.nan
    found = check(bf16, *given)
    assert found["dx"].isnan().any(1).tolist() == [False, False, True, False, False]
    assert found["dweight"].isnan().all() and found["dbias"].isnan().all()


def test_a_nan_of_x_or_w_is_in_its_column(bf16: LinearRowsumBackwardKernelConfig) -> None:
    given = drawn(LinearRowsumBackward(5, 40, 70, **ALL))
    given[1][2, 3] = given[2][69, 39] = math.nan
    found = check(bf16, *given)
    assert found["dweight"].isnan().all(0).nonzero().tolist() == [[3]]
    assert found["dx"].isnan().all(0).nonzero().tolist() == [[39]]
    assert not found["dbias"].isnan().any()


# -- launches --------------------------------------------------------------------------------------


def test_thread_blocks_that_sum_are_bounded_by_the_number_of_sms(
    bf16: LinearRowsumBackwardKernelConfig,
) -> None:
    device = replace(largest_device(90), sms=132)
    problem = OPERATION.measured(4096)
    columns, combine, rows = bf16.call(problem, problem.strides(), device).launches
    assert columns.grid[0] == 2 * 16 * 33  # of each matrix 16 tiles of 256 columns, 33 pieces
    assert combine.grid[0] == 2 * (4096 // 32 + 1)
    assert rows.grid[0] == 2 * 16 * 4096 // 64
    many = replace(problem, rows=2**20, dx=False, dbias=False)
    (partial, _) = bf16.call(many, many.strides(), device).buffers
    assert partial.bytes == 33 * 4104 * 4


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_and_weight", [((0, 5), (3, 5)), ((2, 0), (3, 0)), ((2, 5), (0, 5))])
def test_a_call_without_elements_is_computed_without_a_kernel(
    x_and_weight, bf16: LinearRowsumBackwardKernelConfig
) -> None:
    x, weight = (torch.ones(size, dtype=torch.bfloat16) for size in x_and_weight)
    dy = torch.full(x.shape[:1], 3.0, dtype=torch.bfloat16)
    given = (torch.full_like(each, math.nan) for each in (x, weight, weight.new_empty(len(weight))))
    found = flash_attention.run(bf16, dy, x, weight, *given)
    assert not found["dx"].any() and not found["dweight"].any()
    assert found["dbias"].tolist() == [3.0 * len(x)] * len(weight)


DY, X, W = torch.zeros(2).bfloat16(), torch.zeros(2, 10).bfloat16(), torch.zeros(3, 10).bfloat16()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((DY.float(), X, W, X.clone()), TypeError, "dy is torch.float32 and lb2_bf16_w8_r64 takes"),
        ((DY, X, W.half(), X.clone()), TypeError, "torch.float16"),
        ((DY, X, W[:, :9], X.clone()), ValueError, "in_features must be equal"),
        ((DY[:1], X, W, X.clone()), ValueError, r"dy has shape \(1,\) and x \(2, 10\)"),
        ((DY, X, W, W.clone()), ValueError, r"dx must have shape \(2, 10\)"),
        ((DY, X, W, None, None, torch.zeros(4).bfloat16()), ValueError, "dbias must have shape"),
        ((DY, X, torch.zeros(10, 3).bfloat16().T, X.clone()), ValueError, "last dimension"),
        ((DY, X, W, X), ValueError, "dx overlaps"),
        ((DY, X, W), ValueError, "no gradient is asked for"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    given, error: type[Exception], text: str, bf16: LinearRowsumBackwardKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *given)


def test_sizes_that_a_kernel_cannot_count_are_refused(
    bf16: LinearRowsumBackwardKernelConfig,
) -> None:
    assert "split the call by rows" in bf16.refusal(LinearRowsumBackward(2**30 + 1, 1, 1, dx=True))
    assert not bf16.refusal(LinearRowsumBackward(2**30, 1, 1, dx=True))
    assert "of a CUDA grid" in bf16.refusal(LinearRowsumBackward(2**30, 2**30, 1, dx=True))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((2, Element.BF16, 33, 64), "n_warps 33 is not from 1 to 32"),
        ((1, Element.BF16, 4, 64), "lb1 fixes n_warps 8; choose lb2"),
        ((2, Element.BF16, 8, 0), "rows 0 is not from 1 to 1024"),
        ((2, Element.FP8, 8, 64), "family linear_rowsum_backward has"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinearRowsumBackwardKernelConfig(*fields)
