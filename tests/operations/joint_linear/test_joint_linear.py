"""Linear layers of a sequence and its context: their problem, their bounds, and their kernels in
the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.joint_linear import OPERATION
from flash_helpers.operations.joint_linear.baselines import computed, run
from flash_helpers.operations.joint_linear.grid import GROUPS, competing, distance
from flash_helpers.operations.joint_linear.inputs import draw
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.joint_linear.problems import DISTRIBUTIONS
from flash_helpers.operations.joint_linear.reference import linear_float64, reference
from flash_helpers.registry.joint_linear import JOINT_LINEAR, JointLinearKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
Tensors = dict[str, torch.Tensor]

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> JointLinearKernelConfig:
    return JOINT_LINEAR.fixed_config(JOINT_LINEAR.steps["jl1"], Element.BF16)


def made(step: str, **fields: int) -> JointLinearKernelConfig:
    """The fixed config of a step in bf16, with some fields changed."""
    fixed = JOINT_LINEAR.fixed_config(JOINT_LINEAR.steps[step], Element.BF16)
    return fixed.replace(**fields)


def drawn(problem: JointLinear, distribution: str = "normal") -> Tensors:
    """The inputs, and an empty output of the context if the problem has one."""
    found = draw(distribution, problem)
    if problem.context:
        shape = problem.tensor("context_y").shape
        found["context_y"] = torch.full(shape, math.nan, dtype=found["x"].dtype)
    return found


def check(
    config: Config, problem: JointLinear, given: Tensors, device: Device | None = None
) -> Tensors:
    """Simulate, watched, and compare with the reference; return the outputs."""
    call = prepare(config, *problem.arranged(given), **problem.call_options())
    assert call.problem == problem
    found = call.simulate(keep_going=True, device=device)
    assert not found.faults
    wanted = reference(problem, given)
    assert {*wanted.bounds} == {tensor.name for tensor in problem.outputs}
    for name, bound in wanted.bounds.items():
        error = measure_error(call.tensors[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))
    return {name: call.tensors[name] for name in wanted.bounds}


# -- the problem and the reference -----------------------------------------------------------------


def test_each_tensor_is_moved_once() -> None:
    problem = JointLinear(2, 10, 32, 96, bias=True, norm=True, context=3, context_out=64)
    own, of_context = 2 * 10 * (32 + 96) + 96 * 34, 2 * 3 * (32 + 64) + 64 * 34
    assert problem.bytes == 2 * (own + of_context)
    plain = replace(problem, bias=False, norm=False, context=0)
    assert plain.bytes == 2 * (2 * 10 * (32 + 96) + 96 * 32)
    assert plain.operations == 2 * 2 * 10 * 32 * 96
    assert JointLinear.from_record(problem.record()) == problem
    assert str(problem).endswith("context 3, context_out 64, bias, norm")


def test_sizes_of_a_context_that_is_not_there_tell_nothing() -> None:
    plain = JointLinear(1, 5, 16, 24)
    assert JointLinear(1, 5, 16, 24, context_in=8, context_out=8) == plain
    assert {t.name for t in (*plain.inputs, *plain.outputs)} == {"x", "weight", "y"}


@pytest.mark.parametrize("norm", [False, True])
def test_the_reference_is_the_plain_formulation(norm: bool) -> None:
    problem = JointLinear(
        *(2, 3, 8, 5), bias=True, norm=norm, context=2, context_in=4, context_out=6, eps=0.1
    )
    inputs = draw("normal", problem)
    found = linear_float64(problem, inputs)
    for stream in ("", "context_"):
        x, weight, bias = (inputs[stream + name].double() for name in ("x", "weight", "bias"))
        for place in ((0, 0), (1, 1)):
            row = [(x[place] * w).sum() + b for w, b in zip(weight, bias, strict=True)]
            if norm:
                root = math.sqrt(sum(v * v for v in row) / len(row) + 0.1)
                weights = inputs[f"{stream}norm_weight"].double()
                row = [v / root * w for v, w in zip(row, weights, strict=True)]
            torch.testing.assert_close(found[f"{stream}y"][place], torch.stack(row))


@pytest.mark.parametrize("dtype", JOINT_LINEAR.dtypes)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_of_elements_and_one_wrong_element_is_not(
    distribution: str, norm: bool, dtype: Element
) -> None:
    problem = JointLinear(2, 9, 64, 48, dtype, bias=True, norm=norm, context=4)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch_linear", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        errors = (found[name].double() - expected).abs()
        assert (errors <= bound.of_elements).all()
        right = expected.to(found[name].dtype)  # rounded once
        assert measure_error(right, expected).within(bound)
        wrong = right.clone()
        wrong[1, 2, 3] += 0.05 * expected[1, 2].abs().max() + 0.01
        assert not measure_error(wrong, expected).within(bound)


def test_a_norm_without_the_columns_of_a_warp_is_outside_of_the_bound() -> None:
    problem = JointLinear(1, 6, 32, 128, norm=True)
    inputs = draw("normal", problem)
    wanted = reference(problem, inputs)
    exact = {name: x.double() for name, x in inputs.items()}
    y = exact["x"] @ exact["weight"].T
    rstd = (y[..., 16:].square().sum(-1, keepdim=True) / 128).rsqrt()
    found = (y * rstd * exact["norm_weight"]).bfloat16()
    assert not measure_error(found, wanted.expected["y"]).within(wanted.bounds["y"])


def test_what_is_measured_in_torch_compile_is_one_graph() -> None:
    problem = replace(OPERATION.small, norm=True)
    inputs = draw("normal", problem)
    compiled = torch.compile(computed, backend="eager", fullgraph=True, dynamic=False)
    found, right = (f(problem, inputs) for f in (compiled, computed))
    assert found.keys() == right.keys() == {"y", "context_y"}
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: JointLinear(0, 1, 8, 8), "batch 0 is not positive"),
        (lambda: JointLinear(1, 1, 8, 0), "out_features 0 is not positive"),
        (lambda: JointLinear(1, 1, 8, 8, context=2, context_in=0), "context_in 0 is not positive"),
        (lambda: JointLinear(1, 1, 8, 8, context=-1), "context -1 is negative: use 0"),
        (lambda: JointLinear(1, 1, 8, 8, eps=-1.0), "eps -1.0 is not a number from 0 on"),
    ],
)
def test_sizes_and_options_that_mean_nothing_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_two_samples_with_their_contexts_are_right(config: JointLinearKernelConfig) -> None:
    problem = JointLinear(
        *(2, 21, 128, 136, config.dtype), context=9, context_in=72, context_out=64, bias=True
    )
    first, second = (check(config, problem, drawn(problem)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("y", "context_y"))


@each_config
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(
    config: JointLinearKernelConfig, norm: bool, distribution: str
) -> None:
    problem = JointLinear(1, 10, 80, 128, config.dtype, context=3, bias=True, norm=norm)
    check(config, problem, drawn(problem, distribution))


@each_config
def test_the_corners_of_the_declaration_are_right(config: JointLinearKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, problem, drawn(problem))


@each_config
def test_rows_with_gaps_are_taken_as_they_are(config: JointLinearKernelConfig) -> None:
    problem = JointLinear(2, 5, 72, 64, config.dtype, context=3)
    given = drawn(problem)
    found = check(config, problem, given)
    for name in ("x", "weight", "context_x"):
        *rows, columns = given[name].shape
        wide = torch.full((*rows, columns + 8), math.nan, dtype=given[name].dtype)
        wide[..., :columns] = given[name]
        given[name] = wide[..., :columns]
    memory = torch.full((2, 5, 80), math.nan, dtype=given["x"].dtype)
    given["y"] = memory[..., :64]
    again = check(config, problem, given)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert memory[..., 64:].isnan().all()  # nothing is written between the rows


SHAPES = sorted(
    {
        made(step, **fields)
        for group in GROUPS.values()
        for problem in group
        for step, fields in competing(problem)
    }
)


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.short_form())
def test_the_tiles_that_compete_are_right(config: JointLinearKernelConfig) -> None:
    problem = JointLinear(1, 19, 72, 64, context=2, bias=True, norm=True, eps=0.01)
    check(config, problem, drawn(problem))


# -- activations -----------------------------------------------------------------------------------

ACTIVATED = [config for config in CONFIGS if config.supports.activations]
ACTIVATIONS: list[dict[str, bool]] = [
    {"gelu": True},
    {"silu": True},
    {"gelu": True, "silu": True, "norm": True},
]
each_activation = pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: "_".join(kind))


@each_activation
@pytest.mark.parametrize("dtype", JOINT_LINEAR.dtypes)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_of_activations_and_one_wrong_element_is_not(
    distribution: str, dtype: Element, kind: dict[str, bool]
) -> None:
    problem = replace(JointLinear(2, 9, 64, 48, dtype, bias=True, context=4), **kind)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch_linear", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        assert ((found[name].double() - expected).abs() <= bound.of_elements).all()
        right = expected.to(found[name].dtype)
        assert measure_error(right, expected).within(bound)
        wrong = right.clone()
        wrong[1, 2, 3] += 0.05 * expected[1, 2].abs().max() + 0.01
        assert not measure_error(wrong, expected).within(bound)


def test_gelu_by_tanh_is_outside_of_the_bound() -> None:
    """Where all outputs of a row are small: GELU differs from that by tanh by up to 5e-4."""
    problem = JointLinear(1, 4, 64, 256, Element.FP16, bias=True, gelu=True)
    inputs = draw("normal", problem)
    inputs["weight"] *= 0.1
    inputs["bias"].fill_(-2.2)
    wanted = reference(problem, inputs)
    y = inputs["x"].double() @ inputs["weight"].double().T + inputs["bias"].double()
    for approximate, is_right in (("none", True), ("tanh", False)):
        found = torch.nn.functional.gelu(y, approximate=approximate).half()
        error = measure_error(found, wanted.expected["y"])
        assert error.within(wanted.bounds["y"]) == is_right


@each(ACTIVATED)
@each_activation
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_activations_are_right(
    config: JointLinearKernelConfig, kind: dict[str, bool], distribution: str
) -> None:
    problem = replace(JointLinear(1, 10, 80, 64, config.dtype, context=3, bias=True), **kind)
    check(config, problem, drawn(problem, distribution))


@pytest.mark.parametrize(
    "config",
    [config for config in SHAPES if config.supports.activations],
    ids=lambda config: config.short_form(),
)
def test_tiles_of_activations_are_right(config: JointLinearKernelConfig) -> None:
    problem = JointLinear(1, 19, 72, 64, context=2, bias=True, gelu=True, silu=True)
    check(config, problem, drawn(problem))


def test_a_step_with_activations_has_a_variant_for_more_features() -> None:
    problem = JointLinear(1, 2, 256, 72, gelu=True)
    assert "in_features 256 is over the limit 128" in made("jl4").refusal(problem)
    (taking,) = (c for c in made("jl4").variants() if not c.refusal(problem))
    check(taking, problem, drawn(problem))


@pytest.mark.parametrize("step", ["jl1", "jl2", "jl3"])
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_steps_before_jl4_refuse_activations(step: str, name: str) -> None:
    problem = replace(JointLinear(1, 2, 64, 64), **{name: True})
    assert f"{name}: {step}_bf16" in made(step).refusal(problem)
    assert "choose jl4" in made(step).refusal(problem)


def test_large_and_small_numbers_pass_activations_as_they_are_or_become_nothing() -> None:
    """On a CPU PyTorch's GELU of an infinity is NaN, and that of 3e38 an infinity."""
    problem = JointLinear(1, 1, 64, 64, bias=True, gelu=True)
    given = drawn(problem)
    given["x"].zero_()
    given["bias"][:7] = torch.tensor([3e38, -3e38, 30.0, -30.0, math.inf, -math.inf, math.nan])
    call = prepare(made("jl4"), *problem.arranged(given), **problem.call_options())
    call.simulate()
    found = call.tensors["y"][0, 0, :7]
    right = given["bias"][:7].clamp(min=0)
    assert found[6].isnan() and torch.equal(found[:6], right[:6])
    problem = JointLinear(1, 1, 64, 64, bias=True, silu=True)
    given = drawn(problem)
    given["weight"].copy_(torch.eye(64))
    given["bias"].zero_()
    given["x"][0, 0, :4] = torch.tensor([3e38, -3e38, 30.0, -100.0])
    found = check(made("jl4"), problem, given)["y"][0, 0, :4]
    assert torch.equal(found, given["x"][0, 0, :4].clamp(min=0))


