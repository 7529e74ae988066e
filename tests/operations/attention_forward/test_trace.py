"""A kernel's own values, read from the simulator, beside blockwise FlashAttention-2."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from attention_configs import TRACED
from attention_configs import traced_config as config_of
from attention_tensors import traced
from fake_backend import ROOT
from tiers import each

from flash_helpers.check import debugging
from flash_helpers.check.errors import measure_error
from flash_helpers.compile.sources import included_files
from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    AttentionForward,
    Element,
)
from flash_helpers.operations.attention_forward.inputs import draw, make_inputs
from flash_helpers.operations.attention_forward.reference import attention_reference, reference
from flash_helpers.operations.attention_forward.supports import ABILITIES
from flash_helpers.operations.attention_forward.trace.blockwise import (
    QUANTITIES,
    blockwise_forward,
    finish,
)
from flash_helpers.operations.attention_forward.trace.compare import (
    Excerpt,
    excerpt_text,
    first_disagreement,
)
from flash_helpers.operations.attention_forward.trace.recorder import UntraceableKernel
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.family import Step
from flash_helpers.registry.hopper import HOPPER, HopperKernelConfig
from flash_helpers.registry.mma_sync import LAZY_RESCALE, MAX_GROWTH, MmaSyncConfig
from flash_helpers.registry.wgmma import REPLAYS
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel

pytestmark = pytest.mark.slow

SHAPE = AttentionForward(batch=1, heads=1, len_q=192)
CAUSAL = {"causal": True}


def inputs(config: MmaSyncConfig, distribution="normal", shape=SHAPE):
    return make_inputs(distribution, shape, getattr(torch, config.dtype.torch_name))


def is_lazy(config: MmaSyncConfig) -> bool:
    return LAZY_RESCALE in config.step.traits


# -- the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", AMPERE.dtypes)
@pytest.mark.parametrize("step", ("v1", "v6", "v13", "o1", "o2", "o5"))
@pytest.mark.parametrize("distribution", ("normal", "large_logits", "outliers"))
def test_the_blockwise_reference_is_attention(step, dtype, distribution):
    config = config_of(step, dtype)
    shape = AttentionForward(batch=2, heads=3, len_q=3 * config.B_r)
    q, k, v = inputs(config, distribution, shape)
    steps = [*blockwise_forward(config, q, k, v)]
    reference = attention_reference(q, k, v)
    assert measure_error(finish(steps, q), reference.expected["o"]).within(reference.bounds["o"])


@pytest.mark.parametrize(("step", "options"), [("h20", {}), ("h21", CAUSAL), ("h24", CAUSAL)])
@pytest.mark.parametrize(("len_q", "len_k"), [(130, 200), (300, 100), (128, 192)])
def test_the_blockwise_reference_is_attention_of_any_lengths(step, options, len_q, len_k):
    config = HOPPER.fixed_config(HOPPER.steps[step], Element.BF16).replace(**options)
    shape = AttentionForward(1, 4, len_q, len_k=len_k, kv_heads=2, softmax_scale=0.2, **options)
    q, k, v = inputs(config, shape=shape)
    steps = [*blockwise_forward(config, q, k, v, softmax_scale=0.2)]
    reference = attention_reference(q, k, v, softmax_scale=0.2, **options)
    assert measure_error(finish(steps, q), reference.expected["o"]).within(reference.bounds["o"])


@pytest.fixture
def takes_everything(monkeypatch):
    """Lets every config take windows, softcap, sinks and a d_v of 64. The rows of a tile leave out
    the blocks of keys that none of them sees."""

    def adapt(kind):
        declared = kind.supports

        def supports(config):
            every = {"blocks": {}, "abilities": frozenset(ABILITIES), "d_v": 64}
            return replace(declared.fget(config), **every)

        def own_key_blocks(config, problem, query):
            first = query // config.B_r * config.B_r
            last = min(first + config.B_r, problem.len_q) - 1
            begin, end = problem.visible_keys(first).start, problem.visible_keys(last).stop
            seen = range(begin // config.B_c, max(-(-end // config.B_c), begin // config.B_c + 1))
            blocks = config.key_blocks(problem.len_k)
            return seen[::-1] if blocks.step < 0 else seen

        monkeypatch.setattr(kind, "supports", property(supports))
        monkeypatch.setattr(kind, "own_key_blocks", own_key_blocks)

    adapt(MmaSyncConfig)
    adapt(HopperKernelConfig)


@pytest.mark.parametrize("step", ["v13", "o5", "h20"])
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 30},
        {"window_left": 0, "window_right": 140},
        {"window_right": 3},
        {"softcap": 2.0},
        {"sinks": True},
        {"window_left": 70, "window_right": 3, "softcap": 5.0, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("takes_everything")
def test_the_blockwise_reference_is_attention_with_options(step, options):
    found = STEPS[step]
    config = FAMILIES[found.family].fixed_config(found, Element.BF16)
    problem = AttentionForward(1, 2, 260, len_k=200, d_v=64, **options)
    given = draw("normal", problem)
    steps = [*blockwise_forward(config, **given, **problem.call_options())]
    right = reference(problem, given)
    o = finish(steps, given["q"], given.get("sinks"))
    assert measure_error(o, right.expected["o"]).within(right.bounds["o"])
    if config.B_c == 64 and problem.has_window:  # some tile sees less than all four blocks
        assert any(step.O.isnan().any() for step in steps)


def test_after_a_block_the_quantities_are_those_of_the_keys_so_far():
    config = config_of("v13")
    q, k, v = inputs(config)
    steps = list(blockwise_forward(config, q, k, v))
    assert [step.key_block for step in steps] == [2, 1, 0]
    second = steps[1]
    Q, K, V = (x.transpose(1, 2).double() for x in (q, k, v))
    S = Q[..., :64, :] @ K[..., 64:, :].mT
    m = S.amax(-1, keepdim=True)
    P = torch.exp((S - m) / 128**0.5)
    expected = {
        "Q": Q[..., :64, :],
        "K": K[..., 64:128, :],
        "S": S[..., :64],
        "m": m,
        "l": P.sum(-1, keepdim=True),
        "P": P[..., :64],
        "V": V[..., 64:128, :],
        "O": P @ V[..., 64:, :],
    }
    for name in QUANTITIES:
        got = getattr(second, name)[0, :, 0].reshape(expected[name].shape).double()
        torch.testing.assert_close(got, expected[name], rtol=2**-7, atol=1e-2)


def test_p_is_rounded_and_l_is_not():
    config = config_of("v7", Element.FP16)
    step = next(blockwise_forward(config, *inputs(config)))
    assert torch.equal(step.P, step.P.half().float())
    assert not torch.equal(step.l, step.P.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", AMPERE.dtypes)
def test_sums_by_mma_are_of_the_rounded_p(dtype):
    config = config_of("o5", dtype)
    q, k, v = inputs(config, shape=AttentionForward(1, 1, config.B_r))
    before = config.at_step(STEPS["o4"])
    step, unrounded = (next(blockwise_forward(c, q, k, v)) for c in (config, before))
    torch.testing.assert_close(step.l, step.P.sum(-1, keepdim=True), rtol=2**-20, atol=0)
    assert not torch.allclose(step.l, unrounded.l, rtol=2**-20, atol=0)


def test_a_lazy_maximum_follows_only_one_that_has_grown_by_more_than_the_limit():
    config = config_of("o2")
    q, k, v = inputs(config, "outliers", AttentionForward(1, 1, 4 * config.B_r))
    first, *steps = blockwise_forward(config, q, k, v)
    largest = m = first.m
    followed = []
    for step in steps:
        in_block = step.S.amax(-1, keepdim=True) * (math.log2(math.e) / 128**0.5)
        largest = torch.maximum(largest, in_block)
        follows = largest > m + MAX_GROWTH
        torch.testing.assert_close(step.m, torch.where(follows, largest, m))
        assert step.P.amax() <= 2**MAX_GROWTH
        followed.append(follows & (largest > m))
        m = step.m
    assert any(f.any() for f in followed)
    assert any((~f & (largest > m)).any() for f in followed)


def follows_a_limit(step: Step) -> bool:
    """Whether m is the rows' maximum, or at most a limit below it."""
    return LAZY_RESCALE in step.traits and REPLAYS not in step.traits


