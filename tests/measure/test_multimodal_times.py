"""Times of multimodal blocks: least bytes and operations, checks, and a run at toy sizes."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fake_backend import fake_backend, load_tool, run_tool
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flash_attention import multimodal
from flash_helpers.console.tables import DASH
from flash_helpers.measure import libraries, timing
from flash_helpers.measure import multimodal as measured
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.multimodal import (
    ATTENTION,
    BLOCK,
    COMPILED,
    EAGER,
    KERNELS,
    PARTS,
    TRITON,
    BlockProblem,
    BlockRecord,
    BlockTimes,
    contenders,
    first,
    make_call,
    measure_problem,
    problems,
)
from flash_helpers.measure.results import Load, Protocol
from flash_helpers.operations.joint_attention import baselines
from flash_helpers.operations.joint_attention.inputs import draw
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.registry.problem import Element

CPU = torch.device("cpu")
TOY = BlockProblem(BLOCK, 2, 5, 3, width=16, heads=2, feed_forward=24, layers=3)
PROTOCOL = Protocol(rounds=2, loads=(Load("burst", sample_ms=0.01),))
each_part = pytest.mark.parametrize("part", PARTS)


class CpuTimer:
    """The host's clock in place of CUDA's events."""

    flushes = False

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def start(self, work: Callable[[], object], times: int = 1) -> Callable[[], float]:
        begin = time.perf_counter()
        for _ in range(times):
            work()
        ms = 1e3 * (time.perf_counter() - begin)
        return lambda: ms

    def synchronize(self) -> None:
        pass


class NoSensor:
    def read(self) -> None:
        return None


@each_part
@pytest.mark.parametrize("context", [0, 3])
def test_operations_are_those_that_pytorch_counts(part, context) -> None:
    problem = replace(TOY, part=part, context=context)
    call = make_call(multimodal, problem, CPU, "torch")
    products = sdpa_kernel(SDPBackend.MATH)  # whose products the counter sees on a CPU
    with torch.no_grad(), products, FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == problem.operations


@each_part
@pytest.mark.parametrize("context", [0, 3])
def test_bytes_are_those_of_weights_inputs_and_outputs(part, context) -> None:
    problem = replace(TOY, part=part, context=context)
    call = make_call(multimodal, problem, CPU, "torch")
    with torch.no_grad():
        found = call()
    outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    unread = () if context else ("context.",)
    weights = [
        x
        for name, x in call.module.named_parameters()
        if not any(f".{part}" in f".{name}" for part in unread)
    ]
    tensors = [*weights, *call.tensors, *outputs]
    assert problem.bytes == sum(x.numel() * x.element_size() for x in tensors)


def test_one_size_at_a_time_differs_from_the_target_or_all_do() -> None:
    sizes = (1, 64), (64, 186), (0, 64)
    found = [(p.batch, p.length, p.context) for p in problems([ATTENTION], *sizes, 8)]
    assert found == [(1, 186, 64), (64, 64, 64), (64, 186, 0), (64, 186, 64)]
    assert len(problems(PARTS, *sizes, 8, product=True)) == 3 * 8


@pytest.mark.slow
@each_part
def test_contenders_are_checked_and_timed(part) -> None:
    problem = replace(TOY, part=part, width=128, layers=2)
    exact = make_call(multimodal, problem, CPU, "torch").exact()
    with torch.no_grad():
        calls = contenders(multimodal, problem, CPU, (EAGER, KERNELS))
        found = measure_problem(problem, calls, exact, CpuTimer(), PROTOCOL, NoSensor())
    assert [record.name for record in found] == [EAGER, KERNELS]
    for record in found:
        assert record.failure == "" and record.launches is None
        assert len(record.samples_us) == 2 and record.us > 0 and 0 < record.error < 0.1


@pytest.fixture
def interpreted_triton() -> None:
    """Triton on the CPU, kernel by kernel in NumPy (see conftest)."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs Triton's kernels")
    pytest.importorskip("triton")


@each_part
@pytest.mark.parametrize("context", [0, 3])
def test_triton_computes_the_parts(part, context, interpreted_triton) -> None:
    problem = replace(TOY, part=part, context=context, width=48, heads=3)
    with torch.no_grad():
        call = contenders(multimodal, problem, CPU, (TRITON,))[TRITON]
        parts = [x for x in call.module.modules() if hasattr(x, "modulated") or hasattr(x, "fused")]
        assert all({"modulated", "fused"} & {*vars(x)} for x in parts)  # each is Triton's
        call.module.float()
        tensors = tuple(x.float() for x in call.tensors)
        found = first(replace(call, tensors=tensors)())
        exact = make_call(multimodal, problem, CPU, "torch").exact()
    assert (found - exact).norm() < 1e-5 * exact.norm()


def test_triton_computes_a_context_without_queries(interpreted_triton) -> None:
    problem = JointAttention(
        2, 3, 5, 16, context=3, context_queries=False, rotary=True, dtype=Element.BF16
    )
    inputs = draw("normal", problem)
    found = baselines.run("triton_joint", problem, inputs)
    exact = baselines.run("pytorch_joint", problem, {n: x.double() for n, x in inputs.items()})
    assert {*found} == {"o"}
    assert (found["o"] - exact["o"]).norm() < 0.01 * exact["o"].norm()


