"""Gradients of a diagonal matrix times a matrix: their problem, their bounds, and their kernels in
the simulator."""

from __future__ import annotations

import math

import pytest
import torch
from matrices import each_dtype, padded
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.diagonal_backward import OPERATION
from flash_helpers.operations.diagonal_backward.baselines import run
from flash_helpers.operations.diagonal_backward.inputs import draw
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.diagonal_backward.problems import DISTRIBUTIONS
from flash_helpers.operations.diagonal_backward.reference import reference
from flash_helpers.registry.diagonal_backward import (
    DIAGONAL_BACKWARD,
    DiagonalBackwardKernelConfig,
)
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
WIDTHS = (1, 2, 31, 33, 127, 1000, 2049)

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> DiagonalBackwardKernelConfig:
    return DIAGONAL_BACKWARD.fixed_config(DIAGONAL_BACKWARD.steps["i1"], Element.BF16)


def check(
    config: DiagonalBackwardKernelConfig, *tensors: torch.Tensor | None
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


def drawn(problem: DiagonalBackward, distribution: str = "normal") -> list[torch.Tensor | None]:
    """The inputs, no da, and an empty db if the problem has one."""
    inputs = draw(distribution, problem)
    return [*inputs.values(), None, *([torch.empty_like(inputs["b"])] if problem.db else [])]


# -- the problem and the reference -----------------------------------------------------------------


def test_dc_is_read_once_for_both_gradients() -> None:
    both, alone = (DiagonalBackward(8, 1000, Element.FP32, db=db) for db in (True, False))
    assert (both.bytes, alone.bytes) == (3 * 32000 + 64, 2 * 32000 + 64)
    assert (both.operations, alone.operations) == (3 * 8000, 2 * 8000)
    assert DiagonalBackward.from_record(both.record()) == both


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = DiagonalBackward(6, 300, dtype, db=True)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        assert measure_error(found[name], expected).within(bound)
        finite = expected.isfinite().nonzero()
        if not len(finite):
            continue
        place = tuple(finite[0].tolist())
        found[name][place] = 1.05 * expected.nan_to_num(0.0, 0.0, 0.0).abs().max() + 1
        assert not measure_error(found[name], expected).within(bound)


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: DiagonalBackwardKernelConfig) -> None:
    for number, width in enumerate(WIDTHS):
        a, b, dc = draw("normal", DiagonalBackward(3, width, config.dtype), seed=number).values()
        gap, first = number % 3, number % 5
        b, dc, db = (padded(matrix, gap, first) for matrix in (b, dc, torch.empty_like(b)))
        both = check(config, a, b, dc, None, db)
        alone = check(config, a, b, dc)
        assert both["da"].equal(alone["da"])


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: DiagonalBackwardKernelConfig, distribution: str) -> None:
    check(config, *drawn(DiagonalBackward(5, 301, config.dtype, db=True), distribution))


@each_config
def test_the_corners_of_the_declaration_are_right(config: DiagonalBackwardKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, *drawn(problem))


@each_config
def test_rows_may_begin_at_different_elements_and_nothing_between_is_written(
    config: DiagonalBackwardKernelConfig,
) -> None:
    a, b, dc = draw("normal", DiagonalBackward(2, 555, config.dtype)).values()
    for first in ((2, 2, 1), (1, 2, 2)):
        db = padded(torch.full_like(b, math.nan), gap=2, first=first[2])
        memory = torch.as_strided(db, (2 * 557,), (1,), db.storage_offset())
        check(config, a, padded(b, 3, first[0]), padded(dc, 1, first[1]), None, db)
        assert memory[555:557].isnan().all()
        assert memory[-2:].isnan().all()


@pytest.mark.parametrize("row_threads", [8, 128])
def test_any_number_of_threads_may_have_a_row(
    bf16: DiagonalBackwardKernelConfig, row_threads: int
) -> None:
    config = bf16.replace(row_threads=row_threads, chunks=1)
    check(config, *drawn(DiagonalBackward(17, 515, db=True)))


# -- refusals --------------------------------------------------------------------------------------

A, B = torch.zeros(2).bfloat16(), torch.zeros(2, 10).bfloat16()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((A.float(), B, B), TypeError, "a is torch.float32 and i1_bf16_w4_c4_t32 takes"),
        ((A, B, B.float()), TypeError, "dc is torch.float32"),
        ((A, B, B[:, :9]), ValueError, r"dc has shape \(2, 9\) and b \(2, 10\)"),
        ((torch.zeros(3).bfloat16(), B, B), ValueError, r"a has shape \(3,\) and b"),
        ((torch.zeros(4).bfloat16()[::2], B, B), ValueError, "a has stride 2 in its last"),
        ((A, B, B, None, B), ValueError, "db overlaps"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    given, error: type[Exception], text: str, bf16: DiagonalBackwardKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *given)


def test_a_matrix_without_elements_has_a_gradient_of_0_for_a(
    bf16: DiagonalBackwardKernelConfig,
) -> None:
    found = flash_attention.run(bf16, A, B[:, :0], B[:, :0], None, B[:, :0].clone())
    assert found["da"].equal(A) and found["db"].shape == (2, 0)


def test_few_threads_take_short_rows_alone(bf16: DiagonalBackwardKernelConfig) -> None:
    assert not bf16.refusal(DiagonalBackward(2, 10**9))
    few = bf16.replace(row_threads=8)
    assert "more row_threads than 8" in few.refusal(DiagonalBackward(2, 1025))
