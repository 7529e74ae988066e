"""The C ABI of libflash_attention.so, bound with ctypes.

The library and the PTX of its kernels are data of the package flash_attention, which is found and
not imported. The structures mirror src/flash_attention.cu, field by field.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flash_helpers.compile.build import BUILT_FROM, COMPILE_FLAGS, LIBRARY, PTX_FOLDER
from flash_helpers.compile.cache import Compiled
from flash_helpers.compile.codegen import listed_configs
from flash_helpers.compile.compilers import how_to_suit_driver
from flash_helpers.compile.driver_version import driver_cuda, newer_than_driver
from flash_helpers.compile.jit import default_jit, units_of
from flash_helpers.compile.package import (
    COMPILED_FOLDER,
    HOW_TO_BUILD,
    package_folder,
    sources_root,
)
from flash_helpers.compile.sources import Unit, digest
from flash_helpers.kernel_configs import Config, Element, config_from_short_form
from flash_helpers.registry.call import TENSOR_MAP_BYTES, Address, Launch, Template, TensorMap

STREAM = "stream"  # its handle, among the addresses of a launch

_UINT = ctypes.c_uint
_RUNTIME_IS_NEWER = "cudaErrorInsufficientDriver"  # the CUDA runtime is a part of the library
_ERRORS_OF_NEWER_CODE = (
    _RUNTIME_IS_NEWER,
    "cudaErrorInvalidKernelImage",
    "cudaErrorNoKernelImageForDevice",
    "cudaErrorUnsupportedPtxVersion",
)


class _Launch(ctypes.Structure):
    """FlashLaunch."""

    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("kernel", ctypes.c_int),
        ("device", ctypes.c_int),
        ("grid", _UINT * 3),
        ("cluster", _UINT * 3),
        ("n_threads", _UINT),
        ("shared_bytes", _UINT),
        ("programmatic", _UINT),
    )


class _TensorMap(ctypes.Structure):
    """FlashTensorMap."""

    _fields_ = (
        ("rank", _UINT),
        ("type", _UINT),
        ("swizzle", _UINT),
        ("l2_promotion", _UINT),
        ("box", _UINT * 5),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
    )


class _BoundMap(ctypes.Structure):
    """FlashBoundMap."""

    _fields_ = (
        ("member", ctypes.c_uint64),
        ("tensor", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("map", _TensorMap),
    )


MAX_RANK = 8


class _Tensor(ctypes.Structure):
    """FlashTensor. dtype: code, bits and lanes of a DLDataType."""

    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("rank", ctypes.c_int),
        ("is_output", ctypes.c_int),
        ("alignment", _UINT),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_int64 * MAX_RANK),
        ("span_bytes", ctypes.c_uint64),
        ("member", ctypes.c_uint64),
    )


class _Ready(ctypes.Structure):
    """FlashReady."""

    _fields_ = (
        ("exchange", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("n_tensors", _UINT),
        ("n_maps", ctypes.c_uint64),
        ("launch_bytes", ctypes.c_uint64),
    )


# Codes of DLDataType (dlpack.h 1.3) and of CUtensorMapDataType (cuda.h).
_DLPACK_CODES = {
    Element.FP16: 2,
    Element.BF16: 4,
    Element.FP32: 2,
    Element.INT32: 0,
    Element.FP8: 10,
}


@dataclass(frozen=True)
class Described:
    """A tensor that a launch is made ready for. `shape`, `strides`: elements. `span_bytes`: bytes
    from the first byte to the one behind the last. `alignment`: bytes; it begins at a multiple."""

    name: str
    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span_bytes: int
    is_output: bool
    alignment: int


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel on one device.

    registers and local_bytes (spills and stack): per thread. static_smem_bytes and
    dynamic_smem_bytes: shared memory per block. `max_threads`: per block, with these registers.
    `resident_blocks_per_sm`: blocks that one multiprocessor runs at a time.
    """

    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    local_bytes: int
    max_threads: int
    resident_blocks_per_sm: int


