"""attention() on a GPU: which kernel it takes, and that a call that is quick is right wherever it
comes from: graphs, compiled code, streams, threads, devices."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_problems import Problem, first_and_last, make_problem, torch_dtype

from flash_attention import attention, forward, forward_timed
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.runtime import call
from flash_helpers.tune.best import choose_config

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)
SHAPES = (
    AttentionForward(1, 1, 64),
    AttentionForward(2, 3, 192),
    AttentionForward(1, 1, 128),
    AttentionForward(2, 16, 1024),
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_is_right(shape: AttentionForward, dtype: torch.dtype, problem) -> None:
    case: Problem = problem("normal", shape, dtype)
    output = attention(*case.inputs)
    assert output.is_contiguous()
    case.check(output)


def test_the_result_is_that_of_forward_with_the_chosen_config(cuda_device, problem) -> None:
    shape = AttentionForward(2, 16, 512)
    case = problem("normal", shape, torch.bfloat16)
    config = choose_config(shape, cuda_device)
    assert torch.equal(attention(*case.inputs), forward(config, *case.inputs))


def test_a_call_alone_is_dispatched_once(monkeypatch, problem) -> None:
    monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", None)  # as dispatching again does
    case = problem("normal", AttentionForward(2, 16, 512), torch.bfloat16)
    case.check(attention(*case.inputs))
    output = case.poisoned_output()
    forward(choose_config(AttentionForward(2, 16, 512), output.device), *case.inputs, output)
    case.check(output)


@pytest.mark.skipif(call._exchange() is None, reason="PyTorch describes tensors to C since 2.10")
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", (Element.FP16, Element.BF16))
def test_a_repeated_call_is_launched_in_one_step(
    dtype: Element, strided: bool, monkeypatch, problem
) -> None:
    shape = AttentionForward(2, 16, 512, dtype=dtype)
    case = problem("normal", shape, getattr(torch, dtype.torch_name))
    inputs = torch.stack(case.inputs, dim=2).unbind(2) if strided else case.inputs
    config = choose_config(shape, inputs[0].device)
    output = case.poisoned_output()
    attention(*inputs)
    forward(config, *inputs, output)
    monkeypatch.setattr(call, "_checked", None)  # how any other is checked
    output = case.poisoned_output()
    assert forward(config, *inputs, output) is output
    for found in (output, forward(config, *inputs), attention(*inputs)):
        assert found.is_contiguous()
        case.check(found)


def test_calls_of_several_layouts_may_take_turns(problem) -> None:
    cases = [problem("normal", shape, dtype) for shape in SHAPES[1:] for dtype in DTYPES]
    for case in [*cases, *cases[::-1], *(case for case in cases for _ in range(3))]:
        case.check(attention(*case.inputs))


def test_a_repeated_call_is_refused_what_the_first_would_be(problem) -> None:
    shape = AttentionForward(2, 16, 512)
    case = problem("normal", shape, torch.bfloat16)
    q, k, v = case.inputs
    config = choose_config(shape, q.device)
    memory = torch.zeros(2 * q.numel() + 8, dtype=q.dtype, device=q.device)
    output = memory[: q.numel()].view_as(q)
    beside = memory[q.numel() :][: q.numel()].view_as(q)
    forward(config, q, beside, v, output)
    with pytest.raises(ValueError, match="o overlaps k"):
        forward(config, q, memory[q.numel() // 2 :][: q.numel()].view_as(q), v, output)
    with pytest.raises(ValueError, match="k starts at address"):
        forward(config, q, memory[4 + q.numel() :][: q.numel()].view_as(q), v, output)
    with pytest.raises(ValueError, match="o requires grad"):
        forward(config, q, k, v, torch.empty_like(q).requires_grad_())
    with pytest.raises(ValueError, match="k is on cpu"):
        forward(config, q, k.cpu(), v, output)
    with pytest.raises(TypeError, match=r"k is torch\.float16"):
        forward(config, q, k.half(), v, output)
    case.check(forward(config, q, k, v, output))


def test_strided_tensors_give_what_contiguous_ones_give(problem) -> None:
    case = problem("normal", AttentionForward(2, 3, 256), torch.bfloat16)
    strided = torch.stack(case.inputs, dim=2).unbind(2)
    assert torch.equal(attention(*strided), attention(*case.inputs))


def test_a_graph_replays_it_on_new_inputs(cuda_device) -> None:
    shape = AttentionForward(2, 16, 512)
    first, second = (
        make_problem("normal", shape, torch.bfloat16, cuda_device, seed) for seed in (1, 2)
    )
    inputs = tuple(x.clone() for x in first.inputs)
    attention(*inputs)  # whatever has to be loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention(*inputs)
    for case in (second, first):
        for own, new in zip(inputs, case.inputs, strict=True):
            own.copy_(new)
        output.fill_(torch.nan)
        graph.replay()
        case.check(output)


@first_and_last
def test_a_graph_may_hold_the_first_call_of_a_layout(config: Config, problem) -> None:
    forward(config, *problem("normal", AttentionForward(1, 5, 256), torch_dtype(config)).inputs)
    case = problem("normal", AttentionForward(3, 5, 3 * config.supports.whole), torch_dtype(config))
    output = case.poisoned_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(config, *case.inputs, output)
    assert output.isnan().all()
    graph.replay()
    case.check(output)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_runs_it_whole(mode: str, problem) -> None:
    torch._dynamo.reset()
    case = problem("normal", AttentionForward(2, 16, 512), torch.bfloat16)
    compiled = torch.compile(lambda *qkv: attention(*qkv) + 0, fullgraph=True, mode=mode)
    for _ in range(4):
        case.check(compiled(*case.inputs).clone())


def test_a_graph_may_hold_calls_on_empty_tensors(cuda_device) -> None:
    q, none = (torch.ones(2, n, 4, 128, device=cuda_device).bfloat16() for n in (5, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attention(q, none, none, causal=True, return_lse=True)
        assert attention(none, q, q).shape == none.shape
    o.fill_(1), lse.fill_(1)
    graph.replay()
    assert torch.equal(o, torch.zeros_like(q)) and torch.equal(
        lse, torch.full_like(lse, -torch.inf)
    )
    timed, milliseconds = forward_timed("o5_bf16_d128_Br128_Bc64_w4", q, none, none)
    assert torch.equal(timed, o) and milliseconds == 0


def test_it_runs_on_the_current_stream(problem) -> None:
    case = problem("normal", AttentionForward(2, 16, 1024), torch.bfloat16)
    attention(*case.inputs)  # its plan is ready
    stream = torch.cuda.Stream()
    inputs = tuple(torch.full_like(x, torch.nan) for x in case.inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds
        for own, new in zip(inputs, case.inputs, strict=True):
            own.copy_(new)
        output = attention(*inputs)
    assert not stream.query()
    stream.synchronize()
    case.check(output)


def test_threads_may_call_at_once(cuda_device) -> None:
    shapes = [AttentionForward(batch, 16, 512) for batch in (1, 2, 3, 4)]
    cases = [make_problem("normal", shape, torch.bfloat16, cuda_device) for shape in shapes]
    faults: list[str] = []

    def work(case: Problem) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = [attention(*case.inputs) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        faults.extend(filter(None, map(case.fault, outputs[::49])))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_each_device_is_told_what_the_kernel_may_have() -> None:
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        case = make_problem("normal", AttentionForward(2, 16, 512), torch.bfloat16, device)
        case.check(attention(*case.inputs))
    assert torch.cuda.current_device() == 0
