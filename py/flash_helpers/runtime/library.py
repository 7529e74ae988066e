"""The C ABI of libflash_attention.so, bound with ctypes.

The library and the PTX of its kernels are data of the package flash_attention, which is found and
not imported. The structures mirror src/flash_attention.cu, field by field.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from flash_helpers.compile.build import LIBRARY, PTX_FOLDER
from flash_helpers.kernel_configs import Config, DType, config_from_short_form, nearest_config
from flash_helpers.registry.config import difference_text
from flash_helpers.registry.launch import TENSOR_MAP_BYTES, Address, Launch, Template, TensorMap

STREAM = "stream"  # its handle, among the addresses of a launch

_UINT = ctypes.c_uint
_HOW_TO_BUILD = "build it with `pip install . ./py` in the repository"


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
    )


class _TensorMap(ctypes.Structure):
    """FlashTensorMap."""

    _fields_ = (
        ("rank", _UINT),
        ("dtype", _UINT),
        ("swizzle", _UINT),
        ("box", _UINT * 5),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
    )


class _BoundMap(ctypes.Structure):
    """FlashBoundMap."""

    _fields_ = (
        ("member", ctypes.c_uint64),
        ("tensor", ctypes.c_uint64),
        ("map", _TensorMap),
    )


class _Ready(ctypes.Structure):
    """FlashReady."""

    _fields_ = (
        ("exchange", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dtype", ctypes.c_int),
        ("chunk_bytes", _UINT),
        ("shapes", ctypes.c_int64 * 4 * 4),
        ("strides", ctypes.c_int64 * 4 * 4),
        ("span_bytes", ctypes.c_uint64 * 4),
        ("members", ctypes.c_uint64 * 4),
        ("launch_bytes", ctypes.c_uint64),
        ("n_maps", ctypes.c_uint64),
        ("maps", _BoundMap * 4),
    )


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one device.

    registers and local_bytes (spills and stack): per thread. static_smem_bytes and
    dynamic_smem_bytes: shared memory per block. max_threads: per block, with these registers.
    resident_blocks_per_sm: blocks that one multiprocessor runs at a time.
    """

    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    local_bytes: int
    max_threads: int
    resident_blocks_per_sm: int


class _Resources(ctypes.Structure):
    _fields_ = tuple((field.name, ctypes.c_int) for field in fields(KernelResources))


def package_folder() -> Path:
    """Where the installed package flash_attention keeps the library. Raises RuntimeError."""
    spec = importlib.util.find_spec("flash_attention")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the package flash_attention is not installed: {_HOW_TO_BUILD}")
    return Path(spec.origin).resolve().parent


def library_path() -> Path:
    """The kernel library. Raises RuntimeError if it is not there."""
    path = package_folder() / LIBRARY
    if not path.is_file():
        raise RuntimeError(f"{path} is not there: {_HOW_TO_BUILD}")
    return path


