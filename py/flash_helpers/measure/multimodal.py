"""Time of a multimodal block and its parts beside PyTorch's compiler: the problems with their least
bytes and operations, the records, their measurement and their table."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flash_helpers.console.tables import Table, number
from flash_helpers.measure.results import Protocol, Provenance, RecordFile

if TYPE_CHECKING:
    import torch

    from flash_helpers.measure.machine import GpuSensor
    from flash_helpers.measure.timing import CudaTimer, Recording

ATTENTION, BLOCK, MODEL = "attention", "block", "model"
PARTS = (ATTENTION, BLOCK, MODEL)
EAGER, KERNELS, TRITON, COMPILED = "eager", "kernels", "triton", "compiled"
COMPILED_KERNELS = "compiled_kernels"
NAMES = {
    EAGER: "eager, attention by PyTorch",
    KERNELS: "eager, attention by a kernel",
    TRITON: "eager, passes over tokens in Triton",
    COMPILED: "torch.compile, max-autotune",
    COMPILED_KERNELS: "torch.compile, attention by a kernel",
}
ELEMENT_BYTES = 2  # bf16
CHECKED = 2  # samples of a batch that are compared with float64
FACTOR = 2.0  # most error, in multiples of that of PyTorch in the same dtype
COPIED_BYTES = 2**30


@dataclass(frozen=True)
class BlockProblem:
    """A call of a part of a model with joint attention, in bf16.

    part: "attention" is JointAttention, "block" is TransformerBlock, "model" is all layers. length,
    context: tokens of the sequence and of its context, which has the model's width, as the
    condition has.
    """

    part: str
    batch: int
    length: int
    context: int
    width: int = 128
    heads: int = 8
    feed_forward: int = 512
    layers: int = 12

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, length {self.length}, context {self.context}"
        heads = "" if self.heads == type(self).heads else f", {self.heads} heads"
        return f"{self.part}, {sizes}{heads}"

    @property
    def operations(self) -> int:
        """Floating-point operations of matrix products; norms, rotary embedding and other work per
        element are left out."""
        if self.part != MODEL:
            return self._layer_operations(returns_context=True)
        last = self._layer_operations(returns_context=False)
        return (self.layers - 1) * self._layer_operations(returns_context=True) + last

    @property
    def bytes(self) -> int:
        """Least bytes moved: weights, inputs and outputs once each. Between the layers of a model
        nothing is written, as if one launch computed all."""
        tokens = self.batch * (self.length + self.context) * self.width
        outputs = self.batch * self.length * self.width if self.part == MODEL else tokens
        condition = 0 if self.part == ATTENTION else self.batch * self.width
        return ELEMENT_BYTES * (tokens + outputs + condition + self.weights)

    @property
    def weights(self) -> int:
        """Elements of all weights that the call reads."""
        if self.part != MODEL:
            return self._layer_weights(returns_context=True)
        last = self._layer_weights(returns_context=False)
        return (self.layers - 1) * self._layer_weights(returns_context=True) + last

    def _layer_operations(self, returns_context: bool) -> int:
        width, hidden = self.width, self.feed_forward
        keys = self.length + self.context
        queries = keys if returns_context else self.length
        projections = 2 * width * width * (queries + 2 * keys + queries)  # Q; K and V; output
        attention = 4 * queries * keys * width  # Q @ K^T and P @ V of all heads
        of_sample = projections + attention
        if self.part != ATTENTION:
            streams = self._streams
            parts = 6 * streams if returns_context else 6 + 2 * (streams - 1)
            of_sample += 4 * queries * width * hidden + 2 * parts * width * width
        return self.batch * of_sample

    def _layer_weights(self, returns_context: bool) -> int:
        whole = self._stream_weights(has_queries=True)
        if not self.context:
            return whole
        return whole + self._stream_weights(has_queries=returns_context)

    def _stream_weights(self, has_queries: bool) -> int:
        """Weights of the sequence, or of the context, in a layer."""
        width, hidden = self.width, self.feed_forward
        attention = 4 * width**2 + 3 * width if has_queries else 2 * width**2 + width
        if self.part == ATTENTION:
            return attention
        parts = 6 if has_queries else 2
        modulation = parts * (width**2 + width)
        feed_forward = 2 * width * hidden + hidden + width if has_queries else 0
        return attention + modulation + feed_forward

    @property
    def _streams(self) -> int:
        return 2 if self.context else 1


TARGET = BlockProblem(BLOCK, batch=64, length=186, context=64)


def problems(
    parts: Iterable[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    contexts: Sequence[int],
    heads: int,
    product: bool = False,
) -> list[BlockProblem]:
    """Return the problems of each part, in order.

    product: all sizes with each other. Without it, those in which one size at most is not that of
    the target.
    """
    found = []
    for part in parts:
        for batch in batches:
            for length in lengths:
                for context in contexts:
                    sizes = {"batch": batch, "length": length, "context": context}
                    others = sum(getattr(TARGET, name) != size for name, size in sizes.items())
                    if product or others <= 1:
                        found.append(replace(TARGET, part=part, heads=heads, **sizes))
    return found


def counts_table(asked: Iterable[BlockProblem]) -> Table:
    """Return the arithmetic of problems: megabytes of weights, least megabytes moved, operations of
    matrix products, and operations per byte."""
    rows = [
        [
            str(problem),
            number(ELEMENT_BYTES * problem.weights / 1e6, 2),
            number(problem.bytes / 1e6, 2),
            number(problem.operations / 1e9, 3),
            number(problem.operations / problem.bytes, 0),
        ]
        for problem in asked
    ]
    return Table(["problem", "weights, MB", "least MB", "GFLOP", "FLOP per byte"], rows)


@dataclass(frozen=True)
class BlockRecord:
    """One contender on one problem.

    name: of NAMES. samples_us: microseconds per call, by round. launches: kernels per call; None if
    the profiler sees none. error: relative Frobenius error against float64. failure: why there is
    no time.
    """

    problem: BlockProblem
    name: str
    samples_us: tuple[float, ...] = ()
    launches: int | None = None
    error: float | None = None
    failure: str = ""

    @property
    def us(self) -> float | None:
        """Median over the rounds; None if there is no time."""
        return statistics.median(self.samples_us) if self.samples_us else None


@dataclass(frozen=True)
class BlockTimes(RecordFile):
    """Everything that one run measured.

    copy_gbs: gigabytes per second, read and written, of a copy of a gibibyte. matmul_tflops: of a
    product of two large matrices in bf16. Both were measured in the same process, and give the
    floor.
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "times of multimodal blocks"

    provenance: Provenance
    protocol: Protocol
    copy_gbs: float
    matmul_tflops: float
    records: tuple[BlockRecord, ...]

    def floor_us(self, problem: BlockProblem) -> float:
        """Return the microseconds that a call takes at least: its bytes at the speed of a copy, or
        its products at that of a large one, whichever is longer."""
        copied = problem.bytes / (1e3 * self.copy_gbs)
        return max(copied, problem.operations / (1e6 * self.matmul_tflops))

    def table(self) -> Table:
        """Return one row per problem: its least bytes, its operations and the floor, then
        microseconds and launches of each contender."""
        by_problem: dict[BlockProblem, dict[str, BlockRecord]] = {}
        for record in self.records:
            by_problem.setdefault(record.problem, {})[record.name] = record
        rows = []
        for problem, own in by_problem.items():
            row = [
                str(problem),
                number(problem.bytes / 1e6, 2),
                number(problem.operations / 1e9, 2),
            ]
            row.append(number(self.floor_us(problem), 1))
            for name in NAMES:
                found = own.get(name)
                launches = found.launches if found else None
                row += [number(found.us if found else None, 1), number(launches)]
            rows.append(row)
        header = ["problem", "MB", "GFLOP", "floor, µs"]
        for text in NAMES.values():
            header += [f"{text}, µs", "launches"]
        return Table(header, rows)

    def markdown(self) -> str:
        """Return a table with a row for each contender of each problem, and the machine and the
        software of the measurement."""
        compiled = {r.problem: r.us for r in self.records if r.name == COMPILED}
        rows = []
        for record in self.records:
            beside = compiled.get(record.problem)
            ratio = beside / record.us if beside and record.us else None
            row = [str(record.problem), NAMES[record.name], number(record.us, 1)]
            rows.append([*row, number(record.launches), number(ratio, 2)])
        header = ["problem", "computed by", "µs", "launches", "speed by that of torch.compile"]
        sentence = self.provenance.sentence(f"PyTorch {self.provenance.torch}")
        return (
            f"{Table(header, rows, align='llrrr').markdown()}\n\nMedians of "
            f"{self.protocol.rounds} samples under sustained load, in turns, replayed from CUDA "
            f"graphs. {sentence}"
        )


