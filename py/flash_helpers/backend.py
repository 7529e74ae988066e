"""What runs the kernels on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flash_helpers.kernel_configs import FlashForwardKernelConfig

DEVICE_CHOICES = ("auto", "cuda", "cpu")

# (config, q, k, v, o): computes attention of q, k, v into o, all (batch, seq, heads, d_head)
Forward = Callable[
    [FlashForwardKernelConfig, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any
]


class KernelsNotRun(RuntimeError):
    """The kernels cannot run here; the message says why."""


@dataclass(frozen=True)
class Backend:
    """A device, the function that runs a kernel on it, and the kernels there are.

    description: the device in words. library: what the kernels were built with, in words.
    """

    device: torch.device
    description: str
    forward: Forward
    kernels: tuple[FlashForwardKernelConfig, ...]
    library: str = ""

    def synchronize(self) -> None:
        """Wait for the device, so that an error of a launch is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def find_backend(device: str = "auto") -> Backend:
    """The backend of one of DEVICE_CHOICES.

    Raises KernelsNotRun, with one line saying why, if the kernels cannot run there.
    """
    if device == "cpu":
        raise KernelsNotRun("the kernels were not run: they need a CUDA device, not the CPU")
    if not torch.cuda.is_available():
        raise KernelsNotRun("the kernels were not run: no CUDA device was found")
    try:
        # not at the top: flash_attention itself imports this package
        from flash_attention import _library, forward

        kernels = tuple(_library.kernels())
    except (ImportError, RuntimeError) as error:
        raise KernelsNotRun(
            "the kernels were not run: the flash_attention library did not load "
            f"({str(error).splitlines()[0]}): install it with pip install . ./py"
        ) from error
    current = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(current)
    return Backend(
        device=current,
        description=f"{properties.name}, compute capability {properties.major}.{properties.minor}",
        forward=forward,
        kernels=kernels,
        library=f"CUDA {'.'.join(map(str, _library.cuda_version()))} for "
        f"{' '.join(_library.architectures())}",
    )
