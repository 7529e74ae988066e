"""A reader of PTX and a simulator that runs it on NumPy: it computes, watches and counts.

memory = DeviceMemory()
x = memory.upload(array)
run = load_ptx(path).kernel("name").launch(grid=8, block=128, args=[x, 1024], memory=memory)
memory.download(x, array.shape, array.dtype)
run.counters.total.bank_conflicts
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flash_helpers.ptx.errors import *  # noqa: F403 - every kind of error
from flash_helpers.ptx.read.flow import Phase as Phase
from flash_helpers.ptx.read.reader import read_ptx as read_ptx
from flash_helpers.ptx.run.count.counts import Counts as Counts
from flash_helpers.ptx.run.count.counts import LineCounts as LineCounts
from flash_helpers.ptx.run.count.counts import Role as Role
from flash_helpers.ptx.tensor_map import TensorMap as TensorMap

if TYPE_CHECKING:
    from flash_helpers.ptx.run.asynchronous.warpgroups import ComputedProduct as ComputedProduct
    from flash_helpers.ptx.run.count.counters import Counters as Counters
    from flash_helpers.ptx.run.execute.observe import Observation as Observation
    from flash_helpers.ptx.run.execute.observe import Observer as Observer
    from flash_helpers.ptx.run.kernel import Kernel as Kernel
    from flash_helpers.ptx.run.kernel import Run as Run
    from flash_helpers.ptx.run.loading import PtxModule as PtxModule
    from flash_helpers.ptx.run.loading import load_ptx as load_ptx
    from flash_helpers.ptx.run.memory.regions import DeviceMemory as DeviceMemory

# the simulator imports NumPy; a caller that only reads PTX does not wait for it
_RUNNING = {
    "count.counters": ("Counters",),
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