@pytest.mark.parametrize(
    "tile",
    [
        "jl1_bf16_Br16_Bc64_w1_wr16",
        "jl1_bf16_Br32_Bc64_w2_wr16",
        "jl1_bf16_Br64_Bc64_w2_wr64",
        "jl1_bf16_Br16_Bc192_w12_wr16",
        "jl2_bf16_Br16_Bc64_w1_wr16_in256",
        "jl2_bf16_Br32_Bc64_w4_wr16_in64",
        "jl3_bf16_Br32_Bc64_w4_wr16_in256",
        "jl3_bf16_Br16_Bc64_w2_wr16_in64",
    ],
)
def test_other_numbers_of_warps_and_depths_are_right(tile: str) -> None:
    config = JointLinearKernelConfig.from_short_form(tile)
    problem = JointLinear(1, 18, 64, 64, bias=True, norm=True)
    check(config, problem, drawn(problem))


@pytest.mark.parametrize(
    "tile", ["Br16_Bc64_w2_wr16_in128", "Br16_Bc128_w8_wr16_in128", "Br32_Bc128_w4_wr32_in128"]
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("step", ["jl2", "jl3"])
def test_a_thread_block_has_several_tiles_of_rows(step: str, tile: str, norm: bool) -> None:
    """On a GPU of one SM: an odd number of them and an even one, and fewer in the last block."""
    config = JointLinearKernelConfig.from_short_form(f"{step}_bf16_{tile}")
    problem = JointLinear(1, 11 * 16 + 3, 72, 64 if norm else 136, context=50, bias=True, norm=norm)
    device = Device("a GPU", (9, 0), 1)
    (launch,) = config.call(problem, problem.strides(), device).launches
    assert launch.values["turns"][0] > 1
    check(config, problem, drawn(problem), device)


@pytest.mark.parametrize("batch", [1, 8, 64, 256, 1024])
def test_all_thread_blocks_run_at_once_where_weights_stay(batch: int) -> None:
    problem, hopper = replace(OPERATION.usual, batch=batch), largest_device(90)
    for config in (config for config in SHAPES if config.depth):
        (launch,) = config.call(problem, problem.strides(), hopper).launches
        (turns,) = launch.values["turns"]
        per_sm = min(16 // config.n_warps, 228 * 1024 // (config.smem_bytes + 1024))
        assert launch.n_blocks <= per_sm * hopper.sms
        rows = config.B_r * turns
        assert launch.n_blocks >= 3 * problem.rows / rows  # and all rows have one
        assert 3 * problem.rows <= launch.values["blocks"][0] * rows


def test_rows_of_256_outputs_have_a_norm() -> None:
    fixed = JOINT_LINEAR.fixed_config(JOINT_LINEAR.steps["jl1"], Element.FP16)
    problem = JointLinear(1, 2, 64, 248, Element.FP16, norm=True)
    assert "out_features 248 is over 128" in fixed.refusal(problem)
    (taking,) = (c for c in fixed.variants() if not c.refusal(problem))
    check(taking, problem, drawn(problem))


def test_outputs_of_a_row_are_those_of_any_batch(bf16: JointLinearKernelConfig) -> None:
    """A row of the context is computed as one of the sequence is."""
    joined = JointLinear(1, 11, 72, 64, norm=True)
    given = drawn(joined)
    whole = check(bf16, joined, given)["y"]
    apart = JointLinear(1, 8, 72, 64, norm=True, context=3)
    cut = {name: given[name] for name in ("weight", "norm_weight")}
    cut |= {f"context_{name}": x for name, x in cut.items()}
    cut["x"], cut["context_x"] = (x.contiguous() for x in given["x"].split([8, 3], 1))
    cut["context_y"] = torch.empty_like(whole[:, 8:])
    found = check(bf16, apart, cut)
    assert torch.equal(torch.cat((found["y"], found["context_y"]), 1), whole)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_not_finite_spreads_as_in_pytorch(
    norm: bool, value: float, bf16: JointLinearKernelConfig
) -> None:
    problem = JointLinear(1, 5, 72, 64, norm=norm)
    given = drawn(problem)
    given["x"][0, 3, 7] = value
    call = prepare(bf16, *problem.arranged(given), **problem.call_options())
    call.simulate()
    found, right = call.tensors["y"], computed(problem, given)["y"]
    for of_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of_kind(found), of_kind(right))


def test_a_row_of_zeros_has_a_norm_of_zeros(bf16: JointLinearKernelConfig) -> None:
    problem = JointLinear(1, 3, 16, 64, norm=True)
    given = drawn(problem)
    given["x"][0, 1] = 0
    assert not check(bf16, problem, given)["y"][0, 1].any()


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "batch", "blocks"),
    [
        ("Br64_Bc128_w4_wr32", 64, 186 * 3 + 64 * 3),
        ("Br16_Bc64_w4_wr16", 1, 12 * 6 + 4 * 6),
        ("Br128_Bc128_w8_wr32", 1024, 1488 * 3 + 512 * 3),
    ],
)
def test_one_grid_has_the_tiles_of_both_streams(tile: str, batch: int, blocks: int) -> None:
    config = JointLinearKernelConfig.from_short_form(f"jl1_bf16_{tile}")
    problem = replace(OPERATION.usual, batch=batch)
    device = OPERATION.part("faults").device_of(config)
    call = config.call(problem, problem.strides(), device)
    (launch,) = call.launches
    assert launch.grid == (blocks, 1, 1)
    assert launch.shared_bytes == config.smem_bytes <= 99 * 1024
    assert not call.buffers


