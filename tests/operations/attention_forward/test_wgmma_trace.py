"""The values of kernels on `wgmma`, read from the simulator, beside blockwise FlashAttention-2."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_tensors import on_sms, traced
from fake_backend import ROOT
from hopper_steps import GENERAL_STEPS, LAST_OF_HOPPER
from tiers import each

from flash_helpers.check.debugging import compare_with_reference
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.trace.blockwise import rows_that_fit
from flash_helpers.operations.attention_forward.trace.compare import Comparison, compare
from flash_helpers.operations.attention_forward.trace.recorder import UntraceableKernel
from flash_helpers.registry.hopper import HOPPER, HopperKernelConfig, tuned_configs
from flash_helpers.registry.wgmma import (
    MAX_L,
    MAX_RAISE,
    MAX_SUM,
    NO_MAXIMUM,
    REPLAYS,
    UNCHECKED,
)
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel

pytestmark = pytest.mark.slow

PROGRESSION = HOPPER.progression()
THREE_BLOCKS = AttentionForward(batch=1, heads=1, len_q=384)
# Neither dtype is read in another way, and where they differ is in fp16's check.
ONE_DTYPE = [
    config
    for config in PROGRESSION
    if config.step is LAST_OF_HOPPER
    or (config.dtype is Element.BF16 and config.step not in GENERAL_STEPS)
]
OPTIMISTIC = [config for config in PROGRESSION if REPLAYS in config.step.traits]
THREE_WARPGROUPS = [c for c in tuned_configs() if c.B_r == 192 and not c.causal]


def in_matrix(*values: Any):
    """A case whose like another step shows in the first tier."""
    return pytest.param(*values, marks=pytest.mark.matrix(HOPPER.name))


def config_of(step: str, dtype: Element = Element.BF16) -> HopperKernelConfig:
    return next(c for c in PROGRESSION if (c.step.id, c.dtype) == (step, dtype))


def compared(config, shape: AttentionForward | None = None, **options) -> Comparison:
    whole = config.supports.whole
    shape = shape or AttentionForward(1, 1, max(whole, 2 * config.B_c))
    return compare_with_reference(config, shape, **options)


class TestEveryQuantityOfEveryKernelAgrees:
    @each(ONE_DTYPE)
    def test_where_the_maximum_changes(self, config):
        found = compared(config, distribution="outliers")
        assert found.disagreement is None
        assert not found.faults
        first, second = found.steps
        assert torch.equal(first.m, second.m) is (REPLAYS in config.step.traits)

    @each(THREE_WARPGROUPS[-1:])
    def test_with_three_warpgroups(self, config):
        found = compared(config, AttentionForward(1, 1, 192, len_k=160))
        assert found.disagreement is None
        assert found.steps[0].O.shape == (1, 1, 1, 192, 128)

    @pytest.mark.parametrize("step", (in_matrix("h10"), in_matrix("h11"), "h17"))
    def test_of_blocks_that_take_several_tiles(self, step):
        problem = AttentionForward(batch=1, heads=3, len_q=256)
        found = compared(config_of(step), problem, gpu=on_sms(2))
        assert found.disagreement is None
        assert not found.faults


def causal_of(step: str, **changes) -> HopperKernelConfig:
    return config_of(step).replace(causal=True, **changes)


def causal_problem(len_q: int, len_k: int, heads: int = 1) -> AttentionForward:
    return AttentionForward(1, heads, len_q, len_k=len_k, causal=True)


class TestGeneralProblems:
    """Lengths that are not whole blocks, options of a call, and causal kernels."""

    def test_any_lengths_grouped_heads_and_a_scale(self):
        shape = AttentionForward(1, 2, 140, len_k=100, kv_heads=1, softmax_scale=0.2)
        found = compared(config_of("h20"), shape)
        assert found.disagreement is None
        assert not found.faults

    def test_a_block_that_only_others_see_is_hidden_and_the_maximum_found_again(self):
        found = compared(causal_of("h21"), causal_problem(128, 192))
        assert found.disagreement is None
        assert not found.faults
        first, second = (step.m[0, 0, 0, :64, 0] for step in found.steps)
        assert (first < -1e28).all() and (second > -1e28).all()
        assert not found.steps[0].P[..., :64, :].any()

    @pytest.mark.parametrize("changes", [{}, {"B_r": 192, "B_c": 80, "V_slots": 3}])
    def test_a_block_that_only_others_see_is_left_out(self, changes):
        config = causal_of("h24", **changes)
        found = compared(config, causal_problem(config.B_r, config.B_r + 64))
        assert found.disagreement is None
        assert not found.faults
        begins = found.steps[0].S[0, 0, 0, ::64, 0].isnan().tolist()
        assert begins == [True] * (config.consumers - 1) + [False]
        assert found.steps[0].K.isnan().flatten(4).all(-1).sum() == 4 * (config.consumers - 1)

    def test_queries_that_see_nothing_in_tiles_of_several_heads(self):
        found = compared(causal_of("h21"), causal_problem(256, 64, heads=3))
        assert found.disagreement is None
        assert not found.output[:, :192].any()

    def test_tiles_from_a_counter(self):
        found = compared(causal_of("h24"), causal_problem(640, 192), gpu=on_sms(2))
        assert found.disagreement is None
        assert not found.faults

    @pytest.mark.parametrize("causal", [in_matrix(False), True])
    def test_tiles_of_a_cluster_one_of_which_has_no_rows(self, causal):
        config = config_of("h25").replace(causal=causal)
        problem = replace(causal_problem(300, 130), causal=causal)
        found = compared(config, problem, gpu=on_sms(2))
        assert found.disagreement is None
        assert not found.faults

    def test_two_heads_of_a_cluster(self):
        problem = replace(causal_problem(200, 130, heads=6), kv_heads=3)
        found = compared(causal_of("h26"), problem, gpu=on_sms(4))
        assert found.disagreement is None
        assert not found.faults

    def test_half_of_a_block_where_no_more_is_seen(self):
        found = compared(causal_of("h27"), causal_problem(256, 256))
        assert found.disagreement is None
        assert not found.faults
        diagonals = found.steps[::-1]  # by block of rows: the keys that begin where its rows do
        for row_block, diagonal in enumerate(diagonals):
            for row, computed in ((0, 64), (64, 128)):  # of the first and the second warpgroup
                S, P = (of[0, 0, row_block, row] for of in (diagonal.S, diagonal.P))
                assert S.isfinite().tolist() == [n < computed for n in range(128)]
                assert not P[computed:].nan_to_num().any()

    @pytest.mark.parametrize(
        ("step", "heads", "len_q"),
        [in_matrix("h22", 1, 640), ("h24", 3, 250), in_matrix("h28", 1, 640)],
    )
    def test_tiles_that_are_handed_out_backwards(self, step, heads, len_q):
        config, problem = causal_of(step), causal_problem(len_q, 192, heads)
        order = config.order(problem, on_sms(4))
        known = [order.known_tiles(block) for block in range(4)]
        assert (len(known[0]), len(known[3])) == (1, 2)  # the longest tile alone
        found = compared(config, problem, gpu=on_sms(4))
        assert found.disagreement is None
        assert not found.faults

    @pytest.mark.matrix(HOPPER.name)
    def test_tiles_of_a_cluster_from_a_counter(self):
        found = compared(causal_of("h25"), causal_problem(640, 192), gpu=on_sms(2))
        assert found.disagreement is None
        assert not found.faults


class TestRowsThatDoNotFit:
    """Rows of which m of a tile's first block is too low."""

    @pytest.mark.parametrize(
        ("step", "dtype"), [in_matrix("h12", Element.FP16), ("h17", Element.BF16)]
    )
    def test_are_compared_with_exact_ones(self, step, dtype):
        config = config_of(step, dtype)
        q, k, v = make_inputs("normal", THREE_BLOCKS, getattr(torch, dtype.torch_name))
        # the second block's maximum is over the first's, by a little, by more, by too much
        k[:, :, :, 0] = torch.tensor([0, 1, 1]).repeat_interleave(128)[:, None]
        q[:, :, :, 0] = 0
        q[:, 16:32, :, 0], q[:, 32:48, :, 0] = 250, 2000
        problem = THREE_BLOCKS.in_dtype(dtype)
        found = compare(config, problem, {"q": q, "k": k, "v": v})
        fits = rows_that_fit(found.expected_steps, THREE_BLOCKS.len_q).flatten().tolist()
        assert fits == [True] * 32 + [False] * 16 + [True] * 336
        assert found.disagreement is None
        first, *_, last = found.steps
        raised = (first.m != last.m).any(-1).flatten()[:32].tolist()
        is_checked = UNCHECKED not in config.step.traits or dtype is Element.FP16
        assert raised == [False] * 16 + [is_checked] * 16

    def test_the_limits_are_those_of_the_kernels(self):
        limits = {"kMaxSum": MAX_SUM, "kMaxRescale": MAX_RAISE, "kMaxL": MAX_L}
        header = ROOT / "src/include/sm90/softmax.cuh"
        for step in {config.step for config in OPTIMISTIC}:
            text = (ROOT / step.source).read_text()
            if f'"sm90/{header.name}"' in text:
                text += header.read_text()
            for name, limit in limits.items():
                (value,) = re.findall(rf"{name} = ([^;]+);", text)
                assert eval(value) == limit  # such as 1 << 15
        assert f"kNoMaximum = {NO_MAXIMUM:.0e};".replace("+", "") in header.read_text()


def test_a_kernel_of_another_tile_shape_is_refused():
    config = config_of("h13")
    kernel = load_kernel(config, ptx_path(config))
    q, k, v = make_inputs("normal", AttentionForward(1, 1, 640), torch.bfloat16)
    with pytest.raises(
        UntraceableKernel, match=r"8 wgmma of P @ V in a group, and a block of keys takes 5:"
    ):
        traced(config.replace(B_c=80), kernel, q, k, v)


def test_a_softmax_that_is_not_understood_is_refused():
    config = config_of("h2")
    text = ptx_path(config).read_text()
    kernel = load_kernel(config, text.replace("ex2.approx.ftz.f32", "sqrt.approx.ftz.f32"))
    q, k, v = make_inputs("normal", AttentionForward(1, 1, 256), torch.bfloat16)
    with pytest.raises(UntraceableKernel, match="no maxima of rows"):
        traced(config, kernel, q, k, v)
