"""Every kernel is right: every config, dtype, shape, distribution and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_problems import (
    CONFIGS,
    WITHOUT_MASK,
    Problem,
    each,
    each_config,
    last_of_each_family,
    torch_dtype,
    whole,
)

from flash_attention import forward, kernels
from flash_helpers.kernel_configs import AttentionForward, FlashForwardKernelConfig
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_forward.reference import attention_reference

pytestmark = pytest.mark.gpu

N_HEADS = (1, 3, 16)
BATCHES = (1, 2)
BLOCKS = (1, 2, 3, 4, 6, 8, 16)  # of the shortest sequence
LONG_SHAPES = (
    AttentionForward(1, 1, 4096),
    AttentionForward(2, 3, 4096),
    AttentionForward(1, 16, 4096),
)

ProblemMaker = Callable[[str, AttentionForward, torch.dtype], Problem]
each_static_config = each(config for config in CONFIGS if getattr(config, "static_row_stride", 0))


def shapes_for(config: FlashForwardKernelConfig) -> Iterator[AttentionForward]:
    """The corners of what the config declares, then from one block up."""
    yield from config.supports.corners()
    for blocks in BLOCKS:
        for batch in BATCHES:
            for heads in N_HEADS:
                yield AttentionForward(batch, heads, blocks * config.supports.whole)
    in_its_dtype = (shape.in_dtype(config.dtype) for shape in LONG_SHAPES)
    yield from (shape for shape in in_its_dtype if not config.refusal(shape))


def test_the_library_holds_every_config_of_the_registry() -> None:
    assert set(CONFIGS) <= set(kernels())


@each(WITHOUT_MASK, all_in_matrix=True)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_output_is_right_for_every_shape(
    config: FlashForwardKernelConfig, distribution: str, problem: ProblemMaker
) -> None:
    faults = []
    for shape in shapes_for(config):
        case = problem(distribution, shape, torch_dtype(config))
        output = case.poisoned_output()
        forward(config, *case.inputs, output, softmax_scale=shape.softmax_scale)
        if fault := case.fault(output):
            faults.append(f"{shape}: {fault}")
    assert faults == []


@each_config
def test_the_same_inputs_give_the_same_bits(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", AttentionForward(2, 16, whole(config, 1024)), torch_dtype(config))
    first = forward(config, *case.inputs)
    for _ in range(5):
        assert torch.equal(forward(config, *case.inputs), first)


@each(WITHOUT_MASK, once=True)
def test_the_given_output_is_written_and_returned(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    length = whole(config, 256)
    shape = config.supports.problem(1, 3, length, length)
    case = problem("normal", shape, torch_dtype(config))
    output = case.poisoned_output()
    assert forward(config, *case.inputs, output) is output
    case.check(output)
    assert torch.equal(forward(config, *case.inputs), output)


# Inputs that are hostile to a maximum that is not looked for in every block.

BLOCK = 128  # keys


def logits_by_key(seq_len: int, pattern: str) -> torch.Tensor:
    """The scaled score of each key, (seq_len,), before a little noise."""
    block = torch.arange(seq_len, device="cuda") // BLOCK
    if pattern == "growing":
        return 200.0 * block
    if pattern == "falling":
        return -200.0 * block
    return torch.where(block == block[-1], 1000.0, 0.0) * (pattern == "spike in the last block")


@each_config
@pytest.mark.parametrize("pattern", ["growing", "falling", "spike in the last block", "all equal"])
def test_scores_that_jump_from_block_to_block_are_right(
    config: FlashForwardKernelConfig, pattern: str
) -> None:
    shape = AttentionForward(3, 5, whole(config, 4 * BLOCK))
    q, k, v = make_inputs("normal", shape, torch_dtype(config), "cuda")
    q = torch.ones_like(q)  # the scaled score is the mean of a row of K times sqrt(d_head)
    wanted = (logits_by_key(shape.len_q, pattern) / shape.d_head**0.5).to(k.dtype)
    noise = 0.0 if pattern == "all equal" else 0.01
    k = noise * k + wanted[:, None, None]
    case = Problem((q, k, v), attention_reference(q, k, v))
    output = case.poisoned_output()
    forward(config, q, k, v, output)
    case.check(output)


@pytest.mark.slow
@last_of_each_family
def test_ten_thousand_calls_give_the_same_bits(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", AttentionForward(3, 5, 2 * config.supports.whole), torch_dtype(config))
    first = forward(config, *case.inputs)
    differs = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(10_000):
        differs += (forward(config, *case.inputs) != first).any()
    assert differs.item() == 0


# Layouts: each holds the same values as its contiguous argument.


def packed(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(batch, seq, 4, heads, d_head) in memory, one projection for all."""
    return torch.stack(tensors, dim=2).unbind(2)


