"""Machine code or PTX, loaded and launched through the CUDA driver API.

Names and numbers are those of cuda.h. A context must be current in the calling thread: PyTorch
makes its own current with the first tensor on a device.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

from flash_helpers import gpu
from flash_helpers.ptx.tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, TensorMap
from flash_helpers.registry.call import Launch

CUDA_SUCCESS = 0
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

_DTYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
_SWIZZLES = ("none", "32B", "64B", "128B")
_PROMOTIONS = ("none", "64B", "128B", "256B")
_FILLS = ("zeros", "nan")
"""Enumerations of tensor maps: CUtensorMapDataType, -Swizzle, -L2promotion, -FloatOOBfill, from 0
on."""

_COUNTED_CLUSTERS = (2, 4, 8)  # blocks
_COUNTED_PER_SM = (1, 2, 3, 4)  # blocks
_SMEM_UNIT = 1024  # bytes
_EMPTY_KERNEL = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
"""

LIBRARY = "libcuda.so.1"
CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes, of which a cluster's three sizes, or one
    number, are the first."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. sizes: of the grid, then of a block."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """The driver refused; the message holds its own text."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library with its signatures declared. Raises DriverError without one."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    integer, pointer, text = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
    handles = ctypes.POINTER(pointer)
    signatures = {
        "cuGetErrorString": [integer, ctypes.POINTER(text)],
        "cuModuleLoadData": [handles, pointer],
        "cuModuleGetFunction": [handles, pointer, text],
        "cuFuncSetAttribute": [pointer, integer, integer],
        "cuLaunchKernelEx": [ctypes.POINTER(_LaunchConfig), pointer, handles, handles],
        "cuOccupancyMaxActiveClusters": [
            *(ctypes.POINTER(integer), pointer, ctypes.POINTER(_LaunchConfig)),
        ],
        "cuTensorMapEncodeTiled": [
            *(pointer, integer, ctypes.c_uint, pointer, pointer, pointer, pointer, pointer),
            *(integer, integer, integer, integer),
        ],
        "cuStreamGetCaptureInfo_v2": [  # of CUDA 11.3 and 12, which later drivers have as well
            *(pointer, ctypes.POINTER(integer), ctypes.POINTER(ctypes.c_uint64)),
            *(pointer, pointer, pointer),
        ],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = integer, arguments
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(driver(), name)(*arguments)
    if status != CUDA_SUCCESS:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "an unknown error"
        raise DriverError(f"{name}: {said} (CUresult {status})")


def capture_of(stream: int) -> int | None:
    """Return the number of the capture into a CUDA graph that a stream is part of; None for none.
    Raises DriverError if the driver refuses the stream."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    places = ctypes.byref(status), ctypes.byref(number)
    _call("cuStreamGetCaptureInfo_v2", stream, *places, None, None, None)
    return number.value if status.value == CAPTURE_ACTIVE else None


def encode_tensor_map(tensor_map: TensorMap) -> bytes:
    """The argument that a kernel takes. Raises DriverError if the driver refuses the map."""
    m, rank = tensor_map, len(tensor_map.dims)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    shift = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    _call(
        "cuTensorMapEncodeTiled",
        *(ctypes.addressof(memory) + shift, _DTYPES.index(m.dtype), rank, m.address),
        *((ctypes.c_uint64 * rank)(*m.dims), (ctypes.c_uint64 * rank)(*m.strides)),
        *((ctypes.c_uint32 * rank)(*m.box), (ctypes.c_uint32 * rank)(*m.element_strides)),
        *(0, _SWIZZLES.index(m.swizzle)),  # without interleaving
        *(_PROMOTIONS.index(m.l2_promotion), _FILLS.index(m.fill)),
    )
    return memory.raw[shift:][:TENSOR_MAP_BYTES]


class LoadedKernel:
    """One kernel of a module in the current context, for as long as the process lives.

    A CUDA graph keeps launching a function without keeping its module alive, so no module is
    unloaded.

    `image`: a cubin, or PTX that the driver compiles. `smem_bytes`: dynamic shared memory of a
    block. Raises DriverError.
    """

    def __init__(self, image: bytes, symbol: str, smem_bytes: int) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), image)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, symbol.encode())
        _call(
            "cuFuncSetAttribute",
            self._function,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem_bytes,
        )

    def launch(self, found: Launch, arguments: bytes, stream: int) -> None:
        """Launch on a stream handle, without waiting. `arguments`: the bytes that `Launch.bind`
        returns."""
        self.start(
            found.grid,
            found.block,
            [arguments],
            stream,
            found.shared_bytes,
            found.cluster,
            programmatic=found.programmatic,
        )

    def start(
        self,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[bytes],
        stream: int = 0,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        *,
        programmatic: bool = False,
    ) -> None:
        """Launch on a stream handle, 0 for the default stream, without waiting. `arguments`: the
        kernel's parameters. The rest as in `Launch`."""
        memory = [ctypes.create_string_buffer(a, len(a)) for a in arguments]
        parameters = (ctypes.c_void_p * len(memory))(*map(ctypes.addressof, memory))
        attributes = []
        if math.prod(cluster) > 1:
            attributes.append(_Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value=cluster))
        if programmatic:
            number = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes.append(_Attribute(number, value=(1,)))
        config = _launch_config(grid, block, shared_bytes, stream, attributes)
        _call("cuLaunchKernelEx", ctypes.byref(config), self._function, parameters, None)

    def most_clusters(self, blocks: int, n_threads: int, shared_bytes: int) -> int:
        """Return the clusters of so many blocks that the device of the current context has room
        for at the same time. n_threads, shared_bytes: of a block."""
        size = _Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value=(blocks, 1, 1))
        config = _launch_config((blocks, 1, 1), n_threads, shared_bytes, 0, [size])
        found = ctypes.c_int()
        places = ctypes.byref(found), self._function, ctypes.byref(config)
        _call("cuOccupancyMaxActiveClusters", *places)
        return found.value


def _launch_config(
    grid: tuple[int, int, int],
    block: int,
    shared_bytes: int,
    stream: int,
    attributes: Sequence[_Attribute],
) -> _LaunchConfig:
    memory = (_Attribute * len(attributes))(*attributes)
    place = ctypes.cast(memory, ctypes.POINTER(_Attribute))  # keeps the memory alive
    return _LaunchConfig((*grid, block, 1, 1), shared_bytes, stream, place, len(attributes))


def counted_clusters(capability: int) -> tuple[tuple[int, int, int], ...]:
    """Return the blocks of a cluster, the blocks that an SM has room for, and the clusters that the
    device of the current context has room for (`gpu.Device.counted`). The count is of blocks of a
    warp, which share out the memory of an SM.

    `capability`: such as 90, from which on there are clusters. Raises DriverError.
    """
    most = gpu.SMEM_BYTES[capability]
    kernel = LoadedKernel(_EMPTY_KERNEL, "empty", most)
    reserved = gpu.RESERVED_SMEM_BYTES
    return tuple(
        (blocks, per_sm, kernel.most_clusters(blocks, gpu.WARP, share - reserved))
        for per_sm in _COUNTED_PER_SM
        for share in [(most + reserved) // per_sm // _SMEM_UNIT * _SMEM_UNIT]
        for blocks in _COUNTED_CLUSTERS
    )