def test_eight_tiles_at_most_compete_for_a_problem_and_all_take_it() -> None:
    for group in GROUPS.values():
        for problem in group:
            configs = [made(step, **fields) for step, fields in competing(problem)]
            assert len({*configs}) == len(configs) <= 8
            assert not any(config.refusal(problem) for config in configs)


def test_the_choice_knows_problems_by_their_tokens() -> None:
    asked = OPERATION.usual
    assert distance(asked, asked) == distance(asked, replace(asked, dtype=Element.FP16)) == 0
    assert distance(asked, replace(asked, batch=128)) == 1
    assert distance(asked, replace(asked, length=250, context=0)) == 4
    assert distance(asked, replace(asked, in_features=256)) > 3
    assert distance(asked, replace(asked, norm=True)) >= 100


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 24, 64])
@pytest.mark.parametrize("context", [0, 20, 64])
def test_the_nearest_problem_has_a_context_if_the_problem_has_one(batch: int, context: int) -> None:
    """Beside libraries, which take a launch for each stream, that makes the difference."""
    problem = replace(OPERATION.usual, batch=batch, context=context)
    group = GROUPS["joint_linear_bf16"]
    nearest = min(group, key=lambda measured: distance(measured, problem))
    assert (nearest.context > 0) == (context > 0)


