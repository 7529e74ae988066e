"""A linear layer, summed by row: its problem, its bounds, and its kernels in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from matrices import each_dtype, padded
from tiers import committed, each
from zeroed_buffers import ZeroedBuffers

import flash_attention
from flash_helpers.check.debugging import rows_text
from flash_helpers.check.errors import measure_error
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.linear_rowsum import OPERATION
from flash_helpers.operations.linear_rowsum.baselines import run
from flash_helpers.operations.linear_rowsum.inputs import draw
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.problems import DISTRIBUTIONS
from flash_helpers.operations.linear_rowsum.reference import linear_rowsum_reference, reference
from flash_helpers.registry.linear_rowsum import LINEAR_ROWSUM, LinearRowsumKernelConfig
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.simulator import run_shipped

CONFIGS = committed(OPERATION)
SIZES = ((1, 1, 2), (2, 7, 3), (3, 8, 65), (5, 259, 33))  # rows, features, rows of W

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> LinearRowsumKernelConfig:
    return LINEAR_ROWSUM.fixed_config(LINEAR_ROWSUM.steps["l5"], Element.BF16)


def check(
    config: LinearRowsumKernelConfig,
    inputs: dict[str, torch.Tensor],
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Simulate, watched, and compare with the reference. Returns y."""
    call = prepare(config, inputs["x"], inputs["weight"], inputs.get("bias"), y)
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = linear_rowsum_reference(inputs)
    error = measure_error(call.output, wanted.expected["y"])
    assert error.within(wanted.bounds["y"]), error.excess(wanted.bounds["y"])
    return call.output


# -- the problem -----------------------------------------------------------------------------------


def test_inputs_are_read_once_and_operations_are_those_of_the_linear_layer() -> None:
    problem = LinearRowsum(8, 100, 50, Element.FP32, bias=True)
    assert problem.bytes == 4 * (8 * 100 + 50 * 100 + 50 + 8)
    assert problem.operations == 8 * 50 * (100 + 100 + 2)
    assert replace(problem, bias=False).bytes == problem.bytes - 4 * 50
    assert LinearRowsum.from_record(problem.record()) == problem


@pytest.mark.parametrize("sizes", [(0, 5, 5), (5, 0, 5), (5, 5, -1)])
def test_a_size_below_1_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not positive: use 1 or more"):
        LinearRowsum(*sizes)


# -- the reference ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_reference_is_the_sum_of_the_outputs_in_float64(
    distribution: str, dtype: Element
) -> None:
    problem = LinearRowsum(5, 129, 40, dtype, bias=True)
    inputs = draw(distribution, problem)
    x, weight, bias = (inputs[name].double() for name in ("x", "weight", "bias"))
    expected = reference(problem, inputs).expected["y"]
    torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight, bias).sum(-1))


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_a_row_without_the_bias_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = LinearRowsum(6, 100, 300, dtype, bias=True)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    expected, bound = wanted.expected["y"], wanted.bounds["y"]
    for library in ("pytorch", "algebra"):
        y = run(library, problem, inputs)["y"]
        assert measure_error(y, expected).max_abs < math.inf
        if library == "pytorch":
            assert measure_error(y, expected).within(bound)
            y[2] -= inputs["bias"].sum()
            assert not measure_error(y, expected).within(bound)


def test_a_sum_beyond_the_range_of_the_dtype_is_infinite() -> None:
    ones = torch.ones(3, 500, dtype=torch.float16)
    ones[1] = 0.5
    wanted = reference(
        LinearRowsum(3, 500, 200, Element.FP16), {"x": ones, "weight": ones[:1].expand(200, -1)}
    )
    assert wanted.expected["y"].tolist() == [math.inf, 50000.0, math.inf]
    y = torch.tensor([math.inf, 50000.0, math.inf], dtype=torch.float16)
    assert measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])
    y[0] = 65504.0
    assert not measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])


def test_a_copy_moves_as_many_bytes_as_x_and_w_have() -> None:
    problem = LinearRowsum(6, 10, 4)
    assert run("copy", problem, draw("normal", problem))["y"].shape == (3, 10)


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_size_is_right_in_rows_at_any_element(
    config: LinearRowsumKernelConfig, sizes: tuple[int, int, int]
) -> None:
    number = sum(sizes)
    inputs = draw("normal", LinearRowsum(*sizes, config.dtype, bias=number % 2 == 0), seed=number)
    inputs["x"] = padded(inputs["x"], gap=number % 3, first=number % 5)
    inputs["weight"] = padded(inputs["weight"], gap=number % 4, first=number % 7)
    check(config, inputs)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: LinearRowsumKernelConfig, distribution: str) -> None:
    check(config, draw(distribution, LinearRowsum(5, 40, 70, config.dtype, bias=True)))


@each(CONFIGS, at_corners=True)
def test_the_corners_of_the_declaration_are_right(config: LinearRowsumKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, draw("normal", problem))


@each(CONFIGS, once=True)
def test_two_calls_give_the_same_bits_and_the_way_of_loading_does_not_matter(
    config: LinearRowsumKernelConfig,
) -> None:
    inputs = draw("normal", LinearRowsum(5, 48, 70, config.dtype, bias=True))
    first = check(config, inputs)
    moved = {**inputs, "x": padded(inputs["x"], 1, 1), "weight": padded(inputs["weight"], 3, 1)}
    assert first.equal(check(config, inputs)) and first.equal(check(config, moved))