@pytest.mark.parametrize(
    "step", [s for s in STEPS.values() if follows_a_limit(s)], ids=lambda step: step.id
)
def test_the_limit_is_that_of_the_kernels(step):
    unit = f'#include "{step.source}"\n'
    texts = [path.read_text() for path in included_files(ROOT, unit)]
    (limit,) = (found for text in texts for found in re.findall(r"kMaxGrowth = (\S+);", text))
    assert float(limit) == MAX_GROWTH


def test_probabilities_below_the_normal_numbers_are_zero_as_those_of_the_kernels():
    step = next(blockwise_forward(config_of("v1"), *inputs(config_of("v1"), "large_logits")))
    assert step.P[step.P > 0].min() >= torch.finfo(torch.float32).tiny
    assert (step.P == 0).any()


def test_keys_are_walked_backwards_from_version_13_on():
    assert list(config_of("v12").key_blocks(256)) == [0, 1, 2, 3]
    assert list(config_of("v13").key_blocks(256)) == [3, 2, 1, 0]


@pytest.mark.parametrize(("seq_len", "d_head"), ((100, 128), (128, 64)))
def test_a_shape_that_the_kernel_cannot_take_is_refused(seq_len, d_head):
    config = config_of("v1")
    shape = AttentionForward(1, 1, seq_len, d_head)
    with pytest.raises(ValueError, match=r"100 is not a multiple|d_head 64 is not supported"):
        next(blockwise_forward(config, *inputs(config, shape=shape)))


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        ("h19", {"return_lse": True}, "return_lse is not supported by h19_"),
        ("h21", CAUSAL, "causal is not supported by h21_.*_pp: without causal=True"),
    ],
)
def test_what_is_not_compared_is_refused(step, options, message):
    config = HOPPER.fixed_config(HOPPER.steps[step], Element.BF16)
    with pytest.raises(ValueError, match=message):
        debugging.compare_with_reference(config, AttentionForward(1, 1, 64, **options))


