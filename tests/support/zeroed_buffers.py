"""Buffers that the kernels of a call find full of zeros and leave so."""

import numpy as np
import pytest

from flash_helpers.ptx import DeviceMemory
from flash_helpers.runtime import simulator


class ZeroedBuffers:
    """Those of calls in the simulator, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[tuple[DeviceMemory, int, int]] = []

        class Memory(DeviceMemory):
            def upload(self, values: np.ndarray, behind: int = 0) -> int:
                address = super().upload(values, behind)
                if values.dtype == np.uint8 and not values.any():  # a buffer of zeros
                    found.append((self, address, values.size))
                return address

        monkeypatch.setattr(simulator, "DeviceMemory", Memory)
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def are_zeros(self) -> bool:
        """Whether they hold zeros now."""
        return not any(
            memory.download(address, size, np.dtype(np.uint8)).any()
            for memory, address, size in self._found
        )