# -- measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Called:
    """A part of a model with the tensors of a call."""

    module: Any  # a torch.nn.Module, or what torch.compile made of it
    tensors: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        """Call the module."""
        return self.module(*self.tensors, **self.options)

    def exact(self) -> Any:
        """Return the first output of the first samples in float64."""
        module = copy.deepcopy(self.module).double()
        for part in module.modules():
            if hasattr(part, "backend"):
                part.backend = "torch"
        tensors = [x[:CHECKED].double() for x in self.tensors]
        options = {name: x.double() for name, x in self.options.items()}
        return first(module(*tensors, **options))


def first(found: Any) -> Any:
    """Return the output of the sequence, of a module that may return the context's, too."""
    return found[0] if isinstance(found, tuple) else found


def make_call(multimodal: Any, problem: BlockProblem, device: torch.device, backend: str) -> Called:
    """Return a part with random weights and inputs, the same for each backend.

    multimodal: the package flash_attention.multimodal.
    """
    import torch

    torch.manual_seed(0)
    sizes = {"width": problem.width, "heads": problem.heads, "backend": backend}
    rotary = multimodal.rotary_table(problem.length, problem.width // problem.heads)
    x, context = (
        torch.randn(problem.batch, tokens, problem.width)
        for tokens in (problem.length, problem.context)
    )
    tensors, options = [x, context], {"rotary": rotary.to(device)}
    if problem.part == ATTENTION:
        module = multimodal.JointAttention(**sizes)
    else:
        tensors.insert(1, torch.randn(problem.batch, problem.width))
        sizes["feed_forward"] = problem.feed_forward
        if problem.part == BLOCK:
            module = multimodal.TransformerBlock(**sizes)
        else:
            sizes |= {"layers": problem.layers, "length": problem.length}
            module, options = multimodal.MultimodalTransformer(**sizes), {}
    for name, weights in module.named_parameters():
        if "modulation" in name:  # a block begins as the identity, which would hide errors
            torch.nn.init.normal_(weights, std=0.02)
    if not problem.context:
        tensors.pop()
    module.to(device, torch.bfloat16).eval()
    moved = tuple(y.to(device, torch.bfloat16) for y in tensors)
    return Called(module, moved, options)


def left_out(name: str) -> str:
    """Return the reason why a contender cannot be had here; "" if it can."""
    from flash_helpers.measure import libraries  # late, since it imports torch

    package = libraries.TRITON
    if name != TRITON or package.is_installed:
        return ""
    return f"the package {package.name} is not installed"


def contenders(
    multimodal: Any, problem: BlockProblem, device: torch.device, names: Iterable[str]
) -> dict[str, Called]:
    """Return the calls of the contenders; those with a kernel may be refused when they are first
    called.

    Raises ImportError for "triton" where it is not installed.
    """
    import torch

    found = {}
    for name in names:
        backend = "kernels" if name in (KERNELS, COMPILED_KERNELS) else "torch"
        call = make_call(multimodal, problem, device, backend)
        if name == TRITON:
            from flash_helpers.measure.triton_joint import in_triton

            call = Called(in_triton(call.module), call.tensors, call.options)
        if name in (COMPILED, COMPILED_KERNELS):
            # the timer records a graph of what it times
            compiled = torch.compile(call.module, mode="max-autotune-no-cudagraphs", dynamic=False)
            call = Called(compiled, call.tensors, call.options)
        found[name] = call
    return found


def count_launches(work: Callable[[], object]) -> int | None:
    """Return the kernels that a work launches; None if the profiler sees none, or without CUDA."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        work()
    kinds = [event.device_type for event in profiled.events()]
    return kinds.count(DeviceType.CUDA) or None


def measure_problem(
    problem: BlockProblem,
    calls: Mapping[str, Called],
    exact: Any,
    timer: CudaTimer,
    protocol: Protocol,
    sensor: GpuSensor,
) -> list[BlockRecord]:
    """Check and time contenders in turns, under the protocol's first load.

    exact: the first output of the first samples in float64. One that raises, or whose error is over
    FACTOR times that of eager, gets a record with the failure and without a time.
    """
    import torch

    from flash_helpers.measure.timing import interleaved_rounds, record

    records: dict[str, BlockRecord] = {}
    recordings: dict[str, Recording] = {}
    for name, call in calls.items():
        own = BlockRecord(problem, name)
        try:
            found = first(call())[: len(exact)].double()
            error = float((found - exact).norm() / exact.norm())
            own = replace(own, error=error)
            most = FACTOR * (records[EAGER].error or 0.0) if EAGER in records else float("inf")
            if not error <= most:
                raise ValueError(f"error {error:.2e} is over {FACTOR:g} times that of eager")
            own = replace(own, launches=count_launches(call))
            with torch.no_grad():
                recordings[name] = record(call, 1, timer, protocol)
        except Exception as failure:  # of any kind: the others are measured all the same
            own = replace(own, failure=f"{type(failure).__name__}: {failure}")
        records[name] = own
    load = protocol.loads[0]
    samples = [recording.sample(load) for recording in recordings.values()]
    rounds = interleaved_rounds(samples, timer, load, protocol.rounds, sensor)
    for name, taken in zip(recordings, rounds, strict=True):
        times = tuple(1e3 * sample.ms for sample in taken)
        records[name] = replace(records[name], samples_us=times)
    return [*records.values()]


def measure_rates(
    device: torch.device, timer: CudaTimer, protocol: Protocol, n_bytes: int = COPIED_BYTES
) -> tuple[float, float]:
    """Return the gigabytes per second of a copy, read and written, and the TFLOP/s of a product of
    two large matrices in bf16. n_bytes: of the copy."""
    import torch

    from flash_helpers.kernel_configs import Element
    from flash_helpers.measure.libraries import copied
    from flash_helpers.measure.rates import MATMUL_SIZE, matmul_work
    from flash_helpers.measure.timing import record

    source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device)
    size = MATMUL_SIZE if n_bytes == COPIED_BYTES else 64
    matmul = matmul_work(Element.BF16, device, size)
    found = []
    for work, units in (
        (lambda: copied(source), 2 * n_bytes / 1e9),
        (matmul.launch, matmul.operations / 1e12),
    ):
        recording = record(work, 1, timer, protocol)
        sample = recording.sample(protocol.loads[0])
        times = [timer.start(sample.work, sample.times)() for _ in range(protocol.rounds)]
        found.append(units * sample.n_launches / (statistics.median(times) / 1e3))
    return found[0], found[1]
