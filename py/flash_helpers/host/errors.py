"""Errors of host programs."""

from __future__ import annotations


class HostError(Exception):
    """The program cannot be built or started; the message says what to do."""


class CudaError(Exception):
    """A call that CUDA refuses, too. `code`: the error that the call returns, as cudaError_t and
    CUresult number it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_SYMBOL = 13
INVALID_FUNCTION = 98
INVALID_DEVICE = 101
INVALID_IMAGE = 200
NO_IMAGE_FOR_DEVICE = 209
NOT_FOUND = 500
NOT_SUPPORTED = 801
INVALID_CLUSTER_SIZE = 912
