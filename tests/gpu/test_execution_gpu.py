"""The kernels run where and when PyTorch says: streams, graphs, torch.compile, devices."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from gpu_problems import (
    CONFIGS,
    FIRST_AND_LAST,
    Problem,
    each_config,
    first_and_last,
    make_problem,
    torch_dtype,
    whole,
)

from flash_attention import forward, forward_timed, resources
from flash_helpers.kernel_configs import AttentionForward, FlashForwardKernelConfig

pytestmark = pytest.mark.gpu

# long enough that work which does not wait for it comes first
DELAY_CYCLES = 20_000_000

ProblemMaker = Callable[[str, AttentionForward, torch.dtype], Problem]


def shape_for(config: FlashForwardKernelConfig) -> AttentionForward:
    return AttentionForward(2, 3, whole(config, 256))


@each_config
def test_a_cuda_graph_replays_with_new_inputs(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    first = problem("normal", shape_for(config), torch_dtype(config))
    second = problem("outliers", shape_for(config), torch_dtype(config))
    inputs = [x.clone() for x in first.inputs]
    given = first.poisoned_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(config, *inputs, given)
        made = forward(config, *inputs)
    for case in (first, second):
        for x, values in zip(inputs, case.inputs, strict=True):
            x.copy_(values)
        given.fill_(torch.nan)
        made.fill_(torch.nan)
        graph.replay()
        case.check(given)
        case.check(made)


@each_config
def test_the_kernel_runs_on_the_current_stream(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", shape_for(config), torch_dtype(config))
    inputs = [torch.full_like(x, torch.nan) for x in case.inputs]
    output = case.poisoned_output()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # the inputs come late: a kernel on another stream would read NaN
        torch.cuda._sleep(DELAY_CYCLES)
        for x, values in zip(inputs, case.inputs, strict=True):
            x.copy_(values)
        forward(config, *inputs, output)
    stream.synchronize()
    case.check(output)


@first_and_last
@pytest.mark.parametrize("as_text", [False, True], ids=["config", "short_form"])
def test_torch_compile_takes_the_whole_function(
    config: FlashForwardKernelConfig, as_text: bool, problem: ProblemMaker
) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    torch._dynamo.reset()  # it gives up on a function after so many values of what it closes over
    cfg = config.short_form() if as_text else config
    case = problem("normal", shape_for(config), torch_dtype(config))

    def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return forward(cfg, q + 0, k, v) + 1

    compiled = torch.compile(shifted, fullgraph=True)
    expected = shifted(*case.inputs)
    case.check(forward(cfg, *case.inputs))
    assert torch.equal(compiled(*case.inputs), expected)


def test_torch_compile_takes_a_given_output(problem: ProblemMaker) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    config = FIRST_AND_LAST[0]
    case = problem("normal", shape_for(config), torch_dtype(config))
    output = case.poisoned_output()

    def into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        forward(config, q, k, v, o)
        return o + 1

    result = torch.compile(into, fullgraph=True)(*case.inputs, output)
    case.check(output)
    assert torch.equal(result, output + 1)


@first_and_last
def test_the_operator_keeps_the_rules_of_custom_operators(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", shape_for(config), torch_dtype(config))
    torch.library.opcheck(
        torch.ops.flash_attention.forward.default,
        (config.short_form(), *case.inputs, None),
        test_utils=("test_schema", "test_faketensor"),
    )


@each_config
def test_both_of_two_devices_work_in_one_process(
    config: FlashForwardKernelConfig, cuda_device: torch.device
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for index in (1, 0, 1):
        case = make_problem("normal", shape_for(config), torch_dtype(config), f"cuda:{index}")
        output = case.poisoned_output()
        forward(config, *case.inputs, output)  # while the other device is the current one
        assert torch.cuda.current_device() == cuda_device.index
        case.check(output)


@first_and_last
def test_a_timed_call_gives_the_output_and_the_kernels_time(
    config: FlashForwardKernelConfig, problem: ProblemMaker
) -> None:
    case = problem("normal", shape_for(config), torch_dtype(config))
    output, milliseconds = forward_timed(config, *case.inputs)
    case.check(output)
    assert 0 < milliseconds < math.inf
    given = case.poisoned_output()
    assert forward_timed(config, *case.inputs, given)[0] is given
    case.check(given)


@each_config
def test_the_resources_are_those_of_a_kernel_that_fits(config: FlashForwardKernelConfig) -> None:
    found = resources(config)
    assert found.dynamic_smem_bytes == config.smem_bytes
    assert 0 < found.registers <= 255
    assert found.local_bytes >= 0
    assert found.max_threads >= config.n_threads
    assert found.resident_blocks_per_sm >= 1


def _on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


def _of_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float16 else torch.float16)


def _one_row_short(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:]


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


def _transposed_in_memory(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("config", CONFIGS[:1], ids=lambda config: config.short_form())
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize(
    "spoil",
    [_on_the_cpu, _of_another_dtype, _one_row_short, _misaligned, _transposed_in_memory],
)
def test_bad_input_is_refused_and_harms_nothing(
    config: FlashForwardKernelConfig, name: str, spoil, problem: ProblemMaker
) -> None:
    case = problem("normal", shape_for(config), torch_dtype(config))
    tensors = dict(zip("qkvo", (*case.inputs, case.poisoned_output()), strict=True))
    output = tensors["o"]
    tensors[name] = spoil(tensors[name])
    with pytest.raises((TypeError, ValueError)):
        forward(config, *tensors.values())
    torch.cuda.synchronize()
    assert output.isnan().all()
    forward(config, *case.inputs, output)
    case.check(output)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_output_that_overlaps_an_input_is_refused(name: str, problem: ProblemMaker) -> None:
    config = CONFIGS[0]
    case = problem("normal", shape_for(config), torch_dtype(config))
    tensors = dict(zip("qkv", (x.clone() for x in case.inputs), strict=True))
    with pytest.raises(ValueError, match=f"overlaps {name}"):
        forward(config, *tensors.values(), tensors[name])
    for x, untouched in zip(tensors.values(), case.inputs, strict=True):
        assert torch.equal(x, untouched)
