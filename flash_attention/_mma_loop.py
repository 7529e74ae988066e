"""The library's loop of mma.sync, whose speed is the ceiling of every kernel here."""

from __future__ import annotations

import ctypes

import torch

from flash_attention import _library
from flash_helpers.kernel_configs import DType

ITERATIONS = 65536


class _Shape(ctypes.Structure):
    """FlashMmaLoop."""

    _fields_ = (
        ("n_blocks", ctypes.c_int),
        ("n_threads", ctypes.c_int),
        ("operations", ctypes.c_int64),
    )


class MmaLoop:
    """mma.sync m16n8k16 on registers, `iterations` times over, on every SM of a CUDA device.

    sums: a number for each thread, (blocks, threads), written by a launch.

    Raises RuntimeError with CUDA's text, or if the library was built without the loop.
    """

    def __init__(self, dtype: DType, device: torch.device, iterations: int = ITERATIONS) -> None:
        self._library = _with_signatures(_library.load())
        self._arguments = (int(dtype), iterations)
        self._device = device
        shape = _Shape()
        self._check(self._library.flash_mma_loop_describe(iterations, device.index, shape))
        self.operations: int = shape.operations
        self.sums = torch.empty(shape.n_blocks, shape.n_threads, device=device)

    def launch(self) -> None:
        """Launch on the current stream, without waiting."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._check(
            self._library.flash_mma_loop(
                *self._arguments, self.sums.data_ptr(), self._device.index, stream
            )
        )

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"loop of mma.sync: {self._library.flash_last_error().decode()}")


def _with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    signatures = {
        "flash_mma_loop_describe": [integer, integer, ctypes.POINTER(_Shape)],
        "flash_mma_loop": [integer, integer, pointer, integer, pointer],
    }
    for name, arguments in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise RuntimeError(
                f"the kernel library has no {name}: build it again with `pip install . ./py`"
            ) from error
        function.restype, function.argtypes = integer, arguments
    return library
