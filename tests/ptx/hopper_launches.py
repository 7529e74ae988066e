"""Launches of benchmarks/hopper_cases.py in the simulator."""

from __future__ import annotations

import numpy as np
from hopper_cases import Case

from flash_helpers.ptx import DeviceMemory, PtxModule
from flash_helpers.ptx.tensor_map import TensorMap


def launched(case: Case, module: PtxModule, seed: int | None = None) -> np.ndarray:
    """The output after the launch."""
    memory = DeviceMemory()
    addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
    module.kernel(case.kernel).launch(
        grid=case.grid,
        block=case.block,
        shared_bytes=case.shared_bytes,
        args=case.bind(addresses, TensorMap.encode),
        memory=memory,
        cluster=case.cluster,
        seed=seed,
    )
    output = case.buffers[case.output]
    return memory.download(addresses[case.output], output.shape, output.dtype)
