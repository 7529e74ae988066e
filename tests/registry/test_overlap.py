"""Family overlap: head sizes and variable lengths, and what attention takes for them below Hopper
and on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.gpu import LIMITS, largest_device
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.registry.overlap import OVERLAP, TILES
from flash_helpers.tune.best import config_for

LAST = OVERLAP.progression()[-1]
DEVICES = {"cpu": None, "sm_80": largest_device(80), "sm_89": largest_device(89)}
OPTIONS = {"softcap": 5.0, "window_left": 7, "return_lse": True, "causal": True}


def problem(d_head: int, **options: object) -> AttentionForward:
    return AttentionForward(2, 4, 300, d_head, Element.BF16, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, OPTIONS], ids=["none", "causal", "all"])
@pytest.mark.parametrize("d_head", TILES)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_head_size_has_a_kernel_with_every_option(device, d_head, options):
    config = config_for(problem(d_head, **options), device)
    assert config.step.id == LAST.step.id
    assert config.d_head == d_head
    assert config.smem_bytes <= min(LIMITS[int(target)].smem_bytes for target in OVERLAP.targets)


@pytest.mark.parametrize(("d_head", "nearest"), [(1, 64), (80, 96), (97, 128), (255, 256)])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["none", "all"])
def test_a_head_size_between_them_is_refused_with_the_next(d_head, nearest, options):
    message = rf"d_head {d_head} is not .* by o\d+_bf16_d{nearest}_.* zeros to {nearest}, and"
    with pytest.raises(ValueError, match=message):
        config_for(problem(d_head, **options), None)


def test_a_head_size_beyond_them_is_refused_with_the_largest():
    with pytest.raises(ValueError, match=r"d_head 257 is not supported by .*: use 256 at most"):
        config_for(problem(257), None)


def test_a_config_of_another_head_size_is_refused_with_those_that_are_built():
    with pytest.raises(ValueError, match="d_head 80 is not built: choose one of 64, 96, 128, 192"):
        LAST.replace(d_head=80)


def test_pieces_of_32_columns_take_no_more_shared_memory_than_the_columns():
    config = LAST.of_size(96)
    assert config.smem_bytes == (config.B_r + 4 * config.B_c) * 96 * 2


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_sequences_of_various_lengths_have_a_kernel_of_their_own(device):
    asked = AttentionForward(1, 4, 300, 64, Element.BF16, len_k=500, sequences=3, causal=True)
    config = config_for(asked, device)
    assert (config.step.id, config.varlen, config.causal) == (LAST.step.id, True, True)
    assert "no cu_seqlens is not supported" in config.refusal(replace(asked, sequences=0))


def test_no_more_tiles_are_launched_than_any_lengths_of_that_total_need():
    config = LAST.replace(varlen=True)
    for lengths in ([1] * 200, [127, 1, 0, 385], [0, 0, 384], [129] * 5, [128]):
        asked = AttentionForward(1, 1, sum(lengths), sequences=len(lengths))
        needed = sum(-(-length // config.B_r) for length in lengths)
        (launch,) = config.call(asked, asked.strides(), largest_device(80)).launches
        assert needed <= launch.grid[0] <= needed + len(lengths)


def test_sequences_of_various_lengths_are_one_batch():
    with pytest.raises(
        ValueError, match="batch 2 with 3 sequences of various lengths: use batch 1"
    ):
        AttentionForward(2, 1, 300, sequences=3)
    shapes = dict.fromkeys("qkv", (1, 300, 1, 128))
    with pytest.raises(ValueError, match="cu_seqlens_q is given without cu_seqlens_k: pass both"):
        AttentionForward.posed({**shapes, "cu_seqlens_q": (4,)}, Element.BF16)
    with pytest.raises(ValueError, match=r"cu_seqlens_k has shape \(5,\) and cu_seqlens_q \(4,\)"):
        both = {"cu_seqlens_q": (4,), "cu_seqlens_k": (5,)}
        AttentionForward.posed(shapes | both, Element.BF16)
