"""Runs a config's PTX in the simulator on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flash_helpers import gpu
from flash_helpers.console.progress import Progress, progress_bar
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import Config, Element, Problem
from flash_helpers.ptx import DeviceMemory, Kernel, LaunchError, Observer, PtxError, Run, load_ptx
from flash_helpers.ptx.tensor_map import TensorMap as SimulatedTensorMap
from flash_helpers.registry.call import Call, Launch, TensorMap
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.tensors import device_for, kernel_strides, problem_for

ANNOUNCE_FROM_SECONDS = 20.0
"""Estimated run time from which on a reader is told what to expect."""

_KERNELS_KEPT = 64
_WIDEST = 16  # bytes of the widest access of a thread: tensors keep their place between multiples

Observe = Callable[[Launch, Mapping[str, int]], Observer]
"""The observer of a launch, given the addresses of tensors and buffers by name."""


_MAP_TYPES = {Element.FP16: "f16", Element.BF16: "bf16", Element.FP32: "f32", Element.INT32: "s32"}


def load_kernel(config: Config, ptx: str | Path, function: str = "") -> Kernel:
    """Return a kernel of a config, from PTX text or a path.

    `function`: one of the family's kernels, the first by default.

    Raises PtxSyntaxError for a text that is no complete PTX module, LaunchError if it does not hold
    the kernel.
    """
    function = function or next(iter(config.kernels))
    return load_ptx(ptx).kernel(f"{function}<{config.short_form()}>")


def load_kernels(config: Config, ptx: str | Path | None = None) -> dict[str, Kernel]:
    """Return all kernels of a config by their names: those that `ptx` holds from there, the others
    from the config's own PTX.

    `ptx`: text or path of a module. Raises as `load_kernel` does, LaunchError also if the module
    holds none of the kernels, and BuildError if a kernel does not compile.
    """
    given: dict[str, Kernel] = {}
    absent: list[LaunchError] = []
    for function, name in config.kernels.items():
        try:
            if ptx is not None:
                given[name] = load_kernel(config, ptx, function)
        except LaunchError as error:
            absent.append(error)
    if absent and not given:
        raise absent[0]
    return given | {
        name: _read_kernel(config, ptx_path(config, function), function)
        for function, name in config.kernels.items()
        if name not in given
    }


def duration_text(seconds: float) -> str:
    """Return a duration in the unit that suits it: "40 s", "3 min", "14 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def run_kernel(
    config: Config,
    kernel: Kernel | Mapping[str, Kernel],
    tensors: Mapping[str, torch.Tensor],
    *,
    device: Device | None = None,
    keep_going: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
    observe: Observe | None = None,
    wanted: Collection[str] | None = None,
    **options: Any,
) -> Run:
    """Compute a call of a config with its kernels' PTX; return the run with counters and faults.

    A run of several kernels has the blocks, faults and lints of all, and the counters of the main
    one (`Config.main_kernel`), or of the last if that is left out.

    `kernel`: the config's kernel, from `load_kernel`; several kernels are given by their names
    (`Config.kernels`). `tensors`: the problem's inputs and outputs by name, on the CPU, in strides
    that the config takes. Outputs are written. Optional tensors are used if they are given.

    `device`: the GPU that the launches are made for, by default the largest that the family is
    compiled for. `keep_going`: collect faults in the run instead of raising the first one. `seed`:
    of the order in which asynchronous work completes; without one, all is as late as possible.
    `progress`: called with the number of blocks done and the number of blocks. `observe`: makes
    the observer of each launch, which sees registers and shared memory while the kernel runs.
    `wanted`: outputs that are computed, by default all; launches that write others alone are left
    out. `options`: options of the problem, such as softmax_scale.

    Raises PtxError if a kernel cannot run, or a fault was found in it; ValueError for shapes that
    do not fit together.
    """
    kind = config.family.operation.problem
    ordered = {name: tensors[name] for name in kind.axes if name in tensors}
    problem = problem_for(config, ordered, **options)
    strides = {name: kernel_strides(tensor) for name, tensor in ordered.items()}
    device = device or device_for(config.family, torch.device("cpu"))
    call = config.call(problem, strides, device)
    if wanted is not None:
        call = call.of_outputs(wanted)
    kernels = kernel if isinstance(kernel, Mapping) else dict.fromkeys(_names(call), kernel)
    memory = DeviceMemory()
    addresses = {
        name: memory.upload(_span(x).numpy(), behind=x.data_ptr() % _WIDEST)
        for name, x in ordered.items()
    }
    for buffer in call.buffers:
        # NaN, or -1, where a kernel must not count on zeros
        found = np.full(buffer.bytes, 0 if buffer.zeroed else 0xFF, np.uint8)
        addresses[buffer.name] = memory.upload(found)
    done = 0
    runs: dict[str, Run] = {}
    for launch in call.launches:
        before = done

        def advance(finished: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + finished, call.n_blocks)

        own = kernels[launch.kernel]
        runs[launch.kernel] = own.launch(
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            args=[launch.bind(addresses, _encode_tensor_map)],
            memory=memory,
            programmatic=launch.programmatic,
            keep_going=keep_going,
            seed=seed,
            strict_barriers=True,
            lints=True,
            max_instructions=config.most_runs(problem, device) * len(own.program.instructions),
            progress=advance,
            observer=observe(launch, addresses) if observe else None,
            target=_target(config, launch),
            before=runs.get(launch.kernel),
        )
        done += launch.n_blocks
    uploaded = {output.name: _span(tensors[output.name]).clone() for output in problem.outputs}
    for name, old in uploaded.items():
        span = _span(tensors[name])
        new = torch.from_numpy(memory.download(addresses[name], len(span), span.numpy().dtype))
        # Between its elements there may be those of another output, or what nothing should write.
        changed = new.ne(old)
        span[changed] = new[changed]
    main = runs.get(config.kernels[config.main_kernel])
    return _as_one(list(runs.values()), main)


