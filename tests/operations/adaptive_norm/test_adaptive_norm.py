"""Adaptive layer norms of gated sums: their problem, their bounds, and kernels in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.adaptive_norm import OPERATION
from flash_helpers.operations.adaptive_norm.baselines import computed, run
from flash_helpers.operations.adaptive_norm.grid import GROUPS, competing, distance
from flash_helpers.operations.adaptive_norm.inputs import draw
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.adaptive_norm.reference import adaptive_norm_float64, reference
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.registry.adaptive_norm import ADAPTIVE_NORM, AdaptiveNormKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
Tensors = dict[str, torch.Tensor]
OUTPUTS = ("y", "sum")
KINDS: list[dict[str, Any]] = [
    {},
    {"change": True, "sum": True},
    {"change": True},
    {"change": True, "norm": False},
    {"change": True, "norm": False, "sum": True},
    {"norm": False},
    {"sum": True},
]

each_config = each(CONFIGS)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "_".join(kind) or "plain")


@pytest.fixture
def bf16() -> AdaptiveNormKernelConfig:
    return ADAPTIVE_NORM.fixed_config(ADAPTIVE_NORM.steps["ad1"], Element.BF16)


def made(**fields: int) -> AdaptiveNormKernelConfig:
    """The fixed config in bf16, with some fields changed."""
    return ADAPTIVE_NORM.fixed_config(ADAPTIVE_NORM.steps["ad1"], Element.BF16).replace(**fields)


def drawn(problem: AdaptiveNorm, distribution: str = "normal") -> Tensors:
    """The inputs, and outputs of NaN."""
    found = draw(distribution, problem)
    for tensor in problem.outputs:
        found[tensor.name] = torch.full(tensor.shape, math.nan, dtype=found["x"].dtype)
    return found


def check(config: Config, problem: AdaptiveNorm, given: Tensors) -> Tensors:
    """Simulate, watched, and compare with the reference; return the outputs."""
    call = prepare(config, *problem.arranged(given), **problem.call_options())
    assert call.problem == problem
    assert not call.simulate(keep_going=True).faults
    wanted = reference(problem, given)
    assert {*wanted.bounds} == {tensor.name for tensor in problem.outputs}
    for name, bound in wanted.bounds.items():
        error = measure_error(call.tensors[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))
    return {name: call.tensors[name] for name in wanted.bounds}


# -- the problem and the reference -----------------------------------------------------------------


def test_each_tensor_is_moved_once() -> None:
    problem = AdaptiveNorm(2, 10, 32, change=True, sum=True, context=3, context_width=64)
    tokens, vectors = 2 * (10 * 32 + 3 * 64), 2 * (32 + 64)
    assert problem.bytes == 2 * (4 * tokens + 3 * vectors)
    plain = replace(problem, change=False, sum=False, context=0)
    assert plain.bytes == 2 * (2 * 2 * 10 * 32 + 2 * 2 * 32)
    assert plain.operations == 8 * 2 * 10 * 32
    assert AdaptiveNorm.from_record(problem.record()) == problem
    assert str(problem).endswith("context 3, context_width 64, change, norm, sum")


def test_the_width_of_a_context_that_is_not_there_tells_nothing() -> None:
    plain = AdaptiveNorm(1, 5, 16)
    assert AdaptiveNorm(1, 5, 16, context_width=8) == plain
    assert {t.name for t in (*plain.inputs, *plain.outputs)} == {"x", "scale", "shift", "y"}


def test_the_reference_is_the_plain_formulation() -> None:
    problem = AdaptiveNorm(2, 3, 8, change=True, sum=True, context=2, context_width=16, eps=0.1)
    inputs = draw("normal", problem)
    found, exact = reference(problem, inputs).expected, adaptive_norm_float64(problem, inputs)
    for stream in ("", "context_"):
        x, change, gate, scale, shift = (
            inputs[stream + name].double() for name in ("x", "change", "gate", "scale", "shift")
        )
        for sample, token in ((0, 0), (1, 1)):
            row = x[sample, token] + gate[sample] * change[sample, token]
            torch.testing.assert_close(found[f"{stream}sum"][sample, token], row)
            for of, result in ((row, exact), (row.bfloat16().double(), found)):
                centred = of - of.mean()
                y = centred / (centred.square().mean() + 0.1).sqrt()
                right = y * (1 + scale[sample]) + shift[sample]
                torch.testing.assert_close(result[f"{stream}y"][sample, token], right)


@each_kind
@pytest.mark.parametrize("dtype", ADAPTIVE_NORM.dtypes)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_rounded_results_are_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element, kind: dict[str, Any]
) -> None:
    # with a small eps the errors of the mean of a constant row would be large
    problem = AdaptiveNorm(2, 9, 64, dtype, context=4, eps=0.01, **kind)
    wanted = reference(problem, draw(distribution, problem))
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        right = expected.to(getattr(torch, dtype.torch_name))
        assert measure_error(right, expected).within(bound)
        values = right.clone()[1, 2]
        place = int(values.float().abs().nan_to_num(0, 0).argmax())
        wrong = right.clone()
        wrong[1, 2, place] = wrong[1, 2, place] * 1.05 + 0.05
        assert not measure_error(wrong, expected).within(bound)


def test_the_mean_of_squares_less_the_square_of_the_mean_is_outside_of_the_bound() -> None:
    problem = AdaptiveNorm(1, 6, 128, Element.FP16)
    inputs = draw("normal", problem)
    inputs["x"] += 2000
    wanted = reference(problem, inputs)
    x, scale, shift = (inputs[name].float() for name in ("x", "scale", "shift"))
    mean = x.mean(-1, keepdim=True)

    def within(variance: torch.Tensor) -> bool:
        y = (x - mean) * (variance + problem.eps).rsqrt() * (1 + scale[:, None]) + shift[:, None]
        return measure_error(y.half(), wanted.expected["y"]).within(wanted.bounds["y"])

    assert within((x - mean).square().mean(-1, keepdim=True))
    assert not within(x.square().mean(-1, keepdim=True) - mean.square())


def test_what_is_measured_in_torch_compile_is_one_graph() -> None:
    problem = OPERATION.small
    inputs = draw("normal", problem)
    compiled = torch.compile(computed, backend="eager", fullgraph=True, dynamic=False)
    found, right = compiled(problem, inputs), run("pytorch_adaptive", problem, inputs)
    assert found.keys() == right.keys() == {"y", "sum", "context_y", "context_sum"}
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AdaptiveNorm(0, 1, 8), "batch 0 is not positive"),
        (lambda: AdaptiveNorm(1, 1, 8, context=2, context_width=0), "context_width 0 is not pos"),
        (lambda: AdaptiveNorm(1, 1, 8, context=-1), "context -1 is negative: use 0"),
        (lambda: AdaptiveNorm(1, 1, 8, eps=-1.0), "eps -1.0 is not a number from 0 on"),
    ],
)
def test_sizes_and_options_that_mean_nothing_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_two_samples_with_their_contexts_are_right(config: AdaptiveNormKernelConfig) -> None:
    problem = AdaptiveNorm(
        *(2, 7, 72, config.dtype), change=True, sum=True, context=5, context_width=40
    )
    first, second = (check(config, problem, drawn(problem)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: AdaptiveNormKernelConfig, distribution: str) -> None:
    for kind in KINDS[:2]:
        problem = AdaptiveNorm(1, 3, 104, config.dtype, context=2, **kind)
        check(config, problem, drawn(problem, distribution))


@each_config
def test_the_corners_of_the_declaration_are_right(config: AdaptiveNormKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, problem, drawn(problem))


@each_kind
def test_what_a_call_leaves_out_is_left_out(kind, bf16: AdaptiveNormKernelConfig) -> None:
    problem = AdaptiveNorm(2, 3, 64, context=1, **kind)
    found = check(bf16, problem, drawn(problem))
    if not problem.norm and problem.sum:
        assert torch.equal(found["y"], found["sum"])
    if not problem.norm and not problem.change:
        assert torch.equal(found["y"], draw("normal", problem)["x"])


@each_config
def test_views_of_wider_tensors_are_taken_as_they_are(config: AdaptiveNormKernelConfig) -> None:
    """Tokens with gaps, of a part of a longer sequence, and vectors of one layer's output."""
    problem = AdaptiveNorm(2, 3, 24, config.dtype, change=True, sum=True, context=2)
    given = drawn(problem)
    found = check(config, problem, given)
    again, memories = dict(given), {}
    for name, x in given.items():
        shape = (2, 7 * 24) if x.ndim == 2 else (2, x.shape[1] + 3, 24 + 8)
        memories[name] = torch.full(shape, math.nan, dtype=x.dtype)
        view = memories[name][..., 24:48] if x.ndim == 2 else memories[name][:, 1:-2, :24]
        again[name] = view if name.removeprefix("context_") in OUTPUTS else view.copy_(x)
    right = check(config, problem, again)
    assert all(torch.equal(found[name], right[name]) for name in found)
    for name in found:
        assert memories[name].isfinite().sum() == found[name].numel()  # nothing between the rows


