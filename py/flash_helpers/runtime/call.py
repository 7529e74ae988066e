"""A call on tensors, checked and ready to run on the device that they are on."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.registry.call import Call
from flash_helpers.registry.problem import Elements, Problem, Tensor
from flash_helpers.runtime import library, simulator, tensors, zeros
from flash_helpers.runtime.call_log import CallLog, LoggedCall

_PLANS_KEPT = 1024

# A config, its short form, or a key that `choose` finds one for; and the problem's options by name.
Asked: TypeAlias = "tuple[Hashable, tuple[tuple[str, Any], ...]]"
# Finds the config for what was asked and these tensors, by name.
Choose: TypeAlias = "Callable[[Asked, Mapping[str, torch.Tensor]], Config]"
# Tensors that go with their names, in the order of `Problem.axes`: None for an output to allocate.
Given: TypeAlias = "Sequence[torch.Tensor | None]"


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches for tensors of some layouts that have passed the checks, wherever they begin in
    memory.

    `config`: the one whose kernels run. `names`: names of the tensors that the call takes, in the
    order of `Problem.axes`. `outputs`: number of each output among them, and a function of the
    first tensor that allocates it. `device`: the CUDA device's number; None on the CPU, where there
    are no launchers either. `alignments`: bytes; each tensor begins at a multiple of its own.
    `span_bytes`: bytes from the first to the last byte of each tensor. `options`: options of the
    problem. `quick`: does the work of `_checked` and `run` in one step if layouts and device are
    unchanged; None where that is not possible. `constants`: values of the elements of all outputs,
    by name, if no kernel runs; None if one does. `config` is None if none was asked for either.
    `wanted`: outputs that are computed; None for all.
    """

    config: Config | None
    call: Call
    names: tuple[str, ...]
    outputs: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]
    launchers: tuple[library.Launcher, ...]
    device: int | None
    alignments: tuple[int, ...]
    span_bytes: tuple[int, ...]
    options: Mapping[str, Any]
    quick: library.QuickLaunch | None = None
    constants: Mapping[str, Elements] | None = None
    wanted: frozenset[str] | None = None

    def filled(self, given: Given) -> list[Any]:
        """Return the tensors, with new ones for outputs that were left out."""
        found: list[Any] = list(given)
        for number, allocate in self.outputs:
            if found[number] is None:
                found[number] = allocate(found[0])
        return found

    def run(self, addresses: dict[str, int]) -> None:
        """Launch on the device's current stream, without waiting. `addresses`: addresses of the
        tensors."""
        assert self.device is not None
        # torch.cuda.current_stream() makes an object of it, which takes longer than a launch
        stream = addresses[library.STREAM] = torch._C._cuda_getCurrentRawStream(self.device)
        # Zeroed by the stream before the kernels, at each replay of a graph too; the allocator
        # gives a buffer to no other call before the stream has done both.
        buffers = []
        for buffer in self.call.buffers:
            if buffer.left_zeroed:
                kept = zeros.address_of_zeros(buffer.bytes, self.device, stream)
                if kept is not None:
                    addresses[buffer.name] = kept
                    continue
            allocate = torch.zeros if buffer.zeroed else torch.empty
            device = torch.device("cuda", self.device)
            buffers.append(allocate(buffer.bytes, dtype=torch.uint8, device=device))
            addresses[buffer.name] = buffers[-1].data_ptr()
        for launcher in self.launchers:
            launcher.run(addresses)


