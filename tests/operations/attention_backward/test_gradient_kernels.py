"""The kernels of the backward pass, simulated, beside float64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attention_tensors import on_sms
from tiers import committed, each

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.reference import reference
from flash_helpers.operations.attention_forward.reference import attention_of
from flash_helpers.registry import backward
from flash_helpers.registry.wgmma import PERSISTENT
from flash_helpers.runtime import library
from flash_helpers.runtime.simulator import load_kernels, run_kernel, run_shipped

CONFIGS = committed(OPERATION)


def gradients(
    config: Config, problem: AttentionBackward, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """dQ, dK and dV, which the watched kernels write everywhere."""
    tensors = tensors_for(config, problem, inputs)
    run = run_shipped(config, tensors, **problem.call_options())
    assert config.short_form() in run.kernel and run.faults == ()
    return {name: tensors[name] for name in GRADIENTS}


def assert_right_on(
    config: Config, problem: AttentionBackward, distribution: str = "normal"
) -> None:
    inputs = draw(distribution, problem)
    right = reference(problem, inputs)
    for name, found in gradients(config, problem, inputs).items():
        error = measure_error(found, right.expected[name])
        assert error.within(right.bounds[name]), f"{name} of {problem}, {distribution}: {error}"


@each(CONFIGS, once=True)
def test_every_kernel_is_right_for_one_block(config) -> None:
    assert_right_on(config, next(config.supports.corners()))


@each(CONFIGS, at_corners=True)
def test_every_kernel_is_right_at_the_corners_that_it_declares(config) -> None:
    _, *corners = config.supports.corners()  # the first is one block: see above
    for corner in corners:
        assert_right_on(config, corner)


@each(c for c in CONFIGS if not c.supports.causal and not c.supports.exact)
def test_every_kernel_is_right_on_heads_of_all_distributions(config) -> None:
    whole = config.supports.whole
    sizes = (whole, whole) if config.supports.blocks else (2 * config.B_r, 64)
    for distribution in OPERATION.distributions:
        assert_right_on(config, config.supports.problem(1, 1, *sizes), distribution)


@each(c for c in CONFIGS if PERSISTENT in c.step.traits and c.dtype is Element.BF16)
def test_a_thread_block_takes_one_tile_after_the_other(config) -> None:
    """In an order of completion at random."""
    problem = config.supports.problem(1, 2, config.supports.whole, 3 * config.B_c)
    problem = replace(problem, kv_heads=1)
    inputs = draw("normal", problem)
    right = reference(problem, inputs)
    tensors = tensors_for(config, problem, inputs)
    kernels = load_kernels(config)
    options = problem.call_options()
    run = run_kernel(config, kernels, tensors, device=on_sms(1), seed=1, **options)
    assert run.faults == ()
    for name in GRADIENTS:
        assert measure_error(tensors[name], right.expected[name]).within(right.bounds[name])


@pytest.mark.parametrize("keys_of_last_tile", [1, 65, 192])
def test_a_third_warpgroup_passes_on_blocks_tile_after_tile(keys_of_last_tile) -> None:
    """Of grouped heads, in an order of completion at random; with and without keys of its own."""
    config = next(c for c in CONFIGS if getattr(c, "warpgroups", 0) == 3 and c.causal)
    len_k = config.B_c + keys_of_last_tile
    problem = replace(config.supports.problem(1, 2, len_k - 30, len_k), kv_heads=1)
    inputs = draw("normal", problem)
    right = reference(problem, inputs)
    tensors = tensors_for(config, problem, inputs)
    options = problem.call_options()
    run = run_kernel(config, load_kernels(config), tensors, device=on_sms(1), seed=2, **options)
    assert run.faults == ()
    for name in GRADIENTS:
        assert measure_error(tensors[name], right.expected[name]).within(right.bounds[name])


def test_causal_tiles_of_groups_of_heads_come_once_each(monkeypatch) -> None:
    """Of five heads two, one, and the two of the last group."""
    config = next(c for c in CONFIGS if PERSISTENT in c.step.traits and c.supports.causal)
    problem = config.supports.problem(1, 5, config.supports.whole, 2 * config.B_c)
    bytes_of_a_head = 128 * (8 * problem.len_q + 4 * problem.len_k)
    monkeypatch.setattr(backward, "GROUP_BYTES", 2 * bytes_of_a_head)
    inputs = draw("normal", problem)
    right = reference(problem, inputs)
    tensors = tensors_for(config, problem, inputs)
    options = problem.call_options()
    run = run_kernel(config, load_kernels(config), tensors, device=on_sms(1), **options)
    assert run.faults == ()
    values = config.call(problem, problem.strides(), on_sms(1)).launches[0].values
    assert (values["head_group"], values["last_heads"]) == ((2,), (2,))
    for name in GRADIENTS:
        assert measure_error(tensors[name], right.expected[name]).within(right.bounds[name])


def test_in_turn_every_group_has_the_heads_behind_which_tiles_do_not_wait() -> None:
    """Of 256 heads of length 512 on 132 SMs 50: the others, 106, are in the last group."""
    config = next(c for c in CONFIGS if getattr(c, "in_turn", False) and not c.causal)
    for length, heads, group in ((512, 256, 50), (1024, 128, 25), (512, 128, 50), (256, 64, 64)):
        problem = config.supports.problem(1, heads, length, length)
        values = config.call(problem, problem.strides(), on_sms(132)).launches[0].values
        assert values["head_group"] == (group,)
        (last,) = values["last_heads"]
        assert group <= last <= heads
        assert (heads - last) % group == 0


@each(CONFIGS, once=True)
def test_a_query_with_an_lse_of_minus_infinity_adds_nothing(config) -> None:
    length = config.supports.whole
    problem = config.supports.problem(1, 1, length, length)
    inputs = draw("normal", problem)
    inputs["lse"][..., 0] = -torch.inf
    found = gradients(config, problem, inputs)
    assert found["dq"][:, 0].eq(0).all()
    inputs["lse"][:] = -torch.inf
    assert all(gradient.eq(0).all() for gradient in gradients(config, problem, inputs).values())


def a_row_more_than_whole_tiles(config: Config) -> AttentionBackward:
    supports = config.supports
    return supports.problem(1, 1, supports.B_r + 1, supports.B_c + 1)


@each([config for config in CONFIGS if not config.supports.blocks], once=True)
def test_rows_behind_the_ends_add_nothing_where_all_logits_are_low(config) -> None:
    """Their logits would be 0, and e^(0 - LSE) infinite."""
    problem = a_row_more_than_whole_tiles(config)
    inputs = draw("normal", problem)
    inputs["q"][..., :] = inputs["q"].abs() + 8
    inputs["k"][..., :] = -inputs["k"].abs() - 8
    o, lse = attention_of(problem, inputs)
    inputs |= {"o": o.to(inputs["q"].dtype), "lse": lse.float()}
    assert problem.softcap or lse[lse.isfinite()].max() < -200
    right = reference(problem, inputs)
    for name, found in gradients(config, problem, inputs).items():
        assert measure_error(found, right.expected[name]).within(right.bounds[name])


@each([config for config in CONFIGS if not config.supports.blocks], once=True)
def test_a_nan_of_the_last_query_reaches_no_other_dq(config) -> None:
    problem = a_row_more_than_whole_tiles(config)
    inputs = draw("normal", problem)
    expected = gradients(config, problem, inputs)["dq"][:, :-1]
    inputs["do"][:, -1, :, 0] = torch.nan
    dq = gradients(config, problem, inputs)["dq"]
    assert dq[:, -1].isnan().all()
    assert dq[:, :-1].equal(expected)


def test_a_scale_by_which_the_lse_cannot_be_divided_is_refused() -> None:
    config = next(c for c in CONFIGS if c.supports.min_scale and c.dtype == Element.BF16)
    whole = config.supports.whole
    least = replace(
        config.supports.problem(1, 1, whole, whole), softmax_scale=config.supports.min_scale
    )
    assert_right_on(config, least)
    smaller = replace(least, softmax_scale=least.softmax_scale / 2)
    assert "would not be finite in b7" in config.refusal(smaller)
    assert "multiply q by a part of it" in config.refusal(smaller)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_head": 96}, "d_head 96 is not built: choose 128 or 64"),
        ({"B_c": 192}, "B_c 192 at d_head 128 is not built: choose 128"),
        ({"d_head": 64, "B_c": 64}, "B_c 64 at d_head 64 is not built: choose 128 or 192"),
        ({"d_head": 64, "B_c": 192}, "waits for the next: use 4 or more"),
        ({"d_head": 64, "B_c": 192, "slots": 4, "softcap": True}, "for softcap: choose 128"),
        ({"slots": 4}, "over the limit 232448: lower one of them"),
    ],
)
def test_a_tile_for_which_a_kernel_has_no_room_is_refused(changes, reason) -> None:
    config = backward.BACKWARD.fixed_config(backward.BACKWARD.steps["b17"], Element.BF16)
    with pytest.raises(ValueError, match=re.escape(reason)):
        config.replace(**changes)


def test_every_flag_has_a_tile_of_each_head_size() -> None:
    config = backward.BACKWARD.fixed_config(backward.BACKWARD.steps["b17"], Element.BF16)
    wide, narrow = config.variants()[:32], config.variants()[32:]
    assert {each.d_head for each in wide} == {128} and {each.d_head for each in narrow} == {64}
    assert [each.of_size(64) for each in wide] == [*narrow]
    assert narrow[0].variants()[:32] == narrow
    assert sum(each.warpgroups == 3 for each in narrow) == 4


@each((c for c in CONFIGS if not getattr(c, "in_turn", False)), once=True)
def test_a_deterministic_step_is_one_that_adds_nothing_in_memory(config) -> None:
    texts = [path.read_text() for path in library.ptx_paths([config]).values()]
    adds = any(re.search(r"\b(red|atom)\S*\.add\S*f32", text) for text in texts)
    assert config.is_deterministic is not adds


def gradients_in_orders(config) -> list[list[torch.Tensor]]:
    """dQ, dK and dV on one SM, and on three in orders at random."""
    problem = config.supports.problem(1, 1, 2 * config.B_r + 5, 3 * config.B_c)
    inputs = draw("normal", problem)
    kernels, options = load_kernels(config), problem.call_options()
    found = []
    for sms, seed in ((1, 0), (3, 0), (3, 3)):
        tensors = tensors_for(config, problem, inputs)
        run = run_kernel(config, kernels, tensors, device=on_sms(sms), seed=seed, **options)
        assert run.faults == ()
        found.append([tensors[name] for name in GRADIENTS])
    return found


@each(c for c in CONFIGS if getattr(c, "in_turn", False) and c.dtype is Element.BF16)
def test_in_turn_dq_has_the_same_bits_in_any_order_and_on_any_number_of_sms(config) -> None:
    first, *others = gradients_in_orders(config)
    assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


def test_without_turns_dq_alone_has_other_bits_in_another_order() -> None:
    """So that the test above could fail."""
    in_turn = next(c for c in CONFIGS if getattr(c, "in_turn", False) and not c.causal)
    config = in_turn.replace(in_turn=False, dtype=Element.BF16)
    (dq, dk, dv), *others = gradients_in_orders(config)
    assert not all(dq.equal(other[0]) for other in others)
    assert all(dk.equal(other[1]) and dv.equal(other[2]) for other in others)


@pytest.mark.parametrize(("step", "takes_it"), [("b4", True), ("b8", False), ("p1", True)])
def test_only_a_deterministic_step_takes_a_problem_that_asks_for_the_same_bits(
    step, takes_it
) -> None:
    config = next(c for c in CONFIGS if c.step.id == step and not c.supports.causal)
    problem = config.supports.problem(1, 1, config.supports.whole, config.supports.whole)
    assert not config.refusal(problem)
    refusal = config.refusal(replace(problem, deterministic=True))
    assert (refusal == "") is takes_it
    assert takes_it or refusal.startswith(f"deterministic is not supported by {step}_")
    assert ("deterministic" in config.supports.described()["options"]) is takes_it


@pytest.mark.parametrize("name", ["do", "q", "dk"])
def test_a_tensor_with_one_value_for_all_columns_is_refused(name) -> None:
    """As dO after `o.sum().backward()`: kernels copy the columns of a row at once."""
    supports = CONFIGS[0].supports
    problem = supports.problem(1, 2, 64, 64)
    reason = supports.layout_refusal(problem.tensor(name), (0, 0, 0, 0))
    assert reason.startswith(f"{name} has stride 0 in its last dimension and must have 1")