def ptx_path(config: Config) -> Path:
    """The PTX of a built kernel, which the package ships."""
    return package_folder() / PTX_FOLDER / f"{config.short_form()}.ptx"


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its signatures declared. Raises RuntimeError if it does not load."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise RuntimeError(
            f"the kernel library cannot be loaded ({error}): {_HOW_TO_BUILD}"
        ) from error
    integer, text, pointer = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
    signatures = {
        "flash_kernel_count": (integer, []),
        "flash_kernel_name": (text, [integer]),
        "flash_launch": (integer, [text]),  # bytes that begin with a _Launch
        "flash_knows_exchange": (integer, [pointer]),
        "flash_encode_tensor_map": (integer, [ctypes.POINTER(_TensorMap), pointer, pointer]),
        "flash_kernel_resources": (
            integer,
            [text, integer, integer, integer, ctypes.POINTER(_Resources)],
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
                f"{_HOW_TO_BUILD}"
            ) from error
        function.restype, function.argtypes = result, arguments
    return library


def check(status: int, what: str) -> None:
    """Raises RuntimeError with the library's text unless the status is 0."""
    if status:
        raise RuntimeError(f"{what}: {load().flash_last_error().decode()}")


@functools.cache
def _built() -> Mapping[Config, int]:
    """The library's number of each kernel, by config, in the order of configs."""
    library = load()
    names = [library.flash_kernel_name(number) for number in range(library.flash_kernel_count())]
    built = {config_from_short_form(name.decode()): number for number, name in enumerate(names)}
    return MappingProxyType(dict(sorted(built.items())))


def kernels() -> list[Config]:
    """The configs that the library was built with, sorted.

    Raises RuntimeError if the library is not there.
    """
    return list(_built())


@functools.lru_cache(maxsize=1024)
def resolve(cfg: Config | str) -> Config:
    """The built config that `cfg`, a config or a short form, names.

    Raises TypeError for another type; ValueError for a text that is no short form, for an
    impossible config, and for one that was not built.
    """
    if not isinstance(cfg, str | Config):
        raise TypeError(
            f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
        )
    config = config_from_short_form(cfg) if isinstance(cfg, str) else cfg
    if config not in _built():
        nearest = nearest_config(config, _built())
        raise ValueError(
            f"{config.short_form()} was not built; the nearest that was is {nearest.short_form()} "
            f"({difference_text(config, nearest)}). To build it, list it in a JSON file, run "
            "tools/build/generate_kernel_instantiations.py --configs FILE, then pip install ."
        )
    return config


# A C function of q, k, v and o: whether it launched.
QuickLaunch = Callable[[object, object, object, object], bool]


def exchange(capsule: object) -> int | None:
    """The address of the table in a capsule as of DLPack's `__dlpack_c_exchange_api__`; None if the
    library does not know such a table."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    return address if load().flash_knows_exchange(address) else None


class Launcher:
    """A launch of a built kernel on a device, ready but for the stream and where tensors begin."""

    def __init__(self, found: Launch, device: int) -> None:
        call = _Launch(
            0,
            _built()[found.config],
            device,
            found.grid,
            found.cluster,
            found.block,
            found.shared_bytes,
        )
        self._found = found
        size = ctypes.sizeof(call)
        self._template = Template(
            bytes(call) + found.arguments,
            [
                Address(_Launch.stream.offset, STREAM),
                *(replace(address, member=size + address.member) for address in found.addresses),
            ],
            [(size + member, tensor_map) for member, tensor_map in found.tensor_maps],
        )
        self._launch = load().flash_launch
        self.workspace_bytes = found.workspace_bytes

    def run(self, addresses: Mapping[str, int]) -> None:
        """Launch, without waiting. addresses: of the tensors, and the stream's handle as STREAM.

        Nothing is checked here. Raises RuntimeError with CUDA's text.
        """
        if status := self._launch(self._template.fill(addresses, encode_tensor_map)):
            check(status, self._found.config.short_form())

    def quick(
        self,
        exchange: int,
        device: tuple[int, int],
        shapes: Sequence[tuple[int, ...]],
        strides: Sequence[tuple[int, ...]],
        span_bytes: tuple[int, ...],
    ) -> QuickLaunch | None:
        """Launches for q, k, v and o that are laid out as those of a call that was checked are,
        wherever they begin in memory: on the current stream of their device, without waiting. It
        returns False, and does nothing, for others, if o overlaps another, or if CUDA refuses.

        exchange: of the library that the tensors are of. device: type and number, as DLPack has
        them. shapes, strides, in elements, and span_bytes, from a tensor's first byte to the one
        behind its last: of q, k, v and o.

        None for a launch that takes anything but the addresses of the four, and at most four tensor
        maps of them.
        """
        found = self._found
        members = {x.tensor: x.member for x in found.addresses if not x.offset}
        maps = [
            _BoundMap(ctypes.sizeof(_Launch) + member, "qkvo".index(x.tensor), _tensor_map(x))
            for member, x in found.tensor_maps
        ]
        takes_more = len(maps) > 4 or found.workspace_bytes or len(found.addresses) > 4
        if takes_more or members.keys() != {*"qkvo"}:
            return None
        launch = self._template.fill(
            dict.fromkeys([*members, STREAM], 0), lambda *_: bytes(TENSOR_MAP_BYTES)
        )
        header = _Ready(
            exchange,
            device,
            found.config.dtype,
            found.config.supports.chunk_bytes,
            *(tuple((ctypes.c_int64 * 4)(*x) for x in sizes) for sizes in (shapes, strides)),
            span_bytes,
            tuple(ctypes.sizeof(_Launch) + members[name] for name in "qkvo"),
            len(launch),
            len(maps),
            (_BoundMap * 4)(*maps),
        )
        # not as others of the library are called, without the lock of the interpreter
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
        return prototype(("flash_ready", load()))(bytes(header) + launch)


def _tensor_map(tensor_map: TensorMap) -> _TensorMap:
    return _TensorMap(
        len(tensor_map.dims),
        DType.from_name(tensor_map.dtype),
        tensor_map.swizzle,
        tensor_map.box,
        tensor_map.dims,
        tensor_map.strides,
    )


def encode_tensor_map(tensor_map: TensorMap, address: int) -> bytes:
    """The CUtensorMap of a tensor that begins at an address of the current device.

    Raises RuntimeError if the driver refuses it.
    """
    call = _tensor_map(tensor_map)
    # the driver wants it aligned
    memory = ctypes.create_string_buffer(2 * TENSOR_MAP_BYTES)
    start = -ctypes.addressof(memory) % TENSOR_MAP_BYTES
    where = ctypes.addressof(memory) + start
    check(load().flash_encode_tensor_map(call, address, where), f"tensor map of {tensor_map}")
    return memory.raw[start : start + TENSOR_MAP_BYTES]


def resources(cfg: Config | str, device: int) -> KernelResources:
    """What a built kernel takes on a CUDA device.

    Raises ValueError for a config that was not built, and RuntimeError with CUDA's text.
    """
    config = resolve(cfg)
    found = _Resources()
    status = load().flash_kernel_resources(
        config.short_form().encode(), config.n_threads, config.smem_bytes, device, found
    )
    check(status, config.short_form())
    return KernelResources(**{name: getattr(found, name) for name, _ in _Resources._fields_})


def cuda_version() -> tuple[int, int]:
    """The CUDA release that the library was built with, e.g. (13, 0)."""
    version = load().flash_cuda_version()
    return version // 1000, version % 1000 // 10


def architectures() -> list[str]:
    """What the library holds code for, e.g. ["sm_80", "sm_90", "compute_80"]."""
    return load().flash_architectures().decode().split()