SHAPES = sorted(
    {
        made(**fields)
        for group in GROUPS.values()
        for problem in group
        for _, fields in competing(problem)
    }
)


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.short_form())
def test_the_shapes_that_compete_are_right(config: AdaptiveNormKernelConfig) -> None:
    width = min(config.supports.max_width, 1024) - 8
    problem = AdaptiveNorm(1, 2, width, change=True, sum=True, context=1, context_width=16)
    check(config, problem, drawn(problem))


@pytest.mark.parametrize("width", [136, 4096, 4104, 16384])
def test_longer_rows_have_a_variant(width: int, bf16: AdaptiveNormKernelConfig) -> None:
    problem = AdaptiveNorm(1, 1, width, change=True)
    assert f"width {width} is over the limit 128" in bf16.refusal(problem)
    taking = next(c for c in bf16.variants() if not c.refusal(problem))
    check(taking, problem, drawn(problem))


def test_a_row_of_one_value_is_the_shift(bf16: AdaptiveNormKernelConfig) -> None:
    problem = AdaptiveNorm(1, 2, 64)
    given = drawn(problem)
    given["x"][0, 1] = 3
    assert torch.equal(check(bf16, problem, given)["y"][0, 1], given["shift"][0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["x", "change"])
def test_what_is_not_finite_spreads_as_in_pytorch(
    name: str, value: float, bf16: AdaptiveNormKernelConfig
) -> None:
    problem = AdaptiveNorm(1, 3, 64, change=True, sum=True)
    given = drawn(problem)
    given[name][0, 2, 7] = value
    call = prepare(bf16, *problem.arranged(given), **problem.call_options())
    call.simulate()
    right = computed(problem, given)
    for output in OUTPUTS:
        for of_kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(of_kind(call.tensors[output]), of_kind(right[output]))


# -- launches --------------------------------------------------------------------------------------


def test_one_grid_has_the_rows_of_both_streams(bf16: AdaptiveNormKernelConfig) -> None:
    problem = OPERATION.usual
    device = OPERATION.part("faults").device_of(bf16)
    call = bf16.call(problem, problem.strides(), device)
    (launch,) = call.launches
    assert launch.grid == (64 * 186 // 8 + 64 * 64 // 8, 1, 1)
    assert launch.values["blocks"] == (64 * 186 // 8,)
    assert not call.buffers


def test_six_shapes_at_most_compete_for_a_problem_and_all_take_it() -> None:
    for group in GROUPS.values():
        for problem in group:
            configs = [made(**fields) for _, fields in competing(problem)]
            assert 2 <= len({*configs}) == len(configs) <= 6
            assert not any(config.refusal(problem) for config in configs)


def test_the_choice_knows_problems_by_what_they_compute_and_by_their_tokens() -> None:
    asked = OPERATION.usual
    assert distance(asked, asked) == distance(asked, replace(asked, dtype=Element.FP16)) == 0
    assert distance(asked, replace(asked, batch=128)) == 1
    assert distance(asked, replace(asked, length=250, context=0)) == 2
    assert distance(asked, replace(asked, width=256)) == 4
    assert distance(asked, replace(asked, change=False)) >= 100


# -- refusals --------------------------------------------------------------------------------------

X, VECTOR = torch.zeros(1, 5, 32).bfloat16(), torch.zeros(1, 32).bfloat16()
NORM = {"scale": VECTOR, "shift": VECTOR}
OF_CONTEXT = {"context_x": X, "context_scale": VECTOR, "context_shift": VECTOR}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": X.float()}, TypeError, "x is torch.float32 and ad1_bf16_w4_c1_t16 takes"),
        ({"scale": VECTOR.half()}, TypeError, "scale is torch.float16"),
        ({"x": X[:, :0]}, ValueError, "x has seq 0, shape"),
        ({"scale": VECTOR[:, :16]}, ValueError, r"scale must have shape \(1, 32\)"),
        ({"scale": None}, ValueError, "shift is given without scale: pass both"),
        ({"change": X}, ValueError, "change is given without gate: pass both"),
        ({"change": X[:, :4], "gate": VECTOR}, ValueError, r"change must have shape \(1, 5, 32\)"),
        (
            {"x": X[..., :20], "scale": VECTOR[:, :20], "shift": VECTOR[:, :20]},
            *(ValueError, "width 20 is not a multiple of 8.*PyTorch"),
        ),
        ({**OF_CONTEXT, "context_x": X[:, :0]}, ValueError, "context_x has token 0.*leave out all"),
        (OF_CONTEXT, ValueError, "given without context_y"),
        ({"context_x": X, "context_y": X.clone()}, ValueError, "scale is given without context_sc"),
        ({"sum": X.clone(), **OF_CONTEXT}, ValueError, "sum is given without context_sum"),
        ({"x": torch.zeros(1, 5, 36).bfloat16()[..., :32]}, ValueError, "multiples of 8"),
        ({"x": torch.zeros(1, 5, 64).bfloat16()[..., ::2]}, ValueError, "stride 2 in its last"),
        ({"eps": math.nan}, ValueError, "eps nan is not a number from 0 on"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes, error: type[Exception], text: str, bf16: AdaptiveNormKernelConfig
) -> None:
    options = {"eps": changes["eps"]} if "eps" in changes else {}
    given = {"x": X, **NORM, **{n: x for n, x in changes.items() if n not in options}}
    given = {name: x for name, x in given.items() if x is not None}
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *AdaptiveNorm.arranged(given), **options)


def test_configs_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks 16 is over 8: choose 4 or 8"):
        made(chunks=16)
    with pytest.raises(ValueError, match="row_threads 256 is not a power of two from 8 to the 128"):
        made(row_threads=256)