def test_without_triton_its_rows_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(libraries.Package, "is_installed", False)
    assert measured.left_out(TRITON) == "the package triton is not installed"
    assert not any(measured.left_out(name) for name in (EAGER, KERNELS, COMPILED))


def test_a_wrong_contender_and_one_that_raises_have_no_time() -> None:
    exact = make_call(multimodal, TOY, CPU, "torch").exact()
    with torch.no_grad():
        calls = contenders(multimodal, TOY, CPU, (EAGER, KERNELS))  # no kernel has heads of 8
        wrong = make_call(multimodal, TOY, CPU, "torch")
        wrong.module.attention.sequence.out_norm.weight.mul_(1.5)
        found = measure_problem(
            *(TOY, {**calls, COMPILED: wrong}, exact, CpuTimer(), PROTOCOL, NoSensor())
        )
    eager, kernels, compiled = found
    assert eager.samples_us and not kernels.samples_us and not compiled.samples_us
    assert "backend 'kernels': no kernel of attention_forward" in kernels.failure
    assert "is over 2 times that of eager" in compiled.failure


TIMES = BlockTimes(
    provenance(fake_backend(), "multimodal.py", "68cfc22"),
    PROTOCOL,
    copy_gbs=2.0,
    matmul_tflops=4.0,
    records=(
        BlockRecord(TOY, EAGER, (3.0, 5.0, 4.0), launches=20, error=1e-3),
        BlockRecord(TOY, KERNELS, failure="ValueError: none"),
    ),
)


def test_the_table_has_the_floor_and_the_medians(tmp_path) -> None:
    TIMES.save(tmp_path / "times.json")
    assert BlockTimes.load(tmp_path / "times.json") == TIMES
    floor = max(TOY.bytes / 2e3, TOY.operations / 4e6)
    assert TIMES.floor_us(TOY) == pytest.approx(floor)
    (row,) = TIMES.table().rows
    assert row[3:] == [f"{floor:.1f}", "4.0", "20", *[DASH] * 8]
    slow = replace(TIMES, matmul_tflops=1e-6)
    assert slow.floor_us(TOY) == pytest.approx(TOY.operations)


def test_the_speed_is_told_by_that_of_the_compiler() -> None:
    compiled = BlockRecord(TOY, COMPILED, (9.0, 10.0, 11.0), launches=7, error=1e-3)
    text = replace(TIMES, records=(*TIMES.records, compiled)).markdown()
    assert f"| {TOY} | eager, attention by PyTorch | 4.0 | 20 | 2.50 |" in text
    assert f"| {TOY} | eager, attention by a kernel | {DASH} | {DASH} | {DASH} |" in text
    assert TIMES.provenance.gpu in text


def test_the_tool_writes_each_problem(monkeypatch, tmp_path, capsys) -> None:
    tool = load_tool("benchmarks/multimodal.py")
    monkeypatch.setattr(tool, "find_backend", lambda kind: fake_backend())
    monkeypatch.setattr(timing, "make_timer", lambda *_: CpuTimer())
    monkeypatch.setattr("flash_helpers.measure.machine.GpuSensor", lambda _: NoSensor())
    monkeypatch.setattr(measured, "measure_rates", lambda *_: (2.0, 4.0))
    path = tmp_path / "times.json"
    arguments = ["--part", ATTENTION, "--batch", 1, "--length", 4, "--context", 0, "--rounds", 2]
    options = ["--name", EAGER, KERNELS, "--json", path, "--commit", "68cfc22"]
    monkeypatch.setattr(tool, "LOADS", {tool.SUSTAINED: PROTOCOL.loads[0]})
    status, out, err = run_tool(capsys, tool, *arguments, *options)
    assert status == 0 and "attention, batch 1, length 4, context 0" in out, err
    assert [record.name for record in BlockTimes.load(path).records] == [EAGER, KERNELS]


def test_counts_need_no_gpu(capsys) -> None:
    arguments = ["--count", "--part", BLOCK, "--batch", 64, "--length", 186, "--context", 0]
    status, out, err = run_tool(capsys, "benchmarks/multimodal.py", *arguments)
    assert status == 0, err
    *_, weights, least, products, _ = out.splitlines()[-1].split()
    # 12 matrices of 128 x 128, 6 of the modulation, biases and norms
    elements = 12 * 128**2 + 6 * 128**2 + 6 * 128 + 512 + 128 + 3 * 128
    rows = 64 * 186
    assert weights == f"{2 * elements / 1e6:.2f}"
    assert least == f"{2 * (elements + 2 * rows * 128 + 64 * 128) / 1e6:.2f}"
    work = 2 * rows * 12 * 128**2 + 4 * rows * 186 * 128 + 64 * 12 * 128**2
    assert products == f"{work / 1e9:.3f}"


def test_rates_are_those_of_a_copy_and_a_product() -> None:
    copied, products = measured.measure_rates(CPU, CpuTimer(), PROTOCOL, n_bytes=2**16)
    assert copied > 0 and products > 0