def _as_one(runs: Sequence[Run], main: Run | None) -> Run:
    """Return one of the runs, the last by default, with the blocks and findings of all."""
    return replace(
        main or runs[-1],
        n_blocks=sum(run.n_blocks for run in runs),
        faults=tuple(fault for run in runs for fault in run.faults),
        lints=tuple(lint for run in runs for lint in run.lints),
    )


def _names(call: Call) -> list[str]:
    return [launch.kernel for launch in call.launches]


def _encode_tensor_map(tensor_map: TensorMap, address: int) -> bytes:
    """Return the simulator's record of a tensor map. Raises ValueError for one that the driver
    refuses."""
    return SimulatedTensorMap(
        _MAP_TYPES[tensor_map.element],
        address,
        tensor_map.dims,
        tensor_map.box,
        tensor_map.strides,
        swizzle=f"{tensor_map.swizzle}B" if tensor_map.swizzle else "none",
        l2_promotion=f"{tensor_map.l2_promotion}B" if tensor_map.l2_promotion else "none",
    ).encode()


def _target(config: Config, launch: Launch) -> str:
    """Return the first of the family's targets whose blocks have so much shared memory."""
    capabilities = config.family.capabilities
    enough = (c for c in capabilities if gpu.LIMITS[c].smem_bytes >= launch.shared_bytes)
    return f"sm_{next(enough, capabilities[-1])}"


def _span(x: torch.Tensor) -> torch.Tensor:
    """Return all memory from a tensor's first element to its last, as bit patterns; a view."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    pattern = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.as_strided(x.detach().view(pattern), (length,), (1,), x.storage_offset())


def run_shipped(
    config: Config,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep_going: bool = False,
    device: Device | None = None,
    wanted: Collection[str] | None = None,
    **options: Any,
) -> Run:
    """Call `run_kernel` with the PTX of the config's kernels (`library.ptx_path`), and show a
    progress bar for a long run. `config`: the one that runs (`Config.runs_as`).

    Raises BuildError if a kernel does not compile, RuntimeError if the PTX cannot be read, and the
    errors of `run_kernel`.
    """
    kernels = load_kernels(config)
    problem = problem_for(config, tensors, **options)
    with _announced(config, problem) as progress:
        return run_kernel(
            config,
            kernels,
            tensors,
            device=device,
            keep_going=keep_going,
            progress=progress,
            wanted=wanted,
            **options,
        )


@functools.lru_cache(maxsize=_KERNELS_KEPT)
def _read_kernel(config: Config, path: Path, function: str) -> Kernel:
    try:
        return load_kernel(config, path, function)
    except (OSError, PtxError) as error:
        raise RuntimeError(
            f"the PTX of {config.short_form()} cannot be read ({error}): build it with "
            "`pip install . ./py` in the repository"
        ) from error


@contextmanager
def _announced(config: Config, problem: Problem) -> Iterator[Progress | None]:
    """Show a progress bar on stderr for a run that takes long; yield None for a short one."""
    seconds = config.family.operation.simulated_seconds(problem)
    if seconds < ANNOUNCE_FROM_SECONDS:
        yield None
        return
    description = f"simulating {config.short_form()}, about {duration_text(seconds)}"
    with progress_bar(description, unit="block") as progress:
        yield progress