class _Resources(ctypes.Structure):
    _fields_ = tuple((field.name, ctypes.c_int) for field in fields(KernelResources))


def library_path() -> Path:
    """Return the path of the kernel library. Raises RuntimeError if it is not there."""
    path = package_folder() / LIBRARY
    if not path.is_file():
        raise RuntimeError(f"{path} is not there: {HOW_TO_BUILD}")
    return path


def ptx_paths(configs: Iterable[Config]) -> dict[str, Path]:
    """Return the path of the PTX of each kernel of some configs, by its name, for the first target
    of its family: what the library was built from, or compiled now if the cache does not have it.

    Raises BuildError if a kernel does not compile.
    """
    found: dict[str, Path] = {}
    missing: dict[str, list[Unit]] = {}
    for config in configs:
        for unit in units_of(config):
            if is_built(unit):
                found[unit.name] = package_folder() / PTX_FOLDER / f"{unit.name}.ptx"
            else:
                missing.setdefault(f"compute_{config.family.targets[0]}", []).append(unit)
    for target, units in missing.items():
        found |= {kernel.name: kernel.ptx_path for kernel in default_jit().get(units, target)}
    return found


def ptx_path(config: Config, function: str = "") -> Path:
    """Return the path of the PTX of one of a config's kernels, as `ptx_paths` does.

    `function`: the first of the family's kernels by default.
    """
    return ptx_paths([config])[config.kernels[function or next(iter(config.kernels))]]


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library with its signatures declared. Raises RuntimeError if it does not load."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise RuntimeError(
            f"the kernel library cannot be loaded ({error}): {HOW_TO_BUILD}"
        ) from error
    integer, text, pointer = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
    signatures = {
        "flash_kernel_count": (integer, []),
        "flash_kernel_name": (text, [integer]),
        "flash_register": (integer, [text, text, pointer]),
        "flash_launch": (integer, [text]),  # bytes that begin with a _Launch
        "flash_knows_exchange": (integer, [pointer]),
        "flash_encode_tensor_map": (integer, [ctypes.POINTER(_TensorMap), pointer, pointer]),
        "flash_kernel_resources": (
            integer,
            [integer, integer, integer, integer, ctypes.POINTER(_Resources)],
        ),
        "flash_mma_loop_describe": (integer, [integer, integer, pointer]),
        "flash_mma_loop": (integer, [integer, integer, pointer, integer, pointer]),
        "flash_cuda_version": (integer, []),
        "flash_architectures": (text, []),
        "flash_last_error": (text, []),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise RuntimeError(
                f"the kernel library has no {name}, so that it is older than this package: "
                f"{HOW_TO_BUILD}"
            ) from error
        function.restype, function.argtypes = result, arguments
    return library


def check(status: int, what: str, number: int | None = None) -> None:
    """Raises RuntimeError with the library's text unless the status is 0.

    `number`: that of the kernel whose code was to be loaded, if one was.
    """
    if status:
        said = load().flash_last_error().decode()
        raise RuntimeError(f"{what}: {said}{_newer_code(said, number)}")


def _newer_code(said: str, number: int | None) -> str:
    """The reason of CUDA's error, if it is a compiler that is newer than the driver; else ""."""
    driver, error = driver_cuda(), said.rpartition("(")[2].rstrip(")")
    if driver is None or error not in _ERRORS_OF_NEWER_CODE:
        return ""
    if number is None or number < len(_numbers()) or error == _RUNTIME_IS_NEWER:
        compiler, made, comes_built = "nvcc {}.{}".format(*cuda_version()), "the library", True
    elif kernel := next((kernel for kernel, own in _compiled.items() if own == number), None):
        compiler, made = kernel.compiler, "the kernel"
        comes_built = kernel.folder.parent == package_folder() / COMPILED_FOLDER
    else:
        return ""  # an image that a caller has registered
    release = tuple(map(int, re.findall(r"\d+", compiler)[:2]))
    if release <= driver:
        return ""
    instead = how_to_suit_driver(driver)
    if comes_built:
        instead = f"set CUDA_HOME to a toolkit of CUDA {driver[0]} and {HOW_TO_BUILD}"
    return f"; {newer_than_driver(f'{compiler}, which compiled {made},', driver, instead)}"


@functools.cache
def _numbers() -> dict[str, int]:
    """The library's number of each kernel that it was built with, by name."""
    library = load()
    names = [library.flash_kernel_name(number) for number in range(library.flash_kernel_count())]
    return {name.decode(): number for number, name in enumerate(names)}


@functools.cache
def _built_from() -> Mapping[str, str]:
    """The digest of the sources of each kernel of the library, by name."""
    return json.loads((package_folder() / BUILT_FROM).read_text())


def is_built(unit: Unit) -> bool:
    """Whether the library holds a kernel, compiled from its sources as they are now."""
    built_from = _built_from().get(unit.name)
    return built_from is not None and built_from == default_jit().sources.digest(unit)


def _comes_built(unit: Unit, target: str) -> bool:
    """Whether the library's machine code of a kernel is taken: not for a debugger."""
    return target in architectures() and not default_jit().debug and is_built(unit)


_registered: dict[str, int] = {}  # numbers by name
_compiled: dict[Compiled, int] = {}  # numbers of kernels that came from the cache
_kept: list[tuple[bytes, ...]] = []  # what kernels are made of: the library points to it


def register(name: str, symbol: str, image: bytes) -> None:
    """Register a kernel from an image (a cubin, a fatbin or PTX) that holds it under `symbol`.

    It replaces a kernel of the same name. The driver reads the image at the first launch, which
    raises its errors.

    Raises ValueError for a name that no config's kernel has.
    """
    config = config_from_short_form(name.partition("__")[0])
    if name not in config.kernels.values():
        raise ValueError(
            f"{config.short_form()} has no kernel {name}: {', '.join(config.kernels.values())}"
        )
    _registered[name] = _register(name, symbol, image)


def _register(name: str, symbol: str, image: bytes) -> int:
    owned = name.encode(), symbol.encode(), image + b"\0"  # PTX ends with a zero byte
    _kept.append(owned)
    return load().flash_register(*owned)


class NotCompiled(RuntimeError):
    """A kernel that would have to be compiled where that is not possible."""


def numbers(
    configs: Iterable[Config], capability: tuple[int, int], may_compile: bool = True
) -> dict[str, int]:
    """Return the library's number of each kernel of some configs for GPUs of a compute capability,
    by the kernel's name. A kernel that was neither registered nor built for them is compiled now,
    if the cache does not have it.

    Raises BuildError if a kernel does not compile, and NotCompiled for one that would have to be
    compiled if `may_compile` is not set.
    """
    found: dict[str, int] = {}
    missing: dict[str, list[Unit]] = {}
    for config in configs:
        target = config.family.target_on(f"sm_{10 * capability[0] + capability[1]}")
        for unit in units_of(config):
            if unit.name in _registered:
                found[unit.name] = _registered[unit.name]
            elif _comes_built(unit, target):
                found[unit.name] = _numbers()[unit.name]
            else:
                missing.setdefault(target, []).append(unit)
    for target, units in missing.items():
        if not may_compile and not default_jit().has(units, target):
            names = ", ".join(unit.name for unit in units)
            raise NotCompiled(f"{names} was not compiled for {target} yet")
        for kernel in default_jit().get(units, target):
            if kernel not in _compiled:
                image = kernel.cubin_path.read_bytes()
                _compiled[kernel] = _register(kernel.name, kernel.symbol, image)
            found[kernel.name] = _compiled[kernel]
    return found


def code_paths(configs: Iterable[Config], architecture: str) -> dict[str, Path]:
    """Return the file with the machine code of each kernel of some configs, by its name: the
    library, or a cubin, compiled now if the cache does not have it.

    `architecture`: such as "sm_90", which stands for sm_90a where a family is made for that.
    Raises BuildError if a kernel does not compile, and ValueError for an architecture that a
    config is not made for.
    """
    found: dict[str, Path] = {}
    missing: dict[str, list[Unit]] = {}
    for config in configs:
        target = config.family.target_on(architecture)
        for unit in units_of(config):
            if _comes_built(unit, target):
                found[unit.name] = library_path()
            else:
                missing.setdefault(target, []).append(unit)
    for target, units in missing.items():
        found |= {kernel.name: kernel.cubin_path for kernel in default_jit().get(units, target)}
    return found


def code_origins(configs: Iterable[Config], architecture: str) -> dict[str, str]:
    """Return a digest of all that the machine code of each kernel of some configs is made from, by
    its name: sources, compiler and flags. Nothing is compiled.

    `architecture`, and what is raised, as in `code_paths`.
    """
    found: dict[str, str] = {}
    for config in configs:
        target = config.family.target_on(architecture)
        for unit in units_of(config):
            if _comes_built(unit, target):
                compiler = _ptx_banner(package_folder() / PTX_FOLDER / f"{unit.name}.ptx")
                found[unit.name] = digest(_built_from()[unit.name], target, compiler, COMPILE_FLAGS)
            else:
                found[unit.name] = default_jit().key(default_jit().recipe(unit, target))
    return found


def _ptx_banner(path: Path) -> list[str]:
    """The comments with which a compiler begins a PTX text, its version among them."""
    with path.open() as lines:
        return list(itertools.takewhile(lambda line: line.startswith("//"), lines))


@functools.cache
def _listed() -> frozenset[Config]:
    return frozenset(listed_configs(sources_root(package_folder())))


def kernels() -> list[Config]:
    """Return the configs of the registry, the fastest that sweeps have found, and registered ones,
    sorted. Any other valid config can be called, too.

    Raises RuntimeError if the package is not installed.
    """
    registered = {config_from_short_form(name.partition("__")[0]) for name in _registered}
    return sorted({*_listed(), *(c for c in registered if {*c.kernels.values()} <= {*_registered})})


@functools.lru_cache(maxsize=1024)
def resolve(cfg: Config | str) -> Config:
    """Return the config that `cfg`, a config or a short form, names.

    Raises TypeError for another type; ValueError for a text that is no short form and for an
    impossible config.
    """
    if not isinstance(cfg, str | Config):
        raise TypeError(
            f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
        )
    return config_from_short_form(cfg) if isinstance(cfg, str) else cfg


# A C function of tensors: whether it launched.
QuickLaunch = Callable[..., bool]


def exchange(capsule: object) -> int | None:
    """Return the address of the table in a capsule as of DLPack's `__dlpack_c_exchange_api__`;
    None if the library does not know such a table."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    return address if load().flash_knows_exchange(address) else None


class Launcher:
    """A launch of a kernel on a device, ready except for the stream and the tensors' addresses.

    `number`: the kernel's, from `numbers`.
    """

    def __init__(self, found: Launch, number: int, device: int) -> None:
        header = _Launch(
            0,
            number,
            device,
            found.grid,
            found.cluster,
            found.block,
            found.shared_bytes,
            found.programmatic,
        )
        self._found = found
        self._number = number
        size = ctypes.sizeof(header)
        self._template = Template(
            bytes(header) + found.arguments,
            [
                Address(_Launch.stream.offset, STREAM),
                *(replace(address, member=size + address.member) for address in found.addresses),
            ],
            [(size + member, tensor_map) for member, tensor_map in found.tensor_maps],
        )
        self._launch = load().flash_launch

    def run(self, addresses: Mapping[str, int]) -> None:
        """Launch, without waiting. `addresses`: addresses of tensors and buffers, and the stream's
        handle as STREAM.

        Nothing is checked here. Raises RuntimeError with CUDA's text.
        """
        if status := self._launch(self._template.fill(addresses, encode_tensor_map)):
            check(status, self._found.kernel, self._number)

    def quick(
        self,
        exchange: int,
        device: tuple[int, int],
        tensors: Sequence[Described],
    ) -> QuickLaunch | None:
        """Return a function that launches on tensors with these layouts, at any address, on the
        current stream of their device, without waiting. It does nothing and returns False for other
        layouts, for an output that overlaps another tensor, or if CUDA refuses.

        `exchange`: the exchange table of the tensors' library. `device`: type and number, as DLPack
        has them.

        None for a launch that takes a buffer, several addresses of one tensor, or a part of one.
        """
        found = self._found
        names = [tensor.name for tensor in tensors]
        members = {x.tensor: x.member for x in found.addresses if not x.offset}
        if len(members) != len(found.addresses) or not members.keys() <= {*names}:
            return None
        size = ctypes.sizeof(_Launch)
        maps = [
            _BoundMap(size + member, names.index(x.tensor), x.offset, _tensor_map(x))
            for member, x in found.tensor_maps
        ]
        described = [
            _Tensor(
                _DLPACK_CODES[x.element],
                8 * x.element.bytes,
                1,
                len(x.shape),
                x.is_output,
                x.alignment,
                x.shape,
                x.strides,
                x.span_bytes,
                size + members[x.name] if x.name in members else 0,
            )
            for x in tensors
        ]
        launch = self._template.fill(
            dict.fromkeys([*members, STREAM], 0), lambda *_: bytes(TENSOR_MAP_BYTES)
        )
        header = _Ready(exchange, device, len(tensors), len(maps), len(launch))
        ready = b"".join(map(bytes, (header, *described, *maps))) + launch
        # not as others of the library are called, without the lock of the interpreter
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
        return prototype(("flash_ready", load()))(ready)


def _tensor_map(tensor_map: TensorMap) -> _TensorMap:
    return _TensorMap(
        len(tensor_map.dims),
        tensor_map.data_type,
        tensor_map.swizzle,
        tensor_map.promotion_mode,
        tensor_map.box,
        tensor_map.dims,
        tensor_map.strides,
    )


def encode_tensor_map(tensor_map: TensorMap, address: int) -> bytes:
    """Return the CUtensorMap whose coordinates 0 are at an address of the current device.

    Raises RuntimeError if the driver refuses it.
    """
    call = _tensor_map(tensor_map)
    # the driver wants it aligned
    memory = ctypes.create_string_buffer(2 * TENSOR_MAP_BYTES)
    start = -ctypes.addressof(memory) % TENSOR_MAP_BYTES
    where = ctypes.addressof(memory) + start
    check(load().flash_encode_tensor_map(call, address, where), f"tensor map of {tensor_map}")
    return memory.raw[start : start + TENSOR_MAP_BYTES]


def resources(config: Config, capability: tuple[int, int], device: int) -> KernelResources:
    """Return the resources of a config's main kernel on a CUDA device of a compute capability.

    Raises RuntimeError with CUDA's text, and BuildError if the kernel does not compile.
    """
    function = config.main_kernel
    name = config.kernels[function]
    found = _Resources()
    number = numbers([config], capability)[name]
    status = load().flash_kernel_resources(number, *config.block(function), device, found)
    check(status, name, number)
    return KernelResources(**{f.name: getattr(found, f.name) for f in fields(KernelResources)})


def cuda_version() -> tuple[int, int]:
    """Return the CUDA release that the library was built with, e.g. (13, 0)."""
    version = load().flash_cuda_version()
    return version // 1000, version % 1000 // 10


def architectures() -> list[str]:
    """Return the targets that the library holds code for, e.g. ["sm_80", "sm_90", "compute_80"]."""
    return load().flash_architectures().decode().split()
