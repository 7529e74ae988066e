"""A diagonal matrix times a matrix: its problem, its bounds, and its kernels in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from matrices import each_dtype, padded
from tiers import ROOT, committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element
from flash_helpers.measure.benchmark_tables import lengths_table
from flash_helpers.measure.results import load_results
from flash_helpers.operations.diagonal import OPERATION
from flash_helpers.operations.diagonal.baselines import MOST_DIAG_ROWS, run
from flash_helpers.operations.diagonal.inputs import draw
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.diagonal.reference import diagonal_reference, reference
from flash_helpers.registry.diagonal import DIAGONAL, DiagonalKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
WIDTHS = (1, 2, 31, 33, 127, 1000, 4099)

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> DiagonalKernelConfig:
    return DIAGONAL.fixed_config(DIAGONAL.steps["k3"], Element.BF16)


def check(
    config: DiagonalKernelConfig, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """Simulate, watched, and compare with the reference."""
    call = prepare(config, a, b, c)
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = diagonal_reference(a, b)
    error = measure_error(call.output, wanted.expected["c"])
    assert error.within(wanted.bounds["c"]), error.excess(wanted.bounds["c"])


# -- the problem -----------------------------------------------------------------------------------


def test_each_element_is_read_once_and_written_once_and_takes_one_product() -> None:
    problem = Diagonal(8, 1000, Element.FP32)
    assert problem.bytes == 2 * 4 * 8 * 1000 + 4 * 8
    assert problem.operations == 8 * 1000
    assert Diagonal.from_record(problem.record()) == problem


@pytest.mark.parametrize("width", MEASURED_WIDTHS)
def test_problems_of_all_measured_widths_move_the_same_bytes(width: int) -> None:
    problem = OPERATION.measured(width)
    assert (problem.width, problem.tensor("b").bytes) == (width, 2**28)


@pytest.mark.parametrize(
    "make", [lambda: Diagonal(0, 5), lambda: Diagonal(5, 0), lambda: Diagonal(2, -1)]
)
def test_a_size_below_1_is_refused(make) -> None:
    with pytest.raises(ValueError, match="is not positive: use 1 or more"):
        make()


# -- the reference ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scaled_rows_of_pytorch_are_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = Diagonal(6, 100, dtype)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    c = run("pytorch", problem, inputs)["c"]
    assert measure_error(c, wanted.expected["c"]).within(wanted.bounds["c"])
    c[2, 5] += 0.05 * c[2].float().nan_to_num(0.0, 0.0, 0.0).abs().max() + 1e-3
    c[3, 7] = math.nan if c[3, 7].isfinite() else 1.0
    rows = measure_error(c, wanted.expected["c"]).rows
    assert rows is not None
    assert rows.max_abs[2] > wanted.bounds["c"].of_elements[2]
    assert not rows.max_abs[3] <= wanted.bounds["c"].of_elements[3]


@each_dtype
def test_the_matrix_product_of_pytorch_is_the_same(dtype: Element) -> None:
    problem = Diagonal(6, 100, dtype)
    inputs = draw("countable", problem)
    scaled, multiplied = (run(name, problem, inputs)["c"] for name in ("pytorch", "diag"))
    assert scaled.equal(multiplied)


def test_a_matrix_product_with_a_diagonal_matrix_of_many_gib_is_refused() -> None:
    problem = Diagonal(MOST_DIAG_ROWS + 1, 1)
    with pytest.raises(ValueError, match="leave out the library"):
        run("diag", problem, {"a": torch.zeros(1), "b": torch.zeros(1, 1)})


def test_a_library_of_the_same_name_of_another_operation_keeps_its_title() -> None:
    results = load_results(ROOT / "benchmarks/results/softmax_h100.json")
    assert results.operation.libraries.keys() & OPERATION.libraries.keys() == {"pytorch", "copy"}
    assert "| torch.softmax |" in lengths_table(results, "bf16", results.main_load)


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_any_width_is_right_in_rows_at_any_element(config: DiagonalKernelConfig) -> None:
    for number, width in enumerate(WIDTHS):
        a, b = draw("normal", Diagonal(3, width, config.dtype), seed=number).values()
        check(config, a, padded(b, gap=number % 3, first=number % 5))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right_to_the_last_bit(
    config: DiagonalKernelConfig, distribution: str
) -> None:
    a, b = draw(distribution, Diagonal(3, 301, config.dtype)).values()
    check(config, a, b)
    found = flash_attention.run(config, a, b)["c"]
    assert torch.equal(found.nan_to_num(7.0), (a[:, None] * b).nan_to_num(7.0))


@each_config
def test_c_may_lie_otherwise_between_multiples_of_16_bytes_than_b(
    config: DiagonalKernelConfig,
) -> None:
    a, b = draw("normal", Diagonal(2, 555, config.dtype)).values()
    c = padded(torch.full_like(b, math.nan), gap=2, first=1)
    memory = torch.as_strided(c, (2 * 557,), (1,), c.storage_offset())
    check(config, a, padded(b, gap=3, first=2), c)
    assert memory[555:557].isnan().all()  # nothing is written between the rows
    assert memory[-2:].isnan().all()


@each_config
def test_the_corners_of_the_declaration_are_right(config: DiagonalKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, *draw("normal", problem).values())


def test_a_may_have_any_stride_and_rows_may_share_memory(bf16: DiagonalKernelConfig) -> None:
    a, b = draw("normal", Diagonal(4, 100)).values()
    check(bf16, a.expand(3, 4).T.contiguous()[:, 1], b)
    check(bf16, a, b[:1].expand(4, -1))
    check(bf16, a[:1].expand(4), b)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 10), (3, 0)])
def test_a_matrix_without_elements_has_an_empty_product(
    shape: tuple[int, int], bf16: DiagonalKernelConfig
) -> None:
    b = torch.zeros(shape, dtype=torch.bfloat16)
    c = flash_attention.run(bf16, b.new_zeros(shape[0]), b)["c"]
    assert (c.shape, c.dtype) == (b.shape, b.dtype)
    with pytest.raises(ValueError, match="one element for each row"):
        flash_attention.run(bf16, b.new_zeros(7), b)


def test_c_may_not_be_b(bf16: DiagonalKernelConfig) -> None:
    b = torch.zeros(2, 10, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="c overlaps b in memory"):
        flash_attention.run(bf16, b.new_zeros(2), b, b)


A, B = torch.zeros(2).bfloat16(), torch.zeros(2, 10).bfloat16()


@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        (A.float(), B.float(), TypeError, "a is torch.float32 and k3_bf16_w8_c4 takes"),
        (A, B.float(), TypeError, "torch.float32"),
        (A, torch.zeros(10, 2).bfloat16().T, ValueError, "last dimension"),
        (A, B[:, ::2], ValueError, "call .contiguous"),
        (A, A, ValueError, "b has 1 dimensions"),
        (torch.zeros(3).bfloat16(), B, ValueError, "one element for each row"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    a: torch.Tensor, b: torch.Tensor, error: type[Exception], text: str, bf16: DiagonalKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, a, b)


def test_more_pieces_than_a_kernel_counts_are_refused(bf16: DiagonalKernelConfig) -> None:
    problem = Diagonal(2**31, 1)
    assert "split the call by rows" in bf16.refusal(problem)
    assert not bf16.refusal(replace(problem, rows=2**31 - 1))
    assert "2147483648 pieces of 1024 elements" in bf16.refusal(Diagonal(2**30, 1025))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "k1 fixes chunks 0; choose k3"),
        ((3, Element.BF16, 33, 4), "n_warps 33 is not from 1 to 32"),
        ((3, Element.BF16, 8), "chunks 0 is not from 1 to 16"),
        ((3, Element.FP8, 8, 4), "family diagonal has"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DiagonalKernelConfig(*fields)
