"""A call: attention on tensors, checked and ready to run on the device that they are on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.registry.launch import WORKSPACE, Launch
from flash_helpers.runtime import library, simulator, tensors

_PLANS_KEPT = 1024

Asked = TypeVar("Asked", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is launched, in order, for tensors of some layouts, whose checks it has passed, wherever
    they begin in memory.

    device: the CUDA device's number; None on the CPU, where there are no launchers either.
    chunk_bytes: what the tensors begin at multiples of. span_bytes: of q, k, v and o, from the
    first byte to the last. allocate: o for q. quick: does in one step what a call of `_checked` and
    of `run` do, if it finds that all is as it was; None where that is not possible.
    """

    launches: tuple[Launch, ...]
    launchers: tuple[library.Launcher, ...]
    device: int | None
    chunk_bytes: int
    span_bytes: tuple[int, ...]
    allocate: Callable[[torch.Tensor], torch.Tensor]
    quick: library.QuickLaunch | None = None

    def run(self, addresses: dict[str, int]) -> None:
        """Launch on the device's current stream, without waiting. addresses: of q, k, v and o."""
        # torch.cuda.current_stream() makes an object of it, which takes longer than a launch
        addresses[library.STREAM] = torch._C._cuda_getCurrentRawStream(self.device)
        for launcher in self.launchers:
            # Zeroed by the stream before the kernel, at each replay of a graph too; the allocator
            # gives it to nobody else before the stream has done both.
            if launcher.workspace_bytes:
                workspace = torch.zeros(
                    launcher.workspace_bytes,
                    dtype=torch.uint8,
                    device=torch.device("cuda", self.device),
                )
                addresses[WORKSPACE] = workspace.data_ptr()
            launcher.run(addresses)


class Call(NamedTuple):
    """A plan and tensors for it, by name, and where they begin. Running it checks nothing."""

    plan: Plan
    tensors: Mapping[str, torch.Tensor]
    addresses: dict[str, int]

    @property
    def config(self) -> Config:
        """The config whose kernel runs."""
        return self.plan.launches[0].config

    @property
    def output(self) -> torch.Tensor:
        """What is computed."""
        return self.tensors["o"]

    @property
    def is_simulated(self) -> bool:
        """Whether the tensors are on the CPU."""
        return self.plan.device is None

    def run(self) -> None:
        """Compute: on a CUDA device's current stream, without waiting, or in the simulator."""
        if self.is_simulated:
            self.simulate()
        else:
            self.plan.run(self.addresses)

    def simulate(self, keep_going: bool = False) -> Run:
        """Run the kernel's PTX. Raises PtxError for a fault of the kernel."""
        return simulator.run_shipped(self.config, self.tensors, keep_going=keep_going)


_plans: dict[Hashable, Plan] = {}
# The last plan that has `quick`, by what was asked and the shape of q. Only that, since more takes
# longer to look up: `quick` compares the rest.
_quick_plans: dict[tuple[Hashable, torch.Size], Plan] = {}


