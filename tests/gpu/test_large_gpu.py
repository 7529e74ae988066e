"""Sizes at which an index of 31 bits or a dimension of the grid overflows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_problems import Problem, each_bf16_config, require_memory

from flash_attention import forward
from flash_helpers.check.reference import attention_reference
from flash_helpers.kernel_configs import AttentionForward, FlashForwardKernelConfig

pytestmark = pytest.mark.gpu

D_HEAD = 128
ELEMENT_BYTES = 2
INT32_ELEMENTS = 2**31
MAX_GRID_Z = 65535

MANY_BATCHES = MAX_GRID_Z + 2
MANY_ELEMENTS = AttentionForward(batch=INT32_ELEMENTS // (512 * 16 * D_HEAD) + 1, heads=16,
                               seq_len=512)  # fmt: skip
FAR_ROWS = 1024
FAR_HEADS = 16401  # FAR_ROWS rows of so many heads go just over 2^31 elements


def shifted_noise(*size: int) -> torch.Tensor:
    """bf16 with mean 0.5, drawn in place: the float32 of the usual inputs would not fit."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(
        0.5, 1.0, generator=generator
    )


def check_batches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, batches: slice
) -> None:
    """Assert that some batches of `o` are attention of the same batches of the inputs."""
    inputs = (q[batches], k[batches], v[batches])
    Problem(inputs, attention_reference(*inputs)).check(o[batches])


@pytest.fixture(scope="module")
def many_elements() -> Iterator[torch.Tensor]:
    """One tensor of more than 2^31 elements, used as Q, K and V alike."""
    require_memory(3 * INT32_ELEMENTS * ELEMENT_BYTES)
    yield shifted_noise(*MANY_ELEMENTS.shape)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def far_rows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and output whose last rows are more than 2^31 elements away from the first."""
    require_memory(2 * FAR_ROWS * FAR_HEADS * D_HEAD * ELEMENT_BYTES + 2**30)
    assert (FAR_ROWS - 1) * FAR_HEADS * D_HEAD > INT32_ELEMENTS
    size = (1, FAR_ROWS, FAR_HEADS, D_HEAD)
    qkv = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    qkv[:, :, :9] = shifted_noise(1, FAR_ROWS, 9, D_HEAD)
    yield qkv, torch.empty_like(qkv)
    torch.cuda.empty_cache()


@each_bf16_config
def test_more_batches_than_a_grid_dimension(config: FlashForwardKernelConfig) -> None:
    seq_len = config.supports.whole
    require_memory(5 * MANY_BATCHES * seq_len * D_HEAD * ELEMENT_BYTES)
    q, k, v = (shifted_noise(MANY_BATCHES, seq_len, 1, D_HEAD).roll(i, 0) for i in range(3))
    o = torch.full_like(q, torch.nan)
    forward(config, q, k, v, o)
    for batches in (slice(0, 2), slice(MAX_GRID_Z - 2, MAX_GRID_Z + 2)):
        check_batches(q, k, v, o, batches)
    assert o.isfinite().all()


@each_bf16_config
def test_tensors_of_more_than_31_bits_of_elements(
    config: FlashForwardKernelConfig, many_elements: torch.Tensor
) -> None:
    x = many_elements
    assert x.numel() > INT32_ELEMENTS
    o = torch.full_like(x, torch.nan)
    forward(config, x, x, x, o)
    for batches in (slice(0, 1), slice(MANY_ELEMENTS.batch - 1, MANY_ELEMENTS.batch)):
        check_batches(x, x, x, o, batches)
    assert o.isfinite().all()


@each_bf16_config
def test_rows_that_are_more_than_31_bits_of_elements_apart(
    config: FlashForwardKernelConfig, far_rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    qkv, outputs = far_rows
    q, k, v = (qkv[:, :, first : first + 3] for first in (0, 3, 6))
    o = outputs[:, :, :3].fill_(torch.nan)
    forward(config, q, k, v, o)
    check_batches(q, k, v, o, slice(0, 1))
