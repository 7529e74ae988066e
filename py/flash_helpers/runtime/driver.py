"""Machine code from a file, loaded and launched through the CUDA driver API.

Names and numbers are those of cuda.h. A context must be current in the calling thread: PyTorch
makes its own current with the first tensor on a device.
"""

from __future__ import annotations

import ctypes
import functools

CUDA_SUCCESS = 0
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

LIBRARY = "libcuda.so.1"


class DriverError(RuntimeError):
    """The driver refused; the message holds its own text."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library with its signatures declared. Raises DriverError without one."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    integer, unsigned, pointer, text = (
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_char_p,
    )
    handles = ctypes.POINTER(pointer)
    signatures = {
        "cuGetErrorString": [integer, ctypes.POINTER(text)],
        "cuModuleLoadData": [handles, pointer],
        "cuModuleGetFunction": [handles, pointer, text],
        "cuFuncSetAttribute": [pointer, integer, integer],
        "cuLaunchKernel": [pointer, *[unsigned] * 7, pointer, handles, handles],
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
    """One kernel of a cubin in the current context, for as long as the process lives.

    A CUDA graph keeps launching a function without keeping its module alive, so no module is
    unloaded.

    smem_bytes: dynamic shared memory of a block. Raises DriverError.
    """

    def __init__(self, cubin: bytes, symbol: str, smem_bytes: int) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, symbol.encode())
        self._smem_bytes = smem_bytes
        _call(
            "cuFuncSetAttribute",
            self._function,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem_bytes,
        )

    def launch(
        self, grid: tuple[int, int, int], n_threads: int, stream: int, args: ctypes.Structure
    ) -> None:
        """Launch with one argument, a structure, on a stream handle, without waiting."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        _call(
            "cuLaunchKernel",
            self._function,
            *grid,
            *(n_threads, 1, 1),
            self._smem_bytes,
            stream,
            parameters,
            None,
        )
