"""Launches of benchmarks/hopper_cases.py in the simulator."""

import functools
from pathlib import Path

import numpy as np
from hopper_cases import Case

from flash_helpers.ptx import DeviceMemory, PtxModule, Run, load_ptx
from flash_helpers.ptx.tensor_map import TensorMap

KERNELS = Path(__file__).parent / "kernels"


@functools.cache
def module_of(name: str) -> PtxModule:
    """That of a file in KERNELS."""
    return load_ptx(KERNELS / f"{name}.ptx")


def launched(case: Case, module: PtxModule, **options: object) -> tuple[Run, np.ndarray]:
    """The run, and the output after it."""
    memory = DeviceMemory()
    addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
    run = module.kernel(case.kernel).launch(
        grid=case.grid,
        block=case.block,
        shared_bytes=case.shared_bytes,
        args=case.bind(addresses, TensorMap.encode),
        memory=memory,
        cluster=case.cluster,
        **options,
    )
    output = case.buffers[case.output]
    return run, memory.download(addresses[case.output], output.shape, output.dtype)
