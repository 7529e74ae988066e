"""The answers to the calls of one host program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_helpers.host import tensor_maps
from flash_helpers.host.device import SimulatedDevice
from flash_helpers.host.errors import CudaError
from flash_helpers.host.launches import LaunchCalls, Options
from flash_helpers.host.memory import MemoryCalls, SharedMemory
from flash_helpers.host.modules import ModuleCalls
from flash_helpers.host.wire import Connection, Request

_VERSION = re.compile(r"_v\d+$")
_BETWEEN_LAUNCHES = {"copy", "fill", "free"}
"""Operations that wait for the launches before them, and that those behind them wait for."""


class Session:
    """One program's device: its memory, modules and launches. `folder`: of files that live as long
    as the program. `refused`: the number of calls that returned an error."""

    def __init__(
        self, device: SimulatedDevice, memory: SharedMemory, folder: Path, options: Options
    ) -> None:
        self._folder = folder
        self._files = 0
        self.refused = 0
        memory_calls = MemoryCalls(memory)
        modules = ModuleCalls(device, memory, self._write)
        self.launches = LaunchCalls(device, memory, modules, options)
        self._handlers: dict[str, Callable[..., Any]] = {
            "tensor_map": tensor_maps.encoded,
            "move_tensor_map": tensor_maps.moved,
            "global": modules.global_,
        }
        for calls, names in (
            (memory_calls, "allocate allocate_visible check_visible address_taken bad_host_memory"),
            (memory_calls, "free copy fill memory_info pointer"),
            (device, "device_attribute device_name check_device"),
            (modules, "load load_file name_function name_variable name_managed function"),
            (modules, "parameters set_attribute attributes occupancy variable"),
            (self.launches, "launch"),
        ):
            self._handlers |= {name: getattr(calls, name) for name in names.split()}

    def serve(self, connection: Connection) -> None:
        """Answers until the program ends. Raises LaunchFault for a launch that ends it."""
        while (request := connection.receive()) is not None:
            try:
                result = self._result(request)
            except CudaError as error:
                self.refused += 1
                caller = _VERSION.sub("", request.caller)
                print(f"{caller}: {error}", file=sys.stderr, flush=True)
                connection.answer(error.code)
            else:
                content = result if isinstance(result, bytes) else b""
                connection.answer(0, () if content else result or (), content)

    def _result(self, request: Request) -> list[int] | bytes | None:
        """The result of a request's handler, which takes the numbers, and the bytes if there are
        any or if it always has some."""
        if request.name in _BETWEEN_LAUNCHES:
            self.launches.follows_launch = False
        takes_bytes = request.content or request.name == "launch"
        return self._handlers[request.name](
            *request.numbers, *([request.content] if takes_bytes else [])
        )

    def _write(self, content: bytes) -> Path:
        self._files += 1
        path = self._folder / f"image_{self._files}"
        path.write_bytes(content)
        return path
