"""Launches of a host program, each run in the simulator."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from flash_helpers import gpu
from flash_helpers.console.progress import progress_bar
from flash_helpers.console.symbols import names_of
from flash_helpers.host.device import SimulatedDevice
from flash_helpers.host.errors import INVALID_CLUSTER_SIZE, INVALID_VALUE, CudaError
from flash_helpers.host.modules import LoadedFunction, ModuleCalls
from flash_helpers.ptx.errors import LaunchError, PtxError
from flash_helpers.ptx.run.count.counts import Counts
from flash_helpers.ptx.run.memory.regions import DeviceMemory

Three = tuple[int, int, int]

_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6
_HINTS = {0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 14, 16}
"""Launch attributes without effect where launches run one after the other, as cudaLaunchAttributeID
numbers them: cache policies, priorities, events, preferences."""
_ATTRIBUTE_NUMBERS = 3
"""Numbers that stand for an attribute: its id, and 16 bytes of its value."""


@dataclass(frozen=True)
class Options:
    """How launches run: arguments of `Kernel.launch`. `output`: stream of the kernels' printf."""

    seed: int | None = None
    lints: bool = False
    keep_going: bool = False
    output: TextIO = field(default_factory=lambda: sys.stdout)


@dataclass(frozen=True)
class FinishedLaunch:
    """A launch and its counts. `report`: its faults and lints as text."""

    kernel: str
    grid: Three
    block: Three
    cluster: Three | None
    counts: Counts
    n_faults: int
    report: str


class LaunchFault(Exception):
    """A launch that ends the program. The message says which one, and the fault."""


class LaunchCalls:
    """The calls of a program that launch kernels."""

    def __init__(
        self, device: SimulatedDevice, memory: DeviceMemory, modules: ModuleCalls, options: Options
    ) -> None:
        self._device = device
        self._memory = memory
        self._modules = modules
        self._options = options
        self.finished: list[FinishedLaunch] = []
        self.follows_launch = False
        """Whether the last operation was a launch, which may overlap with a programmatic one."""

    def launch(self, handle: int, *numbers_and_bytes: int | bytes) -> None:
        """Runs a kernel. Numbers: grid, block, bytes of dynamic shared memory, launch attributes.
        Bytes: the arguments, one after the other."""
        *numbers, content = numbers_and_bytes
        assert isinstance(content, bytes)
        grid, block = _three(numbers[:3]), _three(numbers[3:6])
        dynamic = int(numbers[6])
        cluster, cooperative, programmatic = _attributes([int(n) for n in numbers[7:]])
        loaded = self._modules.loaded(handle)
        options, kernel = self._options, loaded.kernel
        _, name, _ = names_of(kernel.name)
        _check_attributes(loaded, name, dynamic, cluster)
        if kernel.synchronises_grid and not cooperative:  # a GPU takes it, and it hangs or traps
            raise LaunchFault(
                f"{name} synchronises its grid: launch it with cudaLaunchCooperativeKernel"
            )
        try:
            with progress_bar(name, "block") as progress:
                run = kernel.launch(
                    grid,
                    block,
                    dynamic,
                    _split(content, [p.size for p in kernel.function.parameters]),
                    self._memory,
                    variables=loaded.image.variables,
                    cluster=cluster,
                    programmatic=programmatic and self.follows_launch,
                    target=self._target(loaded),
                    progress=progress,
                    output=options.output,
                    seed=options.seed,
                    lints=options.lints,
                    keep_going=options.keep_going,
                )
        except LaunchError as error:
            raise CudaError(INVALID_VALUE, f"{name}: {error}") from None
        except PtxError as error:
            number = len(self.finished) + 1
            raise LaunchFault(
                f"launch {number} of the program, {name}, grid {grid}, block {block}:\n"
                f"{_from_here(str(error))}"
            ) from error
        finally:
            options.output.flush()
        self.follows_launch = True
        self.finished.append(
            FinishedLaunch(
                name,
                grid,
                block,
                cluster,
                run.counters.total,
                len(run.faults),
                _from_here(run.report()),
            )
        )

    def _target(self, loaded: LoadedFunction) -> str:
        """The target whose limits hold: the PTX's own, where it is of the device."""
        own = loaded.image.module.module.target
        same = gpu.capability_of(own) == self._device.capability
        return own if same else self._device.target


def _check_attributes(
    loaded: LoadedFunction, name: str, dynamic: int, cluster: Three | None
) -> None:
    """Refuses a launch that needs an attribute of its function which the program has not set. The
    errors are those of an H100."""
    if dynamic > loaded.dynamic_smem:
        raise CudaError(
            INVALID_VALUE,
            f"{name}: {dynamic:,} bytes of dynamic shared memory, and the kernel may take "
            f"{loaded.dynamic_smem:,}: raise cudaFuncAttributeMaxDynamicSharedMemorySize with "
            "cudaFuncSetAttribute first",
        )
    blocks = math.prod(cluster or ())
    if blocks > gpu.PORTABLE_CLUSTER and not loaded.non_portable_cluster:
        raise CudaError(
            INVALID_CLUSTER_SIZE,
            f"{name}: a cluster of {blocks} blocks: more than {gpu.PORTABLE_CLUSTER} need "
            "cudaFuncAttributeNonPortableClusterSizeAllowed, set with cudaFuncSetAttribute",
        )


def _from_here(text: str) -> str:
    """A message with paths of the current folder's files from there on: nvcc records whole ones."""
    return text.replace(f"{Path.cwd()}/", "")


def _three(numbers: Sequence[int | bytes]) -> Three:
    x, y, z = map(int, numbers)
    return x, y, z


def _attributes(numbers: list[int]) -> tuple[Three | None, bool, bool]:
    """Cluster, and whether the launch is cooperative, and programmatic."""
    cluster, cooperative, programmatic = None, False, False
    for i in range(0, len(numbers), _ATTRIBUTE_NUMBERS):
        number, first, second = numbers[i : i + _ATTRIBUTE_NUMBERS]
        if number == _CLUSTER:
            cluster = (first & 0xFFFF_FFFF, first >> 32, second & 0xFFFF_FFFF)
        elif number == _COOPERATIVE:
            cooperative = bool(first & 0xFFFF_FFFF)
        elif number == _PROGRAMMATIC:
            programmatic = bool(first & 0xFFFF_FFFF)
        elif number not in _HINTS:
            raise CudaError(INVALID_VALUE, f"launch attribute {number} is not simulated")
    return cluster, cooperative, programmatic


def _split(content: bytes, sizes: list[int]) -> list[bytes]:
    """The bytes of each argument."""
    parts, at = [], 0
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    return parts
