"""The library's loop of mma.sync, whose speed is the ceiling of every kernel here."""

from __future__ import annotations

import ctypes

import torch

from flash_helpers.kernel_configs import Element
from flash_helpers.runtime import library

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

    `sums`: one number per thread, (blocks, threads), written by a launch.

    Raises RuntimeError with CUDA's text.
    """

    def __init__(self, dtype: Element, device: torch.device, iterations: int = ITERATIONS) -> None:
        self._library = library.load()
        self._arguments = (int(dtype), iterations)
        self._device = device
        shape = _Shape()
        self._check(
            self._library.flash_mma_loop_describe(iterations, device.index, ctypes.byref(shape))
        )
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
        library.check(status, "loop of mma.sync")
