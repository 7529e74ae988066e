"""Attention on parts of the keys, combined: flash_attn_combine, merge_state and merge_states."""

import math
from typing import Any

import pytest
import torch

from flash_attention._states import merge_states as merge
from flash_attention._states import merged, merged_by_kernel
from flash_attention.flash_attn_3 import flash_attn_combine
from flash_attention.flashinfer import merge_state, merge_state_in_place, merge_states
from flash_helpers.operations.merge.problem import NATURAL

ROWS, HEADS, D_HEAD = 5, 3, 16
PARTS = 4


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural LSE of scores, (..., keys), on values, (keys, d_head); 0 without keys."""
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        return values.new_zeros(*shape, D_HEAD), values.new_full(shape, -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.fixture
def parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and LSEs of each part, (parts, rows, heads), and of all keys, in float64. Some rows
    have keys in no part, or in one."""
    torch.manual_seed(2)
    scores = 30 * torch.randn(ROWS, HEADS, 40, dtype=torch.float64)
    scores[0] = scores[1, :, :30] = -math.inf
    values = 1 + torch.randn(40, D_HEAD, dtype=torch.float64)
    found = [attention(s, v) for s, v in zip(scores.split(10, -1), values.split(10), strict=True)]
    o, lse = (torch.stack(x) for x in zip(*found, strict=True))
    all_o, all_lse = attention(scores, values)
    return o, lse, all_o.nan_to_num(0.0), all_lse


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


def test_parts_that_flash_attn_combine_takes(parts):
    o, lse, all_o, all_lse = parts
    assert o.isnan().any() and not all_o.isnan().any()
    found, of_all = flash_attn_combine(o.float(), lse.float())
    check(found, all_o)
    check(of_all, all_lse)
    assert (found.dtype, of_all.dtype) == (torch.float32, torch.float32)
    batched, _ = flash_attn_combine(o[:, None].float(), lse[:, None].float())
    assert torch.equal(batched[0], found)


def test_outputs_of_flash_attn_combine(parts):
    o, lse = (x.float() for x in parts[:2])
    expected, _ = flash_attn_combine(o, lse)
    half, none = flash_attn_combine(o, lse, out_dtype=torch.bfloat16, return_lse=False)
    assert none is None and torch.equal(half, expected.bfloat16())
    out = torch.empty_like(half)
    found, _ = flash_attn_combine(o, lse, out)
    assert found is out and torch.equal(out, half)


def test_states_in_base_2(parts):
    o, lse, all_o, all_lse = parts
    s = (lse / math.log(2)).float()
    V, S = merge_states(o.float().transpose(0, 1), s.transpose(0, 1))
    check(V, all_o)
    check(S, all_lse / math.log(2))
    one_by_one = o[0].float(), s[0]
    for v_b, s_b in zip(o[1:].float(), s[1:], strict=True):
        one_by_one = merge_state(*one_by_one, v_b, s_b)
    check(one_by_one[0], all_o)
    check(one_by_one[1], all_lse / math.log(2))


def test_a_state_in_place(parts):
    o, lse = parts[0].bfloat16(), parts[1].float()
    expected = merge_state(o[0], lse[0], o[1], lse[1])
    assert expected[0].dtype == torch.bfloat16
    mask = torch.tensor([True, False, True, True, False])
    v, s = o[0].clone(), lse[0].clone()
    merge_state_in_place(v, s, o[1], lse[1], mask)
    for found, of_both, before in ((v, expected[0], o[0]), (s, expected[1], lse[0])):
        assert torch.equal(found[mask], of_both[mask])
        assert torch.equal(found[~mask].nan_to_num(), before[~mask].nan_to_num())
    merge_state_in_place(v, s, o[1][:], lse[1])
    v, s = o[0].clone(), lse[0].clone()
    merge_state_in_place(v, s, o[1], lse[1])
    assert torch.equal(v, expected[0]) and torch.equal(s, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d_head", [D_HEAD, 13])
def test_the_kernel_merges_as_pytorch_does(parts, dtype, d_head):
    o, lse = parts[0][..., :d_head].to(dtype), parts[1].float()
    expected = merged(o, lse, NATURAL)
    odd = torch.cat((o, o[..., :1]), -1)[..., :d_head]  # rows at odd elements
    for given in (o, o.transpose(1, 2).contiguous().transpose(1, 2), odd):
        found = merged_by_kernel(given, lse, NATURAL, dtype)
        assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
        atol = max(1e-5, torch.finfo(dtype).eps)
        torch.testing.assert_close(found[0], expected[0].to(dtype), rtol=atol, atol=atol)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    batched, of_all = merged_by_kernel(o[:, None], lse[:, None], NATURAL, torch.float32)
    torch.testing.assert_close(batched[0].to(dtype), found[0], rtol=atol, atol=atol)
    assert (batched.dtype, of_all.shape) == (torch.float32, (1, ROWS, HEADS))


def test_the_operator_of_the_kernel_runs_in_compiled_code(parts):
    torch._dynamo.reset()
    o, lse = (x.float() for x in parts[:2])
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(o, lse, 1.0), merge(o, lse, 1.0), strict=True):
        assert torch.equal(found, wanted)