class ReadyCall(NamedTuple):
    """A plan, its tensors by name, and their addresses. Running it checks nothing."""

    plan: Plan
    tensors: Mapping[str, torch.Tensor]
    addresses: dict[str, int]

    @property
    def config(self) -> Config:
        """The config whose kernels run."""
        assert self.plan.config is not None  # attention() alone asks for none
        return self.plan.config

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The outputs, by name."""
        return {name: self.tensors[name] for name in self._outputs}

    @property
    def problem(self) -> Problem:
        """The problem that the tensors pose."""
        return tensors.problem_for(self.config, self.tensors, **self.plan.options)

    @property
    def output(self) -> torch.Tensor:
        """The first output."""
        return self.tensors[self._outputs[0]]

    @property
    def _outputs(self) -> list[str]:
        return [self.plan.names[number] for number, _ in self.plan.outputs]

    @property
    def is_simulated(self) -> bool:
        """Whether the tensors are on the CPU."""
        return self.plan.device is None

    def run(self) -> None:
        """Compute: on a CUDA device's current stream, without waiting, or in the simulator."""
        if self.plan.constants is not None:
            with self.logged(), torch.inference_mode():  # which may write inference tensors
                for name, value in self.plan.constants.items():
                    output = self.tensors[name]
                    output.copy_(value(self.tensors)) if callable(value) else output.fill_(value)
        elif self.is_simulated:
            self.simulate()
        else:
            with self.logged():
                self.plan.run(self.addresses)

    def simulate(self, keep_going: bool = False, device: Device | None = None) -> Run:
        """Run the kernels' PTX, launched as on a device. Raises PtxError for a kernel's fault, and
        ValueError for a call without a kernel."""
        if self.plan.constants is not None:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.tensors.items())
            raise ValueError(
                f"no kernel runs on tensors of these shapes: {shapes}: there is nothing to count, "
                "use 1 or more of everything, or forward() for the result"
            )
        with self.logged():
            return simulator.run_shipped(
                self.config,
                self.tensors,
                keep_going=keep_going,
                device=device,
                wanted=self.plan.wanted,
                **self.plan.options,
            )

    def logged(self) -> AbstractContextManager[None]:
        """Return a context to run the call in, which writes it into the log of calls if there is
        one."""
        if _log is None:
            return nullcontext()
        plan = self.plan
        if plan.constants is not None:
            return _log.without_kernel(self.tensors)
        return _log.around(
            LoggedCall(self.config, self.problem, plan.call, self.tensors, plan.device, plan.wanted)
        )


_log = CallLog.from_environment()
_plans: dict[Hashable, Plan] = {}
# The last plan that has `quick`, by the operation, what was asked, the first tensor's shape and the
# names of the tensors. No more than that, since more takes longer to look up: `quick` compares the
# rest. With a log there are none: so a call without one has nothing to ask about it.
_quick_plans: dict[tuple[type[Problem], Asked, torch.Size, tuple[str, ...]], Plan] = {}


@functools.cache
def _exchange() -> int | None:
    """PyTorch's table of C functions that describe tensors, which it has since 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return None if capsule is None else library.exchange(capsule)


def _allocator(tensor: Tensor, first: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of the first tensor that allocates an output."""
    dtype = tensors.torch_dtype(tensor.element)
    if tensor.shape != tuple(first.shape) or dtype != first.dtype:
        return lambda first: first.new_empty(tensor.shape, dtype=dtype)
    usual_strides = torch.empty(first.shape, device="meta").stride()  # of single items too
    if first.stride() == usual_strides:
        return torch.empty_like  # without an argument it is quicker
    return functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def _make_plan(
    config: Config,
    given: dict[str, torch.Tensor],
    options: Mapping[str, Any],
    wanted: frozenset[str] | None,
) -> Plan:
    """Return the plan of a call. Raises as `prepare` does for faults that do not depend on
    addresses."""
    problem = tensors.check_problem(config, given, **options)
    first = next(iter(given.values()))
    gpu = tensors.device_for(config.family, first.device)
    strides = {**problem.strides(), **tensors.check_strides(config, problem, given)}
    taken = [tensor for tensor in problem.tensors if tensor.name in strides]
    for tensor in problem.outputs:
        if tensor.name in given:
            tensors.check_output_layout(tensor.name, given[tensor.name])
    call = config.call(problem, strides, gpu)
    if wanted is not None:
        call = call.of_outputs(wanted)
    ran = config.runs_as(strides)
    index = first.device.index if first.device.type == "cuda" else None
    launchers: tuple[library.Launcher, ...] = ()
    if index is not None:
        numbers = _numbers(ran, gpu, index)
        launchers = tuple(library.Launcher(x, numbers[x.kernel], index) for x in call.launches)
    layouts = _layouts(taken, given)
    spans = tuple(map(tensors.span_bytes, layouts))
    alignments = tuple(map(config.supports.alignment_of, taken))
    quick = None
    if len(launchers) == 1 and not call.buffers and (exchange := _exchange()) is not None:
        described = [
            library.Described(
                *(x.name, x.element, x.shape, tuple(laid.stride()), span, x.is_output, alignment)
            )
            for x, laid, span, alignment in zip(taken, layouts, spans, alignments, strict=True)
        ]
        quick = launchers[0].quick(exchange, first.__dlpack_device__(), described)
    return Plan(
        ran,
        call,
        tuple(tensor.name for tensor in taken),
        tuple((n, _allocator(x, first)) for n, x in enumerate(taken) if x.is_output),
        launchers,
        index,
        alignments,
        spans,
        options,
        quick,
        wanted=wanted,
    )


