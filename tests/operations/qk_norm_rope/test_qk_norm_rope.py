"""Norm and rotary embedding of Q and K of two streams: their problem, their bounds, and their
kernels in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Element
from flash_helpers.operations.qk_norm_rope import OPERATION
from flash_helpers.operations.qk_norm_rope.baselines import joined, run
from flash_helpers.operations.qk_norm_rope.grid import GROUPS, competing, distance
from flash_helpers.operations.qk_norm_rope.inputs import draw
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.operations.qk_norm_rope.problems import DISTRIBUTIONS
from flash_helpers.operations.qk_norm_rope.reference import reference
from flash_helpers.registry.qk_norm_rope import QK_NORM_ROPE, QkNormRopeKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
Tensors = dict[str, torch.Tensor]

each_config = each(CONFIGS)


@pytest.fixture
def bf16() -> QkNormRopeKernelConfig:
    return QK_NORM_ROPE.fixed_config(QK_NORM_ROPE.steps["qr1"], Element.BF16)


def made(step: str, **fields: int) -> QkNormRopeKernelConfig:
    """The fixed config of a step in bf16, with some fields changed."""
    return QK_NORM_ROPE.fixed_config(QK_NORM_ROPE.steps[step], Element.BF16).replace(**fields)


def drawn(problem: QkNormRope, distribution: str = "normal") -> Tensors:
    """The inputs, and an empty output of V if the problem has one."""
    found = draw(distribution, problem)
    if problem.context:
        shape = problem.tensor("joint_v").shape
        found["joint_v"] = torch.full(shape, math.nan, dtype=found["q"].dtype)
    return found


def check(config: QkNormRopeKernelConfig, problem: QkNormRope, given: Tensors) -> Tensors:
    """Simulate, watched, and compare with the reference; return the outputs."""
    call = prepare(config, *problem.arranged(given), **problem.call_options())
    assert call.problem == problem
    found = call.simulate(keep_going=True)
    assert not found.faults and not found.lints
    wanted = reference(problem, given)
    assert {*wanted.bounds} == {tensor.name for tensor in problem.outputs}
    for name, bound in wanted.bounds.items():
        error = measure_error(call.tensors[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))
    if problem.context:
        copied = torch.cat((given["v"], given["context_v"]), 1)
        assert torch.equal(call.tensors["joint_v"], copied)
    return {name: call.tensors[name] for name in wanted.bounds}


# -- the problem and the reference -----------------------------------------------------------------


def test_each_tensor_is_moved_once() -> None:
    problem = QkNormRope(2, 3, 10, 64, context=4, rotary=True)
    tokens, table = 2 * 3 * 14 * 192, 10 * 32 * 2 * 4
    assert problem.bytes == 2 * (2 * tokens + 4 * 192) + table
    last = replace(problem, context_queries=False)
    assert problem.bytes - last.bytes == 2 * (2 * 2 * 4 * 192 + 192)
    alone = replace(problem, context=0, rotary=False)
    assert alone.bytes == 2 * (2 * 2 * 2 * 10 * 192 + 2 * 192)  # V stays where it is
    assert alone.operations == 4 * 2 * 2 * 10 * 192
    assert QkNormRope.from_record(last.record()) == last
    assert str(last).endswith("context 4, no context_queries, rotary")


def test_the_reference_is_the_plain_formulation() -> None:
    problem = QkNormRope(2, 3, 4, 6, context=2, rotary=True, eps=0.1)
    inputs = draw("normal", problem)
    found = reference(problem, inputs).expected
    for name in "qk":
        for sample, token in ((0, 3), (1, 0), (1, 5)):
            own = token < 4
            stream, place = ("", token) if own else ("context_", token - 4)
            x = inputs[f"{stream}{name}"].double()[sample, place]
            weight = inputs[f"{stream}{name}_weight"].double()
            normed = (x / (x.square().mean() + 0.1).sqrt() * weight).view(3, 6)
            if own:
                angles = torch.view_as_complex(inputs["rotary"].double()[token])
                pairs = torch.view_as_complex(normed.view(3, 3, 2)) * angles
                normed = torch.view_as_real(pairs).flatten(1)
            torch.testing.assert_close(found[f"joint_{name}"][sample, token], normed.flatten())
    v = torch.cat((inputs["v"], inputs["context_v"]), 1)
    assert torch.equal(found["joint_v"], v.double())


@pytest.mark.parametrize("dtype", QK_NORM_ROPE.dtypes)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_of_elements_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = QkNormRope(2, 3, 5, 32, dtype, context=2, rotary=True)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch_qk_norm_rope", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        errors = (found[name].double() - expected).abs()
        assert (errors <= bound.of_elements).all()
        right = expected.to(found[name].dtype)  # rounded once
        assert measure_error(right, expected).within(bound)
        wrong = right.clone()
        wrong[1, 2, 3] += 0.05 * expected[1, 2].abs().max() + 0.01
        assert not measure_error(wrong, expected).within(bound)


@pytest.mark.parametrize("mistake", ["head by head", "other way", "context turned", "no weight"])
def test_mistakes_are_outside_of_the_bound(mistake: str) -> None:
    problem = QkNormRope(1, 2, 4, 16, context=3, rotary=True)
    inputs = draw("normal", problem)
    wanted = reference(problem, inputs)
    exact = {name: x.double() for name, x in inputs.items()}
    found = joined(problem, exact)["joint_q"]
    if mistake == "head by head":
        apart = exact["q"].unflatten(-1, (2, 16))
        whole = exact["q"].square().mean(-1)[..., None, None]
        share = (whole / apart.square().mean(-1, keepdim=True)).sqrt()
        found[:, :4] *= share.expand(-1, -1, -1, 16).flatten(2)
    elif mistake == "other way":
        exact["rotary"][..., 1] *= -1
        found = joined(problem, exact)["joint_q"]
    elif mistake == "context turned":
        own = {**exact, "q": exact["context_q"], "q_weight": exact["context_q_weight"]}
        own |= {"k": exact["context_k"], "rotary": exact["rotary"][1:]}
        found[:, 4:] = joined(replace(problem, length=3), own)["joint_q"][:, :3]
    else:
        exact["context_q_weight"] = torch.ones_like(exact["context_q_weight"])
        found = joined(problem, exact)["joint_q"]
    assert not measure_error(found.bfloat16(), wanted.expected["joint_q"]).within(
        wanted.bounds["joint_q"]
    )


def test_what_is_measured_in_torch_compile_is_one_graph() -> None:
    problem = OPERATION.small
    inputs = draw("normal", problem)
    compiled = torch.compile(joined, backend="eager", fullgraph=True, dynamic=False)
    found, right = (f(problem, inputs) for f in (compiled, joined))
    assert found.keys() == right.keys() == {"joint_q", "joint_k", "joint_v"}
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ((0, 1, 1, 16), {}, "batch 0 is not positive"),
        ((1, 1, 1, 0), {}, "d_head 0 is not positive"),
        ((1, 1, 1, 16), {"context": -1}, "context -1 is negative: use 0"),
        ((1, 1, 1, 15), {"rotary": True}, "d_head 15 is odd"),
        ((1, 1, 1, 16), {"eps": -1.0}, "eps -1.0 is not a number from 0 on"),
        ((1, 1, 1, 16), {"eps": math.nan}, "eps nan is not a number from 0 on"),
    ],
)
def test_sizes_and_options_that_mean_nothing_are_refused(
    sizes: tuple[int, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        QkNormRope(*sizes, **options)


# -- the kernels, simulated ------------------------------------------------------------------------


@each_config
def test_the_corners_of_the_declaration_are_right(config: QkNormRopeKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, problem, drawn(problem))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: QkNormRopeKernelConfig, distribution: str) -> None:
    problem = QkNormRope(1, 3, 2, 64, config.dtype, context=1, rotary=True)
    check(config, problem, drawn(problem, distribution))


@pytest.mark.parametrize("step", ["qr1", "qr2"])
@pytest.mark.parametrize("d_head", [64, 96, 128, 192, 256])
def test_heads_of_every_size_are_right(d_head: int, step: str) -> None:
    """Those that attention takes, with one chunk of a thread and with several."""
    for row_threads, heads in ((32, 3), (64, 6)):
        problem = QkNormRope(1, heads, 2, d_head, context=1, rotary=True)
        check(made(step, chunks=4, row_threads=row_threads), problem, drawn(problem))


SHAPES = sorted(
    {
        made(step, **fields)
        for group in GROUPS.values()
        for problem in group
        for step, fields in competing(problem)
    }
)


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.short_form())
def test_the_shapes_that_compete_are_right(config: QkNormRopeKernelConfig) -> None:
    heads = config.supports.max_width // 64
    problem = QkNormRope(1, heads, 2, 64, context=1, rotary=True)
    check(config, problem, drawn(problem))


@pytest.mark.parametrize("step", ["qr1", "qr2"])
@pytest.mark.parametrize("width", [1024, 3072, 3200, 16384])
def test_widths_have_a_variant_that_takes_them(width: int, step: str) -> None:
    problem = QkNormRope(1, width // 128, 1, 128, rotary=True)
    taking = next(config for config in made(step).variants() if not config.refusal(problem))
    assert taking.supports.max_width == (3072 if width <= 3072 else 16384)
    check(taking, problem, drawn(problem))


@each_config
def test_parts_of_projections_are_taken_as_they_are(config: QkNormRopeKernelConfig) -> None:
    problem = QkNormRope(2, 2, 3, 16, config.dtype, context=2, rotary=True)
    given = drawn(problem)
    found = check(config, problem, given)
    for stream in ("", "context_"):
        names = [f"{stream}{name}" for name in "qkv"]
        projected = torch.cat([given[name] for name in names], -1)
        given |= dict(zip(names, projected.split(32, -1), strict=True))
    memory = torch.full((2, 5, 48), math.nan, dtype=given["q"].dtype)
    given["joint_q"] = memory[..., :32]
    again = check(config, problem, given)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert memory[..., 32:].isnan().all()  # nothing is written between the rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spreads_as_in_pytorch(
    value: float, bf16: QkNormRopeKernelConfig
) -> None:
    problem = QkNormRope(1, 2, 3, 16, rotary=True)
    given = drawn(problem)
    given["q"][0, 1, 7] = value
    call = prepare(bf16, *problem.arranged(given), **problem.call_options())
    call.simulate()
    right = joined(problem, given)
    for name in ("joint_q", "joint_k"):
        assert torch.equal(call.tensors[name].isnan(), right[name].isnan())
        assert not call.tensors[name].isinf().any()


def test_a_row_of_zeros_stays_zeros(bf16: QkNormRopeKernelConfig) -> None:
    problem = QkNormRope(1, 2, 2, 16, rotary=True)
    given = drawn(problem)
    given["k"][0, 1] = 0
    assert not check(bf16, problem, given)["joint_k"][0, 1].any()


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ({"step": "qr2"}, {"context": 64, "context_queries": False}, 2 * 250),
        ({"step": "qr2", "row_threads": 8}, {}, 24),
        ({"row_threads": 128}, {"context": 64}, 2 * 3 * 250),
        ({}, {"context": 64}, 3 * 250),
        ({}, {"context": 64, "context_queries": False}, 686),
        ({}, {}, 2 * 186),
        ({"row_threads": 8, "n_warps": 8}, {}, 24),
    ],
)
def test_one_grid_has_all_rows(shape: dict[str, Any], options: dict[str, Any], blocks: int) -> None:
    config = made(**{"step": "qr1", **shape})
    problem = QkNormRope(2, 2, 186, 128, rotary=True, **options)
    device = OPERATION.part("faults").device_of(config)
    (launch,) = config.call(problem, problem.strides(), device).launches
    assert launch.grid == (blocks, 1, 1)


def test_few_shapes_compete_for_a_problem_and_all_take_it() -> None:
    for group in GROUPS.values():
        for problem in group:
            configs = [made(step, **fields) for step, fields in competing(problem)]
            assert len({*configs}) == len(configs) and 2 <= len(configs) <= 8
            assert {config.step.id for config in configs} == {"qr1", "qr2"}
            assert not any(config.refusal(problem) for config in configs)


def test_the_choice_knows_problems_by_their_width() -> None:
    asked = OPERATION.usual
    assert distance(asked, asked) == distance(asked, replace(asked, dtype=Element.FP16)) == 0
    assert distance(asked, replace(asked, batch=4)) == 0.25
    assert distance(asked, replace(asked, heads=12)) == 1
    assert distance(asked, replace(asked, heads=48, d_head=64)) == 0  # rows are the same
    assert distance(asked, replace(asked, length=1178, context=0)) > 0.25


# -- refusals --------------------------------------------------------------------------------------

X, WEIGHT = torch.zeros(1, 5, 32).bfloat16(), torch.zeros(32).bfloat16()
TABLE = torch.zeros(5, 8, 2)
GIVEN: Tensors = {"q": X, "k": X.clone(), "q_weight": WEIGHT, "k_weight": WEIGHT.clone()}
OF_CONTEXT: Tensors = {
    "v": X.clone(),
    "context_k": X.clone(),
    "context_v": X.clone(),
    "context_k_weight": WEIGHT.clone(),
    "joint_v": torch.zeros(1, 10, 32).bfloat16(),
}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": X.float()}, TypeError, "q is torch.float32 and qr1_bf16_w4_c6_t64 takes"),
        ({"k": X.half()}, TypeError, "k is torch.float16"),
        ({"rotary": TABLE.double()}, TypeError, "rotary is torch.float64"),
        ({"q": X[:, :0]}, ValueError, "q has seq 0, shape"),
        ({"heads": 3}, ValueError, "q has width 32, shape .* multiple of heads 3: pass heads ="),
        ({"heads": 8}, ValueError, "d_head 4 is not a multiple of 8 .*pad the heads"),
        ({"k": X[:, :4]}, ValueError, r"k has shape \(1, 4, 32\) and q \(1, 5, 32\)"),
        ({"k_weight": WEIGHT[:8]}, ValueError, r"k_weight must have shape \(32,\)"),
        ({"v": X.clone()}, ValueError, "v is given without a context, where V stays"),
        ({"rotary": TABLE[:4]}, ValueError, "rotary has 4 positions and q 5 tokens.*longer"),
        ({"rotary": TABLE[:, :4]}, ValueError, r"heads of 16 need \(5, 8, 2\)"),
        (
            {"rotary": torch.zeros(5, 8, 3)[..., :2]},
            *(ValueError, "rotary has strides .* must be contiguous"),
        ),
        ({**OF_CONTEXT, "context_k": X[:, :0]}, ValueError, "context_k has token 0.*leave out all"),
        ({**OF_CONTEXT, "joint_v": None}, ValueError, "joint_v is missing"),
        ({**OF_CONTEXT, "context_v": None}, ValueError, "context_v is missing"),
        ({**OF_CONTEXT, "context_q": X.clone()}, ValueError, "context_q_weight is missing"),
        (
            {**OF_CONTEXT, "joint_v": X.clone()},
            ValueError,
            r"joint_v must have shape \(1, 10, 32\)",
        ),
        ({"q": torch.zeros(1, 5, 64).bfloat16()[..., ::2]}, ValueError, "stride 2 in its last"),
        ({"q": torch.zeros(1, 5, 36).bfloat16()[..., :32]}, ValueError, "multiples of 8"),
        ({"q": torch.zeros(161).bfloat16()[1:].view(X.shape)}, ValueError, "q starts at address"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str, bf16: QkNormRopeKernelConfig
) -> None:
    given = {**GIVEN, **changes}
    heads = given.pop("heads", 2)
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *(given.get(name) for name in QkNormRope.axes), heads=heads)


def test_what_is_too_large_is_refused(bf16: QkNormRopeKernelConfig) -> None:
    text = bf16.refusal(QkNormRope(1, 25, 1, 128))
    assert "25 heads of 128 are a width of 3200, over the limit 3072" in text
    assert "more row_threads or chunks" in text
    many = QkNormRope(2**16, 1, 2**14, 128, context=1)
    assert "split the call by batch" in bf16.refusal(many)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chunks": 16}, "chunks 16 is over 12: choose 3 or 4"),
        ({"step": "qr2", "chunks": 5}, "chunks 5 is over 4: choose 3 or 4"),
        ({"row_threads": 24}, "row_threads 24 is not a power of two from 8 to the 128 threads"),
        ({"row_threads": 256}, "row_threads 256 is not a power of two from 8 to the 128 threads"),
        ({"n_warps": 3}, "n_warps 3 is not a power of two"),
    ],
)
def test_configs_that_cannot_be_built_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(**{"step": "qr1", **fields})