@functools.cache
def _exchange() -> int | None:
    """PyTorch's table of C functions that describe tensors, which it has since 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return None if capsule is None else library.exchange(capsule)


def _make_plan(config: Config, given: Mapping[str, torch.Tensor]) -> Plan:
    """Raises what `prepare` does, where the addresses of the tensors do not matter."""
    problem = tensors.check_shapes(config, given)
    device = given["q"].device
    tensors.check_device(config.family, device)
    strides = {**problem.strides(), **tensors.check_strides(config, given)}
    if "o" in given:
        tensors.check_output_layout(given["o"])
    launches = config.launch(problem, strides)
    launchers = tuple(library.Launcher(x, device.index) for x in launches if device.type == "cuda")
    q = given["q"]
    usual_strides = torch.empty(q.shape, device="meta").stride()  # of single items too
    all_four = dict(given)  # q, k, v and o in this order
    all_four.setdefault("o", tensors.Layout(q.shape, usual_strides, q.dtype, device))
    spans = tuple(map(tensors.span_bytes, all_four.values()))
    quick = None
    if len(launchers) == 1 and (exchange := _exchange()) is not None:
        own_strides = [laid.stride() for laid in all_four.values()]
        quick = launchers[0].quick(exchange, q.__dlpack_device__(), q.shape, own_strides, spans)
    return Plan(
        launches,
        launchers,
        device.index if device.type == "cuda" else None,
        config.supports.chunk_bytes,
        spans,
        torch.empty_like  # told nothing, it is quicker
        if q.stride() == usual_strides
        else functools.partial(torch.empty_like, memory_format=torch.contiguous_format),
        quick,
    )


def _resolve(cfg: Config | str, _: torch.Tensor) -> Config:
    return library.resolve(cfg)


def _checked(
    asked: Asked,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None,
    choose: Callable[[Asked, torch.Tensor], Config],
) -> tuple[Plan, torch.Tensor, dict[str, int]]:
    """The plan for these tensors, the output, and where they begin, by name."""
    # fmt: off
    layouts = (
        asked,
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )
    # fmt: on
    if o is not None:
        layouts += (o.shape, o.stride(), o.dtype, o.device)
    plan = _plans.get(layouts)
    if plan is None:
        inputs = {"q": q, "k": k, "v": v}
        plan = _make_plan(choose(asked, q), inputs if o is None else {**inputs, "o": o})
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
            _quick_plans.clear()
        _plans[layouts] = plan
    q_begin, k_begin, v_begin = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if o is None:
        o = plan.allocate(q)
        o_begin = o.data_ptr()
    else:
        o_begin = o.data_ptr()
        q_bytes, k_bytes, v_bytes, o_bytes = plan.span_bytes
        o_end = o_begin + o_bytes
        # where the ranges are apart, so are the elements, and the rest of the check takes long
        if (
            (q_begin < o_end and o_begin < q_begin + q_bytes)
            or (k_begin < o_end and o_begin < k_begin + k_bytes)
            or (v_begin < o_end and o_begin < v_begin + v_bytes)
            or o.requires_grad
        ):
            tensors.check_output({"q": q, "k": k, "v": v}, o)
    if (q_begin | k_begin | v_begin | o_begin) % plan.chunk_bytes:  # a power of two
        tensors.check_alignment(plan.chunk_bytes, {"q": q, "k": k, "v": v, "o": o})
    return plan, o, {"q": q_begin, "k": k_begin, "v": v_begin, "o": o_begin}


def prepare(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> Call:
    """Check a call of a built kernel on dense tensors.

    o: where the result goes; None allocates a contiguous tensor.

    What follows from dtypes, shapes and strides is found out once for each, not in every call.

    Raises TypeError for a wrong dtype, ValueError for a config that was not built and any other
    wrong argument, RuntimeError for a device that cannot run the kernel.
    """
    plan, o, addresses = _checked(cfg, q, k, v, o, _resolve)
    return Call(plan, {"q": q, "k": k, "v": v, "o": o}, addresses)


def compute(
    asked: Asked,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    choose: Callable[[Asked, torch.Tensor], Config] = _resolve,
) -> torch.Tensor:
    """`prepare` and run, in as little time as possible; returns o.

    asked: a config or its short form, or what `choose`, given q too, finds a built config for.
    """
    plan = _quick_plans.get((asked, q.shape))
    if plan is not None and (o is None or not o.requires_grad):
        output = plan.allocate(q) if o is None else o
        if plan.quick(q, k, v, output):
            return output
        del output  # its memory may be needed
    plan, o, addresses = _checked(asked, q, k, v, o, choose)
    if plan.device is None:
        Call(plan, {"q": q, "k": k, "v": v, "o": o}, addresses).run()
        return o
    plan.run(addresses)
    if plan.quick is not None:
        _quick_plans[asked, q.shape] = plan
    return o


def resources(
    cfg: Config | str, device: torch.device | str | int | None = None
) -> library.KernelResources:
    """What a built kernel takes on a CUDA device (default: the current one).

    Raises ValueError for a config that was not built or a device that is no CUDA device, and
    RuntimeError with CUDA's text.
    """
    return library.resources(cfg, tensors.device_index(device))
