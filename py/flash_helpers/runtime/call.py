"""A call: attention on tensors, checked and ready to run on the device that they are on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.registry.launch import WORKSPACE, Launch
from flash_helpers.runtime import library, simulator, tensors

_PLANS_KEPT = 1024

# What a config is chosen by, and softmax_scale.
Asked: TypeAlias = "tuple[Hashable, float | None]"
# Finds the config for what was asked and these tensors, q, k and v at least, by name.
Choose: TypeAlias = "Callable[[Asked, Mapping[str, torch.Tensor]], Config]"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is launched, in order, for tensors of some layouts, whose checks it has passed, wherever
    they begin in memory.

    device: the CUDA device's number; None on the CPU, where there are no launchers either.
    chunk_bytes: what the tensors begin at multiples of. span_bytes: of q, k, v and o, from the
    first byte to the last. allocate: o for q. quick: does in one step what a call of `_checked` and
    of `run` do, if it finds that all is as it was; None where that is not possible. softmax_scale:
    as asked.
    """

    launches: tuple[Launch, ...]
    launchers: tuple[library.Launcher, ...]
    device: int | None
    chunk_bytes: int
    span_bytes: tuple[int, ...]
    allocate: Callable[[torch.Tensor], torch.Tensor]
    quick: library.QuickLaunch | None = None
    softmax_scale: float | None = None

    def run(self, addresses: dict[str, int]) -> None:
        """Launch on the device's current stream, without waiting. addresses: of the tensors."""
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
        return simulator.run_shipped(
            self.config,
            self.tensors,
            softmax_scale=self.plan.softmax_scale,
            keep_going=keep_going,
        )


_plans: dict[Hashable, Plan] = {}
# The last plan that has `quick`, by what was asked and the shape of q. Only that, since more takes
# longer to look up: `quick` compares the rest.
_quick_plans: dict[tuple[Hashable, torch.Size], Plan] = {}


@functools.cache
def _exchange() -> int | None:
    """PyTorch's table of C functions that describe tensors, which it has since 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return None if capsule is None else library.exchange(capsule)


def _make_plan(
    config: Config, given: Mapping[str, torch.Tensor], softmax_scale: float | None
) -> Plan:
    """Raises what `prepare` does, where the addresses of the tensors do not matter."""
    problem = tensors.check_shapes(config, given, softmax_scale)
    device = given["q"].device
    tensors.check_device(config.family, device)
    strides = {**problem.strides(), **tensors.check_strides(config, given)}
    if "o" in given:
        tensors.check_output_layout(given["o"])
    launches = config.launch(problem, strides)
    launchers = tuple(library.Launcher(x, device.index) for x in launches if device.type == "cuda")
    q = given["q"]
    usual_strides = torch.empty(q.shape, device="meta").stride()  # of single items too
    o = given.get("o", tensors.Layout(q.shape, usual_strides, q.dtype, device))
    all_four = (q, given["k"], given["v"], o)
    spans = tuple(map(tensors.span_bytes, all_four))
    quick = None
    if len(launchers) == 1 and (exchange := _exchange()) is not None:
        quick = launchers[0].quick(
            exchange,
            q.__dlpack_device__(),
            [laid.shape for laid in all_four],
            [laid.stride() for laid in all_four],
            spans,
        )
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
        softmax_scale,
    )


def _resolve(asked: tuple[Config | str, float | None], _: object) -> Config:
    return library.resolve(asked[0])


def _checked(
    asked: Asked,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None,
    lse: torch.Tensor | None,
    choose: Choose,
) -> tuple[Plan, dict[str, torch.Tensor], dict[str, int]]:
    """The plan for these tensors; they and the output, and where they begin, by name."""
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
    if lse is not None:  # its shape has three sizes, and so is not taken for that of o
        layouts += (lse.shape, lse.stride(), lse.dtype, lse.device)
    plan = _plans.get(layouts)
    if plan is None:
        named = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        plan = _make_plan(choose(asked, given), given, asked[1])
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
    found = {"q": q, "k": k, "v": v, "o": o}
    addresses = {"q": q_begin, "k": k_begin, "v": v_begin, "o": o_begin}
    if lse is not None:
        tensors.check_output(found, lse, "lse")
        found["lse"], addresses["lse"] = lse, lse.data_ptr()
    return plan, found, addresses


def prepare(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> Call:
    """Check a call of a built kernel on dense tensors.

    o: where the result goes; None allocates a contiguous tensor. softmax_scale: 1/sqrt(d_head) by
    default. lse: float32, (batch, heads, seq of q), where the LSE goes, if it is wanted.

    What follows from dtypes, shapes and strides is found out once for each, not in every call.

    Raises TypeError for a wrong dtype, ValueError for a config that was not built and any other
    wrong argument, RuntimeError for a device that cannot run the kernel.
    """
    return Call(*_checked((cfg, softmax_scale), q, k, v, o, lse, _resolve))


def compute(
    asked: Asked,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    choose: Choose = _resolve,
) -> torch.Tensor:
    """`prepare` and run, in as little time as possible; returns o.

    asked: a config or its short form, or what `choose` finds a built config for.
    """
    plan = _quick_plans.get((asked, q.shape)) if lse is None else None
    if plan is not None and (o is None or not o.requires_grad):
        output = plan.allocate(q) if o is None else o
        if plan.quick(q, k, v, output):
            return output
        del output  # its memory may be needed
    plan, found, addresses = _checked(asked, q, k, v, o, lse, choose)
    if plan.device is None:
        Call(plan, found, addresses).run()
        return found["o"]
    plan.run(addresses)
    if plan.quick is not None:
        _quick_plans[asked, q.shape] = plan
    return found["o"]


def resources(
    cfg: Config | str, device: torch.device | str | int | None = None
) -> library.KernelResources:
    """What a built kernel takes on a CUDA device (default: the current one).

    Raises ValueError for a config that was not built or a device that is no CUDA device, and
    RuntimeError with CUDA's text.
    """
    return library.resources(cfg, tensors.device_index(device))