# -- the kernels' own values -----------------------------------------------------------------------


# neither dtype is read in another way
@each(c for c in TRACED if c.dtype is Element.BF16 or c.step is TRACED[-1].step)
def test_every_quantity_of_every_kernel_agrees(config):
    distribution = "outliers" if is_lazy(config) else "normal"  # m changes in the second block
    q, k, v = inputs(config, distribution, AttentionForward(1, 1, max(config.B_r, 2 * config.B_c)))
    trace = traced(config, load_kernel(config, ptx_path(config)), q, k, v)
    steps = list(blockwise_forward(config, q, k, v))
    found = first_disagreement(config, trace.steps, trace.output, steps, finish(steps, q))
    assert found is None
    assert not trace.run.faults
    assert not torch.equal(steps[0].m, steps[1].m)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_one_wrong_value_is_found_where_it_is(quantity):
    config = config_of("v7")
    q, k, v = inputs(config)
    steps = list(blockwise_forward(config, q, k, v))
    output = finish(steps, q)
    values = getattr(steps[1], quantity)
    whole = values.expand(1, 1, 3, 4, 64, 128) if quantity in "KV" else values
    wrong = whole.clone()
    wrong[(0, 0, 2, 3, 37, 0) if quantity in "KV" else (0, 0, 2, 37, 0)] *= 1.125
    damaged = [steps[0], replace(steps[1], **{quantity: wrong}), steps[2]]
    found = first_disagreement(config, damaged, output, steps, output)
    assert found is not None
    assert (found.quantity, found.block, found.row_block) == (quantity, 1, 2)
    if quantity in "KV":
        assert (found.warp, found.row) == (3, 64 + 37)
    else:
        assert (found.warp, found.row) == (2, 2 * 64 + 37)
    assert found.n_wrong == 1


def test_a_block_that_should_be_left_out_is_a_difference():
    own, of_tile = (
        HOPPER.fixed_config(HOPPER.steps[step], Element.BF16).replace(causal=True)
        for step in ("h24", "h23")
    )
    q, k, v = inputs(own, shape=AttentionForward(1, 1, 128, len_k=192))
    expected, others = ([*blockwise_forward(config, q, k, v)] for config in (own, of_tile))
    output = finish(expected, q)
    found = first_disagreement(own, others, output, expected, output)
    assert found is not None
    assert (found.quantity, found.block, found.warp, found.row) == ("Q", 1, 0, 0)
    assert found.n_wrong == 64 * 128


def test_what_was_never_computed_is_a_difference():
    config = config_of("v7")
    q, k, v = inputs(config)
    steps = list(blockwise_forward(config, q, k, v))
    output = finish(steps, q)
    damaged = [replace(steps[0], m=torch.full_like(steps[0].m, torch.nan)), *steps[1:]]
    found = first_disagreement(config, damaged, output, steps, output)
    assert found is not None and found.quantity == "m"


def test_a_wrong_output_alone_is_found():
    config = config_of("v7")
    q, k, v = inputs(config)
    steps = list(blockwise_forward(config, q, k, v))
    output = finish(steps, q)
    wrong = output.clone()
    wrong[0, 150, 0, 5] += 1
    found = first_disagreement(config, (), wrong, (), output)
    assert found is not None
    assert (found.quantity, found.row, found.column, found.warp) == ("output", 150, 5, 1)


def test_a_kernel_of_another_tile_shape_is_refused():
    config = config_of("v7")
    kernel = load_kernel(config, ptx_path(config))
    with pytest.raises(UntraceableKernel, match="mma instructions"):
        traced(config.replace(B_c=128), kernel, *inputs(config))


def test_a_trace_that_does_not_fit_is_refused():
    config = config_of("v7")
    kernel = load_kernel(config, ptx_path(config))
    shape = AttentionForward(batch=16, heads=16, len_q=1024)
    with pytest.raises(ValueError, match="use a shorter sequence"):
        traced(config, kernel, *[torch.empty(1).bfloat16().expand(shape.shape)] * 3)


# -- the text --------------------------------------------------------------------------------------


def test_the_excerpt_holds_the_rows_of_one_warp_of_the_chosen_blocks():
    config = config_of("v7")
    q, k, v = inputs(config, "countable")
    steps = list(blockwise_forward(config, q, k, v))
    output = finish(steps, q)
    text = excerpt_text(config, steps, output, Excerpt(row_block=1, blocks=[2], warp=3))
    titles = [line for line in text.splitlines() if "block" in line]
    assert titles == [
        f"{name}, key block 2, row block 1" + (", warp 3" if name in "KV" else "")
        for name in QUANTITIES
    ] + ["output, row block 1"]
    rows = text.split("m, key block 2")[1].split("l, key block 2")[0].splitlines()[1:]
    assert [int(row.split(":")[0]) for row in rows] == list(range(64 + 48, 64 + 64))
    assert [float(row.split(":")[1]) for row in rows] == steps[2].m[0, 0, 1, 48:, 0].tolist()
