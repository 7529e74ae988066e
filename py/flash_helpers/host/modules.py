"""The PTX that a host program brings, its functions and its variables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from flash_helpers import gpu
from flash_helpers.console.file_kinds import ELF_MAGIC, FATBIN_MAGIC
from flash_helpers.host.device import SimulatedDevice
from flash_helpers.host.errors import (
    INVALID_FUNCTION,
    INVALID_IMAGE,
    INVALID_SYMBOL,
    INVALID_VALUE,
    NO_IMAGE_FOR_DEVICE,
    NOT_FOUND,
    CudaError,
)
from flash_helpers.ptx.errors import LaunchError, NotPtxError, PtxSyntaxError
from flash_helpers.ptx.run.asynchronous.register_pool import entry_registers
from flash_helpers.ptx.run.kernel import Kernel
from flash_helpers.ptx.run.layout import placed
from flash_helpers.ptx.run.loading import PtxModule, load_ptx
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.variables import initialise, place_variables, reachable
from flash_helpers.sass.analyse.occupancy import occupancy
from flash_helpers.sass.read.containers import Member, MemberKind, members_of
from flash_helpers.sass.read.records import SassError

_DYNAMIC_SMEM, _PORTABLE_SMEM_BYTES = 8, 48 << 10
"""cudaFuncAttributeMaxDynamicSharedMemorySize, and the bytes that a launch gets without it."""
_NON_PORTABLE_CLUSTER = 14
_HINTS = {9, 15}
"""Attributes of functions without effect here: the carve-out, the order of clusters."""

_FEW_REGISTERS = 32
"""Registers per thread that limit no occupancy: PTX does not tell the kernel's own number."""


@dataclass
class Image:
    """A fatbin or PTX that the program has loaded. `write`: puts bytes into a file, for a reader of
    files. `variables`: addresses of the variables that are in memory."""

    content: bytes
    device: SimulatedDevice
    write: Callable[[bytes], Path]
    variables: dict[str, int] = field(default_factory=dict)

    @cached_property
    def module(self) -> PtxModule:
        """Its PTX for the device. Raises CudaError where it has none."""
        if self.content.startswith(ELF_MAGIC):
            raise CudaError(
                INVALID_IMAGE, "the image is machine code: the simulator runs PTX, load that"
            )
        text = self.content
        if text.startswith(FATBIN_MAGIC):
            try:
                text = bytes(self._chosen(members_of(self.write(text))).read())
            except SassError as error:
                raise CudaError(INVALID_IMAGE, str(error)) from None
        try:
            return load_ptx(text)
        except NotPtxError as error:
            raise CudaError(INVALID_IMAGE, str(error)) from None

    def _chosen(self, members: list[Member]) -> Member:
        """The PTX that the driver would compile: the newest that the device runs (CUDA C++
        Programming Guide, "PTX Compatibility"). PTX for sm_90a is for sm_90 only."""
        own = self.device.capability

        def fits(member: Member) -> bool:
            target = member.architecture or ""
            return member.capability == own or (member.capability < own and target[-1:].isdigit())

        found = [m for m in members if m.kind is MemberKind.PTX and fits(m)]
        if not found:
            there = ", ".join(sorted({f"{m.kind.value[2]} for {m.architecture}" for m in members}))
            virtual = self.device.target.replace("sm", "compute")
            raise CudaError(
                NO_IMAGE_FOR_DEVICE,
                f"the program has no PTX that {self.device.target} runs, only {there}: compile it "
                f"with -gencode arch={virtual},code={virtual}, or give its --arch",
            )
        return max(found, key=lambda member: (member.capability, member.architecture or ""))


@dataclass
class LoadedFunction:
    """A kernel, and what the program has set. `dynamic_smem`: bytes that a launch may take.
    `non_portable_cluster`: whether more than 8 blocks per cluster are allowed."""

    image: Image
    kernel: Kernel
    dynamic_smem: int
    non_portable_cluster: bool = False