def _constant_plan(
    kind: type[Problem], asked: Asked, given: dict[str, torch.Tensor]
) -> Plan | None:
    """Return the plan of a call whose outputs are known without a kernel; None for all others.
    Raises as `prepare` does."""
    config = None if asked[0] is None else library.resolve(asked[0])
    found = tensors.constant_call(kind, config, given, **dict(asked[1]))
    if found is None:
        return None
    first = next(iter(given.values()))
    taken = [x for x in found.tensors if x.name in given or x.is_output]
    for tensor in taken:
        if tensor.is_output and tensor.name in given:
            tensors.check_output_layout(tensor.name, given[tensor.name])
    outputs = {n: x for n, x in enumerate(taken) if x.is_output}
    return Plan(
        config,
        Call((), ()),
        tuple(tensor.name for tensor in taken),
        tuple((n, _allocator(x, first)) for n, x in outputs.items()),
        (),
        first.device.index,
        (1,) * len(taken),
        tuple(map(tensors.span_bytes, _layouts(taken, given))),
        {},
        constants={x.name: found.values[x.name] for x in outputs.values()},
    )


def _numbers(config: Config, gpu: Device, index: int) -> dict[str, int]:
    """`library.numbers`, which compiles nothing while a CUDA graph is captured."""
    _warn_of_unmeasured(gpu.name, gpu.capability)
    with torch.cuda.device(index):
        is_capturing = torch.cuda.is_current_stream_capturing()
    try:
        return library.numbers([config], gpu.capability, may_compile=not is_capturing)
    except library.NotCompiled as error:
        raise RuntimeError(
            f"{error}, and a CUDA graph is being captured: call "
            f'flash_attention.prepare("{config.short_form()}") before the capture'
        ) from None


@functools.cache  # once for a GPU
def _warn_of_unmeasured(name: str, capability: tuple[int, int]) -> None:
    """Tell that nothing is known of the kernels on a GPU that is neither of 8.x nor of 9.0."""
    if capability[0] != 8 and capability != (9, 0):
        warnings.warn(
            f"{name} has compute capability {capability[0]}.{capability[1]}, on which no kernel "
            "was ever checked or measured: compare results with tools/debug/sanity_check.py",
            RuntimeWarning,
            stacklevel=2,
        )


def _layouts(taken: Sequence[Tensor], given: Mapping[str, torch.Tensor]) -> list[tensors.Laid]:
    """Return the tensors that are given, and the layouts of those that will be allocated."""
    device = next(iter(given.values())).device
    return [given[x.name] if x.name in given else _usual_layout(x, device) for x in taken]


def _usual_layout(tensor: Tensor, device: torch.device) -> tensors.Layout:
    strides = torch.empty(tensor.shape, device="meta").stride()
    dtype = tensors.torch_dtype(tensor.element)
    return tensors.Layout(torch.Size(tensor.shape), strides, dtype, device)


def _resolve(asked: Asked, _: object) -> Config:
    return library.resolve(asked[0])


def _checked(
    kind: type[Problem],
    asked: Asked,
    names: tuple[str, ...],
    given: Given,
    choose: Choose,
    wanted: frozenset[str] | None = None,
) -> tuple[Plan, dict[str, torch.Tensor], dict[str, int]]:
    """Return the plan for these tensors, the tensors with their outputs, and their addresses, by
    name."""
    layouts: tuple[Any, ...] = (kind, asked, names, wanted)
    for x in given:
        layouts += (None,) if x is None else (x.shape, x.stride(), x.dtype, x.device)
    plan = _plans.get(layouts)
    if plan is None:
        by_name = tensors.named(zip(names, given, strict=True))
        plan = _constant_plan(kind, asked, by_name)
        plan = plan or _make_plan(choose(asked, by_name), by_name, dict(asked[1]), wanted)
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
            _quick_plans.clear()
        _plans[layouts] = plan
    every = plan.filled(given)
    begins = [x.data_ptr() for x in every]
    ends = [begin + span for begin, span in zip(begins, plan.span_bytes, strict=True)]
    found = dict(zip(plan.names, every, strict=True))
    for number, _ in plan.outputs:
        if given[number] is None:
            continue
        begin, end = begins[number], ends[number]
        # where the ranges are apart, so are the elements, and the rest of the check takes long
        apart = all(n == number or end <= begins[n] or ends[n] <= begin for n in range(len(begins)))
        if not apart or every[number].requires_grad:
            name = plan.names[number]
            others = {other: x for other, x in found.items() if other != name}
            tensors.check_output(others, name, every[number])
    if any(map(operator.mod, begins, plan.alignments)):
        tensors.check_alignment(dict(zip(plan.names, plan.alignments, strict=True)), found)
    return plan, found, dict(zip(plan.names, begins, strict=True))