def head_major(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(batch, heads, seq, d_head) in memory."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


def seq_major(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(seq, batch, heads, d_head) in memory."""
    return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors)


def some_of_sixteen_heads(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Heads 5, 6, ... of 16, so that the row stride is that of 16 heads."""
    batch, seq_len, n_heads, d_head = tensors[0].shape
    views = []
    for x in tensors:
        view = x.new_full((batch, seq_len, 16, d_head), torch.nan)[:, :, 5 : 5 + n_heads]
        views.append(view.copy_(x))
    return tuple(views)


def every_second_batch(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A batch stride of twice the tensor, with NaN in between."""
    return tuple(torch.stack((x, torch.full_like(x, torch.nan)), dim=1)[:, 0] for x in tensors)


def each_another(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four tensors, four layouts."""
    layouts = (some_of_sixteen_heads, head_major, tuple, seq_major)
    return tuple(layout((x,))[0] for layout, x in zip(layouts, tensors, strict=True))


@each_config
@pytest.mark.parametrize(
    "layout",
    [packed, head_major, seq_major, some_of_sixteen_heads, every_second_batch, each_another],
)
@pytest.mark.parametrize("n_heads", [1, 3])
def test_strided_views_give_what_contiguous_tensors_give(
    config: FlashForwardKernelConfig, layout, n_heads: int, problem: ProblemMaker
) -> None:
    case = problem("normal", AttentionForward(2, n_heads, whole(config, 256)), torch_dtype(config))
    q, k, v, o = layout((*case.inputs, case.poisoned_output()))
    forward(config, q, k, v, o)
    case.check(o)
    case.check(forward(config, q, k, v))


@each_config
def test_one_k_and_v_may_serve_a_whole_batch(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", AttentionForward(2, 3, whole(config, 128)), torch_dtype(config))
    q, k, v = case.inputs
    shared_k, shared_v = k[:1].expand_as(k), v[:1].expand_as(v)
    expected = forward(config, q, shared_k.contiguous(), shared_v.contiguous())
    assert torch.equal(forward(config, q, shared_k, shared_v), expected)
    assert torch.equal(forward(config, q, k, v)[0], expected[0])


@each_config
@pytest.mark.parametrize("n_heads", [1, 16])
def test_nothing_is_read_or_written_outside_the_tensors(
    config: FlashForwardKernelConfig, n_heads: int, problem: ProblemMaker
) -> None:
    shape = AttentionForward(2, n_heads, whole(config, 256))
    case = problem("normal", shape, torch_dtype(config))
    margin = 128
    frames, views = [], []
    for x in (*case.inputs, case.poisoned_output()):
        batch, seq_len, heads, d_head = shape.shape
        # rows of NaN before and after each sequence
        frame = x.new_full((batch, seq_len + 2 * margin, heads, d_head), torch.nan)
        view = frame[:, margin : margin + seq_len]
        frames.append(frame)
        views.append(view.copy_(x))
    forward(config, *views)
    case.check(views[3])
    frames[3][:, margin : margin + shape.len_q] = torch.nan
    assert frames[3].isnan().all()


@each_static_config
@pytest.mark.parametrize("more_heads", [-1, 0, 1])
def test_a_static_row_stride_is_right_for_any_number_of_heads(
    config: FlashForwardKernelConfig, more_heads: int, problem: ProblemMaker
) -> None:
    n_heads = config.static_row_stride // config.d_head + more_heads
    case = problem("normal", AttentionForward(2, n_heads, whole(config, 256)), torch_dtype(config))
    output = case.poisoned_output()
    forward(config, *case.inputs, output)
    case.check(output)
    assert torch.equal(forward(config.general(), *case.inputs), output)


@each_static_config
@pytest.mark.parametrize("strided", ["q", "k", "v", "o"])
def test_one_tensor_of_another_row_stride_is_enough_to_fall_back(
    config: FlashForwardKernelConfig, strided: str, problem: ProblemMaker
) -> None:
    n_heads = config.static_row_stride // config.d_head
    case = problem("normal", AttentionForward(2, n_heads, whole(config, 256)), torch_dtype(config))
    tensors = dict(zip("qkvo", (*case.inputs, case.poisoned_output()), strict=True))
    (tensors[strided],) = head_major((tensors[strided],))
    forward(config, *tensors.values())
    case.check(tensors["o"])
