"""The distributions that Q, K and V are drawn from."""

from __future__ import annotations

import math

import pytest
import torch

from flash_helpers.check.inputs import with_mantissa_bits
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS, MEAN
from flash_helpers.operations.attention_forward.reference import attention_float64

SHAPE = AttentionForward(batch=2, heads=3, len_q=128)


def test_inputs_are_rounded_to_so_many_bits() -> None:
    q, _, _ = make_inputs("normal", SHAPE, torch.float16)
    torch.testing.assert_close(with_mantissa_bits(q, 10), q, rtol=0, atol=0)
    torch.testing.assert_close(
        with_mantissa_bits(q, 7).float(), q.bfloat16().float(), rtol=0, atol=0
    )
    # a number of one bit is a power of two or half as much more
    two = torch.tensor([0.0, -1.2, 1.3, 3.9, 1e-4], dtype=torch.float16)
    assert with_mantissa_bits(two, 1).tolist() == [0, -1, 1.5, 4, 3 * 2**-15]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_inputs_are_reproducible_contiguous_and_have_the_dtype(distribution: str) -> None:
    first = make_inputs(distribution, SHAPE, torch.bfloat16, seed=7)
    again = make_inputs(distribution, SHAPE, torch.bfloat16, seed=7)
    for x, same in zip(first, again, strict=True):
        assert torch.equal(x, same)
        assert x.shape == SHAPE.shape
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.isfinite().all()


def test_another_seed_gives_other_values() -> None:
    q, _, _ = make_inputs("normal", SHAPE, torch.float16, seed=0)
    other, _, _ = make_inputs("normal", SHAPE, torch.float16, seed=1)
    assert not torch.equal(q, other)


def test_normal_inputs_are_not_centred_on_zero() -> None:
    for x in make_inputs("normal", SHAPE, torch.float16):
        assert x.double().mean().item() == pytest.approx(MEAN, abs=0.02)


def test_large_logits_reach_hundreds_and_saturate_softmax() -> None:
    q, k, _ = make_inputs("large_logits", SHAPE, torch.float16)
    S = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) / math.sqrt(SHAPE.d_head)
    assert S.max() > 150
    assert S.min() < -150
    assert torch.softmax(S, -1).amax(-1).median() > 0.99


def test_constant_rows_average_v() -> None:
    q, k, v = make_inputs("constant_rows", SHAPE, torch.float16)
    assert (q == q[..., :1]).all()
    assert (k == k[:, :1]).all()
    mean = v.double().mean(dim=1, keepdim=True).expand(SHAPE.shape)
    torch.testing.assert_close(attention_float64(q, k, v), mean)


def test_outliers_raise_the_running_maximum() -> None:
    shape = AttentionForward(1, 1, 512)
    q, k, _ = make_inputs("outliers", shape, torch.float16)
    S = (q.double()[0, :, 0] @ k.double()[0, :, 0].T) / math.sqrt(shape.d_head)
    block_maxima = S.unflatten(1, (8, 64)).amax(-1)
    jumps = block_maxima.cummax(1).values.diff(dim=1)
    assert (jumps.amax(1) > 5).float().mean() > 0.5


def test_countable_inputs_are_small_integers_that_every_dtype_holds() -> None:
    for x in make_inputs("countable", SHAPE, torch.bfloat16):
        assert torch.equal(x, x.round())
        assert x.abs().max() <= 15


def test_an_unknown_distribution_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gauss'.*normal, large_logits"):
        make_inputs("gauss", SHAPE, torch.float16)


def test_a_shape_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="heads 0"):
        AttentionForward(1, 0, 64)