# -- refusals --------------------------------------------------------------------------------------

X, WEIGHT, VECTOR = (torch.zeros(*s).bfloat16() for s in ((1, 5, 32), (24, 32), (24,)))
OF_CONTEXT = {"context_x": X, "context_weight": WEIGHT, "context_y": torch.zeros(1, 5, 24)}
OF_CONTEXT["context_y"] = OF_CONTEXT["context_y"].bfloat16()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": X.float()}, TypeError, "x is torch.float32 and jl1_bf16_Br64_Bc128_w4_wr32 takes"),
        ({"weight": WEIGHT.half()}, TypeError, "weight is torch.float16"),
        ({"x": X[:, :0]}, ValueError, "x has seq 0, shape"),
        ({"x": X[:0]}, ValueError, "x has batch 0, shape"),
        ({"weight": WEIGHT[:, :16]}, ValueError, r"weight has shape \(24, 16\) and x \(1, 5, 32\)"),
        ({"bias": VECTOR[:8]}, ValueError, r"bias must have shape \(24,\)"),
        ({"weight": WEIGHT[:20]}, ValueError, "out_features 20 is not a multiple of 8.*pad.* 24"),
        (
            {"x": X[..., :20], "weight": WEIGHT[:, :20]},
            *(ValueError, "in_features 20 is not a multiple of 8.*PyTorch"),
        ),
        ({**OF_CONTEXT, "context_x": X[:, :0]}, ValueError, "context_x has token 0.*leave out all"),
        (
            {**OF_CONTEXT, "context_x": X[..., :16]},
            *(ValueError, r"context_weight has shape \(24, 32\) and context_x \(1, 5, 16\)"),
        ),
        ({"context_x": X, "context_weight": WEIGHT}, ValueError, "given without context_y"),
        ({"context_x": X}, ValueError, "context_weight is missing"),
        ({**OF_CONTEXT, "context_y": X}, ValueError, r"context_y must have shape \(1, 5, 24\)"),
        ({**OF_CONTEXT, "bias": VECTOR}, ValueError, "bias is given without context_bias"),
        (
            {**OF_CONTEXT, "context_norm_weight": VECTOR},
            *(ValueError, "context_norm_weight is given without norm_weight"),
        ),
        (
            {"x": torch.zeros(2, 8, 32).bfloat16()[:, :5]},
            *(ValueError, "rows of all samples must be 32 elements apart: call .contiguous"),
        ),
        ({"x": torch.zeros(1, 5, 36).bfloat16()[..., :32]}, ValueError, "multiples of 8"),
        ({"x": torch.zeros(1, 5, 64).bfloat16()[..., ::2]}, ValueError, "stride 2 in its last"),
        ({"eps": math.nan}, ValueError, "eps nan is not a number from 0 on"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes, error: type[Exception], text: str, bf16: JointLinearKernelConfig
) -> None:
    options = {"eps": changes["eps"]} if "eps" in changes else {}
    given = {"x": X, "weight": WEIGHT}
    given |= {name: x for name, x in changes.items() if name not in options}
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *JointLinear.arranged(given), **options)