def test_bias_and_y_may_have_any_stride(bf16: LinearRowsumKernelConfig) -> None:
    inputs = draw("normal", LinearRowsum(5, 40, 70, bias=True))
    inputs["bias"] = inputs["bias"][:, None].expand(70, 3).contiguous()[:, 1]
    y = torch.full((5, 2), math.nan, dtype=torch.bfloat16)
    check(bf16, inputs, y[:, 1])
    assert y[:, 0].isnan().all()


def test_a_nan_of_x_stays_in_its_row_and_one_of_w_does_not(bf16: LinearRowsumKernelConfig) -> None:
    inputs = draw("normal", LinearRowsum(5, 40, 70, bias=True))
    inputs["x"][2, 13] = math.nan
    assert check(bf16, inputs).isnan().tolist() == [False, False, True, False, False]
    inputs["weight"][69, 39] = math.nan
    y = flash_attention.run(bf16, inputs["x"], inputs["weight"], inputs["bias"])["y"]
    assert y.isnan().all()


def test_the_debugger_shows_a_vector_as_one_row() -> None:
    assert rows_text({"y": torch.tensor([1.0, 2.0])}).splitlines() == [
        "y",
        "     0:          1          2",
    ]


# -- launches --------------------------------------------------------------------------------------


def test_the_columns_of_a_large_w_have_four_thread_blocks_per_sm(
    bf16: LinearRowsumKernelConfig,
) -> None:
    problem = OPERATION.measured(4096)
    device = replace(largest_device(90), sms=132)
    columns, combine, rows = bf16.call(problem, problem.strides(), device).launches
    assert columns.grid[0] == 16 * 33  # 16 tiles of 256 columns, 33 pieces
    assert combine.grid[0] == 4096 // 256 + 1
    assert rows.grid[0] == 4096 // 4


@pytest.mark.parametrize("resident", [1, 3])
def test_thread_blocks_of_one_launch_take_all_units_however_many_run_at_once(
    resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LINEAR_ROWSUM.fixed_config(LINEAR_ROWSUM.steps["l6"], Element.BF16)
    monkeypatch.setattr("flash_helpers.ptx.run.kernel.most_resident", lambda *_: resident)
    buffers = ZeroedBuffers(monkeypatch)
    device = replace(largest_device(90), sms=1)
    problem = LinearRowsum(30, 300, 100, bias=True)  # 8 rows of x, and 3 pieces of 2 tiles of W
    (launch,) = config.call(problem, problem.strides(), device).launches
    assert launch.grid == (4, 1, 1)
    inputs = draw("normal", problem)
    y = torch.full((30,), math.nan, dtype=torch.bfloat16)
    found = run_shipped(config, {**inputs, "y": y}, device=device)
    assert not found.faults and len(buffers) == 1 and buffers.are_zeros()
    wanted = linear_rowsum_reference(inputs)
    assert measure_error(y, wanted.expected["y"]).within(wanted.bounds["y"])


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "wanted"), [((0, 5), (3, 5), []), ((2, 0), (3, 0), [6, 6]), ((2, 5), (0, 5), 0)]
)
def test_a_call_without_elements_is_computed_without_a_kernel(
    x: tuple[int, int], weight: tuple[int, int], wanted, bf16: LinearRowsumKernelConfig
) -> None:
    bias = torch.full(weight[:1], 2.0, dtype=torch.bfloat16)
    given = (torch.ones(size, dtype=torch.bfloat16) for size in (x, weight))
    y = flash_attention.run(bf16, *given, bias)["y"]
    assert y.tolist() == (wanted if isinstance(wanted, list) else [wanted] * x[0])
    given = (torch.ones(size, dtype=torch.bfloat16) for size in (x, weight))
    assert not flash_attention.run(bf16, *given)["y"].any()


X, W = torch.zeros(2, 10).bfloat16(), torch.zeros(3, 10).bfloat16()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "error", "text"),
    [
        (X.float(), W, None, TypeError, "x is torch.float32 and l5_bf16_w8_r4 takes"),
        (X, W.half(), None, TypeError, "torch.float16"),
        (X, W, torch.zeros(3), TypeError, "torch.float32"),
        (X, W[:, :9], None, ValueError, "in_features must be equal"),
        (X, W, torch.zeros(4).bfloat16(), ValueError, "one element for each row of weight"),
        (X, torch.zeros(10, 3).bfloat16().T, None, ValueError, "last dimension"),
        (X[0], W, None, ValueError, "x has 1 dimensions"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    x, weight, bias, error: type[Exception], text: str, bf16: LinearRowsumKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, x, weight, bias)


def test_sizes_that_a_kernel_cannot_count_are_refused(bf16: LinearRowsumKernelConfig) -> None:
    assert "split the call by rows" in bf16.refusal(LinearRowsum(2**30 + 1, 1, 1))
    assert not bf16.refusal(LinearRowsum(2**30, 1, 1))
    first = LINEAR_ROWSUM.fixed_config(LINEAR_ROWSUM.steps["l1"], Element.BF16)
    assert "of a CUDA grid" in first.refusal(LinearRowsum(2**22, 1, 2**22))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "l1 fixes rows 0; choose l5"),
        ((1, Element.BF16, 4), "n_warps 4: "),
        ((5, Element.BF16, 33, 4), "n_warps 33 is not from 1 to 32"),
        ((5, Element.BF16, 8), "rows 0 is not from 1 to 8"),
        ((5, Element.FP8, 8, 4), "family linear_rowsum has"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinearRowsumKernelConfig(*fields)
