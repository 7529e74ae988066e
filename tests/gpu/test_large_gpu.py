"""Sizes at which an index of 31 bits or a dimension of the grid overflows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_problems import Problem, each_bf16_config, require_memory, whole

from flash_attention import forward
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.operations.attention_forward.reference import attention_reference

pytestmark = pytest.mark.gpu

D_HEAD = 128
ELEMENT_BYTES = 2
INT32_ELEMENTS = 2**31
MAX_GRID_Z = 65535

MANY_BATCHES = MAX_GRID_Z + 2
MANY_HEADS = 16
MANY_ROWS = INT32_ELEMENTS // (MANY_HEADS * D_HEAD) + 1024  # some sequence begins after 2^31
FAR_ROWS = 1024
FAR_ELEMENTS = INT32_ELEMENTS + 2**23  # room for FAR_ROWS rows, or some more, 2^31 elements long


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
    yield shifted_noise(MANY_ROWS, MANY_HEADS, D_HEAD)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def far_rows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Memory for inputs and output whose last rows are more than 2^31 elements away from the
    first."""
    require_memory(2 * FAR_ELEMENTS * ELEMENT_BYTES + 2**30)
    yield tuple(torch.empty(FAR_ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
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
    seq_len = whole(config, 512)
    n_batches = MANY_ROWS // seq_len
    x = many_elements[: n_batches * seq_len].unflatten(0, (n_batches, seq_len))
    assert x.numel() > INT32_ELEMENTS
    o = torch.full_like(x, torch.nan)
    forward(config, x, x, x, o)
    for batches in (slice(0, 1), slice(n_batches - 1, n_batches)):
        check_batches(x, x, x, o, batches)
    assert o.isfinite().all()


@each_bf16_config
def test_rows_that_are_more_than_31_bits_of_elements_apart(
    config: FlashForwardKernelConfig, far_rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    n_rows = whole(config, FAR_ROWS)
    n_heads = INT32_ELEMENTS // ((n_rows - 1) * D_HEAD) + 1
    n_elements = n_rows * n_heads * D_HEAD
    qkv, outputs = (x[:n_elements].view(1, n_rows, n_heads, D_HEAD) for x in far_rows)
    qkv[:, :, :9] = shifted_noise(1, n_rows, 9, D_HEAD)
    assert qkv[0, -1:].data_ptr() - qkv.data_ptr() > INT32_ELEMENTS * ELEMENT_BYTES
    q, k, v = (qkv[:, :, first : first + 3] for first in (0, 3, 6))
    o = outputs[:, :, :3].fill_(torch.nan)
    forward(config, q, k, v, o)
    check_batches(q, k, v, o, slice(0, 1))
