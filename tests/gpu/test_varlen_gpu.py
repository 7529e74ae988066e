"""Sequences of various lengths on a GPU: the lengths are those on the device when a kernel runs."""

from __future__ import annotations

import pytest
import torch

from flash_attention.flash_attn import flash_attn_varlen_func
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.inputs import draw
from flash_helpers.operations.attention_forward.reference import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_a_graph_follows_the_lengths_of_each_replay(
    d_head: int, causal: bool, cuda_device: torch.device
) -> None:
    shape = AttentionForward(1, 8, 3000, d_head, kv_heads=2, causal=causal, sequences=7)
    inputs = draw("normal", shape, cuda_device)
    q, k, v = (inputs[name][0] for name in "qkv")
    begins = inputs["cu_seqlens_q"].clone()
    others = [draw("normal", shape, cuda_device, seed)["cu_seqlens_q"] for seed in (1, 2, 3)]

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, begins, begins, 3000, 3000, causal=causal)

    call()  # whatever has to be compiled and loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    for own in [*others, torch.tensor([0, 0, 1, 78, 400, 400, 2999, 3000], dtype=torch.int32)]:
        begins.copy_(own)
        output.fill_(torch.nan)
        graph.replay()
        found = {**inputs, "cu_seqlens_q": begins, "cu_seqlens_k": begins}
        right = reference(shape, found)
        error = (output[None].double() - right.expected["o"]).abs().max().item()
        assert error <= right.bounds["o"].max_abs


def test_tokens_of_no_sequence_stay_as_they_are(cuda_device: torch.device) -> None:
    q = torch.randn(300, 4, 128, device=cuda_device).bfloat16()
    begins = torch.tensor([20, 97, 97, 250], dtype=torch.int32, device=cuda_device)
    q[:20] = q[250:] = torch.nan  # what no sequence has, none may read
    output = flash_attn_varlen_func(q, q, q, begins, begins, 300, 300)
    assert not output[20:250].isnan().any()
