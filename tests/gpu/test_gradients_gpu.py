"""The backward pass on a GPU: every kernel beside float64, the same bits in every run, in a graph,
and through autograd."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from gpu_problems import all_runs_agree, each
from tiers import committed

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.reference import gradients_reference, reference
from flash_helpers.runtime.backend import find_backend

pytestmark = pytest.mark.gpu

CONFIGS = committed(OPERATION)
PLAIN = [c for c in CONFIGS if not c.supports.causal and not c.supports.exact]
RUNS = 10_000


def tensors_on(
    device: torch.device,
    config: Config,
    problem: AttentionBackward,
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """`tensors_for` on a device."""
    return {name: x.to(device) for name, x in tensors_for(config, problem, inputs).items()}


def gradients(
    config: Config, problem: AttentionBackward, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """dQ, dK and dV, in memory that was NaN."""
    tensors = tensors_on(inputs["q"].device, config, problem, inputs)
    find_backend("cuda").execute(config, problem.arranged(tensors), problem.call_options())
    return {name: tensors[name] for name in GRADIENTS}


def check(config: Config, problem: AttentionBackward, device: torch.device, *kind: str) -> None:
    problem = problem.in_dtype(config.dtype)
    inputs = draw(*(kind or ("normal",)), problem, device)
    right = reference(problem, inputs)
    for name, found in gradients(config, problem, inputs).items():
        error = measure_error(found, right.expected[name])
        assert error.within(right.bounds[name]), f"{name} of {problem}, {kind}: {error}"


def long_problem(config: Config) -> AttentionBackward:
    """Enough blocks for every SM to have several, in whole blocks, with grouped heads."""
    return config.supports.adapted(
        AttentionBackward(2, 8, 2048, kv_heads=2, d_head=config.d_head).in_dtype(config.dtype)
    )


@each(CONFIGS)
def test_every_kernel_is_right_at_the_corners_that_it_declares(config, cuda_device) -> None:
    for corner in config.supports.corners():
        check(config, corner, cuda_device)


@each(CONFIGS, once=True)
def test_every_kernel_is_right_where_each_sm_has_many_blocks(config, cuda_device) -> None:
    check(config, long_problem(config), cuda_device)


@each(PLAIN)
@pytest.mark.parametrize("distribution", OPERATION.distributions)
def test_every_kernel_is_right_on_all_distributions(config, distribution, cuda_device) -> None:
    problem = config.supports.adapted(AttentionBackward(2, 2, 512, d_head=config.d_head))
    check(config, problem, cuda_device, distribution)


def assert_same_in_all_runs(config: Config, runs: int, device: torch.device) -> None:
    problem = config.supports.adapted(
        AttentionBackward(1, 4, 512, d_head=config.d_head).in_dtype(config.dtype)
    )
    inputs = draw("normal", problem, device)
    tensors = tensors_on(device, config, problem, inputs)
    execute, options = find_backend("cuda").execute, problem.call_options()

    def launch() -> None:
        execute(config, problem.arranged(tensors), options)

    assert all_runs_agree(launch, {name: tensors[name] for name in GRADIENTS}, runs)


@each(c for c in CONFIGS if c.is_deterministic)
def test_every_run_of_a_deterministic_kernel_gives_the_same_bits(config, cuda_device) -> None:
    assert_same_in_all_runs(config, 100, cuda_device)


@each((c for c in PLAIN if c.is_deterministic), all_in_matrix=True)
def test_ten_thousand_runs_of_a_deterministic_kernel_give_the_same_bits(
    config, cuda_device
) -> None:
    assert_same_in_all_runs(config, RUNS, cuda_device)


@each(PLAIN, once=True)
def test_a_cuda_graph_replays_with_new_inputs(config, cuda_device) -> None:
    problem = config.supports.adapted(
        AttentionBackward(1, 4, 512, d_head=config.d_head).in_dtype(config.dtype)
    )
    kinds = ("normal", "outliers")
    inputs = {kind: draw(kind, problem, cuda_device) for kind in kinds}
    tensors = tensors_on(cuda_device, config, problem, inputs["normal"])
    execute, options = find_backend("cuda").execute, problem.call_options()
    execute(config, problem.arranged(tensors), options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execute(config, problem.arranged(tensors), options)
    for kind in (*kinds, *kinds):
        for name, values in inputs[kind].items():
            tensors[name].copy_(values)
        for name in GRADIENTS:
            tensors[name].fill_(math.nan)
        graph.replay()
        right = reference(problem, inputs[kind])
        for name in GRADIENTS:
            error = measure_error(tensors[name], right.expected[name])
            assert error.within(right.bounds[name]), f"{name}, {kind}: {error}"


# -- autograd --------------------------------------------------------------------------------------


def leaves(device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype) -> list:
    generator = torch.Generator(device).manual_seed(0)
    every = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in every]


@pytest.mark.parametrize("d_head", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (100, 20), "softcap": 5.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 777)], ids=str)
def test_autograd_is_right(d_head, options, dtype, lengths, cuda_device) -> None:
    len_q, len_k = lengths
    k_shape = (2, len_k, 2, d_head)
    q, k, v = leaves(cuda_device, (2, len_q, 4, d_head), k_shape, k_shape, dtype=dtype)
    o = flash_attention.attention(q, k, v, **options)
    do = torch.randn_like(o)
    o.backward(do)
    named = dict(options)
    if "window_size" in named:
        named["window_left"], named["window_right"] = named.pop("window_size")
    right = gradients_reference(do, q.detach(), k.detach(), v.detach(), **named)
    for name, leaf in zip(GRADIENTS, (q, k, v), strict=True):
        error = measure_error(leaf.grad, right.expected[name])
        assert error.within(right.bounds[name]), f"{name}: {error.excess(right.bounds[name])}"


@pytest.mark.parametrize("d_head", [64, 128])
def test_autograd_is_the_same_when_compiled(d_head, cuda_device) -> None:
    shape = (2, 512, 4, d_head)
    plain, traced = (leaves(cuda_device, *3 * [shape], dtype=torch.bfloat16) for _ in range(2))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention.attention(q, k, v, causal=True).float().square().sum()

    loss(*plain).backward()
    torch.compile(loss, fullgraph=True)(*traced).backward()
    for a, b in zip(plain, traced, strict=True):
        assert (a.grad - b.grad).norm() <= 0.01 * a.grad.norm()


@contextmanager
def switched_on() -> Iterator[None]:
    """PyTorch's switch for deterministic algorithms is on."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


