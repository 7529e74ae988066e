"""Modules of flash_attention.multimodal on a GPU: kernels where there are some, PyTorch with a
warning where there are none, and both compiled and in CUDA graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from flash_attention.multimodal import (
    JointAttention,
    MultimodalTransformer,
    TransformerBlock,
    _attend,
    rotary_table,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCH, LENGTH, TOKENS, WIDTH = 4, 186, 64, 256


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, the context and the condition."""
    generator = torch.Generator().manual_seed(1)
    shapes = (BATCH, LENGTH, WIDTH), (BATCH, TOKENS, WIDTH), (BATCH, WIDTH)
    x, context, condition = (
        (torch.randn(shape, generator=generator) + 0.2).to(DEVICE, dtype) for shape in shapes
    )
    return x, context, condition


def weighted(module: nn.Module) -> nn.Module:
    """The module with random modulation, too, which begins as 0."""
    torch.manual_seed(0)
    for name, weights in module.named_parameters():
        if "modulation" in name:
            nn.init.normal_(weights, std=0.05)
    return module.to(DEVICE)


def found_by(module: nn.Module, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of a block."""
    module.attention.backend = backend
    module.to(dtype).zero_grad()
    x, context, condition = (y.requires_grad_() for y in inputs(torch.bfloat16))
    given = (y.to(dtype) for y in (x, condition, context))
    outputs = module(*given, rotary=rotary_table(LENGTH, WIDTH // 4, device=DEVICE))
    sum((y.double() ** 2).sum() for y in outputs).backward()
    return [*outputs, x.grad, context.grad, condition.grad]


def test_a_block_with_kernels_is_as_right_as_with_pytorch() -> None:
    """Outputs and gradients: the error against float64 is at most twice that of PyTorch in bf16."""
    module = weighted(TransformerBlock(WIDTH, 4, 512)).bfloat16()
    kernels, usual = (found_by(module, b, torch.bfloat16) for b in ("kernels", "torch"))
    right = found_by(module, "torch", torch.float64)
    for ours, theirs, exact in zip(kernels, usual, right, strict=True):
        off = [(y.double() - exact).norm() for y in (ours, theirs)]
        assert off[0] <= 2 * off[1]


@pytest.mark.parametrize("heads", [2, 4])  # of 128 and 64
def test_auto_takes_a_kernel_without_a_warning_compiled_and_in_a_graph(heads) -> None:
    module = JointAttention(WIDTH, heads).to(DEVICE, torch.bfloat16)
    x, context, _ = inputs(torch.bfloat16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        right, _ = module(x, context)
        module.backend = "kernels"
        assert torch.equal(module(x, context)[0], right)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = module(x, context)
        graph.replay()
        assert torch.equal(captured, right)
    module.backend = "auto"
    with torch.no_grad():
        compiled, _ = torch.compile(module, fullgraph=True)(x, context)
    assert (compiled - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize(
    ("heads", "texts"), [(8, []), (16, ["d_head 8 is not supported by"])], ids=["of 16", "of 8"]
)
def test_heads_that_no_kernel_takes_are_pytorchs_with_one_warning(heads, texts) -> None:
    _attend._warn_once.cache_clear()
    model = weighted(MultimodalTransformer(layers=3, heads=heads)).bfloat16()
    x, context, condition = (y[..., :128] for y in inputs(torch.bfloat16))
    with torch.no_grad(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(x, condition, context)
        model(x[:, :100], condition)
    said = [str(each.message) for each in found if "PyTorch computes" in str(each.message)]
    assert len(said) == len(texts)
    assert all(text in each for text, each in zip(texts, said, strict=True))


def test_gradients_are_right_and_recomputed_with_one_warning() -> None:
    """Joint attention's own kernel has no gradients: those of its recomputation are PyTorch's for
    heads of 16."""
    _attend._warn_once.cache_clear()
    found = {}
    for backend, dtype in (("torch", torch.float64), ("torch", torch.bfloat16), ("auto", None)):
        torch.manual_seed(0)
        module = JointAttention(128, 8, backend=backend).to(DEVICE, dtype or torch.bfloat16)
        x, context, _ = (y[..., :128] for y in inputs(torch.float64))
        leaves = [y.to(dtype or torch.bfloat16).requires_grad_() for y in (x, context)]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outputs = module(*leaves)
            sum((y.double() * y.detach().double().cos()).sum() for y in outputs).backward()
        gradients = [y.grad.double().flatten() for y in (*leaves, *module.parameters())]
        found[backend, dtype] = torch.cat(gradients)
    right = found["torch", torch.float64]
    usual, ours = ((found[key] - right).norm() for key in [*found][1:])
    assert 0 < ours <= 2 * usual
    assert sum("PyTorch computes" in str(each.message) for each in said) == 1