def test_gradients_are_those_of_pytorch(parts):
    o, lse = (x.float().nan_to_num(0.0) for x in parts[:2])
    o.requires_grad_()
    found, _ = flash_attn_combine(o, lse)
    (gradient,) = torch.autograd.grad(found.sum(), o)
    torch.testing.assert_close(gradient.sum(0), torch.ones_like(o[0]))


def test_compiled_code_is_whole(parts):
    torch._dynamo.reset()
    o, lse = (x.float() for x in parts[:2])
    compiled = torch.compile(flash_attn_combine, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(o, lse), flash_attn_combine(o, lse), strict=True):
        assert torch.equal(found, wanted)


V, S = torch.ones(5, 3, 16), torch.ones(5, 3)


@pytest.mark.parametrize(
    ("function", "given", "error", "message"),
    [
        (flash_attn_combine, (V, S), ValueError, "out_partial has 3 dimensions"),
        (flash_attn_combine, (V[None], S), ValueError, r"lse_partial has shape \(5, 3\) and out_par"
         r"tial \(1, 5, 3, 16\): pass \(1, 5, 3\)"),
        (flash_attn_combine, (V[None], S[None].to("meta")), ValueError, "lse_partial is on meta a"),
        (flash_attn_combine, (V[None][:0], S[None][:0]), ValueError, "out_partial has no parts, s"),
        (flash_attn_combine, (V[None], S[None], V[:1]), ValueError, r"out has shape \(1, 3, 16\): "
         r"pass \(5, 3, 16\)"),
        (flash_attn_combine, (V[None], S[None], V, torch.half), TypeError, r"out is torch\.float32 "
         r"and out_dtype torch\.float16: leave one"),
        (flash_attn_combine, (V[None], None), TypeError, r"lse_partial is a NoneType: pass a torc"),
        (flash_attn_combine, (V[None], S[None], None, None, 1), TypeError, "return_lse is 1: pass"),
        (merge_state, (V, S, V[:1], S), ValueError, r"v_b is \(1, 3, 16\) on cpu and v_a \(5, 3, "),
        (merge_state, (V, S, V, S[:1]), ValueError, r"s_b is \(1, 3\) on cpu and s_a \(5, 3\) on "),
        (merge_state, (V, S, V.to("meta"), S), ValueError, "v_b is .* on meta and v_a"),
        (merge_state, (V, S[:, :1], V, S[:, :1]), ValueError, "s_a and s_b has shape .*: pass"),
        (merge_state, (V[0], S[0], V[0], S[0]), ValueError, r"v_a has 2 dimensions.*\(seq_len, nu"),
        (merge_state, (V, S, 3, S), TypeError, r"v_b is a int: pass a torch\.Tensor"),
        (merge_states, (V, S), ValueError, r"v has 3 dimensions.*num_states"),
        (merge_states, (V[None], S), ValueError, r"s has shape \(5, 3\) and v \(1, 5, 3, 16\)"),
        (merge_state_in_place, (V, S, V, S, S), ValueError, r"mask is torch\.float32 \(5, 3\): pa"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(function: Any, given: tuple, error, message):
    with pytest.raises(error, match=message):
        function(*given)
