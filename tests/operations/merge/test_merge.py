"""Attention on parts of the keys, merged: its problem, its bounds, and its kernels in the
simulator."""

from __future__ import annotations

import math

import pytest
import torch
from matrices import each_dtype
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.merge import OPERATION
from flash_helpers.operations.merge.baselines import run
from flash_helpers.operations.merge.inputs import draw
from flash_helpers.operations.merge.problem import NATURAL, Merge
from flash_helpers.operations.merge.problems import DISTRIBUTIONS, MEASURED_PARTS
from flash_helpers.operations.merge.reference import reference
from flash_helpers.registry.choice import first_that_takes, preferred_steps
from flash_helpers.registry.merge_states import MERGE_STATES, MergeKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
OUTPUTS = ("o", "lse")

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> MergeKernelConfig:
    return MERGE_STATES.fixed_config(MERGE_STATES.steps["u3"], Element.BF16)


def check(
    config: MergeKernelConfig,
    problem: Merge,
    *tensors: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Simulate, watched, and compare with the reference; return the outputs."""
    call = prepare(config, *tensors, **problem.call_options())
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = reference(problem, dict(zip(("o_parts", "lse_parts"), tensors, strict=False)))
    for name in OUTPUTS:
        error = measure_error(call.tensors[name], wanted.expected[name])
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))
    return {name: call.tensors[name] for name in OUTPUTS}


def spread(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values in memory full of NaN, with rows `gap` elements longer."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + gap), math.nan, dtype=x.dtype)
    return memory[..., : x.shape[-1]].copy_(x)


# -- the problem -----------------------------------------------------------------------------------


def test_each_part_is_read_once_and_o_is_written_once() -> None:
    problem = Merge(3, 5, 4, 64, Element.BF16, log2_base=1.0)
    rows = 5 * 4
    assert problem.bytes == 4 * rows * 64 * 2 + 4 * rows * 4
    assert problem.operations == 2 * 3 * rows * 64
    assert Merge.from_record(problem.record()) == problem


@pytest.mark.parametrize("parts", MEASURED_PARTS)
def test_problems_of_all_measured_parts_move_about_the_same_bytes(parts: int) -> None:
    problem = OPERATION.measured(parts)
    assert (problem.parts, problem.tensor("o_parts").bytes) == (parts, 2**28)
    copied = run("copy", problem, _empty(problem))["o"].numel() * 2 * 2
    moved = sum(problem.tensor(name).bytes for name in ("o_parts", "o"))
    assert abs(copied - moved) <= 4


def _empty(problem: Merge) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, problem.dtype.torch_name)
    return {
        "o_parts": torch.empty(problem.tensor("o_parts").shape, dtype=dtype, device="meta"),
        "lse_parts": torch.empty(problem.tensor("lse_parts").shape, device="meta"),
    }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Merge(0, 1, 1, 8), "parts 0 is not positive"),
        (lambda: Merge(1, 1, 1, -1), "d_head -1 is not positive"),
        (lambda: Merge(1, 1, 1, 8, log2_base=0.0), "log2_base 0.0 is not a positive number"),
        (lambda: Merge(1, 1, 1, 8, log2_base=math.nan), "log2_base nan is not a positive number"),
    ],
)
def test_sizes_and_bases_that_mean_nothing_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- the reference ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = Merge(5, 6, 3, 40, dtype)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch", problem, inputs)
    for name in OUTPUTS:
        error = measure_error(found[name], wanted.expected[name])
        assert error.within(wanted.bounds[name]), (name, error.excess(wanted.bounds[name]))
    found["o"][2, 1, 5] += 0.05 * found["o"][2, 1].float().nan_to_num().abs().max() + 1e-3
    found["o"][3, 0, 7] = math.nan if found["o"][3, 0, 7].isfinite() else 1.0
    found["lse"][1, 1] += 1e-3
    rows = measure_error(found["o"], wanted.expected["o"]).rows
    assert rows is not None and wanted.bounds["o"].rows is not None
    own = found["o"][2, 1, 5].isfinite()
    assert not own or rows.max_abs[2, 1] > wanted.bounds["o"].rows.max_abs[2, 1]
    assert not rows.max_abs[3, 0] <= wanted.bounds["o"].rows.max_abs[3, 0]
    error = measure_error(found["lse"], wanted.expected["lse"])
    assert not error.within(wanted.bounds["lse"]) or not found["lse"][1, 1].isfinite()


def test_merged_parts_are_attention_on_all_keys() -> None:
    scores, values = torch.randn(3, 2, 40).double(), torch.randn(40, 8).double()
    cut = scores.split(10, -1), values.split(10)
    o = torch.stack([s.softmax(-1) @ v for s, v in zip(*cut, strict=True)])
    lse = torch.stack([s.logsumexp(-1) for s in cut[0]])
    problem = Merge(4, 3, 2, 8, Element.FP32)
    wanted = reference(problem, {"o_parts": o.float(), "lse_parts": lse.float()})
    torch.testing.assert_close(
        wanted.expected["o"], scores.softmax(-1) @ values, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(wanted.expected["lse"], scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
@pytest.mark.parametrize("d_head", [64, 96, 192])
def test_usual_head_sizes_are_right_with_any_number_of_parts(
    config: MergeKernelConfig, d_head: int
) -> None:
    for parts in (1, 2, 5):
        problem = Merge(parts, 2, 3, d_head, config.dtype)
        check(config, problem, *draw("normal", problem, seed=parts).values())


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: MergeKernelConfig, distribution: str) -> None:
    problem = Merge(5, 4, 3, 24, config.dtype)
    tensors = draw(distribution, problem).values()
    first = check(config, problem, *tensors)
    again = check(config, problem, *tensors)
    for name in OUTPUTS:
        assert torch.equal(first[name].nan_to_num(7.0), again[name].nan_to_num(7.0))


@each_config
def test_rows_without_keys_are_0_and_minus_infinity(config: MergeKernelConfig) -> None:
    problem = Merge(3, 2, 1, 16, config.dtype)
    o, lse = draw("masked", problem).values()
    found = check(config, problem, o, lse)
    assert not found["o"][-1].any()
    assert (found["lse"][-1] == -math.inf).all()


@each_config
def test_the_corners_of_the_declaration_are_right(config: MergeKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, problem, *draw("normal", problem).values())


@each_config
def test_tensors_may_have_any_order_of_dimensions_and_gaps(config: MergeKernelConfig) -> None:
    problem = Merge(3, 4, 2, 24, config.dtype, log2_base=1.0)
    o, lse = draw("normal", problem).values()
    gap = 16
    o_parts = spread(o.transpose(0, 1).contiguous(), gap).transpose(0, 1)  # (rows, parts, …)
    lse_parts = spread(lse.permute(2, 1, 0).contiguous(), 3).permute(2, 1, 0)
    outputs = spread(torch.zeros_like(o[0]), gap), spread(torch.zeros_like(lse[0].T), 1).T
    found = check(config, problem, o_parts, lse_parts, *outputs)
    plain = check(config, problem, o, lse)
    for name in OUTPUTS:
        assert torch.equal(found[name], plain[name])
    memory = outputs[0].as_strided((4, 2, 24 + gap), outputs[0].stride())[:-1]
    assert memory[..., 24:].isnan().all()  # nothing is written between the rows


def test_parts_of_one_lse_may_share_memory(bf16: MergeKernelConfig) -> None:
    problem = Merge(4, 3, 2, 16)
    o, lse = draw("normal", problem).values()
    check(bf16, problem, o[:1].expand_as(o), lse[:, :, :1].expand_as(lse))


# -- refusals --------------------------------------------------------------------------------------

OUT, LSE = torch.zeros(2, 3, 4, 16).bfloat16(), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("o", "lse", "error", "text"),
    [
        (OUT.float(), LSE, TypeError, "o_parts is torch.float32 and u3_bf16_w8_p4 takes"),
        (OUT, LSE.bfloat16(), TypeError, "lse_parts is torch.bfloat16"),
        (OUT, LSE[:, :, :3], ValueError, r"lse_parts has shape \(2, 3, 3\) and o_parts"),
        (OUT[0], LSE[0], ValueError, "o_parts has 3 dimensions"),
        (OUT[:0], LSE[:0], ValueError, "o_parts has part 0, shape"),
        (OUT[..., ::2], LSE, ValueError, "last dimension"),
        (OUT[..., :12].contiguous(), LSE, ValueError, "d_head 12 is not a multiple of 8.*step u1"),
        (torch.zeros(2, 3, 4, 18).bfloat16()[..., :16], LSE, ValueError, "multiples of 8: call"),
        (torch.zeros(385).bfloat16()[1:].view(2, 3, 4, 16), LSE, ValueError, "16 bytes: call .cl"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    o: torch.Tensor, lse: torch.Tensor, error: type[Exception], text: str, bf16: MergeKernelConfig
) -> None:
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, o, lse)


def test_calls_take_u3_and_u1_where_a_head_is_not_whole_chunks() -> None:
    steps = preferred_steps(OPERATION, None)
    configs = [MERGE_STATES.fixed_config(step, Element.BF16) for step in steps]
    for d_head, step in ((128, "u3"), (12, "u1")):
        assert first_that_takes(Merge(2, 1, 1, d_head), configs).step.id == step


def test_more_threads_than_a_kernel_counts_are_refused(bf16: MergeKernelConfig) -> None:
    problem = Merge(2, 2**27, 1, 128)
    assert "over the limit 2147483647" in bf16.refusal(problem)
    assert not bf16.refusal(Merge(2, 2**27 - 1, 1, 128))
    assert "merge the parts in several calls" in bf16.refusal(Merge(2**31, 1, 1, 8))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 8, 4), "u1 fixes parts_at_once 0; choose u3"),
        ((3, Element.BF16, 33, 4), "n_warps 33 is not from 1 to 32"),
        ((3, Element.BF16, 8), "parts_at_once 0 is not from 1 to 16"),
        ((3, Element.FP8, 8, 4), "family merge_states has"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MergeKernelConfig(*fields)


def test_natural_logarithms_are_the_default() -> None:
    assert Merge(1, 1, 1, 8).log2_base == NATURAL == pytest.approx(1 / math.log(2))