class ModuleCalls:
    """The calls of a program that concern modules, functions and variables. A handle is a number of
    its own, or the host address that stands for a function or variable in the program."""

    def __init__(
        self, device: SimulatedDevice, memory: DeviceMemory, write: Callable[[bytes], Path]
    ) -> None:
        self._device = device
        self._memory = memory
        self._write = write
        self._images: dict[int, Image] = {}
        self._names: dict[int, tuple[Image, str]] = {}
        self._functions: dict[int, LoadedFunction] = {}
        self._variables: dict[int, tuple[Image, str, int]] = {}

    # -- registration ------------------------------------------------------------------------------

    def load(self, content: bytes) -> list[int]:
        """An image, which is read when a function or variable of it is asked for."""
        handle = 16 * (len(self._images) + 1)
        self._images[handle] = Image(content, self._device, self._write)
        return [handle]

    def load_file(self, path: bytes) -> list[int]:
        """cuModuleLoad: the image in a file."""
        try:
            return self.load(Path(path.decode()).read_bytes())
        except OSError as error:
            raise CudaError(INVALID_VALUE, f"{path.decode()}: {error.strerror}") from None

    def name_function(self, image: int, handle: int, name: bytes) -> None:
        """A kernel of the program, by the address of its host function."""
        self._names[handle] = self._images[image], name.decode()

    def name_variable(self, image: int, handle: int, size: int, name: bytes) -> None:
        """A variable of the program, by the address of its host variable."""
        self._variables[handle] = self._images[image], name.decode(), size

    def name_managed(self, image: int, handle: int, size: int, address: int, name: bytes) -> None:
        """A `__managed__` variable, at an address that the program sees; it begins with its initial
        value."""
        owner, text = self._images[image], name.decode()
        variable = owner.module.module.variables[text]
        owner.variables[text] = address
        self._memory.words(1)[address - ARENA_BASE :][:size] = 0
        initialise(variable, owner.variables, self._memory)
        self._variables[handle] = owner, text, size

    # -- functions ---------------------------------------------------------------------------------

    def function(self, image: int, name: bytes) -> list[int]:
        """cuModuleGetFunction: a handle."""
        owner, text = self._image(image), name.decode()
        if text not in owner.module.kernels:
            raise CudaError(NOT_FOUND, f"the module has no kernel {text!r}")
        handle = (1 << 32) + 16 * len(self._names)
        self._names[handle] = owner, text
        return [handle]

    def loaded(self, handle: int) -> LoadedFunction:
        """The function of a handle, read when it is first asked for."""
        if handle not in self._functions:
            if handle not in self._names:
                raise CudaError(INVALID_FUNCTION, f"{handle:#x} is no kernel of the program")
            image, name = self._names[handle]
            try:
                kernel = image.module.kernel(name)
            except LaunchError as error:
                raise CudaError(INVALID_FUNCTION, str(error)) from None
            except PtxSyntaxError as error:
                raise CudaError(INVALID_IMAGE, str(error)) from None
            free = max(0, _PORTABLE_SMEM_BYTES - kernel.static_shared_bytes)
            self._functions[handle] = LoadedFunction(image, kernel, free)
        return self._functions[handle]

    def parameters(self, handle: int) -> list[int]:
        """Bytes of each parameter."""
        return [p.size for p in self.loaded(handle).kernel.function.parameters]

    def set_attribute(self, handle: int, attribute: int, value: int) -> None:
        """cudaFuncSetAttribute."""
        loaded = self.loaded(handle)
        if attribute == _DYNAMIC_SMEM:
            static = loaded.kernel.static_shared_bytes
            most = self._device.limits.smem_bytes - static
            if value > most:
                raise CudaError(
                    INVALID_VALUE,
                    f"{value:,} bytes of dynamic shared memory: {self._device.target} has "
                    f"{most:,} per block beside {static:,} static bytes, use smaller tiles",
                )
            loaded.dynamic_smem = value
        elif attribute == _NON_PORTABLE_CLUSTER:
            loaded.non_portable_cluster = bool(value)
        elif attribute not in _HINTS:
            raise CudaError(INVALID_VALUE, f"attribute {attribute} of a function cannot be set")

    def attributes(self, handle: int) -> list[int]:
        """cudaFuncGetAttributes: bytes of shared, constant and local memory, threads, registers,
        compute capability, bytes of dynamic shared memory."""
        loaded = self.loaded(handle)
        kernel, variables = loaded.kernel, loaded.kernel.variables
        sizes = (placed([v for v in variables if v.space == s])[1] for s in ("const", "local"))
        return [
            kernel.static_shared_bytes,
            *sizes,
            _most_threads(kernel),
            self._registers(kernel),
            self._device.capability,
            loaded.dynamic_smem,
        ]

    def occupancy(self, handle: int, threads: int, dynamic_smem: int) -> list[int]:
        """Blocks per SM, as far as PTX tells: the number of registers is not known."""
        kernel = self.loaded(handle).kernel
        smem = kernel.static_shared_bytes + dynamic_smem
        try:
            found = occupancy(self._device.capability, self._registers(kernel), smem, threads)
        except SassError as error:
            raise CudaError(INVALID_VALUE, str(error)) from None
        return [found.blocks]

    def _registers(self, kernel: Kernel) -> int:
        return entry_registers(kernel.function) or _FEW_REGISTERS

    # -- variables ---------------------------------------------------------------------------------

    def variable(self, handle: int) -> list[int]:
        """cudaGetSymbolAddress, cudaGetSymbolSize."""
        if handle not in self._variables:
            raise CudaError(INVALID_SYMBOL, f"{handle:#x} is no __device__ variable of the program")
        image, name, size = self._variables[handle]
        return [self._place(image, name), size]

    def global_(self, image: int, name: bytes) -> list[int]:
        """cuModuleGetGlobal: address and size."""
        owner, text = self._image(image), name.decode()
        if text not in owner.module.module.variables:
            raise CudaError(NOT_FOUND, f"the module has no variable {text!r}")
        return [self._place(owner, text), owner.module.module.variables[text].size]

    def _place(self, image: Image, name: str) -> int:
        """The address of a variable, which is put into memory if it is not there."""
        module = image.module.module
        variables = reachable(module, [name]).values()
        return place_variables(module, variables, self._memory, image.variables, {})[name]

    def _image(self, handle: int) -> Image:
        if handle not in self._images:
            raise CudaError(INVALID_VALUE, f"{handle:#x} is no module of the program")
        return self._images[handle]


def _most_threads(kernel: Kernel) -> int:
    """Threads per block that it is compiled for."""
    directives = kernel.function.directives
    bound = directives.get("maxntid") or directives.get("reqntid")
    return math.prod(bound) if bound else gpu.MAX_THREADS
