"""The devices that run kernels on this machine. torch is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from flash_helpers.kernel_configs import Config
from flash_helpers.runtime import library

if TYPE_CHECKING:
    import torch

DEVICE_CHOICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class Findings:
    """Findings about a kernel that ran to its end, in words: faults, and lints, which are legal but
    suspicious."""

    faults: tuple[str, ...] = ()
    lints: tuple[str, ...] = ()


# (config, tensors, options): computes the outputs among the problem's tensors, which are in the
# order of `Problem.axes`.
Execute: TypeAlias = (
    "Callable[[Config, Sequence[torch.Tensor | None], Mapping[str, Any]], Findings]"
)


class KernelsNotRun(RuntimeError):
    """The kernels cannot run here; the message says why."""


@dataclass(frozen=True)
class Backend:
    """A device, the function that runs configs on it, and the configs that are built.

    `description`: the device in words. `execute`: runs a config. `library`: compiler and targets of
    the kernels, in words. `is_simulator`: the kernels' PTX is simulated.
    """

    device: torch.device
    description: str
    execute: Execute
    kernels: tuple[Config, ...]
    library: str = ""
    is_simulator: bool = False

    def synchronize(self) -> None:
        """Wait for the device, so that an error of a launch is raised here."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def find_backend(device: str = "auto", keep_going: bool = False) -> Backend:
    """Return the backend of one of DEVICE_CHOICES; auto is a GPU, or the simulator without one.

    `keep_going`: the simulator collects the faults of a kernel; otherwise it raises the first.

    Raises KernelsNotRun, with one line saying why, if the kernels cannot run there.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise KernelsNotRun("the kernels were not run: no CUDA device was found")
    try:
        kernels = tuple(library.kernels())
        cuda = ".".join(map(str, library.cuda_version()))
        built = f"CUDA {cuda} for {' '.join(library.architectures())}"
    except RuntimeError as error:
        raise KernelsNotRun(
            "the kernels were not run: the flash_attention library did not load "
            f"({str(error).splitlines()[0]}): install it with pip install . ./py"
        ) from error
    if device == "cpu" or not has_gpu:
        return Backend(
            device=torch.device("cpu"),
            description="simulated PTX on the CPU",
            execute=_simulator(keep_going),
            kernels=kernels,
            library=built,
            is_simulator=True,
        )
    current = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(current)
    return Backend(
        device=current,
        description=f"{properties.name}, compute capability {properties.major}.{properties.minor}",
        execute=_launcher(current),
        kernels=kernels,
        library=built,
    )


def _launcher(device: torch.device) -> Execute:
    """Return what runs configs on a GPU. Tensors on the CPU, whose kernels a call would simulate,
    raise ValueError."""
    from flash_helpers.runtime.call import prepare

    def run(
        config: Config, tensors: Sequence[torch.Tensor | None], options: Mapping[str, Any]
    ) -> Findings:
        elsewhere = {str(x.device) for x in tensors if x is not None and x.device != device}
        if elsewhere:
            raise ValueError(
                f"tensors are on {', '.join(sorted(elsewhere))} and the kernels run on {device}: "
                f"move them with .to({str(device)!r})"
            )
        prepare(config, *tensors, **options).run()
        return Findings()

    return run


def _simulator(keep_going: bool) -> Execute:
    from flash_helpers.runtime.call import prepare

    def run(
        config: Config, tensors: Sequence[torch.Tensor | None], options: Mapping[str, Any]
    ) -> Findings:
        finished = prepare(config, *tensors, **options).simulate(keep_going)
        return Findings(tuple(map(str, finished.faults)), tuple(map(str, finished.lints)))

    return run
