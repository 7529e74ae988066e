"""Gradients of softmax along rows: their problem, their bounds, and their kernels in the
simulator."""

from __future__ import annotations

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
from flash_helpers.operations.rows_backward import OPERATION
from flash_helpers.operations.rows_backward.baselines import gradient, run
from flash_helpers.operations.rows_backward.grid import GROUPS, competing
from flash_helpers.operations.rows_backward.inputs import draw
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.rows_backward.reference import reference
from flash_helpers.registry.row_threads import MAX_WIDTH
from flash_helpers.registry.rows_backward import SOFTMAX_BACKWARD, SoftmaxBackwardKernelConfig
from flash_helpers.registry.softmax_backward_cluster import SoftmaxBackwardClusterKernelConfig
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.simulator import run_shipped
from flash_helpers.tune.choices import competitors

CONFIGS = committed(OPERATION)
WIDTHS = (1, 2, 31, 33, 127, 1000, 2049)

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> SoftmaxBackwardKernelConfig:
    return SOFTMAX_BACKWARD.fixed_config(SOFTMAX_BACKWARD.steps["f1"], Element.BF16)


def check(
    config: SoftmaxBackwardKernelConfig,
    y: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Simulate, watched, and compare with the reference."""
    call = prepare(config, y, dy, dx)
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = reference(RowsBackward(*y.shape, config.dtype), {"y": y, "dy": dy})
    error = measure_error(call.output, wanted.expected["dx"])
    assert error.within(wanted.bounds["dx"]), error.excess(wanted.bounds["dx"])
    return call.output


# -- the problem -----------------------------------------------------------------------------------


def test_two_matrices_are_read_once_and_one_is_written_once() -> None:
    problem = RowsBackward(8, 1000, Element.FP32)
    assert problem.bytes == 3 * 4 * 8 * 1000
    assert problem.operations == 4 * 8 * 1000
    assert RowsBackward.from_record(problem.record()) == problem


@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_move_the_same_bytes(width: int) -> None:
    problem = OPERATION.measured(width)
    assert (problem.width, problem.bytes) == (width, 3 * 2**28)


# -- the reference ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_an_error_of_one_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = RowsBackward(5, 400, dtype)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    bound = wanted.bounds["dx"]
    for dx in (run("pytorch", problem, inputs)["dx"], gradient(**inputs)):
        assert measure_error(dx, wanted.expected["dx"]).within(bound)
    rows = wanted.expected["dx"].isfinite().all(-1).nonzero().flatten()
    place = int(rows[0]), int(wanted.expected["dx"][rows[0]].abs().argmax())
    for wrong in (1.3 * dx[place] + 1e-3, math.nan):
        dx[place] = wrong
        assert not measure_error(dx, wanted.expected["dx"]).within(bound)


def test_the_formula_is_the_gradient_of_softmax() -> None:
    x = torch.randn(4, 30, dtype=torch.float64, requires_grad=True)
    y, dy = torch.softmax(x, -1), torch.randn(4, 30, dtype=torch.float64)
    (right,) = torch.autograd.grad(y, x, dy)
    inputs = {"y": y.detach().float(), "dy": dy.float()}
    found = reference(RowsBackward(4, 30, Element.FP32), inputs).expected["dx"]
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: SoftmaxBackwardKernelConfig) -> None:
    for number, width in enumerate(WIDTHS):
        y, dy = draw("normal", RowsBackward(3, width, config.dtype), seed=number).values()
        gap, first = number % 3, number % 5
        y, dy, dx = (padded(matrix, gap, first) for matrix in (y, dy, torch.empty_like(y)))
        together = check(config, y, dy, dx)
        torch.testing.assert_close(check(config, y.contiguous(), dy), together)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: SoftmaxBackwardKernelConfig, distribution: str) -> None:
    check(config, *draw(distribution, RowsBackward(5, 301, config.dtype)).values())


@each_config
def test_the_corners_of_the_declaration_are_right(config: SoftmaxBackwardKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, *draw("normal", problem).values())


@each_config
def test_rows_may_begin_at_different_elements_and_nothing_between_is_written(
    config: SoftmaxBackwardKernelConfig,
) -> None:
    y, dy = draw("normal", RowsBackward(2, 555, config.dtype)).values()
    for first in ((2, 2, 1), (1, 2, 1), (1, 2, 2)):
        dx = padded(torch.full_like(y, math.nan), gap=2, first=first[2])
        memory = torch.as_strided(dx, (2 * 557,), (1,), dx.storage_offset())
        check(config, padded(y, 3, first[0]), padded(dy, 1, first[1]), dx)
        assert memory[555:557].isnan().all()
        assert memory[-2:].isnan().all()


@pytest.mark.parametrize("row_threads", [8, 64, 128])
def test_any_number_of_threads_may_have_a_row(
    bf16: SoftmaxBackwardKernelConfig, row_threads: int
) -> None:
    config = bf16.replace(row_threads=row_threads, chunks=1)
    for width in (64, 515):
        y, dy = draw("far_mean", RowsBackward(17, width)).values()
        first, again = (check(config, y, dy) for _ in range(2))
        assert first.equal(again)


def test_kernels_that_compete_hold_a_row_in_registers_up_to_a_width() -> None:
    for problems in GROUPS.values():
        for problem in problems:
            assert not any(config.refusal(problem) for config in competitors(problem))
            configs = [
                SOFTMAX_BACKWARD.config(1, problem.dtype, **fields)
                for step, fields in competing(problem)
                if step == "f1"
            ]
            held = [config.pass_elements >= problem.width for config in configs]
            assert all(held) or problem.width * problem.dtype.bytes > 2**16


@pytest.mark.parametrize("distribution", ["normal", "far_mean", "special"])
@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("t1_bf16_w16_c2_k1", 8000),  # chunks of three rows and a half in the ring
        ("t1_fp16_w16_c1_k2", 8192),  # as many as the registers of a cluster hold
        ("t1_bf16_w16_c1_k2", 999),  # no whole chunks
        ("t1_fp32_w16_c1_k4", 20),  # fewer chunks than blocks have threads
        ("t1_fp32_w16_c1_k1", 2052),  # longer than the registers
    ],
)
def test_a_block_or_a_cluster_has_one_row_after_the_other(
    text: str, width: int, distribution: str
) -> None:
    config = SoftmaxBackwardClusterKernelConfig.from_short_form(text)
    device = replace(largest_device(90), sms=1)
    problem = RowsBackward(5, width, config.dtype)
    assert config.clusters(device) < problem.rows
    drawn = draw(distribution, problem)
    dx = torch.full_like(drawn["y"], math.nan)
    run_shipped(config, {**drawn, "dx": dx}, device=device)
    right = reference(problem, drawn)
    assert measure_error(dx, right.expected["dx"]).within(right.bounds["dx"])


# -- refusals --------------------------------------------------------------------------------------

Y = torch.zeros(2, 10).bfloat16()


@pytest.mark.parametrize(
    ("y", "dy", "error", "text"),
    [
        (Y.float(), Y, TypeError, "y is torch.float32 and f1_bf16_w4_c4_t32 takes"),
        (Y, Y.float(), TypeError, "dy is torch.float32"),
        (Y, Y[:, :9], ValueError, r"dy has shape \(2, 9\) and y \(2, 10\): all sizes must be equ"),
        (Y[:, ::2], Y[:, :5], ValueError, "call .contiguous"),
        (Y[:, :0], Y[:, :0], ValueError, "y has column 0"),
        (Y[:1, :1].expand(1, MAX_WIDTH + 1),) * 2
        + (ValueError, "width 131073 is over the limit 131072"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    y: torch.Tensor,
    dy: torch.Tensor,
    error: type[Exception],
    text: str,
    bf16: SoftmaxBackwardKernelConfig,
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, y, dy)


def test_dx_may_not_be_dy(bf16: SoftmaxBackwardKernelConfig) -> None:
    dy = Y.clone()
    with pytest.raises(ValueError, match="dx overlaps dy in memory"):
        flash_attention.run(bf16, Y, dy, dy)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 16, 16, 512), "need 176 registers per thread, of which there are 128"),
        ((1, Element.BF16, 4, 4, 4), "row_threads 4 is not a power of two from 8"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SoftmaxBackwardKernelConfig(*fields)
