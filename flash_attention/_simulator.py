"""Runs the kernels' PTX, which the package ships, in the simulator on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from flash_attention import _checks, _library
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.ptx import Kernel, PtxError, Run
from flash_helpers.runtime.simulator import (
    ANNOUNCE_FROM_SECONDS,
    duration_text,
    estimate_seconds,
    load_kernel,
    run_forward,
)

PTX_FOLDER = _library.LIBRARY_PATH.parent / "ptx"

_KERNELS_KEPT = 64


def run(config: FlashForwardKernelConfig, *tensors: torch.Tensor, keep_going: bool = False) -> Run:
    """Compute attention of q, k, v into o, the four tensors, which have passed the checks.

    As on a GPU, a config with a static row stride that is not the tensors' is run by its general
    sibling. Raises RuntimeError if its PTX cannot be read, and PtxError for a fault of the kernel.
    """
    rows = {_checks.kernel_strides(tensor)[1] for tensor in tensors}
    if config.static_row_stride and rows != {config.static_row_stride}:
        config = config.general()
    kernel = _kernel(config, PTX_FOLDER)
    with _announced(config, tensors[0].shape) as progress:
        _, finished = run_forward(
            config, kernel, *tensors, keep_going=keep_going, progress=progress
        )
    return finished


@functools.lru_cache(maxsize=_KERNELS_KEPT)
def _kernel(config: FlashForwardKernelConfig, folder: Path) -> Kernel:
    path = folder / f"{config.short_form()}.ptx"
    try:
        return load_kernel(config, path)
    except (OSError, PtxError) as error:
        raise RuntimeError(
            f"the PTX of {config.short_form()} cannot be read from {path} ({error}): build it with "
            "`pip install . ./py` in the repository"
        ) from error


@contextmanager
def _announced(
    config: FlashForwardKernelConfig, shape: torch.Size
) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr for a run that takes long; None for a short one."""
    batch, seq_len, n_heads, _ = shape
    seconds = estimate_seconds(config, batch, seq_len, n_heads)
    if seconds < ANNOUNCE_FROM_SECONDS:
        yield None
        return
    description = f"simulating {config.short_form()}, about {duration_text(seconds)}"
    blocks = batch * n_heads * seq_len // config.B_r
    with tqdm(total=blocks, desc=description, unit="block", leave=False) as bar:
        yield lambda done, total: bar.update(done - bar.n)