NO_SWITCH = nullcontext
WHOLE_BLOCKS = [(2, 1024, 8, 128), *2 * [(2, 1024, 2, 128)]]  # which every family takes


def both_passes(
    inputs: Sequence[torch.Tensor], do: torch.Tensor, **options: bool
) -> dict[str, torch.Tensor]:
    """o and the LSE, and the gradients of q, k and v."""
    o, lse = flash_attention.attention(*inputs, return_lse=True, **options)
    gradients = torch.autograd.grad(o, inputs, do)
    outputs = {"o": o.detach(), "lse": lse.detach()}
    return {**outputs, **dict(zip(GRADIENTS, gradients, strict=True))}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autograd_is_right_with_kernels_of_either_kind(deterministic, dtype, cuda_device) -> None:
    inputs = leaves(cuda_device, *WHOLE_BLOCKS, dtype=dtype)
    do = torch.randn_like(inputs[0]).detach()
    found = both_passes(inputs, do, deterministic=deterministic)
    right = gradients_reference(do, *(x.detach() for x in inputs))
    for name in GRADIENTS:
        error = measure_error(found[name], right.expected[name])
        assert error.within(right.bounds[name]), f"{name}: {error.excess(right.bounds[name])}"


@pytest.mark.parametrize(
    ("options", "switch", "may_differ"),
    [
        ({"deterministic": True}, NO_SWITCH, set()),
        ({}, switched_on, set()),
        ({}, NO_SWITCH, {"dq"}),
    ],
    ids=["argument", "switch", "default"],
)
def test_every_backward_pass_gives_the_same_bits_but_of_dq_by_default(
    options, switch, may_differ, cuda_device
) -> None:
    inputs = leaves(cuda_device, *WHOLE_BLOCKS, dtype=torch.bfloat16)
    do = torch.randn_like(inputs[0]).detach()
    with switch():
        first = both_passes(inputs, do, **options)
        differs = {name: torch.zeros((), dtype=torch.bool, device=cuda_device) for name in first}
        for _ in range(100):
            for name, x in both_passes(inputs, do, **options).items():
                differs[name] |= (x != first[name]).any()
    assert {name for name, found in differs.items() if found} <= may_differ


def test_nan_stays_where_it_belongs_and_rows_that_nobody_sees_are_0(cuda_device) -> None:
    q, k, v = leaves(cuda_device, *3 * [(1, 256, 2, 128)], dtype=torch.bfloat16)
    do = torch.ones_like(q)
    do[0, 3, 0, 5] = math.nan
    flash_attention.attention(q, k, v).backward(do)
    assert q.grad.isnan().any(-1).nonzero().tolist() == [[0, 3, 0]]
    assert not k.grad[:, :, 1].isnan().any()
    assert v.grad.isnan().any(1).nonzero().tolist() == [[0, 0, 5]]
    q, k, v = leaves(cuda_device, (1, 64, 1, 128), *2 * [(1, 256, 1, 128)], dtype=torch.bfloat16)
    flash_attention.attention(q, k, v, window_size=(10, 0)).sum().backward()
    unseen = 256 - 64 - 10  # keys before the first query's window
    assert not k.grad[:, :unseen].any() and not v.grad[:, :unseen].any() and v.grad.any()
