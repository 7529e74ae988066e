"""A reader of PTX and a simulator that runs it on NumPy: it computes, watches and counts.

memory = DeviceMemory()
x = memory.upload(array)
run = load_ptx(path).kernel("name").launch(grid=8, block=128, args=[x, 1024], memory=memory)
memory.download(x, array.shape, array.dtype)
run.counters.total.bank_conflicts
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flash_helpers.ptx.errors import (
    AbsentBlockError,
    AssertError,
    BarrierError,
    BarrierOperandError,
    BulkCopyError,
    ClusterBarrierError,
    DeadlockError,
    EarlyReleaseLint,
    InstructionLimitError,
    LaunchError,
    LeftArrivalsLint,
    Lint,
    MatrixDescriptorError,
    MbarrierError,
    MisalignedError,
    MissingLanesError,
    NeverReadLint,
    NotPtxError,
    NotResidentError,
    OutlivedError,
    OutOfBoundsError,
    OverlappingStoresLint,
    PendingCopyError,
    ProxyError,
    PtxError,
    PtxSyntaxError,
    RaceError,
    RegisterCountError,
    SimulatorError,
    TrapError,
    UnfinishedError,
    UninitialisedReadError,
    UnsupportedInstruction,
    WarpgroupError,
    WgmmaFenceError,
    WgmmaRegisterError,
    ZeroFillLint,
)
from flash_helpers.ptx.read.flow import Phase
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.ptx.run.count.counters import Counters, LineCounts, Role
from flash_helpers.ptx.run.count.counts import Counts
from flash_helpers.ptx.tensor_map import TensorMap

if TYPE_CHECKING:
    from flash_helpers.ptx.run.asynchronous.warpgroups import ComputedProduct
    from flash_helpers.ptx.run.execute.observe import Observation, Observer
    from flash_helpers.ptx.run.kernel import Kernel, Run
    from flash_helpers.ptx.run.loading import PtxModule, load_ptx
    from flash_helpers.ptx.run.memory.regions import DeviceMemory

__all__ = [
    "AbsentBlockError",
    "AssertError",
    "BarrierError",
    "BarrierOperandError",
    "BulkCopyError",
    "ClusterBarrierError",
    "ComputedProduct",
    "Counters",
    "Counts",
    "DeadlockError",
    "DeviceMemory",
    "EarlyReleaseLint",
    "InstructionLimitError",
    "Kernel",
    "LaunchError",
    "LeftArrivalsLint",
    "LineCounts",
    "Lint",
    "MatrixDescriptorError",
    "MbarrierError",
    "MisalignedError",
    "MissingLanesError",
    "NeverReadLint",
    "NotPtxError",
    "NotResidentError",
    "Observation",
    "Observer",
    "OutOfBoundsError",
    "OutlivedError",
    "OverlappingStoresLint",
    "PendingCopyError",
    "Phase",
    "ProxyError",
    "PtxError",
    "PtxModule",
    "PtxSyntaxError",
    "RaceError",
    "RegisterCountError",
    "Role",
    "Run",
    "SimulatorError",
    "TensorMap",
    "TrapError",
    "UnfinishedError",
    "UninitialisedReadError",
    "UnsupportedInstruction",
    "WarpgroupError",
    "WgmmaFenceError",
    "WgmmaRegisterError",
    "ZeroFillLint",
    "load_ptx",
    "read_ptx",
]

# what runs kernels needs NumPy, which those who only read PTX do not wait for
_RUNNING = {
    "kernel": ("Kernel", "Run"),
    "loading": ("PtxModule", "load_ptx"),
    "memory.regions": ("DeviceMemory",),
    "execute.observe": ("Observation", "Observer"),
    "asynchronous.warpgroups": ("ComputedProduct",),
}


def __getattr__(name: str) -> Any:
    for module, names in _RUNNING.items():
        if name in names:
            return getattr(import_module(f"flash_helpers.ptx.run.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
