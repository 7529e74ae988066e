"""Runs a kernel's PTX in the simulator on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flash_helpers import gpu
from flash_helpers.console.progress import Progress, progress_bar
from flash_helpers.kernel_configs import AttentionForward, Config, DType
from flash_helpers.ptx import DeviceMemory, Kernel, Observer, PtxError, Run, load_ptx
from flash_helpers.ptx.tensor_map import TensorMap as SimulatedTensorMap
from flash_helpers.registry.hopper import REPLAYS
from flash_helpers.registry.launch import WORKSPACE, Launch, TensorMap
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.tensors import kernel_strides, posed_problem

_SECONDS_PER_TILE = 4.0e-3
"""One block's pass over 64x64 scores at d_head 128 on one core, measured; for estimates only."""

_TILE_OPERATIONS = 4 * 64 * 64 * 128

ANNOUNCE_FROM_SECONDS = 20.0
"""Estimated run time from which on a reader is told what to expect."""

_RUNS_PER_TILE = 8
"""How often each instruction may run for a pass over a K and V tile. Loops inside the pass are
unrolled, so once is enough; a kernel that runs more never ends."""

_RUNS_PER_REPLAYED_TILE = 40
"""The same for a kernel that may compute rows again, in loops that are not unrolled."""

_KERNELS_KEPT = 64


def load_kernel(config: Config, ptx: str | Path) -> Kernel:
    """The kernel of a config, from PTX text or a path.

    Raises PtxSyntaxError for a text that is no whole PTX module, LaunchError if it does not hold
    the config's kernel.
    """
    return load_ptx(ptx).kernel(config.short_form())


def estimate_seconds(problem: AttentionForward) -> float:
    """About how long a kernel takes for a problem, on one core."""
    return problem.operations / _TILE_OPERATIONS * _SECONDS_PER_TILE


def duration_text(seconds: float) -> str:
    """A duration in the unit that suits it: "40 s", "3 min", "14 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def run_kernel(
    config: Config,
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    *,
    softmax_scale: float | None = None,
    keep_going: bool = False,
    progress: Progress | None = None,
    observer: Observer | None = None,
) -> Run:
    """Computes attention with a kernel's PTX, and returns the run with its counters and faults.

    config: what the kernel was compiled for. kernel: from `load_kernel`. tensors: q, k, v and o,
    (batch, seq, heads, d_head) on the CPU, in the config's dtype, with stride 1 along d_head; other
    strides are free; o is written, and lse, (batch, heads, seq), if it is there. softmax_scale:
    1/sqrt(d_head) by default. keep_going: collect faults in the run rather than raise the first
    one. progress: called with the number of blocks done and the number of blocks. observer: is
    shown registers and shared memory while the kernel runs.

    Raises PtxError if the kernel cannot run, or a fault was found in it; ValueError for shapes that
    do not fit together.
    """
    problem = posed_problem(tensors, config.supports.causal, softmax_scale)
    strides = {name: kernel_strides(tensors[name]) for name in "qkvo"}
    launches = config.launch(problem, strides)
    tiles = problem.batch * problem.heads * -(-problem.len_q // config.B_r)
    # blocks that ask for tiles may get them all
    asks = any(launch.workspace_bytes for launch in launches)
    per_block = tiles if asks else -(-tiles // sum(launch.n_blocks for launch in launches))
    replays = REPLAYS in config.step.traits
    return _run(
        launches,
        kernel,
        tensors,
        max_instructions=(_RUNS_PER_REPLAYED_TILE if replays else _RUNS_PER_TILE)
        * len(kernel.program.instructions)
        * (len(config.key_blocks(problem.len_k)) + 2)
        * per_block,
        keep_going=keep_going,
        progress=progress,
        observer=observer,
    )


def _run(
    launches: tuple[Launch, ...],
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_instructions: int,
    keep_going: bool,
    progress: Progress | None,
    observer: Observer | None,
) -> Run:
    memory = DeviceMemory()
    addresses = {name: memory.upload(_span(x).numpy()) for name, x in tensors.items()}
    n_blocks = sum(launch.n_blocks for launch in launches)
    done, run = 0, None
    for launch in launches:
        if launch.workspace_bytes:
            addresses[WORKSPACE] = memory.upload(np.zeros(launch.workspace_bytes, np.uint8))
        before = done

        def advance(finished: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + finished, n_blocks)

        run = kernel.launch(
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            args=[launch.bind(addresses, _encode_tensor_map)],
            memory=memory,
            keep_going=keep_going,
            strict_barriers=True,
            lints=True,
            max_instructions=max_instructions,
            progress=advance,
            observer=observer,
            target=_target(launch),
            before=run,
        )
        done += launch.n_blocks
    for name in launches[0].outputs:
        span = _span(tensors[name])
        found = memory.download(addresses[name], span.numel(), span.numpy().dtype)
        span.copy_(torch.from_numpy(found))
    assert run is not None
    return run


def _encode_tensor_map(tensor_map: TensorMap, address: int) -> bytes:
    """The simulator's record of a tensor map. Raises ValueError for what the driver refuses."""
    return SimulatedTensorMap(
        {DType.FP16: "f16", DType.BF16: "bf16"}[DType.from_name(tensor_map.dtype)],
        address,
        tensor_map.dims,
        tensor_map.box,
        tensor_map.strides,
        swizzle=f"{tensor_map.swizzle}B" if tensor_map.swizzle else "none",
    ).encode()


def _target(launch: Launch) -> str:
    """The first of the family's targets whose blocks have so much shared memory."""
    capabilities = launch.config.family.capabilities
    enough = (c for c in capabilities if gpu.LIMITS[c].smem_bytes >= launch.shared_bytes)
    return f"sm_{next(enough, capabilities[-1])}"


def _span(x: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as bit patterns; a view."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    pattern = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.as_strided(x.detach().view(pattern), (length,), (1,), x.storage_offset())


def run_shipped(
    config: Config,
    tensors: Mapping[str, torch.Tensor],
    *,
    softmax_scale: float | None = None,
    keep_going: bool = False,
) -> Run:
    """`run_kernel` with the PTX that the package ships, and a progress bar for a run that takes
    long. config: the one that runs (`Config.runs_as`).

    Raises RuntimeError if the PTX cannot be read, and what `run_kernel` raises.
    """
    kernel = _shipped_kernel(config, ptx_path(config))
    with _announced(config, posed_problem(tensors, config.supports.causal)) as progress:
        return run_kernel(
            config,
            kernel,
            tensors,
            softmax_scale=softmax_scale,
            keep_going=keep_going,
            progress=progress,
        )


@functools.lru_cache(maxsize=_KERNELS_KEPT)
def _shipped_kernel(config: Config, path: Path) -> Kernel:
    try:
        return load_kernel(config, path)
    except (OSError, PtxError) as error:
        raise RuntimeError(
            f"the PTX of {config.short_form()} cannot be read ({error}): build it with "
            "`pip install . ./py` in the repository"
        ) from error


@contextmanager
def _announced(config: Config, problem: AttentionForward) -> Iterator[Progress | None]:
    """A progress bar on stderr for a run that takes long; None for a short one."""
    seconds = estimate_seconds(problem)
    if seconds < ANNOUNCE_FROM_SECONDS:
        yield None
        return
    description = f"simulating {config.short_form()}, about {duration_text(seconds)}"
    with progress_bar(description, unit="block") as progress:
        yield progress