def prepare(cfg: Config | str, *given: torch.Tensor | None, **options: Any) -> ReadyCall:
    """Check a call of a config on dense tensors, and compile its kernels if they are new.

    `given`: the problem's tensors in the order of `Problem.axes`; an output that is None or left
    out is allocated, contiguous, unless it is optional. `options`: options of the problem, such as
    softmax_scale.

    The checks of dtypes, shapes and strides run once for each layout, not in every call.

    Raises TypeError for a wrong dtype, ValueError for any other wrong argument, RuntimeError for a
    device that cannot run the kernel, and BuildError for a kernel that does not compile.
    """
    kind = library.resolve(cfg).family.operation.problem
    asked = (cfg, tuple(options.items()))
    names = kind.names(given)
    by_name = dict(zip(kind.axes, given, strict=False))
    found = tuple(by_name.get(name) for name in names)
    return ReadyCall(*_checked(kind, asked, names, found, _resolve))


def compute(
    kind: type[Problem],
    asked: Asked,
    names: tuple[str, ...],
    given: Given,
    choose: Choose = _resolve,
    *,
    wanted: frozenset[str] | None = None,
) -> list[torch.Tensor]:
    """`prepare` and run, in as little time as possible; returns all tensors, outputs included.

    `kind`: problem class of the operation. `asked`: a config or its short form, or a key that
    `choose` finds a config for; and options. `names`: names of the tensors given, in the order of
    `Problem.axes`, with all that are not optional. `wanted`: outputs that are computed, by default
    all: launches that write others alone are left out, and those outputs hold anything.
    """
    first = given[0]
    assert first is not None  # an input
    key = (kind, asked, first.shape, names)
    plan = _quick_plans.get(key)
    if plan is not None and plan.quick is not None:
        every = plan.filled(given)
        if not any(every[n].requires_grad for n, _ in plan.outputs) and plan.quick(*every):
            return every
        del every  # its memory may be needed
    plan, found, addresses = _checked(kind, asked, names, given, choose, wanted)
    if plan.device is None or plan.constants is not None or _log is not None:
        ReadyCall(plan, found, addresses).run()
    else:
        plan.run(addresses)
        if plan.quick is not None:
            _quick_plans[key] = plan
    return list(found.values())


@contextmanager
def calls_logged(log: CallLog | None) -> Iterator[None]:
    """Write the calls made within into a log, or into none, instead of the environment's."""
    global _log
    before, _log = _log, log
    _quick_plans.clear()
    try:
        yield
    finally:
        _log = before
        _quick_plans.clear()


def compile_ahead(configs: Sequence[Config], device: torch.device) -> None:
    """Compile the kernels of configs for a device, several at once, and load them there, so that no
    call has to. For the CPU, where they are simulated, only their PTX is made.

    Raises RuntimeError for a device that cannot run a kernel, and BuildError for a kernel that does
    not compile.
    """
    if device.type == "cpu":
        library.ptx_paths(configs)
        return
    index = tensors.device_index(device)
    gpus = [tensors.device_for(config.family, torch.device("cuda", index)) for config in configs]
    library.numbers(configs, gpus[0].capability)
    for config in configs:
        library.resources(config, gpus[0].capability, index)


def register(name: str, symbol: str, image: bytes) -> None:
    """`library.register`; calls that were planned with a kernel of the same name are planned
    anew."""
    library.register(name, symbol, image)
    _plans.clear()
    _quick_plans.clear()


def resources(
    cfg: Config | str, device: torch.device | str | int | None = None
) -> library.KernelResources:
    """Return the resources of a config on a CUDA device (default: the current one).

    Raises ValueError for a device that is no CUDA device, and RuntimeError with CUDA's text.
    """
    config, index = library.resolve(cfg), tensors.device_index(device)
    gpu = tensors.device_for(config.family, torch.device("cuda", index))
    return library.resources(config, gpu.capability, index)
