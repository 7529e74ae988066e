"""Machine code or PTX, loaded and launched through the CUDA driver API.

Names and numbers are those of cuda.h. A context must be current in the calling thread: PyTorch
makes its own current with the first tensor on a device.
"""

from __future__ import annotations

import ctypes
import functools
import math

from flash_helpers.registry.launch import Launch

CUDA_SUCCESS = 0
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4

LIBRARY = "libcuda.so.1"


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes, of which a cluster's three sizes are the
    first."""

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


class LoadedKernel:
    """One kernel of a module in the current context, for as long as the process lives.

    A CUDA graph keeps launching a function without keeping its module alive, so no module is
    unloaded.

    image: a cubin, or PTX that the driver compiles. smem_bytes: dynamic shared memory of a block.
    Raises DriverError.
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
        """Launch on a stream handle, without waiting. arguments: of `Launch.bind`."""
        self.start(found.grid, found.block, arguments, stream, found.shared_bytes, found.cluster)

    def start(
        self,
        grid: tuple[int, int, int],
        block: int,
        arguments: bytes,
        stream: int = 0,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """Launch on a stream handle, 0 for the default stream, without waiting. arguments: the
        kernel's one parameter. The rest as in `Launch`."""
        memory = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        dimensions = _Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value=cluster)
        config = _LaunchConfig(
            (*grid, block, 1, 1),
            shared_bytes,
            stream,
            ctypes.pointer(dimensions),
            int(math.prod(cluster) > 1),
        )
        _call("cuLaunchKernelEx", ctypes.byref(config), self._function, parameters, None)