def test_what_is_too_large_is_refused(bf16: JointLinearKernelConfig) -> None:
    assert "in_features 520 is over the limit 512" in bf16.refusal(JointLinear(1, 1, 520, 8))
    assert "in_features 136 is over the limit 128 (jl2_bf16" in made("jl2").refusal(
        JointLinear(1, 1, 136, 8)
    )
    assert "context_in 520 is over" in bf16.refusal(
        JointLinear(1, 1, 8, 8, context=1, context_in=520)
    )
    wide = JointLinear(1, 1, 8, 8, context=1, context_out=136, norm=True)
    assert "context_out 136 is over 128, the columns of a thread block" in bf16.refusal(wide)
    assert not bf16.refusal(replace(wide, norm=False))
    assert "split the call by batch" in bf16.refusal(JointLinear(2**15, 2**16, 8, 8))


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        ("Br64_Bc128_w4_wr32_in128", "depth 128: jl1 fixes depth 0; choose jl2"),
        ("Br48_Bc128_w4_wr16", "B_r 48 is not built: choose one of 16, 32, 64, 128"),
        ("Br64_Bc128_w4_wr8", "warp_rows 8 is not built: choose one of 16, 32, 64"),
        ("Br64_Bc96_w4_wr32", "B_c 96 is not a multiple of 64 up to 256: choose 128"),
        ("Br64_Bc320_w4_wr32", "B_c 320 is not a multiple of 64 up to 256"),
        ("Br16_Bc64_w4_wr32", "B_r 16 is not a multiple of warp_rows 32: choose warp_rows 16"),
        ("Br64_Bc128_w3_wr16", "n_warps 3 is not a multiple of 4.*choose 4"),
        ("Br64_Bc128_w32_wr16", "n_warps 32 is not a multiple of 4.* up to 16"),
        ("Br16_Bc128_w3_wr16", "3 warps share B_c 128.*choose n_warps 1"),
        ("Br128_Bc128_w2_wr64", "256 sums, over the limit 128"),
        ("Br64_Bc256_w12_wr64", "12 warps share B_c 256"),
        ("Br128_Bc256_w16_wr64", "103424 bytes of shared memory, over the limit 101376"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(tile: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JointLinearKernelConfig.from_short_form(f"jl1_bf16_{tile}")


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        ("Br64_Bc128_w4_wr32", "depth 0 is not a multiple of 64 from B_c 128 on"),
        ("Br64_Bc128_w4_wr32_in96", "depth 96 is not a multiple of 64 from B_c 128 on.*choose 128"),
        ("Br64_Bc128_w4_wr32_in64", "depth 64 is not a multiple of 64 from B_c 128 on"),
        ("Br64_Bc128_w4_wr32_in256", "132096 bytes of shared memory, over the limit 101376"),
    ],
)
def test_a_config_whose_weights_cannot_stay_is_refused_with_a_way_out(tile: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JointLinearKernelConfig.from_short_form(f"jl2_bf16_{tile}")


def test_threads_that_do_not_share_the_rows_of_y_are_refused_with_a_way_out() -> None:
    text = "64 threads store 4 rows of B_c 128 at once, no multiple of 8.*choose n_warps 4"
    with pytest.raises(ValueError, match=text):
        JointLinearKernelConfig.from_short_form("jl3_bf16_Br16_Bc128_w2_wr16_in128")
    JointLinearKernelConfig.from_short_form("jl3_bf16_Br16_Bc128_w4_wr16_in128")
