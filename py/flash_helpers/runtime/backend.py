"""What runs the kernels on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_helpers.kernel_configs import FlashForwardKernelConfig

DEVICE_CHOICES = ("auto", "cuda", "cpu")

# (config, q, k, v, o): computes attention of q, k, v into o, all (batch, seq, heads, d_head), and
# returns the faults, in words, that were found in the kernel but did not stop it
Forward = Callable[
    [FlashForwardKernelConfig, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[str, ...],
]


class KernelsNotRun(RuntimeError):
    """The kernels cannot run here; the message says why."""


@dataclass(frozen=True)
class Backend:
    """A device, the function that runs a kernel on it, and the kernels there are.

    description: the device in words. library: what the kernels were built with, in words.
    is_simulator: the kernels' PTX is simulated.
    """

    device: torch.device
    description: str
    forward: Forward
    kernels: tuple[FlashForwardKernelConfig, ...]
    library: str = ""
    is_simulator: bool = False

    def synchronize(self) -> None:
        """Wait for the device, so that an error of a launch is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def find_backend(device: str = "auto", keep_going: bool = False) -> Backend:
    """The backend of one of DEVICE_CHOICES; auto is a GPU, or the simulator where there is none.

    keep_going: the simulator collects the faults of a kernel; otherwise it raises the first.

    Raises KernelsNotRun, with one line saying why, if the kernels cannot run there.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise KernelsNotRun("the kernels were not run: no CUDA device was found")
    try:
        # not at the top: flash_attention itself imports this package
        from flash_attention import _library

        kernels = tuple(_library.kernels())
        library = (
            f"CUDA {'.'.join(map(str, _library.cuda_version()))} for "
            f"{' '.join(_library.architectures())}"
        )
    except (ImportError, RuntimeError) as error:
        raise KernelsNotRun(
            "the kernels were not run: the flash_attention library did not load "
            f"({str(error).splitlines()[0]}): install it with pip install . ./py"
        ) from error
    if device == "cpu" or not has_gpu:
        return _simulator(kernels, library, keep_going)
    return _gpu(kernels, library)


def _gpu(kernels: tuple[FlashForwardKernelConfig, ...], library: str) -> Backend:
    from flash_attention import forward

    def launch(
        config: FlashForwardKernelConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
    ) -> tuple[str, ...]:
        forward(config, q, k, v, o)
        return ()

    current = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(current)
    return Backend(
        device=current,
        description=f"{properties.name}, compute capability {properties.major}.{properties.minor}",
        forward=launch,
        kernels=kernels,
        library=library,
    )


def _simulator(
    kernels: tuple[FlashForwardKernelConfig, ...], library: str, keep_going: bool
) -> Backend:
    from flash_attention import simulate

    def run(
        config: FlashForwardKernelConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
    ) -> tuple[str, ...]:
        _, finished = simulate(config, q, k, v, o, keep_going=keep_going)
        return tuple(str(fault) for fault in finished.faults)

    return Backend(
        device=torch.device("cpu"),
        description="simulated sm_80 PTX on the CPU",
        forward=run,
        kernels=kernels,
        library=library,
        is_simulator=True,
    )
