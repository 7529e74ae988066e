"""A call: attention on tensors, checked and ready to run on the device that they are on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.registry.launch import WORKSPACE, Launch
from flash_helpers.runtime import library, simulator, tensors

_PLANS_KEPT = 1024


@dataclass(frozen=True)
class Call:
    """What is launched, in order, on which tensors, by name. Running it checks nothing."""

    launches: tuple[Launch, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def config(self) -> Config:
        """The config whose kernel runs."""
        return self.launches[0].config

    @property
    def output(self) -> torch.Tensor:
        """What is computed."""
        return self.tensors["o"]

    @property
    def is_simulated(self) -> bool:
        """Whether the tensors are on the CPU."""
        return self.output.device.type == "cpu"

    def run(self) -> None:
        """Compute: on a CUDA device's current stream, without waiting, or in the simulator."""
        if self.is_simulated:
            self.simulate()
            return
        device = self.output.device
        # torch.cuda.current_stream() makes an object of it, which takes longer than a launch
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        for launch in self.launches:
            # Zeroed by the stream before the kernel, at each replay of a graph too; the allocator
            # gives it to nobody else before the stream has done both.
            if launch.workspace_bytes:
                workspace = torch.zeros(launch.workspace_bytes, dtype=torch.uint8, device=device)
                addresses[WORKSPACE] = workspace.data_ptr()
            arguments = launch.bind(addresses, library.encode_tensor_map)
            library.launch(launch, arguments, device.index, stream)

    def simulate(self, keep_going: bool = False) -> Run:
        """Run the kernel's PTX. Raises PtxError for a fault of the kernel."""
        return simulator.run_shipped(self.config, self.tensors, keep_going=keep_going)


class _Plan(NamedTuple):
    """What is launched for tensors of some layouts, whose checks it has passed, wherever they begin
    in memory, at a multiple of chunk_bytes."""

    launches: tuple[Launch, ...]
    chunk_bytes: int


@functools.lru_cache(maxsize=_PLANS_KEPT)
def _plan(cfg: str, names: tuple[str, ...], *layouts: tuple) -> _Plan:
    """Raises what `prepare` does, where the addresses of the tensors do not matter.

    names: of q, k, v and, if it is given, o. layouts: their `Layout`s, as plain tuples.
    """
    config = library.resolve(cfg)
    given = {n: tensors.Layout(*found) for n, found in zip(names, layouts, strict=True)}
    problem = tensors.check_shapes(config, given)
    tensors.check_device(config.family, given["q"].device)
    strides = {**problem.strides(), **tensors.check_strides(config, given)}
    return _Plan(config.launch(problem, strides), config.supports.chunk_bytes)


def prepare(cfg: Config | str, inputs: Mapping[str, torch.Tensor], o: torch.Tensor | None) -> Call:
    """Check a call of a built kernel. inputs: q, k and v.

    o: where the result goes; None allocates a contiguous tensor.

    What follows from dtypes, shapes and strides is found out once for each, not in every call.

    Raises TypeError for a wrong dtype, ValueError for a config that was not built and any other
    wrong argument, RuntimeError for a device that cannot run the kernel.
    """
    name = cfg.short_form() if isinstance(cfg, Config) else cfg
    given = dict(inputs) if o is None else {**inputs, "o": o}
    layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in given.values()]
    plan = _plan(name, tuple(given), *layouts)
    tensors.check_alignment(plan.chunk_bytes, given)
    if o is None:
        given["o"] = torch.empty_like(inputs["q"], memory_format=torch.contiguous_format)
    else:
        tensors.check_output(inputs, o)
    return Call(plan.launches, given)


def resources(
    cfg: Config | str, device: torch.device | str | int | None = None
) -> library.KernelResources:
    """What a built kernel takes on a CUDA device (default: the current one).

    Raises ValueError for a config that was not built or a device that is no CUDA device, and
    RuntimeError with CUDA's text.
    """
    return library.resources(cfg, tensors.device_index(device))
