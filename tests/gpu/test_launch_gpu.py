"""A launch runs as it says: cluster, tensor map, and a counter that is zero when a kernel begins.

A probe of the tests' own uses all three and writes down what it saw.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from other_family import ARGUMENTS, COUNTER, OtherConfig

from flash_helpers.compile.toolchain import BuildError, find_toolchain
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.registry.call import Address, Buffer, Call, Launch, TensorMap
from flash_helpers.runtime import library
from flash_helpers.runtime.call import Plan, ReadyCall
from flash_helpers.runtime.driver import LoadedKernel

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).parent / "kernels/launch_probe.cu"
BLOCKS, ROWS, COLUMNS = 64, 128, 64
H100 = largest_device(90)
CONFIG = OtherConfig(3, Element.BF16, 128, lazy=True)


@pytest.fixture(scope="module")
def probe(cuda_device: torch.device, tmp_path_factory) -> LoadedKernel:
    """The compiled probe."""
    if torch.cuda.get_device_capability(cuda_device) != (9, 0):
        pytest.skip("tensor maps and clusters: compute capability 9.0")
    try:
        nvcc = find_toolchain((90,)).nvcc
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
    folder = tmp_path_factory.mktemp("probe")
    unit, cubin = folder / "probe.cu", folder / "probe.cubin"
    unit.write_text(SOURCE.read_text().replace("LAYOUT", ARGUMENTS.assertions()))
    command = [nvcc, "-std=c++20", "-arch=sm_90a", "-cubin", "-o", cubin, unit]
    subprocess.run(command, check=True)
    torch.zeros(1, device=cuda_device)  # makes PyTorch's context current
    return LoadedKernel(cubin.read_bytes(), "probe", 0)


@dataclass(frozen=True)
class ProbeLauncher:
    """The library's launcher, for a kernel that it does not hold."""

    probe: LoadedKernel
    launch: Launch

    def run(self, addresses: Mapping[str, int]) -> None:
        arguments = self.launch.bind(addresses, library.encode_tensor_map)
        self.probe.launch(self.launch, arguments, addresses[library.STREAM])


@pytest.fixture
def call(probe: LoadedKernel) -> Callable[[], ReadyCall]:
    """A call of the probe on tensors of its own. The counter's buffer goes into its output
    "seen", so that the test can look at it."""

    def make() -> Call:
        problem = AttentionForward(1, 1, BLOCKS * ROWS)
        (own,) = CONFIG.call(problem, problem.strides(), H100).launches
        q = torch.randn(BLOCKS * ROWS, 128, device="cuda").bfloat16()
        o = torch.full((BLOCKS * ROWS, COLUMNS), torch.nan, device="cuda").bfloat16()
        seen = torch.full((1 + 2 * BLOCKS,), -1, dtype=torch.int32, device="cuda")
        launch = replace(own, grid=(BLOCKS, 1, 1), shared_bytes=0)
        planned = Call((launch,), (Buffer(COUNTER, 4 * len(seen), zeroed=True),))
        tensors = {"q": q, "o": o, "seen": seen}
        plan = Plan(
            *(CONFIG, planned, tuple(tensors), (), (ProbeLauncher(probe, launch),), 0, 16, (), {})
        )
        return ReadyCall(plan, tensors, {name: x.data_ptr() for name, x in tensors.items()})

    return make


def run_and_keep(call: ReadyCall) -> None:
    """Run, and copy what is in the buffer afterwards: the last tensor that was allocated."""
    kept = []
    zeros = torch.zeros

    def remember(*size: object, **options: object) -> torch.Tensor:
        kept.append(zeros(*size, **options))
        return kept[-1]

    torch.zeros = remember
    try:
        call.run()
    finally:
        torch.zeros = zeros
    call.tensors["seen"].copy_(kept[0].view(torch.int32))


def check(call: ReadyCall) -> None:
    counted, drawn, rank = call.tensors["seen"].cpu().split([1, BLOCKS, BLOCKS])
    assert counted.item() == BLOCKS
    assert sorted(drawn.tolist()) == list(range(BLOCKS))
    assert rank.tolist() == [0, 1] * (BLOCKS // 2)
    assert torch.equal(call.tensors["o"], call.tensors["q"][:, :COLUMNS])


def test_the_counter_is_zero_in_every_call(call) -> None:
    first = call()
    for _ in range(3):
        first.tensors["o"].fill_(torch.nan)
        run_and_keep(first)
        check(first)


def test_the_counter_is_zero_in_every_replay_of_a_graph(call) -> None:
    recorded = call()
    run_and_keep(recorded)  # whatever has to be loaded is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_and_keep(recorded)
    for _ in range(3):
        recorded.tensors["seen"].fill_(-1)
        recorded.tensors["o"].fill_(torch.nan)
        graph.replay()
        check(recorded)


def test_two_streams_have_a_counter_each(call) -> None:
    calls = [call(), call()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        for one, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                run_and_keep(one)
    torch.cuda.synchronize()
    for one in calls:
        check(one)


def test_a_tensor_map_that_the_driver_refuses_is_told(cuda_device) -> None:
    refused = TensorMap("q", Element.BF16, dims=(128, 64), strides=(100,), box=(64, 64))
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled refuses the tensor"):
        library.encode_tensor_map(refused, 1 << 20)


def test_the_buffer_is_an_address_of_the_arguments() -> None:
    problem = AttentionForward(1, 1, 128)
    (launch,) = CONFIG.call(problem, problem.strides(), H100).launches
    assert Address(ARGUMENTS.offset("counter"), COUNTER) in launch.addresses
